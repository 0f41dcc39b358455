//! Compares the collectives of several ranks.

use super::causes::{self, Found, Issued};
use super::report::{Divergence, FlightReport, label, list, of_group, without_records};
use super::{Entry, FlightRecord, messages};
use crate::ImportError;
use std::collections::{BTreeMap, BTreeSet};

/// Compares the records of ranks.
///
/// # Errors
/// Fails if two records are of the same rank.
pub fn compare(records: &[FlightRecord]) -> Result<FlightReport, ImportError> {
    let mut report = FlightReport::default();
    for record in records {
        if report
            .ranks
            .insert(record.rank, record.entries.len())
            .is_some()
        {
            return Err(ImportError::Apart(format!(
                "two flight records are of rank {}: give one per rank, with the rank in the file's name",
                record.rank
            )));
        }
    }
    report.notes.extend(not_given(records));
    let of = |is_p2p: bool| -> BTreeSet<&(String, String)> {
        let entries = records.iter().flat_map(|r| &r.entries);
        let entries = entries.filter(|e| e.is_p2p == is_p2p);
        entries.map(|e| &e.group).collect()
    };
    let mut found = Vec::new();
    for group in of(false) {
        for family in families(records, group) {
            found.extend(family.compare(&mut report));
        }
    }
    for group in of(true) {
        found.extend(messages::compare(records, group, &mut report));
    }
    report.divergences = causes::sorted(found);
    report.divergence = report.divergences.first().cloned();
    Ok(report)
}

/// Returns a note on the ranks whose records are not given.
fn not_given(records: &[FlightRecord]) -> Option<String> {
    let used = |r: &FlightRecord, name: &String| r.entries.iter().any(|e| e.group.0 == *name);
    let members = records.iter().flat_map(|r| {
        let groups = r.groups.iter().filter(|(name, _)| used(r, name));
        groups.flat_map(|(_, ranks)| ranks.iter().copied())
    });
    let missing = without_records(members, records);
    let rest = match missing.len() {
        0 => return None,
        1 => "it may be the one that died or never arrived",
        _ => "one of them may have died or never arrived",
    };
    Some(format!("no record of {}: {rest}", list(&missing)))
}

/// The collectives of a rank in one group. Those that were issued as one coalesced group have one
/// sequence number.
type OfRank<'a> = (u32, BTreeMap<u64, Vec<&'a Entry>>);

/// A process group. Groups with equal names on disjoint ranks are different ones.
struct Family<'a> {
    label: String,
    /// Ranks of the group; empty if no record says it.
    members: Vec<u32>,
    ranks: Vec<OfRank<'a>>,
    /// Ranks of the group whose records are not given.
    unknown: BTreeSet<u32>,
}

fn families<'a>(records: &'a [FlightRecord], group: &(String, String)) -> Vec<Family<'a>> {
    let mut families: BTreeMap<Vec<u32>, Vec<OfRank<'_>>> = BTreeMap::new();
    for record in records {
        let mut entries: BTreeMap<u64, Vec<&Entry>> = BTreeMap::new();
        let own = record.entries.iter();
        for entry in own.filter(|e| !e.is_p2p && e.group == *group) {
            entries.entry(entry.sequence).or_default().push(entry);
        }
        let members = record.groups.get(&group.0).cloned().unwrap_or_default();
        if entries.is_empty() && !members.contains(&record.rank) {
            continue;
        }
        families
            .entry(members)
            .or_default()
            .push((record.rank, entries));
    }
    let families = families.into_iter();
    families
        .map(|(members, ranks)| Family {
            label: label(group),
            unknown: without_records(members.iter().copied(), records),
            members,
            ranks,
        })
        .collect()
}

/// Whether the states of entries say what has completed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Completion {
    Recorded,
    NotRecorded,
}

