//! Vector-Jacobian products. Those of views are here, those of kernels in `ops`.

use crate::graph::{Act, Graph, Op, Peers, ValueId, View};
use crate::ir::{CollectiveKind, ModelCollective, OpKind, Real, SelectedRows, op};
use crate::ops::{Contributions, Vjp, sum_to};
use smallvec::{SmallVec, smallvec};

/// Returns whether an input gets a gradient at all. Ids, labels and statistics do not.
pub(super) fn differentiable(op: &Op, input: usize) -> bool {
    match op.act {
        Act::Compute(kind) => kind.def().differentiable(input),
        Act::View(View::Precomputed) => input == 1 || input == 2,
        Act::View(View::HostSizes) => input == 0,
        Act::View(View::PeerSum(_)) => input == 1,
        Act::Collective(_) => input == 0,
        _ => true,
    }
}

/// Emits the ops that turn gradients of `op`'s outputs into gradients of its inputs, if they need
/// one.
pub(super) fn vjp(
    g: &mut Graph,
    op: &Op,
    grads: &[Option<ValueId>],
    needs: &[bool],
) -> Contributions {
    let first = grads.first().copied().flatten();
    match op.act {
        Act::View(View::Split { axis }) => split(g, op, grads, usize::from(axis)),
        Act::View(View::Precomputed) => precomputed(op, needs),
        Act::View(View::PeerSum(c)) => first.map_or_else(SmallVec::new, |dy| {
            let peers = peers(c, [2, 3, 4].map(|n| op.inputs[n]));
            smallvec![(1, g.peer_push(peers, dy))]
        }),
        Act::View(view) => first.map_or_else(SmallVec::new, |dy| {
            smallvec![(0, view_rule(g, op, view, dy))]
        }),
        Act::Compute(kind) => {
            first.map_or_else(SmallVec::new, |dy| kind.def().vjp(Vjp { g, op, dy, needs }))
        }
        Act::Collective(c) => first.map_or_else(SmallVec::new, |dy| {
            smallvec![(0, collective_rule(g, op, c, dy))]
        }),
    }
}

fn view_rule(g: &mut Graph, op: &Op, view: View, dy: ValueId) -> ValueId {
    let x = op.inputs[0];
    let shape = g.value(x).shape.clone();
    match view {
        View::Reshape => g.reshape(dy, &shape),
        View::Transpose(a, b) => g.transpose(dy, usize::from(a), usize::from(b)),
        View::Slice { axis, start } => {
            // In eager code, `slice_backward` creates contiguous zeros.
            let zeros = if g.functional() {
                g.fill_like(x, 0.0)
            } else {
                let dtype = g.value(x).dtype;
                let fill = OpKind::Fill(op::Fill { value: Real(0.0) });
                g.compute(fill, &[], &[(&shape, dtype)])[0]
            };
            let len = g.value(op.outputs[0]).shape[usize::from(axis)];
            let window = g.slice(zeros, usize::from(axis), start, len);
            g.compute_into(OpKind::Copy, &[dy], window);
            zeros
        }
        View::Expand => sum_to(g, dy, &shape),
        View::SumGradient(axis) => {
            let kind = CollectiveKind::AllReduce;
            g.collective(ModelCollective::new(kind, axis), dy, &shape)
        }
        // Compilation creates `Join` after differentiation.
        View::Split { .. }
        | View::Join { .. }
        | View::Precomputed
        | View::Pass
        | View::HostRead
        | View::HostSizes
        | View::PeerSum(_) => dy,
    }
}

/// Emits the transpose of a collective. Each rank uses the result of a gather or a scatter
/// differently, so gradients are partial sums. All ranks use the result of an all-reduce in the
/// same way, so each has the whole gradient ([`View::SumGradient`] turns it into partial sums).
fn collective_rule(g: &mut Graph, op: &Op, c: ModelCollective, dy: ValueId) -> ValueId {
    let kind = match c.kind {
        CollectiveKind::AllReduce | CollectiveKind::PeerReturn | CollectiveKind::Barrier => {
            return dy;
        }
        CollectiveKind::PeerPush => {
            return g.peer_sum(peers(c, [1, 2, 3].map(|n| op.inputs[n])), dy);
        }
        // Gradients of counted rows travel in the other direction.
        CollectiveKind::AllToAll if c.rows.is_some() => {
            return g.exchange_counted(c, dy, [op.inputs[2], op.inputs[1]]);
        }
        CollectiveKind::AllGather => CollectiveKind::ReduceScatter,
        CollectiveKind::ReduceScatter => CollectiveKind::AllGather,
        CollectiveKind::AllToAll => CollectiveKind::AllToAll,
    };
    let shape = g.value(op.inputs[0]).shape.clone();
    g.collective(ModelCollective { kind, ..c }, dy, &shape)
}

/// Returns how rows were pushed, from the sent choices, the received choices, and the places of the
/// results.
fn peers(c: ModelCollective, [sent, got, position]: [ValueId; 3]) -> Peers {
    let Some(SelectedRows::Pushed(pushed)) = c.rows else {
        unreachable!("collectives that push rows say which");
    };
    Peers {
        axis: c.axis,
        pushed,
        sent,
        got,
        position,
    }
}

fn split(g: &mut Graph, op: &Op, grads: &[Option<ValueId>], axis: usize) -> Contributions {
    let parts: SmallVec<[ValueId; 4]> = grads
        .iter()
        .zip(&op.outputs)
        .map(|(grad, &out)| grad.unwrap_or_else(|| g.fill_like(out, 0.0)))
        .collect();
    smallvec![(0, g.cat(&parts, axis))]
}

/// Returns gradients that the forward pass has computed.
fn precomputed(op: &Op, needs: &[bool]) -> Contributions {
    [1, 2]
        .into_iter()
        .filter(|&i| needs[i])
        .map(|i| (i, op.inputs[i + 2]))
        .collect()
}
