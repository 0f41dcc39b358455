//! NaN checks around collectives: if one collective of a program has such checks, all collectives
//! must have them.

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{Access, InstrId, OpKind, ShardOp, StreamId};
use crate::program::{Op, Program};

/// Checks that operands of collectives are checked before them, and results after them.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    if !p.instrs.iter().any(|i| checked(p, &i.op).is_some()) {
        return;
    }
    for section in &p.sections {
        // Work by stream. The checks of a collective are next to it on its stream.
        let ids: Vec<InstrId> = section.instrs.clone().map(InstrId).collect();
        for (at, id) in ids.iter().enumerate() {
            let Op::Collective { id: c, stream } = p.instrs[id.index()].op else {
                continue;
            };
            let before = neighbours(p, ids[..at].iter().rev(), stream);
            let after = neighbours(p, ids[at + 1..].iter(), stream);
            let c = &p.collectives[c.index()];
            for part in &c.parts {
                for (range, found, when) in [
                    (part.input, &before, "before"),
                    (part.output, &after, "after"),
                ] {
                    // Rows that were not sent contain what was in memory before.
                    let unfilled = c.sent.is_some() && when == "after";
                    if unfilled || !p.has_numbers(range.buffer) {
                        continue;
                    }
                    sink.fact(RuleId::NanCheck, 1);
                    if !found.contains(&range) {
                        sink.violation(RuleId::NanCheck, Some(*id), None, || {
                            format!(
                                "#{}: {} is not checked for NaN {when} the collective",
                                id.0,
                                describe::range(p, range)
                            )
                        });
                    }
                }
            }
        }
    }
}

/// Returns the range that an instruction checks.
fn checked(p: &Program, op: &Op) -> Option<(Access, StreamId)> {
    let Op::Launch { kernel, stream, .. } = *op else {
        return None;
    };
    let body = p.kernels[kernel.index()].body.first()?;
    let checks = body.op == OpKind::Shard(ShardOp::NanCheck);
    let what = p.reads(op).first().filter(|_| checks)?;
    Some((*what, stream))
}

/// Returns the ranges that are checked on a stream until other work on it.
fn neighbours<'a>(
    p: &Program,
    ids: impl Iterator<Item = &'a InstrId>,
    on: StreamId,
) -> Vec<Access> {
    let mut found = Vec::new();
    for id in ids {
        let op = &p.instrs[id.index()].op;
        match *op {
            Op::Launch { stream, .. } if stream == on => match checked(p, op) {
                Some((what, _)) => found.push(what),
                None => break,
            },
            Op::Collective { stream, .. } | Op::Copy { stream, .. } if stream == on => break,
            _ => {}
        }
    }
    found
}
