//! Finds the rank of each record. Records do not contain it: PyTorch appends it to the name of the
//! file (`TORCH_NCCL_DEBUG_INFO_TEMP_FILE`).

use super::{FlightRecord, list, read};
use crate::ImportError;
use crate::source::Source;
use std::collections::BTreeSet;
use std::path::Path;

/// Reads the records of a job. Returns them with notes on ranks that are doubtful.
///
/// # Errors
/// Fails if a file cannot be read or is not a flight record.
pub(crate) fn read_all(files: &[&Path]) -> Result<(Vec<FlightRecord>, Vec<String>), ImportError> {
    let named = ranks(files);
    let mut records = Vec::new();
    let mut notes = Vec::new();
    for (i, path) in files.iter().enumerate() {
        let place = u32::try_from(i).unwrap_or(u32::MAX);
        let rank = named.as_ref().map_or(place, |all| all[i]);
        records.push(read(Source::open(path)?, path, rank)?);
    }
    if named.is_none() {
        let only: Option<Vec<u32>> = records.iter().map(only_member).collect();
        let is_new = |ranks: &Vec<u32>| is_distinct(ranks);
        if let Some(ranks) = only.filter(is_new) {
            for (record, rank) in records.iter_mut().zip(ranks) {
                record.rank = rank;
            }
        } else {
            notes.push("the names of the flight records do not end with their ranks, so the order of the files stands for the ranks; PyTorch appends the rank to the name".to_owned());
        }
    }
    for (record, path) in records.iter().zip(files) {
        let outside = members(record).find(|(_, ranks)| !ranks.contains(&record.rank));
        if let Some((group, ranks)) = outside {
            notes.push(format!(
                "{}: taken as rank {}, but process group {group}, in which it has collectives, consists of {}; check the name of the file",
                path.display(),
                record.rank,
                list(&ranks.iter().copied().collect())
            ));
        }
    }
    Ok((records, notes))
}

/// Returns the members of the groups that a record has entries of, as far as it contains them.
fn members(record: &FlightRecord) -> impl Iterator<Item = (&str, &Vec<u32>)> {
    let used: BTreeSet<&String> = record.entries.iter().map(|e| &e.group.0).collect();
    let groups = record.groups.iter();
    groups
        .filter(move |(name, ranks)| used.contains(name) && !ranks.is_empty())
        .map(|(name, ranks)| (name.as_str(), ranks))
}

/// Returns the only rank that is in all groups that a record has entries of.
fn only_member(record: &FlightRecord) -> Option<u32> {
    let mut lists = members(record).map(|(_, ranks)| ranks);
    let first = lists.next()?;
    let rest: Vec<&Vec<u32>> = lists.collect();
    let mut common = first.iter().filter(|r| rest.iter().all(|l| l.contains(r)));
    let rank = common.next()?;
    common.next().is_none().then_some(*rank)
}

fn is_distinct(ranks: &[u32]) -> bool {
    ranks.iter().collect::<BTreeSet<_>>().len() == ranks.len()
}

/// Returns the ranks in the names of files: the number after `rank`, or the number at the end, if
/// each file has a different one. Names of hosts can contain `rank`, too.
fn ranks(files: &[&Path]) -> Option<Vec<u32>> {
    let all = |number: fn(&str) -> Option<u32>| -> Option<Vec<u32>> {
        let names = files.iter().map(|f| f.file_name().unwrap_or_default());
        names
            .map(|n| number(&n.to_string_lossy().to_ascii_lowercase()))
            .collect()
    };
    let found = [all(crate::ranks::after_rank), all(at_end)];
    let distinct = found.iter().flatten().find(|ranks| is_distinct(ranks));
    // Two files of one rank are an error, which the comparison reports.
    distinct.or(found.iter().flatten().next()).cloned()
}

/// Returns the number at the end of a name, before its extensions.
fn at_end(name: &str) -> Option<u32> {
    let mut stem = name;
    while let Some((rest, extension)) = stem.rsplit_once('.') {
        if extension.chars().all(|c| c.is_ascii_digit()) {
            break;
        }
        stem = rest;
    }
    let start = stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    stem[start..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn found(names: &[&str]) -> Option<Vec<u32>> {
        let paths: Vec<&Path> = names.iter().map(Path::new).collect();
        ranks(&paths)
    }

    #[test]
    fn ranks_are_at_the_end_of_names() {
        let lexical = ["d/dump_0", "d/dump_1", "d/dump_10", "d/dump_11", "d/dump_2"];
        assert_eq!(found(&lexical), Some(vec![0, 1, 10, 11, 2]));
        let nccl = ["nccl_trace_rank_0", "nccl_trace_rank_10"];
        assert_eq!(found(&nccl), Some(vec![0, 10]));
        // The name of a host contains `rank`, or that of a node follows.
        let host = ["host-rank7_trace_0", "host-rank7_trace_10"];
        assert_eq!(found(&host), Some(vec![0, 10]));
        let node = ["rank0_node3.pkl", "rank10_node3.pkl"];
        assert_eq!(found(&node), Some(vec![0, 10]));
        assert_eq!(found(&["a.3", "a.12.pickle.gz"]), Some(vec![3, 12]));
        assert_eq!(found(&["a_3", "b_3"]), Some(vec![3, 3]));
        assert_eq!(found(&["first", "second"]), None);
    }

    /// Returns the records that files of these names give, with the notes. Each has a collective
    /// of these groups.
    fn written(files: &[(&str, &[(&str, &str)])]) -> (Vec<u32>, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = files
            .iter()
            .map(|(name, groups)| {
                let entries: Vec<serde_json::Value> = groups
                    .iter()
                    .map(|(group, _)| {
                        serde_json::json!({
                            "process_group": [group, "mesh"], "profiling_name": "nccl:all_reduce",
                            "collective_seq_id": 1, "state": "completed",
                        })
                    })
                    .collect();
                let config = groups.iter().map(|(group, ranks)| {
                    let config = serde_json::json!({"name": group, "ranks": ranks});
                    ((*group).to_owned(), config)
                });
                let config: serde_json::Map<_, _> = config.collect();
                let path = dir.path().join(name);
                let record =
                    serde_json::json!({"version": "2.10", "entries": entries, "pg_config": config});
                std::fs::write(&path, record.to_string()).unwrap();
                path
            })
            .collect();
        let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let (records, notes) = read_all(&paths).unwrap();
        (records.iter().map(|r| r.rank).collect(), notes)
    }

    #[test]
    fn groups_confirm_or_give_the_ranks() {
        let shard = ("s", "[2, 3]");
        let (ranks, notes) = written(&[("dump_3", &[shard]), ("dump_2", &[shard])]);
        assert_eq!((ranks, notes.len()), (vec![3, 2], 0));
        let (ranks, notes) = written(&[("dump_4", &[shard])]);
        assert_eq!(ranks, [4]);
        assert!(notes[0].contains("dump_4: taken as rank 4"), "{notes:?}");
        assert!(notes[0].contains("consists of ranks 2, 3"), "{notes:?}");
        // Two groups have one rank in common.
        let (ranks, notes) = written(&[
            ("a", &[shard, ("r", "[1, 3]")]),
            ("b", &[shard, ("r", "[0, 2]")]),
        ]);
        assert_eq!((ranks, notes.len()), (vec![3, 2], 0));
        let (ranks, notes) = written(&[("a", &[("s", "[0, 1]")]), ("b", &[("s", "[0, 1]")])]);
        assert_eq!(ranks, [0, 1]);
        assert!(notes[0].contains("order of the files"), "{notes:?}");
    }
}
