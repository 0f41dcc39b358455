//! The `fsdp2` policy: torch 2.11 `torch.distributed.fsdp.fully_shard`, per-parameter dim-0 sharding.
//!
//! Host order, streams, waits and frees follow `_fsdp_param_group.py`, `_fsdp_collectives.py` and `_fsdp_state.py`:
//! - the gather casts and packs on the copy-in stream, gathers on the all-gather stream, and is copied out to one
//!   allocation a parameter on the compute stream;
//! - forward keeps one gather buffer until the next unit's copy-out, whose event gates the gather after it;
//! - backward frees the gather buffer at once and prefetches the unit before in forward order;
//! - the reduction packs on the compute stream after waiting for the reduce-scatter K units before; what comes after a reduce-scatter
//!   (all-reduce over replicas, cast, accumulation) is waited for at the end of backward.

mod gather;
mod reduce;
mod spec;
mod tables;

pub(super) use spec::SPEC;

use crate::config::{OuterStrategy, Reshard};
use crate::ir::{
    Access, BufferId, COMPUTE, EventId, GroupId, Holds, HostWorkKind, ParamId, PerRank, Pool, Role,
    StreamId, UnitId,
};
use crate::lower::autograd::AutogradGrads;
use crate::lower::context::{Comms, Cx};
use crate::lower::optimizer::{OptimizerItem, ShardState, moments};
use crate::lower::streams::CommStreams;
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{Phase, Rule, StreamKind};
use crate::shard::{Layout, PerParamLayout};
use std::collections::VecDeque;

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
    /// Sharded parameters (rank 0's padded shards).
    shards: Vec<BufferId>,
    /// Unsharded parameters.
    full: Vec<BufferId>,
    /// What is reduced: the trained parameters, packed.
    grads: PerParamLayout,
    /// Their indices in the group.
    trained: Vec<usize>,
    /// Optimizer items' state, by trained parameter.
    moments: Vec<Option<crate::lower::optimizer::Moments>>,
    /// Reduced gradients of the step (the output of the first reduction whose result is whole).
    reduced: Option<BufferId>,
    /// Sum over the shard axis of the micro-batches so far, where the last one's is reduced over the replicas.
    partial: Option<BufferId>,
    /// Its buffer, once made.
    partial_made: Option<BufferId>,
    /// What the replicas reduced, when the gradient is a cast of it: kept until the end of backward.
    all_reduced: Option<BufferId>,
    /// End of the group's last reduction, cast and accumulation included.
    post_reduce: Option<EventId>,
    /// Slices kept by integer reshard, until the backward's copy-out.
    kept: Vec<BufferId>,
    /// Event behind their making (`_reshard_after_forward_event`).
    resharded: Option<EventId>,
}

pub(crate) struct Fsdp2 {
    comms: Comms,
    copy_in: StreamId,
    streams: CommStreams,
    groups: Vec<GroupState>,
    /// Gathers issued and not copied out, by group.
    issued: Vec<Option<Gather>>,
    /// Whether a unit's parameters are full.
    full: Vec<bool>,
    /// Gather buffer kept by forward, with the event of its copy-out.
    held: Option<(BufferId, EventId)>,
    /// Inputs of the reduce-scatters in flight, with the events of these.
    pending: VecDeque<(BufferId, EventId)>,
    /// Unsharded gradients, and their sums where a micro-batch reduces nothing.
    grads: AutogradGrads,
    backward: bool,
    last: bool,
    in_flight: usize,
}

impl Fsdp2 {
    pub(crate) fn new(cx: &mut Cx<'_>) -> Self {
        let fsdp = &cx.scenario.fsdp;
        let separate = fsdp.separate_communicators;
        let in_flight = fsdp.reduce_in_flight as usize;
        let sharded = cx.inner > 1;
        let copy_in = if sharded {
            cx.b.add_stream(StreamKind::CopyIn, -1)
        } else {
            COMPUTE
        };
        let streams = CommStreams::new(cx, sharded, -1, 0);
        let comms = cx.communicators(separate);
        let groups = cx.group_ids().map(|g| Self::group_state(cx, g)).collect();
        Self {
            comms,
            copy_in,
            streams,
            groups,
            issued: vec![None; cx.groups.len()],
            full: vec![false; cx.units.len()],
            held: None,
            pending: VecDeque::new(),
            grads: AutogradGrads::new(cx.tape.params.len(), cx.scenario.precision.comm_grads),
            backward: false,
            last: true,
            in_flight,
        }
    }

