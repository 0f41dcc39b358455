//! Matmuls of 8-bit operands: they are decoded, multiplied and accumulated in float32.

use super::error::OperandError;
use super::gemm::{Mat, multiply, operand};
use super::operands::{Operands, same};
use super::scratch::Scratch;
use super::strides;
use crate::base::float8::e8m0_number;
use shardlab_plan::ir::{DType, ScaleBlock};

/// The reciprocals of a factor's scales.
struct Inverse {
    /// `None` for a factor that has been multiplied by them.
    values: Option<super::operands::Floats>,
}

impl Inverse {
    /// Reads input `n`: one number, or one per row of the factor.
    fn new(o: &Operands<'_>, n: usize, rows: usize) -> Result<Self, OperandError> {
        let values = o.floats(n)?;
        if values.len() != 1 {
            same("the scales", rows, values.len())?;
        }
        Ok(Self {
            values: Some(values),
        })
    }

    fn of(&self, row: usize) -> f32 {
        match self.values.as_deref() {
            None => 1.0,
            Some([one]) => *one,
            Some(each) => each[row],
        }
    }
}

/// Returns factor `n` times the reciprocals of its blocks' scales, which are in input `n + 2`;
/// `None` if there is one per row or one in all.
fn decoded(o: &Operands<'_>, n: usize) -> Result<Option<Scratch>, OperandError> {
    let [matrix, grid] = [n, n + 2].map(|i| {
        let slot = o.slot(false, i)?;
        let (rows, cols) = strides::matrix(slot);
        Ok::<_, OperandError>([rows as u64, cols as u64])
    });
    let (matrix, grid) = (matrix?, grid?);
    let inverses = o.slot(false, n + 2)?.dtype;
    if inverses != DType::U8 && (grid == [1, 1] || grid == [matrix[0], 1]) {
        return Ok(None);
    }
    let block = ScaleBlock::of(matrix, grid, inverses).ok_or(OperandError::Unsupported)?;
    let (codes, scales) = (o.floats(n)?, o.floats(n + 2)?);
    let (cols, across) = (matrix[1] as usize, grid[1] as usize);
    let (height, width) = (block.rows as usize, block.cols as usize);
    let mut out = Scratch::take(codes.len());
    for (i, (y, x)) in out.iter_mut().zip(&*codes).enumerate() {
        let inverse = scales[i / cols / height * across + i % cols / width];
        *y = x * match block {
            ScaleBlock::MX => e8m0_number(inverse as u8),
            _ => inverse,
        };
    }
    Ok(Some(out))
}

/// Computes `a, b, inverse_a, inverse_b[, bias][, c] -> c` with `b` stored as `[n, inner]`.
pub(super) fn run(o: &Operands<'_>, bias: bool, accumulate: bool) -> Result<(), OperandError> {
    o.expect(4 + usize::from(bias) + usize::from(accumulate), 1)?;
    let (a, b) = (operand(o, 0)?, operand(o, 1)?);
    let (m, k, n) = (a.rows, a.cols, b.rows);
    same("the inner dimension of the second operand", k, b.cols)?;
    let out = o.output(0)?;
    same("the matmul", m * n, out.numel)?;
    let decoded = [decoded(o, 0)?, decoded(o, 1)?];
    let inverse = |i: usize, rows| match &decoded[i] {
        Some(_) => Ok(Inverse { values: None }),
        None => Inverse::new(o, i + 2, rows),
    };
    let inverses = [inverse(0, m)?, inverse(1, n)?];
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
    let [a, b] = [(a.mat, &decoded[0]), (b.mat, &decoded[1])].map(|(mat, decoded)| match decoded {
        Some(of) => Mat::rows(of, k),
        None => mat,
    });
    // SAFETY: as above; decoded factors are memory of their own, too.
    unsafe { multiply(m, n, k, a, b.t(), Mat::target(&mut sums, n), false) };
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
