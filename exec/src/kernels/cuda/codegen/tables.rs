//! Gathers and scatters by token ids, and the chunked cross entropy.

use super::index::{self, Index};
use super::{Entry, Module, Param, Refusal, Request, blocks, ctype, float, numel};
use crate::kernels::view;
use shardlab_plan::program::{BodyOp, Place, Slot};
use shardlab_plan::units::DType;

fn slots<'a, const I: usize, const O: usize>(
    op: &'a BodyOp,
) -> Result<([&'a Slot; I], [&'a Slot; O]), Refusal> {
    let missing = || Refusal::new(format!("`{}` lacks operands", op.op.name()));
    let take = |s: &'a [Slot], i: usize| s.get(i).ok_or_else(missing);
    let mut ins = [take(&op.inputs, 0)?; I];
    for (i, x) in ins.iter_mut().enumerate() {
        *x = take(&op.inputs, i)?;
    }
    let mut outs = [take(&op.outputs, 0)?; O];
    for (i, x) in outs.iter_mut().enumerate() {
        *x = take(&op.outputs, i)?;
    }
    Ok((ins, outs))
}

/// An address expression of contiguous operands only.
fn contiguous(req: &Request<'_>, slot: &Slot) -> Result<String, Refusal> {
    if !index::is_contiguous(&index::dims(slot)) {
        return Err(Refusal::new("a table or its rows are strided"));
    }
    req.address(slot)
}

/// The integer at position `at` of a slot, as C.
fn id(req: &Request<'_>, slot: &Slot, at: &str) -> Result<String, Refusal> {
    if req.arg(slot.place)?.dtype != DType::I64 {
        return Err(Refusal::new("ids are 64-bit integers"));
    }
    let at = Index {
        code: at.to_owned(),
        step: 0,
        multiple: 1,
        own: None,
    };
    let at = index::offset(&at, &index::dims(slot), 1, None)?;
    Ok(format!("{}[{}]", req.address(slot)?, at.code))
}

/// Lanes that all these operands can be accessed with, for rows of `cols`.
fn lanes(req: &Request<'_>, cols: usize, slots: &[&Slot]) -> Result<usize, Refusal> {
    let mut lanes = 8;
    for s in slots {
        let arg = req.arg(s.place)?;
        let size = arg.dtype.size() as usize;
        let fits = |l: usize| {
            let wide = (l * size).min(16);
            usize::from(arg.align) >= wide && (s.offset as usize * size).is_multiple_of(wide)
        };
        while lanes > 1 && !(cols.is_multiple_of(lanes) && fits(lanes)) {
            lanes /= 2;
        }
    }
    Ok(lanes)
}

fn entry(name: &str, grid: [u32; 3], block: u32, params: &[Param]) -> Entry {
    Entry {
        name: name.to_owned(),
        grid,
        block,
        shared: 0,
        params: params.to_vec(),
    }
}

const NAN: &str = "__int_as_float(0x7fffffff)";

/// `ids, table -> rows`.
pub(super) fn gather(req: &Request<'_>, op: &BodyOp) -> Result<Module, Refusal> {
    let ([ids, table], [out]) = slots::<2, 1>(op)?;
    let (vocab, d) = view::matrix(table);
    let n = numel(ids);
    if numel(out) != n * d {
        return Err(Refusal::new("as many rows as ids"));
    }
    let l = lanes(req, d, &[table, out])?;
    let per = d / l;
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Fault, Param::Kernel]);
    declared.extend(["u64* fault".to_owned(), "u32 kernel".to_owned()]);
    let source = format!(
        "KERNEL(256) k0({args}) {{\n  const u64 t = blockIdx.x * 256ull + threadIdx.x;\n  const u32 row = (u32)(t / {per}u), c = (u32)(t % {per}u) * {l}u;\n  if (row >= {n}u) return;\n  const i64 id = {id};\n  float x[{l}];\n  if (bad_id(id, {vocab}, fault, kernel)) {{\n    for (int v = 0; v < {l}; v++) x[v] = {NAN};\n  }} else {{\n    load<{tt}, {l}>({table} + id * {d}u + c, x);\n  }}\n  store<{ot}, {l}>({out} + (u64)row * {d}u + c, x);\n}}\n",
        args = declared.join(", "),
        id = id(req, ids, "row")?,
        tt = req.memory(table)?,
        table = contiguous(req, table)?,
        ot = req.memory(out)?,
        out = contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(n * per, 256)?, 1, 1], 256, &params)],
        scratch: 0,
    })
}

