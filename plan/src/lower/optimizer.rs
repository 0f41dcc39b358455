//! Clipping by the global norm, and the optimizer on shards.

use super::builder::{CollectiveLaunch, NewBuffer};
use super::emitter::Emitter;
use super::inputs::LoweringInputs;
use super::kernels::KernelLaunch;
use super::muon::{self, RowGather, Rows};
use super::walk::Lifecycle;
use crate::config::{Implementation, MomentType, Optimizer, Scenario};
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CollectiveKind, CommId, DType, Fused, GroupId,
    Holds, HostWorkKind, NewtonSchulz, Param, ParamId, Part, Pieces, Pool, Real, ReduceOp, Role,
    STATE_BLOCK, ShardOp, StreamId, UnitId, Update, UpdateRule,
};
use crate::models::declare::Tree;
use crate::program::{Phase, Rule};
use crate::shard::Layout;
use smallvec::smallvec;

/// Returns, by parameter, whether Muon updates it; empty without Muon.
pub(crate) fn muon_params(scenario: &Scenario, tree: &Tree) -> Vec<bool> {
    if scenario.train.optimizer != Optimizer::Muon {
        return Vec::new();
    }
    let hidden = |p: &Param| tree.block_place(p).is_some();
    let matrix = |p: &Param| p.requires_grad && p.shape.len() == 2;
    tree.params.iter().map(|p| matrix(p) && hidden(p)).collect()
}

/// Returns the update rule of a parameter of a group, given its index in the group.
pub(crate) fn rule_of_param(inputs: &LoweringInputs<'_>, g: GroupId, index: usize) -> UpdateRule {
    match inputs.group(g).has_muon_rows(index) {
        true => UpdateRule::MuonMomentum,
        false => rule(inputs, g),
    }
}

/// Returns the update rule of a group's weights, except of [`Group::muon_rows`].
///
/// [`Group::muon_rows`]: crate::shard::Group::muon_rows
pub(crate) fn rule(inputs: &LoweringInputs<'_>, g: GroupId) -> UpdateRule {
    let group = inputs.group(g);
    if group.router_biases {
        let speed = inputs
            .scenario
            .model
            .options
            .experts
            .router_bias_update_speed;
        return UpdateRule::RouterBias(Real(speed));
    }
    if !group.muon {
        return inputs.scenario.train.optimizer.rule();
    }
    let ranks = match &group.layout {
        Layout::Flat(l) => l.shards,
        Layout::PerParam(l) => l.shards,
    };
    let sides = |p: &ParamId| {
        let shape = &inputs.tape.params[p.index()].shape;
        let (a, b) = (shape[0], shape.get(1).copied().unwrap_or(1));
        [a.min(b), a.max(b)]
    };
    let flops = |rank: u32| {
        let params = group.params.iter().enumerate();
        let own = params.filter(|(i, _)| group.layout.local_numel(*i, rank) > 0);
        own.map(|(_, p)| NewtonSchulz::matrix_flops(sides(p))).sum()
    };
    let largest = group.params.iter().map(sides);
    UpdateRule::Muon(NewtonSchulz {
        flops: (0..ranks).map(flops).max().unwrap_or(0),
        largest: largest.max_by_key(|[a, b]| a * (a + b)).unwrap_or([0, 0]),
    })
}

/// A tensor that the optimizer updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptimizerItem {
    /// Weights to update.
    pub(crate) weight: Access,
    /// Gradients.
    pub(crate) grad: Access,
    /// Elements.
    pub(crate) numel: u64,
    /// Moments and step counter.
    pub(crate) state: Option<Moments>,
}

/// Optimizer state of one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    pub(crate) first: BufferId,
    /// Second moment, for optimizers that have one.
    pub(crate) second: Option<BufferId>,
    /// Scales of the moments, if these have 8 bits.
    pub(crate) scales: [Option<BufferId>; 2],
    /// Other state that the engine keeps per tensor on the device: a step counter, or the tables of
    /// 8-bit codes.
    pub(crate) extras: [Option<BufferId>; 2],
    /// Whether the state is kept in host memory. The policy then fetches it to the device.
    pub(crate) offloaded: bool,
}

impl Moments {
    /// Returns the buffers that updates read and write, in the order of a launch's operands.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = BufferId> + use<> {
        let scales = self.scales.into_iter().flatten();
        std::iter::once(self.first).chain(self.second).chain(scales)
    }
}

