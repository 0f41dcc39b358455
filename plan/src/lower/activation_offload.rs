//! Activations in host memory between forward and backward: `OffloadActivations` of torchtune and
//! TRL, with a separate stream for the copies.
//!
//! - Each tensor saved by forward is copied after its last use in forward. The number of copies in
//!   flight is limited: at the limit, computation waits for the oldest copy, and its tensor is
//!   freed.
//! - Backward copies a tensor back before its first use. The host issues the copy early, so that it
//!   overlaps with computation: the copy only waits until the tensors of the operation before the
//!   previous one are free.
//!
//! Under `fsdp2`, [`Hooks`] says what else the hooks of autograd copy. There, the first operation
//! of backward that has saved a tensor ends all copies to the host, and the host waits for the
//! device when backward has ended, as `OffloadActivations.__exit__` of TRL does.

mod hooks;

use super::buffers::TapeBuffers;
use super::builder::NewBuffer;
use super::emitter::Emitter;
use crate::compile::tape::TapeOp;
use crate::ir::{
    Access, BufferId, COMPUTE, CopyKind, EventId, Operand, ParamId, Pool, Role, Source, StorageId,
    StorageRole, StreamId,
};
use crate::program::{Rule, StreamKind};
use hooks::Hooks;
use std::collections::{HashMap, HashSet, VecDeque};

/// Size in bytes of the smallest tensor that is offloaded (`min_offload_size`).
const MIN_BYTES: u64 = 1024;
/// Maximum number of tensors with a copy in flight (`max_fwd_stash_size`).
const STASH: u32 = 5;

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

/// What is offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tensor {
    /// A tensor that forward has computed.
    Storage(StorageId),
    /// A copy of a weight's view.
    Weight(ParamId),
}

/// The buffers of an offloaded tensor.
#[derive(Clone, Copy, Debug)]
struct Moved {
    place: Place,
    /// The buffer that is copied to the host.
    device: BufferId,
    host: BufferId,
    back: BufferId,
    /// Whether it also stays on the device.
    kept: bool,
}

/// See the module documentation.
pub(crate) struct ActivationOffload {
    stream: StreamId,
    moved: HashMap<Tensor, Moved>,
    /// Tensors, by the position of the last forward op that uses them.
    last_use: HashMap<u32, Vec<StorageId>>,
    /// Tensors whose copy to the host may be in flight, with the event at its end, and the number
    /// of tensors that were saved before.
    leaving: VecDeque<(Tensor, EventId, u32)>,
    /// Number of tensors that forward has saved.
    saved: u32,
    /// Tensors that backward has used, with the event at the end of that use.
    spent: Vec<(BufferId, EventId)>,
    /// What autograd's hooks copy, if they are modeled.
    hooks: Option<Hooks>,
}

impl ActivationOffload {
    /// Creates the stream and the buffers if the scenario offloads activations.
    pub(crate) fn new(out: &mut Emitter<'_>, buffers: &TapeBuffers) -> Option<Self> {
        if !out.inputs.scenario.train.activation_offload {
            return None;
        }
        let has_hooks = out.inputs.engine.saved_tensor_hooks;
        let mut new = Self {
            stream: out.b.add_stream(StreamKind::Offload, 0),
            moved: HashMap::new(),
            last_use: HashMap::new(),
            leaving: VecDeque::new(),
            saved: 0,
            spent: Vec::new(),
            hooks: has_hooks.then(|| Hooks::of(out.inputs)),
        };
        new.add_storages(out, buffers);
        new.add_weights(out);
        Some(new)
    }

    /// Creates the buffers of the tensors that forward saves.
    fn add_storages(&mut self, out: &mut Emitter<'_>, buffers: &TapeBuffers) {
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
        for (s, storage) in (0..).map(StorageId).zip(&tape.storages) {
            let Some(&position) = forward.get(&s) else {
                continue;
            };
            let hooked = match &self.hooks {
                Some(hooks) => {
                    let logits = storage.role == StorageRole::Logits;
                    (storage.role == StorageRole::Saved || logits) && !hooks.exempt.contains(&s)
                }
                None => storage.role == StorageRole::Saved,
            };
            let saved = hooked && backward.contains_key(&s);
            if !saved || freed.contains(&s) || storage.bytes.0 < MIN_BYTES || tape.loss == Some(s) {
                continue;
            }
            let id = buffers.storage(s);
            let device = out.b.program().buffers[id.index()];
            let mut like = |pool| {
                out.b.buffer(NewBuffer {
                    role: device.role,
                    bytes: device.bytes.0,
                    dtype: device.dtype,
                    pool,
                    stream: self.stream,
                    unit: device.unit,
                    holds: device.holds,
                })
            };
            let moved = Moved {
                place: Place::Device,
                device: id,
                host: like(Pool::Host),
                back: like(device.pool),
                kept: self.hooks.as_ref().is_some_and(|h| h.kept.contains(&s)),
            };
            self.moved.insert(Tensor::Storage(s), moved);
            self.last_use.entry(position).or_default().push(s);
        }
    }

