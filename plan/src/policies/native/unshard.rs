//! Unsharded units: gathers, prefetch, reshard.

use super::MicroBatch;
use crate::config::Prefetch;
use crate::ir::{BufferId, COMPUTE, EventId, GroupId, Role, UnitId};
use crate::lower::emitter::Emitter;
use crate::lower::flat::{Flat, columns};
use crate::lower::inputs::{LoweringInputs, prefetch_targets};
use crate::program::{Phase, Rule};

// Note [Codes by columns]
//
// If the transpose of a weight has other blocks of scales than the weight (recipe mxfp8), forward
// reads codes by rows and backward reads codes by columns. Each pass gathers what it reads: with
// full recompute, backward gathers both. A unit that is not resharded after forward has no gather
// in backward, so forward gathers both. `full` says whether a unit is gathered, `held` which of
// both, for groups that have both.

// Note [Unshard gate]
//
// A gather writes memory that computation may still read. The caching allocator hands a freed block
// to the next request of the block's stream as soon as the host has freed it, long before the
// kernels that read it have run. So code that frees a buffer of the gather stream first makes that
// stream wait for the last reader:
//
// - native waits in `reshard`, which frees on the copy-in stream (the gather stream unless
//   `fsdp.copy_in_stream` is set) after a join with computation. Each gather waits for it. It
//   also waits at the start of a forward, for the weights that the optimizer writes
//   (`wait_for_weights`);
// - fsdp2 keeps one gather buffer until the next copy-out, and makes both gather streams wait for
//   that copy-out (`drop_held`);
// - megatron makes each gather wait for all work enqueued on the compute stream.
//
// The wait also orders gathers: without prefetch, a gather does not start before its unit's turn.
// `check` proves the rule for any program, from addresses and vector clocks (`check/step.rs`).

/// The buffers of a group that a pass gathers, or that are gathered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Gathered {
    /// The weights, or their codes by rows.
    weights: bool,
    /// Codes by columns.
    columns: bool,
}

impl Gathered {
    const WEIGHTS: Self = Self {
        weights: true,
        columns: false,
    };

    /// Returns the parts that another one lacks.
    fn without(self, other: Self) -> Self {
        Self {
            weights: self.weights && !other.weights,
            columns: self.columns && !other.columns,
        }
    }

    fn any(self) -> bool {
        self.weights || self.columns
    }
}

/// Pass that reads a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

/// State of every unit's full weights.
pub(super) struct Unshard {
    /// Event of each unit's gather, while the unit is unsharded.
    gathered: Vec<Option<EventId>>,
    /// Whether the unit is full (or needs no gather in this pass).
    full: Vec<bool>,
    /// What is gathered of each group that has codes by columns; see Note [Codes by columns].
    held: Vec<Gathered>,
    /// Whether a group's shard has been refreshed since the optimizer step, by the gather over the
    /// outer axis or the cast to 8 bits.
    shard_fresh: Vec<bool>,
    /// The same for its codes by columns.
    columns_fresh: Vec<bool>,
    /// Whether each unit's backward has finished in this pass.
    backward_done: Vec<bool>,
    /// Slices that integer reshard keeps, by group.
    resharded_slices: Vec<Option<BufferId>>,
    /// Whether a kernel of backward (including recompute) reads a weight of the unit, by
    /// micro-batch. Has one entry for all micro-batches if none of them skips units.
    read_in_backward: Vec<Vec<bool>>,
    /// What kernels of backward read of each group, by micro-batch, in the same way.
    parts_in_backward: Vec<Vec<Gathered>>,
    /// Units that the end of a step gathers for the next one, in forward order.
    next_step_prefetch: Vec<UnitId>,
    /// Whether the next forward pass's gathers already wait for the buffers that they read.
    gather_waits_issued: bool,
}

impl Unshard {
    pub(super) fn new(inputs: &LoweringInputs<'_>, flat: &Flat) -> Self {
        let (units, groups) = (inputs.units.len(), inputs.groups.len());
        let count = if flat.weight_sharded() {
            inputs.scenario.fsdp.prefetch_next_step as usize
        } else {
            0
        };
        let with_weights = inputs
            .forward_order
            .iter()
            .filter(|u| !inputs.unit(**u).groups.is_empty());
        Self {
            gathered: vec![None; units],
            full: vec![false; units],
            held: vec![Gathered::default(); groups],
            shard_fresh: vec![false; groups],
            columns_fresh: vec![false; groups],
            backward_done: vec![false; units],
            resharded_slices: vec![None; groups],
            read_in_backward: micro_batches(inputs)
                .map(|m| read_in_backward(inputs, m))
                .collect(),
            parts_in_backward: micro_batches(inputs)
                .map(|m| parts_in_backward(inputs, m))
                .collect(),
            next_step_prefetch: with_weights.take(count).copied().collect(),
            gather_waits_issued: false,
        }
    }

