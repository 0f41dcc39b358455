//! Connection of a process to the store.

use super::error::PeerError;
use super::force_exit::{self, ExitHook, FORCE_EXIT_AFTER};
use super::protocol::{self, Attempt, GatherMode, MAGIC, Request, Response};
use super::rendezvous::Rendezvous;
use crate::base::abort::{Abort, lock};
use crate::base::divergence::LocalProgress;
use crate::base::failure::{Failure, FailureKind};
use crate::base::suspend::suspended;
use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Period of heartbeats.
const HEARTBEAT_PERIOD: Duration = Duration::from_millis(200);
/// Pause between two attempts to find the store.
const RETRY_PERIOD: Duration = Duration::from_millis(50);
/// Time for a server to answer [`Request::Hello`] before it counts as another program's.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a process that has timed out waits for the store's report of host positions.
const FAILURE_ECHO_TIMEOUT: Duration = Duration::from_secs(1);
type Parts = Vec<Vec<u8>>;

struct Shared {
    process: u32,
    /// Time at which the store last sent anything. It answers every heartbeat.
    heard_at: Mutex<Instant>,
    /// Time for which the store may be silent before it counts as lost.
    silence: Duration,
    /// By request: answers that no thread has taken yet.
    answers: Mutex<BTreeMap<u64, Result<Parts, PeerError>>>,
    changed: Condvar,
    failure_seen: AtomicBool,
    /// The process that failed and the cause. There is no process if the store is lost.
    failure: Mutex<Option<(Option<u32>, String)>>,
    /// Host positions at the time of the failure, as the end of its message.
    divergence: Mutex<String>,
    abort: Mutex<Weak<Abort>>,
    progress: Mutex<Weak<LocalProgress>>,
    closed: AtomicBool,
    exit_hook: Mutex<Option<ExitHook>>,
}

/// See the module documentation.
pub(super) struct Client {
    shared: Arc<Shared>,
    out: Arc<Mutex<TcpStream>>,
    requests: AtomicU64,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client(process {})", self.shared.process)
    }
}

impl Client {
    /// Connects to the store, retrying until the rendezvous times out.
    pub(super) fn connect(rendezvous: &Rendezvous) -> Result<Self, PeerError> {
        let end = Instant::now() + rendezvous.timeout;
        let mut last = "nothing was tried".to_owned();
        let mut attempt = Attempt {
            instance: random(),
            number: 0,
        };
        loop {
            for port in &rendezvous.ports {
                attempt.number += 1;
                match say_hello(rendezvous, *port, attempt) {
                    Ok((stream, silence)) => return Self::start(rendezvous, stream, silence),
                    Err(HelloError::Rejected(why)) => return Err(PeerError::Failed(why)),
                    Err(HelloError::NoStore(why)) => last = format!("port {port}: {why}"),
                }
            }
            if Instant::now() >= end {
                return Err(PeerError::Timeout(format!(
                    "rank {} could not reach the store of this run, which rank 0 opens, at {} within {:.1?} ({last})",
                    rendezvous.process, rendezvous.host, rendezvous.timeout
                )));
            }
            std::thread::sleep(RETRY_PERIOD);
        }
    }

