//! Reductions: copy-in, reduce-scatter, all-reduce over replicas, accumulation (`foreach_reduce`).

use super::{Fsdp2, tables};
use crate::ir::{
    Access, BufferId, COMPUTE, DType, GroupId, HostWorkKind, Real, ReduceOp, Role, ShardOp,
    StreamId, UnitId,
};
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::kernels::KernelLaunch;
use crate::lower::reduction;
use crate::program::Rule;
use smallvec::SmallVec;

/// How a sum of gradients is divided to become an average.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Division {
    /// Divisor of the reduce-scatter's input.
    before: f64,
    /// Divisor of the last reduction's result.
    after: f64,
    op: ReduceOp,
    over_replicas: ReduceOp,
}

impl Division {
    /// Returns the division of a group's gradient. bf16 and float32 gradients are averaged in the
    /// collectives. Other dtypes might overflow there, so they are divided by about the square root
    /// of the number of ranks both before and after the sum (`_get_gradient_divide_factors`). Under
    /// expert parallelism, gradients of experts are already sums over the expert-parallel ranks:
    /// the divisor is the number of all ranks, not only of those that reduce
    /// (`set_gradient_divide_factor` of torchtitan, which multiplies before the sum).
    fn new(inputs: &LoweringInputs<'_>, g: GroupId, comm: DType) -> Self {
        let fsdp = &inputs.scenario.fsdp;
        let sums = fsdp.per_token_loss;
        let ranks = inputs.data_ranks();
        let of = |op| Self {
            before: 1.0,
            after: 1.0,
            op,
            over_replicas: op,
        };
        let given = fsdp.gradient_scaling_factor;
        if matches!(comm, DType::F32 | DType::Bf16) {
            if let Some(factor) = given {
                return Self::by(factor, inputs.inner(g), of);
            }
            return match (sums, inputs.summed_by_model(g)) {
                (true, _) => of(ReduceOp::Sum),
                (false, 1) => of(ReduceOp::Avg),
                (false, _) if inputs.inner(g) > 1 => Self {
                    over_replicas: ReduceOp::Sum,
                    ..of(ReduceOp::PremulSum(1.0 / f64::from(ranks)))
                },
                (false, _) => Self {
                    before: f64::from(ranks),
                    ..of(ReduceOp::Sum)
                },
            };
        }
        let divisor = match given {
            Some(factor) => 1.0 / factor,
            None => f64::from(if sums { 1 } else { ranks }),
        };
        let mut before = 1.0;
        while divisor % before == 0.0 && divisor / before > before {
            before *= 2.0;
        }
        Self {
            before,
            after: divisor / before,
            ..of(ReduceOp::Sum)
        }
    }

    /// Returns the division for a `set_gradient_divide_factor`: an average if the divisor is the
    /// number of ranks that shard, otherwise a multiplication before the sum.
    fn by(factor: f64, inner: u32, of: impl Fn(ReduceOp) -> Self) -> Self {
        let op = match inner {
            1 => {
                return Self {
                    before: 1.0 / factor,
                    ..of(ReduceOp::Sum)
                };
            }
            n if 1.0 / factor == f64::from(n) => ReduceOp::Avg,
            _ => ReduceOp::PremulSum(factor),
        };
        Self {
            over_replicas: ReduceOp::Sum,
            ..of(op)
        }
    }
}

/// Divides a range in place, unless the divisor is 1 (`_div_if_needed`).
pub(super) fn divide(out: &mut Emitter<'_>, what: Access, by: f64, dtype: DType, stream: StreamId) {
    if by != 1.0 {
        let scale = ShardOp::Scale {
            factor: Real(1.0 / by),
        };
        let n = what.bytes / dtype.size();
        out.run(KernelLaunch {
            rule: Rule::Scale,
            op: scale,
            elements: n,
            dtype,
            stream,
            reads: &[what],
            writes: &[what],
        });
    }
}

impl Fsdp2 {
    /// Makes compute wait for the oldest reduce-scatters, and frees their inputs until `limit` of
    /// them are left; see Note [Reductions in flight].
    pub(super) fn recycle(&mut self, out: &mut Emitter<'_>, limit: usize, rule: Rule) {
        while self.pending.len() > limit {
            let Some((buffer, event)) = self.pending.pop_front() else {
                break;
            };
            if self.streams.reduce != COMPUTE {
                out.b.wait(rule, event, COMPUTE);
            }
            out.b.free(Rule::ReduceRelease, buffer);
        }
    }

