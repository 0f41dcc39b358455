//! Submits commands to the driver: the hot path of every step.

use super::driver::{Event, check};
use super::graph::{Exec, Shape};
use super::{Captured, CudaDevice, Error, NAN_AT, SUMS, SUMS_AT};
use crate::base::operand::RawRange;
use crate::device::{Command, FailureKind, Stop};
use cudarc::driver::sys;
use shardlab_plan::ir::{CollectiveId, EventId, InstrId, StreamId};
use std::collections::BTreeMap;
use std::time::Duration;

/// Reason why a command was not enqueued.
pub(super) enum EnqueueError {
    Driver(Error),
    /// Kind and message. A kernel or a collective rejects the command.
    Rejected(FailureKind, String),
}

/// Creates the error of a failed time measurement.
fn clock(what: String) -> EnqueueError {
    EnqueueError::Rejected(FailureKind::Kernel, what)
}

impl From<Error> for EnqueueError {
    fn from(e: Error) -> Self {
        Self::Driver(e)
    }
}

impl CudaDevice {
    /// Enqueues a command; `task` is the index of the task.
    pub(super) fn enqueue(
        &mut self,
        stream: StreamId,
        command: &Command,
        task: u32,
    ) -> Result<(), Stop> {
        if let Some(ranges) = &mut self.diagnostics.ranges {
            ranges.at(&self.program, command.instr());
        }
        self.watchdog.pass(command.instr());
        let done = self.inject_faults(stream, command).and_then(|()| {
            if self.recording.enabled {
                self.enqueue_recorded(stream, command, task)
            } else {
                self.issue(stream, command, task)
            }
        });
        let done = done.and_then(|()| {
            if self.diagnostics.sync {
                // SAFETY: no conditions.
                check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
            }
            Ok(())
        });
        self.watchdog.pass(command.instr());
        done.map_err(|e| self.refused(stream, command.instr(), e))
    }

    fn refused(&self, stream: StreamId, instr: InstrId, e: EnqueueError) -> Stop {
        let (kind, what) = match e {
            EnqueueError::Driver(e) if self.diagnostics.sync => {
                (FailureKind::Kernel, e.to_string())
            }
            EnqueueError::Driver(e) => {
                let hint = "this or an earlier instruction; SHARDLAB_CUDA_SYNC=1 shows which";
                (FailureKind::Kernel, format!("{e} ({hint})"))
            }
            EnqueueError::Rejected(kind, what) => (kind, what),
        };
        self.fail(kind, Some(stream), instr, what)
    }

    /// Injects delays and faults.
    fn inject_faults(&mut self, stream: StreamId, command: &Command) -> Result<(), EnqueueError> {
        if let Some(Some(delays)) = self.diagnostics.delays.get_mut(stream.index())
            && let Some(time) = delays.draw()
        {
            self.helpers
                .spin(time, self.queues.streams[stream.index()])?;
        }
        if self.diagnostics.crash == Some(command.instr()) && command.is_task() {
            let what = "injected failure of a kernel".to_owned();
            return Err(EnqueueError::Rejected(FailureKind::Injected, what));
        }
        Ok(())
    }

    fn enqueue_recorded(
        &mut self,
        stream: StreamId,
        command: &Command,
        task: u32,
    ) -> Result<(), EnqueueError> {
        let (index, raw) = (stream.index(), self.queues.streams[stream.index()]);
        let issued = self.epoch.elapsed().as_nanos() as u64;
        let comm = match command {
            Command::Collective { id, .. } => Some(self.program.collectives[id.index()].comm),
            _ => None,
        };
        let Some(recorder) = &mut self.recording.recorder else {
            return self.issue(stream, command, task);
        };
        match *command {
            Command::Record { event, .. } => recorder.recorded(event, index),
            Command::Wait { event, .. } => recorder.waited(event, index),
            _ if command.is_task() => {
                recorder
                    .start(task, (index, raw), comm, issued)
                    .map_err(clock)?;
                let issued = self.issue(stream, command, task);
                if let Some(recorder) = &mut self.recording.recorder {
                    recorder.end(raw).map_err(clock)?;
                }
                return issued;
            }
            _ => {}
        }
        self.issue(stream, command, task)
    }

