//! Blocks of a matrix whose elements share a scale.

use super::DType;
use super::strides::{self, Strides};
use serde::Serialize;
use smallvec::SmallVec;

/// A block of a matrix with one scale. Blocks at the ends may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ScaleBlock {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
}

impl ScaleBlock {
    /// A part of a row, for activations and gradients (DeepSeek-V3, Transformer Engine's
    /// `Float8BlockScaling`).
    pub const ROW: Self = Self { rows: 1, cols: 128 };
    /// A square, for weights.
    pub const SQUARE: Self = Self {
        rows: 128,
        cols: 128,
    };
    /// The block of the microscaling formats of the Open Compute Project (MX). Its scale is a power
    /// of two, whose exponent is stored in a byte (E8M0).
    pub const MX: Self = Self { rows: 1, cols: 32 };
    /// The block of the microscaling formats along a column, for the product with the transpose.
    pub const MX_COLUMN: Self = Self { rows: 32, cols: 1 };

    /// Returns the number of elements.
    #[must_use]
    pub const fn numel(self) -> u64 {
        self.rows * self.cols
    }

    /// Returns the type of reciprocals of scales.
    #[must_use]
    pub fn inverse_type(self) -> DType {
        match self {
            Self::MX | Self::MX_COLUMN => DType::U8,
            _ => DType::F32,
        }
    }

    /// Returns the block that the transpose of a matrix has, in the layout of the matrix itself:
    /// the same for squares, parts of columns for parts of rows.
    #[must_use]
    pub const fn of_transpose(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
        }
    }

    /// Returns the number of rows that the scales of a matrix and of its transpose cover together.
    /// A shard of this many rows contains whole blocks of both.
    #[must_use]
    pub(crate) const fn rows_of_both(self) -> u64 {
        if self.rows > self.cols {
            self.rows
        } else {
            self.cols
        }
    }

    /// Returns the numbers of blocks along both dimensions of a matrix.
    #[must_use]
    pub const fn grid(self, [rows, cols]: [u64; 2]) -> [u64; 2] {
        [rows.div_ceil(self.rows), cols.div_ceil(self.cols)]
    }

    /// Returns the strides with which the grid of a matrix's reciprocals is stored, as cuBLASLt
    /// reads them: for row blocks, column by column; for square blocks, in rows whose length is a
    /// multiple of four.
    pub(crate) fn strides(self, matrix: [u64; 2]) -> Strides {
        let [down, across] = self.grid(matrix);
        match self {
            Self::ROW => SmallVec::from_slice(&[1, down]),
            Self::SQUARE => SmallVec::from_slice(&[across.next_multiple_of(4), 1]),
            _ => strides::contiguous(&[down, across]),
        }
    }

    /// Returns the blocks of a matrix from its grid of reciprocals; `None` if there are no such
    /// blocks.
    #[must_use]
    pub fn of(matrix: [u64; 2], grid: [u64; 2], inverse: DType) -> Option<Self> {
        let all = [Self::ROW, Self::SQUARE, Self::MX];
        let fits = |b: &Self| b.inverse_type() == inverse && b.grid(matrix) == grid;
        all.into_iter().find(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_from_their_grids() {
        let matrix = [256, 320];
        for block in [ScaleBlock::ROW, ScaleBlock::SQUARE, ScaleBlock::MX] {
            let grid = block.grid(matrix);
            assert_eq!(
                ScaleBlock::of(matrix, grid, block.inverse_type()),
                Some(block)
            );
        }
        assert_eq!(ScaleBlock::SQUARE.grid(matrix), [2, 3]);
        assert_eq!(ScaleBlock::MX_COLUMN.grid(matrix), [8, 320]);
        assert_eq!(ScaleBlock::MX.of_transpose(), ScaleBlock::MX_COLUMN);
        assert_eq!(ScaleBlock::SQUARE.of_transpose(), ScaleBlock::SQUARE);
        let rows = [ScaleBlock::MX, ScaleBlock::SQUARE].map(ScaleBlock::rows_of_both);
        assert_eq!(rows, [32, 128]);
        assert_eq!(ScaleBlock::of(matrix, [256, 10], DType::F32), None);
        assert_eq!(ScaleBlock::of(matrix, [2, 3], DType::U8), None);
    }
}
