//! Gathers, copy-outs, and the buffers that resharding keeps or frees.

use super::{Fsdp2, Gather, tables};
use crate::config::{Prefetch, Reshard};
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, CollectiveKind, DType, GroupId, Part, ReduceOp, Role,
    ShardOp, UnitId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::Emitter;
use crate::lower::inputs::prefetch_targets;
use crate::lower::kernels::KernelLaunch;
use crate::program::Rule;
use crate::shard::Layout;
use smallvec::smallvec;

impl Fsdp2 {
    /// Issues a group's gather: cast, copy-in and all-gather.
    pub(super) fn issue(&mut self, out: &mut Emitter<'_>, g: GroupId, rule: Rule) {
        let w = gather_type(out, g);
        let (full, shard) = gathered_bytes(out, g);
        out.b.hook(rule, self.groups[g.index()].shards.len() as u16);
        // The slices were written on the compute stream; only their own gather waits for it.
        if let Some(event) = self.groups[g.index()].resharded.take() {
            for stream in [self.copy_in, self.streams.gather] {
                out.b.wait(Rule::ReshardGroup, event, stream);
            }
        }
        let kept = self.groups[g.index()].kept.clone();
        let (comm, bytes, per_rank) = match out.inputs.scenario.fsdp.reshard_after_forward {
            Reshard::Group(s) if !kept.is_empty() => {
                let comm = self.subs[out.inputs.group(g).unit.index()];
                (comm, full / u64::from(s), Some(AxisId::SUB_SHARD))
            }
            _ => {
                let axis = out.inputs.shard_axis(g);
                (self.comms.along(axis).gather, shard, Some(axis))
            }
        };
        let sources = if kept.is_empty() {
            self.groups[g.index()].shards.clone()
        } else {
            kept
        };
        let sources: Vec<Access> = sources.into_iter().map(|id| out.b.whole(id)).collect();
        let (from, held) = if !self.groups[g.index()].kept.is_empty() {
            (sources, Vec::new())
        } else if let Some(staged) = self.stage(out, g) {
            staged
        } else {
            self.cast(out, g, sources)
        };
        let mut buffer = out.transient_on(Role::GatherBuffer, full, w, self.copy_in, g);
        if self.held.is_some_and(|(held, _)| held == buffer) {
            // The unit was also the last one used, and its buffer is held until the next copy-out.
            let again = &mut self.groups[g.index()].gathered_again;
            buffer = *again.get_or_insert_with(|| out.b.twin(buffer));
        }
        out.b.alloc(rule, buffer);
        let output = out.b.whole(buffer);
        let slice = Access {
            bytes,
            per_rank: per_rank.map(Into::into),
            ..output
        };
        out.run(KernelLaunch {
            rule: Rule::CopyIn,
            op: ShardOp::MultiCopy,
            elements: bytes / w.size(),
            dtype: w,
            stream: self.copy_in,
            reads: &from,
            writes: &[slice],
        });
        out.b.join(Rule::CopyIn, self.copy_in, self.streams.gather);
        if let Some(comm) = comm {
            let parts = smallvec![Part {
                input: slice,
                output
            }];
            out.collective(CollectiveLaunch {
                rule,
                stream: self.streams.gather,
                kind: CollectiveKind::AllGather,
                comm,
                reduce: ReduceOp::None,
                dtype: w,
                parts,
                sent: None,
            });
        }
        let done = out.b.record(rule, self.streams.gather);
        // Results of casts live until the host call that allocated them returns.
        for id in held {
            out.b.free(Rule::CopyIn, id);
        }
        self.issued[g.index()] = Some(Gather {
            buffer,
            done,
            slice: slice.bytes,
        });
    }

    /// Casts the shards that the model reads in another dtype: 8-bit shards into separate buffers,
    /// all others into one buffer. Returns the inputs of the copy-in, and the buffers that live
    /// until then. Shards in the model's dtype are not cast (`use_foreach_copy`).
    fn cast(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        mut shards: Vec<Access>,
    ) -> (Vec<Access>, Vec<BufferId>) {
        let mut held = self.cast_float8(out, g, &mut shards);
        let w = out.inputs.types.compute;
        let program = out.b.program();
        let dtype = |a: &Access| program.buffers[a.buffer.index()].dtype;
        let size = |a: &Access| a.bytes / dtype(a).size() * w.size();
        let is_cast = |a: &Access| dtype(a) != w && !dtype(a).is_float8();
        let cast: Vec<bool> = shards.iter().map(is_cast).collect();
        let pairs = || shards.iter().copied().zip(&cast);
        let sources: Vec<Access> = pairs().filter(|(_, c)| **c).map(|(a, _)| a).collect();
        if sources.is_empty() {
            return (shards, held);
        }
        let sizes: Vec<u64> = shards.iter().map(size).collect();
        let bytes = sources.iter().map(size).sum();
        let id = out.transient_on(Role::GatherInput, bytes, w, self.copy_in, g);
        out.b.alloc(Rule::CopyIn, id);
        let whole = out.b.whole(id);
        out.run(KernelLaunch {
            rule: Rule::CopyIn,
            op: ShardOp::MultiCopy,
            elements: bytes / w.size(),
            dtype: w,
            stream: self.copy_in,
            reads: &sources,
            writes: &[whole],
        });
        held.push(id);
        if sources.len() == shards.len() {
            return (vec![whole], held);
        }
        let mut offset = 0;
        let parts = pairs().zip(sizes).map(|((shard, cast), bytes)| {
            if !cast {
                return shard;
            }
            let part = Access {
                offset,
                bytes,
                ..whole
            };
            offset += bytes;
            part
        });
        (parts.collect(), held)
    }

