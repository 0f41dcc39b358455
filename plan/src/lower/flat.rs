//! Building blocks of the flat-buffer policies (`native`, `megatron`): persistent state, gathers
//! and reductions of one parameter group, by strategy.
//!
//! Notation: S is the number of padded elements of a group. I and O are the inner and outer sizes
//! (I is that of the axis over which the group is sharded). W, M and G are the compute weights,
//! main weights and gradients that are kept between uses (Megatron-FSDP `param_and_grad_buffer.py`,
//! DDP configuration tables).

mod block_maxima;
mod block_scales;
mod casts;
pub(crate) mod columns;
mod float8;
mod optimizer;
mod reduce;

use block_scales::BlockScales;
pub(crate) use casts::GradCasts;
use columns::Columns;
pub(crate) use reduce::{ReduceTo, Reduction};

use super::builder::CollectiveLaunch;
use super::emitter::{Comms, Emitter, ShardComms};
use super::float8::Scales;
use super::inputs::{LoweringInputs, outer_optim, params_apart};
use super::kernels::KernelLaunch;
use super::optimizer::{Moments, moments, rule};
use super::streams::CommStreams;
use super::walk::Location;
use crate::config::Strategy;
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, CollectiveKind, CommId, DType, EventId, GroupId, Holds,
    ParamId, Part, ReduceOp, Role, ShardOp, StreamId, UnitId,
};
use crate::program::Rule;
use crate::shard::{Layout, placements};
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::ops::Range;

/// How one group is sharded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharded {
    /// Inner axis.
    pub(super) over: AxisId,
    /// I, the size of the inner axis.
    pub(super) ranks: u64,
    /// Strategy in effect.
    pub(super) strategy: Strategy,
    /// Whether the ranks of the outer axis update different parts.
    pub(super) outer_optim: bool,
    pub(super) comms: ShardComms,
}

impl Sharded {
    /// Returns this rank's part of a range of S elements.
    pub(super) fn part(&self, of: Access) -> Access {
        Access {
            bytes: of.bytes / self.ranks,
            per_rank: Some(self.over.into()),
            ..of
        }
    }
}

/// Elements of the optimizer's part of a group that share one state.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(super) elements: Range<u64>,
    pub(super) moments: Option<Moments>,
}

/// Buffers of one group.
#[derive(Clone, Debug)]
pub(crate) struct GroupState {
    pub(super) sharded: Sharded,
    /// Element type of W: 8 bits if ranks gather codes.
    pub(crate) w: DType,
    /// Element type of G.
    pub(super) g: DType,
    /// Element type of gradients in reductions over the inner axis.
    pub(super) c: DType,
    /// Persistent W: the shard, or all of it. `None` if each parameter has a separate buffer, or if
    /// gathers cast M.
    pub(crate) weight: Option<BufferId>,
    /// W of a group that no axis shards: the parameters of the model.
    pub(crate) params: Vec<BufferId>,
    /// M, if it is separate from W.
    pub(crate) main: Option<BufferId>,
    /// Persistent G.
    pub(crate) grad: Option<Access>,
    /// Tensors that the optimizer updates, in the order of their elements.
    pub(crate) tensors: Vec<Tensor>,
    /// Gathered weights.
    pub(crate) full: Option<BufferId>,
    /// Scales of W, if ranks gather codes with a scale per block.
    pub(super) scales: Option<BlockScales>,
    /// Codes by columns, if blocks of the transpose are others than those of `scales`.
    pub(super) columns: Option<Columns>,
    /// Result of the inner reduction in the communication dtype, while the outer axis reduces it.
    /// Only used by policy megatron if this dtype differs from that of G (`hsdp_comm_gbuf`). Other
    /// policies reduce G itself.
    pub(crate) outer_comm: Option<BufferId>,
    /// S.
    pub(crate) numel: u64,
}

