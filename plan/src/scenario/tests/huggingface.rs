//! Models by their `config.json`.

use super::super::*;
use super::{Folder, minimal};
use crate::config::*;
use proptest::prelude::*;
use std::path::Path;

/// Of meta-llama/Llama-3.2-1B.
const LLAMA: &str = r#"{
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": 128001,
  "head_dim": 64,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "initializer_range": 0.02,
  "intermediate_size": 8192,
  "max_position_embeddings": 131072,
  "mlp_bias": false,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 16,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3"
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": true,
  "torch_dtype": "bfloat16",
  "use_cache": true,
  "vocab_size": 128256
}
"#;

/// Of Qwen/Qwen2.5-7B-Instruct: a window that is not used, no head dimension.
const QWEN: &str = r#"{
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "hidden_act": "silu",
  "hidden_size": 3584,
  "intermediate_size": 18944,
  "max_position_embeddings": 32768,
  "max_window_layers": 28,
  "model_type": "qwen2",
  "num_attention_heads": 28,
  "num_hidden_layers": 28,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 131072,
  "tie_word_embeddings": false,
  "use_sliding_window": false,
  "vocab_size": 152064
}
"#;

/// Of Qwen/Qwen3-4B.
const QWEN3: &str = r#"{
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 2560,
  "intermediate_size": 9728,
  "max_position_embeddings": 40960,
  "max_window_layers": 36,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 36,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": null,
  "rope_theta": 1000000,
  "sliding_window": null,
  "tie_word_embeddings": true,
  "use_sliding_window": false,
  "vocab_size": 151936
}
"#;

/// Of mistralai/Mistral-7B-v0.1.
const MISTRAL: &str = r#"{
  "architectures": ["MistralForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 32768,
  "model_type": "mistral",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "sliding_window": 4096,
  "tie_word_embeddings": false,
  "vocab_size": 32000
}
"#;

/// Of openai-community/gpt2.
const GPT2: &str = r#"{
  "activation_function": "gelu_new",
  "architectures": ["GPT2LMHeadModel"],
  "attn_pdrop": 0.1,
  "embd_pdrop": 0.1,
  "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2",
  "n_ctx": 1024,
  "n_embd": 768,
  "n_head": 12,
  "n_layer": 12,
  "n_positions": 1024,
  "resid_pdrop": 0.1,
  "vocab_size": 50257
}
"#;

const REST: &str = "[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

/// Returns the scenario of a file with a `config.json` next to it.
pub(super) fn read(test: &str, config: &str, sets: &[&str]) -> Result<Scenario, ScenarioError> {
    let text = format!("[model]\npreset = \"there/config.json\"\n{REST}");
    let f = Folder::new(test, &[("mine.toml", &text), ("there/config.json", config)]);
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    load(&f.file("mine.toml"), &sets)
}

/// A message without the folder of its test.
pub(super) fn fault(test: &str, config: &str) -> String {
    let e = read(test, config, &[]).unwrap_err().to_string();
    let folder = Folder::path(test).display().to_string();
    e.replace(&folder, "FOLDER")
}

pub(super) fn parameters(s: &Scenario) -> u64 {
    let (_, params) = crate::models::testing::modules_and_params(s);
    params.iter().map(|p| p.numel()).sum()
}

/// The presets were written down from what the authors publish, not from these files.
#[test]
fn published_files_are_the_presets() {
    for (config, preset) in [
        (LLAMA, "llama3.2-1b"),
        (QWEN, "qwen2.5-7b"),
        (QWEN3, "qwen3-4b"),
        (GPT2, "gpt2"),
    ] {
        let mut ours = read(preset, config, &[]).unwrap().model;
        let want = minimal(&[&format!("model.preset={preset}")]).unwrap().model;
        assert_eq!(ours.preset.as_deref(), Some("there/config.json"));
        ours.preset.clone_from(&want.preset);
        assert_eq!(ours, want);
    }
}

