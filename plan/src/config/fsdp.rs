//! `[fsdp]`.

use serde::{Deserialize, Serialize};

/// Lowering policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// This project's engine.
    Native,
    /// torch 2.11 `fully_shard`.
    Fsdp2,
    /// megatron-fsdp 0.6.1 (production).
    Megatron,
    /// megatron-fsdp 0.6.1 (experimental).
    MegatronV2,
}

words!(PolicyKind {
    Native = "native",
    Fsdp2 = "fsdp2",
    Megatron = "megatron",
    MegatronV2 = "megatron_v2",
});

/// Engine of a policy that has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Variant {
    /// The released one.
    #[default]
    Released,
    /// The prototype of Megatron-LM #4435.
    Pr4435,
}

words!(Variant {
    Released = "released",
    Pr4435 = "pr4435",
});

impl Variant {
    /// Returns whether it is the released engine.
    #[must_use]
    pub(crate) fn is_released(&self) -> bool {
        *self == Self::Released
    }
}

/// What is sharded over the inner axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Strategy {
    /// Nothing (DDP).
    NoShard,
    /// Optimizer state and main weights (ZeRO-1).
    Optim,
    /// As `Optim`, and also gradients (ZeRO-2).
    OptimGrads,
    /// As `OptimGrads`, and also parameters (ZeRO-3).
    OptimGradsParams,
}

words!(Strategy {
    NoShard = "no_shard",
    Optim = "optim",
    OptimGrads = "optim_grads",
    OptimGradsParams = "optim_grads_params",
});

impl Strategy {
    /// Returns the name in the terms of the ZeRO paper; `DDP` if nothing is sharded.
    #[must_use]
    pub const fn zero(self) -> &'static str {
        match self {
            Self::NoShard => "DDP",
            Self::Optim => "ZeRO-1",
            Self::OptimGrads => "ZeRO-2",
            Self::OptimGradsParams => "ZeRO-3",
        }
    }

    /// Returns the name in torch's `ShardingStrategy`, if it has one; `replicated` means that an
    /// outer axis replicates.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OuterStrategy {
    /// Replicas (HSDP).
    NoShard,
    /// Optimizer state and main weights (HFSDP).
    Optim,
}

words!(OuterStrategy {
    NoShard = "no_shard",
    Optim = "optim",
});

/// Which modules are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Units {
    /// Each block is a unit; the root owns the rest (embedding, final norm, head).
    Block,
    /// Each block is a unit, and so is the embedding. The final norm and the head form a unit that
    /// stays gathered after forward.
    #[serde(rename = "block_and_ends")]
    BlockAndEnds,
    /// One unit: the whole model.
    Root,
    /// One unit per match; the root owns what no pattern matches.
    Patterns(Vec<UnitPattern>),
}

/// One entry of `units = [...]`: module globs joined with `+` make one unit; the suffix `=keep`
/// exempts the unit from `reshard_after_forward`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitPattern {
    /// Globs over module paths; `*` matches any characters of one path component. With one glob,
    /// each match is a separate unit; with several (`norm+output`), all matches together are one
    /// unit.
    pub modules: Vec<String>,
    /// Never reshard this unit after forward.
    pub keep: bool,
}

/// `reshard_after_forward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reshard {
    /// `true`: free full parameters after forward, gather again in backward (the root only with
    /// `reshard_root`).
    Always,
    /// `false`: keep full parameters until backward is done.
    Never,
    /// `auto`: every unit except the last block.
    Auto,
    /// Integer: reshard to groups of this many ranks.
    Group(u32),
}

/// `ignored_params`: parameters that `fully_shard` does not manage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IgnoredParams {
    /// Those that expert-parallel ranks divide.
    Experts,
    /// Those of modules that these globs match, and of their submodules.
    Patterns(Vec<String>),
}

impl IgnoredParams {
    /// No parameters.
    pub const NONE: Self = Self::Patterns(Vec::new());