impl GroupState {
    /// Returns the optimizer's states.
    pub(crate) fn moments(&self) -> impl Iterator<Item = &Moments> {
        self.tensors.iter().filter_map(|t| t.moments.as_ref())
    }
}

// Note [State of single parameters]
//
// PyTorch's optimizers keep state per parameter: here, for the rank's part of the parameter. Parts
// differ from rank to rank because shards start anywhere in a group. A program has a single list of
// buffers, with the sizes of rank 0. Other ranks keep the same number of elements and split them at
// the same places. The sum is the same, and updates are elementwise.

/// Creates the optimizer state of a group, of which this rank updates `own` elements: per parameter
/// for the engines of frameworks and for router biases, otherwise as one tensor. `apart` means that
/// the optimizer updates parameters in separate buffers without padding. See
/// Note [State of single parameters].
fn tensors(out: &mut Emitter<'_>, g: GroupId, own: u64, apart: bool) -> Vec<Tensor> {
    let unit = out.inputs.group(g).unit;
    let (framework, rule) = (out.inputs.engine.framework, rule(out.inputs, g));
    let group = out.inputs.group(g);
    let parts = match &group.layout {
        Layout::Flat(layout) if framework && apart || group.router_biases => {
            let items = layout.items.iter().filter(|i| i.numel > 0);
            let mut parts: Vec<Range<u64>> = items.map(|i| i.offset..i.offset + i.numel).collect();
            parts.sort_unstable_by_key(|part| part.start);
            parts
        }
        Layout::Flat(layout) if framework => layout.cut(0..own),
        _ => std::iter::once(0..own).collect(),
    };
    let tensor = |elements: Range<u64>| Tensor {
        moments: moments(
            out,
            (unit, rule),
            elements.end - elements.start,
            Holds::Group(g),
            framework,
        ),
        elements,
    };
    parts.into_iter().map(tensor).collect()
}

/// State and building blocks.
pub(crate) struct Flat {
    pub(crate) comms: Comms,
    /// Communicator for gathers within a part of the shard axis (integer reshard).
    sub: Option<CommId>,
    pub(crate) streams: CommStreams,
    pub(crate) groups: Vec<GroupState>,
    /// Host buffers of offloaded state, by device buffer.
    pub(super) host_copies: BTreeMap<BufferId, BufferId>,
    /// Streams for copies to and from the host.
    pub(super) host: Option<(StreamId, StreamId)>,
    /// Buffer of all groups' G, if one allocation holds them.
    grad_arena: Option<BufferId>,
    /// Scales of groups that are gathered in 8 bits.
    scales: Option<Scales>,
    /// Largest absolute values of blocks, if ranks reduce them.
    block_maxima: Option<BufferId>,
    g: DType,
    c: DType,
    weight_sharded: bool,
    outer: u64,
}

impl Flat {
    pub(crate) fn new(
        out: &mut Emitter<'_>,
        comms: Comms,
        streams: CommStreams,
        one_grad_arena: bool,
    ) -> Self {
        let types = out.inputs.types;
        let mut flat = Self {
            sub: out.sub_communicator("sub_shard"),
            comms,
            streams,
            groups: Vec::new(),
            host_copies: BTreeMap::new(),
            host: None,
            grad_arena: None,
            scales: Scales::new(out),
            block_maxima: None,
            g: types.grads,
            c: types.comm,
            weight_sharded: placements::weight_sharded(out.inputs.strategy),
            outer: u64::from(out.inputs.outer),
        };
        let main = types
            .main
            .filter(|m| *m != types.compute || out.inputs.engine.separate_main_params);
        for g in out.inputs.group_ids() {
            flat.groups.push(flat.group_state(out, g, main));
        }
        flat.block_maxima = flat.new_block_maxima(out);
        if one_grad_arena {
            flat.merge_grads(out);
        }
        flat.offload(out);
        flat
    }

