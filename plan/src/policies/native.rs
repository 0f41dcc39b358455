//! The policy `native`: the per-module lifecycle of the `fully_shard` rewrite (Megatron-LM #4435), with
//! the discipline of the clean one on its main branch: every buffer is freed on the stream that used
//! it last, behind a wait edge.
//!
//! - `unshard.rs`: a gather lands in the flat buffer that parameters view. Gathers run up to the
//!   prefetch depth or element budget ahead, never in recompute. Backward gathers only the units of
//!   which one of its kernels reads a weight. Under HFSDP a unit's shards are gathered over the outer
//!   axis once per step, before its first gather. The end of a step may gather the units that the
//!   next one begins with, as soon as they are updated.
//! - `gradients.rs`: kernels of weight gradients write the flat gradient buffer.
//! - `reduction.rs`: at most `reduce_in_flight` full gradient buffers are live, the one being written
//!   included; an outer axis reduces shards and holds none. With `optimizer_in_backward` a group is
//!   updated behind its reduction, and its shard of the gradient is freed with its full one.
//! - `optimizer.rs`: groups are updated in the order of their reductions. The final callback of a
//!   backward pass fences and does no hidden work; in a step's last backward there is one fence per
//!   group, before the optimizer's launch on it.

mod gradients;
mod optimizer;
mod reduction;
mod spec;
mod unshard;

pub(super) use spec::SPEC;

use crate::config::Reshard;
use crate::ir::{COMPUTE, ParamId, UnitId};
use crate::lower::context::Cx;
use crate::lower::flat::Flat;
use crate::lower::optimizer::{ShardState, late_norm};
use crate::lower::streams::CommStreams;
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule};
use gradients::Gradients;
use optimizer::OffloadedState;
use reduction::Reductions;
use unshard::Unshard;

/// Place of a micro-batch in its step.
#[derive(Clone, Copy, Debug)]
struct MicroBatch {
    first: bool,
    last: bool,
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
    fn new(cx: &mut Cx<'_>) -> Self {
        let multi = cx.world() > 1;
        let streams = CommStreams::new(cx, multi, -1, -1);
        let comms = cx.communicators(cx.scenario.fsdp.separate_communicators);
        let flat = Flat::new(cx, comms, streams, false);
        Self {
            unshard: Unshard::new(cx, &flat),
            gradients: Gradients::new(cx.groups.len()),
            reductions: Reductions::new(cx.scenario.fsdp.reduce_in_flight),
            offloaded: OffloadedState::default(),
            micro: MicroBatch {
                first: true,
                last: true,
            },
            flat,
        }
    }

    /// Reduces the gradients of a unit, or adds them up for a later reduction.
    fn reduce(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        let reductions = &mut self.reductions;
        for g in cx.trained_groups_of(unit) {
            if !flat.grad_sharded() {
                self.gradients.accumulate(cx, flat, g);
                reductions.reduce_full(cx, flat, micro, g);
            } else if let Some(buffer) = self.gradients.take_full(cx, flat, micro, reductions, g) {
                reductions.reduce_sharded(cx, flat, micro, g, buffer);
            }
        }
    }

    /// Gathers a unit for the next step once its last group, the optimizer's state `index`, has
    /// been updated.
    fn gather_for_next_step(&mut self, cx: &mut Cx<'_>, index: usize) {
        let Some(group) = self.reductions.group(index) else {
            return;
        };
        let unit = cx.group(group).unit;
        let mut later = self.reductions.groups().skip(index + 1);
        if later.all(|g| cx.group(g).unit != unit)
            && self.unshard.prefetches_for_next_step(cx, group)
        {
            self.unshard
                .gather_for_next_step(cx, &self.flat, self.micro, unit);
        }
    }
}

impl Lifecycle for Native {
    fn init(&mut self, cx: &mut Cx<'_>) {
        self.flat.init(cx);
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        let first = index == 0;
        self.micro = MicroBatch { first, last };
        self.reductions.start_micro_batch();
        if first {
            self.unshard.start_step();
        }
    }

