//! `[compile]`.

use serde::Serialize;

/// `compile.mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// `compile.merge_projections`: which linear layers that read the same input are one product, where
/// their weights lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
