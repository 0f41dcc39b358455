//! Types with vision or audio towers, by their `config.json`.

use super::read_config as read;

/// Values that would make another model than the one that is planned, with the reason.
#[test]
fn what_towers_cannot_express_is_refused() {
    let whisper = config!("tiny--whisper");
    let mllama = config!("tiny--mllama");
    let voxtral = config!("tiny--voxtral");
    let kimi = config!("Kimi-Linear-48B-A3B");
    let siglip = config!("tiny--siglip");
    let clip = config!("tiny--clip");
    let gemma = config!("tiny--recurrent_gemma");
    let dino = config!("tiny--dinov3_vit");
    let internvl = config!("tiny--internvl-keys");
    for (n, (config, from, to, why)) in [
        (
            whisper,
            "WhisperForConditionalGeneration",
            "WhisperForAudioClassification",
            "the output layer of WhisperForAudioClassification is not known",
        ),
        (
            whisper,
            "WhisperForConditionalGeneration",
            "WhisperForCausalLM",
            "the output layer of WhisperForCausalLM is not known",
        ),
        (
            whisper,
            "\"activation_function\": \"gelu\"",
            "\"activation_function\": \"mish\"",
            "`activation_function`",
        ),
        (
            mllama,
            "MllamaForConditionalGeneration",
            "MllamaForCausalLM",
            "a MllamaForCausalLM has no tower, and skips the layers that would attend to it",
        ),
        (
            mllama,
            "\"vision_output_dim\": 144",
            "\"vision_output_dim\": 96",
            "`vision_config.vision_output_dim` (96) must be 144",
        ),
        (
            mllama,
            "\"intermediate_layers_indices\": [\n   0,\n   2\n  ]",
            "\"intermediate_layers_indices\": [2, 0]",
            "must be rising numbers of the 4 blocks",
        ),
        (
            voxtral,
            "\"intermediate_size\": 192",
            "\"intermediate_size\": 200",
            "`audio_config.intermediate_size` (200) must be divisible by `hidden_size` (48)",
        ),
        (
            kimi,
            "\"mla_use_nope\": true",
            "\"mla_use_nope\": false",
            "`mla_use_nope` must be true",
        ),
        (
            kimi,
            "\"moe_layer_freq\": 1",
            "\"moe_layer_freq\": 2",
            "`moe_layer_freq` must be 1",
        ),
        (
            siglip,
            "\"projection_size\": 48",
            "\"projection_size\": 40",
            "`text_config.projection_size` (40) must be `vision_config.hidden_size` (48)",
        ),
        (
            clip,
            "\"model_type\": \"clip\"",
            "\"model_type\": \"clip\", \"text_config_dict\": {\"hidden_size\": 128}",
            "`text_config_dict` must be null",
        ),
        (
            gemma,
            "\"lru_width\": 64",
            "\"lru_width\": 66",
            "`lru_width` (66) must be divisible by `num_attention_heads` (4)",
        ),
        (
            dino,
            "\"value_bias\": true",
            "\"value_bias\": false",
            "`query_bias` and `value_bias` must be equal",
        ),
        (
            internvl,
            "\"norm_type\": \"rms_norm\"",
            "\"norm_type\": \"layer_norm\"",
            "`vision_config.use_qk_norm` needs `norm_type` \"rms_norm\"",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        read(&format!("towers-whole-{n}"), config, &[]).unwrap();
        let changed = config.replace(from, to);
        assert_ne!(changed, config, "{from}");
        let message = read(&format!("towers-changed-{n}"), &changed, &[]);
        let message = message.unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
    }
}

/// Values of tables that a file does not have as such, such as those of `vision`, are named with a
/// place in the file.
#[test]
fn faults_of_computed_tables_have_a_place() {
    let qianfan = config!("tiny--qianfan_ocr");
    let pegasus = config!("tiny--bigbird_pegasus");
    for (config, path, why) in [
        (
            qianfan,
            "/vision_config/intermediate_size",
            "`model.vision.ffn` must be an integer from 1",
        ),
        (
            pegasus,
            "/encoder_attention_heads",
            "`model.encoder.heads` must be an integer from 1",
        ),
    ] {
        let mut file: serde_json::Value = serde_json::from_str(config).unwrap();
        *file.pointer_mut(path).unwrap() = 0.into();
        let message = read("place", &file.to_string(), &[]).unwrap_err();
        let message = message.to_string();
        assert!(message.contains(why), "{message}");
        assert!(message.contains("config.json:1:"), "{message}");
    }
    // A field that a message names is where the message points to.
    let qwen = config!("tiny--qwen2_5_vl");
    let changed = qwen.replace("\"out_hidden_size\": 64", "\"out_hidden_size\": 60");
    let before = changed.split_once("\"out_hidden_size\": 60").unwrap().0;
    let line = before.lines().count();
    let message = read("named-field", &changed, &[]).unwrap_err().to_string();
    assert!(message.contains(&format!(".json:{line}:")), "{message}");
    assert!(
        message.contains("`vision_config.out_hidden_size` (60)"),
        "{message}"
    );
}

/// Old files of CLIP repeat its fields under another name.
#[test]
fn old_fields_of_clip_may_repeat_the_others() {
    let clip = config!("tiny--clip");
    let mut old: serde_json::Value = serde_json::from_str(clip).unwrap();
    for name in ["text", "vision"] {
        old[format!("{name}_config_dict")] = old[format!("{name}_config")].clone();
    }
    let widths = |name: &str, text: &str| {
        let s = read(name, text, &[]).unwrap();
        (s.model.hidden, s.model.layers, s.model.vocab)
    };
    assert_eq!(
        widths("clip-old", &old.to_string()),
        widths("clip-new", clip)
    );
    // A field that the old name lacks has its default, which counts.
    old["vision_config_dict"]
        .as_object_mut()
        .unwrap()
        .remove("patch_size");
    let message = read("clip-default", &old.to_string(), &[]).unwrap_err();
    assert!(message.to_string().contains("not 32"), "{message}");
}

/// Its language model alone has layers that attend to nothing.
#[test]
fn layers_with_cross_attention_need_a_tower() {
    let mllama = config!("tiny--mllama");
    let sets = ["model.model_type=mllama_text_model"];
    let message = read("no-tower", mllama, &sets).unwrap_err().to_string();
    assert!(message.contains("they need a tower"), "{message}");
}

/// Encoder and decoder have rows of their own: 1,500 and 448. Keys and values of the attention
/// between them come from the former.
#[test]
fn model_flops_of_whisper_count_each_row_once() {
    let s = read(
        "whisper-flops",
        config!("whisper-tiny"),
        &["train.micro_batch=1"],
    )
    .unwrap();
    let (d, ffn, layers, vocab) = (384, 1536, 4, 51_865);
    let (rows, tokens) = (1500, 448);
    let convolutions = 3 * 80 * d * 2 * rows + 3 * d * d * rows;
    let encoder = layers * (4 * d * d + 2 * d * ffn) * rows;
    let own = layers * (4 * d * d + 2 * d * ffn) * tokens;
    let cross = layers * (2 * d * d * tokens + 2 * d * d * rows);
    let head = vocab * d * tokens;
    let matmuls = 6 * (convolutions + encoder + own + cross + head);
    // Twice as much in backward as in forward.
    let pairs = 2 * rows * rows + tokens * tokens + 2 * rows * tokens;
    let attention = 3 * layers * 2 * d * pairs;
    let graph = crate::models::graph(&s);
    assert_eq!(graph.model_flops.0, matmuls + attention);
}

/// The reason is what the type has; its closest relative can be planned, if it has one.
#[test]
fn types_that_are_not_planned_say_what_they_have() {
    let bert = config!("tiny--bert");
    let named = |name: &str| bert.replace("\"model_type\": \"bert\"", name);
    let whole = named("\"model_type\": \"gemma3n\"");
    let message = read("gemma3n", &whole, &[]).unwrap_err().to_string();
    assert!(
        message.contains("\"gemma3n\" is not supported: it has a vision tower"),
        "{message}"
    );
    assert!(
        message.contains("--as gemma3n_text plans it as one"),
        "{message}"
    );
    let dream = named("\"model_type\": \"Dream\"");
    let message = read("dream", &dream, &[]).unwrap_err().to_string();
    assert!(
        message.contains("it has attention to all positions of a sequence"),
        "{message}"
    );
    assert!(message.contains("--as qwen2 plans it as one"), "{message}");
    let resnet = named("\"model_type\": \"resnet\"");
    let message = read("resnet", &resnet, &[]).unwrap_err().to_string();
    assert!(
        message.contains("\"resnet\" is not supported: it has convolutions with strides"),
        "{message}"
    );
    assert!(message.contains("set model.family"), "{message}");
}

/// Without `head_dim`, the width is divided among the heads. Counted on torch's meta device.
#[test]
fn heads_of_glm_ocr_divide_the_width() {
    let config = config!("tiny--glm_ocr");
    let width = "  \"head_dim\": 16,\n";
    assert!(config.contains(width));
    for (changed, wanted) in [
        (config.replace(width, ""), 226_416),
        (config.replace(width, "\"head_dim\": 24,"), 244_848),
    ] {
        let s = read("ocr", &changed, &[]).unwrap();
        assert_eq!(super::huggingface::parameters(&s), wanted);
        assert!((s.model.norm_eps - 1e-5).abs() < 1e-12);
    }
}

/// Windows of one patch are not shifted. Counted on torch's meta device.
#[test]
fn windows_of_one_patch_are_not_shifted() {
    for (config, wanted) in [
        (config!("tiny--swin"), 208_078),
        (config!("tiny--swinv2"), 225_470),
    ] {
        let changed = config.replace("\"window_size\": 4", "\"window_size\": 1");
        assert_ne!(changed, config);
        let s = read("window", &changed, &[]).unwrap();
        assert_eq!(super::huggingface::parameters(&s), wanted);
        let report = crate::check::check(&crate::plan(&s).unwrap());
        assert!(report.violations.is_empty(), "{report:?}");
    }
}

/// Each stage has a quarter of the rows of the one before, and attention sees windows of 16 rows.
#[test]
fn model_flops_of_stages_count_the_rows_of_each() {
    let s = read(
        "swin-flops",
        config!("tiny--swin"),
        &["train.micro_batch=1"],
    )
    .unwrap();
    let block = |w: u64| 4 * w * w + 2 * w * 4 * w;
    let patches = 48 * 24 * 256;
    let blocks = 2 * block(24) * 256 + 2 * block(48) * 64 + block(96) * 16;
    let merges = (4 * 24) * 48 * 64 + (4 * 48) * 96 * 16;
    let head = 2 * 96;
    let pairs = 16 * (2 * 24 * 256 + 2 * 48 * 64 + 96 * 16);
    // Twice as much in backward as in forward.
    let flops = 6 * (patches + blocks + merges + head) + 3 * 4 * pairs;
    assert_eq!(crate::models::graph(&s).model_flops.0, flops);
}

/// A type that stands for another one in a file with certain fields does so as an option, too.
#[test]
fn a_type_that_is_asked_for_may_stand_for_another_one() {
    let dense = config!("tiny--gemma4_text");
    let experts = [
        ("\"enable_moe_block\": false", "\"enable_moe_block\": true"),
        (
            "\"moe_intermediate_size\": null",
            "\"moe_intermediate_size\": 24",
        ),
        ("\"num_experts\": null", "\"num_experts\": 4"),
        ("\"top_k_experts\": null", "\"top_k_experts\": 2"),
    ]
    .iter()
    .fold(dense.to_owned(), |file, (from, to)| file.replace(from, to));
    let s = read("gemma4", &experts, &["model.model_type=gemma4_text"]).unwrap();
    assert_eq!(
        s.model.options.model_type.as_deref(),
        Some("gemma4_moe_text")
    );
}
