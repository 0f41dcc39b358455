//! Types that are encoders.

use super::read::size;
use super::{
    AFTER_SUM, ALWAYS_TIED, BIASES, EMBEDDING_NORM, EPS_12, GLOBAL_THETA, HEAD_BIAS, HIDDEN_ACT,
    LAYER_NORM, LEARNED, NEVER_TIED, NO_GATE, OFFSET, RMS_EPS_5, TIED_BY_DEFAULT, WINDOW_THETA,
    derived, number,
};
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{HEAD_DIM, KV_HEADS};
use serde_json::{Value, json};

const SHAPE: &[Field] = &[VOCAB, HIDDEN, FFN, LAYERS, HEADS, ALWAYS_TIED];

const GELU: Field = field(
    &["hidden_act"],
    Meaning::Choice(
        "activation",
        &[("gelu", "gelu"), ("gelu_new", "gelu_new"), ("relu", "relu")],
    ),
);
const TOKEN_TYPES: Field = field(
    &["type_vocab_size"],
    Meaning::Default("token_types", Given::Int(2)),
);
/// Width of embedded tokens, if it is not that of the model.
const EMBEDDING_SIZE: Field = number(
    &["embedding_size"],
    "embedding_width",
    |file| {
        let width = file("hidden_size");
        let own = file("embedding_size").unwrap_or_else(|| 128.into());
        Ok(Some(own).filter(|own| Some(own) != width.as_ref()))
    },
    |model| {
        let own = &model["embedding_width"];
        Some(if own.is_null() { &model["hidden"] } else { own }.clone())
    },
);
const ABSOLUTE: Field = field(&["position_embedding_type"], Meaning::Word(&["absolute"]));
const NO_DECODER: Field = field(&["is_decoder"], Meaning::Off);
/// A class without an output layer has the hidden states; one with scores of positions has no layer
/// before them.
const NO_POOLER: Field = derived("pooler", &[], |file| {
    let classes = file("architectures");
    let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
    let bare = first.is_some_and(|class| class.ends_with("Model"));
    Ok(Some((!bare).into()))
});
/// The table has rows for padding.
const ROWS: Field = number(
    &["max_position_embeddings"],
    "max_seq_len",
    |file| {
        let rows = file("max_position_embeddings").and_then(|n| n.as_u64());
        Ok(Some(rows.unwrap_or(514).saturating_sub(2).into()))
    },
    |model| Some((model["max_seq_len"].as_u64()? + 2).into()),
);

/// Returns the row of a type with RoBERTa's code.
const fn roberta(model_type: &'static str, architecture: &'static str) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: ROBERTA,
        common: SHAPE,
        fields: &[EPS_12, GELU, TOKEN_TYPES, ROWS, ABSOLUTE, NO_DECODER],
    }
}

/// BERT's blocks and tables.
const BERT: &[(&str, Given)] = &[
    LAYER_NORM,
    AFTER_SUM,
    NO_GATE,
    BIASES,
    HEAD_BIAS,
    LEARNED,
    EMBEDDING_NORM,
];
/// The same, with rows for padding.
const ROBERTA: &[(&str, Given)] = &[
    LAYER_NORM,
    AFTER_SUM,
    NO_GATE,
    BIASES,
    HEAD_BIAS,
    LEARNED,
    EMBEDDING_NORM,
    OFFSET,
];

