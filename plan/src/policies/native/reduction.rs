//! Reductions in flight, and the order in which groups are reduced, which is also the optimizer's.

use super::MicroBatch;
use crate::ir::{BufferId, COMPUTE, EventId, GroupId, StreamId, UnitId};
use crate::lower::emitter::Emitter;
use crate::lower::flat::{Flat, ReduceTo, Reduction};
use crate::lower::optimizer::{self, ShardState};
use crate::program::{Phase, Rule};
use std::collections::VecDeque;

// Note [Reductions in flight]
//
// A full gradient buffer is live from the first kernel that writes it until its reduction has read
// it. The buffers of at most K units (`fsdp.reduce_in_flight`) are live at once, so memory does not
// grow with the depth of the model. Before another one is allocated, computation waits for the
// oldest reduction, which frees its buffer:
//
// - native counts units including the one being written, so K = 1 reduces without overlap. A unit
//   can have several buffers: of weights gathered in 8 bits and of the others, or of experts and
//   of the rest. If each counted, backward of a unit would wait for a reduction that the unit
//   before has just issued, and with it for the slowest rank. An outer axis reduces shards, so the
//   wait is for the inner reduction only (`input_free`);
// - fsdp2 counts packed reduce-scatter inputs, and waits before it packs (`recycle`);
// - megatron counts the elements in its queue (`gate`).
//
// The wait comes before the allocation. A wait directly after the buffer's own reduction would
// expose all of its time. Reductions finish in the order of their issue, so waiting for one frees
// all earlier buffers. `check` counts the units in flight (`in_flight`).

/// A gradient buffer whose reduction is in flight.
#[derive(Clone, Copy, Debug)]
struct Pending {
    unit: UnitId,
    reduction: Reduction,
    /// Buffer that only the reduction reads. `None` for a gradient that is kept in full, which is
    /// freed when its group is updated.
    buffer: Option<BufferId>,
}

impl Pending {
    fn release(self, out: &mut Emitter<'_>) {
        if let Some(buffer) = self.buffer {
            out.b.free(Rule::ReduceRelease, buffer);
        }
    }
}

/// A group whose gradient the optimizer may read after an event.
#[derive(Clone, Copy, Debug)]
struct Reduced {
    group: GroupId,
    /// End of its last reduction (and of its update if `updated`), until computation has waited for
    /// it.
    done: Option<EventId>,
    /// Whether backward has already issued its update.
    updated: bool,
}

/// The reductions of a step.
pub(super) struct Reductions {
    pending: VecDeque<Pending>,
    /// Groups reduced in the last micro-batch that uses them, in the optimizer's order.
    reduced: Vec<Reduced>,
    /// Maximum number of units with live full gradient buffers, including the one that writes its
    /// gradients.
    max_in_flight: usize,
}

impl Reductions {
    pub(super) fn new(max_in_flight: u32) -> Self {
        Self {
            pending: VecDeque::new(),
            reduced: Vec::new(),
            max_in_flight: max_in_flight as usize,
        }
    }

    /// Starts a step.
    pub(super) fn start_step(&mut self) {
        self.reduced.clear();
    }

    /// Makes room for another full gradient of `unit`; see Note [Reductions in flight].
    pub(super) fn make_room(&mut self, out: &mut Emitter<'_>, flat: &Flat, unit: UnitId) {
        while self.other_units(unit) >= self.max_in_flight {
            self.release_oldest(out, flat, Rule::ReduceGate);
        }
    }

    /// Returns how many units other than `unit` have gradient buffers in flight. Buffers of a unit
    /// are neighbors, because its groups are reduced together.
    fn other_units(&self, unit: UnitId) -> usize {
        let mut before = None;
        let others = self.pending.iter().map(|p| p.unit).filter(|u| *u != unit);
        others.filter(|u| before.replace(*u) != Some(*u)).count()
    }

    /// Waits for all reductions and frees their gradient buffers.
    pub(super) fn drain(&mut self, out: &mut Emitter<'_>, flat: &Flat, rule: Rule) {
        while !self.pending.is_empty() {
            self.release_oldest(out, flat, rule);
        }
    }

