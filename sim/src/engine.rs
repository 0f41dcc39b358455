//! The event loop of one rank.
//!
//! Host and device each have a clock. The host runs ahead and fills queues until one is full or it
//! has to wait for the device. The device follows event by event and never overtakes the host.
//! Device events are starts and ends of tasks. A rank has only a few streams, so the next event is
//! found by scanning them, and rates change only when the set of running tasks changes. The loop
//! does not allocate memory.

use crate::clock::{NEVER, ONE, Progress};
use crate::contention::Pressure;
use crate::price::{Cost, Load};
use crate::streams::{Cause, EntryKind, Event, NO_SPAN, State, Stream};
use shardlab_plan::record::{Blocker, Span};
use shardlab_plan::units::Picos;

mod driver;
mod issue;
mod jitter;
mod tables;

pub(crate) use driver::{run_all, run_one};
pub(crate) use jitter::Jitter;
pub(crate) use tables::{Pass, Stall, Tables};

/// Maximum number of passes in flight: before the host starts a pass, the pass this many before it
/// must be complete.
pub(crate) const IN_FLIGHT: usize = 2;

/// The other ranks, from the point of view of a collective.
pub(crate) trait Peers {
    /// Marks a rank as ready for a collective. Returns true if it was the last one, so that all
    /// ranks start now.
    fn arrive(&mut self, rank: u32, comm: u8) -> bool;
    /// Marks a rank as done with a collective. Returns true if it was the last one, so that all
    /// ranks end now.
    fn leave(&mut self, rank: u32, comm: u8) -> bool;
}

/// Identical ranks, which all arrive and leave together.
pub(crate) struct Symmetric;

impl Peers for Symmetric {
    #[inline]
    fn arrive(&mut self, _: u32, _: u8) -> bool {
        true
    }
    #[inline]
    fn leave(&mut self, _: u32, _: u8) -> bool {
        true
    }
}

/// A communicator on one rank.
#[derive(Clone, Copy, Debug, Default)]
struct Comm {
    /// Number of collectives issued.
    issued: u32,
    /// Number of collectives that have ended, which is the index of the next one that may start.
    ended: u32,
    /// Time at which the last collective ended.
    free: u64,
    /// Longest chain of dependent work up to `free`.
    chain: u64,
    /// Span of the last collective.
    span: u32,
}

/// Progress of a pass.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PassTimes {
    /// Time at which the host started to issue it.
    pub(crate) start: u64,
    /// Time at which the host had issued it.
    pub(crate) host_end: u64,
    /// Time at which its last task ended.
    pub(crate) device_end: u64,
    tasks: u32,
    ended: u32,
    issued: bool,
}

impl PassTimes {
    fn complete(&self) -> bool {
        self.issued && self.tasks == self.ended
    }

    /// Returns the time at which both host and device were done with it.
    pub(crate) fn end(&self) -> u64 {
        self.host_end.max(self.device_end)
    }
}

/// What the host waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocked {
    No,
    /// Room in a queue.
    Room(u8),
    /// An event.
    Event(u32),
    /// A pass.
    Pass(u32),
    /// For the device to be idle, before memory is released.
    Drain,
    /// Nothing: everything is issued.
    Finished,
}

/// One rank: its host thread, streams, events and communicators.
pub(crate) struct Rank<'a> {
    tables: &'a Tables<'a>,
    id: u32,
    // Device.
    now: u64,
    streams: Vec<Stream>,
    /// Time of each stream's next event; stored separately because every event scans it.
    keys: [u64; 8],
    /// Bit set of streams whose head has to be examined.
    dirty: u8,
    /// Bit set of streams with a task on the device.
    running: u8,
    /// Bit sets of streams that wait for an event, a communicator or SMs.
    on_event: u8,
    on_comm: u8,
    on_sms: u8,
    /// Whether the running set has changed.
    changed: bool,
    events: Vec<Event>,
    comms: Vec<Comm>,
    // Host.
    host: u64,
    pass: u32,
    code: usize,
    stall: usize,
    /// Whether the host has already spent the cost of the current code.
    paid: bool,
    blocked: Blocked,
    /// Times of every pass.
    pub(crate) passes: Vec<PassTimes>,
    jitter: Option<Jitter>,
    /// Longest chain of dependent work.
    pub(crate) chain: u64,
    /// Payload of issued and of ended collectives, in bytes.
    pub(crate) collectives: [u64; 2],
    /// Spans of the recorded pass in issue order.
    pub(crate) spans: Vec<Span>,
    /// Host time after each code of the recorded pass.
    pub(crate) host_times: Vec<u64>,
}