/// Parameters as published.
#[test]
fn a_sliding_window_limits_attention_not_the_sequence() {
    let s = read("window", MISTRAL, &[]).unwrap();
    let m = &s.model;
    assert_eq!(
        (m.max_seq_len, m.options.layers.sliding_window),
        (32768, Some(4096))
    );
    assert_eq!(parameters(&s), 7_241_732_096);
    assert_eq!((m.window(0, 8192), m.window(0, 4096)), (Some(4096), None));
    let off = MISTRAL.replace("4096,\n  \"tie", "null,\n  \"tie");
    let window = |config: &str| {
        read("window", config, &[])
            .unwrap()
            .model
            .options
            .layers
            .sliding_window
    };
    assert_eq!(window(&off), None);
    // Qwen's classes use it if asked to, from a layer on.
    let on = QWEN.replace("use_sliding_window\": false", "use_sliding_window\": true");
    assert_eq!(window(&on), None);
    let on = on.replace("max_window_layers\": 28", "max_window_layers\": 21");
    let m = read("window", &on, &[]).unwrap().model;
    assert_eq!(m.options.layers.sliding_window, Some(131_072));
    let types = [20, 21].map(|layer| m.layer_type(layer));
    assert_eq!(types, [LayerType::Full, LayerType::Sliding]);
}

/// The class determines the output layer. Parameters as published.
#[test]
fn a_class_has_its_output_layer() {
    let class = |name: &str| LLAMA.replace("LlamaForCausalLM", name);
    let of = |config: &str| read("class", config, &[]).unwrap();
    let scores = class("LlamaForSequenceClassification").replace(
        "\"hidden_act\"",
        "\"id2label\": {\"0\": \"good\"}, \"hidden_act\"",
    );
    let reward = of(&scores);
    assert_eq!(
        (
            reward.model.options.output.head,
            reward.model.options.output.num_labels
        ),
        (Head::SequenceClassification, 1)
    );
    // One row of scores instead of the tied head.
    assert_eq!(parameters(&reward), parameters(&of(LLAMA)) + 2048);
    let token = of(&class("LlamaForTokenClassification"));
    assert_eq!(parameters(&token), parameters(&of(LLAMA)) + 2 * 2048 + 2);
    assert_eq!(
        of(&class("LlamaModel")).model.options.output.head,
        Head::None
    );
}

/// What a file says that no key expresses.
/// Parameters of transformers' classes on torch's meta device.
#[test]
fn what_a_file_does_not_say_is_as_in_its_class() {
    const TOWER: &str = r#""hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": 4, "image_size": 16"#;
    let files = [
        (
            r#"{"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 256,
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4}"#
                .to_owned(),
            112_640,
        ),
        (
            format!(
                r#"{{"model_type": "paligemma", "projection_dim": 64,
                "text_config": {{"model_type": "gemma2", "vocab_size": 256, "hidden_size": 64,
                "num_hidden_layers": 2}},
                "vision_config": {{"model_type": "siglip_vision_model", {TOWER}}}}}"#
            ),
            4_400_864,
        ),
        // Another name of a field that the class has a default for.
        (
            r#"{"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text",
            "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_local_experts": 4,
            "moe_intermediate_size": 24, "head_dim": 16}, "vision_config": {"depth": 2,
            "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "patch_size": 4,
            "out_hidden_size": 64, "deepstack_visual_indexes": [1],
            "num_position_embeddings": 16}}"#
                .to_owned(),
            341_136,
        ),
        // The number of classes is that of the whole.
        (
            format!(
                r#"{{"model_type": "gemma3", "num_labels": 7, "mm_tokens_per_image": 4,
                "architectures": ["Gemma3ForSequenceClassification"],
                "text_config": {{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "num_labels": 3}}, "vision_config": {{{TOWER}}}}}"#
            ),
            137_424,
        ),
        (
            r#"{"model_type": "idefics3", "text_config": {"model_type": "llama",
            "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1},
            "vision_config": {"num_hidden_layers": 1, "image_size": 64, "patch_size": 16}}"#
                .to_owned(),
            15_764_160,
        ),
    ];
    for (config, known) in files {
        let s = read("defaults", &config, &[]).unwrap();
        assert_eq!(parameters(&s), known, "{config}");
    }
}

/// Quantized models list the layers that are not quantized, which takes more than other files may.
#[test]
fn a_file_may_be_long() {
    let names = "\"model.layers.0.self_attn.q_proj\", ".repeat(40_000);
    let list = format!("{{\n  \"modules_to_not_convert\": [{names}\"lm_head\"],");
    let long = LLAMA.replacen('{', &list, 1);
    assert!(long.len() > 1 << 20);
    assert!(read("long", &long, &[]).is_ok());
    let longer = LLAMA.replacen('{', &format!("{{{}", " ".repeat(16 << 20)), 1);
    let why = fault("longer", &longer);
    assert!(why.contains("is longer than 16777216 bytes"), "{why}");
}

