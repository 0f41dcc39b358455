//! `shardlab sim`.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;
use std::path::Path;

/// Paths of fields that scripts rely on; docs/reference/json.md describes them.
const FIELDS: [&str; 24] = [
    "scenario",
    "program_digest",
    "kind",
    "world_size",
    "policy",
    "hardware",
    "step_ms.median",
    "step_ms.mean",
    "step_ms.p95",
    "step_ms.samples",
    "tokens_per_s_per_gpu",
    "mfu",
    "host_ms",
    "memory.peak_allocated_bytes",
    "memory.peak_reserved_bytes",
    "memory.peak_device_bytes",
    "memory.at",
    "memory.by_role",
    "collectives.all_gather",
    "collectives.reduce_scatter",
    "exposed_ms.total",
    "exposed_ms.by_cause",
    "losses",
    "grad_norms",
];

fn at<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(value, |v, key| v.get(key))
}

/// The first gathers of a step (of the embedding and of a block) overlap with nothing, unless they
/// run at the end of the previous step.
#[test]
fn gathers_for_the_next_step_are_hidden_behind_updates() {
    let run = |n: u32| {
        let next = format!("fsdp.prefetch_next_step={n}");
        let sets = [
            "fsdp.policy=native",
            "fsdp.copy_engine_all_gather=true",
            "fsdp.copy_engine_reduce_scatter=true",
            "compile.mode=regions",
            "train.loss=chunked",
            "train.recompute=none",
            "mesh.hardware=h200-nvlink-exec",
            &next,
        ];
        let sets = sets.iter().flat_map(|s| ["--set", s]);
        let args: Vec<&str> = ["sim", "peers-8b", "--json"]
            .into_iter()
            .chain(sets)
            .collect();
        json(&args).pop().unwrap()
    };
    let (without, with) = (run(0), run(2));
    let gathers = |r: &Value| {
        at(r, "collectives.all_gather.exposed_ms")
            .unwrap()
            .as_f64()
            .unwrap()
    };
    let step = |r: &Value| at(r, "step_ms.median").unwrap().as_f64().unwrap();
    assert!(
        gathers(&with) < 0.2 * gathers(&without),
        "{} {}",
        gathers(&with),
        gathers(&without)
    );
    let gained = step(&without) - step(&with);
    assert!(gained > 0.5 * gathers(&without), "{gained}");
    let peak = "memory.peak_allocated_bytes";
    assert_eq!(at(&with, peak), at(&without, peak));
}

#[test]
fn json_is_one_object_a_run_with_every_promised_field() {
    let runs = json(&["sim", "peers-tiny", "toy-linear", "--json"]);
    assert_eq!(runs.len(), 2);
    for run in &runs {
        for field in FIELDS {
            assert!(at(run, field).is_some(), "{field} is missing");
        }
        for (kind, stats) in run["collectives"].as_object().unwrap() {
            for field in [
                "count",
                "bytes",
                "busy_ms",
                "exposed_ms",
                "overlapped_with_gemm",
            ] {
                assert!(stats[field].is_number(), "{kind}.{field}");
            }
        }
        assert_eq!(run["kind"], "sim");
        assert_eq!(run["world_size"], 4);
        let roles: u64 = run["memory"]["by_role"]
            .as_object()
            .unwrap()
            .values()
            .map(|b| b.as_u64().unwrap())
            .sum();
        assert_eq!(Some(roles), run["memory"]["peak_allocated_bytes"].as_u64());
        let causes: f64 = run["exposed_ms"]["by_cause"]
            .as_object()
            .unwrap()
            .values()
            .map(|t| t.as_f64().unwrap())
            .sum();
        assert!((causes - run["exposed_ms"]["total"].as_f64().unwrap()).abs() < 1e-9);
    }
    assert_eq!(runs[0]["scenario"], "peers-tiny");
    assert_eq!(runs[1]["scenario"], "toy-linear");
}

