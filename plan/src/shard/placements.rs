//! Placement of each kind of state on the data-parallel axes.

#[cfg(test)]
use crate::config::Precision;
use crate::config::{OuterStrategy, Strategy};
use crate::ir::{AxisId, DeviceMesh, Placement, Placements};
#[cfg(test)]
use crate::units::Bytes;
#[cfg(test)]
use serde::Serialize;
use std::ops::Range;

/// Placements of all resident state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatePlacements {
    /// Compute weights.
    pub parameter: Placements,
    /// Gradients between two micro-batches of a step.
    pub accumulating: Placements,
    /// Gradients when the optimizer reads them.
    pub gradient: Placements,
    /// Main weights and optimizer state.
    pub optimizer: Placements,
}

/// Returns the inner axis over which parameters with these placements are sharded. Along an axis
/// that divides them (expert parallelism), ranks hold different parameters, so they are sharded
/// over the other ranks.
#[must_use]
pub fn shard_axis(of: Placements) -> AxisId {
    if of.on(AxisId::EP) == Placement::Replicate {
        AxisId::DP_SHARD
    } else {
        AxisId::EDP
    }
}

/// Returns whether compute weights are sharded over the inner axis.
#[must_use]
pub(crate) const fn weight_sharded(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::OptimGradsParams)
}

/// Returns whether resident gradients are sharded over the inner axis.
#[must_use]
pub(crate) const fn grad_sharded(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::OptimGrads | Strategy::OptimGradsParams)
}

/// Returns whether main weights and optimizer state are sharded over the inner axis.
#[must_use]
pub(crate) const fn optim_sharded(strategy: Strategy) -> bool {
    !matches!(strategy, Strategy::NoShard)
}

/// Returns the placements of a combination of strategies, in Megatron-FSDP's names. It is HFSDP if
/// `outer` is Optim, otherwise HSDP.
#[must_use]
pub const fn placements(strategy: Strategy, outer: OuterStrategy) -> StatePlacements {
    use Placement::{Flat, Partial, Replicate};
    const fn flat_if(sharded: bool, otherwise: Placement) -> Placement {
        if sharded { Flat } else { otherwise }
    }
    const fn placed(inner: Placement, outer: Placement) -> Placements {
        Placements::REPLICATED
            .with(AxisId::DP_SHARD, inner)
            .with(AxisId::DP_OUTER, outer)
    }
    let outer_optim = flat_if(matches!(outer, OuterStrategy::Optim), Replicate);
    StatePlacements {
        parameter: placed(flat_if(weight_sharded(strategy), Replicate), Replicate),
        accumulating: placed(flat_if(grad_sharded(strategy), Partial), Partial),
        gradient: placed(flat_if(grad_sharded(strategy), Replicate), outer_optim),
        optimizer: placed(flat_if(optim_sharded(strategy), Replicate), outer_optim),
    }
}

/// Returns the part of a flat buffer of `numel` elements that a rank holds. Axes split the buffer
/// in the order of their ids, the inner one before the outer one. Only [`Placement::Flat`] splits.
#[must_use]
pub fn interval(mesh: &DeviceMesh, placed: Placements, rank: u32, numel: u64) -> Range<u64> {
    let flat = placed.axes(|p| p == Placement::Flat);
    flat.iter().fold(0..numel, |whole, axis| {
        let n = (whole.end - whole.start) / u64::from(mesh.size(axis));
        let start = whole.start + u64::from(mesh.coordinate(axis, rank)) * n;
        start..start + n
    })
}

/// Persistent bytes of a rank, by kind of state.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Persistent {
    /// Resident compute weights.
    pub model_weight: Bytes,
    /// Main weights.
    pub main_weight: Bytes,
    /// Resident gradients.
    pub main_grad: Bytes,
    /// Optimizer moments.
    pub optimizer: Bytes,
}

#[cfg(test)]
impl Persistent {
    /// Returns the sum.
    #[must_use]
    pub(crate) fn total(&self) -> Bytes {
        self.model_weight + self.main_weight + self.main_grad + self.optimizer
    }
}

