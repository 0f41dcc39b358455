//! The native policy: per-module lifecycle of the `fully_shard` rewrite (Megatron-LM #4435) with the discipline of the
//! clean one on its main branch: every buffer is freed on the stream that used it last, behind a wait edge.
//!
//! - gather lands in the flat buffer that parameters view; weight-gradient kernels write the flat gradient buffer;
//! - under HFSDP a unit's shards are gathered over the outer axis once a step, before its first gather;
//! - gathers run up to the prefetch depth or element budget ahead, never in recompute;
//! - at most `reduce_in_flight` full gradient buffers are live, the one being written included; an outer axis reduces shards and holds none;
//! - backward gathers only the units of which one of its kernels reads a weight;
//! - with `optimizer_in_backward` a group is updated behind its reduction, and its shard of the gradient is freed with its full one;
//! - at the end of a step the units that the next one begins with may be gathered, as soon as they are updated;
//! - the final callback fences, it does no hidden work; in a step's last backward the fence is one a group, before the
//!   optimizer's launch on it, and groups are updated in the order of their reductions.

mod spec;

pub(super) use spec::SPEC;

use crate::compile::tape::TapeOp;
use crate::config::{Prefetch, Reshard};
use crate::ir::{
    Access, BufferId, COMPUTE, EventId, GroupId, Holds, ParamId, PerRank, Role, ShardOp, Source,
    StreamId, UnitId,
};
use crate::lower::context::{Cx, prefetch_targets};
use crate::lower::flat::{Flat, Reduction, fill_padding};
use crate::lower::optimizer::{self, ShardState, late_norm};
use crate::lower::reduction;
use crate::lower::streams::CommStreams;
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule};
use std::collections::VecDeque;

/// A gradient buffer whose reduction is in flight.
#[derive(Clone, Copy, Debug)]
struct Pending {
    reduction: Reduction,
    buffer: BufferId,
}

/// A group whose gradient the optimizer may read behind an event.
#[derive(Clone, Copy, Debug)]
struct Reduced {
    group: GroupId,
    /// End of its last reduction (and of its update, where `updated`), until computation has waited for it.
    done: Option<EventId>,
    /// Backward has issued its update too.
    updated: bool,
}

pub(crate) struct Native {
    flat: Flat,
    /// Event of each unit's gather while it is unsharded.
    gathered: Vec<Option<EventId>>,
    /// Whether the unit is full (or needs no gather in this pass).
    full: Vec<bool>,
    /// Groups whose shards the outer axis has refreshed since the optimizer.
    refreshed: Vec<bool>,
    /// Units whose backward is done in this pass.
    done: Vec<bool>,
    /// Slices kept by integer reshard.
    kept: Vec<Option<BufferId>>,
    /// Full gradient buffers by group, while live.
    grads: Vec<Option<BufferId>>,
    /// Full gradients that wait for the last micro-batch to be reduced, by group, and their buffers, once made.
    sums: Vec<Option<BufferId>>,
    sums_made: Vec<Option<BufferId>>,
    pending: VecDeque<Pending>,
    /// Groups reduced in the step's last micro-batch, in that order: the optimizer's.
    reduced: Vec<Reduced>,
    /// Units of which a kernel of backward (recompute included) reads a weight.
    read_in_backward: Vec<bool>,
    /// Events of offloaded optimizer state on its way to the device.
    coming: VecDeque<EventId>,
    /// Units that are gathered at the end of a step for the next one, in forward order.
    ahead: Vec<UnitId>,
    in_flight: usize,
    first: bool,
    /// Gathers of the pass that begins wait already for what they read.
    joined: bool,
    last: bool,
}

