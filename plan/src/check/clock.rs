//! Happens-before as vector clocks.
//!
//! Positions in the walked trace (starting at 1) serve as times. A *lane* is a sequence of device
//! work in which each item comes after the previous one: a stream, or a stream's part inside a
//! captured scope. (A replayed graph keeps only the captured edges, so the stream's own order does
//! not extend into it.) For every lane, a clock holds the last position that is known to be done.
//!
//! Each clock is kept twice: `edges` includes stream order, events and host waits; `comms` also
//! includes the order of each communicator's collectives. An order that only `comms` shows is real
//! but fragile.

use crate::ir::{COMPUTE, CommId, EventId, StreamId};
use crate::program::Program;

/// Maximum number of streams of a program.
pub(super) const MAX_STREAMS: usize = 8;
/// Number of lanes: every stream outside and inside captured scopes.
pub(super) const LANES: usize = 2 * MAX_STREAMS;

/// A position of the trace on a lane; position 0 is "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// Position.
    pub(super) at: u32,
    /// Lane.
    pub(super) lane: u8,
}

/// Last known position of every lane.
pub(super) type Times = [u32; LANES];

/// A vector clock, see the module documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock {
    edges: Times,
    comms: Times,
}

/// How an order is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// By streams, events and host waits.
    Yes,
    /// Only by the order of a communicator.
    ByCommunicator,
    /// Not at all.
    No,
}

fn join(into: &mut Times, other: &Times) -> bool {
    let mut changed = false;
    for (a, b) in into.iter_mut().zip(other) {
        changed |= *b > *a;
        *a = (*a).max(*b);
    }
    changed
}

impl Clock {
    /// Returns whether a use is known to be done.
    #[inline]
    pub(super) fn after(&self, u: Use) -> bool {
        self.edges[u.lane as usize] >= u.at
    }

    /// Returns how a use is known to be done.
    pub(super) fn knows(&self, u: Use) -> Known {
        if self.after(u) {
            Known::Yes
        } else if self.comms[u.lane as usize] >= u.at {
            Known::ByCommunicator
        } else {
            Known::No
        }
    }

    /// Returns the first of many uses (the last of each lane) that is not known to be done.
    #[inline]
    pub(super) fn missing(&self, uses: &Times) -> Option<Use> {
        (0..LANES).find(|&l| self.edges[l] < uses[l]).map(|l| Use {
            at: uses[l],
            lane: l as u8,
        })
    }

    /// Merges another clock into this one. Returns whether that added something.
    fn join(&mut self, other: &Self) -> bool {
        join(&mut self.comms, &other.comms);
        join(&mut self.edges, &other.edges)
    }
}

#[derive(Clone, Copy, Default)]
struct Event {
    clock: Clock,
    /// Pass it was recorded in.
    pass: u32,
    /// Scope instance it was recorded in (0: outside), by a captured stream.
    scope: u32,
    /// Position of the record.
    at: u32,
}

/// Effect of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// The event was not recorded in this pass.
    NotRecorded,
    /// It added nothing.
    Implied,
    /// It ordered something.
    Ordered,
}

/// All clocks of a walk.
pub(super) struct Order {
    streams: usize,
    lanes: [Clock; LANES],
    /// Last position issued on every lane.
    tails: Times,
    host: Clock,
    host_version: u32,
    seen_host: [u32; LANES],
    comms: Vec<Times>,
    events: Vec<Event>,
    pass: u32,
    /// Current scope instance; 0 is outside.
    scope: u32,
    scopes: u32,
    /// Streams that are part of the current capture.
    captured: u32,
}

impl Order {
    /// Creates the clocks of an idle device. The program's form has been checked.
    pub(super) fn new(program: &Program) -> Self {
        Self {
            streams: program.streams.len(),
            lanes: [Clock::default(); LANES],
            tails: [0; LANES],
            host: Clock::default(),
            host_version: 0,
            seen_host: [0; LANES],
            comms: vec![[0; LANES]; program.communicators.len()],
            events: vec![Event::default(); program.events as usize],
            pass: 0,
            scope: 0,
            scopes: 0,
            captured: 0,
        }
    }

    /// Starts a pass over a section: its events are not recorded yet.
    pub(super) fn start_pass(&mut self) {
        self.pass += 1;
    }

    /// Returns the lane that a stream's work goes to now.
    pub(super) fn lane(&self, stream: StreamId) -> usize {
        let s = stream.index();
        if self.scope != 0 && stream != COMPUTE && self.captured & (1 << s) != 0 {
            self.streams + s
        } else {
            s
        }
    }

