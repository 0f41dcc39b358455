//! The device's own small kernels: delays, sums of squares, NaN checks.

use super::context::Context;
use super::driver::{CudaError, RawStream, check};
use crate::operand::RawRange;
use cudarc::driver::sys;
use cudarc::nvrtc::result as nvrtc;
use shardlab_plan::units::DType;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::Duration;

const SOURCE: &str = include_str!("support.cu");
/// Partial sums of a range.
pub(crate) const SUMS: u32 = 512;
const THREADS: u32 = 512;

/// Loaded kernels.
#[derive(Debug)]
pub(crate) struct Support {
    context: Arc<Context>,
    module: sys::CUmodule,
    spin: sys::CUfunction,
    squares: sys::CUfunction,
    total: sys::CUfunction,
    find_nan: sys::CUfunction,
    scale: sys::CUfunction,
}

// SAFETY: the handles are the driver's, which lets every thread use them.
unsafe impl Send for Support {}

/// CUDA C++ to machine code for a GPU of a capability. Needs no GPU.
pub(crate) fn compile(source: &str, capability: (u32, u32)) -> Result<Vec<u8>, String> {
    use cudarc::nvrtc::sys as raw;
    let text = CString::new(source).map_err(|e| e.to_string())?;
    let failed = |what: &str, e: nvrtc::NvrtcError| format!("{what}: {e:?}");
    let program = nvrtc::create_program(&text, None).map_err(|e| failed("nvrtc", e))?;
    let target = format!("--gpu-architecture=sm_{}{}", capability.0, capability.1);
    // SAFETY: the program was just made.
    let compiled = unsafe { nvrtc::compile_program(program, &[target]) };
    let result = match compiled {
        Err(e) => {
            // SAFETY: the program is alive.
            let log = unsafe { nvrtc::get_program_log(program) }.unwrap_or_default();
            let log: Vec<u8> = log
                .iter()
                .map(|&c| c as u8)
                .take_while(|&c| c != 0)
                .collect();
            Err(failed(&String::from_utf8_lossy(&log), e))
        }
        Ok(()) => {
            let mut size = 0;
            // SAFETY: the program is compiled; a size is written where we say.
            unsafe { raw::nvrtcGetCUBINSize(program, &raw mut size) }
                .result()
                .map_err(|e| failed("nvrtcGetCUBINSize", e))
                .and_then(|()| {
                    let mut code = vec![0u8; size];
                    // SAFETY: the buffer has the size that was asked for.
                    unsafe { raw::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }
                        .result()
                        .map_err(|e| failed("nvrtcGetCUBIN", e))?;
                    Ok(code)
                })
        }
    };
    // SAFETY: made above, used no more.
    let _ = unsafe { nvrtc::destroy_program(program) };
    result
}

/// The number that the kernels know an element type by; none for integers.
fn number(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::Bf16 => Some(1),
        DType::F16 => Some(2),
        DType::I64 | DType::U8 => None,
    }
}

impl Support {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, String> {
        let code = compile(SOURCE, context.capability)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is whole and outlives the call.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast())
        })
        .map_err(|e| e.to_string())?;
        let function = |name: &std::ffi::CStr| {
            let mut f = std::ptr::null_mut();
            // SAFETY: the module is loaded; the name ends with a zero.
            check("cuModuleGetFunction", unsafe {
                sys::cuModuleGetFunction(&raw mut f, module, name.as_ptr())
            })
            .map_err(|e| e.to_string())?;
            Ok::<_, String>(f)
        };
        Ok(Self {
            spin: function(c"spin")?,
            squares: function(c"squares")?,
            total: function(c"total")?,
            find_nan: function(c"find_nan")?,
            scale: function(c"scale")?,
            context: Arc::clone(context),
            module,
        })
    }

    /// Launches a kernel whose parameters these are.
    fn launch(
        f: sys::CUfunction,
        blocks: u32,
        threads: u32,
        stream: RawStream,
        args: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: callers pass an address for each parameter, of the parameter's type.
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

    /// Holds a stream up.
    pub(crate) fn spin(&self, time: Duration, stream: RawStream) -> Result<(), CudaError> {
        let mut ns = time.as_nanos() as u64;
        Self::launch(self.spin, 1, 1, stream, &mut [(&raw mut ns).cast()])
    }

    /// The sum of squares of ranges into a float32. `sums` is room for [`SUMS`] doubles that nothing on another stream
    /// uses.
    pub(crate) fn squares(
        &self,
        ranges: &[RawRange],
        mut sums: u64,
        mut out: u64,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let mut first = 1u32;
        for r in ranges {
            let Some(mut dtype) = number(r.dtype) else {
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

    /// Looks for a NaN; two words at `found` take the label and the element.
    pub(crate) fn find_nan(
        &self,
        range: &RawRange,
        mut label: u64,
        mut found: u64,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let Some(mut dtype) = number(range.dtype) else {
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
        let Some(mut dtype) = number(to.dtype) else {
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

impl Drop for Support {
    fn drop(&mut self) {
        // SAFETY: the module is loaded and nothing runs any more. Nothing can be done about errors here.
        unsafe {
            let _ = self.context.bind();
            let _ = sys::cuModuleUnload(self.module);
        }
    }
}
