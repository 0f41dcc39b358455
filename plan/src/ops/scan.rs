//! State-space models and linear attention: scans over the positions of a sequence, depthwise
//! convolutions, and norms of channels. They are planned and priced, but `exec` does not run them.

use super::signature::{Operand, Signature, any};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::ir::{DType, KernelClass, OpKind, op};

/// FLOPs of a decay or a gate per element, counted as for elementwise functions.
const GATE_FLOPS: u64 = 8;
/// Arithmetic of backward, relative to that of forward.
const BACKWARD: u64 = 2;

/// Emits the gradients of all inputs as one kernel, from the inputs and the saved results.
fn gradients(at: Vjp<'_>, kind: OpKind) -> Contributions {
    let Vjp { g, op, dy, needs } = at;
    let saved = op.outputs.iter().skip(1);
    let inputs: Vec<_> = [dy]
        .iter()
        .chain(&op.inputs)
        .chain(saved)
        .copied()
        .collect();
    let made = g.compute_like(kind, &inputs, &op.inputs);
    let all = made.iter().copied().enumerate();
    all.filter(|(n, _)| needs[*n]).collect()
}

/// Sizes of a chunked scan whose heads have matrix-valued states.
struct Chunked {
    /// Number of positions of all sequences.
    tokens: u64,
    heads: u64,
    chunk: u64,
    /// Sizes of a head's state.
    state: [u64; 2],
}

impl Chunked {
    /// Reads the sizes from two operands: one with a row per position and head,
    /// `[batch, seq, heads, width]`, and one with the other dimension of the state.
    fn new(chunk: u64, rows: &[u64], other: &[u64]) -> Self {
        Self {
            tokens: rows[0] * rows[1],
            heads: rows[2],
            chunk: chunk.min(rows[1].max(1)),
            state: [rows[3], other[3]],
        }
    }

    /// Counts the FLOPs of the matmuls over chunks: `pairs` per pair of positions in a chunk and
    /// head, in multiples of the two dimensions of the state, and `states` matmuls with the whole
    /// state.
    fn flops(&self, pairs: [u64; 2], states: u64) -> u64 {
        let [width, other] = self.state;
        let of_pairs = self.chunk * (pairs[0] * width + pairs[1] * other);
        2 * self.tokens * self.heads * (of_pairs + states * width * other)
    }

    /// Returns the cost class: one batched matmul per chunk and head.
    fn class(&self, flops: u64) -> KernelClass {
        let [n, _] = self.state;
        let batch = (self.tokens / self.chunk).max(1) * self.heads;
        let k = flops / (2 * self.chunk * n * batch).max(1);
        KernelClass::Gemm {
            m: self.chunk,
            n,
            k: k.max(1),
            batch,
        }
    }
}

/// The common parts of a forward operation and its backward.
trait Scan {
    /// Names the inputs.
    fn inputs(&self) -> &'static [Operand];

    /// Names the results. Saved results follow the first one.
    fn outputs(&self) -> &'static [Operand] {
        RESULT
    }

    /// Counts the FLOPs of forward, for inputs that start at input `first`.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64;

    /// Returns the cost class of a kernel with these FLOPs. Most scans are memory-bound, because
    /// states stay on the chip.
    fn class_of(&self, at: &Operands<'_>, first: usize, flops: u64) -> KernelClass {
        let _ = (at, first, flops);
        KernelClass::Strided
    }
}

const RESULT: &[Operand] = &[any("the result")];
const RESULT_AND_STATES: &[Operand] = &[any("the result"), any("the states")];

impl Scan for op::CausalConv1d {
    fn inputs(&self) -> &'static [Operand] {
        const ALL: &[Operand] = &[any("the input"), any("the weight"), any("the bias")];
        &ALL[..2 + usize::from(self.bias)]
    }

    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        let activation = GATE_FLOPS * u64::from(self.silu);
        (2 * self.kernel + activation) * at.input(first).numel()
    }
}

/// A two-dimensional depthwise convolution. It is memory-bound, like the one over positions.
impl Scan for op::DepthwiseConv {
    fn inputs(&self) -> &'static [Operand] {
        const { &[any("the input"), any("the weight"), any("the bias")] }
    }

    fn outputs(&self) -> &'static [Operand] {
        &RESULT_AND_STATES[..1]
    }

    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        2 * self.kernel * self.kernel * at.input(first).numel()
    }

    fn class_of(&self, _: &Operands<'_>, _: usize, _: u64) -> KernelClass {
        KernelClass::Strided
    }
}

/// FLOPs per element of a norm over columns: two sums, and four to normalize and scale.
const NORM_FLOPS: u64 = 8;

impl Scan for op::BatchNorm {
    fn inputs(&self) -> &'static [Operand] {
        const { &[any("the input"), any("the weight"), any("the bias")] }
    }

    fn outputs(&self) -> &'static [Operand] {
        const { &[any("the result"), any("the statistics")] }
    }

    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        NORM_FLOPS * at.input(first).numel()
    }
}

