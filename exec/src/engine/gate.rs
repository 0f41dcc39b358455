//! Where rank threads of one process wait for one another before they issue anything.
//!
//! To take times a device may have to stop all GPUs of the process for a moment, and that ends only when their work ends:
//! were another rank's collective in flight already, it would wait for this rank for ever.

use crate::device::abort::{Abort, Patience, Stop, Wake, lock};
use crate::device::{Failure, FailureKind};
use std::sync::{Arc, Condvar, Mutex, Weak};

/// For all passes of a session.
#[derive(Debug)]
pub(crate) struct Gate {
    ranks: usize,
    /// How often all ranks have come, and how many have come since.
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
    pub(crate) fn new(ranks: usize, abort: &Abort) -> Arc<Self> {
        let gate = Arc::new(Self {
            ranks,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let waker: Weak<Self> = Arc::downgrade(&gate);
        abort.register(waker);
        gate
    }

    /// Returns when all ranks have come.
    pub(crate) fn pass(&self, rank: u32, abort: &Abort) -> Result<(), Stop> {
        let mut state = lock(&self.state);
        let round = state.0;
        state.1 += 1;
        if state.1 == self.ranks {
            *state = (round + 1, 0);
            self.changed.notify_all();
        }
        let (state, waited) = abort.wait(&self.changed, state, Patience::Cause, |s| {
            (s.0 > round).then_some(())
        });
        if waited == Err(Stop::TimedOut) {
            abort.fail(Failure {
                kind: FailureKind::Timeout,
                rank,
                stream: None,
                instr: None,
                text: String::new(),
                message: format!(
                    "{} of {} ranks have not begun the pass",
                    self.ranks - state.1,
                    self.ranks
                ),
            });
            return Err(Stop::Aborted);
        }
        waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn nobody_goes_on_before_all_have_come() {
        let abort = Abort::new(Duration::from_secs(60));
        let gate = Gate::new(4, &abort);
        let come = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (gate, abort, come) = (&gate, &abort, &come);
                scope.spawn(move || {
                    come.fetch_add(1, Ordering::SeqCst);
                    gate.pass(rank, abort).unwrap();
                    assert!(come.load(Ordering::SeqCst) >= 4);
                    come.fetch_add(1, Ordering::SeqCst);
                    gate.pass(rank, abort).unwrap();
                    assert_eq!(come.load(Ordering::SeqCst), 8);
                });
            }
        });
    }

    #[test]
    fn whoever_does_not_come_is_not_waited_for_for_ever() {
        let abort = Abort::new(Duration::from_millis(30));
        let gate = Gate::new(2, &abort);
        assert_eq!(gate.pass(1, &abort), Err(Stop::Aborted));
        assert_eq!(
            abort.failures()[0].to_string(),
            "rank 1, host: timeout: 1 of 2 ranks have not begun the pass"
        );
    }
}
