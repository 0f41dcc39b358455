//! Matmuls of 8-bit factors: codes are decoded, multiplied and added up in float32.

use super::error::OperandError;
use super::gemm::{Mat, multiply, operand};
use super::operands::{Operands, same};
use super::scratch::Scratch;

/// The reciprocals of a factor's scales.
struct Inverse {
    values: super::operands::Floats,
}

impl Inverse {
    /// Reads input `n`: one number, or one per row of the factor.
    fn new(o: &Operands<'_>, n: usize, rows: usize) -> Result<Self, OperandError> {
        let values = o.floats(n)?;
        if values.len() != 1 {
            same("the scales", rows, values.len())?;
        }
        Ok(Self { values })
    }

    fn of(&self, row: usize) -> f32 {
        match &*self.values {
            [one] => *one,
            each => each[row],
        }
    }
}

/// Computes `a, b, inverse_a, inverse_b[, bias][, c] -> c` with `b` stored as `[n, inner]`.
pub(super) fn run(o: &Operands<'_>, bias: bool, accumulate: bool) -> Result<(), OperandError> {
    o.expect(4 + usize::from(bias) + usize::from(accumulate), 1)?;
    let (a, b) = (operand(o, 0)?, operand(o, 1)?);
    let (m, k, n) = (a.rows, a.cols, b.rows);
    same("the inner dimension of the second operand", k, b.cols)?;
    let out = o.output(0)?;
    same("the matmul", m * n, out.numel)?;
    let inverses = [Inverse::new(o, 2, m)?, Inverse::new(o, 3, n)?];
    let bias = if bias { Some(o.floats(4)?) } else { None };
    if let Some(bias) = &bias {
        same("the bias", n, bias.len())?;
    }
    let before = if accumulate {
        let before = o.input(o.op.inputs.len() - 1)?;
        same("the accumulated matrix", m * n, before.numel)?;
        Some(before)
    } else {
        None
    };
    let mut sums = Scratch::take(m * n);
    // SAFETY: the views were checked against their ranges, and the sums are memory of their own.
    unsafe { multiply(m, n, k, a.mat, b.mat.t(), Mat::target(&mut sums, n), false) };
    let mut added = Scratch::zeroed(n);
    for (i, row) in sums.chunks_exact_mut(n).enumerate() {
        if let Some(before) = &before {
            before.load(i * n, &mut added);
        }
        let of_row = inverses[0].of(i);
        for (j, sum) in row.iter_mut().enumerate() {
            let of_column = bias.as_ref().map_or(0.0, |bias| bias[j]);
            *sum = *sum * (of_row * inverses[1].of(j)) + of_column + added[j];
        }
        out.store(i * n, row);
    }
    Ok(())
}
