//! Same-padded convolutions with ReLU, then a dense layer over channels.

use super::build::Builder;
use super::declare::{Declare, Layer, ROOT, Weights};
use super::spec::{Conflict, Defaults, FamilySpec, Inputs};
use super::{Forward, loss};
use crate::config::{Bias, Family, Model};
use crate::graph::ValueId;
use crate::ir::{ModuleId, OpKind, op};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Cnn,
    name: "cnn",
    keys: &["channels", "height", "width", "kernel"],
    defaults: Defaults {
        bias: Bias::All,
        tie_embeddings: false,
        ffn: |_| 0,
        ffn_multiple: 1,
        max_seq_len: |_| None,
        seq_len: |_| 1,
    },
    inputs: Inputs::Images,
    attention: None,
    tensor_parallel: None,
    expert_parallel: None,
    torch_modules: true,
    keeps_type: false,
    weights: Weights::Uniform,
    hf: &[],
    dimensions: |_| Vec::new(),
    check,
    declare: |d, m| Box::new(Cnn::new(d, m)),
};

fn check(m: &Model) -> Result<(), Conflict> {
    Conflict::packed_projections(m)?;
    if !m.kernel.is_multiple_of(2) {
        return Ok(());
    }
    let message = format!(
        "a same-padded convolution needs an odd kernel, not {}",
        m.kernel
    );
    Err(Conflict::new(&["kernel"], message))
}

struct Cnn {
    blocks: Vec<Layer>,
    dense: Layer,
}

impl Cnn {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let block = |d: &mut Declare, module: ModuleId, m: &Model| {
            let shape = [m.channels, m.channels, m.kernel, m.kernel];
            d.parameters(module, "", &shape, m.bias == Bias::All)
        };
        Self {
            blocks: d.blocks(m, "", block),
            dense: d.head(("dense", ""), [1, m.channels], m.bias == Bias::All),
        }
    }
}

impl Forward for Cnn {
    fn forward(&self, b: &mut Builder<'_>) {
        let m = &b.s.model;
        let shape = [b.batch(), m.channels, m.height, m.width];
        let mut x = b.input(&shape);
        for &block in &self.blocks {
            if b.skips(block.module()) {
                continue;
            }
            let y = conv(b, block, x);
            let y = b.within(block.module(), |b| b.g.unary(OpKind::Relu, y));
            b.g.release(x);
            x = y;
        }
        // Channels last: two transposes stand for the permutation.
        let last = b.within(ROOT, |b| {
            let t = b.g.transpose(x, 1, 2);
            b.g.transpose(t, 2, 3)
        });
        let out = b.linear_unfused(self.dense, last);
        b.g.release(x);
        loss::mean_square(b, out);
    }
}

/// Applies `nn.Conv2d`: the convolution, then the bias in place.
fn conv(b: &mut Builder<'_>, layer: Layer, x: ValueId) -> ValueId {
    let (w, bias) = (b.weight(layer), b.bias(layer));
    let kernel = b.s.model.kernel;
    b.within(layer.module(), |b| {
        let mut shape = b.g.value(x).shape.clone();
        shape[1] = b.g.value(w).shape[0];
        let kind = OpKind::Conv(op::Conv { kernel });
        let y = b.compute(kind, &[x, w], &[&shape])[0];
        match bias {
            Some(bias) => {
                let channels = shape[1];
                let bias = b.g.reshape(bias, &[1, channels, 1, 1]);
                b.g.add_into(y, bias)
            }
            None => y,
        }
    })
}
