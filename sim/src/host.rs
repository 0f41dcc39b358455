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
    /// Nothing is issued: host work at the end of a section.
    Nothing,
}

/// One action of the host thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Code {
    /// Host time before the action, picoseconds.
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
    /// Number of device tasks among the codes.
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
    /// Cost of allocating memory on the device.
    pub(crate) device_alloc: u64,
    graph_launch: u64,
    work: [u64; HostWorkKind::ALL.len()],
}

impl HostCosts {
    /// Derives the costs for a host that is slower than the profile by this factor.
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
            work: HostWorkKind::ALL.map(|kind| us(w.us(kind))),
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
            Op::HostWork { kind, count } => self.work[kind as usize] * u64::from(count),
            Op::GraphBegin(_) => self.graph_launch,
            Op::GraphEnd(_) => 0,
        }
    }
}

/// Yields the host time of each instruction of a section in order. Within a captured scope that is
/// replayed, only the start costs time. The first step captures the scope, so it pays for every
/// instruction.
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
            // An instruction that costs nothing on the device is not a task.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware;

    /// Each of two ranks has half of the 1b model's gradients. The table of `_chunk_cat` has an
    /// entry of eight bytes for every 2 KiB of gradients in float32. Copy-outs have few entries.
    #[test]
    fn filling_tables_of_copies_takes_the_host_time_per_shard() {
        let of = |policy: &str| {
            let sets = [
                "mesh.dp_shard=2".to_owned(),
                "mesh.hardware=h100-80".to_owned(),
                format!("fsdp.policy={policy}"),
            ];
            let scenario = shardlab_plan::scenario::load("peers-1b".as_ref(), &sets).unwrap();
            shardlab_plan::plan(&scenario).unwrap()
        };
        let program = of("fsdp2");
        let steady = program.section(SectionKind::Steady).unwrap();
        let fills = |program: &Program| -> Vec<Op> {
            let instrs = program.section_instrs(program.section(SectionKind::Steady).unwrap());
            let fills = |op: &Op| {
                let kind = HostWorkKind::CopyTable;
                matches!(op, Op::HostWork { kind: k, .. } if *k == kind)
            };
            instrs.iter().map(|i| i.op).filter(fills).collect()
        };
        let expected = program.meta.parameters.total as f64 / 2.0 * 4.0 / 2048.0 * 8.0 / 1024.0;
        let kib: u64 = fills(&program)
            .iter()
            .map(|op| match op {
                Op::HostWork { count, .. } => u64::from(*count),
                _ => 0,
            })
            .sum();
        assert!(
            (1.0..1.1).contains(&(kib as f64 / expected)),
            "{kib} KiB, {expected:.0} of gradients"
        );
        let profile = hardware::load("h100-80").unwrap();
        let host = HostCosts::new(&profile, 1.0);
        let all: u64 = fills(&program).iter().map(|op| host.of(&program, op)).sum();
        // 1.7 ms per step.
        assert_eq!(all, kib * Picos::from_us(0.15).0);
        let instrs = program.section_instrs(steady);
        let passed: u64 = costs(&program, SectionKind::Steady, instrs, &host)
            .map(|(cost, _)| cost)
            .sum();
        let mut free = profile.clone();
        free.host.work.copy_table_us = 0.0;
        let host = HostCosts::new(&free, 1.0);
        let without: u64 = costs(&program, SectionKind::Steady, instrs, &host)
            .map(|(cost, _)| cost)
            .sum();
        assert_eq!(passed - without, all);
        // In other policies, gathered weights are used in place.
        assert!(fills(&of("native")).is_empty());
    }
}
