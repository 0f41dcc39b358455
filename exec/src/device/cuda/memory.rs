//! Device memory behind allocator addresses, and pinned host memory.
//!
//! A region of allocator addresses is one range of virtual addresses. Physical memory backs the
//! part that the plan uses. If an allocation exceeds it, more memory is mapped after it, so
//! addresses never change. The memory can be exported to other processes, which NCCL requires for
//! registration and [`super::pushes`] for windows.

use super::context::Context;
use super::driver::{CudaError, check};
use crate::base::abort::lock;
use crate::device::{FailureKind, Region};
use cudarc::driver::sys;
use shardlab_plan::memory::HOST_BASE;
use shardlab_plan::memory::pool::POOL_BASE;
use shardlab_plan::units::Bytes;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Pinned host memory, which the GPU can address.
#[derive(Debug)]
pub(crate) struct Pinned {
    start: *mut u8,
    _context: Arc<Context>,
}

// SAFETY: it owns memory. Code that enqueues work on the memory is responsible for its uses.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeroed memory.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(16);
        let mut start = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the output is a local address.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&raw mut start, bytes, flags)
        })?;
        let start = start.cast::<u8>();
        // SAFETY: the allocation has this length.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self {
            start,
            _context: Arc::clone(context),
        })
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by this driver and freed once; the device is idle.
        let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}

/// Physical memory of a part of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Allocator address, which is the same on all ranks.
    pub(crate) address: u64,
    /// Device address.
    pub(crate) start: u64,
    /// Length in bytes.
    pub(crate) bytes: usize,
    pub(crate) handle: sys::CUmemGenericAllocationHandle,
}

/// A range of the device's virtual addresses.
#[derive(Debug)]
struct Mapped {
    addresses: Range<u64>,
    /// Device address of `base`.
    start: u64,
    /// First allocator address of the range, rounded down to the granularity.
    base: u64,
    reserved: usize,
    pieces: Vec<Piece>,
    /// End of the allocator addresses that are backed.
    backed: u64,
}

/// Pinned memory that backs host addresses.
#[derive(Debug)]
struct HostRegion {
    addresses: Range<u64>,
    memory: Pinned,
}

/// Memory of one rank. See the module documentation.
#[derive(Debug)]
pub(crate) struct Arena {
    context: Arc<Context>,
    granule: u64,
    /// Regions by address.
    regions: Vec<Mutex<Mapped>>,
    host: Vec<HostRegion>,
}

/// Returns the properties of physical memory of a device that other processes can map.
pub(crate) fn property(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: all-zero bytes are a valid value of this C structure.
    let mut p: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    p.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    p.requestedHandleTypes =
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    p.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = device;
    p
}

/// Returns the granularity of physical memory with these properties, in bytes.
pub(crate) fn granularity(p: &sys::CUmemAllocationProp) -> Result<usize, CudaError> {
    let mut granule = 0;
    let flags = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: the driver reads the properties; the output is a local number.
    check("cuMemGetAllocationGranularity", unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut granule, p, flags)
    })?;
    Ok(granule)
}

/// Maps physical memory at reserved device addresses, and allows a device to read and write it.
///
/// # Safety
/// The addresses are reserved, and nothing is mapped there yet.
pub(crate) unsafe fn map(
    start: u64,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
    device: sys::CUdevice,
) -> Result<(), CudaError> {
    // SAFETY: the caller's contract.
    check("cuMemMap", unsafe {
        sys::cuMemMap(start, bytes, 0, handle, 0)
    })?;
    // SAFETY: all-zero bytes are a valid value of this C structure.
    let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
    access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    // SAFETY: the range is mapped.
    let allowed = check("cuMemSetAccess", unsafe {
        sys::cuMemSetAccess(start, bytes, &raw const access, 1)
    });
    if allowed.is_err() {
        // SAFETY: mapped above, and nothing uses it yet.
        let _ = unsafe { sys::cuMemUnmap(start, bytes) };
    }
    allowed
}

impl Arena {
    /// Backs regions, which must be disjoint and ascending, with zeroed memory.
    pub(crate) fn new(context: &Arc<Context>, regions: &[Region]) -> Result<Self, String> {
        let granule = granularity(&property(context.device())).map_err(|e| e.to_string())?;
        let mut arena = Self {
            context: Arc::clone(context),
            granule: granule as u64,
            regions: Vec::new(),
            host: Vec::new(),
        };
        let wanted = |r: &Region| Bytes(r.touched - r.addresses.start);
        let all: Bytes = regions.iter().filter(|r| !is_host(r)).map(wanted).sum();
        for region in regions {
            let done = if is_host(region) {
                arena.add_host(region)
            } else {
                arena.add(region)
            };
            done.map_err(|e| arena.refusal(&e, all))?;
        }
        Ok(arena)
    }

