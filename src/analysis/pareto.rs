//! Pareto fronts and the best of several points.

pub use shardlab_reports::compare::Tolerance;
pub use shardlab_reports::compare::ties::{Point, best, front};
