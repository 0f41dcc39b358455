//! Grouped GEMMs: one matmul per expert, over as many rows as were routed to it.
//!
//! No profile has measured rows of them yet. They are priced as the GEMM over all rows, from the
//! tables of GEMMs, with the rows that fill the experts' last tiles: half a tile per expert on
//! average, if the remainders are evenly distributed. The matrices of all experts have to be moved,
//! which bounds experts with few rows. The price is therefore marked as modelled.

use super::Price;
use super::gemm;
use crate::hardware::Profile;
use shardlab_plan::ir::GemmKind;
use shardlab_plan::units::Bytes;

/// Sizes of one grouped GEMM, as in its cost class.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) rows: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    pub(super) experts: u64,
    pub(super) weight_gradient: bool,
}

/// Rows of a tile, and steps over rows of a weight gradient.
const TILE: u64 = 128;
const STEP: u64 = 64;

/// Returns the rows that are computed on average, those that fill last tiles included.
fn padded(rows: u64, experts: u64, tile: u64) -> u64 {
    rows + rows.min(experts) * tile / 2
}

/// Prices a grouped GEMM that moves `moved` bytes.
pub(super) fn price(kind: impl Into<GemmKind>, s: Shape, moved: Bytes, profile: &Profile) -> Price {
    let kind = kind.into();
    let size = kind.dtype.size() as f64;
    // The rate of one GEMM over all rows; of weight gradients, that of a result as large as an
    // expert's, once per expert.
    let one = if s.weight_gradient {
        let rows = padded(s.rows, s.experts, STEP).div_ceil(s.experts).max(1);
        let (shape, batch) = ([s.n, s.k, rows], s.experts);
        gemm::price(&profile.gemm, profile, kind, size, shape, batch, 1.0)
    } else {
        let rows = padded(s.rows, s.experts, TILE);
        let shape = [rows, s.n, s.k];
        gemm::price(&profile.gemm, profile, kind, size, shape, 1, 1.0)
    };
    let bound = moved.0 as f64 / profile.device.memory_gbps / 1e3;
    Price {
        us: one.us.max(bound),
        measured: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware;
    use shardlab_plan::ir::DType;

    fn us(s: Shape, moved: u64) -> f64 {
        let profile = hardware::load("h100-80").unwrap();
        price(DType::Bf16, s, Bytes(moved), &profile).us
    }

    const QWEN3: Shape = Shape {
        rows: 65_536,
        n: 1536,
        k: 2048,
        experts: 128,
        weight_gradient: false,
    };

    #[test]
    fn more_experts_over_the_same_rows_take_longer() {
        let few = Shape {
            experts: 8,
            ..QWEN3
        };
        assert!(us(QWEN3, 0) > us(few, 0));
        let gradient = |s| Shape {
            weight_gradient: true,
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

    /// A weight gradient's arithmetic is never faster than the peak.
    #[test]
    fn no_price_is_below_the_peak() {
        let profile = hardware::load("h100-80").unwrap();
        for weight_gradient in [false, true] {
            let s = Shape {
                weight_gradient,
                ..QWEN3
            };
            let flops = 2.0 * (s.rows * s.n * s.k) as f64;
            let peak = flops / profile.peak_flops(DType::Bf16) * 1e6;
            assert!(us(s, 0) > peak);
        }
    }
}
