//! One rank: the interpreter proper.

mod failure;
mod host;
mod perform;
mod results;
mod scope;

use super::memory::RankMemory;
use super::offsets::Offsets;
use super::pass::{Issued, PassInputs, PassReport};
use super::readback::Readbacks;
use super::{ExecError, regions};
use crate::base::delay::Delays;
use crate::base::divergence::LocalProgress;
use crate::base::options::ExecOptions;
use crate::base::progress::Progress;
use crate::device::{Abort, Command, Device, Pass, Region, Stop};
use scope::Graph;
use shardlab_plan::ir::{BufferId, EventId, InstrId, ScopeId, StreamId};
use shardlab_plan::program::{Op, Program, Section, SectionKind};
use shardlab_plan::record::MemorySample;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Byte pattern that is NaN in every floating-point type, and an invalid index.
const POISON: u8 = 0xff;

/// Contents that must be written to a buffer before its first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Nothing,
    Zero,
    Poison,
    /// Data in [`Buffers::presets`].
    Preset,
}

/// Memory of a rank's buffers, by buffer.
struct Buffers {
    /// Real address of each live buffer; 0 for those that are not live.
    base: Vec<usize>,
    pending: Vec<Pending>,
    presets: BTreeMap<BufferId, Arc<[u8]>>,
    /// Whether the buffer outlives the pass that allocates it.
    persistent: Vec<bool>,
}

/// Captured scopes, and the one that is being captured.
struct Capture {
    graphs: Vec<Option<Graph>>,
    /// Commands of the scope that is being captured.
    open: Option<(ScopeId, Vec<(StreamId, Command)>)>,
    tasks: Vec<(InstrId, StreamId)>,
    bases: Vec<usize>,
}

/// State of the current pass.
struct PassState {
    /// Number of passes begun.
    number: u32,
    /// By event: the last pass in which it was recorded.
    recorded: Vec<u32>,
    /// Whether the pass records times.
    record: bool,
    /// Number of tasks issued.
    tasks: u32,
    issued: Vec<Issued>,
    /// By stream: its last task.
    last_task: Vec<Option<u32>>,
    /// By event: the last task that was issued before it on its stream.
    behind: BTreeMap<EventId, u32>,
    samples: Vec<MemorySample>,
    /// Nanoseconds in which the host waited for events or for space in the device's queue.
    waited: u64,
}

impl PassState {
    /// Starts the next pass.
    fn begin(&mut self, record: bool) {
        self.number += 1;
        self.tasks = 0;
        self.issued.clear();
        self.last_task.fill(None);
        self.behind.clear();
        self.samples.clear();
        self.record = record;
        self.waited = 0;
    }
}

/// One rank on one device.
pub(crate) struct Rank<D> {
    pub(crate) id: u32,
    program: Arc<Program>,
    options: Arc<ExecOptions>,
    abort: Arc<Abort>,
    progress: Arc<Progress>,
    pub(crate) device: D,
    pub(crate) memory: RankMemory,
    offsets: Offsets,
    readbacks: BTreeMap<SectionKind, Arc<Readbacks>>,
    buffers: Buffers,
    capture: Capture,
    pass: PassState,
    delays: Option<Delays>,
    /// Host work by kind: it is counted, and takes no time on this device.
    pub(crate) host_work: BTreeMap<&'static str, u64>,
}

