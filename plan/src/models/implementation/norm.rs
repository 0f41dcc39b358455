//! Norms, in float32 and in single operations.

use super::Builder;
use super::code::NormCode;
use crate::config::Norm;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, OpKind, Real, op};

/// Computes the mean of each row of `x`, `[.., 1]` in float32.
fn mean(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    let g = &mut b.g;
    let scale = Real(1.0 / g.value(x).cols() as f64);
    let mut rows = g.value(x).shape.clone();
    if let Some(last) = rows.last_mut() {
        *last = 1;
    }
    let kind = OpKind::RowSum(op::RowSum { scale });
    g.compute(kind, &[x], &[(&rows, DType::F32)])[0]
}

/// Multiplies the float32 rows `x` by `1 / sqrt(mean of squares + eps)`, where the squares are
/// those of `of`. Returns the result and the mean of the squares plus epsilon.
fn normalized(b: &mut Builder<'_>, x: ValueId, of: ValueId) -> (ValueId, ValueId) {
    let eps = Real(b.s.model.norm_eps);
    let exponent = Real(2.0);
    let squares = b.g.unary(OpKind::Pow(op::Pow { exponent }), of);
    let mean = mean(b, squares);
    let g = &mut b.g;
    let mean = g.unary(OpKind::Shift(op::Shift { by: eps }), mean);
    let rstd = g.unary(OpKind::Rsqrt, mean);
    (g.binary(OpKind::Mul, x, rstd), mean)
}

/// Normalizes the rows of `x` in float32 and multiplies them by the weight `w`.
///
/// `LlamaRMSNorm` multiplies in the type of `x`, `Olmo2RMSNorm`, `HeliumRMSNorm` and
/// `GemmaRMSNorm`, whose factor is `1 + w`, in float32.
pub(in crate::models) fn rms_norm(
    b: &mut Builder<'_>,
    module: ModuleId,
    x: ValueId,
    w: ValueId,
    kind: Norm,
) -> ValueId {
    let code = b.code().norm;
    b.within(module, |b| {
        let dtype = b.g.value(x).dtype;
        let float = b.g.cast(x, DType::F32);
        let (normalized, mean) = normalized(b, float, float);
        let y = match code {
            _ if kind == Norm::RmsUnitOffset => {
                let w = b.g.cast(w, DType::F32);
                let by = Real(1.0);
                let factor = b.g.unary(OpKind::Shift(op::Shift { by }), w);
                let y = b.g.binary(OpKind::Mul, normalized, factor);
                b.g.cast(y, dtype)
            }
            NormCode::InType => {
                let y = b.g.cast(normalized, dtype);
                b.g.binary(OpKind::Mul, w, y)
            }
            NormCode::Promoted | NormCode::Converted => weighted(b, w, normalized, dtype),
        };
        // The argument and the local variables of `forward`.
        for v in [float, mean, normalized, x] {
            b.g.release(v);
        }
        y
    })
}

/// Multiplies float32 rows by a weight and converts the result.
fn weighted(b: &mut Builder<'_>, w: ValueId, rows: ValueId, dtype: DType) -> ValueId {
    let w = match b.code().norm {
        NormCode::Converted => b.g.cast(w, DType::F32),
        NormCode::InType | NormCode::Promoted => w,
    };
    let y = b.g.promoted(OpKind::Mul, w, rows);
    b.g.cast(y, dtype)
}

/// Returns whether LayerNorm is not one call in the type of its input.
pub(in crate::models) fn has_own_code(b: &Builder<'_>) -> bool {
    b.is_transformers() && b.code().norm != NormCode::InType
}

/// Normalizes the rows of `x`, less their mean, in float32: `CohereLayerNorm` with the weight `w`,
/// `OlmoLayerNorm` without.
pub(in crate::models) fn layer_norm(
    b: &mut Builder<'_>,
    module: ModuleId,
    x: ValueId,
    w: Option<ValueId>,
) -> ValueId {
    b.within(module, |b| {
        let dtype = b.g.value(x).dtype;
        let float = b.g.cast(x, DType::F32);
        let Some(w) = w else {
            let width = b.g.value(x).cols();
            let ones = b.constant("ones", &[width], DType::F32, false);
            let y = b.layer_norm_by(module, float, ones, None);
            let y = b.g.cast(y, dtype);
            b.g.release(x);
            return y;
        };
        let mean = mean(b, float);
        let centered = b.g.binary(OpKind::Sub, float, mean);
        let again = b.g.binary(OpKind::Sub, float, mean);
        let (normalized, variance) = normalized(b, again, centered);
        let y = weighted(b, w, normalized, dtype);
        for v in [float, mean, variance, normalized, x] {
            b.g.release(v);
        }
        y
    })
}
