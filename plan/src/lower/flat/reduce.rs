//! Reductions of the flat policies: gradients sharded at rest, or resting in full.

use super::Flat;
use crate::config::PolicyKind;
use crate::ir::{
    Access, BufferId, COMPUTE, CollectiveKind, CommId, DType, EventId, GroupId, Part, PerRank,
    Pieces, Real, ReduceOp, Role, ShardOp, StreamId,
};
use crate::lower::context::Cx;
use crate::program::Rule;
use crate::shard::mesh;
use smallvec::smallvec;

/// Ends of a group's reduction. Computation waits for each only where it needs what the event stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    /// Nothing reads the full gradient any more: its buffer may be released.
    pub(crate) input_free: EventId,
    /// G holds the sum over both axes: the optimizer may read it.
    pub(crate) complete: EventId,
    /// Buffers in the communication dtype that are left to be freed behind `complete` (policy megatron only, whose queue frees them).
    pub(crate) held: [Option<BufferId>; 2],
}

impl Flat {
    fn scale(cx: &Cx<'_>) -> ShardOp {
        ShardOp::Scale {
            factor: Real(1.0 / f64::from(cx.world())),
        }
    }

    /// How the inner reduction scales, and whether its input must be multiplied first. Megatron-FSDP leaves that to the
    /// collective for every dtype but bf16 (`gradient_reduce_preprocessing`, `gradient_reduce_div_fusion` being its default).
    pub(crate) fn scaling(&self, cx: &Cx<'_>) -> (ReduceOp, bool) {
        let fsdp = &cx.scenario.fsdp;
        let factor = 1.0 / f64::from(cx.world());
        let fused = match fsdp.policy {
            PolicyKind::Megatron => self.c != DType::Bf16,
            PolicyKind::Native | PolicyKind::Fsdp2 => self.c == DType::F32,
        };
        if fsdp.per_token_loss {
            (ReduceOp::Sum, false)
        } else if fsdp.average_in_collective {
            (ReduceOp::Avg, false)
        } else if fused {
            (ReduceOp::PremulSum(factor), false)
        } else if fsdp.policy == PolicyKind::Native && cx.outer == 1 {
            (ReduceOp::Avg, false)
        } else {
            (ReduceOp::Sum, true)
        }
    }

    /// Reduces a full gradient that is sharded at rest. `input` holds S elements in the communication dtype. With
    /// `in_place` the result lands in rank's slice of the input, else in G itself or in a buffer of its own.
    pub(crate) fn reduce_sharded(
        &self,
        cx: &mut Cx<'_>,
        g: GroupId,
        input: Access,
        first: bool,
        last: bool,
        in_place: bool,
    ) -> Reduction {
        let rs = self.streams.reduce;
        cx.b.join(Rule::ReduceFork, COMPUTE, rs);
        self.nan_check(cx, rs, g, input);
        if let (true, Some(comm)) = (cx.scenario.fsdp.copy_engine_reduce, self.comms.reduce) {
            return self.exchange_and_sum(cx, g, input, comm, first, last);
        }
        let (op, scale_first) = self.scaling(cx);
        if scale_first {
            let n = input.bytes / self.c.size();
            let scale = Self::scale(cx);
            cx.run(Rule::Scale, scale, n, self.c, rs, &[input], &[input]);
        }
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        let shard_bytes = input.bytes / self.inner;
        self.visit_for(cx, grad.buffer, !first, rs);
        let direct = first && self.c == self.g && !in_place;
        let (output, temp) = if direct {
            (grad, None)
        } else if in_place {
            (
                Access {
                    bytes: shard_bytes,
                    per_rank: PerRank::Inner,
                    ..input
                },
                None,
            )
        } else {
            let id = cx.transient_on(Role::ReduceOutput, shard_bytes, self.c, rs, g);
            cx.b.alloc(Rule::Reduce, id);
            (cx.b.whole(id), Some(id))
        };
        if let Some(comm) = self.comms.reduce {
            let parts = smallvec![Part { input, output }];
            cx.b.collective(
                Rule::Reduce,
                rs,
                CollectiveKind::ReduceScatter,
                comm,
                op,
                self.c,
                parts,
            );
        }
        if !direct {
            let (kind, reads) = if first {
                (ShardOp::Copy, vec![output])
            } else {
                (ShardOp::Accumulate, vec![output, grad])
            };
            cx.run(
                Rule::ReduceAccumulate,
                kind,
                grad.bytes / self.g.size(),
                self.g,
                rs,
                &reads,
                &[grad],
            );
        }
        if let Some(id) = temp {
            cx.b.free(Rule::Reduce, id);
        }
        self.reduced_shard(cx, g, grad, last)
    }

