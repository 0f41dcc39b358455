//! What layers of Gemma 3n and 4 read besides the residual stream, or have in place of it.

use super::Model;
use serde::{Deserialize, Serialize};

/// Keys of what single layers have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerLayer {
    /// Width of the embedded tokens that each layer has of its own; 0: none.
    pub layer_embedding_width: u64,
    /// Rows of their table; `None`: as many as the vocabulary.
    pub layer_embedding_rows: Option<u64>,
    /// Last layers that attend to the keys and values of an earlier one.
    pub shared_kv_layers: u64,
    /// Share of its inputs that each layer's activation sets to 0; empty: none.
    pub activation_sparsity: Vec<f64>,
    /// Residual streams next to each other, of which blocks compute one (Gemma 3n).
    pub altup: Option<AltUp>,
}

/// `altup`: alternating updates of residual streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AltUp {
    /// Streams.
    pub streams: u64,
    /// Number of the stream that blocks compute.
    pub active: u64,
    /// A learned vector multiplies the corrected stream that embeddings per layer gate.
    pub scale: bool,
    /// Width between the two projections that add to what attention makes (LAUREL).
    pub laurel_rank: u64,
}

/// The defaults of transformers' `Gemma3nTextConfig`.
impl Default for AltUp {
    fn default() -> Self {
        Self {
            streams: 4,
            active: 0,
            scale: true,
            laurel_rank: 64,
        }
    }
}

impl Model {
    /// Returns the layers that have keys and values of their own.
    #[must_use]
    pub fn layers_with_keys(&self) -> usize {
        let shared = self.options.per_layer.shared_kv_layers;
        u64::from(self.layers).saturating_sub(shared) as usize
    }

    /// Returns the layer whose keys and values a layer attends to, if it has none of its own: the
    /// last one of its type before those that share.
    #[must_use]
    pub fn keys_of(&self, layer: usize) -> Option<usize> {
        let own = self.layers_with_keys();
        let kind = self.layer_type(layer);
        let same = |earlier: &usize| self.layer_type(*earlier) == kind;
        let shares = self.options.per_layer.shared_kv_layers > 0;
        (shares && layer >= own && kind.is_attention())
            .then(|| (0..own).rev().find(same))
            .flatten()
    }

    /// Returns the share of its inputs that a layer's activation sets to 0, if it has one.
    #[must_use]
    pub fn sparsity(&self, layer: usize) -> Option<f64> {
        let all = &self.options.per_layer.activation_sparsity;
        all.get(layer).copied().filter(|share| *share > 0.0)
    }
}
