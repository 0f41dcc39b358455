//! `shardlab runs`, and saving runs.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Returns a store with a predicted run, one with another prefetch depth, a measured one and a
/// named one.
fn filled() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("runs").to_str().unwrap().to_owned();
    let sim = ["sim", "peers-tiny", "--store", &path];
    shardlab(&sim).assert().success();
    shardlab(&[&sim[..], &["--set", "fsdp.prefetch_forward=0"]].concat())
        .assert()
        .success();
    let exec = ["exec", "llama-tiny", "--steps", "2", "--store", &path];
    shardlab(&exec).assert().success();
    (dir, path)
}

fn ids(path: &str, more: &[&str]) -> Vec<String> {
    let args = [&["runs", "--json", "--store", path], more].concat();
    let id = |v: &Value| v["id"].as_str().unwrap().to_owned();
    json(&args).iter().map(id).collect()
}

fn refused(args: &[&str]) -> String {
    let output = shardlab(args).assert().code(2);
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

#[test]
fn runs_are_kept_listed_and_selected() {
    let (_dir, path) = filled();
    let list = stdout(&["runs", "--store", &path]);
    assert_narrow(&list);
    assert!(list.contains("prefetch"), "{list}");
    let all = ids(&path, &[]);
    assert_eq!(all.len(), 3);
    let one = |more: &[&str]| {
        let found = ids(&path, more);
        assert_eq!(found.len(), 1, "{more:?}");
        all.iter().position(|id| *id == found[0]).unwrap()
    };
    assert_eq!(one(&["--kind", "exec"]), 2);
    assert_eq!(one(&["--scenario", "llama-tiny"]), 2);
    assert_eq!(one(&["--where", "fsdp.prefetch_forward=0"]), 1);
    assert_eq!(one(&["--last", "1"]), 2);
    let digest = json(&["runs", "--store", &path, "--json"])[0]["program_digest"].clone();
    assert_eq!(one(&["--digest", &digest.as_str().unwrap()[..6]]), 0);
    assert_eq!(ids(&path, &["--until", "2020-01-01"]).len(), 0);
    assert_eq!(ids(&path, &["--since", "2020-01-01"]).len(), 3);
    let measured = &json(&["runs", "--store", &path, "--json", "--kind", "exec"])[0];
    assert_eq!(
        measured["metrics"]["loss.last"]
            .as_f64()
            .map(f64::is_finite),
        Some(true)
    );
    assert!(measured["environment"]["cpus"].is_string());
}

#[test]
fn a_kept_run_has_its_id_in_json_and_is_shown_by_any_beginning_of_it() {
    let (_dir, path) = filled();
    let sim = [
        "sim",
        "peers-tiny",
        "--scale",
        "host=2",
        "--json",
        "--store",
        &path,
    ];
    let run = &json(&sim)[0];
    let id = run["run_id"].as_str().unwrap();
    for name in [id, &id[19..], &id[19..24], "last"] {
        let shown = &json(&["runs", "show", name, "--json", "--store", &path])[0];
        assert_eq!(shown["id"], id);
        assert_eq!(shown["metrics"]["step_ms.median"], run["step_ms"]["median"]);
    }
    let full = &json(&["runs", "show", id, "--full", "--store", &path])[0];
    let spans = full["run"]["spans"].as_array().unwrap().len();
    assert!(spans > 10);
    let csv = fs::read_to_string(Path::new(&path).join(id).join("spans.csv")).unwrap();
    assert_eq!(csv.lines().count(), spans + 1);
    let text = stdout(&["runs", "show", "last", "--store", &path]);
    assert_narrow(&text);
    assert!(
        text.contains("environment") && text.contains("exposed"),
        "{text}"
    );
    stdout(&["runs", "tag", "last", "main", "--store", &path]);
    assert!(stdout(&["runs", "show", "main", "--store", &path]).contains(id));
}

#[test]
fn mistyped_names_get_the_nearest_valid_one() {
    let (_dir, path) = filled();
    stdout(&["runs", "tag", "last", "baseline", "--store", &path]);
    let at = |args: &[&str]| refused(&[args, &["--store", &path]].concat());
    let error = at(&["runs", "show", "baselin"]);
    assert!(error.contains("nearest is `baseline`"), "{error}");
    let error = at(&["runs", "--where", "fsdp.prefetch_foward=0"]);
    assert!(
        error.contains("nearest is `fsdp.prefetch_forward`"),
        "{error}"
    );
    let error = at(&["runs", "--scenario", "peers-tny"]);
    assert!(error.contains("nearest is `peers-tiny`"), "{error}");
    let error = at(&["runs", "--since", "yesterday"]);
    assert!(error.contains("2026-11-20"), "{error}");
    let error = at(&["runs", "prune"]);
    assert!(error.contains("--older-than"), "{error}");
    let error = at(&["runs", "--kind", "sim", "prune", "--keep", "1"]);
    assert!(error.contains("after the verb"), "{error}");
}

#[test]
fn a_name_is_taken_away_and_its_run_stays() {
    let (_dir, path) = filled();
    let all = ids(&path, &[]);
    stdout(&["runs", "tag", &all[0], "main", "--store", &path]);
    let name = ["runs", "tag", "--store", &path];
    let error = refused(&[&name[..], &["--remove", "mian"]].concat());
    assert!(error.contains("the nearest is `main`"), "{error}");
    for half in [&["last"][..], &[], &["last", "--remove", "main"]] {
        refused(&[&name[..], half].concat());
    }
    let said = stdout(&[&name[..], &["--remove", "main"]].concat());
    assert_eq!(said, "removed the name `main`; its run is kept\n");
    assert_eq!(ids(&path, &[]), all);
    let error = refused(&["runs", "show", "main", "--store", &path]);
    assert!(error.contains("no run `main`"), "{error}");
    // Without its name, the run is no longer kept.
    let prune = ["runs", "prune", "--json", "--keep", "2", "--store", &path];
    let done = &json(&prune)[0];
    assert_eq!(done["removed"], serde_json::json!([all[0]]));
}

#[test]
fn pruning_says_first_and_spares_names() {
    let (_dir, path) = filled();
    let all = ids(&path, &[]);
    stdout(&["runs", "tag", &all[0], "main", "--store", &path]);
    let prune = ["runs", "prune", "--json", "--store", &path];
    let said = &json(&[&prune[..], &["--keep", "1", "--dry-run"]].concat())[0];
    assert_eq!(said["removed"], serde_json::json!([all[1]]));
    assert_eq!(said["named_and_kept"], 1);
    assert_eq!(ids(&path, &[]).len(), 3);
    let done = &json(&[&prune[..], &["--keep", "1"]].concat())[0];
    assert_eq!(done["removed"], said["removed"]);
    assert_eq!(ids(&path, &[]), [all[0].clone(), all[2].clone()]);
    let none = &json(&[&prune[..], &["--older-than", "1"]].concat())[0];
    assert_eq!(none["removed"], serde_json::json!([]));
    let kind = &json(&[&prune[..], &["--kind", "exec"]].concat())[0];
    assert_eq!(kind["removed"], serde_json::json!([all[2]]));
}

#[test]
fn predictions_are_saved_on_request_and_measurements_unless_not() {
    let dir = tempfile::tempdir().unwrap();
    let here = |args: &[&str], variable: Option<&str>| {
        let mut command = shardlab(args);
        command.current_dir(dir.path()).env_remove("SHARDLAB_STORE");
        if let Some(value) = variable {
            command.env("SHARDLAB_STORE", value);
        }
        let output = command.output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), err)
    };
    let sim = ["sim", "toy-linear"];
    let exec = ["exec", "llama-tiny", "--steps", "2"];
    let axis = "fsdp.prefetch_forward=[0, 1]";
    for (args, variable) in [
        (&sim[..], None),
        (&sim, Some("elsewhere")),
        (&["sim", "toy-linear", "--no-store"], None),
        (&exec, Some("off")),
        (&["exec", "llama-tiny", "--steps", "1", "--no-store"], None),
        (&["sweep", "toy-linear", "--axis", axis], None),
    ] {
        assert_eq!(here(args, variable).0, 0, "{args:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{args:?}");
    }
    let save = ["sim", "toy-linear", "--save"];
    for args in [&save[..], &["sim", "toy-linear", "--name", "x"]] {
        let (code, err) = here(args, Some("off"));
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("SHARDLAB_STORE is off"), "{err}");
    }
    assert_eq!(here(&save, None).0, 0);
    assert_eq!(here(&save, Some("elsewhere")).0, 0);
    assert_eq!(
        here(&["sim", "toy-linear", "--store", "third"], Some("off")).0,
        0
    );
    assert_eq!(here(&exec, Some("measured")).0, 0);
    for name in ["runs", "elsewhere", "third", "measured"] {
        let path = dir.path().join(name);
        assert_eq!(ids(path.to_str().unwrap(), &[]).len(), 1, "{name}");
    }
    // A file is in the way. This is a warning, or an error if saving was requested.
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let path = file.to_str().unwrap();
    let (code, err) = here(&exec, Some(path));
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("warning: the run was not saved"), "{err}");
    let (code, err) = here(&save, Some(path));
    assert_eq!(code, 2, "{err}");
    let error = refused(&["sim", "toy-linear", "--store", path]);
    assert!(error.contains("--store"), "{error}");
}

