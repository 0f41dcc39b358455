//! The history of a snapshot: its events, and the memory at its start and end.

use super::frees::Frees;
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
        let frees = Frees::of(events);
        let mut this = Self {
            settings: recorded_settings(settings),
            events: events
                .iter()
                .filter_map(|e| event(e, frees, &mut streams))
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
            live.extend(blocks_in_use(segment));
        }
        this.end.sort_unstable();
        this.rewind(held, live);
        this
    }

    /// Reconstructs the start by undoing the events.
    fn rewind(&mut self, mut held: BTreeMap<u64, SegmentState>, mut live: HashMap<u64, u64>) {
        let expandable = self.settings.expandable_segments;
        for e in self.events.iter().rev() {
            match e.action {
                Action::Alloc => {
                    live.remove(&e.address);
                }
                Action::FreeCompleted => {
                    live.insert(e.address, e.size);
                }
                // Pages are mapped and unmapped in parts of a segment.
                Action::Take if expandable => unmap(&mut held, e.address, e.size),
                Action::Take => {
                    held.remove(&e.address);
                }
                Action::Return => {
                    let segment = SegmentState {
                        address: e.address,
                        size: e.size,
                        stream: e.stream,
                        small: e.size == SMALL_SEGMENT,
                        live: Vec::new(),
                    };
                    match expandable {
                        true => map(&mut held, segment),
                        false => {
                            held.insert(e.address, segment);
                        }
                    }
                }
                Action::OutOfMemory => {}
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

/// Returns the blocks of a segment that are in use: address and requested bytes.
///
/// Snapshots of PyTorch before 2.1 have neither addresses of blocks nor requested sizes. The blocks
/// of a segment follow each other without gaps, and the history of a block has its request.
fn blocks_in_use(segment: &Value) -> Vec<(u64, u64)> {
    let mut next = number(segment, "address");
    let mut all = Vec::new();
    for block in segment.get("blocks").map_or(&[][..], Value::items) {
        let size = number(block, "size");
        let address = match number(block, "address") {
            0 => next,
            address => address,
        };
        next = address.saturating_add(size);
        if text(block, "state").starts_with("active") {
            let past = block.get("history").map_or(&[][..], Value::items);
            let real = past.first().map_or(0, |h| number(h, "real_size"));
            let requested = [number(block, "requested_size"), real, size];
            let requested = requested.into_iter().find(|n| *n > 0);
            all.push((address, requested.unwrap_or(0)));
        }
    }
    all
}

/// Removes a range of pages from the mapped ranges.
fn unmap(held: &mut BTreeMap<u64, SegmentState>, address: u64, size: u64) {
    let end = address.saturating_add(size);
    let overlapping: Vec<u64> = held
        .range(..end)
        .filter(|(at, s)| at.saturating_add(s.size) > address)
        .map(|(at, _)| *at)
        .collect();
    for at in overlapping {
        let Some(range) = held.remove(&at) else {
            continue;
        };
        let range_end = at.saturating_add(range.size);
        for (from, to) in [(at, address), (end, range_end)] {
            if from < to {
                let part = SegmentState {
                    address: from,
                    size: to - from,
                    ..range.clone()
                };
                held.insert(from, part);
            }
        }
    }
}

/// Adds a range of pages to the mapped ranges. Snapshots report neighbouring ranges as one segment.
fn map(held: &mut BTreeMap<u64, SegmentState>, mut range: SegmentState) {
    unmap(held, range.address, range.size);
    let before = held.range(..range.address).next_back();
    let before = before.filter(|(at, s)| *at + s.size == range.address && s.stream == range.stream);
    if let Some((&at, _)) = before
        && let Some(s) = held.remove(&at)
    {
        range = SegmentState {
            address: at,
            size: s.size + range.size,
            small: s.small,
            ..range
        };
    }
    let end = range.address.saturating_add(range.size);
    if held.get(&end).is_some_and(|s| s.stream == range.stream)
        && let Some(s) = held.remove(&end)
    {
        range.size += s.size;
        range.small = s.small;
    }
    held.insert(range.address, range);
}

fn event(value: &Value, frees: Frees, streams: &mut Streams) -> Option<Event> {
    let action = match text(value, "action") {
        "alloc" => Action::Alloc,
        action if frees.completes(action) => Action::FreeCompleted,
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    const MIB: u64 = 1 << 20;

    fn history(segments: &[Json], events: &Json, expandable: bool) -> History {
        let segments: Vec<Value> = segments.iter().map(Value::from_json).collect();
        let segments: Vec<&Value> = segments.iter().collect();
        let settings = Value::from_json(&json!({"expandable_segments": expandable}));
        History::of(&segments, Value::from_json(events).items(), Some(&settings))
    }

    fn starts(history: &History) -> Vec<(u64, u64)> {
        history.start.iter().map(|s| (s.address, s.size)).collect()
    }

    /// The same segment in today's format, and in that of PyTorch 1.13 and 2.0.
    #[test]
    fn blocks_of_old_snapshots_follow_each_other() {
        let segment = |blocks: Json| json!({"address": 4096, "total_size": 4096, "stream": 0, "segment_type": "large", "blocks": blocks});
        let new = segment(json!([
            {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated"},
            {"address": 5120, "size": 2048, "requested_size": 0, "state": "inactive"},
            {"address": 7168, "size": 1024, "requested_size": 1024, "state": "active_allocated"},
        ]));
        let old = segment(json!([
            {"size": 1024, "state": "active_allocated", "history": [{"addr": 4096, "real_size": 1000}]},
            {"size": 2048, "state": "inactive"},
            {"size": 1024, "state": "active_allocated"},
        ]));
        let events = json!([{"action": "alloc", "addr": 7168, "size": 1024, "stream": 0}]);
        let read = |segment| {
            let start = history(&[segment], &events, false).start;
            start[0].live.clone()
        };
        // The second block was allocated within the history.
        assert_eq!(read(new), [(4096, 1000)]);
        assert_eq!(read(old), [(4096, 1000)]);
    }

    /// A segment of 10 MiB had 4 MiB when the history began: 8 MiB were mapped, 2 MiB unmapped.
    #[test]
    fn pages_that_were_mapped_later_are_not_reserved_at_the_start() {
        let segment = json!({"address": 64 * MIB, "total_size": 10 * MIB, "stream": 0, "segment_type": "large",
            "blocks": [{"address": 64 * MIB, "size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_allocated"}]});
        let event = |action: &str, at: u64, mib: u64| json!({"action": action, "addr": at * MIB, "size": mib * MIB, "stream": 0});
        let events = json!([
            event("segment_map", 68, 4),
            event("segment_unmap", 66, 2),
            event("segment_map", 66, 2),
            event("segment_map", 72, 2),
        ]);
        let history = history(std::slice::from_ref(&segment), &events, true);
        assert_eq!(starts(&history), [(64 * MIB, 4 * MIB)]);
        assert_eq!(history.start[0].live, [(64 * MIB, 2 * MIB)]);
        assert_eq!(history.reserved_before(0), (4 * MIB, 4 * MIB));
        assert_eq!(history.reserved_before(4), (10 * MIB, 10 * MIB));
    }

    #[test]
    fn a_complete_history_starts_with_nothing() {
        let segment = json!({"address": 64 * MIB, "total_size": 4 * MIB, "stream": 0, "segment_type": "large", "blocks": []});
        let map = |at: u64| json!({"action": "segment_map", "addr": at * MIB, "size": 2 * MIB, "stream": 0});
        let history = history(&[segment], &json!([map(64), map(66)]), true);
        assert!(history.is_complete(), "{:?}", history.start);
    }

    #[test]
    fn an_unmapped_range_divides_a_segment() {
        let mut held = BTreeMap::new();
        let range = |at: u64, size: u64| SegmentState {
            address: at,
            size,
            stream: StreamId(0),
            small: false,
            live: Vec::new(),
        };
        map(&mut held, range(10, 10));
        unmap(&mut held, 13, 2);
        let sizes = |held: &BTreeMap<u64, SegmentState>| -> Vec<(u64, u64)> {
            held.iter().map(|(at, s)| (*at, s.size)).collect()
        };
        assert_eq!(sizes(&held), [(10, 3), (15, 5)]);
        map(&mut held, range(13, 2));
        assert_eq!(sizes(&held), [(10, 10)]);
    }
}
