//! Whether the step that a comparison explains is like the others.

use super::Side;
use crate::stats::median;

/// Relative distance from the median from which on a recorded step is not typical.
///
/// A choice, not a measurement: far above the change of 2 % that comparisons look for, so that most
/// of what is seen in such a step is something else.
const ATYPICAL: f64 = 0.25;

/// Warns of a recorded step that is far from the median of its run.
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
