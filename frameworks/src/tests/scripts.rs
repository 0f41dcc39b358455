//! Shell scripts: which command starts a job, and with which arguments.

use super::{eight, has, row, setting, try_text};
use crate::{Job, Lack, Options, Status};

fn read(script: &str) -> Job {
    try_text("train.sh", script, &eight()).unwrap_or_else(|e| panic!("{e}\n{script}"))
}

/// A script in the style of Stanford Alpaca and FastChat.
#[test]
fn scripts_with_arguments_of_the_trainer_are_read() {
    let script = "#!/bin/bash\n\
        torchrun --nproc_per_node=8 --master_port=20001 train.py \\\n\
        --model_name_or_path meta-llama/Llama-2-7b-hf --data_path data.json --bf16 True \\\n\
        --per_device_train_batch_size 2 --gradient_accumulation_steps 16 --weight_decay 0. \\\n\
        --fsdp \"full_shard auto_wrap\" --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' \\\n\
        --gradient_checkpointing True --gradient_checkpointing_kwargs '{\"use_reentrant\": true}' \\\n\
        --model-max-length 2048 --my_own_argument 3 --dataset_names x\n";
    let job = read(script);
    assert_eq!(job.framework, "the Hugging Face Trainer");
    has(
        &job,
        &[
            ("model.preset", "\"llama2-7b\""),
            ("train.micro_batch", "2"),
            ("train.grad_accum", "16"),
            ("train.seq_len", "2048"),
            ("train.recompute", "\"full\""),
            ("train.use_reentrant", "true"),
            ("fsdp.policy", "\"fsdp2\""),
            ("precision.param_dtype", "\"bf16\""),
            ("mesh.dp_shard", "8"),
        ],
    );
    // Scripts define their own arguments, so none of these is misspelled.
    for own in ["my_own_argument", "dataset_names"] {
        assert_eq!(row(&job, own).0, Status::NoCounterpart(Lack::Accuracy));
    }
}

#[test]
fn launchers_of_scripts_are_read() {
    let trainer = "train.py --model_name_or_path Qwen/Qwen3-0.6B --per_device_train_batch_size 1";
    let job = read(&format!(
        "accelerate launch --num_machines 1 --num_processes 8 --mixed_precision bf16 --use_deepspeed \
         --zero_stage 3 --offload_optimizer_device none {trainer} --use_peft --lora_r 16\n"
    ));
    has(
        &job,
        &[
            ("fsdp.strategy", "\"optim_grads_params\""),
            ("fsdp.policy", "\"native\""),
            ("lora.r", "16"),
            ("precision.param_dtype", "\"bf16\""),
        ],
    );
    let job = read(&format!(
        "deepspeed --include localhost:0,1,2,3,4,5,6,7 {trainer} --bf16 --max_seq_length 1024\n"
    ));
    has(&job, &[("train.seq_len", "1024"), ("mesh.dp_shard", "8")]);
}

/// `accelerate launch` has options for the sizes of its `parallelism_config`
/// (`accelerate/commands/launch.py`), and passes FSDP's options on as variables that a script can
/// set itself (`accelerate/utils/launch.py`).
#[test]
fn parallel_sizes_and_variables_of_accelerate_are_read() {
    let trainer =
        "train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --bf16 True";
    let launch = "accelerate launch --use_fsdp true --fsdp_version 2 --num_processes 8 --use_parallelism_config true";
    let job = read(&format!(
        "{launch} --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4 {trainer}\n"
    ));
    has(&job, &[("mesh.dp_shard", "4"), ("mesh.dp_replicate", "2")]);
    for size in ["tp_size", "cp_size", "sp_size"] {
        let job = read(&format!(
            "{launch} --parallelism_config_{size} 4 --parallelism_config_dp_shard_size 2 {trainer}\n"
        ));
        let decisive: Vec<&str> = job.decisive().map(|r| r.key.as_str()).collect();
        assert_eq!(decisive, [format!("parallelism_config_{size}")]);
    }
    let job = read(&format!(
        "export FSDP_RESHARD_AFTER_FORWARD=false\nACCELERATE_USE_FSDP=true FSDP_VERSION=2 torchrun --nproc_per_node 8 {trainer}\n"
    ));
    has(
        &job,
        &[
            ("fsdp.policy", "\"fsdp2\""),
            ("fsdp.reshard_after_forward", "false"),
        ],
    );
}

