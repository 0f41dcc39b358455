//! Types with state-space layers or linear recurrences.

use super::read::{FULL, LINEAR, Listed, by_layer, flag, integer, size, words};
use super::{HIDDEN_ACT, LAYER_NORM_EPSILON, PARTIAL_HALF, derived, number};
use crate::models::hf::{
    FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, TIED,
    VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, KV_HEADS, MLP_BIAS, NORM_EPS};
use crate::models::windows::repeated;
use serde_json::{Value, json};

/// Mamba's sizes: `d_inner`, `d_state` and the rank of time steps.
fn mamba_sizes(file: Fields<'_>, [state, conv, rank]: [&str; 3], expand: &str) -> Value {
    let hidden = integer(file, "hidden_size", 768);
    let times = file(expand).and_then(|x| x.as_f64()).unwrap_or(2.0);
    json!({
        "inner": (times * hidden as f64) as u64,
        "state": integer(file, state, 16),
        "conv": integer(file, conv, 4),
        "dt_rank": integer(file, rank, hidden.div_ceil(16)),
    })
}

/// Returns an object with more fields.
fn with(mut object: Value, more: &[(&str, Value)]) -> Value {
    for (name, value) in more {
        object[*name] = value.clone();
    }
    object
}

const MAMBA_SIZES: Field = derived(
    "ssm",
    &[
        "state_size",
        "conv_kernel",
        "time_step_rank",
        "expand",
        "intermediate_size",
        "use_conv_bias",
        "use_bias",
        "residual_in_fp32",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_scale",
        "time_step_init_scheme",
        "hidden_act",
        "mixer_rms_eps",
        "use_mambapy",
        "use_falcon_mambapy",
    ],
    |file| {
        let names = ["state_size", "conv_kernel", "time_step_rank"];
        let sizes = mamba_sizes(file, names, "expand");
        let inner = integer(
            file,
            "intermediate_size",
            sizes["inner"].as_u64().unwrap_or(0),
        );
        Ok(Some(with(
            sizes,
            &[
                ("inner", inner.into()),
                ("conv_bias", flag(file, "use_conv_bias", true).into()),
                ("bias", flag(file, "use_bias", false).into()),
            ],
        )))
    },
);

