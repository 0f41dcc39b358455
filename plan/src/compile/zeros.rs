//! Zeros that compiled forward saves for backward.
//!
//! `index_copy`, which brings rows into the order of experts, and backward of `x[index]`, which
//! brings results back, start from equal zeros. AOTAutograd (torch 2.11) traces forward and
//! backward of a graph together, makes equal tensors once, and saves them: one as large as the rows
//! of experts per layer. Where the host reads counts, the graph is broken and each side makes its
//! own.

use super::schedule::Orders;
use crate::graph::{Act, Buffer, Graph, Op, Root, Value, ValueId};
use crate::ir::{Indexing, OpKind, Real, op};
use std::collections::BTreeMap;

/// Makes such zeros in forward and keeps them for backward.
pub(super) fn save(g: &mut Graph, o: &mut Orders) {
    // A checkpoint saves nothing but its inputs.
    let again = moves(g, o, &o.backward, Indexing::IndexCopy);
    if g.ops.iter().any(Op::is_host_sizes) || !again.is_empty() {
        return;
    }
    let mut before: BTreeMap<u32, u32> = BTreeMap::new();
    for i in moves(g, o, &o.forward, Indexing::IndexCopy) {
        let result = g.ops[i as usize].outputs[0];
        let same = |j: &u32| {
            let other = &g.ops[*j as usize];
            let (a, b) = (g.value(result), g.value(other.outputs[0]));
            other.module == g.ops[i as usize].module && (a.dtype, &a.shape) == (b.dtype, &b.shape)
        };
        let backward = moves(g, o, &o.backward, Indexing::IndexPut);
        let Some(user) = backward.into_iter().find(same) else {
            continue;
        };
        let (zeros, buffer) = like(g, result);
        let fill = OpKind::Fill(op::Fill { value: Real(0.0) });
        before.insert(i, o.add(g, i, Act::Compute(fill), &[], &[zeros]));
        g.saved.push((user, buffer));
    }
    let old = std::mem::take(&mut o.forward);
    for i in old {
        o.forward.extend(before.remove(&i));
        o.forward.push(i);
    }
}

/// Returns the compiled ops of an order that move rows by a call.
fn moves(g: &Graph, o: &Orders, order: &[u32], call: Indexing) -> Vec<u32> {
    let moves = |&&i: &&u32| {
        let act = g.ops[i as usize].act;
        let by = matches!(act, Act::Compute(OpKind::Permute(op::Permute { by })) if by == call);
        by && o.region[i as usize] != 0
    };
    order.iter().filter(moves).copied().collect()
}

/// Adds a value in a buffer of its own, with the shape and type of another one.
fn like(g: &mut Graph, v: ValueId) -> (ValueId, u32) {
    let (value, buffer) = (g.value(v).clone(), g.buffers.len() as u32);
    let module = g.ops[g.producer[v.index()] as usize].module;
    g.buffers.push(Buffer {
        bytes: value.numel() * value.dtype.size(),
        dtype: value.dtype,
        module,
        logits: false,
        grad: false,
        first: ValueId(g.values.len() as u32),
    });
    let root = Root::Buffer(buffer);
    let value = Value {
        root,
        requires_grad: false,
        ..value
    };
    (g.push_value(value, g.ops.len() as u32), buffer)
}
