//! A stack of `Linear(hidden, hidden)` with ReLU on `micro_batch * seq_len` rows.

use super::build::Builder;
use super::declare::{Declare, Layer, Weights};
use super::spec::{Conflict, Defaults, FamilySpec, Inputs};
use super::{Forward, loss};
use crate::config::{Bias, Family, Model};
use crate::ir::{ModuleId, OpKind};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Linear,
    name: "linear",
    keys: &["hidden"],
    defaults: Defaults {
        bias: Bias::All,
        tie_embeddings: false,
        ffn: |_| 0,
        ffn_multiple: 1,
        max_seq_len: |_| None,
        seq_len: |_| 1,
    },
    inputs: Inputs::Features,
    attention: None,
    torch_modules: true,
    weights: Weights::Uniform,
    hf: &[],
    dimensions: |m| vec![("hidden", m.hidden)],
    check: Conflict::packed_projections,
    declare: |d, m| Box::new(Linear::new(d, m)),
};

struct Linear {
    blocks: Vec<Layer>,
}

impl Linear {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let block = |d: &mut Declare, module: ModuleId, m: &Model| {
            d.parameters(module, "", &[m.hidden, m.hidden], m.bias == Bias::All)
        };
        Self {
            blocks: d.blocks(m, "", block),
        }
    }
}

impl Forward for Linear {
    fn forward(&self, b: &mut Builder<'_>) {
        let rows = b.batch() * b.seq();
        let mut x = b.input(&[rows, b.s.model.hidden]);
        for &block in &self.blocks {
            let y = b.linear(block, x);
            let y = b.within(block.module(), |b| b.g.unary(OpKind::Relu, y));
            b.g.release(x);
            x = y;
        }
        loss::mean_square(b, x);
    }
}