    pub(super) fn unshard(&mut self, out: &mut Emitter<'_>, unit: UnitId, rule: Rule) {
        if self.full[unit.index()] {
            return;
        }
        out.within_unit(unit, |out| {
            for g in out.inputs.groups_of(unit) {
                if self.issued[g.index()].is_none() && out.inputs.inner(g) > 1 {
                    self.issue(out, g, rule);
                }
            }
        });
    }

    /// Makes the gather streams wait for an earlier copy-out and drops its gather buffer; see
    /// Note [Unshard gate].
    pub(super) fn drop_held(&mut self, out: &mut Emitter<'_>) {
        if let Some((buffer, event)) = self.held.take() {
            out.b.wait(Rule::GatherGate, event, self.copy_in);
            out.b.wait(Rule::GatherGate, event, self.streams.gather);
            out.b.free(Rule::GatherGate, buffer);
        }
    }

    pub(super) fn wait_for_unshard(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if std::mem::replace(&mut self.full[unit.index()], true) {
            return;
        }
        for g in out.inputs.groups_of(unit) {
            self.copy_out(out, g);
        }
    }

    pub(super) fn copy_out(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let w = gather_type(out, g);
        let full = self.groups[g.index()].full.clone();
        let (bytes, _) = gathered_bytes(out, g);
        let Some(gather) = self.issued[g.index()].take() else {
            return self.copy_alone(out, g);
        };
        if !self.backward {
            self.drop_held(out);
        }
        out.b.wait(Rule::GatherDone, gather.done, COMPUTE);
        let to: Vec<Access> = full.iter().map(|id| self.storage(out, *id)).collect();
        let ranks = (bytes / gather.slice) as u32;
        let from = out.b.whole(gather.buffer);
        let shards: Vec<u64> = to.iter().map(|a| a.bytes / u64::from(ranks)).collect();
        let op = ShardOp::CopyOut { ranks };
        tables::run(out, Rule::CopyOut, op, w, &[from], &to, &shards);
        // The slices were copied in and gathered, so they are freed (`to_unsharded`).
        self.drop_slices(out, g);
        let copied = out.b.record(Rule::CopyOut, COMPUTE);
        self.held = Some((gather.buffer, copied));
        if self.backward {
            self.drop_held(out);
        }
    }

    /// Copies the parameters of a group that has one rank, each in the dtype of its gather. The
    /// result of a cast lives until the next parameter's cast exists (`all_gather_input` in
    /// `wait_for_unshard`).
    fn copy_alone(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let group = &self.groups[g.index()];
        let pairs = (group.shards.iter().copied()).zip(group.full.iter().copied());
        let pairs: Vec<(BufferId, BufferId)> = pairs.collect();
        let params = out.inputs.group(g).params.clone();
        out.b.hook(Rule::Unshard, params.len() as u16);
        let mut held = None;
        for (&param, (shard, full)) in params.iter().zip(pairs) {
            let program = out.b.program();
            let dtype = program.buffers[full.index()].dtype;
            let mut from = out.b.whole(shard);
            if program.buffers[shard.index()].dtype != dtype {
                let bytes = program.buffers[full.index()].bytes.0;
                let cast = out.of_param(Role::GatherInput, bytes, dtype, COMPUTE, param);
                out.b.alloc(Rule::CopyOut, cast);
                let to = out.b.whole(cast);
                out.copy(Rule::CopyOut, COMPUTE, from, to);
                if let Some(last) = held.replace(cast) {
                    out.b.free(Rule::CopyOut, last);
                }
                from = to;
            }
            let to = self.storage(out, full);
            out.copy(Rule::CopyOut, COMPUTE, from, to);
        }
        if let Some(last) = held {
            out.b.free(Rule::CopyOut, last);
        }
    }

    /// Returns the range of a full parameter and allocates its storage (`alloc_storage`), only once
    /// if the storage is kept.
    fn storage(&mut self, out: &mut Emitter<'_>, id: BufferId) -> Access {
        let rule = Rule::CopyOut;
        if !out.inputs.scenario.fsdp.keep_unsharded_storage {
            out.b.alloc(rule, id);
        } else if self.stored.insert(id) {
            out.b.first_only(|b| b.alloc(rule, id));
        }
        out.b.whole(id)
    }

    pub(super) fn reshard(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        for g in out.inputs.groups_of(unit) {
            for id in self.groups[g.index()].full.clone() {
                free_storage(out, id);
            }
        }
    }

