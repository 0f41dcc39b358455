//! Gathers and scatters by token ids.

use super::index::{self, Index};
use super::{CodegenError, Entry, Module, Param, Request, blocks, numel};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DType, Place, Slot};

pub(super) fn slots<'a, const I: usize, const O: usize>(
    op: &'a BodyOp,
) -> Result<([&'a Slot; I], [&'a Slot; O]), CodegenError> {
    let missing = || CodegenError::new(format!("`{}` lacks operands", op.op.name()));
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

/// Returns an address expression for contiguous operands only.
pub(super) fn contiguous(req: &Request<'_>, slot: &Slot) -> Result<String, CodegenError> {
    if !index::is_contiguous(&index::dims(slot)) {
        return Err(CodegenError::new("a table or its rows are strided"));
    }
    req.address(slot)
}

/// Refuses operands that are not 64-bit integers.
pub(super) fn integers(req: &Request<'_>, what: &str, slots: &[&Slot]) -> Result<(), CodegenError> {
    for slot in slots {
        if req.arg(slot.place)?.dtype != DType::I64 {
            return Err(CodegenError::new(format!("{what} are 64-bit integers")));
        }
    }
    Ok(())
}

/// Returns the integer at position `at` of a slot, as C.
pub(super) fn id(req: &Request<'_>, slot: &Slot, at: &str) -> Result<String, CodegenError> {
    integers(req, "ids", &[slot])?;
    let at = index::offset(&Index::single(at), &index::dims(slot), 1, None)?;
    Ok(format!("{}[{}]", req.address(slot)?, at.code))
}

/// Returns the number of lanes with which all these operands can be accessed, for rows of `cols`.
pub(super) fn lanes(
    req: &Request<'_>,
    cols: usize,
    slots: &[&Slot],
) -> Result<usize, CodegenError> {
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

pub(super) fn entry(name: &str, grid: [u32; 3], block: u32, params: &[Param]) -> Entry {
    Entry {
        name: name.to_owned(),
        grid,
        block,
        shared: 0,
        params: params.to_vec(),
    }
}

/// Rows per thread that gathers.
const ROWS: usize = 2;
/// Vectors per thread that writes zeros.
const ZEROS: usize = 4;
/// Number of keys that a block ranks others among at a time.
const KEYS: usize = 4096;
pub(super) const NAN: &str = "__int_as_float(0x7fffffff)";

/// Generates `ids, table -> rows`.
pub(in crate::kernels) fn gather(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let ([ids, table], [out]) = slots::<2, 1>(op)?;
    let (vocab, d) = strides::matrix(table);
    let n = numel(ids);
    if numel(out) != n * d {
        return Err(CodegenError::new("as many rows as ids"));
    }
    let l = lanes(req, d, &[table, out])?;
    let per = d / l;
    // A thread takes several rows, far apart, so that their elements are in flight together.
    let many = ROWS.min(n.max(1));
    let step = n.div_ceil(many);
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Fault, Param::Launch]);
    declared.extend(["u64* fault".to_owned(), "u32 launch".to_owned()]);
    let source = format!(
        "KERNEL(256) k0({args}) {{
  const u64 t = blockIdx.x * 256ull + threadIdx.x;
  const u32 first = (u32)(t / {per}u), c = (u32)(t % {per}u) * {l}u;
  if (first >= {step}u) return;
  i64 ids[{many}];
  float x[{many}][{l}];
#pragma unroll
  for (u32 k = 0; k < {many}; k++) {{
    const u32 row = first + k * {step}u;
    ids[k] = row < {n}u ? {id} : 0;
  }}
#pragma unroll
  for (u32 k = 0; k < {many}; k++) {{
    if (ids[k] >= 0 && ids[k] < {vocab}) {{
      load<{tt}, {l}>({table} + ids[k] * {d}u + c, x[k]);
    }} else {{
      bad_id(ids[k], {vocab}, fault, launch);
#pragma unroll
      for (int v = 0; v < {l}; v++) x[k][v] = {NAN};
    }}
  }}
#pragma unroll
  for (u32 k = 0; k < {many}; k++) {{
    const u32 row = first + k * {step}u;
    if (row < {n}u) store<{ot}, {l}>({out} + (u64)row * {d}u + c, x[k]);
  }}
}}
",
        args = declared.join(", "),
        id = id(req, ids, "row")?,
        tt = req.memory(table)?,
        table = contiguous(req, table)?,
        ot = req.memory(out)?,
        out = contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(step * per, 256)?, 1, 1], 256, &params)],
        scratch: 0,
    })
}

