//! Compares flight records with the collectives of a program, and finds the first collective that
//! the program does not issue.

use super::{Entry, FlightRecord};
use serde::Serialize;
use shardlab_plan::ir::CollectiveKind;
use shardlab_plan::program::{Op, Phase, Program, SectionKind};

/// A record compared with a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProgramCheck {
    /// Rank.
    pub rank: u32,
    /// Number of collectives per step of the program.
    pub step: usize,
    /// Number of collectives before the matching ones: those of the initialization, or of steps of
    /// another kind.
    pub before: usize,
    /// Number of matching collectives up to the first one that does not match.
    pub matched: usize,
    /// Number of collectives between them that no program issues, such as barriers.
    pub skipped: usize,
    /// The first collective after the matching ones, if the program issues a different one there.
    pub unexpected: Option<Unexpected>,
    /// The collective that the program issues after the last match.
    pub next: String,
}

/// A collective that the program does not issue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unexpected {
    /// Process group.
    pub group: String,
    /// Sequence number within the group.
    pub sequence: u64,
    /// What was issued.
    pub issued: String,
}

/// A collective of a program.
struct Expected {
    kind: CollectiveKind,
    bytes: u64,
    unit: String,
    phase: &'static str,
}

impl Expected {
    fn matches(&self, entry: &Entry) -> bool {
        // PyTorch reduces the norms of all parameters, a program only their sum.
        let sized = self.phase != Phase::Clip.name();
        kind(&entry.name) == Some(self.kind) && (!sized || entry.bytes == self.bytes)
    }

    fn describe(&self) -> String {
        format!(
            "{} of {} in {}, {} bytes",
            self.kind.name(),
            self.unit,
            self.phase,
            self.bytes
        )
    }
}

/// Returns the kind of a recorded collective, for the names of all supported PyTorch versions.
fn kind(name: &str) -> Option<CollectiveKind> {
    let name = name.to_ascii_lowercase().replace('_', "");
    let starts = |part: &str| name.starts_with(part);
    if starts("allgather") {
        Some(CollectiveKind::AllGather)
    } else if starts("reducescatter") {
        Some(CollectiveKind::ReduceScatter)
    } else if starts("allreduce") {
        Some(CollectiveKind::AllReduce)
    } else if starts("alltoall") {
        Some(CollectiveKind::AllToAll)
    } else {
        None
    }
}

/// Compares each record with the steady step of a program. Collectives match if kind and payload
/// agree.
#[must_use]
pub fn check(records: &[FlightRecord], program: &Program) -> Vec<ProgramCheck> {
    let step = expected(program);
    records.iter().map(|r| one(r, &step)).collect()
}

/// Returns the collectives of the steady step in the order of issue.
fn expected(program: &Program) -> Vec<Expected> {
    let Some(section) = program.section(SectionKind::Steady) else {
        return Vec::new();
    };
    let instrs = program.section_instrs(section).iter();
    instrs
        .filter_map(|instr| {
            let Op::Collective { id, .. } = instr.op else {
                return None;
            };
            let collective = &program.collectives[id.index()];
            Some(Expected {
                kind: collective.kind,
                bytes: collective.bytes.0,
                unit: program.units[instr.unit.index()].name.clone(),
                phase: instr.phase.name(),
            })
        })
        .collect()
}

fn one(record: &FlightRecord, step: &[Expected]) -> ProgramCheck {
    let entries: Vec<&Entry> = record.entries.iter().filter(|e| !e.is_p2p).collect();
    let (from, offset, mut matched) = longest(&entries, step);
    let mut skipped = 0;
    while let Some(others) = added(&entries[from + matched + skipped..], step, offset + matched) {
        skipped += others;
        let rest = &entries[from + matched + skipped..];
        let next = matching(rest, step, offset + matched);
        matched += next;
    }
    let after = entries.get(from + matched + skipped);
    let next = match step.len() {
        0 => String::new(),
        n => step[(offset + matched) % n].describe(),
    };
    ProgramCheck {
        rank: record.rank,
        step: step.len(),
        before: from,
        matched,
        skipped,
        unexpected: after.map(|e| Unexpected {
            group: if e.group.1.is_empty() {
                e.group.0.clone()
            } else {
                e.group.1.clone()
            },
            sequence: e.sequence,
            issued: e.describe(),
        }),
        next,
    }
}

/// Returns the number of collectives at the start that match the step from a position.
fn matching(entries: &[&Entry], step: &[Expected], offset: usize) -> usize {
    let expected = step.iter().cycle().skip(offset % step.len().max(1));
    let run = entries.iter().zip(expected);
    run.take_while(|(e, x)| x.matches(e)).count()
}

