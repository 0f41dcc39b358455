//! Pareto fronts and the best of several points.

pub use shardlab_reports::compare::ties::{Point, Tolerance, best, front};
