//! Several threads for one launch.
//!
//! Ranks are threads already, so a launch runs on the calling thread, unless that thread has asked
//! for more. Work is cut into independent parts: results have the same bits with any number of
//! threads.

use std::cell::Cell;

thread_local! {
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Lets launches made by this thread use `n` threads (at least 1, which is the default). It pays
/// off if there are fewer ranks than processors.
pub fn use_threads(n: usize) {
    THREADS.set(n.max(1));
}

/// Returns the number of threads that launches made by this thread may use.
#[must_use]
pub fn threads() -> usize {
    THREADS.get()
}

/// Calls `f` with consecutive ranges that cover `0..n`: one for each thread, cut at multiples of
/// `step`.
pub(super) fn split<E: Send>(
    n: usize,
    step: usize,
    f: impl Fn(std::ops::Range<usize>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let steps = n.div_ceil(step.max(1));
    let parts = threads().min(steps);
    if parts <= 1 {
        return f(0..n);
    }
    let bound = |i: usize| (i * steps / parts * step).min(n);
    let mut results: Vec<Option<Result<(), E>>> = (0..parts).map(|_| None).collect();
    rayon::scope(|s| {
        for (i, result) in results.iter_mut().enumerate() {
            let f = &f;
            s.spawn(move |_| *result = Some(f(bound(i)..bound(i + 1))));
        }
    });
    // The first in order, so that errors do not depend on timing.
    results.into_iter().flatten().collect()
}