/// Generates `d_rows, ids, d_table -> d_table`: ids are sorted (each is ranked among all others, no
/// atomics), then the first of each run of equal ids adds up all rows of that id in their order.
/// Without a table to accumulate into, further blocks of the first entry fill it with zeros during
/// the ranking, which hardly touches memory.
pub(in crate::kernels) fn scatter(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let ([rows, ids], [table]) = slots::<2, 1>(op)?;
    let before = op.inputs.get(2);
    let (vocab, d) = strides::matrix(table);
    let n = numel(ids);
    if numel(rows) != n * d || before.is_some_and(|b| numel(b) != vocab * d) {
        return Err(CodegenError::new("as many rows as ids"));
    }
    let l = lanes(req, d, &[rows, before.unwrap_or(table), table])?;
    // An id and the number of its row make a key, so that all keys are different; ids outside the
    // table come last.
    let (key, bytes) = match (vocab + 1) * n < 1 << 32 {
        true => ("u32", 4),
        false => ("u64", 8),
    };
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Scratch(0), Param::Fault, Param::Launch]);
    let sorted = format!("{key}* sorted");
    declared.extend([&sorted, "u64* fault", "u32 launch"].map(str::to_owned));
    let args = declared.join(", ");
    let tt = contiguous(req, table)?;
    let ot = req.memory(table)?;
    let ranking = blocks(n, 64)?;
    let (mut grid, mut zeros) = (ranking, String::new());
    let first = match before {
        Some(before) => format!(
            "load<{}, {l}>({} + at, sum)",
            req.memory(before)?,
            contiguous(req, before)?
        ),
        None => {
            // One access per vector: parts of a wider one would not be adjacent to their
            // neighbours'.
            let wide = l.min(16 / req.arg(table.place)?.dtype.size() as usize);
            let (vectors, each) = (vocab * d / wide, 512 * ZEROS);
            grid += blocks(vectors, each)?;
            zeros = format!(
                "  if (blockIdx.x >= {ranking}u) {{
    float x[{wide}] = {{}};
    const u64 from = (blockIdx.x - {ranking}u) * {each}ull + threadIdx.x;
#pragma unroll
    for (u32 k = 0; k < {ZEROS}; k++)
      if (from + k * 512u < {vectors}ull) store<{ot}, {wide}>({tt} + (from + k * 512u) * {wide}u, x);
    return;
  }}
"
            );
            format!("for (int v = 0; v < {l}; v++) sum[v] = 0.0f")
        }
    };
    let mut source = format!(
        "typedef {key} Key;
KERNEL(512) k0({args}) {{
{zeros}  __shared__ alignas(16) Key s[{KEYS}];
  const u32 q = threadIdx.x % 32, first = blockIdx.x * 64 + threadIdx.x / 32 * 4;
  Key mine[4];
  u32 below[4] = {{}};
#pragma unroll
  for (u32 k = 0; k < 4; k++) {{
    const u32 i = first + k;
    i64 id = i < {n}u ? {mine} : 0;
    if (bad_id(id, {vocab}, fault, launch)) id = {vocab};
    mine[k] = (Key)id * {n}u + i;
  }}
  for (u32 from = 0; from < {n}u; from += {KEYS}) {{
    __syncthreads();
    for (u32 j = threadIdx.x; j < {KEYS}; j += 512) {{
      const u32 at = from + j;
      i64 id = at < {n}u ? {theirs} : {vocab};
      if (id < 0 || id > {vocab}) id = {vocab};
      s[j] = at < {n}u ? (Key)id * {n}u + at : (Key)-1;
    }}
    __syncthreads();
#pragma unroll 4
    for (u32 j = q * 4; j < {KEYS}; j += 128) {{
      const Pack<Key, 4> theirs = *reinterpret_cast<const Pack<Key, 4>*>(s + j);
#pragma unroll
      for (u32 o = 0; o < 4; o++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) below[k] += theirs.e[o] < mine[k];
    }}
  }}
#pragma unroll
  for (u32 k = 0; k < 4; k++) {{
    for (int o = 16; o > 0; o /= 2) below[k] += __shfl_xor_sync(0xffffffffu, below[k], o);
    if (q == 0 && first + k < {n}u) sorted[below[k]] = mine[k];
  }}
}}
KERNEL(256) k1({args}) {{
  const u32 p = blockIdx.x, c = (blockIdx.y * 256 + threadIdx.x) * {l}u;
  const Key key = sorted[p], last = p > 0 ? sorted[p - 1] : 0, next = p + 1 < {n}u ? sorted[p + 1] : (Key)-1;
  const Key id = key / {n}u;
  if (id >= {vocab}u || p > 0 && last / {n}u == id || c >= {d}u) return;
  const u64 at = (u64)id * {d}u + c;
  const Key end = id * {n}u + {n}u;
  float sum[{l}], x[{l}];
  {first};
  load<{rt}, {l}>({rows} + (u64)(key % {n}u) * {d}u + c, x);
#pragma unroll
  for (int v = 0; v < {l}; v++) sum[v] += x[v];
  if (next < end) {{
    for (u32 from = p + 1; from < {n}u; from += 8) {{
      Pack<{rt}, {l}> rows[8];
      u32 count = 0;
#pragma unroll
      for (u32 k = 0; k < 8; k++) {{
        const Key other = from + k < {n}u ? sorted[from + k] : (Key)-1;
        if (other < end) {{
          rows[k] = *reinterpret_cast<const Pack<{rt}, {l}>*>({rows} + (u64)(other % {n}u) * {d}u + c);
          count++;
        }}
      }}
#pragma unroll
      for (u32 k = 0; k < 8; k++) {{
        if (k >= count) break;
        unpack<{rt}, {l}>(rows[k], x);
#pragma unroll
        for (int v = 0; v < {l}; v++) sum[v] += x[v];
      }}
      if (count < 8) break;
    }}
  }}
  store<{ot}, {l}>({tt} + at, sum);
}}
",
        mine = id(req, ids, "i")?,
        theirs = id(req, ids, "at")?,
        rt = req.memory(rows)?,
        rows = contiguous(req, rows)?,
    );
    let mut entries = vec![
        entry("k0", [grid, 1, 1], 512, &params),
        entry("k1", [n as u32, blocks(d, 256 * l)?, 1], 256, &params),
    ];
    if let Some(before) = before
        && !in_place(req, before, table)
    {
        source += &format!(
            "KERNEL(256) k2({args}) {{\n  const u64 i = (blockIdx.x * 256ull + threadIdx.x) * {l}u;\n  if (i >= {total}ull) return;\n  float x[{l}];\n  load<{bt}, {l}>({tb} + i, x);\n  store<{ot}, {l}>({tt} + i, x);\n}}\n",
            total = vocab * d,
            tb = contiguous(req, before)?,
            bt = req.memory(before)?,
        );
        entries.insert(
            0,
            entry("k2", [blocks(vocab * d, 256 * l)?, 1, 1], 256, &params),
        );
    }
    Ok(Module {
        source,
        entries,
        scratch: (n * bytes) as u64,
    })
}

