//! `shardlab sim --trace`.

use crate::{json, shardlab};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

fn trace(scenario: &str) -> Value {
    trace_with(scenario, &[])
}

fn trace_with(scenario: &str, more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let args = ["sim", scenario, "--trace", path.to_str().unwrap()];
    shardlab(&[&args, more].concat()).assert().success();
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn of<'a>(trace: &'a Value, ph: &str) -> Vec<&'a Value> {
    let events = trace["traceEvents"].as_array().unwrap();
    events.iter().filter(|e| e["ph"] == ph).collect()
}

#[test]
fn a_trace_has_streams_slices_counters_and_arrows() {
    let trace = trace("peers-tiny");
    let names: BTreeSet<&str> = of(&trace, "M")
        .iter()
        .filter_map(|e| e["args"]["name"].as_str())
        .collect();
    for thread in ["host", "compute", "all_gather", "reduce_scatter"] {
        assert!(names.contains(thread), "{thread} in {names:?}");
    }
    let slices = of(&trace, "X");
    for slice in slices.iter().filter(|s| s["tid"] != 0) {
        for arg in ["instr", "unit", "phase", "rule", "bytes"] {
            assert!(!slice["args"][arg].is_null(), "{arg} in {slice}");
        }
    }
    assert!(slices.iter().all(|s| s["ts"].as_f64().unwrap() >= 0.0));
    let peak = of(&trace, "C")
        .iter()
        .map(|c| c["args"]["allocated"].as_f64().unwrap())
        .fold(0.0, f64::max);
    // The measured peak of this scenario is 6053.45 MiB, see tests/data.
    assert!((peak - 6053.45).abs() < 0.01 * 6053.45, "{peak}");
    assert!(
        of(&trace, "C")
            .iter()
            .all(|c| c["args"]["reserved"].is_number())
    );
}

/// A gap listed by `explain` ends where a slice of the compute stream starts, at the same time in
/// the trace, even if the host issued most of the step before it started.
#[test]
fn a_trace_counts_time_from_the_step_s_begin_as_explain_does() {
    let name = "peers-1b";
    let trace = trace(name);
    let explained = &json(&["explain", name, "--no-what-if", "--json"])[0];
    let slices = of(&trace, "X");
    let number = |v: &Value| v.as_f64().unwrap();
    let starts: Vec<f64> = slices
        .iter()
        .filter(|s| s["tid"] == 1)
        .map(|s| number(&s["ts"]) / 1e3)
        .collect();
    let gaps = explained["exposed_ms"]["longest"].as_array().unwrap();
    let ends: Vec<f64> = gaps
        .iter()
        .map(|g| number(&g["at_ms"]) + number(&g["ms"]))
        .collect();
    // Between a listed part of a gap and the slice may be parts with other causes, which are too
    // short for the list.
    let least = gaps
        .iter()
        .map(|g| number(&g["ms"]))
        .fold(f64::MAX, f64::min);
    let found = |end: f64| starts.iter().any(|s| (-2e-6..=least).contains(&(s - end)));
    // Parts of one gap with different causes end where the next part starts.
    let next = |end: f64| {
        gaps.iter()
            .any(|g| (number(&g["at_ms"]) - end).abs() < 2e-6)
    };
    let step = number(&explained["step_ms"]);
    for end in ends {
        assert!(
            found(end) || next(end) || (end - step).abs() < 1e-3,
            "{end}"
        );
    }
    let issued = |s: &&&Value| number(&s["args"]["issued_us"]) < 0.0;
    let ahead = slices
        .iter()
        .filter(|s| s["tid"] != 0)
        .filter(issued)
        .count();
    let launches = slices.iter().filter(|s| s["tid"] == 0).count();
    assert!(ahead > 0, "the host is ahead of this step");
    assert_eq!(
        ahead + launches,
        slices.iter().filter(|s| s["tid"] != 0).count()
    );
}