const MAMBA_LAYERS: (&str, Given) = ("layer_types", Given::Words(&["mamba"]));
const NO_MLP: (&str, Given) = ("mlp_layer_types", Given::Words(&["none"]));
pub(super) const NO_POSITIONS: (&str, Given) = ("position_embedding", Given::Str("none"));
const ONE_HEAD: (&str, Given) = ("heads", Given::Int(1));
const TIED_BY_DEFAULT: Field = super::TIED_BY_DEFAULT;

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "mamba",
        architecture: "MambaForCausalLM",
        fixed: &[MAMBA_LAYERS, NO_MLP, NO_POSITIONS, ONE_HEAD],
        common: &[VOCAB, HIDDEN, LAYERS],
        fields: &[LAYER_NORM_EPSILON, MAMBA_SIZES, TIED_BY_DEFAULT],
    },
    HfType {
        model_type: "falcon_mamba",
        architecture: "FalconMambaForCausalLM",
        fixed: &[MAMBA_LAYERS, NO_MLP, NO_POSITIONS, ONE_HEAD],
        common: &[VOCAB, HIDDEN, LAYERS],
        fields: &[LAYER_NORM_EPSILON, MAMBA_SIZES, TIED_BY_DEFAULT],
    },
    HfType {
        model_type: "rwkv",
        architecture: "RwkvForCausalLM",
        fixed: &[
            ("layer_types", Given::Words(&["rwkv"])),
            ("norm", Given::Str("layer_norm")),
            ("embedding_norm", Given::Bool(true)),
            NO_POSITIONS,
            ONE_HEAD,
        ],
        common: &[VOCAB, HIDDEN, LAYERS, TIED],
        fields: &[
            LAYER_NORM_EPSILON,
            derived("ffn", &["intermediate_size"], |file| {
                let hidden = integer(file, "hidden_size", 4096);
                Ok(Some(integer(file, "intermediate_size", 4 * hidden).into()))
            }),
            // Rescaling is one of inference.
            derived("ssm", &["attention_hidden_size", "rescale_every"], |file| {
                let hidden = integer(file, "hidden_size", 4096);
                let inner = integer(file, "attention_hidden_size", hidden);
                Ok(Some(json!({ "inner": inner })))
            }),
            field(
                &["context_length"],
                Meaning::Default("max_seq_len", Given::Int(1024)),
            ),
        ],
    },
    HfType {
        model_type: "recurrent_gemma",
        architecture: "RecurrentGemmaForCausalLM",
        fixed: &[("norm", Given::Str("rms_norm_unit_offset"))],
        common: &[
            VOCAB,
            HIDDEN,
            LAYERS,
            HEADS,
            KV_HEADS,
            ROPE_THETA,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            PARTIAL_HALF,
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-6)),
            ),
            field(
                &["hidden_activation"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("gelu_pytorch_tanh", "gelu_tanh"),
                        ("gelu", "gelu"),
                        ("silu", "silu"),
                    ],
                ),
            ),
            // Half of it.
            number(
                &["intermediate_size"],
                "ffn",
                |file| Ok(Some((integer(file, "intermediate_size", 7680) / 2).into())),
                |model| Some((2 * model["ffn"].as_u64()?).into()),
            ),
            derived("bias", &["attention_bias"], |file| {
                Ok(Some(match flag(file, "attention_bias", false) {
                    true => true.into(),
                    false => "all_but_qkv".into(),
                }))
            }),
            field(
                &["attention_window_size"],
                Meaning::Default("sliding_window", Given::Int(2048)),
            ),
            field(
                &["logits_soft_cap"],
                Meaning::Default("logits_softcap", Given::Float(30.0)),
            ),
            derived("embedding_multiplier", &["head_dim"], |file| {
                let hidden = integer(file, "hidden_size", 2560);
                let head = hidden / integer(file, "num_attention_heads", 10).max(1);
                match integer(file, "head_dim", head) {
                    own if own == head => Ok(Some((hidden as f64).sqrt().into())),
                    own => Err(format!(
                        "`head_dim` ({own}) must be {head}, as the class computes it"
                    )),
                }
            }),
            derived("layer_types", &["block_types", "_block_types"], |file| {
                let listed = words(file, "block_types").or_else(|| words(file, "_block_types"));
                let listed = listed.unwrap_or_else(|| {
                    ["recurrent", "recurrent", "attention"]
                        .map(str::to_owned)
                        .into()
                });
                let word = |word: &String| match word.as_str() {
                    "recurrent" | LINEAR => Ok("rg_lru"),
                    "attention" | "sliding_attention" => Ok("sliding_attention"),
                    other => Err(format!(
                        "`block_types` has {other:?}; known are recurrent and attention"
                    )),
                };
                let all: Vec<&str> = listed.iter().map(word).collect::<Result<_, _>>()?;
                Ok(Some(all.into()))
            }),
            derived(
                "ssm",
                &[
                    "lru_width",
                    "conv1d_width",
                    "w_init_variance_scale",
                    "final_w_init_variance_scale",
                    "embeddings_scale_by_sqrt_dim",
                ],
                |file| {
                    let hidden = integer(file, "hidden_size", 2560);
                    let (inner, heads) = (
                        integer(file, "lru_width", hidden),
                        integer(file, "num_attention_heads", 10),
                    );
                    if !inner.is_multiple_of(heads.max(1)) {
                        return Err(format!(
                            "`lru_width` ({inner}) must be divisible by `num_attention_heads` ({heads})"
                        ));
                    }
                    Ok(Some(json!({
                        "inner": inner,
                        "heads": heads,
                        "conv": integer(file, "conv1d_width", 4),
                        "bias": true,
                    })))
                },
            ),
        ],
    },
    HfType {
        model_type: "mamba2",
        architecture: "Mamba2ForCausalLM",
        fixed: &[
            ("layer_types", Given::Words(&["mamba2"])),
            NO_MLP,
            NO_POSITIONS,
            ONE_HEAD,
        ],
        common: &[VOCAB, HIDDEN, LAYERS],
        fields: &[
            LAYER_NORM_EPSILON,
            derived(
                "ssm",
                &[
                    "num_heads",
                    "head_dim",
                    "state_size",
                    "expand",
                    "conv_kernel",
                    "n_groups",
                    "chunk_size",
                    "use_bias",
                    "use_conv_bias",
                    "hidden_act",
                    "residual_in_fp32",
                    "rms_norm",
                    "time_step_rank",
                    "time_step_min",
                    "time_step_max",
                    "time_step_floor",
                    "time_step_limit",
                ],
                |file| {
                    let (inner, heads) = mamba2_heads(file)?;
                    Ok(Some(json!({
                        "inner": inner,
                        "heads": heads,
                        "groups": integer(file, "n_groups", 8),
                        "state": integer(file, "state_size", 128),
                        "conv": integer(file, "conv_kernel", 4),
                        "chunk": integer(file, "chunk_size", 256),
                        "conv_bias": flag(file, "use_conv_bias", true),
                        "bias": flag(file, "use_bias", false),
                    })))
                },
            ),
            TIED,
        ],
    },
    HfType {
        model_type: "falcon_h1",
        architecture: "FalconH1ForCausalLM",
        fixed: &[("layer_types", Given::Words(&["hybrid"]))],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, NORM_EPS,
            ROPE_THETA, TIED,
        ],
        fields: &[
            HEAD_DIM,
            ATTENTION_BIAS,
            MLP_BIAS,
            field(
                &["embedding_multiplier"],
                Meaning::Optional("embedding_multiplier"),
            ),
            FALCON_MAMBA2,
        ],
    },
    HfType {
        model_type: "bamba",
        architecture: "BambaForCausalLM",
        fixed: &[],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, NORM_EPS,
            ROPE_THETA, TIED,
        ],
        fields: &[
            PARTIAL_HALF,
            ATTENTION_BIAS,
            MLP_BIAS,
            derived("layer_types", &["attn_layer_indices"], |file| {
                let listed = file("attn_layer_indices");
                let listed = listed.as_ref().and_then(Value::as_array);
                by_layer(file, |layer| {
                    let full = listed.is_some_and(|l| l.iter().any(|n| *n == layer));
                    if full { FULL } else { "mamba2" }
                })
            }),
            MAMBA2_D,
        ],
    },
];