    /// Creates the buffers of the copies of weights.
    fn add_weights(&mut self, out: &mut Emitter<'_>) {
        let all = self.hooks.iter().flat_map(|h| h.weights.values().flatten());
        let mut all: Vec<ParamId> = all.copied().collect();
        all.sort_unstable();
        for p in all {
            let dtype = out.inputs.gathered_type_of(p);
            let bytes = out.inputs.tape.params[p.index()].numel() * dtype.size();
            if bytes < MIN_BYTES {
                continue;
            }
            let mut on = |stream| out.of_param(Role::Temporary, bytes, dtype, stream, p);
            let (device, back) = (on(COMPUTE), on(self.stream));
            let like = out.b.program().buffers[back.index()];
            let host = out.b.buffer(NewBuffer {
                role: Role::Temporary,
                bytes,
                dtype,
                pool: Pool::Host,
                stream: self.stream,
                unit: like.unit,
                holds: like.holds,
            });
            let moved = Moved {
                place: Place::Device,
                device,
                host,
                back,
                kept: false,
            };
            self.moved.insert(Tensor::Weight(p), moved);
        }
    }

    /// Returns the current buffer of a tensor, if it is offloaded.
    pub(crate) fn buffer(&self, s: StorageId) -> Option<BufferId> {
        self.back(Tensor::Storage(s))
    }

    /// Returns the buffer of a weight's copy, if an op of backward reads it in place of the weight.
    pub(crate) fn weight(&self, p: ParamId) -> Option<BufferId> {
        self.back(Tensor::Weight(p))
    }

    fn back(&self, t: Tensor) -> Option<BufferId> {
        let moved = self.moved.get(&t)?;
        (moved.place == Place::Back).then_some(moved.back)
    }

    /// Returns the tensors whose last use in forward is the op at a position.
    pub(crate) fn leave_after(&self, position: u32) -> Vec<StorageId> {
        self.last_use.get(&position).cloned().unwrap_or_default()
    }

    /// Returns the weights that the op of forward at a position saves.
    pub(crate) fn weights_after(&self, position: u32) -> Vec<ParamId> {
        let of = self.hooks.as_ref().and_then(|h| h.weights.get(&position));
        of.cloned().unwrap_or_default()
    }

    /// Counts the weights of norms that the op of forward at a position saves.
    pub(crate) fn count(&mut self, position: u32) {
        let of = self.hooks.as_ref().and_then(|h| h.norms.get(&position));
        self.saved += of.copied().unwrap_or_default();
    }

    /// Copies a tensor to the host, and frees the tensors with the oldest copies.
    pub(crate) fn leave(&mut self, out: &mut Emitter<'_>, s: StorageId) {
        self.copy_out(out, Tensor::Storage(s));
        let role = out.inputs.tape.storages[s.index()].role;
        if let Some(hooks) = &self.hooks {
            self.saved += hooks.again(s, role);
            if role == StorageRole::Logits {
                self.arrive_old(out);
            }
        }
    }

    /// Makes a contiguous copy of a weight's view and copies it to the host. The weight's data
    /// start at a byte of a buffer.
    pub(crate) fn leave_weight(
        &mut self,
        out: &mut Emitter<'_>,
        p: ParamId,
        (buffer, offset): (BufferId, u64),
    ) {
        let Some(moved) = self.moved.get(&Tensor::Weight(p)).copied() else {
            return;
        };
        let to = out.b.whole(moved.device);
        let from = Access {
            buffer,
            offset,
            bytes: to.bytes,
            per_rank: None,
        };
        out.b.alloc(Rule::Offload, moved.device);
        out.copy(Rule::Offload, COMPUTE, from, to);
        self.copy_out(out, Tensor::Weight(p));
    }

    fn copy_out(&mut self, out: &mut Emitter<'_>, t: Tensor) {
        self.arrive_old(out);
        let Some(moved) = self.moved.get(&t).copied() else {
            return;
        };
        let (from, to) = (moved.device, moved.host);
        out.b.alloc(Rule::Offload, to);
        out.b.join(Rule::Offload, COMPUTE, self.stream);
        out.b
            .copy(Rule::Offload, CopyKind::D2h, from, to, self.stream);
        let done = out.b.record(Rule::Offload, self.stream);
        self.leaving.push_back((t, done, self.saved));
        self.saved += 1;
        self.put(t, Place::Leaving);
    }

