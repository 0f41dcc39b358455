//! The resolved scenario: every option has a value, every combination is legal.
//!
//! Values of these types come from [`super::load`], which checks them; code that builds one by hand (tests) is expected
//! to keep the rules of `scenario/validate.rs`.

use super::units::covers;
use crate::ir::DType;
use crate::units::Bytes;
use serde::Serialize;

/// A complete, checked scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scenario {
    /// The file's stem, or the name given by the caller.
    pub name: String,
    /// First comment lines of the file: what the scenario shows.
    pub about: String,
    /// `[model]`
    pub model: Model,
    /// `[train]`
    pub train: Train,
    /// `[mesh]`
    pub mesh: Mesh,
    /// `[fsdp]`
    pub fsdp: Fsdp,
    /// `[precision]`
    pub precision: Precision,
    /// `[compile]`
    pub compile: Compile,
    /// `[gate]`
    pub gate: Gate,
}

impl Scenario {
    /// Whether the optimizer's kernel sums what ranks exchange: one alone has exchanged nothing.
    #[must_use]
    pub const fn sums_in_optimizer(&self) -> bool {
        self.fsdp.sum_in_optimizer && self.fsdp.copy_engine_reduce && self.mesh.dp_shard > 1
    }

    /// Returns what is sharded, with the name that the policy's users know it by: `ZeRO-3 (FULL_SHARD)`, with Megatron-FSDP
    /// `ZeRO-3 (optim_grads_params)`.
    #[must_use]
    pub fn sharding(&self) -> String {
        let strategy = self.fsdp.strategy;
        let outer = self.mesh.dp_outer > 1;
        let replicated = outer && self.fsdp.outer_strategy == OuterStrategy::NoShard;
        let known = match self.fsdp.policy {
            PolicyKind::Megatron => Some(strategy.name()),
            // HFSDP is not a strategy of torch.
            _ if outer && !replicated => None,
            _ => strategy.torch(replicated),
        };
        match known {
            Some(name) => format!("{} ({name})", strategy.zero()),
            None => strategy.zero().to_owned(),
        }
    }
}

/// Model family: decides the graph that `model` builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// RMSNorm, RoPE, grouped-query attention, SwiGLU.
    Llama,
    /// LayerNorm with bias, learned positions, GELU, tied head.
    Gpt2,
    /// Post-norm `TransformerEncoderLayer` stack.
    Encoder,
    /// `layers` times Linear(hidden, hidden) with ReLU.
    Linear,
    /// `layers` same-padded convolutions with ReLU, then a dense layer.
    Cnn,
}

/// `[model]`: shapes. Fields that a family does not use keep their defaults.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Name of the preset the model came from, or the path of its `config.json`, if any.
    pub preset: Option<String>,
    /// Family.
    pub family: Family,
    /// Number of blocks (or linear layers, or convolutions).
    pub layers: u32,
    /// Model width in elements.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Elements of one head.
    pub head_dim: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Vocabulary size.
    pub vocab: u64,
    /// Embedding and head share one parameter.
    pub tie_embeddings: bool,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Longest sequence (rows of the position table).
    pub max_seq_len: u64,
    /// Channels of the CNN.
    pub channels: u64,
    /// Image height.
    pub height: u64,
    /// Image width.
    pub width: u64,
    /// Convolution kernel edge (odd).
    pub kernel: u64,
    /// Which linear layers carry a bias.
    pub bias: Bias,
    /// Queries and keys are normalised (RMSNorm) head by head before they are rotated.
    pub qk_norm: bool,
}

/// Linear layers with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bias {
    /// None of them.
    None,
    /// Those that make queries, keys and values.
    Qkv,
    /// All, and convolutions.
    All,
}

impl From<bool> for Bias {
    fn from(all: bool) -> Self {
        if all { Self::All } else { Self::None }
    }
}

/// As scenario files write it.
impl Serialize for Bias {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_bool(false),
            Self::Qkv => to.serialize_str("qkv"),
            Self::All => to.serialize_bool(true),
        }
    }
}

