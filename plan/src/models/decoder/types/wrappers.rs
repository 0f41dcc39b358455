//! Types that put a vision or audio tower in front of a language model.
//!
//! A file has the tower in `vision_config` or `audio_config` and the language model in
//! `text_config`. One image per sample is planned: of the size that the tower was trained with, or
//! of 1,024 patches in towers that take images of any size. A sound fills the tower's positions.

use crate::models::hf::{Fields, HfWrapper, Ties, no_tower};
use serde_json::{Value, json};

/// Patches of a sample in towers that take images of any size.
pub(super) const PATCHES: u64 = 1024;

/// `vision_config` of a file, with the defaults of its class.
pub(super) struct Tower<'f> {
    pub(super) file: Fields<'f>,
    pub(super) config: Value,
}

impl<'f> Tower<'f> {
    pub(super) fn new(file: Fields<'f>) -> Result<Self, String> {
        let config = file("vision_config").ok_or("`vision_config` is missing")?;
        Ok(Self { file, config })
    }

    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.config.get(name).filter(|v| !v.is_null())
    }

    /// Reads `audio_config`, which may be absent.
    pub(super) fn of_sound(file: Fields<'f>) -> Self {
        let config = file("audio_config").unwrap_or_else(|| json!({}));
        Self { file, config }
    }

    /// Returns the first of these integers; of a list, its first number.
    pub(super) fn int(&self, names: &[&str], default: u64) -> u64 {
        let number = |v: &Value| v.as_u64().or_else(|| v.get(0)?.as_u64());
        let found = names.iter().find_map(|n| self.get(n).and_then(number));
        found.unwrap_or(default)
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(default)
    }

    /// Returns an integer of the whole file.
    pub(super) fn outer(&self, name: &str, default: u64) -> u64 {
        (self.file)(name)
            .and_then(|n| n.as_u64())
            .unwrap_or(default)
    }

    /// Returns an integer of the language model.
    pub(super) fn text(&self, name: &str, default: u64) -> u64 {
        let text = (self.file)("text_config");
        let found = text.as_ref().and_then(|t| t.get(name)?.as_u64());
        found.unwrap_or_else(|| self.outer(name, default))
    }

    /// Returns the activation of a word.
    pub(super) fn activation(&self, default: &'static str) -> Result<&'static str, String> {
        let given = self.get("hidden_act").and_then(Value::as_str);
        Ok(match given.unwrap_or(default) {
            "gelu" => "gelu",
            // `x * sigmoid(1.702 x)`, which costs as much.
            "quick_gelu" | "gelu_pytorch_tanh" | "gelu_new" => "gelu_tanh",
            "silu" => "silu",
            other => return Err(format!("`vision_config.hidden_act` {other:?} is not known")),
        })
    }

    /// Returns the shape of the blocks, from the names and defaults of each size.
    pub(super) fn shape(&self, sizes: [(&[&str], u64); 4]) -> [u64; 4] {
        sizes.map(|(names, default)| self.int(names, default))
    }

    /// Refuses a tower whose results are not as wide as the language model.
    pub(super) fn same_width(&self, name: &str, width: u64) -> Result<(), String> {
        let text = (self.file)("text_config");
        let text = text.as_ref().and_then(|t| t.get("hidden_size")?.as_u64());
        match text {
            Some(hidden) if hidden != width => Err(format!(
                "`{name}` ({width}) must be `text_config.hidden_size` ({hidden})"
            )),
            _ => Ok(()),
        }
    }

    /// Returns the patches of an image of the size that the tower was trained with.
    pub(super) fn square(&self, image: u64, patch: u64) -> u64 {
        let edge = self.int(&["image_size"], image) / self.int(&["patch_size"], patch).max(1);
        edge * edge
    }

    /// Returns the numbers of one patch.
    pub(super) fn patch_dim(&self, patch: u64, frames: u64) -> u64 {
        let edge = self.int(&["patch_size"], patch);
        let frames = self.int(&["temporal_patch_size"], frames);
        self.int(&["in_channels", "num_channels", "in_chans"], 3) * frames * edge * edge
    }
}

pub(super) const DEPTH: &[&str] = &["depth", "num_hidden_layers", "vt_num_hidden_layers"];
pub(super) const WIDTH: &[&str] = &["hidden_size", "embed_dim", "vt_hidden_size"];
pub(super) const HEADS: &[&str] = &["num_heads", "num_attention_heads", "vt_num_attention_heads"];
pub(super) const INNER: &[&str] = &["intermediate_size", "vt_intermediate_size"];

