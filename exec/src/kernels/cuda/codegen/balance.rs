//! Losses of routers: sums over rows, in an order that depends on shapes alone.

use super::route::{ROWS as PER_BLOCK, common};
use super::tables::{contiguous, entry, slots};
use super::{CodegenError, Module, Param, Request, blocks, float, numel};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, Place, Slot, op};

/// Rows of a block, at least: each of its four warps has a quarter.
const ROWS: usize = 32;
/// Most blocks of a sequence.
const BLOCKS: usize = 1024;

/// Returns how many rows a block has, and how many blocks cover `n` rows.
fn parts(n: usize) -> (usize, usize) {
    let rows = ROWS.max(n.div_ceil(BLOCKS).next_multiple_of(ROWS));
    (rows, n.div_ceil(rows))
}

/// Returns a scalar operand as C.
fn scalar(req: &Request<'_>, slot: &Slot) -> Result<String, CodegenError> {
    Ok(format!("up({}[0])", contiguous(req, slot)?))
}

/// Generates `logits -> loss, counts`: sums and counts of blocks, then of sequences, then the loss.
pub(in crate::kernels) fn load_balance(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::LoadBalance,
) -> Result<Module, CodegenError> {
    let ([logits], [loss, counts]) = slots::<1, 2>(op)?;
    let (all, d) = strides::matrix(logits);
    let (sequences, k) = (of.sequences as usize, of.k as usize);
    if sequences == 0 || all % sequences != 0 || k > d || numel(counts) != sequences * d {
        let what = format!("{k} of {d} columns, {all} rows of {sequences} sequences");
        return Err(CodegenError::new(what));
    }
    if !matches!(loss.place, Place::Write(_)) {
        return Err(CodegenError::new("the loss goes to memory"));
    }
    let n = all / sequences;
    let (rows, per) = parts(n);
    let partial = (sequences * per * 2 * d * 4).next_multiple_of(8);
    let by = of.scale.0 * d as f64 / (sequences * n * n) as f64;
    let normalized = if of.sigmoid { "normalize(s);" } else { "" };
    let (mut params, mut declared) = req.operands();
    params.extend([Param::Scratch(0), Param::Scratch(partial as u64)]);
    declared.extend(["float* parts", "double* totals"].map(str::to_owned));
    let source = format!(
        "{common}KERNEL(128) k0({args}) {{
  __shared__ float row[WARPS][2][D], sums[WARPS][D], counts[WARPS][D];
  const u32 q = threadIdx.x % 32, w = threadIdx.x / 32;
  float *s = row[w][0], *by = row[w][1];
  for (u32 c = q; c < D; c += 32) sums[w][c] = counts[w][c] = 0.0f;
  __syncwarp();
  for (u32 i = 0; i < {each}u; i++) {{
    const u32 r = blockIdx.x * {rows}u + w * {each}u + i;
    if (r >= {n}u) break;
    load_row({logits} + ((u64)blockIdx.y * {n}u + r) * D, s);
    for (u32 c = q; c < D; c += 32) by[c] = s[c];
    __syncwarp();
    for (u32 j = 0; j < {k}u; j++) {{
      const u32 c = take_largest(by, D);
      if (q == 0) counts[w][c] += 1.0f;
    }}
    scores(s);
    {normalized}
    for (u32 c = q; c < D; c += 32) sums[w][c] += s[c];
    __syncwarp();
  }}
  __syncthreads();
  float* to = parts + ((u64)blockIdx.y * {per}u + blockIdx.x) * 2 * D;
  for (u32 c = threadIdx.x; c < D; c += 128) {{
    to[c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
    to[D + c] = counts[0][c] + counts[1][c] + counts[2][c] + counts[3][c];
  }}
}}
KERNEL(256) k1({args}) {{
  const float* from = parts + (u64)blockIdx.x * {per}u * 2 * D;
  double total = 0.0;
  for (u32 c = threadIdx.x; c < D; c += 256) {{
    double sum = 0.0, count = 0.0;
    for (u32 p = 0; p < {per}u; p++) sum += from[p * 2 * D + c], count += from[p * 2 * D + D + c];
    down((float)count, {counts}[blockIdx.x * D + c]);
    total += sum * count;
  }}
  total = block_sum<256>(total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}}
KERNEL(32) k2({args}) {{
  if (threadIdx.x > 0) return;
  double total = 0.0;
  for (u32 i = 0; i < {sequences}u; i++) total += totals[i];
  down((float)({by:e} * total), {loss}[0]);
}}
",
        common = common(d, of.sigmoid)?,
        args = declared.join(", "),
        each = rows / 4,
        logits = contiguous(req, logits)?,
        counts = contiguous(req, counts)?,
        loss = req.address(loss)?,
    );
    let grid = |x: usize, y: usize| [x as u32, y as u32, 1];
    Ok(Module {
        source,
        entries: vec![
            entry("k0", grid(per, sequences), 128, &params),
            entry("k1", grid(sequences, 1), 256, &params),
            entry("k2", grid(1, 1), 32, &params),
        ],
        scratch: (partial + sequences * 8) as u64,
    })
}

