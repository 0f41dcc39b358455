//! `shardlab gate`.

use crate::{assert_narrow, shardlab};
use serde_json::Value;
use std::path::Path;

/// Returns the exit status, standard output and standard error of a call without the environment of
/// a CI system.
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

/// Calls the gate with the preset `strict`, which shardlab's own scenarios use.
fn strict(baseline: &Path, args: &[&str]) -> (i32, String, String) {
    gate(baseline, &[args, &["--preset", "strict"]].concat())
}

/// Returns a folder with the baselines of these scenarios.
fn blessed(scenarios: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (code, out, err) = gate(dir.path(), &[&["--bless"], scenarios].concat());
    assert_eq!(code, 0, "{err}");
    assert_eq!(out.matches(": created").count(), scenarios.len(), "{out}");
    dir
}

/// Acceptance: an unchanged tree always passes.
#[test]
fn the_unchanged_tree_passes_twenty_times() {
    let dir = blessed(&["small-native", "small-fsdp2"]);
    for i in 0..20 {
        let (code, out, err) = strict(dir.path(), &["small-native", "small-fsdp2"]);
        assert_eq!(code, 0, "call {i}: {out}{err}");
        assert!(out.contains("2 scenarios passed"), "{out}");
    }
    // Blessing again does not change anything.
    let (_, out, _) = strict(dir.path(), &["--bless", "small-native", "small-fsdp2"]);
    assert_eq!(out.matches(": unchanged").count(), 2, "{out}");
}

