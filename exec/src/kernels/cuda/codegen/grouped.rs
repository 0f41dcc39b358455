//! Grouped matmuls: one per expert, with rows that only the device knows. A block has a tile of the
//! result; there are as many blocks as the largest number of tiles.

use super::tables::{contiguous, entry, slots};
use super::{CodegenError, Module, Request};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DType, Slot};

const COMMON: &str = include_str!("grouped.cuh");
/// Rows and columns of a tile.
const TILE: usize = 128;

/// Returns the number of elements that one access of the factors takes: 16 bytes, if their rows
/// start at multiples of that; a row's length must be one, too.
fn vector(req: &Request<'_>, factors: [&Slot; 2], widths: &[usize]) -> Result<usize, CodegenError> {
    let args = [req.arg(factors[0].place)?, req.arg(factors[1].place)?];
    if args[0].dtype != args[1].dtype {
        return Err(CodegenError::new("factors of one type"));
    }
    let size = args[0].dtype.size() as usize;
    let whole = |n: usize| n.is_multiple_of(16 / size);
    let aligned = factors.iter().all(|s| whole(s.offset as usize))
        && args.iter().all(|a| a.align >= 16)
        && widths.iter().all(|&w| whole(w));
    Ok(if aligned { 16 / size } else { 1 })
}

/// Checks the offsets; returns the number of experts and the array in C.
fn offsets(req: &Request<'_>, slot: &Slot, experts: usize) -> Result<String, CodegenError> {
    let ints = req.arg(slot.place)?.dtype == DType::I64;
    if !ints || strides::numel(slot) != experts + 1 {
        return Err(CodegenError::new("an offset for each expert, and the end"));
    }
    contiguous(req, slot)
}

fn experts(slot: &Slot) -> Result<[usize; 3], CodegenError> {
    match slot.shape[..] {
        [e, a, b] => Ok([e, a, b].map(|n| n as usize)),
        _ => Err(CodegenError::new("a matrix per expert")),
    }
}

/// Generates `a, b, offsets -> c`.
pub(in crate::kernels) fn forward(
    req: &Request<'_>,
    op: &BodyOp,
    tb: bool,
) -> Result<Module, CodegenError> {
    let ([a, b, ends], [c]) = slots::<3, 1>(op)?;
    let ((rows, k), (_, n)) = (strides::matrix(a), strides::matrix(c));
    let [count, one, two] = experts(b)?;
    if (if tb { [n, k] } else { [k, n] }) != [one, two] || strides::numel(c) != rows * n {
        let what = format!("{:?} by {:?}", a.shape, b.shape);
        return Err(CodegenError::new(what));
    }
    let (params, declared) = req.operands();
    let source = format!(
        "{COMMON}KERNEL(256) k0({args}) {{
  u32 expert, row, end;
  if (!find_tile<{count}>({ends}, blockIdx.y, expert, row, end)) return;
  const auto* b = {b} + (u64)expert * {matrix}ull;
  product<false, {columns}, {v}>({a}, {k}ull, row, end, b, {step}ull, blockIdx.x * TN, {n}u, 0, {k}u, {c}, {n}ull);
}}
",
        args = declared.join(", "),
        ends = offsets(req, ends, count)?,
        b = contiguous(req, b)?,
        matrix = k * n,
        columns = !tb,
        v = vector(req, [a, b], &[k, n])?,
        a = contiguous(req, a)?,
        step = two,
        c = contiguous(req, c)?,
    );
    let grid = [
        n.div_ceil(TILE) as u32,
        (rows / TILE + count.min(rows)) as u32,
        1,
    ];
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, 256, &params)],
        scratch: 0,
    })
}

/// Generates `a, b, offsets -> d_w`.
pub(in crate::kernels) fn weight_grad(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let ([a, b, ends], [out]) = slots::<3, 1>(op)?;
    let ((rows, m), (other, n)) = (strides::matrix(a), strides::matrix(b));
    let [count, one, two] = experts(out)?;
    if rows != other || [m, n] != [one, two] {
        let what = format!("{:?} by {:?}", a.shape, b.shape);
        return Err(CodegenError::new(what));
    }
    let (params, declared) = req.operands();
    let source = format!(
        "{COMMON}KERNEL(256) k0({args}) {{
  const u32 e = blockIdx.z;
  const u32 start = (u32){ends}[e], end = (u32){ends}[e + 1];
  product<true, true, {v}>({a}, {m}ull, blockIdx.y * TM, {m}u, {b}, {n}ull, blockIdx.x * TN, {n}u, start, end, {out} + (u64)e * {matrix}ull, {n}ull);
}}
",
        args = declared.join(", "),
        ends = offsets(req, ends, count)?,
        v = vector(req, [a, b], &[m, n])?,
        a = contiguous(req, a)?,
        b = contiguous(req, b)?,
        out = contiguous(req, out)?,
        matrix = m * n,
    );
    let grid = [n.div_ceil(TILE), m.div_ceil(TILE), count].map(|x| x as u32);
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, 256, &params)],
        scratch: 0,
    })
}
