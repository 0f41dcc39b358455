//! Determines how long the host waits for data.

use crate::attribute::Attributed;
use crate::kineto::Trace;

/// Start of the range that PyTorch records around `__next__` of a `DataLoader`.
const LOADER: &str = "enumerate(DataLoader)";

/// Returns the nanoseconds per step that the host spends in the `DataLoader`: the mean over whole
/// steps, because workers deliver batches irregularly.
pub(super) fn wait(trace: &Trace, a: &Attributed) -> u64 {
    let whole = |step: u32| {
        let step = a.steps.all.get(step as usize);
        step.is_some_and(crate::attribute::Step::is_whole)
    };
    let waits = trace.host.iter().enumerate().filter(|(i, event)| {
        let outer = a.tree.parent(*i).is_none_or(|p| !is_loader(trace, p));
        outer && event.is_annotation && trace.name(event.name).starts_with(LOADER)
    });
    let in_steps = waits.filter(|(i, _)| a.host[*i].is_some_and(|p| whole(p.step)));
    let total: i64 = in_steps.map(|(_, e)| (e.end - e.start).max(0)).sum();
    let steps = a.steps.all.iter().filter(|s| s.is_whole()).count() as u64;
    total.cast_unsigned() / steps.max(1)
}

fn is_loader(trace: &Trace, event: usize) -> bool {
    trace.name(trace.host[event].name).starts_with(LOADER)
}
