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
    /// Exchanges equal parts, or the rows of each part that [`SentRows`] counts.
    AllToAll,
    // Last, because digests of programs depend on the order.
    /// Sends each row of a matrix to the ranks that [`SentRows`] selects. The result has the rows
    /// of all ranks, in the order of ranks. A row that was not sent to a rank is left unchanged
    /// there. Between nodes, a row is sent once per node, and from there to the ranks of that node.
    PeerPush,
    /// Sends rows back like an all-to-all, but only the rows that [`SentRows`] selects. The others
    /// are left unchanged. Between nodes, the rows of a token are added up on each node first.
    PeerReturn,
    /// Moves nothing. Work after it starts when the work before it is done on all ranks.
    Barrier,
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
            Self::PeerPush => "peer_push",
            Self::PeerReturn => "peer_return",
            Self::Barrier => "barrier",
        }
    }

    /// Returns whether ranks write row by row into windows in the memory of other ranks.
    #[must_use]
    pub const fn pushes(self) -> bool {
        matches!(self, Self::PeerPush | Self::PeerReturn)
    }

    /// Returns whether it adds up the data that ranks send, which copy engines cannot do.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllReduce)
    }

    /// Returns whether ranks exchange parts of their operands.
    #[must_use]
    pub const fn exchanges(self) -> bool {
        matches!(self, Self::AllToAll | Self::PeerReturn)
    }

    /// Returns the bytes of one rank's input and output, if the larger one has `full` bytes.
    #[must_use]
    pub const fn operand_bytes(self, full: u64, ranks: u64) -> (u64, u64) {
        match self {
            Self::AllGather | Self::PeerPush => (full / ranks, full),
            Self::ReduceScatter => (full, full / ranks),
            Self::AllReduce | Self::AllToAll | Self::PeerReturn | Self::Barrier => (full, full),
        }
    }

    /// Returns whether the byte counts of one rank's input and output match.
    #[must_use]
    pub const fn sizes_fit(self, input: u64, output: u64, ranks: u64) -> bool {
        match self {
            Self::AllGather | Self::PeerPush => output == ranks * input,
            Self::ReduceScatter => input == ranks * output,
            Self::AllReduce | Self::AllToAll | Self::PeerReturn | Self::Barrier => input == output,
        }
    }
}

/// A collective in the model's graph, which communicates activations along an axis. Its operands
/// are contiguous. Gathers and scatters change dimension 0 by the size of the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ModelCollective {
    /// Kind. Collectives that reduce compute sums.
    pub kind: CollectiveKind,
    /// Axis.
    pub axis: AxisId,
    /// Rows that it moves, if it does not move all data.
    pub rows: Option<SelectedRows>,
}

impl ModelCollective {
    /// Returns a collective that moves all data.
    #[must_use]
    pub const fn new(kind: CollectiveKind, axis: AxisId) -> Self {
        Self {
            kind,
            axis,
            rows: None,
        }
    }

    /// Returns the number of operands on the tape: what is sent, what is received, and what selects
    /// the rows.
    #[must_use]
    pub const fn operands(self) -> u32 {
        match self.rows {
            None => 2,
            Some(rows) => 2 + rows.operands(),
        }
    }

    /// Whether selective recompute saves the result instead of communicating again, as PyTorch's
    /// policy for selective activation checkpointing does. Full recompute communicates again.
    pub(crate) const SAVED_BY_SELECTIVE_RECOMPUTE: bool = true;

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

/// One input/output pair of a collective. Coalesced launches have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Input range (rank 0's).
    pub input: Access,
    /// Output range (rank 0's).
    pub output: Access,
}

/// The rows that a collective pushes: those for which an expert of a rank was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct PushedRows {
    /// Number of experts per rank. A choice is a number of an expert, which is smaller than this.
    pub experts: u64,
    /// Rows of all ranks.
    pub rows: u64,
    /// Number of these rows that the busiest rank is expected to receive.
    pub expected: u64,
    /// Number of rows that a rank is expected to receive from other nodes, for itself and for other
    /// ranks of its node. Zero if all ranks are on one node.
    #[serde(skip_serializing_if = "is_zero")]
    pub over_network: u64,
}