/// Returns the inner width of Mamba-2 and its heads, which follow from it if the file does not give
/// them.
///
/// # Errors
/// If both are given and do not agree, as in transformers, or if heads do not divide the width.
fn mamba2_heads(file: Fields<'_>) -> Result<(u64, u64), String> {
    let hidden = integer(file, "hidden_size", 4096);
    let (expand, width) = (size(file, "expand", 2)?, size(file, "head_dim", 64)?);
    let inner = hidden.saturating_mul(expand);
    let says = |heads: &str| {
        format!(
            "{heads} must be `hidden_size` times `expand` ({inner}), divided by `head_dim` ({width})"
        )
    };
    match file("num_heads") {
        None if inner.is_multiple_of(width) => Ok((inner, inner / width)),
        None => Err(format!(
            "`head_dim` ({width}) must divide `hidden_size` times `expand` ({inner})"
        )),
        Some(given) => match given.as_u64() {
            Some(heads) if heads.checked_mul(width) == Some(inner) => Ok((inner, heads)),
            _ => Err(says(&format!("`num_heads` ({given})"))),
        },
    }
}

/// Returns a value of Jamba's experts; nothing with a single one, which is a dense layer there.
fn of_several(file: Fields<'_>, value: Value) -> Option<Value> {
    (integer(file, "num_experts", 16) != 1).then_some(value)
}

