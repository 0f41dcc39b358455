//! What each single option would change.

use crate::predict::{Fit, PredictError, Prediction, Profiles, predict_light};
use rayon::prelude::*;
use shardlab_plan::Scenario;
use shardlab_plan::scenario::{
    BatchUnit, OuterStrategy, PolicyKind, Recompute, RecomputeLayers, ScenarioError, keys,
};
use shardlab_plan::units::Bytes;

/// A change to a scenario: overrides that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// How tables call it, for example `fsdp.prefetch_forward=0`.
    pub label: String,
    /// As `--set` takes them.
    pub overrides: Vec<String>,
}

impl Change {
    fn one(key: &str, value: &str) -> Self {
        let text = format!("{key}={value}");
        Self {
            label: text.clone(),
            overrides: vec![text],
        }
    }
}

/// Step and memory under a change.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    /// Step time, milliseconds.
    pub step_ms: f64,
    /// Tokens (or what the model's batches are counted in) a second and GPU.
    pub tokens_per_s: f64,
    /// What the batches are counted in.
    pub counted_in: BatchUnit,
    /// Peak of allocated memory.
    pub peak_allocated: Bytes,
    /// Peak of reserved memory.
    pub peak_reserved: Bytes,
    /// Whether it fits.
    pub fit: Fit,
}

impl Effect {
    /// Of a prediction.
    #[must_use]
    pub fn of(p: &Prediction) -> Self {
        Self {
            step_ms: p.step_ms(),
            tokens_per_s: p.tokens_per_s(),
            counted_in: p.scenario.model.family.counted_in(),
            peak_allocated: p.run.memory.peak_allocated,
            peak_reserved: p.run.memory.peak_reserved,
            fit: p.fit.clone(),
        }
    }

    /// Whether there is a difference worth a line: time by more than a thousandth, or memory.
    #[must_use]
    pub fn differs(&self, base: &Self) -> bool {
        let time = (self.tokens_per_s / base.tokens_per_s - 1.0).abs();
        let memory = |a: Bytes, b: Bytes| a.0.abs_diff(b.0) > b.0 / 1000;
        time > 1e-3
            || memory(self.peak_allocated, base.peak_allocated)
            || memory(self.peak_reserved, base.peak_reserved)
    }
}

/// A change and what comes of it.
#[derive(Debug)]
pub struct WhatIf {
    /// Change.
    pub change: Change,
    /// Effect, or why it cannot be.
    pub effect: Result<Effect, PredictError>,
}

/// Keys of which every value is tried.
const ALL_VALUES: [&str; 21] = [
    "fsdp.policy",
    "fsdp.strategy",
    "fsdp.reshard_root",
    "fsdp.reshard_after_backward",
    "fsdp.gradient_sync",
    "fsdp.async_reduce",
    "fsdp.separate_communicators",
    "fsdp.copy_engine_gather",
    "fsdp.copy_engine_reduce",
    "fsdp.sum_in_optimizer",
    "fsdp.unify_comm_stream",
    "fsdp.optimizer_in_backward",
    "fsdp.allocator",
    "fsdp.expandable_segments",
    "compile.merge_projections",
    "compile.epilogues",
    "compile.mix_order_reductions",
    "compile.fused_products",
    "train.recompute",
    "train.recompute_layers",
    "train.loss",
];

/// Keys with numbers or many spellings, and the values that are tried.
const SOME_VALUES: [(&str, &[&str]); 9] = [
    ("fsdp.reshard_after_forward", &["true", "false", "auto"]),
    ("fsdp.prefetch_forward", &["0", "1", "2", "4"]),
    ("fsdp.prefetch_backward", &["0", "1", "2", "4"]),
    ("fsdp.prefetch_next_step", &["0", "1", "2"]),
    ("fsdp.reduce_in_flight", &["1", "2", "4"]),
    ("train.loss_chunk_rows", &["1024", "4096", "16384"]),
    ("precision.comm_grads", &["f32", "bf16"]),
    ("compile.mode", &["off", "regions", "blocks", "full"]),
    (
        "compile.cuda_graph",
        &[
            "off",
            "full_iteration",
            "[\"block\"]",
            "[\"attn\", \"mlp\"]",
        ],
    ),
];

