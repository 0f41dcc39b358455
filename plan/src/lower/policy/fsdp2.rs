//! The `fsdp2` policy: torch 2.11 `torch.distributed.fsdp.fully_shard`, per-parameter dim-0 sharding.
//!
//! Host order, streams, waits and frees follow `_fsdp_param_group.py`, `_fsdp_collectives.py` and `_fsdp_state.py`:
//! - the gather casts and packs on the copy-in stream, gathers on the all-gather stream, and is copied out to one
//!   allocation a parameter on the compute stream;
//! - forward keeps one gather buffer until the next unit's copy-out, whose event gates the gather after it;
//! - backward frees the gather buffer at once and prefetches the unit before in forward order;
//! - the reduction packs on the compute stream after waiting for the reduction K units before.

use crate::lower::context::{Comms, Cx, prefetch_targets};
use crate::lower::optimizer::{OptimizerItem, ShardState, moments};
use crate::lower::walk::{Lifecycle, Location};
use crate::program::{
    Access, BufferId, COMPUTE, CollectiveKind, EventId, GroupId, Holds, HostWorkKind, ParamId,
    Part, PerRank, Phase, Pool, ReduceOp, Role, Rule, ShardOp, StreamId, StreamKind, UnitId,
};
use crate::scenario::{OuterStrategy, Prefetch, Reshard};
use crate::shard::Layout;
use smallvec::smallvec;
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
    /// Optimizer items' state, by parameter.
    moments: Vec<Option<crate::lower::optimizer::Moments>>,
    /// Reduced gradients of the step (the output of the first micro-batch's reduction).
    reduced: Option<BufferId>,
    /// Slices kept by integer reshard.
    kept: Vec<BufferId>,
}

pub(crate) struct Fsdp2 {
    comms: Comms,
    copy_in: StreamId,
    gather: StreamId,
    reduce: StreamId,
    outer: StreamId,
    groups: Vec<GroupState>,
    /// Gathers issued and not copied out, by group.
    issued: Vec<Option<Gather>>,
    /// Whether a unit's parameters are full.
    full: Vec<bool>,
    /// Gather buffer kept by forward, with the event of its copy-out.
    held: Option<(BufferId, EventId)>,
    /// Reduction inputs in flight.
    pending: VecDeque<(BufferId, EventId)>,
    /// Last reduction event of the pass.
    last_reduce: Option<EventId>,
    /// Unsharded gradients by parameter.
    grads: Vec<Option<BufferId>>,
    grad_buffers: Vec<Option<BufferId>>,
    backward: bool,
    first: bool,
    last: bool,
    in_flight: usize,
}

impl Fsdp2 {
    pub(crate) fn new(cx: &mut Cx<'_>) -> Self {
        let fsdp = &cx.scenario.fsdp;
        let (separate, asynchronous, unify) = (
            fsdp.separate_communicators,
            fsdp.async_reduce,
            fsdp.unify_comm_stream,
        );
        let in_flight = fsdp.reduce_in_flight as usize;
        let sharded = cx.inner > 1;
        let copy_in = if sharded {
            cx.b.add_stream(StreamKind::CopyIn, -1)
        } else {
            COMPUTE
        };
        let gather = if sharded {
            cx.b.add_stream(StreamKind::AllGather, -1)
        } else {
            COMPUTE
        };
        let reduce = match (sharded && asynchronous, unify) {
            (false, _) => COMPUTE,
            (true, true) => gather,
            (true, false) => cx.b.add_stream(StreamKind::ReduceScatter, -1),
        };
        let outer = if cx.outer > 1 {
            cx.b.add_stream(StreamKind::Outer, 0)
        } else {
            COMPUTE
        };
        let comms = cx.communicators(separate);
        let groups = cx.group_ids().map(|g| Self::group_state(cx, g)).collect();
        Self {
            comms,
            copy_in,
            gather,
            reduce,
            outer,
            groups,
            issued: vec![None; cx.groups.len()],
            full: vec![false; cx.units.len()],
            held: None,
            pending: VecDeque::new(),
            last_reduce: None,
            grads: vec![None; cx.tape.params.len()],
            grad_buffers: vec![None; cx.tape.params.len()],
            backward: false,
            first: true,
            last: true,
            in_flight,
        }
    }