/// Acceptance: each injected fault fails the gate, and the message says what has changed, and by
/// how much.
#[test]
fn planted_faults_fail_and_are_named() {
    let dir = blessed(&["small-native"]);
    let cases: [(&str, &[&str]); 4] = [
        (
            "memory",
            &[
                "allocated",
                "REGRESSION",
                "+25.0 KiB (+5.01 %): full_weight +25.0 KiB",
                "1 more full_weight buffer (24.8 KiB)",
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
        ("slow", &["step, predicted", "(+", "steady: +97 launch"]),
    ];
    for (fault, words) in cases {
        let (code, out, err) = strict(dir.path(), &["small-native", "--inject-fault", fault]);
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

/// An unchanged tree passes, with and without measured runs.
#[test]
fn old_against_new_in_one_call() {
    let me = env!("CARGO_BIN_EXE_shardlab");
    // The program may change here; only time matters.
    let base = [
        "gate",
        "--preset",
        "strict",
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

/// An exceeded budget fails even if the baseline has the same numbers. The finding points to the
/// line that sets the budget.
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
    assert!(flat.contains("KiB over the budget of 1.0 KiB"), "{out}");
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
    let (code, out, _) = strict(dir.path(), &["small-linear"]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("IMPROVED"), "{out}");
    assert!(out.contains("-5.3 KiB (-18.1 %)"), "{out}");
    // With the default preset, this is not a failure.
    assert_eq!(gate(dir.path(), &["small-linear"]).0, 0);
    let (code, out, _) = gate(dir.path(), &["--bless", "small-linear"]);
    assert_eq!(code, 0);
    assert!(out.contains("small-linear.toml: updated"), "{out}");
    assert!(out.contains("-5.3 KiB (-18.1 %)"), "{out}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    assert_eq!(strict(dir.path(), &["small-linear"]).0, 0);
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
        "--preset",
        "strict",
        "--inject-fault",
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
    // Findings with the same cause count as one failure.
    let failures = verdict["failures"].as_array().unwrap();
    assert_eq!(failures.len(), 1, "{verdict}");
    assert!(
        failures[0]["cause"]
            .as_str()
            .unwrap()
            .starts_with("program changed: ")
    );
    assert_eq!(failures[0]["metrics"][0], "allocated");
    // The finding points to the value in the baseline.
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
        junit.contains("<failure type=\"regression\" message=\"program changed: "),
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
            "--inject-fault",
            "memory",
            "--github",
        ],
    );
    assert_eq!(code, 1, "{out}{err}");
    // 11 % more allocated memory is within 50 %, but device memory is not within 0.1 %.
    let failed = |metric: &str| {
        let row = out.lines().find(|l| l.starts_with(&format!("{metric} ")));
        row.is_some_and(|row| row.ends_with("REGRESSION"))
    };
    assert!(!failed("allocated") && failed("device"), "{out}");
    assert!(out.contains("+0.1 %"), "{out}");
}

#[test]
fn measured_runs_can_be_given() {
    let dir = blessed(&["small-linear"]);
    let run = dir.path().join("run.json");
    let path = run.display().to_string();
    let (_, json, _) = call(&["exec", "small-linear", "--json"]);
    std::fs::write(&run, &json).unwrap();
    let (code, out, err) = strict(dir.path(), &["small-linear", "--run", &path]);
    assert_eq!(code, 0, "{out}{err}");
    let (_, json, _) = call(&["exec", "small-linear", "--json", "--set", "train.lr=0.05"]);
    std::fs::write(&run, &json).unwrap();
    let (code, out, _) = strict(dir.path(), &["small-linear", "--run", &path]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("loss curve"), "{out}");
    // A saved run is given by name.
    let store = dir.path().join("kept").display().to_string();
    let (code, _, err) = call(&["exec", "small-linear", "--store", &store]);
    assert_eq!(code, 0, "{err}");
    let (_, rest) = err.split_once("saved as ").unwrap();
    let id = rest.split_whitespace().next().unwrap();
    let (code, out, err) = strict(
        dir.path(),
        &["small-linear", "--run", id, "--store", &store],
    );
    assert_eq!(code, 0, "{out}{err}");
    // These runs are of scenarios that are not gated, or have the same seed.
    let (code, _, err) = strict(
        dir.path(),
        &["small-linear", "--run", &path, "--run", &path],
    );
    assert_eq!(code, 2);
    assert!(
        err.contains("has the seed of a run given before it"),
        "{err}"
    );
    let (code, _, err) = strict(dir.path(), &["small-native", "--run", &path]);
    assert_eq!(code, 2);
    assert!(err.contains("is a run of `small-linear`"), "{err}");
    // These runs are of another program or have another seed.
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
        let (code, out, err) = strict(dir.path(), &["small-linear", "--run", &path]);
        assert_eq!(code, expected, "{change:?}: {out}{err}");
        assert!((out + &err).contains(words), "{change:?}");
    }
}

#[test]
fn several_seeds_are_run_and_tested() {
    let dir = tempfile::tempdir().unwrap();
    let seeds = ["small-native", "--set", "gate.seeds=3"];
    let (code, _, err) = strict(dir.path(), &[&["--bless"], &seeds[..]].concat());
    assert_eq!(code, 0, "{err}");
    let (code, out, _) = strict(dir.path(), &[&["--all"], &seeds[..]].concat());
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("final loss over seeds"), "{out}");
    assert!(out.contains("gradient norm, seed 2"), "{out}");
    // With a learning rate of almost zero, the final loss is worse for every seed.
    let idle = ["--set", "train.lr=1e-9"];
    let (code, out, _) = strict(dir.path(), &[&seeds[..], &idle].concat());
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

/// A scenario without a baseline does not affect the others: they are checked, and the reports say
/// what is missing.
#[test]
fn a_missing_baseline_is_a_finding_beside_the_others() {
    let dir = blessed(&["small-linear", "small-cnn"]);
    let broken = dir.path().join("small-cnn.toml");
    std::fs::write(&broken, "format = 7\n").unwrap();
    let junit = dir.path().join("junit.xml");
    let scenarios = ["small-native", "small-linear", "small-cnn"];
    let files = ["--json", "--junit", junit.to_str().unwrap()];
    let (code, out, err) = strict(dir.path(), &[&scenarios[..], &files].concat());
    assert_eq!(code, 2, "{out}{err}");
    let verdicts: Vec<Value> = out
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let reported: Vec<_> = verdicts
        .iter()
        .map(|v| {
            (
                v["scenario"].as_str().unwrap(),
                v["pass"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        reported,
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
        // These come in addition to the findings that need no baseline.
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
        xml.contains("message=\"no baseline to compare with") && xml.contains("small-native.toml"),
        "{xml}"
    );
    // A regression in another scenario does not change the status, but is reported.
    let planted = ["small-native", "small-linear", "--inject-fault", "memory"];
    let (code, out, _) = strict(dir.path(), &planted);
    assert_eq!(code, 2, "{out}");
    assert!(
        out.contains("REGRESSION") && out.contains("no baseline to compare with"),
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
            "mine.toml: is not a baseline; it is not overwritten",
        ),
        (
            &["small-native", "--baseline", &at],
            2,
            "there is no baseline of `small-native`",
        ),
        (&["small-linear", "--baseline", &broken], 2, "has format 7"),
        (&["small-linear"], 2, "--baseline"),
        (
            &["no-such", "--baseline", &at],
            2,
            "no such file or shipped scenario",
        ),
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
                "--inject-fault",
                "stale",
                "--against",
                env!("CARGO_BIN_EXE_shardlab"),
            ],
            2,
            "small-ddp: --inject-fault stale: nothing is gathered in forward",
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
    // This binary is not shardlab.
    let (code, _, err) = call(&["gate", "small-linear", "--against", "false"]);
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("false gate --help"), "{err}");
}

/// Creates a program in a folder and returns its path.
fn script(dir: &Path, name: &str, text: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// A scenario that the old version does not know is skipped, but violations of its own limits fail.
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
        "--inject-fault",
        "stale",
    ];
    let (code, out, _) = call(&args);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("[CHK-UNINIT]"), "{out}");
    // A call that compares nothing does not pass.
    let (code, out, err) = call(&["gate", "--against", &old, "--pairs", "0", "small-native"]);
    assert_eq!(code, 3, "{out}{err}");
    assert!(out.contains("small-native: pass"), "{out}");
    assert!(err.contains("for any scenario of this call"), "{err}");
}

/// For the new version, exit status 2 of the old one means that it does not know a scenario yet.
#[cfg(target_os = "linux")]
#[test]
fn a_baseline_that_cannot_be_written_is_no_bad_input() {
    let (code, _, err) = gate(Path::new("/proc"), &["--bless", "small-linear"]);
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("/proc/small-linear.toml: "), "{err}");
}

/// A measured slow-down fails only because of the ratio of interleaved runs. A fake old version
/// reports its times.
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

/// A revision is checked out separately, built, called, and removed. Here, a copy replaces the
/// build, because cargo itself is not under test.
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
    std::fs::write(
        repository.join("Cargo.toml"),
        "[package]\nname = \"shardlab\"\n",
    )
    .unwrap();
    for text in ["old", "new"] {
        std::fs::write(repository.join("which"), text).unwrap();
        git(&["add", "which", "Cargo.toml"]);
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
    // No work tree is left, and the next call works.
    assert_eq!(git(&["worktree", "list"]).lines().count(), 1);
    let (code, out) = gate(&[&base[..], &["HEAD~1", "--inject-fault", "memory"]].concat());
    assert_eq!(code, 1, "{out}");
    let (code, out) = gate(&[&base[..], &["HEAD"]].concat());
    assert_eq!(code, 3, "the new revision does not build here: {out}");
    assert_eq!(git(&["worktree", "list"]).lines().count(), 1);
    let (code, out) = gate(&[&base[..], &["no-such"]].concat());
    assert_eq!(code, 2, "{out}");
    assert!(out.contains("git knows no revision `no-such`"), "{out}");
    // The same for `compare`.
    let (code, out) = gate(&["compare", "small-linear", "--rev-a", "HEAD~1"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("predicted by revision HEAD~1"), "{out}");
}

/// A git repository with a scenario, its model options and its budget, but without shardlab's
/// sources.
struct Team {
    dir: tempfile::TempDir,
}

impl Team {
    const JOB: &'static str = "extends = \"base.toml\"\n\n[gate]\nmax_memory = \"60GiB\"\n";
    const BASE: &'static str = "[model]\npreset = \"llama3.2-1b\"\nlayers = 4\n\n[train]\nseq_len = 2048\nrecompute = \"full\"\n\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n\n[fsdp]\npolicy = \"fsdp2\"\n";

    fn new() -> Self {
        let team = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        team.git(&["init", "--quiet"]);
        team.write("jobs/job.toml", Self::JOB);
        team.write("jobs/base.toml", Self::BASE);
        team.commit();
        team
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn git(&self, args: &[&str]) {
        let output = std::process::Command::new("git")
            .current_dir(self.path())
            .args(["-c", "user.name=t", "-c", "user.email=t@t"])
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn commit(&self) {
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "-m", "x"]);
    }

    /// Returns the exit status of a call in the repository, and its output with errors.
    fn call(&self, args: &[&str]) -> (i32, String) {
        let output = shardlab(args)
            .current_dir(self.path())
            .env_remove("GITHUB_ACTIONS")
            .env_remove("GITHUB_STEP_SUMMARY")
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code().unwrap(),
            text(output.stdout) + &text(output.stderr),
        )
    }
}

/// Replaces runs of blanks with single blanks.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn budgets_need_no_baseline() {
    let team = Team::new();
    let (code, out) = team.call(&["gate", "jobs/job.toml", "--all"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("no baseline was compared"), "{out}");
    assert!(
        out.contains("budget, reserved") && out.contains("fits"),
        "{out}"
    );
    // A folder without a baseline behaves in the same way, and the message says where the gate
    // searched.
    let (code, out) = team.call(&["gate", "jobs/job.toml", "--baseline", "baselines"]);
    assert_eq!(code, 0, "{out}");
    assert!(
        flat(&out).contains("no baseline was compared: baselines/job.toml does not exist"),
        "{out}"
    );
    let over = ["gate", "jobs/job.toml", "--set", "gate.max_memory=1GiB"];
    let (code, out) = team.call(&over);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("over the memory budget: "), "{out}");
    // A job that does not fit fails without a baseline.
    let large = [
        "--set",
        "train.micro_batch=512",
        "--set",
        "gate.max_memory=1TiB",
    ];
    let (code, out) = team.call(&[&["gate", "jobs/job.toml"], &large[..]].concat());
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("the step does not fit the device"), "{out}");
    // Without a budget, or with the preset `strict`, a baseline is required.
    for (args, words) in [
        (
            vec!["jobs/base.toml"],
            "has neither a baseline nor a budget",
        ),
        (
            vec!["jobs/job.toml", "--preset", "strict"],
            "preset strict compares with a baseline",
        ),
        (
            vec![
                "jobs/job.toml",
                "--preset",
                "strict",
                "--baseline",
                "baselines",
            ],
            "there is no baseline of `job`",
        ),
        (
            vec!["jobs/base.toml", "--baseline", "baselines"],
            "there is no baseline of `base`",
        ),
    ] {
        let (code, out) = team.call(&[&["gate"], &args[..]].concat());
        assert_eq!(code, 2, "{out}");
        assert!(flat(&out).contains(words), "{words}: {out}");
    }
}

