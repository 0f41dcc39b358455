//! Operands with which a kernel is launched: element types, alignments, in-place updates.

use super::codegen::{Arg, CLASH, Request};
use super::target::Target;
use crate::operand::RawRange;
#[cfg(test)]
use shardlab_plan::ir::InstrId;
use shardlab_plan::ir::{Access, BodyOp, Kernel, KernelId, StreamId};
use shardlab_plan::program::{Op, Program};
use smallvec::SmallVec;
#[cfg(test)]
use std::collections::BTreeMap;

/// Properties of a launch's operands that code depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Variant {
    pub(crate) kernel: KernelId,
    pub(crate) reads: SmallVec<[Arg; 8]>,
    pub(crate) writes: SmallVec<[Arg; 4]>,
    /// For each read, the write that is the same memory.
    pub(crate) same: SmallVec<[Option<u8>; 8]>,
}

impl Variant {
    /// Returns the variant of these operands.
    pub(crate) fn of(kernel: KernelId, reads: &[RawRange], writes: &[RawRange]) -> Self {
        Self {
            kernel,
            reads: reads.iter().map(arg_of).collect(),
            writes: writes.iter().map(arg_of).collect(),
            same: reads.iter().map(|r| same_of(r, writes)).collect(),
        }
    }

    /// Returns whether code for this variant runs on these operands: they have its types, share
    /// memory as it says, and are aligned at least as well.
    pub(crate) fn fits(&self, reads: &[RawRange], writes: &[RawRange]) -> bool {
        let alike = |args: &[Arg], ranges: &[RawRange]| {
            let fits = |(a, r): (&Arg, &RawRange)| {
                a.dtype == r.dtype && a.align <= alignment([r.ptr as u64])
            };
            args.len() == ranges.len() && args.iter().zip(ranges).all(fits)
        };
        alike(&self.reads, reads)
            && alike(&self.writes, writes)
            && reads
                .iter()
                .zip(&self.same)
                .all(|(r, s)| *s == same_of(r, writes))
    }

    /// Returns the request for a kernel's code.
    pub(crate) fn request_of<'a>(&'a self, kernel: &'a Kernel, target: Target) -> Request<'a> {
        Request {
            used_rows: kernel.used_rows.as_ref(),
            ..self.request(&kernel.body, target)
        }
    }

    /// Returns the request for the code of a body that computes all rows.
    pub(crate) fn request<'a>(&'a self, body: &'a [BodyOp], target: Target) -> Request<'a> {
        Request {
            target,
            body,
            used_rows: None,
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

/// Returns the properties of a range that code depends on.
fn arg_of(r: &RawRange) -> Arg {
    Arg {
        dtype: r.dtype,
        align: alignment([r.ptr as u64]),
    }
}

/// Returns the write that is the same memory as a read, or a mark that one shares some of it.
fn same_of(r: &RawRange, writes: &[RawRange]) -> Option<u8> {
    let end = |r: &RawRange| r.ptr as u64 + r.bytes as u64;
    let equal = |w: &RawRange| (w.ptr, w.bytes) == (r.ptr, r.bytes);
    let share = |w: &RawRange| (w.ptr as u64) < end(r) && (r.ptr as u64) < end(w);
    match writes.iter().position(equal) {
        Some(w) => Some(w as u8),
        None => writes.iter().any(share).then_some(CLASH),
    }
}

fn arg(program: &Program, access: &Access) -> Arg {
    let buffer = &program.buffers[access.buffer.index()];
    // Allocators align every buffer to at least 16 bytes, even if it asks for less.
    Arg {
        dtype: buffer.dtype,
        align: alignment([
            u64::from(buffer.align).max(16),
            access.offset,
            access.step(),
        ]),
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

/// Returns every variant that a program launches, with the first instruction that does.
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

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::DType;

    fn range(at: usize, bytes: usize) -> RawRange {
        RawRange {
            ptr: std::ptr::without_provenance_mut(at),
            bytes,
            dtype: DType::F32,
        }
    }

    #[test]
    fn code_runs_on_operands_that_lie_as_it_expects_or_better() {
        let kernel = KernelId(0);
        let (reads, writes) = ([range(0x1008, 64), range(0x2000, 64)], [range(0x2000, 64)]);
        let made_for = Variant::of(kernel, &reads, &writes);
        assert_eq!(made_for.same[..], [None, Some(0)]);
        assert!(made_for.fits(&reads, &writes));
        // Aligned better, then worse.
        assert!(made_for.fits(&[range(0x1010, 64), reads[1]], &writes));
        assert!(!made_for.fits(&[range(0x1004, 64), reads[1]], &writes));
        // No longer in place; sharing a part; another type; one operand too few.
        assert!(!made_for.fits(&reads, &[range(0x3000, 64)]));
        assert!(!made_for.fits(&[reads[0], range(0x2010, 64)], &writes));
        assert_eq!(
            Variant::of(kernel, &[range(0x2010, 64)], &writes).same[..],
            [Some(CLASH)]
        );
        let bf16 = RawRange {
            dtype: DType::Bf16,
            ..reads[0]
        };
        assert!(!made_for.fits(&[bf16, reads[1]], &writes));
        assert!(!made_for.fits(&reads[..1], &writes));
    }
}
