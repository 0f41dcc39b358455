//! Gathers, copy-outs and what resharding keeps or frees.

use super::{Fsdp2, Gather, hooks, tables};
use crate::config::{Prefetch, Reshard};
use crate::ir::{
    Access, COMPUTE, CollectiveKind, GroupId, Holds, Part, PerRank, Pool, ReduceOp, Role, ShardOp,
    UnitId,
};
use crate::lower::builder::NewBuffer;
use crate::lower::context::{Cx, prefetch_targets};
use crate::program::Rule;
use smallvec::smallvec;

impl Fsdp2 {
    /// Issues a group's gather: cast and copy-in, all-gather.
    pub(super) fn issue(&mut self, cx: &mut Cx<'_>, g: GroupId, rule: Rule) {
        let precision = cx.scenario.precision;
        let w = precision.compute;
        let layout = cx.group(g).layout.clone();
        let (full, shard) = (layout.full_numel(), layout.shard_numel());
        hooks(cx, rule, self.groups[g.index()].shards.len());
        // The slices come from the compute stream; nothing but their own gather waits for it.
        if let Some(event) = self.groups[g.index()].resharded.take() {
            for stream in [self.copy_in, self.streams.gather] {
                cx.b.wait(Rule::ReshardGroup, event, stream);
            }
        }
        let kept = self.groups[g.index()].kept.clone();
        let (comm, input_numel, per_rank) = match cx.scenario.fsdp.reshard_after_forward {
            Reshard::Group(s) if !kept.is_empty() => {
                (self.comms.sub, full / u64::from(s), PerRank::SubShard)
            }
            _ => (self.comms.shard, shard, PerRank::Inner),
        };
        let sources = if kept.is_empty() {
            self.groups[g.index()].shards.clone()
        } else {
            kept
        };
        let sources: Vec<Access> = sources.into_iter().map(|id| cx.b.whole(id)).collect();
        let stored = cx.stored_dtype();
        let casts = self.groups[g.index()].kept.is_empty() && stored != w;
        let cast = casts.then(|| {
            let id = cx.transient_on(
                Role::GatherInput,
                input_numel * w.size(),
                w,
                self.copy_in,
                g,
            );
            cx.b.alloc(Rule::CopyIn, id);
            let whole = cx.b.whole(id);
            cx.run(
                Rule::CopyIn,
                ShardOp::MultiCopy,
                input_numel,
                w,
                self.copy_in,
                &sources,
                &[whole],
            );
            id
        });
        let buffer = cx.transient_on(Role::GatherBuffer, full * w.size(), w, self.copy_in, g);
        cx.b.alloc(rule, buffer);
        let output = cx.b.whole(buffer);
        let slice = Access {
            bytes: input_numel * w.size(),
            per_rank,
            ..output
        };
        let from = cast.map_or(sources, |id| vec![cx.b.whole(id)]);
        cx.run(
            Rule::CopyIn,
            ShardOp::MultiCopy,
            input_numel,
            w,
            self.copy_in,
            &from,
            &[slice],
        );
        cx.b.join(Rule::CopyIn, self.copy_in, self.streams.gather);
        if let Some(comm) = comm {
            let parts = smallvec![Part {
                input: slice,
                output
            }];
            cx.b.collective(
                rule,
                self.streams.gather,
                CollectiveKind::AllGather,
                comm,
                ReduceOp::None,
                w,
                parts,
            );
        }
        let done = cx.b.record(rule, self.streams.gather);
        // The cast buffer lives as long as the host call that made it.
        if let Some(id) = cast {
            cx.b.free(Rule::CopyIn, id);
        }
        self.issued[g.index()] = Some(Gather {
            buffer,
            done,
            slice: slice.bytes,
        });
    }

    pub(super) fn unshard(&mut self, cx: &mut Cx<'_>, unit: UnitId, rule: Rule) {
        if self.full[unit.index()] || self.comms.shard.is_none() {
            return;
        }
        let (phase, at) = (cx.b.phase(), cx.b.unit());
        cx.b.at(unit, phase);
        for g in cx.groups_of(unit) {
            if self.issued[g.index()].is_none() {
                self.issue(cx, g, rule);
            }
        }
        cx.b.at(at, phase);
    }

    /// Gates the gather streams on an earlier copy-out and drops its gather buffer.
    pub(super) fn drop_held(&mut self, cx: &mut Cx<'_>) {
        if let Some((buffer, event)) = self.held.take() {
            cx.b.wait(Rule::GatherGate, event, self.copy_in);
            cx.b.wait(Rule::GatherGate, event, self.streams.gather);
            cx.b.free(Rule::GatherGate, buffer);
        }
    }

    pub(super) fn wait_for_unshard(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if std::mem::replace(&mut self.full[unit.index()], true) {
            return;
        }
        for g in cx.groups_of(unit) {
            self.copy_out(cx, g);
        }
    }

