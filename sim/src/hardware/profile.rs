//! A profile after loading. [`shardlab_plan::hardware`] defines the values of each key and fills in
//! defaults, so that only keys that may be unknown are optional here.

use crate::part::Part;
use serde::Deserialize;
use shardlab_plan::config::AttentionBackend;
use shardlab_plan::ir::{
    AttentionShape, CollectiveKind, DType, GemmKind, HostWorkKind, KernelClass, ScaleMode,
};
use shardlab_plan::program::Program;
use std::collections::BTreeMap;

/// A machine: device, host, network, and tables of measurements.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name, equal to the file's stem for shipped profiles.
    pub name: String,
    /// One-line description.
    pub about: String,
    /// `[measured]`, if the numbers were measured on a machine and do not come from data sheets. A
    /// profile that extends another one does not inherit this section, because its changes were not
    /// measured there.
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
    /// `[power]`, if the device was observed to reach its power limit.
    pub power: Option<Power>,
    /// `[scale]`, if predictions were observed to be off by the same factor for all work of a part.
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
    /// `[[attention_backend]]`: attention libraries that a job may ask for.
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
    /// The machine and its software, in a few words.
    pub on: String,
    /// Maximum number of GPUs of one node whose collectives were measured together.
    pub gpus: u32,
}

/// `[device]`: one accelerator.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Source of the numbers.
    pub source: String,
    /// Number of streaming multiprocessors (or cores of a CPU).
    pub sms: u32,
    /// Memory that a process can use, MiB.
    pub memory_mib: u64,
    /// Memory bandwidth from the data sheet, GB/s.
    pub memory_gbps: f64,
    /// Last-level cache, MiB.
    pub l2_mib: u64,
    /// Dense peak by element type, TFLOP/s.
    pub tflops: BTreeMap<DType, f64>,
    /// Rate of arithmetic-bound kernels while several GPUs of a node train, relative to a single
    /// GPU (0 to 1). It covers power and clocks. If only this is known, it applies to all programs;
    /// a profile with [`Power`] does not have it.
    pub loaded_rate: f64,
    /// Time from the end of a kernel to the start of the next one on its stream, microseconds.
    pub kernel_gap_us: f64,
    /// The same between nodes of a captured graph, microseconds.
    pub graph_gap_us: f64,
    /// Time from the end of a launch call to the start of the kernel on an idle device,
    /// microseconds.
    pub launch_latency_us: f64,
    /// Time from an event to the start of work on another stream that waited for it, in addition to
    /// `kernel_gap_us`, microseconds.
    pub event_latency_us: f64,
    /// Number of cores that the ranks of a node share, if they do not have one device each. Every
    /// running kernel, collective and copy of any rank takes one core, and all of them slow down if
    /// there are more tasks than cores.
    pub shared_cores: Option<u32>,
    /// Shortest kernel, microseconds.
    pub min_kernel_us: f64,
    /// Bandwidth of host-to-device copies, GB/s (pinned memory).
    pub h2d_gbps: f64,
    /// Bandwidth of device-to-host copies, GB/s (pinned memory).
    pub d2h_gbps: f64,
    /// Fixed time of a copy by a copy engine, microseconds.
    pub copy_latency_us: f64,
}

/// `[footprint]`: device memory outside the allocator.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Footprint {
    /// Source of the numbers.
    pub source: String,
    /// CUDA context, libraries and code of kernels, MiB.
    pub context_mib: u64,
    /// Additional memory of a process with at least one communicator, MiB: the state of the
    /// library, and connections to other devices.
    pub joined_mib: u64,
    /// Each communicator, MiB.
    pub communicator_mib: u64,
    /// Memory per communicator whose collectives run on copy engines, MiB. It has fewer buffers
    /// than others. If not given, it takes as much as other communicators.
    pub copy_engine_communicator_mib: Option<u64>,
    /// Memory that is needed once as soon as one communicator runs collectives on SMs, MiB.
    pub collective_kernels_mib: u64,
    /// Whether communicators without collectives do not exist, as in `exec`. Frameworks create all
    /// of them.
    pub used_communicators: bool,
    /// Whether workspaces of kernels are also outside the allocator, as those of `exec` on GPUs
    /// are. Frameworks allocate theirs from it.
    pub kernel_workspaces: bool,
}

