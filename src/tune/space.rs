//! The options that may change, one row per axis.
//!
//! [`options`] lists the values of an option, and the validation of scenarios determines which of
//! them a policy or model rejects. A row defines which keys belong together, and the values that
//! follow from the job.

use super::Request;
use crate::analysis::attention::{self, ATTENTION};
use crate::analysis::options::{self, GATHERS_OF_CODES, MODULES, OFFLOAD, SAVED_CODES};
use crate::analysis::whatif::{
    expert_parallel, is_settable, joined_blocks, mesh, recomputed_modules,
};
use crate::predict::Prediction;
use shardlab_plan::Scenario;
use shardlab_plan::config::{Float8Saved, RecomputeLayers, Units};
use shardlab_plan::scenario::ScenarioErrorKind;

/// Overrides, in the syntax of `--set`, that belong together. Empty for the current settings.
pub(super) type Choice = Vec<String>;

/// Values of the keys of a row.
enum Values {
    /// The values of the only key that every search tries.
    Usual,
    /// These overrides.
    Sets(&'static [&'static [&'static str]]),
    /// Values that follow from the job.
    From(fn(&Prediction) -> Vec<Choice>),
}

struct Row {
    keys: &'static [&'static str],
    values: Values,
}

const fn row(keys: &'static [&'static str], values: Values) -> Row {
    Row { keys, values }
}

use Values::{From, Sets, Usual};

/// Keys of 8-bit matmuls. Those of codes have no effect without a recipe.
const FLOAT8_RECIPE: &str = "precision.float8_recipe";
const CODES: [&str; 2] = [GATHERS_OF_CODES, SAVED_CODES];

/// Key of the axis of recomputed blocks.
pub(super) const LAYERS: &str = "train.recompute_layers";
/// Keys of the axes that divide points into groups. They have the largest effect on time and
/// memory.
pub(super) const GROUPS: [&str; 2] = ["train.micro_batch", "train.recompute"];

/// Axes on which the values of others depend come first.
const ROWS: &[Row] = &[
    row(&["train.micro_batch", "train.grad_accum"], From(batches)),
    row(
        &["mesh.dp_shard", "mesh.dp_replicate", "fsdp.outer_strategy"],
        From(meshes),
    ),
    row(
        &["mesh.ep", "fsdp.ignored_params"],
        From(expert_parallel_sizes),
    ),
    row(&["compile.mode"], Usual),
    row(
        &[
            "train.recompute",
            "train.recompute_save",
            "train.recompute_nth_matmul",
            MODULES,
        ],
        From(recompute),
    ),
    row(&[LAYERS], From(layers)),
    row(
        &["train.loss", "train.loss_chunk_tokens"],
        Sets(&[
            &["train.loss=materialized"],
            &["train.loss=chunked"],
            &["train.loss=chunked", "train.loss_chunk_tokens=auto"],
            &["train.loss=chunked", "train.loss_chunk_tokens=1024"],
            &["train.loss=chunked", "train.loss_chunk_tokens=16384"],
        ]),
    ),
    row(&[ATTENTION], From(attention_implementations)),
    row(&["fsdp.strategy"], Usual),
    row(&["fsdp.units"], From(units)),
    row(&["fsdp.reshard_after_forward"], From(reshard)),
    row(&["fsdp.reshard_root"], Usual),
    row(&["fsdp.reshard_after_backward"], Usual),
    row(&["fsdp.prefetch_forward"], Usual),
    row(&["fsdp.prefetch_backward"], Usual),
    row(&["fsdp.prefetch_next_step"], Usual),
    row(&["precision.reduce_dtype"], Usual),
    row(&["fsdp.gradient_sync"], Usual),
    row(&["fsdp.reduce_in_flight"], Usual),
    row(&[OFFLOAD], Usual),
    row(&["train.activation_offload"], Usual),
    row(&["fsdp.optimizer_in_backward"], Usual),
    row(&["fsdp.copy_engine_all_gather"], Usual),
    row(
        &[
            "fsdp.copy_engine_reduce_scatter",
            "fsdp.fuse_reduce_into_optimizer",
        ],
        Sets(&[
            &["fsdp.copy_engine_reduce_scatter=false"],
            &["fsdp.copy_engine_reduce_scatter=true"],
            &[
                "fsdp.copy_engine_reduce_scatter=true",
                "fsdp.fuse_reduce_into_optimizer=true",
            ],
        ]),
    ),
    row(
        &["fsdp.cast_before_all_gather", "fsdp.copy_in_stream"],
        Sets(&[
            &["fsdp.cast_before_all_gather=false"],
            &["fsdp.cast_before_all_gather=true"],
            &[
                "fsdp.cast_before_all_gather=true",
                "fsdp.copy_in_stream=true",
            ],
        ]),
    ),
    row(
        &["precision.float8_all_gather", "precision.float8_saved"],
        From(codes),
    ),
    row(&["fsdp.separate_communicators"], Usual),
    row(&["fsdp.allocator"], Usual),
    row(&["fsdp.expandable_segments"], Usual),
    row(&["compile.fuse_projections"], Usual),
    row(&["compile.gemm_accumulate"], Usual),
    row(&["compile.mix_order_reductions"], Usual),
    row(&["compile.gemm_epilogue_fusion"], Usual),
    row(&["compile.cuda_graph"], Usual),
];

