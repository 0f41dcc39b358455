//! LLM Foundry: MPT models, FSDP as Composer sets it up, and batches.

use super::{eight, row, setting, try_text};
use crate::{Job, Lack, Options, Status};

const MPT: &str = "model: {name: mpt_causal_lm, d_model: 4096, n_heads: 32, n_layers: 32, expansion_ratio: 4, \
                   max_seq_len: 2048, vocab_size: 50368}\n";
const FSDP: &str = "fsdp_config: {sharding_strategy: FULL_SHARD}\n";

fn text(model: &str, more: &str) -> String {
    format!(
        "max_seq_len: 2048\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 4\nprecision: amp_bf16\n{model}{more}"
    )
}

fn read(model: &str, more: &str) -> Job {
    let text = text(model, more);
    try_text("job.yaml", &text, &eight()).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn error(model: &str, more: &str) -> String {
    try_text("job.yaml", &text(model, more), &eight()).unwrap_err()
}

fn has(job: &Job, key: &str, value: &str) {
    assert_eq!(setting(job, key).as_deref(), Some(value), "{key}");
}

/// Returns the number of parameters of the model of a job.
fn parameters(job: &mut Job) -> u64 {
    let scenario = job.scenario(&[]).unwrap();
    shardlab_plan::plan(&scenario)
        .unwrap()
        .meta
        .parameters
        .total
}

/// Numbers of parameters of `GPT2LMHeadModel` and `MptForCausalLM` (transformers 5) with these
/// sizes; the published MPT-7B has the second.
#[test]
fn models_of_mpt_have_their_parameters() {
    let mut job = read(MPT, FSDP);
    has(&job, "model.family", "\"gpt2\"");
    assert_eq!(parameters(&mut job), 6_658_859_008);
    let published = MPT.replace(
        "vocab_size: 50368}",
        "vocab_size: 50432, no_bias: true, attn_config: {alibi: true, attn_impl: triton}}",
    );
    let mut job = read(&published, FSDP);
    has(&job, "model.family", "\"decoder\"");
    has(&job, "model.position_embedding", "\"alibi\"");
    has(&job, "train.attention_backend", "\"triton\"");
    assert_eq!(parameters(&mut job), 6_649_286_656);
}

/// MPT's default loss, flash-attn's, reads logits in 16 bits; PyTorch's casts them under autocast.
#[test]
fn the_loss_of_mpt_decides_the_type_of_logits() {
    let key = "precision.loss_fp32_upcast";
    has(&read(MPT, FSDP), key, "false");
    let fused = MPT.replace("n_layers", "loss_fn: fused_crossentropy, n_layers");
    has(&read(&fused, FSDP), key, "false");
    let torch = MPT.replace("n_layers", "loss_fn: torch_crossentropy, n_layers");
    has(&read(&torch, FSDP), key, "true");
}

#[test]
fn gathers_without_a_limit_are_reported() {
    let without = FSDP.replace("{", "{limit_all_gathers: false, ");
    let (status, why) = row(&read(MPT, &without), "fsdp_config.limit_all_gathers");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy));
    assert!(why.contains("limit"), "{why}");
}

/// The library of attention kernels is set on GPUs whose profiles have its rates.
#[test]
fn libraries_of_attention_depend_on_the_gpus() {
    let key = "train.attention_backend";
    let triton = MPT.replace("n_layers", "attn_config: {attn_impl: triton}, n_layers");
    let on = |model: &str, gpus: &str| {
        let options = Options {
            gpus: Some(gpus.parse().unwrap()),
            ..Options::default()
        };
        setting(
            &try_text("job.yaml", &text(model, FSDP), &options).unwrap(),
            key,
        )
    };
    assert_eq!(on(MPT, "8xh200").as_deref(), Some("\"flash\""));
    assert_eq!(on(MPT, "8xb200"), None);
    assert_eq!(on(&triton, "8xa100").as_deref(), Some("\"triton\""));
    assert_eq!(on(&triton, "8xh200"), None);
}

