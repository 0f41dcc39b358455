//! `import` and `infer` on recorded traces, including truncated and damaged ones.

use crate::{json, shardlab, stdout};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};

const TRACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces");

fn at(name: &str) -> String {
    format!("{TRACES}/{name}")
}

fn imported(files: &[&str]) -> Value {
    let files: Vec<String> = files.iter().map(|f| at(f)).collect();
    let mut args = vec!["import", "--json"];
    args.extend(files.iter().map(String::as_str));
    json(&args).remove(0)
}

/// Returns the text of a compressed file.
fn unpacked(name: &str) -> Vec<u8> {
    let mut text = Vec::new();
    let file = std::fs::File::open(at(name)).unwrap();
    flate2::read::GzDecoder::new(file)
        .read_to_end(&mut text)
        .unwrap();
    text
}

#[test]
fn ranks_make_one_run_with_everything_placed() {
    let run = imported(&[
        "fsdp2-compiled-rank0.json.gz",
        "fsdp2-compiled-rank1.json.gz",
    ]);
    assert!(run["attributed_share"].as_f64().unwrap() >= 0.99);
    assert_eq!(run["unmatched"]["events"], 0);
    assert_eq!(run["world_size"], 2);
    assert_eq!(
        run["units"],
        json!(["root", "layers.0", "layers.1", "layers.2", "layers.3"])
    );
    assert_eq!(
        run["dtypes"],
        json!({"compute": "bf16", "reduce": "f32", "main_params": "f32", "main_grads": "f32"})
    );
    for (key, expected) in [
        ("policy", json!("fsdp2")),
        ("strategy", json!("optim_grads_params")),
        ("reshard", json!(true)),
        ("reshard_root", json!(false)),
        ("prefetch", json!("implicit")),
        ("recompute", json!("full")),
        ("accumulation", json!(1)),
        ("clip", json!(true)),
        ("compile", json!("blocks")),
        ("steps_by", json!("optimizer")),
    ] {
        assert_eq!(run[key], expected, "{key}");
    }
    // The profiler slows steps down: 44 ms without it, 116 ms with it.
    let step = run["step_ms"].as_f64().unwrap();
    assert!((100.0..130.0).contains(&step), "{step}");
    let gathers = &run["summary"]["collectives"]["all_gather"];
    // Once for the root, and twice for each of four blocks; 65,537,024 and 11,798,528 elements of
    // two bytes each.
    assert_eq!(gathers["count"], 9.0);
    assert_eq!(gathers["bytes"], 2.0 * (65_537_024.0 + 8.0 * 11_798_528.0));
    let late: Vec<f64> = run["ranks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["late_ms"].as_f64().unwrap())
        .collect();
    assert!(
        late.len() == 2 && late.iter().all(|ms| *ms > 0.0),
        "{late:?}"
    );
    // The peak equals that of `torch.cuda.max_memory_allocated`.
    let peak = run["summary"]["memory"]["peak_allocated_bytes"]
        .as_f64()
        .unwrap()
        / f64::from(1 << 20);
    assert!((peak - 2386.87).abs() < 0.01, "{peak}");
}

#[test]
fn engines_and_options_are_distinguished() {
    let megatron = imported(&["megatron-rank0.json.gz"]);
    assert_eq!(megatron["policy"], "megatron");
    assert_eq!(megatron["dtypes"]["reduce"], "bf16");
    assert_eq!(megatron["dtypes"]["main_grads"], "bf16");
    let units = megatron["units"].as_array().unwrap();
    assert_eq!(units.len(), 6, "{units:?}");
    let prefetch = imported(&["prefetch.json.gz"]);
    assert_eq!(prefetch["prefetch"], 2);
    assert_eq!(prefetch["dp_shard"], 4);
    let never = imported(&["never-noshapes.json.gz"]);
    assert_eq!(
        (&never["reshard"], &never["clip"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(never["model"]["hidden"], Value::Null);
    assert!(
        never["undetermined"][0]
            .as_str()
            .unwrap()
            .contains("record_shapes")
    );
    // Without unit names, units are identified by order and size.
    let flat = imported(&["fsdp1.json.gz"]);
    assert_eq!(flat["units"].as_array().unwrap().len(), 6);
    assert_eq!(flat["reshard"], true);
    assert_eq!(flat["model"]["ffn"], 2048);
    for run in [megatron, prefetch, never, flat] {
        assert!(run["attributed_share"].as_f64().unwrap() >= 0.99);
    }
}

/// Jobs on four H100 that differ in one option.
#[test]
fn every_option_is_found() {
    let expected = |name: &str| -> Vec<(&str, Value)> {
        match name {
            "base" => vec![("reshard", json!(true)), ("prefetch", json!("implicit"))],
            "prefetch2" => vec![("prefetch", json!(2))],
            "never" => vec![("reshard", json!(false))],
            "group2" => vec![("reshard", json!(2))],
            "hsdp" => vec![("dp_shard", json!(2)), ("dp_outer", json!(2))],
            "accum-clip" => vec![
                ("accumulation", json!(2)),
                ("gradient_sync", json!("last")),
                ("clip", json!(true)),
            ],
            "ddp" => vec![
                ("strategy", json!("no_shard")),
                ("compile", json!("off")),
                ("dp_shard", json!(4)),
            ],
            "megatron-0" => vec![("strategy", json!("no_shard"))],
            _ => vec![],
        }
    };
    for name in [
        "base",
        "prefetch2",
        "never",
        "units",
        "group2",
        "hsdp",
        "accum-clip",
        "ddp",
        "megatron-0",
    ] {
        let run = imported(&[&format!("{name}.json.gz")]);
        assert!(
            run["attributed_share"].as_f64().unwrap() >= 0.99,
            "{name}: {}",
            run["unmatched"]
        );
        let engine = match name {
            "ddp" => Value::Null,
            n if n.starts_with("megatron") => json!("megatron"),
            _ => json!("fsdp2"),
        };
        let mut all = vec![
            ("policy", engine),
            ("world_size", json!(4)),
            ("recompute", json!("none")),
            ("compile", json!("off")),
        ];
        all.extend(expected(name));
        if !name.starts_with("accum") {
            all.extend([("accumulation", json!(1)), ("clip", json!(false))]);
        }
        for (key, expected) in all {
            assert_eq!(run[key], expected, "{name}: {key}");
        }
        for (key, expected) in [
            ("hidden", 2048),
            ("ffn", 5632),
            ("vocab", 32_000),
            ("layers", 6),
        ] {
            assert_eq!(run["model"][key], expected, "{name}: {key}");
        }
    }
}

#[test]
fn a_cuda_graph_hides_clipping() {
    let run = imported(&["graph.json.gz"]);
    assert_eq!(run["clip"], Value::Null);
    assert!(
        run["undetermined"]
            .to_string()
            .contains("gradient clipping"),
        "{}",
        run["undetermined"]
    );
    assert!(run["attributed_share"].as_f64().unwrap() >= 0.99);
}

/// The database was created from the trace, so both show the same run.
#[test]
fn exports_of_nsight_systems_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.sqlite");
    std::fs::write(&path, unpacked("nsys.sqlite.gz")).unwrap();
    let path = path.to_str().unwrap();
    let export = json(&["import", "--json", path]).remove(0);
    let trace = imported(&["fsdp2-units-rank0.json.gz"]);
    for key in ["units", "policy", "recompute", "accumulation", "steps_by"] {
        assert_eq!(export[key], trace[key], "{key}");
    }
    let ms = |run: &Value| run["step_ms"].as_f64().unwrap();
    assert!((ms(&export) - ms(&trace)).abs() < 0.01);
    assert!(export["attributed_share"].as_f64().unwrap() >= 0.99);
    assert!(export["notes"].to_string().contains("not verified"));
    let count = |run: &Value| run["summary"]["collectives"]["all_gather"]["count"].clone();
    assert_eq!(count(&export), count(&trace));
    // A truncated database, and one of another tool.
    let whole = unpacked("nsys.sqlite.gz");
    let cut = dir.path().join("cut.sqlite");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    assert!(refused(&[&cut]).contains("was cut off"));
    let other = String::from_utf8_lossy(&whole).into_owned();
    assert!(other.contains("CUPTI_ACTIVITY_KIND_KERNEL"));
    let mut bytes = whole;
    let name = b"CUPTI_ACTIVITY_KIND_KERNEL";
    for at in 0..bytes.len() - name.len() {
        if bytes[at..].starts_with(name) {
            bytes[at..at + 5].copy_from_slice(b"OTHER");
        }
    }
    std::fs::write(&cut, bytes).unwrap();
    assert!(refused(&[&cut]).contains("no GPU work was recorded"));
    assert!(refused(&[Path::new(&at("nsys.sqlite.gz"))]).contains("gunzip"));
}

#[test]
fn records_are_compared_with_a_program() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = dir.path().join("job.toml");
    let scenario = scenario.to_str().unwrap();
    shardlab(&[
        "infer",
        &at("fsdp2-compiled-rank0.json.gz"),
        "--out",
        scenario,
    ])
    .assert()
    .success();
    let record = at("fsdp2-compiled-rank0.flight.pickle.gz");
    let found = json(&["import", &record, "--scenario", scenario, "--json"]).remove(0);
    let check = &found["flight"]["program"][0];
    assert_eq!(check["unexpected"], Value::Null, "{check}");
    assert!(check["matched"].as_u64().unwrap() >= check["step"].as_u64().unwrap());
    // Another program issues other collectives.
    let args = [
        "import",
        &record,
        "--scenario",
        scenario,
        "--set",
        "fsdp.units=root",
        "--json",
    ];
    let found = json(&args).remove(0);
    assert_ne!(found["flight"]["program"][0]["unexpected"], Value::Null);
}

#[test]
fn a_measured_run_is_explained_and_gated() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().to_str().unwrap();
    let traces = [
        at("fsdp2-compiled-rank0.json.gz"),
        at("fsdp2-compiled-rank1.json.gz"),
    ];
    shardlab(&[
        "import", &traces[0], &traces[1], "--name", "base", "--store", store,
    ])
    .assert()
    .success();
    let explained = json(&["explain", "base", "--store", store, "--json"]).remove(0);
    assert_eq!(explained["stragglers"].as_array().unwrap().len(), 2);
    let by_cause: f64 = explained["exposed_ms"]["by_cause"]
        .as_object()
        .unwrap()
        .values()
        .map(|ms| ms.as_f64().unwrap())
        .sum();
    let total = explained["exposed_ms"]["total"].as_f64().unwrap();
    assert!((by_cause - total).abs() < 1e-6 && total > 0.0);
    assert!(explained["critical_path"]["spans"].as_u64().unwrap() > 10);
    let text = stdout(&["explain", "base", "--store", store]);
    assert!(
        text.contains("Stragglers") && text.contains("Critical path"),
        "{text}"
    );
    // A run that is compared with itself passes.
    let mut args = vec![
        "gate",
        "--measured",
        &traces[0],
        &traces[1],
        "--baseline",
        "base",
    ];
    args.extend(["--store", store]);
    shardlab(&args).assert().success();
    // Another job has other collectives and uses more memory.
    let base = at("base.json.gz");
    let output = shardlab(&[
        "gate",
        "--measured",
        &base,
        "--baseline",
        "base",
        "--store",
        store,
    ])
    .assert()
    .code(1);
    let text = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(text.contains("the job takes more memory"), "{text}");
    let args = [
        "gate",
        "--measured",
        &base,
        "--baseline",
        &base,
        "--set",
        "gate.max_step_ms=0.5",
    ];
    let output = shardlab(&args).assert().code(1);
    let text = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(text.contains("over the step time budget"), "{text}");
    // Budgets need no baseline, but without any there is nothing to judge by.
    let budget = |set: &[&str], code| {
        let args = [&["gate", "--measured", &base][..], set].concat();
        let output = shardlab(&args).assert().code(code);
        String::from_utf8_lossy(&output.get_output().stderr).into_owned()
    };
    budget(&["--set", "gate.max_memory=100GiB"], 0);
    budget(&["--set", "gate.max_step_ms=0.5"], 1);
    let said = budget(&[], 2);
    assert!(
        said.contains("needs --baseline, or a budget: --set gate.max_memory"),
        "{said}"
    );
    // A budget of memory needs a record of memory, which this trace does not have.
    let silent = at("fsdp2-units-rank0.json.gz");
    let args = [
        "gate",
        "--measured",
        &silent,
        "--baseline",
        &base,
        "--set",
        "gate.max_memory=100GiB",
    ];
    let output = shardlab(&args).assert().code(2);
    let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(error.contains("has no record of memory"), "{error}");
}

#[test]
fn prediction_and_measurement_are_compared_by_unit() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().to_str().unwrap();
    let trace = at("base.json.gz");
    shardlab(&["import", &trace, "--name", "job", "--store", store])
        .assert()
        .success();
    let scenario = dir.path().join("job.toml");
    let scenario = scenario.to_str().unwrap();
    shardlab(&["infer", &trace, "--out", scenario])
        .assert()
        .success();
    let pair = json(&["compare", "job", scenario, "--store", store, "--json"]).remove(0);
    let units = pair["units"].as_array().unwrap();
    let names: Vec<&str> = units.iter().map(|u| u["unit"].as_str().unwrap()).collect();
    for unit in ["root", "layers.0", "layers.5"] {
        assert!(names.contains(&unit), "{names:?}");
    }
    // The times of units sum to those of the steps.
    let sum = |key: &str| units.iter().map(|u| u[key].as_f64().unwrap()).sum::<f64>();
    let measured = pair["metrics"]
        .as_array()
        .unwrap()
        .iter()
        .find(|m| m["name"] == "step_ms")
        .map(|m| m["values"][0].as_f64().unwrap());
    if let Some(ms) = measured {
        assert!((sum("measured") / 1e9 / ms - 1.0).abs() < 0.05, "{ms}");
    }
    let text = stdout(&["compare", "job", scenario, "--store", store]);
    assert!(
        text.contains("wall time by unit") && text.contains("mostly"),
        "{text}"
    );
    // Kernels that clear the output of a matmul are not counted as matmuls.
    let kinds = pair["prediction"]["by_kind"].as_array().unwrap();
    let gemm = kinds.iter().find(|k| k["work"] == "gemm").unwrap();
    assert!(gemm["error"].as_f64().unwrap().abs() < 0.3, "{gemm}");
    let run = json(&["runs", "show", "job", "--full", "--store", store]).remove(0);
    let mfu = run["run"]["mfu"].as_f64().unwrap();
    assert!(mfu > 0.05 && mfu < 0.6, "{mfu}");
    let about = run["run"]["environment"]["mfu"].as_str().unwrap();
    assert!(about.starts_with("derived, not measured"), "{about}");
}

