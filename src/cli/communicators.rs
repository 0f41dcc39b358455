//! Communicators in JSON.

use serde::Serialize;
use shardlab_plan::Program;

/// A communicator of a rank, with the ranks that it connects.
#[derive(Serialize)]
pub(super) struct Communicator {
    /// Name, as `plan` prints it.
    name: String,
    /// Number of ranks.
    ranks: u32,
    /// Distance between adjacent ranks.
    stride: u32,
}

/// Returns the communicators of a program.
pub(super) fn of(program: &Program) -> Vec<Communicator> {
    let all = program.communicators.iter().map(|c| Communicator {
        name: c.name.clone(),
        ranks: c.ranks.size,
        stride: c.ranks.stride,
    });
    all.collect()
}
