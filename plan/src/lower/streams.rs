//! Streams of the collectives, by policy.

use super::emitter::Emitter;
use crate::ir::{COMPUTE, StreamId};
use crate::program::StreamKind;

/// Where a policy issues its collectives: equal ids where streams are shared, the compute stream
/// where none is needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommStreams {
    pub(crate) gather: StreamId,
    pub(crate) reduce: StreamId,
    pub(crate) outer: StreamId,
}

impl CommStreams {
    /// `collective`: whether the inner axis (or, for a policy that gathers over both, any axis) has
    /// collectives at all. Priorities are those of the source that the policy follows.
    pub(crate) fn new(out: &mut Emitter<'_>, collective: bool, inner: i8, outer: i8) -> Self {
        let fsdp = &out.inputs.scenario.fsdp;
        let (asynchronous, unify) = (fsdp.async_reduce, fsdp.unify_comm_stream);
        let gather = if collective {
            out.b.add_stream(StreamKind::AllGather, inner)
        } else {
            COMPUTE
        };
        // Ranks wait for one another's kernels in a collective, so these go before computation.
        // What an exchange leaves to the SMs is the rank's own copy and sum: more urgent than
        // computation they hold up the next block's first kernels, less urgent the last gradients
        // of a step (benchmarks/training.md has all three).
        let urgency = if fsdp.copy_engine_reduce { 0 } else { inner };
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
        Self {
            gather,
            reduce,
            outer,
        }
    }
}
