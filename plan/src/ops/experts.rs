//! Experts: permutation of tokens by expert, one matmul per expert, and weighted sums of results.

use super::pointwise::Elementwise;
use super::signature::{Extent, Operand, Reduced, Signature, any, full, operand};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::graph::{Graph, Root, Value, ValueId};
use crate::ir::{DType, Indexing, KernelClass, OpKind, op};

/// Framework calls of `index_put_(accumulate=True)`, including itself: zero-filling, and a sort of
/// the indices with many small kernels (0.3 ms per call on the host of two H200 under a profiler).
const INDEX_PUT_CALLS: u8 = 20;

const POSITION: Operand = any("the positions");
/// Offsets of the first row of each expert, `[experts + 1]`. Operations that read them only work on
/// rows before the last offset.
pub(super) const OFFSETS: Operand = any("the offsets");

/// Defines the common parts of operations that turn choices of tokens into indices. Selective
/// recompute saves their results, so that every choice keeps its place.
macro_rules! indices_of_choices {
    () => {
        fn result(&self, _: usize, _: &[DType]) -> DType {
            DType::I64
        }

        fn flops(&self, _: &Operands<'_>) -> u64 {
            0
        }

        fn class(&self, _: &Operands<'_>) -> KernelClass {
            KernelClass::Strided
        }

        fn differentiable(&self, _: usize) -> bool {
            false
        }

        fn saved_by_selective_recompute(&self) -> bool {
            true
        }
    };
}

impl OpDef for op::LocalExperts {
    fn name(&self) -> &'static str {
        "local_experts"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the ids")], &[any("the ids of each rank")])
    }

    indices_of_choices!();

    /// Choices of other ranks' experts have no row here.
    fn leaves_rows(&self, _: bool) -> bool {
        self.ranks > 1
    }
}

impl OpDef for op::PushedRows {
    fn name(&self) -> &'static str {
        "pushed_rows"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the ids of each rank")], &[POSITION])
    }

    indices_of_choices!();

    /// Choices of other ranks' experts have a position, too.
    fn leaves_rows(&self, _: bool) -> bool {
        false
    }
}

impl OpDef for op::DispatchExperts {
    fn name(&self) -> &'static str {
        "dispatch_experts"
    }

    fn signature(&self) -> Signature {
        let local = any("the expert of each place");
        Signature::new(
            &[any("the ids")],
            &[local, POSITION, any("the choices of each expert")],
        )
    }

    indices_of_choices!();

    /// Places that no choice takes stay uninitialized.
    fn leaves_rows(&self, _: bool) -> bool {
        true
    }
}

/// Returns the number of rows that `position` selects, at most all rows.
fn named(rows: &Value, position: &Value, routed: Option<u64>) -> u64 {
    let most = rows.rows().min(position.numel());
    routed.map_or(most, |n| n.min(most))
}

/// Returns the size in bytes of the rows that `position` selects, at most all rows.
fn rows_used(rows: &Value, position: &Value, routed: Option<u64>) -> u64 {
    named(rows, position, routed) * rows.cols() * rows.dtype.size()
}

impl OpDef for op::SortExperts {
    fn name(&self) -> &'static str {
        "sort_experts"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the ids")], &[OFFSETS, POSITION])
    }

    indices_of_choices!();
}

/// Returns the cost class of a kernel that moves rows.
const fn moved(by: Indexing) -> KernelClass {
    match by {
        Indexing::IndexAdd => KernelClass::EmbeddingGrad,
        _ => KernelClass::Embedding,
    }
}

/// Returns the number of bytes that moving rows writes: the rows, and zeros if the kernel fills its
/// output first.
fn moved_bytes(by: Indexing, out: &Value, rows: u64) -> u64 {
    let zeros = if by.fills() {
        out.numel() * out.dtype.size()
    } else {
        0
    };
    zeros + rows
}

/// Emits the transpose of moving rows. Eager autograd saves the source if PyTorch's derivative of
/// the call uses it.
fn moved_back(mut at: Vjp<'_>, kind: OpKind, by: Indexing) -> Contributions {
    let (source, position) = (at.x(0), at.x(1));
    let dy = at.g.make_contiguous(at.dy);
    let dx = at.like(kind, &[dy, position], source);
    if by == Indexing::Index {
        at.g.dispatches(INDEX_PUT_CALLS);
    }
    if by.saves_source() {
        at.g.release(source);
    }
    Vjp::first(dx)
}

impl OpDef for op::Permute {
    fn name(&self) -> &'static str {
        self.by.call().unwrap_or("permute")
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the tokens"), POSITION], &[any("the rows")])
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        moved(self.by)
    }

    fn bytes_written(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        let out = at.output(0);
        let rows = rows_used(out, at.input(1), self.routed);
        Some(moved_bytes(self.by, out, rows))
    }

    fn differentiable(&self, n: usize) -> bool {
        n == 0
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let (by, routed) = (self.by.backward(), self.routed);
        let kind = OpKind::Unpermute(op::Unpermute { by, routed });
        moved_back(at, kind, self.by)
    }
}

