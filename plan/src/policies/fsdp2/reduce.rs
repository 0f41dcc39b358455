//! Reductions: copy-in, reduce-scatter, all-reduce over replicas, accumulation (`foreach_reduce`).

use super::{Fsdp2, hooks, tables};
use crate::config::Scenario;
use crate::ir::{
    Access, BufferId, COMPUTE, DType, GroupId, Holds, Pool, Real, ReduceOp, Role, ShardOp, StreamId,
};
use crate::lower::builder::NewBuffer;
use crate::lower::context::Cx;
use crate::lower::reduction;
use crate::program::Rule;
use smallvec::SmallVec;

/// How gradients become an average.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Division {
    /// What the input of the reduce-scatter is divided by.
    before: u32,
    /// What the result of the last reduction is divided by.
    after: f64,
    op: ReduceOp,
}

impl Division {
    /// bf16 and float32 average in the collectives; other dtypes might overflow there, so sums of them are divided by about the root of
    /// the number of ranks on either side (`_get_gradient_divide_factors`). `ranks`: that average, of both axes.
    fn new(scenario: &Scenario, ranks: u32) -> Self {
        let sums = scenario.fsdp.per_token_loss;
        if matches!(scenario.precision.comm_grads, DType::F32 | DType::Bf16) {
            let op = if sums { ReduceOp::Sum } else { ReduceOp::Avg };
            return Self {
                before: 1,
                after: 1.0,
                op,
            };
        }
        let factor = if sums { 1 } else { ranks };
        let mut before = 1;
        while factor % before == 0 && factor / before > before {
            before *= 2;
        }
        Self {
            before,
            after: f64::from(factor) / f64::from(before),
            op: ReduceOp::Sum,
        }
    }
}

/// Divides a range in place, unless by 1 (`_div_if_needed`).
fn divide(cx: &mut Cx<'_>, what: Access, by: f64, dtype: DType, stream: StreamId) {
    if by > 1.0 {
        let scale = ShardOp::Scale {
            factor: Real(1.0 / by),
        };
        let n = what.bytes / dtype.size();
        cx.run(Rule::Scale, scale, n, dtype, stream, &[what], &[what]);
    }
}

