//! Models given by `config.json`: unknown types, and types that `exec` does not run.

use crate::{json, shardlab, stdout};
use std::path::{Path, PathBuf};

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/configs");

/// Writes a scenario for a public `config.json` and returns its path.
fn scenario(folder: &Path, config: &str, rest: &str) -> PathBuf {
    let path = folder.join(format!("{config}.toml"));
    let text = format!(
        "[model]\npreset = {:?}\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n{rest}",
        format!("{CONFIGS}/{config}.json")
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// Returns the message of a call that ends with status 2.
fn refusal(args: &[&str]) -> String {
    let assert = shardlab(args).assert().code(2);
    let output = assert.get_output();
    assert!(output.stdout.is_empty(), "{args:?} prints a result");
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The language model of Qwen3-VL-2B has the shapes of Qwen3-1.7B. The whole model also has an
/// image tower.
#[test]
fn a_type_that_wraps_a_language_model_is_read_as_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = scenario(folder.path(), "Qwen--Qwen3-VL-2B-Instruct", "");
    let path = path.to_str().unwrap();
    let whole = &json(&["sim", path, "--json"])[0];
    assert_eq!(whole["parameters"]["total"], 2_127_532_032_u64);
    let sim = &json(&["sim", path, "--as", "qwen3", "--json"])[0];
    assert_eq!(sim["parameters"]["total"], 1_720_574_976_u64);
    // This is an alias: overrides of the same key apply as well, and the last one wins.
    let set = ["--set", "model.model_type=qwen3"];
    let same = &json(&[&["sim", path, "--json"][..], &set].concat())[0];
    assert_eq!(same["parameters"], sim["parameters"]);
    let message = refusal(&["sim", path, "--as", "qwen33"]);
    assert!(message.contains("\"qwen33\" is not supported"), "{message}");
    assert!(message.contains("did you mean `qwen3`?"), "{message}");
}

/// Encoders are predicted, but the samples of `exec` hold no targets for them.
#[test]
fn exec_names_the_input_that_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    for (config, seq_len, input) in [
        ("tiny--bert", 64, "token_types"),
        ("tiny--modernbert", 64, "masked_tokens"),
        ("tiny--bert-head", 64, "token_types"),
        ("tiny--gemma2-head", 64, "token_classes"),
        ("tiny--qwen3-head", 64, "hidden_states"),
        ("vit-base-patch16-224", 197, "patches"),
    ] {
        let rest = format!("[train]\nseq_len = {seq_len}\n");
        let path = scenario(folder.path(), config, &rest);
        let path = path.to_str().unwrap();
        let message = refusal(&["exec", path, "--steps", "1"]);
        assert!(
            message.contains(&format!("no data for the input `{input}`")),
            "{message}"
        );
        assert!(
            message.contains("plan, check, sim and explain"),
            "{message}"
        );
        shardlab(&["check", path]).assert().success();
    }
}

/// The language model of a multimodal model with an image tower trains alone.
#[test]
fn exec_trains_the_language_model_of_llama4() {
    let folder = tempfile::tempdir().unwrap();
    let path = scenario(folder.path(), "tiny--llama4", "[train]\nseq_len = 64\n");
    let path = path.to_str().unwrap();
    let message = refusal(&["exec", path, "--steps", "1"]);
    assert!(message.contains("no data for the input"), "{message}");
    let args = ["exec", path, "--as", "llama4_text", "--steps", "1"];
    shardlab(&args).assert().success();
}

/// Sizes and kernels of these types are planned, but not all of their math is implemented.
#[test]
fn exec_refuses_types_whose_plans_compute_something_else() {
    let folder = tempfile::tempdir().unwrap();
    for (config, model_type, what) in [
        ("tiny--phimoe", "phimoe", "its router masks scores"),
        ("tiny--nanochat", "nanochat", "in the opposite direction"),
        ("tiny--ministral3", "ministral3", "scales queries"),
    ] {
        let path = scenario(folder.path(), config, "[train]\nseq_len = 64\n");
        let path = path.to_str().unwrap();
        shardlab(&["plan", path, "--as", model_type])
            .assert()
            .success();
        let message = refusal(&["exec", path, "--as", model_type]);
        assert!(
            message.contains(&format!("`exec` cannot run `{model_type}`"))
                && message.contains(what),
            "{message}"
        );
    }
}

/// Each token uses 8 of 128 experts, and the heading says so.
#[test]
fn parameters_that_a_token_uses_are_counted() {
    let args = ["sim", "qwen3-30b-a3b-8xh100", "--json"];
    let report = &json(&args)[0];
    assert_eq!(report["parameters"]["total"], 30_532_122_624_u64);
    assert_eq!(report["parameters"]["active"], 3_353_032_704_u64);
    let text = stdout(&args[..2]);
    assert!(
        text.contains("30.53 B parameters (3.35 B active)"),
        "{text}"
    );
}
