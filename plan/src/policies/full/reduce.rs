//! Reductions: copy-in, reduce-scatter, all-reduce over replicas, accumulation.

use super::{Full, Reducing};
use crate::ir::{Access, BufferId, COMPUTE, Holds, Real, ReduceOp, Role, ShardOp};
use crate::lower::builder::NewBuffer;
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::lower::reduction;
use crate::program::Rule;
use smallvec::{SmallVec, smallvec};

/// Buffers of a reduction bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReduceBuffers {
    input: BufferId,
    output: BufferId,
    /// Sum over the shard axis of the micro-batches so far, if the last one's is reduced over the
    /// replicas.
    partial: Option<BufferId>,
}

impl Full {
    pub(super) fn release_reductions(&mut self, out: &mut Emitter<'_>, limit: usize, rule: Rule) {
        while self.reducing.len() > limit {
            let Some(r) = self.reducing.pop_front() else {
                break;
            };
            if let Some(done) = r.done {
                out.b.wait(rule, done, COMPUTE);
            }
            for buffer in r.buffers {
                out.b.free(Rule::ReduceRelease, buffer);
            }
        }
    }

    /// Issues copy-in and reductions of a bucket whose gradients are complete.
    pub(super) fn reduce(&mut self, out: &mut Emitter<'_>, index: usize) {
        let bucket = self.reductions[index].clone();
        let c = out.inputs.types.comm;
        let ranks = out.inputs.mesh.size(bucket.axis);
        let inner = u64::from(ranks);
        let shard_numel: u64 = bucket
            .params
            .iter()
            .map(|p| self.params[p.index()].shard_numel)
            .sum();
        let unit = self.params[bucket.params[0].index()].unit;
        let ReduceBuffers {
            input,
            output,
            partial,
        } = *self.reduce_buffers[index].get_or_insert_with(|| {
            let once = !out.inputs.scenario.fsdp.reduces(true, false);
            let partial =
                self.comms.outer.is_some() && out.inputs.scenario.train.grad_accum > 1 && once;
            let pool = out.inputs.transient_pool;
            let mut make = |role, numel, name| {
                out.b.buffer(NewBuffer {
                    role,
                    bytes: numel * c.size(),
                    dtype: c,
                    pool,
                    stream: COMPUTE,
                    unit,
                    holds: Holds::Named(name),
                })
            };
            ReduceBuffers {
                input: make(Role::ReduceInput, shard_numel * inner, "reduce bucket"),
                output: make(Role::ReduceOutput, shard_numel, "reduced bucket"),
                partial: partial.then(|| make(Role::ReduceOutput, shard_numel, "partial bucket")),
            }
        });
        out.b.alloc(Rule::ReduceCopyIn, input);
        let grads: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| out.b.whole(self.params[p.index()].grad))
            .collect();
        let whole = out.b.whole(input);
        out.run(KernelLaunch {
            rule: Rule::ReduceCopyIn,
            op: ShardOp::ChunkCat { ranks },
            elements: shard_numel * inner,
            dtype: c,
            stream: COMPUTE,
            reads: &grads,
            writes: &[whole],
        });
        for p in &bucket.params {
            out.b.free(Rule::Grad, self.params[p.index()].grad);
            self.grad_live[p.index()] = false;
        }
        let streams = self.streams;
        let replicas = self.comms.outer;
        // A sum that is not all-reduced yet is kept as it is.
        let keeps = replicas.is_some() && !out.inputs.scenario.fsdp.reduces(true, self.last);
        let target = partial.filter(|_| keeps && self.first).unwrap_or(output);
        out.b.alloc(Rule::Reduce, target);
        // The first complete result of the gradients.
        let fresh = self.first || partial.is_some();
        if fresh && !keeps {
            for p in &bucket.params {
                out.b.alloc(Rule::Reduce, self.params[p.index()].reduced);
            }
        }
        out.b.join(Rule::ReduceFork, COMPUTE, streams.reduce);
        let group = out.inputs.home[bucket.params[0].index()].0;
        // All ranks divide gradients that are sums over expert-parallel ranks (`_ScaledPartial` of
        // SimpleFSDP).
        let mean = 1.0 / f64::from(out.inputs.data_ranks());
        let summed = out.inputs.summed_by_model(group) > 1;
        let given = out.inputs.scenario.fsdp.gradient_scaling_factor;
        let op = if out.inputs.scenario.fsdp.per_token_loss {
            ReduceOp::Sum
        } else if let Some(factor) = given.or(summed.then_some(mean)) {
            let factor = Real(factor);
            out.run(KernelLaunch {
                rule: Rule::Scale,
                op: ShardOp::Scale { factor },
                elements: shard_numel * inner,
                dtype: c,
                stream: streams.reduce,
                reads: &[whole],
                writes: &[whole],
            });
            ReduceOp::Sum
        } else {
            ReduceOp::Avg
        };
        let reduced = out.b.whole(target);
        let over = (self.comms.along(bucket.axis).reduce, streams.reduce);
        reduction::scatter(out, over, op, (whole, reduced));
        let mut buffers: SmallVec<[BufferId; 3]> = smallvec![input];
        let mut tail = streams.reduce;
        let sum = partial.filter(|_| !self.first);
        if keeps {
            if let Some(sum) = sum {
                let sum = out.b.whole(sum);
                reduction::accumulate(out, Rule::ReduceAccumulate, reduced, &[sum], tail);
                buffers.push(output);
            }
        } else {
            if let Some(sum) = sum {
                reduction::accumulate(
                    out,
                    Rule::ReduceAccumulate,
                    out.b.whole(sum),
                    &[reduced],
                    tail,
                );
                buffers.push(sum);
            }
            if let Some(comm) = replicas {
                tail = streams.outer;
                // Every communicator has a separate stream, and both reductions have one dtype
                // (`redistribute(backward_dtype)` of SimpleFSDP).
                reduction::all_reduce(out, comm, (streams.reduce, tail), op, reduced);
            }
            let to: Vec<Access> = bucket
                .params
                .iter()
                .map(|p| out.b.whole(self.params[p.index()].reduced))
                .collect();
            if fresh {
                let kind = ShardOp::MultiCopy;
                let dtype = out.inputs.types.stored();
                out.run(KernelLaunch {
                    rule: Rule::ReduceAccumulate,
                    op: kind,
                    elements: shard_numel,
                    dtype,
                    stream: tail,
                    reads: &[reduced],
                    writes: &to,
                });
            } else {
                reduction::accumulate(out, Rule::ReduceAccumulate, reduced, &to, tail);
            }
            buffers.push(output);
        }
        let done = (tail != COMPUTE).then(|| out.b.record(Rule::Reduce, tail));
        self.reducing.push_back(Reducing { buffers, done });
        self.release_reductions(out, usize::from(done.is_some()), Rule::ReduceGate);
    }
}
