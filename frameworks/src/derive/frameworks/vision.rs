//! Decides which parts of vision-language models are trained, as frameworks freeze the others.
//!
//! Sources: `freeze_vit`, `freeze_aligner` and `freeze_llm` of ms-swift, with the module names of
//! its `MultiModelKeys`; `get_forbidden_modules`, `patch_target_modules` and
//! `find_all_linear_modules` of LLaMA-Factory; `apply_parameter_freezing` of NeMo AutoModel;
//! `set_model` of Qwen-VL's `train_qwen.py`.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::Lack;
use crate::table::{Fact, list, quoted};
use crate::tree::Node;
use crate::yaml;
use std::path::Path;

/// A part of a vision-language model that options freeze.
struct Part {
    fact: Fact,
    /// Its modules, in the names of `shardlab plan`.
    modules: &'static [&'static str],
    /// Expression for the paths of its linear layers.
    linear: &'static str,
}

const PARTS: [Part; 3] = [
    Part {
        fact: Fact::FrozenVision,
        modules: &[
            "vision.patches",
            "vision.class",
            "vision.positions",
            "vision.pre_norm",
            "vision.layers.*",
            "vision.post_norm",
        ],
        linear: r"vision\.(layers\..*|patches)",
    },
    Part {
        fact: Fact::FrozenProjector,
        modules: &["vision.projector", "vision.deepstack.*"],
        linear: r"vision\.(projector|deepstack)\..*",
    },
    Part {
        fact: Fact::FrozenLanguage,
        modules: &["tok_embeddings", "layers.*", "norm", "output"],
        linear: r"layers\..*",
    },
];

/// How a framework freezes the parts, in the order of [`PARTS`].
struct Freezing {
    /// Its keys.
    keys: [&'static str; 3],
    frozen_by_default: [bool; 3],
    /// Note on a default.
    default: &'static str,
    /// Whether names of layers with adapters replace the choice of parts.
    names_decide: bool,
    /// Note on projectors, if they get no adapters unless they are named.
    no_projector_adapters: Option<&'static str>,
}

const SWIFT: Freezing = Freezing {
    keys: ["freeze_vit", "freeze_aligner", "freeze_llm"],
    frozen_by_default: [true, true, false],
    default: "ms-swift's default",
    names_decide: true,
    no_projector_adapters: None,
};
const LLAMA_FACTORY: Freezing = Freezing {
    keys: [
        "freeze_vision_tower",
        "freeze_multi_modal_projector",
        "freeze_language_model",
    ],
    frozen_by_default: [true, true, false],
    default: "LLaMA-Factory's default",
    names_decide: false,
    no_projector_adapters: Some(
        "LLaMA-Factory puts no adapters on projectors with lora_target: all",
    ),
};
const AUTOMODEL: Freezing = Freezing {
    keys: [
        "freeze_config.freeze_vision_tower",
        "",
        "freeze_config.freeze_language_model",
    ],
    frozen_by_default: [true, false, false],
    default: "AutoModel's default",
    names_decide: true,
    no_projector_adapters: None,
};
const QWEN_VL: Freezing = Freezing {
    keys: ["tune_mm_vision", "tune_mm_mlp", "tune_mm_llm"],
    frozen_by_default: [true, true, true],
    default: "the default of Qwen-VL's training script",
    names_decide: true,
    no_projector_adapters: None,
};

/// All of a model but its language model.
const TOWER: &str = "vision";
/// The same, as an expression for paths.
const IN_TOWER: &str = r"vision\..*";

const TEXT_ONLY: &str = "the model has no vision tower";
const NAMED: &str = "other keys name the layers with adapters";
const MERGER: &str = "the projector is part of this model's vision tower, which is frozen";
/// Beginnings of the types of models whose projector is a part of `visual`.
const WITH_MERGER: [&str; 3] = ["qwen2", "qwen3", "glm4v"];

/// Freezes parts of a model as ms-swift does.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn as_swift(draft: &mut Draft) -> Result<(), ConfigError> {
    freeze(draft, &SWIFT)
}

/// Freezes parts of a model as LLaMA-Factory does.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn as_llama_factory(draft: &mut Draft) -> Result<(), ConfigError> {
    freeze(draft, &LLAMA_FACTORY)
}

