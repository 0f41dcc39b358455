//! Sums over rows, channels or everything, in two stages of a fixed order: blocks of rows in float32, these in float64.

use super::expr::Gen;
use super::index::{self, Domain, Index};
use super::{Entry, Module, Param, Refusal, Request, blocks, ctype, numel};
use shardlab_plan::model::OpKind;
use shardlab_plan::program::{BodyOp, Slot};

/// Blocks that fill a large GPU a few times over.
const FULL: usize = 1056;
/// Fewest rows that a block adds up.
const LEAST: usize = 32;

/// Generates a column or full reduction.
pub(super) fn generate(req: &Request<'_>, op: &BodyOp) -> Result<Module, Refusal> {
    match op.op {
        OpKind::SumAll => everything(req, op),
        OpKind::SumChannels => channels(req, op),
        _ => {
            let mut lanes = 8;
            loop {
                match columns(req, op, lanes) {
                    Err(r) if r.lanes && lanes > 1 => lanes /= 2,
                    other => return other,
                }
            }
        }
    }
}

fn input(op: &BodyOp, n: usize) -> Result<&Slot, Refusal> {
    op.inputs
        .get(n)
        .ok_or_else(|| Refusal::new(format!("`{}` lacks input {n}", op.op.name())))
}

/// What each row adds to each output's columns.
fn terms(g: &mut Gen<'_>, op: &BodyOp, at: &Index) -> Result<Vec<String>, Refusal> {
    let shape = |n: usize| input(op, n).map(|s| s.shape.clone());
    Ok(match op.op {
        OpKind::RmsNormWeightGrad => {
            let full = shape(1)?;
            let (dy, x) = (g.input(0, 0, &full, at)?, g.input(0, 1, &full, at)?);
            let s = g.input(0, 2, &shape(2)?, &Index::row())?;
            vec![format!("{} * ({} * {})", dy.lane(), x.lane(), s.lane())]
        }
        OpKind::LayerNormParamGrad => {
            let full = shape(1)?;
            let (dy, x) = (g.input(0, 0, &full, at)?, g.input(0, 1, &full, at)?);
            let m = g.input(0, 2, &shape(2)?, &Index::row())?;
            let s = g.input(0, 3, &shape(3)?, &Index::row())?;
            let dw = format!(
                "{} * (({} - {}) * {})",
                dy.lane(),
                x.lane(),
                m.lane(),
                s.lane()
            );
            vec![dw, dy.lane()]
        }
        _ => vec![g.input(0, 0, &shape(0)?, at)?.lane()],
    })
}

