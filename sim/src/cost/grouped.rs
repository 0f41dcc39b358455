//! Grouped GEMMs: one matmul per expert, over the rows that were routed to it.
//!
//! The estimate is the GEMM over all rows, from the tables of GEMMs, plus the rows that fill the
//! last tiles of experts: half a tile per expert on average, if remainders are evenly distributed.
//! The matrices of all experts have to be moved, which is a lower bound for experts with few rows.
//! Measured rows (`[[grouped_gemm]]`) correct the estimate: near their sizes, a price is the
//! estimate times the ratio of their measured times to their estimated times. Each row has an
//! element type and, in 8 bits, a kind of accumulation; a weight gradient also has an element type
//! of the result, because float32 results take 1.5 to 1.75 times as long as bf16 ones on an H200. A
//! price without rows of its own follows the rows for the other accumulation or result. Without a
//! row nearby, the price is marked as modeled.

use super::Price;
use super::gemm;
use crate::hardware::{GroupedGemmRow, GroupedGemmTable, Profile};
use shardlab_plan::ir::{DType, GemmKind};
use shardlab_plan::units::Bytes;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Sizes of one grouped GEMM, as in its cost class.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) rows: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    pub(super) experts: u64,
    /// Element type of a weight gradient; `None` for rows times matrices.
    pub(super) gradient: Option<DType>,
}

impl Shape {
    /// Returns the sizes of a measured row.
    fn of(row: &GroupedGemmRow, gradient: Option<DType>) -> Self {
        let &GroupedGemmRow(experts, each, n, k, _) = row;
        Self {
            rows: experts * each,
            n,
            k,
            experts,
            gradient,
        }
    }

    /// Returns the logarithms of its sizes, with rows per expert.
    fn logs(&self) -> [f64; 4] {
        let each = self.rows as f64 / self.experts.max(1) as f64;
        [self.experts as f64, each, self.n as f64, self.k as f64].map(|x| x.max(1.0).log2())
    }

    /// Returns the bytes of both factors and the result.
    fn bytes(&self, dtype: DType) -> Bytes {
        let matrices = self.experts * self.n * self.k;
        let rows = self.rows * (self.n + self.k);
        Bytes(rows * dtype.size() + matrices * self.gradient.unwrap_or(dtype).size())
    }
}

/// Rows of a tile, and steps over rows of a weight gradient.
const TILE: u64 = 128;
const STEP: u64 = 64;

/// Distance in powers of two (summed over experts, rows per expert, n and k) within which a row
/// counts as a measurement of its neighbors, as for GEMMs.
const NEAR: f64 = 2.0;
/// The estimate has the weight of a row at this distance.
const DEFAULT: f64 = 3.0;

/// Returns the average number of computed rows, including those that fill the last tiles.
fn padded(rows: u64, experts: u64, tile: u64) -> u64 {
    rows + rows.min(experts) * tile / 2
}

/// Returns the estimated time in microseconds, without measured rows.
fn estimate(kind: GemmKind, s: Shape, moved: Bytes, profile: &Profile) -> f64 {
    let size = s.gradient.unwrap_or(kind.dtype).size() as f64;
    // The rate of one GEMM over all rows. For weight gradients, it is the rate of a GEMM with the
    // result of one expert, once per expert.
    let one = if s.gradient.is_some() {
        let rows = padded(s.rows, s.experts, STEP).div_ceil(s.experts).max(1);
        let (shape, batch) = ([s.n, s.k, rows], s.experts);
        gemm::price(&profile.gemm, profile, kind, size, shape, batch, 1.0)
    } else {
        let rows = padded(s.rows, s.experts, TILE);
        let shape = [rows, s.n, s.k];
        gemm::price(&profile.gemm, profile, kind, size, shape, 1, 1.0)
    };
    let bound = moved.0 as f64 / profile.device.memory_gbps / 1e3;
    one.us.max(bound)
}

/// A measured row.
struct Row {
    logs: [f64; 4],
    /// Measured microseconds, and estimated microseconds.
    us: f64,
    estimated: f64,
}

