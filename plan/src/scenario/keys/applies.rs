//! Where a key has an effect: in which models, under which policies, with which other options.
//!
//! Families list their keys in `models/<family>.rs`. Policies list their options and the keys that
//! they ignore in `policies/<policy>/spec.rs`. Conditions for all of them are a [`Need`] in the
//! key's row.

use super::{Key, KeyInfo};
use crate::config::{
    CompileMode, Family, Glu, Implementation, LayerType, Loss, Optimizer, Recompute, Routing,
    Scenario,
};
use crate::ir::DType;
use crate::policies;

/// What has to hold for a key to have an effect, whatever the model and the policy.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// The key that decides.
    pub(crate) by: Key,
    /// Whether it holds.
    pub(crate) holds: fn(&Scenario) -> bool,
    /// The condition as the reference says it.
    words: &'static str,
    /// Why the key has no effect otherwise.
    pub(crate) otherwise: &'static str,
}

pub(super) const SEVERAL_RANKS: Need = Need {
    by: Key::DpShard,
    holds: |s| s.mesh.dp_shard > 1,
    words: "`dp_shard` above 1",
    otherwise: "with dp_shard = 1, nothing is gathered or reduced",
};

pub(super) const HALF_PRECISION: Need = Need {
    by: Key::Compute,
    holds: |s| s.precision.compute != DType::F32,
    words: "a `param_dtype` other than f32",
    otherwise: "with param_dtype = f32, logits are float32 already",
};

pub(super) const CASTS_FOR_GATHERS: Need = Need {
    by: Key::CastBeforeAllGather,
    holds: |s| {
        s.mesh.dp_shard > 1 && (s.fsdp.cast_before_all_gather || s.precision.float8.all_gather)
    },
    words: "`cast_before_all_gather` or `float8_all_gather`",
    otherwise: "gathers send shards as they are stored, so nothing is cast",
};

pub(super) const SEVERAL_DATA_RANKS: Need = Need {
    by: Key::DpShard,
    holds: |s| s.mesh.dp_shard > 1 || s.mesh.dp_outer > 1,
    words: "several data-parallel ranks",
    otherwise: "with one data-parallel rank, no gradients are added up",
};

pub(super) const SEVERAL_MICRO_BATCHES: Need = Need {
    by: Key::GradAccum,
    holds: |s| s.train.grad_accum > 1,
    words: "`grad_accum` above 1",
    otherwise: "with train.grad_accum = 1, the only micro-batch is also the last",
};

pub(super) const ATTENTION: Need = Need {
    by: Key::Family,
    holds: |s| s.model.family.spec().attention.is_some(),
    words: "attention",
    otherwise: "the model has no attention",
};

pub(super) const ADAPTERS: Need = Need {
    by: Key::LoraR,
    holds: |s| s.lora.is_some(),
    words: "`r`",
    otherwise: "without a rank (lora.r) there are no adapters",
};

pub(super) const TRANSFORMED_LAYERS: Need = Need {
    by: Key::LayersToTransform,
    holds: |s| s.lora.as_ref().is_some_and(|lora| !lora.layers.is_empty()),
    words: "`layers_to_transform`",
    otherwise: "all blocks have adapters",
};

pub(super) const CLAMPED_GLU: Need = Need {
    by: Key::Glu,
    holds: |s| s.model.options.experts.glu == Glu::GptOss,
    words: "glu gpt_oss",
    otherwise: "experts clamp nothing",
};

pub(super) const CHUNKED_LAYERS: Need = Need {
    by: Key::LayerTypes,
    holds: |s| {
        s.model
            .options
            .layers
            .layer_types
            .contains(&LayerType::Chunked)
    },
    words: "layers of type chunked_attention",
    otherwise: "no layer has chunks",
};

pub(super) const NO_ROPE_LAYERS: Need = Need {
    by: Key::LayerTypes,
    holds: |s| {
        let types = &s.model.options.layers.layer_types;
        types.contains(&LayerType::FullNoRope)
    },
    words: "layers of type full_attention_no_rope",
    otherwise: "all layers have a rotary embedding",
};

