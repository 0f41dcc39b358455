//! The host thread of a rank. It issues codes in order, spends the host time of each, and waits
//! where necessary.

use super::{Blocked, IN_FLIGHT, Pass, PassTimes, Rank};
use crate::SimError;
use crate::clock::NEVER;
use crate::host::{Action, Code, SectionCode};
use crate::price::Load;
use crate::streams::{Entry, EntryKind, Event, NO_SPAN, State};
use shardlab_plan::ir::{InstrId, StreamId};
use shardlab_plan::record::{Blocker, Span};
use shardlab_plan::units::Picos;

impl<'a> Rank<'a> {
    fn section(&self) -> (&'a Pass, &'a SectionCode) {
        let pass = &self.tables.passes[self.pass as usize];
        (pass, &self.tables.sections[pass.section])
    }

    /// Returns the slot of an event in the current pass.
    pub(super) fn slot(&self, event: u32) -> u32 {
        (self.pass % (IN_FLIGHT as u32 + 1)) * self.tables.events as u32 + event
    }

    /// Lets the host issue until it is blocked or has issued `batch` entries.
    ///
    /// # Errors
    /// Fails if a code waits for an event that its pass has not recorded.
    pub(super) fn run_host(&mut self, mut batch: u32) -> Result<(), SimError> {
        while self.blocked == Blocked::No && batch > 0 {
            let (pass, section) = self.section();
            let code = section.codes[self.code];
            if !self.paid && !self.pay(pass, code.cost) {
                return Ok(());
            }
            match code.action {
                Action::Nothing => {}
                Action::HostWait => {
                    if !self.wait_on_host(code)? {
                        return Ok(());
                    }
                }
                Action::Task | Action::GraphTask | Action::Record | Action::Wait => {
                    if self.streams[usize::from(code.stream)].ring.is_full() {
                        self.blocked = Blocked::Room(code.stream);
                        return Ok(());
                    }
                    let entry = match code.action {
                        Action::Task => self.task(pass, code, EntryKind::Task),
                        Action::GraphTask => self.task(pass, code, EntryKind::GraphTask),
                        _ => self.event(code)?,
                    };
                    self.push(code.stream, entry);
                    batch -= 1;
                }
            }
            self.next_code(pass, section);
        }
        Ok(())
    }

    /// Spends the host time of the current code. Returns false if the host first waits until the
    /// device has drained.
    fn pay(&mut self, pass: &Pass, cost: u64) -> bool {
        let stall = pass.stalls.get(self.stall);
        if let Some(stall) = stall.filter(|s| s.code as usize == self.code) {
            if stall.drain && !self.drained() {
                self.blocked = Blocked::Drain;
                return false;
            }
            self.host += stall.cost;
            self.stall += 1;
        }
        self.host += cost;
        self.paid = true;
        true
    }

    /// Waits for an event on the host. Returns false if the event has no time yet.
    fn wait_on_host(&mut self, code: Code) -> Result<bool, SimError> {
        let slot = self.slot(code.arg);
        self.expect_recorded(slot, code.arg, code.instr)?;
        let time = self.events[slot as usize].time;
        if time == NEVER {
            self.blocked = Blocked::Event(slot);
            return Ok(false);
        }
        self.host = self.host.max(time) + self.tables.host_wait;
        Ok(true)
    }

    /// Returns the entry of a task, which is counted.
    fn task(&mut self, pass: &Pass, code: Code, kind: EntryKind) -> Entry {
        let span = if pass.recorded {
            self.open_span(code.stream, code.instr)
        } else {
            NO_SPAN
        };
        let cost = &self.tables.costs[code.arg as usize];
        let mut sequence = 0;
        if cost.load == Load::Collective {
            let comm = &mut self.comms[usize::from(cost.comm)];
            sequence = comm.issued;
            comm.issued += 1;
            self.collectives[0] += cost.bytes;
        }
        self.passes[self.pass as usize].tasks += 1;
        Entry {
            issue: self.host,
            arg: code.arg,
            span,
            sequence,
            kind,
            pass: self.pass as u8,
        }
    }

