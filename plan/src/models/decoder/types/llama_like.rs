//! Types like Llama with other norms, biases or activations.

use super::{
    HIDDEN_ACT, LAYER_NORM_EPS, PARTIAL, PARTIAL_HALF, RMS_EPS_5, TIED_BY_DEFAULT, derived, number,
    rounded,
};
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, HEAD_DIM_128, KV_HEADS, MLP_BIAS, NORM_EPS};
use crate::models::windows::{
    ASKED_LAYERS, ASKED_WINDOW, FIRST_OF_FOUR, LISTED, USES_WINDOW, WINDOW, WINDOW_4096,
};
use serde_json::{Value, json};

const SHAPE: &[Field] = &[
    VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS, ROPE_THETA,
];

/// As `SHAPE`, with heads of 128 dimensions if the file does not say otherwise.
const SHAPE_128: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    KV_HEADS,
    HEAD_DIM_128,
    POSITIONS,
    ROPE_THETA,
];

/// As `SHAPE`, without the base of the rotary embedding.
const SHAPE_NO_THETA: &[Field] = &[
    VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS,
];

/// The base of the rotary embedding in classes with a default of their own.
const fn theta(default: Given) -> Field {
    Field {
        meaning: Meaning::Default("rope_theta", default),
        ..ROPE_THETA
    }
}

/// Returns the types of layers, some of which attend to a tower.
fn crossing(file: Fields<'_>) -> Result<Value, String> {
    let name = "cross_attention_layers";
    let given = file(name).unwrap_or_else(|| json!([3, 8, 13, 18, 23, 28, 33, 38]));
    let layers = file("num_hidden_layers").and_then(|n| n.as_u64());
    let word = |n: u64| {
        let listed = given.as_array().is_some_and(|all| all.contains(&n.into()));
        let crosses = "cross_attention";
        if listed { crosses } else { "full_attention" }
    };
    match given.as_array() {
        Some(all) if all.iter().all(Value::is_u64) => {
            Ok((0..layers.unwrap_or(40)).map(word).collect())
        }
        _ => Err(format!("`{name}` must be a list of layers, not {given}")),
    }
}

const fn bias(name: &'static [&'static str; 1], part: BiasPart, default: bool) -> Field {
    field(name, Meaning::HasBias(part, default))
}

/// The window of Granite's classes with windows, whose layers may have rotary embeddings with bases
/// of their own.
pub(super) const SWA_WINDOW: Field = number(
    &["sliding_window"],
    "sliding_window",
    |file| {
        if let Some(Value::Array(bases)) = file("layer_rope_theta")
            && bases.iter().any(|base| base.as_f64() == Some(0.0))
        {
            return Err(
                "`layer_rope_theta` must not be 0: layers without rotary embeddings among others are not planned"
                    .to_owned(),
            );
        }
        Ok(Some(file("sliding_window").unwrap_or_else(|| 128.into())))
    },
    |model| Some(model["sliding_window"].clone()),
);

/// Returns the description of a part of each block.
fn blocks(file: Fields<'_>, part: &str) -> Result<Vec<Value>, String> {
    let blocks = file("block_configs").and_then(|b| b.as_array().cloned());
    let blocks = blocks.ok_or("`block_configs` is missing")?;
    let parts: Vec<Value> = blocks.iter().map(|b| b[part].clone()).collect();
    match parts.iter().find(|p| p["replace_with_linear"] == true) {
        Some(_) => Err(format!("`replace_with_linear` of {part} is not supported")),
        None => Ok(parts),
    }
}

/// Returns the key heads of each block of a network found by architecture search.
fn layer_kv_heads(file: Fields<'_>) -> Result<Vec<u64>, String> {
    let heads = file("num_attention_heads").and_then(|n| n.as_u64());
    let heads = heads.ok_or("`num_attention_heads` is missing")?;
    let one = |a: &Value| match a["n_heads_in_group"].as_u64() {
        Some(group) if a["no_op"] != true => heads / group.max(1),
        _ => 0,
    };
    Ok(blocks(file, "attention")?.iter().map(one).collect())
}

