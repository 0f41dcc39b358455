//! `fit` on published configurations, scenarios, and bad input.

use crate::{assert_narrow, shardlab, stdout};
use serde_json::Value;
use std::path::Path;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/frameworks");

/// Returns a call that ignores the user's cache of downloaded models.
fn fit(args: &[&str]) -> assert_cmd::Command {
    let mut command = shardlab(&[&["fit"], args].concat());
    command
        .env("HF_HUB_CACHE", "/nonexistent")
        .env("COLUMNS", "100");
    command
}

fn at(name: &str) -> String {
    format!("{DATA}/{name}")
}

/// Returns the standard output of a call that ends with this exit status.
fn ends(code: i32, args: &[&str]) -> String {
    let output = fit(args).assert().code(code);
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

fn error(args: &[&str]) -> String {
    let output = fit(args).assert().code(2);
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

fn object(code: i32, args: &[&str]) -> Value {
    serde_json::from_str(&ends(code, args)).unwrap()
}

#[test]
fn a_job_that_fits_exits_with_0_and_one_that_does_not_with_1() {
    let titan = at("torchtitan/llama3-8b.toml");
    let text = ends(0, &[&titan, "--gpus", "8xh100"]);
    assert_narrow(&text);
    assert!(text.contains("verdict   fits"), "{text}");
    assert!(text.contains("training.local_batch_size"), "{text}");
    assert!(text.contains("train.micro_batch = 1"), "{text}");
    // All other keys are listed with the reason.
    assert!(text.contains("metrics.log_freq"), "{text}");

    let text = ends(1, &[&titan, "--gpus", "1xa100"]);
    assert!(text.contains("verdict   does not fit"), "{text}");
    let text = ends(1, &[&titan, "--gpus", "1xa100", "--check"]);
    assert!(!text.contains("Keys of"), "{text}");
}

/// A key that the prediction does not follow is named next to the verdict, also with `--check` and
/// as JSON, until the user gives what it stands for.
#[test]
fn doubts_about_a_job_are_warnings_with_the_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.sh");
    let script = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-0.6B --bf16 True \\\n\
                  --per_device_train_batch_size 1 --gradient_accumulation_steps $ACCU --pack_len 4096\n";
    std::fs::write(&path, script).unwrap();
    let job = path.display().to_string();
    let args = [job.as_str(), "--gpus", "8xh100"];
    let check = ends(0, &[&args[..], &["--check"]].concat());
    assert!(
        check.contains("gradient_accumulation_steps = $ACCU"),
        "{check}"
    );
    assert!(check.contains("--set train.seq_len=N"), "{check}");
    let answer = object(0, &[&args[..], &["--json"]].concat());
    let warnings = answer["warnings"].as_array().unwrap();
    let of_job = warnings.iter().filter(|w| w["kind"] == "configuration");
    let keys: Vec<&str> = of_job.map(|w| w["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["train.grad_accum", "train.seq_len"]);
    let place = format!("{job}:2:");
    assert!(
        warnings[0]["place"].as_str().unwrap().starts_with(&place),
        "{warnings:?}"
    );
    let set = [
        "--check",
        "--set",
        "train.grad_accum=2",
        "--set",
        "train.seq_len=4096",
    ];
    let check = ends(0, &[&args[..], &set].concat());
    assert!(!check.contains("warning"), "{check}");
}

/// `examples/vlm_sft/sft.toml` of prime-rl: TOML that is no scenario.
#[test]
fn toml_of_other_frameworks_is_not_read_as_a_scenario() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sft.toml");
    let text = "max_steps = 20\n[model]\nname = \"x\"\noptimization_dtype = \"bfloat16\"\n[data]\nseq_len = 16384\n";
    std::fs::write(&path, text).unwrap();
    let message = error(&[&path.display().to_string(), "--gpus", "8xh100"]);
    assert!(message.contains("prime-rl are not read"), "{message}");
}

#[test]
fn what_does_not_fit_names_the_smallest_change() {
    let axolotl = at("axolotl/qwen2-pretrain-fsdp2.yaml");
    let set = ["--set", "train.micro_batch=64"];
    let answer = object(
        1,
        &[
            &[axolotl.as_str(), "--gpus", "8xa100-40", "--json"][..],
            &set[..],
        ]
        .concat(),
    );
    assert_eq!(answer["fits"], "no");
    let next = answer["verdict"]["next"].as_str().unwrap();
    assert!(
        next.starts_with("smallest change that fits: `--set "),
        "{next}"
    );
}

#[test]
fn json_has_every_key_with_its_place() {
    let handbook = at("trainer/smollm2-sft.yaml");
    let answer = object(0, &[&handbook, "--gpus", "8xh100", "--json"]);
    assert_eq!(answer["framework"], "the Hugging Face Trainer");
    let keys = answer["keys"].as_array().unwrap();
    let text = std::fs::read_to_string(&handbook).unwrap();
    let of = |name: &str| keys.iter().find(|k| k["key"] == name).unwrap();
    for name in [
        "gradient_accumulation_steps",
        "max_seq_length",
        "seed",
        "warmup_ratio",
    ] {
        let line = of(name)["line"].as_u64().unwrap();
        let written = text
            .lines()
            .nth(usize::try_from(line).unwrap() - 1)
            .unwrap();
        assert!(written.starts_with(name), "{name}: {written}");
    }
    assert_eq!(of("max_seq_length")["status"], "used");
    assert_eq!(of("max_seq_length")["scenario"][0]["key"], "train.seq_len");
    assert_eq!(of("seed")["status"], "no counterpart");
    assert_eq!(of("seed")["lacks"], "nothing");
    let scenario = answer["scenario"].as_str().unwrap();
    assert!(scenario.contains("seq_len = 8192"), "{scenario}");
}

#[test]
fn an_emitted_scenario_predicts_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let torchtune = at("torchtune/qwen3-8b-full.yaml");
    let emitted = ends(0, &[&torchtune, "--gpus", "8xh200", "--emit", "scenario"]);
    let file = folder.path().join("job.toml");
    std::fs::write(&file, emitted).unwrap();
    let answer = object(0, &[&torchtune, "--gpus", "8xh200", "--json"]);
    let sim: Value =
        serde_json::from_str(&stdout(&["sim", file.to_str().unwrap(), "--json"])).unwrap();
    assert_eq!(answer["verdict"]["step_ms"], sim["verdict"]["step_ms"]);
    assert_eq!(
        answer["verdict"]["free_bytes"],
        sim["verdict"]["free_bytes"]
    );
}

#[test]
fn files_that_belong_together_make_one_job() {
    let accelerate = at("accelerate/handbook-fsdp.yaml");
    let trainer = at("trainer/zephyr-7b-sft.yaml");
    let answer = object(
        1,
        &[
            &accelerate,
            &trainer,
            "--gpus",
            "a100",
            "--json",
            "--set",
            "train.recompute=none",
        ],
    );
    let scenario = answer["scenario"].as_str().unwrap();
    for expected in [
        "policy = \"fsdp2\"",
        "micro_batch = 16",
        "dp_shard = 8",
        "reduce_dtype = \"bf16\"",
    ] {
        assert!(scenario.contains(expected), "{expected} in\n{scenario}");
    }
}

#[test]
fn scenarios_and_models_are_jobs_too() {
    let text = ends(0, &["small-fsdp2", "--check"]);
    assert!(text.contains("verdict   fits"), "{text}");
    let answer = object(0, &["llama3-8b-4xh200", "--gpus", "8xh200", "--json"]);
    assert_eq!(answer["framework"], Value::Null);
    let model = at("trainer/mistralai/Mistral-7B-v0.1");
    let answer = object(
        0,
        &[
            &model,
            "--gpus",
            "8xh200",
            "--json",
            "--set",
            "train.seq_len=2048",
        ],
    );
    let scenario = answer["scenario"].as_str().unwrap();
    assert!(scenario.contains("policy = \"fsdp2\""), "{scenario}");
    let text = ends(0, &[&model, "--gpus", "8xh200"]);
    assert!(
        text.contains("Settings: 3 from the command line, 4 assumed"),
        "{text}"
    );
    assert!(text.contains("train.micro_batch = 1"), "{text}");
    assert!(text.contains("a length of sequences"), "{text}");
}

/// A published QLoRA job with another model, and the blocks of that model.
#[test]
fn frozen_weights_in_four_bits_are_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let published = std::fs::read_to_string(at("axolotl/llama3-70b-qlora-fsdp.yaml")).unwrap();
    let job = folder.path().join("qlora.yaml");
    let blocks = ("LlamaDecoderLayer", "MistralDecoderLayer");
    std::fs::write(&job, published.replace(blocks.0, blocks.1)).unwrap();
    let job = job.display().to_string();
    let model = at("trainer/mistralai/Mistral-7B-v0.1");
    let with = |more: &[&str]| {
        let args = [&job, "--gpus", "8xh100", "--model", &model, "--json"];
        object(0, &[&args[..], more].concat())
    };
    let four = with(&[]);
    let scenario = four["scenario"].as_str().unwrap();
    assert!(scenario.contains("frozen_params = \"nf4\""), "{scenario}");
    let sixteen = with(&["--set", "precision.frozen_params=bf16"]);
    let free = |answer: &Value| answer["verdict"]["free_bytes"].as_i64().unwrap();
    assert!(free(&four) > free(&sixteen), "{four:#}");
    let eight = with(&["--set", "precision.frozen_params=int8"]);
    assert!(free(&four) > free(&eight) && free(&eight) > free(&sixteen));
}

