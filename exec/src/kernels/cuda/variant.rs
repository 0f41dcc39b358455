//! Which operands a kernel is launched with: element types, alignments, what is updated in place.

use super::codegen::{Arg, CLASH, Request};
use super::target::Target;
#[cfg(test)]
use shardlab_plan::ir::InstrId;
use shardlab_plan::ir::{Access, BodyOp, KernelId, StreamId};
use shardlab_plan::program::{Op, Program};
use smallvec::SmallVec;
#[cfg(test)]
use std::collections::BTreeMap;

/// Operands of a launch, as far as code depends on them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Variant {
    pub(crate) kernel: KernelId,
    pub(crate) reads: SmallVec<[Arg; 8]>,
    pub(crate) writes: SmallVec<[Arg; 4]>,
    /// For each read the write that is the same memory.
    pub(crate) same: SmallVec<[Option<u8>; 8]>,
}

impl Variant {
    pub(crate) fn request<'a>(&'a self, body: &'a [BodyOp], target: Target) -> Request<'a> {
        Request {
            target,
            body,
            reads: &self.reads,
            writes: &self.writes,
            same: &self.same,
        }
    }
}

/// Returns the largest power of two up to 16 that divides all of these.
pub(crate) fn alignment(numbers: impl IntoIterator<Item = u64>) -> u8 {
    let all = numbers.into_iter().fold(16, |a, n| a | n);
    1 << all.trailing_zeros().min(4)
}

fn arg(program: &Program, access: &Access) -> Arg {
    let buffer = &program.buffers[access.buffer.index()];
    let step = match access.per_rank {
        None => 0,
        _ => access.bytes,
    };
    // Allocators align every buffer to at least 16 bytes, whatever it asks for.
    Arg {
        dtype: buffer.dtype,
        align: alignment([u64::from(buffer.align).max(16), access.offset, step]),
    }
}

/// Returns the variant of one launch.
pub(crate) fn of_launch(program: &Program, op: &Op) -> Option<(Variant, StreamId)> {
    let Op::Launch { kernel, stream, .. } = *op else {
        return None;
    };
    let (reads, writes) = (program.reads(op), program.writes(op));
    let same = reads
        .iter()
        .map(|r| {
            let equal = writes.iter().position(|w| w == r).map(|w| w as u8);
            let clash = |w: &&Access| {
                w.buffer == r.buffer
                    && w.offset < r.offset + r.bytes
                    && r.offset < w.offset + w.bytes
            };
            equal.or_else(|| writes.iter().find(clash).map(|_| CLASH))
        })
        .collect();
    let variant = Variant {
        kernel,
        reads: reads.iter().map(|a| arg(program, a)).collect(),
        writes: writes.iter().map(|a| arg(program, a)).collect(),
        same,
    };
    Some((variant, stream))
}

/// Every variant that a program launches, with the first instruction that does.
#[cfg(test)]
pub(crate) fn of_program(program: &Program) -> BTreeMap<Variant, InstrId> {
    let mut out = BTreeMap::new();
    for (i, instr) in program.instrs.iter().enumerate() {
        if let Some((variant, _)) = of_launch(program, &instr.op) {
            out.entry(variant).or_insert(InstrId(i as u32));
        }
    }
    out
}
