//! Building blocks of the flat-buffer policies (`native`, `megatron`): state at rest, gathers and reductions of one
//! parameter group, by strategy.
//!
//! Notation: S padded elements of a group, I and O the inner and outer sizes; W, M, G the compute weights, main weights
//! and gradients at rest (Megatron-FSDP `param_and_grad_buffer.py`, DDP configuration tables).

use super::builder::NewBuffer;
use super::context::{Comms, Cx};
use super::optimizer::{Moments, OptimizerItem, ShardState, moments};
use super::walk::Location;
use crate::model::Real;
use crate::program::{
    Access, BufferId, COMPUTE, CollectiveKind, EventId, GroupId, Holds, ParamId, Part, PerRank,
    ReduceOp, Role, Rule, ShardOp, StreamId,
};
use crate::scenario::{OuterStrategy, PolicyKind, Strategy};
use crate::shard::{Layout, mesh};
use crate::units::DType;
use smallvec::smallvec;
use std::collections::BTreeMap;

/// Streams of a flat policy; equal ids where streams are shared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlatStreams {
    pub(crate) gather: StreamId,
    pub(crate) reduce: StreamId,
    pub(crate) outer: StreamId,
}

/// Buffers of one group.
#[derive(Clone, Debug)]
pub(crate) struct GroupState {
    /// W at rest: the shard, or all of it; `None` when every parameter has a buffer of its own.
    pub(crate) weight: Option<BufferId>,
    /// W of a group that no axis shards: native parameters.
    pub(crate) params: Vec<BufferId>,
    /// M, where it is not W itself.
    pub(crate) main: Option<BufferId>,
    /// G at rest.
    pub(crate) grad: Option<Access>,
    /// Optimizer state.
    pub(crate) moments: Option<Moments>,
    /// Gathered weights.
    pub(crate) full: Option<BufferId>,
    /// S.
    pub(crate) numel: u64,
}

/// State and building blocks.
pub(crate) struct Flat {
    pub(crate) comms: Comms,
    pub(crate) streams: FlatStreams,
    pub(crate) groups: Vec<GroupState>,
    /// Host twins of the buffers that rest in host memory, by device buffer.
    pub(super) twins: BTreeMap<BufferId, BufferId>,
    /// Streams to and from the host.
    pub(super) host: Option<(StreamId, StreamId)>,
    /// Buffer behind the groups' G, where one allocation holds them all.
    grad_arena: Option<BufferId>,
    w: DType,
    g: DType,
    c: DType,
    weight_sharded: bool,
    grad_sharded: bool,
    outer_optim: bool,
    inner: u64,
    outer: u64,
}

impl Flat {
    pub(crate) fn new(
        cx: &mut Cx<'_>,
        comms: Comms,
        streams: FlatStreams,
        one_grad_arena: bool,
    ) -> Self {
        let precision = cx.scenario.precision;
        let mut flat = Self {
            comms,
            streams,
            groups: Vec::new(),
            twins: BTreeMap::new(),
            host: None,
            grad_arena: None,
            w: precision.compute,
            g: precision.main_grads,
            c: precision.comm_grads,
            weight_sharded: mesh::weight_sharded(cx.strategy),
            grad_sharded: mesh::grad_sharded(cx.strategy),
            outer_optim: cx.outer > 1 && cx.scenario.fsdp.outer_strategy == OuterStrategy::Optim,
            inner: u64::from(cx.inner),
            outer: u64::from(cx.outer),
        };
        // The native engine lets W be the optimizer's buffer when the dtypes agree (main-branch rewrite's aliasing);
        // production Megatron-FSDP keeps M apart whenever a main dtype is asked for.
        let main = precision
            .main_params
            .filter(|m| *m != precision.compute || cx.scenario.fsdp.policy == PolicyKind::Megatron);
        for g in cx.group_ids() {
            flat.groups.push(flat.group_state(cx, g, main));
        }
        if one_grad_arena {
            flat.merge_grads(cx);
        }
        flat.offload(cx);
        flat
    }

