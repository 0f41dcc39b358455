//! One GPU: its context, what it is, how much memory it has.

use super::driver::{CudaError, RawStream, check};
use super::libraries::{Libraries, MissingLibraries};
use crate::kernels::cuda::Target;
use cudarc::driver::sys::{self, CUdevice_attribute};
use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The CUDA version that the bindings were made for.
const DRIVER: i32 = 13_000;

/// Why there is no GPU to work on.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoGpu {
    /// Libraries are missing.
    #[error(transparent)]
    Libraries(#[from] MissingLibraries),
    /// The driver is too old.
    #[error(
        "no usable GPU: the driver supports CUDA {}.{}, but 13.0 or newer is needed",
        .0 / 1000, .0 % 1000 / 10
    )]
    OldDriver(i32),
    /// There are fewer GPUs.
    #[error("there is no GPU {ordinal}: the driver shows {count}{}", visible())]
    NoDevice {
        /// Wanted.
        ordinal: u32,
        /// There are.
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
    /// The driver refuses.
    #[error("no usable GPU: {0}")]
    Driver(#[from] CudaError),
}

/// What hides GPUs from the driver, for messages.
pub(super) fn visible() -> String {
    std::env::var("CUDA_VISIBLE_DEVICES")
        .map(|v| format!(" (CUDA_VISIBLE_DEVICES={v})"))
        .unwrap_or_default()
}

/// A GPU's context: its primary one, which libraries share.
pub struct Context {
    /// Number of the GPU among the visible ones.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// What kernels are compiled for.
    pub(crate) target: Target,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// CUDA version of the driver: 1000 times the major and ten times the minor.
    pub driver: i32,
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: the handles are the driver's, which lets every thread use them.
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
/// [`NoGpu`].
pub fn gpus(library_path: &[PathBuf]) -> Result<u32, NoGpu> {
    Libraries::load(library_path)?;
    let mut version = 0;
    // SAFETY: the driver writes a number where it is told to.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&raw mut version)
    })?;
    if version < DRIVER {
        return Err(NoGpu::OldDriver(version));
    }
    // SAFETY: no conditions.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: the driver writes a number where it is told to.
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
    // Where some are new enough, whoever comes to another one is told.
    match (devices.first(), capabilities.first()) {
        (Some(first), Some(&found)) if capabilities.iter().all(|c| Target::of(*c).is_none()) => {
            Err(too_old(*first, found))
        }
        _ => Ok(count),
    }
}

/// The driver's device of a number below the count.
pub(super) fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: the driver writes a number where it is told to.
    check("cuDeviceGet", unsafe {
        sys::cuDeviceGet(&raw mut device, ordinal as i32)
    })?;
    Ok(device)
}

fn name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name = [0; 128];
    // SAFETY: the buffer has the length that is given.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)
    })?;
    // SAFETY: the driver has ended the name with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

fn attribute(device: sys::CUdevice, a: CUdevice_attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: the driver writes a number where it is told to.
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

fn too_old(device: sys::CUdevice, capability: (u32, u32)) -> NoGpu {
    let name = name(device).unwrap_or_default();
    NoGpu::OldGpu { name, capability }
}

impl Context {
    /// The context of a GPU, current on this thread from now on.
    ///
    /// # Errors
    /// [`NoGpu`].
    pub fn new(ordinal: u32, library_path: &[PathBuf]) -> Result<Arc<Self>, NoGpu> {
        let count = gpus(library_path)?;
        if ordinal >= count {
            return Err(NoGpu::NoDevice { ordinal, count });
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
        // SAFETY: the driver writes a number where it is told to.
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

    /// Makes it current on this thread.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.handle)
        })
    }

    /// The driver's handle; alive as long as this is.
    #[must_use]
    pub fn handle(&self) -> sys::CUcontext {
        self.handle
    }

    /// The driver's device.
    #[must_use]
    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Free and total bytes of the GPU.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers where it is told to.
        check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    /// A stream that waits for no other. `priority` is CUDA's: lower is more urgent; what the GPU does not have becomes
    /// the nearest that it has.
    pub(crate) fn stream(&self, priority: i8) -> Result<RawStream, CudaError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the driver writes two numbers where it is told to.
        check("cuCtxGetStreamPriorityRange", unsafe {
            sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)
        })?;
        // The program says 0 and -1; anything urgent goes before everything else.
        let priority = if priority < 0 { greatest } else { least.min(0) };
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes a handle where it is told to.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority)
        })?;
        Ok(RawStream(stream))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `new`. Nothing can be done about an error here.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
