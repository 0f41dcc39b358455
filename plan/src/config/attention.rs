//! Options of attention.

use super::{AttentionGate, AttentionSinks, Norm, PackedQkv, QkNorm};
use serde::{Deserialize, Serialize};

/// Keys of `[model]` for attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AttentionOptions {
    /// Dropout probability on attention weights.
    pub attention_dropout: f64,
    /// How one projection computes queries, keys and values.
    pub packed_qkv: PackedQkv,
    /// Keys have a bias if queries and values have one.
    pub key_bias: bool,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Soft cap on attention scores.
    pub attention_softcap: Option<f64>,
    /// Groups of heads with separate output projections, in attention with one key head whose keys
    /// are also the values (DeepSeek-V4); 0: another kind of attention.
    pub output_groups: u64,
    /// Output width of the projection of each such group.
    pub output_rank: u64,
    /// Norm of queries, keys and the last rows, if it differs from that of blocks (ESMC).
    pub inner_norm: Option<Norm>,
    /// Attention has projections for global positions, although there are none (Longformer).
    pub global_projections: bool,
    /// Factor of attention scores; `None`: `1 / sqrt(head_dim)`.
    pub attention_multiplier: Option<f64>,
    /// Attention computes the difference of two halves of its heads, with learned factors
    /// (Differential Transformer).
    pub differential: bool,
    /// Gate on the output of attention.
    pub attention_gate: AttentionGate,
    /// Attention sinks: a learned extra column per head in the softmax.
    pub attention_sinks: AttentionSinks,
    /// Width of a head's values, if it is not that of queries and keys.
    pub value_head_dim: Option<u64>,
    /// Dimension of a head in layers without a window, if it differs.
    pub full_head_dim: Option<u64>,
    /// Layers without a window use the keys, before norm and rotation, as values.
    pub keys_as_values: bool,
    /// Values are normalized, without a weight.
    pub value_norm: bool,
}

/// The defaults of the key table; a test compares them.
impl Default for AttentionOptions {
    fn default() -> Self {
        Self {
            attention_dropout: 0.0,
            packed_qkv: PackedQkv::None,
            key_bias: true,
            qk_norm: QkNorm::None,
            attention_softcap: None,
            output_groups: 0,
            output_rank: 1024,
            inner_norm: None,
            global_projections: false,
            attention_multiplier: None,
            differential: false,
            attention_gate: AttentionGate::None,
            attention_sinks: AttentionSinks::None,
            value_head_dim: None,
            full_head_dim: None,
            keys_as_values: false,
            value_norm: false,
        }
    }
}