/// Returns the blocks' sizes as keys.
pub(super) fn blocks([layers, hidden, heads, ffn]: [u64; 4]) -> Value {
    json!({ "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn })
}

/// Returns the fields of both objects.
pub(super) fn with(mut all: Value, more: Value) -> Value {
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    all
}

/// Adjacent patches, of a square, that become one token.
pub(super) fn merged(t: &Tower<'_>, default: u64) -> u64 {
    let edge = t.int(&["spatial_merge_size", "merge_kernel_size"], default);
    edge * edge
}

pub(super) fn qwen3_vl(file: Fields<'_>) -> Result<Value, String> {
    qwen3(file, json!([8, 16, 24]))
}

fn qwen3_5(file: Fields<'_>) -> Result<Value, String> {
    qwen3(file, json!([]))
}

/// The tower of Qwen3-VL, whose results of these blocks have projectors of their own unless the
/// file lists others.
fn qwen3(file: Fields<'_>, deepstack: Value) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([(DEPTH, 27), (WIDTH, 1152), (HEADS, 16), (INNER, 4304)]);
    let merge = merged(&t, 2);
    t.same_width(
        "vision_config.out_hidden_size",
        t.int(&["out_hidden_size"], 3584),
    )?;
    let mut all = with(
        blocks(shape),
        json!({
            "activation": t.activation("gelu_pytorch_tanh")?,
            "packed_qkv": true,
            "rotary": true,
            "positions": t.int(&["num_position_embeddings"], 2304),
            "patch_dim": t.patch_dim(16, 2),
            "patches": PATCHES,
            "post_norm": false,
            "merge": merge,
            "projector_norm": "patch",
            "projector_layers": [merge * shape[1]],
        }),
    );
    let listed = t
        .get("deepstack_visual_indexes")
        .cloned()
        .unwrap_or(deepstack);
    if listed.as_array().is_some_and(|list| !list.is_empty()) {
        all["deepstack"] = listed;
    }
    Ok(all)
}

pub(super) fn qwen2_5_vl(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([
        (DEPTH, 32),
        (&["hidden_size"], 3584),
        (HEADS, 16),
        (INNER, 3420),
    ]);
    let merge = merged(&t, 2);
    t.same_width(
        "vision_config.out_hidden_size",
        t.int(&["out_hidden_size"], 3584),
    )?;
    Ok(with(
        blocks(shape),
        json!({
            "norm": "rms_norm",
            "activation": t.activation("silu")?,
            "gated_mlp": true,
            "packed_qkv": true,
            "rotary": true,
            "positions": 0,
            "patch_dim": t.patch_dim(14, 2),
            "patch_bias": false,
            "patches": PATCHES,
            "post_norm": false,
            "merge": merge,
            "projector_norm": "patch",
            "projector_layers": [merge * shape[1]],
        }),
    ))
}

fn qwen2_vl(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let [layers, hidden, heads, _] =
        t.shape([(DEPTH, 32), (&["embed_dim"], 1280), (HEADS, 16), (INNER, 0)]);
    let ratio = t.get("mlp_ratio").and_then(Value::as_f64).unwrap_or(4.0);
    let merge = merged(&t, 2);
    t.same_width("vision_config.hidden_size", t.int(&["hidden_size"], 3584))?;
    Ok(with(
        blocks([layers, hidden, heads, (ratio * hidden as f64) as u64]),
        json!({
            "activation": t.activation("quick_gelu")?,
            "packed_qkv": true,
            "rotary": true,
            "positions": 0,
            "patch_dim": t.patch_dim(14, 2),
            "patch_bias": false,
            "patches": PATCHES,
            "post_norm": false,
            "merge": merge,
            "projector_norm": "patch",
            "projector_layers": [merge * hidden],
        }),
    ))
}

/// SigLIP's tower.
pub(super) fn siglip(t: &Tower<'_>) -> Result<Value, String> {
    siglip_of(t, [12, 768, 12, 3072], 16)
}

/// The same in a class with other defaults: of the blocks' sizes, and of a patch's edge.
pub(super) fn siglip_of(t: &Tower<'_>, sizes: [u64; 4], edge: u64) -> Result<Value, String> {
    let [layers, width, heads, inner] = sizes;
    let shape = t.shape([
        (DEPTH, layers),
        (WIDTH, width),
        (HEADS, heads),
        (INNER, inner),
    ]);
    let patches = t.square(224, edge);
    Ok(with(
        blocks(shape),
        json!({
            "activation": t.activation("gelu_pytorch_tanh")?,
            "positions": patches,
            "patch_dim": t.patch_dim(edge, 1),
            "patches": patches,
            "pooling_head": t.flag("vision_use_head", true),
        }),
    ))
}

/// Whisper's encoder: two convolutions over the frames of a sound, and blocks whose keys have no
/// bias. `get` returns fields, `sizes` are the blocks' by default, `bins` the bands.
///
/// # Errors
/// Activations that are not known.
pub(super) fn whisper(
    get: Fields<'_>,
    [layers, hidden, heads, ffn]: [u64; 4],
    bins: u64,
) -> Result<Value, String> {
    let int = |names: [&str; 2], default: u64| {
        let found = names.iter().find_map(|name| get(name)?.as_u64());
        found.unwrap_or(default)
    };
    let word = get("activation_function");
    let activation = match word.as_ref().and_then(Value::as_str).unwrap_or("gelu") {
        word @ ("gelu" | "relu" | "silu") => word,
        "gelu_new" => "gelu_tanh",
        other => return Err(format!("`activation_function` {other:?} is not known")),
    };
    let rows = int(["max_source_positions"; 2], 1500);
    let shape = [
        int(["encoder_layers", "num_hidden_layers"], layers),
        int(["d_model", "hidden_size"], hidden),
        int(["encoder_attention_heads", "num_attention_heads"], heads),
        int(["encoder_ffn_dim", "intermediate_size"], ffn),
    ];
    Ok(with(
        blocks(shape),
        json!({
            "activation": activation,
            "key_bias": false,
            "mel_bins": int(["num_mel_bins"; 2], bins),
            "patches": rows,
            "positions": rows,
            "fixed_positions": true,
        }),
    ))
}

/// The tower of Qwen2-Audio and Voxtral.
pub(super) fn sound(t: &Tower<'_>) -> Result<Value, String> {
    whisper(&|name| t.get(name).cloned(), [32, 1280, 20, 5120], 128)
}

/// Pairs of rows are averaged before the last norm.
pub(super) fn qwen2_audio(file: Fields<'_>) -> Result<Value, String> {
    let tower = sound(&Tower::of_sound(file))?;
    Ok(with(
        tower,
        json!({ "merge": 2, "pool": true, "post_norm": false, "projector_norm": "patch" }),
    ))
}

/// Checks that the activation between the layers of a projector is GELU.
fn check_projector_gelu(file: Fields<'_>) -> Result<(), String> {
    match file("projector_hidden_act")
        .as_ref()
        .and_then(Value::as_str)
    {
        None | Some("gelu") => Ok(()),
        Some(other) => Err(format!(
            "`projector_hidden_act` must be gelu, not {other:?}"
        )),
    }
}

/// As Qwen2-Audio, with a projector of two layers.
pub(super) fn audioflamingo3(file: Fields<'_>) -> Result<Value, String> {
    let width = Tower::of_sound(file).text("hidden_size", 4096);
    check_projector_gelu(file)?;
    let bias = file("projector_bias") != Some(false.into());
    Ok(with(
        qwen2_audio(file)?,
        json!({ "projector_layers": [width], "projector_bias": bias }),
    ))
}

/// Adjacent rows are concatenated to the width that `intermediate_size` says.
fn voxtral(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::of_sound(file);
    let tower = sound(&t)?;
    let width = tower["hidden"].as_u64().unwrap_or(1).max(1);
    let merged = t.int(&["intermediate_size", "encoder_ffn_dim"], 5120);
    if !merged.is_multiple_of(width) {
        return Err(format!(
            "`audio_config.intermediate_size` ({merged}) must be divisible by `hidden_size` ({width})"
        ));
    }
    check_projector_gelu(file)?;
    Ok(with(
        tower,
        json!({
            "merge": merged / width,
            "projector_layers": [t.text("hidden_size", 3072)],
            "projector_bias": false,
        }),
    ))
}

/// The tower of Llama 3.2 Vision: the blocks of the language model attend to the rows of all tiles.
fn mllama(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file).unwrap_or_else(|_| Tower {
        file,
        config: json!({}),
    });
    let [layers, hidden, heads, ffn] = t.shape([
        (DEPTH, 32),
        (WIDTH, 1280),
        (&["attention_heads", "num_attention_heads"], 16),
        (INNER, 5120),
    ]);
    let picked = t.get("intermediate_layers_indices").cloned();
    let picked = picked.unwrap_or_else(|| json!([3, 7, 15, 23, 30]));
    let list = picked.as_array().map_or(&[][..], Vec::as_slice);
    let inside = |n: &Value| n.as_u64().is_some_and(|n| n < layers);
    let rising = list.windows(2).all(|w| w[0].as_u64() < w[1].as_u64());
    if !list.iter().all(inside) || !rising {
        return Err(format!(
            "`vision_config.intermediate_layers_indices` must be rising numbers of the {layers} blocks, not {picked}"
        ));
    }
    let width = hidden * (1 + list.len() as u64);
    let output = t.int(&["vision_output_dim"], 7680);
    if output != width {
        return Err(format!(
            "`vision_config.vision_output_dim` ({output}) must be {width}, the width of the last block and of the {} of `intermediate_layers_indices`",
            list.len()
        ));
    }
    let shapes = t.get("supported_aspect_ratios").and_then(Value::as_array);
    let tiles = t.int(&["max_num_tiles"], 4);
    let patches = t.square(448, 14);
    Ok(with(
        blocks([layers, hidden, heads, ffn]),
        json!({
            "activation": t.activation("gelu")?,
            "attention_bias": false,
            "patch_dim": t.patch_dim(14, 1),
            "patch_bias": false,
            "patches": tiles * patches,
            "positions": 0,
            "class_token": true,
            "pre_norm": true,
            "tiles": tiles,
            // One row more than shapes, for no image.
            "tile_rows": 1 + shapes.map_or(8, Vec::len),
            "gated_layers": t.int(&["num_global_layers"], 8),
            "picked": picked,
            "memory": true,
        }),
    ))
}

/// CLIP's tower.
pub(super) fn clip(t: &Tower<'_>) -> Result<Value, String> {
    let shape = t.shape([(DEPTH, 12), (WIDTH, 768), (HEADS, 12), (INNER, 3072)]);
    let patches = t.square(224, 32);
    Ok(with(
        blocks(shape),
        json!({
            "activation": t.activation("quick_gelu")?,
            "positions": patches + 1,
            "patch_dim": t.patch_dim(32, 1),
            "patch_bias": false,
            "patches": patches,
            "class_token": true,
            "pre_norm": true,
        }),
    ))
}

/// The names under which old files of CLIP have its fields, too, with the fields that decide shapes
/// and their defaults.
const OLD_FIELDS_OF_CLIP: [(&str, &[(&str, u64)]); 2] = [
    (
        "text_config_dict",
        &[
            ("hidden_size", 512),
            ("intermediate_size", 2048),
            ("num_hidden_layers", 12),
            ("num_attention_heads", 8),
            ("vocab_size", 49408),
            ("max_position_embeddings", 77),
            ("projection_dim", 512),
        ],
    ),
    (
        "vision_config_dict",
        &[
            ("hidden_size", 768),
            ("intermediate_size", 3072),
            ("num_hidden_layers", 12),
            ("num_attention_heads", 12),
            ("image_size", 224),
            ("patch_size", 32),
            ("num_channels", 3),
            ("projection_dim", 512),
        ],
    ),
];

/// Checks that fields under an old name say the same as those under the new one: transformers
/// builds a configuration of the old ones alone, which replaces the other.
///
/// # Errors
/// If a field differs.
fn old_fields(file: Fields<'_>, name: &str, defaults: &[(&str, u64)]) -> Result<(), String> {
    let Some(old) = file(name).filter(|given| *given != json!({})) else {
        return Ok(());
    };
    let other = name.trim_end_matches("_dict");
    let new = file(other).unwrap_or_else(|| json!({}));
    for (field, default) in defaults {
        let of = |config: &Value| {
            config
                .get(*field)
                .and_then(Value::as_u64)
                .unwrap_or(*default)
        };
        if of(&old) != of(&new) {
            return Err(format!(
                "`{name}` must be null: its fields belong into `{other}`, whose `{field}` is {}, not {}",
                of(&new),
                of(&old)
            ));
        }
    }
    Ok(())
}

/// The tower of CLIP, which makes one vector of an image.
fn clip_whole(file: Fields<'_>) -> Result<Value, String> {
    for (name, defaults) in OLD_FIELDS_OF_CLIP {
        old_fields(file, name, defaults)?;
    }
    let t = Tower::new(file).unwrap_or_else(|_| Tower {
        file,
        config: json!({}),
    });
    let text = file("text_config");
    let inner = text
        .as_ref()
        .and_then(|t| t.get("projection_dim")?.as_u64());
    let (inner, outer) = (inner.unwrap_or(512), t.outer("projection_dim", 512));
    if inner != outer {
        return Err(format!(
            "`text_config.projection_dim` ({inner}) must be `projection_dim` ({outer}), which the whole uses"
        ));
    }
    Ok(with(
        clip(&t)?,
        json!({ "vector": true, "projector_bias": false }),
    ))
}

/// The tower of SigLIP, whose pooled rows are one vector of an image.
fn siglip_whole(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file).unwrap_or_else(|_| Tower {
        file,
        config: json!({}),
    });
    if !t.flag("vision_use_head", true) {
        return Err("`vision_config.vision_use_head` must be true".to_owned());
    }
    let tower = siglip(&t)?;
    let text = t.text("projection_size", t.text("hidden_size", 768));
    match tower["hidden"].as_u64() {
        Some(width) if width != text => Err(format!(
            "`text_config.projection_size` ({text}) must be `vision_config.hidden_size` ({width})"
        )),
        _ => Ok(with(tower, json!({ "vector": true, "projector": false }))),
    }
}

