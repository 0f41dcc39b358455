//! The values of a scenario that a trace determines, each with its reason.

mod count;
mod data;
mod groups;
mod model;
mod offload;
mod optimizer;
mod passes;
mod schedule;

pub(crate) use model::is_block;
pub use model::{Adapters, Experts, Model};
pub use optimizer::{Numbers, Optimizer};

use crate::attribute::Attributed;
use crate::kineto::{Recorder, Trace};
use count::Counts;
use shardlab_plan::ir::DType;

/// A value with the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    /// Value.
    pub value: T,
    /// Reason, as a phrase for a comment.
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
    /// All except the root's.
    Always,
    /// None.
    Never,
    /// All except those of the last block, torchtitan's default.
    ButLast,
    /// Shards are kept over groups of this many ranks.
    Group(u32),
}

/// How far ahead the engine gathers units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The engine's own prefetching.
    Implicit,
    /// This many units, requested by the user.
    Depth(u32),
}

/// The units that a unit prefetches, requested by the user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefetches {
    /// Unit.
    pub unit: String,
    /// Units that it prefetches in forward, in order.
    pub forward: Vec<String>,
    /// Units that it prefetches in backward, in order.
    pub backward: Vec<String>,
}

/// What backward recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Whole blocks.
    Full,
    /// Everything except matmuls and attention.
    Selective,
}

/// What is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiled {
    /// Nothing.
    Off,
    /// Code between hooks: several graphs per block.
    Regions,
    /// Each block as one graph.
    Blocks,
    /// The step as one graph, including collectives.
    Full,
}

/// A unit with its parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitFacts {
    /// Name.
    pub name: String,
    /// Full shapes of its parameters; empty if shapes were not recorded.
    pub parameters: Vec<Vec<u64>>,
    /// Number of gathered elements, including padding; 0 if nothing is gathered.
    pub gathered: u64,
    /// Whether its parameters are gathered again in backward.
    pub regathered: bool,
}

/// All determined facts; `None` stands for an undetermined one.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Number of ranks in the job.
    pub world_size: Option<Found<u32>>,
    /// Number of ranks that shard parameters.
    pub dp_shard: Option<Found<u32>>,
    /// Number of replicas.
    pub dp_outer: Option<Found<u32>>,
    /// What the mesh lacks: groups that are not those of data parallelism, and ranks that no axis
    /// explains.
    pub mesh_gaps: Vec<String>,
    /// Number of collectives of the step in groups of unknown sizes, if no group has a size.
    pub unsized_collectives: usize,
    /// Engine: `fsdp2` or `megatron`.
    pub policy: Option<Found<&'static str>>,
    /// Whether the engine is FSDP1 (`FullyShardedDataParallel`), whose schedule shardlab does not
    /// model.
    pub is_fsdp1: bool,
    /// Strategy, with the names of scenario files.
    pub strategy: Option<Found<&'static str>>,
    /// Units in forward order, including the root if it holds parameters.
    pub units: Vec<UnitFacts>,
    /// Type of gathered parameters: `bf16`, `f16` or `f32`.
    pub compute: Option<Found<&'static str>>,
    /// Type in which gradients are reduced.
    pub reduce: Option<Found<&'static str>>,
    /// Type of the main weights.
    pub main_params: Option<Found<&'static str>>,
    /// Type in which gradients are kept.
    pub main_grads: Option<Found<&'static str>>,
    /// Why parameters, gradients and optimizer states are in host memory, if they are.
    pub offload: Option<String>,
    /// Resharding after forward.
    pub reshard: Option<Found<Reshard>>,
    /// Whether the root is gathered again in backward.
    pub reshard_root: Option<Found<bool>>,
    /// Prefetch in forward.
    pub prefetch_forward: Option<Found<Ahead>>,
    /// Prefetch in backward.
    pub prefetch_backward: Option<Found<Ahead>>,
    /// Explicit prefetches of each unit, if they are not those of a depth.
    pub prefetch_lists: Vec<Prefetches>,
    /// Recomputation.
    pub recompute: Option<Found<Recompute>>,
    /// Number of micro-batches per step.
    pub accumulation: Option<Found<u32>>,
    /// Whether only the last micro-batch reduces gradients; `None` with one micro-batch.
    pub sync_last: Option<Found<bool>>,
    /// Compilation.
    pub compiled: Option<Found<Compiled>>,
    /// Whether gradients are clipped by norm.
    pub clip: Option<Found<bool>>,
    /// Whether the gradient norm is computed.
    pub grad_norm: bool,
    /// Optimizer.
    pub optimizer: Option<Found<Optimizer>>,
    /// Whether the loss is computed in chunks.
    pub chunked_loss: Option<Found<bool>>,
    /// Model and batch.
    pub model: Model,
    /// Nanoseconds per step that the host waits for its `DataLoader`.
    pub data_wait: u64,
    /// What is said of a file with the work of several devices.
    pub merged_devices: Option<String>,
    /// Name of the device.
    pub device: Option<String>,
    /// What recorded the trace.
    pub recorder: Recorder,
}

/// Determines the facts of the typical step of a trace.
#[must_use]
pub fn find(trace: &Trace, a: &Attributed, step: Option<u32>) -> Facts {
    let (all, others) = groups::divide(Counts::new(trace, a, step).all);
    let counts = Counts { all };
    let mut facts = Facts {
        device: trace.head.devices.first().cloned(),
        recorder: trace.head.recorder,
        data_wait: data::wait(trace, a),
        merged_devices: merged(trace),
        ..Facts::default()
    };
    facts.units = schedule::units(trace, a, step, &counts);
    schedule::engine(trace, a, &counts, &mut facts);
    schedule::ranks(trace, &counts, &mut facts);
    groups::gaps(&others, &mut facts);
    schedule::types(trace, a, &counts, step, &mut facts);
    schedule::gathers(a, &counts, &mut facts);
    schedule::micro_batches(a, step, &counts, &mut facts);
    passes::recompute(trace, a, step, &mut facts);
    passes::compiled(trace, a, step, &mut facts);
    optimizer::find(trace, a, step, &mut facts);
    offload::find(trace, a, step, &counts, &mut facts);
    model::find(trace, a, step, &mut facts);
    facts
}

/// Says so if a file has NCCL kernels of several devices. A process of a job has one.
fn merged(trace: &Trace) -> Option<String> {
    let nccl = trace.device.iter().filter(|e| {
        let name = trace.name(e.name);
        crate::attribute::is_nccl(name)
    });
    let devices: std::collections::BTreeSet<u32> = nccl.map(|e| e.device).collect();
    (devices.len() > 1).then(|| {
        format!(
            "ranks: the file has collectives of {} devices, as if traces of several ranks were merged; they count as one rank: give one file per rank",
            devices.len()
        )
    })
}

/// Returns the name of an element type in scenario files.
pub(crate) fn dtype(name: &str) -> Option<&'static str> {
    let found = DType::find(|n| n.torch.contains(&name))?;
    found.is_float().then(|| found.name())
}
