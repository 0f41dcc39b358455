//! The `megatron` policy: megatron-fsdp 0.6.1, the production engine (`megatron_fsdp.py`,
//! `param_and_grad_buffer.py`).
//!
//! - Each unit has one flat bucket, and the root's own parameters have one, which stays gathered
//!   after its first gather.
//! - Gathers are prefetched in bucket order until half of the suggested communication size is in
//!   flight.
//! - Each of autograd's gradients is copied, as soon as it is complete, into the full bucket of its
//!   group, which is allocated for the first gradient. After the last gradient, the bucket is
//!   reduced in place into the rank's slice, and the slice is added to the persistent shard. A
//!   queue with a limit in elements decides when buckets are released.

mod spec;

pub(super) use spec::SPEC;

use crate::config::{AllocatorKind, Prefetch, Strategy};
use crate::ir::{
    Access, AxisSet, BufferId, COMPUTE, DType, EventId, GroupId, HostWorkKind, ParamId, Role,
    UnitId,
};
use crate::lower::autograd::AutogradGrads;
use crate::lower::emitter::Emitter;
use crate::lower::flat::{Flat, GradCasts, ReduceTo, Reduction, columns, fill_padding};
use crate::lower::inputs::LoweringInputs;
use crate::lower::optimizer::ShardState;
use crate::lower::reduction;
use crate::lower::streams::CommStreams;
use crate::lower::unmanaged::{Unmanaged, router_biases};
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule};
use smallvec::SmallVec;
use std::collections::VecDeque;

/// A reduction in flight.
#[derive(Clone, Debug)]
struct Queued {
    unit: UnitId,
    done: EventId,
    /// Buffers that are freed afterwards: the bucket, if gradients are sharded, and copies in the
    /// communication dtype.
    buffers: SmallVec<[BufferId; 3]>,
    elements: u64,
}

pub(crate) struct Megatron {
    flat: Flat,
    /// Units in bucket order, which is the registration order of their first parameter.
    buckets: Vec<UnitId>,
    gathered: Vec<Option<EventId>>,
    full: Vec<bool>,
    /// By group: whether recompute reads its weights, not only codes by columns.
    recomputed: Vec<bool>,
    /// By group: whether its bucket and its bucket of codes by columns are gathered.
    held: Vec<[bool; 2]>,
    /// Root buckets keep their storage between steps once it is allocated.
    preserved: Vec<[bool; 2]>,
    grads: AutogradGrads,
    /// Counts of choices that move the biases of routers, which are buffers.
    choices: Unmanaged,
    /// Full buckets that collect gradients, by group.
    filling: Vec<Option<BufferId>>,
    /// Number of gradients of this backward that have been handled, by group.
    ready: Vec<usize>,
    queue: VecDeque<Queued>,
    /// Gradients cast to the main dtype for the optimizer.
    casts: GradCasts,
    done: Vec<bool>,
    /// Units that backward reaches.
    reached: Vec<bool>,
    /// Whether one backward covers all micro-batches; see Note [Joint backward].
    joint: bool,
    first: bool,
    /// Groups whose G has gradients of this step, if it is not sharded.
    written: Vec<bool>,
    /// Whether backward has not gathered any unit yet.
    recycles: bool,
    micro_batch: u16,
    /// Whether no forward of this step has started.
    step_begins: bool,
    last: bool,
    /// Maximum number of elements in the reduce queue, which is also the target of prefetch.
    capacity: u64,
    double_buffer: bool,
}