impl Family<'_> {
    fn compare(&self, report: &mut FlightReport) -> Option<Found> {
        let alone = self.ranks.len() < 2;
        if alone && self.members.len() > 1 {
            report.notes.push(format!(
                "process group {}: records of {} of {} ranks are given",
                self.label,
                self.ranks.len(),
                self.members.len()
            ));
        }
        let entries = || self.ranks.iter().flat_map(|(_, e)| e.values().flatten());
        let mut completion = Completion::Recorded;
        if entries().all(|e| e.has_no_state()) {
            completion = Completion::NotRecorded;
            report.notes.push(format!(
                "process group {}: its backend does not record what completes; only the order and sizes of collectives are compared",
                self.label
            ));
        }
        // A ring buffer may have lost the first collectives.
        let firsts = self.ranks.iter().filter_map(|(_, e)| e.keys().next());
        let start = firsts.max().copied().unwrap_or(0);
        let lasts = self.ranks.iter().filter_map(|(_, e)| e.keys().last());
        let end = lasts.max().copied().unwrap_or(0);
        (start..=end).find_map(|sequence| {
            let issued: Vec<(u32, &[&Entry])> = self
                .ranks
                .iter()
                .filter_map(|(r, e)| Some((*r, e.get(&sequence)?.as_slice())))
                .collect();
            if issued.is_empty() {
                return None;
            }
            // It may have lost a part of the first coalesced group, too.
            let from_end = sequence == start && start > 1;
            let found = self
                .different(sequence, &issued, from_end)
                .or_else(|| self.missing(sequence, &issued))
                .or_else(|| self.incomplete(sequence, &issued, completion));
            if found.is_none() && !alone {
                report.matched += 1;
            }
            let divergence = found?;
            let awaited = match &divergence {
                Divergence::Missing { missing, .. } => missing.keys().copied().collect(),
                _ => BTreeSet::new(),
            };
            let of = |entries: &[&Entry]| Some(Issued::new(entries.first()?, of_group(entries)));
            Some(Found {
                divergence,
                awaited,
                issued: issued
                    .iter()
                    .filter_map(|(r, e)| Some((*r, of(e)?)))
                    .collect(),
            })
        })
    }

    /// Finds ranks that issue different collectives with one sequence number. Compares coalesced
    /// groups `from_end` if their first collectives may be lost.
    fn different(
        &self,
        sequence: u64,
        issued: &[(u32, &[&Entry])],
        from_end: bool,
    ) -> Option<Divergence> {
        let sizes = || issued.iter().map(|(_, e)| e.len());
        let (least, most) = (sizes().min()?, sizes().max()?);
        let length = if from_end { least } else { most };
        let nth = |entries: &[&Entry], i: usize| {
            let skipped = if from_end { entries.len() - length } else { 0 };
            entries.get(skipped + i).map(|e| (*e).clone())
        };
        let at = (0..length).find(|&i| {
            let mut of = issued.iter().map(|(_, e)| nth(e, i));
            let first = of.next().flatten();
            of.any(|other| match (&first, &other) {
                (Some(a), Some(b)) => signature(a) != signature(b),
                (a, b) => a.is_some() != b.is_some(),
            })
        })?;
        let ranks = issued.iter().map(|(rank, entries)| {
            let text = nth(entries, at).map_or_else(
                || format!("only {} in this coalesced group", entries.len()),
                |e| e.describe(),
            );
            (*rank, text)
        });
        Some(Divergence::Different {
            group: self.label.clone(),
            sequence,
            ranks: ranks.collect(),
        })
    }

    fn missing(&self, sequence: u64, issued: &[(u32, &[&Entry])]) -> Option<Divergence> {
        if issued.len() == self.ranks.len() {
            return None;
        }
        let without = self.ranks.iter();
        let without = without.filter(|(_, e)| !e.contains_key(&sequence));
        let missing = without.map(|(rank, entries)| {
            let last = entries.range(..sequence).next_back();
            let last = last.map(|(n, e)| format!("{n}: {}", of_group(e).describe()));
            (*rank, last.unwrap_or_else(|| "none".to_owned()))
        });
        let issued = issued.iter();
        Some(Divergence::Missing {
            group: self.label.clone(),
            sequence,
            issued: issued.map(|(r, e)| (*r, of_group(e).describe())).collect(),
            missing: missing.collect(),
            unknown: self.unknown.clone(),
        })
    }

    fn incomplete(
        &self,
        sequence: u64,
        issued: &[(u32, &[&Entry])],
        completion: Completion,
    ) -> Option<Divergence> {
        let waits = |(_, e): &(u32, &[&Entry])| !of_group(e).is_completed();
        if completion == Completion::NotRecorded || !issued.iter().any(waits) {
            return None;
        }
        let states = issued.iter().map(|(rank, entries)| {
            let entry = of_group(entries);
            (
                *rank,
                format!("{} {}", entry.shown_state(), entry.describe()),
            )
        });
        Some(Divergence::Incomplete {
            group: self.label.clone(),
            sequence,
            ranks: states.collect(),
            unknown: self.unknown.clone(),
        })
    }
}