    fn refusal(&self, e: &CudaError, wanted: Bytes) -> String {
        let room = self.context.memory().map_or_else(
            |_| String::new(),
            |(free, total)| {
                format!(
                    "; the program needs {wanted}, but only {} of {} are free on {:?}",
                    Bytes(free),
                    Bytes(total),
                    self.context
                )
            },
        );
        format!("{e}{room}")
    }

    fn add(&mut self, region: &Region) -> Result<(), CudaError> {
        let base = region.addresses.start / self.granule * self.granule;
        let end = region.addresses.end.next_multiple_of(self.granule);
        let reserved = (end - base) as usize;
        let mut start = 0;
        // SAFETY: the output is a local address.
        check("cuMemAddressReserve", unsafe {
            sys::cuMemAddressReserve(&raw mut start, reserved, self.granule as usize, 0, 0)
        })?;
        let mut mapped = Mapped {
            addresses: region.addresses.clone(),
            start,
            base,
            reserved,
            pieces: Vec::new(),
            backed: base,
        };
        let done = self.back(&mut mapped, region.touched);
        self.regions.push(Mutex::new(mapped));
        done
    }

    /// Backs a region up to an allocator address.
    fn back(&self, region: &mut Mapped, to: u64) -> Result<(), CudaError> {
        let to = to.next_multiple_of(self.granule);
        if to <= region.backed {
            return Ok(());
        }
        let bytes = (to - region.backed) as usize;
        let start = region.start + (region.backed - region.base);
        let p = property(self.context.device());
        let mut handle = 0;
        // SAFETY: the driver reads the property; the output is a local handle.
        check("cuMemCreate", unsafe {
            sys::cuMemCreate(&raw mut handle, bytes, &raw const p, 0)
        })?;
        // SAFETY: the addresses were reserved, and nothing is mapped there yet.
        let mapped = unsafe { map(start, bytes, handle, self.context.device()) };
        if let Err(e) = mapped {
            // SAFETY: the handle belongs to this function and is unused.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(e);
        }
        region.pieces.push(Piece {
            address: region.backed,
            start,
            bytes,
            handle,
        });
        // SAFETY: the range is mapped, and nothing else uses it yet.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(start, 0, bytes) })?;
        // SAFETY: no conditions. The fill runs on a stream that other streams do not wait for.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        region.backed = to;
        Ok(())
    }

    fn add_host(&mut self, region: &Region) -> Result<(), CudaError> {
        // Host buffers never move, so their regions do not grow.
        let bytes = region.touched - region.addresses.start;
        self.host.push(HostRegion {
            addresses: region.addresses.start..region.touched,
            memory: Pinned::new(&self.context, bytes as usize)?,
        });
        Ok(())
    }

    /// Returns the device address (or pinned host address) of `bytes` bytes at an allocator
    /// address.
    ///
    /// # Errors
    /// Returns a kind and a message if there is no memory for a region to grow.
    pub(crate) fn pointer(
        &self,
        address: u64,
        bytes: u64,
    ) -> Result<Option<*mut u8>, (FailureKind, String)> {
        let Some(end) = address.checked_add(bytes) else {
            return Ok(None);
        };
        if let Some(h) = self.host.iter().find(|h| h.addresses.contains(&address)) {
            let offset = (address - h.addresses.start) as usize;
            let within = end <= h.addresses.end;
            return Ok(within.then(|| h.memory.ptr().wrapping_add(offset)));
        }
        // A linear search: a run has one or two regions.
        for region in &self.regions {
            let mut region = lock(region);
            if !region.addresses.contains(&address) {
                continue;
            }
            if end > region.addresses.end {
                return Ok(None);
            }
            self.back(&mut region, end).map_err(|e| {
                let kind = if e.is_out_of_memory() {
                    FailureKind::OutOfMemory
                } else {
                    FailureKind::Alloc
                };
                (kind, self.refusal(&e, Bytes(end - region.base)))
            })?;
            let at = region.start + (address - region.base);
            return Ok(Some(std::ptr::with_exposed_provenance_mut(at as usize)));
        }
        Ok(None)
    }

    /// Returns the current device memory, which other ranks may map and NCCL may register.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        let pieces = self.regions.iter().map(|r| lock(r).pieces.clone());
        pieces.flatten().collect()
    }

    /// Returns the bytes of device memory.
    pub(crate) fn bytes(&self) -> Bytes {
        self.pieces().iter().map(|p| Bytes(p.bytes as u64)).sum()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Errors cannot be handled here.
        let _ = self.context.bind();
        for region in &self.regions {
            let region = lock(region);
            for piece in &region.pieces {
                // SAFETY: mapped by `back`; the device is idle.
                unsafe {
                    let _ = sys::cuMemUnmap(piece.start, piece.bytes);
                    let _ = sys::cuMemRelease(piece.handle);
                }
            }
            // SAFETY: reserved by `add`, and no longer mapped.
            let _ = unsafe { sys::cuMemAddressFree(region.start, region.reserved) };
        }
    }
}

/// Returns whether a region consists of host addresses.
fn is_host(region: &Region) -> bool {
    (HOST_BASE..POOL_BASE).contains(&region.addresses.start)
}
