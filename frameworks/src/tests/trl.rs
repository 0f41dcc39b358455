//! Arguments of TRL and of the Trainer that decide the loss, the model's kernels and when gradients
//! are reduced. Values are those of TRL 1.16, Accelerate 1.15 and transformers 5.24.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Status};

const SFT: &str = "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 8192\npacking: true\n\
                   per_device_train_batch_size: 1\ngradient_accumulation_steps: 4\nbf16: true\n";

fn sft(more: &str) -> Job {
    try_text("sft.yaml", &format!("{SFT}{more}"), &eight()).unwrap_or_else(|e| panic!("{e}"))
}

/// Since 1.7, `SFTConfig` sets `chunked_nll` unless `use_liger_kernel` is true;
/// `_CHUNKED_LM_HEAD_CHUNK_SIZE` is 256.
#[test]
fn the_default_loss_of_trl_is_computed_in_chunks() {
    let chunked = [
        ("train.loss", "\"checkpointed_chunks\""),
        ("train.loss_chunk_tokens", "256"),
    ];
    for more in ["", "loss_type: chunked_nll\n", "use_liger_kernel: false\n"] {
        has(&sft(more), &chunked);
    }
    for more in ["loss_type: nll\n", "loss_type: dft\n"] {
        let job = sft(more);
        has(&job, &[("train.loss", "\"materialized\"")]);
        assert_eq!(setting(&job, "train.loss_chunk_tokens"), None);
    }
    let liger = sft("use_liger_kernel: true\n");
    has(&liger, &[("train.loss", "\"chunked\"")]);
    assert_eq!(setting(&liger, "train.loss_chunk_tokens"), None);
    // Without arguments of TRL, the Trainer computes all logits.
    let plain = SFT.replace("packing: true\n", "");
    let job = try_text("train.yaml", &plain, &eight()).unwrap();
    assert_eq!(setting(&job, "train.loss"), None);
}

/// TRL 0.20 removed `max_seq_length`, before recompute and the loss in chunks became defaults.
#[test]
fn files_for_old_versions_of_trl_have_their_defaults() {
    let text = SFT.replace("max_length", "max_seq_length");
    let read = |more: &str| try_text("sft.yaml", &format!("{text}{more}"), &eight()).unwrap();
    has(
        &read(""),
        &[
            ("train.seq_len", "8192"),
            ("train.recompute", "\"none\""),
            ("train.loss", "\"materialized\""),
        ],
    );
    let given = read("gradient_checkpointing: true\nuse_liger_kernel: true\n");
    has(
        &given,
        &[
            ("train.recompute", "\"full\""),
            ("train.loss", "\"chunked\""),
        ],
    );
}

/// `loss_type` of other trainers says nothing about logits.
#[test]
fn other_losses_of_the_same_key_are_numbers_only() {
    let job = sft("loss_type: sigmoid\n");
    assert_eq!(
        row(&job, "loss_type").0,
        Status::NoCounterpart(Lack::Nothing)
    );
}

/// `_apply_liger_kernel` of transformers leaves out what `liger_kernel_config` turns off.
#[test]
fn the_loss_stays_if_ligers_loss_is_off() {
    let text = SFT.replace("packing: true\n", "");
    let text = format!(
        "{text}use_liger_kernel: true\nliger_kernel_config:\n  fused_linear_cross_entropy: "
    );
    let read = |value: &str| try_text("train.yaml", &format!("{text}{value}\n"), &eight()).unwrap();
    let kernels = ("model.implementation", "\"torchtitan\"");
    has(&read("true"), &[kernels, ("train.loss", "\"chunked\"")]);
    let without = read("false");
    has(&without, &[kernels]);
    assert_eq!(setting(&without, "train.loss"), None);
    assert!(!row(&without, "use_liger_kernel").1.contains("loss"));
}

#[test]
fn arguments_of_from_pretrained_are_read_as_those_of_the_same_name() {
    let inside = sft("model_init_kwargs:\n  attn_implementation: eager\n  dtype: bfloat16\n");
    let outside = sft("attn_implementation: eager\ndtype: bfloat16\n");
    has(&inside, &[("model.attn_implementation", "\"eager\"")]);
    let keys = |job: &Job| {
        let settings = job.rows().iter().flat_map(|r| &r.settings);
        let mut all: Vec<_> = settings.map(|s| (s.key, s.value.clone())).collect();
        all.sort();
        all
    };
    assert_eq!(keys(&inside), keys(&outside));
    // A key that is not known here is not called harmless.
    let other = sft("model_init_kwargs:\n  experts_implementation: eager\n");
    let key = "model_init_kwargs.experts_implementation";
    assert_eq!(row(&other, key).0, Status::NoCounterpart(Lack::Accuracy));
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\nbf16: true\n\
                   overrides_of_model_kwargs:\n  attn_implementation: eager\n";
    let job = try_text("job.yaml", axolotl, &eight()).unwrap();
    has(&job, &[("model.attn_implementation", "\"eager\"")]);
}

/// The Trainer calls `no_sync` unless `sync_each_batch` is true.
#[test]
fn gradients_are_reduced_in_every_micro_batch_on_request() {
    let sync = |value: &str| {
        format!(
            "accelerator_config:\n  gradient_accumulation_kwargs:\n    sync_each_batch: {value}\n"
        )
    };
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\nbf16: true\n\
                   gradient_accumulation_steps: 4\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n";
    for text in [SFT, axolotl] {
        for (value, expected) in [("true", "\"every\""), ("false", "\"last\"")] {
            let job = try_text("job.yaml", &format!("{text}{}", sync(value)), &eight()).unwrap();
            has(&job, &[("fsdp.gradient_sync", expected)]);
        }
    }
    let more =
        "accelerator_config: {split_batches: true, gradient_accumulation_kwargs: {num_steps: 2}}\n";
    let text = SFT.replace("gradient_accumulation_steps: 4\n", more);
    let job = try_text("job.yaml", &text, &eight()).unwrap();
    has(&job, &[("train.grad_accum", "2")]);
}

