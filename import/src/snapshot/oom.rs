//! Allocations that failed: the live memory, the largest hole, the missing bytes, and which
//! settings would have avoided the failure.

use super::Share;
use super::history::{Action, History};
use super::replay;
use serde::Serialize;
use shardlab_plan::memory::AllocatorSettings;
use shardlab_plan::units::Bytes;

/// An allocation that failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OutOfMemory {
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Bytes that the device had free.
    pub device_free_bytes: u64,
    /// Bytes that were missing below the limit of the process or the device. If the limit is
    /// unknown, this is the maximum that can have been missing.
    pub missing_bytes: u64,
    /// Requested bytes of the live allocations.
    pub allocated_bytes: u64,
    /// Reserved bytes that are not in use. Blocks count with their rounded sizes, as in PyTorch's
    /// message.
    pub reserved_unused_bytes: u64,
    /// Size of the largest free block that the request could have used.
    pub largest_hole_bytes: u64,
    /// Number of such blocks.
    pub holes: usize,
    /// Memory limit of the process.
    pub limit_bytes: u64,
    /// Where the limit comes from.
    pub limit_by: &'static str,
    /// Live bytes by role, largest first.
    pub by_role: Vec<Share>,
    /// Live bytes by unit, largest first.
    pub by_unit: Vec<Share>,
    /// Settings of the allocator under which the whole history was replayed.
    pub tried: Vec<Tried>,
}

/// A failed allocation under other settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// Settings, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: String,
    /// Whether the allocation fits.
    pub fits: bool,
    /// Peak of reserved bytes up to that point.
    pub peak_reserved_bytes: u64,
}

/// Settings to try after a failure.
const SETTINGS: [&str; 5] = [
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "garbage_collection_threshold:0.8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8",
];

/// Completes the description of the `n`-th failure of a history. `limit` is the limit that the user
/// gave.
pub(super) fn complete(oom: &mut OutOfMemory, history: &History, n: usize, limit: Option<Bytes>) {
    let failures = history.events.iter().enumerate();
    let mut failures = failures.filter(|(_, e)| e.action == Action::OutOfMemory);
    let Some((at, event)) = failures.nth(n) else {
        return;
    };
    let (held, peak) = history.reserved_before(at);
    // Memory that the request would have to allocate on the device.
    let wanted = new_memory(event.size, history.settings.expandable_segments);
    (oom.limit_bytes, oom.limit_by) = match limit {
        Some(limit) => (limit.0, "given"),
        None if oom.device_free_bytes < wanted => {
            (held + oom.device_free_bytes, "free memory of the device")
        }
        // `set_per_process_memory_fraction` is not recorded.
        None => (
            peak,
            "the most that was reserved; the device had memory, so the process has a limit",
        ),
    };
    oom.missing_bytes = (held + wanted).saturating_sub(oom.limit_bytes);
    let holes = replay::holes(history, at, limit);
    (oom.holes, oom.largest_hole_bytes) = (holes.count, holes.largest.0);
    oom.reserved_unused_bytes = holes.unused.0;
    let limit = Bytes(oom.limit_bytes);
    let until = History {
        events: history.events[..=at].to_vec(),
        ..history.clone()
    };
    let others = SETTINGS.iter().filter_map(|s| s.parse().ok());
    let others = others.filter(|s: &AllocatorSettings| *s != history.settings);
    oom.tried = others
        .map(|settings| {
            let replay = replay::under(&until, settings, Some(limit));
            Tried {
                settings: replay.settings,
                fits: replay.failed_request_bytes.is_none(),
                peak_reserved_bytes: replay.peak_reserved_bytes,
            }
        })
        .collect();
}

/// Returns the memory that a request allocates on the device if no free block can serve it.
fn new_memory(size: u64, expandable: bool) -> u64 {
    const MIB: u64 = 1 << 20;
    match size {
        s if s <= MIB => 2 * MIB,
        s if expandable => s.next_multiple_of(20 * MIB),
        s if s < 10 * MIB => 20 * MIB,
        s => s.next_multiple_of(2 * MIB),
    }
}