    /// Reduces a full gradient that is sharded at rest without a reduction: every rank sends each of the others its piece,
    /// which copy engines can do, and adds up what it got. Takes and returns what [`Flat::reduce_sharded`] does.
    fn exchange_and_sum(
        &self,
        cx: &mut Cx<'_>,
        g: GroupId,
        input: Access,
        comm: CommId,
        first: bool,
        last: bool,
    ) -> Reduction {
        let rs = self.streams.reduce;
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        self.visit_for(cx, grad.buffer, !first, rs);
        let apart = !cx.scenario.sums_in_optimizer();
        let whole = if apart {
            let pieces = cx.transient_on(Role::ReduceOutput, input.bytes, self.c, rs, g);
            cx.b.alloc(Rule::Reduce, pieces);
            cx.b.whole(pieces)
        } else {
            grad
        };
        let parts = smallvec![Part {
            input,
            output: whole
        }];
        cx.b.collective(
            Rule::Reduce,
            rs,
            CollectiveKind::AllToAll,
            comm,
            ReduceOp::None,
            self.c,
            parts,
        );
        if apart {
            let op = ShardOp::SumPieces {
                ranks: cx.inner,
                factor: self.factor(cx),
                accumulate: !first,
            };
            let reads = if first {
                vec![whole]
            } else {
                vec![whole, grad]
            };
            let n = grad.bytes / self.g.size();
            cx.run(Rule::ReduceAccumulate, op, n, self.g, rs, &reads, &[grad]);
            cx.b.free(Rule::Reduce, whole.buffer);
        }
        self.reduced_shard(cx, g, grad, last)
    }

    /// What the optimizer gets instead of sums, where it adds up what an exchange has left.
    pub(crate) fn pieces(&self, cx: &Cx<'_>) -> Option<Pieces> {
        cx.scenario.sums_in_optimizer().then(|| Pieces {
            ranks: cx.inner,
            factor: self.factor(cx),
        })
    }

    /// What exchanged pieces are multiplied by before they are added.
    fn factor(&self, cx: &Cx<'_>) -> Real {
        Real(match self.scaling(cx) {
            (ReduceOp::Avg, _) => 1.0 / f64::from(cx.inner),
            (ReduceOp::PremulSum(factor), _) => factor,
            (ReduceOp::Sum | ReduceOp::None, true) => 1.0 / f64::from(cx.world()),
            (ReduceOp::Sum | ReduceOp::None, false) => 1.0,
        })
    }

    /// What follows the reduction of a shard on its stream: checks, the outer axis, which works on G alone.
    fn reduced_shard(&self, cx: &mut Cx<'_>, g: GroupId, grad: Access, last: bool) -> Reduction {
        let rs = self.streams.reduce;
        self.nan_check(cx, rs, g, grad);
        let input_free = cx.b.record(Rule::Reduce, rs);
        let outer = if last {
            self.reduce_outer(cx, g, grad, rs)
        } else {
            None
        };
        let tail = if outer.is_some() {
            self.streams.outer
        } else {
            rs
        };
        self.leave(cx, grad.buffer, true, tail);
        Reduction {
            input_free,
            complete: outer.unwrap_or(input_free),
            held: [None, self.state(g).outer_comm.filter(|_| outer.is_some())],
        }
    }