/// Returns the properties that must be equal on all ranks.
///
/// Ranks exchange different amounts of data in all-to-all collectives and those with a `v`, and
/// only the root of a gather or scatter has a list of all ranks' tensors. Types that are not
/// defined belong to tensors without elements.
fn signature(entry: &Entry) -> (&str, [&str; 4]) {
    let name = entry.name.as_str();
    let lower = name.to_ascii_lowercase().replace('_', "");
    let (from, to) = (&entry.inputs, &entry.outputs);
    let uneven = lower.contains("alltoall") || lower.contains("barrier") || name.contains("_v");
    let (from, to) = match lower.as_str() {
        _ if uneven => (["", ""], ["", ""]),
        "gather" => ([&*from.sizes, &from.types], ["", ""]),
        "scatter" => (["", ""], [&*to.sizes, &to.types]),
        // Only the root has an input, whose type NCCL does not look at on other ranks.
        "broadcast" | "broadcastoop" => ([&*from.sizes, ""], [&*to.sizes, &to.types]),
        _ => ([&*from.sizes, &*from.types], [&*to.sizes, &to.types]),
    };
    (name, [from[0], from[1], to[0], to[1]])
}

#[cfg(test)]
mod tests {
    use super::super::Tensors;
    use super::*;

    fn entry(i: usize, name: &str) -> Entry {
        let tensors = Tensors {
            sizes: "[[4]]".into(),
            types: "[Float]".into(),
        };
        Entry {
            id: i as u64,
            group: ("0".into(), "default_pg".into()),
            sequence: i as u64 + 1,
            is_p2p: false,
            backend: "nccl".into(),
            name: name.into(),
            inputs: tensors.clone(),
            outputs: tensors,
            bytes: 16,
            state: "completed".into(),
            is_retired: true,
            created: i as i64,
            frame: String::new(),
        }
    }

    /// Returns a record of a job with two ranks.
    fn record(rank: u32, names: &[&str]) -> FlightRecord {
        of_entries(
            rank,
            names.iter().enumerate().map(|(i, n)| entry(i, n)).collect(),
        )
    }

    fn of_entries(rank: u32, entries: Vec<Entry>) -> FlightRecord {
        FlightRecord {
            rank,
            version: "2.10".into(),
            entries,
            is_partial: false,
            groups: BTreeMap::from([("0".into(), vec![0, 1])]),
        }
    }

    fn divergence(records: &[FlightRecord]) -> Option<Divergence> {
        compare(records).unwrap().divergence
    }

    #[test]
    fn the_first_difference_is_found() {
        let same = ["a", "b", "c"];
        let report = compare(&[record(0, &same), record(1, &same)]).unwrap();
        assert_eq!((report.matched, report.divergence), (3, None));
        assert!(report.notes.is_empty(), "{:?}", report.notes);
        let found = divergence(&[record(0, &same), record(1, &["a", "x", "c"])]);
        assert!(
            matches!(found, Some(Divergence::Different { sequence: 2, .. })),
            "{found:?}"
        );
        let found = divergence(&[record(0, &same), record(1, &["a", "b"])]);
        let Some(Divergence::Missing {
            sequence: 3,
            missing,
            ..
        }) = found
        else {
            panic!("{found:?}");
        };
        assert!(missing[&1].starts_with("2: b"));
        let mut late = record(1, &same);
        late.entries[1].state = "started".into();
        let found = divergence(&[record(0, &same), late]);
        assert!(
            matches!(found, Some(Divergence::Incomplete { sequence: 2, .. })),
            "{found:?}"
        );
    }

    #[test]
    fn a_ring_buffer_may_have_lost_the_beginning() {
        let mut late = record(1, &["a", "b", "c"]);
        late.entries.remove(0);
        let report = compare(&[record(0, &["a", "b", "c"]), late]).unwrap();
        assert_eq!((report.matched, report.divergence), (2, None));
    }

    #[test]
    fn two_records_of_one_rank_are_refused() {
        assert!(compare(&[record(0, &["a"]), record(0, &["a"])]).is_err());
    }

