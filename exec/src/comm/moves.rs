//! Data movement of a collective, for one member.
//!
//! No member writes a byte while another one reads it. An all-gather's in-place input is a slice
//! that its owner does not change; a reduce-scatter's in-place output is the slice that only its
//! owner reads; in an all-reduce, only member `i` accesses the `i`-th chunk of every buffer; an
//! all-to-all of all rows uses a staging copy; each selected row has a separate place.

use super::{Call, counted, reduce};
use crate::kernels::is_pushed;
use shardlab_plan::ir::{CollectiveKind, CountedRows, PushedRows, SelectedRows};

/// Moves the share of member `me`. For an all-to-all, returns the data that [`unstage`] must write
/// once every member has called this.
///
/// # Safety
/// The calls match; every range is valid, and nothing else accesses it meanwhile.
pub(super) unsafe fn perform(me: usize, calls: &[Call]) -> Option<Vec<Vec<u8>>> {
    let (mine, n) = (&calls[me], calls.len());
    // SAFETY: the caller's contract.
    unsafe {
        match mine.rows {
            Some(SelectedRows::Pushed(of)) => {
                take_rows(me, calls, of);
                return None;
            }
            Some(SelectedRows::Counted(of)) => {
                take_counted(me, calls, of);
                return None;
            }
            None => {}
        }
    }
    let mut staged = Vec::new();
    for (p, (input, output)) in mine.parts.iter().enumerate() {
        let inputs = calls.iter().map(|c| c.parts[p].0);
        // SAFETY: offsets are within ranges whose sizes were compared; see the module documentation
        // for who writes which bytes.
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
                CollectiveKind::PeerPush | CollectiveKind::PeerReturn | CollectiveKind::Barrier => {
                }
            }
        }
    }
    (mine.kind == CollectiveKind::AllToAll).then_some(staged)
}

/// Copies the rows that all members, including `me` itself, push to member `me`.
///
/// # Safety
/// As [`perform`].
unsafe fn take_rows(me: usize, calls: &[Call], of: PushedRows) {
    let mine = &calls[me];
    let [part, choices] = &mine.parts[..] else {
        return;
    };
    let rows = of.rows as usize;
    let tokens = rows / calls.len();
    let full = part.0.bytes.max(part.1.bytes);
    let (width, k) = (full / rows, choices.0.bytes / 8 / rows);
    for (from, call) in calls.iter().enumerate() {
        let (source, choices) = (&call.parts[0].0, &call.parts[1].0);
        for token in 0..tokens {
            let row = me * tokens + token;
            // SAFETY: choices are `rows * k` integers, and each range has the rows that its kind
            // says.
            unsafe {
                let chosen = choices.ptr.cast::<i64>().add(row * k);
                let chosen: Vec<i64> = (0..k).map(|i| chosen.add(i).read_unaligned()).collect();
                if !is_pushed(&chosen, of.experts) {
                    continue;
                }
                let at = if mine.kind == CollectiveKind::PeerPush {
                    token
                } else {
                    row
                };
                let to = part.1.ptr.add((from * tokens + token) * width);
                copy(source.ptr.add(at * width), to, width);
            }
        }
    }
}

/// Copies the rows that all members, including `me` itself, have counted for member `me`.
///
/// # Safety
/// As [`perform`].
unsafe fn take_counted(me: usize, calls: &[Call], of: CountedRows) {
    let [(_, output), _] = calls[me].parts[..] else {
        return;
    };
    let block = output.bytes / calls.len();
    for (from, call) in calls.iter().enumerate() {
        let [(input, _), (counts, _)] = call.parts[..] else {
            return;
        };
        // SAFETY: counts are 64-bit integers, as many for each member; `counted` is at most a
        // block, and both ranges have a block for each member.
        unsafe {
            let numbers = std::slice::from_raw_parts(counts.ptr.cast_const(), counts.bytes);
            let rows = counted(numbers, calls.len(), of)[me];
            let bytes = rows as usize * (output.bytes / of.rows as usize);
            copy(
                input.ptr.add(me * block),
                output.ptr.add(from * block),
                bytes,
            );
        }
    }
}

/// Writes the data that an all-to-all has staged.
///
/// # Safety
/// As [`perform`]; every member has staged.
pub(super) unsafe fn unstage(call: &Call, staged: &[Vec<u8>]) {
    for ((_, output), data) in call.parts.iter().zip(staged) {
        // SAFETY: the staged data have the output's length.
        unsafe { copy(data.as_ptr().cast_mut(), output.ptr, data.len()) };
    }
}

/// Copies a range, unless source and destination are equal.
///
/// # Safety
/// Both ranges are valid.
unsafe fn copy(from: *mut u8, to: *mut u8, bytes: usize) {
    if from != to && bytes > 0 {
        // SAFETY: the caller's contract; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}