impl Megatron {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let fsdp = &out.inputs.scenario.fsdp;
        let separate = fsdp.separate_communicators;
        let double_buffer = fsdp.allocator == AllocatorKind::DoubleBuffer;
        let multi = out.inputs.data_ranks() > 1;
        let streams = CommStreams::new(out, multi, 0, 0);
        let comms = out.communicators(separate);
        if multi {
            // The device mesh broadcasts initial parameters over a separate process group, which
            // stays alive: 384 MiB of device memory in addition to the sharding group's, measured
            // on 4 H200.
            out.communicator("mesh", AxisSet::DATA, false);
        }
        let over_data = router_biases::own_communicator(out);
        let flat = Flat::new(out, comms, streams, true);
        let mut buckets = out.inputs.forward_order.clone();
        buckets.sort_by_key(|u| {
            let groups = out.inputs.groups_of(*u);
            // The root's own parameters form the last bucket, because units are matched before the
            // rest.
            (
                out.inputs.unit(*u).spec.is_root,
                groups
                    .first()
                    .and_then(|g| out.inputs.group(*g).params.first().copied()),
            )
        });
        let capacity = suggested_size(out.inputs);
        let units = out.inputs.units.len();
        Self {
            flat,
            buckets,
            gathered: vec![None; units],
            full: vec![false; units],
            recomputed: recomputed(out.inputs),
            held: vec![[false; 2]; out.inputs.groups.len()],
            preserved: vec![[false; 2]; out.inputs.groups.len()],
            grads: AutogradGrads::new(out.inputs.tape.params.len(), out.inputs.types.compute),
            choices: Unmanaged::new(out.inputs, over_data),
            filling: vec![None; out.inputs.groups.len()],
            ready: vec![0; out.inputs.groups.len()],
            queue: VecDeque::new(),
            casts: GradCasts::new(out.inputs.groups.len()),
            done: vec![false; units],
            reached: (0..units as u16)
                .map(|u| out.inputs.backward_order.contains(&UnitId(u)))
                .collect(),
            joint: out.inputs.scenario.train.joint_backward,
            first: true,
            written: vec![false; out.inputs.groups.len()],
            recycles: false,
            micro_batch: 0,
            step_begins: true,
            last: true,
            capacity,
            double_buffer,
        }
    }

    /// Returns whether a pass has to gather a group. Groups with codes by columns (recipe mxfp8)
    /// have two buckets: forward and recompute read one, backward the other
    /// (`AllGatherPipeline.get_bucket_key`).
    fn lacks(&self, g: GroupId, (backward, recompute): (bool, bool), full: bool) -> bool {
        let unread = recompute && !self.recomputed[g.index()];
        match self.flat.has_columns(g) {
            true => !(self.held[g.index()][usize::from(backward)] || unread),
            false => !full,
        }
    }

    fn unshard(&mut self, out: &mut Emitter<'_>, unit: UnitId, backward: bool, rule: Rule) {
        let full = std::mem::replace(&mut self.full[unit.index()], true);
        let pass = (backward, out.b.phase() == Phase::Recompute);
        let lacking: Vec<GroupId> = (out.inputs.groups_of(unit).into_iter())
            .filter(|g| self.lacks(*g, pass, full))
            .collect();
        // Replicated weights stay full until the next step, so they are gathered only once per
        // step.
        let first = self.first || out.inputs.skips_units();
        if full && lacking.is_empty() || !self.flat.gathers(out.inputs, first) {
            return;
        }
        if std::mem::take(&mut self.recycles) {
            for unused in out.inputs.unused(self.micro_batch) {
                self.recycle(out, unused);
            }
        }
        out.within_unit(unit, |out| {
            out.b.hook(rule, out.inputs.unit(unit).params);
            for g in &lacking {
                self.allocate(out, *g, backward, rule);
            }
            // Each gather waits for the work already enqueued on the compute stream; see
            // Note [Unshard gate].
            out.b
                .join(Rule::GatherGate, COMPUTE, self.flat.streams.gather);
            // Codes are cast after the optimizer step.
            let stale = self.first && !self.flat.reduces_scales();
            for g in lacking {
                match backward && self.flat.has_columns(g) {
                    true => self.flat.gather_columns(out, rule, g, false),
                    false => self.flat.gather(out, rule, g, stale, None),
                }
            }
            self.gathered[unit.index()] = Some(out.b.record(rule, self.flat.streams.gather));
        });
    }

    /// Allocates the buffers that a gather of a group writes. Resident buckets keep their storage.
    fn allocate(&mut self, out: &mut Emitter<'_>, g: GroupId, backward: bool, rule: Rule) {
        let columns = usize::from(backward && self.flat.has_columns(g));
        self.held[g.index()][columns] = true;
        let resident = is_resident(out.inputs, out.inputs.group(g).unit);
        let kept = std::mem::replace(&mut self.preserved[g.index()][columns], resident);
        for full in self.buffers(g, columns == 1) {
            if !resident {
                out.b.alloc(rule, full);
            } else if !kept {
                out.b.first_only(|b| b.alloc(rule, full));
            }
        }
    }

    /// Returns the buffers of a bucket.
    fn buffers(&self, g: GroupId, columns: bool) -> Vec<BufferId> {
        match columns {
            true => self.flat.gathered_columns(g).collect(),
            false => self.flat.gathered(g).collect(),
        }
    }

    fn require(&mut self, out: &mut Emitter<'_>, unit: UnitId, backward: bool) {
        self.unshard(out, unit, backward, Rule::Unshard);
        if let Some(event) = self.gathered[unit.index()]
            && self.flat.streams.gather != COMPUTE
        {
            out.b.wait(Rule::GatherDone, event, COMPUTE);
        }
    }

    /// `AllGatherPipeline`: walks the buckets in order from `unit` until the prefetched elements
    /// reach the budget.
    fn prefetch(&mut self, out: &mut Emitter<'_>, unit: UnitId, backward: bool) {
        let rule = if backward {
            out.inputs.scenario.fsdp.prefetch_backward
        } else {
            out.inputs.scenario.fsdp.prefetch_forward
        };
        let Some(at) = self.buckets.iter().position(|u| *u == unit) else {
            return;
        };
        let order: Vec<UnitId> = if backward {
            self.buckets[..at].iter().rev().copied().collect()
        } else {
            self.buckets[at + 1..].to_vec()
        };
        let (mut elements, mut count) = (0, 0);
        for next in order {
            let go = match rule {
                Prefetch::Implicit => elements < self.capacity / 2,
                Prefetch::Elements(n) => elements < n,
                Prefetch::Depth(d) => count < d,
            };
            // With the double buffer, there are never three units in flight, and parameters outside
            // units are not prefetched.
            if !go
                || (self.double_buffer
                    && (self.live_units(out.inputs) >= 2 || is_resident(out.inputs, next)))
            {
                break;
            }
            elements += out.inputs.unit(next).numel;
            count += 1;
            // A unit that backward does not reach (frozen before the first trained one, or skipped)
            // would never be released.
            let lost = !self.reached[next.index()] || !out.inputs.uses(self.micro_batch, next);
            let useless = backward && (self.done[next.index()] || lost);
            if !useless {
                self.unshard(out, next, backward, Rule::Prefetch);
            }
        }
    }

    fn live_units(&self, inputs: &LoweringInputs<'_>) -> usize {
        (0..self.full.len())
            .filter(|u| self.full[*u] && !is_resident(inputs, UnitId(*u as u16)))
            .count()
    }

    fn release(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if is_resident(out.inputs, unit) || !self.flat.weight_sharded() {
            return;
        }
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        self.gathered[unit.index()] = None;
        for g in out.inputs.groups_of(unit) {
            for (columns, held) in std::mem::take(&mut self.held[g.index()])
                .into_iter()
                .enumerate()
            {
                for full in self.buffers(g, columns == 1).into_iter().filter(|_| held) {
                    out.b.free(Rule::Reshard, full);
                }
            }
        }
    }

    /// Releases a unit that has not been used since its gather (`wait_bucket_ready`).
    fn recycle(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if let Some(event) = self.gathered[unit.index()].filter(|_| self.full[unit.index()])
            && self.flat.streams.gather != COMPUTE
        {
            out.b.wait(Rule::GatherDone, event, COMPUTE);
        }
        self.release(out, unit);
    }

    fn pop(&mut self, out: &mut Emitter<'_>, rule: Rule) {
        if let Some(q) = self.queue.pop_front() {
            if self.flat.streams.reduce != COMPUTE {
                out.b.wait(rule, q.done, COMPUTE);
            }
            for buffer in q.buffers {
                out.b.free(Rule::ReduceRelease, buffer);
            }
        }
    }

    /// Pops reductions that exceed the capacity of the queue (`wait_for_previous_grad_reduce`). See
    /// Note [Reductions in flight].
    fn gate(&mut self, out: &mut Emitter<'_>) {
        while self.queue.iter().map(|q| q.elements).sum::<u64>() > self.capacity {
            self.pop(out, Rule::ReduceGate);
        }
    }

    /// Limits the number of units in reduction to two with the double buffer. The unit whose
    /// gradients are being collected counts if it is double-buffered. See Note [Double buffer]. (In
    /// the source, `_enforce_double_buffer_limit` runs before a bucket is taken. It waits on the
    /// reduce stream, so nothing orders the copies into the bucket after its last reduction. Here,
    /// computation waits.)
    fn limit_double_buffer(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        if !self.double_buffer {
            return;
        }
        let unit = out.inputs.group(g).unit;
        let mut units: SmallVec<[UnitId; 4]> = SmallVec::new();
        if !is_resident(out.inputs, unit) {
            units.push(unit);
        }
        let newest = self.queue.iter().rev();
        let keep = newest.take_while(|q| {
            if !units.contains(&q.unit) {
                units.push(q.unit);
            }
            units.len() <= 2
        });
        let keep = keep.count();
        while self.queue.len() > keep {
            self.pop(out, Rule::ReduceGate);
        }
    }

    /// Enqueues a reduction. The source keeps the bucket until the reduction over the outer axis
    /// has finished, too, although that one reads only main gradients: it records one event after
    /// both (`_bucket_group_gradient_reduce`).
    fn enqueue(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        r: Reduction,
        bucket: Option<BufferId>,
    ) {
        self.queue.push_back(Queued {
            unit: out.inputs.group(g).unit,
            done: r.complete,
            buffers: bucket
                .into_iter()
                .chain(r.held.into_iter().flatten())
                .collect(),
            elements: self.flat.state(g).numel,
        });
        if self.flat.streams.reduce == COMPUTE && self.flat.streams.outer == COMPUTE {
            self.pop(out, Rule::ReduceGate);
        }
    }

    /// Returns the range that collects a group's gradients. This is its bucket, allocated for the
    /// first gradient of a backward (`get_main_grad`), or the full gradient buffer, to which later
    /// micro-batches add.
    fn bucket(&mut self, out: &mut Emitter<'_>, g: GroupId) -> (Access, DType) {
        if !self.flat.grad_sharded(g) {
            let grad = self.flat.state(g).grad;
            let grad = grad.expect("only trained groups have gradients");
            let dtype = out.inputs.types.grads;
            if !self.written[g.index()] && self.ready[g.index()] == 0 {
                fill_padding(out, g, grad, dtype);
            }
            return (grad, dtype);
        }
        let c = self.flat.comm_dtype(g);
        if let Some(bucket) = self.filling[g.index()] {
            return (out.b.whole(bucket), c);
        }
        self.limit_double_buffer(out, g);
        let bucket = match out.made.get(&(Role::FullGrad, g, COMPUTE)) {
            Some(id) => *id,
            None => {
                let bytes = self.flat.state(g).numel * c.size();
                let id = out.transient(Role::FullGrad, bytes, c, COMPUTE, g);
                out.made.insert((Role::FullGrad, g, COMPUTE), id);
                id
            }
        };
        out.b.alloc(Rule::Grad, bucket);
        let whole = out.b.whole(bucket);
        fill_padding(out, g, whole, c);
        self.filling[g.index()] = Some(bucket);
        (whole, c)
    }

    /// Moves one of autograd's gradients to the range that collects those of its group
    /// (`_grad_acc`).
    fn handle_grad(&mut self, out: &mut Emitter<'_>, g: GroupId, p: ParamId) {
        let Some(grad) = self.grads.take(p) else {
            return;
        };
        let (to, dtype) = self.bucket(out, g);
        let place = out.inputs.flat_place(p, to, dtype);
        let from = out.b.whole(grad);
        if self.flat.grad_sharded(g) {
            out.copy(Rule::ReduceCopyIn, COMPUTE, from, place);
        } else if !self.written[g.index()] {
            out.copy(Rule::Accumulate, COMPUTE, from, place);
        } else {
            reduction::accumulate(out, Rule::Accumulate, from, &[place], COMPUTE);
        }
        out.b.free(Rule::Grad, grad);
    }

    /// Fills the buckets of units that the micro-batch has not used with zeros. All are filled
    /// before the first one is reduced; see Note [Skipped blocks]. A gradient buffer that is not
    /// sharded is zeroed if nothing has been added to it.
    fn end_unused(&mut self, out: &mut Emitter<'_>) {
        let unused = out.inputs.unused(self.micro_batch);
        if unused.is_empty() {
            return;
        }
        let groups = unused.iter().flat_map(|u| out.inputs.trained_groups_of(*u));
        let mut groups: Vec<GroupId> = groups.collect();
        let sharded = groups.iter().filter(|g| self.flat.grad_sharded(**g));
        let params = sharded.flat_map(|g| out.inputs.group(*g).params.clone());
        let mut params: Vec<ParamId> = params.collect();
        let name = |p: &ParamId| &out.inputs.tape.params[p.index()].name;
        params.sort_by(|a, b| name(a).cmp(name(b)));
        for p in params {
            let (g, _) = out.inputs.home[p.index()];
            out.b.at(out.inputs.group(g).unit, out.b.phase());
            out.b.host(Rule::Reduce, HostWorkKind::HookParam, 1);
            let (to, dtype) = self.bucket(out, g);
            let place = out.inputs.flat_place(p, to, dtype);
            out.zero(Rule::Grad, &[place]);
        }
        let place = |g: &GroupId| {
            let unit = out.inputs.group(*g).unit;
            self.buckets.iter().position(|u| *u == unit)
        };
        groups.sort_by_key(|g| (place(g), g.0));
        for g in groups {
            out.b.at(out.inputs.group(g).unit, out.b.phase());
            let grad = self.flat.state(g).grad;
            let empty = !self.flat.grad_sharded(g) && !self.written[g.index()];
            if let Some(grad) = grad.filter(|_| empty && self.last) {
                out.zero(Rule::Grad, &[grad]);
            }
            self.reduce(out, g);
        }
        out.b.at(UnitId(0), out.b.phase());
    }

    /// Computes the scales and codes of weights that are gathered in 8 bits (`--fp8-param-gather`,
    /// `quantize_master_weights`).
    fn quantize_weights(&self, out: &mut Emitter<'_>) {
        self.flat.refresh_float8(out, true, COMPUTE);
        self.flat.cast_shards_float8(out);
    }

    /// Reduces a group whose gradients are complete: in each backward if gradients are sharded,
    /// otherwise only in the last one.
    fn reduce(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        out.b.host(Rule::Reduce, HostWorkKind::Hook, 1);
        let bucket = self.filling[g.index()].take();
        if bucket.is_none() && !self.last {
            return;
        }
        self.gate(out);
        self.limit_double_buffer(out, g);
        let reduction = match bucket {
            Some(bucket) => {
                let (whole, first, last) = (out.b.whole(bucket), self.first, self.last);
                self.flat
                    .reduce_sharded(out, g, whole, first, last, ReduceTo::Slice)
            }
            None => self.flat.reduce_full(out, g),
        };
        self.enqueue(out, g, reduction, bucket);
    }
}