/// The same with images of any shape: `num_patches` of them at most.
fn siglip2_whole(file: Fields<'_>) -> Result<Value, String> {
    let mut tower = siglip_whole(file)?;
    let vision = file("vision_config").unwrap_or_else(|| json!({}));
    let patches = vision.get("num_patches").and_then(Value::as_u64);
    for name in ["patches", "positions"] {
        tower[name] = patches.unwrap_or(256).into();
    }
    Ok(tower)
}

/// Pixtral's tower.
fn pixtral(t: &Tower<'_>) -> Result<Value, String> {
    let shape = t.shape([(DEPTH, 24), (WIDTH, 1024), (HEADS, 16), (INNER, 4096)]);
    Ok(with(
        blocks(shape),
        json!({
            "norm": "rms_norm",
            "activation": t.activation("gelu")?,
            "gated_mlp": true,
            "bias": false,
            "rotary": true,
            "positions": 0,
            "patch_dim": t.patch_dim(16, 1),
            "patch_bias": false,
            "patches": PATCHES,
            "pre_norm": true,
            "post_norm": false,
        }),
    ))
}

fn gemma3(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let tower = siglip(&t)?;
    let patches = tower["patches"].as_u64().unwrap_or(1);
    let tokens = t.outer("mm_tokens_per_image", 256).max(1);
    Ok(with(
        tower,
        json!({
            "merge": (patches / tokens).max(1),
            "pool": true,
            "projector_norm": "rms_patch",
            "projector_bias": false,
        }),
    ))
}