    /// Starts a step. The shards are stale because the optimizer has updated the main weights.
    pub(super) fn start_step(&mut self) {
        self.shard_fresh.fill(false);
        self.columns_fresh.fill(false);
    }

    /// Starts a forward pass.
    pub(super) fn start_forward(&mut self, out: &mut Emitter<'_>, flat: &Flat) {
        if !std::mem::take(&mut self.gather_waits_issued) {
            wait_for_weights(out, flat);
        }
        if !flat.weight_sharded() {
            self.full.fill(false);
            self.gathered.fill(None);
        }
    }

    /// Makes the gathers of the next forward pass wait for the buffers that they read, before the
    /// pass starts.
    pub(super) fn issue_gather_waits(&mut self, out: &mut Emitter<'_>, flat: &Flat) {
        wait_for_weights(out, flat);
        self.gather_waits_issued = true;
    }

    /// Starts a backward pass and gathers its first unit, because a root without parameters has no
    /// hook that would prefetch it.
    pub(super) fn start_backward(&mut self, out: &mut Emitter<'_>, flat: &Flat, micro: MicroBatch) {
        self.backward_done.fill(false);
        let order = micro.used(out, &out.inputs.backward_order);
        let first = order.iter().copied().find(|u| self.reads(micro, *u));
        if let Some(first) = first.filter(|u| !out.inputs.unit(*u).spec.is_root)
            && out.inputs.scenario.fsdp.prefetch_backward != Prefetch::Depth(0)
        {
            let backward = (first, Pass::Backward);
            self.unshard(out, flat, micro, backward, Rule::Prefetch);
        }
    }

    /// Returns whether backward of a micro-batch reads a weight of a unit.
    fn reads(&self, micro: MicroBatch, unit: UnitId) -> bool {
        let passes = &self.read_in_backward;
        let read = passes.get(usize::from(micro.index));
        read.unwrap_or(&passes[0])[unit.index()]
    }

    /// Returns the buffers that a pass reads of a group with codes by columns; see Note [Codes by
    /// columns].
    fn needs(&self, out: &Emitter<'_>, micro: MicroBatch, g: GroupId, pass: Pass) -> Gathered {
        let passes = &self.parts_in_backward;
        let read = passes.get(usize::from(micro.index));
        let backward = read.unwrap_or(&passes[0])[g.index()];
        let stays = !out.inputs.unit(out.inputs.group(g).unit).reshards;
        match pass {
            Pass::Backward => backward,
            Pass::Forward => Gathered {
                weights: true,
                columns: stays && backward.columns && out.b.phase() != Phase::Validation,
            },
        }
    }

    /// Returns the buffers that a pass reads of a group and that are not gathered. `full` says
    /// whether its unit is gathered.
    fn missing(
        &self,
        out: &Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        (g, pass): (GroupId, Pass),
        full: bool,
    ) -> Gathered {
        if flat.has_columns(g) {
            let needed = self.needs(out, micro, g, pass);
            return needed.without(self.held[g.index()]);
        }
        match full {
            true => Gathered::default(),
            false => Gathered::WEIGHTS,
        }
    }

    /// Returns whether a pass has to gather a unit, or some of it.
    fn lacks(
        &self,
        out: &Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        (unit, pass): (UnitId, Pass),
    ) -> bool {
        let full = self.full[unit.index()];
        let mut groups = out.inputs.groups_of(unit).into_iter();
        let missing = |g| self.missing(out, flat, micro, (g, pass), full).any();
        !full || groups.any(missing)
    }

    /// Gathers the buffers that a pass reads of a unit, unless it is already full.
    fn unshard(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        (unit, pass): (UnitId, Pass),
        rule: Rule,
    ) {
        if !self.lacks(out, flat, micro, (unit, pass)) {
            return;
        }
        let full = std::mem::replace(&mut self.full[unit.index()], true);
        if !flat.gathers(out.inputs, micro.of_unit(out, unit).first) {
            return;
        }
        out.within_unit(unit, |out| {
            for g in out.inputs.groups_of(unit) {
                let missing = self.missing(out, flat, micro, (g, pass), full);
                self.gather(out, flat, g, missing, rule);
            }
            self.gathered[unit.index()] = Some(out.b.record(rule, flat.streams.gather));
        });
    }

