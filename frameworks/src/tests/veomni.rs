//! VeOmni: arguments with and without sections, what its code fixes, and the jobs that are refused.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Options, Status};

const QWEN: &str = "model: {model_path: Qwen/Qwen3-8B}\n";
const EXPERTS: &str = "model: {model_path: Qwen3-30B-A3B-merge}\n";

fn read(text: &str) -> Job {
    try_text("job.yaml", text, &eight()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn sections(train: &str, accelerator: &str) -> Job {
    read(&format!(
        "{QWEN}train: {{{train}accelerator: {{{accelerator}}}}}\n"
    ))
}

fn refused(job: &Job) -> Vec<(String, String)> {
    let why = |r: &crate::Row| r.why.clone().unwrap_or_default();
    job.decisive().map(|r| (r.key.clone(), why(r))).collect()
}

/// Defaults of `arguments_types.py`, and what `build_parallelize_model` fixes.
#[test]
fn defaults_are_those_of_the_arguments() {
    let job = sections("", "dp_shard_size: -1");
    assert_eq!(job.framework, "VeOmni");
    has(
        &job,
        &[
            ("train.seq_len", "2048"),
            ("train.recompute", "\"full\""),
            ("train.clip_norm", "1.0"),
            ("train.weight_decay", "0.0"),
            ("train.loss", "\"chunked\""),
            ("fsdp.policy", "\"fsdp2\""),
            ("precision.param_dtype", "\"bf16\""),
            ("precision.reduce_dtype", "\"f32\""),
            ("model.implementation", "\"torchtitan\""),
        ],
    );
    // Weights are float32, and the root keeps its parameters.
    for key in [
        "precision.main_params",
        "fsdp.reshard_root",
        "fsdp.prefetch_forward",
        "train.grad_accum",
    ] {
        assert_eq!(setting(&job, key), None, "{key}");
    }
}

#[test]
fn sections_are_read() {
    let job = sections(
        "micro_batch_size: 2, global_batch_size: 64, gradient_checkpointing: {enable: false}, \
         torch_compile: {enable: true}, optimizer: {type: anyprecision_adamw, max_grad_norm: 0.5}, ",
        "dp_replicate_size: 2, fsdp_config: {reshard_after_forward: false, reshard_after_backward: false, \
         forward_prefetch: true, mixed_precision: {reduce_dtype: bfloat16}}",
    );
    has(
        &job,
        &[
            ("train.micro_batch", "2"),
            ("train.grad_accum", "4"),
            ("train.clip_norm", "0.5"),
            ("compile.mode", "\"blocks\""),
            ("mesh.dp_shard", "4"),
            ("mesh.dp_replicate", "2"),
            ("fsdp.reshard_after_forward", "false"),
            ("fsdp.reshard_after_backward", "false"),
            ("fsdp.gradient_sync", "\"outer_last\""),
            ("precision.reduce_dtype", "\"bf16\""),
        ],
    );
    assert_eq!(setting(&job, "train.recompute"), None);
    let (status, why) = row(&job, "train.accelerator.fsdp_config.forward_prefetch");
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing));
    assert!(why.contains("expert parallelism only"), "{why}");
    let (status, _) = row(&job, "train.optimizer.type");
    assert_eq!(status, Status::Assumed);
}

/// Without mixed precision, the model is loaded in bfloat16, and gradients and moments follow.
#[test]
fn all_state_has_16_bits_without_mixed_precision() {
    let wanted = [
        ("precision.param_dtype", "\"bf16\""),
        ("precision.main_params", "\"none\""),
        ("precision.main_grads", "\"bf16\""),
        ("precision.reduce_dtype", "\"bf16\""),
        ("precision.moments", "\"bf16\""),
    ];
    let off = "fsdp_config: {mixed_precision: {enable: false, reduce_dtype: float32}}";
    let job = sections("", off);
    has(&job, &wanted);
    let key = "train.accelerator.fsdp_config.mixed_precision.reduce_dtype";
    assert_eq!(row(&job, key).1, "mixed precision is off");
    let flat = "train: {data_parallel_mode: fsdp2, enable_mixed_precision: false}\n";
    has(&read(&format!("{QWEN}{flat}")), &wanted);
}

/// `DistributedDataParallel` gets the float32 model, without mixed precision.
#[test]
fn ddp_computes_in_float32() {
    let job = sections(
        "",
        "fsdp_config: {fsdp_mode: ddp, mixed_precision: {enable: true}}",
    );
    has(
        &job,
        &[
            ("fsdp.strategy", "\"no_shard\""),
            ("precision.param_dtype", "\"f32\""),
        ],
    );
    let key = "train.accelerator.fsdp_config.mixed_precision.enable";
    let (status, why) = row(&job, key);
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing));
    assert!(why.contains("float32"), "{why}");
}

