//! Replays a history through the model of PyTorch's allocator, under the recorded or other
//! settings.

use super::history::{Action, Event, History};
use serde::Serialize;
use shardlab_plan::ir::StreamId;
use shardlab_plan::memory::caching::BlockId;
use shardlab_plan::memory::{AllocatorSettings, CachingAllocator};
use shardlab_plan::units::Bytes;
use std::collections::HashMap;

/// Result of replaying a history under some settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replay {
    /// Settings, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: String,
    /// Peak of reserved bytes.
    pub peak_reserved_bytes: u64,
    /// Peak of allocated bytes.
    pub peak_allocated_bytes: u64,
    /// Reserved bytes at the end.
    pub end_reserved_bytes: u64,
    /// Number of segments at the end.
    pub segments: usize,
    /// Number of times that all cached segments had to be released before a request could be
    /// served.
    pub retries: u32,
    /// Size of the first request that could not be served.
    pub failed_request_bytes: Option<u64>,
    /// Agreement with the recorded run, if the recorded settings are replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<Agreement>,
}

/// How well a replay agrees with the recorded run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Agreement {
    /// Number of allocations.
    pub allocations: u64,
    /// Number of allocations after which the reserved bytes equal the recorded ones.
    pub equal_reserved: u64,
    /// Number of allocations at the recorded address. Expandable segments have other addresses.
    pub equal_addresses: u64,
    /// Whether the segments at the end have the recorded sizes.
    pub equal_segments: bool,
}

impl Agreement {
    /// Returns whether the reserved memory equals the recorded one at all times, including the
    /// segments.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.equal_segments && self.equal_reserved == self.allocations
    }
}

/// A replay in progress.
struct State {
    allocator: CachingAllocator,
    blocks: HashMap<u64, BlockId>,
    peak_reserved: u64,
    peak_allocated: u64,
    failed: Option<u64>,
}

/// Replays the history under the recorded settings and compares the result with the recorded run.
/// `capacity` is the memory limit of the process, if known.
pub(super) fn recorded(history: &History, capacity: Option<Bytes>) -> Replay {
    let mut state = State::new(history, history.settings, capacity);
    let mut agreement = Agreement::default();
    let mut reserved: u64 = history.start.iter().map(|s| s.size).sum();
    for (i, event) in history.events.iter().enumerate() {
        match event.action {
            Action::Take => {
                reserved += event.size;
                if !history.settings.expandable_segments {
                    state.allocator.place_next_segment(event.address);
                }
            }
            Action::Return => reserved = reserved.saturating_sub(event.size),
            _ => {}
        }
        state.apply(&history.events, i, capacity);
        if event.action == Action::Alloc && state.failed.is_none() {
            agreement.allocations += 1;
            let now = state.allocator.counters().reserved.0;
            agreement.equal_reserved += u64::from(now == reserved);
            let at = state.blocks.get(&event.address);
            let at = at.map(|b| state.allocator.block(*b).address);
            agreement.equal_addresses += u64::from(at == Some(event.address));
        }
    }
    let sizes = |all: &[(u64, Bytes)]| {
        let mut sizes: Vec<Bytes> = all.iter().map(|s| s.1).collect();
        sizes.sort_unstable();
        sizes
    };
    agreement.equal_segments = sizes(&history.end) == sizes(&state.allocator.segments());
    let mut replay = state.finish(history.settings);
    replay.agreement = Some(agreement);
    replay
}

/// Replays the history under other settings. A history that starts later than the run is replayed
/// from its live blocks, allocated in the order of their addresses.
pub(super) fn under(
    history: &History,
    settings: AllocatorSettings,
    capacity: Option<Bytes>,
) -> Replay {
    let mut state = State::new(history, settings, capacity);
    for i in 0..history.events.len() {
        state.apply(&history.events, i, capacity);
    }
    state.finish(settings)
}

/// Free memory at a failed request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holes {
    /// Number of free blocks that were too small, but otherwise usable for the request.
    pub(super) count: usize,
    /// Size of the largest of these blocks.
    pub(super) largest: Bytes,
    /// Bytes that were reserved but not in use, for all streams and sizes.
    pub(super) unused: Bytes,
}

