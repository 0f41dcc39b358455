//! Launches of functions.

use super::Kernels;
use super::codegen::waiting;
use super::error::ErrorKind;

use cudarc::driver::sys::{self, CUfunction, CUstream};
use std::ffi::c_void;

/// A function of a generated source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub(super) raw: CUfunction,
    /// Whether it may start before the kernel before it on its stream ends, for which it waits.
    is_dependent: bool,
}

impl Function {
    /// Returns a function of a source with the preamble, which is compiled and loaded at its first
    /// use.
    ///
    /// # Errors
    /// If the source does not compile, or the driver refuses it.
    pub(super) fn load(
        k: &mut Kernels,
        source: &str,
        name: &str,
        shared: u32,
    ) -> Result<Self, ErrorKind> {
        Ok(Self {
            raw: k.loader.function(&waiting(source), name, shared)?,
            is_dependent: k.target.has_dependent_launches(),
        })
    }
}

/// Launches a function with the arguments at these addresses.
///
/// # Safety
/// The function takes these arguments, and the memory they name is live.
pub(super) unsafe fn start(
    f: Function,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    params: &mut [*mut c_void],
    stream: CUstream,
) -> Result<(), ErrorKind> {
    let mut dependent = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: Default::default(),
        value: sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: grid[0],
        gridDimY: grid[1],
        gridDimZ: grid[2],
        blockDimX: block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        attrs: &raw mut dependent,
        numAttrs: u32::from(f.is_dependent),
    };
    // SAFETY: the caller's contract; arguments and attributes outlive the call, which copies them.
    unsafe {
        let none = std::ptr::null_mut();
        sys::cuLaunchKernelEx(&raw const config, f.raw, params.as_mut_ptr(), none)
    }
    .result()
    .map_err(ErrorKind::driver("cuLaunchKernelEx"))
}

/// Launches `blocks` blocks of `threads` threads of a function whose arguments are words: 8 bytes,
/// or the low half of one.
///
/// # Safety
/// As [`start`].
pub(super) unsafe fn words(
    f: Function,
    (blocks, threads): (u32, u32),
    values: &mut [u64],
    stream: CUstream,
) -> Result<(), ErrorKind> {
    let pointers = values.iter_mut().map(|v| (&raw mut *v).cast::<c_void>());
    let mut params: Vec<*mut c_void> = pointers.collect();
    // SAFETY: the caller's contract; the arguments outlive the call.
    unsafe { start(f, [blocks, 1, 1], threads, 0, &mut params, stream) }
}
