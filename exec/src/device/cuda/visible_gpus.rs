//! The GPUs of this machine, as the driver shows them.

use super::context::{device, name, visible};
use super::driver::{CudaError, check};
use super::libraries::{Libraries, MissingLibraries};
use cudarc::driver::sys;
use shardlab_plan::units::Bytes;
use std::path::PathBuf;

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Name, for example `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Memory in total.
    pub memory: Bytes,
}

/// Reason why no GPU is visible.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoGpu {
    /// The driver is not installed.
    #[error("the NVIDIA driver (libcuda.so.1) is not installed")]
    NoDriver(#[source] MissingLibraries),
    /// The driver shows none.
    #[error("the NVIDIA driver shows no GPU{}", visible())]
    None,
    /// The driver returned an error.
    #[error("the NVIDIA driver fails: {0}")]
    Driver(#[from] CudaError),
}

/// Returns the GPUs that the driver shows, including those that are too old for training. Loads
/// only the driver, and creates no context. `library_path` are folders that are searched first.
///
/// # Errors
/// Returns [`NoGpu`] if the driver is not installed, fails, or shows no GPU.
pub fn visible_gpus(library_path: &[PathBuf]) -> Result<Vec<Gpu>, NoGpu> {
    Libraries::load_driver(library_path).map_err(NoGpu::NoDriver)?;
    // SAFETY: no conditions.
    let started = unsafe { sys::cuInit(0) };
    if started == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        return Err(NoGpu::None);
    }
    check("cuInit", started)?;
    let mut count = 0;
    // SAFETY: the output is a local number.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&raw mut count)
    })?;
    let gpu = |ordinal: u32| {
        let device = device(ordinal)?;
        let mut bytes = 0;
        // SAFETY: the output is a local number.
        check("cuDeviceTotalMem", unsafe {
            sys::cuDeviceTotalMem_v2(&raw mut bytes, device)
        })?;
        Ok::<Gpu, CudaError>(Gpu {
            name: name(device)?,
            memory: Bytes(bytes as u64),
        })
    };
    let all = (0..count.unsigned_abs())
        .map(gpu)
        .collect::<Result<Vec<_>, _>>()?;
    if all.is_empty() {
        return Err(NoGpu::None);
    }
    Ok(all)
}