/// Returns the bytes that a trained group of `padded` elements (`payload` of them parameters) keeps
/// on every rank, by the closed forms for flat buffers. S is the number of padded elements, P the
/// payload, I and O the number of inner and outer ranks, and w, m, g, o are bytes per element:
///
/// | strategy | bytes |
/// |---|---|
/// | `no_shard` | S (m + g + o) + P w (the compute weights stay the model's own parameters) |
/// | `optim` | S (w + g) + S/I (m + o) |
/// | `optim_grads` | S w + S/I (m + g + o) |
/// | `optim_grads_params` | S/I (w + m + g + o) |
/// | HFSDP (`outer` Optim) | S/I (w + g) + S/(I O) (m + o) |
///
/// `moments` is the number of optimizer moments. Without main weights, the optimizer updates the
/// compute weights and m is 0. They are then replicated or sharded like `w`.
#[cfg(test)]
pub(crate) fn persistent_bytes(
    padded: u64,
    payload: u64,
    mesh: &DeviceMesh,
    strategy: Strategy,
    outer: OuterStrategy,
    precision: &Precision,
    moments: u64,
) -> Persistent {
    let at_rest = placements(strategy, outer);
    let held = |placed: Placements| {
        let r = interval(mesh, placed, 0, padded);
        r.end - r.start
    };
    // The outer axis scatters gradients only at the end of a step: between micro-batches, each rank
    // keeps the inner shard.
    let grad = held(at_rest.accumulating);
    let optim = held(at_rest.optimizer);
    let weight = if strategy == Strategy::NoShard {
        payload
    } else {
        held(at_rest.parameter)
    };
    Persistent {
        model_weight: Bytes(weight * precision.compute.size()),
        main_weight: Bytes(optim * precision.main_params.map_or(0, crate::ir::DType::size)),
        main_grad: Bytes(grad * precision.main_grads.size()),
        optimizer: Bytes(optim * moments * precision.moments.dtype().size()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;
    /// start = i S/I + o S/(I O), length S/(I O) (Megatron-FSDP HSDP design).
    #[test]
    fn inner_cuts_before_outer() {
        let m = DeviceMesh::data_parallel(4, 2);
        let both = placements(Strategy::OptimGradsParams, OuterStrategy::Optim).optimizer;
        // Outer coordinate 1, inner coordinate 2.
        assert_eq!(interval(&m, both, 6, 80), 50..60);
        let weights = placements(Strategy::OptimGradsParams, OuterStrategy::Optim).parameter;
        assert_eq!(interval(&m, weights, 6, 80), 40..60);
    }

    #[test]
    fn who_shards_what() {
        let sharded = |s| (weight_sharded(s), grad_sharded(s), optim_sharded(s));
        assert_eq!(sharded(Strategy::NoShard), (false, false, false));
        assert_eq!(sharded(Strategy::Optim), (false, false, true));
        assert_eq!(sharded(Strategy::OptimGrads), (false, true, true));
        assert_eq!(sharded(Strategy::OptimGradsParams), (true, true, true));
    }

    /// Bytes per element before division for bf16 parameters, from the published ZeRO tables (Adam
    /// adds 8).
    #[test]
    fn closed_forms() {
        let p = |main, grads| Precision {
            compute: DType::Bf16,
            main_params: main,
            frozen_params: None,
            main_grads: grads,
            comm_grads: grads,
            moments: crate::config::MomentType::F32,
            loss_fp32_upcast: true,
            deterministic: false,
            float8: crate::config::Float8::off(),
        };
        let total = |m: &DeviceMesh, s, o, pr: &Precision| {
            persistent_bytes(1600, 1500, m, s, o, pr, 2).total().0
        };
        let m = DeviceMesh::data_parallel(8, 1);
        let bf16_fp32_bf16 = p(Some(DType::F32), DType::Bf16);
        let hsdp = OuterStrategy::NoShard;
        assert_eq!(
            total(&m, Strategy::OptimGradsParams, hsdp, &p(None, DType::Bf16)),
            200 * (4 + 8)
        );
        assert_eq!(
            total(&m, Strategy::OptimGradsParams, hsdp, &bf16_fp32_bf16),
            200 * (8 + 8)
        );
        assert_eq!(
            total(
                &m,
                Strategy::OptimGradsParams,
                hsdp,
                &p(Some(DType::F32), DType::F32)
            ),
            200 * (10 + 8)
        );
        assert_eq!(
            total(&m, Strategy::OptimGrads, hsdp, &bf16_fp32_bf16),
            1600 * 2 + 200 * (4 + 2 + 8)
        );
        assert_eq!(
            total(&m, Strategy::Optim, hsdp, &bf16_fp32_bf16),
            1600 * (2 + 2) + 200 * (4 + 8)
        );
        assert_eq!(
            total(&m, Strategy::NoShard, hsdp, &bf16_fp32_bf16),
            1600 * (4 + 2 + 8) + 1500 * 2
        );
        // HSDP is like ZeRO-3 over the inner axis. Under HFSDP, the optimizer is also split over
        // the outer axis.
        let m = DeviceMesh::data_parallel(4, 2);
        assert_eq!(
            total(&m, Strategy::OptimGradsParams, hsdp, &bf16_fp32_bf16),
            400 * 16
        );
        assert_eq!(
            total(
                &m,
                Strategy::OptimGradsParams,
                OuterStrategy::Optim,
                &bf16_fp32_bf16
            ),
            400 * 4 + 200 * 12
        );
    }
}