impl OpDef for op::Unpermute {
    fn name(&self) -> &'static str {
        self.by.call().unwrap_or("unpermute")
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the rows"), POSITION], &[any("the tokens")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        let positions = at.input(1).numel();
        self.routed.map_or(positions, |n| n.min(positions)) * at.input(0).cols()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        moved(self.by)
    }

    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 0).then(|| rows_used(at.input(0), at.input(1), self.routed))
    }

    fn bytes_written(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        let out = at.output(0);
        let rows = if self.by.adds() {
            // Each row is read and written where it is added.
            2 * rows_used(at.input(0), at.input(1), self.routed)
        } else {
            out.numel() * out.dtype.size()
        };
        Some(moved_bytes(self.by, out, rows))
    }

    /// The sum of a token only reads the rows that its choices select.
    fn leaves_rows(&self, _: bool) -> bool {
        false
    }

    fn differentiable(&self, n: usize) -> bool {
        n == 0
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let (by, routed) = (self.by.backward(), self.routed);
        let kind = OpKind::Permute(op::Permute { by, routed });
        moved_back(at, kind, self.by)
    }
}

impl Elementwise for op::ScaleRows {
    const NAME: &'static str = "scale_rows";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let (x, w) = (at.x(0), at.x(1));
        let Vjp { g, dy, needs, .. } = at;
        let mut out = Contributions::new();
        if needs[0] {
            out.push((0, g.compute_like(OpKind::ScaleRows, &[dy, w], &[x])[0]));
        }
        if needs[1] {
            let (shape, dtype) = (g.value(w).shape.clone(), g.value(w).dtype);
            let dot = g.compute(OpKind::RowDot, &[dy, x], &[(&shape, DType::F32)])[0];
            // The gradient of a parameter has the parameter's type.
            let is_param = matches!(g.value(w).root, Root::Param(_));
            out.push((1, if is_param { g.cast(dot, dtype) } else { dot }));
        }
        out
    }
}

impl Elementwise for op::MaskRows {
    const NAME: &'static str = "mask_rows";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 0;

    fn has_gradient(&self, n: usize) -> bool {
        n == 0
    }

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let mask = at.x(1);
        Vjp::first(masked_fill(at.g, at.dy, mask))
    }
}

/// Computes `x.masked_fill(mask, 0)` with a mask of rows, `[rows, 1]`: a copy, and a kernel that
/// writes the zeros.
pub(crate) fn masked_fill(g: &mut Graph, x: ValueId, mask: ValueId) -> ValueId {
    let copy = g.compute_like(OpKind::Copy, &[x], &[x])[0];
    g.compute_into(OpKind::MaskRows, &[copy, mask], copy)
}

impl OpDef for op::RowDot {
    fn name(&self) -> &'static str {
        "row_dot"
    }

    fn signature(&self) -> Signature {
        let factor = full("an input");
        Signature::new(
            &[factor, factor],
            &[operand("a norm's statistic", Extent::PerRow)],
        )
        .reduces(Reduced::Input(0))
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::F32
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        2 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: false }
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (a, b, dy) = (at.x(0), at.x(1), at.dy);
        let mut out = Contributions::new();
        for (n, other, of) in [(0, b, a), (1, a, b)] {
            if at.needs[n] {
                out.push((n, at.like(OpKind::ScaleRows, &[other, dy], of)));
            }
        }
        out
    }
}

/// Returns the number of rows that experts compute: `routed` of them on average, or all.
fn computed(rows: &Value, routed: Option<u64>) -> u64 {
    routed.unwrap_or_else(|| rows.rows())
}

/// Returns the size in bytes of the rows that experts compute, if these are not all rows.
fn computed_bytes(rows: &Value, routed: Option<u64>) -> Option<u64> {
    routed.map(|n| n * rows.cols() * rows.dtype.size())
}

/// Returns the cost class of one matmul per expert. `[rows, n, inner]` are the total number of rows
/// of all experts and the sizes of one matrix.
fn grouped(experts: u64, [rows, n, k]: [u64; 3], weight_gradient: bool) -> KernelClass {
    KernelClass::GroupedGemm {
        rows,
        n,
        k,
        experts,
        weight_gradient,
    }
}

/// Defines the arithmetic and the bytes of a grouped matmul whose results are rows:
/// `a, b, .. -> c`, for the `routed` rows.
macro_rules! rows_of_experts {
    () => {
        fn flops(&self, at: &Operands<'_>) -> u64 {
            let a = at.input(0);
            2 * computed(a, self.routed) * a.cols() * at.output(0).cols()
        }

        fn class(&self, at: &Operands<'_>) -> KernelClass {
            let (a, c) = (at.input(0), at.output(0));
            let rows = computed(a, self.routed);
            grouped(at.input(1).shape[0], [rows, c.cols(), a.cols()], false)
        }

        fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
            (n == 0).then(|| computed_bytes(at.input(0), self.routed))?
        }

        fn bytes_written(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
            computed_bytes(at.output(0), self.routed)
        }
    };
}

