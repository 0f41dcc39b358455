//! Watchdog for driver calls that do not return.
//!
//! A launch waits for space in the device's queue, which never becomes free if a collective in the
//! queue hangs. The host thread is then blocked, so another thread watches it. That thread aborts
//! collectives if a call takes longer than the watchdog's time, or if a failure has occurred
//! elsewhere.

use crate::base::suspend::{IdleTime, poll_period};
use crate::device::Abort;
use shardlab_plan::ir::InstrId;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// State of the host thread: the instruction of its last call (lower half), and the number of
/// starts and ends of calls (upper half), which is odd inside a call.
#[derive(Debug, Default)]
struct HostState(AtomicU64);

/// Actions for a call that does not return.
pub(super) struct WatchdogActions {
    /// Reports that the call of an instruction has taken too long. Called once.
    pub(super) fail: Box<dyn Fn(InstrId) + Send>,
    /// Aborts work in flight. Called repeatedly.
    pub(super) abort: Box<dyn Fn() + Send>,
}

/// Measures how long the host has been inside one call.
struct CallTimer {
    last: u64,
    idle: IdleTime,
}

impl CallTimer {
    fn new(now: Instant) -> Self {
        Self {
            last: 0,
            idle: IdleTime::new(now),
        }
    }

    /// Returns how long the host has been inside the call of a state; `None` if it is outside of a
    /// call or was in another state at the last reading.
    fn inside_for(&mut self, word: u64, now: Instant) -> Option<Duration> {
        let inside = word >> 32 & 1 == 1;
        if word != self.last || !inside {
            *self = Self {
                last: word,
                idle: IdleTime::new(now),
            };
            return None;
        }
        Some(self.idle.read(now))
    }
}

/// See the module documentation. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct DriverWatchdog {
    state: Arc<HostState>,
    calls: u32,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl DriverWatchdog {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns a message if the thread cannot be started.
    pub(super) fn start(abort: &Arc<Abort>, actions: WatchdogActions) -> Result<Self, String> {
        let state = Arc::new(HostState::default());
        let (end, ended) = channel();
        let (seen, abort) = (Arc::clone(&state), Arc::clone(abort));
        let timeout = abort.timeout();
        let period = poll_period(timeout);
        let watch = move || {
            let mut timer = CallTimer::new(Instant::now());
            while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                let word = seen.0.load(Ordering::Relaxed);
                let Some(inside_for) = timer.inside_for(word, Instant::now()) else {
                    continue;
                };
                if !abort.aborted() && inside_for >= timeout {
                    (actions.fail)(InstrId(word as u32));
                }
                if abort.aborted() {
                    (actions.abort)();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("driver watchdog".to_owned())
            .spawn(watch)
            .map_err(|e| format!("cannot start the thread that watches driver calls: {e}"))?;
        Ok(Self {
            state,
            calls: 0,
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// Records that the host starts a call for an instruction, or has returned from it.
    #[inline]
    pub(super) fn pass(&mut self, instr: InstrId) {
        self.advance(1, instr);
    }

    /// Records that the host has returned from a call and starts the next one.
    #[inline]
    pub(super) fn next(&mut self, instr: InstrId) {
        self.advance(2, instr);
    }

    #[inline]
    fn advance(&mut self, calls: u32, instr: InstrId) {
        self.calls = self.calls.wrapping_add(calls);
        let word = u64::from(self.calls) << 32 | u64::from(instr.0);
        self.state.0.store(word, Ordering::Relaxed);
    }
}

impl Drop for DriverWatchdog {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // The thread does not panic. If it did, there would be nothing left to watch.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::failure::{Failure, FailureKind};
    use std::sync::mpsc::Receiver;

    const TIMEOUT: Duration = Duration::from_millis(80);

    /// Returns a watchdog, its session, a receiver of the instructions that it reports, and a
    /// receiver with one message per abort.
    fn watchdog() -> (DriverWatchdog, Arc<Abort>, Receiver<u32>, Receiver<()>) {
        let abort = Arc::new(Abort::new(TIMEOUT));
        let (report, reports) = channel();
        let (aborted, aborts) = channel();
        let session = Arc::clone(&abort);
        // The test may be over when messages are sent.
        let actions = WatchdogActions {
            fail: Box::new(move |instr: InstrId| {
                let _ = report.send(instr.0);
                fail(&session);
            }),
            abort: Box::new(move || {
                let _ = aborted.send(());
            }),
        };
        let watchdog = DriverWatchdog::start(&abort, actions).unwrap();
        (watchdog, abort, reports, aborts)
    }

    fn fail(abort: &Abort) {
        abort.fail(Failure {
            kind: FailureKind::Timeout,
            rank: 0,
            stream: None,
            instr: None,
            text: String::new(),
            message: String::new(),
        });
    }

    #[test]
    fn a_call_that_does_not_return_is_reported_once_and_aborted() {
        let (mut watchdog, abort, reports, aborts) = watchdog();
        let begin = Instant::now();
        watchdog.pass(InstrId(7));
        (0..2).for_each(|_| aborts.recv().unwrap());
        assert!(begin.elapsed() >= TIMEOUT);
        assert!(abort.aborted());
        watchdog.pass(InstrId(7));
        drop(watchdog);
        assert_eq!(reports.iter().collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn only_the_time_inside_one_call_counts() {
        let start = Instant::now();
        let mut timer = CallTimer::new(start);
        let state = |calls: u64| calls << 32 | 7;
        let mut inside =
            |calls, ms| timer.inside_for(state(calls), start + Duration::from_millis(ms));
        // The same instruction every time. Outside of a call, the host watches itself.
        assert_eq!(inside(0, 100), None);
        assert_eq!(inside(0, 300), None);
        assert_eq!(inside(1, 400), None);
        assert_eq!(inside(1, 450), Some(Duration::from_millis(50)));
        // The host returned and started the next call.
        assert_eq!(inside(3, 500), None);
        assert_eq!(inside(3, 570), Some(Duration::from_millis(70)));
        assert_eq!(inside(4, 600), None);
        assert_eq!(inside(5, 700), None);
        assert_eq!(inside(5, 790), Some(Duration::from_millis(90)));
        assert_eq!(inside(5, 880), Some(Duration::from_millis(180)));
    }

    #[test]
    fn calls_that_return_are_not_reported() {
        let (mut watchdog, abort, reports, _aborts) = watchdog();
        for _ in 0..100 {
            watchdog.pass(InstrId(7));
            watchdog.next(InstrId(7));
            watchdog.pass(InstrId(7));
        }
        // Outside of a call, the host watches itself.
        std::thread::sleep(2 * TIMEOUT);
        assert!(!abort.aborted());
        drop(watchdog);
        assert_eq!(reports.iter().count(), 0);
    }

    #[test]
    fn a_failure_elsewhere_aborts_a_call() {
        let (mut watchdog, abort, reports, aborts) = watchdog();
        fail(&abort);
        std::thread::sleep(TIMEOUT);
        assert!(
            aborts.try_recv().is_err(),
            "the host ends its own waits outside of a call"
        );
        watchdog.pass(InstrId(3));
        aborts.recv().unwrap();
        drop(watchdog);
        assert_eq!(reports.iter().count(), 0);
    }
}
