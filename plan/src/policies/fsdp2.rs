//! The `fsdp2` policy: torch 2.11 `torch.distributed.fsdp.fully_shard`, per-parameter dim-0
//! sharding.
//!
//! Host order, streams, waits and frees follow `_fsdp_param_group.py`, `_fsdp_collectives.py` and
//! `_fsdp_state.py`:
//! - the gather casts and packs on the copy-in stream, gathers on the all-gather stream, and is
//!   copied out to one allocation per parameter on the compute stream;
//! - forward keeps one gather buffer until the next unit's copy-out, whose event gates the gather
//!   after it;
//! - backward frees the gather buffer at once and prefetches the previous unit in forward order;
//! - the reduction packs on the compute stream after waiting for the reduce-scatter K units before;
//!   work after a reduce-scatter (all-reduce over replicas, cast, accumulation) is waited for at
//!   the end of backward.

mod float8;
mod gather;
mod ignored;
mod offload;
mod reduce;
mod spec;
mod tables;

pub(super) use spec::SPEC;

use crate::config::{OuterStrategy, Reshard};
use crate::ir::{
    Access, BufferId, COMPUTE, CommId, EventId, GroupId, Holds, ParamId, Role, StreamId, UnitId,
    UpdateRule,
};
use crate::lower::PlanError;
use crate::lower::autograd::AutogradGrads;
use crate::lower::emitter::{Comms, Emitter};
use crate::lower::float8::Scales;
use crate::lower::inputs::LoweringInputs;
use crate::lower::muon::RowGather;
use crate::lower::optimizer::{OptimizerItem, ShardState, moments, rule, rule_of_param};
use crate::lower::streams::CommStreams;
use crate::lower::unmanaged::{Unmanaged, router_biases};
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule, StreamKind};
use crate::shard::{Layout, PerParamItem, PerParamLayout};
use std::collections::{HashSet, VecDeque};

/// A gather between its issue and its copy-out.
#[derive(Clone, Copy, Debug)]
struct Gather {
    buffer: BufferId,
    done: EventId,
    /// Bytes of one rank's part.
    slice: u64,
}

/// Buffers of one group.
#[derive(Clone, Debug, Default)]
struct GroupState {
    /// Sharded parameters (padded shards of rank 0).
    shards: Vec<BufferId>,
    /// Unsharded parameters.
    full: Vec<BufferId>,
    /// Layout of the reduced gradients: the trained parameters, packed.
    grads: PerParamLayout,
    /// Indices of the trained parameters in the group.
    trained: Vec<usize>,
    /// State of the optimizer's items, by trained parameter.
    moments: Vec<Option<crate::lower::optimizer::Moments>>,
    /// Reduced gradients of the step: the output of the first reduction that completes them.
    reduced: Option<BufferId>,
    /// Sum over the shard axis of the micro-batches so far, if only the last micro-batch is reduced
    /// over the replicas.
    partial: Option<BufferId>,
    /// Buffer of `partial`, once allocated.
    partial_made: Option<BufferId>,
    /// Result of the all-reduce over replicas, if the gradient is a cast of it. It is kept until
    /// the end of backward.
    all_reduced: Option<BufferId>,
    /// End of the group's last reduction, including its cast and accumulation.
    post_reduce: Option<EventId>,
    /// Host offload: device copies of the shards before a gather, and gradients in host memory.
    host: Option<offload::HostState>,
    /// Buffer of a unit's next gather while the buffer of its previous use is still held.
    gathered_again: Option<BufferId>,
    /// By parameter: the cast before an 8-bit gather.
    casts: Vec<Option<float8::Cast>>,
    /// Slices kept by integer reshard, until the copy-out in backward.
    kept: Vec<BufferId>,
    /// Event after these slices were copied (`_reshard_after_forward_event`).
    resharded: Option<EventId>,
}

