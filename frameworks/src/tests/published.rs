//! Scripts and recipes of public repositories that need more than a table of keys. Each test names
//! the file that its lines are from.

use super::{eight, has, row, setting, try_script, try_text};
use crate::{Job, Lack, Options, Status};
use std::path::Path;

const SIZES: &str = "../tests/data/configs";

fn read(script: &str) -> Job {
    try_text("train.sh", script, &eight()).unwrap_or_else(|e| panic!("{e}\n{script}"))
}

/// Reads a script with the shapes of a model of `tests/data/configs`.
fn read_with_model(script: &str, model: &str) -> Job {
    let options = Options {
        model: Some(Path::new(SIZES).join(model)),
        ..eight()
    };
    try_script(script, &options)
}

fn refused(name: &str, text: &str) -> String {
    let read = try_text(name, text, &eight());
    read.map(|_| ()).unwrap_err()
}

/// Returns the scenario keys of the doubts about a job.
fn doubts(job: &Job) -> Vec<&'static str> {
    job.doubts(&[]).map(|(_, doubt)| doubt.key).collect()
}

/// `train/sft.sh` of simplescaling/s1, and `train_64K.sh` of princeton-nlp/ProLong.
#[test]
fn lengths_of_scripts_are_known_by_their_common_names() {
    let script = "gpu_count=$(nvidia-smi -L | wc -l)\n\
        torchrun --nproc-per-node ${gpu_count} --master_port 12345 train/sft.py --block_size=32768 \\\n\
        --per_device_train_batch_size=1 --model_name=Qwen/Qwen3-8B --fsdp=\"full_shard auto_wrap\" --bf16=True\n";
    let job = read(script);
    has(
        &job,
        &[
            ("train.seq_len", "32768"),
            ("model.preset", "\"qwen3-8b\""),
            ("mesh.dp_shard", "8"),
        ],
    );
    assert!(doubts(&job).is_empty());
    let base = "torchrun --nproc_per_node 8 -m training.train_language_model --model_name Qwen/Qwen3-8B \
                --per_device_train_batch_size 1 --bf16";
    let job = read(&format!("{base} --per_device_max_tokens 32768\n"));
    has(&job, &[("train.seq_len", "32768")]);
    for name in ["max_len", "seq_len", "seq_length", "sequence_length"] {
        let job = read(&format!("{base} --{name} 4096\n"));
        has(&job, &[("train.seq_len", "4096")]);
    }
    // Another key that names the model wins.
    let job = read(&format!("{base} --model_name_or_path Qwen/Qwen3-0.6B\n"));
    has(&job, &[("model.preset", "\"qwen3-0.6b\"")]);
    assert_eq!(row(&job, "model_name").1, "another key names the model");
}

#[test]
fn an_unknown_length_is_reported_with_the_verdict() {
    let base = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B \
                --per_device_train_batch_size 1 --bf16";
    let job = read(&format!("{base} --pack_len 16384\n"));
    let found: Vec<_> = job.doubts(&[]).collect();
    let [(row, doubt)] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!((&*row.key, doubt.key), ("pack_len", "train.seq_len"));
    assert!(
        doubt.message.contains("pack_len = 16384")
            && doubt.message.contains("--set train.seq_len=N"),
        "{}",
        doubt.message
    );
    assert_eq!(job.doubts(&["train.seq_len=16384".into()]).count(), 0);
    // Other lengths, other values, and a job whose length is known.
    for more in [
        "--max_new_tokens 512",
        "--add_special_tokens True",
        "--group_by_length 1",
        "--pack_len 16384 --max_seq_length 2048",
    ] {
        assert!(
            doubts(&read(&format!("{base} {more}\n"))).is_empty(),
            "{more}"
        );
    }
}

