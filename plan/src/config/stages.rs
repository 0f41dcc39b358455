//! Image encoders whose blocks form stages of different widths.

use serde::{Deserialize, Serialize};

/// `stages`: blocks in stages, each with fewer and wider rows than the previous one (Swin,
/// ConvNeXt).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stages {
    /// Number of blocks of each stage.
    pub depths: Vec<u64>,
    /// Width of each stage.
    pub widths: Vec<u64>,
    /// Attention heads of each stage; empty: blocks have convolutions in place of attention.
    pub heads: Vec<u64>,
    /// Patches along an edge of an image in the first stage; each later one has half as many.
    pub edge: u64,
    /// Window size of attention, in rows along an edge.
    pub window: u64,
    /// Kernel size of a convolution, in rows along an edge.
    pub kernel: u64,
    /// Convolution blocks use global response normalization (ConvNeXt V2).
    pub response_norm: bool,
    /// A table of positions is added to the patches.
    pub positions: bool,
    /// Scores are scaled cosines, a network computes their biases from distances, and blocks
    /// normalize their outputs (Swin V2).
    pub cosine: bool,
    /// The last rows are normalized.
    pub last_norm: bool,
}

/// The sizes of ConvNeXt-T at 224 x 224.
impl Default for Stages {
    fn default() -> Self {
        Self {
            depths: vec![3, 3, 9, 3],
            widths: vec![96, 192, 384, 768],
            heads: Vec::new(),
            edge: 56,
            window: 7,
            kernel: 7,
            response_norm: false,
            positions: false,
            cosine: false,
            last_norm: true,
        }
    }
}

/// Sizes of one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Index of the stage.
    pub number: usize,
    /// Width.
    pub width: u64,
    /// Heads of attention; 0: none.
    pub heads: u64,
    /// Rows along an edge of an image.
    pub edge: u64,
    /// Rows along an edge of a window.
    pub window: u64,
}

impl Stages {
    /// Returns the total number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.depths.iter().sum()
    }

    /// Returns the stage of a block, or the last stage if there is no such block.
    #[must_use]
    pub fn of_block(&self, block: usize) -> Stage {
        let ends = self.depths.iter().scan(0, |end, depth| {
            *end += depth;
            Some(*end)
        });
        let passed = ends.filter(|end| *end <= block as u64).count();
        self.stage(passed.min(self.depths.len().saturating_sub(1)))
    }

    /// Returns the sizes of a stage.
    #[must_use]
    pub fn stage(&self, number: usize) -> Stage {
        let edge = self.edge >> number;
        Stage {
            number,
            width: self.widths.get(number).copied().unwrap_or(1),
            heads: self.heads.get(number).copied().unwrap_or(0),
            edge,
            // A window is at most as large as the image.
            window: self.window.min(edge),
        }
    }
}

impl Stage {
    /// Returns the number of rows per image.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.edge * self.edge
    }

    /// Returns the number of rows per window.
    #[must_use]
    pub(crate) fn window_rows(&self) -> u64 {
        self.window * self.window
    }

    /// Returns the number of rows of the table of relative positions within a window.
    #[must_use]
    pub fn distances(&self, window: u64) -> u64 {
        (2 * window - 1) * (2 * window - 1)
    }
}