/// Returns, by group, whether a kernel of any backward reads its weights other than by columns.
fn recomputed(inputs: &LoweringInputs<'_>) -> Vec<bool> {
    let mut read = vec![false; inputs.groups.len()];
    for micro_batch in 0..inputs.tape.variant_of.len().max(1) {
        columns::each_read_in_backward(inputs, micro_batch, |g, by_columns| {
            read[g.index()] |= !by_columns;
        });
    }
    read
}

/// Returns whether a unit stays gathered. Parameters outside all units do: their bucket keeps its
/// storage for the whole run.
fn is_resident(inputs: &LoweringInputs<'_>, unit: UnitId) -> bool {
    let spec = &inputs.unit(unit).spec;
    spec.is_root || spec.keep
}

/// Returns the default of `suggested_communication_unit_size` in elements (`megatron_fsdp.py`,
/// `_init_fsdp_param_and_grad_buffer`): twice the mean unit under ZeRO-3, otherwise the bucket
/// size, which is 1e9 by default (`bucket_size` has no key here). The result is at least 1e9: the
/// comment in the source says "cap", but the code is a floor.
fn suggested_size(inputs: &LoweringInputs<'_>) -> u64 {
    const DEFAULT: u64 = 1_000_000_000;
    if inputs.scenario.fsdp.strategy != Strategy::OptimGradsParams {
        return DEFAULT;
    }
    let units = inputs
        .forward_order
        .iter()
        .filter(|u| !is_resident(inputs, **u));
    // Counts parameters, without padding.
    let numel = |u: &UnitId| -> u64 {
        let groups = inputs.groups_of(*u).into_iter();
        let params = groups.flat_map(|g| &inputs.group(g).params);
        params.map(|p| inputs.tape.params[p.index()].numel()).sum()
    };
    let (count, total) = units.fold((0, 0), |(n, sum), u| (n + 1, sum + numel(u)));
    let mean = u64::checked_div(total, count).unwrap_or(0);
    (2 * mean).max(DEFAULT)
}

