//! Casts to 8-bit floating point, and the matmuls that read them.
//!
//! `compile::float8` adds these operations to differentiated graphs, so they have no derivatives.

use super::experts::OFFSETS;
use super::signature::{Extent, Operand, Reduced, Signature, any, full, operand};
use super::{Fusion, OpDef, Operands};
use crate::ir::{DType, KernelClass, op};

const X: Operand = full("x");
const SCALE: Operand = full("the scale");
const Y: Operand = full("y");

impl OpDef for op::RowAmax {
    fn name(&self) -> &'static str {
        "row_amax"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[operand("the maxima", Extent::PerRow)]).reduces(Reduced::Input(0))
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::F32
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    /// A maximum of many numbers is as fast as their sum.
    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::FullReduce
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }
}

impl OpDef for op::Float8Scale {
    fn name(&self) -> &'static str {
        "float8_scale"
    }

    fn signature(&self) -> Signature {
        let outputs = [any("the scale"), any("its reciprocal")];
        let mut s = Signature::new(&[any("the maxima")], &outputs);
        s.inputs.extend(self.routed.then_some(OFFSETS));
        s
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::F32
    }

    fn fusion(&self) -> Fusion {
        Fusion::Alone
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::FullReduce
    }

    /// With offsets, rows that no expert reads do not count for the maximum.
    fn leaves_rows(&self, input: bool) -> bool {
        input && !self.routed
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }
}

impl OpDef for op::Float8Cast {
    fn name(&self) -> &'static str {
        "float8_cast"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, SCALE], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    /// Writes transposed codes tile by tile, as fast as contiguous ones.
    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Pointwise
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }
}

impl OpDef for op::Float8CastRows {
    fn name(&self) -> &'static str {
        "float8_cast_rows"
    }

    fn signature(&self) -> Signature {
        let outputs = [Y, operand("the reciprocals", Extent::PerRow)];
        Signature::new(&[X], &outputs).reduces(Reduced::Input(0))
    }

    fn result(&self, n: usize, _: &[DType]) -> DType {
        if n == 0 { self.to } else { DType::F32 }
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

    fn differentiable(&self, _: usize) -> bool {
        false
    }
}

impl OpDef for op::Float8CastBlocks {
    fn name(&self) -> &'static str {
        "float8_cast_blocks"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[any("the codes"), any("the reciprocals")])
    }

    fn result(&self, n: usize, _: &[DType]) -> DType {
        if n == 0 {
            self.to
        } else {
            self.block.inverse_type()
        }
    }

    fn fusion(&self) -> Fusion {
        Fusion::Alone
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        2 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: false }
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }
}

const FACTORS: [Operand; 4] = [
    any("a"),
    any("b"),
    any("the reciprocal of the scale of a"),
    any("the reciprocal of the scale of b"),
];

impl OpDef for op::ScaledGemm {
    fn name(&self) -> &'static str {
        "scaled_mm"
    }

    fn signature(&self) -> Signature {
        let mut s = Signature::new(&FACTORS, &[any("c")]);
        s.inputs.extend(self.bias.then_some(any("the bias")));
        s.inputs.extend(self.accumulate.then_some(any("c")));
        s
    }

    /// Returns the dtype of the bias, or bfloat16 without a bias.
    fn result(&self, _: usize, inputs: &[DType]) -> DType {
        inputs.get(4).copied().unwrap_or(DType::Bf16)
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        let (a, b) = (at.input(0), at.input(1));
        let bias = if self.bias { a.rows() * b.rows() } else { 0 };
        2 * a.rows() * b.rows() * a.cols() + bias
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        let (a, b) = (at.input(0), at.input(1));
        KernelClass::Gemm {
            m: a.rows(),
            n: b.rows(),
            k: a.cols(),
            batch: 1,
        }
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }
}
