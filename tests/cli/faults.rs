//! Faults end a run within seconds, are reported with their cause on every rank, and leave the last
//! checkpoint usable.

use crate::{json, shardlab};
use serde_json::Value;
use std::path::Path;

/// Ranks as threads, and as processes.
const MODES: [&[&str]; 2] = [&[], &["--processes"]];

fn exec(args: &[&str]) -> Value {
    let mut all = vec!["exec", "--json", "--no-store"];
    all.extend_from_slice(args);
    json(&all).remove(0)
}

/// Returns the message of a run that fails with status 3. A run that only ends after its timeout of
/// 60 s would report another cause.
fn failing(args: &[&str]) -> String {
    let mut all = vec!["exec", "--no-store"];
    all.extend_from_slice(args);
    let output = shardlab(&all).output().unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{args:?}: {words}");
    words
}

/// Checks that every rank is listed by number, and that the cause is reported.
fn assert_reported(words: &str, ranks: u32, cause: &str) {
    assert!(words.contains(cause), "{cause}: {words}");
    for rank in 0..ranks {
        let line = words
            .lines()
            .find(|l| l.trim_start().starts_with(&format!("rank {rank}")));
        assert!(line.is_some(), "rank {rank}: {words}");
    }
}

/// Faults: a panic on the host, an error, a rank that disappears or never arrives, and one that
/// dies inside a collective.
#[test]
fn a_rank_that_fails() {
    let whole = exec(&["small-native", "--steps", "5"]);
    for mode in MODES {
        // With threads, the message names the missing rank; with processes, it names what they wait
        // for.
        let missing = match mode.is_empty() {
            true => "rank 2 missing",
            false => "by rank 2` within 3",
        };
        for (kind, cause) in [
            ("panic", "injected panic on the host"),
            ("error", "an injected error"),
            ("stall", missing),
            ("absent", missing),
            ("collective", "injected panic in the middle of a collective"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path().display().to_string();
            let base = [
                "small-native",
                "--checkpoint-dir",
                &at,
                "--checkpoint-every",
                "1",
                "--steps",
            ];
            exec(&[&base[..], &["2"], mode].concat());
            let fault = format!("2:{kind}");
            let fail = ["5", "--timeout", "3", "--fault", &fault];
            let words = failing(&[&base[..], &fail, mode].concat());
            assert_reported(&words, 4, cause);
            // The message names the waiting ranks and the rank that they wait for, with the
            // position of its host.
            let stands = "host positions, slowest first: rank 2 at instruction ";
            let error = words.lines().find(|l| l.contains("small-native: rank "));
            let says = error.is_some_and(|l| l.contains(stands));
            assert_eq!(says, cause == missing, "{words}");
            // The third step was complete except for a rank that never arrived, so its checkpoint
            // may have been in progress.
            let resumed = exec(&[&base[..], &["5"]].concat());
            let from = resumed["resumed_from"].as_u64().unwrap();
            let at_most = if kind == "absent" { 2 } else { 3 };
            assert!((2..=at_most).contains(&from), "{kind} {mode:?}: {from}");
            assert_eq!(resumed["losses"], whole["losses"], "{kind} {mode:?}");
        }
    }
}

/// If a rank runs out of memory, the message lists live buffers, and a run with more memory can
/// load the checkpoint.
#[test]
fn out_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display().to_string();
    let base = ["small-native", "--checkpoint-dir", &at];
    let run = exec(&[&base[..], &["--steps", "2"]].concat());
    let peak = run["memory"]["peak_reserved_bytes"].as_u64().unwrap();
    let (enough, less) = (format!("{peak}B"), format!("{}B", peak - 1));
    exec(&["small-native", "--steps", "2", "--memory", &enough]);
    for mode in MODES {
        let less = ["--steps", "4", "--memory", &less];
        let words = failing(&[&base[..], &less, mode].concat());
        assert_reported(&words, 4, "out of memory");
        assert!(words.contains("the peak of a step is "), "{words}");
    }
    let on = exec(&[&base[..], &["--steps", "3"]].concat());
    assert_eq!(on["resumed_from"], 2);
}

/// If a NaN weight reaches the loss, the message names the parameters. With `--check-nan`, it names
/// the first kernel with a NaN output.
#[test]
fn a_number_that_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (weights, checkpoints) = (path("hf"), path("c"));
    let base = ["small-native", "--checkpoint-dir", &checkpoints];
    exec(&[&base[..], &["--steps", "1", "--export", &weights]].concat());
    poison(&dir.path().join("hf/model.safetensors"));
    for mode in MODES {
        let begin = ["--init", &weights, "--resume", "never", "--steps", "3"];
        let words = failing(&[&base[..], &begin, mode].concat());
        assert!(words.contains("is NaN; not finite: "), "{words}");
        let words = failing(&[&base[..], &begin, mode, &["--check-nan"]].concat());
        assert_reported(&words, 4, "of an output is NaN");
    }
    let on = exec(&[&base[..], &["--steps", "2"]].concat());
    assert_eq!(on["resumed_from"], 1);
}

/// Replaces the last weight in a file with NaN.
fn poison(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn faulty_faults_are_refused() {
    // `small-native` has four ranks.
    for (args, part) in [
        (
            ["--fault", "4:panic"],
            "there is no rank 4; the scenario's mesh has ranks 0 to 3",
        ),
        (["--fault", "2"], "RANK:KIND is expected"),
        (["--fault", "1:death"], "RANK:KIND is expected"),
        (["--memory", "much"], "a size such as 512MiB"),
        (["--memory", "60"], "needs a unit, such as 60GiB"),
        (
            ["--memory", "5012193280"],
            "needs a unit, such as 5012193280B",
        ),
    ] {
        let output = shardlab(&[&["exec", "small-native"][..], &args].concat())
            .output()
            .unwrap();
        let words = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(words.contains(part), "{words}");
    }
    // A single rank, or unrelated ranks.
    let alone = ["--set", "mesh.dp_shard=1", "--fault"];
    for (fault, part) in [("1:stall", "has rank 0 only"), ("0:stall", "has none")] {
        let call = [&["exec", "small-native"][..], &alone, &[fault]].concat();
        let output = shardlab(&call).output().unwrap();
        let words = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(words.contains(part), "{words}");
    }
}
