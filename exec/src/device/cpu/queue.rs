//! Queue of a stream: bounded, first in, first out, with one producer (the host) and one consumer
//! (the worker).

use crate::base::abort::{Abort, WaitLimit, Wake, lock};
use crate::base::failure::Stop;
use crate::device::Command;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

/// A command, and what the host knew when it issued it.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) command: Command,
    /// Index of the task in the pass.
    pub(crate) task: u32,
    /// Host time of the issue, in nanoseconds.
    pub(crate) issued: u64,
    /// Index of the collective on its communicator.
    pub(crate) ticket: u64,
}

#[derive(Debug, Default)]
struct State {
    items: VecDeque<Entry>,
    /// Whether the worker is processing entries that it has taken.
    busy: bool,
    closed: bool,
    worker_sleeps: bool,
    host_sleeps: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    work: Condvar,
    room: Condvar,
    depth: usize,
    abort: Arc<Abort>,
}

impl Wake for Queue {
    fn wake(&self) {
        let _held = lock(&self.state);
        self.work.notify_all();
        self.room.notify_all();
    }
}

impl Queue {
    /// Creates an empty queue for up to `depth` entries, in addition to those that the worker has
    /// taken.
    pub(crate) fn new(depth: usize, abort: Arc<Abort>) -> Self {
        Self {
            state: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
            depth: depth.max(1),
            abort,
        }
    }

    /// Enqueues an entry. Blocks while the queue is full. Returns whether it blocked.
    pub(crate) fn push(&self, entry: Entry) -> Result<bool, Stop> {
        let mut guard = lock(&self.state);
        let mut blocked = false;
        if guard.items.len() >= self.depth {
            blocked = true;
            guard.host_sleeps = true;
            let (g, r) = self
                .abort
                .wait(&self.room, guard, WaitLimit::Secondary, |s| {
                    (s.items.len() < self.depth).then_some(())
                });
            guard = g;
            guard.host_sleeps = false;
            r?;
        }
        guard.items.push_back(entry);
        if std::mem::take(&mut guard.worker_sleeps) {
            drop(guard);
            self.work.notify_one();
        }
        Ok(blocked)
    }

    /// Moves all entries, in order, into `into`, which must be empty. Blocks while there are none.
    /// Returns `false` if the queue is closed. Entries that were taken before count as done.
    pub(crate) fn take(&self, into: &mut VecDeque<Entry>) -> bool {
        let mut guard = lock(&self.state);
        guard.busy = false;
        if guard.items.is_empty() {
            if guard.host_sleeps {
                self.room.notify_all();
            }
            loop {
                if guard.closed {
                    return false;
                }
                if !guard.items.is_empty() {
                    break;
                }
                guard.worker_sleeps = true;
                guard = self
                    .work
                    .wait(guard)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            guard.worker_sleeps = false;
        }
        std::mem::swap(into, &mut guard.items);
        guard.busy = true;
        if guard.host_sleeps {
            self.room.notify_all();
        }
        true
    }

    /// Blocks until the worker has processed all entries.
    pub(crate) fn idle(&self) -> Result<(), Stop> {
        let mut guard = lock(&self.state);
        guard.host_sleeps = true;
        let (mut guard, r) = self
            .abort
            .wait(&self.room, guard, WaitLimit::Secondary, |s| {
                (s.items.is_empty() && !s.busy).then_some(())
            });
        guard.host_sleeps = false;
        // After a failure, the queue is empty because its commands were dropped.
        if self.abort.aborted() {
            return Err(Stop::Aborted);
        }
        r
    }

    /// Closes the queue, which ends the worker.
    pub(crate) fn close(&self) {
        let mut guard = lock(&self.state);
        guard.closed = true;
        self.work.notify_all();
    }
}

impl Queue {
    /// Returns whether nothing is enqueued or running.
    pub(crate) fn is_idle(&self) -> bool {
        let guard = lock(&self.state);
        guard.items.is_empty() && !guard.busy
    }
}