#[test]
fn experts_are_divided_and_prefetched() {
    let job = read(&format!(
        "{EXPERTS}train: {{accelerator: {{ep_size: 4}}}}\n"
    ));
    has(
        &job,
        &[
            ("model.preset", "\"qwen3-30b-a3b\""),
            ("mesh.ep", "4"),
            ("moe.dispatcher", "\"all_to_all\""),
            ("fsdp.prefetch_forward", "1"),
        ],
    );
    let off = "fsdp_config: {forward_prefetch: false}";
    let job = read(&format!(
        "{EXPERTS}train: {{accelerator: {{ep_size: 4, {off}}}}}\n"
    ));
    assert_eq!(setting(&job, "fsdp.prefetch_forward"), None);
    let job = read(&format!(
        "{EXPERTS}train: {{torch_compile: {{enable: true}}, accelerator: {{ep_size: 4}}}}\n"
    ));
    let [(key, why)] = &refused(&job)[..] else {
        panic!()
    };
    assert_eq!(key, "train.torch_compile.enable");
    assert!(why.contains("does not compile models with expert"), "{why}");
}

/// Arguments before March 2026: FSDP1 with its own prefetching, and DDP as the default.
#[test]
fn arguments_without_sections_are_read() {
    let flat = |train: &str| read(&format!("{QWEN}train: {{{train}}}\n"));
    let job = flat(
        "data_parallel_mode: fsdp1, enable_full_shard: true, enable_forward_prefetch: false, optimizer: adamw",
    );
    has(
        &job,
        &[
            ("fsdp.policy", "\"fsdp2\""),
            ("fsdp.reshard_after_forward", "true"),
            ("fsdp.prefetch_backward", "0"),
            ("train.optimizer", "\"adamw\""),
            ("precision.reduce_dtype", "\"f32\""),
        ],
    );
    let job = flat("data_parallel_mode: fsdp1, enable_full_shard: false");
    has(&job, &[("fsdp.strategy", "\"no_shard\"")]);
    let job = flat(
        "data_parallel_mode: fsdp2, enable_reshard_after_forward: true, enable_fsdp_offload: true",
    );
    has(&job, &[("fsdp.reshard_root", "true")]);
    assert_eq!(setting(&job, "fsdp.offload"), None);
    let (_, why) = row(&job, "train.enable_fsdp_offload");
    assert!(why.contains("FSDP1"), "{why}");
    let job = flat("bsz_warmup_ratio: 0.1, lr: 1.0e-5");
    has(
        &job,
        &[
            ("fsdp.strategy", "\"no_shard\""),
            ("precision.param_dtype", "\"bf16\""),
        ],
    );
}

#[test]
fn kernels_are_those_that_keys_choose() {
    let ops = |ops: &str| {
        read(&format!(
            "model: {{model_path: Qwen/Qwen3-8B, ops_implementation: {{{ops}}}}}\ntrain: {{dyn_bsz: true}}\n"
        ))
    };
    let eager = "rms_norm_implementation: eager, swiglu_mlp_implementation: eager, rotary_pos_emb_implementation: eager";
    let job = ops(&format!(
        "{eager}, attn_implementation: veomni_flash_attention_2_with_sp, cross_entropy_loss_implementation: eager"
    ));
    has(
        &job,
        &[
            ("model.implementation", "\"transformers\""),
            ("model.attn_implementation", "\"flash_attention_2\""),
            ("train.loss", "\"materialized\""),
        ],
    );
    let job = ops("swiglu_mlp_implementation: eager");
    has(&job, &[("model.implementation", "\"torchtitan\"")]);
    let key = "model.ops_implementation.swiglu_mlp_implementation";
    assert_eq!(row(&job, key).0, Status::NoCounterpart(Lack::Accuracy));
}

#[test]
fn adapters_are_read() {
    let lora = |more: &str, train: &str| {
        read(&format!(
            "model: {{model_path: Qwen/Qwen3-8B, lora_config: {{rank: 64, alpha: 32, lora_modules: [q_proj, v_proj]{more}}}}}\n\
             train: {{accelerator: {{{train}}}}}\n"
        ))
    };
    let job = lora("", "");
    has(
        &job,
        &[
            ("lora.r", "64"),
            ("lora.lora_alpha", "32.0"),
            ("lora.target_modules", "[\"q_proj\", \"v_proj\"]"),
            ("precision.frozen_params", "\"f32\""),
        ],
    );
    let job = lora(
        ", target_parameters: ['model.layers.*.mlp.experts.down_proj']",
        "fsdp_config: {mixed_precision: {enable: false}}",
    );
    assert_eq!(setting(&job, "precision.frozen_params"), None);
    let (status, _) = row(&job, "model.lora_config.target_parameters");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy));
}

/// The sizes are those of `config_path`, wherever the weights come from.
#[test]
fn the_configuration_of_the_model_decides_its_sizes() {
    for order in [
        "model_path: Qwen/Qwen3-8B, config_path: Qwen/Qwen3-4B",
        "config_path: Qwen/Qwen3-4B, model_path: Qwen/Qwen3-8B",
    ] {
        let job = read(&format!("model: {{{order}}}\ntrain: {{dyn_bsz: true}}\n"));
        has(&job, &[("model.preset", "\"qwen3-4b\"")]);
    }
    let sized = "model: {model_path: Qwen/Qwen3-8B, model_config: {num_hidden_layers: 4}}\ntrain: {dyn_bsz: true}\n";
    has(
        &read(sized),
        &[("model.preset", "\"qwen3-8b\""), ("model.layers", "4")],
    );
}