    fn group_state(&self, out: &mut Emitter<'_>, id: GroupId, main: Option<DType>) -> GroupState {
        let group = out.inputs.group(id).clone();
        let holds = Holds::Group(id);
        let numel = group.layout.full_numel();
        let sharded = self.sharded(out.inputs, id);
        let shard = numel / sharded.ranks;
        let weight_sharded = placements::weight_sharded(sharded.strategy);
        // Gathers cast M, so no shard in the compute dtype is kept.
        let casts = out.inputs.scenario.fsdp.cast_before_all_gather
            && weight_sharded
            && group.requires_grad
            && main.is_some();
        let w = out.inputs.gathered_type(id);
        // Steps move biases of routers in the type that routers read, by whole numbers, which fewer
        // bits than those of float32 would round.
        let main = main.filter(|_| !group.router_biases);
        let of_counts = group.router_biases.then_some(DType::F32);
        let mut state = GroupState {
            sharded,
            w,
            g: of_counts.unwrap_or(self.g),
            c: of_counts.unwrap_or(self.c),
            weight: None,
            params: Vec::new(),
            main: None,
            grad: None,
            tensors: Vec::new(),
            full: None,
            scales: None,
            columns: None,
            outer_comm: None,
            numel,
        };
        if params_apart(out.inputs.scenario, out.inputs.engine) {
            for p in &group.params {
                let bytes = out.inputs.tape.params[p.index()].numel() * w.size();
                state.params.push(out.persistent(
                    Role::ModelWeight,
                    bytes,
                    w,
                    group.unit,
                    Holds::Param(*p),
                ));
            }
        } else if !casts {
            let n = if weight_sharded { shard } else { numel };
            state.weight =
                Some(out.persistent(Role::ModelWeight, n * w.size(), w, group.unit, holds));
        }
        let own = self.optimizer_numel(&state);
        // Nothing reads the main weights of frozen parameters.
        let main_role = match (group.requires_grad, out.inputs.engine.separate_frozen_main) {
            (true, _) => Some((Role::MainWeight, holds)),
            (false, true) => Some((Role::Workspace, Holds::Named("frozen main weights"))),
            (false, false) => None,
        };
        state.main = main
            .zip(main_role)
            .map(|(m, (role, holds))| out.persistent(role, own * m.size(), m, group.unit, holds));
        // Gradients of parameters that the engine does not manage are not in flat buffers.
        if group.requires_grad && !group.ignored {
            let kept = if placements::grad_sharded(sharded.strategy) {
                shard
            } else {
                numel
            };
            // The pieces of all ranks, until the optimizer sums them.
            let (role, n, dtype) = if out.inputs.sums_in_optimizer(id) {
                (Role::ReduceOutput, numel, state.c)
            } else {
                (Role::MainGrad, kept, state.g)
            };
            let grad = out.persistent(role, n * dtype.size(), dtype, group.unit, holds);
            state.grad = Some(out.b.whole(grad));
            let casts = out.inputs.engine.copies_for_comm && state.c != state.g;
            state.outer_comm = (casts && self.comms.outer.is_some()).then(|| {
                let reduced = if placements::optim_sharded(sharded.strategy) {
                    shard
                } else {
                    numel
                };
                let (bytes, stream) = (reduced * state.c.size(), self.streams.outer);
                out.transient(Role::ReduceOutput, bytes, state.c, stream, id)
            });
            let apart = !state.params.is_empty() && state.main.is_none();
            state.tensors = tensors(out, id, own, apart);
        }
        if weight_sharded {
            let stream = self.streams.copy_in;
            state.full = Some(out.transient(Role::FullWeight, numel * w.size(), w, stream, id));
            let block = out.inputs.scale_block().filter(|_| w.is_float8());
            let kept = (state.weight.is_some(), stream);
            state.scales = block.map(|block| BlockScales::new(out, id, block, kept));
            let rows = state.scales;
            state.columns = rows.and_then(|rows| Columns::new(out, id, rows, kept));
        }
        state
    }