/// An increase fails, and its cause comes first. An improvement needs no new baseline.
#[test]
fn the_budget_preset_fails_on_growth_and_names_its_cause() {
    let team = Team::new();
    let at = ["gate", "jobs/job.toml", "--baseline", "baselines"];
    let (code, out) = team.call(&[&at[..], &["--bless"]].concat());
    assert_eq!(code, 0, "{out}");
    let (code, out) = team.call(&at);
    assert_eq!((code, out.contains("pass")), (0, true), "{out}");
    team.write("jobs/base.toml", &Team::BASE.replace("full", "none"));
    let (code, out) = team.call(&at);
    assert_eq!(code, 1, "{out}");
    assert_narrow(&out);
    let lines: Vec<&str> = out.lines().filter(|l| !l.is_empty()).collect();
    assert!(lines[0].starts_with("job: FAIL ("), "{out}");
    assert!(lines[0].contains(" comparisons failed"), "{out}");
    assert!(
        lines[1].starts_with("  scenario changed: train.recompute full → none"),
        "{out}"
    );
    assert!(out.contains("GiB") && !out.contains(" B "), "{out}");
    assert!(!out.contains("digest"), "{out}");
    // The reverse change passes, and the output says what has changed.
    let (code, out) = team.call(&[&at[..], &["--bless"]].concat());
    assert_eq!(code, 0, "{out}");
    team.write("jobs/base.toml", Team::BASE);
    let less_time = ["--set", "gate.step_time=0.9"];
    let (code, out) = team.call(&[&at[..], &less_time].concat());
    assert_eq!(code, 0, "{out}");
    assert!(
        out.contains("note: scenario changed: train.recompute none → full"),
        "{out}"
    );
}