    fn before_inputs(&mut self, cx: &mut Cx<'_>) {
        self.unshard.issue_gather_waits(cx, &self.flat);
    }

    fn forward_start(&mut self, cx: &mut Cx<'_>) {
        self.unshard.start_forward(cx, &self.flat);
        if self.micro.first && cx.b.phase() != Phase::Validation {
            self.unshard.gather_first_step(cx, &self.flat, self.micro);
        }
    }

    fn pre_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.require_forward(cx, flat, micro, unit);
        self.unshard.prefetch_forward(cx, flat, micro, unit);
    }

    fn post_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let flat = &self.flat;
        if cx.b.phase() == Phase::Validation && flat.weight_sharded() {
            self.unshard.reshard_after_validation(cx, flat, unit);
        } else if cx.unit(unit).reshards {
            if let Reshard::Group(n) = cx.scenario.fsdp.reshard_after_forward {
                self.unshard.keep_slice(cx, flat, unit, n);
            }
            self.unshard.reshard(cx, flat, unit);
        }
    }

    fn forward_end(&mut self, _cx: &mut Cx<'_>) {}

    fn backward_start(&mut self, cx: &mut Cx<'_>) {
        self.unshard.start_backward(cx, &self.flat, self.micro);
    }

    fn pre_recompute(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.require_backward(cx, flat, micro, unit);
    }

    fn pre_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.require_backward(cx, flat, micro, unit);
        self.unshard.prefetch_backward(cx, flat, micro, unit);
    }

    fn post_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let (flat, micro) = (&self.flat, self.micro);
        self.unshard.end_backward(unit);
        self.unshard.reshard_after_backward(cx, flat, micro, unit);
        self.reduce(cx, unit);
    }

    fn backward_end(&mut self, cx: &mut Cx<'_>) {
        let (flat, micro) = (&self.flat, self.micro);
        if !micro.last {
            self.reductions.drain(cx, flat, 0, Rule::FinalFence);
        }
        // Frozen units before the first trained one have no backward to reshard in.
        for unit in cx.forward_order.clone() {
            self.unshard.reshard_after_backward(cx, flat, micro, unit);
        }
        // The last reductions of a step overlap with the updates of the groups reduced before.
        if !micro.last {
            cx.b.join(Rule::FinalFence, flat.streams.reduce, COMPUTE);
        }
    }

    fn weight(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        self.flat.weight(cx, p)
    }

    fn grad(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        let (flat, micro) = (&self.flat, self.micro);
        self.gradients
            .locate(cx, flat, micro, &mut self.reductions, p)
    }

    fn optimizer_state(&mut self, cx: &mut Cx<'_>) -> Vec<ShardState> {
        self.reductions.optimizer_state(cx, &self.flat)
    }

    fn update_order(&self, cx: &Cx<'_>, states: usize) -> Vec<usize> {
        optimizer::update_order(cx, &self.unshard, &self.reductions, states)
    }

    fn is_updated(&self, index: usize) -> bool {
        self.reductions.is_updated(index)
    }

    fn captures_optimizer(&self) -> bool {
        true
    }

    fn before_state(&mut self, cx: &mut Cx<'_>, index: usize, norm: bool) {
        let flat = &self.flat;
        self.reductions.await_reduction(cx, flat, index);
        self.offloaded
            .before(cx, flat, &self.reductions, index, norm);
    }

    fn after_state(&mut self, cx: &mut Cx<'_>, index: usize, norm: bool) {
        if !norm && !late_norm(cx) && !self.is_updated(index) {
            self.reductions.free_gradient(cx, &self.flat, index);
        }
        if !norm {
            self.gather_for_next_step(cx, index);
        }
        if let Some(g) = self.reductions.group(index) {
            optimizer::evict(cx, &self.flat, g, norm);
        }
    }

    fn step_end(&mut self, cx: &mut Cx<'_>) {
        if !self.flat.offloads() {
            self.flat.refresh(cx, COMPUTE);
        }
        if late_norm(cx) {
            self.reductions.free_gradients(cx, &self.flat);
        }
        self.unshard.end_step(cx, &self.flat, self.micro);
    }
}
