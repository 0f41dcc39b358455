//! Commands to the driver: the path that every step takes.

use super::driver::{Event, check};
use super::graph::{Exec, Shape};
use super::{Captured, CudaDevice, Error, NAN_AT, SUMS, SUMS_AT};
use crate::device::{Command, FailureKind, Stop};
use crate::operand::RawRange;
use cudarc::driver::sys;
use shardlab_plan::ir::{CollectiveId, EventId, InstrId, StreamId};
use std::collections::BTreeMap;
use std::time::Duration;

/// Why a command was not enqueued.
pub(super) enum Refused {
    Driver(Error),
    /// In words: a kernel or a collective refuses.
    Words(FailureKind, String),
}

/// Times could not be taken.
fn clock(what: String) -> Refused {
    Refused::Words(FailureKind::Kernel, what)
}

impl From<Error> for Refused {
    fn from(e: Error) -> Self {
        Self::Driver(e)
    }
}

impl CudaDevice {
    /// Enqueues a command; `task` numbers tasks.
    pub(super) fn enqueue(
        &mut self,
        stream: StreamId,
        command: &Command,
        task: u32,
    ) -> Result<(), Stop> {
        if let Some(ranges) = &mut self.ranges {
            ranges.at(&self.program, command.instr());
        }
        self.guard.pass(command.instr());
        let done = self.disturb(stream, command).and_then(|()| {
            if self.recording {
                self.enqueue_recorded(stream, command, task)
            } else {
                self.issue(stream, command)
            }
        });
        let done = done.and_then(|()| {
            if self.sync {
                // SAFETY: no conditions.
                check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
            }
            Ok(())
        });
        self.guard.pass(command.instr());
        done.map_err(|e| self.refused(stream, command.instr(), e))
    }

    fn refused(&self, stream: StreamId, instr: InstrId, e: Refused) -> Stop {
        let (kind, what) = match e {
            Refused::Driver(e) if self.sync => (FailureKind::Kernel, e.to_string()),
            Refused::Driver(e) => {
                let hint = "this or an earlier instruction; SHARDLAB_CUDA_SYNC=1 tells which";
                (FailureKind::Kernel, format!("{e} ({hint})"))
            }
            Refused::Words(kind, what) => (kind, what),
        };
        self.fail(kind, Some(stream), instr, what)
    }

    /// Injected delays and faults.
    fn disturb(&mut self, stream: StreamId, command: &Command) -> Result<(), Refused> {
        if let Some(Some(delays)) = self.delays.get_mut(stream.index())
            && let Some(time) = delays.draw()
        {
            self.support.spin(time, self.streams[stream.index()])?;
        }
        if self.crash == Some(command.instr()) && command.is_task() {
            let what = "injected failure of a kernel".to_owned();
            return Err(Refused::Words(FailureKind::Injected, what));
        }
        Ok(())
    }

    fn enqueue_recorded(
        &mut self,
        stream: StreamId,
        command: &Command,
        task: u32,
    ) -> Result<(), Refused> {
        let (index, raw) = (stream.index(), self.streams[stream.index()]);
        let issued = self.epoch.elapsed().as_nanos() as u64;
        let comm = match command {
            Command::Collective { id, .. } => Some(self.program.collectives[id.index()].comm),
            _ => None,
        };
        let Some(recorder) = &mut self.recorder else {
            return self.issue(stream, command);
        };
        match *command {
            Command::Record { event, .. } => recorder.recorded(event, index),
            Command::Wait { event, .. } => recorder.waited(event, index),
            _ if command.is_task() => {
                recorder
                    .start(task, (index, raw), comm, issued)
                    .map_err(clock)?;
                let issued = self.issue(stream, command);
                if let Some(recorder) = &mut self.recorder {
                    recorder.end(raw).map_err(clock)?;
                }
                return issued;
            }
            _ => {}
        }
        self.issue(stream, command)
    }

