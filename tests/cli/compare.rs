//! `shardlab compare`.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;

fn refused(args: &[&str]) -> String {
    let output = shardlab(args).assert().code(2);
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

fn metric(pair: &Value, name: &str) -> [f64; 2] {
    let metrics = pair["metrics"].as_array().unwrap();
    let found = metrics.iter().find(|m| m["name"] == name).unwrap();
    [0, 1].map(|i| found["values"][i].as_f64().unwrap())
}

/// Acceptance: a comparison of runs shows the gain of forward prefetch, and its reason.
#[test]
fn the_gain_of_prefetch_and_its_cause() {
    let path = "scenarios/llama3-8b-4xh200.toml";
    let text = stdout(&["compare", path, path, "--set-b", "fsdp.prefetch_forward=0"]);
    assert_narrow(&text);
    let words: Vec<&str> = text.split_whitespace().collect();
    let prose = words.join(" ");
    for part in [
        "Comparable: same model, hardware, mesh and batch; differ in fsdp.prefetch_forward.",
        "B is 2.4 % slower: ",
        "fsdp.prefetch_forward: 1 → 0.",
        " exposed time (gate +",
        "all_gather in forward: A waits ",
        ": it is not prefetched and starts late. A prefetches 32 of 33, B none.",
        "Memory is the same",
    ] {
        assert!(prose.contains(part), "{part}: {text}");
    }
    // Unchanged values are not listed.
    for part in ["optimizer_state", "reduce_scatter", "Aligned by", "+0.000"] {
        assert!(!text.contains(part), "{part}: {text}");
    }
    let args = [
        "compare",
        path,
        "--all",
        "--set-b",
        "fsdp.prefetch_forward=0",
    ];
    let everything = stdout(&args);
    for part in [
        "optimizer_state",
        "reduce_scatter",
        "+0.000",
        "Both peak in",
        "\noption ",
    ] {
        assert!(everything.contains(part), "{part}: {everything}");
    }
    let pair = &json(&[
        "compare",
        path,
        "--set-b",
        "fsdp.prefetch_forward=0",
        "--json",
    ])[0];
    let [with, without] = metric(pair, "step_ms");
    // The numbers equal those of `sim`.
    for (expected, set) in [(with, "1"), (without, "0")] {
        let set = format!("fsdp.prefetch_forward={set}");
        let sim = &json(&["sim", path, "--set", &set, "--json"])[0];
        assert_eq!(sim["step_ms"]["median"].as_f64(), Some(expected));
        assert!(sim["parameters"]["total"].as_u64() > Some(8_000_000_000));
        for run in [0, 1] {
            assert_eq!(pair["runs"][run]["parameters"], sim["parameters"]);
        }
    }
    assert!(without > with);
    assert_eq!(pair["step"]["verdict"], "regressed");
    assert_eq!(pair["waits"][0]["of"]["name"], "all_gather");
    assert_eq!(pair["waits"][0]["of"]["phase"], "forward");
    assert_eq!(pair["waits"][0]["cause"][1], "gate");
}

/// Waiting times change the clock under the power limit. The text says so, with the numbers of
/// `sim`.
#[test]
fn a_differing_clock_is_reported() {
    let set = |value: &'static str| ["--set", value];
    let base = [
        set("mesh.hardware=h200-nvlink-exec"),
        set("fsdp.policy=native"),
        set("compile.mode=regions"),
    ];
    let base = base.concat();
    let args = [&["compare", "peers-1b"][..], &base].concat();
    let text = stdout(&[&args[..], &["--set-b", "fsdp.prefetch_backward=0"]].concat());
    assert_narrow(&text);
    let prose = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let clock = |more: &[&str]| {
        let args = [&["sim", "peers-1b", "--json"][..], &base, more].concat();
        let facts = json(&args)[0]["environment"].clone();
        let of = |name: &str| facts[name].as_str().unwrap().parse::<f64>().unwrap();
        let (factor, share) = (of("power.arithmetic_factor"), of("power.arithmetic_share"));
        (100.0 * (factor - 1.0), 100.0 * share)
    };
    let (a, b) = (clock(&[]), clock(&["--set", "fsdp.prefetch_backward=0"]));
    assert!(a.0 > b.0 && a.1 > b.1, "{a:?} {b:?}");
    let sentence = format!(
        "The power limit slows matmuls and attention by {:.1} % in A ({:.0} % of its step), by {:.1} % in B ({:.0} % of its step).",
        a.0, a.1, b.0, b.1
    );
    assert!(prose.contains(&sentence), "{sentence}\n{text}");
    // Equal clocks, and profiles without a power limit, are not mentioned.
    let equal = [&["compare", "peers-1b", "peers-1b"][..], &base].concat();
    let unknown = ["compare", "peers-1b", "--set-b", "fsdp.prefetch_backward=0"];
    for args in [&equal[..], &unknown] {
        assert!(!stdout(args).contains("power limit"), "{args:?}");
    }
}

#[test]
fn predicted_against_measured() {
    let args = ["compare", "llama-tiny", "--exec-b", "--steps", "6"];
    let pair = &json(&[&args[..], &["--json"]].concat())[0];
    assert_eq!(pair["alignment"]["by"], "instruction");
    assert_eq!(pair["alignment"]["unmatched"], serde_json::json!([0, 0]));
    assert_eq!(pair["prediction"]["measured"], 1);
    assert!(pair["prediction"]["by_kind"].as_array().unwrap().len() > 3);
    assert_eq!(pair["prediction"]["worst"].as_array().unwrap().len(), 10);
    // Sim and exec agree on the engine's memory to the byte.
    let [sim, exec] = metric(pair, "allocated_gib");
    assert_eq!(sim, exec);
    assert_eq!(pair["comparable"]["level"], "partial");
    assert_eq!(pair["comparable"]["reasons"][1], "predicted vs. measured");
    let text = stdout(&args);
    assert_narrow(&text);
    assert!(text.contains("worst predictions"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("the prediction is "), "{text}");
    // A setting that only one of the runs has does not count as a difference.
    assert!(!text.contains("seconds.devices"), "{text}");
    // Neither run is an improvement on the other.
    let tests = text.lines().find(|l| l.starts_with("tests ")).unwrap();
    let words = ["shorter: ", "longer: ", "equal: ", "inconclusive: "];
    assert!(words.iter().any(|w| tests.contains(w)), "{tests}");
}

#[test]
fn losses_are_overlaid_and_equal_for_schedules_that_do_not_matter() {
    let args = ["compare", "llama-tiny", "--exec", "--steps", "4", "--set-b"];
    let same = &json(&[&args[..], &["fsdp.prefetch_forward=0", "--json"]].concat())[0];
    assert_eq!(same["losses"]["diverges"], Value::Null);
    assert_eq!(same["losses"]["steps"], serde_json::json!([4, 4]));
    let other = &json(&[&args[..], &["train.lr=0.01", "--json"]].concat())[0];
    // The first loss is computed before any update.
    assert_eq!(other["losses"]["diverges"]["step"], 2);
    let text = stdout(&[&args[..], &["train.lr=0.01"]].concat());
    assert!(text.contains("The loss differs from step 2 on"), "{text}");
}

#[test]
fn kept_runs_folders_and_names_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    stdout(&["sim", "peers-tiny", "--store", path]);
    stdout(&[
        "sim",
        "peers-tiny",
        "--set",
        "fsdp.prefetch_forward=0",
        "--store",
        path,
    ]);
    stdout(&["runs", "tag", "last~1", "baseline", "--store", path]);
    let runs = json(&["runs", "--json", "--store", path]);
    let id = |i: usize| runs[i]["id"].as_str().unwrap();
    let folder = format!("{path}/{}", id(0));
    let step = |args: &[&str]| {
        let all = [&["compare"], args, &["--store", path, "--json"]].concat();
        metric(&json(&all)[0], "step_ms")
    };
    let expected = step(&["peers-tiny", "--set-b", "fsdp.prefetch_forward=0"]);
    assert_eq!(step(&["baseline", "last"]), expected);
    assert_eq!(step(&[&folder, &id(1)[19..]]), expected);
    assert_eq!(step(&["peers-tiny", "last"]), expected);
    // A saved run has the same content as a new one.
    let whole = |run: &str| {
        let args = ["compare", run, "prefetch-0", "--store", path, "--json"];
        let mut pair = json(&args).remove(0);
        let fields = pair.as_object_mut().unwrap();
        // Only saved runs have facts about the machine.
        fields.remove("environment");
        pair
    };
    assert_eq!(whole("baseline"), whole("peers-tiny"));
}

#[test]
fn many_runs_make_a_table() {
    let args = ["compare", "prefetch-0", "prefetch-1", "prefetch-2"];
    let text = stdout(&args);
    assert_narrow(&text);
    assert!(text.lines().next().unwrap().contains("prefetch"), "{text}");
    let matrix = &json(&[&args[..], &["--json"]].concat())[0];
    assert_eq!(matrix["rows"].as_array().unwrap().len(), 3);
    let keys: Vec<&str> = matrix["options"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o["key"].as_str().unwrap())
        .collect();
    assert!(keys.iter().any(|k| k.contains("prefetch")), "{keys:?}");
    assert!(
        matrix["rows"]
            .as_array()
            .unwrap()
            .iter()
            .any(|r| r["on_front"] == true)
    );
}

/// Training on this machine is unrelated to a simulated job of another model, so no view compares
/// their times.
#[test]
fn unrelated_runs_are_not_judged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    stdout(&["exec", "llama-tiny", "--steps", "4", "--store", path]);
    let args = ["compare", "last", "peers-tiny", "--store", path];
    let text = stdout(&args);
    assert_narrow(&text);
    let prose = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let first = "Not comparable: CPU training of llama-tiny vs. simulated peers-tiny on 4 x h200-nvlink; different models on \
                 different machines; times are not compared.";
    assert!(prose.contains(first), "{text}");
    for part in [
        "slower",
        "faster",
        "Cliff",
        "regressed",
        "improved",
        "wall time",
        "change",
    ] {
        assert!(!text.contains(part), "{part}: {text}");
    }
    let pair = &json(&[&args[..], &["--json"]].concat())[0];
    assert_eq!(pair["comparable"]["level"], "none");
    for field in ["step", "prediction"] {
        assert_eq!(pair[field], Value::Null, "{field}");
    }
    // Neither is marked as the best.
    let args = [
        "compare",
        "last",
        "peers-tiny",
        "toy-linear",
        "--store",
        path,
    ];
    let text = stdout(&args);
    assert!(text.contains("Not comparable"), "{text}");
    assert!(!text.contains('*') && !text.contains("front"), "{text}");
    let matrix = &json(&[&args[..], &["--json"]].concat())[0];
    assert_eq!(matrix["comparable"]["level"], "none");
    let rows = matrix["rows"].as_array().unwrap();
    assert!(rows.iter().all(|r| r["on_front"] == false), "{rows:?}");
    let report = dir.path().join("report.md");
    let report = report.to_str().unwrap();
    stdout(&[
        "report",
        "last",
        "peers-tiny",
        "--store",
        path,
        "--out",
        report,
    ]);
    let text = std::fs::read_to_string(report).unwrap();
    assert!(text.contains("Not comparable"), "{text}");
    assert!(!text.contains('★') && !text.contains("slower"), "{text}");
}

