//! Operations of the kernels that sharding adds.

use super::{DType, Real, ScaleBlock};
use serde::Serialize;

/// A gradient that ranks have exchanged but not yet summed, with layout `[rank][element]`. The
/// pieces of an element are multiplied by the factor and added in rank order in float32, as
/// [`ShardOp::SumPieces`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Pieces {
    /// Number of pieces per element.
    pub ranks: u32,
    /// Factor of every piece.
    pub factor: Real,
}

/// Number of elements of an 8-bit optimizer state that share a scale.
pub const STATE_BLOCK: u64 = 256;

/// Number of elements from one scale's reciprocal to the next: cuBLASLt rejects a reciprocal that
/// does not start at a multiple of 16 bytes.
pub const RECIPROCAL_STRIDE: u64 = 4;

/// How an optimizer computes new weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UpdateRule {
    /// `torch.optim.AdamW`.
    AdamW,
    /// Lion (Chen et al. 2023): steps of the learning rate in the direction of the sign of a blend
    /// of momentum and gradient.
    Lion,
    /// `torch.optim.SGD` without momentum.
    Sgd,
    /// `torch.optim.Muon` with Nesterov momentum.
    Muon(NewtonSchulz),
    /// Moves the biases of a router by this much, down if its expert has more than the mean of the
    /// counted choices and up if it has less, and then all of them by as much that their sum stays
    /// (`load_balance_coeff` of torchtitan). What it reads as gradients are the counts.
    RouterBias(Real),
    // Last, because digests of programs depend on the order.
    /// The part of [`UpdateRule::Muon`] before a matrix is orthogonalized, on rows: weight decay
    /// and momentum.
    MuonMomentum,
}

/// Orthogonalization of the matrices of a launch (Newton-Schulz). Ranks have different matrices;
/// these are the maximum numbers over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct NewtonSchulz {
    /// FLOPs of the matmuls of all matrices of a rank.
    pub flops: u64,
    /// Shape of the matrix that needs the most memory: the shorter side, then the longer side.
    pub largest: [u64; 2],
}

/// Shape of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct MatrixShape {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
}

impl MatrixShape {
    /// Returns the number of elements.
    #[must_use]
    pub const fn numel(self) -> u64 {
        self.rows * self.cols
    }

    /// Returns the shorter side, then the longer side.
    #[must_use]
    pub fn short_and_long(self) -> [u64; 2] {
        [self.rows.min(self.cols), self.rows.max(self.cols)]
    }
}

impl NewtonSchulz {
    /// Returns the orthogonalization of one matrix.
    #[must_use]
    pub fn of_one(matrix: MatrixShape) -> Self {
        let sides = matrix.short_and_long();
        Self {
            flops: Self::matrix_flops(sides),
            largest: sides,
        }
    }

    /// Number of iterations, each with three matmuls in bfloat16 (`ns_steps` of
    /// `torch.optim.Muon`).
    pub const STEPS: u64 = 5;

    /// Coefficients `a`, `b` and `c` of an iteration, which maps `x` to `a x + (b g + c g g) x`
    /// with `g = x x^T` (`ns_coefficients`).
    pub const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

    /// Returns the shapes `[m, n, k]` of the matmuls in an iteration for a matrix with these sides.
    #[must_use]
    pub const fn matmuls([short, long]: [u64; 2]) -> [[u64; 3]; 3] {
        [
            [short, short, long],
            [short, short, short],
            [short, long, short],
        ]
    }

    /// Returns the FLOPs of the matmuls in all iterations for a matrix.
    #[must_use]
    pub fn matrix_flops(sides: [u64; 2]) -> u64 {
        let all = Self::matmuls(sides).map(|[m, n, k]| 2 * m * n * k);
        Self::STEPS * all.iter().sum::<u64>()
    }

    /// Returns the sizes in bytes of the buffers that a rank needs at a time for a matrix with
    /// these sides: the matrix before and after an iteration, and two square matrices with its
    /// shorter side, all in bfloat16.
    #[must_use]
    pub const fn matrices([short, long]: [u64; 2]) -> [u64; 4] {
        let (whole, square) = (2 * short * long, 2 * short * short);
        [whole, whole, square, square]
    }
}

impl UpdateRule {
    /// Returns the number of states per weight.
    #[must_use]
    pub const fn states(self) -> usize {
        match self {
            Self::AdamW => 2,
            Self::Lion | Self::Muon(_) | Self::MuonMomentum => 1,
            Self::Sgd | Self::RouterBias(_) => 0,
        }
    }

    /// Returns whether it reads gradients, which a norm is taken of and which are clipped.
    #[must_use]
    pub(crate) const fn has_gradients(self) -> bool {
        !matches!(self, Self::RouterBias(_))
    }