/// SigLIP's blocks; the head projects the last position.
const SIGLIP: &[(&str, Given)] = &[
    LAYER_NORM,
    NO_GATE,
    BIASES,
    HEAD_BIAS,
    LEARNED,
    ("pooler", Given::Bool(false)),
    ("head", Given::Str("vector")),
];
const SIGLIP_WHOLE: &[(&str, Given)] = &[
    LAYER_NORM,
    NO_GATE,
    BIASES,
    HEAD_BIAS,
    LEARNED,
    ("pooler", Given::Bool(false)),
    ("head", Given::Str("contrastive")),
    ("sigmoid_loss", Given::Bool(true)),
];
const SIGLIP_TEXT: &[Field] = &[
    field(
        &["layer_norm_eps"],
        Meaning::Default("norm_eps", Given::Float(1e-6)),
    ),
    field(
        &["hidden_act"],
        Meaning::Choice(
            "activation",
            &[
                ("gelu_pytorch_tanh", "gelu_tanh"),
                ("gelu", "gelu"),
                ("gelu_new", "gelu_new"),
            ],
        ),
    ),
    number(
        &["max_position_embeddings"],
        "max_seq_len",
        |file| {
            let rows = file("max_position_embeddings");
            Ok(Some(rows.unwrap_or_else(|| 64.into())))
        },
        |model| Some(model["max_seq_len"].clone()),
    ),
    derived("vector_width", &["projection_size"], |file| {
        Ok(file("projection_size").or_else(|| file("hidden_size")))
    }),
];

/// Returns the row of a text tower with SigLIP's code.
const fn siglip(
    model_type: &'static str,
    architecture: &'static str,
    fixed: &'static [(&'static str, Given)],
) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed,
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS],
        fields: SIGLIP_TEXT,
    }
}

/// Returns the keys that each block of queries attends to, of two global blocks, three next to it
/// and random ones, and the longest sequence that is not divided into blocks.
pub(super) fn seen(file: Fields<'_>) -> Result<Option<[u64; 2]>, String> {
    if file("attention_type") == Some("original_full".into()) {
        return Ok(None);
    }
    let block = size(file, "block_size", 64)?;
    let random = size(file, "num_random_blocks", 3)?;
    Ok(Some([(5 + random) * block, (5 + 2 * random) * block]))
}

/// Returns the positions that a window has on both sides, the same in every layer.
pub(super) fn attention_window(file: Fields<'_>) -> Result<u64, String> {
    let given = file("attention_window").unwrap_or_else(|| 512.into());
    let list = given
        .as_array()
        .cloned()
        .unwrap_or_else(|| vec![given.clone()]);
    let first = list.first().and_then(Value::as_u64);
    let first = first.filter(|_| list.iter().all(|n| n.as_u64() == first));
    first.ok_or_else(|| {
        format!("`attention_window` must be one number, the same in every layer, not {given}")
    })
}