/// State that one optimizer launch works on.
#[derive(Clone, Debug)]
pub(crate) struct ShardState {
    pub(crate) unit: UnitId,
    /// Rule that computes the new weights.
    pub(crate) rule: UpdateRule,
    /// Model-parallel axes along which ranks update different parameters.
    pub(crate) divided: AxisSet,
    pub(crate) items: Vec<OptimizerItem>,
    /// Ranges to which the launch also writes the new weights of its only item, in the compute
    /// dtype; with [`UpdateRule::MuonMomentum`], its update.
    pub(crate) compute: Vec<Access>,
    /// Set if the gradient of its only item consists of unreduced pieces.
    pub(crate) pieces: Option<Pieces>,
    /// Range to which the launch also writes the amax of the new weights.
    pub(crate) maxima: Option<Access>,
    /// Set if the items are rows of matrices that Muon updates.
    pub(crate) rows: Option<RowGather>,
}

/// Creates the state buffers of a tensor. They are allocated in the first step.
pub(crate) fn moments(
    out: &mut Emitter<'_>,
    (unit, rule): (UnitId, UpdateRule),
    numel: u64,
    holds: Holds,
    counter: bool,
) -> Option<Moments> {
    let states = rule.states();
    if states == 0 || numel == 0 {
        return None;
    }
    let types = out.inputs.types.moments;
    let blocks = types == MomentType::Block8 && has_blocks(numel, counter);
    let dtype = match types {
        MomentType::Block8 if !blocks => DType::F32,
        _ => types.dtype(),
    };
    let fused_adam = out.inputs.scenario.fsdp.decoupled_gradients;
    let mut extra = |bytes, what| {
        let (role, holds) = (Role::Workspace, Holds::Named(what));
        Some(out.persistent(role, bytes, DType::F32, unit, holds))
    };
    let extras = match types {
        // FusedAdam counts steps on the host.
        _ if !counter || fused_adam => [None, None],
        // `OptimState8bit` has a table of factors per tensor.
        MomentType::Block8 if blocks => {
            let mut table = || extra(1024, "table of 8-bit codes");
            [table(), if states > 1 { table() } else { None }]
        }
        // Of the engines' optimizers, only torch's AdamW has a step counter on the device.
        MomentType::F32 | MomentType::Bf16 | MomentType::F16 if states > 1 => {
            [extra(4, "adam step counter"), None]
        }
        _ => [None, None],
    };
    let mut state = |dtype: DType, n: u64| {
        out.persistent(Role::OptimizerState, n * dtype.size(), dtype, unit, holds)
    };
    let first = state(dtype, numel);
    let second = (states > 1).then(|| state(dtype, numel));
    let mut scale = |n: usize| {
        let scales = numel.div_ceil(STATE_BLOCK);
        (blocks && states > n).then(|| state(DType::F32, scales))
    };
    let scales = [scale(0), scale(1)];
    Some(Moments {
        first,
        second,
        scales,
        extras,
        offloaded: false,
    })
}

/// Returns whether moments with this number of elements are quantized to 8 bits. bitsandbytes and
/// torchao keep those of small tensors in float32; torchao also those that are not a whole number
/// of blocks (`_new_buffer`). `framework` means that the optimizer is torchao's.
fn has_blocks(numel: u64, framework: bool) -> bool {
    numel >= SMALL && (!framework || numel.is_multiple_of(STATE_BLOCK))
}

/// Minimum number of elements for 8-bit moments (`min_8bit_size`).
const SMALL: u64 = 4096;

/// Returns whether the gradient norm is computed after the updates. Nothing waits for a norm that
/// is only reported, so it must not prevent the native engine's updates from overlapping with the
/// last reductions.
pub(crate) fn late_norm(inputs: &LoweringInputs<'_>) -> bool {
    let train = &inputs.scenario.train;
    train.grad_norm && train.clip_norm <= 0.0 && inputs.engine.late_norm
}

