//! Events of one rank. They complete once per pass; streams and the host wait for them.

use crate::base::abort::{Abort, WaitLimit, Wake, lock};
use crate::base::failure::Stop;
use shardlab_plan::ir::EventId;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Events {
    done: Vec<AtomicBool>,
    sleepers: AtomicU32,
    sleep: Mutex<()>,
    changed: Condvar,
    abort: Arc<Abort>,
}

impl Wake for Events {
    fn wake(&self) {
        let _held = lock(&self.sleep);
        self.changed.notify_all();
    }
}

impl Events {
    pub(crate) fn new(count: u32, abort: Arc<Abort>) -> Self {
        Self {
            done: (0..count).map(|_| AtomicBool::new(false)).collect(),
            sleepers: AtomicU32::new(0),
            sleep: Mutex::new(()),
            changed: Condvar::new(),
            abort,
        }
    }

    /// Resets all events. Called on an idle device at the start of a pass.
    pub(crate) fn reset(&self) {
        self.done
            .iter()
            .for_each(|d| d.store(false, Ordering::Relaxed));
    }

    /// Completes an event.
    pub(crate) fn set(&self, event: EventId) {
        // Sequentially consistent with the count of sleepers, so either this thread sees the
        // sleeper, or the sleeper sees the event.
        self.done[event.index()].store(true, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _held = lock(&self.sleep);
            self.changed.notify_all();
        }
    }

    /// Blocks until the event is complete. Returns whether it blocked.
    pub(crate) fn wait(&self, event: EventId) -> Result<bool, Stop> {
        let done = &self.done[event.index()];
        if done.load(Ordering::Acquire) {
            return Ok(false);
        }
        let guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let (guard, r) = self
            .abort
            .wait(&self.changed, guard, WaitLimit::Secondary, |()| {
                done.load(Ordering::SeqCst).then_some(())
            });
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
        r.map(|()| true)
    }
}