    /// Returns the library's estimate of a collective's duration without enqueuing anything; `None`
    /// if there is none. All ranks of the communicator must call it at the same time.
    pub(crate) fn estimate(
        &mut self,
        stream: StreamId,
        instr: InstrId,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
    ) -> Result<Option<Duration>, Stop> {
        let raw = self.queues.streams[stream.index()];
        let told = self.collectives.estimate(id, parts, raw);
        told.map_err(|e| self.fail(FailureKind::Kernel, Some(stream), instr, e))
    }

    /// Passes a command to the driver, or to the CPU if it is for a CPU stream. `task` is the index
    /// of the task.
    fn issue(
        &mut self,
        stream: StreamId,
        command: &Command,
        task: u32,
    ) -> Result<(), EnqueueError> {
        let raw = self.queues.streams[stream.index()];
        if let Some(host) = self.host_streams.as_ref()
            && host.takes(stream, command)
        {
            let slot = match *command {
                Command::Squares { slot, .. } | Command::Read { slot, .. } => self.slot_ptr(slot),
                _ => std::ptr::null_mut(),
            };
            host.enqueue(command, task, slot, raw)?;
            if let Command::Launch {
                instr,
                reads,
                ranges,
                ..
            } = command
            {
                self.check_nan(*instr, ranges[*reads as usize..].iter(), stream)?;
            }
            return Ok(());
        }
        match *command {
            Command::Launch {
                instr,
                kernel: _,
                reads,
                ref ranges,
            } => {
                let operands = ranges.split_at(reads as usize);
                // SAFETY: the interpreter's contract for ranges that it submits.
                unsafe { self.kernels.launch(instr, operands, self.scratch, raw) }
                    .map_err(|e| EnqueueError::Rejected(FailureKind::Kernel, e))?;
                self.check_nan(instr, operands.1.iter(), stream)?;
            }
            Command::Collective {
                instr,
                id,
                ref parts,
            } => {
                self.collectives
                    .launch(id, parts, raw)
                    .map_err(|e| EnqueueError::Rejected(FailureKind::Kernel, e))?;
                let written = &parts[..self.program.collectives[id.index()].parts.len()];
                self.check_nan(instr, written.iter().map(|(_, output)| output), stream)?;
            }
            Command::Copy { from, to, .. } => {
                // SAFETY: the interpreter's contract for ranges that it submits; both are in the
                // same address space.
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
                self.queues.events[event.index()].record(raw)?;
                self.queues.recorded.push(event);
            }
            Command::Wait { event, .. } => self.queues.events[event.index()].wait(raw)?,
            Command::Fill { to, byte, .. } => {
                // SAFETY: as for copies.
                check("cuMemsetD8Async", unsafe {
                    sys::cuMemsetD8Async(to.ptr.addr() as u64, byte, to.bytes, raw.0)
                })?;
            }
            Command::Upload { to, ref data, .. } | Command::Preset { to, ref data, .. } => {
                let bytes = to.bytes.min(data.len());
                self.queues
                    .staging
                    .upload(&data[..bytes], to.ptr.addr() as u64, raw)?;
            }
            Command::Squares { ref from, slot, .. } => {
                let room = SUMS_AT + stream.index() as u64 * u64::from(SUMS) * 8;
                let out = self.slot_ptr(slot).addr() as u64;
                self.helpers.squares(from, self.scratch + room, out, raw)?;
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

    /// Enqueues searches for NaN in the outputs of a command, if the NaN check is enabled.
    fn check_nan<'r>(
        &self,
        instr: InstrId,
        outputs: impl Iterator<Item = &'r RawRange>,
        stream: StreamId,
    ) -> Result<(), EnqueueError> {
        let Some(unfilled) = &self.diagnostics.nan_check else {
            return Ok(());
        };
        let label = u64::from(instr.0) + 1;
        let raw = self.queues.streams[stream.index()];
        for (n, output) in outputs.enumerate() {
            if !unfilled.contains(instr, n) {
                self.helpers
                    .find_nan(output, label, self.scratch + NAN_AT, raw)?;
            }
        }
        Ok(())
    }

    /// Captures commands; `None` for an empty scope.
    pub(super) fn make_graph(
        &mut self,
        commands: Vec<(StreamId, Command)>,
    ) -> Result<Option<Captured>, Stop> {
        let Some(shape) = Shape::of(&self.program, &commands) else {
            return Ok(None);
        };
        let origin = self.queues.streams[shape.origin.index()];
        let others: Vec<_> = shape
            .others
            .iter()
            .map(|s| self.queues.streams[s.index()])
            .collect();
        // Current command, for the message of a failure.
        let mut at = (shape.origin, commands[0].1.instr());
        let events = |n: usize| {
            (0..n)
                .map(|_| Event::new(false))
                .collect::<Result<Vec<_>, _>>()
        };
        // An event recorded in a capture cannot be used outside of it, so edges within the graph
        // have their own events.
        let mut inner = BTreeMap::new();
        // The driver and NCCL may wait for the GPU while a graph is created, and would wait forever
        // if a collective of an earlier scope hangs there. Each command counts as a separate call,
        // and so does the work after the last one.
        self.watchdog.pass(at.1);
        let made = Exec::capture(origin, &others, || {
            for (stream, command) in &commands {
                at = (*stream, command.instr());
                self.watchdog.next(at.1);
                self.issue_captured(&shape, &mut inner, *stream, command)?;
            }
            self.watchdog.next(at.1);
            Ok::<_, EnqueueError>(())
        });
        self.watchdog.pass(at.1);
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
    ) -> Result<(), EnqueueError> {
        let raw = self.queues.streams[stream.index()];
        match *command {
            Command::Record { event, .. } => {
                let edge = Event::new(false)?;
                edge.record(raw)?;
                inner.insert(event, edge);
                if shape.outward.contains(&event) {
                    self.queues.events[event.index()].record_external(raw)?;
                }
                Ok(())
            }
            Command::Wait { event, .. } => {
                match inner.get(&event) {
                    Some(edge) => edge.wait(raw)?,
                    // The event was recorded before the scope. The replay waits for it before the
                    // graph starts.
                    None => debug_assert!(shape.inward.contains(&event)),
                }
                Ok(())
            }
            Command::Upload { .. } | Command::Preset { .. } => {
                let what = "host data cannot be part of a captured scope".to_owned();
                Err(EnqueueError::Rejected(FailureKind::Program, what))
            }
            _ if self
                .host_streams
                .as_ref()
                .is_some_and(|h| h.takes(stream, command)) =>
            {
                let what = "work of the CPU cannot be part of a captured scope".to_owned();
                Err(EnqueueError::Rejected(FailureKind::Program, what))
            }
            // Tasks on the GPU do not need their index.
            _ => self.issue(stream, command, 0),
        }
    }

    /// Enqueues a captured scope; `first` is the index of its first task.
    pub(super) fn launch_graph(&mut self, captured: &mut Captured, first: u32) -> Result<(), Stop> {
        if self.recording.enabled || self.recording.replay_as_instructions || self.diagnostics.sync
        {
            // Times and errors of individual tasks require individual commands.
            let mut task = first;
            for (stream, command) in &captured.commands {
                self.enqueue(*stream, command, task)?;
                task += u32::from(command.is_task());
            }
            return Ok(());
        }
        let origin = captured.shape.origin;
        let instr = captured.commands[0].1.instr();
        self.watchdog.pass(instr);
        let done = self.launch_whole(captured);
        self.watchdog.pass(instr);
        done.map_err(|e| self.refused(origin, instr, EnqueueError::Driver(e)))
    }

    fn launch_whole(&mut self, captured: &mut Captured) -> Result<(), Error> {
        let shape = &captured.shape;
        let origin = self.queues.streams[shape.origin.index()];
        let others = || shape.others.iter().map(|s| self.queues.streams[s.index()]);
        for (stream, before) in others().zip(&captured.before) {
            before.record(stream)?;
            before.wait(origin)?;
        }
        for event in &shape.inward {
            self.queues.events[event.index()].wait(origin)?;
        }
        captured.exec.launch(origin)?;
        if !shape.others.is_empty() {
            captured.after.record(origin)?;
            for stream in others() {
                captured.after.wait(stream)?;
            }
        }
        self.queues.recorded.extend(&shape.outward);
        Ok(())
    }
}
