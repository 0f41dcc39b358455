//! Kernels over rows: a block (or a warp) for each, with the statistics that later operations need.
//!
//! Statistics are computed in passes over the row; the last pass computes the outputs. Rows that
//! fit are read once and kept in registers in their memory format. Longer rows (a vocabulary) are
//! read again by each pass, mostly from the second-level cache. Bodies that also compute column
//! sums (`mixed`) let each block take several rows.

mod mixed;
mod statistics;

use super::expr::Gen;
use super::index::{Domain, Index};
use super::{CodegenError, Entry, Module, Param, Request, blocks, numel};
use crate::kernels::ops::{self, CudaCode};
use mixed::Mixed;
use shardlab_plan::ir::{BodyOp, Place, Slot};
use shardlab_plan::ops::Reduced;
pub(in crate::kernels) use statistics::Row;
use statistics::{statistic, statistics};
use std::collections::BTreeMap;

/// Bytes of registers that a thread may use for its part of the row.
const KEPT: usize = 160;
/// Threads per block whose rows have a warp each.
const WARPS: usize = 128;

/// Returns whether a body needs whole rows.
pub(super) fn applies(req: &Request<'_>) -> bool {
    req.body.iter().any(|op| reduced(op).is_some())
}

/// Returns whether an operation reduces all rows to scalars.
fn is_loss(op: &BodyOp) -> bool {
    matches!(ops::cuda(&op.op), CudaCode::Loss(_))
}

/// Returns the operand whose last dimension an operation reduces or indexes.
pub(super) fn reduced(op: &BodyOp) -> Option<&Slot> {
    match op.op.def().signature().reduced? {
        Reduced::Input(n) => op.inputs.get(n),
        Reduced::Output(n) => op.outputs.get(n),
    }
}

/// How rows are distributed.
#[derive(Clone, Copy, Debug)]
struct Shape {
    domain: Domain,
    lanes: usize,
    /// Threads per row.
    threads: usize,
    /// Rows per block.
    rows: usize,
    /// Vectors per thread.
    steps: usize,
    /// Whether some threads have fewer.
    ragged: bool,
    /// Whether the row stays in registers.
    kept: bool,
}

/// Requirements of a body's operations on the threads that share a row.
#[derive(Clone, Copy)]
struct Sharing {
    /// Whether a warp may take several rows that would leave threads without work: nothing waits
    /// for whole warps.
    parts: bool,
    /// Whether each thread has one vector of either half of such a row, if that makes two.
    halves: bool,
    /// Whether threads hold the sums of their columns in addition to their part of the row.
    sums: bool,
}

impl Sharing {
    fn of(req: &Request<'_>) -> Self {
        let has = |wanted: fn(CudaCode<'_>) -> bool| {
            let mut codes = req.body.iter().map(|op| ops::cuda(&op.op));
            codes.any(wanted)
        };
        let sums = req.body.iter().any(|op| op.op.sums_rows());
        Self {
            // Losses wait for whole warps.
            parts: !has(|code| matches!(code, CudaCode::Loss(_))),
            // A rotation makes elements of both halves from the same elements of both halves. If
            // column sums are computed too, a block takes many rows one after another, so that
            // fewer threads per row are enough.
            halves: sums && has(|code| matches!(code, CudaCode::Cat(_))),
            sums,
        }
    }
}

impl Shape {
    fn new(domain: Domain, lanes: usize, kept: bool, sharing: Sharing) -> Self {
        let Sharing {
            parts,
            halves,
            sums,
        } = sharing;
        let vectors = domain.cols.div_ceil(lanes);
        let threads = match vectors {
            2..=16 if parts && halves && vectors.is_power_of_two() => vectors / 2,
            0..=16 if parts => vectors.next_power_of_two(),
            128 if kept => 64,
            // More than two vectors and their sums exceed a thread's registers.
            n @ 65..=128 if kept && sums => n.next_multiple_of(32),
            0..=128 => 32,
            n if kept => (n / 2).next_multiple_of(32).min(1024),
            _ => 1024,
        };
        Self {
            domain,
            lanes,
            threads,
            rows: if threads <= 32 { WARPS / threads } else { 1 },
            steps: vectors.div_ceil(threads),
            ragged: !vectors.is_multiple_of(threads),
            kept,
        }
    }

    /// Returns the head of a loop over the row's vectors.
    fn walk(&self) -> String {
        let unroll = if self.kept { "" } else { " 2" };
        format!(
            "#pragma unroll{unroll}\nfor (int k = 0; k < {}; k++)",
            self.steps
        )
    }

