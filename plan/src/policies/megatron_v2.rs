//! The `megatron_v2` policy: megatron-fsdp 0.6.1, the experimental engine
//! (`experimental/module.py`, `parameter_group.py`, `dbuffer.py`, `optimizer.py`), which shards one
//! module per `fully_shard`.
//!
//! - Every unit, including the root, is gathered into separate storage, which is resized to zero
//!   after forward and after backward. Allocation and release happen on the gather stream, after a
//!   wait for computation.
//! - A unit's hooks gather the next unit in a fixed order: registration order in forward; the root
//!   and then its children in reverse order in backward.
//! - A unit is reduced when all of its trained parameters have gradients. Computation waits for the
//!   reduction stream, the gradients are packed into a buffer of that stream, and they are reduced
//!   from there into the persistent shard. The unit is then released.
//! - The optimizer uses gradients in the dtype of the main weights. After its step, it casts the
//!   compute weights group by group.

mod build;
mod order;
mod reduce;
mod spec;

pub(super) use spec::SPEC;

use crate::config::Loss;
use crate::ir::{BufferId, COMPUTE, EventId, HostWorkKind, ModuleKind, ParamId, UnitId};
use crate::lower::autograd::AutogradGrads;
use crate::lower::emitter::Emitter;
use crate::lower::flat::{Flat, GradCasts};
use crate::lower::inputs::LoweringInputs;
use crate::lower::optimizer::ShardState;
use crate::lower::streams::CommStreams;
use crate::lower::unmanaged::{Unmanaged, router_biases};
use crate::lower::walk::{Lifecycle, Location, Pass};
use crate::program::{Phase, Rule, StreamKind};
use order::Orders;

// Note [Host work of the experimental engine]
//
// The constants below count per-parameter work, in units of a parameter's bookkeeping in an FSDP2
// hook, which hardware profiles measure (`hook_param_us`). The experimental engine does more work
// in Python per parameter than the others:
//
// - gathering and releasing a unit installs parameters on modules, as in FSDP2: 1 per gather;
// - a gradient runs a separate hook (1), is looked up in the layout and packed by a separate copy
//   (1), and its reduced shard is wrapped as a DTensor twice: after the reduction, and after the
//   reduction over the outer axis, which plain data parallelism does not have (2);
// - the optimizer's hooks cast it through DTensor's dispatch (1), install the cast (1), and restore
//   the original (1).

/// Per-parameter work of a reduction.
const REDUCED: u16 = 4;
/// Per-parameter work of the optimizer's hooks.
const CAST: u16 = 3;

/// Number of parameters of a unit that backward still needs.
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    /// Number of trained parameters.
    trained: usize,
    /// Number of these without a gradient in this backward.
    missing: usize,
    /// Tape position of the last kernel that reads a parameter in backward.
    last_read: Option<u32>,
}

pub(crate) struct MegatronV2 {
    flat: Flat,
    orders: Orders,
    gathered: Vec<Option<EventId>>,
    full: Vec<bool>,
    grads: AutogradGrads,
    /// Counts of choices that move the biases of routers, which are buffers.
    choices: Unmanaged,
    /// Inputs of reductions, by group.
    packed: Vec<Option<BufferId>>,
    /// Copies of shards for the average over replicas, by group.
    copies: Vec<Option<BufferId>>,
    pending: Vec<Pending>,
    /// Tape position up to which the kernels of this backward have been issued.
    issued: Option<u32>,
    casts: GradCasts,
    first: bool,
    /// Whether no forward of this step has started.
    step_begins: bool,
    last: bool,
    /// Whether the loss is computed outside the root, from its outputs. Hooks of the root then run
    /// before the loss in forward and after it in backward.
    loss_apart: bool,
}

