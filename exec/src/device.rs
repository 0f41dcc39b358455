//! The seam between the interpreter and hardware.
//!
//! The interpreter ([`crate::engine`]) walks a program in host order and tells a [`Device`] what to enqueue, with every
//! address resolved. A device knows streams, events, graphs, memory and collectives; it knows nothing of buffers, sections
//! or policies. One device serves one rank; devices of different ranks meet in their collectives.

pub mod abort;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod factory;
pub(crate) mod muster;
pub mod null;

use crate::operand::{Hyper, RawRange};
pub use abort::{Abort, Failure, FailureKind, Stop};
pub use factory::{CpuFactory, DeviceFactory, Setup};
use shardlab_plan::ir::{CollectiveId, EventId, InstrId, KernelId, StreamId};
use shardlab_plan::units::Bytes;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Work for a stream, with addresses resolved.
#[derive(Clone, Debug)]
pub enum Command {
    /// A kernel.
    Launch {
        /// Instruction.
        instr: InstrId,
        /// Kernel.
        kernel: KernelId,
        /// How many of `ranges` are read; the rest is written.
        reads: u32,
        /// Operands.
        ranges: SmallVec<[RawRange; 6]>,
    },
    /// A collective.
    Collective {
        /// Instruction.
        instr: InstrId,
        /// Descriptor.
        id: CollectiveId,
        /// Input and output of each part.
        parts: SmallVec<[(RawRange, RawRange); 1]>,
    },
    /// A copy by a copy engine.
    Copy {
        /// Instruction.
        instr: InstrId,
        /// Source.
        from: RawRange,
        /// Destination, of equal length.
        to: RawRange,
    },
    /// The event completes.
    Record {
        /// Instruction.
        instr: InstrId,
        /// Event.
        event: EventId,
    },
    /// Nothing later on the stream starts before the event has completed.
    Wait {
        /// Instruction.
        instr: InstrId,
        /// Event.
        event: EventId,
    },
    /// Sets every byte.
    Fill {
        /// Instruction that made it necessary.
        instr: InstrId,
        /// Range.
        to: RawRange,
        /// Byte.
        byte: u8,
    },
    /// An input of the step, from the host into device memory.
    Upload {
        /// Instruction that allocates its memory.
        instr: InstrId,
        /// Range.
        to: RawRange,
        /// Data of the same length.
        data: Arc<[u8]>,
    },
    /// What a buffer holds at first, from the host into device memory.
    Preset {
        /// Instruction that made it necessary.
        instr: InstrId,
        /// Range.
        to: RawRange,
        /// Data of the same length.
        data: Arc<[u8]>,
    },
    /// Sum of squares of floats into a host slot.
    Squares {
        /// Instruction that they belong to.
        instr: InstrId,
        /// Numbers.
        from: SmallVec<[RawRange; 1]>,
        /// Slot.
        slot: u32,
    },
    /// A float32 scalar into a host slot.
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
    /// The instruction that it performs or belongs to.
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

    /// Whether it is an instruction's device task, which gets a span.
    #[must_use]
    pub const fn is_task(&self) -> bool {
        matches!(
            self,
            Self::Launch { .. } | Self::Collective { .. } | Self::Copy { .. } | Self::Upload { .. }
        )
    }
}

/// Settings of a pass that runs no optimizer.
pub const NO_HYPER: Hyper = Hyper {
    lr: 0.0,
    betas: [0.0; 2],
    eps: 0.0,
    weight_decay: 0.0,
    clip_norm: 0.0,
    step: 0,
};

/// A captured list of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphId(pub usize);

/// Addresses of one allocator region that a device must back with real memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Allocator addresses.
    pub addresses: Range<u64>,
    /// Bytes of it that are expected to be touched (the rest is room to grow).
    pub used: u64,
    /// End of the addresses that are expected to be touched.
    pub touched: u64,
}

/// What a pass over a section needs to know.
#[derive(Clone, Debug)]
pub struct Pass {
    /// Optimizer settings.
    pub hyper: Hyper,
    /// Host slots that [`Command::Read`] may name.
    pub slots: u32,
    /// Keep times of tasks.
    pub record: bool,
    /// Issue captured commands one by one, as whoever keeps times has to. All ranks do or none does: a collective that one
    /// rank issues as part of a graph and another on its own need not meet.
    pub singly: bool,
    /// What will be uploaded, in order: a device may bring it nearer before the pass begins.
    pub inputs: Vec<Arc<[u8]>>,
}

