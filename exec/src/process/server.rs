//! The store: keeps what processes leave, brings gatherings together, and notices who is missing.
//!
//! It lives in the launcher, or in the process of rank 0 where something else started the ranks. Each connection has a
//! thread that reads and one that writes; one more thread looks at the clock.

use super::state::{Changes, State};
use super::wire::{self, Ask, Attempt, MAGIC, Tell};
use crate::device::abort::lock;
use crate::stopped::stopped;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Between two looks at the clock.
const TICK: Duration = Duration::from_millis(20);
/// How long a new connection may take to say who it is.
const HELLO: Duration = Duration::from_secs(10);

/// How a store behaves.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Processes of the run.
    pub processes: u32,
    /// Distinguishes runs that meet at the same port.
    pub run: String,
    /// How long processes may be missing from a gathering without moving.
    pub timeout: Duration,
    /// How long a process may be silent, or the store to it: hearts beat several times a second, and it answers.
    pub silence: Duration,
    /// How long after a connection has ended its process counts as lost. Whoever started the process may know more and
    /// say so meanwhile.
    pub grace: Duration,
}

impl StoreOptions {
    /// For a run of so many processes.
    #[must_use]
    pub fn new(processes: u32, run: &str, timeout: Duration) -> Self {
        Self {
            processes,
            run: run.to_owned(),
            timeout,
            silence: timeout.max(Duration::from_secs(10)),
            grace: Duration::ZERO,
        }
    }
}

struct Shared {
    options: StoreOptions,
    state: Mutex<State>,
    /// By process: where its writer takes frames from.
    writers: Mutex<Vec<Option<Sender<Vec<u8>>>>>,
    closed: AtomicBool,
}

/// A running store. Dropping it ends all connections.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({})", self.address)
    }
}

impl Server {
    /// Serves on a socket that listens.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn start(listener: TcpListener, options: StoreOptions) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(&options, Instant::now())),
            writers: Mutex::new(vec![None; options.processes as usize]),
            closed: AtomicBool::new(false),
            options,
        });
        let accepting = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                for stream in listener.incoming() {
                    if accepting.closed.load(Ordering::SeqCst) {
                        break;
                    }
                    let Ok(stream) = stream else { continue };
                    let shared = Arc::clone(&accepting);
                    // A connection without a thread ends; its process hears of it.
                    let _ = std::thread::Builder::new()
                        .name("store connection".to_owned())
                        .spawn(move || shared.serve(stream));
                }
            })?;
        let ticking = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("store clock".to_owned())
            .spawn(move || {
                let mut last = Instant::now();
                while !ticking.closed.load(Ordering::SeqCst) {
                    std::thread::sleep(TICK);
                    let now = Instant::now();
                    let stopped = stopped(now.saturating_duration_since(last));
                    ticking.change(|s| {
                        if !stopped.is_zero() {
                            s.go_on(stopped, now);
                        }
                        s.tick(now)
                    });
                    last = now;
                }
            })?;
        Ok(Self { shared, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Says on behalf of a process that it cannot go on. Only the first failure of a run counts.
    pub fn fail(&self, process: u32, cause: &str) {
        self.shared.change(|s| s.fail(process, cause));
    }

    /// The first failure: process and cause.
    #[must_use]
    pub fn failure(&self) -> Option<(u32, String)> {
        lock(&self.shared.state).failure()
    }

    /// Waits until every process has taken leave or is lost, for `patience` at most; whether they have.
    #[must_use]
    pub fn wait_for_leave(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        loop {
            if lock(&self.shared.state).is_over() {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(TICK / 4);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        lock(&self.shared.writers).clear();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(200));
    }
}

impl Shared {
    /// Changes the state, and sends what follows from it.
    fn change(&self, f: impl FnOnce(&mut State) -> Changes) {
        // Frames go out in the order in which they came about.
        let mut state = lock(&self.state);
        let changes = f(&mut state);
        if changes.is_empty() {
            return;
        }
        let writers = lock(&self.writers);
        for (process, tell) in changes {
            if let Some(Some(writer)) = writers.get(process as usize) {
                // A writer that is gone had its connection end, which is noticed by its reader.
                let _ = writer.send(tell.encode());
            }
        }
    }

    fn serve(&self, mut stream: TcpStream) {
        let Some((process, attempt)) = self.greet(&mut stream) else {
            return;
        };
        let mut said_bye = false;
        while let Ok(frame) = wire::read(&mut stream) {
            let Some(ask) = Ask::decode(&frame) else {
                self.change(|s| s.fail(process, "it sent a message that the store cannot read"));
                break;
            };
            if ask == Ask::Bye {
                said_bye = true;
            }
            self.change(|s| s.hear(process, ask, Instant::now()));
        }
        let mut state = lock(&self.state);
        let is_last = said_bye || state.disconnected(process, attempt, Instant::now());
        if is_last && let Some(writer) = lock(&self.writers).get_mut(process as usize) {
            *writer = None;
        }
    }

    /// Lets a process of this run in.
    fn greet(&self, stream: &mut TcpStream) -> Option<(u32, Attempt)> {
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(HELLO)).ok()?;
        let mut magic = [0; MAGIC.len()];
        stream.read_exact(&mut magic).ok()?;
        if &magic != MAGIC {
            return None;
        }
        let hello = Ask::decode(&wire::read(stream).ok()?)?;
        let Ask::Hello {
            process,
            processes,
            run,
            place,
            attempt,
        } = hello
        else {
            return None;
        };
        let mut out = stream.try_clone().ok()?;
        let (sender, frames) = channel::<Vec<u8>>();
        let o = &self.options;
        let refusal = if run != o.run {
            Some(format!(
                "this is the store of run `{}`, not of `{run}`",
                o.run
            ))
        } else if processes != o.processes {
            Some(format!(
                "rank {process} believes in {processes} ranks, rank 0 in {}",
                o.processes
            ))
        } else {
            let silence_ms = o.silence.as_millis() as u64;
            let _ = sender.send(Tell::Welcome { silence_ms }.encode());
            self.admit(process, attempt, &place, sender).err()
        };
        if let Some(why) = refusal {
            let _ = wire::write(stream, &Tell::Refused { why }.encode());
            // The word arrives before the end of the connection only if nothing unread is thrown away.
            let _ = stream.shutdown(Shutdown::Write);
            return None;
        }
        stream.set_read_timeout(None).ok()?;
        std::thread::Builder::new()
            .name("store writer".to_owned())
            .spawn(move || {
                for frame in frames {
                    if wire::write(&mut out, &frame).is_err() {
                        break;
                    }
                }
                let _ = out.shutdown(Shutdown::Both);
            })
            .ok()?;
        // It may have missed that the run has failed.
        self.change(|s| s.welcome(process));
        Some((process, attempt))
    }

    /// Notes who has joined and where it takes frames from at once: another attempt of its may be here at the same time.
    fn admit(
        &self,
        process: u32,
        attempt: Attempt,
        place: &str,
        sender: Sender<Vec<u8>>,
    ) -> Result<(), String> {
        let mut state = lock(&self.state);
        state.join(process, attempt, place, Instant::now())?;
        if let Some(writer) = lock(&self.writers).get_mut(process as usize) {
            *writer = Some(sender);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
