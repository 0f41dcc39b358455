//! GEMMs and attention on a grid of sizes, each in isolation.

use super::{single, typical};
use crate::base::operand::{LaunchContext, RawRange};
use crate::device::NO_HYPER;
use crate::kernels;
use shardlab_plan::ir::{AttentionShape, DType, GemmKind, KernelClass, OpKind, Real, op};
use std::time::{Duration, Instant};

/// Element types that models compute in.
pub(super) const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Edge lengths of matrices.
const EDGES: [u64; 7] = [16, 32, 64, 128, 256, 512, 1024];

/// Sizes, and microseconds.
type AttentionRow = (AttentionShape, f64);

/// Times of one kind of attention kernel.
#[derive(Clone, Debug)]
pub(super) struct AttentionRows {
    pub(super) dtype: DType,
    pub(super) causal: bool,
    pub(super) backward: bool,
    pub(super) rows: Vec<AttentionRow>,
}

/// Memory of an operand, which is aligned and contains valid values.
struct Operand {
    words: Vec<u64>,
    bytes: usize,
    dtype: DType,
}

impl Operand {
    fn new(elements: u64, dtype: DType) -> Self {
        let bytes = (elements * dtype.size()) as usize;
        let mut words = vec![0u64; bytes.div_ceil(8)];
        // Between 0.25 and 0.5 in both float types, and not all equal.
        for (i, w) in words.iter_mut().enumerate() {
            let x = 0x3e80 + (i as u64 * 37 % 128);
            *w = match dtype {
                DType::F32 => (x << 16) | (x << 48),
                _ => x | (x << 16) | (x << 32) | (x << 48),
            };
        }
        Self {
            words,
            bytes,
            dtype,
        }
    }

    fn range(&mut self) -> RawRange {
        RawRange {
            ptr: self.words.as_mut_ptr().cast(),
            bytes: self.bytes,
            dtype: self.dtype,
        }
    }
}

/// Returns the median time of an operation in isolation, on operands of given shapes.
fn time(
    op: OpKind,
    class: KernelClass,
    dtype: DType,
    ins: &[(&[u64], DType)],
    outs: &[(&[u64], DType)],
    least: Duration,
) -> f64 {
    let elements = |s: &[u64]| s.iter().product::<u64>();
    let make = |list: &[(&[u64], DType)]| -> Vec<Operand> {
        let operand = |o: &(&[u64], DType)| Operand::new(elements(o.0), o.1);
        list.iter().map(operand).collect()
    };
    let (mut reads, mut writes) = (make(ins), make(outs));
    let kernel = single::kernel(op, class, dtype, ins, outs);
    let context = LaunchContext {
        kernel: &kernel,
        data_rank: 0,
        hyper: NO_HYPER,
        shapes: &[],
        groups: &[],
        scales: &[],
    };
    let reads: Vec<RawRange> = reads.iter_mut().map(Operand::range).collect();
    let writes: Vec<RawRange> = writes.iter_mut().map(Operand::range).collect();
    typical(least, || {
        // SAFETY: every range is its own operand, which lives until after the last call.
        let done = unsafe { kernels::launch(&context, &reads, &writes) };
        assert!(done.is_ok(), "the kernel's own operands fit it: {done:?}");
    })
}

/// Measured grouped GEMMs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupedRows {
    pub(super) kind: GroupedKind,
    /// Sizes and microseconds.
    pub(super) rows: Vec<(GroupedSizes, f64)>,
}

/// Kind of grouped GEMMs that has a separate table: element type and accumulation, and the element
/// type of weight gradients (`None` for rows times matrices).
pub(super) type GroupedKind = (GemmKind, Option<DType>);

/// Sizes of a grouped GEMM: number of experts, rows per expert, and n and k of its matrix.
pub(super) type GroupedSizes = [u64; 4];

/// Kind, and microseconds for each `[m, n, k]`.
pub(super) type GemmTable = (GemmKind, Vec<([u64; 3], f64)>);