/// Refuses a class that has parts of its own, or lacks one.
pub(super) fn no_class(file: Fields<'_>, class: &str, why: &str) -> Result<Option<Value>, String> {
    let classes = file("architectures");
    let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
    match first == Some(class) {
        true => Err(format!("the output layer of {class} is not planned: {why}")),
        false => Ok(None),
    }
}

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "longformer",
        architecture: "LongformerForMaskedLM",
        fixed: &[
            ROBERTA[0],
            ROBERTA[1],
            ROBERTA[2],
            ROBERTA[3],
            ROBERTA[4],
            ROBERTA[5],
            ROBERTA[6],
            OFFSET,
            ("global_projections", Given::Bool(true)),
        ],
        common: SHAPE,
        fields: &[
            EPS_12,
            GELU,
            TOKEN_TYPES,
            ROWS,
            NO_DECODER,
            // Half of it to each side.
            number(
                &["attention_window"],
                "sliding_window",
                |file| Ok(Some((attention_window(file)? / 2 + 1).into())),
                |model| Some((2 * (model["sliding_window"].as_u64()? - 1)).into()),
            ),
            derived("num_labels", &["onnx_export"], |file| {
                let why = "its first position is a global one, which has projections of its own; LongformerForMaskedLM and LongformerForTokenClassification have none";
                no_class(file, "LongformerForSequenceClassification", why)?;
                no_class(file, "LongformerForQuestionAnswering", why)
            }),
        ],
    },
    HfType {
        model_type: "big_bird",
        architecture: "BigBirdForMaskedLM",
        fixed: &[
            LAYER_NORM,
            AFTER_SUM,
            NO_GATE,
            HEAD_BIAS,
            LEARNED,
            EMBEDDING_NORM,
        ],
        common: SHAPE,
        fields: &[
            EPS_12,
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("gelu_new", "gelu_tanh"),
                        ("gelu", "gelu"),
                        ("relu", "relu"),
                    ],
                ),
            ),
            TOKEN_TYPES,
            POSITIONS,
            ABSOLUTE,
            NO_DECODER,
            field(&["add_cross_attention"], Meaning::Off),
            derived("bias", &["use_bias"], |file| {
                let plain = file("use_bias") == Some(false.into());
                Ok(Some(if plain {
                    "all_but_qkv".into()
                } else {
                    true.into()
                }))
            }),
            derived("embedding_multiplier", &["rescale_embeddings"], |file| {
                let scales = file("rescale_embeddings") == Some(true.into());
                let width = file("hidden_size").and_then(|h| h.as_f64());
                Ok(width.filter(|_| scales).map(|h| h.sqrt().into()))
            }),
            // As many keys as a window of this size has to both sides.
            derived(
                "sliding_window",
                &["attention_type", "block_size", "num_random_blocks"],
                |file| Ok(seen(file)?.map(|[keys, _]| keys.div_ceil(2).into())),
            ),
            derived("window_from", &["attention_type"], |file| {
                Ok(seen(file)?.map(|[_, longest]| longest.into()))
            }),
            derived("unused_pooler", &[], |file| {
                let first = file("architectures").and_then(|list| list.get(0).cloned());
                let uses = first.is_some_and(|c| c == "BigBirdForPreTraining");
                Ok(Some((!uses).into()))
            }),
            derived("num_labels", &[], |file| {
                let why = "it has layers of its own before the scores; BigBirdForTokenClassification has none";
                no_class(file, "BigBirdForQuestionAnswering", why)
            }),
        ],
    },
    HfType {
        model_type: "roformer",
        architecture: "RoFormerForMaskedLM",
        fixed: &[
            LAYER_NORM,
            AFTER_SUM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            EMBEDDING_NORM,
            ("position_embedding", Given::Str("rotary_interleaved")),
            ("rotary_table", Given::Bool(true)),
        ],
        common: SHAPE,
        fields: &[
            EPS_12,
            GELU,
            TOKEN_TYPES,
            number(
                &["max_position_embeddings"],
                "max_seq_len",
                |file| Ok(Some(size(file, "max_position_embeddings", 1536)?.into())),
                |model| Some(model["max_seq_len"].clone()),
            ),
            NO_DECODER,
            field(&["add_cross_attention"], Meaning::Off),
            field(&["rotary_value"], Meaning::Off),
            number(
                &["embedding_size"],
                "embedding_width",
                |file| {
                    let width = file("hidden_size");
                    let own = file("embedding_size");
                    Ok(own.filter(|own| Some(own) != width.as_ref()))
                },
                |model| {
                    let own = &model["embedding_width"];
                    Some(if own.is_null() { &model["hidden"] } else { own }.clone())
                },
            ),
            derived("num_labels", &[], |file| {
                let why = "it has layers of its own before the scores; RoFormerForTokenClassification has none";
                no_class(file, "RoFormerForSequenceClassification", why)
            }),
            NO_POOLER,
        ],
    },
    HfType {
        model_type: "esmc",
        architecture: "EsmcForMaskedLM",
        fixed: &[
            LAYER_NORM,
            HEAD_BIAS,
            ("qk_norm", Given::Str("full")),
            ("inner_norm", Given::Str("layer_norm_no_bias")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, NEVER_TIED,
        ],
        fields: &[
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            field(
                &["attention_bias"],
                Meaning::HasBias(BiasPart::Attention, false),
            ),
            field(&["mlp_bias"], Meaning::HasBias(BiasPart::Mlp, false)),
            // What blocks add is divided by the root of a 36th of their number.
            derived("residual_multiplier", &[], |file| {
                let layers = file("num_hidden_layers").and_then(|n| n.as_f64());
                Ok(layers.map(|n| (36.0 / n).sqrt().into()))
            }),
            derived("num_labels", &["mask_token_id"], |file| {
                let why = "it has layers of its own before the scores; EsmcForTokenClassification has none";
                no_class(file, "EsmcForSequenceClassification", why)
            }),
            NO_POOLER,
        ],
    },
    HfType {
        model_type: "bert",
        architecture: "BertForMaskedLM",
        fixed: BERT,
        common: SHAPE,
        fields: &[EPS_12, GELU, TOKEN_TYPES, POSITIONS, ABSOLUTE, NO_DECODER],
    },
    roberta("roberta", "RobertaForMaskedLM"),
    roberta("xlm-roberta", "XLMRobertaForMaskedLM"),
    roberta("camembert", "CamembertForMaskedLM"),
    roberta("data2vec-text", "Data2VecTextForMaskedLM"),
    HfType {
        model_type: "roberta-prelayernorm",
        architecture: "RobertaPreLayerNormForMaskedLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            LEARNED,
            EMBEDDING_NORM,
            OFFSET,
        ],
        common: SHAPE,
        fields: &[EPS_12, GELU, TOKEN_TYPES, ROWS, ABSOLUTE, NO_DECODER],
    },
    HfType {
        model_type: "layoutlm",
        architecture: "LayoutLMForMaskedLM",
        fixed: BERT,
        common: SHAPE,
        fields: &[
            EPS_12,
            GELU,
            TOKEN_TYPES,
            POSITIONS,
            field(
                &["max_2d_position_embeddings"],
                Meaning::Default("box_rows", Given::Int(1024)),
            ),
            derived("unused_pooler", &[], |file| {
                let classes = file("architectures");
                let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
                let uses = ["LayoutLMForSequenceClassification", "LayoutLMModel"];
                Ok(Some((!first.is_some_and(|c| uses.contains(&c))).into()))
            }),
        ],
    },
    // Norms come before layers; ESM-1b normalizes embedded tokens, too.
    HfType {
        model_type: "esm",
        architecture: "EsmForMaskedLM",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            ("contact_head", Given::Bool(true)),
            ("activation", Given::Str("gelu")),
        ],
        common: SHAPE,
        fields: &[
            EPS_12,
            POSITIONS,
            derived(
                "position_embedding",
                &["position_embedding_type"],
                |file| match file("position_embedding_type")
                    .as_ref()
                    .and_then(Value::as_str)
                {
                    None | Some("absolute") => Ok(Some("learned".into())),
                    Some("rotary") => Ok(Some("rotary".into())),
                    Some(other) => Err(format!(
                        "`position_embedding_type` must be absolute or rotary, not {other:?}"
                    )),
                },
            ),
            field(
                &["emb_layer_norm_before"],
                Meaning::Default("embedding_norm", Given::Bool(false)),
            ),
            field(&["is_folding_model"], Meaning::Off),
            derived(
                "num_labels",
                &[
                    "token_dropout",
                    "mask_token_id",
                    "esmfold_config",
                    "vocab_list",
                ],
                |_| Ok(None),
            ),
        ],
    },
    HfType {
        model_type: "xlm-roberta-xl",
        architecture: "XLMRobertaXLForMaskedLM",
        fixed: &[LAYER_NORM, NO_GATE, BIASES, HEAD_BIAS, LEARNED, OFFSET],
        common: SHAPE,
        fields: &[
            field(&["layer_norm_eps"], Meaning::Optional("norm_eps")),
            GELU,
            field(
                &["type_vocab_size"],
                Meaning::Default("token_types", Given::Int(1)),
            ),
            ROWS,
            ABSOLUTE,
            NO_DECODER,
        ],
    },
    HfType {
        model_type: "ernie",
        architecture: "ErnieForMaskedLM",
        fixed: BERT,
        common: SHAPE,
        fields: &[
            EPS_12,
            GELU,
            TOKEN_TYPES,
            POSITIONS,
            ABSOLUTE,
            NO_DECODER,
            field(&["use_task_id"], Meaning::Off),
            derived("num_labels", &["task_type_vocab_size"], |_| Ok(None)),
        ],
    },
    HfType {
        model_type: "megatron-bert",
        architecture: "MegatronBertForMaskedLM",
        fixed: &[LAYER_NORM, NO_GATE, BIASES, HEAD_BIAS, LEARNED],
        common: SHAPE,
        fields: &[EPS_12, GELU, TOKEN_TYPES, POSITIONS, ABSOLUTE, NO_DECODER],
    },
    HfType {
        model_type: "mpnet",
        architecture: "MPNetForMaskedLM",
        fixed: ROBERTA,
        common: SHAPE,
        fields: &[
            EPS_12,
            GELU,
            ROWS,
            field(
                &["relative_attention_num_buckets"],
                Meaning::Default("relative_buckets", Given::Int(32)),
            ),
        ],
    },
    HfType {
        model_type: "distilbert",
        architecture: "DistilBertForMaskedLM",
        fixed: BERT,
        common: &[VOCAB, POSITIONS, ALWAYS_TIED],
        fields: &[
            field(&["dim"], Meaning::Required("hidden")),
            field(&["hidden_dim"], Meaning::Required("ffn")),
            field(&["n_layers"], Meaning::Required("layers")),
            field(&["n_heads"], Meaning::Required("heads")),
            field(
                &["activation"],
                Meaning::Choice("activation", &[("gelu", "gelu"), ("relu", "relu")]),
            ),
            derived("norm_eps", &["sinusoidal_pos_embds"], |_| {
                Ok(Some(1e-12.into()))
            }),
            derived("pooler", &[], |file| no_pooler(file, "DistilBertModel")),
        ],
    },
    HfType {
        model_type: "modernbert",
        architecture: "ModernBertForMaskedLM",
        fixed: &[
            ("norm", Given::Str("layer_norm_no_bias")),
            ("packed_qkv", Given::Str("concatenated")),
            ("packed_gate_up", Given::Bool(true)),
            HEAD_BIAS,
            EMBEDDING_NORM,
            ("plain_first_block", Given::Bool(true)),
            ("pooler", Given::Bool(false)),
        ],
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS, TIED_BY_DEFAULT],
        fields: &[
            Field {
                names: &["norm_eps"],
                meaning: Meaning::Optional("norm_eps"),
            },
            Field {
                names: &["hidden_activation"],
                ..GELU
            },
            POSITIONS,
            GLOBAL_THETA,
            WINDOW_THETA,
            // Half of it to each side.
            number(
                &["local_attention"],
                "sliding_window",
                |file| {
                    let both = file("local_attention").and_then(|n| n.as_u64());
                    Ok(Some((both.unwrap_or(128) / 2 + 1).into()))
                },
                |model| Some((2 * (model["sliding_window"].as_u64()? - 1)).into()),
            ),
            field(
                &["global_attn_every_n_layers"],
                Meaning::Computed(
                    "layer_types",
                    Computed {
                        also: &["layer_types"],
                        read: |file| {
                            let every = file("global_attn_every_n_layers");
                            let every = every.and_then(|n| n.as_u64()).unwrap_or(3).max(1);
                            let word = |i| match i {
                                0 => "full_attention",
                                _ => "sliding_attention",
                            };
                            Ok(Some((0..every).map(word).collect()))
                        },
                        write: |model| Some(json!(model["layer_types"].as_array()?.len())),
                    },
                ),
            ),
            field(
                &["attention_bias"],
                Meaning::HasBias(BiasPart::Attention, false),
            ),
            field(&["mlp_bias"], Meaning::HasBias(BiasPart::Mlp, false)),
            field(&["norm_bias"], Meaning::Off),
            field(&["classifier_bias"], Meaning::Off),
            field(&["decoder_bias"], Meaning::On),
        ],
    },
    HfType {
        model_type: "eurobert",
        architecture: "EuroBertForMaskedLM",
        fixed: &[
            ("pooler", Given::Bool(false)),
            ("head_transform", Given::Bool(false)),
        ],
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, TIED],
        fields: &[
            RMS_EPS_5,
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            field(
                &["attention_bias"],
                Meaning::HasBias(BiasPart::Attention, false),
            ),
            field(&["mlp_bias"], Meaning::HasBias(BiasPart::Mlp, false)),
            derived(
                "head_bias",
                &["classifier_pooling", "clf_pooling", "pretraining_tp"],
                |file| {
                    late_pooling(file)?;
                    Ok(Some((file("mlp_bias") == Some(true.into())).into()))
                },
            ),
        ],
    },
    HfType {
        model_type: "electra",
        architecture: "ElectraForMaskedLM",
        fixed: BERT,
        common: SHAPE,
        fields: &[
            EPS_12,
            GELU,
            TOKEN_TYPES,
            POSITIONS,
            ABSOLUTE,
            NO_DECODER,
            EMBEDDING_SIZE,
            derived(
                "pooler",
                &[
                    "summary_type",
                    "summary_use_proj",
                    "summary_activation",
                    "summary_last_dropout",
                ],
                |file| no_pooler(file, "ElectraModel"),
            ),
        ],
    },
    siglip("siglip_text_model", "SiglipTextModel", SIGLIP),
    siglip("siglip2_text_model", "Siglip2TextModel", SIGLIP),
    // The text towers of the whole, whose results are compared with images.
    siglip("siglip", "SiglipModel", SIGLIP_WHOLE),
    siglip("siglip2", "Siglip2Model", SIGLIP_WHOLE),
    HfType {
        model_type: "albert",
        architecture: "AlbertForMaskedLM",
        fixed: BERT,
        common: &[VOCAB, HIDDEN, FFN, HEADS, ALWAYS_TIED],
        fields: &[
            EPS_12,
            // Another default than BERT's.
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[("gelu_new", "gelu_new"), ("gelu", "gelu"), ("relu", "relu")],
                ),
            ),
            TOKEN_TYPES,
            POSITIONS,
            Field {
                meaning: Meaning::Default("embedding_width", Given::Int(128)),
                ..EMBEDDING_SIZE
            },
            number(
                &["num_hidden_layers"],
                "layers",
                |file| {
                    let of = |name, default| size(file, name, default);
                    let (layers, groups) =
                        (of("num_hidden_layers", 12)?, of("num_hidden_groups", 1)?);
                    if !layers.is_multiple_of(groups) {
                        return Err(format!(
                            "`num_hidden_layers` ({layers}) must be divisible by `num_hidden_groups` ({groups}): groups of different sizes are not planned"
                        ));
                    }
                    Ok(Some((layers * of("inner_group_num", 1)?).into()))
                },
                |model| {
                    let inner = model["group_layers"].as_u64().unwrap_or(1).max(1);
                    Some((model["layers"].as_u64()? / inner).into())
                },
            ),
            field(
                &["num_hidden_groups"],
                Meaning::Default("layer_groups", Given::Int(1)),
            ),
            field(
                &["inner_group_num"],
                Meaning::Default("group_layers", Given::Int(1)),
            ),
        ],
    },
    HfType {
        model_type: "deberta",
        architecture: "DebertaForMaskedLM",
        fixed: &[
            LAYER_NORM,
            AFTER_SUM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            EMBEDDING_NORM,
            ("key_bias", Given::Bool(false)),
            ("packed_qkv", Given::Str("per_head")),
            ("disentangled_projections", Given::Bool(true)),
        ],
        common: SHAPE,
        fields: &[
            field(
                &["layer_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-7)),
            ),
            GELU,
            field(
                &["type_vocab_size"],
                Meaning::Default("token_types", Given::Int(0)),
            ),
            POSITIONS,
            derived("position_embedding", &["position_biased_input"], |file| {
                let off = file("position_biased_input") == Some(false.into());
                Ok(Some(if off { "none" } else { "learned" }.into()))
            }),
            derived(
                "disentangled_rows",
                &[
                    "relative_attention",
                    "max_relative_positions",
                    "pos_att_type",
                ],
                |file| Ok(Some(first_relative_rows(file)?.into())),
            ),
            derived(
                "pooler",
                &[
                    "embedding_size",
                    "legacy",
                    "pooler_hidden_size",
                    "pooler_hidden_act",
                    "talking_head",
                ],
                |file| {
                    plain_deberta(file)?;
                    if file("talking_head") == Some(true.into()) {
                        return Err("`talking_head` must be false".to_owned());
                    }
                    no_pooler(file, "DebertaModel")
                },
            ),
        ],
    },
    HfType {
        model_type: "deberta-v2",
        architecture: "DebertaV2ForMaskedLM",
        fixed: &[
            LAYER_NORM,
            AFTER_SUM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            EMBEDDING_NORM,
        ],
        common: SHAPE,
        fields: &[
            field(
                &["layer_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-7)),
            ),
            GELU,
            field(
                &["type_vocab_size"],
                Meaning::Default("token_types", Given::Int(0)),
            ),
            POSITIONS,
            derived("position_embedding", &["position_biased_input"], |file| {
                let off = file("position_biased_input") == Some(false.into());
                Ok(Some(if off { "none" } else { "learned" }.into()))
            }),
            derived(
                "disentangled_rows",
                &[
                    "relative_attention",
                    "position_buckets",
                    "max_relative_positions",
                    "pos_att_type",
                    "share_att_key",
                    "norm_rel_ebd",
                ],
                |file| Ok(Some(relative_rows(file)?.into())),
            ),
            derived(
                "pooler",
                &[
                    "embedding_size",
                    "attention_head_size",
                    "conv_kernel_size",
                    "conv_act",
                    "conv_groups",
                    "legacy",
                    "pooler_hidden_size",
                    "pooler_hidden_act",
                ],
                |file| {
                    plain_deberta(file)?;
                    no_pooler(file, "DebertaV2Model")
                },
            ),
        ],
    },
    // Files from before transformers had the class name the sizes like GPT-2's.
    HfType {
        model_type: "nomic_bert",
        architecture: "NomicBertForMaskedLM",
        fixed: &[LAYER_NORM, AFTER_SUM, HEAD_BIAS, EMBEDDING_NORM],
        common: &[VOCAB, TOKEN_TYPES, ALWAYS_TIED],
        fields: &[
            Field {
                names: &["hidden_size", "n_embd"],
                ..HIDDEN
            },
            Field {
                names: &["intermediate_size", "n_inner"],
                ..FFN
            },
            Field {
                names: &["num_hidden_layers", "n_layer"],
                ..LAYERS
            },
            Field {
                names: &["num_attention_heads", "n_head"],
                ..HEADS
            },
            Field {
                names: &["max_position_embeddings", "n_positions"],
                ..POSITIONS
            },
            Field {
                names: &["layer_norm_eps", "layer_norm_epsilon"],
                ..EPS_12
            },
            Field {
                names: &[
                    "rope_theta",
                    "rope_parameters.rope_theta",
                    "rotary_emb_base",
                ],
                meaning: Meaning::Default("rope_theta", Given::Float(1e3)),
            },
            field(&["head_dim"], Meaning::Optional("head_dim")),
            Field {
                names: &["hidden_act", "activation_function"],
                meaning: Meaning::Choice(
                    "activation",
                    &[
                        ("silu", "silu"),
                        ("swiglu", "silu"),
                        ("gelu", "gelu"),
                        ("geglu", "gelu"),
                    ],
                ),
            },
            field(&["qkv_proj_bias"], Meaning::Off),
            field(&["mlp_fc1_bias"], Meaning::Off),
            field(&["mlp_fc2_bias"], Meaning::Off),
            field(&["prenorm"], Meaning::Off),
            field(&["use_rms_norm"], Meaning::Off),
            derived("pooler", &[], |file| no_pooler(file, "NomicBertModel")),
        ],
    },
    HfType {
        model_type: "jina_embeddings_v3",
        architecture: "JinaEmbeddingsV3ForMaskedLM",
        fixed: &[
            LAYER_NORM,
            AFTER_SUM,
            NO_GATE,
            BIASES,
            HEAD_BIAS,
            EMBEDDING_NORM,
        ],
        common: SHAPE,
        fields: &[
            field(&["layer_norm_eps"], Meaning::Optional("norm_eps")),
            GELU,
            field(
                &["type_vocab_size"],
                Meaning::Default("token_types", Given::Int(1)),
            ),
            POSITIONS,
            Field {
                names: &["rope_theta", "rope_parameters.rope_theta"],
                meaning: Meaning::Default("rope_theta", Given::Float(2e4)),
            },
        ],
    },
];

/// Refuses to classify sequences by one vector where the plan averages scores.
fn late_pooling(file: Fields<'_>) -> Result<(), String> {
    let first = file("architectures").and_then(|list| list.get(0).cloned());
    let classifies = first.is_some_and(|c| c == "EuroBertForSequenceClassification");
    let pooling = file("classifier_pooling").or_else(|| file("clf_pooling"));
    match pooling {
        Some(other) if classifies && other != "late" => Err(format!(
            "`classifier_pooling` must be \"late\", not {other}: one vector for each sequence is not planned"
        )),
        _ => Ok(()),
    }
}

/// Returns that a class has no pooler, unlike those with an output layer for sequences.
fn no_pooler(file: Fields<'_>, class: &str) -> Result<Option<Value>, String> {
    let classes = file("architectures");
    let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
    Ok((first == Some(class)).then(|| false.into()))
}

/// Returns the rows of the table of relative positions of a DeBERTa.
fn relative_rows(file: Fields<'_>) -> Result<u64, String> {
    if file("relative_attention") != Some(true.into()) {
        return Err("`relative_attention` must be true".to_owned());
    }
    let number = |name: &str| file(name).and_then(|n| n.as_u64()).filter(|n| *n > 0);
    let norm = file("norm_rel_ebd");
    let norm = norm.as_ref().and_then(Value::as_str).unwrap_or("none");
    if !norm.contains("layer_norm") {
        return Err("`norm_rel_ebd` must be layer_norm".to_owned());
    }
    if file("share_att_key") != Some(true.into()) {
        return Err(
            "`share_att_key` must be true: projections of positions are not planned".into(),
        );
    }
    let reach = number("position_buckets").or_else(|| number("max_relative_positions"));
    let reach = reach.or_else(|| number("max_position_embeddings"));
    Ok(2 * reach.unwrap_or(512))
}

/// Returns the rows of the table of relative positions of DeBERTa v1; 0 without one.
fn first_relative_rows(file: Fields<'_>) -> Result<u64, String> {
    if file("relative_attention") != Some(true.into()) {
        return Ok(0);
    }
    let kinds = match file("pos_att_type") {
        Some(Value::String(words)) => words.to_lowercase(),
        other => other.map_or_else(String::new, |list| list.to_string()),
    };
    if !kinds.contains("c2p") || !kinds.contains("p2c") {
        return Err(
            "`pos_att_type` must be c2p and p2c: one projection of positions alone is not planned"
                .to_owned(),
        );
    }
    let number = |name: &str| file(name).and_then(|n| n.as_u64()).filter(|n| *n > 0);
    let reach = number("max_relative_positions").or_else(|| number("max_position_embeddings"));
    Ok(2 * reach.unwrap_or(512))
}

/// Refuses what a DeBERTa may have besides BERT's layers.
fn plain_deberta(file: Fields<'_>) -> Result<(), String> {
    let number = |name: &str| file(name).and_then(|n| n.as_u64());
    if number("conv_kernel_size").is_some_and(|n| n > 0) {
        return Err("`conv_kernel_size` must be 0: its convolution is not planned".to_owned());
    }
    if file("legacy") == Some(false.into()) {
        return Err("`legacy` must be true".to_owned());
    }
    let (width, heads) = (number("hidden_size"), number("num_attention_heads"));
    let head = width.zip(heads).map(|(width, heads)| width / heads.max(1));
    for (name, wanted) in [
        ("embedding_size", width),
        ("pooler_hidden_size", width),
        ("attention_head_size", head),
    ] {
        if let (Some(given), Some(wanted)) = (number(name), wanted)
            && given != wanted
        {
            return Err(format!("`{name}` ({given}) must be {wanted}"));
        }
    }
    Ok(())
}
