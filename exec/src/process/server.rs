//! The store: keeps data for processes, runs gathers, and detects missing processes.
//!
//! It runs in the launcher, or in the process of rank 0 if another launcher started the ranks. Each
//! connection has one thread that reads and one that writes. Another thread checks time limits.

use super::protocol::{self, Attempt, MAGIC, Request, Response};
use super::rendezvous::StoreOptions;
use super::state::{Changes, State};
use crate::base::abort::lock;
use crate::base::suspend::suspended;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Period of the check of time limits.
const TICK: Duration = Duration::from_millis(20);
/// Time for a new connection to send [`Request::Hello`].
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

struct Shared {
    options: StoreOptions,
    state: Mutex<State>,
    /// By process: queue of the thread that writes to it.
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
    /// Serves on a listening socket.
    ///
    /// # Errors
    /// Fails if a thread cannot be started.
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
                    // A connection without a thread is closed, which its process notices.
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
                    let suspended = suspended(now.saturating_duration_since(last));
                    ticking.change(|s| {
                        if !suspended.is_zero() {
                            s.resume(suspended, now);
                        }
                        s.tick(now)
                    });
                    last = now;
                }
            })?;
        Ok(Self { shared, address })
    }

    /// Returns the address that the store listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reports the failure of a process on its behalf. Only the first failure of a run counts.
    pub fn fail(&self, process: u32, cause: &str) {
        self.shared.change(|s| s.fail(process, cause));
    }

    /// Returns the process and the cause of the first failure.
    #[must_use]
    pub fn failure(&self) -> Option<(u32, String)> {
        lock(&self.shared.state).failure()
    }

    /// Waits until every process has disconnected or is lost, for at most `timeout`. Returns
    /// whether all have.
    #[must_use]
    pub fn wait_for_disconnects(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
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
        // Wakes the thread that accepts connections.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(200));
    }
}

impl Shared {
    /// Changes the state, and sends the resulting messages.
    fn change(&self, f: impl FnOnce(&mut State) -> Changes) {
        // Frames are sent in the order in which they were produced.
        let mut state = lock(&self.state);
        let changes = f(&mut state);
        if changes.is_empty() {
            return;
        }
        let writers = lock(&self.writers);
        for (process, response) in changes {
            if let Some(Some(writer)) = writers.get(process as usize) {
                // If the writer no longer exists, the connection has ended, which its reader
                // notices.
                let _ = writer.send(response.encode());
            }
        }
    }

    /// Handles a connection until it ends.
    fn serve(&self, mut stream: TcpStream) {
        let Some((process, attempt)) = self.welcome(&mut stream) else {
            return;
        };
        let mut disconnected = false;
        while let Ok(frame) = protocol::read(&mut stream) {
            let Some(message) = Request::decode(&frame) else {
                self.change(|s| s.fail(process, "it sent a message that the store cannot read"));
                break;
            };
            if message == Request::Disconnect {
                disconnected = true;
            }
            self.change(|s| s.handle(process, message, Instant::now()));
        }
        let mut state = lock(&self.state);
        let is_last = disconnected || state.connection_lost(process, attempt, Instant::now());
        if is_last && let Some(writer) = lock(&self.writers).get_mut(process as usize) {
            *writer = None;
        }
    }

    /// Reads the hello of a connection, and admits a process of this run.
    fn welcome(&self, stream: &mut TcpStream) -> Option<(u32, Attempt)> {
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(HELLO_TIMEOUT)).ok()?;
        let mut magic = [0; MAGIC.len()];
        stream.read_exact(&mut magic).ok()?;
        if &magic != MAGIC {
            return None;
        }
        let hello = Request::decode(&protocol::read(stream).ok()?)?;
        let Request::Hello {
            process,
            processes,
            run,
            location,
            attempt,
        } = hello
        else {
            return None;
        };
        let mut out = stream.try_clone().ok()?;
        let (sender, frames) = channel::<Vec<u8>>();
        let o = &self.options;
        let refused = |why| Response::Refused { why };
        let refusal = if run != o.run {
            Some(Response::OtherRun { run: o.run.clone() })
        } else if processes != o.processes {
            Some(refused(format!(
                "rank {process} was started with {processes} ranks, rank 0 with {}",
                o.processes
            )))
        } else {
            let silence_ms = o.silence.as_millis() as u64;
            let _ = sender.send(Response::Welcome { silence_ms }.encode());
            let admitted = self.admit(process, attempt, &location, sender);
            admitted.err().map(refused)
        };
        if let Some(refusal) = refusal {
            let _ = protocol::write(stream, &refusal.encode());
            // Closing only the write side lets the message arrive before the end of the connection,
            // even if the process has sent data that nothing reads.
            let _ = stream.shutdown(Shutdown::Write);
            return None;
        }
        stream.set_read_timeout(None).ok()?;
        std::thread::Builder::new()
            .name("store writer".to_owned())
            .spawn(move || {
                for frame in frames {
                    if protocol::write(&mut out, &frame).is_err() {
                        break;
                    }
                }
                let _ = out.shutdown(Shutdown::Both);
            })
            .ok()?;
        // The process may have missed that the run has failed.
        self.change(|s| s.known_failure(process));
        Some((process, attempt))
    }

    /// Admits a process and registers its writer under the same lock, because another attempt of
    /// the same process may be handled at the same time.
    fn admit(
        &self,
        process: u32,
        attempt: Attempt,
        location: &str,
        sender: Sender<Vec<u8>>,
    ) -> Result<(), String> {
        let mut state = lock(&self.state);
        state.join(process, attempt, location, Instant::now())?;
        if let Some(writer) = lock(&self.writers).get_mut(process as usize) {
            *writer = Some(sender);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