/// Sizes of Falcon-H1, whose multipliers of parts are not planned.
const FALCON_MAMBA2: Field = derived(
    "ssm",
    &[
        "mamba_d_ssm",
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_proj_bias",
        "mamba_rms_norm",
        "mamba_norm_before_gate",
        "projectors_bias",
        "time_step_limit",
        "lm_head_multiplier",
        "mlp_multipliers",
        "key_multiplier",
        "attention_out_multiplier",
        "attention_in_multiplier",
        "ssm_multipliers",
        "ssm_in_multiplier",
        "ssm_out_multiplier",
        "attn_layer_indices",
        "mlp_expansion_factor",
        "mamba_use_mlp",
    ],
    |file| {
        let bias = flag(file, "mamba_proj_bias", false);
        if bias != flag(file, "projectors_bias", false) {
            return Err("`mamba_proj_bias` and `projectors_bias` must be equal".to_owned());
        }
        let expanded = integer(file, "mamba_expand", 2) * integer(file, "hidden_size", 4096);
        let null = file("mamba_d_ssm").is_none();
        Ok(Some(json!({
            "inner": if null { expanded } else { integer(file, "mamba_d_ssm", 1024) },
            "heads": integer(file, "mamba_n_heads", 128),
            "groups": integer(file, "mamba_n_groups", 1),
            "state": integer(file, "mamba_d_state", 256),
            "conv": integer(file, "mamba_d_conv", 4),
            "chunk": integer(file, "mamba_chunk_size", 256),
            "conv_bias": flag(file, "mamba_conv_bias", true),
            "bias": bias,
            "gate_norm": flag(file, "mamba_rms_norm", false),
        })))
    },
);

/// Sizes as Bamba and Granite 4 name them.
const MAMBA2_D: Field = derived(
    "ssm",
    &[
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_proj_bias",
    ],
    |file| {
        let expand = file("mamba_expand").and_then(|x| x.as_f64()).unwrap_or(2.0);
        let inner = (expand * integer(file, "hidden_size", 4096) as f64) as u64;
        Ok(Some(json!({
            "inner": inner,
            "heads": integer(file, "mamba_n_heads", 128),
            "groups": integer(file, "mamba_n_groups", 1),
            "state": integer(file, "mamba_d_state", 256),
            "conv": integer(file, "mamba_d_conv", 4),
            "chunk": integer(file, "mamba_chunk_size", 256),
            "conv_bias": flag(file, "mamba_conv_bias", true),
            "bias": flag(file, "mamba_proj_bias", false),
        })))
    },
);

/// Returns the kind of each layer of a Nemotron-H: mamba, attention, mlp or moe.
fn nemotron_blocks(file: Fields<'_>) -> Result<Vec<String>, String> {
    if let Some(listed) = words(file, "layers_block_type") {
        return Ok(listed);
    }
    let pattern = file("hybrid_override_pattern");
    let pattern = pattern.as_ref().and_then(Value::as_str);
    let pattern = pattern.ok_or("`layers_block_type` or `hybrid_override_pattern` is missing")?;
    let word = |letter| {
        Ok(match letter {
            'M' => "mamba",
            '*' => "attention",
            '-' => "mlp",
            'E' => "moe",
            other => return Err(format!("`hybrid_override_pattern` has no layer {other:?}")),
        }
        .to_owned())
    };
    pattern.chars().map(word).collect()
}

/// Returns a list with one word per block of a Nemotron-H.
fn per_block(
    file: Fields<'_>,
    word: fn(&str) -> Result<&'static str, String>,
) -> Result<Option<Value>, String> {
    let blocks = nemotron_blocks(file)?;
    let all: Result<Vec<&str>, String> = blocks.iter().map(|b| word(b)).collect();
    Ok(Some(repeated(&all?)))
}

/// Returns whether a Granite 4 has routed experts.
fn granite_routes(file: Fields<'_>) -> bool {
    integer(file, "num_local_experts", 8) > 0
}