    /// Returns the entry that records an event, or waits for it.
    fn event(&mut self, code: Code) -> Result<Entry, SimError> {
        let slot = self.slot(code.arg);
        let kind = if code.action == Action::Record {
            self.events[slot as usize] = Event {
                pass: self.pass + 1,
                ..Event::FRESH
            };
            EntryKind::Record
        } else {
            self.expect_recorded(slot, code.arg, code.instr)?;
            EntryKind::Wait
        };
        Ok(Entry {
            issue: self.host,
            arg: slot,
            span: NO_SPAN,
            sequence: 0,
            kind,
            pass: self.pass as u8,
        })
    }

    /// Puts an entry into a stream.
    fn push(&mut self, stream: u8, entry: Entry) {
        let to = &mut self.streams[usize::from(stream)];
        if to.ring.is_empty() && to.state == State::Idle {
            self.dirty |= 1 << stream;
        }
        to.ring.push(entry);
    }

    fn expect_recorded(&self, slot: u32, event: u32, instr: u32) -> Result<(), SimError> {
        let recorded = self.events[slot as usize].pass;
        if recorded == self.pass + 1 {
            return Ok(());
        }
        Err(SimError::Internal(format!(
            "instruction {instr} waits for event {event}, which this pass has not recorded"
        )))
    }

    fn open_span(&mut self, stream: u8, instr: u32) -> u32 {
        self.spans.push(Span {
            instr: InstrId(instr),
            stream: StreamId(stream),
            issued: Picos(self.host),
            ready: Picos::ZERO,
            start: Picos::ZERO,
            end: Picos::ZERO,
            alone: Picos::ZERO,
            blocker: Blocker::None,
        });
        self.spans.len() as u32 - 1
    }

    /// Advances to the next code.
    fn next_code(&mut self, pass: &Pass, section: &SectionCode) {
        if pass.recorded {
            self.host_times.push(self.host);
        }
        self.paid = false;
        self.code += 1;
        if self.code < section.codes.len() {
            return;
        }
        let times = &mut self.passes[self.pass as usize];
        times.host_end = self.host;
        times.issued = true;
        self.code = 0;
        self.stall = 0;
        self.pass += 1;
        if self.pass as usize == self.tables.passes.len() {
            self.blocked = Blocked::Finished;
            return;
        }
        self.passes.push(PassTimes::default());
        let gate = (self.pass as usize).checked_sub(self.tables.in_flight);
        match gate {
            Some(before) if !self.passes[before].complete() => {
                self.blocked = Blocked::Pass(before as u32)
            }
            _ => self.begin_pass(),
        }
    }

    fn begin_pass(&mut self) {
        if let Some(before) = (self.pass as usize).checked_sub(self.tables.in_flight) {
            self.host = self.host.max(self.passes[before].device_end);
        }
        self.passes[self.pass as usize].start = self.host;
    }

    pub(super) fn drained(&self) -> bool {
        self.running == 0 && self.streams.iter().all(|s| s.ring.is_empty())
    }

    /// Unblocks the host if the event that it waits for has happened.
    pub(super) fn unblock(&mut self) {
        match self.blocked {
            Blocked::No | Blocked::Finished => return,
            Blocked::Room(s) => {
                if self.streams[usize::from(s)].ring.is_full() {
                    return;
                }
                self.host = self.host.max(self.now);
            }
            Blocked::Event(slot) => {
                if self.events[slot as usize].time == NEVER {
                    return;
                }
            }
            Blocked::Pass(pass) => {
                if !self.passes[pass as usize].complete() {
                    return;
                }
                self.begin_pass();
            }
            Blocked::Drain => {
                if !self.drained() {
                    return;
                }
                self.host = self.host.max(self.now);
            }
        }
        self.blocked = Blocked::No;
    }
}
