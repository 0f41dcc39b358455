//! The gradient norm: squares of the part that a rank's optimizer updates, summed over the ranks
//! that update other parts.

use super::describe;
use super::rules::RuleId;
use super::state::axes;
use super::walk::Walk;
use crate::ir::{AxisId, AxisSet, BufferId, InstrId};
use crate::program::Program;
use crate::shard::Layout;
use std::collections::HashMap;

/// Sums of squares that nothing has read yet.
pub(super) struct Norms {
    /// Axes that shard the optimizer.
    need: AxisSet,
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
        Self {
            need,
            open: HashMap::new(),
        }
    }

    /// Squares of this rank were added to a buffer.
    pub(super) fn summed(&mut self, b: BufferId) {
        self.open.insert(b, AxisSet::EMPTY);
    }

    /// A collective reduced a buffer over axes.
    pub(super) fn reduced(&mut self, b: BufferId, axes: AxisSet) {
        if let Some(over) = self.open.get_mut(&b) {
            *over = over.union(axes);
        }
    }
}

impl Walk<'_> {
    /// A buffer is read, or freed with the host's copy of it on its way: if it is a norm, it has to
    /// be complete.
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