/// Emits clipping and the update, after the policy has reduced all gradients.
pub(crate) fn step(out: &mut Emitter<'_>, life: &mut dyn Lifecycle) {
    out.b.at(UnitId(0), Phase::Clip);
    let states = life.optimizer_state(out);
    let clips = out.inputs.scenario.train.clip_norm > 0.0;
    let wanted = clips || out.inputs.scenario.train.grad_norm;
    let late = late_norm(out.inputs);
    let stream = life.optimizer_stream();
    let mut known = (wanted && !late).then(|| norm(out, life, &states, clips));
    out.b.at(UnitId(0), Phase::Optimizer);
    if out.inputs.engine.framework {
        out.b.host(Rule::Optimizer, HostWorkKind::OptimizerStep, 1);
        param_work(out, Rule::Optimizer);
    }
    for (index, state) in states.iter().enumerate() {
        if !life.is_updated(index) {
            make_moments(out, state);
        }
    }
    let scale = known.filter(|_| clips && out.inputs.engine.fused_optimizer);
    for index in life.update_order(out.inputs, states.len()) {
        let state = &states[index];
        out.b.at(state.unit, Phase::Optimizer);
        life.before_state(out, index, false);
        if !life.is_updated(index) {
            update(out, state, scale, stream);
        }
        life.after_state(out, index, false);
    }
    if late {
        out.b.at(UnitId(0), Phase::Clip);
        known = Some(norm(out, life, &states, clips));
    }
    if let Some(norm) = known {
        out.b.free(Rule::Clip, norm);
    }
}

/// Emits the host work per trained parameter of an optimizer call or of clipping. It is known for
/// jobs of transformers only.
fn param_work(out: &mut Emitter<'_>, rule: Rule) {
    let transformers = out.inputs.scenario.implementation() == Implementation::Transformers;
    if out.inputs.engine.framework && transformers {
        let trained = out.inputs.tape.params.iter().filter(|p| p.requires_grad);
        let count = trained.count() as u16;
        out.b.host(rule, HostWorkKind::OptimizerParam, count);
    }
}

/// Allocates a launch's state in the first step, unless it is offloaded.
pub(crate) fn make_moments(out: &mut Emitter<'_>, state: &ShardState) {
    let moments = state.items.iter().filter_map(|i| i.state);
    for m in moments.filter(|m| !m.offloaded) {
        out.b.first_only(|b| {
            let extras = m.extras.into_iter().flatten();
            extras
                .chain(m.buffers())
                .for_each(|id| b.alloc(Rule::State, id));
        });
    }
}

/// Launches the optimizer for one state; `scale` is the norm for clipping.
pub(crate) fn update(
    out: &mut Emitter<'_>,
    state: &ShardState,
    scale: Option<BufferId>,
    stream: StreamId,
) {
    if let Some(gather) = &state.rows {
        return update_rows(out, state, gather);
    }
    let mut reads = Vec::with_capacity(state.items.len() * 4 + 1);
    let mut writes = Vec::with_capacity(state.items.len() * 3);
    for i in &state.items {
        reads.extend([i.weight, i.grad]);
        writes.push(i.weight);
        if let Some(m) = i.state {
            for buffer in m.buffers() {
                let whole = out.b.whole(buffer);
                reads.push(whole);
                writes.push(whole);
            }
        }
    }
    let scale = scale.filter(|_| state.rule.has_gradients());
    reads.extend(scale.map(|n| out.b.whole(n)));
    writes.extend(&state.compute);
    writes.extend(state.maxima);
    let update = Update {
        rule: state.rule,
        fused: Fused {
            cast: !state.compute.is_empty(),
            pieces: state.pieces,
            maxima: state.maxima.is_some(),
        },
    };
    let elements = state.items.iter().map(|i| i.numel).sum();
    if elements > 0 {
        out.run(KernelLaunch {
            rule: Rule::Optimizer,
            op: update.into(),
            elements,
            dtype: DType::F32,
            stream,
            reads: &reads,
            writes: &writes,
        });
    }
}

/// Emits the updates of a state's matrices, of which ranks have rows, one after another.
fn update_rows(out: &mut Emitter<'_>, state: &ShardState, gather: &RowGather) {
    for (item, &param) in state.items.iter().zip(&gather.params) {
        let rows = Rows {
            param,
            weight: item.weight,
            numel: item.numel,
        };
        let new = muon::alloc_update(out, rows);
        let momentum = ShardState {
            items: vec![*item],
            compute: vec![out.b.whole(new)],
            rows: None,
            ..state.clone()
        };
        update(out, &momentum, None, COMPUTE);
        muon::apply_update(out, rows, new, gather);
    }
}