/// `train_64K.sh` of princeton-nlp/ProLong computes the accumulation from a number of GPUs that
/// only the machine knows.
#[test]
fn unset_variables_that_decide_a_job_are_reported_with_the_verdict() {
    let base = "torchrun --nproc_per_node $N train.py --model_name_or_path Qwen/Qwen3-8B --max_seq_length 2048";
    let accumulated = format!(
        "n=$(nvidia-smi -L | wc -l)\naccu=$((64 / 1 / $n))\n{base} --gradient_accumulation_steps $accu \
         --per_device_train_batch_size 1 --bf16\n"
    );
    let job = read(&accumulated);
    let found: Vec<_> = job.doubts(&[]).collect();
    let [(row, doubt)] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(row.key, "gradient_accumulation_steps");
    assert_eq!(doubt.key, "train.grad_accum");
    assert!(
        doubt.message.contains("--set train.grad_accum="),
        "{}",
        doubt.message
    );
    assert_eq!(job.doubts(&["train.grad_accum=8".into()]).count(), 0);
    for (more, expected) in [
        (
            "--per_device_train_batch_size $B",
            vec!["train.micro_batch"],
        ),
        (
            "--per_device_train_batch_size 1 --bf16 $B",
            vec!["precision.param_dtype"],
        ),
        (
            "--per_device_train_batch_size 1 --fsdp $B",
            vec!["fsdp.strategy"],
        ),
        (
            "--per_device_train_batch_size 1 --zero_stage $B",
            vec!["fsdp.strategy"],
        ),
        (
            "--per_device_train_batch_size 1 --optim $B",
            vec!["train.optimizer"],
        ),
        // These change numbers, but neither time nor memory.
        ("--per_device_train_batch_size 1 --learning_rate $B", vec![]),
        ("--per_device_train_batch_size 1 --weight_decay $B", vec![]),
        ("--per_device_train_batch_size 1 --warmup_steps $B", vec![]),
        (
            "--per_device_train_batch_size 1 --lr_scheduler_type $B",
            vec![],
        ),
        ("--per_device_train_batch_size 1 --output_dir $B", vec![]),
    ] {
        let job = read(&format!("{base} {more}\n"));
        assert_eq!(doubts(&job), expected, "{more}");
    }
}

/// `examples/qwen2/muon-pretrain-fsdp2.yaml` of Axolotl.
#[test]
fn another_optimizer_is_reported_with_the_verdict() {
    let text = "base_model: Qwen/Qwen2.5-0.5B\nsequence_len: 2048\nmicro_batch_size: 4\noptimizer: OPTIMIZER\n\
                bf16: auto\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n";
    let options = Options {
        model: Some("../tests/data/frameworks/trainer/mistralai/Mistral-7B-v0.1".into()),
        ..eight()
    };
    let read = |name: &str| {
        let text = text.replace("OPTIMIZER", name);
        try_text("muon.yaml", &text, &options).unwrap()
    };
    assert_eq!(doubts(&read("muon")), ["train.optimizer"]);
    assert!(doubts(&read("adamw_torch_fused")).is_empty());
}

/// `train/fsdp_config_qwen.json` of simplescaling/s1, which no content identifies.
#[test]
fn a_key_gives_the_format_of_the_file_that_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fsdp.json");
    for (text, wanted) in [
        (
            r#"{"transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}"#,
            ("fsdp.units", "\"block\""),
        ),
        (
            r#"{"fsdp_version": 2, "activation_checkpointing": true}"#,
            ("train.recompute", "\"full\""),
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let job = read(&format!(
            "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --max_seq_length 2048 \
             --per_device_train_batch_size 1 --bf16 True --fsdp 'full_shard auto_wrap' --fsdp_config {}\n",
            file.display()
        ));
        has(&job, &[wanted]);
    }
}

/// `training_scripts/llama2/run_llama2_7b_lora.sh` in the folders `step1_supervised_finetuning` and
/// `step2_dpo_finetuning` of DeepSpeed-Chat (deepspeedai/DeepSpeedExamples).
#[test]
fn defaults_of_arguments_and_names_of_folders_are_read() {
    let script = "OUTPUT=$1\nZERO_STAGE=$2\nif [ \"$OUTPUT\" == \"\" ]; then\n    OUTPUT=./output\nfi\n\
        if [ \"$ZERO_STAGE\" == \"\" ]; then\n    ZERO_STAGE=3\nfi\nmkdir -p $OUTPUT\n\
        deepspeed main.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 \\\n\
        --max_seq_len 512 --gradient_checkpointing --zero_stage $ZERO_STAGE --deepspeed --output_dir $OUTPUT\n";
    let job = read(script);
    has(&job, &[("fsdp.strategy", "\"optim_grads_params\"")]);
    assert!(doubts(&job).is_empty());
    let tested = "if [ -z \"$ZERO_STAGE\" ]; then\n    ZERO_STAGE=3\nfi\n";
    let plain = "if [ \"$ZERO_STAGE\" == \"\" ]; then\n    ZERO_STAGE=3\nfi\n";
    for by in [tested, "ZERO_STAGE=${ZERO_STAGE:-3}\n"] {
        let job = read(&script.replace(plain, by));
        has(&job, &[("fsdp.strategy", "\"optim_grads_params\"")]);
    }
    // A stage that the script sets is kept.
    let job = read(&script.replace("ZERO_STAGE=$2", "ZERO_STAGE=2"));
    has(&job, &[("fsdp.strategy", "\"optim_grads\"")]);

    let in_folder = |folder: &str| {
        let name = format!("training/{folder}/training_scripts/llama2/run.sh");
        try_text(&name, script, &eight()).map(|_| ())
    };
    for folder in ["step2_dpo_finetuning", "step2_reward_model_finetuning"] {
        let error = in_folder(folder).unwrap_err();
        assert!(
            error.contains("preferences or rewards") && error.contains(folder),
            "{error}"
        );
    }
    assert_eq!(in_folder("step1_supervised_finetuning"), Ok(()));
    // The folder of the script that the command runs says it, too, unless its name says more.
    let moved = |to: &str| script.replace("main.py", to);
    assert!(refused("train.sh", &moved("dpo/main.py")).contains("preferences or rewards"));
    assert!(try_text("train.sh", &moved("rlhf/train_sft.py"), &eight()).is_ok());
}