    /// Returns how a group is sharded.
    fn sharded(&self, inputs: &LoweringInputs<'_>, id: GroupId) -> Sharded {
        let over = inputs.shard_axis(id);
        let everywhere = inputs.group(id).router_biases;
        let comms = self.comms.along(over);
        Sharded {
            over,
            ranks: u64::from(inputs.inner(id)),
            strategy: inputs.strategy_of(id),
            outer_optim: outer_optim(inputs.scenario) && !everywhere,
            comms: ShardComms {
                gather: comms.gather.filter(|_| !everywhere),
                ..comms
            },
        }
    }

    /// Returns the number of elements of M and of each moment.
    fn optimizer_numel(&self, state: &GroupState) -> u64 {
        let GroupState { sharded, numel, .. } = *state;
        let inner = if placements::optim_sharded(sharded.strategy) {
            numel / sharded.ranks
        } else {
            numel
        };
        if sharded.outer_optim {
            inner / self.outer
        } else {
            inner
        }
    }

    fn merge_grads(&mut self, out: &mut Emitter<'_>) {
        let total: u64 = self
            .groups
            .iter()
            .filter_map(|g| g.grad)
            .map(|a| a.bytes)
            .sum();
        if total == 0 {
            return;
        }
        let arena = out.persistent(
            Role::MainGrad,
            total,
            self.g,
            crate::ir::UnitId(0),
            Holds::Named("gradients of all groups"),
        );
        let mut offset = 0;
        for grad in self.groups.iter_mut().filter_map(|g| g.grad.as_mut()) {
            *grad = Access {
                buffer: arena,
                offset,
                bytes: grad.bytes,
                per_rank: None,
            };
            offset += grad.bytes;
        }
        self.grad_arena = Some(arena);
    }

    /// Returns whether G only lives within a step, in the native engine. A sharded G then lives
    /// from its first reduction to its optimizer, so that it is not allocated while the step's
    /// activations peak. A G that is not sharded is written by backward, and lives within a step if
    /// backward also updates the weights from it. (Megatron-FSDP keeps its gradients; an offloaded
    /// G is kept in host memory.)
    pub(crate) fn grads_of_a_step(&self, inputs: &LoweringInputs<'_>, g: GroupId) -> bool {
        let (fsdp, train) = (&inputs.scenario.fsdp, &inputs.scenario.train);
        let updated = fsdp.optimizer_in_backward && train.grad_accum == 1;
        inputs.engine.frees_gradients
            && (self.grad_sharded(g) || updated && self.grad_arena.is_none())
            && !fsdp.offload.grads
    }

    /// Emits section `Init`: W and M of every group, and G if it outlives a step.
    pub(crate) fn init(&self, out: &mut Emitter<'_>) {
        for (i, state) in self.groups.iter().enumerate() {
            out.b
                .at(out.inputs.groups[i].unit, crate::program::Phase::Init);
            let moments = state.moments().filter(|m| m.offloaded);
            let moments = moments.flat_map(Moments::buffers);
            let scales = state.scales.and_then(BlockScales::persistent);
            let columns = state.columns.into_iter().flat_map(Columns::persistent);
            let persistent = state.weight.iter().chain(&scales);
            let persistent = persistent.chain(&state.params).chain(&state.main);
            for id in persistent.copied().chain(columns).chain(moments) {
                out.b.alloc(
                    Rule::State,
                    self.host_copies.get(&id).copied().unwrap_or(id),
                );
            }
            if let (None, Some(grad), false) = (
                self.grad_arena,
                state.grad,
                self.grads_of_a_step(out.inputs, GroupId(i as u16)),
            ) {
                let id = grad.buffer;
                out.b.alloc(
                    Rule::State,
                    self.host_copies.get(&id).copied().unwrap_or(id),
                );
            }
        }
        if let Some(arena) = self.grad_arena {
            out.b.alloc(Rule::State, arena);
        }
        if let Some(scales) = &self.scales {
            scales.init(out);
        }
    }