/// Activation recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Keep every saved tensor.
    None,
    /// Keep block inputs only; rerun the block's forward in backward.
    Full,
    /// Keep the results of matrix products and attention; rerun the rest.
    Selective,
    /// Keep what no fused kernel of backward can make again from what it reads anyway. Needs compiled code.
    Pointwise,
}

/// Blocks that [`Train::recompute`] applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecomputeLayers {
    /// Every one, and what lies outside of blocks.
    All,
    /// The first so many of the stack.
    First(u32),
    /// Blocks that a glob over module paths covers.
    Patterns(Vec<String>),
}

/// As scenario files write it.
impl Serialize for RecomputeLayers {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => to.serialize_str("all"),
            Self::First(n) => to.serialize_u32(*n),
            Self::Patterns(globs) => globs.serialize(to),
        }
    }
}

impl RecomputeLayers {
    /// Whether block `number` of the stack, a module of this path, is among them.
    #[must_use]
    pub fn has(&self, number: u32, path: &str) -> bool {
        match self {
            Self::All => true,
            Self::First(n) => number < *n,
            Self::Patterns(globs) => globs.iter().any(|glob| covers(glob, path)),
        }
    }
}

/// How the cross entropy is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// All logits at once, as float32.
    Materialized,
    /// Chunk by chunk over rows, head included; no full logits tensor.
    Chunked,
}

/// Optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW with decoupled weight decay; two moments a parameter.
    Adamw,
    /// Plain SGD; no state.
    Sgd,
}

/// Learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LrSchedule {
    /// `lr` to the end.
    Constant,
    /// Half a cosine from `lr` at the end of the warm-up to `min_lr` at the last step.
    Cosine,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Train {
    /// Tokens a sample (rows a sample for `linear`; 1 for `cnn`).
    pub seq_len: u64,
    /// Samples a rank and micro-batch.
    pub micro_batch: u64,
    /// Micro-batches a step.
    pub grad_accum: u32,
    /// Recompute.
    pub recompute: Recompute,
    /// Blocks that recompute applies to.
    pub recompute_layers: RecomputeLayers,
    /// Loss.
    pub loss: Loss,
    /// Rows of a chunk of the chunked loss.
    pub loss_chunk_rows: u64,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Peak learning rate.
    pub lr: f64,
    /// Steps over which the learning rate rises linearly to `lr`; 0 is none.
    pub warmup_steps: u32,
    /// Learning rate after the warm-up.
    pub lr_schedule: LrSchedule,
    /// Learning rate at the end of a cosine schedule.
    pub min_lr: f64,
    /// AdamW betas.
    pub betas: [f64; 2],
    /// AdamW epsilon.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Global gradient norm limit; 0 turns clipping off.
    pub clip_norm: f64,
    /// Compute the global gradient norm even when nothing is clipped.
    pub grad_norm: bool,
    /// The host waits for the device at the end of every step.
    pub sync: bool,
    /// Steps of a run.
    pub steps: u32,
    /// Run a validation forward every so many steps; 0 is never.
    pub validate_every: u32,
}

/// `[mesh]`: the ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mesh {
    /// Name of a shipped hardware profile, or path of a profile file, as the working directory has it.
    pub hardware: String,
    /// Inner (sharding) data-parallel size.
    pub dp_shard: u32,
    /// Outer data-parallel size (replication or outer sharding).
    pub dp_outer: u32,
    /// GPUs of one NVLink node.
    pub gpus_per_node: u32,
}

impl Mesh {
    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.dp_shard * self.dp_outer
    }
}

/// Lowering policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// This project's engine.
    Native,
    /// torch 2.11 `fully_shard`.
    Fsdp2,
    /// megatron-fsdp 0.6.1 (production).
    Megatron,
}

impl PolicyKind {
    /// As scenario files write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Fsdp2 => "fsdp2",
            Self::Megatron => "megatron",
        }
    }

    /// Whether what libraries work in (cuBLAS's products, attention's backward) comes from PyTorch's allocator, on this hardware: this
    /// engine has its own, with the kernels.
    #[must_use]
    pub fn allocates_workspaces(self, hardware: &str) -> bool {
        self != Self::Native && hardware != "cpu"
    }
}