/// This binary reads the revisions of a repository that contains only scenarios.
#[test]
fn revisions_of_a_repository_of_scenarios_are_compared() {
    let team = Team::new();
    let at = ["gate", "jobs/job.toml", "--against-rev"];
    let (code, out) = team.call(&[&at[..], &["HEAD"]].concat());
    assert_eq!(code, 0, "{out}");
    // This is an uncommitted change of a file that the scenario extends.
    team.write("jobs/base.toml", &Team::BASE.replace("full", "none"));
    let (code, out) = team.call(&[&at[..], &["HEAD"]].concat());
    assert_eq!(code, 1, "{out}");
    assert!(
        out.contains("scenario changed: train.recompute full → none"),
        "{out}"
    );
    team.commit();
    let (code, _) = team.call(&[&at[..], &["HEAD"]].concat());
    assert_eq!(code, 0);
    let (code, out) = team.call(&[&at[..], &["HEAD~1"]].concat());
    assert_eq!(code, 1, "{out}");
    // Nothing is left behind: no work tree, and no changed index.
    let status = std::process::Command::new("git")
        .current_dir(team.path())
        .args(["status", "--porcelain"])
        .output()
        .unwrap();
    assert!(status.stdout.is_empty(), "{status:?}");
    // A new scenario is only checked against its budget.
    team.write("jobs/new.toml", Team::JOB);
    let new = ["gate", "jobs/new.toml", "--against-rev", "HEAD"];
    let (code, out) = team.call(&new);
    assert_eq!(code, 0, "{out}");
    assert!(
        flat(&out).contains("jobs/new.toml is new since HEAD"),
        "{out}"
    );
    let (code, out) = team.call(&[&new[..], &["--set", "gate.max_memory=1GiB"]].concat());
    assert_eq!(code, 1, "{out}");
    // Errors in the old version are reported, and a call that compares nothing does not pass.
    team.write("jobs/broken.toml", "[model]\nlayer = 4\n");
    team.commit();
    team.write("jobs/broken.toml", Team::JOB);
    let (code, out) = team.call(&["gate", "jobs/broken.toml", "--against-rev", "HEAD"]);
    assert_eq!(code, 3, "{out}");
    assert!(
        flat(&out).contains("the version of HEAD cannot be read: "),
        "{out}"
    );
    for (args, words) in [
        (
            ["jobs/job.toml", "no-such"],
            "git knows no revision `no-such`",
        ),
        (["small-linear", "HEAD"], "small-linear is not a file in "),
    ] {
        let (code, out) = team.call(&["gate", args[0], "--against-rev", args[1]]);
        assert_eq!(code, 2, "{out}");
        assert!(flat(&out).contains(words), "{words}: {out}");
    }
    std::fs::remove_dir_all(team.path().join(".git")).unwrap();
    let (code, out) = team.call(&[&at[..], &["HEAD"]].concat());
    assert_eq!(code, 2, "{out}");
    assert!(flat(&out).contains("is not in a git repository"), "{out}");
}