pub(super) const TEMPERATURE: Need = Need {
    by: Key::AttentionTemperature,
    holds: |s| s.model.has_temperature(),
    words: "`attention_temperature` above 0",
    otherwise: "no layer scales queries by their positions",
};

pub(super) const TRANSFORMERS: Need = Need {
    by: Key::Implementation,
    holds: |s| s.implementation() == Implementation::Transformers,
    words: "implementation transformers",
    otherwise: "only the code of transformers has several attention implementations",
};

pub(super) const SOME_FROZEN: Need = Need {
    by: Key::Frozen,
    holds: |s| s.lora.is_some() || !s.fsdp.frozen.is_empty(),
    words: "adapters or `frozen`",
    otherwise: "every parameter is trained",
};

pub(super) const SOME_SKIPPED: Need = Need {
    by: Key::SkippedBlocks,
    holds: |s| !s.train.skipped_blocks.is_empty(),
    words: "`skipped_blocks`",
    otherwise: "every micro-batch uses every unit",
};

pub(super) const FLOAT8: Need = Need {
    by: Key::Float8Recipe,
    holds: |s| s.precision.float8.is_on(),
    words: "`float8_recipe`",
    otherwise: "no matmul runs in 8 bits",
};

pub(super) const RECOMPUTE: Need = Need {
    by: Key::Recompute,
    holds: |s| s.train.recompute != Recompute::None,
    words: "`recompute`",
    otherwise: "nothing is recomputed",
};

pub(super) const FULL_RECOMPUTE: Need = Need {
    by: Key::Recompute,
    holds: |s| s.train.recompute == Recompute::Full,
    words: "full `recompute`",
    otherwise: "only full recompute can be reentrant",
};

pub(super) const SELECTIVE: Need = Need {
    by: Key::Recompute,
    holds: |s| s.train.recompute == Recompute::Selective,
    words: "selective `recompute`",
    otherwise: "only selective recompute chooses among operations",
};

pub(super) const CHUNKED_LOSS: Need = Need {
    by: Key::Loss,
    holds: |s| s.train.loss.is_chunked(),
    words: "a chunked loss",
    otherwise: "the materialized loss has no chunks",
};

pub(super) const WHOLE_LOGITS: Need = Need {
    by: Key::Loss,
    holds: |s| !s.train.loss.is_chunked(),
    words: "a materialized loss",
    otherwise: "a loss in chunks has no tensor with all logits",
};

pub(super) const MUON: Need = Need {
    by: Key::Optimizer,
    holds: |s| s.train.optimizer == Optimizer::Muon,
    words: "Muon",
    otherwise: "the optimizer is not Muon",
};

pub(super) const DIVIDED_EXPERTS: Need = Need {
    by: Key::Ep,
    holds: |s| s.moe.is_some(),
    words: "`ep` above 1",
    otherwise: "with mesh.ep = 1, each rank has all experts",
};

pub(super) const EXPERTS: Need = Need {
    by: Key::Family,
    holds: |s| s.model.has_experts(),
    words: "experts",
    otherwise: "the model has no experts",
};

pub(super) const ROUTED: Need = Need {
    by: Key::Ep,
    holds: |s| s.moe.is_some() || s.forced_routing.is_some(),
    words: "`ep` above 1 or `force_routing`",
    otherwise: "with mesh.ep = 1, each rank has all experts, and the router chooses among them",
};

/// Returns whether popularity falls in orders that are drawn.
fn is_seeded(s: &Scenario) -> bool {
    let predicted = s.moe.as_ref().map(|moe| &moe.routing);
    let forced = s.forced_routing.as_ref().map(|forced| &forced.routing);
    predicted.or(forced) == Some(&Routing::Seeded)
}

pub(super) const SEEDED_ROUTING: Need = Need {
    by: Key::Routing,
    holds: is_seeded,
    words: "routing `seeded`",
    otherwise: "only routing seeded draws orders of experts",
};

