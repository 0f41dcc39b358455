//! Models that arguments of Megatron-LM describe.

use super::{eight, setting, try_script, try_text};
use crate::{Job, Options};
use shardlab_plan::config::Recompute;

const BASE: &str = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
                    --seq-length 64 --micro-batch-size 1 --bf16 --use-megatron-fsdp";

fn read(more: &str) -> Job {
    try_text("train.sh", &format!("{BASE} {more}\n"), &eight())
        .unwrap_or_else(|e| panic!("{e}: {more}"))
}

/// Returns the number of parameters of the model.
fn parameters(more: &str) -> u64 {
    let scenario = read(more).scenario(&[]).unwrap();
    let program = shardlab_plan::plan(&scenario).unwrap();
    program
        .params
        .iter()
        .map(shardlab_plan::ir::Param::numel)
        .sum()
}

/// Parameter counts are sums over the shapes in Megatron-Core's `GPTModel`.
#[test]
fn models_have_megatrons_parameters() {
    let (attention, norm, table) = (4 * 64 * 64, 2 * 64, 128 * 64);
    // GPT-3: biases, learned positions, LayerNorm, tied embeddings, a vocabulary padded to 128.
    let block = attention + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 2 * norm;
    let gpt3 = table + 64 * 64 + 2 * block + norm;
    assert_eq!(
        parameters("--vocab-size 100 --max-position-embeddings 64"),
        gpt3
    );
    // Nemotron: squared ReLU, rotary embeddings, no biases.
    let block = attention + 2 * 64 * 256 + 2 * norm;
    let nemotron = 2 * table + 2 * block + norm;
    let flags = "--vocab-size 128 --squared-relu --disable-bias-linear --position-embedding-type rope \
                 --untie-embeddings-and-output-weights --apply-layernorm-1p --rotary-percent 0.5";
    assert_eq!(parameters(flags), nemotron);
    // Llama: the width of the feed-forward layer is a multiple of 64; grouped queries.
    let ffn = 8 * 64 / 3 / 64 * 64;
    let grouped = 2 * 64 * 64 + 2 * 32 * 64;
    let llama = table + 2 * (grouped + 3 * 64 * ffn + 2 * 64) + 64;
    let flags = "--vocab-size 128 --swiglu --disable-bias-linear --position-embedding-type rope \
                 --normalization RMSNorm --group-query-attention --num-query-groups 2";
    assert_eq!(parameters(flags), llama);
    // The number of groups is used only with the flag.
    let alone = flags.replace("--group-query-attention", "");
    assert_eq!(parameters(&alone), llama + 2 * (4 * 64 * 64 - grouped));
}

/// Latent attention as in `MLASelfAttention`: one norm for each compressed vector.
#[test]
fn latent_attention_of_megatron_is_read() {
    let flags = "--vocab-size 128 --swiglu --disable-bias-linear --position-embedding-type rope \
                 --normalization RMSNorm --ffn-hidden-size 128 --multi-latent-attention --q-lora-rank 24 \
                 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --untie-embeddings-and-output-weights";
    let query = 64 * 24 + 24 + 24 * 4 * (8 + 4);
    let keys = 64 * (16 + 4) + 16 + 16 * 4 * (8 + 8);
    let block = query + keys + 4 * 8 * 64 + 3 * 64 * 128 + 2 * 64;
    assert_eq!(parameters(flags), 2 * 128 * 64 + 2 * block + 64);
    let experts = format!("{flags} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32");
    let experts = read(&experts);
    assert_eq!(
        setting(&experts, "model.family").as_deref(),
        Some("\"moe\"")
    );
    assert_eq!(setting(&experts, "model.head_dim").as_deref(), Some("12"));
}

