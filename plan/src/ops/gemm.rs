//! Matmuls.

use super::signature::{Operand, Signature, any};
use super::vjp::{gemm, sum_to};
use super::{Contributions, OpDef, Operands, Vjp, dequantize};
use crate::ir::{KernelClass, op};

const A: Operand = any("a");
const B: Operand = any("b");
const BIAS: Operand = any("the bias");
const C: Operand = any("c");

impl op::Gemm {
    /// Returns the number of rows and columns, and the inner dimension.
    fn mnk(self, at: &Operands<'_>) -> (u64, u64, u64) {
        let (a, b) = (at.input(0), at.input(1));
        let (m, k) = if self.ta {
            (a.cols(), a.rows())
        } else {
            (a.rows(), a.cols())
        };
        let n = if self.tb { b.rows() } else { b.cols() };
        (m, n, k)
    }
}

impl OpDef for op::Gemm {
    fn name(&self) -> &'static str {
        if self.bias { "addmm" } else { "mm" }
    }

    fn signature(&self) -> Signature {
        let inputs: &[Operand] = match (self.bias, self.accumulate) {
            (false, false) => &[A, B],
            (true, false) => &[A, B, BIAS],
            (false, true) => &[A, B, C],
            (true, true) => &[A, B, BIAS, C],
        };
        Signature::new(inputs, &[C])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        let (m, n, k) = self.mnk(at);
        2 * m * n * k + if self.bias { m * n } else { 0 }
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        let (m, n, k) = self.mnk(at);
        KernelClass::Gemm { m, n, k, batch: 1 }
    }

    /// `y = x w^T + b`. PyTorch computes gradients in alphabetical order of argument names: for
    /// `mm(self, mat2)`, that of the weight first; for `addmm(self, mat1, mat2)`, those of the
    /// input, of the weight, and then of the bias.
    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, needs } = at;
        let (x, w) = (op.inputs[0], op.inputs[1]);
        let dy = g.make_contiguous(dy);
        let dtype = g.value(w).dtype;
        let order: &[usize] = if self.bias { &[0, 1, 2] } else { &[1, 0] };
        let mut out = Contributions::new();
        for &i in order.iter().filter(|&&i| needs[i]) {
            let shape = g.value(op.inputs[i]).shape.clone();
            let gradient = match i {
                0 => {
                    let w = dequantize::again(g, w);
                    g.compute(gemm(false, false), &[dy, w], &[(&shape, dtype)])[0]
                }
                1 => g.compute(gemm(true, false), &[dy, x], &[(&shape, dtype)])[0],
                _ => sum_to(g, dy, &shape),
            };
            out.push((i, gradient));
            // Transposes of the operands.
            g.dispatches(2);
        }
        out
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }
}
