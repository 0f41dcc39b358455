//! Compares point-to-point messages: each send with the recv on its other rank.
//!
//! Two ranks count their messages differently, since each has messages with other ranks as well.
//! The messages of one sender to one receiver, however, arrive in the order of issue.

use super::causes::{Found, Issued};
use super::report::{Divergence, FlightReport, label, of_group, without_records};
use super::{Entry, FlightRecord};
use std::collections::{BTreeMap, BTreeSet};

/// A sender and a receiver, global ranks.
type Pair = (u32, u32);

/// A recorded side of a message.
struct Side<'a> {
    entry: &'a Entry,
    /// The entry that has its state: the end of its coalesced group, or itself.
    state: &'a Entry,
}

/// Compares the messages of a process group, and returns the first divergence of each pair of
/// ranks.
pub(super) fn compare(
    records: &[FlightRecord],
    group: &(String, String),
    report: &mut FlightReport,
) -> Vec<Found> {
    let mut pairs: BTreeMap<Pair, [Vec<Side<'_>>; 2]> = BTreeMap::new();
    let mut unread = 0_usize;
    let mut partial = BTreeSet::new();
    let mut states = Vec::new();
    for record in records {
        let entries = record.entries.iter();
        let own: Vec<&Entry> = entries.filter(|e| e.is_p2p && e.group == *group).collect();
        let members = record.groups.get(&group.0).map_or(&[][..], Vec::as_slice);
        for same in own.chunk_by(|a, b| a.sequence == b.sequence) {
            let state = of_group(same);
            states.push(state);
            // The end of a coalesced group is not a message.
            for &entry in same.iter().filter(|e| !e.ends_group()) {
                let Some((pair, receives)) = ends(&entry.name, members) else {
                    unread += 1;
                    continue;
                };
                let state = if state.ends_group() { state } else { entry };
                let sides = pairs.entry(pair).or_default();
                sides[usize::from(receives)].push(Side { entry, state });
            }
        }
        if record.is_partial {
            partial.insert(record.rank);
        }
    }
    let label = label(group);
    if unread > 0 {
        report.notes.push(format!(
            "process group {label}: {unread} point-to-point messages name no other rank and are not compared"
        ));
    }
    let recorded = !states.iter().all(|e| e.has_no_state());
    let mut all = Vec::new();
    let mut uncounted = 0;
    for (pair, [sends, receives]) in &pairs {
        let unknown = without_records([pair.0, pair.1], records);
        // The n-th send belongs to the n-th recv only if both records start with the first one.
        let counted =
            unknown.is_empty() && !partial.contains(&pair.0) && !partial.contains(&pair.1);
        if !counted {
            uncounted += sends.len().max(receives.len());
        }
        let each = Each {
            label: &label,
            pair: *pair,
            unknown,
            recorded,
        };
        let found = if counted {
            let longest = sends.len().max(receives.len());
            (0..longest).find_map(|n| {
                let found = each.compare(n, sends.get(n), receives.get(n));
                report.messages += u64::from(found.is_none());
                found
            })
        } else {
            let both = sends.iter().chain(receives).enumerate();
            let waiting = both.filter(|(n, side)| each.waits(*n, &[*side]).is_some());
            let first = waiting.min_by_key(|(_, side)| side.entry.created);
            first.and_then(|(n, side)| each.waits(n, &[side]))
        };
        all.extend(found);
    }
    if uncounted > 0 {
        report.notes.push(format!(
            "process group {label}: the order of {uncounted} point-to-point messages is not compared, because the records of both ranks from their start are needed"
        ));
    }
    all
}

/// The messages of one rank to another.
struct Each<'a> {
    label: &'a str,
    pair: Pair,
    unknown: BTreeSet<u32>,
    recorded: bool,
}

impl Each<'_> {
    /// Compares both sides of message `n`.
    fn compare(&self, n: usize, send: Option<&Side<'_>>, recv: Option<&Side<'_>>) -> Option<Found> {
        let (reason, sides) = match (send, recv) {
            (Some(s), Some(r)) if s.entry.inputs != r.entry.outputs => {
                ("has different sizes on its two ranks", vec![s, r])
            }
            (Some(s), Some(r)) => return self.waits(n, &[s, r]),
            (Some(s), None) => ("has no recv", vec![s]),
            (None, Some(r)) => ("has no send", vec![r]),
            (None, None) => return None,
        };
        Some(self.found(n, reason, &sides))
    }

    /// Returns a divergence if a side has not completed.
    fn waits(&self, n: usize, sides: &[&Side<'_>]) -> Option<Found> {
        let waits = self.recorded && sides.iter().any(|s| !s.state.is_completed());
        waits.then(|| self.found(n, "does not complete", sides))
    }

    fn found(&self, n: usize, reason: &'static str, sides: &[&Side<'_>]) -> Found {
        let mut ranks: BTreeMap<u32, String> = BTreeMap::new();
        let mut issued = BTreeMap::new();
        for side in sides {
            let rank = if side.entry.name.starts_with("send") {
                self.pair.0
            } else {
                self.pair.1
            };
            let state = side.state.shown_state();
            ranks.insert(rank, format!("{state} {}", side.entry.describe()));
            issued.insert(rank, Issued::new(side.entry, side.state));
        }
        let mut awaited = BTreeSet::new();
        for rank in [self.pair.0, self.pair.1] {
            if !self.unknown.contains(&rank) && !ranks.contains_key(&rank) {
                ranks.insert(rank, "none".to_owned());
                awaited.insert(rank);
            }
        }
        let divergence = Divergence::Message {
            group: self.label.to_owned(),
            sequence: n as u64 + 1,
            reason,
            ranks,
            unknown: self.unknown.clone(),
        };
        Found {
            divergence,
            awaited,
            issued,
        }
    }
}

/// Returns sender and receiver as global ranks, and whether the entry receives. Its name has ranks
/// within the group: `send 0->1`, `recv 1<-0`.
fn ends(name: &str, members: &[u32]) -> Option<(Pair, bool)> {
    let (kind, ranks) = name.split_once(' ')?;
    let (pair, receives) = match kind {
        "send" => (ranks.split_once("->")?, false),
        "recv" => {
            let (to, from) = ranks.split_once("<-")?;
            ((from, to), true)
        }
        _ => return None,
    };
    let global = |text: &str| {
        let rank: u32 = text.trim().parse().ok()?;
        let mut members = members.to_vec();
        members.sort_unstable();
        // Without a list of members, the group is the whole job.
        if members.is_empty() {
            Some(rank)
        } else {
            members.get(rank as usize).copied()
        }
    };
    Some(((global(pair.0)?, global(pair.1)?), receives))
}