/// The changes that are tried on a scenario.
#[must_use]
pub fn candidates(base: &Scenario) -> Vec<Change> {
    let mut all = Vec::new();
    for path in ALL_VALUES {
        let values = keys()
            .iter()
            .filter(|k| {
                path.strip_prefix(k.section)
                    .and_then(|p| p.strip_prefix('.'))
                    == Some(k.key)
            })
            .flat_map(|k| k.values());
        all.extend(values.map(|v| Change::one(path, v)));
    }
    for (path, values) in SOME_VALUES {
        all.extend(values.iter().map(|v| Change::one(path, v)));
    }
    for depth in [0, 1, 2] {
        all.push(Change {
            label: format!("prefetch both ways = {depth}"),
            overrides: vec![
                format!("fsdp.prefetch_forward={depth}"),
                format!("fsdp.prefetch_backward={depth}"),
            ],
        });
    }
    all.push(Change {
        label: "all collectives on copy engines".to_owned(),
        overrides: vec![
            "fsdp.copy_engine_gather=true".to_owned(),
            "fsdp.copy_engine_reduce=true".to_owned(),
        ],
    });
    all.extend(mesh(base));
    if base.fsdp.policy == PolicyKind::Native {
        let values = [
            "[]",
            "[\"optimizer\"]",
            "[\"params\", \"grads\", \"optimizer\"]",
        ];
        all.extend(values.map(|v| Change::one("fsdp.offload", v)));
    }
    let batch = base.train.micro_batch;
    all.push(Change::one("train.micro_batch", &(batch * 2).to_string()));
    if batch.is_multiple_of(2) {
        all.push(Change::one("train.micro_batch", &(batch / 2).to_string()));
    }
    all
}

/// What decides how much crosses nodes, on as many GPUs: groups of a node or a part of it that forward reshards to, and meshes that
/// shard within nodes or over all ranks.
fn mesh(base: &Scenario) -> Vec<Change> {
    let m = &base.mesh;
    let (world, node) = (m.world(), m.gpus_per_node);
    let mut all = Vec::new();
    if world > node {
        let groups = (2..=node.min(m.dp_shard.saturating_sub(1))).rev();
        let groups = groups.filter(|n| node.is_multiple_of(*n));
        all.extend(groups.map(|n| Change::one("fsdp.reshard_after_forward", &n.to_string())));
    }
    let mut meshes = vec![(world, 1)];
    if world > node {
        // Groups of one node, of two, of four …; what is smaller than a node holds more and saves no traffic between nodes.
        let groups = std::iter::successors(Some(node), |shard| shard.checked_mul(2));
        let whole = groups.take_while(|shard| *shard < world);
        meshes.extend(whole.map(|shard| (shard, world / shard)));
    }
    for (shard, outer) in meshes {
        if shard * outer == world && shard != m.dp_shard {
            let mut overrides = vec![
                format!("mesh.dp_shard={shard}"),
                format!("mesh.dp_outer={outer}"),
            ];
            if outer == 1 && base.fsdp.outer_strategy == OuterStrategy::Optim {
                // There is nothing left to shard over.
                overrides.push("fsdp.outer_strategy=no_shard".to_owned());
            }
            all.push(Change {
                label: overrides.join(" "),
                overrides,
            });
        }
    }
    all
}

/// Gives the scenario with further overrides.
pub type Load<'a> = &'a (dyn Fn(&[String]) -> Result<Scenario, ScenarioError> + Sync);

/// Share of the device's memory that [`fewest_layers`] leaves free.
pub const HEADROOM: f64 = 0.05;

