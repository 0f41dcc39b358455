//! Memory for NCCL (registered buffers, symmetric windows, its own allocations), and reductions
//! with a factor.

use crate::communicator::Communicator;
use crate::error::Error;
use crate::ffi::{HOST_IMMEDIATE, RawWindow};
use crate::group;
use crate::library::Nccl;
use crate::shared::Inner;
use crate::types::{RedOp, Scalar};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// Device memory allocated by NCCL (`ncclMemAlloc`), which supports every kind of registration.
/// Dropping it frees the memory.
pub struct DeviceMemory {
    nccl: Nccl,
    ptr: *mut c_void,
    bytes: usize,
}

// SAFETY: the pointer is an address of device memory, which is not bound to a thread.
unsafe impl Send for DeviceMemory {}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({:?}, {} bytes)", self.ptr, self.bytes)
    }
}

impl DeviceMemory {
    /// Returns the address.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.ptr
    }

    /// Returns the requested number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(f) = self.nccl.functions().mem_free {
            // A drop cannot return the error.
            // SAFETY: the memory is from `ncclMemAlloc`, and this is its only owner.
            let _ = unsafe { f(self.ptr) };
        }
    }
}

impl Nccl {
    /// Allocates memory on the calling thread's current CUDA device.
    ///
    /// # Errors
    /// Errors of NCCL, and libraries before 2.19.
    pub fn mem_alloc(&self, bytes: usize) -> Result<DeviceMemory, Error> {
        const CALL: &str = "ncclMemAlloc";
        let f = self.optional(self.functions().mem_alloc, CALL)?;
        self.optional(self.functions().mem_free, "ncclMemFree")?;
        let mut ptr = std::ptr::null_mut();
        // SAFETY: the pointer is valid for a write.
        let result = unsafe { f(&raw mut ptr, bytes) };
        self.check(CALL, result, std::ptr::null_mut())?;
        Ok(DeviceMemory {
            nccl: self.clone(),
            ptr,
            bytes,
        })
    }
}

/// How a window is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowKind {
    /// No guarantee.
    #[default]
    Plain,
    /// Every rank registers memory of the same size, and passes equal offsets in it to collectives.
    Symmetric,
}

/// A buffer that is registered with a communicator (`ncclCommRegister`). Dropping it deregisters
/// the buffer.
pub struct Registration {
    comm: Arc<Inner>,
    handle: *mut c_void,
}

/// A window (`ncclCommWindowRegister`). Dropping it deregisters the window.
pub struct Window {
    comm: Arc<Inner>,
    handle: RawWindow,
}

/// A reduction that multiplies every input by a factor and sums (`ncclRedOpCreatePreMulSum`). It is
/// only valid for its communicator and the type of the factor. Dropping it destroys it; this is
/// allowed as soon as the calls that use it have returned.
pub struct PreMulSum {
    comm: Arc<Inner>,
    op: RedOp,
}

// SAFETY: handles are keys of NCCL's tables, not memory, and only one thread at a time is inside a
// call.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Send for Window {}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:?})", self.handle)
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({:?})", self.handle)
    }
}

impl fmt::Debug for PreMulSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PreMulSum({})", self.op.0)
    }
}

impl Window {
    /// Returns NCCL's handle, for functions that are not wrapped and for custom kernels.
    #[must_use]
    pub fn as_raw(&self) -> RawWindow {
        self.handle
    }
}

impl PreMulSum {
    /// Returns the reduction for calls.
    #[must_use]
    pub fn op(&self) -> RedOp {
        self.op
    }
}

impl Communicator {
    /// Registers a buffer, so that collectives use it without copies through NCCL's own buffers.
    /// The call is local to the rank, but only has an effect if all ranks make it.
    ///
    /// # Safety
    /// The memory belongs to the device, has this length, and stays allocated until the
    /// registration is dropped.
    ///
    /// # Errors
    /// Errors of NCCL, and libraries before 2.19.
    pub unsafe fn register(&self, ptr: *mut c_void, bytes: usize) -> Result<Registration, Error> {
        const CALL: &str = "ncclCommRegister";
        let f = self.nccl().functions();
        let (register, _) = (
            self.nccl().optional(f.comm_register, CALL)?,
            self.nccl()
                .optional(f.comm_deregister, "ncclCommDeregister")?,
        );
        let c = self.inner.enter(CALL)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the communicator is live while entered; the memory follows the caller's contract;
        // the handle is valid for a write.
        let result = unsafe { register(c.handle, ptr, bytes, &raw mut handle) };
        self.finish(CALL, result, &c)?;
        Ok(Registration {
            comm: Arc::clone(&self.inner),
            handle,
        })
    }

