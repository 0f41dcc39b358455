//! Propagates the first failure of a session to all of its threads.
//!
//! Ranks, streams and collectives wait for each other. When one of them fails, all waits must end.
//! Every blocking wait of this crate goes through [`Abort::wait`], which ends when its condition
//! holds, when a failure occurs anywhere, or when nothing in the session has made progress for the
//! watchdog's time.

use super::clock::Clock;
use super::failure::{Failure, Stop};
use super::suspend::{IdleTime, MAX_POLL};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// An object whose waiters must check for a failure.
pub(crate) trait Wake: Send + Sync {
    /// Wakes every waiter. Takes the lock that the waiters sleep with, so that no waiter misses it.
    fn wake(&self);
}

/// See the module documentation.
pub struct Abort {
    flag: AtomicBool,
    /// All failures, in order of arrival.
    failures: Mutex<Vec<Failure>>,
    wakers: Mutex<Vec<Weak<dyn Wake>>>,
    clock: Clock,
    epoch: Instant,
    /// Time at which a command last finished anywhere, in nanoseconds since `epoch`. The watchdog
    /// reads it.
    progress: AtomicU64,
    /// Number of kernels that are running anywhere.
    running: AtomicU32,
    timeout: Duration,
}

/// Marks a kernel as running until it is dropped.
pub(crate) struct Running<'a>(&'a Abort);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Factor by which waits may last longer while kernels are running.
const BUSY: u32 = 10;

/// Maximum duration of a wait without progress anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitLimit {
    /// The watchdog's time: a rank is missing from a rendezvous.
    Primary,
    /// Longer limit for secondary waits, so that the primary waiter reports first.
    Secondary,
}

impl fmt::Debug for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Abort")
            .field("failures", &self.failures)
            .finish_non_exhaustive()
    }
}

