//! State that a step carries: which optimizer step weights belong to, and over which axes gradients
//! have been reduced.

use super::access::{Inputs, is_full_grad, is_grad};
use super::describe;
use super::experts::shard_axis_of;
use super::factor::Factor;
use super::layout::is_padding;
use super::rules::RuleId;
use super::walk::{Walk, Work};
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, Collective, CollectiveKind, GroupId, Holds, InstrId,
    KernelClass, Part, Pieces, Role,
};
use crate::program::{Op, Phase, Program, Rule};
use crate::shard::Group;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// Reductions that a gradient has been through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reduced {
    /// Axes that it has been summed over.
    pub(super) over: AxisSet,
    /// Axis whose ranks have exchanged pieces that are not summed yet.
    exchanged: AxisSet,
    /// Factor by which it has been multiplied; `None` before it is a gradient.
    pub(super) factor: Option<Factor>,
}

impl Reduced {
    /// No reduction.
    pub(super) const NONE: Self = Self {
        over: AxisSet::EMPTY,
        exchanged: AxisSet::EMPTY,
        factor: None,
    };

    /// Returns the union of the reductions of two operands.
    pub(super) fn union(self, other: Self) -> Self {
        Self {
            over: self.over.union(other.over),
            exchanged: self.exchanged.union(other.exchanged),
            factor: Factor::of_sum(self.factor, other.factor),
        }
    }

    /// Returns these reductions followed by others.
    pub(super) fn then(self, next: Self) -> Self {
        Self {
            factor: Some(Factor::product(self.factor, next.factor)),
            ..self.union(next)
        }
    }

    /// Returns whether it has been reduced at all.
    pub(super) fn any(self) -> bool {
        !self.axes().is_empty()
    }

    /// Returns the axes that it has been summed over, or will have been once its pieces are summed.
    fn axes(self) -> AxisSet {
        self.over.union(self.exchanged)
    }
}

const OUTER: AxisSet = AxisSet::of(AxisId::DP_OUTER);

/// See the module documentation.
pub(super) struct Facts {
    /// Group of every buffer, if it has one.
    group_of: Vec<Option<GroupId>>,
    /// Gathered parameters of every group.
    full_of: Vec<Vec<BufferId>>,
    /// Number of optimizer steps of each group.
    steps: Vec<u32>,
    /// Pass of a group's last optimizer step.
    stepped: Vec<usize>,
    /// Position of the last change of a group's resident weights.
    updated: Vec<u32>,
    /// Position of the last read of a group's full weights.
    used: Vec<u32>,
    /// Groups of the gradients that the optimizer reads, by buffer and first byte.
    pub(super) of_grad: HashMap<(BufferId, u64), GroupId>,
    /// Axes that the gradients of each group have to be reduced over.
    need: Vec<AxisSet>,
    /// Factor of the first gradient that the optimizer read.
    pub(super) factor: Option<(Factor, InstrId)>,
    /// Reductions in this pass, by what they reduce: contents, first byte, axes, micro-batch.
    reductions: HashMap<(Holds, u64, AxisSet, u16), InstrId>,
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

/// Returns whether a role stands for weights that outlive the step.
pub(super) fn at_rest(role: Role) -> bool {
    matches!(role, Role::MainWeight | Role::ModelWeight)
}

impl fmt::Display for Reduced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(axis) = self.exchanged.single() {
            let axis = axis.label();
            write!(
                f,
                "the {axis} axis by an exchange whose pieces are not summed"
            )
        } else {
            f.write_str(&axes(self.over))
        }
    }
}

/// Describes axes in messages.
pub(super) fn axes(over: AxisSet) -> String {
    match over.single() {
        Some(axis) => format!("the {} axis", axis.label()),
        None if over.is_empty() => "no axis".to_owned(),
        None if over == AxisSet::DATA => "both axes".to_owned(),
        None => format!("the axes {}", over.label()),
    }
}

