//! Encoders and towers.

use super::{TextEncoder, Vision};
use serde::{Deserialize, Serialize};

/// Keys of `[model]` for encoders and towers whose rows a decoder reads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Context {
    /// Number of blocks of an encoder whose result the decoder's blocks attend to; 0: no encoder.
    pub encoder_layers: u64,
    /// Where the encoder differs from the decoder.
    pub encoder: Option<TextEncoder>,
    /// Vision tower and projector.
    pub vision: Option<Vision>,
    /// Audio tower next to `vision`, and its projector.
    pub audio: Option<Vision>,
    /// Patches per sample, in place of those of `vision`, which has the same number.
    pub vision_patches: Option<u64>,
}

impl Context {
    /// Returns the towers.
    pub(crate) fn towers(&self) -> impl Iterator<Item = &Vision> {
        self.vision.iter().chain(&self.audio)
    }

    /// Returns the tower whose rows the blocks attend to, if there is one.
    #[must_use]
    pub(crate) fn tower_memory(&self) -> Option<&Vision> {
        self.vision.as_ref().filter(|of| of.memory)
    }
}
