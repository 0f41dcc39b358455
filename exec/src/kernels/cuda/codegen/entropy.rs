//! The chunked cross entropy: one pass over memory replaces logits by their gradient and sums the
//! loss.
//!
//! A row of a large vocabulary does not fit into one block. It is divided among the blocks of a
//! cluster, which keep their parts in shared memory and exchange their maxima and sums. Parts are
//! small enough for several blocks on a multiprocessor, so that one writes while another reads.

use super::tables::{NAN, contiguous, entry, id, lanes, slots};
use super::{CodegenError, Entry, Module, Param, Request, float, numel};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, Place, Slot};
use std::fmt::Write as _;

/// Maximum bytes of a row that a block keeps: three blocks fit on a multiprocessor of an H200.
const PART: usize = 72 << 10;
/// Shared memory of a multiprocessor, minus a little for sums.
const SHARED: usize = 224 << 10;
/// Maximum number of blocks of a cluster that every GPU of this kind can place.
const CLUSTER: usize = 8;
/// Threads per block that keeps its part.
const THREADS: usize = 384;

/// Common parts of both forms of the kernel.
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
    /// Factor of the gradient: that of the loss times the incoming gradient of the loss.
    gradient: f64,
}

/// Generates `logits, labels, loss -> logits, loss`.
pub(in crate::kernels) fn generate(
    req: &Request<'_>,
    op: &BodyOp,
    scale: f64,
    gradient: f64,
) -> Result<Module, CodegenError> {
    let ([logits, labels, before], [grad, loss]) = slots::<3, 2>(op)?;
    let (rows, cols) = strides::matrix(logits);
    if numel(labels) != rows || numel(grad) != rows * cols {
        return Err(CodegenError::new("one label a row"));
    }
    if before.place == loss.place {
        return Err(CodegenError::new("the loss is read as a read"));
    }
    if !matches!(loss.place, Place::Write(_)) {
        return Err(CodegenError::new("the loss goes to memory"));
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
    let fits = vectors.div_ceil(cluster) * vector <= SHARED;
    let suits = req.target.has_clusters() && vector == 16 && vectors >= THREADS;
    if suits && cluster <= CLUSTER && fits {
        kept(req, &p, cluster)
    } else {
        twice(req, &p)
    }
}

impl Pieces<'_> {
    /// Returns the code after `top` and `s` are the row's: its share of the loss is `z - target`,
    /// and its gradients come from `a`.
    fn gradients(&self, fast: bool) -> (String, String) {
        // The factor becomes a part of the exponent if the gradient is rounded to 16 bits.
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

    fn is_fast(&self, req: &Request<'_>) -> Result<bool, CodegenError> {
        Ok(req.memory(self.grad)? != "float" && self.gradient > 0.0)
    }

    /// Adds up the rows' shares with all `threads` of a block.
    fn total(&self, req: &Request<'_>, threads: usize) -> Result<String, CodegenError> {
        Ok(format!(
            "  double sum = 0.0;\n  for (u32 i = threadIdx.x; i < {rows}u; i += {threads}) sum += __ldcg(part + i);\n  sum = block_sum<{threads}>(sum);\n  if (threadIdx.x == 0) down((float)((double)up({b}[0]) + {scale:?} * sum), {o}[0]);\n",
            rows = self.rows,
            b = req.address(self.before)?,
            scale = self.scale,
            o = req.address(self.loss)?,
        ))
    }
}

/// Generates a kernel in which every block of a cluster keeps its part of the row; the last block
/// of the launch adds up the loss.
fn kept(req: &Request<'_>, p: &Pieces<'_>, cluster: usize) -> Result<Module, CodegenError> {
    let (l, d) = (p.lanes, p.cols);
    let part = (d / l).div_ceil(cluster);
    let (threads, steps) = (THREADS, part.div_ceil(THREADS));
    let (lt, gt) = (req.memory(p.logits)?, req.memory(p.grad)?);
    let resident = (SHARED / (part * 16 + 1024)).clamp(1, 2048 / threads);
    let (shift, gradient) = p.gradients(p.is_fast(req)?);
    let pack = format!("Pack<{lt}, {l}>");
    let mut copies = String::new();
    let mut takes = String::new();
    for k in 0..steps {
        let guard = if (k + 1) * threads <= (d / l).saturating_sub((cluster - 1) * part) {
            String::new()
        } else {
            format!("if ({}u + threadIdx.x < mine) ", k * threads)
        };
        let _ = writeln!(
            copies,
            "  {guard}copy16(row + {at}u + threadIdx.x, x + ({at}u + threadIdx.x) * {l}u);\n  copy_done();",
            at = k * threads
        );
        let _ = writeln!(
            takes,
            "  copy_wait<{}>();\n  {guard}{{\n    float a[{l}];\n    unpack<{lt}, {l}>(row[{}u + threadIdx.x], a);\n    running<{l}>(m, s, a);\n  }}",
            steps - 1 - k,
            k * threads
        );
    }
    let (mut params, mut declared) = req.operands();
    params.extend([
        Param::Scratch(0),
        Param::Tickets,
        Param::Fault,
        Param::Launch,
    ]);
    declared
        .extend(["double* part", "u32* tickets", "u64* fault", "u32 launch"].map(str::to_owned));
    let source = format!(
        "extern \"C\" __global__ void __cluster_dims__({cluster}, 1, 1) __launch_bounds__({threads}, {resident}) k0({args}) {{
  extern __shared__ uint4 shared[];
  __shared__ float sh[32];
  __shared__ float2 told[{cluster}];
  {pack}* row = reinterpret_cast<{pack}*>(shared);
  cluster_arrive();
  const u32 rank = blockIdx.x % {cluster}u, r = blockIdx.x / {cluster}u;
  const u32 first = rank * {part}u;
  const u32 mine = {vectors}u - first < {part}u ? {vectors}u - first : {part}u;
  const {lt}* x = {x} + (u64)r * {d}u + first * {l}u;
  {gt}* y = {y} + (u64)r * {d}u + first * {l}u;
{copies}  const i64 label = {id};
  const bool bad = bad_id(label, {d}, fault, launch);
  // Beyond every part if it is in another block's.
  const u32 hit = bad || (u32)label < first * {l}u ? 0xffffffffu : (u32)label - first * {l}u;
  float m = -INF, s = 0.0f;
{takes}  {{
    const float top = row_all<Max, {threads}>(m, sh);
    s = m == -INF ? s : s * expf(m - top);
    s = row_all<Sum, {threads}>(s, sh);
    m = top;
  }}
  cluster_wait();
  if (threadIdx.x < {cluster}) tell(told + rank, threadIdx.x, m, s);
  cluster_arrive();
  cluster_wait();
  float top = -INF, all = 0.0f;
  for (u32 k = 0; k < {cluster}; k++) top = max_(top, told[k].x);
  for (u32 k = 0; k < {cluster}; k++) all += told[k].x == -INF ? told[k].y : told[k].y * expf(told[k].x - top);
  const float z = top + logf(all);
  {shift}
  const bool owner = bad ? rank == 0 : hit < mine * {l}u;
  if (owner && threadIdx.x == 0)
    part[r] = bad ? (double){NAN} : (double)z - (double)up(reinterpret_cast<const {lt}*>(shared)[hit]);
#pragma unroll
  for (u32 k = 0; k < {steps}; k++) {{
    const u32 c = k * {threads}u + threadIdx.x;
    if (c >= mine) break;
    float a[{l}];
    unpack<{lt}, {l}>(row[c], a);
#pragma unroll
    for (int v = 0; v < {l}; v++) a[v] = {gradient};
    if (hit - c * {l}u < {l}u)
#pragma unroll
      for (int v = 0; v < {l}; v++)
        if (c * {l}u + v == hit) a[v] -= {factor};
    store_once<{gt}, {l}>(y + c * {l}u, a);
  }}
  if (!owner || !is_last(tickets, {rows}u)) return;
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
    let blocks = super::blocks(p.rows * cluster, 1)?;
    let k0 = Entry {
        shared: (part * 16) as u32,
        ..entry("k0", [blocks, 1, 1], threads as u32, &params)
    };
    Ok(Module {
        source,
        entries: vec![k0],
        scratch: (p.rows * 8) as u64,
    })
}

/// Generates a kernel of one block per row, which reads the row twice: for rows that are short, too
/// long or not aligned.
fn twice(req: &Request<'_>, p: &Pieces<'_>) -> Result<Module, CodegenError> {
    let (l, d) = (p.lanes, p.cols);
    let threads = (d / l).next_multiple_of(32).clamp(32, 1024);
    let steps = (d / l).div_ceil(threads);
    let (lt, gt) = (req.memory(p.logits)?, req.memory(p.grad)?);
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Scratch(0), Param::Fault, Param::Launch]);
    declared.extend(["double* part", "u64* fault", "u32 launch"].map(str::to_owned));
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
  const bool bad = bad_id(label, {d}, fault, launch);
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
