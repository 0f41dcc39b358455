//! `shardlab sweep`.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

const AXES: [&str; 4] = [
    "--axis",
    "fsdp.prefetch_forward=[0, 1]",
    "--axis",
    "fsdp.reshard_after_forward=[true, false, 3]",
];

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec!["sweep", "peers-tiny"];
    all.extend_from_slice(&AXES);
    all.extend_from_slice(more);
    all
}

#[test]
fn csv_has_a_line_a_point_impossible_ones_included() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("points.csv");
    stdout(&args(&["--csv", path.to_str().unwrap()]));
    let mut reader = csv::Reader::from_path(&path).unwrap();
    let header = reader.headers().unwrap().clone();
    assert_eq!(&header[0], "fsdp.prefetch_forward");
    assert_eq!(&header[1], "fsdp.reshard_after_forward");
    let column = |name: &str| header.iter().position(|c| c == name).unwrap();
    let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let settings: Vec<(&str, &str)> = rows.iter().map(|r| (&r[0], &r[1])).collect();
    assert_eq!(
        settings,
        [
            ("0", "true"),
            ("0", "false"),
            ("0", "3"),
            ("1", "true"),
            ("1", "false"),
            ("1", "3")
        ]
    );
    for row in &rows {
        let impossible = &row[column("impossible")];
        assert_eq!(&row[1] == "3", impossible.contains("divide"), "{row:?}");
        assert_eq!(&row[1] == "3", row[column("step_ms")].is_empty());
    }
}

#[test]
fn a_point_is_what_sim_predicts_for_it() {
    let points = json(&args(&["--json"]));
    assert_eq!(points.len(), 6);
    let point = points
        .iter()
        .find(|p| {
            p["settings"]["fsdp.prefetch_forward"] == "0"
                && p["settings"]["fsdp.reshard_after_forward"] == "false"
        })
        .unwrap();
    let run = &json(&[
        "sim",
        "peers-tiny",
        "--json",
        "--set",
        "fsdp.prefetch_forward=0",
        "--set",
        "fsdp.reshard_after_forward=false",
    ])[0];
    assert_eq!(point["step_ms"], run["step_ms"]["median"]);
    for field in [
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "peak_device_bytes",
    ] {
        assert_eq!(point["memory"][field], run["memory"][field], "{field}");
    }
    assert_eq!(point["exposed_ms"], run["exposed_ms"]["total"]);
}