const DECI_SHAPE: &[Field] = &[VOCAB, HIDDEN, FFN, LAYERS, HEADS, POSITIONS, ROPE_THETA];

/// Fields of the first DeciLM, whose layers differ in their key heads only. Files have both names
/// of the type.
const DECI: &[Field] = &[
    NORM_EPS,
    HIDDEN_ACT,
    ATTENTION_BIAS,
    TIED,
    number(
        &["num_key_value_heads_per_layer"],
        "layer_kv_heads",
        |file| Ok(Some(heads_per_layer(file)?.into())),
        |model| Some(model["layer_kv_heads"].clone()),
    ),
    derived("kv_heads", &["num_key_value_heads"], |file| {
        Ok(heads_per_layer(file)?.into_iter().max().map(Into::into))
    }),
];

/// Returns the key heads of each layer of a DeciLM.
fn heads_per_layer(file: Fields<'_>) -> Result<Vec<u64>, String> {
    const NAME: &str = "num_key_value_heads_per_layer";
    let list = file(NAME).and_then(|list| list.as_array().cloned());
    let list = list.ok_or_else(|| format!("`{NAME}` is missing"))?;
    let heads: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
    heads.ok_or_else(|| format!("`{NAME}` must be a list of integers"))
}

/// Returns the width of each block's feed-forward layer: two thirds of a multiple of the model's
/// width, rounded up to a multiple of 256.
fn layer_ffn(file: Fields<'_>) -> Result<Vec<u64>, String> {
    let width = file("hidden_size").and_then(|n| n.as_f64());
    let width = width.ok_or("`hidden_size` is missing")?;
    let one = |f: &Value| match f["ffn_mult"].as_f64() {
        Some(by) if f["no_op"] != true => ((2.0 * by * width / 3.0) as u64).next_multiple_of(256),
        _ => 0,
    };
    Ok(blocks(file, "ffn")?.iter().map(one).collect())
}

