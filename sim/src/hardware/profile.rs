//! A profile as it is loaded. [`shardlab_plan::hardware`] says what each key may hold and fills in
//! defaults, so that only keys of unknown value are optional here.

use crate::part::Part;
use serde::Deserialize;
use shardlab_plan::config::AttentionBackend;
use shardlab_plan::ir::{
    AttentionShape, CollectiveKind, DType, GemmKind, HostWorkKind, KernelClass, ScaleMode,
};
use shardlab_plan::program::Program;
use std::collections::BTreeMap;

/// A machine: device, host, network, and tables of what was measured on it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name, equal to the file's stem for shipped profiles.
    pub name: String,
    /// What it describes, in a line.
    pub about: String,
    /// `[measured]`, where the numbers come from a machine rather than from data sheets. A profile
    /// that extends another one does not inherit it: what it changes was not measured there.
    pub measured: Option<MeasuredOn>,
    /// `[device]`
    pub device: Device,
    /// `[footprint]`
    pub footprint: Footprint,
    /// `[host]`
    pub host: Host,
    /// `[network]`
    pub network: Network,
    /// `[contention]`
    pub contention: Contention,
    /// `[power]`, where the device was seen to reach its power limit.
    pub power: Option<Power>,
    /// `[scale]`, where predictions were seen to be off by the same on all of a part's work.
    pub scale: Option<Scale>,
    /// `[efficiency]`
    pub efficiency: Efficiency,
    /// `[[gemm]]`: measured GEMMs.
    #[serde(default)]
    pub gemm: Vec<GemmTable>,
    /// `[[grouped_gemm]]`: measured grouped GEMMs.
    #[serde(default)]
    pub grouped_gemm: Vec<GroupedGemmTable>,
    /// `[[conv]]`: measured convolutions, as implicit GEMMs.
    #[serde(default)]
    pub conv: Vec<GemmTable>,
    /// `[[attention]]`: measured fused attention.
    #[serde(default)]
    pub attention: Vec<AttentionTable>,
    /// `[[attention_backend]]`: libraries of attention that a job may ask for.
    #[serde(default)]
    pub attention_backend: Vec<AttentionRates>,
    /// `[[memory]]`: measured memory-bound kernels by class and bytes moved.
    #[serde(default)]
    pub memory: Vec<MemoryTable>,
    /// `[[collective]]`: measured collectives by kind, ranks and payload.
    #[serde(default)]
    pub collective: Vec<CollectiveTable>,
}

/// `[measured]`: the machine that the numbers were measured on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredOn {
    /// The machine and the software that ran on it, in a few words.
    pub on: String,
    /// Most GPUs of one node whose collectives were measured together.
    pub gpus: u32,
}

/// `[device]`: one accelerator.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Where the numbers come from.
    pub source: String,
    /// Streaming multiprocessors (cores of a CPU).
    pub sms: u32,
    /// Memory that a process can use, MiB.
    pub memory_mib: u64,
    /// Memory bandwidth by data sheet, GB/s.
    pub memory_gbps: f64,
    /// Last-level cache, MiB.
    pub l2_mib: u64,
    /// Dense peak by element type, TFLOP/s.
    pub tflops: BTreeMap<DType, f64>,
    /// Rate of arithmetic-bound kernels while several GPUs of a node train, relative to one GPU on
    /// its own: power and clocks (0 to 1). One number for all programs, where only that is known; a
    /// profile with [`Power`] has none.
    pub loaded_rate: f64,
    /// From the end of a kernel to the start of the next one on its stream, microseconds.
    pub kernel_gap_us: f64,
    /// The same between nodes of a captured graph, microseconds.
    pub graph_gap_us: f64,
    /// From the end of a launch call to the start of the kernel on an idle device, microseconds.
    pub launch_latency_us: f64,
    /// From an event to the start of the work of another stream that waited for it, beyond
    /// `kernel_gap_us`, microseconds.
    pub event_latency_us: f64,
    /// Where the ranks of a node have no device each, but share these cores: every running kernel,
    /// collective and copy of any rank takes one of them, and all slow down when there are more.
    pub shared_cores: Option<u32>,
    /// Shortest kernel, microseconds.
    pub min_kernel_us: f64,
    /// Host to device copies, GB/s (pinned memory).
    pub h2d_gbps: f64,
    /// Device to host copies, GB/s (pinned memory).
    pub d2h_gbps: f64,
    /// Fixed part of a copy-engine copy, microseconds.
    pub copy_latency_us: f64,
}

