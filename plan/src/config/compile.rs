//! `[compile]`.

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
    /// Collectives are nodes of one graph that passes bucket and reorder.
    Full,
}

words!(CompileMode {
    Off = "off",
    Regions = "regions",
    Blocks = "blocks",
    Full = "full",
});

/// A CUDA-graph scope inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// The attention half of a block.
    Attn,
    /// The feed-forward half of a block.
    Mlp,
    /// The whole block.
    Block,
}

words!(Scope {
    Attn = "attn",
    Mlp = "mlp",
    Block = "block",
});

/// `compile.cuda_graph`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaGraph {
    /// No capture.
    Off,
    /// Forward and backward of a step (and, with the native policy, its optimizer), collectives
    /// included, as one graph.
    FullIteration,
    /// These scopes of every block; hooks stay outside.
    Scopes(Vec<Scope>),
}

/// `compile.merge_projections`: which linear layers that read the same input become one GEMM, if
/// their weights are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MergeProjections {
    /// One GEMM per layer.
    None,
    /// In backward only: the gradients of queries, keys and values, and of gate and up.
    Gradients,
    /// Queries, keys and values, in forward and backward.
    Qkv,
    /// Those, and gate and up.
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
    /// `full`: bucket collectives up to this many bytes (0: one collective per parameter).
    pub bucket_bytes: u64,
    /// `full`: bytes of collectives that may be in flight.
    pub max_inflight_bytes: u64,
    /// `full`: extra memory that reordering may cost, as a fraction of the peak without it.
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
