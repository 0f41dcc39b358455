//! Maxima, scales and codes of sharded weights in 8 bits: the arithmetic of a bfloat16 weight whose
//! maximum, scale and codes follow from the whole tensor.

use super::ctype;
use crate::kernels::ops::float;
use shardlab_plan::ir::DType;

/// Finds the largest absolute value. Rounding keeps the order of numbers, so only the largest one
/// is rounded. Bits of floats that are not negative have the order of integers.
pub(super) fn amax(of: DType) -> String {
    let ty = ctype(of);
    format!(
        "  const {ty}* s = operand<const {ty}>(t, p, 1);
  __shared__ float sh[32];
  float m = 0.0f;
  u64 done = 0;
  if (aligned(s)) {{
    done = p.n / 8 * 8;
#pragma unroll 4
    for (u64 k = threadIdx.x * 8; k < done; k += 2048) {{
      float a[8];
      load<{ty}, 8>(s + k, a);
#pragma unroll
      for (int v = 0; v < 8; v++) m = fmaxf(m, fabsf(a[v]));
    }}
  }}
  for (u64 k = done + threadIdx.x; k < p.n; k += 256) m = fmaxf(m, fabsf(up(s[k])));
  m = row_all<Amax, 256>(m, sh);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(t.at[p.e][0]), __float_as_int(rounded<bf16>(m)));
"
    )
}

/// Makes scales and their reciprocals.
pub(super) fn scales(to: DType) -> String {
    let most = float(to.float8_max().unwrap_or(f32::INFINITY));
    format!(
        "  float* scale = operand<float>(t, p, 0);
  float* inverse = operand<float>(t, p, 1);
  const float* amax = operand<const float>(t, p, 2);
  for (u64 k = threadIdx.x; k < p.n; k += 256) {{
    const float s = scale_({most}, amax[k]);
    scale[k] = s;
    inverse[k] = 1.0f / s;
  }}
"
    )
}

/// Casts weights.
pub(super) fn codes(from: DType, to: DType) -> String {
    let (from, to) = (ctype(from), ctype(to));
    format!(
        "  Coded f;
  f.scale = t.at[p.e][2] ? *reinterpret_cast<const float*>(t.at[p.e][2]) : 1.0f;
  each<{from}, {to}, true>(operand<const {from}>(t, p, 1), operand<{to}>(t, p, 0), p.n, f);
"
    )
}
