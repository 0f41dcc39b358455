//! Operations of kernel bodies, with their operand order.
//!
//! An operation reads its inputs and writes its outputs; both are described by slots that carry shape, strides and
//! dtype, so that the same operation serves contiguous, strided and broadcast operands. Arithmetic is done in float32 (or
//! wider) and rounded to the output's dtype. "Rows" of a tensor are all its dimensions but the last, flattened.

use serde::Serialize;
use std::hash::{Hash, Hasher};

/// A real attribute, compared and hashed by its bits.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, o: &Self) -> bool {
        self.0.to_bits() == o.0.to_bits()
    }
}

impl Eq for Real {}

impl Hash for Real {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.0.to_bits().hash(h);
    }
}

/// Operation of a kernel's body: `inputs -> outputs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// `a, b[, bias] -> c`: matrix product. `a` is read as rows x last dimension and transposed when `ta`; `b` likewise
    /// with `tb`; `bias` is added to every row of `c`.
    Gemm {
        /// `a` is stored as inner x m.
        ta: bool,
        /// `b` is stored as n x inner.
        tb: bool,
        /// Has the third input.
        bias: bool,
        /// Adds to the last input, which has the shape and type of `c` and may be `c`.
        accumulate: bool,
    },
    /// `q, k, v -> out, lse[, seed, offset]`: softmax attention over `[batch, heads, seq, head_dim]` tensors of any strides; query
    /// head `i` uses key head `i / (heads / kv_heads)`. `lse` is the float32 log-sum-exp `[batch, heads, seq]`; seed and
    /// offset are the (unused) random state of dropout.
    Attention {
        /// Position `i` sees positions up to `i`.
        causal: bool,
        /// Factor of the scores.
        scale: Real,
    },
    /// `d_out, q, k, v, out, lse, seed, offset -> d_q, d_k, d_v`.
    AttentionGrad {
        /// As in the forward op.
        causal: bool,
        /// As in the forward op.
        scale: Real,
    },
    /// `x, w -> y`: two-dimensional convolution, stride 1, padded to the same size. `x` is `[images, in, height, width]`, `w` is
    /// `[out, in, kernel, kernel]`.
    Conv {
        /// Kernel edge (odd).
        kernel: u64,
    },
    /// `d_y, w -> d_x` of [`OpKind::Conv`].
    ConvGradInput {
        /// Kernel edge.
        kernel: u64,
    },
    /// `d_y, x -> d_w` of [`OpKind::Conv`].
    ConvGradWeight {
        /// Kernel edge.
        kernel: u64,
    },
    /// `ids, table -> rows`: row `ids[i]` of the table for each `i`.
    Embedding,
    /// `d_rows, ids, d_table -> d_table`: adds row `i` of `d_rows` to row `ids[i]`, in place. Without the third operand to a
    /// table of zeros.
    EmbeddingGrad,
    /// `x, w -> y, rstd`: `y = x * rstd * w`, `rstd = 1 / sqrt(mean(x^2) + eps)` a row (float32).
    RmsNorm {
        /// Epsilon.
        eps: Real,
    },
    /// `d_y, x, w, rstd -> d_x` of [`OpKind::RmsNorm`].
    RmsNormGrad,
    /// `d_y, x, rstd -> d_w` of [`OpKind::RmsNorm`]: a sum over rows.
    RmsNormWeightGrad,
    /// `x, w, b -> y, mean, rstd`: layer norm over the last dimension.
    LayerNorm {
        /// Epsilon.
        eps: Real,
    },
    /// `d_y, x, w, mean, rstd -> d_x` of [`OpKind::LayerNorm`].
    LayerNormGrad,
    /// `d_y, x, mean, rstd -> d_w, d_b` of [`OpKind::LayerNorm`]: sums over rows.
    LayerNormParamGrad,
    /// `a, b -> a + b`, broadcasting by zero strides. With an output that is `a` itself: in place.
    Add,
    /// `a, b -> a - b`.
    Sub,
    /// `a, b -> a * b`.
    Mul,
    /// `a -> -a`.
    Neg,
    /// `x -> x * sigmoid(x)`.
    Silu,
    /// `d_y, x -> d_x` of [`OpKind::Silu`].
    SiluGrad,
    /// `x -> gelu(x)`, the tanh approximation.
    Gelu,
    /// `d_y, x -> d_x` of [`OpKind::Gelu`].
    GeluGrad,
    /// `x -> max(x, 0)`.
    Relu,
    /// `d_y, y -> d_x` of [`OpKind::Relu`], from its result.
    ReluGrad,
    /// `a -> a`: copy in logical order, into the output's strides and dtype. The shapes may differ; the numbers of elements
    /// do not.
    Copy,
    /// `a, b, .. -> [a, b, ..]` along an axis.
    Cat {
        /// Axis.
        axis: u8,
    },
    /// `-> value` everywhere.
    Fill {
        /// Value.
        value: Real,
    },
    /// `a -> sum of a over its leading elements`: the output has the last dimensions of `a`; everything before is summed.
    SumLeading,
    /// `a -> sum` over images and positions: `[n, c, h, w] -> [c]`.
    SumChannels,
    /// `a -> sum` of all elements (a scalar).
    SumAll,
    /// `x -> log_softmax(x)` over the last dimension.
    LogSoftmax,
    /// `x, lse -> x - lse`: [`OpKind::LogSoftmax`] from the log-sum-exp of the rows.
    LogProbs,
    /// `d_y, y -> d_x` of [`OpKind::LogSoftmax`], from its result.
    LogSoftmaxGrad,
    /// `x -> lse`: log-sum-exp over the last dimension, which becomes 1.
    LogSumExp,
    /// `log_probs, labels -> loss, weight`: the negative mean of the labels' entries and the number of rows (both scalars).
    NllLoss,
    /// `d_loss, labels, weight, d_x -> d_x`: writes `-d_loss / weight` at the labels of the zero-filled `d_x`, in place.
    NllLossGrad,
    /// `x, target -> scale * (x - target)^2`.
    SquaredError {
        /// Factor (1 / number of elements for a mean).
        scale: Real,
    },
    /// `d_y, x, target, d_x -> d_x` of [`OpKind::SquaredError`], over a buffer filled before.
    SquaredErrorGrad {
        /// As in the forward op.
        scale: Real,
    },
    /// `logits, labels, loss -> logits, loss`: adds `scale` times the sum of the rows' cross entropies to the scalar `loss`, and
    /// replaces the logits by `gradient` times the gradient of that sum, in place (chunked cross entropy).
    CrossEntropy {
        /// 1 / number of rows of all chunks.
        scale: Real,
        /// `scale` times the gradient that backward starts from.
        gradient: Real,
    },
    /// A kernel of the sharding engine, on byte ranges.
    Shard(crate::program::ShardOp),
}

