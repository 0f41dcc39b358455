//! Memory of a trace from a snapshot of the same process.
//!
//! Both have times since 1970. A snapshot does not know the thread of an allocation: it is the one
//! whose innermost operator at that time started last, because others wait for it.

use crate::attribute::Attributed;
use crate::kineto::{MemoryEvent, Trace};
use crate::snapshot::{Change, SnapshotReport};

/// Returns the allocations and frees of the trace's process during the trace, in order. Empty if no
/// history, or more than one, is of its device and time.
pub(crate) fn memory<'a>(
    trace: &Trace,
    a: &Attributed,
    snapshots: impl Iterator<Item = &'a SnapshotReport>,
) -> Vec<MemoryEvent> {
    let Some(device) = trace.device.first().map(|e| e.device) else {
        return Vec::new();
    };
    let from = trace.host.iter().map(|e| e.start).min().unwrap_or(0);
    let to = trace.host.iter().map(|e| e.end).max().unwrap_or(0);
    let time = |c: &Change| {
        (c.time.cast_signed())
            .saturating_mul(1000)
            .saturating_sub(trace.head.base)
    };
    let during = |c: &&Change| (from..=to).contains(&time(c));
    let mut histories = snapshots
        .filter(|s| s.device == device)
        .map(|s| s.changes.iter().filter(during).collect::<Vec<_>>())
        .filter(|changes| !changes.is_empty());
    let (Some(changes), None) = (histories.next(), histories.next()) else {
        return Vec::new();
    };
    let event = |c: &Change| {
        let at = time(c);
        let threads = 0..trace.threads.len() as u32;
        let innermost =
            threads.filter_map(|t| Some((trace.host[a.tree.at(trace, t, at)?].start, t)));
        MemoryEvent {
            at,
            thread: innermost.max().map_or(0, |(_, thread)| thread),
            bytes: c.bytes,
            address: c.address,
            allocated: c.allocated,
            reserved: c.reserved,
            device,
        }
    };
    changes.into_iter().map(event).collect()
}
