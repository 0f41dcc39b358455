//! Commands of ms-swift.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Options, Status};

fn read_on(gpus: &str, script: &str) -> Job {
    let options = Options {
        gpus: Some(gpus.parse().unwrap()),
        ..Options::default()
    };
    let mut job =
        try_text("train.sh", script, &options).unwrap_or_else(|e| panic!("{e}\n{script}"));
    if job.decisive().count() == 0 {
        job.scenario(&[])
            .unwrap_or_else(|e| panic!("{e}\n{script}"));
    }
    job
}

/// In the style of `examples/train/multi-gpu/deepspeed/train_zero2.sh`.
#[test]
fn adapters_under_zero_are_read() {
    let script = "NPROC_PER_NODE=4 \\\nCUDA_VISIBLE_DEVICES=0,1,2,3 \\\nswift sft \\\n    --model Qwen/Qwen2.5-7B-Instruct \\\n    \
        --tuner_type lora \\\n    --dataset 'a#500' \\\n              'b#500' \\\n    --torch_dtype bfloat16 \\\n    \
        --per_device_train_batch_size 2 \\\n    --gradient_accumulation_steps $(expr 16 / 4) \\\n    --lora_rank 16 \\\n    \
        --target_modules all-linear \\\n    --max_length 2048 \\\n    --attn_impl flash_attn --packing true \\\n    --deepspeed zero2\n";
    let job = read_on("h100", script);
    assert_eq!(job.framework, "ms-swift");
    has(
        &job,
        &[
            ("model.preset", "\"qwen2.5-7b\""),
            ("mesh.dp_shard", "4"),
            ("train.micro_batch", "2"),
            ("train.seq_len", "2048"),
            ("train.recompute", "\"full\""),
            ("lora.r", "16"),
            ("lora.target_modules", "\"all-linear\""),
            ("fsdp.strategy", "\"optim_grads\""),
            ("fsdp.async_reduce", "false"),
            ("precision.param_dtype", "\"bf16\""),
            ("model.implementation", "\"transformers\""),
        ],
    );
    // `expr` is arithmetic.
    has(&job, &[("train.grad_accum", "4")]);
}

/// Defaults: one process, LoRA of rank 8 on all linear layers, recomputed blocks, and as many
/// micro-batches of one sequence as make 16 per step.
#[test]
fn defaults_of_swift_are_supplied() {
    let job = read_on(
        "h100",
        "swift sft --model Qwen/Qwen3-8B --max_length 1024\n",
    );
    has(
        &job,
        &[
            ("mesh.dp_shard", "1"),
            ("train.micro_batch", "1"),
            ("train.grad_accum", "16"),
            ("train.recompute", "\"full\""),
            ("lora.r", "8"),
            ("lora.target_modules", "\"all-linear\""),
            ("precision.param_dtype", "\"bf16\""),
        ],
    );
    let eight = "export NPROC_PER_NODE=8\nswift sft --model Qwen/Qwen3-8B --tuner_type full --max_length 1024 \
                 --gradient_checkpointing false --deepspeed zero3\n";
    let job = read_on("h100", eight);
    has(
        &job,
        &[
            ("mesh.dp_shard", "8"),
            ("train.grad_accum", "2"),
            ("fsdp.strategy", "\"optim_grads_params\""),
        ],
    );
    assert_eq!(setting(&job, "train.recompute"), None);
    assert_eq!(setting(&job, "lora.r"), None);
}

/// The presets `fsdp2` and `zero3_offload`, and files in their place.
#[test]
fn presets_of_sharding_are_read() {
    let script = |more: &str| {
        format!(
            "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --tuner_type full --max_length 1024 {more}\n"
        )
    };
    let job = read_on(
        "h100",
        &script("--fsdp fsdp2 --gradient_checkpointing false"),
    );
    has(
        &job,
        &[
            ("fsdp.policy", "\"fsdp2\""),
            ("fsdp.reshard_after_forward", "true"),
            ("train.recompute", "\"full\""),
        ],
    );
    let job = read_on("h100", &script("--deepspeed zero3_offload"));
    let offload = r#"["params", "grads", "optimizer"]"#;
    has(&job, &[("fsdp.offload", offload)]);
    let missing = script("--deepspeed ./zero3.json");
    let error = try_text("train.sh", &missing, &eight()).unwrap_err();
    assert!(
        error.starts_with("train.sh:1:") && error.contains("`./zero3.json` is not found"),
        "{error}"
    );
}

