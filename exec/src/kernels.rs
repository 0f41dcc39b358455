//! CPU kernels of every operation, forward and backward, and of the sharding engine.
//!
//! [`launch`] interprets a kernel's body. Arithmetic is float32 (losses and sums of squares are collected in float64); every
//! result is rounded to its slot's type, whether it goes to memory or on to the next operation of a fused body, and every
//! reduction has an order that depends on shapes alone. So a fused body computes, bit for bit, what its operations would compute
//! one by one, and a launch gives the same bits every time.
//!
//! An operand's element type is that of the buffer it lies in, which may differ from its slot's: a weight gradient may go
//! straight to a float32 buffer, a weight may be read from its float32 original.
//!
//! A launch runs on the calling thread; [`use_threads`] lets it use more, with the same bits.
//!
//! - `fused`: elementwise operations, norms, softmaxes, concatenations: alone or fused, by blocks of rows;
//! - `gemm`, `attention`, `conv`: matrix products by the `gemm` crate, on floats (other types are widened first);
//! - `product`: matrix products that go on with elementwise code;
//! - `reduce`, `embedding`: sums over columns, gathers, scatters;
//! - `shard`: copies, accumulation, clipping, optimizers on byte ranges.

mod attention;
mod conv;
mod convert;
#[cfg(feature = "cuda")]
pub mod cuda;
mod embedding;
mod error;
mod fused;
mod gemm;
mod math;
mod norm;
mod parallel;
mod pointwise;
mod product;
mod reduce;
mod scratch;
mod shard;
mod softmax;
mod view;
mod wide;

pub use error::{Fault, KernelError};
pub use parallel::{threads, use_threads};

use crate::operand::{LaunchContext, RawRange};
use scratch::Scratch;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, Slot, op};
use smallvec::SmallVec;
use view::{View, overlap};

/// Performs a launch.
///
/// A read range may share memory with a write range: every operation sees what was there before the launch.
///
/// # Errors
/// [`KernelError`], when operands do not fit the kernel's body or hold ids outside their range.
///
/// # Safety
/// Every range lies in live memory; until this returns, nothing else writes the reads or touches the writes.
pub unsafe fn launch(
    ctx: &LaunchContext<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), KernelError> {
    let body = &ctx.kernel.body[..];
    let done = match body {
        [only] if !fused::handles(only.op) => alone(ctx, only, reads, writes).map_err(|f| (0, f)),
        [only] if is_integer_copy(only) => copy_ids(only, reads, writes).map_err(|f| (0, f)),
        _ => match BodyOp::going_on(body) {
            Some((products, rest)) => product::run(products, rest, reads, writes),
            None => fused::run(body, reads, writes),
        },
    };
    done.map_err(|(i, fault)| KernelError {
        kernel: ctx.kernel.name.clone(),
        op: body.get(i).map_or("", |op| op.op.name()),
        fault,
    })
}

/// An operation that is never fused.
fn alone(
    ctx: &LaunchContext<'_>,
    op: &BodyOp,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), Fault> {
    if let OpKind::Shard(shard) = op.op {
        return shard::run(shard, ctx, reads, writes);
    }
    let o = Operands::new(op, reads, writes);
    match op.op {
        OpKind::Gemm(op::Gemm {
            ta,
            tb,
            bias,
            accumulate,
        }) => gemm::run(&o, ta, tb, bias, accumulate),
        OpKind::Attention(op::Attention { causal, scale }) => {
            attention::forward(&o, causal, scale.0 as f32)
        }
        OpKind::AttentionGrad(op::AttentionGrad { causal, scale }) => {
            attention::backward(&o, causal, scale.0 as f32)
        }
        OpKind::Conv(op::Conv { kernel }) => conv::forward(&o, kernel as usize),
        OpKind::ConvGradInput(op::ConvGradInput { kernel }) => {
            conv::grad_input(&o, kernel as usize)
        }
        OpKind::ConvGradWeight(op::ConvGradWeight { kernel }) => {
            conv::grad_weight(&o, kernel as usize)
        }
        OpKind::Embedding => embedding::gather(&o),
        OpKind::EmbeddingGrad => embedding::scatter_add(&o),
        OpKind::CrossEntropy(op::CrossEntropy { scale, gradient }) => {
            reduce::cross_entropy(&o, scale.0, gradient.0)
        }
        OpKind::RmsNormWeightGrad | OpKind::LayerNormParamGrad => reduce::norm_param_grads(&o),
        OpKind::SumLeading => reduce::sum_leading(&o),
        OpKind::SumChannels => reduce::sum_channels(&o),
        OpKind::SumAll => reduce::sum_all(&o),
        _ => Err(Fault::Unsupported),
    }
}