    pub(super) fn copy_out(&mut self, cx: &mut Cx<'_>, g: GroupId) {
        let w = cx.compute_dtype();
        let full = self.groups[g.index()].full.clone();
        let numel = cx.group(g).layout.full_numel();
        let Some(gather) = self.issued[g.index()].take() else {
            // One rank: parameters are cast straight from the shards.
            let from: Vec<Access> = self.groups[g.index()]
                .shards
                .iter()
                .map(|id| cx.b.whole(*id))
                .collect();
            let to: Vec<Access> = full
                .iter()
                .map(|id| {
                    cx.b.alloc(Rule::CopyOut, *id);
                    cx.b.whole(*id)
                })
                .collect();
            cx.run(
                Rule::CopyOut,
                ShardOp::MultiCopy,
                numel,
                w,
                COMPUTE,
                &from,
                &to,
            );
            return;
        };
        if !self.backward {
            self.drop_held(cx);
        }
        cx.b.wait(Rule::GatherDone, gather.done, COMPUTE);
        let to: Vec<Access> = full
            .iter()
            .map(|id| {
                cx.b.alloc(Rule::CopyOut, *id);
                cx.b.whole(*id)
            })
            .collect();
        let ranks = (numel * w.size() / gather.slice) as u32;
        let from = cx.b.whole(gather.buffer);
        let shards: Vec<u64> = to.iter().map(|a| a.bytes / u64::from(ranks)).collect();
        let out = ShardOp::CopyOut { ranks };
        tables::run(cx, Rule::CopyOut, out, w, &[from], &to, &shards);
        // Copied out, so copied in (`to_unsharded`).
        self.drop_slices(cx, g);
        let copied = cx.b.record(Rule::CopyOut, COMPUTE);
        self.held = Some((gather.buffer, copied));
        if self.backward {
            self.drop_held(cx);
        }
    }

    pub(super) fn reshard(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        for g in cx.groups_of(unit) {
            for id in self.groups[g.index()].full.clone() {
                cx.b.free(Rule::Reshard, id);
            }
        }
    }

    fn drop_slices(&mut self, cx: &mut Cx<'_>, g: GroupId) {
        for slice in std::mem::take(&mut self.groups[g.index()].kept) {
            cx.b.free(Rule::ReshardGroup, slice);
        }
    }

    /// Frees what a unit holds beyond its shards, the slices of an integer reshard included if no backward gathered them.
    pub(super) fn release(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        self.reshard(cx, unit);
        for g in cx.groups_of(unit) {
            self.drop_slices(cx, g);
            self.groups[g.index()].resharded = None;
        }
    }

    /// What a unit's post-backward frees: all that [`Self::release`] does, unless the next micro-batch is to find the parameters.
    pub(super) fn reshard_after_backward(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        if self.last || cx.scenario.fsdp.reshard_after_backward {
            self.release(cx, unit);
        }
    }

    /// Integer reshard: one parameter after another, clone this rank's slice for the smaller group and free the whole
    /// (`to_sharded_post_forward`).
    pub(super) fn keep_slices(&mut self, cx: &mut Cx<'_>, unit: UnitId, ranks: u32) {
        if !std::mem::replace(&mut self.full[unit.index()], false) {
            return;
        }
        let w = cx.compute_dtype();
        for g in cx.groups_of(unit) {
            let full = self.groups[g.index()].full.clone();
            for (i, id) in full.iter().enumerate() {
                let whole = cx.b.whole(*id);
                let bytes = whole.bytes / u64::from(ranks);
                let param = cx.group(g).params[i];
                let unit = cx.group(g).unit;
                let slice = cx.b.buffer(NewBuffer {
                    role: Role::GatherInput,
                    bytes,
                    dtype: w,
                    pool: Pool::Caching,
                    stream: COMPUTE,
                    unit,
                    holds: Holds::Param(param),
                });
                cx.b.alloc(Rule::ReshardGroup, slice);
                let from = Access {
                    bytes,
                    per_rank: PerRank::SubShard,
                    ..whole
                };
                let to = cx.b.whole(slice);
                cx.run(
                    Rule::ReshardGroup,
                    ShardOp::Copy,
                    bytes / w.size(),
                    w,
                    COMPUTE,
                    &[from],
                    &[to],
                );
                self.groups[g.index()].kept.push(slice);
                cx.b.free(Rule::Reshard, *id);
            }
            let resharded = cx.b.record(Rule::ReshardGroup, COMPUTE);
            self.groups[g.index()].resharded = Some(resharded);
        }
    }

    pub(super) fn prefetch(&mut self, cx: &mut Cx<'_>, unit: UnitId) {
        let fsdp = &cx.scenario.fsdp;
        let (order, rule, implicit) = if self.backward {
            (cx.backward_order.clone(), fsdp.prefetch_backward, 1)
        } else {
            (cx.forward_order.clone(), fsdp.prefetch_forward, 0)
        };
        let Some(at) = order.iter().position(|u| *u == unit) else {
            return;
        };
        for next in prefetch_targets(cx, &order, at, rule, implicit) {
            self.unshard(cx, next, Rule::Prefetch);
        }
    }

    pub(super) fn require(&mut self, cx: &mut Cx<'_>, unit: UnitId, direction: Prefetch) {
        let issued = cx
            .groups_of(unit)
            .iter()
            .any(|g| self.issued[g.index()].is_some());
        if direction == Prefetch::Depth(0)
            && !issued
            && !self.full[unit.index()]
            && self.comms.shard.is_some()
        {
            cx.b.join(Rule::GatherGate, COMPUTE, self.copy_in);
        }
        self.unshard(cx, unit, Rule::Unshard);
        self.wait_for_unshard(cx, unit);
    }
}