    /// Returns the FLOPs per weight, without those of matmuls.
    #[must_use]
    pub const fn flops(self) -> u64 {
        match self {
            Self::AdamW => 14,
            Self::Lion => 10,
            Self::Sgd => 2,
            Self::Muon(_) => 12,
            Self::MuonMomentum => 7,
            Self::RouterBias(_) => 6,
        }
    }
}

/// What the kernel of an update does in addition to the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Fused {
    /// If set, additional output ranges follow the other writes of a tensor and receive its new
    /// weight, converted; with [`UpdateRule::MuonMomentum`], its update.
    pub cast: bool,
    /// Set if every gradient is in unreduced pieces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pieces: Option<Pieces>,
    /// If set, the last write receives the largest absolute values of the new weights, as
    /// [`ShardOp::ShardAmax`] would compute them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub maxima: bool,
}

/// An optimizer's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// Rule.
    pub rule: UpdateRule,
    /// What its kernel does in addition. Muon computes no maxima.
    pub fused: Fused,
}

impl From<Update> for ShardOp {
    fn from(update: Update) -> Self {
        let Update { rule, fused } = update;
        match rule {
            UpdateRule::AdamW => Self::AdamW(fused),
            UpdateRule::Lion => Self::Lion(fused),
            UpdateRule::Sgd => Self::Sgd(fused),
            UpdateRule::Muon(newton_schulz) => Self::Muon {
                cast: fused.cast,
                pieces: fused.pieces,
                newton_schulz,
            },
            UpdateRule::MuonMomentum => Self::MuonMomentum,
            UpdateRule::RouterBias(speed) => Self::RouterBias { speed },
        }
    }
}

/// Operation of a sharding kernel. It works directly on the byte ranges of the launch, with the
/// dtypes of their buffers. Reads and writes form pairs in order unless stated otherwise. The
/// kernel's body names no slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardOp {
    /// Copies or casts: the concatenated reads become the concatenated writes.
    Copy,
    /// The same for many small ranges in one kernel.
    MultiCopy,
    /// One read with layout `[rank][parameter]` in padded shards, to one write per parameter.
    CopyOut {
        /// Ranks.
        ranks: u32,
    },
    /// One read per gradient (unpadded), to one write with layout `[rank][parameter]` in shards
    /// padded with zeros. Also casts.
    ChunkCat {
        /// Ranks.
        ranks: u32,
    },
    /// Adds the first read to the writes, in order.
    Accumulate,
    /// Multiplies the write in place.
    Scale {
        /// Factor.
        factor: Real,
    },
    /// Zeroes the writes.
    Zero,
    /// Sum of squares of the reads, written to a float32 scalar. If the last read is the scalar
    /// itself, it is added.
    SumSquares,
    /// Multiplies the writes in place by `min(1, clip_norm / (sqrt(scalar) + 1e-6))`. The last read
    /// is the scalar.
    ClipScale,
    /// Writes 1 to a scalar if a read contains a NaN, or else 0.
    NanCheck,
    /// AdamW on weight, gradient, first and second moment, tensor by tensor (reads), writing weight
    /// and moments. Byte moments are codes of blocks, and are followed by an equal number of
    /// buffers with scales ([`STATE_BLOCK`]). A tensor without state continues that of the previous
    /// tensor (a parameter split over several ranges). If the last read is a scalar, it is the sum
    /// of squares of the global gradient norm, and clipping is fused in.
    AdamW(Fused),
    /// SGD on weight and gradient, as [`ShardOp::AdamW`].
    Sgd(Fused),
    /// A read with layout `[rank][element]` to one sum per element. Pieces are multiplied by the
    /// factor and added in rank order in float32, as a reduction with that factor does. This is the
    /// second half of a reduction whose first half is an all-to-all.
    SumPieces {
        /// Number of pieces.
        ranks: u32,
        /// Factor of every piece.
        factor: Real,
        /// Whether the sum is added to the writes, which are also reads.
        accumulate: bool,
    },
    // Last, because digests of programs depend on the order.
    /// Lion on weight, gradient and momentum, as [`ShardOp::AdamW`].
    Lion(Fused),
    /// Shards of main weights, rounded first, to the largest absolute value of each tensor that has
    /// a scale, in the order of [`Group::scales`](crate::shard::Group::scales). For a tensor
    /// without elements on this rank, the value is 0.
    ShardAmax {
        /// Type to which weights are rounded.
        through: DType,
    },
    /// Largest absolute values to one scale each (first write) and their reciprocals (second
    /// write), which are [`RECIPROCAL_STRIDE`] apart.
    ShardScales {
        /// Type of the codes.
        to: DType,
    },
    /// A shard of main weights (first read), rounded first, times the scales of their tensors
    /// (second read), to codes (first write). Further writes are intermediate results: eager code
    /// multiplies, clamps and casts in a separate kernel each.
    ShardCast {
        /// Type to which weights are rounded.
        through: DType,
    },
    /// Muon on weight, gradient and momentum, as [`ShardOp::AdamW`]. Ranges contain whole matrices.
    Muon {
        /// As in [`Fused`].
        cast: bool,
        /// As in [`Fused`].
        #[serde(skip_serializing_if = "Option::is_none")]
        pieces: Option<Pieces>,
        /// Orthogonalization of the matrices.
        newton_schulz: NewtonSchulz,
    },
    /// [`UpdateRule::RouterBias`] on biases and counts, a router's after another's: each pair of
    /// reads is a whole router. Biases are written.
    RouterBias {
        /// How far a bias moves.
        speed: Real,
    },
    /// A shard of main weights (read), rounded first, to codes (first write) and the reciprocals of
    /// their scales (second write), one per block of a matrix. Matrices and padding start at
    /// multiples of a block's elements, and shards do not split the rows of a block, so the
    /// reciprocals are in the order of the codes: those of a row of blocks are adjacent. For
    /// [`ScaleBlock::MX`] and [`ScaleBlock::MX_COLUMN`], a reciprocal is stored as its exponent, in
    /// a byte.
    ShardCastBlocks {
        /// Type to which weights are rounded.
        through: DType,
        /// Blocks that share a scale.
        block: ScaleBlock,
    },
    /// A shard of main weights (read), rounded first, to the largest absolute value of each block
    /// of a matrix (first write) and of its transpose (second write), in the order of the
    /// reciprocals of [`ShardOp::ShardCastBlocks`].
    ShardBlockAmax {
        /// Type to which weights are rounded.
        through: DType,
        /// Blocks of the matrix.
        block: ScaleBlock,
    },
    /// Largest absolute values of blocks (read) to the exponents of the reciprocals of their scales
    /// (writes), in the same order.
    ShardBlockScales {
        /// Type of the codes.
        to: DType,
    },
    /// The first part of Muon on rows of matrices: weight, gradient and momentum as
    /// [`ShardOp::AdamW`], tensor by tensor. It decays the weight and updates the momentum. A
    /// tensor's writes end with the update that is to be orthogonalized, in bfloat16.
    MuonMomentum,
    /// Orthogonalizes a whole matrix in bfloat16 in place, by Newton-Schulz iterations.
    Orthogonalize {
        /// The matrix.
        matrix: MatrixShape,
    },
    /// The last part of Muon on rows of a matrix: subtracts orthogonalized rows (second read),
    /// times the learning rate, from the weight (first read), which is written.
    MuonApply {
        /// The whole matrix, whose shape determines a factor of the learning rate.
        matrix: MatrixShape,
    },
}

