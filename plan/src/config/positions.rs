//! Options of positions in attention.

use super::{PositionEmbedding, RopeScaling};
use serde::{Deserialize, Serialize};

/// Keys of `[model]` for the positions that attention sees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Positions {
    /// Position embedding of attention.
    pub position_embedding: PositionEmbedding,
    /// Scaling of rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Base of the rotary embedding of layers with a sliding window, if it differs.
    pub rope_local_theta: Option<f64>,
    /// Queries of layers without rotary embeddings are multiplied by
    /// `1 + this * ln(1 + floor((position + 1) / attention_temperature_floor))`.
    pub attention_temperature: f64,
    /// Number of positions after which that factor grows.
    pub attention_temperature_floor: u64,
    /// Rows of a table of relative positions that each layer projects to queries and keys
    /// (DeBERTa); 0: no such table.
    pub disentangled_rows: u64,
    /// Each layer has separate projections for this table, which is not normalized. If false, it is
    /// normalized, and projected like queries and keys (DeBERTa v2).
    pub disentangled_projections: bool,
    /// Fraction of a head's dimensions that are rotated.
    pub partial_rotary_factor: f64,
    /// Rows of the tables of learned relative position biases; 0: no such tables.
    pub relative_buckets: u64,
    /// Each layer has such a table. If false, all layers use that of the first one.
    pub relative_bias_per_layer: bool,
}

/// The defaults of the key table; a test compares them.
impl Default for Positions {
    fn default() -> Self {
        Self {
            position_embedding: PositionEmbedding::Rotary,
            rope_scaling: None,
            rope_local_theta: None,
            attention_temperature: 0.0,
            attention_temperature_floor: 8192,
            disentangled_rows: 0,
            disentangled_projections: false,
            partial_rotary_factor: 1.0,
            relative_buckets: 0,
            relative_bias_per_layer: false,
        }
    }
}
