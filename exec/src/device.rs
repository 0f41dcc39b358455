//! The interface between the interpreter and hardware.
//!
//! The interpreter ([`crate::engine`]) walks a program in host order and passes commands with
//! resolved addresses to a [`Device`]. A device has streams, events, graphs, memory and
//! collectives, but no concept of buffers, sections or policies. One device serves one rank.
//! Devices of different ranks synchronize in their collectives.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod factory;
pub mod null;

pub use crate::base::abort::Abort;
pub use crate::base::failure::{Failure, FailureKind, Stop};
pub use crate::base::operand::NO_HYPER;
use crate::base::operand::{Hyper, RawRange};
pub use factory::{CpuFactory, DeviceFactory, Setup};
use shardlab_plan::ir::{CollectiveId, EventId, InstrId, KernelId, StreamId};
use shardlab_plan::units::Bytes;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Work for a stream, with resolved addresses.
#[derive(Clone, Debug)]
pub enum Command {
    /// Launches a kernel.
    Launch {
        /// Instruction.
        instr: InstrId,
        /// Kernel.
        kernel: KernelId,
        /// Number of `ranges` that are read. The others are written.
        reads: u32,
        /// Operands.
        ranges: SmallVec<[RawRange; 6]>,
    },
    /// Runs a collective.
    Collective {
        /// Instruction.
        instr: InstrId,
        /// Descriptor.
        id: CollectiveId,
        /// Input and output of each part.
        parts: SmallVec<[(RawRange, RawRange); 1]>,
    },
    /// Copies memory with a copy engine.
    Copy {
        /// Instruction.
        instr: InstrId,
        /// Source.
        from: RawRange,
        /// Destination, of equal length.
        to: RawRange,
    },
    /// Completes an event.
    Record {
        /// Instruction.
        instr: InstrId,
        /// Event.
        event: EventId,
    },
    /// Makes later work of the stream wait until the event has completed.
    Wait {
        /// Instruction.
        instr: InstrId,
        /// Event.
        event: EventId,
    },
    /// Sets every byte of a range.
    Fill {
        /// Instruction that needs the fill.
        instr: InstrId,
        /// Range.
        to: RawRange,
        /// Byte.
        byte: u8,
    },
    /// Uploads an input of the step from the host to device memory.
    Upload {
        /// Instruction that allocates its memory.
        instr: InstrId,
        /// Range.
        to: RawRange,
        /// Data of the same length.
        data: Arc<[u8]>,
    },
    /// Uploads the initial contents of a buffer from the host to device memory.
    Preset {
        /// Instruction that needs the contents.
        instr: InstrId,
        /// Range.
        to: RawRange,
        /// Data of the same length.
        data: Arc<[u8]>,
    },
    /// Writes the sum of squares of floats to a host slot.
    Squares {
        /// Instruction that reads the floats.
        instr: InstrId,
        /// Ranges of floats.
        from: SmallVec<[RawRange; 1]>,
        /// Slot.
        slot: u32,
    },
    /// Copies a float32 scalar to a host slot.
    Read {
        /// Instruction that produced it.
        instr: InstrId,
        /// Scalar.
        from: RawRange,
        /// Slot.
        slot: u32,
    },
}

impl Command {
    /// Returns the instruction that the command runs or belongs to.
    #[must_use]
    pub const fn instr(&self) -> InstrId {
        match *self {
            Self::Launch { instr, .. }
            | Self::Collective { instr, .. }
            | Self::Copy { instr, .. }
            | Self::Record { instr, .. }
            | Self::Wait { instr, .. }
            | Self::Fill { instr, .. }
            | Self::Upload { instr, .. }
            | Self::Preset { instr, .. }
            | Self::Squares { instr, .. }
            | Self::Read { instr, .. } => instr,
        }
    }

    /// Returns whether the command is the device task of an instruction, which gets a span.
    #[must_use]
    pub(crate) const fn is_task(&self) -> bool {
        matches!(
            self,
            Self::Launch { .. } | Self::Collective { .. } | Self::Copy { .. } | Self::Upload { .. }
        )
    }
}

/// Id of a captured list of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphId(pub usize);

/// Addresses of an allocator region that a device must back with memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Allocator addresses.
    pub addresses: Range<u64>,
    /// Bytes that are expected to be used. The rest allows for growth.
    pub used: u64,
    /// End of the addresses that are expected to be used.
    pub touched: u64,
}

/// Settings of a pass over a section.
#[derive(Clone, Debug)]
pub struct Pass {
    /// Optimizer settings.
    pub hyper: Hyper,
    /// Number of host slots that [`Command::Read`] and [`Command::Squares`] may refer to.
    pub slots: u32,
    /// Record the times of tasks.
    pub record: bool,
    /// Replay graphs as individual launches, which is required for per-kernel timing. Must be equal
    /// on all ranks: a collective inside a CUDA graph may not match one outside.
    pub replay_as_instructions: bool,
    /// Data to upload, in order. A device may stage them before the pass starts.
    pub inputs: Vec<Arc<[u8]>>,
}