impl Scan for op::SelectiveScan {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("the input"),
                any("the time steps"),
                any("a"),
                any("b"),
                any("c"),
                any("d"),
                any("the gate"),
            ]
        }
    }

    fn outputs(&self) -> &'static [Operand] {
        RESULT_AND_STATES
    }

    /// Counts a decay, an update and a multiplication per state element, and two gates per result.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        let state = at.input(first + 2).cols();
        (state * (GATE_FLOPS + 5) + 2 * GATE_FLOPS) * at.input(first).numel()
    }
}

impl op::ChunkScan {
    fn sizes(self, at: &Operands<'_>, x: usize) -> Chunked {
        Chunked::new(self.chunk, &at.input(x).shape, &at.input(x + 3).shape)
    }
}

impl Scan for op::ChunkScan {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("the input"),
                any("the time steps"),
                any("a"),
                any("b"),
                any("c"),
                any("d"),
                any("the bias of the time steps"),
            ]
        }
    }

    fn outputs(&self) -> &'static [Operand] {
        RESULT_AND_STATES
    }

    /// Counts scores and results of each chunk, and the states into and out of it.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        self.sizes(at, first).flops([1, 1], 2)
    }

    fn class_of(&self, at: &Operands<'_>, first: usize, flops: u64) -> KernelClass {
        self.sizes(at, first).class(flops)
    }
}

impl op::GatedDelta {
    fn sizes(self, at: &Operands<'_>, q: usize) -> Chunked {
        Chunked::new(self.chunk, &at.input(q + 2).shape, &at.input(q + 1).shape)
    }
}

impl Scan for op::GatedDelta {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("q"),
                any("k"),
                any("v"),
                any("the gate"),
                any("beta"),
                any("a"),
                any("the bias of the gate"),
            ]
        }
    }

    fn outputs(&self) -> &'static [Operand] {
        const { &[any("the result"), any("the inverses")] }
    }

    /// Counts, per chunk: keys by keys, queries by keys, the inverse applied to keys and values,
    /// the result, and three matmuls with the state.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        self.sizes(at, first).flops([2, 3], 3)
    }

    fn class_of(&self, at: &Operands<'_>, first: usize, flops: u64) -> KernelClass {
        self.sizes(at, first).class(flops)
    }
}

impl Scan for op::HeadLinear {
    fn inputs(&self) -> &'static [Operand] {
        const { &[any("the input"), any("the weight"), any("the bias")] }
    }

    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        2 * at.input(first).numel() * at.input(first + 1).cols()
    }

    fn class_of(&self, at: &Operands<'_>, first: usize, flops: u64) -> KernelClass {
        let (x, w) = (&at.input(first).shape, &at.input(first + 1).shape);
        let (m, n, batch) = (x[0] * x[1], w[2], w[0]);
        let k = (flops / (2 * m * n * batch).max(1)).max(1);
        KernelClass::Gemm { m, n, k, batch }
    }
}

impl Scan for op::Wkv {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("k"),
                any("v"),
                any("the decay"),
                any("the first weight"),
            ]
        }
    }

    /// Counts four exponentials per element, for the result and for the state, and sums of three
    /// terms.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        (4 * GATE_FLOPS + 16) * at.input(first).numel()
    }
}

impl Scan for op::RgLru {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("the input"),
                any("the gate of the input"),
                any("the gate of the decay"),
                any("a"),
            ]
        }
    }

    /// Counts two gates, two exponentials, a square root and the update per element.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        (5 * GATE_FLOPS + 6) * at.input(first).numel()
    }
}

impl Scan for op::MixStreams {
    fn inputs(&self) -> &'static [Operand] {
        const { &[any("the streams"), any("the weights")] }
    }

    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        2 * at.input(first).numel() * at.input(first).shape[0]
    }
}

impl Scan for op::MixPositions {
    fn inputs(&self) -> &'static [Operand] {
        const { &[any("the input"), any("the difference"), any("the shares")] }
    }

    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        2 * at.input(first).numel() * at.input(first + 2).rows()
    }
}

impl op::WkvHeads {
    fn sizes(self, at: &Operands<'_>, r: usize) -> Chunked {
        Chunked::new(self.chunk, &at.input(r + 2).shape, &at.input(r).shape)
    }
}

impl Scan for op::WkvHeads {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("r"),
                any("k"),
                any("v"),
                any("the decays"),
                any("the first weights"),
            ]
        }
    }

    /// Counts scores and results of each chunk, and the states into and out of it.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        self.sizes(at, first).flops([1, 1], 2)
    }

    fn class_of(&self, at: &Operands<'_>, first: usize, flops: u64) -> KernelClass {
        self.sizes(at, first).class(flops)
    }
}

