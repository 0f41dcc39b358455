//! Fused attention: measured rows, or else the efficiency of the nearest rows.

use super::Price;
use crate::hardware::{AttentionTable, Profile};
use shardlab_plan::ir::{Kernel, KernelClass, OpKind};
use shardlab_plan::units::Bytes;

/// Distance in powers of two within which a row counts as a measurement of its neighbors.
const NEAR: f64 = 2.0;

pub(super) fn price(kernel: &Kernel, moved: Bytes, profile: &Profile) -> Price {
    let KernelClass::Attention { shape, backward } = kernel.class else {
        return Price {
            us: 0.0,
            measured: false,
        };
    };
    let e = &profile.efficiency;
    let by_default = if backward {
        e.attention_backward
    } else {
        e.attention
    };
    let peak = profile.peak_flops(kernel.dtype);
    let (mut weight, mut efficiency) = (1.0 / 9.0, by_default / 9.0);
    let mut nearest = f64::INFINITY;
    let like = shape.unpacked();
    let kind = |t: &AttentionTable| (t.dtype, t.causal, t.backward);
    let same = |t: &&AttentionTable| kind(t) == (kernel.dtype, shape.causal, backward);
    let tables = || profile.attention_tables().filter(same);
    // Kernels that read a mask are slower. Without measurements, they are priced like others.
    let masked = reads_mask(kernel) && tables().any(|t| t.mask);
    for table in tables().filter(|t| t.mask == masked) {
        for row in &table.rows {
            let measured = row.shape(shape.causal);
            if measured == shape {
                return Price {
                    us: row.5,
                    measured: true,
                };
            }
            let log = |a: u64, b: u64| (a as f64 / b as f64).log2().abs();
            // Batch and heads only multiply the number of independent tiles, but sequence and head
            // size change the kernel.
            let distance = 0.5 * log(measured.batch * measured.heads, like.batch * like.heads)
                + log(measured.seq, like.seq)
                + 2.0 * log(measured.head_dim, shape.head_dim);
            let w = 1.0 / (distance * distance).max(1e-3);
            nearest = nearest.min(distance);
            weight += w;
            efficiency += w * measured.flops(backward) as f64 / peak / (row.5 * 1e-6);
        }
    }
    let ideal = shape.flops(backward) as f64 / peak;
    let moved = moved.0 as f64 / (profile.device.memory_gbps * 1e9);
    Price {
        us: (ideal / (efficiency / weight)).max(moved) * 1e6,
        measured: nearest <= NEAR,
    }
}

/// Returns whether a kernel reads a mask of scores.
fn reads_mask(kernel: &Kernel) -> bool {
    let masked = |op| {
        matches!(
            op,
            OpKind::MaskedAttention(_) | OpKind::MaskedAttentionGrad(_)
        )
    };
    kernel.body.iter().any(|op| masked(op.op))
}