    /// Gathers a group, or some of it.
    fn gather(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        g: GroupId,
        missing: Gathered,
        rule: Rule,
    ) {
        // Frozen groups are never updated.
        let trained = out.inputs.group(g).requires_grad;
        if missing.weights {
            for full in flat.gathered(g) {
                out.b.alloc(rule, full);
            }
            let slice = self.resharded_slices[g.index()].map(|id| out.b.whole(id));
            let gather = flat.streams.gather;
            if let (None, Some(shard)) = (slice, flat.state(g).weight) {
                flat.fetch_to_device(out, shard, true, gather);
            }
            let stale = trained && !std::mem::replace(&mut self.shard_fresh[g.index()], true);
            flat.gather(out, rule, g, stale, slice);
            if let (None, Some(shard)) = (slice, flat.state(g).weight) {
                flat.evict_to_host(out, shard, false, gather);
            }
        }
        if missing.columns {
            for full in flat.gathered_columns(g) {
                out.b.alloc(rule, full);
            }
            let stale = trained && !std::mem::replace(&mut self.columns_fresh[g.index()], true);
            flat.gather_columns(out, rule, g, stale);
        }
        let held = &mut self.held[g.index()];
        held.weights |= missing.weights;
        held.columns |= missing.columns;
    }

    /// Gathers a unit that is needed now, and makes computation wait for it.
    fn require(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        (unit, pass): (UnitId, Pass),
    ) {
        let fsdp = &out.inputs.scenario.fsdp;
        let direction = match pass {
            Pass::Forward => fsdp.prefetch_forward,
            Pass::Backward => fsdp.prefetch_backward,
        };
        if direction == Prefetch::Depth(0) && self.lacks(out, flat, micro, (unit, pass)) {
            // Without prefetch, a gather runs when its unit's turn has come, not while the previous
            // unit computes.
            out.b.join(Rule::GatherGate, COMPUTE, flat.streams.copy_in);
        }
        self.unshard(out, flat, micro, (unit, pass), Rule::Unshard);
        if let Some(event) = self.gathered[unit.index()]
            && flat.streams.gather != COMPUTE
        {
            out.b.wait(Rule::GatherDone, event, COMPUTE);
        }
    }

    /// Makes a unit full for its forward.
    pub(super) fn require_forward(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        unit: UnitId,
    ) {
        self.require(out, flat, micro, (unit, Pass::Forward));
    }

    /// Makes a unit full for its backward if backward reads one of its weights. The gradient of an
    /// embedding, for example, needs none.
    pub(super) fn require_backward(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        unit: UnitId,
    ) {
        if self.reads(micro, unit) {
            self.require(out, flat, micro, (unit, Pass::Backward));
        }
    }

    /// Gathers the units after `unit` in forward.
    pub(super) fn prefetch_forward(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        unit: UnitId,
    ) {
        let order = out.uses.rest_of(&out.inputs.forward_uses, unit);
        let order = micro.used(out, order);
        for next in prefetch_targets(out.inputs, &order, (micro.index, false), 1) {
            self.unshard(out, flat, micro, (next, Pass::Forward), Rule::Prefetch);
        }
    }

    /// Gathers the units after `unit` in backward whose weights backward reads.
    pub(super) fn prefetch_backward(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        unit: UnitId,
    ) {
        let order = out.uses.rest_of(&out.inputs.backward_uses, unit);
        let later = micro.used(out, order.get(1..).unwrap_or_default());
        let read = later.iter().copied().filter(|u| self.reads(micro, *u));
        let order: Vec<UnitId> = std::iter::once(unit).chain(read).collect();
        for next in prefetch_targets(out.inputs, &order, (micro.index, true), 1) {
            if !self.backward_done[next.index()] {
                self.unshard(out, flat, micro, (next, Pass::Backward), Rule::Prefetch);
            }
        }
    }

    /// Reshards a unit after a validation forward, which has no backward. Units that the next step
    /// starts with stay full.
    pub(super) fn reshard_after_validation(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        unit: UnitId,
    ) {
        if !self.next_step_prefetch.contains(&unit) {
            self.reshard(out, flat, unit);
        }
    }

    /// Frees a unit's full weights on the copy-in stream, after computation has finished with them;
    /// see Note [Unshard gate].
    pub(super) fn reshard(&mut self, out: &mut Emitter<'_>, flat: &Flat, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        self.gathered[unit.index()] = None;
        if !flat.weight_sharded() {
            return;
        }
        out.b.join(Rule::Reshard, COMPUTE, flat.streams.copy_in);
        for g in out.inputs.groups_of(unit) {
            let held = std::mem::take(&mut self.held[g.index()]);
            if held.weights {
                for full in flat.gathered(g) {
                    out.b.free(Rule::Reshard, full);
                }
            }
            if held.columns {
                for full in flat.gathered_columns(g) {
                    out.b.free(Rule::Reshard, full);
                }
            }
        }
    }

    /// Records the end of a unit's backward.
    pub(super) fn end_backward(&mut self, unit: UnitId) {
        self.backward_done[unit.index()] = true;
    }