impl<'a> Rank<'a> {
    pub(crate) fn new(tables: &'a Tables<'a>, id: u32, jitter: Option<Jitter>) -> Self {
        let recorded = tables
            .passes
            .iter()
            .find(|p| p.recorded)
            .map(|p| &tables.sections[p.section]);
        let mut passes = Vec::with_capacity(tables.passes.len());
        passes.push(PassTimes::default());
        Self {
            tables,
            id,
            now: 0,
            streams: tables
                .priorities
                .iter()
                .map(|&p| Stream::new(tables.queue_depth, p))
                .collect(),
            keys: [NEVER; 8],
            dirty: 0,
            running: 0,
            on_event: 0,
            on_comm: 0,
            on_sms: 0,
            changed: false,
            events: vec![Event::FRESH; tables.events * (IN_FLIGHT + 1)],
            comms: vec![
                Comm {
                    span: NO_SPAN,
                    ..Comm::default()
                };
                tables.comms
            ],
            host: 0,
            pass: 0,
            code: 0,
            stall: 0,
            paid: false,
            blocked: if tables.passes.is_empty() {
                Blocked::Finished
            } else {
                Blocked::No
            },
            passes,
            jitter,
            chain: 0,
            collectives: [0; 2],
            spans: Vec::with_capacity(recorded.map_or(0, |s| s.tasks)),
            host_times: Vec::with_capacity(recorded.map_or(0, |s| s.codes.len())),
        }
    }

    /// Examines the heads of all dirty streams: completes events, passes waits, schedules tasks.
    fn settle(&mut self) {
        while self.dirty != 0 {
            let s = self.dirty.trailing_zeros() as usize;
            self.dirty &= self.dirty - 1;
            self.examine(s);
        }
    }

    fn examine(&mut self, s: usize) {
        let bit = 1u8 << s;
        let stream = &mut self.streams[s];
        self.on_event &= !bit;
        self.on_comm &= !bit;
        loop {
            if stream.ring.is_empty() {
                stream.state = State::Idle;
                self.keys[s] = NEVER;
                return;
            }
            let entry = stream.ring.front();
            match entry.kind {
                EntryKind::Wait => {
                    let event = &self.events[entry.arg as usize];
                    if event.time == NEVER {
                        stream.state = State::OnEvent;
                        self.on_event |= bit;
                        self.keys[s] = NEVER;
                        return;
                    }
                    if event.time > stream.cursor {
                        stream.cursor = event.time + self.tables.event_latency;
                        stream.cause = if event.span == NO_SPAN {
                            Cause::Host
                        } else {
                            Cause::Event(event.span)
                        };
                    }
                    stream.chain = stream.chain.max(event.chain);
                    stream.ring.pop();
                }
                EntryKind::Record => {
                    let event = &mut self.events[entry.arg as usize];
                    event.chain = stream.chain;
                    if entry.issue > stream.cursor {
                        event.time = entry.issue;
                    } else {
                        event.time = stream.cursor;
                        event.span = match stream.cause {
                            Cause::Stream(x) | Cause::Event(x) => x,
                            Cause::Nothing | Cause::Host => NO_SPAN,
                        };
                    }
                    stream.ring.pop();
                    self.dirty |= self.on_event;
                }
                EntryKind::Task | EntryKind::GraphTask => {
                    let gap = if entry.kind == EntryKind::Task {
                        self.tables.gap
                    } else {
                        self.tables.graph_gap
                    };
                    let mut start = (stream.cursor + gap).max(entry.issue + self.tables.latency);
                    let cost = &self.tables.costs[entry.arg as usize];
                    if cost.load == Load::Collective {
                        let comm = &self.comms[usize::from(cost.comm)];
                        if comm.ended != entry.sequence {
                            stream.state = State::OnComm;
                            self.on_comm |= bit;
                            self.keys[s] = NEVER;
                            return;
                        }
                        start = start.max(comm.free + gap);
                    }
                    stream.state = State::Pending;
                    self.keys[s] = start;
                    return;
                }
            }
        }
    }

    /// Returns the time of the next device event.
    fn next_event(&self) -> u64 {
        self.keys.iter().copied().fold(NEVER, u64::min)
    }