/// `[host]`: time that the host thread needs to issue work, in microseconds per call.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Source of the numbers.
    pub source: String,
    /// A kernel launch (only the driver call; framework dispatch is `work.dispatch_us`).
    pub launch_us: f64,
    /// A collective launch.
    pub collective_us: f64,
    /// A copy-engine copy.
    pub copy_us: f64,
    /// Launch of a copy between a buffer and a list of tensors (FSDP2's custom operators in
    /// Python). If not given, it has the cost of a kernel launch.
    pub list_copy_us: Option<f64>,
    /// An event record or a stream wait.
    pub event_us: f64,
    /// Waking up after a wait for an event.
    pub host_wait_us: f64,
    /// An allocation served from the allocator's cache, or a free.
    pub alloc_us: f64,
    /// Each call that takes memory from the device (`cudaMalloc` or mapping).
    pub device_alloc_us: f64,
    /// Rate of operators on the CPU, in GB/s read plus written by one rank. If not given, it is the
    /// rate of copies from pinned memory.
    pub cpu_gbps: Option<f64>,
    /// Launching a captured graph.
    pub graph_launch_us: f64,
    /// Maximum number of launches in a stream's queue before the host has to wait.
    pub queue_depth: u32,
    /// Number of steps that may be in flight. With 1, the host starts a step when the device has
    /// finished the previous one.
    pub steps_in_flight: u32,
    /// `[host.work]`
    pub work: HostWork,
}

/// `[host.work]`: microseconds of each [`shardlab_plan::ir::HostWorkKind`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostWork {
    /// Forward op that runs eagerly, without its launch.
    pub dispatch_us: f64,
    /// Op that the autograd engine runs, without its launch.
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
    /// Python code of a Transformers module, without its operators.
    #[serde(default)]
    pub module_us: f64,
    /// Per-parameter work of the optimizer and of clipping in Transformers jobs.
    #[serde(default)]
    pub optimizer_param_us: f64,
    /// Python code and additional launches of torchao's tensor subclass, per weight and gather.
    #[serde(default)]
    pub subclass_us: f64,
    /// Per KiB of the table of a copy into or out of a collective's buffer.
    #[serde(default)]
    pub copy_table_us: f64,
    /// Python code of compiled code around a kernel, without its launch.
    #[serde(default)]
    pub compiled_kernel_us: f64,
}

impl HostWork {
    /// Returns the microseconds for a kind of work.
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
    /// Source of the numbers.
    pub source: String,
    /// NVLink bandwidth of a GPU in one direction, GB/s, from the data sheet. Without NVLink, the
    /// bandwidth of what replaces it: PCIe or memory.
    pub nvlink_gbps: f64,
    /// Bus bandwidth that large collectives reach, as a share of `nvlink_gbps`.
    pub nvlink_efficiency: f64,
    /// Size of the groups that reached it. Smaller groups reach less, because a rank also copies
    /// its own chunk, and larger ones reach more.
    pub nvlink_ranks: u32,
    /// Bus bandwidth that large collectives on copy engines reach within a node, GB/s. If not
    /// given, it is that of kernels.
    pub copy_engine_gbps: Option<f64>,
    /// Number of GPUs that NVLink connects to each other, if known.
    pub nvlink_domain: Option<u32>,
    /// Network cards of a node.
    pub nics_per_node: u32,
    /// Bandwidth of a network card in one direction, GB/s.
    pub nic_gbps: f64,
    /// Share of this bandwidth that large collectives reach.
    pub nic_efficiency: f64,
    /// Extra time of one network hop, microseconds.
    pub nic_latency_us: f64,
    /// Factor by which a large all-gather is slower than NVLink's rate if the payload of a rank is
    /// not a multiple of 16 bytes.
    pub misaligned_factor: f64,
    /// The same for a reduce-scatter. If not given, it is the factor of an all-gather.
    pub misaligned_reduction_factor: Option<f64>,
    /// Relative increase of kernel times per doubling of the number of nodes, because collectives
    /// wait for the slowest GPU.
    pub straggler_loss: f64,
    /// SMs that a running collective holds.
    pub sms_per_collective: u32,
}

/// `[contention]`: how kernels and collectives slow each other down. All values are relative to the
/// rate of running alone.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Source of the numbers.
    pub source: String,
    /// Share of its rate that a collective loses while any compute kernel runs.
    pub collective_loss_compute: f64,
    /// Share of its rate that a collective loses in proportion to the memory bandwidth that compute
    /// kernels use.
    pub collective_loss_bandwidth: f64,
    /// Memory bandwidth that a collective at full bus bandwidth uses, as a share of what kernels
    /// reach.
    pub collective_bandwidth: f64,
    /// Share of the duration of a kernel that fills the device after which a waiting collective on
    /// a default-priority stream gets its SMs. With 1, it gets them only when the kernel ends.
    pub start_wait: f64,
    /// The same for high-priority streams.
    pub start_wait_priority: f64,
    /// Kernels shorter than this never delay a collective, microseconds.
    pub start_wait_min_us: f64,
    /// Share of its rate that a copy from host memory loses while a copy to host memory runs.
    pub h2d_loss: f64,
    /// Share of its rate that a copy to host memory loses while a copy from host memory runs.
    pub d2h_loss: f64,
    /// Share of its rate that work on one of `device.shared_cores` loses because of caches and
    /// memory when all cores are busy.
    pub shared_loss: f64,
    /// The same if more ranks than cores take turns, without the turns themselves. If not given, it
    /// is `shared_loss`.
    pub turn_loss: Option<f64>,
    /// If ranks share cores: time from the first rank's arrival at a collective to the last rank's
    /// arrival, microseconds.
    pub shared_wait_us: f64,
}

