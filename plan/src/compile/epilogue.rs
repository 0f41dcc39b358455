//! Fuses operations before or after a library kernel into it.
//!
//! A GEMM accumulates: its epilogue reads the other summand and writes the sum, which is rounded
//! once. No other kernel has to read the GEMM's result for the addition. In a block, this applies
//! to residual connections and, in backward, to gradients of an input that several layers read.
//!
//! The kernel of an embedding's gradient also writes the zeros of rows that no id refers to.

use super::overlap;
use super::schedule::Orders;
use crate::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::ir::{Module, OpKind, op};
use smallvec::SmallVec;
use std::collections::BTreeSet;

/// An addition that a GEMM absorbs.
struct Fold {
    gemm: u32,
    add: u32,
    /// What the GEMM is added to.
    other: ValueId,
}

/// Moves additions of compiled code into the GEMMs whose results nothing else reads.
pub(super) fn additions(g: &mut Graph, modules: &[Module], o: &mut Orders) {
    let mut gone = BTreeSet::new();
    let mut uses = Uses::of(g, o);
    let orders = [&o.forward, &o.backward];
    for &add in orders.into_iter().flatten() {
        let together = |fold: &Fold| {
            let shared = |op| overlap::is_shared(g, modules, &[op]);
            shared(fold.gemm) == shared(fold.add)
        };
        if let Some(fold) = find(g, o, &uses, add).filter(together) {
            apply(g, &fold);
            uses.merge(g, &fold);
            gone.insert(add);
        }
    }
    o.forward.retain(|op| !gone.contains(op));
    o.backward.retain(|op| !gone.contains(op));
}

/// Lets gradients of embeddings in compiled code write their whole tables.
pub(super) fn tables(g: &mut Graph, o: &mut Orders) {
    let region = |op: u32| o.region[op as usize];
    let mut filled = Vec::new();
    for &i in &o.backward {
        let op = &g.ops[i as usize];
        let (Act::Compute(OpKind::EmbeddingGrad), &[_, _, before]) = (op.act, &op.inputs[..])
        else {
            continue;
        };
        // An op that writes a value in place is its only user: nothing reads the zeros.
        let fill = g.producer[before.index()];
        let zeros = matches!(g.computed_by(before), Some((OpKind::Fill(op::Fill { value }), _)) if value.0 == 0.0);
        if zeros && region(i) != 0 && region(fill) == region(i) {
            filled.push((fill, i));
        }
    }
    for &(_, i) in &filled {
        g.ops[i as usize].inputs.truncate(2);
    }
    o.backward
        .retain(|op| !filled.iter().any(|(fill, _)| fill == op));
}

/// Ops that name each buffer, as positions in the order of issue.
struct Uses {
    /// `(place, op, writes)` by buffer, in order.
    of: Vec<SmallVec<[(u32, u32, bool); 4]>>,
    /// Position of each op.
    at: Vec<u32>,
}

impl Uses {
    fn of(g: &Graph, o: &Orders) -> Self {
        let mut uses = Self {
            of: vec![SmallVec::new(); g.buffers.len()],
            at: vec![u32::MAX; g.ops.len()],
        };
        for (at, &i) in o.forward.iter().chain(&o.backward).enumerate() {
            uses.at[i as usize] = at as u32;
            let op = &g.ops[i as usize];
            if op.is_view() {
                continue;
            }
            let named = op.inputs.iter().map(|v| (v, false));
            for (&v, writes) in named.chain(op.outputs.iter().map(|v| (v, true))) {
                if let Some(b) = g.buffer_of(v) {
                    uses.of[b as usize].push((at as u32, i, writes));
                }
            }
        }
        uses
    }

    /// Notes that the GEMM does what the addition did.
    fn merge(&mut self, g: &Graph, fold: &Fold) {
        let at = self.at[fold.gemm as usize];
        let op = &g.ops[fold.gemm as usize];
        for &v in op.inputs.iter().chain(&op.outputs) {
            let Some(b) = g.buffer_of(v) else { continue };
            for used in &mut self.of[b as usize] {
                if used.1 == fold.add {
                    (used.0, used.1) = (at, fold.gemm);
                }
            }
            self.of[b as usize].sort_unstable();
        }
    }
}

/// Returns the GEMM that an op's addition can be fused into: of two, the later one.
fn find(g: &Graph, o: &Orders, uses: &Uses, add: u32) -> Option<Fold> {
    let op = &g.ops[add as usize];
    let (Act::Compute(OpKind::Add), &[x, y], &[sum]) = (op.act, &op.inputs[..], &op.outputs[..])
    else {
        return None;
    };
    let fits = |v: ValueId| {
        let (a, b) = (g.value(v), g.value(sum));
        a.shape == b.shape && a.dtype == b.dtype && a.is_contiguous() && b.is_contiguous()
    };
    // A sum in a separate buffer, which holds nothing before.
    let new = g.buffer_of(sum)?;
    let first = uses.of[new as usize]
        .iter()
        .all(|u| u.0 >= uses.at[add as usize]);
    if !fits(x) || !fits(y) || !first || g.value(x).root == g.value(y).root {
        return None;
    }
    let folds = [(x, y), (y, x)].into_iter().filter_map(|(result, other)| {
        let gemm = gemm(g, o, uses, add, result)?;
        ready(g, uses, gemm, add, other).then_some(Fold { gemm, add, other })
    });
    folds.max_by_key(|f| uses.at[f.gemm as usize])
}

/// Returns the GEMM whose whole result `v` is, if only this addition reads it.
fn gemm(g: &Graph, o: &Orders, uses: &Uses, add: u32, v: ValueId) -> Option<u32> {
    let b = g.buffer_of(v)?;
    let &[(_, i, true), (_, reader, false)] = &uses.of[b as usize][..] else {
        return None;
    };
    let op: &Op = &g.ops[i as usize];
    let Act::Compute(mut kind) = op.act else {
        return None;
    };
    if *kind.accumulates()? {
        return None;
    }
    let (whole, result) = (g.value(v), g.value(op.outputs[0]));
    let all = |x: &Value| {
        x.is_contiguous()
            && x.offset == 0
            && x.numel() * x.dtype.size() == g.buffers[b as usize].bytes
    };
    let region = |op: u32| o.region[op as usize];
    (reader == add && all(whole) && all(result) && region(i) != 0 && region(i) == region(add))
        .then_some(i)
}

/// Returns whether `v` has its value when the GEMM runs, and keeps it until the addition.
fn ready(g: &Graph, uses: &Uses, gemm: u32, add: u32, v: ValueId) -> bool {
    let Root::Buffer(b) = g.value(v).root else {
        return false;
    };
    let (from, to) = (uses.at[gemm as usize], uses.at[add as usize]);
    let mut writes = uses.of[b as usize].iter().filter(|u| u.2);
    writes.clone().any(|u| u.0 < from) && !writes.any(|u| u.0 >= from && u.0 <= to)
}

/// Makes the GEMM write the sum.
fn apply(g: &mut Graph, fold: &Fold) {
    let sum = g.ops[fold.add as usize].outputs[0];
    g.producer[sum.index()] = fold.gemm;
    let op = &mut g.ops[fold.gemm as usize];
    if let Act::Compute(kind) = &mut op.act
        && let Some(accumulates) = kind.accumulates()
    {
        *accumulates = true;
    }
    op.inputs.push(fold.other);
    op.outputs[0] = sum;
}
