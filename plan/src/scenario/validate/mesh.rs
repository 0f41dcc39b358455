//! Rules for `[mesh]`.

use super::Checked;
use crate::config::{Family, Scenario};
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

/// Most ranks of a mesh.
pub(crate) const MAX_RANKS: u64 = 1 << 20;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let (world, node) = (s.mesh.world(), s.mesh.gpus_per_node);
    if world > node && world % node != 0 {
        let message = format!("{world} ranks do not fill nodes of {node} GPUs");
        return Err(d
            .conflict(
                &[Key::GpusPerNode, Key::DpOuter, Key::DpShard, Key::Tp],
                message,
            )
            .with_help(format!(
                "`gpus_per_node` must divide {}",
                rank_factors(s.mesh.tp)
            )));
    }
    tensor_parallel(s, d)
}

/// What the number of ranks is the product of.
pub(crate) const fn rank_factors(tp: u32) -> &'static str {
    if tp > 1 {
        "dp_shard * dp_replicate * tp"
    } else {
        "dp_shard * dp_replicate"
    }
}

/// Refuses to divide layers that their family cannot divide, or not evenly.
fn tensor_parallel(s: &Scenario, d: &Document) -> Checked {
    let tp = s.mesh.tp;
    if tp == 1 {
        return Ok(());
    }
    let Some(dimension) = s.model.family.spec().tensor_parallel else {
        let message = format!(
            "`tp` = {tp} divides layers, which those of family {} cannot be",
            s.model.family.name()
        );
        let able = Family::named_all().filter(|(_, f)| f.spec().tensor_parallel.is_some());
        let able: Vec<&str> = able.map(|(name, _)| name).collect();
        return Err(d
            .conflict(&[Key::Tp, Key::Family], message)
            .with_help(format!(
                "families with tensor parallelism: {}",
                able.join(", ")
            )));
    };
    let (name, size) = dimension(&s.model);
    if size % u64::from(tp) != 0 {
        let message = format!("`tp` = {tp} does not divide {name} = {size}");
        return Err(d.conflict(&[Key::Tp], message));
    }
    Ok(())
}