/// Returns whether no row crosses the network.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(rows: &u64) -> bool {
    *rows == 0
}

/// The rows that an all-to-all moves: the first ones of each rank's block, as many as were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct CountedRows {
    /// Rows of all blocks. All blocks have the same size.
    pub rows: u64,
    /// Number of these rows that the busiest rank is expected to receive.
    pub expected: u64,
}

/// The rows that a collective moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum SelectedRows {
    /// Those for which an expert of a rank was chosen.
    Pushed(PushedRows),
    /// Those that were counted. The host reads the counts before the launch.
    Counted(CountedRows),
}

impl SelectedRows {
    /// Returns the number of rows of all ranks.
    #[must_use]
    pub const fn rows(self) -> u64 {
        match self {
            Self::Pushed(of) => of.rows,
            Self::Counted(of) => of.rows,
        }
    }

    /// Returns the number of rows that the busiest rank is expected to receive.
    #[must_use]
    pub const fn expected(self) -> u64 {
        match self {
            Self::Pushed(of) => of.expected,
            Self::Counted(of) => of.expected,
        }
    }

    /// Returns the number of rows that a rank is expected to receive from other nodes, see
    /// [`PushedRows::over_network`].
    #[must_use]
    pub const fn over_network(self) -> u64 {
        match self {
            Self::Pushed(of) => of.over_network,
            Self::Counted(_) => 0,
        }
    }

    /// Returns the number of operands that select rows: choices, or the counts of sent and received
    /// rows.
    const fn operands(self) -> u32 {
        match self {
            Self::Pushed(_) => 1,
            Self::Counted(_) => 2,
        }
    }
}

/// Rows that a collective moves, and what selects them. Its data are only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SentRows {
    /// 64-bit integers. For pushed rows, both sides are the choices, `[rows, k]`: a block of rows
    /// for each rank, in the order of ranks. For counted rows, they are the numbers of sent and of
    /// received rows, `[ranks, n]`: the rows of a rank's block are the sum of its `n` numbers, at
    /// most all of them.
    pub by: Part,
    /// Rows.
    pub of: SelectedRows,
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
    /// Rows that are sent, if not all are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent: Option<SentRows>,
}

impl Collective {
    /// Returns the parts whose data move, and then the part that selects rows, if there is one.
    pub fn operands(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().chain(self.sent.as_ref().map(|s| &s.by))
    }

    /// Returns the number of bytes that the busiest rank is expected to receive, including its own.
    #[must_use]
    pub fn expected_bytes(&self) -> u64 {
        self.sent
            .map_or(self.bytes.0, |s| self.bytes_of(s.of, s.of.expected()))
    }

    /// Returns the number of bytes of pushed rows that a rank is expected to receive from other
    /// nodes, for itself and for other ranks of its node.
    #[must_use]
    pub fn network_bytes(&self) -> u64 {
        self.sent
            .map_or(0, |s| self.bytes_of(s.of, s.of.over_network()))
    }

    /// Returns the number of bytes of `rows` of all rows.
    fn bytes_of(&self, of: SelectedRows, rows: u64) -> u64 {
        let share = u128::from(self.bytes.0) * u128::from(rows);
        (share / u128::from(of.rows().max(1))) as u64
    }

    /// Returns whether all parts leave each rank's own payload in place, so that nothing is copied
    /// within a rank. Rank 0's payload then starts where the payload of all ranks does.
    #[must_use]
    pub fn in_place(&self) -> bool {
        let same =
            |p: &Part| (p.input.buffer, p.input.offset) == (p.output.buffer, p.output.offset);
        !self.parts.is_empty() && self.parts.iter().all(same)
    }

    /// Alignment of each rank's payload, in bytes, with which NCCL's kernels can move it as whole
    /// vectors.
    pub const ALIGNMENT: u64 = 16;

    /// Returns whether ranks in a group of `ranks` gather or scatter payloads that are not a
    /// multiple of [`Self::ALIGNMENT`]. NCCL moves such payloads element by element.
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
    /// Device to device by a copy engine. No policy uses it: on the device, kernels make copies,
    /// and transfers on copy engines are collectives. Devices and the simulator support it.
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
