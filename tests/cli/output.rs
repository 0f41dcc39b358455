//! Behavior that all commands share: schema, completions, pipes, color.

use crate::{json, shardlab, stdout};
use serde_json::Value;

#[test]
fn the_schema_knows_every_key() {
    let schema: Value = serde_json::from_str(&stdout(&["schema"])).unwrap();
    assert!(schema["$schema"].is_string());
    for key in shardlab_plan::scenario::keys() {
        let property = &schema["properties"][key.section]["properties"][key.key];
        assert!(property.is_object(), "{}.{}", key.section, key.key);
    }
}

#[test]
fn completions_name_verbs_and_options() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = stdout(&["completions", shell]);
        for word in ["sweep", "validate", "--straggler"] {
            // Fish completions list long options without dashes.
            let word = word.trim_start_matches("--");
            assert!(script.contains(word), "{word} in {shell}");
        }
    }
    shardlab(&["completions", "csh"]).assert().code(2);
}

#[test]
fn every_shipped_scenario_is_listed_with_what_it_shows_and_can_be_printed() {
    let listed = json(&["scenarios", "--json"]);
    assert_eq!(listed.len(), shardlab_plan::scenario::shipped().len());
    for entry in &listed {
        assert!(entry["about"].as_array().unwrap().len() >= 2, "{entry}");
        assert!(entry["step_ms"].as_f64() > Some(0.0), "{entry}");
    }
    let by_name = |name: &str| listed.iter().find(|e| e["name"] == name).unwrap();
    let large = by_name("llama3-70b-64xh100");
    assert_eq!(large["example"], true);
    assert_eq!(large["world_size"], 64);
    assert_eq!(large["hardware"], "h100-80");
    assert_eq!(large["strategy"], "optim_grads_params");
    assert!(large["parameters"].as_u64() > Some(70_000_000_000));
    assert_eq!(by_name("small-native")["example"], false);
    // Examples come first.
    let last_example = listed.iter().rposition(|e| e["example"] == true);
    let first_fixture = listed.iter().position(|e| e["example"] == false);
    assert!(last_example < first_fixture);
    let text = stdout(&["scenarios", "peers-tiny"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("peers-tiny.toml");
    std::fs::write(&path, text).unwrap();
    let digest = |scenario: &str| {
        json(&["plan", scenario, "--section", "init", "--json"])[0]["program_digest"].clone()
    };
    assert_eq!(digest(path.to_str().unwrap()), digest("peers-tiny"));
}

/// The table contains the numbers of `sim`. It only has examples unless all scenarios are
/// requested.
#[test]
fn scenarios_are_a_table_of_examples() {
    let text = stdout(&["scenarios"]);
    let row = |name: &str| {
        let mut lines = text.lines();
        let cells = lines.find(|l| l.split_whitespace().next() == Some(name));
        cells.map(|l| l.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    };
    let cells = row("llama3-8b-4xh200").unwrap();
    let sim = &json(&["sim", "llama3-8b-4xh200", "--json"])[0];
    let step = shardlab_plan::units::thousands(sim["step_ms"]["median"].as_f64().unwrap(), 2);
    for cell in [
        "llama",
        "8.03",
        "4",
        "h200-nvlink",
        "native",
        "ZeRO-3",
        &step,
        "yes",
    ] {
        assert!(cells.iter().any(|c| c == cell), "{cell}: {cells:?}");
    }
    assert!(row("small-native").is_none() && row("toy-cnn").is_none());
    assert!(text.contains("--all lists them"), "{text}");
    let long = stdout(&["scenarios", "--long"]);
    assert!(
        long.contains("llama of 8.03 B parameters, native ZeRO-3 on 4 x h200-nvlink"),
        "{long}"
    );
    let error = shardlab(&["scenarios", "llama3-8b-4xh20"]).assert().code(2);
    let error = String::from_utf8_lossy(&error.get_output().stderr).into_owned();
    assert!(
        error.contains("did you mean `llama3-8b-4xh200`?"),
        "{error}"
    );
}

/// Returns lines longer than `width`, except clap's usage lines and lines with a word that does not
/// fit, such as a path.
fn too_long(text: &str, width: usize) -> Vec<&str> {
    let word = |line: &str| line.split(' ').map(|w| w.chars().count()).max();
    let whole = |line: &str| word(line) > Some(width * 2 / 3) || line.starts_with("Usage: ");
    let long = |line: &&str| line.chars().count() > width && !whole(line);
    text.lines().filter(long).collect()
}

fn at_width(args: &[&str], width: usize) -> String {
    let mut command = shardlab(args);
    let output = command.env("COLUMNS", width.to_string()).assert().success();
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

const WIDTHS: [usize; 5] = [40, 60, 80, 100, 140];

#[test]
fn help_fits_the_terminal() {
    let verbs = stdout(&["--help"]);
    let (_, verbs) = verbs.split_once("Commands:\n").unwrap();
    let verbs = verbs.split("\n\n").next().unwrap();
    let name = |line: &str| {
        line.strip_prefix("  ")
            .and_then(|l| l.split(' ').next().map(str::to_owned))
    };
    let mut calls: Vec<Vec<String>> = verbs
        .lines()
        .filter_map(name)
        .filter(|n| !n.is_empty() && n != "help")
        .map(|n| vec![n])
        .collect();
    assert!(calls.len() >= 14, "{calls:?}");
    for verb in ["show", "name", "prune", "query"] {
        calls.push(vec!["runs".into(), verb.into()]);
    }
    calls.push(Vec::new());
    for call in &calls {
        for width in WIDTHS {
            let mut args: Vec<&str> = call.iter().map(String::as_str).collect();
            args.push("--help");
            let text = at_width(&args, width);
            let long = too_long(&text, width.min(100));
            assert!(long.is_empty(), "{args:?} at {width}: {long:#?}");
            orphans(&text, width.min(100), &format!("{args:?} at {width}"));
            // A command that does not fit continues on the next line, after a backslash.
            for line in text.lines().filter(|l| l.starts_with("  shardlab ")) {
                assert!(!line.contains(" # "), "{args:?}: {line}");
            }
        }
    }
}

/// Fails if a line is broken although the next word would fit, which means that the text was
/// wrapped twice.
fn orphans(text: &str, width: usize, which: &str) {
    let indent = |l: &str| l.len() - l.trim_start().len();
    let lines: Vec<&str> = text.lines().collect();
    for pair in lines.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        let word = second.trim_start().split(' ').next().unwrap_or_default();
        let goes_on = word.starts_with(|c: char| c.is_ascii_lowercase())
            && word != "shardlab"
            && indent(first) == indent(second)
            && !first.trim().is_empty();
        // Rows of tables and items of lists are not continued.
        let is_row = first.trim().contains("  ") || second.trim().contains("  ");
        let is_item = first.trim_start().starts_with(['-', '#', '[']);
        let room = first.chars().count() + 1 + word.chars().count() <= width;
        assert!(
            !goes_on || is_row || is_item || !room,
            "{which}: {first:?}, then {second:?}"
        );
    }
}

#[test]
fn output_fits_the_terminal() {
    let kept = tempfile::tempdir().unwrap();
    let store = kept.path().display().to_string();
    stdout(&["sim", "small-native", "small-fsdp2", "--store", &store]);
    let fits = |args: &[&str], width| {
        let text = at_width(args, width);
        let long = too_long(&text, width);
        assert!(long.is_empty(), "{args:?} at {width}: {long:#?}");
    };
    // These commands take longer.
    fits(&["sim", "llama3-8b-4xh200"], 60);
    fits(&["scenarios"], 40);
    fits(&["scenarios", "--long"], 60);
    for args in [
        &["sim", "small-native", "small-fsdp2"][..],
        &["scenarios", "--hardware"],
        &["plan", "small-native", "--unit", "layers.1"],
        &["plan", "small-native", "--groups"],
        &["check", "small-native", "toy-cnn", "--rules"],
        &["explain", "small-native"],
        &[
            "sweep",
            "small-native",
            "--axis",
            "fsdp.prefetch_forward=[0, 1, 2]",
            "--axis",
            "train.micro_batch=[1, 2]",
        ],
        &["compare", "small-native", "small-fsdp2"],
        &["compare", "small-native", "small-fsdp2", "small-megatron"],
        &["runs", "--store", &store],
        &["runs", "show", "last", "--store", &store],
        &["validate", "tests/data/cpu_small.csv"],
        &["validate", "h100-80-exec"],
    ] {
        for width in [40, 60, 80, 140] {
            fits(args, width);
        }
    }
}

/// The first line names the sharding strategy in common terms and in the policy's terms.
#[test]
fn the_first_line_names_the_strategy() {
    for (args, words) in [
        (&["small-native"][..], "native ZeRO-3 (FULL_SHARD), 4 x cpu"),
        (&["small-zero2"], "ZeRO-2 (SHARD_GRAD_OP)"),
        (&["small-zero1"], "ZeRO-1, "),
        (&["small-ddp"], "DDP (NO_SHARD)"),
        (&["small-hsdp"], "ZeRO-3 (HYBRID_SHARD)"),
        (&["small-hfsdp"], "ZeRO-3, "),
        (&["small-megatron"], "megatron ZeRO-3 (optim_grads_params)"),
    ] {
        let text = stdout(&[&["sim"], args].concat());
        let first = text.lines().next().unwrap();
        assert!(first.contains(words), "{words}: {first}");
    }
}

#[test]
fn every_shipped_scenario_is_proven() {
    let verdicts = json(&["check", "--json"]);
    assert_eq!(verdicts.len(), shardlab_plan::scenario::shipped().len());
    for v in &verdicts {
        assert_eq!(v["ok"], true, "{}", v["scenario"]);
        assert!(
            v["rules"]
                .as_array()
                .unwrap()
                .iter()
                .any(|r| r["checked"].as_u64() > Some(0))
        );
    }
    let text = stdout(&["check", "toy-cnn", "--rules"]);
    crate::assert_narrow(&text);
    assert!(text.contains("proven"), "{text}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    use std::io::Read;
    use std::process::{Command, Stdio};
    // The exit status of a gate does not depend on whether its output is read.
    let other = "train.micro_batch=2";
    let failing = &[
        "gate",
        "--baseline",
        "tests/baselines",
        "--no-exec",
        "--set",
        other,
        "llama-tiny",
        "llama3-8b-4xh200",
    ];
    for (args, code) in [
        (&["plan", "llama3-8b-4xh200"][..], 0),
        (&["plan", "llama3-8b-4xh200", "--json"], 0),
        (&["schema"], 0),
        (&["scenarios"], 0),
        (failing, 1),
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = child.stdout.take().unwrap();
        pipe.read_exact(&mut [0; 16]).unwrap();
        drop(pipe);
        let output = child.wait_with_output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {log}");
        assert!(log.is_empty(), "{args:?}: {log}");
    }
}

/// docs/reference/json.md describes every key that `--json` prints, in the section of its command.
#[test]
fn every_json_key_is_documented() {
    let docs = include_str!("../../docs/reference/json.md");
    let baselines = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/baselines");
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().display().to_string();
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/cpu_small.csv");
    let trace = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/traces/base.json.gz"
    );
    let cases: [(&str, &[&str]); 18] = [
        (
            "## `sim` and `exec`",
            &["sim", "small-linear", "--store", &store, "--name", "first"],
        ),
        (
            "## `sim` and `exec`",
            &["exec", "small-linear", "--steps", "2"],
        ),
        (
            "## `sweep`",
            &[
                "sweep",
                "peers-tiny",
                "--axis",
                "fsdp.reshard_after_forward=[true, 3]",
            ],
        ),
        ("## `compare`", &["compare", "prefetch-0", "prefetch-1"]),
        (
            "## `compare`",
            &["compare", "small-linear", "small-native", "small-fsdp2"],
        ),
        (
            "## `gate`",
            &["gate", "--baseline", baselines, "small-linear"],
        ),
        (
            "## `gate`",
            &["gate", "--bless", "--baseline", &store, "small-linear"],
        ),
        (
            "## `gate`",
            &["gate", "--measured", trace, "--baseline", trace],
        ),
        ("## `explain`", &["explain", "small-linear"]),
        ("## `explain`", &["explain", "first", "--store", &store]),
        ("## `import`", &["import", trace]),
        ("## `replay`", &["replay", trace]),
        ("## `check`", &["check", "small-linear"]),
        ("## `plan`", &["plan", "small-linear"]),
        ("## `scenarios`", &["scenarios"]),
        // This is the run that the first case has saved.
        ("## `runs`", &["runs", "--store", &store]),
        ("## `validate`", &["validate", table]),
        ("## `validate`", &["validate", "h100-80-exec"]),
    ];
    for (title, args) in cases {
        let (_, text) = docs.split_once(title).unwrap();
        let section = text.split("\n## ").next().unwrap();
        for object in json(&[args, &["--json"]].concat()) {
            let keys = object.as_object().unwrap().keys();
            let findings = object["findings"].as_array().into_iter().flatten();
            let of_findings = findings.flat_map(|f| f.as_object().unwrap().keys());
            for key in keys.chain(of_findings) {
                assert!(section.contains(&format!("`{key}`")), "{title}: {key}");
            }
        }
    }
}

/// The memory of a small model is shown in a unit in which it is not 0, and no number is -0.
#[test]
fn small_numbers_are_shown() {
    let kept = tempfile::tempdir().unwrap();
    let store = kept.path().display().to_string();
    for args in [
        &["sim", "small-native", "small-fsdp2", "--store", &store][..],
        &[
            "sim",
            "small-native",
            "--set",
            "mesh.dp_shard=1",
            "--store",
            &store,
        ],
        &["explain", "small-native"],
        &[
            "sweep",
            "small-native",
            "--axis",
            "train.micro_batch=[1, 2]",
        ],
        &["compare", "small-native", "small-fsdp2"],
        &["compare", "small-native", "small-fsdp2", "small-megatron"],
        &["runs", "--store", &store],
    ] {
        let text = stdout(args);
        let words: Vec<&str> = text.split_whitespace().collect();
        for pair in words.windows(2) {
            let nothing = pair[0].trim_start_matches(['+', '-']) == "0.00";
            assert!(!nothing || !pair[1].starts_with("GiB"), "{args:?}: {text}");
            let zero = pair[0].starts_with('-')
                && pair[0].len() > 1
                && pair[0][1..].chars().all(|c| matches!(c, '0' | '.'));
            assert!(!zero, "{args:?}: {} in {text}", pair[0]);
        }
        // Every unit follows a number.
        for pair in words.windows(2).filter(|p| p[1] == "GiB") {
            assert!(pair[0].parse::<f64>().is_ok(), "{args:?}: {text}");
        }
    }
}
