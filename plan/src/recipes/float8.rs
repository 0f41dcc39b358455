//! Which linear layers run in 8 bits, and with which types and scales.

use crate::config::pattern::covers;
use crate::config::{Float8, Float8Recipe, Float8Saved};
use crate::ir::{DType, Param};

/// How the matmuls of a linear layer read their factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Float8Linear {
    /// Each row has a scale of its own; otherwise each tensor has one.
    pub(crate) rowwise: bool,
    /// Type of the gradient of the layer's output; its input and weight are e4m3.
    pub(crate) grad: DType,
    /// Forward writes the transposed codes that the gradient of the weight reads.
    pub(crate) saves_codes: bool,
    /// Forward adds up with the precision of tensor cores.
    pub(crate) fast_accum: bool,
    /// Ranks gather its codes, so matmuls read them as they are.
    pub(crate) gathered: bool,
}

/// Place of a block in its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockPlace {
    /// Number, from 0.
    pub(crate) number: u32,
    /// Blocks of the stack.
    pub(crate) count: u32,
}

/// Dimensions of factors are multiples of this: rows of 8-bit matrices start at 16 bytes.
pub(crate) const FLOAT8_ALIGNMENT: u64 = 16;

/// Returns how the layer with this weight runs in 8 bits; `None` if it does not. These are the
/// linear layers of blocks. Heads, routers, adapters and all other operations stay in the compute
/// type.
pub(crate) fn linear(of: &Float8, p: &Param, block: Option<BlockPlace>) -> Option<Float8Linear> {
    let BlockPlace { number, count } = block?;
    let module = p.name.strip_suffix(".weight")?;
    let router = module.rsplit('.').next() == Some("router");
    let inner = number >= of.first_bf16 && number + of.last_bf16 < count;
    let excluded = || of.exclude.iter().any(|glob| covers(glob, module));
    if !of.is_on() || p.shape.len() != 2 || router || p.is_adapter() || !inner || excluded() {
        return None;
    }
    Some(Float8Linear {
        rowwise: of.recipe == Float8Recipe::Rowwise,
        grad: of.grad.dtype(),
        saves_codes: of.saved == Float8Saved::Float8,
        fast_accum: of.fast_accum,
        gathered: of.all_gather && p.requires_grad,
    })
}
