//! Memory snapshots (`torch.cuda.memory._dump_snapshot`): the peak by role and unit, failed
//! allocations, and replays of the same allocations under other allocator settings.
//!
//! The history is a ring buffer, so it may start later than the run. Memory that was allocated
//! before the history is the state at the end minus the changes in the history.

mod export;
mod frees;
mod history;
mod oom;
mod replay;
mod roles;

pub use export::export;
pub use history::Change;
pub use oom::{OutOfMemory, Tried};
pub use replay::{Agreement, Replay};

use crate::ImportError;
use crate::attribute::{common_prefix, without};
use crate::frames;
use crate::limits;
use crate::pickle::{self, Value};
use frees::Frees;
use history::History;
use roles::Places;
use serde::Serialize;
use shardlab_plan::memory::AllocatorSettings;
use shardlab_plan::units::Bytes;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::Path;

/// Name of the owner of memory allocated before the history began.
pub const BEFORE: &str = "before the history";

/// Which replays to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SnapshotOptions {
    /// Settings under which the history is replayed, in addition to the recorded ones.
    pub settings: Vec<AllocatorSettings>,
    /// Memory limit of the process.
    pub limit: Option<Bytes>,
}

/// Content of a snapshot for one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SnapshotReport {
    /// Device.
    pub device: u32,
    /// Number of events in the history.
    pub events: usize,
    /// Bytes allocated before the history began; 0 if it covers the whole run.
    pub before_bytes: u64,
    /// Peak of allocated bytes within the history.
    pub peak_allocated_bytes: u64,
    /// Peak of reserved bytes within the history.
    pub peak_reserved_bytes: u64,
    /// Allocated bytes at the end.
    pub end_allocated_bytes: u64,
    /// Reserved bytes at the end.
    pub end_reserved_bytes: u64,
    /// Size of the largest free block at the end.
    pub largest_free_bytes: u64,
    /// Number of segments at the end.
    pub segments: usize,
    /// Bytes at the peak by role, largest first.
    pub by_role: Vec<Share>,
    /// Bytes at the peak by unit, largest first.
    pub by_unit: Vec<Share>,
    /// Allocated bytes at the end that were allocated within the history, by line of code, largest
    /// first; empty without frames. Memory that a loop keeps by mistake is among them.
    pub end_by_line: Vec<OfLine>,
    /// Allocations that failed.
    pub out_of_memory: Vec<OutOfMemory>,
    /// Events of unknown kinds, by kind.
    pub unknown: BTreeMap<String, u64>,
    /// Settings of the allocator that differ from the defaults.
    pub settings: BTreeMap<String, String>,
    /// Replays of the history through the model of the allocator; the first uses the recorded
    /// settings. Empty without a history.
    pub replays: Vec<Replay>,
    /// What cannot be determined.
    pub notes: Vec<String>,
    /// The history, to add memory to a trace of the same process.
    #[serde(skip)]
    pub changes: Vec<Change>,
}

/// Bytes of a role or unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Share {
    /// Role or unit.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
}

/// Memory that a line of code allocated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OfLine {
    /// File and line of the innermost frame outside of PyTorch: `train.py:77`.
    pub line: String,
    /// Bytes.
    pub bytes: u64,
    /// Number of allocations.
    pub allocations: usize,
}

/// Reads a snapshot.
///
/// # Errors
/// Fails if the file is not a snapshot, is cut off, or contains code.
pub fn read(
    mut from: impl Read,
    path: &Path,
    options: &SnapshotOptions,
) -> Result<Vec<SnapshotReport>, ImportError> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)
        .map_err(|e| ImportError::io(path, e))?;
    let value = pickle::read(&bytes).map_err(|e| ImportError::invalid(path, e.to_string()))?;
    let Some(segments) = value.get("segments") else {
        return Err(ImportError::invalid(
            path,
            "a memory snapshot has `segments`; this one has none",
        ));
    };
    check_sizes(&value).map_err(|reason| ImportError::invalid(path, reason))?;
    let traces = value.get("device_traces").map_or(&[][..], Value::items);
    let annotations = value
        .get("external_annotations")
        .map_or(&[][..], Value::items);
    let mut devices: Vec<u32> = segments
        .items()
        .iter()
        .map(|s| number(s, "device") as u32)
        .collect();
    let with_history = traces
        .iter()
        .enumerate()
        .filter(|(_, t)| !t.items().is_empty());
    devices.extend(with_history.map(|(i, _)| i as u32));
    devices.sort_unstable();
    devices.dedup();
    if devices.is_empty() {
        return Err(ImportError::invalid(
            path,
            "the snapshot has neither segments nor a history",
        ));
    }
    let report = |&device: &u32| {
        let own: Vec<&Value> = segments
            .items()
            .iter()
            .filter(|s| number(s, "device") == u64::from(device))
            .collect();
        let history = traces.get(device as usize).map_or(&[][..], Value::items);
        let annotations: Vec<&Value> = annotations
            .iter()
            .filter(|a| number(a, "device") == u64::from(device))
            .collect();
        let past = History::of(&own, history, value.get("allocator_settings"));
        let before = past.is_complete().then_some(0);
        let mut report = device_report(device, &own, history, &annotations, before);
        replays(&mut report, &past, options);
        report.changes = past.changes();
        report.settings = settings(value.get("allocator_settings"));
        let names: Vec<String> = report.by_unit.iter().map(|u| u.name.clone()).collect();
        let prefix = common_prefix(&names);
        for unit in &mut report.by_unit {
            unit.name = without(&unit.name, &prefix);
        }
        report
    };
    Ok(devices.iter().map(report).collect())
}

