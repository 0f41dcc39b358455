//! Where ranks of one process that start together make sure that all of them are there, before they do what only all can do.
//!
//! Joining a communicator, or making memory known to one, ends when every rank has come to it. A rank that fails before it would
//! leave the others there for ever: no timeout ends such a call.

use super::abort::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Muster {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    come: usize,
    gone: usize,
}

/// One rank's place. Dropped before the rank has come, it says that the rank never will.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    muster: &'a Muster,
    came: bool,
}

impl Muster {
    /// For so many ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            ranks,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// The place of one of them, taken before anything can fail.
    pub(crate) fn place(&self) -> Place<'_> {
        Place {
            muster: self,
            came: false,
        }
    }
}

impl Place<'_> {
    /// Waits until all have come; whether they have. It ends at once where one never will.
    pub(crate) fn come(mut self) -> bool {
        self.came = true;
        let muster = self.muster;
        let mut state = lock(&muster.state);
        state.come += 1;
        muster.changed.notify_all();
        while state.come < muster.ranks && state.gone == 0 {
            let waited = muster.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.come == muster.ranks
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.came {
            lock(&self.muster.state).gone += 1;
            self.muster.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// What each of three ranks hears, of which those named fail on their way, the last one to start after a while.
    fn hear(failing: &[usize]) -> Vec<Option<bool>> {
        let muster = Muster::new(3);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let place = muster.place();
                    scope.spawn(move || {
                        if rank == 2 {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        (!failing.contains(&rank)).then(|| place.come())
                    })
                })
                .collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_go_on_or_none_does() {
        assert_eq!(hear(&[]), [Some(true); 3]);
        assert_eq!(hear(&[2]), [Some(false), Some(false), None]);
        assert_eq!(hear(&[0]), [None, Some(false), Some(false)]);
        assert_eq!(hear(&[0, 1, 2]), [None; 3]);
    }

    #[test]
    fn a_rank_that_panics_never_comes() {
        let muster = Muster::new(2);
        std::thread::scope(|scope| {
            let place = muster.place();
            let panics = scope.spawn(move || {
                let _place = place;
                panic!("on its way");
            });
            assert!(!muster.place().come());
            assert!(panics.join().is_err());
        });
    }
}
