//! Lowers a tape and layouts to a program. All policies share this code.
//!
//! The walk (`walk.rs`) runs the tape and calls the policy at its hooks. The policy emits gathers,
//! reductions and state through `flat.rs`, `optimizer.rs` and the builder. Steps after the first
//! one are copies of it without its one-time allocations.

pub(crate) mod activation_offload;
pub(crate) mod autograd;
mod buffers;
pub(crate) mod builder;
mod capture;
pub(crate) mod emitter;
pub(crate) mod engine;
pub(crate) mod flat;
pub(crate) mod float8;
pub(crate) mod inputs;
pub(crate) mod kernels;
mod model_collective;
pub(crate) mod muon;
mod offload;
pub(crate) mod optimizer;
pub(crate) mod reduction;
mod skipped;
pub(crate) mod streams;
pub(crate) mod unmanaged;
mod uses;
pub(crate) mod walk;
pub(crate) mod weight_gradients;

use crate::compile::tape::Tape;
use crate::compile::{self, Sharding, WeightAdjacency};
use crate::config::{AllocatorKind, CudaGraph, Scenario, Strategy};
use crate::ir::{AxisId, Module, Param, Placements, UnitId};
use crate::memory::{self, AllocError, ReplayError};
use crate::models::declare::Tree;
use crate::models::{self, Declared};
use crate::program::{Contract, Phase, Program, SectionKind, Unit};
use crate::recipes;
use crate::shard::placements::shard_axis;
use crate::shard::{
    Apart, Group, Layout, LayoutKind, ShardError, UnitSpec, assign_units, build_groups,
    check_frozen, check_ignored, ignored_params,
};
use activation_offload::ActivationOffload;
use buffers::TapeBuffers;
use emitter::Emitter;
use engine::Engine;
use inputs::LoweringInputs;
use model_collective::ModelLanes;
use walk::{Lifecycle, Walk};

/// Why a scenario cannot be lowered although its file is valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An error in units or layouts.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// All parameters are frozen.
    #[error("no parameter is trained: `fsdp.frozen` names every module that has any")]
    NothingTrained,
    /// A step keeps more units full at once than a double buffer has copies.
    #[error(
        "allocator double_buffer has {copies} copies, all in use when {} of unit `{unit}` wants one: reshard after \
         forward, prefetch less, or use another allocator",
        phase.name()
    )]
    DoubleBuffer {
        /// Number of copies that the double buffer has.
        copies: u32,
        /// Phase that needs another copy.
        phase: Phase,
        /// Name of the unit that needs it.
        unit: String,
    },
    /// A unit's hooks would run during a replay.
    #[error(
        "unit `{unit}` is inside the captured scope `{scope}`: its hooks cannot run during a replay; capture a \
         smaller scope or use larger units"
    )]
    CapturedUnit {
        /// Name of the unit.
        unit: String,
        /// Path of the captured module.
        scope: String,
    },
    /// A unit would never be gathered, although a kernel reads its parameters.
    #[error(
        "unit `{unit}`: `{module}` has no forward of its own in which it could be gathered, since {} reads its \
         parameters; leave it out of fsdp.units",
        by.as_ref().map_or("the model".to_owned(), |by| format!("`{by}`"))
    )]
    NoForward {
        /// Name of the unit.
        unit: String,
        /// Path of the module without a forward.
        module: String,
        /// Path of the module around it that has one; `None` for the root.
        by: Option<String>,
    },
    /// A micro-batch skips all trained parameters.
    #[error("micro-batch {micro_batch} skips every parameter that is trained: it has no backward")]
    NothingUsed {
        /// Number of the micro-batch.
        micro_batch: u32,
    },
    /// A micro-batch runs only a part of a unit's forward.
    #[error(
        "micro-batch {micro_batch} skips `{block}`, but not all of unit `{unit}`, which has some of its parameters: \
         make the block a unit of its own, or skip the whole unit"
    )]
    PartlyUsed {
        /// Number of the micro-batch.
        micro_batch: u32,
        /// Path of the skipped module.
        block: String,
        /// Name of the unit.
        unit: String,
    },
    /// A sum over the inner axis would never be reduced over the replicas.
    #[error(
        "the last micro-batch skips unit `{unit}`, whose sum of earlier ones is not reduced over the replicas yet: \
         torch 2.11 would lose it; set gradient_sync = \"every\", or reduce_unused = true (torch 2.15)"
    )]
    UnfinishedSum {
        /// Name of the unit.
        unit: String,
    },
    /// The policy shards over the inner axis only.
    #[error(
        "fsdp2 replicates over the outer axis (HSDP); outer_strategy = \"optim\" needs policy native or megatron"
    )]
    OuterSharding,
}

