//! `[compile]`.

use super::pattern::covers;
use serde::Serialize;

/// `compile.mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompileMode {
    /// One kernel per op.
    Off,
    /// Ops between hooks are compiled; every hook breaks the graph.
    Regions,
    /// Each block is compiled before sharding; hooks stay outside.
    Blocks,
    /// Collectives are nodes of one graph, which passes bucket and reorder.
    Full,
}

words!(CompileMode {
    Off = "off",
    Regions = "regions",
    Blocks = "blocks",
    Full = "full",
});

/// A CUDA graph scope inside a block, with the names of Megatron-LM's `--cuda-graph-scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// The attention half of a block.
    Attn,
    /// A dense feed-forward half of a block.
    Mlp,
    /// The part of an MoE layer before the token exchange: its norm and its router, and the shared
    /// expert unless it overlaps with the exchange.
    MoeRouter,
    /// The part of an MoE layer that computes where tokens go and permutes them.
    MoePreprocess,
    /// A whole MoE layer.
    Moe,
    /// The whole block.
    Block,
}

words!(Scope {
    Attn = "attn",
    Mlp = "mlp",
    MoeRouter = "moe_router",
    MoePreprocess = "moe_preprocess",
    Moe = "moe",
    Block = "block",
});

impl Scope {
    /// Returns whether the scope has work only in MoE layers.
    #[must_use]
    pub(crate) const fn needs_experts(self) -> bool {
        matches!(self, Self::MoeRouter | Self::MoePreprocess | Self::Moe)
    }

    /// Returns whether the scope contains the token exchange between ranks.
    #[must_use]
    pub(crate) const fn exchanges_tokens(self) -> bool {
        matches!(self, Self::Moe | Self::Block)
    }
}

/// `compile.cuda_graph`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaGraph {
    /// No capture.
    Off,
    /// Forward and backward of a step (and, with the native policy, its optimizer) as one graph,
    /// including collectives.
    FullIteration,
    /// Graphs for these scopes of every block; hooks stay outside.
    Scopes(Vec<Scope>),
}

impl CudaGraph {
    /// Returns whether a graph contains the token exchange between expert-parallel ranks, in which
    /// the host cannot wait.
    #[must_use]
    pub(crate) fn exchanges_tokens(&self) -> bool {
        match self {
            Self::Off => false,
            Self::FullIteration => true,
            Self::Scopes(scopes) => scopes.iter().any(|s| s.exchanges_tokens()),
        }
    }
}

/// `compile.merge_projections`: which linear layers with the same input become one GEMM if their
/// weights are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MergeProjections {
    /// One GEMM per layer.
    None,
    /// Only in backward: the gradients of queries, keys and values, and of gate and up.
    Gradients,
    /// Queries, keys and values, in forward and backward.
    Qkv,
    /// As `Qkv`, and also gate and up.
    All,
}

words!(MergeProjections {
    None = "none",
    Gradients = "gradients",
    Qkv = "qkv",
    All = "all",
});

/// `[compile]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compile {
    /// Mode.
    pub mode: CompileMode,
    /// Whether the loss is compiled as a function of its own. Modes `regions` and `full` compile it
    /// anyway.
    pub loss: bool,
    /// Globs over paths of modules that stay eager, including all modules inside them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// `full`: bucket collectives up to this many bytes (0: one collective per parameter).
    pub bucket_bytes: u64,
    /// `full`: bytes of collectives that may be in flight.
    pub max_inflight_bytes: u64,
    /// `full`: extra memory that reordering may use, as a fraction of the peak without it.
    pub memory_budget: f64,
    /// Linear layers that become one GEMM.
    pub merge_projections: MergeProjections,
    /// Fuse additions to a GEMM's result into the GEMM.
    pub epilogues: bool,
    /// Fuse column sums into row kernels over the same elements.
    pub mix_order_reductions: bool,
    /// Fuse elementwise code into the GEMMs before it.
    pub fused_products: bool,
    /// CUDA-graph capture.
    pub cuda_graph: CudaGraph,
}

impl Compile {
    /// Returns whether any code is compiled.
    #[must_use]
    pub fn compiles_code(&self) -> bool {
        self.loss || self.mode != CompileMode::Off
    }

    /// Returns whether the loss is compiled, alone or with the model.
    #[must_use]
    pub fn compiles_loss(&self) -> bool {
        self.loss || matches!(self.mode, CompileMode::Regions | CompileMode::Full)
    }

    /// Returns whether the module at a path, or one that contains it, stays eager.
    #[must_use]
    pub fn excludes(&self, path: &str) -> bool {
        self.exclude.iter().any(|glob| covers(glob, path))
    }
}