impl Native {
    pub(crate) fn new(cx: &mut Cx<'_>) -> Self {
        let fsdp = &cx.scenario.fsdp;
        let separate = fsdp.separate_communicators;
        let in_flight = fsdp.reduce_in_flight as usize;
        let multi = cx.world() > 1;
        let streams = CommStreams::new(cx, multi, -1, -1);
        let comms = cx.communicators(separate);
        let flat = Flat::new(cx, comms, streams, false);
        let units = cx.units.len();
        let ahead = if flat.weight_sharded() {
            let with_weights = cx
                .forward_order
                .iter()
                .filter(|u| !cx.unit(**u).groups.is_empty());
            with_weights
                .take(cx.scenario.fsdp.prefetch_next_step as usize)
                .copied()
                .collect()
        } else {
            Vec::new()
        };
        Self {
            flat,
            gathered: vec![None; units],
            full: vec![false; units],
            refreshed: vec![false; cx.groups.len()],
            done: vec![false; units],
            kept: vec![None; cx.groups.len()],
            grads: vec![None; cx.groups.len()],
            sums: vec![None; cx.groups.len()],
            sums_made: vec![None; cx.groups.len()],
            pending: VecDeque::new(),
            reduced: Vec::new(),
            read_in_backward: read_in_backward(cx),
            coming: VecDeque::new(),
            ahead,
            in_flight,
            first: true,
            joined: false,
            last: true,
        }
    }

    /// Gathers a unit unless it is full already.
    fn unshard(&mut self, cx: &mut Cx<'_>, unit: UnitId, rule: Rule) {
        if std::mem::replace(&mut self.full[unit.index()], true)
            || !self.flat.gathers(cx, self.first)
        {
            return;
        }
        let (phase, at) = (cx.b.phase(), cx.b.unit());
        cx.b.at(unit, phase);
        for g in cx.groups_of(unit) {
            if let Some(full) = self.flat.state(g).full {
                cx.b.alloc(rule, full);
            }
            let kept = self.kept[g.index()].map(|id| cx.b.whole(id));
            let gather = self.flat.streams.gather;
            if let (None, Some(rest)) = (kept, self.flat.state(g).weight) {
                self.flat.visit_for(cx, rest, true, gather);
            }
            // Nobody updates a frozen group.
            let stale = cx.group(g).requires_grad
                && !std::mem::replace(&mut self.refreshed[g.index()], true);
            self.flat.gather(cx, rule, g, stale, kept);
            if let (None, Some(rest)) = (kept, self.flat.state(g).weight) {
                self.flat.leave(cx, rest, false, gather);
            }
        }
        self.gathered[unit.index()] = Some(cx.b.record(rule, self.flat.streams.gather));
        cx.b.at(at, phase);
    }

    /// Gathers a unit that is needed now and makes computation wait for it.
    fn require(&mut self, cx: &mut Cx<'_>, unit: UnitId, direction: Prefetch) {
        if !self.full[unit.index()] && direction == Prefetch::Depth(0) {
            // Without prefetch a gather runs when its unit's turn has come, not while the unit before it computes.
            cx.b.join(Rule::GatherGate, COMPUTE, self.flat.streams.gather);
        }
        self.unshard(cx, unit, Rule::Unshard);
        if let Some(event) = self.gathered[unit.index()]
            && self.flat.streams.gather != COMPUTE
        {
            cx.b.wait(Rule::GatherDone, event, COMPUTE);
        }
    }

