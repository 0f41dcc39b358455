//! Rows of experts: kernels that sum over rows exclude unused rows, and gradients of weights are
//! written for every expert, even for one without rows.

use super::describe;
use super::operands::{self, Ranges};
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{Access, BodyOp, BufferId, DType, InstrId, OpKind, Place, Slot, strides};
use crate::ops::Fusion;
use crate::program::{Op, Program, UnfilledWrites};
use std::collections::BTreeMap;

/// A sort of choices by expert.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Sort {
    by: InstrId,
    /// Number of experts that it sorts by.
    experts: u64,
}

#[derive(Default)]
struct State {
    /// The sort that wrote offsets or positions, or whose order the rows have.
    sorts: Ranges<Sort>,
    /// Instructions that left some rows of their output unchanged in memory.
    unfilled: Ranges<InstrId>,
}

/// Checks all kernels that read or write rows of experts.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    let body = p.kernels.iter().flat_map(|k| &k.body);
    if !body
        .clone()
        .any(|op| matches!(op.op, OpKind::SortExperts(_)))
    {
        return;
    }
    let unfilled = p.unfilled_writes();
    let mut state = State::default();
    for section in &p.sections {
        for i in section.instrs.clone() {
            let id = InstrId(i);
            match &p.instrs[id.index()].op {
                Op::Free(b) => state.forget(*b),
                op @ Op::Launch { .. } => {
                    Launch {
                        p,
                        id,
                        op,
                        unfilled: &unfilled,
                    }
                    .follow(&mut state, sink);
                }
                Op::Collective { id: c, .. } => {
                    for (n, part) in p.collectives[c.index()].parts.iter().enumerate() {
                        let left = unfilled.leaves_rows(id, n).then_some(id);
                        state.written(part.output, None, left);
                    }
                }
                Op::Copy { id: c, .. } => {
                    let copy = &p.copies[c.index()];
                    let sort = state.sorts.get(copy.from).copied();
                    let left = state.unfilled.get(copy.from).copied();
                    state.written(copy.to, sort, left);
                }
                _ => {}
            }
        }
    }
}

impl State {
    fn forget(&mut self, b: BufferId) {
        self.sorts.forget(b);
        self.unfilled.forget(b);
    }

    fn written(&mut self, at: Access, sort: Option<Sort>, unfilled: Option<InstrId>) {
        self.sorts.set(at, sort);
        self.unfilled.set(at, unfilled);
    }
}

/// Returns whether an operation reads only rows that some choice fills, or computes each row from
/// the same row of its inputs.
fn leaves_out_others(op: &OpKind) -> bool {
    let by_index = matches!(
        op,
        OpKind::Permute(_)
            | OpKind::Unpermute(_)
            | OpKind::LocalExperts(_)
            | OpKind::SortExperts(_)
            | OpKind::PushedRows(_)
    );
    // Scales have a separate rule.
    let scales = matches!(op, OpKind::RowAmax | OpKind::Float8Scale(_));
    by_index || scales || is_row_by_row(op) || op.stops_at_offsets()
}

/// Returns whether an operation computes each row from the same row of its inputs.
fn is_row_by_row(op: &OpKind) -> bool {
    matches!(op.fusion(), Fusion::Pointwise | Fusion::Row)
        || matches!(op, OpKind::Float8CastBlocks(_))
}

/// Returns the number of factors in a matmul of experts whose rows are in the order of experts; 0
/// for other operations.
const fn factors(op: &OpKind) -> usize {
    match op {
        OpKind::GroupedGemm(_) | OpKind::ScaledGroupedGemm(_) => 1,
        OpKind::GroupedGemmWeightGrad(_) | OpKind::ScaledGroupedGemmWeightGrad(_) => 2,
        _ => 0,
    }
}

/// A launch.
struct Launch<'p> {
    p: &'p Program,
    id: InstrId,
    op: &'p Op,
    unfilled: &'p UnfilledWrites,
}

