//! Runs that a comparison still has to make.

use shardlab_plan::Scenario;
use std::path::PathBuf;

/// Another shardlab binary, which makes a run.
pub(super) struct Maker {
    /// Name that the user gave it.
    pub(super) name: String,
    pub(super) program: PathBuf,
}

/// A run to make.
pub(super) struct Ask {
    pub(super) path: PathBuf,
    pub(super) set: Vec<String>,
    pub(super) exec: bool,
    /// The binary that makes it; `None` for this program.
    pub(super) maker: Option<Maker>,
    pub(super) scenario: Scenario,
}