    /// Returns whether no parameter is ignored.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// `atomic`: elements of a flat buffer that are never split between shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Atomic {
    /// A row of a parameter.
    #[default]
    Row,
    /// A parameter (TensorAtomic).
    Tensor,
    /// This many rows of a parameter of two dimensions or more, counted from its first one
    /// (BlockAtomic).
    Block(u32),
}

impl Atomic {
    /// Returns whether it is a row.
    #[must_use]
    pub fn is_row(&self) -> bool {
        *self == Self::Row
    }
}

/// `gradient_sync`: the micro-batches of a step in which gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientSync {
    /// In each micro-batch, over all axes.
    Every,
    /// In each micro-batch over `dp_shard`, and in the last one also over `dp_outer`.
    OuterLast,
    /// In the last micro-batch; before that, full gradients are accumulated.
    Last,
}

words!(GradientSync {
    Every = "every",
    OuterLast = "outer_last",
    Last = "last",
});

/// Prefetch of gathers in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefetch {
    /// The policy's default behavior (`fsdp2`: the implicit overlap of its streams).
    Implicit,
    /// This many units ahead; 0 gathers on demand, after the previous computation.
    Depth(u32),
    /// Units ahead until this many elements are in flight.
    Elements(u64),
}

/// An entry of `prefetch_lists`: units that some units prefetch, in place of `prefetch_forward` and
/// `prefetch_backward` (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchList {
    /// Glob over names of units that prefetch.
    #[serde(default)]
    pub unit: String,
    /// Globs over names of the units to prefetch in forward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<Vec<String>>,
    /// Globs over names of the units to prefetch in backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backward: Option<Vec<String>>,
}

impl PrefetchList {
    /// Returns the globs of a direction.
    #[must_use]
    pub fn targets(&self, backward: bool) -> Option<&[String]> {
        let list = if backward {
            &self.backward
        } else {
            &self.forward
        };
        list.as_deref()
    }
}

/// Allocator of transient full-size buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocatorKind {
    /// PyTorch's caching allocator.
    Caching,
    /// Fixed slots planned from a traced step.
    Pool,
    /// Two copies of the largest unit's buffers.
    DoubleBuffer,
    /// Storage allocated and freed for each use (with the caching allocator).
    Temporary,
    /// Slots from the lifetimes of the first micro-batch (`TracePoolAllocator` of Megatron-LM
    /// #4435).
    TracePool,
}

words!(AllocatorKind {
    Caching = "caching",
    Pool = "pool",
    DoubleBuffer = "double_buffer",
    Temporary = "temporary",
    TracePool = "trace_pool",
});

