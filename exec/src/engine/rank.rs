//! One rank: the interpreter proper.

use super::access::Offsets;
use super::fault::FaultKind;
use super::memory::{PassMemory, RankMemory};
use super::options::ExecOptions;
use super::session::RankInputs;
use super::taps::Taps;
use super::{ExecError, regions};
use crate::device::cpu::{Delays, first_nan};
use crate::device::{
    Abort, Command, Device, Failure, FailureKind, GraphId, Pass, Region, Stop, TaskTimes,
};
use crate::operand::{Hyper, RawRange};
use shardlab_plan::memory::AllocError;
use shardlab_plan::program::{
    BufferId, EventId, Holds, HostWorkKind, Instr, InstrId, Op, Program, Role, ScopeId, Section,
    SectionKind, StreamId,
};
use shardlab_plan::record::MemorySample;
use shardlab_plan::units::Picos;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Byte that makes NaN of every floating-point type, and no valid index.
const POISON: u8 = 0xff;

/// What must be written into a buffer before its first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Nothing,
    Zero,
    Poison,
    /// Bytes from [`Rank::presets`].
    Preset,
}

/// A task as the host issued it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issued {
    pub(crate) instr: InstrId,
    pub(crate) stream: StreamId,
    /// The last task on the event's stream, for each event recorded so far: kept in [`PassReport::behind`].
    pub(crate) number: u32,
}

/// What a pass leaves.
#[derive(Clone, Debug)]
pub(crate) struct PassReport {
    pub(crate) section: SectionKind,
    /// Nanoseconds of the device's clock.
    pub(crate) start: u64,
    pub(crate) issued_at: u64,
    pub(crate) end: u64,
    /// Part of the issue time in which the host waited for events.
    pub(crate) waited: u64,
    pub(crate) memory: PassMemory,
    pub(crate) losses: Vec<f32>,
    pub(crate) square: Option<f32>,
    /// Sum of squares of the gradients that the optimizer was given, where asked for.
    pub(crate) squares: f64,
    pub(crate) tasks: Vec<Issued>,
    pub(crate) times: Vec<TaskTimes>,
    /// By event: the last task issued before it on its stream.
    pub(crate) behind: BTreeMap<EventId, u32>,
    pub(crate) samples: Vec<MemorySample>,
}

/// What a pass is given.
#[derive(Clone, Copy)]
pub(crate) struct PassInputs<'a> {
    pub(crate) step: u32,
    pub(crate) hyper: Hyper,
    pub(crate) inputs: &'a RankInputs,
    pub(crate) record: bool,
}

/// A captured scope.
struct Graph {
    id: GraphId,
    /// Addresses of the buffers that it touches, use by use.
    bases: Vec<usize>,
    /// Tasks inside, in order.
    tasks: Vec<(InstrId, StreamId)>,
}

/// One rank on one device.
pub(crate) struct Rank<D> {
    pub(crate) id: u32,
    program: Arc<Program>,
    options: Arc<ExecOptions>,
    abort: Arc<Abort>,
    pub(crate) device: D,
    pub(crate) memory: RankMemory,
    offsets: Offsets,
    /// Real address of each live buffer; 0 for those that are not live.
    base: Vec<usize>,
    pending: Vec<Pending>,
    presets: BTreeMap<BufferId, Arc<[u8]>>,
    /// Buffers that outlive the pass that allocates them.
    persistent: Vec<bool>,
    /// By event: pass in which it was recorded last.
    recorded: Vec<u32>,
    pass: u32,
    graphs: Vec<Option<Graph>>,
    /// Commands of the scope that is being captured.
    capture: Option<(ScopeId, Vec<(StreamId, Command)>)>,
    captured_tasks: Vec<(InstrId, StreamId)>,
    captured_bases: Vec<usize>,
    taps: BTreeMap<SectionKind, Arc<Taps>>,
    delays: Option<Delays>,
    /// Host work by kind: it takes no time on this device, and is counted.
    pub(crate) host_work: BTreeMap<&'static str, u64>,
    // Of the pass at hand.
    tasks: u32,
    issued: Vec<Issued>,
    last_task: Vec<Option<u32>>,
    behind: BTreeMap<EventId, u32>,
    samples: Vec<MemorySample>,
    record: bool,
    waited: u64,
}

