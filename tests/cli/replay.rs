//! `replay`: the model of a trace with another sharding. Pairs of traces differ in one option.

use crate::{json, shardlab, stdout};
use serde_json::Value;
use std::io::Read;

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
    // Units keep the names of the trace.
    assert_eq!(replay("units", &[])["recorded"]["fits"], "yes");
    assert_eq!(found["recorded"]["world_size"], 4);
    assert_eq!(found["replayed"], Value::Null);
}

/// Allocations of the model are those of the trace, at their positions between its kernels; those
/// of the engine are planned again.
#[test]
fn memory_of_replays_is_close_to_the_recorded_one() {
    for name in [
        "base",
        "units",
        "never",
        "prefetch2",
        "fsdp2-compiled-rank0",
    ] {
        let found = replay(name, &[]);
        let error = |key: &str| {
            let bytes = |run: &str| found[run][key].as_f64().unwrap();
            bytes("recorded") / bytes("measured") - 1.0
        };
        assert!(
            error("peak_allocated_bytes").abs() < 0.0125,
            "{name}: {found}"
        );
        assert!(error("peak_reserved_bytes").abs() < 0.06, "{name}: {found}");
    }
}

/// For a trace without memory events, `replay` takes them from a snapshot of the same steps. The
/// snapshot's sizes leave out the unused part of a block beyond its tensor.
#[test]
fn a_snapshot_gives_a_trace_its_memory() {
    let path = format!("{TRACES}/fsdp2-compiled-rank0.json.gz");
    let mut text = String::new();
    let file = std::fs::File::open(&path).unwrap();
    flate2::read::GzDecoder::new(file)
        .read_to_string(&mut text)
        .unwrap();
    let mut trace: Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array_mut().unwrap();
    events.retain(|e| e["name"] != "[memory]");
    let folder = tempfile::tempdir().unwrap();
    let bare = folder.path().join("rank0.json");
    std::fs::write(&bare, trace.to_string()).unwrap();
    let bare = bare.to_str().unwrap();
    let snapshot = format!("{TRACES}/fsdp2-compiled.snapshot.pickle.gz");
    let run = |files: &[&str]| json(&[&["replay", "--json"], files].concat()).remove(0);
    let (with, without) = (run(&[bare, &snapshot]), run(&[bare]));
    let own = replay("fsdp2-compiled-rank0", &[]);
    let bytes = |of: &Value, run: &str, key: &str| of[run][key].as_f64().unwrap();
    for (run, key) in [
        ("measured", "peak_allocated_bytes"),
        ("measured", "peak_reserved_bytes"),
        ("recorded", "peak_allocated_bytes"),
        ("recorded", "peak_reserved_bytes"),
    ] {
        let error = bytes(&with, run, key) / bytes(&own, run, key) - 1.0;
        assert!(error.abs() < 0.002, "{run} {key}: {error}");
    }
    assert!(without["measured"]["peak_allocated_bytes"].is_null());
    // The snapshot of another job does not match the time of the trace.
    let other = format!("{TRACES}/start-default.snapshot.pickle.gz");
    assert_eq!(run(&[bare, &other])["recorded"], without["recorded"]);
}

/// Steps without the profiler, from the tables in `tests/data/traces/README.md` and of
/// `fsdp2-compiled`. Most of them wait for the host. Traced steps are up to four times as long.
#[test]
fn replays_are_close_to_steps_without_the_profiler() {
    const STEPS: [(&str, f64); 10] = [
        ("base", 35.97),
        ("units", 48.37),
        ("prefetch2", 44.75),
        ("never", 38.84),
        ("group2", 55.91),
        ("hsdp", 42.58),
        ("accum-clip", 86.10),
        ("ddp", 40.22),
        ("megatron-0", 41.45),
        ("fsdp2-compiled-rank0", 44.2),
    ];
    let (mut replayed, mut recorded) = (0.0, 0.0);
    for (name, ms) in STEPS {
        let found = replay(name, &[]);
        let error = |run: &str| (found[run]["step_ms"].as_f64().unwrap() / ms - 1.0).abs();
        assert!(error("recorded") < 0.32, "{name}: {found}");
        replayed += error("recorded") / STEPS.len() as f64;
        recorded += error("measured") / STEPS.len() as f64;
        let factor = found["host_factor"].as_f64().unwrap();
        assert!((1.05..1.6).contains(&factor), "{name}: {factor}");
    }
    assert!(replayed < 0.11 && recorded > 0.5, "{replayed} {recorded}");
    // If a profile is named, its host is used.
    let named = replay("base", &["mesh.hardware=h100-80"]);
    assert_eq!(named["host_factor"], Value::Null);
    let host = |found: &Value| found["recorded"]["host_ms"].as_f64().unwrap();
    assert!(host(&named) < host(&replay("base", &[])));
}

/// A note says how long the device waits for the host under the profiler.
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
    // The profile's host is slow enough to cause a part of the waits.
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
    // Shards for 64 ranks are smaller than those for 4.
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
