//! Options of individual layers in Gemma 3n and 4: inputs in addition to the residual stream, and
//! replacements of it.

use super::Model;
use serde::{Deserialize, Serialize};

/// Keys for individual layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerLayer {
    /// Width of per-layer token embeddings; 0: none.
    pub layer_embedding_width: u64,
    /// Rows of the per-layer embedding table; `None`: the vocabulary size.
    pub layer_embedding_rows: Option<u64>,
    /// Number of last layers that attend to the keys and values of an earlier layer.
    pub shared_kv_layers: u64,
    /// Fraction of its inputs that each layer's activation sets to 0; empty: none.
    pub activation_sparsity: Vec<f64>,
    /// Multiple residual streams, of which blocks compute one (Gemma 3n).
    pub altup: Option<AltUp>,
}

/// `altup`: alternating updates of residual streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AltUp {
    /// Number of streams.
    pub streams: u64,
    /// Index of the stream that blocks compute.
    pub active: u64,
    /// A learned vector multiplies the corrected stream that per-layer embeddings gate.
    pub scale: bool,
    /// Rank of the two projections that are added to the output of attention (LAUREL).
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
    /// Returns the layers that have their own keys and values.
    #[must_use]
    pub(crate) fn layers_with_keys(&self) -> usize {
        let shared = self.options.per_layer.shared_kv_layers;
        u64::from(self.layers).saturating_sub(shared) as usize
    }

    /// Returns the layer whose keys and values a layer attends to, if it shares them: the last
    /// layer of the same type before the sharing layers.
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

    /// Returns the fraction of its inputs that a layer's activation sets to 0, if any.
    #[must_use]
    pub fn sparsity(&self, layer: usize) -> Option<f64> {
        let all = &self.options.per_layer.activation_sparsity;
        all.get(layer).copied().filter(|share| *share > 0.0)
    }
}
