//! shardlab: predicts what a fully sharded training step costs, and says why.
//!
//! The library behind the command line: [`cli`] has one file a verb.

pub mod cli;