impl<D: Device> Rank<D> {
    pub(crate) fn new(
        id: u32,
        program: &Arc<Program>,
        options: &Arc<ExecOptions>,
        abort: &Arc<Abort>,
        mut device: D,
        regions: &[Region],
    ) -> Result<Self, ExecError> {
        device.map(regions).map_err(ExecError::Device)?;
        let buffers = program.buffers.len();
        let taps = program
            .sections
            .iter()
            .map(|s| {
                let taps = Taps::new(program, s);
                let taps = if options.grad_squares {
                    taps.with_squares(program, s)
                } else {
                    taps
                };
                (s.kind, Arc::new(taps))
            })
            .collect();
        Ok(Self {
            id,
            offsets: Offsets::new(program, id)?,
            memory: RankMemory::new(program, options.capacity),
            base: vec![0; buffers],
            pending: vec![Pending::Nothing; buffers],
            presets: BTreeMap::new(),
            persistent: persistent(program),
            recorded: vec![0; program.events as usize],
            pass: 0,
            graphs: program.scopes.iter().map(|_| None).collect(),
            capture: None,
            captured_tasks: Vec::new(),
            captured_bases: Vec::new(),
            taps,
            delays: options
                .delay
                .map(|d| Delays::new(d, id, u32::from(u8::MAX))),
            host_work: BTreeMap::new(),
            tasks: 0,
            issued: Vec::new(),
            last_task: vec![None; program.streams.len()],
            behind: BTreeMap::new(),
            samples: Vec::new(),
            record: false,
            waited: 0,
            program: Arc::clone(program),
            options: Arc::clone(options),
            abort: Arc::clone(abort),
            device,
        })
    }

    /// Performs a section. On a [`Stop`] the session's [`Abort`] knows the cause.
    pub(crate) fn run(
        &mut self,
        section: &Section,
        with: PassInputs<'_>,
    ) -> Result<PassReport, Stop> {
        let program = Arc::clone(&self.program);
        let taps = self.taps.get(&section.kind).cloned().unwrap_or_default();
        self.pass += 1;
        self.tasks = 0;
        self.issued.clear();
        self.last_task.fill(None);
        self.behind.clear();
        self.samples.clear();
        self.record = with.record;
        self.waited = 0;
        self.memory.begin(with.step);
        self.device.begin(Pass {
            hyper: with.hyper,
            slots: taps.slots,
            record: with.record,
        })?;
        let start = self.device.now();
        let mut next_tap = 0;
        let mut next_square = 0;
        let mut at = section.instrs.start;
        while at < section.instrs.end {
            let id = InstrId(at);
            let instr = &program.instrs[id.index()];
            if self.options.fault.is_some() || self.delays.is_some() {
                self.disturb(id)?;
            }
            if let Op::GraphBegin(scope) = instr.op
                && self.options.graphs
                && section.kind != SectionKind::First
                && self.graphs[scope.index()].is_some()
            {
                at = self.replay(&program, scope, at, section.instrs.end, &with)?;
                let passed = |t: &super::taps::Tap| t.after.0 < at;
                next_tap += taps.taps[next_tap..]
                    .iter()
                    .take_while(|t| passed(t))
                    .count();
                continue;
            }
            self.perform(&program, section.kind, id, instr, &with)?;
            while let Some(tap) = taps.taps.get(next_tap).filter(|t| t.after == id) {
                next_tap += 1;
                let from = self.range(id, tap.buffer, tap.offset, 4)?;
                let slot = tap.slot;
                self.submit(
                    tap.stream,
                    Command::Read {
                        instr: id,
                        from,
                        slot,
                    },
                )?;
            }
            if let Some((_, stream, slot, grads)) =
                taps.squares.get(next_square).filter(|s| s.0 == id)
            {
                next_square += 1;
                let from = grads
                    .iter()
                    .map(|&a| {
                        let access = &program.accesses[a as usize];
                        let offset = self.offsets.accesses[a as usize];
                        self.range(id, access.buffer, offset, access.bytes)
                    })
                    .collect::<Result<_, _>>()?;
                let slot = *slot;
                self.submit(
                    *stream,
                    Command::Squares {
                        instr: id,
                        from,
                        slot,
                    },
                )?;
            }
            if matches!(instr.op, Op::HostWait(_)) {
                self.check_flags(&taps, id)?;
            }
            at += 1;
        }
        let issued_at = self.device.now();
        self.device.idle()?;
        let end = self.device.now();
        self.check_flags(&taps, InstrId(section.instrs.end))?;
        Ok(PassReport {
            section: section.kind,
            start,
            issued_at,
            end,
            waited: self.waited,
            memory: self.memory.end(),
            losses: taps.losses.iter().map(|&s| self.device.slot(s)).collect(),
            square: taps.norm.map(|s| self.device.slot(s)),
            squares: taps
                .squares
                .iter()
                .map(|s| f64::from(self.device.slot(s.2)))
                .sum(),
            tasks: std::mem::take(&mut self.issued),
            times: if with.record {
                self.device.times()
            } else {
                Vec::new()
            },
            behind: std::mem::take(&mut self.behind),
            samples: std::mem::take(&mut self.samples),
        })
    }

