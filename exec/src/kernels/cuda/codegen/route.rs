//! Routers: one warp per row.

use super::tables::{contiguous, entry, integers, slots};
use super::{CodegenError, Module, Param, Request, blocks, float, numel};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DrawnColumns, ForcedChoice, op};

const COMMON: &str = include_str!("route.cuh");
const FORCED: &str = include_str!("forced.cuh");
/// Rows of a block, one per warp.
pub(super) const ROWS: usize = 4;
/// Most columns whose rows fit into the shared memory of a block.
const COLUMNS: usize = 1024;

/// Returns the functions that work on rows of `d` columns.
pub(super) fn common(d: usize, sigmoid: bool) -> Result<String, CodegenError> {
    if d > COLUMNS {
        let what = format!("{d} experts; at most {COLUMNS} fit into shared memory");
        return Err(CodegenError::new(what));
    }
    let sigmoid = u8::from(sigmoid);
    Ok(format!(
        "#define D {d}u\n#define SIGMOID {sigmoid}\n{COMMON}"
    ))
}

/// Keeps a sum of scores from being zero.
const TINY: &str = "1e-20f";

/// How columns are chosen, as C++.
struct Choice {
    /// Constants and functions.
    common: String,
    /// What a block does before its rows.
    of_block: String,
    /// What a warp does once its row's scores are in `s`. It defines `chosen` and the `sum` of
    /// their scores.
    of_row: String,
}

/// Returns the choice of the columns with the largest sums of score and bias, of the kept groups.
fn by_score(req: &Request<'_>, op: &BodyOp, of: &op::Route) -> Result<Choice, CodegenError> {
    let (_, d) = strides::matrix(&op.inputs[0]);
    let (k, groups, kept) = (of.k, of.groups as usize, of.kept);
    let bias = match op.inputs.get(1).filter(|_| of.bias) {
        Some(bias) => format!(" + up({}[c])", contiguous(req, bias)?),
        None => String::new(),
    };
    // A softmax keeps the order of the logits, of which fewer are equal.
    let by = if of.sigmoid || of.bias || groups > 1 {
        format!("    for (u32 c = q; c < D; c += 32) by[c] = s[c]{bias};\n    __syncwarp();\n")
    } else {
        String::new()
    };
    let size = d / groups;
    let keep = if groups > 1 {
        format!(
            "    __shared__ float best[WARPS][{groups}];
    for (u32 g = q; g < {groups}u; g += 32) {{
      float first = -INF, second = -INF;
      for (u32 c = g * {size}u; c < (g + 1) * {size}u; c++) {{
        if (by[c] > first) second = first, first = by[c];
        else if (by[c] > second) second = by[c];
      }}
      best[threadIdx.x / 32][g] = {size}u > 1 ? first + second : first;
    }}
    __syncwarp();
    u64 keep = 0;
    for (u32 n = 0; n < {kept}u; n++) keep |= 1ull << take_largest(best[threadIdx.x / 32], {groups}u);
    for (u32 c = q; c < D; c += 32)
      if (!(keep >> c / {size}u & 1)) by[c] = -INF;
    __syncwarp();
"
        )
    } else {
        String::new()
    };
    Ok(Choice {
        common: String::new(),
        of_block: String::new(),
        of_row: format!(
            "{by}{keep}    u32 chosen[{k}];
    float sum = 0.0f;
    for (u32 n = 0; n < {k}u; n++) {{
      chosen[n] = take_largest(by, D);
      sum += s[chosen[n]];
    }}
"
        ),
    })
}

/// Returns the choice of columns in round-robin order.
fn round_robin(k: u64, d: usize) -> Choice {
    Choice {
        common: String::new(),
        of_block: String::new(),
        of_row: format!(
            "    u32 chosen[{k}];
    float sum = 0.0f;
    for (u32 n = 0; n < {k}u; n++) {{
      chosen[n] = (r % {d}u * {k}u + n) % {d}u;
      sum += s[chosen[n]];
    }}
"
        ),
    }
}

