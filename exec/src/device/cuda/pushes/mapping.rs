//! Device memory that several processes map.

use super::super::context::Context;
use super::super::driver::{CudaError, check};
use super::super::memory::{granularity, map, property};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Physical memory at device addresses of this process. A peer's memory remains while it is mapped
/// here, even if the peer ends.
#[derive(Debug)]
pub(super) struct Mapping {
    start: u64,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
    context: Arc<Context>,
}

impl Mapping {
    /// Creates zeroed memory of this device.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let p = property(context.device());
        let bytes = bytes.next_multiple_of(granularity(&p)?);
        let mut handle = 0;
        // SAFETY: the driver reads the properties; the output is a local handle.
        check("cuMemCreate", unsafe {
            sys::cuMemCreate(&raw mut handle, bytes, &raw const p, 0)
        })?;
        let it = Self::of(context, handle, bytes)?;
        // SAFETY: the range is mapped, and nothing else uses it yet.
        check("cuMemsetD8", unsafe {
            sys::cuMemsetD8_v2(it.start, 0, bytes)
        })?;
        // SAFETY: no conditions. The fill runs on a stream that other streams do not wait for.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        Ok(it)
    }

    /// Maps `bytes` bytes of a peer's memory, given by a descriptor.
    pub(super) fn import(
        context: &Arc<Context>,
        descriptor: BorrowedFd<'_>,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let mut handle = 0;
        let number = descriptor.as_raw_fd() as usize;
        // SAFETY: the output is a local handle; the driver takes the number of a descriptor for a
        // pointer, and does not keep the descriptor.
        check("cuMemImportFromShareableHandle", unsafe {
            sys::cuMemImportFromShareableHandle(
                &raw mut handle,
                std::ptr::without_provenance_mut::<c_void>(number),
                DESCRIPTOR,
            )
        })?;
        Self::of(context, handle, bytes)
    }

    /// Maps a handle. The handle is released with the mapping, or if an error occurs.
    fn of(
        context: &Arc<Context>,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let mut start = 0;
        // SAFETY: the output is a local address.
        let reserved = check("cuMemAddressReserve", unsafe {
            sys::cuMemAddressReserve(&raw mut start, bytes, 0, 0, 0)
        });
        let mapped = reserved.and_then(|()| {
            // SAFETY: the addresses were reserved, and nothing is mapped there yet.
            let mapped = unsafe { map(start, bytes, handle, context.device()) };
            if mapped.is_err() {
                // SAFETY: reserved above, and not mapped.
                let _ = unsafe { sys::cuMemAddressFree(start, bytes) };
            }
            mapped
        });
        if let Err(e) = mapped {
            // SAFETY: the handle belongs to this function and is unused.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(e);
        }
        Ok(Self {
            start,
            bytes,
            handle,
            context: Arc::clone(context),
        })
    }

    /// Returns the device address.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Returns the length in bytes, a multiple of the granularity.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a descriptor with which other processes can map the memory.
    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        export(self.handle)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Errors cannot be handled here.
        let _ = self.context.bind();
        // SAFETY: reserved and mapped by `of`; the device is idle.
        unsafe {
            let _ = sys::cuMemUnmap(self.start, self.bytes);
            let _ = sys::cuMemRelease(self.handle);
            let _ = sys::cuMemAddressFree(self.start, self.bytes);
        }
    }
}

/// Returns a descriptor of physical memory, with which other processes can map it.
pub(super) fn export(handle: sys::CUmemGenericAllocationHandle) -> Result<OwnedFd, CudaError> {
    let mut number: i32 = -1;
    // SAFETY: the output is the number of a descriptor, which is an `int`.
    check("cuMemExportToShareableHandle", unsafe {
        sys::cuMemExportToShareableHandle((&raw mut number).cast(), handle, DESCRIPTOR, 0)
    })?;
    // SAFETY: the driver has opened it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
