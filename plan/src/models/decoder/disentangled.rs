//! Attention with a table of relative positions (DeBERTa).
//!
//! Each layer projects the table with its query and key projections, or with projections for the
//! table alone (DeBERTa v1), and adds the entry for the distance of each pair of positions to its
//! score. DeBERTa multiplies projected positions with the queries and keys of each sample. The plan
//! adds biases that all samples share, which launches fewer kernels.

use super::norm::Norm;
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

/// The table of relative positions of all layers, and its norm.
pub(super) struct Relative {
    table: Layer,
    norm: Option<Norm>,
}

impl Relative {
    /// Declares the table, if the model has one.
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model) -> Option<Self> {
        let rows = m.options.positions.disentangled_rows;
        (rows > 0).then(|| {
            // What it makes is used by all layers.
            d.blocks_differ();
            let module = d.module(at, "relative", ModuleKind::Layer);
            let names = ("positions", "deberta.encoder.rel_embeddings");
            let table = d.table(module, names, ModuleKind::Layer, [rows, m.hidden]);
            let names = ("norm", "deberta.encoder.LayerNorm");
            let normalizes = !m.options.positions.disentangled_projections;
            let norm =
                normalizes.then(|| Norm::new(d, module, names, m.hidden, m, Order::Declared));
            Self { table, norm }
        })
    }

    /// Returns the table, `[rows, hidden]`, normalized if it has a norm.
    pub(super) fn forward(&self, b: &mut Builder<'_>) -> ValueId {
        let rows = b.s.model.options.positions.disentangled_rows;
        let all = b.constant("positions", &[rows], DType::I64, false);
        let table = b.embedding(self.table, all);
        self.norm.map_or(table, |norm| norm.apply(b, table))
    }
}

/// Declares the layer's own projections of the table to queries and keys, unless it shares those of
/// the tokens.
pub(super) fn projections(d: &mut Declare, at: ModuleId, m: &Model) -> Option<[Layer; 2]> {
    let o = &m.options;
    (o.positions.disentangled_projections && o.positions.disentangled_rows > 0).then(|| {
        let shape = [m.heads * m.head_dim, m.hidden];
        d.rows(Some(0));
        let layers = [("pos_q", true), ("pos_k", false)];
        let layers = layers.map(|(name, bias)| d.linear(at, (name, ""), shape, bias));
        d.rows(None);
        layers
    })
}

/// Computes the biases of all pairs, `[heads, seq, seq]`, from the table by the projections of
/// queries and keys.
pub(super) fn biases(b: &mut Builder<'_>, table: ValueId, q: Layer, k: Layer) -> ValueId {
    let (seq, heads, hd) = (b.seq(), b.s.model.heads, b.s.model.head_dim);
    let rows = b.g.value(table).shape[0];
    let [by_query, by_key] = [q, k].map(|layer| b.linear(layer, table));
    let sum = b.g.binary(OpKind::Add, by_query, by_key);
    let sum = b.g.reshape(sum, &[rows * heads, hd]);
    let first = b.g.transpose(sum, 0, 1);
    let first = b.g.make_contiguous(first);
    let each = b.compute(OpKind::SumLeading, &[first], &[&[rows * heads]])[0];
    let each = b.g.reshape(each, &[rows, heads]);
    let pairs = b.constant("relative_positions", &[seq * seq], DType::I64, false);
    let of_pairs = b.compute(OpKind::Embedding, &[pairs, each], &[&[seq * seq, heads]])[0];
    let by_head = b.g.transpose(of_pairs, 0, 1);
    b.g.reshape(by_head, &[heads, seq, seq])
}