/// Prefetching two units ahead instead of one gains 0.1 % of the time for 1.4 % more memory.
#[test]
fn ties_are_not_stars() {
    let base = ["compare", "prefetch-0", "prefetch-1", "prefetch-2"];
    let stars = |more: &[&str]| {
        let text = stdout(&[&base[..], more].concat());
        let marked = |name: &str| {
            let row = text.lines().find(|l| l.contains(name)).unwrap();
            row.split_whitespace()
                .filter(|cell| cell.starts_with('*'))
                .count()
        };
        ["prefetch-0", "prefetch-1", "prefetch-2"].map(marked)
    };
    let front = |more: &[&str]| {
        let matrix = json(&[&base[..], more, &["--json"]].concat()).remove(0);
        [0, 1, 2].map(|i| matrix["rows"][i]["on_front"] == true)
    };
    let usual = ["--tolerance", "0.5%"];
    assert_eq!(front(&usual), [true, true, false]);
    assert_eq!(stars(&usual)[2], 0);
    assert!(stars(&usual)[1] > 0);
    // The hardware is an estimate, so its error is used as the default tolerance.
    let text = stdout(&base);
    let (_, within) = text.split_once("Values within ").unwrap();
    let (percent, rest) = within.split_once(" %").unwrap();
    assert!(percent.parse::<f64>().unwrap() > 0.5, "{text}");
    assert!(rest.starts_with(" are equal"), "{text}");
    // With an exact tolerance, it is faster.
    let exact = ["--tolerance", "0%"];
    assert_eq!(front(&exact), [true, true, true]);
    assert!(stars(&exact)[2] > 0);
    // With a tolerance of 40 %, only memory differs.
    let wide = ["--tolerance", "40%"];
    assert_eq!(front(&wide), [true, false, false]);
    // Among identical runs, none is the best.
    let same = ["compare", "prefetch-1", "prefetch-1", "prefetch-1"];
    let text = stdout(&[&same[..], &usual].concat());
    assert!(
        text.contains("All runs that fit are equal within 0.5 %"),
        "{text}"
    );
    let error = refused(&[&base[..], &["--tolerance", "2"]].concat());
    assert!(error.contains("for example 0.5%"), "{error}");
}

