//! Execution of single instructions.

use super::{POISON, Pending, Rank};
use crate::base::operand::RawRange;
use crate::device::{Command, Device, FailureKind, Stop};
use crate::engine::pass::{Issued, PassInputs};
use shardlab_plan::ir::{
    BufferId, CollectiveId, ConstId, CopyId, EventId, Holds, InstrId, KernelId, StreamId,
};
use shardlab_plan::memory::AllocError;
use shardlab_plan::program::{Instr, Op, Program, SectionKind};
use shardlab_plan::record::MemorySample;
use shardlab_plan::units::Picos;
use smallvec::SmallVec;
use std::sync::Arc;

impl<D: Device> Rank<D> {
    pub(super) fn perform(
        &mut self,
        program: &Program,
        section: SectionKind,
        id: InstrId,
        instr: &Instr,
        with: &PassInputs<'_>,
    ) -> Result<(), Stop> {
        match instr.op {
            Op::Launch {
                kernel,
                stream,
                reads,
                writes,
                end,
            } => self.launch(program, id, (kernel, stream), [reads, writes, end]),
            Op::Collective { id: c, stream } => self.collective(program, id, c, stream),
            Op::Copy { id: c, stream } => self.copy(program, id, c, stream),
            Op::Record { event, stream } => {
                self.pass.recorded[event.index()] = self.pass.number;
                if self.pass.record
                    && let Some(task) = self.pass.last_task[stream.index()]
                {
                    self.pass.behind.insert(event, task);
                }
                self.submit(stream, Command::Record { instr: id, event })
            }
            Op::Wait { event, stream } => {
                self.expect_recorded(id, event)?;
                self.submit(stream, Command::Wait { instr: id, event })
            }
            Op::HostWait(event) => self.host_wait(id, event),
            Op::HostWork { kind, count } => {
                *self.host_work.entry(kind.name()).or_default() += u64::from(count);
                Ok(())
            }
            Op::Alloc(buffer) => self.alloc(program, section, id, instr, buffer, with),
            Op::Free(buffer) => self.free(program, id, buffer),
            Op::GraphBegin(scope) => {
                if self.options.graphs && section != SectionKind::First {
                    self.capture.open = Some((scope, Vec::new()));
                    self.capture.tasks.clear();
                    self.capture.bases.clear();
                }
                Ok(())
            }
            Op::GraphEnd(scope) => self.end_capture(id, scope),
        }
    }

    /// Launches a kernel whose accesses start at `reads`, those that it writes at `writes`.
    fn launch(
        &mut self,
        program: &Program,
        id: InstrId,
        (kernel, stream): (KernelId, StreamId),
        [reads, writes, end]: [u32; 3],
    ) -> Result<(), Stop> {
        let mut ranges = SmallVec::with_capacity((end - reads) as usize);
        for a in reads..end {
            let access = &program.accesses[a as usize];
            let offset = self.offsets.accesses[a as usize];
            self.first_use(id, access.buffer, stream)?;
            ranges.push(self.range(id, access.buffer, offset, access.bytes)?);
        }
        let command = Command::Launch {
            instr: id,
            kernel,
            reads: writes - reads,
            ranges,
        };
        self.task(stream, command)
    }

    fn collective(
        &mut self,
        program: &Program,
        id: InstrId,
        c: CollectiveId,
        stream: StreamId,
    ) -> Result<(), Stop> {
        let collective = &program.collectives[c.index()];
        let mut parts = SmallVec::with_capacity(collective.parts.len() + 1);
        for (n, part) in collective.operands().enumerate() {
            let (from, to) = self.offsets.parts[c.index()][n];
            self.first_use(id, part.input.buffer, stream)?;
            self.first_use(id, part.output.buffer, stream)?;
            parts.push((
                self.range(id, part.input.buffer, from, part.input.bytes)?,
                self.range(id, part.output.buffer, to, part.output.bytes)?,
            ));
        }
        let command = Command::Collective {
            instr: id,
            id: c,
            parts,
        };
        self.task(stream, command)
    }

    fn copy(
        &mut self,
        program: &Program,
        id: InstrId,
        c: CopyId,
        stream: StreamId,
    ) -> Result<(), Stop> {
        let copy = &program.copies[c.index()];
        let (from, to) = self.offsets.copies[c.index()];
        self.first_use(id, copy.from.buffer, stream)?;
        self.first_use(id, copy.to.buffer, stream)?;
        let from = self.range(id, copy.from.buffer, from, copy.from.bytes)?;
        let to = self.range(id, copy.to.buffer, to, copy.to.bytes)?;
        if from.bytes != to.bytes {
            let what = format!("{} bytes into {}", from.bytes, to.bytes);
            return Err(self.fail(FailureKind::Program, id, what));
        }
        let command = Command::Copy {
            instr: id,
            from,
            to,
        };
        self.task(stream, command)
    }

