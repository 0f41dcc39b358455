//! Defaults and options of NeMo AutoModel.

use super::{eight, row, setting, try_text};
use crate::{Job, Lack, Status};

/// Returns a job with experts that eight ranks divide, or with none for `ep` 1.
fn read(model: &str, ep: u64, more: &str) -> Job {
    let text = format!(
        "step_scheduler: {{local_batch_size: 1, global_batch_size: 16}}\n\
         dataset: {{seq_len: 4096}}\n\
         distributed: {{strategy: fsdp2, ep_size: {ep}{}}}\n\
         model:\n  pretrained_model_name_or_path: {model}\n{}",
        more.lines()
            .filter_map(|l| l.strip_prefix("distributed."))
            .map(|l| format!(", {l}"))
            .collect::<String>(),
        more.lines()
            .filter(|l| !l.starts_with("distributed."))
            .map(|l| format!("{l}\n"))
            .collect::<String>(),
    );
    let mut job = try_text("job.yaml", &text, &eight()).unwrap_or_else(|e| panic!("{e}\n{text}"));
    if job.decisive().count() == 0 {
        job.scenario(&[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
    }
    job
}

fn experts(more: &str) -> Job {
    read("Qwen/Qwen3-30B-A3B", 8, more)
}

fn dense(more: &str) -> Job {
    read("Qwen/Qwen3-8B", 1, more)
}

fn has(job: &Job, key: &str, value: &str) {
    assert_eq!(setting(job, key).as_deref(), Some(value), "{key}");
}

/// Recipes of retrieval have no language-modeling loss, and others train a second model.
#[test]
fn recipes_of_other_models_are_refused() {
    for (more, wanted) in [
        (
            "  _target_: nemo_automodel.NeMoAutoModelBiEncoder.from_pretrained\n  pooling: avg",
            "contrastive",
        ),
        ("recipe: TrainCrossEncoderRecipe", "contrastive"),
        ("recipe: FinetuneRecipeForMultimodal", "images"),
        ("  drafter_path: google/x", "draft model"),
    ] {
        let job = dense(more);
        let why: Vec<String> = job.decisive().filter_map(|r| r.why.clone()).collect();
        assert!(why.len() == 1 && why[0].contains(wanted), "{why:?}");
    }
}

/// `build_gpt2_model` takes sizes. The count is that of its layers: tied embeddings, positions,
/// and 12 blocks with biases.
#[test]
fn sizes_of_gpt2_are_read() {
    let text = "step_scheduler: {local_batch_size: 2, global_batch_size: 32}\ndataset: {seq_len: 1024}\n\
                distributed: {strategy: fsdp2}\nmodel:\n  _target_: nemo_automodel.components.models.gpt2.build_gpt2_model\n  \
                vocab_size: 50258\n  n_positions: 2048\n  n_embd: 768\n  n_layer: 12\n  n_head: 12\n";
    let mut job = try_text("job.yaml", text, &eight()).unwrap();
    let scenario = job.scenario(&[]).unwrap();
    let parameters = shardlab_plan::plan(&scenario).unwrap().meta.parameters;
    assert_eq!(
        parameters.total,
        (50_258 + 2048) * 768 + 12 * 7_087_872 + 2 * 768
    );
}

/// Dispatchers of `BackendConfig`. Without one, DeepEP is used where it is installed.
#[test]
fn dispatchers_of_the_backend_are_read() {
    let backend = |dispatcher: &str| experts(&format!("  backend: {{dispatcher: {dispatcher}}}"));
    for (name, expected) in [
        ("torch", "\"gather\""),
        ("deepep", "\"deepep\""),
        ("hybridep", "\"deepep\""),
        ("uccl_ep", "\"deepep\""),
        ("mok", "\"deepep\""),
    ] {
        has(&backend(name), "moe.dispatcher", expected);
    }
    let (status, why) = row(&backend("mok"), "model.backend.dispatcher");
    assert_eq!(status, Status::Assumed);
    assert!(why.contains("Mixture-of-Kittens"), "{why}");
    has(&experts(""), "moe.dispatcher", "\"deepep\"");
    assert_eq!(setting(&dense(""), "moe.dispatcher"), None);
    let ignored = experts("  backend: {enable_deepep: false, dispatcher: hybridep}");
    has(&ignored, "moe.dispatcher", "\"deepep\"");
    let (status, why) = row(&ignored, "model.backend.enable_deepep");
    assert_eq!(status, Status::NoCounterpart(Lack::Accuracy));
    assert!(why.contains("ignore"), "{why}");
    let text = "step_scheduler: {local_batch_size: 1}\nmodel:\n  backend: {dispatcher: nccl}\n";
    let error = try_text("job.yaml", text, &eight()).unwrap_err();
    assert!(
        error.starts_with("job.yaml:3:") && error.contains("torch, deepep, hybridep"),
        "{error}"
    );
}

/// `FSDP2Config.mp_policy` reduces in float32, also if weights are loaded in bfloat16 and not kept
/// in float32.
#[test]
fn gradients_are_reduced_in_float32() {
    for more in [
        "",
        "  torch_dtype: bf16",
        "  torch_dtype: bf16\ndistributed.mp_policy: {param_dtype: bfloat16, reduce_dtype: float32}",
    ] {
        let job = dense(more);
        has(&job, "precision.reduce_dtype", "\"f32\"");
        has(&job, "precision.main_params", "\"none\"");
        has(&job, "precision.main_grads", "\"bf16\"");
        has(&job, "precision.moments", "\"bf16\"");
        has(&job, "precision.param_dtype", "\"bf16\"");
    }
    let master = dense("  torch_dtype: float32\ndistributed.mp_policy: {param_dtype: bfloat16}");
    assert_eq!(setting(&master, "precision.main_params"), None);
}

/// Transformer Engine's `FusedAdam` has float32 moments unless a key says otherwise, and may keep
/// float32 copies of weights.
#[test]
fn states_of_fused_adam_are_float32() {
    let adam = "  torch_dtype: bf16\noptimizer:\n  _target_: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam\n";
    let job = dense(adam);
    has(&job, "precision.moments", "\"f32\"");
    has(&job, "precision.main_params", "\"none\"");
    let job = dense(&format!("{adam}  master_weights: true\n"));
    has(&job, "precision.main_params", "\"f32\"");
    has(&job, "precision.main_grads", "\"bf16\"");
    let job = dense(&format!("{adam}  exp_avg_dtype: torch.bfloat16\n"));
    has(&job, "precision.moments", "\"bf16\"");
}

/// Only the last micro-batch reduces gradients, unless `defer_fsdp_grad_sync` is off.
#[test]
fn gradients_are_reduced_in_the_last_micro_batch() {
    has(&dense(""), "fsdp.gradient_sync", "\"last\"");
    let every = dense("distributed.defer_fsdp_grad_sync: false");
    has(&every, "fsdp.gradient_sync", "\"every\"");
}

/// Without expert parallelism all blocks but the last are freed after forward; with it, none is,
/// and `distributed.moe` decides.
#[test]
fn parameters_are_freed_after_forward_by_default_without_experts() {
    let key = "fsdp.reshard_after_forward";
    has(&dense(""), key, "\"auto\"");
    has(
        &dense("distributed.reshard_after_forward: false"),
        key,
        "false",
    );
    has(&experts(""), key, "false");
    has(
        &experts("distributed.moe: {reshard_after_forward: true}"),
        key,
        "true",
    );
    let both = experts("distributed.reshard_after_forward: true");
    has(&both, key, "false");
    let (_, why) = row(&both, "distributed.reshard_after_forward");
    assert!(why.contains("distributed.moe"), "{why}");
}

#[test]
fn depths_of_prefetching_are_read() {
    let (forward, backward) = ("fsdp.prefetch_forward", "fsdp.prefetch_backward");
    let on = "distributed.enable_fsdp2_prefetch: true";
    let job = dense(on);
    has(&job, forward, "1");
    has(&job, backward, "2");
    let job = dense(&format!(
        "{on}\ndistributed.fsdp2_forward_prefetch_depth: 2\ndistributed.fsdp2_backward_prefetch_depth: 3"
    ));
    has(&job, forward, "2");
    has(&job, backward, "3");
    let off = dense("distributed.fsdp2_backward_prefetch_depth: 3");
    assert_eq!(setting(&off, backward), None);
}

/// Recipes of `TEFp8Config`, fused kernels, gates that spread tokens evenly, and losses.
#[test]
fn backends_decide_routing_kernels_and_8_bit_matmuls() {
    let job = experts("  backend: {fake_balanced_gate: true, te_fp8: {recipe: current}}");
    has(&job, "moe.force_routing", "true");
    has(&job, "moe.routing", "\"round_robin\"");
    has(&job, "precision.float8_recipe", "\"tensorwise\"");
    let job = experts("  backend: {fake_balanced_gate: true, fake_gate_noise: 0.5}");
    has(&job, "moe.force_routing", "true");
    assert_eq!(setting(&job, "moe.routing"), None);
    let job = experts("  backend: {fake_balanced_gate: true, fake_gate_noise: 0.0}");
    has(&job, "moe.routing", "\"round_robin\"");
    let job = experts("  backend: {fake_balanced_gate: false, te_fp8: null}");
    assert_eq!(setting(&job, "moe.force_routing"), None);
    assert_eq!(setting(&job, "precision.float8_recipe"), None);
    let job = experts(
        "  backend: {rms_norm: te}\nloss_fn: {_target_: MaskedCrossEntropy, fp32_upcast: false}",
    );
    has(&job, "compile.mode", "\"blocks\"");
    has(&job, "precision.loss_fp32_upcast", "false");
    let job = experts(
        "  backend: {rms_norm: torch}\nloss_fn: {_target_: MaskedCrossEntropy, fp32_upcast: true}",
    );
    assert_eq!(setting(&job, "compile.mode"), None);
    assert_eq!(setting(&job, "precision.loss_fp32_upcast"), None);
    let job = dense("  backend: {te_fp8: {recipe: block}}");
    has(&job, "precision.float8_recipe", "\"blockwise\"");
}

/// Sizes of groups that the given GPUs cannot hold are refused with the sizes.
#[test]
fn groups_of_experts_that_are_too_large_are_refused() {
    let job = read("Qwen/Qwen3-30B-A3B", 32, "");
    let refused: Vec<_> = job.decisive().collect();
    assert_eq!(refused.len(), 1);
    let why = refused[0].why.clone().unwrap();
    assert!(
        why.contains("8 are not a multiple of 32") && why.contains("--gpus"),
        "{why}"
    );
}

/// `apply_fsdp` leaves experts out of FSDP unless several ranks have the same expert.
#[test]
fn experts_that_one_rank_has_are_not_managed() {
    let key = "fsdp.ignored_params";
    has(&experts(""), key, "\"experts\"");
    has(
        &experts("distributed.dp_replicate_size: 1"),
        key,
        "\"experts\"",
    );
    for job in [
        read("Qwen/Qwen3-30B-A3B", 4, ""),
        read("Qwen/Qwen3-30B-A3B", 1, ""),
        dense(""),
    ] {
        assert_eq!(setting(&job, key), None);
    }
    // Weights in float32 are cast by the model.
    let cast = experts("  torch_dtype: float32");
    assert_eq!(setting(&cast, key), None);
    let (_, why) = row(&cast, "distributed.ep_size");
    assert!(why.contains("predicted as cast and copied"), "{why}");
    let replicas = read("Qwen/Qwen3-30B-A3B", 4, "distributed.dp_replicate_size: 2");
    assert_eq!(setting(&replicas, key), None);
    let (_, why) = row(&replicas, "distributed.ep_size");
    assert!(why.contains("replicated over dp_replicate"), "{why}");
}

/// Excluded layers that a model does not have are no error.
#[test]
fn excluded_layers_that_do_not_exist_are_skipped() {
    let job = dense(
        "peft:\n  _target_: nemo_automodel.components._peft.lora.PeftConfig\n  match_all_linear: true\n  dim: 8\n  \
         exclude_modules: [\"*.out_proj\"]",
    );
    assert_eq!(setting(&job, "lora.exclude_modules"), None);
    assert_eq!(setting(&job, "lora.r").as_deref(), Some("8"));
}

/// The parallelizer's `GroupedExpertsDeepEPLoRA` trains adapters of experts that `*` matches.
#[test]
fn adapters_of_experts_are_reported() {
    let peft = |targets: &str| {
        format!(
            "peft:\n  _target_: nemo_automodel.components._peft.lora.PeftConfig\n  dim: 8\n  target_modules: {targets}"
        )
    };
    let job = experts(&peft("[\"*\"]"));
    let (status, why) = row(&job, "peft.target_modules");
    assert_eq!(status, Status::Assumed);
    assert!(why.contains("experts"), "{why}");
    let job = experts(&peft("[q_proj, v_proj]"));
    assert!(!row(&job, "peft.target_modules").1.contains("experts"));
}
