//! Supplies Axolotl's defaults.
//!
//! Source: `utils/schemas/config.py` of Axolotl.

use super::{has, in_bf16};
use crate::draft::Draft;
use crate::error::ConfigError;

/// Axolotl's keys for the dtype.
const DTYPES: [&str; 6] = [
    "bf16",
    "bfloat16",
    "fp16",
    "float16",
    "float32",
    "bf16_full_eval",
];

/// Computes in bfloat16 if no key gives a dtype.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    if has(draft, &DTYPES) {
        return Ok(());
    }
    in_bf16(draft, "Axolotl's default (bf16: auto)")
}
