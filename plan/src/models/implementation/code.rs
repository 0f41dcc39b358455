//! Differences in the modeling code of some types, by `model_type`.

use crate::config::{Family, Model};

/// Differences of a type's code from Llama's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code {
    pub(super) norm: NormCode,
    pub(super) rotary: RotaryCode,
    /// Eager attention converts scores to float32 for the softmax.
    pub(super) float_softmax: bool,
    /// One key for all heads is passed to `scaled_dot_product_attention` as it is. No fused kernel
    /// broadcasts it.
    pub(super) broadcasts_key: bool,
    /// Logits are converted to float32 for the cross entropy (`ForCausalLMLoss`).
    pub(super) float_loss: bool,
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
        float_softmax: true,
        broadcasts_key: false,
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
        if m.family == Family::Gpt2 {
            return Self {
                float_softmax: false,
                ..Self::LLAMA
            };
        }
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
            "biogpt" | "llama4_text" | "deberta" | "deberta-v2" | "mpnet" => Self {
                float_softmax: false,
                ..Self::LLAMA
            },
            "falcon" | "falcon_alibi" => Self {
                broadcasts_key: true,
                float_softmax: false,
                ..Self::LLAMA
            },
            "phi3" => with(InType, Activations, false, true),
            _ => Self::LLAMA,
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
