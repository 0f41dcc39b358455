//! Layers that replace attention.

use super::LayerType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// `ssm`: sizes of the state-space layers of a model (Mamba, Mamba-2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ssm {
    /// Inner width of a layer.
    pub inner: u64,
    /// State size per channel.
    pub state: u64,
    /// Kernel size of the convolution.
    pub conv: u64,
    /// Rank of the projection that computes time steps (Mamba).
    pub dt_rank: u64,
    /// Heads. Their channels share a decay (Mamba-2) or have separate gates (RecurrentGemma).
    pub heads: u64,
    /// Groups of heads that share the input and output projections of states (Mamba-2).
    pub groups: u64,
    /// Positions per chunk (Mamba-2).
    pub chunk: u64,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// The projections have a bias.
    pub bias: bool,
    /// Time steps and the input and output projections of states are normalized (Jamba).
    pub norms: bool,
    /// The gated output is normalized (Mamba-2).
    pub gate_norm: bool,
}

/// The defaults of transformers' configuration classes, for a width of 1024.
impl Default for Ssm {
    fn default() -> Self {
        Self {
            inner: 2048,
            state: 128,
            conv: 4,
            dt_rank: 64,
            heads: 32,
            groups: 1,
            chunk: 256,
            conv_bias: true,
            bias: false,
            norms: false,
            gate_norm: true,
        }
    }
}

/// `shared_block`: blocks of attention and a feed-forward layer that several layers share (Zamba
/// 2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SharedBlock {
    /// Number of blocks, which layers use in turn.
    pub blocks: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// The feed-forward layer has biases.
    pub bias: bool,
    /// Rank of each layer's adapters.
    pub adapter_rank: u64,
    /// Queries, keys and values also have adapters.
    pub attention_adapters: bool,
}

/// The defaults of transformers' `Zamba2Config`.
impl Default for SharedBlock {
    fn default() -> Self {
        Self {
            blocks: 1,
            ffn: 10_240,
            bias: false,
            adapter_rank: 128,
            attention_adapters: false,
        }
    }
}

/// `linear_attention`: sizes of layers with the gated delta rule (Qwen3-Next, Kimi Linear).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinearAttention {
    /// Heads of queries and keys.
    pub key_heads: u64,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: u64,
    /// Dimension of a query and a key.
    pub key_dim: u64,
    /// Dimension of a value.
    pub value_dim: u64,
    /// Kernel size of the convolution.
    pub conv: u64,
    /// Number of projections of the input: 2 (Qwen3-Next), 4 (Qwen3.5) or 6 (OLMo Hybrid).
    pub projections: u64,
    /// Rank of the two projections of each gate. Each channel then has a separate decay, and
    /// queries, keys and values have separate projections (Kimi Linear). 0: gates have one
    /// projection.
    pub gate_rank: u64,
    /// Each channel has a separate decay, and gates have one projection (Ling 3).
    pub channel_decays: bool,
    /// In place of the delta rule, plain linear attention with a fixed decay per head
    /// (MiniMax-Text-01).
    pub fixed_decays: bool,
    /// In place of the delta rule, plain linear attention with input and decay gates per
    /// head (xLSTM).
    pub exponential_gates: bool,
    /// Positions per chunk, with `fixed_decays` or `exponential_gates`.
    pub chunk: u64,
}

/// The defaults of transformers' `Qwen3NextConfig`.
impl Default for LinearAttention {
    fn default() -> Self {
        Self {
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 128,
            conv: 4,
            projections: 2,
            gate_rank: 0,
            channel_decays: false,
            fixed_decays: false,
            exponential_gates: false,
            chunk: 256,
        }
    }
}

/// `rwkv`: sizes of the layers of RWKV-5 to 7, whose heads have matrix-valued states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rwkv {
    /// Version: 5, 6 or 7.
    pub version: u64,
    /// Heads.
    pub heads: u64,
    /// Width of receptances and keys.
    pub keys: u64,
    /// Width of values.
    pub values: u64,
    /// Rank of the projections for token shift (RWKV-6).
    pub mix_rank: u64,
    /// Rank of the projections for decays (RWKV-6 and 7).
    pub decay_rank: u64,
    /// Rank of the projections for in-context learning rates (RWKV-7).
    pub rate_rank: u64,
    /// Rank of the projections for the mix with the first layer's values (RWKV-7).
    pub value_rank: u64,
    /// Rank of the projections for gates (RWKV-7).
    pub gate_rank: u64,
}

/// The defaults of flash-linear-attention's `RWKV7Config`.
impl Default for Rwkv {
    fn default() -> Self {
        Self {
            version: 7,
            heads: 32,
            keys: 2048,
            values: 2048,
            mix_rank: 32,
            decay_rank: 64,
            rate_rank: 64,
            value_rank: 16,
            gate_rank: 128,
        }
    }
}

/// Gate on the output of attention, computed from the layer's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionGate {
    /// None.
    None,
    /// A sigmoid per element; the query projection also computes it (Qwen3-Next).
    Element,
    /// A sigmoid per element, from a separate projection (AFMoE).
    Separate,
    /// A sigmoid per head, from a separate projection (Step-3).
    Head,
}

words!(AttentionGate {
    None = "none",
    Element = "element",
    Separate = "separate",
    Head = "head",
});

/// Layers with attention sinks: a learned extra column per head in the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionSinks {
    /// None.
    None,
    /// All (gpt-oss).
    All,
    /// Layers with a sliding window (MiMo-V2-Flash).
    Sliding,
}

impl AttentionSinks {
    /// Names of the values other than `true` and `false`.
    pub const WORDS: &'static [&'static str] = &["sliding"];

    /// Returns whether layers of a type have attention sinks.
    #[must_use]
    pub fn has(self, layer: LayerType) -> bool {
        match self {
            Self::None => false,
            Self::All => layer.is_attention(),
            Self::Sliding => layer == LayerType::Sliding,
        }
    }
}

/// Writes the value in the form of scenario files.
impl Serialize for AttentionSinks {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_bool(false),
            Self::All => to.serialize_bool(true),
            Self::Sliding => to.serialize_str("sliding"),
        }
    }
}

impl<'de> Deserialize<'de> for AttentionSinks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Flag(bool),
            Word(String),
        }
        match Form::deserialize(from)? {
            Form::Flag(false) => Ok(Self::None),
            Form::Flag(true) => Ok(Self::All),
            Form::Word(word) if word == "sliding" => Ok(Self::Sliding),
            Form::Word(_) => Err(serde::de::Error::custom("no layers with sinks")),
        }
    }
}

/// The kind of layer that follows attention. The names are those of `mlp_layer_types` in
/// transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpType {
    /// A feed-forward layer.
    Dense,
    /// Experts.
    Sparse,
    /// Nothing.
    None,
}

words!(MlpType {
    Dense = "dense",
    Sparse = "sparse",
    None = "none",
});
