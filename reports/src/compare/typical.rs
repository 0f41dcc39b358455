//! Whether the step that a comparison explains is like the others.

use super::Side;
use crate::stats::median;

/// Relative distance from the median from which on a recorded step is not typical.
///
/// Recording itself slows a step on GPUs down by a few percent, and single steps on a busy processor scatter by up to 20 % around
/// their median. A step beyond both is an outlier: something else happened in it.
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
