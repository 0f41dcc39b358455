//! A process's connection to the store.

use super::peers::PeerError;
use super::wire::{self, Ask, Attempt, MAGIC, Mode, Tell};
use crate::device::abort::{Abort, Failure, FailureKind, lock};
use crate::engine::standing::Standings;
use crate::stopped::stopped;
use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Between two heartbeats.
const BEAT: Duration = Duration::from_millis(200);
/// Between two attempts to find the store.
const AGAIN: Duration = Duration::from_millis(50);
/// How long a server may take to answer a greeting before it counts as somebody else's.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a process that has given up waits for what the store says to it.
const ECHO: Duration = Duration::from_secs(1);
/// How long a process may take to end in good order after another one has failed.
pub(super) const LAST_RESORT: Duration = Duration::from_secs(10);

/// Where and as whom to look for the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Host of the store.
    pub host: String,
    /// Ports, in the order in which they are tried: the first ones may be somebody else's.
    pub ports: Vec<u16>,
    /// This process.
    pub process: u32,
    /// How many there are.
    pub processes: u32,
    /// Distinguishes runs.
    pub run: String,
    /// How long to look for the store.
    pub timeout: Duration,
}

/// Called when a process has failed and this one is still there a while later: some call cannot be interrupted.
pub type LastResort = Arc<dyn Fn(&str) + Send + Sync>;

type Parts = Vec<Vec<u8>>;

struct Shared {
    process: u32,
    /// When anything came from the store last: it answers every beat.
    heard: Mutex<Instant>,
    /// How long it may be silent.
    silence: Duration,
    /// By request: an answer that nobody has fetched yet.
    answers: Mutex<BTreeMap<u64, Result<Parts, PeerError>>>,
    changed: Condvar,
    heard_failure: AtomicBool,
    /// The process that failed (`None`: the store is lost), and why.
    failure: Mutex<Option<(Option<u32>, String)>>,
    /// Where hosts stood then, as the end of its words.
    apart: Mutex<String>,
    abort: Mutex<Weak<Abort>>,
    standings: Mutex<Weak<Standings>>,
    closed: AtomicBool,
    last_resort: Mutex<Option<LastResort>>,
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
    /// Looks for the store until it is found or time is over.
    pub(super) fn connect(meeting: &Meeting) -> Result<Self, PeerError> {
        let end = Instant::now() + meeting.timeout;
        let mut last = "nothing was tried".to_owned();
        let mut attempt = Attempt {
            instance: random(),
            number: 0,
        };
        loop {
            for port in &meeting.ports {
                attempt.number += 1;
                match greet(meeting, *port, attempt) {
                    Ok((stream, silence)) => return Self::start(meeting, stream, silence),
                    Err(Greeting::Refused(why)) => return Err(PeerError::Failed(why)),
                    Err(Greeting::Elsewhere(why)) => last = format!("port {port}: {why}"),
                }
            }
            if Instant::now() >= end {
                return Err(PeerError::Timeout(format!(
                    "rank {} could not reach the store of this run, which rank 0 opens, at {} within {:.1?} ({last})",
                    meeting.process, meeting.host, meeting.timeout
                )));
            }
            std::thread::sleep(AGAIN);
        }
    }

    fn start(meeting: &Meeting, stream: TcpStream, silence: Duration) -> Result<Self, PeerError> {
        let words = |e: io::Error| PeerError::Failed(format!("the connection to the store: {e}"));
        let shared = Arc::new(Shared {
            process: meeting.process,
            heard: Mutex::new(Instant::now()),
            silence,
            answers: Mutex::default(),
            changed: Condvar::new(),
            heard_failure: AtomicBool::new(false),
            failure: Mutex::default(),
            apart: Mutex::default(),
            abort: Mutex::default(),
            standings: Mutex::default(),
            closed: AtomicBool::new(false),
            last_resort: Mutex::default(),
        });
        let from = stream.try_clone().map_err(words)?;
        let ends = stream.try_clone().map_err(words)?;
        let out = Arc::new(Mutex::new(stream));
        let reading = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("store answers".to_owned())
            .spawn(move || {
                let shared = &reading;
                let mut from = Heard { from, shared };
                while let Some(tell) = wire::read(&mut from).ok().and_then(|f| Tell::decode(&f)) {
                    shared.hear(tell);
                }
                shared.lost("it ended");
            })
            .map_err(words)?;
        let (beating, heart) = (Arc::clone(&shared), Arc::clone(&out));
        std::thread::Builder::new()
            .name("heart".to_owned())
            .spawn(move || beating.beat(&heart, &ends))
            .map_err(words)?;
        Ok(Self {
            shared,
            out,
            requests: AtomicU64::new(0),
        })
    }

