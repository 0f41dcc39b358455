//! The fields of a trace other than its events.

use crate::limits;
use serde::Deserialize;
use serde_json::Value;

/// A process group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Group {
    /// Name.
    #[serde(rename = "pg_name")]
    pub name: String,
    /// Description, such as `default_pg` or `mesh_dp_shard`.
    #[serde(rename = "pg_desc")]
    pub about: String,
    /// Number of ranks.
    #[serde(rename = "pg_size")]
    pub size: u32,
    /// Ranks.
    pub ranks: Vec<u32>,
}

/// What recorded a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recorder {
    /// The PyTorch profiler.
    #[default]
    Kineto,
    /// Nsight Systems, which knows no operators: neither their shapes nor the groups of
    /// collectives.
    Nsight,
    /// PyTorch's observer of execution traces.
    Observer,
}

/// The root object of a trace without its events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Head {
    /// What recorded the trace.
    pub recorder: Recorder,
    /// Rank; `None` if the job was not distributed or the profiler did not know it.
    pub rank: Option<u32>,
    /// Number of ranks of the job.
    pub world_size: Option<u32>,
    /// Process groups.
    pub groups: Vec<Group>,
    /// Version of NCCL.
    pub nccl: Option<String>,
    /// Names of the devices.
    pub devices: Vec<String>,
    /// Memory of a device, bytes.
    pub device_bytes: Option<u64>,
    /// Origin of times, nanoseconds since 1970.
    pub base: i64,
    /// Whether shapes were recorded.
    pub shapes: bool,
    /// Errors logged by the profiler.
    pub errors: Vec<String>,
    /// Id that is different for each rank and each session.
    pub trace_id: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Distributed {
    rank: Option<u32>,
    world_size: Option<u32>,
    pg_config: Value,
    nccl_version: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Device {
    name: String,
    #[serde(rename = "totalGlobalMem")]
    memory: Option<u64>,
}

impl Head {
    /// Reads a field of the root. Unknown fields are ignored.
    pub(super) fn take(&mut self, key: &str, value: &[u8]) {
        match key {
            "distributedInfo" => {
                let all: Distributed = parse(value);
                self.rank = all.rank;
                self.world_size = all.world_size;
                self.nccl = all.nccl_version;
                // Some versions write the groups as text.
                self.groups = match all.pg_config {
                    Value::String(text) => parse(text.as_bytes()),
                    other => serde_json::from_value(other).unwrap_or_default(),
                };
            }
            "deviceProperties" => {
                let all: Vec<Device> = parse(value);
                self.device_bytes = all.first().and_then(|d| d.memory);
                self.devices = all.into_iter().map(|d| d.name).collect();
            }
            "baseTimeNanoseconds" => {
                let base: i64 = parse(value);
                // A damaged origin would shift all times out of their range.
                self.base = if (0..limits::TIME).contains(&base) {
                    base
                } else {
                    0
                };
            }
            "record_shapes" => self.shapes = matches!(value, b"1" | b"true"),
            "trace_id" => self.trace_id = parse(value),
            "ERROR" => self.errors = parse(value),
            _ => {}
        }
    }
}

fn parse<T: Default + for<'a> Deserialize<'a>>(text: &[u8]) -> T {
    serde_json::from_slice(text).unwrap_or_default()
}
