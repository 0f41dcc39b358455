//! `shardlab calibrate`.

use super::{json, shardlab, stdout};

/// A short measurement results in a usable profile: the scenario of the CPU device is priced from
/// measured tables.
#[test]
fn a_measured_profile_predicts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    let path = path.to_str().unwrap();
    let text = stdout(&["calibrate", "--seconds", "5", "--ranks", "2", "--out", path]);
    assert_eq!(text, "", "with --out nothing is printed");
    let profile = std::fs::read_to_string(path).unwrap();
    let command = "shardlab calibrate --seconds 5 --ranks 2 --out";
    let first = profile.lines().next().unwrap();
    assert!(
        first.starts_with("# Measured 20") && first.contains(command),
        "{first}"
    );
    let hardware = format!("mesh.hardware={path}");
    let run = &json(&["sim", "llama-tiny", "--json", "--set", &hardware])[0];
    assert!(run["step_ms"]["median"].as_f64().unwrap() > 0.0);
    assert!(run["measured_cost_share"].as_f64().unwrap() > 0.5);
}

/// Table of the base profile, to which kernels are added.
const TABLE: &str = "[[gemm]]\nsource = \"test\"\ndtype = \"f32\"\nrows = [[8, 8, 8, 1.0]]\n";

/// Writes a profile for the number of cores of this machine, with a single small matmul as
/// measurement.
fn write_base(path: &str) {
    let cores = std::thread::available_parallelism().unwrap();
    let shipped = include_str!("../../scenarios/hardware/cpu.toml");
    let at = shipped.find("\n[[").unwrap();
    let head: Vec<String> = shipped[..at]
        .lines()
        .map(|l| match l.starts_with("shared_cores") {
            true => format!("shared_cores = {cores}"),
            false => l.to_owned(),
        })
        .collect();
    std::fs::write(path, format!("{}\n\n{TABLE}", head.join("\n"))).unwrap();
}

/// Kernels of the user's scenario come before the tables of the base profile, and are exact rows.
#[test]
fn kernels_of_a_scenario_are_added_to_a_profile() {
    let dir = tempfile::tempdir().unwrap();
    let profile = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (base, mine) = (profile("base.toml"), profile("mine.toml"));
    write_base(&base);
    let set = [
        "--set",
        "precision.param_dtype=\"f32\"",
        "--set",
        "model.vocab=131",
    ];
    let scenario = ["--seconds", "5", "--scenario", "small-native"];
    let onto = ["calibrate", "--base-profile", &base, "--out", &mine];
    let text = stdout(&[&onto[..], &scenario, &set].concat());
    assert_eq!(text, "", "with --out nothing is printed");
    let text = std::fs::read_to_string(&mine).unwrap();
    assert!(
        text.contains("name = \"mine\"") && text.contains(TABLE),
        "{text}"
    );
    // 48 tokens of 32 numbers times a vocabulary of 131: forward and both gradients.
    for row in ["[48, 131, 32, ", "[48, 32, 131, ", "[131, 32, 48, "] {
        assert!(text.contains(row), "no {row} in {text}");
    }
    let share = |hardware: &str| {
        let hardware = format!("mesh.hardware={hardware}");
        let one = ["--set", "mesh.dp_shard=1", "--set", &hardware];
        let run = &json(&[&["sim", "small-native", "--json"], &set[..], &one].concat())[0];
        run["measured_cost_share"].as_f64().unwrap()
    };
    let (before, after) = (share(&base), share(&mine));
    assert!(before < 0.5 && after > 0.95, "{before} {after}");
}