/// Options that change together, with the values that are possible for the job.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) keys: Vec<String>,
    /// The first one is the current one.
    pub(super) choices: Vec<Choice>,
}

/// A choice on each axis. All zeros stand for the current settings.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Point(pub(super) Vec<u16>);

impl Point {
    /// Returns the points with two of some single changes of this point, on different axes.
    pub(super) fn pairs(&self, singles: &[Self]) -> Vec<Self> {
        let changed = |p: &Self| p.0.iter().zip(&self.0).position(|(a, b)| a != b);
        let mut all = Vec::new();
        for (i, a) in singles.iter().enumerate() {
            for b in &singles[i + 1..] {
                match changed(b) {
                    Some(axis) if a.0[axis] == self.0[axis] => all.push(a.with(axis, b.0[axis])),
                    _ => {}
                }
            }
        }
        all
    }

    /// Returns the point with another choice on an axis.
    pub(super) fn with(&self, axis: usize, choice: u16) -> Self {
        let mut next = self.clone();
        next.0[axis] = choice;
        next
    }

    /// Returns the axes that differ from today's settings.
    pub(super) fn changed(&self) -> impl Iterator<Item = usize> + '_ {
        let all = self.0.iter().enumerate();
        all.filter(|(_, choice)| **choice != 0).map(|(i, _)| i)
    }
}

/// All points.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) axes: Vec<Axis>,
    pub(super) base: Scenario,
}

impl Space {
    pub(super) fn new(today: &Prediction, request: &Request<'_>) -> Self {
        let mut space = Self {
            axes: Vec::new(),
            base: today.scenario.clone(),
        };
        for row in ROWS {
            // Choices of the recipe come with those of its gathers and saved tensors.
            let is_freed = |(key, _): &(String, _)| {
                let codes = key == FLOAT8_RECIPE && row.keys.contains(&GATHERS_OF_CODES);
                codes || row.keys.contains(&key.as_str())
            };
            if !request.free.iter().any(is_freed) {
                let keys = row.keys.iter().map(|k| (*k).to_owned()).collect();
                space.add(keys, row.choices(today), request, false);
            }
        }
        for (key, values) in request.free {
            let choices = values.iter().map(|v| vec![format!("{key}={v}")]);
            let is_freed = |other: &str| request.free.iter().any(|(key, _)| key == other);
            if key == FLOAT8_RECIPE && !CODES.into_iter().any(is_freed) {
                let keys = [FLOAT8_RECIPE].into_iter().chain(CODES);
                let choices = choices.flat_map(|recipe| with_codes(today, recipe));
                let keys = keys.map(str::to_owned).collect();
                space.add(keys, choices.collect(), request, true);
            } else {
                space.add(vec![key.clone()], choices.collect(), request, true);
            }
        }
        space
    }

    /// Adds an axis with the choices that are possible, if there are any.
    fn add(&mut self, keys: Vec<String>, choices: Vec<Choice>, request: &Request<'_>, freed: bool) {
        let is_kept = |set: &String| {
            let key = set.split_once('=').map_or(set.as_str(), |(key, _)| key);
            request.kept.iter().any(|kept| kept == key)
        };
        let mut possible = vec![Choice::new()];
        for choice in choices {
            let settable = freed || choice.iter().all(|set| is_settable(&self.base.fsdp, set));
            if settable && !choice.iter().any(is_kept) && self.is_other(&choice, request) {
                possible.push(choice);
            }
        }
        if possible.len() > 1 {
            let choices = possible;
            self.axes.push(Axis { keys, choices });
        }
    }

