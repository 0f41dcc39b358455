//! GEMMs: measured rows, or else a roofline with tile and wave quantization whose efficiency is
//! interpolated between the nearest measured rows.

use super::Price;
use crate::hardware::{GemmRow, GemmTable, MemoryClass, Profile};
use shardlab_plan::ir::{BodyOp, DType, Float8Gemm, GemmKind, OpKind, ScaleMode, Slot};
use shardlab_plan::units::Bytes;

/// Output tiles of a kernel (rows, columns) and its efficiency relative to the best one, from large
/// to small. The largest three are those that cuBLAS picks on Hopper; relative rates follow operand
/// traffic per multiply-add.
const TILES: [(u64, u64, f64); 4] = [
    (128, 256, 1.0),
    (128, 128, 0.85),
    (64, 128, 0.65),
    (64, 64, 0.45),
];

/// The same for float32 on GPUs, without tensor cores. In steps of Falcon 7B on two H200, 71
/// matmuls of 2048 x 64 x 2048 reach 40 TFLOP/s, and those of 2048 x 2048 x 64 reach 34 TFLOP/s,
/// with tiles of 64 x 64 and 128 x 128 (torch 2.11, `sm80_xmma_gemm_f32f32_f32f32_f32`).
const FLOAT32_TILES: [(u64, u64, f64); 2] = [(128, 128, 1.0), (64, 64, 0.79)];

/// Elements of the inner dimension whose time a tile takes to start and end.
const START: f64 = 64.0;
/// The same for float32 without tensor cores.
const FLOAT32_START: f64 = 24.0;

/// Distance in powers of two (summed over m, n, k) within which a row counts as a measurement of
/// its neighbors.
const NEAR: f64 = 2.0;

/// Share of the wave quantization loss that a GEMM actually pays. With each row left out of its
/// table in turn, a tenth predicts the left-out rows of three profiles best
/// (benchmarks/exec-h200.md).
const PAID: f64 = 0.1;

/// Maximum number of rows that an interpolation considers.
const NEIGHBOURS: usize = 8;

/// Returns the number of large tiles of a result.
pub(super) fn tiles(m: u64, n: u64) -> u64 {
    m.div_ceil(128) * n.div_ceil(128)
}

/// Returns the time according to the formula, in microseconds, at full efficiency of the largest
/// tile. Elements of the result have `result` bytes.
fn formula(profile: &Profile, dtype: DType, result: f64, [m, n, k]: [u64; 3], batch: u64) -> f64 {
    let sms = u64::from(profile.device.sms);
    let per_sm = profile.peak_flops(dtype) / sms as f64;
    let mut best = f64::INFINITY;
    let tiles = &profile.efficiency.gemm_tiles[..];
    let is_gpu = profile.device.shared_cores.is_none();
    let (usual, start) = match dtype {
        DType::F32 if is_gpu => (&FLOAT32_TILES[..], FLOAT32_START),
        _ => (&TILES[..], START),
    };
    for &(tm, tn, efficiency) in if tiles.is_empty() { usual } else { tiles } {
        let tiles = m.div_ceil(tm) * n.div_ceil(tn) * batch;
        // A long inner dimension is split over idle SMs, which costs a reduction.
        for split in [1, 2, 4, 8, 16] {
            if split > 1 && (k / split < 256 || tiles * split > 2 * sms) {
                break;
            }
            // Within a wave, tiles finish at different times and the remainder is split, so only a
            // tenth of the quantization loss is paid.
            let needed = ((tiles * split) as f64 / sms as f64).max(1.0);
            let waves = needed + PAID * (needed.ceil() - needed);
            let inner = k.div_ceil(split) as f64 + start;
            let us = waves * 2.0 * (tm * tn) as f64 * inner / (per_sm * efficiency) * 1e6;
            best = best.min(us * if split > 1 { 1.1 } else { 1.0 });
        }
    }
    let factors = ((m * k + k * n) * dtype.size()) as f64;
    let bytes = (factors + (m * n) as f64 * result) * batch as f64;
    best.max(bytes / profile.device.memory_gbps / 1e3)
}

/// Returns the rows of a kind.
fn rows(tables: &[GemmTable], kind: GemmKind) -> impl Iterator<Item = &GemmRow> {
    tables
        .iter()
        .filter(move |t| t.kind() == kind)
        .flat_map(|t| &t.rows)
}

