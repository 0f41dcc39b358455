//! Pareto-optimal points.

pub use shardlab_reports::compare::front;