    pub(super) fn watch(&self, abort: &Arc<Abort>, standings: Weak<Standings>) {
        *lock(&self.shared.standings) = standings;
        *lock(&self.shared.abort) = Arc::downgrade(abort);
        // It may have happened before.
        let before = lock(&self.shared.failure).clone();
        if let Some((process, cause)) = before {
            self.shared.end_waits(process, &cause);
        }
    }

    pub(super) fn set_last_resort(&self, f: LastResort) {
        *lock(&self.shared.last_resort) = Some(f);
    }

    pub(super) fn failure(&self) -> Option<String> {
        let failure = lock(&self.shared.failure);
        failure.as_ref().map(|(_, cause)| cause.clone())
    }

    pub(super) fn put(&self, key: &str, uses: u32, data: Vec<u8>) -> Result<(), PeerError> {
        let key = key.to_owned();
        self.send(&Ask::Put { key, uses, data })
    }

    pub(super) fn get(&self, key: &str, patient: bool) -> Result<Vec<u8>, PeerError> {
        let key = key.to_owned();
        let parts = self.request(|request| Ask::Get {
            request,
            key,
            patient,
        })?;
        Ok(parts.into_iter().next().unwrap_or_default())
    }

    pub(super) fn gather(
        &self,
        key: String,
        mode: Mode,
        data: Vec<u8>,
    ) -> Result<Parts, PeerError> {
        self.request(|request| Ask::Gather {
            request,
            key,
            mode,
            data,
        })
    }

    pub(super) fn fail(&self, cause: &str) {
        self.say_failed(cause, false);
    }

    /// It has waited for something in vain. Where hosts stand, as the end of a cause: the store says it of the first failure of
    /// the run, be it this or another.
    pub(super) fn give_up(&self, cause: &str) -> String {
        self.say_failed(cause, true);
        let (end, shared) = (Instant::now() + ECHO, &self.shared);
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
        lock(&shared.apart).clone()
    }

    fn say_failed(&self, cause: &str, waited: bool) {
        if self.failure().is_none() {
            let cause = cause.to_owned();
            // Without a connection everybody knows already.
            let _ = self.send(&Ask::Fail { cause, waited });
        }
    }

    fn send(&self, ask: &Ask) -> Result<(), PeerError> {
        if let Some(cause) = self.failure() {
            return Err(PeerError::Failed(cause));
        }
        let sent = wire::write(&mut *lock(&self.out), &ask.encode());
        sent.map_err(|e| {
            PeerError::Failed(self.failure().unwrap_or_else(|| lost_words(&e.to_string())))
        })
    }

