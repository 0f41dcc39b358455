//! From graphs to the tape: eager kernels, fusion, regions, liveness.

pub mod tape;

use crate::scenario::Scenario;
use tape::Tape;

/// Builds the tape of one micro-batch.
#[must_use]
pub fn tape(_scenario: &Scenario) -> Tape {
    Tape::default()
}
