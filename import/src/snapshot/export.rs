//! Writes the allocations of a program as a memory snapshot that PyTorch's `memory_viz` opens like
//! one of a job.

use crate::pickle::{self, Value};
use shardlab_plan::ir::{BufferId, Pool};
use shardlab_plan::memory::pool::POOL_BASE;
use shardlab_plan::memory::{Memory, ReplayError};
use shardlab_plan::program::{Op, Program, SectionKind};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Number of steps after the first one.
const STEADY: usize = 2;

/// Returns the snapshot of a rank that has run the initialization and three steps, as a pickle.
///
/// Events are in the order in which the host issues them, one per microsecond. Host memory is
/// excluded.
///
/// # Errors
/// Fails if an allocation fails, which does not happen for a valid program.
pub fn export(program: &Program) -> Result<Vec<u8>, ReplayError> {
    let mut export = Export {
        program,
        memory: Memory::new(program, None),
        segments: BTreeMap::new(),
        live: BTreeMap::new(),
        addresses: BTreeMap::new(),
        events: Vec::new(),
    };
    export.note_segments();
    export.section(SectionKind::Init)?;
    export.section(SectionKind::First)?;
    for _ in 0..STEADY {
        export.section(SectionKind::Steady)?;
    }
    Ok(pickle::write(&export.finish()))
}

struct Export<'a> {
    program: &'a Program,
    memory: Memory,
    /// Sizes of segments by address.
    segments: BTreeMap<u64, u64>,
    /// Live buffers by address.
    live: BTreeMap<u64, BufferId>,
    addresses: BTreeMap<BufferId, u64>,
    events: Vec<Value>,
}

