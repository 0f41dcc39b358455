//! Warnings about a prediction: costs that it cannot predict, and settings that make a job
//! unnecessarily slow.

mod adapters;

use super::misaligned::{Misaligned, aligned_mesh};
use super::shapes;
use crate::predict::Prediction;
use serde::{Serialize, Serializer};
use shardlab_plan::Scenario;
use shardlab_plan::config::{CudaGraph, Float8Recipe, Float8Saved, PolicyKind, Strategy, Units};
use shardlab_plan::scenario::{self, Position};
use std::fmt;
use std::path::Path;

/// Share of the step above which the time lost to misaligned collectives causes a warning.
const WORTH_SAYING: f64 = 0.005;

/// Subject of a warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A matmul dimension is off the fast path of the libraries.
    UnalignedShape,
    /// Collectives have a payload per rank that is not aligned.
    MisalignedCollectives,
    /// Nodes have more GPUs than NVLink connects.
    NvlinkDomain,
    /// PyTorch cannot capture what the scenario captures.
    FullIterationGraph,
    /// The engine that divides experts does not send tokens in the predicted way.
    ExpertDispatch,
    /// Ranks reserve too few rows for the choices of experts.
    ExpertRows,
    /// The model's `config.json` contains something that no key expresses.
    ModelFile,
    /// A key of the configuration may change the answer, but the prediction does not follow it.
    Configuration,
    /// PEFT adds adapters to routers and experts, which have none here.
    ExpertAdapters,
    /// The engine of a policy divides the model into other units.
    Units,
    /// A key has no effect with the recipe of 8-bit matmuls.
    Float8Recipe,
}

/// A warning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Subject of the warning.
    pub kind: Kind,
    /// The warning, as a sentence.
    pub message: String,
    /// The option concerned (`section.key`), if there is one.
    pub key: Option<&'static str>,
    /// Place where that option is set; `None` for a default, or if only the prediction is known.
    #[serde(serialize_with = "as_text")]
    pub place: Option<(String, Position)>,
    /// Overrides that remove the cause, if there are any.
    pub set: Vec<String>,
}

fn as_text<S: Serializer>(place: &Option<(String, Position)>, to: S) -> Result<S::Ok, S::Error> {
    match place {
        Some((file, at)) => to.serialize_str(&format!("{file}:{}:{}", at.line, at.column)),
        None => to.serialize_none(),
    }
}

/// Formats the warning as `file:line:column: message`, like errors in scenarios.
impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((file, at)) = &self.place {
            write!(f, "{file}:{}:{}: ", at.line, at.column)?;
        }
        f.write_str(&self.message)
    }
}

/// Returns the warnings about a prediction.
#[must_use]
pub fn of(p: &Prediction) -> Vec<Warning> {
    let mut all: Vec<Warning> = shapes::unaligned(p)
        .into_iter()
        .map(|dimension| Warning {
            kind: Kind::UnalignedShape,
            message: dimension.sentence(),
            key: None,
            place: None,
            set: dimension.padding().into_iter().collect(),
        })
        .collect();
    all.extend(misaligned(p));
    all.extend(nvlink_domain(p));
    all.extend(of_settings(&p.scenario));
    all.extend(expert_dispatch(p));
    all.extend(expert_rows(p));
    all
}

/// Returns the warnings that follow from a scenario's settings, without a prediction.
fn of_settings(s: &Scenario) -> Vec<Warning> {
    let all = [full_iteration(s), adapters::of_experts(s), single_unit(s)];
    let all = all.into_iter().flatten();
    all.chain(float8_recipe(s)).collect()
}

/// Warns about keys that the recipe of 8-bit matmuls ignores: only `tensorwise` has codes that
/// backward can read transposed, and only scales of whole rows or tensors leave the sum over the
/// inner dimension to the tensor core.
fn float8_recipe(s: &Scenario) -> Vec<Warning> {
    let of = &s.precision.float8;
    let recipe = of.recipe.name();
    let warning = |key: &'static str, why: &str, default: &str| Warning {
        kind: Kind::Float8Recipe,
        message: format!("`{key}` has no effect with recipe {recipe}: {why}"),
        key: Some(key),
        place: None,
        set: vec![format!("{key}={default}")],
    };
    let saves = of.saved == Float8Saved::Float8
        && !matches!(of.recipe, Float8Recipe::None | Float8Recipe::Tensorwise);
    let slow = !of.fast_accum && matches!(of.recipe, Float8Recipe::Blockwise | Float8Recipe::Mxfp8);
    let saves = saves.then(|| {
        let why = "backward casts the saved input again, along the other dimension";
        warning("precision.float8_saved", why, "compute")
    });
    let slow = slow.then(|| {
        let why = "sums of scaled blocks are always in float32";
        warning("precision.float8_fast_accum", why, "true")
    });
    saves.into_iter().chain(slow).collect()
}