    /// Two hosts with two ranks each. Ranks 0 and 1 gather, as do 2 and 3. Rank 1 stops before its
    /// second gather, so that rank 0 waits there and does not reach its second all-reduce with rank
    /// 2. The clocks of the hosts agree, or that of the first host is fast.
    #[test]
    fn the_cause_of_a_hang_is_a_rank_that_does_not_wait() {
        let in_group = |id: u64, group: &str, sequence: u64, state: &str, created: i64| Entry {
            id,
            group: (group.into(), "mesh".into()),
            sequence,
            state: state.into(),
            is_retired: state == "completed",
            created,
            ..entry(0, "a")
        };
        let record = |rank: u32, entries: Vec<Entry>| FlightRecord {
            groups: BTreeMap::from([
                (
                    format!("shard{}", rank / 2),
                    vec![rank / 2 * 2, rank / 2 * 2 + 1],
                ),
                (format!("rep{}", rank % 2), vec![rank % 2, rank % 2 + 2]),
            ]),
            ..of_entries(rank, entries)
        };
        for late in [0, 50] {
            let all: Vec<FlightRecord> = (0..4)
                .map(|rank: u32| {
                    let host = rank / 2;
                    let (shard, rep) = (format!("shard{host}"), format!("rep{}", rank % 2));
                    let at = |i: i64| i + if host == 0 { late } else { 0 };
                    let mut entries = vec![
                        in_group(0, &shard, 1, "completed", at(1)),
                        in_group(1, &rep, 1, "completed", at(2)),
                    ];
                    if rank != 1 {
                        let state = if host == 1 { "completed" } else { "started" };
                        entries.push(in_group(2, &shard, 2, state, at(3)));
                    }
                    if host == 1 {
                        entries.push(in_group(3, &rep, 2, "started", at(4)));
                    }
                    record(rank, entries)
                })
                .collect();
            let report = compare(&all).unwrap();
            let brief: Vec<String> = report.divergences.iter().map(Divergence::brief).collect();
            let expected = [
                "rank 1 does not issue number 2 of process group mesh (shard0)",
                "rank 0 does not issue number 2 of process group mesh (rep0)",
                "rank 1 does not issue number 2 of process group mesh (rep1)",
            ];
            assert_eq!(brief, expected, "{late}");
            assert_eq!(report.divergence.as_ref(), report.divergences.first());
        }
    }

    /// Two groups on two hosts. Ranks 0 and 1 have issued a collective that does not run, while
    /// rank 3 does not issue its own.
    #[test]
    fn a_rank_that_is_missing_explains_more_than_a_collective_that_does_not_start() {
        let of = |rank: u32, group: &str, members: [u32; 2], names: &[&str]| {
            let mut record = record(rank, names);
            record.groups = BTreeMap::from([(group.into(), members.to_vec())]);
            for entry in &mut record.entries {
                entry.group.0 = group.into();
            }
            let last = record.entries.last_mut().unwrap();
            (last.state, last.is_retired) = ("scheduled".into(), false);
            record
        };
        let mut stopped = of(3, "b", [2, 3], &["x"]);
        stopped.entries[0].state = "completed".into();
        let report = compare(&[
            of(0, "a", [0, 1], &["x", "y"]),
            of(1, "a", [0, 1], &["x", "y"]),
            of(2, "b", [2, 3], &["x", "y"]),
            stopped,
        ])
        .unwrap();
        let found = report.divergence.unwrap().brief();
        let expected = "rank 3 does not issue number 2 of process group default_pg (b)";
        assert_eq!(found, expected);
        assert_eq!(report.divergences.len(), 2);
    }

    /// Rank 2 of a pipeline stops: rank 1 waits for its message, and rank 0 for that of rank 1.
    #[test]
    fn messages_that_wait_lead_to_the_rank_that_stopped() {
        let recv = |rank: u32, at: i64| {
            let name = format!("recv {rank}<-{}", rank + 1);
            let entry = Entry {
                created: at,
                is_retired: false,
                ..message(0, &name, "started")
            };
            of_entries(rank, vec![entry])
        };
        let mut stopped = of_entries(2, Vec::new());
        stopped.groups.clear();
        let of = |mut r: FlightRecord| {
            r.groups = BTreeMap::from([("0".into(), vec![0, 1, 2])]);
            r
        };
        let report = compare(&[of(recv(0, 1)), of(recv(1, 9)), stopped]).unwrap();
        let brief: Vec<String> = report.divergences.iter().map(Divergence::brief).collect();
        let between =
            |ranks, end| format!("message 1 between ranks {ranks} in process group {end}");
        assert_eq!(
            brief,
            [
                between("1, 2", "default_pg (0) has no send"),
                between("0, 1", "default_pg (0) has no send")
            ]
        );
    }

