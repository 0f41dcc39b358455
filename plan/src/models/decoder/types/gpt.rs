//! Types with LayerNorm and a feed-forward layer without a gate.

use super::{
    BIASES, HEAD_BIAS, LAYER_EPS_5, LAYER_NORM, LAYER_NORM_EPS, LAYER_NORM_EPSILON, LEARNED,
    NO_GATE, PARTIAL_HALF, QUICK_GELU, TIED_BY_DEFAULT, derived, number,
};
use crate::models::gpt2::ACTIVATIONS;
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::KV_HEADS;
use crate::models::windows::{FULL, MOST_LAYERS, WINDOW, all_types, repeated};
use serde_json::{Value, json};

const ONE_NORM: (&str, Given) = ("residual", Given::Str("parallel_one_norm"));
/// Shapes as GPT-2 names them.
const N_EMBD: Field = field(&["n_embd"], Meaning::Required("hidden"));
const N_LAYER: Field = field(&["n_layer"], Meaning::Required("layers"));
const N_HEAD: Field = field(&["n_head"], Meaning::Required("heads"));
const N_INNER: Field = field(&["n_inner"], Meaning::Optional("ffn"));
const N_POSITIONS: Field = field(&["n_positions"], Meaning::Positions);
const ACTIVATION_FUNCTION: Field = field(
    &["activation_function"],
    Meaning::Choice("activation", ACTIVATIONS),
);

/// GPT-J gives the rotated dimensions of a head, not their share.
const ROTARY_DIM: Field = rotary_dim::<64>();

/// Rotated dimensions of a head, of which there are `DIMS` if the file does not say how many.
const fn rotary_dim<const DIMS: u32>() -> Field {
    number(
        &["rotary_dim"],
        "partial_rotary_factor",
        |file| {
            let of = |name| file(name).and_then(|n| n.as_f64());
            let head = of("n_embd")
                .zip(of("n_head"))
                .map(|(width, heads)| width / heads);
            let dims = of("rotary_dim").unwrap_or(f64::from(DIMS));
            Ok(head.map(|head| (dims / head).into()))
        },
        |model| {
            let share = model["partial_rotary_factor"].as_f64()?;
            Some(((model["head_dim"].as_f64()? * share) as u64).into())
        },
    )
}

/// Whether embedded tokens are multiplied by the root of the width.
const SCALES_BIOGPT: Field = number(
    &["scale_embedding"],
    "embedding_multiplier",
    |file| Ok(root_of_width(file, "hidden_size")),
    |model| Some((model["embedding_multiplier"] != 1.0).into()),
);
const SCALES_XGLM: Field = field(
    &["scale_embedding"],
    Meaning::Computed(
        "embedding_multiplier",
        Computed {
            also: &["init_std", "layerdrop"],
            read: |file| Ok(root_of_width(file, "d_model")),
            write: |model| Some((model["embedding_multiplier"] != 1.0).into()),
        },
    ),
);

/// GPT-BigCode has one key for all queries, or packs query, key and value of each head.
const ONE_KEY: Field = number(
    &["multi_query"],
    "kv_heads",
    |file| {
        let one = file("multi_query") != Some(false.into());
        Ok(one.then(|| 1.into()))
    },
    |model| Some((model["kv_heads"] == 1).into()),
);
const BIGCODE_PACKING: Field = derived("packed_qkv", &[], |file| {
    let one = file("multi_query") != Some(false.into());
    Ok(Some(if one { "concatenated" } else { "per_head" }.into()))
});

