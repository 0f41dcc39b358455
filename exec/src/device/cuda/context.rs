//! The context of a GPU, its properties and its memory.

use super::driver::{CudaError, RawStream, check};
use super::libraries::{Libraries, MissingLibraries};
use crate::kernels::cuda::Target;
use cudarc::driver::sys::{self, CUdevice_attribute};
use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// CUDA version of the bindings.
const DRIVER: i32 = 13_000;

/// Reason why no GPU can be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// Libraries are missing.
    #[error(transparent)]
    Libraries(#[from] MissingLibraries),
    /// The driver is too old.
    #[error(
        "no usable GPU: the driver supports CUDA {}.{}, but 13.0 or newer is needed",
        .0 / 1000, .0 % 1000 / 10
    )]
    OldDriver(i32),
    /// The GPU does not exist.
    #[error("there is no GPU {ordinal}: the driver shows {count}{}", visible())]
    NoDevice {
        /// Number of the requested GPU.
        ordinal: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// All GPUs are too old.
    #[error("no usable GPU: {name} has compute capability {}.{}, but 8.0 or newer is needed (A100 and later)", .capability.0, .capability.1)]
    OldGpu {
        /// Name of the first one.
        name: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// The driver returned an error.
    #[error("no usable GPU: {0}")]
    Driver(#[from] CudaError),
}

/// Describes what hides GPUs from the driver, for messages.
pub(super) fn visible() -> String {
    std::env::var("CUDA_VISIBLE_DEVICES")
        .map(|v| format!(" (CUDA_VISIBLE_DEVICES={v})"))
        .unwrap_or_default()
}

/// The primary context of a GPU, which libraries share.
pub struct Context {
    /// Index of the GPU among the visible ones.
    pub ordinal: u32,
    /// Name of the GPU.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Target that kernels are compiled for.
    pub(crate) target: Target,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// CUDA version of the driver: 1000 times the major version plus ten times the minor version.
    pub driver: i32,
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: the handles are the driver's, and every thread may use them.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.ordinal)
    }
}

/// Loads NVIDIA's libraries and counts the GPUs.
///
/// # Errors
/// Returns [`GpuError`] if a library is missing, if the driver or all GPUs are too old, or if a
/// call of the driver fails.
pub fn gpus(library_path: &[PathBuf]) -> Result<u32, GpuError> {
    Libraries::load(library_path)?;
    let mut version = 0;
    // SAFETY: the output is a local number.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&raw mut version)
    })?;
    if version < DRIVER {
        return Err(GpuError::OldDriver(version));
    }
    // SAFETY: no conditions.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: the output is a local number.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&raw mut count)
    })?;
    let count = count.unsigned_abs();
    let devices = (0..count)
        .map(device)
        .collect::<Result<Vec<_>, CudaError>>()?;
    let capabilities = devices
        .iter()
        .map(|d| capability(*d))
        .collect::<Result<Vec<_>, CudaError>>()?;
    // If some GPUs are new enough, an error occurs only if an old one is used.
    match (devices.first(), capabilities.first()) {
        (Some(first), Some(&found)) if capabilities.iter().all(|c| Target::of(*c).is_none()) => {
            Err(too_old(*first, found))
        }
        _ => Ok(count),
    }
}

/// Returns the driver's device for an index below the count.
pub(super) fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: the output is a local number.
    check("cuDeviceGet", unsafe {
        sys::cuDeviceGet(&raw mut device, ordinal as i32)
    })?;
    Ok(device)
}

pub(super) fn name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name = [0; 128];
    // SAFETY: the buffer has the length that is given.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)
    })?;
    // SAFETY: the driver has terminated the name with a zero byte.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

fn attribute(device: sys::CUdevice, a: CUdevice_attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: the output is a local number.
    check("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&raw mut value, a, device)
    })?;
    Ok(value.unsigned_abs())
}

fn capability(device: sys::CUdevice) -> Result<(u32, u32), CudaError> {
    Ok((
        attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        )?,
        attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )?,
    ))
}

fn too_old(device: sys::CUdevice, capability: (u32, u32)) -> GpuError {
    let name = name(device).unwrap_or_default();
    GpuError::OldGpu { name, capability }
}

impl Context {
    /// Creates the context of a GPU, and makes it current on this thread.
    ///
    /// # Errors
    /// Returns [`GpuError`] as [`gpus`] does, and if this GPU does not exist or is too old.
    pub fn new(ordinal: u32, library_path: &[PathBuf]) -> Result<Arc<Self>, GpuError> {
        let count = gpus(library_path)?;
        if ordinal >= count {
            return Err(GpuError::NoDevice { ordinal, count });
        }
        let device = device(ordinal)?;
        let capability = capability(device)?;
        let target = Target::of(capability).ok_or_else(|| too_old(device, capability))?;
        let name = name(device)?;
        let multiprocessors = attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?;
        let mut driver = 0;
        // SAFETY: the output is a local number.
        check("cuDriverGetVersion", unsafe {
            sys::cuDriverGetVersion(&raw mut driver)
        })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the device is the driver's; it is released once, when the last user drops.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut handle, device)
        })?;
        let context = Self {
            ordinal,
            name,
            capability,
            target,
            multiprocessors,
            driver,
            device,
            handle,
        };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// Returns [`CudaError`] if the driver refuses.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.handle)
        })
    }

    /// Returns the driver's handle, which is valid while this lives.
    #[must_use]
    pub fn handle(&self) -> sys::CUcontext {
        self.handle
    }

    /// Returns the driver's device.
    #[must_use]
    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Returns free and total bytes of the GPU.
    ///
    /// # Errors
    /// Returns [`CudaError`] if a call of the driver fails.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are local numbers.
        check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    /// Creates a stream that does not synchronize with other streams. `priority` is CUDA's: lower
    /// values are more urgent, and values that the GPU does not support are clamped.
    pub(crate) fn stream(&self, priority: i8) -> Result<RawStream, CudaError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the outputs are local numbers.
        check("cuCtxGetStreamPriorityRange", unsafe {
            sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)
        })?;
        // The program uses 0 and -1. Urgent work takes precedence over everything else.
        let priority = if priority < 0 { greatest } else { least.min(0) };
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the output is a local handle.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority)
        })?;
        Ok(RawStream(stream))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `new`. An error cannot be handled here.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
