//! `exec --progress`: output on stderr during training.

use crate::processes::{all_end, children, signal};
use crate::shardlab;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

/// Returns the exit status, stdout and stderr of `exec`.
fn exec(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = shardlab(&[&["exec"], args].concat());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Parses the lines that are events. All lines must be events, except the output of other ranks.
fn events(stderr: &str) -> Vec<Value> {
    let own = stderr.lines().filter(|l| !l.starts_with("[rank "));
    own.map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{l}: {e}")))
        .collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|e| e["event"].as_str().unwrap())
        .collect()
}

/// The events agree with the object at the end and contain all ranks, whether ranks are threads or
/// processes.
#[test]
fn events_tell_of_the_run_as_it_happens() {
    let store = tempfile::tempdir().unwrap();
    let base = [
        "small-native",
        "--steps",
        "3",
        "--set",
        "train.validate_every=2",
        "--progress",
        "json",
        "--json",
        "--store",
        store.path().to_str().unwrap(),
    ];
    for more in [&[][..], &["--processes"]] {
        let (code, stdout, stderr) = exec(&[&base[..], more].concat());
        assert_eq!(code, Some(0), "{stderr}");
        let object: Value = serde_json::from_str(&stdout).unwrap();
        let events = events(&stderr);
        let wanted = ["begun", "step", "step", "validation", "step", "end"];
        assert_eq!(names(&events), wanted);
        let begun = &events[0];
        assert_eq!(begun["ranks"], 4);
        assert_eq!(begun["steps"], 3);
        assert_eq!(begun["resumed_from"], 0);
        assert_eq!(begun["device"], object["environment"]["device"]);
        let steps: Vec<&Value> = events.iter().filter(|e| e["event"] == "step").collect();
        for (i, step) in steps.iter().enumerate() {
            assert_eq!(step["step"], i as u64 + 1);
            assert_eq!(step["steps"], 3);
            assert_eq!(step["loss"], object["losses"][i]);
            assert_eq!(step["grad_norm"], object["grad_norms"][i]);
            assert!(step["lr"].as_f64().unwrap() > 0.0);
            // One rank processes a micro-batch of 3 sequences of 16 tokens.
            assert_eq!(step["tokens"], 48);
            let time = step["time_ns"].as_u64().unwrap();
            let ranks = step["ranks"].as_array().unwrap();
            assert_eq!(ranks.len(), 4);
            for rank in ranks {
                let of = |key: &str| rank[key].as_u64().unwrap();
                assert!(0 < of("host_ns") && of("host_ns") <= of("time_ns"));
                assert!(0 < of("peak_allocated_bytes"));
                assert!(of("peak_allocated_bytes") <= of("peak_reserved_bytes"));
            }
            // The step time is that of the process that reports it.
            assert!(ranks[0]["time_ns"].as_u64().unwrap() <= time);
        }
        let peak = steps.iter().map(|s| {
            let of_rank_0 = &s["ranks"][0];
            of_rank_0["peak_allocated_bytes"].as_u64().unwrap()
        });
        assert_eq!(
            peak.max(),
            object["memory"]["peak_allocated_bytes"].as_u64()
        );
        assert_eq!(events[3]["step"], 2);
        assert_eq!(events[3]["loss"], object["validation_losses"][0][1]);
        let end = &events[5];
        assert_eq!(
            (&end["step"], &end["interrupted"]),
            (&3.into(), &false.into())
        );
        assert_eq!(end["run_id"], object["run_id"]);
        assert!(end["run_id"].is_string());
    }
}

/// Notes are events, too. A run that is not saved has no id.
#[test]
fn a_finished_run_that_is_started_once_more() {
    let dir = tempfile::tempdir().unwrap();
    let base = [
        "small-native",
        "--steps",
        "2",
        "--no-store",
        "--progress",
        "json",
        "--checkpoint-dir",
        dir.path().to_str().unwrap(),
    ];
    let (_, _, first) = exec(&base);
    assert_eq!(names(&events(&first)), ["begun", "step", "step", "end"]);
    let (code, _, again) = exec(&base);
    assert_eq!(code, Some(0));
    let again = events(&again);
    assert_eq!(names(&again), ["begun", "note", "end"]);
    assert_eq!(again[0]["resumed_from"], 2);
    let note = again[1]["text"].as_str().unwrap();
    assert!(note.starts_with("nothing to train"), "{note}");
    assert_eq!(again[2]["step"], 2);
    assert_eq!(again[2]["run_id"], Value::Null);
}

