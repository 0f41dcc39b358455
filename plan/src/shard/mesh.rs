//! Ranks on the mesh, the nodes they lie on, and what each axis does to each kind of state.
//!
//! Rank `r` sits at outer coordinate `r / dp_shard` and inner coordinate `r % dp_shard`: the inner
//! (sharding) axis joins neighbours, which share a node where they can.

#[cfg(test)]
use crate::config::Precision;
use crate::config::{Mesh, OuterStrategy, Strategy};
use crate::program::Communicator;
#[cfg(test)]
use crate::units::Bytes;
use serde::Serialize;
use std::ops::Range;

/// A rank's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Coord {
    /// On the outer axis.
    pub outer: u32,
    /// On the inner (sharding) axis.
    pub inner: u32,
}

/// Position of `rank`.
#[must_use]
pub fn coord(mesh: &Mesh, rank: u32) -> Coord {
    Coord {
        outer: rank / mesh.dp_shard,
        inner: rank % mesh.dp_shard,
    }
}

/// Rank at a position.
#[must_use]
pub fn rank(mesh: &Mesh, at: Coord) -> u32 {
    at.outer * mesh.dp_shard + at.inner
}

/// Ranks of the communicator instance that `rank` belongs to, ascending.
pub fn members(comm: &Communicator, rank: u32) -> impl Iterator<Item = u32> + use<> {
    let (size, stride) = (comm.size.max(1), comm.stride.max(1));
    let first = rank / (size * stride) * (size * stride) + rank % stride;
    (0..size).map(move |i| first + i * stride)
}

/// Position of `rank` within its communicator instance.
#[must_use]
pub fn position(comm: &Communicator, rank: u32) -> u32 {
    rank / comm.stride.max(1) % comm.size.max(1)
}

/// Most nodes that one instance of a communicator of `size` ranks, `stride` apart, spans.
#[must_use]
pub fn nodes(size: u32, stride: u32, world: u32, gpus_per_node: u32) -> u32 {
    let (size, stride, per_node) = (size.max(1), stride.max(1), gpus_per_node.max(1));
    let block = size.saturating_mul(stride);
    let of = |first: u32| {
        let nodes = (0..size).map(|i| (first + i * stride) / per_node);
        1 + nodes
            .clone()
            .zip(nodes.skip(1))
            .filter(|(a, b)| a != b)
            .count() as u32
    };
    let firsts = (0..world.max(1)).step_by(block as usize);
    let firsts = firsts.flat_map(|block| (0..stride).map(move |i| block + i));
    firsts.map(of).max().unwrap_or(1)
}

/// How one kind of state lies on one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Everyone has all of it.
    Replicate,
    /// Everyone has a summand of it.
    Partial,
    /// Everyone has a slice of the flat buffer.
    Flat,
}

/// Placement on both axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Placed {
    /// Outer axis.
    pub outer: Placement,
    /// Inner axis.
    pub inner: Placement,
}

/// Placements of all state at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Placements {
    /// Compute weights.
    pub parameter: Placed,
    /// Gradients between two micro-batches of a step.
    pub accumulating: Placed,
    /// Gradients when the optimizer reads them.
    pub gradient: Placed,
    /// Main weights and optimizer state.
    pub optimizer: Placed,
}

/// Whether compute weights are sharded over the inner axis.
#[must_use]
pub const fn weight_sharded(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::OptimGradsParams)
}

/// Whether gradients at rest are sharded over the inner axis.
#[must_use]
pub const fn grad_sharded(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::OptimGrads | Strategy::OptimGradsParams)
}

/// Whether main weights and optimizer state are sharded over the inner axis.
#[must_use]
pub const fn optim_sharded(strategy: Strategy) -> bool {
    !matches!(strategy, Strategy::NoShard)
}