    /// [`Native::require`], where backward reads a weight of the unit: an embedding's gradient needs none.
    fn require_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if self.read_in_backward[unit.index()] {
            self.require(cx, unit, cx.scenario.fsdp.prefetch_backward);
        }
    }

    fn prefetch(&mut self, cx: &mut Cx<'_>, unit: UnitId, backward: bool) {
        let fsdp = &cx.scenario.fsdp;
        let (order, rule) = if backward {
            (&cx.backward_order, fsdp.prefetch_backward)
        } else {
            (&cx.forward_order, fsdp.prefetch_forward)
        };
        let Some(at) = order.iter().position(|u| *u == unit) else {
            return;
        };
        let read = |u: &&UnitId| !backward || self.read_in_backward[u.index()];
        let order: Vec<UnitId> = std::iter::once(unit)
            .chain(order[at + 1..].iter().filter(read).copied())
            .collect();
        for next in prefetch_targets(cx, &order, 0, rule, 1) {
            if !(backward && self.done[next.index()]) {
                self.unshard(cx, next, Rule::Prefetch);
            }
        }
    }

    /// Frees a unit's full weights on the gather stream, once computation is done with them.
    fn reshard(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        self.gathered[unit.index()] = None;
        if !self.flat.weight_sharded() {
            return;
        }
        cx.b.join(Rule::Reshard, COMPUTE, self.flat.streams.gather);
        for g in cx.groups_of(unit) {
            if let Some(full) = self.flat.state(g).full {
                cx.b.free(Rule::Reshard, full);
            }
        }
    }

    /// What the end of a unit's backward frees: what it holds beyond its shards, but for the parameters that the next micro-batch is to
    /// find; the slice of an integer reshard included.
    fn reshard_after_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let goes = self.last || cx.scenario.fsdp.reshard_after_backward;
        if self.flat.weight_sharded() && goes {
            self.reshard(cx, unit);
        }
        for g in cx.groups_of(unit) {
            if let Some(slice) = self.kept[g.index()].take() {
                cx.b.free(Rule::ReshardGroup, slice);
            }
        }
    }

    /// Integer reshard: keep this rank's slice of the smaller group.
    fn keep_slice(&mut self, cx: &mut Cx<'_>, unit: UnitId, ranks: u32) {
        for g in cx.groups_of(unit) {
            let Some(full) = self.flat.state(g).full else {
                continue;
            };
            let whole = cx.b.whole(full);
            let bytes = whole.bytes / u64::from(ranks);
            let dtype = cx.compute_dtype();
            let slice = cx.transient_on(Role::GatherInput, bytes, dtype, COMPUTE, g);
            cx.b.alloc(Rule::ReshardGroup, slice);
            let from = Access {
                bytes,
                per_rank: PerRank::SubShard,
                ..whole
            };
            let to = cx.b.whole(slice);
            cx.run(
                Rule::ReshardGroup,
                ShardOp::Copy,
                bytes / dtype.size(),
                dtype,
                COMPUTE,
                &[from],
                &[to],
            );
            self.kept[g.index()] = Some(slice);
        }
        // The backward gather reads the slice on another stream.
        cx.b.join(Rule::ReshardGroup, COMPUTE, self.flat.streams.gather);
    }

    /// Gathers read what the optimizer (or the micro-batch before) wrote.
    fn join_gathers(&self, cx: &mut Cx<'_>) {
        if self.flat.streams.gather != COMPUTE {
            cx.b.join(Rule::StepStart, COMPUTE, self.flat.streams.gather);
        }
    }

    /// Gathers the units of the next step's begin, in the first step of all: later ones find them gathered.
    fn gather_first(&mut self, cx: &mut Cx<'_>) {
        let from = cx.b.instrs.len() as u32;
        for unit in self.ahead.clone() {
            self.unshard(cx, unit, Rule::Prefetch);
            self.gathered[unit.index()] = None;
        }
        cx.b.join(Rule::Prefetch, self.flat.streams.gather, COMPUTE);
        let to = cx.b.instrs.len() as u32;
        cx.b.withhold_from_later(from..to);
    }

    /// Gathers a unit for the next step once the optimizer's state `index`, its last one, has been updated.
    fn gather_ahead(&mut self, cx: &mut Cx<'_>, index: usize) {
        let unit = |r: &Reduced| cx.group(r.group).unit;
        let Some(now) = self.reduced.get(index).map(unit) else {
            return;
        };
        let more = self.reduced[index + 1..].iter().any(|r| unit(r) == now);
        if !more && self.ahead.contains(&now) {
            self.gather_for_next(cx, now);
        }
    }

    /// Gathers a unit at the end of a step, unless it is full already.
    fn gather_for_next(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if self.full[unit.index()] {
            return;
        }
        cx.b.join(Rule::Prefetch, COMPUTE, self.flat.streams.gather);
        // An outer axis gathers what its ranks have updated.
        for g in cx.groups_of(unit) {
            self.refreshed[g.index()] = false;
        }
        self.unshard(cx, unit, Rule::Prefetch);
        self.gathered[unit.index()] = None;
    }

    /// Waits for reductions until fewer than `limit` gradient buffers are in flight, and frees theirs.
    fn drain(&mut self, cx: &mut Cx<'_>, limit: usize, rule: Rule) {
        while self.pending.len() > limit {
            let Some(p) = self.pending.pop_front() else {
                break;
            };
            // On the compute stream itself the buffer is free at once; what reduces further on another one is not over.
            if self.flat.streams.reduce != COMPUTE {
                let event = p.reduction.input_free;
                cx.b.wait(rule, event, COMPUTE);
                self.is_over(cx, event);
            }
            cx.b.free(Rule::ReduceRelease, p.buffer);
        }
    }

    /// Nobody need wait for a reduction any more: the compute stream has. What has been updated behind it needs its gradient no more.
    fn is_over(&mut self, cx: &mut Cx<'_>, done: EventId) {
        for index in 0..self.reduced.len() {
            let r = &mut self.reduced[index];
            if r.done == Some(done) {
                r.done = None;
                if r.updated {
                    self.drop_grad(cx, index);
                }
            }
        }
    }

    fn reduce(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        for g in cx.trained_groups_of(unit) {
            if self.flat.grad_sharded() {
                let Some(buffer) = self.full_gradient(cx, g) else {
                    continue;
                };
                // The root's buffer lives all through backward and joins the others in flight here.
                self.drain(cx, self.in_flight - 1, Rule::ReduceGate);
                let first = self.first || !cx.scenario.fsdp.reduces(false, false);
                if let (true, true, Some(grad)) = (
                    first,
                    self.flat.grads_of_a_step(cx),
                    self.flat.state(g).grad,
                ) {
                    cx.b.alloc(Rule::Reduce, grad.buffer);
                }
                self.make_moments(cx, g);
                let input = cx.b.whole(buffer);
                let mut reduction = self
                    .flat
                    .reduce_sharded(cx, g, input, first, self.last, false);
                if let Some(updated) = self.note_reduced(cx, g, reduction.complete) {
                    // The shard of the gradient is freed with the full one, which thus waits for the update.
                    reduction = Reduction {
                        input_free: updated,
                        complete: updated,
                        ..reduction
                    };
                }
                self.pending.push_back(Pending { reduction, buffer });
                if self.flat.streams.reduce == COMPUTE {
                    self.drain(cx, 0, Rule::ReduceGate);
                }
            } else {
                self.accumulate(cx, g);
                if self.last {
                    self.make_moments(cx, g);
                    let reduction = self.flat.reduce_full(cx, g);
                    self.note_reduced(cx, g, reduction.complete);
                }
            }
        }
    }

    /// Notes a group that was reduced in the last micro-batch (until the event `complete`), and updates it if backward does that.
    /// Returns the end of the update.
    fn note_reduced(
        &mut self,
        cx: &mut Cx<'_>,
        group: GroupId,
        complete: EventId,
    ) -> Option<EventId> {
        if !self.last {
            return None;
        }
        let in_backward = cx.scenario.fsdp.optimizer_in_backward;
        let updated = in_backward.then(|| self.update(cx, group));
        let elsewhere = self.last_stage() != COMPUTE;
        self.reduced.push(Reduced {
            group,
            done: elsewhere.then_some(updated.unwrap_or(complete)),
            updated: in_backward,
        });
        if in_backward && !elsewhere {
            self.drop_grad(cx, self.reduced.len() - 1);
        }
        updated
    }

    /// Stream on which a group's reduction ends.
    fn last_stage(&self) -> StreamId {
        match &self.flat.streams {
            s if s.outer != COMPUTE => s.outer,
            s => s.reduce,
        }
    }

    /// Issues a group's update behind its reduction; returns its end.
    fn update(&self, cx: &mut Cx<'_>, group: GroupId) -> EventId {
        let (phase, unit) = (cx.b.phase(), cx.b.unit());
        let stream = self.last_stage();
        cx.b.at(cx.group(group).unit, Phase::Optimizer);
        for state in self.flat.optimizer_state(cx, std::iter::once(group)) {
            optimizer::update(cx, &state, None, stream);
        }
        let end = cx.b.record(Rule::Optimizer, stream);
        cx.b.at(unit, phase);
        end
    }

    /// In the first step: the optimizer's state of a group that backward updates.
    fn make_moments(&self, cx: &mut Cx<'_>, group: GroupId) {
        if self.last && cx.scenario.fsdp.optimizer_in_backward {
            for state in self.flat.optimizer_state(cx, std::iter::once(group)) {
                optimizer::make_moments(cx, &state);
            }
        }
    }

    /// Makes computation wait for the reduction of the optimizer's state `index`, and frees the gradient buffers that this
    /// shows to be out of use.
    fn await_reduction(&mut self, cx: &mut Cx<'_>, index: usize) {
        let Some(done) = self.reduced.get(index).and_then(|r| r.done) else {
            return;
        };
        cx.b.wait(Rule::FinalFence, done, COMPUTE);
        // Reductions end in the order of their issue.
        while self.pending.iter().any(|p| p.reduction.complete == done) {
            let Some(p) = self.pending.pop_front() else {
                break;
            };
            cx.b.free(Rule::ReduceRelease, p.buffer);
            self.is_over(cx, p.reduction.complete);
        }
        self.is_over(cx, done);
    }

    /// Adds a later micro-batch's gradient to the one at rest.
    fn accumulate(&mut self, cx: &mut Cx<'_>, g: GroupId) {
        if let Some(rest) = self.flat.state(g).grad {
            self.add_to(cx, g, rest);
        }
    }

    /// Adds a later micro-batch's gradient to earlier ones', in their dtype.
    fn add_to(&mut self, cx: &mut Cx<'_>, g: GroupId, sum: Access) {
        let Some(buffer) = self.grads[g.index()].take() else {
            return;
        };
        let from = cx.b.whole(buffer);
        reduction::accumulate(cx, Rule::Accumulate, from, &[sum], COMPUTE);
        cx.b.free(Rule::Accumulate, buffer);
    }

    /// The full gradient of a group that this micro-batch reduces, in the dtype of communication.
    fn full_gradient(&mut self, cx: &mut Cx<'_>, g: GroupId) -> Option<BufferId> {
        let Some(sum) = self.sums[g.index()] else {
            return self.grads[g.index()].take();
        };
        let whole = cx.b.whole(sum);
        self.add_to(cx, g, whole);
        if !cx.scenario.fsdp.reduces(false, self.last) {
            return None;
        }
        self.sums[g.index()] = None;
        let dtype = self.flat.comm_dtype();
        if dtype == cx.scenario.precision.main_grads {
            return Some(sum);
        }
        self.drain(cx, self.in_flight - 1, Rule::ReduceGate);
        let n = self.flat.state(g).numel;
        let sent = cx.transient_on(Role::ReduceInput, n * dtype.size(), dtype, COMPUTE, g);
        cx.b.alloc(Rule::ReduceCopyIn, sent);
        let to = cx.b.whole(sent);
        let (rule, copy) = (Rule::ReduceCopyIn, ShardOp::Copy);
        cx.run(rule, copy, n, dtype, COMPUTE, &[whole], &[to]);
        cx.b.free(Rule::ReduceRelease, sum);
        Some(sent)
    }

    /// Where the first of several micro-batches writes a gradient that is not reduced before the last.
    fn sum(&mut self, cx: &mut Cx<'_>, g: GroupId) -> BufferId {
        if let Some(sum) = self.sums[g.index()] {
            return sum;
        }
        let dtype = cx.scenario.precision.main_grads;
        let id = *self.sums_made[g.index()].get_or_insert_with(|| {
            let bytes = self.flat.state(g).numel * dtype.size();
            let unit = cx.group(g).unit;
            cx.resting(Role::FullGrad, bytes, dtype, unit, Holds::Group(g))
        });
        cx.b.alloc(Rule::Grad, id);
        let whole = cx.b.whole(id);
        fill_padding(cx, g, whole, dtype);
        self.sums[g.index()] = Some(id);
        id
    }
}