/// `d_rows, ids, d_table -> d_table`: ids are ranked (every id against every other, no atomics), then the first row of each
/// id adds up all rows of that id in their order.
pub(super) fn scatter(req: &Request<'_>, op: &BodyOp) -> Result<Module, Refusal> {
    let ([rows, ids, before], [table]) = slots::<3, 1>(op)?;
    let (vocab, d) = view::matrix(table);
    let n = numel(ids);
    if numel(rows) != n * d || numel(before) != vocab * d {
        return Err(Refusal::new("as many rows as ids"));
    }
    let l = lanes(req, d, &[rows, before, table])?;
    let (mut params, mut declared) = req.operands();
    params.extend([
        Param::Scratch(0),
        Param::Scratch((n * 4) as u64),
        Param::Scratch((n * 8) as u64),
        Param::Fault,
        Param::Kernel,
    ]);
    declared.extend(
        [
            "u32* order",
            "u32* place",
            "u32* count",
            "u64* fault",
            "u32 kernel",
        ]
        .map(str::to_owned),
    );
    let args = declared.join(", ");
    let (tb, tt) = (contiguous(req, before)?, contiguous(req, table)?);
    let mut source = format!(
        "KERNEL(256) k0({args}) {{
  __shared__ int s[1024];
  const u32 q = threadIdx.x % 8, i = blockIdx.x * 32 + threadIdx.x / 8;
  const i64 mine = i < {n}u ? {mine} : -1;
  const bool ok = i < {n}u && !bad_id(mine, {vocab}, fault, kernel);
  const int me = (int)mine;
  u32 below = 0, equal = 0, before = 0;
  for (u32 from = 0; from < {n}u; from += 1024) {{
    __syncthreads();
    for (u32 j = threadIdx.x; j < 1024; j += 256) {{
      const u32 at = from + j;
      const i64 id = at < {n}u ? {theirs} : {vocab};
      s[j] = id < 0 || id > {vocab} ? {vocab} : (int)id;
    }}
    __syncthreads();
#pragma unroll 8
    for (u32 j = q; j < 1024; j += 8) {{
      const int id = s[j];
      below += id < me;
      equal += id == me;
      before += id == me && from + j < i;
    }}
  }}
  for (int k = 4; k > 0; k /= 2) {{
    below += __shfl_xor_sync(0xffffffffu, below, k);
    equal += __shfl_xor_sync(0xffffffffu, equal, k);
    before += __shfl_xor_sync(0xffffffffu, before, k);
  }}
  if (q == 0 && i < {n}u) {{
    if (ok) order[below + before] = i;
    place[i] = below;
    count[i] = ok && before == 0 ? equal : 0;
  }}
}}
KERNEL(256) k1({args}) {{
  const u32 i = blockIdx.x, c = (blockIdx.y * 256 + threadIdx.x) * {l}u;
  const u32 n = count[i];
  if (n == 0 || c >= {d}u) return;
  const u64 at = (u64){of_block} * {d}u + c;
  float sum[{l}], x[{l}];
  load<{bt}, {l}>({tb} + at, sum);
  const u32* from = order + place[i];
#pragma unroll 4
  for (u32 k = 0; k < n; k++) {{
    load<{rt}, {l}>({rows} + (u64)from[k] * {d}u + c, x);
    for (int v = 0; v < {l}; v++) sum[v] += x[v];
  }}
  store<{ot}, {l}>({tt} + at, sum);
}}
",
        mine = id(req, ids, "i")?,
        theirs = id(req, ids, "at")?,
        of_block = id(req, ids, "i")?,
        bt = req.memory(before)?,
        rt = req.memory(rows)?,
        ot = req.memory(table)?,
        rows = contiguous(req, rows)?,
    );
    let mut entries = vec![
        entry("k0", [blocks(n, 32)?, 1, 1], 256, &params),
        entry("k1", [n as u32, blocks(d, 256 * l)?, 1], 256, &params),
    ];
    if !in_place(req, before, table) {
        source += &format!(
            "KERNEL(256) k2({args}) {{\n  const u64 i = (blockIdx.x * 256ull + threadIdx.x) * {l}u;\n  if (i >= {total}ull) return;\n  float x[{l}];\n  load<{bt}, {l}>({tb} + i, x);\n  store<{ot}, {l}>({tt} + i, x);\n}}\n",
            total = vocab * d,
            bt = req.memory(before)?,
            ot = req.memory(table)?,
        );
        entries.insert(
            0,
            entry("k2", [blocks(vocab * d, 256 * l)?, 1, 1], 256, &params),
        );
    }
    Ok(Module {
        source,
        entries,
        scratch: (n * 12) as u64,
    })
}

