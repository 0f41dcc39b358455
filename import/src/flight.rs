//! Dumps of NCCL's flight recorder: finds where ranks diverge, and the first collective that
//! differs.

mod causes;
mod compare;
mod files;
mod messages;
mod program;
mod report;

pub use compare::compare;
pub(crate) use files::read_all;
pub use program::{ProgramCheck, Unexpected, check};
pub use report::{Divergence, FlightReport, list};

use crate::ImportError;
use crate::frames;
use crate::limits;
use crate::pickle::{self, Value};
use shardlab_plan::ir::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

/// The tensors on one side of a collective, as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Shapes, such as `[[4, 8], [2]]`.
    pub sizes: String,
    /// Element types, such as `[Float, Float]`.
    pub types: String,
}

/// A collective or a point-to-point message as recorded by a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of entries that the rank recorded before.
    pub id: u64,
    /// Process group: name and description.
    pub group: (String, String),
    /// Sequence number within the group. Collectives and point-to-point messages have separate
    /// counters.
    pub sequence: u64,
    /// Whether it is a point-to-point message.
    pub is_p2p: bool,
    /// Library that runs it, such as `nccl` or `gloo`.
    pub backend: String,
    /// Name, such as `all_gather` or `send 0->1`.
    pub name: String,
    /// Inputs.
    pub inputs: Tensors,
    /// Outputs.
    pub outputs: Tensors,
    /// Payload: size of the larger side in bytes; 0 if its types are unknown.
    pub bytes: u64,
    /// `scheduled`, `started` or `completed`.
    pub state: String,
    /// Whether the recorder no longer follows it. NCCL also retires what timed out.
    pub is_retired: bool,
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
    /// Collectives and messages in the order of issue.
    pub entries: Vec<Entry>,
    /// Whether the ring buffer has overwritten the first ones.
    pub is_partial: bool,
    /// Ranks of each group, by name; empty if the record does not contain them.
    pub groups: BTreeMap<String, Vec<u32>>,
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
    let groups = groups(&value);
    let first = entries.items().first();
    let of_id = match first.is_some_and(|e| e.get("process_group").is_none()) {
        true => named_by_ranks(&groups),
        false => BTreeMap::new(),
    };
    let version = (value.get("version").and_then(Value::text)).unwrap_or_default();
    let mut all = Vec::new();
    for (i, value) in entries.items().iter().enumerate() {
        let read = entry(value, i as u64, &of_id);
        all.push(read.ok_or_else(|| {
            ImportError::invalid(
                path,
                format!(
                    "entry {i} of the flight record has no process group (`process_group` or `pg_id`), or no number within it (`collective_seq_id` or `seq_id`); its format {version:?} is unknown, 1.x and 2.x are expected"
                ),
            )
        })?);
    }
    let groups = groups.into_iter().map(|(name, ranks)| {
        let name = of_id.get(&name).cloned().unwrap_or(name);
        (name, ranks)
    });
    Ok(FlightRecord {
        rank: value
            .get("rank")
            .and_then(Value::int)
            .and_then(|r| u32::try_from(r).ok())
            .unwrap_or(rank),
        version: version.to_owned(),
        groups: groups.collect(),
        is_partial: (entries.items().first())
            .and_then(|e| e.get("record_id")?.int())
            .is_some_and(|n| n > 0),
        entries: all,
    })
}

/// Returns the ranks of the groups by name or, in format 1.x, by id.
fn groups(value: &Value) -> BTreeMap<String, Vec<u32>> {
    let all = value.get("pg_config").map_or(&[][..], Value::pairs);
    let all = all.iter().filter_map(|(name, config)| {
        let ranks = config.get("ranks").unwrap_or(config);
        let ranks = match ranks.text() {
            Some(list) => serde_json::from_str(list).unwrap_or_default(),
            None => ranks
                .items()
                .iter()
                .filter_map(|r| u32::try_from(r.int()?).ok())
                .collect(),
        };
        let name = (name.text().map(str::to_owned)).or_else(|| Some(name.int()?.to_string()));
        Some((name?, ranks))
    });
    all.collect()
}

