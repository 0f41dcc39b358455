//! Reductions of the flat policies, for gradients that are kept sharded or in full.

use super::{Flat, GroupState};
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, CollectiveKind, CommId, DType, EventId, GroupId, Part,
    Pieces, Real, ReduceOp, Role, ShardOp, StreamId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::kernels::KernelLaunch;
use crate::program::Rule;
use crate::shard::placements;
use smallvec::smallvec;

/// Events at the end of a group's reduction. Computation waits for each of them only when it needs
/// what the event guarantees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    /// The full gradient is no longer read, so its buffer may be released.
    pub(crate) input_free: EventId,
    /// G holds the sum over both axes, so the optimizer may read it.
    pub(crate) complete: EventId,
    /// Buffers in the communication dtype that are freed after `complete` (only policy megatron,
    /// whose queue frees them).
    pub(crate) held: [Option<BufferId>; 2],
}

// Note [Factor of gradients]
//
// A gradient is averaged over all P ranks that process different samples, regardless of the ranks
// it is reduced over: the loss of a step is the mean over P. The gradient of an expert arrives as a
// sum over the ranks that send it tokens (`summed_by_model`) and is reduced over the ranks that
// have the same expert. It is still multiplied by 1/P, not by one over the number of ranks that
// reduce it. So an average in a collective needs an additional factor for the ranks that the model
// has summed over. An expert that no other rank has needs no collective, but the same factor.

/// How the inner reduction of a group scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaling {
    /// Operator of the collective.
    pub(crate) op: ReduceOp,
    /// Factor by which a kernel multiplies the input first.
    pub(crate) before: Option<Real>,
}

/// Where a reduction writes this rank's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReduceTo {
    /// To the rank's slice of the input.
    Slice,
    /// To G itself if its dtype and the micro-batch allow that, otherwise to a separate buffer.
    Grad,
    /// To a separate buffer.
    Apart,
}

impl Flat {
    /// Returns how the inner reduction of a group scales; see Note [Factor of gradients]. Counts of
    /// choices are summed.
    pub(crate) fn scaling(&self, inputs: &LoweringInputs<'_>, g: GroupId) -> Scaling {
        if inputs.group(g).router_biases {
            let (op, before) = (ReduceOp::Sum, None);
            return Scaling { op, before };
        }
        let fsdp = &inputs.scenario.fsdp;
        let over_all = Real(1.0 / f64::from(inputs.data_ranks()));
        let summed = inputs.summed_by_model(g);
        let over_summed = (summed > 1).then(|| Real(1.0 / f64::from(summed)));
        let scaling = |op, before| Scaling { op, before };
        let &GroupState { c, sharded, .. } = self.state(g);
        let reduces = sharded.comms.reduce.is_some();
        if let Some(factor) = fsdp.gradient_scaling_factor {
            if reduces && (inputs.engine.premultiplies)(c) {
                scaling(ReduceOp::PremulSum(factor), None)
            } else {
                scaling(ReduceOp::Sum, Some(Real(factor)))
            }
        } else if fsdp.per_token_loss {
            scaling(ReduceOp::Sum, None)
        } else if fsdp.average_in_collective || !reduces {
            scaling(ReduceOp::Avg, over_summed)
        } else if (inputs.engine.premultiplies)(c) {
            scaling(ReduceOp::PremulSum(over_all.0), None)
        } else if (inputs.engine.averages)(inputs.outer) {
            scaling(ReduceOp::Avg, over_summed)
        } else {
            scaling(ReduceOp::Sum, Some(over_all))
        }
    }

    /// Multiplies a gradient in the communication dtype, if its reduction requires that.
    fn scale(&self, out: &mut Emitter<'_>, by: Option<Real>, what: Access, dtype: DType) {
        let Some(factor) = by else { return };
        out.run(KernelLaunch {
            rule: Rule::Scale,
            op: ShardOp::Scale { factor },
            elements: what.bytes / dtype.size(),
            dtype,
            stream: self.streams.reduce,
            reads: &[what],
            writes: &[what],
        });
    }