/// Times of a task, and the event that it waited for. Times are in nanoseconds of the device's
/// clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskTimes {
    /// Index of the task in issue order of the pass.
    pub task: u32,
    /// Time at which the host issued it.
    pub issued: u64,
    /// Time at which its stream reached it.
    pub ready: u64,
    /// Time at which its communicator was free for it (for collectives; otherwise equal to
    /// `ready`).
    pub free: u64,
    /// Time at which it started. A collective starts when the last rank has arrived.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// The last event that its stream waited for since the previous task, and the time at which
    /// that wait ended.
    pub waited: Option<(EventId, u64)>,
}

/// Hardware of one rank. All calls come from the rank's host thread. If a call returns [`Stop`],
/// the cause is in the session's [`Abort`].
pub trait Device: Send {
    /// Returns the device's name for run records.
    fn name(&self) -> String;

    /// Backs allocator addresses with zeroed memory. Called once, before all other calls.
    ///
    /// # Errors
    /// Returns a message if the machine does not have enough memory.
    fn map(&mut self, regions: &[Region]) -> Result<(), String>;

    /// Registers the device's memory with the other ranks, if they need to access it. Called once,
    /// after `map` has returned on all ranks of this process. May wait for other ranks.
    ///
    /// # Errors
    /// Returns a message if the memory cannot be registered on this rank or another one.
    fn register_memory(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Returns the device address of an allocator address; `None` if the range of `bytes` bytes is
    /// outside all regions.
    ///
    /// # Errors
    /// Returns a kind and a message if the machine has no memory for the range.
    fn pointer(&self, address: u64, bytes: u64) -> Result<Option<*mut u8>, (FailureKind, String)>;

    /// Starts a pass on an idle device: all events are incomplete and all slots are 0.
    ///
    /// # Errors
    /// Returns [`Stop`] if the session is aborted.
    fn begin(&mut self, pass: Pass) -> Result<(), Stop>;

    /// Enqueues a command. Blocks while the stream's queue is full. `task` is the index of the task
    /// in issue order.
    ///
    /// # Errors
    /// Returns [`Stop`] if the session is aborted, or if the command cannot be enqueued.
    fn submit(&mut self, stream: StreamId, command: Command, task: u32) -> Result<(), Stop>;

    /// Captures commands for [`Device::replay`].
    ///
    /// # Errors
    /// Returns [`Stop`] if the session is aborted, or if a command cannot be captured.
    fn capture(&mut self, commands: Vec<(StreamId, Command)>) -> Result<GraphId, Stop>;

    /// Enqueues captured commands. `first` is the index of their first task.
    ///
    /// # Errors
    /// Returns [`Stop`] if the session is aborted, or if the commands cannot be enqueued.
    fn replay(&mut self, graph: GraphId, first: u32) -> Result<(), Stop>;

    /// Blocks the host until the event has completed. `instr` is used in messages.
    ///
    /// # Errors
    /// Returns [`Stop`] if the session is aborted before that, for example by the watchdog.
    fn host_wait(&mut self, instr: InstrId, event: EventId) -> Result<(), Stop>;

    /// Blocks the host until all enqueued work has completed.
    ///
    /// # Errors
    /// Returns [`Stop`] if the session is aborted before that, for example by the watchdog.
    fn idle(&mut self) -> Result<(), Stop>;

    /// Returns whether work is enqueued or running.
    fn is_busy(&mut self) -> bool;

    /// Returns the value of a slot. The value is valid when the device is idle, or after the host
    /// has waited for an event after the read.
    fn slot(&self, slot: u32) -> f32;

    /// Returns the nanoseconds since the session started.
    fn now(&self) -> u64;

    /// Returns the times of the tasks of the pass, in any order. The device must be idle.
    fn times(&mut self) -> Vec<TaskTimes>;

    /// Copies device memory to the host. The range is backed memory that no work in flight writes
    /// to.
    fn read(&self, range: RawRange) -> Vec<u8>;

    /// Copies host memory to the device. The range is backed memory that no work in flight uses;
    /// `data` has its length.
    fn write(&mut self, range: RawRange, data: &[u8]);

    /// Ends work in flight after a failure. Returns whether the device may be dropped: `false` if
    /// its driver would wait forever for work that has not ended.
    fn shutdown(&mut self) -> bool {
        true
    }

    /// Returns whether recording times is cheap enough to record every step.
    fn records_freely(&self) -> bool {
        true
    }

    /// Returns notes on the device for the user.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns facts for the run's environment: hardware, libraries, settings.
    fn facts(&mut self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// Returns the bytes in use on the whole device, if known: the engine's memory and that of
    /// contexts and libraries.
    fn device_bytes(&mut self) -> Option<Bytes> {
        None
    }
}
