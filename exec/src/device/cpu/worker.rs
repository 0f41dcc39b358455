//! The thread of a stream.

use super::queue::Entry;
use super::{Launcher, Shared};
use crate::base::abort::lock;
use crate::base::delay::Delays;
use crate::base::element::{Element, match_dtype};
use crate::base::failure::panic_message;
use crate::base::failure::{Failure, FailureKind, Stop};
use crate::base::operand::RawRange;
use crate::comm::{Call, CommError};
use crate::device::{Command, TaskTimes};
use shardlab_plan::ir::{DType, EventId, InstrId, KernelId, StreamId};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Executes a stream's commands in order.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) stream: StreamId,
    pub(super) launcher: Launcher,
    pub(super) delays: Option<Delays>,
    /// The last wait since the previous task, and when it ended.
    waited: Option<(EventId, u64)>,
}

/// Reason why a command ended early.
enum CommandError {
    /// The root cause has already been recorded, so the worker stops silently.
    Stopped,
    Failed(FailureKind, String),
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        stream: StreamId,
        launcher: Launcher,
        delays: Option<Delays>,
    ) -> Self {
        Self {
            shared,
            stream,
            launcher,
            delays,
            waited: None,
        }
    }

    /// Runs until the queue is closed. After a failure anywhere, commands are dropped.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut batch = VecDeque::new();
        while shared.queues[self.stream.index()].take(&mut batch) {
            for entry in batch.drain(..) {
                if shared.abort.aborted() {
                    continue;
                }
                let instr = entry.command.instr();
                let error = match catch_unwind(AssertUnwindSafe(|| self.execute(entry))) {
                    Ok(Ok(())) => {
                        shared.abort.progressed();
                        continue;
                    }
                    Ok(Err(error)) => error,
                    Err(panic) => CommandError::Failed(FailureKind::Panic, panic_message(&*panic)),
                };
                if let CommandError::Failed(kind, message) = error {
                    self.fail(kind, instr, message);
                }
            }
        }
    }

    fn fail(&self, kind: FailureKind, instr: InstrId, message: String) {
        self.shared.abort.fail(Failure {
            kind,
            rank: self.shared.rank,
            stream: Some(self.stream_name()),
            instr: Some(instr),
            text: self.shared.program.op_text(instr),
            message,
        });
    }

    fn stream_name(&self) -> &'static str {
        self.shared.program.streams[self.stream.index()].kind.name()
    }

    fn execute(&mut self, entry: Entry) -> Result<(), CommandError> {
        if let Some(delays) = &mut self.delays {
            delays.maybe_sleep();
        }
        let shared = Arc::clone(&self.shared);
        let crash = shared.crash == Some(entry.command.instr()) && entry.command.is_task();
        match entry.command {
            Command::Record { event, .. } => shared.events.set(event),
            Command::Wait { instr, event } => {
                let stopped = shared.events.wait(event);
                stopped.map_err(|s| self.event_error(s, instr, event))?;
                if shared.recording.load(Ordering::Relaxed) {
                    self.waited = Some((event, shared.now()));
                }
            }
            Command::Fill { to, byte, .. } => {
                // SAFETY: the interpreter's contract for ranges that it submits.
                unsafe { to.ptr.write_bytes(byte, to.bytes) };
            }
            Command::Upload { to, ref data, .. } => {
                let ready = shared.now();
                assert!(!crash, "injected panic in an input");
                // SAFETY: the interpreter's contract for ranges that it submits.
                unsafe { write(to, data) };
                self.log(entry.task, entry.issued, ready, None);
            }
            // SAFETY: as above.
            Command::Preset { to, ref data, .. } => unsafe { write(to, data) },
            Command::Read { from, slot, .. } => {
                // SAFETY: as above, for four bytes of float32.
                let bits = unsafe { from.ptr.cast::<u32>().read_unaligned() };
                shared.slots[slot as usize].store(bits, Ordering::Release);
            }
            Command::Squares { ref from, slot, .. } => {
                // SAFETY: as above; nothing writes what an optimizer has read before the next
                // backward pass.
                let sum = unsafe { sum_of_squares(from) };
                shared.slots[slot as usize].store(sum.to_bits(), Ordering::Release);
            }
            Command::Copy { from, to, .. } => {
                let ready = shared.now();
                assert!(!crash, "injected panic in a copy");
                // SAFETY: as above; `copy` allows overlap.
                unsafe { from.ptr.cast_const().copy_to(to.ptr, to.bytes) };
                self.log(entry.task, entry.issued, ready, None);
            }
            Command::Launch {
                instr,
                kernel,
                reads,
                ref ranges,
            } => {
                let ready = shared.now();
                assert!(!crash, "injected panic in a kernel");
                let (reads, writes) = ranges.split_at(reads as usize);
                self.launch(instr, kernel, reads, writes)?;
                self.log(entry.task, entry.issued, ready, None);
            }
            Command::Collective {
                instr,
                id,
                ref parts,
            } => {
                let ready = shared.now();
                let c = &shared.program.collectives[id.index()];
                let Some((group, position)) = shared.comms.group(c.comm, shared.rank) else {
                    return Err(CommandError::Failed(
                        FailureKind::Program,
                        format!("no communicator {}", c.comm.0),
                    ));
                };
                let call = Call {
                    kind: c.kind,
                    reduce: c.reduce,
                    dtype: c.dtype,
                    parts: parts.clone(),
                    rows: c.sent.map(|s| s.of),
                    crash,
                };
                // SAFETY: the interpreter's contract for ranges, for all of its ranks.
                let arrival = unsafe { group.run(position as usize, entry.ticket, call) };
                let arrival = arrival.map_err(comm_error)?;
                let written = &parts[..c.parts.len()];
                self.check_nan(instr, written.iter().map(|(_, output)| output))?;
                let times = (shared.since(arrival.free), shared.since(arrival.start));
                self.log(entry.task, entry.issued, ready, Some(times));
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        instr: InstrId,
        kernel: KernelId,
        reads: &[RawRange],
        writes: &[RawRange],
    ) -> Result<(), CommandError> {
        let shared = &self.shared;
        let hyper = *lock(&shared.hyper);
        let context = shared.contexts.of(instr, kernel, hyper);
        let running = shared.abort.running();
        // SAFETY: the interpreter's contract for ranges that it submits.
        unsafe { (self.launcher)(&context, reads, writes) }.map_err(|e| {
            CommandError::Failed(FailureKind::Kernel, shared.program.in_unit(instr, &e))
        })?;
        drop(running);
        self.check_nan(instr, writes.iter())
    }

    /// Fails on the first NaN that a command has written, if the NaN check is enabled.
    fn check_nan<'r>(
        &self,
        instr: InstrId,
        outputs: impl Iterator<Item = &'r RawRange>,
    ) -> Result<(), CommandError> {
        let Some(unfilled) = &self.shared.nan_check else {
            return Ok(());
        };
        for (n, output) in outputs.enumerate() {
            if !unfilled.contains(instr, n) {
                self.no_nan(instr, output)?;
            }
        }
        Ok(())
    }

    /// Fails on the first NaN in a range of floating-point numbers.
    fn no_nan(&self, instr: InstrId, range: &RawRange) -> Result<(), CommandError> {
        // SAFETY: the command that has just run owned this range.
        let bytes = unsafe { std::slice::from_raw_parts(range.ptr.cast_const(), range.bytes) };
        let Some(at) = first_nan(bytes, range.dtype) else {
            return Ok(());
        };
        let program = &self.shared.program;
        let buffer = super::written_buffer(program, instr);
        let name = buffer.map_or_else(String::new, |b| format!(" ({})", program.buffer_name(b)));
        Err(CommandError::Failed(
            FailureKind::Nan,
            format!(
                "element {at} of {} of an output is NaN{name}",
                range.bytes as u64 / range.dtype.size()
            ),
        ))
    }

    fn event_error(&self, stop: Stop, instr: InstrId, event: EventId) -> CommandError {
        match stop {
            Stop::Aborted => CommandError::Stopped,
            Stop::TimedOut => {
                let text = super::recorder(&self.shared.program, instr, event);
                CommandError::Failed(
                    FailureKind::Timeout,
                    format!(
                        "event e{} has not completed after {:.1?}; {text}",
                        event.0,
                        self.shared.abort.timeout()
                    ),
                )
            }
        }
    }

    fn log(&mut self, task: u32, issued: u64, ready: u64, collective: Option<(u64, u64)>) {
        if self.shared.recording.load(Ordering::Relaxed) {
            let (free, start) = collective.unwrap_or((ready, ready));
            let times = TaskTimes {
                task,
                issued,
                ready,
                free: free.max(ready),
                start: start.max(ready),
                end: self.shared.now(),
                waited: self.waited.take(),
            };
            lock(&self.shared.times[self.stream.index()]).push(times);
        }
    }
}