/// There is a single error event, whether the command line, rank 0 or the launcher detects the
/// error.
#[test]
fn errors_are_events_too() {
    let json = ["--progress", "json", "--no-store"];
    let (code, stdout, stderr) = exec(&[&["small-nativ"], &json[..]].concat());
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    let found = events(&stderr);
    assert_eq!(names(&found), ["error"]);
    let text = found[0]["text"].as_str().unwrap();
    assert!(text.contains("small-native"), "{text}");
    for more in [&[][..], &["--processes"]] {
        let fault = ["small-native", "--fault", "1:error"];
        let (code, _, stderr) = exec(&[&fault[..], &json, more].concat());
        assert_eq!(code, Some(3), "{stderr}");
        let found = events(&stderr);
        assert_eq!(names(&found), ["begun", "step", "error"]);
        let text = found[2]["text"].as_str().unwrap();
        assert!(text.contains("rank 1"), "{text}");
    }
    // Only rank 0 reports an error in the command line that all ranks share.
    let bad = ["small-native", "--processes", "--fault", "9:error"];
    let (code, _, stderr) = exec(&[&bad[..], &json].concat());
    assert_eq!(code, Some(2), "{stderr}");
    assert_eq!(names(&events(&stderr)), ["error"]);
}

/// Starts a long run and waits until some steps have finished.
fn long_run() -> (Child, BufReader<std::process::ChildStderr>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
        .args(["exec", "small-native", "--processes", "--no-store"])
        .args(["--progress", "json", "--steps", "1000000"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    for _ in 0..3 {
        line.clear();
        errors.read_line(&mut line).unwrap();
    }
    let event: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(event["step"], 2, "{line}");
    (child, errors)
}

#[test]
fn an_interruption_ends_it_after_a_step() {
    let (mut child, mut errors) = long_run();
    signal("INT", child.id());
    let mut rest = String::new();
    errors.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    let events = events(&rest);
    let [.., step, end] = &events[..] else {
        panic!("{rest}");
    };
    assert_eq!(end["event"], "end");
    assert_eq!(end["interrupted"], true);
    assert_eq!(end["step"], step["step"]);
}

/// Rank 0 cannot report its own death.
#[test]
fn the_launcher_tells_of_a_rank_that_dies() {
    let (mut child, mut errors) = long_run();
    let ranks = children(child.id());
    signal("KILL", ranks[0]);
    let mut rest = String::new();
    errors.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    all_end(&ranks);
    // A line that rank 0 was writing may be truncated.
    let lines = rest.lines().filter_map(|l| serde_json::from_str(l).ok());
    let errors: Vec<Value> = lines.filter(|e: &Value| e["event"] == "error").collect();
    let text = errors[0]["text"].as_str().unwrap();
    assert!(text.contains("rank 0 was killed (signal 9"), "{text}");
    assert_eq!(errors.len(), 1);
}

/// A reader that stops reading does not delay steps.
#[test]
fn nobody_has_to_read_it() {
    let dir = tempfile::tempdir().unwrap();
    // About 700 bytes per step: far more than a pipe holds.
    let args = ["--steps", "400", "--checkpoint-every", "400"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
        .args(["exec", "small-native", "--no-store", "--progress", "json"])
        .args(args)
        .arg("--checkpoint-dir")
        .arg(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = std::time::Instant::now();
    let saved = || {
        let found = std::fs::read_dir(dir.path()).unwrap().flatten();
        let names = found.map(|e| e.file_name().to_string_lossy().into_owned());
        names
            .filter_map(|n| n.strip_prefix("step-")?.parse().ok())
            .any(|n: u64| n == 400)
    };
    while !saved() {
        assert!(begin.elapsed() < std::time::Duration::from_secs(120));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut all = String::new();
    let mut errors = child.stderr.take().unwrap();
    errors.read_to_string(&mut all).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(all.len() > 1 << 16);
    assert_eq!(events(&all).len(), 402);
}

#[test]
fn lines_and_none() {
    let base = ["small-native", "--steps", "2", "--no-store", "--progress"];
    let (_, _, lines) = exec(&[&base[..], &["lines"]].concat());
    assert!(lines.starts_with("step 1/2  loss "), "{lines}");
    let (code, stdout, none) = exec(&[&base[..], &["none"]].concat());
    assert_eq!((code, none.as_str()), (Some(0), ""));
    assert!(stdout.contains("loss"), "{stdout}");
}