const CLIP_TEXT: &[Field] = &[
    LAYER_EPS_5,
    QUICK_GELU,
    number(
        &["max_position_embeddings"],
        "max_seq_len",
        |file| {
            let rows = file("max_position_embeddings");
            Ok(Some(rows.unwrap_or_else(|| 77.into())))
        },
        |model| Some(model["max_seq_len"].clone()),
    ),
    field(
        &["projection_dim"],
        Meaning::Default("vector_width", Given::Int(512)),
    ),
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "openai-gpt",
        architecture: "OpenAIGPTLMHeadModel",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            LEARNED,
            BIASES,
            ("norm_position", Given::Str("sum")),
            ("packed_qkv", Given::Str("concatenated")),
        ],
        common: &[
            VOCAB,
            N_EMBD,
            N_LAYER,
            N_HEAD,
            N_POSITIONS,
            LAYER_NORM_EPSILON,
        ],
        fields: &[
            TIED_BY_DEFAULT,
            field(
                &["afn"],
                Meaning::Choice(
                    "activation",
                    &[("gelu", "gelu_tanh"), ("swish", "silu"), ("relu", "relu")],
                ),
            ),
        ],
    },
    HfType {
        model_type: "ctrl",
        architecture: "CTRLLMHeadModel",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            ("activation", Given::Str("relu")),
            ("position_embedding", Given::Str("sinusoidal")),
        ],
        common: &[VOCAB, N_EMBD, N_LAYER, N_HEAD, N_POSITIONS],
        fields: &[
            TIED_BY_DEFAULT,
            field(
                &["layer_norm_epsilon"],
                Meaning::Default("norm_eps", Given::Float(1e-6)),
            ),
            field(&["dff"], Meaning::Default("ffn", Given::Int(8192))),
            derived("embedding_multiplier", &[], |file| {
                Ok(file("n_embd").and_then(|width| Some(width.as_f64()?.sqrt().into())))
            }),
        ],
    },
    HfType {
        model_type: "phi",
        architecture: "PhiForCausalLM",
        fixed: &[LAYER_NORM, ONE_NORM, NO_GATE, BIASES, HEAD_BIAS],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS, ROPE_THETA, TIED,
        ],
        fields: &[
            LAYER_NORM_EPS,
            field(&["hidden_act"], Meaning::Choice("activation", ACTIVATIONS)),
            PARTIAL_HALF,
            number(
                &["qk_layernorm"],
                "qk_norm",
                |file| Ok((file("qk_layernorm") == Some(true.into())).then(|| true.into())),
                |model| Some(model["qk_norm"].clone()),
            ),
        ],
    },
    // Phi before transformers had its class.
    HfType {
        model_type: "phi-msft",
        architecture: "PhiForCausalLM",
        fixed: &[
            LAYER_NORM,
            ONE_NORM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            ("packed_qkv", Given::Str("concatenated")),
        ],
        common: &[VOCAB, N_EMBD, N_INNER, N_LAYER, N_HEAD, N_POSITIONS, TIED],
        fields: &[
            LAYER_NORM_EPSILON,
            ACTIVATION_FUNCTION,
            rotary_dim::<32>(),
            field(&["n_head_kv"], Meaning::Optional("kv_heads")),
            derived("num_labels", &["fused_dense"], |_| Ok(None)),
        ],
    },
    HfType {
        model_type: "gptj",
        architecture: "GPTJForCausalLM",
        fixed: &[
            LAYER_NORM,
            ONE_NORM,
            NO_GATE,
            ("bias", Given::Str("mlp")),
            HEAD_BIAS,
            ("position_embedding", Given::Str("rotary_interleaved")),
        ],
        common: &[VOCAB, N_EMBD, N_INNER, N_LAYER, N_HEAD, N_POSITIONS, TIED],
        fields: &[
            LAYER_NORM_EPSILON,
            ACTIVATION_FUNCTION,
            ROTARY_DIM,
            field(&["rotary"], Meaning::On),
            field(&["scale_attn_weights"], Meaning::On),
            field(&["add_cross_attention"], Meaning::Off),
        ],
    },
    HfType {
        model_type: "gpt_bigcode",
        architecture: "GPTBigCodeForCausalLM",
        fixed: &[LAYER_NORM, NO_GATE, BIASES, LEARNED],
        common: &[
            VOCAB,
            N_EMBD,
            N_INNER,
            N_LAYER,
            N_HEAD,
            N_POSITIONS,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            LAYER_NORM_EPSILON,
            field(
                &["activation_function"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("gelu_pytorch_tanh", "gelu_tanh"),
                        ("gelu_new", "gelu_new"),
                        ("gelu", "gelu"),
                    ],
                ),
            ),
            ONE_KEY,
            BIGCODE_PACKING,
            field(&["resid_pdrop"], Meaning::Dropout),
            field(&["embd_pdrop"], Meaning::Dropout),
            field(&["attn_pdrop"], Meaning::Dropout),
            field(&["scale_attn_weights"], Meaning::On),
            field(&["add_cross_attention"], Meaning::Off),
        ],
    },
    HfType {
        model_type: "starcoder2",
        architecture: "Starcoder2ForCausalLM",
        fixed: &[LAYER_NORM, NO_GATE],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            POSITIONS,
            ROPE_THETA,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            field(&["norm_epsilon"], Meaning::Optional("norm_eps")),
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")],
                ),
            ),
            WINDOW,
            field(&["use_bias"], Meaning::HasBias(BiasPart::All, true)),
        ],
    },
    HfType {
        model_type: "clip_text_model",
        architecture: "CLIPTextModel",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            LEARNED,
            BIASES,
            ("head", Given::Str("none")),
        ],
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS],
        fields: CLIP_TEXT,
    },
    // The language model of the whole, whose result is compared with images.
    HfType {
        model_type: "clip",
        architecture: "CLIPModel",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            LEARNED,
            BIASES,
            ("head", Given::Str("contrastive")),
        ],
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS],
        fields: CLIP_TEXT,
    },
    HfType {
        model_type: "opt",
        architecture: "OPTForCausalLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            LEARNED,
            ("position_offset", Given::Int(2)),
        ],
        common: &[VOCAB, HIDDEN, LAYERS, HEADS, POSITIONS, TIED_BY_DEFAULT],
        fields: &[
            field(&["ffn_dim"], Meaning::Required("ffn")),
            field(&["dropout"], Meaning::Dropout),
            field(
                &["activation_function"],
                Meaning::Choice("activation", &[("relu", "relu"), ("gelu", "gelu")]),
            ),
            number(
                &["do_layer_norm_before"],
                "norm_position",
                |file| {
                    let after = file("do_layer_norm_before") == Some(false.into());
                    Ok(after.then(|| "sum".into()))
                },
                |model| Some((model["norm_position"] == "before").into()),
            ),
            field(&["layer_norm_elementwise_affine"], Meaning::On),
            field(&["_remove_final_layer_norm"], Meaning::Off),
            field(&["enable_bias"], Meaning::HasBias(BiasPart::All, true)),
            number(
                &["word_embed_proj_dim"],
                "embedding_width",
                |file| {
                    let width = file("hidden_size");
                    Ok(file("word_embed_proj_dim").filter(|own| Some(own) != width.as_ref()))
                },
                |model| {
                    let own = &model["embedding_width"];
                    Some(if own.is_null() { &model["hidden"] } else { own }.clone())
                },
            ),
        ],
    },
    HfType {
        model_type: "codegen",
        architecture: "CodeGenForCausalLM",
        fixed: &[
            LAYER_NORM,
            ONE_NORM,
            NO_GATE,
            ("bias", Given::Str("mlp")),
            HEAD_BIAS,
            ("position_embedding", Given::Str("rotary_interleaved")),
            ("packed_qkv", Given::Str("concatenated")),
        ],
        common: &[VOCAB, N_EMBD, N_INNER, N_LAYER, N_HEAD, N_POSITIONS, TIED],
        fields: &[LAYER_NORM_EPSILON, ACTIVATION_FUNCTION, ROTARY_DIM],
    },
    HfType {
        model_type: "gpt_neo",
        architecture: "GPTNeoForCausalLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            LEARNED,
            ("bias", Given::Str("all_but_qkv")),
            ("attention_multiplier", Given::Float(1.0)),
        ],
        common: &[VOCAB, HIDDEN, POSITIONS, TIED_BY_DEFAULT],
        fields: &[
            field(&["num_layers"], Meaning::Required("layers")),
            field(&["num_heads"], Meaning::Required("heads")),
            field(&["intermediate_size"], Meaning::Optional("ffn")),
            LAYER_NORM_EPSILON,
            ACTIVATION_FUNCTION,
            field(
                &["window_size"],
                Meaning::Default("sliding_window", Given::Int(256)),
            ),
            LOCAL_LAYERS,
        ],
    },
    HfType {
        model_type: "persimmon",
        architecture: "PersimmonForCausalLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            ("packed_qkv", Given::Str("per_head")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, POSITIONS, ROPE_THETA, TIED,
        ],
        fields: &[
            LAYER_NORM_EPS,
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("relu2", "relu2"),
                        ("relu", "relu"),
                        ("gelu", "gelu"),
                        ("silu", "silu"),
                    ],
                ),
            ),
            PARTIAL_HALF,
            number(
                &["qk_layernorm"],
                "qk_norm",
                |file| Ok(Some((file("qk_layernorm") != Some(false.into())).into())),
                |model| Some(model["qk_norm"].clone()),
            ),
        ],
    },
    HfType {
        model_type: "biogpt",
        architecture: "BioGptForCausalLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            LEARNED,
            ("position_offset", Given::Int(2)),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            POSITIONS,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            field(
                &["layer_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-12)),
            ),
            field(
                &["hidden_act"],
                Meaning::Choice("activation", &[("gelu", "gelu"), ("relu", "relu")]),
            ),
            SCALES_BIOGPT,
            field(&["hidden_dropout_prob"], Meaning::Dropout),
            field(&["attention_probs_dropout_prob"], Meaning::Dropout),
        ],
    },
    HfType {
        model_type: "xglm",
        architecture: "XGLMForCausalLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            ("position_embedding", Given::Str("sinusoidal")),
            // Rows are numbered from the padding's on.
            ("position_offset", Given::Int(2)),
        ],
        common: &[VOCAB, POSITIONS, TIED_BY_DEFAULT],
        fields: &[
            field(&["d_model"], Meaning::Required("hidden")),
            field(&["ffn_dim"], Meaning::Required("ffn")),
            field(&["num_layers"], Meaning::Required("layers")),
            field(&["attention_heads"], Meaning::Required("heads")),
            field(
                &["activation_function"],
                Meaning::Choice("activation", &[("gelu", "gelu"), ("relu", "relu")]),
            ),
            field(&["add_cross_attention"], Meaning::Off),
            SCALES_XGLM,
            field(&["dropout"], Meaning::Dropout),
            field(&["attention_dropout"], Meaning::Dropout),
        ],
    },
];