    /// Returns whether a choice is possible and differs from the current settings, alone or with a
    /// choice of an earlier axis.
    fn is_other(&self, choice: &Choice, request: &Request<'_>) -> bool {
        match (request.load)(choice) {
            Ok(scenario) => scenario != self.base,
            Err(e) if e.kind() == ScenarioErrorKind::Value => false,
            Err(_) => {
                let earlier = self.axes.iter().flat_map(|axis| &axis.choices[1..]);
                let mut both = earlier.map(|other| [&other[..], choice].concat());
                both.any(|both| (request.load)(&both).is_ok())
            }
        }
    }

    pub(super) fn today(&self) -> Point {
        Point(vec![0; self.axes.len()])
    }

    /// Returns the number of points; at most `u64::MAX`.
    pub(super) fn size(&self) -> u64 {
        let counts = self.axes.iter().map(|axis| axis.choices.len() as u64);
        counts.fold(1, u64::saturating_mul)
    }

    /// Returns all points in order.
    pub(super) fn points(&self) -> Vec<Point> {
        let mut all = vec![Point(Vec::new())];
        for axis in &self.axes {
            let choices = 0..axis.choices.len() as u16;
            let extended = all.iter().flat_map(|p| {
                let choices = choices.clone();
                choices.map(move |c| Point([&p.0[..], &[c]].concat()))
            });
            all = extended.collect();
        }
        all
    }

    /// Returns the axis with a key.
    pub(super) fn axis(&self, key: &str) -> Option<usize> {
        let has = |axis: &Axis| axis.keys.iter().any(|k| k == key);
        self.axes.iter().position(has)
    }

    /// Returns the choices of a point that differ from today's settings.
    pub(super) fn choices<'s>(&'s self, point: &'s Point) -> impl Iterator<Item = &'s Choice> {
        point
            .changed()
            .map(|i| &self.axes[i].choices[usize::from(point.0[i])])
    }

    /// Returns the overrides of a point.
    pub(super) fn overrides(&self, point: &Point) -> Vec<String> {
        self.choices(point).flatten().cloned().collect()
    }
}

impl Row {
    fn choices(&self, today: &Prediction) -> Vec<Choice> {
        let first = |value: &str| vec![format!("{}={value}", self.keys[0])];
        match &self.values {
            Usual => options::values(self.keys[0]).map(first).collect(),
            Sets(sets) => {
                let owned = |set: &&[&str]| set.iter().map(|s| (*s).to_owned()).collect();
                sets.iter().map(owned).collect()
            }
            From(choices) => choices(today),
        }
    }
}

/// Returns the micro-batches that result in the same batch per rank and step.
fn batches(today: &Prediction) -> Vec<Choice> {
    let train = &today.scenario.train;
    let all = train.micro_batch * u64::from(train.grad_accum);
    let divisors = (1..=all).filter(|n| all.is_multiple_of(*n));
    let choice = |n: u64| {
        vec![
            format!("train.micro_batch={n}"),
            format!("train.grad_accum={}", all / n),
        ]
    };
    divisors.map(choice).collect()
}

/// Returns what may run again in backward. Parts of blocks that run again today are given up in
/// favor of other choices.
fn recompute(today: &Prediction) -> Vec<Choice> {
    let base = &today.scenario;
    let no_parts = (!base.train.recompute_modules.is_empty()).then(|| format!("{MODULES}=[]"));
    let others: [&[&str]; 6] = [
        &["train.recompute=none"],
        &["train.recompute=pointwise"],
        &["train.recompute=selective"],
        &["train.recompute=selective", "train.recompute_nth_matmul=2"],
        &[
            "train.recompute=selective",
            "train.recompute_save=[\"attention\"]",
        ],
        &["train.recompute=full"],
    ];
    let others = others.into_iter().map(|set| {
        let is_selective = set[0].ends_with("selective");
        let no_parts = no_parts.clone().filter(|_| is_selective);
        let set = set.iter().map(|s| (*s).to_owned());
        set.chain(no_parts).collect()
    });
    let parts = recomputed_modules(base).map(|change| change.overrides);
    others.chain(parts).collect()
}

