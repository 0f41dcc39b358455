//! Streams of the collectives, by policy.

use super::emitter::Emitter;
use crate::ir::{COMPUTE, StreamId};
use crate::program::StreamKind;

/// Streams of a policy's collectives. Shared streams have equal ids; the compute stream means that
/// no separate stream is needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommStreams {
    /// Casts of shards for gathers, which also owns the buffers that gathers write.
    pub(crate) copy_in: StreamId,
    pub(crate) gather: StreamId,
    pub(crate) reduce: StreamId,
    pub(crate) outer: StreamId,
}

impl CommStreams {
    /// Adds the streams. `collective` says whether the inner axis (or, for a policy that gathers
    /// over both axes, any axis) has collectives at all. Priorities are those of the engine that
    /// the policy follows.
    pub(crate) fn new(out: &mut Emitter<'_>, collective: bool, inner: i8, outer: i8) -> Self {
        let fsdp = &out.inputs.scenario.fsdp;
        let (asynchronous, unify) = (fsdp.async_reduce, fsdp.unify_comm_stream);
        let gather = if collective {
            out.b.add_stream(StreamKind::AllGather, inner)
        } else {
            COMPUTE
        };
        // In a collective, ranks wait for one another's kernels, so these run before computation.
        // An exchange on copy engines only leaves the rank's own copy and the sum to the SMs. With
        // a higher priority than computation, these delay the first kernels of the next block, and
        // with a lower one, the last gradients of a step (benchmarks/training.md compares all
        // three). But the matmuls of experts hold all SMs until they end: with the priority of
        // computation, the copy waits for several of them, and so do the other ranks
        // (benchmarks/experts.md).
        let held = out.inputs.scenario.model.has_experts();
        let urgency = if fsdp.copy_engine_reduce && !held {
            0
        } else {
            inner
        };
        let reduce = match (collective && asynchronous, unify) {
            (false, _) => COMPUTE,
            (true, true) => gather,
            (true, false) => out.b.add_stream(StreamKind::ReduceScatter, urgency),
        };
        let outer = if out.inputs.outer > 1 {
            out.b.add_stream(StreamKind::Outer, outer)
        } else {
            COMPUTE
        };
        let copy_in = if collective && fsdp.copy_in_stream {
            out.b.add_stream(StreamKind::CopyIn, inner)
        } else {
            gather
        };
        Self {
            copy_in,
            gather,
            reduce,
            outer,
        }
    }
}
