//! Memory snapshots: replays with the allocator model, failed allocations, and exports.
//!
//! Numbers of recorded runs are those of `torch.cuda.memory_stats` in the same process.

use crate::{json, shardlab, stdout};
use serde_json::Value;

const TRACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces");

fn device(name: &str, options: &[&str]) -> Value {
    let path = format!("{TRACES}/{name}.snapshot.pickle.gz");
    let mut args = vec!["import", &path, "--json"];
    args.extend(options);
    let mut found = json(&args).remove(0);
    found["snapshots"][0]["devices"][0].take()
}

/// Checks that a replay reserves the recorded number of bytes at all times, in the recorded
/// segments.
fn exact(device: &Value) {
    let agreement = &device["replays"][0]["agreement"];
    let allocations = &agreement["allocations"];
    assert!(allocations.as_u64().unwrap() > 500, "{agreement}");
    assert_eq!(&agreement["equal_reserved"], allocations, "{agreement}");
    assert_eq!(agreement["equal_segments"], true, "{agreement}");
}

#[test]
fn a_run_from_its_start_is_replayed_to_the_byte() {
    for (name, reserved, allocated) in [
        ("start-default", 3_934_257_152_u64, 3_108_504_576_u64),
        ("start-expandable", 3_871_342_592, 3_103_785_984),
    ] {
        let device = device(name, &[]);
        exact(&device);
        let replay = &device["replays"][0];
        assert_eq!(replay["peak_reserved_bytes"], reserved, "{name}");
        assert_eq!(replay["peak_allocated_bytes"], allocated, "{name}");
        assert_eq!(device["before_bytes"], 0);
    }
    let device = device("start-default", &[]);
    let agreement = &device["replays"][0]["agreement"];
    assert_eq!(agreement["equal_addresses"], agreement["allocations"]);
    assert_eq!(device["replays"][0]["segments"], 69);
}

/// The same program was recorded with both settings.
#[test]
fn other_settings_are_predicted_to_the_byte() {
    let other = |name, settings| {
        let device = device(name, &["--alloc-conf", settings]);
        device["replays"][1]["peak_reserved_bytes"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(
        other("start-default", "expandable_segments:True"),
        3_871_342_592
    );
    assert_eq!(other("start-expandable", "default"), 3_934_257_152);
}

#[test]
fn limits_force_the_allocator_to_return_memory() {
    let limit = ["--device-memory", "3113851289B"];
    let split = device("start-split", &limit);
    exact(&split);
    assert_eq!(split["replays"][0]["retries"], 1);
    assert_eq!(
        split["replays"][0]["peak_reserved_bytes"],
        2_688_548_864_u64
    );
    let expandable = device("start-split-expandable", &limit);
    exact(&expandable);
    assert_eq!(
        expandable["replays"][0]["peak_reserved_bytes"],
        2_818_572_288_u64
    );
}

#[test]
fn a_history_may_start_in_the_middle_of_a_run() {
    let device = device(
        "fsdp2-compiled",
        &["--alloc-conf", "expandable_segments:True"],
    );
    exact(&device);
    let notes = device["notes"].to_string();
    assert!(
        notes.contains("fragmentation before that is unknown"),
        "{notes}"
    );
}

#[test]
fn a_failed_allocation_says_what_was_missing_and_what_helps() {
    // `set_per_process_memory_fraction` limited the process to 3 GiB.
    let device = device("oom", &["--device-memory", "3GiB"]);
    exact(&device);
    assert_eq!(device["replays"][0]["retries"], 13);
    let oom = &device["out_of_memory"][0];
    assert_eq!(oom["requested_bytes"], 112 << 20);
    assert_eq!(
        oom["missing_bytes"],
        3_118_465_024_u64 + (112 << 20) - (3 << 30)
    );
    // Reserved minus allocated bytes of `memory_stats`; torch's message says 214.78 MiB.
    assert_eq!(
        oom["reserved_unused_bytes"],
        3_118_465_024_u64 - 2_893_250_560
    );
    assert!(oom["largest_hole_bytes"].as_u64().unwrap() < 112 << 20);
    let tried = oom["tried"].as_array().unwrap();
    let fits = |settings: &str| {
        let found = tried.iter().find(|t| t["settings"] == settings).unwrap();
        found["fits"].as_bool().unwrap()
    };
    assert!(fits("expandable_segments:True"), "{tried:?}");
    let roles: u64 = oom["by_role"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(Some(roles), oom["allocated_bytes"].as_u64());
    let path = format!("{TRACES}/oom.snapshot.pickle.gz");
    let text = stdout(&["import", &path, "--device-memory", "3GiB"]);
    assert!(
        text.contains("Out of memory: 112.0 MiB were requested"),
        "{text}"
    );
}

#[test]
fn predicted_memory_is_written_as_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("predicted.pickle");
    let path = path.to_str().unwrap();
    for scenario in ["llama-tiny", "small-native"] {
        let predicted = json(&["sim", scenario, "--memory-snapshot", path, "--json"]).remove(0);
        let read = json(&["import", path, "--json"]).remove(0);
        let device = &read["snapshots"][0]["devices"][0];
        assert_eq!(
            device["peak_reserved_bytes"], predicted["memory"]["peak_reserved_bytes"],
            "{scenario}"
        );
        assert_eq!(device["before_bytes"], 0);
    }
    shardlab(&[
        "sim",
        "llama-tiny",
        "small-native",
        "--memory-snapshot",
        path,
    ])
    .assert()
    .code(2);
}

#[test]
fn settings_that_torch_does_not_know_are_refused() {
    let path = format!("{TRACES}/start-default.snapshot.pickle.gz");
    let output = shardlab(&["import", &path, "--alloc-conf", "max_split_size_mb:1"])
        .assert()
        .code(2);
    let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(error.contains("a number of MiB above 20"), "{error}");
}
