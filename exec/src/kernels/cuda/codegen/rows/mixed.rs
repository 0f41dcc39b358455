//! Column sums in kernels that also work row by row: the gradient of a norm's weight in the kernel
//! of the norm's backward.
//!
//! A worker (a group of threads, as many as share a row) takes every `workers`-th row and adds up
//! its rows' terms in registers, in float32; then the block adds the sums of its workers. Rows are
//! assigned to blocks in turn, so that none has more of the last round than another. A second entry
//! adds the sums of the blocks in float64. The number of blocks follows from shapes alone, and so
//! does the order of the sums.

use super::{Gen, Index, Shape};
use crate::kernels::cuda::codegen::columns::{MULTIPROCESSORS, terms};
use crate::kernels::cuda::codegen::index;
use crate::kernels::cuda::codegen::{CodegenError, Entry, Param, Request, blocks};
use shardlab_plan::ir::{BodyOp, Place};
use shardlab_plan::program::workspace;

/// Maximum length of rows of which a block adds up several: their sums are combined in shared
/// memory.
const COMBINED: usize = 8192;
/// Threads per block, if a row does not need more.
const BLOCK: usize = 768;
/// Threads per multiprocessor, with the registers that these kernels use.
const RESIDENT: usize = 768;
/// Minimum number of rows per worker, if there are that many: each worker's sums are written and
/// read once more.
const ROWS: usize = 4;
/// Columns per block that adds up the workers' sums, and its threads for each.
const COLUMNS: usize = 32;
const SHARES: usize = 16;

/// Returns how many blocks a multiprocessor holds.
fn resident(shape: &Shape) -> usize {
    (RESIDENT / (shape.threads * shape.rows)).max(1)
}

/// Returns the number of rows that a block takes at a time: as many as possible without leaving
/// multiprocessors idle.
fn together(shape: &Shape) -> usize {
    let most = match shape.threads {
        0..32 => BLOCK / shape.threads,
        // Rows of several warps synchronize with barriers of their own, of which there are a few;
        // for rows of one warp, larger blocks are slower.
        _ => (BLOCK / shape.threads).clamp(1, 8),
    };
    let blocks = |rows: usize| shape.domain.rows.div_ceil(ROWS * rows);
    let halves = std::iter::successors(Some(most), |rows| Some(rows / 2));
    halves
        .take_while(|&rows| rows >= shape.rows)
        .find(|&rows| blocks(rows) >= MULTIPROCESSORS)
        .unwrap_or(shape.rows)
}

/// The sums of a kernel.
pub(super) struct Mixed<'a> {
    /// Operations that add up rows, by position in the body.
    ops: Vec<(usize, &'a BodyOp)>,
    shape: Shape,
    /// Number of blocks of the kernel; each adds up the rows of its groups of threads.
    blocks: usize,
    /// Offset of their sums in the scratch memory, in bytes.
    at: u64,
}

impl<'a> Mixed<'a> {
    /// Returns the sums of a body, if it has any; `at` bytes of scratch memory are in use.
    pub(super) fn new(req: &Request<'a>, shape: &mut Shape, at: u64) -> Option<Self> {
        let ops: Vec<_> = req
            .body
            .iter()
            .enumerate()
            .filter(|o| o.1.op.sums_rows())
            .collect();
        let sums: usize = ops.iter().map(|o| o.1.outputs.len()).sum();
        if sums == 0 {
            return None;
        }
        // Losses wait for all threads of their block.
        if at == 0 && shape.domain.cols <= COMBINED {
            shape.rows = together(shape);
        }
        let bytes = sums * shape.domain.cols * size_of::<f32>();
        let room = workspace::ROW_SUMS as usize / bytes.max(1);
        let resident = MULTIPROCESSORS * resident(shape);
        let few = shape.domain.rows.div_ceil(ROWS * shape.rows);
        Some(Self {
            ops,
            shape: *shape,
            blocks: resident.min(few).min(room).max(1),
            at: at.next_multiple_of(16),
        })
    }

    /// Returns the blocks that a multiprocessor has at once, given the registers that these leave a
    /// thread.
    pub(super) fn resident(&self) -> usize {
        resident(&self.shape)
    }

