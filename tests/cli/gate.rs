//! `shardlab gate`.

use crate::{assert_narrow, shardlab};
use serde_json::Value;
use std::path::Path;

/// A call with its exit status, output and errors; nothing of a CI system that the tests run in.
fn call(args: &[&str]) -> (i32, String, String) {
    let output = shardlab(args)
        .env_remove("GITHUB_ACTIONS")
        .env_remove("GITHUB_STEP_SUMMARY")
        .output()
        .unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

fn gate(baseline: &Path, args: &[&str]) -> (i32, String, String) {
    let at = baseline.display().to_string();
    call(&[&["gate", "--baseline", &at], args].concat())
}

/// A folder with the baselines of these scenarios.
fn blessed(scenarios: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (code, out, err) = gate(dir.path(), &[&["--bless"], scenarios].concat());
    assert_eq!(code, 0, "{err}");
    assert_eq!(out.matches(": created").count(), scenarios.len(), "{out}");
    dir
}

/// Acceptance: the unchanged tree passes, every time.
#[test]
fn the_unchanged_tree_passes_twenty_times() {
    let dir = blessed(&["small-native", "small-fsdp2"]);
    for i in 0..20 {
        let (code, out, err) = gate(dir.path(), &["small-native", "small-fsdp2"]);
        assert_eq!(code, 0, "call {i}: {out}{err}");
        assert!(out.contains("2 scenarios passed"), "{out}");
    }
    // What blessing would write is what is there.
    let (_, out, _) = gate(dir.path(), &["--bless", "small-native", "small-fsdp2"]);
    assert_eq!(out.matches(": unchanged").count(), 2, "{out}");
}

/// Acceptance: each planted fault fails the gate, and the gate says what and by how much.
#[test]
fn planted_faults_fail_and_are_named() {
    let dir = blessed(&["small-native"]);
    let cases: [(&str, &[&str]); 4] = [
        (
            "memory",
            &[
                "allocated",
                "REGRESSION",
                "+25,600 B (+5.01 %): full_weight +25,600 B",
                "one full_weight buffer of 25,344 B more",
                "steady: +1 alloc, +1 free",
            ],
        ),
        (
            "scale",
            &[
                "gradient norm: outside at 6 of 6 steps, first at step 1",
                "4.0000 times: off by the world size (4), a sum where a mean belongs",
                "+reduce: reduce_scatter sum f32 50688",
            ],
        ),
        (
            "stale",
            &[
                "loss curve: outside at 5 of 6 steps, first at step 2",
                "[CHK-UNINIT]",
                "-prefetch: all_gather bf16 25344 shard",
                "steady: -1 all_gather",
            ],
        ),
        (
            "slow",
            &[
                "step, predicted",
                "compute stream busy +",
                "steady: +97 launch",
            ],
        ),
    ];
    for (fault, words) in cases {
        let (code, out, err) = gate(dir.path(), &["small-native", "--plant", fault]);
        assert_eq!(code, 1, "{fault}: {out}{err}");
        assert_narrow(&out);
        // Sentences are wrapped.
        let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            let word = word.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(flat.contains(&word), "{fault}: {word}\n{out}");
        }
    }
}

/// The unchanged tree passes, with measured runs and without.
#[test]
fn old_against_new_in_one_call() {
    let me = env!("CARGO_BIN_EXE_shardlab");
    // The program may change here: what is left to see it is time.
    let base = [
        "gate",
        "--against",
        me,
        "small-linear",
        "--set",
        "gate.program=off",
        "--set",
        "gate.step_time=1000",
    ];
    let (code, out, err) = call(&[&base[..], &["--pairs", "0"]].concat());
    assert_eq!(code, 0, "{out}{err}");
    assert!(!out.contains("step, measured"), "{out}");
    let (code, out, err) = call(
        &[
            &base[..],
            &[
                "--pairs",
                "3",
                "--all",
                "--set",
                "gate.measured_step_time=1000",
            ],
        ]
        .concat(),
    );
    assert_eq!(code, 0, "{out}{err}");
    let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("over 3 interleaved pairs"), "{out}");
}

