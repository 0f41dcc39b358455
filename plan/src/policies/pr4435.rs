//! Variant `pr4435` of policy `megatron_v2`: the `fully_shard` prototype of Megatron-LM #4435
//! (`v2/fsdp_module.py`, `hooks.py`, `param_group.py`, `dp_buffer.py`, `allocator.py` at 694c09df).
//!
//! - `unshard` gathers a unit and the next one in a fixed order (registration order or its reverse)
//!   on the gather stream, which waits for computation once before both. A unit stays full until
//!   `reshard`, which waits for nothing.
//! - A unit whose inputs need gradients is resharded and reduced at the end of its backward; the
//!   final callback handles the others and the root.
//! - The sliding drain: before a unit stages its gradients, computation waits for the reductions of
//!   all units before the previous one in reverse order, and frees their buffers. The gradients of
//!   at most two units are in flight.
//! - A reduction writes a separate tensor, which is added to the shard.
//!
//! Deviations from the source:
//!
//! - Recomputation does not prefetch units. In the source, `unshard` gathers the next unit in
//!   forward order, whose backward has finished, and nothing reshards it: the next step's forward
//!   then reads weights of the previous step. Rules INV-13 and INV-61 reject that schedule.
//! - Gradients are cast to the dtype of the main weights in the last micro-batch only. The source
//!   casts in each micro-batch, but nothing reads the earlier casts.

mod spec;

pub(super) use spec::SPEC;

use crate::config::{Loss, Prefetch};
use crate::ir::{
    Access, BufferId, COMPUTE, EventId, GroupId, HostWorkKind, ModuleKind, ParamId, Role, StreamId,
    UnitId,
};
use crate::lower::autograd::AutogradGrads;
use crate::lower::emitter::Emitter;
use crate::lower::flat::{Flat, GradCasts, ReduceTo, fill_padding};
use crate::lower::inputs::LoweringInputs;
use crate::lower::optimizer::ShardState;
use crate::lower::streams::CommStreams;
use crate::lower::unmanaged::{Unmanaged, router_biases};
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule, StreamKind};

/// A reduction whose buffers have not been released.
#[derive(Clone, Debug)]
struct Reducing {
    done: EventId,
    buffers: Vec<BufferId>,
}

pub(crate) struct Pr4435 {
    flat: Flat,
    /// Units in registration order.
    order: Vec<UnitId>,
    /// Whether a unit is full, by unit.
    full: Vec<bool>,
    /// Events of full units' gathers (`unshard_done_events`), by unit.
    gathered: Vec<Option<EventId>>,
    grads: AutogradGrads,
    /// Counts of choices that move the biases of routers, which are buffers.
    choices: Unmanaged,
    /// Reductions by unit (`reduce_grad_buckets`).
    reducing: Vec<Vec<Reducing>>,
    /// Units whose backward has finished (`backward_done_modules`).
    done: Vec<bool>,
    /// Units that have been resharded and reduced in this backward (`post_backward_issued`).
    issued: Vec<bool>,
    /// Units that have a hook after their backward because one of their inputs needs a gradient.
    hooked: Vec<bool>,
    /// Full gradients, by group.
    buckets: Vec<Option<BufferId>>,
    /// Copies of the full gradients in the communication dtype, by group.
    comm_copies: Vec<Option<BufferId>>,
    casts: GradCasts,
    /// Inputs of the optimizer for groups whose gradients are cast.
    states: Vec<Option<ShardState>>,
    first: bool,
    last: bool,
    loss_apart: bool,
}

