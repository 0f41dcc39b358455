//! Memory that kernels of a GPU take beside the program's buffers: a device allocates it once, before the first step.
//!
//! It is part of the plan in that it follows from the program alone, so that a prediction of the whole device's memory needs
//! no device. The sizes are those of the libraries that `exec` uses (cuBLASLt, cuDNN 9.19).

use super::{Kernel, KernelClass, Op, Program};
use crate::units::Bytes;

/// Bytes that a matrix product may take.
pub const PRODUCT: u64 = 32 << 20;
/// Parts of the workspace begin at multiples of this.
pub const ALIGN: u64 = 256;
/// Bytes that a kernel's sums over rows may take which it makes beside what it does in rows.
pub const ROW_SUMS: u64 = 8 << 20;
/// Bytes of the sums that norms and clipping take at least on the compute stream.
const SUMS: u64 = 1 << 20;

/// Workspace of all streams: kernels of one stream share theirs, since they run one after another.
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
    // A word for what kernels find wrong with their inputs, and counters of finished blocks.
    Bytes(all + ALIGN)
}

/// Workspace of one kernel.
#[must_use]
pub fn kernel_bytes(kernel: &Kernel, deterministic: bool) -> u64 {
    match kernel.class {
        KernelClass::Gemm { m, n, k, .. } if m * n * k > 0 => PRODUCT,
        KernelClass::Attention {
            batch,
            heads,
            kv_heads,
            seq,
            head_dim,
            backward: true,
            ..
        } => {
            let rows = batch * heads * seq;
            // The dot products of the output and its gradient.
            let delta = (rows * 4).next_multiple_of(ALIGN);
            let fused = kernel.dtype.size() == 2 && head_dim <= 128 && head_dim % 8 == 0;
            if !fused {
                return delta;
            }
            // The gradient of the queries is added up in float32, tile after tile; in a fixed order only from all of the
            // scores' gradients.
            let queries = if deterministic {
                rows * seq * 2
            } else {
                (rows * head_dim * 4).next_multiple_of(ALIGN)
            };
            // Gradients of keys and values by query head, before those of a group are added up.
            let grouped = if kv_heads == heads {
                0
            } else {
                2 * rows * head_dim * 2
            };
            delta + queries + grouped
        }
        _ if kernel.body.len() > 1 && kernel.body.iter().any(|op| op.op.sums_rows()) => ROW_SUMS,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{DType, Flops};

    fn backward(batch: u64, heads: u64, seq: u64, head_dim: u64, dtype: DType) -> Kernel {
        Kernel {
            name: "attention_grad".to_owned(),
            class: KernelClass::Attention {
                batch,
                heads,
                kv_heads: 8,
                seq,
                head_dim,
                causal: true,
                backward: true,
            },
            flops: Flops(0),
            read: Bytes(0),
            written: Bytes(0),
            dtype,
            body: Vec::new(),
        }
    }

    /// What cuDNN 9.19 asked for on an H200, in tenths of MiB.
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
        // Our own kernel keeps the dot products alone.
        let own = backward(1, 4, 256, 64, DType::F32);
        assert_eq!(kernel_bytes(&own, true), 4 * 256 * 4);
    }
}
