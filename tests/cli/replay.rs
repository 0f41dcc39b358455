//! `replay`: the model of a trace, sharded again. Pairs of traces differ in one option.

use crate::{json, shardlab, stdout};
use serde_json::Value;

const TRACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces");

fn replay(name: &str, set: &[&str]) -> Value {
    let path = format!("{TRACES}/{name}.json.gz");
    let mut args = vec!["replay", &path, "--json"];
    args.extend(set.iter().flat_map(|s| ["--set", s]));
    json(&args).remove(0)
}

#[test]
fn a_recorded_run_is_replayed() {
    let found = replay("base", &[]);
    // The profiler slows the host down; the same step takes 35.97 ms without it.
    let error = found["recorded"]["step_ms"].as_f64().unwrap() / 35.97 - 1.0;
    assert!(error.abs() < 0.12, "{found}");
    let bytes = |run: &str| found[run]["peak_allocated_bytes"].as_f64().unwrap();
    let error = bytes("recorded") / bytes("measured") - 1.0;
    assert!(error.abs() < 0.03, "{found}");
    // Units keep the names of the trace.
    assert_eq!(replay("units", &[])["recorded"]["fits"], "yes");
    assert_eq!(found["recorded"]["world_size"], 4);
    assert_eq!(found["replayed"], Value::Null);
}

/// Waits for a slow host are not replayed, and a note says so. What the device does is.
#[test]
fn waits_for_the_host_are_named() {
    let ms = |found: &Value, run: &str, key: &str| found[run][key].as_f64().unwrap();
    let found = replay("ddp", &[]);
    assert!(ms(&found, "measured", "host_wait_ms") < 0.1, "{found}");
    let error = ms(&found, "recorded", "step_ms") / ms(&found, "measured", "step_ms") - 1.0;
    assert!(error.abs() < 0.03, "{found}");
    let found = replay("units", &[]);
    let waited = ms(&found, "measured", "host_wait_ms");
    assert!((waited - 35.13).abs() < 0.01, "{found}");
    let without = ms(&found, "measured", "step_ms") - waited;
    let recorded = ms(&found, "recorded", "step_ms");
    // The host of the profile is slow enough to cause a part of the waits.
    let measured = ms(&found, "measured", "step_ms");
    assert!(recorded > 0.9 * without && recorded < measured, "{found}");
    let notes = found["notes"].to_string();
    assert!(
        notes.contains("waits 35.13 ms per step for the host"),
        "{notes}"
    );
}

#[test]
fn options_of_any_model_can_be_changed() {
    let found = replay("base", &["mesh.dp_shard=64", "fsdp.prefetch_forward=2"]);
    assert_eq!(found["replayed"]["world_size"], 64);
    // Shards of 64 ranks are smaller than those of 4.
    let peak = |key: &str| found[key]["peak_allocated_bytes"].as_u64().unwrap();
    assert!(peak("replayed") < peak("recorded"), "{found}");
    let root = replay("base", &["fsdp.units=root"]);
    assert!(
        root["replayed"]["peak_allocated_bytes"].as_u64()
            > root["recorded"]["peak_allocated_bytes"].as_u64(),
        "{root}"
    );
    let path = format!("{TRACES}/base.json.gz");
    let text = stdout(&["replay", &path, "--set", "fsdp.reshard_after_forward=false"]);
    assert!(text.contains("replayed as recorded"), "{text}");
    let options = stdout(&["replay", &path, "--options"]);
    assert!(
        options.contains("reshard_after_forward = true"),
        "{options}"
    );
}

#[test]
fn traces_that_cannot_be_replayed_are_refused() {
    let refused = |name: &str, expected: &str| {
        let path = format!("{TRACES}/{name}");
        let output = shardlab(&["replay", &path]).assert().code(2);
        let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(error.contains(expected), "{error}");
    };
    refused("graph.json.gz", "the trace shows no");
    refused(
        "oom.snapshot.pickle.gz",
        "a trace of the PyTorch profiler is expected",
    );
}
