//! PEFT's configuration of adapters (`adapter_config.json`).

use super::super::TrainError;
use serde_json::{Value, json};
use shardlab_plan::Program;
use shardlab_plan::config::{LayerAdapter, Lora, Patterns};
use shardlab_plan::ir::{HfForm, Param};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A value of adapters that may differ from layer to layer.
struct PerLayer {
    /// Key of the value of all layers.
    key: &'static str,
    /// Key of the table of values of some layers.
    pattern: &'static str,
    of: fn(&LayerAdapter) -> f64,
    of_all: fn(&Lora) -> f64,
}

const RANK: PerLayer = PerLayer {
    key: "r",
    pattern: "rank_pattern",
    of: |adapter| adapter.r as f64,
    of_all: |lora| lora.r as f64,
};

const ALPHA: PerLayer = PerLayer {
    key: "lora_alpha",
    pattern: "alpha_pattern",
    of: |adapter| adapter.alpha,
    of_all: |lora| lora.alpha,
};

/// The value of `RANK` and `ALPHA` in a configuration that does not have it.
const DEFAULT: f64 = 8.0;

/// Returns the layers that have adapters, as their paths: ours, and that in Hugging Face's code.
fn adapted(program: &Program) -> impl Iterator<Item = [&str; 2]> {
    program.params.iter().filter_map(|p| {
        let hf = p.hf.as_ref()?.module.strip_suffix(".lora_A")?;
        Some([p.name.strip_suffix(".lora_A.weight")?, hf])
    })
}

/// Compares a configuration with the scenario's: what PEFT would compute must be what a run
/// computes. The names of tensors show which modules have adapters or are trained in full.
///
/// # Errors
/// Returns [`TrainError::OtherModel`] with the differences, if there are any.
pub(super) fn check(
    path: &Path,
    config: &Value,
    program: &Program,
    lora: &Lora,
) -> Result<(), TrainError> {
    let mut differences = Vec::new();
    let mut same = |key: &str, ours: Value, default: Value| {
        let theirs = config.get(key).filter(|v| !v.is_null()).unwrap_or(&default);
        if *theirs != ours {
            differences.push(format!("`{key}` is {theirs}, not {ours}"));
        }
    };
    same("peft_type", "LORA".into(), Value::Null);
    same("use_rslora", lora.use_rslora.into(), false.into());
    same("use_dora", lora.use_dora.into(), false.into());
    same("lora_bias", false.into(), false.into());
    same("bias", "none".into(), "none".into());
    for key in ["trainable_token_indices", "target_parameters"] {
        same(key, Value::Null, Value::Null);
    }
    for value in [ALPHA, RANK] {
        let other = difference(config, program, lora, &value);
        if let Some(other) = other.map_err(|what| TrainError::format(path, what))? {
            differences.insert(0, other);
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(TrainError::OtherModel {
        path: path.to_owned(),
        differences,
    })
}

/// Returns the first difference between values of layers, in words.
///
/// # Errors
/// If the configuration's table cannot be read.
fn difference(
    config: &Value,
    program: &Program,
    lora: &Lora,
    value: &PerLayer,
) -> Result<Option<String>, String> {
    let given = config.get(value.pattern).and_then(Value::as_object);
    let entries = given.into_iter().flatten().map(|(pattern, v)| {
        let number = v.as_f64();
        Ok((
            &**pattern,
            number.ok_or_else(|| format!("`{}` has {v}, not a number", value.pattern))?,
        ))
    });
    let table = Patterns::new(entries.collect::<Result<Vec<_>, String>>()?)?;
    let all = config
        .get(value.key)
        .and_then(Value::as_f64)
        .unwrap_or(DEFAULT);
    for paths in adapted(program) {
        let Some(adapter) = lora.adapter(paths) else {
            continue;
        };
        let theirs = table.of(&paths[1..]).unwrap_or(all);
        let ours = (value.of)(&adapter);
        if theirs != ours {
            let is_alike = table.is_empty() && ours == (value.of_all)(lora);
            let of = if is_alike {
                String::new()
            } else {
                format!(" of `{}`", paths[1])
            };
            return Ok(Some(format!("`{}`{of} is {theirs}, not {ours}", value.key)));
        }
    }
    Ok(None)
}

/// Returns PEFT's configuration of a program's adapters.
pub(super) fn of(program: &Program, lora: &Lora) -> Value {
    let base = || program.params.iter().filter(|p| !p.is_adapter());
    let hf = |p: &Param| p.hf.as_ref().map(|hf| hf.module.clone());
    let saved: BTreeSet<String> = base().filter(|p| p.requires_grad).filter_map(hf).collect();
    let saved = (!saved.is_empty()).then_some(saved);
    let shared = |p: &Param| p.requires_grad && p.modules.len() > 1;
    let transposed = |p: &Param| {
        let form = p.hf.as_ref().map(|hf| hf.form);
        form == Some(HfForm::Transposed)
    };
    let [targets, excluded] = lists(program, lora);
    let excluded = (!excluded.is_empty()).then_some(excluded);
    let layers = (!lora.layers.is_empty()).then_some(&lora.layers);
    let layers_pattern = (!lora.layers_pattern.is_empty()).then_some(&lora.layers_pattern);
    let ranks = pattern(program, lora, &RANK).into_iter();
    let ranks: BTreeMap<String, u64> = ranks.map(|(name, r)| (name, r as u64)).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "exclude_modules": excluded,
        "layers_to_transform": layers,
        "layers_pattern": layers_pattern,
        "rank_pattern": ranks,
        "alpha_pattern": pattern(program, lora, &ALPHA),
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "modules_to_save": saved,
        "ensure_weight_tying": base().any(shared),
        "fan_in_fan_out": program.params.iter().any(transposed),
        "init_lora_weights": true,
        "inference_mode": true,
    })
}