/// Whether two slots are the same memory.
fn in_place(req: &Request<'_>, read: &Slot, write: &Slot) -> bool {
    let same = match (read.place, write.place) {
        (Place::Read(r), Place::Write(w)) => {
            req.same.get(usize::from(r)).copied().flatten() == Some(w)
        }
        (a, b) => a == b,
    };
    same && read.offset == write.offset
}

/// Whether the gradient of the negative log-likelihood is written into the zeros that are there.
pub(super) fn fills_labels_only(req: &Request<'_>, op: &BodyOp) -> bool {
    matches!((op.inputs.get(3), op.outputs.first()), (Some(a), Some(b)) if in_place(req, a, b))
}

/// `d_loss, labels, weight, d_x -> d_x`, in place: one element a row.
pub(super) fn nll_labels(req: &Request<'_>, op: &BodyOp) -> Result<Module, Refusal> {
    let ([loss, labels, weight, _], [out]) = slots::<4, 1>(op)?;
    let (rows, d) = view::matrix(out);
    if numel(labels) != rows {
        return Err(Refusal::new("one label a row"));
    }
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Fault, Param::Kernel]);
    declared.extend(["u64* fault".to_owned(), "u32 kernel".to_owned()]);
    let source = format!(
        "KERNEL(256) k0({}) {{\n  const u32 r = blockIdx.x * 256 + threadIdx.x;\n  if (r >= {rows}u) return;\n  const i64 label = {};\n  if (bad_id(label, {d}, fault, kernel)) return;\n  down(-up({}[0]) / up({}[0]), {}[(u64)r * {d}u + label]);\n}}\n",
        declared.join(", "),
        id(req, labels, "r")?,
        req.address(loss)?,
        req.address(weight)?,
        contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(rows, 256)?, 1, 1], 256, &params)],
        scratch: 0,
    })
}

/// Bytes of a row that a block keeps in shared memory: what an H200 gives a block, less a little for sums.
const ROW_BYTES: usize = 224 << 10;

