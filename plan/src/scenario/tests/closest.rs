//! Advice about files of unknown types.

use super::huggingface::fault;
use serde_json::{Value, json};

/// Returns the message about a file.
fn advice(test: &str, file: &Value) -> String {
    fault(test, &file.to_string())
}

/// The first file is one of a class that the user wrote, as the guide on models describes.
#[test]
fn a_missing_vocabulary_is_named() {
    let mut file = json!({"model_type": "my_llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5});
    let message = advice("no-vocabulary", &file);
    assert!(
        message.contains(
            "`vocab_size` is missing: with it, its fields are closest to those of type llama"
        ),
        "{message}"
    );
    file["vocab_size"] = 32000.into();
    let message = advice("vocabulary", &file);
    assert!(message.contains("--as llama plans it as one"), "{message}");
    // A tower has no vocabulary.
    let tower = json!({"model_type": "my_tower", "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "patch_size": 16});
    let message = advice("tower", &tower);
    assert!(!message.contains("`vocab_size`"), "{message}");
}

/// Of moonshotai/Kimi-VL-A3B-Instruct.
#[test]
fn a_language_model_of_a_known_type_with_experts_is_named() {
    let mut file = json!({"model_type": "kimi_vl",
        "architectures": ["KimiVLForConditionalGeneration"],
        "vision_config": {"model_type": "moonvit", "hidden_size": 1152},
        "text_config": {"model_type": "deepseek_v3", "attention_bias": false,
            "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_group": 1,
            "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163_840}});
    let message = advice("kimi-vl", &file);
    assert!(
        message.contains("--as deepseek_v3 plans its language model alone"),
        "{message}"
    );
    // Of an unknown one, only the closest type is known.
    file["text_config"]["model_type"] = "foonew".into();
    let message = advice("foo-vl", &file);
    assert!(
        message.contains("its language model is closest to type deepseek_v"),
        "{message}"
    );
}

/// Of inclusionAI/GroveMoE-Inst.
#[test]
fn the_closest_type_has_no_parts_that_the_file_lacks() {
    let file = json!({"model_type": "grove_moe", "architectures": ["GroveMoeForCausalLM"],
        "attention_bias": false, "big_expert_num": 64, "big_expert_scale": 0.05,
        "decoder_sparse_step": 1, "expert_groups": 64, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "mlp_only_layers": [], "moe_intermediate_size": 768,
        "parallel_expert_intermediate_size": 128, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": false, "vocab_size": 151_936});
    let message = advice("grove", &file);
    assert!(
        message.contains("--as qwen3_moe plans it as one"),
        "{message}"
    );
}

/// Of PowerInfer/SmallThinker-21BA3B-Instruct, whose experts have names of their own.
#[test]
fn experts_with_other_names_are_not_left_out() {
    let file = json!({"model_type": "smallthinker",
        "architectures": ["SmallThinkerForCausalLM"], "head_dim": 128, "hidden_size": 2560,
        "max_position_embeddings": 16384, "moe_ffn_hidden_size": 768,
        "moe_num_active_primary_experts": 6, "moe_num_primary_experts": 64,
        "norm_topk_prob": true, "num_attention_heads": 28, "num_hidden_layers": 52,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1.5e6,
        "sliding_window_size": 4096, "tie_word_embeddings": false, "vocab_size": 151_936});
    let message = advice("small-thinker", &file);
    assert!(
        message.contains("it has experts (`moe_num_primary_experts`)"),
        "{message}"
    );
    assert!(!message.contains("--as"), "{message}");
}

/// Of tiiuae/falcon-7b before transformers had its class.
#[test]
fn refined_web_is_closest_to_falcon() {
    let file = json!({"model_type": "RefinedWebModel", "architectures": ["RWForCausalLM"],
        "alibi": false, "apply_residual_connection_post_layernorm": false, "bias": false,
        "hidden_size": 4544, "layer_norm_epsilon": 1e-5, "multi_query": true, "n_head": 71,
        "n_layer": 32, "parallel_attn": true, "vocab_size": 65024});
    let message = advice("refined-web", &file);
    assert!(message.contains("--as falcon plans it as one"), "{message}");
}

/// Of jinaai/jina-embeddings-v2-base-en, whose code is not part of transformers.
#[test]
fn advice_on_a_value_names_what_else_is_not_read() {
    let file = json!({"model_type": "bert", "architectures": ["JinaBertForMaskedLM"],
        "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 8192, "num_attention_heads": 12,
        "num_hidden_layers": 12, "position_embedding_type": "alibi", "type_vocab_size": 2,
        "vocab_size": 30528, "feed_forward_type": "geglu", "emb_pooler": "mean"});
    let message = advice("jina", &file);
    assert!(
        message.contains("a bert does not use `emb_pooler`, `feed_forward_type`"),
        "{message}"
    );
}