/// Returns `target_modules` and `exclude_modules`. A target outside the blocks of
/// `layers_to_transform` has to be listed in full.
fn lists(program: &Program, lora: &Lora) -> [BTreeSet<String>; 2] {
    let base = program.params.iter().filter(|p| !p.is_adapter());
    let modules: BTreeSet<[&str; 2]> = base
        .filter_map(|p| Some([p.name.rsplit_once('.')?.0, &*p.hf.as_ref()?.module]))
        .collect();
    let excluded: BTreeSet<&str> = modules
        .iter()
        .filter(|paths| lora.exclude.has(**paths))
        .map(|[_, hf]| *hf)
        .collect();
    let all: BTreeSet<&str> = modules.iter().map(|[_, hf]| *hf).collect();
    let targets = adapted(program).map(|[_, hf]| hf);
    let (inside, outside): (BTreeSet<&str>, BTreeSet<&str>) =
        targets.partition(|hf| lora.is_in_layers(hf));
    let rest = all.difference(&excluded).copied();
    let among: BTreeSet<&str> = rest.filter(|hf| lora.is_in_layers(hf)).collect();
    let mut targets = named(&inside, &among);
    targets.extend(outside.into_iter().map(str::to_owned));
    [targets, named(&excluded, &all)]
}

/// Returns the values of layers that differ from that of all, by the names of the layers.
fn pattern(program: &Program, lora: &Lora, value: &PerLayer) -> BTreeMap<String, f64> {
    let of = |paths| Some((value.of)(&lora.adapter(paths)?));
    let all: BTreeSet<&str> = adapted(program).map(|[_, hf]| hf).collect();
    let mut groups: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    for paths in adapted(program) {
        if let Some(v) = of(paths).filter(|v| *v != (value.of_all)(lora)) {
            groups.entry(v.to_bits()).or_default().insert(paths[1]);
        }
    }
    let groups = groups.iter();
    let each = groups.flat_map(|(bits, layers)| {
        let names = named(layers, &all).into_iter();
        names.map(|name| (name, f64::from_bits(*bits)))
    });
    each.collect()
}

/// Returns names of layers: the last component if all layers of `among` that it ends are chosen, or
/// else the path.
fn named(chosen: &BTreeSet<&str>, among: &BTreeSet<&str>) -> BTreeSet<String> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let others: BTreeSet<String> = among.difference(chosen).map(|path| last(path)).collect();
    let name = |path: &&str| {
        let end = last(path);
        if others.contains(&end) {
            (*path).to_owned()
        } else {
            end
        }
    };
    chosen.iter().map(name).collect()
}
