//! Fuses elementwise code into the GEMMs before it.
//!
//! If an elementwise kernel reads a GEMM's result, the GEMM kernel can apply the elementwise code
//! itself, while it multiplies the next tile, so that the result is not read from memory again. In
//! a block, this code is the gate of the feed-forward network, after the two GEMMs that compute
//! gate and up from one input, and its gradient, after the GEMM of the down projection's backward,
//! whose result then needs no memory at all. The result is rounded as if it had been written, so
//! that nothing else changes.
//!
//! A matmul of experts computes gate and up as the two halves of its columns. Its kernel computes
//! tiles of both halves together. In backward, the gradient of a routing weight is a dot product
//! with a row of a matmul's result: each tile sums its columns, and the sums of the tiles are added
//! afterwards.

use super::inplace::{elementwise, kind};
use super::schedule::Step;
use crate::graph::{Graph, Op, Root, Value, ValueId};
use crate::ir::{DType, OpKind, op};
use smallvec::SmallVec;
use std::ops::Range;

/// Elements of 16 bits in the unit that tensor copies address: a row starts at a multiple of it.
const LINE: u64 = 8;
/// Maximum number of steps between a GEMM and its elementwise code.
const NEAR: usize = 16;
/// Maximum number of values in memory that elementwise code may name, in addition to the factors of
/// the GEMMs.
const MAX_OPERANDS: usize = 16;
/// Minimum inner dimension of a matmul of experts that takes in the gradient of a gate. The
/// epilogue reads both factors, and a short main loop does not hide it: with 64 experts of 768
/// columns, on an H200, it made the kernel 26 us slower than both apart with an inner dimension of
/// 2,048, 5 us slower with 3,072, and 13 us faster with 4,096 (`benchmarks/experts.md`).
const DEEP: u64 = 4096;
/// Maximum number of experts: the kernel notes the first tile of each in shared memory.
const MAX_EXPERTS: u64 = 512;

/// What fusion needs to know of a GEMM.
struct Gemm<'g> {
    op: &'g Op,
    a: &'g Value,
    b: &'g Value,
    tb: bool,
    /// One matmul per expert.
    grouped: bool,
    result: &'g Value,
}

