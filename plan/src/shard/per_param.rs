//! Per-parameter layout.

use crate::program::ParamId;
use serde::Serialize;

/// One parameter of a per-parameter layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PerParamItem {
    /// Parameter.
    pub param: ParamId,
    /// Elements of the whole parameter.
    pub numel: u64,
    /// Elements of one padded shard: `ceil(dim0 / shards) * row`.
    pub shard_numel: u64,
    /// First element of this parameter's padded shard within a rank's packed shard.
    pub shard_offset: u64,
}

/// Per-parameter dim-0 layout of a group over `shards` ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PerParamLayout {
    /// Number of shards.
    pub shards: u32,
    /// Parameters in the group's order.
    pub items: Vec<PerParamItem>,
}

impl PerParamLayout {
    /// Elements of one rank's packed shard, padding included.
    #[must_use]
    pub fn shard_numel(&self) -> u64 {
        self.items.iter().map(|i| i.shard_numel).sum()
    }

    /// Elements of the gathered buffer, padding included.
    #[must_use]
    pub fn full_numel(&self) -> u64 {
        self.shard_numel() * u64::from(self.shards)
    }
}