/// `examples/scripts/train_sft.sh` and `train_ppo_ray_hybrid_engine.sh` of OpenRLHF, and
/// `scripts/run-qwen3-235B-A22B-sft.sh` of THUDM/slime.
#[test]
fn other_programs_are_refused_by_name_whatever_their_options_resemble() {
    let sft = "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n   --data.max_len 2048 \\\n   \
        --train.batch_size 256 \\\n   --train.micro_batch_size 2 \\\n   \
        --model.model_name_or_path meta-llama/Meta-Llama-3-8B \\\n   --ds.zero_stage 2\nEOF\n    # --wandb\n\n\
        if [[ ${1} != \"slurm\" ]]; then\n    deepspeed --module $training_commands\nfi\n";
    let error = refused("train.sh", sft);
    assert!(
        error.contains("OpenRLHF are not read") && error.contains("--set"),
        "{error}"
    );
    assert!(error.starts_with("train.sh:12:"), "{error}");
    let ppo = "python3 -m openrlhf.cli.train_ppo_ray --train.batch_size 128 --actor.model_name_or_path x\n";
    assert!(refused("train.sh", ppo).contains("OpenRLHF"));
    let slime = "python3 train_async.py --hf-checkpoint /x/Qwen3-235B-A22B --rollout-function-path \
        slime.rollout.sft_rollout.generate_rollout --rollout-batch-size 128 --global-batch-size 128 \
        --tensor-model-parallel-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 9216\n";
    assert!(refused("train.sh", slime).contains("slime"));
    let olmo = "torchrun --nproc_per_node=8 open_instruct/olmo_core_finetune.py --model_name_or_path \
        Qwen/Qwen3-0.6B --max_seq_length 4096 --per_device_train_batch_size 1\n";
    assert!(refused("train.sh", olmo).contains("OLMo-core"));
}

/// `examples/configs/qwen3-8b-eagle3-offline-disaggregated.yaml` of SpecForge,
/// `examples/math/gsm8k_sft_archon_fp8.yaml` of AReaL, `examples/vlm_sft/sft.toml` of prime-rl.
#[test]
fn files_of_other_frameworks_are_refused_by_name() {
    let specforge = "model: {target_model_path: Qwen/Qwen3-8B}\ntraining: {strategy: eagle3, batch_size: 1}\n\
                     output_dir: outputs\n";
    assert!(refused("job.yaml", specforge).contains("SpecForge"));
    let areal =
        "seed: 1\ncluster: {n_nodes: 1, fileroot: areal}\nactor: {backend: 'archon:d8', path: x}\n";
    assert!(refused("job.yaml", areal).contains("AReaL"));
    let prime = "max_steps = 20\n[model]\nname = \"Qwen/Qwen3.5-0.8B\"\noptimization_dtype = \"bfloat16\"\n\
                 [data]\nbatch_size = 1\nseq_len = 16384\n";
    assert!(refused("job.toml", prime).contains("prime-rl"));
    assert!(crate::is_refused(prime));
    assert!(!crate::is_refused("[model]\npreset = \"llama3-8b\"\n"));
    // A file of an unknown program with a key of the Trainer decides nothing.
    let unknown = "output_dir: outputs\nrun: {stages: 3}\n";
    let error = refused("job.yaml", unknown);
    assert!(
        error.starts_with("job.yaml: the format is not known")
            && error.contains("per_device_train_batch_size"),
        "{error}"
    );
}

