//! Maxima, scales and codes of sharded weights in 8 bits. Weights are rounded first, so results
//! equal those of a whole rounded weight.

use super::ctype;
use crate::kernels::ops::float;
use shardlab_plan::ir::{DType, RECIPROCAL_STRIDE};

/// Returns the statements before and after those that see the numbers of a range ([`seen`]): they
/// add the largest absolute value to the maximum at operand `slot`, unless that is null.
///
/// Rounding keeps the order of numbers, so only the largest one is rounded. Bits of floats that are
/// not negative have the order of integers.
pub(super) fn maximum(slot: &str, through: DType) -> (String, String) {
    let rounded = ctype(through);
    let before = "  __shared__ float most_of_warp[32];\n  float most = 0.0f;\n".to_owned();
    let after = format!(
        "  most = row_all<Amax, 256>(most, most_of_warp);
  if (threadIdx.x == 0 && t.at[p.e][{slot}]) atomicMax(reinterpret_cast<int*>(t.at[p.e][{slot}]), __float_as_int(rounded<{rounded}>(most)));
"
    );
    (before, after)
}

/// Returns the statement that sees a number.
pub(super) fn seen(x: &str) -> String {
    format!(" most = fmaxf(most, fabsf({x}));")
}

/// Finds the largest absolute value.
pub(super) fn amax(of: DType, through: DType) -> String {
    let ty = ctype(of);
    let (before, after) = maximum("0", through);
    format!(
        "  const {ty}* s = operand<const {ty}>(t, p, 1);
{before}  u64 done = 0;
  if (aligned(s)) {{
    done = p.n / 8 * 8;
#pragma unroll 4
    for (u64 k = threadIdx.x * 8; k < done; k += 2048) {{
      float a[8];
      load<{ty}, 8>(s + k, a);
#pragma unroll
      for (int v = 0; v < 8; v++) {{{each}}}
    }}
  }}
  for (u64 k = done + threadIdx.x; k < p.n; k += 256) {{{one}}}
{after}",
        each = seen("a[v]"),
        one = seen("up(s[k])"),
    )
}

/// Makes scales and their reciprocals.
pub(super) fn scales(to: DType) -> String {
    let most = float(to.float8_max().unwrap_or(f32::INFINITY));
    format!(
        "  float* scale = operand<float>(t, p, 0);
  float* inverse = operand<Pack<float, {RECIPROCAL_STRIDE}>>(t, p, 1)->e;
  const float* amax = operand<const float>(t, p, 2);
  for (u64 k = threadIdx.x; k < p.n; k += 256) {{
    const float s = scale_({most}, amax[k]);
    scale[k] = s;
    inverse[k * {RECIPROCAL_STRIDE}] = 1.0f / s;
  }}
"
    )
}

/// Casts weights.
pub(super) fn codes(from: DType, through: DType, to: DType) -> String {
    let [from, through, to] = [from, through, to].map(ctype);
    format!(
        "  Coded<{through}> f;
  f.scale = t.at[p.e][2] ? *reinterpret_cast<const float*>(t.at[p.e][2]) : 1.0f;
  each<{from}, {to}, true>(operand<const {from}>(t, p, 1), operand<{to}>(t, p, 0), p.n, f);
"
    )
}

/// Casts a block of 128x128 weights of a matrix, with its own scale, a power of two. The number of
/// a block of threads within its range is that of the block, row of blocks by row of blocks. Each
/// warp has every eighth row, and a lane four adjacent weights of each.
pub(super) fn block_codes(from: DType, through: DType, to: DType) -> String {
    let most = float(to.float8_max().unwrap_or(f32::INFINITY));
    let [from, through, to] = [from, through, to].map(ctype);
    format!(
        "  __shared__ float most_of_warp[32];
  const u64 cols = t.at[p.e][3], across = cols / 128, block = p.from / CHUNK;
  const u32 warp = threadIdx.x / 32;
  const u64 first = (block / across * 128 + warp) * cols + block % across * 128 + threadIdx.x % 32 * 4;
  const {from}* s = reinterpret_cast<const {from}*>(t.at[p.e][1]) + first;
  {to}* d = reinterpret_cast<{to}*>(t.at[p.e][0]) + first;
  float v[16][4], most = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; j++) {{
    load<{from}, 4>(s + j * 8 * cols, v[j]);
#pragma unroll
    for (int i = 0; i < 4; i++) {{
      v[j][i] = rounded<{through}>(v[j][i]);
      most = fmaxf(most, fabsf(v[j][i]));
    }}
  }}
  most = row_all<Amax, 256>(most, most_of_warp);
  const float scale = power_of_two(scale_({most}, most));
  if (threadIdx.x == 0) reinterpret_cast<float*>(t.at[p.e][2])[block] = 1.0f / scale;
#pragma unroll
  for (int j = 0; j < 16; j++) {{
#pragma unroll
    for (int i = 0; i < 4; i++) v[j][i] = scaled_(v[j][i], scale);
    store<{to}, 4>(d + j * 8 * cols, v[j]);
  }}
"
    )
}