/// Recompute of as few blocks as leave [`HEADROOM`], where recompute of all blocks is more than that takes, or where there is none and
/// the scenario does not fit. The first blocks are recomputed.
#[must_use]
pub fn fewest_layers(base: &Prediction, profiles: &Profiles, load: Load<'_>) -> Option<WhatIf> {
    let train = &base.scenario.train;
    let full = match train.recompute {
        Recompute::Full if train.recompute_layers == RecomputeLayers::All => true,
        Recompute::None if !base.fit.is_ok() => false,
        _ => return None,
    };
    // A device whose memory is not known holds anything.
    base.free_bytes()?;
    let change = |layers: u32| {
        let mut overrides = vec![format!("train.recompute_layers={layers}")];
        if !full {
            overrides.insert(0, "train.recompute=full".to_owned());
        }
        let label = overrides.join(" ");
        Change {
            label: format!(
                "{label} (the fewest that leave {:.0} % free)",
                100.0 * HEADROOM
            ),
            overrides,
        }
    };
    let predict = |layers: u32| {
        let scenario = load(&change(layers).overrides).ok()?;
        predict_light(&scenario, profiles).ok()
    };
    let all = base.scenario.model.layers;
    // No recompute is another candidate, recompute of all blocks is what there is, or one too.
    let mut found = None;
    let (mut too_few, mut enough) = (0, all);
    if full && !base.leaves(HEADROOM) {
        return None;
    }
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        let p = predict(middle)?;
        if p.leaves(HEADROOM) {
            (enough, found) = (middle, Some(p));
        } else {
            too_few = middle;
        }
    }
    let found = found?;
    if enough == 1 {
        // One block is the fewest that can be asked for; none, which is another candidate, may do.
        let none = load(&["train.recompute=none".to_owned()]).ok()?;
        if predict_light(&none, profiles).ok()?.leaves(HEADROOM) {
            return None;
        }
    }
    let effect = Ok(Effect::of(&found));
    Some(WhatIf {
        change: change(enough),
        effect,
    })
}

/// Tries every candidate on all cores. Changes that leave the scenario as it is are left out.
#[must_use]
pub fn try_all(base: &Prediction, profiles: &Profiles, load: Load<'_>) -> Vec<WhatIf> {
    let (fewest, mut all) = rayon::join(
        || fewest_layers(base, profiles, load),
        || try_each(&base.scenario, profiles, load),
    );
    all.extend(fewest);
    all
}

fn try_each(base: &Scenario, profiles: &Profiles, load: Load<'_>) -> Vec<WhatIf> {
    candidates(base)
        .into_par_iter()
        .filter_map(|change| {
            let effect = match load(&change.overrides) {
                Ok(scenario) if scenario == *base => return None,
                Ok(scenario) => predict_light(&scenario, profiles).map(|p| Effect::of(&p)),
                Err(e) => Err(e.into()),
            };
            Some(WhatIf { change, effect })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn meshes_are_tried_once() {
        let of = |name: &str| {
            let base = shardlab_plan::scenario::load(Path::new(name), &[]).unwrap();
            let all = candidates(&base).into_iter();
            all.filter(|c| c.label.starts_with("mesh."))
                .map(|c| c.label)
                .collect::<Vec<_>>()
        };
        assert_eq!(of("small-hsdp"), ["mesh.dp_shard=4 mesh.dp_outer=1"]);
        // Over nodes groups of one, two and four of them, beside the whole that there is.
        let nodes = [
            "mesh.dp_shard=8 mesh.dp_outer=8",
            "mesh.dp_shard=16 mesh.dp_outer=4",
            "mesh.dp_shard=32 mesh.dp_outer=2",
        ];
        assert_eq!(of("llama3-70b-64xh100"), nodes);
        // Without an outer axis there is nothing to shard over.
        let whole = "mesh.dp_shard=4 mesh.dp_outer=1 fsdp.outer_strategy=no_shard";
        assert_eq!(of("small-hfsdp"), [whole]);
    }

    #[test]
    fn every_candidate_names_a_key_and_is_legal_or_refused_with_a_reason() {
        let load =
            |set: &[String]| shardlab_plan::scenario::load(Path::new("llama3-8b-4xh200"), set);
        let base = load(&[]).unwrap();
        let all = candidates(&base);
        assert!(all.len() > 45, "{}", all.len());
        for change in &all {
            if let Err(e) = load(&change.overrides) {
                assert!(!e.message().contains("unknown"), "{}: {e}", change.label);
                assert!(!e.message().contains("expected"), "{}: {e}", change.label);
            }
        }
    }
}
