//! Placement of data in a ring of blocks, which are filled one after another and reused from the
//! first.

/// The ring only computes positions and does not access the contents of the blocks.
#[derive(Debug)]
pub(super) struct Ring {
    blocks: usize,
    /// Bytes of a block.
    bytes: usize,
    /// Alignment of data within a block, in bytes.
    align: usize,
    /// Index of the current block, and its number of used bytes.
    at: (usize, usize),
    /// Whether the ring has wrapped around, so that every block entered from now on was filled
    /// before.
    around: bool,
}

/// Place of the next piece of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) block: usize,
    /// First byte within the block.
    pub(super) offset: usize,
    /// Bytes of the piece.
    pub(super) bytes: usize,
    pub(super) turn: Option<Turn>,
}

/// The ring moves to the next block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// The full block. It is not written again until it is entered again.
    pub(super) left: usize,
    /// Whether the entered block was filled before, so that its readers must be awaited first.
    pub(super) wait: bool,
}

impl Ring {
    /// Creates a ring of `blocks` free blocks (at least one) of `size` bytes.
    pub(super) fn new(blocks: usize, bytes: usize, align: usize) -> Self {
        debug_assert!(blocks > 0 && bytes > 0, "data need a place");
        Self {
            blocks,
            bytes,
            align,
            at: (0, 0),
            around: false,
        }
    }

    /// Marks all blocks as free.
    pub(super) fn reset(&mut self) {
        self.at = (0, 0);
        self.around = false;
    }

    /// Returns a place for as many of `bytes` bytes (at least one) as fit in a block. A piece never
    /// spans two blocks.
    pub(super) fn place(&mut self, bytes: usize) -> Place {
        let bytes = bytes.min(self.bytes);
        let mut turn = None;
        if self.at.1 + bytes > self.bytes {
            let left = self.at.0;
            self.at = ((left + 1) % self.blocks, 0);
            self.around |= self.at.0 == 0;
            let wait = self.around;
            turn = Some(Turn { left, wait });
        }
        let (block, offset) = self.at;
        self.at.1 = (offset + bytes).next_multiple_of(self.align);
        Place {
            block,
            offset,
            bytes,
            turn,
        }
    }
}

#[cfg(test)]
mod tests;