/// Baselines stay readable at any depth, for every policy.
#[test]
fn baselines_stay_short_at_any_depth() {
    let dir = tempfile::tempdir().unwrap();
    let lines = |scenario: &str, set: &[String]| {
        let mut args = vec!["--bless", "--no-exec", scenario];
        args.extend(set.iter().flat_map(|s| ["--set", s.as_str()]));
        let (code, _, err) = gate(dir.path(), &args);
        assert_eq!(code, 0, "{scenario} {set:?}: {err}");
        let text = std::fs::read_to_string(dir.path().join(format!("{scenario}.toml"))).unwrap();
        text.lines().count()
    };
    for (policy, depths) in [
        ("native", [8, 32, 1000]),
        ("fsdp2", [8, 32, 126]),
        ("megatron", [8, 32, 126]),
        ("megatron_v2", [8, 32, 126]),
    ] {
        for layers in depths {
            let set = [
                format!("fsdp.policy={policy}"),
                format!("model.layers={layers}"),
            ];
            let lines = lines("llama3-70b-64xh100", &set);
            assert!(lines < 250, "{policy}, {layers} layers: {lines} lines");
        }
    }
    for scenario in [
        "llama3-405b-1024xh100",
        "llama3-70b-hsdp",
        "llama3-70b-hfsdp",
    ] {
        let lines = lines(scenario, &[]);
        assert!(lines <= 210, "{scenario}: {lines} lines");
    }
}