#[test]
fn a_saved_run_is_one_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().to_str().unwrap();
    let trace = at("fsdp2-units-rank0.json.gz");
    shardlab(&["import", &trace, "--name", "base", "--store", store])
        .assert()
        .success();
    let scenario = dir.path().join("inferred.toml");
    let scenario = scenario.to_str().unwrap();
    shardlab(&["infer", &trace, "--out", scenario])
        .assert()
        .success();
    let shown = stdout(&["runs", "--store", store]);
    let row = shown.lines().find(|l| l.contains("fsdp2-units")).unwrap();
    assert!(row.contains(" import "), "{shown}");
    let of_kind = |kind: &str| json(&["runs", "--kind", kind, "--json", "--store", store]).len();
    assert_eq!((of_kind("import"), of_kind("exec")), (1, 0));
    // A trace can record the allocator, but not the device memory outside it.
    let memory = |run: &str| {
        let text = stdout(&["runs", "show", run, "--store", store]);
        let line = text.lines().find(|l| l.starts_with("memory"));
        line.unwrap().to_owned()
    };
    assert_eq!(memory("base"), "memory    not recorded");
    let with_memory = at("base.json.gz");
    shardlab(&["import", &with_memory, "--name", "other", "--store", store])
        .assert()
        .success();
    let line = memory("other");
    assert!(line.contains("GiB, device not recorded"), "{line}");
    let compared = json(&["compare", "base", scenario, "--store", store, "--json"]);
    assert!(compared[0].to_string().contains("layers.0"));
    let report = dir.path().join("report.html");
    let report = report.to_str().unwrap();
    shardlab(&[
        "report", "base", scenario, "--store", store, "--out", report,
    ])
    .assert()
    .success();
    // Units have the names of predictions, so that both are aligned.
    let full: Value = serde_json::from_str(&stdout(&[
        "runs", "show", "base", "--full", "--store", store,
    ]))
    .unwrap();
    let units = full["program"]["units"].as_array().unwrap();
    assert!(
        units.contains(&json!("norm+output")) && units.contains(&json!("tok_embeddings")),
        "{units:?}"
    );
}

