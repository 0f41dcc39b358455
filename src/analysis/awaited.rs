//! What a gap waited for: all tasks that had to end, and all units that they worked for.

use super::spans::{self, Work};
use shardlab_plan::Program;
use shardlab_plan::program::{Access, COMPUTE, Holds, InstrId, Op, UnitId};
use shardlab_plan::record::{Blocker, Cause, ExposedGap, Run};
use std::collections::BTreeSet;

/// Instructions before a collective among which the copy into its bucket is.
const LOOK_BACK: usize = 64;

/// Spans that ran in a gap and whose end it waited for, in their order: the one the run names, and those of the same gather or
/// reduction that it came behind (a sum behind a reduce-scatter, a gather behind a copy). Where none of them ran, the one that the run names; none where nothing on the device was waited for.
pub(super) fn spans_of(program: &Program, run: &Run, gap: &ExposedGap) -> Vec<u32> {
    let Some(last) = gap.waited_for else {
        return Vec::new();
    };
    let mut chain = vec![last];
    let mut at = last;
    loop {
        let here = &run.spans[at as usize];
        let before = match here.blocker {
            Blocker::Stream(y) | Blocker::Event(y) if together(program, run, at, y) => y,
            // Time on the wire, or lost to others on it, is that of the collective that had the communicator.
            Blocker::Communicator(y) if matches!(gap.cause, Cause::Wire | Cause::Contention) => y,
            _ => break,
        };
        if before >= at || run.spans[before as usize].stream == COMPUTE {
            break;
        }
        chain.push(before);
        at = before;
    }
    chain.reverse();
    let ran = |i: &u32| {
        let span = &run.spans[*i as usize];
        span.start < gap.end && span.end > gap.start
    };
    let within: Vec<u32> = chain.iter().copied().filter(ran).collect();
    if within.is_empty() {
        vec![last]
    } else {
        within
    }
}

/// Whether two spans belong to one unit's gather or reduction.
fn together(program: &Program, run: &Run, a: u32, b: u32) -> bool {
    let [a, b] = [a, b].map(|i| &program.instrs[run.spans[i as usize].instr.index()]);
    (a.unit, a.phase, a.micro_batch) == (b.unit, b.phase, b.micro_batch)
}

/// Their names, each once: `reduce_scatter + multi_copy`.
pub(super) fn names(program: &Program, run: &Run, awaited: &[u32]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for i in awaited {
        let name = spans::name(program, run.spans[*i as usize].instr);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(" + ")
}

/// Whether a collective is among them.
pub(super) fn communicates(program: &Program, run: &Run, awaited: &[u32]) -> bool {
    awaited
        .iter()
        .any(|i| Work::of(program, run.spans[*i as usize].instr).is_some_and(Work::is_collective))
}

/// All units they worked for: where the step is compiled as a whole, a collective carries the parameters of several.
pub(super) fn units(program: &Program, run: &Run, awaited: &[u32]) -> String {
    let mut all = BTreeSet::new();
    for i in awaited {
        units_of(program, run.spans[*i as usize].instr, &mut all);
    }
    let names: Vec<&str> = all
        .into_iter()
        .map(|u| program.units[u.index()].name.as_str())
        .collect();
    joined(&names)
}

fn units_of(program: &Program, instr: InstrId, all: &mut BTreeSet<UnitId>) {
    let at = &program.instrs[instr.index()];
    all.insert(at.unit);
    let owner = |a: &Access| program.buffers[a.buffer.index()].unit;
    match at.op {
        Op::Launch { stream, .. } if stream != COMPUTE => {
            all.extend(program.reads(&at.op).iter().map(owner));
            all.extend(program.writes(&at.op).iter().map(owner));
        }
        Op::Collective { id, .. } => {
            for part in &program.collectives[id.index()].parts {
                all.insert(owner(&part.input));
                let bucket = program.buffers[part.input.buffer.index()].holds;
                if !matches!(bucket, Holds::Named(_)) {
                    continue;
                }
                // What the bucket was filled from.
                let before =
                    &program.instrs[instr.index().saturating_sub(LOOK_BACK)..instr.index()];
                let filled = before.iter().rev().find(|i| {
                    let writes = program.writes(&i.op);
                    writes.iter().any(|w| w.buffer == part.input.buffer)
                });
                if let Some(copy) = filled {
                    all.extend(program.reads(&copy.op).iter().map(owner));
                }
            }
        }
        _ => {}
    }
}

/// Names in their order; numbered neighbours as `layers.3 to layers.7`.
fn joined(names: &[&str]) -> String {
    let number = |name: &str| {
        let (stem, number) = name.rsplit_once('.')?;
        Some((stem.to_owned(), number.parse::<u32>().ok()?))
    };
    let follows = |a: &str, b: &str| match (number(a), number(b)) {
        (Some((a, i)), Some((b, j))) => a == b && i + 1 == j,
        _ => false,
    };
    let mut parts = Vec::new();
    for run in names.chunk_by(|a, b| follows(a, b)) {
        match run {
            [first, _, .., last] => parts.push(format!("{first} to {last}")),
            few => parts.extend(few.iter().map(|&n| n.to_owned())),
        }
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::joined;

    #[test]
    fn numbered_neighbours_are_joined() {
        assert_eq!(joined(&[]), "");
        assert_eq!(joined(&["root"]), "root");
        assert_eq!(joined(&["layers.1", "layers.2"]), "layers.1, layers.2");
        assert_eq!(
            joined(&["layers.0", "layers.1", "layers.2", "layers.4", "root"]),
            "layers.0 to layers.2, layers.4, root"
        );
        assert_eq!(joined(&["a.1", "b.2", "c"]), "a.1, b.2, c");
    }
}
