//! Types that put an audio tower in front of a language model, alone or next to a vision tower.

use super::wrappers::{self, Tower, qwen2_5_vl, qwen3_vl, sound, with};
use crate::models::hf::{Fields, HfWrapper, Ties, no_tower};
use serde_json::{Value, json};

/// Frames of thirty seconds.
pub(super) const FRAMES: u64 = 3000;

/// Returns `audio_config.output_dim`, which must be the width of the language model.
fn output_width(t: &Tower<'_>) -> Result<(), String> {
    let width = t.int(&["output_dim"], 3584);
    t.same_width("audio_config.output_dim", width)
}

/// The tower of Qwen2.5-VL with separate queries, keys and values.
fn qwen2_5_omni_images(file: Fields<'_>) -> Result<Value, String> {
    Ok(with(qwen2_5_vl(file)?, json!({ "packed_qkv": false })))
}

/// Whisper's encoder with attention within chunks; pairs of rows are averaged. Nothing reads the
/// rows for the start and end of a sound.
fn qwen2_5_omni_sounds(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::of_sound(file);
    output_width(&t)?;
    let rows = FRAMES / 2;
    Ok(with(
        sound(&t)?,
        json!({
            "patches": rows,
            "positions": 0,
            "fixed_positions": false,
            "sinusoids": true,
            "attention_chunk": t.int(&["n_window"], 100).max(1),
            "merge": 2,
            "pool": true,
            "post_norm": false,
            "projector_norm": "patch",
            "unused_rows": 2,
        }),
    ))
}

/// Rows of sines and convolutions over two dimensions before Whisper's blocks, which attend within
/// chunks; two layers project them.
fn qwen3_sounds(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::of_sound(file);
    output_width(&t)?;
    let chunk = 2 * t.int(&["n_window"], 50).max(1);
    let left = (0..3).fold(chunk, |n, _| n.div_ceil(2));
    let seen = t.int(&["n_window_infer"], 800) / chunk;
    let tower = sound(&t)?;
    let channels = t.int(&["downsample_hidden_size"], 480);
    let width = tower["hidden"].clone();
    Ok(with(
        tower,
        json!({
            "key_bias": true,
            "patches": FRAMES / chunk * left,
            "positions": 0,
            "fixed_positions": false,
            "sinusoids": true,
            "attention_chunk": (seen * left).max(1),
            "subsampling": {
                "channels": [channels, channels, channels],
                "separable": false,
                "activation": "gelu",
                "projection_bias": false,
                "chunk": chunk,
            },
            "projector_layers": [width],
        }),
    ))
}

/// The tower of Qwen3-Omni with other defaults.
fn qwen3_asr(file: Fields<'_>) -> Result<Value, String> {
    let own = file("audio_config").unwrap_or_else(|| json!({}));
    let defaults = json!({
        "encoder_layers": 24,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "d_model": 1024,
    });
    let config = with(defaults, own);
    qwen3_sounds(&|name| match name {
        "audio_config" => Some(config.clone()),
        _ => file(name),
    })
}

/// Granite Speech: conformers that attend within chunks, and learned rows that attend to windows of
/// their rows.
fn granite_speech(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower {
        file,
        config: file("encoder_config").unwrap_or_else(|| json!({})),
    };
    let [layers, hidden, heads, multiple, chunk, reach] = [
        ("num_layers", 10),
        ("hidden_dim", 1024),
        ("num_heads", 8),
        ("feedforward_mult", 4),
        ("context_size", 200),
        ("max_pos_emb", 512),
    ]
    .map(|(name, default)| t.int(&[name], default));
    let dim = hidden / heads.max(1);
    let own = t.int(&["dim_head"], dim);
    if own != dim {
        return Err(format!(
            "`encoder_config.dim_head` ({own}) must be {dim}, as `hidden_dim` and `num_heads` say"
        ));
    }
    let former = file("projector_config").unwrap_or_else(|| json!({}));
    let of = |name: &str, default: u64| {
        let given = former.get(name).and_then(Value::as_u64);
        given.unwrap_or(default)
    };
    let outer = of("encoder_hidden_size", 1408);
    if outer != hidden {
        return Err(format!(
            "`projector_config.encoder_hidden_size` ({outer}) must be `encoder_config.hidden_dim` ({hidden})"
        ));
    }
    let (width, q_heads) = (of("hidden_size", 768), of("num_attention_heads", 12).max(1));
    let (window, rate) = (
        t.outer("window_size", 15),
        t.outer("downsample_rate", 5).max(1),
    );
    Ok(json!({
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": multiple * hidden,
        "qkv_bias": false,
        "activation": "silu",
        "conformer": {
            "kernel": t.int(&["conv_kernel_size"], 15),
            "expansion": t.int(&["conv_expansion_factor"], 2),
            "depthwise_bias": false,
            "distances": "keys",
            "distance_rows": 2 * reach + 1,
            "packed_kv": true,
            "chunk": chunk,
            "scored_block": layers / 2,
            "scores": t.int(&["output_dim"], 42),
        },
        "patch_dim": t.int(&["input_dim"], 160),
        "patches": FRAMES / 2,
        "positions": 0,
        "post_norm": false,
        "latents": window / rate,
        "latent_window": window,
        "latent_width": width,
        "latent_layers": of("num_hidden_layers", 12),
        "latent_cross": of("cross_attention_frequency", 2),
        "latent_ffn": of("intermediate_size", 3072),
        "latent_heads": [q_heads, q_heads, width / q_heads],
    }))
}