    fn start(
        rendezvous: &Rendezvous,
        stream: TcpStream,
        silence: Duration,
    ) -> Result<Self, PeerError> {
        let words = |e: io::Error| PeerError::Failed(format!("the connection to the store: {e}"));
        let shared = Arc::new(Shared {
            process: rendezvous.process,
            heard_at: Mutex::new(Instant::now()),
            silence,
            answers: Mutex::default(),
            changed: Condvar::new(),
            failure_seen: AtomicBool::new(false),
            failure: Mutex::default(),
            divergence: Mutex::default(),
            abort: Mutex::default(),
            progress: Mutex::default(),
            closed: AtomicBool::new(false),
            exit_hook: Mutex::default(),
        });
        let from = stream.try_clone().map_err(words)?;
        let ends = stream.try_clone().map_err(words)?;
        let out = Arc::new(Mutex::new(stream));
        let reading = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("store answers".to_owned())
            .spawn(move || {
                let shared = &reading;
                let mut from = Monitored { from, shared };
                while let Some(response) = protocol::read(&mut from)
                    .ok()
                    .and_then(|f| Response::decode(&f))
                {
                    shared.receive(response);
                }
                shared.lost("it ended");
            })
            .map_err(words)?;
        let (beating, heart) = (Arc::clone(&shared), Arc::clone(&out));
        std::thread::Builder::new()
            .name("heart".to_owned())
            .spawn(move || beating.send_heartbeats(&heart, &ends))
            .map_err(words)?;
        Ok(Self {
            shared,
            out,
            requests: AtomicU64::new(0),
        })
    }

    /// Watches a session. Failures of other processes end its waits, and heartbeats carry its
    /// progress.
    pub(super) fn watch(&self, abort: &Arc<Abort>, progress: Weak<LocalProgress>) {
        *lock(&self.shared.progress) = progress;
        *lock(&self.shared.abort) = Arc::downgrade(abort);
        // The failure may have arrived before this call.
        let before = lock(&self.shared.failure).clone();
        if let Some((process, cause)) = before {
            self.shared.end_waits(process, &cause);
        }
    }

    /// Sets the hook that ends this process if it is still alive some time after a failure.
    pub(super) fn set_exit_hook(&self, f: ExitHook) {
        *lock(&self.shared.exit_hook) = Some(f);
    }

    /// Returns the cause of the run's failure, if it has failed.
    pub(super) fn failure(&self) -> Option<String> {
        let failure = lock(&self.shared.failure);
        failure.as_ref().map(|(_, cause)| cause.clone())
    }

    /// Stores `data` under `key` for `uses` answers; 0 means any number.
    pub(super) fn put(&self, key: &str, uses: u32, data: Vec<u8>) -> Result<(), PeerError> {
        let key = key.to_owned();
        self.send(&Request::Put { key, uses, data })
    }

    /// Waits for the data of `key`. `slow` allows for a producer that takes several times the
    /// timeout.
    pub(super) fn get(&self, key: &str, slow: bool) -> Result<Vec<u8>, PeerError> {
        let key = key.to_owned();
        let parts = self.request(|request| Request::Get { request, key, slow })?;
        Ok(parts.into_iter().next().unwrap_or_default())
    }

    /// Gathers the `data` of all processes under `key`.
    pub(super) fn gather(
        &self,
        key: String,
        mode: GatherMode,
        data: Vec<u8>,
    ) -> Result<Parts, PeerError> {
        self.request(|request| Request::Gather {
            request,
            key,
            mode,
            data,
        })
    }

    /// Reports that this process has failed.
    pub(super) fn fail(&self, cause: &str) {
        self.report_failure(cause, false);
    }

