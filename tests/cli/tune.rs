//! `tune` on scenarios and framework configurations, and bad input.

use crate::{assert_narrow, shardlab};
use serde_json::Value;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/frameworks");

/// Keys that vary in the tests, so that there are few points.
const ONLY: [&str; 6] = [
    "train.micro_batch",
    "train.recompute",
    "fsdp.reshard_after_forward",
    "fsdp.prefetch_forward",
    "precision.reduce_dtype",
    "fsdp.strategy",
];

/// Returns a call with a small search space.
fn tune(args: &[&str]) -> assert_cmd::Command {
    let only = ONLY.iter().flat_map(|key| ["--only", key]);
    let all: Vec<&str> = ["tune"].into_iter().chain(only).collect();
    let mut command = shardlab(&[&all[..], args].concat());
    command
        .env("HF_HUB_CACHE", "/nonexistent")
        .env("COLUMNS", "100");
    command
}

fn ends(code: i32, args: &[&str]) -> String {
    let output = tune(args).assert().code(code);
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

fn error(args: &[&str]) -> String {
    let output = tune(args).assert().code(2);
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

fn object(code: i32, args: &[&str]) -> Value {
    serde_json::from_str(&ends(code, &[args, &["--json"]].concat())).unwrap()
}

#[test]
fn the_best_settings_have_reasons_and_a_front() {
    let text = ends(0, &["small-fsdp2", "--gpus", "4xh100"]);
    assert_narrow(&text);
    for part in [
        "verdict   fits",
        "next      `shardlab sim small-fsdp2 --set mesh.hardware=h100-80",
        "Changes, and what undoing each one alone would cost",
        "fsdp.reshard_after_forward",
        "Pareto front of step time and reserved memory",
        "combinations were predicted. None is more than 0.5 % better.",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn json_is_what_sim_predicts() {
    let answer = object(0, &["small-fsdp2", "--gpus", "4xh100"]);
    assert_eq!(
        (&answer["found"], &answer["exact"]),
        (&true.into(), &true.into())
    );
    assert!(answer["gap"].as_f64().unwrap() <= 0.005);
    let sim = |set: &Value| {
        let sets = set.as_array().unwrap().iter().map(|s| s.as_str().unwrap());
        let sets: Vec<&str> = sets.flat_map(|s| ["--set", s]).collect();
        let mesh = ["--set", "mesh.hardware=h100-80", "--set", "mesh.dp_shard=4"];
        let run = crate::json(&[&["sim", "small-fsdp2", "--json"], &mesh[..], &sets[..]].concat());
        run[0]["step_ms"]["median"].as_f64().unwrap()
    };
    for which in ["today", "best"] {
        let step = answer[which]["step_ms"].as_f64().unwrap();
        assert_eq!(sim(&answer[which]["set"]), step, "{which}");
    }
    let best = answer["best"]["step_ms"].as_f64().unwrap();
    assert!(best <= answer["today"]["step_ms"].as_f64().unwrap());
    let front = answer["front"].as_array().unwrap();
    assert!(front.iter().all(|p| p["fits"] == true));
    // The same call gives the same answer.
    assert_eq!(object(0, &["small-fsdp2", "--gpus", "4xh100"]), answer);
}

#[test]
fn a_configuration_of_a_framework_is_tuned_within_a_budget() {
    let titan = format!("{DATA}/torchtitan/llama3-8b.toml");
    let args = [
        titan.as_str(),
        "--gpus",
        "8xh100",
        "--budget",
        "60GiB",
        "--keep",
        "train.recompute",
    ];
    let answer = object(0, &args);
    assert_eq!(answer["framework"], "torchtitan");
    let reserved = |of: &Value| of["memory"]["peak_reserved_bytes"].as_u64().unwrap();
    assert!(reserved(&answer["best"]) <= 60 << 30, "{answer}");
    let step = |of: &Value| of["step_ms"].as_f64().unwrap();
    assert!(step(&answer["best"]) < step(&answer["today"]), "{answer}");
}

#[test]
fn what_does_not_fit_exits_with_1_and_says_what_is_missing() {
    let output = tune(&["small-fsdp2", "--gpus", "4xh100", "--budget", "1MiB"])
        .assert()
        .code(1);
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(
        text.contains("No settings fit. Those that come closest lack"),
        "{text}"
    );
    assert!(text.contains("--fewest-gpus"), "{text}");
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(said.contains("no settings fit"), "{said}");
}

#[test]
fn bad_input_says_what_is_expected() {
    for (args, message) in [
        (&["--keep", "fsdp.unit"][..], "did you mean `fsdp.units`?"),
        (
            &["--free", "train.seqlen"][..],
            "did you mean `train.seq_len`?",
        ),
        (
            &[
                "--keep",
                "train.micro_batch=2",
                "--keep",
                "train.micro_batch=1",
            ][..],
            "contradicts --keep",
        ),
        (
            &["--keep", "fsdp.policy", "--free", "fsdp.policy"][..],
            "contradicts --keep fsdp.policy",
        ),
        (&["--budget", "0GiB"][..], "more than 0 bytes"),
        (&["--budget", "70"][..], "needs a unit, such as 70GiB"),
        (&["--gpus", "8xh10"][..], "did you mean `h100`?"),
        (&["--free", "fsdp.policy=zero"][..], "zero"),
        (&["--goal", "speed"][..], "throughput"),
    ] {
        let text = error(&[&["small-fsdp2"], args].concat());
        assert!(text.contains(message), "{message} in\n{text}");
    }
    assert!(error(&["no-such-job"]).contains("no-such-job"));
}

#[test]
fn the_longest_sequence_fits_and_a_longer_one_does_not() {
    let budget = ["--budget", "3GiB"];
    let args = [
        &["small-fsdp2", "--gpus", "4xh100", "--longest-sequence"][..],
        &budget[..],
    ]
    .concat();
    let answer = object(0, &args);
    let today = answer["today"].as_u64().unwrap();
    let reserved = |tokens: u64| {
        let set = format!("train.seq_len={tokens}");
        let run = crate::json(&[
            "sim",
            "small-fsdp2",
            "--json",
            "--set",
            &set,
            "--set",
            "mesh.hardware=h100-80",
            "--set",
            "mesh.dp_shard=4",
        ]);
        run[0]["memory"]["peak_reserved_bytes"].as_u64().unwrap()
    };
    let limit = 3 << 30;
    assert!(reserved(today) <= limit, "{today}");
    let lean = answer["longest"]["tokens"].as_u64().unwrap();
    assert!(lean >= today);
}

#[test]
fn the_largest_micro_batch_fits_and_a_larger_one_does_not() {
    let args = ["small-fsdp2", "--gpus", "4xh100", "--budget", "128MiB"];
    let limit = 128 << 20;
    let answer = object(0, &[&args[..], &["--largest-micro-batch"]].concat());
    let reserved = |samples: u64, set: &Value| {
        let sets = set.as_array().unwrap().iter().map(|s| s.as_str().unwrap());
        let mut sets: Vec<String> = sets.map(str::to_owned).collect();
        sets.extend([
            format!("train.micro_batch={samples}"),
            "mesh.hardware=h100-80".to_owned(),
            "mesh.dp_shard=4".to_owned(),
        ]);
        let sets = sets.iter().flat_map(|s| ["--set", s.as_str()]);
        let call: Vec<&str> = ["sim", "small-fsdp2", "--json"]
            .into_iter()
            .chain(sets)
            .collect();
        let run = crate::json(&call);
        run[0]["memory"]["peak_reserved_bytes"].as_u64().unwrap()
    };
    let today = answer["today"].as_u64().unwrap();
    let none = Value::Array(Vec::new());
    assert!(
        reserved(today, &none) <= limit && reserved(today + 1, &none) > limit,
        "{answer}"
    );
    let lean = &answer["largest"];
    let samples = lean["samples"].as_u64().unwrap();
    let set = &lean["settings"]["set"];
    assert!(samples >= today);
    assert!(
        reserved(samples, set) <= limit && reserved(samples + 1, set) > limit,
        "{answer}"
    );
    // The option cannot be combined with another question.
    let both = error(&[&args[..], &["--largest-micro-batch", "--longest-sequence"]].concat());
    assert!(both.contains("cannot be used with"), "{both}");
}

#[test]
fn the_fewest_gpus_keep_the_batch() {
    let args = ["small-fsdp2", "--gpus", "4xh100", "--fewest-gpus"];
    let answer = object(0, &args);
    let set: Vec<&str> = answer["best"]["set"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s.as_str().unwrap())
        .collect();
    // A small model fits one GPU.
    assert!(set.contains(&"mesh.dp_shard=1"), "{set:?}");
    let keys: Vec<&str> = set.iter().map(|s| s.split_once('=').unwrap().0).collect();
    let once = |key: &&&str| keys.iter().filter(|k| *k == *key).count() == 1;
    assert!(keys.iter().all(|key| once(&key)), "{set:?}");
}

/// 70B with 16 bytes of state per parameter needs more than 14 H100. Every command that says how
/// many are enough says the same: the smallest number of whole nodes.
#[test]
fn every_command_names_the_same_number_of_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.toml");
    let text = "[model]\npreset = \"llama3-70b\"\n\
                [train]\nseq_len = 4096\nrecompute = \"full\"\nloss = \"chunked\"\n\
                [mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n[fsdp]\npolicy = \"fsdp2\"\n";
    std::fs::write(&job, text).unwrap();
    let job = job.to_str().unwrap();
    let json = |args: &[&str]| -> Value {
        let output = shardlab(args).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let args = ["tune", job, "--fewest-gpus", "--only", "train.recompute"];
    let answer = json(&[&args[..], &["--json"]].concat());
    let fewest = answer["fewest_gpus"]["gpus"].as_u64().unwrap();
    assert_eq!(fewest % 8, 0, "{answer}");
    // 8 samples per step are too few for more GPUs.
    assert_eq!(answer["fewest_gpus"]["samples_per_step"], fewest);
    assert_eq!(answer["fewest_gpus"]["samples_per_step_today"], 8);
    assert_eq!(answer["fewest_gpus"]["gpus_today"], 8);
    // The job of today does not fit, and has its own mesh.
    assert_eq!(answer["today"]["fits"], false);
    assert_eq!(answer["today"]["set"].as_array().unwrap().len(), 0);
    let fits = |gpus: u64| {
        let set = format!("mesh.dp_shard={gpus}");
        let sim = json(&["sim", job, "--json", "--set", &set]);
        let of = ["peak_device_bytes", "capacity_bytes"];
        let [used, all] = of.map(|k| sim["memory"][k].as_f64().unwrap());
        used <= 0.95 * all
    };
    assert!(fits(fewest) && !fits(fewest - 8));
    for gpus in ["8xh100", "3xh100"] {
        let overview = json(&["--gpus", gpus, "--json"]);
        let trainings = overview["trainings"].as_array().unwrap();
        let is_it = |t: &&Value| t["model"] == "llama3-70b" && t["training"] == "full";
        let of = trainings.iter().find(is_it).unwrap();
        assert_eq!(of["fits_on_gpus"], fewest, "{gpus}");
    }
}

#[test]
fn the_answer_is_written_in_the_format_of_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.toml");
    let text = std::fs::read_to_string(format!("{DATA}/torchtitan/llama3-8b.toml")).unwrap();
    std::fs::write(&job, &text).unwrap();
    let args = [
        "--gpus",
        "8xh100",
        "--keep",
        "train.recompute",
        "--keep",
        "fsdp.prefetch_forward=2",
    ];
    let call = |more: &[&str]| {
        tune(&[&[job.to_str().unwrap()], &args[..], more].concat())
            .assert()
            .success()
    };
    let output = call(&["--emit", "torchtitan"]);
    let diff = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(
        diff.contains("+mixed_precision_reduce = \"bfloat16\""),
        "{diff}"
    );
    let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(
        said.contains("not expressed: fsdp.prefetch_forward=2"),
        "{said}"
    );
    let to = folder.path().join("tuned.toml");
    call(&["--emit", "job", "-o", to.to_str().unwrap()]);
    let tuned = std::fs::read_to_string(&to).unwrap();
    // The whole file is there, and all other lines are unchanged.
    let kept = text.lines().filter(|l| l.starts_with('#'));
    assert!(kept.into_iter().all(|line| tuned.contains(line)), "{tuned}");
    let fit = shardlab(&["fit", to.to_str().unwrap(), "--gpus", "8xh100", "--json"])
        .assert()
        .success();
    let fit: Value = serde_json::from_slice(&fit.get_output().stdout).unwrap();
    assert!(
        fit["scenario"]
            .as_str()
            .unwrap()
            .contains("reduce_dtype = \"bf16\""),
        "{fit}"
    );
    // Another format is written to a new file.
    let output = call(&["--emit", "python"]);
    let code = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(code.contains("fully_shard(blocks[i]"), "{code}");
}

#[test]
fn a_report_draws_the_front() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("front.html");
    let path = file.to_str().unwrap();
    ends(0, &["small-fsdp2", "--gpus", "4xh100", "--report", path]);
    let page = std::fs::read_to_string(&file).unwrap();
    for part in [
        "<svg",
        "reserved memory, GiB",
        "on the Pareto front",
        "today",
        "best",
    ] {
        assert!(page.contains(part), "{part}");
    }
    let file = folder.path().join("front.md");
    let path = file.to_str().unwrap();
    // The report can be combined with another output format.
    let args = ["small-fsdp2", "--gpus", "4xh100", "--report", path];
    ends(0, &[&args[..], &["--emit", "scenario"]].concat());
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.contains("## Throughput and memory"), "{page}");
    let wrong = error(&["small-fsdp2", "--report", "front.pdf"]);
    assert!(wrong.contains("ends in .html or .md"), "{wrong}");
}

/// The emitted file trains on the longer sequences that were requested.
#[test]
fn a_trainer_configuration_gets_longer_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("train.yaml");
    let text = "model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 512 # tokens\nbf16: true\n\
                per_device_train_batch_size: 4\nfsdp: full_shard auto_wrap\noutput_dir: out\n";
    std::fs::write(&job, text).unwrap();
    let path = job.to_str().unwrap();
    let set = [
        "--set",
        "train.seq_len=1024",
        "--set",
        "train.micro_batch=2",
    ];
    let mut command = shardlab(
        &[
            &["fit", path, "--gpus", "2xh100", "--emit", "job"][..],
            &set,
        ]
        .concat(),
    );
    let output = command.assert().success();
    let diff = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    for line in [
        "+max_length: 1024 # tokens",
        "+per_device_train_batch_size: 2",
    ] {
        assert!(diff.contains(line), "{line} in\n{diff}");
    }
}