/// What is sharded over the inner axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Nothing (DDP).
    NoShard,
    /// Optimizer state and main weights (ZeRO-1).
    Optim,
    /// And gradients (ZeRO-2).
    OptimGrads,
    /// And parameters (ZeRO-3).
    OptimGradsParams,
}

impl Strategy {
    /// Returns the name in the ZeRO paper's words; `DDP` where nothing is sharded.
    #[must_use]
    pub const fn zero(self) -> &'static str {
        match self {
            Self::NoShard => "DDP",
            Self::Optim => "ZeRO-1",
            Self::OptimGrads => "ZeRO-2",
            Self::OptimGradsParams => "ZeRO-3",
        }
    }

    /// Returns the value of `fsdp.strategy`: Megatron-FSDP's words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoShard => "no_shard",
            Self::Optim => "optim",
            Self::OptimGrads => "optim_grads",
            Self::OptimGradsParams => "optim_grads_params",
        }
    }

    /// Returns the name of torch's `ShardingStrategy`, if it has one; `replicated` over an outer axis.
    #[must_use]
    pub const fn torch(self, replicated: bool) -> Option<&'static str> {
        match (self, replicated) {
            (Self::NoShard, _) => Some("NO_SHARD"),
            (Self::Optim, _) => None,
            (Self::OptimGrads, false) => Some("SHARD_GRAD_OP"),
            (Self::OptimGrads, true) => Some("_HYBRID_SHARD_ZERO2"),
            (Self::OptimGradsParams, false) => Some("FULL_SHARD"),
            (Self::OptimGradsParams, true) => Some("HYBRID_SHARD"),
        }
    }
}

/// What is sharded over the outer axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OuterStrategy {
    /// Replicas (HSDP).
    NoShard,
    /// Optimizer state and main weights (HFSDP).
    Optim,
}

/// Which modules are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Units {
    /// Each block is a unit; the root owns the rest (embedding, final norm, head).
    Block,
    /// One unit: the whole model.
    Root,
    /// One unit for each match; the root owns what no pattern matches.
    Patterns(Vec<UnitPattern>),
}

/// One entry of `units = [...]`: module globs joined with `+` make one unit; the suffix `=keep` exempts the unit from
/// `reshard_after_forward`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitPattern {
    /// Globs over module paths; `*` matches any characters of one path component. With one glob each match is a unit of its own, with
    /// several (`norm+output`) all matches together are one unit.
    pub modules: Vec<String>,
    /// Never reshard this unit after forward.
    pub keep: bool,
}

/// `reshard_after_forward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reshard {
    /// `true`: free full parameters after forward, gather again in backward (the root only with `reshard_root`).
    Always,
    /// `false`: keep full parameters until backward is done.
    Never,
    /// `auto`: every unit but the last block.
    Auto,
    /// Integer: reshard to groups of this many ranks.
    Group(u32),
}

/// `gradient_sync`: in which micro-batches of a step gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientSync {
    /// In each, over all axes.
    Every,
    /// In each over `dp_shard`, in the last over `dp_outer` too.
    OuterLast,
    /// In the last; until then full gradients are added up.
    Last,
}

/// Gather-ahead of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefetch {
    /// What the policy does on its own (`fsdp2`: the implicit overlap of its streams).
    Implicit,
    /// This many units ahead; 0 gathers on demand, after the computation before it.
    Depth(u32),
    /// Units ahead until this many elements are in flight.
    Elements(u64),
}

/// Where transient full-size buffers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AllocatorKind {
    /// PyTorch's caching allocator.
    Caching,
    /// Fixed slots planned from a traced step.
    Pool,
    /// Two copies of the largest unit's buffers.
    DoubleBuffer,
    /// Storage allocated and freed for each use (over the caching allocator).
    Temporary,
}

