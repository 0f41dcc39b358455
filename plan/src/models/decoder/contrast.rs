//! Contrastive losses: vectors of texts are compared with vectors of images (CLIP, SigLIP).

use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, ROOT};
use crate::models::loss;

/// Learned factor and summand of the dot products of vectors.
pub(super) struct Contrast {
    scale: Layer,
    bias: Option<Layer>,
}

impl Contrast {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Self {
        let mut number = |name| {
            let at = d.module(ROOT, name, ModuleKind::Layer);
            d.parameters(at, "", &[1], false)
        };
        Self {
            scale: number("logit_scale"),
            bias: m.options.output.sigmoid_loss.then(|| number("logit_bias")),
        }
    }

    /// Adds the loss of the vectors of texts and images, each `[batch, width]`. Exponential and
    /// logarithm of a sigmoid are planned as functions that cost as much.
    pub(super) fn forward(&self, b: &mut Builder<'_>, text: ValueId, image: ValueId) {
        let batch = b.batch();
        let (scale, bias) = (b.weight(self.scale), self.bias.map(|bias| b.weight(bias)));
        let logits = b.within(ROOT, |b| {
            let [text, image] = [text, image].map(|x| unit(b, x));
            let kind = OpKind::Gemm(op::Gemm {
                ta: false,
                tb: true,
                bias: false,
                accumulate: false,
            });
            let all = b.compute(kind, &[text, image], &[&[batch, batch]])[0];
            let scale = b.g.reshape(scale, &[]);
            let scale = b.g.unary(OpKind::Silu, scale);
            let all = b.g.binary(OpKind::Mul, all, scale);
            match bias {
                Some(bias) => {
                    let bias = b.g.reshape(bias, &[]);
                    b.g.binary(OpKind::Add, all, bias)
                }
                None => all,
            }
        });
        if self.bias.is_some() {
            let signs = b.constant("signs_of_pairs", &[batch, batch], DType::F32, false);
            return loss::sum_of(b, logits, signs, 1.0 / batch as f64);
        }
        let pairs = b.constant("pairs", &[batch], DType::I64, false);
        let columns = b.within(ROOT, |b| b.g.transpose(logits, 0, 1));
        loss::two_cross_entropies(b, [logits, columns], pairs);
    }
}

/// Divides the rows of `x` by their lengths.
fn unit(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    let rows = b.g.value(x).rows();
    let squares = b.g.binary(OpKind::Mul, x, x);
    let kind = OpKind::RowSum(op::RowSum { scale: Real(1.0) });
    let sum = b.compute(kind, &[squares], &[&[rows, 1]])[0];
    let inverse = b.g.unary(OpKind::Rsqrt, sum);
    b.g.binary(OpKind::ScaleRows, x, inverse)
}