    /// Reduces a full gradient to its shard. `input` holds S elements in the communication dtype;
    /// `into` is where the result is written first.
    pub(crate) fn reduce_sharded(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        input: Access,
        first: bool,
        last: bool,
        into: ReduceTo,
    ) -> Reduction {
        let rs = self.streams.reduce;
        out.b.join(Rule::ReduceFork, COMPUTE, rs);
        let sharded = self.state(g).sharded;
        if let (true, Some(comm)) = (
            out.inputs.scenario.fsdp.copy_engine_reduce,
            sharded.comms.reduce,
        ) {
            return self.exchange_and_sum(out, g, input, comm, first, last);
        }
        let Scaling { op, before } = self.scaling(out.inputs, g);
        let &GroupState { g: kept, c, .. } = self.state(g);
        self.scale(out, before, input, c);
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        let shard_bytes = input.bytes / sharded.ranks;
        self.fetch_to_device(out, grad.buffer, !first, rs);
        let direct = first && c == kept && into == ReduceTo::Grad;
        // Without a collective, the part is already in place.
        let in_place = into == ReduceTo::Slice || sharded.comms.reduce.is_none();
        let (output, temp) = if direct {
            (grad, None)
        } else if in_place {
            (sharded.part(input), None)
        } else {
            let id = out.transient_on(Role::ReduceOutput, shard_bytes, c, rs, g);
            out.b.alloc(Rule::Reduce, id);
            (out.b.whole(id), Some(id))
        };
        if let Some(comm) = sharded.comms.reduce {
            let parts = smallvec![Part { input, output }];
            out.collective(CollectiveLaunch {
                rule: Rule::Reduce,
                stream: rs,
                kind: CollectiveKind::ReduceScatter,
                comm,
                reduce: op,
                dtype: c,
                parts,
                sent: None,
            });
        }
        if !direct {
            let (kind, reads) = if first {
                (ShardOp::Copy, vec![output])
            } else {
                (ShardOp::Accumulate, vec![output, grad])
            };
            out.run(KernelLaunch {
                rule: Rule::ReduceAccumulate,
                op: kind,
                elements: grad.bytes / kept.size(),
                dtype: kept,
                stream: rs,
                reads: &reads,
                writes: &[grad],
            });
        }
        if let Some(id) = temp {
            out.b.free(Rule::Reduce, id);
        }
        self.reduced_shard(out, g, grad, last)
    }

    /// Reduces a full gradient to its shard without a reducing collective. Each rank sends every
    /// other rank its piece, which copy engines can do, and sums the pieces that it receives.
    /// Arguments and result are those of [`Flat::reduce_sharded`].
    fn exchange_and_sum(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        input: Access,
        comm: CommId,
        first: bool,
        last: bool,
    ) -> Reduction {
        let rs = self.streams.reduce;
        let &GroupState { g: kept, c, .. } = self.state(g);
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        self.fetch_to_device(out, grad.buffer, !first, rs);
        let apart = !out.inputs.sums_in_optimizer(g);
        let whole = if apart {
            let pieces = out.transient_on(Role::ReduceOutput, input.bytes, c, rs, g);
            out.b.alloc(Rule::Reduce, pieces);
            out.b.whole(pieces)
        } else {
            grad
        };
        let parts = smallvec![Part {
            input,
            output: whole
        }];
        out.collective(CollectiveLaunch {
            rule: Rule::Reduce,
            stream: rs,
            kind: CollectiveKind::AllToAll,
            comm,
            reduce: ReduceOp::None,
            dtype: c,
            parts,
            sent: None,
        });
        if apart {
            let op = ShardOp::SumPieces {
                ranks: out.inputs.inner(g),
                factor: self.factor(out.inputs, g),
                accumulate: !first,
            };
            let reads = if first {
                vec![whole]
            } else {
                vec![whole, grad]
            };
            let n = grad.bytes / kept.size();
            out.run(KernelLaunch {
                rule: Rule::ReduceAccumulate,
                op,
                elements: n,
                dtype: kept,
                stream: rs,
                reads: &reads,
                writes: &[grad],
            });
            out.b.free(Rule::Reduce, whole.buffer);
        }
        self.reduced_shard(out, g, grad, last)
    }

    /// Returns the pieces that the optimizer gets instead of sums, if it sums the pieces of an
    /// exchange.
    pub(crate) fn pieces(&self, inputs: &LoweringInputs<'_>, g: GroupId) -> Option<Pieces> {
        inputs.sums_in_optimizer(g).then(|| Pieces {
            ranks: inputs.inner(g),
            factor: self.factor(inputs, g),
        })
    }

    /// Returns the factor of exchanged pieces before they are summed.
    fn factor(&self, inputs: &LoweringInputs<'_>, g: GroupId) -> Real {
        let Scaling { op, before } = self.scaling(inputs, g);
        let of_op = match op {
            ReduceOp::Avg => 1.0 / f64::from(inputs.inner(g)),
            ReduceOp::PremulSum(factor) => factor,
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::None => 1.0,
        };
        Real(of_op * before.map_or(1.0, |by| by.0))
    }

    /// Emits the work after the reduction of a shard on its stream: checks, and the reduction over
    /// the outer axis, which works on G alone.
    fn reduced_shard(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        grad: Access,
        last: bool,
    ) -> Reduction {
        let rs = self.streams.reduce;
        let input_free = out.b.record(Rule::Reduce, rs);
        let outer = if last {
            self.reduce_outer(out, g, grad, rs)
        } else {
            None
        };
        let tail = if outer.is_some() {
            self.streams.outer
        } else {
            rs
        };
        self.evict_to_host(out, grad.buffer, true, tail);
        Reduction {
            input_free,
            complete: outer.unwrap_or(input_free),
            held: [None, self.state(g).outer_comm.filter(|_| outer.is_some())],
        }
    }

