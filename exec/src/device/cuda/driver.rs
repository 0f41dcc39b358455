//! Calls of the CUDA driver, with errors that say which call failed.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name}: {text}")]
pub struct CudaError {
    /// The call.
    pub call: &'static str,
    /// The error's name.
    pub name: String,
    /// What the driver says about it.
    pub text: String,
    /// Its number.
    pub code: u32,
}

impl CudaError {
    /// Device memory does not suffice.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }
}

/// The result of a call.
#[inline]
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(error(call, result))
    }
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

/// Whether something asynchronous is done; `None` if it is not.
pub(crate) fn done(call: &'static str, result: CUresult) -> Result<bool, CudaError> {
    match result {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => check(call, other).map(|()| true),
    }
}

/// A stream. It is destroyed with its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(pub(crate) sys::CUstream);

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// An event, destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event; one that takes times is slower.
    pub(crate) fn new(timing: bool) -> Result<Self, CudaError> {
        let flags = if timing {
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes a handle where it is told to; a context is current.
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

    /// While capturing: the event is recorded for waits outside of the graph.
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

    /// The host waits for what was recorded last.
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

    /// Milliseconds from another event; both are done and take times.
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
        // SAFETY: the handle is alive and used no more. Nothing can be done about an error here.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
