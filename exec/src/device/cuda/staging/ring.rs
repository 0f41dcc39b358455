//! Where data lie in blocks that are filled one after another, and again from the first one after the last.

/// Blocks of one size, as numbers: what lies in them is somebody else's business.
#[derive(Debug)]
pub(super) struct Ring {
    blocks: usize,
    /// Bytes of a block.
    bytes: usize,
    /// Multiple of bytes at which data begin within a block.
    align: usize,
    /// The block being filled, and how many bytes of it are.
    at: (usize, usize),
    /// The last block has been left: every block that is entered now has been filled before.
    around: bool,
}

/// Where the next piece of some data lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) block: usize,
    /// First byte within the block.
    pub(super) offset: usize,
    /// Bytes of the piece.
    pub(super) bytes: usize,
    pub(super) turn: Option<Turn>,
}

/// The ring goes on to the next block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// The block that is full: nothing more is put into it before it is entered again.
    pub(super) left: usize,
    /// The block that is entered was filled before: whoever reads it must be waited for first.
    pub(super) wait: bool,
}

impl Ring {
    /// So many blocks, at least one, of so many bytes; all of them are free.
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

    /// Everything is free again.
    pub(super) fn reset(&mut self) {
        self.at = (0, 0);
        self.around = false;
    }

    /// A place for as much of `bytes` (at least one) as a block holds. A piece lies in one block.
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