    fn group_state(cx: &mut Cx<'_>, g: GroupId) -> GroupState {
        let group = cx.group(g).clone();
        let precision = cx.scenario.precision;
        let stored = cx.stored_dtype();
        let Layout::PerParam(layout) = &group.layout else {
            return GroupState::default();
        };
        let trained = |p: ParamId| cx.tape.params[p.index()].requires_grad;
        let mut state = GroupState {
            grads: layout.only(trained),
            ..GroupState::default()
        };
        for (i, item) in layout.items.iter().enumerate() {
            let holds = Holds::Param(item.param);
            let bytes = item.shard_numel * stored.size();
            state
                .shards
                .push(cx.resting(Role::MainWeight, bytes, stored, group.unit, holds));
            if trained(item.param) {
                let local = layout.local_numel(i, 0);
                let moments = moments(cx, group.unit, local, holds, true);
                state.moments.push(moments);
                state.trained.push(i);
            }
            let full = item.shard_numel * u64::from(layout.shards) * precision.compute.size();
            let id = cx.b.buffer(crate::lower::builder::NewBuffer {
                role: Role::FullWeight,
                bytes: full,
                dtype: precision.compute,
                pool: Pool::Caching,
                stream: COMPUTE,
                unit: group.unit,
                holds,
            });
            state.full.push(id);
        }
        state
    }
}

impl Lifecycle for Fsdp2 {
    fn init(&mut self, cx: &mut Cx<'_>) {
        for p in 0..cx.tape.params.len() {
            let (g, i) = cx.home[p];
            cx.b.at(cx.group(g).unit, Phase::Init);
            cx.b.alloc(Rule::State, self.groups[g.index()].shards[i as usize]);
        }
    }

    fn micro_batch(&mut self, _index: u16, last: bool) {
        self.last = last;
    }

    fn forward_start(&mut self, cx: &mut Cx<'_>) {
        self.backward = false;
        for stream in [self.copy_in, self.streams.gather] {
            cx.b.join(Rule::StepStart, COMPUTE, stream);
        }
    }