/// Scenarios that differ in dozens of options: columns are dropped, but words and numbers are never
/// broken.
#[test]
fn a_table_of_unlike_runs_can_be_read() {
    let names = ["llama3-8b-4xh200", "small-native", "toy-cnn"];
    let args = ["compare", names[0], names[1], names[2]];
    let text = stdout(&args);
    assert_narrow(&text);
    let matrix = &json(&[&args[..], &["--json"]].concat())[0];
    let metrics = matrix["metrics"].as_array().unwrap();
    let steps = metrics.iter().find(|m| m["name"] == "step_ms").unwrap();
    for (name, step) in names.iter().zip(steps["values"].as_array().unwrap()) {
        let step = format!("{:.2} ", step.as_f64().unwrap());
        // The first lines also contain the names of runs.
        let row = text.lines().rfind(|l| l.contains(name)).unwrap();
        // Numbers have thousands separators.
        assert!(row.replace(',', "").contains(&step), "{step} in {row}");
    }
    assert!(text.contains("Also different: "), "{text}");
}

#[test]
fn another_binary_makes_the_same_run() {
    let this = env!("CARGO_BIN_EXE_shardlab");
    let args = ["compare", "peers-tiny", "--binary-a", this, "--json"];
    let pair = &json(&args)[0];
    assert_eq!(pair["step"]["verdict"], "equal");
    assert_eq!(pair["changes"].as_array().unwrap().len(), 0);
    let error = refused(&["compare", "peers-tiny", "--binary-a", "/no/such/shardlab"]);
    assert!(error.contains("/no/such/shardlab"), "{error}");
}

