//! Spans that a gap waited for.

use super::{Blocker, Cause, ExposedGap, Run};
use crate::ir::{COMPUTE, InstrId, UnitId};
use crate::program::Phase;

impl Run {
    /// Returns the spans that ran in a gap and whose end it waited for, in order: the one that the
    /// run names, and earlier ones of the same gather or reduction (a sum after a reduce-scatter, a
    /// gather after a copy). If none of them ran in the gap, returns only the one that the run
    /// names; empty if the gap did not wait for work on the device.
    ///
    /// `place` returns the unit, phase and micro-batch of an instruction, which are equal for one
    /// unit's gather or reduction.
    #[must_use]
    pub fn awaited(
        &self,
        gap: &ExposedGap,
        place: impl Fn(InstrId) -> Option<(UnitId, Phase, u16)>,
    ) -> Vec<u32> {
        let spans = &self.spans;
        let known = |i: &u32| (*i as usize) < spans.len();
        let Some(last) = gap.waited_for.filter(known) else {
            return Vec::new();
        };
        let together = |a: u32, b: u32| {
            let [a, b] = [a, b].map(|i| place(spans[i as usize].instr));
            a.is_some() && a == b
        };
        let mut chain = vec![last];
        let mut at = last;
        loop {
            let before = match spans[at as usize].blocker {
                // Blockers precede what they block, but a file may be damaged.
                Blocker::Stream(y) | Blocker::Event(y) | Blocker::Communicator(y) if y >= at => {
                    break;
                }
                Blocker::Stream(y) | Blocker::Event(y) if together(at, y) => y,
                // Time on the wire, or lost to other users of the wire, belongs to the collective
                // that had the communicator.
                Blocker::Communicator(y)
                    if matches!(gap.cause, Cause::Wire | Cause::Contention) =>
                {
                    y
                }
                _ => break,
            };
            if spans[before as usize].stream == COMPUTE {
                break;
            }
            chain.push(before);
            at = before;
        }
        chain.reverse();
        let ran = |i: &u32| {
            let span = &spans[*i as usize];
            span.start < gap.end && span.end > gap.start
        };
        let within: Vec<u32> = chain.iter().copied().filter(ran).collect();
        if within.is_empty() {
            vec![last]
        } else {
            within
        }
    }
}

/// Returns the names of the awaited spans without duplicates: `reduce_scatter + multi_copy`.
#[must_use]
pub fn awaited_names<'a>(all: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in all {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(" + ")
}

/// Returns the names of units in order, with consecutive numbers combined: `layers.3 to layers.7`.
#[must_use]
pub fn awaited_units(names: &[&str]) -> String {
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
    use super::awaited_units;

    #[test]
    fn numbered_neighbours_are_joined() {
        assert_eq!(awaited_units(&[]), "");
        assert_eq!(awaited_units(&["root"]), "root");
        assert_eq!(
            awaited_units(&["layers.1", "layers.2"]),
            "layers.1, layers.2"
        );
        assert_eq!(
            awaited_units(&["layers.0", "layers.1", "layers.2", "layers.4", "root"]),
            "layers.0 to layers.2, layers.4, root"
        );
        assert_eq!(awaited_units(&["a.1", "b.2", "c"]), "a.1, b.2, c");
    }
}
