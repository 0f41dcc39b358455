//! Mesh, placements, parameter groups and the layouts of their buffers.

mod flat;
mod groups;
mod per_param;

pub use flat::{FlatItem, FlatLayout};
pub use per_param::{PerParamItem, PerParamLayout};

use crate::program::{ParamId, UnitId};
use serde::Serialize;

/// A unit's parameters of one dtype and `requires_grad`: gathered and reduced together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Owning unit.
    pub unit: UnitId,
    /// Parameters in registration order.
    pub params: Vec<ParamId>,
    /// Whether they are trained.
    pub requires_grad: bool,
    /// Layout.
    pub layout: Layout,
}

/// Where each parameter of a group lies in the group's full buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One flat buffer, cut evenly; parameters may span shards, at row boundaries only.
    Flat(FlatLayout),
    /// Every parameter cut on dimension 0, padded to equal shards.
    PerParam(PerParamLayout),
}

impl Layout {
    /// Elements of the full buffer, padding included.
    #[must_use]
    pub fn full_numel(&self) -> u64 {
        match self {
            Self::Flat(l) => l.numel,
            Self::PerParam(l) => l.full_numel(),
        }
    }

    /// Elements of one rank's shard (equal on all ranks).
    #[must_use]
    pub fn shard_numel(&self) -> u64 {
        match self {
            Self::Flat(l) => l.numel / u64::from(l.shards),
            Self::PerParam(l) => l.shard_numel(),
        }
    }
}