    fn group_state(&self, cx: &mut Cx<'_>, id: GroupId, main: Option<DType>) -> GroupState {
        let group = cx.group(id).clone();
        let holds = Holds::Group(id);
        let numel = group.layout.full_numel();
        let mut state = GroupState {
            weight: None,
            params: Vec::new(),
            main: None,
            grad: None,
            moments: None,
            full: None,
            numel,
        };
        if cx.strategy == Strategy::NoShard && !self.outer_optim {
            for p in &group.params {
                let bytes = cx.tape.params[p.index()].numel() * self.w.size();
                state.params.push(cx.resting(
                    Role::ModelWeight,
                    bytes,
                    self.w,
                    group.unit,
                    Holds::Param(*p),
                ));
            }
        } else {
            let n = if self.weight_sharded {
                numel / self.inner
            } else {
                numel
            };
            state.weight = Some(cx.resting(
                Role::ModelWeight,
                n * self.w.size(),
                self.w,
                group.unit,
                holds,
            ));
        }
        if group.requires_grad {
            let own = self.optimizer_numel(cx, numel);
            state.main =
                main.map(|m| cx.resting(Role::MainWeight, own * m.size(), m, group.unit, holds));
            let at_rest = if self.grad_sharded {
                numel / self.inner
            } else {
                numel
            };
            let grad = cx.resting(
                Role::MainGrad,
                at_rest * self.g.size(),
                self.g,
                group.unit,
                holds,
            );
            state.grad = Some(cx.b.whole(grad));
            state.moments = moments(
                cx,
                group.unit,
                own,
                holds,
                cx.scenario.fsdp.policy != PolicyKind::Native,
            );
        }
        if self.weight_sharded {
            let stream = self.streams.gather;
            state.full =
                Some(cx.transient(Role::FullWeight, numel * self.w.size(), self.w, stream, id));
        }
        state
    }

    /// Elements of M and of each moment.
    fn optimizer_numel(&self, cx: &Cx<'_>, numel: u64) -> u64 {
        let inner = if mesh::optim_sharded(cx.strategy) {
            numel / self.inner
        } else {
            numel
        };
        if self.outer_optim {
            inner / self.outer
        } else {
            inner
        }
    }

    fn merge_grads(&mut self, cx: &mut Cx<'_>) {
        let total: u64 = self
            .groups
            .iter()
            .filter_map(|g| g.grad)
            .map(|a| a.bytes)
            .sum();
        if total == 0 {
            return;
        }
        let arena = cx.resting(
            Role::MainGrad,
            total,
            self.g,
            crate::program::UnitId(0),
            Holds::Named("gradients of all groups"),
        );
        let mut offset = 0;
        for grad in self.groups.iter_mut().filter_map(|g| g.grad.as_mut()) {
            *grad = Access {
                buffer: arena,
                offset,
                bytes: grad.bytes,
                per_rank: PerRank::Same,
            };
            offset += grad.bytes;
        }
        self.grad_arena = Some(arena);
    }

    /// Section `Init`: W, M and G of every group.
    pub(crate) fn init(&self, cx: &mut Cx<'_>) {
        for (i, state) in self.groups.iter().enumerate() {
            cx.b.at(cx.groups[i].unit, crate::program::Phase::Init);
            let moments = state.moments.filter(|m| m.offloaded);
            let moments = moments.iter().flat_map(|m| [&m.first, &m.second]);
            let resting = state.weight.iter().chain(&state.params).chain(&state.main);
            for id in resting.chain(moments) {
                cx.b.alloc(Rule::State, self.twins.get(id).copied().unwrap_or(*id));
            }
            if let (None, Some(grad)) = (self.grad_arena, state.grad) {
                let id = grad.buffer;
                cx.b.alloc(Rule::State, self.twins.get(&id).copied().unwrap_or(id));
            }
        }
        if let Some(arena) = self.grad_arena {
            cx.b.alloc(Rule::State, arena);
        }
    }

    pub(crate) fn state(&self, g: GroupId) -> &GroupState {
        &self.groups[g.index()]
    }

    /// Whether weights of a unit must be gathered in this pass: always for sharded weights, on the first micro-batch
    /// where the optimizer updated only a shard of replicated ones (ZeRO-1, ZeRO-2).
    pub(crate) fn gathers(&self, cx: &Cx<'_>, first_micro_batch: bool) -> bool {
        self.weight_sharded || (first_micro_batch && mesh::optim_sharded(cx.strategy))
    }

    pub(crate) fn weight_sharded(&self) -> bool {
        self.weight_sharded
    }

    pub(crate) fn grad_sharded(&self) -> bool {
        self.grad_sharded
    }

    pub(crate) fn comm_dtype(&self) -> DType {
        self.c
    }

