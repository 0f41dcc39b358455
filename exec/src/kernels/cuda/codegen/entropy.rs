//! The chunked cross entropy: logits become their gradient, and the loss is added up, in one pass over memory.
//!
//! A row of a large vocabulary is longer than what a block may keep. It is divided among the blocks of a cluster, which keep
//! their parts in shared memory and tell one another their maxima and sums. Parts are short enough for several blocks on a
//! multiprocessor, so that one writes while another reads, and each reads its part of the next row while it is at one.

use super::tables::{NAN, contiguous, entry, id, lanes, slots};
use super::{Entry, Module, Param, Refusal, Request, float, numel};
use crate::kernels::view;
use shardlab_plan::program::{BodyOp, Place, Slot};
use std::fmt::Write as _;

/// Most bytes of a row that a block keeps: three blocks, with two rows each, find room on a multiprocessor of an H200.
const PART: usize = 36 << 10;
/// Shared memory of a multiprocessor, less a little for sums.
const SHARED: usize = 224 << 10;
/// Most blocks of a cluster that every GPU of this kind can place.
const CLUSTER: usize = 8;
/// Threads of a block that keeps its part.
const THREADS: usize = 512;
/// Clusters that a launch is made of, where it has as many rows: ten times what a GPU holds at once, so that the last ones are a
/// small part of it.
const TURNS: usize = 512;
/// Most rows that a cluster takes one after another.
const IN_TURN: usize = 8;

/// What both forms of the kernel are made of.
struct Pieces<'a> {
    rows: usize,
    cols: usize,
    lanes: usize,
    logits: &'a Slot,
    labels: &'a Slot,
    before: &'a Slot,
    grad: &'a Slot,
    loss: &'a Slot,
    /// Factor of a row's share of the loss.
    scale: f64,
    /// Factor of the gradient: that of the loss times what reaches the loss from behind.
    gradient: f64,
}

/// `logits, labels, loss -> logits, loss`.
pub(super) fn generate(
    req: &Request<'_>,
    op: &BodyOp,
    scale: f64,
    gradient: f64,
) -> Result<Module, Refusal> {
    let ([logits, labels, before], [grad, loss]) = slots::<3, 2>(op)?;
    let (rows, cols) = view::matrix(logits);
    if numel(labels) != rows || numel(grad) != rows * cols {
        return Err(Refusal::new("one label a row"));
    }
    if before.place == loss.place {
        return Err(Refusal::new("the loss is read as a read"));
    }
    if !matches!(loss.place, Place::Write(_)) {
        return Err(Refusal::new("the loss goes to memory"));
    }
    let lanes = lanes(req, cols, &[logits, grad])?;
    let p = Pieces {
        rows,
        cols,
        lanes,
        logits,
        labels,
        before,
        grad,
        loss,
        scale,
        gradient,
    };
    let vectors = cols / lanes;
    let vector = lanes * req.arg(logits.place)?.dtype.size() as usize;
    let mut cluster = 1;
    while cluster < CLUSTER && vectors.div_ceil(cluster) * vector > PART {
        cluster *= 2;
    }
    let fits = 2 * vectors.div_ceil(cluster) * vector <= SHARED;
    if vector == 16 && vectors >= THREADS && cluster <= CLUSTER && fits {
        kept(req, &p, cluster)
    } else {
        twice(req, &p)
    }
}

impl Pieces<'_> {
    /// What follows once `top` and `s` are the row's: its share of the loss is `z - target`, its gradients come from `a`.
    fn gradients(&self, fast: bool) -> (String, String) {
        // The factor becomes a part of the exponent where the gradient is rounded to 16 bits.
        if fast {
            (
                format!(
                    "const float shift = fmaf(-z, LOG2E, {});",
                    float(self.gradient.log2() as f32)
                ),
                "ex2(fmaf(a[v], LOG2E, shift))".to_owned(),
            )
        } else {
            (
                String::new(),
                format!("{} * expf(a[v] - z)", float(self.gradient as f32)),
            )
        }
    }

    fn is_fast(&self, req: &Request<'_>) -> Result<bool, Refusal> {
        Ok(req.memory(self.grad)? != "float" && self.gradient > 0.0)
    }

    /// Adds up the rows' shares by all `threads` of a block.
    fn total(&self, req: &Request<'_>, threads: usize) -> Result<String, Refusal> {
        Ok(format!(
            "  double sum = 0.0;\n  for (u32 i = threadIdx.x; i < {rows}u; i += {threads}) sum += __ldcg(part + i);\n  sum = block_sum<{threads}>(sum);\n  if (threadIdx.x == 0) down((float)((double)up({b}[0]) + {scale:?} * sum), {o}[0]);\n",
            rows = self.rows,
            b = req.address(self.before)?,
            scale = self.scale,
            o = req.address(self.loss)?,
        ))
    }
}