/// A budget fails where the baseline has the same numbers, and the finding points at the line that gives it.
#[test]
fn budgets_point_at_their_line() {
    let dir = tempfile::tempdir().unwrap();
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/small-linear.toml");
    let file = dir.path().join("mine.toml");
    let text = |budget: &str| {
        let base = small.display();
        format!("extends = \"{base}\"\n\n[gate]\nmax_step_ms = 1e9\nmax_memory = \"{budget}\"\n")
    };
    let mine = file.display().to_string();
    let at = dir.path().join("baselines");
    std::fs::write(&file, text("1GiB")).unwrap();
    let (code, out, err) = gate(&at, &["--bless", &mine]);
    assert_eq!(code, 0, "{out}{err}");
    let (code, out, err) = gate(&at, &["--all", &mine]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(
        out.contains("budget, reserved") && out.contains("budget, step"),
        "{out}"
    );
    std::fs::write(&file, text("1KiB")).unwrap();
    let (code, out, err) = gate(&at, &["--github", &mine]);
    assert_eq!(code, 1, "{out}{err}");
    let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("KiB beyond the budget"), "{out}");
    let annotation = out
        .lines()
        .find(|l| l.starts_with("::error") && l.contains("mine.toml"));
    assert!(
        annotation.is_some_and(|l| l.contains("line=5")),
        "{out}{err}"
    );
}

#[test]
fn improvements_ask_for_a_new_baseline() {
    let dir = blessed(&["small-linear"]);
    let path = dir.path().join("small-linear.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let worse = text.replacen("allocated = 24576", "allocated = 30000", 1);
    assert_ne!(text, worse);
    std::fs::write(&path, worse).unwrap();
    let (code, out, _) = gate(dir.path(), &["small-linear"]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("IMPROVED"), "{out}");
    assert!(out.contains("-5,424 B (-18.1 %)"), "{out}");
    let (code, out, _) = gate(dir.path(), &["--bless", "small-linear"]);
    assert_eq!(code, 0);
    assert!(out.contains("small-linear.toml: updated"), "{out}");
    assert!(out.contains("-5,424 B (-18.1 %)"), "{out}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    assert_eq!(gate(dir.path(), &["small-linear"]).0, 0);
}

#[test]
fn every_output_is_written() {
    let dir = blessed(&["small-linear"]);
    let file = |name: &str| dir.path().join(name).display().to_string();
    let summary = file("summary.md");
    let at = dir.path().display().to_string();
    let output = shardlab(&[
        "gate",
        "--baseline",
        &at,
        "small-linear",
        "--plant",
        "memory",
        "--json",
        "--junit",
        &file("junit.xml"),
        "--markdown",
        &file("gate.md"),
    ])
    .env("GITHUB_ACTIONS", "true")
    .env("GITHUB_STEP_SUMMARY", &summary)
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(verdict["scenario"], "small-linear");
    assert_eq!(verdict["pass"], false);
    let allocated = verdict["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|f| f["metric"] == "allocated")
        .unwrap();
    assert_eq!(allocated["status"], "regression");
    assert_eq!(allocated["class"], "memory");
    // The annotation points at the value in the baseline.
    let line = allocated["place"]["line"].as_u64().unwrap() as usize;
    let baseline = std::fs::read_to_string(dir.path().join("small-linear.toml")).unwrap();
    assert!(
        baseline
            .lines()
            .nth(line - 1)
            .unwrap()
            .starts_with("allocated = ")
    );
    let annotations = String::from_utf8(output.stderr).unwrap();
    assert!(annotations.contains("::error file="), "{annotations}");
    let junit = std::fs::read_to_string(file("junit.xml")).unwrap();
    assert!(
        junit.contains("<failure type=\"regression\" message=\"allocated: "),
        "{junit}"
    );
    for path in [summary, file("gate.md")] {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("## Gate: 1 of 1 scenarios failed"),
            "{path}: {text}"
        );
    }
}

#[test]
fn limits_come_from_the_scenario_and_point_there() {
    let dir = blessed(&["small-linear"]);
    let scenario = dir.path().join("mine.toml");
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/small-linear.toml");
    std::fs::write(
        &scenario,
        format!(
            "extends = {:?}\n\n[gate]\nallocated = 0.5\ndevice = 0.001\nprogram = \"off\"\n",
            base.display().to_string()
        ),
    )
    .unwrap();
    std::fs::copy(
        dir.path().join("small-linear.toml"),
        dir.path().join("b.toml"),
    )
    .unwrap();
    let text = std::fs::read_to_string(dir.path().join("b.toml")).unwrap();
    let mine = dir.path().join("mine-baseline.toml");
    std::fs::write(
        &mine,
        text.replace("scenario = \"small-linear\"", "scenario = \"mine\""),
    )
    .unwrap();
    let (code, out, err) = gate(
        &mine,
        &[
            &scenario.display().to_string(),
            "--plant",
            "memory",
            "--github",
        ],
    );
    assert_eq!(code, 1, "{out}{err}");
    // 11 % more allocated bytes are within 50 %, device bytes are not within 0.1 %: the annotation is at line 5.
    assert!(!out.contains("allocated REGRESSION"), "{out}");
    assert!(out.contains("mine.toml,line=5,col="), "{out}");
    assert!(out.contains("device REGRESSION"), "{out}");
}

#[test]
fn measured_runs_can_be_given() {
    let dir = blessed(&["small-linear"]);
    let run = dir.path().join("run.json");
    let path = run.display().to_string();
    let (_, json, _) = call(&["exec", "small-linear", "--json"]);
    std::fs::write(&run, &json).unwrap();
    let (code, out, err) = gate(dir.path(), &["small-linear", "--run", &path]);
    assert_eq!(code, 0, "{out}{err}");
    let (_, json, _) = call(&["exec", "small-linear", "--json", "--set", "train.lr=0.05"]);
    std::fs::write(&run, &json).unwrap();
    let (code, out, _) = gate(dir.path(), &["small-linear", "--run", &path]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("loss curve"), "{out}");
    // A kept run by its name.
    let store = dir.path().join("kept").display().to_string();
    let (code, _, err) = call(&["exec", "small-linear", "--store", &store]);
    assert_eq!(code, 0, "{err}");
    let (_, rest) = err.split_once("saved as ").unwrap();
    let id = rest.split_whitespace().next().unwrap();
    let (code, out, err) = gate(
        dir.path(),
        &["small-linear", "--run", id, "--store", &store],
    );
    assert_eq!(code, 0, "{out}{err}");
    // Runs of what is not under the gate, and twice the same seed.
    let (code, _, err) = gate(
        dir.path(),
        &["small-linear", "--run", &path, "--run", &path],
    );
    assert_eq!(code, 2);
    assert!(
        err.contains("has the seed of a run given before it"),
        "{err}"
    );
    let (code, _, err) = gate(dir.path(), &["small-native", "--run", &path]);
    assert_eq!(code, 2);
    assert!(err.contains("is a run of `small-linear`"), "{err}");
    // Runs of another program and of another seed.
    for (change, expected, words) in [
        (
            ["--set", "model.hidden=32"],
            2,
            "run.json: ran the program ",
        ),
        (["--seed", "7"], 1, "seeds: seed 0 was not run"),
    ] {
        let (_, json, _) = call(&[&["exec", "small-linear", "--json"], &change[..]].concat());
        std::fs::write(&run, &json).unwrap();
        let (code, out, err) = gate(dir.path(), &["small-linear", "--run", &path]);
        assert_eq!(code, expected, "{change:?}: {out}{err}");
        assert!((out + &err).contains(words), "{change:?}");
    }
}

#[test]
fn several_seeds_are_run_and_tested() {
    let dir = tempfile::tempdir().unwrap();
    let seeds = ["small-native", "--set", "gate.seeds=3"];
    let (code, _, err) = gate(dir.path(), &[&["--bless"], &seeds[..]].concat());
    assert_eq!(code, 0, "{err}");
    let (code, out, _) = gate(dir.path(), &[&["--all"], &seeds[..]].concat());
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("final loss over seeds"), "{out}");
    assert!(out.contains("gradient norm, seed 2"), "{out}");
    // Nothing is learnt: every seed ends worse.
    let idle = ["--set", "train.lr=1e-9"];
    let (code, out, _) = gate(dir.path(), &[&seeds[..], &idle].concat());
    assert_eq!(code, 1, "{out}");
    let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("final loss over seeds: +"), "{out}");
    assert!(flat.contains("paired t test p = 0.0"), "{out}");
}