/// Only the code of a script decides whether it trains adapters, which options of adapters suggest.
/// A file that a variable names is required.
#[test]
fn what_decides_a_job_and_is_not_said_is_named() {
    let script = "python mason.py --num_nodes 1 -- torchrun --nproc_per_node 8 train_lora.py \
                  --model_name_or_path Qwen/Qwen3-0.6B --per_device_train_batch_size 1 --lora_r 8";
    let job = read(&format!("{script}\n"));
    let (status, why) = row(&job, "lora_r");
    assert_eq!(status, Status::Assumed);
    assert!(why.contains("no argument turns adapters on"), "{why}");
    assert!(job.rows().iter().all(|r| !r.key.is_empty()));
    let job = read(&format!("{script} --deepspeed $CONFIG\n"));
    let decisive: Vec<&str> = job.decisive().map(|r| r.key.as_str()).collect();
    assert_eq!(decisive, ["deepspeed"]);
}

/// LMFlow's `run_finetune_with_qlora.sh` and `run_finetune_with_lisa.sh`. Its Trainer clips
/// gradients at 1.
#[test]
fn scripts_of_lmflow_are_not_of_open_instruct() {
    let script = "deepspeed --num_gpus 8 examples/finetune.py --model_name_or_path Qwen/Qwen3-0.6B --bf16 True \
                  --per_device_train_batch_size 1";
    let job = read(&format!("{script} --use_qlora 1 --lora_r 8\n"));
    has(&job, &[("train.clip_norm", "1.0")]);
    let job = read(&format!("{script} --use_lisa 1\n"));
    let decisive: Vec<&str> = job.decisive().map(|r| r.key.as_str()).collect();
    assert_eq!(decisive, ["use_lisa"]);
}

/// `qlora.py` and LLaVA's `train.py`: `bits` is 4, 8 or 16.
#[test]
fn bits_of_frozen_models_are_read() {
    let script = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-0.6B --bf16 True \
                  --per_device_train_batch_size 1 --lora_enable True";
    let quantized = |bits: &str| {
        let job = read(&format!("{script} --bits {bits}\n"));
        setting(&job, "precision.frozen_params")
    };
    assert_eq!(quantized("4").as_deref(), Some("\"nf4\""));
    assert_eq!(quantized("8").as_deref(), Some("\"int8\""));
    assert_ne!(quantized("16"), quantized("8"));
    assert_ne!(quantized("16"), quantized("4"));
}

/// `TrainingArguments` of transformers raises an error.
#[test]
fn two_types_of_mixed_precision_are_refused() {
    let script = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-0.6B --bf16 True \
                  --per_device_train_batch_size 1 --fp16";
    let error = |value: &str| try_text("train.sh", &format!("{script} {value}\n"), &eight()).err();
    assert_eq!(error("False"), None);
    let error = error("True").unwrap();
    assert!(
        error.starts_with("train.sh:1:") && error.contains("bf16 is on, too"),
        "{error}"
    );
}

/// Scripts have arguments of their own, so a misspelled one is only a warning.
#[test]
fn misspelled_arguments_are_warned_about() {
    let job = read(
        "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-0.6B \
         --per_device_train_batchsize 2 --gradient_checkpointng True --max_length 512 --own_one 3\n",
    );
    let warned = job.rows().iter().filter_map(|r| r.doubt.as_ref());
    let warned: Vec<bool> = warned
        .map(|d| {
            d.message.contains("`per_device_train_batch_size`")
                || d.message.contains("`gradient_checkpointing`")
        })
        .collect();
    assert_eq!(warned, [true, true]);
}

/// Bash resolves these to the folder of the script, in which the file is.
#[test]
fn files_in_the_folder_of_a_script_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let json = r#"{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}"#;
    std::fs::write(folder.path().join("ds.json"), json).unwrap();
    let script = folder.path().join("train.sh");
    for (before, start) in [
        ("", "$PWD"),
        ("", "$(pwd)"),
        ("", "$(dirname \"$0\")"),
        ("D=$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd)", "$D"),
    ] {
        let text = format!(
            "{before}\ntorchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-0.6B \
             --per_device_train_batch_size 1 --deepspeed {start}/ds.json\n"
        );
        std::fs::write(&script, text).unwrap();
        let job = crate::read(std::slice::from_ref(&script), &eight())
            .unwrap_or_else(|e| panic!("{start}: {e}"));
        has(&job, &[("fsdp.strategy", "\"optim_grads_params\"")]);
        assert_eq!(job.decisive().count(), 0, "{start}");
    }
}

