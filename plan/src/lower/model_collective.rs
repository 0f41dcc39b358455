//! Collectives of the model's graph: their communicators and streams, and where computation waits
//! for them.
//!
//! A collective starts when the kernels issued before it are done, on a stream that its axis has
//! for itself. Computation goes on, and waits where it first touches what the collective sends or
//! receives. A captured scope waits for its own collectives, and for none of others.

use super::emitter::Emitter;
use super::walk::Walk;
use crate::compile::tape::TapeOp;
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CommId, DType, EventId, ModelCollective, Part,
    StreamId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::program::{Rule, StreamKind};
use smallvec::smallvec;

/// Ranks wait for one another in a collective, and computation for its result.
const PRIORITY: i8 = -1;

/// Communicators and streams of the axes along which the model communicates.
pub(crate) struct ModelLanes(Vec<(AxisId, CommId, StreamId)>);

impl ModelLanes {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let tape = out.inputs.tape;
        let passes = [&tape.forward, &tape.backward, &tape.eval];
        let axes = passes.into_iter().flatten().filter_map(|op| match op {
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

/// A collective that computation has not waited for.
pub(crate) struct InFlight {
    operands: [BufferId; 2],
    done: EventId,
}

impl Walk<'_, '_> {
    /// Issues a collective of the model.
    pub(super) fn collective(&mut self, collective: ModelCollective, dtype: DType, operands: u32) {
        let at = operands as usize;
        let [input, output] = [at, at + 1].map(|o| {
            let operand = self.out.inputs.tape.operands[o];
            self.resolve(&operand)
        });
        let rule = Rule::ModelCollective;
        self.arrive(|b| [input.buffer, output.buffer].contains(&b));
        let (comm, stream) = self.lanes.of(collective.axis);
        self.out.b.join(rule, COMPUTE, stream);
        self.out.b.collective(CollectiveLaunch {
            rule,
            stream,
            kind: collective.kind,
            comm,
            reduce: collective.reduce(),
            dtype,
            parts: smallvec![Part { input, output }],
        });
        self.in_flight.push(InFlight {
            operands: [input.buffer, output.buffer],
            done: self.out.b.record(rule, stream),
        });
    }

    /// Waits for collectives with operands that are touched next.
    pub(super) fn arrive(&mut self, touched: impl Fn(BufferId) -> bool) {
        let out = &mut *self.out;
        self.in_flight.retain(|c| {
            let needed = c.operands.iter().any(|b| touched(*b));
            if needed {
                out.b.wait(Rule::ModelCollective, c.done, COMPUTE);
            }
            !needed
        });
    }

    /// Waits for collectives that a launch depends on.
    pub(super) fn arrive_for(&mut self, accesses: &[Access]) {
        if !self.in_flight.is_empty() {
            self.arrive(|b| accesses.iter().any(|a| a.buffer == b));
        }
    }
}