pub(crate) struct Fsdp2 {
    comms: Comms,
    /// By unit: the communicator for gathers in backward with integer reshard. Each call of
    /// `fully_shard` builds a mesh of its own, with its own process groups
    /// (`_get_post_forward_mesh_info`).
    subs: Vec<Option<CommId>>,
    copy_in: StreamId,
    streams: CommStreams,
    groups: Vec<GroupState>,
    /// Gathers issued but not copied out, by group.
    issued: Vec<Option<Gather>>,
    /// Whether a unit's parameters are full.
    full: Vec<bool>,
    /// Full parameters that already have the storage that they keep.
    stored: HashSet<BufferId>,
    /// Gather buffer that forward holds, with the event of its copy-out.
    held: Option<(BufferId, EventId)>,
    /// Inputs of the reduce-scatters in flight, with their events.
    pending: VecDeque<(BufferId, EventId)>,
    /// Unsharded gradients, and their sums over micro-batches without a reduction.
    grads: AutogradGrads,
    /// Gradients of parameters that the policy does not manage.
    ignored: Unmanaged,
    /// Whether one backward covers all micro-batches; see Note [Joint backward].
    joint: bool,
    /// Whether each unit has a hook after its backward.
    hooked: Vec<bool>,
    backward: bool,
    micro_batch: u16,
    last: bool,
    in_flight: usize,
    /// CPU stream for operators, if parameters, gradients and optimizer state are in host memory
    /// (`CPUOffloadPolicy`).
    cpu: Option<StreamId>,
    /// Scales of weights that are gathered in 8 bits.
    scales: Option<Scales>,
}

impl Fsdp2 {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let fsdp = &out.inputs.scenario.fsdp;
        let separate = fsdp.separate_communicators;
        let in_flight = fsdp.reduce_in_flight as usize;
        let sharded = out.inputs.ranks() > 1;
        let copy_in = if sharded {
            out.b.add_stream(StreamKind::CopyIn, -1)
        } else {
            COMPUTE
        };
        let mut streams = CommStreams::new(out, sharded, -1, 0);
        if !sharded {
            // `foreach_reduce` copies gradients on its stream, whose memory no other stream reuses.
            streams.reduce = out.b.add_stream(StreamKind::ReduceScatter, -1);
        }
        let offloads = out.inputs.scenario.fsdp.offload.any();
        let cpu = offloads.then(|| out.b.add_stream(StreamKind::Cpu, 0));
        let comms = out.communicators(separate);
        let units = out.inputs.units.iter().map(|unit| {
            let name = format!("sub_shard {}", unit.spec.name);
            let sub = unit.reshards.then(|| out.sub_communicator(&name));
            sub.flatten()
        });
        let subs = units.collect();
        let over_data = router_biases::communicator_of_mesh(out, &comms);
        let groups = out
            .inputs
            .group_ids()
            .map(|g| Self::group_state(out, g, copy_in, cpu))
            .collect();
        let joint = out.inputs.scenario.train.joint_backward;
        // Autograd adds up gradients that arrive within one backward.
        let sums = if joint {
            out.inputs.types.compute
        } else {
            out.inputs.types.comm
        };
        Self {
            comms,
            subs,
            copy_in,
            streams,
            groups,
            issued: vec![None; out.inputs.groups.len()],
            full: vec![false; out.inputs.units.len()],
            stored: HashSet::new(),
            held: None,
            pending: VecDeque::new(),
            grads: AutogradGrads::new(out.inputs.tape.params.len(), sums),
            ignored: Unmanaged::new(out.inputs, over_data),
            joint,
            hooked: out.inputs.units_after_trained(),
            backward: false,
            micro_batch: 0,
            last: true,
            in_flight,
            cpu,
            scales: Scales::new(out),
        }
    }

    fn group_state(
        out: &mut Emitter<'_>,
        g: GroupId,
        copy_in: StreamId,
        cpu: Option<StreamId>,
    ) -> GroupState {
        let group = out.inputs.group(g).clone();
        let types = out.inputs.types;
        let Layout::PerParam(layout) = &group.layout else {
            return GroupState::default();
        };
        if group.ignored {
            return ignored::state(out, g, layout);
        }
        let trained = |p: ParamId| out.inputs.tape.params[p.index()].requires_grad;
        let mut state = GroupState {
            grads: layout.only(trained),
            ..GroupState::default()
        };
        for (i, item) in layout.items.iter().enumerate() {
            let holds = Holds::Param(item.param);
            let kept = types.shard(&out.inputs.tape.params[item.param.index()]);
            let bytes = item.shard_numel * kept.size();
            state
                .shards
                .push(out.persistent(Role::MainWeight, bytes, kept, group.unit, holds));
            if trained(item.param) {
                let local = layout.local_numel(i, 0);
                let of = (group.unit, rule_of_param(out.inputs, g, i));
                let moments = moments(out, of, local, holds, true);
                state.moments.push(moments);
                state.trained.push(i);
            }
            let dtype = out.inputs.gathered_type_of(item.param);
            let full = item.shard_numel * u64::from(layout.shards) * dtype.size();
            let id = out.of_param(Role::FullWeight, full, dtype, COMPUTE, item.param);
            state.full.push(id);
        }
        state.casts = float8::casts(out, g, copy_in);
        if let Some(cpu) = cpu {
            state.host = Some(offload::HostState::new(out, g, &state, copy_in, cpu));
        }
        state
    }
}

