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

/// Share of the time lost to whole waves of tiles that a product takes. Leaving out one row of a table at a time, a tenth predicts
/// the others of three profiles best (BENCHMARKS.md).
const PAID: f64 = 0.1;

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
            // Within a wave tiles finish at different times, and what is left is split: a tenth of the quantisation is paid.
            let needed = ((tiles * split) as f64 / sms as f64).max(1.0);
            let waves = needed + PAID * (needed.ceil() - needed);
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

#[cfg(test)]
mod tests {
    use super::price;
    use crate::hardware::{self, GemmTable, Profile};
    use shardlab_plan::units::DType;
    use std::collections::BTreeMap;

    /// Mean relative error of every product of at least 50 us in bf16, priced by all the others of its profile.
    fn left_out(profile: &Profile) -> (usize, f64) {
        let tables = profile.gemm.iter().filter(|t| t.dtype == DType::Bf16);
        let mut rows = BTreeMap::new();
        for r in tables.flat_map(|t| &t.rows) {
            rows.entry([r.0, r.1, r.2]).or_insert(*r);
        }
        let errors = rows
            .iter()
            .filter(|(_, r)| r.3 >= 50.0)
            .map(|(shape, row)| {
                let others = rows.iter().filter(|(s, _)| *s != shape);
                let table = GemmTable {
                    source: "all but one".to_owned(),
                    dtype: DType::Bf16,
                    rows: others.map(|(_, r)| *r).collect(),
                };
                let us = price(&[table], profile, DType::Bf16, 2.0, *shape, 1, 1.0).us;
                (us / row.3 - 1.0).abs()
            });
        let errors: Vec<f64> = errors.collect();
        (
            errors.len(),
            errors.iter().sum::<f64>() / errors.len() as f64,
        )
    }

    /// What is said of products that no table has. With half of the quantisation paid, as before, the first was off by 5.4 %.
    #[test]
    fn a_product_that_was_left_out_is_priced_by_the_others() {
        for name in ["h200-nvlink-exec", "h200-nvlink", "h100-80-exec"] {
            let profile = hardware::load(name).unwrap();
            let (rows, mean) = left_out(&profile);
            println!(
                "{name}: {rows} products, off by {:.2} % on average",
                100.0 * mean
            );
            assert!(rows > 100 && mean < 0.0485, "{name}: {mean}");
        }
    }
}