/// `[power]`: the clock of a device at its power limit. The larger the share of a step that
/// arithmetic takes, the lower the clock, so slower GEMMs consume part of the time that is saved
/// where nothing computes. This section replaces [`Device::loaded_rate`], which slows the same
/// kernels: no profile has both.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// Source of the numbers.
    pub source: String,
    /// Share of a step's time (0 to 1) up to which GEMMs, convolutions and attention run at the
    /// rates of `[[gemm]]`, `[[conv]]` and `[[attention]]`.
    pub arithmetic_share: f64,
    /// Slope above this share: the relative increase of their time per unit of share.
    pub arithmetic_slope: f64,
    /// The same for 8-bit matmuls. If not given, it is `arithmetic_slope`.
    pub float8_slope: Option<f64>,
}

/// `[scale]`: factors that multiply the times of parts of the machine, as given by the other
/// sections. The default is 1.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scale {
    /// Source of the numbers.
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

    /// Returns whether the tables have every kind of 8-bit matmul in a program.
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

    /// Returns the factor that `[scale]` applies to the times of a part.
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

/// `[efficiency]`: shares of the data sheet's rates that kernels reach if nothing was measured for
/// their size.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Source of the numbers.
    pub source: String,
    /// Large GEMMs, by element type.
    pub gemm: BTreeMap<DType, f64>,
    /// Output tiles of GEMMs, `[rows, columns, rate relative to the best one]`. If not given, they
    /// are those of the libraries on Hopper.
    pub gemm_tiles: Vec<(u64, u64, f64)>,
    /// Factor on the time of 16-bit GEMMs whose rows do not start at multiples of 16 bytes; `None`
    /// if unknown.
    pub gemm_misaligned: Option<GemmMisaligned>,
    /// Convolutions relative to the equivalent GEMM.
    pub conv: f64,
    /// Attention forward.
    pub attention: f64,
    /// Attention backward.
    pub attention_backward: f64,
    /// The library of these rates and of tables without a library; `None` is the one that PyTorch
    /// picks.
    pub attention_backend: Option<AttentionBackend>,
    /// Time of attention's backward with a fixed order of sums, relative to the tables; `None` if
    /// unknown.
    pub attention_backward_fixed_order: Option<f64>,
    /// Time of 8-bit matmuls with float32 accumulation, relative to those that accumulate with the
    /// precision of tensor cores; `None` if unknown.
    pub float8_full_accumulation: Option<f64>,
    /// Share of `memory_gbps` for each class of memory-bound kernels.
    pub memory: BTreeMap<MemoryClass, f64>,
}

/// Slowdown of 16-bit GEMMs if the number of elements in a row of an operand is not a multiple of
/// 8: the library then picks kernels without 16-byte loads.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmMisaligned {
    /// Time relative to the aligned GEMM if rows have an even number of elements.
    pub even: f64,
    /// The same if a row has an odd number of elements.
    pub odd: f64,
    /// The same if only rows of the result have an odd number of elements, as for logits of an odd
    /// vocabulary. If not given, `odd`.
    #[serde(default)]
    pub odd_result: Option<f64>,
    /// The same for batches of matrices of which an operand has rows that begin at odd elements. If
    /// not given, `odd`.
    #[serde(default)]
    pub batched: Option<f64>,
}

/// Classes of memory-bound kernels. Backward kernels of a class may have a separate entry.
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
    /// Source of the rows.
    pub source: String,
    /// Element type.
    pub dtype: DType,
    /// What shares a scale in 8-bit matmuls. The default is [`ScaleMode::Tensorwise`].
    pub scaling: Option<ScaleMode>,
    /// Whether 8-bit matmuls accumulate with the precision of tensor cores. The default is true.
    pub fast_accum: Option<bool>,
    /// Rows.
    pub rows: Vec<GemmRow>,
}

impl GemmTable {
    /// Returns what the matmuls of all rows have in common.
    #[must_use]
    pub fn kind(&self) -> GemmKind {
        GemmKind::of(self.dtype).refined(self.scaling, self.fast_accum)
    }
}

/// One measured grouped GEMM: `[experts, rows per expert, n, k, microseconds]`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct GroupedGemmRow(pub u64, pub u64, pub u64, pub u64, pub f64);