/// Emits the global gradient norm: squares are summed over local shards, then over the ranks that
/// hold different shards. With `clips`, the gradients are scaled by it, unless the optimizer's
/// kernel does so.
fn norm(
    out: &mut Emitter<'_>,
    life: &mut dyn Lifecycle,
    states: &[ShardState],
    clips: bool,
) -> BufferId {
    let pool = out.inputs.persistent_pool;
    let stream = life.optimizer_stream();
    let norm = out.b.buffer(NewBuffer {
        role: Role::Temporary,
        bytes: 4,
        dtype: DType::F32,
        pool: if stream == COMPUTE { pool } else { Pool::Host },
        stream,
        unit: UnitId(0),
        holds: Holds::Named("gradient norm"),
    });
    out.b.alloc(Rule::Clip, norm);
    param_work(out, Rule::Clip);
    let scalar = out.b.whole(norm);
    // Squares of parameters that all ranks have are added after the sum over ranks. The last sum,
    // over the shard axes, includes the parts of these axes.
    let shards = sharded_axes(out.inputs);
    let apart = |state: &ShardState| {
        let parts = state.divided.iter();
        let parts = parts.filter(|axis| !shards.contains(AxisSet::of(axis.whole())));
        parts.fold(AxisSet::EMPTY, AxisSet::with)
    };
    let mut order: Vec<usize> = (0..states.len()).collect();
    order.sort_by_key(|&n| std::cmp::Reverse(apart(&states[n])));
    let mut divided = order.first().map_or(AxisSet::EMPTY, |&n| apart(&states[n]));
    let mut first = true;
    for n in order {
        let state = &states[n];
        if !state.rule.has_gradients() {
            // The policy expects these calls for every state.
            life.before_state(out, n, true);
            life.after_state(out, n, true);
            continue;
        }
        sum_over(out, scalar, divided.without(apart(state)), stream);
        divided = apart(state);
        let mut grads: Vec<Access> = state.items.iter().map(|i| i.grad).collect();
        if !std::mem::take(&mut first) {
            grads.push(scalar);
        }
        let elements = state.items.iter().map(|i| i.numel).sum();
        life.before_state(out, n, true);
        out.run(KernelLaunch {
            rule: Rule::Clip,
            op: ShardOp::SumSquares,
            elements,
            dtype: DType::F32,
            stream,
            reads: &grads,
            writes: &[scalar],
        });
        life.after_state(out, n, true);
    }
    sum_over(out, scalar, divided, stream);
    sum_over(out, scalar, shards, stream);
    if clips && !out.inputs.engine.fused_optimizer {
        for state in states.iter().filter(|s| s.rule.has_gradients()) {
            let grads: Vec<Access> = state.items.iter().map(|i| i.grad).collect();
            let reads: Vec<Access> = grads.iter().copied().chain([scalar]).collect();
            let elements = state.items.iter().map(|i| i.numel).sum();
            out.run(KernelLaunch {
                rule: Rule::Clip,
                op: ShardOp::ClipScale,
                elements,
                dtype: DType::F32,
                stream,
                reads: &reads,
                writes: &grads,
            });
        }
    }
    norm
}

/// Sums a scalar of a stream over axes. Devices can also access pinned host memory.
fn sum_over(out: &mut Emitter<'_>, scalar: Access, axes: AxisSet, stream: StreamId) {
    // The ranks often have a communicator already. Another one would cost device memory.
    let known = out
        .b
        .program()
        .communicators
        .iter()
        .rposition(|c| c.axes == axes);
    let known = known.map(|i| CommId(i as u8));
    let Some(comm) = known.or_else(|| out.communicator("norm", axes, false)) else {
        return;
    };
    let part = Part {
        input: scalar,
        output: scalar,
    };
    out.b.join(Rule::Clip, stream, COMPUTE);
    out.collective(CollectiveLaunch {
        rule: Rule::Clip,
        stream: COMPUTE,
        kind: CollectiveKind::AllReduce,
        comm,
        reduce: ReduceOp::Sum,
        dtype: DType::F32,
        parts: smallvec![part],
        sent: None,
    });
    out.b.join(Rule::Clip, COMPUTE, stream);
}

/// Returns the axes over which optimizer shards differ: the inner one if anything is sharded; both
/// under HFSDP.
fn sharded_axes(inputs: &LoweringInputs<'_>) -> AxisSet {
    use crate::config::{OuterStrategy, Strategy};
    let inner = inputs.strategy != Strategy::NoShard;
    let outer = inputs.outer > 1 && inputs.scenario.fsdp.outer_strategy == OuterStrategy::Optim;
    match (inner, outer) {
        (true, true) => AxisSet::DATA,
        (true, false) => AxisSet::of(AxisId::DP_SHARD),
        _ => AxisSet::EMPTY,
    }
}