/// Gemma 4's tower: rows of a patch in two tables of positions, which are one here.
pub(super) fn gemma4(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let [layers, hidden, heads, ffn] =
        t.shape([(DEPTH, 16), (WIDTH, 768), (HEADS, 12), (INNER, 3072)]);
    let own = [
        ("head_dim", t.int(&["head_dim"], 64), hidden / heads.max(1)),
        (
            "num_key_value_heads",
            t.int(&["num_key_value_heads"], 12),
            heads,
        ),
    ];
    if let Some((name, given, wanted)) = own.iter().find(|(_, given, wanted)| given != wanted) {
        return Err(format!(
            "`vision_config.{name}` ({given}) must be {wanted}, as `hidden_size` and `num_attention_heads` say"
        ));
    }
    if t.flag("attention_bias", false) {
        return Err("`vision_config.attention_bias` must be false".to_owned());
    }
    let (edge, patch) = (
        t.int(&["pooling_kernel_size"], 3),
        t.int(&["patch_size"], 16),
    );
    let tokens = t.outer(
        "vision_soft_tokens_per_image",
        t.int(&["default_output_length"], 280),
    );
    Ok(with(
        blocks([layers, hidden, heads, ffn]),
        json!({
            "norm": "rms_norm",
            "norm_position": "both",
            "qk_norm": true,
            "activation": "gelu_tanh",
            "gated_mlp": true,
            "bias": false,
            "rotary": true,
            "positions": 2 * t.int(&["position_embedding_size"], 10240),
            "patch_dim": 3 * patch * patch,
            "patch_bias": false,
            "patches": tokens * edge * edge,
            "post_norm": false,
            "merge": edge * edge,
            "pool": true,
            "projector_norm": "rms_patch_no_weight",
            "projector_bias": false,
        }),
    ))
}

fn paligemma(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    t.same_width("projection_dim", t.outer("projection_dim", 2048))?;
    siglip(&t)
}

fn llava(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let kind = t.get("model_type").and_then(Value::as_str);
    let tower = match kind.unwrap_or("clip_vision_model") {
        "clip_vision_model" => clip(&t)?,
        "siglip_vision_model" => siglip(&t)?,
        "pixtral" => pixtral(&t)?,
        other => return Err(format!("`vision_config.model_type` {other:?} is not known")),
    };
    let bias = file("multimodal_projector_bias") != Some(false.into());
    let width = t.text("hidden_size", 4096);
    Ok(with(
        tower,
        json!({ "projector_layers": [width], "projector_bias": bias }),
    ))
}

/// SigLIP, with a projector of two layers.
fn deepseek_vl(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let width = t.text("hidden_size", 4096);
    Ok(with(siglip(&t)?, json!({ "projector_layers": [width] })))
}

