//! Inputs and results of a training step.

use super::squares::GradientPart;
use shardlab_plan::ir::ConstId;
use shardlab_plan::record::{MemorySample, Span, StepRecord};
use shardlab_plan::units::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Inputs of one rank: the bytes of each constant that is new in every micro-batch.
#[derive(Clone, Debug, Default)]
pub struct RankInputs {
    /// By micro-batch.
    pub micro_batches: Vec<Vec<(ConstId, Arc<[u8]>)>>,
    /// Parts of gradients whose sums of squares are requested.
    pub gradient_parts: Arc<[GradientPart]>,
}

impl RankInputs {
    /// Returns an input of a micro-batch.
    pub(crate) fn get(&self, micro_batch: u16, id: ConstId) -> Option<&Arc<[u8]>> {
        let list = self.micro_batches.get(usize::from(micro_batch))?;
        list.iter().find(|(c, _)| *c == id).map(|(_, data)| data)
    }

    /// Returns the inputs of all micro-batches.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<[u8]>> {
        self.micro_batches.iter().flatten().map(|(_, data)| data)
    }

    /// Returns whether the inputs are so large that ranks take visibly different times to prepare
    /// them.
    pub(crate) fn are_large(&self) -> bool {
        self.all().map(|data| data.len()).sum::<usize>() > LARGE_INPUTS
    }
}

/// Bytes per rank and step beyond which inputs are large: a few times those of a long batch of
/// tokens.
const LARGE_INPUTS: usize = 4 << 20;

/// Inputs of a step, by rank.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// By rank of the world; those of other processes' ranks are ignored.
    pub ranks: Vec<RankInputs>,
}

/// Time and memory of one rank in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankTimes {
    /// Rank.
    pub rank: u32,
    /// Duration of the step.
    pub time: Duration,
    /// Time in which the host issued work, without waits.
    pub host: Duration,
    /// Peak of allocated bytes.
    pub peak_allocated: Bytes,
    /// Peak of reserved bytes.
    pub peak_reserved: Bytes,
}

/// Result of a step or a validation pass.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// By rank and micro-batch.
    pub losses: Vec<Vec<f32>>,
    /// Mean over data-parallel ranks and micro-batches.
    pub loss: f64,
    /// Global gradient norm before clipping, where the program computes it.
    pub grad_norm: Option<f64>,
    /// By rank: sum of squares of the gradients that its optimizer reads (see
    /// [`ExecOptions::grad_squares`](super::ExecOptions::grad_squares)). Ranks may hold copies of
    /// the same gradients.
    pub grad_squares: Vec<f64>,
    /// By rank: sums of squares of the requested parts of gradients, in their order. A part whose
    /// gradient the step does not compute has NaN.
    pub part_squares: Vec<Vec<f32>>,
    /// By rank: choices of each expert, by layer of experts and micro-batch in the order of
    /// launches, if they are counted (see [`ExecOptions::routing`](super::ExecOptions::routing)).
    pub counts: Vec<Vec<Vec<u32>>>,
    /// Times (of the slowest rank) and memory peaks.
    pub record: StepRecord,
    /// Times of all ranks of the world, in rank order.
    pub ranks: Vec<RankTimes>,
    /// Spans of this process's first rank, if they are recorded.
    pub spans: Vec<Span>,
    /// Memory of that rank after every allocation and free, if it is recorded.
    pub samples: Vec<MemorySample>,
}
