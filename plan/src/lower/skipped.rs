//! Micro-batches that skip blocks: their tapes, and checks for skips that are not supported.

use super::PlanError;
use crate::compile::tape::Tape;
use crate::compile::{self, Sharding};
use crate::config::Scenario;
use crate::models;
use crate::models::declare::Tree;
use crate::shard::{Group, UnitSpec};

// Note [Skipped blocks]
//
// With `train.skipped_blocks`, micro-batches have separate tapes. If a micro-batch skips all blocks
// of a unit, it does not use the unit, and none of the unit's hooks run. The consequences differ by
// engine.
//
// - native knows which micro-batches use a unit: it does not gather the unit for the others,
//   reduces over replicas in the last micro-batch that uses it, and does not update units that no
//   micro-batch uses.
// - fsdp2 (`_fsdp_state.py`, `_fsdp_param_group.py` of torch 2.11) has fixed lists of units to
//   prefetch. Units that were gathered but not used are freed at the end of backward
//   (`finalize_backward`). The root's final callback runs the post-backward of unused units, which
//   reduces the gradients of earlier micro-batches, or nothing. The optimizer and the norm skip
//   parameters without a gradient. With `reduce_unused`, zero gradients are reduced instead
//   (`unsharded_zero_grad_data` of torch 2.15), if the unit has been gathered in the step, which
//   means here that some micro-batch uses it.
// - megatron (`_root_post_backward` of megatron-fsdp 0.6.1) treats missing gradients as zeros: it
//   fills the buckets of all unused units, then reduces them one after another, and its optimizer
//   updates these units. Units that forward has prefetched but not used are released before
//   backward gathers anything (`recycle_unused_buckets`). Backward would gather them again and keep
//   them until the next step; the plan leaves this out.

/// Adds the tapes of micro-batches that skip blocks to the tape of the whole model.
pub(super) fn add_variants(scenario: &Scenario, whole: &mut Tape, sharding: Sharding<'_>) {
    let train = &scenario.train;
    if train.skipped_blocks.is_empty() {
        return;
    }
    for micro_batch in 0..train.grad_accum {
        let mut model = models::declare(scenario, scenario.model.layers);
        model.tree.skip(|block| train.skips(micro_batch, block));
        let skipped = model.tree.skipped.clone();
        let known = whole.variants.iter().position(|v| v.skipped == skipped);
        let variant = match known {
            Some(known) => Some(known as u16),
            None if skipped.is_empty() => None,
            None => {
                let tape = compile::tape(scenario, model, sharding);
                Some(whole.add_variant(skipped, tape))
            }
        };
        whole.variant_of.push(variant);
    }
}

/// Rejects micro-batches that use only a part of a unit, or no trained parameter.
pub(super) fn check(
    scenario: &Scenario,
    tree: &Tree,
    specs: &[UnitSpec],
    groups: &[Group],
) -> Result<(), PlanError> {
    let train = &scenario.train;
    if train.skipped_blocks.is_empty() {
        return Ok(());
    }
    let mut tree = tree.clone();
    for micro_batch in 0..train.grad_accum {
        tree.skipped.clear();
        tree.skip(|block| train.skips(micro_batch, block));
        let used = |p: &crate::ir::Param| !tree.skips_param(p);
        if !tree.params.iter().any(|p| p.requires_grad && used(p)) {
            return Err(PlanError::NothingUsed { micro_batch });
        }
        for (u, spec) in specs.iter().enumerate() {
            let of_unit = groups.iter().filter(|g| g.unit.index() == u);
            let params = of_unit.flat_map(|g| &g.params);
            let params: Vec<_> = params.map(|p| &tree.params[p.index()]).collect();
            let skipped = params.iter().find(|p| !used(p));
            if let Some(skipped) = skipped
                && params.iter().any(|p| used(p))
            {
                return Err(PlanError::PartlyUsed {
                    micro_batch,
                    block: tree.modules[skipped.modules[0].index()].path.clone(),
                    unit: spec.name.clone(),
                });
            }
        }
    }
    Ok(())
}