#[test]
fn a_prediction_is_stored_once_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let said = |more: &[&str]| {
        let output = shardlab(&[&["sim", "toy-linear", "--store", path], more].concat());
        let output = { output }.assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let first = said(&[]);
    assert!(first.starts_with("saved as "), "{first}");
    let id = first.split_whitespace().nth(2).unwrap();
    let again = said(&["--name", "main"]);
    assert!(
        again.starts_with(&format!("already saved as {id} (main) in ")),
        "{again}"
    );
    assert!(said(&["--jitter", "0.02"]).starts_with("saved as "));
    assert!(said(&["--jitter", "0.02", "--seed", "1"]).starts_with("saved as "));
    assert_eq!(ids(path, &[]).len(), 3);
    assert!(stdout(&["runs", "show", "main", "--store", path]).contains(id));
    // Measurements differ even if their options are equal.
    let exec = ["exec", "llama-tiny", "--steps", "2", "--store", path];
    stdout(&exec);
    stdout(&exec);
    assert_eq!(ids(path, &["--kind", "exec"]).len(), 2);
    // The first step is not a measurement.
    let output = shardlab(&["exec", "llama-tiny", "--steps", "1", "--store", path]);
    let output = { output }.assert().success();
    let err = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(err.contains("the run was not saved: "), "{err}");
    assert_eq!(ids(path, &["--kind", "exec"]).len(), 2);
    for bad in [
        &["sim", "toy-linear", "--name", "last"][..],
        &["sim", "toy-linear", "toy-cnn", "--name", "x"],
    ] {
        refused(&[bad, &["--store", path]].concat());
    }
}