/// Commands inside text: `eval`, `bash -c`, and a job submitted as a here-document.
#[test]
fn commands_within_other_commands_are_read() {
    let arguments = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 \
                     --seq-length 64 --micro-batch-size 1 --bf16";
    for script in [
        format!("CMD=\"torchrun --nproc_per_node 8 pretrain_gpt.py {arguments}\"\neval $CMD\n"),
        format!("CMD=\"torchrun --nproc_per_node 8 pretrain_gpt.py {arguments}\"\neval \"$CMD\"\n"),
        format!(
            "RUN=\"cd /x; python pretrain_gpt.py {arguments}\"\nsbatch <<EOF\n#SBATCH -N 1\nsrun -l \\\n  \
             bash -x -c \"${{RUN}}\" 2>&1 | tee log.txt\nEOF\n"
        ),
        // A here-document with data is not a command.
        format!(
            "torchrun --nproc_per_node 8 pretrain_gpt.py {arguments} &> log\n\
             cat > config.json <<END\npython other.py --num-layers 9\nEND\n"
        ),
    ] {
        let job = read(&script);
        has(&job, &[("model.layers", "2"), ("train.seq_len", "64")]);
    }
}

#[test]
fn redirections_are_no_values() {
    for end in ["2>&1 | tee log", "> log 2>&1", "&> log &", "2> err"] {
        let job = read(&format!(
            "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 \
             --num-attention-heads 4 --vocab-size 256 --seq-length 64 --bf16 --micro-batch-size 4 {end}\n"
        ));
        has(&job, &[("train.micro_batch", "4")]);
    }
}

/// Values from the script's own arguments stay unknown. They contain no blanks, which would split
/// them into several values. Lists of further options are reported by name.
#[test]
fn what_a_script_does_not_set_is_named() {
    let script = "WARMUP=$(( ${TOKENS} / $1 / ${SEQ} ))\n\
        options=\"--lr-warmup-iters ${WARMUP} --num-query-groups 2\"\n\
        torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
        --vocab-size 256 --seq-length 64 --bf16 --micro-batch-size 4 $pr_options $options\n";
    let job = read(script);
    has(&job, &[("train.micro_batch", "4")]);
    for key in ["--lr-warmup-iters", "$pr_options"] {
        let (status, why) = row(&job, key);
        assert_eq!(status, Status::NoCounterpart(Lack::Accuracy), "{key}");
        assert_eq!(why, "a variable that the file does not set");
    }
    let none = try_text("train.sh", "srun ./train --model x\n", &eight()).unwrap_err();
    assert!(none.contains("starts Python"), "{none}");
}

/// Commands whose arguments are of no known framework are refused, instead of being read as
/// Megatron-LM's.
#[test]
fn commands_of_other_programs_are_refused() {
    for (script, wanted) in [
        (
            "python eval.py --save-dir x --eval-batch-size 20\n",
            "no arguments of a framework",
        ),
        (
            "deepspeed --module openrlhf.cli.train_sft --max_len 2048 --micro_train_batch_size 2\n",
            "OpenRLHF",
        ),
        (
            "python3 -m verl.trainer.main_ppo --config-path=config actor_rollout_ref.actor.strategy=megatron\n",
            "verl",
        ),
    ] {
        let error = try_text("train.sh", script, &eight()).unwrap_err();
        assert!(
            error.starts_with("train.sh:1:") && error.contains(wanted),
            "{error}"
        );
        assert!(
            error.contains("expected") || error.contains("--set"),
            "{error}"
        );
    }
}

/// Configurations of other frameworks that share keys with known ones are refused by name.
#[test]
fn configurations_of_other_frameworks_are_refused() {
    for (text, wanted) in [
        (
            "tokens: {micro_batch_size: 3}\nparallelism: {dp: 4, pp: 1, tp: 2}\n",
            "nanotron",
        ),
        (
            "model: Qwen/Qwen3-4B\ncutoff_len: 2048\ndist_config: {name: fsdp2}\n",
            "LLaMA-Factory 1",
        ),
    ] {
        let error = try_text("job.yaml", text, &eight()).unwrap_err();
        assert!(
            error.starts_with("job.yaml:1:1: ")
                && error.contains(wanted)
                && error.contains("--set"),
            "{error}"
        );
    }
}

/// Options of one dash and scripts end the values of an option; paths with a value, as in Hydra,
/// are no values either.
#[test]
fn modules_and_overrides_end_the_values_of_options() {
    let script = "torchrun --nnodes 1 --nproc_per_node 8 -m pretrain_gpt --num-layers 2 --hidden-size 64 \
                  --num-attention-heads 4 --vocab-size 256 --seq-length 64 --bf16 --micro-batch-size 4 train.x=1\n";
    let job = read(script);
    has(&job, &[("mesh.dp_shard", "8"), ("train.micro_batch", "4")]);
}

