//! Memory that NCCL knows: registered buffers, symmetric windows, its own allocations; reductions with a factor.

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

/// Device memory of NCCL's (`ncclMemAlloc`): it can be registered in every way. Freed when it is dropped.
pub struct DeviceMemory {
    nccl: Nccl,
    ptr: *mut c_void,
    bytes: usize,
}

// SAFETY: the pointer is an address of device memory, which has no thread.
unsafe impl Send for DeviceMemory {}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({:?}, {} bytes)", self.ptr, self.bytes)
    }
}

impl DeviceMemory {
    /// Address.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.ptr
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(f) = self.nccl.functions().mem_free {
            // SAFETY: the memory is from `ncclMemAlloc`, and this is its only owner. Nobody is left to hear of an error.
            let _ = unsafe { f(self.ptr) };
        }
    }
}

impl Nccl {
    /// Allocates memory on the calling thread's current CUDA device.
    ///
    /// # Errors
    /// What NCCL reports; libraries before 2.19.
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
    /// No promise.
    #[default]
    Plain,
    /// Every rank registers memory of this size, and passes equal offsets in it to collectives.
    Symmetric,
}

/// A buffer that is registered with a communicator (`ncclCommRegister`); deregistered when dropped.
pub struct Registration {
    comm: Arc<Inner>,
    handle: *mut c_void,
}

/// A window (`ncclCommWindowRegister`); deregistered when dropped.
pub struct Window {
    comm: Arc<Inner>,
    handle: RawWindow,
}

/// A reduction that multiplies every input by a factor and sums (`ncclRedOpCreatePreMulSum`). It belongs to its
/// communicator and the factor's type, and is destroyed when dropped, which may be as soon as the calls that were given it
/// have returned.
pub struct PreMulSum {
    comm: Arc<Inner>,
    op: RedOp,
}

// SAFETY: handles are tokens for NCCL's tables, not memory, and only one thread at a time is inside a call.
unsafe impl Send for Registration {}
// SAFETY: likewise.
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
    /// NCCL's handle, for functions that are not wrapped and for kernels of one's own.
    #[must_use]
    pub fn as_raw(&self) -> RawWindow {
        self.handle
    }
}

impl PreMulSum {
    /// The reduction to give to calls.
    #[must_use]
    pub fn op(&self) -> RedOp {
        self.op
    }
}

impl Communicator {
    /// Registers a buffer, so that collectives use it without copies through NCCL's own buffers. Local to the rank, though
    /// it helps only where all ranks do it.
    ///
    /// # Safety
    /// The memory is the device's, of this length, and stays allocated until the registration is dropped.
    ///
    /// # Errors
    /// What NCCL reports; libraries before 2.19.
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
        // SAFETY: the communicator is live while entered; the memory is the caller's promise; the handle is valid for a
        // write.
        let result = unsafe { register(c.handle, ptr, bytes, &raw mut handle) };
        self.finish(CALL, result, &c)?;
        Ok(Registration {
            comm: Arc::clone(&self.inner),
            handle,
        })
    }

    /// Registers a window. All ranks call it. A symmetric window of memory from [`Nccl::mem_alloc`] (or of the driver's
    /// virtual memory functions) is what collectives on copy engines need; it begins at a multiple of 4096 bytes within its
    /// allocation. Returns `None` where NCCL has no use for windows on this machine.
    ///
    /// # Safety
    /// As [`Communicator::register`].
    ///
    /// # Errors
    /// What NCCL reports; within a group; libraries before 2.27.
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
        // Where the communicator does not block, NCCL writes the handle when it is ready, whatever the result was. If it is
        // not in time, these bytes are NCCL's for good.
        let place = Box::into_raw(Box::new(std::ptr::null_mut()));
        // SAFETY: as in `register`; the place stays.
        let result = unsafe { register(c.handle, ptr, bytes, place, flags) };
        self.finish_later(CALL, result, &c)?;
        // SAFETY: it is from a box, and NCCL is done with it.
        let handle = *unsafe { Box::from_raw(place) };
        Ok((!handle.is_null()).then(|| Window {
            comm: Arc::clone(&self.inner),
            handle,
        }))
    }

    /// A sum of inputs that are multiplied by `factor` first.
    ///
    /// # Errors
    /// What NCCL reports; libraries before 2.11.
    pub fn pre_mul_sum(&self, factor: Scalar) -> Result<PreMulSum, Error> {
        const CALL: &str = "ncclRedOpCreatePreMulSum";
        let f = self.nccl().functions();
        let create = self.nccl().optional(f.red_op_create_pre_mul_sum, CALL)?;
        self.nccl().optional(f.red_op_destroy, "ncclRedOpDestroy")?;
        let c = self.inner.enter(CALL)?;
        let mut op = 0;
        let mut scalar = factor.bytes();
        // SAFETY: the communicator is live while entered; the scalar is in host memory, has the type that is named, and is
        // read before the call returns ("host immediate").
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

// A communicator that is gone has taken everything of its own with it, and then `enter` fails. Nobody is left to hear of
// errors of a drop.

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
