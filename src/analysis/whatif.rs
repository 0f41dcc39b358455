//! The predicted effect of each option.

use super::attention::{self, ATTENTION};
use super::options::{self, GATHERS_OF_CODES, MODULES, SAVED_CODES};
use super::shapes;
use super::verdict::HEADROOM;
use crate::predict::{Fit, PredictError, Prediction, Profiles, predict_light};
use rayon::prelude::*;
use shardlab_plan::Scenario;
use shardlab_plan::config::{
    Dispatcher, Float8Recipe, Fsdp, IgnoredParams, OuterStrategy, PolicyKind, Recompute,
    RecomputeLayers, RowShortage, Units,
};
use shardlab_plan::scenario::{BatchUnit, ScenarioError};
use shardlab_plan::units::Bytes;
use shardlab_sim::Profile;

/// Relative difference up to which two times, or two amounts of memory, count as equal.
pub const TOLERANCE: f64 = 0.005;

/// A change to a scenario: one or more overrides that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Name in tables, for example `fsdp.prefetch_forward=0`.
    pub label: String,
    /// Overrides, in the syntax of `--set`.
    pub overrides: Vec<String>,
}

impl Change {
    pub(super) fn one(key: &str, value: &str) -> Self {
        let text = format!("{key}={value}");
        Self {
            label: text.clone(),
            overrides: vec![text],
        }
    }

    /// Divides experts among another number of ranks than the scenario does. Experts that FSDP does
    /// not manage are on one rank each, which changes.
    pub(super) fn experts_over(ranks: u32, base: &Scenario) -> Self {
        let managed = (base.fsdp.ignored_params == IgnoredParams::Experts)
            .then(|| "fsdp.ignored_params=[]".to_owned());
        let ep = format!("mesh.ep={ranks}");
        let overrides: Vec<String> = [ep].into_iter().chain(managed).collect();
        Self {
            label: overrides.join(" "),
            overrides,
        }
    }
}

impl Change {
    /// Returns whether the samples per step, the precision and the model stay the same. Changes of
    /// the micro-batch come without one of `grad_accum`, so they change the samples.
    #[must_use]
    pub(crate) fn keeps_training(&self) -> bool {
        let other = ["train.micro_batch=", "precision.", "model."];
        let is_other = |set: &String| {
            let alike = [GATHERS_OF_CODES, SAVED_CODES, ATTENTION];
            let same = alike.iter().any(|key| set.starts_with(key));
            other.iter().any(|key| set.starts_with(key)) && !same
        };
        !self.overrides.iter().any(is_other)
    }
}

/// Step time and memory with a change. Reserved, device and free memory are those of a device with
/// enough memory, so that the effects of jobs that do not fit, or only after the allocator frees
/// cached blocks, can be compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    /// Step time, milliseconds.
    pub step_ms: f64,
    /// Tokens (or the model's batch unit) per second and GPU.
    pub tokens_per_s: f64,
    /// Unit of the batches.
    pub counted_in: BatchUnit,
    /// Peak of allocated memory.
    pub peak_allocated: Bytes,
    /// Peak of reserved memory.
    pub peak_reserved: Bytes,
    /// Peak of device memory.
    pub peak_device: Bytes,
    /// Host memory of a rank for offloaded state.
    pub host_state: Bytes,
    /// Device memory that stays free; negative if the device has less than the step takes, `None`
    /// if its capacity is unknown.
    pub free_bytes: Option<i64>,
    /// Whether it fits and leaves at least [`HEADROOM`] free.
    pub has_headroom: bool,
    /// Whether it fits.
    pub fit: Fit,
    /// Choices of experts that find no row, if there are any.
    pub shortage: Option<RowShortage>,
}