/// A decoder alone is not the model of encoder and decoder.
#[test]
fn a_decoder_without_its_encoder_is_refused() {
    let config = r#"{"model_type": "bart", "architectures": ["BartForCausalLM"], "vocab_size": 256,
        "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4}"#;
    let why = fault("decoder-alone", config);
    assert!(
        why.contains("the output layer of BartForCausalLM is not known"),
        "{why}"
    );
}

#[test]
fn what_is_not_used_is_reported() {
    let config = LLAMA.replace(
        "\"hidden_act\"",
        "\"quantization_config\": {\"quant_method\": \"fp8\"}, \"mtp_layers\": 1, \"router_jitter_noise\": 0.0, \"input_noise\": 0.1, \"bound\": [0, Infinity], \"hidden_act\"",
    );
    let text = format!("[model]\npreset = \"there/config.json\"\n{REST}");
    let f = Folder::new(
        "notes",
        &[("mine.toml", &text), ("there/config.json", &config)],
    );
    let notes = model_notes(&f.file("mine.toml"), &[]).unwrap();
    assert_eq!(
        notes,
        [
            "`quantization_config` (fp8) is not used: weights have the types of [precision]",
            "a llama does not use `bound`, `input_noise`, `mtp_layers`",
            "`bound` holds Infinity or NaN, which are not JSON",
        ]
    );
    let plain = Folder::new(
        "plain",
        &[("mine.toml", &text), ("there/config.json", LLAMA)],
    );
    assert!(
        model_notes(&plain.file("mine.toml"), &[])
            .unwrap()
            .is_empty()
    );
    let infinite = LLAMA.replace("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": Infinity");
    let message = fault("infinite", &infinite);
    assert!(message.contains("`model.norm_eps` must be"), "{message}");
}

/// OLMo 3 has its bases in `rope_parameters`, one for each kind of layer.
const OLMO3: &str = r#"{
  "hidden_size": 64,
  "intermediate_size": 96,
  "layer_types": ["sliding_attention", "full_attention"],
  "max_position_embeddings": 2048,
  "model_type": "olmo3",
  "num_attention_heads": 4,
  "num_hidden_layers": 2,
  "rope_parameters": {
    "full_attention": {"rope_theta": 300000.0, "rope_type": "yarn", "factor": 8.0},
    "sliding_attention": {"rope_theta": 20000.0, "rope_type": "default"}
  },
  "sliding_window": 16,
  "vocab_size": 256
}
"#;

#[test]
fn bases_of_rotary_embeddings_are_read_per_kind_of_layer() {
    let bases = |test: &str, config: &str| {
        let model = read(test, config, &[]).unwrap().model;
        let kind = model.options.positions.rope_scaling.map(|s| s.rope_type);
        (
            model.rope_theta,
            model.options.positions.rope_local_theta,
            kind,
        )
    };
    let nested = bases("olmo3", OLMO3);
    assert_eq!(nested, (3e5, Some(2e4), Some(RopeType::Yarn)));
    // The class has one default for both; files before transformers 5 have one base.
    let start = OLMO3.find("  \"rope_parameters\"").unwrap();
    let end = OLMO3.find("  \"sliding_window\"").unwrap();
    let absent = [&OLMO3[..start], &OLMO3[end..]].concat();
    assert_eq!(bases("olmo3-absent", &absent), (5e5, Some(5e5), None));
    let flat = absent.replace("\"vocab_size\"", "\"rope_theta\": 70000.0, \"vocab_size\"");
    assert_eq!(bases("olmo3-flat", &flat), (7e4, Some(7e4), None));
}