    fn request(&self, ask: impl FnOnce(u64) -> Ask) -> Result<Parts, PeerError> {
        let request = self.requests.fetch_add(1, Ordering::Relaxed);
        self.send(&ask(request))?;
        let mut answers = lock(&self.shared.answers);
        loop {
            if let Some(answer) = answers.remove(&request) {
                return answer;
            }
            if let Some(cause) = self.failure() {
                return Err(PeerError::Failed(cause));
            }
            // A failure of this process's other threads has no other way to be heard of.
            if let Some(abort) = lock(&self.shared.abort).upgrade()
                && let Some(first) = abort.failures().first()
            {
                return Err(PeerError::Failed(first.to_string()));
            }
            answers = self
                .shared
                .changed
                .wait_timeout(answers, BEAT)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Takes leave of the store.
    pub(super) fn leave(&self) {
        if self.shared.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let out = &mut *lock(&self.out);
        // A store that is gone needs no goodbye.
        let _ = wire::write(out, &Ask::Bye.encode());
        let _ = out.shutdown(Shutdown::Write);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.leave();
        let _ = lock(&self.out).shutdown(Shutdown::Both);
    }
}

impl Shared {
    fn hear(self: &Arc<Self>, tell: Tell) {
        let (request, answer) = match tell {
            Tell::Answer { request, parts } => (request, Ok(parts)),
            Tell::Late { request, why } => (request, Err(PeerError::Timeout(why))),
            Tell::Failed {
                process,
                cause,
                apart,
            } => {
                let words = format!("{cause}{apart}");
                *lock(&self.apart) = apart;
                return self.failed(Some(process), &words);
            }
            Tell::Welcome { .. } | Tell::Refused { .. } | Tell::Alive => return,
        };
        lock(&self.answers).insert(request, answer);
        self.changed.notify_all();
    }

    fn lost(self: &Arc<Self>, why: &str) {
        if !self.closed.load(Ordering::SeqCst) {
            self.failed(None, &lost_words(why));
        }
    }

    /// Says that this process lives, and notices when the store no longer does.
    fn beat(self: &Arc<Self>, out: &Mutex<TcpStream>, ends: &TcpStream) {
        let mut last = Instant::now();
        while !self.closed.load(Ordering::SeqCst) {
            let now = Instant::now();
            if !stopped(now - last).is_zero() {
                *lock(&self.heard) = now;
            }
            last = now;
            let silent = now.saturating_duration_since(*lock(&self.heard));
            if silent >= self.silence {
                self.lost(&format!("no answer for {silent:.1?}"));
                // Whoever writes to it, or waits for it, goes on.
                let _ = ends.shutdown(Shutdown::Both);
                break;
            }
            let (progress, running) = lock(&self.abort).upgrade().map_or((0, 0), |a| a.pulse());
            let standings = lock(&self.standings).upgrade();
            let beat = Ask::Beat {
                progress,
                running,
                standing: standings.map(|s| s.now()).unwrap_or_default(),
            };
            // Whoever has the connection is saying something: it may be long, and the store may not take it.
            if let Ok(mut out) = out.try_lock()
                && wire::write(&mut *out, &beat.encode()).is_err()
            {
                break;
            }
            std::thread::sleep(BEAT);
        }
    }

    fn failed(self: &Arc<Self>, process: Option<u32>, cause: &str) {
        if self.heard_failure.swap(true, Ordering::SeqCst) {
            return;
        }
        // Whoever is woken by the failure finds the cause in the session already.
        self.end_waits(process, cause);
        *lock(&self.failure) = Some((process, cause.to_owned()));
        {
            let _held = lock(&self.answers);
            self.changed.notify_all();
        }
        let shared = Arc::clone(self);
        let cause = cause.to_owned();
        // Without a thread nothing is forced to end.
        let _ = std::thread::Builder::new()
            .name("last resort".to_owned())
            .spawn(move || {
                std::thread::sleep(LAST_RESORT);
                let act = lock(&shared.last_resort).clone();
                if let Some(act) = act
                    && !shared.closed.load(Ordering::SeqCst)
                {
                    act(&cause);
                }
            });
    }

    /// A failure elsewhere ends the waits of this process's ranks. What it has told the store itself has ended them already;
    /// that the store is lost it has told nobody, whichever process keeps it.
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

fn lost_words(why: &str) -> String {
    format!(
        "lost the connection to the store: {why}; the process that runs it (rank 0 or the launcher) died or hangs"
    )
}

/// The connection to the store, noting when bytes come: a long answer is no silence.
struct Heard<'a> {
    from: TcpStream,
    shared: &'a Shared,
}

impl Read for Heard<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let bytes = self.from.read(room)?;
        *lock(&self.shared.heard) = Instant::now();
        Ok(bytes)
    }
}

enum Greeting {
    /// No store of this run is there, or not yet.
    Elsewhere(String),
    /// It is there, and does not want this process.
    Refused(String),
}

