//! LitGPT: what its code fixes for each command, precision and adapters.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Options, Status};

const MODEL: &str = "checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B\n";
const TRAIN: &str = "train: {save_interval: 200, global_batch_size: 64, micro_batch_size: 4, max_seq_length: 512}\n";

fn any() -> Options {
    Options {
        gpus: Some("h100".parse().unwrap()),
        ..Options::default()
    }
}

fn read(more: &str) -> Job {
    let text = format!("{MODEL}{TRAIN}{more}");
    try_text("job.yaml", &text, &any()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn script(command: &str) -> Job {
    try_text("train.sh", command, &any()).unwrap_or_else(|e| panic!("{e}\n{command}"))
}

/// `FSDPStrategy` with checkpointed blocks on several GPUs, nothing of it on one.
#[test]
fn full_fine_tuning_shards_and_recomputes_on_several_gpus() {
    let job = read("devices: 4\nprecision: bf16-true\n");
    has(
        &job,
        &[
            ("mesh.dp_shard", "4"),
            ("fsdp.policy", "\"fsdp2\""),
            ("fsdp.gradient_sync", "\"last\""),
            ("train.recompute", "\"full\""),
            ("train.grad_accum", "4"),
            ("train.seq_len", "512"),
            ("precision.param_dtype", "\"bf16\""),
            ("precision.main_params", "\"none\""),
            ("precision.reduce_dtype", "\"bf16\""),
            ("precision.moments", "\"bf16\""),
        ],
    );
    let one = read("precision: bf16-true\n");
    has(
        &one,
        &[
            ("mesh.dp_shard", "1"),
            ("fsdp.strategy", "\"no_shard\""),
            ("train.grad_accum", "16"),
        ],
    );
    assert_eq!(setting(&one, "train.recompute"), None);
}

/// `FSDPPrecision` gathers float32 weights under `bf16-mixed` and reduces in bfloat16; it is the
/// default (`get_default_supported_precision`).
#[test]
fn mixed_precision_is_an_approximation() {
    for precision in ["", "precision: bf16-mixed\n"] {
        let job = read(&format!("devices: 4\n{precision}"));
        has(
            &job,
            &[
                ("precision.param_dtype", "\"bf16\""),
                ("precision.reduce_dtype", "\"bf16\""),
            ],
        );
        assert_eq!(setting(&job, "precision.main_params"), None);
        let (status, why) = row(&job, "precision");
        assert_eq!(status, Status::Assumed);
        assert!(why.contains("float32"), "{why}");
    }
    let job = read("devices: 4\nprecision: 32-true\n");
    has(&job, &[("precision.param_dtype", "\"f32\"")]);
    let text = format!("{MODEL}{TRAIN}precision: bf16\n");
    let error = try_text("job.yaml", &text, &any()).unwrap_err();
    assert!(
        error.starts_with("job.yaml:3:12: ") && error.contains("bf16-true"),
        "{error}"
    );
}

/// `finetune_lora` trains queries and values by default, with a rank of 8, and calls `fully_shard`.
#[test]
fn adapters_have_their_defaults() {
    let job = read("lora_r: 16\nlora_mlp: true\ndevices: 2\nprecision: bf16-true\n");
    has(
        &job,
        &[
            ("lora.r", "16"),
            ("lora.lora_alpha", "16.0"),
            ("lora.lora_dropout", "0.05"),
            (
                "lora.target_modules",
                "[\"gate_proj\", \"up_proj\", \"down_proj\", \"q_proj\", \"v_proj\"]",
            ),
            ("fsdp.policy", "\"fsdp2\""),
            ("train.recompute", "\"full\""),
        ],
    );
    let job = script("litgpt finetune meta-llama/Llama-3.2-1B --train.max_seq_length 256\n");
    has(
        &job,
        &[
            ("model.preset", "\"llama3.2-1b\""),
            ("lora.r", "8"),
            ("lora.target_modules", "[\"q_proj\", \"v_proj\"]"),
            ("train.grad_accum", "16"),
        ],
    );
    let (status, why) = row(&job, "frozen weights");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy));
    assert!(why.contains("one GPU"), "{why}");
    let sharded = read("lora_r: 16\ndevices: 2\n");
    has(&sharded, &[("precision.frozen_params", "\"f32\"")]);
    let quantized = "quantize: bnb.nf4-dq\nprecision: bf16-true\n";
    has(&read(quantized), &[("precision.frozen_params", "\"nf4\"")]);
    let several = read(&format!("{quantized}devices: 2\n"));
    let refused: Vec<_> = several.decisive().collect();
    assert_eq!(refused.len(), 1);
    assert!(refused[0].why.as_ref().unwrap().contains("does not start"));
}

/// `pretrain` compiles, replicates over nodes and recomputes nothing.
#[test]
fn pretraining_replicates_over_nodes() {
    let text = "model_name: Llama-3-8B\ndevices: 8\nnum_nodes: 2\nprecision: bf16-true\n\
                train: {global_batch_size: 512, micro_batch_size: 4, lr_warmup_steps: 200, max_norm: 0.5, tie_embeddings: true}\n";
    let job = try_text("job.yaml", text, &any()).unwrap();
    has(
        &job,
        &[
            ("mesh.dp_shard", "8"),
            ("mesh.dp_replicate", "2"),
            ("compile.mode", "\"regions\""),
            ("train.clip_norm", "0.5"),
            ("train.grad_accum", "8"),
            ("model.tie_embeddings", "true"),
        ],
    );
    assert_eq!(setting(&job, "train.recompute"), None);
}

/// Options of a command, its positional argument, and commands that train nothing.
#[test]
fn commands_are_read() {
    let command = "litgpt download meta-llama/Llama-3.2-1B --access_token x\n\
                   litgpt finetune_full meta-llama/Llama-3.2-1B --devices 4 --data JSON --data.json_path x.json \\\n  \
                   --train.global_batch_size 32 --train.micro_batch_size 2 --precision bf16-true\n\
                   litgpt evaluate out/final --tasks gsm8k\n";
    let job = script(command);
    assert_eq!(job.framework, "LitGPT");
    has(
        &job,
        &[
            ("model.preset", "\"llama3.2-1b\""),
            ("mesh.dp_shard", "4"),
            ("train.micro_batch", "2"),
            ("train.grad_accum", "4"),
        ],
    );
    let (status, _) = row(&job, "data.json_path");
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing));
    let adapter = command.replace("finetune_full", "finetune_adapter");
    let refused: Vec<String> = script(&adapter).decisive().map(|r| r.key.clone()).collect();
    assert_eq!(refused, ["litgpt"]);
    let typo = command.replace("micro_batch_size", "micro_batch_sze");
    let error = try_text("train.sh", &typo, &eight()).unwrap_err();
    assert!(
        error.starts_with("train.sh:3:32: ") && error.contains("did you mean `micro_batch_size`?"),
        "{error}"
    );
}

/// Sizes in `model_config` are not read, unless `--model` replaces them.
#[test]
fn sizes_of_a_model_are_reported() {
    let text = "model_name: Llama-3-8B\nmodel_config: {n_layer: 4, n_embd: 256}\ntrain: {lr_warmup_steps: 20}\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    let (status, why) = row(&job, "model_config.n_layer");
    assert_eq!(status, Status::NoCounterpart(Lack::Everything));
    assert!(why.contains("--model"), "{why}");
    let options = Options {
        model: Some("../tests/data/frameworks/trainer/mistralai/Mistral-7B-v0.1".into()),
        ..eight()
    };
    let job = try_text("job.yaml", text, &options).unwrap();
    assert_eq!(job.decisive().count(), 0);
}