    pub(crate) fn state(&self, g: GroupId) -> &GroupState {
        &self.groups[g.index()]
    }

    /// Returns the buffers that gathers of a group write: its full weights, and their scales. Codes
    /// by columns are gathered separately.
    pub(crate) fn gathered(&self, g: GroupId) -> impl Iterator<Item = BufferId> + use<> {
        let state = self.state(g);
        let scales = state.scales.and_then(BlockScales::gathered);
        state.full.into_iter().chain(scales)
    }

    /// Returns whether the weights of a unit must be gathered in this pass: always if they are
    /// sharded, and in the first micro-batch if they are replicated and the optimizer has updated
    /// only a shard (ZeRO-1, ZeRO-2).
    pub(crate) fn gathers(&self, inputs: &LoweringInputs<'_>, first_micro_batch: bool) -> bool {
        self.weight_sharded || (first_micro_batch && placements::optim_sharded(inputs.strategy))
    }

    /// Returns whether W is a shard, for groups that are sharded over several ranks.
    pub(crate) fn weight_sharded(&self) -> bool {
        self.weight_sharded
    }

    /// Returns whether G of a group is a shard.
    pub(crate) fn grad_sharded(&self, g: GroupId) -> bool {
        placements::grad_sharded(self.state(g).sharded.strategy)
    }

    /// Returns the element type of a group's G.
    pub(crate) fn grad_dtype(&self, g: GroupId) -> DType {
        self.state(g).g
    }

    /// Returns the element type of a group's gradients in reductions.
    pub(crate) fn comm_dtype(&self, g: GroupId) -> DType {
        self.state(g).c
    }

