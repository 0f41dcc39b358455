//! Dumps of NCCL's flight recorder: finds where ranks diverge, and the first collective that
//! differs.

mod compare;
mod messages;
mod program;
mod report;

pub use compare::compare;
pub use program::{ProgramCheck, Unexpected, check};
pub use report::{Divergence, FlightReport, list};

use crate::ImportError;
use crate::limits;
use crate::pickle::{self, Value};
use shardlab_plan::ir::DType;
use std::collections::BTreeMap;
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
        is_partial: (entries.items().first())
            .and_then(|e| e.get("record_id")?.int())
            .is_some_and(|n| n > 0),
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
    let tensors = |sizes: &str, types: &str| Tensors {
        sizes: shown(sizes),
        types: shown(types),
    };
    let (backend, name) = text("profiling_name")
        .rsplit_once(':')
        .unwrap_or(("", text("profiling_name")));
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
