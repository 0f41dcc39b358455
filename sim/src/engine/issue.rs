//! The host thread of a rank. It issues codes in order, spends the host time of each, and waits
//! where necessary.

use super::{Blocked, IN_FLIGHT, Pass, PassTimes, Rank};
use crate::SimError;
use crate::clock::NEVER;
use crate::host::{Action, SectionCode};
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
    pub(super) fn run_host(&mut self, mut batch: u32) -> Result<(), SimError> {
        while self.blocked == Blocked::No && batch > 0 {
            let (pass, section) = self.section();
            let code = section.codes[self.code];
            if !self.paid {
                if let Some(stall) = pass
                    .stalls
                    .get(self.stall)
                    .filter(|s| s.code as usize == self.code)
                {
                    if stall.drain && !self.drained() {
                        self.blocked = Blocked::Drain;
                        return Ok(());
                    }
                    self.host += stall.cost;
                    self.stall += 1;
                }
                self.host += code.cost;
                self.paid = true;
            }
            let (kind, arg, sequence, span) = match code.action {
                Action::Task | Action::GraphTask => {
                    if self.streams[usize::from(code.stream)].ring.is_full() {
                        self.blocked = Blocked::Room(code.stream);
                        return Ok(());
                    }
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
                    let kind = if code.action == Action::Task {
                        EntryKind::Task
                    } else {
                        EntryKind::GraphTask
                    };
                    (kind, code.arg, sequence, span)
                }
                Action::Record | Action::Wait => {
                    if self.streams[usize::from(code.stream)].ring.is_full() {
                        self.blocked = Blocked::Room(code.stream);
                        return Ok(());
                    }
                    let slot = self.slot(code.arg);
                    if code.action == Action::Record {
                        self.events[slot as usize] = Event {
                            pass: self.pass + 1,
                            ..Event::FRESH
                        };
                        (EntryKind::Record, slot, 0, NO_SPAN)
                    } else {
                        self.expect_recorded(slot, code.arg, code.instr)?;
                        (EntryKind::Wait, slot, 0, NO_SPAN)
                    }
                }
                Action::HostWait => {
                    let slot = self.slot(code.arg);
                    self.expect_recorded(slot, code.arg, code.instr)?;
                    let time = self.events[slot as usize].time;
                    if time == NEVER {
                        self.blocked = Blocked::Event(slot);
                        return Ok(());
                    }
                    if time > self.host {
                        self.host = time;
                    }
                    self.host += self.tables.host_wait;
                    self.next_code(pass, section);
                    continue;
                }
                Action::Nothing => {
                    self.next_code(pass, section);
                    continue;
                }
            };
            let bit = 1 << code.stream;
            let pass_slot = self.pass as u8;
            let stream = &mut self.streams[usize::from(code.stream)];
            if stream.ring.is_empty() && stream.state == State::Idle {
                self.dirty |= bit;
            }
            stream.ring.push(Entry {
                issue: self.host,
                arg,
                span,
                sequence,
                kind,
                pass: pass_slot,
            });
            self.next_code(pass, section);
            batch -= 1;
        }
        Ok(())
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
