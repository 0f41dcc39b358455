//! Streams and events of one rank: FIFO queues of issued work.

use crate::clock::{NEVER, Progress};

/// No span: the task belongs to a pass that is not recorded.
pub(crate) const NO_SPAN: u32 = u32::MAX;

/// What a queue entry does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// Runs.
    Task,
    /// Runs as a node of a captured graph.
    GraphTask,
    /// Holds the queue until an event is complete.
    Wait,
    /// Completes an event.
    Record,
}

/// Entry of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Time at which the host finished issuing it.
    pub(crate) issue: u64,
    /// Cost index or event slot.
    pub(crate) arg: u32,
    /// Span of a recorded task.
    pub(crate) span: u32,
    /// Position of a collective on its communicator.
    pub(crate) sequence: u32,
    /// Kind.
    pub(crate) kind: EntryKind,
    /// Slot of its pass.
    pub(crate) pass: u8,
}

const EMPTY: Entry = Entry {
    issue: 0,
    arg: 0,
    span: NO_SPAN,
    sequence: 0,
    kind: EntryKind::Wait,
    pass: 0,
};

/// A bounded queue.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    slots: Box<[Entry]>,
    head: u32,
    tail: u32,
    depth: u32,
}

impl Ring {
    /// Creates a queue of `depth` entries (at least one).
    pub(crate) fn new(depth: u32) -> Self {
        let depth = depth.clamp(1, 1 << 20);
        let slots = vec![EMPTY; depth.next_power_of_two() as usize].into_boxed_slice();
        Self {
            slots,
            head: 0,
            tail: 0,
            depth,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.tail.wrapping_sub(self.head) >= self.depth
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    /// Appends an entry. The caller must have checked that there is room.
    pub(crate) fn push(&mut self, entry: Entry) {
        let mask = self.slots.len() as u32 - 1;
        self.slots[(self.tail & mask) as usize] = entry;
        self.tail = self.tail.wrapping_add(1);
    }

    /// Returns the oldest entry. The queue must not be empty.
    pub(crate) fn front(&self) -> &Entry {
        let mask = self.slots.len() as u32 - 1;
        &self.slots[(self.head & mask) as usize]
    }

    pub(crate) fn pop(&mut self) {
        self.head = self.head.wrapping_add(1);
    }
}

/// State of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Queue empty.
    Idle,
    /// Its head waits for an event.
    OnEvent,
    /// Its head waits for its turn on a communicator.
    OnComm,
    /// Its head starts at the time in the stream's key.
    Pending,
    /// Its head waits for SMs. At the time in the stream's key it gets them in any case.
    OnSms,
    /// A collective holds its SMs and waits for the other ranks to arrive.
    OnRanks,
    /// A task runs until the time in the stream's key.
    Running,
    /// A collective is done on this rank and waits for the other ranks to end.
    Ending,
}

/// Cause of the time of a stream's cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Nothing ran before.
    Nothing,
    /// The host issued late.
    Host,
    /// The previous task on the stream.
    Stream(u32),
    /// A task before an event.
    Event(u32),
}

/// One stream.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    /// Entries that the host has issued.
    pub(crate) ring: Ring,
    /// Current state.
    pub(crate) state: State,
    /// Time at which everything before the head is complete.
    pub(crate) cursor: u64,
    /// Cause of the last completion.
    pub(crate) cause: Cause,
    /// Longest chain of dependent work up to the cursor.
    pub(crate) chain: u64,
    /// Running task's progress.
    pub(crate) progress: Progress,
    /// Running task.
    pub(crate) task: Entry,
    /// Time at which the running task was ready, before it waited for SMs or ranks.
    pub(crate) wanted: u64,
    /// Time at which the running collective was ready for the other ranks.
    pub(crate) arrived: u64,
    /// Work done on the stream since the start.
    pub(crate) busy: u64,
    /// CUDA priority (lower is more urgent).
    pub(crate) priority: i8,
}

impl Stream {
    pub(crate) fn new(depth: u32, priority: i8) -> Self {
        Self {
            ring: Ring::new(depth),
            state: State::Idle,
            cursor: 0,
            cause: Cause::Nothing,
            chain: 0,
            progress: Progress::NONE,
            task: EMPTY,
            wanted: 0,
            arrived: 0,
            busy: 0,
            priority,
        }
    }
}

/// One recording of an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    /// Time at which it completes; [`NEVER`] while unknown.
    pub(crate) time: u64,
    /// Longest chain of dependent work before it.
    pub(crate) chain: u64,
    /// The span that completed it.
    pub(crate) span: u32,
    /// The last pass that recorded it, counted from 1.
    pub(crate) pass: u32,
}

impl Event {
    pub(crate) const FRESH: Self = Self {
        time: NEVER,
        chain: 0,
        span: NO_SPAN,
        pass: 0,
    };
}