impl<D: Device> Rank<D> {
    /// Creates a rank on an unused device. Errors are passed to `leaving` before the device is
    /// dropped.
    pub(crate) fn new(
        id: u32,
        local: &LocalProgress,
        options: &Arc<ExecOptions>,
        abort: &Arc<Abort>,
        mut device: D,
        regions: &[Region],
        leaving: &dyn Fn(ExecError) -> ExecError,
    ) -> Result<Self, ExecError> {
        let program = &local.program;
        let mapped = device
            .map(regions)
            .map_err(|e| ExecError::Device(format!("{e}; {}", super::memory::needs(program))));
        let offsets = mapped
            .and_then(|()| Offsets::new(program, id))
            .map_err(leaving)?;
        let buffers = program.buffers.len();
        let readbacks = program
            .sections
            .iter()
            .map(|s| {
                let readbacks = Readbacks::new(program, s);
                let readbacks = if options.grad_squares {
                    readbacks.with_squares(program, s)
                } else {
                    readbacks
                };
                let readbacks = match options.routing {
                    true => readbacks.with_counts(program, s),
                    false => readbacks,
                };
                (s.kind, Arc::new(readbacks))
            })
            .collect();
        Ok(Self {
            id,
            offsets,
            memory: RankMemory::new(program, options.capacity),
            readbacks,
            buffers: Buffers {
                base: vec![0; buffers],
                pending: vec![Pending::Nothing; buffers],
                presets: BTreeMap::new(),
                persistent: persistent(program),
            },
            capture: Capture {
                graphs: program.scopes.iter().map(|_| None).collect(),
                open: None,
                tasks: Vec::new(),
                bases: Vec::new(),
            },
            pass: PassState {
                number: 0,
                recorded: vec![0; program.events as usize],
                record: false,
                tasks: 0,
                issued: Vec::new(),
                last_task: vec![None; program.streams.len()],
                behind: BTreeMap::new(),
                samples: Vec::new(),
                waited: 0,
            },
            delays: options
                .delay
                .map(|d| Delays::new(d, id, u32::from(u8::MAX))),
            host_work: BTreeMap::new(),
            program: Arc::clone(program),
            options: Arc::clone(options),
            abort: Arc::clone(abort),
            progress: Arc::clone(&local.progress),
            device,
        })
    }

    /// Runs a section. On a [`Stop`], the session's [`Abort`] knows the cause.
    pub(crate) fn run(
        &mut self,
        section: &Section,
        with: PassInputs<'_>,
    ) -> Result<PassReport, Stop> {
        let program = Arc::clone(&self.program);
        let readbacks = self
            .readbacks
            .get(&section.kind)
            .cloned()
            .unwrap_or_default();
        let mut results = self.results(&program, section, &readbacks, &with);
        self.begin(&readbacks, &with)?;
        let start = self.device.now();
        let mut at = section.instrs.start;
        while at < section.instrs.end {
            let id = InstrId(at);
            let instr = &program.instrs[id.index()];
            self.progress.set_instruction(self.id, self.pass.number, id);
            if self.options.fault.is_some() || self.delays.is_some() {
                self.inject_faults(id)?;
            }
            if let Some(scope) = self.captured(section.kind, &instr.op) {
                at = self.replay(&program, scope, at, section.instrs.end, &with)?;
                results.skip_to(InstrId(at));
                continue;
            }
            self.perform(&program, section.kind, id, instr, &with)?;
            self.read_back(&program, id, &mut results, &with)?;
            if matches!(instr.op, Op::HostWait(_)) {
                self.check_flags(&readbacks, id)?;
            }
            at += 1;
        }
        let issued_at = self.device.now();
        self.device.idle()?;
        let end = self.device.now();
        self.check_flags(&readbacks, InstrId(section.instrs.end))?;
        if let Some(barrier) = with.barrier {
            barrier.wait(self.id, &self.abort, "ended the pass")?;
        }
        Ok(self.report(section.kind, [start, issued_at, end], &results))
    }

    /// Begins a pass on the device, and waits for the other ranks if they start together.
    fn begin(&mut self, readbacks: &Readbacks, with: &PassInputs<'_>) -> Result<(), Stop> {
        self.pass.begin(with.record);
        self.memory.begin(with.step);
        self.device.begin(Pass {
            hyper: with.hyper,
            slots: readbacks.slots + with.inputs.gradient_parts.len() as u32,
            record: with.record,
            replay_as_instructions: with.replay_as_instructions,
            inputs: with.inputs.all().cloned().collect(),
        })?;
        if let Some(barrier) = with.barrier {
            barrier.wait(self.id, &self.abort, "begun the pass")?;
        }
        self.progress.begin_pass(self.id, with.step);
        Ok(())
    }
}

/// Returns the regions that every rank's device must back.
pub(crate) fn plan_regions(program: &Program, options: &ExecOptions) -> Vec<Region> {
    regions::regions(program, options.capacity)
}

/// Returns which buffers are allocated in `Init`, or in `First` without being freed.
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