#[test]
fn a_teacher_is_refused() {
    let text = format!("{SFT}teacher_model_name_or_path: Qwen/Qwen3-32B\n");
    let job = try_text("gkd.yaml", &text, &eight()).unwrap();
    let refused: Vec<&str> = job.decisive().map(|r| r.key.as_str()).collect();
    assert_eq!(refused, ["teacher_model_name_or_path"]);
}

/// An unknown key may be a second model, too.
#[test]
fn an_unknown_teacher_is_reported_with_the_verdict() {
    let of = |more: &str| {
        let script = format!(
            "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --max_seq_length 2048 \
             --per_device_train_batch_size 1 --bf16 {more}\n"
        );
        try_text("train.sh", &script, &eight()).unwrap()
    };
    let job = of("--teacher_path /models/big");
    let found: Vec<_> = job.doubts(&[]).collect();
    let [(row, doubt)] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(row.key, "teacher_path");
    assert!(doubt.message.contains("second model"), "{}", doubt.message);
    for more in [
        "--use_teacher false",
        "--teacher_forcing_ratio 0.5",
        "--teachers 3",
    ] {
        assert_eq!(of(more).doubts(&[]).count(), 0, "{more}");
    }
}

const LORA: &str =
    "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\nbf16: true\n";

/// `ModelConfig` of TRL: `lora_r` is 16, `lora_alpha` 32 and `lora_target_modules` None. PEFT 0.21
/// adapts the query and the value of Qwen3 then (`peft/utils/constants.py`).
#[test]
fn adapters_of_trl_have_its_defaults_and_the_layers_of_peft() {
    let job = sft("use_peft: true\n");
    has(
        &job,
        &[
            ("lora.r", "16"),
            ("lora.lora_alpha", "32.0"),
            ("lora.target_modules", "[\"q_proj\", \"v_proj\"]"),
        ],
    );
    let given = sft("use_peft: true\nlora_r: 4\nlora_alpha: 8\nlora_target_modules: [o_proj]\n");
    has(
        &given,
        &[
            ("lora.r", "4"),
            ("lora.lora_alpha", "8.0"),
            ("lora.target_modules", "[\"o_proj\"]"),
        ],
    );
    assert_eq!(
        setting(&sft("use_peft: false\n"), "lora.target_modules"),
        None
    );
}

/// The names are those of PEFT's table. Each of them is the end of a path in the model.
#[test]
fn adapters_without_targets_depend_on_the_type_of_the_model() {
    let of = |model: &str| {
        let script = format!(
            "torchrun --nproc_per_node 8 train.py --model_name_or_path {model} --use_lora --lora_r 8 \
             --per_device_train_batch_size 1 --model_max_length 512 --bf16 true\n"
        );
        let mut job = try_text("train.sh", &script, &eight()).unwrap();
        let (_, why) = row(&job, "target_modules");
        let found = setting(&job, "lora.target_modules").unwrap();
        job.scenario(&[]).unwrap_or_else(|e| panic!("{model}: {e}"));
        (found, why)
    };
    for (model, names) in [
        ("meta-llama/Llama-3.1-8B", "[\"q_proj\", \"v_proj\"]"),
        ("Qwen/Qwen2.5-7B", "[\"q_proj\", \"v_proj\"]"),
        ("mistralai/Mixtral-8x7B-v0.1", "[\"q_proj\", \"v_proj\"]"),
        ("gpt2", "[\"c_attn\"]"),
    ] {
        assert_eq!(of(model).0, names, "{model}");
    }
    let (unknown, why) = of("Qwen/Qwen3-30B-A3B");
    assert_eq!(unknown, "\"all-linear\"");
    assert!(why.contains("`qwen3_moe`"), "{why}");
    // Scripts with their own defaults keep them: PEFT's example and open-instruct's `finetune.py`.
    let read = |more: &str| try_text("train.yaml", &format!("{LORA}{more}"), &eight()).unwrap();
    let example = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --bf16 true \
                   --per_device_train_batch_size 1 --use_peft_lora true --packing true\n";
    has(
        &try_text("train.sh", example, &eight()).unwrap(),
        &[("lora.r", "64"), ("lora.target_modules", "\"all-linear\"")],
    );
    let instruct = read("use_lora: true\nlora_rank: 64\nuse_slow_tokenizer: true\n");
    has(&instruct, &[("lora.target_modules", "\"all-linear\"")]);
}

/// PEFT's own file may leave `target_modules` open.
#[test]
fn a_configuration_of_peft_without_targets_has_its_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let adapter = write(
        "adapter_config.json",
        r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": null}"#,
    );
    let job = crate::read(&[write("train.yaml", LORA), adapter], &eight()).unwrap();
    has(&job, &[("lora.target_modules", "[\"q_proj\", \"v_proj\"]")]);
}

#[test]
fn targets_of_scripts_are_read_under_both_names() {
    let wanted = [("lora.target_modules", "[\"k_proj\", \"o_proj\"]")];
    for value in ["k_proj o_proj", "k_proj,o_proj"] {
        let script = format!(
            "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --use_peft --lora_r 8 \
             --target_modules {value} --per_device_train_batch_size 1 --max_length 512\n"
        );
        has(&try_text("train.sh", &script, &eight()).unwrap(), &wanted);
    }
    let list = sft("use_peft: true\ntarget_modules: [k_proj, o_proj]\n");
    has(&list, &wanted);
    assert_eq!(row(&list, "target_modules").0, Status::Used);
}