impl Lifecycle for Fsdp2 {
    fn init(&mut self, out: &mut Emitter<'_>) {
        for p in 0..out.inputs.tape.params.len() {
            let (g, i) = out.inputs.home[p];
            out.b.at(out.inputs.group(g).unit, Phase::Init);
            out.b
                .alloc(Rule::State, self.groups[g.index()].shards[i as usize]);
        }
        if let Some(scales) = self.scales {
            scales.init(out);
        }
    }

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.micro_batch = index;
        self.last = last;
    }

    fn before_inputs(&mut self, out: &mut Emitter<'_>) {
        if self.scales.is_some() {
            // Later steps use the scales that the previous step has computed.
            let from = out.b.next_instr();
            self.refresh_float8(out);
            let to = out.b.next_instr();
            out.b.withhold_from_later(from..to);
        }
    }

    fn forward_start(&mut self, out: &mut Emitter<'_>) {
        self.backward = false;
        for stream in [self.copy_in, self.streams.gather] {
            out.b.join(Rule::StepStart, COMPUTE, stream);
        }
    }

    fn pre_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let rule = out.inputs.scenario.fsdp.prefetch_forward;
        self.require(out, unit, rule);
        self.prefetch(out, unit);
    }

    fn post_forward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !out.inputs.unit(unit).reshards {
            return;
        }
        match out.inputs.scenario.fsdp.reshard_after_forward {
            // After a validation forward, there is no backward that would free the slices.
            Reshard::Group(n) if out.b.phase() != Phase::Validation => {
                self.keep_slices(out, unit, n)
            }
            _ => self.reshard(out, unit),
        }
    }

    fn outputs(&mut self, out: &mut Emitter<'_>) {
        // Post-forward of the root (`iter_forward_root`).
        self.drop_held(out);
    }

    fn forward_end(&mut self, out: &mut Emitter<'_>) {
        self.drop_held(out);
        // torch keeps units that do not reshard for the next forward. Here, each step starts in the
        // same state.
        if out.b.phase() == Phase::Validation {
            for unit in out.inputs.forward_order.clone() {
                self.reshard(out, unit);
            }
        }
    }

    fn backward_start(&mut self, _out: &mut Emitter<'_>) {
        self.backward = true;
    }

    fn pre_recompute(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let rule = out.inputs.scenario.fsdp.prefetch_backward;
        self.require(out, unit, rule);
        // A reentrant checkpoint runs forward before the hook of the unit's backward, after which
        // forward hooks would do nothing (`_pre_forward`).
        if out.inputs.scenario.train.use_reentrant {
            self.prefetch_again(out, unit);
        }
    }

    fn pre_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let rule = out.inputs.scenario.fsdp.prefetch_backward;
        self.require(out, unit, rule);
        self.prefetch(out, unit);
    }

    fn grad_ready(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if Unmanaged::has(out.inputs, p) {
            self.ignored.accumulate(out, p);
        } else {
            self.grads.accumulate_alike(out, p);
        }
    }

    fn post_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let groups = out.inputs.trained_groups_of(unit);
        for g in &groups {
            for p in out.inputs.group(*g).params.clone() {
                self.grads.accumulate(out, p);
            }
        }
        let hooked = self.last || !self.joint || self.hooked[unit.index()];
        if hooked {
            self.reshard_after_backward(out, unit);
        }
        for g in groups {
            if out.inputs.reduces(g, false, self.last) {
                self.reduce(out, g);
            } else {
                if hooked {
                    let params = out.inputs.group(g).params.len();
                    out.b.hook(Rule::Accumulate, params as u16);
                }
                // The parameters are freed first because the cast allocates memory
                // (`to_accumulated_grad_if_needed`).
                for p in out.inputs.group(g).params.clone() {
                    self.grads.keep(out, p);
                }
            }
        }
    }

    /// Runs the hook after a use, which reshards the unit. The hook finds no gradients, because
    /// autograd accumulates a parameter's gradient only once it has all contributions. (torch
    /// reduces parameters that no other use reads at this point, in a separate collective; here
    /// they wait for the others.)
    fn between_backwards(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if self.last || !self.joint || self.hooked[unit.index()] {
            self.reshard_after_backward(out, unit);
        }
    }

    fn backward_end(&mut self, out: &mut Emitter<'_>) {
        if self.joint && !self.last {
            return;
        }
        // Frozen units before the first trained one have no backward; torch's root callback runs
        // their post-backward.
        for unit in out.inputs.forward_order.clone() {
            self.reshard_after_backward(out, unit);
        }
        for unit in out.inputs.unused(self.micro_batch) {
            self.end_unused(out, unit);
        }
        self.drop_untouched(out);
        // `finalize_backward` of every group, then the last inputs of the root group.
        let offloads = self.cpu.is_some();
        for state in &mut self.groups {
            if let Some(event) = state.post_reduce.take() {
                out.b.wait(Rule::FinalFence, event, COMPUTE);
                if offloads {
                    // `grad_offload_event.synchronize()`
                    out.host_sync(Rule::Offload, event);
                }
            }
            if let Some(buffer) = state.all_reduced.take() {
                out.b.free(Rule::ReduceRelease, buffer);
            }
        }
        self.recycle(out, 0, Rule::FinalFence);
        if let Some(cpu) = self.cpu {
            out.b.join(Rule::Offload, COMPUTE, cpu);
        }
        if self.last {
            self.scale_ignored(out);
            self.ignored.add_up_choices(out);
        }
    }

    fn weight(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        let (g, i) = out.inputs.home[p.index()];
        let buffer = self.groups[g.index()].full[i as usize];
        Location {
            buffer,
            offset: 0,
            element: out.inputs.gathered_type_of(p).size(),
        }
    }

    fn scale(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        let scales = self.scales.expect("an 8-bit parameter has a scale");
        scales.reciprocal(out.inputs, p)
    }

    fn grad(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        match Unmanaged::has(out.inputs, p) {
            true => self.ignored.location(out, p),
            false => self.grads.location(out, p),
        }
    }

    fn optimizer_state(&mut self, out: &mut Emitter<'_>) -> Vec<ShardState> {
        let of_group = |g| match out.inputs.group(g).ignored {
            true => [self.ignored_state(out, g), None],
            // Users have an optimizer for matrices and another one for the rest.
            false => [true, false].map(|rows| self.state_of(out, g, rows)),
        };
        out.inputs
            .group_ids()
            .flat_map(of_group)
            .flatten()
            .collect()
    }

    fn optimizer_stream(&self) -> StreamId {
        self.cpu.unwrap_or(COMPUTE)
    }

    fn step_end(&mut self, out: &mut Emitter<'_>) {
        self.after_host_step(out);
        // `zero_grad(set_to_none=True)`. The gradients were allocated on the reduce stream. That
        // stream waits for the optimizer's reads only at the next step's first reduction, which
        // waits for compute before it writes.
        for g in out.inputs.group_ids() {
            let state = &mut self.groups[g.index()];
            let offloaded = state.host.as_mut().map(|h| h.take_gradients());
            let all = state.reduced.take().into_iter();
            for id in all.chain(offloaded.unwrap_or_default()) {
                out.b.at(out.inputs.group(g).unit, Phase::Optimizer);
                out.b.free(Rule::ZeroGrad, id);
            }
            out.b.at(out.inputs.group(g).unit, Phase::Optimizer);
            self.ignored.free(out, g);
        }
        self.refresh_float8(out);
    }
}

