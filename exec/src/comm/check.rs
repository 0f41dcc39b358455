//! Checks that the calls of all members of a collective match.

use super::Call;
use crate::base::operand::RawRange;
use shardlab_plan::ir::{CollectiveKind, ReduceOp};

/// Checks calls in order of position. The error names the first rank whose call differs or is
/// invalid.
pub(super) fn check(name: &str, ranks: &[u32], ticket: u64, calls: &[Call]) -> Result<(), String> {
    let at = |i: usize, what: String| {
        Err(format!(
            "communicator {name}, collective number {ticket}: rank {} {what}",
            ranks[i]
        ))
    };
    let first = &calls[0];
    for (i, call) in calls.iter().enumerate() {
        if let Some(difference) = difference(first, call) {
            return at(
                i,
                format!("{difference}, rank {} {}", ranks[0], words(first)),
            );
        }
        if let Some(wrong) = wrong(call, i, ranks.len()) {
            return at(i, wrong);
        }
    }
    Ok(())
}

fn words(call: &Call) -> String {
    let bytes: usize = call.parts.iter().map(|(i, o)| i.bytes.max(o.bytes)).sum();
    format!(
        "launches {} of {bytes} bytes {} {:?} in {} parts",
        call.kind.name(),
        call.dtype,
        call.reduce,
        call.parts.len()
    )
}

fn difference(a: &Call, b: &Call) -> Option<String> {
    let sizes = |c: &Call| -> Vec<(usize, usize)> {
        c.parts.iter().map(|(i, o)| (i.bytes, o.bytes)).collect()
    };
    let same = a.kind == b.kind
        && a.reduce == b.reduce
        && a.dtype == b.dtype
        && a.parts.len() == b.parts.len()
        && sizes(a) == sizes(b);
    (!same).then(|| words(b))
}

/// Describes what is invalid about the call at `position` of `n` members.
fn wrong(call: &Call, position: usize, n: usize) -> Option<String> {
    let reduces = call.kind.reduces();
    if reduces && !call.dtype.is_float() {
        return Some(format!("asks for a reduction of {}", call.dtype));
    }
    if reduces == (call.reduce == ReduceOp::None) {
        return Some(format!("asks for {} {:?}", call.kind.name(), call.reduce));
    }
    for (p, (input, output)) in call.parts.iter().enumerate() {
        let (i, o) = (input.bytes, output.bytes);
        // The last part selects rows.
        let fits = if call.rows.is_some() && p + 1 == call.parts.len() {
            i == o
        } else {
            call.kind.sizes_fit(i as u64, o as u64, n as u64)
                && (!call.kind.exchanges() || i.is_multiple_of(n))
        };
        let element = call.dtype.size() as usize;
        if !fits || !i.is_multiple_of(element) || !o.is_multiple_of(element) {
            return Some(format!(
                "brings {i} bytes in and {o} bytes out of {} in part {p} of {} over {n} ranks",
                call.dtype,
                call.kind.name()
            ));
        }
        let selected = call.rows.is_some() && p + 1 < call.parts.len();
        let in_place = !selected && in_place(call.kind, position, input, output);
        if overlap(input, output) && !in_place {
            return Some(format!(
                "lets input and output of part {p} of {} overlap other than in place",
                call.kind.name()
            ));
        }
    }
    // The outputs of coalesced parts are disjoint, and no part reads what another part writes.
    for (p, (_, output)) in call.parts.iter().enumerate() {
        for (q, (input, other)) in call.parts.iter().enumerate() {
            if p != q && (overlap(output, other) || overlap(output, input)) {
                return Some(format!("lets parts {p} and {q} overlap"));
            }
        }
    }
    None
}

/// Returns whether two ranges share bytes.
pub(crate) fn overlap(a: &RawRange, b: &RawRange) -> bool {
    let (x, y) = (a.ptr.addr(), b.ptr.addr());
    a.bytes > 0 && b.bytes > 0 && x < y + b.bytes && y < x + a.bytes
}

/// Returns whether input and output of the member at `position` are those of an in-place
/// collective.
pub(crate) fn in_place(
    kind: CollectiveKind,
    position: usize,
    input: &RawRange,
    output: &RawRange,
) -> bool {
    let (i, o) = (input.ptr.addr(), output.ptr.addr());
    match kind {
        CollectiveKind::AllGather => i == o + position * input.bytes,
        CollectiveKind::ReduceScatter => o == i + position * output.bytes,
        _ => i == o,
    }
}
