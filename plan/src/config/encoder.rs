//! Encoders of tokens in front of a decoder.

use super::{Family, LayerType, Model};
use serde::{Deserialize, Serialize};

/// `encoder`: where an encoder of tokens differs from the decoder that follows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TextEncoder {
    /// Width.
    pub hidden: Option<u64>,
    /// Heads of attention.
    pub heads: Option<u64>,
    /// Heads of keys and values.
    pub kv_heads: Option<u64>,
    /// Dimension of a head.
    pub head_dim: Option<u64>,
    /// Width of the feed-forward layer.
    pub ffn: Option<u64>,
    /// Rows of the table of positions.
    pub max_seq_len: Option<u64>,
    /// Positions of the window to each side, with the position itself.
    pub sliding_window: Option<u64>,
    /// Maximum length of a sequence without a window.
    pub window_from: u64,
    /// Types of the layers, repeated; empty: the same as `layer_types`.
    pub layer_types: Vec<LayerType>,
    /// The encoder has a separate token embedding (T5Gemma).
    pub own_tokens: bool,
    /// Attention has projections for global positions, although there are none (LED).
    pub global_projections: bool,
    /// Number of positions whose sum becomes an additional key (LongT5); 0: none.
    pub summary_block: u64,
}

impl Model {
    /// Returns the blocks of the encoder as a model without a causal mask; `None` if there is no
    /// encoder.
    #[must_use]
    pub(crate) fn text_encoder(&self) -> Option<Self> {
        let layers = self.options.context.encoder_layers;
        if layers == 0 {
            return None;
        }
        let of = self.options.context.encoder.clone().unwrap_or_default();
        let mut inner = self.clone();
        inner.family = Family::Bert;
        inner.layers = layers as u32;
        inner.hidden = of.hidden.unwrap_or(self.hidden);
        inner.heads = of.heads.unwrap_or(self.heads);
        let same_heads = of.heads.is_none();
        let kv_heads = if same_heads {
            self.kv_heads
        } else {
            inner.heads
        };
        inner.kv_heads = of.kv_heads.unwrap_or(kv_heads);
        let same_dims = same_heads && of.hidden.is_none();
        let head_dim = match same_dims {
            true => self.head_dim,
            false => inner.hidden / inner.heads.max(1),
        };
        inner.head_dim = of.head_dim.unwrap_or(head_dim);
        inner.ffn = of.ffn.unwrap_or(self.ffn);
        inner.max_seq_len = of.max_seq_len.unwrap_or(self.max_seq_len);
        let options = &mut inner.options;
        options.context.encoder_layers = 0;
        if options.embedding.embedding_multiplier != 1.0 {
            // Embeddings are scaled by the square root of the width.
            options.embedding.embedding_multiplier *=
                (inner.hidden as f64 / self.hidden as f64).sqrt();
        }
        if of.sliding_window.is_some() {
            options.layers.sliding_window = of.sliding_window;
            options.layers.window_from = of.window_from;
        }
        if !of.layer_types.is_empty() {
            options.layers.layer_types.clone_from(&of.layer_types);
        }
        options.attention.global_projections = of.global_projections;
        options.context.encoder = Some(of);
        Some(inner)
    }

    /// Returns the width of the encoder or tower outputs that the decoder's blocks read.
    #[must_use]
    pub(crate) fn memory_width(&self) -> u64 {
        let encoder = self.options.context.encoder.as_ref();
        let own = encoder.and_then(|of| of.hidden);
        own.filter(|_| self.options.context.encoder_layers > 0)
            .unwrap_or(self.hidden)
    }

    /// Returns the number of sums of positions that the encoder's attention sees as additional
    /// keys.
    #[must_use]
    pub(crate) fn summaries(&self, seq: u64) -> u64 {
        let block = self
            .options
            .context
            .encoder
            .as_ref()
            .map(|of| of.summary_block);
        let within = self.family == Family::Bert;
        let block = block.filter(|_| within).unwrap_or(0);
        seq.checked_div(block).unwrap_or(0)
    }
}
