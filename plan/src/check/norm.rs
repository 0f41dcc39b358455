//! The gradient norm: each rank sums the squares of the part that its optimizer updates, and these
//! sums are reduced over the ranks that update other parts.

use super::describe;
use super::experts::shard_axis_of;
use super::rules::RuleId;
use super::state::{Facts, axes};
use super::walk::Walk;
use crate::ir::{Access, AxisId, AxisSet, BufferId, GroupId, InstrId};
use crate::program::Program;
use crate::shard::{Group, Layout};
use std::collections::{BTreeMap, HashMap};

/// Sums of squares that have not been read yet.
pub(super) struct Norms {
    /// Axes along which ranks have different parts of at least one gradient: those that shard the
    /// optimizer, and those that divide a trained parameter.
    need: AxisSet,
    /// Axes that divide at least one trained parameter, except parts of axes that shard the
    /// optimizer, because a sum over the whole axis includes the parts.
    divided: AxisSet,
    /// For each gradient that the optimizer reads, the subset of these axes that divides its
    /// parameters, by its buffer and first byte.
    of_grad: HashMap<(BufferId, u64), AxisSet>,
    /// Sums that are not complete yet.
    open: BTreeMap<BufferId, Sum>,
}

/// A sum of squares.
#[derive(Clone, Debug, Default)]
struct Sum {
    /// Axes that it has been reduced over.
    over: AxisSet,
    /// Number of the optimizer's gradients that it includes.
    gradients: usize,
}

impl Norms {
    pub(super) fn new(p: &Program, facts: &Facts) -> Self {
        // Biases of routers have counts in place of gradients.
        let trained = (p.groups.iter()).filter(|g| g.requires_grad && !g.router_biases);
        let shards = trained.fold(AxisSet::EMPTY, |set, g| set.union(sharded_over(p, g)));
        let trained = (p.params.iter()).filter(|x| x.requires_grad && !x.router_bias);
        let divided = trained.fold(AxisSet::EMPTY, |set, x| set.union(x.placements.divided()));
        let divided = apart(divided, shards);
        Self {
            need: shards.union(divided),
            divided,
            of_grad: (facts.of_grad.iter())
                .filter(|(_, g)| !p.groups[g.index()].router_biases)
                .map(|(grad, g)| (*grad, apart(divided_by(p, *g), shards)))
                .collect(),
            open: BTreeMap::new(),
        }
    }

    /// Records that a collective reduced a buffer over axes.
    pub(super) fn reduced(&mut self, b: BufferId, axes: AxisSet) {
        if let Some(sum) = self.open.get_mut(&b) {
            sum.over = sum.over.union(axes);
        }
    }
}

/// Returns the data-parallel axes that shard the optimizer of a group. For parts of an axis,
/// returns the whole axis.
fn sharded_over(p: &Program, g: &Group) -> AxisSet {
    let axis = shard_axis_of(p, g);
    let shards = match &g.layout {
        Layout::Flat(l) => l.shards,
        Layout::PerParam(l) => l.shards,
    };
    match shards {
        0 | 1 => AxisSet::EMPTY,
        n if n == p.meta.mesh.size(axis) => AxisSet::of(axis.whole()),
        _ => AxisSet::DATA,
    }
}

/// Returns the axes that divide the parameters of a group, which have equal placements on them.
fn divided_by(p: &Program, g: GroupId) -> AxisSet {
    let first = p.groups[g.index()].params[0];
    p.params[first.index()].placements.divided()
}

/// Returns the axes that are not parts of others.
fn apart(axes: AxisSet, others: AxisSet) -> AxisSet {
    let inside = |axis: &AxisId| others.contains(AxisSet::of(axis.whole()));
    let apart = axes.iter().filter(|axis| !inside(axis));
    apart.fold(AxisSet::EMPTY, AxisSet::with)
}

impl Walk<'_> {
    /// Records that the squares of this rank's part of gradients were added to a buffer.
    pub(super) fn norm_summed(&mut self, id: InstrId, grads: &[Access], b: BufferId) {
        let p = self.p;
        let of = |a: &Access| self.norms.of_grad.get(&(a.buffer, a.offset)).copied();
        let known: Vec<AxisSet> = grads.iter().filter_map(of).collect();
        let divided = known.iter().copied().fold(AxisSet::EMPTY, AxisSet::union);
        // Parameters that all ranks have count once, so they are added after the sum over different
        // parts.
        let expected = self.norms.divided.without(divided);
        let sum = self.norms.open.entry(b).or_default();
        let summed = sum.over;
        // The first squares replace the previous content of the buffer.
        let first = !grads.iter().any(|a| a.buffer == b);
        if first {
            *sum = Sum {
                over: expected,
                gradients: known.len(),
            };
            return;
        }
        sum.gradients += known.len();
        if summed != expected {
            self.violate(RuleId::Norm, id, None, || {
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

    /// Checks that a norm is complete when it is read, and that it is not freed while it is copied
    /// to the host.
    pub(super) fn norm_used(&mut self, id: InstrId, b: BufferId) {
        let Some(Sum { over, gradients }) = self.norms.open.remove(&b) else {
            return;
        };
        let (p, need) = (self.p, self.norms.need);
        let all = self.norms.of_grad.len();
        self.sink.fact(RuleId::Norm, 2);
        if gradients != all {
            self.violate(RuleId::Norm, id, None, || {
                format!(
                    "{} has the squares of {gradients} of the {all} gradients that the optimizer reads",
                    describe::buffer(p, b)
                )
            });
        }
        if over != need {
            self.violate(RuleId::Norm, id, None, || {
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
