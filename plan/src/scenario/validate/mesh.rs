//! Rules for `[mesh]`.

use super::Checked;
use crate::config::Scenario;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

/// Most ranks of a mesh.
pub(crate) const MAX_RANKS: u64 = 1 << 20;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let (world, node) = (s.mesh.world(), s.mesh.gpus_per_node);
    if world > node && world % node != 0 {
        let message = format!("{world} ranks do not fill nodes of {node} GPUs");
        return Err(d
            .conflict(&[Key::GpusPerNode, Key::DpOuter, Key::DpShard], message)
            .with_help("`gpus_per_node` must divide dp_shard * dp_replicate"));
    }
    Ok(())
}