/// The tower of GLM-OCR, whose queries and keys are normalized. Its projector's gated layer is
/// three times as wide as the language model, as an image has channels.
fn glm_ocr(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([(DEPTH, 24), (WIDTH, 1024), (HEADS, 16), (INNER, 4096)]);
    let out = t.int(&["out_hidden_size"], 1536);
    t.same_width("vision_config.out_hidden_size", out)?;
    let bias = t.flag("attention_bias", true);
    Ok(with(
        blocks(shape),
        json!({
            "norm": "rms_norm",
            "activation": t.activation("silu")?,
            "gated_mlp": true,
            "bias": bias,
            "packed_qkv": true,
            "qk_norm": true,
            "rotary": true,
            "positions": 0,
            "patch_dim": t.patch_dim(14, 2),
            "patches": PATCHES,
            "merge": merged(&t, 2),
            "projector_gate": out * t.int(&["in_channels"], 3),
        }),
    ))
}

/// LLaVA, with a learned row after those of the image.
fn llava_next(file: Fields<'_>) -> Result<Value, String> {
    Ok(with(llava(file)?, json!({ "newline": true })))
}

/// LLaVA-NeXT, with a pooling of frames that has no parameters.
fn llava_next_video(file: Fields<'_>) -> Result<Value, String> {
    let mode = file("spatial_pool_mode");
    match mode.as_ref().and_then(Value::as_str) {
        None | Some("average" | "max") => llava_next(file),
        Some(other) => Err(format!("`spatial_pool_mode` {other:?} is not planned")),
    }
}

/// The tower of GLM-4.1V, whose projector ends with a gated layer. Positions are added before the
/// first norm, not after it.
fn glm4v(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    if t.flag("attention_bias", false) {
        return Err("`vision_config.attention_bias` must be false".to_owned());
    }
    let out = t.int(&["out_hidden_size"], 4096);
    t.same_width("vision_config.out_hidden_size", out)?;
    let [layers, hidden, heads, gate] =
        t.shape([(DEPTH, 24), (WIDTH, 1536), (HEADS, 12), (INNER, 13696)]);
    Ok(with(
        blocks([layers, hidden, heads, out]),
        json!({
            "norm": "rms_norm",
            "activation": t.activation("silu")?,
            "gated_mlp": true,
            "bias": false,
            "packed_qkv": true,
            "rotary": true,
            "positions": t.square(336, 14),
            "patch_dim": t.patch_dim(14, 2),
            "patches": PATCHES,
            "pre_norm": true,
            "merge": merged(&t, 2),
            "projector_gate": gate,
        }),
    ))
}

/// SigLIP 2 with pixel shuffle (LFM2-VL).
fn lfm2_vl(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let patches = t.int(&["num_patches"], 256);
    let edge = t.outer("downsample_factor", 2);
    let norm = file("projector_use_layernorm") != Some(false.into());
    Ok(with(
        siglip(&t)?,
        json!({
            "patches": patches,
            "positions": patches,
            "merge": edge * edge,
            "projector_norm": if norm { "merged" } else { "none" },
            "projector_layers": [t.outer("projector_hidden_size", 2560)],
            "projector_bias": file("projector_bias") != Some(false.into()),
        }),
    ))
}

fn mistral3(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let tower = pixtral(&t)?;
    let (edge, hidden) = (t.outer("spatial_merge_size", 2), tower["hidden"].clone());
    // The layer that merges patches would have none.
    if file("multimodal_projector_bias") == Some(true.into()) {
        return Err("`multimodal_projector_bias` must be false".to_owned());
    }
    Ok(with(
        tower,
        json!({
            "merge": edge * edge,
            "projector_norm": "patch",
            "projector_layers": [hidden, t.text("hidden_size", 5120)],
            "projector_bias": false,
        }),
    ))
}

fn llama4(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file).unwrap_or_else(|_| Tower {
        file,
        config: json!({}),
    });
    let shape = t.shape([(DEPTH, 34), (WIDTH, 768), (HEADS, 16), (INNER, 5632)]);
    let patches = t.square(448, 14);
    let ratio = t.get("pixel_shuffle_ratio").and_then(Value::as_f64);
    let merge = ratio.unwrap_or(0.5).powi(-2).round() as u64;
    let [hidden, inner] = [shape[1], shape[3]];
    let widths = ["projector_input_dim", "projector_output_dim"].map(|n| t.int(&[n], 4096));
    let output = t.int(&["vision_output_dim"], 7680);
    // The defaults of the class are wider than what the layers read.
    let read = [merge * hidden, widths[0], widths[1]];
    let inputs = [inner, widths[1], output];
    if read.iter().zip(inputs).any(|(&read, input)| read > input) {
        return Err(format!(
            "the widths of the projector contradict each other: its layers get {read:?} numbers and read {inputs:?} (`intermediate_size`, `projector_output_dim`, `vision_output_dim`)"
        ));
    }
    let mut shape = blocks(shape);
    if read != inputs {
        shape["projector_inputs"] = json!(inputs);
    }
    Ok(with(
        shape,
        json!({
            "activation": t.activation("gelu")?,
            "positions": patches + 1,
            "patch_dim": t.patch_dim(14, 1),
            "patch_bias": false,
            "patches": patches,
            "class_token": true,
            "pre_norm": true,
            "merge": merge,
            "projector_layers": widths,
            "projector_bias": false,
        }),
    ))
}

fn kimi_k25(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([(DEPTH, 27), (WIDTH, 1152), (HEADS, 16), (INNER, 4304)]);
    let merge = merged(&t, 2);
    let (height, width) = ("init_pos_emb_height", "init_pos_emb_width");
    Ok(with(
        blocks(shape),
        json!({
            "activation": t.activation("gelu_pytorch_tanh")?,
            "rotary": true,
            "positions": t.int(&[height], 64) * t.int(&[width], 64),
            "patch_dim": t.patch_dim(14, 1),
            "patches": PATCHES,
            "merge": merge,
            "projector_norm": "patch",
            "projector_layers": [merge * shape[1]],
        }),
    ))
}

