//! CPU kernels of every operation, forward and backward, and of the sharding engine.
//!
//! [`launch`] interprets a kernel's body. Arithmetic is float32 (losses and sums of squares are
//! accumulated in float64). Every result is rounded to its slot's type, whether it goes to memory
//! or to the next operation of a fused body, and every reduction has an order that depends on
//! shapes alone. So a fused body computes, bit for bit, what its operations would compute one by
//! one, and a launch gives the same bits every time.
//!
//! An operand's element type is that of its buffer, which may differ from its slot's: a weight
//! gradient may be written directly to a float32 buffer, and a weight may be read from its float32
//! original.
//!
//! A launch runs on the calling thread; [`use_threads`] lets it use more, with the same bits.
//!
//! - `ops`: the implementation of each operation, on the CPU and on the GPU, by family;
//! - `fused`: elementwise operations, norms, softmaxes, concatenations, alone or fused, by blocks
//!   of rows;
//! - `gemm`, `attention`, `conv`: matmuls by the `gemm` crate, on floats (other types are widened
//!   first);
//! - `gemm_epilogue`: GEMMs with fused epilogue;
//! - `shard`: copies, accumulation, clipping, optimizers on byte ranges;
//! - `cuda`: generated code and libraries for GPUs.

mod attention;
mod conv;
mod convert;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod experts;
mod fused;
mod gemm;
mod gemm_epilogue;
mod math;
mod operands;
mod ops;
mod parallel;
mod route;
mod scaled_gemm;
mod scratch;
mod shard;
mod strides;
mod view;
mod wide;

pub use error::{KernelError, OperandError};
pub(crate) use experts::is_pushed;
pub use parallel::{threads, use_threads};

use crate::operand::{LaunchContext, RawRange};
use fused::Computed;
use operands::Operands;
use ops::Call;
use shardlab_plan::ir::{BodyOp, Kernel, Place};
use view::View;

/// Performs a launch.
///
/// A read range may share memory with a write range: every operation sees the contents from before
/// the launch.
///
/// # Errors
/// [`KernelError`], when operands do not fit the kernel's body or hold ids outside their range.
///
/// # Safety
/// Every range is in live memory; until this returns, nothing else writes the reads or touches the
/// writes.
pub unsafe fn launch(
    ctx: &LaunchContext<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), KernelError> {
    let body = &ctx.kernel.body[..];
    let done = match body {
        [only] if !fused::handles(only.op) || ops::copy::is_integer_copy(only) => {
            let operands = Operands::new(ctx, only, reads, writes);
            let whole = Call::Whole(&operands);
            ops::cpu(&only.op).run(whole).map_err(|e| (0, e))
        }
        _ => match used_rows(ctx.kernel, reads) {
            Ok(computed) => match BodyOp::split_gemm_epilogue(body) {
                Some((gemms, epilogue)) => {
                    gemm_epilogue::run(ctx, gemms, epilogue, computed, reads, writes)
                }
                None => fused::run(body, computed, reads, writes),
            },
            Err(fault) => Err((0, fault)),
        },
    };
    done.map_err(|(i, fault)| KernelError {
        kernel: ctx.kernel.name.clone(),
        op: body.get(i).map_or("", |op| op.op.name()),
        fault,
    })
}

/// Returns the rows that a kernel computes, from the offsets that it reads.
fn used_rows(kernel: &Kernel, reads: &[RawRange]) -> Result<Computed, OperandError> {
    let Some(of) = &kernel.used_rows else {
        return Ok(Computed::All);
    };
    let range = match of.offsets.place {
        Place::Read(n) => reads.get(usize::from(n)).copied(),
        Place::Write(_) | Place::Register(_) => None,
    };
    let range = range.ok_or(OperandError::UnknownSlot {
        place: of.offsets.place,
        count: reads.len(),
    })?;
    let reserved = of.reserved as usize;
    let used = experts::used_rows(&View::new(range, &of.offsets)?, reserved)?;
    Ok(Computed::First { used, reserved })
}
