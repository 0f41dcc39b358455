//! Commands of ms-swift.

use super::{eight, has, row, setting, try_script, try_text};
use crate::{Job, Lack, Options, Status};

fn read_on(gpus: &str, script: &str) -> Job {
    let options = Options {
        gpus: Some(gpus.parse().unwrap()),
        ..Options::default()
    };
    try_script(script, &options)
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

/// Reads a script next to files that it names, with the model in `tests/data/configs`.
fn read_with(script: &str, files: &[(&str, &str)], model: &str) -> Result<Job, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let path = folder.path().join("train.sh");
    std::fs::write(&path, script).unwrap();
    let options = Options {
        model: Some(format!("../tests/data/configs/{model}").into()),
        ..eight()
    };
    crate::read(&[path], &options).map_err(|e| e.to_string())
}

/// ms-swift's own file, `config/fsdp2.json`, means what the name `fsdp2` means.
#[test]
fn a_file_for_fsdp_is_read_as_the_preset() {
    let file = r#"{"_description": "x", "_param_docs": {"fsdp": "x", "fsdp_version": "x"},
        "fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": true,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": true,
        "state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": true}}"#;
    let script = |fsdp: &str| {
        format!(
            "NPROC_PER_NODE=8 swift sft --model x --tuner_type full --max_length 1024 \
             --gradient_checkpointing false --fsdp {fsdp}\n"
        )
    };
    let scenario = |fsdp: &str| {
        let model = "DeepSeek-R1-Distill-Qwen-14B.json";
        let mut job = read_with(&script(fsdp), &[("fsdp.json", file)], model).unwrap();
        assert!(job.rows().iter().all(|r| r.status.lack() != Lack::Accuracy));
        let replaced = |r: &crate::Row| {
            r.why
                .as_ref()
                .is_some_and(|w| w.contains("replaced by fsdp"))
        };
        assert!(!job.rows().iter().any(replaced));
        job.scenario(&[]).unwrap()
    };
    assert_eq!(scenario("./fsdp.json"), scenario("fsdp2"));
    let error = try_text("train.sh", &script("./none.json"), &eight()).unwrap_err();
    assert!(
        error.starts_with("train.sh:1:") && error.contains("`./none.json` is not found"),
        "{error}"
    );
}

/// `examples/train/multimodal/ocr.sh`: adapters of rank 8 on the language model of Qwen2.5-VL 7B.
/// Derived from its shapes: in each of 28 layers, 8 times the sum of inputs and outputs of q and o
/// (3584, 3584), k and v (3584, 512), gate, up and down (3584, 18944).
#[test]
fn frozen_towers_get_no_adapters_and_no_gradients() {
    let model = "Qwen2.5-VL-7B-Instruct.json";
    let set = |more: &str| {
        let script = format!("NPROC_PER_NODE=8 swift sft --model x --max_length 1024 {more}\n");
        let mut job = read_with(&script, &[], model).unwrap();
        job.scenario(&[]).unwrap_or_else(|e| panic!("{more}: {e}"));
        let keys = ["fsdp.frozen", "lora.exclude_modules"];
        keys.map(|key| setting(&job, key))
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(set(""), [None, some(r#""vision\\..*""#)]);
    assert_eq!(
        set("--freeze_vit false --freeze_aligner false"),
        [None, None]
    );
    assert_eq!(
        set("--freeze_vit false"),
        [None, some(r#""vision\\.(projector|deepstack)\\..*""#)]
    );
    assert_eq!(set("--target_modules q_proj v_proj"), [None, None]);
    let full = "--tuner_type full";
    assert_eq!(set(full), [some(r#"["vision"]"#), None]);
    // Modules that this model does not have are left out.
    assert_eq!(
        set(&format!("{full} --freeze_aligner false")),
        [some(r#"["vision.patches", "vision.layers.*"]"#), None]
    );
    assert_eq!(
        set(&format!(
            "{full} --freeze_llm true --freeze_aligner false --freeze_vit false"
        )),
        [
            some(r#"["tok_embeddings", "layers.*", "norm", "output"]"#),
            None
        ]
    );
    // A language model alone has nothing to freeze.
    let script = "NPROC_PER_NODE=8 swift sft --model x --max_length 1024 --freeze_vit true\n";
    let job = read_with(script, &[], "DeepSeek-R1-Distill-Qwen-14B.json").unwrap();
    assert_eq!(row(&job, "freeze_vit").1, "the model has no vision tower");
    assert_eq!(setting(&job, "lora.exclude_modules"), None);
}

/// LLaMA-Factory excludes frozen towers from named layers, too.
#[test]
fn frozen_towers_of_llama_factory_get_no_adapters() {
    let excluded = |more: &str| {
        let script = format!(
            "NPROC_PER_NODE=8 llamafactory-cli train --model_name_or_path x --cutoff_len 1024 \
             --finetuning_type lora {more}\n"
        );
        let mut job = read_with(&script, &[], "Qwen2.5-VL-7B-Instruct.json").unwrap();
        job.scenario(&[]).unwrap_or_else(|e| panic!("{more}: {e}"));
        setting(&job, "lora.exclude_modules")
    };
    let tower = Some(r#""vision\\..*""#.to_owned());
    assert_eq!(excluded("--lora_target all"), tower);
    assert_eq!(
        excluded("--lora_target all --freeze_multi_modal_projector false"),
        tower
    );
}

/// Methods that train some layers at a time, and adapters next to a tower that is trained in full.
#[test]
fn layers_that_are_trained_in_turn_are_refused() {
    for more in ["--lisa_activated_layers 1", "--tuner_type lora_llm"] {
        let script = format!("swift sft --model Qwen/Qwen3-8B --max_length 1024 {more}\n");
        let job = read_on("h100", &script);
        assert_eq!(job.decisive().count(), 1, "{more}");
    }
    let off = "swift sft --model Qwen/Qwen3-8B --max_length 1024 --lisa_activated_layers 0\n";
    assert_eq!(read_on("h100", off).decisive().count(), 0);
}
