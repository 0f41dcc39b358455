//! Convolutions over the frames and bands of a sound.

use super::Activation;
use serde::{Deserialize, Serialize};

/// `subsampling`: two-dimensional convolutions, each of which halves the numbers of frames and
/// bands, and a layer that projects the remaining bands of a frame to the width of the encoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Subsampling {
    /// Output channels of each convolution.
    pub channels: Vec<u64>,
    /// Convolutions have a bias.
    pub bias: bool,
    /// Convolutions after the first one compute each channel alone, and another one mixes the
    /// channels of each position.
    pub separable: bool,
    /// The output of each convolution is normalized over channels, by a LayerNorm with a weight
    /// only.
    pub norms: bool,
    /// Activation after each convolution.
    pub activation: Activation,
    /// The layer that projects frames has a bias.
    pub projection_bias: bool,
    /// Number of frames that are convolved together, without their neighbors; 0: all.
    pub chunk: u64,
}

/// The stem of Parakeet, of 80 bands.
impl Default for Subsampling {
    fn default() -> Self {
        Self {
            channels: vec![256; 3],
            bias: true,
            separable: true,
            norms: false,
            activation: Activation::Relu,
            projection_bias: true,
            chunk: 0,
        }
    }
}

impl Subsampling {
    /// Returns the number of frames or bands after the convolutions, from the number before them.
    #[must_use]
    pub fn left(&self, of: u64) -> u64 {
        self.channels.iter().fold(of, |n, _| n.div_ceil(2))
    }

    /// Returns how many sequences of frames are convolved alone, and the frames of each, if `rows`
    /// are left of all.
    #[must_use]
    pub fn chunks(&self, rows: u64) -> [u64; 2] {
        match self.chunk {
            0 => [1, rows << self.channels.len()],
            chunk => [rows / self.left(chunk).max(1), chunk],
        }
    }
}