impl Lifecycle for Megatron {
    fn init(&mut self, out: &mut Emitter<'_>) {
        self.flat.init(out);
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        // The source counts backwards; a joint backward is the first one.
        self.first = index == 0 || self.joint;
        self.step_begins = index == 0;
        if index == 0 {
            self.written.fill(false);
        }
        self.micro_batch = index;
        self.last = last;
    }

    fn forward_start(&mut self, out: &mut Emitter<'_>) {
        if std::mem::take(&mut self.step_begins) {
            if out.b.phase() != Phase::Validation && self.flat.reduces_scales() {
                // Later steps use the codes that the previous step has computed.
                let from = out.b.next_instr();
                self.quantize_weights(out);
                let to = out.b.next_instr();
                out.b.withhold_from_later(from..to);
            }
            // The pipeline is reset: resident buckets keep their storage, but their content is
            // stale.
            self.full.fill(false);
            self.held.fill([false; 2]);
            self.gathered.fill(None);
        }
        if self.flat.streams.gather != COMPUTE {
            out.b
                .join(Rule::StepStart, COMPUTE, self.flat.streams.gather);
        }
    }

    fn pre_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.require(out, unit, false);
        self.prefetch(out, unit, false);
    }

    fn post_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if out.inputs.unit(unit).reshards || out.b.phase() == Phase::Validation {
            self.release(out, unit);
        }
    }

    fn forward_end(&mut self, _out: &mut Emitter<'_>) {}

    fn backward_start(&mut self, _out: &mut Emitter<'_>) {
        self.done.fill(false);
        self.recycles = true;
    }

    fn pre_recompute(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.require(out, unit, false);
    }

    fn pre_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.require(out, unit, true);
        self.prefetch(out, unit, true);
    }

    fn post_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.done[unit.index()] = true;
        self.release(out, unit);
    }

    fn between_backwards(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.release(out, unit);
    }

    /// `_process_post_backward_gradients`: the hook after the accumulation of a parameter's
    /// gradient.
    fn grad_ready(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        let (g, _) = out.inputs.home[p.index()];
        if !out.inputs.group(g).requires_grad {
            return;
        }
        if Unmanaged::has(out.inputs, p) {
            return self.choices.accumulate(out, p);
        }
        if self.joint {
            self.grads.accumulate(out, p);
            if !self.last {
                self.grads.keep(out, p);
                return;
            }
        }
        out.within_unit(out.inputs.group(g).unit, |out| {
            out.b.host(Rule::Reduce, HostWorkKind::HookParam, 1);
            self.handle_grad(out, g, p);
            self.ready[g.index()] += 1;
            if self.ready[g.index()] == out.inputs.group(g).params.len() {
                self.ready[g.index()] = 0;
                self.written[g.index()] = true;
                self.reduce(out, g);
            }
        });
    }

    fn backward_end(&mut self, out: &mut Emitter<'_>) {
        if self.joint && !self.last {
            return;
        }
        self.recycles = false;
        self.end_unused(out);
        while !self.queue.is_empty() {
            self.pop(out, Rule::FinalFence);
        }
        // Frozen units before the first trained one have no backward that releases them.
        for unit in out.inputs.forward_order.clone() {
            self.release(out, unit);
        }
        out.b
            .join(Rule::FinalFence, self.flat.streams.reduce, COMPUTE);
        if self.last && out.inputs.outer > 1 {
            out.b
                .join(Rule::FinalFence, self.flat.streams.outer, COMPUTE);
        }
        if self.last {
            self.choices.add_up_choices(out);
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
        match Unmanaged::has(out.inputs, p) {
            true => self.choices.location(out, p),
            false => self.grads.location(out, p),
        }
    }

    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<ShardState> {
        let groups = out.inputs.groups_by_param();
        let mut states = self.flat.optimizer_state(out, groups.iter().copied());
        let types = out.inputs.types;
        let decoupled = out.inputs.scenario.fsdp.decoupled_gradients;
        if let Some(main) = types.main.filter(|m| *m != types.grads && !decoupled) {
            // `update_main_grads`: the optimizer sees gradients in the main dtype.
            self.casts.cast(out, main, &groups, &mut states);
        }
        self.choices
            .states_with(out, states, |p| self.flat.whole_weight(out.inputs, p))
    }

    fn step_end(&mut self, out: &mut Emitter<'_>) {
        self.flat.refresh(out, COMPUTE);
        self.quantize_weights(out);
        self.casts.free(out);
        self.choices.free_choices(out);
        // `zero_grad_buffer` zeroes all persistent gradients at once.
        let grads: Vec<Access> = out
            .inputs
            .group_ids()
            .filter_map(|g| self.flat.state(g).grad)
            .collect();
        if grads.iter().any(|a| a.bytes > 0) {
            out.b.at(UnitId(0), Phase::Optimizer);
            out.zero(Rule::ZeroGrad, &grads);
        }
    }
}