/// Runs with other options of the simulator are distinguished in lists, in comparisons and by their
/// names.
#[test]
fn what_was_changed_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for more in [
        &[][..],
        &["--scale", "arithmetic=3"],
        &["--straggler", "1=4", "--jitter", "0.02", "--seed", "3"],
    ] {
        stdout(&[&["sim", "small-native", "--store", path], more].concat());
    }
    let list = stdout(&["runs", "--store", path]);
    for part in [
        "--scale",
        "arithmetic=3",
        "--straggler",
        "1=4",
        "--jitter=0.02",
        "--seed=3",
    ] {
        assert!(list.contains(part), "{part}: {list}");
    }
    let shown = stdout(&["runs", "show", "last~1", "--store", path]);
    assert!(
        shown.contains("options   --scale arithmetic=3\n"),
        "{shown}"
    );
    let compared = stdout(&["compare", "last~2", "last~1", "--store", path]);
    assert!(compared.contains("--scale arithmetic"), "{compared}");
    assert!(!compared.contains("No option differs"), "{compared}");
    let slower = ["--where", "slower=arithmetic=3"];
    assert_eq!(ids(path, &slower).len(), 1);
}

/// The oldest runs are deleted to make room: predictions first, named runs never.
#[test]
fn a_store_has_a_cap() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("runs");
    let path = store.to_str().unwrap();
    let make = |verb: &str, more: &[&str], limit: &str| {
        let scenario = if verb == "sim" {
            "toy-linear"
        } else {
            "llama-tiny"
        };
        let mut command = shardlab(&[&[verb, scenario], more].concat());
        command
            .env("SHARDLAB_STORE", path)
            .env("SHARDLAB_STORE_LIMIT", limit);
        let output = command.output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    assert_eq!(make("sim", &["--name", "main"], "").0, 0);
    assert_eq!(make("exec", &["--steps", "2"], "").0, 0);
    for seed in ["1", "2"] {
        assert_eq!(
            make("sim", &["--save", "--jitter", "0.1", "--seed", seed], "").0,
            0
        );
    }
    let all = ids(path, &[]);
    assert_eq!(all.len(), 4);
    let (code, err) = make("sim", &["--save", "--jitter", "0.1", "--seed", "3"], "3");
    assert_eq!(code, 0);
    assert!(
        err.contains("removed the 2 oldest runs without a name: "),
        "{err}"
    );
    assert!(err.contains("SHARDLAB_STORE_LIMIT"), "{err}");
    let left = ids(path, &[]);
    assert_eq!(left.len(), 3);
    assert_eq!(left[..2], all[..2]);
    // The size limit applies, too: only named or new runs are left.
    let (code, err) = make("sim", &["--save", "--jitter", "0.1", "--seed", "4"], "1KiB");
    assert_eq!(code, 0);
    assert!(err.contains("removed the 2 oldest runs"), "{err}");
    assert_eq!(ids(path, &[])[0], all[0]);
    assert_eq!(ids(path, &[]).len(), 2);
    // A folder given by the user has no limit.
    let (code, err) = make(
        "sim",
        &["--store", path, "--jitter", "0.1", "--seed", "5"],
        "1",
    );
    assert_eq!((code, err.lines().count()), (0, 1), "{err}");
    assert_eq!(ids(path, &[]).len(), 3);
    let (code, err) = make("sim", &["--save"], "many");
    assert_eq!(code, 2);
    assert!(err.contains("SHARDLAB_STORE_LIMIT: `many`"), "{err}");
}