/// `[footprint]`: device memory outside the allocator.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Footprint {
    /// Where the numbers come from.
    pub source: String,
    /// Context, libraries and kernels' code, MiB.
    pub context_mib: u64,
    /// What a process takes once more as soon as it has a communicator at all, MiB: the library's
    /// state, ways to other devices.
    pub joined_mib: u64,
    /// Each communicator, MiB.
    pub communicator_mib: u64,
    /// Each communicator whose collectives run on copy engines, MiB: it has fewer buffers. As
    /// others where it is not known.
    pub copy_engine_communicator_mib: Option<u64>,
    /// What communicators take once, as soon as one of them runs collectives on SMs, MiB.
    pub collective_kernels_mib: u64,
    /// Communicators that no collective uses do not exist, as in `exec`; frameworks make them all.
    pub used_communicators: bool,
    /// Kernels' workspaces lie outside the allocator too, as those of `exec` on GPUs do; frameworks
    /// take theirs from it.
    pub kernel_workspaces: bool,
}

/// `[host]`: time of the host thread to issue work, in microseconds per call.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Where the numbers come from.
    pub source: String,
    /// A kernel launch (the driver call alone; framework dispatch is `work.dispatch_us`).
    pub launch_us: f64,
    /// A collective launch.
    pub collective_us: f64,
    /// A copy-engine copy.
    pub copy_us: f64,
    /// Launch of a copy between a buffer and a list of tensors (FSDP2's custom operators in
    /// Python). As a kernel launch where it is not known.
    pub list_copy_us: Option<f64>,
    /// An event record or a stream wait.
    pub event_us: f64,
    /// Waking up after waiting for an event.
    pub host_wait_us: f64,
    /// An allocation served from the allocator's cache, or a free.
    pub alloc_us: f64,
    /// Taking memory from the device (`cudaMalloc` or mapping), each call.
    pub device_alloc_us: f64,
    /// Rate of operators on the CPU, bytes read plus written, in GB/s of one rank; that of copies
    /// from pinned memory if not given.
    pub cpu_gbps: Option<f64>,
    /// Launching a captured graph.
    pub graph_launch_us: f64,
    /// Maximum number of launches in a stream before the host has to wait.
    pub queue_depth: u32,
    /// Steps that may be in flight: with 1 the host begins a step when the device has finished the
    /// one before.
    pub steps_in_flight: u32,
    /// `[host.work]`
    pub work: HostWork,
}

/// `[host.work]`: microseconds of each [`shardlab_plan::ir::HostWorkKind`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostWork {
    /// Forward op run eagerly, launch excluded.
    pub dispatch_us: f64,
    /// Op run by the autograd engine, launch excluded.
    pub autograd_dispatch_us: f64,
    /// Guards and entry of a compiled region.
    pub guard_us: f64,
    /// A graph break.
    pub graph_break_us: f64,
    /// Body of a sharding hook.
    pub hook_us: f64,
    /// Per-parameter bookkeeping of a hook.
    pub hook_param_us: f64,
    /// Optimizer call.
    pub optimizer_step_us: f64,
    /// Fixed work of a step.
    pub step_us: f64,
    /// Python of a module of transformers, without its operators.
    #[serde(default)]
    pub module_us: f64,
    /// Per-parameter work of the optimizer and of clipping in jobs of transformers.
    #[serde(default)]
    pub optimizer_param_us: f64,
    /// Python and further launches of torchao's tensor subclass, per weight and gather.
    #[serde(default)]
    pub subclass_us: f64,
    /// A KiB of the table of a copy into or out of a collective's buffer.
    #[serde(default)]
    pub copy_table_us: f64,
    /// Python of compiled code around a kernel, launch excluded.
    #[serde(default)]
    pub compiled_kernel_us: f64,
}