impl Fsdp2 {
    /// Returns the state of a group's matrices that Muon updates, or that of its other trained
    /// parameters; `None` without gradients or without such parameters.
    fn state_of(&self, out: &Emitter<'_>, g: GroupId, rows: bool) -> Option<ShardState> {
        let stored = out.inputs.types.stored();
        let group = out.inputs.group(g);
        let state = &self.groups[g.index()];
        let offloaded = state.host.as_ref().and_then(|h| h.gradients());
        let reduced = state.reduced;
        let grad_of = |item: &PerParamItem, n: usize| match offloaded {
            Some(grads) => Some((grads[n], 0)),
            None => Some((reduced?, item.shard_offset * stored.size())),
        };
        reduced.or_else(|| offloaded.map(|grads| grads[0]))?;
        let packed = state.trained.iter().zip(&state.grads.items);
        let (params, items): (Vec<ParamId>, Vec<OptimizerItem>) = packed
            .zip(&state.moments)
            .enumerate()
            .filter(|(_, ((i, _), _))| group.has_muon_rows(**i) == rows)
            .filter_map(|(n, ((&i, item), &moments))| {
                let local = item.local(0);
                let numel = local.end - local.start;
                if numel == 0 {
                    return None;
                }
                let bytes = numel * stored.size();
                let (buffer, offset) = grad_of(item, n)?;
                let updated = OptimizerItem {
                    weight: Access {
                        buffer: state.shards[i],
                        offset: 0,
                        bytes,
                        per_rank: None,
                    },
                    grad: Access {
                        buffer,
                        offset,
                        bytes,
                        per_rank: None,
                    },
                    numel,
                    state: moments,
                };
                Some((item.param, updated))
            })
            .unzip();
        if rows && items.is_empty() {
            return None;
        }
        let axis = out.inputs.shard_axis(g);
        Some(ShardState {
            unit: group.unit,
            rule: match rows {
                true => UpdateRule::MuonMomentum,
                false => rule(out.inputs, g),
            },
            divided: out.inputs.divided(g),
            items,
            compute: Vec::new(),
            pieces: None,
            maxima: None,
            rows: rows.then(|| RowGather {
                params,
                axis,
                comm: self.comms.along(axis).gather,
            }),
        })
    }
}

/// Rejects strategies that this policy does not support: it can only replicate over the outer axis.
/// If only the last micro-batch reduces the sum over replicas, it needs a gradient in that
/// micro-batch; see Note [Skipped blocks].
pub(crate) fn supports(inputs: &LoweringInputs<'_>) -> Result<(), PlanError> {
    let fsdp = &inputs.scenario.fsdp;
    if inputs.outer > 1 && fsdp.outer_strategy == OuterStrategy::Optim {
        return Err(PlanError::OuterSharding);
    }
    if inputs.outer == 1 || fsdp.reduce_unused {
        return Ok(());
    }
    let last = inputs.scenario.train.grad_accum as u16 - 1;
    let sums = |g: &GroupId| inputs.reduces(*g, false, false) && !inputs.reduces(*g, true, false);
    let lost = |u: &UnitId| {
        let partly = inputs.uses_of(*u).next().is_some();
        partly && inputs.trained_groups_of(*u).iter().any(sums)
    };
    match inputs.unused(last).into_iter().find(lost) {
        Some(unit) => Err(PlanError::UnfinishedSum {
            unit: inputs.unit(unit).spec.name.clone(),
        }),
        None => Ok(()),
    }
}
