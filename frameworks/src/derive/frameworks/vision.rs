//! Decides what vision-language models train, as ms-swift and LLaMA-Factory freeze them.
//!
//! Sources: `freeze_vit`, `freeze_aligner` and `freeze_llm` of ms-swift, with the module names of
//! its `MultiModelKeys`; `get_forbidden_modules`, `patch_target_modules` and
//! `find_all_linear_modules` of LLaMA-Factory.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::Lack;
use crate::table::{Fact, list, quoted};
use crate::yaml;
use std::path::Path;

/// A part of a vision-language model that options freeze.
struct Part {
    fact: Fact,
    frozen_by_default: bool,
    /// Options of ms-swift and LLaMA-Factory.
    swift: &'static str,
    llama_factory: &'static str,
    /// Its modules, in the names of `shardlab plan`.
    modules: &'static [&'static str],
    /// Expression for the paths of its linear layers.
    linear: &'static str,
}

const PARTS: [Part; 3] = [
    Part {
        fact: Fact::FrozenVision,
        frozen_by_default: true,
        swift: "freeze_vit",
        llama_factory: "freeze_vision_tower",
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
        frozen_by_default: true,
        swift: "freeze_aligner",
        llama_factory: "freeze_multi_modal_projector",
        modules: &["vision.projector", "vision.deepstack.*"],
        linear: r"vision\.(projector|deepstack)\..*",
    },
    Part {
        fact: Fact::FrozenLanguage,
        frozen_by_default: false,
        swift: "freeze_llm",
        llama_factory: "freeze_language_model",
        modules: &["tok_embeddings", "layers.*", "norm", "output"],
        linear: r"layers\..*",
    },
];

/// All of a model but its language model.
const TOWER: &str = "vision";
/// The same, as an expression for paths.
const IN_TOWER: &str = r"vision\..*";

const TEXT_ONLY: &str = "the model has no vision tower";
const NAMED: &str = "target_modules names the layers with adapters";
const AS_LLAMA_FACTORY: &str = "LLaMA-Factory puts no adapters on projectors with lora_target: all";

/// Freezes parts of a model as ms-swift does.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn as_swift(draft: &mut Draft) -> Result<(), ConfigError> {
    freeze(draft, true)
}

/// Freezes parts of a model as LLaMA-Factory does.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn as_llama_factory(draft: &mut Draft) -> Result<(), ConfigError> {
    freeze(draft, false)
}

/// Freezes parts of a model, or leaves them without adapters if adapters are trained.
fn freeze(draft: &mut Draft, swift: bool) -> Result<(), ConfigError> {
    if !has_vision(draft) {
        for part in &PARTS {
            if let Some(given) = draft.fact(part.fact) {
                draft.none(given.row, Lack::Nothing, TEXT_ONLY);
            }
        }
        return Ok(());
    }
    let adapters = draft.value("lora.r").is_some();
    let targets = draft.value("lora.target_modules");
    let named = targets.is_some_and(|t| t != quoted("all-linear"));
    if adapters && named && swift {
        for part in &PARTS {
            if let Some(given) = draft.fact(part.fact) {
                draft.none(given.row, Lack::Nothing, NAMED);
            }
        }
        return Ok(());
    }
    let mut rows = Vec::new();
    let mut frozen = Vec::new();
    for part in &PARTS {
        let given = draft.fact(part.fact);
        let asked = given.map_or(part.frozen_by_default, |g| g.value == 1);
        let without_adapters =
            !swift && adapters && !named && matches!(part.fact, Fact::FrozenProjector);
        if !asked && !without_adapters {
            continue;
        }
        let (key, by) = if swift {
            (part.swift, "ms-swift's default")
        } else {
            (part.llama_factory, "LLaMA-Factory's default")
        };
        let row = match given {
            Some(given) => given.row,
            None => draft.suppose(key, "true", by),
        };
        if !asked {
            draft.approximates(row, AS_LLAMA_FACTORY);
        }
        rows.push(row);
        frozen.push(part);
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

/// Returns whether the `config.json` of the model describes a vision tower.
fn has_vision(draft: &Draft) -> bool {
    let file = draft
        .value("model.preset")
        .map(|name| name.trim_matches('"'));
    let Some(file) = file.filter(|name| Path::new(name).extension().is_some_and(|e| e == "json"))
    else {
        return false;
    };
    let text = std::fs::read_to_string(file).ok();
    let root = text.and_then(|text| yaml::parse(file, &text).ok());
    root.is_some_and(|root| root.has("vision_config"))
}
