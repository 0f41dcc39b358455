//! The gradient norm: squares of the part that a rank's optimizer updates, summed over the ranks
//! that update other parts.

use super::describe;
use super::rules::RuleId;
use super::state::{OUTER, SHARD, axes};
use super::walk::Walk;
use crate::ir::{BufferId, InstrId};
use crate::program::Program;
use crate::shard::Layout;
use std::collections::HashMap;

/// Sums of squares that nothing has read yet.
pub(super) struct Norms {
    /// Axes that shard the optimizer.
    need: u8,
    /// Axes that each sum has been reduced over.
    open: HashMap<BufferId, u8>,
}

impl Norms {
    pub(super) fn new(p: &Program) -> Self {
        let trained = p.groups.iter().filter(|g| g.requires_grad);
        let shards = trained.map(|g| match &g.layout {
            Layout::Flat(l) => l.shards,
            Layout::PerParam(l) => l.shards,
        });
        let need = match shards.max() {
            None | Some(0 | 1) => 0,
            Some(n) if n == p.meta.dp_shard => SHARD,
            Some(_) => SHARD | OUTER,
        };
        Self {
            need,
            open: HashMap::new(),
        }
    }

    /// Squares of this rank were added to a buffer.
    pub(super) fn summed(&mut self, b: BufferId) {
        self.open.insert(b, 0);
    }

    /// A collective reduced a buffer over axes.
    pub(super) fn reduced(&mut self, b: BufferId, axes: u8) {
        if let Some(over) = self.open.get_mut(&b) {
            *over |= axes;
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