/// The baselines of this repository's own gate.
#[test]
fn own_baselines_are_short() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/baselines");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines < 250, "{}: {lines} lines", path.display());
        seen += 1;
    }
    assert!(seen >= 20, "{seen}");
}

/// The composite action, parsed as GitHub parses it.
mod action {
    use std::collections::BTreeMap;

    /// A step that runs a script.
    pub(super) struct Step {
        pub(super) name: String,
        pub(super) env: BTreeMap<String, String>,
        pub(super) run: String,
    }

    pub(super) struct Action {
        /// Inputs and their defaults; `None` for a required input.
        pub(super) inputs: BTreeMap<String, Option<String>>,
        pub(super) steps: Vec<Step>,
    }

    fn indent(line: &str) -> usize {
        line.len() - line.trim_start().len()
    }

    fn scalar(text: &str) -> String {
        text.trim().trim_matches('\'').to_owned()
    }

    /// Parses the subset of YAML that the file uses.
    pub(super) fn read(text: &str) -> Action {
        let lines: Vec<&str> = text.lines().collect();
        let section = |title: &str| {
            let start = lines.iter().position(|l| *l == title).unwrap() + 1;
            let rest = lines[start..].iter().copied();
            rest.take_while(|l| l.is_empty() || l.starts_with(' '))
                .collect::<Vec<_>>()
        };
        let mut inputs: BTreeMap<String, Option<String>> = BTreeMap::new();
        let mut input = String::new();
        for line in section("inputs:") {
            let Some((key, value)) = line.trim().split_once(':') else {
                continue;
            };
            match (indent(line), key) {
                (2, name) => {
                    input = name.to_owned();
                    inputs.insert(input.clone(), None);
                }
                (4, "default") => {
                    inputs.insert(input.clone(), Some(scalar(value)));
                }
                _ => {}
            }
        }
        let mut steps = Vec::new();
        let runs = section("runs:");
        let mut i = 0;
        while i < runs.len() {
            if let Some(name) = runs[i].strip_prefix("    - name: ") {
                steps.push(Step {
                    name: name.to_owned(),
                    env: BTreeMap::new(),
                    run: String::new(),
                });
            } else if runs[i] == "      env:" {
                while i + 1 < runs.len() && indent(runs[i + 1]) == 8 {
                    i += 1;
                    let (key, value) = runs[i].trim().split_once(": ").unwrap();
                    let step = steps.last_mut().unwrap();
                    step.env.insert(key.to_owned(), scalar(value));
                }
            } else if runs[i] == "      run: |" {
                while i + 1 < runs.len() && (runs[i + 1].is_empty() || indent(runs[i + 1]) >= 8) {
                    i += 1;
                    let step = steps.last_mut().unwrap();
                    step.run.push_str(runs[i].get(8..).unwrap_or(""));
                    step.run.push('\n');
                }
            }
            i += 1;
        }
        steps.retain(|s| !s.run.is_empty());
        Action { inputs, steps }
    }
}