    /// Runs the post-backward of a unit that the micro-batch has not used; see
    /// Note [Skipped blocks].
    pub(super) fn end_unused(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        let used_at_all = out.inputs.uses_of(unit).next().is_some();
        let zeros = out.inputs.scenario.fsdp.reduce_unused && used_at_all;
        out.within_unit(unit, |out| {
            for g in out.inputs.trained_groups_of(unit) {
                if !out.inputs.reduces(g, false, self.last) {
                    continue;
                }
                let params = out.inputs.group(g).params.clone();
                if params.iter().any(|p| self.grads.has_sum(*p)) {
                    self.reduce(out, g);
                } else if zeros {
                    for p in params {
                        self.grads.zero(out, p);
                    }
                    self.reduce(out, g);
                } else {
                    out.b.host(Rule::Reduce, HostWorkKind::Hook, 1);
                    self.recycle(out, self.in_flight - 1, Rule::ReduceGate);
                }
            }
        });
    }

    pub(super) fn reduce(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let rs = self.streams.reduce;
        let (c, stored) = (out.inputs.types.comm, out.inputs.types.stored());
        let division = Division::new(out.inputs, g, c);
        let (input, held) = self.pack(out, g, c);
        out.b.join(Rule::ReduceFork, COMPUTE, rs);
        let replicas = self.comms.outer;
        // A sum that is not all-reduced yet stays as it is (`_partial_reduce_output`).
        let partial = replicas.is_some() && !out.inputs.reduces(g, true, self.last);
        let offloads = self.cpu.is_some();
        let first = self.groups[g.index()].reduced.is_none();
        let output = if partial && self.groups[g.index()].partial.is_none() {
            self.partial(out, g, c)
        } else {
            // The output of the first reduction becomes the gradient; later outputs are added to
            // it.
            let role = if !partial && first && c == stored && !offloads {
                Role::MainGrad
            } else {
                Role::ReduceOutput
            };
            let bytes = self.shard_numel(g) * c.size();
            out.transient_on(role, bytes, c, rs, g)
        };
        out.b.alloc(Rule::Reduce, output);
        let comms = self.comms.along(out.inputs.shard_axis(g));
        let over = (comms.reduce, rs);
        let mut ends = (out.b.whole(input), out.b.whole(output));
        let quotient = if comms.reduce.is_some() {
            divide(out, ends.0, division.before, c, rs);
            None
        } else {
            self.quotient(out, g, ends.0, division.before)
        };
        if let Some(id) = quotient {
            ends.0 = out.b.whole(id);
        }
        reduction::scatter(out, over, division.op, ends);
        if let Some(id) = quotient {
            out.b.free(Rule::Scale, id);
        }
        // The next group's post-backward waits only for the reduce-scatter. Later work on any
        // stream is waited for at the end of backward.
        let scattered = out.b.record(Rule::Reduce, rs);
        self.pending.push_back((input, scattered));
        let mut tail = rs;
        let mut held: SmallVec<[BufferId; 2]> = held.into_iter().collect();
        if partial {
            self.keep_partial(out, g, output);
        } else {
            if let Some(comm) = replicas {
                held.extend(self.add_partial(out, g, output));
                tail = self.streams.outer;
                let shard = out.b.whole(output);
                reduction::all_reduce(out, comm, (rs, tail), division.over_replicas, shard);
            }
            divide(out, out.b.whole(output), division.after, c, tail);
            if c == stored && first && !offloads {
                self.groups[g.index()].reduced = Some(output);
            } else {
                held.extend(self.accumulate(out, g, output, tail));
                if replicas.is_some() {
                    // The reduce stream does not wait for the all-reduce. If the buffer were freed
                    // now, the next group's output could reuse its memory (`AllReduceState`).
                    self.groups[g.index()].all_reduced = Some(output);
                } else {
                    out.b.free(Rule::Reduce, output);
                }
            }
        }
        if tail != COMPUTE {
            self.groups[g.index()].post_reduce = Some(out.b.record(Rule::Reduce, tail));
        }
        // The call itself holds references to these buffers.
        for buffer in held {
            out.b.free(Rule::Reduce, buffer);
        }
        if rs == COMPUTE {
            self.recycle(out, 0, Rule::ReduceGate);
        }
    }

    /// Divides the gradients of a group with one rank, which no collective divides, into a separate
    /// buffer that is copied afterwards
    /// (`reduce_output.copy_(reduce_scatter_input / gradient_divide_factor)`). Returns the buffer,
    /// or `None` if the divisor is 1.
    fn quotient(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        input: Access,
        by: f64,
    ) -> Option<BufferId> {
        if by == 1.0 {
            return None;
        }
        let (rs, c) = (self.streams.reduce, out.inputs.types.comm);
        let id = out.of_group(Role::ReduceOutput, input.bytes, c, rs, g);
        out.b.alloc(Rule::Scale, id);
        let to = out.b.whole(id);
        out.run(KernelLaunch {
            rule: Rule::Scale,
            op: ShardOp::SumPieces {
                ranks: 1,
                factor: Real(1.0 / by),
                accumulate: false,
            },
            elements: input.bytes / c.size(),
            dtype: c,
            stream: rs,
            reads: &[input],
            writes: &[to],
        });
        Some(id)
    }