#[test]
fn routers_with_sigmoids_ignore_the_order_of_softmax() {
    let flags = "--vocab-size 128 --swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 \
                 --moe-ffn-hidden-size 32 --moe-router-pre-softmax";
    let router = |more: &str| setting(&read(&format!("{flags} {more}")), "model.router");
    assert_eq!(router("").as_deref(), Some("\"softmax_topk\""));
    let sigmoid = router("--moe-router-score-function sigmoid");
    assert_eq!(sigmoid.as_deref(), Some("\"sigmoid\""));
}

#[test]
fn recomputed_blocks_of_megatron_are_counted() {
    let full = "--vocab-size 128 --recompute-granularity full";
    let layers = |more: &str| setting(&read(&format!("{full} {more}")), "train.recompute_layers");
    let block = "--recompute-method block --recompute-num-layers 1";
    assert_eq!(layers(block).as_deref(), Some("1"));
    let uniform = "--recompute-method uniform --recompute-num-layers 1";
    assert_eq!(layers(uniform), None);
}

/// The end of a schedule does not matter for constant and linear schedules.
#[test]
fn a_smallest_learning_rate_needs_a_cosine() {
    let of = |style: &str| {
        let flags = format!("--vocab-size 128 --lr 1e-4 --min-lr 1e-5 --lr-decay-style {style}");
        setting(&read(&flags), "train.min_lr")
    };
    assert_eq!(of("linear"), None);
    assert_eq!(of("cosine").as_deref(), Some("1e-5"));
}

/// `--model` replaces the arguments that describe the model.
#[test]
fn a_model_by_option_replaces_that_of_the_arguments() {
    let model = "../tests/data/configs/Qwen--Qwen3-0.6B.json";
    let options = Options {
        model: Some(model.into()),
        ..eight()
    };
    let script =
        format!("{BASE} --hybrid-layer-pattern M-M* --num-experts 8 --swiglu --spec x y\n");
    let mut job = try_text("train.sh", &script, &options).unwrap();
    assert_eq!(job.decisive().count(), 0);
    assert_eq!(job.scenario(&[]).unwrap().model.hidden, 1024);
    let without = try_text("train.sh", &script, &eight()).unwrap();
    let decisive: Vec<&str> = without.decisive().map(|r| r.key.as_str()).collect();
    assert!(decisive.contains(&"--hybrid-layer-pattern"), "{decisive:?}");
}

#[test]
fn a_size_that_no_argument_gives_is_asked_for() {
    let error = try_text("train.sh", &format!("{BASE}\n"), &eight()).unwrap_err();
    assert!(
        error.contains("`model.vocab` is missing") && error.contains("--set"),
        "{error}"
    );
}

/// Models without and with experts. The dispatcher of the latter reads token counts on the host.
const DENSE: &str = "--vocab-size 128 --swiglu --disable-bias-linear --position-embedding-type rope \
                     --normalization RMSNorm --ffn-hidden-size 128";
const EXPERTS: &str = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 \
                       --moe-token-dispatcher-type alltoall";
const PADDED: &str = "--moe-expert-capacity-factor 2.0 --moe-pad-expert-input-to-capacity";