/// The tower of MiniMax-M3: patches are projected before and after they are merged.
fn minimax_m3_vl(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([(DEPTH, 32), (WIDTH, 1280), (HEADS, 16), (INNER, 5120)]);
    let merging = "img_token_compression_config";
    let nested = |name: &str| t.get(merging)?.get(name)?.as_u64();
    let edge = nested("spatial_merge_size").unwrap_or(2);
    let edge = t.int(&["spatial_merge_size"], edge);
    let frames = nested("temporal_patch_size").unwrap_or(2);
    let inner = t.outer("projector_hidden_size", 6144);
    Ok(with(
        blocks(shape),
        json!({
            "activation": t.activation("gelu")?,
            "rotary": true,
            "positions": 0,
            "patch_dim": t.patch_dim(14, frames),
            "patch_bias": false,
            "patches": PATCHES,
            "pre_norm": true,
            "post_norm": false,
            "merge": edge * edge,
            "patch_layers": [inner, t.text("hidden_size", 6144)],
            "projector_layers": [inner],
        }),
    ))
}

/// Names of InternVL's flags: whether attention has biases, and norms of queries and keys.
pub(super) const INTERNVL: [&str; 2] = ["attention_bias", "use_qk_norm"];

fn internvl(file: Fields<'_>) -> Result<Value, String> {
    internvl_of(file, INTERNVL, false)
}

/// The tower of InternVL, in a class whose attention has biases by default or not.
pub(super) fn internvl_of(
    file: Fields<'_>,
    [bias, qk_norm]: [&str; 2],
    biased: bool,
) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([(DEPTH, 24), (WIDTH, 1024), (HEADS, 16), (INNER, 4096)]);
    let kind = t.get("norm_type").and_then(Value::as_str);
    let kind = kind.unwrap_or("layer_norm");
    let normed = t.flag(qk_norm, false);
    let pooled = t.flag("use_mean_pooling", true);
    match (kind, normed, pooled) {
        ("layer_norm", false, _) | ("rms_norm", _, true) => {}
        ("layer_norm", true, _) => {
            return Err(format!(
                "`vision_config.{qk_norm}` needs `norm_type` \"rms_norm\": norms of two kinds are not planned"
            ));
        }
        ("rms_norm", _, false) => {
            return Err(
                "`vision_config.use_mean_pooling` must be true with `norm_type` \"rms_norm\": norms of two kinds are not planned"
                    .to_owned(),
            );
        }
        (other, ..) => {
            return Err(format!(
                "`vision_config.norm_type` must be layer_norm or rms_norm, not {other:?}"
            ));
        }
    }
    if t.flag("use_mask_token", false) {
        return Err("`vision_config.use_mask_token` must be false".to_owned());
    }
    let patches = t.square(448, 14);
    let has_table = t.flag("use_absolute_position_embeddings", true);
    let ratio = file("downsample_ratio").and_then(|x| x.as_f64());
    Ok(with(
        blocks(shape),
        json!({
            "activation": t.activation("gelu")?,
            "norm": kind,
            "whole_qk_norm": normed,
            "qkv_bias": t.flag(bias, biased),
            "layer_scale": true,
            "positions": if has_table { patches + 1 } else { 0 },
            "patch_dim": t.patch_dim(14, 1),
            "patches": patches,
            "class_token": true,
            "post_norm": !pooled,
            "merge": ratio.unwrap_or(0.5).powi(-2).round() as u64,
            "projector_norm": "layer_merged",
            "projector_layers": [t.text("hidden_size", 896)],
        }),
    ))
}

fn idefics3(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let edge = t.outer("scale_factor", 2);
    let mut tower = siglip_of(&t, [12, 1152, 16, 3072], 32)?;
    tower["pooling_head"] = false.into();
    Ok(with(
        tower,
        json!({ "merge": edge * edge, "projector_bias": false }),
    ))
}

/// SigLIP with pixel shuffle, whose projector ends with a gated layer (Aya Vision).
fn aya_vision(file: Fields<'_>) -> Result<Value, String> {
    let width = Tower::new(file)?.text("hidden_size", 8192);
    cohere_vision(file, width, "layer_merged")
}

/// The same without a norm (Command A Vision).
fn cohere2_vision(file: Fields<'_>) -> Result<Value, String> {
    cohere_vision(file, 36864, "none")
}

fn cohere_vision(file: Fields<'_>, width: u64, norm: &str) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let edge = t.outer("downsample_factor", 2);
    let width = t.outer("alignment_intermediate_size", width);
    if !width.is_multiple_of(2) {
        return Err(format!(
            "`alignment_intermediate_size` ({width}) must be even"
        ));
    }
    Ok(with(
        siglip(&t)?,
        json!({
            "merge": edge * edge,
            "projector_norm": norm,
            "projector_layers": [width],
            "projector_halves": true,
        }),
    ))
}

