//! Kernels of the sharding engine.
