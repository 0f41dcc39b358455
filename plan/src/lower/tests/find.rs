//! Helpers that find instructions in a schedule.

use super::{LLAMA, collective, program, steady};
use crate::check::check;
use crate::ir::{BufferId, CollectiveKind, DType, EventId, OpKind, ReduceOp, ShardOp, StreamId};
use crate::program::{Instr, Op, Phase, Program, StreamKind};

/// Returns a program of the small llama that passes the checker.
pub(super) fn checked(sets: &[&str]) -> Program {
    let p = program(LLAMA, sets);
    let report = check(&p);
    assert!(report.is_ok(), "{sets:?}\n{report}");
    p
}

pub(super) fn stream(p: &Program, kind: StreamKind) -> StreamId {
    let at = p.streams.iter().position(|s| s.kind == kind);
    StreamId(at.expect("the policy has such a stream") as u8)
}

/// Returns the position of the only record of an event in the steady step.
pub(super) fn recorded(p: &Program, event: EventId) -> usize {
    let at = |i: &Instr| matches!(i.op, Op::Record { event: e, .. } if e == event);
    let at = steady(p).iter().position(at);
    at.expect("what is waited for is recorded in the same step")
}

/// Returns the waits of a stream in the steady step: position, event, and the stream that recorded
/// the event.
pub(super) fn waits(p: &Program, on: StreamId) -> Vec<(usize, EventId, StreamId)> {
    let list = steady(p).iter().enumerate();
    list.filter_map(|(at, i)| match i.op {
        Op::Wait { event, stream } if stream == on => {
            let Op::Record { stream, .. } = steady(p)[recorded(p, event)].op else {
                unreachable!("found as a record")
            };
            Some((at, event, stream))
        }
        _ => None,
    })
    .collect()
}

/// Returns the positions of collectives of a kind in the steady step.
pub(super) fn collectives(p: &Program, kind: CollectiveKind) -> Vec<usize> {
    let list = steady(p).iter().enumerate();
    list.filter(|(_, i)| i.phase == Phase::Backward && collective(p, i) == Some(kind))
        .map(|(at, _)| at)
        .collect()
}

/// Returns the sharding kernels in the steady step that `pick` accepts: position, operation,
/// stream, first write.
pub(super) fn kernels(
    p: &Program,
    pick: impl Fn(ShardOp) -> bool,
) -> Vec<(usize, ShardOp, StreamId, BufferId)> {
    let list = steady(p).iter().enumerate();
    list.filter_map(|(at, i)| {
        let Op::Launch { kernel, stream, .. } = i.op else {
            return None;
        };
        match p.kernels[kernel.index()].body.first()?.op {
            OpKind::Shard(op) if pick(op) => Some((at, op, stream, p.writes(&i.op)[0].buffer)),
            _ => None,
        }
    })
    .collect()
}

/// Returns the positions in the steady step at which a buffer is freed.
pub(super) fn frees(p: &Program, buffer: BufferId) -> Vec<usize> {
    let list = steady(p).iter().enumerate();
    list.filter(|(_, i)| i.op == Op::Free(buffer))
        .map(|(at, _)| at)
        .collect()
}

/// Returns the buffer that a collective of the steady step writes, with its dtype and reduction.
pub(super) fn output(p: &Program, at: usize) -> (BufferId, DType, ReduceOp) {
    let Op::Collective { id, .. } = steady(p)[at].op else {
        panic!("no collective")
    };
    let c = &p.collectives[id.index()];
    (c.parts[0].output.buffer, c.dtype, c.reduce)
}
