//! More types that put a vision or audio tower in front of a language model.

use super::wrappers::{
    DEPTH, HEADS, INNER, INTERNVL, PATCHES, Tower, WIDTH, audioflamingo3, clip, internvl_of,
    merged, qwen2_5_vl, siglip_of, with,
};
use crate::models::hf::{Fields, HfWrapper, Ties, no_tower};
use serde_json::{Value, json};

/// The tower of Qwen2.5-VL with fewer heads of keys than of queries.
fn exaone4_5(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let heads = t.int(&["num_key_value_heads"], 8);
    Ok(with(qwen2_5_vl(file)?, json!({ "kv_heads": heads })))
}

/// The tower of InternVL, whose attention has biases.
fn qianfan_ocr(file: Fields<'_>) -> Result<Value, String> {
    internvl_of(file, INTERNVL, true)
}

/// The tower of InternVL in files of the class that comes with them.
fn internvl_chat(file: Fields<'_>) -> Result<Value, String> {
    internvl_of(file, ["qkv_bias", "qk_normalization"], false)
}

/// SigLIP's blocks over rotated patches, of which squares are averaged before the projector.
fn video_llama_3(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let merge = t.outer("merge_size", 2);
    Ok(with(
        siglip_of(&t, [12, 768, 12, 3072], 16)?,
        json!({
            "rotary": true,
            "positions": 0,
            "patches": PATCHES,
            "pooling_head": false,
            "merge": merge * merge,
            "pool": true,
            "projector_layers": [t.text("hidden_size", 4096)],
        }),
    ))
}

/// SigLIP with rotated patches, of which four become one token.
fn paddleocr_vl(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let tower = siglip_of(&t, [27, 1152, 16, 4304], 14)?;
    let (merge, width) = (merged(&t, 2), t.int(WIDTH, 1152));
    Ok(with(
        tower,
        json!({
            "rotary": true,
            "positions": t.square(384, 14),
            "patches": PATCHES,
            "pooling_head": false,
            "merge": merge,
            "projector_norm": "patch",
            "projector_layers": [merge * width],
        }),
    ))
}

/// CLIP, of which a projector with a norm reads several blocks. The plan has the last block in
/// place of one of them.
fn vipllava(file: Fields<'_>) -> Result<Value, String> {
    let whole = file("vision_config").unwrap_or_else(|| json!({}));
    let defaults = json!({
        "intermediate_size": 4096,
        "hidden_size": 1024,
        "patch_size": 14,
        "image_size": 336,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    });
    let t = Tower {
        file,
        config: with(defaults, whole),
    };
    let given = file("vision_feature_layer").or_else(|| file("vision_feature_layers"));
    let given = given.unwrap_or_else(|| json!([-2, -5, -8, -11, 6]));
    let layers = t.int(DEPTH, 24) as i64;
    let read = match &given {
        Value::Array(list) => list.clone(),
        one => vec![one.clone()],
    };
    // The first of the hidden states is the input of the first block.
    let block = |of: &Value| {
        let n = of.as_i64()?;
        let at = if n < 0 { layers + n } else { n - 1 };
        u64::try_from(at).ok().filter(|at| (*at as i64) < layers)
    };
    let read: Option<Vec<u64>> = read.iter().map(block).collect();
    let Some(mut read) = read.filter(|read| !read.is_empty()) else {
        return Err(format!(
            "`vision_feature_layer` must be results of the tower's blocks, not {given}"
        ));
    };
    read.sort_unstable();
    read.pop();
    let mut tower = with(
        clip(&t)?,
        json!({
            "projector_norm": "layer_merged",
            "projector_layers": [t.text("hidden_size", 4096)],
        }),
    );
    if !read.is_empty() {
        tower["picked"] = read.into();
    }
    Ok(tower)
}

/// Whisper's convolutions, and blocks of rotated rows without a table of positions; four rows
/// become one token.
fn glmasr(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::of_sound(file);
    let shape = t.shape([(DEPTH, 32), (WIDTH, 1280), (HEADS, 20), (INNER, 5120)]);
    let [layers, hidden, heads, ffn] = shape;
    if !ffn.is_multiple_of(hidden.max(1)) {
        return Err(format!(
            "`audio_config.intermediate_size` ({ffn}) must be divisible by `hidden_size` ({hidden})"
        ));
    }
    let kv_heads = t.int(&["num_key_value_heads"], heads);
    Ok(json!({
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "activation": t.activation("gelu")?,
        "key_bias": false,
        "rotary": true,
        "mel_bins": t.int(&["num_mel_bins"], 128),
        "patches": t.int(&["max_position_embeddings"], 1500),
        "positions": 0,
        "merge": ffn / hidden.max(1),
        "projector_layers": [2 * t.text("hidden_size", 2048)],
    }))
}

pub(super) const TYPES: &[HfWrapper] = &[
    HfWrapper {
        model_type: "exaone4_5",
        architecture: "Exaone4_5_ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("exaone4", "exaone4"), ("exaone4_5_text", "exaone4")],
        vision: exaone4_5,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qianfan_ocr",
        architecture: "QianfanOCRForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3", "qwen3")],
        vision: qianfan_ocr,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "internvl_chat",
        architecture: "InternVLChatModel",
        ties: Ties::Text,
        text: &[("qwen2", "qwen2")],
        vision: internvl_chat,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "video_llama_3",
        architecture: "VideoLlama3ForConditionalGeneration",
        ties: Ties::Either,
        text: &[("qwen2", "qwen2")],
        vision: video_llama_3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "paddleocr_vl",
        architecture: "PaddleOCRVLForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("paddleocr_vl_text", "ernie4_5")],
        vision: paddleocr_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "vipllava",
        architecture: "VipLlavaForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("llama", "llama")],
        vision: vipllava,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "glmasr",
        architecture: "GlmAsrForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("llama", "llama")],
        vision: glmasr,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "musicflamingo",
        architecture: "MusicFlamingoForConditionalGeneration",
        ties: Ties::Never,
        text: &[("qwen2", "qwen2")],
        // Rows are rotated without parameters.
        vision: audioflamingo3,
        audio: no_tower,
    },
];
