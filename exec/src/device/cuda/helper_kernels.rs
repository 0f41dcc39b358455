//! Helper kernels of the device: delays, sums of squares, NaN checks.

use super::context::Context;
use super::driver::{CudaError, RawStream, check};
use super::libraries::Libraries;
use crate::base::element;
use crate::base::operand::RawRange;
use crate::kernels::cuda::Loader;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

const SOURCE: &str = include_str!("support.cu");
/// Number of partial sums per range.
pub(crate) const SUMS: u32 = 512;
const THREADS: u32 = 512;

/// Loaded kernels.
pub(crate) struct HelperKernels {
    spin: sys::CUfunction,
    squares: sys::CUfunction,
    total: sys::CUfunction,
    find_nan: sys::CUfunction,
    scale: sys::CUfunction,
    // Fields are dropped in this order.
    _loader: Loader,
    context: Arc<Context>,
}

// SAFETY: the handles are the driver's, and every thread may use them.
unsafe impl Send for HelperKernels {}

impl HelperKernels {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, String> {
        let libraries = Libraries::load(&[]).map_err(|e| e.to_string())?;
        let folders = libraries.folders().iter().map(|f| f.path.clone());
        let mut loader = Loader::of_user(context.target, folders.collect());
        let mut function = |name| {
            let function = loader.function(SOURCE, name, 0);
            function.map_err(|e| format!("support.cu: {e}"))
        };
        Ok(Self {
            spin: function("spin")?,
            squares: function("squares")?,
            total: function("total")?,
            find_nan: function("find_nan")?,
            scale: function("scale")?,
            _loader: loader,
            context: Arc::clone(context),
        })
    }

    /// Launches a kernel with parameters.
    pub(super) fn launch(
        f: sys::CUfunction,
        blocks: u32,
        threads: u32,
        stream: RawStream,
        args: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: callers pass an address of each parameter, with the parameter's type.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                f,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0,
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }

    /// Delays a stream.
    pub(crate) fn spin(&self, time: Duration, stream: RawStream) -> Result<(), CudaError> {
        let mut ns = time.as_nanos() as u64;
        Self::launch(self.spin, 1, 1, stream, &mut [(&raw mut ns).cast()])
    }

    /// Writes the sum of squares of ranges to a float32 at `out`. `sums` points to [`SUMS`] doubles
    /// that no other stream uses.
    pub(crate) fn squares(
        &self,
        ranges: &[RawRange],
        mut sums: u64,
        mut out: u64,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let mut first = 1u32;
        for r in ranges {
            let Some(mut dtype) = element::cuda(r.dtype).support else {
                continue;
            };
            let mut at = r.ptr.addr() as u64;
            let mut n = r.bytes as u64 / r.dtype.size();
            let mut args = [
                (&raw mut at).cast(),
                (&raw mut n).cast(),
                (&raw mut dtype).cast(),
                (&raw mut first).cast(),
                (&raw mut sums).cast(),
            ];
            Self::launch(self.squares, SUMS, THREADS, stream, &mut args)?;
            first = 0;
        }
        let mut n = if first == 1 { 0 } else { SUMS };
        let mut args = [
            (&raw mut sums).cast(),
            (&raw mut n).cast(),
            (&raw mut out).cast(),
        ];
        Self::launch(self.total, 1, THREADS, stream, &mut args)
    }

    /// Searches a range for NaN. Writes `label` and the index of the element to the two words at
    /// `found`.
    pub(crate) fn find_nan(
        &self,
        range: &RawRange,
        mut label: u64,
        mut found: u64,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let Some(mut dtype) = element::cuda(range.dtype).support else {
            return Ok(());
        };
        let mut at = range.ptr.addr() as u64;
        let mut n = range.bytes as u64 / range.dtype.size();
        let mut args = [
            (&raw mut at).cast(),
            (&raw mut n).cast(),
            (&raw mut dtype).cast(),
            (&raw mut label).cast(),
            (&raw mut found).cast(),
        ];
        let blocks = n.div_ceil(u64::from(THREADS)).clamp(1, 1024) as u32;
        Self::launch(self.find_nan, blocks, THREADS, stream, &mut args)
    }

    /// Multiplies floating-point numbers by a factor.
    pub(crate) fn scale(
        &self,
        from: &RawRange,
        to: &RawRange,
        mut by: f32,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let Some(mut dtype) = element::cuda(to.dtype).support else {
            return Ok(());
        };
        let (mut from, mut at) = (from.ptr.addr() as u64, to.ptr.addr() as u64);
        let mut n = to.bytes as u64 / to.dtype.size();
        let mut args = [
            (&raw mut from).cast(),
            (&raw mut at).cast(),
            (&raw mut n).cast(),
            (&raw mut dtype).cast(),
            (&raw mut by).cast(),
        ];
        let blocks = n.div_ceil(u64::from(THREADS)).clamp(1, 2048) as u32;
        Self::launch(self.scale, blocks, THREADS, stream, &mut args)
    }
}

impl Drop for HelperKernels {
    fn drop(&mut self) {
        // The module is unloaded next, and no work is running. Errors cannot be handled here.
        let _ = self.context.bind();
    }
}
