//! Matrix products whose kernels go on with elementwise code: one after the other here, through memory of their own where a result
//! is for the code behind it alone.

use super::error::Fault;
use super::scratch::Scratch;
use super::view::overlap;
use super::{Operands, fused, gemm};
use crate::operand::RawRange;
use shardlab_plan::ir::{BodyOp, OpKind, Place, op};
use smallvec::SmallVec;

/// Performs products, and the elementwise code behind them.
///
/// # Errors
/// With the index of the operation at fault.
pub(super) fn run(
    products: &[BodyOp],
    rest: &[BodyOp],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), (usize, Fault)> {
    let mut reads: SmallVec<[RawRange; 8]> = SmallVec::from_slice(reads);
    let (mut products, mut rest) = (products.to_vec(), rest.to_vec());
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
    // What a product writes may be what a later operation reads: every operation sees what was there before.
    let written: SmallVec<[RawRange; 2]> = products.iter().filter_map(made).collect();
    let extent = |r: &RawRange| r.ptr as usize..r.ptr as usize + r.bytes;
    for read in &mut reads {
        if written.iter().any(|w| overlap(&extent(w), &extent(read))) {
            let copy = room(read.bytes);
            // SAFETY: the range is live and the copy as long, rounded up.
            unsafe { std::ptr::copy_nonoverlapping(read.ptr, copy, read.bytes) };
            read.ptr = copy;
        }
    }
    // Results that never leave the kernel become further operands.
    for i in 0..products.len() {
        let Some(slot) = products[i].outputs.first() else {
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
        let ops = products.iter_mut().chain(&mut rest);
        let slots = ops.flat_map(|op| op.inputs.iter_mut().chain(&mut op.outputs));
        for slot in slots.filter(|s| s.place == place) {
            slot.place = at;
        }
    }
    for (i, op) in products.iter().enumerate() {
        let OpKind::Gemm(op::Gemm {
            ta,
            tb,
            bias,
            accumulate,
        }) = op.op
        else {
            continue;
        };
        let o = Operands::new(op, &reads, writes);
        gemm::run(&o, ta, tb, bias, accumulate).map_err(|f| (i, f))?;
    }
    fused::run(&rest, &reads, writes).map_err(|(i, f)| (products.len() + i, f))
}
