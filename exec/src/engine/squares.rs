//! Sums of squares of parts of gradients, as the optimizer gets them.

use shardlab_plan::ir::{Access, InstrId, OpKind, ShardOp, StreamId};
use shardlab_plan::program::{Op, Phase, Program, Section};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// A part of a gradient that an optimizer launch reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientPart {
    /// Gradient, as the launch reads it.
    pub grad: Access,
    /// Range of bytes within the gradient.
    pub bytes: Range<u64>,
}

/// Returns where the gradients of a section's optimizer can be read: after the launch that adds
/// them to the norm, because clipping changes them later, or else after their update.
pub(super) fn places(program: &Program, section: &Section) -> HashMap<Access, (InstrId, StreamId)> {
    let mut places = HashMap::new();
    for id in section.instrs.clone().map(InstrId) {
        let instr = &program.instrs[id.index()];
        let Op::Launch { kernel, stream, .. } = instr.op else {
            continue;
        };
        let op = program.kernels[kernel.index()].body.first().map(|b| b.op);
        if instr.phase == Phase::Clip && op == Some(OpKind::Shard(ShardOp::SumSquares)) {
            for grad in program.reads(&instr.op) {
                places.entry(*grad).or_insert((id, stream));
            }
        }
        for tensor in program.updates(&instr.op) {
            places.entry(tensor.grad).or_insert((id, stream));
        }
    }
    places
}

/// Returns whether gradients are read within a captured scope. A replay computes only the sums that
/// the scope was captured with, so no step can request others.
pub(crate) fn reads_in_scope(program: &Program) -> bool {
    program.sections.iter().any(|section| {
        let read = places(program, section).into_values();
        let read: HashSet<InstrId> = read.map(|(id, _)| id).collect();
        let mut open = false;
        section.instrs.clone().map(InstrId).any(|id| {
            match program.instrs[id.index()].op {
                Op::GraphBegin(_) => open = true,
                Op::GraphEnd(_) => open = false,
                _ => {}
            }
            open && read.contains(&id)
        })
    })
}