/// Returns the choice of drawn columns.
fn drawn(of: &DrawnColumns, k: u64, d: usize) -> Result<Choice, CodegenError> {
    if of.shares.len() != d || !(of.group as usize).is_multiple_of(ROWS) {
        let (columns, group) = (of.shares.len(), of.group);
        let what = format!("shares of {columns} of {d} columns, in groups of {group} rows");
        return Err(CodegenError::new(what));
    }
    let shares: Vec<String> = of.shares.iter().map(|n| format!("{n}u")).collect();
    let shares = shares.join(", ");
    let DrawnColumns {
        unit,
        group,
        period,
        seed,
        ..
    } = of;
    Ok(Choice {
        common: format!(
            "#define CHOICES {k}u
#define UNIT {unit}u
#define GROUP {group}u
#define PERIOD {period}u
#define SEED {seed}ull
__constant__ u32 SHARES[D] = {{{shares}}};
{FORCED}"
        ),
        of_block: "  __shared__ Columns columns;
  const u32 first = place_columns(data_rank, blockIdx.x * WARPS / GROUP, columns);
"
        .to_owned(),
        of_row: "    u32 chosen[CHOICES];
    forced_columns(columns, first, r % GROUP, chosen);
    float sum = 0.0f;
    for (u32 n = 0; n < CHOICES; n++) sum += s[chosen[n]];
"
        .to_owned(),
    })
}

/// Generates `logits[, bias] -> weights, ids`.
pub(in crate::kernels) fn route(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::Route,
) -> Result<Module, CodegenError> {
    let ([logits], [weights, ids]) = slots::<1, 2>(op)?;
    let (rows, d) = strides::matrix(logits);
    let (k, groups) = (of.k as usize, of.groups as usize);
    let fits = (1..=d).contains(&k) && (1..=64).contains(&groups) && d.is_multiple_of(groups);
    if !fits || numel(weights) != rows * k || numel(ids) != rows * k {
        let what = format!("{k} of {d} columns in {groups} groups");
        return Err(CodegenError::new(what));
    }
    integers(req, "ids", &[ids])?;
    let (mut params, mut declared) = req.operands();
    let choice = match &of.forced {
        None => by_score(req, op, of)?,
        Some(ForcedChoice::RoundRobin) => round_robin(of.k, d),
        Some(ForcedChoice::Drawn(columns)) => {
            params.push(Param::DataRank);
            declared.push("u32 data_rank".to_owned());
            drawn(columns, of.k, d)?
        }
    };
    let weight = if of.normalize {
        format!("s[chosen[n]] / (sum + {TINY})")
    } else {
        "s[chosen[n]]".to_owned()
    };
    let source = format!(
        "{common}{own}KERNEL(128) k0({args}) {{
  __shared__ float row[WARPS][2][D];
{of_block}  const u32 q = threadIdx.x % 32, r = blockIdx.x * WARPS + threadIdx.x / 32;
  float *s = row[threadIdx.x / 32][0], *by = row[threadIdx.x / 32][1];
  if (r < {rows}u) {{
    load_row({logits} + (u64)r * D, s);
    for (u32 c = q; c < D; c += 32) by[c] = s[c];
    __syncwarp();
    scores(s);
{of_row}    if (q == 0)
      for (u32 n = 0; n < {k}u; n++) {{
        down({scale} * ({weight}), {weights}[(u64)r * {k}u + n]);
        {ids}[(u64)r * {k}u + n] = chosen[n];
      }}
  }}
}}
",
        common = common(d, of.sigmoid)?,
        own = choice.common,
        args = declared.join(", "),
        of_block = choice.of_block,
        logits = contiguous(req, logits)?,
        of_row = choice.of_row,
        scale = float(of.scale.0 as f32),
        weights = contiguous(req, weights)?,
        ids = contiguous(req, ids)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(rows, ROWS)?, 1, 1], 128, &params)],
        scratch: 0,
    })
}

/// Ids that a block counts.
const COUNTED: usize = 8192;