#[test]
fn the_front_is_marked_and_the_table_sorted() {
    let points = json(&args(&["--json", "--sort", "reserved"]));
    let done: Vec<(f64, f64, bool)> = points
        .iter()
        .filter(|p| p["impossible"].is_null())
        .map(|p| {
            (
                p["step_ms"].as_f64().unwrap(),
                p["memory"]["peak_reserved_bytes"].as_f64().unwrap(),
                p["pareto"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(done.len(), 4);
    assert!(done.windows(2).all(|w| w[0].1 <= w[1].1), "{done:?}");
    for a in &done {
        let beaten = done
            .iter()
            .any(|b| b.0 <= a.0 && b.1 <= a.1 && (b.0 < a.0 || b.1 < a.1));
        assert_eq!(a.2, !beaten, "{a:?} among {done:?}");
    }
    let text = stdout(&args(&["--sort", "step"]));
    assert_narrow(&text);
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let named = [0, 1].map(|d| format!("fsdp.prefetch_forward={d} fsdp.reshard_after_forward=3"));
    assert!(
        flat.contains(&format!("Not possible: {} (", named.join("; "))),
        "{text}"
    );
}

#[test]
fn the_file_of_a_sweep_gives_its_axes() {
    let points = json(&["sweep", "sweep-prefetch", "--json"]);
    let settings: BTreeSet<String> = points.iter().map(|p| p["settings"].to_string()).collect();
    assert_eq!(settings.len(), points.len());
    assert!(points.len() >= 12);
}

#[test]
fn a_file_that_cannot_be_written_does_not_take_the_points_with_it() {
    for (path, points, code) in [("/no/such/points.csv", 0, 2), ("/dev/full", 6, 3)] {
        if points > 0 && cfg!(not(target_os = "linux")) {
            continue;
        }
        let assert = shardlab(&args(&["--json", "--csv", path]))
            .assert()
            .code(code);
        let output = assert.get_output();
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        assert_eq!(text.lines().count(), points, "{path}");
        let text = String::from_utf8(output.stderr.clone()).unwrap();
        assert!(text.contains(&format!("--csv {path}: ")), "{text}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_keeps_what_is_done() {
    use std::process::{Command, Stdio};
    let store = tempfile::tempdir().unwrap();
    let values: Vec<String> = (1..=2000).map(|n| n.to_string()).collect();
    let axis = format!("train.micro_batch=[{}]", values.join(", "));
    let child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
        .args(["sweep", "llama3-8b-4xh200", "--json", "--axis", &axis])
        .arg("--store")
        .arg(store.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Saved points show the progress of the sweep.
    let kept = |path: &Path| {
        let mut entries = std::fs::read_dir(path).unwrap();
        entries.any(|e| !e.unwrap().file_name().to_string_lossy().starts_with('.'))
    };
    let begin = Instant::now();
    while !kept(store.path()) {
        assert!(begin.elapsed() < Duration::from_secs(120), "no point yet");
        std::thread::sleep(Duration::from_millis(5));
    }
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{log}");
    let done = lines.lines().count();
    assert!((1..2000).contains(&done), "{done}");
    let words = format!("{} of 2000 points are missing", 2000 - done);
    assert!(log.contains(&words), "{log}");
    assert!(log.contains(&format!("saved {done} points in ")), "{log}");
    for line in lines.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
}

#[test]
fn progress_stays_off_where_nobody_looks() {
    let assert = shardlab(&args(&["--json"])).assert().success();
    assert!(assert.get_output().stderr.is_empty());
}

/// Five axes and all numbers do not fit: numbers are dropped, and the text says where to find them.
#[test]
fn a_table_of_many_axes_can_be_read() {
    let axes = [
        "fsdp.policy=[\"megatron\"]",
        "train.recompute=[\"selective\"]",
        "fsdp.reshard_after_forward=[true]",
        "fsdp.prefetch_forward=[\"implicit\"]",
        "compile.mode=[\"regions\"]",
    ];
    let mut args = vec!["sweep", "peers-tiny"];
    for axis in axes {
        args.extend(["--axis", axis]);
    }
    let text = stdout(&args);
    assert_narrow(&text);
    let row = text.lines().find(|l| l.starts_with("megatron")).unwrap();
    assert!(row.starts_with("megatron   selective   true "), "{text}");
    assert!(row.contains("implicit"), "{text}");
    // In a narrow terminal, fewer axes do not fit either, so the message is about the width.
    let why = "do not fit this width; --csv and --json contain them";
    assert!(text.replace('\n', " ").contains(why), "{text}");
    // With fewer axes, all columns fit.
    let text = stdout(&args[..6]);
    assert!(text.contains("alloc"), "{text}");
    assert!(!text.contains("--csv"), "{text}");
}

/// Throughput is counted in the model's unit of a batch: images and rows here, without mentioning
/// tokens.
#[test]
fn throughput_uses_the_models_own_unit() {
    let unit = |model: &str, column: &str| {
        let text = stdout(&["sweep", model, "--axis", "fsdp.prefetch_forward=[0, 1]"]);
        assert!(text.contains(column) && !text.contains("tok"), "{text}");
        let text = stdout(&["compare", model, "--set-b", "train.micro_batch=1"]);
        assert!(text.contains(column) && !text.contains("tok"), "{text}");
    };
    unit("small-cnn", "img/s");
    unit("small-linear", "rows/s");
    // A table with both models needs a common unit; a table with one model uses that of the model.
    let both = stdout(&["sim", "small-cnn", "small-native"]);
    assert!(both.contains("items/s"), "{both}");
    let [cnn, native] = ["small-cnn", "small-native"].map(|s| stdout(&["sim", s]));
    assert!(cnn.contains("images/s/GPU") && native.contains("tokens/s/GPU"));
}

/// A sweep in which some points do not fit, including the fastest one.
const TOO_LARGE: [&str; 10] = [
    "sweep",
    "llama3-8b-4xh200",
    "--set",
    "mesh.hardware=h100-80",
    "--axis",
    "fsdp.reshard_after_forward=[true, false]",
    "--axis",
    "train.micro_batch=[1, 2, 4]",
    "--axis",
    "train.recompute=[\"none\", \"full\"]",
];

fn too_large<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&TOO_LARGE[..], more].concat()
}

/// Checks the points shown under a limit, their order, and the point in the last line, against a
/// manual selection from all points.
#[test]
fn the_fastest_under_a_limit() {
    const LIMIT: u64 = 60 << 30;
    let number = |p: &Value, path: &str| p.pointer(path).unwrap().as_f64().unwrap();
    let speed = |p: &Value| number(p, "/tokens_per_s_per_gpu");
    let all = json(&too_large(&["--json"]));
    let mut wanted: Vec<&Value> = all
        .iter()
        .filter(|p| p["fits"] != "no")
        .filter(|p| number(p, "/memory/peak_reserved_bytes") <= LIMIT as f64)
        .collect();
    wanted.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    let faster = |other: &&Value| speed(other) > speed(wanted[0]);
    assert!(all.iter().filter(faster).any(|p| p["fits"] == "no"));
    assert!(all.iter().filter(faster).any(|p| p["fits"] == "yes"));
    assert!(wanted.len() > 2, "{wanted:?}");

    let limited = ["--fits", "--max-memory", "60GiB", "--sort", "tokens"];
    let shown = json(&too_large(&[&limited[..], &["--json"]].concat()));
    assert_eq!(shown.iter().collect::<Vec<_>>(), wanted);
    // The fastest points come first by default.
    let top = json(&too_large(&[
        "--json",
        "--fits",
        "--max-memory",
        "60GiB",
        "--top",
        "2",
    ]));
    assert_eq!(top.iter().collect::<Vec<_>>(), wanted[..2]);

    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("all.csv");
    let mut args = too_large(&limited);
    args.extend(["--top", "1", "--csv", csv.to_str().unwrap()]);
    args.extend(["--tolerance", "0%"]);
    let text = stdout(&args);
    assert_narrow(&text);
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains(&format!("Showing 1 of {} points.", all.len())),
        "{text}"
    );
    let settings: Vec<String> = wanted[0]["settings"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(k, v)| format!("{k}={}", v.as_str().unwrap()))
        .collect();
    let best = format!(
        "Best that fits and reserves 60.00 GiB at most: {}: ~",
        settings.join(" "),
    );
    assert!(flat.contains(&best), "{best} in {text}");
    assert!(flat.contains(" allocated."), "{text}");
    // The file contains all points.
    let rows = csv::Reader::from_path(&csv).unwrap().into_records().count();
    assert_eq!(rows, all.len());
    let none = stdout(&too_large(&["--max-memory", "1GiB"]));
    assert!(
        none.ends_with("No point fits and reserves 1.00 GiB at most.\n"),
        "{none}"
    );
    for (bad, reason) in [
        ("1 parsec", "such as 512MiB"),
        ("60", "needs a unit, such as 60GiB"),
    ] {
        let output = shardlab(&too_large(&["--max-memory", bad]))
            .assert()
            .code(2);
        let err = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(err.contains(reason), "{err}");
    }
}

/// The first points are taken from those that fit, unless that is turned off or none fits.
#[test]
fn the_first_points_fit() {
    let words = |more: &[&str]| -> Vec<String> {
        let points = json(&too_large(&[&["--json", "--top", "3"], more].concat()));
        let word = |p: &Value| p["fits"].as_str().unwrap().to_owned();
        points.iter().map(word).collect()
    };
    assert!(!words(&[]).contains(&"no".to_owned()));
    assert_eq!(words(&["--all"])[0], "no");
    let none = [
        "--set",
        "train.seq_len=131072",
        "--set",
        "model.max_seq_len=131072",
    ];
    assert_eq!(words(&none), ["no"; 3]);
    let text = stdout(&too_large(&["--top", "3"]));
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains("do not fit are left out; --all includes them."),
        "{text}"
    );
    shardlab(&too_large(&["--all"])).assert().code(2);
}

#[test]
fn a_sweep_is_checked_without_a_baseline() {
    let code = |more: &[&str]| {
        let output = shardlab(&too_large(more)).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(!output.stdout.is_empty());
        (output.status.code().unwrap(), err)
    };
    assert_eq!(code(&["--check"]).0, 0);
    assert_eq!(code(&["--check", "--max-memory", "60GiB"]).0, 0);
    for limit in [["--max-memory", "1GiB"], ["--headroom", "99%"]] {
        assert_eq!(code(&limit).0, 0);
        let (status, err) = code(&[&limit[..], &["--check"]].concat());
        assert_eq!(status, 1, "{limit:?}");
        assert_eq!(err, "check failed: none of 12 points fits\n");
    }
}

#[test]
fn one_axis_for_a_key_and_short_places() {
    let refused = |axes: &[&str]| {
        let axes = axes.iter().flat_map(|a| ["--axis", a]);
        let args: Vec<&str> = ["sweep", "peers-tiny"].into_iter().chain(axes).collect();
        let output = shardlab(&args).assert().code(2);
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let err = refused(&["train.micro_batch=[1, 2]", "train.micro_batch=[3]"]);
    assert!(
        err.contains("two axes set `train.micro_batch`: --axis train.micro_batch=[1, 2] and --axis train.micro_batch=[3]"),
        "{err}"
    );
    let err = refused(&[
        "mesh.dp_shard,mesh.dp_replicate=[[4, 1]]",
        "mesh.dp_replicate=[2]",
    ]);
    assert!(err.contains("two axes set `mesh.dp_replicate`"), "{err}");
    let many: Vec<String> = (1..=1000).map(|n| n.to_string()).collect();
    let many = many.join(",");
    let axes = ["train.grad_accum", "train.micro_batch"].map(|key| format!("{key}=[{many}]"));
    let err = refused(&axes.each_ref().map(String::as_str));
    assert!(err.contains("more than 100000 points"), "{err}");
    assert!(err.len() < 500, "{err}");
}

/// With headroom, only points that leave it count as fitting. If the fastest point is tight, the
/// text also names the fastest one that is not tight.
#[test]
fn the_fastest_with_room_to_spare() {
    let of = |more: &[&'static str]| {
        let axis = "train.recompute_layers=[60, 66, 70, 72, 80]";
        [&["sweep", "llama3-70b-64xh100", "--axis", axis], more].concat()
    };
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = |points: &[Value]| -> Vec<String> {
        let word = |p: &Value| p["fits"].as_str().unwrap().to_owned();
        points.iter().map(word).collect()
    };
    let all = json(&of(&["--json", "--headroom", "0%"]));
    assert_eq!(words(&all), ["no", "tight", "yes", "yes", "yes"]);
    let text = stdout(&of(&["--headroom", "0%", "--tolerance", "0%"]));
    assert_narrow(&text);
    let said = flat(&text);
    let (_, best) = said.split_once("Best that fits (tight): ").unwrap();
    let (tight, easy) = best
        .split_once("Best that fits and is not tight: ")
        .unwrap();
    assert!(tight.starts_with("train.recompute_layers=66: "), "{text}");
    assert!(easy.starts_with("train.recompute_layers=70: "), "{text}");

    // 5 % is the default.
    let some = json(&of(&["--json"]));
    assert_eq!(some, json(&of(&["--json", "--headroom", "5%"])));
    assert_eq!(words(&some), ["no", "short", "short", "yes", "yes"]);
    let number = |p: &Value, path: &str| p.pointer(path).unwrap().as_i64().unwrap();
    let capacity =
        |p: &Value| number(p, "/memory/free_bytes") + number(p, "/memory/peak_device_bytes");
    for p in &some {
        assert_eq!(capacity(p), capacity(&some[0]));
        let free = number(p, "/memory/free_bytes") as f64 / capacity(p) as f64;
        assert_eq!(free >= 0.05, p["fits"] == "yes", "{p}");
        assert_eq!(free < 0.0, p["fits"] == "no", "{p}");
        assert!(p["fits"] == "yes" || p["pareto"] == false, "{p}");
    }
    assert_eq!(
        json(&of(&["--json", "--headroom", "5", "--fits"])),
        some[3..]
    );
    let said = flat(&stdout(&of(&["--headroom", "5%", "--tolerance", "0%"])));
    let best = "Best that fits and leaves 5 % of the device free: train.recompute_layers=72: ";
    assert!(said.contains(best) && !said.contains("tight"), "{said}");
    let none = stdout(&of(&["--headroom", "90%", "--max-memory", "60GiB"]));
    let no = "No point fits and reserves 60.00 GiB at most and leaves 90 % of the device free.";
    assert!(flat(&none).ends_with(no), "{none}");
    for wrong in ["100%", "-1%", "much"] {
        let wrong = ["sweep", "peers-tiny", "--headroom", wrong];
        shardlab(&wrong).assert().code(2);
    }
}

/// Keys that vary together result in meshes with the same number of GPUs. The column of GPUs
/// appears only if their number varies.
#[test]
fn linked_axes_keep_the_number_of_gpus() {
    let mesh = ["sweep", "small-native", "--axis"];
    let linked = "mesh.dp_shard,mesh.dp_replicate=[[4, 1], [2, 2]]";
    let points = json(&[&mesh[..], &[linked, "--json"]].concat());
    assert_eq!(points.len(), 2);
    for (point, (shard, outer)) in points.iter().zip([(4, 1), (2, 2)]) {
        assert_eq!(point["settings"]["mesh.dp_shard"], shard.to_string());
        assert_eq!(point["settings"]["mesh.dp_replicate"], outer.to_string());
        assert_eq!(point["world_size"], 4);
        let sets = [
            format!("mesh.dp_shard={shard}"),
            format!("mesh.dp_replicate={outer}"),
        ];
        let sim = [
            "sim",
            "small-native",
            "--json",
            "--set",
            &sets[0],
            "--set",
            &sets[1],
        ];
        assert_eq!(json(&sim)[0]["step_ms"]["median"], point["step_ms"]);
    }
    let text = stdout(&[&mesh[..], &[linked]].concat());
    assert!(!text.contains("GPUs"), "{text}");
    let alone = "mesh.dp_shard=[4, 2]";
    let text = stdout(&[&mesh[..], &[alone]].concat());
    let row = text.lines().find(|l| l.starts_with("2 ")).unwrap();
    assert!(
        text.contains("GPUs") && row.split_whitespace().nth(1) == Some("2"),
        "{text}"
    );
    assert!(text.contains(" GPUs: "), "{text}");
}