    fn group_state(cx: &mut Cx<'_>, g: GroupId) -> GroupState {
        let group = cx.group(g).clone();
        let precision = cx.scenario.precision;
        let stored = precision.main_params.unwrap_or(precision.compute);
        let Layout::PerParam(layout) = &group.layout else {
            return GroupState::default();
        };
        let mut state = GroupState::default();
        for (i, item) in layout.items.iter().enumerate() {
            let holds = Holds::Param(item.param);
            let bytes = item.shard_numel * stored.size();
            state
                .shards
                .push(cx.resting(Role::MainWeight, bytes, stored, group.unit, holds));
            let local = layout.local_numel(i, 0);
            state.moments.push(if group.requires_grad {
                moments(cx, group.unit, local, holds, true)
            } else {
                None
            });
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

    /// Issues a group's gather: cast and copy-in, all-gather.
    fn issue(&mut self, cx: &mut Cx<'_>, g: GroupId, rule: Rule) {
        let precision = cx.scenario.precision;
        let w = precision.compute;
        let layout = cx.group(g).layout.clone();
        let (full, shard) = (layout.full_numel(), layout.shard_numel());
        let n = self.groups[g.index()].shards.len() as u16;
        cx.b.host(rule, HostWorkKind::Hook, 1);
        cx.b.host(rule, HostWorkKind::HookParam, n);
        let kept = self.groups[g.index()].kept.clone();
        let (comm, input_numel, per_rank) = match cx.scenario.fsdp.reshard_after_forward {
            Reshard::Group(s) if !kept.is_empty() => {
                (self.comms.sub, full / u64::from(s), PerRank::SubShard)
            }
            _ => (self.comms.shard, shard, PerRank::Inner),
        };
        let sources = if kept.is_empty() {
            self.groups[g.index()].shards.clone()
        } else {
            kept
        };
        let sources: Vec<Access> = sources.into_iter().map(|id| cx.b.whole(id)).collect();
        let stored = precision.main_params.unwrap_or(w);
        let casts = self.groups[g.index()].kept.is_empty() && stored != w;
        let cast = casts.then(|| {
            let id = cx.transient_on(
                Role::GatherInput,
                input_numel * w.size(),
                w,
                self.copy_in,
                g,
            );
            cx.b.alloc(Rule::CopyIn, id);
            let whole = cx.b.whole(id);
            cx.run(
                Rule::CopyIn,
                ShardOp::MultiCopy,
                input_numel,
                w,
                self.copy_in,
                &sources,
                &[whole],
            );
            id
        });
        let buffer = cx.transient_on(Role::GatherBuffer, full * w.size(), w, self.copy_in, g);
        cx.b.alloc(rule, buffer);
        let output = cx.b.whole(buffer);
        let slice = Access {
            bytes: input_numel * w.size(),
            per_rank,
            ..output
        };
        let from = cast.map_or(sources, |id| vec![cx.b.whole(id)]);
        cx.run(
            Rule::CopyIn,
            ShardOp::MultiCopy,
            input_numel,
            w,
            self.copy_in,
            &from,
            &[slice],
        );
        cx.b.join(Rule::CopyIn, self.copy_in, self.gather);
        if let Some(comm) = comm {
            let parts = smallvec![Part {
                input: slice,
                output
            }];
            cx.b.collective(
                rule,
                self.gather,
                CollectiveKind::AllGather,
                comm,
                ReduceOp::None,
                w,
                parts,
            );
        }
        let done = cx.b.record(rule, self.gather);
        // The cast buffer lives as long as the host call that made it.
        if let Some(id) = cast {
            cx.b.free(Rule::CopyIn, id);
        }
        self.issued[g.index()] = Some(Gather {
            buffer,
            done,
            slice: slice.bytes,
        });
    }

    fn unshard(&mut self, cx: &mut Cx<'_>, unit: UnitId, rule: Rule) {
        if self.full[unit.index()] || self.comms.shard.is_none() {
            return;
        }
        let (phase, at) = (cx.b.phase(), cx.b.unit());
        cx.b.at(unit, phase);
        for g in cx.groups_of(unit) {
            if self.issued[g.index()].is_none() {
                self.issue(cx, g, rule);
            }
        }
        cx.b.at(at, phase);
    }

    /// Gates the gather streams on an earlier copy-out and drops its gather buffer.
    fn drop_held(&mut self, cx: &mut Cx<'_>) {
        if let Some((buffer, event)) = self.held.take() {
            cx.b.wait(Rule::GatherGate, event, self.copy_in);
            cx.b.wait(Rule::GatherGate, event, self.gather);
            cx.b.free(Rule::GatherGate, buffer);
        }
    }

    fn wait_for_unshard(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if std::mem::replace(&mut self.full[unit.index()], true) {
            return;
        }
        for g in cx.groups_of(unit) {
            self.copy_out(cx, g);
        }
    }

    fn copy_out(&mut self, cx: &mut Cx<'_>, g: GroupId) {
        let w = cx.compute_dtype();
        let full = self.groups[g.index()].full.clone();
        let numel = cx.group(g).layout.full_numel();
        let Some(gather) = self.issued[g.index()].take() else {
            // One rank: parameters are cast straight from the shards.
            let from: Vec<Access> = self.groups[g.index()]
                .shards
                .iter()
                .map(|id| cx.b.whole(*id))
                .collect();
            let to: Vec<Access> = full
                .iter()
                .map(|id| {
                    cx.b.alloc(Rule::CopyOut, *id);
                    cx.b.whole(*id)
                })
                .collect();
            cx.run(
                Rule::CopyOut,
                ShardOp::MultiCopy,
                numel,
                w,
                COMPUTE,
                &from,
                &to,
            );
            return;
        };
        if !self.backward {
            self.drop_held(cx);
        }
        cx.b.wait(Rule::GatherDone, gather.done, COMPUTE);
        let to: Vec<Access> = full
            .iter()
            .map(|id| {
                cx.b.alloc(Rule::CopyOut, *id);
                cx.b.whole(*id)
            })
            .collect();
        let ranks = (numel * w.size() / gather.slice) as u32;
        let from = cx.b.whole(gather.buffer);
        cx.run(
            Rule::CopyOut,
            ShardOp::CopyOut { ranks },
            numel,
            w,
            COMPUTE,
            &[from],
            &to,
        );
        let copied = cx.b.record(Rule::CopyOut, COMPUTE);
        self.held = Some((gather.buffer, copied));
        if self.backward {
            self.drop_held(cx);
        }
    }

    fn reshard(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        for g in cx.groups_of(unit) {
            for id in self.groups[g.index()].full.clone() {
                cx.b.free(Rule::Reshard, id);
            }
        }
    }

    /// Frees what a unit holds beyond its shards, the slices of an integer reshard included.
    fn release(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        self.reshard(cx, unit);
        for g in cx.groups_of(unit) {
            for slice in std::mem::take(&mut self.groups[g.index()].kept) {
                cx.b.free(Rule::ReshardGroup, slice);
            }
        }
    }

    /// Integer reshard: clone this rank's slice of every parameter for the smaller group.
    fn keep_slices(&mut self, cx: &mut Cx<'_>, unit: UnitId, ranks: u32) {
        let w = cx.compute_dtype();
        for g in cx.groups_of(unit) {
            let full = self.groups[g.index()].full.clone();
            for (i, id) in full.iter().enumerate() {
                let whole = cx.b.whole(*id);
                let bytes = whole.bytes / u64::from(ranks);
                let param = cx.group(g).params[i];
                let unit = cx.group(g).unit;
                let slice = cx.b.buffer(crate::lower::builder::NewBuffer {
                    role: Role::GatherInput,
                    bytes,
                    dtype: w,
                    pool: Pool::Caching,
                    stream: COMPUTE,
                    unit,
                    holds: Holds::Param(param),
                });
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
                    bytes / w.size(),
                    w,
                    COMPUTE,
                    &[from],
                    &[to],
                );
                self.groups[g.index()].kept.push(slice);
            }
        }
        // The backward copy-in reads the slices on its own stream.
        cx.b.join(Rule::ReshardGroup, COMPUTE, self.copy_in);
    }

    fn prefetch(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let fsdp = &cx.scenario.fsdp;
        let (order, rule, implicit) = if self.backward {
            (cx.backward_order.clone(), fsdp.prefetch_backward, 1)
        } else {
            (cx.forward_order.clone(), fsdp.prefetch_forward, 0)
        };
        let Some(at) = order.iter().position(|u| *u == unit) else {
            return;
        };
        for next in prefetch_targets(cx, &order, at, rule, implicit) {
            self.unshard(cx, next, Rule::Prefetch);
        }
    }

    fn require(&mut self, cx: &mut Cx<'_>, unit: UnitId, direction: Prefetch) {
        let issued = cx
            .groups_of(unit)
            .iter()
            .any(|g| self.issued[g.index()].is_some());
        if direction == Prefetch::Depth(0)
            && !issued
            && !self.full[unit.index()]
            && self.comms.shard.is_some()
        {
            cx.b.join(Rule::GatherGate, COMPUTE, self.copy_in);
        }
        self.unshard(cx, unit, Rule::Unshard);
        self.wait_for_unshard(cx, unit);
    }

    fn recycle(&mut self, cx: &mut Cx<'_>, limit: usize, rule: Rule) {
        while self.pending.len() > limit {
            let Some((buffer, event)) = self.pending.pop_front() else {
                break;
            };
            if self.reduce != COMPUTE {
                cx.b.wait(rule, event, COMPUTE);
            }
            cx.b.free(Rule::ReduceRelease, buffer);
        }
    }

    fn reduce(&mut self, cx: &mut Cx<'_>, g: GroupId) {
        let group = cx.group(g).clone();
        let precision = cx.scenario.precision;
        let (c, stored) = (
            precision.comm_grads,
            precision.main_params.unwrap_or(precision.compute),
        );
        let (full, shard) = (group.layout.full_numel(), group.layout.shard_numel());
        cx.b.host(Rule::Reduce, HostWorkKind::Hook, 1);
        cx.b.host(
            Rule::Reduce,
            HostWorkKind::HookParam,
            group.params.len() as u16,
        );
        self.recycle(cx, self.in_flight - 1, Rule::ReduceGate);
        let input = cx.transient_on(Role::ReduceInput, full * c.size(), c, COMPUTE, g);
        cx.b.alloc(Rule::ReduceCopyIn, input);
        let grads: Vec<BufferId> = group
            .params
            .iter()
            .filter_map(|p| self.grads[p.index()].take())
            .collect();
        let from: Vec<Access> = grads.iter().map(|id| cx.b.whole(*id)).collect();
        let whole = cx.b.whole(input);
        let ranks = cx.inner;
        cx.run(
            Rule::ReduceCopyIn,
            ShardOp::ChunkCat { ranks },
            full,
            c,
            COMPUTE,
            &from,
            &[whole],
        );
        for id in grads {
            cx.b.free(Rule::Grad, id);
        }
        cx.b.join(Rule::ReduceFork, COMPUTE, self.reduce);
        let rs = self.reduce;
        let first = self.groups[g.index()].reduced.is_none();
        // The output of the first reduction becomes the gradient; later ones are added to it.
        let role = if first && c == stored {
            Role::MainGrad
        } else {
            Role::ReduceOutput
        };
        let output = cx.transient_on(role, shard * c.size(), c, rs, g);
        cx.b.alloc(Rule::Reduce, output);
        let out = cx.b.whole(output);
        if let Some(comm) = self.comms.reduce {
            let op = self.op(cx, true);
            let parts = smallvec![Part {
                input: whole,
                output: out
            }];
            cx.b.collective(
                Rule::Reduce,
                rs,
                CollectiveKind::ReduceScatter,
                comm,
                op,
                c,
                parts,
            );
        } else {
            cx.run(Rule::Reduce, ShardOp::Copy, shard, c, rs, &[whole], &[out]);
        }
        let mut done = cx.b.record(Rule::Reduce, rs);
        let mut tail = rs;
        if self.last
            && let Some(comm) = self.comms.outer
            && first
        {
            cx.b.join(Rule::OuterReduce, rs, self.outer);
            let op = self.op(cx, false);
            let parts = smallvec![Part {
                input: out,
                output: out
            }];
            cx.b.collective(
                Rule::OuterReduce,
                self.outer,
                CollectiveKind::AllReduce,
                comm,
                op,
                c,
                parts,
            );
            tail = self.outer;
        }
        if role == Role::ReduceOutput {
            let grad = match self.groups[g.index()].reduced {
                Some(id) => id,
                None => {
                    let id =
                        cx.transient_on(Role::MainGrad, shard * stored.size(), stored, tail, g);
                    cx.b.alloc(Rule::ReduceAccumulate, id);
                    self.groups[g.index()].reduced = Some(id);
                    id
                }
            };
            let to = cx.b.whole(grad);
            let (kind, reads) = if first {
                (ShardOp::Copy, vec![out])
            } else {
                (ShardOp::Accumulate, vec![out, to])
            };
            cx.run(
                Rule::ReduceAccumulate,
                kind,
                shard,
                stored,
                tail,
                &reads,
                &[to],
            );
            if tail != rs {
                cx.b.join(Rule::ReduceAccumulate, tail, rs);
            }
            cx.b.free(Rule::Reduce, output);
            if self.last
                && !first
                && let Some(comm) = self.comms.outer
            {
                cx.b.join(Rule::OuterReduce, tail, self.outer);
                let op = self.op(cx, false);
                let parts = smallvec![Part {
                    input: to,
                    output: to
                }];
                cx.b.collective(
                    Rule::OuterReduce,
                    self.outer,
                    CollectiveKind::AllReduce,
                    comm,
                    op,
                    stored,
                    parts,
                );
                tail = self.outer;
            }
        } else {
            self.groups[g.index()].reduced = Some(output);
        }
        if tail != rs {
            // The buffer goes back to the reduce stream's list at the end of the step.
            done = cx.b.record(Rule::OuterReduce, tail);
            cx.b.wait(Rule::OuterReduce, done, rs);
        } else if role == Role::ReduceOutput {
            done = cx.b.record(Rule::Reduce, rs);
        }
        self.last_reduce = Some(done);
        self.pending.push_back((input, done));
        if rs == COMPUTE {
            self.recycle(cx, 0, Rule::ReduceGate);
        }
    }

    /// bf16 and float32 average in the collective (`_get_gradient_divide_factors`); replicas are averaged too.
    fn op(&self, cx: &Cx<'_>, _inner: bool) -> ReduceOp {
        if cx.scenario.fsdp.per_token_loss {
            ReduceOp::Sum
        } else {
            ReduceOp::Avg
        }
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

    fn micro_batch(&mut self, index: u16, last: bool) {
        self.first = index == 0;
        self.last = last;
    }

    fn forward_start(&mut self, cx: &mut Cx<'_>) {
        self.backward = false;
        for stream in [self.copy_in, self.gather] {
            cx.b.join(Rule::StepStart, COMPUTE, stream);
        }
    }

    fn pre_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let rule = cx.scenario.fsdp.prefetch_forward;
        self.require(cx, unit, rule);
        self.prefetch(cx, unit);
    }

    fn post_forward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let validation = cx.b.phase() == Phase::Validation;
        if validation {
            self.reshard(cx, unit);
        } else if cx.unit(unit).reshards {
            if let Reshard::Group(n) = cx.scenario.fsdp.reshard_after_forward {
                self.keep_slices(cx, unit, n);
            }
            self.reshard(cx, unit);
        }
    }