/// Returns the kind whose rows price a GEMM. This is its own kind or, if that has no rows, an 8-bit
/// kind with one scale per factor: preferably one with the same accumulation.
fn priced_by(tables: &[GemmTable], kind: GemmKind) -> GemmKind {
    let Some(float8) = kind.float8 else {
        return kind;
    };
    let whole = Float8Gemm {
        scaling: ScaleMode::Tensorwise,
        ..float8
    };
    let as_float8 = |of| GemmKind {
        float8: Some(of),
        ..kind
    };
    let mut all = [float8, whole].into_iter().map(as_float8);
    let found = all.find(|&kind| rows(tables, kind).next().is_some());
    found.unwrap_or_else(|| as_float8(Float8Gemm::FASTEST))
}

/// Returns the slowdown of 8-bit GEMMs with float32 accumulation relative to those without.
fn accumulation(kind: GemmKind, by: GemmKind, profile: &Profile) -> f64 {
    let fast = |kind: GemmKind| kind.float8.is_none_or(|of| of.fast_accum);
    match (fast(kind), fast(by)) {
        (false, true) => profile.efficiency.float8_full_accumulation.unwrap_or(1.0),
        _ => 1.0,
    }
}

/// Prices a GEMM from `tables`, whose rows do not depend on the type of the result. Elements of the
/// result have `result` bytes, and `relative` scales the default efficiency.
pub(super) fn price(
    tables: &[GemmTable],
    profile: &Profile,
    kind: impl Into<GemmKind>,
    result: f64,
    shape: [u64; 3],
    batch: u64,
    relative: f64,
) -> Price {
    let kind = kind.into();
    let by = priced_by(tables, kind);
    let price = price_by(tables, profile, by, result, shape, batch, relative);
    Price {
        us: price.us * accumulation(kind, by, profile),
        measured: price.measured && by == kind,
    }
}

