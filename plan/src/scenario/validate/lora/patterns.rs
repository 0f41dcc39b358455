//! Rules for the keys of `[lora]` that select layers among the targets, or change their adapters.

use super::{Checked, Paths, hint, no_match};
use crate::config::{Expression, Lora, LoraTargets, ModuleSelector};
use crate::names::nearest;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::{Origin, Value};
use crate::scenario::{ScenarioError, ScenarioErrorKind};
use std::collections::BTreeSet;

pub(super) fn check(d: &Document, lora: &Lora, linears: &Paths<'_>) -> Checked {
    layers_pattern(d, linears)?;
    layers_to_transform(d, lora, linears)?;
    let has_adapter = |paths: &[&str; 2]| lora.adapter(*paths).is_some();
    let adapted: Vec<[&str; 2]> = linears.iter().copied().filter(has_adapter).collect();
    if adapted.is_empty() {
        return Err(no_adapter(d));
    }
    for key in [Key::RankPattern, Key::AlphaPattern] {
        changed(d, key, &adapted)?;
    }
    Ok(())
}

/// Returns the texts of a key whose value is one text or a list.
fn texts(d: &Document, key: Key) -> impl Iterator<Item = (Origin, &str)> {
    let value = d.value(key).into_iter();
    let items = value.flat_map(|v| v.array().unwrap_or(std::slice::from_ref(v)));
    items.filter_map(|item| Some((item.origin, item.str()?)))
}

/// Refuses names that are no list of blocks.
fn layers_pattern(d: &Document, linears: &Paths<'_>) -> Checked {
    for (at, text) in texts(d, Key::LayersPattern) {
        let list = Expression::of_list(text).map_err(|message| d.error(at, message))?;
        if linears.iter().any(|[_, hf]| list.number_in(hf).is_some()) {
            continue;
        }
        let message = format!("layers_pattern `{text}` is followed by a number in no layer's path");
        let lists = lists(linears);
        let help = match nearest(text, lists.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("lists: {}", Vec::from_iter(lists).join(", ")),
        };
        return Err(no_match(d, at, message).with_help(help));
    }
    Ok(())
}

/// Returns the components that numbers follow in Hugging Face's paths.
fn lists<'t>(linears: &Paths<'t>) -> BTreeSet<&'t str> {
    let is_number = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    let of = |path: &'t str| {
        let parts: Vec<&str> = path.split('.').collect();
        let at = parts.iter().position(|part| is_number(part));
        at.and_then(|at| parts.get(at.checked_sub(1)?).copied())
    };
    linears.iter().filter_map(|[_, hf]| of(hf)).collect()
}

/// Refuses numbers of blocks that the model does not have.
fn layers_to_transform(d: &Document, lora: &Lora, linears: &Paths<'_>) -> Checked {
    let Some(value) = d.value(Key::LayersToTransform) else {
        return Ok(());
    };
    let expression = matches!(
        lora.targets,
        LoraTargets::Selected(ModuleSelector::Expression(_))
    );
    if expression && !lora.layers.is_empty() {
        let message = "PEFT has no layers_to_transform for an expression in target_modules";
        let error = d.conflict(&[Key::LayersToTransform, Key::LoraTargets], message);
        return Err(error.with_help("name the blocks in the expression, or list the layers"));
    }
    let blocks: BTreeSet<u64> = linears
        .iter()
        .filter_map(|[_, hf]| lora.block_of(hf))
        .collect();
    for item in value.array().unwrap_or(std::slice::from_ref(value)) {
        let Some(number) = item.integer().filter(|n| !blocks.contains(n)) else {
            continue;
        };
        let message = format!("layers_to_transform has block {number}, which has no linear layer");
        let help = match (blocks.first(), blocks.last()) {
            (Some(first), Some(last)) => format!("blocks of linear layers: {first} to {last}"),
            _ => "name the list of blocks: lora.layers_pattern = [\"layers\"]".to_owned(),
        };
        return Err(no_match(d, item.origin, message).with_help(help));
    }
    Ok(())
}

/// Returns the error for targets that other keys all leave out.
fn no_adapter(d: &Document) -> ScenarioError {
    let keys = [
        Key::ExcludeModules,
        Key::LayersToTransform,
        Key::LoraTargets,
    ];
    let error = d.conflict(&keys, "no layer is left that has an adapter");
    error
        .of(ScenarioErrorKind::NoMatch)
        .with_help("exclude fewer layers")
}

/// Refuses patterns that match no layer with an adapter.
fn changed(d: &Document, key: Key, adapted: &Paths<'_>) -> Checked {
    for entry in d.value(key).and_then(Value::table).unwrap_or_default() {
        let (at, text) = (entry.key_origin, &*entry.key);
        let expression = Expression::of_ending(text).map_err(|message| d.error(at, message))?;
        if adapted
            .iter()
            .flatten()
            .any(|path| expression.matches(path))
        {
            continue;
        }
        let name = key.info().key;
        let message = format!("{name} pattern `{text}` matches no layer with an adapter");
        let help = hint(text, ("layers with an adapter", adapted));
        return Err(no_match(d, at, message).with_help(help));
    }
    Ok(())
}