/// Returns the free memory at a failed request.
pub(super) fn holes(history: &History, at: usize, capacity: Option<Bytes>) -> Holes {
    let mut state = State::new(history, history.settings, capacity);
    for (i, event) in history.events.iter().enumerate().take(at) {
        if event.action == Action::Take && !history.settings.expandable_segments {
            state.allocator.place_next_segment(event.address);
        }
        state.apply(&history.events, i, capacity);
    }
    let event = history.events[at];
    state.allocator.release_cached();
    let (count, largest) = state.allocator.holes(Bytes(event.size), event.stream);
    let now = state.allocator.counters();
    Holes {
        count,
        largest,
        unused: Bytes(now.reserved.0.saturating_sub(now.allocated.0)),
    }
}

impl State {
    fn new(history: &History, settings: AllocatorSettings, capacity: Option<Bytes>) -> Self {
        let mut state = Self {
            allocator: CachingAllocator::with_settings(settings, capacity),
            blocks: HashMap::new(),
            peak_reserved: 0,
            peak_allocated: 0,
            failed: None,
        };
        let same = settings == history.settings && !settings.expandable_segments;
        for segment in &history.start {
            if same {
                let ids = state.allocator.restore(segment);
                let addresses = segment.live.iter().map(|b| b.0);
                state.blocks.extend(addresses.zip(ids));
            } else {
                for &(address, requested) in &segment.live {
                    state.take(address, requested, segment.stream);
                }
            }
        }
        state.note_peaks();
        state
    }

    fn take(&mut self, address: u64, requested: u64, stream: StreamId) {
        match self.allocator.take(Bytes(requested), stream) {
            Ok(block) => {
                self.blocks.insert(address, block);
            }
            Err(_) => {
                self.failed.get_or_insert(requested);
            }
        }
    }

    /// Applies an event. After a failed request it does nothing.
    fn apply(&mut self, events: &[Event], at: usize, capacity: Option<Bytes>) {
        if self.failed.is_some() {
            return;
        }
        let event = events[at];
        match event.action {
            Action::Alloc => self.take(event.address, event.size, event.stream),
            Action::FreeCompleted => {
                if let Some(block) = self.blocks.remove(&event.address) {
                    self.allocator.release(block);
                }
            }
            // Only with a known capacity is it known when the device is full. Without it, memory is
            // released when the recorded run released it.
            Action::Return if capacity.is_none() || !is_forced(events, at) => {
                self.allocator.release_cached();
            }
            // A request that failed in the recorded run may succeed here.
            Action::OutOfMemory if capacity.is_some() => {
                match self.allocator.take(Bytes(event.size), event.stream) {
                    Ok(block) => {
                        self.note_peaks();
                        self.allocator.release(block);
                    }
                    Err(_) => self.failed = Some(event.size),
                }
            }
            Action::Return | Action::Take | Action::OutOfMemory => {}
        }
        self.note_peaks();
    }

    fn note_peaks(&mut self) {
        let now = self.allocator.counters();
        self.peak_reserved = self.peak_reserved.max(now.reserved.0);
        self.peak_allocated = self.peak_allocated.max(now.allocated.0);
    }

    fn finish(self, settings: AllocatorSettings) -> Replay {
        let end = self.allocator.counters();
        Replay {
            settings: settings.to_string(),
            peak_reserved_bytes: self.peak_reserved,
            peak_allocated_bytes: self.peak_allocated,
            end_reserved_bytes: end.reserved.0,
            segments: self.allocator.segments().len(),
            retries: end.retries,
            failed_request_bytes: self.failed,
            agreement: None,
        }
    }
}

/// Returns whether memory was released to serve a request, and not by `torch.cuda.empty_cache`: an
/// allocation on the device or a failure follows.
fn is_forced(events: &[Event], at: usize) -> bool {
    let next = events[at..].iter().find(|e| e.action != Action::Return);
    next.is_some_and(|e| matches!(e.action, Action::Take | Action::OutOfMemory))
}
