//! `[mesh]`.

use serde::Serialize;

/// `[mesh]`: the ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mesh {
    /// Name of a shipped hardware profile, or path of a profile file relative to the working
    /// directory.
    pub hardware: String,
    /// Inner (sharding) data-parallel size.
    pub dp_shard: u32,
    /// Outer data-parallel size (replication or outer sharding).
    pub dp_outer: u32,
    /// Tensor-parallel size.
    pub tp: u32,
    /// Expert-parallel size: number of adjacent ranks of `dp_shard` that divide the experts of a
    /// layer.
    pub ep: u32,
    /// GPUs of one NVLink node.
    pub gpus_per_node: u32,
}

impl Mesh {
    /// Returns the number of ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.data_ranks() * self.tp
    }

    /// Returns the number of ranks that process different samples.
    #[must_use]
    pub fn data_ranks(&self) -> u32 {
        self.dp_shard * self.dp_outer
    }
}