    /// The root of a gather has a list of outputs, and the others none; a scatter is the reverse.
    /// These are the sizes that PyTorch 2.10 records with Gloo.
    #[test]
    fn only_what_all_ranks_have_is_compared() {
        let with = |name: &str, inputs: &str, outputs: &str| {
            let mut entry = entry(0, name);
            entry.inputs.sizes = inputs.into();
            entry.outputs.sizes = outputs.into();
            vec![entry]
        };
        let differ = |a: Vec<Entry>, b: Vec<Entry>| {
            divergence(&[of_entries(0, a), of_entries(1, b)]).is_some()
        };
        let gather = |i, o| with("gather", i, o);
        assert!(!differ(gather("[[8]]", "[[2, 8]]"), gather("[[8]]", "[]")));
        assert!(differ(gather("[[8]]", "[[2, 8]]"), gather("[[9]]", "[]")));
        let scatter = |i, o| with("scatter", i, o);
        assert!(!differ(
            scatter("[[2, 8]]", "[[8]]"),
            scatter("[]", "[[8]]")
        ));
        assert!(differ(scatter("[[2, 8]]", "[[8]]"), scatter("[]", "[[9]]")));
        let exchange = |i, o| with("all_to_all", i, o);
        assert!(!differ(
            exchange("[[5]]", "[[3]]"),
            exchange("[[1]]", "[[3]]")
        ));
        for name in ["broadcast", "reduce", "all_reduce", "_all_gather_base"] {
            let of = |i| with(name, i, "[[8]]");
            assert!(differ(of("[[8]]"), of("[[9]]")), "{name}");
        }
        let mut other = entry(0, "all_reduce");
        other.outputs.types = "[BFloat16]".into();
        assert!(differ(vec![entry(0, "all_reduce")], vec![other]));
    }

    #[test]
    fn ranks_without_a_record_are_named() {
        let of = |rank, state: &str| {
            let mut record = record(rank, &["a", "b"]);
            record.entries[1].state = state.into();
            record.groups = BTreeMap::from([("0".into(), vec![0, 1, 2, 3])]);
            record
        };
        let all = |state| [0, 1, 3].map(|rank| of(rank, state));
        let report = compare(&all("started")).unwrap();
        let Some(Divergence::Incomplete { unknown, .. }) = report.divergence else {
            panic!("{report:?}");
        };
        assert_eq!(unknown, BTreeSet::from([2]));
        let healthy = compare(&all("completed")).unwrap();
        assert_eq!((healthy.matched, healthy.divergence), (2, None));
        let note = "no record of rank 2: it may be the one that died or never arrived";
        assert_eq!(healthy.notes, [note]);
        // One record alone shows what its rank waits for.
        let report = compare(&[of(0, "started")]).unwrap();
        assert_eq!(report.matched, 0);
        assert!(matches!(
            report.divergence,
            Some(Divergence::Incomplete { sequence: 2, .. })
        ));
    }

    /// The collectives of a coalesced group have one sequence number, and only its end has a state.
    fn coalesced(size: &str, members: usize, state: &str) -> Vec<Entry> {
        let mut all = vec![entry(0, "all_reduce")];
        for i in 0..members {
            let mut member = entry(1, "_all_gather_base");
            member.state = "scheduled".into();
            member.is_retired = false;
            if i == 0 {
                member.inputs.sizes = size.into();
            }
            all.push(member);
        }
        let mut end = entry(1, "coalesced");
        end.inputs = Tensors::default();
        end.outputs = Tensors::default();
        end.state = state.into();
        all.push(end);
        all.push(entry(2, "all_reduce"));
        all
    }

    #[test]
    fn all_members_of_a_coalesced_group_are_compared() {
        let of = |rank, size, members, state| of_entries(rank, coalesced(size, members, state));
        let first = || of(0, "[[32]]", 2, "completed");
        let report = compare(&[first(), of(1, "[[32]]", 2, "completed")]).unwrap();
        assert_eq!((report.matched, report.divergence), (3, None));
        let found = divergence(&[first(), of(1, "[[33]]", 2, "completed")]);
        let Some(Divergence::Different {
            sequence: 2, ranks, ..
        }) = found
        else {
            panic!("{found:?}");
        };
        assert!(ranks[&1].contains("[[33]]"), "{ranks:?}");
        let found = divergence(&[first(), of(1, "[[32]]", 3, "completed")]);
        assert!(
            matches!(found, Some(Divergence::Different { sequence: 2, .. })),
            "{found:?}"
        );
        let found = divergence(&[first(), of(1, "[[32]]", 2, "started")]);
        assert!(
            matches!(found, Some(Divergence::Incomplete { sequence: 2, .. })),
            "{found:?}"
        );
        // A ring buffer has lost the first two entries of one rank.
        let mut lost = of(1, "[[32]]", 2, "completed");
        lost.entries.drain(..2);
        let report = compare(&[first(), lost]).unwrap();
        assert_eq!((report.matched, report.divergence), (2, None));
    }

