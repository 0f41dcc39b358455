//! Barrier of all ranks: at both ends of a recorded pass or one with large inputs, and between
//! measurements of a calibration.
//!
//! To collect times, a device may have to stop all GPUs of its process for a moment, which ends
//! only when their work ends. If another rank's collective were already in flight, it would wait
//! for this rank forever. And the first collective of a pass would include the time in which
//! another rank prepares its recording or inputs.

use crate::base::abort::{Abort, WaitLimit, Wake, lock};
use crate::base::failure::Stop;
use crate::base::failure::{Failure, FailureKind};
use crate::process::ProcessGroup;
use std::sync::{Arc, Condvar, Mutex, Weak};

/// A barrier that a failure opens. The standard library's would block forever if a rank failed
/// before it arrived.
#[derive(Debug)]
pub(crate) struct StepBarrier {
    /// Number of ranks of this process.
    ranks: usize,
    peers: Arc<ProcessGroup>,
    /// Number of completed rounds, and of this process's ranks that have arrived since.
    state: Mutex<(u64, usize)>,
    changed: Condvar,
}

impl Wake for StepBarrier {
    fn wake(&self) {
        let _held = lock(&self.state);
        self.changed.notify_all();
    }
}

impl StepBarrier {
    /// Creates a barrier for `ranks` ranks of this process and those of the other processes, which
    /// wait equally often.
    pub(crate) fn new(ranks: usize, peers: &Arc<ProcessGroup>, abort: &Abort) -> Arc<Self> {
        let barrier = Arc::new(Self {
            ranks,
            peers: Arc::clone(peers),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let waker: Weak<Self> = Arc::downgrade(&barrier);
        abort.register(waker);
        barrier
    }

    /// Waits until all ranks of all processes have arrived. `doing` describes what missing ranks
    /// have not done, for the message.
    pub(crate) fn wait(&self, rank: u32, abort: &Abort, doing: &str) -> Result<(), Stop> {
        let mut state = lock(&self.state);
        let round = state.0;
        state.1 += 1;
        if state.1 == self.ranks {
            // The last rank to arrive synchronizes with the other processes; the other ranks wait
            // for it.
            drop(state);
            self.across(rank, abort)?;
            *lock(&self.state) = (round + 1, 0);
            self.changed.notify_all();
            return Ok(());
        }
        let (state, waited) = abort.wait(&self.changed, state, WaitLimit::Primary, |s| {
            (s.0 > round).then_some(())
        });
        if waited == Err(Stop::TimedOut) {
            let missing = self.ranks - state.1;
            drop(state);
            let message = format!("{missing} of {} ranks have not {doing}", self.ranks);
            return Err(fail(abort, FailureKind::Timeout, rank, message));
        }
        waited
    }

    fn across(&self, rank: u32, abort: &Abort) -> Result<(), Stop> {
        if self.peers.processes() == 1 {
            return Ok(());
        }
        let all = self.peers.all_gather("step barrier", Vec::new());
        all.map(drop)
            .map_err(|e| fail(abort, FailureKind::Remote, rank, e.to_string()))
    }
}

fn fail(abort: &Abort, kind: FailureKind, rank: u32, message: String) -> Stop {
    abort.fail(Failure {
        kind,
        rank,
        stream: None,
        instr: None,
        text: String::new(),
        message,
    });
    Stop::Aborted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Rendezvous, StoreOptions};
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);

    /// Ranks pass the barrier twice, and none before all have arrived.
    fn twice(barrier: &StepBarrier, ranks: std::ops::Range<u32>, all: usize, come: &AtomicUsize) {
        let abort = Abort::new(LONG);
        std::thread::scope(|scope| {
            for rank in ranks {
                let abort = &abort;
                scope.spawn(move || {
                    for round in 1..=2 {
                        come.fetch_add(1, Ordering::SeqCst);
                        barrier.wait(rank, abort, "begun").unwrap();
                        assert!(come.load(Ordering::SeqCst) >= round * all);
                    }
                });
            }
        });
    }

    #[test]
    fn no_rank_continues_before_all_have_arrived() {
        let abort = Abort::new(LONG);
        let barrier = StepBarrier::new(4, &Arc::new(ProcessGroup::single()), &abort);
        twice(&barrier, 0..4, 4, &AtomicUsize::new(0));
    }

    #[test]
    fn no_rank_continues_before_those_of_other_processes() {
        // A port that is free now; if another program takes it, the next one is tried.
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|l| l.local_addr())
            .unwrap()
            .port();
        let ports: Vec<u16> = (0..8).map(|n| port.saturating_add(n)).collect();
        let come = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for process in 0..2 {
                let (come, ports) = (&come, ports.clone());
                scope.spawn(move || {
                    let rendezvous = Rendezvous {
                        host: "127.0.0.1".to_owned(),
                        ports,
                        process,
                        processes: 2,
                        run: "step barrier".to_owned(),
                        timeout: LONG,
                    };
                    let peers = if process == 0 {
                        ProcessGroup::host(&rendezvous, StoreOptions::new(2, "step barrier", LONG))
                    } else {
                        ProcessGroup::connect(&rendezvous)
                    };
                    let abort = Abort::new(LONG);
                    let barrier = StepBarrier::new(2, &Arc::new(peers.unwrap()), &abort);
                    twice(&barrier, 2 * process..2 * process + 2, 4, come);
                });
            }
        });
        assert_eq!(come.into_inner(), 8);
    }

    #[test]
    fn the_wait_for_a_missing_rank_times_out() {
        let abort = Abort::new(Duration::from_millis(30));
        let barrier = StepBarrier::new(2, &Arc::new(ProcessGroup::single()), &abort);
        assert_eq!(barrier.wait(1, &abort, "begun"), Err(Stop::Aborted));
        assert_eq!(
            abort.failures()[0].to_string(),
            "rank 1, host: timeout: 1 of 2 ranks have not begun"
        );
    }

    #[test]
    fn all_ranks_continue_together() {
        let abort = Abort::new(LONG);
        let barrier = StepBarrier::new(4, &Arc::new(ProcessGroup::single()), &abort);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (barrier, abort, sum) = (&barrier, &abort, &sum);
                scope.spawn(move || {
                    for round in 0..200 {
                        sum.fetch_add(1, Ordering::Relaxed);
                        barrier.wait(rank, abort, "come").unwrap();
                        assert_eq!(sum.load(Ordering::Relaxed), 4 * (round + 1));
                        barrier.wait(rank, abort, "come").unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_failure_releases_all_ranks() {
        let abort = Abort::new(LONG);
        let barrier = StepBarrier::new(3, &Arc::new(ProcessGroup::single()), &abort);
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..2)
                .map(|rank| {
                    let (barrier, abort) = (&barrier, &abort);
                    scope.spawn(move || barrier.wait(rank, abort, "come"))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(20));
            abort.stop();
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), Err(Stop::Aborted));
            }
        });
    }
}
