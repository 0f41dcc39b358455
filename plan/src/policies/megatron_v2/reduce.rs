//! Reductions: packing, the reduce-scatter into the persistent shard, and the sum over replicas.

use super::{MegatronV2, REDUCED};
use crate::ir::{
    Access, COMPUTE, CollectiveKind, GroupId, HostWorkKind, Part, ReduceOp, Role, UnitId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::Emitter;
use crate::lower::flat::{ReduceTo, fill_padding};
use crate::lower::reduction;
use crate::program::Rule;
use smallvec::smallvec;

impl MegatronV2 {
    /// Packs and reduces a unit's gradients: `_reduce_gradient_groups`. See
    /// Note [Reductions in flight].
    pub(super) fn reduce(&mut self, out: &mut Emitter<'_>, unit: UnitId) {
        out.b.host(Rule::Reduce, HostWorkKind::Hook, 1);
        for g in out.inputs.trained_groups_of(unit) {
            let params = out.inputs.group(g).params.len() as u16;
            out.b
                .host(Rule::Reduce, HostWorkKind::HookParam, REDUCED * params);
            if self.flat.grad_sharded(g) {
                self.reduce_sharded(out, g);
            } else {
                self.reduce_full(out, g);
            }
        }
    }

    fn reduce_sharded(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let (c, rs) = (self.flat.comm_dtype(g), self.flat.streams.reduce);
        let bytes = self.flat.state(g).numel * c.size();
        let packed = *self.packed[g.index()]
            .get_or_insert_with(|| out.transient(Role::ReduceInput, bytes, c, rs, g));
        out.b.alloc(Rule::ReduceCopyIn, packed);
        // The block may have belonged to the previous reduction, which runs on the same stream.
        out.b.join(Rule::ReduceGate, rs, COMPUTE);
        let whole = out.b.whole(packed);
        fill_padding(out, g, whole, c);
        self.pack(out, g, whole, true);
        self.flat
            .reduce_sharded(out, g, whole, self.first, false, ReduceTo::Grad);
        if self.last {
            self.reduce_outer(out, g);
        }
        out.b.free(Rule::ReduceRelease, packed);
    }

    /// Reduces a gradient that no inner axis shards. It is kept in full, and replicas average it
    /// once per step.
    fn reduce_full(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let grad = self.flat.state(g).grad;
        let grad = grad.expect("only trained groups have gradients");
        if self.first {
            fill_padding(out, g, grad, out.inputs.types.grads);
        }
        self.pack(out, g, grad, self.first);
        if self.last {
            self.flat.reduce_full(out, g);
        }
    }

    /// Moves a group's gradients to their places in a range: `copy_gradients_to_partial_buffer`.
    /// If the range already holds gradients (`fresh` is false), adds to them.
    fn pack(&mut self, out: &mut Emitter<'_>, g: GroupId, to: Access, fresh: bool) {
        let dtype = out.b.program().buffers[to.buffer.index()].dtype;
        for p in out.inputs.group(g).params.clone() {
            let Some(grad) = self.grads.take(p) else {
                continue;
            };
            let place = out.inputs.flat_place(p, to, dtype);
            let from = out.b.whole(grad);
            if fresh {
                out.copy(Rule::ReduceCopyIn, COMPUTE, from, place);
            } else {
                reduction::accumulate(out, Rule::ReduceCopyIn, from, &[place], COMPUTE);
            }
            out.b.free(Rule::Grad, grad);
        }
    }

    /// Averages a group's shard over replicas in the last micro-batch. The source copies the shard
    /// to a new buffer, reduces it, and replaces the shard with it. Here, the result is written to
    /// the shard.
    fn reduce_outer(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        let (Some(comm), Some(grad)) = (self.flat.comms.outer, self.flat.state(g).grad) else {
            return;
        };
        let (dtype, stream) = (out.inputs.types.grads, self.flat.streams.reduce);
        let copy = *self.copies[g.index()]
            .get_or_insert_with(|| out.transient(Role::ReduceOutput, grad.bytes, dtype, stream, g));
        out.b.alloc(Rule::OuterReduce, copy);
        let whole = out.b.whole(copy);
        out.copy(Rule::OuterReduce, stream, grad, whole);
        out.collective(CollectiveLaunch {
            rule: Rule::OuterReduce,
            stream,
            kind: CollectiveKind::AllReduce,
            comm,
            reduce: ReduceOp::Avg,
            dtype,
            parts: smallvec![Part {
                input: whole,
                output: grad
            }],
            sent: None,
        });
        out.b.free(Rule::OuterReduce, copy);
    }
}