/// A schedule: its parameter layout and its lifecycle.
pub(crate) struct Lowering {
    /// Layout of parameter groups with these placements.
    pub(crate) layout: fn(&Scenario, Placements) -> LayoutKind,
    /// What programs of the schedule declare for [`check`](crate::check).
    pub(crate) contract: Contract,
    /// Whether parameters that ranks gather in 8 bits have separate groups.
    pub(crate) float8_apart: bool,
    /// Whether the schedule places weights that `compile.merge_projections` would merge next to
    /// each other. Other engines have a fixed layout.
    pub(crate) places_merged_weights: bool,
    /// What is adjacent if two weights of a flat layout are: the weights, their gradients, or both.
    pub(crate) adjacency: WeightAdjacency,
    /// How ranks get the whole matrices that Muon needs.
    pub(crate) muon: MuonMatrices,
    /// How steps move the biases of routers.
    pub(crate) router_biases: RouterBiases,
    /// Creates the lifecycle with its buffers and streams.
    pub(crate) lifecycle: fn(&mut Emitter<'_>) -> Result<Box<dyn Lifecycle>, PlanError>,
}

/// How the ranks of a schedule get the whole matrices that Muon needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MuonMatrices {
    /// They do not, so there is no Muon; the reason.
    Refused(&'static str),
    /// Each matrix is on one rank: matrices have separate groups, whose shards do not divide them.
    Whole,
    /// Ranks have rows of each matrix, and gather its update.
    Gathered,
}

/// How the steps of a schedule move the biases of routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouterBiases {
    /// Counts of choices are reduced like gradients, unit by unit.
    LikeGradients,
    /// Biases are buffers that the engine does not manage. One collective at the end of backward
    /// adds up the counts of all layers.
    Apart,
}

/// Plans a scenario with a schedule.
///
/// # Errors
/// Returns [`PlanError`] if the scenario's units, frozen modules, skipped blocks, captured scopes
/// or allocator do not fit its model.
pub(crate) fn plan(
    scenario: &Scenario,
    engine: &Engine,
    lowering: &Lowering,
) -> Result<Program, PlanError> {
    let model = models::declare(scenario, scenario.model.layers);
    let Tree {
        modules, params, ..
    } = &model.tree;
    check_frozen(&scenario.fsdp.frozen, modules)?;
    check_ignored(&scenario.fsdp.ignored_params, modules)?;
    if !params.iter().any(|p| p.requires_grad) {
        return Err(PlanError::NothingTrained);
    }
    let float8 = float8_gathers(scenario, &model.tree);
    let muon = optimizer::muon_params(scenario, &model.tree);
    let (specs, mut groups) = units(scenario, lowering, modules, params, (&float8, &muon))?;
    skipped::check(scenario, &model.tree, &specs, &groups)?;
    let tape = tape(scenario, engine, lowering, model, &specs, &groups);
    float8::share_scales(&tape, &mut groups);
    lower(scenario, engine, lowering, &tape, specs, groups)
}

/// Returns, for each parameter, whether ranks gather it in 8 bits; empty if none is.
fn float8_gathers(scenario: &Scenario, tree: &Tree) -> Vec<bool> {
    if !scenario.precision.float8.all_gather {
        return Vec::new();
    }
    let recipe = recipes::of(&scenario.precision);
    let gathered = |p| {
        recipe
            .float8(p, tree.block_place(p))
            .is_some_and(|l| l.gathered)
    };
    tree.params.iter().map(gathered).collect()
}

/// Plans a tape that does not come from a model. Uses the options of the scenario, but not its
/// model.
///
/// # Errors
/// Returns [`PlanError`] if the scenario's units, frozen modules, captured scopes or allocator do
/// not fit the tape.
pub(crate) fn plan_tape(
    scenario: &Scenario,
    engine: &Engine,
    lowering: &Lowering,
    tape: &Tape,
) -> Result<Program, PlanError> {
    check_frozen(&scenario.fsdp.frozen, &tape.modules)?;
    check_ignored(&scenario.fsdp.ignored_params, &tape.modules)?;
    if !tape.params.iter().any(|p| p.requires_grad) {
        return Err(PlanError::NothingTrained);
    }
    let (specs, groups) = units(scenario, lowering, &tape.modules, &tape.params, (&[], &[]))?;
    lower(scenario, engine, lowering, tape, specs, groups)
}

/// Operands of the kernels between the passes (copies of gathers, reductions, optimizer) per
/// parameter, rounded up.
const ACCESSES_PER_PARAM: usize = 4;