/// The prediction of an MoE model says how experts are divided, and which collectives carry tokens.
#[test]
fn experts_are_in_json_and_reports() {
    let of = |set: &[&str]| {
        let mut args = vec!["sim", "small-moe-ep", "--json"];
        set.iter().for_each(|s| args.extend(["--set", *s]));
        json(&args).remove(0)
    };
    let run = of(&[]);
    let e = &run["experts"];
    for (key, expected) in [
        ("experts", 8),
        ("experts_per_rank", 4),
        ("top_k", 2),
        ("ep", 2),
    ] {
        assert_eq!(e[key], expected, "{key}");
    }
    assert_eq!(
        (&e["dispatcher"], &e["routing"]),
        (&"gather".into(), &"balanced".into())
    );
    // Two ranks have 48 tokens with two choices each. A rank reserves rows for all of these, and
    // expects half of them.
    assert_eq!(
        (&e["rows_reserved"], &e["rows_expected"]),
        (&192.into(), &96.into())
    );
    let ms = |e: &Value, key: &str| e[key].as_f64().unwrap();
    let exchanges = e["exchanges"].as_object().unwrap();
    let busy: f64 = exchanges.values().map(|x| ms(x, "busy_ms")).sum();
    assert!((ms(e, "dispatch_ms") + ms(e, "combine_ms") - busy).abs() < 1e-9);
    assert!(ms(e, "dispatch_ms") > 0.0 && ms(e, "combine_ms") > 0.0 && ms(e, "matmul_ms") > 0.0);
    // Weights are gathered, too.
    let all = &run["collectives"]["all_gather"]["count"];
    assert!(
        exchanges["all_gather"]["count"].as_f64() < all.as_f64(),
        "{e}"
    );
    let seeded = of(&["moe.routing=seeded", "moe.imbalance=3"]);
    let imbalance = ms(&seeded["experts"], "imbalance");
    assert!(imbalance > 1.0 && imbalance < 2.0, "{imbalance}");
    assert!(seeded["experts"]["rows_expected"].as_u64() > Some(96));
    assert_eq!(e.get("row_shortage"), None);
    let few = of(&["moe.capacity_factor=0.75"]);
    let short = &few["experts"]["row_shortage"];
    assert_eq!(
        (&short["wanted"], &short["reserved"], &short["factor"]),
        (&96.into(), &72.into(), &1.0.into())
    );
    assert_eq!(few["experts"]["rows_reserved"], 72);
    assert_eq!(few["warnings"][0]["kind"], "expert_rows");
    assert!(
        json(&["sim", "small-native", "--json"])[0]
            .get("experts")
            .is_none()
    );
    // Two layers with two pushes and two returns each, of rows of 32 elements in bf16. Of 192
    // tokens, 13 of 28 reach a rank; of 48, 22 of 28 come from the other node.
    assert_eq!(e.get("network_bytes"), None);
    let nodes = ["mesh.ep=4", "mesh.gpus_per_node=2", "moe.dispatcher=deepep"];
    let across = of(&nodes);
    let (e, row) = (&across["experts"], 2 * 32);
    assert_eq!(e["network_bytes"], 8 * 38 * row);
    for kind in ["peer_push", "peer_return"] {
        assert_eq!(e["exchanges"][kind]["bytes"], 4 * 89 * row, "{e}");
        let all = across["collectives"][kind]["bytes"].as_f64();
        assert_eq!(all, Some(f64::from(4 * 89 * row)));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.md");
    let file = path.to_str().unwrap();
    stdout(&["report", "small-moe-ep", "--out", file]);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.contains("4 of 8") && text.contains("gather: tokens of experts"),
        "{text}"
    );
}

#[test]
fn the_report_fits_its_width_and_says_what_json_says() {
    let text = stdout(&["sim", "peers-tiny", "toy-cnn"]);
    assert_narrow(&text);
    assert!(
        !text.contains('\x1b'),
        "escape sequences outside a terminal"
    );
    let run = &json(&["sim", "peers-tiny", "--json"])[0];
    let step = format!("{:.2} ms", run["step_ms"]["median"].as_f64().unwrap());
    assert!(text.contains(&step), "{step} in {text}");
    for word in [
        "exposed",
        "memory",
        "peak",
        "all_gather",
        "fits",
        "logits",
        "Memory peaks at",
    ] {
        assert!(text.contains(word), "{word} in {text}");
    }
    // The comparison contains both scenarios.
    let comparison: Vec<&str> = text.lines().rev().take(2).collect();
    assert!(comparison[1].starts_with("peers-tiny"), "{text}");
    assert!(comparison[0].starts_with("toy-cnn"), "{text}");
}

