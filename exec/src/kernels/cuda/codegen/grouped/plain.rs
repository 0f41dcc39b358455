//! Grouped matmuls for any GPU and type. A block has a tile of the result; there are as many blocks
//! as the largest number of tiles.

use super::super::tables::{contiguous, entry};
use super::super::{CodegenError, Module, Request, ctype};
use super::{Grouped, Over};
use shardlab_plan::ir::DType;

const KERNEL: &str = include_str!("plain.cuh");
/// Rows and columns of a tile.
const TILE: usize = 128;

pub(super) fn generate(req: &Request<'_>, of: &Grouped<'_>) -> Result<Module, CodegenError> {
    let dtype = req.arg(of.a.place)?.dtype;
    // Transposed factors have an expert's first row at any column.
    let whole = of.scaled.is_none() || matches!(of.over, Over::Columns { .. });
    let v = match of.is_aligned(req)? && whole {
        true => 16 / dtype.size() as usize,
        false => 1,
    };
    // Numbers in 8 bits are numbers of float16, too.
    let (ty, inverse) = match &of.scaled {
        Some(scaled) => (ctype(DType::F16), &scaled.inverse[..]),
        None => (ctype(dtype), "1.0f"),
    };
    let (params, declared) = req.operands();
    let (a, b) = (contiguous(req, of.a)?, contiguous(req, of.b)?);
    let c = contiguous(req, of.c)?;
    let (offsets, experts, n) = (&of.offsets, of.experts, of.n);
    let (body, grid) = match of.over {
        Over::Columns { k, tb } => (
            format!(
                "  u32 expert, row, end;
  if (!find_tile<{experts}>({offsets}, blockIdx.y, expert, row, end)) return;
  const auto* b = {b} + (u64)expert * {matrix}ull;
  product<false, {columns}, {v}, {ty}>({a}, {k}ull, row, end, b, {step}ull, blockIdx.x * TN, {n}u, 0, {k}u, {inverse}, {c}, {n}ull);",
                matrix = k * n,
                columns = !tb,
                step = if tb { k } else { n },
            ),
            [
                n.div_ceil(TILE),
                of.rows / TILE + experts.min(of.rows),
                1,
            ],
        ),
        Over::Rows { m } => (
            format!(
                "  const u32 e = blockIdx.z;
  const u32 start = (u32){offsets}[e], end = (u32){offsets}[e + 1];
  product<{columns}, {columns}, {v}, {ty}>({a}, {a_step}ull, blockIdx.y * TM, {m}u, {b}, {b_step}ull, blockIdx.x * TN, {n}u, start, end, {inverse}, {c} + (u64)e * {matrix}ull, {n}ull);",
                columns = of.scaled.is_none(),
                a_step = if of.scaled.is_some() { of.rows } else { m },
                b_step = if of.scaled.is_some() { of.rows } else { n },
                matrix = m * n,
            ),
            [n.div_ceil(TILE), m.div_ceil(TILE), experts],
        ),
    };
    let source = format!(
        "{KERNEL}KERNEL(256) k0({}) {{\n{body}\n}}\n",
        declared.join(", ")
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", grid.map(|x| x as u32), 256, &params)],
        scratch: 0,
    })
}