#[test]
fn a_job_that_cannot_be_predicted_is_bad_input() {
    let titan = at("torchtitan/llama3-70b.toml");
    let text = error(&[&titan, "--gpus", "16xh100"]);
    assert!(text.contains("tensor parallelism is not modeled"), "{text}");
}

#[test]
fn bad_input_says_what_to_write() {
    let titan = at("torchtitan/llama3-8b.toml");
    assert!(error(&[&titan]).contains("add --gpus, such as --gpus 8xh100"));
    assert!(error(&[&titan, "--gpus", "h100"]).contains("on how many GPUs"));
    assert!(error(&[&titan, "--gpus", "eight"]).contains("eight"));
    let unknown = error(&[&titan, "--gpus", "8xh10"]);
    assert!(unknown.contains("h10"), "{unknown}");
    let other = error(&[&titan, "--gpus", "2x4090"]);
    assert!(
        other.contains("no profile `4090` is shipped") && other.contains("shardlab calibrate"),
        "{other}"
    );
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let typo = write(
        "typo.yaml",
        "base_model: Qwen/Qwen3-8B\nsequence_lenn: 512\n",
    );
    let text = error(&[&typo, "--gpus", "8xh100"]);
    assert!(
        text.contains(
            "typo.yaml:2:1: `sequence_lenn` is not a key of Axolotl; did you mean `sequence_len`?"
        ),
        "{text}"
    );
    let unknown = write(
        "unknown.yaml",
        "base_model: some/model\nsequence_len: 512\n",
    );
    let text = error(&[&unknown, "--gpus", "8xh100"]);
    assert!(
        text.contains("https://huggingface.co/some/model/resolve/main/config.json"),
        "{text}"
    );
    let other = write("other.yaml", "hello: world\n");
    assert!(error(&[&other]).contains("the format is not known"));
    let missing = folder.path().join("none.yaml");
    assert!(error(&[missing.to_str().unwrap()]).contains("none.yaml"));
    assert!(Path::new(&other).exists());
}

