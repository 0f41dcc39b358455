//! Blocks with attention and a convolution.

use super::Model;
use serde::{Deserialize, Serialize};

/// `conformer`: blocks of attention and a convolution over positions, between two halves of a
/// feed-forward layer (Conformer). A norm follows each block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Conformer {
    /// Kernel size of the convolution of each channel.
    pub kernel: u64,
    /// Channels of this convolution, as a multiple of the width.
    pub expansion: u64,
    /// The layers before and after it have a bias.
    pub pointwise_bias: bool,
    /// It has a bias.
    pub depthwise_bias: bool,
    /// Norm of its output.
    pub norm: ConvolutionNorm,
    /// The layers before and after it are linear layers over rows, not convolutions.
    pub linear: bool,
    /// How attention knows the distance of two positions.
    pub distances: Distances,
    /// Rows of the table of keys of distances.
    pub distance_rows: u64,
    /// One projection computes keys and values.
    pub packed_kv: bool,
    /// Number of positions of a chunk, which see each other and their neighbors in `past` and
    /// `future`; 0: all positions see each other.
    pub chunk: u64,
    /// Positions before a chunk that it also sees.
    pub past: u64,
    /// Positions after a chunk that it also sees.
    pub future: u64,
    /// Soft cap on attention scores, which are then computed in float32 without a fused kernel.
    pub softcap: Option<f64>,
    /// What attention and the feed-forward layers add is normalized, too.
    pub post_norms: bool,
    /// Inputs and outputs of linear layers, and what is normalized, are limited to a range.
    pub clamps: bool,
    /// Block whose output a layer scores, and another one adds these scores to it again; 0: none.
    pub scored_block: u64,
    /// Number of these scores.
    pub scores: u64,
}

/// How attention knows the distance of two positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distances {
    /// It does not, or positions are rotated.
    None,
    /// A learned key for each distance, which all heads share (Shaw).
    Keys,
    /// A projection of sines and cosines of each distance, and learned biases of queries
    /// (Transformer-XL).
    Projected,
    /// The same, computed again for each sample.
    ProjectedBySample,
}

words!(Distances {
    None = "none",
    Keys = "keys",
    Projected = "projected",
    ProjectedBySample = "projected_by_sample",
});

/// Norm of the output of a convolution over positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvolutionNorm {
    /// Of each channel, over all samples and positions.
    Batch,
    /// Of each position, over its channels.
    Layer,
    /// The same, as RMSNorm.
    Rms,
}

words!(ConvolutionNorm {
    Batch = "batch",
    Layer = "layer",
    Rms = "rms",
});

/// The blocks of Parakeet.
impl Default for Conformer {
    fn default() -> Self {
        Self {
            kernel: 9,
            expansion: 1,
            pointwise_bias: true,
            depthwise_bias: true,
            norm: ConvolutionNorm::Batch,
            linear: false,
            distances: Distances::ProjectedBySample,
            distance_rows: 0,
            packed_kv: false,
            chunk: 0,
            past: 0,
            future: 0,
            softcap: None,
            post_norms: false,
            clamps: false,
            scored_block: 0,
            scores: 0,
        }
    }
}

impl Conformer {
    /// Returns what does not fit together, if anything does not.
    #[must_use]
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let projected = matches!(
            self.distances,
            Distances::Projected | Distances::ProjectedBySample
        );
        if self.distances == Distances::Keys && self.distance_rows == 0 {
            return Some("keys of distances need rows of their table (distance_rows)");
        }
        if self.softcap.is_some() && (self.chunk == 0 || !projected) {
            return Some("a soft cap needs chunks and projected distances");
        }
        if self.softcap.is_none() && self.past + self.future > 0 {
            return Some("only chunks with a soft cap see their neighbors");
        }
        if self.scored_block > 0 && self.scores == 0 {
            return Some("the scores of a block (scored_block) need a number (scores)");
        }
        None
    }

    /// Returns the positions that are attended to together, and those that each sees, out of
    /// `rows`.
    #[must_use]
    pub(crate) fn seen(&self, rows: u64) -> [u64; 2] {
        match self.chunk {
            0 => [rows, rows],
            chunk => [chunk, chunk + self.past + self.future],
        }
    }

    /// Returns the distances whose keys are computed.
    #[must_use]
    pub(crate) fn distances(&self, rows: u64) -> u64 {
        let [own, seen] = self.seen(rows);
        match self.distances {
            Distances::None => 0,
            Distances::Keys => own,
            Distances::Projected | Distances::ProjectedBySample if self.softcap.is_some() => {
                seen / 2 + 1
            }
            Distances::Projected | Distances::ProjectedBySample => 2 * own - 1,
        }
    }

    /// Counts the FLOPs of attention in one block over `rows` positions of each of `batch` samples,
    /// in forward: those of scores and results, of the scores of distances, and of their keys.
    #[must_use]
    pub(crate) fn attention_flops(&self, m: &Model, [batch, rows]: [u64; 2]) -> u64 {
        let [own, seen] = self.seen(rows);
        let (all, width) = (rows.next_multiple_of(own.max(1)), m.heads * m.head_dim);
        let distances = self.distances(rows);
        let keys = match self.distances {
            Distances::None | Distances::Keys => 0,
            Distances::Projected => 2 * distances * m.hidden * width,
            Distances::ProjectedBySample => 2 * batch * distances * m.hidden * width,
        };
        batch * all * width * (4 * seen + 2 * distances) + keys
    }
}