impl Launch<'_> {
    /// Follows the operations of a kernel, and checks what they read and write.
    fn follow(&self, state: &mut State, sink: &mut Sink) {
        let Op::Launch { kernel, .. } = *self.op else {
            return;
        };
        let kernel = &self.p.kernels[kernel.index()];
        let mut inside = BTreeMap::new();
        if let Some(used) = &kernel.used_rows {
            let sort = self.sort(&used.offsets, &inside, state);
            for &range in self.p.reads(self.op) {
                self.same(range, sort, state, sink);
            }
        }
        for op in &kernel.body {
            self.tail(op, state, sink);
            let sort = self.order(op, &inside, state, sink);
            for slot in &op.outputs {
                match sort {
                    Some(sort) => _ = inside.insert(slot.place, sort),
                    None => _ = inside.remove(&slot.place),
                }
            }
            if factors(&op.op) == 2 {
                self.every_expert(op, state, sink);
            }
        }
        for (n, &range) in self.p.writes(self.op).iter().enumerate() {
            let left = self.unfilled.leaves_rows(self.id, n).then_some(self.id);
            let sort = inside.get(&Place::Write(n as u8)).copied();
            state.written(range, sort, left);
        }
    }

    /// Returns the sort that a slot belongs to.
    fn sort(&self, slot: &Slot, inside: &BTreeMap<Place, Sort>, state: &State) -> Option<Sort> {
        let memory = || state.sorts.get(operands::range(self.p, self.op, slot)?);
        inside.get(&slot.place).or_else(memory).copied()
    }

    /// Returns the sort whose order the results of an operation have, and checks that the factors
    /// of matmuls are in the order of their offsets.
    fn order(
        &self,
        op: &BodyOp,
        inside: &BTreeMap<Place, Sort>,
        state: &State,
        sink: &mut Sink,
    ) -> Option<Sort> {
        let of = |n: usize| self.sort(op.inputs.get(n)?, inside, state);
        match &op.op {
            OpKind::SortExperts(by) => Some(Sort {
                by: self.id,
                experts: by.experts,
            }),
            OpKind::Permute(_) => of(1),
            kind if kind.stops_at_offsets() => {
                let last = op.inputs.len() - 1;
                let offsets = of(last);
                for n in 0..last {
                    let (rows, must) = (of(n), n < factors(kind));
                    sink.fact(RuleId::ExpertTail, u64::from(must));
                    if (must || rows.is_some()) && (rows != offsets || offsets.is_none()) {
                        self.other_order(&op.inputs[n], rows, offsets, sink);
                    }
                }
                offsets.filter(|_| kind.def().leaves_rows(true))
            }
            kind => {
                let inherited = (0..op.inputs.len()).find_map(of);
                inherited.filter(|_| is_row_by_row(kind))
            }
        }
    }

    /// Checks that rows that a kernel reads up to an offset are in the order of that offset.
    fn same(&self, range: Access, sort: Option<Sort>, state: &State, sink: &mut Sink) {
        let Some(&of) = state.sorts.get(range) else {
            return;
        };
        sink.fact(RuleId::ExpertTail, 1);
        if Some(of) != sort {
            self.wrong_offsets(describe::range(self.p, range), Some(of), sort, sink);
        }
    }

    fn other_order(&self, slot: &Slot, of: Option<Sort>, offsets: Option<Sort>, sink: &mut Sink) {
        let range = operands::range(self.p, self.op, slot);
        let what = range.map_or("a register".to_owned(), |at| describe::range(self.p, at));
        self.wrong_offsets(what, of, offsets, sink);
    }

    fn wrong_offsets(&self, what: String, of: Option<Sort>, by: Option<Sort>, sink: &mut Sink) {
        let shown = |sort: Option<Sort>| match sort {
            Some(sort) => format!("of #{}", sort.by.0),
            None => "of no sort".to_owned(),
        };
        let other = of.or(by).map(|sort| sort.by);
        sink.violation(RuleId::ExpertTail, Some(self.id), other, || {
            format!(
                "{} reads {what}, whose rows have the order {}, up to the last offset {}; expected those of one sort \
                 of choices",
                describe::instr(self.p, self.id, None),
                shown(of),
                shown(by)
            )
        });
    }

    /// Checks that an operation that sums over rows reads no rows that still contain what was in
    /// memory before.
    fn tail(&self, op: &BodyOp, state: &State, sink: &mut Sink) {
        if leaves_out_others(&op.op) {
            return;
        }
        let p = self.p;
        let ranges = op
            .inputs
            .iter()
            .filter_map(|s| operands::range(self.p, self.op, s));
        // In indices of choices, empty places have a number.
        let numbers = |at: &Access| p.buffers[at.buffer.index()].dtype != DType::I64;
        for range in ranges.filter(numbers) {
            let Some(&by) = state.unfilled.get(range) else {
                continue;
            };
            sink.violation(RuleId::ExpertTail, Some(self.id), Some(by), || {
                format!(
                    "{} reads all rows of {}, of which #{} wrote only those that a choice fills; expected rows before \
                     the last offset of experts",
                    describe::instr(self.p, self.id, None),
                    describe::range(self.p, range),
                    by.0
                )
            });
        }
    }

    /// Checks that the gradient of a weight has a matrix for every expert that has an offset, and
    /// that the kernel writes all of it.
    fn every_expert(&self, op: &BodyOp, state: &State, sink: &mut Sink) {
        let (p, out) = (self.p, &op.outputs[0]);
        let matrices = out.shape.first().copied().unwrap_or(0);
        let experts = self.sort(&op.inputs[op.inputs.len() - 1], &BTreeMap::new(), state);
        let experts = experts.map_or(matrices, |sort| sort.experts);
        let written = operands::range(p, self.op, out);
        // The type of a gradient is the buffer's.
        let size = |at: Access| p.buffers[at.buffer.index()].dtype.size();
        let elements = match &out.strides[..] {
            [] => out.shape.iter().product(),
            apart => strides::extent(&out.shape, apart),
        };
        let short = written.is_some_and(|at| at.bytes != elements * size(at));
        let left = match out.place {
            Place::Write(n) => self.unfilled.contains(self.id, usize::from(n)),
            _ => false,
        };
        sink.fact(RuleId::ExpertEmpty, 1);
        if matrices == experts && !short && !left {
            return;
        }
        sink.violation(RuleId::ExpertEmpty, Some(self.id), None, || {
            format!(
                "{} writes gradients of {matrices} matrices{}; expected all of those of {experts} experts, zero for \
                 one without rows",
                describe::instr(p, self.id, None),
                written.map_or(String::new(), |at| format!(" to {}", describe::range(p, at)))
            )
        });
    }
}