#[test]
fn the_gate_tests_itself() {
    let (code, out, err) = call(&["gate", "--selftest", "small-native", "llama3-8b-4xh200"]);
    assert_eq!(code, 0, "{out}{err}");
    assert_narrow(&out);
    assert_eq!(out.matches(" fails ").count(), 8, "{out}");
    assert!(!out.contains("MISSED") && !out.contains("FALSE"), "{out}");
}

/// One scenario without a baseline takes nothing from the others: they are judged, and the reports say what is missing.
#[test]
fn a_missing_baseline_is_a_finding_beside_the_others() {
    let dir = blessed(&["small-linear", "small-cnn"]);
    let broken = dir.path().join("small-cnn.toml");
    std::fs::write(&broken, "format = 7\n").unwrap();
    let junit = dir.path().join("junit.xml");
    let scenarios = ["small-native", "small-linear", "small-cnn"];
    let files = ["--json", "--junit", junit.to_str().unwrap()];
    let (code, out, err) = gate(dir.path(), &[&scenarios[..], &files].concat());
    assert_eq!(code, 2, "{out}{err}");
    let verdicts: Vec<Value> = out
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let told: Vec<_> = verdicts
        .iter()
        .map(|v| {
            (
                v["scenario"].as_str().unwrap(),
                v["pass"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("small-native", false),
            ("small-linear", true),
            ("small-cnn", false)
        ]
    );
    for (verdict, words) in [
        (&verdicts[0], "there is no baseline of `small-native`"),
        (&verdicts[2], "has format 7"),
    ] {
        let findings = verdict["findings"].as_array().unwrap();
        // Beside what needs none.
        let of = |i: usize| (&findings[i]["metric"], &findings[i]["status"]);
        assert_eq!(findings.len(), 3, "{verdict}");
        assert_eq!(of(0), (&"check".into(), &"pass".into()));
        assert_eq!(of(1), (&"finite".into(), &"pass".into()));
        assert_eq!(of(2), (&"baseline".into(), &"no_baseline".into()));
        let message = findings[2]["message"].as_str().unwrap();
        assert!(
            message.contains(words) && err.contains(words),
            "{message} {err}"
        );
    }
    let xml = std::fs::read_to_string(&junit).unwrap();
    assert!(xml.contains("failures=\"2\""), "{xml}");
    assert!(xml.contains("classname=\"small-linear.memory\""), "{xml}");
    assert!(
        xml.contains("message=\"baseline: ") && xml.contains("small-native.toml"),
        "{xml}"
    );
    // A regression elsewhere changes nothing about the status, and is reported.
    let planted = ["small-native", "small-linear", "--plant", "memory"];
    let (code, out, _) = gate(dir.path(), &planted);
    assert_eq!(code, 2, "{out}");
    assert!(
        out.contains("REGRESSION") && out.contains("NO BASELINE"),
        "{out}"
    );
}

#[test]
fn bad_input_is_named() {
    let dir = blessed(&["small-linear"]);
    let at = dir.path().display().to_string();
    let broken = dir.path().join("broken.toml");
    std::fs::write(&broken, "format = 7\n").unwrap();
    let broken = broken.display().to_string();
    let scenario = dir.path().join("mine.toml");
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/small-linear.toml");
    let base = base.display().to_string();
    std::fs::write(&scenario, format!("extends = {base:?}\n")).unwrap();
    let scenario = scenario.display().to_string();
    let cases: [(&[&str], i32, &str); 9] = [
        (
            &["small-native", "--bless", "--baseline", &scenario],
            2,
            "mine.toml: is no baseline; it is not overwritten",
        ),
        (
            &["small-native", "--baseline", &at],
            2,
            "there is no baseline of `small-native`",
        ),
        (&["small-linear", "--baseline", &broken], 2, "has format 7"),
        (&["small-linear"], 2, "--baseline"),
        (&["no-such", "--baseline", &at], 2, "cannot be opened"),
        (
            &["small-linear", "--baseline", &at, "--set", "gate.los=1"],
            2,
            "did you mean `loss`?",
        ),
        (
            &["small-linear", "small-linear", "--baseline", &at],
            2,
            "both named",
        ),
        (
            &[
                "small-ddp",
                "--plant",
                "stale",
                "--against",
                env!("CARGO_BIN_EXE_shardlab"),
            ],
            2,
            "small-ddp: --plant stale: nothing is gathered in forward",
        ),
        (
            &["small-linear", "--against", "/no/such/binary"],
            3,
            "cannot start /no/such/binary",
        ),
    ];
    for (args, expected, words) in cases {
        let (code, _, err) = call(&[&["gate"], args].concat());
        assert_eq!(code, expected, "{args:?}: {err}");
        assert!(err.contains(words), "{args:?}: {err}");
    }
    // A binary that is no shardlab.
    let (code, _, err) = call(&["gate", "small-linear", "--against", "false"]);
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("false gate --help"), "{err}");
}

/// A program in a folder.
fn script(dir: &Path, name: &str, text: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// A scenario that the old side does not know blocks nothing; what it proves wrong about itself does.
#[test]
fn what_the_old_side_does_not_know_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let me = env!("CARGO_BIN_EXE_shardlab");
    let old = script(
        dir.path(),
        "old",
        &format!(
            "case \"$*\" in *small-native) echo 'error: no small-native' >&2; exit 2;; esac\nexec {me} \"$@\""
        ),
    );
    let args = [
        "gate",
        "--against",
        &old,
        "--pairs",
        "0",
        "small-linear",
        "small-native",
    ];
    let (code, out, err) = call(&args);
    assert_eq!(code, 0, "{out}{err}");
    let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains("nothing to compare with: no small-native"),
        "{out}"
    );
    assert!(flat.contains("2 scenarios passed"), "{out}");
    let args = [
        "gate",
        "--against",
        &old,
        "--pairs",
        "0",
        "small-native",
        "--plant",
        "stale",
    ];
    let (code, out, _) = call(&args);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("[CHK-UNINIT]"), "{out}");
    // A call that compares nothing at all has not passed.
    let (code, out, err) = call(&["gate", "--against", &old, "--pairs", "0", "small-native"]);
    assert_eq!(code, 3, "{out}{err}");
    assert!(out.contains("small-native: pass"), "{out}");
    assert!(err.contains("for any scenario of this call"), "{err}");
}