    /// Returns the C code that reduces the values of all threads of the row by `op`.
    fn all(&self, op: &str, value: &str) -> String {
        if self.rows > 1 && self.threads > 32 {
            format!(
                "group_all<{op}, {t}>({value}, sh, threadIdx.x / {t}u)",
                t = self.threads
            )
        } else {
            format!("row_all<{op}, {}>({value}, sh)", self.threads)
        }
    }

    /// Returns the definition of the column, and the test whether the row has it.
    fn column(&self) -> String {
        let guard = if self.ragged {
            format!("\nif (c >= {}u) break;", self.domain.cols)
        } else {
            String::new()
        };
        format!(
            "const u32 c = (k * {}u + tid) * {}u;{guard}",
            self.threads, self.lanes
        )
    }

    /// Returns the same, and the definition of the element.
    fn place(&self) -> String {
        format!("{}\nconst IDX i = base + c;", self.column())
    }
}

/// Generates a body with row operations.
pub(super) fn generate(req: &Request<'_>, lanes: usize) -> Result<Module, CodegenError> {
    let slot = req
        .body
        .iter()
        .find_map(reduced)
        .ok_or_else(|| CodegenError::new("no row operation"))?;
    let cols = slot.shape.last().map_or(1, |&c| c as usize).max(1);
    let domain = Domain {
        rows: numel(slot) / cols,
        cols,
    };
    for op in req.body {
        if let Some(s) = reduced(op)
            && (numel(s) != domain.rows * cols || s.shape.last().map_or(1, |&c| c as usize) != cols)
        {
            return Err(CodegenError::new("rows of different lengths in one kernel"));
        }
    }
    if !cols.is_multiple_of(lanes) {
        return Err(CodegenError::lanes());
    }
    let sharing = Sharing::of(req);
    for (kept, columns) in [(true, true), (true, false), (false, false)] {
        let shape = Shape::new(domain, lanes, kept, sharing);
        if let Some(module) = build(req, shape, columns)? {
            return Ok(module);
        }
    }
    Err(CodegenError::new("no shape for the rows"))
}