#[test]
fn the_inferred_scenario_is_the_one_that_was_run() {
    let text = stdout(&["infer", &at("fsdp2-units-rank0.json.gz")]);
    for line in [
        "layers = 4",
        "hidden = 1024",
        "heads = 16",
        "kv_heads = 8",
        "ffn = 2816",
        "vocab = 32000",
        "tie_embeddings = false",
        "seq_len = 2048",
        "micro_batch = 2",
        "grad_accum = 1",
        "recompute = \"none\"",
        "lr = 3e-4",
        "clip_norm = 0.0",
        "dp_shard = 2",
        "policy = \"fsdp2\"",
        "units = [\"layers.*\", \"tok_embeddings\", \"norm+output=keep\"]",
        "reshard_after_forward = true",
        "reduce_dtype = \"f32\"",
        "mode = \"off\"",
    ] {
        let found = text.lines().find(|l| l.starts_with(line));
        // Each line says how its value was determined.
        assert!(
            found.is_some_and(|l| l.contains(" # ")),
            "{line} in\n{text}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.toml");
    std::fs::write(&path, &text).unwrap();
    let predicted = json(&["sim", path.to_str().unwrap(), "--json"]);
    assert_eq!(predicted[0]["world_size"], 2);
    // An execution trace, which has no times, gives the same result.
    let other = stdout(&["infer", &at("fsdp2-compiled.et.json.gz")]);
    for line in [
        "layers = 4",
        "recompute = \"full\"",
        "units = \"block\"",
        "mode = \"blocks\"",
        "dp_shard = 2",
    ] {
        assert!(
            other.lines().any(|l| l.starts_with(line)),
            "{line} in\n{other}"
        );
    }
}

#[test]
fn a_config_stands_for_shapes_that_were_not_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let config = config.to_str().unwrap();
    let sizes = |layers: u32| {
        json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": 1024,
            "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 32000,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false})
    };
    std::fs::write(config, sizes(4).to_string()).unwrap();
    let text = stdout(&[
        "infer",
        &at("fsdp2-units-rank0.json.gz"),
        "--config",
        config,
    ]);
    assert!(
        text.contains("preset = ") && !text.contains("hidden = "),
        "{text}"
    );
    std::fs::write(config, sizes(5).to_string()).unwrap();
    let output = shardlab(&[
        "infer",
        &at("fsdp2-units-rank0.json.gz"),
        "--config",
        config,
    ])
    .assert()
    .code(2);
    let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(
        error.contains("num_hidden_layers is 5, but the trace shows 4"),
        "{error}"
    );
    let output = shardlab(&["infer", &at("never-noshapes.json.gz")])
        .assert()
        .success();
    let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(said.contains("not determined: model.hidden"), "{said}");
}