#[test]
fn a_missing_name_is_reported_with_similar_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    stdout(&["sim", "toy-linear", "--store", path, "--name", "baseline"]);
    stdout(&["compare", "baseline", "toy-linear", "--store", path]);
    stdout(&["runs", "tag", "--remove", "baseline", "--store", path]);
    let error = refused(&["compare", "baseline", "toy-linear", "--store", path]);
    assert!(
        error.contains("no scenario or saved run is called `baseline`"),
        "{error}"
    );
    let help = stdout(&["runs", "--help"]);
    assert_eq!(help.contains("query"), cfg!(feature = "frames"), "{help}");
    stdout(&["runs", "tag", "last", "again", "--store", path]);
    stdout(&["runs", "show", "again", "--store", path]);
}

#[test]
fn a_sweep_keeps_its_points_where_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let axis = "fsdp.prefetch_forward=[0, 1, 2]";
    stdout(&["sweep", "peers-tiny", "--axis", axis, "--store", path]);
    let runs = json(&["runs", "--json", "--store", path]);
    let mut depths: Vec<&str> = runs
        .iter()
        .map(|r| r["settings"]["fsdp.prefetch_forward"].as_str().unwrap())
        .collect();
    depths.sort_unstable();
    assert_eq!(depths, ["0", "1", "2"]);
    assert!(
        runs[0]["overrides"][0]
            .as_str()
            .unwrap()
            .starts_with("fsdp.prefetch_forward=")
    );
}

