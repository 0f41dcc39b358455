//! The first failure of a session, and how everybody hears of it.
//!
//! Ranks, streams and collectives wait for one another; when one of them fails, all waits must end. Every blocking wait of
//! this crate goes through `Abort::wait`, which ends on the condition, on a failure anywhere, or when nothing in the
//! whole session has moved for the watchdog's time.

use crate::stopped::{Idle, LOOK};
use shardlab_plan::program::InstrId;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Why a wait ended without its condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Somebody failed; the cause is in the session's [`Abort`].
    Aborted,
    /// Nothing moved anywhere for the watchdog's time.
    TimedOut,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// A thread panicked.
    Panic,
    /// A kernel refused its operands.
    Kernel,
    /// Ranks launched collectives that do not fit together.
    Mismatch,
    /// A wait took longer than the watchdog allows.
    Timeout,
    /// The arena's limit was reached.
    OutOfMemory,
    /// An allocation was refused for another reason.
    Alloc,
    /// A NaN was found.
    Nan,
    /// The program asks for something impossible.
    Program,
    /// A rank's device could not be made.
    NoDevice,
    /// A fault injected by a test.
    Injected,
    /// Another process failed; the message is its own.
    Remote,
}

impl FailureKind {
    /// Name in messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Kernel => "kernel error",
            Self::Mismatch => "collective mismatch",
            Self::Timeout => "timeout",
            Self::OutOfMemory => "out of memory",
            Self::Alloc => "allocation refused",
            Self::Nan => "NaN",
            Self::Program => "bad program",
            Self::NoDevice => "no device",
            Self::Injected => "injected fault",
            Self::Remote => "another process",
        }
    }
}

/// A failure and where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Kind.
    pub kind: FailureKind,
    /// Rank.
    pub rank: u32,
    /// Stream, where a stream's worker failed; `None` is the host thread.
    pub stream: Option<&'static str>,
    /// Instruction, where one was being performed.
    pub instr: Option<InstrId>,
    /// The instruction in words; empty where there was none.
    pub text: String,
    /// What happened.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == FailureKind::Remote {
            return f.write_str(&self.message);
        }
        write!(f, "rank {}", self.rank)?;
        // What is missing matters, not which of many allocations came first.
        if self.kind == FailureKind::OutOfMemory {
            return write!(f, ": {}: {}", self.kind.name(), self.message);
        }
        match self.stream {
            Some(s) => write!(f, ", stream {s}")?,
            None => f.write_str(", host")?,
        }
        if let Some(i) = self.instr {
            write!(f, ", instruction {} `{}`", i.0, self.text)?;
        }
        write!(f, ": {}: {}", self.kind.name(), self.message)
    }
}

/// Something whose waiters must look again when a failure occurs.
pub(crate) trait Wake: Send + Sync {
    /// Wakes every waiter. Takes the lock that the waiters sleep with, so that none misses it.
    fn wake(&self);
}

/// See the module documentation.
pub struct Abort {
    flag: AtomicBool,
    /// Every failure, in the order in which they came.
    failures: Mutex<Vec<Failure>>,
    wakers: Mutex<Vec<Weak<dyn Wake>>>,
    epoch: Instant,
    /// When a command was last finished anywhere, in nanoseconds: what the watchdog looks at.
    progress: AtomicU64,
    /// Kernels that are running now, anywhere.
    running: AtomicU32,
    timeout: Duration,
}

/// While it lives a kernel is running.
pub(crate) struct Running<'a>(&'a Abort);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How much longer waits may last while kernels are running.
const BUSY: u32 = 10;

/// How long a wait may last without anything moving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// The watchdog's time: a rank is missing from a rendezvous.
    Cause,
    /// A little longer: the wait is probably a consequence of one that ends first and knows more.
    Consequence,
}

impl fmt::Debug for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Abort")
            .field("failures", &self.failures)
            .finish_non_exhaustive()
    }
}