/// Types of family `moe`.
pub(super) const EXPERTS: &[HfType] = &[
    // Without routed experts, the shared one is a dense layer.
    HfType {
        model_type: "granitemoehybrid",
        architecture: "GraniteMoeHybridForCausalLM",
        fixed: &[
            ("router", Given::Str("topk_softmax")),
            ("packed_gate_up", Given::Bool(true)),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HIDDEN_ACT,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            TIED,
            ATTENTION_BIAS,
            super::experts::EMBEDDING_MULTIPLIER,
            super::experts::ATTENTION_MULTIPLIER,
            super::experts::RESIDUAL_MULTIPLIER,
            super::experts::LOGITS_SCALING,
        ],
        fields: &[
            derived("ffn", &["shared_intermediate_size"], |file| {
                Ok(Some(integer(file, "shared_intermediate_size", 1024).into()))
            }),
            derived("shared_expert_ffn", &[], |file| {
                let shared = integer(file, "shared_intermediate_size", 1024);
                Ok(granite_routes(file).then(|| shared.into()))
            }),
            derived("expert_ffn", &["intermediate_size"], |file| {
                let width = integer(file, "intermediate_size", 11008);
                Ok(granite_routes(file).then(|| width.into()))
            }),
            derived("experts", &["num_local_experts"], |file| {
                let count = integer(file, "num_local_experts", 8);
                Ok(granite_routes(file).then(|| count.into()))
            }),
            derived("top_k", &["num_experts_per_tok"], |file| {
                let count = integer(file, "num_experts_per_tok", 2);
                Ok(granite_routes(file).then(|| count.into()))
            }),
            derived("mlp_layer_types", &[], |file| {
                Ok((!granite_routes(file)).then(|| json!(["dense"])))
            }),
            derived("position_embedding", &["position_embedding_type"], |file| {
                let kind = file("position_embedding_type");
                let rotates = kind.as_ref().and_then(Value::as_str) == Some("rope");
                Ok(Some(if rotates { "rotary" } else { "none" }.into()))
            }),
            derived(
                "layer_types",
                &["layer_types", "layers_block_type"],
                |file| {
                    let listed = Listed::of(file, &["layer_types", "layers_block_type"]);
                    by_layer(file, |layer| match listed.word(layer) {
                        Some("attention" | FULL) => FULL,
                        _ => "mamba2",
                    })
                },
            ),
            MAMBA2_D,
        ],
    },
    HfType {
        model_type: "nemotron_h",
        architecture: "NemotronHForCausalLM",
        fixed: &[
            NO_POSITIONS,
            ("gated_mlp", Given::Bool(false)),
            ("router", Given::Str("sigmoid")),
        ],
        common: &[VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, POSITIONS, MLP_BIAS],
        fields: &[
            // The class has no weights to tie, and no biases in attention.
            field(&["tie_word_embeddings"], Meaning::Off),
            field(&["attention_bias"], Meaning::Off),
            number(
                &["num_hidden_layers"],
                "layers",
                |file| Ok(Some(nemotron_blocks(file)?.len().into())),
                |model| Some(model["layers"].clone()),
            ),
            Field {
                names: &["head_dim", "attention_head_dim"],
                ..HEAD_DIM
            },
            Field {
                names: &["layer_norm_epsilon", "rms_norm_eps", "norm_eps"],
                meaning: Meaning::Optional("norm_eps"),
            },
            field(
                &["mlp_hidden_act"],
                Meaning::Choice("activation", &[("relu2", "relu2"), ("silu", "silu")]),
            ),
            derived(
                "layer_types",
                &["layers_block_type", "hybrid_override_pattern"],
                |file| {
                    per_block(file, |block| match block {
                        "mamba" | "linear_attention" => Ok("mamba2"),
                        "attention" | FULL => Ok(FULL),
                        "mlp" | "moe" => Ok("none"),
                        other => Err(format!("no layer of type {other:?} is known")),
                    })
                },
            ),
            derived("mlp_layer_types", &[], |file| {
                per_block(file, |block| {
                    Ok(match block {
                        "mlp" => "dense",
                        "moe" => "sparse",
                        _ => "none",
                    })
                })
            }),
            derived(
                "ssm",
                &[
                    "mamba_num_heads",
                    "mamba_head_dim",
                    "n_groups",
                    "ssm_state_size",
                    "conv_kernel",
                    "chunk_size",
                    "use_conv_bias",
                    "use_bias",
                    "expand",
                    "mamba_hidden_act",
                    "mamba_ssm_cache_dtype",
                    "residual_in_fp32",
                    "time_step_min",
                    "time_step_max",
                    "time_step_floor",
                    "time_step_limit",
                    "time_step_rank",
                    "partial_rotary_factor",
                    "rope_theta",
                    "use_mamba_kernels",
                ],
                |file| {
                    let heads = integer(file, "mamba_num_heads", 128);
                    Ok(Some(json!({
                        "inner": heads * integer(file, "mamba_head_dim", 64),
                        "heads": heads,
                        "groups": integer(file, "n_groups", 8),
                        "state": integer(file, "ssm_state_size", 128),
                        "conv": integer(file, "conv_kernel", 4),
                        "chunk": integer(file, "chunk_size", 128),
                        "conv_bias": flag(file, "use_conv_bias", true),
                        "bias": flag(file, "use_bias", false),
                    })))
                },
            ),
            field(&["n_routed_experts"], Meaning::Optional("experts")),
            field(&["num_experts_per_tok"], Meaning::Optional("top_k")),
            field(&["moe_intermediate_size"], Meaning::Optional("expert_ffn")),
            field(&["moe_latent_size"], Meaning::Optional("expert_latent")),
            // One expert, whatever their number is.
            derived(
                "shared_expert_ffn",
                &["moe_shared_expert_intermediate_size", "n_shared_experts"],
                |file| Ok(file("moe_shared_expert_intermediate_size")),
            ),
            field(&["norm_topk_prob"], Meaning::Optional("normalize_top_k")),
            field(&["routed_scaling_factor"], Meaning::Optional("route_scale")),
            field(&["n_group"], Meaning::Optional("router_groups")),
            field(&["topk_group"], Meaning::Optional("router_group_top_k")),
        ],
    },
    HfType {
        model_type: "jamba",
        architecture: "JambaForCausalLM",
        fixed: &[
            ("bias", Given::Bool(false)),
            ("normalize_top_k", Given::Bool(false)),
            NO_POSITIONS,
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, NORM_EPS, TIED,
        ],
        fields: &[
            number(
                &["num_experts"],
                "experts",
                |file| Ok(of_several(file, file("num_experts").unwrap_or(16.into()))),
                |model| Some(model["experts"].clone()),
            ),
            number(
                &["num_experts_per_tok"],
                "top_k",
                |file| {
                    Ok(of_several(
                        file,
                        file("num_experts_per_tok").unwrap_or(2.into()),
                    ))
                },
                |model| Some(model["top_k"].clone()),
            ),
            derived(
                "layer_types",
                &[
                    "attn_layer_period",
                    "attn_layer_offset",
                    "layers_block_type",
                ],
                |file| {
                    let period = integer(file, "attn_layer_period", 8).max(1);
                    let offset = integer(file, "attn_layer_offset", 4);
                    by_layer(file, |layer| {
                        if layer % period == offset {
                            FULL
                        } else {
                            "mamba"
                        }
                    })
                },
            ),
            derived(
                "mlp_layer_types",
                &["expert_layer_period", "expert_layer_offset"],
                |file| {
                    let period = integer(file, "expert_layer_period", 2).max(1);
                    let offset = integer(file, "expert_layer_offset", 1);
                    let some = integer(file, "num_experts", 16) > 1;
                    by_layer(file, |layer| {
                        if some && layer % period == offset {
                            "sparse"
                        } else {
                            "dense"
                        }
                    })
                },
            ),
            derived(
                "ssm",
                &[
                    "mamba_d_state",
                    "mamba_d_conv",
                    "mamba_expand",
                    "mamba_dt_rank",
                    "mamba_conv_bias",
                    "mamba_proj_bias",
                    "use_mamba_kernels",
                ],
                |file| {
                    let names = ["mamba_d_state", "mamba_d_conv", "mamba_dt_rank"];
                    Ok(Some(with(
                        mamba_sizes(file, names, "mamba_expand"),
                        &[
                            ("conv_bias", flag(file, "mamba_conv_bias", true).into()),
                            ("bias", flag(file, "mamba_proj_bias", false).into()),
                            ("norms", true.into()),
                        ],
                    )))
                },
            ),
        ],
    },
];
