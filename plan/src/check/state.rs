//! State that a step carries: which optimizer step weights hold, over which axes gradients are
//! reduced.

use super::access::{Inputs, is_full_grad, is_grad};
use super::describe;
use super::layout::is_padding;
use super::rules::RuleId;
use super::walk::{Walk, Work};
use crate::ir::{Access, BufferId, Collective, CollectiveKind, GroupId, Holds, InstrId, Role};
use crate::program::{Axis, Op, Phase, Program, Rule};
use std::collections::HashMap;
use std::ops::Range;

/// Reduced over the shard axis.
pub(super) const SHARD: u8 = 1;
/// Reduced over the outer axis.
pub(super) const OUTER: u8 = 2;
/// Pieces of all ranks of the shard axis, exchanged and not summed yet.
const EXCHANGED: u8 = 4;

/// See the module documentation.
pub(super) struct Facts {
    /// Group of every buffer, where it has one.
    group_of: Vec<Option<GroupId>>,
    /// Gathered parameters of every group.
    full_of: Vec<Vec<BufferId>>,
    /// Optimizer steps a group has had.
    steps: Vec<u32>,
    /// Pass of the last one.
    stepped: Vec<usize>,
    /// Position of the last change of a group's weights at rest.
    updated: Vec<u32>,
    /// Position of the last read of a group's full weights.
    used: Vec<u32>,
    /// Axes every gradient is to be reduced over.
    need: u8,
    /// Reductions of this pass by what they reduce: contents, first byte, axes, micro-batch.
    reductions: HashMap<(Holds, u64, u8, u16), InstrId>,
}

fn is_weight(role: Role) -> bool {
    matches!(
        role,
        Role::MainWeight
            | Role::ModelWeight
            | Role::FullWeight
            | Role::GatherBuffer
            | Role::GatherInput
    )
}

/// Weights that outlive the step.
pub(super) fn at_rest(role: Role) -> bool {
    matches!(role, Role::MainWeight | Role::ModelWeight)
}

pub(super) fn axes(bits: u8) -> &'static str {
    match bits {
        0 => "no axis",
        SHARD => "the shard axis",
        OUTER => "the outer axis",
        b if b & EXCHANGED != 0 => "the shard axis by an exchange whose pieces are not summed",
        _ => "both axes",
    }
}

impl Facts {
    /// Nothing gathered, reduced or updated yet.
    pub(super) fn new(p: &Program) -> Self {
        let mut owner = vec![None; p.params.len()];
        for (i, g) in p.groups.iter().enumerate() {
            for x in &g.params {
                owner[x.index()] = Some(GroupId(i as u16));
            }
        }
        let group_of: Vec<_> = p
            .buffers
            .iter()
            .map(|b| match b.holds {
                Holds::Group(g) => Some(g),
                Holds::Param(x) => owner[x.index()],
                Holds::Storage(_) | Holds::Const(_) | Holds::Named(_) => None,
            })
            .collect();
        let mut full_of = vec![Vec::new(); p.groups.len()];
        for (i, b) in p.buffers.iter().enumerate() {
            if let (Role::FullWeight, Some(g)) = (b.role, group_of[i]) {
                full_of[g.index()].push(BufferId(i as u32));
            }
        }
        let n = p.groups.len();
        let need = u8::from(p.meta.dp_shard > 1) * SHARD + u8::from(p.meta.dp_outer > 1) * OUTER;
        Self {
            group_of,
            full_of,
            steps: vec![0; n],
            stepped: vec![0; n],
            updated: vec![0; n],
            used: vec![0; n],
            need,
            reductions: HashMap::new(),
        }
    }

    /// Whether a group's full weights, filled at `written`, have not been read since; says so once.
    pub(super) fn first_unread(&mut self, b: BufferId, written: u32) -> bool {
        let Some(g) = self.group_of[b.index()] else {
            return false;
        };
        let used = &mut self.used[g.index()];
        let unread = *used < written;
        *used = (*used).max(written);
        unread
    }

    /// A pass starts.
    pub(super) fn start_pass(&mut self) {
        self.reductions.clear();
    }
}

