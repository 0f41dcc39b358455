//! A stack of `Linear(hidden, hidden)` with ReLU on `micro_batch * seq_len` rows.
//!
//! Tensor parallelism divides pairs of layers: the first by outputs (column-parallel), the second
//! by inputs (row-parallel).

use super::build::Builder;
use super::declare::{Declare, Layer, Weights};
use super::spec::{Conflict, Defaults, FamilySpec, Inputs};
use super::{Forward, loss};
use crate::config::{Bias, Family, Model};
use crate::ir::{AxisId, ModuleId, OpKind};

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
    tensor_parallel: Some(|m| ("hidden", m.hidden)),
    expert_parallel: None,
    torch_modules: true,
    keeps_type: false,
    weights: Weights::Uniform,
    hf: &[],
    dimensions: |m| vec![("hidden", m.hidden)],
    check: Conflict::packed_projections,
    declare: |d, m| Box::new(Linear::new(d, m)),
};

/// How tensor parallelism divides a layer.
#[derive(Clone, Copy)]
enum Part {
    /// Every rank has all of it.
    Whole,
    /// Every rank has some of its outputs, which are the next layer's inputs.
    Outputs,
    /// Every rank has the weights of some of its inputs.
    Inputs,
}

struct Linear {
    blocks: Vec<(Layer, Part)>,
}

impl Linear {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let is_divided = d.mesh.size(AxisId::TP) > 1;
        // Pairs of layers are divided, as the two of a feed-forward layer are: one all-reduce each.
        let part = move |layer: usize| match layer {
            _ if !is_divided => Part::Whole,
            layer if layer % 2 == 1 => Part::Inputs,
            layer if layer + 1 == m.layers as usize => Part::Whole,
            _ => Part::Outputs,
        };
        let block = |d: &mut Declare, module: ModuleId, m: &Model| {
            let (shape, bias) = ([m.hidden, m.hidden], m.bias == Bias::All);
            let part = part(d.layer());
            let layer = match part {
                Part::Whole => d.parameters(module, "", &shape, bias),
                Part::Outputs => d.divided(module, shape, bias, AxisId::TP, 0),
                Part::Inputs => d.divided(module, shape, bias, AxisId::TP, 1),
            };
            (layer, part)
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
        for &(block, part) in &self.blocks {
            if b.skips(block.module()) {
                continue;
            }
            let y = match part {
                Part::Whole => b.linear(block, x),
                Part::Outputs => b.column_parallel(block, AxisId::TP, x),
                Part::Inputs => b.row_parallel(block, AxisId::TP, x),
            };
            let y = b.within(block.module(), |b| b.g.unary(OpKind::Relu, y));
            b.g.release(x);
            x = y;
        }
        loss::mean_square(b, x);
    }
}
