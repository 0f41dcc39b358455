//! Scripts and recipes of public repositories that need more than a table of keys. Each test names
//! the file that its lines are from.

use super::{eight, has, row, setting, try_text};
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
    let mut job =
        try_text("train.sh", script, &options).unwrap_or_else(|e| panic!("{e}\n{script}"));
    if job.decisive().count() == 0 {
        job.scenario(&[])
            .unwrap_or_else(|e| panic!("{e}\n{script}"));
    }
    job
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
