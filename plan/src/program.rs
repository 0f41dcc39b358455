//! The program: every decision of a training step, written down as instructions.
//!
//! One instruction list a rank, in host issue order. Ranks differ in offsets, not in shape (SPMD), so one list stands
//! for all of them: the ranges of a sharded buffer are those of rank 0's shard, and an interpreter shifts them by its
//! position in the communicator. `sim` prices the list, `exec` performs it, `check` proves things about it.
//!
//! Sections run as: `Init` once, `First` once, then `Steady` for every further step; `Validation`, where present, runs
//! between steps. Every event a section waits for is recorded in that section, and every buffer a section allocates is
//! freed in it, except persistent ones (from `Init`, and optimizer state from `First`).

mod digest;
pub mod rule;
mod shard_op;
mod text;

pub use crate::compile::tape::{
    BodyOp, Const, ConstId, HostWorkKind, Kernel, KernelClass, KernelId, Module, ModuleId,
    ModuleKind, Param, ParamId, Place, Shape, Slot, Source, Storage, StorageId, StorageRole,
};
use crate::shard::Group;
use crate::units::{Bytes, DType, Flops};
pub use rule::Rule;
use serde::{Deserialize, Serialize};
pub use shard_op::ShardOp;
use smallvec::SmallVec;
use std::ops::Range;

macro_rules! id {
    ($(#[$m:meta])* $name:ident($t:ty)) => {
        $(#[$m])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $t);
        impl $name {
            /// As an index into the table it belongs to.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}
id!(
    /// Index into [`Program::buffers`].
    BufferId(u32)
);
id!(
    /// An event; recorded at most once a pass over its section.
    EventId(u32)
);
id!(
    /// Index into [`Program::streams`].
    StreamId(u8)
);
id!(
    /// Index into [`Program::communicators`].
    CommId(u8)
);
id!(
    /// Index into [`Program::collectives`].
    CollectiveId(u32)
);
id!(
    /// Index into [`Program::copies`].
    CopyId(u32)
);
id!(
    /// Index into [`Program::units`].
    UnitId(u16)
);
id!(
    /// Index into [`Program::groups`].
    GroupId(u16)
);
id!(
    /// Index into [`Program::scopes`].
    ScopeId(u16)
);
id!(
    /// Position in [`Program::instrs`]: stable for one scenario, and what spans refer to.
    InstrId(u32)
);

/// The stream every program has, where model kernels run.
pub const COMPUTE: StreamId = StreamId(0);

/// What a stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamKind {
    /// Model kernels.
    Compute,
    /// All-gathers of the inner axis.
    AllGather,
    /// Reduce-scatters of the inner axis.
    ReduceScatter,
    /// Collectives of the outer axis.
    Outer,
    /// Casts and copies into gather buffers.
    CopyIn,
    /// Host to device.
    H2d,
    /// Device to host.
    D2h,
}

impl StreamKind {
    /// Name in program text and traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Outer => "outer",
            Self::CopyIn => "copy_in",
            Self::H2d => "h2d",
            Self::D2h => "d2h",
        }
    }
}

/// A FIFO queue of device work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stream {
    /// Kind.
    pub kind: StreamKind,
    /// CUDA convention: lower is more urgent; 0 is the default, -1 high.
    pub priority: i8,
}

/// Mesh axis of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Inner (sharding) axis: consecutive ranks.
    Shard,
    /// Outer axis: ranks `dp_shard` apart.
    Outer,
    /// A part of the shard axis (integer reshard): consecutive ranks.
    SubShard,
    /// All ranks.
    World,
}

/// A communicator. It runs its collectives one after another in host launch order, whatever their streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Communicator {
    /// Name, for example `shard`, `shard_rs`, `outer`.
    pub name: String,
    /// Axis.
    pub axis: Axis,
    /// Ranks in it.
    pub size: u32,
    /// Distance between neighbouring members in world rank.
    pub stride: u32,
    /// Its collectives run on copy engines and hold no SMs.
    #[serde(skip_serializing_if = "is_false")]
    pub copy_engine: bool,
}

/// What is not so is not written: a program keeps the digest that it had before there was the choice.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for a reference"
)]
fn is_false(x: &bool) -> bool {
    !*x
}

