//! Grouped matmuls for any GPU and type. A block has a tile of the result; there are as many blocks
//! as the largest number of tiles.

use super::super::tables::{contiguous, entry};
use super::super::{CodegenError, Module, Request};
use super::{Grouped, Over};

const KERNEL: &str = include_str!("plain.cuh");
/// Rows and columns of a tile.
const TILE: usize = 128;

pub(super) fn generate(req: &Request<'_>, of: &Grouped<'_>) -> Result<Module, CodegenError> {
    let size = req.arg(of.a.place)?.dtype.size() as usize;
    let v = if of.is_aligned(req)? { 16 / size } else { 1 };
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
  product<false, {columns}, {v}>({a}, {k}ull, row, end, b, {step}ull, blockIdx.x * TN, {n}u, 0, {k}u, {c}, {n}ull);",
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
  product<true, true, {v}>({a}, {m}ull, blockIdx.y * TM, {m}u, {b}, {n}ull, blockIdx.x * TN, {n}u, start, end, {c} + (u64)e * {matrix}ull, {n}ull);",
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
