//! Reductions: copy-in, reduce-scatter, all-reduce over replicas, accumulation.

use super::Fsdp2;
use crate::lower::context::Cx;
use crate::program::{
    Access, BufferId, COMPUTE, CollectiveKind, GroupId, HostWorkKind, Part, ReduceOp, Role, Rule,
    ShardOp,
};
use smallvec::smallvec;

impl Fsdp2 {
    pub(super) fn recycle(&mut self, cx: &mut Cx<'_>, limit: usize, rule: Rule) {
        while self.pending.len() > limit {
            let Some((buffer, event)) = self.pending.pop_front() else {
                break;
            };
            if self.streams.reduce != COMPUTE {
                cx.b.wait(rule, event, COMPUTE);
            }
            cx.b.free(Rule::ReduceRelease, buffer);
        }
    }

    pub(super) fn reduce(&mut self, cx: &mut Cx<'_>, g: GroupId) {
        let group = cx.group(g).clone();
        let precision = cx.scenario.precision;
        let (c, stored) = (
            precision.comm_grads,
            precision.main_params.unwrap_or(precision.compute),
        );
        let (full, shard) = (group.layout.full_numel(), group.layout.shard_numel());
        cx.b.host(Rule::Reduce, HostWorkKind::Hook, 1);
        cx.b.host(
            Rule::Reduce,
            HostWorkKind::HookParam,
            group.params.len() as u16,
        );
        self.recycle(cx, self.in_flight - 1, Rule::ReduceGate);
        let input = cx.transient_on(Role::ReduceInput, full * c.size(), c, COMPUTE, g);
        cx.b.alloc(Rule::ReduceCopyIn, input);
        let grads: Vec<BufferId> = group
            .params
            .iter()
            .filter_map(|p| self.grads.take(*p))
            .collect();
        let from: Vec<Access> = grads.iter().map(|id| cx.b.whole(*id)).collect();
        let whole = cx.b.whole(input);
        let ranks = cx.inner;
        cx.run(
            Rule::ReduceCopyIn,
            ShardOp::ChunkCat { ranks },
            full,
            c,
            COMPUTE,
            &from,
            &[whole],
        );
        for id in grads {
            cx.b.free(Rule::Grad, id);
        }
        cx.b.join(Rule::ReduceFork, COMPUTE, self.streams.reduce);
        let rs = self.streams.reduce;
        let first = self.groups[g.index()].reduced.is_none();
        // The output of the first reduction becomes the gradient; later ones are added to it.
        let role = if first && c == stored {
            Role::MainGrad
        } else {
            Role::ReduceOutput
        };
        let output = cx.transient_on(role, shard * c.size(), c, rs, g);
        cx.b.alloc(Rule::Reduce, output);
        let out = cx.b.whole(output);
        if let Some(comm) = self.comms.reduce {
            let op = self.op(cx, true);
            let parts = smallvec![Part {
                input: whole,
                output: out
            }];
            cx.b.collective(
                Rule::Reduce,
                rs,
                CollectiveKind::ReduceScatter,
                comm,
                op,
                c,
                parts,
            );
        } else {
            cx.run(Rule::Reduce, ShardOp::Copy, shard, c, rs, &[whole], &[out]);
        }
        let mut done = cx.b.record(Rule::Reduce, rs);
        let mut tail = rs;
        if self.last
            && let Some(comm) = self.comms.outer
            && first
        {
            cx.b.join(Rule::OuterReduce, rs, self.streams.outer);
            let op = self.op(cx, false);
            let parts = smallvec![Part {
                input: out,
                output: out
            }];
            cx.b.collective(
                Rule::OuterReduce,
                self.streams.outer,
                CollectiveKind::AllReduce,
                comm,
                op,
                c,
                parts,
            );
            tail = self.streams.outer;
        }
        if role == Role::ReduceOutput {
            let grad = match self.groups[g.index()].reduced {
                Some(id) => id,
                None => {
                    let id =
                        cx.transient_on(Role::MainGrad, shard * stored.size(), stored, tail, g);
                    cx.b.alloc(Rule::ReduceAccumulate, id);
                    self.groups[g.index()].reduced = Some(id);
                    id
                }
            };
            let to = cx.b.whole(grad);
            let (kind, reads) = if first {
                (ShardOp::Copy, vec![out])
            } else {
                (ShardOp::Accumulate, vec![out, to])
            };
            cx.run(
                Rule::ReduceAccumulate,
                kind,
                shard,
                stored,
                tail,
                &reads,
                &[to],
            );
            if tail != rs {
                cx.b.join(Rule::ReduceAccumulate, tail, rs);
            }
            cx.b.free(Rule::Reduce, output);
            if self.last
                && !first
                && let Some(comm) = self.comms.outer
            {
                cx.b.join(Rule::OuterReduce, tail, self.streams.outer);
                let op = self.op(cx, false);
                let parts = smallvec![Part {
                    input: to,
                    output: to
                }];
                cx.b.collective(
                    Rule::OuterReduce,
                    self.streams.outer,
                    CollectiveKind::AllReduce,
                    comm,
                    op,
                    stored,
                    parts,
                );
                tail = self.streams.outer;
            }
        } else {
            self.groups[g.index()].reduced = Some(output);
        }
        if tail != rs {
            // The buffer goes back to the reduce stream's list at the end of the step.
            done = cx.b.record(Rule::OuterReduce, tail);
            cx.b.wait(Rule::OuterReduce, done, rs);
        } else if role == Role::ReduceOutput {
            done = cx.b.record(Rule::Reduce, rs);
        }
        self.last_reduce = Some(done);
        self.pending.push_back((input, done));
        if rs == COMPUTE {
            self.recycle(cx, 0, Rule::ReduceGate);
        }
    }

    /// bf16 and float32 average in the collective (`_get_gradient_divide_factors`); replicas are averaged too.
    pub(super) fn op(&self, cx: &Cx<'_>, _inner: bool) -> ReduceOp {
        if cx.scenario.fsdp.per_token_loss {
            ReduceOp::Sum
        } else {
            ReduceOp::Avg
        }
    }
}