    /// Processes all events at time `t`: ends first, then starts by priority.
    fn process<P: Peers>(&mut self, t: u64, peers: &mut P) {
        self.now = t;
        let mut due = 0u8;
        for s in 0..self.streams.len() {
            due |= u8::from(self.keys[s] == t) << s;
        }
        let mut ending = due & self.running;
        let mut ended = false;
        while ending != 0 {
            let s = ending.trailing_zeros() as usize;
            ending &= ending - 1;
            if self.streams[s].state != State::Running {
                continue;
            }
            ended = true;
            let cost = &self.tables.costs[self.streams[s].task.arg as usize];
            if cost.load == Load::Collective && !peers.leave(self.id, cost.comm) {
                self.streams[s].state = State::Ending;
                self.keys[s] = NEVER;
                self.changed = true;
            } else {
                self.finish(s);
            }
        }
        self.settle();
        for &s in &self.tables.by_priority {
            let bit = 1u8 << s;
            let s = usize::from(s);
            let retry = ended && self.on_sms & bit != 0;
            let waiting = matches!(self.streams[s].state, State::Pending | State::OnSms);
            if waiting && (retry || self.keys[s] <= t) {
                self.try_start(s, peers);
            }
        }
        if self.changed {
            self.update_rates();
        }
    }

    /// Returns the longest time from now during which kernels that fill the device keep a
    /// collective of stream `s` from starting.
    fn wait_for_sms(&self, s: usize) -> u64 {
        let rules = &self.tables.rules;
        let fraction = rules.start_wait[usize::from(self.streams[s].priority < 0)];
        if !rules.on || fraction == 0 {
            return 0;
        }
        let mut wait = 0;
        let mut others = self.running & !(1 << s);
        while others != 0 {
            let o = others.trailing_zeros() as usize;
            others &= others - 1;
            let cost = &self.tables.costs[self.streams[o].task.arg as usize];
            if cost.fills {
                let left = self.keys[o].saturating_sub(self.now);
                wait = wait.max(if fraction == ONE {
                    left
                } else {
                    left.min(cost.work / u64::from(ONE) * u64::from(fraction))
                });
            }
        }
        wait
    }

    /// Returns whether a kernel on stream `s` has to wait until a running one ends, because both
    /// fill the device and at least one is bound by arithmetic.
    fn waits_for_kernel(&self, s: usize, cost: &Cost) -> bool {
        let mut others = self.running & !(1 << s);
        while others != 0 {
            let o = others.trailing_zeros() as usize;
            others &= others - 1;
            let running = &self.tables.costs[self.streams[o].task.arg as usize];
            if self.tables.rules.excludes(running, cost) {
                return true;
            }
        }
        false
    }

    fn try_start<P: Peers>(&mut self, s: usize, peers: &mut P) {
        let bit = 1u8 << s;
        let entry = *self.streams[s].ring.front();
        let cost = self.tables.costs[entry.arg as usize];
        let first = self.streams[s].state == State::Pending;
        if first {
            self.streams[s].wanted = self.now;
        }
        if cost.load == Load::Collective && !cost.on_engines {
            // The collective starts at its time at the latest. Until then, it is examined again
            // whenever a kernel ends.
            let forced = !first && self.keys[s] <= self.now;
            let wait = if forced { 0 } else { self.wait_for_sms(s) };
            if wait > 0 {
                self.streams[s].state = State::OnSms;
                self.on_sms |= bit;
                let whole =
                    self.tables.rules.start_wait[usize::from(self.streams[s].priority < 0)] == ONE;
                if first {
                    self.keys[s] = if whole { NEVER } else { self.now + wait };
                }
                return;
            }
        }
        if self.waits_for_kernel(s, &cost) {
            self.streams[s].state = State::OnSms;
            self.on_sms |= bit;
            self.keys[s] = NEVER;
            return;
        }
        self.on_sms &= !bit;
        self.running |= bit;
        self.changed = true;
        let stream = &mut self.streams[s];
        stream.task = entry;
        stream.arrived = self.now;
        stream.ring.pop();
        if cost.load == Load::Collective && !peers.arrive(self.id, cost.comm) {
            stream.state = State::OnRanks;
            self.keys[s] = NEVER;
            return;
        }
        self.begin(s);
    }

    /// Starts the task of stream `s` now.
    fn begin(&mut self, s: usize) {
        let now = self.now;
        let stream = &mut self.streams[s];
        let entry = stream.task;
        let cost = &self.tables.costs[entry.arg as usize];
        let mut work = cost.work;
        if let Some(jitter) = &mut self.jitter {
            work = jitter.apply(work, cost.load);
        }
        let comm = (cost.load == Load::Collective).then(|| &self.comms[usize::from(cost.comm)]);
        stream.state = State::Running;
        stream.progress = Progress::start(work, now);
        self.keys[s] = stream.progress.end;
        stream.chain = stream.chain.max(comm.map_or(0, |c| c.chain)) + work;
        stream.busy += work;
        if entry.span != NO_SPAN {
            let issued = entry.issue + self.tables.latency;
            let blocker = if comm.is_some() && now > stream.arrived {
                Blocker::Rank
            } else if now > stream.wanted {
                Blocker::Sms
            } else if comm.is_some_and(|c| c.free >= issued && c.free > stream.cursor) {
                match comm.map_or(NO_SPAN, |c| c.span) {
                    NO_SPAN => Blocker::None,
                    span => Blocker::Communicator(span),
                }
            } else if issued > stream.cursor {
                Blocker::Host
            } else {
                match stream.cause {
                    Cause::Host => Blocker::Host,
                    Cause::Event(x) => Blocker::Event(x),
                    Cause::Stream(NO_SPAN) | Cause::Nothing => Blocker::None,
                    Cause::Stream(x) => Blocker::Stream(x),
                }
            };
            let span = &mut self.spans[entry.span as usize];
            span.ready = Picos(stream.cursor);
            span.start = Picos(now);
            span.alone = Picos(work);
            span.blocker = blocker;
        }
    }

