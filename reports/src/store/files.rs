//! Names of the files of a saved run.

/// The rest of a run's view.
pub(super) const RUN: &str = "run.json";
/// The part that lists show.
pub(super) const SUMMARY: &str = "summary.json";
/// Spans.
pub(super) const SPANS: &str = "spans.csv";
/// Memory samples.
pub(super) const MEMORY: &str = "memory.csv";
/// Gaps of the compute stream.
pub(super) const GAPS: &str = "gaps.csv";