impl HostWork {
    /// Returns the microseconds of a kind.
    pub(crate) const fn us(&self, kind: HostWorkKind) -> f64 {
        match kind {
            HostWorkKind::Dispatch => self.dispatch_us,
            HostWorkKind::AutogradDispatch => self.autograd_dispatch_us,
            HostWorkKind::Guard => self.guard_us,
            HostWorkKind::GraphBreak => self.graph_break_us,
            HostWorkKind::Hook => self.hook_us,
            HostWorkKind::HookParam => self.hook_param_us,
            HostWorkKind::OptimizerStep => self.optimizer_step_us,
            HostWorkKind::Step => self.step_us,
            HostWorkKind::Module => self.module_us,
            HostWorkKind::OptimizerParam => self.optimizer_param_us,
            HostWorkKind::Subclass => self.subclass_us,
            HostWorkKind::CopyTable => self.copy_table_us,
            HostWorkKind::CompiledKernel => self.compiled_kernel_us,
        }
    }
}

/// `[network]`: links between the devices.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Where the numbers come from.
    pub source: String,
    /// NVLink bandwidth of a GPU, one direction, GB/s by data sheet; without NVLink what takes its
    /// place, PCIe's or memory's.
    pub nvlink_gbps: f64,
    /// Bus bandwidth that large collectives reach, as a share of `nvlink_gbps`.
    pub nvlink_efficiency: f64,
    /// Ranks of the groups that reached it: smaller ones reach less, since a rank also copies its
    /// own part, and larger ones more.
    pub nvlink_ranks: u32,
    /// Bus bandwidth that large collectives on copy engines reach within a node, GB/s; that of
    /// kernels where not given.
    pub copy_engine_gbps: Option<f64>,
    /// GPUs that NVLink connects to one another; unknown where not given.
    pub nvlink_domain: Option<u32>,
    /// Network cards of a node.
    pub nics_per_node: u32,
    /// Bandwidth of a network card, one direction, GB/s.
    pub nic_gbps: f64,
    /// Share of it that large collectives reach.
    pub nic_efficiency: f64,
    /// Extra time of one network hop, microseconds.
    pub nic_latency_us: f64,
    /// How many times slower than NVLink's rate a large all-gather runs if the payload of a rank is
    /// not a multiple of 16 bytes.
    pub misaligned_factor: f64,
    /// The same for a reduce-scatter; unless given, that of an all-gather.
    pub misaligned_reduction_factor: Option<f64>,
    /// How much longer kernels take per doubling of the number of nodes, because collectives wait
    /// for the slowest GPU.
    pub straggler_loss: f64,
    /// SMs that a running collective holds.
    pub sms_per_collective: u32,
}

/// `[contention]`: how kernels and collectives slow one another. All are rates relative to running
/// alone.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Where the numbers come from.
    pub source: String,
    /// Share of its rate that a collective loses while any compute kernel runs.
    pub collective_loss_compute: f64,
    /// Share that it loses in proportion to the memory bandwidth that compute kernels use.
    pub collective_loss_bandwidth: f64,
    /// Memory bandwidth that a collective at full bus bandwidth uses, as a share of what kernels
    /// reach.
    pub collective_bandwidth: f64,
    /// Share of a filling kernel's duration after which a waiting collective of a default-priority
    /// stream gets its SMs (1: only when the kernel ends).
    pub start_wait: f64,
    /// The same for high-priority streams.
    pub start_wait_priority: f64,
    /// Kernels shorter than this never hold a collective up, microseconds.
    pub start_wait_min_us: f64,
    /// Share of its rate that a copy from host memory loses while one to it runs.
    pub h2d_loss: f64,
    /// Share of its rate that a copy to host memory loses while one from it runs.
    pub d2h_loss: f64,
    /// Share of its rate that work on one of `device.shared_cores` loses to caches and memory when
    /// all cores are busy.
    pub shared_loss: f64,
    /// The same when more ranks than cores take turns, the turns themselves apart; `shared_loss` if
    /// not given.
    pub turn_loss: Option<f64>,
    /// Where ranks share cores: from the first rank's arrival at a collective to the last one's,
    /// microseconds.
    pub shared_wait_us: f64,
}

