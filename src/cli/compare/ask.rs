//! Runs that a comparison has to make.

use shardlab_plan::Scenario;
use std::path::PathBuf;

/// Another shardlab, which makes a run.
pub(super) struct Maker {
    /// What the user calls it.
    pub(super) name: String,
    pub(super) program: PathBuf,
}

/// A run to be made.
pub(super) struct Ask {
    pub(super) path: PathBuf,
    pub(super) set: Vec<String>,
    pub(super) exec: bool,
    /// What makes it; this program where there is none.
    pub(super) maker: Option<Maker>,
    pub(super) scenario: Scenario,
}