/// A connection to the store, and how long it may be silent.
fn greet(
    meeting: &Meeting,
    port: u16,
    attempt: Attempt,
) -> Result<(TcpStream, Duration), Greeting> {
    let elsewhere = |e: io::Error| Greeting::Elsewhere(e.to_string());
    let addresses = (meeting.host.as_str(), port)
        .to_socket_addrs()
        .map_err(elsewhere)?;
    let mut stream = None;
    let mut last = Greeting::Elsewhere("the host has no address".to_owned());
    for address in addresses {
        match TcpStream::connect_timeout(&address, ANSWER) {
            Ok(s) => {
                stream = Some(s);
                break;
            }
            Err(e) => last = elsewhere(e),
        }
    }
    let Some(mut stream) = stream else {
        return Err(last);
    };
    stream.set_nodelay(true).map_err(elsewhere)?;
    stream.set_read_timeout(Some(ANSWER)).map_err(elsewhere)?;
    let hello = Ask::Hello {
        process: meeting.process,
        processes: meeting.processes,
        run: meeting.run.clone(),
        place: place(),
        attempt,
    };
    stream.write_all(MAGIC).map_err(elsewhere)?;
    wire::write(&mut stream, &hello.encode()).map_err(elsewhere)?;
    let answer = wire::read(&mut stream).map_err(elsewhere)?;
    match Tell::decode(&answer) {
        Some(Tell::Welcome { silence_ms }) => {
            stream.set_read_timeout(None).map_err(elsewhere)?;
            Ok((stream, Duration::from_millis(silence_ms)))
        }
        // Another run may keep its store at this port.
        Some(Tell::Refused { why }) if why.contains("not of `") => Err(Greeting::Elsewhere(why)),
        Some(Tell::Refused { why }) => Err(Greeting::Refused(why)),
        _ => Err(Greeting::Elsewhere(
            "another program is listening there".to_owned(),
        )),
    }
}

/// Where this process runs, for messages.
fn place() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "this host",
        name => name,
    };
    format!("{host}, process {}", std::process::id())
}

/// A number that no other process has: the keys of the system's hasher are random.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const SILENCE: Duration = Duration::from_millis(700);

    /// A process beside a store that welcomes it and then does what it is told to with the connection.
    fn beside(store: impl FnOnce(TcpStream) + Send) -> (PeerError, Duration) {
        with_store(1, store, |client| {
            let start = Instant::now();
            let error = client.get("what nobody leaves", false).unwrap_err();
            (error, start.elapsed())
        })
    }

    /// What a process does beside such a store.
    fn with_store<T>(
        process: u32,
        store: impl FnOnce(TcpStream) + Send,
        what: impl FnOnce(&Client) -> T,
    ) -> T {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let meeting = Meeting {
            host: "127.0.0.1".to_owned(),
            ports: vec![listener.local_addr().unwrap().port()],
            process,
            processes: 2,
            run: "quiet".to_owned(),
            timeout: ANSWER,
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut magic = [0; MAGIC.len()];
                stream.read_exact(&mut magic).unwrap();
                wire::read(&mut stream).unwrap();
                let silence_ms = SILENCE.as_millis() as u64;
                wire::write(&mut stream, &Tell::Welcome { silence_ms }.encode()).unwrap();
                store(stream);
            });
            what(&Client::connect(&meeting).unwrap())
        })
    }

    /// Rank 0, too, where something else keeps the store.
    #[test]
    fn a_lost_store_ends_the_waits_of_every_process() {
        for process in [0, 1] {
            let abort = Arc::new(Abort::new(ANSWER));
            with_store(process, drop, |client| {
                client.watch(&abort, Weak::new());
                let start = Instant::now();
                while !abort.aborted() {
                    assert!(start.elapsed() < ANSWER, "rank {process} waits");
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
        // It reads nothing and says nothing, and its connection stays open, as that of a stopped process does.
        let (error, took) = beside(|stream| {
            std::thread::sleep(4 * SILENCE);
            drop(stream);
        });
        let words = error.to_string();
        assert!(words.contains("no answer for"), "{words}");
        assert!(took >= SILENCE && took < 3 * SILENCE, "{took:?}");
    }

    #[test]
    fn a_store_that_answers_beats_is_not() {
        let (error, took) = beside(|mut stream| {
            let end = Instant::now() + 3 * SILENCE;
            while Instant::now() < end {
                wire::read(&mut stream).unwrap();
                wire::write(&mut stream, &Tell::Alive.encode()).unwrap();
            }
        });
        let words = error.to_string();
        assert!(words.contains("it ended"), "{words}");
        assert!(took >= 3 * SILENCE, "{took:?}");
    }

    #[test]
    fn a_long_answer_is_no_silence() {
        let (error, took) = beside(|mut stream| {
            let answer = Tell::Answer {
                request: 0,
                parts: vec![vec![7; 12]],
            };
            let frame = answer.encode();
            let mut bytes = (frame.len() as u64).to_le_bytes().to_vec();
            bytes.extend(&frame);
            // It comes byte by byte, and never ends.
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
