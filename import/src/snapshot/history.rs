//! The history of a snapshot: its events, and the memory at its start and end.

use super::{number, text};
use crate::pickle::Value;
use shardlab_plan::ir::StreamId;
use shardlab_plan::memory::AllocatorSettings;
use shardlab_plan::memory::caching::{GRANULE, SegmentState};
use shardlab_plan::units::Bytes;
use std::collections::{BTreeMap, HashMap};

/// What an event of the allocator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Alloc,
    /// The memory is available again. The `free` comes earlier if another stream still uses the
    /// memory.
    FreeCompleted,
    /// A segment, or pages of an expandable one, are allocated on the device.
    Take,
    /// They are released to the device.
    Return,
    OutOfMemory,
}

/// An event of the allocator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) action: Action,
    pub(super) address: u64,
    /// Requested bytes of an allocation, or bytes of a segment.
    pub(super) size: u64,
    pub(super) stream: StreamId,
    /// Microseconds since 1970; 0 if not recorded.
    pub(super) time: u64,
}

/// An allocation or a free at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Microseconds since 1970; 0 if not recorded.
    pub time: u64,
    /// Address.
    pub address: u64,
    /// Bytes; negative for a free.
    pub bytes: i64,
    /// Allocated bytes after it.
    pub allocated: u64,
    /// Reserved bytes after it.
    pub reserved: u64,
}

/// Memory of a device over time.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// Segments at the start.
    pub(super) start: Vec<SegmentState>,
    /// Segments at the end: address and size, ascending.
    pub(super) end: Vec<(u64, Bytes)>,
    pub(super) events: Vec<Event>,
    /// Settings in effect while the history was recorded.
    pub(super) settings: AllocatorSettings,
    /// Whether some segments belong to private pools of CUDA graphs.
    pub(super) has_private_pools: bool,
}

/// Numbers for streams, which are recorded as addresses.
#[derive(Default)]
struct Streams(Vec<u64>);

impl Streams {
    fn of(&mut self, recorded: u64) -> StreamId {
        let found = self.0.iter().position(|s| *s == recorded);
        let index = found.unwrap_or_else(|| {
            self.0.push(recorded);
            self.0.len() - 1
        });
        StreamId(u8::try_from(index).unwrap_or(u8::MAX))
    }
}

/// Segment size of the small pool. All segments of the large pool are larger.
const SMALL_SEGMENT: u64 = 2 << 20;

impl History {
    /// Reads the history of a device.
    pub(super) fn of(segments: &[&Value], events: &[Value], settings: Option<&Value>) -> Self {
        let mut streams = Streams::default();
        let mut this = Self {
            settings: recorded_settings(settings),
            events: events
                .iter()
                .filter_map(|e| event(e, &mut streams))
                .collect(),
            ..Self::default()
        };
        let mut held: BTreeMap<u64, SegmentState> = BTreeMap::new();
        let mut live: HashMap<u64, u64> = HashMap::new();
        for segment in segments {
            let address = number(segment, "address");
            let size = number(segment, "total_size");
            let pool = segment.get("segment_pool_id").map_or(&[][..], Value::items);
            this.has_private_pools |= pool.iter().any(|id| id.int().is_some_and(|n| n != 0));
            this.end.push((address, Bytes(size)));
            held.insert(
                address,
                SegmentState {
                    address,
                    size,
                    stream: streams.of(number(segment, "stream")),
                    small: text(segment, "segment_type") == "small",
                    live: Vec::new(),
                },
            );
            for block in segment.get("blocks").map_or(&[][..], Value::items) {
                if text(block, "state").starts_with("active") {
                    live.insert(number(block, "address"), number(block, "requested_size"));
                }
            }
        }
        this.end.sort_unstable();
        this.rewind(held, live);
        this
    }