/// Locks a mutex whose data cannot be left half-changed: panics inside kernels happen outside of every lock.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Abort {
    /// Nothing has failed yet; waits end after `timeout` without progress.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self {
            flag: AtomicBool::new(false),
            failures: Mutex::new(Vec::new()),
            wakers: Mutex::new(Vec::new()),
            epoch: Instant::now(),
            progress: AtomicU64::new(0),
            running: AtomicU32::new(0),
            timeout,
        }
    }

    /// Watchdog time.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn register(&self, waker: Weak<dyn Wake>) {
        let mut wakers = lock(&self.wakers);
        // A gate lives as long as a pass, and there are many of these.
        wakers.retain(|w| w.strong_count() > 0);
        wakers.push(waker);
    }

    /// Reports a failure and ends every wait.
    pub fn fail(&self, failure: Failure) {
        lock(&self.failures).push(failure);
        self.stop();
    }

    /// Ends every wait without a failure (the session is dropped).
    pub(crate) fn stop(&self) {
        if !self.flag.swap(true, Ordering::SeqCst) {
            let wakers = std::mem::take(&mut *lock(&self.wakers));
            for w in wakers.iter().filter_map(Weak::upgrade) {
                w.wake();
            }
        }
    }

    /// Whether somebody failed.
    #[must_use]
    pub fn aborted(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// For a rank that is to go missing: returns once somebody failed.
    pub(crate) fn idle_until_aborted(&self) {
        while !self.aborted() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Failures so far, the first one first.
    #[must_use]
    pub fn failures(&self) -> Vec<Failure> {
        lock(&self.failures).clone()
    }

    /// Something moved.
    pub(crate) fn progressed(&self) {
        let now = self.epoch.elapsed().as_nanos() as u64;
        self.progress.store(now, Ordering::Relaxed);
    }

    /// What changes as long as something moves, and how many kernels are running.
    pub(crate) fn pulse(&self) -> (u64, u32) {
        (
            self.progress.load(Ordering::Relaxed),
            self.running.load(Ordering::Relaxed),
        )
    }

    /// A kernel runs until the result is dropped: nobody is missing as long as somebody computes.
    pub(crate) fn running(&self) -> Running<'_> {
        self.running.fetch_add(1, Ordering::Relaxed);
        Running(self)
    }

    /// When something moved last.
    fn moved(&self) -> Instant {
        self.epoch + Duration::from_nanos(self.progress.load(Ordering::Relaxed))
    }

    /// Waits on `cv` until `ready` gives a value, a failure occurs or patience ends, which time in which the whole process
    /// was stopped does not count for.
    pub(crate) fn wait<'a, T, R>(
        &self,
        cv: &Condvar,
        mut guard: MutexGuard<'a, T>,
        patience: Patience,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> (MutexGuard<'a, T>, Result<R, Stop>) {
        let mut idle: Option<Idle> = None;
        loop {
            if let Some(r) = ready(&mut guard) {
                return (guard, Ok(r));
            }
            if self.aborted() {
                return (guard, Err(Stop::Aborted));
            }
            let patience = match patience {
                Patience::Cause => self.timeout,
                Patience::Consequence => self.timeout + self.timeout / 4,
            };
            let now = Instant::now();
            let idle = idle.get_or_insert_with(|| Idle::new(now));
            idle.moved(self.moved());
            let idle = idle.look(now);
            let patience = match self.running.load(Ordering::Relaxed) {
                0 => patience,
                _ => patience * BUSY,
            };
            let Some(left) = patience.checked_sub(idle).filter(|l| !l.is_zero()) else {
                return (guard, Err(Stop::TimedOut));
            };
            // Kernels may end meanwhile, which shortens patience, and whoever sleeps long does not notice a stop.
            let left = left.min(self.timeout).min(LOOK);
            guard = cv
                .wait_timeout(guard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    struct Flag(Mutex<bool>, Condvar);
    impl Wake for Flag {
        fn wake(&self) {
            let _held = lock(&self.0);
            self.1.notify_all();
        }
    }

    #[test]
    fn those_who_no_longer_wait_are_forgotten() {
        let abort = Abort::new(Duration::from_secs(1));
        let flag = || Arc::new(Flag(Mutex::new(true), Condvar::new()));
        let stays = flag();
        let weak: Weak<dyn Wake> = Arc::downgrade(&stays) as _;
        abort.register(weak);
        for _ in 0..100 {
            let weak: Weak<dyn Wake> = Arc::downgrade(&flag()) as _;
            abort.register(weak);
        }
        // The last one is gone too, but nobody has come since.
        assert_eq!(lock(&abort.wakers).len(), 2);
    }

    #[test]
    fn waits_end_on_the_condition_a_failure_or_the_watchdog() {
        let abort = Arc::new(Abort::new(Duration::from_millis(40)));
        let flag = Arc::new(Flag(Mutex::new(true), Condvar::new()));
        let ready = |b: &mut bool| b.then_some(7);
        assert_eq!(
            abort.wait(&flag.1, lock(&flag.0), Patience::Cause, ready).1,
            Ok(7)
        );

        *lock(&flag.0) = false;
        let begin = Instant::now();
        assert_eq!(
            abort.wait(&flag.1, lock(&flag.0), Patience::Cause, ready).1,
            Err(Stop::TimedOut)
        );
        assert!(begin.elapsed() >= Duration::from_millis(40));

        let abort = Arc::new(Abort::new(Duration::from_secs(60)));
        let weak = Arc::downgrade(&flag);
        abort.register(weak);
        let other = Arc::clone(&abort);
        let failing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            other.fail(Failure {
                kind: FailureKind::Panic,
                rank: 3,
                stream: Some("compute"),
                instr: Some(InstrId(12)),
                text: "launch mm".into(),
                message: "boom".into(),
            });
        });
        assert_eq!(
            abort
                .wait(&flag.1, lock(&flag.0), Patience::Consequence, ready)
                .1,
            Err(Stop::Aborted)
        );
        failing.join().unwrap();
        assert_eq!(
            abort.failures()[0].to_string(),
            "rank 3, stream compute, instruction 12 `launch mm`: panic: boom"
        );
    }

    #[test]
    fn a_running_kernel_is_not_a_missing_rank() {
        let abort = Abort::new(Duration::from_millis(20));
        let flag = Flag(Mutex::new(false), Condvar::new());
        let begin = Instant::now();
        let running = abort.running();
        let (guard, r) = abort.wait(&flag.1, lock(&flag.0), Patience::Cause, |b: &mut bool| {
            b.then_some(())
        });
        drop((guard, running));
        assert_eq!(r, Err(Stop::TimedOut));
        assert!(begin.elapsed() >= Duration::from_millis(200));
    }

    #[test]
    fn progress_elsewhere_restarts_the_watchdog() {
        let abort = Arc::new(Abort::new(Duration::from_millis(300)));
        let flag = Flag(Mutex::new(false), Condvar::new());
        let other = Arc::clone(&abort);
        let moving = std::thread::spawn(move || {
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(20));
                other.progressed();
            }
        });
        let begin = Instant::now();
        let (guard, r) = abort.wait(&flag.1, lock(&flag.0), Patience::Cause, |b: &mut bool| {
            b.then_some(())
        });
        drop(guard);
        assert_eq!(r, Err(Stop::TimedOut));
        // The last move was after 400 ms.
        assert!(begin.elapsed() >= Duration::from_millis(690));
        moving.join().unwrap();
    }
}