impl<'g> Gemm<'g> {
    /// Returns the GEMM that a step consists of, if a kernel with a fused epilogue can compute it:
    /// factors and result of one 16-bit type, with contiguous rows.
    fn of(g: &'g Graph, step: &Step) -> Option<Self> {
        let &[i] = &step.ops[..] else { return None };
        let op = &g.ops[i as usize];
        let (tb, grouped) = match kind(op)? {
            OpKind::Gemm(op::Gemm {
                ta: false,
                tb,
                bias: false,
                accumulate: false,
            }) => (tb, false),
            OpKind::GroupedGemm(op::GroupedGemm { tb, .. }) => (tb, true),
            _ => return None,
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
        let fits = !grouped || b.shape[0] <= MAX_EXPERTS;
        (plain(a) && plain(b) && plain(result) && whole && fits).then_some(Self {
            op,
            a,
            b,
            tb,
            grouped,
            result,
        })
    }

    /// Returns whether one kernel can make tiles of both results from one tile of their common
    /// factor.
    fn pairs(&self, other: &Self) -> bool {
        let same = |x: &Value, y: &Value| (x.root, x.offset) == (y.root, y.offset);
        let dense = !self.grouped && !other.grouped;
        dense
            && self.tb
            && other.tb
            && same(self.a, other.a)
            && self.a.numel() == other.a.numel()
            && self.b.shape == other.b.shape
            && self.result.dtype == other.result.dtype
    }
}

/// Lets the elementwise kernels among the steps from `first` on, those of one region, absorb the
/// GEMMs before them. `together` says whether two steps run while the same parameters are gathered.
pub(super) fn join(
    g: &Graph,
    steps: &mut Vec<Step>,
    first: usize,
    together: impl Fn(&Step, &Step) -> bool,
) {
    let mut at = first;
    while at < steps.len() {
        let found = behind(g, steps, first..at, &together);
        // In reverse order, so that earlier positions stay valid.
        for &p in found.iter().rev() {
            let gemm = steps.remove(p);
            at -= 1;
            steps[at].ops.insert_many(0, gemm.ops);
        }
        at += 1;
    }
}

/// Returns the positions of the GEMMs, one or two, that the step after a range of positions can
/// absorb.
fn behind(
    g: &Graph,
    steps: &[Step],
    Range { start, end: at }: Range<usize>,
    together: &impl Fn(&Step, &Step) -> bool,
) -> SmallVec<[usize; 2]> {
    let step = &steps[at];
    let mut found: SmallVec<[usize; 2]> = SmallVec::new();
    let all = |op: &Op| elementwise(op) || is_dot(op);
    if !step.ops.iter().all(|&i| all(&g.ops[i as usize])) {
        return found;
    }
    for p in (at.saturating_sub(NEAR).max(start)..at).rev() {
        let Some(gemm) = Gemm::of(g, &steps[p]) else {
            continue;
        };
        let fits = continues(g, step, &gemm)
            && together(&steps[p], step)
            && (p + 1..at).all(|b| found.contains(&b) || is_passed(g, &steps[b], gemm.op));
        if !fits {
            continue;
        }
        match found[..] {
            [] => found.push(p),
            [last] => {
                let pairs = Gemm::of(g, &steps[last]).is_some_and(|l| l.pairs(&gemm));
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

/// Returns whether a step is elementwise over the elements of a GEMM's result, in their order, and
/// reads them.
fn continues(g: &Graph, step: &Step, gemm: &Gemm<'_>) -> bool {
    let ops = || step.ops.iter().map(|&i| &g.ops[i as usize]);
    let result = gemm.result;
    let dense = |v: &Value, columns: u64| {
        let elements = result.rows() * columns;
        v.is_contiguous() && v.numel() == elements && v.dtype == result.dtype
    };
    // The columns that the elementwise code runs over.
    let columns = match step.ops.first() {
        Some(&i) if gemm.grouped => g.value(g.ops[i as usize].outputs[0]).cols(),
        _ => result.cols(),
    };
    let whole = columns == result.cols();
    if !whole && !is_half(columns, result.cols()) || whole && gemm.grouped && gemm.a.cols() < DEEP {
        return false;
    }
    let read = |op: &Op, n: usize| {
        let v = g.value(op.inputs[n]);
        let scales = kind(op) == Some(OpKind::ScaleRows) && n == 1;
        match v.root == result.root {
            true if whole => dense(v, columns),
            true => is_part(v, result, columns) && v.offset.is_multiple_of(columns),
            false if !gemm.grouped => dense(v, columns),
            false => {
                dense(v, columns)
                    || is_part(v, result, columns)
                    || scales && v.is_contiguous() && v.numel() == result.rows()
            }
        }
    };
    // A tile that has all columns of what is written adds up its part of a dot product per row.
    let dots = gemm.grouped && whole;
    let plain = |op: &Op| {
        let made = op.outputs.iter().map(|&v| g.value(v));
        let fits = match is_dot(op) {
            true => dots && made.clone().all(|v| v.is_contiguous()),
            false => elementwise(op) && made.clone().all(|v| dense(v, columns)),
        };
        fits && !matches!(kind(op), Some(OpKind::Cat { .. } | OpKind::Fill { .. }))
            && (0..op.inputs.len()).all(|n| read(op, n))
    };
    if ops().filter(|op| is_dot(op)).count() > 1 {
        return false;
    }
    // The kernel reads the factors until the end, while its results are written.
    let apart = |op: &Op| {
        let factors = [gemm.a.root, gemm.b.root];
        op.outputs
            .iter()
            .all(|&v| !factors.contains(&g.value(v).root))
    };
    let reads = |op: &Op| op.inputs.iter().any(|&v| g.value(v).root == result.root);
    let named: usize = ops().map(|op| op.inputs.len() + op.outputs.len()).sum();
    ops().all(plain) && ops().all(apart) && ops().any(reads) && named <= 2 * MAX_OPERANDS
}

/// Returns whether an op makes dot products of rows, as the gradients of choices' weights are.
fn is_dot(op: &Op) -> bool {
    kind(op) == Some(OpKind::RowDot)
}

/// Returns whether these are half of all columns, at addresses that vectors have.
fn is_half(columns: u64, all: u64) -> bool {
    2 * columns == all && columns.is_multiple_of(LINE)
}

/// Returns whether a value has some columns of each row of a result, or of a value with such rows.
fn is_part(v: &Value, result: &Value, columns: u64) -> bool {
    let lines = |&[rows, cols]: &[u64; 2]| (rows, cols) == (result.rows(), columns);
    let shape = <&[u64; 2]>::try_from(&v.shape[..]);
    let strides = <&[u64; 2]>::try_from(&v.strides[..]);
    shape.is_ok_and(lines)
        && strides.is_ok_and(|&[down, along]| along == 1 && down.is_multiple_of(LINE))
        && v.offset.is_multiple_of(LINE)
        && v.dtype == result.dtype
}

/// Returns whether a GEMM may run after a step instead of before it.
fn is_passed(g: &Graph, step: &Step, gemm: &Op) -> bool {
    let root = |&v: &ValueId| g.value(v).root;
    let result = root(&gemm.outputs[0]);
    step.ops.iter().map(|&i| &g.ops[i as usize]).all(|op| {
        let changed = |v: &ValueId| gemm.inputs.iter().any(|x| root(x) == root(v));
        op.is_view()
            || op
                .inputs
                .iter()
                .chain(&op.outputs)
                .all(|v| root(v) != result)
                && !op.outputs.iter().any(changed)
    })
}

/// Returns the inputs of a step's GEMMs, if it has a fused epilogue: they are read until the last
/// of the step's results is written, and cannot be overwritten.
pub(super) fn factors(g: &Graph, step: &Step) -> Option<SmallVec<[Root; 4]>> {
    let ops = || step.ops.iter().map(|&i| &g.ops[i as usize]);
    let gemms = ops().filter(|op| kind(op).is_some_and(|kind| kind.takes_epilogue()));
    let roots: SmallVec<[Root; 4]> = gemms
        .flat_map(|op| op.inputs.iter().map(|&v| g.value(v).root))
        .collect();
    (step.ops.len() > 1 && !roots.is_empty()).then_some(roots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{ModuleId, ParamId};
    use smallvec::smallvec;

    /// `silu(x a) * (x b)` of one region, with variations.
    struct Case {
        g: Graph,
        x: ValueId,
        gemms: [ValueId; 2],
        steps: Vec<Step>,
    }

    const SHAPE: [u64; 2] = [24, 16];

    fn param(g: &mut Graph, n: u32) -> ValueId {
        g.leaf(&[16, 16], DType::Bf16, Root::Param(ParamId(n)), false)
    }

    fn gemm(g: &mut Graph, x: ValueId, w: ValueId) -> ValueId {
        let kind = OpKind::Gemm(op::Gemm {
            ta: false,
            tb: true,
            bias: false,
            accumulate: false,
        });
        g.compute(kind, &[x, w], &[(&SHAPE, DType::Bf16)])[0]
    }

    impl Case {
        fn new() -> Self {
            let mut g = Graph::default();
            let x = g.empty(&SHAPE, DType::Bf16);
            let mut case = Self {
                gemms: [x; 2],
                g,
                x,
                steps: Vec::new(),
            };
            case.gemms = [0, 1].map(|n| case.multiply(x, n));
            case
        }

        /// Returns the last `n` ops as a step.
        fn step(&mut self, n: u32) {
            let end = self.g.ops.len() as u32;
            self.steps.push(Step {
                ops: (end - n..end).collect(),
                module: ModuleId(0),
                stage: None,
                region: 1,
                section: None,
                used: None,
                breaks: false,
            });
        }

        fn multiply(&mut self, x: ValueId, n: u32) -> ValueId {
            let w = param(&mut self.g, n);
            let v = gemm(&mut self.g, x, w);
            self.step(1);
            v
        }

        fn gate(&mut self) {
            let [a, b] = self.gemms;
            let s = self.g.unary(OpKind::Silu, a);
            self.g.binary(OpKind::Mul, s, b);
            self.step(2);
        }

        fn joined(mut self) -> Vec<SmallVec<[u32; 2]>> {
            join(&self.g, &mut self.steps, 0, |_, _| true);
            self.steps.into_iter().map(|s| s.ops).collect()
        }
    }

    #[test]
    fn a_gate_takes_over_both_gemms_of_one_factor() {
        let mut case = Case::new();
        case.gate();
        let whole: SmallVec<[u32; 2]> = smallvec![0u32, 1, 2, 3];
        assert_eq!(case.joined(), [whole]);
        // Of two factors only the later GEMM.
        let mut case = Case::new();
        let y = case.g.empty(&SHAPE, DType::Bf16);
        case.gemms[1] = case.multiply(y, 2);
        case.gate();
        let steps: [SmallVec<[u32; 2]>; 3] = [smallvec![0], smallvec![1], smallvec![2, 3, 4]];
        assert_eq!(case.joined(), steps);
        // No GEMM if parameters are gathered or freed between.
        let mut case = Case::new();
        case.gate();
        join(&case.g, &mut case.steps, 0, |_, _| false);
        assert_eq!(case.steps.len(), 3);
    }

    #[test]
    fn what_else_reads_a_result_in_between_keeps_its_gemm() {
        let mut case = Case::new();
        let first = case.gemms[0];
        case.multiply(first, 2);
        case.gate();
        // The second GEMM moves past the reader of the first.
        let steps: [SmallVec<[u32; 2]>; 3] = [smallvec![0], smallvec![2], smallvec![1, 3, 4]];
        assert_eq!(case.joined(), steps);
    }

    #[test]
    fn a_factor_that_changes_in_between_keeps_its_gemms() {
        let mut case = Case::new();
        let x = case.x;
        case.g.compute_into(OpKind::Neg, &[x], x);
        case.step(1);
        case.gate();
        let steps: [SmallVec<[u32; 2]>; 4] =
            [smallvec![0], smallvec![1], smallvec![2], smallvec![3, 4]];
        assert_eq!(case.joined(), steps);
    }

    #[test]
    fn code_that_writes_over_a_factor_or_other_elements_stays_apart() {
        let mut case = Case::new();
        let (x, a) = (case.x, case.gemms[0]);
        case.g.compute_into(OpKind::Add, &[x, a], x);
        case.step(1);
        assert_eq!(case.joined().len(), 3);
        // A sum over rows is not elementwise, and neither is an op that reads half of the columns.
        let mut case = Case::new();
        let a = case.gemms[0];
        case.g
            .compute(OpKind::SumLeading, &[a], &[(&[16], DType::Bf16)]);
        case.step(1);
        assert_eq!(case.joined().len(), 3);
        let mut case = Case::new();
        let half = case.g.slice(case.gemms[0], 1, 0, 8);
        case.g.unary(OpKind::Silu, half);
        case.step(1);
        assert_eq!(case.joined().len(), 3);
    }
}
