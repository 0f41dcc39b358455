//! Which linear layers run in 8 bits, and with which types and scales.

use crate::config::pattern::part_of;
use crate::config::{Float8, Float8Recipe, Float8Saved};
use crate::ir::{DType, Param, ScaleBlock};

/// How the matmuls of a linear layer read their factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Float8Linear {
    /// What shares a scale.
    pub(crate) scaling: Scaling,
    /// Type of the gradient of the layer's output; its input and weight are e4m3.
    pub(crate) grad: DType,
    /// Whether forward writes the transposed codes that the gradient of the weight reads.
    pub(crate) saves_codes: bool,
    /// Whether forward accumulates with the precision of tensor cores.
    pub(crate) fast_accum: bool,
    /// Whether ranks gather its codes, so that matmuls read them directly.
    pub(crate) gathered: bool,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scaling {
    /// A tensor.
    Tensor,
    /// A row.
    Row,
    /// A block, with one size for weights and one for the operands that weights are multiplied by.
    Block {
        /// Blocks of weights.
        weights: ScaleBlock,
        /// Blocks of activations and gradients.
        others: ScaleBlock,
    },
}

impl Scaling {
    fn of(recipe: Float8Recipe) -> Option<Self> {
        Some(match recipe {
            Float8Recipe::None => return None,
            Float8Recipe::Tensorwise => Self::Tensor,
            Float8Recipe::Rowwise => Self::Row,
            Float8Recipe::Blockwise => Self::Block {
                weights: ScaleBlock::SQUARE,
                others: ScaleBlock::ROW,
            },
            Float8Recipe::Mxfp8 => Self::Block {
                weights: ScaleBlock::MX,
                others: ScaleBlock::MX,
            },
        })
    }

    /// Returns whether tensor cores can accumulate over the whole inner dimension. With scales of
    /// blocks they cannot, because these are multiplied in between.
    const fn spans_inner_dimension(self) -> bool {
        matches!(self, Self::Tensor | Self::Row)
    }
}

/// Returns the blocks of weights whose codes ranks gather with a scale per block; `None` if gathers
/// have one scale per tensor, or no codes. If the transpose has other blocks, ranks gather codes of
/// both.
pub(crate) fn gathered_block(of: &Float8) -> Option<ScaleBlock> {
    match Scaling::of(of.recipe) {
        Some(Scaling::Block { weights, .. }) if of.all_gather => Some(weights),
        _ => None,
    }
}

/// Place of a block in its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockPlace {
    /// Number, from 0.
    pub(crate) number: u32,
    /// Blocks of the stack.
    pub(crate) count: u32,
}

/// Dimensions of factors are multiples of this number, because rows of 8-bit matrices start at
/// multiples of 16 bytes.
pub(crate) const FLOAT8_ALIGNMENT: u64 = 16;

/// Returns whether a glob of `float8_exclude` matches a linear layer, or a module that contains it,
/// by its name here, in torchtitan or in Hugging Face's code. Only matrices are weights of linear
/// layers and of experts.
pub(crate) fn names_layer(glob: &str, weight: &Param) -> bool {
    let Some(module) = weight.name.strip_suffix(".weight") else {
        return false;
    };
    let matches = |name: &str| part_of(glob, name);
    (weight.shape.len() == 2 || are_experts(weight))
        && (matches(module)
            || matches(&torchtitan(module))
            || weight.hf.as_ref().is_some_and(|hf| matches(&hf.module)))
}

/// Returns whether a weight contains a matrix for each expert of a layer.
pub(crate) fn are_experts(weight: &Param) -> bool {
    let mut parts = weight.name.rsplit('.').skip(2);
    weight.shape.len() == 3 && parts.next() == Some("experts")
}

/// Returns the name of a linear layer in torchtitan, which `filter_fqns` uses:
/// `layers.0.attention.wq` and `layers.0.feed_forward.w1`.
fn torchtitan(module: &str) -> String {
    let mut parts: Vec<&str> = module.split('.').collect();
    if let [.., "attention", layer] = parts.as_mut_slice() {
        *layer = match *layer {
            "q" => "wq",
            "k" => "wk",
            "v" => "wv",
            "o" => "wo",
            other => other,
        };
    }
    for part in parts.iter_mut().filter(|part| **part == "mlp") {
        *part = "feed_forward";
    }
    parts.join(".")
}

/// Returns how the layer with this weight runs in 8 bits; `None` if it does not. These are the
/// linear layers of blocks, and experts if the scenario asks for them. Heads, routers, adapters and
/// all other operations stay in the compute type.
pub(crate) fn linear(of: &Float8, p: &Param, block: Option<BlockPlace>) -> Option<Float8Linear> {
    let BlockPlace { number, count } = block?;
    let module = p.name.strip_suffix(".weight")?;
    let router = module.rsplit('.').next() == Some("router");
    let inner = number >= of.first_bf16 && number + of.last_bf16 < count;
    let excluded = || of.exclude.iter().any(|glob| names_layer(glob, p));
    let scaling = Scaling::of(of.recipe)?;
    let are_experts = are_experts(p);
    let is_layer = p.shape.len() == 2 || of.experts && are_experts;
    if !is_layer || router || p.is_adapter() || !inner || excluded() {
        return None;
    }
    Some(Float8Linear {
        scaling,
        grad: of.grad.dtype(),
        saves_codes: of.saved == Float8Saved::Float8,
        fast_accum: of.fast_accum && scaling.spans_inner_dimension(),
        gathered: of.all_gather && p.requires_grad && (of.gathers_experts || !are_experts),
    })
}