impl OpDef for op::GroupedGemm {
    fn name(&self) -> &'static str {
        "grouped_mm"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("a"), any("b"), OFFSETS], &[any("c")])
    }

    rows_of_experts!();

    fn differentiable(&self, n: usize) -> bool {
        n < 2
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, needs } = at;
        let [a, b, offsets] = [0, 1, 2].map(|n| op.inputs[n]);
        let dy = g.make_contiguous(dy);
        let mut out = Contributions::new();
        if needs[0] {
            let (tb, routed) = (!self.tb, self.routed);
            let kind = OpKind::GroupedGemm(Self { tb, routed });
            let (shape, dtype) = (g.value(a).shape.clone(), g.value(a).dtype);
            let d_a = g.compute(kind, &[dy, b, offsets], &[(&shape, dtype)]);
            out.push((0, d_a[0]));
        }
        if needs[1] {
            let factors = if self.tb { [dy, a] } else { [a, dy] };
            let (shape, dtype) = (g.value(b).shape.clone(), g.value(b).dtype);
            let inputs = [factors[0], factors[1], offsets];
            let routed = self.routed;
            let kind = OpKind::GroupedGemmWeightGrad(op::GroupedGemmWeightGrad { routed });
            let d_b = g.compute(kind, &inputs, &[(&shape, dtype)]);
            out.push((1, d_b[0]));
        }
        out
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }
}

impl OpDef for op::GroupedGemmWeightGrad {
    fn name(&self) -> &'static str {
        "grouped_mm_weight_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("a"), any("b"), OFFSETS], &[any("the weights")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        let a = at.input(0);
        2 * computed(a, self.routed) * a.cols() * at.input(1).cols()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        let (a, b) = (at.input(0), at.input(1));
        let rows = computed(a, self.routed);
        grouped(at.output(0).shape[0], [rows, a.cols(), b.cols()], true)
    }

    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        (n < 2).then(|| computed_bytes(at.input(n), self.routed))?
    }

    /// Sums run over the rows of experts.
    fn leaves_rows(&self, _: bool) -> bool {
        false
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::RepeatRows {
    fn name(&self) -> &'static str {
        "repeat_rows"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the table"), OFFSETS], &[any("the rows")])
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Embedding
    }

    fn bytes_written(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        computed_bytes(at.output(0), self.routed)
    }

    fn differentiable(&self, n: usize) -> bool {
        n == 0
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (table, offsets) = (at.x(0), at.x(1));
        let dy = at.g.make_contiguous(at.dy);
        let routed = self.routed;
        let kind = OpKind::RepeatRowsGrad(op::RepeatRowsGrad { routed });
        Vjp::first(at.like(kind, &[dy, offsets], table))
    }
}

impl OpDef for op::RepeatRowsGrad {
    fn name(&self) -> &'static str {
        "repeat_rows_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the rows"), OFFSETS], &[any("the table")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        computed(at.input(0), self.routed) * at.input(0).cols()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::ColumnReduce
    }

    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 0).then(|| computed_bytes(at.input(0), self.routed))?
    }

    /// Sums run over the rows of experts.
    fn leaves_rows(&self, _: bool) -> bool {
        false
    }

    fn is_backward(&self) -> bool {
        true
    }
}

const SCALED: [Operand; 5] = [
    any("a"),
    any("b"),
    any("the reciprocal of the scale of a"),
    any("the reciprocal of the scale of b"),
    OFFSETS,
];

impl OpDef for op::ScaledGroupedGemm {
    fn name(&self) -> &'static str {
        "scaled_grouped_mm"
    }

    fn signature(&self) -> Signature {
        Signature::new(&SCALED, &[any("c")])
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::Bf16
    }

    rows_of_experts!();

    fn differentiable(&self, _: usize) -> bool {
        false
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }
}

impl OpDef for op::ScaledGroupedGemmWeightGrad {
    fn name(&self) -> &'static str {
        "scaled_grouped_mm_weight_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&SCALED, &[any("the weights")])
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::Bf16
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        let a = at.input(0);
        let rows = self.routed.unwrap_or_else(|| a.cols());
        2 * rows * a.rows() * at.input(1).rows()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        let (a, b) = (at.input(0), at.input(1));
        let rows = self.routed.unwrap_or_else(|| a.cols());
        grouped(at.output(0).shape[0], [rows, a.rows(), b.rows()], true)
    }

    /// The rows of experts are the inner dimension of both operands.
    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        let columns = |rows| at.input(n).rows() * rows * at.input(n).dtype.size();
        (n < 2).then(|| self.routed.map(columns))?
    }

    /// Sums run over the rows of experts.
    fn leaves_rows(&self, _: bool) -> bool {
        false
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }

    fn is_backward(&self) -> bool {
        true
    }
}