/// Returns the same warnings with the places where the options are set, for the scenario at `path`
/// with these overrides.
#[must_use]
pub fn located(p: &Prediction, path: &Path, overrides: &[String]) -> Vec<Warning> {
    let mut all = of(p);
    // The scenario was loaded from the same texts, so this fails only if a file has changed since.
    let notes = scenario::model_notes(path, overrides).unwrap_or_default();
    all.extend(notes.into_iter().map(model_file));
    locate(&mut all, path, overrides);
    all
}

/// Returns the warnings about the scenario at `path` with these overrides that need no prediction:
/// those about its settings, and about what the model's `config.json` contains that no key
/// expresses.
#[must_use]
pub fn of_scenario(s: &Scenario, path: &Path, overrides: &[String]) -> Vec<Warning> {
    let mut all = of_settings(s);
    let notes = scenario::model_notes(path, overrides).unwrap_or_default();
    all.extend(notes.into_iter().map(model_file));
    locate(&mut all, path, overrides);
    all
}

/// Returns the warnings about the prediction of a scenario that was generated from another file.
/// `text` is the scenario, as [`scenario::parse`] reads it. The user does not have that text, so
/// only places in model files are given.
#[must_use]
pub fn of_text(p: &Prediction, text: &str, overrides: &[String]) -> Vec<Warning> {
    let mut all = of(p);
    let notes = scenario::model_notes_of_text(&p.scenario.name, text, overrides);
    let file = p.scenario.model.preset.clone();
    let start = Position { line: 1, column: 1 };
    all.extend(notes.unwrap_or_default().into_iter().map(|note| Warning {
        place: file.clone().map(|file| (file, start)),
        ..model_file(note)
    }));
    all
}

/// Returns the warning that reports a note on a model's file.
fn model_file(message: String) -> Warning {
    Warning {
        kind: Kind::ModelFile,
        message,
        key: Some("model.preset"),
        place: None,
        set: Vec::new(),
    }
}

/// Adds the places where the options are set.
fn locate(all: &mut [Warning], path: &Path, overrides: &[String]) {
    if all.iter().any(|w| w.key.is_some()) {
        let places = scenario::places(path, overrides).unwrap_or_default();
        for warning in all {
            warning.place = warning.key.and_then(|key| places.get(key).cloned());
        }
    }
}

/// Warns if nodes have more GPUs than NVLink connects. Their traffic is priced as if NVLink
/// connected all of them.
fn nvlink_domain(p: &Prediction) -> Option<Warning> {
    let mesh = &p.scenario.mesh;
    let together = mesh.gpus_per_node.min(mesh.world());
    let domain = p.profile.network.nvlink_domain.filter(|d| together > *d)?;
    Some(Warning {
        kind: Kind::NvlinkDomain,
        message: format!(
            "NVLink connects {domain} GPUs of {}, but `gpus_per_node` is {}: collectives of more than {domain} \
             ranks are priced as if NVLink connected them",
            p.profile.name, mesh.gpus_per_node
        ),
        key: Some("mesh.gpus_per_node"),
        place: None,
        set: Vec::new(),
    })
}

/// Warns if whole steps of PyTorch's `fully_shard` are captured. The program is valid and runs
/// here, but PyTorch cannot capture it (pytorch/pytorch#164264).
fn full_iteration(s: &Scenario) -> Option<Warning> {
    let captured = s.compile.cuda_graph == CudaGraph::FullIteration;
    (captured && s.fsdp.policy == PolicyKind::Fsdp2).then(|| Warning {
        kind: Kind::FullIterationGraph,
        message: "torch cannot capture whole iterations of `fully_shard`, whose hooks allocate and wait for events \
                  of the host (pytorch/pytorch#164264): the prediction is that of a step that could be captured"
            .to_owned(),
        key: Some("compile.cuda_graph"),
        place: None,
        set: vec!["compile.cuda_graph=off".to_owned()],
    })
}

/// Warns if blocks are units where Megatron-FSDP has one unit for the whole model: it only gathers
/// parameters in units if it shards them.
fn single_unit(s: &Scenario) -> Option<Warning> {
    let whole = matches!(s.fsdp.strategy, Strategy::Optim | Strategy::OptimGrads);
    let divided = s.fsdp.policy == PolicyKind::Megatron && s.fsdp.units != Units::Root;
    (whole && divided).then(|| Warning {
        kind: Kind::Units,
        message: "Megatron-FSDP wraps the whole model as one unit if parameters are not sharded (`optim`, \
                  `optim_grads`): these units are planned, but it does not have them"
            .to_owned(),
        key: Some("fsdp.units"),
        place: None,
        set: vec!["fsdp.units=root".to_owned()],
    })
}