impl Pr4435 {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let streams = streams(out);
        let comms = out.communicators(false);
        let over_data = router_biases::own_communicator(out);
        let flat = Flat::new(out, comms, streams, false);
        let (units, groups) = (out.inputs.units.len(), out.inputs.groups.len());
        let mut modules = out.inputs.tape.modules.iter();
        let loss = modules.any(|m| m.kind == ModuleKind::Loss);
        let mut order: Vec<UnitId> = out.inputs.forward_order.clone();
        order.sort_by_key(|u| out.inputs.unit(*u).spec.modules[0]);
        Self {
            order,
            full: vec![false; units],
            gathered: vec![None; units],
            grads: AutogradGrads::new(out.inputs.tape.params.len(), out.inputs.types.compute),
            choices: Unmanaged::new(out.inputs, over_data),
            reducing: vec![Vec::new(); units],
            done: vec![false; units],
            issued: vec![false; units],
            hooked: out.inputs.units_after_trained(),
            buckets: vec![None; groups],
            comm_copies: vec![None; groups],
            casts: GradCasts::on(groups, flat.streams.reduce),
            states: vec![None; groups],
            first: true,
            last: true,
            loss_apart: loss && out.inputs.scenario.train.loss == Loss::Materialized,
            flat,
        }
    }

    /// Returns whether `enable_unshard_prefetch` is set, so that gathers run on a separate stream.
    fn asynchronous(&self) -> bool {
        self.flat.streams.gather != COMPUTE
    }

    /// Returns the order of a direction.
    fn ordered(&self, backward: bool) -> Vec<UnitId> {
        let mut order = self.order.clone();
        if backward {
            order.reverse();
        }
        order
    }

    /// `unshard`: gathers a unit and, if `ahead` is set, the next one, then waits for the unit's
    /// own gather.
    fn unshard(&mut self, out: &mut Emitter<'_>, unit: UnitId, backward: bool, ahead: bool) {
        let mut list = vec![(unit, Rule::Unshard)];
        if ahead && self.asynchronous() {
            let order = self.ordered(backward);
            let at = order.iter().position(|u| *u == unit);
            let next = at.and_then(|at| order.get(at + 1));
            list.extend(next.map(|u| (*u, Rule::Prefetch)));
        }
        list.retain(|(u, _)| !(self.full[u.index()] || backward && self.done[u.index()]));
        let gather = self.flat.streams.gather;
        if !list.is_empty() {
            // The stream waits once, before the gathers are launched. See Note [Unshard gate].
            out.b.join(Rule::GatherGate, COMPUTE, gather);
        }
        for (unit, rule) in list {
            self.gather(out, unit, rule);
        }
        if let Some(event) = self.gathered[unit.index()]
            && self.asynchronous()
        {
            out.b.wait(Rule::GatherDone, event, COMPUTE);
        }
    }

    fn gather(&mut self, out: &mut Emitter<'_>, unit: UnitId, rule: Rule) {
        self.full[unit.index()] = true;
        let done = self.flat.gather_unit(out, rule, unit, self.first);
        self.gathered[unit.index()] = Some(done);
    }

    /// `reshard`: waits for nothing. A later gather into the same memory waits for all computation
    /// that has been issued.
    fn reshard(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        self.gathered[unit.index()] = None;
        for g in out.inputs.groups_of(unit) {
            if let Some(full) = self.flat.state(g).full {
                out.b.free(Rule::Reshard, full);
            }
        }
    }

    /// Waits for a unit's reductions and releases their buffers.
    fn drain(&mut self, out: &mut Emitter<'_>, unit: UnitId, rule: Rule) {
        for r in std::mem::take(&mut self.reducing[unit.index()]) {
            out.b.wait(rule, r.done, COMPUTE);
            for buffer in r.buffers {
                out.b.free(Rule::ReduceRelease, buffer);
            }
        }
    }

    /// `reduce_grad`: runs the sliding drain, then stages and reduces group by group. See
    /// Note [Reductions in flight].
    fn reduce_grad(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        out.b.host(Rule::Reduce, HostWorkKind::Hook, 1);
        let order = self.ordered(true);
        let at = order.iter().position(|u| *u == unit).unwrap_or(0);
        for earlier in order.iter().take((at + 1).saturating_sub(2)) {
            self.drain(out, *earlier, Rule::ReduceGate);
        }
        let rs = self.flat.streams.reduce;
        for g in out.inputs.trained_groups_of(unit) {
            let params = out.inputs.group(g).params.len() as u16;
            out.b.host(Rule::Reduce, HostWorkKind::HookParam, params);
            let bucket = self.stage(out, g);
            let whole = out.b.whole(bucket);
            let (input, copy) = self.in_comm_dtype(out, g, whole);
            self.flat
                .reduce_sharded(out, g, input, self.first, self.last, ReduceTo::Apart);
            self.bind(out, g);
            let buffers: Vec<BufferId> = std::iter::once(bucket).chain(copy).collect();
            if rs == COMPUTE {
                for buffer in buffers {
                    out.b.free(Rule::ReduceRelease, buffer);
                }
            } else {
                let done = out.b.record(Rule::Reduce, rs);
                self.reducing[unit.index()].push(Reducing { done, buffers });
            }
        }
    }

    /// Copies a group's gradients to their places in the bucket and frees them. The bucket is
    /// allocated on this first use (`get_main_grad`).
    fn stage(&mut self, out: &mut Emitter<'_>, g: GroupId) -> BufferId {
        let dtype = out.inputs.types.grads;
        let bytes = self.flat.state(g).numel * dtype.size();
        let bucket = *self.buckets[g.index()]
            .get_or_insert_with(|| out.transient(Role::FullGrad, bytes, dtype, COMPUTE, g));
        out.b.alloc(Rule::Grad, bucket);
        let whole = out.b.whole(bucket);
        fill_padding(out, g, whole, dtype);
        for p in out.inputs.group(g).params.clone() {
            let place = out.inputs.flat_place(p, whole, dtype);
            match self.grads.take(p) {
                Some(grad) => {
                    let from = out.b.whole(grad);
                    out.copy(Rule::ReduceCopyIn, COMPUTE, from, place);
                    out.b.free(Rule::Grad, grad);
                }
                None => out.zero(Rule::ReduceCopyIn, &[place]),
            }
        }
        bucket
    }

    /// Returns the input of a bucket's reduction. This is a full copy if the communication dtype
    /// differs.
    fn in_comm_dtype(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        bucket: Access,
    ) -> (Access, Option<BufferId>) {
        let (c, rs) = (self.flat.comm_dtype(g), self.flat.streams.reduce);
        if c == out.inputs.types.grads {
            return (bucket, None);
        }
        let numel = self.flat.state(g).numel;
        let copy = *self.comm_copies[g.index()]
            .get_or_insert_with(|| out.transient_on(Role::ReduceInput, numel * c.size(), c, rs, g));
        out.b.alloc(Rule::ReduceCopyIn, copy);
        out.b.join(Rule::ReduceFork, COMPUTE, rs);
        let whole = out.b.whole(copy);
        out.copy(Rule::ReduceCopyIn, rs, bucket, whole);
        (whole, Some(copy))
    }

    /// Casts a group's gradient shard to the dtype of its main weights, on the stream that reduced
    /// it.
    fn bind(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let stored = out.inputs.types.stored();
        let decoupled = out.inputs.scenario.fsdp.decoupled_gradients;
        if !self.last || decoupled || stored == out.inputs.types.grads {
            return;
        }
        let mut states = self.flat.optimizer_state(out, std::iter::once(g));
        self.casts.cast(out, stored, &[g], &mut states);
        self.states[g.index()] = states.pop();
    }

    /// Reshards and reduces a unit. This is the hook after its backward.
    fn post(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.issued[unit.index()] = true;
        out.within_unit(unit, |out| {
            self.reshard(out, unit);
            self.reduce_grad(out, unit);
        });
    }

    /// Returns whether the backward of a unit starts with the gradients of the model's outputs.
    fn starts_at_outputs(&self, inputs: &LoweringInputs<'_>, unit: UnitId) -> bool {
        self.loss_apart && inputs.unit(unit).spec.is_root
    }
}

