//! shardlab-frames answers queries over many saved runs.
//!
//! No other crate depends on it, because polars takes minutes to build. Runs become a table with
//! one row per run (fields, options, facts of the environment, metrics) or per span. Queries run on
//! that table ([`Frame::group`], [`Frame::history`], [`Frame::versus`]). Answers are printed or
//! written as CSV or Parquet.

mod error;
mod frame;
mod group;
mod history;
mod source;
mod versus;

pub use error::FrameError;
pub use frame::{Cell, Frame};
pub use group::Aggregate;
pub use source::{runs, spans};