/// Runs the steps of the action in a clean repository with a scenario and a baseline, without
/// shardlab's sources and without shardlab in `PATH`.
#[test]
fn the_action_gates_a_repository_of_scenarios() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let action = action::read(&std::fs::read_to_string(root.join("action.yml")).unwrap());
    let names: Vec<&str> = action.steps.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["Find the version", "Install shardlab", "Gate"]);
    let team = Team::new();
    let me = env!("CARGO_BIN_EXE_shardlab");
    let blessed = [
        "gate",
        "jobs/job.toml",
        "--baseline",
        "baselines",
        "--bless",
    ];
    assert_eq!(team.call(&blessed).0, 0);
    team.commit();
    let temp = tempfile::tempdir().unwrap();
    // A clean checkout of the action contains its manifests and sources.
    let sources = temp.path().join("action");
    std::fs::create_dir(&sources).unwrap();
    std::fs::write(sources.join("Cargo.toml"), "[package]\n").unwrap();
    let act = |with: &[(&str, &str)]| {
        let with: std::collections::BTreeMap<&str, &str> = with.iter().copied().collect();
        for name in with.keys() {
            assert!(action.inputs.contains_key(*name), "no input {name}");
        }
        let value = |text: &str| {
            let Some(name) = text
                .strip_prefix("${{ inputs.")
                .and_then(|t| t.strip_suffix(" }}"))
            else {
                panic!("{text}: only inputs are expected in a step's environment");
            };
            let default = action.inputs[name].clone();
            with.get(name)
                .map(|v| (*v).to_owned())
                .or(default)
                .unwrap_or_default()
        };
        let file = |name: &str| {
            let path = temp.path().join(name);
            std::fs::write(&path, "").unwrap();
            path
        };
        let (env, outputs, summary) = (file("env"), file("output"), file("summary"));
        let mut log = String::new();
        let mut code = 0;
        for step in &action.steps {
            let set = std::fs::read_to_string(&env).unwrap();
            let set = set.lines().map(|l| l.split_once('=').unwrap());
            let output = std::process::Command::new("bash")
                .args(["--noprofile", "--norc", "-eo", "pipefail", "-c", &step.run])
                .current_dir(team.path())
                .env_clear()
                .env("PATH", "/usr/local/bin:/usr/bin:/bin")
                .env("HOME", temp.path())
                .env("GITHUB_ACTIONS", "true")
                .env("GITHUB_ACTION_PATH", &sources)
                .env("GITHUB_ENV", &env)
                .env("GITHUB_OUTPUT", &outputs)
                .env("GITHUB_STEP_SUMMARY", &summary)
                .env("RUNNER_TEMP", temp.path())
                .envs(set)
                .envs(step.env.iter().map(|(k, v)| (k.as_str(), value(v))))
                .output()
                .unwrap();
            log += &String::from_utf8(output.stdout).unwrap();
            log += &String::from_utf8(output.stderr).unwrap();
            code = output.status.code().unwrap();
            if code != 0 {
                break;
            }
        }
        let hash = std::fs::read_to_string(&outputs).unwrap();
        assert!(
            hash.starts_with("hash=") && hash.trim().len() == 21,
            "{hash}"
        );
        (code, log, std::fs::read_to_string(&summary).unwrap())
    };
    let base = [
        ("scenarios", "jobs/job*.toml"),
        ("baseline", "baselines"),
        ("binary", me),
    ];
    let (code, log, summary) = act(&base);
    assert_eq!(code, 0, "{log}");
    assert!(log.starts_with("shardlab "), "{log}");
    assert!(summary.starts_with("## Gate: passed"), "{summary}");
    // A change of the scenario fails the job. The annotation and the summary start with the cause.
    team.write("jobs/base.toml", &Team::BASE.replace("full", "none"));
    let (code, log, summary) = act(&base);
    assert_eq!(code, 1, "{log}");
    assert!(log.contains("::error file=jobs/base.toml,line=7,"), "{log}");
    assert!(
        log.contains("title=job%3A scenario changed%3A train.recompute full → none::"),
        "{log}"
    );
    assert!(
        summary.contains("**scenario changed: train.recompute full → none**"),
        "{summary}"
    );
    let (code, log, _) = act(&[
        ("scenarios", "jobs/job.toml"),
        ("against-rev", "HEAD"),
        ("binary", me),
    ]);
    assert_eq!(code, 1, "{log}");
    // With budgets only, a preset, and additional arguments.
    let (code, log, _) = act(&[
        ("scenarios", "jobs/job.toml"),
        ("binary", me),
        ("args", "--set gate.max_memory=1GiB --all"),
    ]);
    assert_eq!(code, 1, "{log}");
    assert!(log.contains("over the memory budget"), "{log}");
    let (code, log, _) = act(&[&base[..], &[("preset", "lax")]].concat());
    assert_eq!(code, 2, "{log}");
    assert!(log.contains("[possible values: budget, strict]"), "{log}");
    let (code, log, _) = act(&[("scenarios", "jobs/job.toml"), ("binary", "no/such")]);
    assert_ne!(code, 0, "{log}");
}