/// Returns the meshes over the same ranks.
fn meshes(today: &Prediction) -> Vec<Choice> {
    let all = mesh(&today.scenario).into_iter().map(|c| c.overrides);
    all.filter(|set| set[0].starts_with("mesh.")).collect()
}

/// Returns the implementations of attention that compute the same.
fn attention_implementations(today: &Prediction) -> Vec<Choice> {
    let all = attention::implementations(&today.scenario).into_iter();
    all.map(|name| vec![format!("{ATTENTION}={name}")])
        .collect()
}

/// Returns the numbers of ranks among which experts can be divided.
fn expert_parallel_sizes(today: &Prediction) -> Vec<Choice> {
    let all = expert_parallel(&today.scenario);
    all.map(|change| change.overrides).collect()
}

/// Returns the groups of ranks over which shards are kept after forward, and the other values of
/// the key.
fn reshard(today: &Prediction) -> Vec<Choice> {
    let key = "fsdp.reshard_after_forward=";
    let words = options::values("fsdp.reshard_after_forward");
    let words = words.map(|v| vec![format!("{key}{v}")]);
    let groups = mesh(&today.scenario).into_iter().map(|c| c.overrides);
    let groups = groups.filter(|set| set[0].starts_with(key));
    words.chain(groups).collect()
}

/// Returns the numbers of blocks, from the first one, that can be recomputed.
fn layers(today: &Prediction) -> Vec<Choice> {
    if matches!(
        today.scenario.train.recompute_layers,
        RecomputeLayers::Patterns(_)
    ) {
        return Vec::new();
    }
    let some = (1..today.scenario.model.layers).map(|n| n.to_string());
    let all = some.chain(["all".to_owned()]);
    all.map(|n| vec![format!("{LAYERS}={n}")]).collect()
}

/// Returns units of one, two and four blocks, and of both ends of the model. Only units of blocks
/// are known by name.
fn units(today: &Prediction) -> Vec<Choice> {
    if today.scenario.fsdp.units != Units::Block {
        return vec![vec!["fsdp.units=block".to_owned()]];
    }
    let joined = joined_blocks(today).into_iter().map(|c| c.overrides);
    let ends = (!today.scenario.model.tie_embeddings)
        .then(|| vec!["fsdp.units=block_and_ends".to_owned()]);
    joined.chain(ends).collect()
}

/// Returns the other ways to gather and to save the codes of 8-bit matmuls, which do not change
/// results: each alone, and both. torchao saves inputs of layers in the compute type only.
fn codes(today: &Prediction) -> Vec<Choice> {
    let of = &today.scenario.precision.float8;
    let saved = match of.saved {
        Float8Saved::Compute => "float8",
        Float8Saved::Float8 => "compute",
    };
    let [gathers, saves] = CODES;
    let (gathers, saves) = (
        format!("{gathers}={}", !of.all_gather),
        format!("{saves}={saved}"),
    );
    let all = vec![
        vec![gathers.clone()],
        vec![saves.clone()],
        vec![gathers, saves],
    ];
    let fsdp = &today.scenario.fsdp;
    let settable = |c: &Choice| c.iter().all(|set| is_settable(fsdp, set));
    all.into_iter().filter(settable).collect()
}

/// Returns the choices of another recipe of 8-bit matmuls: alone, and with each way to gather and
/// to save codes. Without a recipe, these keys have no effect, so their values become the defaults.
fn with_codes(today: &Prediction, recipe: Choice) -> Vec<Choice> {
    let of = &today.scenario.precision.float8;
    if recipe[0].ends_with("=none") {
        let [gathers, saves] = CODES;
        let gathers = of.all_gather.then(|| format!("{gathers}=false"));
        let is_saved = of.saved == Float8Saved::Float8;
        let saves = is_saved.then(|| format!("{saves}=compute"));
        return vec![recipe.into_iter().chain(gathers).chain(saves).collect()];
    }
    let more = codes(today).into_iter();
    let more = more.map(|codes| [&recipe[..], &codes].concat());
    [recipe.clone()].into_iter().chain(more).collect()
}
