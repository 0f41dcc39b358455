//! Activations in host memory between forward and backward: `OffloadActivations` of torchtune and
//! TRL, with a separate stream for the copies.
//!
//! - Each tensor saved by forward is copied after its last use in forward. The number of copies in
//!   flight is limited: at the limit, computation waits for the oldest copy, and its tensor is
//!   freed.
//! - Backward copies a tensor back before its first use. The host issues the copy early, so that it
//!   overlaps with computation: the copy only waits until the tensors of the operation before the
//!   previous one are free.

use super::buffers::TapeBuffers;
use super::builder::NewBuffer;
use super::emitter::Emitter;
use crate::compile::tape::TapeOp;
use crate::ir::{
    BufferId, COMPUTE, CopyKind, EventId, Operand, Pool, Source, StorageId, StorageRole, StreamId,
};
use crate::program::{Rule, StreamKind};
use std::collections::{HashMap, HashSet, VecDeque};

/// Size in bytes of the smallest tensor that is offloaded (`min_offload_size`).
const SMALLEST: u64 = 1024;
/// Maximum number of tensors with a copy in flight (`max_fwd_stash_size`).
const STASH: usize = 5;

/// Location of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On the device, where forward has written it.
    Device,
    /// On the device, with the copy to the host in flight.
    Leaving,
    /// In host memory.
    Host,
    /// On the device again, copied back.
    Back,
}

/// The buffers of an offloaded tensor.
#[derive(Clone, Copy, Debug)]
struct Moved {
    place: Place,
    host: BufferId,
    back: BufferId,
}

/// See the module documentation.
pub(crate) struct ActivationOffload {
    stream: StreamId,
    moved: HashMap<StorageId, Moved>,
    /// Tensors, by the position of the last forward op that uses them.
    last_use: HashMap<u32, Vec<StorageId>>,
    /// Tensors whose copy to the host may be in flight, with the event at its end.
    leaving: VecDeque<(StorageId, EventId)>,
    /// Tensors that backward has used, with the event at the end of that use.
    spent: Vec<(BufferId, EventId)>,
}

impl ActivationOffload {
    /// Creates the stream and the buffers if the scenario offloads activations.
    pub(crate) fn new(out: &mut Emitter<'_>, buffers: &TapeBuffers) -> Option<Self> {
        if !out.inputs.scenario.train.activation_offload {
            return None;
        }
        let stream = out.b.add_stream(StreamKind::Offload, 0);
        let tape = out.inputs.tape;
        let uses = |ops: &[TapeOp]| -> HashMap<StorageId, u32> {
            let mut last = HashMap::new();
            for (position, op) in (0u32..).zip(ops) {
                for s in storages(operands_of(&tape.operands, op)) {
                    last.insert(s, position);
                }
            }
            last
        };
        let (forward, backward) = (uses(&tape.forward), uses(&tape.backward));
        let freed = tape.forward.iter().filter_map(|op| match op {
            TapeOp::Free(s) => Some(*s),
            _ => None,
        });
        let freed: HashSet<StorageId> = freed.collect();
        let mut new = Self {
            stream,
            moved: HashMap::new(),
            last_use: HashMap::new(),
            leaving: VecDeque::new(),
            spent: Vec::new(),
        };
        for (s, storage) in (0..).map(StorageId).zip(&tape.storages) {
            let Some(&position) = forward.get(&s) else {
                continue;
            };
            let saved = storage.role == StorageRole::Saved && backward.contains_key(&s);
            if !saved || freed.contains(&s) || storage.bytes.0 < SMALLEST || tape.loss == Some(s) {
                continue;
            }
            let device = out.b.program().buffers[buffers.storage(s).index()];
            let mut like = |pool| {
                out.b.buffer(NewBuffer {
                    role: device.role,
                    bytes: device.bytes.0,
                    dtype: device.dtype,
                    pool,
                    stream,
                    unit: device.unit,
                    holds: device.holds,
                })
            };
            let moved = Moved {
                place: Place::Device,
                host: like(Pool::Host),
                back: like(device.pool),
            };
            new.moved.insert(s, moved);
            new.last_use.entry(position).or_default().push(s);
        }
        Some(new)
    }

    /// Returns the current buffer of a tensor, if it is offloaded.
    pub(crate) fn buffer(&self, s: StorageId) -> Option<BufferId> {
        let moved = self.moved.get(&s)?;
        (moved.place == Place::Back).then_some(moved.back)
    }