impl Effect {
    /// Returns the effect that a prediction shows.
    #[must_use]
    pub fn of(p: &Prediction) -> Self {
        let needs = p.needs();
        Self {
            step_ms: p.step_ms(),
            tokens_per_s: p.tokens_per_s(),
            counted_in: p.scenario.model.family.counted_in(),
            peak_allocated: p.run.memory.peak_allocated,
            peak_reserved: needs.reserved,
            peak_device: needs.device,
            host_state: p.host_state(),
            free_bytes: p.free_of(needs.device),
            has_headroom: p.leaves(HEADROOM),
            fit: p.fit.clone(),
            shortage: p.scenario.row_shortage(),
        }
    }

    /// Returns the share of choices of experts that find no row.
    fn without_row(&self) -> f64 {
        self.shortage.as_ref().map_or(0.0, |short| short.share)
    }

    /// Returns the relative gain in throughput over another effect: 0.05 means 5 % more.
    #[must_use]
    pub(crate) fn faster_than(&self, base: &Self) -> f64 {
        self.tokens_per_s / base.tokens_per_s - 1.0
    }

    /// Returns the relative change of the time per token from another effect: -0.05 means 5 % less.
    #[must_use]
    pub(crate) fn longer_than(&self, base: &Self) -> f64 {
        base.tokens_per_s / self.tokens_per_s - 1.0
    }

    /// Returns whether it is faster than another effect by more than [`TOLERANCE`].
    #[must_use]
    pub(crate) fn is_faster_than(&self, base: &Self) -> bool {
        self.faster_than(base) > TOLERANCE
    }

    /// Returns the share of reserved memory that it saves relative to another effect.
    #[must_use]
    pub fn saves(&self, base: &Self) -> f64 {
        1.0 - self.peak_reserved.0 as f64 / base.peak_reserved.0.max(1) as f64
    }

    /// Returns whether time or memory differ by more than [`TOLERANCE`].
    #[must_use]
    pub fn differs(&self, base: &Self) -> bool {
        let memory = |a: Bytes, b: Bytes| a.0.abs_diff(b.0) as f64 > TOLERANCE * b.0 as f64;
        self.faster_than(base).abs() > TOLERANCE
            || memory(self.peak_allocated, base.peak_allocated)
            || memory(self.peak_reserved, base.peak_reserved)
    }

    /// Returns whether it fits at least as well as another effect and is either faster or uses less
    /// memory, by more than [`TOLERANCE`].
    #[must_use]
    pub fn improves(&self, base: &Self) -> bool {
        let worse = matches!(
            (&self.fit, &base.fit),
            (Fit::Exceeds { .. }, _) | (Fit::Tight { .. }, Fit::Fits | Fit::Unknown)
        ) || self.without_row() > base.without_row();
        // A faster step is not an improvement if it leaves too little memory.
        let room = self.has_headroom || !base.has_headroom || self.peak_device <= base.peak_device;
        let faster = self.is_faster_than(base) && room;
        // Saved memory may cost at most the same share of the throughput.
        let smaller = self.saves(base) > TOLERANCE.max(-self.faster_than(base));
        !worse && (faster || smaller)
    }
}

/// A change and its effect.
#[derive(Debug)]
pub(crate) struct WhatIf {
    /// Change.
    pub change: Change,
    /// Effect, or the reason why the change is impossible.
    pub effect: Result<Effect, PredictError>,
}

/// Returns 8-bit recipes with gathers of codes, and with codes saved for backward. Without a
/// recipe, these keys have no effect, so they are not tried alone.
fn codes(base: &Scenario) -> Vec<Change> {
    let recipes = [
        Float8Recipe::Tensorwise,
        Float8Recipe::Blockwise,
        Float8Recipe::Mxfp8,
    ];
    let others = recipes
        .into_iter()
        .filter(|recipe| *recipe != base.precision.float8.recipe);
    let with = |recipe: Float8Recipe| {
        let recipe = format!("precision.float8_recipe={}", recipe.name());
        let [gathers, saved] = [
            format!("{GATHERS_OF_CODES}=true"),
            format!("{SAVED_CODES}=float8"),
        ];
        [
            vec![recipe.clone(), gathers.clone()],
            vec![recipe, gathers, saved],
        ]
    };
    let all = others.flat_map(with);
    all.map(|overrides| Change {
        label: overrides.join(" "),
        overrides,
    })
    .collect()
}