/// Writes host data to device memory.
///
/// # Safety
/// The range is backed memory that nothing else uses during the call.
unsafe fn write(to: RawRange, data: &[u8]) {
    let bytes = to.bytes.min(data.len());
    // SAFETY: the caller's contract; the data belong to the host and are separate from device
    // memory.
    unsafe { to.ptr.copy_from_nonoverlapping(data.as_ptr(), bytes) };
}

fn comm_error(e: CommError) -> CommandError {
    match e {
        CommError::Aborted => CommandError::Stopped,
        CommError::Timeout(m) => CommandError::Failed(FailureKind::Timeout, m),
        CommError::Mismatch(m) => CommandError::Failed(FailureKind::Mismatch, m),
    }
}

/// Returns the index of the first NaN.
pub(crate) fn first_nan(bytes: &[u8], dtype: DType) -> Option<usize> {
    match_dtype!(dtype, T => {
        let mut elements = bytes.chunks_exact(size_of::<T>());
        elements.position(|b| Element::is_nan(bytemuck::pod_read_unaligned::<T>(b)))
    })
}

/// Returns the sum of squares over all ranges, accumulated in float64.
///
/// # Safety
/// The ranges are live memory that nothing writes to during the call.
pub(crate) unsafe fn sum_of_squares(ranges: &[RawRange]) -> f32 {
    // SAFETY: the caller's.
    ranges.iter().map(|r| unsafe { squares(r) }).sum::<f64>() as f32
}

/// # Safety
/// As for [`sum_of_squares`].
unsafe fn squares(r: &RawRange) -> f64 {
    if !r.dtype.is_float() {
        return 0.0;
    }
    let n = r.bytes / r.dtype.size() as usize;
    // SAFETY: the elements are those of the range.
    unsafe { match_dtype!(r.dtype, T => squares_of::<T>(r.ptr.cast(), n)) }
}

/// # Safety
/// As for [`sum_of_squares`], with `n` elements.
unsafe fn squares_of<T: Element>(at: *const T, n: usize) -> f64 {
    let square = |i: usize| {
        // SAFETY: the element is within the range.
        let v = f64::from(unsafe { at.add(i).read_unaligned() }.widen());
        v * v
    };
    (0..n).map(square).sum()
}
