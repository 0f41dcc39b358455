//! Zeros that compiled forward saves for backward.
//!
//! `index_copy`, which sorts rows by expert, and the backward of `x[index]`, which sorts results
//! back, start from equal zero tensors. AOTAutograd (torch 2.11) traces forward and backward of a
//! graph together, creates equal tensors only once, and saves them: one as large as the rows of
//! experts per layer. If the host reads counts, there is a graph break, and both graphs create
//! their own zeros.

use super::schedule::Orders;
use crate::graph::{Act, Buffer, Graph, Op, Root, Value, ValueId};
use crate::ir::{Indexing, OpKind, Real, op};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// Makes such zeros in forward and keeps them for backward.
pub(super) fn save(g: &mut Graph, o: &mut Orders) {
    // A checkpoint saves nothing but its inputs.
    let again = moves(g, o, &o.backward, Indexing::IndexCopy);
    if g.ops.iter().any(Op::is_host_sizes) || !again.is_empty() {
        return;
    }
    let users = moves(g, o, &o.backward, Indexing::IndexPut);
    let mut with_zeros: BTreeMap<u32, SmallVec<[u32; 4]>> = BTreeMap::new();
    for i in moves(g, o, &o.forward, Indexing::IndexCopy) {
        let op = &g.ops[i as usize];
        let rows = g.value(op.outputs[0]);
        let same = |&&j: &&u32| {
            let other = &g.ops[j as usize];
            let zeros = g.value(other.outputs[0]);
            other.module == op.module && (rows.dtype, &rows.shape) == (zeros.dtype, &zeros.shape)
        };
        let (Root::Buffer(of), Some(&user)) = (rows.root, users.iter().find(same)) else {
            continue;
        };
        let (zeros, buffer) = like(g, op.outputs[0], of);
        let fill = OpKind::Fill(op::Fill { value: Real(0.0) });
        let filled = o.add(g, i, Act::Compute(fill), &[], &[zeros]);
        with_zeros.insert(i, smallvec![filled, i]);
        g.saved.push((user, buffer));
    }
    o.replace(with_zeros);
}

/// Returns the compiled ops of an order that move rows by a call.
fn moves(g: &Graph, o: &Orders, order: &[u32], call: Indexing) -> Vec<u32> {
    let moves = |&&i: &&u32| {
        let act = g.ops[i as usize].act;
        let by = matches!(act, Act::Compute(OpKind::Permute(op::Permute { by, .. })) if by == call);
        by && o.region[i as usize] != 0
    };
    order.iter().filter(moves).copied().collect()
}

/// Adds a value in a buffer of its own, like `v`, which is all of the buffer `of`.
fn like(g: &mut Graph, v: ValueId, of: u32) -> (ValueId, u32) {
    let buffer = g.buffers.len() as u32;
    g.buffers.push(Buffer {
        first: ValueId(g.values.len() as u32),
        ..g.buffers[of as usize]
    });
    let value = Value {
        root: Root::Buffer(buffer),
        requires_grad: false,
        ..g.value(v).clone()
    };
    (g.push_value(value, u32::MAX), buffer)
}