    /// Reports that a wait of this process has timed out. Returns the host positions that the store
    /// attaches to the first failure of the run, whether that is this failure or another.
    pub(super) fn fail_timed_out(&self, cause: &str) -> String {
        self.report_failure(cause, true);
        let (end, shared) = (Instant::now() + FAILURE_ECHO_TIMEOUT, &self.shared);
        let mut answers = lock(&shared.answers);
        while lock(&shared.failure).is_none() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            answers = shared
                .changed
                .wait_timeout(answers, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        lock(&shared.divergence).clone()
    }

    fn report_failure(&self, cause: &str, timed_out: bool) {
        if self.failure().is_none() {
            let cause = cause.to_owned();
            // If the connection is lost, every process already knows.
            let _ = self.send(&Request::Fail { cause, timed_out });
        }
    }

    fn send(&self, message: &Request) -> Result<(), PeerError> {
        if let Some(cause) = self.failure() {
            return Err(PeerError::Failed(cause));
        }
        let sent = protocol::write(&mut *lock(&self.out), &message.encode());
        sent.map_err(|e| {
            PeerError::Failed(
                self.failure()
                    .unwrap_or_else(|| lost_message(&e.to_string())),
            )
        })
    }

    fn request(&self, message: impl FnOnce(u64) -> Request) -> Result<Parts, PeerError> {
        let request = self.requests.fetch_add(1, Ordering::Relaxed);
        self.send(&message(request))?;
        let mut answers = lock(&self.shared.answers);
        loop {
            if let Some(answer) = answers.remove(&request) {
                return answer;
            }
            if let Some(cause) = self.failure() {
                return Err(PeerError::Failed(cause));
            }
            // A failure in another thread of this process is only visible here.
            if let Some(abort) = lock(&self.shared.abort).upgrade()
                && let Some(first) = abort.failures().first()
            {
                return Err(PeerError::Failed(first.to_string()));
            }
            answers = self
                .shared
                .changed
                .wait_timeout(answers, HEARTBEAT_PERIOD)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Disconnects from the store.
    pub(super) fn disconnect(&self) {
        if self.shared.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let out = &mut *lock(&self.out);
        // A store that no longer exists needs no message.
        let _ = protocol::write(out, &Request::Disconnect.encode());
        let _ = out.shutdown(Shutdown::Write);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.disconnect();
        let _ = lock(&self.out).shutdown(Shutdown::Both);
    }
}

impl Shared {
    /// Handles a message of the store.
    fn receive(self: &Arc<Self>, response: Response) {
        let (request, answer) = match response {
            Response::Answer { request, parts } => (request, Ok(parts)),
            Response::TimedOut { request, why } => (request, Err(PeerError::Timeout(why))),
            Response::Failed {
                process,
                cause,
                divergence,
            } => {
                let words = format!("{cause}{divergence}");
                *lock(&self.divergence) = divergence;
                return self.failed(Some(process), &words);
            }
            Response::Welcome { .. }
            | Response::OtherRun { .. }
            | Response::Refused { .. }
            | Response::Alive => return,
        };
        lock(&self.answers).insert(request, answer);
        self.changed.notify_all();
    }

    /// Handles the loss of the store.
    fn lost(self: &Arc<Self>, why: &str) {
        if !self.closed.load(Ordering::SeqCst) {
            self.failed(None, &lost_message(why));
        }
    }

    /// Sends heartbeats until the client is closed, and detects a store that no longer answers.
    fn send_heartbeats(self: &Arc<Self>, out: &Mutex<TcpStream>, ends: &TcpStream) {
        let mut last = Instant::now();
        while !self.closed.load(Ordering::SeqCst) {
            let now = Instant::now();
            if !suspended(now - last).is_zero() {
                *lock(&self.heard_at) = now;
            }
            last = now;
            let silent = now.saturating_duration_since(*lock(&self.heard_at));
            if silent >= self.silence {
                self.lost(&format!("no answer for {silent:.1?}"));
                // This ends blocked reads and writes of other threads.
                let _ = ends.shutdown(Shutdown::Both);
                break;
            }
            let (progress, running) = lock(&self.abort).upgrade().map_or((0, 0), |a| a.pulse());
            let local = lock(&self.progress).upgrade();
            let heartbeat = Request::Heartbeat {
                progress,
                running,
                ranks: local.map(|l| l.snapshot()).unwrap_or_default(),
            };
            // Another thread that holds the connection is sending, which counts as a sign of life.
            // Its message may be long, and the store may be slow to read it.
            if let Ok(mut out) = out.try_lock()
                && protocol::write(&mut *out, &heartbeat.encode()).is_err()
            {
                break;
            }
            std::thread::sleep(HEARTBEAT_PERIOD);
        }
    }

    fn failed(self: &Arc<Self>, process: Option<u32>, cause: &str) {
        if self.failure_seen.swap(true, Ordering::SeqCst) {
            return;
        }
        // Threads that the failure wakes must find the cause in the session.
        self.end_waits(process, cause);
        *lock(&self.failure) = Some((process, cause.to_owned()));
        {
            let _held = lock(&self.answers);
            self.changed.notify_all();
        }
        let shared = Arc::clone(self);
        force_exit::after(FORCE_EXIT_AFTER, cause.to_owned(), move || {
            let hook = lock(&shared.exit_hook).clone();
            hook.filter(|_| !shared.closed.load(Ordering::SeqCst))
        });
    }

    /// Ends the waits of this process's ranks after a failure of another process or of the store.
    /// Failures that this process itself has reported have already ended them.
    fn end_waits(&self, process: Option<u32>, cause: &str) {
        if process == Some(self.process) {
            return;
        }
        if let Some(abort) = lock(&self.abort).upgrade()
            && !abort.aborted()
        {
            abort.fail(Failure {
                kind: FailureKind::Remote,
                rank: process.unwrap_or(0),
                stream: None,
                instr: None,
                text: String::new(),
                message: cause.to_owned(),
            });
        }
    }
}

fn lost_message(why: &str) -> String {
    format!(
        "lost the connection to the store: {why}; the process that runs it (rank 0 or the launcher) died or hangs"
    )
}

/// Reads from the store and records when bytes arrive, because a store that sends a long answer is
/// not silent.
struct Monitored<'a> {
    from: TcpStream,
    shared: &'a Shared,
}

impl Read for Monitored<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let bytes = self.from.read(room)?;
        *lock(&self.shared.heard_at) = Instant::now();
        Ok(bytes)
    }
}

