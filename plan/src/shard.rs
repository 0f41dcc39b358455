//! Mesh, placements, parameter groups and the layouts of their buffers.
//!
//! [`assign_units`] turns the scenario's `units` into units of the module tree, [`build_groups`]
//! assigns every parameter to one unit and lays the groups out, and [`placements`] defines which
//! axis shards what.

mod error;
mod flat;
mod groups;
mod pattern;
mod per_param;
pub mod placements;

pub use error::{LayoutError, ShardError};
pub use flat::{FlatItem, FlatLayout, flat_layout};
pub use groups::{
    Apart, LayoutKind, UnitSpec, assign_units, build_groups, check_excluded, check_frozen,
    check_recomputed, check_unit, owners,
};
pub use per_param::{PerParamItem, PerParamLayout, per_param_layout};
#[cfg(test)]
pub(crate) use placements::persistent_bytes;

use crate::ir::{ParamId, UnitId};
use serde::Serialize;
use std::ops::Range;

/// A unit's parameters of one dtype and (except for policy `fsdp2`) `requires_grad`. They are
/// gathered together, and those that are trained are reduced together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Owning unit.
    pub unit: UnitId,
    /// Parameters in registration order.
    pub params: Vec<ParamId>,
    /// Whether any of them is trained.
    pub requires_grad: bool,
    /// Layout.
    pub layout: Layout,
    /// The number of each parameter's scale among those of the program; `None` for a parameter that
    /// is not gathered in 8 bits. Parameters that one matmul reads share a scale. Empty if none is
    /// gathered in 8 bits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<Option<u32>>,
    /// Whether Muon updates its parameters, which are matrices.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub muon: bool,
    /// Whether its parameters are biases of routers that steps move. All ranks have all of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub router_biases: bool,
}

impl Group {
    /// Returns whether ranks gather all of it in 8 bits.
    #[must_use]
    pub fn is_float8(&self) -> bool {
        self.has_float8() && self.scales.iter().all(Option::is_some)
    }

    /// Returns whether ranks gather any of it in 8 bits.
    #[must_use]
    pub fn has_float8(&self) -> bool {
        !self.scales.is_empty()
    }

    /// Returns the number of the scale of its `index`-th parameter; `None` if that is not gathered
    /// in 8 bits.
    #[must_use]
    pub fn scale(&self, index: usize) -> Option<u32> {
        self.scales.get(index).copied().flatten()
    }

    /// Returns the numbers of its scales, which follow each other.
    #[must_use]
    pub fn scale_range(&self) -> Range<u32> {
        let mut scales = self.scales.iter().copied().flatten();
        match (scales.clone().next(), scales.next_back()) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }
}

/// Position of each parameter of a group in the group's full buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One flat buffer, cut evenly; parameters may span shards, at row boundaries only.
    Flat(FlatLayout),
    /// Every parameter cut on dimension 0, padded to equal shards.
    PerParam(PerParamLayout),
}

impl Layout {
    /// Returns the number of elements of the full buffer, including padding.
    #[must_use]
    pub fn full_numel(&self) -> u64 {
        match self {
            Self::Flat(l) => l.numel,
            Self::PerParam(l) => l.full_numel(),
        }
    }

    /// Returns the number of elements of one rank's shard (equal on all ranks).
    #[must_use]
    pub fn shard_numel(&self) -> u64 {
        match self {
            Self::Flat(l) => l.shard_numel(),
            Self::PerParam(l) => l.shard_numel(),
        }
    }

    /// Returns the number of elements of the group's parameters, without padding.
    #[must_use]
    pub fn payload_numel(&self) -> u64 {
        match self {
            Self::Flat(l) => l.payload_numel(),
            Self::PerParam(l) => l.payload_numel(),
        }
    }

    /// Returns the number of elements of the group's `index`-th parameter that `rank` of the shard
    /// axis holds; 0 if it holds none.
    ///
    /// # Panics
    /// If `index` is not below the number of parameters or `rank` not below the number of shards.
    #[must_use]
    pub fn local_numel(&self, index: usize, rank: u32) -> u64 {
        match self {
            Self::Flat(l) => {
                let r = l.local(index, rank);
                r.end - r.start
            }
            Self::PerParam(l) => l.local_numel(index, rank),
        }
    }
}
