//! Adapters through the command line: a PEFT run, output folders, checkpoints, and bad input.

use crate::{json, shardlab, stdout};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn exec(args: &[&str]) -> Value {
    let mut all = vec!["exec", "--json"];
    all.extend_from_slice(args);
    json(&all).remove(0)
}

/// Returns the exit status and the message of a failed call.
fn failure(args: &[&str]) -> (i32, String) {
    let output = shardlab(args).output().unwrap();
    let code = output.status.code().unwrap();
    (code, String::from_utf8(output.stderr).unwrap())
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/lora-tiny")
}

fn reference() -> Value {
    serde_json::from_slice(&std::fs::read(golden().join("reference.json")).unwrap()).unwrap()
}

#[test]
fn a_run_of_peft() {
    let dir = golden().display().to_string();
    let data = golden().join("tokens.bin").display().to_string();
    let run = exec(&[
        "lora-tiny",
        "--init",
        &dir,
        "--adapter",
        &dir,
        "--data",
        &data,
    ]);
    let theirs = reference();
    for list in ["losses", "grad_norms"] {
        let (a, b) = (
            run[list].as_array().unwrap(),
            theirs[list].as_array().unwrap(),
        );
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() < 1e-4 * b, "{list}: {a} {b}");
        }
    }
}

/// The parameter counts are those of PEFT.
#[test]
fn trained_parameters_are_counted() {
    let report = json(&["plan", "lora-tiny", "--groups", "--json"]).remove(0);
    for (name, count) in reference()["parameters"].as_object().unwrap() {
        assert_eq!(&report["parameters"][name], count, "{name}");
    }
    let text = stdout(&["plan", "lora-tiny", "--groups"]);
    assert!(
        text.contains("11,712 of 146,304 parameters are trained (8.005 %)"),
        "{text}"
    );
    let whole = json(&["plan", "llama-tiny", "--groups", "--json"]).remove(0);
    assert_eq!(
        whole["parameters"]["total"],
        whole["parameters"]["trainable"]
    );
}

#[test]
fn exported_adapters_begin_another_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("peft").display().to_string();
    let first = exec(&["small-lora", "--steps", "3", "--export", &out]);
    let mut names: Vec<_> = std::fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    let still = [
        "--steps",
        "1",
        "--set",
        "train.lr=0",
        "--set",
        "train.weight_decay=0",
    ];
    let second = exec(&[&["small-lora", "--adapter", &out][..], &still].concat());
    assert_eq!(first["final_norms"], second["final_norms"]);
    // Without the saved adapters, they start again from zero.
    let other = exec(&[&["small-lora"][..], &still].concat());
    let b = "model.layers.0.self_attn.q_proj.lora_B.weight";
    assert_eq!(other["final_norms"][b], 0.0);
    assert!(first["final_norms"][b].as_f64().unwrap() > 0.0);
    let base = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(other["final_norms"][base], first["final_norms"][base]);
}

/// Checkpoints contain only adapters, and a resumed run continues like an uninterrupted one.
#[test]
fn checkpoints_hold_adapters_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    let at = ["--checkpoint-dir", &path, "--checkpoint-every", "3"];
    let whole = exec(&["small-lora"]);
    exec(&[&["small-lora", "--steps", "3"][..], &at].concat());
    let index = std::fs::read(dir.path().join("step-00000003/index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let pieces = index["pieces"].as_array().unwrap();
    assert!(!pieces.is_empty());
    for piece in pieces {
        let tensor = piece["tensor"].as_str().unwrap();
        assert!(tensor.contains(".lora_"), "{tensor}");
    }
    let rest = exec(&[&["small-lora"][..], &at].concat());
    assert_eq!(rest["losses"], whole["losses"]);
    assert_eq!(rest["final_norms"], whole["final_norms"]);
    // Another seed results in another model.
    let (code, words) = failure(&[&["exec", "small-lora", "--seed", "7"][..], &at].concat());
    assert_eq!(code, 2, "{words}");
    assert!(
        words.contains("were trained on a model whose weights have norm"),
        "{words}"
    );
}

#[test]
fn folders_that_do_not_fit_are_bad_input() {
    let dir = golden().display().to_string();
    for (args, part) in [
        (
            &["small-native", "--adapter", &dir][..],
            "the scenario has no adapters (lora.r)",
        ),
        (&["lora-tiny", "--adapter", "nowhere"], "nowhere"),
        (
            &["lora-tiny", "--adapter", &dir, "--set", "lora.r=8"],
            "`r` is 4, not 8",
        ),
    ] {
        let (code, words) = failure(&[&["exec"][..], args].concat());
        assert_eq!(code, 2, "{args:?}: {words}");
        assert!(words.contains(part), "{args:?}: {words}");
    }
}