/// When a task was ready, ran, and what it waited for. Times are nanoseconds of the device's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskTimes {
    /// Number of the task in issue order of the pass.
    pub task: u32,
    /// When the host issued it.
    pub issued: u64,
    /// When its stream came to it.
    pub ready: u64,
    /// When its communicator was free for it (collectives; else `ready`).
    pub free: u64,
    /// When it began: for a collective, when the last rank had arrived.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// The last event that its stream waited for since the task before, and when that wait ended.
    pub waited: Option<(EventId, u64)>,
}

/// A rank's hardware. Every call comes from the rank's host thread; a [`Stop`] means that the session's [`Abort`] knows why.
pub trait Device: Send {
    /// Name for run records.
    fn name(&self) -> String;

    /// Backs allocator addresses with memory that holds zeros. Called once, before anything else.
    ///
    /// # Errors
    /// In words, if the machine has not enough memory.
    fn map(&mut self, regions: &[Region]) -> Result<(), String>;

    /// Makes its memory known to the other ranks, where they need to. Called once, when all ranks of this process have theirs; it may wait
    /// for them.
    ///
    /// # Errors
    /// In words.
    fn meet(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Device address of an allocator address; `None` if the `bytes` from there on are outside of every region.
    ///
    /// # Errors
    /// Kind and words, if the machine refuses memory for them.
    fn pointer(&self, address: u64, bytes: u64) -> Result<Option<*mut u8>, (FailureKind, String)>;

    /// Starts a pass on an idle device: all events are incomplete, all slots 0.
    ///
    /// # Errors
    /// [`Stop`].
    fn begin(&mut self, pass: Pass) -> Result<(), Stop>;

    /// Enqueues a command; blocks while the stream's queue is full. `task` numbers tasks in issue order.
    ///
    /// # Errors
    /// [`Stop`].
    fn submit(&mut self, stream: StreamId, command: Command, task: u32) -> Result<(), Stop>;

    /// Keeps commands for [`Device::replay`].
    ///
    /// # Errors
    /// [`Stop`].
    fn capture(&mut self, commands: Vec<(StreamId, Command)>) -> Result<GraphId, Stop>;

    /// Enqueues captured commands once more; tasks are numbered from `first`.
    ///
    /// # Errors
    /// [`Stop`].
    fn replay(&mut self, graph: GraphId, first: u32) -> Result<(), Stop>;

    /// Blocks the host until the event has completed. `instr` is for messages.
    ///
    /// # Errors
    /// [`Stop`].
    fn host_wait(&mut self, instr: InstrId, event: EventId) -> Result<(), Stop>;

    /// Blocks the host until nothing is enqueued.
    ///
    /// # Errors
    /// [`Stop`].
    fn idle(&mut self) -> Result<(), Stop>;

    /// Whether anything is enqueued or running.
    fn is_busy(&mut self) -> bool;

    /// A slot's value; complete once the device is idle or the host has waited for an event behind the read.
    fn slot(&self, slot: u32) -> f32;

    /// Nanoseconds since the session's start.
    fn now(&self) -> u64;

    /// Times of the tasks of the pass so far, in no order; the device is idle.
    fn times(&mut self) -> Vec<TaskTimes>;

    /// Copies device memory to the host. The range is backed memory that no work in flight writes.
    fn read(&self, range: RawRange) -> Vec<u8>;

    /// Copies host memory to the device, likewise. `data` has the range's length.
    fn write(&mut self, range: RawRange, data: &[u8]);

    /// Ends what is in flight, after a failure. Whether the device may be dropped then: `false` where its driver would wait for
    /// ever for work that has not ended.
    fn cease(&mut self) -> bool {
        true
    }

    /// Whether recording times changes them so little that every step may be recorded.
    fn records_freely(&self) -> bool {
        true
    }

    /// What the user should know before the first step.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Facts for the run's environment: hardware, libraries, settings.
    fn facts(&mut self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// Bytes in use on the whole device, where it can tell: the engine's memory, and that of contexts and libraries.
    fn device_bytes(&mut self) -> Option<Bytes> {
        None
    }
}