    /// Returns how many rows are in flight at once.
    pub(super) fn workers(&self) -> usize {
        self.blocks * self.shape.rows
    }

    fn sums(&self) -> impl Iterator<Item = (usize, &'a BodyOp)> {
        let outs = |&(_, op): &(usize, &'a BodyOp)| (0..op.outputs.len()).map(move |o| (o, op));
        self.ops.iter().flat_map(outs)
    }

    /// Returns how many blocks the kernel has.
    pub(super) fn grid(&self) -> u32 {
        self.blocks as u32
    }

    /// Returns the parameter of the kernel's entry in addition to operands.
    pub(super) fn param(&self) -> (Param, String) {
        (Param::Scratch(self.at), "float* sums".to_owned())
    }

    /// Returns the bytes of scratch memory, including those before.
    pub(super) fn scratch(&self) -> u64 {
        self.at + (self.blocks * self.sums().count() * self.shape.domain.cols * 4) as u64
    }

    /// Declares a worker's sums.
    pub(super) fn declared(&self) -> String {
        let n = self.shape.steps * self.shape.lanes;
        let one = |i: usize| format!("  float acc{i}[{n}] = {{}};\n");
        (0..self.sums().count()).map(one).collect()
    }

    /// Adds the row's terms, in the walk over its vectors.
    pub(super) fn add(&self, g: &mut Gen<'_>, at: &Index) -> Result<(), CodegenError> {
        let lanes = self.shape.lanes;
        let mut n = 0;
        for &(i, op) in &self.ops {
            let terms = terms(g, i, op, at)?;
            g.line(format!(
                "#pragma unroll\nfor (int v = 0; v < {lanes}; v++) {{"
            ));
            for term in terms.iter().take(op.outputs.len()) {
                g.line(format!("  acc{n}[k * {lanes} + v] += {term};"));
                n += 1;
            }
            g.line("}");
        }
        Ok(())
    }

    /// Adds up the sums of the block's groups, in a fixed order, and writes them.
    pub(super) fn written(&self) -> String {
        let (lanes, cols, count) = (
            self.shape.lanes,
            self.shape.domain.cols,
            self.sums().count(),
        );
        let n = self.shape.steps * lanes;
        let own = self.shape.threads;
        let mut s = String::new();
        // Groups of one warp first reduce in registers: then each warp is one group, whose first
        // threads hold its sums.
        let (mut rows, mut threads) = (self.shape.rows, own);
        while threads < 32 && rows.is_multiple_of(2) {
            for i in 0..count {
                s += &format!(
                    "#pragma unroll\n  for (int j = 0; j < {n}; j++) acc{i}[j] += __shfl_xor_sync(~0u, acc{i}[j], {threads});\n"
                );
            }
            (rows, threads) = (rows / 2, threads * 2);
        }
        let speaks = |group: usize| {
            let first = format!("threadIdx.x / {threads}u == {group}u");
            match own == threads {
                true => first,
                false => format!("{first} && threadIdx.x % {threads}u < {own}u"),
            }
        };
        if rows > 1 {
            s += &format!("  __shared__ float all[{n}][{own}];\n");
            for i in 0..count {
                for group in 0..rows {
                    let add = match group {
                        0 => format!("all[j][tid] = acc{i}[j]"),
                        g if g + 1 < rows => format!("all[j][tid] += acc{i}[j]"),
                        _ => format!("acc{i}[j] = all[j][tid] + acc{i}[j]"),
                    };
                    s += &format!(
                        "  __syncthreads();\n  if ({}) {{\n#pragma unroll\n    for (int j = 0; j < {n}; j++) {add};\n  }}\n",
                        speaks(group)
                    );
                }
            }
        }
        if rows > 1 || own < threads {
            s += &format!("  if (!({})) return;\n", speaks(rows - 1));
        }
        let one = |n: usize| {
            format!(
                "    {{\n      float part[{lanes}];\n#pragma unroll\n      for (int v = 0; v < {lanes}; v++) part[v] = acc{n}[k * {lanes} + v];\n      store<float, {lanes}>(sums + ((u64)blockIdx.x * {count}u + {n}) * {cols}u + c, part);\n    }}\n"
            )
        };
        let stores: String = (0..count).map(one).collect();
        s + &format!(
            "  {} {{\n    {}\n{stores}  }}\n",
            self.shape.walk(),
            self.shape.column()
        )
    }

    /// Returns the entry that adds up the workers' sums.
    pub(super) fn fold(&self, req: &Request<'_>) -> Result<(String, Entry), CodegenError> {
        let (cols, count) = (self.shape.domain.cols, self.sums().count());
        let (mut params, mut declared) = req.operands();
        params.push(Param::Scratch(self.at));
        declared.push("const float* sums".to_owned());
        let mut body = String::new();
        for (n, (o, op)) in self.sums().enumerate() {
            let slot = &op.outputs[o];
            if !matches!(slot.place, Place::Write(_)) {
                continue;
            }
            let at = index::offset(&Index::single("c"), &index::dims(slot), 1, None)?;
            body += &format!(
                "  {{
    double s = 0.0;
    if (c < {cols}u)
#pragma unroll 8
      for (u32 w = ty; w < {blocks}u; w += {SHARES}) s += __ldcg(sums + ((u64)w * {count}u + {n}) * {cols}u + c);
    __syncthreads();
    sh[ty][tx] = s;
    __syncthreads();
    if (ty == 0 && c < {cols}u) {{
      s = 0.0;
#pragma unroll
      for (u32 y = 0; y < {SHARES}; y++) s += sh[y][tx];
      down((float)s, {address}[{at}]);
    }}
  }}
",
                blocks = self.blocks,
                address = req.address(slot)?,
                at = at.code
            );
        }
        let threads = COLUMNS * SHARES;
        let source = format!(
            "KERNEL({threads}) fold({}) {{\n  __shared__ double sh[{SHARES}][{COLUMNS}];\n  const u32 tx = threadIdx.x % {COLUMNS}, ty = threadIdx.x / {COLUMNS};\n  const u32 c = blockIdx.x * {COLUMNS} + tx;\n{body}}}\n",
            declared.join(", ")
        );
        let entry = Entry {
            name: "fold".to_owned(),
            grid: [blocks(cols, COLUMNS)?, 1, 1],
            block: threads as u32,
            shared: 0,
            params,
        };
        Ok((source, entry))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sharing;
    use super::*;
    use crate::kernels::cuda::codegen::index::Domain;