    /// Returns the stream of a lane.
    pub(super) fn stream_of(&self, lane: usize) -> StreamId {
        StreamId((lane % self.streams) as u8)
    }

    /// Issues work and returns its lane.
    pub(super) fn issue(&mut self, stream: StreamId, at: u32) -> usize {
        let lane = self.lane(stream);
        if self.seen_host[lane] != self.host_version {
            self.seen_host[lane] = self.host_version;
            let host = self.host;
            self.lanes[lane].join(&host);
        }
        let clock = &mut self.lanes[lane];
        clock.edges[lane] = at;
        clock.comms[lane] = at;
        self.tails[lane] = at;
        lane
    }

    /// Orders the collective that was just issued on `lane` after the previous one of its
    /// communicator.
    pub(super) fn serialise(&mut self, lane: usize, comm: CommId) {
        let last = &mut self.comms[comm.index()];
        join(&mut self.lanes[lane].comms, last);
        *last = self.lanes[lane].comms;
    }

    /// Returns the work that is done when the next work of a lane starts.
    #[inline]
    pub(super) fn clock(&self, lane: usize) -> &Clock {
        &self.lanes[lane]
    }

    /// Returns whether the host knows that a use is done.
    pub(super) fn host_is_after(&self, u: Use) -> bool {
        self.host.after(u)
    }

    /// Returns the first of many uses (the last of each lane) that neither a lane nor the host
    /// knows to be done.
    pub(super) fn open(&self, lane: usize, uses: &Times) -> Option<Use> {
        let (own, host) = (&self.lanes[lane].edges, &self.host.edges);
        (0..LANES)
            .find(|&l| own[l].max(host[l]) < uses[l])
            .map(|l| Use {
                at: uses[l],
                lane: l as u8,
            })
    }

    /// Records an event. Returns the position of its earlier record in this pass, if any.
    pub(super) fn record(&mut self, event: EventId, stream: StreamId, at: u32) -> Option<u32> {
        let lane = self.lane(stream);
        let scope = if self.captured & (1 << stream.index()) != 0 {
            self.scope
        } else {
            0
        };
        let clock = self.lanes[lane];
        let slot = &mut self.events[event.index()];
        let before = (slot.pass == self.pass).then_some(slot.at);
        *slot = Event {
            clock,
            pass: self.pass,
            scope,
            at,
        };
        before
    }

    /// Makes a stream wait.
    pub(super) fn wait(&mut self, event: EventId, stream: StreamId) -> Waited {
        let e = self.events[event.index()];
        if e.pass != self.pass {
            return Waited::NotRecorded;
        }
        let bit = 1 << stream.index();
        if self.scope != 0 && e.scope == self.scope && self.captured & bit == 0 {
            // The stream enters the capture. From then on it knows what the event knows, and
            // nothing of its own past.
            self.captured |= bit;
            let lane = self.lane(stream);
            self.lanes[lane] = e.clock;
            self.tails[lane] = 0;
            self.seen_host[lane] = u32::MAX;
            return Waited::Ordered;
        }
        let lane = self.lane(stream);
        if self.lanes[lane].join(&e.clock) {
            Waited::Ordered
        } else {
            Waited::Implied
        }
    }

    /// Makes the host wait.
    pub(super) fn host_wait(&mut self, event: EventId) -> Waited {
        let e = self.events[event.index()];
        if e.pass != self.pass {
            return Waited::NotRecorded;
        }
        self.host_version += 1;
        if self.host.join(&e.clock) {
            Waited::Ordered
        } else {
            Waited::Implied
        }
    }

    /// Starts a captured scope, of which only the compute stream is part so far.
    pub(super) fn begin_scope(&mut self) {
        self.scopes += 1;
        self.scope = self.scopes;
        self.captured = 1 << COMPUTE.index();
    }

    /// Returns whether a stream's work is captured at this point. Outside of scopes this is always
    /// true.
    pub(super) fn in_capture(&self, stream: StreamId) -> bool {
        self.scope == 0 || self.captured & (1 << stream.index()) != 0
    }

    /// Ends a captured scope. Returns the last use of every side stream that the compute stream
    /// does not wait for.
    pub(super) fn end_scope(&mut self) -> Vec<Use> {
        let open = (self.streams..2 * self.streams)
            .filter(|&l| self.captured & (1 << (l - self.streams)) != 0)
            .map(|l| Use {
                at: self.tails[l],
                lane: l as u8,
            })
            .filter(|&u| u.at != 0 && !self.lanes[COMPUTE.index()].after(u))
            .collect();
        self.scope = 0;
        self.captured = 0;
        open
    }
}
