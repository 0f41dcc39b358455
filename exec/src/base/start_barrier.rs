//! Start-up barrier for the rank threads of one process.
//!
//! The barrier fails fast: if a rank drops its ticket, every waiter returns `false` instead of
//! hanging in a call such as `ncclCommInitRank`, which waits for all ranks and has no timeout.

use super::abort::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct StartBarrier {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    arrived: usize,
    dropped: usize,
}

/// One rank's ticket. Dropping it before [`Ticket::arrive`] releases the other ranks.
#[derive(Debug)]
pub(crate) struct Ticket<'a> {
    barrier: &'a StartBarrier,
    arrived: bool,
}

impl StartBarrier {
    /// Creates a barrier for a number of ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            ranks,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Issues the ticket of one rank. Must be called before anything can fail.
    pub(crate) fn ticket(&self) -> Ticket<'_> {
        Ticket {
            barrier: self,
            arrived: false,
        }
    }
}

impl Ticket<'_> {
    /// Waits until all ranks have arrived and returns `true`. Returns `false` as soon as one rank
    /// can no longer arrive.
    pub(crate) fn arrive(mut self) -> bool {
        self.arrived = true;
        let barrier = self.barrier;
        let mut state = lock(&barrier.state);
        state.arrived += 1;
        barrier.changed.notify_all();
        while state.arrived < barrier.ranks && state.dropped == 0 {
            let waited = barrier.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.arrived == barrier.ranks
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if !self.arrived {
            lock(&self.barrier.state).dropped += 1;
            self.barrier.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Returns what each of three ranks observes if the listed ranks fail before they arrive. The
    /// last rank starts after the first two have arrived or failed.
    fn observe(failing: &[usize]) -> Vec<Option<bool>> {
        let barrier = StartBarrier::new(3);
        let (started, starts) = channel();
        let mut starts = Some(starts);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let ticket = barrier.ticket();
                    let started = started.clone();
                    let starts = (rank == 2).then(|| starts.take().unwrap());
                    scope.spawn(move || {
                        if let Some(starts) = starts {
                            (0..2).for_each(|_| starts.recv().unwrap());
                        } else {
                            started.send(()).unwrap();
                        }
                        (!failing.contains(&rank)).then(|| ticket.arrive())
                    })
                })
                .collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn either_all_ranks_continue_or_none() {
        assert_eq!(observe(&[]), [Some(true); 3]);
        assert_eq!(observe(&[2]), [Some(false), Some(false), None]);
        assert_eq!(observe(&[0]), [None, Some(false), Some(false)]);
        assert_eq!(observe(&[0, 1, 2]), [None; 3]);
    }

    #[test]
    fn a_rank_that_panics_releases_the_others() {
        let barrier = StartBarrier::new(2);
        std::thread::scope(|scope| {
            let ticket = barrier.ticket();
            let panics = scope.spawn(move || {
                let _ticket = ticket;
                panic!("before arriving");
            });
            assert!(!barrier.ticket().arrive());
            assert!(panics.join().is_err());
        });
    }
}
