//! Geometry that lanes and memory share.

use crate::plots::draw::WIDTH;

/// Width of the column with the names of lanes.
pub(super) const GUTTER: f64 = 190.0;
/// Height of a lane, and of the gap below it.
pub(super) const LANE: f64 = 44.0;
pub(super) const GAP: f64 = 12.0;
/// Margin above the lanes.
pub(super) const TOP: f64 = 10.0;

/// Returns the vertical position at which the lanes end.
pub(super) fn bottom(lanes: usize) -> f64 {
    TOP + lanes as f64 * (LANE + GAP)
}

/// Returns the scale of the time axis in units of the drawing per nanosecond.
pub(super) fn scale(length: u64) -> f64 {
    (f64::from(WIDTH) - GUTTER) / length as f64
}
