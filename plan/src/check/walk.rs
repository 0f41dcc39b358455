//! The walk over the instructions of `Init`, `First`, `Steady`, `Steady`, `Validation`, `Steady` as
//! one trace. Happens-before and shadow memory are carried from pass to pass, so that hazards
//! between steps are found.

use super::access::Conflict;
use super::capture::Captured;
use super::clock::{Clock, Known, Order, Use, Waited};
use super::describe::{self, Place};
use super::norm::Norms;
use super::report::{Sink, WaitCount};
use super::rules::RuleId;
use super::shadow::{Cell, Space};
use super::state::Facts;
use super::step::Step;
use crate::ir::InstrId;
use crate::memory::Memory;
use crate::program::{Instr, Op, Program, Section, SectionKind};

/// One pass over a section.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    /// Section.
    pub(super) kind: SectionKind,
    /// Number of the pass over this section, starting at 1.
    pub(super) number: u32,
    /// Positions up to this one belong to earlier passes.
    pub(super) base: u32,
    /// First instruction of the section.
    pub(super) first: u32,
}

impl Pass {
    fn place(self) -> Place {
        Place {
            section: self.kind.name(),
            pass: self.number,
        }
    }
}

/// The device work of an instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Position and lane.
    pub(super) me: Use,
    /// Instruction.
    pub(super) id: InstrId,
    /// The instruction with its tag.
    pub(super) instr: Instr,
    /// Index of its next operand, for captured addresses.
    pub(super) operand: u32,
}

/// State of the walk.
pub(super) struct Walk<'a> {
    pub(super) p: &'a Program,
    pub(super) sink: &'a mut Sink,
    pub(super) order: Order,
    pub(super) cells: Vec<Cell>,
    pub(super) spaces: [Space; 3],
    pub(super) memory: Memory,
    pub(super) facts: Facts,
    pub(super) norms: Norms,
    pub(super) step: Step,
    pub(super) captured: Captured,
    pub(super) passes: Vec<Pass>,
    pub(super) conflicts: Vec<Conflict>,
    pub(super) at: u32,
    /// By communicator: the work of each rank that is known to be done when all ranks have passed
    /// its last collective.
    pub(super) barriers: Vec<Clock>,
    waits: Vec<WaitCount>,
    observer: &'a mut dyn Observe,
}

/// Observes a walk. Proofs need only the result of the walk; tests need more details.
pub(super) trait Observe {
    /// Called when a piece of work is issued, with the clock of what is done at its start.
    fn issued(&mut self, _over: &Clock) {}

    /// Called with the effect of a wait in this pass.
    fn waited(&mut self, _id: InstrId, _done: Waited) {}
}

/// Observes nothing.
impl Observe for () {}

/// Result of a walk.
pub(super) struct Walked {
    /// Waits of every pass.
    pub(super) waits: Vec<WaitCount>,
    /// Number of instructions walked.
    pub(super) instructions: u64,
}

/// Walks a program with a valid form.
pub(super) fn walk(p: &Program, sink: &mut Sink, observer: &mut dyn Observe) -> Walked {
    let facts = Facts::new(p);
    let norms = Norms::new(p, &facts);
    let mut w = Walk {
        p,
        sink,
        order: Order::new(p),
        cells: vec![Cell::default(); p.buffers.len()],
        spaces: Default::default(),
        memory: Memory::new(p, None),
        facts,
        norms,
        step: Step::new(p),
        captured: Captured::new(p),
        passes: Vec::new(),
        conflicts: Vec::new(),
        at: 0,
        barriers: vec![Clock::default(); p.communicators.len()],
        waits: Vec::new(),
        observer,
    };
    let mut order = vec![
        SectionKind::Init,
        SectionKind::First,
        SectionKind::Steady,
        SectionKind::Steady,
    ];
    if p.section(SectionKind::Validation).is_some() {
        order.extend([SectionKind::Validation, SectionKind::Steady]);
    }
    for kind in order {
        if let Some(section) = p.section(kind) {
            w.pass(section);
        }
    }
    Walked {
        waits: w.waits,
        instructions: u64::from(w.at),
    }
}

