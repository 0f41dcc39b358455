//! Options of commands that replace keys of the files that the commands name.

use super::{eight, row, setting};
use crate::{Job, Lack, Status, read};

/// Reads a command next to the files that it names.
fn command(command: &str, files: &[(&str, &str)]) -> Job {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let script = folder.path().join("train.sh");
    std::fs::write(&script, format!("{command}\n")).unwrap();
    let mut job = read(&[script], &eight()).unwrap_or_else(|e| panic!("{command}: {e}"));
    job.scenario(&[])
        .unwrap_or_else(|e| panic!("{command}: {e}"));
    job
}

/// Returns the last row of a key, which is that of the file.
fn of_file(job: &Job, key: &str) -> (Status, String) {
    let row = job.rows().iter().rev().find(|r| r.key == key).unwrap();
    (row.status, row.why.clone().unwrap_or_default())
}

const TRL: &str = "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 1024\nper_device_train_batch_size: 1\n\
                   gradient_checkpointing: true\nbf16: true\nuse_liger_kernel: true\n";
const LLAMA: &str = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\ncutoff_len: 1024\n\
                     per_device_train_batch_size: 1\ndisable_gradient_checkpointing: true\nbf16: true\n";
const AXOLOTL: &str = "base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nmicro_batch_size: 1\n\
                       gradient_accumulation_steps: 1\nbf16: true\ngradient_checkpointing: true\nadapter: lora\nlora_r: 8\n\
                       lora_target_linear: true\n";
const TUNE: &str = "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\ntokenizer:\n  max_seq_len: 1024\n\
                    batch_size: 1\noptimizer:\n  _component_: torch.optim.AdamW\n  lr: 1e-5\ndtype: bf16\n\
                    enable_activation_checkpointing: true\n";
const VEOMNI: &str = "model: {model_path: Qwen/Qwen3-8B}\ndata: {max_seq_len: 1024, train_path: x}\n\
                      train: {micro_batch_size: 1, global_batch_size: 8, data_parallel_mode: fsdp2, \
                      enable_gradient_checkpointing: true}\n";
const TITAN: &str = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nseq_len = 1024\nlocal_batch_size = 1\n\
                     [compile]\nenable = true\n";
const NEMO: &str = "step_scheduler: {local_batch_size: 1, global_batch_size: 8}\n\
                    model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, \
                    pretrained_model_name_or_path: Qwen/Qwen3-8B}\n\
                    distributed: {strategy: fsdp2, activation_checkpointing: true}\n";
const LITGPT: &str = "checkpoint_dir: checkpoints/Qwen/Qwen3-8B\nprecision: bf16-true\ndevices: 8\nlora_key: true\n\
                      lora_r: 8\ntrain: {micro_batch_size: 1, global_batch_size: 8, max_seq_length: 512}\n";

/// An option that turns something off sets no key of the scenario. The file's key must not count.
#[test]
fn options_that_turn_something_off_replace_the_keys_of_files() {
    let recompute = "train.recompute";
    for (line, off, file, text, key, scenario) in [
        (
            "trl sft --config job.yaml",
            "--gradient_checkpointing false",
            "job.yaml",
            TRL,
            "gradient_checkpointing",
            recompute,
        ),
        (
            "trl sft --config job.yaml",
            "--gradient-checkpointing=False",
            "job.yaml",
            TRL,
            "gradient_checkpointing",
            recompute,
        ),
        (
            "trl sft --config job.yaml",
            "--use_liger_kernel false",
            "job.yaml",
            TRL,
            "use_liger_kernel",
            "train.loss",
        ),
        (
            "torchrun --nproc_per_node 8 sft.py --config job.yaml",
            "--gradient_checkpointing false",
            "job.yaml",
            TRL,
            "gradient_checkpointing",
            recompute,
        ),
        (
            "accelerate launch sft.py --config job.yaml",
            "--gradient_checkpointing false",
            "job.yaml",
            TRL,
            "gradient_checkpointing",
            recompute,
        ),
        (
            "axolotl train job.yaml",
            "--gradient-checkpointing false",
            "job.yaml",
            AXOLOTL,
            "gradient_checkpointing",
            recompute,
        ),
        (
            "tune run --nproc_per_node 8 full_finetune_distributed --config job.yaml",
            "enable_activation_checkpointing=False",
            "job.yaml",
            TUNE,
            "enable_activation_checkpointing",
            recompute,
        ),
        (
            "torchrun --nproc_per_node 8 train.py job.yaml --data.train_path y",
            "--train.enable_gradient_checkpointing false",
            "job.yaml",
            VEOMNI,
            "train.enable_gradient_checkpointing",
            recompute,
        ),
        (
            "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file job.toml",
            "--compile.enable false",
            "job.toml",
            TITAN,
            "compile.enable",
            "compile.mode",
        ),
        (
            "automodel finetune llm -c job.yaml",
            "--distributed.activation_checkpointing false",
            "job.yaml",
            NEMO,
            "distributed.activation_checkpointing",
            recompute,
        ),
    ] {
        let on = command(line, &[(file, text)]);
        let value = setting(&on, scenario).unwrap_or_else(|| panic!("{line}"));
        assert!(!["\"none\"", "\"materialized\"", "\"off\""].contains(&value.as_str()));
        let line = &format!("{line} {off}");
        let job = command(line, &[(file, text)]);
        // TRL's default loss takes the place of Liger's.
        assert_ne!(setting(&job, scenario), Some(value), "{line}");
        let (status, why) = of_file(&job, key);
        assert_eq!(status, Status::NoCounterpart(Lack::Nothing), "{line}");
        assert!(why.starts_with("replaced by "), "{line}: {why}");
    }
}