    /// Full weight of a parameter.
    pub(crate) fn weight(&self, cx: &Cx<'_>, p: ParamId) -> Location {
        let (g, i) = cx.home[p.index()];
        let state = self.state(g);
        let element = self.w.size();
        let offset = cx.flat_offset(p) * element;
        match (state.full, state.weight) {
            (Some(full), _) => Location {
                buffer: full,
                offset,
                element,
            },
            (None, Some(rest)) => Location {
                buffer: rest,
                offset,
                element,
            },
            (None, None) => Location {
                buffer: state.params[i as usize],
                offset: 0,
                element,
            },
        }
    }

    /// Outer all-gather of a group's W shard (HFSDP, first micro-batch); leaves the gather stream waiting for it.
    fn gather_outer(&self, cx: &mut Cx<'_>, g: GroupId) {
        let (Some(comm), Some(rest)) = (self.comms.outer, self.state(g).weight) else {
            return;
        };
        let whole = cx.b.whole(rest);
        let input = Access {
            bytes: whole.bytes / self.outer,
            per_rank: PerRank::Outer,
            ..whole
        };
        cx.b.join(Rule::GatherGate, COMPUTE, self.streams.outer);
        let parts = smallvec![Part {
            input,
            output: whole
        }];
        let stream = self.streams.outer;
        cx.b.collective(
            Rule::OuterGather,
            stream,
            CollectiveKind::AllGather,
            comm,
            ReduceOp::None,
            self.w,
            parts,
        );
        cx.b.join(Rule::OuterGather, stream, self.streams.gather);
    }

    /// Issues the gather of a group on the gather stream; the caller has allocated `full` and placed the gates.
    pub(crate) fn gather(
        &self,
        cx: &mut Cx<'_>,
        rule: Rule,
        g: GroupId,
        first_micro_batch: bool,
        from: Option<Access>,
    ) {
        let state = self.state(g);
        if self.outer_optim && first_micro_batch {
            self.gather_outer(cx, g);
        }
        let Some(rest) = state.weight else { return };
        let whole = cx.b.whole(rest);
        let (comm, part) = match (from, state.full) {
            (Some(input), Some(full)) => (
                self.comms.sub,
                Part {
                    input,
                    output: cx.b.whole(full),
                },
            ),
            (None, Some(full)) => (
                self.comms.shard,
                Part {
                    input: whole,
                    output: cx.b.whole(full),
                },
            ),
            // Replicated W: every rank refreshed its slice, gather in place.
            _ => {
                let input = Access {
                    bytes: whole.bytes / self.inner,
                    per_rank: PerRank::Inner,
                    ..whole
                };
                (
                    self.comms.shard,
                    Part {
                        input,
                        output: whole,
                    },
                )
            }
        };
        let Some(comm) = comm else { return };
        let stream = self.streams.gather;
        if from.is_none() {
            // Its own part only: the outer axis has refreshed that, the others' parts are as old as the last step.
            self.nan_check(cx, stream, g, part.input);
        }
        cx.b.collective(
            rule,
            stream,
            CollectiveKind::AllGather,
            comm,
            ReduceOp::None,
            self.w,
            smallvec![part],
        );
    }

    fn scale(cx: &Cx<'_>) -> ShardOp {
        ShardOp::Scale {
            factor: Real(1.0 / f64::from(cx.world())),
        }
    }

    /// How the inner reduction scales, and whether its input must be multiplied first (bf16 without fused scaling:
    /// Megatron-FSDP `gradient_reduce_preprocessing`).
    pub(crate) fn scaling(&self, cx: &Cx<'_>) -> (ReduceOp, bool) {
        let fsdp = &cx.scenario.fsdp;
        let factor = 1.0 / f64::from(cx.world());
        if fsdp.per_token_loss {
            (ReduceOp::Sum, false)
        } else if fsdp.average_in_collective {
            (ReduceOp::Avg, false)
        } else if self.c == DType::F32 {
            (ReduceOp::PremulSum(factor), false)
        } else if fsdp.policy == PolicyKind::Native && cx.outer == 1 {
            (ReduceOp::Avg, false)
        } else {
            (ReduceOp::Sum, true)
        }
    }

