//! Sizes that classes of transformers compute or default, where a file says nothing or something
//! unusual. Numbers of parameters are those of the classes of transformers 5.24 on torch's meta
//! device, unless a test says otherwise.

use super::huggingface::{fault, parameters, read};
use crate::config::Activation;
use serde_json::{Value, json};

/// Returns the parameters of a file.
fn count(test: &str, config: &Value) -> u64 {
    parameters(&read(test, &config.to_string(), &[]).unwrap_or_else(|e| panic!("{e}")))
}

/// Sizes of replit/replit-code-v1_5-3b, whose class is in the repository of the model and in LLM
/// Foundry. The class of transformers has no grouped queries. Expected numbers are counted by hand:
/// 32 blocks with 3072 x 5120 (queries, keys and values), 3072 x 3072, 2 x 4 x 3072 x 3072 and two
/// norms, a norm and the embedding.
#[test]
fn keys_of_mpt_are_those_of_its_type_of_attention() {
    let of = |attention: Value| {
        json!({"model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 3072,
            "n_heads": 24, "n_layers": 32, "vocab_size": 32768, "max_seq_len": 4096,
            "expansion_ratio": 4, "no_bias": true, "attn_config": attention})
    };
    let blocks = |qkv: u64| 32 * (3072 * (qkv + 3072 + 8 * 3072) + 2 * 3072);
    let rest = 3072 + 32768 * 3072;
    let grouped = of(json!({"attn_type": "grouped_query_attention", "kv_n_heads": 8}));
    assert_eq!(count("mpt-grouped", &grouped), 3_322_088_448);
    assert_eq!(count("mpt-grouped", &grouped), blocks(5120) + rest);
    let one = of(json!({"attn_type": "multiquery_attention"}));
    assert_eq!(count("mpt-one", &one), blocks(3072 + 2 * 128) + rest);
    // Another type of attention does not read the number.
    let all = of(json!({"attn_type": "multihead_attention", "kv_n_heads": 8}));
    assert_eq!(count("mpt-all", &all), blocks(3 * 3072) + rest);
    let why = fault(
        "mpt-missing",
        &of(json!({"attn_type": "grouped_query_attention"})).to_string(),
    );
    assert!(why.contains("needs `attn_config.kv_n_heads`"), "{why}");
    let why = fault("mpt-other", &of(json!({"attn_type": "linear"})).to_string());
    assert!(why.contains("must be multihead_attention"), "{why}");
}

/// Of fla-org/flame (`configs/mamba2_340M.json`), which does not give the heads. The class of
/// transformers refuses this file, and has this number of parameters with 32 heads.
#[test]
fn heads_of_mamba2_follow_from_its_width() {
    let mut file = json!({"model_type": "mamba2", "hidden_size": 1024, "expand": 2,
        "head_dim": 64, "n_groups": 1, "num_hidden_layers": 48, "state_size": 128,
        "conv_kernel": 4, "chunk_size": 256, "use_bias": false, "use_conv_bias": true,
        "tie_word_embeddings": false, "vocab_size": 32000});
    assert_eq!(count("mamba2", &file), 382_387_712);
    file["num_heads"] = 32.into();
    assert_eq!(count("mamba2", &file), 382_387_712);
    file["num_heads"] = 64.into();
    let why = fault("mamba2-heads", &file.to_string());
    assert!(
        why.contains("`num_heads` (64) must be `hidden_size` times `expand` (2048)"),
        "{why}"
    );
}

/// Of EleutherAI/gpt-neox-20b.
#[test]
fn gpt_neox_has_other_activations() {
    let file = json!({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576,
        "max_position_embeddings": 2048, "num_attention_heads": 64, "num_hidden_layers": 44,
        "rotary_pct": 0.25, "tie_word_embeddings": false, "vocab_size": 50432});
    let scenario = read("neox", &file.to_string(), &[]).unwrap();
    let activation = scenario.model.options.activation;
    assert_eq!(activation, Some(Activation::GeluTanh));
    assert_eq!(parameters(&scenario), 20_554_567_680);
}