/// MiniCPM scales embedded tokens, what blocks add, and hidden states before the logits.
pub(super) const MINICPM_SCALES: [Field; 3] = [
    field(&["scale_emb"], Meaning::Optional("embedding_multiplier")),
    number(
        &["scale_depth"],
        "residual_multiplier",
        |file| {
            let depth = file("scale_depth").and_then(|x| x.as_f64());
            let layers = file("num_hidden_layers").and_then(|x| x.as_f64());
            let by = depth
                .zip(layers)
                .map(|(depth, layers)| depth / layers.sqrt());
            Ok(by.map(Into::into))
        },
        |model| {
            let layers = model["layers"].as_f64()?;
            Some((model["residual_multiplier"].as_f64()? * layers.sqrt()).into())
        },
    ),
    number(
        &["dim_model_base"],
        "logits_scaling",
        |file| {
            let base = file("dim_model_base").and_then(|x| x.as_f64());
            let width = file("hidden_size").and_then(|x| x.as_f64());
            Ok(base.zip(width).map(|(base, width)| (width / base).into()))
        },
        |model| {
            let width = model["hidden"].as_f64()?;
            Some(rounded(width / model["logits_scaling"].as_f64()?))
        },
    ),
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "diffllama",
        architecture: "DiffLlamaForCausalLM",
        fixed: &[("differential", Given::Bool(true))],
        common: SHAPE,
        fields: &[
            RMS_EPS_5,
            HIDDEN_ACT,
            ATTENTION_BIAS,
            TIED,
            derived("num_labels", &["lambda_std_dev"], |_| Ok(None)),
        ],
    },
    HfType {
        model_type: "stablelm",
        architecture: "StableLmForCausalLM",
        fixed: &[("norm", Given::Str("layer_norm"))],
        common: SHAPE,
        fields: &[
            LAYER_NORM_EPS,
            HIDDEN_ACT,
            TIED,
            bias(&["use_qkv_bias"], BiasPart::Qkv, false),
            Field {
                names: PARTIAL.names,
                meaning: Meaning::Default("partial_rotary_factor", Given::Float(0.25)),
            },
            number(
                &["qk_layernorm"],
                "qk_norm",
                |file| Ok((file("qk_layernorm") == Some(true.into())).then(|| "each_head".into())),
                |model| Some((model["qk_norm"] == "each_head").into()),
            ),
            number(
                &["use_parallel_residual"],
                "residual",
                |file| {
                    let on = file("use_parallel_residual") == Some(true.into());
                    Ok(on.then(|| "parallel_one_norm".into()))
                },
                |model| Some((model["residual"] == "parallel_one_norm").into()),
            ),
        ],
    },
    HfType {
        model_type: "nemotron",
        architecture: "NemotronForCausalLM",
        fixed: &[
            ("norm", Given::Str("layer_norm_unit_offset")),
            ("gated_mlp", Given::Bool(false)),
        ],
        common: SHAPE,
        fields: &[
            field(&["norm_eps"], Meaning::Optional("norm_eps")),
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("relu2", "relu2"),
                        ("relu", "relu"),
                        ("silu", "silu"),
                        ("gelu", "gelu"),
                    ],
                ),
            ),
            PARTIAL_HALF,
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "arcee",
        architecture: "ArceeForCausalLM",
        fixed: &[
            ("activation", Given::Str("relu2")),
            ("gated_mlp", Given::Bool(false)),
        ],
        common: SHAPE,
        fields: &[RMS_EPS_5, ATTENTION_BIAS, MLP_BIAS, TIED],
    },
    HfType {
        model_type: "seed_oss",
        architecture: "SeedOssForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[
            field(&["residual_dropout"], Meaning::Dropout),
            field(&["attention_dropout"], Meaning::Dropout),
            NORM_EPS,
            HIDDEN_ACT,
            bias(&["attention_bias"], BiasPart::Qkv, true),
            bias(&["attention_out_bias"], BiasPart::AttentionOutput, false),
            MLP_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "minicpm",
        architecture: "MiniCPMForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            ATTENTION_BIAS,
            TIED_BY_DEFAULT,
            MINICPM_SCALES[0],
            MINICPM_SCALES[1],
            MINICPM_SCALES[2],
        ],
    },
    HfType {
        model_type: "ernie4_5",
        architecture: "Ernie4_5ForCausalLM",
        fixed: &[("position_embedding", Given::Str("rotary_interleaved"))],
        common: SHAPE,
        fields: &[
            RMS_EPS_5,
            HIDDEN_ACT,
            TIED_BY_DEFAULT,
            bias(&["use_bias"], BiasPart::All, false),
        ],
    },
    HfType {
        model_type: "hunyuan_v1_dense",
        architecture: "HunYuanDenseV1ForCausalLM",
        fixed: &[("qk_norm", Given::Str("after_rope"))],
        common: SHAPE,
        fields: &[RMS_EPS_5, HIDDEN_ACT, ATTENTION_BIAS, TIED],
    },
    HfType {
        model_type: "internlm",
        architecture: "InternLMForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            TIED,
            bias(&["bias"], BiasPart::Attention, true),
        ],
    },
    HfType {
        model_type: "internlm3",
        architecture: "InternLM3ForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            TIED,
            bias(&["qkv_bias"], BiasPart::Qkv, false),
            bias(&["bias"], BiasPart::All, false),
        ],
    },
    HfType {
        model_type: "orion",
        architecture: "OrionForCausalLM",
        fixed: &[("norm", Given::Str("layer_norm"))],
        common: SHAPE,
        fields: &[
            field(&["rms_norm_eps"], Meaning::Optional("norm_eps")),
            HIDDEN_ACT,
            ATTENTION_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "mimo",
        architecture: "MiMoForCausalLM",
        fixed: &[("bias", Given::Str("qkv"))],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            ASKED_WINDOW,
            USES_WINDOW,
            ASKED_LAYERS,
            field(&["attention_bias"], Meaning::On),
            TIED,
        ],
    },
    HfType {
        model_type: "nemotron-nas",
        architecture: "DeciLMForCausalLM",
        fixed: &[],
        common: &[VOCAB, HIDDEN, LAYERS, HEADS, POSITIONS, ROPE_THETA],
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
            number(
                &["block_configs"],
                "layer_kv_heads",
                |file| Ok(Some(layer_kv_heads(file)?.into())),
                |_| None,
            ),
            derived("layer_ffn", &[], |file| Ok(Some(layer_ffn(file)?.into()))),
            derived("kv_heads", &["num_key_value_heads"], |file| {
                Ok(layer_kv_heads(file)?.into_iter().max().map(Into::into))
            }),
            derived("ffn", &["intermediate_size"], |file| {
                Ok(layer_ffn(file)?.into_iter().max().map(Into::into))
            }),
        ],
    },
    HfType {
        model_type: "deci",
        architecture: "DeciLMForCausalLM",
        fixed: &[],
        common: DECI_SHAPE,
        fields: DECI,
    },
    HfType {
        model_type: "decilm",
        architecture: "DeciLMForCausalLM",
        fixed: &[],
        common: DECI_SHAPE,
        fields: DECI,
    },
    HfType {
        model_type: "exaone",
        architecture: "ExaoneForCausalLM",
        fixed: &[],
        common: &[
            VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, POSITIONS, ROPE_THETA,
        ],
        fields: &[
            Field {
                names: &["num_layers", "num_hidden_layers"],
                ..LAYERS
            },
            field(&["layer_norm_epsilon"], Meaning::Optional("norm_eps")),
            Field {
                names: &["activation_function"],
                ..HIDDEN_ACT
            },
            TIED,
        ],
    },
    HfType {
        model_type: "ministral",
        architecture: "MinistralForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[NORM_EPS, HIDDEN_ACT, WINDOW_4096, LISTED, TIED],
    },
    HfType {
        model_type: "ministral3",
        architecture: "Ministral3ForCausalLM",
        fixed: &[],
        common: SHAPE_128,
        fields: &[RMS_EPS_5, HIDDEN_ACT, WINDOW, TIED],
    },
    // Without a tower, transformers leaves out the layers that attend to it.
    HfType {
        model_type: "mllama_text_model",
        architecture: "MllamaForCausalLM",
        fixed: &[("extra_tokens", Given::Int(8))],
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS],
        fields: &[
            RMS_EPS_5,
            HIDDEN_ACT,
            theta(Given::Float(500_000.0)),
            field(
                &["cross_attention_layers"],
                Meaning::Computed(
                    "layer_types",
                    Computed {
                        also: &[],
                        read: |file| Ok(Some(crossing(file)?)),
                        write: |model| {
                            let types = model["layer_types"].as_array()?;
                            let cross = |(n, kind): (usize, &Value)| {
                                (kind == "cross_attention").then_some(n)
                            };
                            Some(types.iter().enumerate().filter_map(cross).collect())
                        },
                    },
                ),
            ),
        ],
    },
    HfType {
        model_type: "cwm",
        architecture: "CwmForCausalLM",
        fixed: &[],
        common: SHAPE_128,
        fields: &[
            RMS_EPS_5,
            HIDDEN_ACT,
            MLP_BIAS,
            field(
                &["sliding_window"],
                Meaning::Nullable("sliding_window", Given::Int(8192)),
            ),
            FIRST_OF_FOUR,
            TIED,
        ],
    },
    HfType {
        model_type: "iquestcoder",
        architecture: "LlamaForCausalLM",
        fixed: &[],
        common: SHAPE_128,
        fields: &[RMS_EPS_5, HIDDEN_ACT, ATTENTION_BIAS, MLP_BIAS, TIED],
    },
    HfType {
        model_type: "helium",
        architecture: "HeliumForCausalLM",
        fixed: &[("position_embedding", Given::Str("rotary_interleaved"))],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS, ROPE_THETA,
        ],
        fields: &[
            // Its output projection is as wide as the model.
            number(
                &["head_dim"],
                "head_dim",
                |file| {
                    let number = |name: &str| file(name).and_then(|n| n.as_u64());
                    let each = number("head_dim").unwrap_or(128);
                    let sizes = number("num_attention_heads").zip(number("hidden_size"));
                    match sizes {
                        Some((heads, hidden)) if heads * each != hidden => Err(format!(
                            "`num_attention_heads` ({heads}) times `head_dim` ({each}) must be `hidden_size` ({hidden})"
                        )),
                        _ => Ok(Some(each.into())),
                    }
                },
                |model| Some(model["head_dim"].clone()),
            ),
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-8)),
            ),
            HIDDEN_ACT,
            bias(&["attention_bias"], BiasPart::Qkv, false),
            MLP_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "hyperclovax",
        architecture: "HyperCLOVAXForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            ATTENTION_BIAS,
            MLP_BIAS,
            super::experts::EMBEDDING_MULTIPLIER,
            field(
                &["attention_multiplier"],
                Meaning::Optional("attention_multiplier"),
            ),
            super::experts::RESIDUAL_MULTIPLIER,
            // Logits are multiplied by it.
            number(
                &["logits_scaling"],
                "logits_scaling",
                |file| {
                    let by = file("logits_scaling").and_then(|x| x.as_f64());
                    Ok(by.map(|by| (1.0 / by).into()))
                },
                |model| Some((1.0 / model["logits_scaling"].as_f64()?).into()),
            ),
            number(
                &["use_post_norm"],
                "norm_position",
                |file| {
                    let off = file("use_post_norm") == Some(false.into());
                    Ok(Some(if off { "before" } else { "both" }.into()))
                },
                |model| Some((model["norm_position"] == "both").into()),
            ),
            TIED,
        ],
    },
    HfType {
        model_type: "jais2",
        architecture: "Jais2ForCausalLM",
        fixed: &[
            ("norm", Given::Str("layer_norm")),
            ("gated_mlp", Given::Bool(false)),
            ("activation", Given::Str("relu2")),
        ],
        common: SHAPE,
        fields: &[
            LAYER_NORM_EPS,
            bias(&["attention_bias"], BiasPart::Attention, true),
            bias(&["mlp_bias"], BiasPart::Mlp, true),
            field(&["hidden_act"], Meaning::Word(&["relu2"])),
            TIED,
        ],
    },
    HfType {
        model_type: "bitnet",
        architecture: "BitNetForCausalLM",
        fixed: &[("sub_norms", Given::Bool(true))],
        common: SHAPE_NO_THETA,
        fields: &[
            theta(Given::Float(5e5)),
            RMS_EPS_5,
            field(
                &["hidden_act"],
                Meaning::Choice("activation", &[("relu2", "relu2"), ("silu", "silu")]),
            ),
            ATTENTION_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "apertus",
        architecture: "ApertusForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("gated_mlp", Given::Bool(false)),
            ("activation", Given::Str("relu2")),
            ("activation_scalars", Given::Int(2)),
        ],
        common: SHAPE_NO_THETA,
        fields: &[
            theta(Given::Float(1.2e7)),
            RMS_EPS_5,
            ATTENTION_BIAS,
            field(&["hidden_act"], Meaning::Word(&["xielu"])),
            TIED,
        ],
    },
    HfType {
        model_type: "granite_swa",
        architecture: "GraniteSWAForCausalLM",
        fixed: &[("attention_sinks", Given::Bool(true))],
        common: SHAPE,
        fields: &[
            RMS_EPS_5,
            HIDDEN_ACT,
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED_BY_DEFAULT,
            SWA_WINDOW,
            FIRST_OF_FOUR,
            super::experts::EMBEDDING_MULTIPLIER,
            super::experts::ATTENTION_MULTIPLIER,
            super::experts::RESIDUAL_MULTIPLIER,
            super::experts::LOGITS_SCALING,
        ],
    },
    HfType {
        model_type: "nanochat",
        architecture: "NanoChatForCausalLM",
        fixed: &[
            ("norm", Given::Str("rms_norm_no_weight")),
            ("embedding_norm", Given::Bool(true)),
            ("qk_norm", Given::Str("after_rope")),
            ("gated_mlp", Given::Bool(false)),
            ("activation", Given::Str("relu2")),
        ],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            ATTENTION_BIAS,
            field(&["hidden_act"], Meaning::Word(&["relu2"])),
            field(
                &["final_logit_softcapping"],
                Meaning::Nullable("logits_softcap", Given::Float(15.0)),
            ),
            TIED,
        ],
    },
];
