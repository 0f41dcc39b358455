//! Gathers rows of a table, and scatters their gradients.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::tables;
use crate::kernels::error::OperandError;
use crate::kernels::operands::{Operands, same};
use crate::kernels::scratch::Scratch;
use crate::kernels::strides;
use crate::kernels::view::View;
use shardlab_plan::ir::op;
use smallvec::SmallVec;

/// Returns the ids of all rows, checked against the table.
fn ids(view: &View, limit: usize) -> Result<SmallVec<[i64; 256]>, OperandError> {
    let mut ids: SmallVec<[i64; 256]> = SmallVec::from_elem(0, view.numel);
    view.load_ids(0, &mut ids)?;
    for (row, &value) in ids.iter().enumerate() {
        if value < 0 || value as usize >= limit {
            return Err(OperandError::Label { row, value, limit });
        }
    }
    Ok(ids)
}

/// Computes `ids, table -> rows`.
fn gather(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (table, out) = (o.input(1)?, o.output(0)?);
    let (vocab, d) = strides::matrix(o.slot(false, 1)?);
    let ids = ids(&o.input(0)?, vocab)?;
    same("the gathered rows", ids.len() * d, out.numel)?;
    let mut row = Scratch::take(d);
    for (r, &id) in ids.iter().enumerate() {
        table.load(id as usize * d, &mut row);
        out.store(r * d, &row);
    }
    Ok(())
}

/// Computes `d_rows, ids, d_table -> d_table`: rows of one id are added in their order, in float32,
/// and rounded once. Without the table, they are added to zeros.
fn scatter_add(o: &Operands<'_>) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (rows, table) = (o.input(0)?, o.output(0)?);
    let before = match o.op.inputs.len() {
        2 => None,
        _ => Some(o.input(2)?),
    };
    let (vocab, d) = strides::matrix(o.slot(true, 0)?);
    let ids = ids(&o.input(1)?, vocab)?;
    same("the gradients of the rows", ids.len() * d, rows.numel)?;
    let mut sum = Scratch::take(d);
    let mut row = Scratch::take(d);
    if let Some(before) = &before {
        same("the table before", table.numel, before.numel)?;
    }
    if before.as_ref() != Some(&table) {
        row.fill(0.0);
        for r in 0..vocab {
            if let Some(before) = &before {
                before.load(r * d, &mut row);
            }
            table.store(r * d, &row);
        }
    }
    let mut order: SmallVec<[u32; 256]> = (0..ids.len() as u32).collect();
    order.sort_by_key(|&r| ids[r as usize]);
    for same in order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]) {
        let at = ids[same[0] as usize] as usize * d;
        table.load(at, &mut sum);
        for &r in same {
            rows.load(r as usize * d, &mut row);
            for (s, v) in sum.iter_mut().zip(row.iter()) {
                *s += v;
            }
        }
        table.store(at, &sum);
    }
    Ok(())
}

impl CpuKernel for op::Embedding {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        gather(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Embedding {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(tables::gather)
    }
}

impl CpuKernel for op::EmbeddingGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        scatter_add(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::EmbeddingGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(tables::scatter)
    }
}
