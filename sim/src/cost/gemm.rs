//! Matrix products: measured rows, else a roofline with tile and wave quantisation whose efficiency is interpolated
//! between the nearest measured rows.

use super::Price;
use crate::hardware::{GemmRow, GemmTable, Profile};
use shardlab_plan::units::DType;

/// Output tiles of a kernel (rows, columns) and its efficiency relative to the best one, from large to small. The
/// largest three are those that cuBLAS picks on Hopper; relative rates follow operand traffic per multiply-add.
const TILES: [(u64, u64, f64); 4] = [
    (128, 256, 1.0),
    (128, 128, 0.85),
    (64, 128, 0.65),
    (64, 64, 0.45),
];

/// Distance in powers of two (summed over m, n, k) within which a row counts as a measurement of its neighbour.
const NEAR: f64 = 2.0;

/// Rows that an interpolation takes into account.
const NEIGHBOURS: usize = 8;

/// Number of large tiles of a result.
pub(super) fn tiles(m: u64, n: u64) -> u64 {
    m.div_ceil(128) * n.div_ceil(128)
}

/// Time by formula, microseconds, at full efficiency of the largest tile; elements of the result take `result` bytes.
fn formula(profile: &Profile, dtype: DType, result: f64, [m, n, k]: [u64; 3], batch: u64) -> f64 {
    let sms = u64::from(profile.device.sms);
    let per_sm = profile.peak_flops(dtype) / sms as f64;
    let mut best = f64::INFINITY;
    let tiles = &profile.efficiency.gemm_tiles[..];
    for &(tm, tn, efficiency) in if tiles.is_empty() { &TILES } else { tiles } {
        let tiles = m.div_ceil(tm) * n.div_ceil(tn) * batch;
        // A long inner dimension is split over idle SMs, at the price of a reduction.
        for split in [1, 2, 4, 8, 16] {
            if split > 1 && (k / split < 256 || tiles * split > 2 * sms) {
                break;
            }
            // Within a wave tiles finish at different times, so waves overlap: half of the quantisation is paid.
            let waves = (tiles * split) as f64 / sms as f64;
            let waves = waves.max(1.0).midpoint(waves.ceil());
            let inner = k.div_ceil(split) as f64 + 64.0;
            let us = waves * 2.0 * (tm * tn) as f64 * inner / (per_sm * efficiency) * 1e6;
            best = best.min(us * if split > 1 { 1.1 } else { 1.0 });
        }
    }
    let factors = ((m * k + k * n) * dtype.size()) as f64;
    let bytes = (factors + (m * n) as f64 * result) * batch as f64;
    best.max(bytes / profile.device.memory_gbps / 1e3)
}

/// Price of a matrix product from `tables`, whose rows say nothing about the type of the result; elements of it take `result`
/// bytes, and `relative` scales the default efficiency.
pub(super) fn price(
    tables: &[GemmTable],
    profile: &Profile,
    dtype: DType,
    result: f64,
    shape: [u64; 3],
    batch: u64,
    relative: f64,
) -> Price {
    let rows = || {
        tables
            .iter()
            .filter(|t| t.dtype == dtype)
            .flat_map(|t| &t.rows)
    };
    if let Some(row) = rows().find(|r| batch == 1 && [r.0, r.1, r.2] == shape) {
        return Price {
            us: row.3,
            measured: true,
        };
    }
    let logs = shape.map(|x| (x as f64).log2());
    let mut near: [(f64, Option<&GemmRow>); NEIGHBOURS] = [(f64::INFINITY, None); NEIGHBOURS];
    for row in rows() {
        let at = [row.0, row.1, row.2].map(|x| (x as f64).log2());
        let distance: f64 = at.iter().zip(&logs).map(|(a, b)| (a - b).abs()).sum();
        let place = near.partition_point(|n| n.0 <= distance);
        if place < NEIGHBOURS {
            near[place..].rotate_right(1);
            near[place] = (distance, Some(row));
        }
    }
    let by_default = profile
        .efficiency
        .gemm
        .get(&dtype)
        .or_else(|| profile.efficiency.gemm.get(&DType::F32));
    let by_default = by_default.copied().unwrap_or(0.5) * relative;
    // Weights fall with the square of the distance; the default counts like a row at distance 3, so that lone far rows
    // say little.
    let (mut weight, mut efficiency) = (1.0 / 9.0, by_default / 9.0);
    for (distance, row) in near.iter().filter_map(|&(d, row)| Some((d, row?))) {
        let w = 1.0 / (distance * distance).max(1e-3);
        weight += w;
        let size = dtype.size() as f64;
        efficiency += w * formula(profile, dtype, size, [row.0, row.1, row.2], 1) / row.3;
    }
    let floor =
        2.0 * shape.iter().product::<u64>() as f64 * batch as f64 / profile.peak_flops(dtype) * 1e6;
    let us = formula(profile, dtype, result, shape, batch) / (efficiency / weight);
    let nearest = near[0].0 + (batch as f64).log2();
    Price {
        us: us.max(floor),
        measured: nearest <= NEAR,
    }
}