impl Fsdp2 {
    /// Compute waits for the oldest reduce-scatters and drops their inputs until `limit` of these are left.
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
        let rs = self.streams.reduce;
        let (c, stored) = (cx.scenario.precision.comm_grads, cx.stored_dtype());
        let division = Division::new(cx.scenario, cx.world());
        let (input, held) = self.pack(cx, g, c);
        cx.b.join(Rule::ReduceFork, COMPUTE, rs);
        let replicas = self.comms.outer;
        // A sum that is not all-reduced yet is kept as it is (`_partial_reduce_output`).
        let partial = replicas.is_some() && !cx.scenario.fsdp.reduces(true, self.last);
        let first = self.groups[g.index()].reduced.is_none();
        let output = if partial && self.groups[g.index()].partial.is_none() {
            self.partial(cx, g, c)
        } else {
            // The output of the first reduction becomes the gradient; later ones are added to it.
            let role = if !partial && first && c == stored {
                Role::MainGrad
            } else {
                Role::ReduceOutput
            };
            let bytes = self.shard_numel(g) * c.size();
            cx.transient_on(role, bytes, c, rs, g)
        };
        cx.b.alloc(Rule::Reduce, output);
        divide(cx, cx.b.whole(input), f64::from(division.before), c, rs);
        let over = (self.comms.reduce, rs);
        let ends = (cx.b.whole(input), cx.b.whole(output));
        reduction::scatter(cx, over, division.op, ends);
        // The next group's post-backward waits for the reduce-scatter alone: what follows it on any stream is the end of backward's.
        let scattered = cx.b.record(Rule::Reduce, rs);
        self.pending.push_back((input, scattered));
        let mut tail = rs;
        let mut held: SmallVec<[BufferId; 2]> = held.into_iter().collect();
        if partial {
            self.keep_partial(cx, g, output);
        } else {
            if let Some(comm) = replicas {
                held.extend(self.add_partial(cx, g, output));
                tail = self.streams.outer;
                let shard = cx.b.whole(output);
                reduction::all_reduce(cx, comm, (rs, tail), division.op, shard);
            }
            divide(cx, cx.b.whole(output), division.after, c, tail);
            if c == stored && first {
                self.groups[g.index()].reduced = Some(output);
            } else {
                held.extend(self.accumulate(cx, g, output, tail));
                if replicas.is_some() {
                    // The reduce stream does not wait for the all-reduce: freed now, the next group's output could take its memory
                    // (`AllReduceState`).
                    self.groups[g.index()].all_reduced = Some(output);
                } else {
                    cx.b.free(Rule::Reduce, output);
                }
            }
        }
        if tail != COMPUTE {
            self.groups[g.index()].post_reduce = Some(cx.b.record(Rule::Reduce, tail));
        }
        // What the call itself refers to.
        for buffer in held {
            cx.b.free(Rule::Reduce, buffer);
        }
        if rs == COMPUTE {
            self.recycle(cx, 0, Rule::ReduceGate);
        }
    }

    /// Elements of a rank's shard of what a group reduces.
    fn shard_numel(&self, g: GroupId) -> u64 {
        self.groups[g.index()].grads.shard_numel()
    }

    /// Packs a group's gradients into the input of its reduce-scatter, and frees them: all but the last one, which several ranks hold until
    /// the reduction is issued (the variable of a loop over the gradients in `foreach_reduce` refers to it).
    fn pack(&mut self, cx: &mut Cx<'_>, g: GroupId, c: DType) -> (BufferId, Option<BufferId>) {
        let group = cx.group(g).clone();
        let full = self.groups[g.index()].grads.full_numel();
        hooks(cx, Rule::Reduce, group.params.len());
        self.recycle(cx, self.in_flight - 1, Rule::ReduceGate);
        let input = cx.transient_on(Role::ReduceInput, full * c.size(), c, COMPUTE, g);
        cx.b.alloc(Rule::ReduceCopyIn, input);
        let mut grads: Vec<BufferId> = group
            .params
            .iter()
            .filter_map(|p| self.grads.take(*p))
            .collect();
        let from: Vec<Access> = grads.iter().map(|id| cx.b.whole(*id)).collect();
        let whole = cx.b.whole(input);
        let pack = ShardOp::ChunkCat { ranks: cx.inner };
        let items = &self.groups[g.index()].grads.items;
        let shards: Vec<u64> = items.iter().map(|i| i.shard_numel * c.size()).collect();
        tables::run(cx, Rule::ReduceCopyIn, pack, c, &from, &[whole], &shards);
        let held = if cx.inner > 1 { grads.pop() } else { None };
        for id in grads {
            cx.b.free(Rule::Grad, id);
        }
        (input, held)
    }

    /// The buffer of a group's sums between micro-batches.
    fn partial(&mut self, cx: &mut Cx<'_>, g: GroupId, dtype: DType) -> BufferId {
        let rs = self.streams.reduce;
        let (unit, numel) = (cx.group(g).unit, self.shard_numel(g));
        *self.groups[g.index()].partial_made.get_or_insert_with(|| {
            cx.b.buffer(NewBuffer {
                role: Role::ReduceOutput,
                bytes: numel * dtype.size(),
                dtype,
                pool: Pool::Caching,
                stream: rs,
                unit,
                holds: Holds::Group(g),
            })
        })
    }

    /// Keeps a micro-batch's sum over the shard axis, added to those before it.
    fn keep_partial(&mut self, cx: &mut Cx<'_>, g: GroupId, output: BufferId) {
        match self.groups[g.index()].partial {
            Some(sum) => {
                self.add(cx, output, sum);
                cx.b.free(Rule::Reduce, output);
            }
            None => self.groups[g.index()].partial = Some(output),
        }
    }

    /// Adds what earlier micro-batches left, and returns it: the group refers to it until it gets the call's result.
    fn add_partial(&mut self, cx: &mut Cx<'_>, g: GroupId, output: BufferId) -> Option<BufferId> {
        let sum = self.groups[g.index()].partial.take()?;
        self.add(cx, sum, output);
        Some(sum)
    }

    /// Adds one sum over the shard axis to another, on their stream.
    fn add(&self, cx: &mut Cx<'_>, from: BufferId, to: BufferId) {
        let (from, to) = (cx.b.whole(from), cx.b.whole(to));
        reduction::accumulate(cx, Rule::ReduceAccumulate, from, &[to], self.streams.reduce);
    }

    /// Casts a reduced shard to the gradient at rest, or adds it there.
    /// Returns what a sum was added from, where that is not `output`.
    fn accumulate(
        &mut self,
        cx: &mut Cx<'_>,
        g: GroupId,
        output: BufferId,
        stream: StreamId,
    ) -> Option<BufferId> {
        let (c, stored) = (cx.scenario.precision.comm_grads, cx.stored_dtype());
        let n = self.shard_numel(g);
        let rule = Rule::ReduceAccumulate;
        let at_rest = self.groups[g.index()].reduced;
        // `_to_dtype_if_needed`: a gradient of its own, which becomes the one at rest or is added to it.
        let role = match at_rest {
            None => Role::MainGrad,
            Some(_) => Role::Temporary,
        };
        let new = (c != stored).then(|| {
            let id = cx.transient_on(role, n * stored.size(), stored, stream, g);
            cx.b.alloc(rule, id);
            let (out, to) = (cx.b.whole(output), cx.b.whole(id));
            cx.run(rule, ShardOp::Copy, n, stored, stream, &[out], &[to]);
            id
        });
        let Some(grad) = at_rest else {
            self.groups[g.index()].reduced = new;
            return None;
        };
        let (from, to) = (cx.b.whole(new.unwrap_or(output)), cx.b.whole(grad));
        reduction::accumulate(cx, rule, from, &[to], stream);
        new
    }
}