impl Facts {
    /// Creates the initial state, in which nothing has been gathered, reduced or updated.
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
        let need = |g: &Group| {
            let averages = |axis: &AxisId| p.meta.mesh.size(*axis) > 1;
            let axes = [shard_axis_of(p, g), AxisId::DP_OUTER];
            let axes = axes.into_iter().filter(averages);
            axes.fold(AxisSet::EMPTY, AxisSet::with)
        };
        Self {
            of_grad: of_grad(p, &group_of),
            group_of,
            full_of,
            steps: vec![0; n],
            stepped: vec![0; n],
            updated: vec![0; n],
            used: vec![0; n],
            need: p.groups.iter().map(need).collect(),
            factor: None,
            reductions: HashMap::new(),
        }
    }

    /// Returns the axes that a gradient has to be reduced over, which are those of its group.
    fn need_of(&self, grad: Access) -> AxisSet {
        let group = self.group(grad);
        group.map_or(AxisSet::EMPTY, |g| self.need[g.index()])
    }

    /// Returns the group of a gradient. The optimizer says which one that is where all groups share
    /// a buffer.
    fn group(&self, grad: Access) -> Option<GroupId> {
        let group = self.group_of[grad.buffer.index()];
        group.or_else(|| self.of_grad.get(&(grad.buffer, grad.offset)).copied())
    }

    /// Returns whether a group's full weights, filled at `written`, have not been read since then.
    /// Reports each case only once.
    pub(super) fn first_unread(&mut self, b: BufferId, written: u32) -> bool {
        let Some(g) = self.group_of[b.index()] else {
            return false;
        };
        let used = &mut self.used[g.index()];
        let unread = *used < written;
        *used = (*used).max(written);
        unread
    }

    /// Starts a pass.
    pub(super) fn start_pass(&mut self) {
        self.reductions.clear();
    }
}

/// Returns the group of each gradient that the optimizer reads, which is that of the weight before
/// it.
fn of_grad(p: &Program, group_of: &[Option<GroupId>]) -> HashMap<(BufferId, u64), GroupId> {
    let mut all = HashMap::new();
    for instr in &p.instrs {
        let Op::Launch { kernel, .. } = instr.op else {
            continue;
        };
        if p.kernels[kernel.index()].class != KernelClass::Optimizer {
            continue;
        }
        let reads = p.reads(&instr.op);
        for (weight, grad) in reads.iter().zip(reads.iter().skip(1)) {
            if let (true, Some(g)) = (
                is_grad(p.buffers[grad.buffer.index()].role),
                group_of[weight.buffer.index()],
            ) {
                all.insert((grad.buffer, grad.offset), g);
            }
        }
    }
    all
}

