//! From graphs to the tape: eager kernels, fusion, regions, liveness.

pub mod tape;

use crate::scenario::Scenario;
use tape::Tape;

/// Builds the tape of one micro-batch.
#[must_use]
pub fn tape(_scenario: &Scenario, _is_unit: &dyn Fn(tape::ModuleId) -> bool) -> Tape {
    Tape::default()
}

/// Module tree and parameters.
#[must_use]
pub fn modules_and_params(_scenario: &Scenario) -> (Vec<tape::Module>, Vec<tape::Param>) {
    Default::default()
}
