//! `[model]`.

use super::Experts;
use serde::{Deserialize, Serialize};

/// Model family: decides the graph that `models` builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// RMSNorm, RoPE, grouped-query attention, SwiGLU.
    Llama,
    /// Llama's layers, with experts.
    Moe,
    /// LayerNorm with bias, learned positions, GELU, tied head.
    Gpt2,
    /// LayerNorm with bias, partial RoPE, attention next to the feed-forward layer.
    #[serde(rename = "gpt_neox")]
    GptNeox,
    /// Post-norm `TransformerEncoderLayer` stack.
    Encoder,
    /// `layers` times Linear(hidden, hidden) with ReLU.
    Linear,
    /// `layers` same-padded convolutions with ReLU, then a dense layer.
    Cnn,
}

/// `[model]`: shapes. Fields that a family does not use keep their defaults.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Name of the preset the model came from, or the path of its `config.json`, if any.
    pub preset: Option<String>,
    /// Family.
    pub family: Family,
    /// Number of blocks (or linear layers, or convolutions).
    pub layers: u32,
    /// Model width in elements.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Elements of one head.
    pub head_dim: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Vocabulary size.
    pub vocab: u64,
    /// Embedding and head share one parameter.
    pub tie_embeddings: bool,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Longest sequence (rows of the position table).
    pub max_seq_len: u64,
    /// Channels of the CNN.
    pub channels: u64,
    /// Image height.
    pub height: u64,
    /// Image width.
    pub width: u64,
    /// Convolution kernel edge (odd).
    pub kernel: u64,
    /// Which linear layers carry a bias.
    pub bias: Bias,
    /// The other keys.
    #[serde(flatten)]
    pub options: ModelOptions,
}

/// Keys of `[model]` whose defaults do not depend on others, read by the names of these fields.
/// `None` is a default that is derived where the value is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelOptions {
    /// Queries and keys are normalized (RMSNorm) head by head before they are rotated.
    pub qk_norm: bool,
    /// Share of a head's dimensions that are rotated.
    pub partial_rotary_factor: f64,
    /// Attention and feed-forward layer read the same input, and their results are added to it.
    pub parallel_residual: bool,
    /// Factor of the embedded tokens.
    pub embedding_multiplier: f64,
    /// Factor of attention scores; `1 / sqrt(head_dim)` if there is none.
    pub attention_multiplier: Option<f64>,
    /// Factor of what a block adds to the residual stream.
    pub residual_multiplier: f64,
    /// Divisor of the logits.
    pub logits_scaling: f64,
    /// Keys for experts.
    #[serde(flatten)]
    pub experts: Experts,
}

/// The defaults of the key table; a test compares them.
impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            qk_norm: false,
            partial_rotary_factor: 1.0,
            parallel_residual: true,
            embedding_multiplier: 1.0,
            attention_multiplier: None,
            residual_multiplier: 1.0,
            logits_scaling: 1.0,
            experts: Experts::default(),
        }
    }
}

/// Linear layers with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bias {
    /// None of them.
    None,
    /// Those that make queries, keys and values.
    Qkv,
    /// All, and convolutions.
    All,
}

impl From<bool> for Bias {
    fn from(all: bool) -> Self {
        if all { Self::All } else { Self::None }
    }
}

/// Writes the value as scenario files do.
impl Serialize for Bias {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_bool(false),
            Self::Qkv => to.serialize_str("qkv"),
            Self::All => to.serialize_bool(true),
        }
    }
}