/// Measures GEMMs by element type: `[m, n, k]` and the mean over the operand layouts of a training
/// step.
pub(super) fn gemm(budget: Duration) -> Vec<GemmTable> {
    let mut shapes = Vec::new();
    for m in EDGES {
        for n in EDGES {
            for k in EDGES {
                shapes.push([m, n, k]);
            }
        }
    }
    let begin = Instant::now();
    let one = budget / (2 * 3 * shapes.len() as u32);
    DTYPES
        .into_iter()
        .map(|dtype| {
            let mut rows = Vec::new();
            for &[m, n, k] in &shapes {
                // When the time has passed, the remaining large shapes are skipped.
                if begin.elapsed() > budget * 2 && m * n * k > 1 << 24 {
                    continue;
                }
                let us: f64 = [(false, true), (false, false), (true, false)]
                    .into_iter()
                    .map(|(ta, tb)| {
                        let a: [u64; 2] = if ta { [k, m] } else { [m, k] };
                        let b: [u64; 2] = if tb { [n, k] } else { [k, n] };
                        let op = OpKind::Gemm(op::Gemm {
                            ta,
                            tb,
                            bias: false,
                            accumulate: false,
                        });
                        let class = KernelClass::Gemm { m, n, k, batch: 1 };
                        let ins: [(&[u64], DType); 2] = [(&a, dtype), (&b, dtype)];
                        time(op, class, dtype, &ins, &[(&[m, n], dtype)], one)
                    })
                    .sum();
                rows.push(([m, n, k], us / 3.0));
            }
            (GemmKind::of(dtype), rows)
        })
        .collect()
}

/// Measures attention kernels.
pub(super) fn attention(budget: Duration) -> Vec<AttentionRows> {
    let mut shapes: Vec<AttentionShape> = Vec::new();
    for (batch, heads) in [(1, 4), (4, 4), (4, 8)] {
        for seq in [16, 32, 64, 128, 256] {
            for head_dim in [8, 16, 32, 64] {
                let sizes = [batch, heads, heads / 2, seq, head_dim];
                shapes.push(AttentionShape::new(sizes, false));
            }
        }
    }
    let one = budget / (8 * shapes.len() as u32);
    let mut tables = Vec::new();
    for dtype in DTYPES {
        for causal in [true, false] {
            for backward in [false, true] {
                let rows = shapes
                    .iter()
                    .map(|&s| AttentionShape { causal, ..s })
                    .map(|s| (s, attend(s, dtype, backward, one)))
                    .collect();
                tables.push(AttentionRows {
                    dtype,
                    causal,
                    backward,
                    rows,
                });
            }
        }
    }
    tables
}

fn attend(shape: AttentionShape, dtype: DType, backward: bool, least: Duration) -> f64 {
    let (q, kv): (&[u64], &[u64]) = (&shape.queries(), &shape.keys());
    let lse: &[u64] = &[shape.batch, shape.heads, shape.seq];
    let scale = Real(1.0 / (shape.head_dim as f64).sqrt());
    let causal = shape.causal;
    let class = KernelClass::Attention { shape, backward };
    if backward {
        let op = OpKind::AttentionGrad(op::AttentionGrad { causal, scale });
        let state: (&[u64], DType) = (&[1], DType::I64);
        let ins = [
            (q, dtype),
            (q, dtype),
            (kv, dtype),
            (kv, dtype),
            (q, dtype),
            (lse, DType::F32),
            state,
            state,
        ];
        let outs = [(q, dtype), (kv, dtype), (kv, dtype)];
        time(op, class, dtype, &ins, &outs, least)
    } else {
        let op = OpKind::Attention(op::Attention { causal, scale });
        let ins = [(q, dtype), (kv, dtype), (kv, dtype)];
        let outs = [(q, dtype), (lse, DType::F32)];
        time(op, class, dtype, &ins, &outs, least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_run_and_grow_with_their_work() {
        let us = |sizes: [u64; 5], backward| {
            let shape = AttentionShape::new(sizes, true);
            attend(shape, DType::F32, backward, Duration::ZERO)
        };
        assert!(us([1, 4, 2, 128, 32], false) > us([1, 4, 2, 16, 8], false));
        assert!(us([1, 4, 2, 128, 32], true) > us([1, 4, 2, 128, 32], false));
        let class = KernelClass::Gemm {
            m: 8,
            n: 8,
            k: 8,
            batch: 1,
        };
        let op = OpKind::Gemm(op::Gemm {
            ta: true,
            tb: false,
            bias: false,
            accumulate: false,
        });
        let a: (&[u64], DType) = (&[8, 8], DType::Bf16);
        assert!(time(op, class, DType::Bf16, &[a, a], &[a], Duration::ZERO) > 0.0);
    }
}