/// Locks a mutex whose data cannot be left in an inconsistent state, because kernels panic outside
/// of every lock.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Abort {
    /// Creates a session's state without failures; waits end after `timeout` without progress.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self::with_clock(timeout, Clock::default())
    }

    /// Like [`Abort::new`], with a clock that the caller provides.
    pub(crate) fn with_clock(timeout: Duration, clock: Clock) -> Self {
        Self {
            flag: AtomicBool::new(false),
            failures: Mutex::new(Vec::new()),
            wakers: Mutex::new(Vec::new()),
            epoch: clock.now(),
            clock,
            progress: AtomicU64::new(0),
            running: AtomicU32::new(0),
            timeout,
        }
    }

    /// Returns the watchdog's time.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Adds an object to wake when a failure occurs.
    pub(crate) fn register(&self, waker: Weak<dyn Wake>) {
        let mut wakers = lock(&self.wakers);
        // A step barrier lives for one pass, and there are many passes.
        wakers.retain(|w| w.strong_count() > 0);
        wakers.push(waker);
    }

    /// Reports a failure and ends every wait.
    pub fn fail(&self, failure: Failure) {
        lock(&self.failures).push(failure);
        self.stop();
    }

    /// Ends every wait without a failure, because the session is dropped.
    pub(crate) fn stop(&self) {
        if !self.flag.swap(true, Ordering::SeqCst) {
            let wakers = std::mem::take(&mut *lock(&self.wakers));
            for w in wakers.iter().filter_map(Weak::upgrade) {
                w.wake();
            }
        }
    }

    /// Returns whether the session has failed or been dropped.
    #[must_use]
    pub fn aborted(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// Sleeps until a failure occurs, like a rank that an injected fault makes unresponsive.
    pub(crate) fn idle_until_aborted(&self) {
        while !self.aborted() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the failures so far, oldest first.
    #[must_use]
    pub fn failures(&self) -> Vec<Failure> {
        lock(&self.failures).clone()
    }

    /// Records that a command has finished.
    pub(crate) fn progressed(&self) {
        let now = self.clock.now().saturating_duration_since(self.epoch);
        self.progress
            .store(now.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns a number that changes with every progress, and the number of running kernels.
    pub(crate) fn pulse(&self) -> (u64, u32) {
        (
            self.progress.load(Ordering::Relaxed),
            self.running.load(Ordering::Relaxed),
        )
    }

    /// Marks a kernel as running until the result is dropped. No rank counts as missing while a
    /// kernel runs.
    pub(crate) fn running(&self) -> Running<'_> {
        self.running.fetch_add(1, Ordering::Relaxed);
        Running(self)
    }

    /// Returns the time at which a command last finished.
    fn last_progress(&self) -> Instant {
        self.epoch + Duration::from_nanos(self.progress.load(Ordering::Relaxed))
    }

    /// Waits on `cv` until `ready` returns a value, a failure occurs or the limit is reached. Time
    /// in which the whole process was suspended does not count.
    pub(crate) fn wait<'a, T, R>(
        &self,
        cv: &Condvar,
        mut guard: MutexGuard<'a, T>,
        limit: WaitLimit,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> (MutexGuard<'a, T>, Result<R, Stop>) {
        let mut idle: Option<IdleTime> = None;
        loop {
            if let Some(r) = ready(&mut guard) {
                return (guard, Ok(r));
            }
            if self.aborted() {
                return (guard, Err(Stop::Aborted));
            }
            let limit = match limit {
                WaitLimit::Primary => self.timeout,
                WaitLimit::Secondary => self.timeout + self.timeout / 4,
            };
            let now = self.clock.now();
            let idle = idle.get_or_insert_with(|| IdleTime::new(now));
            idle.progressed(self.last_progress());
            let idle = idle.read(now);
            let limit = match self.running.load(Ordering::Relaxed) {
                0 => limit,
                _ => limit * BUSY,
            };
            let Some(left) = limit.checked_sub(idle).filter(|l| !l.is_zero()) else {
                return (guard, Err(Stop::TimedOut));
            };
            // In the meantime, kernels may end, which shortens the limit. A suspension is noticed
            // only between short sleeps.
            let left = left.min(self.timeout).min(MAX_POLL);
            guard = self.clock.wait(cv, guard, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::failure::FailureKind;
    use super::*;
    use shardlab_plan::ir::InstrId;
    use std::sync::Arc;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    struct Flag(Mutex<bool>, Condvar);
    impl Wake for Flag {
        fn wake(&self) {
            let _held = lock(&self.0);
            self.1.notify_all();
        }
    }

    #[test]
    fn wakers_that_were_dropped_are_removed() {
        let abort = Abort::new(Duration::from_secs(1));
        let flag = || Arc::new(Flag(Mutex::new(true), Condvar::new()));
        let stays = flag();
        let weak: Weak<dyn Wake> = Arc::downgrade(&stays) as _;
        abort.register(weak);
        for _ in 0..100 {
            let weak: Weak<dyn Wake> = Arc::downgrade(&flag()) as _;
            abort.register(weak);
        }
        // The last one has also been dropped, but nothing has been registered since.
        assert_eq!(lock(&abort.wakers).len(), 2);
    }

    #[test]
    fn waits_end_on_the_condition_a_failure_or_the_watchdog() {
        let flag = Arc::new(Flag(Mutex::new(true), Condvar::new()));
        let ready = |b: &mut bool| b.then_some(7);
        for (limit, expected) in [(WaitLimit::Primary, 40), (WaitLimit::Secondary, 50)] {
            let abort = Abort::with_clock(ms(40), Clock::manual());
            *lock(&flag.0) = true;
            let (guard, r) = abort.wait(&flag.1, lock(&flag.0), limit, ready);
            drop(guard);
            assert_eq!(r, Ok(7));
            assert_eq!(abort.clock.now() - abort.epoch, Duration::ZERO);

            *lock(&flag.0) = false;
            let (guard, r) = abort.wait(&flag.1, lock(&flag.0), limit, ready);
            drop(guard);
            assert_eq!(r, Err(Stop::TimedOut));
            assert_eq!(abort.clock.now() - abort.epoch, ms(expected));
        }

        let abort = Arc::new(Abort::new(Duration::from_secs(60)));
        let weak = Arc::downgrade(&flag);
        abort.register(weak);
        let other = Arc::clone(&abort);
        let failing = std::thread::spawn(move || {
            std::thread::sleep(ms(10));
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
                .wait(&flag.1, lock(&flag.0), WaitLimit::Secondary, ready)
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
        let abort = Abort::with_clock(ms(20), Clock::manual());
        let flag = Flag(Mutex::new(false), Condvar::new());
        let running = abort.running();
        let (guard, r) = abort.wait(&flag.1, lock(&flag.0), WaitLimit::Primary, |b| {
            b.then_some(())
        });
        drop((guard, running));
        assert_eq!(r, Err(Stop::TimedOut));
        assert_eq!(abort.clock.now() - abort.epoch, ms(200));
    }

    #[test]
    fn progress_elsewhere_restarts_the_watchdog() {
        let abort = Abort::with_clock(ms(300), Clock::manual());
        let flag = Flag(Mutex::new(false), Condvar::new());
        let mut looks = 0;
        let (guard, r) = abort.wait(&flag.1, lock(&flag.0), WaitLimit::Primary, |b| {
            // Progress at 0, 300 and 600 ms.
            looks += 1;
            if looks <= 3 {
                abort.progressed();
            }
            b.then_some(())
        });
        drop(guard);
        assert_eq!(r, Err(Stop::TimedOut));
        assert_eq!(abort.clock.now() - abort.epoch, ms(900));
    }

    #[test]
    fn suspended_time_is_not_waited() {
        let abort = Abort::with_clock(Duration::from_secs(2), Clock::manual());
        let Clock::Manual(now) = &abort.clock else {
            unreachable!("the clock is manual");
        };
        let flag = Flag(Mutex::new(false), Condvar::new());
        let mut looks = 0;
        let (guard, r) = abort.wait(&flag.1, lock(&flag.0), WaitLimit::Primary, |b| {
            looks += 1;
            if looks == 2 {
                *lock(now) += Duration::from_secs(60);
            }
            b.then_some(())
        });
        drop(guard);
        assert_eq!(r, Err(Stop::TimedOut));
        // The 0.5 s poll during which the process was suspended does not count either.
        assert_eq!(abort.clock.now() - abort.epoch, ms(62_500));
    }
}