/// Lowers a tape with its units.
fn lower(
    scenario: &Scenario,
    engine: &Engine,
    lowering: &Lowering,
    tape: &Tape,
    specs: Vec<UnitSpec>,
    groups: Vec<Group>,
) -> Result<Program, PlanError> {
    let inputs = LoweringInputs::new(scenario, engine, tape, specs, groups);
    capture::check_scopes(&inputs)?;
    uses::check(&inputs)?;
    let mut out = Emitter::new(&inputs);
    let passes = scenario.train.grad_accum as usize;
    let ops = tape.forward.len() + tape.backward.len();
    let operands = passes * tape.operands.len() + ACCESSES_PER_PARAM * tape.params.len();
    out.b.reserve(passes * ops, operands);
    let buffers = TapeBuffers::new(&mut out);
    out.b.program_mut().kernels.clone_from(&tape.kernels);
    let mut life = (lowering.lifecycle)(&mut out)?;
    let lanes = ModelLanes::new(&mut out);
    sections(&mut out, life.as_mut(), &buffers, &lanes);
    let emitted = out.b.into_program();
    let mut program = finish(inputs, lowering.contract, emitted, &buffers);
    if scenario.compile.cuda_graph == CudaGraph::FullIteration {
        capture::fix_addresses(&mut program);
    }
    check_double_buffer(&program)?;
    Ok(program)
}

/// Rejects a schedule that keeps more units full at once than a double buffer has copies; see
/// Note [Double buffer].
fn check_double_buffer(program: &Program) -> Result<(), PlanError> {
    if program.double_buffer_copies == 0 {
        return Ok(());
    }
    match memory::replay(program, 2) {
        Err(ReplayError::Alloc {
            instr,
            source: AllocError::DoubleBufferExhausted { live, .. },
        }) => {
            let at = &program.instrs[instr.index()];
            Err(PlanError::DoubleBuffer {
                copies: live,
                phase: at.phase,
                unit: program.units[at.unit.index()].name.clone(),
            })
        }
        // All other errors are faults of the program, which `check` reports.
        _ => Ok(()),
    }
}

/// Returns the layout of policies with one flat buffer per group.
pub(crate) fn flat_layout(scenario: &Scenario, of: Placements) -> LayoutKind {
    let mesh = scenario.device_mesh();
    let outer = inputs::outer_optim(scenario);
    let inner = mesh.size(shard_axis(of));
    let shards = if outer {
        inner * mesh.size(AxisId::DP_OUTER)
    } else {
        inner
    };
    let pad = shards > 1 && scenario.fsdp.strategy != Strategy::NoShard;
    LayoutKind::Flat {
        shards: if pad { shards } else { 1 },
        pad,
        atomic: scenario.fsdp.atomic,
    }
}

/// Returns the layout of schedules that shard each parameter over its first dimension.
pub(crate) fn per_param_layout(scenario: &Scenario, of: Placements) -> LayoutKind {
    LayoutKind::PerParam {
        shards: scenario.device_mesh().size(shard_axis(of)),
    }
}

/// Returns, for each parameter but the last, whether the next one follows without a gap, so that
/// their layers can be merged.
fn contiguous_with_next(scenario: &Scenario, lowering: &Lowering, params: &[Param]) -> Vec<bool> {
    let which = scenario.compile.merge_projections;
    let pairs = params.windows(2);
    pairs
        .map(|p| lowering.places_merged_weights && compile::mergeable(&p[0], &p[1], which))
        .collect()
}

fn sections(
    out: &mut Emitter<'_>,
    life: &mut dyn Lifecycle,
    buffers: &TapeBuffers,
    lanes: &ModelLanes,
) {
    out.b.at(UnitId(0), Phase::Init);
    life.init(out);
    out.b.at(UnitId(0), Phase::Init);
    buffers.init(out);
    out.b.end_section(SectionKind::Init);
    let offload = ActivationOffload::new(out, buffers);
    Walk::new(out, life, buffers, lanes)
        .offloading(offload)
        .step();
    let first = out.b.end_section(SectionKind::First);
    out.b.steady_after(first);
    out.b.end_section(SectionKind::Steady);
    if out.inputs.scenario.train.validate_every > 0 {
        Walk::new(out, life, buffers, lanes).validation();
        out.b.end_section(SectionKind::Validation);
    }
}

