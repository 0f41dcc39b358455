//! Supplies Axolotl's defaults.
//!
//! Sources: `utils/schemas/config.py` and `monkeypatch/accelerate/fsdp2.py` of Axolotl.

use super::{has, in_bf16};
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::table::Fact;

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

/// Returns whether parameters are sharded in the dtype in which they are loaded. Under FSDP2,
/// Axolotl replaces Accelerate's `fsdp2_prepare_model`, and its version converts no parameters
/// since July 2025 (#2760).
pub(super) fn keeps_weights(draft: &Draft) -> bool {
    draft.fact(Fact::FsdpVersion).is_some_and(|v| v.value == 2)
}
