//! A stream's queue: bounded, first in first out, one producer (the host), one consumer (the worker).

use crate::device::Command;
use crate::device::abort::{Abort, Patience, Stop, Wake, lock};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

/// A command with what the host knew when it issued it.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) command: Command,
    /// Number of the task in the pass.
    pub(crate) task: u32,
    /// Host time.
    pub(crate) issued: u64,
    /// Number of the collective on its communicator.
    pub(crate) ticket: u64,
}

#[derive(Debug, Default)]
struct State {
    items: VecDeque<Entry>,
    /// The worker holds entries that it has taken.
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
    /// An empty queue that holds up to `depth` entries beside those that the worker has taken.
    pub(crate) fn new(depth: usize, abort: Arc<Abort>) -> Self {
        Self {
            state: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
            depth: depth.max(1),
            abort,
        }
    }

    /// Enqueues; blocks while the queue is full. True if it blocked.
    pub(crate) fn push(&self, entry: Entry) -> Result<bool, Stop> {
        let mut guard = lock(&self.state);
        let mut blocked = false;
        if guard.items.len() >= self.depth {
            blocked = true;
            guard.host_sleeps = true;
            let (g, r) = self
                .abort
                .wait(&self.room, guard, Patience::Consequence, |s| {
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

    /// Takes everything there is, in order, into `into` (empty); blocks while there is nothing. False when the queue is
    /// closed. What was taken before counts as done.
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

    /// Blocks until the worker has done everything.
    pub(crate) fn idle(&self) -> Result<(), Stop> {
        let mut guard = lock(&self.state);
        guard.host_sleeps = true;
        let (mut guard, r) = self
            .abort
            .wait(&self.room, guard, Patience::Consequence, |s| {
                (s.items.is_empty() && !s.busy).then_some(())
            });
        guard.host_sleeps = false;
        // After a failure the queue is empty because its commands were dropped.
        if self.abort.aborted() {
            return Err(Stop::Aborted);
        }
        r
    }

    /// Lets the worker end.
    pub(crate) fn close(&self) {
        let mut guard = lock(&self.state);
        guard.closed = true;
        self.work.notify_all();
    }
}

impl Queue {
    /// Whether nothing is enqueued or running.
    pub(crate) fn is_idle(&self) -> bool {
        let guard = lock(&self.state);
        guard.items.is_empty() && !guard.busy
    }
}