/// Scripts of open-instruct and slime that train on rewards are refused; slime's SFT is not.
#[test]
fn scripts_that_train_on_rewards_are_refused() {
    let options = "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1";
    for script in ["open_instruct/grpo_fast.py", "run_dpo.py", "train-kto.py"] {
        let error = try_text(
            "train.sh",
            &format!("python {script} {options}\n"),
            &eight(),
        );
        let error = error.unwrap_err();
        assert!(
            error.starts_with("train.sh:1:") && error.contains("preferences"),
            "{error}"
        );
    }
    read(&format!(
        "torchrun --nproc_per_node 8 support.py {options}\n"
    ));
    let grpo = "python open_instruct/fast.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 \
                --num_samples_per_prompt_rollout 16 --max_seq_length 2048\n";
    let decisive: Vec<String> = read(grpo).decisive().map(|r| r.key.clone()).collect();
    assert_eq!(decisive, ["num_samples_per_prompt_rollout"]);
    let slime = |more: &str| {
        read(&format!(
            "python3 train.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 64 \
             --bf16 --micro-batch-size 1 {more}\n"
        ))
    };
    assert_eq!(slime("--advantage-estimator grpo").decisive().count(), 1);
    assert_eq!(slime("--loss-type sft_loss").decisive().count(), 0);
}

/// Files that launchers name, and arguments of LLaMA-Factory and DeepSpeed-Chat.
#[test]
fn commands_with_arguments_of_other_trainers_are_read() {
    let factory = "FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --do_train true --model_name_or_path Qwen/Qwen3-8B \
                   --finetuning_type lora --lora_target all --cutoff_len 1024 --per_device_train_batch_size 2 --bf16 true\n";
    let job = read(factory);
    assert_eq!(job.framework, "LLaMA-Factory");
    has(
        &job,
        &[
            ("train.seq_len", "1024"),
            ("train.micro_batch", "2"),
            ("train.recompute", "\"full\""),
            ("lora.target_modules", "\"all-linear\""),
        ],
    );
    let chat = "deepspeed main.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 --max_seq_len 512 \
                --lora_dim 64 --zero_stage 3 --deepspeed --gradient_checkpointing\n";
    has(
        &read(chat),
        &[
            ("train.seq_len", "512"),
            ("lora.r", "64"),
            ("fsdp.strategy", "\"optim_grads_params\""),
        ],
    );
    let missing = "axolotl train missing.yaml\n";
    let error = try_text("train.sh", missing, &eight()).unwrap_err();
    assert!(
        error.starts_with("train.sh:1:15: config: file `missing.yaml` is not found"),
        "{error}"
    );
}