    /// How long the library of collectives thinks that one takes; nothing is enqueued. All ranks of its communicator ask at the
    /// same time. `None` where it has no estimate.
    pub(crate) fn estimate(
        &mut self,
        stream: StreamId,
        instr: InstrId,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
    ) -> Result<Option<Duration>, Stop> {
        let raw = self.streams[stream.index()];
        let told = self.collectives.estimate(id, parts, raw);
        told.map_err(|e| self.fail(FailureKind::Kernel, Some(stream), instr, e))
    }

    /// Hands a command to the driver.
    fn issue(&mut self, stream: StreamId, command: &Command) -> Result<(), Refused> {
        let raw = self.streams[stream.index()];
        match *command {
            Command::Launch {
                instr,
                kernel,
                reads,
                ref ranges,
            } => {
                let operands = ranges.split_at(reads as usize);
                // SAFETY: the interpreter's promise on ranges that it submits.
                unsafe { self.bodies.launch(instr, operands, self.own, raw) }
                    .map_err(|e| Refused::Words(FailureKind::Kernel, e))?;
                if self.nan_check {
                    // A NaN between columns of others shows in what is made of them.
                    for (n, output) in operands.1.iter().enumerate() {
                        if self.program.kernels[kernel.index()].fills(n) {
                            self.check_nan(instr, output, stream)?;
                        }
                    }
                }
            }
            Command::Collective {
                instr,
                id,
                ref parts,
            } => {
                self.collectives
                    .launch(id, parts, raw)
                    .map_err(|e| Refused::Words(FailureKind::Kernel, e))?;
                if self.nan_check {
                    for (_, output) in parts {
                        self.check_nan(instr, output, stream)?;
                    }
                }
            }
            Command::Copy { from, to, .. } => {
                // SAFETY: the interpreter's promise on ranges that it submits; both have one address space.
                check("cuMemcpyAsync", unsafe {
                    sys::cuMemcpyAsync(
                        to.ptr.addr() as u64,
                        from.ptr.addr() as u64,
                        to.bytes,
                        raw.0,
                    )
                })?;
            }
            Command::Record { event, .. } => {
                self.events[event.index()].record(raw)?;
                self.marks.push(event);
            }
            Command::Wait { event, .. } => self.events[event.index()].wait(raw)?,
            Command::Fill { to, byte, .. } => {
                // SAFETY: as for copies.
                check("cuMemsetD8Async", unsafe {
                    sys::cuMemsetD8Async(to.ptr.addr() as u64, byte, to.bytes, raw.0)
                })?;
            }
            Command::Upload { to, ref data, .. } | Command::Preset { to, ref data, .. } => {
                let bytes = to.bytes.min(data.len());
                self.staging
                    .upload(&data[..bytes], to.ptr.addr() as u64, raw)?;
            }
            Command::Squares { ref from, slot, .. } => {
                let room = SUMS_AT + stream.index() as u64 * u64::from(SUMS) * 8;
                let out = self.slot_ptr(slot).addr() as u64;
                self.support.squares(from, self.own + room, out, raw)?;
            }
            Command::Read { from, slot, .. } => {
                // SAFETY: four bytes of device memory into a slot of pinned memory.
                check("cuMemcpyDtoHAsync", unsafe {
                    sys::cuMemcpyDtoHAsync_v2(
                        self.slot_ptr(slot).cast(),
                        from.ptr.addr() as u64,
                        4,
                        raw.0,
                    )
                })?;
            }
        }
        Ok(())
    }

    fn check_nan(
        &self,
        instr: InstrId,
        output: &RawRange,
        stream: StreamId,
    ) -> Result<(), Refused> {
        let label = u64::from(instr.0) + 1;
        let raw = self.streams[stream.index()];
        self.support
            .find_nan(output, label, self.own + NAN_AT, raw)?;
        Ok(())
    }

