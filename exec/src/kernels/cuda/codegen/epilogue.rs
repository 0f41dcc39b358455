//! Elementwise code that our matmuls for Hopper's tensor cores run on their results.

use super::expr::{Cached, Gen};
use super::index::{self, Index};
use super::{CodegenError, Request, numel};
use shardlab_plan::ir::{OpKind, Place, Slot};

/// Elements of a vector in memory.
pub(super) const LANES: usize = 8;

/// Elementwise code behind GEMMs, by vectors of the results that they have rounded.
pub(super) struct Epilogue {
    /// Vectors of each operand that are read ahead.
    pub(super) ahead: usize,
    read: String,
    take: String,
    body: String,
    /// The dot product of each row, if there is one: where it goes.
    pub(super) dot: Option<Slot>,
}

impl Epilogue {
    /// Generates the code of a body that starts with GEMMs; results have this many elements. With
    /// `halves`, the result is as wide as each half of the GEMM's columns.
    pub(super) fn generate(
        req: &Request<'_>,
        elements: usize,
        halves: Option<u64>,
    ) -> Result<Self, CodegenError> {
        if let Some(i) = req.same.iter().position(|s| *s == Some(super::CLASH)) {
            return Err(CodegenError::new(format!("read {i} overlaps a result")));
        }
        let mut g = Gen::new(req, LANES, None);
        (g.cache, g.packs) = (Some(Vec::new()), Some(Default::default()));
        (g.keep_shared, g.halves) = (true, halves);
        let at = Index::elem(LANES);
        let (mut values, mut dot) = (Vec::new(), None);
        for (i, op) in req.body.iter().enumerate() {
            if op.op == OpKind::RowDot {
                if dot.is_some() || halves.is_some() {
                    return Err(CodegenError::new("one dot product per row, of whole rows"));
                }
                dot_of_tile(&mut g, i, &at)?;
                dot = op.outputs.first().cloned();
                continue;
            }
            for (o, slot) in op.outputs.iter().enumerate() {
                let parts = match halves {
                    Some(columns) if i == 0 => halves_of(slot, columns).to_vec(),
                    _ => vec![slot.clone()],
                };
                let whole = parts.iter().all(|part| numel(part) == elements);
                if !whole || !super::is_dense(slot) {
                    return Err(CodegenError::new(
                        "a result is not as large as the GEMM's, or not in its order",
                    ));
                }
                let mut later = req.body[i + 1..].iter().flat_map(|l| &l.outputs);
                if !matches!(slot.place, Place::Write(_)) || later.any(|s| s.place == slot.place) {
                    continue;
                }
                for part in parts {
                    let var = match halves {
                        Some(_) if i == 0 => g.read(&part, 1, &index::dims(&part), &at)?,
                        _ => g.output(i, o, &at)?,
                    };
                    values.push((part, var));
                }
            }
        }
        for (slot, var) in values {
            g.store(&slot, &at, &var)?;
        }
        let kept = g.cache.take().unwrap_or_default();
        // Vectors in flight: as many as fit into a writer's 120 registers in addition to the
        // results. On an H200 the gate's gradient of 8,192 x 8,192 takes 427 us with eight of each
        // that it reads, 435 with six, 447 with four; prefetching the tile into the second-level
        // cache takes longer.
        let room = 16 - 4 * req.writes.len().saturating_sub(2).min(3);
        let ahead = match kept.len() {
            0 => 4,
            reads => (room / reads).clamp(1, 8),
        };
        Ok(Self {
            ahead,
            read: kept.iter().map(|c| c.declared(ahead)).collect(),
            take: kept.iter().map(Cached::taken).collect(),
            body: g.code,
            dot,
        })
    }

    /// Inserts the code into a kernel.
    pub(super) fn insert(&self, kernel: &str) -> String {
        kernel
            .replace("READ_AHEAD", &self.read)
            .replace("TAKE", &self.take)
            .replace("BODY", &self.body)
    }
}

/// Generates the part of a row's dot product that a tile has. A warp has the tile's columns of a
/// row, as far as there are any.
fn dot_of_tile(g: &mut Gen<'_>, i: usize, at: &Index) -> Result<(), CodegenError> {
    let shape = g.op(i).inputs[0].shape.clone();
    let [a, b] = [g.input(i, 0, &shape, at)?, g.input(i, 1, &shape, at)?];
    let (a, b) = (a.lane(), b.lane());
    g.line(format!(
        "float dot = 0.0f;
#pragma unroll
for (int v = 0; v < {LANES}; v++) dot += {a} * {b};
const u32 vectors = min(32u, (COLUMNS - p.column) / {LANES}u), active = 0xffffffffu >> (32 - vectors);
#pragma unroll
for (int d = 16; d > 0; d /= 2) {{
  const float other = __shfl_down_sync(active, dot, d);
  if (lane + d < (int)vectors) dot += other;
}}
if (lane == 0) dots[(u64)(i / COLUMNS) * ACROSS + p.column / WIDE] = dot;"
    ));
    Ok(())
}

/// Returns the two halves of a result's columns.
fn halves_of(slot: &Slot, columns: u64) -> [Slot; 2] {
    let rows = numel(slot) as u64 / (2 * columns).max(1);
    [0, columns].map(|first| Slot {
        offset: slot.offset + first,
        shape: [rows, columns].into_iter().collect(),
        strides: [2 * columns, 1].into_iter().collect(),
        ..slot.clone()
    })
}
