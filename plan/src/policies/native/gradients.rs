//! The buffers that backward writes gradients to, and their sums over micro-batches.

use super::MicroBatch;
use super::reduction::Reductions;
use crate::ir::{Access, BufferId, COMPUTE, DType, GroupId, Holds, ParamId, Role, ShardOp};
use crate::lower::emitter::Emitter;
use crate::lower::flat::{Flat, fill_padding};
use crate::lower::kernels::KernelLaunch;
use crate::lower::reduction;
use crate::lower::walk::Location;
use crate::program::Rule;
use std::ops::Range;

/// Full gradient buffers, by group.
pub(super) struct Gradients {
    /// Full buffers of this micro-batch, while live.
    full: Vec<Option<BufferId>>,
    /// Sums that the last micro-batch will reduce, while live.
    sums: Vec<Option<BufferId>>,
    /// Buffers of these sums, once allocated.
    accum_buffers: Vec<Option<BufferId>>,
    /// Elements that GEMMs of this micro-batch have accumulated into the sum, by group.
    added: Vec<Vec<Range<u64>>>,
    /// Whether backward has started to write the full gradient, by group. Only used if the gradient
    /// is not sharded and lives for one step.
    begun: Vec<bool>,
}

impl Gradients {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            full: vec![None; groups],
            sums: vec![None; groups],
            accum_buffers: vec![None; groups],
            added: vec![Vec::new(); groups],
            begun: vec![false; groups],
        }
    }

    /// Returns where backward writes the gradient of a parameter. Allocates the buffer on first
    /// use.
    pub(super) fn locate(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        reductions: &mut Reductions,
        p: ParamId,
    ) -> Location {
        let (g, _) = out.inputs.home[p.index()];
        let (main, sharded) = (flat.grad_dtype(g), flat.grad_sharded(g));
        let once = !out.inputs.reduces(g, false, false);
        let (base, dtype) = if !sharded && micro.first {
            (self.begin_whole(out, flat, reductions, g), main)
        } else if sharded && once && micro.first && !micro.last {
            let sum = self.sum(out, flat, g);
            (out.b.whole(sum), main)
        } else {
            // A value that is added to a sum has the sum's dtype.
            let dtype = if sharded && self.sums[g.index()].is_none() {
                flat.comm_dtype(g)
            } else {
                main
            };
            let buffer = match self.full[g.index()] {
                Some(buffer) => buffer,
                None => self.allocate(out, flat, reductions, g, dtype),
            };
            (out.b.whole(buffer), dtype)
        };
        Location {
            buffer: base.buffer,
            offset: base.offset + out.inputs.flat_offset(p) * dtype.size(),
            element: dtype.size(),
        }
    }

    /// Returns where a GEMM accumulates these elements of a group's gradients into the sum of
    /// earlier micro-batches; `None` if there is no such sum.
    pub(super) fn add(
        &mut self,
        out: &Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        g: GroupId,
        elements: Range<u64>,
    ) -> Option<Access> {
        let sum = match self.sums[g.index()] {
            _ if micro.first => None,
            Some(sum) => Some(out.b.whole(sum)),
            None if flat.grad_sharded(g) => None,
            None => flat.state(g).grad,
        };
        let part = part(sum?, &elements, flat.grad_dtype(g));
        self.added[g.index()].push(elements);
        Some(part)
    }

    /// Returns the full gradient of a group that does not shard it. Allocates it on first use if it
    /// only lives for one step.
    fn begin_whole(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        reductions: &mut Reductions,
        g: GroupId,
    ) -> Access {
        let grad = flat.state(g).grad;
        let grad = grad.expect("only trained parameters have gradients");
        let of_a_step = flat.grads_of_a_step(out.inputs, g);
        if of_a_step && !std::mem::replace(&mut self.begun[g.index()], true) {
            let unit = out.inputs.group(g).unit;
            if !out.inputs.unit(unit).spec.is_root {
                reductions.make_room(out, flat, unit);
            }
            out.b.alloc(Rule::Grad, grad.buffer);
            fill_padding(out, g, grad, flat.grad_dtype(g));
        }
        grad
    }

    /// Allocates the full gradient of a group for this micro-batch.
    fn allocate(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        reductions: &mut Reductions,
        g: GroupId,
        dtype: DType,
    ) -> BufferId {
        let unit = out.inputs.group(g).unit;
        if flat.grad_sharded(g) && !out.inputs.unit(unit).spec.is_root {
            reductions.make_room(out, flat, unit);
        }
        let buffer = match out.made.get(&(Role::FullGrad, g, COMPUTE)) {
            Some(id) => *id,
            None => {
                let bytes = flat.state(g).numel * dtype.size();
                let id = out.transient(Role::FullGrad, bytes, dtype, COMPUTE, g);
                out.made.insert((Role::FullGrad, g, COMPUTE), id);
                id
            }
        };
        out.b.alloc(Rule::Grad, buffer);
        let whole = out.b.whole(buffer);
        fill_padding(out, g, whole, dtype);
        self.full[g.index()] = Some(buffer);
        buffer
    }

    /// Adds a later micro-batch's gradient to the one that is kept in full, after backward has
    /// written all of it.
    pub(super) fn accumulate(&mut self, out: &mut Emitter<'_>, flat: &Flat, g: GroupId) {
        self.begun[g.index()] = false;
        if let Some(sum) = flat.state(g).grad {
            self.add_to(out, g, sum);
        }
    }

    /// Adds a later micro-batch's gradient to the sum of earlier ones, in the sum's dtype.
    fn add_to(&mut self, out: &mut Emitter<'_>, g: GroupId, sum: Access) {
        let added = std::mem::take(&mut self.added[g.index()]);
        let Some(buffer) = self.full[g.index()].take() else {
            return;
        };
        let from = out.b.whole(buffer);
        let program = out.b.program();
        let dtypes = [from, sum].map(|a| program.buffers[a.buffer.index()].dtype);
        for rest in between(added, sum.bytes / dtypes[1].size()) {
            let (from, to) = (part(from, &rest, dtypes[0]), part(sum, &rest, dtypes[1]));
            reduction::accumulate(out, Rule::Accumulate, from, &[to], COMPUTE);
        }
        out.b.free(Rule::Accumulate, buffer);
    }

    /// Takes the full gradient of a group for its reduction, in the communication dtype; `None` in
    /// a micro-batch that does not reduce.
    pub(super) fn take_full(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        reductions: &mut Reductions,
        g: GroupId,
    ) -> Option<BufferId> {
        let Some(sum) = self.sums[g.index()] else {
            return self.full[g.index()].take();
        };
        let whole = out.b.whole(sum);
        self.add_to(out, g, whole);
        if !out.inputs.reduces(g, false, micro.last) {
            return None;
        }
        self.sums[g.index()] = None;
        let dtype = flat.comm_dtype(g);
        if dtype == flat.grad_dtype(g) {
            return Some(sum);
        }
        reductions.make_room(out, flat, out.inputs.group(g).unit);
        let n = flat.state(g).numel;
        let sent = out.transient_on(Role::ReduceInput, n * dtype.size(), dtype, COMPUTE, g);
        out.b.alloc(Rule::ReduceCopyIn, sent);
        let to = out.b.whole(sent);
        let (rule, copy) = (Rule::ReduceCopyIn, ShardOp::Copy);
        out.run(KernelLaunch {
            rule,
            op: copy,
            elements: n,
            dtype,
            stream: COMPUTE,
            reads: &[whole],
            writes: &[to],
        });
        out.b.free(Rule::ReduceRelease, sum);
        Some(sent)
    }

    /// Returns the buffer in which the first of several micro-batches starts a sum that only the
    /// last one reduces.
    fn sum(&mut self, out: &mut Emitter<'_>, flat: &Flat, g: GroupId) -> BufferId {
        if let Some(sum) = self.sums[g.index()] {
            return sum;
        }
        let dtype = flat.grad_dtype(g);
        let id = *self.accum_buffers[g.index()].get_or_insert_with(|| {
            let bytes = flat.state(g).numel * dtype.size();
            let unit = out.inputs.group(g).unit;
            out.persistent(Role::FullGrad, bytes, dtype, unit, Holds::Group(g))
        });
        out.b.alloc(Rule::Grad, id);
        let whole = out.b.whole(id);
        fill_padding(out, g, whole, dtype);
        self.sums[g.index()] = Some(id);
        id
    }
}

/// Returns a range of elements of a group's buffer.
fn part(of: Access, elements: &Range<u64>, dtype: DType) -> Access {
    Access {
        offset: of.offset + elements.start * dtype.size(),
        bytes: (elements.end - elements.start) * dtype.size(),
        ..of
    }
}

/// Returns the gaps between ranges, up to this number of elements.
fn between(mut ranges: Vec<Range<u64>>, elements: u64) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|r| r.start);
    let mut at = 0;
    let mut rest = Vec::new();
    for r in ranges
        .into_iter()
        .chain(std::iter::once(elements..elements))
    {
        if r.start > at {
            rest.push(at..r.start);
        }
        at = at.max(r.end);
    }
    rest
}