/// `int(d_model * expansion_ratio)`, grouped queries, rotary positions and a gate, as in DBRX's
/// dense blocks.
#[test]
fn options_of_mpt_are_read() {
    let model = "model: {name: mpt_causal_lm, d_model: 1024, n_heads: 8, n_layers: 2, expansion_ratio: 2.67, \
                 vocab_size: 256, no_bias: true, norm_type: low_precision_rmsnorm, tie_word_embeddings: false, \
                 attn_config: {attn_type: grouped_query_attention, kv_n_heads: 2, rope: true, rope_theta: 500000}, \
                 ffn_config: {ffn_type: mptglu, ffn_act_fn: {name: silu}}}\n";
    let mut job = read(model, FSDP);
    for (key, value) in [
        ("model.ffn", "2734"),
        ("model.kv_heads", "2"),
        ("model.position_embedding", "\"rotary\""),
        ("model.rope_theta", "500000.0"),
        ("model.norm", "\"rms_norm\""),
        ("model.gated_mlp", "true"),
        ("model.activation", "\"silu\""),
        ("model.tie_embeddings", "false"),
        ("model.bias", "false"),
    ] {
        has(&job, key, value);
    }
    // Per block: norms, queries with keys and values, output, three matrices of the gated layer.
    let block = 2 * 1024 + 1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 2734;
    assert_eq!(parameters(&mut job), 2 * block + 1024 + 2 * 256 * 1024);
}

/// `get_mixed_precision` and the defaults of `FSDPConfig`.
#[test]
fn fsdp_is_set_up_as_composer_does() {
    let reduce = "precision.reduce_dtype";
    has(&read(MPT, FSDP), reduce, "\"f32\"");
    for (name, dtype) in [("PURE", "\"bf16\""), ("DEFAULT", "\"f32\"")] {
        let job = read(MPT, &format!("fsdp_config: {{mixed_precision: {name}}}\n"));
        has(&job, reduce, dtype);
        has(&job, "precision.param_dtype", "\"bf16\"");
        has(&job, "fsdp.policy", "\"fsdp2\"");
    }
    let types = "fsdp_config:\n  mixed_precision: {param_dtype: bf16, reduce_dtype: bf16, buffer_dtype: fp32}\n";
    has(&read(MPT, types), reduce, "\"bf16\"");
    let full = read(MPT, "fsdp_config: {mixed_precision: FULL}\n");
    let (status, why) = row(&full, "fsdp_config.mixed_precision");
    assert_eq!(status, Status::Assumed);
    assert!(why.contains("float32"), "{why}");
    let wrong = error(MPT, "fsdp_config: {mixed_precision: HALF}\n");
    assert!(
        wrong.starts_with("job.yaml:6:32: ") && wrong.contains("PURE, DEFAULT or FULL"),
        "{wrong}"
    );
    let kept = read(MPT, "fsdp_config: {sharding_strategy: SHARD_GRAD_OP}\n");
    has(&kept, "fsdp.reshard_after_forward", "false");
    has(&read(MPT, "fsdp_config: {}\n"), "fsdp.policy", "\"fsdp2\"");
    let ddp = read(MPT, "fsdp_config: null\n");
    has(&ddp, "fsdp.strategy", "\"no_shard\"");
}

/// Composer's wrappers are reentrant by default.
#[test]
fn recompute_is_reentrant_unless_the_file_says_otherwise() {
    let on = |more: &str| {
        read(
            MPT,
            &format!("fsdp_config: {{activation_checkpointing: true{more}}}\n"),
        )
    };
    has(&on(""), "train.recompute", "\"full\"");
    has(&on(""), "train.use_reentrant", "true");
    let job = on(", activation_checkpointing_reentrant: false");
    assert_eq!(setting(&job, "train.use_reentrant"), None);
    let job = read(MPT, "fsdp_config: {activation_cpu_offload: true}\n");
    has(&job, "train.activation_offload", "true");
    assert_eq!(setting(&job, "train.use_reentrant"), None);
}

/// `calculate_batch_size_info`: the micro-batch is at most the sequences of a rank.
#[test]
fn batches_are_divided_as_llm_foundry_does() {
    let job = read(MPT, FSDP);
    has(&job, "train.micro_batch", "4");
    has(&job, "train.grad_accum", "2");
    let many = Options {
        gpus: Some("32xh100".parse().unwrap()),
        ..Options::default()
    };
    let job = try_text("job.yaml", &text(MPT, FSDP), &many).unwrap();
    has(&job, "train.micro_batch", "2");
    has(&job, "train.grad_accum", "1");
    let (status, why) = row(&job, "device_train_microbatch_size");
    assert_eq!(status, Status::Assumed);
    assert!(why.contains("Composer reduces"), "{why}");
    let auto = text(MPT, FSDP).replace("microbatch_size: 4", "microbatch_size: auto");
    let job = try_text("job.yaml", &auto, &eight()).unwrap();
    has(&job, "train.micro_batch", "8");
    has(&job, "train.grad_accum", "1");
    let (_, why) = row(&job, "device_train_microbatch_size");
    assert!(why.contains("halves"), "{why}");
    let uneven = text(MPT, FSDP).replace("batch_size: 64", "batch_size: 63");
    let error = try_text("job.yaml", &uneven, &eight()).unwrap_err();
    assert!(error.starts_with("job.yaml:2:1: "), "{error}");
}