/// `[fsdp]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fsdp {
    /// Policy.
    pub policy: PolicyKind,
    /// Inner strategy.
    pub strategy: Strategy,
    /// Outer strategy (meaningful when `dp_outer > 1`).
    pub outer_strategy: OuterStrategy,
    /// Units.
    pub units: Units,
    /// Reshard after forward.
    pub reshard_after_forward: Reshard,
    /// The root reshards after forward as other units do.
    pub reshard_root: bool,
    /// Reshard after the backward of every micro-batch, not of the last alone.
    pub reshard_after_backward: bool,
    /// Which micro-batches reduce.
    pub gradient_sync: GradientSync,
    /// Prefetch in forward.
    pub prefetch_forward: Prefetch,
    /// Prefetch in backward.
    pub prefetch_backward: Prefetch,
    /// Units that the end of a step gathers for the next one.
    pub prefetch_next_step: u32,
    /// The optimizer updates a unit behind its reduction, during backward.
    pub optimizer_in_backward: bool,
    /// Gradient buffers that may be in flight (at least 1).
    pub reduce_in_flight: u32,
    /// Reduce on a side stream.
    pub async_reduce: bool,
    /// All-gather and reduce-scatter use communicators of their own.
    pub separate_communicators: bool,
    /// All-gathers run on copy engines and hold no SMs.
    pub copy_engine_gather: bool,
    /// Reductions are an all-to-all on copy engines and a kernel that sums.
    pub copy_engine_reduce: bool,
    /// The optimizer's kernel sums what such reductions have exchanged.
    pub sum_in_optimizer: bool,
    /// One side stream for all-gather and reduce-scatter.
    pub unify_comm_stream: bool,
    /// Allocator of the transient buffers.
    pub allocator: AllocatorKind,
    /// `expandable_segments` of the caching allocator.
    pub expandable_segments: bool,
    /// Bytes of cuBLAS's workspace, one for each of PyTorch's two threads; 0 where there is none.
    pub cublas_workspace_bytes: u64,
    /// Double buffer: units that do not fit the pattern get a persistent buffer instead of a temporary one.
    pub persist_on_alloc_fail: bool,
    /// Use AVG in the collective instead of scaling by 1/dp.
    pub average_in_collective: bool,
    /// The loss is a sum over tokens: gradients are not scaled.
    pub per_token_loss: bool,
    /// Check shards and gradients for NaN around every collective.
    pub nan_check: bool,
    /// State that rests in host memory.
    pub offload: Offload,
    /// Globs of modules whose parameters are frozen (`requires_grad = false`).
    pub frozen: Vec<String>,
}

impl Fsdp {
    /// Whether a micro-batch's gradients are reduced over `dp_shard` (and, where `outer`, over `dp_outer` too); `last`: the step's last one.
    #[must_use]
    pub fn reduces(&self, outer: bool, last: bool) -> bool {
        last || match self.gradient_sync {
            GradientSync::Every => true,
            GradientSync::OuterLast => !outer,
            GradientSync::Last => false,
        }
    }
}

/// `fsdp.offload`: what rests in host memory between uses. Each piece keeps its identity and its device address: bytes move,
/// objects do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Offload {
    /// Compute weights at rest.
    pub params: bool,
    /// Gradients at rest.
    pub grads: bool,
    /// Main weights and moments.
    pub optimizer: bool,
}

impl Offload {
    /// Whether anything is offloaded.
    #[must_use]
    pub const fn any(self) -> bool {
        self.params || self.grads || self.optimizer
    }
}

/// `[precision]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Dtype of gathered parameters, activations and matrix products.
    pub compute: DType,
    /// Dtype of the main (optimizer) weights; `None` (scenario: `"none"`): the compute weights are the optimizer's.
    pub main_params: Option<DType>,
    /// Dtype in which gradients are kept between micro-batches.
    pub main_grads: DType,
    /// Dtype in which gradients are reduced over the inner axis (policies fsdp2 and megatron: over both).
    pub comm_grads: DType,
    /// Dtype of the optimizer moments.
    pub moments: DType,
    /// Every sum has a fixed order, whatever the device.
    pub deterministic: bool,
}

/// `compile.mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CompileMode {
    /// One kernel an op.
    Off,
    /// Ops between hooks are compiled; every hook breaks the graph.
    Regions,
    /// Each block is compiled before sharding; hooks stay outside.
    Blocks,
    /// Collectives are nodes of one graph that passes bucket and reorder.
    Full,
}

/// A CUDA-graph scope inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// The attention half of a block.
    Attn,
    /// The feed-forward half of a block.
    Mlp,
    /// The whole block.
    Block,
}