#[test]
fn explain_leads_to_tune() {
    let text = crate::stdout(&["explain", "small-fsdp2"]);
    assert!(text.contains("searches all options together"), "{text}");
}

#[test]
fn a_scenario_is_changed_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.toml");
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios/small-fsdp2.toml");
    let text =
        format!("# mine\nextends = {base:?}\n\n[train]\nrecompute = \"full\" # to be safe\n");
    std::fs::write(&job, &text).unwrap();
    let args = [
        job.to_str().unwrap(),
        "--only",
        "train.recompute",
        "--emit",
        "scenario",
    ];
    let output = shardlab(&[&["tune"], &args[..]].concat())
        .assert()
        .success();
    let tuned = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert_eq!(tuned, text.replace("\"full\"", "\"none\""));
}

#[cfg(unix)]
#[test]
fn an_interrupt_shows_the_best_so_far() {
    use std::process::{Command, Stdio};
    let child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
        .args(["tune", "llama3-8b-8xh100", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The whole search takes far longer, except on a fast machine, where it simply finishes.
    std::thread::sleep(std::time::Duration::from_secs(2));
    Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let interrupted = answer["interrupted"] == true;
    assert_eq!(output.status.code(), Some(if interrupted { 3 } else { 0 }));
    let step = |of: &Value| of["step_ms"].as_f64().unwrap();
    assert!(step(&answer["best"]) <= step(&answer["today"]));
    assert!(!interrupted || answer["gap"].is_null());
}

/// Gathers of codes and saved codes have no effect without an 8-bit recipe, so they are tried
/// together with it.
#[test]
fn recipes_of_8_bits_come_with_their_codes() {
    let native = [
        "peers-1b",
        "--set",
        "fsdp.policy=native",
        "--set",
        "compile.mode=blocks",
    ];
    let free = ["--free", "precision.float8_recipe=tensorwise"];
    let call = |only: &[&str]| -> Value {
        let only = only.iter().flat_map(|key| ["--only", key]);
        let all: Vec<&str> = ["tune", "--json"]
            .into_iter()
            .chain(native)
            .chain(free)
            .collect();
        let all: Vec<&str> = all.into_iter().chain(only).collect();
        let output = shardlab(&all).assert().code(0);
        serde_json::from_slice(&output.get_output().stdout).unwrap()
    };
    let set = |answer: &Value| {
        let all = answer["best"]["set"].as_array().unwrap().iter();
        all.map(|s| s.as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let codes = ["precision.float8_all_gather", "precision.float8_saved"];
    let found = set(&call(&codes));
    for wanted in [
        "precision.float8_recipe=tensorwise",
        "precision.float8_all_gather=true",
    ] {
        assert!(found.iter().any(|s| s == wanted), "{wanted}: {found:?}");
    }
    // Kept keys are not changed by a recipe either.
    let alone = set(&call(&["precision.float8_saved"]));
    assert!(
        alone
            .iter()
            .any(|s| s == "precision.float8_recipe=tensorwise")
    );
    assert!(!alone.iter().any(|s| s.contains("all_gather")), "{alone:?}");
}