/// `examples/vlm_finetune/gemma3/gemma3_vl_4b_medpix_peft.yaml` and
/// `qwen3/qwen3_vl_moe_30b_neat_packing.yaml` of NeMo Automodel.
#[test]
fn automodel_packs_freezes_and_chooses_attention() {
    let read = |model: &str, more: &str| {
        let text = format!(
            "step_scheduler: {{local_batch_size: 1, global_batch_size: 8}}\ndistributed: {{strategy: fsdp2}}\n\
             model:\n  pretrained_model_name_or_path: x\n{more}"
        );
        let options = Options {
            model: Some(Path::new(SIZES).join(model)),
            ..eight()
        };
        let mut job =
            try_text("job.yaml", &text, &options).unwrap_or_else(|e| panic!("{e}\n{text}"));
        job.scenario(&[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
        job
    };
    let text = "DeepSeek-R1-Distill-Qwen-14B.json";
    let job = read(
        text,
        "  attn_implementation: eager\ndataset: {seq_len: 2048}\n",
    );
    has(
        &job,
        &[
            ("model.attn_implementation", "\"eager\""),
            ("model.implementation", "\"transformers\""),
        ],
    );
    let job = read(text, "  attn_implementation: flash_attention_2\n");
    assert_eq!(setting(&job, "model.implementation"), None);
    let packed = "packed_sequence: {pretokenize: true, max_length: 1024, pack_size: 2048}\n";
    has(&read(text, packed), &[("train.seq_len", "2048")]);
    let padded = "packed_sequence: {pretokenize: true, max_length: 1024}\n";
    has(&read(text, padded), &[("train.seq_len", "1024")]);

    let vision = "Qwen2.5-VL-7B-Instruct.json";
    let frozen = |flags: &str| {
        let more = format!("dataset: {{seq_len: 2048}}\nfreeze_config: {{{flags}}}\n");
        setting(&read(vision, &more), "fsdp.frozen")
    };
    // The projector is a part of `visual`, which AutoModel freezes as a whole.
    let tower = Some(r#"["vision"]"#.to_owned());
    assert_eq!(frozen("freeze_vision_tower: true"), tower);
    assert_eq!(frozen("freeze_language_model: false"), tower);
    assert_eq!(frozen("freeze_vision_tower: false"), None);
    assert_eq!(
        setting(&read(vision, "dataset: {seq_len: 2048}\n"), "fsdp.frozen"),
        None
    );
}

/// `qwen-vl-finetune/scripts/{sft_7b,sft_30a3b_lora}.sh` of QwenLM/Qwen3-VL.
#[test]
fn scripts_of_qwen_vl_train_the_parts_that_they_say() {
    let script = |more: &str| {
        format!(
            "torchrun --nproc_per_node=8 qwenvl/train/train_qwen.py --model_name_or_path x --data_flatten True \
             --bf16 --per_device_train_batch_size 4 --model_max_length 1024 {more}\n"
        )
    };
    let vision = "Qwen2.5-VL-7B-Instruct.json";
    let tuned = |flags: &str| setting(&read_with_model(&script(flags), vision), "fsdp.frozen");
    let tower = Some(r#"["vision.patches", "vision.layers.*"]"#.to_owned());
    let only_language = "--tune_mm_vision False --tune_mm_mlp True --tune_mm_llm True";
    assert_eq!(tuned(only_language), tower);
    assert_eq!(
        tuned("--tune_mm_vision True --tune_mm_mlp True --tune_mm_llm True"),
        None
    );
    assert_eq!(
        tuned("--tune_mm_llm True"),
        Some(r#"["vision"]"#.to_owned())
    );
    assert_eq!(tuned(""), None);
    let job = read_with_model(
        &script(&format!("{only_language} --lora_enable True")),
        vision,
    );
    has(
        &job,
        &[
            ("lora.r", "64"),
            ("lora.lora_alpha", "128.0"),
            (
                "lora.target_modules",
                r#"["q_proj", "k_proj", "v_proj", "o_proj"]"#,
            ),
        ],
    );
}

/// `scripts/v1_5/{pretrain,finetune_lora}.sh` of haotian-liu/LLaVA.
#[test]
fn scripts_of_llava_are_not_given_options_of_fsdp() {
    let script = |more: &str| {
        format!(
            "deepspeed llava/train/train_mem.py --model_name_or_path lmsys/vicuna-13b-v1.5 --version v1 --bf16 True \
             --per_device_train_batch_size 16 --model_max_length 2048 {more}\n"
        )
    };
    let model = "DeepSeek-R1-Distill-Qwen-14B.json";
    let job = read_with_model(&script(""), model);
    assert_eq!(
        row(&job, "version").0,
        Status::NoCounterpart(Lack::Accuracy)
    );
    let job = read_with_model(&script("--lora_enable True"), model);
    has(
        &job,
        &[("lora.r", "64"), ("lora.target_modules", "\"all-linear\"")],
    );
    let job = read_with_model(&script("--lora_enable True --lora_r 128"), model);
    has(&job, &[("lora.r", "128")]);
    let job = read_with_model(&script("--tune_mm_mlp_adapter True"), model);
    let refused: Vec<&str> = job.decisive().map(|r| r.key.as_str()).collect();
    assert_eq!(refused, ["tune_mm_mlp_adapter"]);
    // Accelerate's own names have the prefix.
    let job = read_with_model(
        &script("--fsdp 'full_shard auto_wrap' --fsdp_version 2"),
        model,
    );
    has(&job, &[("fsdp.units", "\"block_and_ends\"")]);
}

/// `scripts/train_lora.sh` of lm-sys/FastChat has options of LoRA, and no flag for it.
#[test]
fn options_of_lora_without_a_flag_mean_lora() {
    let script = "deepspeed fastchat/train/train_lora.py --model_name_or_path Qwen/Qwen3-8B --lora_r 8 \
        --lora_alpha 16 --lora_dropout 0.05 --fp16 True --per_device_train_batch_size 2 --model_max_length 2048 \
        --q_lora False";
    let job = read(&format!("{script}\n"));
    has(&job, &[("lora.r", "8"), ("lora.lora_alpha", "16.0")]);
    assert_eq!(row(&job, "lora_r").0, Status::Assumed);
    assert_eq!(doubts(&job), ["lora.r"]);
    // TRL has a flag, which is off by default.
    let job = read(&format!("{script} --dataset_text_field text\n"));
    assert_eq!(setting(&job, "lora.r"), None);
    let job = read(&format!("{script} --use_peft False\n"));
    assert_eq!(setting(&job, "lora.r"), None);
}

/// `3.test_cases/pytorch/FSDP/slurm/llama3_2_1b-training.sbatch` of
/// aws-samples/awsome-distributed-training, and a task of SkyPilot that starts FastChat.
#[test]
fn commands_of_declared_arrays_and_of_tasks_are_read() {
    let aws = "declare -a TORCHRUN_ARGS=(\n    --nproc_per_node=8\n    --nnodes=$SLURM_JOB_NUM_NODES\n)\n\
        export TORCHRUN=torchrun\nexport TRAIN_SCRIPT=${TRAIN_SCRIPT:=../src/train.py}\n\
        declare -a TRAINING_ARGS=(\n    --max_context_width=8192\n    --num_key_value_heads=2\n    \
        --hidden_width=2048\n    --num_layers=16\n    --train_batch_size=1\n)\n\
        srun -l \"${ARGS[@]}\" ${TORCHRUN} \"${TORCHRUN_ARGS[@]}\" $TRAIN_SCRIPT \"${TRAINING_ARGS[@]}\"\n";
    let error = refused("train.sbatch", aws);
    assert!(error.contains("the FSDP example of AWS"), "{error}");
    let task = "resources:\n  accelerators: A100-80GB:8\nnum_nodes: 1\nrun: |\n  torchrun --nproc_per_node=8 \
        fastchat/train/train.py --model_name_or_path Qwen/Qwen3-8B --bf16 True \\\n    \
        --per_device_train_batch_size 4 --model_max_length 2048\nenvs:\n  A: --not-an-option\n";
    let job = try_text("task.yaml", task, &eight()).unwrap();
    has(
        &job,
        &[("train.micro_batch", "4"), ("train.seq_len", "2048")],
    );
    let at = job
        .rows()
        .iter()
        .find(|r| r.key == "model_max_length")
        .unwrap();
    assert_eq!(at.place.as_ref().unwrap().at.line, 6);
    assert!(job.rows().iter().all(|r| r.key != "not_an_option"));
    let line = "resources: {accelerators: A100:8}\nrun: torchrun train.py --bf16\n";
    assert!(refused("task.yaml", line).contains("`run: |`"));
}
