//! Calls of the CUDA driver, with errors that name the call that failed.

use crate::base::operand::RawRange;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name}: {text}")]
pub struct CudaError {
    /// Name of the function.
    pub call: &'static str,
    /// Name of the error.
    pub name: String,
    /// The driver's description.
    pub text: String,
    /// Number of the error.
    pub code: u32,
}

impl CudaError {
    /// Returns whether device memory was insufficient.
    #[must_use]
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }
}

/// Converts the result of a call to an error.
#[inline]
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(error(call, result))
    }
}

/// Copies device memory to the host, without a wait for other streams.
///
/// # Safety
/// The range is live device memory of the current context.
pub(crate) unsafe fn read(range: &RawRange) -> Result<Vec<u8>, CudaError> {
    let mut data = vec![0; range.bytes];
    // SAFETY: the caller's contract; the buffer has the range's length.
    check("cuMemcpyDtoH", unsafe {
        sys::cuMemcpyDtoH_v2(
            data.as_mut_ptr().cast(),
            range.ptr.addr() as u64,
            range.bytes,
        )
    })?;
    Ok(data)
}

#[cold]
fn error(call: &'static str, result: CUresult) -> CudaError {
    let words = |s: Result<&CStr, DriverError>| {
        s.map_or_else(|_| "?".to_owned(), |s| s.to_string_lossy().into_owned())
    };
    let e = DriverError(result);
    CudaError {
        call,
        name: words(e.error_name()),
        text: words(e.error_string()),
        code: result as u32,
    }
}

/// Returns whether asynchronous work has completed, from the result of a query.
pub(crate) fn done(call: &'static str, result: CUresult) -> Result<bool, CudaError> {
    match result {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => check(call, other).map(|()| true),
    }
}

/// A stream. It is destroyed with its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(pub(crate) sys::CUstream);

// SAFETY: a handle of the driver, which every thread may use.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// An event. It is destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: a handle of the driver, which every thread may use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event. An event that records times is slower.
    pub(crate) fn new(timing: bool) -> Result<Self, CudaError> {
        let flags = if timing {
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: the output is a local handle; a context is current.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&raw mut event, flags as u32)
        })?;
        Ok(Self(event))
    }

    #[inline]
    pub(crate) fn record(&self, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: both handles are alive.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.0, stream.0)
        })
    }

    /// Records the event in a captured graph, for waits outside of the graph.
    pub(crate) fn record_external(&self, stream: RawStream) -> Result<(), CudaError> {
        const EXTERNAL: u32 = 1;
        // SAFETY: both handles are alive.
        check("cuEventRecordWithFlags", unsafe {
            sys::cuEventRecordWithFlags(self.0, stream.0, EXTERNAL)
        })
    }

    #[inline]
    pub(crate) fn wait(&self, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: both handles are alive.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream.0, self.0, 0)
        })
    }

    /// Blocks the host until the work before the last record has completed.
    pub(crate) fn host_wait(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is alive.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.0)
        })
    }

    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is alive.
        done("cuEventQuery", unsafe { sys::cuEventQuery(self.0) })
    }

    /// Returns the milliseconds since another event. Both events must have completed and must
    /// record times.
    pub(crate) fn ms_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        let mut ms = 0.0;
        // SAFETY: both handles are alive.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&raw mut ms, earlier.0, self.0)
        })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is alive and no longer used. An error cannot be handled here.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
