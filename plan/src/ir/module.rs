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
    /// Values before the first step. No part of the program: digests do not depend on it.
    #[serde(skip)]
    pub init: Init,
    /// Where Hugging Face's code has it; `None` for families without such a form. No part of the
    /// program either.
    #[serde(skip)]
    pub hf: Option<HfName>,
}

/// Values of a parameter before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Normally distributed around zero.
    Normal,
    /// Uniform between plus and minus `1 / sqrt(fan_in)`, as `nn.Linear` starts.
    Uniform {
        /// Inputs of one output.
        fan_in: u64,
    },
}

/// A module's name in Hugging Face's code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HfName {
    /// Path of the module, for example `model.layers.3.self_attn.q_proj`.
    pub module: String,
    /// The weight is stored as `[in, out]` (GPT-2's `Conv1D`).
    pub transposed: bool,
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
