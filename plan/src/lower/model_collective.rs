//! Collectives of the model's graph: their communicators and streams, and where computation waits
//! for them.
//!
//! A collective starts when the kernels issued before it are done, on a stream that its axis has
//! for itself. Computation continues, and waits where it first touches what the collective sends or
//! receives. A captured scope waits for its own collectives, and for none of others.

use super::emitter::Emitter;
use crate::compile::tape::TapeOp;
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CommId, DType, EventId, ModelCollective, Part,
    StreamId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::program::{Rule, StreamKind};
use smallvec::smallvec;

/// Ranks wait for one another in a collective, and computation waits for its result.
const PRIORITY: i8 = -1;

/// Communicators and streams of the axes along which the model communicates.
pub(crate) struct ModelLanes(Vec<(AxisId, CommId, StreamId)>);

impl ModelLanes {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let tape = out.inputs.tape;
        let passes = tape.training().chain(&tape.eval);
        let axes = passes.filter_map(|op| match op {
            TapeOp::Collective { collective, .. } => Some(collective.axis),
            _ => None,
        });
        let axes = axes.fold(AxisSet::EMPTY, AxisSet::with);
        let lane = |axis: AxisId| {
            let comm = out.communicator(axis.label(), AxisSet::of(axis), false)?;
            Some((axis, comm, out.b.add_stream(StreamKind::Model, PRIORITY)))
        };
        Self(axes.iter().filter_map(lane).collect())
    }

    fn of(&self, axis: AxisId) -> (CommId, StreamId) {
        let lane = self.0.iter().find(|l| l.0 == axis);
        let (_, comm, stream) = lane.expect("models communicate along axes of several ranks only");
        (*comm, *stream)
    }
}

/// Collectives that computation has not waited for: their operands, and when they are done.
#[derive(Default)]
pub(crate) struct InFlight(Vec<(Part, EventId)>);

impl InFlight {
    /// Issues a collective of the model on these operands.
    pub(crate) fn issue(
        &mut self,
        out: &mut Emitter<'_>,
        lanes: &ModelLanes,
        (collective, dtype): (ModelCollective, DType),
        part: Part,
    ) {
        let rule = Rule::ModelCollective;
        self.arrive_for(out, &[part.input, part.output]);
        let (comm, stream) = lanes.of(collective.axis);
        out.b.join(rule, COMPUTE, stream);
        out.collective(CollectiveLaunch {
            rule,
            stream,
            kind: collective.kind,
            comm,
            reduce: collective.reduce(),
            dtype,
            parts: smallvec![part],
        });
        self.0.push((part, out.b.record(rule, stream)));
    }

    /// Waits for collectives that a use of these ranges depends on.
    pub(crate) fn arrive_for(&mut self, out: &mut Emitter<'_>, accesses: &[Access]) {
        if !self.0.is_empty() {
            self.arrive(out, |b| accesses.iter().any(|a| a.buffer == b));
        }
    }

    /// Waits for collectives whose operands are touched next.
    pub(crate) fn arrive(&mut self, out: &mut Emitter<'_>, touched: impl Fn(BufferId) -> bool) {
        self.0.retain(|(part, done)| {
            let needed = touched(part.input.buffer) || touched(part.output.buffer);
            if needed {
                out.b.wait(Rule::ModelCollective, *done, COMPUTE);
            }
            !needed
        });
    }

    /// Waits for all.
    pub(crate) fn arrive_all(&mut self, out: &mut Emitter<'_>) {
        self.arrive(out, |_| true);
    }
}
