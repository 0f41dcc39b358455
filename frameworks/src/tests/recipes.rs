//! Tests of options that public recipes use.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Status};

fn read(name: &str, text: &str) -> Job {
    try_text(name, text, &eight()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Returns the keys that make a prediction impossible.
fn refused(text: &str) -> Vec<String> {
    let job = read("job.yaml", text);
    job.decisive().map(|r| r.key.clone()).collect()
}

#[test]
fn keys_without_a_value_and_comments_say_nothing() {
    let text = "base_model: Qwen/Qwen3-0.6B\nsequence_len: 64\nmicro_batch_size: 1\ntrackio_of_mine:\nfsdp_config:\n\
                _note: for my colleagues\n";
    let job = read("job.yaml", text);
    for key in ["trackio_of_mine", "fsdp_config", "_note"] {
        let row = job.rows().iter().find(|r| r.key == key).unwrap();
        assert_eq!(row.status.lack(), Lack::Nothing, "{key}");
    }
}

/// Jobs that do not train on text, or that have a second model, are not predicted.
#[test]
fn recipes_that_train_otherwise_are_refused() {
    let torchtune = "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\nbatch_size: 1\n\
                     tokenizer: {max_seq_len: 64}\n";
    let loss = |name: &str| format!("{torchtune}loss:\n  _component_: torchtune.{name}\n");
    for (more, key) in [
        (
            "teacher_model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n",
            "teacher_model._component_",
        ),
        ("tasks: [mmlu]\n", "tasks"),
        ("prompt:\n  user: hello\n", "prompt.user"),
        (
            "policy_model:\n  _component_: x\n",
            "policy_model._component_",
        ),
    ] {
        assert_eq!(refused(&format!("{torchtune}{more}")), [key]);
    }
    assert_eq!(refused(&loss("rlhf.loss.DPOLoss")), ["loss._component_"]);
    assert_eq!(
        refused(&loss("dev.grpo.loss.GRPOSimpleLoss")),
        ["loss._component_"]
    );
    let trl =
        "model_name_or_path: Qwen/Qwen3-0.6B\nper_device_train_batch_size: 1\nnum_generations: 8\n";
    assert_eq!(refused(trl), ["num_generations"]);
    let axolotl = "base_model: Qwen/Qwen3-0.6B\nsequence_len: 64\nmicro_batch_size: 1\n";
    for key in [
        "diffusion:\n  eps: 0.1",
        "kd_trainer: true",
        "process_reward_model: true",
    ] {
        assert_eq!(refused(&format!("{axolotl}{key}\n")).len(), 1, "{key}");
    }
    let nemo = "step_scheduler: {local_batch_size: 1}\nmodel:\n  pretrained_model_name_or_path: Qwen/Qwen3-0.6B\n";
    for key in [
        "teacher_model:\n  pretrained_model_name_or_path: x",
        "recipe_args:\n  ttt_steps: 7",
    ] {
        assert_eq!(refused(&format!("{nemo}{key}\n")).len(), 1, "{key}");
    }
}

/// DPO with adapters has two sequences per sample, and a forward of the model without adapters.
#[test]
fn pairs_of_torchtune_and_llama_factory_are_read() {
    let torchtune = "model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\nbatch_size: 4\n\
                     tokenizer: {max_seq_len: 64}\nloss:\n  _component_: torchtune.rlhf.loss.DPOLoss\n  beta: 0.1\n";
    let factory = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: dpo\nfinetuning_type: lora\ncutoff_len: 64\n\
                   per_device_train_batch_size: 4\npref_beta: 0.1\n";
    for text in [torchtune, factory] {
        let job = read("job.yaml", text);
        assert_eq!(job.decisive().count(), 0, "{text}");
        assert_eq!(setting(&job, "train.micro_batch").as_deref(), Some("8"));
        assert_eq!(
            setting(&job, "train.no_grad_forwards").as_deref(),
            Some("1")
        );
    }
    let orpo = read("job.yaml", &format!("{factory}pref_loss: orpo\n"));
    assert_eq!(setting(&orpo, "train.micro_batch").as_deref(), Some("8"));
    assert_eq!(setting(&orpo, "train.no_grad_forwards"), None);
    let full = factory.replace("lora", "full");
    assert_eq!(refused(&full), ["stage"]);
}

/// Reads a torchtune builder that takes sizes: TinyLlama has 1,100,048,384 parameters.
#[test]
fn models_of_torchtune_may_be_given_by_sizes() {
    let text = "model:\n  _component_: torchtune.models.llama2.llama2\n  vocab_size: 32000\n  num_layers: 22\n  \
                num_heads: 32\n  num_kv_heads: 4\n  embed_dim: 2048\n  max_seq_len: 2048\n  attn_dropout: 0.0\n  \
                norm_eps: 1e-5\nbatch_size: 1\ntokenizer: {max_seq_len: 64}\n";
    let mut job = read("job.yaml", text);
    let program = shardlab_plan::plan(&job.scenario(&[]).unwrap()).unwrap();
    let all: u64 = program
        .params
        .iter()
        .map(shardlab_plan::ir::Param::numel)
        .sum();
    assert_eq!(all, 1_100_048_384);
}

#[test]
fn options_of_automodel_are_read() {
    let text = "step_scheduler: {local_batch_size: 1}\nmodel:\n  pretrained_model_name_or_path: Qwen/Qwen3-0.6B\n\
                dataset: {seq_length: 512}\npacked_sequence: {packed_sequence_size: 4096}\n\
                distributed:\n  strategy: fsdp2\n  activation_checkpointing: selective\n  \
                mp_policy: {param_dtype: bfloat16, reduce_dtype: bfloat16}\n\
                lr_scheduler: {lr_decay_style: constant, min_lr: 1.0e-6}\n\
                peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, dim: 8}\n\
                quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}\n";
    let job = read("job.yaml", text);
    for (key, value) in [
        ("train.seq_len", "4096"),
        ("train.recompute", "\"selective\""),
        ("precision.param_dtype", "\"bf16\""),
        ("precision.reduce_dtype", "\"bf16\""),
        ("precision.frozen_params", "\"nf4\""),
    ] {
        assert_eq!(setting(&job, key).as_deref(), Some(value), "{key}");
    }
    assert_eq!(setting(&job, "train.min_lr"), None);
}

/// Some frameworks have their own default length. For others, the model's length is predicted, and
/// a row says so.
#[test]
fn a_length_that_no_key_gives_is_named() {
    let length = |text: &str| {
        let job = read("job.yaml", text);
        let row = job
            .rows()
            .iter()
            .rfind(|r| r.key == "train.seq_len")
            .cloned();
        (setting(&job, "train.seq_len"), row.and_then(|r| r.why))
    };
    let axolotl = "base_model: Qwen/Qwen3-0.6B\nmicro_batch_size: 1\n";
    assert_eq!(length(axolotl).0.as_deref(), Some("512"));
    let factory = "model_name_or_path: Qwen/Qwen3-0.6B\nfinetuning_type: full\n";
    assert_eq!(length(factory).0.as_deref(), Some("2048"));
    let (none, why) = length("model_name_or_path: Qwen/Qwen3-0.6B\noutput_dir: x\n");
    assert_eq!(none, None);
    assert!(why.unwrap().contains("--set train.seq_len"));
}

/// `distributed_type: NO` starts one process, as in TRL's configuration for one GPU.
#[test]
fn a_job_that_is_not_distributed_has_one_process() {
    let options = crate::Options {
        gpus: Some("h100".parse().unwrap()),
        model: Some("../tests/data/configs/Qwen--Qwen3-0.6B.json".into()),
        ..Default::default()
    };
    let text =
        "distributed_type: \"NO\"\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n";
    let job = try_text("job.yaml", text, &options).unwrap();
    assert_eq!(setting(&job, "mesh.dp_shard").as_deref(), Some("1"));
}

/// Axolotl loads weights in the dtype of mixed precision (`resolve_dtype`, by default bfloat16).
/// FSDP1 and DeepSpeed keep float32 copies of them; DDP does not, nor Axolotl's own code for FSDP2
/// (`fsdp2_prepare_model`, which replaces Accelerate's).
#[test]
fn weights_of_axolotl_have_the_dtype_of_computation() {
    let base = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\noptimizer: adamw_torch_fused\n";
    let of = |more: &str| read("job.yaml", &format!("{base}{more}"));
    let has = |job: &Job, wanted: [Option<&str>; 3]| {
        let keys = ["main_params", "main_grads", "moments"];
        for (key, value) in keys.into_iter().zip(wanted) {
            let found = setting(job, &format!("precision.{key}"));
            assert_eq!(found.as_deref(), value, "{key}");
        }
    };
    let low = [Some("\"none\""), Some("\"bf16\""), Some("\"bf16\"")];
    has(&of("bf16: true\n"), low);
    has(&of("bf16: auto\n"), low);
    has(&of(""), low);
    has(&of("bf16: false\n"), [None, None, None]);
    let fsdp2 = of("bf16: true\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n");
    has(&fsdp2, low);
    // Accelerate reduces in the dtype of computation.
    let reduced = setting(&fsdp2, "precision.reduce_dtype");
    assert_eq!(reduced.as_deref(), Some("\"bf16\""));
    has(
        &of("bf16: true\nfsdp: [full_shard]\nfsdp_config: {fsdp_version: 1}\n"),
        [None, None, None],
    );
    // PEFT keeps adapters in float32.
    has(
        &of("bf16: true\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n"),
        [None, None, None],
    );
}

/// torchtitan's `training.dtype` keeps weights in 16 bits, whatever the mixed precision.
#[test]
fn weights_of_torchtitan_may_have_16_bits() {
    let base = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n";
    for more in [
        "dtype = \"bfloat16\"\n",
        "dtype = \"bfloat16\"\nmixed_precision_param = \"bfloat16\"\nmixed_precision_reduce = \"float32\"\n",
    ] {
        let job = read("job.toml", &format!("{base}{more}"));
        let of = |key: &str| setting(&job, &format!("precision.{key}"));
        assert_eq!(of("main_params").as_deref(), Some("\"none\""), "{more}");
        assert_eq!(of("moments").as_deref(), Some("\"bf16\""), "{more}");
        assert_eq!(of("reduce_dtype").as_deref(), Some("\"f32\""), "{more}");
    }
}

/// Jobs that only generate texts or merge weights are refused.
#[test]
fn jobs_of_llama_factory_that_train_nothing_are_refused() {
    for more in ["infer_backend: huggingface", "export_dir: out"] {
        let text = format!("model_name_or_path: Qwen/Qwen3-8B\ntemplate: qwen3\n{more}\n");
        assert_eq!(read("job.yaml", &text).decisive().count(), 1, "{more}");
    }
}

/// torchtitan's Flux makes images. Its reason comes before a request for its shapes.
#[test]
fn diffusion_models_of_torchtitan_are_refused() {
    let text =
        "[model]\nname = \"flux\"\nflavor = \"flux-dev\"\n[training]\nlocal_batch_size = 4\n";
    let error = try_text("flux.toml", text, &eight())
        .map(|_| ())
        .unwrap_err();
    assert_eq!(
        error,
        "flux.toml:2:1: model.name = flux: diffusion models are not modeled"
    );
}

/// bitsandbytes keeps float32 states with `optim_bits=32`, whatever the type of the weights
/// (`init_state` in its `optim/optimizer.py`). Other optimizers are predicted as AdamW in PyTorch,
/// whose moments have the type of the weights.
#[test]
fn optimizers_of_bitsandbytes_keep_float32_moments() {
    let moments = |optimizer: &str| {
        let text = format!(
            "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 1\nbf16: full\noptimizer: {optimizer}\n"
        );
        let mut job = try_text("job.yaml", &text, &eight()).unwrap();
        job.scenario(&[]).unwrap();
        let why = row(&job, "optimizer").1;
        (setting(&job, "precision.moments").unwrap(), why)
    };
    for optimizer in [
        "paged_adamw_32bit",
        "paged_adamw",
        "adamw_bnb_32bit",
        "lion_32bit",
        "paged_lion_32bit",
    ] {
        assert_eq!(moments(optimizer).0, "\"f32\"", "{optimizer}");
    }
    for optimizer in ["adafactor", "schedule_free_adamw", "adamw_torch_4bit"] {
        let (moments, why) = moments(optimizer);
        assert_eq!(moments, "\"bf16\"", "{optimizer}");
        assert!(!why.contains("float32"), "{why}");
    }
}

/// ASFT compares with a reference model: a second one in memory, or the model without adapters.
#[test]
fn reference_models_of_asft_are_predicted_or_refused() {
    let read = |kind: &str| {
        let text = format!(
            "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: {kind}\ncutoff_len: 512\nuse_asft_loss: true\n"
        );
        try_text("job.yaml", &text, &eight()).unwrap()
    };
    let refused: Vec<String> = read("full").decisive().map(|r| r.key.clone()).collect();
    assert_eq!(refused, ["use_asft_loss"]);
    let job = read("lora");
    has(&job, &[("train.no_grad_forwards", "1")]);
    assert_eq!(job.decisive().count(), 0);
}

/// A recipe that only quantizes has no optimizer, loss or data.
#[test]
fn recipes_that_only_quantize_are_refused() {
    let text = "model: {_component_: torchtune.models.llama2.llama2_7b}\n\
                quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQuantizer, groupsize: 256}\n";
    let count = |text: &str| {
        try_text("job.yaml", text, &eight())
            .unwrap()
            .decisive()
            .count()
    };
    assert_eq!(count(text), 1);
    let training = format!("{text}optimizer: {{_component_: torch.optim.AdamW}}\n");
    assert_eq!(count(&training), 0);
}

/// BAdam and LISA train blocks in turn. Options of methods are not said to be off when they are on.
#[test]
fn methods_that_train_blocks_in_turn_are_refused() {
    let llama = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\ncutoff_len: 512\n";
    let text =
        format!("{llama}use_badam: true\nbadam_mode: layer\nuse_galore: false\ngalore_rank: 8\n");
    let job = try_text("job.yaml", &text, &eight()).unwrap();
    let refused: Vec<String> = job.decisive().map(|r| r.key.clone()).collect();
    assert_eq!(refused, ["use_badam"]);
    assert_eq!(
        row(&job, "badam_mode").1,
        "part of BAdam, which use_badam turns on"
    );
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 1\n";
    let text = format!("{axolotl}lisa_n_layers: 1\n");
    let job = try_text("job.yaml", &text, &eight()).unwrap();
    assert_eq!(job.decisive().count(), 1);
    let text = format!(
        "{axolotl}adapter: lora\nlora_r: 8\nlora_target_linear: true\nlora_mlp_kernel: true\n"
    );
    let job = try_text("job.yaml", &text, &eight()).unwrap();
    let (status, why) = row(&job, "lora_mlp_kernel");
    assert_eq!(status, crate::Status::NoCounterpart(crate::Lack::Accuracy));
    assert!(!why.contains("off"), "{why}");
}

/// `convert_to_float8_training` of torchtune gathers in 8 bits unless a recipe is named, and
/// `compile` may be a map of parts (`compile.get("model", True)`).
#[test]
fn torchtune_gathers_in_8_bits_without_a_recipe() {
    let read = |more: &str| {
        let text = format!(
            "model: {{_component_: torchtune.models.llama3_1.llama3_1_8b}}\nbatch_size: 1\n\
             optimizer: {{_component_: torch.optim.AdamW}}\ntokenizer: {{max_seq_len: 2048}}\n{more}"
        );
        try_text("job.yaml", &text, &eight()).unwrap_or_else(|e| panic!("{e}"))
    };
    let gather = |job: &Job| setting(job, "precision.float8_all_gather");
    let on = "enable_fp8_training: true\n";
    assert_eq!(gather(&read(&format!("{on}dtype: fp32\n"))), None);
    let job = read(on);
    has(&job, &[("precision.float8_recipe", "\"tensorwise\"")]);
    assert_eq!(gather(&job).as_deref(), Some("true"));
    assert_eq!(
        gather(&read(&format!("{on}fp8_recipe_name: tensorwise\n"))),
        None
    );
    assert_eq!(gather(&read("dtype: bf16\n")), None);
    // Weights in bfloat16 are predicted as gathered in 16 bits, with a note.
    let job = read(&format!("{on}dtype: bf16\n"));
    assert_eq!(gather(&job), None);
    let (status, why) = row(&job, "enable_fsdp_float8_all_gather");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy), "{why}");

    let parts = |more: &str| {
        let job = read(more);
        ["compile.mode", "compile.loss"].map(|key| setting(&job, key).is_some())
    };
    assert_eq!(parts("compile: true\n"), [true, true]);
    assert_eq!(parts("compile: {loss: true}\n"), [true, true]);
    assert_eq!(
        parts("compile: {model: true, loss: false}\n"),
        [true, false]
    );
    assert_eq!(
        parts("compile: {model: false, loss: true}\n"),
        [false, true]
    );
    assert_eq!(parts("compile: false\n"), [false, false]);
}
