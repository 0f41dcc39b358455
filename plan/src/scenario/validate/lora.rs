//! Rules for `[lora]` and frozen parameters.

mod patterns;
mod selectors;

use super::Checked;
use crate::config::pattern::glob;
use crate::config::{Family, FrozenType, Implementation, Scenario, saves};
use crate::ir::{HfForm, Param};
use crate::models;
use crate::models::declare::Tree;
use crate::names::nearest;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::{Origin, Value};
use crate::scenario::{ScenarioError, ScenarioErrorKind};
use std::collections::BTreeSet;

/// Paths of modules: in this project, and in Hugging Face's code.
type Paths<'t> = [[&'t str; 2]];

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    frozen_params(s, d)?;
    let Some(lora) = &s.lora else {
        return without_rank(d);
    };
    if lora.dropout > 0.0 && s.implementation() != Implementation::Transformers {
        let message = "`lora_dropout` above 0: only the code of transformers has dropout";
        let error = d.conflict(&[Key::LoraDropout, Key::Implementation], message);
        let help = "set lora_dropout = 0.0, or for a prediction implementation = \"transformers\"";
        return Err(error.with_help(help));
    }
    if s.mesh.tp > 1 {
        let message = "adapters do not support tensor parallelism";
        let error = d.conflict(&[Key::LoraR, Key::Tp], message);
        return Err(error.with_help("set mesh.tp = 1"));
    }
    let packed = s.precision.frozen_params.filter(|f| f.packed().is_some());
    if let Some(packed) = packed.filter(|_| lora.use_dora) {
        let message = format!(
            "`use_dora` needs the norms of the rows of frozen weights, which `frozen_params` = {} packs",
            packed.name()
        );
        let error = d.conflict(&[Key::UseDora, Key::FrozenParams], message);
        return Err(error.with_help("set use_dora = false, or leave out frozen_params"));
    }
    let tree = models::declare(s, s.model.layers).tree;
    let linears: Vec<[&str; 2]> = tree.linears().collect();
    if linears.is_empty() {
        let name = s.model.family.name();
        let message = format!(
            "family {name} has no adapters: PEFT names its layers as Hugging Face does, which has no such model"
        );
        let error = d.conflict(&[Key::LoraR, Key::Family], message);
        let with = Family::named_all().filter(|(_, f)| !f.spec().hf.is_empty());
        let names: Vec<&str> = with.map(|(name, _)| name).collect();
        return Err(error.with_help(format!("families with adapters: {}", names.join(", "))));
    }
    modules_to_save(d, &tree)?;
    selectors::target_modules(d, &linears)?;
    selectors::exclude_modules(d, &tree)?;
    patterns::check(d, lora, &linears)
}

/// Refuses modules to save that the model does not have, that have adapters, or whose parameters
/// files store in another form than the model's.
fn modules_to_save(d: &Document, tree: &Tree) -> Checked {
    let given = d.value(Key::ModulesToSave).and_then(Value::array);
    for pattern in given.unwrap_or_default() {
        let text = pattern.str().unwrap_or_default();
        glob(text).map_err(|message| d.error(pattern.origin, message))?;
        let base = tree.params.iter().filter(|p| !p.is_adapter());
        let chosen = |p: &&Param| tree.paths(p).any(|paths| saves(text, paths));
        let mut some = base.clone().filter(chosen).peekable();
        if some.peek().is_none() {
            let message =
                format!("modules_to_save pattern `{text}` matches no module with parameters");
            let names: Vec<[&str; 2]> = base.flat_map(|p| tree.paths(p)).collect();
            let error = no_match(d, pattern.origin, message);
            return Err(error.with_help(hint(text, ("modules", &names))));
        }
        for p in some {
            let path = &tree.modules[p.modules[0].index()].path;
            let inside = format!("{path}.");
            let form = p.hf.as_ref().map(|hf| hf.form);
            let why = if tree
                .params
                .iter()
                .any(|of| of.is_adapter() && of.name.starts_with(&inside))
            {
                "has an adapter (target_modules)"
            } else if matches!(form, Some(HfForm::Layer | HfForm::Tensor(_))) {
                continue;
            } else {
                "is stored in another form than it is computed with"
            };
            let message = format!("modules_to_save pattern `{text}`: `{path}` {why}");
            let error = d.error(pattern.origin, message);
            return Err(error.with_help("leave it out of modules_to_save or of target_modules"));
        }
    }
    Ok(())
}

/// Refuses the other keys of the section: without a rank, none of them is read.
fn without_rank(d: &Document) -> Checked {
    let idle = Key::of_section("lora").find(|key| d.says(*key));
    match idle {
        Some(key) => {
            let message = format!(
                "`{}` has no effect here: without a rank (lora.r) there are no adapters",
                key.info().key
            );
            let error = d.conflict(&[key], message);
            Err(error
                .of(ScenarioErrorKind::NoEffect)
                .with_help("set lora.r, for example to 16, or leave it out"))
        }
        None => Ok(()),
    }
}

/// Frozen shards are gathered with the others, in the type of computation.
fn frozen_params(s: &Scenario, d: &Document) -> Checked {
    let p = &s.precision;
    let stored = p.main_params.unwrap_or(p.compute);
    let packed = p.frozen_params.filter(|f| f.packed().is_some());
    if let Some(packed) = packed.filter(|_| s.lora.is_none()) {
        let message = format!(
            "`frozen_params` is {}, but there are no adapters: weights in four or eight bits are those under adapters (QLoRA)",
            packed.name()
        );
        let error = d.conflict(&[Key::FrozenParams, Key::LoraR], message);
        return Err(error.with_help("set lora.r, for example to 16"));
    }
    match p.frozen_params.and_then(FrozenType::dtype) {
        Some(dtype) if dtype != p.compute && dtype != stored => {
            let message = format!(
                "`frozen_params` is {dtype}: parameters that are not trained are kept as they are gathered ({}) or as \
                 those that are trained ({stored})",
                p.compute
            );
            let keys = [Key::FrozenParams, Key::Compute, Key::MainParams];
            Err(d.conflict(&keys, message))
        }
        _ => Ok(()),
    }
}

/// Returns the error for a pattern that matches nothing.
fn no_match(d: &Document, at: Origin, message: String) -> ScenarioError {
    d.error(at, message).of(ScenarioErrorKind::NoMatch)
}

/// Returns the name of the module that may be meant, or all of them; blocks are alike.
fn hint(pattern: &str, (what, of): (&str, &Paths<'_>)) -> String {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let wanted = last(pattern);
    let names: BTreeSet<String> = of.iter().flatten().map(|path| last(path)).collect();
    if let Some(near) = nearest(&wanted, names.iter().map(String::as_str)) {
        return format!("did you mean `{near}`?");
    }
    let mut listed: Vec<String> = Vec::new();
    for [ours, theirs] in of {
        let entry = format!("{} ({})", last(ours), last(theirs));
        if !listed.contains(&entry) {
            listed.push(entry);
        }
    }
    format!("{what}: {}", listed.join(", "))
}
