//! DeepSeek-V4: one head of keys, compressed keys, and residual streams.

use super::derived;
use super::experts::{EXPERT_FFN, ROUTED, TOP_K};
use crate::models::hf::{
    Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, TIED,
    VOCAB, field,
};
use crate::models::llama::NORM_EPS;
use crate::models::windows::layers;
use serde_json::Value;

const CSA: &str = "compressed_sparse_attention";
const HCA: &str = "heavily_compressed_attention";

fn integer(file: Fields<'_>, name: &str) -> Option<u64> {
    file(name)?.as_u64()
}

/// Returns the positions that one compressed key stands for in each layer, and whether an indexer
/// chooses among the keys; 0: the layer has no such keys.
fn rates(file: Fields<'_>) -> Result<Vec<(u64, bool)>, String> {
    let rate = |word: &str, legacy: &str, default| {
        let found = file("compress_rates").and_then(|all| all.get(word)?.as_u64());
        found.or_else(|| integer(file, legacy)).unwrap_or(default)
    };
    let sparse = (rate(CSA, "compress_rate_csa", 4), true);
    let heavy = (rate(HCA, "compress_rate_hca", 128), false);
    let (words, ratios) = (file("layer_types"), file("compress_ratios"));
    let of = |layer: u64| {
        let at = |list: &Option<Value>| list.as_ref()?.get(layer as usize).cloned();
        match (at(&words), at(&ratios)) {
            (Some(word), _) => match word.as_str().unwrap_or_default() {
                CSA => Ok(sparse),
                HCA => Ok(heavy),
                "sliding_attention" => Ok((0, false)),
                other => Err(format!(
                    "layer {layer} has attention of unknown type {other:?}"
                )),
            },
            (None, Some(ratio)) => match ratio.as_u64() {
                Some(0) => Ok((0, false)),
                Some(4) => Ok(sparse),
                Some(128) => Ok(heavy),
                _ => Err(format!(
                    "`compress_ratios` must be 0, 4 or 128, not {ratio}"
                )),
            },
            (None, None) if layer < 2 || layer.is_multiple_of(2) => Ok(heavy),
            (None, None) => Ok(sparse),
        }
    };
    (0..layers(file)).map(of).collect()
}

const FIELDS: &[Field] = &[
    VOCAB,
    HIDDEN,
    LAYERS,
    HEADS,
    POSITIONS,
    TIED,
    Field {
        names: &["rope_theta", "rope_parameters.main.rope_theta"],
        ..ROPE_THETA
    },
    ROUTED,
    TOP_K,
    EXPERT_FFN,
    NORM_EPS,
    field(
        &["num_key_value_heads"],
        Meaning::Default("kv_heads", Given::Int(1)),
    ),
    field(&["head_dim"], Meaning::Default("head_dim", Given::Int(512))),
    field(
        &["q_lora_rank"],
        Meaning::Default("q_lora_rank", Given::Int(1024)),
    ),
    field(
        &["o_groups"],
        Meaning::Default("output_groups", Given::Int(8)),
    ),
    field(
        &["o_lora_rank"],
        Meaning::Default("output_rank", Given::Int(1024)),
    ),
    field(&["hc_mult"], Meaning::Default("streams", Given::Int(4))),
    field(
        &["sliding_window"],
        Meaning::Default("sliding_window", Given::Int(128)),
    ),
    field(
        &["index_n_heads"],
        Meaning::Default("index_n_heads", Given::Int(64)),
    ),
    field(
        &["index_head_dim"],
        Meaning::Default("index_head_dim", Given::Int(128)),
    ),
    field(
        &["index_topk"],
        Meaning::Default("index_topk", Given::Int(512)),
    ),
    field(
        &["routed_scaling_factor"],
        Meaning::Default("route_scale", Given::Float(1.5)),
    ),
    field(&["scoring_func"], Meaning::Word(&["sqrtsoftplus"])),
    field(&["norm_topk_prob"], Meaning::On),
    field(&["attention_bias"], Meaning::Off),
    field(&["mlp_bias"], Meaning::Off),
    derived("ffn", &["moe_intermediate_size"], |file| {
        Ok(file("moe_intermediate_size"))
    }),
    // The class has one, whatever `n_shared_experts` says.
    derived("shared_expert_ffn", &["n_shared_experts"], |file| {
        Ok(file("moe_intermediate_size"))
    }),
    derived(
        "partial_rotary_factor",
        &["partial_rotary_factor", "qk_rope_head_dim"],
        |file| {
            let width = integer(file, "head_dim").unwrap_or(512) as f64;
            let rotated = integer(file, "qk_rope_head_dim").map(|n| n as f64 / width);
            let given = file("partial_rotary_factor").and_then(|x| x.as_f64());
            Ok(Some(given.or(rotated).unwrap_or(0.125).into()))
        },
    ),
    derived(
        "compress_rates",
        &[
            "compress_rates",
            "compress_ratios",
            "compress_rate_csa",
            "compress_rate_hca",
            "layer_types",
        ],
        |file| {
            let all = rates(file)?.into_iter().map(|(rate, _)| rate);
            Ok(Some(all.collect()))
        },
    ),
    derived(
        "indexer_types",
        &[
            "compress_rope_theta",
            "expert_dtype",
            "hc_eps",
            "hc_sinkhorn_iters",
            "hidden_act",
            "swiglu_limit",
            "topk_method",
        ],
        |file| {
            let word = |(_, chooses): (u64, bool)| if chooses { "full" } else { "none" };
            Ok(Some(rates(file)?.into_iter().map(word).collect()))
        },
    ),
    // Routers of the first layers choose by a table, which costs as much.
    derived(
        "activation",
        &[
            "mlp_layer_types",
            "num_hash_layers",
            "num_nextn_predict_layers",
        ],
        |_| Ok(Some("silu".into())),
    ),
];

/// Returns the row of a name of the type.
const fn v4(model_type: &'static str) -> HfType {
    HfType {
        model_type,
        architecture: "DeepseekV4ForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("normalize_top_k", Given::Bool(true)),
            ("position_embedding", Given::Str("rotary_interleaved")),
        ],
        common: FIELDS,
        fields: &[],
    }
}

pub(super) const TYPES: &[HfType] = &[v4("deepseek_v4"), v4("deepseek_ref")];
