//! Mixed precision: one type for parameters, activations and GEMMs, and float32 for losses.

use super::{BlockPlace, Float8Linear, ParamTypes, Recipe, float8};
use crate::config::Precision;
use crate::ir::{DType, OpKind, Param};

/// `[precision]` of a scenario, as FSDP's `MixedPrecisionPolicy`.
pub(super) struct Mixed {
    precision: Precision,
}

impl Mixed {
    pub(super) fn new(precision: Precision) -> Self {
        Self { precision }
    }
}

impl Recipe for Mixed {
    /// Returns the compute type, but float32 for biases that steps move: steps are too small for
    /// fewer bits.
    fn param(&self, p: &Param) -> DType {
        match p.router_bias {
            true => DType::F32,
            false => self.precision.compute,
        }
    }

    fn activation(&self) -> DType {
        self.precision.compute
    }

    /// GEMMs read factors in the compute type. Losses read the model's results in float32
    /// (`F.cross_entropy(logits.float(), …)`, `F.mse_loss(out.float(), …)`), and so do routers.
    /// Cross entropies can read the compute type instead.
    fn operand(&self, op: &OpKind, n: usize) -> Option<DType> {
        match (op, n) {
            (OpKind::Gemm(_), 0 | 1) => Some(self.precision.compute),
            (OpKind::LogSoftmax | OpKind::LogSumExp, 0) => {
                self.precision.loss_fp32_upcast.then_some(DType::F32)
            }
            (OpKind::SquaredError(_) | OpKind::Route(_), 0) => Some(DType::F32),
            _ => None,
        }
    }

    fn float8(&self, weight: &Param, block: Option<BlockPlace>) -> Option<Float8Linear> {
        float8::linear(&self.precision.float8, weight, block)
    }

    fn param_types(&self) -> ParamTypes {
        let p = &self.precision;
        ParamTypes {
            compute: p.compute,
            main: p.main_params,
            frozen: p.frozen_params.map(|f| f.dtype().unwrap_or(p.compute)),
            grads: p.main_grads,
            comm: p.comm_grads,
            moments: p.moments,
        }
    }
}
