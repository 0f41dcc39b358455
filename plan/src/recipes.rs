//! Precision recipes: the element types in which a model computes, and those in which the state of
//! its parameters is stored and communicated.
//!
//! Families trace their operations without naming element types. A recipe assigns types to
//! parameters and inputs, and the types of results follow from operands
//! ([`OpDef::result`](crate::ops::OpDef::result)), as in PyTorch. Between `models` and `autodiff`,
//! [`convert`] visits the graph and converts operands that an operation should read in another
//! type, as torchtitan's model converters do for linear layers. All later stages read types from
//! the graph and from [`ParamTypes`].
//!
//! Casts to 8 bits depend on which matmuls share an operand, so `compile::float8` adds them to the
//! differentiated graph. [`Recipe::float8`] determines for which layers.

mod float8;
mod mixed;

use crate::config::{MomentType, Precision};
use crate::graph::Graph;
use crate::ir::{DType, OpKind, Param};
pub(crate) use float8::{
    BlockPlace, FLOAT8_ALIGNMENT, Float8Linear, Scaling, are_experts, gathered_block, names_layer,
};
use mixed::Mixed;

/// The element types of a model.
pub(crate) trait Recipe {
    /// Returns the type in which the model reads a parameter.
    fn param(&self, p: &Param) -> DType;

    /// Returns the type of the model's floating-point inputs, and of tables that activations are
    /// multiplied by.
    fn activation(&self) -> DType;

    /// Returns the type in which an operation reads input `n`; `None` to read it in its own type.
    fn operand(&self, op: &OpKind, n: usize) -> Option<DType>;

    /// Returns how the linear layer with this weight runs in 8 bits; `None` if it does not. `block`
    /// is the place of the layer's block.
    fn float8(&self, weight: &Param, block: Option<BlockPlace>) -> Option<Float8Linear> {
        let _ = (weight, block);
        None
    }

    /// Returns the types in which the state of parameters is stored and communicated.
    fn param_types(&self) -> ParamTypes;
}

/// Element types in which the state of parameters is stored and communicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ParamTypes {
    /// The weight as the model reads it, which is gathered.
    pub(crate) compute: DType,
    /// The optimizer's weight; `None` if the optimizer updates the compute weight.
    pub(crate) main: Option<DType>,
    /// The shard of a frozen weight, if a policy stores it in a separate type.
    pub(crate) frozen: Option<DType>,
    /// The gradient between micro-batches.
    pub(crate) grads: DType,
    /// The gradient in reductions over the inner axis (policies fsdp2 and megatron: over both).
    pub(crate) comm: DType,
    /// Moments of the optimizer.
    pub(crate) moments: MomentType,
}

impl ParamTypes {
    /// Returns the type of PyTorch's sharded parameters and of their gradients.
    pub(crate) fn stored(self) -> DType {
        self.main.unwrap_or(self.compute)
    }

    /// Returns the type of the shard of PyTorch's sharded parameter. The bytes of a packed weight
    /// are never converted.
    pub(crate) fn shard(self, p: &Param) -> DType {
        if p.packed.is_some() {
            return self.compute;
        }
        let frozen = self.frozen.filter(|_| !p.requires_grad);
        frozen.unwrap_or(self.stored())
    }
}

/// Returns the recipe that a scenario asks for.
pub(crate) fn of(precision: &Precision) -> Box<dyn Recipe> {
    Box::new(Mixed::new(precision.clone()))
}

/// Makes every operation of a forward graph read its operands in the types of a recipe.
pub(crate) fn convert(g: &mut Graph, recipe: &dyn Recipe) {
    g.convert_operands(|op, n| recipe.operand(op, n));
}

#[cfg(test)]
mod tests;
