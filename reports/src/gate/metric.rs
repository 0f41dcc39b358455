//! Names of the metrics that a gate judges.

/// Name of the finding that no baseline exists.
pub const BASELINE: &str = "baseline";
/// Name of the finding about the device's capacity.
pub(super) const FITS: &str = "fits";
/// Name of the finding that losses are finite.
pub(super) const FINITE: &str = "finite";
/// Name of the finding about the whole program.
pub(super) const DIGEST: &str = "digest";
/// Names of the findings about budgets: predicted memory, measured memory, time.
pub(super) const BUDGETS: [&str; 3] = [
    "budget, reserved",
    "budget, reserved and measured",
    "budget, step",
];

/// Names of the findings about the peak memory of measured runs: allocated, reserved.
pub(super) const MEASURED_MEMORY: [&str; 2] =
    ["peak allocated, measured", "peak reserved, measured"];
/// Name of the finding about the step time of measured runs.
pub(super) const MEASURED_STEP: &str = "step, both measured";
/// Name of the finding about the collectives of measured runs.
pub(super) const MEASURED_COLLECTIVES: &str = "collectives, measured";

/// Returns whether a metric is judged independently of the baseline.
pub(super) fn stands_alone(metric: &str) -> bool {
    metric == FITS || metric == FINITE || BUDGETS.contains(&metric)
}

/// Explains what the failure of a metric means if the metric is judged independently of the
/// baseline.
pub(super) fn meaning(metric: &str) -> Option<&'static str> {
    let [reserved, measured, step] = BUDGETS;
    Some(match metric {
        FITS => "the step does not fit the device",
        FINITE => "training does not end with finite numbers",
        _ if metric == reserved => "over the memory budget",
        _ if metric == measured => "over the memory budget, as measured",
        _ if metric == step => "over the step time budget",
        _ if MEASURED_MEMORY.contains(&metric) => "the job takes more memory",
        _ if metric == MEASURED_STEP => "the job's steps take longer",
        _ if metric == MEASURED_COLLECTIVES => "the job's collectives changed",
        _ => return None,
    })
}
