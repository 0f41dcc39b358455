//! The program: every decision of a training step, as instructions.
//!
//! A program has one instruction list for all ranks, in host issue order. Ranks differ in offsets,
//! not in shape (SPMD): the ranges of a sharded buffer are those of rank 0's shard, and an
//! interpreter shifts them by the rank's position in the communicator. `sim` prices the list,
//! `exec` runs it, and `check` proves its properties.
//!
//! Sections run as follows: `Init` once, `First` once, then `Steady` for every further step;
//! `Validation`, if present, runs between steps. Every event that a section waits for is recorded
//! in that section, and every buffer that a section allocates is freed in it, except persistent
//! ones (from `Init`, and optimizer state from `First`).

mod build;
mod contents;
mod contract;
mod digest;
mod lanes;
pub mod rule;
mod text;
mod traffic;
mod unfilled;
mod updates;
pub mod workspace;

use crate::config::AttentionBackend;
use crate::ir::{
    Access, Buffer, BufferId, Collective, CollectiveId, CommId, CopyDesc, CopyId, DType,
    DeviceMesh, EventId, GroupId, Holds, HostWorkKind, InstrId, Kernel, KernelId, Module, ModuleId,
    Param, ParameterCount, Role, ScopeId, StreamId, UnitId,
};
use crate::shard::Group;
use crate::units::Flops;
pub use build::{ProgramBuilder, Tag};
pub use contents::{Content, Contents, NoSlice};
pub use contract::{Contract, InFlight};
pub use lanes::{Communicator, Stream, StreamKind};
pub use rule::Rule;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
pub use traffic::Traffic;
pub use unfilled::UnfilledWrites;
pub(crate) use unfilled::is_packed;
pub use updates::{GroupRun, MatrixRun, ScaleRun, Updated};

/// Operation of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Allocate memory for a buffer at this point in host order.
    Alloc(BufferId),
    /// Free it at this point in host order.
    Free(BufferId),
    /// Launch a kernel. Its operands are ranges in [`Program::accesses`]; see [`Program::reads`].
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
    /// Record an event on a stream. It completes when everything issued on the stream before it has
    /// completed.
    Record {
        /// Event.
        event: EventId,
        /// Stream.
        stream: StreamId,
    },
    /// Make a stream wait for an event before work that is issued on it later.
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
        /// Number of repetitions.
        count: u16,
    },
    /// Start a captured scope. Its contents are one graph launch from the second pass on.
    GraphBegin(ScopeId),
    /// End it.
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
    /// Forward that runs again within backward.
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
    /// Returns the name in program text and tables.
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
    /// Operation.
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

impl SectionKind {
    /// Returns its name in JSON and snapshots.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::First => "first",
            Self::Steady => "steady",
            Self::Validation => "validation",
        }
    }

    /// Returns its name in text.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::First => "first step",
            Self::Steady => "steady step",
            Self::Init | Self::Validation => self.name(),
        }
    }

    /// Returns whether it is a training step.
    #[must_use]
    pub const fn is_training(self) -> bool {
        matches!(self, Self::First | Self::Steady)
    }
}

/// A range of instructions that runs as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// Kind.
    pub kind: SectionKind,
    /// Instructions.
    pub instrs: Range<u32>,
}

/// A unit: the parameters that one `fully_shard` call owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unit {
    /// Path of its module (`root` for the root), or the joined paths of several modules.
    pub name: String,
    /// Modules.
    pub modules: Vec<ModuleId>,
    /// Whether it is the root unit.
    pub is_root: bool,
    /// Whether its full weights are freed after forward.
    pub reshards: bool,
    /// Whether its full weights keep their storage for the whole run, gathered or not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub keeps_storage: bool,
    /// Micro-batches of a step that do not run its forward.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped_in: Vec<u16>,
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

/// What the program was made for. This is enough to label a run without the scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProgramMeta {
    /// Scenario name.
    pub scenario: String,
    /// Policy name.
    pub policy: &'static str,
    /// Hardware profile name.
    pub hardware: String,
    /// Ranks on their axes.
    pub mesh: DeviceMesh,
    /// Number of GPUs per node.
    pub gpus_per_node: u32,
    /// Micro-batches per step.
    pub micro_batches: u16,
    /// Tokens per rank and step.
    pub tokens: u64,
    /// Model FLOPs per rank and step.
    pub model_flops: Flops,
    /// Parameter counts of the model.
    #[serde(skip)]
    pub parameters: ParameterCount,
    /// Whether every sum has a fixed order.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub deterministic: bool,
    /// Factor by which the sum of gradients over ranks is multiplied, if it is neither their mean
    /// nor their sum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_factor: Option<f64>,
    /// Library of the attention kernels; `None` is the one that PyTorch picks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_backend: Option<AttentionBackend>,
    /// `expandable_segments` of the caching allocator.
    pub expandable_segments: bool,
    /// Number of gradient buffers that the policy allows in flight.
    pub reduce_in_flight: u32,
    /// Steps between validations; 0 for none.
    pub validate_every: u32,
    /// Steps per run.
    pub steps: u32,
    /// Compute dtype. MFU is relative to its peak rate.
    pub compute: DType,
}

impl ProgramMeta {
    /// Returns the number of nodes that the ranks occupy. The last one may be partly used.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        self.mesh.world().div_ceil(self.gpus_per_node.max(1))
    }
}

