//! Runs that a comparison has to make.

use shardlab_plan::Scenario;
use std::path::PathBuf;

/// Another shardlab binary that makes a run.
pub(super) struct Maker {
    /// Name that the user gave it.
    pub(super) name: String,
    pub(super) program: PathBuf,
}

/// A run to be made.
pub(super) struct Ask {
    pub(super) path: PathBuf,
    pub(super) set: Vec<String>,
    pub(super) exec: bool,
    /// The binary that makes it; `None` means this program.
    pub(super) maker: Option<Maker>,
    pub(super) scenario: Scenario,
}