    /// Waits for the oldest reduction, if there is one, and frees its gradient buffer.
    fn release_oldest(&mut self, out: &mut Emitter<'_>, flat: &Flat, rule: Rule) {
        if let Some(p) = self.pending.pop_front() {
            // On the compute stream, the buffer is free at once. A reduction that continues on
            // another stream is not complete.
            if flat.streams.reduce != COMPUTE || p.buffer.is_none() {
                let event = p.reduction.input_free;
                out.b.wait(rule, event, COMPUTE);
                self.retire_reduction(out, flat, event);
            }
            p.release(out);
        }
    }

    /// Marks a reduction complete and frees gradients that the optimizer has consumed.
    fn retire_reduction(&mut self, out: &mut Emitter<'_>, flat: &Flat, done: EventId) {
        for index in 0..self.reduced.len() {
            let r = &mut self.reduced[index];
            if r.done == Some(done) {
                r.done = None;
                if r.updated {
                    self.free_gradient(out, flat, index);
                }
            }
        }
    }

    /// Reduces the full gradient of a group to its shard. `first` means that the shard holds no
    /// reduced gradients yet.
    pub(super) fn reduce_sharded(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        g: GroupId,
        buffer: BufferId,
    ) {
        // The root's buffer lives through all of backward and joins the other buffers in flight
        // here.
        let unit = out.inputs.group(g).unit;
        self.make_room(out, flat, unit);
        let first = micro.first || !out.inputs.reduces(g, false, false);
        if let (true, true, Some(grad)) = (
            first,
            flat.grads_of_a_step(out.inputs, g),
            flat.state(g).grad,
        ) {
            out.b.alloc(Rule::Reduce, grad.buffer);
        }
        make_moments(out, flat, micro, g);
        let input = out.b.whole(buffer);
        let reduction = flat.reduce_sharded(out, g, input, first, micro.last, ReduceTo::Grad);
        let reduction = self.note_reduced(out, flat, micro, g, reduction);
        let buffer = Some(buffer);
        self.pending.push_back(Pending {
            unit,
            reduction,
            buffer,
        });
        if flat.streams.reduce == COMPUTE {
            self.drain(out, flat, Rule::ReduceGate);
        }
    }

    /// Reduces a gradient that is kept in full, in the step's last micro-batch.
    pub(super) fn reduce_full(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        g: GroupId,
    ) {
        if micro.last {
            make_moments(out, flat, micro, g);
            let reduction = flat.reduce_full(out, g);
            let reduction = self.note_reduced(out, flat, micro, g, reduction);
            // Only an update in backward ends the lifetime of a gradient that is kept in full.
            if flat.grads_of_a_step(out.inputs, g) && last_stage(flat) != COMPUTE {
                self.pending.push_back(Pending {
                    unit: out.inputs.group(g).unit,
                    reduction,
                    buffer: None,
                });
            }
        }
    }

    /// Records a group that was reduced in the last micro-batch, and updates it if updates run in
    /// backward. Returns the reduction. It then ends with the update, so buffers that the update
    /// reads are freed after it.
    fn note_reduced(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        micro: MicroBatch,
        group: GroupId,
        reduction: Reduction,
    ) -> Reduction {
        if !micro.last {
            return reduction;
        }
        let in_backward = out.inputs.scenario.fsdp.optimizer_in_backward;
        let updated = in_backward.then(|| update(out, flat, group));
        let elsewhere = last_stage(flat) != COMPUTE;
        self.reduced.push(Reduced {
            group,
            done: elsewhere.then_some(updated.unwrap_or(reduction.complete)),
            updated: in_backward,
        });
        if in_backward && !elsewhere {
            self.free_gradient(out, flat, self.reduced.len() - 1);
        }
        updated.map_or(reduction, |updated| Reduction {
            input_free: updated,
            complete: updated,
            ..reduction
        })
    }

