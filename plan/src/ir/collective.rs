//! Collectives and copies.

use super::{Access, AxisId, CommId, DType};
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Gathers equal shards.
    AllGather,
    /// Reduces and scatters equal shards.
    ReduceScatter,
    /// Reduces to all.
    AllReduce,
    /// Exchanges equal parts.
    AllToAll,
}

impl CollectiveKind {
    /// Returns the name in program text and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Returns whether it adds up what ranks send, which copy engines cannot do.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllReduce)
    }
}

/// A collective of the model's graph, which communicates activations along an axis. Its operands
/// are contiguous; gathers and scatters change dimension 0 by the axis's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ModelCollective {
    /// Kind. Those that reduce add up.
    pub kind: CollectiveKind,
    /// Axis.
    pub axis: AxisId,
}

impl ModelCollective {
    /// Whether selective recompute saves the result instead of communicating again, as torch's
    /// policy for selective activation checkpointing does. Full recompute communicates again.
    pub const SAVED_BY_SELECTIVE_RECOMPUTE: bool = true;

    /// Returns the reduction of the launch.
    #[must_use]
    pub const fn reduce(self) -> ReduceOp {
        if self.kind.reduces() {
            ReduceOp::Sum
        } else {
            ReduceOp::None
        }
    }
}

/// Reduction of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// Nothing to reduce (gather, exchange).
    None,
    /// Sum.
    Sum,
    /// Average.
    Avg,
    /// Sum of inputs multiplied by a factor.
    PremulSum(f64),
    // Last, because digests of programs depend on the order.
    /// Maximum.
    Max,
}

/// One input/output pair of a collective; coalesced launches have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Input range (rank 0's).
    pub input: Access,
    /// Output range (rank 0's).
    pub output: Access,
}

/// A collective launch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Collective {
    /// Kind.
    pub kind: CollectiveKind,
    /// Communicator.
    pub comm: CommId,
    /// Reduction.
    pub reduce: ReduceOp,
    /// Element type on the wire.
    pub dtype: DType,
    /// Payload: bytes of the full (largest) side over all parts.
    pub bytes: Bytes,
    /// Parts.
    pub parts: SmallVec<[Part; 1]>,
}

impl Collective {
    /// Alignment in bytes of each rank's payload that NCCL's kernels need to move it by whole
    /// vectors.
    pub const ALIGNMENT: u64 = 16;

    /// Returns whether ranks gather or scatter payloads that are not a multiple of
    /// [`Self::ALIGNMENT`] in a group of `ranks`: NCCL then moves them element by element.
    #[must_use]
    pub fn misaligned(&self, ranks: u32) -> bool {
        let ranks = u64::from(ranks.max(1));
        let of_rank = |p: &Part| p.input.bytes.max(p.output.bytes) / ranks;
        matches!(
            self.kind,
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter
        ) && self.parts.iter().any(|p| of_rank(p) % Self::ALIGNMENT != 0)
    }
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyKind {
    /// Host to device.
    H2d,
    /// Device to host.
    D2h,
    /// Device to device by copy engine. No policy uses it: kernels make copies on the device, and
    /// collectives on copy engines are collectives. Devices and the simulator support it.
    D2d,
}

/// A copy by a copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CopyDesc {
    /// Direction.
    pub kind: CopyKind,
    /// Source.
    pub from: Access,
    /// Destination.
    pub to: Access,
}
