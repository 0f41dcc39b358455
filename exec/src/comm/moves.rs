//! The data movement of a collective, from the point of view of one member.
//!
//! No byte is written by one member while another reads it: an all-gather's in-place input is a slice that its owner
//! leaves alone; a reduce-scatter's in-place output is the slice that only its owner reads; in an all-reduce member `i`
//! alone touches the `i`-th piece of every buffer; an all-to-all goes through a staging copy.

use super::{Call, reduce};
use shardlab_plan::ir::CollectiveKind;

/// Moves member `me`'s share. An all-to-all returns what [`unstage`] must write once every member has got here.
///
/// # Safety
/// Calls have been found to fit together; every range is valid, and no other code touches it meanwhile.
pub(super) unsafe fn perform(me: usize, calls: &[Call]) -> Option<Vec<Vec<u8>>> {
    let (mine, n) = (&calls[me], calls.len());
    let mut staged = Vec::new();
    for (p, (input, output)) in mine.parts.iter().enumerate() {
        let inputs = calls.iter().map(|c| c.parts[p].0);
        // SAFETY: offsets stay within ranges whose sizes were compared; see the module documentation for who writes what.
        unsafe {
            match mine.kind {
                CollectiveKind::AllGather => {
                    for (i, from) in inputs.enumerate() {
                        copy(from.ptr, output.ptr.add(i * input.bytes), input.bytes);
                    }
                }
                CollectiveKind::ReduceScatter => {
                    let at = me * output.bytes;
                    let from: Vec<*const u8> = inputs.map(|r| r.ptr.add(at).cast_const()).collect();
                    reduce::reduce(mine.dtype, mine.reduce, &from, &[output.ptr], output.bytes);
                }
                CollectiveKind::AllReduce => {
                    let element = mine.dtype.size() as usize;
                    let count = input.bytes / element;
                    let (from, to) = (count * me / n * element, count * (me + 1) / n * element);
                    let sources: Vec<*const u8> =
                        inputs.map(|r| r.ptr.add(from).cast_const()).collect();
                    let outputs: Vec<*mut u8> =
                        calls.iter().map(|c| c.parts[p].1.ptr.add(from)).collect();
                    reduce::reduce(mine.dtype, mine.reduce, &sources, &outputs, to - from);
                }
                CollectiveKind::AllToAll => {
                    let piece = input.bytes / n;
                    let mut stage = vec![0; input.bytes];
                    for (i, from) in inputs.enumerate() {
                        copy(
                            from.ptr.add(me * piece),
                            stage.as_mut_ptr().add(i * piece),
                            piece,
                        );
                    }
                    staged.push(stage);
                }
            }
        }
    }
    (mine.kind == CollectiveKind::AllToAll).then_some(staged)
}

/// Writes what an all-to-all staged.
///
/// # Safety
/// As [`perform`]; every member has staged.
pub(super) unsafe fn unstage(call: &Call, staged: &[Vec<u8>]) {
    for ((_, output), data) in call.parts.iter().zip(staged) {
        // SAFETY: the stage has the output's length.
        unsafe { copy(data.as_ptr().cast_mut(), output.ptr, data.len()) };
    }
}

/// Copies a range; nothing to do in place.
///
/// # Safety
/// Both ranges are valid.
unsafe fn copy(from: *mut u8, to: *mut u8, bytes: usize) {
    if from != to && bytes > 0 {
        // SAFETY: the caller's promise; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}
