//! Buffers alive at the peak of memory.

use serde::{Deserialize, Serialize};
use shardlab_plan::Program;
use shardlab_plan::ir::{BufferId, DType, InstrId, Pool, Role};
use shardlab_plan::program::{Op, SectionKind};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Returns the buffers alive on the device after an instruction, in order of allocation, if the
/// program has run its sections up to that instruction.
///
/// An allocation or a free by the instruction itself has already happened.
#[must_use]
pub fn alive_at(program: &Program, at: InstrId) -> Vec<BufferId> {
    let mut since: Vec<Option<u32>> = vec![None; program.buffers.len()];
    let order = [
        SectionKind::Init,
        SectionKind::First,
        SectionKind::Steady,
        SectionKind::Validation,
    ];
    let mut clock = 0;
    for section in order.iter().filter_map(|&kind| program.section(kind)) {
        for i in section.instrs.clone() {
            match program.instrs[i as usize].op {
                // Host memory does not count towards the device's memory.
                Op::Alloc(b) if program.buffers[b.index()].pool != Pool::Host => {
                    since[b.index()] = Some(clock);
                    clock += 1;
                }
                Op::Free(b) => since[b.index()] = None,
                _ => {}
            }
            if i == at.0 {
                let mut alive: Vec<(u32, BufferId)> = (0..)
                    .zip(since)
                    .filter_map(|(b, t)| Some((t?, BufferId(b))))
                    .collect();
                alive.sort_unstable();
                return alive.into_iter().map(|(_, b)| b).collect();
            }
        }
    }
    Vec::new()
}

/// Returns the name of the first kernel or collective launched after an instruction, within its
/// section.
#[must_use]
pub fn launched_after(program: &Program, at: InstrId) -> Option<&str> {
    let section = program.sections.iter().find(|s| s.instrs.contains(&at.0))?;
    (at.0..section.instrs.end)
        .map(|i| super::work::name(program, InstrId(i)))
        .find(|name| !name.is_empty())
}

/// A group of equal buffers alive at the peak.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alive {
    /// Name of the first buffer, for example `logits root#812`.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Unit of the first buffer.
    pub unit: String,
    /// Element type.
    pub dtype: DType,
    /// Requested bytes of one buffer.
    pub bytes: Bytes,
    /// Number of buffers.
    pub count: u32,
}

impl Alive {
    /// Heads of the columns of [`Self::cells`].
    pub const HEADS: [&str; 5] = ["largest live buffers", "type", ">each", ">count", ">total"];

    /// Returns the cells of a table.
    #[must_use]
    pub fn cells(&self) -> [String; 5] {
        [
            self.name.clone(),
            self.dtype.to_string(),
            self.bytes.to_string(),
            self.count.to_string(),
            self.total().to_string(),
        ]
    }

    /// Returns the requested bytes of the whole group.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.bytes * u64::from(self.count)
    }
}

/// Returns the largest groups of equal buffers (role, size, type) alive after an instruction,
/// largest total first.
#[must_use]
pub fn largest(program: &Program, at: InstrId, limit: usize) -> Vec<Alive> {
    let mut groups: BTreeMap<(Role, Bytes, DType), Alive> = BTreeMap::new();
    for id in alive_at(program, at) {
        let b = &program.buffers[id.index()];
        groups
            .entry((b.role, b.bytes, b.dtype))
            .and_modify(|g| g.count += 1)
            .or_insert_with(|| Alive {
                name: program.buffer_name(id),
                role: b.role,
                unit: program.units[b.unit.index()].name.clone(),
                dtype: b.dtype,
                bytes: b.bytes,
                count: 1,
            });
    }
    let mut all: Vec<Alive> = groups.into_values().collect();
    all.sort_by(|a, b| b.total().cmp(&a.total()).then_with(|| a.name.cmp(&b.name)));
    all.truncate(limit);
    all
}