/// Entries of `rope_parameters` that no key expresses are named, those without effect are not.
#[test]
fn rotary_parameters_that_nothing_reads_are_named() {
    let notes = |test: &str, config: &str| {
        let text = format!("[model]\npreset = \"there/config.json\"\n{REST}");
        let f = Folder::new(test, &[("mine.toml", &text), ("there/config.json", config)]);
        model_notes(&f.file("mine.toml"), &[]).unwrap()
    };
    assert_eq!(notes("rope-read", OLMO3), [""; 0]);
    let scaled = OLMO3.replace(
        "20000.0, \"rope_type\": \"default\"",
        "20000.0, \"rope_type\": \"linear\", \"factor\": 2.0, \"partial_rotary_factor\": 1.0",
    );
    let of_window = "rope_parameters.sliding_attention";
    let unread = format!("a olmo3 does not use `{of_window}.rope_type`, `{of_window}.factor`");
    assert_eq!(notes("rope-scaled", &scaled), [unread]);
    // A llama has one base, and rotates whole heads.
    let nested = LLAMA.replace(
        "\"rope_theta\": 500000.0",
        "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7.0, \"partial_rotary_factor\": 0.5}}",
    );
    let of_full = "rope_parameters.full_attention";
    let unread =
        format!("a llama does not use `{of_full}.rope_theta`, `{of_full}.partial_rotary_factor`");
    assert_eq!(notes("rope-nested", &nested), [unread]);
}

/// The first DeciLM: a Llama whose layers have 4, 4, 2 and 1 key heads.
#[test]
fn key_heads_of_deci_are_read_per_layer() {
    let config = r#"{
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "model_type": "deci", "num_attention_heads": 32, "num_hidden_layers": 4,
        "num_key_value_heads": 32, "num_key_value_heads_per_layer": [4, 4, 2, 1],
        "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "vocab_size": 32000
    }"#;
    for name in ["deci", "decilm"] {
        let config = config.replace("\"deci\"", &format!("\"{name}\""));
        let s = read(name, &config, &[]).unwrap();
        assert_eq!(s.model.options.layers.layer_kv_heads, [4, 4, 2, 1]);
        // Embedding and head, norms, and in each layer queries and results, keys and values, and
        // the feed-forward layer.
        assert_eq!(parameters(&s), 1_112_576_000);
    }
    let config = config.replace("[4, 4, 2, 1]", "\"all\"");
    let message = fault("deci-word", &config);
    let want = "`num_key_value_heads_per_layer` is missing";
    assert!(message.contains(want), "{message}");
}

/// A file may be taken for another type.
#[test]
fn an_unknown_type_may_be_planned_as_a_known_one() {
    let config = LLAMA.replace("\"llama\"", "\"lama\"");
    let s = read("as", &config, &["model.model_type=llama"]).unwrap();
    let llama = parameters(&read("as", LLAMA, &[]).unwrap());
    assert_eq!(parameters(&s), llama);
    // Without a file, it names the weights, so it must be a type of the family.
    let named = |t: &str| {
        let text = format!("[model]\npreset = \"llama3-8b\"\nmodel_type = \"{t}\"\n{REST}");
        parse("named", &text, &[])
    };
    assert_eq!(
        named("llama").unwrap().model.options.model_type.as_deref(),
        Some("llama")
    );
    let e = named("lama").unwrap_err();
    assert_eq!(e.message(), "family llama has no `model_type` \"lama\"");
    assert_eq!(e.help(), Some("did you mean `llama`?"));
    // The language model of a file that wraps several.
    let wrapped = format!(
        "{{\"model_type\": \"my_vl\", \"architectures\": [\"MyVLForConditionalGeneration\"], \"vision_config\": {{}}, \"text_config\": {}}}",
        LLAMA.replace("\"llama\"", "\"llama_vl_text\"")
    );
    let message = fault("wrapped", &wrapped);
    assert!(
        message.contains("--as llama plans its language model alone"),
        "{message}"
    );
    let s = read("wrapped", &wrapped, &["model.model_type=llama"]).unwrap();
    assert_eq!(parameters(&s), llama);
    // It has other names in files of classes that are not part of transformers.
    for (from, to) in [
        ("\"text_config\": {", "\"llm_config\": {"),
        ("\"text_config\": {", "\"language_config\": {"),
    ] {
        let config = wrapped.replace(from, to);
        assert_ne!(config, wrapped);
        let message = fault("named", &config);
        assert!(
            message.contains("--as llama plans its language model alone"),
            "{message}"
        );
        let s = read("named", &config, &["model.model_type=llama"]).unwrap();
        assert_eq!(parameters(&s), llama);
    }
    // A part of a part.
    let omni = wrapped.replace("\"my_vl\"", "\"qwen2_5_omni\"").replace(
        "\"text_config\": {",
        "\"thinker_config\": {\"text_config\": {",
    ) + "}";
    let message = fault("omni", &omni);
    assert!(
        message.contains("--as qwen2_5_omni_thinker plans it"),
        "{message}"
    );
    let s = read("omni", &omni, &["model.model_type=llama"]).unwrap();
    assert_eq!(parameters(&s), llama);
}