    #[test]
    fn short_rows_share_blocks_as_long_as_all_multiprocessors_have_one() {
        let rows = |rows, cols, halves| {
            let sharing = Sharing {
                parts: true,
                halves,
                sums: true,
            };
            let shape = Shape::new(Domain { rows, cols }, 8, true, sharing);
            (shape.threads, together(&shape))
        };
        // 16 heads of 8,192 tokens, eight heads of as many, of half of them, and of a few: 132
        // blocks of four times as many rows.
        assert_eq!(rows(131_072, 128, true), (8, 96));
        assert_eq!(rows(65_536, 128, true), (8, 96));
        assert_eq!(rows(32_768, 128, true), (8, 48));
        assert_eq!(rows(192, 128, true), (8, 16));
        assert_eq!(rows(131_072, 128, false), (16, 48));
        // A warp each, and more than one: two vectors per thread or fewer.
        assert_eq!(rows(8192, 512, false), (32, 8));
        assert_eq!(rows(8192, 640, false), (96, 8));
        assert_eq!(rows(8192, 768, false), (96, 8));
        assert_eq!(rows(8192, 1024, false), (64, 8));
        assert_eq!(rows(8192, 2048, false), (128, 6));
        // Few of them.
        assert_eq!(rows(2048, 1024, false), (64, 2));
        assert_eq!(rows(128, 1024, false), (64, 1));
        assert_eq!(rows(128, 512, false), (32, 4));
        // Whole warps, whose shares are combined in pairs.
        for n in [192, 4096, 32_768, 131_072] {
            let (threads, together) = rows(n, 128, true);
            assert_eq!(threads * together % 32, 0);
        }
    }
}