impl ShardOp {
    /// Returns the optimizer's operation; `None` if this is not one.
    #[must_use]
    pub const fn update(self) -> Option<Update> {
        let (rule, fused) = match self {
            Self::AdamW(fused) => (UpdateRule::AdamW, fused),
            Self::Lion(fused) => (UpdateRule::Lion, fused),
            Self::Sgd(fused) => (UpdateRule::Sgd, fused),
            Self::Muon {
                cast,
                pieces,
                newton_schulz,
            } => {
                let fused = Fused {
                    cast,
                    pieces,
                    maxima: false,
                };
                (UpdateRule::Muon(newton_schulz), fused)
            }
            Self::MuonMomentum => {
                let fused = Fused {
                    cast: true,
                    pieces: None,
                    maxima: false,
                };
                (UpdateRule::MuonMomentum, fused)
            }
            Self::RouterBias { speed } => {
                let fused = Fused {
                    cast: false,
                    pieces: None,
                    maxima: false,
                };
                (UpdateRule::RouterBias(speed), fused)
            }
            _ => return None,
        };
        Some(Update { rule, fused })
    }

    /// Returns the name of the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "cast",
            Self::MultiCopy => "multi_copy",
            Self::CopyOut { .. } => "split_copy_out",
            Self::ChunkCat { .. } => "chunk_cat",
            Self::Accumulate => "accumulate",
            Self::SumPieces { .. } => "sum_pieces",
            Self::Scale { .. } => "scale",
            Self::Zero => "zero",
            Self::SumSquares => "sum_squares",
            Self::ClipScale => "clip_scale",
            Self::NanCheck => "nan_check",
            Self::AdamW { .. } => "adamw",
            Self::Lion { .. } => "lion",
            Self::Sgd { .. } => "sgd",
            Self::Muon { .. } => "muon",
            Self::RouterBias { .. } => "router_bias_update",
            Self::ShardAmax { .. } => "shard_amax",
            Self::ShardScales { .. } => "shard_scales",
            Self::ShardCast { .. } => "shard_float8_cast",
            Self::ShardCastBlocks { .. } => "shard_float8_cast_blocks",
            Self::ShardBlockAmax { .. } => "shard_block_amax",
            Self::ShardBlockScales { .. } => "shard_block_scales",
            Self::MuonMomentum => "muon_momentum",
            Self::Orthogonalize { .. } => "orthogonalize",
            Self::MuonApply { .. } => "muon_apply",
        }
    }
}
