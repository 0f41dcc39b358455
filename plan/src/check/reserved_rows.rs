//! Rows of experts: every row that a choice can take is among those that are reserved.

use super::describe;
use super::operands::{self, Ranges};
use super::report::Sink;
use super::rules::RuleId;
use crate::config::Moe;
use crate::ir::{BodyOp, InstrId, OpKind, Slot};
use crate::program::{Op, Program};

/// Rows that choices can take.
#[derive(Clone, Copy)]
struct Bound {
    /// The launch that gives them to choices.
    by: InstrId,
    rows: u64,
}

/// Checks all kernels that move rows to the places of choices, or read and write them there.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    let mut bounds = Ranges::default();
    for section in &p.sections {
        for id in section.instrs.clone().map(InstrId) {
            match &p.instrs[id.index()].op {
                Op::Free(b) => bounds.forget(*b),
                op @ Op::Launch { .. } => Launch { p, id, op }.follow(&mut bounds, sink),
                Op::Copy { id: c, .. } => {
                    let copy = &p.copies[c.index()];
                    bounds.set(copy.to, bounds.get(copy.from).copied());
                }
                _ => {}
            }
        }
    }
}

/// Returns the rows that an operation gives to choices, if it does.
fn given(op: &BodyOp) -> Option<u64> {
    let shape = &op.inputs.first()?.shape;
    let k = shape.last().copied().unwrap_or(1);
    match op.op {
        OpKind::SortExperts(of) => {
            let tokens = shape.iter().product::<u64>() / k.max(1);
            let most = Moe::most_slots([tokens, k], of.experts);
            Some(of.limit.map_or(most, |limit| limit.rows.min(most)))
        }
        OpKind::DispatchExperts(of) => Some(of.ranks * of.slots),
        _ => None,
    }
}

/// Returns what an operation has at the rows of choices, and what says which these are.
fn placed(op: &BodyOp) -> Option<(&Slot, &Slot)> {
    let rows = match op.op {
        OpKind::Permute(_) | OpKind::RepeatRows(_) => op.outputs.first(),
        OpKind::Unpermute(_)
        | OpKind::GroupedGemm(_)
        | OpKind::GroupedGemmWeightGrad(_)
        | OpKind::ScaledGroupedGemm(_)
        | OpKind::RepeatRowsGrad(_) => op.inputs.first(),
        _ => None,
    };
    rows.zip(op.inputs.last())
}

/// A launch.
struct Launch<'p> {
    p: &'p Program,
    id: InstrId,
    op: &'p Op,
}

impl Launch<'_> {
    fn follow(&self, bounds: &mut Ranges<Bound>, sink: &mut Sink) {
        let Op::Launch { kernel, .. } = *self.op else {
            return;
        };
        let body = &self.p.kernels[kernel.index()].body;
        for op in body {
            let known = |by: &Slot| bounds.get(operands::range(self.p, self.op, by)?).copied();
            if let Some((rows, by)) = placed(op)
                && let Some(bound) = known(by)
            {
                self.compare(rows, bound, sink);
            }
        }
        for range in self.p.writes(self.op) {
            bounds.set(*range, None);
        }
        for op in body {
            let Some(rows) = given(op) else { continue };
            let by = self.id;
            let ranges = op.outputs.iter().take(2);
            for at in ranges.filter_map(|s| operands::range(self.p, self.op, s)) {
                bounds.set(at, Some(Bound { by, rows }));
            }
        }
    }

    /// Checks that there are as many rows as choices can take.
    fn compare(&self, slot: &Slot, bound: Bound, sink: &mut Sink) {
        sink.fact(RuleId::ExpertRows, 1);
        let cols = slot.shape.last().copied().unwrap_or(1);
        let rows = slot.shape.iter().product::<u64>() / cols.max(1);
        if rows >= bound.rows {
            return;
        }
        sink.violation(RuleId::ExpertRows, Some(self.id), Some(bound.by), || {
            let range = operands::range(self.p, self.op, slot);
            format!(
                "{} has {rows} rows{}, but #{} gives choices rows up to {}; expected as many as are reserved, and a \
                 limit if there can be more choices",
                describe::instr(self.p, self.id, None),
                range.map_or(String::new(), |at| format!(" in {}", describe::range(self.p, at))),
                bound.by.0,
                bound.rows
            )
        });
    }
}