    /// Ends the copies of tensors after which forward has saved as many as may be in flight.
    fn arrive_old(&mut self, out: &mut Emitter<'_>) {
        while (self.leaving.front()).is_some_and(|(_, _, number)| self.saved >= number + STASH) {
            self.arrive(out);
        }
    }

    /// Ends the oldest copy to the host.
    fn arrive(&mut self, out: &mut Emitter<'_>) {
        let Some((t, done, _)) = self.leaving.pop_front() else {
            return;
        };
        out.b.wait(Rule::Offload, done, COMPUTE);
        if let Some(moved) = self.moved.get(&t).filter(|moved| !moved.kept) {
            out.b.free(Rule::Offload, moved.device);
        }
        self.put(t, Place::Host);
    }

    /// Makes the tensors that a backward op uses available on the device.
    pub(crate) fn require(&mut self, out: &mut Emitter<'_>, operands: &[Operand]) {
        let mut copied = false;
        for t in tensors(operands) {
            if !self.moved.contains_key(&t) {
                continue;
            }
            // The op would read the weight itself if its copy had not arrived.
            if matches!(t, Tensor::Weight(_)) {
                self.arrive_all(out);
            }
            let Some(moved) = self.moved.get(&t).copied() else {
                continue;
            };
            match moved.place {
                Place::Device | Place::Back => {}
                Place::Leaving => {
                    // The tensor has not been freed yet.
                    if let Some(at) = self.leaving.iter().position(|(x, ..)| *x == t)
                        && let Some((_, done, _)) = self.leaving.remove(at)
                    {
                        out.b.wait(Rule::Offload, done, COMPUTE);
                    }
                    out.b.free(Rule::Offload, moved.host);
                    self.put(t, Place::Device);
                }
                Place::Host => {
                    out.b.alloc(Rule::Offload, moved.back);
                    let (from, to) = (moved.host, moved.back);
                    out.b
                        .copy(Rule::Offload, CopyKind::H2d, from, to, self.stream);
                    out.b.free(Rule::Offload, moved.host);
                    self.put(t, Place::Back);
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
        let t = Tensor::Storage(s);
        let Some(moved) = self.moved.get(&t).copied() else {
            return false;
        };
        if moved.place != Place::Back {
            return false;
        }
        if moved.kept {
            out.b.free(Rule::Offload, moved.device);
        }
        self.spend(out, t);
        true
    }

    /// Ends all copies to the host.
    fn arrive_all(&mut self, out: &mut Emitter<'_>) {
        while !self.leaving.is_empty() {
            self.arrive(out);
        }
    }

    /// Called after an op of backward: ends the lifetimes of the weights' copies that it has read,
    /// and all copies to the host if forward has saved any of its operands.
    pub(crate) fn after(&mut self, out: &mut Emitter<'_>, operands: &[Operand]) {
        if self.hooks.is_none() {
            return;
        }
        let consts = &out.inputs.tape.consts;
        let saved = operands.iter().any(|o| match o.source {
            Source::Storage(s) => self.moved.contains_key(&Tensor::Storage(s)),
            Source::Const(c) => consts[c.index()].per_micro_batch,
            _ => false,
        });
        if saved {
            self.arrive_all(out);
        }
        for t in tensors(operands) {
            if matches!(t, Tensor::Weight(_)) && self.back(t).is_some() {
                self.spend(out, t);
            }
        }
    }

    fn spend(&mut self, out: &mut Emitter<'_>, t: Tensor) {
        if let Some(back) = self.back(t) {
            let used = out.b.record(Rule::Offload, COMPUTE);
            self.spent.push((back, used));
            self.put(t, Place::Device);
        }
    }

    /// Frees the tensors that backward has used, on the copy stream.
    pub(crate) fn release(&mut self, out: &mut Emitter<'_>) {
        for (buffer, used) in self.spent.drain(..) {
            out.b.wait(Rule::Offload, used, self.stream);
            out.b.free(Rule::Offload, buffer);
        }
    }

    /// Makes the host wait for both streams when backward has ended.
    pub(crate) fn exit(&self, out: &mut Emitter<'_>) {
        if self.hooks.is_some() {
            for stream in [COMPUTE, self.stream] {
                let done = out.b.record(Rule::Offload, stream);
                out.host_sync(Rule::Offload, done);
            }
        }
    }

    fn put(&mut self, t: Tensor, place: Place) {
        if let Some(moved) = self.moved.get_mut(&t) {
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

/// Returns the storages and parameters among operands.
fn tensors(operands: &[Operand]) -> impl Iterator<Item = Tensor> {
    operands.iter().filter_map(|o| match o.source {
        Source::Storage(s) => Some(Tensor::Storage(s)),
        Source::Param(p) => Some(Tensor::Weight(p)),
        _ => None,
    })
}