    /// Makes computation wait for the reduction of optimizer state `index`, and frees the gradient
    /// buffers that are unused afterwards.
    pub(super) fn await_reduction(&mut self, out: &mut Emitter<'_>, flat: &Flat, index: usize) {
        let Some(done) = self.reduced.get(index).and_then(|r| r.done) else {
            return;
        };
        out.b.wait(Rule::FinalFence, done, COMPUTE);
        // Reductions finish in the order of their issue.
        while self.pending.iter().any(|p| p.reduction.complete == done) {
            let Some(p) = self.pending.pop_front() else {
                break;
            };
            p.release(out);
            self.retire_reduction(out, flat, p.reduction.complete);
        }
        self.retire_reduction(out, flat, done);
    }

    /// Returns the optimizer's states: groups in the order of their reductions, then trained groups
    /// that were not reduced.
    pub(super) fn optimizer_state(&mut self, out: &Emitter<'_>, flat: &Flat) -> Vec<ShardState> {
        let known: Vec<GroupId> = self.groups().collect();
        let used = |g: GroupId| {
            out.inputs
                .uses_of(out.inputs.group(g).unit)
                .next()
                .is_some()
        };
        let missing = |g: &GroupId| !known.contains(g) && used(*g);
        let trained = |g: &GroupId| out.inputs.group(*g).requires_grad && missing(g);
        let others = out.inputs.group_ids().filter(trained);
        self.reduced.extend(others.map(|group| Reduced {
            group,
            done: None,
            updated: false,
        }));
        flat.optimizer_state(out, self.groups())
    }

    /// Returns the groups in the optimizer's order.
    pub(super) fn groups(&self) -> impl Iterator<Item = GroupId> {
        self.reduced.iter().map(|r| r.group)
    }

    /// Returns the group of optimizer state `index`.
    pub(super) fn group(&self, index: usize) -> Option<GroupId> {
        self.reduced.get(index).map(|r| r.group)
    }

    /// Returns whether backward has updated optimizer state `index`.
    pub(super) fn is_updated(&self, index: usize) -> bool {
        self.reduced.get(index).is_some_and(|r| r.updated)
    }

    /// Frees the gradient of optimizer state `index` if it only lives for one step.
    pub(super) fn free_gradient(&self, out: &mut Emitter<'_>, flat: &Flat, index: usize) {
        let Some(group) = self.group(index) else {
            return;
        };
        let of_a_step = flat.grads_of_a_step(out.inputs, group);
        if let (true, Some(grad)) = (of_a_step, flat.state(group).grad) {
            out.within(out.inputs.group(group).unit, Phase::Optimizer, |out| {
                out.b.free(Rule::ZeroGrad, grad.buffer);
            });
        }
    }

    /// Frees the gradients of all groups that only live for one step.
    pub(super) fn free_gradients(&self, out: &mut Emitter<'_>, flat: &Flat) {
        for index in 0..self.reduced.len() {
            self.free_gradient(out, flat, index);
        }
    }
}

/// Returns the stream on which a group's reduction ends.
fn last_stage(flat: &Flat) -> StreamId {
    match &flat.streams {
        s if s.outer != COMPUTE => s.outer,
        s => s.reduce,
    }
}

/// Issues a group's update after its reduction. Returns the event of its end.
fn update(out: &mut Emitter<'_>, flat: &Flat, group: GroupId) -> EventId {
    let stream = last_stage(flat);
    out.within(out.inputs.group(group).unit, Phase::Optimizer, |out| {
        for state in flat.optimizer_state(out, std::iter::once(group)) {
            optimizer::update(out, &state, None, stream);
        }
        out.b.record(Rule::Optimizer, stream)
    })
}

/// Allocates, in the first step, the optimizer state of a group that backward updates.
fn make_moments(out: &mut Emitter<'_>, flat: &Flat, micro: MicroBatch, group: GroupId) {
    if micro.last && out.inputs.scenario.fsdp.optimizer_in_backward {
        for state in flat.optimizer_state(out, std::iter::once(group)) {
            optimizer::make_moments(out, &state);
        }
    }
}
