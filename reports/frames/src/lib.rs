//! shardlab-frames: questions over many kept runs.
//!
//! A leaf: nothing needs it, because polars takes minutes to build. Runs become a table with a row
//! a run (fields, options, facts of the environment, metrics) or a row a span; questions are asked
//! of it ([`Frame::group`], [`Frame::history`], [`Frame::versus`]); answers are shown or written as
//! CSV or Parquet.

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