/// Placements of a combination of strategies (Megatron-FSDP's names; with `outer` Optim it is
/// HFSDP, else HSDP).
#[must_use]
pub const fn placements(strategy: Strategy, outer: OuterStrategy) -> Placements {
    use Placement::{Flat, Partial, Replicate};
    const fn flat_if(sharded: bool, otherwise: Placement) -> Placement {
        if sharded { Flat } else { otherwise }
    }
    let outer_optim = matches!(outer, OuterStrategy::Optim);
    Placements {
        parameter: Placed {
            outer: Replicate,
            inner: flat_if(weight_sharded(strategy), Replicate),
        },
        accumulating: Placed {
            outer: Partial,
            inner: flat_if(grad_sharded(strategy), Partial),
        },
        gradient: Placed {
            outer: flat_if(outer_optim, Replicate),
            inner: flat_if(grad_sharded(strategy), Replicate),
        },
        optimizer: Placed {
            outer: flat_if(outer_optim, Replicate),
            inner: flat_if(optim_sharded(strategy), Replicate),
        },
    }
}

/// Part of a flat buffer of `numel` elements that a rank holds: the inner axis cuts first, then the
/// outer one. [`Placement::Partial`] and [`Placement::Replicate`] do not cut.
#[must_use]
pub fn interval(mesh: &Mesh, placed: Placed, at: Coord, numel: u64) -> Range<u64> {
    let cut = |whole: Range<u64>, placement, index: u32, of: u32| {
        if placement != Placement::Flat {
            return whole;
        }
        let n = (whole.end - whole.start) / u64::from(of);
        whole.start + u64::from(index) * n..whole.start + (u64::from(index) + 1) * n
    };
    cut(
        cut(0..numel, placed.inner, at.inner, mesh.dp_shard),
        placed.outer,
        at.outer,
        mesh.dp_outer,
    )
}

/// Persistent bytes of a rank, by kind of state.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Persistent {
    /// Compute weights at rest.
    pub model_weight: Bytes,
    /// Main weights.
    pub main_weight: Bytes,
    /// Gradients at rest.
    pub main_grad: Bytes,
    /// Optimizer moments.
    pub optimizer: Bytes,
}

#[cfg(test)]
impl Persistent {
    /// All of them.
    #[must_use]
    pub(crate) fn total(&self) -> Bytes {
        self.model_weight + self.main_weight + self.main_grad + self.optimizer
    }
}