#[test]
fn what_cannot_be_compared_is_said() {
    let error = refused(&["compare", "peers-tiny"]);
    assert!(error.contains("--set-b"), "{error}");
    let error = refused(&["compare", "peers-tny", "peers-tiny"]);
    assert!(
        error.contains("nearest scenario is `peers-tiny`"),
        "{error}"
    );
    let error = refused(&["compare", "a", "b", "c", "--set-b", "x.y=1"]);
    assert!(error.contains("two runs"), "{error}");
    let error = refused(&["compare", "scenarios", "peers-tiny"]);
    assert!(error.contains("no run.json"), "{error}");
    let error = refused(&["compare", "no/such.toml", "peers-tiny"]);
    assert!(error.contains("no/such.toml"), "{error}");
    let error = refused(&["compare", "peers-tiny", "--set-b", "fsdp.prefetch_foward=0"]);
    assert!(error.contains("prefetch_forward"), "{error}");
}

/// A gate baseline is compared with runs: its prediction with predictions, its training run with
/// training runs.
#[test]
fn baselines_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display().to_string();
    let set = ["--set", "train.steps=4"];
    stdout(
        &[
            &["gate", "--bless", "--baseline", &at, "small-native"],
            &set[..],
        ]
        .concat(),
    );
    let name = "baseline:small-native";
    // A single baseline is compared with the current state of its scenario, with the same options.
    let args = ["compare", name, "--baseline", &at];
    let text = stdout(&args);
    assert_narrow(&text);
    for part in [
        "The programs are the same.",
        "Memory is the same",
        "A has no recorded instructions.",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let pair = &json(&[&args[..], &["--json"]].concat())[0];
    let [a, b] = metric(pair, "step_ms");
    assert_eq!((a, pair["step"]["verdict"].as_str()), (b, Some("equal")));
    assert_eq!(pair["options"].as_array().unwrap().len(), 0);
    assert_eq!(pair["breakdown"]["by_phase"].as_array().unwrap().len(), 0);
    // An option has changed since the baseline.
    let changed = stdout(&[&args[..], &["--set-b", "fsdp.prefetch_forward=0"]].concat());
    assert!(changed.contains("The programs differ: "), "{changed}");
    // The baseline file is compared with a training run: losses are bitwise equal, and no stored
    // time is used.
    let file = format!("{at}/small-native.toml");
    let args = [&["compare", &file, "small-native", "--exec-b"], &set[..]].concat();
    let pair = &json(&[&args[..], &["--json"]].concat())[0];
    assert_eq!(pair["runs"][0]["kind"], "exec");
    assert_eq!(pair["losses"]["steps"], serde_json::json!([4, 4]));
    assert_eq!(pair["losses"]["diverges"], Value::Null);
    assert_eq!(pair["step"], Value::Null);
    let [a, b] = metric(pair, "allocated_gib");
    assert_eq!(a, b);
    let text = stdout(&args);
    assert!(text.contains("Memory is the same"), "{text}");
    // For several runs, a table is printed.
    let text = stdout(&["compare", &file, "small-native", "small-fsdp2"]);
    assert!(text.contains("front"), "{text}");
    for (args, words) in [
        (
            &["baseline:small-nativ"][..],
            "did you mean `small-native`?",
        ),
        (
            &["baseline:small-native", "--set-a", "train.lr=1"],
            "only apply to scenarios",
        ),
    ] {
        let error = refused(&[&["compare", "--baseline", &at], args].concat());
        assert!(error.contains(words), "{error}");
    }
}

