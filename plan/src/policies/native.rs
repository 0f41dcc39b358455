//! The policy `native`: the per-module lifecycle of the `fully_shard` rewrite (Megatron-LM #4435),
//! with the stream discipline of the version on Megatron-LM's main branch: each buffer is freed on
//! the stream that used it last, after a wait edge.
//!
//! - `unshard.rs`: a gather writes the flat buffer that parameters view. Gathers are prefetched up
//!   to the prefetch depth or element budget, but never in recompute. Backward gathers only units
//!   with a weight that a backward kernel reads, and of weights with codes by rows and by columns
//!   only the codes that it reads. Under HFSDP, a unit's shards are gathered over the
//!   outer axis once per step, before its first gather. The end of a step may gather the first
//!   units of the next step as soon as they are updated.
//! - `gradients.rs`: kernels of weight gradients write the flat gradient buffer.
//! - `reduction.rs`: the full gradient buffers of at most `reduce_in_flight` units are live,
//!   including the unit that writes its gradients. An outer axis reduces shards and holds no full
//!   buffer. With `optimizer_in_backward`, a group is updated after its reduction, and its gradient
//!   shard is freed together with its full gradient.
//! - `optimizer.rs`: groups are updated in the order of their reductions. The final callback of a
//!   backward pass only waits and does no hidden work. In a step's last backward, there is one wait
//!   per group, before the optimizer's launch for that group.

mod gradients;
mod optimizer;
mod reduction;
mod spec;
mod unshard;

pub(super) use spec::SPEC;

use crate::config::Reshard;
use crate::ir::{Access, COMPUTE, GroupId, ParamId, UnitId};
use crate::lower::emitter::Emitter;
use crate::lower::flat::Flat;
use crate::lower::inputs::LoweringInputs;
use crate::lower::optimizer::{ShardState, late_norm};
use crate::lower::streams::CommStreams;
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule};
use gradients::Gradients;
use optimizer::OffloadedState;
use reduction::Reductions;
use std::borrow::Cow;
use std::ops::Range;
use unshard::Unshard;

/// Position of a micro-batch in its step.
#[derive(Clone, Copy, Debug)]
struct MicroBatch {
    index: u16,
    first: bool,
    last: bool,
}

impl MicroBatch {
    /// Returns the position among the micro-batches that use a unit. A validation forward uses all
    /// units.
    fn of_unit(self, out: &Emitter<'_>, unit: UnitId) -> Self {
        if !out.inputs.skips_units() || out.b.phase() == Phase::Validation {
            return self;
        }
        let now = Some(self.index);
        Self {
            first: out.inputs.uses_of(unit).next() == now,
            last: out.inputs.uses_of(unit).next_back() == now,
            ..self
        }
    }

    /// Returns the position among the micro-batches that use a group's unit.
    fn of_group(self, out: &Emitter<'_>, g: GroupId) -> Self {
        self.of_unit(out, out.inputs.group(g).unit)
    }

    /// Returns the units of an order that the micro-batch uses.
    fn used<'o>(self, out: &Emitter<'_>, order: &'o [UnitId]) -> Cow<'o, [UnitId]> {
        if !out.inputs.skips_units() || out.b.phase() == Phase::Validation {
            return Cow::Borrowed(order);
        }
        let used = |u: &&UnitId| out.inputs.uses(self.index, **u);
        order.iter().filter(used).copied().collect()
    }
}

struct Native {
    flat: Flat,
    micro: MicroBatch,
    unshard: Unshard,
    gradients: Gradients,
    reductions: Reductions,
    offloaded: OffloadedState,
}

impl Native {
    fn new(out: &mut Emitter<'_>) -> Self {
        let multi = out.inputs.data_ranks() > 1;
        let streams = CommStreams::new(out, multi, -1, -1);
        let comms = out.communicators(out.inputs.scenario.fsdp.separate_communicators);
        let flat = Flat::new(out, comms, streams, false);
        Self {
            unshard: Unshard::new(out.inputs, &flat),
            gradients: Gradients::new(out.inputs.groups.len()),
            reductions: Reductions::new(out.inputs.scenario.fsdp.reduce_in_flight),
            offloaded: OffloadedState::default(),
            micro: MicroBatch {
                index: 0,
                first: true,
                last: true,
            },
            flat,
        }
    }

