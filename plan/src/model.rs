//! Model families: forward op graph and module tree, with exact shapes, FLOPs and bytes.
//!
//! A family writes its forward pass once, as eager PyTorch would run it: every op, view and copy in issue order, with the
//! strides that decide whether a reshape copies. Everything after that (backward, saved tensors, recompute, fusion,
//! lifetimes) is derived from the graph by `autodiff` and `compile`.

pub(crate) mod build;
mod chunked;
mod cnn;
mod encoder;
pub(crate) mod flops;
mod gpt2;
mod linear;
mod llama;
mod loss;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod tree;

use crate::config::{Family, Scenario};
use crate::graph::{Graph, ValueId};
use crate::ir::{Module, Param};
use crate::units::Flops;

/// The forward graph of one micro-batch.
#[derive(Clone, Debug)]
pub struct ModelGraph {
    /// Modules and parameters.
    pub(crate) tree: tree::Tree,
    /// Forward ops.
    pub graph: Graph,
    /// The loss, a float32 scalar.
    pub loss: ValueId,
    /// Value of each parameter.
    pub params: Vec<ValueId>,
    /// Model FLOPs of forward and backward.
    pub model_flops: Flops,
    /// Tokens or samples.
    pub tokens: u64,
}

impl ModelGraph {
    /// Module tree in pre-order.
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        &self.tree.modules
    }

    /// Unique parameters in registration order.
    #[must_use]
    pub fn parameters(&self) -> &[Param] {
        &self.tree.params
    }
}

/// Builds the module tree and the forward graph of one micro-batch.
#[must_use]
pub fn graph(scenario: &Scenario) -> ModelGraph {
    graph_of(scenario, tree::Tree::new(scenario, scenario.model.layers))
}

/// The same over a given tree, which may have fewer blocks than the scenario.
pub(crate) fn graph_of(scenario: &Scenario, tree: tree::Tree) -> ModelGraph {
    let mut b = build::Builder::new(scenario, tree);
    match scenario.model.family {
        Family::Llama => llama::forward(&mut b),
        Family::Gpt2 => gpt2::forward(&mut b),
        Family::Encoder => encoder::forward(&mut b),
        Family::Linear => linear::forward(&mut b),
        Family::Cnn => cnn::forward(&mut b),
    }
    b.finish()
}
