//! Precision recipes: which element types a model computes in, and which ones are kept and sent for
//! its parameters.
//!
//! Families trace their operations without naming element types. A recipe types parameters and
//! inputs, and results follow from operands ([`OpDef::result`](crate::ops::OpDef::result)), as in
//! PyTorch. Between `models` and `autodiff`, [`convert`] visits the graph and converts operands
//! that an operation should read in another type, as torchtitan's model converters do for linear
//! layers. Everything after that reads types from the graph and from [`ParamTypes`].
//!
//! Casts to 8 bits depend on which matmuls share an operand, so `compile::float8` adds them to the
//! differentiated graph; [`Recipe::float8`] says for which layers.

mod float8;
mod mixed;

use crate::config::{MomentType, Precision};
use crate::graph::Graph;
use crate::ir::{DType, OpKind, Param};
pub(crate) use float8::{
    BlockPlace, FLOAT8_ALIGNMENT, Float8Linear, Scaling, are_experts, names_layer,
};
use mixed::Mixed;

/// The element types of a model.
pub(crate) trait Recipe {
    /// Returns the type in which the model reads a parameter.
    fn param(&self, p: &Param) -> DType;

    /// Returns the type of the model's floating-point inputs, and of tables that it multiplies
    /// activations by.
    fn activation(&self) -> DType;

    /// Returns the type in which an operation reads input `n`; `None` to read it as it is.
    fn operand(&self, op: &OpKind, n: usize) -> Option<DType>;

    /// Returns how the linear layer with this weight runs in 8 bits; `None` if it does not.
    /// `block` is the place of the block that the layer is in.
    fn float8(&self, weight: &Param, block: Option<BlockPlace>) -> Option<Float8Linear> {
        let _ = (weight, block);
        None
    }

    /// Returns the types in which parameters' state is kept and sent.
    fn param_types(&self) -> ParamTypes;
}

/// Element types in which parameters' state is kept and sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ParamTypes {
    /// The weight as the model reads it, which is gathered.
    pub(crate) compute: DType,
    /// The optimizer's weight; `None` if the optimizer updates the compute weight.
    pub(crate) main: Option<DType>,
    /// The shard of a weight that is not trained, where a policy keeps it in a type of its own.
    pub(crate) frozen: Option<DType>,
    /// The gradient between micro-batches.
    pub(crate) grads: DType,
    /// The gradient in reductions over the inner axis (policies fsdp2 and megatron: over both).
    pub(crate) comm: DType,
    /// Moments of the optimizer.
    pub(crate) moments: MomentType,
}

impl ParamTypes {
    /// Returns the type of torch's sharded parameters and of their gradients.
    pub(crate) fn stored(self) -> DType {
        self.main.unwrap_or(self.compute)
    }

    /// Returns the type of the shard of torch's sharded parameter. Bytes of a packed weight
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

/// Lets every operation of a forward graph read its operands in the types that a recipe says.
pub(crate) fn convert(g: &mut Graph, recipe: &dyn Recipe) {
    g.convert_operands(|op, n| recipe.operand(op, n));
}

#[cfg(test)]
mod tests;
