//! Streams and communicators, which run work in order.

use crate::ir::{AxisSet, RankGroup};
use serde::{Deserialize, Serialize};

/// Kind of work of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamKind {
    /// Model kernels.
    Compute,
    /// All-gathers of the inner axis.
    AllGather,
    /// Reduce-scatters of the inner axis.
    ReduceScatter,
    /// Collectives of the outer axis.
    Outer,
    /// Casts and copies into gather buffers.
    CopyIn,
    /// Host to device.
    H2d,
    /// Device to host.
    D2h,
    /// Collectives of the model graph, along one axis.
    Model,
    /// Operators on the CPU, over operands in host memory.
    Cpu,
    /// Copies of activations to host memory and back.
    Offload,
}

impl StreamKind {
    /// Returns the name in program text and traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Outer => "outer",
            Self::CopyIn => "copy_in",
            Self::H2d => "h2d",
            Self::D2h => "d2h",
            Self::Model => "model",
            Self::Cpu => "cpu",
            Self::Offload => "offload",
        }
    }
}

/// A FIFO queue of device work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stream {
    /// Kind.
    pub kind: StreamKind,
    /// Priority in CUDA's convention: lower is more urgent; 0 is the default, -1 is high.
    pub priority: i8,
}

/// A communicator. It runs its collectives one after another in host launch order, on any streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Communicator {
    /// Name, for example `shard`, `shard_rs`, `outer`.
    pub name: String,
    /// Axes of the mesh that it runs along.
    pub axes: AxisSet,
    /// Ranks of one instance.
    pub ranks: RankGroup,
    /// Whether its collectives run on copy engines and hold no SMs.
    #[serde(skip_serializing_if = "is_false")]
    pub copy_engine: bool,
}

impl Communicator {
    /// Checks that instances of the communicator divide `world` ranks evenly.
    ///
    /// # Errors
    /// Returns an error that names the communicator if they do not.
    pub fn divides(&self, world: u32) -> Result<(), String> {
        let RankGroup { size, stride } = self.ranks;
        let span = u64::from(size) * u64::from(stride);
        if span != 0 && u64::from(world).is_multiple_of(span) {
            return Ok(());
        }
        Err(format!(
            "communicator {}: {size} ranks with stride {stride} do not divide a world of {world}",
            self.name
        ))
    }
}

/// False is not written, so that a program keeps its digest from before the choice existed.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for a reference"
)]
fn is_false(x: &bool) -> bool {
    !*x
}