fn columns(req: &Request<'_>, op: &BodyOp, lanes: usize) -> Result<Module, Refusal> {
    let outs = match op.op {
        OpKind::LayerNormParamGrad => op.outputs.len().min(2),
        _ => 1,
    };
    let cols = op.outputs.first().map_or(0, numel);
    let whole = match op.op {
        OpKind::SumLeading => numel(input(op, 0)?),
        _ => numel(input(op, 1)?),
    };
    if cols == 0 || !whole.is_multiple_of(cols) {
        return Err(Refusal::new("rows of another length than the sums"));
    }
    if !cols.is_multiple_of(lanes) {
        return Err(Refusal::lanes());
    }
    let rows = whole / cols;
    let domain = Domain { rows, cols };
    let tiles = cols.div_ceil(32 * lanes);
    let chunks = FULL.div_ceil(tiles).min(rows.div_ceil(LEAST)).max(1);
    let per = rows.div_ceil(chunks).max(1);
    let chunks = rows.div_ceil(per).max(1);
    let mut g = Gen::new(req, lanes, Some(domain));
    let at = Index::elem(lanes);
    for n in 0..outs {
        g.line(format!("float acc{n}[{lanes}] = {{}};"));
    }
    g.line("const IDX first = (IDX)blockIdx.y * PER;\nconst IDX end = first + PER < ROWS ? first + PER : (IDX)ROWS;");
    g.open("if (c < COLS)");
    g.open("#pragma unroll 4\nfor (IDX r = first + ty; r < end; r += 8)");
    g.line("const IDX base = r * COLS;\nconst IDX i = base + c;");
    let terms = terms(&mut g, op, &at)?;
    g.line(format!(
        "#pragma unroll\nfor (int v = 0; v < {lanes}; v++) {{"
    ));
    for (n, t) in terms.iter().take(outs).enumerate() {
        g.line(format!("  acc{n}[v] += {t};"));
    }
    g.line("}");
    g.close();
    g.close();
    for n in 0..outs {
        g.line(format!(
            "__syncthreads();\nfor (int v = 0; v < {lanes}; v++) sh[ty][v * 33 + tx] = acc{n}[v];\n__syncthreads();\nif (ty == 0 && c < COLS)\n  for (int v = 0; v < {lanes}; v++) {{\n    float s = 0.0f;\n    for (int y = 0; y < 8; y++) s += sh[y][v * 33 + tx];\n    part[((u64)blockIdx.y * {outs} + {n}) * COLS + c + v] = s;\n  }}"
        ));
    }
    let index = if whole < 1 << 31 { "u32" } else { "u64" };
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("float* part".to_owned());
    let mut source = format!(
        "typedef {index} IDX;\n#define ROWS {rows}u\n#define COLS {cols}u\n#define PER {per}u\nKERNEL(256) k0({}) {{\n  __shared__ float sh[8][33 * {lanes}];\n  const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32;\n  const u32 c = (blockIdx.x * 32 + tx) * {lanes}u;\n{}}}\n",
        declared.join(", "),
        g.code
    );
    let mut stores = String::new();
    let mut fold_params = vec![Param::Scratch(0)];
    let mut fold_declared = vec!["const float* part".to_owned()];
    for (n, slot) in op.outputs.iter().take(outs).enumerate() {
        let shardlab_plan::program::Place::Write(w) = slot.place else {
            continue;
        };
        let at = index::offset(
            &Index {
                code: "c".to_owned(),
                step: 0,
                multiple: 1,
                own: None,
            },
            &index::dims(slot),
            1,
            None,
        )?;
        fold_params.push(Param::Write(w));
        fold_declared.push(format!("{}* w{w}", ctype(req.arg(slot.place)?.dtype)));
        stores += &format!(
            "  fold(part, {n}, c, tx, ty, sh);\n  if (ty == 0 && c < COLS) {{ double s = 0.0; for (int y = 0; y < 8; y++) s += sh[y][tx]; down((float)s, {}[{}]); }}\n  __syncthreads();\n",
            req.address(slot)?,
            at.code
        );
    }
    source += &format!(
        "DEV void fold(const float* part, int n, u32 c, u32 tx, u32 ty, double (*sh)[32]) {{\n  double s = 0.0;\n  if (c < COLS)\n#pragma unroll 4\n    for (u32 k = ty; k < {chunks}u; k += 8) s += part[((u64)k * {outs} + n) * COLS + c];\n  sh[ty][tx] = s;\n  __syncthreads();\n}}\nKERNEL(256) k1({}) {{\n  __shared__ double sh[8][32];\n  const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32;\n  const u32 c = blockIdx.x * 32 + tx;\n{stores}}}\n",
        fold_declared.join(", ")
    );
    let entry = |name: &str, grid, params| Entry {
        name: name.to_owned(),
        grid,
        block: 256,
        shared: 0,
        params,
    };
    Ok(Module {
        source,
        entries: vec![
            entry("k0", [blocks(cols, 32 * lanes)?, chunks as u32, 1], params),
            entry("k1", [blocks(cols, 32)?, 1, 1], fold_params),
        ],
        scratch: (chunks * outs * cols * 4) as u64,
    })
}

/// `[n, c, h, w] -> [c]`: a block a channel.
fn channels(req: &Request<'_>, op: &BodyOp) -> Result<Module, Refusal> {
    let slot = input(op, 0)?;
    let [images, channels, h, w] = slot.shape[..] else {
        return Err(Refusal::new("channels are summed over four dimensions"));
    };
    let mut g = Gen::new(req, 1, None);
    g.line("double sum = 0.0;");
    let p = h * w;
    g.open(format!(
        "for (u32 j = threadIdx.x; j < {}u; j += 256)",
        images * p
    ));
    g.line(format!(
        "const u32 i = (j / {p}u * {channels}u + blockIdx.x) * {p}u + j % {p}u;"
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
        return Err(Refusal::new("one sum a channel"));
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

/// The sum of all elements.
fn everything(req: &Request<'_>, op: &BodyOp) -> Result<Module, Refusal> {
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
    let shardlab_plan::program::Place::Write(w) = out.place else {
        return Err(Refusal::new("a sum goes to memory"));
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