    #[test]
    fn gloo_retires_what_completes() {
        let of = |rank, retired: bool| {
            let mut record = record(rank, &["a", "b"]);
            for entry in &mut record.entries {
                entry.backend = "gloo".into();
                entry.state = "scheduled".into();
                entry.is_retired = retired;
            }
            record
        };
        let report = compare(&[of(0, true), of(1, true)]).unwrap();
        assert_eq!((report.matched, report.divergence), (2, None));
        assert!(report.notes.is_empty());
        // Another backend never says what completes.
        let report = compare(&[of(0, false), of(1, false)]).unwrap();
        assert_eq!((report.matched, report.divergence), (2, None));
        assert!(report.notes[0].contains("does not record what completes"));
        let mut stuck = of(1, true);
        stuck.entries[1].is_retired = false;
        let found = divergence(&[of(0, true), stuck]);
        assert!(
            matches!(found, Some(Divergence::Incomplete { sequence: 2, .. })),
            "{found:?}"
        );
        // NCCL also retires what timed out.
        let mut nccl = of(1, true);
        nccl.entries[1].backend = "nccl".into();
        assert!(divergence(&[of(0, true), nccl]).is_some());
    }

    fn message(i: usize, name: &str, state: &str) -> Entry {
        Entry {
            is_p2p: true,
            state: state.into(),
            ..entry(i, name)
        }
    }

    #[test]
    fn each_send_needs_its_recv() {
        let sends = |n: usize, state: &str| {
            let all = (0..n).map(|i| message(i, "send 0->1", state));
            of_entries(0, all.collect())
        };
        let recvs = |n: usize| {
            let all = (0..n).map(|i| message(i + 7, "recv 1<-0", "completed"));
            of_entries(1, all.collect())
        };
        let report = compare(&[sends(2, "completed"), recvs(2)]).unwrap();
        assert_eq!((report.messages, report.divergence), (2, None));
        let reason = |records: &[FlightRecord]| match divergence(records) {
            Some(Divergence::Message {
                sequence, reason, ..
            }) => (sequence, reason),
            found => panic!("{found:?}"),
        };
        let without = reason(&[sends(2, "completed"), recvs(1)]);
        assert_eq!(without, (2, "has no recv"));
        let without = reason(&[sends(1, "completed"), recvs(2)]);
        assert_eq!(without, (2, "has no send"));
        let waiting = reason(&[sends(1, "started"), recvs(1)]);
        assert_eq!(waiting, (1, "does not complete"));
        let mut other = recvs(1);
        other.entries[0].outputs.sizes = "[[5]]".into();
        let different = reason(&[sends(1, "completed"), other]);
        assert_eq!(different, (1, "has different sizes on its two ranks"));
        // Without the other record, only the state is known.
        let alone = compare(&[sends(1, "completed")]).unwrap();
        assert_eq!((alone.messages, &alone.divergence), (0, &None));
        assert!(alone.notes.iter().any(|n| n.contains("is not compared")));
        assert_eq!(reason(&[sends(1, "started")]), (1, "does not complete"));
        // A ring buffer has lost the first recv.
        let mut lost = recvs(1);
        lost.is_partial = true;
        assert_eq!(divergence(&[sends(2, "completed"), lost]), None);
    }

    /// Messages of one group have one number, and only the group's end has a state.
    #[test]
    fn coalesced_messages_have_the_state_of_their_group() {
        let of = |rank, state: &str| {
            let names = match rank {
                0 => ["send 0->1", "recv 0<-1"],
                _ => ["recv 1<-0", "send 1->0"],
            };
            let mut all: Vec<Entry> = names.map(|n| message(0, n, "scheduled")).into();
            all.push(message(0, "coalesced", state));
            of_entries(rank, all)
        };
        let report = compare(&[of(0, "completed"), of(1, "completed")]).unwrap();
        assert_eq!((report.messages, report.divergence), (2, None));
        let found = divergence(&[of(0, "completed"), of(1, "started")]);
        assert!(
            matches!(found, Some(Divergence::Message { .. })),
            "{found:?}"
        );
    }
}