/// `[power]`: the clock of a device at its power limit. The larger the share of a step that
/// arithmetic takes, the lower the clock, so time saved where nothing computes is lost again in
/// part by slower GEMMs. It replaces [`Device::loaded_rate`], which slows the same kernels: no
/// profile has both.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// Where the numbers come from.
    pub source: String,
    /// Share of a step's time (0 to 1) that GEMMs, convolutions and attention may take, alone,
    /// at the rates of `[[gemm]]`, `[[conv]]` and `[[attention]]`.
    pub arithmetic_share: f64,
    /// How much longer they take above it: the fraction of their time for each unit of share.
    pub arithmetic_slope: f64,
    /// The same for 8-bit matmuls; as others if not given.
    pub float8_slope: Option<f64>,
}

/// `[scale]`: factors on the times that the other sections give for the parts of the machine; 1 if
/// not given.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scale {
    /// Where the numbers come from.
    pub source: String,
    /// [`Part::Host`].
    pub host: f64,
    /// [`Part::Arithmetic`].
    pub arithmetic: f64,
    /// [`Part::Memory`].
    pub memory: f64,
    /// [`Part::Collectives`].
    pub collectives: f64,
    /// [`Part::HostCopies`].
    pub host_copies: f64,
}

impl Profile {
    /// Returns this profile with the host of another one.
    #[must_use]
    pub fn with_host_of(&self, other: &Self) -> Self {
        let unscaled = || Scale {
            source: String::new(),
            host: 1.0,
            arithmetic: 1.0,
            memory: 1.0,
            collectives: 1.0,
            host_copies: 1.0,
        };
        let mut profile = self.clone();
        profile.host = other.host.clone();
        profile.scale.get_or_insert_with(unscaled).host = other.times(Part::Host);
        profile
    }

    /// Returns whether tables have every kind of 8-bit matmul of a program.
    #[must_use]
    pub fn measures_float8_of(&self, program: &Program) -> bool {
        let kernels = program.kernels.iter();
        let mut scaled = kernels.filter(|k| k.float8_gemm().is_some());
        scaled.all(|k| {
            let kind = k.gemm_kind();
            match k.class {
                KernelClass::GroupedGemm {
                    weight_gradient, ..
                } => {
                    let mut tables = self.grouped_gemm.iter();
                    tables.any(|t| t.kind() == kind && t.weight_gradient == weight_gradient)
                }
                _ => self.gemm.iter().any(|t| t.kind() == kind),
            }
        })
    }

    /// Returns the factor of `[scale]` on the times of a part.
    #[must_use]
    pub fn times(&self, part: Part) -> f64 {
        let of = |s: &Scale| match part {
            Part::Host => s.host,
            Part::Arithmetic => s.arithmetic,
            Part::Memory => s.memory,
            Part::Collectives => s.collectives,
            Part::HostCopies => s.host_copies,
        };
        self.scale.as_ref().map_or(1.0, of)
    }
}

/// `[efficiency]`: shares of the data sheet's rates that kernels reach where nothing was measured
/// for their size.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Where the numbers come from.
    pub source: String,
    /// Large GEMMs, by element type.
    pub gemm: BTreeMap<DType, f64>,
    /// Output tiles of GEMMs, `[rows, columns, rate relative to the best one]`; those of
    /// Hopper's libraries if not given.
    pub gemm_tiles: Vec<(u64, u64, f64)>,
    /// How many times as long 16-bit GEMMs take whose rows do not start at multiples of 16 bytes;
    /// not known if not given.
    pub gemm_misaligned: Option<GemmMisaligned>,
    /// Convolutions relative to the equivalent GEMM.
    pub conv: f64,
    /// Attention forward.
    pub attention: f64,
    /// Attention backward.
    pub attention_backward: f64,
    /// The library of these rates and of tables without a library: the one that PyTorch picks.
    pub attention_backend: Option<AttentionBackend>,
    /// Time of attention's backward when its sums have a fixed order, relative to the tables'; not
    /// known if not given.
    pub attention_backward_fixed_order: Option<f64>,
    /// Time of 8-bit matmuls that add up in float32, relative to those that add up with the
    /// precision of tensor cores; not known if not given.
    pub float8_full_accumulation: Option<f64>,
    /// Memory-bound classes: share of `memory_gbps`.
    pub memory: BTreeMap<MemoryClass, f64>,
}