/// Grouped matmuls of experts have separate rows for each dtype and kind of sum, which then price
/// the scenario.
#[test]
fn grouped_matmuls_in_8_bits_are_added_to_a_profile() {
    let dir = tempfile::tempdir().unwrap();
    let profile = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (base, mine) = (profile("base.toml"), profile("mine.toml"));
    write_base(&base);
    let set = [
        "model.hidden=32",
        "model.ffn=96",
        "model.expert_ffn=48",
        "model.shared_expert_ffn=48",
        "train.seq_len=24",
        "precision.float8_recipe=tensorwise",
        "precision.float8_experts=true",
        "mesh.dp_shard=1",
    ];
    let sets: Vec<&str> = set.iter().flat_map(|s| ["--set", s]).collect();
    let scenario = ["--seconds", "5", "--scenario", "small-moe"];
    let onto = ["calibrate", "--base-profile", &base, "--out", &mine];
    stdout(&[&onto[..], &scenario, &sets].concat());
    let text = std::fs::read_to_string(&mine).unwrap();
    let tables: Vec<&str> = text.split("[[grouped_gemm]]").skip(1).collect();
    let kinds: Vec<(bool, bool)> = tables
        .iter()
        .map(|t| {
            let says = |line: &str| t.lines().any(|l| l == line);
            assert!(says("dtype = \"f8e4m3\""), "{t}");
            (says("fast_accum = true"), says("weight_gradient = true"))
        })
        .collect();
    // Forward and both gradients.
    assert_eq!(kinds, [(false, false), (false, true), (true, false)]);
    // Whether the scenario's grouped matmuls are estimated.
    let estimated = |hardware: &str| {
        let hardware = format!("mesh.hardware={hardware}");
        let run = &json(
            &[
                &["sim", "small-moe", "--json", "--set", &hardware],
                &sets[..],
            ]
            .concat(),
        )[0];
        let basis = run["basis"]["on"].as_str().unwrap();
        let none = basis.ends_with("no 8-bit matmuls");
        let estimates = run["modelled_ms"].as_object().unwrap();
        let some = estimates
            .keys()
            .any(|kernel| kernel.contains("scaled_grouped_mm"));
        assert_eq!(none, some);
        some
    };
    assert!(estimated(&base) && !estimated(&mine));
}

#[test]
fn bad_arguments_are_refused() {
    for args in [
        &["calibrate", "--ranks", "0"][..],
        &["calibrate", "--seconds", "0"],
        &["calibrate", "--device", "gpu"],
        &["calibrate", "--base-profile", "cpu"],
        &["calibrate", "--set", "model.layers=1"],
        &["calibrate", "--scenario", "no-such-scenario"],
        &[
            "calibrate",
            "--scenario",
            "small-native",
            "--set",
            "model.layer=1",
        ],
        &[
            "calibrate",
            "--scenario",
            "small-native",
            "--base-profile",
            "no-such-profile",
        ],
        // Profiles of GPUs, measured with `exec` and with PyTorch.
        &[
            "calibrate",
            "--scenario",
            "small-native",
            "--base-profile",
            "h200-nvlink-exec",
        ],
        &[
            "calibrate",
            "--scenario",
            "small-native",
            "--base-profile",
            "h200-nvlink",
        ],
    ] {
        shardlab(args).assert().code(2);
    }
    // The call fails before any measurement.
    let text = shardlab(&["calibrate", "--out", "/nowhere/cpu.toml"])
        .assert()
        .code(2);
    let stderr = String::from_utf8(text.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("/nowhere/cpu.toml"), "{stderr}");
    assert!(!stderr.contains("calibrate: "), "{stderr}");
}

/// Costs from a trace come before the tables of the base profile and name their source.
#[test]
fn a_profile_is_made_from_traces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    let path = path.to_str().unwrap();
    let traces = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces");
    let trace = format!("{traces}/base.json.gz");
    stdout(&["calibrate", "--from-trace", &trace, "--out", path]);
    let profile = std::fs::read_to_string(path).unwrap();
    assert!(profile.contains("trace base.json.gz of NVIDIA H100 80GB HBM3"));
    // Queries and outputs of a block: 4,096 tokens by 2,048 features.
    assert!(profile.contains("[4096, 2048, 2048, "), "{profile}");
    for table in ["gemm", "attention", "memory", "collective"] {
        let first = profile.find(&format!("[[{table}]]")).unwrap();
        assert!(
            profile[first..]
                .lines()
                .nth(1)
                .unwrap()
                .contains("trace base")
        );
    }
    let scenario = dir.path().join("job.toml");
    let scenario = scenario.to_str().unwrap();
    stdout(&["infer", &trace, "--out", scenario]);
    let hardware = format!("mesh.hardware={path}");
    let own = json(&["sim", scenario, "--set", &hardware, "--json"]).remove(0);
    let shipped = json(&["sim", scenario, "--json"]).remove(0);
    let share = |run: &serde_json::Value| run["measured_cost_share"].as_f64().unwrap();
    assert!(
        share(&own) > share(&shipped) && share(&own) > 0.5,
        "{}",
        share(&own)
    );
    // The host is as slow as the launches in the trace.
    let section = &profile[profile.find("[scale]").unwrap()..];
    let host = section.lines().find_map(|l| l.strip_prefix("host = "));
    let scale: f64 = host.unwrap().parse().unwrap();
    let ms = |run: &serde_json::Value| run["host_ms"].as_f64().unwrap();
    // The shipped profile itself has a factor of 1.15.
    let factor = ms(&own) / ms(&shipped);
    assert!(
        factor > 1.1 && (factor * 1.15 / scale - 1.0).abs() < 0.01,
        "{factor} {scale}"
    );
    // The database of another tool and a trace of another device are rejected.
    let snapshot = format!("{traces}/oom.snapshot.pickle.gz");
    shardlab(&["calibrate", "--from-trace", &snapshot])
        .assert()
        .code(2);
    let h200 = format!("{traces}/prefetch.json.gz");
    let output = shardlab(&["calibrate", "--from-trace", &trace, &h200])
        .assert()
        .code(2);
    let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(error.contains("a profile describes one device"), "{error}");
}