    /// Reduces the gradients of a unit, or adds them up for a later reduction.
    fn reduce(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro.of_unit(out, unit));
        let reductions = &mut self.reductions;
        for g in out.inputs.trained_groups_of(unit) {
            if !flat.grad_sharded(g) {
                self.gradients.accumulate(out, flat, g);
                reductions.reduce_full(out, flat, micro, g);
            } else if let Some(buffer) = self.gradients.take_full(out, flat, micro, reductions, g) {
                reductions.reduce_sharded(out, flat, micro, g, buffer);
            }
        }
    }

    /// Computes the scales and codes of the weights that the first step starts with. Later steps
    /// use those computed at the end of the previous step.
    fn cast_first_step(&mut self, out: &mut Emitter<'_>) {
        if !self.flat.reduces_scales() {
            return;
        }
        let from = out.b.next_instr();
        self.flat.refresh_float8(out, false, COMPUTE);
        out.b
            .join(Rule::Refresh, COMPUTE, self.flat.streams.copy_in);
        let to = out.b.next_instr();
        out.b.withhold_from_later(from..to);
    }

    /// Returns whether scales depend on the update of optimizer state `index`.
    fn determines_scales(&self, inputs: &LoweringInputs<'_>, index: usize) -> bool {
        let group = self.reductions.group(index);
        let float8 = group.is_some_and(|g| inputs.group(g).has_float8());
        float8 && self.flat.reduces_scales()
    }

    /// Returns the last optimizer state that scales depend on. They are updated in ascending order.
    fn last_for_scales(&self, inputs: &LoweringInputs<'_>) -> Option<usize> {
        let states = self.reductions.groups().count();
        (0..states)
            .rev()
            .find(|&i| self.determines_scales(inputs, i))
    }

    /// Computes the scales of 8-bit weights once the last of these, with optimizer state `index`,
    /// has been updated. The ranks wait for each other on the stream of reductions, while they
    /// update other weights.
    fn refresh_scales(&self, out: &mut Emitter<'_>, index: usize) {
        if self.last_for_scales(out.inputs) == Some(index) {
            let reduce = self.flat.streams.reduce;
            self.flat.refresh_float8(out, true, reduce);
        }
    }

    /// Makes the compute stream wait for the scales. Computes them if no 8-bit weight is trained.
    fn await_scales(&self, out: &mut Emitter<'_>) {
        match self.last_for_scales(out.inputs) {
            Some(_) => out.b.join(Rule::Refresh, self.flat.streams.reduce, COMPUTE),
            None => self.flat.refresh_float8(out, true, COMPUTE),
        }
    }

    /// Gathers a unit for the next step once its last group, with optimizer state `index`, has been
    /// updated. Units that are gathered in 8 bits wait for the end of the step if their scales
    /// depend on the weights of all groups.
    fn gather_for_next_step(&mut self, out: &mut Emitter<'_>, index: usize) {
        let Some(group) = self.reductions.group(index) else {
            return;
        };
        let unit = out.inputs.group(group).unit;
        let mut groups = out.inputs.groups_of(unit).into_iter();
        if self.flat.reduces_scales() && groups.any(|g| out.inputs.group(g).has_float8()) {
            return;
        }
        let mut later = self.reductions.groups().skip(index + 1);
        if later.all(|g| out.inputs.group(g).unit != unit)
            && self.unshard.prefetches_for_next_step(out.inputs, group)
        {
            self.unshard
                .gather_for_next_step(out, &self.flat, self.micro, unit);
        }
    }
}

impl Lifecycle for Native {
    fn init(&mut self, out: &mut Emitter<'_>) {
        self.flat.init(out);
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        let first = index == 0;
        self.micro = MicroBatch { index, first, last };
        if first {
            self.reductions.start_step();
            self.unshard.start_step();
        }
    }

    fn joint_backward(&mut self, index: u16, last: bool) {
        let first = index == 0;
        self.micro = MicroBatch { index, first, last };
    }

    fn before_inputs(&mut self, out: &mut Emitter<'_>) {
        self.unshard.issue_gather_waits(out, &self.flat);
    }

    fn forward_start(&mut self, out: &mut Emitter<'_>) {
        let first = self.micro.first && out.b.phase() != Phase::Validation;
        if first {
            self.cast_first_step(out);
        }
        self.unshard.start_forward(out, &self.flat);
        if first {
            self.unshard.gather_first_step(out, &self.flat, self.micro);
        }
    }

