//! Mesh, placements, parameter groups and the layouts of their buffers.
//!
//! [`assign_units`] turns the scenario's `units` into units of the module tree. [`build_groups`]
//! assigns each parameter to one unit and lays out the groups. [`placements`] defines which axis
//! shards what.

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
    check_ignored, check_recomputed, check_unit, ignored_params, owners,
};
pub use per_param::{PerParamItem, PerParamLayout, per_param_layout};
#[cfg(test)]
pub(crate) use placements::persistent_bytes;

use crate::ir::{ParamId, UnitId};
use serde::Serialize;
use std::ops::Range;

/// Parameters of a unit with the same dtype and (except for policy `fsdp2`) `requires_grad`. They
/// are gathered together, and the trained ones are reduced together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Unit that owns the group.
    pub unit: UnitId,
    /// Parameters in registration order.
    pub params: Vec<ParamId>,
    /// Whether any of them is trained.
    pub requires_grad: bool,
    /// Layout of the parameters.
    pub layout: Layout,
    /// For each parameter, the index of its scale among those of the program; `None` for a
    /// parameter that is not gathered in 8 bits. Parameters that one matmul reads share a scale.
    /// Empty if no parameter is gathered in 8 bits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<Option<u32>>,
    /// Whether Muon updates its parameters, which are matrices that ranks hold as a whole.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub muon: bool,
    /// For each parameter, whether it is a matrix that Muon updates and that ranks hold some rows
    /// of. Empty if none is.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub muon_rows: Vec<bool>,
    /// Whether its parameters are biases of routers that steps move. All ranks have all of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub router_biases: bool,
    /// Whether the policy does not manage its parameters (`ignored_params`). Each rank has all of
    /// them, and nothing gathers or reduces them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ignored: bool,
}

impl Group {
    /// Returns whether ranks gather all parameters of the group in 8 bits.
    #[must_use]
    pub fn is_float8(&self) -> bool {
        self.has_float8() && self.scales.iter().all(Option::is_some)
    }

    /// Returns whether ranks gather any parameter of the group in 8 bits.
    #[must_use]
    pub fn has_float8(&self) -> bool {
        !self.scales.is_empty()
    }

    /// Returns the index of the scale of the group's `index`-th parameter; `None` if it is not
    /// gathered in 8 bits.
    #[must_use]
    pub fn scale(&self, index: usize) -> Option<u32> {
        self.scales.get(index).copied().flatten()
    }

    /// Returns whether Muon updates the group's `index`-th parameter, and ranks hold some of its
    /// rows.
    #[must_use]
    pub fn has_muon_rows(&self, index: usize) -> bool {
        self.muon_rows.get(index) == Some(&true)
    }

    /// Returns the range of its scale indices, which are consecutive.
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
    /// One flat buffer, split evenly. Parameters may span shards, but are only split at row
    /// boundaries.
    Flat(FlatLayout),
    /// Each parameter is split along dimension 0, and padded to equal shards.
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

    /// Returns the number of elements of one rank's shard, which is equal on all ranks.
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

    /// Returns the number of elements of the group's `index`-th parameter that `rank` on the shard
    /// axis holds; 0 if it holds none.
    ///
    /// # Panics
    /// Panics if `index` is not below the number of parameters or `rank` not below the number of
    /// shards.
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