/// Rejects sizes and addresses that no device has, because sums of them would overflow.
fn check_sizes(snapshot: &Value) -> Result<(), String> {
    let check = |value: &Value, keys: &[&str], what: &dyn Fn() -> String| {
        let sizes = keys.iter().map(|key| number(value, key));
        if let Some(n) = sizes.max().filter(|n| *n > limits::BYTES) {
            let what = what();
            return Err(format!(
                "{what}: {n} bytes are more than a device has; the snapshot is damaged"
            ));
        }
        let addresses = ["address", "addr"].map(|key| number(value, key));
        match addresses.into_iter().find(|a| *a > limits::ADDRESS) {
            Some(address) => Err(format!(
                "{}: {address:#x} is not an address; the snapshot is damaged",
                what()
            )),
            None => Ok(()),
        }
    };
    let items =
        |value: &Value, key: &str| value.get(key).map_or_else(Vec::new, |v| v.items().to_vec());
    for (i, segment) in items(snapshot, "segments").iter().enumerate() {
        check(segment, &["total_size"], &|| format!("segment {i}"))?;
        for block in segment.get("blocks").map_or(&[][..], Value::items) {
            let what = || format!("a block of segment {i}");
            check(block, &["size", "requested_size"], &what)?;
        }
    }
    for (device, history) in items(snapshot, "device_traces").iter().enumerate() {
        for (i, event) in history.items().iter().enumerate() {
            let what = || format!("event {i} of device {device}");
            check(event, &["size", "device_free"], &what)?;
        }
    }
    Ok(())
}

fn number(value: &Value, key: &str) -> u64 {
    value
        .get(key)
        .and_then(Value::int)
        .map_or(0, |n| u64::try_from(n).unwrap_or(0))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::text).unwrap_or_default()
}

/// Returns the settings that differ from PyTorch's defaults.
fn settings(value: Option<&Value>) -> BTreeMap<String, String> {
    let pairs = value.map_or(&[][..], Value::pairs);
    let shown = pairs.iter().filter_map(|(key, value)| {
        let key = key.text()?;
        let differs = match (key, value) {
            ("PYTORCH_CUDA_ALLOC_CONF" | "PYTORCH_ALLOC_CONF", Value::Text(conf)) => {
                !conf.is_empty()
            }
            ("max_split_size", Value::Int(n)) => *n >= 0,
            ("garbage_collection_threshold", Value::Float(x)) => *x > 0.0,
            ("expandable_segments", Value::Bool(on)) => *on,
            _ => false,
        };
        let shown = match value {
            Value::Text(text) => text.to_string(),
            Value::Int(n) => n.to_string(),
            Value::Float(x) => x.to_string(),
            Value::Bool(b) => b.to_string(),
            _ => return None,
        };
        differs.then(|| (key.to_owned(), shown))
    });
    shown.collect()
}

struct Live {
    bytes: u64,
    /// Position of its allocation in the history.
    event: usize,
    role: &'static str,
    unit: String,
}

