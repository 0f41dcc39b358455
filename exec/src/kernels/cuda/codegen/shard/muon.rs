//! Kernels of Muon around its matmuls.

use super::super::{PREAMBLE, ctype};
use super::COMMON;
use shardlab_plan::ir::DType;
use shardlab_plan::program::workspace::MUON_CHUNK;

/// Types of the operands of Muon, and the number of pieces of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::kernels::cuda) struct Types {
    pub(in crate::kernels::cuda) weight: DType,
    pub(in crate::kernels::cuda) grad: DType,
    pub(in crate::kernels::cuda) momentum: DType,
    pub(in crate::kernels::cuda) pieces: u32,
}

/// Generates the kernels that orthogonalize a matrix in bfloat16, except its matmuls:
///
/// - `k0(from, part, n)` writes a float64 sum of squares per block;
/// - `k1(sum, from, x, n)` divides by the norm.
pub(in crate::kernels::cuda) fn norm_source() -> String {
    format!(
        "#define CAP 1\n#define WIDTH 1\n#define CHUNK {MUON_CHUNK}u\n{PREAMBLE}\n{COMMON}
KERNEL(256) k0(const bf16* from, double* part, u64 n) {{
  const u64 start = blockIdx.x * (u64)CHUNK, end = start + CHUNK < n ? start + CHUNK : n;
  double sum = 0.0;
  for (u64 k = start + threadIdx.x; k < end; k += 256) {{
    const double v = (double)up(from[k]);
    sum += v * v;
  }}
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0) part[blockIdx.x] = sum;
}}
KERNEL(256) k1(const float* sum, const bf16* from, bf16* x, u64 n) {{
  const float norm = fmaxf(rounded<bf16>(sqrtf(*sum)), rounded<bf16>(1e-7f));
  const u64 k = blockIdx.x * 256ull + threadIdx.x;
  if (k < n) down(__fdiv_rn(up(from[k]), norm), x[k]);
}}
"
    )
}

/// Generates the kernel `k0(h, weight, x, original, matched, n)`, which updates rows of a matrix
/// whose weights have this type. The last factors are those of the learning rate by
/// `muon_adjust_lr`.
pub(in crate::kernels::cuda) fn rows_source(weight: DType) -> String {
    format!(
        "#define CAP 1\n#define WIDTH 1\n#define CHUNK {MUON_CHUNK}u\n{PREAMBLE}\n{COMMON}
KERNEL(256) k0(const Hyper* h, {weight}* w, const bf16* x, float original, float matched, u64 n) {{
  const float step = h->lr * (h->muon_rms != 0.0f ? matched : original);
  const u64 k = blockIdx.x * 256ull + threadIdx.x;
  if (k < n) down(up(w[k]) - step * up(x[k]), w[k]);
}}
",
        weight = ctype(weight)
    )
}

/// Generates the kernels for some types:
///
/// - `k0(all, h, square, grad, distance, factor, momentum, x, part, n)` updates the momentum and
///   writes what is orthogonalized, in bfloat16, with a float64 sum of squares per block;
/// - `k1(sum, x, n)` divides by the norm;
/// - `k2(h, weight, x, original, matched, n)` updates the weight; the last factors are those of the
///   learning rate by `muon_adjust_lr`.
pub(in crate::kernels::cuda) fn source(of: Types) -> String {
    format!(
        "#define CAP 1\n#define WIDTH 1\n#define CHUNK {MUON_CHUNK}u\n{PREAMBLE}\n{COMMON}
KERNEL(256) k0(const Hyper* all, const Hyper* h, const float* square, const {grad}* g, u64 apart, float factor, {momentum}* m, bf16* x, double* part, u64 n) {{
  const float clip = clip_factor(all, square), rest = h->muon_rest;
  const u64 from = blockIdx.x * (u64)CHUNK, end = from + CHUNK < n ? from + CHUNK : n;
  double sum = 0.0;
  for (u64 k = from + threadIdx.x; k < end; k += 256) {{
    float gs[1];
    {read};
    const float grad = gs[0] * clip, old = up(m[k]), mean = old + rest * (grad - old);
    down(mean, m[k]);
    const float v = rounded<bf16>(mean - (mean - grad) * rest);
    down(v, x[k]);
    sum += (double)v * (double)v;
  }}
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0) part[blockIdx.x] = sum;
}}
KERNEL(256) k1(const float* sum, bf16* x, u64 n) {{
  const float norm = fmaxf(rounded<bf16>(sqrtf(*sum)), rounded<bf16>(1e-7f));
  const u64 k = blockIdx.x * 256ull + threadIdx.x;
  if (k < n) down(__fdiv_rn(up(x[k]), norm), x[k]);
}}
KERNEL(256) k2(const Hyper* h, {weight}* w, const bf16* x, float original, float matched, u64 n) {{
  const float step = h->lr * (h->muon_rms != 0.0f ? matched : original);
  const u64 k = blockIdx.x * 256ull + threadIdx.x;
  if (k < n) down(up(w[k]) * h->decay - step * up(x[k]), w[k]);
}}
",
        grad = ctype(of.grad),
        momentum = ctype(of.momentum),
        weight = ctype(of.weight),
        read = match of.pieces {
            1 => "gs[0] = up(g[k])".to_owned(),
            pieces => format!(
                "sum_of<{}, {pieces}, 1>(g + k, apart, factor, gs)",
                ctype(of.grad)
            ),
        },
    )
}