    /// Frees the buffers that a unit holds in addition to its shards, including the slice of an
    /// integer reshard. Keeps full weights if the next micro-batch reuses them.
    pub(super) fn reshard_after_backward(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        unit: UnitId,
    ) {
        if flat.weight_sharded() && (micro.last || out.inputs.scenario.fsdp.reshard_after_backward)
        {
            self.reshard(out, flat, unit);
        }
        for g in out.inputs.groups_of(unit) {
            if let Some(slice) = self.resharded_slices[g.index()].take() {
                out.b.free(Rule::ReshardGroup, slice);
            }
        }
    }

    /// Copies this rank's slice of the full weights, for a gather within a group of `ranks`
    /// (integer reshard).
    pub(super) fn keep_slice(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        unit: UnitId,
        ranks: u32,
    ) {
        for g in out.inputs.groups_of(unit) {
            let Some(full) = flat.state(g).full else {
                continue;
            };
            // With a joint backward, later forwards gather the slice that the first forward has
            // kept.
            if self.resharded_slices[g.index()].is_some() {
                continue;
            }
            let bytes = out.b.whole(full).bytes / u64::from(ranks);
            let dtype = out.inputs.gathered_type(g);
            let slice = out.transient_on(Role::GatherInput, bytes, dtype, COMPUTE, g);
            out.keep_slice(full, slice);
            self.resharded_slices[g.index()] = Some(slice);
        }
        // The backward gather reads the slice on another stream.
        out.b
            .join(Rule::ReshardGroup, COMPUTE, flat.streams.copy_in);
    }

    /// Returns whether the end of a step gathers a group's unit for the next one.
    pub(super) fn prefetches_for_next_step(&self, inputs: &LoweringInputs<'_>, g: GroupId) -> bool {
        self.next_step_prefetch.contains(&inputs.group(g).unit)
    }

    /// Gathers, in the first step only, the units that later steps prefetch at the end of the
    /// previous step.
    pub(super) fn gather_first_step(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
    ) {
        if self.next_step_prefetch.is_empty() {
            return;
        }
        let from = out.b.next_instr();
        for unit in self.next_step_prefetch.clone() {
            self.unshard(out, flat, micro, (unit, Pass::Forward), Rule::Prefetch);
            self.gathered[unit.index()] = None;
        }
        out.b.join(Rule::Prefetch, flat.streams.gather, COMPUTE);
        let to = out.b.next_instr();
        out.b.withhold_from_later(from..to);
    }

    /// Gathers a unit at the end of a step, unless it is full already.
    pub(super) fn gather_for_next_step(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        unit: UnitId,
    ) {
        if self.full[unit.index()] {
            return;
        }
        out.b.join(Rule::Prefetch, COMPUTE, flat.streams.copy_in);
        // The gather over an outer axis reads the shards that its ranks have updated.
        for g in out.inputs.groups_of(unit) {
            self.shard_fresh[g.index()] = false;
            self.columns_fresh[g.index()] = false;
        }
        self.unshard(out, flat, micro, (unit, Pass::Forward), Rule::Prefetch);
        self.gathered[unit.index()] = None;
    }

    /// Gathers the other units that the next step starts with: frozen units, which are never
    /// updated.
    pub(super) fn end_step(&mut self, out: &mut Emitter<'_>, flat: &Flat, micro: MicroBatch) {
        for unit in self.next_step_prefetch.clone() {
            self.gather_for_next_step(out, flat, micro, unit);
        }
        if !self.next_step_prefetch.is_empty() {
            out.b.join(Rule::StepEnd, flat.streams.gather, COMPUTE);
        }
    }
}

/// Makes gathers wait for the weights that the optimizer (or the previous micro-batch) wrote; see
/// Note [Unshard gate].
fn wait_for_weights(out: &mut Emitter<'_>, flat: &Flat) {
    if flat.streams.gather != COMPUTE {
        out.b.join(Rule::StepStart, COMPUTE, flat.streams.copy_in);
    }
}

/// Returns the micro-batches whose passes differ, or the first one if all have the same passes.
fn micro_batches(inputs: &LoweringInputs<'_>) -> std::ops::Range<usize> {
    0..inputs.tape.variant_of.len().max(1)
}

/// Returns the units whose weights a kernel of a micro-batch's backward reads.
fn read_in_backward(inputs: &LoweringInputs<'_>, micro_batch: usize) -> Vec<bool> {
    let mut read = vec![false; inputs.units.len()];
    columns::each_read_in_backward(inputs, micro_batch, |g, _| {
        read[inputs.group(g).unit.index()] = true;
    });
    read
}

/// Returns what kernels of a micro-batch's backward read of each group.
fn parts_in_backward(inputs: &LoweringInputs<'_>, micro_batch: usize) -> Vec<Gathered> {
    let mut read = vec![Gathered::default(); inputs.groups.len()];
    columns::each_read_in_backward(inputs, micro_batch, |g, by_columns| match by_columns {
        true => read[g.index()].columns = true,
        false => read[g.index()].weights = true,
    });
    read
}