impl Native {
    /// Group of the optimizer's state `index`.
    fn updated(&self, index: usize) -> Option<GroupId> {
        self.reduced.get(index).map(|r| r.group)
    }

    /// Ends the life of the gradient of the optimizer's state `index`, where it lives for a step only.
    fn drop_grad(&self, cx: &mut Cx<'_>, index: usize) {
        let Some(group) = self.updated(index) else {
            return;
        };
        if let (true, Some(grad)) = (self.flat.grads_of_a_step(cx), self.flat.state(group).grad) {
            let (phase, unit) = (cx.b.phase(), cx.b.unit());
            cx.b.at(cx.group(group).unit, Phase::Optimizer);
            cx.b.free(Rule::ZeroGrad, grad.buffer);
            cx.b.at(unit, phase);
        }
    }

    /// Brings a group's offloaded optimizer state to the device; only its gradient for the norm.
    fn bring(&self, cx: &mut Cx<'_>, index: usize, norm: bool) -> Option<EventId> {
        let g = self.updated(index)?;
        let state = self.flat.state(g).clone();
        if let Some(grad) = state.grad {
            self.flat.visit(cx, grad.buffer, true);
        }
        if !norm {
            let moments = state.moments.iter().flat_map(|m| [m.first, m.second]);
            // Without main weights the optimizer updates the compute weights themselves.
            let weights = state.main.or(state.weight);
            for id in weights.into_iter().chain(moments) {
                self.flat.visit(cx, id, true);
            }
            if let (Some(_), Some(written)) = (state.main, state.weight) {
                self.flat.visit(cx, written, false);
            }
        }
        self.flat.visited(cx)
    }
}