/// What a buffer is for. Peaks are broken down by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Compute-dtype weights at rest (a shard, or full where parameters are not sharded).
    ModelWeight,
    /// Optimizer's weights at rest.
    MainWeight,
    /// Gradients at rest between reduction and optimizer.
    MainGrad,
    /// Optimizer moments and step counters.
    OptimizerState,
    /// Gathered (full) weights.
    FullWeight,
    /// Output of an all-gather that is copied out afterwards.
    GatherBuffer,
    /// Cast or packed input of an all-gather.
    GatherInput,
    /// Full gradients as autograd or a wgrad GEMM produces them.
    FullGrad,
    /// Packed full gradients, input of a reduce-scatter.
    ReduceInput,
    /// Output of a reduce-scatter before it is accumulated.
    ReduceOutput,
    /// Saved activations.
    Activation,
    /// Logits and their relatives.
    Logits,
    /// Activations and activation gradients that live within one direction.
    Temporary,
    /// Library scratch.
    Workspace,
    /// Tokens, labels, tables.
    Input,
}

impl Role {
    /// All roles, in display order.
    pub const ALL: [Self; 15] = [
        Self::ModelWeight,
        Self::MainWeight,
        Self::MainGrad,
        Self::OptimizerState,
        Self::FullWeight,
        Self::GatherBuffer,
        Self::GatherInput,
        Self::FullGrad,
        Self::ReduceInput,
        Self::ReduceOutput,
        Self::Activation,
        Self::Logits,
        Self::Temporary,
        Self::Workspace,
        Self::Input,
    ];

    /// Name in program text, tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelWeight => "model_weight",
            Self::MainWeight => "main_weight",
            Self::MainGrad => "main_grad",
            Self::OptimizerState => "optimizer_state",
            Self::FullWeight => "full_weight",
            Self::GatherBuffer => "gather_buffer",
            Self::GatherInput => "gather_input",
            Self::FullGrad => "full_grad",
            Self::ReduceInput => "reduce_input",
            Self::ReduceOutput => "reduce_output",
            Self::Activation => "activation",
            Self::Logits => "logits",
            Self::Temporary => "temporary",
            Self::Workspace => "workspace",
            Self::Input => "input",
        }
    }
}

/// Allocator a buffer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// PyTorch-like caching allocator, one free list a stream.
    Caching,
    /// Planned pool: one fixed slot a key.
    Planned,
    /// Double buffer: `size` copies of the largest unit's buffers.
    DoubleBuffer,
    /// Host memory: no device bytes.
    Host,
}

/// What a buffer holds, for its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Holds {
    /// One parameter's data.
    Param(ParamId),
    /// A parameter group's flat data.
    Group(GroupId),
    /// A storage of the tape.
    Storage(StorageId),
    /// An input or table.
    Const(ConstId),
    /// Something else.
    Named(&'static str),
}

/// A buffer: one allocation (possibly repeated every step, never live twice at once).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Buffer {
    /// Role.
    pub role: Role,
    /// Requested bytes (rank 0's; other ranks' shards of a padded layout are equal).
    pub bytes: Bytes,
    /// Element type.
    pub dtype: DType,
    /// Required alignment of its address, bytes.
    pub align: u32,
    /// Allocator.
    pub pool: Pool,
    /// Stream whose free list it comes from: the stream that uses it last.
    pub stream: StreamId,
    /// Unit that owns it.
    pub unit: UnitId,
    /// Contents.
    pub holds: Holds,
    /// Identity for pools: buffers of different micro-batches and steps with one key share a slot.
    pub key: u32,
}

/// How a range moves from rank to rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PerRank {
    /// The same on every rank.
    #[default]
    Same,
    /// Rank's slice of the inner axis: the offset grows by the range's length times the inner coordinate.
    Inner,
    /// Rank's slice of the outer axis: likewise with the outer coordinate.
    Outer,
    /// Rank's slice within its part of the shard axis (integer reshard).
    SubShard,
}

/// A byte range of a buffer, as rank 0 sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Access {
    /// Buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// How other ranks' ranges differ.
    pub per_rank: PerRank,
}

/// Kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Gathers equal shards.
    AllGather,
    /// Reduces and scatters equal shards.
    ReduceScatter,
    /// Reduces to all.
    AllReduce,
    /// Exchanges equal parts.
    AllToAll,
    /// Copies from one to all.
    Broadcast,
}

impl CollectiveKind {
    /// Name in program text and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
        }
    }
}

/// Reduction of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// Nothing to reduce (gather, broadcast).
    None,
    /// Sum.
    Sum,
    /// Average.
    Avg,
    /// Sum of inputs multiplied by a factor.
    PremulSum(f64),
}

