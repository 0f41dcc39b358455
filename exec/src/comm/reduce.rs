//! Reductions in rank order with float32 accumulation; see Note [Order of sums].

use crate::base::element::{Element, match_dtype};
use shardlab_plan::ir::{DType, ReduceOp};

/// Number of elements that are accumulated at a time. The accumulator fits in the L1 cache.
const BLOCK: usize = 1024;

/// Reduces `bytes` bytes of every source, in the order of the sources, into every output.
///
/// An average is a sum of inputs that are multiplied by `1 / n` (as in NCCL for floating point), so
/// that average, premultiplied sum, and scaling before a plain sum agree bit for bit in float32.
///
/// # Safety
/// Sources are valid for reads and outputs for writes of `bytes` bytes, aligned to the element. An
/// output may be a source; other overlaps are not allowed. Nothing else writes them meanwhile.
pub(super) unsafe fn reduce(
    dtype: DType,
    op: ReduceOp,
    sources: &[*const u8],
    outputs: &[*mut u8],
    bytes: usize,
) {
    let combine = match op {
        ReduceOp::None | ReduceOp::Sum => Combine::Sum(None),
        ReduceOp::Avg => Combine::Sum(Some(1.0 / sources.len() as f32)),
        ReduceOp::PremulSum(f) => Combine::Sum(Some(f as f32)),
        ReduceOp::Max => Combine::Max,
    };
    let n = bytes / dtype.size() as usize;
    assert!(
        dtype.is_float(),
        "calls that reduce integers are refused before data moves"
    );
    // SAFETY: the caller's contract, element by element.
    unsafe { match_dtype!(dtype, T => run::<T>(combine, sources, outputs, n)) }
}

/// How values of two sources are combined.
#[derive(Clone, Copy)]
enum Combine {
    /// Their sum. Each value is multiplied by the factor first.
    Sum(Option<f32>),
    Max,
}

/// # Safety
/// As [`reduce`], for `n` elements.
unsafe fn run<T: Element>(combine: Combine, sources: &[*const u8], outputs: &[*mut u8], n: usize) {
    let mut acc = [0f32; BLOCK];
    let mut at = 0;
    while at < n {
        let len = BLOCK.min(n - at);
        for (i, source) in sources.iter().enumerate() {
            // SAFETY: `at + len <= n` elements of the source are valid; it is written only after
            // this loop, below.
            let from = unsafe { std::slice::from_raw_parts(source.cast::<T>().add(at), len) };
            let acc = &mut acc[..len];
            match (i, combine) {
                (0, Combine::Sum(None) | Combine::Max) => {
                    acc.iter_mut().zip(from).for_each(|(a, x)| *a = x.widen())
                }
                (0, Combine::Sum(Some(f))) => acc
                    .iter_mut()
                    .zip(from)
                    .for_each(|(a, x)| *a = x.widen() * f),
                (_, Combine::Sum(None)) => {
                    acc.iter_mut().zip(from).for_each(|(a, x)| *a += x.widen())
                }
                (_, Combine::Sum(Some(f))) => acc
                    .iter_mut()
                    .zip(from)
                    .for_each(|(a, x)| *a += x.widen() * f),
                (_, Combine::Max) => acc
                    .iter_mut()
                    .zip(from)
                    .for_each(|(a, x)| *a = a.max(x.widen())),
            }
        }
        for output in outputs {
            // SAFETY: as above, for the output; the slices over the sources no longer exist.
            let to = unsafe { std::slice::from_raw_parts_mut(output.cast::<T>().add(at), len) };
            to.iter_mut().zip(&acc).for_each(|(o, &a)| *o = T::round(a));
        }
        at += len;
    }
}
