//! Kernels over rows: a block (or a warp) for each, with the statistics that later operations need.
//!
//! Statistics are computed in passes over the row; the last pass makes what is written. Rows that fit are read once and kept
//! in registers as they came from memory; of longer ones (a vocabulary) each pass reads them again, mostly from the
//! second-level cache. Bodies that also add up rows (`mixed`) let each block take several.

mod mixed;
mod statistics;

use super::expr::Gen;
use super::index::{Domain, Index};
use super::{Entry, Module, Param, Refusal, Request, blocks, ctype, numel};
use mixed::Mixed;
use shardlab_plan::ir::{BodyOp, OpKind, Place, Slot};
use shardlab_plan::ops::Reduced;
use statistics::statistics;
use std::collections::BTreeMap;

/// Bytes of registers that a thread may spend on its part of the row.
const KEPT: usize = 160;
/// Threads of a block whose rows are a warp each.
const WARPS: usize = 128;

/// Whether a body needs whole rows.
pub(super) fn applies(req: &Request<'_>) -> bool {
    req.body.iter().any(|op| reduced(op).is_some())
}

/// The operand whose last dimension an operation reduces or indexes.
fn reduced(op: &BodyOp) -> Option<&Slot> {
    match op.op.def().signature().reduced? {
        Reduced::Input(n) => op.inputs.get(n),
        Reduced::Output(n) => op.outputs.get(n),
    }
}

/// How rows are dealt out.
#[derive(Clone, Copy, Debug)]
struct Shape {
    domain: Domain,
    lanes: usize,
    /// Threads a row.
    threads: usize,
    /// Rows a block.
    rows: usize,
    /// Vectors a thread.
    steps: usize,
    /// Some threads have fewer.
    ragged: bool,
    /// The row stays in registers.
    kept: bool,
}

/// What a body's operations ask of the threads that share a row.
#[derive(Clone, Copy)]
struct Sharing {
    /// Rows that leave threads of a warp without work may be taken several by a warp: nothing waits for whole warps.
    parts: bool,
    /// Each thread has one vector of either half of such a row, where that makes two.
    halves: bool,
    /// Threads hold their columns' sums beside their part of the row.
    sums: bool,
}

