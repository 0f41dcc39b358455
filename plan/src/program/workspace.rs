//! Memory that kernels of a GPU need in addition to the program's buffers. A device allocates it
//! once, before the first step.
//!
//! It is part of the plan because it follows from the program alone, so that predicting the memory
//! of the whole device needs no device. The sizes are those of the libraries that `exec` uses
//! (cuBLASLt, cuDNN 9.19).

use super::{Op, Program};
use crate::ir::{Kernel, KernelClass, NewtonSchulz, OpKind, ShardOp, Slot};
use crate::units::Bytes;

/// Maximum workspace of a GEMM in bytes, and of a convolution in addition to copies of its
/// operands.
pub const GEMM: u64 = 32 << 20;
/// Alignment of the workspace's parts.
pub const ALIGN: u64 = 256;
/// Maximum workspace for the column sums of a row kernel, in bytes.
pub const ROW_SUMS: u64 = 8 << 20;
/// Number of columns of a tile in a grouped matmul with a fused epilogue.
pub const GROUPED_COLUMNS: u64 = 256;
/// Minimum workspace for the sums of norms and clipping on the compute stream, in bytes.
const SUMS: u64 = 1 << 20;

/// Returns the workspace of all streams. Kernels on the same stream share theirs, because they run
/// one after another.
#[must_use]
pub fn of(program: &Program) -> Bytes {
    let mut streams = vec![0; program.streams.len()];
    if let Some(compute) = streams.first_mut() {
        *compute = SUMS;
    }
    for instr in &program.instrs {
        if let Op::Launch { kernel, stream, .. } = instr.op
            && let Some(most) = streams.get_mut(stream.index())
        {
            let needs = kernel_bytes(&program.kernels[kernel.index()], program.meta.deterministic);
            *most = needs.max(*most);
        }
    }
    let all = streams
        .iter()
        .map(|b| b.next_multiple_of(ALIGN))
        .sum::<u64>();
    // A word for errors that kernels find in their inputs, and counters of finished blocks.
    Bytes(all + ALIGN)
}

/// Number of elements of a matrix whose squares one block sums in Muon's kernel.
pub const MUON_CHUNK: u64 = 8192;

/// Returns the workspace to orthogonalize a matrix with these sides in place: that of Muon without
/// one of its whole matrices.
#[must_use]
pub fn orthogonalize(sides: [u64; 2]) -> u64 {
    let [in_place, ..] = NewtonSchulz::matrices(sides);
    muon(sides) - in_place.next_multiple_of(ALIGN)
}

/// Returns the workspace of Muon for a matrix with these sides: that of its matmuls, the matrices
/// of an iteration, one sum of squares per block in float64, and their total.
#[must_use]
pub fn muon(sides: [u64; 2]) -> u64 {
    let matrices = NewtonSchulz::matrices(sides);
    let sums = 8 * (sides[0] * sides[1]).div_ceil(MUON_CHUNK);
    let parts = matrices.into_iter().chain([sums, 4]);
    GEMM + parts.map(|b| b.next_multiple_of(ALIGN)).sum::<u64>()
}