/// Generates `d_loss, logits, counts -> d_logits`.
pub(in crate::kernels) fn load_balance_grad(
    req: &Request<'_>,
    op: &BodyOp,
    of: &op::LoadBalanceGrad,
) -> Result<Module, CodegenError> {
    let ([dy, logits, counts], [out]) = slots::<3, 1>(op)?;
    let (rows, d) = strides::matrix(logits);
    let sequences = numel(counts) / d.max(1);
    if sequences == 0 || rows % sequences != 0 || numel(out) != rows * d {
        let what = format!("{rows} rows of {sequences} sequences");
        return Err(CodegenError::new(what));
    }
    let n = rows / sequences;
    let by = of.scale.0 * d as f64 / (sequences * n * n) as f64;
    let (own, normalized) = match of.sigmoid {
        true => (" * (1.0f - own[c])", "normalize(s);"),
        false => ("", ""),
    };
    let (params, declared) = req.operands();
    let source = format!(
        "{common}KERNEL(128) k0({args}) {{
  __shared__ float row[WARPS][2][D];
  const u32 q = threadIdx.x % 32, r = blockIdx.x * WARPS + threadIdx.x / 32;
  float *s = row[threadIdx.x / 32][0], *own = row[threadIdx.x / 32][1];
  if (r < {rows}u) {{
    load_row({logits} + (u64)r * D, s);
    scores(s);
    for (u32 c = q; c < D; c += 32) own[c] = s[c];
    __syncwarp();
    {normalized}
    const float by = {dy} * {by};
    const {ct}* counts = {counts} + (u64)(r / {n}u) * D;
    float mean = 0.0f;
    for (u32 c = q; c < D; c += 32) mean += by * up(counts[c]) * s[c];
    mean = warp_all<Sum>(mean);
    for (u32 c = q; c < D; c += 32) down(s[c] * (by * up(counts[c]) - mean){own}, {out}[(u64)r * D + c]);
  }}
}}
",
        common = common(d, of.sigmoid)?,
        args = declared.join(", "),
        logits = contiguous(req, logits)?,
        dy = scalar(req, dy)?,
        by = float(by as f32),
        ct = req.memory(counts)?,
        counts = contiguous(req, counts)?,
        out = contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(rows, PER_BLOCK)?, 1, 1], 128, &params)],
        scratch: 0,
    })
}

/// Generates `logits -> loss`, the mean square of the log-sum-exp.
pub(in crate::kernels) fn z_loss(
    req: &Request<'_>,
    op: &BodyOp,
    scale: f64,
) -> Result<Module, CodegenError> {
    let ([logits], [loss]) = slots::<1, 1>(op)?;
    let (n, d) = strides::matrix(logits);
    if !matches!(loss.place, Place::Write(_)) {
        return Err(CodegenError::new("the loss goes to memory"));
    }
    let (rows, per) = parts(n);
    let (mut params, mut declared) = req.operands();
    params.push(Param::Scratch(0));
    declared.push("double* totals".to_owned());
    let source = format!(
        "{common}KERNEL(128) k0({args}) {{
  __shared__ float row[WARPS][D];
  const u32 w = threadIdx.x / 32;
  double total = 0.0;
  for (u32 i = 0; i < {each}u; i++) {{
    const u32 r = blockIdx.x * {rows}u + w * {each}u + i;
    if (r >= {n}u) break;
    load_row({logits} + (u64)r * D, row[w]);
    const double z = scores(row[w]);
    total += z * z;
  }}
  total = block_sum<128>(threadIdx.x % 32 == 0 ? total : 0.0);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}}
KERNEL(32) k1({args}) {{
  if (threadIdx.x > 0) return;
  double total = 0.0;
  for (u32 i = 0; i < {per}u; i++) total += totals[i];
  down((float)({by:e} * total), {loss}[0]);
}}
",
        common = common(d, false)?,
        args = declared.join(", "),
        each = rows / 4,
        logits = contiguous(req, logits)?,
        by = scale / n as f64,
        loss = req.address(loss)?,
    );
    Ok(Module {
        source,
        entries: vec![
            entry("k0", [per as u32, 1, 1], 128, &params),
            entry("k1", [1, 1, 1], 32, &params),
        ],
        scratch: (per * 8) as u64,
    })
}

/// Generates `d_loss, logits -> d_logits`.
pub(in crate::kernels) fn z_loss_grad(
    req: &Request<'_>,
    op: &BodyOp,
    scale: f64,
) -> Result<Module, CodegenError> {
    let ([dy, logits], [out]) = slots::<2, 1>(op)?;
    let (rows, d) = strides::matrix(logits);
    if numel(out) != rows * d {
        return Err(CodegenError::new("a gradient for each logit"));
    }
    let (params, declared) = req.operands();
    let source = format!(
        "{common}KERNEL(128) k0({args}) {{
  __shared__ float row[WARPS][D];
  const u32 r = blockIdx.x * WARPS + threadIdx.x / 32;
  float* s = row[threadIdx.x / 32];
  if (r < {rows}u) {{
    load_row({logits} + (u64)r * D, s);
    const float z = scores(s), by = {dy} * {by};
    for (u32 c = threadIdx.x % 32; c < D; c += 32) down(s[c] * (by * z), {out}[(u64)r * D + c]);
  }}
}}
",
        common = common(d, false)?,
        args = declared.join(", "),
        logits = contiguous(req, logits)?,
        dy = scalar(req, dy)?,
        by = float((2.0 * scale / rows as f64) as f32),
        out = contiguous(req, out)?,
    );
    Ok(Module {
        source,
        entries: vec![entry("k0", [blocks(rows, PER_BLOCK)?, 1, 1], 128, &params)],
        scratch: 0,
    })
}