/// A complete program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Program {
    /// Labels.
    pub meta: ProgramMeta,
    /// What the schedule declares for [`check`](crate::check).
    #[serde(skip)]
    pub contract: Contract,
    /// Module tree, for names.
    pub modules: Vec<Module>,
    /// Parameters, for names and layouts.
    pub params: Vec<Param>,
    /// Units in forward order, including the root unit if it owns parameters.
    pub units: Vec<Unit>,
    /// Parameter groups with their layouts.
    pub groups: Vec<Group>,
    /// Streams; [`COMPUTE`](crate::ir::COMPUTE) is the first.
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
    /// The loss of a training micro-batch: a float32 scalar that can be read from the end of its
    /// forward until its backward is done.
    pub loss: Option<BufferId>,
    /// The loss of a validation forward.
    pub eval_loss: Option<BufferId>,
    /// Number of events.
    pub events: u32,
    /// Sections in program order.
    pub sections: Vec<Section>,
    /// Instructions.
    pub instrs: Vec<Instr>,
    /// Number of full copies of unit buffers in a double-buffer pool (0: no such pool).
    pub double_buffer_copies: u32,
    /// Whether keys that do not fit in a double buffer get a separate persistent buffer.
    pub persist_on_alloc_fail: bool,
    /// Placement of planned buffers, which follows from the rest.
    #[serde(skip)]
    pub placement: crate::memory::Placement,
}

impl Program {
    /// Returns whether kernels run 8-bit matmuls.
    #[must_use]
    pub fn has_scaled_gemms(&self) -> bool {
        let mut ops = self.kernels.iter().flat_map(|k| &k.body);
        ops.any(|op| op.op.float8_fast_accum().is_some())
    }

    /// Returns the section of a kind, if the program has one.
    #[must_use]
    pub fn section(&self, kind: SectionKind) -> Option<&Section> {
        self.sections.iter().find(|s| s.kind == kind)
    }

    /// Returns the communicators that some collective uses, and whether each one needs only the
    /// device memory of copy-engine collectives. A reduction needs that of collectives on SMs,
    /// except for a single number, which needs nothing (measured on 2 H200, NCCL 2.28.9:
    /// benchmarks/options.md).
    #[must_use]
    pub fn used_communicators(&self) -> BTreeMap<CommId, bool> {
        let mut used = BTreeMap::new();
        for c in &self.collectives {
            let slight = !c.kind.reduces() || c.bytes.0 <= c.dtype.size();
            let engines = self.communicators[c.comm.index()].copy_engine && slight;
            *used.entry(c.comm).or_insert(true) &= engines;
        }
        used
    }

    /// Returns the instructions of a section.
    #[must_use]
    pub fn section_instrs(&self, section: &Section) -> &[Instr] {
        &self.instrs[section.instrs.start as usize..section.instrs.end as usize]
    }

    /// Returns the buffer that an instruction uploads data from the host to, if it does: an input
    /// that changes in every micro-batch. It is uploaded where its memory is allocated, on the
    /// buffer's stream. Inputs that do not change are allocated in [`SectionKind::Init`].
    #[must_use]
    pub fn upload(&self, instr: InstrId) -> Option<BufferId> {
        let Op::Alloc(id) = self.instrs[instr.index()].op else {
            return None;
        };
        let buffer = &self.buffers[id.index()];
        let input = buffer.role == Role::Input && matches!(buffer.holds, Holds::Const(_));
        let stays = |init: &Section| init.instrs.contains(&instr.0);
        (input && !self.section(SectionKind::Init).is_some_and(stays)).then_some(id)
    }

    /// Returns the ranges that a launch reads.
    #[must_use]
    pub fn reads(&self, op: &Op) -> &[Access] {
        match *op {
            Op::Launch { reads, writes, .. } => &self.accesses[reads as usize..writes as usize],
            _ => &[],
        }
    }

    /// Returns the ranges that a launch writes.
    #[must_use]
    pub fn writes(&self, op: &Op) -> &[Access] {
        match *op {
            Op::Launch { writes, end, .. } => &self.accesses[writes as usize..end as usize],
            _ => &[],
        }
    }

    /// Returns a readable name of a buffer, for example `full_weight layers.3`.
    #[must_use]
    pub fn buffer_name(&self, id: BufferId) -> String {
        text::buffer_name(self, id)
    }

    /// Describes one instruction, without its tag. Empty if there is no such instruction, as for
    /// errors outside of all instructions.
    #[must_use]
    pub fn op_text(&self, id: InstrId) -> String {
        let instr = self.instrs.get(id.index());
        instr.map_or_else(String::new, |i| text::op(self, i))
    }

    /// Returns a message about an instruction behind the name of its unit, which says in which
    /// layer it is.
    #[must_use]
    pub fn in_unit(&self, id: InstrId, message: &str) -> String {
        let unit = self.instrs.get(id.index());
        let unit = unit.and_then(|i| self.units.get(i.unit.index()));
        unit.map_or_else(|| message.to_owned(), |u| format!("{}: {message}", u.name))
    }

    /// Returns the content digest: 16 hexadecimal digits, equal exactly for equal programs. It does
    /// not include the scenario's name and the hardware profile.
    #[must_use]
    pub fn digest(&self) -> String {
        digest::digest(self)
    }

    /// Returns the lines at the start of the program's text: streams, communicators, and the
    /// parameter groups of these units (`None`: of all).
    #[must_use]
    pub fn header_text(&self, units: Option<&[UnitId]>) -> String {
        text::header(self, units)
    }

    /// Returns the line at the start of a section in the program's text.
    #[must_use]
    pub fn section_text(&self, section: &Section) -> String {
        text::section_title(section)
    }

    /// Returns the program as stable text, one instruction per line.
    #[must_use]
    pub fn to_text(&self) -> String {
        text::render(self)
    }
}