impl MegatronV2 {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let streams = streams(out);
        let comms = out.communicators(false);
        let over_data = router_biases::own_communicator(out);
        let flat = Flat::new(out, comms, streams, false);
        let (units, groups) = (out.inputs.units.len(), out.inputs.groups.len());
        let modules = &out.inputs.tape.modules;
        let loss = modules.iter().any(|m| m.kind == ModuleKind::Loss);
        Self {
            flat,
            orders: Orders::new(out.inputs),
            gathered: vec![None; units],
            full: vec![false; units],
            grads: AutogradGrads::new(out.inputs.tape.params.len(), out.inputs.types.compute),
            choices: Unmanaged::new(out.inputs, over_data),
            packed: vec![None; groups],
            copies: vec![None; groups],
            pending: order::pending(out.inputs),
            issued: None,
            casts: GradCasts::new(groups),
            first: true,
            step_begins: true,
            last: true,
            loss_apart: loss && out.inputs.scenario.train.loss == Loss::Materialized,
        }
    }

    /// Gathers a unit, unless it is full: `_unshard_parameter_groups`.
    fn unshard(&mut self, out: &mut Emitter<'_>, unit: UnitId, rule: Rule) {
        if std::mem::replace(&mut self.full[unit.index()], true)
            || !self.flat.gathers(out.inputs, self.first)
        {
            return;
        }
        let done = self.flat.gather_unit(out, rule, unit, self.first);
        self.gathered[unit.index()] = Some(done);
    }

    /// Makes a unit's parameters available to computation, then gathers the next one.
    fn enter(&mut self, out: &mut Emitter<'_>, unit: UnitId, backward: bool) {
        self.require(out, unit);
        if let Some(next) = self.orders.next(unit, backward) {
            self.unshard(out, next, Rule::Prefetch);
        }
    }

    fn require(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.unshard(out, unit, Rule::Unshard);
        if let Some(event) = self.gathered[unit.index()]
            && self.flat.streams.gather != COMPUTE
        {
            out.b.wait(Rule::GatherDone, event, COMPUTE);
        }
    }

    /// Releases a unit's full parameters: `_reshard_parameter_groups`. See Note [Unshard gate].
    fn reshard(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) || !self.flat.weight_sharded() {
            return;
        }
        self.gathered[unit.index()] = None;
        let gather = self.flat.streams.gather;
        out.b.join(Rule::GatherGate, COMPUTE, gather);
        for g in out.inputs.groups_of(unit) {
            if let Some(full) = self.flat.state(g).full {
                out.b.free(Rule::Reshard, full);
            }
        }
    }

    /// Reduces and releases a unit once its gradients are complete and no kernel reads it any
    /// longer. (The source only waits for the last gradient: autograd computes the gradients of a
    /// layer's weight and input in one node, before it accumulates them.)
    fn complete(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let pending = self.pending[unit.index()];
        if pending.trained == 0 || pending.missing > 0 || pending.last_read > self.issued {
            return;
        }
        self.pending[unit.index()].missing = pending.trained;
        out.within_unit(unit, |out| {
            self.reduce(out, unit);
            self.reshard(out, unit);
        });
    }

    /// Returns whether the backward of a unit starts with the gradients of the model's outputs.
    fn starts_at_outputs(&self, inputs: &LoweringInputs<'_>, unit: UnitId) -> bool {
        self.loss_apart && inputs.unit(unit).spec.is_root
    }
}

/// Returns the streams of `FsdpContext`, both with default priority: one for gathers, and one for
/// reductions over both axes.
fn streams(out: &mut Emitter<'_>) -> CommStreams {
    let several = out.inputs.data_ranks() > 1;
    let mut stream = |kind| {
        if several {
            out.b.add_stream(kind, 0)
        } else {
            COMPUTE
        }
    };
    let gather = stream(StreamKind::AllGather);
    let reduce = stream(StreamKind::ReduceScatter);
    CommStreams {
        copy_in: gather,
        gather,
        reduce,
        outer: reduce,
    }
}

impl Lifecycle for MegatronV2 {
    fn init(&mut self, out: &mut Emitter<'_>) {
        self.build(out);
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.first = index == 0;
        self.step_begins = self.first;
        self.last = last;
    }

