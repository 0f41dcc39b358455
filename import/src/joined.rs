//! Adds memory from a snapshot of the same process to a trace.
//!
//! The times of both are relative to 1970. A snapshot does not record the thread of an allocation.
//! The thread is assumed to be the one whose innermost operator at that time started last, because
//! the other threads wait for it.

use crate::attribute::Attributed;
use crate::kineto::{MemoryEvent, Trace};
use crate::snapshot::{Change, SnapshotReport};

/// Returns the allocations and frees of the trace's process during the trace, in order. The result
/// is empty unless exactly one history matches the trace's device and time.
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
