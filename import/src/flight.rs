//! Dumps of NCCL's flight recorder: finds where ranks diverge, and the first collective that
//! differs.

mod program;

pub use program::{ProgramCheck, Unexpected, check};

use crate::ImportError;
use crate::limits;
use crate::pickle::{self, Value};
use serde::Serialize;
use shardlab_plan::ir::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

/// A collective as recorded by a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Process group: name and description.
    pub group: (String, String),
    /// Sequence number within the group. Collectives and point-to-point messages have separate
    /// counters.
    pub sequence: u64,
    /// Whether it is a point-to-point message.
    pub is_p2p: bool,
    /// Name, such as `all_gather`.
    pub name: String,
    /// Shapes and types of the inputs and outputs, as text.
    pub sizes: String,
    /// Payload: size of the larger side in bytes; 0 if its types are unknown.
    pub bytes: u64,
    /// `scheduled`, `started` or `completed`.
    pub state: String,
    /// Time of issue, nanoseconds since 1970.
    pub created: i64,
    /// Innermost frame outside of PyTorch: file and line.
    pub frame: String,
}

/// The record of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightRecord {
    /// Rank.
    pub rank: u32,
    /// Version of the format.
    pub version: String,
    /// Collectives in the order of issue.
    pub entries: Vec<Entry>,
    /// Ranks of each group, by name; empty if the record does not contain them.
    pub groups: BTreeMap<String, Vec<u32>>,
}

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
    },
    /// All ranks issue the same collective, but some do not complete it.
    Incomplete {
        /// Process group.
        group: String,
        /// Sequence number within the group.
        sequence: u64,
        /// State by rank.
        ranks: BTreeMap<u32, String>,
    },
}

/// Result of comparing the records of several ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FlightReport {
    /// Number of collectives of each rank.
    pub ranks: BTreeMap<u32, usize>,
    /// Number of collectives that match on all ranks of their group.
    pub matched: u64,
    /// The first divergence, by the time at which its collective was issued.
    pub divergence: Option<Divergence>,
    /// Each record compared with a program, if one is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub program: Vec<ProgramCheck>,
    /// Groups that cannot be compared, with the reasons.
    pub notes: Vec<String>,
}

/// Reads a record (a pickle or JSON). `rank` is the rank according to the name of the file or its
/// position.
///
/// # Errors
/// Fails if the file is not a flight record, is cut off, or contains code.
pub fn read(mut from: impl Read, path: &Path, rank: u32) -> Result<FlightRecord, ImportError> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)
        .map_err(|e| ImportError::io(path, e))?;
    let value = if bytes.first() == Some(&0x80) {
        pickle::read(&bytes).map_err(|e| ImportError::invalid(path, e.to_string()))?
    } else {
        let json: serde_json::Value = serde_json::from_slice(&bytes)
            .map_err(|e| ImportError::invalid(path, e.to_string()))?;
        Value::from_json(&json)
    };
    let Some(entries) = value.get("entries") else {
        return Err(ImportError::invalid(
            path,
            "the flight record has no `entries`: it was dumped without collectives (TORCH_NCCL_TRACE_BUFFER_SIZE is 0)",
        ));
    };
    let groups = value.get("pg_config").map_or(&[][..], Value::pairs);
    let groups = groups.iter().filter_map(|(name, config)| {
        let ranks = config.get("ranks")?;
        let ranks = match ranks.text() {
            Some(list) => serde_json::from_str(list).unwrap_or_default(),
            None => ranks
                .items()
                .iter()
                .filter_map(|r| u32::try_from(r.int()?).ok())
                .collect(),
        };
        Some((name.text()?.to_owned(), ranks))
    });
    Ok(FlightRecord {
        rank: value
            .get("rank")
            .and_then(Value::int)
            .and_then(|r| u32::try_from(r).ok())
            .unwrap_or(rank),
        version: value
            .get("version")
            .and_then(Value::text)
            .unwrap_or_default()
            .to_owned(),
        groups: groups.collect(),
        entries: entries.items().iter().map(entry).collect(),
    })
}