/// Reports the segments at the end and the history of a device; `before` is the number of bytes
/// allocated before the history, if it is known.
fn device_report(
    device: u32,
    segments: &[&Value],
    history: &[Value],
    annotations: &[&Value],
    before: Option<i64>,
) -> SnapshotReport {
    let mut report = SnapshotReport {
        device,
        events: history.len(),
        segments: segments.len(),
        ..SnapshotReport::default()
    };
    report.add_end(segments);
    let frees = Frees::of(history);
    report.notes.extend(frees.note());
    let (added, reserved) = report.sum(history, frees);
    // Blocks at the end have rounded sizes, requests in the history do not.
    let at_end = |end: u64, change: i64| end.cast_signed().saturating_sub(change);
    let allocated = before.unwrap_or_else(|| at_end(report.end_allocated_bytes, added));
    let held = at_end(report.end_reserved_bytes, reserved);
    report.add_start(allocated, held, history.is_empty());
    report.add_history(history, annotations, frees, (allocated, held));
    report.keep_determined(roles::has_frames(history), roles::has_units(annotations));
    report
}

impl SnapshotReport {
    /// Adds the bytes of segments and blocks at the end.
    fn add_end(&mut self, segments: &[&Value]) {
        for segment in segments {
            self.end_reserved_bytes += number(segment, "total_size");
            for block in segment.get("blocks").map_or(&[][..], Value::items) {
                let size = number(block, "size");
                match text(block, "state") {
                    "active_allocated" => self.end_allocated_bytes += size,
                    "inactive" => self.largest_free_bytes = self.largest_free_bytes.max(size),
                    _ => {}
                }
            }
        }
    }

    /// Returns the bytes that a history allocates and reserves in total, and notes unknown actions.
    fn sum(&mut self, history: &[Value], frees: Frees) -> (i64, i64) {
        let (mut added, mut reserved) = (0_i64, 0_i64);
        for event in history {
            let size = number(event, "size").cast_signed();
            match text(event, "action") {
                "alloc" => added += size,
                action if frees.requests(action) => added -= size,
                "segment_alloc" | "segment_map" => reserved += size,
                "segment_free" | "segment_unmap" => reserved -= size,
                "free_requested" | "free_completed" | "snapshot" | "oom" | "annotate"
                | "workspace_snapshot" => {}
                other => *self.unknown.entry(other.to_owned()).or_default() += 1,
            }
        }
        (added, reserved)
    }

    /// Adds the memory that was allocated and reserved before the history, and allocations that the
    /// history lacks.
    fn add_start(&mut self, allocated: i64, held: i64, no_history: bool) {
        self.before_bytes = u64::try_from(allocated).unwrap_or(0);
        self.peak_allocated_bytes = self.before_bytes;
        self.peak_reserved_bytes = u64::try_from(held).unwrap_or(0);
        let mut note = |text: &str| self.notes.push(text.into());
        if allocated < 0 {
            note(
                "the history frees more than it allocates and the end state contains: it is incomplete",
            );
        }
        if self.before_bytes > 0 {
            note("recording started during the run: memory allocated before that has no frames");
        }
        if no_history {
            note("the snapshot has no history, only the state at its end");
            self.peak_allocated_bytes = self.end_allocated_bytes;
            self.peak_reserved_bytes = self.end_reserved_bytes;
        }
    }

    /// Removes divisions that the snapshot does not show: without frames, every allocation would be
    /// that of a temporary, and without annotations, every unit would be the root.
    fn keep_determined(&mut self, frames: bool, units: bool) {
        if self.events == 0 {
            return;
        }
        let ooms = &mut self.out_of_memory;
        if !frames {
            self.by_role.clear();
            ooms.iter_mut().for_each(|oom| oom.by_role.clear());
            self.notes.push(
                "no frames: roles are not determined (`_record_memory_history(context=\"all\")` records frames)"
                    .into(),
            );
        }
        if !units {
            self.by_unit.clear();
            ooms.iter_mut().for_each(|oom| oom.by_unit.clear());
            self.notes.push(
                "no annotations of FSDP2: units are not determined (`_record_memory_history(global_record_annotations=True)` records annotations)"
                    .into(),
            );
        }
    }