/// Every block of a cluster keeps its part of a row, and reads that of the next row meanwhile; the last one of the launch adds up
/// the loss.
fn kept(req: &Request<'_>, p: &Pieces<'_>, cluster: usize) -> Result<Module, Refusal> {
    let (l, d) = (p.lanes, p.cols);
    let part = (d / l).div_ceil(cluster);
    let (threads, steps) = (THREADS, part.div_ceil(THREADS));
    let (lt, gt) = (req.memory(p.logits)?, req.memory(p.grad)?);
    let resident = (SHARED / (2 * part * 16 + 1024)).clamp(1, 2048 / threads);
    let each = (p.rows / TURNS).clamp(1, IN_TURN);
    let clusters = p.rows.div_ceil(each);
    let (shift, gradient) = p.gradients(p.is_fast(req)?);
    let pack = format!("Pack<{lt}, {l}>");
    let mut copies = String::new();
    let mut takes = String::new();
    for k in 0..steps {
        // A group of copies a step, even of none, so that as many groups are always on their way.
        let (also, guard) = if (k + 1) * threads <= (d / l).saturating_sub((cluster - 1) * part) {
            (String::new(), String::new())
        } else {
            let within = format!("{}u + threadIdx.x < mine", k * threads);
            (format!(" && {within}"), format!("if ({within}) "))
        };
        let at = k * threads;
        let _ = writeln!(
            copies,
            "    if (there{also}) copy16(next + {at}u + threadIdx.x, x + (u64)r * {d}u + ({at}u + threadIdx.x) * {l}u);\n    copy_done();",
        );
        let _ = writeln!(
            takes,
            "    copy_wait<{}>();\n    {guard}{{\n      float a[{l}];\n      unpack<{lt}, {l}>(row[{at}u + threadIdx.x], a);\n      running<{l}>(m, s, a);\n    }}",
            2 * steps - 1 - k,
        );
    }
    let (mut params, mut declared) = req.operands();
    params.extend([
        Param::Scratch(0),
        Param::Tickets,
        Param::Fault,
        Param::Kernel,
    ]);
    declared
        .extend(["double* part", "u32* tickets", "u64* fault", "u32 kernel"].map(str::to_owned));
    let blocks = super::blocks(clusters * cluster, 1)?;
    let source = format!(
        "extern \"C\" __global__ void __cluster_dims__({cluster}, 1, 1) __launch_bounds__({threads}, {resident}) k0({args}) {{
  extern __shared__ uint4 shared[];
  __shared__ float sh[32];
  // Two rows' maxima and sums: no block is two rows ahead of another.
  __shared__ float2 told[2][{cluster}];
  cluster_arrive();
  const u32 rank = blockIdx.x % {cluster}u, from = blockIdx.x / {cluster}u * {each}u;
  const u32 first = rank * {part}u;
  const u32 mine = {vectors}u - first < {part}u ? {vectors}u - first : {part}u;
  const {lt}* const x = {x} + first * {l}u;
  {gt}* const y = {y} + first * {l}u;
  const auto take = [&](u32 r) {{
    {pack}* const next = reinterpret_cast<{pack}*>(shared) + (r - from) % 2u * {part}u;
    const bool there = r < {rows}u && r < from + {each}u;
{copies}  }};
  take(from);
  cluster_wait();
#pragma unroll 1
  for (u32 r = from; r < from + {each}u && r < {rows}u; r++) {{
    const u32 turn = (r - from) % 2u;
    const {pack}* const row = reinterpret_cast<const {pack}*>(shared) + turn * {part}u;
    // A thread reads what it copied itself, so that it may copy over what it has read.
    take(r + 1);
    const i64 label = {id};
    const bool bad = bad_id(label, {d}, fault, kernel);
    // Beyond every part if it lies in another block's.
    const u32 hit = bad || (u32)label < first * {l}u ? 0xffffffffu : (u32)label - first * {l}u;
    float m = -INF, s = 0.0f;
{takes}    {{
      const float top = row_all<Max, {threads}>(m, sh);
      s = m == -INF ? s : s * expf(m - top);
      s = row_all<Sum, {threads}>(s, sh);
      m = top;
    }}
    if (threadIdx.x < {cluster}) tell(told[turn] + rank, threadIdx.x, m, s);
    cluster_arrive();
    cluster_wait();
    float top = -INF, all = 0.0f;
    for (u32 k = 0; k < {cluster}; k++) top = max_(top, told[turn][k].x);
    for (u32 k = 0; k < {cluster}; k++)
      all += told[turn][k].x == -INF ? told[turn][k].y : told[turn][k].y * expf(told[turn][k].x - top);
    const float z = top + logf(all);
    {shift}
    if (bad && rank == 0 && threadIdx.x == 0) part[r] = (double){NAN};
#pragma unroll
    for (u32 k = 0; k < {steps}; k++) {{
      const u32 c = k * {threads}u + threadIdx.x;
      if (c >= mine) break;
      float a[{l}];
      unpack<{lt}, {l}>(row[c], a);
      if (hit - c * {l}u < {l}u) {{
#pragma unroll
        for (int v = 0; v < {l}; v++)
          if (c * {l}u + v == hit) part[r] = (double)z - (double)a[v];
      }}
#pragma unroll
      for (int v = 0; v < {l}; v++) a[v] = {gradient};
      if (hit - c * {l}u < {l}u) {{
#pragma unroll
        for (int v = 0; v < {l}; v++)
          if (c * {l}u + v == hit) a[v] -= {factor};
      }}
      store_once<{gt}, {l}>(y + (u64)r * {d}u + c * {l}u, a);
    }}
  }}
  if (!is_last(tickets, {blocks}u)) return;
{total}}}
",
        args = declared.join(", "),
        x = contiguous(req, p.logits)?,
        y = contiguous(req, p.grad)?,
        vectors = d / l,
        id = id(req, p.labels, "r")?,
        factor = float(p.gradient as f32),
        rows = p.rows,
        total = p.total(req, threads)?,
    );
    let k0 = Entry {
        shared: (2 * part * 16) as u32,
        ..entry("k0", [blocks, 1, 1], threads as u32, &params)
    };
    Ok(Module {
        source,
        entries: vec![k0],
        scratch: (p.rows * 8) as u64,
    })
}