/// Returns the number of collectives at the start that are in addition to those of the program:
/// barriers, and others that the step has nowhere, such as all-reduces of metrics, if the
/// program's next collective follows them. If another one follows, the first stands in its place.
fn added(entries: &[&Entry], step: &[Expected], offset: usize) -> Option<usize> {
    let next = step.get(offset % step.len().max(1))?;
    let is_barrier = |e: &&&Entry| e.name.to_ascii_lowercase().contains("barrier");
    let is_foreign = |e: &&&Entry| is_barrier(e) || !step.iter().any(|x| x.matches(e));
    let foreign = entries.iter().take_while(is_foreign).count();
    let count = match entries.get(foreign).is_none_or(|e| next.matches(e)) {
        true => foreign,
        false => entries.iter().take_while(is_barrier).count(),
    };
    (count > 0).then_some(count)
}

/// Returns the first run of matching collectives that spans at least one step, or else the
/// longest run: its start, the position of its first collective in the step, and its length.
fn longest(entries: &[&Entry], step: &[Expected]) -> (usize, usize, usize) {
    let mut best = (0, 0, 0);
    let mut from = 0;
    while from < entries.len() {
        let of_offset = |offset: usize| matching(&entries[from..], step, offset);
        let runs = (0..step.len()).map(|offset| (offset, of_offset(offset)));
        let Some((offset, length)) =
            runs.max_by_key(|(offset, n)| (*n, std::cmp::Reverse(*offset)))
        else {
            break;
        };
        if length > best.2 {
            best = (from, offset, length);
        }
        if length >= step.len() {
            break;
        }
        from += 1;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::Tensors;
    use super::*;

    fn entry(name: &str, bytes: u64) -> Entry {
        Entry {
            id: 0,
            group: ("0".into(), "default_pg".into()),
            sequence: bytes,
            is_p2p: false,
            name: name.into(),
            backend: "nccl".into(),
            inputs: Tensors::default(),
            outputs: Tensors::default(),
            is_retired: true,
            bytes,
            state: "completed".into(),
            created: 0,
            frame: String::new(),
        }
    }

    fn step() -> Vec<Expected> {
        let of = |kind, bytes| Expected {
            kind,
            bytes,
            unit: "root".into(),
            phase: "forward",
        };
        vec![
            of(CollectiveKind::AllGather, 10),
            of(CollectiveKind::AllGather, 20),
            of(CollectiveKind::ReduceScatter, 20),
        ]
    }

    fn checked(entries: Vec<Entry>) -> ProgramCheck {
        let record = FlightRecord {
            is_partial: false,
            rank: 0,
            version: String::new(),
            entries,
            groups: std::collections::BTreeMap::new(),
        };
        one(&record, &step())
    }

    #[test]
    fn the_first_collective_outside_of_the_program_is_found() {
        let (gather, scatter) = ("_all_gather_base", "reduce_scatter_tensor_coalesced");
        let whole = || {
            vec![
                entry("broadcast", 8),
                entry(gather, 20),
                entry(scatter, 20),
                entry(gather, 10),
                entry("all_gather", 20),
            ]
        };
        let found = checked(whole());
        assert_eq!((found.before, found.matched), (1, 4));
        assert_eq!(found.unexpected, None);
        assert!(found.next.starts_with("reduce_scatter of root"));
        let mut wrong = whole();
        wrong.push(entry(gather, 10));
        let found = checked(wrong).unexpected.unwrap();
        assert!(found.issued.starts_with(gather), "{found:?}");
    }

    #[test]
    fn collectives_outside_of_the_program_are_skipped() {
        let (gather, scatter) = ("_all_gather_base", "_reduce_scatter_base");
        let whole = || vec![entry(gather, 10), entry(gather, 20), entry(scatter, 20)];
        let barrier = || entry("all_reduce_barrier", 4);
        let metric = || entry("allreduce", 8);
        let mut all = whole();
        all.extend([barrier(), metric()]);
        all.extend(whole());
        all.push(barrier());
        let found = checked(all);
        assert_eq!((found.before, found.matched, found.skipped), (0, 6, 3));
        assert_eq!(found.unexpected, None);
        // Two are swapped after a barrier.
        let mut swapped = whole();
        swapped.push(barrier());
        swapped.extend(whole());
        swapped.swap(4, 5);
        let found = checked(swapped);
        assert_eq!((found.matched, found.skipped), (3, 1));
        assert_eq!(found.unexpected.unwrap().sequence, 20);
        let mut late = whole();
        late.push(barrier());
        late.extend(whole());
        late.swap(5, 6);
        let found = checked(late);
        assert_eq!((found.matched, found.skipped), (4, 1));
        assert!(found.unexpected.unwrap().issued.starts_with(scatter));
        // One of another size is in place of the program's, not in addition to it.
        let mut sized = whole();
        sized.push(barrier());
        sized.extend(whole());
        sized[5].bytes = 24;
        sized.extend(whole());
        let found = checked(sized);
        assert_eq!((found.matched, found.skipped), (4, 1));
        assert_eq!(found.unexpected.unwrap().sequence, 20);
    }
}