/// SigLIP, whose rows learned ones attend to.
fn idefics2(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let mut tower = siglip_of(&t, [12, 768, 12, 3072], 32)?;
    tower["pooling_head"] = false.into();
    let perceiver = file("perceiver_config").unwrap_or_else(|| json!({}));
    let of = |name: &str, default| {
        let given = perceiver.get(name).and_then(Value::as_u64);
        given.unwrap_or(default)
    };
    t.same_width("perceiver_config.hidden_size", of("hidden_size", 4096))?;
    let text = file("text_config").unwrap_or_else(|| json!({}));
    for (name, config) in [("perceiver_config", &perceiver), ("text_config", &text)] {
        match config.get("hidden_act").and_then(Value::as_str) {
            None | Some("silu") => {}
            Some(other) => return Err(format!("`{name}.hidden_act` must be silu, not {other:?}")),
        }
    }
    Ok(with(
        tower,
        json!({
            "latents": of("resampler_n_latents", 64),
            "latent_layers": of("resampler_depth", 3),
            "latent_heads": [
                of("resampler_n_heads", 16),
                of("num_key_value_heads", 4),
                of("resampler_head_dim", 96),
            ],
            "latent_ffn": t.text("intermediate_size", 14336),
        }),
    ))
}

/// BLIP-2, whose Q-Former reads a text, too.
fn instructblip(file: Fields<'_>) -> Result<Value, String> {
    let former = file("qformer_config").unwrap_or_else(|| json!({}));
    let of = |name: &str, default: u64| {
        let given = former.get(name).and_then(Value::as_u64);
        given.unwrap_or(default)
    };
    Ok(with(
        blip_2(file)?,
        json!({
            "latent_vocab": of("vocab_size", 30_522),
            "latent_positions": of("max_position_embeddings", 512),
        }),
    ))
}

/// EVA's ViT, whose rows those of a Q-Former attend to.
fn blip_2(file: Fields<'_>) -> Result<Value, String> {
    let t = Tower::new(file)?;
    let shape = t.shape([(DEPTH, 39), (WIDTH, 1408), (HEADS, 16), (INNER, 6144)]);
    let patches = t.square(224, 14);
    let former = file("qformer_config").unwrap_or_else(|| json!({}));
    let of = |name: &str, default: u64| {
        let given = former.get(name).and_then(Value::as_u64);
        given.unwrap_or(default)
    };
    let (width, heads) = (of("hidden_size", 768), of("num_attention_heads", 12));
    if former.get("use_qformer_text_input") == Some(&Value::Bool(true)) {
        return Err("`qformer_config.use_qformer_text_input` must be false: a Q-Former that reads text is not planned".to_owned());
    }
    match former.get("hidden_act").and_then(Value::as_str) {
        None | Some("gelu") => {}
        Some(other) => {
            return Err(format!(
                "`qformer_config.hidden_act` must be gelu, not {other:?}"
            ));
        }
    }
    let outer = of("encoder_hidden_size", 1408);
    if outer != shape[1] {
        return Err(format!(
            "`qformer_config.encoder_hidden_size` ({outer}) must be `vision_config.hidden_size` ({})",
            shape[1]
        ));
    }
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(format!(
            "`qformer_config.num_attention_heads` ({heads}) must divide its `hidden_size` ({width})"
        ));
    }
    Ok(with(
        blocks(shape),
        json!({
            "activation": t.activation("gelu")?,
            "packed_qkv": true,
            "qkv_bias": t.flag("qkv_bias", true),
            "class_token": true,
            "positions": patches + 1,
            "patch_dim": t.patch_dim(14, 1),
            "patches": patches,
            "latents": t.outer("num_query_tokens", 32),
            "latent_width": width,
            "latent_layers": of("num_hidden_layers", 12),
            "latent_cross": of("cross_attention_frequency", 2),
            "latent_ffn": of("intermediate_size", 3072),
            "latent_heads": [heads, heads, width / heads],
        }),
    ))
}

/// CLIP's ViT-L/14 of 336 pixels, of which a file gives the name only. Squares of four patches
/// become one row; a learned row separates lines, and one images.
fn phi3_v(file: Fields<'_>) -> Result<Value, String> {
    let given = file("img_processor").ok_or("`img_processor` is missing")?;
    let known = "openai/clip-vit-large-patch14-336";
    let name = given.get("model_name").and_then(Value::as_str);
    if name.is_some_and(|name| name != known) {
        return Err(format!("`img_processor.model_name` must be {known}"));
    }
    let layer = file("embd_layer").unwrap_or_default();
    for (field, value) in [
        ("projection_cls", json!("mlp")),
        ("use_hd_transform", json!(true)),
        ("with_learnable_separator", json!(true)),
    ] {
        if layer.get(field) != Some(&value) {
            return Err(format!("`embd_layer.{field}` must be {value}"));
        }
    }
    let config = json!({
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 336,
        "patch_size": 14,
    });
    let t = Tower { file, config };
    let width = t.outer("hidden_size", 3072);
    Ok(with(
        clip(&t)?,
        json!({ "merge": 4, "separators": 2, "projector_layers": [width] }),
    ))
}