/// Arguments from Megatron-LM's guide to CUDA graphs, of the current version and of earlier ones,
/// and the scenarios that result.
#[test]
fn cuda_graphs_of_megatron_are_scopes() {
    let graph = |flags: &str| {
        let mut job = read(flags);
        let scenario = job.scenario(&[]).unwrap_or_else(|e| panic!("{flags}: {e}"));
        shardlab_plan::plan(&scenario).unwrap_or_else(|e| panic!("{flags}: {e}"));
        setting(&job, "compile.cuda_graph")
    };
    let dense = |flags: &str| graph(&format!("{DENSE} {flags}"));
    let experts = |flags: &str| graph(&format!("{DENSE} {EXPERTS} {flags}"));
    let is = |found: Option<String>, wanted: &str| assert_eq!(found.as_deref(), Some(wanted));
    is(dense("--cuda-graph-impl local"), "[\"block\"]");
    is(
        dense("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp"),
        "[\"attn\", \"mlp\"]",
    );
    is(
        dense("--external-cuda-graph --cuda-graph-scope attn moe_router"),
        "[\"attn\"]",
    );
    is(
        dense("--cuda-graph-impl full_iteration"),
        "\"full_iteration\"",
    );
    is(
        dense("--enable-cuda-graph --cuda-graph-scope full_iteration"),
        "\"full_iteration\"",
    );
    assert_eq!(dense("--cuda-graph-impl none"), None);
    assert_eq!(dense("--cuda-graph-modules attn"), None);
    let router = "--cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess";
    is(
        experts(router),
        "[\"attn\", \"moe_router\", \"moe_preprocess\"]",
    );
    let whole = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe";
    is(experts(whole), "[\"attn\"]");
    is(experts(&format!("{whole} {PADDED}")), "[\"attn\", \"moe\"]");
    assert_eq!(experts("--cuda-graph-impl full_iteration"), None);
    assert_eq!(
        experts("--cuda-graph-impl local --cuda-graph-modules mlp"),
        None
    );
    let wrong =
        format!("{BASE} {DENSE} --cuda-graph-impl local --cuda-graph-modules attn router\n");
    let error = try_text("train.sh", &wrong, &eight()).unwrap_err();
    assert!(error.contains("moe_router"), "{error}");
}

/// `--recompute-modules` of Megatron-LM, which defaults to the core of attention. Megatron ignores
/// modules that the model does not have.
#[test]
fn recomputed_modules_of_megatron_are_read() {
    let of = |more: &str| {
        let mut job = read(&format!("--vocab-size 128 {more}"));
        let s = job.scenario(&[]).unwrap();
        let modules = s.train.recompute_modules.iter();
        let modules: Vec<&str> = modules.map(|m| m.name()).collect();
        (s.train.recompute, modules.join(" "))
    };
    let selective = "--recompute-granularity selective";
    let of_core = (Recompute::Selective, "core_attn".to_owned());
    assert_eq!(of("--recompute-activations"), of_core);
    assert_eq!(of(selective), of_core);
    let both = format!("{selective} --recompute-modules layernorm mlp");
    let expected = (Recompute::Selective, "layernorm mlp".to_owned());
    assert_eq!(of(&both), expected);
    assert_eq!(of(&format!("{both} moe_act")), expected);
    let none = (Recompute::None, String::new());
    assert_eq!(of(&format!("{selective} --recompute-modules moe")), none);
    // Without the granularity, the modules have no effect.
    assert_eq!(of("--recompute-modules mlp"), none);
    let full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1";
    assert_eq!(of(full).0, Recompute::Full);
    let experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --swiglu --disable-bias-linear \
                   --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights";
    let moe = (Recompute::Selective, "moe".to_owned());
    assert_eq!(of(&format!("{experts} --moe-layer-recompute")), moe);
    let error = try_text(
        "train.sh",
        &format!("{BASE} {selective} --recompute-modules mpl\n"),
        &eight(),
    );
    let error = error.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("expected core_attn, layernorm"), "{error}");
}

/// `mcore_fsdp_adapter.py` of Megatron Core 0.18 and 0.19 sets `fsdp_unit_modules` for
/// `optim_grads_params` only.
#[test]
fn megatron_fsdp_has_one_unit_unless_it_shards_parameters() {
    let units = |more: &str| {
        let script = format!(
            "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
             --seq-length 64 --max-position-embeddings 64 --vocab-size 256 --micro-batch-size 1 --bf16 \
             --use-distributed-optimizer {more}\n"
        );
        setting(&try_script(&script, &eight()), "fsdp.units")
    };
    let strategy = |name| {
        units(&format!(
            "--use-megatron-fsdp --data-parallel-sharding-strategy {name}"
        ))
    };
    let root = Some("\"root\"".to_owned());
    assert_eq!(strategy("optim"), root);
    assert_eq!(strategy("optim_grads"), root);
    assert_eq!(strategy("optim_grads_params"), None);
    // The distributed optimizer reduces gradients in buckets.
    assert_eq!(units(""), None);
}
