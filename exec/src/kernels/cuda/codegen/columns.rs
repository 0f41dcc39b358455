//! Sums over rows, channels or everything, in two stages of a fixed order: blocks of rows in
//! float32, and then the sums of blocks in float64.

use super::expr::{self, Gen};
use super::index::{self, Domain, Index};
use super::lanes::Lanes;
use super::rows;
use super::{CodegenError, Entry, Module, Param, Request, TICKETS, blocks, ctype, numel};
use crate::kernels::ops::{self, CudaCode};
use shardlab_plan::ir::{BodyOp, Place, Slot};

/// Number of blocks that fill a large GPU several times.
const FULL: usize = 1056;
/// Multiprocessors of an H200: the order of sums depends on this number, not on the actual GPU.
pub(super) const MULTIPROCESSORS: usize = 132;
/// Threads per multiprocessor, with the registers that these kernels use.
const RESIDENT: usize = 1024;
/// Threads per block that adds up columns.
const THREADS: usize = 512;
/// Rows per warp that are read before the first is added.
const AHEAD: usize = 4;
/// Parts into which the sum over blocks is divided.
const SHARES: usize = 4;

/// Generates sums over rows.
pub(super) fn generate(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let mut lanes = 8;
    loop {
        match columns(req, op, lanes) {
            Err(r) if r.lanes && lanes > 1 => lanes /= 2,
            other => return other,
        }
    }
}

fn input(op: &BodyOp, n: usize) -> Result<&Slot, CodegenError> {
    op.inputs
        .get(n)
        .ok_or_else(|| CodegenError::new(format!("`{}` lacks input {n}", op.op.name())))
}

/// Returns the operand whose rows are summed.
fn summed(op: &BodyOp) -> Result<&Slot, CodegenError> {
    rows::reduced(op).map_or_else(|| input(op, 0), Ok)
}

/// Returns the C expressions of a row's terms in each output's columns, for operation `i` of the
/// body.
pub(super) fn terms(
    g: &mut Gen<'_>,
    i: usize,
    op: &BodyOp,
    at: &Index,
) -> Result<Vec<String>, CodegenError> {
    let CudaCode::Columns(terms) = ops::cuda(&op.op) else {
        let name = op.op.name();
        return Err(CodegenError::new(format!("`{name}` does not sum rows")));
    };
    let full = summed(op)?.shape.clone();
    terms(&mut Lanes::new(g, i, at.clone(), full))
}