/// Returns whether two slots are the same memory.
fn in_place(req: &Request<'_>, read: &Slot, write: &Slot) -> bool {
    let same = match (read.place, write.place) {
        (Place::Read(r), Place::Write(w)) => {
            req.same.get(usize::from(r)).copied().flatten() == Some(w)
        }
        (a, b) => a == b,
    };
    same && read.offset == write.offset
}

/// Returns whether the gradient of the negative log-likelihood is written into existing zeros.
pub(in crate::kernels) fn fills_labels_only(req: &Request<'_>, op: &BodyOp) -> bool {
    matches!((op.inputs.get(3), op.outputs.first()), (Some(a), Some(b)) if in_place(req, a, b))
}

/// Generates `d_loss, labels, weight, d_x -> d_x`, in place: one element per row.
pub(in crate::kernels) fn nll_labels(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let ([loss, labels, weight, _], [out]) = slots::<4, 1>(op)?;
    let (rows, d) = strides::matrix(out);
    if numel(labels) != rows {
        return Err(CodegenError::new("one label a row"));
    }
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Fault, Param::Launch]);
    declared.extend(["u64* fault".to_owned(), "u32 launch".to_owned()]);
    let source = format!(
        "KERNEL(256) k0({}) {{\n  const u32 r = blockIdx.x * 256 + threadIdx.x;\n  if (r >= {rows}u) return;\n  const i64 label = {};\n  if (bad_id(label, {d}, fault, launch)) return;\n  down(-up({}[0]) / up({}[0]), {}[(u64)r * {d}u + label]);\n}}\n",
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
