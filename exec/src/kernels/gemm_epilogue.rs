//! GEMMs with fused epilogue: one operation after the other here, with temporary memory if only the
//! epilogue reads a result.

use super::error::OperandError;
use super::fused;
use super::operands::Operands;
use super::ops::{self, Call};
use super::scratch::Scratch;
use super::view::overlap;
use crate::operand::{LaunchContext, RawRange};
use shardlab_plan::ir::{BodyOp, Place};
use smallvec::SmallVec;

/// Performs GEMMs and the elementwise operations of their epilogue, on the rows that are computed.
///
/// # Errors
/// If an operation does not accept its operands. The error has the operation's index.
pub(super) fn run(
    ctx: &LaunchContext<'_>,
    gemms: &[BodyOp],
    epilogue: &[BodyOp],
    computed: fused::Computed,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), (usize, OperandError)> {
    let mut reads: SmallVec<[RawRange; 8]> = SmallVec::from_slice(reads);
    let (mut gemms, mut epilogue) = (gemms.to_vec(), epilogue.to_vec());
    let mut kept: SmallVec<[Scratch; 3]> = SmallVec::new();
    let mut room = |bytes: usize| {
        let mut new = Scratch::take(bytes.div_ceil(size_of::<f32>()));
        let ptr = new.as_mut_ptr().cast::<u8>();
        kept.push(new);
        ptr
    };
    let made = |op: &BodyOp| match op.outputs.first().map(|s| s.place) {
        Some(Place::Write(w)) => writes.get(usize::from(w)).copied(),
        _ => None,
    };
    // A GEMM may write what a later operation reads: every operation sees the contents from before.
    let written: SmallVec<[RawRange; 2]> = gemms.iter().filter_map(made).collect();
    let extent = |r: &RawRange| r.ptr as usize..r.ptr as usize + r.bytes;
    for read in &mut reads {
        if written.iter().any(|w| overlap(&extent(w), &extent(read))) {
            let copy = room(read.bytes);
            // SAFETY: the range is live and the copy has its length, rounded up.
            unsafe { std::ptr::copy_nonoverlapping(read.ptr, copy, read.bytes) };
            read.ptr = copy;
        }
    }
    // Results that never leave the kernel become further operands.
    for i in 0..gemms.len() {
        let Some(slot) = gemms[i].outputs.first() else {
            continue;
        };
        let place = slot.place;
        if !matches!(place, Place::Register(_)) {
            continue;
        }
        let bytes = (slot.shape.iter().product::<u64>() * slot.dtype.size()) as usize;
        let at = Place::Read(reads.len() as u8);
        reads.push(RawRange {
            ptr: room(bytes),
            bytes,
            dtype: slot.dtype,
        });
        let ops = gemms.iter_mut().chain(&mut epilogue);
        let slots = ops.flat_map(|op| op.inputs.iter_mut().chain(&mut op.outputs));
        for slot in slots.filter(|s| s.place == place) {
            slot.place = at;
        }
    }
    for (i, op) in gemms.iter().enumerate() {
        let operands = Operands::new(ctx, op, &reads, writes);
        let whole = Call::Whole(&operands);
        ops::cpu(&op.op).run(whole).map_err(|e| (i, e))?;
    }
    fused::run(&epilogue, computed, &reads, writes).map_err(|(i, f)| (gemms.len() + i, f))
}