/// Parameters of transformers' class on torch's meta device.
#[test]
fn a_whole_may_lack_its_tower() {
    const GEMMA4: &str = include_str!("../../../../tests/data/configs/tiny--gemma4-keys.json");
    let mut file: serde_json::Value = serde_json::from_str(GEMMA4).unwrap();
    file["vision_config"] = serde_json::Value::Null;
    let alone = read("no-tower", &file.to_string(), &[]).unwrap();
    assert!(alone.model.options.context.vision.is_none());
    assert_eq!(parameters(&alone), 276_656);
    // An audio tower may be there alone.
    file["audio_config"] = serde_json::json!({});
    let sounds = read("sounds", &file.to_string(), &[]).unwrap();
    assert!(sounds.model.options.context.audio.is_none());
    assert_eq!(parameters(&sounds), 305_199_568);
    let asked = read(
        "sounds",
        &file.to_string(),
        &["model.model_type=gemma4_text"],
    );
    assert_eq!(parameters(&asked.unwrap()), 276_656);
}

/// The file of a language model alone that was a part of another model names a type of its own.
#[test]
fn a_part_of_a_model_has_the_type_of_the_whole() {
    let config = QWEN
        .replace("\"qwen2\"", "\"qwen2_5_vl_text\"")
        .replace("Qwen2ForCausalLM", "Qwen2_5_VLTextModel");
    let part = read("part", &config, &[]).unwrap();
    let whole = read("part", QWEN, &[]).unwrap();
    assert_eq!(part.model.options.output.head, Head::None);
    // Without the output layer; biases of queries, keys and values are those of Qwen 2.
    assert_eq!(
        parameters(&part) + 152_064 * 3584,
        parameters(&whole),
        "{:?}",
        part.model
    );
    assert_eq!(part.model.bias, Bias::Qkv);
}

#[test]
fn what_the_scenario_says_wins() {
    let s = read("wins", LLAMA, &["model.layers=3", "model.hidden=1024"]).unwrap();
    // The feed-forward layer follows the width, as a preset's does.
    assert_eq!((s.model.layers, s.model.ffn), (3, 4096));
    let e = read("wins", LLAMA, &["model.family=gpt2"]).unwrap_err();
    let message = e.to_string();
    assert!(
        message.contains("belongs to family llama, not gpt2"),
        "{message}"
    );
}