fn entry(value: &Value) -> Entry {
    let text = |key: &str| value.get(key).and_then(Value::text).unwrap_or_default();
    let int = |key: &str| value.get(key).and_then(Value::int).unwrap_or(0);
    let group = value.get("process_group").map_or(&[][..], Value::items);
    let part = |i: usize| {
        group
            .get(i)
            .and_then(Value::text)
            .unwrap_or_default()
            .to_owned()
    };
    let is_p2p = value.get("is_p2p").and_then(Value::int) == Some(1);
    let sequence = if is_p2p {
        int("p2p_seq_id")
    } else {
        int("collective_seq_id")
    };
    let shown = |key: &str| value.get(key).map(plain).unwrap_or_default();
    let frames = value.get("frames").map_or(&[][..], Value::items);
    let own = frames.iter().find(|f| {
        let file = f.get("filename").and_then(Value::text).unwrap_or_default();
        !file.contains("/torch/") && !file.starts_with('<') && !file.contains("contextlib")
    });
    let frame = own.map(|f| {
        let file = f.get("filename").and_then(Value::text).unwrap_or_default();
        let line = f.get("line").and_then(Value::int).unwrap_or(0);
        format!("{}:{line}", file.rsplit('/').next().unwrap_or(file))
    });
    Entry {
        group: (part(0), part(1)),
        sequence: u64::try_from(sequence).unwrap_or(0),
        is_p2p,
        name: text("profiling_name")
            .trim_start_matches("nccl:")
            .to_owned(),
        sizes: format!(
            "{} {} -> {}",
            shown("input_sizes"),
            shown("input_dtypes"),
            shown("output_sizes")
        ),
        bytes: payload(value, "input_sizes", "input_dtypes").max(payload(
            value,
            "output_sizes",
            "output_dtypes",
        )),
        state: text("state").to_owned(),
        created: int("time_created_ns"),
        frame: frame.unwrap_or_default(),
    }
}

/// Returns the size of one side's tensors in bytes.
fn payload(value: &Value, sizes: &str, types: &str) -> u64 {
    let items = |key: &str| value.get(key).map_or(&[][..], Value::items);
    let bytes = |name: &Value| {
        let name = name.text()?;
        Some(DType::find(|n| n.torch.contains(&name))?.size())
    };
    let elements = |shape: &Value| -> Option<u64> {
        let dims = shape.items().iter();
        let dims: Option<Vec<u64>> = dims.map(|d| u64::try_from(d.int()?).ok()).collect();
        limits::elements(&dims?)
    };
    let each = items(sizes).iter().zip(items(types));
    each.filter_map(|(shape, name)| Some(elements(shape)? * bytes(name)?))
        .sum()
}

/// Formats a value concisely: lists in brackets, text without quotes.
fn plain(value: &Value) -> String {
    match value {
        Value::List(items) => {
            let items: Vec<String> = items.iter().map(plain).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Text(text) => text.to_string(),
        Value::Int(n) => n.to_string(),
        _ => String::new(),
    }
}

impl Entry {
    fn describe(&self) -> String {
        let at = if self.frame.is_empty() {
            String::new()
        } else {
            format!(" at {}", self.frame)
        };
        format!("{} {}{at}", self.name, self.sizes)
    }

    /// Returns the properties that must be equal on all ranks. The sizes of all-to-all collectives
    /// may differ.
    fn signature(&self) -> (&str, &str) {
        let sized = !self.name.contains("all_to_all")
            && !self.name.contains("alltoall")
            && !self.name.contains("barrier");
        (&self.name, if sized { &self.sizes } else { "" })
    }
}

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
    let groups: BTreeSet<&(String, String)> = records
        .iter()
        .flat_map(|r| r.entries.iter().filter(|e| !e.is_p2p).map(|e| &e.group))
        .collect();
    let mut first: Option<(i64, Divergence)> = None;
    for group in groups {
        if let Some((at, found)) = compare_group(records, group, &mut report)
            && first.as_ref().is_none_or(|f| at < f.0)
        {
            first = Some((at, found));
        }
    }
    report.divergence = first.map(|f| f.1);
    Ok(report)
}

/// A rank's record, with the entries of one group by sequence number.
type OfRank<'a> = (&'a FlightRecord, BTreeMap<u64, usize>);

