//! The `shardlab` command line.

fn main() {}