    /// Reduces a full gradient that is sharded at rest. `input` holds S elements in the communication dtype. With
    /// `in_place` the result lands in rank's slice of the input, else in G itself or in a buffer of its own. Returns the
    /// event after which `input` may be released and G holds the sum.
    pub(crate) fn reduce_sharded(
        &self,
        cx: &mut Cx<'_>,
        g: GroupId,
        input: Access,
        first: bool,
        last: bool,
        in_place: bool,
    ) -> EventId {
        let rs = self.streams.reduce;
        cx.b.join(Rule::ReduceFork, COMPUTE, rs);
        self.nan_check(cx, rs, g, input);
        let (op, scale_first) = self.scaling(cx);
        if scale_first {
            let n = input.bytes / self.c.size();
            let scale = Self::scale(cx);
            cx.run(Rule::Scale, scale, n, self.c, rs, &[input], &[input]);
        }
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        let shard_bytes = input.bytes / self.inner;
        self.visit_for(cx, grad.buffer, !first, rs);
        let direct = first && self.c == self.g && !in_place;
        let (output, temp) = if direct {
            (grad, None)
        } else if in_place {
            (
                Access {
                    bytes: shard_bytes,
                    per_rank: PerRank::Inner,
                    ..input
                },
                None,
            )
        } else {
            let id = cx.transient_on(Role::ReduceOutput, shard_bytes, self.c, rs, g);
            cx.b.alloc(Rule::Reduce, id);
            (cx.b.whole(id), Some(id))
        };
        if let Some(comm) = self.comms.reduce {
            let parts = smallvec![Part { input, output }];
            cx.b.collective(
                Rule::Reduce,
                rs,
                CollectiveKind::ReduceScatter,
                comm,
                op,
                self.c,
                parts,
            );
        }
        if !direct {
            let (kind, reads) = if first {
                (ShardOp::Copy, vec![output])
            } else {
                (ShardOp::Accumulate, vec![output, grad])
            };
            cx.run(
                Rule::ReduceAccumulate,
                kind,
                grad.bytes / self.g.size(),
                self.g,
                rs,
                &reads,
                &[grad],
            );
        }
        if let Some(id) = temp {
            cx.b.free(Rule::Reduce, id);
        }
        self.nan_check(cx, rs, g, grad);
        let done = cx.b.record(Rule::Reduce, rs);
        let outer = if last {
            self.reduce_outer(cx, grad, rs)
        } else {
            None
        };
        let tail = if outer.is_some() {
            self.streams.outer
        } else {
            rs
        };
        self.leave(cx, grad.buffer, true, tail);
        outer.unwrap_or(done)
    }

    /// Reduces a gradient that rests in full (DDP, ZeRO-1), once a step.
    pub(crate) fn reduce_full(&self, cx: &mut Cx<'_>, g: GroupId) -> EventId {
        let rs = self.streams.reduce;
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        let numel = self.state(g).numel;
        cx.b.join(Rule::ReduceFork, COMPUTE, rs);
        self.nan_check(cx, rs, g, grad);
        let cast = (self.c != self.g).then(|| {
            let id = cx.transient_on(Role::ReduceInput, numel * self.c.size(), self.c, rs, g);
            cx.b.alloc(Rule::ReduceCopyIn, id);
            let whole = cx.b.whole(id);
            cx.run(
                Rule::ReduceCopyIn,
                ShardOp::Copy,
                numel,
                self.c,
                rs,
                &[grad],
                &[whole],
            );
            id
        });
        let input = cast.map_or(grad, |id| cx.b.whole(id));
        // One rank on the inner axis: the outer reduction averages.
        let (op, scale_first) = match self.comms.reduce {
            Some(_) => self.scaling(cx),
            None => (ReduceOp::None, false),
        };
        if scale_first {
            let scale = Self::scale(cx);
            cx.run(Rule::Scale, scale, numel, self.c, rs, &[input], &[input]);
        }
        let sharded = mesh::optim_sharded(cx.strategy);
        let part = |a: Access| {
            if sharded {
                Access {
                    bytes: a.bytes / self.inner,
                    per_rank: PerRank::Inner,
                    ..a
                }
            } else {
                a
            }
        };
        if let Some(comm) = self.comms.reduce {
            let kind = if sharded {
                CollectiveKind::ReduceScatter
            } else {
                CollectiveKind::AllReduce
            };
            // ZeRO-1 reduces into the rank's own slice of its input: the in-place form NCCL documents.
            let parts = smallvec![Part {
                input,
                output: part(input)
            }];
            cx.b.collective(Rule::Reduce, rs, kind, comm, op, self.c, parts);
        }
        let mine = part(grad);
        if let Some(id) = cast {
            let n = mine.bytes / self.g.size();
            cx.run(
                Rule::ReduceAccumulate,
                ShardOp::Copy,
                n,
                self.g,
                rs,
                &[part(input)],
                &[mine],
            );
            cx.b.free(Rule::ReduceRelease, id);
        }
        let done = cx.b.record(Rule::Reduce, rs);
        self.reduce_outer(cx, mine, rs).unwrap_or(done)
    }

