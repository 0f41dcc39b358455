//! What torch's two ways of sharding reduce with: a reduce-scatter of gradients and an all-reduce over replicas behind it; and sums, which
//! every policy makes.

use super::context::Cx;
use crate::ir::{Access, CollectiveKind, CommId, Part, ReduceOp, ShardOp, StreamId};
use crate::program::Rule;
use smallvec::smallvec;

/// Reduces `input` into this rank's part of it, in the dtype of gradients on the wire. One rank alone copies.
pub(crate) fn scatter(
    cx: &mut Cx<'_>,
    (comm, stream): (Option<CommId>, StreamId),
    op: ReduceOp,
    (input, output): (Access, Access),
) {
    let dtype = cx.scenario.precision.comm_grads;
    let Some(comm) = comm else {
        let n = output.bytes / dtype.size();
        cx.run(
            Rule::Reduce,
            ShardOp::Copy,
            n,
            dtype,
            stream,
            &[input],
            &[output],
        );
        return;
    };
    let kind = CollectiveKind::ReduceScatter;
    let parts = smallvec![Part { input, output }];
    cx.b.collective(Rule::Reduce, stream, kind, comm, op, dtype, parts);
}

/// Sums what was reduced on one stream over the replicas on another, in place and in the same dtype.
pub(crate) fn all_reduce(
    cx: &mut Cx<'_>,
    comm: CommId,
    (reduced_on, stream): (StreamId, StreamId),
    op: ReduceOp,
    what: Access,
) {
    let dtype = cx.scenario.precision.comm_grads;
    cx.b.join(Rule::OuterReduce, reduced_on, stream);
    let kind = CollectiveKind::AllReduce;
    let parts = smallvec![Part {
        input: what,
        output: what
    }];
    cx.b.collective(Rule::OuterReduce, stream, kind, comm, op, dtype, parts);
}

/// Adds a range to others, one after another, in the dtype of these.
pub(crate) fn accumulate(
    cx: &mut Cx<'_>,
    rule: Rule,
    from: Access,
    to: &[Access],
    stream: StreamId,
) {
    let dtype = cx.b.buffers[to[0].buffer.index()].dtype;
    let n = to.iter().map(|a| a.bytes).sum::<u64>() / dtype.size();
    let reads: Vec<Access> = std::iter::once(from).chain(to.iter().copied()).collect();
    cx.run(rule, ShardOp::Accumulate, n, dtype, stream, &reads, to);
}