/// Processes that write at the same time save all of their runs completely.
#[test]
fn writers_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    // Equal predictions are saved once, so each writer has a separate seed, and all scenarios
    // differ.
    let all = shardlab_plan::scenario::shipped();
    let names: Vec<&str> = all.iter().map(|(n, _)| *n).collect();
    let names: Vec<&str> = names
        .into_iter()
        .filter(|n| n.starts_with("small-"))
        .take(12)
        .collect();
    let write = |seed: &str| {
        Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .arg("sim")
            .args(&names)
            .args(["--jitter", "0.02", "--seed", seed, "--store", path])
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let writers = ["1", "2", "3"].map(write);
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    let mut kept = ids(path, &[]);
    kept.sort();
    kept.dedup();
    assert_eq!(kept.len(), 36);
    for id in kept {
        stdout(&["runs", "show", &id, "--full", "--store", path]);
    }
}

/// Writers that are killed at any time leave only complete runs and leftovers.
#[test]
fn a_killed_writer_leaves_nothing_half() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let all = shardlab_plan::scenario::shipped();
    let names: Vec<&str> = all.iter().map(|(n, _)| *n).collect();
    let names: Vec<&str> = names
        .into_iter()
        .filter(|n| n.starts_with("small-"))
        .collect();
    for pause in [5, 20, 45, 80, 120] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .arg("sim")
            .args(&names)
            .args([
                "--jitter",
                "0.02",
                "--seed",
                &pause.to_string(),
                "--store",
                path,
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(pause));
        child.kill().unwrap();
        child.wait().unwrap();
        for id in ids(path, &[]) {
            stdout(&["runs", "show", &id, "--full", "--store", path]);
        }
    }
    // For a minute, a folder without its first file may belong to a writer that has just started.
    stdout(&["runs", "prune", "--unfinished", "--store", path]);
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let begun = entry.path().join("run.json").exists();
        assert!(!name.starts_with(".unfinished-") || !begun, "{name}");
    }
}

#[cfg(not(feature = "frames"))]
#[test]
fn queries_say_how_to_get_them() {
    for args in [
        &["runs", "query", "--by", "kind"][..],
        &["sweep", "llama-tiny", "--parquet", "points.parquet"],
        &["sweep", "llama-tiny", "--by", "train.seed"],
        &[
            "report",
            "llama-tiny",
            "--out",
            "page.md",
            "--by",
            "train.seed",
        ],
    ] {
        let error = refused(args);
        assert!(error.contains("--features frames"), "{error}");
    }
}

