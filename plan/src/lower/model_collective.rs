//! Collectives of the model's graph: their communicators and streams, and where computation waits
//! for them.
//!
//! A collective starts when the kernels issued before it are done, on a stream that its axis has
//! for itself. Computation continues, and waits where it first touches what the collective sends or
//! receives. Rows are pushed behind a barrier. A captured scope waits for its own collectives, and
//! for none of others.

use super::emitter::Emitter;
use crate::compile::tape::TapeOp;
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CollectiveKind, CommId, DType, EventId,
    ModelCollective, Part, SentRows, StreamId,
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
pub(crate) struct InFlight(Vec<(Operands, EventId)>);

/// What a collective sends and receives, and the choices that say which rows.
type Operands = (Part, Option<SentRows>);

/// Returns the buffers of operands.
fn buffers((part, sent): &Operands) -> impl Iterator<Item = BufferId> {
    let ends = [part.input.buffer, part.output.buffer];
    ends.into_iter().chain(sent.map(|s| s.choices.buffer))
}

impl InFlight {
    /// Issues a collective of the model on these operands.
    pub(crate) fn issue(
        &mut self,
        out: &mut Emitter<'_>,
        lanes: &ModelLanes,
        (collective, dtype): (ModelCollective, DType),
        of: Operands,
    ) {
        let rule = Rule::ModelCollective;
        self.arrive(out, |b| buffers(&of).any(|own| own == b));
        let (comm, stream) = lanes.of(collective.axis);
        out.b.join(rule, COMPUTE, stream);
        let launch = |kind, parts, sent| CollectiveLaunch {
            rule,
            stream,
            kind,
            comm,
            reduce: collective.reduce(),
            dtype,
            parts,
            sent,
        };
        // Other ranks write into this one's memory: not before it is done with what was there.
        if collective.kind.pushes() {
            out.collective(launch(CollectiveKind::Barrier, smallvec![], None));
        }
        out.collective(launch(collective.kind, smallvec![of.0], of.1));
        self.0.push((of, out.b.record(rule, stream)));
    }

    /// Waits for collectives that a use of these ranges depends on.
    pub(crate) fn arrive_for(&mut self, out: &mut Emitter<'_>, accesses: &[Access]) {
        if !self.0.is_empty() {
            self.arrive(out, |b| accesses.iter().any(|a| a.buffer == b));
        }
    }

    /// Waits for collectives whose operands are touched next.
    pub(crate) fn arrive(&mut self, out: &mut Emitter<'_>, touched: impl Fn(BufferId) -> bool) {
        self.0.retain(|(of, done)| {
            let needed = buffers(of).any(&touched);
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