#[test]
fn precision_and_defaults_that_are_turned_off_are_replaced() {
    let job = command(
        "llamafactory-cli train job.yaml disable_gradient_checkpointing=false bf16=false",
        &[("job.yaml", LLAMA)],
    );
    let value = |key: &str| setting(&job, key);
    assert_eq!(value("train.recompute").as_deref(), Some("\"full\""));
    assert_eq!(value("precision.param_dtype").as_deref(), Some("\"f32\""));
    assert_eq!(of_file(&job, "bf16").1, "replaced by bf16 = false");
}

/// `finetune_lora --lora_key false` puts no adapter on keys.
#[test]
fn layers_of_litgpt_that_are_turned_off_get_no_adapters() {
    let line = "litgpt finetune_lora --config job.yaml --lora_key false";
    let job = command(line, &[("job.yaml", LITGPT)]);
    assert!(of_file(&job, "lora_key").1.starts_with("replaced by "));
}

/// Accelerate's options have no sections, and its file has.
#[test]
fn options_of_accelerate_replace_keys_in_sections() {
    let file = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n\
                fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n";
    let line = "accelerate launch --config_file fsdp.yaml --fsdp_activation_checkpointing false train.py \
                --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --max_seq_length 512";
    let job = command(line, &[("fsdp.yaml", file)]);
    assert_eq!(setting(&job, "train.recompute"), None);
    let (_, why) = of_file(&job, "fsdp_config.fsdp_activation_checkpointing");
    assert_eq!(why, "replaced by fsdp_activation_checkpointing = false");
}

/// A path on the command replaces that of the file, whose target is not read.
#[test]
fn a_file_that_the_command_names_replaces_that_of_the_configuration() {
    let zero = |stage: u8| format!("{{\"zero_optimization\": {{\"stage\": {stage}}}}}");
    let text = format!("{TRL}deepspeed: missing.json\n");
    let job = command(
        "trl sft --config job.yaml --deepspeed z2.json",
        &[("job.yaml", &text), ("z2.json", &zero(2))],
    );
    assert_eq!(
        setting(&job, "fsdp.strategy").as_deref(),
        Some("\"optim_grads\"")
    );
    assert_eq!(
        of_file(&job, "deepspeed").1,
        "replaced by deepspeed = z2.json"
    );
}

/// Options of `axolotl train` are keys of its YAML.
#[test]
fn options_that_only_the_file_knows_are_read_with_its_table() {
    let job = command(
        "axolotl train job.yaml --lora-r 16 --sample-packing false --lora-target-linear true",
        &[("job.yaml", AXOLOTL)],
    );
    assert_eq!(setting(&job, "lora.r").as_deref(), Some("16"));
    assert_eq!(of_file(&job, "lora_r").1, "replaced by lora_r = 16");
    let (status, why) = row(&job, "sample_packing");
    assert_eq!(status, Status::NoCounterpart(Lack::Nothing), "{why}");
}