#[test]
fn other_training_of_swift_is_refused() {
    for more in ["--rlhf_type grpo", "--rlhf_type kto", "--task_type seq_cls"] {
        let script = format!("swift rlhf --model Qwen/Qwen3-8B --max_length 1024 {more}\n");
        let job = read_on("h100", &script);
        assert_eq!(job.decisive().count(), 1, "{more}");
    }
    let pairs = "swift rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --max_length 1024\n";
    let job = read_on("h100", pairs);
    has(
        &job,
        &[("train.micro_batch", "2"), ("train.no_grad_forwards", "1")],
    );
    // Inference starts no training.
    let error = try_text(
        "train.sh",
        "swift infer --model x --stream true\n",
        &eight(),
    )
    .unwrap_err();
    assert!(error.starts_with("train.sh:1:"), "{error}");
}

/// In the style of `examples/megatron/moe/moe.sh`. Without a dispatcher, tokens travel by
/// all-to-all (`moe_token_dispatcher_type`).
#[test]
fn experts_of_megatron_swift_are_read() {
    let script = |more: &str| {
        format!(
            "NPROC_PER_NODE=8 \\\nmegatron sft \\\n    --model Qwen/Qwen3-30B-A3B \\\n    --expert_model_parallel_size 8 \\\n    \
             --moe_grouped_gemm true \\\n    --micro_batch_size 2 \\\n    --global_batch_size 32 \\\n    --packing true \\\n    \
             --recompute_granularity full \\\n    --recompute_method uniform \\\n    --recompute_num_layers 1 \\\n    --lr 1e-5 \\\n    \
             --max_length 8192 {more}\n"
        )
    };
    let job = read_on("h100", &script(""));
    assert_eq!(job.framework, "Megatron-SWIFT");
    has(
        &job,
        &[
            ("model.preset", "\"qwen3-30b-a3b\""),
            ("mesh.dp_shard", "8"),
            ("mesh.ep", "8"),
            ("moe.dispatcher", "\"all_to_all\""),
            ("train.micro_batch", "2"),
            ("train.grad_accum", "2"),
            ("train.seq_len", "8192"),
            ("train.recompute", "\"full\""),
            ("fsdp.policy", "\"megatron\""),
            ("fsdp.strategy", "\"optim\""),
            ("precision.param_dtype", "\"bf16\""),
            ("precision.main_grads", "\"f32\""),
        ],
    );
    for (more, dispatcher) in [
        ("--moe_token_dispatcher_type flex", "\"deepep\""),
        (
            "--moe_token_dispatcher_type flex --moe_enable_deepep true",
            "\"deepep\"",
        ),
        ("--moe_token_dispatcher_type allgather", "\"gather\""),
    ] {
        let job = read_on("h100", &script(more));
        has(&job, &[("moe.dispatcher", dispatcher)]);
    }
    for more in [
        "--tuner_type lora --lora_rank 32",
        "--tuner-type lora --lora-rank 32",
    ] {
        let job = read_on("h100", &script(more));
        has(
            &job,
            &[("lora.r", "32"), ("lora.target_modules", "\"all-linear\"")],
        );
    }
}

/// Arguments have dashes in commands; the tables write underscores.
#[test]
fn hints_for_arguments_of_megatron_swift_ignore_dashes() {
    let script = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --micro_batch_size 2 --max_lengths 1024\n";
    let (status, why) = row(&read_on("h100", script), "--max-lengths");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy));
    assert!(why.ends_with("the nearest is `max-length`"), "{why}");
}

/// Files of `swift sft --config`, and scripts that start the module instead of the program.
#[test]
fn files_and_modules_of_swift_are_read() {
    let text =
        "model: Qwen/Qwen3-8B\ntuner_type: lora\nmax_length: 1024\nlora_rank: 4\ndataset: [a]\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    assert_eq!(job.framework, "ms-swift");
    has(&job, &[("lora.r", "4"), ("train.seq_len", "1024")]);
    let text = "model: Qwen/Qwen3-8B\ntuner_type: full\nmax_length: 1024\nmicro_batch_size: 2\nglobal_batch_size: 16\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    assert_eq!(job.framework, "Megatron-SWIFT");
    has(
        &job,
        &[("train.micro_batch", "2"), ("train.grad_accum", "1")],
    );
    let script = "torchrun --nproc_per_node 8 --master_port 29500 swift/cli/sft.py --model Qwen/Qwen3-8B \
                  --tuner_type lora --max_length 1024\n";
    let job = read_on("h100", script);
    assert_eq!(job.framework, "ms-swift");
    has(&job, &[("mesh.dp_shard", "8"), ("train.grad_accum", "2")]);
}