    fn perform(
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
            } => {
                let mut ranges = SmallVec::with_capacity((end - reads) as usize);
                for a in reads..end {
                    let access = &program.accesses[a as usize];
                    let offset = self.offsets.accesses[a as usize];
                    self.first_use(id, access.buffer, stream)?;
                    ranges.push(self.range(id, access.buffer, offset, access.bytes)?);
                }
                let reads = writes - reads;
                self.task(
                    stream,
                    Command::Launch {
                        instr: id,
                        kernel,
                        reads,
                        ranges,
                    },
                )
            }
            Op::Collective { id: c, stream } => {
                let collective = &program.collectives[c.index()];
                let mut parts = SmallVec::with_capacity(collective.parts.len());
                for (n, part) in collective.parts.iter().enumerate() {
                    let (from, to) = self.offsets.parts[c.index()][n];
                    self.first_use(id, part.input.buffer, stream)?;
                    self.first_use(id, part.output.buffer, stream)?;
                    parts.push((
                        self.range(id, part.input.buffer, from, part.input.bytes)?,
                        self.range(id, part.output.buffer, to, part.output.bytes)?,
                    ));
                }
                self.task(
                    stream,
                    Command::Collective {
                        instr: id,
                        id: c,
                        parts,
                    },
                )
            }
            Op::Copy { id: c, stream } => {
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
                self.task(
                    stream,
                    Command::Copy {
                        instr: id,
                        from,
                        to,
                    },
                )
            }
            Op::Record { event, stream } => {
                self.recorded[event.index()] = self.pass;
                if self.record
                    && let Some(task) = self.last_task[stream.index()]
                {
                    self.behind.insert(event, task);
                }
                self.submit(stream, Command::Record { instr: id, event })
            }
            Op::Wait { event, stream } => {
                self.expect_recorded(id, event)?;
                self.submit(stream, Command::Wait { instr: id, event })
            }
            Op::HostWait(event) => {
                self.expect_recorded(id, event)?;
                if self.capture.is_some() {
                    let what = "the host waits within a captured scope".to_owned();
                    return Err(self.fail(FailureKind::Program, id, what));
                }
                let before = self.device.now();
                self.device.host_wait(id, event)?;
                self.waited += self.device.now() - before;
                Ok(())
            }
            Op::HostWork { kind, count } => {
                *self.host_work.entry(host_work_name(kind)).or_default() += u64::from(count);
                Ok(())
            }
            Op::Alloc(buffer) => self.alloc(program, section, id, instr, buffer, with),
            Op::Free(buffer) => self.free(program, id, buffer),
            Op::GraphBegin(scope) => {
                if self.options.graphs && section != SectionKind::First {
                    self.capture = Some((scope, Vec::new()));
                    self.captured_tasks.clear();
                    self.captured_bases.clear();
                }
                Ok(())
            }
            Op::GraphEnd(scope) => self.end_capture(id, scope),
        }
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
        let time = if self.record { self.device.now() } else { 0 };
        let address = match self.memory.alloc(program, buffer, id, time) {
            Ok(address) => address,
            Err(e) => return Err(self.refused(program, id, buffer, &e)),
        };
        self.sample(id, time);
        let b = &program.buffers[buffer.index()];
        self.base[buffer.index()] = if b.bytes.0 == 0 {
            // Nobody looks behind an address of nothing.
            b.align.max(1) as usize
        } else {
            match self.device.pointer(address, b.bytes.0) {
                Some(p) => p.expose_provenance(),
                None => {
                    let what = format!(
                        "address {address:#x} of {} is outside of every planned region",
                        program.buffer_name(buffer)
                    );
                    return Err(self.fail(FailureKind::Alloc, id, what));
                }
            }
        };
        let preset = self.presets.contains_key(&buffer);
        self.pending[buffer.index()] = match section {
            _ if preset => Pending::Preset,
            // Fresh memory holds zeros.
            SectionKind::Init => Pending::Nothing,
            _ if self.persistent[buffer.index()] => Pending::Zero,
            _ if self.options.poison => Pending::Poison,
            _ => Pending::Nothing,
        };
        if let (Role::Input, Holds::Const(c)) = (b.role, b.holds)
            && section != SectionKind::Init
        {
            let found = with.inputs.get(instr.micro_batch, c);
            let Some(data) = found.filter(|d| d.len() as u64 == b.bytes.0) else {
                let what = format!(
                    "input {} of micro-batch {}: {} bytes given, {} needed",
                    c.0,
                    instr.micro_batch,
                    found.map_or(0, |d| d.len()),
                    b.bytes.0
                );
                return Err(self.fail(FailureKind::Program, id, what));
            };
            let data = Arc::clone(data);
            self.pending[buffer.index()] = Pending::Nothing;
            let to = self.range(id, buffer, 0, b.bytes.0)?;
            self.submit(
                b.stream,
                Command::Upload {
                    instr: id,
                    to,
                    data,
                },
            )?;
        }
        Ok(())
    }

    fn free(&mut self, program: &Program, id: InstrId, buffer: BufferId) -> Result<(), Stop> {
        let time = if self.record { self.device.now() } else { 0 };
        if !self.memory.free(program, buffer, id, time) {
            let what = format!("{} is not live", program.buffer_name(buffer));
            return Err(self.fail(FailureKind::Program, id, what));
        }
        self.base[buffer.index()] = 0;
        self.pending[buffer.index()] = Pending::Nothing;
        self.sample(id, time);
        Ok(())
    }

    fn sample(&mut self, instr: InstrId, time: u64) {
        if self.record {
            let now = self.memory.counters();
            self.samples.push(MemorySample {
                instr,
                time: Picos::from_ns(time),
                allocated: now.allocated,
                reserved: now.reserved,
            });
        }
    }

    /// A range of a live buffer.
    fn range(
        &self,
        id: InstrId,
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    ) -> Result<RawRange, Stop> {
        let base = self.base[buffer.index()];
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

    /// Writes what a fresh buffer must hold, on the stream that uses it first: whatever makes that use safe makes this
    /// safe.
    fn first_use(&mut self, id: InstrId, buffer: BufferId, stream: StreamId) -> Result<(), Stop> {
        if self.capture.is_some() {
            self.captured_bases.push(self.base[buffer.index()]);
        }
        let pending = std::mem::replace(&mut self.pending[buffer.index()], Pending::Nothing);
        if pending == Pending::Nothing || self.base[buffer.index()] == 0 {
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
            Pending::Preset => match self.presets.remove(&buffer) {
                Some(data) => Command::Upload {
                    instr: id,
                    to,
                    data,
                },
                None => return Ok(()),
            },
        };
        self.submit(stream, command)
    }

    fn task(&mut self, stream: StreamId, command: Command) -> Result<(), Stop> {
        let number = self.tasks;
        self.note_task(command.instr(), stream);
        if let Some((_, list)) = &mut self.capture {
            list.push((stream, command.clone()));
            self.captured_tasks.push((command.instr(), stream));
        }
        self.device.submit(stream, command, number)
    }

    fn note_task(&mut self, instr: InstrId, stream: StreamId) {
        if self.record {
            self.issued.push(Issued {
                instr,
                stream,
                number: self.tasks,
            });
            self.last_task[stream.index()] = Some(self.tasks);
        }
        self.tasks += 1;
    }

    fn submit(&mut self, stream: StreamId, command: Command) -> Result<(), Stop> {
        if let Some((_, list)) = &mut self.capture {
            list.push((stream, command.clone()));
        }
        self.device.submit(stream, command, 0)
    }

    fn expect_recorded(&mut self, id: InstrId, event: EventId) -> Result<(), Stop> {
        if self.recorded[event.index()] == self.pass {
            return Ok(());
        }
        let what = format!("event e{} has not been recorded in this pass", event.0);
        Err(self.fail(FailureKind::Program, id, what))
    }

    fn end_capture(&mut self, id: InstrId, scope: ScopeId) -> Result<(), Stop> {
        let Some((open, commands)) = self.capture.take() else {
            return Ok(());
        };
        if open != scope {
            let what = "ends another scope than the one that is open".to_owned();
            return Err(self.fail(FailureKind::Program, id, what));
        }
        let bases = std::mem::take(&mut self.captured_bases);
        let tasks = std::mem::take(&mut self.captured_tasks);
        let graph = self.device.capture(commands)?;
        self.graphs[scope.index()] = Some(Graph {
            id: graph,
            bases,
            tasks,
        });
        Ok(())
    }

    /// Replays a scope: memory is managed as the program says, everything else comes from the captured list. Returns the
    /// instruction behind the scope.
    fn replay(
        &mut self,
        program: &Program,
        scope: ScopeId,
        begin: u32,
        section_end: u32,
        with: &PassInputs<'_>,
    ) -> Result<u32, Stop> {
        let Some(graph) = self.graphs[scope.index()].take() else {
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
                Op::Record { event, .. } => self.recorded[event.index()] = self.pass,
                Op::GraphEnd(s) if s == scope => {
                    end = i;
                    break;
                }
                _ => {}
            }
            let mut moved = None;
            each_buffer(program, &instr.op, |b| {
                // The list holds the first fill of a buffer as well.
                self.pending[b.index()] = Pending::Nothing;
                let (now, before) = (self.base[b.index()], uses.next().copied());
                if before != Some(now) {
                    moved = moved.or(Some((b, now, before.unwrap_or(0))));
                }
            });
            if let Some((b, now, before)) = moved {
                let what = format!(
                    "{} is at {now:#x} now and was at {before:#x} when the scope was captured",
                    program.buffer_name(b)
                );
                return Err(self.fail(FailureKind::Program, id, what));
            }
        }
        let first = self.tasks;
        for &(instr, stream) in &graph.tasks {
            self.note_task(instr, stream);
        }
        self.device.replay(graph.id, first)?;
        if self.record {
            self.behind_of_scope(program, begin, end, first);
        }
        self.graphs[scope.index()] = Some(graph);
        Ok(end + 1)
    }

    /// Events recorded within a replayed scope, for the blockers of spans.
    fn behind_of_scope(&mut self, program: &Program, begin: u32, end: u32, first: u32) {
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
                        self.behind.insert(event, task);
                    }
                }
                _ => {}
            }
        }
    }

    /// Looks at the program's own NaN flags.
    fn check_flags(&mut self, taps: &Taps, now: InstrId) -> Result<(), Stop> {
        let found = taps
            .flags
            .iter()
            .find(|(i, slot)| *i < now && self.device.slot(*slot) != 0.0);
        let Some(&(instr, _)) = found else {
            return Ok(());
        };
        let program = Arc::clone(&self.program);
        let reads = program.reads(&program.instrs[instr.index()].op);
        let what = reads
            .first()
            .map_or_else(String::new, |a| self.describe_nan(&program, a.buffer));
        Err(self.fail(FailureKind::Nan, instr, format!("found in {what}")))
    }

    /// Names the buffer and, where it can be told, the parameter of its first NaN.
    fn describe_nan(&self, program: &Program, buffer: BufferId) -> String {
        let b = &program.buffers[buffer.index()];
        let name = program.buffer_name(buffer);
        let Holds::Group(g) = b.holds else {
            return name;
        };
        let group = &program.groups[g.index()];
        let base = self.base[buffer.index()];
        let at = (base != 0).then(|| {
            let range = RawRange {
                ptr: std::ptr::with_exposed_provenance_mut(base),
                bytes: b.bytes.0 as usize,
                dtype: b.dtype,
            };
            first_nan(&self.device.read(range), b.dtype)
        });
        let full = group.layout.full_numel() * b.dtype.size() == b.bytes.0;
        let shard = if full {
            0
        } else {
            self.shard_start(program, group)
        };
        if let (Some(Some(at)), shardlab_plan::shard::Layout::Flat(layout)) = (at, &group.layout) {
            let at = at as u64 + shard;
            let item = layout
                .items
                .iter()
                .zip(&group.params)
                .find(|(i, _)| (i.offset..i.offset + i.numel).contains(&at));
            if let Some((_, p)) = item {
                return format!("{name}: parameter {}", program.params[p.index()].name);
            }
        }
        let names: Vec<&str> = group
            .params
            .iter()
            .map(|p| program.params[p.index()].name.as_str())
            .collect();
        format!("{name}: one of {}", names.join(", "))
    }

    fn shard_start(&self, program: &Program, group: &shardlab_plan::shard::Group) -> u64 {
        u64::from(self.id % program.meta.dp_shard.max(1)) * group.layout.shard_numel()
    }

    fn disturb(&mut self, id: InstrId) -> Result<(), Stop> {
        if let Some(delays) = &mut self.delays {
            delays.maybe_sleep();
        }
        let Some(fault) = self.options.fault else {
            return Ok(());
        };
        if fault.rank != self.id || fault.instr != id {
            return Ok(());
        }
        match fault.kind {
            FaultKind::Panic => panic!("injected panic on the host"),
            FaultKind::Error => {
                Err(self.fail(FailureKind::Injected, id, "an injected error".to_owned()))
            }
            FaultKind::Stall => {
                while !self.abort.aborted() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                Err(Stop::Aborted)
            }
            FaultKind::DevicePanic => Ok(()),
        }
    }

    fn refused(&self, program: &Program, id: InstrId, buffer: BufferId, e: &AllocError) -> Stop {
        let kind = match e {
            AllocError::OutOfMemory { .. } => FailureKind::OutOfMemory,
            _ => FailureKind::Alloc,
        };
        let mut what = format!("{}: {e}", program.buffer_name(buffer));
        if kind == FailureKind::OutOfMemory {
            let alive: Vec<String> = self
                .memory
                .by_role()
                .iter()
                .map(|(role, bytes)| format!("{} {bytes}", role.name()))
                .collect();
            what = format!("{what}; alive: {}", alive.join(", "));
        }
        self.fail(kind, id, what)
    }

    fn fail(&self, kind: FailureKind, id: InstrId, message: String) -> Stop {
        let known = id.index() < self.program.instrs.len();
        self.abort.fail(Failure {
            kind,
            rank: self.id,
            stream: None,
            instr: known.then_some(id),
            text: if known {
                self.program.op_text(id)
            } else {
                String::new()
            },
            message,
        });
        Stop::Aborted
    }

    /// Contents that a buffer gets when it is allocated next.
    pub(crate) fn preset(&mut self, buffer: BufferId, data: Arc<[u8]>) {
        self.presets.insert(buffer, data);
    }

    /// A range of a live buffer while the device is idle.
    pub(crate) fn live_range(&self, buffer: BufferId, offset: u64, bytes: u64) -> Option<RawRange> {
        let b = self.program.buffers.get(buffer.index())?;
        let base = self.base[buffer.index()];
        let fits = offset.checked_add(bytes)? <= b.bytes.0;
        (base != 0 && fits).then(|| RawRange {
            ptr: std::ptr::with_exposed_provenance_mut(base + offset as usize),
            bytes: bytes as usize,
            dtype: b.dtype,
        })
    }

    /// Bytes of a live buffer while the device is idle: what its first use would see, if that is still to come.
    pub(crate) fn read(&self, buffer: BufferId, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        let range = self.live_range(buffer, offset, bytes)?;
        Some(match self.pending[buffer.index()] {
            Pending::Nothing => self.device.read(range),
            Pending::Zero => vec![0; range.bytes],
            Pending::Poison => vec![POISON; range.bytes],
            Pending::Preset => {
                let from = offset as usize;
                self.presets.get(&buffer)?[from..from + range.bytes].to_vec()
            }
        })
    }

    /// Writes bytes of a live buffer while the device is idle.
    pub(crate) fn write(&mut self, buffer: BufferId, offset: u64, data: &[u8]) -> Option<()> {
        let range = self.live_range(buffer, offset, data.len() as u64)?;
        if self.pending[buffer.index()] != Pending::Nothing {
            let size = self.program.buffers[buffer.index()].bytes.0;
            let whole = self.live_range(buffer, 0, size)?;
            let now = self.read(buffer, 0, size)?;
            self.device.write(whole, &now);
            self.pending[buffer.index()] = Pending::Nothing;
            self.presets.remove(&buffer);
        }
        self.device.write(range, data);
        Some(())
    }
}