#[test]
fn slices_of_a_stream_follow_one_another() {
    let trace = trace("peers-tiny");
    let mut threads: BTreeMap<u64, Vec<(i64, i64)>> = BTreeMap::new();
    // Perfetto has a resolution of nanoseconds, and drops a slice that starts before the previous
    // one has ended.
    let nanos = |v: &Value| {
        let exact = v.as_f64().unwrap() * 1e3;
        assert!((exact - exact.round()).abs() < 1e-3, "{v}");
        exact.round() as i64
    };
    for slice in of(&trace, "X") {
        let (start, length) = (nanos(&slice["ts"]), nanos(&slice["dur"]));
        let thread = slice["tid"].as_u64().unwrap();
        threads
            .entry(thread)
            .or_default()
            .push((start, start + length));
    }
    assert!(threads.len() >= 4);
    for slices in threads.values_mut() {
        slices.sort_unstable();
        for pair in slices.windows(2) {
            assert!(pair[1].0 >= pair[0].1, "{pair:?}");
        }
    }
}

#[test]
fn an_arrow_leads_from_every_collective_to_what_waited_for_it() {
    let trace = trace("peers-tiny");
    let slices = of(&trace, "X");
    let is_collective = |s: &&&Value| {
        s["tid"] != 0 && matches!(s["cat"].as_str(), Some("all_gather" | "reduce_scatter"))
    };
    let collectives = slices.iter().filter(is_collective).count();
    let (starts, ends) = (of(&trace, "s"), of(&trace, "f"));
    assert_eq!(starts.len(), collectives);
    assert_eq!(ends.len(), starts.len());
    for (start, end) in starts.iter().zip(&ends) {
        assert_eq!(start["id"], end["id"]);
        assert!(start["ts"].as_f64() <= end["ts"].as_f64(), "{start} {end}");
        assert_ne!(start["tid"], end["tid"]);
        // Arrows are attached to slices: they start within a collective and end at the start of a
        // slice.
        let inside = slices.iter().filter(is_collective).any(|s| {
            let (from, at) = (s["ts"].as_f64().unwrap(), start["ts"].as_f64().unwrap());
            s["tid"] == start["tid"] && from <= at && at <= from + s["dur"].as_f64().unwrap()
        });
        assert!(inside, "{start}");
    }
}

/// The straggler's kernels take 1.5 times as long as rank 0's, and collectives end on both ranks at
/// the same time.
#[test]
fn a_straggler_is_a_process_of_its_own() {
    let trace = trace_with("peers-tiny", &["--straggler", "3=1.5"]);
    let names: Vec<(&Value, &str)> = of(&trace, "M")
        .iter()
        .filter(|e| e["name"] == "process_name")
        .map(|e| (&e["pid"], e["args"]["name"].as_str().unwrap()))
        .collect();
    assert_eq!(
        names,
        [
            (&Value::from(0), "rank 0 of 4"),
            (&Value::from(3), "rank 3 of 4")
        ]
    );
    let slices = of(&trace, "X");
    let by_instr = |pid: u64, category: &str| -> BTreeMap<u64, &Value> {
        let of = slices
            .iter()
            .filter(|s| s["pid"] == pid && s["cat"] == category);
        of.map(|s| (s["args"]["instr"].as_u64().unwrap(), *s))
            .collect()
    };
    let (fast, slow) = (by_instr(0, "gemm"), by_instr(3, "gemm"));
    assert!(!fast.is_empty() && fast.keys().eq(slow.keys()));
    let alone = |s: &Value| s["args"]["alone_us"].as_f64().unwrap();
    for (a, b) in fast.values().zip(slow.values()) {
        assert!((alone(b) / alone(a) - 1.5).abs() < 1e-3, "{a} {b}");
    }
    let end = |s: &Value| s["ts"].as_f64().unwrap() + s["dur"].as_f64().unwrap();
    let (here, there) = (by_instr(0, "reduce_scatter"), by_instr(3, "reduce_scatter"));
    assert!(!here.is_empty() && here.keys().eq(there.keys()));
    for (a, b) in here.values().zip(there.values()) {
        assert!((end(a) - end(b)).abs() < 2e-3, "{a} {b}");
    }
    let ids: Vec<&Value> = of(&trace, "s").iter().map(|e| &e["id"]).collect();
    assert_eq!(
        ids.iter()
            .map(|id| id.as_u64())
            .collect::<BTreeSet<_>>()
            .len(),
        ids.len()
    );
}