    fn pre_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let rule = cx.scenario.fsdp.prefetch_forward;
        self.require(cx, unit, rule);
        self.prefetch(cx, unit);
    }

    fn post_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if !cx.unit(unit).reshards {
            return;
        }
        match cx.scenario.fsdp.reshard_after_forward {
            // Slices would outlive a validation forward, which no backward follows.
            Reshard::Group(n) if cx.b.phase() != Phase::Validation => self.keep_slices(cx, unit, n),
            _ => self.reshard(cx, unit),
        }
    }

    fn outputs(&mut self, cx: &mut Cx<'_>) {
        // The root's post-forward (`iter_forward_root`).
        self.drop_held(cx);
    }

    fn forward_end(&mut self, cx: &mut Cx<'_>) {
        self.drop_held(cx);
        // torch keeps units that do not reshard for the next forward; here a step finds the same state whatever was before it.
        if cx.b.phase() == Phase::Validation {
            for unit in cx.forward_order.clone() {
                self.reshard(cx, unit);
            }
        }
    }

    fn backward_start(&mut self, _cx: &mut Cx<'_>) {
        self.backward = true;
    }

    fn pre_recompute(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let rule = cx.scenario.fsdp.prefetch_backward;
        self.require(cx, unit, rule);
    }

    fn pre_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let rule = cx.scenario.fsdp.prefetch_backward;
        self.require(cx, unit, rule);
        self.prefetch(cx, unit);
    }

    fn grad_ready(&mut self, cx: &mut Cx<'_>, p: ParamId) {
        self.grads.accumulate_alike(cx, p);
    }

    fn post_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let groups = cx.trained_groups_of(unit);
        for g in &groups {
            for p in cx.group(*g).params.clone() {
                self.grads.accumulate(cx, p);
            }
        }
        self.reshard_after_backward(cx, unit);
        let reduces = cx.scenario.fsdp.reduces(false, self.last);
        for g in groups {
            if reduces {
                self.reduce(cx, g);
            } else {
                hooks(cx, Rule::Accumulate, cx.group(g).params.len());
                // Once the parameters are freed: a cast needs memory (`to_accumulated_grad_if_needed`).
                for p in cx.group(g).params.clone() {
                    self.grads.keep(cx, p);
                }
            }
        }
    }

    fn backward_end(&mut self, cx: &mut Cx<'_>) {
        // Frozen units before the first trained one have no backward; torch's root callback runs their post-backward.
        for unit in cx.forward_order.clone() {
            self.reshard_after_backward(cx, unit);
        }
        // `finalize_backward` of every group, then the last inputs of the root's.
        for state in &mut self.groups {
            if let Some(event) = state.post_reduce.take() {
                cx.b.wait(Rule::FinalFence, event, COMPUTE);
            }
            if let Some(buffer) = state.all_reduced.take() {
                cx.b.free(Rule::ReduceRelease, buffer);
            }
        }
        self.recycle(cx, 0, Rule::FinalFence);
    }

    fn weight(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        let (g, i) = cx.home[p.index()];
        let buffer = self.groups[g.index()].full[i as usize];
        Location {
            buffer,
            offset: 0,
            element: cx.compute_dtype().size(),
        }
    }

    fn grad(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        self.grads.location(cx, p)
    }

    fn optimizer_state(&mut self, cx: &mut Cx<'_>) -> Vec<ShardState> {
        let stored = cx.stored_dtype();
        cx.group_ids()
            .filter_map(|g| {
                let group = cx.group(g);
                let state = &self.groups[g.index()];
                let reduced = state.reduced?;
                let packed = state.trained.iter().zip(&state.grads.items);
                let items = packed
                    .zip(&state.moments)
                    .filter_map(|((&i, item), &moments)| {
                        let local = item.local(0);
                        let numel = local.end - local.start;
                        if numel == 0 {
                            return None;
                        }
                        let bytes = numel * stored.size();
                        Some(OptimizerItem {
                            weight: Access {
                                buffer: state.shards[i],
                                offset: 0,
                                bytes,
                                per_rank: PerRank::Same,
                            },
                            grad: Access {
                                buffer: reduced,
                                offset: item.shard_offset * stored.size(),
                                bytes,
                                per_rank: PerRank::Same,
                            },
                            numel,
                            state: moments,
                        })
                    })
                    .collect();
                Some(ShardState {
                    unit: group.unit,
                    items,
                    compute: Vec::new(),
                    pieces: None,
                })
            })
            .collect()
    }

    fn step_end(&mut self, cx: &mut Cx<'_>) {
        // zero_grad(set_to_none=True). The gradients came from the reduce stream, which saw the optimizer's reads only
        // through the next step's first reduction: that one waits for compute before it writes.
        for g in cx.group_ids() {
            if let Some(id) = self.groups[g.index()].reduced.take() {
                cx.b.at(cx.group(g).unit, Phase::Optimizer);
                cx.b.free(Rule::ZeroGrad, id);
            }
        }
    }
}

/// What a hook costs the host, with what it does for so many parameters.
fn hooks(cx: &mut Cx<'_>, rule: Rule, params: usize) {
    cx.b.host(rule, HostWorkKind::Hook, 1);
    cx.b.host(rule, HostWorkKind::HookParam, params as u16);
}

/// Strategies of this policy: ZeRO-3, replicated over the outer axis.
pub(crate) fn supports(cx: &Cx<'_>) -> Result<(), crate::lower::PlanError> {
    if cx.outer > 1 && cx.scenario.fsdp.outer_strategy == OuterStrategy::Optim {
        return Err(crate::lower::PlanError::Unsupported(
            "fsdp2 replicates over the outer axis (HSDP); outer_strategy = \"optim\" needs policy native or megatron"
                .to_owned(),
        ));
    }
    Ok(())
}
