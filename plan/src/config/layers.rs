//! Options that differ between layers.

use super::{LayerType, MlpType};
use serde::{Deserialize, Serialize};

/// Keys of `[model]` for what differs between layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerPattern {
    /// Window size of sliding-window attention, in positions.
    pub sliding_window: Option<u64>,
    /// Maximum sequence length that windowed attention sees as a whole.
    pub window_from: u64,
    /// Chunk size in positions, in layers whose attention stays within a chunk.
    pub attention_chunk: Option<u64>,
    /// Layer types, repeated; empty: the sliding window, if there is one.
    pub layer_types: Vec<LayerType>,
    /// Key and value heads of each layer, if they differ; 0: a layer without attention.
    pub layer_kv_heads: Vec<u64>,
    /// Width of the feed-forward layer of each block, if they differ; 0: a block without one.
    pub layer_ffn: Vec<u64>,
    /// Number of positions per compressed key in each layer; 0: no such keys.
    pub compress_rates: Vec<u64>,
    /// Number of groups of consecutive layers that share the weights of their first blocks; 0: each
    /// block has separate weights.
    pub layer_groups: u64,
    /// Number of blocks of each group that have separate weights; the rest of the group repeats
    /// them.
    pub group_layers: u64,
    /// The kind of layer after attention in each block, repeated; empty: `dense_layers` and
    /// `moe_every` decide.
    pub mlp_layer_types: Vec<MlpType>,
}

/// The defaults of the key table; a test compares them.
impl Default for LayerPattern {
    fn default() -> Self {
        Self {
            sliding_window: None,
            window_from: 0,
            attention_chunk: None,
            layer_types: Vec::new(),
            layer_kv_heads: Vec::new(),
            layer_ffn: Vec::new(),
            compress_rates: Vec::new(),
            layer_groups: 0,
            group_layers: 1,
            mlp_layer_types: Vec::new(),
        }
    }
}
