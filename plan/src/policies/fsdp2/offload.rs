//! `CPUOffloadPolicy`: parameters, gradients and optimizer state are in pinned host memory, and the
//! optimizer runs on the CPU.
//!
//! - A gather copies each shard to the device on the copy-in stream, and casts it there
//!   (`all_gather_inputs`).
//! - Reduced gradients are copied to the host on the stream of the last reduction. The host waits
//!   for the copies and adds them to earlier gradients (`foreach_reduce`).
//! - At the end of backward, the host waits for the copies. Then the optimizer runs.

use super::{Fsdp2, GroupState};
use crate::ir::{Access, BufferId, COMPUTE, CopyKind, GroupId, Holds, Pool, Role, StreamId};
use crate::lower::builder::NewBuffer;
use crate::lower::emitter::Emitter;
use crate::lower::reduction;
use crate::program::Rule;

/// Buffers of a group whose state is in host memory.
#[derive(Clone, Debug)]
pub(super) struct HostState {
    /// Each shard on the device before its gather: in its own dtype, and after the cast if there is
    /// one.
    staged: Vec<(BufferId, Option<BufferId>)>,
    /// Gradients in host memory, by trained parameter.
    grads: Vec<BufferId>,
    /// Copies of the gradients of later micro-batches, which are added to `grads`.
    added: Vec<BufferId>,
    /// Whether `grads` holds gradients of earlier micro-batches.
    filled: bool,
}

impl HostState {
    /// Moves the state of a group to host memory.
    pub(super) fn new(
        out: &mut Emitter<'_>,
        g: GroupId,
        state: &GroupState,
        copy_in: StreamId,
        cpu: StreamId,
    ) -> Self {
        let types = out.inputs.types;
        let group = out.inputs.group(g).clone();
        let moments = state.moments.iter().flatten();
        let kept = moments.flat_map(|m| m.buffers().chain(m.extras.into_iter().flatten()));
        let kept: Vec<BufferId> = kept.chain(state.shards.iter().copied()).collect();
        for id in kept {
            out.b.move_to_host(id, cpu);
        }
        let mut staged = Vec::with_capacity(state.shards.len());
        for (&shard, &param) in state.shards.iter().zip(&group.params) {
            let of = out.b.program().buffers[shard.index()];
            let mut on_device =
                |dtype, bytes| out.of_param(Role::GatherInput, bytes, dtype, copy_in, param);
            let plain = on_device(of.dtype, of.bytes.0);
            let numel = of.bytes.0 / of.dtype.size();
            let cast = (of.dtype != types.compute)
                .then(|| on_device(types.compute, numel * types.compute.size()));
            staged.push((plain, cast));
        }
        let stored = types.stored();
        let mut in_host = |role| {
            let items = state.trained.iter().zip(&state.grads.items);
            let made = items.map(|(&i, item)| {
                let local = item.local(0);
                out.b.buffer(NewBuffer {
                    role,
                    bytes: (local.end - local.start) * stored.size(),
                    dtype: stored,
                    pool: Pool::Host,
                    stream: cpu,
                    unit: group.unit,
                    holds: Holds::Param(group.params[i]),
                })
            });
            made.collect::<Vec<_>>()
        };
        Self {
            staged,
            grads: in_host(Role::MainGrad),
            added: in_host(Role::Temporary),
            filled: false,
        }
    }

    /// Returns the gradients of the step, if it has any.
    pub(super) fn gradients(&self) -> Option<&[BufferId]> {
        (self.filled && !self.grads.is_empty()).then_some(&self.grads)
    }

    /// Takes the gradients of the step, which the caller frees.
    pub(super) fn take_gradients(&mut self) -> Vec<BufferId> {
        match std::mem::take(&mut self.filled) {
            true => self.grads.clone(),
            false => Vec::new(),
        }
    }
}

impl Fsdp2 {
    /// Copies the shards of a group to the device and casts them. Returns the inputs of the
    /// copy-in, and the buffers to free afterwards; `None` if the shards are on the device already.
    pub(super) fn stage(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
    ) -> Option<(Vec<Access>, Vec<BufferId>)> {
        let state = &self.groups[g.index()];
        let host = state.host.as_ref()?;
        let (mut ready, mut held) = (Vec::new(), Vec::new());
        for (&shard, &(plain, cast)) in state.shards.iter().zip(&host.staged) {
            out.b.alloc(Rule::Offload, plain);
            out.b
                .copy(Rule::Offload, CopyKind::H2d, shard, plain, self.copy_in);
            let Some(cast) = cast else {
                ready.push(out.b.whole(plain));
                held.push(plain);
                continue;
            };
            out.b.alloc(Rule::CopyIn, cast);
            let (from, to) = (out.b.whole(plain), out.b.whole(cast));
            out.copy(Rule::CopyIn, self.copy_in, from, to);
            out.b.free(Rule::Offload, plain);
            ready.push(to);
            held.push(cast);
        }
        Some((ready, held))
    }

    /// Copies a reduced gradient to host memory and adds it to the gradients of earlier
    /// micro-batches.
    pub(super) fn offload_gradient(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        reduced: BufferId,
        stream: StreamId,
    ) {
        let (Some(cpu), Some(host)) = (self.cpu, self.groups[g.index()].host.clone()) else {
            return;
        };
        let stored = out.inputs.types.stored();
        let to = if host.filled {
            &host.added
        } else {
            &host.grads
        };
        let whole = out.b.whole(reduced);
        let items = &self.groups[g.index()].grads.items;
        let mut copies = Vec::new();
        for (&buffer, item) in to.iter().zip(items) {
            out.b.alloc(Rule::Offload, buffer);
            let target = out.b.whole(buffer);
            if target.bytes > 0 {
                let offset = item.shard_offset * stored.size();
                let from = Access {
                    offset,
                    bytes: target.bytes,
                    ..whole
                };
                copies.push((from, target));
            }
        }
        for (from, target) in copies {
            out.b
                .copy_range(Rule::Offload, CopyKind::D2h, from, target, stream);
        }
        if host.filled {
            // The CPU adds the gradients during backward, so the copies block the host.
            let done = out.b.record(Rule::Offload, stream);
            out.host_sync(Rule::Offload, done);
            out.b.wait(Rule::Offload, done, cpu);
            for (&from, &to) in host.added.iter().zip(&host.grads) {
                let (from, to) = (out.b.whole(from), out.b.whole(to));
                if to.bytes > 0 {
                    reduction::accumulate(out, Rule::Accumulate, from, &[to], cpu);
                }
            }
            let added = out.b.record(Rule::Accumulate, cpu);
            out.host_sync(Rule::Accumulate, added);
            for id in host.added {
                out.b.free(Rule::Offload, id);
            }
        }
        if let Some(state) = &mut self.groups[g.index()].host {
            state.filled = true;
        }
    }

    /// Waits for the CPU optimizer: on the host, which runs it, and on the device, whose next
    /// copies read the updated parameters.
    pub(super) fn after_host_step(&self, out: &mut Emitter<'_>) {
        if let Some(cpu) = self.cpu {
            let done = out.b.record(Rule::Offload, cpu);
            out.host_sync(Rule::Offload, done);
            out.b.wait(Rule::Offload, done, COMPUTE);
        }
    }
}