    /// Adds the peaks, the live memory at the peak, and failed allocations. The history starts with
    /// these allocated and reserved bytes.
    fn add_history(
        &mut self,
        history: &[Value],
        annotations: &[&Value],
        frees: Frees,
        (mut allocated, mut held): (i64, i64),
    ) {
        let mut places = Places::new(annotations, roles::has_frames(history));
        let mut live: HashMap<u64, Live> = HashMap::new();
        let mut before = self.before_bytes;
        for (i, event) in history.iter().enumerate() {
            let (address, bytes) = (number(event, "addr"), number(event, "size"));
            let size = bytes.cast_signed();
            match text(event, "action") {
                "alloc" => {
                    allocated += size;
                    let (role, unit) = places.of(event);
                    let one = Live {
                        bytes,
                        event: i,
                        role,
                        unit,
                    };
                    live.insert(address, one);
                }
                action if frees.requests(action) => {
                    allocated -= size;
                    if live.remove(&address).is_none() {
                        before = before.saturating_sub(bytes);
                    }
                }
                "segment_alloc" | "segment_map" => held += size,
                "segment_free" | "segment_unmap" => held -= size,
                "oom" => {
                    let (by_role, by_unit) = shares(&live, before);
                    self.out_of_memory.push(OutOfMemory {
                        requested_bytes: bytes,
                        device_free_bytes: number(event, "device_free"),
                        allocated_bytes: u64::try_from(allocated).unwrap_or(0),
                        by_role,
                        by_unit,
                        ..OutOfMemory::default()
                    });
                }
                _ => {}
            }
            let held_now = u64::try_from(held).unwrap_or(0);
            self.peak_reserved_bytes = self.peak_reserved_bytes.max(held_now);
            let now = u64::try_from(allocated).unwrap_or(0);
            if now > self.peak_allocated_bytes
                || self.by_role.is_empty() && now == self.peak_allocated_bytes
            {
                self.peak_allocated_bytes = now;
                (self.by_role, self.by_unit) = shares(&live, before);
            }
        }
        self.end_by_line = by_line(&live, history);
    }
}

/// Adds replays of the history through the model of the allocator.
fn replays(report: &mut SnapshotReport, history: &History, options: &SnapshotOptions) {
    if history.events.is_empty() {
        if !options.settings.is_empty() {
            report.notes.push(
                "other settings of the allocator are not replayed: the snapshot has no history"
                    .into(),
            );
        }
        return;
    }
    report
        .replays
        .push(replay::recorded(history, options.limit));
    for settings in &options.settings {
        report
            .replays
            .push(replay::under(history, *settings, options.limit));
    }
    if !options.settings.is_empty() && !history.is_complete() {
        report.notes.push(
            "other settings are replayed from the blocks that were live when the history began: fragmentation before that is unknown"
                .into(),
        );
    }
    if history.settings.expandable_segments && !history.is_complete() {
        report.notes.push(
            "expandable segments are replayed from the blocks that were live when the history began, so pages that were mapped without a use then are missing in the replay"
                .into(),
        );
    }
    if history.has_private_pools {
        report.notes.push(
            "private pools of CUDA graphs are replayed as part of the general pools: the history does not distinguish them"
                .into(),
        );
    }
    for (n, oom) in report.out_of_memory.iter_mut().enumerate() {
        oom::complete(oom, history, n, options.limit);
    }
}

/// Returns the allocations that are live at the end by line. Autograd's threads have no frames.
fn by_line(live: &HashMap<u64, Live>, history: &[Value]) -> Vec<OfLine> {
    let mut lines: BTreeMap<String, (u64, usize)> = BTreeMap::new();
    for one in live.values() {
        let all = history[one.event].get("frames");
        let mut all = all.map_or(&[][..], Value::items).iter();
        let Some(frame) = all.find(|f| {
            let file = text(f, "filename");
            file.ends_with(".py") && frames::is_of_user(file)
        }) else {
            continue;
        };
        let number = number(frame, "line").cast_signed();
        let line = frames::line(text(frame, "filename"), number);
        let of = lines.entry(line).or_default();
        *of = (of.0 + one.bytes, of.1 + 1);
    }
    let lines = lines.into_iter();
    let mut all: Vec<OfLine> = lines
        .map(|(line, (bytes, allocations))| OfLine {
            line,
            bytes,
            allocations,
        })
        .collect();
    all.sort_by_key(|l| std::cmp::Reverse(l.bytes));
    all
}

type Shares = (Vec<Share>, Vec<Share>);

fn shares(live: &HashMap<u64, Live>, before: u64) -> Shares {
    let mut roles: BTreeMap<&str, u64> = BTreeMap::new();
    let mut units: BTreeMap<&str, u64> = BTreeMap::new();
    for one in live.values() {
        *roles.entry(one.role).or_default() += one.bytes;
        *units.entry(&one.unit).or_default() += one.bytes;
    }
    if before > 0 {
        roles.insert(BEFORE, before);
        units.insert(BEFORE, before);
    }
    let sorted = |map: BTreeMap<&str, u64>| {
        let mut all: Vec<Share> = map
            .into_iter()
            .map(|(name, bytes)| Share {
                name: name.to_owned(),
                bytes,
            })
            .collect();
        all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        all
    };
    (sorted(roles), sorted(units))
}