/// `compile.cuda_graph`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaGraph {
    /// No capture.
    Off,
    /// Forward and backward of a step (and, with the native policy, its optimizer), collectives included, as one graph.
    FullIteration,
    /// These scopes of every block; hooks stay outside.
    Scopes(Vec<Scope>),
}

/// `compile.merge_projections`: which linear layers that read the same input are one product, where their weights lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeProjections {
    /// Each layer is a product of its own.
    None,
    /// In backward alone: the gradients of queries, keys and values, and of gate and up.
    Gradients,
    /// Queries, keys and values, in forward and backward.
    Qkv,
    /// Those, and gate and up.
    All,
}

/// `[compile]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compile {
    /// Mode.
    pub mode: CompileMode,
    /// `full`: bucket collectives up to this many bytes (0: one collective a parameter).
    pub bucket_bytes: u64,
    /// `full`: bytes of collectives that may be in flight.
    pub max_inflight_bytes: u64,
    /// `full`: extra memory that reordering may cost, as a fraction of the peak without it.
    pub memory_budget: f64,
    /// Linear layers that are one product.
    pub merge_projections: MergeProjections,
    /// Additions to a product's result are part of the product.
    pub epilogues: bool,
    /// Sums over rows are part of kernels that run row by row over the same elements.
    pub mix_order_reductions: bool,
    /// Elementwise code behind products is part of them.
    pub fused_products: bool,
    /// CUDA-graph capture.
    pub cuda_graph: CudaGraph,
}

/// What of the program `shardlab gate` holds fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateProgram {
    /// Its digest.
    Exact,
    /// How many instructions of each kind there are.
    Counts,
    /// Nothing.
    Off,
}

/// What `shardlab gate` is for: it sets the defaults of the other keys of `[gate]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GatePreset {
    /// The step has to fit and to stay within its budgets; growth beyond a tolerance fails, improvements and other
    /// changes of the program do not.
    #[default]
    Budget,
    /// Every change fails, for better or worse: allocated bytes and the program have to be equal.
    Strict,
}

/// `[gate]`: limits for `shardlab gate`, checked for form here and used there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// What the gate is for.
    pub preset: GatePreset,
    /// Relative tolerance of the predicted step time.
    pub step_time: f64,
    /// Relative tolerance of the ratio of measured step times, old against new.
    pub measured_step_time: f64,
    /// Relative tolerance of peak allocated bytes.
    pub allocated: f64,
    /// Relative tolerance of peak reserved bytes.
    pub reserved: f64,
    /// Relative tolerance of device bytes.
    pub device: f64,
    /// Most reserved memory of a rank, whatever the baseline has.
    pub max_memory: Option<Bytes>,
    /// Longest predicted step in milliseconds, likewise.
    pub max_step_ms: Option<f64>,
    /// Relative tolerance of each loss.
    pub loss: f64,
    /// Absolute tolerance of each loss, added to the relative one.
    pub loss_absolute: f64,
    /// Area between the loss curves over the area under the baseline's.
    pub loss_area: f64,
    /// How much worse the final loss may be, relative.
    pub final_loss: f64,
    /// Relative tolerance of each gradient norm.
    pub grad_norm: f64,
    /// Runs with different seeds.
    pub seeds: u32,
    /// What of the program may not change.
    pub program: GateProgram,
}

impl Default for Gate {
    fn default() -> Self {
        Self::of(GatePreset::default())
    }
}

impl Gate {
    /// The limits of a preset.
    #[must_use]
    pub const fn of(preset: GatePreset) -> Self {
        let (memory, allocated, program) = match preset {
            GatePreset::Budget => (0.02, 0.02, GateProgram::Off),
            GatePreset::Strict => (0.01, 0.0, GateProgram::Exact),
        };
        Self {
            preset,
            step_time: 0.005,
            measured_step_time: 0.05,
            allocated,
            reserved: memory,
            device: memory,
            max_memory: None,
            max_step_ms: None,
            loss: 1e-3,
            loss_absolute: 0.0,
            loss_area: 5e-4,
            final_loss: 1e-3,
            grad_norm: 0.01,
            seeds: 1,
            program,
        }
    }
}