impl Walk<'_> {
    /// Returns the group of a buffer, if it is trained.
    fn trained(&self, b: BufferId) -> Option<GroupId> {
        let (g, trained) = self.kind(b)?;
        trained.then_some(g)
    }

    fn frozen(&self, b: BufferId) -> bool {
        self.kind(b).is_some_and(|(_, trained)| !trained)
    }

    /// Returns the group of a buffer, and whether it is trained: the parameter in the buffer, or
    /// any parameter of the group.
    fn kind(&self, b: BufferId) -> Option<(GroupId, bool)> {
        let g = self.facts.group_of[b.index()]?;
        let trained = match self.p.buffers[b.index()].holds {
            Holds::Param(x) => self.p.params[x.index()].requires_grad,
            _ => self.p.groups[g.index()].requires_grad,
        };
        Some((g, trained))
    }

    /// Returns the effect of a collective on gradients: the axes that it reduces over, or will have
    /// reduced over once its pieces are summed.
    pub(super) fn reduction_of(&self, c: &Collective) -> Reduced {
        let axes = self.p.communicators[c.comm.index()].axes;
        let only_if = |holds| if holds { axes } else { AxisSet::EMPTY };
        Reduced {
            over: only_if(c.kind.reduces()),
            exchanged: only_if(self.exchanges_gradients(c)),
            factor: Some(Factor::of(c.reduce, self.p.meta.mesh.group(axes))),
        }
    }

    /// Returns whether a collective is the first half of a reduction: an all-to-all of gradients
    /// over the axis that shards them.
    fn exchanges_gradients(&self, c: &Collective) -> bool {
        let axes = self.p.communicators[c.comm.index()].axes;
        let shards = |part: &Part| {
            let b = part.input.buffer;
            let axis = self.facts.group_of[b.index()].map_or(AxisId::DP_SHARD, |g| {
                shard_axis_of(self.p, &self.p.groups[g.index()])
            });
            is_grad(self.p.buffers[b.index()].role) && axes == AxisSet::of(axis)
        };
        c.kind == CollectiveKind::AllToAll && c.parts.iter().all(shards)
    }

    /// Returns the axes after the second half of a reduction: pieces of `from` become `to`
    /// elements. `read` are the reductions of the pieces.
    pub(super) fn summed(
        &mut self,
        work: &Work,
        (pieces, read): (Pieces, Reduced),
        (from, to): (Access, u64),
    ) -> Reduced {
        let ranks = pieces.ranks;
        let expected = self.p.meta.mesh.group(read.exchanged).map_or(1, |g| g.size);
        let p = self.p;
        self.sink.fact(RuleId::ReduceMissing, 1);
        let elements = |bytes: u64| bytes / p.buffers[from.buffer.index()].dtype.size();
        if read.exchanged.is_empty() {
            self.violate(RuleId::ReduceMissing, work.id, None, || {
                format!(
                    "sums {}, which no all-to-all of gradients has filled",
                    describe::range(p, from)
                )
            });
        } else if ranks != expected || elements(from.bytes) != u64::from(ranks) * to {
            self.violate(RuleId::ReduceMissing, work.id, None, || {
                format!(
                    "sums {ranks} pieces of {} into {to} elements; expected {expected} pieces of as many",
                    describe::range(p, from),
                )
            });
        }
        Reduced {
            over: read.axes(),
            exchanged: AxisSet::EMPTY,
            factor: Some(Factor::product(read.factor, Some(Factor(pieces.factor.0)))),
        }
    }

    /// Reports that the optimizer reads pieces that should have been summed first. `read` are the
    /// reductions of everything that was read.
    pub(super) fn unsummed(&mut self, work: &Work, read: Reduced, a: Access) {
        let p = self.p;
        if is_grad(p.buffers[a.buffer.index()].role) && !read.exchanged.is_empty() {
            self.violate(RuleId::ReduceMissing, work.id, None, || {
                format!(
                    "updates by {}, pieces of an exchange that nothing sums",
                    describe::range(p, a)
                )
            });
        }
    }

    /// Derives the state of a launch's inputs from the range of a read.
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
        } else if role == Role::Temporary && work.instr.rule == Rule::Offload {
            // A gradient that was cast before it is copied to the host.
            let segments = &self.cells[a.buffer.index()].segments[range];
            let reduced = segments.iter().map(|s| s.reduced);
            inputs.reduced = reduced.fold(inputs.reduced, Reduced::union);
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
                // The error is reported once; results computed from it are not reported again.
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
        let need = self.facts.need_of(a);
        let segments = &self.cells[a.buffer.index()].segments[range];
        let mut stale = None;
        let mut unreduced = None;
        // Other gradients that the launch reads do not count.
        let mut own = Reduced::NONE;
        for s in segments {
            if s.writer.at > base {
                own = own.union(s.reduced);
                if at_end && !s.reduced.over.contains(need) {
                    unreduced = Some((s.writer.at, s.reduced));
                }
            } else if (at_end || (s.writer.at != 0 && !s.zeros))
                && !is_padding(p, a.buffer, s.start..s.end)
            {
                stale = Some(s.writer.at);
            }
        }
        inputs.reduced = inputs.reduced.union(own);
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
        // Counts of choices have no factor.
        let group = self.facts.group(a);
        let counts = group.is_some_and(|g| p.groups[g.index()].router_biases);
        if at_end && stale.is_none() && unreduced.is_none() && !counts {
            self.scaled(work, a, own);
        }
        if let Some((at, reduced)) = unreduced {
            let other = self.id_at(at);
            self.violate(RuleId::ReduceMissing, work.id, Some(other), || {
                format!(
                    "reads {}, reduced over {}; expected {} (written by #{})",
                    describe::range(p, a),
                    reduced,
                    axes(need),
                    other.0
                )
            });
        }
    }

    /// Sets the state of a range after a write: the optimizer step of weights, and the axes of
    /// gradients.
    pub(super) fn write_state(
        &mut self,
        work: &Work,
        a: Access,
        range: Range<usize>,
        inputs: Inputs,
    ) -> (u32, Reduced) {
        let p = self.p;
        let role = p.buffers[a.buffer.index()].role;
        if is_grad(role) {
            self.lost(work, a, range);
            return (u32::MAX, inputs.reduced);
        }
        if role == Role::Temporary && work.instr.rule == Rule::ReduceAccumulate {
            return (inputs.version, inputs.reduced);
        }
        if !at_rest(role) {
            return (inputs.version, Reduced::NONE);
        }
        let group = |a: &Access| self.facts.group_of[a.buffer.index()].map(GroupId::index);
        let updates = work.instr.phase == Phase::Optimizer && work.instr.rule == Rule::Optimizer;
        let Some(g) = group(&a) else {
            // Maxima follow from the weights that their launch has just written.
            let weights = p.writes(&work.instr.op).first().and_then(group);
            let version = weights.filter(|_| updates).map(|g| self.facts.steps[g]);
            return (version.unwrap_or(inputs.version), Reduced::NONE);
        };
        if !self.is_inner_gather(work) {
            self.facts.updated[g] = work.me.at;
        }
        if updates {
            if self.facts.stepped[g] != self.passes.len() {
                self.facts.stepped[g] = self.passes.len();
                self.facts.steps[g] += 1;
            }
            return (self.facts.steps[g], Reduced::NONE);
        }
        (inputs.version, Reduced::NONE)
    }

    fn is_inner_gather(&self, work: &Work) -> bool {
        match work.instr.op {
            Op::Collective { id, .. } => {
                let c = &self.p.collectives[id.index()];
                c.kind == CollectiveKind::AllGather
                    && self.p.communicators[c.comm.index()].axes != OUTER
            }
            _ => false,
        }
    }

    /// Reports a gradient that is overwritten before it has been read.
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

    /// Checks a gather before it is issued.
    pub(super) fn before_gather(&mut self, work: &Work, c: &Collective) {
        let p = self.p;
        if p.communicators[c.comm.index()].axes == OUTER {
            self.before_refresh(work, c);
            return;
        }
        self.sink.fact(RuleId::RecomputePrefetch, 1);
        let out = c.parts[0].output;
        // Buckets are assigned by passes over the whole backward graph, including recompute. Each
        // is read in that graph.
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
            // A gather of an earlier pass may be repeated, because the pipeline is reset between
            // steps.
            let updated = self.facts.updated[g].max(self.pass_now().base);
            let again = match p.buffers[part.output.buffer.index()].role {
                // The buffer itself, or the parameters that were copied out of it.
                Role::FullWeight | Role::ModelWeight => self.gathered(part.output, updated),
                // Storage that outlives a reshard does not show whether the unit is full.
                Role::GatherBuffer => self.facts.full_of[g]
                    .iter()
                    .filter(|b| !p.units[p.buffers[b.index()].unit.index()].keeps_storage)
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

    /// Checks a gather of shards over the outer axis before it is issued. There must be one between
    /// two updates, and another after a pass.
    fn before_refresh(&mut self, work: &Work, c: &Collective) {
        if self.p.contract.repeats_outer_gathers {
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

    /// Returns the position of the gather whose result still fills a range.
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

    /// Returns the position of the write that filled a live buffer after the weights last changed.
    fn full_since(&self, b: BufferId, updated: u32) -> Option<u32> {
        let cell = &self.cells[b.index()];
        let first = cell.segments.first()?.writer.at;
        (cell.live && first > updated && first > 0).then_some(first)
    }

    /// Checks a reduction before it is issued.
    pub(super) fn before_reduce(&mut self, work: &Work, c: &Collective) {
        let p = self.p;
        let (now, base) = (self.reduction_of(c), self.pass_now().base);
        // An exchange over an axis and a reduction over it are the same reduction.
        let same = now.axes();
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
                .find(|s| s.writer.at > base && s.reduced.axes().intersects(same))
                .map(|s| s.writer.at);
            if let Some(at) = twice {
                let other = self.id_at(at);
                self.violate(RuleId::DoubleReduce, work.id, Some(other), || {
                    format!("reduces {} over {} again", describe::range(p, a), now)
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

    /// Records an issued reduction. Its inputs are in flight until they are freed.
    pub(super) fn after_reduce(&mut self, work: &Work, c: &Collective) {
        for part in &c.parts {
            if is_full_grad(self.p.buffers[part.input.buffer.index()].role) {
                self.in_flight(work, part.input.buffer);
            }
        }
        let gradients = |part: &Part| is_grad(self.p.buffers[part.input.buffer.index()].role);
        if c.parts.iter().any(gradients) {
            self.step.reduced(work);
        }
    }

    /// Checks the 16-byte alignment of NCCL operands.
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

    /// Returns the groups that some micro-batch uses, but that the optimizer left out of this pass.
    pub(super) fn not_stepped(&self) -> Vec<GroupId> {
        let now = self.passes.len();
        let used = |g: usize| {
            let unit = &self.p.units[self.p.groups[g].unit.index()];
            unit.skipped_in.len() < usize::from(self.p.meta.micro_batches)
        };
        (0..self.p.groups.len())
            .filter(|&g| self.p.groups[g].requires_grad && self.facts.stepped[g] != now)
            .filter(|&g| used(g))
            .map(|g| GroupId(g as u16))
            .collect()
    }
}