pub(super) const DRAWN_ROUTING: Need = Need {
    by: Key::Routing,
    holds: |s| {
        let forced = s.forced_routing.as_ref();
        is_seeded(s) || forced.is_some_and(|f| f.routing != Routing::RoundRobin)
    },
    words: "routing `seeded`, or `force_routing` unless routing is `round_robin`",
    otherwise: "only routing seeded, and forced choices that are balanced or of a histogram, are drawn",
};

pub(super) const ROW_FACTOR: Need = Need {
    by: Key::CapacityFactor,
    holds: |s| {
        let moe = s.moe.as_ref();
        moe.is_some_and(|moe| moe.capacity_factor.is_some())
    },
    words: "a number as `capacity_factor`",
    otherwise: "rows are reserved for every case",
};

pub(super) const SHARED_EXPERT: Need = Need {
    by: Key::SharedExpertFfn,
    holds: |s| s.model.options.experts.shared_expert_ffn > 0,
    words: "`shared_expert_ffn` above 0",
    otherwise: "the model has no shared expert",
};

pub(super) const MODE_FULL: Need = Need {
    by: Key::Mode,
    holds: |s| s.compile.mode == CompileMode::Full,
    words: "mode full",
    otherwise: "only compile mode full buckets collectives",
};

pub(super) const COMPILED: Need = Need {
    by: Key::Mode,
    holds: |s| s.compile.mode != CompileMode::Off,
    words: "a compile mode",
    otherwise: "with compile mode off, nothing is compiled",
};

pub(super) const LOSS_FUNCTION: Need = Need {
    by: Key::Loss,
    holds: |s| !matches!(s.train.loss, Loss::Chunked | Loss::CheckpointedChunks),
    words: "a loss that is a function of logits: materialized, saved_chunks or split_logits",
    otherwise: "this loss contains the output layer, and is not compiled on its own",
};

impl KeyInfo {
    /// Returns where the key has an effect, one sentence per kind of limit; none if it has one
    /// everywhere.
    #[must_use]
    pub fn applies(&self) -> Vec<String> {
        let mut limits = Vec::new();
        let families = families(self);
        if !families.is_empty() && families.len() < Family::named_all().count() {
            limits.push(format!("Models: {}", families.join(", ")));
        }
        if self.section == "fsdp" && policies::is_option(self.key) {
            limits.push(format!("Only {}", policies::with_option(self.key)));
        }
        if !self.needs.is_empty() {
            let words: Vec<&str> = self.needs.iter().map(|n| n.words).collect();
            limits.push(format!("Needs {}", words.join(" and ")));
        }
        let ignored = policies::ignoring(&self.path());
        if !ignored.is_empty() {
            limits.push(format!("No effect: {}", ignored.join(", ")));
        }
        limits
    }
}

/// Names the families that list a key of `[model]`. A key that none lists applies to all.
pub(crate) fn families(info: &KeyInfo) -> Vec<&'static str> {
    let lists =
        |(_, family): &(&str, Family)| info.section == "model" && family.spec().has(info.key);
    let names = Family::named_all().filter(lists).map(|(name, _)| name);
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_come_from_families_policies_and_needs() {
        let limits = |path: &str| Key::at(path).unwrap().info().applies();
        assert_eq!(limits("fsdp.policy"), [""; 0]);
        assert_eq!(limits("model.layers"), [""; 0]);
        assert_eq!(
            limits("model.kv_heads"),
            ["Models: llama, decoder, moe, bert"]
        );
        assert_eq!(
            limits("fsdp.prefetch_next_step"),
            [
                "Only policy native outside compile mode full",
                "Needs `dp_shard` above 1"
            ]
        );
        assert_eq!(
            limits("fsdp.reduce_in_flight"),
            ["No effect: policy megatron, policy megatron_v2, compile mode full"]
        );
        assert_eq!(limits("compile.bucket_bytes"), ["Needs mode full"]);
    }
}