/// One input/output pair of a collective; coalesced launches have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Input range (rank 0's).
    pub input: Access,
    /// Output range (rank 0's).
    pub output: Access,
}

/// A collective launch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Collective {
    /// Kind.
    pub kind: CollectiveKind,
    /// Communicator.
    pub comm: CommId,
    /// Reduction.
    pub reduce: ReduceOp,
    /// Element type on the wire.
    pub dtype: DType,
    /// Payload: bytes of the full (largest) side over all parts.
    pub bytes: Bytes,
    /// Parts.
    pub parts: SmallVec<[Part; 1]>,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyKind {
    /// Host to device.
    H2d,
    /// Device to host.
    D2h,
    /// Device to device by copy engine.
    D2d,
}

/// A copy by a copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CopyDesc {
    /// Direction.
    pub kind: CopyKind,
    /// Source.
    pub from: Access,
    /// Destination.
    pub to: Access,
}

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Take memory for a buffer, now in host order.
    Alloc(BufferId),
    /// Give it back, now in host order.
    Free(BufferId),
    /// Launch a kernel. Its operands are ranges of [`Program::accesses`]; see [`Program::reads`].
    Launch {
        /// Kernel.
        kernel: KernelId,
        /// Stream.
        stream: StreamId,
        /// First read.
        reads: u32,
        /// First write.
        writes: u32,
        /// End of the writes.
        end: u32,
    },
    /// Launch a collective.
    Collective {
        /// Descriptor.
        id: CollectiveId,
        /// Stream.
        stream: StreamId,
    },
    /// Launch a copy-engine copy.
    Copy {
        /// Descriptor.
        id: CopyId,
        /// Stream.
        stream: StreamId,
    },
    /// Record an event on a stream: it completes when everything issued there before has.
    Record {
        /// Event.
        event: EventId,
        /// Stream.
        stream: StreamId,
    },
    /// Make a stream wait for an event before anything issued there later.
    Wait {
        /// Event.
        event: EventId,
        /// Stream.
        stream: StreamId,
    },
    /// Make the host wait for an event.
    HostWait(EventId),
    /// Spend host time.
    HostWork {
        /// Kind.
        kind: HostWorkKind,
        /// How often.
        count: u16,
    },
    /// A captured scope starts: what follows is one graph launch from the second pass on.
    GraphBegin(ScopeId),
    /// It ends.
    GraphEnd(ScopeId),
}

/// Part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Persistent state is created.
    Init,
    /// Step start: inputs.
    Start,
    /// Forward.
    Forward,
    /// Forward run again inside backward.
    Recompute,
    /// Backward.
    Backward,
    /// Final callback: fence and validation.
    Final,
    /// Gradient norm and clipping.
    Clip,
    /// Optimizer.
    Optimizer,
    /// Compute weights from main weights.
    Refresh,
    /// Validation forward.
    Validation,
}

impl Phase {
    /// Name in program text and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::Start => "start",
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
            Self::Final => "final",
            Self::Clip => "clip",
            Self::Optimizer => "optimizer",
            Self::Refresh => "refresh",
            Self::Validation => "validation",
        }
    }
}

/// One instruction with its provenance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Instr {
    /// What it does.
    pub op: Op,
    /// Unit it belongs to.
    pub unit: UnitId,
    /// Micro-batch.
    pub micro_batch: u16,
    /// Phase.
    pub phase: Phase,
    /// Rule of the policy that emitted it.
    pub rule: Rule,
}

/// Kind of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SectionKind {
    /// Persistent state.
    Init,
    /// The first step: creates optimizer state and library workspaces.
    First,
    /// Every later step.
    Steady,
    /// A validation forward.
    Validation,
}

/// A range of instructions that runs as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// Kind.
    pub kind: SectionKind,
    /// Instructions.
    pub instrs: Range<u32>,
}

/// A unit: what one `fully_shard` call owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unit {
    /// Path of its module (the root's is `root`), or the joined paths of several.
    pub name: String,
    /// Modules.
    pub modules: Vec<ModuleId>,
    /// Whether it is the root unit.
    pub is_root: bool,
    /// Whether its full weights are freed after forward.
    pub reshards: bool,
    /// Its parameter groups.
    pub groups: Vec<GroupId>,
}

/// A captured scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CaptureScope {
    /// Name, for example `layers.3.mlp forward`.
    pub name: String,
    /// Kernels and collectives inside.
    pub launches: u32,
}

