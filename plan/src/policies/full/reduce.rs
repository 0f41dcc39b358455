//! Reductions: copy-in, reduce-scatter, all-reduce over replicas, accumulation.

use super::buckets::Bucket;
use super::{Full, Reducing};
use crate::ir::{Access, BufferId, COMPUTE, Holds, Real, ReduceOp, Role, ShardOp, StreamId};
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
    /// Sum over the shard axis of the micro-batches so far, if only the last micro-batch is reduced
    /// over the replicas.
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

    /// Issues the copy-in and the reductions of a bucket whose gradients are complete.
    pub(super) fn reduce(&mut self, out: &mut Emitter<'_>, index: usize) {
        let bucket = self.reductions[index].clone();
        let ReduceBuffers {
            input,
            output,
            partial,
        } = self.buffers(out, index);
        let packed = self.pack(out, &bucket, input);
        let streams = self.streams;
        let replicas = self.comms.outer;
        // A sum that is not all-reduced yet stays as it is.
        let keeps = replicas.is_some() && !out.inputs.scenario.fsdp.reduces(true, self.last);
        let target = partial.filter(|_| keeps && self.first).unwrap_or(output);
        out.b.alloc(Rule::Reduce, target);
        // This is the first complete result of the gradients.
        let fresh = self.first || partial.is_some();
        if fresh && !keeps {
            for p in &bucket.params {
                out.b.alloc(Rule::Reduce, self.params[p.index()].reduced);
            }
        }
        out.b.join(Rule::ReduceFork, COMPUTE, streams.reduce);
        let op = self.scale(out, &bucket, packed);
        let reduced = out.b.whole(target);
        let over = (self.comms.along(bucket.axis).reduce, streams.reduce);
        reduction::scatter(out, over, op, (packed, reduced));
        let mut buffers: SmallVec<[BufferId; 3]> = smallvec![input];
        let mut tail = streams.reduce;
        let rule = Rule::ReduceAccumulate;
        let sum = partial.filter(|_| !self.first);
        if keeps {
            if let Some(sum) = sum {
                let sum = out.b.whole(sum);
                reduction::accumulate(out, rule, reduced, &[sum], tail);
                buffers.push(output);
            }
        } else {
            if let Some(sum) = sum {
                let earlier = out.b.whole(sum);
                reduction::accumulate(out, rule, earlier, &[reduced], tail);
                buffers.push(sum);
            }
            if let Some(comm) = replicas {
                tail = streams.outer;
                // Each communicator has a separate stream, and both reductions have the same dtype
                // (`redistribute(backward_dtype)` of SimpleFSDP).
                reduction::all_reduce(out, comm, (streams.reduce, tail), op, reduced);
            }
            self.unpack(out, &bucket, reduced, fresh, tail);
            buffers.push(output);
        }
        let done = (tail != COMPUTE).then(|| out.b.record(Rule::Reduce, tail));
        self.reducing.push_back(Reducing { buffers, done });
        self.release_reductions(out, usize::from(done.is_some()), Rule::ReduceGate);
    }

    /// Returns the buffers of a bucket, allocated on first use.
    fn buffers(&mut self, out: &mut Emitter<'_>, index: usize) -> ReduceBuffers {
        let bucket = &self.reductions[index];
        let c = out.inputs.types.comm;
        let inner = u64::from(out.inputs.mesh.size(bucket.axis));
        let shards = bucket.params.iter();
        let shard_numel: u64 = shards.map(|p| self.params[p.index()].shard_numel).sum();
        let unit = self.params[bucket.params[0].index()].unit;
        *self.reduce_buffers[index].get_or_insert_with(|| {
            let once = !out.inputs.scenario.fsdp.reduces(true, false);
            let partial =
                self.comms.outer.is_some() && out.inputs.scenario.train.grad_accum > 1 && once;
            let mut make = |role, numel: u64, name| {
                out.full_size(role, numel * c.size(), c, unit, Holds::Named(name))
            };
            ReduceBuffers {
                input: make(Role::ReduceInput, shard_numel * inner, "reduce bucket"),
                output: make(Role::ReduceOutput, shard_numel, "reduced bucket"),
                partial: partial.then(|| make(Role::ReduceOutput, shard_numel, "partial bucket")),
            }
        })
    }

    /// Packs the gradients of a bucket into the input of its reduction, and frees them.
    fn pack(&mut self, out: &mut Emitter<'_>, bucket: &Bucket, input: BufferId) -> Access {
        out.b.alloc(Rule::ReduceCopyIn, input);
        let params = bucket.params.iter();
        let grads = params.map(|p| out.b.whole(self.params[p.index()].grad));
        let grads: Vec<Access> = grads.collect();
        let whole = out.b.whole(input);
        let dtype = out.inputs.types.comm;
        out.run(KernelLaunch {
            rule: Rule::ReduceCopyIn,
            op: ShardOp::ChunkCat {
                ranks: out.inputs.mesh.size(bucket.axis),
            },
            elements: whole.bytes / dtype.size(),
            dtype,
            stream: COMPUTE,
            reads: &grads,
            writes: &[whole],
        });
        for p in &bucket.params {
            out.b.free(Rule::Grad, self.params[p.index()].grad);
            self.grad_live[p.index()] = false;
        }
        whole
    }

    /// Returns the reduction operator of the gradients. Scales them first if NCCL does not average
    /// them.
    fn scale(&self, out: &mut Emitter<'_>, bucket: &Bucket, packed: Access) -> ReduceOp {
        let fsdp = &out.inputs.scenario.fsdp;
        let group = out.inputs.home[bucket.params[0].index()].0;
        // Gradients that are sums over expert-parallel ranks are divided by the number of all
        // data-parallel ranks (`_ScaledPartial` of SimpleFSDP).
        let mean = 1.0 / f64::from(out.inputs.data_ranks());
        let summed = out.inputs.summed_by_model(group) > 1;
        let given = fsdp.gradient_scaling_factor;
        if fsdp.per_token_loss {
            return ReduceOp::Sum;
        }
        let Some(factor) = given.or(summed.then_some(mean)) else {
            return ReduceOp::Avg;
        };
        let dtype = out.inputs.types.comm;
        out.run(KernelLaunch {
            rule: Rule::Scale,
            op: ShardOp::Scale {
                factor: Real(factor),
            },
            elements: packed.bytes / dtype.size(),
            dtype,
            stream: self.streams.reduce,
            reads: &[packed],
            writes: &[packed],
        });
        ReduceOp::Sum
    }

    /// Copies a reduced bucket to the gradients of its parameters, or adds it to them.
    fn unpack(
        &self,
        out: &mut Emitter<'_>,
        bucket: &Bucket,
        reduced: Access,
        fresh: bool,
        stream: StreamId,
    ) {
        let params = bucket.params.iter();
        let to = params.map(|p| out.b.whole(self.params[p.index()].reduced));
        let to: Vec<Access> = to.collect();
        if !fresh {
            return reduction::accumulate(out, Rule::ReduceAccumulate, reduced, &to, stream);
        }
        out.run(KernelLaunch {
            rule: Rule::ReduceAccumulate,
            op: ShardOp::MultiCopy,
            elements: reduced.bytes / out.inputs.types.comm.size(),
            dtype: out.inputs.types.stored(),
            stream,
            reads: &[reduced],
            writes: &to,
        });
    }
}