/// Generates `ids -> counts`: counts of blocks, then their sums.
pub(in crate::kernels) fn count_experts(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let ([ids], [out]) = slots::<1, 1>(op)?;
    let (n, d) = (numel(ids), numel(out));
    integers(req, "ids", &[ids])?;
    if d > COLUMNS {
        let what = format!("{d} experts; at most {COLUMNS} fit into shared memory");
        return Err(CodegenError::new(what));
    }
    let per = n.div_ceil(COUNTED);
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Scratch(0), Param::Fault, Param::Launch]);
    declared.extend(["u32* parts", "u64* fault", "u32 launch"].map(str::to_owned));
    let source = format!(
        "KERNEL(1024) k0({args}) {{
  __shared__ u32 counts[{d}];
  for (u32 c = threadIdx.x; c < {d}u; c += 1024) counts[c] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < {COUNTED}u; i += 1024) {{
    const u64 at = (u64)blockIdx.x * {COUNTED}u + i;
    if (at >= {n}u) break;
    const i64 c = {ids}[at];
    if (!bad_id(c, {d}, fault, launch)) atomicAdd(&counts[c], 1u);
  }}
  __syncthreads();
  for (u32 c = threadIdx.x; c < {d}u; c += 1024) parts[blockIdx.x * {d}u + c] = counts[c];
}}
KERNEL(256) k1({args}) {{
  const u32 c = blockIdx.x * 256u + threadIdx.x;
  if (c >= {d}u) return;
  u32 count = 0;
  for (u32 p = 0; p < {per}u; p++) count += parts[p * {d}u + c];
  down((float)count, {out}[c]);
}}
",
        args = declared.join(", "),
        ids = contiguous(req, ids)?,
        out = contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![
            entry("k0", [per as u32, 1, 1], 1024, &params),
            entry("k1", [blocks(d, 256)?, 1, 1], 256, &params),
        ],
        scratch: (per * d * 4) as u64,
    })
}

/// Generates `d_weights, logits, ids -> d_logits`.
pub(in crate::kernels) fn route_grad(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::RouteGrad,
) -> Result<Module, CodegenError> {
    let ([dy, logits, ids], [out]) = slots::<3, 1>(op)?;
    let (rows, d) = strides::matrix(logits);
    let k = numel(ids) / rows.max(1);
    if numel(dy) != rows * k || numel(ids) != rows * k || numel(out) != rows * d {
        return Err(CodegenError::new("as many weights as ids"));
    }
    integers(req, "ids", &[ids])?;
    let gradient = if of.normalize {
        "(g - mean) / sum"
    } else {
        "g"
    };
    let spread = if of.sigmoid {
        "ds[c] * (s[c] * (1.0f - s[c]))"
    } else {
        "s[c] * (ds[c] - all)"
    };
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Fault, Param::Launch]);
    declared.extend(["u64* fault".to_owned(), "u32 launch".to_owned()]);
    let source = format!(
        "{common}KERNEL(128) k0({args}) {{
  __shared__ float row[WARPS][2][D];
  const u32 q = threadIdx.x % 32, r = blockIdx.x * WARPS + threadIdx.x / 32;
  float *s = row[threadIdx.x / 32][0], *ds = row[threadIdx.x / 32][1];
  if (r < {rows}u) {{
    load_row({logits} + (u64)r * D, s);
    scores(s);
    for (u32 c = q; c < D; c += 32) ds[c] = 0.0f;
    __syncwarp();
    float sum = {TINY}, mean = 0.0f, all = 0.0f;
    for (u32 n = 0; n < {k}u; n++) {{
      const i64 c = {ids}[(u64)r * {k}u + n];
      if (bad_id(c, D, fault, launch)) continue;
      sum += s[c];
      mean += up({dy}[(u64)r * {k}u + n]) * s[c];
    }}
    mean /= sum;
    for (u32 n = 0; n < {k}u; n++) {{
      const i64 c = {ids}[(u64)r * {k}u + n];
      if (c < 0 || c >= D) continue;
      const float g = up({dy}[(u64)r * {k}u + n]), d = {scale} * ({gradient});
      all += d * s[c];
      if (q == 0) ds[c] = d;
    }}
    __syncwarp();
    for (u32 c = q; c < D; c += 32) down({spread}, {out}[(u64)r * D + c]);
  }}
}}
",
        common = common(d, of.sigmoid)?,
        args = declared.join(", "),
        logits = contiguous(req, logits)?,
        ids = contiguous(req, ids)?,
        dy = contiguous(req, dy)?,
        scale = float(of.scale.0 as f32),
        out = contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(rows, ROWS)?, 1, 1], 128, &params)],
        scratch: 0,
    })
}