/// What the program was made for; enough to label a run without the scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProgramMeta {
    /// Scenario name.
    pub scenario: String,
    /// Policy name.
    pub policy: &'static str,
    /// Hardware profile name.
    pub hardware: String,
    /// Ranks.
    pub world: u32,
    /// Inner axis.
    pub dp_shard: u32,
    /// Outer axis.
    pub dp_outer: u32,
    /// GPUs of a node.
    pub gpus_per_node: u32,
    /// Micro-batches a step.
    pub micro_batches: u16,
    /// Tokens a rank and step.
    pub tokens: u64,
    /// Model FLOPs a rank and step.
    pub model_flops: Flops,
    /// `expandable_segments` of the caching allocator.
    pub expandable_segments: bool,
    /// Gradient buffers the policy allows in flight.
    pub reduce_in_flight: u32,
    /// Steps between validations; 0 is never.
    pub validate_every: u32,
    /// Steps of a run.
    pub steps: u32,
    /// Peak-rate element type (compute dtype).
    pub compute: DType,
}

/// A whole program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Program {
    /// Labels.
    pub meta: ProgramMeta,
    /// Module tree, for names.
    pub modules: Vec<Module>,
    /// Parameters, for names and layouts.
    pub params: Vec<Param>,
    /// Units in forward order; the root unit, where it owns parameters, is among them.
    pub units: Vec<Unit>,
    /// Parameter groups with their layouts.
    pub groups: Vec<Group>,
    /// Streams; [`COMPUTE`] is the first.
    pub streams: Vec<Stream>,
    /// Communicators.
    pub communicators: Vec<Communicator>,
    /// Kernels.
    pub kernels: Vec<Kernel>,
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Operand arena.
    pub accesses: Vec<Access>,
    /// Collectives.
    pub collectives: Vec<Collective>,
    /// Copies.
    pub copies: Vec<CopyDesc>,
    /// Captured scopes.
    pub scopes: Vec<CaptureScope>,
    /// The loss of a training micro-batch: a float32 scalar, readable from the end of its forward until its backward is
    /// done.
    pub loss: Option<BufferId>,
    /// The loss of a validation forward.
    pub eval_loss: Option<BufferId>,
    /// Number of events.
    pub events: u32,
    /// Sections in program order.
    pub sections: Vec<Section>,
    /// Instructions.
    pub instrs: Vec<Instr>,
    /// Full copies of unit buffers a double-buffer pool holds (0: no such pool).
    pub double_buffer_copies: u32,
    /// Double buffer: keys that do not fit get a persistent buffer of their own.
    pub persist_on_alloc_fail: bool,
    /// Where planned buffers lie; follows from the rest.
    #[serde(skip)]
    pub placement: crate::memory::Placement,
}

impl Program {
    /// Section of a kind, if the program has it.
    #[must_use]
    pub fn section(&self, kind: SectionKind) -> Option<&Section> {
        self.sections.iter().find(|s| s.kind == kind)
    }

    /// Instructions of a section.
    #[must_use]
    pub fn section_instrs(&self, section: &Section) -> &[Instr] {
        &self.instrs[section.instrs.start as usize..section.instrs.end as usize]
    }

    /// Ranges a launch reads.
    #[must_use]
    pub fn reads(&self, op: &Op) -> &[Access] {
        match *op {
            Op::Launch { reads, writes, .. } => &self.accesses[reads as usize..writes as usize],
            _ => &[],
        }
    }

    /// Ranges a launch writes.
    #[must_use]
    pub fn writes(&self, op: &Op) -> &[Access] {
        match *op {
            Op::Launch { writes, end, .. } => &self.accesses[writes as usize..end as usize],
            _ => &[],
        }
    }

    /// A readable name of a buffer, for example `full_weight layers.3`.
    #[must_use]
    pub fn buffer_name(&self, id: BufferId) -> String {
        text::buffer_name(self, id)
    }

    /// One instruction in words, without its tag.
    #[must_use]
    pub fn op_text(&self, id: InstrId) -> String {
        text::op(self, &self.instrs[id.index()])
    }

    /// Content digest: 16 hexadecimal digits, equal exactly for equal programs. The scenario's name and the hardware
    /// profile do not enter it.
    #[must_use]
    pub fn digest(&self) -> String {
        digest::digest(self)
    }

    /// The program as stable text, one instruction a line.
    #[must_use]
    pub fn to_text(&self) -> String {
        text::render(self)
    }
}