impl Walk<'_> {
    /// Group of a buffer, if it is trained.
    fn trained(&self, b: BufferId) -> Option<GroupId> {
        let (g, trained) = self.kind(b)?;
        trained.then_some(g)
    }

    fn frozen(&self, b: BufferId) -> bool {
        self.kind(b).is_some_and(|(_, trained)| !trained)
    }

    /// Group of a buffer, and whether what it holds is trained: the parameter, or any of the
    /// group's.
    fn kind(&self, b: BufferId) -> Option<(GroupId, bool)> {
        let g = self.facts.group_of[b.index()]?;
        let trained = match self.p.buffers[b.index()].holds {
            Holds::Param(x) => self.p.params[x.index()].requires_grad,
            _ => self.p.groups[g.index()].requires_grad,
        };
        Some((g, trained))
    }

    /// Axes that a collective reduces over, or will have once its pieces are summed; 0 if it
    /// reduces nothing.
    pub(super) fn axes_of(&self, c: &Collective) -> u8 {
        match c.kind {
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce => {}
            CollectiveKind::AllToAll if self.exchanges_gradients(c) => return EXCHANGED,
            _ => return 0,
        }
        match self.p.communicators[c.comm.index()].axis {
            Axis::Shard | Axis::SubShard => SHARD,
            Axis::Outer => OUTER,
            Axis::World => SHARD | OUTER,
        }
    }

    /// Whether a collective is the first half of a reduction: an all-to-all of gradients over the
    /// shard axis.
    fn exchanges_gradients(&self, c: &Collective) -> bool {
        c.kind == CollectiveKind::AllToAll
            && self.p.communicators[c.comm.index()].axis == Axis::Shard
            && c.parts
                .iter()
                .all(|part| is_grad(self.p.buffers[part.input.buffer.index()].role))
    }

    /// Axes after the second half, `ranks` pieces of `from` that become `to` elements; `read` is
    /// what the pieces have been through.
    pub(super) fn summed(
        &mut self,
        work: &Work,
        (ranks, read): (u32, u8),
        (from, to): (Access, u64),
    ) -> u8 {
        let p = self.p;
        self.sink.fact(RuleId::ReduceMissing, 1);
        let elements = |bytes: u64| bytes / p.buffers[from.buffer.index()].dtype.size();
        if read & EXCHANGED == 0 {
            self.violate(RuleId::ReduceMissing, work.id, None, || {
                format!(
                    "sums {}, which no all-to-all of gradients has filled",
                    describe::range(p, from)
                )
            });
        } else if ranks != p.meta.dp_shard || elements(from.bytes) != u64::from(ranks) * to {
            self.violate(RuleId::ReduceMissing, work.id, None, || {
                format!(
                    "sums {ranks} pieces of {} into {to} elements; expected {} pieces of as many",
                    describe::range(p, from),
                    p.meta.dp_shard
                )
            });
        }
        (read & !EXCHANGED) | SHARD
    }

    /// The optimizer reads something, after all that has been `read`: pieces would have to be
    /// summed first.
    pub(super) fn unsummed(&mut self, work: &Work, read: u8, a: Access) {
        let p = self.p;
        if is_grad(p.buffers[a.buffer.index()].role) && read & EXCHANGED != 0 {
            self.violate(RuleId::ReduceMissing, work.id, None, || {
                format!(
                    "updates by {}, pieces of an exchange that nothing sums",
                    describe::range(p, a)
                )
            });
        }
    }

    /// What a read learns from the state of its range.
    pub(super) fn read_state(
        &mut self,
        work: &Work,
        a: Access,
        range: Range<usize>,
        inputs: &mut Inputs,
    ) {
        let role = self.p.buffers[a.buffer.index()].role;
        if is_weight(role) {
            self.read_weight(work, a, range, inputs);
        } else if is_grad(role) {
            self.read_grad(work, a, range, inputs);
        }
    }

    fn read_weight(&mut self, work: &Work, a: Access, range: Range<usize>, inputs: &mut Inputs) {
        if let (Role::FullWeight, Some(g)) = (
            self.p.buffers[a.buffer.index()].role,
            self.facts.group_of[a.buffer.index()],
        ) {
            self.facts.used[g.index()] = work.me.at;
        }
        if self.frozen(a.buffer) {
            return;
        }
        let segments = &self.cells[a.buffer.index()].segments[range];
        let version = segments.iter().map(|s| s.version).min().unwrap_or(u32::MAX);
        let Some(g) = self.trained(a.buffer) else {
            inputs.version = inputs.version.min(version);
            return;
        };
        let steps = self.facts.steps[g.index()];
        let updating = matches!(
            work.instr.phase,
            Phase::Init | Phase::Optimizer | Phase::Refresh | Phase::Clip
        );
        if !updating {
            self.sink.fact(RuleId::StaleWeight, 1);
            if version < steps {
                let writer = segments
                    .iter()
                    .min_by_key(|s| s.version)
                    .map(|s| s.writer.at)
                    .filter(|&at| at > 0);
                let other = writer.map(|at| self.id_at(at));
                let p = self.p;
                self.violate(RuleId::StaleWeight, work.id, other, || {
                    format!(
                        "reads {} of optimizer step {version}, the latest is {steps}; expected a refresh before",
                        describe::range(p, a)
                    )
                });
                // Said once; what is computed from here on is not blamed again.
                return;
            }
        }
        inputs.version = inputs.version.min(version);
    }

    fn read_grad(&mut self, work: &Work, a: Access, range: Range<usize>, inputs: &mut Inputs) {
        let p = self.p;
        let role = p.buffers[a.buffer.index()].role;
        let base = self.pass_now().base;
        let at_end = matches!(work.instr.phase, Phase::Optimizer | Phase::Clip);
        let segments = &self.cells[a.buffer.index()].segments[range];
        let mut stale = None;
        let mut unreduced = None;
        for s in segments {
            if s.writer.at > base {
                inputs.reduced |= s.reduced;
                if at_end && s.reduced & self.facts.need != self.facts.need {
                    unreduced = Some((s.writer.at, s.reduced));
                }
            } else if (at_end || (s.writer.at != 0 && !s.zeros))
                && !is_padding(p, a.buffer, s.start..s.end)
            {
                stale = Some(s.writer.at);
            }
        }
        if role != Role::MainGrad || self.frozen(a.buffer) {
            return;
        }
        let rule = if at_end {
            RuleId::ReduceMissing
        } else {
            RuleId::StaleGrad
        };
        self.sink.fact(rule, 1);
        if let Some(at) = stale {
            let other = (at > 0).then(|| self.id_at(at));
            self.violate(rule, work.id, other, || {
                let (range, expected) = (describe::range(p, a), "expected this step's gradient");
                match other {
                    Some(o) => format!(
                        "reads {range}, last written in an earlier step by #{}; {expected}",
                        o.0
                    ),
                    None => format!("reads {range}, which no step has written; {expected}"),
                }
            });
        }
        if let Some((at, bits)) = unreduced {
            let (other, need) = (self.id_at(at), self.facts.need);
            self.violate(RuleId::ReduceMissing, work.id, Some(other), || {
                format!(
                    "reads {}, reduced over {}; expected {} (written by #{})",
                    describe::range(p, a),
                    axes(bits),
                    axes(need),
                    other.0
                )
            });
        }
    }

    /// State of a range after a write: optimizer step of weights, axes of gradients.
    pub(super) fn write_state(
        &mut self,
        work: &Work,
        a: Access,
        range: Range<usize>,
        inputs: Inputs,
    ) -> (u32, u8) {
        let p = self.p;
        let role = p.buffers[a.buffer.index()].role;
        if is_grad(role) {
            self.lost(work, a, range);
            return (u32::MAX, inputs.reduced);
        }
        if !at_rest(role) {
            return (inputs.version, 0);
        }
        let Some(g) = self.facts.group_of[a.buffer.index()].map(GroupId::index) else {
            return (inputs.version, 0);
        };
        if !self.is_inner_gather(work) {
            self.facts.updated[g] = work.me.at;
        }
        if work.instr.phase == Phase::Optimizer && work.instr.rule == Rule::Optimizer {
            if self.facts.stepped[g] != self.passes.len() {
                self.facts.stepped[g] = self.passes.len();
                self.facts.steps[g] += 1;
            }
            return (self.facts.steps[g], 0);
        }
        (inputs.version, 0)
    }

    fn is_inner_gather(&self, work: &Work) -> bool {
        match work.instr.op {
            Op::Collective { id, .. } => {
                let c = &self.p.collectives[id.index()];
                c.kind == CollectiveKind::AllGather
                    && self.p.communicators[c.comm.index()].axis != Axis::Outer
            }
            _ => false,
        }
    }

    /// A gradient that is overwritten before anything read it is lost.
    fn lost(&mut self, work: &Work, a: Access, range: Range<usize>) {
        self.sink.fact(RuleId::ReduceMissing, 1);
        let Some(at) = self.cells[a.buffer.index()].segments[range]
            .iter()
            .find(|s| s.unread())
            .map(|s| s.writer.at)
        else {
            return;
        };
        let (p, other) = (self.p, self.id_at(at));
        self.violate(RuleId::ReduceMissing, work.id, Some(other), || {
            format!(
                "overwrites {}, which #{} wrote and nothing has read; expected it reduced or accumulated first",
                describe::range(p, a),
                other.0
            )
        });
    }

    /// A gather is about to be issued.
    pub(super) fn before_gather(&mut self, work: &Work, c: &Collective) {
        let p = self.p;
        if p.communicators[c.comm.index()].axis == Axis::Outer {
            self.before_refresh(work, c);
            return;
        }
        self.sink.fact(RuleId::RecomputePrefetch, 1);
        let out = c.parts[0].output;
        // Buckets are placed by passes over the whole backward graph, recompute included: each is
        // read in it.
        let bucket = matches!(p.buffers[out.buffer.index()].holds, Holds::Named(_));
        if work.instr.phase == Phase::Recompute && work.instr.rule == Rule::Prefetch && !bucket {
            self.violate(RuleId::RecomputePrefetch, work.id, None, || {
                format!(
                    "gathers {} early during recompute, where nothing frees it",
                    describe::range(p, out)
                )
            });
        }
        for part in &c.parts {
            let Some(g) = self.facts.group_of[part.output.buffer.index()].map(GroupId::index)
            else {
                continue;
            };
            self.sink.fact(RuleId::DoubleGather, 1);
            // A gather of an earlier pass may be repeated: the pipeline is reset between steps.
            let updated = self.facts.updated[g].max(self.pass_now().base);
            let again = match p.buffers[part.output.buffer.index()].role {
                // The buffer itself, or the parameters that were copied out of it.
                Role::FullWeight | Role::ModelWeight => self.gathered(part.output, updated),
                Role::GatherBuffer => self.facts.full_of[g]
                    .iter()
                    .find_map(|&b| self.full_since(b, updated)),
                _ => None,
            };
            if let Some(at) = again {
                let other = self.id_at(at);
                self.violate(RuleId::DoubleGather, work.id, Some(other), || {
                    format!(
                        "gathers {} again: full since #{}, and the shard has not changed",
                        describe::range(p, part.output),
                        other.0
                    )
                });
            }
        }
    }

    /// Shards are about to be gathered over the outer axis: once between two updates, and again
    /// behind a pass.
    fn before_refresh(&mut self, work: &Work, c: &Collective) {
        // The production engine's flag of a step's first micro-batch holds through its backward.
        if self.p.meta.policy == "megatron" {
            return;
        }
        let (p, base) = (self.p, self.pass_now().base);
        for part in &c.parts {
            self.sink.fact(RuleId::DoubleGather, 1);
            let Some(at) = self.gathered(part.output, base) else {
                continue;
            };
            let other = self.id_at(at);
            self.violate(RuleId::DoubleGather, work.id, Some(other), || {
                format!(
                    "gathers {} over the outer axis again: done in #{}, and no rank has updated its part since",
                    describe::range(p, part.output),
                    other.0
                )
            });
        }
    }

    /// Position of the gather whose result still fills a range.
    fn gathered(&self, a: Access, updated: u32) -> Option<u32> {
        let cell = &self.cells[a.buffer.index()];
        let mut inside = cell
            .segments
            .iter()
            .filter(|s| s.end > a.offset && s.start < a.offset + a.bytes);
        let valid = |at: u32| {
            let op = self.p.instrs[self.id_at(at).index()].op;
            at > updated && matches!(op, Op::Collective { .. })
        };
        let first = inside.clone().next()?.writer.at;
        (cell.live && inside.all(|s| s.writer.at > 0 && valid(s.writer.at))).then_some(first)
    }

    /// Position of the write that filled a live buffer after the weights last changed.
    fn full_since(&self, b: BufferId, updated: u32) -> Option<u32> {
        let cell = &self.cells[b.index()];
        let first = cell.segments.first()?.writer.at;
        (cell.live && first > updated && first > 0).then_some(first)
    }

    /// A reduction is about to be issued.
    pub(super) fn before_reduce(&mut self, work: &Work, c: &Collective) {
        let p = self.p;
        let (axes_now, base) = (self.axes_of(c), self.pass_now().base);
        // An exchange and a reduction over the shard axis are the same reduction.
        let same = if axes_now & (SHARD | EXCHANGED) != 0 {
            axes_now | SHARD | EXCHANGED
        } else {
            axes_now
        };
        for part in &c.parts {
            let a = part.input;
            let b = &p.buffers[a.buffer.index()];
            if !is_grad(b.role) {
                continue;
            }
            self.sink.fact(RuleId::DoubleReduce, 1);
            let inside =
                |s: &&super::shadow::Segment| s.end > a.offset && s.start < a.offset + a.bytes;
            let twice = self.cells[a.buffer.index()]
                .segments
                .iter()
                .filter(inside)
                .find(|s| s.writer.at > base && s.reduced & same != 0)
                .map(|s| s.writer.at);
            if let Some(at) = twice {
                let other = self.id_at(at);
                self.violate(RuleId::DoubleReduce, work.id, Some(other), || {
                    format!(
                        "reduces {} over {} again",
                        describe::range(p, a),
                        axes(axes_now)
                    )
                });
            }
            if !matches!(b.holds, Holds::Param(_) | Holds::Group(_)) {
                continue;
            }
            self.sink.fact(RuleId::Tied, 1);
            let key = (b.holds, a.offset, same, work.instr.micro_batch);
            if let Some(first) = self.facts.reductions.insert(key, work.id) {
                self.violate(RuleId::Tied, work.id, Some(first), || {
                    format!(
                        "reduces {} a second time in micro-batch {} (first in #{})",
                        describe::range(p, a),
                        work.instr.micro_batch,
                        first.0
                    )
                });
            }
        }
    }

    /// A reduction was issued: its inputs are in flight until their free.
    pub(super) fn after_reduce(&mut self, work: &Work, c: &Collective) {
        for part in &c.parts {
            if is_full_grad(self.p.buffers[part.input.buffer.index()].role) {
                self.in_flight(work, part.input.buffer);
            }
        }
        self.step.reduced(work);
    }

    /// 16-byte alignment of what NCCL moves.
    pub(super) fn alignment(&mut self, work: &Work, c: &Collective, a: Access) {
        if !matches!(
            c.kind,
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter | CollectiveKind::AllToAll
        ) {
            return;
        }
        self.sink.fact(RuleId::Align, 1);
        let address = self.cells[a.buffer.index()].address + a.offset;
        if !address.is_multiple_of(16) || !a.bytes.is_multiple_of(16) {
            let p = self.p;
            self.violate(RuleId::Align, work.id, None, || {
                format!(
                    "{} spans [{address}, {}), which does not start and end on 16 bytes",
                    describe::range(p, a),
                    address + a.bytes
                )
            });
        }
    }

    /// Groups that the optimizer left out of this pass.
    pub(super) fn not_stepped(&self) -> Vec<GroupId> {
        let now = self.passes.len();
        (0..self.p.groups.len())
            .filter(|&g| self.p.groups[g].requires_grad && self.facts.stepped[g] != now)
            .map(|g| GroupId(g as u16))
            .collect()
    }
}
