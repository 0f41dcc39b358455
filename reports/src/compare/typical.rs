//! Checks whether the step that a comparison explains is similar to the others.

use super::Side;
use crate::stats::median;

/// Relative distance from the median beyond which a recorded step is not typical.
///
/// This value is a choice, not a measurement. It is far above the 2 % changes that comparisons look
/// for, so most of what such a step shows has another cause.
const ATYPICAL: f64 = 0.25;

/// Warns if a recorded step is far from the median of its run.
pub(super) fn warning(side: Side<'_>) -> Option<String> {
    let view = side.run;
    let recorded = view.recorded().ms();
    let median = median(&view.samples_ms());
    let off = (recorded / median - 1.0).abs();
    (view.is_recorded() && off > ATYPICAL).then(|| {
        format!(
            "The recorded step of {} ({recorded:.2} ms) is not typical (median {median:.2} ms): the breakdown below describes that \
             step only. Run again.",
            side.label
        )
    })
}
