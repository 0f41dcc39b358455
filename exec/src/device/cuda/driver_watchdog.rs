//! Calls of the driver that do not return.
//!
//! A launch waits for room in the device's queue, which never comes when a collective hangs in front of it. The host cannot
//! look at the clock there, so a thread does: it ends collectives where a call lasts longer than the watchdog's time, and
//! where something has failed elsewhere meanwhile.

use crate::device::Abort;
use crate::stopped::{Idle, period};
use shardlab_plan::program::InstrId;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// Where the host is: the instruction of its last call, and above it the number of calls begun and ended: odd inside of one.
#[derive(Debug, Default)]
struct Place(AtomicU64);

/// What the thread does about a call that does not return.
pub(super) struct Means {
    /// Reports that the instruction's call has taken too long; done once.
    pub(super) fail: Box<dyn Fn(InstrId) + Send>,
    /// Ends what is in flight; may be done again and again.
    pub(super) cut: Box<dyn Fn() + Send>,
}

/// See the module documentation. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Guard {
    place: Arc<Place>,
    passes: u32,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Begins to look.
    ///
    /// # Errors
    /// In words, if there is no thread to be had.
    pub(super) fn start(abort: &Arc<Abort>, means: Means) -> Result<Self, String> {
        let place = Arc::new(Place::default());
        let (end, ended) = channel();
        let (seen, abort) = (Arc::clone(&place), Arc::clone(abort));
        let timeout = abort.timeout();
        let period = period(timeout);
        let look_on = move || {
            let (mut last, mut idle) = (0, Idle::new(Instant::now()));
            while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                let word = seen.0.load(Ordering::Relaxed);
                let inside = word >> 32 & 1 == 1;
                if word != last || !inside {
                    (last, idle) = (word, Idle::new(Instant::now()));
                    continue;
                }
                let inside_for = idle.look(Instant::now());
                if !abort.aborted() && inside_for >= timeout {
                    (means.fail)(InstrId(word as u32));
                }
                if abort.aborted() {
                    (means.cut)();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("guard".to_owned())
            .spawn(look_on)
            .map_err(|e| format!("cannot start the thread that watches driver calls: {e}"))?;
        Ok(Self {
            place,
            passes: 0,
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// The host begins a call for an instruction, or has come back from it.
    #[inline]
    pub(super) fn pass(&mut self, instr: InstrId) {
        self.moved(1, instr);
    }

    /// The host has come back from a call and begins the next one.
    #[inline]
    pub(super) fn next(&mut self, instr: InstrId) {
        self.moved(2, instr);
    }

    #[inline]
    fn moved(&mut self, passes: u32, instr: InstrId) {
        self.passes = self.passes.wrapping_add(passes);
        let word = u64::from(self.passes) << 32 | u64::from(instr.0);
        self.place.0.store(word, Ordering::Relaxed);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did there would be nothing left to watch.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Failure, FailureKind};
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    const TIMEOUT: Duration = Duration::from_millis(80);

    type Reported = Arc<Mutex<Vec<u32>>>;

    /// A guard, what it has reported, and how often it has cut.
    fn guard() -> (Guard, Arc<Abort>, Reported, Arc<AtomicU32>) {
        let abort = Arc::new(Abort::new(TIMEOUT));
        let failed = Reported::default();
        let cuts: Arc<AtomicU32> = Arc::default();
        let (told, at, cut) = (Arc::clone(&failed), Arc::clone(&abort), Arc::clone(&cuts));
        let means = Means {
            fail: Box::new(move |instr: InstrId| {
                told.lock().unwrap().push(instr.0);
                fail(&at);
            }),
            cut: Box::new(move || {
                cut.fetch_add(1, Ordering::SeqCst);
            }),
        };
        let guard = Guard::start(&abort, means).unwrap();
        (guard, abort, failed, cuts)
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
    fn a_call_that_does_not_return_is_reported_once_and_cut() {
        let (mut guard, abort, failed, cuts) = guard();
        guard.pass(InstrId(7));
        let begin = Instant::now();
        while cuts.load(Ordering::SeqCst) < 2 {
            assert!(begin.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(begin.elapsed() >= TIMEOUT);
        assert!(abort.aborted());
        guard.pass(InstrId(7));
        assert_eq!(*failed.lock().unwrap(), [7]);
    }

    #[test]
    fn calls_that_return_may_take_all_the_time_together() {
        let (mut guard, abort, ..) = guard();
        let begin = Instant::now();
        while begin.elapsed() < 4 * TIMEOUT {
            // The same instruction every time: in, out.
            guard.pass(InstrId(7));
            std::thread::sleep(Duration::from_millis(1));
            guard.next(InstrId(7));
            std::thread::sleep(Duration::from_millis(1));
            guard.pass(InstrId(7));
        }
        // Outside of a call the host watches itself.
        std::thread::sleep(2 * TIMEOUT);
        assert!(!abort.aborted());
    }

    #[test]
    fn a_failure_elsewhere_cuts_a_call_short() {
        let (mut guard, abort, failed, cuts) = guard();
        fail(&abort);
        std::thread::sleep(TIMEOUT);
        assert_eq!(
            cuts.load(Ordering::SeqCst),
            0,
            "the host ends its own waits"
        );
        guard.pass(InstrId(3));
        let begin = Instant::now();
        while cuts.load(Ordering::SeqCst) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(guard);
        assert!(failed.lock().unwrap().is_empty());
    }
}