/// Bytes that a trained group of `padded` elements (`payload` of them parameters) keeps on every
/// rank, by the closed forms for flat buffers: with S padded, P payload, I inner, O outer ranks and
/// w, m, g, o bytes an element
///
/// | strategy | bytes |
/// |---|---|
/// | `no_shard` | S (m + g + o) + P w (the compute weights stay the model's own parameters) |
/// | `optim` | S (w + g) + S/I (m + o) |
/// | `optim_grads` | S w + S/I (m + g + o) |
/// | `optim_grads_params` | S/I (w + m + g + o) |
/// | HFSDP (`outer` Optim) | S/I (w + g) + S/(I O) (m + o) |
///
/// `moments` is the number of optimizer moments. Without main weights the compute weights are the
/// optimizer's own and m is 0; they then are replicated or sharded as `w` says.
#[cfg(test)]
pub(crate) fn persistent_bytes(
    padded: u64,
    payload: u64,
    mesh: &Mesh,
    strategy: Strategy,
    outer: OuterStrategy,
    precision: &Precision,
    moments: u64,
) -> Persistent {
    let at_rest = placements(strategy, outer);
    let held = |placed: Placed| {
        let r = interval(mesh, placed, Coord { outer: 0, inner: 0 }, padded);
        r.end - r.start
    };
    // The outer axis scatters gradients at the step boundary only: at rest a rank keeps the inner
    // shard.
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
        optimizer: Bytes(optim * moments * precision.moments.size()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;
    use crate::program::Axis;

    fn mesh(dp_shard: u32, dp_outer: u32) -> Mesh {
        Mesh {
            hardware: String::new(),
            dp_shard,
            dp_outer,
            gpus_per_node: 8,
        }
    }

    fn comm(axis: Axis, size: u32, stride: u32) -> Communicator {
        Communicator {
            name: String::new(),
            axis,
            size,
            stride,
            copy_engine: false,
        }
    }

    #[test]
    fn ranks_and_members() {
        let m = mesh(4, 2);
        assert_eq!(coord(&m, 6), Coord { outer: 1, inner: 2 });
        assert_eq!(
            (0..8).map(|r| rank(&m, coord(&m, r))).collect::<Vec<_>>(),
            (0..8).collect::<Vec<_>>()
        );
        let of = |c: &Communicator, r| members(c, r).collect::<Vec<_>>();
        assert_eq!(of(&comm(Axis::Shard, 4, 1), 6), [4, 5, 6, 7]);
        assert_eq!(of(&comm(Axis::Outer, 2, 4), 6), [2, 6]);
        assert_eq!(of(&comm(Axis::SubShard, 2, 1), 6), [6, 7]);
        assert_eq!(of(&comm(Axis::World, 8, 1), 6), (0..8).collect::<Vec<_>>());
        assert_eq!(position(&comm(Axis::Outer, 2, 4), 6), 1);
        assert_eq!(position(&comm(Axis::Shard, 4, 1), 6), 2);
        for c in [comm(Axis::Outer, 2, 4), comm(Axis::Shard, 4, 1)] {
            for r in 0..8 {
                assert_eq!(of(&c, r)[position(&c, r) as usize], r);
            }
        }
    }

    #[test]
    fn nodes_of_the_widest_instance() {
        // Four groups of 6 on three nodes of 8: ranks 6 to 11 lie on two.
        assert_eq!(nodes(6, 1, 24, 8), 2);
        assert_eq!(nodes(6, 1, 6, 8), 1);
        assert_eq!(nodes(8, 1, 24, 8), 1);
        assert_eq!(nodes(4, 1, 24, 8), 1);
        assert_eq!(nodes(16, 1, 32, 8), 2);
        assert_eq!(nodes(12, 1, 24, 8), 2);
        // The outer axis: neighbours on a node, one rank a node, and both.
        assert_eq!(nodes(2, 4, 8, 8), 1);
        assert_eq!(nodes(4, 8, 32, 8), 4);
        assert_eq!(nodes(4, 6, 24, 8), 3);
    }

    /// start = i S/I + o S/(I O), length S/(I O) (Megatron-FSDP HSDP design).
    #[test]
    fn inner_cuts_before_outer() {
        let m = mesh(4, 2);
        let both = placements(Strategy::OptimGradsParams, OuterStrategy::Optim).optimizer;
        assert_eq!(interval(&m, both, Coord { outer: 1, inner: 2 }, 80), 50..60);
        let weights = placements(Strategy::OptimGradsParams, OuterStrategy::Optim).parameter;
        assert_eq!(
            interval(&m, weights, Coord { outer: 1, inner: 2 }, 80),
            40..60
        );
    }

    #[test]
    fn who_shards_what() {
        let sharded = |s| (weight_sharded(s), grad_sharded(s), optim_sharded(s));
        assert_eq!(sharded(Strategy::NoShard), (false, false, false));
        assert_eq!(sharded(Strategy::Optim), (false, false, true));
        assert_eq!(sharded(Strategy::OptimGrads), (false, true, true));
        assert_eq!(sharded(Strategy::OptimGradsParams), (true, true, true));
    }

    /// Bytes an element before division, bf16 parameters, from the published ZeRO tables (Adam: 8
    /// more).
    #[test]
    fn closed_forms() {
        let p = |main, grads| Precision {
            compute: DType::Bf16,
            main_params: main,
            main_grads: grads,
            comm_grads: grads,
            moments: DType::F32,
            deterministic: false,
        };
        let total =
            |m: &Mesh, s, o, pr: &Precision| persistent_bytes(1600, 1500, m, s, o, pr, 2).total().0;
        let m = mesh(8, 1);
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
        // HSDP: as ZeRO-3 over the inner axis; HFSDP: the optimizer is cut over both.
        let m = mesh(4, 2);
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