    fn drop_slices(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        for slice in std::mem::take(&mut self.groups[g.index()].kept) {
            out.b.free(Rule::ReshardGroup, slice);
        }
    }

    /// Frees the buffers that a unit holds in addition to its shards, including slices of an
    /// integer reshard that no backward has gathered.
    pub(super) fn release(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        self.reshard(out, unit);
        for g in out.inputs.groups_of(unit) {
            self.drop_slices(out, g);
            self.groups[g.index()].resharded = None;
        }
    }

    /// Frees the buffers of a unit after its backward, as [`Self::release`] does, unless the
    /// parameters stay full for the next micro-batch.
    pub(super) fn reshard_after_backward(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        if self.last || out.inputs.scenario.fsdp.reshard_after_backward {
            self.release(out, unit);
        }
    }

    /// Applies integer reshard: for one parameter after another, clones this rank's slice for the
    /// smaller group and frees the full parameter (`to_sharded_post_forward`).
    pub(super) fn keep_slices(&mut self, out: &mut Emitter<'_>, unit: UnitId, ranks: u32) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        let w = out.inputs.types.compute;
        for g in out.inputs.groups_of(unit) {
            let full = self.groups[g.index()].full.clone();
            for (i, id) in full.iter().enumerate() {
                let bytes = out.b.whole(*id).bytes / u64::from(ranks);
                let param = out.inputs.group(g).params[i];
                let slice = out.of_param(Role::GatherInput, bytes, w, COMPUTE, param);
                out.keep_slice(*id, slice);
                self.groups[g.index()].kept.push(slice);
                free_storage(out, *id);
            }
            let resharded = out.b.record(Rule::ReshardGroup, COMPUTE);
            self.groups[g.index()].resharded = Some(resharded);
        }
    }

    pub(super) fn prefetch(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let (order, implicit) = if self.backward {
            (&out.inputs.backward_uses, 1)
        } else {
            (&out.inputs.forward_uses, 0)
        };
        let order = out.uses.rest_of(order, unit);
        let pass = (self.micro_batch, self.backward);
        let targets = prefetch_targets(out.inputs, order, pass, implicit);
        for next in targets {
            self.unshard(out, next, Rule::Prefetch);
        }
    }

    /// Gathers the units that a unit prefetches in forward while its forward runs again. Their
    /// backward is over, so nothing uses the gathered parameters before the end of backward.
    pub(super) fn prefetch_again(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let order = &out.inputs.forward_uses;
        let at = order.iter().rposition(|u| *u == unit);
        let later = at.map_or(&[][..], |at| &order[at..]);
        for next in prefetch_targets(out.inputs, later, (self.micro_batch, false), 0) {
            self.unshard(out, next, Rule::RecomputePrefetch);
        }
    }

    /// Frees prefetched units that were not used (`finalize_backward`); see Note [Skipped blocks].
    pub(super) fn drop_untouched(&mut self, out: &mut Emitter<'_>) {
        for g in out.inputs.group_ids() {
            if let Some(gather) = self.issued[g.index()].take() {
                out.b.wait(Rule::FinalFence, gather.done, COMPUTE);
                out.b.free(Rule::FinalFence, gather.buffer);
            }
        }
    }

    pub(super) fn require(&mut self, out: &mut Emitter<'_>, unit: UnitId, direction: Prefetch) {
        let issued = out
            .inputs
            .groups_of(unit)
            .iter()
            .any(|g| self.issued[g.index()].is_some());
        if direction == Prefetch::Depth(0)
            && !issued
            && !self.full[unit.index()]
            && out.inputs.ranks() > 1
        {
            out.b.join(Rule::GatherGate, COMPUTE, self.copy_in);
        }
        self.unshard(out, unit, Rule::Unshard);
        self.wait_for_unshard(out, unit);
    }
}

/// Returns the dtype of a group's gather: that of its parameters, or bytes if their dtypes differ.
fn gather_type(out: &Emitter<'_>, g: GroupId) -> DType {
    let params = out.inputs.group(g).params.iter();
    let mut types = params.map(|p| out.inputs.gathered_type_of(*p));
    let first = types.next().unwrap_or(out.inputs.types.compute);
    match types.all(|t| t == first) {
        true => first,
        false => DType::U8,
    }
}

/// Returns the bytes of a group's gather, and of one rank's part of it.
fn gathered_bytes(out: &Emitter<'_>, g: GroupId) -> (u64, u64) {
    let Layout::PerParam(layout) = &out.inputs.group(g).layout else {
        return (0, 0);
    };
    let items = layout.items.iter();
    let bytes = items.map(|i| i.shard_numel * out.inputs.gathered_type_of(i.param).size());
    let shard = bytes.sum::<u64>();
    (shard * u64::from(layout.shards), shard)
}

/// Frees a full parameter (`free_unsharded_param`), unless its storage is kept.
fn free_storage(out: &mut Emitter<'_>, id: BufferId) {
    if !out.inputs.scenario.fsdp.keep_unsharded_storage {
        out.b.free(Rule::Reshard, id);
    }
}
