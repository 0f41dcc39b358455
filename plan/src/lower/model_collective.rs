//! Collectives of the model's graph: their communicators and streams, and where computation waits
//! for them.
//!
//! A collective starts after the kernels issued before it, on a separate stream of its axis.
//! Computation continues, and waits when it first touches a buffer that the collective sends or
//! receives. A shared expert that overlaps with the token exchange may read the sent buffer. Pushed
//! rows follow a barrier. A captured scope waits for its own collectives only.

use super::emitter::Emitter;
use crate::compile::tape::TapeOp;
use crate::config::Scenario;
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CollectiveKind, CommId, DType, EventId,
    ModelCollective, Part, SentRows, StreamId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::program::{Rule, StreamKind};
use smallvec::smallvec;

/// High priority, because ranks wait for one another in a collective, and computation waits for its
/// result.
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

/// Collectives that computation has not waited for, with their operands and end events.
pub(crate) struct InFlight {
    all: Vec<(Operands, EventId)>,
    /// Whether kernels may read or free the operands of collectives before these have finished.
    overlaps: bool,
    /// Operands that are unused after their collectives.
    unused: Vec<BufferId>,
}

/// The buffers that a collective sends and receives, and those that select the rows.
type Operands = (Part, Option<SentRows>);

/// Returns the buffers of operands.
fn buffers((part, sent): &Operands) -> impl Iterator<Item = BufferId> {
    let ends = [part.input.buffer, part.output.buffer];
    let by = sent.map(|s| [s.by.input.buffer, s.by.output.buffer]);
    ends.into_iter().chain(by.into_iter().flatten())
}

/// Returns the buffer that a collective writes.
const fn received((part, _): &Operands) -> BufferId {
    part.output.buffer
}

impl InFlight {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let moe = scenario.moe.as_ref();
        Self {
            all: Vec::new(),
            overlaps: moe.is_some_and(|moe| moe.shared_expert_overlap),
            unused: Vec::new(),
        }
    }

    /// Issues a collective of the model with these operands.
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
        // Other ranks write to this rank's memory, so they must wait until it no longer uses its
        // previous content.
        if collective.kind.pushes() {
            out.collective(launch(CollectiveKind::Barrier, smallvec![], None));
        }
        out.collective(launch(collective.kind, smallvec![of.0], of.1));
        self.all.push((of, out.b.record(rule, stream)));
    }

    /// Waits for the collectives on which a kernel depends that reads and writes these ranges.
    pub(crate) fn arrive_for(
        &mut self,
        out: &mut Emitter<'_>,
        reads: &[Access],
        writes: &[Access],
    ) {
        if self.all.is_empty() {
            return;
        }
        let any = |accesses: &[Access], b| accesses.iter().any(|a| a.buffer == b);
        let overlaps = self.overlaps;
        self.arrive_if(out, |of| {
            let read = match overlaps {
                true => any(reads, received(of)),
                false => buffers(of).any(|b| any(reads, b)),
            };
            read || buffers(of).any(|b| any(writes, b))
        });
    }

    /// Waits for the collectives whose operands are used next.
    pub(crate) fn arrive(&mut self, out: &mut Emitter<'_>, touched: impl Fn(BufferId) -> bool) {
        self.arrive_if(out, |of| buffers(of).any(&touched));
    }

    fn arrive_if(&mut self, out: &mut Emitter<'_>, needs: impl Fn(&Operands) -> bool) {
        self.all.retain(|(of, done)| {
            let needed = needs(of);
            if needed {
                out.b.wait(Rule::ModelCollective, *done, COMPUTE);
            }
            !needed
        });
        let all = &self.all;
        self.unused.retain(|&unused| {
            let travels = all.iter().any(|(of, _)| buffers(of).any(|b| b == unused));
            if !travels {
                out.b.free(Rule::Model, unused);
            }
            travels
        });
    }

    /// Returns whether an unused operand will be freed when its collective has been waited for.
    /// Computation then does not have to wait just to free it.
    pub(crate) fn frees_later(&mut self, buffer: BufferId) -> bool {
        let mut operands = self.all.iter().flat_map(|(of, _)| buffers(of));
        let later = self.overlaps && operands.any(|b| b == buffer);
        if later {
            self.unused.push(buffer);
        }
        later
    }

    /// Waits for all collectives.
    pub(crate) fn arrive_all(&mut self, out: &mut Emitter<'_>) {
        self.arrive(out, |_| true);
    }
}
