//! Fused attention: measured rows, else the efficiency of the nearest ones.

use super::Price;
use crate::hardware::Profile;
use shardlab_plan::ir::{Kernel, KernelClass};
use shardlab_plan::units::Bytes;

/// Distance in powers of two within which a row counts as a measurement of its neighbour.
const NEAR: f64 = 2.0;

/// Multiply-add FLOPs of one sample, head and direction: two products forward, five backward; half
/// when causal.
fn flops([batch, heads, seq, head_dim]: [u64; 4], causal: bool, backward: bool) -> f64 {
    let products = if backward { 5.0 } else { 2.0 };
    let all = products * 2.0 * (batch * heads) as f64 * (seq as f64).powi(2) * head_dim as f64;
    if causal { all / 2.0 } else { all }
}

pub(super) fn price(kernel: &Kernel, moved: Bytes, profile: &Profile) -> Price {
    let KernelClass::Attention {
        batch,
        heads,
        kv_heads,
        seq,
        head_dim,
        causal,
        backward,
    } = kernel.class
    else {
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
    let tables = profile.attention.iter();
    for table in
        tables.filter(|t| t.dtype == kernel.dtype && t.causal == causal && t.backward == backward)
    {
        for row in &table.rows {
            if (row.0, row.1, row.2, row.3, row.4) == (batch, heads, kv_heads, seq, head_dim) {
                return Price {
                    us: row.5,
                    measured: true,
                };
            }
            let log = |a: u64, b: u64| (a as f64 / b as f64).log2().abs();
            // Batch and heads only multiply the number of independent tiles; sequence and head size
            // change the kernel.
            let distance = 0.5 * log(row.0 * row.1, batch * heads)
                + log(row.3, seq)
                + 2.0 * log(row.4, head_dim);
            let w = 1.0 / (distance * distance).max(1e-3);
            nearest = nearest.min(distance);
            weight += w;
            efficiency +=
                w * flops([row.0, row.1, row.3, row.4], causal, backward) / peak / (row.5 * 1e-6);
        }
    }
    let ideal = flops([batch, heads, seq, head_dim], causal, backward) / peak;
    let moved = moved.0 as f64 / (profile.device.memory_gbps * 1e9);
    Price {
        us: (ideal / (efficiency / weight)).max(moved) * 1e6,
        measured: nearest <= NEAR,
    }
}