    fn forward_end(&mut self, cx: &mut Cx<'_>) {
        self.drop_held(cx);
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

    fn post_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        self.release(cx, unit);
        for g in cx.trained_groups_of(unit) {
            self.reduce(cx, g);
        }
    }

    fn backward_end(&mut self, cx: &mut Cx<'_>) {
        // Frozen units before the first trained one have no backward; torch's root callback runs their post-backward.
        for unit in cx.forward_order.clone() {
            self.release(cx, unit);
        }
        if let Some(event) = self.last_reduce.take()
            && self.reduce != COMPUTE
        {
            cx.b.wait(Rule::FinalFence, event, COMPUTE);
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
        let w = cx.compute_dtype();
        let buffer = match self.grads[p.index()] {
            Some(id) => id,
            None => {
                let id = match self.grad_buffers[p.index()] {
                    Some(id) => id,
                    None => {
                        let (g, _) = cx.home[p.index()];
                        let unit = cx.group(g).unit;
                        let bytes = cx.tape.params[p.index()].numel() * w.size();
                        let id = cx.b.buffer(crate::lower::builder::NewBuffer {
                            role: Role::FullGrad,
                            bytes,
                            dtype: w,
                            pool: Pool::Caching,
                            stream: COMPUTE,
                            unit,
                            holds: Holds::Param(p),
                        });
                        self.grad_buffers[p.index()] = Some(id);
                        id
                    }
                };
                cx.b.alloc(Rule::Grad, id);
                self.grads[p.index()] = Some(id);
                id
            }
        };
        Location {
            buffer,
            offset: 0,
            element: w.size(),
        }
    }

    fn optimizer_state(&mut self, cx: &mut Cx<'_>) -> Vec<ShardState> {
        let stored = cx
            .scenario
            .precision
            .main_params
            .unwrap_or(cx.scenario.precision.compute);
        cx.group_ids()
            .filter_map(|g| {
                let group = cx.group(g);
                let state = &self.groups[g.index()];
                let reduced = state.reduced?;
                let Layout::PerParam(layout) = &group.layout else {
                    return None;
                };
                let items = layout
                    .items
                    .iter()
                    .enumerate()
                    .filter(|(i, _)| layout.local_numel(*i, 0) > 0)
                    .map(|(i, item)| {
                        let numel = layout.local_numel(i, 0);
                        let bytes = numel * stored.size();
                        OptimizerItem {
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
                            state: state.moments[i],
                        }
                    })
                    .collect();
                Some(ShardState {
                    unit: group.unit,
                    items,
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