fn columns(req: &Request<'_>, op: &BodyOp, lanes: usize) -> Result<Module, CodegenError> {
    let outs = op.op.def().signature().outputs.len().min(op.outputs.len());
    let cols = op.outputs.first().map_or(0, numel);
    let whole = numel(summed(op)?);
    if cols == 0 || !whole.is_multiple_of(cols) {
        return Err(CodegenError::new("rows of another length than the sums"));
    }
    if !cols.is_multiple_of(lanes) {
        return Err(CodegenError::lanes());
    }
    let rows = whole / cols;
    let domain = Domain { rows, cols };
    let (threads, tile) = (THREADS, 32 * lanes);
    let tiles = cols.div_ceil(tile);
    let deep = threads / 32;
    // All blocks are resident at once, and each has at least two rounds of work.
    let full = MULTIPROCESSORS * RESIDENT / threads;
    let chunks = (full / tiles).min(rows.div_ceil(2 * deep)).max(1);
    let per = rows.div_ceil(chunks).max(1);
    let chunks = rows.div_ceil(per).max(1);
    let once = tiles <= TICKETS;
    let mut g = Gen::new(req, lanes, Some(domain));
    let at = Index::elem(lanes);
    for n in 0..outs {
        g.line(format!("float acc{n}[{lanes}] = {{}};"));
    }
    g.line("const IDX first = (IDX)blockIdx.y * PER;\nconst IDX end = first + PER < ROWS ? first + PER : (IDX)ROWS;");
    // Several rows are in flight before the first is used.
    g.open("if (c < COLS)");
    g.open(format!(
        "#pragma unroll 1\nfor (IDX from = first + ty; from < end; from += {})",
        AHEAD * deep
    ));
    let body = g.code.len();
    (g.cache, g.keep_shared) = (Some(Vec::new()), true);
    let walk = format!("#pragma unroll\nfor (int k = 0; k < {AHEAD}; k++)");
    let row = format!(
        "const IDX r = from + k * {deep}u;\nif (r >= end) break;\nconst IDX base = r * COLS;\nconst IDX i = base + c;"
    );
    g.open(&walk);
    g.line(&row);
    let terms = terms(&mut g, 0, op, &at)?;
    g.line(format!(
        "#pragma unroll\nfor (int v = 0; v < {lanes}; v++) {{"
    ));
    for (n, t) in terms.iter().take(outs).enumerate() {
        g.line(format!("  acc{n}[v] += {t};"));
    }
    g.line("}");
    g.close();
    let kept = g.cache.take().unwrap_or_default();
    let mut head: String = kept.iter().map(|c| c.declared(AHEAD)).collect();
    head += &format!("{walk} {{\n{row}\n");
    head.extend(kept.iter().map(expr::Cached::taken));
    head += "}\n";
    g.code.insert_str(body, &head);
    g.close();
    g.close();
    for n in 0..outs {
        g.line(format!(
            "__syncthreads();\n#pragma unroll\nfor (int v = 0; v < {lanes}; v++) sh[ty][tx * {lanes} + v] = acc{n}[v];\n__syncthreads();\nfor (u32 j = threadIdx.x; j < {tile}; j += {threads})\n  if (blockIdx.x * {tile}u + j < COLS) {{\n    float s = 0.0f;\n#pragma unroll\n    for (int y = 0; y < {deep}; y++) s += sh[y][j];\n    part[((u64)blockIdx.y * {outs} + {n}) * COLS + blockIdx.x * {tile}u + j] = s;\n  }}"
        ));
    }
    let index = req.index();
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("float* part".to_owned());
    let mut stores = String::new();
    for (n, slot) in op.outputs.iter().take(outs).enumerate() {
        if !matches!(slot.place, Place::Write(_)) {
            continue;
        }
        let at = index::offset(&Index::single("c"), &index::dims(slot), 1, None)?;
        stores += &format!(
            "  for (u32 j = threadIdx.x; j < {width}; j += {threads}) {{\n    const u32 c = first + j % {tile}u;\n    double s = 0.0;\n    if (c < COLS)\n#pragma unroll 8\n      for (u32 k = j / {tile}u; k < {chunks}u; k += {shares}) s += __ldcg(part + ((u64)k * {outs} + {n}) * COLS + c);\n    sh[j] = s;\n  }}\n  __syncthreads();\n  for (u32 j = threadIdx.x; j < {tile}; j += {threads}) {{\n    const u32 c = first + j;\n    double s = 0.0;\n#pragma unroll\n    for (u32 k = 0; k < {shares}; k++) s += sh[k * {tile} + j];\n    if (c < COLS) down((float)s, {address}[{at}]);\n  }}\n  __syncthreads();\n",
            shares = SHARES,
            width = tile * SHARES,
            address = req.address(slot)?,
            at = at.code
        );
    }
    let operands = req.operands();
    let names = |declared: &[String]| {
        let name = |d: &String| d.rsplit([' ', '*']).next().unwrap_or_default().to_owned();
        declared.iter().map(name).collect::<Vec<_>>().join(", ")
    };
    let mut all = operands.1.clone();
    all.push("const float* part".to_owned());
    let fold = format!(
        "// The sums of one tile of columns from those of all blocks of rows.\nDEV void fold({}, u32 first, double* sh) {{\n{stores}}}\n",
        all.join(", ")
    );
    let call =
        |first: &str, sh: &str| format!("fold({}, part, {first}, {sh});", names(&operands.1));
    let mut after = String::new();
    if once {
        params.push(Param::Tickets);
        declared.push("u32* tickets".to_owned());
        after = format!(
            "  if (!is_last(tickets + blockIdx.x, {chunks}u)) return;\n  {}\n",
            call(
                &format!("blockIdx.x * {tile}u"),
                "reinterpret_cast<double*>(sh)"
            )
        );
    }
    let mut source = format!(
        "typedef {index} IDX;\n#define ROWS {rows}u\n#define COLS {cols}u\n#define PER {per}u\n{fold}KERNEL({threads}) k0({}) {{\n  __shared__ alignas(16) float sh[{}][{tile}];\n  const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32;\n  const u32 c = (blockIdx.x * 32 + tx) * {lanes}u;\n{}{after}}}\n",
        declared.join(", "),
        deep.max(2 * SHARES),
        g.code
    );
    let entry = |name: &str, grid, params| Entry {
        name: name.to_owned(),
        grid,
        block: threads as u32,
        shared: 0,
        params,
    };
    let tiles = blocks(cols, tile)?;
    let mut entries = vec![entry("k0", [tiles, chunks as u32, 1], params)];
    if !once {
        let mut params = operands.0.clone();
        params.push(Param::Scratch(0));
        source += &format!(
            "KERNEL({threads}) k1({}) {{\n  __shared__ double sh[{}];\n  {}\n}}\n",
            all.join(", "),
            tile * SHARES,
            call(&format!("blockIdx.x * {tile}u"), "sh")
        );
        entries.push(entry("k1", [tiles, 1, 1], params));
    }
    Ok(Module {
        source,
        entries,
        scratch: (chunks * outs * cols * 4) as u64,
    })
}