/// Returns a name for each id of a group. Format 1.x has no names, and a rank counts only its own
/// groups, so that one id is different groups on different ranks. Groups are named by their ranks,
/// and numbered if several have the same ones.
fn named_by_ranks(groups: &BTreeMap<String, Vec<u32>>) -> BTreeMap<String, String> {
    let ids = groups.iter().filter_map(|(id, ranks)| {
        let number: u64 = id.parse().ok()?;
        (!ranks.is_empty()).then_some((number, id, ranks))
    });
    let mut ids: Vec<_> = ids.collect();
    ids.sort_unstable();
    let mut seen: BTreeMap<&Vec<u32>, u32> = BTreeMap::new();
    let named = ids.into_iter().map(|(_, id, ranks)| {
        let count = seen.entry(ranks).or_default();
        *count += 1;
        let ranks: BTreeSet<u32> = ranks.iter().copied().collect();
        let name = match *count {
            1 => list(&ranks),
            n => format!("{} #{n}", list(&ranks)),
        };
        (id.clone(), name)
    });
    named.collect()
}

/// Reads an entry; `place` is its position. Returns nothing if it has no group or no sequence
/// number. `of_id` has the names of groups that are known by their id.
fn entry(value: &Value, place: u64, of_id: &BTreeMap<String, String>) -> Option<Entry> {
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
    let group = match value.get("process_group") {
        Some(_) => (part(0), part(1)),
        None => {
            let id = value.get("pg_id").and_then(Value::int)?.to_string();
            (of_id.get(&id).cloned().unwrap_or(id), String::new())
        }
    };
    let shown = |key: &str| value.get(key).map(plain).unwrap_or_default();
    let tensors = |sizes: &str, types: &str| Tensors {
        sizes: shown(sizes),
        types: shown(types),
    };
    let (backend, name) = text("profiling_name")
        .rsplit_once(':')
        .unwrap_or(("", text("profiling_name")));
    // Format 1.x has one counter, and no mark for messages.
    let is_p2p = match value.get("is_p2p").and_then(Value::int) {
        Some(mark) => mark == 1,
        None => name.starts_with("send ") || name.starts_with("recv "),
    };
    let key = if is_p2p {
        "p2p_seq_id"
    } else {
        "collective_seq_id"
    };
    let sequence = value.get(key).or_else(|| value.get("seq_id"));
    let sequence = sequence.and_then(Value::int)?;
    let all = value.get("frames").map_or(&[][..], Value::items);
    let own = all.iter().find(|f| frames::is_of_user(file(f)));
    let frame = own.map(|f| {
        let line = f.get("line").and_then(Value::int).unwrap_or(0);
        frames::line(file(f), line)
    });
    let id = value.get("record_id").and_then(Value::int);
    Some(Entry {
        id: id.and_then(|n| u64::try_from(n).ok()).unwrap_or(place),
        group,
        sequence: u64::try_from(sequence).unwrap_or(0),
        is_p2p,
        backend: backend.to_owned(),
        name: name.to_owned(),
        inputs: tensors("input_sizes", "input_dtypes"),
        outputs: tensors("output_sizes", "output_dtypes"),
        bytes: payload(value, "input_sizes", "input_dtypes").max(payload(
            value,
            "output_sizes",
            "output_dtypes",
        )),
        state: text("state").to_owned(),
        is_retired: value.get("retired").and_then(Value::int) == Some(1),
        created: int("time_created_ns"),
        frame: frame.unwrap_or_default(),
    })
}