    fn reduce_outer(&self, cx: &mut Cx<'_>, shard: Access, after: StreamId) -> Option<EventId> {
        let comm = self.comms.outer?;
        let stream = self.streams.outer;
        cx.b.join(Rule::OuterReduce, after, stream);
        let op = if cx.scenario.fsdp.average_in_collective
            || self.inner == 1 && !cx.scenario.fsdp.per_token_loss
        {
            ReduceOp::Avg
        } else {
            ReduceOp::Sum
        };
        let (kind, output) = if self.outer_optim {
            (
                CollectiveKind::ReduceScatter,
                Access {
                    bytes: shard.bytes / self.outer,
                    per_rank: PerRank::Outer,
                    ..shard
                },
            )
        } else {
            (CollectiveKind::AllReduce, shard)
        };
        let parts = smallvec![Part {
            input: shard,
            output
        }];
        cx.b.collective(Rule::OuterReduce, stream, kind, comm, op, self.g, parts);
        Some(cx.b.record(Rule::OuterReduce, stream))
    }

    pub(crate) fn nan_check(&self, cx: &mut Cx<'_>, stream: StreamId, g: GroupId, what: Access) {
        if cx.scenario.fsdp.nan_check {
            let flag = cx.transient_on(Role::Temporary, 4, DType::F32, stream, g);
            cx.b.alloc(Rule::NanCheck, flag);
            let out = cx.b.whole(flag);
            cx.run(
                Rule::NanCheck,
                ShardOp::NanCheck,
                what.bytes / 2,
                DType::F32,
                stream,
                &[what],
                &[out],
            );
            let event = cx.b.record(Rule::NanCheck, stream);
            super::walk::host_sync(cx, Rule::NanCheck, event);
            cx.b.free(Rule::NanCheck, flag);
        }
    }

    /// How the optimizer's part of a buffer moves from rank to rank; `sharded`: the buffer holds the inner shard already.
    fn optimizer_slice(&self, cx: &Cx<'_>, sharded: bool) -> PerRank {
        if self.outer_optim {
            PerRank::Outer
        } else if mesh::optim_sharded(cx.strategy) && !sharded {
            PerRank::Inner
        } else {
            PerRank::Same
        }
    }

    /// The part of G that this rank's optimizer reads.
    fn optimizer_grad(&self, cx: &Cx<'_>, state: &GroupState) -> Option<Access> {
        let grad = state.grad?;
        let numel = self.optimizer_numel(cx, state.numel);
        Some(Access {
            bytes: numel * self.g.size(),
            per_rank: self.optimizer_slice(cx, self.grad_sharded),
            ..grad
        })
    }

    /// The part of W that this rank's optimizer owns, as ranges (several where parameters have buffers of their own).
    fn own_weights(&self, cx: &Cx<'_>, state: &GroupState) -> Vec<Access> {
        match state.weight {
            Some(rest) => {
                let bytes = self.optimizer_numel(cx, state.numel) * self.w.size();
                vec![Access {
                    buffer: rest,
                    offset: 0,
                    bytes,
                    per_rank: self.optimizer_slice(cx, self.weight_sharded),
                }]
            }
            None => state.params.iter().map(|p| cx.b.whole(*p)).collect(),
        }
    }

    /// One optimizer launch a group.
    pub(crate) fn optimizer_state(&self, cx: &Cx<'_>) -> Vec<ShardState> {
        cx.group_ids()
            .filter_map(|g| {
                let state = self.state(g);
                let grad = self.optimizer_grad(cx, state)?;
                let numel = self.optimizer_numel(cx, state.numel);
                let item = |weight, grad, numel, moments| OptimizerItem {
                    weight,
                    grad,
                    numel,
                    state: moments,
                };
                let items = match state.main {
                    Some(main) => vec![item(cx.b.whole(main), grad, numel, state.moments)],
                    None => self.items_of_weights(cx, g, grad, numel),
                };
                Some(ShardState {
                    unit: cx.group(g).unit,
                    items,
                })
            })
            .collect()
    }