    /// Reconstructs the start by undoing the events.
    fn rewind(&mut self, mut held: BTreeMap<u64, SegmentState>, mut live: HashMap<u64, u64>) {
        for e in self.events.iter().rev() {
            match e.action {
                Action::Alloc => {
                    live.remove(&e.address);
                }
                Action::FreeCompleted => {
                    live.insert(e.address, e.size);
                }
                Action::Take if !self.settings.expandable_segments => {
                    held.remove(&e.address);
                }
                Action::Return if !self.settings.expandable_segments => {
                    let segment = SegmentState {
                        address: e.address,
                        size: e.size,
                        stream: e.stream,
                        small: e.size == SMALL_SEGMENT,
                        live: Vec::new(),
                    };
                    held.insert(e.address, segment);
                }
                Action::Take | Action::Return | Action::OutOfMemory => {}
            }
        }
        let mut live: Vec<(u64, u64)> = live.into_iter().collect();
        live.sort_unstable();
        for block in live {
            let around = held.range_mut(..=block.0).next_back();
            if let Some((_, segment)) = around {
                segment.live.push(block);
            }
        }
        self.start = held.into_values().collect();
        if self.settings.expandable_segments {
            // Only segments with blocks older than the history existed before it.
            self.start.retain(|s| !s.live.is_empty());
        }
    }

    /// Returns the reserved bytes before an event, and their maximum up to it.
    pub(super) fn reserved_before(&self, at: usize) -> (u64, u64) {
        let mut now: u64 = self.start.iter().map(|s| s.size).sum();
        let mut peak = now;
        for e in &self.events[..at] {
            match e.action {
                Action::Take => now += e.size,
                Action::Return => now = now.saturating_sub(e.size),
                _ => {}
            }
            peak = peak.max(now);
        }
        (now, peak)
    }

    /// Returns the allocations and frees with their times.
    pub(super) fn changes(&self) -> Vec<Change> {
        let rounded = |bytes: u64| bytes.next_multiple_of(GRANULE);
        let live = self.start.iter().flat_map(|s| &s.live);
        let mut allocated: u64 = live.map(|block| rounded(block.1)).sum();
        let mut reserved: u64 = self.start.iter().map(|s| s.size).sum();
        let mut changes = Vec::new();
        for e in &self.events {
            let bytes = match e.action {
                Action::Alloc => rounded(e.size).cast_signed(),
                Action::FreeCompleted => -rounded(e.size).cast_signed(),
                Action::Take => {
                    reserved += e.size;
                    continue;
                }
                Action::Return => {
                    reserved = reserved.saturating_sub(e.size);
                    continue;
                }
                Action::OutOfMemory => continue,
            };
            allocated = allocated.saturating_add_signed(bytes);
            changes.push(Change {
                time: e.time,
                address: e.address,
                bytes,
                allocated,
                reserved,
            });
        }
        changes
    }

    /// Returns whether the history covers the run from its first allocation.
    pub(super) fn is_complete(&self) -> bool {
        self.start.is_empty() && !self.events.is_empty()
    }
}

fn event(value: &Value, streams: &mut Streams) -> Option<Event> {
    let action = match text(value, "action") {
        "alloc" => Action::Alloc,
        "free_completed" | "free" => Action::FreeCompleted,
        "segment_alloc" | "segment_map" => Action::Take,
        "segment_free" | "segment_unmap" => Action::Return,
        "oom" => Action::OutOfMemory,
        _ => return None,
    };
    Some(Event {
        action,
        address: number(value, "addr"),
        size: number(value, "size"),
        stream: streams.of(number(value, "stream")),
        time: number(value, "time_us"),
    })
}

/// Reads the settings that affect the layout of memory.
fn recorded_settings(value: Option<&Value>) -> AllocatorSettings {
    let of = |key: &str| value.and_then(|v| v.get(key));
    let size = of("max_split_size").and_then(Value::int);
    let share = of("garbage_collection_threshold").and_then(Value::float);
    AllocatorSettings {
        expandable_segments: matches!(of("expandable_segments"), Some(Value::Bool(true))),
        max_split_size: size
            .and_then(|n| u64::try_from(n).ok())
            .filter(|n| *n > 0 && *n < u64::MAX / 2)
            .map(Bytes),
        garbage_collection_threshold: share.filter(|x| *x > 0.0),
    }
}