/// Why [`Request::Hello`] failed.
enum HelloError {
    /// No store of this run is listening at this address (yet).
    NoStore(String),
    /// The store rejects this process.
    Rejected(String),
}

/// Connects to the store at a port. Returns the connection, and the time for which the store may be
/// silent.
fn say_hello(
    rendezvous: &Rendezvous,
    port: u16,
    attempt: Attempt,
) -> Result<(TcpStream, Duration), HelloError> {
    let no_store = |e: io::Error| HelloError::NoStore(e.to_string());
    let addresses = (rendezvous.host.as_str(), port)
        .to_socket_addrs()
        .map_err(no_store)?;
    let mut stream = None;
    let mut last = HelloError::NoStore("the host has no address".to_owned());
    for address in addresses {
        match TcpStream::connect_timeout(&address, HELLO_TIMEOUT) {
            Ok(s) => {
                stream = Some(s);
                break;
            }
            Err(e) => last = no_store(e),
        }
    }
    let Some(mut stream) = stream else {
        return Err(last);
    };
    stream.set_nodelay(true).map_err(no_store)?;
    stream
        .set_read_timeout(Some(HELLO_TIMEOUT))
        .map_err(no_store)?;
    let hello = Request::Hello {
        process: rendezvous.process,
        processes: rendezvous.processes,
        run: rendezvous.run.clone(),
        location: location(),
        attempt,
    };
    stream.write_all(MAGIC).map_err(no_store)?;
    protocol::write(&mut stream, &hello.encode()).map_err(no_store)?;
    let answer = protocol::read(&mut stream).map_err(no_store)?;
    match Response::decode(&answer) {
        Some(Response::Welcome { silence_ms }) => {
            stream.set_read_timeout(None).map_err(no_store)?;
            Ok((stream, Duration::from_millis(silence_ms)))
        }
        // Another run may have its store at this port.
        Some(Response::OtherRun { run }) => Err(HelloError::NoStore(format!(
            "this is the store of run `{run}`, not of `{}`",
            rendezvous.run
        ))),
        Some(Response::Refused { why }) => Err(HelloError::Rejected(why)),
        _ => Err(HelloError::NoStore(
            "another program is listening there".to_owned(),
        )),
    }
}