const QWEN3_MOE: &[(&str, &str)] = &[("qwen3_vl_moe_text", "qwen3_moe")];
/// Types that put a vision tower in front of a language model.
pub(super) const TYPES: &[HfWrapper] = &[
    HfWrapper {
        model_type: "qwen2_vl",
        architecture: "Qwen2VLForConditionalGeneration",
        ties: Ties::Either,
        text: &[("qwen2_vl_text", "qwen2"), ("qwen2_vl", "qwen2")],
        vision: qwen2_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen2_5_vl",
        architecture: "Qwen2_5_VLForConditionalGeneration",
        ties: Ties::Either,
        text: &[("qwen2_5_vl_text", "qwen2"), ("qwen2_5_vl", "qwen2")],
        vision: qwen2_5_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen3_vl",
        architecture: "Qwen3VLForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3_vl_text", "qwen3")],
        vision: qwen3_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen3_vl_moe",
        architecture: "Qwen3VLMoeForConditionalGeneration",
        ties: Ties::Whole,
        text: QWEN3_MOE,
        vision: qwen3_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen3_5",
        architecture: "Qwen3_5ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3_5_text", "qwen3_5_text")],
        vision: qwen3_5,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen3_5_moe",
        architecture: "Qwen3_5MoeForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3_5_moe_text", "qwen3_5_moe_text")],
        vision: qwen3_5,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "gemma3",
        architecture: "Gemma3ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("gemma3_text", "gemma3_text")],
        vision: gemma3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "paligemma",
        architecture: "PaliGemmaForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("gemma", "gemma")],
        vision: paligemma,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "llava",
        architecture: "LlavaForConditionalGeneration",
        ties: Ties::Either,
        text: &[("llama", "llama")],
        vision: llava,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "phi3_v",
        architecture: "Phi3VForCausalLM",
        ties: Ties::Whole,
        text: &[("phi3_v", "phi3")],
        vision: phi3_v,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "mistral3",
        architecture: "Mistral3ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("mistral", "mistral")],
        vision: mistral3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "llama4",
        architecture: "Llama4ForConditionalGeneration",
        ties: Ties::Text,
        text: &[("llama4_text", "llama4_text")],
        vision: llama4,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "kimi_k25",
        architecture: "KimiK25ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("kimi_k2", "kimi_k2"), ("deepseek_v3", "deepseek_v3")],
        vision: kimi_k25,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "minimax_m3_vl",
        architecture: "MiniMaxM3SparseForConditionalGeneration",
        ties: Ties::Either,
        text: &[("minimax_m3_vl_text", "minimax_m3_vl_text")],
        vision: minimax_m3_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "internvl",
        architecture: "InternVLForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen2", "qwen2")],
        vision: internvl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "blip-2",
        architecture: "Blip2ForConditionalGeneration",
        ties: Ties::Text,
        text: &[("opt", "opt")],
        vision: blip_2,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "instructblip",
        architecture: "InstructBlipForConditionalGeneration",
        ties: Ties::Text,
        text: &[("opt", "opt")],
        vision: instructblip,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "instructblipvideo",
        architecture: "InstructBlipVideoForConditionalGeneration",
        ties: Ties::Text,
        text: &[("opt", "opt")],
        vision: instructblip,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "deepseek_vl",
        architecture: "DeepseekVLForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("llama", "llama")],
        vision: deepseek_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "lighton_ocr",
        architecture: "LightOnOcrForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("qwen3", "qwen3")],
        vision: mistral3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "cohere_compass",
        architecture: "CohereCompassForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("cohere_compass_text", "cohere_compass_text")],
        vision: qwen3_vl,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "glm_ocr",
        architecture: "GlmOcrForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("glm_ocr_text", "glm_ocr_text")],
        vision: glm_ocr,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "idefics2",
        architecture: "Idefics2ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("mistral", "mistral")],
        vision: idefics2,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "idefics3",
        architecture: "Idefics3ForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("llama", "llama")],
        vision: idefics3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "smolvlm",
        architecture: "SmolVLMForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("llama", "llama")],
        vision: idefics3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "llava_next",
        architecture: "LlavaNextForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("llama", "llama")],
        vision: llava_next,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "llava_next_video",
        architecture: "LlavaNextVideoForConditionalGeneration",
        ties: Ties::Either,
        text: &[("llama", "llama")],
        vision: llava_next_video,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "shieldgemma2",
        architecture: "ShieldGemma2ForImageClassification",
        ties: Ties::Either,
        text: &[("gemma3_text", "gemma3_text")],
        vision: gemma3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "llava_onevision",
        architecture: "LlavaOnevisionForConditionalGeneration",
        ties: Ties::Either,
        text: &[("qwen2", "qwen2")],
        vision: llava_next,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "glm4v",
        architecture: "Glm4vForConditionalGeneration",
        ties: Ties::Either,
        text: &[("glm4v_text", "glm4v_text")],
        vision: glm4v,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "glm4v_moe",
        architecture: "Glm4vMoeForConditionalGeneration",
        ties: Ties::Either,
        text: &[("glm4v_moe_text", "glm4v_moe_text")],
        vision: glm4v,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "glm46v",
        architecture: "Glm46VForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("glm4v_text", "glm4v_text")],
        vision: glm4v,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "clip",
        architecture: "CLIPModel",
        ties: Ties::Never,
        text: &[("clip_text_model", "clip")],
        vision: clip_whole,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "siglip",
        architecture: "SiglipModel",
        ties: Ties::Never,
        text: &[("siglip_text_model", "siglip")],
        vision: siglip_whole,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "siglip2",
        architecture: "Siglip2Model",
        ties: Ties::Never,
        text: &[("siglip2_text_model", "siglip2")],
        vision: siglip2_whole,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "mllama",
        architecture: "MllamaForConditionalGeneration",
        ties: Ties::Never,
        text: &[("mllama_text_model", "mllama_text_model")],
        vision: mllama,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "qwen2_audio",
        architecture: "Qwen2AudioForConditionalGeneration",
        ties: Ties::Never,
        text: &[("qwen2", "qwen2")],
        vision: qwen2_audio,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "audioflamingo3",
        architecture: "AudioFlamingo3ForConditionalGeneration",
        ties: Ties::Never,
        text: &[("qwen2", "qwen2")],
        vision: audioflamingo3,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "aya_vision",
        architecture: "AyaVisionForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("cohere2", "cohere2")],
        vision: aya_vision,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "cohere2_vision",
        architecture: "Cohere2VisionForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("cohere2", "cohere2")],
        vision: cohere2_vision,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "voxtral",
        architecture: "VoxtralForConditionalGeneration",
        ties: Ties::Never,
        text: &[("llama", "llama")],
        vision: voxtral,
        audio: no_tower,
    },
    HfWrapper {
        model_type: "lfm2_vl",
        architecture: "Lfm2VlForConditionalGeneration",
        ties: Ties::Whole,
        text: &[("lfm2", "lfm2")],
        vision: lfm2_vl,
        audio: no_tower,
    },
];
