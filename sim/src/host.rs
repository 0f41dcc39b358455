//! The host thread's view of a program: for each section, the device work to issue and the host
//! time before each issue.

use crate::cost::Costs;
use crate::hardware::Profile;
use shardlab_plan::ir::{HostWorkKind, InstrId, KernelClass, StreamId};
use shardlab_plan::program::{Instr, Op, Program, Section, SectionKind};
use shardlab_plan::units::Picos;

/// What the host does after spending `Code::cost`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Enqueue a kernel, collective, copy or input: index into [`Costs::all`].
    Task,
    /// The same as a node of a captured graph.
    GraphTask,
    /// Enqueue an event record.
    Record,
    /// Enqueue a wait for an event.
    Wait,
    /// Block until an event.
    HostWait,
    /// Issue nothing: trailing host work of a section.
    Nothing,
}

/// One action of the host thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Code {
    /// Host time spent first, picoseconds.
    pub(crate) cost: u64,
    /// Cost index or event.
    pub(crate) arg: u32,
    /// Instruction.
    pub(crate) instr: u32,
    /// Stream index.
    pub(crate) stream: u8,
    /// What to do.
    pub(crate) action: Action,
}

/// A section as the host runs it.
#[derive(Debug)]
pub(crate) struct SectionCode {
    /// Kind of the section.
    pub(crate) kind: SectionKind,
    /// Codes in order.
    pub(crate) codes: Vec<Code>,
    /// Number of device tasks among them.
    pub(crate) tasks: usize,
    /// Sum of all host costs.
    pub(crate) host: u64,
}

/// Host costs in picoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCosts {
    launch: u64,
    collective: u64,
    copy: u64,
    /// Launch of a copy between a buffer and a list of tensors.
    list_copy: u64,
    event: u64,
    /// Cost of waking up from a wait.
    pub(crate) host_wait: u64,
    alloc: u64,
    /// Cost of taking memory from the device.
    pub(crate) device_alloc: u64,
    graph_launch: u64,
    work: [u64; 11],
}

impl HostCosts {
    /// Derives the costs of a host that is slower than the profile by this factor.
    pub(crate) fn new(profile: &Profile, times: f64) -> Self {
        let us = |x: f64| Picos::from_us(x * times).0;
        let h = &profile.host;
        let w = &h.work;
        Self {
            launch: us(h.launch_us),
            collective: us(h.collective_us),
            copy: us(h.copy_us),
            list_copy: us(h.list_copy_us.unwrap_or(h.launch_us)),
            event: us(h.event_us),
            host_wait: us(h.host_wait_us),
            alloc: us(h.alloc_us),
            device_alloc: us(h.device_alloc_us),
            graph_launch: us(h.graph_launch_us),
            work: [
                w.dispatch_us,
                w.autograd_dispatch_us,
                w.guard_us,
                w.graph_break_us,
                w.hook_us,
                w.hook_param_us,
                w.optimizer_step_us,
                w.step_us,
                w.module_us,
                w.optimizer_param_us,
                w.subclass_us,
            ]
            .map(us),
        }
    }

    /// Returns the host time of an instruction of `program` outside captured scopes.
    pub(crate) fn of(&self, program: &Program, op: &Op) -> u64 {
        match *op {
            Op::Alloc(_) | Op::Free(_) => self.alloc,
            Op::Launch { kernel, .. } => match program.kernels[kernel.index()].class {
                KernelClass::MultiCopy => self.list_copy,
                _ => self.launch,
            },
            Op::Collective { .. } => self.collective,
            Op::Copy { .. } => self.copy,
            Op::Record { .. } | Op::Wait { .. } | Op::HostWait(_) => self.event,
            Op::HostWork { kind, count } => self.work[slot(kind)] * u64::from(count),
            Op::GraphBegin(_) => self.graph_launch,
            Op::GraphEnd(_) => 0,
        }
    }
}

const fn slot(kind: HostWorkKind) -> usize {
    match kind {
        HostWorkKind::Dispatch => 0,
        HostWorkKind::AutogradDispatch => 1,
        HostWorkKind::Guard => 2,
        HostWorkKind::GraphBreak => 3,
        HostWorkKind::Hook => 4,
        HostWorkKind::HookParam => 5,
        HostWorkKind::OptimizerStep => 6,
        HostWorkKind::Step => 7,
        HostWorkKind::Module => 8,
        HostWorkKind::OptimizerParam => 9,
        HostWorkKind::Subclass => 10,
    }
}

/// Yields the host time of each instruction of a section in order. Inside a captured scope that is
/// replayed, only the start costs time. The first step captures, so it pays for every instruction.
pub(crate) fn costs<'a>(
    program: &'a Program,
    section: SectionKind,
    instrs: &'a [Instr],
    host: &'a HostCosts,
) -> impl Iterator<Item = (u64, bool)> + 'a {
    let replayed = matches!(section, SectionKind::Steady | SectionKind::Validation);
    let mut inside = false;
    instrs.iter().map(move |i| match i.op {
        Op::GraphBegin(_) => {
            inside = replayed;
            (if replayed { host.of(program, &i.op) } else { 0 }, inside)
        }
        Op::GraphEnd(_) => {
            inside = false;
            (0, false)
        }
        _ if inside => (0, true),
        _ => (host.of(program, &i.op), false),
    })
}

impl SectionCode {
    pub(crate) fn new(
        program: &Program,
        section: &Section,
        costs_of: &Costs,
        host: &HostCosts,
    ) -> Self {
        let instrs = program.section_instrs(section);
        let mut codes = Vec::with_capacity(instrs.len());
        let (mut pending, mut tasks, mut total) = (0u64, 0, 0u64);
        for (i, (instr, (cost, graph))) in instrs
            .iter()
            .zip(costs(program, section.kind, instrs, host))
            .enumerate()
        {
            pending += cost;
            total += cost;
            let task = if graph {
                Action::GraphTask
            } else {
                Action::Task
            };
            let id = InstrId(section.instrs.start + i as u32);
            // An instruction without a cost on the device is not a task.
            let issued = |stream: StreamId| {
                costs_of
                    .index(program, id)
                    .map(|cost| (task, cost, stream.0))
            };
            let step = match instr.op {
                Op::Launch { stream, .. }
                | Op::Collective { stream, .. }
                | Op::Copy { stream, .. } => issued(stream),
                Op::Alloc(buffer) => issued(program.buffers[buffer.index()].stream),
                Op::Record { event, stream } => Some((Action::Record, event.index(), stream.0)),
                Op::Wait { event, stream } => Some((Action::Wait, event.index(), stream.0)),
                Op::HostWait(event) => Some((Action::HostWait, event.index(), 0)),
                Op::Free(_) | Op::HostWork { .. } | Op::GraphBegin(_) | Op::GraphEnd(_) => None,
            };
            let Some((action, arg, stream)) = step else {
                continue;
            };
            tasks += usize::from(action == task);
            codes.push(Code {
                cost: pending,
                arg: arg as u32,
                instr: id.0,
                stream,
                action,
            });
            pending = 0;
        }
        codes.push(Code {
            cost: pending,
            arg: 0,
            instr: section.instrs.end,
            stream: 0,
            action: Action::Nothing,
        });
        Self {
            kind: section.kind,
            codes,
            tasks,
            host: total,
        }
    }
}
