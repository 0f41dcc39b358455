//! Reductions for torch's two sharding methods (a reduce-scatter of gradients, followed by an
//! all-reduce over replicas), and sums that every policy needs.

use super::builder::CollectiveLaunch;
use super::emitter::Emitter;
use super::kernels::KernelLaunch;
use crate::ir::{Access, CollectiveKind, CommId, Part, ReduceOp, ShardOp, StreamId};
use crate::program::Rule;
use smallvec::smallvec;

/// Reduces `input` to this rank's part of it, in the communication dtype of gradients. A single
/// rank copies.
pub(crate) fn scatter(
    out: &mut Emitter<'_>,
    (comm, stream): (Option<CommId>, StreamId),
    op: ReduceOp,
    (input, output): (Access, Access),
) {
    let dtype = out.inputs.types.comm;
    let Some(comm) = comm else {
        out.copy(Rule::Reduce, stream, input, output);
        return;
    };
    let kind = CollectiveKind::ReduceScatter;
    let parts = smallvec![Part { input, output }];
    out.collective(CollectiveLaunch {
        rule: Rule::Reduce,
        stream,
        kind,
        comm,
        reduce: op,
        dtype,
        parts,
        sent: None,
    });
}

/// All-reduces a result over the replicas, in place and in the same dtype. The reduction that
/// produced it ran on one stream; the all-reduce runs on another.
pub(crate) fn all_reduce(
    out: &mut Emitter<'_>,
    comm: CommId,
    (reduced_on, stream): (StreamId, StreamId),
    op: ReduceOp,
    what: Access,
) {
    let dtype = out.inputs.types.comm;
    out.b.join(Rule::OuterReduce, reduced_on, stream);
    let kind = CollectiveKind::AllReduce;
    let parts = smallvec![Part {
        input: what,
        output: what
    }];
    out.collective(CollectiveLaunch {
        rule: Rule::OuterReduce,
        stream,
        kind,
        comm,
        reduce: op,
        dtype,
        parts,
        sent: None,
    });
}

/// Adds a range to other ranges, one after another, in their dtype.
pub(crate) fn accumulate(
    out: &mut Emitter<'_>,
    rule: Rule,
    from: Access,
    to: &[Access],
    stream: StreamId,
) {
    let dtype = out.b.program().buffers[to[0].buffer.index()].dtype;
    let n = to.iter().map(|a| a.bytes).sum::<u64>() / dtype.size();
    let reads: Vec<Access> = std::iter::once(from).chain(to.iter().copied()).collect();
    out.run(KernelLaunch {
        rule,
        op: ShardOp::Accumulate,
        elements: n,
        dtype,
        stream,
        reads: &reads,
        writes: to,
    });
}
