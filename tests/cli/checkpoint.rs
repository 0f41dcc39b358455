//! Checkpoints of PyTorch.

use super::shardlab;
use serde_json::Value;
use std::path::Path;

fn json(args: &[&str]) -> Value {
    let output = shardlab(&[args, &["--json"]].concat()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A run that resumes from a folder written for PyTorch continues bitwise identically, also on
/// another mesh.
#[test]
fn a_run_continues_from_what_it_wrote_for_pytorch() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (first, dcp, second) = (at("first"), at("dcp"), at("second"));
    let train = |checkpoints: &str, steps: &str, more: &[&str]| {
        let base = ["exec", "small-qwen3", "--no-store", "--steps", steps];
        let folder = ["--checkpoint-dir", checkpoints];
        json(&[&base[..], &folder, more].concat())
    };
    train(&first, "2", &[]);
    let export = ["checkpoint", "export", "small-qwen3", &first, &dcp];
    let made = json(&[&export[..], &["--ranks", "3"]].concat());
    assert_eq!(made["step"], 2);
    for rank in 0..3 {
        let file = Path::new(&dcp).join(format!("__{rank}_0.distcp"));
        assert!(file.metadata().unwrap().len() > 1000, "{file:?}");
    }
    let read = json(&["checkpoint", "import", "small-qwen3", &dcp, &second]);
    assert_eq!(
        (&read["step"], &read["unused"]),
        (&made["step"], &Value::Array(Vec::new()))
    );
    let straight = train(&first, "4", &[]);
    for more in [&[][..], &["--set", "fsdp.strategy=optim_grads"]] {
        let folder = at(if more.is_empty() { "second" } else { "third" });
        if !more.is_empty() {
            json(&["checkpoint", "import", "small-qwen3", &dcp, &folder]);
        }
        let resumed = train(&folder, "4", more);
        assert_eq!(resumed["resumed_from"], 2);
        let last = |run: &Value| run["losses"].as_array().unwrap()[2..].to_vec();
        assert_eq!(last(&resumed), last(&straight), "{more:?}");
        assert_eq!(resumed["final_norms"], straight["final_norms"], "{more:?}");
    }
}

/// Muon and AdamW share a model, but no PyTorch optimizer reads both from one checkpoint.
#[test]
fn states_of_muon_are_not_written_for_pytorch() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (ours, dcp) = (at("ours"), at("dcp"));
    let muon = ["--set", "train.optimizer=muon"];
    let train = ["exec", "llama-tiny", "--no-store", "--steps", "1"];
    let folder = ["--checkpoint-dir", &ours];
    let run = json(&[&train[..], &folder, &muon].concat());
    assert_eq!(run["losses"].as_array().unwrap().len(), 1);
    let export = ["checkpoint", "export", "llama-tiny", &ours, &dcp];
    let output = shardlab(&[&export[..], &muon].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("states of Muon and AdamW"), "{text}");
    assert!(!Path::new(&dcp).exists());
}

#[test]
fn other_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().display().to_string();
    let refused = |args: &[&str], expected: &str| {
        let output = shardlab(&[&["checkpoint"], args].concat())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(expected), "{text}");
    };
    refused(&["import", "small-qwen3", &empty, &empty], ".metadata");
    refused(
        &["export", "small-qwen3", &empty, &empty],
        "has no checkpoints",
    );
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/dcp/fsdp2");
    let to = dir.path().join("new").display().to_string();
    refused(
        &["import", "small-qwen3", fixture, &to],
        "has no weights of this model",
    );
    std::fs::write(dir.path().join(".metadata"), b"cos\nsystem\n(S'true'\ntR.").unwrap();
    refused(
        &["import", "small-qwen3", &empty, &to],
        "would import `os.system`",
    );
    // This shape differs from that of the model.
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/dcp/linear.toml");
    let wider = ["import", scenario, fixture, &to, "--set", "model.hidden=6"];
    refused(&wider, "has shape [5, 5], the model's is [6, 6]");
}