/// What the GEMMs of a table have in common: their kind and the element type of weight gradients.
type Kind = (GemmKind, Option<DType>);

/// Rows by what the GEMMs that they price have in common.
type Estimated = BTreeMap<Kind, Rc<[Row]>>;

/// Prices the grouped GEMMs of a profile. The estimates of its measured rows are computed once for
/// all prices.
pub(super) struct Grouped<'p> {
    profile: &'p Profile,
    rows: RefCell<Estimated>,
}

impl<'p> Grouped<'p> {
    pub(super) fn new(profile: &'p Profile) -> Self {
        Self {
            profile,
            rows: RefCell::default(),
        }
    }

    /// Returns the measured rows of a kind.
    fn rows(&self, (kind, gradient): Kind) -> Rc<[Row]> {
        let profile = self.profile;
        let estimated = || {
            let alike = tables((kind, gradient), profile);
            let rows = alike.flat_map(|t| &t.rows).map(|row| {
                let of = Shape::of(row, gradient);
                Row {
                    logs: of.logs(),
                    us: row.4,
                    estimated: estimate(kind, of, of.bytes(kind.dtype), profile),
                }
            });
            rows.collect()
        };
        let mut rows = self.rows.borrow_mut();
        Rc::clone(rows.entry((kind, gradient)).or_insert_with(estimated))
    }

    /// Prices a grouped GEMM that moves `moved` bytes.
    pub(super) fn price(&self, kind: impl Into<GemmKind>, s: Shape, moved: Bytes) -> Price {
        let (kind, profile) = (kind.into(), self.profile);
        let own = (kind, s.gradient);
        let by = priced_by(own, profile);
        let (mut weight, mut ratio) = (1.0 / (DEFAULT * DEFAULT), 1.0 / (DEFAULT * DEFAULT));
        let mut nearest = f64::INFINITY;
        let logs = s.logs();
        for row in self.rows(by).iter() {
            let apart = row.logs.iter().zip(&logs).map(|(a, b)| (a - b).abs());
            let distance: f64 = apart.sum();
            nearest = nearest.min(distance);
            if distance == 0.0 && by == own {
                return Price {
                    us: row.us,
                    measured: true,
                };
            }
            // Weights decrease with the fourth power of the distance, so that many distant rows do
            // not outweigh a near one.
            let w = distance.max(0.1).powi(-4);
            weight += w;
            ratio += w * row.us / row.estimated;
        }
        let flops = 2.0 * (s.rows * s.n * s.k) as f64;
        let floor = (flops / profile.peak_flops(kind.dtype) * 1e6)
            .max(moved.0 as f64 / profile.device.memory_gbps / 1e3);
        Price {
            us: (estimate(kind, s, moved, profile) * ratio / weight).max(floor),
            measured: nearest <= NEAR && by == own,
        }
    }

    /// Prices a grouped GEMM with a fused elementwise epilogue; both together move `moved` bytes.
    /// The price is at most that of both, one after the other.
    pub(super) fn with_epilogue(&self, kind: impl Into<GemmKind>, s: Shape, moved: Bytes) -> Price {
        let kind = kind.into();
        let own = s.bytes(kind.dtype);
        let more = gemm::beside(self.profile, moved.0.saturating_sub(own.0));
        Price {
            us: gemm::overlapped(self.price(kind, s, own).us, more),
            measured: false,
        }
    }
}

/// Returns the tables of a kind.
fn tables(kind: Kind, profile: &Profile) -> impl Iterator<Item = &GroupedGemmTable> {
    let tables = profile.grouped_gemm.iter();
    tables.filter(move |t| (t.kind(), t.gradient()) == kind)
}