/// Returns the root of the width, which embedded tokens are multiplied by unless the file says that
/// they are not.
fn root_of_width(file: Fields<'_>, width: &str) -> Option<Value> {
    let off = file("scale_embedding") == Some(false.into());
    let width = file(width).and_then(|h| h.as_f64());
    width.filter(|_| !off).map(|w| w.sqrt().into())
}

/// The types of GPT-Neo's layers, as one group with all of them.
const LOCAL_LAYERS: Field = field(
    &["attention_types"],
    Meaning::Computed(
        "layer_types",
        Computed {
            also: &["attention_layers"],
            read: |file| Ok(Some(local_layers(file)?)),
            write: |model| {
                let word = |t: &Value| if t == FULL { "global" } else { "local" };
                let words: Vec<&str> = all_types(model)?.iter().map(word).collect();
                Some(json!([[words, 1]]))
            },
        },
    ),
);

/// Returns the types of GPT-Neo's layers: listed, or lists that are repeated.
fn local_layers(file: Fields<'_>) -> Result<Value, String> {
    let mut all = Vec::new();
    match (file("attention_layers"), file("attention_types")) {
        (Some(Value::Array(listed)), _) => all = listed,
        (_, Some(Value::Array(groups))) => {
            for group in groups {
                let (words, times) = (group[0].as_array(), group[1].as_u64());
                let (Some(words), Some(times)) = (words, times) else {
                    return Err(
                        "`attention_types` must have lists of words and a number".to_owned()
                    );
                };
                // No model has more layers than the key of their number allows.
                let times = times.min(MOST_LAYERS) as usize;
                let repeated = words.iter().cycle().take(words.len() * times);
                all.extend(repeated.take(MOST_LAYERS as usize).cloned());
            }
        }
        _ => all.extend([Value::from("global"), Value::from("local")]),
    }
    let word = |v: &Value| match v.as_str() {
        Some("global") => Ok("full_attention"),
        Some("local") => Ok("sliding_attention"),
        _ => Err(format!(
            "a layer is of type {v}; known are global and local"
        )),
    };
    let all: Vec<&str> = all.iter().map(word).collect::<Result<_, _>>()?;
    Ok(repeated(&all))
}