impl OpKind {
    /// Name of the kernel that does only this.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gemm { bias: true, .. } => "addmm",
            Self::Gemm { .. } => "mm",
            Self::Attention { .. } => "attention",
            Self::AttentionGrad { .. } => "attention_backward",
            Self::Conv { .. } => "conv",
            Self::ConvGradInput { .. } => "conv_backward_input",
            Self::ConvGradWeight { .. } => "conv_backward_weight",
            Self::Embedding => "embedding",
            Self::EmbeddingGrad => "embedding_backward",
            Self::RmsNorm { .. } => "rms_norm",
            Self::RmsNormGrad => "rms_norm_backward",
            Self::RmsNormWeightGrad => "rms_norm_weight_backward",
            Self::LayerNorm { .. } => "layer_norm",
            Self::LayerNormGrad => "layer_norm_backward",
            Self::LayerNormParamGrad => "layer_norm_param_backward",
            Self::Add => "add",
            Self::Sub => "sub",
            Self::Mul => "mul",
            Self::Neg => "neg",
            Self::Silu => "silu",
            Self::SiluGrad => "silu_backward",
            Self::Gelu => "gelu",
            Self::GeluGrad => "gelu_backward",
            Self::Relu => "relu",
            Self::ReluGrad => "relu_backward",
            Self::Copy => "copy",
            Self::Cat { .. } => "cat",
            Self::Fill { .. } => "fill",
            Self::SumLeading => "sum_leading",
            Self::SumChannels => "sum_channels",
            Self::SumAll => "sum",
            Self::LogSoftmax => "log_softmax",
            Self::LogProbs => "log_probs",
            Self::LogSoftmaxGrad => "log_softmax_backward",
            Self::LogSumExp => "logsumexp",
            Self::NllLoss => "nll_loss",
            Self::NllLossGrad => "nll_loss_backward",
            Self::SquaredError { .. } => "squared_error",
            Self::SquaredErrorGrad { .. } => "squared_error_backward",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::Shard(op) => op.name(),
        }
    }

    /// Whether the kernel takes operands whose rows lie apart: columns of a wider buffer.
    pub(crate) fn takes_strides(self) -> bool {
        self.fusion() == Fusion::Pointwise
            || matches!(self, Self::Attention { .. } | Self::AttentionGrad { .. })
    }

    /// Whether it adds up rows, for the gradients of a norm's parameters.
    #[must_use]
    pub fn sums_rows(self) -> bool {
        self.fusion() == Fusion::Column
    }

    /// How a compiler may treat it.
    #[must_use]
    pub(crate) const fn fusion(self) -> Fusion {
        match self {
            Self::Gemm { .. }
            | Self::Attention { .. }
            | Self::AttentionGrad { .. }
            | Self::Conv { .. }
            | Self::ConvGradInput { .. }
            | Self::ConvGradWeight { .. }
            | Self::Embedding
            | Self::EmbeddingGrad
            | Self::CrossEntropy { .. }
            | Self::Shard(_) => Fusion::Extern,
            Self::RmsNormWeightGrad | Self::LayerNormParamGrad => Fusion::Column,
            Self::SumLeading | Self::SumChannels | Self::SumAll => Fusion::Alone,
            Self::RmsNorm { .. }
            | Self::RmsNormGrad
            | Self::LayerNorm { .. }
            | Self::LayerNormGrad
            | Self::LogSoftmax
            | Self::LogSoftmaxGrad
            | Self::LogSumExp
            | Self::NllLoss => Fusion::Row,
            _ => Fusion::Pointwise,
        }
    }
}

/// What fusion may do with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fusion {
    /// A library kernel: its operands must be in memory.
    Extern,
    /// A generated kernel of its own (column and full reductions).
    Alone,
    /// Sums over rows of what the norm's gradient reads too: alone, or with kernels over the same rows.
    Column,
    /// Reduces rows; fuses with elementwise neighbours over the same elements.
    Row,
    /// Elementwise.
    Pointwise,
}