/// The config that the job of the trace saved. Its size of the feed-forward layer is not the rank
/// of its adapters.
#[test]
fn the_config_of_a_job_with_adapters_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let config = config.to_str().unwrap();
    let sizes = |ffn: u32| {
        json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 1024,
            "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": ffn, "vocab_size": 32000,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": false})
    };
    let trace = at("lora.json.gz");
    for (args, own) in [
        (&[][..], "ffn = 2816"),
        (&["--config", config], "preset = "),
    ] {
        std::fs::write(config, sizes(2816).to_string()).unwrap();
        let output = shardlab(&[&["infer", &trace][..], args].concat())
            .assert()
            .success();
        let output = output.get_output();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(own) && text.contains("r = 16"), "{text}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("warning"), "{said}");
    }
    std::fs::write(config, sizes(16).to_string()).unwrap();
    let output = shardlab(&["infer", &trace, "--config", config])
        .assert()
        .code(2);
    let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(said.contains("intermediate_size is 16"), "{said}");
}

#[test]
fn snapshots_and_flight_records_are_read() {
    let found = imported(&["fsdp2-compiled.snapshot.pickle.gz"]);
    let device = &found["snapshots"][0]["devices"][0];
    let mib = |key: &str| device[key].as_f64().unwrap() / f64::from(1 << 20);
    assert!((mib("peak_allocated_bytes") - 2386.87).abs() < 0.01);
    assert!((mib("peak_reserved_bytes") - 3262.0).abs() < 0.01);
    let roles: u64 = device["by_role"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(Some(roles), device["peak_allocated_bytes"].as_u64());
    assert!(
        device["notes"][0]
            .as_str()
            .unwrap()
            .contains("recording started during the run")
    );
    let found = imported(&[
        "fsdp2-compiled-rank0.flight.pickle.gz",
        "fsdp2-compiled-rank1.flight.pickle.gz",
    ]);
    assert_eq!(found["flight"]["divergence"], Value::Null);
    assert_eq!(found["flight"]["matched"], 60);
}

#[test]
fn the_offset_of_a_clock_does_not_change_who_was_late() {
    let dir = tempfile::tempdir().unwrap();
    let mut trace: Value =
        serde_json::from_slice(&unpacked("fsdp2-compiled-rank1.json.gz")).unwrap();
    for event in trace["traceEvents"].as_array_mut().unwrap() {
        if let Some(at) = event["ts"].as_f64() {
            event["ts"] = json!(at + 3_000.0);
        }
    }
    let shifted = dir.path().join("rank1.json");
    // With a byte order mark, which does not matter.
    std::fs::write(&shifted, format!("\u{feff}{trace}")).unwrap();
    let first = at("fsdp2-compiled-rank0.json.gz");
    let of = |second: &str| json(&["import", "--json", &first, second]).remove(0);
    let (before, after) = (
        of(&at("fsdp2-compiled-rank1.json.gz")),
        of(shifted.to_str().unwrap()),
    );
    for rank in 0..2 {
        let late = |run: &Value| run["ranks"][rank]["late_ms"].as_f64().unwrap();
        assert!(
            (late(&before) - late(&after)).abs() < 0.01,
            "rank {rank}: {} and {}",
            late(&before),
            late(&after)
        );
    }
    assert_eq!(before["notes"], json!([]));
    let note = after["notes"][0].as_str().unwrap();
    assert!(
        note.starts_with("rank 1: its clock is 3.00 ms ahead of rank 0's, corrected by"),
        "{note}"
    );
}

#[test]
fn without_correlations_causes_are_not_determined() {
    let dir = tempfile::tempdir().unwrap();
    let text = String::from_utf8(unpacked("fsdp2-compiled-rank0.json.gz")).unwrap();
    let path = dir.path().join("rank0.json");
    std::fs::write(&path, text.replace("\"correlation\":", "\"other\":")).unwrap();
    let run = json(&["import", "--json", path.to_str().unwrap()]).remove(0);
    let said = run["undetermined"][0].as_str().unwrap();
    assert!(said.starts_with("causes of exposed time"), "{said}");
}

#[test]
fn a_scenario_is_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let job = dir.path().join("job.toml");
    std::fs::write(&job, "extends = \"llama3-8b-8xh100\"\n").unwrap();
    let error = |args: &[&str]| {
        let output = shardlab(args).assert().code(2);
        String::from_utf8_lossy(&output.get_output().stderr).into_owned()
    };
    let said = error(&["infer", job.to_str().unwrap()]);
    assert!(said.contains("shardlab sim"), "{said}");
    std::fs::write(&job, "[other]\n").unwrap();
    let said = error(&["import", job.to_str().unwrap()]);
    assert!(said.contains("TOML, and no trace"), "{said}");
}

