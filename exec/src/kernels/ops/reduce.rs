//! Sums over rows, leading dimensions, channels or everything.
//!
//! Column sums add [`ROWS`] rows in float32 and accumulate these partial sums in float64.

use super::{Call, CpuKernel, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, RowCode, float};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::{self, CodegenError, lanes::Lanes, rows::Row};
use crate::kernels::error::OperandError;
use crate::kernels::math::{LANES, sum1};
use crate::kernels::operands::{Operands, dims, same};
use crate::kernels::scratch::Scratch;
use crate::kernels::view::View;
use crate::kernels::wide::wide;
use shardlab_plan::ir::op;
use smallvec::SmallVec;

/// Number of rows of a partial column sum.
pub(super) const ROWS: usize = 32;

wide! {
    /// Adds each row to `acc`.
    fn add_rows(x: &[f32], acc: &mut [f32]) {
        for row in x.chunks_exact(acc.len()) {
            for (a, v) in acc.iter_mut().zip(row) {
                *a += v;
            }
        }
    }

    /// Computes `scale` times the sum of each row of length `d`.
    fn row_sum(x: &[f32], d: usize, scale: f32, out: &mut [f32]) {
        for (row, o) in x.chunks_exact(d).zip(out) {
            *o = scale * sum1(row, |v| v);
        }
    }

    /// Returns the sum in float64, by lanes.
    fn sum_wide(x: &[f32]) -> f64 {
        let mut acc = [0.0f64; LANES];
        let mut chunks = x.chunks_exact(LANES);
        for c in &mut chunks {
            for (a, &v) in acc.iter_mut().zip(c) {
                *a += f64::from(v);
            }
        }
        for (a, &v) in acc.iter_mut().zip(chunks.remainder()) {
            *a += f64::from(v);
        }
        acc.iter().sum()
    }

    /// Adds `part` to `total` and clears it.
    fn collect(part: &mut [f32], total: &mut [f64]) {
        for (p, t) in part.iter_mut().zip(total) {
            *t += f64::from(*p);
            *p = 0.0;
        }
    }
}

/// Computes column sums, of which `f(first row, rows, partial sums)` adds some rows.
pub(super) fn columns(rows: usize, out: &[&View], mut f: impl FnMut(usize, usize, &mut [f32])) {
    let width: usize = out.iter().map(|v| v.numel).sum();
    let mut part = Scratch::zeroed(width);
    let mut total: SmallVec<[f64; 1024]> = SmallVec::from_elem(0.0, width);
    for first in (0..rows).step_by(ROWS) {
        f(first, ROWS.min(rows - first), &mut part);
        collect(&mut part, &mut total);
    }
    for (p, t) in part.iter_mut().zip(&total) {
        *p = *t as f32;
    }
    let mut at = 0;
    for v in out {
        v.store(0, &part[at..at + v.numel]);
        at += v.numel;
    }
}

/// Returns the rows `first..first + n` of length `d`: in memory if they are contiguous floats, or
/// else copied.
pub(super) fn block<'b>(
    view: &View,
    d: usize,
    first: usize,
    n: usize,
    copy: &'b mut [f32],
) -> &'b [f32] {
    if let Some(p) = view.as_floats() {
        // SAFETY: the rows are inside the view, which the launch does not write before the sums are
        // complete.
        return unsafe { std::slice::from_raw_parts(p.add(first * d), n * d) };
    }
    let copy = &mut copy[..n * d];
    view.load(first * d, copy);
    copy
}

impl CpuKernel for op::RowSum {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, cols, .. } = call.rows()?;
        row_sum(x[0], cols, self.scale.0 as f32, y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RowSum {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::RowSum {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let [sum] = row.sums(|at| Ok([at.input(0)?]))?;
        let scaled = format!("{} * {sum}", float(self.scale.0 as f32));
        Ok(vec![row.define(&scaled)])
    }

    fn value(&self, _: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        Ok(stats[0].clone())
    }
}

/// Computes `a -> sum of a over its leading elements`.
fn sum_leading(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(1, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    let d = out.numel;
    if d == 0 || !x.numel.is_multiple_of(d) {
        return Err(OperandError::Size {
            what: "the summed operand",
            needed: x.numel.next_multiple_of(d.max(1)),
            found: x.numel,
        });
    }
    let mut copy = Scratch::take(ROWS * d);
    columns(x.numel / d, &[&out], |first, n, acc| {
        add_rows(block(&x, d, first, n, &mut copy), acc);
    });
    Ok(())
}

/// Computes `[n, c, h, w] -> [c]`.
fn sum_channels(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(1, 1)?;
    let [images, channels, h, w] = dims::<4>(o.slot(false, 0)?)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    same("the channels", channels, out.numel)?;
    let p = h * w;
    let mut copy = Scratch::take(p);
    let mut total: SmallVec<[f64; 64]> = SmallVec::from_elem(0.0, channels);
    for i in 0..images * channels {
        x.load(i * p, &mut copy);
        total[i % channels] += sum_wide(&copy);
    }
    let sums: SmallVec<[f32; 64]> = total.iter().map(|&t| t as f32).collect();
    out.store(0, &sums);
    Ok(())
}

/// Computes `a -> sum of all elements`.
fn sum_all(o: &Operands<'_>) -> Result<(), OperandError> {
    const BLOCK: usize = 4096;
    o.expect(1, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    same("the sum", 1, out.numel)?;
    let mut copy = Scratch::take(BLOCK);
    let mut total = 0.0;
    for start in (0..x.numel).step_by(BLOCK) {
        total += sum_wide(block(&x, 1, start, BLOCK.min(x.numel - start), &mut copy));
    }
    out.store(0, &[total as f32]);
    Ok(())
}

impl CpuKernel for op::SumLeading {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        sum_leading(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::SumLeading {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Columns(|at| Ok(vec![at.input(0)?]))
    }
}

impl CpuKernel for op::SumChannels {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        sum_channels(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::SumChannels {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::columns::channels)
    }
}

impl CpuKernel for op::SumAll {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        sum_all(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::SumAll {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::columns::everything)
    }
}
