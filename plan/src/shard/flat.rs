//! Flat layout.

use crate::program::ParamId;
use serde::Serialize;

/// One parameter's interval of a flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FlatItem {
    /// Parameter.
    pub param: ParamId,
    /// First element.
    pub offset: u64,
    /// Elements.
    pub numel: u64,
}

/// Flat layout of a group over `shards` ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FlatLayout {
    /// Elements of the full buffer, padding included: a multiple of `chunk_factor * shards` when padded.
    pub numel: u64,
    /// Least common multiple of the parameters' rows.
    pub chunk_factor: u64,
    /// Number of shards.
    pub shards: u32,
    /// Parameters in the group's order.
    pub items: Vec<FlatItem>,
}