/// Of ai21labs/AI21-Jamba-Reasoning-3B.
#[test]
fn a_single_expert_of_jamba_is_a_dense_layer() {
    let file = json!({"model_type": "jamba", "architectures": ["JambaForCausalLM"],
        "attn_layer_offset": 7, "attn_layer_period": 14, "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 8192, "mamba_conv_bias": true, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 160, "mamba_expand": 2, "mamba_proj_bias": false,
        "max_position_embeddings": 262_144, "num_attention_heads": 20, "num_experts": 1,
        "num_experts_per_tok": 1, "num_hidden_layers": 28, "num_key_value_heads": 1,
        "tie_word_embeddings": true, "vocab_size": 65536});
    let scenario = read("jamba", &file.to_string(), &[]).unwrap();
    assert!(!scenario.model.has_experts());
    assert_eq!(parameters(&scenario), 3_029_337_472);
}

/// Of `text_config`s with nothing but their type.
#[test]
fn a_language_model_without_fields_has_the_sizes_of_its_class() {
    let tower = |model_type: &str| json!({"model_type": model_type});
    let files = [
        (
            json!({"model_type": "voxtral", "text_config": {"model_type": "llama"},
                "audio_config": tower("voxtral_encoder")}),
            4_676_271_104,
        ),
        (
            json!({"model_type": "voxtral", "audio_config": tower("voxtral_encoder"),
                "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
                    "intermediate_size": 96, "vocab_size": 256, "num_attention_heads": 8}}),
            637_614_272,
        ),
        (
            json!({"model_type": "mllama", "text_config": tower("mllama_text_model"),
                "vision_config": tower("mllama_vision_model")}),
            10_642_941_475,
        ),
        (
            json!({"model_type": "blip-2", "text_config": tower("opt"),
                "qformer_config": tower("blip_2_qformer"),
                "vision_config": tower("blip_2_vision_model")}),
            1_216_944_384,
        ),
        (
            json!({"model_type": "instructblip", "text_config": tower("opt"),
                "qformer_config": tower("instructblip_qformer"),
                "vision_config": tower("instructblip_vision_model")}),
            1_297_466_112,
        ),
        (
            json!({"model_type": "paddleocr_vl", "text_config": tower("paddleocr_vl_text"),
                "vision_config": tower("paddleocr_vl_vision")}),
            799_695_472,
        ),
        (
            json!({"model_type": "minimax_m3_vl", "text_config": tower("minimax_m3_vl_text"),
                "vision_config": tower("minimax_m3_vl_vision")}),
            448_052_008_448,
        ),
        (
            json!({"model_type": "qwen2_5_omni_thinker", "text_config": tower("qwen2_5_omni_text"),
                "vision_config": tower("qwen2_5_omni_vision_encoder"),
                "audio_config": tower("qwen2_5_omni_audio_encoder")}),
            11_338_288_896,
        ),
    ];
    let mut wrong = Vec::new();
    for (n, (file, known)) in files.into_iter().enumerate() {
        let ours = read(&format!("no-fields-{n}"), &file.to_string(), &[]);
        match ours.map(|s| parameters(&s)) {
            Ok(ours) if ours == known => {}
            Ok(ours) => wrong.push(format!("{file}: {ours}, not {known}")),
            Err(why) => wrong.push(format!("{file}: {why}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The scores follow a layer of their own, also if the encoder has other sizes or a window.
#[test]
fn classifiers_of_pairs_have_a_layer_before_the_scores() {
    let bart = json!({"model_type": "bart", "architectures": ["BartForSequenceClassification"],
        "vocab_size": 256, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_ffn_dim": 80, "decoder_ffn_dim": 96, "encoder_attention_heads": 2,
        "decoder_attention_heads": 4, "max_position_embeddings": 64, "num_labels": 2});
    let pegasus = json!({"model_type": "bigbird_pegasus",
        "architectures": ["BigBirdPegasusForSequenceClassification"], "vocab_size": 256,
        "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 96, "block_size": 4, "num_random_blocks": 3,
        "attention_type": "block_sparse"});
    assert_eq!(count("bart-scores", &bart), 102_770);
    assert_eq!(count("pegasus-scores", &pegasus), 211_682);
}

#[test]
fn a_x_k1_has_a_shared_expert_by_default() {
    let file = json!({"model_type": "axk1", "architectures": ["AXK1ForCausalLM"],
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 48,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16});
    assert_eq!(count("axk1", &file), 257_232);
}