fn is_integer_copy(op: &BodyOp) -> bool {
    op.op == OpKind::Copy
        && op
            .inputs
            .iter()
            .chain(&op.outputs)
            .all(|s| s.dtype == DType::I64)
}

/// Copies integers exactly, which floats could not.
fn copy_ids(op: &BodyOp, reads: &[RawRange], writes: &[RawRange]) -> Result<(), Fault> {
    let o = Operands::new(op, reads, writes);
    let (from, to) = (o.input(0)?, o.output(0)?);
    if from.numel != to.numel {
        return Err(Fault::Size {
            what: "the copy's source",
            needed: to.numel,
            found: from.numel,
        });
    }
    let mut block = [0i64; 256];
    for start in (0..to.numel).step_by(block.len()) {
        let n = block.len().min(to.numel - start);
        from.load_ids(start, &mut block[..n])?;
        to.store_ids(start, &block[..n]);
    }
    Ok(())
}

/// Operands of an operation that is a kernel of its own.
struct Operands<'a> {
    op: &'a BodyOp,
    reads: &'a [RawRange],
    writes: &'a [RawRange],
}

impl<'a> Operands<'a> {
    fn new(op: &'a BodyOp, reads: &'a [RawRange], writes: &'a [RawRange]) -> Self {
        Self { op, reads, writes }
    }

    /// Fails unless there are this many operands (more inputs and outputs are unused ones).
    fn expect(&self, inputs: usize, outputs: usize) -> Result<(), Fault> {
        for (what, needed, found) in [
            ("inputs", inputs, self.op.inputs.len()),
            ("outputs", outputs, self.op.outputs.len()),
        ] {
            if found < needed {
                return Err(Fault::Count {
                    what,
                    needed,
                    found,
                });
            }
        }
        Ok(())
    }

    fn slot(&self, outputs: bool, i: usize) -> Result<&'a Slot, Fault> {
        let (what, slots) = if outputs {
            ("outputs", &self.op.outputs[..])
        } else {
            ("inputs", &self.op.inputs[..])
        };
        slots.get(i).ok_or(Fault::Count {
            what,
            needed: i + 1,
            found: slots.len(),
        })
    }

    fn range(&self, slot: &Slot) -> Result<RawRange, Fault> {
        let (ranges, i) = match slot.place {
            Place::Read(i) => (self.reads, i),
            Place::Write(i) => (self.writes, i),
            Place::Register(_) => (&[][..], 0),
        };
        let unknown = Fault::UnknownSlot {
            place: slot.place,
            count: ranges.len(),
        };
        ranges.get(usize::from(i)).copied().ok_or(unknown)
    }

    fn input(&self, i: usize) -> Result<View, Fault> {
        let slot = self.slot(false, i)?;
        View::new(self.range(slot)?, slot)
    }

    fn output(&self, i: usize) -> Result<View, Fault> {
        let slot = self.slot(true, i)?;
        View::new(self.range(slot)?, slot)
    }

    /// Whether any output shares memory with this view.
    fn written(&self, view: &View) -> Result<bool, Fault> {
        for i in 0..self.op.outputs.len() {
            if overlap(&self.output(i)?.extent(), &view.extent()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// An input as contiguous floats that no output shares: its own memory where it is that already, else a copy.
    fn floats(&self, i: usize) -> Result<Floats, Fault> {
        let view = self.input(i)?;
        match view.as_floats() {
            Some(ptr) if !self.written(&view)? => Ok(Floats::Memory(ptr, view.numel)),
            _ => {
                let mut copy = Scratch::take(view.numel);
                view.load(0, &mut copy);
                Ok(Floats::Copy(copy))
            }
        }
    }
}

/// Contiguous floats of an operand.
enum Floats {
    /// In the launch's memory, which is not written meanwhile.
    Memory(*const f32, usize),
    /// Converted or gathered.
    Copy(Scratch),
}

impl std::ops::Deref for Floats {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match self {
            // SAFETY: `Operands::floats` checked that the launch does not write it, and the launch's caller promised that
            // nobody else does.
            Self::Memory(ptr, n) => unsafe { std::slice::from_raw_parts(*ptr, *n) },
            Self::Copy(copy) => copy,
        }
    }
}

/// What must hold about a number of elements.
fn same(what: &'static str, needed: usize, found: usize) -> Result<(), Fault> {
    if needed == found {
        Ok(())
    } else {
        Err(Fault::Size {
            what,
            needed,
            found,
        })
    }
}

/// Dimensions of an operand of known rank.
fn dims<const N: usize>(slot: &Slot) -> Result<[usize; N], Fault> {
    let sizes: SmallVec<[usize; 4]> = slot.shape.iter().map(|&n| n as usize).collect();
    <[usize; N]>::try_from(&sizes[..])
        .map_err(|_| Fault::Shape(format!("{:?} instead of {N} dimensions", slot.shape)))
}