/// Returns the standard error of a call that ends with status 2.
fn refused(files: &[&Path]) -> String {
    let mut args = vec!["import"];
    args.extend(files.iter().map(|f| f.to_str().unwrap()));
    let output = shardlab(&args).assert().code(2);
    let text = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let header = br#"{"schemaVersion": 1, "traceEvents": ["#;
    let cpu = br#"{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}"#;
    for (name, bytes, expected) in [
        ("empty.json", &b""[..], "the file is empty"),
        (
            "no-events.json",
            br#"{"schemaVersion": 1, "traceEvents": []}"#,
            "no events",
        ),
        ("cut.json", header, "before the first event"),
        ("cpu.json", cpu, "no GPU work"),
        ("text.json", b"hello", "of no known format"),
        ("other.json", b"{\"a\": 1}", "neither `traceEvents`"),
        (
            "syntax.json",
            b"{\"traceEvents\": [\n 7]}",
            "syntax.json:2:2",
        ),
        ("nsys.sqlite", b"SQLite format 3\0rest", "it was cut off"),
        (
            "code.pickle",
            b"\x80\x04X\x08\x00\x00\x00segmentscos\nsystem\n(S'true'\ntR.",
            "pickle with code",
        ),
        (
            "cut.pickle",
            b"\x80\x04}X\x08\x00\x00\x00segments",
            "cut off",
        ),
        (
            "record.json",
            b"{\"pg_config\": {}, \"version\": \"2.10\"}",
            "has no `entries`",
        ),
    ] {
        let error = refused(&[&write(name, bytes)]);
        assert!(
            error.contains(expected) && error.contains(name.split('.').next().unwrap()),
            "{name}: {error}"
        );
    }
    let missing = dir.path().join("missing.json");
    assert!(refused(&[&missing]).contains("missing.json"));
    let glob = dir.path().join("none*.json");
    assert!(refused(&[&glob]).contains("no file matches"));
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let file = |name: &str| PathBuf::from(at(name));
    let twice = refused(&[
        &file("fsdp2-compiled-rank0.json.gz"),
        &file("megatron-rank0.json.gz"),
    ]);
    assert!(twice.contains("both are of rank 0"), "{twice}");
    let jobs = refused(&[
        &file("fsdp2-compiled-rank1.json.gz"),
        &file("prefetch.json.gz"),
    ]);
    assert!(jobs.contains("one has 4 ranks, the other 2"), "{jobs}");
    let apart = refused(&[
        &file("fsdp2-compiled-rank1.json.gz"),
        &file("megatron-rank0.json.gz"),
    ]);
    assert!(apart.contains("do not overlap in time"), "{apart}");
}

