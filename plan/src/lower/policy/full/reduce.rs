//! Reductions: copy-in, reduce-scatter, accumulation, all-reduce over replicas.

use super::{Full, InFlight, stored};
use crate::lower::builder::NewBuffer;
use crate::lower::context::Cx;
use crate::program::{Access, COMPUTE, CollectiveKind, Holds, Part, ReduceOp, Role, Rule, ShardOp};
use crate::units::DType;
use smallvec::smallvec;

impl Full {
    pub(super) fn release_reductions(&mut self, cx: &mut Cx<'_>, limit: usize, rule: Rule) {
        while self.reducing.len() > limit {
            let Some((r, temp)) = self.reducing.pop_front() else {
                break;
            };
            if self.reduce != COMPUTE {
                cx.b.wait(rule, r.done, COMPUTE);
            }
            cx.b.free(Rule::ReduceRelease, r.buffer);
            if let Some(temp) = temp {
                cx.b.free(Rule::ReduceRelease, temp);
            }
        }
    }

    /// Copy-in and reduce-scatter of a bucket whose gradients are complete.
    pub(super) fn reduce(&mut self, cx: &mut Cx<'_>, index: usize) {
        let bucket = self.reductions[index].clone();
        let precision = cx.scenario.precision;
        let (c, stored) = (precision.comm_grads, stored(cx));
        let inner = u64::from(cx.inner);
        let shard_numel: u64 = bucket
            .params
            .iter()
            .map(|p| self.params[p.index()].shard_numel)
            .sum();
        let unit = self.params[bucket.params[0].index()].unit;
        let (input, output) = match self.reduce_buffers[index] {
            Some(ids) => ids,
            None => {
                let pool = cx.transient_pool;
                let mut make = |role, numel, dtype: DType, name| {
                    cx.b.buffer(NewBuffer {
                        role,
                        bytes: numel * dtype.size(),
                        dtype,
                        pool,
                        stream: COMPUTE,
                        unit,
                        holds: Holds::Named(name),
                    })
                };
                let ids = (
                    make(Role::ReduceInput, shard_numel * inner, c, "reduce bucket"),
                    make(Role::ReduceOutput, shard_numel, c, "reduced bucket"),
                );
                self.reduce_buffers[index] = Some(ids);
                ids
            }
        };
        cx.b.alloc(Rule::ReduceCopyIn, input);
        let grads: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| cx.b.whole(self.params[p.index()].grad))
            .collect();
        let whole = cx.b.whole(input);
        cx.run(
            Rule::ReduceCopyIn,
            ShardOp::ChunkCat { ranks: cx.inner },
            shard_numel * inner,
            c,
            COMPUTE,
            &grads,
            &[whole],
        );
        for p in &bucket.params {
            cx.b.free(Rule::Grad, self.params[p.index()].grad);
            self.grad_live[p.index()] = false;
        }
        cx.b.alloc(Rule::Reduce, output);
        let out = cx.b.whole(output);
        if self.first {
            for p in &bucket.params {
                cx.b.alloc(Rule::Reduce, self.params[p.index()].reduced);
            }
        }
        cx.b.join(Rule::ReduceFork, COMPUTE, self.reduce);
        let op = if cx.scenario.fsdp.per_token_loss {
            ReduceOp::Sum
        } else {
            ReduceOp::Avg
        };
        match self.comms.reduce {
            Some(comm) => {
                let parts = smallvec![Part {
                    input: whole,
                    output: out
                }];
                cx.b.collective(
                    Rule::Reduce,
                    self.reduce,
                    CollectiveKind::ReduceScatter,
                    comm,
                    op,
                    c,
                    parts,
                );
            }
            None => cx.run(
                Rule::Reduce,
                ShardOp::Copy,
                shard_numel,
                c,
                self.reduce,
                &[whole],
                &[out],
            ),
        }
        let to: Vec<Access> = bucket
            .params
            .iter()
            .map(|p| cx.b.whole(self.params[p.index()].reduced))
            .collect();
        let (kind, reads) = if self.first {
            (ShardOp::MultiCopy, vec![out])
        } else {
            (
                ShardOp::Accumulate,
                std::iter::once(out).chain(to.iter().copied()).collect(),
            )
        };
        cx.run(
            Rule::ReduceAccumulate,
            kind,
            shard_numel,
            stored,
            self.reduce,
            &reads,
            &to,
        );
        if let Some(comm) = self.comms.outer.filter(|_| self.last) {
            // Parameter order, so that the parts of a launch follow one rule on every rank.
            let mut to = to;
            to.sort_unstable_by_key(|a| a.buffer);
            let parts = to
                .iter()
                .map(|a| Part {
                    input: *a,
                    output: *a,
                })
                .collect();
            cx.b.collective(
                Rule::OuterReduce,
                self.reduce,
                CollectiveKind::AllReduce,
                comm,
                op,
                stored,
                parts,
            );
        }
        let done = cx.b.record(Rule::Reduce, self.reduce);
        self.reducing.push_back((
            InFlight {
                buffer: input,
                done,
                bytes: whole.bytes,
            },
            Some(output),
        ));
        self.release_reductions(
            cx,
            if self.reduce == COMPUTE { 0 } else { 1 },
            Rule::ReduceGate,
        );
    }
}