/// The example workflow only uses inputs that the action has.
#[test]
fn the_example_workflow_fits_the_action() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let action = action::read(&std::fs::read_to_string(root.join("action.yml")).unwrap());
    let workflow = std::fs::read_to_string(root.join("docs/tutorials/github-gate.yml")).unwrap();
    let calls: Vec<&str> = workflow
        .split("- uses: OWNER/shardlab@REF\n")
        .skip(1)
        .collect();
    assert_eq!(calls.len(), 2);
    for call in calls {
        let with = call
            .lines()
            .skip(1)
            .take_while(|l| l.starts_with("          "));
        let names: Vec<&str> = with.map(|l| l.trim().split_once(':').unwrap().0).collect();
        for name in &names {
            assert!(action.inputs.contains_key(*name), "no input {name}");
        }
        for (name, default) in &action.inputs {
            assert!(
                default.is_some() || names.contains(&name.as_str()),
                "{name} is required"
            );
        }
    }
}

/// On a full disk, the exit status says that the run has failed, and no partial baseline is left.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| {
        let output = std::process::Command::new(args[0])
            .args(&args[1..])
            .output();
        output.is_ok_and(|o| o.status.success())
    };
    let at = dir.path().display().to_string();
    // Only root may mount. For other users, only the writer's unit test covers this.
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", &at]) {
        return;
    }
    std::fs::write(dir.path().join("filler"), vec![0; 4096]).ok();
    let (code, _, err) = gate(dir.path(), &["--bless", "small-linear"]);
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .filter(|n| n != "filler")
        .collect();
    assert!(mount(&["umount", &at]));
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("No space left on device"), "{err}");
    assert!(left.is_empty(), "{left:?}");
}
