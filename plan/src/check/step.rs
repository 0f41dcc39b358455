//! Allocation, release and the limits of a step.

use super::access::{is_full_grad, is_grad};
use super::clock::{MAX_STREAMS, Times, Use};
use super::describe;
use super::layout;
use super::rules::RuleId;
use super::shadow::Segment;
use super::walk::{Walk, Work};
use crate::ir::{Buffer, BufferId, COMPUTE, EventId, Holds, InstrId, Pool, Role, StreamId, UnitId};
use crate::program::{InFlight, Instr, Phase, Program, Rule, Section, SectionKind};

/// A reduction, as recorded by an event.
#[derive(Clone, Copy)]
struct Reduction {
    id: InstrId,
    lane: u8,
    unit: UnitId,
    micro_batch: u16,
    /// Number of backward kernels issued to compute before it.
    kernels: u32,
}

/// A block freed before its last user was known to be done.
struct Returned {
    buffer: BufferId,
    free: InstrId,
    last: Times,
}

/// Open state within a pass.
pub(super) struct Step {
    /// Units with gradient buffers in flight, oldest first. Each has the number of buffers and the
    /// first of them.
    in_flight: Vec<(UnitId, u32, BufferId)>,
    kernels: u32,
    /// Last reduction of every lane.
    last: Vec<Option<Reduction>>,
    /// Last reduction before every event.
    before: Vec<Option<Reduction>>,
    /// A wait directly after its reduction, which is a mistake if backward continues.
    suspect: Option<(InstrId, Instr, Reduction)>,
    /// Blocks that were freed too early, by stream. They are kept until that stream's next work.
    returned: [Vec<Returned>; MAX_STREAMS],
    live: Vec<bool>,
}

impl Step {
    pub(super) fn new(p: &Program) -> Self {
        Self {
            in_flight: Vec::new(),
            kernels: 0,
            last: vec![None; super::clock::LANES],
            before: vec![None; p.events as usize],
            suspect: None,
            returned: Default::default(),
            live: vec![false; p.buffers.len()],
        }
    }

    /// Records an event on a lane.
    pub(super) fn recorded(&mut self, event: EventId, lane: usize) {
        self.before[event.index()] = self.last[lane];
    }

    /// Records an issued reduction.
    pub(super) fn reduced(&mut self, work: &Work) {
        if work.instr.phase == Phase::Backward {
            self.last[work.me.lane as usize] = Some(Reduction {
                id: work.id,
                lane: work.me.lane,
                unit: work.instr.unit,
                micro_batch: work.instr.micro_batch,
                kernels: self.kernels,
            });
        }
    }
}

fn gathers(role: Role) -> bool {
    matches!(
        role,
        Role::FullWeight | Role::GatherBuffer | Role::GatherInput
    )
}

