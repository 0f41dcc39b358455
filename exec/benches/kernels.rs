//! Throughput of kernels.

fn main() {}