    /// Returns the tensors whose last use in forward is the op at a position.
    pub(crate) fn leave_after(&self, position: u32) -> Vec<StorageId> {
        self.last_use.get(&position).cloned().unwrap_or_default()
    }

    /// Copies a tensor to the host, and frees the tensors with the oldest copies.
    pub(crate) fn leave(&mut self, out: &mut Emitter<'_>, buffers: &TapeBuffers, s: StorageId) {
        while self.leaving.len() >= STASH {
            let Some((oldest, done)) = self.leaving.pop_front() else {
                break;
            };
            out.b.wait(Rule::Offload, done, COMPUTE);
            out.b.free(Rule::Offload, buffers.storage(oldest));
            self.put(oldest, Place::Host);
        }
        let Some(moved) = self.moved.get(&s).copied() else {
            return;
        };
        out.b.alloc(Rule::Offload, moved.host);
        out.b.join(Rule::Offload, COMPUTE, self.stream);
        let device = buffers.storage(s);
        out.b.copy(
            Rule::Offload,
            CopyKind::D2h,
            device,
            moved.host,
            self.stream,
        );
        let done = out.b.record(Rule::Offload, self.stream);
        self.leaving.push_back((s, done));
        self.put(s, Place::Leaving);
    }

    /// Makes the tensors that a backward op uses available on the device.
    pub(crate) fn require(&mut self, out: &mut Emitter<'_>, operands: &[Operand]) {
        let mut copied = false;
        for s in storages(operands) {
            let Some(moved) = self.moved.get(&s).copied() else {
                continue;
            };
            match moved.place {
                Place::Device | Place::Back => {}
                Place::Leaving => {
                    // The tensor has not been freed yet.
                    if let Some(at) = self.leaving.iter().position(|(x, _)| *x == s)
                        && let Some((_, done)) = self.leaving.remove(at)
                    {
                        out.b.wait(Rule::Offload, done, COMPUTE);
                    }
                    out.b.free(Rule::Offload, moved.host);
                    self.put(s, Place::Device);
                }
                Place::Host => {
                    out.b.alloc(Rule::Offload, moved.back);
                    let (from, to) = (moved.host, moved.back);
                    out.b
                        .copy(Rule::Offload, CopyKind::H2d, from, to, self.stream);
                    out.b.free(Rule::Offload, moved.host);
                    self.put(s, Place::Back);
                    copied = true;
                }
            }
        }
        if copied {
            out.b.join(Rule::Offload, self.stream, COMPUTE);
            self.release(out);
        }
    }

    /// Ends the lifetime of a tensor in backward. Returns false if the caller has to free its
    /// original buffer.
    pub(crate) fn end(&mut self, out: &mut Emitter<'_>, s: StorageId) -> bool {
        let Some(moved) = self.moved.get(&s).copied() else {
            return false;
        };
        if moved.place != Place::Back {
            return false;
        }
        let used = out.b.record(Rule::Offload, COMPUTE);
        self.spent.push((moved.back, used));
        self.put(s, Place::Device);
        true
    }

    /// Frees the tensors that backward has used, on the copy stream.
    pub(crate) fn release(&mut self, out: &mut Emitter<'_>) {
        for (buffer, used) in self.spent.drain(..) {
            out.b.wait(Rule::Offload, used, self.stream);
            out.b.free(Rule::Offload, buffer);
        }
    }

    fn put(&mut self, s: StorageId, place: Place) {
        if let Some(moved) = self.moved.get_mut(&s) {
            moved.place = place;
        }
    }
}

/// Returns the operands of an op.
fn operands_of<'o>(all: &'o [Operand], op: &TapeOp) -> &'o [Operand] {
    match *op {
        TapeOp::Launch { reads, end, .. } => &all[reads as usize..end as usize],
        TapeOp::Collective {
            collective,
            operands,
            ..
        } => &all[operands as usize..(operands + collective.operands()) as usize],
        TapeOp::HostSizes { operand } => &all[operand as usize..=operand as usize],
        _ => &[],
    }
}

/// Returns the storages among operands.
fn storages(operands: &[Operand]) -> impl Iterator<Item = StorageId> {
    operands.iter().filter_map(|o| match o.source {
        Source::Storage(s) => Some(s),
        _ => None,
    })
}
