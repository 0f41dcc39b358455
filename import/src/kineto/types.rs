//! A trace in memory: flat lists of small events.

use super::Head;
use crate::names::{NameId, Names};
use std::collections::BTreeMap;

/// A span of host time: an operator or an annotated range.
#[derive(Clone, Copy, Debug)]
pub struct HostEvent {
    /// Start, nanoseconds.
    pub start: i64,
    /// End, nanoseconds.
    pub end: i64,
    /// Name.
    pub name: NameId,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Whether it is an annotation rather than an operator.
    pub is_annotation: bool,
    /// External id, which device events refer to.
    pub external: Option<u32>,
    /// Autograd's sequence number.
    pub sequence: Option<u32>,
    /// Autograd's number of the thread that ran forward; 0 for forward operators.
    pub forward_thread: u32,
    /// Shapes and types of its inputs, an index into [`Trace::inputs`].
    pub inputs: Option<u32>,
}

/// Inputs of an operator, in the syntax of the profiler's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Inputs {
    /// Dimensions.
    pub dims: NameId,
    /// Types.
    pub types: NameId,
    /// Values of scalars and lists of scalars.
    pub concrete: NameId,
}

/// A call of the CUDA runtime or driver.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Start, nanoseconds.
    pub start: i64,
    /// End, nanoseconds.
    pub end: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Correlation id of the device work.
    pub correlation: u32,
    /// Name.
    pub name: NameId,
}

/// Kind of a device event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Kernel.
    Kernel,
    /// Copy by a copy engine.
    Copy,
    /// Memory fill.
    Fill,
    /// CUDA graph as a whole; its kernels are not in the trace.
    Graph,
}

/// Work on a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceEvent {
    /// Start, nanoseconds.
    pub start: i64,
    /// End, nanoseconds.
    pub end: i64,
    /// Name.
    pub name: NameId,
    /// Kind.
    pub kind: DeviceKind,
    /// Device.
    pub device: u32,
    /// Stream.
    pub stream: u32,
    /// Correlation id of the call that launched it.
    pub correlation: Option<u32>,
    /// External id of the operator that launched it.
    pub external: Option<u32>,
    /// Bytes copied or filled.
    pub bytes: u64,
    /// Description, an index into [`Trace::collectives`].
    pub collective: Option<u32>,
}

/// Arguments of a collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// Name in PyTorch, such as `_allgather_base`.
    pub name: String,
    /// Number of elements that a rank sends.
    pub elements_in: u64,
    /// Number of elements that a rank receives.
    pub elements_out: u64,
    /// Number of ranks of the group.
    pub group_size: u32,
    /// Element type, such as `BFloat16`.
    pub dtype: String,
    /// Name of the process group.
    pub group: String,
    /// Description of the process group.
    pub about: String,
    /// Ranks of the group as text; possibly abbreviated.
    pub ranks: String,
}

/// A call of `record_param_comms`, which describes a collective.
#[derive(Clone, Copy, Debug)]
pub struct CollectiveCall {
    /// Start, nanoseconds.
    pub start: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// External id, which device events refer to.
    pub external: Option<u32>,
    /// Description, an index into [`Trace::collectives`].
    pub collective: u32,
}

/// One end of a link from a forward operator to its backward operator.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Id that both ends share.
    pub id: u64,
    /// Start of the operator, nanoseconds.
    pub at: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
}

/// An allocation or a free of device memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryEvent {
    /// Time, nanoseconds.
    pub at: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Bytes; negative for a free.
    pub bytes: i64,
    /// Address.
    pub address: u64,
    /// Allocated bytes after it.
    pub allocated: u64,
    /// Reserved bytes after it.
    pub reserved: u64,
    /// Device.
    pub device: u32,
}

/// A trace of one rank.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The parts of the file outside of the events.
    pub head: Head,
    /// Texts that events refer to.
    pub names: Names,
    /// Process and thread, as written in the file.
    pub threads: Vec<(String, String)>,
    /// Operators and annotations.
    pub host: Vec<HostEvent>,
    /// Inputs of operators.
    pub inputs: Vec<Inputs>,
    /// Calls of the CUDA runtime and driver.
    pub launches: Vec<Launch>,
    /// Device work.
    pub device: Vec<DeviceEvent>,
    /// Distinct descriptions of collectives.
    pub collectives: Vec<Collective>,
    /// Calls of collectives.
    pub calls: Vec<CollectiveCall>,
    /// Forward ends of flows from forward to backward.
    pub forward: Vec<Flow>,
    /// Backward ends of them.
    pub backward: Vec<Flow>,
    /// Allocations and frees of device memory.
    pub memory: Vec<MemoryEvent>,
    /// Known events without work (names, flows to the device, synchronization), by category.
    pub context: BTreeMap<String, u64>,
    /// Events of unknown kinds, by category.
    pub unknown: BTreeMap<String, u64>,
    /// Number of invalid events.
    pub malformed: u64,
    /// Whether the file ends before its last event.
    pub is_cut_off: bool,
    /// Notes for the reader: where the file was cut off, where events are malformed.
    pub notes: Vec<String>,
    /// Bytes of text.
    pub bytes: u64,
    /// Number of events.
    pub events: u64,
}

impl Trace {
    /// Returns the name of an event.
    #[must_use]
    pub fn name(&self, id: NameId) -> &str {
        self.names.get(id)
    }
}
