//! Where backward writes gradients, and their sums over micro-batches.

use super::MicroBatch;
use super::reduction::Reductions;
use crate::ir::{Access, BufferId, COMPUTE, DType, GroupId, Holds, ParamId, Role, ShardOp};
use crate::lower::context::Cx;
use crate::lower::flat::{Flat, fill_padding};
use crate::lower::reduction;
use crate::lower::walk::Location;
use crate::program::Rule;

/// Full gradient buffers, by group.
pub(super) struct Gradients {
    /// The buffers of this micro-batch, while live.
    full: Vec<Option<BufferId>>,
    /// Sums that wait for the last micro-batch to be reduced, while live.
    sums: Vec<Option<BufferId>>,
    /// The buffers of such sums, once made.
    accum_buffers: Vec<Option<BufferId>>,
}

impl Gradients {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            full: vec![None; groups],
            sums: vec![None; groups],
            accum_buffers: vec![None; groups],
        }
    }

    /// Returns where backward writes the gradient of a parameter; allocates on first touch.
    pub(super) fn locate(
        &mut self,
        cx: &mut Cx<'_>,
        flat: &Flat,
        micro: MicroBatch,
        reductions: &mut Reductions,
        p: ParamId,
    ) -> Location {
        let (g, _) = cx.home[p.index()];
        let (main, sharded) = (cx.scenario.precision.main_grads, flat.grad_sharded());
        let once = !cx.scenario.fsdp.reduces(false, false);
        let (base, dtype) = if !sharded && micro.first {
            let grad = flat.state(g).grad;
            (grad.expect("only trained parameters have gradients"), main)
        } else if sharded && once && micro.first && !micro.last {
            let sum = self.sum(cx, flat, g);
            (cx.b.whole(sum), main)
        } else {
            // What is added to a sum has the sum's dtype.
            let dtype = if sharded && self.sums[g.index()].is_none() {
                flat.comm_dtype()
            } else {
                main
            };
            let buffer = match self.full[g.index()] {
                Some(buffer) => buffer,
                None => self.allocate(cx, flat, reductions, g, dtype),
            };
            (cx.b.whole(buffer), dtype)
        };
        Location {
            buffer: base.buffer,
            offset: base.offset + cx.flat_offset(p) * dtype.size(),
            element: dtype.size(),
        }
    }

    /// Allocates the full gradient of a group for this micro-batch.
    fn allocate(
        &mut self,
        cx: &mut Cx<'_>,
        flat: &Flat,
        reductions: &mut Reductions,
        g: GroupId,
        dtype: DType,
    ) -> BufferId {
        let root = cx.unit(cx.group(g).unit).spec.is_root;
        if flat.grad_sharded() && !root {
            reductions.make_room(cx, flat);
        }
        let buffer = match cx.made.get(&(Role::FullGrad, g, COMPUTE)) {
            Some(id) => *id,
            None => {
                let bytes = flat.state(g).numel * dtype.size();
                let id = cx.transient(Role::FullGrad, bytes, dtype, COMPUTE, g);
                cx.made.insert((Role::FullGrad, g, COMPUTE), id);
                id
            }
        };
        cx.b.alloc(Rule::Grad, buffer);
        let whole = cx.b.whole(buffer);
        fill_padding(cx, g, whole, dtype);
        self.full[g.index()] = Some(buffer);
        buffer
    }

    /// Adds a later micro-batch's gradient to the one that is kept in full.
    pub(super) fn accumulate(&mut self, cx: &mut Cx<'_>, flat: &Flat, g: GroupId) {
        if let Some(sum) = flat.state(g).grad {
            self.add_to(cx, g, sum);
        }
    }

    /// Adds a later micro-batch's gradient to the sum of earlier ones, in the sum's dtype.
    fn add_to(&mut self, cx: &mut Cx<'_>, g: GroupId, sum: Access) {
        let Some(buffer) = self.full[g.index()].take() else {
            return;
        };
        let from = cx.b.whole(buffer);
        reduction::accumulate(cx, Rule::Accumulate, from, &[sum], COMPUTE);
        cx.b.free(Rule::Accumulate, buffer);
    }

    /// Takes the full gradient of a group for its reduction, in the dtype of communication; `None`
    /// in a micro-batch that reduces nothing.
    pub(super) fn take_full(
        &mut self,
        cx: &mut Cx<'_>,
        flat: &Flat,
        micro: MicroBatch,
        reductions: &mut Reductions,
        g: GroupId,
    ) -> Option<BufferId> {
        let Some(sum) = self.sums[g.index()] else {
            return self.full[g.index()].take();
        };
        let whole = cx.b.whole(sum);
        self.add_to(cx, g, whole);
        if !cx.scenario.fsdp.reduces(false, micro.last) {
            return None;
        }
        self.sums[g.index()] = None;
        let dtype = flat.comm_dtype();
        if dtype == cx.scenario.precision.main_grads {
            return Some(sum);
        }
        reductions.make_room(cx, flat);
        let n = flat.state(g).numel;
        let sent = cx.transient_on(Role::ReduceInput, n * dtype.size(), dtype, COMPUTE, g);
        cx.b.alloc(Rule::ReduceCopyIn, sent);
        let to = cx.b.whole(sent);
        let (rule, copy) = (Rule::ReduceCopyIn, ShardOp::Copy);
        cx.run(rule, copy, n, dtype, COMPUTE, &[whole], &[to]);
        cx.b.free(Rule::ReduceRelease, sum);
        Some(sent)
    }

    /// Returns the buffer in which the first of several micro-batches starts a sum that only the
    /// last one reduces.
    fn sum(&mut self, cx: &mut Cx<'_>, flat: &Flat, g: GroupId) -> BufferId {
        if let Some(sum) = self.sums[g.index()] {
            return sum;
        }
        let dtype = cx.scenario.precision.main_grads;
        let id = *self.accum_buffers[g.index()].get_or_insert_with(|| {
            let bytes = flat.state(g).numel * dtype.size();
            let unit = cx.group(g).unit;
            cx.resting(Role::FullGrad, bytes, dtype, unit, Holds::Group(g))
        });
        cx.b.alloc(Rule::Grad, id);
        let whole = cx.b.whole(id);
        fill_padding(cx, g, whole, dtype);
        self.sums[g.index()] = Some(id);
        id
    }
}