/// Warns about the host time of dispatchers whose host waits for the numbers of rows. This time
/// determines the length of such a step, and depends on the machine
/// (`tests/data/peers_experts_h200x2.csv` has runs of `fully_shard`).
fn expert_dispatch(p: &Prediction) -> Option<Warning> {
    let s = &p.scenario;
    let dispatcher = s.moe.as_ref()?.dispatcher;
    // Megatron-LM can pad the rows of experts to their capacity. torchtitan cannot.
    let pads = s.fsdp.policy != PolicyKind::Fsdp2;
    (dispatcher.host_reads() && s.fsdp.policy != PolicyKind::Native).then(|| Warning {
        kind: Kind::ExpertDispatch,
        message: "in every layer of experts, the host waits for the row counts of the dispatcher, so host time limits \
                  the step: measured steps of `fully_shard` on a host slower than that of the profile took up to \
                  1.4 times as long as predicted. `shardlab calibrate --step-ms` derives the speed of a host from one \
                  measured step"
            .to_owned(),
        key: Some("mesh.ep"),
        place: None,
        set: pads.then(|| "moe.dispatcher=padded".to_owned()).into_iter().collect(),
    })
}

/// Warns if choices of `moe.routing` find no row: they are not part of the prediction.
fn expert_rows(p: &Prediction) -> Option<Warning> {
    let short = p.scenario.row_shortage()?;
    let layers = match short.layers {
        1 => format!("layer {}", short.layer),
        n => format!(
            "layer {}, the busiest of {n} with too few rows",
            short.layer
        ),
    };
    Some(Warning {
        kind: Kind::ExpertRows,
        message: format!(
            "{}: in {layers}, experts of one rank need {} rows, and {} are reserved. The prediction prices only \
             these; a factor of {} is enough for all choices",
            short.words(),
            short.wanted,
            short.reserved,
            short.factor
        ),
        key: Some("moe.capacity_factor"),
        place: None,
        set: vec![format!("moe.capacity_factor={}", short.factor)],
    })
}

