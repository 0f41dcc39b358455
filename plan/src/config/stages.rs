//! Encoders of images whose blocks form stages of different widths.

use serde::{Deserialize, Serialize};

/// `stages`: blocks in stages, each with fewer and wider rows than the one before (Swin, ConvNeXt).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stages {
    /// Blocks of each stage.
    pub depths: Vec<u64>,
    /// Width of each stage.
    pub widths: Vec<u64>,
    /// Heads of attention in each stage; empty: blocks have convolutions in place of attention.
    pub heads: Vec<u64>,
    /// Patches along an edge of an image in the first stage; each later one has half as many.
    pub edge: u64,
    /// Rows along an edge of the windows that attention sees.
    pub window: u64,
    /// Rows along an edge that a convolution sees.
    pub kernel: u64,
    /// What a block of convolutions activates is divided by the mean of its channels (ConvNeXt V2).
    pub response_norm: bool,
    /// A table of positions is added to the patches.
    pub positions: bool,
    /// Scores are cosines with learned factors, a network makes their biases of distances, and
    /// what blocks add is normalized (Swin V2).
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
    /// Its number.
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
    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.depths.iter().sum()
    }

    /// Returns the stage of a block; of blocks that are none, the last one.
    #[must_use]
    pub fn of_block(&self, block: usize) -> Stage {
        let ends = self.depths.iter().scan(0, |end, depth| {
            *end += depth;
            Some(*end)
        });
        let passed = ends.filter(|end| *end <= block as u64).count();
        self.stage(passed.min(self.depths.len().saturating_sub(1)))
    }

    /// Returns a stage's sizes.
    #[must_use]
    pub fn stage(&self, number: usize) -> Stage {
        let edge = self.edge >> number;
        Stage {
            number,
            width: self.widths.get(number).copied().unwrap_or(1),
            heads: self.heads.get(number).copied().unwrap_or(0),
            edge,
            // A window that is larger than the image is the image.
            window: self.window.min(edge),
        }
    }
}

impl Stage {
    /// Returns the rows of an image.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.edge * self.edge
    }

    /// Returns the rows of a window.
    #[must_use]
    pub fn window_rows(&self) -> u64 {
        self.window * self.window
    }

    /// Returns the rows of a table of distances within a window.
    #[must_use]
    pub fn distances(&self, window: u64) -> u64 {
        (2 * window - 1) * (2 * window - 1)
    }
}
