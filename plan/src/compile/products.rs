//! Elementwise code behind matrix products becomes part of them.
//!
//! A product's result that an elementwise kernel reads next never has to be read from memory: the kernel that multiplies has it,
//! and does the rest while it multiplies the next tile. In a block these are the gate of the feed-forward network, behind the two
//! products that make its factors of one input, and its gradient, behind the product that goes back through the last layer, whose
//! result then needs no memory at all. The result is rounded as if it had been written, so that nothing else changes.

use super::inplace::{elementwise, kind};
use super::schedule::Step;
use crate::model::graph::{Graph, Op, Root, Value, ValueId};
use crate::model::ops::OpKind;
use crate::units::DType;
use smallvec::SmallVec;

/// Elements of 16 bits in what tensor copies address: a row begins at a multiple of them.
const LINE: u64 = 8;
/// How many steps ahead of its elementwise code a product may be.
const NEAR: usize = 16;
/// Most values that elementwise code may name in memory beside the products' factors.
const MAX_OPERANDS: usize = 16;

/// A product as far as joining it matters.
struct Product<'g> {
    op: &'g Op,
    a: &'g Value,
    b: &'g Value,
    tb: bool,
    result: &'g Value,
}

impl<'g> Product<'g> {
    /// The product that a step consists of, if a kernel that multiplies and goes on can do it: factors and result of one 16-bit
    /// type, each row after row without gaps.
    fn of(g: &'g Graph, step: &Step) -> Option<Self> {
        let &[i] = &step.ops[..] else { return None };
        let op = &g.ops[i as usize];
        let Some(OpKind::Gemm {
            ta: false,
            tb,
            bias: false,
            accumulate: false,
        }) = kind(op)
        else {
            return None;
        };
        let (a, b) = (g.value(op.inputs[0]), g.value(op.inputs[1]));
        let result = g.value(op.outputs[0]);
        let plain = |v: &Value| {
            v.is_contiguous()
                && v.dtype == result.dtype
                && v.dtype.size() == DType::Bf16.size()
                && v.offset.is_multiple_of(LINE)
                && v.cols().is_multiple_of(LINE)
                && v.numel() > 0
        };
        let whole = g
            .buffer_of(op.outputs[0])
            .is_some_and(|b| g.buffers[b as usize].bytes == result.numel() * result.dtype.size());
        (plain(a) && plain(b) && plain(result) && whole).then_some(Self {
            op,
            a,
            b,
            tb,
            result,
        })
    }

    /// Whether one kernel can make tiles of both results from one tile of their common factor.
    fn pairs(&self, other: &Self) -> bool {
        let same = |x: &Value, y: &Value| (x.root, x.offset) == (y.root, y.offset);
        self.tb
            && other.tb
            && same(self.a, other.a)
            && self.a.numel() == other.a.numel()
            && self.b.shape == other.b.shape
            && self.result.dtype == other.result.dtype
    }
}

/// Lets the elementwise kernels among the steps of one region take over the products in front of them. `together`: whether two
/// steps run while the same parameters are gathered.
pub(super) fn join(g: &Graph, steps: &mut Vec<Step>, together: impl Fn(&Step, &Step) -> bool) {
    let mut at = 0;
    while at < steps.len() {
        let found = behind(g, steps, at, &together);
        // From the last one on, so that places before it stay what they are.
        for &p in found.iter().rev() {
            let product = steps.remove(p);
            at -= 1;
            steps[at].ops.insert_many(0, product.ops);
        }
        at += 1;
    }
}

/// Places of the products, one or two, that the step at a place can take over.
fn behind(
    g: &Graph,
    steps: &[Step],
    at: usize,
    together: &impl Fn(&Step, &Step) -> bool,
) -> SmallVec<[usize; 2]> {
    let step = &steps[at];
    let mut found: SmallVec<[usize; 2]> = SmallVec::new();
    let all = |i: &u32| elementwise(&g.ops[*i as usize]);
    if !step.ops.iter().all(all) {
        return found;
    }
    for p in (at.saturating_sub(NEAR)..at).rev() {
        let Some(product) = Product::of(g, &steps[p]) else {
            continue;
        };
        let fits = continues(g, step, &product)
            && together(&steps[p], step)
            && (p + 1..at).all(|b| found.contains(&b) || is_passed(g, &steps[b], product.op));
        if !fits {
            continue;
        }
        match found[..] {
            [] => found.push(p),
            [last] => {
                let pairs = Product::of(g, &steps[last]).is_some_and(|l| l.pairs(&product));
                if pairs {
                    found.insert(0, p);
                }
                return found;
            }
            _ => return found,
        }
    }
    found
}

/// Whether a step is elementwise over the elements of a product's result, in their order, and reads them.
fn continues(g: &Graph, step: &Step, product: &Product<'_>) -> bool {
    let ops = || step.ops.iter().map(|&i| &g.ops[i as usize]);
    let result = product.result;
    let dense = |v: ValueId| {
        let v = g.value(v);
        v.is_contiguous() && v.numel() == result.numel() && v.dtype == result.dtype
    };
    let plain = |op: &Op| {
        let values = op.inputs.iter().chain(&op.outputs);
        elementwise(op)
            && !matches!(kind(op), Some(OpKind::Cat { .. } | OpKind::Fill { .. }))
            && values.copied().all(dense)
    };
    // The kernel reads the factors all the time, and its results are written meanwhile.
    let apart = |op: &Op| {
        let factors = [product.a.root, product.b.root];
        op.outputs
            .iter()
            .all(|&v| !factors.contains(&g.value(v).root))
    };
    let reads = |op: &Op| op.inputs.iter().any(|&v| g.value(v).root == result.root);
    let named: usize = ops().map(|op| op.inputs.len() + op.outputs.len()).sum();
    ops().all(plain) && ops().all(apart) && ops().any(reads) && named <= 2 * MAX_OPERANDS
}

/// Whether a product may run after a step instead of before it.
fn is_passed(g: &Graph, step: &Step, product: &Op) -> bool {
    let root = |&v: &ValueId| g.value(v).root;
    let result = root(&product.outputs[0]);
    step.ops.iter().map(|&i| &g.ops[i as usize]).all(|op| {
        let changed = |v: &ValueId| product.inputs.iter().any(|x| root(x) == root(v));
        kind(op).is_none()
            || op
                .inputs
                .iter()
                .chain(&op.outputs)
                .all(|v| root(v) != result)
                && !op.outputs.iter().any(changed)
    })
}

/// What the elementwise part of a step reads, if it has products in front: the factors are read until the last of the step's
/// results is written, and cannot be written over.
pub(super) fn factors(g: &Graph, step: &Step) -> Option<SmallVec<[Root; 4]>> {
    let ops = || step.ops.iter().map(|&i| &g.ops[i as usize]);
    let products = ops().filter(|op| matches!(kind(op), Some(OpKind::Gemm { .. })));
    let roots: SmallVec<[Root; 4]> = products
        .flat_map(|op| op.inputs.iter().map(|&v| g.value(v).root))
        .collect();
    (step.ops.len() > 1 && !roots.is_empty()).then_some(roots)
}