    /// Returns the number of elements of a rank's shard of a group's reduced gradients.
    fn shard_numel(&self, g: GroupId) -> u64 {
        self.groups[g.index()].grads.shard_numel()
    }

    /// Packs the gradients of a group into the input of its reduce-scatter, and frees all but the
    /// last one. With several ranks, the last gradient is held until the reduction is issued,
    /// because the loop variable in `foreach_reduce` refers to it.
    fn pack(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        c: DType,
    ) -> (BufferId, Option<BufferId>) {
        let group = out.inputs.group(g).clone();
        let full = self.groups[g.index()].grads.full_numel();
        out.b.hook(Rule::Reduce, group.params.len() as u16);
        self.recycle(out, self.in_flight - 1, Rule::ReduceGate);
        let input = out.transient_on(Role::ReduceInput, full * c.size(), c, COMPUTE, g);
        out.b.alloc(Rule::ReduceCopyIn, input);
        let mut grads: Vec<BufferId> = group
            .params
            .iter()
            .filter_map(|p| self.grads.take(*p))
            .collect();
        let from: Vec<Access> = grads.iter().map(|id| out.b.whole(*id)).collect();
        let whole = out.b.whole(input);
        let pack = ShardOp::ChunkCat {
            ranks: out.inputs.inner(g),
        };
        let items = &self.groups[g.index()].grads.items;
        let shards: Vec<u64> = items.iter().map(|i| i.shard_numel * c.size()).collect();
        tables::run(out, Rule::ReduceCopyIn, pack, c, &from, &[whole], &shards);
        let held = if out.inputs.inner(g) > 1 {
            grads.pop()
        } else {
            None
        };
        for id in grads {
            out.b.free(Rule::Grad, id);
        }
        (input, held)
    }

    /// Returns the buffer for a group's sum between micro-batches.
    fn partial(&mut self, out: &mut Emitter<'_>, g: GroupId, dtype: DType) -> BufferId {
        let rs = self.streams.reduce;
        let bytes = self.shard_numel(g) * dtype.size();
        let made = &mut self.groups[g.index()].partial_made;
        *made.get_or_insert_with(|| out.of_group(Role::ReduceOutput, bytes, dtype, rs, g))
    }

    /// Keeps the sum of a micro-batch over the shard axis, added to the sums of earlier
    /// micro-batches.
    fn keep_partial(&mut self, out: &mut Emitter<'_>, g: GroupId, output: BufferId) {
        match self.groups[g.index()].partial {
            Some(sum) => {
                self.add(out, output, sum);
                out.b.free(Rule::Reduce, output);
            }
            None => self.groups[g.index()].partial = Some(output),
        }
    }

    /// Adds the sum of earlier micro-batches and returns its buffer. The group refers to that
    /// buffer until the call returns its result.
    fn add_partial(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        output: BufferId,
    ) -> Option<BufferId> {
        let sum = self.groups[g.index()].partial.take()?;
        self.add(out, sum, output);
        Some(sum)
    }

    /// Adds one sum over the shard axis to another, on the stream that produced them.
    fn add(&self, out: &mut Emitter<'_>, from: BufferId, to: BufferId) {
        let (from, to) = (out.b.whole(from), out.b.whole(to));
        reduction::accumulate(
            out,
            Rule::ReduceAccumulate,
            from,
            &[to],
            self.streams.reduce,
        );
    }

    /// Casts a reduced shard to the sharded gradient, or adds it there. Returns the buffer that was
    /// added, if it is not `output`.
    fn accumulate(
        &mut self,
        out: &mut Emitter<'_>,
        g: GroupId,
        output: BufferId,
        stream: StreamId,
    ) -> Option<BufferId> {
        let (c, stored) = (out.inputs.types.comm, out.inputs.types.stored());
        let n = self.shard_numel(g);
        let rule = Rule::ReduceAccumulate;
        let at_rest = self.groups[g.index()].reduced;
        // `_to_dtype_if_needed` creates a separate gradient. It becomes the sharded gradient or is
        // added to it.
        let role = match at_rest {
            None if self.cpu.is_none() => Role::MainGrad,
            _ => Role::Temporary,
        };
        let new = (c != stored).then(|| {
            let id = out.transient_on(role, n * stored.size(), stored, stream, g);
            out.b.alloc(rule, id);
            let (from, to) = (out.b.whole(output), out.b.whole(id));
            out.copy(rule, stream, from, to);
            id
        });
        if self.cpu.is_some() {
            self.offload_gradient(out, g, new.unwrap_or(output), stream);
            return new;
        }
        let Some(grad) = at_rest else {
            self.groups[g.index()].reduced = new;
            return None;
        };
        let (from, to) = (out.b.whole(new.unwrap_or(output)), out.b.whole(grad));
        reduction::accumulate(out, rule, from, &[to], stream);
        new
    }
}
