//! One rank: the interpreter proper.

mod host;
mod perform;
mod scope;
mod trouble;

use super::access::Offsets;
use super::gate::Gate;
use super::live::Live;
use super::memory::{PassMemory, RankMemory};
use super::options::ExecOptions;
use super::session::RankInputs;
use super::standing::Standings;
use super::taps::Taps;
use super::{ExecError, regions};
use crate::device::cpu::Delays;
use crate::device::{Abort, Command, Device, Pass, Region, Stop, TaskTimes};
use crate::operand::Hyper;
use scope::Graph;
use shardlab_plan::ir::{BufferId, EventId, InstrId, ScopeId, StreamId};
use shardlab_plan::program::{Op, Program, Section, SectionKind};
use shardlab_plan::record::MemorySample;
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
    /// Place in issue order.
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
    /// Part of the issue time in which the host waited for events, or for room in the device's queue.
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

impl PassReport {
    /// Nanoseconds in which the host issued, waits left out.
    pub(crate) fn host(&self) -> u64 {
        let issuing = self.issued_at.saturating_sub(self.start);
        issuing.saturating_sub(self.waited)
    }
}

/// What a pass is given.
#[derive(Clone, Copy)]
pub(crate) struct PassInputs<'a> {
    pub(crate) step: u32,
    pub(crate) hyper: Hyper,
    pub(crate) inputs: &'a RankInputs,
    pub(crate) record: bool,
    /// As [`Pass::singly`].
    pub(crate) singly: bool,
    /// Where all ranks wait for one another once their devices have begun the pass, and before times are taken.
    pub(crate) gate: Option<&'a Gate>,
}

/// One rank on one device.
pub(crate) struct Rank<D> {
    pub(crate) id: u32,
    program: Arc<Program>,
    options: Arc<ExecOptions>,
    abort: Arc<Abort>,
    live: Arc<Live>,
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
    /// A rank on a device that has nothing yet. Errors pass `leaving` before the device is dropped.
    pub(crate) fn new(
        id: u32,
        standings: &Standings,
        options: &Arc<ExecOptions>,
        abort: &Arc<Abort>,
        mut device: D,
        regions: &[Region],
        leaving: &dyn Fn(ExecError) -> ExecError,
    ) -> Result<Self, ExecError> {
        let program = &standings.program;
        let mapped = device
            .map(regions)
            .map_err(|e| ExecError::Device(format!("{e}; {}", super::memory::needs(program))));
        let offsets = mapped
            .and_then(|()| Offsets::new(program, id))
            .map_err(leaving)?;
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
            offsets,
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
            live: Arc::clone(&standings.live),
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
            singly: with.singly,
            inputs: with.inputs.all().cloned().collect(),
        })?;
        if let Some(gate) = with.gate {
            gate.pass(self.id, &self.abort, "begun the pass")?;
        }
        self.live.begins(self.id, with.step);
        let start = self.device.now();
        let mut next_tap = 0;
        let mut next_square = 0;
        let mut at = section.instrs.start;
        while at < section.instrs.end {
            let id = InstrId(at);
            let instr = &program.instrs[id.index()];
            self.live.issues(self.id, self.pass, id);
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
                next_square += taps.squares[next_square..]
                    .iter()
                    .take_while(|s| s.0.0 < at)
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
        if let Some(gate) = with.gate {
            gate.pass(self.id, &self.abort, "ended the pass")?;
        }
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
}

/// Regions that every rank's device must back.
pub(crate) fn plan_regions(program: &Program, options: &ExecOptions) -> Vec<Region> {
    regions::regions(program, options.capacity)
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