fn misaligned(p: &Prediction) -> Option<Warning> {
    let found = Misaligned::of(p);
    let step = p.run.recorded_to.saturating_sub(p.run.recorded_from);
    if step.0 == 0 || (found.lost.0 as f64) < WORTH_SAYING * step.0 as f64 {
        return None;
    }
    let mesh = aligned_mesh(p);
    Some(Warning {
        kind: Kind::MisalignedCollectives,
        message: found.sentence(mesh),
        key: None,
        place: None,
        set: mesh.map_or_else(Vec::new, |mesh| mesh.overrides()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{Profiles, predict};

    fn of(overrides: &[&str]) -> Vec<Warning> {
        let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
        let path = Path::new("small-fsdp2");
        let scenario = scenario::load(path, &overrides).unwrap();
        let options = shardlab_sim::Options::default();
        let p = predict(&scenario, &Profiles::default(), &options).unwrap();
        let mut all = located(&p, path, &overrides);
        all.retain(|w| matches!(w.kind, Kind::NvlinkDomain | Kind::FullIterationGraph));
        all
    }

    #[test]
    fn dispatchers_that_wait_for_the_host_are_named() {
        let of = |set: &[&str]| {
            let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
            let scenario = scenario::load(Path::new("small-moe"), &set).unwrap();
            let options = shardlab_sim::Options::default();
            let p = predict(&scenario, &Profiles::default(), &options).unwrap();
            let all = super::of(&p);
            let found = all.iter().find(|w| w.kind == Kind::ExpertDispatch);
            found.map(|w| w.message.clone())
        };
        let message = of(&["fsdp.policy=fsdp2", "mesh.ep=2"]).unwrap();
        assert!(
            message.contains("in every layer of experts, the host waits"),
            "{message}"
        );
        for set in [
            &["fsdp.policy=fsdp2"][..],
            &["fsdp.policy=fsdp2", "mesh.ep=2", "moe.dispatcher=padded"],
            &["mesh.ep=2"],
        ] {
            assert_eq!(of(set), None, "{set:?}");
        }
    }

    #[test]
    fn choices_without_a_row_are_named() {
        let of = |set: &[&str]| {
            let set = ["mesh.ep=2"].iter().chain(set).map(|s| (*s).to_owned());
            let scenario = scenario::load(Path::new("small-moe"), &set.collect::<Vec<_>>());
            let options = shardlab_sim::Options::default();
            let p = predict(&scenario.unwrap(), &Profiles::default(), &options).unwrap();
            let mut all = super::of(&p).into_iter();
            all.find(|w| w.kind == Kind::ExpertRows)
        };
        // Half of the 96 choices that fall on a rank.
        let few = ["moe.capacity_factor=0.5"];
        let warning = of(&few).unwrap();
        assert_eq!(
            warning.message,
            "50.0 % of choices find no row, so a run fails: in layer 1, the busiest of 2 with too few rows, experts \
             of one rank need 96 rows, and 48 are reserved. The prediction prices only these; a factor of 1 is enough \
             for all choices"
        );
        assert_eq!(warning.set, ["moe.capacity_factor=1"]);
        let dropped = of(&[few[0], "moe.on_overflow=drop"]).unwrap();
        let words = "50.0 % of choices are dropped: ";
        assert!(dropped.message.starts_with(words), "{dropped}");
        for set in [&[][..], &["moe.capacity_factor=1"]] {
            assert_eq!(of(set), None, "{set:?}");
        }
        let seeded = ["moe.routing=seeded", "moe.imbalance=2"];
        assert_eq!(of(&seeded), None);
        assert!(of(&[&seeded[..], &["moe.capacity_factor=1"]].concat()).is_some());
    }

    #[test]
    fn graphs_that_torch_cannot_capture_are_named() {
        let set = "compile.cuda_graph=full_iteration";
        let found = of(&[set]);
        let [warning] = &found[..] else {
            panic!("{found:?}")
        };
        assert!(
            warning.to_string().starts_with("--set compile.cuda_graph="),
            "{warning}"
        );
        assert_eq!(warning.set, ["compile.cuda_graph=off"]);
        // Other engines can capture their steps.
        assert_eq!(of(&[set, "fsdp.policy=native"]), []);
        assert_eq!(of(&[]), []);
    }

    /// Returns the kinds of the warnings about a shipped scenario's settings, and what removes the
    /// causes.
    fn of_shipped(name: &str, set: &[&str]) -> Vec<(Kind, Vec<String>)> {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let path = Path::new(name);
        let all = of_scenario(&scenario::load(path, &set).unwrap(), path, &set);
        all.into_iter().map(|w| (w.kind, w.set)).collect()
    }

    /// Settings alone decide these, so commands without a prediction print them, too.
    #[test]
    fn settings_are_enough_for_some_warnings() {
        let of = of_shipped;
        let graphs = of("small-fsdp2", &["compile.cuda_graph=full_iteration"]);
        assert_eq!(graphs[0].0, Kind::FullIterationGraph);
        let engine = ["fsdp.policy=megatron", "fsdp.strategy=optim"];
        let root = vec!["fsdp.units=root".to_owned()];
        assert_eq!(of("small-fsdp2", &engine), [(Kind::Units, root)]);
        for fine in [
            &["fsdp.policy=megatron"][..],
            &[engine[0], engine[1], "fsdp.units=root"],
        ] {
            assert_eq!(of("small-fsdp2", fine), [], "{fine:?}");
        }
    }

    #[test]
    fn keys_that_a_recipe_of_8_bit_matmuls_ignores_are_named() {
        let of = |overrides: &[&str]| -> Vec<Vec<String>> {
            let all = of_shipped("small-fp8", overrides);
            all.into_iter().map(|(_, set)| set).collect()
        };
        let saved = "precision.float8_saved=float8";
        let slow = "precision.float8_fast_accum=false";
        let recipe = |name: &str| format!("precision.float8_recipe={name}");
        let ignored = [
            vec!["precision.float8_saved=compute".to_owned()],
            vec!["precision.float8_fast_accum=true".to_owned()],
        ];
        assert_eq!(
            of(&[&recipe("tensorwise"), saved, slow]),
            [] as [Vec<String>; 0]
        );
        assert_eq!(of(&[&recipe("rowwise"), saved, slow]), ignored[..1]);
        assert_eq!(of(&[&recipe("blockwise"), saved, slow]), ignored);
    }

    #[test]
    fn nodes_larger_than_nvlink_are_named_where_they_are_written() {
        let h100 = "mesh.hardware=h100-80";
        let sixteen = of(&[h100, "mesh.dp_shard=16", "mesh.gpus_per_node=16"]);
        let [warning] = &sixteen[..] else {
            panic!("{sixteen:?}")
        };
        let text = warning.to_string();
        let place = "--set mesh.gpus_per_node=16:1:20: ";
        assert!(text.starts_with(place), "{text}");
        assert!(text.contains("connects 8 GPUs of h100-80"), "{text}");
        for fine in [
            &[h100, "mesh.dp_shard=16"][..],
            // All ranks are within one NVLink domain.
            &[h100, "mesh.gpus_per_node=16"],
            // Hardware without NVLink has no domain.
            &[
                "mesh.hardware=cpu",
                "mesh.dp_shard=16",
                "mesh.gpus_per_node=16",
            ],
        ] {
            assert_eq!(of(fine), [], "{fine:?}");
        }
    }
}
