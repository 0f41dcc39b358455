//! Descriptions of the instructions that a run refers to.

use super::work::{bytes, flops, name};
use serde::{Deserialize, Serialize};
use shardlab_plan::Program;
use shardlab_plan::ir::{COMPUTE, InstrId, Role, StreamId, UnitId};
use shardlab_plan::program::{Op, Phase};
use shardlab_plan::record::Run;
use shardlab_plan::record::Work;
use std::collections::BTreeMap;

/// An instruction that a span or a memory sample refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstrView {
    /// Id in the program.
    pub id: InstrId,
    /// Index of its name (kernel, collective, `copy`, `input`, `alloc`, `free`) in
    /// [`super::RunView::names`].
    pub name: u32,
    /// Index of the name of its rule.
    pub rule: u32,
    /// Kind of work; `None` for allocations and frees, except the allocation of an input.
    pub work: Option<Work>,
    /// Role of the buffer that it allocates or frees.
    pub role: Option<Role>,
    /// Unit.
    pub unit: UnitId,
    /// Phase.
    pub phase: Phase,
    /// Micro-batch.
    pub micro_batch: u16,
    /// Stream on which it runs; for allocations and frees, the stream of the buffer.
    pub stream: StreamId,
    /// Payload of a collective, traffic of a kernel or copy, or requested size of a buffer.
    pub bytes: u64,
    /// Number of floating-point operations.
    pub flops: u64,
}

/// Names in the order of their first occurrence.
#[derive(Default)]
pub(crate) struct Names {
    known: BTreeMap<String, u32>,
    all: Vec<String>,
}

impl Names {
    /// Creates the table from names by index. Of equal names, the first counts.
    pub(crate) fn of(all: Vec<String>) -> Self {
        let mut known = BTreeMap::new();
        for (i, name) in all.iter().enumerate() {
            known.entry(name.clone()).or_insert(i as u32);
        }
        Self { known, all }
    }

    /// Returns the index of a name.
    pub(crate) fn index(&mut self, name: &str) -> u32 {
        if let Some(&i) = self.known.get(name) {
            return i;
        }
        let i = self.all.len() as u32;
        self.known.insert(name.to_owned(), i);
        self.all.push(name.to_owned());
        i
    }

    /// Returns the names by index.
    pub(crate) fn into_vec(self) -> Vec<String> {
        self.all
    }
}

/// Returns the instructions that a run refers to, by id, and their names.
pub(super) fn table(run: &Run, program: &Program) -> (Vec<InstrView>, Vec<String>) {
    let mut ids: Vec<InstrId> = run.spans.iter().map(|s| s.instr).collect();
    ids.extend(run.memory.timeline.iter().map(|s| s.instr));
    ids.push(run.memory.at.instr);
    ids.sort_unstable();
    ids.dedup();
    let mut names = Names::default();
    let all = ids
        .into_iter()
        .filter(|id| id.index() < program.instrs.len())
        .map(|id| view(program, id, &mut names))
        .collect();
    (all, names.into_vec())
}

fn view(program: &Program, id: InstrId, names: &mut Names) -> InstrView {
    let instr = &program.instrs[id.index()];
    let buffer = match instr.op {
        Op::Alloc(b) | Op::Free(b) => Some(&program.buffers[b.index()]),
        _ => None,
    };
    let label = match (instr.op, name(program, id)) {
        (Op::Alloc(_), "") => "alloc",
        (Op::Free(_), _) => "free",
        (_, name) => name,
    };
    let stream = match instr.op {
        Op::Launch { stream, .. }
        | Op::Collective { stream, .. }
        | Op::Copy { stream, .. }
        | Op::Record { stream, .. }
        | Op::Wait { stream, .. } => stream,
        _ => buffer.map_or(COMPUTE, |b| b.stream),
    };
    InstrView {
        id,
        name: names.index(label),
        rule: names.index(instr.rule.name()),
        work: Work::of(program, id),
        role: buffer.map(|b| b.role),
        unit: instr.unit,
        phase: instr.phase,
        micro_batch: instr.micro_batch,
        stream,
        bytes: buffer.map_or_else(|| bytes(program, id), |b| b.bytes.0),
        flops: flops(program, id),
    }
}