fn compare_group(
    records: &[FlightRecord],
    group: &(String, String),
    report: &mut FlightReport,
) -> Option<(i64, Divergence)> {
    let label = if group.1.is_empty() {
        group.0.clone()
    } else {
        format!("{} ({})", group.1, group.0)
    };
    let of = |r: &'_ FlightRecord| -> BTreeMap<u64, usize> {
        let own = r
            .entries
            .iter()
            .enumerate()
            .filter(|(_, e)| !e.is_p2p && e.group == *group);
        own.map(|(i, e)| (e.sequence, i)).collect()
    };
    // Groups with equal names on disjoint ranks are different groups.
    let mut families: BTreeMap<Vec<u32>, Vec<OfRank<'_>>> = BTreeMap::new();
    for record in records {
        let entries = of(record);
        let members = record.groups.get(&group.0).cloned().unwrap_or_default();
        let belongs = members.is_empty() || members.contains(&record.rank);
        if entries.is_empty() && (members.is_empty() || !belongs) {
            continue;
        }
        families.entry(members).or_default().push((record, entries));
    }
    let mut first: Option<(i64, Divergence)> = None;
    for (members, ranks) in families {
        if ranks.len() < 2 {
            if members.len() > 1 {
                report.notes.push(format!(
                    "process group {label}: records of {} of {} ranks are given",
                    ranks.len(),
                    members.len()
                ));
            }
            continue;
        }
        // A ring buffer may have lost the first collectives.
        let start = ranks
            .iter()
            .filter_map(|(_, e)| e.keys().next().copied())
            .max()
            .unwrap_or(0);
        let end = ranks
            .iter()
            .filter_map(|(_, e)| e.keys().last().copied())
            .max()
            .unwrap_or(0);
        if let Some(found) =
            (start..=end).find_map(|sequence| difference(&ranks, &label, sequence, report))
            && first.as_ref().is_none_or(|f| found.0 < f.0)
        {
            first = Some(found);
        }
    }
    first
}

fn difference(
    ranks: &[OfRank<'_>],
    label: &str,
    sequence: u64,
    report: &mut FlightReport,
) -> Option<(i64, Divergence)> {
    let issued: Vec<(u32, &Entry)> = ranks
        .iter()
        .filter_map(|(r, e)| Some((r.rank, &r.entries[*e.get(&sequence)?])))
        .collect();
    let at = issued.iter().map(|(_, e)| e.created).min()?;
    let describe = |list: &[(u32, &Entry)]| list.iter().map(|(r, e)| (*r, e.describe())).collect();
    let group = label.to_owned();
    let same = issued
        .windows(2)
        .all(|w| w[0].1.signature() == w[1].1.signature());
    if !same {
        return Some((
            at,
            Divergence::Different {
                group,
                sequence,
                ranks: describe(&issued),
            },
        ));
    }
    if issued.len() < ranks.len() {
        let missing = ranks
            .iter()
            .filter(|(_, e)| !e.contains_key(&sequence))
            .map(|(r, e)| {
                let last = e
                    .range(..sequence)
                    .next_back()
                    .map(|(n, i)| format!("{n}: {}", r.entries[*i].describe()));
                (r.rank, last.unwrap_or_else(|| "none".to_owned()))
            });
        return Some((
            at,
            Divergence::Missing {
                group,
                sequence,
                issued: describe(&issued),
                missing: missing.collect(),
            },
        ));
    }
    if issued.iter().any(|(_, e)| e.state != "completed") {
        let states = issued
            .iter()
            .map(|(r, e)| (*r, format!("{} {}", e.state, e.describe())));
        return Some((
            at,
            Divergence::Incomplete {
                group,
                sequence,
                ranks: states.collect(),
            },
        ));
    }
    report.matched += 1;
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rank: u32, names: &[&str]) -> FlightRecord {
        let entries = names.iter().enumerate().map(|(i, name)| Entry {
            group: ("0".into(), "default_pg".into()),
            sequence: i as u64 + 1,
            is_p2p: false,
            name: (*name).into(),
            sizes: "[[4]]".into(),
            bytes: 16,
            state: "completed".into(),
            created: i as i64,
            frame: String::new(),
        });
        FlightRecord {
            rank,
            version: "2.10".into(),
            entries: entries.collect(),
            groups: BTreeMap::from([("0".into(), vec![0, 1])]),
        }
    }

    #[test]
    fn the_first_difference_is_found() {
        let same = ["a", "b", "c"];
        let report = compare(&[record(0, &same), record(1, &same)]).unwrap();
        assert_eq!((report.matched, report.divergence), (3, None));
        let found = compare(&[record(0, &same), record(1, &["a", "x", "c"])])
            .unwrap()
            .divergence;
        assert!(
            matches!(found, Some(Divergence::Different { sequence: 2, .. })),
            "{found:?}"
        );
        let found = compare(&[record(0, &same), record(1, &["a", "b"])])
            .unwrap()
            .divergence;
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
        let found = compare(&[record(0, &same), late]).unwrap().divergence;
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
}
