//! The list of operations, with their operand order.
//!
//! An operation reads its inputs and writes its outputs. Slots describe both: they have a shape,
//! strides and a dtype, so that one operation covers contiguous, strided and broadcast operands.
//! Arithmetic is done in float32 (or wider) and rounded to the output's dtype. The "rows" of a
//! tensor are all its dimensions except the last, flattened.
//!
//! This is the only list of operations. The planner's definition of an operation is its
//! [`OpDef`](crate::ops::OpDef) in `ops/<family>.rs`; the code that computes it is in the `exec`
//! crate, in `kernels/ops/<family>.rs`. Both dispatch through [`match_op!`](crate::match_op), so an
//! operation that lacks a part does not compile.

use super::{
    DType, Documents, ForcedChoice, Indexing, PackedFormat, PackedScales, Real, RowLimit,
    ScaleBlock, ScoreMod, ShardOp,
};
use serde::Serialize;

/// Generates a struct per operation, [`OpKind`] and `match_op!` from the list of operations. The
/// given values of attributes are those in [`OpKind::ALL`].
macro_rules! ops {
    (@struct [$($meta:tt)*] $Name:ident) => {
        $($meta)*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
        pub struct $Name;
    };
    (@struct [$($meta:tt)*] $Name:ident $($field:tt)+) => {
        $($meta)*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
        pub struct $Name $($field)+
    };
    (@type $Name:ident $($field:ident)+) => { $Name };
    (
        $d:tt
        $(
            $(#[$doc:meta])*
            $Name:ident $({ $($(#[$field_doc:meta])* $field:ident: $t:ty = $value:expr,)+ })?;
        )*
        ~
        $(
            $(#[$late_doc:meta])*
            $Late:ident $({ $($(#[$late_field_doc:meta])* $late_field:ident: $late_t:ty = $late_value:expr,)+ })?;
        )*
    ) => {
        $(
            ops!(@struct [$(#[$doc])*] $Name $({ $($(#[$field_doc])* pub $field: $t,)+ })?);
        )*
        $(
            ops!(@struct [$(#[$late_doc])*] $Late $({ $($(#[$late_field_doc])* pub $late_field: $late_t,)+ })?);
        )*

        /// Operation of a kernel's body: `inputs -> outputs`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum OpKind {
            $(
                $(#[$doc])*
                $Name $((ops!(@type $Name $($field)+)))?,
            )*
            /// A kernel of the sharding engine, on byte ranges.
            Shard(ShardOp),
            $(
                $(#[$late_doc])*
                $Late $((ops!(@type $Late $($late_field)+)))?,
            )*
        }

        impl OpKind {
            /// Every operation of models, once.
            pub const ALL: &[Self] = &[
                $(Self::$Name $(($Name { $($field: $value),+ }))?,)*
                $(Self::$Late $(($Late { $($late_field: $late_value),+ }))?,)*
            ];
        }

        /// Evaluates an expression with `op` bound to a reference to the operation's struct in
        /// `kind`, an `&OpKind`: `match_op!(kind, op => op.name())`.
        #[macro_export]
        macro_rules! match_op {
            ($d kind:expr, $d op:ident => $d body:expr) => {
                match $d kind {
                    $(
                        $crate::ir::OpKind::$Name $(($crate::op_payload!($d op $($field)+)))? => {
                            let $d op = $crate::op_value!($Name, $d op $($($field)+)?);
                            $d body
                        }
                    )*
                    $crate::ir::OpKind::Shard($d op) => $d body,
                    $(
                        $crate::ir::OpKind::$Late $(($crate::op_payload!($d op $($late_field)+)))? => {
                            let $d op = $crate::op_value!($Late, $d op $($($late_field)+)?);
                            $d body
                        }
                    )*
                }
            };
        }
        pub(crate) use match_op;
    };
}

/// Binds the attributes of an operation in a pattern of [`match_op!`].
#[doc(hidden)]
#[macro_export]
macro_rules! op_payload {
    ($op:ident $($field:ident)+) => {
        $op
    };
}

/// Creates the struct of an operation in [`match_op!`].
#[doc(hidden)]
#[macro_export]
macro_rules! op_value {
    ($Name:ident, $op:ident) => {
        &$crate::ir::op::$Name
    };
    ($Name:ident, $op:ident $($field:ident)+) => {
        $op
    };
}

ops! {
    $
    /// `a, b[, bias] -> c`: matmul. `a` is read as rows x last dimension and transposed when `ta`,
    /// and `b` when `tb`; `bias` is added to every row of `c`.
    Gemm {
        /// `a` is stored as inner x m.
        ta: bool = false,
        /// `b` is stored as n x inner.
        tb: bool = false,
        /// Has the third input.
        bias: bool = false,
        /// Adds to the last input, which has the shape and type of `c` and may be `c`.
        accumulate: bool = false,
    };
    /// `q, k, v -> out, lse[, seed, offset]`: softmax attention over
    /// `[batch, heads, seq, head_dim]` tensors with any strides. Query head `i` uses key head
    /// `i / (heads / kv_heads)`. `lse` is the float32 log-sum-exp `[batch, heads, seq]`. `seed` and
    /// `offset` are the (unused) random state of dropout.
    Attention {
        /// Position `i` attends to positions up to `i`.
        causal: bool = true,
        /// Factor of the scores.
        scale: Real = Real(1.0),
    };
    /// `d_out, q, k, v, out, lse, seed, offset -> d_q, d_k, d_v`.
    AttentionGrad {
        /// As in the forward op.
        causal: bool = true,
        /// As in the forward op.
        scale: Real = Real(1.0),
    };
    /// `x, w -> y`: two-dimensional convolution, stride 1, padded to the same size. `x` is
    /// `[images, in, height, width]`, `w` is `[out, in, kernel, kernel]`.
    Conv {
        /// Kernel edge (odd).
        kernel: u64 = 3,
    };
    /// `d_y, w -> d_x` of [`Conv`].
    ConvGradInput {
        /// Kernel edge.
        kernel: u64 = 3,
    };
    /// `d_y, x -> d_w` of [`Conv`].
    ConvGradWeight {
        /// Kernel edge.
        kernel: u64 = 3,
    };
    /// `ids, table -> rows`: row `ids[i]` of the table for each `i`.
    Embedding;
    /// `d_rows, ids, d_table -> d_table`: adds row `i` of `d_rows` to row `ids[i]`, in place;
    /// without the third operand, to a table of zeros.
    EmbeddingGrad;
    /// `x, w -> y, rstd`: `y = x * rstd * w`, `rstd = 1 / sqrt(mean(x^2) + eps)` per row (float32).
    RmsNorm {
        /// Epsilon.
        eps: Real = Real(1e-5),
    };
    /// `d_y, x, w, rstd -> d_x` of [`RmsNorm`].
    RmsNormGrad;
    /// `d_y, x, rstd -> d_w` of [`RmsNorm`]: a sum over rows.
    RmsNormWeightGrad;
    /// `x, w, b -> y, mean, rstd`: layer norm over the last dimension.
    LayerNorm {
        /// Epsilon.
        eps: Real = Real(1e-5),
    };
    /// `d_y, x, w, mean, rstd -> d_x` of [`LayerNorm`].
    LayerNormGrad;
    /// `d_y, x, mean, rstd -> d_w, d_b` of [`LayerNorm`]: sums over rows.
    LayerNormParamGrad;
    /// `a, b -> a + b`, with zero strides for broadcasting. If the output is `a` itself, it works
    /// in place.
    Add;
    /// `a, b -> a - b`.
    Sub;
    /// `a, b -> a * b`.
    Mul;
    /// `a -> -a`.
    Neg;
    /// `x -> x * sigmoid(x)`.
    Silu;
    /// `d_y, x -> d_x` of [`Silu`].
    SiluGrad;
    /// `x -> gelu(x)`, the tanh approximation.
    Gelu;
    /// `d_y, x -> d_x` of [`Gelu`].
    GeluGrad;
    /// `x -> max(x, 0)`.
    Relu;
    /// `d_y, y -> d_x` of [`Relu`], from its result.
    ReluGrad;
    /// `a -> a`: copy in logical order, into the output's strides and dtype. The shapes may differ,
    /// but not the numbers of elements.
    Copy;
    /// `a, b, .. -> [a, b, ..]` along an axis.
    Cat {
        /// Axis.
        axis: u8 = 0,
    };
    /// `-> value` everywhere.
    Fill {
        /// Value.
        value: Real = Real(0.0),
    };
    /// `a -> sum of a over its leading elements`: the output has the last dimensions of `a`, and
    /// all dimensions before them are summed.
    SumLeading;
    /// `a -> sum` over images and positions: `[n, c, h, w] -> [c]`.
    SumChannels;
    /// `a -> sum` of all elements (a scalar).
    SumAll;
    /// `x -> log_softmax(x)` over the last dimension.
    LogSoftmax;
    /// `x, lse -> x - lse`: [`LogSoftmax`] from the log-sum-exp of the rows.
    LogProbs;
    /// `d_y, y -> d_x` of [`LogSoftmax`], from its result.
    LogSoftmaxGrad;
    /// `x -> lse`: log-sum-exp over the last dimension, which becomes 1.
    LogSumExp;
    /// `log_probs, labels -> loss, weight`: the negative mean of the labels' entries and the number
    /// of rows (both scalars).
    NllLoss;
    /// `d_loss, labels, weight, d_x -> d_x`: writes `-d_loss / weight` at the labels of the
    /// zero-filled `d_x`, in place.
    NllLossGrad;
    /// `x, target -> scale * (x - target)^2`.
    SquaredError {
        /// Factor (1 / number of elements for a mean).
        scale: Real = Real(1.0),
    };
    /// `d_y, x, target, d_x -> d_x` of [`SquaredError`], for a buffer that was filled before.
    SquaredErrorGrad {
        /// As in the forward op.
        scale: Real = Real(1.0),
    };
    /// `logits, labels, loss -> logits, loss`: adds `scale` times the sum of the rows' cross
    /// entropies to the scalar `loss`, and replaces the logits by `gradient` times the gradient of
    /// that sum, in place (chunked cross entropy).
    CrossEntropy {
        /// 1 / number of rows in all chunks.
        scale: Real = Real(1.0),
        /// `scale` times the gradient that backward starts from.
        gradient: Real = Real(1.0),
    };
    // A program's digest depends on the order of this list: new operations go last.
    ~
    /// `x -> by * x`.
    Scale {
        /// Factor.
        by: Real = Real(0.5),
    };
    /// `x -> cap * tanh(x / cap)`: a soft limit of the absolute value (Gemma 2).
    Softcap {
        /// Limit.
        cap: Real = Real(2.0),
    };
    /// `d_y, y -> d_x` of [`Softcap`], from its result.
    SoftcapGrad {
        /// As in the forward op.
        cap: Real = Real(2.0),
    };
    /// `x -> gelu(x)`, exact: `x * (1 + erf(x / sqrt(2))) / 2`.
    GeluErf;
    /// `d_y, x -> d_x` of [`GeluErf`].
    GeluErfGrad;
    /// `x -> sigmoid(x)`.
    Sigmoid;
    /// `d_y, y -> d_x` of [`Sigmoid`], from its result.
    SigmoidGrad;
    /// `x, w -> x * w`: each row of `x` is multiplied by its element of `w`, `[rows, 1]`.
    ScaleRows;
    /// `a, b -> dot`: the dot product of each row of `a` and `b`, `[rows, 1]`.
    RowDot;
    /// `logits[, bias] -> weights, ids`: chooses `k` of the columns of each row of the float32
    /// logits. Scores are a softmax or sigmoids of the row. The columns with the largest sums of
    /// score and bias are chosen; of equal sums, the lower column is chosen. If there are `groups`
    /// adjacent groups of columns, only the `kept` groups count whose two largest sums have the
    /// highest total. `weights` and `ids` are `[rows, k]`, in descending order of those sums.
    /// Weights are scores without bias. Forced choices do not depend on scores, and are in
    /// ascending order of columns.
    Route {
        /// Columns that are chosen.
        k: u64 = 2,
        /// Scores are sigmoids instead of a softmax.
        sigmoid: bool = false,
        /// Weights are divided by their sum.
        normalize: bool = true,
        /// Factor of the weights.
        scale: Real = Real(1.0),
        /// Groups of columns; 1 for none.
        groups: u64 = 1,
        /// Groups that count.
        kept: u64 = 1,
        /// Has the second input.
        bias: bool = false,
        /// What chooses columns, if not scores and bias.
        #[serde(skip_serializing_if = "Option::is_none")]
        forced: Option<ForcedChoice> = None,
    };
    /// `d_weights, logits, ids -> d_logits` of [`Route`].
    RouteGrad {
        /// As in the forward op.
        sigmoid: bool = false,
        /// As in the forward op.
        normalize: bool = true,
        /// As in the forward op.
        scale: Real = Real(1.0),
    };
    /// `ids -> offsets, position`: a stable sort of the choices `[tokens, k]` by expert. The rows
    /// of expert `e` are `offsets[e]..offsets[e + 1]`. `position`, `[tokens, k]`, is the row of
    /// each choice. Choices outside of `0..experts` belong to other ranks, and their position is
    /// -1. So is that of choices beyond a limit, which count for no expert.
    SortExperts {
        /// Experts of this rank.
        experts: u64 = 3,
        /// Rows, if there may be more choices.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit: Option<RowLimit> = Some(RowLimit { rows: 8, balanced: 6, drop: true }),
    };
    /// `x, position -> rows`: copies row `t` of `x` to the rows `position[t, ..]`. Negative
    /// positions are skipped, and rows without a position are left unchanged.
    Permute {
        /// How PyTorch code does this.
        #[serde(skip_serializing_if = "Indexing::is_own")]
        by: Indexing = Indexing::Own,
        /// Rows that positions name on average; `None`: as many as there are of both.
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `rows, position -> y`: row `t` of `y` is the sum of the rows `position[t, ..]`, in this
    /// order, in float32. Negative positions are skipped.
    Unpermute {
        /// How PyTorch code does this.
        #[serde(skip_serializing_if = "Indexing::is_own")]
        by: Indexing = Indexing::Own,
        /// As in [`Permute`].
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `a, b, offsets -> c`: one matmul per expert. Rows `offsets[e]..offsets[e + 1]` of `a` are
    /// multiplied by matrix `e` of `b`, which is `[experts, inner, n]`, or `[experts, n, inner]`
    /// with `tb`. Rows after the last offset are not written.
    GroupedGemm {
        /// Matrices of `b` are stored as n x inner.
        tb: bool = true,
        /// Average number of rows before the last offset; `None` means all.
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `a, b, offsets -> d_w` of [`GroupedGemm`]: matrix `e` of the result is `a^T b` over the rows
    /// `offsets[e]..offsets[e + 1]`. It is zero for an expert without rows.
    GroupedGemmWeightGrad {
        /// As in the forward op.
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `logits -> loss, counts`: the load-balancing loss of a router, times `scale`. With the
    /// probabilities `p` of a row (the softmax, or sigmoids divided by their sum) and the number
    /// `c[i]` of rows that choose column `i` among their `k` best, it is the mean over `sequences`
    /// equal groups of `n` adjacent rows of `columns / n^2 * sum_i(c[i] * sum_rows p[i])`. `counts`
    /// is `[sequences, columns]`, in float32.
    LoadBalance {
        /// Number of columns that a row chooses.
        k: u64 = 2,
        /// Groups of rows.
        sequences: u64 = 2,
        /// Probabilities are normalized sigmoids.
        sigmoid: bool = false,
        /// Factor of the loss.
        scale: Real = Real(0.5),
    };
    /// `d_loss, logits, counts -> d_logits` of [`LoadBalance`]. Counts are constants.
    LoadBalanceGrad {
        /// As in the forward op.
        sigmoid: bool = false,
        /// As in the forward op.
        scale: Real = Real(0.5),
    };
    /// `logits -> loss`: `scale` times the mean over rows of the squared log-sum-exp.
    ZLoss {
        /// Factor of the loss.
        scale: Real = Real(0.5),
    };
    /// `d_loss, logits -> d_logits` of [`ZLoss`].
    ZLossGrad {
        /// As in the forward op.
        scale: Real = Real(0.5),
    };
    /// `x -> x + by`.
    Shift {
        /// Addend.
        by: Real = Real(1.0),
    };
    /// Like [`Attention`], with modified scores (PyTorch's `flex_attention`).
    FlexAttention {
        /// Position `i` attends to positions up to `i`.
        causal: bool = true,
        /// Factor of the scores.
        scale: Real = Real(1.0),
        /// Modifications of the scaled scores.
        score_mod: ScoreMod = ScoreMod { softcap: Real(2.0), alibi: true, window: 3, documents: Documents::of(&[4, 1]) },
    };
    /// `d_out, q, k, v, out, lse, seed, offset -> d_q, d_k, d_v` of [`FlexAttention`].
    FlexAttentionGrad {
        /// As in the forward op.
        causal: bool = true,
        /// As in the forward op.
        scale: Real = Real(1.0),
        /// As in the forward op.
        score_mod: ScoreMod = ScoreMod { softcap: Real(2.0), alibi: true, window: 3, documents: Documents::of(&[4, 1]) },
    };
    /// `ids -> local`: the experts `[tokens, k]`, numbered as on each of `ranks` ranks, with the
    /// result `[ranks * tokens, k]`. Block `r` is `ids - r * experts`, so numbers outside of
    /// `0..experts` are experts of other ranks.
    LocalExperts {
        /// Number of ranks that divide the experts.
        ranks: u64 = 2,
        /// Experts of one rank.
        experts: u64 = 3,
    };
    /// `x, w[, bias] -> y`: causal depthwise convolution over positions, optionally followed by
    /// SiLU. `x` is `[batch, seq, channels]`, `w` is `[channels, 1, kernel]`.
    CausalConv1d {
        /// Number of positions that a result depends on: its own and those before it.
        kernel: u64 = 3,
        /// Has the third input.
        bias: bool = true,
        /// Ends with SiLU.
        silu: bool = true,
    };
    /// `d_y, x, w[, bias] -> d_x, d_w[, d_bias]` of [`CausalConv1d`].
    CausalConv1dGrad {
        /// As in the forward op.
        kernel: u64 = 3,
        /// As in the forward op.
        bias: bool = true,
        /// As in the forward op.
        silu: bool = true,
    };
    /// `x, dt, a_log, b, c, d, z -> y, states`: the selective scan of Mamba. `x`, `dt` and `z` are
    /// `[batch, seq, inner]`, `a_log` is `[inner, state]`, `b` and `c` are `[batch, seq, state]`.
    /// Each channel has a state `h = exp(softplus(dt) * -exp(a_log)) * h + softplus(dt) * b * x`;
    /// `y = (c . h + d * x) * silu(z)`. `states` are the states that backward starts from.
    SelectiveScan;
    /// `d_y, x, dt, a_log, b, c, d, z, states -> d_x, d_dt, d_a_log, d_b, d_c, d_d, d_z` of
    /// [`SelectiveScan`].
    SelectiveScanGrad;
    /// `x, dt, a_log, b, c, d, dt_bias -> y, states`: the scan of Mamba-2, chunk by chunk. `x` is
    /// `[batch, seq, heads, head_dim]`, `dt` is `[batch, seq, heads]`, `b` and `c` are
    /// `[batch, seq, groups, state]`, and the others are `[heads]`. All channels of a head share
    /// its decay.
    ChunkScan {
        /// Positions of a chunk.
        chunk: u64 = 4,
    };
    /// `d_y, x, dt, a_log, b, c, d, dt_bias, states -> d_x, d_dt, d_a_log, d_b, d_c, d_d,
    /// d_dt_bias` of [`ChunkScan`].
    ChunkScanGrad {
        /// As in the forward op.
        chunk: u64 = 4,
    };
    /// `q, k, v, g, beta, a_log, dt_bias -> y, inverses`: the gated delta rule, chunk by chunk.
    /// `q` and `k` are `[batch, seq, key_heads, key_dim]` and normalized, `v` is `[batch, seq,
    /// heads, value_dim]`, `g` and `beta` are `[batch, seq, heads]`, the others `[heads]`. With a
    /// decay for each channel (Kimi Linear), `g` is `[batch, seq, heads, key_dim]` and `dt_bias`
    /// `[heads * key_dim]`, and there are two matrices for each chunk. Each
    /// head has a state `s = a * (s - beta * k (k . s)) + beta * k v`, with the decay `a =
    /// exp(-exp(a_log) * softplus(g + dt_bias))`; `y = q . s`. `inverses` are the `[chunk, chunk]`
    /// matrices of each chunk that backward needs.
    GatedDelta {
        /// Positions of a chunk.
        chunk: u64 = 4,
    };
    /// `d_y, q, k, v, g, beta, a_log, dt_bias, inverses -> d_q, d_k, d_v, d_g, d_beta, d_a_log,
    /// d_dt_bias` of [`GatedDelta`].
    GatedDeltaGrad {
        /// As in the forward op.
        chunk: u64 = 4,
    };
    /// `q, k, v, bias -> out, lse`: attention like [`Attention`], whose scores have a learned
    /// addend, `[heads, seq, seq]` (T5), or one more column, `[heads]` (DeepSeek-V4).
    BiasedAttention {
        /// Position `i` attends to positions up to `i`.
        causal: bool = true,
        /// Factor of the scores.
        scale: Real = Real(1.0),
        /// Number of positions in a sliding window; 0 for none.
        window: u64 = 0,
    };
    /// `d_out, q, k, v, bias, out, lse -> d_q, d_k, d_v, d_bias` of [`BiasedAttention`].
    BiasedAttentionGrad {
        /// As in the forward op.
        causal: bool = true,
        /// As in the forward op.
        scale: Real = Real(1.0),
        /// As in the forward op.
        window: u64 = 0,
    };
    /// `q, k, w -> ids`: the positions that sparse attention attends to (DeepSeek-V3.2). `q` is
    /// `[batch, seq, heads, width]`, `k` is `[batch, seq, width]` and `w` is `[batch, seq, heads]`.
    /// Scores are sums over heads of `w * relu(q . k)`, for earlier positions.
    Indexer {
        /// Positions that are chosen.
        top_k: u64 = 4,
    };
    /// `x -> x^exponent`.
    Pow {
        /// Exponent.
        exponent: Real = Real(3.0),
    };
    /// `x -> 1 / sqrt(x)`, of positive numbers.
    Rsqrt;
    /// `x -> scale * sum(x)` of each row, `[rows, 1]`. With a scale of 1 / columns, this is the
    /// mean.
    RowSum {
        /// Factor of the sum.
        scale: Real = Real(0.5),
    };
    /// `stored -> weight`: a [packed](super::Packed) weight, from the bytes of a parameter.
    Dequantize {
        /// Place of the scales. Only sharded scales are among the bytes.
        scales: PackedScales = PackedScales::Replicated,
        /// Format.
        format: PackedFormat = PackedFormat::Nf4,
    };
    /// `x -> amax`: the largest absolute value of each row, `[rows, 1]`. NaN does not count.
    RowAmax;
    /// `amax[, offsets] -> scale, inverse`: the factor that scales the largest of all numbers to
    /// the largest number of the element type `to`, and its reciprocal. The factor is 1 if the
    /// largest number is zero or infinite, and the largest float32 if it would be infinite.
    Float8Scale {
        /// 8-bit type.
        to: DType = DType::F8E4m3,
        /// Whether it has the second input, the offsets of [`SortExperts`]. Then only rows before
        /// the last offset count, which are the rows that some expert reads.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        routed: bool = true,
    };
    /// `x, scale -> y`: `x * scale` in float32, rounded to the output's type (to nearest, ties to
    /// even). 8-bit types saturate. Infinities become NaN, so that they are noticed.
    Float8Cast;
    /// `x -> y, inverse`: like [`Float8Cast`], with a separate scale for each row: the largest
    /// power of two that is at most the scale of [`Float8Scale`]. `inverse` is `[rows, 1]`.
    Float8CastRows {
        /// 8-bit type.
        to: DType = DType::F8E4m3,
    };
    /// `a, b, inverse_a, inverse_b[, bias][, c] -> c`: matmul of `a`, `[m, inner]`, and `b`,
    /// `[n, inner]`, times the reciprocals of the scales that both were cast with. The reciprocals
    /// are scalars, or there is one per row of `a` and of `b`, or one per [`ScaleBlock`] of both.
    /// With [`ScaleBlock::MX`], `b` may be a view of a matrix `[inner, n]`. Sums and factors are
    /// float32.
    ScaledGemm {
        /// Tensor cores accumulate over the whole inner dimension with their own, lower precision
        /// (cuBLASLt: fast accumulation).
        fast: bool = false,
        /// Whether there is a bias, which is added to every row of `c`.
        bias: bool = false,
        /// Adds to the last input, which has the shape and type of `c` and may be `c`.
        accumulate: bool = false,
    };
    /// `x -> y, inverse`: like [`Float8CastRows`], with a separate scale for each block. `inverse`
    /// has one element per block: the reciprocal of the scale or, for [`ScaleBlock::MX`], the
    /// exponent plus 127 of the smallest power of two with which no element is too large.
    Float8CastBlocks {
        /// 8-bit type.
        to: DType = DType::F8E4m3,
        /// Blocks of the output.
        block: ScaleBlock = ScaleBlock::ROW,
        /// Whether the codes of the transpose are written.
        transposed: bool = false,
    };
    /// `ids -> local, position, counts`: places for the choices of this rank's tokens, `slots` on
    /// each of `ranks` ranks, which have `experts` experts each. `position`, `[tokens, k]` like the
    /// ids, is the place of each choice among those of all ranks. The places of a rank follow those
    /// of the previous rank, and are taken in the order of choices. A choice without a place has
    /// position -1, or is an error. `local`, `[ranks * slots, 1]`, is the number of the expert on
    /// its rank, or -1 in an empty place. `counts`, `[ranks, experts]`, are the numbers of choices
    /// per expert.
    DispatchExperts {
        /// Number of ranks that divide the experts.
        ranks: u64 = 2,
        /// Experts of one rank.
        experts: u64 = 3,
        /// Places on one rank.
        slots: u64 = 4,
        /// Choices without a place are dropped.
        drop: bool = true,
    };
    /// `a, b, inverse_a, inverse_b, offsets -> c`: like [`GroupedGemm`], for 8-bit factors whose
    /// scales have these reciprocals. `b` is `[experts, n, inner]`.
    ScaledGroupedGemm {
        /// As in [`ScaledGemm`].
        fast: bool = false,
        /// As in [`GroupedGemm`].
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `a, b, inverse_a, inverse_b, offsets -> d_w`: like [`GroupedGemmWeightGrad`], for transposed
    /// 8-bit factors: matrix `e` of the result is `a b^T` over the columns
    /// `offsets[e]..offsets[e + 1]`.
    ScaledGroupedGemmWeightGrad {
        /// As in [`GroupedGemm`].
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `local -> position`: where ranks that have pushed rows find their results. The input
    /// `local`, `[ranks * tokens, k]`, are the choices of [`LocalExperts`]. `position`,
    /// `[tokens, ranks]`, is the row of each token in the block of each rank, `r * tokens + token`,
    /// or -1 if the token has chosen none of that rank's experts.
    PushedRows {
        /// Number of ranks that divide the experts.
        ranks: u64 = 2,
        /// Experts of one rank.
        experts: u64 = 3,
    };
    /// `x, w -> y`: one-dimensional convolution, with zero padding on both sides as the positions
    /// of the result require. `x` is `[samples, in, positions]`, `w` is
    /// `[out, in / groups, kernel]`.
    Conv1d {
        /// Number of positions that a result depends on.
        kernel: u64 = 3,
        /// Number of positions from one result to the next.
        stride: u64 = 2,
    };
    /// `d_y, w -> d_x` of [`Conv1d`].
    Conv1dGradInput {
        /// As in the forward op.
        kernel: u64 = 3,
        /// As in the forward op.
        stride: u64 = 2,
    };
    /// `d_y, x -> d_w` of [`Conv1d`].
    Conv1dGradWeight {
        /// As in the forward op.
        kernel: u64 = 3,
        /// As in the forward op.
        stride: u64 = 2,
    };
    /// `x, w, bias -> y`: one linear layer per head. `x` is `[batch, seq, heads, in]`, `w` is
    /// `[heads, in, out]`, `bias` is `[heads, out]`.
    HeadLinear;
    /// `d_y, x, w, bias -> d_x, d_w, d_bias` of [`HeadLinear`].
    HeadLinearGrad;
    /// `k, v, decay, first -> y`: the recurrence of RWKV-4. `k` and `v` are `[batch, seq, inner]`,
    /// the others `[inner]`. Each result is the weighted mean of the values so far. The weights are
    /// `exp(k)`, which decay by `exp(-exp(decay))` per position, and `exp(first + k)` for the
    /// position itself.
    Wkv;
    /// `d_y, k, v, decay, first -> d_k, d_v, d_decay, d_first` of [`Wkv`].
    WkvGrad;
    /// `x, i, r, a -> y`: the recurrence of RG-LRU. `a` is `[inner]`, the others are `[batch, seq,
    /// inner]`: `y = decay * y + sqrt(1 - decay^2) * sigmoid(i) * x`, with `decay = exp(-8 *
    /// sigmoid(r) * softplus(a))`.
    RgLru;
    /// `d_y, x, i, r, a -> d_x, d_i, d_r, d_a` of [`RgLru`].
    RgLruGrad;
    /// `q, k, v, mask -> out, lse[, seed, offset]`: attention like [`Attention`], whose scores have
    /// an addend that is not trained, `[batch, 1, seq, seq]`: 0 or minus infinity. The kernel
    /// computes all scores.
    MaskedAttention {
        /// Factor of the scores.
        scale: Real = Real(1.0),
    };
    /// `d_out, q, k, v, mask, out, lse, seed, offset -> d_q, d_k, d_v` of [`MaskedAttention`].
    MaskedAttentionGrad {
        /// As in the forward op.
        scale: Real = Real(1.0),
    };
    /// `a, b -> c`: one matmul per leading index. `a` is `[n, rows, inner]`, `b` is
    /// `[n, inner, columns]`, both with any strides.
    BatchedGemm;
    /// `x -> softmax(x)` over the last dimension.
    Softmax;
    /// `d_y * y, y -> d_x` of [`Softmax`], from its result.
    SoftmaxGrad;
    /// `x -> y, kept`: randomly zeroes elements and scales the others. `kept` has one byte per
    /// element.
    Dropout {
        /// Probability of zeroing an element.
        p: Real = Real(0.1),
    };
    /// `d_y, kept -> d_x` of [`Dropout`].
    DropoutGrad {
        /// As in the forward op.
        p: Real = Real(0.1),
    };
    /// `x, w -> y`: sums of residual streams. `x` is `[streams, batch, seq, hidden]`, `w` is
    /// `[batch, seq, streams * streams]`, `y` is `[batch, seq, hidden, streams]`.
    MixStreams;
    /// `d_y, x, w -> d_x, d_w` of [`MixStreams`].
    MixStreamsGrad;
    /// `x, delta, shares -> y`: mixtures of each position and the previous one. `x` and `delta`,
    /// their difference, are `[batch, seq, hidden]`, `shares` is `[mixtures, hidden]`, `y` is
    /// `[mixtures, batch, seq, hidden]`.
    MixPositions;
    /// `d_y, x, delta, shares -> d_x, d_delta, d_shares` of [`MixPositions`].
    MixPositionsGrad;
    /// `r, k, v, w, u -> y`: the recurrence of RWKV-5 and 6, chunk by chunk. `r`, `k` and `w`, the
    /// decays, are `[batch, seq, heads, dim]`, or `w` is `[heads, dim]`; `v` is `[batch, seq,
    /// heads, width]`, and `u`, the weights of a position's own value, is `[heads, dim]`.
    WkvHeads {
        /// Positions of a chunk.
        chunk: u64 = 64,
    };
    /// `d_y, r, k, v, w, u -> d_r, d_k, d_v, d_w, d_u` of [`WkvHeads`].
    WkvHeadsGrad {
        /// As in the forward op.
        chunk: u64 = 64,
    };
    /// `r, w, k, v, a, b -> y`: the recurrence of RWKV-7, chunk by chunk. States decay by `w`, and
    /// their component along `a` is replaced by one along `b`. All are `[batch, seq, heads, dim]`.
    DiagonalDelta {
        /// Positions of a chunk.
        chunk: u64 = 64,
    };
    /// `d_y, r, w, k, v, a, b -> d_r, d_w, d_k, d_v, d_a, d_b` of [`DiagonalDelta`].
    DiagonalDeltaGrad {
        /// As in the forward op.
        chunk: u64 = 64,
    };
    /// `x, w, bias -> y`: two-dimensional convolution of each channel, stride 1, padded to the same
    /// size. `x` is `[images, channels, height, width]`, `w` is `[channels, 1, kernel, kernel]`.
    DepthwiseConv {
        /// Kernel edge (odd).
        kernel: u64 = 3,
    };
    /// `d_y, x, w, bias -> d_x, d_w, d_bias` of [`DepthwiseConv`].
    DepthwiseConvGrad {
        /// As in the forward op.
        kernel: u64 = 3,
    };
    /// `x -> min(max(x, min), max)`; NaN stays NaN.
    Clamp {
        /// Lower bound, if there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        min: Option<Real> = Some(Real(-0.5)),
        /// Upper bound.
        max: Real = Real(0.75),
    };
    /// `d_y, x -> d_x` of [`Clamp`]: 0 beyond the bounds.
    ClampGrad {
        /// As in the forward op.
        #[serde(skip_serializing_if = "Option::is_none")]
        min: Option<Real> = Some(Real(-0.5)),
        /// As in the forward op.
        max: Real = Real(0.75),
    };
    /// `q, k, v, sinks -> out, lse`: attention like [`FlexAttention`], whose softmax has one more
    /// score in each row: the learned score of the head, which has no value (gpt-oss). `sinks` is
    /// `[heads]`; `lse` includes them.
    SinkAttention {
        /// Position `i` attends to positions up to `i`.
        causal: bool = true,
        /// Factor of the scores.
        scale: Real = Real(1.0),
        /// Modifications of the scaled scores, but not of the sinks.
        score_mod: ScoreMod = ScoreMod { softcap: Real(2.0), alibi: true, window: 3, documents: Documents::of(&[4, 1]) },
    };
    /// `d_out, q, k, v, sinks, out, lse -> d_q, d_k, d_v, d_sinks` of [`SinkAttention`].
    SinkAttentionGrad {
        /// As in the forward op.
        causal: bool = true,
        /// As in the forward op.
        scale: Real = Real(1.0),
        /// As in the forward op.
        score_mod: ScoreMod = ScoreMod { softcap: Real(2.0), alibi: true, window: 3, documents: Documents::of(&[4, 1]) },
    };
    /// `table, offsets -> rows`: copies row `e` of the table, `[experts, columns]`, to each of the
    /// rows of expert `e`, `offsets[e]..offsets[e + 1]` ([`SortExperts`]). Rows without an expert
    /// are left unchanged.
    RepeatRows {
        /// As in [`GroupedGemm`].
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `d_rows, offsets -> d_table` of [`RepeatRows`]: sums over the rows of each expert.
    RepeatRowsGrad {
        /// As in [`GroupedGemm`].
        #[serde(skip_serializing_if = "Option::is_none")]
        routed: Option<u64> = None,
    };
    /// `ids -> counts`: the number of choices of each expert among the ids of a [`Route`], in
    /// float32.
    CountExperts;
    /// `q, k, v, starts -> out, lse, seed, offset`: attention like [`FlexAttention`], within
    /// documents that are data. `starts`, `[batch, seq]`, has the first position of each position's
    /// document; a sequence starts with a document. The documents of `score_mod` only determine the
    /// cost.
    DocumentAttention {
        /// Position `i` attends to positions up to `i`.
        causal: bool = true,
        /// Factor of the scores.
        scale: Real = Real(1.0),
        /// Modifications of the scaled scores.
        score_mod: ScoreMod = ScoreMod { softcap: Real(2.0), alibi: true, window: 3, documents: Documents::of(&[4, 1]) },
    };
    /// `d_out, q, k, v, starts, out, lse, seed, offset -> d_q, d_k, d_v` of [`DocumentAttention`].
    DocumentAttentionGrad {
        /// As in the forward op.
        causal: bool = true,
        /// As in the forward op.
        scale: Real = Real(1.0),
        /// As in the forward op.
        score_mod: ScoreMod = ScoreMod { softcap: Real(2.0), alibi: true, window: 3, documents: Documents::of(&[4, 1]) },
    };
    /// `x, w -> y`: two-dimensional convolution, with zero padding as the shape of the result
    /// requires. `x` is `[images, in, height, width]`, `w` is `[out, in / groups, kernel, kernel]`.
    Conv2d {
        /// Kernel edge.
        kernel: u64 = 3,
        /// Positions from one result to the next, in both dimensions.
        stride: u64 = 2,
    };
    /// `d_y, w -> d_x` of [`Conv2d`].
    Conv2dGradInput {
        /// As in the forward op.
        kernel: u64 = 3,
        /// As in the forward op.
        stride: u64 = 2,
    };
    /// `d_y, x -> d_w` of [`Conv2d`].
    Conv2dGradWeight {
        /// As in the forward op.
        kernel: u64 = 3,
        /// As in the forward op.
        stride: u64 = 2,
    };
    /// `x, w, bias -> y, stats`: normalizes each channel over all samples and positions.
    /// `x` is `[samples, channels, positions]`, `stats` is `[2, channels]`: means and inverse
    /// deviations.
    BatchNorm;
    /// `d_y, x, w, bias, stats -> d_x, d_w, d_bias` of [`BatchNorm`].
    BatchNormGrad;
    /// `x, mask -> y`: `x` with zeros in the rows whose element of `mask`, `[rows, 1]`, is not 0.
    /// It works in place.
    MaskRows;
}
