//! Megatron-Bridge: overrides of recipes in YAML and on the command line.

use super::{has, setting, try_text};
use crate::{Job, Options, Status};

fn read(name: &str, text: &str, model: &str) -> Job {
    let options = Options {
        gpus: Some("8xh100".parse().unwrap()),
        model: Some(format!("../tests/data/configs/{model}.json").into()),
        ..Options::default()
    };
    let mut job = try_text(name, text, &options).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(job.decisive().count(), 0, "{text}");
    job.scenario(&[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
    job
}

fn why(job: &Job, key: &str) -> (Status, String) {
    let row = job.rows().iter().find(|r| r.key == key).unwrap();
    (row.status, row.why.clone().unwrap_or_default())
}

const DENSE: &str = "Qwen--Qwen3-0.6B";
const EXPERTS: &str = "default--jetmoe";

/// In the style of `tutorials/recipes/llama/conf/llama32_1b_pretrain.yaml`.
#[test]
fn overrides_in_yaml_are_read() {
    let text = "dataset:\n  seq_length: 4096\ntrain:\n  train_iters: 100\n  global_batch_size: 16\n  micro_batch_size: 1\n\
        optimizer:\n  lr: 0.0003\n  min_lr: 0.00003\n  weight_decay: 0.1\nscheduler:\n  lr_warmup_iters: 20\n  \
        lr_decay_style: cosine\ncheckpoint:\n  save: ./x\n  save_interval: 50\nmodel:\n  seq_length: 4096\n  \
        tensor_model_parallel_size: 1\n  recompute_granularity: full\nddp:\n  grad_reduce_in_fp32: false\nlogger:\n  log_interval: 1\n";
    let job = read("job.yaml", text, DENSE);
    assert_eq!(job.framework, "Megatron-Bridge");
    has(
        &job,
        &[
            ("train.seq_len", "4096"),
            ("train.micro_batch", "1"),
            ("train.grad_accum", "2"),
            ("train.lr", "0.0003"),
            ("train.recompute", "\"full\""),
            ("fsdp.strategy", "\"optim\""),
            ("precision.param_dtype", "\"bf16\""),
            ("precision.main_grads", "\"bf16\""),
        ],
    );
    let text = text.replace(
        "  grad_reduce_in_fp32: false\n",
        "  use_megatron_fsdp: true\n  data_parallel_sharding_strategy: optim_grads_params\n",
    );
    let job = read("job.yaml", &text, DENSE);
    has(&job, &[("fsdp.strategy", "\"optim_grads_params\"")]);
}

/// Overrides of `scripts/training/run_recipe.py`, and the keys that only the recipe sets.
#[test]
fn overrides_of_commands_are_read() {
    let script = |more: &str| {
        format!(
            "uv run python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py \\\n  \
             --recipe qwen3_30b_a3b_pretrain_config -mb 1 -gb 16 -sl 2048 -ep 8 \\\n  \
             model.moe_token_dispatcher_type=flex {more}\n"
        )
    };
    let job = read(
        "run.sh",
        &script("model.moe_flex_dispatcher_backend=hybridep ++model.moe_hybridep_num_sms=16"),
        EXPERTS,
    );
    assert_eq!(job.framework, "Megatron-Bridge");
    has(
        &job,
        &[
            ("train.micro_batch", "1"),
            ("train.grad_accum", "2"),
            ("train.seq_len", "2048"),
            ("mesh.ep", "8"),
            ("moe.dispatcher", "\"deepep\""),
        ],
    );
    let (status, text) = why(&job, "--recipe");
    assert!(status != Status::Used && text.contains("--set"), "{text}");
    let (status, text) = why(&job, "model.moe_hybridep_num_sms");
    assert!(status != Status::Used && text.contains("SMs"), "{text}");
    let job = read("run.sh", &script("").replace("=flex", "=alltoall"), EXPERTS);
    has(&job, &[("moe.dispatcher", "\"all_to_all\"")]);
    let unsaid = script("").replace(
        "model.moe_token_dispatcher_type=flex",
        "model.moe_grouped_gemm=true",
    );
    has(
        &read("run.sh", &unsaid, EXPERTS),
        &[("moe.dispatcher", "\"all_to_all\"")],
    );
}

/// Names of `mixed_precision.py`. Current scaling keeps the first and last blocks in 16 bits and
/// gathers 8-bit weights; here nothing is gathered.
#[test]
fn names_of_precisions_are_read() {
    let of = |name: &str| {
        let text = format!(
            "train:\n  train_iters: 1\n  micro_batch_size: 1\n  global_batch_size: 8\ndataset:\n  seq_length: 1024\n\
             mixed_precision: {name}\n"
        );
        read("job.yaml", &text, DENSE)
    };
    assert_eq!(setting(&of("bf16_mixed"), "precision.float8_recipe"), None);
    let key = "precision.float8_first_bf16";
    let job = of("bf16_with_fp8_current_scaling_mixed");
    assert_eq!(setting(&job, key).as_deref(), Some("1"), "{:?}", job.rows());
}