/// Returns the streams of `_FSDPRootContext`: a separate stream for each feature that is on,
/// otherwise the current stream.
fn streams(out: &mut Emitter<'_>) -> CommStreams {
    let fsdp = &out.inputs.scenario.fsdp;
    let several = out.inputs.data_ranks() > 1;
    let ahead = several && fsdp.prefetch_forward != Prefetch::Depth(0);
    let apart = several && fsdp.async_reduce;
    let mut stream = |on: bool, kind: StreamKind| -> StreamId {
        if on {
            out.b.add_stream(kind, 0)
        } else {
            COMPUTE
        }
    };
    let gather = stream(ahead, StreamKind::AllGather);
    let reduce = stream(apart, StreamKind::ReduceScatter);
    CommStreams {
        copy_in: gather,
        gather,
        reduce,
        outer: reduce,
    }
}

impl Lifecycle for Pr4435 {
    fn init(&mut self, out: &mut Emitter<'_>) {
        self.flat.init(out);
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.first = index == 0;
        self.last = last;
    }

    fn forward_start(&mut self, _out: &mut Emitter<'_>) {}

    fn pre_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.unshard(out, unit, false, true);
    }

    fn post_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.reshard(out, unit);
    }

    fn outputs(&mut self, out: &mut Emitter<'_>) {
        self.reshard(out, UnitId(0));
    }

    fn forward_end(&mut self, _out: &mut Emitter<'_>) {}

    fn backward_start(&mut self, _out: &mut Emitter<'_>) {
        self.done.fill(false);
        self.issued.fill(false);
    }

    /// Keeps the unit for its backward (`backward_module`).
    fn pre_recompute(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !self.starts_at_outputs(out.inputs, unit) {
            self.unshard(out, unit, true, false);
        }
    }

    fn pre_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !self.starts_at_outputs(out.inputs, unit) {
            self.unshard(out, unit, true, true);
        }
    }

    fn output_gradients(&mut self, out: &mut Emitter<'_>) {
        let root = UnitId(0);
        if !out.inputs.unit(root).groups.is_empty() {
            out.within_unit(root, |out| self.unshard(out, root, true, true));
        }
    }

    fn grad_ready(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if Unmanaged::has(out.inputs, p) {
            self.choices.accumulate(out, p);
        }
    }

    fn post_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if self.hooked[unit.index()] {
            self.done[unit.index()] = true;
            self.post(out, unit);
        }
    }

    fn between_backwards(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if self.hooked[unit.index()] {
            self.reshard(out, unit);
        }
    }

    /// The final callback of the root.
    fn backward_end(&mut self, out: &mut Emitter<'_>) {
        let order = self.ordered(true);
        for unit in &order {
            if !self.issued[unit.index()] {
                self.post(out, *unit);
            }
        }
        for unit in order {
            self.drain(out, unit, Rule::FinalFence);
        }
        out.b
            .join(Rule::FinalFence, self.flat.streams.reduce, COMPUTE);
        if self.last {
            // `stop_communication`, before the optimizer.
            out.b
                .join(Rule::FinalFence, self.flat.streams.gather, COMPUTE);
            self.choices.add_up_choices(out);
        }
    }

    fn weight(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        self.flat.weight(out.inputs, p)
    }

    fn grad(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        match Unmanaged::has(out.inputs, p) {
            true => self.choices.location(out, p),
            false => self.grads.location(out, p),
        }
    }

    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<ShardState> {
        let groups = out.inputs.groups_by_param();
        let state = |g: GroupId| {
            let cast = self.states[g.index()].take().map(|s| vec![s]);
            cast.unwrap_or_else(|| self.flat.optimizer_state(out, std::iter::once(g)))
        };
        let states = groups.into_iter().flat_map(state).collect();
        self.choices
            .states_with(out, states, |p| self.flat.whole_weight(out.inputs, p))
    }

    /// Copies main weights to the model's weights, and zeroes the gradient shards.
    fn step_end(&mut self, out: &mut Emitter<'_>) {
        for g in out.inputs.group_ids() {
            if out.inputs.group(g).requires_grad {
                self.flat.refresh_group(out, g, COMPUTE);
            }
        }
        self.casts.free(out);
        self.choices.free_choices(out);
        for g in out.inputs.group_ids() {
            let Some(grad) = self.flat.state(g).grad else {
                continue;
            };
            out.b.at(out.inputs.group(g).unit, Phase::Optimizer);
            out.zero(Rule::ZeroGrad, &[grad]);
        }
        out.b.at(UnitId(0), Phase::Optimizer);
    }
}
