//! Encoders of the samples of a sound.

use serde::{Deserialize, Serialize};

/// `sound`: convolutions that make the rows of an encoder of the samples of a sound (wav2vec 2.0).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sound {
    /// Channels that each convolution makes.
    pub widths: Vec<u64>,
    /// Positions that each convolution sees.
    pub kernels: Vec<u64>,
    /// Positions from one result of each convolution to the next.
    pub strides: Vec<u64>,
    /// Convolutions have a bias.
    pub bias: bool,
    /// The channels of each convolution's results are normalized; otherwise the positions of the
    /// first one's.
    pub norms: bool,
    /// What is projected to the width of the model is normalized.
    pub input_norm: bool,
    /// A learned row stands for those that are masked.
    pub masked: bool,
    /// Convolutions that make positions of rows.
    pub position_layers: u64,
    /// Rows that each of these sees.
    pub position_kernel: u64,
    /// Groups of channels of these.
    pub position_groups: u64,
    /// Their weights are directions and lengths; otherwise their results are normalized.
    pub weight_norm: bool,
    /// Gates multiply the biases of attention scores (WavLM).
    pub gated_biases: bool,
}

/// The defaults of transformers' `Wav2Vec2Config`.
impl Default for Sound {
    fn default() -> Self {
        Self {
            widths: vec![512; 7],
            kernels: vec![10, 3, 3, 3, 3, 2, 2],
            strides: vec![5, 2, 2, 2, 2, 2, 2],
            bias: false,
            norms: false,
            input_norm: true,
            masked: true,
            position_layers: 1,
            position_kernel: 128,
            position_groups: 16,
            weight_norm: true,
            gated_biases: false,
        }
    }
}

impl Sound {
    /// Returns how many positions each convolution reads, and those that the last one makes.
    #[must_use]
    pub fn positions(&self, rows: u64) -> Vec<u64> {
        let mut all = vec![rows];
        for (kernel, stride) in self.kernels.iter().zip(&self.strides).rev() {
            let first = all[0].max(1);
            all.insert(
                0,
                (first - 1).saturating_mul(*stride).saturating_add(*kernel),
            );
        }
        all
    }
}