/// Generates the module, or nothing if the row does not fit into registers. With `columns`, values
/// shared by all rows (a norm's weight) are read together with the row instead of after its
/// statistics.
fn build(
    req: &Request<'_>,
    mut shape: Shape,
    columns: bool,
) -> Result<Option<Module>, CodegenError> {
    let d = shape.domain;
    let losses = req.body.iter().filter(|op| is_loss(op));
    let taken = (losses.count() * d.rows * 8) as u64;
    let mixed = Mixed::new(req, &mut shape, taken);
    let mut g = Gen::new(req, shape.lanes, Some(d));
    if shape.kept {
        g.cache = Some(Vec::new());
        g.held = Some(BTreeMap::new());
        // A block that takes several rows would read it once per row either way.
        g.keep_columns = columns && mixed.is_none();
    }
    let mut finish = Vec::new();
    for (i, op) in req.body.iter().enumerate() {
        statistics(&mut g, shape, i, op)?;
        if let CudaCode::Loss(code) = ops::cuda(&op.op) {
            finish.push((i, op, code));
        }
    }
    let mut params = req.operands();
    for (n, (i, _, code)) in finish.iter().enumerate() {
        code.share(&mut g, *i, n)?;
        params.0.push(Param::Scratch((n * d.rows * 8) as u64));
        params.1.push(format!("double* part{n}"));
    }
    if !finish.is_empty() {
        // An output may overwrite the row: one thread has read any of its elements before all write
        // theirs.
        g.line(if shape.threads == 32 {
            "__syncwarp();"
        } else {
            "__syncthreads();"
        });
    }
    outputs(&mut g, shape, mixed.as_ref())?;
    if !finish.is_empty() {
        params.0.extend([Param::Fault, Param::Launch]);
        params
            .1
            .extend(["u64* fault".to_owned(), "u32 launch".to_owned()]);
    }
    if let Some(m) = &mixed {
        let (param, declared) = m.param();
        params.0.push(param);
        params.1.push(declared);
    }
    let kept = g.cache.take().unwrap_or_default();
    let held = g.held.take().unwrap_or_default();
    let one =
        held.len() * shape.lanes * size_of::<f32>() + kept.iter().map(|c| c.bytes).sum::<usize>();
    let bytes = one * shape.steps;
    // A warp's row may have any length that the warp can hold, at any number of registers.
    if shape.kept && shape.threads > 32 && bytes > KEPT {
        return Ok(None);
    }
    if shape.kept && shape.threads <= 32 && bytes > 4 * KEPT {
        return Ok(None);
    }
    let block = shape.threads * shape.rows;
    let mut head = String::new();
    for name in held.values() {
        head += &format!("  float {name}[{}][{}];\n", shape.steps, shape.lanes);
    }
    if !kept.is_empty() {
        for c in &kept {
            head += &format!("  {}", c.declared(shape.steps));
        }
        head += &format!("  {} {{\n  {}\n", shape.walk(), shape.place());
        for c in &kept {
            head += &format!("  {}", c.taken());
        }
        head += "  }\n";
    }
    let index = req.index();
    let row = format!("  const IDX base = r * {}u;\n{head}{}", d.cols, g.code);
    let (rows, t) = (shape.rows, shape.threads);
    let used = match req.used()? {
        None => String::new(),
        Some((used, reserved)) if reserved == d.rows && mixed.is_none() => {
            format!("  if (r >= {used}) return;\n")
        }
        Some(_) => return Err(CodegenError::new("other rows than those of experts")),
    };
    let (grid, rows) = match &mixed {
        None => (
            blocks(d.rows, rows)?,
            format!(
                "  const IDX r = (IDX)blockIdx.x * {rows}u + threadIdx.x / {t}u;\n  if (r >= {}u) return;\n{used}{row}",
                d.rows
            ),
        ),
        Some(m) => (
            m.grid(),
            format!(
                "  const u32 worker = threadIdx.x / {t}u * {}u + blockIdx.x;\n{}#pragma unroll 1\n  for (IDX r = worker; r < {}u; r += {}u) {{\n{row}  }}\n{}",
                m.grid(),
                m.declared(),
                d.rows,
                m.workers(),
                m.written()
            ),
        ),
    };
    let mut source = format!(
        "typedef {index} IDX;\n{} k0({}) {{\n  __shared__ float sh[{}];\n  const u32 tid = threadIdx.x % {t}u;\n{rows}}}\n",
        match &mixed {
            None => format!("KERNEL({block})"),
            Some(m) => format!("KERNELS({block}, {})", m.resident()),
        },
        params.1.join(", "),
        // Rows of more than a warp synchronize here.
        32 * if shape.threads > 32 { shape.rows } else { 1 },
    );
    let mut entries = Vec::new();
    // Sums over no rows are zeros.
    if d.rows > 0 || mixed.is_some() {
        entries.push(Entry {
            name: "k0".to_owned(),
            grid: [grid, 1, 1],
            block: block as u32,
            shared: 0,
            params: params.0,
        });
    }
    let mut scratch = taken;
    if let Some(m) = &mixed {
        let (text, entry) = m.fold(req)?;
        source += &text;
        entries.push(entry);
        scratch = m.scratch();
    }
    for (n, (_, op, code)) in finish.iter().enumerate() {
        let (text, entry) = code.totals(req, op, n, d.rows)?;
        source += &text;
        entries.push(entry);
    }
    Ok(Some(Module {
        source,
        entries,
        scratch,
    }))
}

/// Writes all outputs in memory.
fn outputs(g: &mut Gen<'_>, shape: Shape, mixed: Option<&Mixed<'_>>) -> Result<(), CodegenError> {
    let d = shape.domain;
    let (mut wide, mut narrow) = (Vec::new(), Vec::new());
    for (i, op) in g.req.body.iter().enumerate() {
        for (o, slot) in op.outputs.iter().enumerate() {
            let again = g.req.body[i + 1..].iter();
            let last = !again
                .flat_map(|l| &l.outputs)
                .any(|s| s.place == slot.place);
            let apart = is_loss(op) || op.op.sums_rows();
            if !matches!(slot.place, Place::Write(_)) || apart || !last {
                continue;
            }
            match numel(slot) {
                n if n == d.rows * d.cols && statistic(op, o).is_none() => wide.push((i, o, slot)),
                n if n == d.rows => narrow.push((i, o, slot)),
                _ => {
                    return Err(CodegenError::new(
                        "an output has neither elements nor rows of the kernel",
                    ));
                }
            }
        }
    }
    if !wide.is_empty() || mixed.is_some() {
        let at = Index::elem(shape.lanes);
        g.open(shape.walk());
        g.line(shape.place());
        let mut values = Vec::new();
        for &(i, o, slot) in &wide {
            values.push(match g.pushed(i, &at)? {
                Some((to, var)) => (slot, to, var),
                None => (slot, at.clone(), g.output(i, o, &at)?),
            });
        }
        if let Some(m) = mixed {
            m.add(g, &at)?;
        }
        for (slot, to, var) in values {
            g.store(slot, &to, &var)?;
        }
        g.close();
    }
    if !narrow.is_empty() {
        g.open("if (tid == 0)");
        for (i, o, slot) in narrow {
            let var = g.output(i, o, &Index::row())?;
            g.store(slot, &Index::row(), &var)?;
        }
        g.close();
    }
    Ok(())
}