/// Returns changes to parts of blocks that run again, with selective recompute: parts that the
/// model has, under policies whose users can choose them, and without another choice of operations.
pub(crate) fn recomputed_modules(base: &Scenario) -> impl Iterator<Item = Change> {
    let train = &base.train;
    let selective = train.recompute == Recompute::Selective;
    let others = train.recompute_save.is_some() || train.recompute_nth_matmul > 0;
    let applies = base.fsdp.can_set(MODULES, "") && !others;
    let missing = [
        ("moe", !base.model.has_experts()),
        ("shared_experts", !base.model.has_experts()),
        ("mla_up_proj", !base.model.options.latent.is_used()),
    ];
    let has = move |value: &&str| !missing.iter().any(|(part, no)| *no && value.contains(part));
    let values = options::values(MODULES).filter(move |value| applies && has(value));
    values.map(move |value| {
        let modules = format!("{MODULES}={value}");
        let selective = (!selective).then(|| "train.recompute=selective".to_owned());
        let overrides: Vec<String> = selective.into_iter().chain([modules]).collect();
        Change {
            label: overrides.join(" "),
            overrides,
        }
    })
}

/// Returns whether to propose an override to users of an engine, because they can set it.
/// `shardlab explain` shows the others only on request.
#[must_use]
pub(crate) fn is_settable(fsdp: &Fsdp, setting: &str) -> bool {
    let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
    // Another policy is another engine.
    if key == "fsdp.policy" {
        return false;
    }
    // The host time of PyTorch's expert parallelism is not predicted well enough to propose it
    // (`tests/data/peers_h100x2.csv`).
    let is_rough = fsdp.policy != PolicyKind::Native && matches!(key, "mesh.ep" | "moe.dispatcher");
    !is_rough && fsdp.can_set(key, value)
}

/// Returns the helpful changes that a user of this policy can make: fastest first, then those that
/// save the most memory.
#[must_use]
pub(crate) fn improvements<'a>(
    base: &Effect,
    all: &'a [WhatIf],
    fsdp: &Fsdp,
) -> Vec<(&'a WhatIf, &'a Effect)> {
    let mut worth: Vec<(&WhatIf, &Effect)> = all
        .iter()
        .filter(|w| w.change.overrides.iter().all(|set| is_settable(fsdp, set)))
        .filter_map(|w| Some((w, w.effect.as_ref().ok()?)))
        .filter(|(_, e)| e.improves(base))
        .collect();
    let faster = |e: &Effect| e.is_faster_than(base);
    worth.sort_by(|(_, a), (_, b)| {
        faster(b).cmp(&faster(a)).then_with(|| {
            if faster(a) {
                b.tokens_per_s.total_cmp(&a.tokens_per_s)
            } else {
                a.peak_reserved.cmp(&b.peak_reserved)
            }
        })
    });
    worth
}

/// Returns the changes to try on a scenario.
#[must_use]
pub fn candidates(base: &Scenario, profile: &Profile) -> Vec<Change> {
    let keys = options::keys().filter(|key| *key != MODULES);
    let alone = keys.flat_map(|key| options::values(key).map(|v| Change::one(key, v)));
    let mut all: Vec<Change> = alone.collect();
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
            "fsdp.copy_engine_all_gather=true".to_owned(),
            "fsdp.copy_engine_reduce_scatter=true".to_owned(),
        ],
    });
    all.extend(codes(base));
    all.extend(recomputed_modules(base));
    let attention = attention::implementations(base).into_iter();
    all.extend(attention.map(|name| Change::one(ATTENTION, name)));
    all.extend(mesh(base));
    all.extend(expert_parallel(base));
    all.extend(dispatchers(base));
    all.extend(padding(base, profile));
    let batch = base.train.micro_batch;
    all.push(Change::one("train.micro_batch", &(batch * 2).to_string()));
    if batch.is_multiple_of(2) {
        all.push(Change::one("train.micro_batch", &(batch / 2).to_string()));
    }
    all
}