    /// Captures commands. `None` for an empty scope.
    pub(super) fn make_graph(
        &mut self,
        commands: Vec<(StreamId, Command)>,
    ) -> Result<Option<Captured>, Stop> {
        let Some(shape) = Shape::of(&self.program, &commands) else {
            return Ok(None);
        };
        let origin = self.streams[shape.origin.index()];
        let others: Vec<_> = shape
            .others
            .iter()
            .map(|s| self.streams[s.index()])
            .collect();
        // Where it fails, for the message.
        let mut at = (shape.origin, commands[0].1.instr());
        let events = |n: usize| {
            (0..n)
                .map(|_| Event::new(false))
                .collect::<Result<Vec<_>, _>>()
        };
        // An event recorded in a capture is of no use outside of it: edges within the graph have events of their own.
        let mut inner = BTreeMap::new();
        // The driver and NCCL may wait for the GPU while a graph is made: for good, where a collective of an earlier scope hangs
        // there. Each command counts as a call of its own, and so does what comes after the last one.
        self.guard.pass(at.1);
        let made = Exec::capture(origin, &others, || {
            for (stream, command) in &commands {
                at = (*stream, command.instr());
                self.guard.next(at.1);
                self.issue_captured(&shape, &mut inner, *stream, command)?;
            }
            self.guard.next(at.1);
            Ok::<_, Refused>(())
        });
        self.guard.pass(at.1);
        let made = made.and_then(|exec| Ok((exec, events(others.len())?, Event::new(false)?)));
        match made {
            Ok((exec, before, after)) => Ok(Some(Captured {
                shape,
                exec,
                commands,
                before,
                after,
            })),
            Err(e) => Err(self.refused(at.0, at.1, e)),
        }
    }

    fn issue_captured(
        &mut self,
        shape: &Shape,
        inner: &mut BTreeMap<EventId, Event>,
        stream: StreamId,
        command: &Command,
    ) -> Result<(), Refused> {
        let raw = self.streams[stream.index()];
        match *command {
            Command::Record { event, .. } => {
                let edge = Event::new(false)?;
                edge.record(raw)?;
                inner.insert(event, edge);
                if shape.outward.contains(&event) {
                    self.events[event.index()].record_external(raw)?;
                }
                Ok(())
            }
            Command::Wait { event, .. } => {
                match inner.get(&event) {
                    Some(edge) => edge.wait(raw)?,
                    // Recorded before the scope: the replay waits for it before the graph starts.
                    None => debug_assert!(shape.inward.contains(&event)),
                }
                Ok(())
            }
            Command::Upload { .. } | Command::Preset { .. } => {
                let what = "host data cannot be part of a captured scope".to_owned();
                Err(Refused::Words(FailureKind::Program, what))
            }
            _ => self.issue(stream, command),
        }
    }

    /// Enqueues a captured scope once more; tasks are numbered from `first`.
    pub(super) fn launch_graph(&mut self, captured: &mut Captured, first: u32) -> Result<(), Stop> {
        if self.recording || self.singly || self.sync {
            // Times and errors of single tasks: the same commands, one by one.
            let mut task = first;
            for (stream, command) in &captured.commands {
                self.enqueue(*stream, command, task)?;
                task += u32::from(command.is_task());
            }
            return Ok(());
        }
        let origin = captured.shape.origin;
        let instr = captured.commands[0].1.instr();
        self.guard.pass(instr);
        let done = self.launch_whole(captured);
        self.guard.pass(instr);
        done.map_err(|e| self.refused(origin, instr, Refused::Driver(e)))
    }

    fn launch_whole(&mut self, captured: &mut Captured) -> Result<(), Error> {
        let shape = &captured.shape;
        let origin = self.streams[shape.origin.index()];
        let others = || shape.others.iter().map(|s| self.streams[s.index()]);
        for (stream, before) in others().zip(&captured.before) {
            before.record(stream)?;
            before.wait(origin)?;
        }
        for event in &shape.inward {
            self.events[event.index()].wait(origin)?;
        }
        captured.exec.launch(origin)?;
        if !shape.others.is_empty() {
            captured.after.record(origin)?;
            for stream in others() {
                captured.after.wait(stream)?;
            }
        }
        self.marks.extend(&shape.outward);
        Ok(())
    }
}
