//! Tapes against measured allocations, closed forms, and each other.

use super::tape::*;
use super::{Sharding, WeightAdjacency};
use crate::config::*;
use crate::ir::*;
use crate::models;
use crate::models::testing::*;
use std::collections::BTreeMap;

mod closed_forms;
mod collectives;
mod deep;
mod excluded;
mod float8;
mod gemm_fusion;
mod gradients;
mod interp;
mod liveness;
mod measured;
mod overlap;
pub(crate) mod semantics;
mod used_rows;
mod views;
mod zeros;

/// Names for `semantics`.
mod terms {
    pub(super) use crate::ir::{
        BodyOp, DType, Documents, DrawnColumns, ForcedChoice, OpKind, ScaleBlock, ScoreMod, Slot,
        op,
    };
    /// Tolerance of a log-sum-exp that forward saved.
    pub(super) const SAVED: f64 = 1e-9;
}

const FAMILIES: [Family; 6] = [
    Family::Llama,
    Family::Moe,
    Family::Gpt2,
    Family::Encoder,
    Family::Linear,
    Family::Cnn,
];

fn build(s: &Scenario) -> Tape {
    with_units(s, &|m| s_is_unit(s, m))
}

/// Returns the tape over these units.
fn tape(s: &Scenario, sharding: Sharding<'_>) -> Tape {
    super::tape(s, models::declare(s, s.model.layers), sharding)
}

fn with_units(s: &Scenario, is_unit: &dyn Fn(ModuleId) -> bool) -> Tape {
    tape(s, side_by_side(is_unit))
}

/// Returns these units, with all weights contiguous and therefore their gradients.
fn side_by_side(is_unit: &dyn Fn(ModuleId) -> bool) -> Sharding<'_> {
    Sharding {
        is_unit,
        adjacency: &|_| WeightAdjacency::WeightsAndGradients,
    }
}

/// Returns whether a module is a unit under `units = "block"`: the root and the blocks.
fn s_is_unit(s: &Scenario, m: ModuleId) -> bool {
    matches!(
        modules_and_params(s).0[m.index()].kind,
        ModuleKind::Root | ModuleKind::Block
    )
}

fn count(modules_of: &Scenario) -> u64 {
    modules_and_params(modules_of)
        .1
        .iter()
        .map(Param::numel)
        .sum()
}

#[test]
fn parameter_counts_are_the_published_ones() {
    assert_eq!(count(&llama3_8b()), 8_030_261_248);
    assert_eq!(count(&gpt2_small()), 124_439_808);
    let mut small = llama(2048, 32, 8, 8192, 16, 128_256);
    small.model.tie_embeddings = true;
    assert_eq!(count(&small), 1_235_814_400);
}

/// Returns the launches: the kernel, its reads and its writes.
fn performed<'t>(
    t: &'t Tape,
    ops: &'t [TapeOp],
) -> impl Iterator<Item = (&'t Kernel, &'t [Operand], &'t [Operand])> {
    ops.iter().filter_map(|op| match *op {
        TapeOp::Launch {
            kernel,
            reads,
            writes,
            end,
        } => Some((
            &t.kernels[kernel.index()],
            &t.operands[reads as usize..writes as usize],
            &t.operands[writes as usize..end as usize],
        )),
        _ => None,
    })
}

/// Returns counts launches by kernel name.
fn launches(t: &Tape, ops: &[TapeOp]) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for op in ops {
        if let TapeOp::Launch { kernel, .. } = op {
            *out.entry(t.kernels[kernel.index()].name.clone())
                .or_insert(0) += 1;
        }
    }
    out
}
