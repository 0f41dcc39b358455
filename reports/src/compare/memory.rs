//! Compares the memory of two runs: composition at the peak, peaks by place in the program, and
//! curves.

use super::places::{Common, Sums, change, unit_numbers};
use crate::view::RunView;
use serde::Serialize;
use shardlab_plan::units::{Bytes, signed};

/// Number of points of a curve.
const POINTS: usize = 64;
/// Maximum number of places that are listed.
const MAX_LISTED: usize = 10;

/// Sizes of something in A and B.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sized {
    /// Name.
    pub name: String,
    /// Bytes in A and B.
    pub bytes: [Bytes; 2],
}

impl Sized {
    /// Returns the cells of a table: the name, sizes, and their change in MiB.
    #[must_use]
    pub fn cells(&self) -> [String; 4] {
        let [a, b] = self.bytes;
        [
            self.name.clone(),
            a.to_string(),
            b.to_string(),
            signed(b.mib() - a.mib(), 1),
        ]
    }
}

/// Peak of allocated bytes while the host was at a place of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlacePeak {
    /// Unit.
    pub unit: String,
    /// Phase.
    pub phase: &'static str,
    /// Peak in A and B; zero if a run has no such place.
    pub bytes: [Bytes; 2],
}

/// Memory of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPair {
    /// Where each run peaks: phase and unit; `None` for a run without a record of memory.
    pub at: [Option<String>; 2],
    /// Bytes allocated at the peak by role, largest change first.
    pub by_role: Vec<Sized>,
    /// Bytes allocated at the peak by unit, largest change first.
    pub by_unit: Vec<Sized>,
    /// Places that both runs have, largest change of the peak first.
    pub places: Vec<PlacePeak>,
    /// Maximum of the allocated bytes in each of the equal intervals of the recorded step, by host
    /// time; empty without samples.
    pub curves: [Vec<u64>; 2],
}

impl MemoryPair {
    pub(super) fn new(sides: [&RunView; 2]) -> Self {
        let mut roles = Sums::new();
        let mut units = Sums::new();
        for (side, view) in sides.into_iter().enumerate() {
            for (role, bytes) in &view.run.memory.by_role {
                roles.add(role.name(), side, bytes.0);
            }
            for (unit, bytes) in &view.run.memory.by_unit {
                units.add(unit.as_str(), side, bytes.0);
            }
        }
        // Nothing can be said about changes if memory was recorded in one run only.
        if sides.iter().any(|s| !s.run.memory.is_recorded()) {
            roles.0.clear();
            units.0.clear();
        }
        // A baseline lists only the largest units, so units missing from it have not disappeared.
        if sides.iter().any(|s| s.is_baseline()) {
            units.0.retain(|_, bytes| !bytes.contains(&0));
        }
        Self {
            at: sides.map(|view| {
                let at = &view.run.memory.at;
                let place = || format!("{} of {}", at.phase.name(), view.unit(at.unit));
                view.run.memory.is_recorded().then(place)
            }),
            by_role: sized(roles),
            by_unit: sized(units),
            places: places(sides),
            curves: sides.map(curve),
        }
    }
}

fn sized(sums: Sums<&str>) -> Vec<Sized> {
    sums.by_change()
        .into_iter()
        .map(|(name, bytes)| Sized {
            name: name.to_owned(),
            bytes: bytes.map(Bytes),
        })
        .collect()
}

fn places(sides: [&RunView; 2]) -> Vec<PlacePeak> {
    let mut common = Common::new();
    let mut peaks: Sums<(u32, _)> = Sums::new();
    for (side, view) in sides.into_iter().enumerate() {
        let units = unit_numbers(&mut common, view);
        for sample in &view.run.memory.timeline {
            let Some(instr) = view.instr(sample.instr) else {
                continue;
            };
            let Some(unit) = units.get(instr.unit.index()) else {
                continue;
            };
            let peak = &mut peaks.0.entry((*unit, instr.phase)).or_default()[side];
            *peak = (*peak).max(sample.allocated.0);
        }
    }
    let both = Sums(
        peaks
            .0
            .into_iter()
            .filter(|(_, b)| !b.contains(&0))
            .collect(),
    );
    both.by_change()
        .into_iter()
        .filter(|(_, bytes)| change(*bytes) > 0)
        .take(MAX_LISTED)
        .map(|((unit, phase), bytes)| PlacePeak {
            unit: common.names[unit as usize].to_owned(),
            phase: phase.name(),
            bytes: bytes.map(Bytes),
        })
        .collect()
}

fn curve(view: &RunView) -> Vec<u64> {
    let samples = &view.run.memory.timeline;
    let (Some(first), Some(last)) = (
        samples.iter().map(|s| s.time).min(),
        samples.iter().map(|s| s.time).max(),
    ) else {
        return Vec::new();
    };
    let length = (last.saturating_sub(first).0).max(1);
    let mut points = vec![0u64; POINTS];
    let mut level = samples[0].allocated.0;
    let mut reached = 0;
    for sample in samples {
        let share = u128::from(sample.time.saturating_sub(first).0) * POINTS as u128;
        let at = ((share / u128::from(length)) as usize).min(POINTS - 1);
        // Allocated bytes stay constant until the next change.
        for point in points.iter_mut().take(at + 1).skip(reached) {
            *point = (*point).max(level);
        }
        level = sample.allocated.0;
        reached = at;
        points[at] = points[at].max(level);
    }
    points
}