/// Models of transformers, with PEFT's options inline.
#[test]
fn models_of_transformers_are_read() {
    let model = "model: {name: hf_causal_lm, pretrained_model_name_or_path: Qwen/Qwen3-8B, use_flash_attention_2: true, \
                 peft_config: {peft_type: LORA, r: 64, lora_alpha: 128, target_modules: [q_proj, v_proj]}}\n";
    let job = read(model, FSDP);
    for (key, value) in [
        ("model.preset", "\"qwen3-8b\""),
        ("model.implementation", "\"transformers\""),
        ("model.attn_implementation", "\"flash_attention_2\""),
        ("lora.r", "64"),
        ("lora.lora_alpha", "128.0"),
        ("lora.target_modules", "[\"q_proj\", \"v_proj\"]"),
        ("precision.frozen_params", "\"f32\""),
    ] {
        has(&job, key, value);
    }
    // LLM Foundry passes `peft_config` on.
    let open = read(
        &model.replace(", target_modules: [q_proj, v_proj]", ""),
        FSDP,
    );
    has(&open, "lora.target_modules", "[\"q_proj\", \"v_proj\"]");
    let fewer = "model: {name: hf_causal_lm, pretrained_model_name_or_path: gpt2, config_overrides: {n_layer: 2, n_positions: 2048}}\n";
    let job = read(fewer, FSDP);
    has(&job, "model.layers", "2");
    has(&job, "model.max_seq_len", "2048");
}

#[test]
fn jobs_that_are_not_predicted_are_refused() {
    let decisive = |model: &str, more: &str| -> Vec<String> {
        let job = read(model, more);
        job.decisive().map(|r| r.key.clone()).collect()
    };
    let experts = MPT.replace("n_layers", "ffn_config: {ffn_type: mb_dmoe}, n_layers");
    assert_eq!(decisive(&experts, FSDP), ["model.ffn_config.ffn_type"]);
    let offload = "fsdp_config: {cpu_offload: true}\n";
    assert_eq!(decisive(MPT, offload), ["fsdp_config.cpu_offload"]);
    let t5 = "model: {name: hf_t5, pretrained_model_name_or_path: Qwen/Qwen3-8B}\n";
    assert_eq!(decisive(t5, FSDP), ["model.name"]);
    let typo = error(MPT, "fsdp_config: {sharding_strateg: FULL_SHARD}\n");
    assert!(
        typo.starts_with("job.yaml:6:15: ") && typo.contains("did you mean `sharding_strategy`?"),
        "{typo}"
    );
}

/// MosaicML's launcher has the configuration in `parameters`.
#[test]
fn jobs_of_the_launcher_are_read() {
    let inner = text(MPT, FSDP).replace("max_seq_len: 2048\ng", "max_seq_len: ${variables.n}\ng");
    let inner: String = format!("variables: {{n: 1024}}\n{inner}")
        .lines()
        .map(|l| format!("  {l}\n"))
        .collect();
    let job = format!("name: x\ncompute: {{gpus: 16}}\nparameters:\n{inner}");
    let options = Options {
        gpus: Some("h100".parse().unwrap()),
        ..Options::default()
    };
    let job = try_text("job.yaml", &job, &options).unwrap();
    has(&job, "train.seq_len", "1024");
    has(&job, "mesh.dp_shard", "16");
}

/// Overrides of a command replace the keys of its file.
#[test]
fn commands_of_composer_are_read() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mpt.yaml"), text(MPT, FSDP)).unwrap();
    let script = folder.path().join("train.sh");
    let command = "composer -n 4 train/train.py mpt.yaml fsdp_config.mixed_precision=PURE \\\n  \
                   device_train_microbatch_size=16 variables.n=3\n";
    std::fs::write(&script, command).unwrap();
    let options = Options {
        gpus: Some("h100".parse().unwrap()),
        ..Options::default()
    };
    let mut job = crate::read(&[script], &options).unwrap();
    job.scenario(&[]).unwrap();
    assert_eq!(job.framework, "LLM Foundry");
    has(&job, "mesh.dp_shard", "4");
    has(&job, "train.micro_batch", "16");
    has(&job, "precision.reduce_dtype", "\"bf16\"");
    let (status, _) = row(&job, "variables.n");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy));
}