/// Ranks of one job are one source, whose collectives are timed without waits. A rank alone is not
/// enough for that, and an export of Nsight Systems has no sizes.
#[test]
fn ranks_of_a_job_make_one_profile() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let traces = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces");
    let rank = |n: u32| format!("{traces}/fsdp2-compiled-rank{n}.json.gz");
    let made = |files: &[String], out: &str| {
        let mut args = vec!["calibrate", "--from-trace"];
        args.extend(files.iter().map(String::as_str));
        args.extend(["--out", out]);
        let output = shardlab(&args).assert().success();
        let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        (std::fs::read_to_string(out).unwrap(), said)
    };
    let (both, said) = made(&[rank(0), rank(1)], &at("both.toml"));
    assert!(!said.contains("warning"), "{said}");
    assert!(both.contains("without waits for other ranks"), "{both}");
    // Only the host may come from the other rank.
    let tables = &both[both.find("[[gemm]]").unwrap()..];
    assert!(!tables.contains("trace fsdp2-compiled-rank1"), "{tables}");
    let (alone, said) = made(&[rank(0)], &at("alone.toml"));
    assert!(said.contains("1 of 2 ranks"), "{said}");
    // The own time of the longest collective is shorter than its time with the wait.
    let longest = |profile: &str| -> f64 {
        let table = &profile[profile.find("kind = \"all_gather\"").unwrap()..];
        let rows = table.lines().find(|l| l.starts_with("rows")).unwrap();
        let last = rows.trim_end_matches("]]").rsplit(", ").next().unwrap();
        last.parse().unwrap()
    };
    assert!(
        longest(&both) < longest(&alone),
        "{} {}",
        longest(&both),
        longest(&alone)
    );
    let packed = std::fs::File::open(format!("{traces}/nsys.sqlite.gz")).unwrap();
    let database = at("nsys.sqlite");
    let mut target = std::fs::File::create(&database).unwrap();
    std::io::copy(&mut flate2::read::GzDecoder::new(packed), &mut target).unwrap();
    let output = shardlab(&["calibrate", "--from-trace", &database])
        .assert()
        .code(2);
    let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(error.contains("17 collectives are left out"), "{error}");
    assert!(
        error.contains("records neither shapes nor sizes"),
        "{error}"
    );
}

/// The profile predicts the step that it was derived from. Steps that say nothing about the host
/// are rejected.
#[test]
fn a_measured_step_tells_how_slow_the_host_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    let path = path.to_str().unwrap();
    let job = [
        "--scenario",
        "transformers-1b",
        "--set",
        "train.seq_len=512",
    ];
    let made = |more: &[&str]| shardlab(&[&["calibrate"][..], &job, more].concat()).assert();
    made(&["--step-ms", "200", "--out", path]).success();
    let hardware = format!("mesh.hardware={path}");
    let of =
        |set: &[&str]| json(&[&["sim", "transformers-1b", "--json"][..], set].concat()).remove(0);
    let own = of(&["--set", "train.seq_len=512", "--set", &hardware]);
    let step = own["step_ms"]["median"].as_f64().unwrap();
    assert!((step / 200.0 - 1.0).abs() < 2e-3, "{step}");
    let profile = std::fs::read_to_string(path).unwrap();
    assert!(
        profile.contains("200 ms per step, relative to h100-80"),
        "{profile}"
    );
    for (step, why) in [
        ("5", "the device alone"),
        ("90000", "20 times as slow"),
        ("nan", "not a time"),
    ] {
        let output = made(&["--step-ms", step]).code(2);
        let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(error.contains(why), "{step}: {error}");
    }
    made(&["--scenario", "llama-tiny", "--step-ms", "200"]).code(2);
}