/// Generates `[n, c, h, w] -> [c]`: one block per channel.
pub(in crate::kernels) fn channels(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let slot = input(op, 0)?;
    let [images, channels, h, w] = slot.shape[..] else {
        return Err(CodegenError::new(
            "channels are summed over four dimensions",
        ));
    };
    let mut g = Gen::new(req, 1, None);
    g.line("double sum = 0.0;");
    let p = h * w;
    let index = req.index();
    g.open(format!(
        "for ({index} j = threadIdx.x; j < {}u; j += 256)",
        images * p
    ));
    g.line(format!(
        "const {index} i = (j / {p}u * {channels}u + blockIdx.x) * {p}u + j % {p}u;"
    ));
    let at = Index {
        own: None,
        ..Index::elem(1)
    };
    let x = g
        .input(0, 0, &slot.shape, &at)?
        .lane()
        .replace("[v]", "[0]");
    g.line(format!("sum += {x};"));
    g.close();
    let out = &op.outputs[0];
    if numel(out) as u64 != channels {
        return Err(CodegenError::new("one sum a channel"));
    }
    g.line(format!(
        "sum = block_sum<256>(sum);\nif (threadIdx.x == 0) down((float)sum, {}[blockIdx.x]);",
        req.address(out)?
    ));
    let (params, declared) = req.operands();
    Ok(Module {
        source: format!("KERNEL(256) k0({}) {{\n{}}}\n", declared.join(", "), g.code),
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid: [channels as u32, 1, 1],
            block: 256,
            shared: 0,
            params,
        }],
        scratch: 0,
    })
}

/// Generates the sum of all elements.
pub(in crate::kernels) fn everything(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let slot = input(op, 0)?;
    let n = numel(slot);
    let count = n.div_ceil(256 * 16).clamp(1, FULL);
    let mut g = Gen::new(req, 1, None);
    g.line("double sum = 0.0;");
    g.open(format!(
        "for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < {n}ull; i += {}ull)",
        count * 256
    ));
    let at = Index {
        own: None,
        ..Index::elem(1)
    };
    let x = g
        .input(0, 0, &slot.shape, &at)?
        .lane()
        .replace("[v]", "[0]");
    g.line(format!("sum += {x};"));
    g.close();
    g.line("sum = block_sum<256>(sum);\nif (threadIdx.x == 0) part[blockIdx.x] = sum;");
    let out = &op.outputs[0];
    let Place::Write(w) = out.place else {
        return Err(CodegenError::new("a sum goes to memory"));
    };
    let ty = ctype(req.arg(out.place)?.dtype);
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("double* part".to_owned());
    let source = format!(
        "KERNEL(256) k0({}) {{\n{}}}\nKERNEL(256) k1(const double* part, {ty}* w{w}) {{\n  double sum = 0.0;\n  for (u32 k = threadIdx.x; k < {count}u; k += 256) sum += part[k];\n  sum = block_sum<256>(sum);\n  if (threadIdx.x == 0) down((float)sum, {}[0]);\n}}\n",
        declared.join(", "),
        g.code,
        req.address(out)?
    );
    let entry = |name: &str, grid, params| Entry {
        name: name.to_owned(),
        grid: [grid, 1, 1],
        block: 256,
        shared: 0,
        params,
    };
    Ok(Module {
        source,
        entries: vec![
            entry("k0", count as u32, params),
            entry("k1", 1, vec![Param::Scratch(0), Param::Write(w)]),
        ],
        scratch: (count * 8) as u64,
    })
}