impl op::DiagonalDelta {
    fn sizes(self, at: &Operands<'_>, r: usize) -> Chunked {
        Chunked::new(self.chunk, &at.input(r + 3).shape, &at.input(r).shape)
    }
}

impl Scan for op::DiagonalDelta {
    fn inputs(&self) -> &'static [Operand] {
        const {
            &[
                any("r"),
                any("the decays"),
                any("k"),
                any("v"),
                any("a"),
                any("b"),
            ]
        }
    }

    /// Counts, per chunk: `r` and `a` by `k` and `b`, the inverse applied to `a` and values, the
    /// result of both, and three matmuls with the state.
    fn arithmetic(&self, at: &Operands<'_>, first: usize) -> u64 {
        self.sizes(at, first).flops([3, 5], 3)
    }

    fn class_of(&self, at: &Operands<'_>, first: usize, flops: u64) -> KernelClass {
        self.sizes(at, first).class(flops)
    }
}

/// Defines a forward and a backward operation, with the attributes that both have.
macro_rules! scan {
    ($Forward:ident, $name:literal, $Grad:ident, $grad_name:literal) => {
        scan!(@define $Forward, $name, $Grad, $grad_name, |_this| op::$Forward, |_this| OpKind::$Grad);
    };
    ($Forward:ident, $name:literal, $Grad:ident, $grad_name:literal, $($field:ident)+) => {
        scan!(
            @define $Forward, $name, $Grad, $grad_name,
            |this: &op::$Grad| op::$Forward { $($field: this.$field),+ },
            |this: &op::$Forward| OpKind::$Grad(op::$Grad { $($field: this.$field),+ })
        );
    };
    (@define $Forward:ident, $name:literal, $Grad:ident, $grad_name:literal, $forward:expr, $backward:expr) => {
        impl OpDef for op::$Forward {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                Signature::new(self.inputs(), self.outputs())
            }

            /// Saved results are float32.
            fn result(&self, n: usize, inputs: &[DType]) -> DType {
                if n == 0 { inputs[0] } else { DType::F32 }
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                self.arithmetic(at, 0)
            }

            fn class(&self, at: &Operands<'_>) -> KernelClass {
                self.class_of(at, 0, self.flops(at))
            }

            fn vjp(&self, at: Vjp<'_>) -> Contributions {
                gradients(at, $backward(self))
            }

            fn saved_by_selective_recompute(&self) -> bool {
                true
            }

            fn takes_strides(&self) -> bool {
                true
            }

            fn is_priced_only(&self) -> bool {
                true
            }
        }

        impl OpDef for op::$Grad {
            fn name(&self) -> &'static str {
                $grad_name
            }

            fn signature(&self) -> Signature {
                let of = $forward(self);
                let saved = &of.outputs()[1..];
                let inputs = [&[any("the gradient")], of.inputs(), saved].concat();
                Signature::new(&inputs, of.inputs())
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                BACKWARD * $forward(self).arithmetic(at, 1)
            }

            fn class(&self, at: &Operands<'_>) -> KernelClass {
                $forward(self).class_of(at, 1, self.flops(at))
            }

            fn takes_strides(&self) -> bool {
                true
            }

            fn is_backward(&self) -> bool {
                true
            }

            fn is_priced_only(&self) -> bool {
                true
            }
        }
    };
}

scan!(CausalConv1d, "causal_conv1d", CausalConv1dGrad, "causal_conv1d_backward", kernel bias silu);
scan!(
    SelectiveScan,
    "selective_scan",
    SelectiveScanGrad,
    "selective_scan_backward"
);
scan!(
    ChunkScan,
    "chunk_scan",
    ChunkScanGrad,
    "chunk_scan_backward",
    chunk
);
scan!(
    GatedDelta,
    "gated_delta_rule",
    GatedDeltaGrad,
    "gated_delta_rule_backward",
    chunk
);
scan!(
    HeadLinear,
    "head_linear",
    HeadLinearGrad,
    "head_linear_backward"
);
scan!(
    BatchNorm,
    "batch_norm",
    BatchNormGrad,
    "batch_norm_backward"
);
scan!(Wkv, "wkv", WkvGrad, "wkv_backward");
scan!(RgLru, "rg_lru", RgLruGrad, "rg_lru_backward");
scan!(
    DepthwiseConv,
    "depthwise_conv",
    DepthwiseConvGrad,
    "depthwise_conv_backward",
    kernel
);
scan!(
    MixStreams,
    "mix_streams",
    MixStreamsGrad,
    "mix_streams_backward"
);
scan!(
    MixPositions,
    "mix_positions",
    MixPositionsGrad,
    "mix_positions_backward"
);
scan!(
    WkvHeads,
    "wkv_heads",
    WkvHeadsGrad,
    "wkv_heads_backward",
    chunk
);
scan!(
    DiagonalDelta,
    "diagonal_delta_rule",
    DiagonalDeltaGrad,
    "diagonal_delta_rule_backward",
    chunk
);
