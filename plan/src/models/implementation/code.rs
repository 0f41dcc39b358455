//! Differences in the modeling code of some types, by `model_type`.

use crate::config::{Family, Model};

/// Differences of a type's code from Llama's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code {
    pub(super) norm: NormCode,
    pub(super) rotary: RotaryCode,
    pub(super) attention: AttentionCode,
    pub(super) dropout: DropoutCode,
    /// Logits are converted to float32 for the cross entropy (`ForCausalLMLoss`).
    pub(super) float_loss: bool,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttentionCode {
    /// Whether the type has code for `sdpa`. Transformers loads the others with `eager`.
    pub(super) sdpa: bool,
    /// One key for all heads is passed to `scaled_dot_product_attention` as it is. No fused kernel
    /// broadcasts it.
    pub(super) broadcasts_key: bool,
    /// Types of eager attention.
    pub(super) eager: ScoreType,
    /// Eager attention masks scores by `masked_fill` in place of a sum.
    pub(super) fills_mask: bool,
}

/// Where layers have dropout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DropoutCode {
    /// After the output projection of attention.
    pub(super) after_attention: bool,
    /// On the input of the last matmul of a feed-forward layer.
    pub(super) inside_ffn: bool,
}

/// The type in which eager attention computes scores and their softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScoreType {
    /// That of the activations.
    Activations,
    /// Scores are converted to float32 for the softmax.
    FloatSoftmax,
    /// Queries and keys are converted to float32 for the scores.
    Float,
}

/// In which type a norm multiplies by its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NormCode {
    /// In that of the activations, after the conversion back. LayerNorm is one fused call.
    InType,
    /// In float32, to which the weight is promoted. LayerNorm without parameters is one call on
    /// the converted input.
    Promoted,
    /// In float32, to which the weight is converted. LayerNorm is written in single operations.
    Converted,
}

/// How queries and keys are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RotaryCode {
    pub(super) arithmetic: RotaryType,
    /// Each layer repeats the tables for pairs of neighbors (`repeat_interleave`).
    pub(super) repeats_tables: bool,
    /// Rotated dimensions are concatenated with the others even if there are none.
    pub(super) always_concatenates: bool,
}

/// The type that a rotation is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RotaryType {
    /// That of the activations.
    Activations,
    /// Float32, because the tables stay in it; results are converted back.
    Tables,
    /// Float32, to which queries and keys are converted.
    Converted,
    /// Float32, to which both factors of each table are converted.
    ConvertedTwice,
}

impl Code {
    /// Code of most types.
    const LLAMA: Self = Self {
        norm: NormCode::InType,
        rotary: RotaryCode {
            arithmetic: RotaryType::Activations,
            repeats_tables: false,
            always_concatenates: false,
        },
        attention: AttentionCode {
            sdpa: true,
            broadcasts_key: false,
            eager: ScoreType::FloatSoftmax,
            fills_mask: false,
        },
        dropout: DropoutCode {
            after_attention: true,
            inside_ffn: false,
        },
        float_loss: true,
    };

    /// Returns the code of a model's type.
    pub(super) fn of(m: &Model) -> Self {
        Self {
            float_loss: float_loss(m),
            ..Self::of_layers(m)
        }
    }

    fn of_layers(m: &Model) -> Self {
        Self {
            attention: AttentionCode::of(m),
            dropout: DropoutCode::of(m),
            ..Self::outside_attention(m)
        }
    }

    fn outside_attention(m: &Model) -> Self {
        let with = |norm, arithmetic, repeats_tables, always_concatenates| Self {
            norm,
            rotary: RotaryCode {
                arithmetic,
                repeats_tables,
                always_concatenates,
            },
            ..Self::LLAMA
        };
        use NormCode::{Converted, InType, Promoted};
        use RotaryType::Activations;
        match m.options.model_type.as_deref().unwrap_or_default() {
            "olmo" | "olmo2" | "olmo3" | "flex_olmo" => {
                with(Promoted, RotaryType::Tables, false, false)
            }
            "cohere" | "cohere2" => with(Converted, RotaryType::Converted, false, false),
            "helium" => with(Converted, Activations, true, false),
            "ernie4_5" => with(InType, RotaryType::ConvertedTwice, true, false),
            "glm" | "glm4" | "glm_ocr_text" => with(InType, Activations, true, true),
            "phi3" => with(InType, Activations, false, true),
            _ => Self::LLAMA,
        }
    }
}

impl DropoutCode {
    /// Returns the code of a model's type.
    fn of(m: &Model) -> Self {
        let usual = Code::LLAMA.dropout;
        match m.options.model_type.as_deref().unwrap_or_default() {
            "distilbert" => Self {
                after_attention: false,
                ..usual
            },
            "longt5" | "mt5" | "t5" | "umt5" => Self {
                inside_ffn: true,
                ..usual
            },
            _ => usual,
        }
    }
}

/// Types whose eager attention computes the softmax in the type of the scores.
const SHORT_SCORES: &[&str] = &[
    "albert",
    "bart",
    "bert",
    "biogpt",
    "blenderbot",
    "blenderbot-small",
    "camembert",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "llama4_text",
    "m2m_100",
    "marian",
    "mbart",
    "pegasus",
    "plbart",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
];

impl AttentionCode {
    /// Returns the code of a model's type (transformers 5.17).
    fn of(m: &Model) -> Self {
        let usual = Code::LLAMA.attention;
        if m.family == Family::Gpt2 {
            return Self {
                eager: ScoreType::Activations,
                ..usual
            };
        }
        let only = |eager| Self {
            sdpa: false,
            eager,
            ..usual
        };
        match m.options.model_type.as_deref().unwrap_or_default() {
            "bloom" | "layoutlm" | "flaubert" | "xlm" => only(ScoreType::FloatSoftmax),
            "mpt" => Self {
                fills_mask: true,
                ..only(ScoreType::FloatSoftmax)
            },
            "codegen" | "gptj" | "gpt_neo" => only(ScoreType::Float),
            "deberta" | "deberta-v2" | "mpnet" | "mvp" | "roformer" | "xglm" => {
                only(ScoreType::Activations)
            }
            other if SHORT_SCORES.contains(&other) => Self {
                eager: ScoreType::Activations,
                ..usual
            },
            "falcon" | "falcon_alibi" => Self {
                broadcasts_key: true,
                eager: ScoreType::Activations,
                ..usual
            },
            _ => usual,
        }
    }
}

/// Returns whether a model calls its `loss_function`. Most encoders and models of sequence to
/// sequence call `CrossEntropyLoss` on the logits as they are (transformers 5.17).
fn float_loss(m: &Model) -> bool {
    let by_function = ["modernbert", "modernbert_decoder", "eurobert"];
    let model_type = m.options.model_type.as_deref().unwrap_or_default();
    let direct = m.family == Family::Bert || m.options.context.encoder_layers > 0;
    !direct || by_function.contains(&model_type)
}
