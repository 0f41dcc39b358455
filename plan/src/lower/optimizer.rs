//! Clipping by global norm, and the optimizer on shards.

use super::builder::NewBuffer;
use super::context::Cx;
use super::walk::Lifecycle;
use crate::config::{Optimizer, PolicyKind};
use crate::ir::{
    Access, BufferId, COMPUTE, CollectiveKind, CommId, DType, Holds, HostWorkKind, Part, Pieces,
    ReduceOp, Role, ShardOp, StreamId, UnitId,
};
use crate::program::{Axis, Communicator, Phase, Rule};
use smallvec::smallvec;

/// One tensor the optimizer updates.
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
    pub(crate) second: BufferId,
    /// Step counter, where the engine keeps one a tensor on the device.
    pub(crate) step: Option<BufferId>,
    /// It rests in host memory: the policy brings it to the device.
    pub(crate) offloaded: bool,
}

/// What one optimizer launch works on.
#[derive(Clone, Debug)]
pub(crate) struct ShardState {
    pub(crate) unit: UnitId,
    pub(crate) items: Vec<OptimizerItem>,
    /// Where the launch leaves the new weights of its one item a second time, in the compute dtype.
    pub(crate) compute: Vec<Access>,
    /// The gradient of its one item is in pieces.
    pub(crate) pieces: Option<Pieces>,
}

/// Makes the state buffers of a tensor (they are allocated in the first step).
pub(crate) fn moments(
    cx: &mut Cx<'_>,
    unit: UnitId,
    numel: u64,
    holds: Holds,
    counter: bool,
) -> Option<Moments> {
    if cx.scenario.train.optimizer != Optimizer::Adamw || numel == 0 {
        return None;
    }
    let dtype = cx.scenario.precision.moments;
    let bytes = numel * dtype.size();
    let step = counter.then(|| {
        cx.resting(
            Role::Workspace,
            4,
            DType::F32,
            unit,
            Holds::Named("adam step counter"),
        )
    });
    let first = cx.resting(Role::OptimizerState, bytes, dtype, unit, holds);
    let second = cx.resting(Role::OptimizerState, bytes, dtype, unit, holds);
    Some(Moments {
        first,
        second,
        step,
        offloaded: false,
    })
}

/// Whether the gradient norm comes after the updates: nothing waits for one that only is reported, so it must not keep the
/// native engine's updates from running beside the last reductions.
pub(crate) fn late_norm(cx: &Cx<'_>) -> bool {
    let train = &cx.scenario.train;
    train.grad_norm && train.clip_norm <= 0.0 && cx.scenario.fsdp.policy == PolicyKind::Native
}

/// Clipping and the update; the policy has reduced all gradients.
pub(crate) fn step(cx: &mut Cx<'_>, life: &mut dyn Lifecycle) {
    cx.b.at(UnitId(0), Phase::Clip);
    let states = life.optimizer_state(cx);
    let clips = cx.scenario.train.clip_norm > 0.0;
    let wanted = clips || cx.scenario.train.grad_norm;
    let late = late_norm(cx);
    let mut known = (wanted && !late).then(|| norm(cx, life, &states, clips));
    cx.b.at(UnitId(0), Phase::Optimizer);
    if cx.scenario.fsdp.policy != PolicyKind::Native {
        cx.b.host(Rule::Optimizer, HostWorkKind::OptimizerStep, 1);
    }
    for (index, state) in states.iter().enumerate() {
        if !life.is_updated(index) {
            make_moments(cx, state);
        }
    }
    let scale = known.filter(|_| clips && cx.scenario.fsdp.policy == PolicyKind::Native);
    for index in life.update_order(cx, states.len()) {
        let state = &states[index];
        cx.b.at(state.unit, Phase::Optimizer);
        life.before_state(cx, index, false);
        if !life.is_updated(index) {
            update(cx, state, scale, COMPUTE);
        }
        life.after_state(cx, index, false);
    }
    if late {
        cx.b.at(UnitId(0), Phase::Clip);
        known = Some(norm(cx, life, &states, clips));
    }
    if let Some(norm) = known {
        cx.b.free(Rule::Clip, norm);
    }
}

/// Allocates a launch's state in the first step, unless it rests in host memory.
pub(crate) fn make_moments(cx: &mut Cx<'_>, state: &ShardState) {
    let moments = state.items.iter().filter_map(|i| i.state);
    for m in moments.filter(|m| !m.offloaded) {
        cx.b.first_only(|b| {
            m.step
                .into_iter()
                .chain([m.first, m.second])
                .for_each(|id| b.alloc(Rule::State, id));
        });
    }
}