/// The configuration file of a command is read as the framework that its content shows.
#[test]
fn files_that_commands_name_are_read() {
    let folder = std::env::temp_dir().join(format!("shardlab-launch-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let script = folder.join("train.sh");
    let job = folder.join("sft.yaml");
    let text = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 3\nbf16: true\n";
    std::fs::write(&job, text).unwrap();
    for command in [
        "axolotl train sft.yaml\n",
        "accelerate launch --num_processes 8 -m axolotl.cli.train sft.yaml\n",
        "torchrun --nproc_per_node 8 train.py --config sft.yaml\n",
        "python train.py -c sft.yaml\n",
    ] {
        std::fs::write(&script, command).unwrap();
        let mut job = crate::read(std::slice::from_ref(&script), &eight())
            .unwrap_or_else(|e| panic!("{e}: {command}"));
        job.scenario(&[])
            .unwrap_or_else(|e| panic!("{e}: {command}"));
        has(
            &job,
            &[("train.micro_batch", "3"), ("model.preset", "\"qwen3-8b\"")],
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// `trl sft` recomputes blocks, computes in bfloat16 and truncates at 1024 tokens, unless its
/// arguments say otherwise (`SFTConfig`).
#[test]
fn the_command_of_trl_is_read() {
    let script = |more: &str| {
        format!(
            "trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name a/b {more} --output_dir x\n"
        )
    };
    let job = read(&script("--accelerate_config zero3"));
    assert_eq!(job.framework, "TRL");
    has(
        &job,
        &[
            ("train.seq_len", "1024"),
            ("train.micro_batch", "8"),
            ("train.recompute", "\"full\""),
            ("precision.param_dtype", "\"bf16\""),
            ("fsdp.strategy", "\"optim_grads_params\""),
        ],
    );
    let job = read(&script(
        "--accelerate_config fsdp2 --max_length 4096 --gradient_checkpointing false",
    ));
    has(
        &job,
        &[("train.seq_len", "4096"), ("fsdp.policy", "\"fsdp2\"")],
    );
    assert_eq!(setting(&job, "train.recompute"), None);
    let grpo = script("").replace("trl sft", "trl grpo");
    let error = try_text("train.sh", &grpo, &eight()).unwrap_err();
    assert!(
        error.starts_with("train.sh:1:") && error.contains("preferences or rewards"),
        "{error}"
    );
    // A file has the same defaults if it has keys of TRL alone.
    let text = "model_name_or_path: Qwen/Qwen3-8B\npacking: true\nbf16: true\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    has(
        &job,
        &[("train.seq_len", "1024"), ("train.recompute", "\"full\"")],
    );
}

/// Options of PyTorch's allocator in the environment, assigned before the command or exported.
#[test]
fn options_of_the_allocator_are_read() {
    let key = "fsdp.expandable_segments";
    let trainer =
        "python train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1";
    let megatron = "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 \
                    --seq-length 64 --micro-batch-size 1";
    for command in [trainer, megatron] {
        for (before, value) in [
            ("", "false"),
            ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ", "true"),
            (
                "export PYTORCH_ALLOC_CONF='expandable_segments:True,max_split_size_mb:512'\n",
                "true",
            ),
            (
                "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512\n",
                "false",
            ),
        ] {
            has(&read(&format!("{before}{command}\n")), &[(key, value)]);
        }
    }
}

/// Options of a command replace those of the files that it names; files contradict one another.
#[test]
fn options_of_commands_replace_those_of_files() {
    let folder = std::env::temp_dir().join(format!("shardlab-override-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    write(
        "zero3.yaml",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\nnum_processes: 8\n",
    );
    write(
        "sft.yaml",
        "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nmax_length: 2048\n",
    );
    let script = write(
        "train.sh",
        "accelerate launch --config_file zero3.yaml --num_processes 4 sft.py --config sft.yaml \
         --gradient_accumulation_steps 3\n",
    );
    let options = crate::Options {
        gpus: Some("h100".parse().unwrap()),
        ..Default::default()
    };
    let mut job = crate::read(&[script], &options).unwrap();
    job.scenario(&[]).unwrap();
    has(
        &job,
        &[
            ("mesh.dp_shard", "4"),
            ("train.grad_accum", "3"),
            ("train.micro_batch", "2"),
            ("train.seq_len", "2048"),
            ("fsdp.strategy", "\"optim_grads_params\""),
        ],
    );
    let replaced: Vec<_> = job.rows().iter().filter_map(|r| r.why.as_deref()).collect();
    assert!(
        replaced.contains(&"replaced by num_processes = 4"),
        "{replaced:?}"
    );
    write(
        "zero3.yaml",
        "distributed_type: DEEPSPEED\ngradient_accumulation_steps: 1\nnum_processes: 8\n",
    );
    let files = [folder.join("zero3.yaml"), folder.join("sft.yaml")];
    let error = crate::read(&files, &options).unwrap_err().to_string();
    assert!(error.contains("contradicts"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Files that a script sources give its variables, relative to the script or a folder above it.
/// Missing files are named.
#[test]
fn sourced_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let scripts = folder.path().join("examples/sft");
    std::fs::create_dir_all(&scripts).unwrap();
    std::fs::write(
        folder.path().join("common.sh"),
        "source examples/sft/sizes.sh\nexport NPROC=8\nif [ -z \"$NPROC\" ]; then\n",
    )
    .unwrap();
    std::fs::write(
        scripts.join("sizes.sh"),
        "ARGS=(--per_device_train_batch_size 2 --model-max-length $LENGTH)\n",
    )
    .unwrap();
    let script = scripts.join("run.sh");
    let command = "#!/bin/bash\nLENGTH=2048\nsource \"$(dirname \"$0\")/../../common.sh\"\n. ~/.bashrc\n\
                   source venv/bin/activate\nsource ./secrets.sh\n\
                   torchrun --nproc_per_node=$NPROC train.py --model_name_or_path Qwen/Qwen3-8B ${ARGS[@]}\n";
    std::fs::write(&script, command).unwrap();
    let options = crate::Options {
        gpus: Some("h100".parse().unwrap()),
        ..Default::default()
    };
    let mut job = crate::read(std::slice::from_ref(&script), &options).unwrap();
    job.scenario(&[]).unwrap();
    has(
        &job,
        &[
            ("mesh.dp_shard", "8"),
            ("train.micro_batch", "2"),
            ("train.seq_len", "2048"),
        ],
    );
    let sourced: Vec<(u32, String, Lack)> = job
        .rows()
        .iter()
        .filter(|r| r.key == "source")
        .map(|r| {
            let line = r.place.as_ref().map_or(0, |p| p.at.line);
            (line, r.value.clone(), r.status.lack())
        })
        .collect();
    let of = |line, value: &str, lack| (line, value.to_owned(), lack);
    assert_eq!(
        sourced,
        [
            of(3, "$(…)/../../common.sh", Lack::Nothing),
            of(3, "examples/sft/sizes.sh", Lack::Nothing),
            of(4, "~/.bashrc", Lack::Nothing),
            of(5, "venv/bin/activate", Lack::Nothing),
            of(6, "./secrets.sh", Lack::Accuracy),
        ]
    );
    let (_, why) = row(&job, "source");
    assert_eq!(why, "read as well");
    // The values of a sourced file have the place of the line that sources it.
    let batch = job
        .rows()
        .iter()
        .find(|r| r.key == "per_device_train_batch_size");
    assert_eq!(batch.unwrap().place.as_ref().unwrap().at.line, 3);
}

/// PEFT's example has its own flags for adapters and quantization; many scripts copy it.
#[test]
fn flags_of_the_example_of_peft_are_read() {
    let job = read(
        "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 \
         --use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_target_modules all-linear \
         --use_4bit_quantization True --use_nested_quant True --bf16 True --splits train,test\n",
    );
    has(
        &job,
        &[
            ("lora.r", "8"),
            ("lora.target_modules", "\"all-linear\""),
            ("precision.frozen_params", "\"nf4\""),
        ],
    );
}

/// Accelerate before `dynamo_config`, and a file whose name contains an argument of the script.
#[test]
fn old_files_of_accelerate_and_names_with_arguments_are_read() {
    let text =
        |backend: &str| format!("distributed_type: MULTI_GPU\ndynamo_backend: '{backend}'\n");
    let options = || Options {
        model: Some("../tests/data/frameworks/trainer/mistralai/Mistral-7B-v0.1".into()),
        ..eight()
    };
    let mode = |backend: &str| {
        let job = try_text("job.yaml", &text(backend), &options()).unwrap();
        setting(&job, "compile.mode")
    };
    assert_eq!(mode("NO"), None);
    assert_eq!(mode("INDUCTOR").as_deref(), Some("\"regions\""));
    let script = "accelerate launch --config_file recipes/$2.yaml sft.py --model_name_or_path Qwen/Qwen3-8B\n";
    let job = try_text("train.sh", script, &eight()).unwrap();
    let refused: Vec<String> = job.decisive().map(|r| r.key.clone()).collect();
    assert_eq!(refused, ["config_file"]);
}

/// Commands that override keys of the files that they name: `name=value` of LLaMA-Factory and
/// torchtune, options of Axolotl, and options with a path of NeMo Automodel and torchtitan.
#[test]
fn commands_override_keys_of_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str, text: &str, command: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        let script = folder.path().join("run.sh");
        try_text(script.to_str().unwrap(), command, &eight()).unwrap_or_else(|e| panic!("{e}"))
    };
    let factory = "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: full\ncutoff_len: 2048\n\
                   per_device_train_batch_size: 1\ndeepspeed: missing.json\n";
    let job = read(
        "factory.yaml",
        factory,
        "FORCE_TORCHRUN=1 llamafactory-cli train factory.yaml model_name_or_path=Qwen/Qwen3-8B \\\n \
         per_device_train_batch_size=4 cutoff_len=1024 deepspeed=null\n",
    );
    has(
        &job,
        &[
            ("model.preset", "\"qwen3-8b\""),
            ("train.micro_batch", "4"),
            ("train.seq_len", "1024"),
        ],
    );
    assert_eq!(row(&job, "cutoff_len").0, Status::Used);
    let tune = std::fs::read_to_string("../tests/data/frameworks/torchtune/llama31-8b-full.yaml");
    let job = read(
        "tune.yaml",
        &tune.unwrap(),
        "tune run --nproc_per_node 8 full_finetune_distributed --config tune.yaml batch_size=7 tokenizer.max_seq_len=512\n",
    );
    has(
        &job,
        &[
            ("mesh.dp_shard", "8"),
            ("train.micro_batch", "7"),
            ("train.seq_len", "512"),
        ],
    );
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\n";
    for program in ["axolotl train", "accelerate launch -m axolotl.cli.train"] {
        let command = format!("{program} sft.yaml --micro-batch-size 3 --sequence-len=1024\n");
        let job = read("sft.yaml", axolotl, &command);
        has(
            &job,
            &[("train.micro_batch", "3"), ("train.seq_len", "1024")],
        );
    }
    let nemo = "step_scheduler: {local_batch_size: 1, global_batch_size: 64}\ndataset: {seq_len: 2048}\n\
                model: {pretrained_model_name_or_path: Qwen/Qwen3-4B}\ndistributed: {strategy: fsdp2}\n";
    let job = read(
        "nemo.yaml",
        nemo,
        "automodel finetune llm -c nemo.yaml --nproc-per-node 8 --step_scheduler.local_batch_size 2 \
         --model.pretrained_model_name_or_path Qwen/Qwen3-8B\n",
    );
    has(
        &job,
        &[
            ("model.preset", "\"qwen3-8b\""),
            ("train.micro_batch", "2"),
            ("train.grad_accum", "4"),
        ],
    );
    let titan = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n";
    let job = read(
        "titan.toml",
        titan,
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml --training.local_batch_size 2\n",
    );
    assert_eq!(job.framework, "torchtitan");
    has(
        &job,
        &[
            ("model.preset", "\"llama3-8b\""),
            ("mesh.dp_shard", "8"),
            ("train.micro_batch", "2"),
            ("train.seq_len", "8192"),
        ],
    );
}

/// `8xh100` is one node of eight GPUs, whatever the script starts on each of its nodes.
#[test]
fn gpus_of_the_command_line_replace_processes_per_node() {
    let read = |gpus: &str| {
        let script = "torchrun --nproc_per_node=2 train.py --model_name_or_path Qwen/Qwen3-8B \
                      --per_device_train_batch_size 1 --max_seq_length 512\n";
        let options = Options {
            gpus: Some(gpus.parse().unwrap()),
            ..Options::default()
        };
        let mut job = try_text("train.sh", script, &options).unwrap();
        let scenario = job.scenario(&[]).unwrap();
        let (_, why) = row(&job, "nproc_per_node");
        (scenario.mesh.world(), scenario.mesh.gpus_per_node, why)
    };
    let (world, each, why) = read("8xh100");
    assert_eq!((world, each), (8, 8));
    assert_eq!(why, "replaced by --gpus: 8 instead of 2");
    assert_eq!(read("1x8xh100"), (8, 8, why));
    let (world, each, _) = read("16xh100");
    assert_eq!((world, each), (16, 8));
    // Without a number of GPUs, the script decides.
    let (world, each, _) = read("h100");
    assert_eq!((world, each), (2, 2));
}

const ARGUMENTS: &str =
    "train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1";

/// open-instruct's `finetune.py` sets `bnb_4bit_compute_dtype=torch.bfloat16`, and `clip_grad_norm`
/// is -1 by default (`scripts/finetune_qlora_with_accelerate.sh`).
#[test]
fn qlora_of_open_instruct_computes_in_bfloat16_without_clipping() {
    let job = read(&format!(
        "accelerate launch --num_processes 8 {ARGUMENTS} --use_qlora --use_lora --lora_rank 64 \
         --use_slow_tokenizer --max_seq_length 4096\n"
    ));
    has(
        &job,
        &[
            ("precision.param_dtype", "\"bf16\""),
            ("precision.frozen_params", "\"nf4\""),
            ("train.clip_norm", "0.0"),
        ],
    );
}

/// `finetune_llama3.py` of taishan1994/Llama3.1-Finetuning quantizes if `q_lora` is given; with
/// `load_in_4bit`, without `bnb_4bit_use_double_quant`.
#[test]
fn two_keys_for_four_bits_agree() {
    let of = |more: &str| {
        let job = read(&format!(
            "torchrun --nproc_per_node 8 {ARGUMENTS} --bf16 True --use_lora --lora_r 8 {more}\n"
        ));
        setting(&job, "precision.frozen_params")
    };
    let name = |name: &str| Some(format!("\"{name}\""));
    assert_eq!(of("--load_in_4bit --q_lora"), name("nf4_f32"));
    assert_eq!(of("--q_lora"), name("nf4"));
    assert_eq!(of("--load_in_4bit"), name("nf4_f32"));
}

/// `meteora_train.py` of NJUDeepEngine/meteora passes it on as `gradient_checkpointing`.
#[test]
fn checkpointing_of_scripts_is_read() {
    let job = read(&format!(
        "torchrun --nproc_per_node 8 {ARGUMENTS} --use_gradient_checkpointing True\n"
    ));
    has(&job, &[("train.recompute", "\"full\"")]);
}

/// PEFT 0.21 adapts the output layer and the embedding if they are named.
#[test]
fn adapters_outside_of_blocks_have_a_true_reason() {
    let job = read(&format!(
        "torchrun --nproc_per_node 8 {ARGUMENTS} --bf16 True --use_peft --lora_r 8 \
         --lora_target_modules q_proj lm_head\n"
    ));
    let (_, why) = row(&job, "lora_target_modules");
    assert!(why.contains("PEFT adapts this layer, too"), "{why}");
    let mut doubts = job.rows().iter().filter_map(|r| r.doubt.as_ref());
    assert!(doubts.any(|d| d.message.contains("lm_head")));
}

/// The defaults are those of the dataclasses in qlora.py and in Qwen's finetune.py.
#[test]
fn scripts_with_their_own_defaults_of_adapters_have_these() {
    let qlora = "python qlora.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 \\\n\
        --source_max_len 16 --target_max_len 512\n";
    has(
        &read(qlora),
        &[
            ("train.seq_len", "528"),
            ("train.micro_batch", "1"),
            ("train.grad_accum", "16"),
            ("train.recompute", "\"full\""),
            ("lora.r", "64"),
            ("lora.target_modules", "\"all-linear\""),
            ("precision.frozen_params", "\"nf4\""),
        ],
    );
    let whole = read(&qlora.replace("512\n", "512 --full_finetune True --bits 16\n"));
    assert_eq!(setting(&whole, "lora.r"), None);
    let qwen = "torchrun --nproc_per_node 8 finetune.py --model_name_or_path Qwen/Qwen2.5-7B \\\n\
        --per_device_train_batch_size 2 --model_max_length 1024 --lazy_preprocess True --use_lora\n";
    let wanted = [("lora.r", "64"), ("lora.lora_alpha", "16.0")];
    has(&read(qwen), &wanted);
}

#[test]
fn the_trainer_accepts_one_engine() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    write("z3.json", "{\"zero_optimization\": {\"stage\": 3}}");
    let script = "torchrun train.py --model_name_or_path Qwen/Qwen3-8B --max_length 2048 \\\n\
        --per_device_train_batch_size 1 --deepspeed z3.json";
    let one = write("one.sh", script);
    let both = write("both.sh", &format!("{script} --fsdp full_shard\n"));
    assert!(crate::read(&[one], &eight()).is_ok());
    let error = crate::read(&[both], &eight()).unwrap_err().to_string();
    assert!(error.contains("both --fsdp and --deepspeed"), "{error}");
}

/// `set_auto_wrap_policy` of Accelerate raises an error for a class that no module has.
#[test]
fn a_class_of_blocks_of_another_model_is_refused() {
    let refused = |config: &str| -> Vec<String> {
        let text = format!(
            "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\nmax_length: 512\n{config}\n"
        );
        let job = try_text("train.yaml", &text, &eight()).unwrap_or_else(|e| panic!("{e}"));
        let why = |r: &crate::Row| format!("{}: {}", r.key, r.why.as_deref().unwrap());
        job.decisive().map(why).collect()
    };
    let of = |class: &str| {
        format!(
            "fsdp: full_shard auto_wrap\nfsdp_config: {{transformer_layer_cls_to_wrap: {class}}}"
        )
    };
    let found = refused(&of("LlamaDecoderLayer"));
    assert_eq!(found.len(), 1, "{found:?}");
    for part in ["no LlamaDecoderLayer", "`qwen3`", "Qwen3DecoderLayer"] {
        assert!(found[0].contains(part), "{}", found[0]);
    }
    assert_eq!(refused(&of("[Qwen3DecoderLayer, GPT2Block]")).len(), 1);
    // Any module of the model can be a unit.
    for right in ["Qwen3DecoderLayer", "[Qwen3DecoderLayer]", "Qwen3MLP"] {
        assert_eq!(refused(&of(right)), [""; 0], "{right}");
    }
    let by_size = "fsdp: full_shard\nfsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP, transformer_layer_cls_to_wrap: LlamaDecoderLayer}";
    assert_eq!(refused(by_size), [""; 0]);
    let ddp = "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer";
    assert_eq!(refused(ddp), [""; 0]);
    let script = read(
        "accelerate launch --num_processes 8 --use_fsdp --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer train.py \
         --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --max_length 512\n",
    );
    assert_eq!(script.decisive().count(), 1);
}

/// A model, or a file of DeepSpeed or Accelerate, says nothing about the batch or the data.
#[test]
fn the_batch_and_the_length_of_files_without_them_are_shown_as_assumed() {
    let options = Options {
        model: Some("../tests/data/frameworks/trainer/mistralai/Mistral-7B-v0.1".into()),
        ..eight()
    };
    let zero = "{\"zero_optimization\": {\"stage\": 3}}";
    let jobs = [
        crate::read(&[], &options).unwrap(),
        try_text(
            "job.yaml",
            "distributed_type: FSDP\nmixed_precision: bf16\n",
            &options,
        )
        .unwrap(),
        try_text("zero.json", zero, &options).unwrap(),
    ];
    for job in jobs {
        let assumed = |key: &str| {
            let mut rows = job.rows().iter();
            rows.any(|r| r.key == key && r.status == Status::Assumed && r.place.is_none())
        };
        assert!(assumed("train.micro_batch"), "{}", job.framework);
        assert!(assumed("train.seq_len"), "{}", job.framework);
        has(&job, &[("train.micro_batch", "1")]);
    }
    let given = "{\"train_micro_batch_size_per_gpu\": 4}";
    let job = try_text("zero.json", given, &options).unwrap();
    has(&job, &[("train.micro_batch", "4")]);
}
