//! Where the ranks of a bench wait for one another, until one of them fails.

use crate::device::abort::{Abort, Patience, Wake, lock};
use crate::device::{Failure, FailureKind, Stop};
use std::sync::{Arc, Condvar, Mutex, Weak};

/// How many have come, and how often all have.
#[derive(Debug, Default)]
struct Come {
    now: u32,
    times: u64,
}

/// A barrier that a failure opens. One of the standard library would hold the ranks that come to it for ever when one does
/// not come because it failed.
#[derive(Debug)]
pub(super) struct Meeting {
    ranks: u32,
    abort: Arc<Abort>,
    come: Mutex<Come>,
    all: Condvar,
}

impl Wake for Meeting {
    fn wake(&self) {
        let _held = lock(&self.come);
        self.all.notify_all();
    }
}

impl Meeting {
    pub(super) fn new(ranks: u32, abort: &Arc<Abort>) -> Arc<Self> {
        let it = Arc::new(Self {
            ranks,
            abort: Arc::clone(abort),
            come: Mutex::default(),
            all: Condvar::new(),
        });
        let weak: Weak<Self> = Arc::downgrade(&it);
        abort.register(weak);
        it
    }

    /// Waits until all have come.
    pub(super) fn wait(&self, rank: u32) -> Result<(), Stop> {
        let mut come = lock(&self.come);
        come.now += 1;
        let times = come.times;
        if come.now == self.ranks {
            come.now = 0;
            come.times += 1;
            self.all.notify_all();
        }
        let met = |c: &mut Come| (c.times > times).then_some(());
        let (come, met) = self.abort.wait(&self.all, come, Patience::Consequence, met);
        let now = come.now;
        drop(come);
        if met == Err(Stop::TimedOut) {
            self.abort.fail(Failure {
                kind: FailureKind::Timeout,
                rank,
                stream: None,
                instr: None,
                text: String::new(),
                message: format!("{now} of {} ranks have come", self.ranks),
            });
        }
        met
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    #[test]
    fn all_go_on_together() {
        let abort = Arc::new(Abort::new(Duration::from_secs(60)));
        let meeting = Meeting::new(4, &abort);
        let sum = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (meeting, sum) = (&meeting, &sum);
                scope.spawn(move || {
                    for round in 0..200 {
                        sum.fetch_add(1, Ordering::Relaxed);
                        meeting.wait(rank).unwrap();
                        assert_eq!(sum.load(Ordering::Relaxed), 4 * (round + 1));
                        meeting.wait(rank).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_fails_holds_nobody() {
        let abort = Arc::new(Abort::new(Duration::from_secs(60)));
        let meeting = Meeting::new(3, &abort);
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..2)
                .map(|rank| {
                    let meeting = &meeting;
                    scope.spawn(move || meeting.wait(rank))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(20));
            abort.stop();
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), Err(Stop::Aborted));
            }
        });
        // Without a failure, patience ends.
        let abort = Arc::new(Abort::new(Duration::from_millis(20)));
        assert_eq!(Meeting::new(2, &abort).wait(0), Err(Stop::TimedOut));
        assert!(abort.failures()[0].message.contains("1 of 2 ranks"));
    }
}