/// Values whose number of parameters, or whose loss, would be another one.
#[test]
fn what_types_cannot_express_is_refused() {
    const EUROBERT: &str = include_str!("../../../../tests/data/configs/tiny--eurobert-head.json");
    const DEIT: &str = include_str!("../../../../tests/data/configs/tiny--deit.json");
    const ALBERT: &str = include_str!("../../../../tests/data/configs/tiny--albert.json");
    for (config, from, to, why) in [
        (
            include_str!("../../../../tests/data/configs/tiny--nemotron_h.json"),
            "\"tie_word_embeddings\": false",
            "\"tie_word_embeddings\": true",
            "`tie_word_embeddings` must be false",
        ),
        (
            include_str!("../../../../tests/data/configs/tiny--bailing_hybrid.json"),
            "\"tie_word_embeddings\": false",
            "\"tie_word_embeddings\": true",
            "`tie_word_embeddings` must be false",
        ),
        (
            include_str!("../../../../tests/data/configs/tiny--xlm.json"),
            "\"tie_word_embeddings\": true",
            "\"tie_word_embeddings\": false",
            "`tie_word_embeddings` must be true",
        ),
        (
            include_str!("../../../../tests/data/configs/tiny--donut-swin.json"),
            "\"use_absolute_embeddings\": false",
            "\"use_absolute_embeddings\": true",
            "`use_absolute_embeddings` must be false",
        ),
        (
            include_str!("../../../../tests/data/configs/tiny--data2vec-vision.json"),
            "Data2VecVisionForImageClassification",
            "Data2VecVisionModel",
            "it has no norm after its blocks",
        ),
        (
            include_str!("../../../../tests/data/configs/tiny--deepseek_v2.json"),
            "\"q_lora_rank\": 12",
            "\"q_lora_rank\": 0",
            "`q_lora_rank` must be above 0, or null if queries are not compressed",
        ),
        (
            include_str!("../../../../tests/data/configs/tiny--falcon-groups.json"),
            "\"parallel_attn\": true",
            "\"parallel_attn\": false",
            "`parallel_attn` is false for the old decoder architecture only",
        ),
        (
            EUROBERT,
            "\"late\"",
            "\"bos\"",
            "`classifier_pooling` must be \"late\"",
        ),
        (
            DEIT,
            "\"image_size\": 32",
            "\"image_size\": [32, 16]",
            "`image_size` must be a positive number",
        ),
        (
            DEIT,
            "\"patch_size\": 16",
            "\"patch_size\": 0",
            "`patch_size` must be a positive number",
        ),
        (
            ALBERT,
            "\"num_hidden_groups\": 1",
            "\"num_hidden_groups\": 3",
            "`num_hidden_layers` (4) must be divisible by `num_hidden_groups` (3)",
        ),
        (
            ALBERT,
            "AlbertForMaskedLM",
            "AlbertForNextSentencePrediction",
            "the output layer of AlbertForNextSentencePrediction is not known",
        ),
        (
            DEIT,
            "ImageClassification",
            "MaskedImageModeling",
            "the output layer of DeiTForMaskedImageModeling is not known",
        ),
    ] {
        read("whole", config, &[]).unwrap();
        let changed = config.replace(from, to);
        assert_ne!(changed, config, "{from}");
        let message = read("changed", &changed, &[]).unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
    }
    // Other classes have no such layer.
    let masked = EUROBERT
        .replace("ForSequenceClassification", "ForMaskedLM")
        .replace("\"late\"", "\"bos\"");
    read("masked", &masked, &[]).unwrap();
}

/// Blocks of ALBERT that share weights compute as much as blocks with weights of their own.
#[test]
fn blocks_share_weights() {
    const ALBERT: &str = include_str!("../../../../tests/data/configs/tiny--albert-keys.json");
    let of = |sets: &[&str]| {
        let s = read("albert", ALBERT, sets).unwrap();
        let graph = crate::models::graph(&s);
        let queries = graph.parameters().iter();
        let queries = queries.filter(|p| p.name.ends_with("attention.q.weight"));
        let uses = queries.map(|p| (p.name.clone(), p.modules.len())).collect();
        (graph.model_flops, uses)
    };
    let (flops, shared): (_, Vec<(String, usize)>) = of(&[]);
    // Two groups of two layers, each of which applies three blocks.
    let name = |n: usize| format!("layers.{n}.attention.q.weight");
    let wanted = [0, 1, 2, 6, 7, 8].map(|n| (name(n), 2));
    assert_eq!(shared, wanted);
    let apart = ["model.layer_groups=0", "model.group_layers=1"];
    let (of_apart, own) = of(&apart);
    assert_eq!(own.len(), 12);
    assert_eq!(flops, of_apart);
    for policy in ["native", "fsdp2", "megatron", "megatron_v2"] {
        for recompute in ["none", "full"] {
            let sets = [
                &format!("fsdp.policy={policy}"),
                &format!("train.recompute={recompute}"),
                "train.grad_accum=2",
                "train.seq_len=32",
            ];
            let scenario = read("planned", ALBERT, &sets).unwrap();
            let program = crate::plan(&scenario).unwrap();
            let report = crate::check::check(&program);
            assert!(report.violations.is_empty(), "{sets:?}: {report:?}");
        }
    }
    for (set, why) in [
        ("model.layers=8", "must be divisible by"),
        ("model.layer_groups=0", "of which there are none"),
        ("model.layer_types=[\"full_attention\"]", "cannot differ"),
        (
            "model.norm_position=before",
            "`norm_position` = \"sum\" only",
        ),
    ] {
        let message = read("set", ALBERT, &[set]).unwrap_err().to_string();
        assert!(message.contains(why), "{set}: {message}");
    }
}

