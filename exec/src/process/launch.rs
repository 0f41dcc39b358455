//! Starts one process per rank on this host, and ensures that no process remains.

use super::environment::{OWN_RANK, OWN_RUN, OWN_STORE, OWN_WORLD};
use super::rendezvous::StoreOptions;
use super::server::Server;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Period of the check of the children.
const POLL_PERIOD: Duration = Duration::from_millis(20);
/// Time after the end of a connection during which the exit status, which is more informative, may
/// still arrive.
const GRACE: Duration = Duration::from_millis(500);

/// Processes to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Number of ranks.
    pub ranks: u32,
    /// Executable.
    pub program: PathBuf,
    /// Arguments, equal for all ranks.
    pub args: Vec<OsString>,
    /// Time for which ranks may be missing or make no progress.
    pub timeout: Duration,
    /// Time for the other ranks to shut down after one has failed, before they are killed.
    pub shutdown_grace: Duration,
}

/// Requests from the terminal, which the launcher polls.
#[derive(Clone, Copy)]
pub struct ControlSignals<'a> {
    /// Returns whether the run should shut down (Ctrl-C).
    pub interrupted: &'a dyn Fn() -> bool,
    /// Returns whether the run should be suspended (Ctrl-Z), once per request.
    pub suspended: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for ControlSignals<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ControlSignals")
    }
}

/// How a run of several processes ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchOutcome {
    /// By rank: exit status, or the negated number of the signal that ended it.
    pub status: Vec<i32>,
    /// The first failure that the launcher knows about: rank and cause.
    pub failure: Option<(u32, String)>,
    /// Ranks that a signal ended before the launcher killed any, and how they ended.
    pub killed: Vec<(u32, String)>,
}

impl LaunchOutcome {
    /// Returns the ranks in `killed` that the first failure does not mention. Another rank may have
    /// reported a missing peer before the launcher saw how that peer ended.
    pub fn unreported_kills(&self) -> impl Iterator<Item = &(u32, String)> {
        let reported = self.failure.as_ref().map_or("", |(_, cause)| cause);
        self.killed
            .iter()
            .filter(move |(_, how)| !reported.contains(how.as_str()))
    }

    /// Returns the rank that failed first and its exit status, if known.
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

/// Children. They are killed on drop.
struct Children(Vec<(Child, Option<ExitStatus>)>);

impl Drop for Children {
    fn drop(&mut self) {
        for (child, status) in &mut self.0 {
            if status.is_none() {
                // The child may have ended in the meantime.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// Starts the ranks and waits until all have ended.
///
/// Each rank has its own process group, so signals of a terminal reach only the launcher. The
/// launcher forwards an interrupt to rank 0 and a suspension to all ranks: if only the launcher
/// were suspended, the ranks would lose the store, which runs here.
///
/// # Errors
/// Fails if no port is free or a process cannot be started.
pub fn launch(what: &Launch, signals: ControlSignals<'_>) -> io::Result<LaunchOutcome> {
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
            .env(super::signals::PARENT, std::process::id().to_string())
            // Ends with the launcher.
            .stdin(Stdio::piped())
            .process_group(0);
        if rank > 0 {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        if let Some(errors) = child.stderr.take() {
            // Without this thread, only the exit status of the rank is known.
            let _ = std::thread::Builder::new()
                .name(format!("errors of rank {rank}"))
                .spawn(move || {
                    for line in BufReader::new(errors).lines().map_while(Result::ok) {
                        // Written in one piece, because rank 0 writes to the same stream, including
                        // lines that programs parse.
                        let line = format!("[rank {rank}] {line}\n");
                        let _ = io::stderr().write_all(line.as_bytes());
                    }
                });
        }
        children.0.push((child, None));
    }
    wait(what, &server, &mut children, signals)
}

fn wait(
    what: &Launch,
    server: &Server,
    children: &mut Children,
    signals: ControlSignals<'_>,
) -> io::Result<LaunchOutcome> {
    let mut interrupted = false;
    let mut kill_at: Option<Instant> = None;
    let (mut killed, mut killing) = (Vec::new(), false);
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
                        killed.push((rank, describe_exit(ended)));
                    }
                    if !ended.success() {
                        server.fail(rank, &format!("rank {rank} {}", describe_exit(ended)));
                    }
                }
            }
        }
        if running == 0 {
            break;
        }
        if (signals.suspended)() {
            let begin = Instant::now();
            let running = children.0.iter().filter(|(_, status)| status.is_none());
            super::signals::suspend_with(running.map(|(child, _)| child));
            kill_at = kill_at.map(|end| end + begin.elapsed());
        }
        if (signals.interrupted)() && !std::mem::replace(&mut interrupted, true) {
            super::signals::interrupt(&children.0[0].0);
        }
        // The store learns about failures before a process has ended.
        let failed = server.failure().is_some();
        match kill_at {
            None if failed => kill_at = Some(Instant::now() + what.shutdown_grace),
            Some(end) if Instant::now() >= end => {
                killing = true;
                for (child, status) in &mut children.0 {
                    if status.is_none() {
                        let _ = child.kill();
                    }
                }
                kill_at = Some(Instant::now() + what.shutdown_grace);
            }
            _ => {}
        }
        std::thread::sleep(POLL_PERIOD);
    }
    let status = children.0.iter().map(|(_, s)| s.map_or(-1, number));
    Ok(LaunchOutcome {
        status: status.collect(),
        failure: server.failure(),
        killed,
    })
}

fn number(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| -status.signal().unwrap_or(1))
}

/// Describes how a process ended, as a verb phrase: `ended with exit status 1`.
#[must_use]
pub fn describe_exit(status: ExitStatus) -> String {
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