/// Slowdown of 16-bit GEMMs if the number of elements in a row of an operand is not a multiple of
/// 8: the library then picks kernels without 16-byte loads.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmMisaligned {
    /// Time relative to the aligned GEMM where rows have an even number of elements.
    pub even: f64,
    /// The same where a row has an odd number of elements.
    pub odd: f64,
}

/// Classes of memory-bound kernels. Backward kernels of a class may have an entry of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are those of `KernelClass`")]
pub enum MemoryClass {
    Pointwise,
    Strided,
    Norm,
    NormBackward,
    ColumnReduce,
    Softmax,
    SoftmaxBackward,
    Embedding,
    EmbeddingGrad,
    Copy,
    MultiCopy,
    Fill,
    Optimizer,
    FullReduce,
    Fused,
}

impl MemoryClass {
    /// Every class.
    pub const ALL: [Self; 15] = [
        Self::Pointwise,
        Self::Strided,
        Self::Norm,
        Self::NormBackward,
        Self::ColumnReduce,
        Self::Softmax,
        Self::SoftmaxBackward,
        Self::Embedding,
        Self::EmbeddingGrad,
        Self::Copy,
        Self::MultiCopy,
        Self::Fill,
        Self::Optimizer,
        Self::FullReduce,
        Self::Fused,
    ];

    /// Returns the class of a kernel; `None` for those bound by arithmetic.
    #[must_use]
    pub fn of(class: &KernelClass) -> Option<Self> {
        Some(match class {
            KernelClass::Gemm { .. }
            | KernelClass::Attention { .. }
            | KernelClass::Conv { .. }
            | KernelClass::GroupedGemm { .. } => return None,
            KernelClass::Pointwise => Self::Pointwise,
            KernelClass::Strided => Self::Strided,
            KernelClass::Norm { backward: false } => Self::Norm,
            KernelClass::Norm { backward: true } => Self::NormBackward,
            KernelClass::ColumnReduce => Self::ColumnReduce,
            KernelClass::Softmax { backward: false } => Self::Softmax,
            KernelClass::Softmax { backward: true } => Self::SoftmaxBackward,
            KernelClass::Embedding => Self::Embedding,
            KernelClass::EmbeddingGrad => Self::EmbeddingGrad,
            KernelClass::Copy => Self::Copy,
            KernelClass::MultiCopy => Self::MultiCopy,
            KernelClass::Fill => Self::Fill,
            KernelClass::Optimizer => Self::Optimizer,
            KernelClass::FullReduce => Self::FullReduce,
            KernelClass::Fused => Self::Fused,
        })
    }
}

/// One measured GEMM: `[m, n, k, microseconds]`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct GemmRow(pub u64, pub u64, pub u64, pub f64);

/// `[[gemm]]`, `[[conv]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmTable {
    /// Where the rows come from.
    pub source: String,
    /// Element type.
    pub dtype: DType,
    /// What shares a scale, of 8-bit matmuls; [`ScaleMode::Tensorwise`] if not given.
    pub scaling: Option<ScaleMode>,
    /// Whether 8-bit matmuls add up with the precision of tensor cores; they do if not given.
    pub fast_accum: Option<bool>,
    /// Rows.
    pub rows: Vec<GemmRow>,
}

impl GemmTable {
    /// Returns what the matmuls of the rows have in common.
    #[must_use]
    pub fn kind(&self) -> GemmKind {
        GemmKind::of(self.dtype).refined(self.scaling, self.fast_accum)
    }
}

/// One measured grouped GEMM: `[experts, rows of an expert, n, k, microseconds]`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct GroupedGemmRow(pub u64, pub u64, pub u64, pub u64, pub f64);

/// `[[grouped_gemm]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupedGemmTable {
    /// Where the rows come from.
    pub source: String,
    /// Element type.
    pub dtype: DType,
    /// Whether 8-bit matmuls add up with the precision of tensor cores; they do if not given.
    pub fast_accum: Option<bool>,
    /// Matmuls over the rows of an expert, `[n, rows] x [rows, k]`; otherwise rows times matrices.
    pub weight_gradient: bool,
    /// Rows.
    pub rows: Vec<GroupedGemmRow>,
}

