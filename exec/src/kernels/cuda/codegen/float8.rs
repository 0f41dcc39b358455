//! Scales of tensors in 8 bits.

use super::{CodegenError, Entry, Module, Request, is_dense, numel};
use shardlab_plan::ir::BodyOp;

/// Threads of the only block: the maxima of a tensor's rows are a few thousand numbers.
const THREADS: u32 = 1024;

/// Generates the scale of a tensor and its reciprocal from the maxima of its rows; `most` is the
/// largest number of the 8-bit type.
pub(in crate::kernels) fn scale(
    req: &Request<'_>,
    op: &BodyOp,
    most: &str,
) -> Result<Module, CodegenError> {
    let ([maxima], [scale, inverse]) = (&op.inputs[..], &op.outputs[..]) else {
        return Err(CodegenError::new("a scale lacks operands"));
    };
    if !is_dense(maxima) || numel(scale) != 1 || numel(inverse) != 1 {
        return Err(CodegenError::new("maxima have gaps, or scales are many"));
    }
    let (params, declared) = req.operands();
    let [maxima_at, scale_at, inverse_at] = [maxima, scale, inverse].map(|slot| req.address(slot));
    let source = format!(
        "KERNEL({THREADS}) k0({}) {{
  __shared__ float sh[32];
  float m = 0.0f;
  for (u32 i = threadIdx.x; i < {}u; i += {THREADS}u) m = fmaxf(m, fabsf(up({}[i])));
  m = row_all<Amax, {THREADS}>(m, sh);
  if (threadIdx.x != 0) return;
  const float s = scale_({most}, m);
  down(s, {}[0]);
  down(1.0f / s, {}[0]);
}}
",
        declared.join(", "),
        numel(maxima),
        maxima_at?,
        scale_at?,
        inverse_at?,
    );
    Ok(Module {
        source,
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid: [1, 1, 1],
            block: THREADS,
            shared: 0,
            params,
        }],
        scratch: 0,
    })
}
