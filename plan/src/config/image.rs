//! Options of image encoders.

use super::{ImagePooling, Stages};
use serde::{Deserialize, Serialize};

/// Keys of `[model]` for encoders of images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageEncoder {
    /// Number of values in an image patch.
    pub patch_dim: u64,
    /// The projection of patches has a bias.
    pub patch_bias: bool,
    /// A learned row replaces masked patches. Plans have no masked patches.
    pub mask_token: bool,
    /// A second layer classifies the distillation token; scores are the mean of both (DeiT).
    pub second_classifier: bool,
    /// A learned class token comes before the patches.
    pub class_token: bool,
    /// A learned distillation token follows the class token.
    pub distillation_token: bool,
    /// Learned register tokens between the class token and the patches (DINOv3).
    pub register_tokens: u64,
    /// Which rows of an image are classified.
    pub image_pooling: ImagePooling,
    /// Blocks in stages of different widths; `None`: all blocks have the same.
    pub stages: Option<Stages>,
    /// Attention with one learned query and a feed-forward layer pool an image to one vector
    /// (SigLIP).
    pub attention_pooling: bool,
}

/// The defaults of the key table; a test compares them.
impl Default for ImageEncoder {
    fn default() -> Self {
        Self {
            patch_dim: 768,
            patch_bias: true,
            mask_token: false,
            second_classifier: false,
            class_token: true,
            distillation_token: false,
            register_tokens: 0,
            image_pooling: ImagePooling::Class,
            stages: None,
            attention_pooling: false,
        }
    }
}