/// Returns the file of a frame.
fn file(frame: &Value) -> &str {
    let name = frame.get("filename").and_then(Value::text);
    name.unwrap_or_default()
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
        let (from, to) = (&self.inputs, &self.outputs);
        // Most collectives do not convert, so that one type says it all.
        let types = if from.types == to.types || to.sizes == "[]" {
            String::new()
        } else {
            format!(" {}", to.types)
        };
        format!(
            "{} {} {} -> {}{types}{at}",
            self.name, from.sizes, from.types, to.sizes
        )
    }

    /// Returns whether nothing says that it started or completed. NCCL updates states: before its
    /// first collective starts, all of them are scheduled.
    fn has_no_state(&self) -> bool {
        self.state == "scheduled" && !self.is_retired && !self.is_of_nccl()
    }

    /// Returns the state for the reader.
    fn shown_state(&self) -> &str {
        if self.is_completed() {
            "completed"
        } else {
            &self.state
        }
    }

    /// Returns whether the recorder has seen it complete.
    fn is_completed(&self) -> bool {
        // Other backends do not update the state, but retire what has completed. NCCL's watchdog
        // also retires what timed out.
        self.state == "completed" || self.is_retired && !self.is_of_nccl()
    }

    fn is_of_nccl(&self) -> bool {
        self.backend.starts_with("nccl")
    }

    /// Returns whether it ends a coalesced group. NCCL follows only this entry of a group.
    fn ends_group(&self) -> bool {
        self.name.to_ascii_lowercase().ends_with("coalesced")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    fn record(rank: u32, json: &Json) -> Result<FlightRecord, ImportError> {
        read(json.to_string().as_bytes(), Path::new("record"), rank)
    }

    /// Records of PyTorch 2.3: ids of groups count the groups of a rank, so that id 1 is group 0, 1
    /// on two ranks and 2, 3 on the others. Rank 3 does not issue its last collective.
    #[test]
    fn records_of_format_1_have_ids_instead_of_names() {
        let of = |rank: u32, last: u64| {
            let entry = |id: u32, sequence: u64, state: &str| {
                json!({
                    "pg_id": id, "seq_id": sequence, "profiling_name": "nccl:all_reduce",
                    "input_sizes": [[4]], "output_sizes": [[4]], "state": state,
                })
            };
            let mut entries = vec![entry(0, 1, "completed")];
            entries.extend(
                (1..=last).map(|n| entry(1, n, if n < 3 { "completed" } else { "started" })),
            );
            let shard = if rank < 2 { [0, 1] } else { [2, 3] };
            let json = json!({
                "version": "1.4", "entries": entries,
                "pg_config": {"0": [0, 1, 2, 3], "1": shard},
            });
            record(rank, &json).unwrap()
        };
        let healthy: Vec<_> = (0..4).map(|rank| of(rank, 2)).collect();
        let report = compare(&healthy).unwrap();
        assert_eq!((report.matched, report.divergence), (5, None));
        let hang = [of(0, 2), of(1, 2), of(2, 3), of(3, 2)];
        let found = compare(&hang).unwrap().divergence.unwrap();
        let expected = "rank 3 does not issue number 3 of process group ranks 2, 3";
        assert_eq!(found.brief(), expected);
    }

    #[test]
    fn records_without_sequence_numbers_are_refused() {
        let entry = json!({"process_group": ["0", ""], "profiling_name": "nccl:all_reduce"});
        let refused = record(0, &json!({"version": "3.0", "entries": [entry]}));
        let said = refused.unwrap_err().to_string();
        assert!(
            said.contains("entry 0") && said.contains("\"3.0\""),
            "{said}"
        );
    }

    #[test]
    fn groups_of_the_same_ranks_have_different_names() {
        let groups = [("0", vec![0, 1]), ("10", vec![0, 1]), ("2", vec![1])];
        let groups = groups.map(|(id, ranks)| (id.to_owned(), ranks)).into();
        let names: Vec<String> = named_by_ranks(&groups).into_values().collect();
        assert_eq!(names, ["ranks 0, 1", "ranks 0, 1 #2", "rank 1"]);
    }
}