    /// Reduces a gradient that is kept in full (DDP, ZeRO-1), once per step.
    pub(crate) fn reduce_full(&self, out: &mut Emitter<'_>, g: GroupId) -> Reduction {
        let rs = self.streams.reduce;
        let grad = self.state(g).grad.expect("only trained groups are reduced");
        let (numel, shards) = (self.state(g).numel, self.state(g).sharded);
        let &GroupState { g: kept, c, .. } = self.state(g);
        let queued = out.inputs.engine.copies_for_comm;
        out.b.join(Rule::ReduceFork, COMPUTE, rs);
        // Without an inner reduction, no cast is needed here: the outer reduction casts its own
        // input.
        let cast = (c != kept && shards.comms.reduce.is_some()).then(|| {
            let id = out.transient_on(Role::ReduceInput, numel * c.size(), c, rs, g);
            out.b.alloc(Rule::ReduceCopyIn, id);
            let whole = out.b.whole(id);
            out.copy(Rule::ReduceCopyIn, rs, grad, whole);
            id
        });
        let input = cast.map_or(grad, |id| out.b.whole(id));
        // The inner axis has one rank, so the outer reduction averages.
        let Scaling { op, before } = self.scaling(out.inputs, g);
        let dtype = if cast.is_some() { c } else { kept };
        self.scale(out, before, input, dtype);
        let sharded = placements::optim_sharded(shards.strategy);
        let part = |a: Access| if sharded { shards.part(a) } else { a };
        if let Some(comm) = shards.comms.reduce {
            let kind = if sharded {
                CollectiveKind::ReduceScatter
            } else {
                CollectiveKind::AllReduce
            };
            // ZeRO-1 reduces to the rank's own slice of its input, the in-place form that NCCL
            // documents.
            let parts = smallvec![Part {
                input,
                output: part(input)
            }];
            out.collective(CollectiveLaunch {
                rule: Rule::Reduce,
                stream: rs,
                kind,
                comm,
                reduce: op,
                dtype: c,
                parts,
                sent: None,
            });
        }
        let mine = part(grad);
        if let Some(id) = cast {
            out.copy(Rule::ReduceAccumulate, rs, part(input), mine);
            if !queued {
                out.b.free(Rule::ReduceRelease, id);
            }
        }
        let input_free = out.b.record(Rule::Reduce, rs);
        // Megatron-FSDP reduces all of a ZeRO-1 gradient here, including parts that its rank has
        // not reduced before and that nothing reads (a TODO in `_bucket_group_gradient_reduce`).
        // This is the only deviation from the source.
        let outer = self.reduce_outer(out, g, mine, rs);
        Reduction {
            input_free,
            complete: outer.unwrap_or(input_free),
            held: [
                cast.filter(|_| queued),
                self.state(g).outer_comm.filter(|_| outer.is_some()),
            ],
        }
    }

    /// Reduces the result of the inner axis over the outer one: in place or, for policy megatron,
    /// in a copy in the communication dtype that is copied back.
    fn reduce_outer(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        reduced: Access,
        after: StreamId,
    ) -> Option<EventId> {
        let comm = self.comms.outer?;
        let stream = self.streams.outer;
        let &GroupState { g: kept, c, .. } = self.state(g);
        out.b.join(Rule::OuterReduce, after, stream);
        let cast = |out: &mut Emitter<'_>, from: Access, to: Access, dtype: DType| {
            let n = to.bytes / dtype.size();
            let copy = ShardOp::Copy;
            out.run(KernelLaunch {
                rule: Rule::OuterReduce,
                op: copy,
                elements: n,
                dtype,
                stream,
                reads: &[from],
                writes: &[to],
            });
        };
        let (input, dtype) = match self.state(g).outer_comm {
            Some(id) => {
                out.b.alloc(Rule::OuterReduce, id);
                let whole = out.b.whole(id);
                cast(out, reduced, whole, c);
                (whole, c)
            }
            None => (reduced, kept),
        };
        let fsdp = &out.inputs.scenario.fsdp;
        let sums = fsdp.per_token_loss || fsdp.gradient_scaling_factor.is_some();
        let averages = fsdp.average_in_collective || self.state(g).sharded.ranks == 1 && !sums;
        let op = if averages && !out.inputs.group(g).router_biases {
            ReduceOp::Avg
        } else {
            ReduceOp::Sum
        };
        let outer_optim = self.state(g).sharded.outer_optim;
        let part = |a: Access| {
            if outer_optim {
                Access {
                    bytes: a.bytes / self.outer,
                    per_rank: Some(AxisId::DP_OUTER.into()),
                    ..a
                }
            } else {
                a
            }
        };
        let kind = if outer_optim {
            CollectiveKind::ReduceScatter
        } else {
            CollectiveKind::AllReduce
        };
        let output = part(input);
        let parts = smallvec![Part { input, output }];
        out.collective(CollectiveLaunch {
            rule: Rule::OuterReduce,
            stream,
            kind,
            comm,
            reduce: op,
            dtype,
            parts,
            sent: None,
        });
        if self.state(g).outer_comm.is_some() {
            cast(out, output, part(reduced), kept);
        }
        Some(out.b.record(Rule::OuterReduce, stream))
    }
}
