//! Addresses of this rank's buffers in the memory of other ranks.

/// Memory of this rank, and the addresses at which the same memory of its peers is mapped.
///
/// A buffer has the same allocator address on every rank, because all ranks run the same program
/// with the same list of buffers, and allocators depend on nothing else. So a window of a peer has
/// the same offset in the peer's memory as this rank's window has in its own.
#[derive(Debug, Default)]
pub(super) struct Windows {
    pieces: Vec<Window>,
}

/// A piece of memory.
#[derive(Debug)]
pub(super) struct Window {
    /// Length in bytes.
    pub(super) bytes: u64,
    /// Position of this rank.
    pub(super) me: usize,
    /// By position: device addresses, as this rank sees them.
    pub(super) starts: Vec<u64>,
}

impl Windows {
    pub(super) fn new(pieces: Vec<Window>) -> Self {
        Self { pieces }
    }

    /// Returns the addresses, by position, of a range of `bytes` bytes that is at `address` on this
    /// rank; `None` if the range is not in memory that is mapped on all ranks.
    pub(super) fn of(&self, address: u64, bytes: u64) -> Option<impl Iterator<Item = u64> + '_> {
        let end = address.checked_add(bytes)?;
        let (piece, start) = self.pieces.iter().find_map(|p| {
            let start = *p.starts.get(p.me)?;
            (address >= start && end <= start + p.bytes).then_some((p, start))
        })?;
        Some(piece.starts.iter().map(move |s| s + (address - start)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_equally_far_into_the_memory_of_every_rank() {
        let piece = |bytes, starts: &[u64]| Window {
            bytes,
            me: 1,
            starts: starts.to_vec(),
        };
        let windows = Windows::new(vec![
            piece(0x1000, &[0x50_0000, 0x10_0000, 0x90_0000]),
            piece(0x2000, &[0x60_0000, 0x20_0000, 0x40_0000]),
        ]);
        let of = |address, bytes| windows.of(address, bytes).map(Iterator::collect::<Vec<_>>);
        assert_eq!(
            of(0x20_0100, 0x100),
            Some(vec![0x60_0100, 0x20_0100, 0x40_0100])
        );
        assert_eq!(
            of(0x10_0000, 0x1000),
            Some(vec![0x50_0000, 0x10_0000, 0x90_0000])
        );
        // Beyond the end, and an address that is a peer's.
        assert_eq!(of(0x10_0800, 0x801), None);
        assert_eq!(of(0x60_0000, 0x10), None);
        assert_eq!(of(u64::MAX, 2), None);
    }
}