impl Sharing {
    fn of(req: &Request<'_>) -> Self {
        let has = |wanted: fn(OpKind) -> bool| req.body.iter().any(|op| wanted(op.op));
        let sums = has(|op| op.sums_rows());
        Self {
            // Losses wait for whole warps.
            parts: !has(|op| op == OpKind::NllLoss),
            // A rotation makes elements of both halves from the same ones of both halves. Where rows are added up besides, a block
            // takes many of them one after another, so that fewer threads a row are enough.
            halves: sums && has(|op| matches!(op, OpKind::Cat { .. })),
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
            // More than two vectors and their sums are more than a thread's registers.
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

    /// Head of a loop over the row's vectors.
    fn walk(&self) -> String {
        let unroll = if self.kept { "" } else { " 2" };
        format!(
            "#pragma unroll{unroll}\nfor (int k = 0; k < {}; k++)",
            self.steps
        )
    }

    /// What all threads of the row make of their values by `op`, as C.
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

    /// Definition of the column, and the test whether the row has it.
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

    /// The same, and the element.
    fn place(&self) -> String {
        format!("{}\nconst IDX i = base + c;", self.column())
    }
}

/// Generates a body with row operations.
pub(super) fn generate(req: &Request<'_>, lanes: usize) -> Result<Module, Refusal> {
    let slot = req
        .body
        .iter()
        .find_map(reduced)
        .ok_or_else(|| Refusal::new("no row operation"))?;
    let cols = slot.shape.last().map_or(1, |&c| c as usize).max(1);
    let domain = Domain {
        rows: numel(slot) / cols,
        cols,
    };
    for op in req.body {
        if let Some(s) = reduced(op)
            && (numel(s) != domain.rows * cols || s.shape.last().map_or(1, |&c| c as usize) != cols)
        {
            return Err(Refusal::new("rows of different lengths in one kernel"));
        }
    }
    if !cols.is_multiple_of(lanes) {
        return Err(Refusal::lanes());
    }
    let sharing = Sharing::of(req);
    for (kept, columns) in [(true, true), (true, false), (false, false)] {
        let shape = Shape::new(domain, lanes, kept, sharing);
        if let Some(module) = build(req, shape, columns)? {
            return Ok(module);
        }
    }
    Err(Refusal::new("no shape for the rows"))
}

/// The module, or nothing if the row does not fit into registers; with `columns`, what all rows share (a norm's weight) is read
/// together with the row instead of after its statistics.
fn build(req: &Request<'_>, mut shape: Shape, columns: bool) -> Result<Option<Module>, Refusal> {
    let d = shape.domain;
    let losses = req.body.iter().filter(|op| op.op == OpKind::NllLoss);
    let taken = (losses.count() * d.rows * 8) as u64;
    let mixed = Mixed::new(req, &mut shape, taken);
    let mut g = Gen::new(req, shape.lanes, Some(d));
    if shape.kept {
        g.cache = Some(Vec::new());
        g.held = Some(BTreeMap::new());
        // A block that takes several rows would read it once a row either way.
        g.keep_columns = columns && mixed.is_none();
    }
    let mut finish = Vec::new();
    for (i, op) in req.body.iter().enumerate() {
        statistics(&mut g, shape, i, op)?;
        if op.op == OpKind::NllLoss {
            finish.push((i, op));
        }
    }
    let mut params = req.operands();
    for (n, (i, _)) in finish.iter().enumerate() {
        picked(&mut g, *i, n)?;
        params.0.push(Param::Scratch((n * d.rows * 8) as u64));
        params.1.push(format!("double* part{n}"));
    }
    if !finish.is_empty() {
        // An output may lie where the row does: one thread has read any of its elements, all write theirs.
        g.line(if shape.threads == 32 {
            "__syncwarp();"
        } else {
            "__syncthreads();"
        });
    }
    outputs(&mut g, shape, mixed.as_ref())?;
    if !finish.is_empty() {
        params.0.extend([Param::Fault, Param::Kernel]);
        params
            .1
            .extend(["u64* fault".to_owned(), "u32 kernel".to_owned()]);
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
    // A warp's row is as long as a warp can hold, whatever that takes.
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
    let (grid, rows) = match &mixed {
        None => (
            blocks(d.rows, rows)?,
            format!(
                "  const IDX r = (IDX)blockIdx.x * {rows}u + threadIdx.x / {t}u;\n  if (r >= {}u) return;\n{row}",
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
        // Rows of more than a warp meet here.
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
    for (n, (_, op)) in finish.iter().enumerate() {
        let (text, entry) = mean(req, op, n, d.rows)?;
        source += &text;
        entries.push(entry);
    }
    Ok(Some(Module {
        source,
        entries,
        scratch,
    }))
}

/// Writes everything that goes to memory.
fn outputs(g: &mut Gen<'_>, shape: Shape, mixed: Option<&Mixed<'_>>) -> Result<(), Refusal> {
    let d = shape.domain;
    let (mut wide, mut narrow) = (Vec::new(), Vec::new());
    for (i, op) in g.req.body.iter().enumerate() {
        for (o, slot) in op.outputs.iter().enumerate() {
            let again = g.req.body[i + 1..].iter();
            let last = !again
                .flat_map(|l| &l.outputs)
                .any(|s| s.place == slot.place);
            let apart = op.op == OpKind::NllLoss || op.op.sums_rows();
            if !matches!(slot.place, Place::Write(_)) || apart || !last {
                continue;
            }
            match numel(slot) {
                n if n == d.rows * d.cols && !is_statistic(op, o) => wide.push((i, o, slot)),
                n if n == d.rows => narrow.push((i, o, slot)),
                _ => {
                    return Err(Refusal::new(
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

/// Whether an output is one value a row.
fn is_statistic(op: &BodyOp, o: usize) -> bool {
    match op.op {
        OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } => o > 0,
        OpKind::LogSumExp => true,
        _ => false,
    }
}

/// The row's share of a loss: the entry of its label.
fn picked(g: &mut Gen<'_>, i: usize, n: usize) -> Result<(), Refusal> {
    g.open("if (tid == 0)");
    let label = g.label(i, 1)?;
    let d = g.domain.unwrap_or(Domain { rows: 1, cols: 1 });
    g.line(format!(
        "const bool bad = bad_id({label}, {}, fault, kernel);\nconst u32 pick = bad ? 0u : (u32){label};",
        d.cols
    ));
    let shape = g.req.body[i].inputs[0].shape.clone();
    let value = g.input(i, 0, &shape, &Index::pick())?.lane();
    g.line(format!(
        "part{n}[r] = bad ? (double)__int_as_float(0x7fffffff) : -(double){value};"
    ));
    g.close();
    Ok(())
}

/// The mean of the rows' shares, by one block.
fn mean(req: &Request<'_>, op: &BodyOp, n: usize, rows: usize) -> Result<(String, Entry), Refusal> {
    let mut params = vec![Param::Scratch((n * rows * 8) as u64)];
    let mut declared = vec!["const double* part".to_owned()];
    let mut stores = String::new();
    for (o, value) in ["sum / ROWS", "ROWS"].iter().enumerate() {
        let slot = &op.outputs[o];
        let Place::Write(w) = slot.place else {
            continue;
        };
        params.push(Param::Write(w));
        declared.push(format!("{}* w{w}", ctype(req.arg(slot.place)?.dtype)));
        stores += &format!("  down((float)({value}), {}[0]);\n", req.address(slot)?);
    }
    let name = format!("mean{n}");
    let source = format!(
        "KERNEL(1024) {name}({}) {{\n  const double ROWS = {rows}.0;\n  double sum = 0.0;\n  for (u64 i = threadIdx.x; i < {rows}u; i += 1024) sum += part[i];\n  sum = block_sum<1024>(sum);\n  if (threadIdx.x) return;\n{stores}}}\n",
        declared.join(", ")
    );
    let entry = Entry {
        name,
        grid: [1, 1, 1],
        block: 1024,
        shared: 0,
        params,
    };
    Ok((source, entry))
}