    /// Registers a window. All ranks must call this. Collectives on copy engines need a symmetric
    /// window of memory from [`Nccl::mem_alloc`] (or from the driver's virtual memory functions)
    /// that begins at a multiple of 4096 bytes within its allocation. Returns `None` if NCCL does
    /// not use windows on this machine.
    ///
    /// # Safety
    /// As for [`Communicator::register`].
    ///
    /// # Errors
    /// Errors of NCCL, a call within a group, and libraries before 2.27.
    pub unsafe fn window(
        &self,
        ptr: *mut c_void,
        bytes: usize,
        kind: WindowKind,
    ) -> Result<Option<Window>, Error> {
        const CALL: &str = "ncclCommWindowRegister";
        let f = self.nccl().functions();
        let (register, _) = (
            self.nccl().optional(f.comm_window_register, CALL)?,
            self.nccl()
                .optional(f.comm_window_deregister, "ncclCommWindowDeregister")?,
        );
        group::refuse(CALL)?;
        let flags = match kind {
            WindowKind::Plain => 0,
            WindowKind::Symmetric => 1,
        };
        let c = self.inner.enter(CALL)?;
        // If the communicator is nonblocking, NCCL writes the handle when it is ready, for any
        // result of the call. If that takes too long, the handle's memory is leaked, so that NCCL
        // can still write to it.
        let place = Box::into_raw(Box::new(std::ptr::null_mut()));
        // SAFETY: as in `register`; the location does not move.
        let result = unsafe { register(c.handle, ptr, bytes, place, flags) };
        self.finish_later(CALL, result, &c)?;
        // SAFETY: the pointer is from a box, and NCCL no longer uses it.
        let handle = *unsafe { Box::from_raw(place) };
        Ok((!handle.is_null()).then(|| Window {
            comm: Arc::clone(&self.inner),
            handle,
        }))
    }

    /// Creates a reduction that multiplies inputs by `factor` and sums them.
    ///
    /// # Errors
    /// Errors of NCCL, and libraries before 2.11.
    pub fn pre_mul_sum(&self, factor: Scalar) -> Result<PreMulSum, Error> {
        const CALL: &str = "ncclRedOpCreatePreMulSum";
        let f = self.nccl().functions();
        let create = self.nccl().optional(f.red_op_create_pre_mul_sum, CALL)?;
        self.nccl().optional(f.red_op_destroy, "ncclRedOpDestroy")?;
        let c = self.inner.enter(CALL)?;
        let mut op = 0;
        let mut scalar = factor.bytes();
        // SAFETY: the communicator is live while entered; the scalar is in host memory, has the
        // named type, and is read before the call returns ("host immediate").
        let result = unsafe {
            create(
                &raw mut op,
                scalar.as_mut_ptr().cast(),
                factor.data_type().0,
                HOST_IMMEDIATE,
                c.handle,
            )
        };
        self.finish(CALL, result, &c)?;
        Ok(PreMulSum {
            comm: Arc::clone(&self.inner),
            op: RedOp(op),
        })
    }
}

// A freed communicator has released its registrations, windows and reductions, and `enter` then
// fails. A drop cannot return errors.

impl Drop for Registration {
    fn drop(&mut self) {
        let f = self.comm.nccl.functions().comm_deregister;
        if let (Ok(c), Some(f)) = (self.comm.enter("ncclCommDeregister"), f) {
            // SAFETY: the communicator is live while entered, and the handle is from it.
            let _ = unsafe { f(c.handle, self.handle) };
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let f = self.comm.nccl.functions().comm_window_deregister;
        if let (Ok(c), Some(f)) = (self.comm.enter("ncclCommWindowDeregister"), f) {
            // SAFETY: as above.
            let _ = unsafe { f(c.handle, self.handle) };
        }
    }
}

impl Drop for PreMulSum {
    fn drop(&mut self) {
        let f = self.comm.nccl.functions().red_op_destroy;
        if let (Ok(c), Some(f)) = (self.comm.enter("ncclRedOpDestroy"), f) {
            // SAFETY: as above.
            let _ = unsafe { f(self.op.0, c.handle) };
        }
    }
}