impl Lifecycle for Native {
    fn init(&mut self, cx: &mut Cx<'_>) {
        self.flat.init(cx);
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.first = index == 0;
        self.last = last;
        self.reduced.clear();
        if self.first {
            self.refreshed.fill(false);
        }
    }

    fn before_inputs(&mut self, cx: &mut Cx<'_>) {
        self.join_gathers(cx);
        self.joined = true;
    }

    fn forward_start(&mut self, cx: &mut Cx<'_>) {
        if !std::mem::take(&mut self.joined) {
            self.join_gathers(cx);
        }
        if !self.flat.weight_sharded() {
            self.full.fill(false);
            self.gathered.fill(None);
        }
        if self.first && cx.b.phase() != Phase::Validation && !self.ahead.is_empty() {
            self.gather_first(cx);
        }
    }

    fn pre_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let rule = cx.scenario.fsdp.prefetch_forward;
        self.require(cx, unit, rule);
        self.prefetch(cx, unit, false);
    }

    fn post_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        // Validation frees every unit: no backward will.
        let validation = cx.b.phase() == Phase::Validation;
        if validation && self.flat.weight_sharded() {
            // The next step begins with these.
            if !self.ahead.contains(&unit) {
                self.reshard(cx, unit);
            }
        } else if cx.unit(unit).reshards {
            if let Reshard::Group(n) = cx.scenario.fsdp.reshard_after_forward {
                self.keep_slice(cx, unit, n);
            }
            self.reshard(cx, unit);
        }
    }

    fn forward_end(&mut self, _cx: &mut Cx<'_>) {}

    fn backward_start(&mut self, cx: &mut Cx<'_>) {
        self.done.fill(false);
        // A root without parameters has no hook of its own to prefetch the first unit from.
        let read = |u: &&UnitId| self.read_in_backward[u.index()];
        let first = cx.backward_order.iter().find(read).copied();
        if let Some(first) = first.filter(|u| !cx.unit(*u).spec.is_root)
            && cx.scenario.fsdp.prefetch_backward != Prefetch::Depth(0)
        {
            self.unshard(cx, first, Rule::Prefetch);
        }
    }

    fn pre_recompute(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        self.require_backward(cx, unit);
    }

    fn pre_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        self.require_backward(cx, unit);
        self.prefetch(cx, unit, true);
    }

    fn post_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        self.done[unit.index()] = true;
        self.reshard_after_backward(cx, unit);
        self.reduce(cx, unit);
    }

    fn backward_end(&mut self, cx: &mut Cx<'_>) {
        if !self.last {
            self.drain(cx, 0, Rule::FinalFence);
        }
        // Frozen units before the first trained one have no backward to reshard in.
        for unit in cx.forward_order.clone() {
            self.reshard_after_backward(cx, unit);
        }
        // The last reductions of a step run beside the updates of the groups reduced before.
        if !self.last {
            cx.b.join(Rule::FinalFence, self.flat.streams.reduce, COMPUTE);
        }
    }

    fn weight(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        self.flat.weight(cx, p)
    }

    fn grad(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        let (g, _) = cx.home[p.index()];
        let offset = cx.flat_offset(p);
        if !self.flat.grad_sharded() && self.first {
            let rest = self
                .flat
                .state(g)
                .grad
                .expect("only trained parameters have gradients");
            let element = cx.scenario.precision.main_grads.size();
            return Location {
                buffer: rest.buffer,
                offset: rest.offset + offset * element,
                element,
            };
        }
        let once = !cx.scenario.fsdp.reduces(false, false);
        if self.flat.grad_sharded() && once && self.first && !self.last {
            let element = cx.scenario.precision.main_grads.size();
            return Location {
                buffer: self.sum(cx, g),
                offset: offset * element,
                element,
            };
        }
        // What is added to others is of their dtype.
        let dtype = if self.flat.grad_sharded() && self.sums[g.index()].is_none() {
            self.flat.comm_dtype()
        } else {
            cx.scenario.precision.main_grads
        };
        let buffer = match self.grads[g.index()] {
            Some(buffer) => buffer,
            None => {
                let root = cx.unit(cx.group(g).unit).spec.is_root;
                if self.flat.grad_sharded() && !root {
                    self.drain(cx, self.in_flight - 1, Rule::ReduceGate);
                }
                let numel = self.flat.state(g).numel;
                let buffer = match cx.made.get(&(Role::FullGrad, g, COMPUTE)) {
                    Some(id) => *id,
                    None => {
                        let id =
                            cx.transient(Role::FullGrad, numel * dtype.size(), dtype, COMPUTE, g);
                        cx.made.insert((Role::FullGrad, g, COMPUTE), id);
                        id
                    }
                };
                cx.b.alloc(Rule::Grad, buffer);
                let whole = cx.b.whole(buffer);
                fill_padding(cx, g, whole, dtype);
                self.grads[g.index()] = Some(buffer);
                buffer
            }
        };
        Location {
            buffer,
            offset: offset * dtype.size(),
            element: dtype.size(),
        }
    }

    fn optimizer_state(&mut self, cx: &mut Cx<'_>) -> Vec<ShardState> {
        let known: Vec<GroupId> = self.reduced.iter().map(|r| r.group).collect();
        let trained = |g: &GroupId| cx.group(*g).requires_grad && !known.contains(g);
        let others = cx.group_ids().filter(trained);
        self.reduced.extend(others.map(|group| Reduced {
            group,
            done: None,
            updated: false,
        }));
        let order = self.reduced.iter().map(|r| r.group);
        self.flat.optimizer_state(cx, order)
    }

    /// What is gathered for the next step is updated in the middle: its reduction, one of the last, runs beside the updates before
    /// it, its gather beside those after it.
    fn update_order(&self, cx: &Cx<'_>, states: usize) -> Vec<usize> {
        let next = |&i: &usize| {
            self.reduced
                .get(i)
                .is_some_and(|r| self.ahead.contains(&cx.group(r.group).unit))
        };
        let (next, mut order): (Vec<usize>, Vec<usize>) = (0..states).partition(next);
        let middle = order.len().div_ceil(2);
        order.splice(middle..middle, next);
        order
    }

    fn is_updated(&self, index: usize) -> bool {
        self.reduced.get(index).is_some_and(|r| r.updated)
    }

    fn captures_optimizer(&self) -> bool {
        true
    }

    fn before_state(&mut self, cx: &mut Cx<'_>, index: usize, norm: bool) {
        self.await_reduction(cx, index);
        if !self.flat.offloads() {
            return;
        }
        // One group ahead: its state comes in while this one is updated.
        let ahead = if index == 0 {
            0..2
        } else {
            index + 1..index + 2
        };
        for i in ahead {
            let event = self.bring(cx, i, norm);
            self.coming.extend(event);
        }
        if let Some(event) = self.coming.pop_front() {
            cx.b.wait(Rule::Offload, event, COMPUTE);
        }
    }

    fn after_state(&mut self, cx: &mut Cx<'_>, index: usize, norm: bool) {
        if !norm && !late_norm(cx) && !self.is_updated(index) {
            self.drop_grad(cx, index);
        }
        if !norm {
            self.gather_ahead(cx, index);
        }
        if !self.flat.offloads() {
            return;
        }
        let Some(g) = self.updated(index) else {
            return;
        };
        let state = self.flat.state(g).clone();
        if let Some(grad) = state.grad {
            self.flat.leave(cx, grad.buffer, false, COMPUTE);
        }
        if norm {
            return;
        }
        if let Some(weight) = state.weight {
            self.flat.leave(cx, weight, true, COMPUTE);
        }
        let moments = state.moments.iter().flat_map(|m| [m.first, m.second]);
        for id in state.main.into_iter().chain(moments) {
            self.flat.leave(cx, id, true, COMPUTE);
        }
    }

    fn step_end(&mut self, cx: &mut Cx<'_>) {
        if !self.flat.offloads() {
            self.flat.refresh(cx, COMPUTE);
        }
        if late_norm(cx) {
            for index in 0..self.reduced.len() {
                self.drop_grad(cx, index);
            }
        }
        // Frozen ones have had no update to follow.
        for unit in self.ahead.clone() {
            self.gather_for_next(cx, unit);
        }
        if !self.ahead.is_empty() {
            cx.b.join(Rule::StepEnd, self.flat.streams.gather, COMPUTE);
        }
    }
}

/// Units of which a kernel of backward reads a weight, recomputed forwards included.
fn read_in_backward(cx: &Cx<'_>) -> Vec<bool> {
    let mut read = vec![false; cx.units.len()];
    for op in &cx.tape.backward {
        let TapeOp::Launch { reads, writes, .. } = *op else {
            continue;
        };
        for operand in &cx.tape.operands[reads as usize..writes as usize] {
            if let Source::Param(p) = operand.source {
                let (group, _) = cx.home[p.index()];
                read[cx.group(group).unit.index()] = true;
            }
        }
    }
    read
}