/// Returns the change that pads an unaligned vocabulary.
#[must_use]
pub fn padding(base: &Scenario, profile: &Profile) -> Option<Change> {
    let set = shapes::padded_vocabulary(base, profile)?;
    let (key, value) = set.split_once('=')?;
    Some(Change::one(key, value))
}

/// Returns changes to the traffic between nodes, on the same GPUs: groups of a node or less for
/// `reshard_after_forward`, and meshes that shard within nodes or over all ranks.
pub(crate) fn mesh(base: &Scenario) -> Vec<Change> {
    let m = &base.mesh;
    // Counted in data-parallel ranks; the other axes do not change.
    let (world, node) = (m.data_ranks(), (m.gpus_per_node / m.tp).max(1));
    let mut all = Vec::new();
    if world > node {
        let groups = (2..=node.min(m.dp_shard.saturating_sub(1))).rev();
        let groups = groups.filter(|n| node.is_multiple_of(*n));
        all.extend(groups.map(|n| Change::one("fsdp.reshard_after_forward", &n.to_string())));
    }
    let mut meshes = vec![(world, 1)];
    if world > node {
        // Groups of one node, two, four, and so on. Smaller groups hold more memory without saving
        // traffic between nodes.
        let groups = std::iter::successors(Some(node), |shard| shard.checked_mul(2));
        let whole = groups.take_while(|shard| *shard < world);
        meshes.extend(whole.map(|shard| (shard, world / shard)));
    }
    for (shard, outer) in meshes {
        if shard * outer == world && shard != m.dp_shard {
            let mut overrides = vec![
                format!("mesh.dp_shard={shard}"),
                format!("mesh.dp_replicate={outer}"),
            ];
            if outer == 1 && base.fsdp.outer_strategy == OuterStrategy::Optim {
                // Without an outer axis, there is nothing to shard over.
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

/// Returns units of two and of four blocks. Only units of single blocks are known by name.
pub(crate) fn joined_blocks(base: &Prediction) -> Vec<Change> {
    if base.scenario.fsdp.units != Units::Block {
        return Vec::new();
    }
    let units = base.program.units.iter().filter(|u| !u.is_root);
    let names: Vec<&str> = units.map(|u| u.name.as_str()).collect();
    let joined = |n: usize| {
        let units = names
            .chunks(n)
            .map(|blocks| format!("{:?}", blocks.join("+")));
        let units: Vec<String> = units.collect();
        Change {
            label: format!("fsdp.units: groups of {n} blocks"),
            overrides: vec![format!("fsdp.units=[{}]", units.join(", "))],
        }
    };
    let sizes = [2, 4].into_iter().filter(|n| names.len() > *n);
    sizes.map(joined).collect()
}

/// Largest number of ranks among which dividing experts is tried.
const MAX_EP: u32 = 64;

/// Returns other numbers of ranks among which experts can be divided.
pub(crate) fn expert_parallel(base: &Scenario) -> impl Iterator<Item = Change> {
    let now = base.mesh.ep;
    let others = expert_parallel_sizes(base, MAX_EP).filter(move |n| *n != now);
    others.map(|n| Change::experts_over(n, base))
}

/// Returns the powers of two up to `most` that divide both experts and shards evenly; none without
/// experts.
pub(super) fn expert_parallel_sizes(base: &Scenario, most: u32) -> impl Iterator<Item = u32> {
    let experts = base.model.family.spec().expert_parallel;
    let experts = experts.map(|of| of(&base.model).1);
    let ranks = base.mesh.dp_shard;
    std::iter::successors(Some(1_u32), |n| n.checked_mul(2))
        .take_while(move |n| *n <= ranks.min(most))
        .filter(move |n| {
            let divides = |all: u64| all.is_multiple_of(u64::from(*n));
            divides(ranks.into()) && experts.is_some_and(divides)
        })
}

/// Returns the ways to send tokens to divided experts.
fn dispatchers(base: &Scenario) -> impl Iterator<Item = Change> {
    let divided = base.moe.iter();
    let words = divided.flat_map(|_| Dispatcher::WORDS.iter());
    words.map(|word| Change::one("moe.dispatcher", word))
}

/// Loads the scenario with additional overrides.
pub type Load<'a> = &'a (dyn Fn(&[String]) -> Result<Scenario, ScenarioError> + Sync);

/// Finds the smallest number of recomputed blocks, counted from the first block, that leaves
/// [`HEADROOM`]. Applies if all blocks are recomputed but need not be, or if no block is and the
/// scenario does not fit.
#[must_use]
pub(crate) fn fewest_layers(
    base: &Prediction,
    profiles: &Profiles,
    load: Load<'_>,
) -> Option<WhatIf> {
    let train = &base.scenario.train;
    let full = match train.recompute {
        Recompute::Full if train.recompute_layers == RecomputeLayers::All => true,
        Recompute::None if !base.fit.is_ok() => false,
        _ => return None,
    };
    // A device of unknown capacity fits everything.
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
    // No recompute is a separate candidate. Recompute of all blocks is the base or also a
    // candidate.
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
        // A scenario recomputes at least one block. No recompute, which is a separate candidate,
        // may be enough.
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

/// Predicts every candidate on all cores, except those that do not change the scenario.
#[must_use]
pub(crate) fn try_all(base: &Prediction, profiles: &Profiles, load: Load<'_>) -> Vec<WhatIf> {
    let (fewest, mut all) = rayon::join(
        || fewest_layers(base, profiles, load),
        || try_each(base, profiles, load),
    );
    all.extend(fewest);
    all
}

fn try_each(base: &Prediction, profiles: &Profiles, load: Load<'_>) -> Vec<WhatIf> {
    let mut all = candidates(&base.scenario, &base.profile);
    all.extend(joined_blocks(base));
    all.into_par_iter()
        .filter_map(|change| try_one(change, &base.scenario, profiles, load))
        .collect()
}

/// Returns the effect of a change; `None` if it does not change the scenario.
pub(super) fn try_one(
    change: Change,
    base: &Scenario,
    profiles: &Profiles,
    load: Load<'_>,
) -> Option<WhatIf> {
    let effect = match load(&change.overrides) {
        Ok(scenario) if scenario == *base => return None,
        Ok(scenario) => predict_light(&scenario, profiles).map(|p| Effect::of(&p)),
        Err(e) => Err(e.into()),
    };
    Some(WhatIf { change, effect })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::path::Path;

    /// Qwen3-32B on eight GPUs of 80 GB. Its step fits after the allocator frees cached blocks.
    pub(crate) const TIGHT_JOB: &str = r#"
        model = { preset = "qwen3-32b" }
        train = { optimizer = "adamw", micro_batch = 2, seq_len = 4096, clip_norm = 1.0, recompute = "full" }
        mesh = { hardware = "h100-80", dp_shard = 8 }
        fsdp = { policy = "fsdp2", expandable_segments = true }
        precision = { param_dtype = "bf16" }
        compile = { mode = "blocks" }
    "#;

    /// A tight step reserves what its device has, so it does not show what an option saves.
    #[test]
    fn savings_of_tight_jobs_are_those_without_the_limit() {
        let profiles = Profiles::default();
        let predicted = |set: &[&str]| {
            let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
            let scenario = shardlab_plan::scenario::parse("job", TIGHT_JOB, &set).unwrap();
            predict_light(&scenario, &profiles).unwrap()
        };
        let base = predicted(&[]);
        assert!(matches!(base.fit, Fit::Tight { .. }), "{:?}", base.fit);
        let memory = &base.run.memory;
        assert!(memory.peak_device <= memory.capacity.unwrap());
        let before = Effect::of(&base);
        assert!(before.peak_device > memory.capacity.unwrap());
        assert!(before.free_bytes < Some(0), "{before:?}");
        // A chunk is half of the tokens, so half of the logits in float32 are never there.
        let chunked = Effect::of(&predicted(&["train.loss=chunked"]));
        let half_of_logits = 4096 * 151_936 * 4;
        let saved = before.peak_reserved.0 - chunked.peak_reserved.0;
        assert!(saved > half_of_logits, "{saved} of {half_of_logits}");
        assert!(chunked.improves(&before));
        let both = Effect::of(&predicted(&[
            "train.loss=chunked",
            "fsdp.units=block_and_ends",
        ]));
        assert!(both.saves(&before) > chunked.saves(&before));
    }

    #[test]
    fn meshes_are_tried_once() {
        let of = |name: &str| {
            let base = shardlab_plan::scenario::load(Path::new(name), &[]).unwrap();
            let profile = Profiles::default().get(&base.mesh.hardware).unwrap();
            let all = candidates(&base, &profile).into_iter();
            all.filter(|c| c.label.starts_with("mesh."))
                .map(|c| c.label)
                .collect::<Vec<_>>()
        };
        assert_eq!(of("small-hsdp"), ["mesh.dp_shard=4 mesh.dp_replicate=1"]);
        // Several nodes: groups of one, two and four nodes, in addition to the existing mesh.
        let nodes = [
            "mesh.dp_shard=8 mesh.dp_replicate=8",
            "mesh.dp_shard=16 mesh.dp_replicate=4",
            "mesh.dp_shard=32 mesh.dp_replicate=2",
        ];
        assert_eq!(of("llama3-70b-64xh100"), nodes);
        // Without an outer axis, there is nothing to shard over.
        let whole = "mesh.dp_shard=4 mesh.dp_replicate=1 fsdp.outer_strategy=no_shard";
        assert_eq!(of("small-hfsdp"), [whole]);
        // Experts on fewer or on more of the four ranks.
        assert_eq!(of("small-moe"), ["mesh.ep=2", "mesh.ep=4"]);
        assert_eq!(of("small-moe-ep"), ["mesh.ep=1", "mesh.ep=4"]);
    }

    /// The native engine can send tokens in every way, PyTorch only in the way of its job.
    #[test]
    fn dispatchers_are_tried_where_ranks_divide_experts() {
        let of = |name: &str| {
            let base = shardlab_plan::scenario::load(Path::new(name), &[]).unwrap();
            let profile = Profiles::default().get(&base.mesh.hardware).unwrap();
            let all = candidates(&base, &profile).into_iter();
            all.filter(|c| c.label.starts_with("moe."))
                .map(|c| c.label)
                .collect::<Vec<_>>()
        };
        let all = ["gather", "all_to_all", "padded", "peer", "deepep"];
        assert_eq!(
            of("small-moe-ep"),
            all.map(|d| format!("moe.dispatcher={d}"))
        );
        assert_eq!(of("small-moe"), Vec::<String>::new());
        let fsdp = |set: &[String]| {
            let base = shardlab_plan::scenario::load(Path::new("small-moe"), set);
            base.unwrap().fsdp
        };
        assert!(is_settable(&fsdp(&[]), "moe.dispatcher=padded"));
        let fsdp2 = fsdp(&["fsdp.policy=fsdp2".to_owned()]);
        assert!(!is_settable(&fsdp2, "moe.dispatcher=padded"));
    }

    /// Parts of blocks are tried where the model has them and the engine's users can choose them.
    #[test]
    fn parts_of_blocks_are_tried_where_there_are_any() {
        let of = |name: &str, set: &[&str]| {
            let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
            let base = shardlab_plan::scenario::load(Path::new(name), &set).unwrap();
            let tried = recomputed_modules(&base);
            tried.map(|c| c.overrides).collect::<Vec<_>>()
        };
        let dense = of("small-megatron", &[]);
        let first = [
            "train.recompute=selective",
            "train.recompute_modules=[\"core_attn\"]",
        ];
        assert_eq!(dense[0], first);
        let has = |all: &[Vec<String>], part: &str| all.iter().any(|c| c[1].contains(part));
        assert!(has(&dense, "mlp") && !has(&dense, "moe") && !has(&dense, "mla"));
        let experts = of("small-moe", &[]);
        assert!(has(&experts, "moe_act") && !has(&experts, "mla"));
        // With selective recompute, only the parts change. Other choices of operations exclude
        // them.
        let selective = "train.recompute=selective";
        assert_eq!(of("small-native", &[selective])[0], first[1..]);
        let nth = "train.recompute_nth_matmul=2";
        assert_eq!(of("small-native", &[selective, nth]).len(), 0);
        assert_eq!(of("small-fsdp2", &[]).len(), 0);
    }

    #[test]
    fn every_candidate_names_a_key_and_is_legal_or_refused_with_a_reason() {
        let load =
            |set: &[String]| shardlab_plan::scenario::load(Path::new("llama3-8b-4xh200"), set);
        let base = load(&[]).unwrap();
        let profile = Profiles::default().get(&base.mesh.hardware).unwrap();
        let all = candidates(&base, &profile);
        assert!(all.len() > 45, "{}", all.len());
        for change in &all {
            if let Err(e) = load(&change.overrides) {
                assert!(!e.message().contains("unknown"), "{}: {e}", change.label);
                assert!(!e.message().contains("expected"), "{}: {e}", change.label);
            }
        }
    }

    #[test]
    fn another_batch_is_another_training() {
        let keeps = |key: &str, value: &str| Change::one(key, value).keeps_training();
        assert!(keeps("train.recompute", "full") && keeps("compile.mode", "blocks"));
        assert!(!keeps("train.micro_batch", "4") && !keeps("precision.reduce_dtype", "bf16"));
        assert!(keeps(GATHERS_OF_CODES, "true") && keeps(SAVED_CODES, "float8"));
        assert!(keeps(ATTENTION, "sdpa") && !keeps("model.vocab", "128256"));
        assert!(!keeps("precision.float8_recipe", "rowwise"));
    }

    #[test]
    fn a_policy_proposes_what_its_users_can_set() {
        let all = [
            "fsdp.policy=native",
            "fsdp.optimizer_in_backward=true",
            "fsdp.separate_communicators=true",
            "fsdp.prefetch_forward=0",
            "compile.mode=full",
            "compile.mode=blocks",
            "fsdp.prefetch_forward=2",
            "train.recompute=full",
        ];
        let of = |name: &str, set: &[String]| {
            let scenario = shardlab_plan::scenario::load(Path::new(name), set);
            scenario.unwrap().fsdp
        };
        let settable = |policy| {
            let fsdp = of("llama-tiny", &[format!("fsdp.policy={policy}")]);
            all.map(|set| is_settable(&fsdp, set))
        };
        let (yes, no) = (true, false);
        assert_eq!(settable("native"), [no, yes, yes, yes, yes, yes, yes, yes]);
        assert_eq!(settable("megatron"), [no, no, yes, yes, yes, yes, yes, yes]);
        assert_eq!(settable("megatron_v2"), [no, no, no, no, no, no, no, yes]);
        assert_eq!(settable("fsdp2"), [no, no, no, no, no, yes, yes, yes]);
        // Variant pr4435 has an argument for both prefetches.
        let fsdp = of("small-megatron-pr4435", &[]);
        assert!(all[..3].iter().all(|set| !is_settable(&fsdp, set)));
        assert!(is_settable(&fsdp, "fsdp.prefetch_forward=0"));
    }
}
