//! Decoders that reconstruct the masked patches of an image.

use super::{Family, Model};
use serde::{Deserialize, Serialize};

/// `reconstruction`: a decoder after an encoder of some of an image's patches, which reconstructs
/// the pixels of all of them (ViT-MAE).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reconstruction {
    /// Patches per image.
    pub patches: u64,
    /// Number of blocks.
    pub layers: u64,
    /// Width.
    pub hidden: u64,
    /// Heads of attention.
    pub heads: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
}

/// The defaults of transformers' `ViTMAEConfig`.
impl Default for Reconstruction {
    fn default() -> Self {
        Self {
            patches: 196,
            layers: 8,
            hidden: 512,
            heads: 16,
            ffn: 2048,
        }
    }
}

impl Reconstruction {
    /// Returns the number of rows that its blocks process: the patches and the class token.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.patches + 1
    }

    /// Returns the decoder's blocks as a model.
    #[must_use]
    pub(crate) fn model(&self, of: &Model) -> Model {
        let mut inner = of.clone();
        inner.family = Family::Vit;
        inner.layers = self.layers as u32;
        inner.hidden = self.hidden;
        inner.heads = self.heads;
        inner.kv_heads = self.heads;
        inner.head_dim = self.hidden / self.heads.max(1);
        inner.ffn = self.ffn;
        inner.max_seq_len = self.rows();
        inner.options.reconstruction = None;
        inner
    }
}