/// Variables of a script are resolved if the script sets them; otherwise, the message names them.
#[test]
fn variables_of_scripts_are_resolved_or_named() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("train.sh");
    let text = |vocab: &str| {
        format!(
            "#!/bin/bash\nGPUS=8\nMB=2\nSEQ=$((1024*2))\nARGS=(\n  --num-layers 2 --hidden-size 256 --num-attention-heads 8\n  \
             --seq-length $SEQ --max-position-embeddings $SEQ\n  --micro-batch-size $MB --global-batch-size $((MB * GPUS * 4))\n  \
             --lr $LR --bf16 --swiglu --normalization RMSNorm --vocab-size {vocab}\n)\n\
             torchrun --nproc_per_node $GPUS pretrain_gpt.py \"${{ARGS[@]}}\"\n"
        )
    };
    let path = script.to_str().unwrap();
    std::fs::write(&script, text("32000")).unwrap();
    let answer = object(0, &[path, "--gpus", "h100", "--json"]);
    let scenario = answer["scenario"].as_str().unwrap();
    for line in [
        "seq_len = 2048",
        "micro_batch = 2",
        "grad_accum = 4",
        "dp_shard = 8",
    ] {
        assert!(scenario.contains(line), "{line} in\n{scenario}");
    }
    let keys = answer["keys"].as_array().unwrap();
    let rate = keys.iter().find(|k| k["key"] == "--lr").unwrap();
    assert_eq!(rate["why"], "a variable that the file does not set");

    std::fs::write(&script, text("$VOCAB")).unwrap();
    let said = error(&[path, "--gpus", "h100"]);
    for part in [
        "`model.vocab` is missing",
        "--set gives what they stand for",
        "train.sh:9:",
        "--vocab-size = $VOCAB",
    ] {
        assert!(said.contains(part), "{part} in {said}");
    }
    object(
        0,
        &[
            path,
            "--gpus",
            "h100",
            "--json",
            "--set",
            "model.vocab=32000",
        ],
    );
}

