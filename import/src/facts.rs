//! What a trace determines of the scenario that it shows, each with how.

mod count;
mod model;
mod optimizer;
mod passes;
mod schedule;

pub use model::Model;
pub(crate) use model::is_block;
pub use optimizer::Optimizer;

use crate::attribute::Attributed;
use crate::kineto::Trace;
use count::Counts;
use shardlab_plan::ir::DType;

/// A value and how it was determined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    /// Value.
    pub value: T,
    /// How it was determined, as a phrase for a comment.
    pub because: String,
}

impl<T> Found<T> {
    pub(crate) fn new(value: T, because: impl Into<String>) -> Self {
        Self {
            value,
            because: because.into(),
        }
    }
}

/// Which parameters are gathered again for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reshard {
    /// All but the root's.
    Always,
    /// None.
    Never,
    /// All but those of the last block, as torchtitan's default.
    ButLast,
    /// Keeps shards over groups of this many ranks.
    Group(u32),
}

/// How far units are gathered ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// What the engine does on its own.
    Implicit,
    /// So many units, by the user's choice.
    Depth(u32),
}

/// What is computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Whole blocks.
    Full,
    /// All but matrix products and attention.
    Selective,
}

/// What is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiled {
    /// Nothing.
    Off,
    /// Code between hooks: several graphs a block.
    Regions,
    /// Each block as one graph.
    Blocks,
    /// The step as one graph, collectives included.
    Full,
}

/// A unit with its parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitFacts {
    /// Name.
    pub name: String,
    /// Shapes of its parameters, in full; empty where shapes were not recorded.
    pub parameters: Vec<Vec<u64>>,
    /// Elements that are gathered, with padding; 0 where nothing is.
    pub gathered: u64,
    /// Whether its parameters are gathered again in backward.
    pub regathered: bool,
}

/// Everything that is determined; what is not is `None`.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Ranks of the job.
    pub world_size: Option<Found<u32>>,
    /// Ranks that shard parameters.
    pub dp_shard: Option<Found<u32>>,
    /// Replicas.
    pub dp_outer: Option<Found<u32>>,
    /// Engine: `fsdp2` or `megatron`.
    pub policy: Option<Found<&'static str>>,
    /// Strategy, as scenario files name it.
    pub strategy: Option<Found<&'static str>>,
    /// Units in forward order; the root is among them where it holds parameters.
    pub units: Vec<UnitFacts>,
    /// Type of gathered parameters, `bf16`, `f16` or `f32`.
    pub compute: Option<Found<&'static str>>,
    /// Type in which gradients are reduced.
    pub reduce: Option<Found<&'static str>>,
    /// Type of the optimizer's weights.
    pub main_params: Option<Found<&'static str>>,
    /// Type in which gradients are kept.
    pub main_grads: Option<Found<&'static str>>,
    /// Resharding after forward.
    pub reshard: Option<Found<Reshard>>,
    /// Whether the root is gathered again in backward.
    pub reshard_root: Option<Found<bool>>,
    /// Prefetch in forward.
    pub prefetch_forward: Option<Found<Ahead>>,
    /// Prefetch in backward.
    pub prefetch_backward: Option<Found<Ahead>>,
    /// Recomputation.
    pub recompute: Option<Found<Recompute>>,
    /// Micro-batches of a step.
    pub accumulation: Option<Found<u32>>,
    /// Whether only the last micro-batch reduces gradients; `None` with one micro-batch.
    pub sync_last: Option<Found<bool>>,
    /// Compilation.
    pub compiled: Option<Found<Compiled>>,
    /// Whether gradients are clipped to a norm.
    pub clip: Option<Found<bool>>,
    /// Whether the norm is computed.
    pub grad_norm: bool,
    /// Optimizer.
    pub optimizer: Option<Found<Optimizer>>,
    /// Whether the loss is computed chunk by chunk.
    pub chunked_loss: Option<Found<bool>>,
    /// Model and batch.
    pub model: Model,
    /// Name of the device.
    pub device: Option<String>,
}

/// Finds what the trace determines, from its typical step.
#[must_use]
pub fn find(trace: &Trace, a: &Attributed, step: Option<u32>) -> Facts {
    let counts = Counts::new(trace, a, step);
    let mut facts = Facts {
        device: trace.head.devices.first().cloned(),
        ..Facts::default()
    };
    facts.units = schedule::units(trace, a, step, &counts);
    schedule::ranks(trace, &counts, &mut facts);
    schedule::engine(trace, a, &counts, &mut facts);
    schedule::types(trace, a, &counts, step, &mut facts);
    schedule::gathers(a, &counts, &mut facts);
    schedule::micro_batches(a, step, &counts, &mut facts);
    passes::recompute(trace, a, step, &mut facts);
    passes::compiled(trace, a, step, &mut facts);
    optimizer::find(trace, a, step, &mut facts);
    model::find(trace, a, step, &mut facts);
    facts
}

/// Scenario files' name of an element type.
pub(crate) fn dtype(name: &str) -> Option<&'static str> {
    let found = DType::find(|n| n.torch.contains(&name))?;
    found.is_float().then(|| found.name())
}