impl GroupedGemmTable {
    /// Returns what the matmuls of the rows have in common. In 8 bits, each factor has one scale.
    #[must_use]
    pub fn kind(&self) -> GemmKind {
        GemmKind::of(self.dtype).refined(None, self.fast_accum)
    }
}

/// One measured attention kernel: `[batch, heads, kv_heads, seq, head_dim, microseconds]`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct AttentionRow(pub u64, pub u64, pub u64, pub u64, pub u64, pub f64);

impl AttentionRow {
    /// Returns the sizes of what was measured, in a table with or without causal mask.
    #[must_use]
    pub fn shape(&self, causal: bool) -> AttentionShape {
        let &Self(batch, heads, kv_heads, seq, head_dim, _) = self;
        AttentionShape::new([batch, heads, kv_heads, seq, head_dim], causal)
    }
}

/// `[[attention]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionTable {
    /// Where the rows come from.
    pub source: String,
    /// Element type.
    pub dtype: DType,
    /// Causal mask.
    pub causal: bool,
    /// Backward kernel.
    pub backward: bool,
    /// Library; `None`: the one that PyTorch picks.
    pub backend: Option<AttentionBackend>,
    /// Rows.
    pub rows: Vec<AttentionRow>,
}

/// `[[attention_backend]]`: attention of a library that a job asks for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Where the numbers come from.
    pub source: String,
    /// The library.
    pub backend: AttentionBackend,
    /// Share of the peak, forward.
    pub forward: f64,
    /// Share of the peak, backward.
    pub backward: f64,
}

/// `[[memory]]`: bytes read plus written against microseconds.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryTable {
    /// Where the rows come from.
    pub source: String,
    /// Class.
    pub class: MemoryClass,
    /// Only kernels whose name contains this (they prefer the longest name to a shorter one, and
    /// that to the class's).
    pub op: Option<String>,
    /// Only kernels on this element type (they prefer this table to one for all types).
    pub dtype: Option<DType>,
    /// The rows were measured within steps, where operands lie in the caches or not as they do
    /// there.
    pub in_step: bool,
    /// Which bytes the rows are filed by; see [`MemoryTable::counted`] where it is not given.
    pub bytes: Option<Counted>,
    /// `[bytes, microseconds]`, ascending.
    pub rows: Vec<(u64, f64)>,
}

/// How the bytes of a [`MemoryTable`]'s rows were counted. They differ for kernels that write
/// gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// What a launch reads and writes, gradients as wide as they lie.
    Moved,
    /// As the kernel is described, which is before it is known how gradients lie: all in the type
    /// it computes in.
    Described,
}

impl MemoryTable {
    /// Returns how the bytes of its rows were counted. Tables without `bytes` are older: their
    /// times within steps have the bytes of descriptors.
    #[must_use]
    pub fn counted(&self) -> Counted {
        let before = if self.in_step {
            Counted::Described
        } else {
            Counted::Moved
        };
        self.bytes.unwrap_or(before)
    }
}

/// `[[collective]]`: payload against microseconds, alone on the links.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveTable {
    /// Where the rows come from.
    pub source: String,
    /// Kind.
    pub kind: CollectiveName,
    /// Ranks.
    pub ranks: u32,
    /// Nodes that they are spread over, equally many on each.
    pub nodes: u32,
    /// Only payloads of this element type (they prefer this table to one for all types).
    pub dtype: Option<DType>,
    /// `[bytes of the full side, microseconds]`, ascending.
    pub rows: Vec<(u64, f64)>,
    /// What NCCL itself estimates for the same, in the same form: nothing is priced by it. It shows
    /// how far the formula, which follows NCCL's tuner, and the tuner's numbers are from each other
    /// and from what was measured.
    pub nccl_rows: Vec<(u64, f64)>,
}

/// [`CollectiveKind`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are those of `CollectiveKind`")]
pub enum CollectiveName {
    AllGather,
    ReduceScatter,
    AllReduce,
    AllToAll,
}

impl From<CollectiveName> for CollectiveKind {
    fn from(name: CollectiveName) -> Self {
        match name {
            CollectiveName::AllGather => Self::AllGather,
            CollectiveName::ReduceScatter => Self::ReduceScatter,
            CollectiveName::AllReduce => Self::AllReduce,
            CollectiveName::AllToAll => Self::AllToAll,
        }
    }
}
