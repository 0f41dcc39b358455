//! The module tree of a model and its parameters.

use super::{ModuleId, Shape};
use serde::Serialize;
use smallvec::SmallVec;

/// What a module is, as far as units, compile modes and capture scopes care.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModuleKind {
    /// The whole model.
    Root,
    /// Token (and position) embedding.
    Embedding,
    /// A repeated block: transformer block, linear layer, convolution.
    Block,
    /// The attention half of a block (norm and residual included).
    Attention,
    /// The feed-forward half of a block (norm and residual included).
    Mlp,
    /// A norm.
    Norm,
    /// The output projection.
    Head,
    /// The loss.
    Loss,
    /// Any other leaf.
    Layer,
}

/// A node of the module tree, in pre-order; index 0 is the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Module {
    /// Dotted path from the root, for example `layers.3.attention`; the root's is empty.
    pub path: String,
    /// Parent; `None` for the root.
    pub parent: Option<ModuleId>,
    /// Kind.
    pub kind: ModuleKind,
}

/// A unique parameter (a tied one appears once), in registration order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Param {
    /// Fully qualified name, for example `layers.3.attention.q.weight`.
    pub name: String,
    /// Every module that owns it; more than one when tied. The first is the registering module.
    pub modules: SmallVec<[ModuleId; 2]>,
    /// Shape, dimension 0 first.
    pub shape: Shape,
    /// Whether it is trained.
    pub requires_grad: bool,
}

impl Param {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Elements of one row: the product of all dimensions but the first (1 for a vector).
    #[must_use]
    pub fn row(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }
}
