//! Memory behind allocator addresses.
//!
//! Equal allocator addresses are equal real addresses. Reusing a block while work on its former
//! contents is in flight is therefore a real hazard, as on a GPU. Untouched pages cost nothing (the
//! system maps zeroed pages on first touch), which leaves room for regions to grow.

use crate::device::Region;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;

/// Alignment of every region, in bytes (a page), which preserves the alignment of the allocator's
/// granule.
const ALIGN: usize = 4096;
/// Alignment that is requested from the system. Up to this value, the system's zeroed pages are
/// used unchanged; for a larger alignment, every page would be written.
const ASKED: usize = 16;

struct Mapped {
    addresses: Range<u64>,
    /// Address that the system returned.
    memory: *mut u8,
    layout: Layout,
    /// First aligned address of the block.
    start: *mut u8,
}

/// Memory of one rank.
#[derive(Default)]
pub(crate) struct Arena {
    /// Regions by address.
    regions: Vec<Mapped>,
}

// SAFETY: an arena returns addresses and owns their memory until it is dropped. Code that enqueues
// work is responsible for uses of the addresses.
unsafe impl Send for Arena {}
// SAFETY: as above; an arena does not change after construction.
unsafe impl Sync for Arena {}

impl Arena {
    /// Backs regions, which must be disjoint and ascending.
    pub(crate) fn new(regions: &[Region]) -> Result<Self, String> {
        let mut arena = Self::default();
        for region in regions {
            let bytes = region.addresses.end - region.addresses.start;
            let layout = usize::try_from(bytes)
                .ok()
                .and_then(|n| n.checked_add(ALIGN))
                .and_then(|n| Layout::from_size_align(n, ASKED).ok())
                .ok_or_else(|| format!("cannot allocate {bytes} bytes"))?;
            // SAFETY: the layout is not empty.
            let memory = unsafe { alloc_zeroed(layout) };
            if memory.is_null() {
                return Err(format!("the system refused to allocate {bytes} bytes"));
            }
            let start = memory.wrapping_add(memory.align_offset(ALIGN));
            arena.regions.push(Mapped {
                addresses: region.addresses.clone(),
                memory,
                layout,
                start,
            });
        }
        Ok(arena)
    }

    /// Returns the real address of `bytes` bytes at an allocator address.
    pub(crate) fn pointer(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let at = self.regions.partition_point(|r| r.addresses.end <= address);
        let region = self.regions.get(at)?;
        let offset = address.checked_sub(region.addresses.start)?;
        (address.checked_add(bytes)? <= region.addresses.end)
            .then(|| region.start.wrapping_add(offset as usize))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for r in &self.regions {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(r.memory, r.layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(addresses: Range<u64>) -> Region {
        Region {
            used: addresses.end - addresses.start,
            touched: addresses.end,
            addresses,
        }
    }

    #[test]
    fn equal_addresses_are_equal_memory() {
        let pool = 1 << 62;
        let arena = Arena::new(&[region(4096..12288), region(pool..pool + 4096)]).unwrap();
        let a = arena.pointer(4096, 8192).unwrap();
        assert_eq!(a.addr() % ALIGN, 0);
        assert_eq!(
            arena.pointer(4096 + 512, 16).unwrap().addr(),
            a.addr() + 512
        );
        assert_eq!(
            arena.pointer(pool + 512, 16).unwrap().addr(),
            arena.pointer(pool, 1).unwrap().addr() + 512
        );
        // SAFETY: eight bytes of backed memory that nothing else uses.
        let fresh = unsafe { arena.pointer(12280, 8).unwrap().cast::<u64>().read() };
        assert_eq!(fresh, 0);
    }

    #[test]
    fn what_is_not_backed_has_no_pointer() {
        let arena = Arena::new(&[region(4096..8192)]).unwrap();
        assert_eq!(arena.pointer(4096, 4097), None);
        assert_eq!(arena.pointer(8192, 1), None);
        assert_eq!(arena.pointer(0, 1), None);
        assert_eq!(arena.pointer(8000, u64::MAX), None);
    }
}