/// Freezes parts of a model as NeMo AutoModel does if the files have a section `freeze_config`.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn as_automodel(draft: &mut Draft) -> Result<(), ConfigError> {
    if !draft
        .rows
        .iter()
        .any(|r| r.key.starts_with("freeze_config"))
    {
        return Ok(());
    }
    let vision = draft.fact(Fact::FrozenVision);
    if vision.is_none_or(|g| g.value == 1)
        && config_of_vision(draft).is_some_and(|c| has_merger(&c))
    {
        let key = "freeze_config.freeze_vision_tower";
        draft.suppose_fact(Fact::FrozenProjector, 1, key, "true", MERGER);
    }
    freeze(draft, &AUTOMODEL)
}

/// Freezes parts of a model as the training script of Qwen-VL does, if the command has its
/// arguments.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn as_qwen_vl(draft: &mut Draft) -> Result<(), ConfigError> {
    if !draft.rows.iter().any(|r| QWEN_VL.keys.contains(&&*r.key)) {
        return Ok(());
    }
    freeze(draft, &QWEN_VL)
}

/// Freezes parts of a model, or leaves them without adapters if adapters are trained.
fn freeze(draft: &mut Draft, by: &Freezing) -> Result<(), ConfigError> {
    if config_of_vision(draft).is_none() {
        for part in &PARTS {
            if let Some(given) = draft.fact(part.fact) {
                draft.none(given.row, Lack::Nothing, TEXT_ONLY);
            }
        }
        return Ok(());
    }
    let adapters = draft.value("lora.r").is_some();
    let targets = draft.value("lora.target_modules");
    let named = targets.is_some_and(|t| t != quoted("all-linear"))
        || draft.value("lora.exclude_modules").is_some();
    if adapters && named && by.names_decide {
        for part in &PARTS {
            if let Some(given) = draft.fact(part.fact) {
                draft.none(given.row, Lack::Nothing, NAMED);
            }
        }
        return Ok(());
    }
    let mut rows = Vec::new();
    let mut frozen = Vec::new();
    for (i, part) in PARTS.iter().enumerate() {
        let given = draft.fact(part.fact);
        let asked = given.map_or(by.frozen_by_default[i], |g| g.value == 1);
        let without_adapters = by
            .no_projector_adapters
            .filter(|_| adapters && !named && matches!(part.fact, Fact::FrozenProjector));
        if !asked && without_adapters.is_none() {
            if let Some(given) = given {
                draft.none(given.row, Lack::Nothing, "trained");
            }
            continue;
        }
        let row = match given {
            Some(given) => given.row,
            None => draft.suppose(by.keys[i], "true", by.default),
        };
        if let Some(why) = without_adapters.filter(|_| !asked) {
            draft.approximates(row, why);
        }
        rows.push(row);
        frozen.push(part);
    }
    if rows.is_empty() {
        return Ok(());
    }
    let is_frozen = |fact: Fact| frozen.iter().any(|p| p.fact == fact);
    let tower = is_frozen(Fact::FrozenVision) && is_frozen(Fact::FrozenProjector);
    let parts = frozen
        .iter()
        .filter(|p| !tower || p.fact == Fact::FrozenLanguage);
    let (key, value) = if adapters {
        let all = tower.then_some(IN_TOWER).into_iter();
        let all: Vec<&str> = all.chain(parts.map(|p| p.linear)).collect();
        ("lora.exclude_modules", quoted(&all.join("|")))
    } else {
        let all = tower.then_some(TOWER).into_iter();
        let modules = parts.flat_map(|p| p.modules.iter().copied());
        let all: Vec<String> = all.chain(modules).map(str::to_owned).collect();
        ("fsdp.frozen", list(&all))
    };
    for row in rows {
        draft.set(row, key, value.clone())?;
    }
    Ok(())
}

/// Returns whether the projector of a model is a part of its `visual`.
fn has_merger(config: &Node) -> bool {
    let kind = config.get("model_type").and_then(Node::text);
    kind.is_some_and(|kind| WITH_MERGER.iter().any(|start| kind.starts_with(start)))
}

/// Returns the `config.json` of the model if it describes a vision tower.
fn config_of_vision(draft: &Draft) -> Option<Node> {
    let file = draft.value("model.preset")?.trim_matches('"');
    if Path::new(file).extension().is_none_or(|e| e != "json") {
        return None;
    }
    let text = std::fs::read_to_string(file).ok()?;
    let root = yaml::parse(file, &text).ok()?;
    root.has("vision_config").then_some(root)
}