#[test]
fn the_power_limit_is_reported_if_the_profile_has_one() {
    let exec = [
        "--set",
        "mesh.hardware=h200-nvlink-exec",
        "--set",
        "fsdp.policy=native",
    ];
    let compiled = [
        "--set",
        "compile.mode=regions",
        "--set",
        "train.loss=chunked",
    ];
    let run = |model: &'static str, more: &[&str]| {
        let args = [&["sim", model, "--no-store"][..], more].concat();
        let text = stdout(&args);
        let json = json(&[&args[..], &["--json"]].concat()).remove(0);
        (text, json["environment"].clone())
    };
    let (text, facts) = run("peers-1b", &[exec, compiled].concat());
    let fact = |name: &str| facts[name].as_str().unwrap().parse::<f64>().unwrap();
    let (share, factor) = (
        fact("power.arithmetic_share"),
        fact("power.arithmetic_factor"),
    );
    // The calibrated steps of this kind had a share of 0.84. Above 0.58, the profile's slope is
    // 0.23.
    assert!((0.8..0.92).contains(&share), "{share}");
    assert!(
        (factor - 1.0 - 0.2341 * (share - 0.58)).abs() < 2e-4,
        "{factor}"
    );
    let line = format!(
        "clock     matmuls and attention, {:.0} % of the step, run {:.1} % slower at the power limit\n",
        100.0 * share,
        100.0 * (factor - 1.0)
    );
    assert!(text.contains(&line), "{line}{text}");
    // Without prefetch, small kernels do not lower the clock.
    let waiting = [&exec[..], &["--set", "fsdp.prefetch_forward=0"]].concat();
    let (text, facts) = run("peers-tiny", &waiting);
    assert_eq!(facts["power.arithmetic_factor"], "1.0000", "{facts}");
    assert!(
        text.contains("clock     full speed: matmuls and attention take"),
        "{text}"
    );
    // PyTorch's profile of the same machine has no power limit.
    let (text, facts) = run("peers-1b", &[]);
    assert!(!text.contains("clock  ") && facts.get("power.arithmetic_share").is_none());
}

#[test]
fn later_overrides_win_over_earlier_ones_and_over_the_file() {
    let policy = |set: &[&str]| {
        let mut args = vec!["sim", "peers-tiny", "--json"];
        for s in set {
            args.extend(["--set", s]);
        }
        json(&args)[0]["policy"].clone()
    };
    assert_eq!(policy(&[]), "fsdp2");
    assert_eq!(policy(&["fsdp.policy=native"]), "native");
    assert_eq!(
        policy(&["fsdp.policy=native", "fsdp.policy=megatron"]),
        "megatron"
    );
    assert_eq!(
        policy(&["fsdp.policy=megatron", "fsdp.policy=\"native\""]),
        "native"
    );
}

#[test]
fn equal_input_gives_equal_output_and_seeds_matter_only_with_jitter() {
    let run = |args: &[&str]| {
        let mut all = vec!["sim", "peers-tiny", "--json"];
        all.extend_from_slice(args);
        stdout(&all)
    };
    assert_eq!(run(&[]), run(&[]));
    assert_eq!(run(&["--seed", "1"]), run(&["--seed", "2"]));
    let one = run(&["--jitter", "0.05", "--seed", "1"]);
    assert_eq!(one, run(&["--jitter", "0.05", "--seed", "1"]));
    assert_ne!(one, run(&["--jitter", "0.05", "--seed", "2"]));
}

#[test]
fn a_straggler_slows_the_step_by_no_more_than_its_factor() {
    let step = |args: &[&str]| {
        let mut all = vec!["sim", "peers-tiny", "--json"];
        all.extend_from_slice(args);
        json(&all)[0]["step_ms"]["median"].as_f64().unwrap()
    };
    let even = step(&["--full-ranks"]);
    let slow = step(&["--straggler", "2=1.5"]);
    assert!(
        slow > 1.2 * even && slow < 1.5 * even + 1.0,
        "{even} {slow}"
    );
    let one = step(&[]);
    assert!(
        (even - one).abs() < 1e-6 * one,
        "all ranks {even}, one {one}"
    );
}