/// `[fsdp]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fsdp {
    /// Policy.
    pub policy: PolicyKind,
    /// Engine, if the policy has several.
    #[serde(skip_serializing_if = "Variant::is_released")]
    pub variant: Variant,
    /// Inner strategy.
    pub strategy: Strategy,
    /// Outer strategy (meaningful when `dp_outer > 1`).
    pub outer_strategy: OuterStrategy,
    /// Units.
    pub units: Units,
    /// Reshard after forward.
    pub reshard_after_forward: Reshard,
    /// The root reshards after forward like other units.
    pub reshard_root: bool,
    /// Reshard after the backward of every micro-batch, not only after the last.
    pub reshard_after_backward: bool,
    /// Full parameters keep their storage when a unit is resharded.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub keep_unsharded_storage: bool,
    /// Units that a micro-batch skips reduce zero gradients.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub reduce_unused: bool,
    /// Micro-batches that reduce gradients.
    pub gradient_sync: GradientSync,
    /// Elements that shards of flat buffers do not split.
    #[serde(skip_serializing_if = "Atomic::is_row")]
    pub atomic: Atomic,
    /// Parameters that the policy does not manage.
    #[serde(skip_serializing_if = "IgnoredParams::is_none")]
    pub ignored_params: IgnoredParams,
    /// Globs of units that only the last micro-batch reduces, regardless of `gradient_sync`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub no_sync_units: Vec<String>,
    /// Prefetch in forward.
    pub prefetch_forward: Prefetch,
    /// Prefetch in backward.
    pub prefetch_backward: Prefetch,
    /// Units that some units prefetch; the first entry that matches a unit wins.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefetch_lists: Vec<PrefetchList>,
    /// Number of units that the end of a step gathers for the next one.
    pub prefetch_next_step: u32,
    /// The optimizer updates a unit after its reduction, during backward.
    pub optimizer_in_backward: bool,
    /// Maximum number of gradient buffers in flight (at least 1); policy native counts units.
    pub reduce_in_flight: u32,
    /// Reduce on a side stream.
    pub async_reduce: bool,
    /// All-gather and reduce-scatter use separate communicators.
    pub separate_communicators: bool,
    /// All-gathers run on copy engines and hold no SMs.
    pub copy_engine_gather: bool,
    /// Reductions are an all-to-all on copy engines, followed by a kernel that sums.
    pub copy_engine_reduce: bool,
    /// The optimizer's kernel sums the results of such an all-to-all.
    pub sum_in_optimizer: bool,
    /// Shards are cast to the compute dtype right before a gather; the cast is not kept.
    pub cast_before_all_gather: bool,
    /// Shards are cast for gathers on a separate stream.
    pub copy_in_stream: bool,
    /// All-gather and reduce-scatter share one side stream.
    pub unify_comm_stream: bool,
    /// Allocator of the transient buffers.
    pub allocator: AllocatorKind,
    /// `expandable_segments` of the caching allocator.
    pub expandable_segments: bool,
    /// Size in bytes of cuBLAS's workspaces, one for each of PyTorch's two threads; 0 for none.
    pub cublas_workspace_bytes: u64,
    /// Double buffer: units that do not fit the pattern get a persistent buffer, not a temporary
    /// one.
    pub persist_on_alloc_fail: bool,
    /// Use AVG in the collective instead of scaling by 1/dp.
    pub average_in_collective: bool,
    /// The loss is a sum over tokens: gradients are not scaled.
    pub per_token_loss: bool,
    /// Factor of the sum of gradients over ranks; `None` for one over the number of ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_scaling_factor: Option<f64>,
    /// The optimizer reads gradients in their own dtype, without casts to that of main weights.
    pub decoupled_gradients: bool,
    /// Transposed 8-bit copies of gathered weights stay in memory.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub keep_fp8_transpose_cache: bool,
    /// Check the operands of each collective for NaN, and its results.
    pub nan_check: bool,
    /// State that is kept in host memory.
    pub offload: Offload,
    /// Globs of modules whose parameters are frozen (`requires_grad = false`).
    pub frozen: Vec<String>,
}

impl Fsdp {
    /// Returns whether the gradients of a micro-batch are reduced over `dp_shard` (or, with
    /// `outer`, over `dp_replicate`). `last` means that it is the last micro-batch of the step.
    #[must_use]
    pub fn reduces(&self, outer: bool, last: bool) -> bool {
        last || match self.gradient_sync {
            GradientSync::Every => true,
            GradientSync::OuterLast => !outer,
            GradientSync::Last => false,
        }
    }
}

/// `fsdp.offload`: state that is kept in host memory between uses. Each buffer keeps its identity
/// and its device address; only its bytes move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Offload {
    /// Resident compute weights.
    pub params: bool,
    /// Resident gradients.
    pub grads: bool,
    /// Main weights and moments.
    pub optimizer: bool,
}

impl Offload {
    /// Returns whether any state is offloaded.
    #[must_use]
    pub const fn any(self) -> bool {
        self.params || self.grads || self.optimizer
    }

    /// Returns whether all state is offloaded.
    #[must_use]
    pub const fn all(self) -> bool {
        self.params && self.grads && self.optimizer
    }
}