/// Returns the kind whose rows correct the estimate. This is its own kind or, if that has no rows,
/// one with another result or with the other accumulation in 8 bits.
fn priced_by(own: Kind, profile: &Profile) -> Kind {
    let (kind, gradient) = own;
    let fast = kind.float8.map(|of| !of.fast_accum);
    let results = [
        gradient,
        gradient.and(Some(DType::Bf16)),
        gradient.and(Some(DType::F32)),
    ];
    let kinds = [kind, kind.refined(None, fast)];
    let mut all = kinds
        .iter()
        .flat_map(|&kind| results.map(|result| (kind, result)));
    all.find(|&kind| tables(kind, profile).next().is_some())
        .unwrap_or(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::{self, MemoryClass};
    use shardlab_plan::ir::{Float8Gemm, ScaleMode};

    fn us(s: Shape, moved: u64) -> f64 {
        let profile = hardware::load("h100-80").unwrap();
        Grouped::new(&profile)
            .price(DType::Bf16, s, Bytes(moved))
            .us
    }

    const QWEN3: Shape = Shape {
        rows: 65_536,
        n: 1536,
        k: 2048,
        experts: 128,
        gradient: None,
    };

    #[test]
    fn more_experts_over_the_same_rows_take_longer() {
        let few = Shape {
            experts: 8,
            ..QWEN3
        };
        assert!(us(QWEN3, 0) > us(few, 0));
        let gradient = |s| Shape {
            gradient: Some(DType::Bf16),
            ..s
        };
        assert!(us(gradient(QWEN3), 0) > us(gradient(few), 0));
    }

    #[test]
    fn matrices_of_all_experts_are_moved() {
        let rare = Shape { rows: 128, ..QWEN3 };
        // 128 matrices of 6 MB at 3.35 TB/s.
        let bytes = 128 * 1536 * 2048 * 2;
        assert!(us(rare, bytes) > 240.0, "{}", us(rare, bytes));
    }

    /// The arithmetic of a weight gradient is never faster than the peak.
    #[test]
    fn no_price_is_below_the_peak() {
        let profile = hardware::load("h100-80").unwrap();
        for gradient in [None, Some(DType::Bf16), Some(DType::F32)] {
            let s = Shape { gradient, ..QWEN3 };
            let flops = 2.0 * (s.rows * s.n * s.k) as f64;
            let peak = flops / profile.peak_flops(DType::Bf16) * 1e6;
            assert!(us(s, 0) > peak);
        }
    }

    /// Rows of one result type correct weight gradients of the other, but do not measure them.
    #[test]
    fn results_of_weight_gradients_have_separate_rows() {
        let mut profile = hardware::load("h100-80").unwrap();
        let of = |gradient, profile: &Profile| {
            let s = Shape {
                gradient: Some(gradient),
                ..QWEN3
            };
            let found = Grouped::new(profile).price(DType::Bf16, s, s.bytes(DType::Bf16));
            (found.us, found.measured)
        };
        let [(bf16, _), (f32, _)] = [DType::Bf16, DType::F32].map(|d| of(d, &profile));
        assert!(f32 >= bf16);
        let mut add = |result, us| {
            profile.grouped_gemm.push(GroupedGemmTable {
                source: "test".into(),
                dtype: DType::Bf16,
                fast_accum: None,
                weight_gradient: true,
                result,
                rows: vec![GroupedGemmRow(128, 512, 1536, 2048, us)],
            });
            [DType::Bf16, DType::F32].map(|d| of(d, &profile))
        };
        let [(follows, known), exact] = add(Some(DType::F32), 2.0 * f32);
        assert_eq!(exact, (2.0 * f32, true));
        assert!(!known && (1.9 * bf16..2.0 * bf16).contains(&follows));
        // A table without the key has results of the type of the factors.
        assert_eq!(add(None, bf16), [(bf16, true), exact]);
    }

    /// The prices of measured rows are exact. The rows correct their neighbors, and leave other
    /// directions and distant sizes to the estimate.
    #[test]
    fn measured_rows_correct_their_neighbours() {
        let mut profile = hardware::load("h100-80").unwrap();
        let of = |s: Shape, profile: &Profile| {
            Grouped::new(profile).price(DType::Bf16, s, s.bytes(DType::Bf16))
        };
        let before = of(QWEN3, &profile);
        assert!(!before.measured);
        let slow = 2.0 * before.us;
        profile.grouped_gemm.push(GroupedGemmTable {
            source: "test".into(),
            dtype: DType::Bf16,
            fast_accum: None,
            weight_gradient: false,
            result: None,
            rows: vec![GroupedGemmRow(128, 512, 1536, 2048, slow)],
        });
        let exact = of(QWEN3, &profile);
        assert_eq!((exact.us, exact.measured), (slow, true));
        let near = Shape {
            rows: 98_304,
            ..QWEN3
        };
        let estimated = estimate(DType::Bf16.into(), near, near.bytes(DType::Bf16), &profile);
        let corrected = of(near, &profile);
        assert!(corrected.measured && corrected.us > 1.9 * estimated);
        let far = Shape {
            rows: 8 * 16_384,
            n: 28_672,
            k: 4096,
            experts: 8,
            ..QWEN3
        };
        let estimated = estimate(DType::Bf16.into(), far, far.bytes(DType::Bf16), &profile);
        let price = of(far, &profile);
        assert!(!price.measured && price.us < 1.01 * estimated);
        let gradient = Shape {
            gradient: Some(DType::Bf16),
            ..QWEN3
        };
        assert!(!of(gradient, &profile).measured);
    }

    /// Rows in bf16 do not affect prices in 8 bits. 8-bit rows with one accumulation correct prices
    /// with the other, which remain estimates.
    #[test]
    fn rows_in_8_bits_are_of_a_kind_of_sums() {
        let mut profile = hardware::load("h100-80").unwrap();
        let of = |fast_accum: bool, profile: &Profile| {
            let kind = GemmKind {
                dtype: DType::F8E4m3,
                float8: Some(Float8Gemm {
                    scaling: ScaleMode::Tensorwise,
                    fast_accum,
                }),
            };
            let found = Grouped::new(profile).price(kind, QWEN3, QWEN3.bytes(DType::F8E4m3));
            (found.us, found.measured)
        };
        let table = |dtype, fast_accum, us| GroupedGemmTable {
            source: "test".into(),
            dtype,
            fast_accum,
            weight_gradient: false,
            result: None,
            rows: vec![GroupedGemmRow(128, 512, 1536, 2048, us)],
        };
        let [(fast, fast_known), (full, full_known)] = [true, false].map(|f| of(f, &profile));
        assert!(!fast_known && !full_known && full > fast);
        profile
            .grouped_gemm
            .push(table(DType::Bf16, None, 10.0 * fast));
        assert_eq!(of(true, &profile), (fast, false));
        // Twice the estimate, which prices with the other accumulation follow in part.
        profile
            .grouped_gemm
            .push(table(DType::F8E4m3, Some(true), 2.0 * fast));
        assert_eq!(of(true, &profile), (2.0 * fast, true));
        let (follows, known) = of(false, &profile);
        assert!(!known && (1.9 * full..2.0 * full).contains(&follows));
        profile
            .grouped_gemm
            .push(table(DType::F8E4m3, Some(false), 1.5 * full));
        assert_eq!(of(false, &profile), (1.5 * full, true));
        // A table without the key was measured with fast accumulation.
        assert_eq!(
            table(DType::F8E4m3, None, 1.0).kind(),
            table(DType::F8E4m3, Some(true), 1.0).kind()
        );
    }

    /// A fused epilogue costs less than a kernel that moves its bytes, but never nothing, even if
    /// the halves that backward does not read are not written.
    #[test]
    fn an_epilogue_costs_more_than_nothing_and_less_than_a_kernel() {
        let profile = hardware::load("h100-80-exec").unwrap();
        let grouped = Grouped::new(&profile);
        let own = QWEN3.bytes(DType::Bf16).0;
        let alone = grouped.price(DType::Bf16, QWEN3, Bytes(own)).us;
        let made = QWEN3.rows * QWEN3.n / 2 * 2;
        let with = |moved| grouped.with_epilogue(DType::Bf16, QWEN3, Bytes(moved)).us;
        let (kept, dropped) = (with(own + made), with(own - made));
        let rate = profile.efficiency.memory[&MemoryClass::Fused] * profile.device.memory_gbps;
        let separate = (3 * made) as f64 / rate / 1e3;
        assert!(alone < dropped && dropped < kept && kept < alone + separate);
    }
}