impl Walk<'_> {
    pub(super) fn start_step(&mut self) {
        self.facts.start_pass();
        self.step.kernels = 0;
        self.step.last.fill(None);
        self.step.before.fill(None);
        self.step.suspect = None;
        for (live, cell) in self.step.live.iter_mut().zip(&self.cells) {
            *live = cell.live;
        }
    }

    pub(super) fn alloc(&mut self, id: InstrId, b: BufferId) {
        let p = self.p;
        let d = &p.buffers[b.index()];
        self.sink.fact(RuleId::Lifetime, 1);
        if self.cells[b.index()].live {
            let first = self.cells[b.index()].allocated;
            self.violate(RuleId::Lifetime, id, first, || {
                format!("{} is allocated already", describe::buffer(p, b))
            });
            return;
        }
        self.sink.fact(RuleId::Alloc, 1);
        let address = match self.memory.alloc(p, b) {
            Ok(a) => a,
            Err(e) => {
                self.violate(RuleId::Alloc, id, None, || {
                    format!("{}: {e}", describe::buffer(p, b))
                });
                // An address outside of all memory, so that the walk can continue.
                (1 << 62) + (u64::from(b.0) << 40)
            }
        };
        let init = self.pass_now().kind == SectionKind::Init;
        let cell = &mut self.cells[b.index()];
        cell.start(
            id,
            address,
            d.bytes.0,
            init || matches!(d.role, Role::Input | Role::OptimizerState),
            if init { 0 } else { u32::MAX },
        );
        let holder = self.spaces[space(d.pool)].enter(b, address, d.bytes.0, &mut cell.before);
        cell.before.retain(|t| t.last.iter().any(|&x| x > 0));
        if let Some(h) = holder {
            let other = self.cells[h.index()].allocated;
            self.violate(RuleId::Alloc, id, other, || {
                format!(
                    "{} gets addresses of {}, which is alive",
                    describe::buffer(p, b),
                    describe::buffer(p, h)
                )
            });
        }
    }

    pub(super) fn free(&mut self, id: InstrId, b: BufferId) {
        let p = self.p;
        let d = &p.buffers[b.index()];
        self.sink.fact(RuleId::Lifetime, 1);
        if !self.cells[b.index()].live {
            let first = self.cells[b.index()].freed;
            self.violate(RuleId::Lifetime, id, first, || {
                format!("{} is not allocated", describe::buffer(p, b))
            });
            return;
        }
        if is_grad(d.role) {
            self.dropped(id, b);
        }
        if d.role == Role::FullWeight {
            self.unused(id, b);
        }
        self.norm_used(id, b);
        self.release(id, b);
        let cell = &mut self.cells[b.index()];
        if cell.reduction.at != 0
            && let Some(i) = self.step.in_flight.iter().position(|(u, ..)| *u == d.unit)
        {
            self.step.in_flight[i].1 -= 1;
            if self.step.in_flight[i].1 == 0 {
                self.step.in_flight.remove(i);
            }
        }
        cell.live = false;
        cell.freed = Some(id);
        let cleared = cell.cleared != 0;
        self.spaces[space(d.pool)].leave(
            b,
            cell.address,
            d.bytes.0,
            &cell.last,
            &cell.before,
            cleared,
        );
        self.memory.free(p, b);
    }

    /// Reports gradients that are freed before they have been read.
    fn dropped(&mut self, id: InstrId, b: BufferId) {
        self.sink.fact(RuleId::ReduceMissing, 1);
        let Some(at) = self.cells[b.index()]
            .segments
            .iter()
            .find(|s| s.unread())
            .map(|s| s.writer.at)
        else {
            return;
        };
        let (p, other) = (self.p, self.id_at(at));
        self.violate(RuleId::ReduceMissing, id, Some(other), || {
            format!(
                "#{} wrote {} and nothing has read it; expected its reduction",
                other.0,
                describe::buffer(p, b)
            )
        });
    }

    /// Reports full weights of which no part was read. A bias or a norm alone may remain unread,
    /// because the unit is gathered as a whole.
    fn unused(&mut self, id: InstrId, b: BufferId) {
        self.sink.fact(RuleId::UnusedGather, 1);
        let written = self.cells[b.index()]
            .segments
            .iter()
            .map(|s| s.writer.at)
            .max()
            .unwrap_or(0);
        if written > 0 && self.facts.first_unread(b, written) {
            let (p, other) = (self.p, self.id_at(written));
            self.violate(RuleId::UnusedGather, id, Some(other), || {
                format!(
                    "#{} filled {} and nothing has read any of its unit",
                    other.0,
                    describe::buffer(p, b)
                )
            });
        }
    }

    /// Checks that the stream that gets the block runs after its last use; see Note [Unshard gate].
    fn release(&mut self, id: InstrId, b: BufferId) {
        let p = self.p;
        let d = &p.buffers[b.index()];
        let cell = &self.cells[b.index()];
        let lane = self.order.lane(d.stream);
        let open = self.order.open(lane, &cell.last);
        let reducing = is_full_grad(d.role) && cell.reduction.at != 0;
        let last = cell.last;
        let rule = if reducing {
            RuleId::ReduceRelease
        } else {
            RuleId::PoolStream
        };
        self.sink.fact(rule, 1);
        let Some(u) = open else { return };
        if reducing {
            let other = self.id_at(u.at);
            let them = self.describe_at(u.at);
            self.violate(RuleId::ReduceRelease, id, Some(other), || {
                format!(
                    "{} goes back to {} while {them} may still run; expected a wait for it before",
                    describe::buffer(p, b),
                    p.streams[d.stream.index()].kind.name()
                )
            });
        } else if d.pool == Pool::Caching {
            self.step.returned[d.stream.index()].push(Returned {
                buffer: b,
                free: id,
                last,
            });
        }
    }

    /// Checks blocks that were freed too early, for the stream that gets work now.
    pub(super) fn check_returned(&mut self, id: InstrId, stream: StreamId, lane: usize) {
        for r in std::mem::take(&mut self.step.returned[stream.index()]) {
            let Some(u) = self.order.clock(lane).missing(&r.last) else {
                continue;
            };
            let (p, them, other) = (self.p, self.describe_at(u.at), self.id_at(u.at));
            self.violate(RuleId::PoolStream, r.free, Some(other), || {
                format!(
                    "{} went back to {}, whose next work #{} is not ordered behind {them}",
                    describe::buffer(p, r.buffer),
                    p.streams[stream.index()].kind.name(),
                    id.0
                )
            });
        }
    }

    /// Records that a gradient buffer's reduction was issued; see Note [Reductions in flight].
    pub(super) fn in_flight(&mut self, work: &Work, b: BufferId) {
        let p = self.p;
        let first = self.cells[b.index()].reduction.at == 0;
        self.cells[b.index()].reduction = Use { ..work.me };
        let unit = p.buffers[b.index()].unit;
        // Buckets are limited in bytes, by the pass that created them.
        let bucket = matches!(p.buffers[b.index()].holds, Holds::Named(_));
        // The root and units that keep their parameters do not belong to a double buffer.
        let of_double_buffer = p.contract.in_flight == InFlight::DoubleBuffer;
        let outside = of_double_buffer && !p.units[unit.index()].reshards;
        if !first || bucket || outside {
            return;
        }
        match self.step.in_flight.iter_mut().find(|(u, ..)| *u == unit) {
            Some(x) => x.1 += 1,
            None => self.step.in_flight.push((unit, 1, b)),
        }
        let limit = in_flight_limit(p);
        if limit == 0 {
            return;
        }
        self.sink.fact(RuleId::ReduceInFlight, 1);
        if self.step.in_flight.len() > limit {
            let (_, _, oldest) = self.step.in_flight[0];
            let (n, other) = (
                self.step.in_flight.len(),
                self.cells[oldest.index()].allocated,
            );
            self.violate(RuleId::ReduceInFlight, work.id, other, || {
                format!(
                    "{} is the {n}th unit's gradient buffer in flight, at most {limit} may be; {} should have been \
                     released",
                    describe::buffer(p, b),
                    describe::buffer(p, oldest)
                )
            });
        }
    }

    /// Handles a wait of the compute stream (or the host) for an event.
    pub(super) fn compute_waits(&mut self, id: InstrId, instr: Instr, event: EventId) {
        if self.p.meta.reduce_in_flight == 0 || instr.phase != Phase::Backward {
            return;
        }
        // The host reads the result of a check that the user asked for.
        if instr.rule == Rule::NanCheck {
            return;
        }
        let Some(r) = self.step.before[event.index()] else {
            return;
        };
        if self.order.stream_of(r.lane as usize) == COMPUTE {
            return;
        }
        self.sink.fact(RuleId::ReduceSerial, 1);
        if r.kernels == self.step.kernels && r.micro_batch == instr.micro_batch {
            self.step.suspect = Some((id, instr, r));
        }
    }

    /// Handles the launch of a kernel.
    pub(super) fn launched(&mut self, work: &Work) {
        if work.instr.phase != Phase::Backward
            || work.instr.rule != Rule::Model
            || work.me.lane != 0
        {
            return;
        }
        self.step.kernels += 1;
        let Some((id, _, r)) = self.step.suspect.take() else {
            return;
        };
        if r.unit != work.instr.unit && r.micro_batch == work.instr.micro_batch {
            let (p, them) = (self.p, describe::instr(self.p, r.id, None));
            self.violate(RuleId::ReduceSerial, id, Some(r.id), || {
                format!(
                    "waits for {them} before any kernel of the next unit ({}) was launched: the reduction overlaps \
                     nothing",
                    p.units[work.instr.unit.index()].name
                )
            });
        }
    }

    pub(super) fn end_step(&mut self, section: &Section) {
        self.close_scope();
        if section.kind == SectionKind::Init {
            return;
        }
        let p = self.p;
        for i in 0..p.buffers.len() {
            let b = BufferId(i as u32);
            let d = &p.buffers[i];
            let (was, is) = (self.step.live[i], self.cells[i].live);
            self.sink.fact(
                if gathers(d.role) {
                    RuleId::Unsharded
                } else {
                    RuleId::Leak
                },
                1,
            );
            // A gather after the optimizer's update, for the next step. Another rule checks that
            // the weights are up to date.
            let ahead = |a: InstrId| p.instrs[a.index()].phase == Phase::Optimizer;
            let stays =
                may_persist(p, d) || gathers(d.role) && self.cells[i].allocated.is_some_and(ahead);
            if is && !was && !(section.kind == SectionKind::First && stays) {
                let rule = if gathers(d.role) {
                    RuleId::Unsharded
                } else {
                    RuleId::Leak
                };
                let id = self.cells[i]
                    .allocated
                    .unwrap_or(InstrId(section.instrs.start));
                self.violate(rule, id, None, || {
                    format!(
                        "{} is still allocated when the step ends",
                        describe::buffer(p, b)
                    )
                });
            }
            if was && !is {
                let id = self.cells[i].freed.unwrap_or(InstrId(section.instrs.start));
                self.violate(RuleId::Leak, id, None, || {
                    format!(
                        "{} existed before the step, but not after it",
                        describe::buffer(p, b)
                    )
                });
            }
            if is && d.role == Role::MainGrad {
                self.unread_at_end(section, b);
            }
        }
        let optimizes = p
            .section_instrs(section)
            .iter()
            .rposition(|i| i.rule == Rule::Optimizer);
        if let Some(n) = optimizes {
            let id = InstrId(section.instrs.start + n as u32);
            for g in self.not_stepped() {
                let unit = &p.units[p.groups[g.index()].unit.index()].name;
                self.violate(RuleId::ReduceMissing, id, None, || {
                    format!(
                        "the optimizer ends without updating group {} of unit {unit}",
                        g.0
                    )
                });
            }
            self.sink.fact(RuleId::ReduceMissing, p.groups.len() as u64);
        }
    }

    fn unread_at_end(&mut self, section: &Section, b: BufferId) {
        let base = self.pass_now().base;
        let unread = |s: &&Segment| {
            s.unread() && s.writer.at > base && !layout::is_padding(self.p, b, s.start..s.end)
        };
        let Some(at) = self.cells[b.index()]
            .segments
            .iter()
            .find(unread)
            .map(|s| s.writer.at)
        else {
            return;
        };
        if section.kind == SectionKind::Validation {
            return;
        }
        let (p, id) = (self.p, self.id_at(at));
        self.violate(RuleId::ReduceMissing, id, None, || {
            format!(
                "writes {}, which nothing reads before the step ends",
                describe::buffer(p, b)
            )
        });
    }
}

fn space(pool: Pool) -> usize {
    match pool {
        // The copies of a double buffer and the slots of a trace pool are in its blocks.
        Pool::Caching | Pool::DoubleBuffer | Pool::Traced => 0,
        Pool::Planned => 1,
        Pool::Host => 2,
    }
}

/// Returns the maximum number of units with gradient buffers in flight; 0 means unlimited.
fn in_flight_limit(p: &Program) -> usize {
    let limit = match p.contract.in_flight {
        InFlight::Units => p.meta.reduce_in_flight,
        InFlight::DoubleBuffer => p.double_buffer_copies,
    };
    limit as usize
}

/// Returns whether the first step may leave a buffer allocated: state, and the full weights of
/// units that never reshard or that keep their storage.
fn may_persist(p: &Program, b: &Buffer) -> bool {
    let unit = &p.units[b.unit.index()];
    let resident = b.role == Role::FullWeight && (!unit.reshards || unit.keeps_storage);
    resident
        || matches!(
            b.role,
            Role::ModelWeight
                | Role::MainWeight
                | Role::MainGrad
                | Role::OptimizerState
                | Role::Workspace
                | Role::Input
        )
}