/// To the new side, exit status 2 of the old one means that it does not know a scenario yet.
#[cfg(target_os = "linux")]
#[test]
fn a_baseline_that_cannot_be_written_is_no_bad_input() {
    let (code, _, err) = gate(Path::new("/proc"), &["--bless", "small-linear"]);
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("/proc/small-linear.toml: "), "{err}");
}

/// A measured slow-down fails by the ratio of interleaved runs alone. The old side says here what its runs took.
#[test]
fn a_measured_slow_down_fails() {
    let dir = tempfile::tempdir().unwrap();
    let me = env!("CARGO_BIN_EXE_shardlab");
    for (median, expected, word) in [("1e-3", 1, "REGRESSION"), ("1e6", 0, "pass")] {
        let old = script(
            dir.path(),
            "old",
            &format!(
                "[ \"$1\" = exec ] || exec {me} \"$@\"\necho '{{\"step_ms\": {{\"median\": {median}}}}}'"
            ),
        );
        let (code, out, err) = call(&[
            "gate",
            "--against",
            &old,
            "small-linear",
            "--pairs",
            "3",
            "--all",
        ]);
        assert_eq!(code, expected, "{out}{err}");
        let row = out.lines().find(|l| l.contains("step, measured")).unwrap();
        assert!(row.ends_with(word), "{out}");
        let failures = out.matches("REGRESSION").count();
        assert_eq!(failures, usize::from(expected == 1), "{out}");
    }
}