    fn host_wait(&mut self, id: InstrId, event: EventId) -> Result<(), Stop> {
        self.expect_recorded(id, event)?;
        if self.capture.open.is_some() {
            let what = "the host waits within a captured scope".to_owned();
            return Err(self.fail(FailureKind::Program, id, what));
        }
        let before = self.device.now();
        self.device.host_wait(id, event)?;
        self.pass.waited += self.device.now() - before;
        Ok(())
    }

    fn alloc(
        &mut self,
        program: &Program,
        section: SectionKind,
        id: InstrId,
        instr: &Instr,
        buffer: BufferId,
        with: &PassInputs<'_>,
    ) -> Result<(), Stop> {
        let time = self.sample_time();
        let address = match self.memory.alloc(program, buffer, id, time) {
            Ok(address) => address,
            Err(e) => {
                let kind = match e {
                    AllocError::OutOfMemory { .. } => FailureKind::OutOfMemory,
                    _ => FailureKind::Alloc,
                };
                return Err(self.refused(program, id, buffer, kind, &e.to_string()));
            }
        };
        self.sample(id, time);
        self.buffers.base[buffer.index()] = self.base(program, id, buffer, address)?;
        let preset = self.buffers.presets.contains_key(&buffer);
        self.buffers.pending[buffer.index()] = match section {
            _ if preset => Pending::Preset,
            // Fresh memory is zeroed.
            SectionKind::Init => Pending::Nothing,
            _ if self.buffers.persistent[buffer.index()] => Pending::Zero,
            _ if self.options.poison => Pending::Poison,
            _ => Pending::Nothing,
        };
        match program.buffers[buffer.index()].holds {
            Holds::Const(c) if program.upload(id).is_some() => {
                let data = with.inputs.get(instr.micro_batch, c);
                self.upload(program, id, buffer, (instr.micro_batch, c), data)
            }
            _ => Ok(()),
        }
    }

    /// Returns where the device has a buffer that the allocator has put at `address`.
    fn base(
        &self,
        program: &Program,
        id: InstrId,
        buffer: BufferId,
        address: u64,
    ) -> Result<usize, Stop> {
        let b = &program.buffers[buffer.index()];
        if b.bytes.0 == 0 {
            // The address of an empty buffer is never dereferenced.
            return Ok(b.align.max(1) as usize);
        }
        match self.device.pointer(address, b.bytes.0) {
            Ok(Some(p)) => Ok(p.expose_provenance()),
            Err((kind, e)) => Err(self.refused(program, id, buffer, kind, &e)),
            Ok(None) => {
                let what = format!(
                    "address {address:#x} of {} is outside all planned regions",
                    program.buffer_name(buffer)
                );
                Err(self.fail(FailureKind::Alloc, id, what))
            }
        }
    }

    /// Copies the input of a micro-batch into its new buffer.
    fn upload(
        &mut self,
        program: &Program,
        id: InstrId,
        buffer: BufferId,
        (micro_batch, input): (u16, ConstId),
        data: Option<&Arc<[u8]>>,
    ) -> Result<(), Stop> {
        let b = &program.buffers[buffer.index()];
        let Some(data) = data.filter(|d| d.len() as u64 == b.bytes.0) else {
            let what = format!(
                "input {} of micro-batch {micro_batch}: {} bytes given, {} needed",
                input.0,
                data.map_or(0, |d| d.len()),
                b.bytes.0
            );
            return Err(self.fail(FailureKind::Program, id, what));
        };
        self.buffers.pending[buffer.index()] = Pending::Nothing;
        let command = Command::Upload {
            instr: id,
            to: self.range(id, buffer, 0, b.bytes.0)?,
            data: Arc::clone(data),
        };
        self.task(b.stream, command)
    }

    pub(super) fn free(
        &mut self,
        program: &Program,
        id: InstrId,
        buffer: BufferId,
    ) -> Result<(), Stop> {
        let time = self.sample_time();
        if !self.memory.free(program, buffer, id, time) {
            let what = format!("{} is not live", program.buffer_name(buffer));
            return Err(self.fail(FailureKind::Program, id, what));
        }
        self.buffers.base[buffer.index()] = 0;
        self.buffers.pending[buffer.index()] = Pending::Nothing;
        self.sample(id, time);
        Ok(())
    }

    /// Returns the time of a memory sample, in nanoseconds; 0 if the pass does not record.
    fn sample_time(&self) -> u64 {
        if self.pass.record {
            self.device.now()
        } else {
            0
        }
    }