impl Export<'_> {
    fn section(&mut self, kind: SectionKind) -> Result<(), ReplayError> {
        let program = self.program;
        let Some(section) = program.section(kind) else {
            return Ok(());
        };
        for i in section.instrs.clone() {
            let instr = shardlab_plan::ir::InstrId(i);
            match program.instrs[i as usize].op {
                Op::Alloc(id) => {
                    let address = self
                        .memory
                        .alloc(program, id)
                        .map_err(|source| ReplayError::Alloc { instr, source })?;
                    if self.is_on_device(id) {
                        self.note_segments();
                        self.live.insert(address, id);
                        self.addresses.insert(id, address);
                        self.event("alloc", address, id);
                    }
                }
                Op::Free(id) => {
                    if !self.memory.free(program, id) {
                        return Err(ReplayError::NotLive {
                            instr,
                            buffer: id.0,
                        });
                    }
                    if let Some(address) = self.addresses.remove(&id) {
                        self.live.remove(&address);
                        self.event("free_requested", address, id);
                        self.event("free_completed", address, id);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns whether a buffer is in device memory.
    fn is_on_device(&self, id: BufferId) -> bool {
        let buffer = &self.program.buffers[id.index()];
        buffer.pool != Pool::Host && buffer.bytes > Bytes::ZERO
    }

    /// Records segments that were allocated or released since the last call.
    fn note_segments(&mut self) {
        let reserved: u64 = self.segments.values().sum();
        if reserved == self.memory.counters().reserved.0 {
            return;
        }
        let mut now: BTreeMap<u64, u64> = self
            .memory
            .caching()
            .segments()
            .into_iter()
            .map(|(address, size)| (address, size.0))
            .collect();
        if let Some(pool) = self.memory.pool_plan() {
            now.insert(POOL_BASE, pool.total().0);
        }
        let before = std::mem::replace(&mut self.segments, now.clone());
        for (address, size) in &before {
            if now.get(address).is_none_or(|n| n < size) {
                self.segment_event("segment_free", *address, *size);
            }
        }
        for (address, size) in &now {
            match before.get(address) {
                // An expandable segment grows.
                Some(known) if known < size => {
                    self.segment_event("segment_map", address + known, size - known);
                }
                Some(known) if known == size => {}
                _ => self.segment_event("segment_alloc", *address, *size),
            }
        }
    }

    fn segment_event(&mut self, action: &str, address: u64, size: u64) {
        self.push(action, address, size, 0, Value::list([]));
    }

    fn event(&mut self, action: &str, address: u64, id: BufferId) {
        let buffer = &self.program.buffers[id.index()];
        let frames = self.frames(id);
        self.push(
            action,
            address,
            buffer.bytes.0,
            i64::from(buffer.stream.0),
            frames,
        );
    }

    fn push(&mut self, action: &str, address: u64, size: u64, stream: i64, frames: Value) {
        let time = self.events.len() as i64;
        self.events.push(Value::dict([
            ("action", Value::from(action)),
            ("addr", Value::from(address)),
            ("size", Value::from(size)),
            ("stream", Value::Int(stream)),
            ("time_us", Value::Int(time)),
            ("frames", frames),
        ]));
    }

    /// Returns the text in place of Python frames: the buffer, then its role and unit.
    fn frames(&self, id: BufferId) -> Value {
        let buffer = &self.program.buffers[id.index()];
        let unit = &self.program.units[buffer.unit.index()].name;
        let frame = |name: &str, file: &str| {
            Value::dict([
                ("name", Value::from(name)),
                ("filename", Value::from(file)),
                ("line", Value::Int(0)),
            ])
        };
        Value::list([
            frame(&self.program.buffer_name(id), unit),
            frame(buffer.role.name(), unit),
        ])
    }

    fn finish(self) -> Value {
        let segments = self
            .segments
            .iter()
            .map(|(address, size)| self.segment(*address, *size));
        let settings = [(
            "expandable_segments",
            Value::Bool(self.program.meta.expandable_segments),
        )];
        Value::dict([
            ("segments", Value::list(segments)),
            ("device_traces", Value::list([Value::list(self.events)])),
            ("allocator_settings", Value::dict(settings)),
            ("external_annotations", Value::list([])),
        ])
    }

    fn segment(&self, address: u64, size: u64) -> Value {
        let end = address.saturating_add(size);
        let mut blocks = Vec::new();
        let (mut at, mut requested, mut allocated) = (address, 0, 0);
        let mut stream = 0;
        for (&start, &id) in self.live.range(address..end) {
            if start > at {
                blocks.push(block(at, start - at, None));
            }
            let buffer = &self.program.buffers[id.index()];
            let bytes = self.memory.block_bytes(id).0.min(end - start);
            stream = i64::from(buffer.stream.0);
            requested += buffer.bytes.0;
            allocated += bytes;
            blocks.push(block(start, bytes, Some((buffer.bytes.0, self.frames(id)))));
            at = start + bytes;
        }
        if at < end {
            blocks.push(block(at, end - at, None));
        }
        Value::dict([
            ("device", Value::Int(0)),
            ("address", Value::from(address)),
            ("total_size", Value::from(size)),
            ("allocated_size", Value::from(allocated)),
            ("active_size", Value::from(allocated)),
            ("requested_size", Value::from(requested)),
            ("stream", Value::Int(stream)),
            (
                "segment_type",
                Value::from(if size <= 2 << 20 { "small" } else { "large" }),
            ),
            (
                "segment_pool_id",
                Value::list([Value::Int(0), Value::Int(0)]),
            ),
            (
                "is_expandable",
                Value::Bool(self.program.meta.expandable_segments),
            ),
            ("frames", Value::list([])),
            ("blocks", Value::list(blocks)),
        ])
    }
}

/// Returns a live block with its requested bytes and frames, or a free one.
fn block(address: u64, size: u64, live: Option<(u64, Value)>) -> Value {
    let state = match live {
        Some(_) => "active_allocated",
        None => "inactive",
    };
    let (requested, frames) = live.unwrap_or_else(|| (0, Value::list([])));
    Value::dict([
        ("address", Value::from(address)),
        ("size", Value::from(size)),
        ("requested_size", Value::from(requested)),
        ("state", Value::from(state)),
        ("frames", frames),
    ])
}
