//! Launches of functions.

use super::error::ErrorKind;
use cudarc::driver::result;
use cudarc::driver::sys::{CUfunction, CUstream};
use std::ffi::c_void;

/// Launches a function with the arguments at these addresses.
///
/// # Safety
/// The function takes these arguments, and the memory they name is live.
pub(super) unsafe fn start(
    f: CUfunction,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    params: &mut [*mut c_void],
    stream: CUstream,
) -> Result<(), ErrorKind> {
    // SAFETY: the caller's contract; the arguments outlive the call, which copies them.
    unsafe {
        result::launch_kernel(
            f,
            (grid[0], grid[1], grid[2]),
            (block, 1, 1),
            shared,
            stream,
            params,
        )
    }
    .map_err(ErrorKind::driver("cuLaunchKernel"))
}

/// Launches `blocks` blocks of `threads` threads of a function whose arguments are words: 8 bytes,
/// or the low half of one.
///
/// # Safety
/// As [`start`].
pub(super) unsafe fn words(
    f: CUfunction,
    (blocks, threads): (u32, u32),
    values: &mut [u64],
    stream: CUstream,
) -> Result<(), ErrorKind> {
    let pointers = values.iter_mut().map(|v| (&raw mut *v).cast::<c_void>());
    let mut params: Vec<*mut c_void> = pointers.collect();
    // SAFETY: the caller's contract; the arguments outlive the call.
    unsafe { start(f, [blocks, 1, 1], threads, 0, &mut params, stream) }
}
