//! Buffers and byte ranges of them.

use super::{
    AxisId, BufferId, ConstId, DType, DeviceMesh, GroupId, ParamId, StorageId, StreamId, UnitId,
};
use crate::units::Bytes;
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;

/// Purpose of a buffer. Peaks are broken down by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Resident weights in the compute dtype: a shard, or full weights if parameters are not
    /// sharded.
    ModelWeight,
    /// Resident weights of the optimizer.
    MainWeight,
    /// Gradients kept between reduction and optimizer.
    MainGrad,
    /// Optimizer moments and step counters.
    OptimizerState,
    /// Gathered (full) weights.
    FullWeight,
    /// Output of an all-gather that is copied out afterwards.
    GatherBuffer,
    /// Cast or packed input of an all-gather.
    GatherInput,
    /// Full gradients, as autograd or a wgrad GEMM produces them.
    FullGrad,
    /// Packed full gradients, input of a reduce-scatter.
    ReduceInput,
    /// Output of a reduce-scatter before it is accumulated.
    ReduceOutput,
    /// Saved activations.
    Activation,
    /// Logits and tensors of their shape.
    Logits,
    /// Activations and activation gradients that live within one direction.
    Temporary,
    /// Library scratch.
    Workspace,
    /// Tokens, labels, tables.
    Input,
}

impl Role {
    /// All roles, in display order.
    pub const ALL: [Self; 15] = [
        Self::ModelWeight,
        Self::MainWeight,
        Self::MainGrad,
        Self::OptimizerState,
        Self::FullWeight,
        Self::GatherBuffer,
        Self::GatherInput,
        Self::FullGrad,
        Self::ReduceInput,
        Self::ReduceOutput,
        Self::Activation,
        Self::Logits,
        Self::Temporary,
        Self::Workspace,
        Self::Input,
    ];

    /// Returns the name in program text, tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelWeight => "model_weight",
            Self::MainWeight => "main_weight",
            Self::MainGrad => "main_grad",
            Self::OptimizerState => "optimizer_state",
            Self::FullWeight => "full_weight",
            Self::GatherBuffer => "gather_buffer",
            Self::GatherInput => "gather_input",
            Self::FullGrad => "full_grad",
            Self::ReduceInput => "reduce_input",
            Self::ReduceOutput => "reduce_output",
            Self::Activation => "activation",
            Self::Logits => "logits",
            Self::Temporary => "temporary",
            Self::Workspace => "workspace",
            Self::Input => "input",
        }
    }
}

/// Allocator that a buffer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// PyTorch-like caching allocator, with one free list per stream.
    Caching,
    /// Planned pool: one fixed slot per key.
    Planned,
    /// Double buffer: `size` copies of the largest unit's buffers.
    DoubleBuffer,
    /// Host memory, which takes no device bytes.
    Host,
    /// Trace pool: slots that follow from the lifetimes in the first micro-batch.
    Traced,
}

/// Contents of a buffer, for its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Holds {
    /// One parameter's data.
    Param(ParamId),
    /// A parameter group's flat data.
    Group(GroupId),
    /// A storage of the tape.
    Storage(StorageId),
    /// An input or table.
    Const(ConstId),
    /// Something else.
    Named(&'static str),
}

/// A buffer: one allocation, which may be repeated every step but is never live twice at the same
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Buffer {
    /// Role.
    pub role: Role,
    /// Requested bytes on rank 0. The shards of other ranks in a padded layout are equal.
    pub bytes: Bytes,
    /// Element type.
    pub dtype: DType,
    /// Required alignment of its address, bytes.
    pub align: u32,
    /// Allocator.
    pub pool: Pool,
    /// Stream whose free list it comes from, which is the stream that uses it last.
    pub stream: StreamId,
    /// Unit that owns it.
    pub unit: UnitId,
    /// Contents.
    pub holds: Holds,
    /// Identity for pools. Buffers of different micro-batches and steps with the same key share a
    /// slot.
    pub key: u32,
}

/// A byte range of a buffer, as rank 0 has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Access {
    /// Buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Axis along which ranks have different ranges. Ranks that differ only on other axes have the
    /// same range.
    #[serde(serialize_with = "per_rank")]
    pub per_rank: Option<PerRank>,
}

/// How a range moves from rank to rank: its offset grows with the rank's coordinate on an axis.
///
/// A program has hundreds of thousands of accesses, and writing them to fresh memory takes longer
/// than any other part of planning. The axis and the gap therefore share one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PerRank(NonZeroU64);

impl PerRank {
    /// Describes ranges on `axis` with `gap` bytes between the range of a rank and that of the next
    /// one.
    ///
    /// # Panics
    /// Panics if the gap is 2^56 bytes or longer.
    #[must_use]
    pub fn new(axis: AxisId, gap: u64) -> Self {
        assert!(gap >> 56 == 0, "no buffer has {gap} bytes");
        Self(NonZeroU64::MIN.saturating_add(axis.0.into()) | gap << 8)
    }

    /// Returns the axis.
    #[must_use]
    pub fn axis(self) -> AxisId {
        AxisId((self.0.get() & 0xff) as u8 - 1)
    }

    /// Returns the bytes between the range of a rank and that of the next one.
    #[must_use]
    pub fn gap(self) -> u64 {
        self.0.get() >> 8
    }
}

impl fmt::Debug for PerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerRank")
            .field("axis", &self.axis())
            .field("gap", &self.gap())
            .finish()
    }
}

/// Ranges of ranks that follow each other without gaps.
impl From<AxisId> for PerRank {
    fn from(axis: AxisId) -> Self {
        Self::new(axis, 0)
    }
}

impl Access {
    /// Returns the first byte of a rank's range.
    #[must_use]
    pub fn offset_on(&self, mesh: &DeviceMesh, rank: u32) -> u64 {
        let steps = self.per_rank.map_or(0, |p| mesh.coordinate(p.axis(), rank));
        self.offset + u64::from(steps) * self.step()
    }

    /// Returns the bytes from the start of a rank's range to the start of the next rank's range; 0
    /// if all ranks have the same range.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.per_rank.map_or(0, |p| self.bytes + p.gap())
    }

    /// Returns a part of the range. Every rank has it at the same place within its own range.
    ///
    /// # Panics
    /// Panics if the part is not within the range.
    #[must_use]
    pub fn part(&self, bytes: Range<u64>) -> Self {
        assert!(bytes.start <= bytes.end && bytes.end <= self.bytes);
        let len = bytes.end - bytes.start;
        Self {
            offset: self.offset + bytes.start,
            bytes: len,
            per_rank: self
                .per_rank
                .map(|p| PerRank::new(p.axis(), self.step() - len)),
            ..*self
        }
    }
}

/// Writes the number of the axis (0 for none), and the gap if there is one, to a digest.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for a reference"
)]
fn per_rank<S: Serializer>(is: &Option<PerRank>, to: S) -> Result<S::Ok, S::Error> {
    let axis = is.map_or(0, |p| u16::from(p.axis().0) + 1);
    match is.map_or(0, PerRank::gap) {
        0 => to.serialize_u16(axis),
        gap => (axis, gap).serialize(to),
    }
}