    fn pre_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.require_forward(out, flat, micro, unit);
        self.unshard.prefetch_forward(out, flat, micro, unit);
    }

    fn post_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let flat = &self.flat;
        if out.b.phase() == Phase::Validation && flat.weight_sharded() {
            self.unshard.reshard_after_validation(out, flat, unit);
        } else if out.inputs.unit(unit).reshards {
            if let Reshard::Group(n) = out.inputs.scenario.fsdp.reshard_after_forward {
                self.unshard.keep_slice(out, flat, unit, n);
            }
            self.unshard.reshard(out, flat, unit);
        }
    }

    fn forward_end(&mut self, _out: &mut Emitter<'_>) {}

    fn backward_start(&mut self, out: &mut Emitter<'_>) {
        self.unshard.start_backward(out, &self.flat, self.micro);
    }

    fn pre_recompute(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.require_backward(out, flat, micro, unit);
    }

    fn pre_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.require_backward(out, flat, micro, unit);
        self.unshard.prefetch_backward(out, flat, micro, unit);
    }

    fn post_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.end_backward(unit);
        self.unshard.reshard_after_backward(out, flat, micro, unit);
        self.reduce(out, unit);
    }

    fn between_backwards(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.reshard_after_backward(out, flat, micro, unit);
    }

    fn backward_end(&mut self, out: &mut Emitter<'_>) {
        let (flat, micro) = (&self.flat, self.micro);
        if !micro.last {
            self.reductions.drain(out, flat, Rule::FinalFence);
        }
        // Frozen units before the first trained one have no backward that reshards them.
        for unit in out.inputs.forward_order.clone() {
            self.unshard.reshard_after_backward(out, flat, micro, unit);
        }
        // The last reductions of a step overlap with the updates of the groups reduced before.
        if !micro.last {
            out.b.join(Rule::FinalFence, flat.streams.reduce, COMPUTE);
        }
    }

    fn weight(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        self.flat.weight(out.inputs, p)
    }

    fn scale(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        self.flat.reciprocal(out.inputs, p)
    }

    fn columns(&mut self, out: &mut Emitter<'_>, p: ParamId) -> [Location; 2] {
        self.flat.columns(out.inputs, p)
    }

    fn grad(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        let (g, _) = out.inputs.home[p.index()];
        let (flat, micro) = (&self.flat, self.micro.of_group(out, g));
        self.gradients
            .locate(out, flat, micro, &mut self.reductions, p)
    }

    fn add_gradient(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        elements: Range<u64>,
    ) -> Option<Access> {
        let (flat, micro) = (&self.flat, self.micro.of_group(out, g));
        self.gradients.add(out, flat, micro, g, elements)
    }

    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<ShardState> {
        self.reductions.optimizer_state(out, &self.flat)
    }

    fn update_order(&self, inputs: &LoweringInputs<'_>, states: usize) -> Vec<usize> {
        let float8 = |i: usize| self.determines_scales(inputs, i);
        optimizer::update_order(inputs, &self.unshard, &self.reductions, float8, states)
    }

    fn is_updated(&self, index: usize) -> bool {
        self.reductions.is_updated(index)
    }

    fn captures_optimizer(&self) -> bool {
        true
    }

    fn before_state(&mut self, out: &mut Emitter<'_>, index: usize, norm: bool) {
        let flat = &self.flat;
        self.reductions.await_reduction(out, flat, index);
        self.offloaded
            .before(out, flat, &self.reductions, index, norm);
    }

    fn after_state(&mut self, out: &mut Emitter<'_>, index: usize, norm: bool) {
        if !norm && !late_norm(out.inputs) && !self.is_updated(index) {
            self.reductions.free_gradient(out, &self.flat, index);
        }
        if !norm {
            self.refresh_scales(out, index);
            self.gather_for_next_step(out, index);
        }
        if let Some(g) = self.reductions.group(index) {
            optimizer::evict(out, &self.flat, g, norm);
        }
    }

    fn step_end(&mut self, out: &mut Emitter<'_>) {
        if !self.flat.offloads() {
            self.flat.refresh(out, COMPUTE);
        }
        self.await_scales(out);
        if late_norm(out.inputs) {
            self.reductions.free_gradients(out, &self.flat);
        }
        self.unshard.end_step(out, &self.flat, self.micro);
    }
}