/// Returns the workspace of one kernel.
#[must_use]
pub fn kernel_bytes(kernel: &Kernel, deterministic: bool) -> u64 {
    match kernel.class {
        KernelClass::Gemm { m, n, k, .. } if m * n * k > 0 => GEMM,
        // Tensor cores need channels last, so cuDNN's kernels for 16-bit types work on copies of
        // images, weights and results in that order.
        KernelClass::Conv { .. } if kernel.dtype.size() == 2 => {
            let bytes = |slot: &Slot| slot.shape.iter().product::<u64>() * 2;
            let operands = kernel
                .body
                .iter()
                .flat_map(|op| op.inputs.iter().chain(&op.outputs));
            // One more copy for gradients of weights, which are converted from such a copy.
            let gradients = kernel
                .body
                .iter()
                .filter(|op| {
                    matches!(
                        op.op,
                        OpKind::ConvGradWeight(_)
                            | OpKind::Conv1dGradWeight(_)
                            | OpKind::Conv2dGradWeight(_)
                    )
                })
                .flat_map(|op| &op.outputs);
            let copies = operands.chain(gradients).map(bytes);
            GEMM + copies.map(|b| b.next_multiple_of(ALIGN)).sum::<u64>()
        }
        KernelClass::Conv { .. } => GEMM,
        KernelClass::Attention {
            shape,
            backward: true,
        } => {
            let (rows, head_dim) = (shape.rows(), shape.head_dim);
            // One dot product per row, of the output and its gradient.
            let delta = (rows * 4).next_multiple_of(ALIGN);
            let library = !matches!(
                kernel.body.first().map(|op| op.op),
                Some(
                    OpKind::FlexAttentionGrad(_)
                        | OpKind::SinkAttentionGrad(_)
                        | OpKind::DocumentAttentionGrad(_)
                )
            );
            let fused = library && kernel.dtype.size() == 2 && head_dim <= 128 && head_dim % 8 == 0;
            if !fused {
                return delta;
            }
            // The gradient of the queries is accumulated in float32, tile by tile. In a fixed
            // order, it is computed only from all gradients of the scores.
            let queries = if deterministic {
                rows * shape.seen() * 2
            } else {
                (rows * head_dim * 4).next_multiple_of(ALIGN)
            };
            // Gradients of keys and values per query head, before those of a group are summed.
            let grouped = if shape.kv_heads == shape.heads {
                0
            } else {
                2 * shape.batch * shape.heads * shape.seen() * head_dim * 2
            };
            delta + queries + grouped
        }
        KernelClass::GroupedGemm { n, .. } => {
            // For each dot product of rows, the sum over the columns of a tile.
            let dots = kernel.body.iter().filter(|op| op.op == OpKind::RowDot);
            let rows = |slot: &Slot| slot.shape.iter().product::<u64>();
            let rows = dots.flat_map(|op| &op.outputs).map(rows);
            rows.sum::<u64>() * n.div_ceil(GROUPED_COLUMNS) * 4
        }
        KernelClass::Optimizer => match kernel.body.first().map(|op| op.op) {
            Some(OpKind::Shard(ShardOp::Orthogonalize { matrix })) => {
                orthogonalize(matrix.short_and_long())
            }
            _ => kernel.newton_schulz().map_or(0, |of| muon(of.largest)),
        },
        _ if kernel.body.len() > 1 && kernel.body.iter().any(|op| op.op.sums_rows()) => ROW_SUMS,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{AttentionShape, DType};
    use crate::units::Flops;

    fn backward(batch: u64, heads: u64, seq: u64, head_dim: u64, dtype: DType) -> Kernel {
        Kernel {
            name: "attention_grad".to_owned(),
            class: KernelClass::Attention {
                shape: AttentionShape::new([batch, heads, 8, seq, head_dim], true),
                backward: true,
            },
            flops: Flops(0),
            read: Bytes(0),
            written: Bytes(0),
            dtype,
            body: Vec::new(),
            used_rows: None,
        }
    }

    /// Workspace that cuDNN 9.19 requested on an H200, in tenths of MiB.
    #[test]
    fn attention_takes_what_the_library_asked_for() {
        for (kernel, any_order, fixed_order) in [
            (backward(2, 32, 4096, 64, DType::Bf16), 1290, 21130),
            (backward(2, 24, 4096, 128, DType::Bf16), 1928, 16328),
            (backward(1, 32, 8192, 128, DType::Bf16), 2570, 42250),
        ] {
            let tenths = |deterministic| {
                let mib = kernel_bytes(&kernel, deterministic) as f64 / f64::from(1 << 20);
                (mib * 10.0).round() as u64
            };
            assert_eq!((tenths(false), tenths(true)), (any_order, fixed_order));
        }
        // Our own kernel needs only the dot products.
        let own = backward(1, 4, 256, 64, DType::F32);
        assert_eq!(kernel_bytes(&own, true), 4 * 256 * 4);
    }

    /// cuDNN 9.19 requested 65.125 MiB on an H200 for 16 images of 256 channels of 64 x 64 and the
    /// same number of channels of 3 x 3 weights, for each of the three results: one copy of each.
    #[test]
    fn convolutions_have_room_for_copies_in_the_order_of_tensor_cores() {
        let scenario = |compute| {
            let text = format!(
                "[model]\nfamily = \"cnn\"\nlayers = 2\nchannels = 256\nheight = 64\nwidth = 64\n[train]\nmicro_batch = 16\n\
                 [mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 2\n[precision]\ncompute = \"{compute}\"\n"
            );
            crate::plan(&crate::scenario::parse("test", &text, &[]).unwrap()).unwrap()
        };
        let beside = |program: &Program| {
            let all = program.kernels.iter();
            let convolutions = all.filter(|k| matches!(k.class, KernelClass::Conv { .. }));
            let all: std::collections::BTreeSet<u64> = convolutions
                .map(|k| kernel_bytes(k, false) - GEMM)
                .collect();
            all.into_iter().collect::<Vec<_>>()
        };
        let (image, weights) = (16 * 256 * 64 * 64 * 2, 256 * 256 * 9 * 2);
        let copies = 2 * image + weights;
        assert_eq!(copies, 65 * (1 << 20) + (1 << 17));
        // The gradients of weights need one more copy, which is converted.
        assert_eq!(beside(&scenario("bf16")), [copies, copies + weights]);
        assert_eq!(beside(&scenario("f32")), [0]);
    }
}
