//! Decides settings whose defaults in NeMo Automodel depend on other keys.
//!
//! Sources: `FSDP2Config` and `MoEParallelizerConfig` of `components/distributed/config.py`,
//! `apply_fsdp2_sharding_recursively`, and `apply_fsdp` of `components/moe/parallelizer.py`.

use super::vision;
use crate::derive::experts::has_experts;
use crate::draft::{Draft, Given};
use crate::error::ConfigError;
use crate::row::{Lack, Row};
use crate::table::{Dtype, Engine, Fact, quoted};

const RESHARD: &str = "fsdp.reshard_after_forward";
const MOMENTS: &str = "precision.moments";
/// The mesh of experts spans replicas, so `ep_shard` is their number times that of the shards.
const REPLICATED_EXPERTS: &str =
    "experts are predicted as replicated over dp_replicate; AutoModel shards them over it";
/// `GroupedExperts` casts such weights itself.
const CAST_EXPERTS: &str =
    "experts, which AutoModel leaves out of FSDP here, are predicted as cast and copied by FSDP";
/// `GroupedExpertsDeepEPLoRA` is not modeled.
const EXPERT_ADAPTERS: &str =
    "AutoModel puts adapters on experts, too, which are not predicted: more parameters are trained";
/// Default of `fsdp2_backward_prefetch_depth`.
const BACKWARD_DEPTH: u64 = 2;

/// Sets keys that no key of the files sets.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn model(draft: &mut Draft) -> Result<(), ConfigError> {
    vision::as_automodel(draft)?;
    if draft.fact(Fact::FusedAdam).is_some() {
        let why = "the default of Transformer Engine's FusedAdam";
        draft.assume(MOMENTS, quoted("f32"), why);
    }
    if draft.fact(Fact::FusedKernels).is_some() {
        let why = "the fused kernels of the backend are predicted as those of torch.compile";
        draft.assume("compile.mode", quoted("blocks"), why);
    }
    adapters_of_experts(draft);
    if draft.engine.is_some_and(|e| e.value == Engine::Megatron) {
        return Ok(());
    }
    let why = "AutoModel's default (defer_fsdp_grad_sync)";
    draft.assume("fsdp.gradient_sync", quoted("last"), why);
    weights(draft);
    reshard(draft)?;
    prefetch(draft)
}

/// Notes that experts get adapters in AutoModel if a pattern of `target_modules` matches them.
fn adapters_of_experts(draft: &mut Draft) {
    const KEY: &str = "lora.target_modules";
    if !has_experts(draft) {
        return;
    }
    let matches_experts = |pattern: &str| {
        let pattern = pattern.trim_matches('"');
        pattern.contains("experts") || pattern.chars().all(|c| matches!(c, '*' | '.'))
    };
    let names_experts = |row: &Row| {
        let targets = row.settings.iter().find(|s| s.key == KEY);
        targets.is_some_and(|s| {
            let names = s.value.trim_matches(['[', ']']);
            names.split(", ").any(matches_experts)
        })
    };
    if let Some(row) = draft.rows.iter().position(names_experts) {
        draft.approximates(row, EXPERT_ADAPTERS);
    }
}

/// Loads the model in the dtype of its checkpoint, if the files do not say another one.
fn weights(draft: &mut Draft) {
    if draft.weights.is_some() {
        return;
    }
    let why = "AutoModel's default is the dtype of the checkpoint, taken as bfloat16";
    let row = draft.suppose("model.torch_dtype", "auto", why);
    let value = Dtype::Bf16;
    draft.weights = Some(Given { value, row });
}

/// Decides which units free their parameters after forward: with expert parallelism none by
/// default, otherwise all but the last block.
fn reshard(draft: &mut Draft) -> Result<(), ConfigError> {
    let of_all = draft.fact(Fact::Reshard);
    let of_experts = draft.fact(Fact::ExpertReshard);
    if draft.value("mesh.ep").is_none() {
        if let Some(unused) = of_experts {
            draft.none(unused.row, Lack::Nothing, "without expert parallelism");
        }
        if of_all.is_none() {
            let why = "AutoModel's default without expert parallelism";
            draft.assume(RESHARD, quoted("auto"), why);
        }
        return Ok(());
    }
    if let Some(unused) = of_all {
        draft.forget(Fact::Reshard);
        let why = "with expert parallelism, distributed.moe decides";
        draft.none(unused.row, Lack::Nothing, why);
    }
    match of_experts {
        Some(given) => draft.set(given.row, RESHARD, (given.value == 1).to_string()),
        None => {
            let why = "AutoModel's default with expert parallelism";
            draft.assume(RESHARD, "false", why);
            Ok(())
        }
    }
}

/// Leaves experts out of FSDP if no two ranks have the same expert (`ep_shard` of one rank). This
/// depends on the policy and the dtypes, which are decided later than the other keys.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn ignore_experts(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::Expert) else {
        return Ok(());
    };
    let [ep, shards] = ["mesh.ep", "mesh.dp_shard"].map(|key| draft.value(key));
    let replicated = draft.value("mesh.dp_replicate").is_some_and(|n| n != "1");
    if ep.is_none() || !draft.is("fsdp.policy", "fsdp2") {
        return Ok(());
    }
    if replicated {
        draft.approximates(given.row, REPLICATED_EXPERTS);
    } else if ep == shards && !draft.is("precision.main_params", "none") {
        draft.approximates(given.row, CAST_EXPERTS);
    } else if ep == shards {
        draft.set(given.row, "fsdp.ignored_params", quoted("experts"))?;
    }
    Ok(())
}

/// Sets the depths of explicit prefetching. The parallelizer of expert parallelism has none.
fn prefetch(draft: &mut Draft) -> Result<(), ConfigError> {
    let on = draft.fact(Fact::ExplicitPrefetch).filter(|p| p.value == 1);
    let on = on.filter(|_| draft.value("mesh.ep").is_none());
    for (fact, key, default) in [
        (Fact::ForwardPrefetchDepth, "fsdp.prefetch_forward", 1),
        (
            Fact::BackwardPrefetchDepth,
            "fsdp.prefetch_backward",
            BACKWARD_DEPTH,
        ),
    ] {
        match (on, draft.fact(fact)) {
            (Some(_), Some(depth)) => draft.set(depth.row, key, depth.value.to_string())?,
            (Some(on), None) => draft.set(on.row, key, default.to_string())?,
            (None, Some(depth)) => {
                let why = "explicit prefetching is off";
                draft.none(depth.row, Lack::Nothing, why);
            }
            (None, None) => {}
        }
    }
    Ok(())
}