#[test]
fn commands_are_read() {
    let command = |more: &str| {
        format!(
            "NPROC_PER_NODE=4 bash train.sh tasks/train_text.py --model.model_path Qwen/Qwen3-8B \
             --data.max_seq_len 4096 --train.accelerator.fsdp_config.reshard_after_forward False {more}\n"
        )
    };
    let any = Options {
        gpus: Some("h100".parse().unwrap()),
        ..Options::default()
    };
    let job = try_text("run.sh", &command("--train.global_batch_size 16"), &any).unwrap();
    assert_eq!(job.framework, "VeOmni");
    has(
        &job,
        &[
            ("mesh.dp_shard", "4"),
            ("train.seq_len", "4096"),
            ("train.grad_accum", "4"),
            ("fsdp.reshard_after_forward", "false"),
        ],
    );
    let wrong = command("--train.accelerator.fsdp_config.fsdp_mod fsdp2");
    let error = try_text("run.sh", &wrong, &any).unwrap_err();
    assert!(error.contains("did you mean `fsdp_mode`?"), "{error}");
}

/// Jobs that are not modeled are refused with the reason, before a model is asked for.
#[test]
fn other_jobs_are_refused_with_the_reason() {
    for (text, wanted) in [
        (
            "model: {model_path: x}\ndata: {data_type: diffusion, train_path: y}\n",
            "job.yaml:2:8: data.data_type = diffusion: diffusion models are not modeled",
        ),
        (
            "model: {model_path: x}\ntrain: {accelerator: {ulysses_size: 1}, training_task: online_training}\n",
            "diffusion models are not modeled",
        ),
        (
            "model: {model_path: x, encoders: {image: {model_path: y}}}\ntrain: {accelerator: {ep_size: 1}}\n",
            "models composed of encoders",
        ),
        (
            "model: {model_path: x}\ndata: {data_type: dpo, train_path: y}\n",
            "a reference model",
        ),
    ] {
        let error = try_text("job.yaml", text, &eight()).unwrap_err();
        assert!(error.contains(wanted), "{error}");
    }
    let job = sections("", "ulysses_size: 2");
    let wanted = (
        "train.accelerator.ulysses_size".to_owned(),
        "Ulysses sequence parallelism is not modeled".to_owned(),
    );
    assert_eq!(refused(&job), [wanted]);
    let one = Options {
        gpus: Some("1xh100".parse().unwrap()),
        ..Options::default()
    };
    let text = format!("{QWEN}train: {{accelerator: {{fsdp_config: {{fsdp_mode: fsdp2}}}}}}\n");
    let job = try_text("job.yaml", &text, &one).unwrap();
    assert!(refused(&job)[0].1.contains("on one GPU"));
}

#[test]
fn wrong_arguments_say_where_and_what_to_write() {
    let error = |train: &str| {
        let text = format!("{QWEN}train:\n  micro_batch_size: 1\n{train}");
        try_text("job.yaml", &text, &eight())
            .map(|_| ())
            .unwrap_err()
    };
    assert_eq!(
        error("  accelerator:\n    ulyses_size: 2\n"),
        "job.yaml:5:5: `ulyses_size` is not a key of VeOmni; did you mean `ulysses_size`?"
    );
    assert_eq!(
        error("  dyn_bsz: true\n  accelerators:\n    ep_size: 2\n"),
        "job.yaml:5:3: `accelerators` is not a section of VeOmni; did you mean `accelerator`?"
    );
    assert_eq!(
        error("  accelerator:\n    fsdp_config:\n      fsdp_mode: zero3\n"),
        "job.yaml:6:18: train.accelerator.fsdp_config.fsdp_mode: expected fsdp2, fsdp1 or ddp, got `zero3`"
    );
    let mixed = error("  accelerator:\n    cp_size: 1\n  expert_parallel_size: 2\n");
    assert!(
        mixed.starts_with("job.yaml:6:3: VeOmni ignores `train.expert_parallel_size` next to"),
        "{mixed}"
    );
    // VeOmni reads `offload_config`; many of its own files have `offload`.
    let job = sections("", "offload: {enable_activation: true}");
    let (status, why) = row(&job, "train.accelerator.offload.enable_activation");
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing));
    assert!(why.contains("offload_config"), "{why}");
}

#[test]
fn offload_is_read() {
    let job = sections(
        "",
        "fsdp_config: {offload: true}, offload_config: {enable_activation: true, activation_gpu_limit: 2.0}",
    );
    has(
        &job,
        &[
            ("fsdp.offload", "[\"params\", \"grads\", \"optimizer\"]"),
            ("train.activation_offload", "true"),
        ],
    );
    let key = "train.accelerator.offload_config.enable_activation";
    assert_eq!(row(&job, key).0, Status::Assumed);
}