/// Formats host and process id of this process, for messages.
fn location() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "this host",
        name => name,
    };
    format!("{host}, process {}", std::process::id())
}

/// Returns a number that identifies this process. It comes from the keys of the system's hasher,
/// which are random.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const SILENCE: Duration = Duration::from_millis(700);

    /// Connects a process to a store that welcomes it and then runs `store` on the connection.
    fn get_from(store: impl FnOnce(TcpStream) + Send) -> (PeerError, Duration) {
        with_store(1, store, |client| {
            let start = Instant::now();
            let error = client.get("a key without data", false).unwrap_err();
            (error, start.elapsed())
        })
    }

    /// Runs `what` in a process that is connected to such a store.
    fn with_store<T>(
        process: u32,
        store: impl FnOnce(TcpStream) + Send,
        what: impl FnOnce(&Client) -> T,
    ) -> T {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let rendezvous = Rendezvous {
            host: "127.0.0.1".to_owned(),
            ports: vec![listener.local_addr().unwrap().port()],
            process,
            processes: 2,
            run: "quiet".to_owned(),
            timeout: HELLO_TIMEOUT,
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut magic = [0; MAGIC.len()];
                stream.read_exact(&mut magic).unwrap();
                protocol::read(&mut stream).unwrap();
                let silence_ms = SILENCE.as_millis() as u64;
                protocol::write(&mut stream, &Response::Welcome { silence_ms }.encode()).unwrap();
                store(stream);
            });
            what(&Client::connect(&rendezvous).unwrap())
        })
    }

    /// This includes rank 0, if the launcher runs the store.
    #[test]
    fn a_lost_store_ends_the_waits_of_every_process() {
        for process in [0, 1] {
            let abort = Arc::new(Abort::new(HELLO_TIMEOUT));
            with_store(process, drop, |client| {
                client.watch(&abort, Weak::new());
                while !abort.aborted() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let words = abort.failures()[0].to_string();
            assert!(
                words.contains("lost the connection to the store"),
                "{words}"
            );
        }
    }

    #[test]
    fn a_store_that_hangs_is_lost() {
        // It neither reads nor sends, and its connection stays open, like that of a stopped
        // process.
        let (done, ended) = std::sync::mpsc::channel::<()>();
        let hang = move |stream: TcpStream| {
            let _ = ended.recv();
            drop(stream);
        };
        let (error, took) = with_store(1, hang, |client| {
            let _done = done;
            let start = Instant::now();
            let error = client.get("a key without data", false).unwrap_err();
            (error, start.elapsed())
        });
        let words = error.to_string();
        assert!(words.contains("no answer for"), "{words}");
        assert!(took >= SILENCE, "{took:?}");
    }

    #[test]
    fn a_store_that_answers_heartbeats_is_not_lost() {
        let (error, took) = get_from(|mut stream| {
            let end = Instant::now() + 3 * SILENCE;
            while Instant::now() < end {
                protocol::read(&mut stream).unwrap();
                protocol::write(&mut stream, &Response::Alive.encode()).unwrap();
            }
        });
        let words = error.to_string();
        assert!(words.contains("it ended"), "{words}");
        assert!(took >= 3 * SILENCE, "{took:?}");
    }

    #[test]
    fn a_long_answer_is_not_silence() {
        let (error, took) = get_from(|mut stream| {
            let answer = Response::Answer {
                request: 0,
                parts: vec![vec![7; 12]],
            };
            let frame = answer.encode();
            let mut bytes = (frame.len() as u64).to_le_bytes().to_vec();
            bytes.extend(&frame);
            // It arrives byte by byte, and never ends.
            bytes.pop();
            for byte in bytes {
                stream.write_all(&[byte]).unwrap();
                std::thread::sleep(SILENCE / 8);
            }
        });
        let words = error.to_string();
        assert!(words.contains("it ended"), "{words}");
        assert!(took > 2 * SILENCE, "{took:?}");
    }
}
