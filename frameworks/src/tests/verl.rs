//! verl's supervised fine-tuning, in files and in commands with overrides.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Status};

fn text(data: &str, model: &str, more: &str) -> String {
    format!(
        "data: {{micro_batch_size_per_gpu: 2{data}}}\nmodel: {{partial_pretrain: Qwen/Qwen3-8B{model}}}\n{more}"
    )
}

fn read(data: &str, model: &str, more: &str) -> Job {
    let text = text(data, model, more);
    try_text("sft.yaml", &text, &eight()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn script(overrides: &str) -> Result<Job, String> {
    let command = format!(
        "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer {overrides} $@\n"
    );
    try_text("run.sh", &command, &eight())
}

/// Defaults of `sft_trainer.yaml`, and what `_build_model_optimizer` sets.
#[test]
fn defaults_are_those_of_the_trainer() {
    let job = read("", "", "");
    has(
        &job,
        &[
            ("train.grad_accum", "16"),
            ("train.seq_len", "1024"),
            ("train.recompute", "\"full\""),
            ("train.clip_norm", "1.0"),
            ("fsdp.policy", "\"fsdp2\""),
            ("fsdp.units", "\"block_and_ends\""),
            ("precision.param_dtype", "\"bf16\""),
            ("model.implementation", "\"transformers\""),
            ("model.attn_implementation", "\"flash_attention_2\""),
        ],
    );
    // Weights are float32, and gradients are reduced in float32.
    assert_eq!(setting(&job, "precision.main_params"), None);
    assert_eq!(setting(&job, "precision.reduce_dtype"), None);
    assert_eq!(setting(&job, "fsdp.gradient_sync"), None);
}

#[test]
fn options_of_fsdp_are_read() {
    let model = ", strategy: fsdp, enable_gradient_checkpointing: false, fsdp_config: {model_dtype: bf16, offload_params: true}";
    let job = read(", train_batch_size: 64, max_length: 4096", model, "");
    has(
        &job,
        &[
            ("train.grad_accum", "4"),
            ("train.seq_len", "4096"),
            ("fsdp.offload", "[\"params\", \"grads\", \"optimizer\"]"),
            ("precision.reduce_dtype", "\"f32\""),
            ("precision.main_params", "\"none\""),
            ("precision.moments", "\"bf16\""),
        ],
    );
    assert_eq!(setting(&job, "train.recompute"), None);
    assert_eq!(setting(&job, "fsdp.units"), None);
    let (_, why) = row(&job, "model.strategy");
    assert!(why.contains("FSDP1"), "{why}");
    let wrong = text("", ", strategy: ddp", "");
    let error = try_text("sft.yaml", &wrong, &eight()).unwrap_err();
    assert!(
        error.starts_with("sft.yaml:2:52: ") && error.contains("fsdp or fsdp2"),
        "{error}"
    );
}

#[test]
fn adapters_are_read() {
    let job = read("", ", lora_rank: 32, lora_alpha: 64", "");
    has(
        &job,
        &[
            ("lora.r", "32"),
            ("lora.lora_alpha", "64.0"),
            ("lora.target_modules", "\"all-linear\""),
            ("precision.frozen_params", "\"f32\""),
        ],
    );
    let none = read("", ", lora_rank: 0, lora_alpha: 64", "");
    assert_eq!(setting(&none, "lora.r"), None);
    assert_eq!(setting(&none, "lora.lora_alpha"), None);
}

/// Hydra's overrides: lists, values without a path, and a file of defaults for a section.
#[test]
fn commands_with_overrides_are_read() {
    let job = script(
        "data.train_batch_size=64 +data.prompt_dict_keys=['question'] data.micro_batch_size_per_gpu=4 \
         model.partial_pretrain=$HOME/models/Qwen/Qwen2.5-0.5B-Instruct model.target_modules=[q_proj,v_proj] \
         model.lora_rank=8 optim=fsdp optim.betas=[0.9,0.99] ulysses_sequence_parallel_size=1 use_remove_padding=true",
    )
    .unwrap();
    assert_eq!(job.framework, "verl");
    has(
        &job,
        &[
            ("mesh.dp_shard", "8"),
            ("model.preset", "\"qwen2.5-0.5b\""),
            ("train.micro_batch", "4"),
            ("train.grad_accum", "2"),
            ("train.betas", "[0.9, 0.99]"),
            ("lora.target_modules", "[\"q_proj\", \"v_proj\"]"),
        ],
    );
    let (status, _) = row(&job, "optim._choice_");
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing));
    let error = script("model.partial_pretrain=Qwen/Qwen3-8B optim.weight_decy=0.1").unwrap_err();
    assert!(
        error.starts_with("run.sh:1:") && error.contains("did you mean `weight_decay`?"),
        "{error}"
    );
}

/// Scripts merge or evaluate weights after training, with commands that have options, too.
#[test]
fn commands_after_training_are_not_read() {
    let train = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-8B\n";
    for after in [
        "python -m verl.model_merger merge --backend fsdp --local_dir x\n",
        "python scripts/eval_math.py --model out --num_samples 4\n",
    ] {
        let job = try_text("run.sh", &format!("{train}{after}"), &eight()).unwrap();
        assert_eq!(job.framework, "verl");
        let error = try_text("run.sh", after, &eight()).unwrap_err();
        assert!(error.contains("no arguments of a framework"), "{error}");
    }
}

/// `sft_trainer` has engines and packs sequences.
#[test]
fn the_trainer_with_engines_is_read() {
    let command = |engine: &str| {
        format!(
            "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B data.train_batch_size=64 \
             data.max_length=2048 data.max_token_len_per_gpu=8192 {engine}\n"
        )
    };
    let fsdp =
        command("engine=fsdp engine.strategy=fsdp2 engine.fsdp_size=4 engine.offload_policy=false");
    let job = try_text("run.sh", &fsdp, &eight()).unwrap();
    has(
        &job,
        &[
            ("train.micro_batch", "4"),
            ("train.grad_accum", "2"),
            ("mesh.dp_shard", "4"),
            ("mesh.dp_replicate", "2"),
            ("fsdp.policy", "\"fsdp2\""),
        ],
    );
    let megatron = command("engine=megatron engine.tensor_model_parallel_size=2");
    let job = try_text("run.sh", &megatron, &eight()).unwrap();
    let refused: Vec<String> = job.decisive().map(|r| r.key.clone()).collect();
    assert_eq!(
        refused,
        ["engine._choice_", "engine.tensor_model_parallel_size"]
    );
}

#[test]
fn other_jobs_are_refused_with_a_reason() {
    let job = read("", "", "ulysses_sequence_parallel_size: 2\n");
    let refused: Vec<String> = job.decisive().map(|r| r.key.clone()).collect();
    assert_eq!(refused, ["ulysses_sequence_parallel_size"]);
    for (name, text) in [
        ("ppo.yaml", "actor_rollout_ref: {model: {path: x}}\n"),
        (
            "grpo.sh",
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024\n",
        ),
    ] {
        let error = try_text(name, text, &eight()).unwrap_err();
        assert!(
            error.starts_with(name) && error.contains("several models") && error.contains("--set"),
            "{error}"
        );
    }
}