/// Prices a GEMM by the rows of a kind.
fn price_by(
    tables: &[GemmTable],
    profile: &Profile,
    kind: GemmKind,
    result: f64,
    shape: [u64; 3],
    batch: u64,
    relative: f64,
) -> Price {
    let (rows, dtype) = (|| rows(tables, kind), kind.dtype);
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
    // Weights decrease with the square of the distance. The default counts like a row at distance
    // 3, so that a single distant row has little weight.
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

/// Number of 16-bit elements in a 16-byte load.
const ALIGNED: u64 = 8;

/// Returns the slowdown of a kernel's GEMMs because rows of their operands do not start at
/// multiples of 16 bytes. The factor is 1 if all rows do, for other element types, and if the
/// profile does not contain it. (float32 loses nothing: measured with
/// `scenarios/hardware/measure/alignment.py`.)
pub(super) fn misaligned(body: &[BodyOp], profile: &Profile) -> f64 {
    let Some(factors) = profile.efficiency.gemm_misaligned else {
        return 1.0;
    };
    let aligned = ALIGNED.trailing_zeros();
    let factor = body.iter().map(|op| {
        let of = |slots: &[Slot]| slots.iter().map(row_zeros).min().unwrap_or(u64::BITS);
        let (operands, result) = (of(op.inputs.get(..2).unwrap_or_default()), of(&op.outputs));
        let odd = match op.op {
            OpKind::Gemm { .. } if operands >= aligned => factors.odd_result,
            OpKind::Gemm { .. } => None,
            OpKind::BatchedGemm => factors.batched,
            _ => return 1.0,
        };
        match operands.min(result) {
            0 => odd.unwrap_or(factors.odd),
            zeros if zeros < aligned => factors.even,
            _ => 1.0,
        }
    });
    factor.fold(1.0, f64::max)
}

/// Returns the number of factors 2 in the distance between rows of a 16-bit matrix, in elements.
fn row_zeros(slot: &Slot) -> u32 {
    if slot.dtype.size() != 2 {
        return u64::BITS;
    }
    let apart = slot.strides.iter().filter(|&&stride| stride > 1);
    let strided = apart.map(|stride| stride.trailing_zeros()).min();
    let dense = || slot.shape.last().map(|row| row.trailing_zeros());
    strided.or_else(dense).unwrap_or(u64::BITS)
}

/// Returns whether a table has a row for exactly this GEMM, which then needs no correction.
pub(super) fn is_measured(tables: &[GemmTable], kind: GemmKind, [m, n, k]: [u64; 3]) -> bool {
    rows(tables, kind).any(|r| [r.0, r.1, r.2] == [m, n, k])
}

/// Time that our fused GEMM takes in addition to the library's GEMM, as a share.
const FUSED_OVERHEAD: f64 = 0.017;

/// Determines how the time of our fused GEMM grows with the other bytes that it moves. The
/// additional time is this factor times the square of the time that a copy of these bytes takes,
/// divided by the time of the GEMM (benchmarks/training.md, "Fused matmuls").
const OVERLAP: f64 = 2.4;

/// Returns the time in microseconds for the bytes that a kernel with a fused epilogue moves in
/// addition to those of its GEMMs, if the kernel does nothing else.
pub(super) fn beside(profile: &Profile, bytes: u64) -> f64 {
    let rate = profile.efficiency.memory[&MemoryClass::Fused] * profile.device.memory_gbps;
    bytes as f64 / rate / 1e3
}

/// Returns the time of our fused GEMM together with other bytes whose copy takes `more`. Both
/// arguments and the result have the same unit. The result is at most the sum of both.
pub(super) fn overlapped(gemm: f64, more: f64) -> f64 {
    gemm * (1.0 + FUSED_OVERHEAD) + more.min(OVERLAP * more * more / gemm)
}

/// Prices GEMMs with a fused elementwise epilogue that move `moved` bytes in total. The price is at
/// most that of the GEMMs and the epilogue, one after the other. Several GEMMs of one factor have
/// the same shape, and their columns are adjacent.
pub(super) fn with_epilogue(
    profile: &Profile,
    dtype: DType,
    [m, n, k]: [u64; 3],
    gemms: u64,
    moved: Bytes,
) -> Price {
    let size = dtype.size();
    let operands = (m * k + k * n + m * n) * size;
    let each = [m, n / gemms.max(1), k];
    let one = price(&profile.gemm, profile, dtype, size as f64, each, 1, 1.0).us;
    let more = beside(profile, moved.0.saturating_sub(operands));
    Price {
        us: overlapped(one * gemms as f64, more),
        measured: false,
    }
}

#[cfg(test)]
mod tests {
    use super::{FUSED_OVERHEAD, misaligned, overlapped, price, with_epilogue};
    use crate::hardware::{self, GemmRow, GemmTable, MemoryClass, Profile};
    use shardlab_plan::ir::{DType, Float8Gemm, GemmKind, ScaleMode};
    use shardlab_plan::units::Bytes;
    use std::collections::BTreeMap;

    /// Returns the number of bf16 GEMMs of at least 50 us and the mean relative error if each is
    /// priced by all other rows of its profile.
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
                    scaling: None,
                    fast_accum: None,
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

    /// The error that the documents state for GEMMs that no table has. With half of the
    /// quantization loss paid, as before, the first was off by 5.4 %.
    #[test]
    fn a_gemm_that_was_left_out_is_priced_by_the_others() {
        for name in ["h200-nvlink-exec", "h200-nvlink", "h100-80-exec"] {
            let profile = hardware::load(name).unwrap();
            let (rows, mean) = left_out(&profile);
            println!(
                "{name}: {rows} gemms, off by {:.2} % on average",
                100.0 * mean
            );
            assert!(rows > 100 && mean < 0.0485, "{name}: {mean}");
        }
    }

    /// An 8-bit GEMM is priced by the table of its recipe and accumulation; without one, by the
    /// table of tensorwise scales with the same accumulation; without that, by the fastest table
    /// and the factor of float32 accumulation.
    #[test]
    fn eight_bits_are_priced_by_the_nearest_recipe() {
        let mut profile = hardware::load("h100-80").unwrap();
        let slower = profile.efficiency.float8_full_accumulation.unwrap();
        let kind = |scaling, fast_accum| GemmKind {
            dtype: DType::F8E4m3,
            float8: Some(Float8Gemm {
                scaling,
                fast_accum,
            }),
        };
        let [whole, row, block] = [
            ScaleMode::Tensorwise,
            ScaleMode::Rowwise,
            ScaleMode::Blockwise,
        ];
        let shape = [8192, 4096, 4096];
        let of = |profile: &Profile, scaling, fast| {
            let kind = kind(scaling, fast);
            let p = price(&profile.gemm, profile, kind, 2.0, shape, 1, 1.0);
            (p.us, p.measured)
        };
        let (us, measured) = of(&profile, whole, true);
        assert!(!measured);
        assert_eq!(of(&profile, row, true), (us, false));
        assert_eq!(of(&profile, block, false), (us * slower, false));
        let table = |scaling, fast, us| GemmTable {
            source: "test".to_owned(),
            dtype: DType::F8E4m3,
            scaling: Some(scaling),
            fast_accum: Some(fast),
            rows: vec![GemmRow(8192, 4096, 4096, us)],
        };
        profile.gemm.push(table(whole, true, 200.0));
        assert_eq!(of(&profile, whole, true), (200.0, true));
        assert_eq!(of(&profile, row, true), (200.0, false));
        assert_eq!(of(&profile, row, false), (200.0 * slower, false));
        profile.gemm.push(table(whole, false, 230.0));
        profile.gemm.push(table(row, true, 210.0));
        assert_eq!(of(&profile, whole, false), (230.0, true));
        assert_eq!(of(&profile, block, false), (230.0, false));
        assert_eq!(of(&profile, row, true), (210.0, true));
        assert_eq!(of(&profile, row, false), (230.0, false));
        // 16-bit GEMMs are not affected.
        let bf16 = |p: &Profile| price(&p.gemm, p, DType::Bf16, 2.0, shape, 1, 1.0).us;
        assert_eq!(bf16(&profile), bf16(&hardware::load("h100-80").unwrap()));
    }

    /// Every GEMM of a linear layer has its in features or out features as row lengths, and never
    /// the number of tokens.
    #[test]
    fn odd_features_cost_what_was_measured_and_odd_tokens_nothing() {
        let worst = |profile: &str, set: &str| {
            let sets = [set.to_owned(), "mesh.dp_shard=1".to_owned()];
            let scenario = shardlab_plan::scenario::load("peers-tiny".as_ref(), &sets).unwrap();
            let program = shardlab_plan::plan(&scenario).unwrap();
            let profile = hardware::load(profile).unwrap();
            let factors = program
                .kernels
                .iter()
                .map(|k| misaligned(&k.body, &profile));
            factors.fold(1.0, f64::max)
        };
        assert_eq!(worst("h200-nvlink", "train.seq_len=1001"), 1.0);
        // The forward matmul of the head: only its result has an odd vocabulary as row length.
        assert_eq!(worst("h200-nvlink", "model.vocab=32001"), 6.85);
        assert_eq!(worst("h200-nvlink", "model.vocab=32002"), 2.5);
        assert_eq!(worst("h200-nvlink", "model.vocab=32008"), 1.0);
        // Nothing is known about an A100, and a CPU has no such loads.
        assert_eq!(worst("a100-80", "model.vocab=32001"), 1.0);
    }

    /// Gates of the 1b, 3b and 8b models, 8,192 tokens: microseconds of the GEMMs alone, of a copy
    /// of the other bytes, and of the fused kernel (2026-11-25). Forward was measured in bursts on
    /// one H200, with the GEMMs in the same call. Backward was measured there in another call, with
    /// the GEMMs' time corrected by that of the forward kernels, and within steps on two H100, in
    /// one call.
    #[test]
    fn fused_gemms_take_the_measured_time() {
        for (name, gemm, copy, us) in [
            ("1b, forward", 2.0 * 339.2, 31.8, 694.3),
            ("3b, forward", 2.0 * 504.2, 31.8, 1049.1),
            ("8b, forward", 2.0 * 1174.7, 55.6, 2402.6),
            ("1b, backward", 345.0, 95.4, 427.1),
            ("3b, backward", 513.7, 95.4, 573.7),
            ("1b, forward, in steps", 706.8, 45.0, 723.0),
            ("1b, backward, in steps", 404.0, 135.1, 496.3),
        ] {
            let error = overlapped(gemm, copy) / us - 1.0;
            println!("{name}: {:+.1} %", 100.0 * error);
            assert!(error.abs() < 0.05, "{name}: {error}");
        }
    }

    /// Little arithmetic hides nothing, so both times add up. Each of two GEMMs with a common
    /// factor takes the same time as alone.
    #[test]
    fn fused_gemms_cost_no_more_than_both_kernels() {
        let profile = hardware::load("h200-nvlink-exec").unwrap();
        let rate = profile.efficiency.memory[&MemoryClass::Fused] * profile.device.memory_gbps;
        for (k, gemms) in [(64, 1), (64, 2), (4096, 1), (4096, 2)] {
            let (m, n) = (8192, 4096);
            let columns = n * gemms;
            let own = 2 * (m * k + k * columns + m * columns);
            let more = 3 * 2 * m * n;
            let shape = [m, columns, k];
            let both = with_epilogue(&profile, DType::Bf16, shape, gemms, Bytes(own + more)).us;
            let one = price(&profile.gemm, &profile, DType::Bf16, 2.0, [m, n, k], 1, 1.0).us;
            let alone = one * gemms as f64 * (1.0 + FUSED_OVERHEAD);
            let apart = alone + more as f64 / rate / 1e3;
            assert!(
                alone < both && both < apart + 1e-6,
                "{k}: {both} of {apart}"
            );
            assert_eq!(k == 64, both > apart - 1e-6, "{k}: {both} of {apart}");
        }
    }
}
