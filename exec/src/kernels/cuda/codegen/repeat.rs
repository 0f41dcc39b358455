//! Repeats rows of a table for the rows of experts, whose numbers are only known on the device.

use super::tables::{contiguous, entry, integers, slots};
use super::{CodegenError, Module, Request, blocks};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, Slot};

/// Threads of a block.
const THREADS: usize = 256;

/// Returns the numbers of experts, of rows and of columns.
fn sizes(
    req: &Request<'_>,
    [table, rows, offsets]: [&Slot; 3],
) -> Result<[usize; 3], CodegenError> {
    integers(req, "offsets", &[offsets])?;
    let ((experts, d), (n, width)) = (strides::matrix(table), strides::matrix(rows));
    if d != width || strides::numel(offsets) != experts + 1 {
        return Err(CodegenError::new("rows of a table, one for each expert"));
    }
    Ok([experts, n, d])
}

/// Generates `table, offsets -> rows`: a thread per element, which searches its row's expert.
pub(in crate::kernels) fn forward(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let ([table, offsets], [out]) = slots::<2, 1>(op)?;
    let [experts, rows, d] = sizes(req, [table, out, offsets])?;
    let (params, declared) = req.operands();
    let source = format!(
        "KERNEL({THREADS}) k0({args}) {{
  const u64 i = (u64)blockIdx.x * {THREADS}u + threadIdx.x;
  const i64 row = i / {d}u;
  if (i >= {all}ull || row >= {offsets}[{experts}]) return;
  u32 e = 0, end = {experts}u;
  while (end - e > 1) {{
    const u32 middle = (e + end) / 2;
    if ({offsets}[middle] <= row) e = middle; else end = middle;
  }}
  down(up({table}[(u64)e * {d}u + i % {d}u]), {out}[i]);
}}
",
        args = declared.join(", "),
        all = rows * d,
        offsets = contiguous(req, offsets)?,
        table = contiguous(req, table)?,
        out = contiguous(req, out)?,
    );
    let grid = [blocks(rows * d, THREADS)?, 1, 1];
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, THREADS as u32, &params)],
        scratch: 0,
    })
}

/// Generates `d_rows, offsets -> d_table`: a thread per element of the result, which adds up its
/// column in the order of rows.
pub(in crate::kernels) fn backward(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let ([x, offsets], [out]) = slots::<2, 1>(op)?;
    let [experts, rows, d] = sizes(req, [out, x, offsets])?;
    let (params, declared) = req.operands();
    let source = format!(
        "KERNEL({THREADS}) k0({args}) {{
  const u32 c = blockIdx.x * {THREADS}u + threadIdx.x, e = blockIdx.y;
  if (c >= {d}u) return;
  const i64 end = min((i64){offsets}[e + 1], {rows}ll);
  float sum = 0.0f;
#pragma unroll 4
  for (i64 row = {offsets}[e]; row < end; row++) sum += up({x}[(u64)row * {d}u + c]);
  down(sum, {out}[(u64)e * {d}u + c]);
}}
",
        args = declared.join(", "),
        offsets = contiguous(req, offsets)?,
        x = contiguous(req, x)?,
        out = contiguous(req, out)?,
    );
    let grid = [blocks(d, THREADS)?, experts as u32, 1];
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, THREADS as u32, &params)],
        scratch: 0,
    })
}