/// Regions that every rank's device must back.
pub(crate) fn plan_regions(program: &Program, options: &ExecOptions) -> Vec<Region> {
    regions::regions(program, options.capacity)
}

/// Calls `f` for every buffer that an operation's device work touches.
fn each_buffer(program: &Program, op: &Op, mut f: impl FnMut(BufferId)) {
    match *op {
        Op::Launch { reads, end, .. } => program.accesses[reads as usize..end as usize]
            .iter()
            .for_each(|a| f(a.buffer)),
        Op::Collective { id, .. } => {
            for p in &program.collectives[id.index()].parts {
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

/// Buffers of `Init`, and those that `First` allocates and does not free.
fn persistent(program: &Program) -> Vec<bool> {
    let mut all = vec![false; program.buffers.len()];
    for kind in [SectionKind::Init, SectionKind::First] {
        let instrs = program.section(kind).map(|s| program.section_instrs(s));
        for instr in instrs.unwrap_or_default() {
            match instr.op {
                Op::Alloc(b) => all[b.index()] = true,
                Op::Free(b) => all[b.index()] = false,
                _ => {}
            }
        }
    }
    all
}

const fn host_work_name(kind: HostWorkKind) -> &'static str {
    match kind {
        HostWorkKind::Dispatch => "dispatch",
        HostWorkKind::AutogradDispatch => "autograd_dispatch",
        HostWorkKind::Guard => "guard",
        HostWorkKind::GraphBreak => "graph_break",
        HostWorkKind::Hook => "hook",
        HostWorkKind::HookParam => "hook_param",
        HostWorkKind::OptimizerStep => "optimizer_step",
        HostWorkKind::Step => "step",
    }
}
