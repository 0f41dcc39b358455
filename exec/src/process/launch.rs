//! Starts one process a rank on this host, and sees to it that none is left.

use super::environment::{OWN_RANK, OWN_RUN, OWN_STORE, OWN_WORLD};
use super::server::{Server, StoreOptions};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Between two looks at the children.
const LOOK: Duration = Duration::from_millis(20);
/// How long after a connection has ended the exit status may still come and say more.
const GRACE: Duration = Duration::from_millis(500);

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Ranks.
    pub ranks: u32,
    /// Program, with its arguments.
    pub program: PathBuf,
    /// Arguments, the same for each.
    pub args: Vec<OsString>,
    /// How long ranks may be missing or idle.
    pub timeout: Duration,
    /// How long the others may take to end in good order after one has failed; then they are killed.
    pub farewell: Duration,
}

/// What a terminal has asked the launcher for; asked now and then.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// Whether the run is to end in good order (Ctrl-C).
    pub interrupted: &'a dyn Fn() -> bool,
    /// Whether it is to stop until it is told to go on (Ctrl-Z); each time is said once.
    pub stopped: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for Asked<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asked")
    }
}

/// How a run of several processes ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// By rank: exit status, or the signal that ended it as a negative number.
    pub status: Vec<i32>,
    /// The first failure: rank and cause, as far as the launcher knows it.
    pub failure: Option<(u32, String)>,
    /// Ranks that something else than the launcher has ended by a signal, before the launcher ended any, and how.
    pub struck: Vec<(u32, String)>,
}

impl Ended {
    /// Whether all ranks have done what they were to do.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.status.iter().all(|s| *s == 0)
    }

    /// Ranks that were ended from outside, and that the first failure does not tell of: others may have noticed what was missing
    /// and said so before the launcher saw why.
    pub fn unsaid(&self) -> impl Iterator<Item = &(u32, String)> {
        let told = self.failure.as_ref().map_or("", |(_, cause)| cause);
        self.struck
            .iter()
            .filter(move |(_, how)| !told.contains(how.as_str()))
    }

    /// The rank that failed first, where one is known, and its exit status.
    #[must_use]
    pub fn first(&self) -> Option<(u32, i32)> {
        let bad = |r: u32| self.status.get(r as usize).copied().filter(|s| *s != 0);
        let named = self
            .failure
            .as_ref()
            .and_then(|(r, _)| Some((*r, bad(*r)?)));
        named.or_else(|| (0..self.status.len() as u32).find_map(|r| Some((r, bad(r)?))))
    }
}

/// Children that are killed when this is dropped: whatever happens, none is left.
struct Children(Vec<(Child, Option<ExitStatus>)>);

impl Drop for Children {
    fn drop(&mut self) {
        for (child, status) in &mut self.0 {
            if status.is_none() {
                // It may have ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// Starts the ranks and waits for their end. The ranks are in process groups of their own, so that what a terminal sends
/// reaches the launcher only: an interruption is passed on to rank 0, and a stop to all. Were the launcher alone to stop, the
/// ranks would miss the store, which is here.
///
/// # Errors
/// When no port is free, or a process cannot be started.
pub fn launch(what: &Launch, asked: Asked<'_>) -> io::Result<Ended> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    let run = format!("{}-{}", std::process::id(), address.port());
    let options = StoreOptions {
        grace: GRACE,
        ..StoreOptions::new(what.ranks, &run, what.timeout)
    };
    let server = Server::start(listener, options)?;
    let mut children = Children(Vec::new());
    for rank in 0..what.ranks {
        let mut command = Command::new(&what.program);
        command
            .args(&what.args)
            .env(OWN_RANK, rank.to_string())
            .env(OWN_WORLD, what.ranks.to_string())
            .env(OWN_STORE, address.to_string())
            .env(OWN_RUN, &run)
            .env(super::guard::PARENT, std::process::id().to_string())
            // Ends when the launcher does.
            .stdin(Stdio::piped())
            .process_group(0);
        if rank > 0 {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        if let Some(errors) = child.stderr.take() {
            // A rank without this thread is heard of by its status only.
            let _ = std::thread::Builder::new()
                .name(format!("errors of rank {rank}"))
                .spawn(move || {
                    for line in BufReader::new(errors).lines().map_while(Result::ok) {
                        // In one piece: rank 0 writes to the same place, lines that programs read among them.
                        let line = format!("[rank {rank}] {line}\n");
                        let _ = io::stderr().write_all(line.as_bytes());
                    }
                });
        }
        children.0.push((child, None));
    }
    wait(what, &server, &mut children, asked)
}

fn wait(
    what: &Launch,
    server: &Server,
    children: &mut Children,
    asked: Asked<'_>,
) -> io::Result<Ended> {
    let mut told = false;
    let mut doomed: Option<Instant> = None;
    let (mut struck, mut killing) = (Vec::new(), false);
    loop {
        let mut running = 0;
        for (rank, (child, status)) in (0u32..).zip(&mut children.0) {
            if status.is_some() {
                continue;
            }
            match child.try_wait()? {
                None => running += 1,
                Some(ended) => {
                    *status = Some(ended);
                    if ended.signal().is_some() && !killing {
                        struck.push((rank, ending(ended)));
                    }
                    if !ended.success() {
                        server.fail(rank, &format!("rank {rank} {}", ending(ended)));
                    }
                }
            }
        }
        if running == 0 {
            break;
        }
        if (asked.stopped)() {
            let begin = Instant::now();
            let running = children.0.iter().filter(|(_, status)| status.is_none());
            super::guard::stop_with(running.map(|(child, _)| child));
            doomed = doomed.map(|end| end + begin.elapsed());
        }
        if (asked.interrupted)() && !std::mem::replace(&mut told, true) {
            super::guard::interrupt(&children.0[0].0);
        }
        // The store knows of failures before a process has ended.
        let failed = server.failure().is_some();
        match doomed {
            None if failed => doomed = Some(Instant::now() + what.farewell),
            Some(end) if Instant::now() >= end => {
                killing = true;
                for (child, status) in &mut children.0 {
                    if status.is_none() {
                        let _ = child.kill();
                    }
                }
                doomed = Some(Instant::now() + what.farewell);
            }
            _ => {}
        }
        std::thread::sleep(LOOK);
    }
    let status = children.0.iter().map(|(_, s)| s.map_or(-1, number));
    Ok(Ended {
        status: status.collect(),
        failure: server.failure(),
        struck,
    })
}

fn number(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| -status.signal().unwrap_or(1))
}

/// How a process ended, as in `it {ending}`.
#[must_use]
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit status {code}"),
        (None, Some(9)) => {
            "was killed (signal 9: by a user, or because the host ran out of memory)".to_owned()
        }
        (None, Some(signal)) => format!("was terminated by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests;