    fn sample(&mut self, instr: InstrId, time: u64) {
        let now = self.memory.ledger.counters();
        self.progress
            .set_memory(self.id, now.allocated, now.reserved);
        if self.pass.record {
            self.pass.samples.push(MemorySample {
                instr,
                time: Picos::from_ns(time),
                allocated: now.allocated,
                reserved: now.reserved,
            });
        }
    }

    /// Returns a range of a live buffer.
    pub(super) fn range(
        &self,
        id: InstrId,
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    ) -> Result<RawRange, Stop> {
        let base = self.buffers.base[buffer.index()];
        if base == 0 {
            let what = format!("{} is not live", self.program.buffer_name(buffer));
            return Err(self.fail(FailureKind::Program, id, what));
        }
        Ok(RawRange {
            ptr: std::ptr::with_exposed_provenance_mut(base + offset as usize),
            bytes: bytes as usize,
            dtype: self.program.buffers[buffer.index()].dtype,
        })
    }

    /// Writes the initial contents of a fresh buffer on the stream that uses it first, so the write
    /// is as safe as that use.
    pub(super) fn first_use(
        &mut self,
        id: InstrId,
        buffer: BufferId,
        stream: StreamId,
    ) -> Result<(), Stop> {
        if self.capture.open.is_some() {
            self.capture.bases.push(self.buffers.base[buffer.index()]);
        }
        let pending =
            std::mem::replace(&mut self.buffers.pending[buffer.index()], Pending::Nothing);
        if pending == Pending::Nothing || self.buffers.base[buffer.index()] == 0 {
            return Ok(());
        }
        let bytes = self.program.buffers[buffer.index()].bytes.0;
        let to = self.range(id, buffer, 0, bytes)?;
        let fill = |byte| Command::Fill {
            instr: id,
            to,
            byte,
        };
        let command = match pending {
            Pending::Nothing => return Ok(()),
            Pending::Zero => fill(0),
            Pending::Poison => fill(POISON),
            Pending::Preset => match self.buffers.presets.remove(&buffer) {
                Some(data) => Command::Preset {
                    instr: id,
                    to,
                    data,
                },
                None => return Ok(()),
            },
        };
        self.submit(stream, command)
    }

    pub(super) fn task(&mut self, stream: StreamId, command: Command) -> Result<(), Stop> {
        let number = self.pass.tasks;
        self.note_task(command.instr(), stream);
        if let Some((_, list)) = &mut self.capture.open {
            list.push((stream, command.clone()));
            self.capture.tasks.push((command.instr(), stream));
        }
        self.enqueue(stream, command, number)
    }

    pub(super) fn note_task(&mut self, instr: InstrId, stream: StreamId) {
        if self.pass.record {
            self.pass.issued.push(Issued {
                instr,
                stream,
                number: self.pass.tasks,
            });
            self.pass.last_task[stream.index()] = Some(self.pass.tasks);
        }
        self.pass.tasks += 1;
    }

    pub(super) fn submit(&mut self, stream: StreamId, command: Command) -> Result<(), Stop> {
        if let Some((_, list)) = &mut self.capture.open {
            list.push((stream, command.clone()));
        }
        self.enqueue(stream, command, 0)
    }

    /// Passes a command to the device. A call that takes longer than any launch has waited for
    /// space in the device's queue, because the host is far ahead; that time is not host work.
    fn enqueue(&mut self, stream: StreamId, command: Command, task: u32) -> Result<(), Stop> {
        let before = self.device.now();
        let done = self.device.submit(stream, command, task);
        self.pass.waited += queue_wait(self.device.now().saturating_sub(before));
        done
    }

    pub(super) fn expect_recorded(&mut self, id: InstrId, event: EventId) -> Result<(), Stop> {
        if self.pass.recorded[event.index()] == self.pass.number {
            return Ok(());
        }
        let what = format!("event e{} has not been recorded in this pass", event.0);
        Err(self.fail(FailureKind::Program, id, what))
    }
}

/// Returns the part of a call's `took` nanoseconds in which it waited for space in the device's
/// queue. Launches take 3 to 20 us; kernels that free space mostly take longer than this bound.
const fn queue_wait(took: u64) -> u64 {
    const MAX_LAUNCH: u64 = 100_000;
    if took > MAX_LAUNCH { took } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::queue_wait;

    #[test]
    fn only_calls_longer_than_launches_have_waited() {
        assert_eq!(
            [19_000, 100_000, 100_001, 1_264_000].map(queue_wait),
            [0, 0, 100_001, 1_264_000]
        );
    }
}