    /// Returns the full weight of a parameter.
    pub(crate) fn weight(&self, inputs: &LoweringInputs<'_>, p: ParamId) -> Location {
        let (g, i) = inputs.home[p.index()];
        let state = self.state(g);
        let element = state.w.size();
        let offset = inputs.flat_offset(p) * element;
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

    /// Returns the range of the full weight of a parameter.
    pub(crate) fn whole_weight(&self, inputs: &LoweringInputs<'_>, p: ParamId) -> Access {
        let at = self.weight(inputs, p);
        Access {
            buffer: at.buffer,
            offset: at.offset,
            bytes: inputs.tape.params[p.index()].numel() * at.element,
            per_rank: None,
        }
    }

    /// Gathers a group's W shard over the outer axis (HFSDP, once per step). Makes the gather
    /// stream wait for it.
    fn gather_outer(&self, out: &mut Emitter<'_>, g: GroupId) {
        let (Some(comm), Some(rest)) = (self.comms.outer, self.state(g).weight) else {
            return;
        };
        let whole = out.b.whole(rest);
        let input = Access {
            bytes: whole.bytes / self.outer,
            per_rank: Some(AxisId::DP_OUTER.into()),
            ..whole
        };
        out.b.join(Rule::GatherGate, COMPUTE, self.streams.outer);
        let parts = smallvec![Part {
            input,
            output: whole
        }];
        let stream = self.streams.outer;
        out.collective(CollectiveLaunch {
            rule: Rule::OuterGather,
            stream,
            kind: CollectiveKind::AllGather,
            comm,
            reduce: ReduceOp::None,
            dtype: self.state(g).w,
            parts,
            sent: None,
        });
        out.b.join(Rule::OuterGather, stream, self.streams.gather);
    }

    /// Casts a group's M to this rank's slice of its full weights, and returns the slice.
    fn cast(&self, out: &mut Emitter<'_>, g: GroupId, full: Access) -> Access {
        let state = self.state(g);
        let slice = state.sharded.part(full);
        if state.w.is_float8() {
            self.cast_float8(out, g, slice, Rule::CopyIn, self.streams.copy_in);
            return slice;
        }
        let main = state.main.map(|id| out.b.whole(id));
        out.run(KernelLaunch {
            rule: Rule::CopyIn,
            op: ShardOp::Copy,
            elements: slice.bytes / state.w.size(),
            dtype: state.w,
            stream: self.streams.copy_in,
            reads: main.as_slice(),
            writes: &[slice],
        });
        slice
    }

    /// Allocates the full weights of a unit's groups and gathers them on the gather stream. Returns
    /// the event after the last gather. `stale` is that of [`Flat::gather`].
    pub(crate) fn gather_unit(
        &self,
        out: &mut Emitter<'_>,
        rule: Rule,
        unit: UnitId,
        stale: bool,
    ) -> EventId {
        out.within_unit(unit, |out| {
            out.b.hook(rule, out.inputs.unit(unit).params);
            for g in out.inputs.groups_of(unit) {
                if let Some(full) = self.state(g).full {
                    out.b.alloc(rule, full);
                }
                self.gather(out, rule, g, stale, None);
            }
            out.b.record(rule, self.streams.gather)
        })
    }

    /// Issues the gather of a group on the gather stream, after its casts on the copy-in stream,
    /// which owns `full`. The caller has allocated `full` and emitted the required waits. `stale`
    /// means that this is the first gather since ranks updated their parts, so the outer axis
    /// refreshes the shard, or a cast refreshes its codes.
    pub(crate) fn gather(
        &self,
        out: &mut Emitter<'_>,
        rule: Rule,
        g: GroupId,
        stale: bool,
        from: Option<Access>,
    ) {
        let state = self.state(g);
        if state.sharded.outer_optim && stale {
            self.gather_outer(out, g);
        }
        let copy_in = self.streams.copy_in;
        let Some(output) = state.full.or(state.weight).map(|id| out.b.whole(id)) else {
            return;
        };
        let input = match (from, state.full, state.weight) {
            (Some(slice), ..) => slice,
            (None, Some(_), Some(rest)) => {
                let shard = out.b.whole(rest);
                if stale && state.w.is_float8() {
                    self.cast_float8(out, g, shard, Rule::CopyIn, copy_in);
                }
                shard
            }
            (None, Some(_), None) => self.cast(out, g, output),
            // W is replicated: each rank has refreshed its slice, which is gathered in place.
            (None, None, _) => state.sharded.part(output),
        };
        let comm = if from.is_some() {
            self.sub
        } else {
            state.sharded.comms.gather
        };
        if let Some(comm) = comm {
            self.launch_gather(out, rule, (g, comm), Part { input, output }, state.scales);
        }
    }

    /// Launches the all-gather of a group's weights (or of their codes, with the scales that ranks
    /// do not have) on the gather stream, after the casts on the copy-in stream.
    fn launch_gather(
        &self,
        out: &mut Emitter<'_>,
        rule: Rule,
        (g, comm): (GroupId, CommId),
        weights: Part,
        scales: Option<BlockScales>,
    ) {
        let state = self.state(g);
        let stream = self.streams.gather;
        out.b.join(Rule::CopyIn, self.streams.copy_in, stream);
        let scales = scales.and_then(|scales| scales.part(out, state.sharded));
        let mut parts = smallvec![weights];
        parts.extend(scales);
        out.collective(CollectiveLaunch {
            rule,
            stream,
            kind: CollectiveKind::AllGather,
            comm,
            reduce: ReduceOp::None,
            // Codes and scales are of several types.
            dtype: scales.map_or(state.w, |_| DType::U8),
            parts,
            sent: None,
        });
    }
}

/// Zeroes the ranges of a new full-size gradient buffer that no parameter covers, because the
/// reduction reads them.
pub(crate) fn fill_padding(out: &mut Emitter<'_>, g: GroupId, full: Access, dtype: DType) {
    let Layout::Flat(layout) = &out.inputs.group(g).layout else {
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
        out.zero(Rule::Grad, &gaps);
    }
}