/// A block a row, which it reads twice: for rows that are short, too long or not aligned.
fn twice(req: &Request<'_>, p: &Pieces<'_>) -> Result<Module, Refusal> {
    let (l, d) = (p.lanes, p.cols);
    let threads = (d / l).next_multiple_of(32).clamp(32, 1024);
    let steps = (d / l).div_ceil(threads);
    let (lt, gt) = (req.memory(p.logits)?, req.memory(p.grad)?);
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Scratch(0), Param::Fault, Param::Kernel]);
    declared.extend(["double* part", "u64* fault", "u32 kernel"].map(str::to_owned));
    let walk = format!(
        "#pragma unroll 4\n  for (int k = 0; k < {steps}; k++) {{\n    const u32 c = (k * {threads}u + threadIdx.x) * {l}u;\n    if (c >= {d}u) break;\n    float a[{l}];\n    load<{lt}, {l}>(x + c, a);"
    );
    let (shift, gradient) = p.gradients(p.is_fast(req)?);
    let source = format!(
        "KERNEL({threads}) k0({args}) {{
  __shared__ float sh[32];
  const u32 r = blockIdx.x;
  const {lt}* x = {x} + (u64)r * {d}u;
  {gt}* y = {y} + (u64)r * {d}u;
  const i64 label = {id};
  const bool bad = bad_id(label, {d}, fault, kernel);
  const float target = bad ? 0.0f : up(x[label]);
  float m = -INF, s = 0.0f;
{walk}
    running<{l}>(m, s, a);
  }}
  const float top = row_all<Max, {threads}>(m, sh);
  s = m == -INF ? s : s * expf(m - top);
  s = row_all<Sum, {threads}>(s, sh);
  const float z = top + logf(s);
  {shift}
  if (threadIdx.x == 0) part[r] = bad ? (double){NAN} : (double)z - (double)target;
  __syncthreads();
  const u32 hit = bad ? 0xffffffffu : (u32)label;
{walk}
#pragma unroll
    for (int v = 0; v < {l}; v++) a[v] = {gradient};
    if (hit - c < {l}u)
#pragma unroll
      for (int v = 0; v < {l}; v++)
        if (c + v == hit) a[v] -= {factor};
    store<{gt}, {l}>(y + c, a);
  }}
}}
KERNEL(1024) k1({fold}) {{
{total}}}
",
        args = declared.join(", "),
        x = contiguous(req, p.logits)?,
        y = contiguous(req, p.grad)?,
        id = id(req, p.labels, "r")?,
        factor = float(p.gradient as f32),
        fold = {
            let mut all = req.operands().1;
            all.push("const double* part".to_owned());
            all.join(", ")
        },
        total = p.total(req, 1024)?,
    );
    let mut last = req.operands().0;
    last.push(Param::Scratch(0));
    Ok(Module {
        source,
        entries: vec![
            entry("k0", [p.rows as u32, 1, 1], threads as u32, &params),
            entry("k1", [1, 1, 1], 1024, &last),
        ],
        scratch: (p.rows * 8) as u64,
    })
}