#[test]
fn yaml_anchors_are_followed_and_includes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.yaml");
    let path = job.to_str().unwrap();
    let text = "base_model: Qwen/Qwen3-0.6B\nsequence_len: 512\nmicro_batch_size: &m 2\n\
                gradient_accumulation_steps: *m\nfsdp_version: 2\n";
    std::fs::write(&job, text).unwrap();
    let answer = object(0, &[path, "--gpus", "8xh100", "--json"]);
    let scenario = answer["scenario"].as_str().unwrap();
    assert!(scenario.contains("grad_accum = 2"), "{scenario}");
    for (line, message) in [
        (
            "deepspeed: !include ds.json\n",
            "job.yaml:6:12: the tag `!include` is not followed",
        ),
        ("deepspeed: *other\n", "unknown anchor"),
    ] {
        std::fs::write(&job, format!("{text}{line}")).unwrap();
        let said = error(&[path, "--gpus", "8xh100"]);
        assert!(said.contains(message), "{said}");
    }
}

#[test]
fn what_cannot_fit_says_on_how_many_gpus_it_would() {
    let profile = stdout(&["scenarios", "--hardware", "a100-40"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpu24.toml");
    std::fs::write(
        &file,
        profile.replace("memory_mib = 40448", "memory_mib = 24000"),
    )
    .unwrap();
    let gpus = format!("1x{}", file.display());
    let model = [
        "--set",
        "model.preset=llama3-8b",
        "--set",
        "train.seq_len=512",
    ];
    let args = [&["llama3-8b-8xh100", "--gpus", &gpus, "--json"][..], &model].concat();
    let answer = object(1, &args);
    let next = answer["verdict"]["next"].as_str().unwrap();
    assert!(
        next.starts_with("no combination of up to three options fits on these GPUs")
            && next.contains("more GPUs do: `--set mesh.dp_shard="),
        "{next}"
    );
}

#[test]
fn published_configurations_get_an_answer_or_a_reason() {
    let model = at("trainer/mistralai/Mistral-7B-v0.1");
    let mut seen = 0;
    for framework in [
        "axolotl",
        "bridge",
        "litgpt",
        "llama-factory",
        "llm-foundry",
        "megatron",
        "nemo",
        "swift",
        "torchtitan",
        "torchtune",
        "trainer",
        "verl",
    ] {
        for entry in std::fs::read_dir(at(framework)).unwrap() {
            let path = entry.unwrap().path();
            if !path.is_file() {
                continue;
            }
            let path = path.to_str().unwrap();
            let args = [path, "--gpus", "8xb200", "--check"];
            let output = fit(&args).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            match output.status.code() {
                Some(0 | 1) => {}
                Some(2) if stderr.contains("--model") => {
                    let again = fit(&[&args[..], &["--model", &model][..]].concat())
                        .output()
                        .unwrap();
                    assert!(
                        matches!(again.status.code(), Some(0..=2)),
                        "{path}: {again:?}"
                    );
                }
                Some(2) => assert!(stderr.contains(path), "{path}: {stderr}"),
                code => panic!("{path}: {code:?}: {stderr}"),
            }
            seen += 1;
        }
    }
    assert!(seen >= 20, "{seen}");
}

#[test]
fn what_a_model_s_file_says_and_no_key_expresses_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    // In the format of Python's `json`.
    let config = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "time_step_limit": [0, Infinity],
        "quantization_config": {"quant_method": "fp8"}}"#;
    std::fs::write(&file, config).unwrap();
    let path = file.to_str().unwrap();
    let set = ["--set", "train.seq_len=16", "--set", "train.steps=2"];
    let quantized =
        "`quantization_config` (fp8) is not used: weights have the types of [precision]";
    let sentences = |object: &Value, key: &str| -> Vec<String> {
        let all = object[key].as_array().unwrap().iter();
        all.filter(|w| w["kind"] == "model_file")
            .map(|w| w["message"].as_str().unwrap().to_owned())
            .collect()
    };
    for job in [path, folder.path().to_str().unwrap()] {
        let args = [&[job, "--gpus", "2xh100"], &set[..]].concat();
        let text = ends(0, &args);
        let line = format!("warning   {path}:1:1: {quantized}");
        assert!(text.replace("\n          ", " ").contains(&line), "{text}");
        let found = object(0, &[&args[..], &["--json"]].concat());
        // Embedding and output; two layers with four projections in attention and three in the
        // feed-forward layer; norms.
        let total = 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64;
        assert_eq!(found["parameters"]["total"], total);
        let expected = [
            quantized,
            "a llama does not use `time_step_limit`",
            "`time_step_limit` holds Infinity or NaN, which are not JSON",
        ];
        assert_eq!(sentences(&found, "warnings"), expected);
    }
    let preset = format!("model.preset={path}");
    let scenario = [&["small-native", "--set", &preset][..], &set].concat();
    for (verb, key) in [
        ("plan", "warnings"),
        ("check", "model_warnings"),
        ("sweep", "warnings"),
        ("explain", "warnings"),
        ("sim", "warnings"),
        ("exec", "warnings"),
    ] {
        let steps = (verb == "exec").then_some(["--steps", "1"]);
        let scenario = [&scenario[..], steps.as_ref().map_or(&[][..], |s| &s[..])].concat();
        let object = crate::json(&[&[verb], &scenario[..], &["--json"]].concat());
        assert_eq!(sentences(&object[0], key).len(), 3, "{verb}");
        assert!(object[0]["parameters"]["total"].is_u64(), "{verb}");
    }
    for verb in ["check", "sweep"] {
        let text = stdout(&[&[verb], &scenario[..]].concat());
        assert!(
            text.contains("`quantization_config` (fp8)"),
            "{verb}: {text}"
        );
    }
    let page = folder.path().join("report.md").display().to_string();
    for (verb, more) in [
        ("exec", vec!["--steps", "1"]),
        (
            "gate",
            vec!["--no-exec", "--set", "gate.max_memory=\"1GiB\""],
        ),
        ("report", vec!["--out", &page]),
    ] {
        let output = shardlab(&[&[verb], &scenario[..], &more].concat())
            .assert()
            .success();
        let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(
            error.contains("`quantization_config` (fp8)"),
            "{verb}: {error}"
        );
    }
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(
        page.contains("Warning: ") && page.contains("(fp8)"),
        "{page}"
    );
    // The listing on standard output does not change.
    let output = shardlab(&[&["plan"], &scenario[..]].concat())
        .assert()
        .success();
    let error = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(error.contains("warning: --set model.preset="), "{error}");
}

#[test]
fn what_another_policy_or_key_predicts_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = std::fs::read_to_string(at("axolotl/qwen2-pretrain-fsdp2.yaml")).unwrap();
    let optimizer = yaml.lines().find(|l| l.starts_with("optimizer:")).unwrap();
    let job = folder.path().join("muon.yaml");
    std::fs::write(&job, yaml.replace(optimizer, "optimizer: muon")).unwrap();
    let answer = object(0, &[job.to_str().unwrap(), "--gpus", "8xh100", "--json"]);
    let why = |key: &str| -> String {
        let keys = answer["keys"].as_array().unwrap();
        let found = keys.iter().find(|k| k["key"] == key).unwrap();
        found["why"].as_str().unwrap_or_default().to_owned()
    };
    let muon = why("optimizer");
    assert!(muon.contains("fsdp.policy = \"native\""), "{muon}");
    let packing = why("sample_packing");
    assert!(packing.contains("train.document_lengths"), "{packing}");
}