    /// The part of the root's `pre_forward` that does not depend on the root's parameters.
    fn forward_start(&mut self, out: &mut Emitter<'_>) {
        if std::mem::take(&mut self.step_begins) {
            // Replicated weights are gathered in the first micro-batch.
            self.full.fill(false);
        }
        let gather = self.flat.streams.gather;
        out.b.join(Rule::StepStart, COMPUTE, gather);
    }

    fn pre_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.enter(out, unit, false);
    }

    fn post_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.reshard(out, unit);
    }

    fn outputs(&mut self, out: &mut Emitter<'_>) {
        self.reshard(out, UnitId(0));
    }

    fn forward_end(&mut self, _out: &mut Emitter<'_>) {}

    fn backward_start(&mut self, out: &mut Emitter<'_>) {
        self.issued = None;
        for pending in &mut self.pending {
            pending.missing = pending.trained;
        }
        let reduce = self.flat.streams.reduce;
        out.b.join(Rule::ReduceFork, COMPUTE, reduce);
    }

    fn pre_recompute(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !self.starts_at_outputs(out.inputs, unit) {
            self.require(out, unit);
        }
    }

    fn pre_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !self.starts_at_outputs(out.inputs, unit) {
            self.enter(out, unit, true);
        }
    }

    fn output_gradients(&mut self, out: &mut Emitter<'_>) {
        let root = UnitId(0);
        if !out.inputs.unit(root).groups.is_empty() {
            out.within_unit(root, |out| self.enter(out, root, true));
        }
    }

    fn after_launch(&mut self, out: &mut Emitter<'_>, pass: Pass, position: u32) {
        if pass != Pass::Backward {
            return;
        }
        self.issued = Some(position);
        for unit in 0..self.pending.len() {
            if self.pending[unit].last_read == Some(position) {
                self.complete(out, UnitId(unit as u16));
            }
        }
    }

    /// The hook after the accumulation of a parameter's gradient.
    fn grad_ready(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if Unmanaged::has(out.inputs, p) {
            return self.choices.accumulate(out, p);
        }
        let (g, _) = out.inputs.home[p.index()];
        if out.inputs.group(g).requires_grad {
            let unit = out.inputs.group(g).unit;
            self.pending[unit.index()].missing -= 1;
            self.complete(out, unit);
        }
    }

    fn post_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        // Units with trained parameters are released with their last gradient.
        if self.pending[unit.index()].trained == 0 {
            self.reshard(out, unit);
        }
    }

    fn between_backwards(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.post_backward(out, unit);
    }

    fn backward_end(&mut self, out: &mut Emitter<'_>) {
        for unit in out.inputs.forward_order.clone() {
            self.reshard(out, unit);
        }
        out.b
            .join(Rule::FinalFence, self.flat.streams.reduce, COMPUTE);
        if self.last {
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

    /// Casts gradients for the optimizer (`step_pre_hook`). The source clips before the cast; here,
    /// clipping works on the casts, which have the same norm.
    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<ShardState> {
        let groups = out.inputs.groups_by_param();
        let mut states = self.flat.optimizer_state(out, groups.iter().copied());
        let stored = out.inputs.types.stored();
        let decoupled = out.inputs.scenario.fsdp.decoupled_gradients;
        if stored != out.inputs.types.grads && !decoupled {
            let trained = out.inputs.tape.params.iter().filter(|p| p.requires_grad);
            let count = CAST * trained.count() as u16;
            out.b.host(Rule::Optimizer, HostWorkKind::HookParam, count);
            self.casts.cast(out, stored, &groups, &mut states);
        }
        self.choices
            .states_with(out, states, |p| self.flat.whole_weight(out.inputs, p))
    }

    fn step_end(&mut self, out: &mut Emitter<'_>) {
        self.casts.free(out);
        self.choices.free_choices(out);
        // `step_post_hook`, for groups with parameters in the optimizer.
        for g in out.inputs.group_ids() {
            if out.inputs.group(g).requires_grad {
                self.flat.refresh_group(out, g, COMPUTE);
            }
        }
        out.b.at(UnitId(0), Phase::Optimizer);
    }
}