/// Options of `exec` are passed on to another binary.
#[test]
fn another_binary_gets_the_device() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (other, said) = (dir.path().join("other"), dir.path().join("said"));
    let me = env!("CARGO_BIN_EXE_shardlab");
    let text = format!(
        "#!/bin/sh\necho \"$@\" > {}\nexec {me} \"$@\"\n",
        said.display()
    );
    std::fs::write(&other, text).unwrap();
    std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o755)).unwrap();
    let other = other.display().to_string();
    stdout(&[
        "compare",
        "small-linear",
        "--exec",
        "--binary-b",
        &other,
        "--steps",
        "3",
        "--threads",
        "2",
        "--delays",
        "5",
    ]);
    let said = std::fs::read_to_string(said).unwrap();
    assert!(said.contains("--threads 2 --delays 5 --steps 3"), "{said}");
}

/// The tables describe the round with the median step time, which the statistics are about.
#[test]
fn tables_show_the_median_round() {
    let args = ["compare", "llama-tiny", "--exec", "--steps", "4"];
    let rounds = ["--rounds", "3", "--set-b", "fsdp.prefetch_forward=0"];
    let pair = &json(&[&args[..], &rounds, &["--json"]].concat())[0];
    let of_tables = metric(pair, "step_ms");
    let of_tests = [0, 1].map(|i| pair["step"]["medians"][i].as_f64().unwrap());
    for (a, b) in of_tables.into_iter().zip(of_tests) {
        assert!((a / b - 1.0).abs() < 1e-9, "{of_tables:?} {of_tests:?}");
    }
    let text = stdout(&[&args[..], &rounds].concat());
    let words: Vec<&str> = text.split_whitespace().collect();
    let origin = "(measured now, the median of 3 rounds: round ";
    assert_eq!(words.join(" ").matches(origin).count(), 2, "{text}");
}

/// Between two calls, the state of a machine changes.
#[test]
fn runs_of_separate_calls_are_marked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for name in ["r1", "r2", "r3"] {
        let args = ["exec", "llama-tiny", "--steps", "3", "--name", name];
        stdout(&[&args[..], &["--store", path]].concat());
    }
    let warns = |args: &[&str]| {
        let text = stdout(&[args, &["--store", path]].concat());
        let words: Vec<&str> = text.split_whitespace().collect();
        words.join(" ").contains("measured in separate calls")
    };
    assert!(warns(&["compare", "r1", "r2"]));
    assert!(warns(&["compare", "r1", "r2", "r3"]));
    assert!(warns(&["compare", "r1", "llama-tiny", "--exec-b"]));
    // A prediction is not a measurement, and one call measures both sides.
    assert!(!warns(&["compare", "r1", "llama-tiny"]));
    assert!(!warns(&[
        "compare",
        "llama-tiny",
        "--exec",
        "--steps",
        "3",
        "--set-b",
        "fsdp.prefetch_forward=0"
    ]));
}
