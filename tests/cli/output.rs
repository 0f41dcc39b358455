//! What all verbs have in common: schema, completions, pipes, colour.

use crate::{json, shardlab, stdout};
use serde_json::Value;

#[test]
fn the_schema_knows_every_key() {
    let schema: Value = serde_json::from_str(&stdout(&["schema"])).unwrap();
    assert!(schema["$schema"].is_string());
    for key in shardlab_plan::scenario::keys() {
        let property = &schema["properties"][key.section]["properties"][key.key];
        assert!(property.is_object(), "{}.{}", key.section, key.key);
    }
}

#[test]
fn completions_name_verbs_and_options() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = stdout(&["completions", shell]);
        for word in ["sweep", "validate", "--straggler"] {
            // Fish writes long options without dashes.
            let word = word.trim_start_matches("--");
            assert!(script.contains(word), "{word} in {shell}");
        }
    }
    shardlab(&["completions", "csh"]).assert().code(2);
}

#[test]
fn every_shipped_scenario_is_listed_with_what_it_shows_and_can_be_printed() {
    let listed = json(&["scenarios", "--json"]);
    assert!(listed.len() >= 14);
    for entry in &listed {
        assert!(entry["about"].as_array().unwrap().len() >= 2, "{entry}");
    }
    let text = stdout(&["scenarios", "peers-tiny"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("peers-tiny.toml");
    std::fs::write(&path, text).unwrap();
    let digest = |scenario: &str| {
        json(&["plan", scenario, "--section", "init", "--json"])[0]["program_digest"].clone()
    };
    assert_eq!(digest(path.to_str().unwrap()), digest("peers-tiny"));
}

#[test]
fn every_shipped_scenario_is_proven() {
    let verdicts = json(&["check", "--json"]);
    assert_eq!(verdicts.len(), shardlab_plan::scenario::shipped().len());
    for v in &verdicts {
        assert_eq!(v["ok"], true, "{}", v["scenario"]);
        assert!(
            v["rules"]
                .as_array()
                .unwrap()
                .iter()
                .any(|r| r["checked"].as_u64() > Some(0))
        );
    }
    let text = stdout(&["check", "toy-cnn", "--rules"]);
    crate::assert_narrow(&text);
    assert!(text.contains("proven"), "{text}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    use std::io::Read;
    use std::process::{Command, Stdio};
    // The exit status of a gate is what it is run for, whoever reads.
    let other = "train.micro_batch=2";
    let failing = &[
        "gate",
        "--baseline",
        "tests/baselines",
        "--no-exec",
        "--set",
        other,
        "llama-tiny",
        "llama3-8b-4xh200",
    ];
    for (args, code) in [
        (&["plan", "llama3-8b-4xh200"][..], 0),
        (&["plan", "llama3-8b-4xh200", "--json"], 0),
        (&["schema"], 0),
        (&["scenarios"], 0),
        (failing, 1),
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = child.stdout.take().unwrap();
        pipe.read_exact(&mut [0; 16]).unwrap();
        drop(pipe);
        let output = child.wait_with_output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {log}");
        assert!(log.is_empty(), "{args:?}: {log}");
    }
}

/// docs/json.md names every key that `--json` prints, in the section of its verb.
#[test]
fn every_json_key_is_documented() {
    let docs = include_str!("../../docs/json.md");
    let baselines = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/baselines");
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().display().to_string();
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/cpu_small.csv");
    let cases: [(&str, &[&str]); 13] = [
        (
            "## `sim` and `exec`",
            &["sim", "small-linear", "--store", &store],
        ),
        (
            "## `sim` and `exec`",
            &["exec", "small-linear", "--steps", "2"],
        ),
        (
            "## `sweep`",
            &[
                "sweep",
                "peers-tiny",
                "--axis",
                "fsdp.reshard_after_forward=[true, 3]",
            ],
        ),
        ("## `compare`", &["compare", "prefetch-0", "prefetch-1"]),
        (
            "## `compare`",
            &["compare", "small-linear", "small-native", "small-fsdp2"],
        ),
        (
            "## `gate`",
            &["gate", "--baseline", baselines, "small-linear"],
        ),
        (
            "## `gate`",
            &["gate", "--bless", "--baseline", &store, "small-linear"],
        ),
        ("## `explain`", &["explain", "small-linear"]),
        ("## `check`", &["check", "small-linear"]),
        ("## `plan`", &["plan", "small-linear"]),
        // What the first case has kept.
        ("## `runs`", &["runs", "--store", &store]),
        ("## `validate`", &["validate", table]),
        ("## `validate`", &["validate", "h100-80-exec"]),
    ];
    for (title, args) in cases {
        let (_, text) = docs.split_once(title).unwrap();
        let section = text.split("\n## ").next().unwrap();
        for object in json(&[args, &["--json"]].concat()) {
            let keys = object.as_object().unwrap().keys();
            let findings = object["findings"].as_array().into_iter().flatten();
            let of_findings = findings.flat_map(|f| f.as_object().unwrap().keys());
            for key in keys.chain(of_findings) {
                assert!(section.contains(&format!("`{key}`")), "{title}: {key}");
            }
        }
    }
}

/// A small model's memory is told in a unit in which it is not nothing, and no number is less than nothing.
#[test]
fn small_numbers_are_told() {
    let kept = tempfile::tempdir().unwrap();
    let store = kept.path().display().to_string();
    for args in [
        &["sim", "small-native", "small-fsdp2", "--store", &store][..],
        &[
            "sim",
            "small-native",
            "--set",
            "mesh.dp_shard=1",
            "--store",
            &store,
        ],
        &["explain", "small-native"],
        &[
            "sweep",
            "small-native",
            "--axis",
            "train.micro_batch=[1, 2]",
        ],
        &["compare", "small-native", "small-fsdp2"],
        &["compare", "small-native", "small-fsdp2", "small-megatron"],
        &["runs", "--store", &store],
    ] {
        let text = stdout(args);
        let words: Vec<&str> = text.split_whitespace().collect();
        for pair in words.windows(2) {
            let nothing = pair[0].trim_start_matches(['+', '-']) == "0.00";
            assert!(!nothing || !pair[1].starts_with("GiB"), "{args:?}: {text}");
            let zero = pair[0].starts_with('-')
                && pair[0].len() > 1
                && pair[0][1..].chars().all(|c| matches!(c, '0' | '.'));
            assert!(!zero, "{args:?}: {} in {text}", pair[0]);
        }
        // A unit without a number is that of a column.
        for pair in words.windows(2).filter(|p| p[1] == "GiB") {
            assert!(pair[0].parse::<f64>().is_ok(), "{args:?}: {text}");
        }
    }
}