/// `logits, labels, loss -> logits, loss`: one block a row reads the logits once from memory and leaves their gradient.
pub(super) fn cross_entropy(
    req: &Request<'_>,
    op: &BodyOp,
    scale: f64,
    gradient: f64,
) -> Result<Module, Refusal> {
    let ([logits, labels, before], [grad, loss]) = slots::<3, 2>(op)?;
    let (rows, d) = view::matrix(logits);
    if numel(labels) != rows || numel(grad) != rows * d {
        return Err(Refusal::new("one label a row"));
    }
    let l = lanes(req, d, &[logits, grad])?;
    let threads = (d / l).next_multiple_of(32).clamp(32, 1024);
    let (lt, gt, bt) = (req.memory(logits)?, req.memory(grad)?, req.memory(before)?);
    let steps = (d / l).div_ceil(threads);
    // The row is kept: most of it in shared memory, the rest in registers. A row that does not fit is read twice.
    let vector = l * req.arg(logits.place)?.dtype.size() as usize;
    let in_shared = steps.min(ROW_BYTES / (threads * vector));
    let kept = vector == 16 && steps - in_shared <= 4;
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Scratch(0), Param::Fault, Param::Kernel]);
    declared.extend(["double* part", "u64* fault", "u32 kernel"].map(str::to_owned));
    let Place::Write(w) = loss.place else {
        return Err(Refusal::new("the loss goes to memory"));
    };
    // The factor becomes a part of the exponent where the gradient is rounded to 16 bits.
    let fast = gt != "float" && gradient > 0.0;
    let walk = format!(
        "for (int k = 0; k < {steps}; k++) {{\n    const u32 c = (k * {threads}u + threadIdx.x) * {l}u;\n    if (c >= {d}u) break;"
    );
    let pack = format!("Pack<{lt}, {l}>");
    let (keep, first, again) = if kept {
        (
            format!(
                "  extern __shared__ uint4 shared[];\n  {pack}* row = reinterpret_cast<{pack}*>(shared);\n  {pack} rest[{}];\n",
                (steps - in_shared).max(1)
            ),
            format!(
                "const {pack} p = *reinterpret_cast<const {pack}*>(x + c);\n    if (k < {in_shared}) row[k * {threads} + threadIdx.x] = p; else rest[k < {in_shared} ? 0 : k - {in_shared}] = p;\n    unpack<{lt}, {l}>(p, a);"
            ),
            format!(
                "unpack<{lt}, {l}>(k < {in_shared} ? row[k * {threads} + threadIdx.x] : rest[k < {in_shared} ? 0 : k - {in_shared}], a);"
            ),
        )
    } else {
        let load = format!("load<{lt}, {l}>(x + c, a);");
        (String::new(), load.clone(), load)
    };
    let unroll = if kept { "" } else { " 4" };
    let source = format!(
        "KERNEL({threads}) k0({args}) {{
  __shared__ float sh[32];
{keep}  const u32 r = blockIdx.x;
  const {lt}* x = {x} + (u64)r * {d}u;
  {gt}* y = {y} + (u64)r * {d}u;
  const i64 label = {id};
  const bool bad = bad_id(label, {d}, fault, kernel);
  const float target = bad ? 0.0f : up(x[label]);
  float m = -INF, s = 0.0f;
#pragma unroll{unroll}
  {walk}
    float a[{l}];
    {first}
    running<{l}>(m, s, a);
  }}
  const float top = row_all<Max, {threads}>(m, sh);
  s = m == -INF ? 0.0f : s * expf(m - top);
  s = row_all<Sum, {threads}>(s, sh);
  const float z = top + logf(s);
  {shift}
  if (threadIdx.x == 0) part[r] = bad ? (double){NAN} : (double)z - (double)target;
  __syncthreads();
  const u32 hit = bad ? 0xffffffffu : (u32)label;
#pragma unroll{unroll}
  {walk}
    float a[{l}];
    {again}
#pragma unroll
    for (int v = 0; v < {l}; v++) a[v] = {gradient};
    if (hit - c < {l}u)
#pragma unroll
      for (int v = 0; v < {l}; v++)
        if (c + v == hit) a[v] -= {scale};
    store<{gt}, {l}>(y + c, a);
  }}
}}
KERNEL(1024) k1(const double* part, const {bt}* {bname}, {ot}* w{w}) {{
  double sum = 0.0;
  for (u32 i = threadIdx.x; i < {rows}u; i += 1024) sum += part[i];
  sum = block_sum<1024>(sum);
  if (threadIdx.x == 0) down((float)((double)up({b}[0]) + {whole:?} * sum), {o}[0]);
}}
",
        args = declared.join(", "),
        x = contiguous(req, logits)?,
        y = contiguous(req, grad)?,
        id = id(req, labels, "r")?,
        scale = float(gradient as f32),
        gradient = if fast {
            "ex2(fmaf(a[v], LOG2E, shift))".to_owned()
        } else {
            format!("{} * expf(a[v] - z)", float(gradient as f32))
        },
        shift = if fast {
            format!(
                "const float shift = fmaf(-z, LOG2E, {});",
                float(gradient.log2() as f32)
            )
        } else {
            String::new()
        },
        bname = super::pointer(before.place),
        b = req.address(before)?,
        ot = ctype(req.arg(loss.place)?.dtype),
        o = req.address(loss)?,
        whole = scale,
    );
    let first = match before.place {
        Place::Read(i) => Param::Read(i),
        Place::Write(i) => Param::Write(i),
        Place::Register(_) => return Err(Refusal::new("the loss comes from memory")),
    };
    if before.place == loss.place {
        return Err(Refusal::new("the loss is read as a read"));
    }
    Ok(Module {
        source,
        entries: vec![
            Entry {
                shared: if kept {
                    (in_shared * threads * vector) as u32
                } else {
                    0
                },
                ..entry("k0", [rows as u32, 1, 1], threads as u32, &params)
            },
            entry(
                "k1",
                [1, 1, 1],
                1024,
                &[Param::Scratch(0), first, Param::Write(w)],
            ),
        ],
        scratch: (rows * 8) as u64,
    })
}
