//! Policies: from tape and layouts to the program.

use crate::program::Program;
use crate::scenario::Scenario;

/// Why a scenario cannot be lowered although its file is valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A unit pattern matches no module.
    #[error("unit pattern `{pattern}` matches no module; nearest: `{nearest}`")]
    NoSuchModule {
        /// Pattern.
        pattern: String,
        /// Nearest module path.
        nearest: String,
    },
    /// Anything else, in words.
    #[error("{0}")]
    Unsupported(String),
}

/// Plans a scenario: model, autodiff, compile, shard and lower.
///
/// # Errors
/// See [`PlanError`].
pub fn plan(_scenario: &Scenario) -> Result<Program, PlanError> {
    Err(PlanError::Unsupported("not built yet".into()))
}
