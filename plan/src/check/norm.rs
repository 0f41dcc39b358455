//! The gradient norm: each rank squares the part that its optimizer updates, and the ranks that
//! update other parts add up the squares.

use super::describe;
use super::rules::RuleId;
use super::state::axes;
use super::walk::Walk;
use crate::ir::{Access, AxisId, AxisSet, BufferId, Holds, InstrId, KernelClass};
use crate::program::{Op, Program};
use crate::shard::Layout;
use std::collections::HashMap;

/// Sums of squares that nothing has read yet.
pub(super) struct Norms {
    /// Axes that shard the optimizer.
    need: AxisSet,
    /// Axes that divide at least one trained parameter.
    divided: AxisSet,
    /// Axes that divide the parameters of a gradient, by its buffer and first byte.
    of_grad: HashMap<(BufferId, u64), AxisSet>,
    /// Axes that each sum has been reduced over.
    open: HashMap<BufferId, AxisSet>,
}

impl Norms {
    pub(super) fn new(p: &Program) -> Self {
        let trained = p.groups.iter().filter(|g| g.requires_grad);
        let shards = trained.map(|g| match &g.layout {
            Layout::Flat(l) => l.shards,
            Layout::PerParam(l) => l.shards,
        });
        let need = match shards.max() {
            None | Some(0 | 1) => AxisSet::EMPTY,
            Some(n) if n == p.meta.mesh.size(AxisId::DP_SHARD) => AxisSet::of(AxisId::DP_SHARD),
            Some(_) => AxisSet::DATA,
        };
        let trained = p.params.iter().filter(|x| x.requires_grad);
        let divided = trained.fold(AxisSet::EMPTY, |set, x| set.union(x.placements.divided()));
        Self {
            need: need.union(divided),
            divided,
            of_grad: if divided.is_empty() {
                HashMap::new()
            } else {
                of_grad(p)
            },
            open: HashMap::new(),
        }
    }

    /// Notes that a collective reduced a buffer over axes.
    pub(super) fn reduced(&mut self, b: BufferId, axes: AxisSet) {
        if let Some(over) = self.open.get_mut(&b) {
            *over = over.union(axes);
        }
    }
}

/// Maps what the optimizer reads with each gradient (weights of a group, whose parameters have
/// equal placements on the axes that divide the model) to those axes.
fn of_grad(p: &Program) -> HashMap<(BufferId, u64), AxisSet> {
    let group = |b: BufferId| match p.buffers[b.index()].holds {
        Holds::Param(x) => Some(x),
        Holds::Group(g) => p.groups[g.index()].params.first().copied(),
        _ => None,
    };
    let mut all = HashMap::new();
    for instr in &p.instrs {
        let Op::Launch { kernel, .. } = instr.op else {
            continue;
        };
        let reads = p.reads(&instr.op);
        if p.kernels[kernel.index()].class == KernelClass::Optimizer
            && let Some(param) = reads.first().and_then(|w| group(w.buffer))
        {
            let divided = p.params[param.index()].placements.divided();
            all.extend(reads.iter().map(|a| ((a.buffer, a.offset), divided)));
        }
    }
    all
}

impl Walk<'_> {
    /// Notes that squares of this rank's part of gradients were added to a buffer.
    pub(super) fn norm_summed(&mut self, id: InstrId, grads: &[Access], b: BufferId) {
        let p = self.p;
        let of = |a: &Access| self.norms.of_grad.get(&(a.buffer, a.offset)).copied();
        let divided = grads
            .iter()
            .filter_map(of)
            .fold(AxisSet::EMPTY, AxisSet::union);
        let over = self.norms.open.entry(b).or_default();
        // Parameters that all ranks have count once: they are added after the sum over different
        // parts.
        let expected = self.norms.divided.without(divided);
        let summed = *over;
        // The first squares replace what the buffer held.
        let first = !grads.iter().any(|a| a.buffer == b);
        if first {
            *over = self.norms.divided.without(divided);
        } else if summed != expected {
            self.violate(RuleId::ReduceMissing, id, None, || {
                format!(
                    "adds to {}, which is summed over {}; expected {}, along which ranks have the same of \
                     these gradients",
                    describe::buffer(p, b),
                    axes(summed),
                    axes(expected)
                )
            });
        }
    }

    /// Checks that a norm is complete when it is read, or freed while its copy to the host is under
    /// way.
    pub(super) fn norm_used(&mut self, id: InstrId, b: BufferId) {
        let Some(over) = self.norms.open.remove(&b) else {
            return;
        };
        let (p, need) = (self.p, self.norms.need);
        self.sink.fact(RuleId::ReduceMissing, 1);
        if over != need {
            self.violate(RuleId::ReduceMissing, id, None, || {
                format!(
                    "{} is summed over {}; expected {}, which the optimizer is sharded over",
                    describe::buffer(p, b),
                    axes(over),
                    axes(need)
                )
            });
        }
    }
}