    /// Reduces a gradient that rests in full (DDP, ZeRO-1), once a step.
    pub(crate) fn reduce_full(&self, cx: &mut Cx<'_>, g: GroupId) -> Reduction {
        let rs = self.streams.reduce;
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        let numel = self.state(g).numel;
        let megatron = cx.scenario.fsdp.policy == PolicyKind::Megatron;
        cx.b.join(Rule::ReduceFork, COMPUTE, rs);
        self.nan_check(cx, rs, g, grad);
        // Without an inner reduction there is nothing to cast for: the outer one casts what it needs itself.
        let cast = (self.c != self.g && self.comms.reduce.is_some()).then(|| {
            let id = cx.transient_on(Role::ReduceInput, numel * self.c.size(), self.c, rs, g);
            cx.b.alloc(Rule::ReduceCopyIn, id);
            let whole = cx.b.whole(id);
            cx.run(
                Rule::ReduceCopyIn,
                ShardOp::Copy,
                numel,
                self.c,
                rs,
                &[grad],
                &[whole],
            );
            id
        });
        let input = cast.map_or(grad, |id| cx.b.whole(id));
        // One rank on the inner axis: the outer reduction averages.
        let (op, scale_first) = match self.comms.reduce {
            Some(_) => self.scaling(cx),
            None => (ReduceOp::None, false),
        };
        if scale_first {
            let scale = Self::scale(cx);
            cx.run(Rule::Scale, scale, numel, self.c, rs, &[input], &[input]);
        }
        let sharded = mesh::optim_sharded(cx.strategy);
        let part = |a: Access| {
            if sharded {
                Access {
                    bytes: a.bytes / self.inner,
                    per_rank: PerRank::Inner,
                    ..a
                }
            } else {
                a
            }
        };
        if let Some(comm) = self.comms.reduce {
            let kind = if sharded {
                CollectiveKind::ReduceScatter
            } else {
                CollectiveKind::AllReduce
            };
            // ZeRO-1 reduces into the rank's own slice of its input: the in-place form NCCL documents.
            let parts = smallvec![Part {
                input,
                output: part(input)
            }];
            cx.b.collective(Rule::Reduce, rs, kind, comm, op, self.c, parts);
        }
        let mine = part(grad);
        if let Some(id) = cast {
            let n = mine.bytes / self.g.size();
            cx.run(
                Rule::ReduceAccumulate,
                ShardOp::Copy,
                n,
                self.g,
                rs,
                &[part(input)],
                &[mine],
            );
            if !megatron {
                cx.b.free(Rule::ReduceRelease, id);
            }
        }
        let input_free = cx.b.record(Rule::Reduce, rs);
        // Megatron-FSDP reduces all of a ZeRO-1 gradient here, with what its rank has not reduced before and nobody reads (a TODO of
        // `_bucket_group_gradient_reduce`): the one thing in which this leaves the source.
        let outer = self.reduce_outer(cx, g, mine, rs);
        Reduction {
            input_free,
            complete: outer.unwrap_or(input_free),
            held: [
                cast.filter(|_| megatron),
                self.state(g).outer_comm.filter(|_| outer.is_some()),
            ],
        }
    }

    /// Reduces what the inner axis has left of a gradient over the outer one, in place, or (policy megatron) in a copy of the
    /// communication dtype that is copied back.
    fn reduce_outer(
        &self,
        cx: &mut Cx<'_>,
        g: GroupId,
        rests: Access,
        after: StreamId,
    ) -> Option<EventId> {
        let comm = self.comms.outer?;
        let stream = self.streams.outer;
        cx.b.join(Rule::OuterReduce, after, stream);
        let cast = |cx: &mut Cx<'_>, from: Access, to: Access, dtype: DType| {
            let n = to.bytes / dtype.size();
            let copy = ShardOp::Copy;
            cx.run(Rule::OuterReduce, copy, n, dtype, stream, &[from], &[to]);
        };
        let (input, dtype) = match self.state(g).outer_comm {
            Some(id) => {
                cx.b.alloc(Rule::OuterReduce, id);
                let whole = cx.b.whole(id);
                cast(cx, rests, whole, self.c);
                (whole, self.c)
            }
            None => (rests, self.g),
        };
        let op = if cx.scenario.fsdp.average_in_collective
            || self.inner == 1 && !cx.scenario.fsdp.per_token_loss
        {
            ReduceOp::Avg
        } else {
            ReduceOp::Sum
        };
        let part = |a: Access| {
            if self.outer_optim {
                Access {
                    bytes: a.bytes / self.outer,
                    per_rank: PerRank::Outer,
                    ..a
                }
            } else {
                a
            }
        };
        let kind = if self.outer_optim {
            CollectiveKind::ReduceScatter
        } else {
            CollectiveKind::AllReduce
        };
        let output = part(input);
        let parts = smallvec![Part { input, output }];
        cx.b.collective(Rule::OuterReduce, stream, kind, comm, op, dtype, parts);
        if self.state(g).outer_comm.is_some() {
            cast(cx, output, part(rests), self.g);
        }
        Some(cx.b.record(Rule::OuterReduce, stream))
    }

    pub(crate) fn nan_check(&self, cx: &mut Cx<'_>, stream: StreamId, g: GroupId, what: Access) {
        if cx.scenario.fsdp.nan_check {
            let flag = cx.transient_on(Role::Temporary, 4, DType::F32, stream, g);
            cx.b.alloc(Rule::NanCheck, flag);
            let out = cx.b.whole(flag);
            cx.run(
                Rule::NanCheck,
                ShardOp::NanCheck,
                what.bytes / 2,
                DType::F32,
                stream,
                &[what],
                &[out],
            );
            let event = cx.b.record(Rule::NanCheck, stream);
            crate::lower::walk::host_sync(cx, Rule::NanCheck, event);
            cx.b.free(Rule::NanCheck, flag);
        }
    }
}
