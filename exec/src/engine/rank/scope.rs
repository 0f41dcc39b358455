//! Captured scopes: captured once, then replayed.

use super::{Pending, Rank};
use crate::device::{Device, FailureKind, GraphId, Stop};
use crate::engine::pass::PassInputs;
use shardlab_plan::ir::{BufferId, InstrId, ScopeId, StreamId};
use shardlab_plan::program::{Op, Program, SectionKind};

/// A captured scope.
pub(super) struct Graph {
    id: GraphId,
    /// Addresses of the buffers that it uses, one per use.
    bases: Vec<usize>,
    /// Tasks of the scope, in order.
    tasks: Vec<(InstrId, StreamId)>,
}

impl<D: Device> Rank<D> {
    pub(super) fn end_capture(&mut self, id: InstrId, scope: ScopeId) -> Result<(), Stop> {
        let Some((open, commands)) = self.capture.open.take() else {
            return Ok(());
        };
        if open != scope {
            let what = "ends a scope that is not the open one".to_owned();
            return Err(self.fail(FailureKind::Program, id, what));
        }
        let bases = std::mem::take(&mut self.capture.bases);
        let tasks = std::mem::take(&mut self.capture.tasks);
        let graph = self.device.capture(commands)?;
        self.capture.graphs[scope.index()] = Some(Graph {
            id: graph,
            bases,
            tasks,
        });
        Ok(())
    }

    /// Returns the scope that an operation begins, if its graph replaces its instructions.
    pub(super) fn captured(&self, section: SectionKind, op: &Op) -> Option<ScopeId> {
        match *op {
            Op::GraphBegin(scope) if self.options.graphs && section != SectionKind::First => {
                self.capture.graphs[scope.index()].as_ref().map(|_| scope)
            }
            _ => None,
        }
    }

    /// Replays a scope. Memory is managed as the program says; device work comes from the graph,
    /// whose addresses are compared first (see Note [Captured addresses] in `plan`). Returns the
    /// index of the instruction after the scope.
    pub(super) fn replay(
        &mut self,
        program: &Program,
        scope: ScopeId,
        begin: u32,
        section_end: u32,
        with: &PassInputs<'_>,
    ) -> Result<u32, Stop> {
        let Some(graph) = self.capture.graphs[scope.index()].take() else {
            return Ok(begin + 1);
        };
        let mut end = begin;
        let mut uses = graph.bases.iter();
        for i in begin..section_end {
            let id = InstrId(i);
            let instr = &program.instrs[id.index()];
            match instr.op {
                Op::Alloc(_) | Op::Free(_) | Op::HostWork { .. } => {
                    self.perform(program, SectionKind::Steady, id, instr, with)?;
                }
                Op::Record { event, .. } => self.pass.recorded[event.index()] = self.pass.number,
                Op::GraphEnd(s) if s == scope => {
                    end = i;
                    break;
                }
                _ => {}
            }
            let mut moved = None;
            each_buffer(program, &instr.op, |b| {
                // The graph includes the first fill of a buffer.
                self.buffers.pending[b.index()] = Pending::Nothing;
                let (now, before) = (self.buffers.base[b.index()], uses.next().copied());
                if before != Some(now) {
                    moved = moved.or(Some((b, now, before.unwrap_or(0))));
                }
            });
            if let Some((b, now, before)) = moved {
                let what = format!(
                    "{} is at {now:#x}, but was at {before:#x} when the scope was captured",
                    program.buffer_name(b)
                );
                return Err(self.fail(FailureKind::Program, id, what));
            }
        }
        let first = self.pass.tasks;
        for &(instr, stream) in &graph.tasks {
            self.note_task(instr, stream);
        }
        self.device.replay(graph.id, first)?;
        if self.pass.record {
            self.behind_of_scope(program, begin, end, first);
        }
        self.capture.graphs[scope.index()] = Some(graph);
        Ok(end + 1)
    }

    /// Notes the events recorded within a replayed scope, for the blockers of spans.
    pub(super) fn behind_of_scope(&mut self, program: &Program, begin: u32, end: u32, first: u32) {
        let mut last: Vec<Option<u32>> = vec![None; program.streams.len()];
        let mut number = first;
        for i in begin..end {
            match program.instrs[i as usize].op {
                Op::Launch { stream, .. }
                | Op::Collective { stream, .. }
                | Op::Copy { stream, .. } => {
                    last[stream.index()] = Some(number);
                    number += 1;
                }
                Op::Record { event, stream } => {
                    if let Some(task) = last[stream.index()] {
                        self.pass.behind.insert(event, task);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Calls `f` for every buffer that an operation uses on the device.
fn each_buffer(program: &Program, op: &Op, mut f: impl FnMut(BufferId)) {
    match *op {
        Op::Launch { reads, end, .. } => program.accesses[reads as usize..end as usize]
            .iter()
            .for_each(|a| f(a.buffer)),
        Op::Collective { id, .. } => {
            let c = &program.collectives[id.index()];
            for p in c.operands() {
                f(p.input.buffer);
                f(p.output.buffer);
            }
        }
        Op::Copy { id, .. } => {
            let c = &program.copies[id.index()];
            f(c.from.buffer);
            f(c.to.buffer);
        }
        _ => {}
    }
}
