//! Defaults of the configuration classes of transformers 5, for fields that affect shapes.
//!
//! A file of a single model must have all of these fields. In a file that contains several models,
//! the language model may lack any of them, because transformers only writes values that differ
//! from the defaults of the class.

use crate::models::HfWrapper;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// Fields with their values.
pub type ClassDefaults = BTreeMap<&'static str, &'static RawValue>;

/// Returns the fields that a class of transformers has if a file does not give them.
#[must_use]
pub fn class_defaults(model_type: &str) -> ClassDefaults {
    of_table(CLASS_DEFAULTS, model_type)
}

/// Returns the fields that the language model of a wrapper has if a file does not give them: what
/// the class of the whole says comes before what its own class says.
pub(crate) fn text_defaults(wrapper: &HfWrapper, model_type: &str) -> ClassDefaults {
    let mut all = class_defaults(model_type);
    all.extend(of_table(TEXT_DEFAULTS, wrapper.model_type));
    all
}

fn of_table(table: &[(&str, &'static str)], model_type: &str) -> ClassDefaults {
    let own = table.iter().find(|(name, _)| *name == model_type);
    own.map(|(_, json)| serde_json::from_str(json).expect("the table is JSON"))
        .unwrap_or_default()
}

/// Types, as files name them, with their fields as JSON.
const CLASS_DEFAULTS: &[(&str, &str)] = &[
    ("afmoe", r#"{"num_shared_experts": 2}"#),
    ("albert", r#"{"max_position_embeddings": 512}"#),
    ("axk1", r#"{"n_shared_experts": 1, "q_lora_rank": 1536}"#),
    ("bart", r#"{"max_position_embeddings": 1024}"#),
    ("bert", r#"{"max_position_embeddings": 512}"#),
    ("biogpt", r#"{"max_position_embeddings": 1024}"#),
    ("bitnet", r#"{"num_key_value_heads": 5}"#),
    ("blenderbot", r#"{"max_position_embeddings": 128}"#),
    ("blenderbot-small", r#"{"max_position_embeddings": 512}"#),
    ("camembert", r#"{"max_position_embeddings": 512}"#),
    (
        "clip_text_model",
        r#"{
            "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
            "num_hidden_layers": 12, "vocab_size": 49408
        }"#,
    ),
    (
        "cohere2",
        r#"{
            "hidden_size": 8192, "intermediate_size": 22528, "num_attention_heads": 64,
            "num_hidden_layers": 40, "vocab_size": 256000
        }"#,
    ),
    ("cwm", r#"{"num_key_value_heads": 8}"#),
    ("data2vec-text", r#"{"max_position_embeddings": 512}"#),
    ("deberta", r#"{"max_position_embeddings": 512}"#),
    ("deberta-v2", r#"{"max_position_embeddings": 512}"#),
    (
        "deepseek_v2",
        r#"{"n_shared_experts": 2, "qk_nope_head_dim": 128}"#,
    ),
    (
        "deepseek_v3",
        r#"{
            "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
            "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280
        }"#,
    ),
    (
        "deepseek_v32",
        r#"{"n_shared_experts": 1, "qk_nope_head_dim": 128}"#,
    ),
    ("distilbert", r#"{"max_position_embeddings": 512}"#),
    ("dots1", r#"{"num_key_value_heads": 32}"#),
    ("electra", r#"{"max_position_embeddings": 512}"#),
    ("ernie", r#"{"max_position_embeddings": 512}"#),
    ("ernie4_5", r#"{"head_dim": 128, "num_key_value_heads": 2}"#),
    ("exaone4", r#"{"num_key_value_heads": 32}"#),
    ("exaone_moe", r#"{"num_key_value_heads": 32}"#),
    (
        "gemma",
        r#"{
            "head_dim": 256, "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads":
            16, "num_hidden_layers": 28, "num_key_value_heads": 16, "vocab_size": 256000
        }"#,
    ),
    (
        "gemma2",
        r#"{
            "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads":
            8, "num_hidden_layers": 26, "num_key_value_heads": 4, "vocab_size": 256000
        }"#,
    ),
    (
        "gemma3_text",
        r#"{
            "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads":
            8, "num_hidden_layers": 26, "num_key_value_heads": 4, "vocab_size": 262208
        }"#,
    ),
    (
        "gemma4_text",
        r#"{
            "attention_k_eq_v": false, "head_dim": 256, "hidden_size": 2304, "intermediate_size":
            9216, "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 4,
            "vocab_size": 262144
        }"#,
    ),
    (
        "glm",
        r#"{"attention_bias": true, "num_key_value_heads": 2}"#,
    ),
    (
        "glm4",
        r#"{"attention_bias": true, "num_key_value_heads": 2}"#,
    ),
    (
        "glm4_moe",
        r#"{"n_shared_experts": 1, "num_key_value_heads": 8}"#,
    ),
    (
        "glm4_moe_lite",
        r#"{"n_shared_experts": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192}"#,
    ),
    (
        "glm4v_moe_text",
        r#"{
            "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
            "num_key_value_heads": 8, "vocab_size": 151424
        }"#,
    ),
    (
        "glm4v_text",
        r#"{
            "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "vocab_size": 151552
        }"#,
    ),
    (
        "glm_moe_dsa",
        r#"{"n_shared_experts": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192}"#,
    ),
    (
        "glm_ocr_text",
        r#"{
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 59392
        }"#,
    ),
    ("gpt_bigcode", r#"{"n_positions": 1024}"#),
    ("gpt_neo", r#"{"max_position_embeddings": 2048}"#),
    ("helium", r#"{"num_key_value_heads": 20}"#),
    ("hy_v3", r#"{"num_key_value_heads": 8}"#),
    ("iquestcoder", r#"{"num_key_value_heads": 8}"#),
    ("jamba", r#"{"num_key_value_heads": 8}"#),
    (
        "lfm2",
        r#"{
            "hidden_size": 2560, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 65536
        }"#,
    ),
    ("lfm2_moe", r#"{"num_key_value_heads": 8}"#),
    (
        "llama",
        r#"{
            "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_hidden_layers": 32, "vocab_size": 32000
        }"#,
    ),
    (
        "llama4_text",
        r#"{
            "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 1,
            "intermediate_size": 8192, "num_attention_heads": 40, "num_experts_per_tok": 1,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
            "vocab_size": 202048
        }"#,
    ),
    ("marian", r#"{"max_position_embeddings": 1024}"#),
    ("mbart", r#"{"max_position_embeddings": 1024}"#),
    ("megatron-bert", r#"{"max_position_embeddings": 512}"#),
    (
        "minicpm3",
        r#"{"q_lora_rank": 768, "qk_nope_head_dim": 64}"#,
    ),
    (
        "minimax_m2",
        r#"{"head_dim": 128, "num_key_value_heads": 8}"#,
    ),
    (
        "minimax_m3_vl_text",
        r#"{
            "head_dim": 128, "hidden_size": 6144, "intermediate_size": 3072, "num_attention_heads":
            64, "num_experts_per_tok": 4, "num_hidden_layers": 60, "num_key_value_heads": 4,
            "num_local_experts": 128, "vocab_size": 200064
        }"#,
    ),
    ("ministral", r#"{"num_key_value_heads": 8}"#),
    (
        "ministral3",
        r#"{
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads":
            32, "num_hidden_layers": 34, "num_key_value_heads": 8, "vocab_size": 131072
        }"#,
    ),
    (
        "mistral",
        r#"{
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000
        }"#,
    ),
    (
        "mistral4",
        r#"{"n_shared_experts": 1, "q_lora_rank": 1024, "qk_nope_head_dim": 64}"#,
    ),
    (
        "mllama_text_model",
        r#"{
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 128256
        }"#,
    ),
    ("mpnet", r#"{"max_position_embeddings": 512}"#),
    (
        "opt",
        r#"{
            "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048,
            "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272
        }"#,
    ),
    (
        "paddleocr_vl_text",
        r#"{
            "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads":
            16, "num_hidden_layers": 18, "num_key_value_heads": 2, "vocab_size": 103424
        }"#,
    ),
    ("pegasus", r#"{"max_position_embeddings": 1024}"#),
    (
        "phi3",
        r#"{
            "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_hidden_layers": 32, "vocab_size": 32064
        }"#,
    ),
    ("phimoe", r#"{"num_key_value_heads": 8}"#),
    ("plbart", r#"{"max_position_embeddings": 1024}"#),
    (
        "qwen2",
        r#"{
            "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 151936
        }"#,
    ),
    (
        "qwen2_5_omni_text",
        r#"{
            "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064
        }"#,
    ),
    (
        "qwen2_5_vl_text",
        r#"{
            "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
            "num_hidden_layers": 80, "num_key_value_heads": 8, "vocab_size": 152064
        }"#,
    ),
    ("qwen2_moe", r#"{"num_key_value_heads": 16}"#),
    (
        "qwen2_vl_text",
        r#"{
            "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
            "num_hidden_layers": 80, "num_key_value_heads": 8, "vocab_size": 152064
        }"#,
    ),
    (
        "qwen3",
        r#"{
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads":
            32, "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 151936
        }"#,
    ),
    (
        "qwen3_5_moe_text",
        r#"{
            "head_dim": 256, "hidden_size": 2048, "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size":
            512, "vocab_size": 248320
        }"#,
    ),
    (
        "qwen3_5_text",
        r#"{
            "head_dim": 256, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads":
            16, "num_hidden_layers": 32, "num_key_value_heads": 4, "vocab_size": 248320
        }"#,
    ),
    (
        "qwen3_moe",
        r#"{
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 4, "vocab_size": 151936
        }"#,
    ),
    ("qwen3_next", r#"{"num_key_value_heads": 2}"#),
    (
        "qwen3_vl_moe_text",
        r#"{
            "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
            "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "num_hidden_layers": 24, "num_key_value_heads": 16, "vocab_size": 151936
        }"#,
    ),
    (
        "qwen3_vl_text",
        r#"{
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads":
            32, "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 151936
        }"#,
    ),
    ("roberta", r#"{"max_position_embeddings": 512}"#),
    (
        "sarvam_mla",
        r#"{"n_shared_experts": 1, "q_lora_rank": null, "qk_nope_head_dim": 128}"#,
    ),
    ("seed_oss", r#"{"head_dim": 128, "num_key_value_heads": 8}"#),
    (
        "siglip2_text_model",
        r#"{
            "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
            "num_hidden_layers": 12, "vocab_size": 32000
        }"#,
    ),
    (
        "siglip_text_model",
        r#"{
            "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
            "num_hidden_layers": 12, "vocab_size": 32000
        }"#,
    ),
    (
        "smollm3",
        r#"{
            "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "vocab_size": 128256
        }"#,
    ),
    ("solar_open", r#"{"num_key_value_heads": 8}"#),
    ("stablelm", r#"{"num_key_value_heads": 32}"#),
    ("starcoder2", r#"{"num_key_value_heads": 2}"#),
    ("xlm-roberta", r#"{"max_position_embeddings": 512}"#),
    ("youtu", r#"{"qk_nope_head_dim": 128}"#),
];

/// Defaults that a type that contains several models gives its language model, before those of the
/// language model's own class.
const TEXT_DEFAULTS: &[(&str, &str)] = &[(
    "voxtral",
    r#"{
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "num_hidden_layers": 30, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 100000000.0, "vocab_size": 131072
    }"#,
)];
