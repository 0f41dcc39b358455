//! The shipped scenarios, presets and schema.

use super::super::*;
use crate::config::*;
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_shipped_scenario_parses_and_says_what_it_shows() {
    for (name, _) in shipped() {
        let s = load(Path::new(name), &[]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(s.name, *name);
        assert_eq!(s.about.lines().count(), 2, "{name}: {:?}", s.about);
        let sweep = load_sweep(Path::new(name), &[]).unwrap();
        assert!(sweep.points.iter().all(|p| p.scenario.is_ok()), "{name}");
        assert_eq!(load(Path::new(&format!("{name}.toml")), &[]).unwrap(), s);
    }
    assert!(shipped().len() >= 16);
}

#[test]
fn files_and_list_agree() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
    let files: BTreeSet<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|x| x == "toml"))
        .map(|p| p.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    let listed: Vec<&str> = shipped().iter().map(|(n, _)| *n).collect();
    assert!(listed.is_sorted());
    assert_eq!(files.iter().map(String::as_str).collect::<Vec<_>>(), listed);
}

#[test]
fn the_measured_models() {
    let load = |n: &str| load(Path::new(n), &[]).unwrap();
    for (name, mb, recompute) in [
        ("tiny", 4, Recompute::None),
        ("1b", 2, Recompute::None),
        ("3b", 2, Recompute::None),
        ("8b", 1, Recompute::Full),
    ] {
        let s = load(&format!("peers-{name}"));
        assert_eq!(
            (s.train.micro_batch, s.train.recompute, s.mesh.world()),
            (mb, recompute, 4)
        );
        assert!(!s.model.tie_embeddings);
        assert_eq!(s.fsdp.reshard_after_forward, Reshard::Always);
        let Units::Patterns(units) = &s.fsdp.units else {
            panic!("{name}")
        };
        assert_eq!(
            units.iter().map(|u| u.keep).collect::<Vec<_>>(),
            [false, false, true]
        );
        assert_eq!(units[2].modules, ["norm", "output"]);
        assert_eq!(s.train.seq_len, s.model.max_seq_len);
    }
}

#[test]
fn the_strategies_differ_in_the_strategy_only() {
    let base = load(Path::new("llama3.2-3b-zero3"), &[]).unwrap();
    for (name, strategy) in [
        ("zero2", Strategy::OptimGrads),
        ("zero1", Strategy::Optim),
        ("ddp", Strategy::NoShard),
    ] {
        let mut s = load(Path::new(&format!("llama3.2-3b-{name}")), &[]).unwrap();
        assert_eq!(s.fsdp.strategy, strategy);
        s.fsdp.strategy = base.fsdp.strategy;
        assert_eq!(
            (&s.model, &s.train, &s.fsdp, &s.mesh),
            (&base.model, &base.train, &base.fsdp, &base.mesh)
        );
    }
}

/// A small validator for the parts of JSON Schema that ours uses.
fn valid(schema: &Json, value: &Json) -> bool {
    if let Some(any) = schema.get("anyOf") {
        return any.as_array().unwrap().iter().any(|s| valid(s, value));
    }
    let number = |key: &str| schema.get(key).and_then(Json::as_f64);
    match schema["type"].as_str().unwrap() {
        "object" => value.as_object().is_some_and(|o| {
            o.iter()
                .all(|(k, v)| schema["properties"].get(k).is_some_and(|s| valid(s, v)))
                && o.len() as f64 >= number("minProperties").unwrap_or(0.0)
        }),
        "array" => value.as_array().is_some_and(|a| {
            let n = a.len() as f64;
            let items = schema
                .get("items")
                .is_none_or(|s| a.iter().all(|v| valid(s, v)));
            items
                && n >= number("minItems").unwrap_or(0.0)
                && n <= number("maxItems").unwrap_or(f64::MAX)
        }),
        "string" => value.as_str().is_some_and(|s| {
            schema
                .get("enum")
                .is_none_or(|e| e.as_array().unwrap().contains(&s.into()))
        }),
        "boolean" => value.is_boolean(),
        kind => value.as_f64().is_some_and(|x| {
            (kind != "integer" || value.is_u64())
                && number("minimum").is_none_or(|m| x >= m)
                && number("exclusiveMinimum").is_none_or(|m| x > m)
                && number("maximum").is_none_or(|m| x <= m)
        }),
    }
}

fn json(value: &toml::Value) -> Json {
    serde_json::to_value(value).unwrap()
}

#[test]
fn shipped_files_are_valid_by_the_schema() {
    let schema = schema();
    assert_eq!(
        schema["$schema"],
        "https://json-schema.org/draft/2020-12/schema"
    );
    for (name, text) in shipped() {
        let value: toml::Value = toml::from_str(text).unwrap();
        assert!(valid(&schema, &json(&value)), "{name}");
    }
}

#[test]
fn the_schema_refuses_what_the_parser_refuses() {
    let schema = schema();
    for bad in [
        "[fsdp]\nprefetch_foward = 1",
        "[fsdp]\npolicy = \"fsdp\"",
        "[fsdp]\nreduce_in_flight = 0",
        "[fsdp]\nprefetch_forward = { element = 1 }",
        "[fsdp]\nprefetch_forward = 1.5",
        "[train]\nbetas = [0.9]",
        "[train]\neps = 0",
        "[sweep]\nfsdp.policy = \"native\"",
        "[sweep]\n\"fsdp.polcy\" = [\"native\"]",
        "fsdp = 3",
    ] {
        let value: toml::Value = toml::from_str(bad).unwrap();
        assert!(!valid(&schema, &json(&value)), "{bad}");
        assert!(parse("t", &format!("{bad}\n"), &[]).is_err(), "{bad}");
    }
    let dp = &schema["properties"]["mesh"]["properties"]["dp_shard"];
    assert_eq!(
        (dp["type"].as_str(), dp["minimum"].as_u64()),
        (Some("integer"), Some(1))
    );
    let seq = &schema["properties"]["train"]["properties"]["micro_batch"];
    assert_eq!(
        (seq["default"].as_u64(), seq["description"].as_str()),
        (Some(1), Some("Sequences per rank and micro-batch"))
    );
    let axis = &schema["properties"]["sweep"]["properties"]["fsdp.policy"];
    assert_eq!(axis["items"]["enum"][0], "native");
}

#[test]
fn keys_are_unique_and_documented() {
    let mut seen = BTreeSet::new();
    for k in keys() {
        assert!(seen.insert((k.section, k.key)), "{}.{}", k.section, k.key);
        assert!(SECTIONS.contains(&k.section) && !k.doc.is_empty() && !k.expected().is_empty());
        let derived = k.default.starts_with('(') && k.default.ends_with(')');
        assert!(
            derived || serde_json::from_str::<Json>(k.default).is_ok(),
            "{}.{}: {}",
            k.section,
            k.key,
            k.default
        );
    }
    let policy = keys().iter().find(|k| k.key == "policy").unwrap();
    assert_eq!(
        policy.values().collect::<Vec<_>>(),
        ["native", "fsdp2", "megatron", "megatron_v2"]
    );
}