/// Gemma 4's audio tower: conformers that attend within chunks and to positions before them.
/// Null without one.
///
/// # Errors
/// Sizes that do not fit together.
fn gemma4_sounds(file: Fields<'_>) -> Result<Value, String> {
    if file("audio_config").is_none() {
        return Ok(Value::Null);
    }
    let t = Tower::of_sound(file);
    let [layers, hidden, heads] = [
        ("num_hidden_layers", 12),
        ("hidden_size", 1024),
        ("num_attention_heads", 8),
    ]
    .map(|(name, default)| t.int(&[name], default));
    let channels = t.get("subsampling_conv_channels").cloned();
    let channels = channels.unwrap_or_else(|| json!([128, 32]));
    let Some(bands) = channels.get(0).and_then(Value::as_u64) else {
        return Err(format!(
            "`audio_config.subsampling_conv_channels` must be a list of numbers, not {channels}"
        ));
    };
    if channels.as_array().is_none_or(|list| list.len() != 2) {
        return Err(format!(
            "`audio_config.subsampling_conv_channels` must be two numbers, not {channels}"
        ));
    }
    let cap = t.get("attention_logit_cap").and_then(Value::as_f64);
    Ok(json!({
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": 4 * hidden,
        "norm": "rms_norm",
        "bias": false,
        "activation": t.activation("silu")?,
        "conformer": {
            "kernel": t.int(&["conv_kernel_size"], 5),
            "pointwise_bias": false,
            "depthwise_bias": false,
            "norm": "rms",
            "linear": true,
            "distances": "projected",
            "chunk": t.int(&["attention_chunk_size"], 12),
            "past": t.int(&["attention_context_left"], 13).saturating_sub(1),
            "future": t.int(&["attention_context_right"], 0),
            "softcap": cap.unwrap_or(50.0),
            "post_norms": true,
            "clamps": true,
        },
        // As many bands as the class reads.
        "mel_bins": bands / 4 * 4,
        "subsampling": {
            "channels": channels,
            "bias": false,
            "separable": false,
            "norms": true,
            "projection_bias": false,
        },
        "patches": FRAMES / 4,
        "positions": 0,
        "post_norm": false,
        "patch_layers": [t.int(&["output_proj_dims"], 1536)],
        "patch_layer_bias": true,
        "projector_norm": "rms_patch_no_weight",
        "projector_bias": false,
    }))
}

/// The first tower of Gemma 4: the vision tower, or the audio tower alone.
fn gemma4(file: Fields<'_>) -> Result<Value, String> {
    match file("vision_config") {
        Some(_) => wrappers::gemma4(file),
        None => gemma4_sounds(file),
    }
}

/// The second tower of Gemma 4.
fn gemma4_next_to_images(file: Fields<'_>) -> Result<Value, String> {
    match file("vision_config") {
        Some(_) => gemma4_sounds(file),
        None => Ok(Value::Null),
    }
}

pub(super) const TYPES: &[HfWrapper] = &[
    HfWrapper {
        model_type: "gemma4",
        architecture: "Gemma4ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("gemma4_text", "gemma4_text")],
        vision: gemma4,
        audio: gemma4_next_to_images,
    },
    HfWrapper {
        model_type: "granite_speech",
        architecture: "GraniteSpeechForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("granite", "granite")],
        vision: granite_speech,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen2_5_omni_thinker",
        architecture: "Qwen2_5OmniThinkerForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen2_5_omni_text", "qwen2")],
        vision: qwen2_5_omni_images,
        audio: qwen2_5_omni_sounds,
    },
    HfWrapper {
        model_type: "qwen3_omni_moe_thinker",
        architecture: "Qwen3OmniMoeThinkerForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3_omni_moe_text", "qwen3_moe")],
        vision: qwen3_vl,
        audio: qwen3_sounds,
    },
    HfWrapper {
        model_type: "qwen3_asr",
        architecture: "Qwen3ASRForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3", "qwen3")],
        vision: qwen3_asr,
        audio: no_tower,
    },
];
