//! Kernels against float64 references: op by op, on shards, and over whole tapes.

mod case;
mod memory;
mod ops;
mod semantics;
mod shard;
mod tapes;
