//! Exposed time of a recorded step: when the compute stream had nothing to run.

use super::{Cause, ExposedGap, Span};
use crate::units::Picos;

/// Gaps shorter than this, in picoseconds, are the cost of the queue itself.
pub const MIN_GAP: u64 = 5_000_000;

/// Returns the gaps of the compute stream between `from` and `to`. The spans of the stream are
/// given in order. `explain` returns why a span did not start when the stream was free, and which
/// span it waited for.
#[must_use]
pub fn exposed_gaps<'s>(
    compute: impl IntoIterator<Item = &'s Span>,
    from: Picos,
    to: Picos,
    explain: impl Fn(&Span, Picos) -> (Cause, Option<u32>),
) -> Vec<ExposedGap> {
    let mut gaps = Vec::new();
    let mut free = from;
    for span in compute {
        if span.start.0 > free.0 + MIN_GAP {
            let (cause, waited_for) = explain(span, free);
            gaps.push(ExposedGap {
                start: free,
                end: span.start,
                cause,
                waited_for,
            });
        }
        free = free.max(span.end);
    }
    if to.0 > free.0 + MIN_GAP {
        gaps.push(ExposedGap {
            start: free,
            end: to,
            cause: Cause::Tail,
            waited_for: None,
        });
    }
    gaps
}