impl Walk<'_> {
    fn pass(&mut self, section: &Section) {
        let number = 1 + self
            .passes
            .iter()
            .filter(|q| q.kind == section.kind)
            .count() as u32;
        let pass = Pass {
            kind: section.kind,
            number,
            base: self.at,
            first: section.instrs.start,
        };
        self.passes.push(pass);
        self.waits.push(WaitCount {
            section: section.kind,
            total: 0,
            implied: 0,
        });
        self.order.start_pass();
        self.start_step();
        let p = self.p;
        for i in section.instrs.clone() {
            self.at += 1;
            self.instr(InstrId(i), p.instrs[i as usize]);
            if !self.conflicts.is_empty() {
                self.report_conflicts();
            }
        }
        self.end_step(section);
    }

    fn instr(&mut self, id: InstrId, instr: Instr) {
        let p = self.p;
        match instr.op {
            Op::Alloc(b) => self.alloc(id, b),
            Op::Free(b) => self.free(id, b),
            Op::Launch { stream, .. } => {
                let mut work = self.issue(id, instr, stream);
                self.launch(
                    &mut work,
                    p.reads(&p.instrs[id.index()].op),
                    p.writes(&p.instrs[id.index()].op),
                );
                self.launched(&work);
            }
            Op::Collective { id: c, stream } => {
                let mut work = self.issue(id, instr, stream);
                let c = &p.collectives[c.index()];
                self.sink.fact(RuleId::CommOrder, 1);
                self.order.serialise(work.me.lane as usize, c.comm);
                // No rank receives anything before all have started.
                let started = *self.order.clock(work.me.lane as usize);
                self.collective(&mut work, c);
                self.barriers[c.comm.index()] = started;
            }
            Op::Copy { id: c, stream } => {
                let mut work = self.issue(id, instr, stream);
                self.copy(&mut work, &p.copies[c.index()]);
            }
            Op::Record { event, stream } => {
                self.sink.fact(RuleId::Event, 1);
                if let Some(first) = self.order.record(event, stream, self.at) {
                    let first = self.id_at(first);
                    self.violate(RuleId::Event, id, Some(first), || {
                        format!("event e{} was recorded before in this pass", event.0)
                    });
                }
                self.step.recorded(event, self.order.lane(stream));
            }
            Op::Wait { event, stream } => {
                let done = self.order.wait(event, stream);
                self.waited(id, event, done);
                if stream == crate::ir::COMPUTE {
                    self.compute_waits(id, instr, event);
                }
            }
            Op::HostWait(event) => {
                self.no_host_wait_in_scope(id);
                let done = self.order.host_wait(event);
                self.waited(id, event, done);
                self.compute_waits(id, instr, event);
            }
            Op::HostWork { .. } => {}
            Op::GraphBegin(_) => self.begin_scope(id),
            Op::GraphEnd(_) => self.end_scope(id),
        }
    }

    fn issue(&mut self, id: InstrId, instr: Instr, stream: crate::ir::StreamId) -> Work {
        if !self.order.in_capture(stream) {
            self.sink.fact(RuleId::CaptureJoin, 1);
            self.violate(RuleId::CaptureJoin, id, None, || {
                "its stream is not part of the capture: no event of this scope was waited for there"
                    .into()
            });
        }
        let lane = self.order.issue(stream, self.at);
        self.check_returned(id, stream, lane);
        self.observer.issued(self.order.clock(lane));
        Work {
            me: Use {
                at: self.at,
                lane: lane as u8,
            },
            id,
            instr,
            operand: 0,
        }
    }

    fn waited(&mut self, id: InstrId, event: crate::ir::EventId, done: Waited) {
        self.sink.fact(RuleId::Event, 1);
        if let Some(w) = self.waits.last_mut() {
            w.total += 1;
            w.implied += u32::from(done == Waited::Implied);
        }
        self.observer.waited(id, done);
        if done == Waited::NotRecorded {
            self.violate(RuleId::Event, id, None, || {
                format!(
                    "event e{} has not been recorded in this pass, so nothing is waited for",
                    event.0
                )
            });
        }
    }

    /// Returns the current pass.
    pub(super) fn pass_now(&self) -> Pass {
        self.passes[self.passes.len() - 1]
    }

    /// Returns the instruction at a position.
    pub(super) fn id_at(&self, at: u32) -> InstrId {
        let pass = self.pass_at(at);
        InstrId(pass.first + (at - pass.base - 1))
    }

    fn pass_at(&self, at: u32) -> Pass {
        let i = self.passes.partition_point(|q| q.base < at);
        self.passes[i.saturating_sub(1)]
    }

    /// Describes the instruction at a position.
    pub(super) fn describe_at(&self, at: u32) -> String {
        describe::instr(self.p, self.id_at(at), Some(self.pass_at(at).place()))
    }

    /// Records a violation by an instruction of the current pass.
    pub(super) fn violate(
        &mut self,
        rule: RuleId,
        id: InstrId,
        other: Option<InstrId>,
        what: impl FnOnce() -> String,
    ) {
        let (p, place) = (self.p, self.pass_now().place());
        self.sink.violation(rule, Some(id), other, || {
            format!("{}: {}", describe::instr(p, id, Some(place)), what())
        });
    }

    /// Returns how work on a lane knows that an earlier use is done.
    pub(super) fn known(&self, lane: u8, earlier: Use) -> Known {
        self.order.clock(lane as usize).knows(earlier)
    }
}