/// The optimizer's launch over one state; `scale`: the norm by which it clips.
pub(crate) fn update(
    cx: &mut Cx<'_>,
    state: &ShardState,
    scale: Option<BufferId>,
    stream: StreamId,
) {
    let mut reads = Vec::with_capacity(state.items.len() * 4 + 1);
    let mut writes = Vec::with_capacity(state.items.len() * 3);
    for i in &state.items {
        reads.extend([i.weight, i.grad]);
        writes.push(i.weight);
        if let Some(m) = i.state {
            let both = [cx.b.whole(m.first), cx.b.whole(m.second)];
            reads.extend(both);
            writes.extend(both);
        }
    }
    reads.extend(scale.map(|n| cx.b.whole(n)));
    writes.extend(&state.compute);
    let (cast, pieces) = (!state.compute.is_empty(), state.pieces);
    let kind = match cx.scenario.train.optimizer {
        Optimizer::Adamw => ShardOp::AdamW { cast, pieces },
        Optimizer::Sgd => ShardOp::Sgd { cast, pieces },
    };
    let elements = state.items.iter().map(|i| i.numel).sum();
    if elements > 0 {
        cx.run(
            Rule::Optimizer,
            kind,
            elements,
            DType::F32,
            stream,
            &reads,
            &writes,
        );
    }
}

/// Global gradient norm: squares summed over local shards, then over the ranks that hold different ones. With `clips` the
/// gradients are scaled by it, except where the optimizer's kernel does that.
fn norm(cx: &mut Cx<'_>, life: &mut dyn Lifecycle, states: &[ShardState], clips: bool) -> BufferId {
    let pool = cx.rest_pool;
    let norm = cx.b.buffer(NewBuffer {
        role: Role::Temporary,
        bytes: 4,
        dtype: DType::F32,
        pool,
        stream: COMPUTE,
        unit: UnitId(0),
        holds: Holds::Named("gradient norm"),
    });
    cx.b.alloc(Rule::Clip, norm);
    let scalar = cx.b.whole(norm);
    for (n, state) in states.iter().enumerate() {
        let mut grads: Vec<Access> = state.items.iter().map(|i| i.grad).collect();
        if n > 0 {
            grads.push(scalar);
        }
        let elements = state.items.iter().map(|i| i.numel).sum();
        life.before_state(cx, n, true);
        cx.run(
            Rule::Clip,
            ShardOp::SumSquares,
            elements,
            DType::F32,
            COMPUTE,
            &grads,
            &[scalar],
        );
        life.after_state(cx, n, true);
    }
    if let Some((axis, size, stride)) = norm_axis(cx) {
        // The ranks often have a communicator already; another would cost device memory.
        let same = |c: &Communicator| (c.axis, c.size, c.stride) == (axis, size, stride);
        let known = cx.b.communicators.iter().rposition(same);
        let comm = match known {
            Some(i) => CommId(i as u8),
            None => cx.b.add_communicator(Communicator {
                name: "norm".to_owned(),
                axis,
                size,
                stride,
                copy_engine: false,
            }),
        };
        let part = Part {
            input: scalar,
            output: scalar,
        };
        cx.b.collective(
            Rule::Clip,
            COMPUTE,
            CollectiveKind::AllReduce,
            comm,
            ReduceOp::Sum,
            DType::F32,
            smallvec![part],
        );
    }
    if clips && cx.scenario.fsdp.policy != PolicyKind::Native {
        for state in states {
            let grads: Vec<Access> = state.items.iter().map(|i| i.grad).collect();
            let reads: Vec<Access> = grads.iter().copied().chain([scalar]).collect();
            let elements = state.items.iter().map(|i| i.numel).sum();
            cx.run(
                Rule::Clip,
                ShardOp::ClipScale,
                elements,
                DType::F32,
                COMPUTE,
                &reads,
                &grads,
            );
        }
    }
    norm
}

/// Ranks whose optimizer shards differ: the inner axis where anything is sharded, both axes under HFSDP.
fn norm_axis(cx: &Cx<'_>) -> Option<(Axis, u32, u32)> {
    use crate::config::{OuterStrategy, Strategy};
    let inner = cx.strategy != Strategy::NoShard;
    let outer = cx.outer > 1 && cx.scenario.fsdp.outer_strategy == OuterStrategy::Optim;
    match (inner, outer) {
        (true, true) => Some((Axis::World, cx.world(), 1)),
        (true, false) => Some((Axis::Shard, cx.inner, 1)),
        _ => None,
    }
}