    fn finish(&mut self, s: usize) {
        let now = self.now;
        let bit = 1u8 << s;
        let stream = &mut self.streams[s];
        let entry = stream.task;
        let cost = &self.tables.costs[entry.arg as usize];
        stream.cursor = now;
        stream.cause = Cause::Stream(entry.span);
        stream.state = State::Idle;
        self.chain = self.chain.max(stream.chain);
        self.keys[s] = NEVER;
        self.running &= !bit;
        self.changed = true;
        self.dirty |= bit;
        if cost.load == Load::Collective {
            let comm = &mut self.comms[usize::from(cost.comm)];
            comm.ended += 1;
            comm.free = now;
            comm.chain = stream.chain;
            comm.span = entry.span;
            self.collectives[1] += cost.bytes;
            self.dirty |= self.on_comm;
        }
        if entry.span != NO_SPAN {
            self.spans[entry.span as usize].end = Picos(now);
        }
        // The slot contains the pass modulo 256, which is unique among the passes in flight.
        let pass = self.pass_of(entry.pass);
        let times = &mut self.passes[pass];
        times.ended += 1;
        times.device_end = now;
    }

    fn pass_of(&self, slot: u8) -> usize {
        let last = self.passes.len() - 1;
        last - usize::from((last as u8).wrapping_sub(slot))
    }

    fn cost_of(&self, s: usize) -> &'a Cost {
        &self.tables.costs[self.streams[s].task.arg as usize]
    }

    /// Sets the rate of every running task to what the set of running tasks allows.
    fn update_rates(&mut self) {
        self.changed = false;
        let rules = &self.tables.rules;
        if !rules.on || self.running == 0 {
            return;
        }
        let alone = self.running & (self.running - 1) == 0 && !rules.shares();
        let mut pressure = Pressure::default();
        if !alone {
            let mut set = self.running;
            while set != 0 {
                let s = set.trailing_zeros() as usize;
                set &= set - 1;
                pressure.add(self.cost_of(s), self.streams[s].state != State::Running);
            }
        }
        let mut set = self.running;
        while set != 0 {
            let s = set.trailing_zeros() as usize;
            set &= set - 1;
            if self.streams[s].state == State::Running {
                let rate = if alone {
                    ONE
                } else {
                    rules.rate(&pressure, self.cost_of(s))
                };
                let progress = &mut self.streams[s].progress;
                progress.set_rate(rate, self.now);
                self.keys[s] = progress.end;
            }
        }
    }

    /// Starts the collective that this rank waits for, because the last rank has arrived.
    pub(crate) fn start_collective(&mut self, comm: u8, now: u64) {
        if let Some(s) = self.holding(comm, State::OnRanks) {
            self.now = now;
            self.begin(s);
            self.update_rates();
        }
    }

    /// Ends the collective that this rank is in, because the last rank has finished.
    pub(crate) fn end_collective<P: Peers>(&mut self, comm: u8, now: u64, peers: &mut P) {
        if let Some(s) = self.holding(comm, State::Ending) {
            self.now = now;
            self.finish(s);
            self.settle();
            // Tasks that may start at this very moment start in a separate event. Streams that wait
            // for SMs are examined again.
            for &w in &self.tables.by_priority {
                if self.on_sms & (1 << w) != 0 {
                    self.try_start(usize::from(w), peers);
                }
            }
            self.update_rates();
        }
    }

    fn holding(&self, comm: u8, state: State) -> Option<usize> {
        (0..self.streams.len())
            .find(|&s| self.streams[s].state == state && self.cost_of(s).comm == comm)
    }

    /// Returns the work of the busiest stream.
    pub(crate) fn busiest(&self) -> u64 {
        self.streams.iter().map(|s| s.busy).max().unwrap_or(0)
    }

    /// Returns the time at which everything has ended.
    pub(crate) fn makespan(&self) -> u64 {
        self.passes.iter().map(PassTimes::end).max().unwrap_or(0)
    }
}
