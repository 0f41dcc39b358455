//! Where all ranks wait for one another: at both ends of a recorded pass or one with large inputs, and between measurements of a calibration.
//!
//! To take times a device may have to stop all GPUs of its process for a moment, and that ends only when their work ends:
//! were another rank's collective in flight already, it would wait for this rank for ever. And the first collective of
//! a pass would show as waiting what was only another rank's making ready to record, or its making of inputs.

use crate::device::abort::{Abort, Patience, Stop, Wake, lock};
use crate::device::{Failure, FailureKind};
use crate::process::Peers;
use std::sync::{Arc, Condvar, Mutex, Weak};

/// A barrier that a failure opens. One of the standard library would hold the ranks that come to it for ever when one does
/// not come because it failed.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Ranks of this process.
    ranks: usize,
    peers: Arc<Peers>,
    /// How often all ranks have come, and how many of this process have come since.
    state: Mutex<(u64, usize)>,
    changed: Condvar,
}

impl Wake for Gate {
    fn wake(&self) {
        let _held = lock(&self.state);
        self.changed.notify_all();
    }
}

impl Gate {
    /// For so many ranks of this process and those of the others, which pass gates equally often.
    pub(crate) fn new(ranks: usize, peers: &Arc<Peers>, abort: &Abort) -> Arc<Self> {
        let gate = Arc::new(Self {
            ranks,
            peers: Arc::clone(peers),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let waker: Weak<Self> = Arc::downgrade(&gate);
        abort.register(waker);
        gate
    }

    /// Returns when all ranks of all processes have come. `doing` says what those who are missing have not done.
    pub(crate) fn pass(&self, rank: u32, abort: &Abort, doing: &str) -> Result<(), Stop> {
        let mut state = lock(&self.state);
        let round = state.0;
        state.1 += 1;
        if state.1 == self.ranks {
            // The last one here speaks for this process; nobody else moves meanwhile.
            drop(state);
            self.across(rank, abort)?;
            *lock(&self.state) = (round + 1, 0);
            self.changed.notify_all();
            return Ok(());
        }
        let (state, waited) = abort.wait(&self.changed, state, Patience::Cause, |s| {
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
        let all = self.peers.all_gather("gate", Vec::new());
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
    use crate::process::{Meeting, StoreOptions};
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);

    /// Ranks pass twice, and none before all have come.
    fn twice(gate: &Gate, ranks: std::ops::Range<u32>, all: usize, come: &AtomicUsize) {
        let abort = Abort::new(LONG);
        std::thread::scope(|scope| {
            for rank in ranks {
                let abort = &abort;
                scope.spawn(move || {
                    for round in 1..=2 {
                        come.fetch_add(1, Ordering::SeqCst);
                        gate.pass(rank, abort, "begun").unwrap();
                        assert!(come.load(Ordering::SeqCst) >= round * all);
                    }
                });
            }
        });
    }

    #[test]
    fn nobody_goes_on_before_all_have_come() {
        let abort = Abort::new(LONG);
        let gate = Gate::new(4, &Arc::new(Peers::alone()), &abort);
        twice(&gate, 0..4, 4, &AtomicUsize::new(0));
    }

    #[test]
    fn nor_before_those_of_other_processes_have() {
        // A port that is free now; whoever loses it to somebody else tries the next.
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
                    let meeting = Meeting {
                        host: "127.0.0.1".to_owned(),
                        ports,
                        process,
                        processes: 2,
                        run: "gate".to_owned(),
                        timeout: LONG,
                    };
                    let peers = if process == 0 {
                        Peers::host(&meeting, StoreOptions::new(2, "gate", LONG))
                    } else {
                        Peers::connect(&meeting)
                    };
                    let abort = Abort::new(LONG);
                    let gate = Gate::new(2, &Arc::new(peers.unwrap()), &abort);
                    twice(&gate, 2 * process..2 * process + 2, 4, come);
                });
            }
        });
        assert_eq!(come.into_inner(), 8);
    }

    #[test]
    fn whoever_does_not_come_is_not_waited_for_for_ever() {
        let abort = Abort::new(Duration::from_millis(30));
        let gate = Gate::new(2, &Arc::new(Peers::alone()), &abort);
        assert_eq!(gate.pass(1, &abort, "begun"), Err(Stop::Aborted));
        assert_eq!(
            abort.failures()[0].to_string(),
            "rank 1, host: timeout: 1 of 2 ranks have not begun"
        );
    }

    #[test]
    fn all_go_on_together() {
        let abort = Abort::new(LONG);
        let gate = Gate::new(4, &Arc::new(Peers::alone()), &abort);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (gate, abort, sum) = (&gate, &abort, &sum);
                scope.spawn(move || {
                    for round in 0..200 {
                        sum.fetch_add(1, Ordering::Relaxed);
                        gate.pass(rank, abort, "come").unwrap();
                        assert_eq!(sum.load(Ordering::Relaxed), 4 * (round + 1));
                        gate.pass(rank, abort, "come").unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_fails_holds_nobody() {
        let abort = Abort::new(LONG);
        let gate = Gate::new(3, &Arc::new(Peers::alone()), &abort);
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..2)
                .map(|rank| {
                    let (gate, abort) = (&gate, &abort);
                    scope.spawn(move || gate.pass(rank, abort, "come"))
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
