//! Findings of the comparison of flight records.

use super::{Entry, FlightRecord, ProgramCheck};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of ranges of ranks that are listed.
const LISTED: usize = 8;

/// How ranks diverge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Divergence {
    /// Ranks issue different collectives.
    Different {
        /// Process group.
        group: String,
        /// Sequence number within the group.
        sequence: u64,
        /// What each rank issues.
        ranks: BTreeMap<u32, String>,
    },
    /// Some ranks do not issue a collective that other ranks wait in.
    Missing {
        /// Process group.
        group: String,
        /// Sequence number within the group.
        sequence: u64,
        /// Ranks that issued the collective, with its description.
        issued: BTreeMap<u32, String>,
        /// Ranks that did not, each with the last collective that it issued.
        missing: BTreeMap<u32, String>,
        /// Ranks of the group whose records are not given.
        #[serde(skip_serializing_if = "BTreeSet::is_empty")]
        unknown: BTreeSet<u32>,
    },
    /// All ranks issue the same collective, but some do not complete it.
    Incomplete {
        /// Process group.
        group: String,
        /// Sequence number within the group.
        sequence: u64,
        /// State by rank.
        ranks: BTreeMap<u32, String>,
        /// Ranks of the group whose records are not given.
        #[serde(skip_serializing_if = "BTreeSet::is_empty")]
        unknown: BTreeSet<u32>,
    },
    /// A point-to-point message has no counterpart, a different one, or does not complete.
    Message {
        /// Process group.
        group: String,
        /// Number among the messages from its sender to its receiver, from 1.
        sequence: u64,
        /// What is wrong, as a sentence without subject: "has no recv".
        reason: &'static str,
        /// What each of the two ranks issues.
        ranks: BTreeMap<u32, String>,
        /// The other rank, if its record is not given.
        #[serde(skip_serializing_if = "BTreeSet::is_empty")]
        unknown: BTreeSet<u32>,
    },
}

impl Divergence {
    /// Describes it in one sentence.
    #[must_use]
    pub fn brief(&self) -> String {
        let at = |group: &str, sequence: u64| format!("number {sequence} of process group {group}");
        match self {
            Self::Different {
                group, sequence, ..
            } => format!("{} differs between ranks", at(group, *sequence)),
            Self::Missing {
                group,
                sequence,
                missing,
                ..
            } => {
                let missing: BTreeSet<u32> = missing.keys().copied().collect();
                let verb = if missing.len() == 1 { "does" } else { "do" };
                let at = at(group, *sequence);
                format!("{} {verb} not issue {at}", list(&missing))
            }
            Self::Incomplete {
                group,
                sequence,
                unknown,
                ..
            } => {
                let rest = match unknown.is_empty() {
                    true => String::new(),
                    false => format!(" (no record of {})", list(unknown)),
                };
                format!("{} does not complete{rest}", at(group, *sequence))
            }
            Self::Message {
                group,
                sequence,
                reason,
                ranks,
                unknown,
            } => {
                let ends: BTreeSet<u32> = ranks.keys().chain(unknown).copied().collect();
                format!(
                    "message {sequence} between {} in process group {group} {reason}",
                    list(&ends)
                )
            }
        }
    }
}

/// Result of comparing the records of several ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FlightReport {
    /// Number of entries of each rank.
    pub ranks: BTreeMap<u32, usize>,
    /// Number of collectives that match on all ranks of their group.
    pub matched: u64,
    /// Number of point-to-point messages whose send and recv match.
    #[serde(skip_serializing_if = "is_zero")]
    pub messages: u64,
    /// The divergence that the others follow from.
    pub divergence: Option<Divergence>,
    /// The first divergence of each process group, and of each pair of ranks with messages: the
    /// cause first, then by time of issue.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub divergences: Vec<Divergence>,
    /// Each record compared with a program, if one is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub program: Vec<ProgramCheck>,
    /// Groups that cannot be compared, with the reasons.
    pub notes: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Returns those of some ranks whose records are not given.
pub(super) fn without_records(
    ranks: impl IntoIterator<Item = u32>,
    records: &[FlightRecord],
) -> BTreeSet<u32> {
    let given: BTreeSet<u32> = records.iter().map(|r| r.rank).collect();
    ranks.into_iter().filter(|r| !given.contains(r)).collect()
}

/// Lists ranks: `rank 2`, or `ranks 1, 4 to 7, 9 and 12 others`.
#[must_use]
pub fn list(ranks: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match ranges.last_mut() {
            Some((_, to)) if to.checked_add(1) == Some(rank) => *to = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let shown: Vec<String> = ranges
        .iter()
        .take(LISTED)
        .map(|&(from, to)| match to - from {
            0 => from.to_string(),
            1 => format!("{from}, {to}"),
            _ => format!("{from} to {to}"),
        })
        .collect();
    let others: u32 = ranges.iter().skip(LISTED).map(|r| r.1 - r.0 + 1).sum();
    let others = match others {
        0 => String::new(),
        n => format!(" and {n} others"),
    };
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}{others}", shown.join(", "))
}

/// Returns the name of a group for the reader.
pub(super) fn label(group: &(String, String)) -> String {
    if group.1.is_empty() {
        group.0.clone()
    } else {
        format!("{} ({})", group.1, group.0)
    }
}

/// Returns the entry that stands for those with one sequence number: the end of the coalesced
/// group, because only it has a state.
pub(super) fn of_group<'a>(entries: &[&'a Entry]) -> &'a Entry {
    let end = entries.iter().rfind(|e| e.ends_group());
    end.or(entries.last())
        .expect("each sequence number has an entry")
}

#[cfg(test)]
mod tests {
    use super::list;

    #[test]
    fn many_ranks_are_listed_briefly() {
        let text = |ranks: &[u32]| list(&ranks.iter().copied().collect());
        assert_eq!(text(&[2]), "rank 2");
        assert_eq!(text(&[10, 2, 3, 4, 9]), "ranks 2 to 4, 9, 10");
        let even: Vec<u32> = (0..20).map(|i| 2 * i).collect();
        assert_eq!(text(&even), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 others");
    }
}