    /// Without M the optimizer updates W itself; native parameters are separate buffers over one flat gradient.
    fn items_of_weights(
        &self,
        cx: &Cx<'_>,
        g: GroupId,
        grad: Access,
        numel: u64,
    ) -> Vec<OptimizerItem> {
        let state = self.state(g);
        let weights = self.own_weights(cx, state);
        if weights.len() == 1 && state.weight.is_some() {
            return vec![OptimizerItem {
                weight: weights[0],
                grad,
                numel,
                state: state.moments,
            }];
        }
        let group = cx.group(g);
        let Layout::Flat(layout) = &group.layout else {
            return Vec::new();
        };
        layout
            .items
            .iter()
            .zip(weights)
            .enumerate()
            .map(|(i, (item, weight))| OptimizerItem {
                weight,
                grad: Access {
                    offset: grad.offset + item.offset * self.g.size(),
                    bytes: item.numel * self.g.size(),
                    ..grad
                },
                numel: item.numel,
                // The moments are one flat buffer a group; the launch names them once.
                state: state.moments.filter(|_| i == 0),
            })
            .collect()
    }

    /// Compute weights from main weights, group by group.
    pub(crate) fn refresh(&self, cx: &mut Cx<'_>, stream: StreamId) {
        cx.b.join(Rule::Refresh, COMPUTE, stream);
        for g in cx.group_ids() {
            self.refresh_group(cx, g, stream);
        }
    }

    /// One group's compute weights from its main weights.
    pub(crate) fn refresh_group(&self, cx: &mut Cx<'_>, g: GroupId, stream: StreamId) {
        {
            let state = self.state(g).clone();
            let Some(main) = state.main else { return };
            cx.b.at(cx.group(g).unit, crate::program::Phase::Refresh);
            let whole = cx.b.whole(main);
            let to = self.own_weights(cx, &state);
            let n = self.optimizer_numel(cx, state.numel);
            let Layout::Flat(layout) = &cx.group(g).layout else {
                return;
            };
            if state.weight.is_some() {
                cx.run(
                    Rule::Refresh,
                    ShardOp::Copy,
                    n,
                    self.w,
                    stream,
                    &[whole],
                    &to,
                );
                return;
            }
            // Parameters with buffers of their own: the layout's order need not be theirs, and it may have holes.
            let element = whole.bytes / state.numel.max(1);
            let from: Vec<Access> = layout
                .items
                .iter()
                .map(|i| Access {
                    offset: i.offset * element,
                    bytes: i.numel * element,
                    ..whole
                })
                .collect();
            let n = layout.payload_numel();
            cx.run(
                Rule::Refresh,
                ShardOp::MultiCopy,
                n,
                self.w,
                stream,
                &from,
                &to,
            );
        }
    }
}

impl Cx<'_> {
    /// A transient of a group outside the double-buffer pattern.
    pub(crate) fn transient_on(
        &mut self,
        role: Role,
        bytes: u64,
        dtype: DType,
        stream: StreamId,
        g: GroupId,
    ) -> BufferId {
        if let Some(id) = self.made.get(&(role, g, stream)) {
            return *id;
        }
        let unit = self.group(g).unit;
        let pool = self.rest_pool;
        let id = self.b.buffer(NewBuffer {
            role,
            bytes,
            dtype,
            pool,
            stream,
            unit,
            holds: Holds::Group(g),
        });
        self.made.insert((role, g, stream), id);
        id
    }
}

/// Zeroes the ranges of a fresh full-size gradient buffer that no parameter covers: the reduction reads them.
pub(crate) fn fill_padding(cx: &mut Cx<'_>, g: GroupId, full: Access, dtype: DType) {
    let Layout::Flat(layout) = &cx.group(g).layout else {
        return;
    };
    let element = dtype.size();
    let mut items: Vec<(u64, u64)> = layout
        .items
        .iter()
        .map(|i| (i.offset, i.offset + i.numel))
        .collect();
    items.sort_unstable();
    let mut gaps = Vec::new();
    let mut at = 0;
    for (start, end) in items.into_iter().chain([(layout.numel, layout.numel)]) {
        if start > at {
            gaps.push(Access {
                offset: full.offset + at * element,
                bytes: (start - at) * element,
                ..full
            });
        }
        at = at.max(end);
    }
    if !gaps.is_empty() {
        let n = gaps.iter().map(|a| a.bytes / element).sum();
        cx.run(Rule::Grad, ShardOp::Zero, n, dtype, COMPUTE, &[], &gaps);
    }
}