/// As transformers 5 writes it, and defaults of the classes.
#[test]
fn fields_may_lie_elsewhere_or_nowhere() {
    let old = "\"rope_theta\": 500000.0,";
    let new = "\"rope_parameters\": {\"rope_theta\": 25, \"rope_type\": \"default\"},";
    let s = read("theta", &LLAMA.replace(old, new), &[]).unwrap();
    assert_eq!(s.model.rope_theta, 25.0);
    let bare = LLAMA
        .replace(old, "")
        .replace("\"rms_norm_eps\": 1e-05,", "")
        .replace(
            "\"num_key_value_heads\": 8,",
            "\"num_key_value_heads\": null,",
        );
    let m = read("bare", &bare, &[]).unwrap().model;
    assert_eq!((m.rope_theta, m.norm_eps, m.kv_heads), (1e4, 1e-6, 32));
    let biased = LLAMA.replace("bias\": false", "bias\": true");
    assert_eq!(read("all", &biased, &[]).unwrap().model.bias, Bias::All);
}

#[test]
fn faults_are_named_at_their_place() {
    let with = |from: &str, to: &str| {
        let config = LLAMA.replace(from, to);
        assert_ne!(config, LLAMA, "{from}");
        config
    };
    let mut out = String::new();
    for config in [
        with("\"llama\"", "\"lama\""),
        with("\"llama\"", "\"xlnet\""),
        with("\"model_type\": \"llama\",", ""),
        with("\"hidden_size\": 2048,", ""),
        with("\"hidden_size\": 2048", "\"hidden_size\": \"2048\""),
        with("\"hidden_size\": 2048", "\"hidden_size\": [2048]"),
        with("layers\": 16", "layers\": 0"),
        with("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 5"),
        with("\"silu\"", "\"gelu\""),
        with("LlamaForCausalLM", "LlamaForRewardModel"),
        with("\"rope_type\": \"llama3\"", "\"rope_type\": \"other\""),
        with("\"low_freq_factor\": 1.0,", ""),
        with("\"hidden_act\"", "\"num_experts\": 8, \"hidden_act\"")
            .replace("\"llama\"", "\"lama\""),
        with("\"head_dim\": 64,", "\"head_dim\": 64"),
        "[1, 2]".to_owned(),
        String::new(),
        MISTRAL.replace("silu", "relu"),
        GPT2.replace("gelu_new", "mish"),
        GPT2.replace("GPT2LMHeadModel", "GPT2DoubleHeadsModel"),
        GPT2.replace("\"n_ctx\"", "\"add_cross_attention\": true, \"n_ctx\""),
    ] {
        out.push_str(&fault("faults", &config));
        out.push_str("\n\n");
    }
    let e = load(
        Path::new("small-native"),
        &["model.preset=no/config.json".into()],
    )
    .unwrap_err();
    out.push_str(&e.to_string());
    insta::assert_snapshot!(out);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever a file holds, it is read or refused.
    #[test]
    fn no_file_makes_it_panic(
        which in 0..5usize,
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0..12usize, "[0-9eE.,:{}\\[\\]\" -]{0,4}"), 0..4),
    ) {
        let mut config = [LLAMA, QWEN, QWEN3, MISTRAL, GPT2][which].to_owned();
        for (at, bytes, new) in cuts {
            let at = at.index(config.len() + 1);
            let end = (at + bytes).min(config.len());
            config.replace_range(at..end, &new);
        }
        if let Err(e) = read("fuzz", &config, &[]) {
            prop_assert!(!e.to_string().is_empty());
        }
    }
}

/// Layers 0 and 5, and every second layer, are dense. The number of parameters is that of
/// `Qwen3MoeForCausalLM` (transformers 5.24) on the meta device.
#[test]
fn dense_layers_may_be_anywhere() {
    let config = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "decoder_sparse_step": 2, "mlp_only_layers": [0, 5], "tie_word_embeddings": false, "num_experts": 128, "norm_topk_prob": true}"#;
    let s = read("mixed", config, &[]).unwrap();
    assert_eq!(parameters(&s), 16_369_793_024);
    let first = config.replace("[0, 5]", "[0, 1]");
    let s = read("first", &first, &[]).unwrap();
    assert!(s.model.options.layers.mlp_layer_types.is_empty());
    assert_eq!(s.model.options.experts.dense_layers, 2);
}
