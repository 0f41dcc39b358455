//! Supplies the defaults of Megatron-Bridge.
//!
//! Source: `recipes/common.py` of Megatron-Bridge.

use super::{all_linear, distributed_optimizer, in_bf16};
use crate::draft::Draft;
use crate::error::ConfigError;

const WHY: &str = "the default of Megatron-Bridge's recipes";

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    in_bf16(draft, WHY)?;
    all_linear(draft, WHY)?;
    distributed_optimizer(draft, WHY);
    Ok(())
}