#[test]
fn a_trace_that_was_cut_off_is_read_up_to_there() {
    let dir = tempfile::tempdir().unwrap();
    let text = unpacked("fsdp2-units-rank0.json.gz");
    let path = dir.path().join("cut.json");
    std::fs::write(&path, &text[..text.len() * 2 / 3]).unwrap();
    let run = json(&["import", "--json", path.to_str().unwrap()]).remove(0);
    let note = run["notes"][0].as_str().unwrap();
    assert!(note.contains("it was cut off"), "{note}");
    assert!(run["events"].as_u64().unwrap() > 1000);
    // The step in which the file ends would look too short.
    assert_eq!(run["step_ms"], Value::Null);
    let said = stdout(&["import", path.to_str().unwrap()]);
    assert!(
        said.contains("the file was cut off before the end of the first complete step"),
        "{said}"
    );
    // The file ends within the compressed data.
    let packed = std::fs::read(at("fsdp2-units-rank0.json.gz")).unwrap();
    std::fs::write(&path, &packed[..packed.len() * 9 / 10]).unwrap();
    let run = json(&["import", "--json", path.to_str().unwrap()]).remove(0);
    assert!(run["notes"][0].as_str().unwrap().contains("it was cut off"));
    // One event with unescaped quotes is counted as damaged; all others are read.
    let text = String::from_utf8(text).unwrap();
    let broken = text.replacen("\"name\":\"aten::mm\"", "\"name\":\"a \"b\" c\"", 1);
    assert_ne!(broken, text);
    std::fs::write(&path, broken).unwrap();
    let run = json(&["import", "--json", path.to_str().unwrap()]).remove(0);
    assert_eq!(run["unmatched"]["by_name"]["malformed events"], 1);
    assert!(run["attributed_share"].as_f64().unwrap() >= 0.99);
}