#[cfg(feature = "frames")]
#[test]
fn queries_group_join_and_export() {
    let (dir, path) = filled();
    let ask =
        |more: &[&str]| json(&[&["runs", "query", "--json", "--store", &path], more].concat());
    let kinds = ask(&[
        "--by",
        "kind",
        "--metric",
        "step_ms.median",
        "--agg",
        "count",
    ]);
    let counts: Vec<(&str, f64)> = kinds
        .iter()
        .map(|r| {
            (
                r["kind"].as_str().unwrap(),
                r["step_ms.median count"].as_f64().unwrap(),
            )
        })
        .collect();
    assert_eq!(counts, [("sim", 2.0), ("exec", 1.0)]);
    stdout(&["sim", "llama-tiny", "--store", &path]);
    let joined = ask(&[
        "--versus",
        "kind=sim,exec",
        "--metric",
        "memory.peak_allocated_bytes",
    ]);
    // One program was predicted and measured; the engine's memory agrees to the byte.
    assert_eq!(joined.len(), 1);
    assert_eq!(joined[0]["exec / sim"], 1.0);
    let history = ask(&["--history", "step_ms.median", "--scenario", "peers-tiny"]);
    assert!(history[0]["change %"].is_null() && history[1]["change %"].as_f64().unwrap() > 0.0);
    let spans = ask(&[
        "--spans",
        "--by",
        "work",
        "--metric",
        "duration_us",
        "--agg",
        "p50",
    ]);
    assert!(spans.iter().any(|r| r["work"] == "gemm"));
    let csv = dir.path().join("t.csv");
    let parquet = dir.path().join("t.parquet");
    let paths = [&csv, &parquet].map(|p| p.to_str().unwrap());
    let args = [
        "runs",
        "query",
        "--store",
        &path,
        "--csv",
        paths[0],
        "--parquet",
        paths[1],
    ];
    assert_eq!(stdout(&args), "");
    assert_eq!(fs::read_to_string(csv).unwrap().lines().count(), 5);
    assert!(fs::read(parquet).unwrap().starts_with(b"PAR1"));
    assert_narrow(&stdout(&["runs", "query", "--store", &path]));
    let error = refused(&["runs", "query", "--store", &path, "--by", "scenari"]);
    assert!(error.contains("nearest is `scenario`"), "{error}");
}

#[cfg(feature = "frames")]
#[test]
fn points_of_sweeps_are_written_queried_and_summarized() {
    let dir = tempfile::tempdir().unwrap();
    let [parquet, csv, page] = ["points.parquet", "points.csv", "page.md"]
        .map(|n| dir.path().join(n).display().to_string());
    let axes = [
        "--axis",
        "fsdp.prefetch_forward=[0, 1]",
        "--axis",
        "fsdp.reshard_after_forward=[true, false]",
    ];
    let sweep = |more: &[&str]| stdout(&[&["sweep", "llama-tiny"], &axes[..], more].concat());
    sweep(&["--parquet", &parquet, "--csv", &csv]);
    let by = |table: &str| {
        json(&[
            "runs",
            "query",
            "--json",
            "--table",
            table,
            "--by",
            "reshard_after_forward",
            "--metric",
            "step_ms",
            "--agg",
            "count",
            "--agg",
            "min",
        ])
    };
    let [from_parquet, from_csv] = [by(&parquet), by(&csv)];
    assert_eq!(from_parquet, from_csv);
    // Values of options may be numbers or flags: there is one row for each, with both prefetch
    // depths.
    assert_eq!(from_parquet.len(), 2);
    assert_eq!(from_parquet[0]["fsdp.reshard_after_forward"], "true");
    assert_eq!(from_parquet[0]["step_ms count"], 2.0);
    let summary = sweep(&["--by", "fsdp.reshard_after_forward"]);
    let rows = |flag: &str| summary.lines().any(|l| l.trim_start().starts_with(flag));
    assert!(rows("true") && rows("false"), "{summary}");
    assert!(summary.contains("Best that fits"), "{summary}");
    stdout(
        &[
            &[
                "report",
                "llama-tiny",
                "--out",
                &page,
                "--by",
                "fsdp.prefetch_forward",
            ],
            &axes[..],
        ]
        .concat(),
    );
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("Medians by fsdp.prefetch"), "{page}");
    let error = refused(
        &[
            &["sweep", "llama-tiny", "--by", "fsdp.prefetch_foward"],
            &axes[..],
        ]
        .concat(),
    );
    assert!(
        error.contains("nearest is `fsdp.prefetch_forward`"),
        "{error}"
    );
    let error = refused(&["runs", "query", "--table", "none.csv"]);
    assert!(error.contains("none.csv"), "{error}");
}
