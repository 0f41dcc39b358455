//! Micro-batches that skip blocks: their tapes, and which of them cannot be.

use super::PlanError;
use crate::compile::tape::Tape;
use crate::compile::{self, Sharding};
use crate::config::Scenario;
use crate::models;
use crate::models::declare::Tree;
use crate::shard::{Group, UnitSpec};

// Note [Skipped blocks]
//
// With `train.skipped_blocks`, micro-batches have tapes of their own. A unit all of whose blocks a
// micro-batch skips is unused there: none of its hooks run. What follows differs by engine.
//
// - native knows which micro-batches use a unit: it gathers nothing for the others, reduces over
//   replicas in the last one that uses the unit, and updates no unit that none of them uses.
// - fsdp2 (`_fsdp_state.py`, `_fsdp_param_group.py` of torch 2.11) has lists of units to gather
//   ahead that know nothing of this. What such a gather brings is dropped at the end of backward
//   (`finalize_backward`). The root's final callback runs the post-backward of unused units, which
//   reduces what earlier micro-batches have left, or nothing. Parameters without a gradient are
//   skipped by the optimizer and by the norm. With `reduce_unused` gradients of zero are reduced
//   instead (`unsharded_zero_grad_data` of torch 2.15), if the unit has been gathered at all: here,
//   if some micro-batch of the step uses it.
// - megatron (`_root_post_backward` of megatron-fsdp 0.6.1) treats missing gradients as zeros: it
//   fills the buckets of all unused units, then reduces them one after another, and its optimizer
//   updates them. What a forward gathered ahead is dropped before backward gathers anything
//   (`recycle_unused_buckets`). Backward would gather it once more and keep it until the next
//   step; the plan leaves this out.

/// Adds the tapes of micro-batches that skip blocks to the one of the whole model.
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

/// Refuses micro-batches that use a part of a unit, or nothing that is trained.
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
