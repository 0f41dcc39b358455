//! Multi-head latent attention.

use serde::{Deserialize, Serialize};

/// Keys of `[model]` for latent attention (DeepSeek): queries, keys and values are projected from
/// compressed vectors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latent {
    /// Width of compressed keys and values; 0: attention is not latent.
    pub kv_lora_rank: u64,
    /// Width of compressed queries; 0: queries are not compressed.
    pub q_lora_rank: u64,
    /// Rotated dimensions of a head. All heads share their keys.
    pub qk_rope_head_dim: u64,
    /// Width of a head's values.
    pub v_head_dim: u64,
    /// Heads of the indexer that chooses the positions that attention sees, latent or not
    /// (DeepSeek-V3.2, MiniMax-M3); 0: attention sees all positions.
    pub index_n_heads: u64,
    /// Dimension of a head of the indexer.
    pub index_head_dim: u64,
    /// Number of positions that the indexer chooses.
    pub index_topk: u64,
    /// Which layers have an indexer; empty: all.
    pub indexer_types: Vec<IndexerType>,
}

/// Source of the positions that a layer sees. The names are those of `indexer_types` in
/// transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerType {
    /// The layer's own indexer.
    Full,
    /// The indexer of an earlier layer.
    Shared,
    /// None: the layer sees all positions.
    None,
}

words!(IndexerType {
    Full = "full",
    Shared = "shared",
    None = "none",
});

/// The defaults of the key table; a test compares them.
impl Default for Latent {
    fn default() -> Self {
        Self {
            kv_lora_rank: 0,
            q_lora_rank: 0,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            index_n_heads: 0,
            index_head_dim: 128,
            index_topk: 2048,
            indexer_types: Vec::new(),
        }
    }
}

impl Latent {
    /// Returns whether attention is latent.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.kv_lora_rank > 0
    }

    /// Returns whether a layer has an indexer.
    #[must_use]
    pub(crate) fn has_indexer(&self, layer: usize) -> bool {
        self.indexer_type(layer) == IndexerType::Full
    }

    /// Returns the source of the positions that a layer sees.
    #[must_use]
    pub(crate) fn indexer_type(&self, layer: usize) -> IndexerType {
        let kind = self.indexer_types.get(layer).copied();
        match self.index_n_heads {
            0 => IndexerType::None,
            _ => kind.unwrap_or(IndexerType::Full),
        }
    }
}