/// Adds the parts that only depend on scenario and schedule to an emitted program.
fn finish(
    inputs: LoweringInputs<'_>,
    contract: Contract,
    emitted: Program,
    buffers: &TapeBuffers,
) -> Program {
    let fsdp = &inputs.scenario.fsdp;
    let units = (0..inputs.units.len() as u16).map(UnitId);
    let skipped_in: Vec<Vec<u16>> = units.map(|u| inputs.skips_of(u).collect()).collect();
    let double_buffer = fsdp.allocator == AllocatorKind::DoubleBuffer;
    Program {
        contract,
        modules: inputs.tape.modules.clone(),
        params: inputs.tape.params.clone(),
        units: inputs
            .units
            .into_iter()
            .zip(skipped_in)
            .map(|(u, skipped_in)| Unit {
                name: u.spec.name,
                modules: u.spec.modules,
                is_root: u.spec.is_root,
                reshards: u.reshards,
                keeps_storage: fsdp.keep_unsharded_storage,
                skipped_in,
                groups: u.groups,
            })
            .collect(),
        groups: inputs.groups,
        loss: inputs.tape.loss.map(|s| buffers.storage(s)),
        eval_loss: inputs.tape.eval_loss.map(|s| buffers.storage(s)),
        double_buffer_copies: if double_buffer { 2 } else { 0 },
        persist_on_alloc_fail: fsdp.persist_on_alloc_fail,
        ..emitted
    }
}

/// Returns the tape of a scenario that [`plan`] uses.
///
/// # Errors
/// Same as for [`plan`].
pub(crate) fn tape_of(
    scenario: &Scenario,
    engine: &Engine,
    lowering: &Lowering,
) -> Result<Tape, PlanError> {
    let model = models::declare(scenario, scenario.model.layers);
    let Tree {
        modules, params, ..
    } = &model.tree;
    let float8 = float8_gathers(scenario, &model.tree);
    let muon = optimizer::muon_params(scenario, &model.tree);
    let (specs, groups) = units(scenario, lowering, modules, params, (&float8, &muon))?;
    skipped::check(scenario, &model.tree, &specs, &groups)?;
    Ok(tape(scenario, engine, lowering, model, &specs, &groups))
}

/// Returns the units of a model and the groups of their parameters. `float8` and `muon` are the
/// parameters that ranks gather in 8 bits and that Muon updates.
fn units(
    scenario: &Scenario,
    lowering: &Lowering,
    modules: &[Module],
    params: &[Param],
    (float8, muon): (&[bool], &[bool]),
) -> Result<(Vec<UnitSpec>, Vec<Group>), PlanError> {
    let specs = assign_units(&scenario.fsdp.units, modules)?;
    let mut ignored = ignored_params(&scenario.fsdp.ignored_params, modules, params);
    let is_apart = |p: &Param| p.router_bias && lowering.router_biases == RouterBiases::Apart;
    if params.iter().any(is_apart) {
        ignored.resize(params.len(), false);
        for (ignored, p) in ignored.iter_mut().zip(params) {
            *ignored |= is_apart(p);
        }
    }
    let groups = build_groups(
        &specs,
        modules,
        params,
        |of| (lowering.layout)(scenario, of),
        &contiguous_with_next(scenario, lowering, params),
        Apart {
            frozen: lowering.contract.frozen_apart,
            float8,
            float8_mixed: !lowering.float8_apart,
            float8_rows: recipes::gathered_block(&scenario.precision.float8)
                .map(|block| block.rows_of_both() as u32),
            muon,
            muon_mixed: lowering.muon == MuonMatrices::Gathered,
            ignored: &ignored,
        },
    )?;
    Ok((specs, groups))
}

/// Returns the tape for these units and layouts.
fn tape(
    scenario: &Scenario,
    engine: &Engine,
    lowering: &Lowering,
    model: Declared,
    specs: &[UnitSpec],
    groups: &[Group],
) -> Tape {
    let mut is_unit = vec![false; model.tree.modules.len()];
    for m in specs.iter().flat_map(|s| &s.modules) {
        is_unit[m.index()] = true;
    }
    let adjacency = weight_adjacency(scenario, engine, lowering, groups);
    let sharding = Sharding {
        is_unit: &|m| is_unit[m.index()],
        adjacency: &|p| adjacency[p.index()],
    };
    let mut whole = compile::tape(scenario, model, sharding);
    skipped::add_variants(scenario, &mut whole, sharding);
    whole
}

/// Returns, for each parameter and the next one, which of their weights and gradients are
/// contiguous in the buffers that kernels read and write.
fn weight_adjacency(
    scenario: &Scenario,
    engine: &Engine,
    lowering: &Lowering,
    groups: &[Group],
) -> Vec<WeightAdjacency> {
    let mut out = vec![WeightAdjacency::None; groups.iter().map(|g| g.params.len()).sum()];
    if inputs::params_apart(scenario, engine) {
        return out;
    }
    for group in groups {
        if let Layout::Flat(layout) = &group.layout {
            for pair in layout.items.windows(2) {
                let next = pair[0].param.0 + 1 == pair[1].param.0;
                if next && pair[0].offset + pair[0].numel == pair[1].offset {
                    out[pair[0].param.index()] = lowering.adjacency;
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