#[test]
fn a_slowed_machine_is_reported() {
    let text = stdout(&[
        "sim",
        "peers-tiny",
        "--scale",
        "host=2",
        "--straggler",
        "1=1.5",
    ]);
    assert_narrow(&text);
    assert!(
        text.contains("slower    host=2 times the profile's times"),
        "{text}"
    );
    assert!(text.contains("straggler rank 1 is 1.5x slower"), "{text}");
}

#[test]
fn what_does_not_fit_is_said_and_is_no_failure() {
    let args = ["sim", "llama3-8b-4xh200", "--set", "train.micro_batch=64"];
    let text = stdout(&args);
    assert_narrow(&text);
    assert!(text.contains("does not fit"), "{text}");
    let mut with_json = args.to_vec();
    with_json.push("--json");
    assert_eq!(json(&with_json)[0]["fits"], "no");
}

#[test]
fn scenarios_can_be_files_and_profiles_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(
        &path,
        "extends = \"peers-tiny.toml\"\n[train]\nmicro_batch = 2\n",
    )
    .unwrap();
    let run = &json(&["sim", path.to_str().unwrap(), "--json"])[0];
    assert_eq!(run["scenario"], "mine");
    shardlab(&[
        "sim",
        path.to_str().unwrap(),
        "--set",
        "mesh.hardware=h100-80",
    ])
    .assert()
    .success();
}

/// A profile in a file describes an unknown GPU, so the scenario sets the size of the cuBLAS
/// workspace. Each of two threads has one.
#[test]
fn cublas_workspaces_are_what_the_scenario_says() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.toml");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/hardware/a100-40.toml");
    std::fs::copy(shipped, &file).unwrap();
    let peak = |hardware: &str, set: &[&str]| {
        let hardware = format!("mesh.hardware={hardware}");
        let base = ["sim", "peers-tiny", "--json", "--set", &hardware];
        let memory = &json(&[&base[..], set].concat())[0]["memory"];
        memory["peak_allocated_bytes"].as_u64().unwrap()
    };
    let (named, file) = (peak("a100-40", &[]), file.to_str().unwrap());
    let ampere = 2 * 4096 * 1024 + 8 * 16 * 1024;
    assert_eq!(peak(file, &[]) - named, 2 * ((32 << 20) - ampere));
    let set = format!("fsdp.cublas_workspace_bytes={ampere}");
    assert_eq!(peak(file, &["--set", &set]), named);
    let none = peak(file, &["--set", "fsdp.cublas_workspace_bytes=0"]);
    assert_eq!(named - none, 2 * ampere);
}

/// Only with the binary: a profile is printed, extended, changed, and scaled for every command.
#[test]
fn a_profile_extends_a_shipped_one_and_scales_it() {
    let folder = tempfile::tempdir().unwrap();
    let listed = json(&["scenarios", "--hardware", "--json"]);
    let names: Vec<&str> = listed.iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert!(
        names.contains(&"h200-nvlink") && names.contains(&"cpu"),
        "{names:?}"
    );
    assert!(stdout(&["scenarios", "--hardware"]).contains("NVIDIA H200 SXM"));
    let copy = stdout(&["scenarios", "--hardware", "h200-nvlink"]);
    std::fs::write(folder.path().join("copy.toml"), copy).unwrap();
    let own =
        "extends = \"copy.toml\"\nname = \"own\"\n[scale]\nsource = \"test\"\ncollectives = 1.5\n";
    let path = folder.path().join("own.toml");
    std::fs::write(&path, own).unwrap();
    let own = format!("mesh.hardware={}", path.display());
    let step = |more: &[&str]| {
        let all = [&["sim", "llama3-8b-4xh200", "--json"], more].concat();
        let run = json(&all).remove(0);
        (run["step_ms"]["median"].clone(), run["environment"].clone())
    };
    let (scaled, environment) = step(&["--set", &own]);
    // The shipped profile has a factor for the host.
    assert_eq!(environment["scale"], "host=1.2 collectives=1.5");
    assert_eq!(scaled, step(&["--scale=collectives=1.5"]).0);
    // The factors multiply, up to the precision of f64.
    assert_eq!(
        step(&["--set", &own, "--scale=collectives=2"]).0,
        step(&["--scale=collectives=3"]).0
    );
    // `sweep` predicts the same for this job.
    let axis = format!("mesh.hardware=[\"{}\", \"h200-nvlink\"]", path.display());
    let swept = json(&["sweep", "llama3-8b-4xh200", "--json", "--axis", &axis]);
    assert_eq!(swept.len(), 2);
    let found = swept.iter().any(|p| p["step_ms"] == scaled);
    assert!(found, "{scaled} in {swept:?}");
}