/// A revision is checked out beside, built, asked, and removed. The build is a copy here: what cargo does is cargo's.
#[test]
fn old_against_new_by_revision() {
    let dir = tempfile::tempdir().unwrap();
    let repository = dir.path().join("repository");
    std::fs::create_dir(&repository).unwrap();
    let git = |args: &[&str]| {
        let output = std::process::Command::new("git")
            .current_dir(&repository)
            .args(["-c", "user.name=t", "-c", "user.email=t@t"])
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    git(&["init", "--quiet"]);
    for text in ["old", "new"] {
        std::fs::write(repository.join("which"), text).unwrap();
        git(&["add", "which"]);
        git(&["commit", "--quiet", "-m", text]);
    }
    let me = env!("CARGO_BIN_EXE_shardlab");
    let cargo = script(
        dir.path(),
        "cargo",
        &format!(
            "grep -q old which || exit 9\nwhile [ $# -gt 1 ]; do shift; done\nmkdir -p $1/release && cp {me} $1/release/"
        ),
    );
    let gate = |args: &[&str]| {
        let output = shardlab(args)
            .current_dir(&repository)
            .env("CARGO", &cargo)
            .env_remove("GITHUB_ACTIONS")
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let out = text(output.stdout) + &text(output.stderr);
        (output.status.code().unwrap(), out)
    };
    let base = [
        "gate",
        "small-linear",
        "--pairs",
        "3",
        "--all",
        "--set",
        "gate.measured_step_time=1000",
        "--against-rev",
    ];
    let (code, out) = gate(&[&base[..], &["HEAD~1"]].concat());
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("step, measured"), "{out}");
    // No work tree stays behind, and the next call finds its way again.
    assert_eq!(git(&["worktree", "list"]).lines().count(), 1);
    let (code, out) = gate(&[&base[..], &["HEAD~1", "--plant", "memory"]].concat());
    assert_eq!(code, 1, "{out}");
    let (code, out) = gate(&[&base[..], &["HEAD"]].concat());
    assert_eq!(code, 3, "the new revision does not build here: {out}");
    assert_eq!(git(&["worktree", "list"]).lines().count(), 1);
    let (code, out) = gate(&[&base[..], &["no-such"]].concat());
    assert_eq!(code, 2, "{out}");
    assert!(out.contains("git knows no revision `no-such`"), "{out}");
    // The same for a comparison.
    let (code, out) = gate(&["compare", "small-linear", "--rev-a", "HEAD~1"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("predicted by revision HEAD~1"), "{out}");
}
