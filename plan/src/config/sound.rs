//! Encoders of audio samples.

use super::Subsampling;
use serde::{Deserialize, Serialize};

/// `sound`: convolutions that turn audio samples into the rows of an encoder (wav2vec 2.0), or
/// layers that turn frames into rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sound {
    /// Output channels of each convolution.
    pub widths: Vec<u64>,
    /// Kernel size of each convolution.
    pub kernels: Vec<u64>,
    /// Stride of each convolution.
    pub strides: Vec<u64>,
    /// Convolutions have a bias.
    pub bias: bool,
    /// The output of each convolution is normalized over channels. If false, only that of the first
    /// one is normalized, over positions.
    pub norms: bool,
    /// Numbers of a frame; 0: rows are computed from samples.
    pub bands: u64,
    /// Convolutions over frames and bands. If absent, a frame is a row.
    pub subsampling: Option<Subsampling>,
    /// Rows are multiplied by the square root of the width.
    pub scaled: bool,
    /// The input of the projection to the width of the model is normalized.
    pub input_norm: bool,
    /// A learned row replaces masked rows.
    pub masked: bool,
    /// Number of convolutions that compute position embeddings.
    pub position_layers: u64,
    /// These convolutions are used. If false, nothing reads them.
    pub positions_used: bool,
    /// Kernel size of these convolutions.
    pub position_kernel: u64,
    /// Channel groups of these convolutions.
    pub position_groups: u64,
    /// Their weights use weight normalization. If false, their results are normalized.
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
            bands: 0,
            subsampling: None,
            scaled: false,
            input_norm: true,
            masked: true,
            position_layers: 1,
            positions_used: true,
            position_kernel: 128,
            position_groups: 16,
            weight_norm: true,
            gated_biases: false,
        }
    }
}

impl Sound {
    /// Returns the number of positions that each convolution reads, and the number that the last
    /// one outputs.
    #[must_use]
    pub fn positions(&self, rows: u64) -> Vec<u64> {
        let mut all = vec![rows];
        if self.bands > 0 {
            return all;
        }
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