/// `[[grouped_gemm]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupedGemmTable {
    /// Source of the rows.
    pub source: String,
    /// Element type.
    pub dtype: DType,
    /// Whether 8-bit matmuls accumulate with the precision of tensor cores. The default is true.
    pub fast_accum: Option<bool>,
    /// Whether the matmuls are over the rows of an expert, `[n, rows] x [rows, k]`. Otherwise rows
    /// are multiplied by matrices.
    pub weight_gradient: bool,
    /// Element type of weight gradients. The default is `dtype`; in 8 bits, it is bf16.
    pub result: Option<DType>,
    /// Rows.
    pub rows: Vec<GroupedGemmRow>,
}

impl GroupedGemmTable {
    /// Returns what the matmuls of all rows have in common. In 8 bits, each factor has one scale.
    #[must_use]
    pub fn kind(&self) -> GemmKind {
        GemmKind::of(self.dtype).refined(None, self.fast_accum)
    }

    /// Returns the element type of weight gradients; `None` if the matmuls compute none.
    #[must_use]
    pub fn gradient(&self) -> Option<DType> {
        let default = match self.dtype.size() {
            1 => DType::Bf16,
            _ => self.dtype,
        };
        let result = self.result.unwrap_or(default);
        self.weight_gradient.then_some(result)
    }
}

/// One measured attention kernel: `[batch, heads, kv_heads, seq, head_dim, microseconds]`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct AttentionRow(pub u64, pub u64, pub u64, pub u64, pub u64, pub f64);

impl AttentionRow {
    /// Returns the measured sizes, for a table with or without causal mask.
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
    /// Source of the rows.
    pub source: String,
    /// Element type.
    pub dtype: DType,
    /// Causal mask.
    pub causal: bool,
    /// Mask in a tensor.
    #[serde(default)]
    pub mask: bool,
    /// Backward kernel.
    pub backward: bool,
    /// Library; `None` is the one that PyTorch picks.
    pub backend: Option<AttentionBackend>,
    /// Rows.
    pub rows: Vec<AttentionRow>,
}

/// `[[attention_backend]]`: rates of an attention library that a job may ask for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Source of the numbers.
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
    /// Source of the rows.
    pub source: String,
    /// Class.
    pub class: MemoryClass,
    /// If given, only kernels whose name contains this text. Of several matching tables, a kernel
    /// uses the one with the longest text, or else that of the class. The names of elementwise
    /// kernels whose operands have two types end with `promoted`, those of softmax on rows that do
    /// not all begin at multiples of 16 bytes with `unaligned`. A cast to a wider type is
    /// `cast_up`, and `_chunk_cat` without a cast is `chunk_cat_no_cast`.
    pub op: Option<String>,
    /// If given, only kernels on this element type. A kernel prefers this table to one for all
    /// types.
    pub dtype: Option<DType>,
    /// If given, only kernels on matrix rows of at most this many elements. Of several matching
    /// tables, a kernel uses the one with the fewest. PyTorch computes softmax of short rows in
    /// registers.
    pub columns: Option<u64>,
    /// Whether the rows were measured within steps, where operands are in the caches or not as in a
    /// real step.
    pub in_step: bool,
    /// How the bytes of the rows were counted. If not given, see [`MemoryTable::counted`].
    pub bytes: Option<Counted>,
    /// `[bytes, microseconds]`, ascending.
    pub rows: Vec<(u64, f64)>,
}

/// How the bytes of a [`MemoryTable`]'s rows were counted. They differ for kernels that write
/// gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// The bytes that a launch reads and writes, with gradients in the type in which they are
    /// stored.
    Moved,
    /// The bytes in the descriptor of the kernel, which does not depend on how gradients are
    /// stored: all operands count in the compute type.
    Described,
    /// The bytes of all operands in the shape of the result, also of those that are broadcast. The
    /// time of strided kernels depends on the number of elements more than on the bytes that they
    /// move.
    Expanded,
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

/// `[[collective]]`: payload against microseconds, without other traffic on the links.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveTable {
    /// Source of the rows.
    pub source: String,
    /// Kind.
    pub kind: CollectiveName,
    /// Ranks.
    pub ranks: u32,
    /// Number of nodes. Each has the same number of ranks.
    pub nodes: u32,
    /// If given, only payloads of this element type. A collective prefers this table to one for all
    /// types.
    pub dtype: Option<DType>,
    /// `[bytes of the full side, microseconds]`, ascending.
    pub rows: Vec<(u64, f64)>,
    /// NCCL's own estimates for the same payloads, in the same form. They do not affect prices.
    /// They show how far the formula, which follows NCCL's tuner, and the tuner's numbers are from
    /// each other and from the measurements.
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