/// Exit statuses for scripts: a prediction that does not fit or exceeds a budget ends with status
/// 1, after the output.
#[test]
fn predictions_are_checked_without_a_baseline() {
    let large = ["llama3-70b-64xh100", "--set", "train.recompute=none"];
    let call = |args: &[&str]| {
        let output = shardlab(&[&["sim"], args].concat()).output().unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(!out.is_empty(), "{args:?}: {err}");
        (output.status.code().unwrap(), out, err)
    };
    let with = |more: &[&'static str]| [&large[..], more].concat();
    let (code, asked, err) = call(&large);
    assert_eq!((code, err.as_str()), (0, ""));
    let (code, out, err) = call(&with(&["--check"]));
    assert_eq!(code, 1);
    assert_eq!(out, asked);
    assert!(
        err.starts_with("check failed: llama3-70b-64xh100: does not fit: needs "),
        "{err}"
    );
    // One failing prediction is enough.
    let (code, _, err) = call(&with(&["toy-linear", "--check", "--json"]));
    assert_eq!(code, 1);
    let lines: Vec<&str> = err.lines().collect();
    assert!(
        lines.len() == 2 && lines[1].starts_with("check passed: toy-linear"),
        "{err}"
    );
    for (budget, code) in [
        (["--max-memory", "1KiB"], 1),
        (["--max-memory", "1TiB"], 0),
        (["--max-step-ms", "0.001"], 1),
        (["--max-step-ms", "1000000"], 0),
    ] {
        let (got, _, err) = call(&[&["small-native"], &budget[..]].concat());
        assert_eq!(got, code, "{budget:?}: {err}");
        assert_eq!(err.contains(budget[0]), code == 1, "{err}");
    }
    let tight = [
        "llama3-70b-64xh100",
        "--set",
        "train.recompute_layers=66",
        "--check",
        "--json",
    ];
    let (code, out, err) = call(&tight);
    let point: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(point["fits"], "tight");
    assert_eq!(code, 0);
    assert!(
        err.contains("check passed") && err.contains("tight"),
        "{err}"
    );
}

/// Unusual options cause a warning on stderr and in the object, not a failure.
#[test]
fn warnings_name_the_option_and_where_it_is_written() {
    let args = [
        "sim",
        "llama3-8b-8xh100",
        "--json",
        "--set",
        "mesh.dp_shard=16",
    ];
    let of = |more: &[&str]| {
        let output = shardlab(&[&args[..], more].concat()).assert().success();
        let output = output.get_output();
        let object: Value = serde_json::from_slice(&output.stdout).unwrap();
        let err = String::from_utf8(output.stderr.clone()).unwrap();
        (object["warnings"].as_array().unwrap().clone(), err)
    };
    assert_eq!(of(&[]), (Vec::new(), String::new()));
    let (warnings, err) = of(&["--set", "mesh.gpus_per_node=16"]);
    assert_eq!(warnings.len(), 1);
    assert_eq!(warnings[0]["key"], "mesh.gpus_per_node");
    assert_eq!(warnings[0]["place"], "--set mesh.gpus_per_node=16:1:20");
    assert_eq!(err, "");
    let text = stdout(&[
        "sim",
        "llama3-8b-8xh100",
        "--set",
        "mesh.dp_shard=16",
        "--set",
        "mesh.gpus_per_node=16",
    ]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let warning = "warning --set mesh.gpus_per_node=16:1:20: NVLink connects 8 GPUs";
    assert!(words.contains(warning), "{text}");
}

/// A size from the environment overrides the file, and `--set` overrides both.
#[test]
fn sizes_of_the_mesh_from_the_environment() {
    let world = |variables: &[(&str, &str)], more: &[&str]| {
        let args = [&["sim", "small-linear", "--json"], more].concat();
        let mut command = shardlab(&args);
        for (name, value) in variables {
            command.env(name, value);
        }
        let output = command.assert().success();
        let run: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
        run["world_size"].as_u64()
    };
    let eight = [("SHARDLAB_DP_SHARD", "8"), ("SHARDLAB_EP", "1")];
    assert_eq!(world(&eight, &[]), Some(8));
    assert_eq!(world(&eight, &["--set", "mesh.dp_shard=2"]), Some(2));
    let divided = shardlab(&["sim", "small-moe", "--json"])
        .env("SHARDLAB_EP", "3")
        .assert()
        .code(2);
    let said = String::from_utf8_lossy(&divided.get_output().stderr).into_owned();
    assert!(
        said.contains("SHARDLAB_EP=3: `ep` = 3 does not divide `dp_shard` = 4"),
        "{said}"
    );
    let refused = shardlab(&["sim", "small-linear"])
        .env("SHARDLAB_CP", "2")
        .assert()
        .code(2);
    let said = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(said.contains("SHARDLAB_CP must be 1, not 2"), "{said}");
}

/// Steps with 8-bit matmuls are estimated where the profile has no table of them.
#[test]
fn matmuls_in_8_bits_without_a_table_are_estimates() {
    // Lines are wrapped at the width of the terminal.
    let joined = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let sim = |set: &[&str]| {
        let set = set.iter().flat_map(|s| ["--set", s]);
        let command: Vec<&str> = ["sim", "llama3-8b-4xh200-fp8"]
            .into_iter()
            .chain(set)
            .collect();
        joined(stdout(&command))
    };
    let with_tables = sim(&[]);
    assert!(with_tables.contains("(measured, ±"), "{with_tables}");
    let without = sim(&["mesh.hardware=h200-nvlink"]);
    assert!(without.contains("(estimated, ±"), "{without}");
    assert!(without.contains("but no 8-bit matmuls"), "{without}");
    let bf16 = sim(&[
        "mesh.hardware=h200-nvlink",
        "precision.float8_recipe=none",
        "precision.float8_all_gather=false",
        "precision.float8_saved=compute",
    ]);
    assert!(bf16.contains("(measured, ±"), "{bf16}");
}

/// What a dozen lines of Python find in the file, sequence by sequence.
#[test]
fn documents_of_a_file_are_described() {
    let tokens = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/goldens/llama-tiny/tokens.bin"
    );
    let lengths = format!("train.document_lengths={{ data = {tokens:?}, eos_token_id = 110 }}");
    let run = json(&["sim", "llama-tiny", "--json", "--set", &lengths]);
    let why = at(&run[0], "why").unwrap().to_string();
    assert!(why.contains("Documents in 549 sequences of"), "{why}");
    let measured = "15.1 tokens on average; the average token is in one of 26.2.";
    assert!(why.contains(measured), "{why}");
}

/// Offloaded state takes host memory: under FSDP2, a float32 weight, gradient and two moments per
/// parameter (`CPUOffloadPolicy`), divided among the ranks.
#[test]
fn offloaded_state_takes_host_memory() {
    let all = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
    let args = ["sim", "llama3-8b-8xh100", "--set", "fsdp.policy=fsdp2"];
    let run = &json(&[&args[..], &["--json", "--set", all]].concat())[0];
    let [rank, node] =
        ["bytes_per_rank", "bytes_per_node"].map(|k| run["host_memory"][k].as_f64().unwrap());
    let parameters = run["parameters"]["total"].as_f64().unwrap();
    assert!(
        (rank / (parameters * 16.0 / 8.0) - 1.0).abs() < 1e-3,
        "{rank}"
    );
    assert_eq!(node, 8.0 * rank);
    let text = stdout(&[&args[..], &["--set", all]].concat());
    assert!(text.contains("host RAM  "), "{text}");
    // All state stays on the device.
    assert!(json(&[&args[..], &["--json"]].concat())[0]["host_memory"].is_null());
}
