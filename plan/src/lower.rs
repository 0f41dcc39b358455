//! Policies: from tape and layouts to the program.
//!
//! [`plan`] is the whole way from a scenario. A policy (`policy/`) is a lifecycle over shared building blocks: the walk
//! (`walk.rs`) runs the tape and calls the policy at its hooks; `flat.rs` and the policies emit gathers, reductions and
//! state through the builder. Steps after the first are the first one without its one-time allocations.

mod autograd;
mod buffers;
mod builder;
mod capture;
mod context;
mod flat;
mod kernels;
mod offload;
mod optimizer;
mod policy;
mod reduction;
mod streams;
mod walk;

use crate::compile::tape::Tape;
use crate::compile::{self, Neighbours, Sharding};
use crate::config::{
    AllocatorKind, CompileMode, CudaGraph, OuterStrategy, PolicyKind, Scenario, Strategy,
};
use crate::ir::{Module, Param, UnitId};
use crate::memory::{self, AllocError, ReplayError};
use crate::program::{Instr, Phase, Program, ProgramMeta, Section, SectionKind, Unit};
use crate::shard::{
    Group, Layout, LayoutKind, ShardError, UnitSpec, assign_units, build_groups, check_frozen,
};
use buffers::TapeBuffers;
use context::Cx;
use walk::{Lifecycle, Walk};

/// Why a scenario cannot be lowered although its file is valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Units or layouts.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The tape cannot be built.
    #[error("{0}")]
    Model(String),
    /// A combination that no policy can lower.
    #[error("{0}")]
    Unsupported(String),
}

/// Plans a scenario: model, autodiff, compile, shard and lower.
///
/// # Errors
/// See [`PlanError`].
pub fn plan(scenario: &Scenario) -> Result<Program, PlanError> {
    let (modules, params) = compile::modules_and_params(scenario);
    check_frozen(&scenario.fsdp.frozen, &modules)?;
    if !params.iter().any(|p| p.requires_grad) {
        return Err(PlanError::Unsupported(
            "no parameter is trained: `fsdp.frozen` names every module that has any".to_owned(),
        ));
    }
    let (specs, groups) = units(scenario, &modules, &params)?;
    let tape = tape(scenario, modules.len(), &specs, &groups);
    let mut cx = Cx::new(scenario, &tape, specs, groups)?;
    capture::check_scopes(&cx)?;
    let buffers = TapeBuffers::new(&mut cx);
    cx.b.kernels.clone_from(&tape.kernels);
    let sections = match scenario.fsdp.policy {
        _ if scenario.compile.mode == CompileMode::Full => {
            policy::fsdp2::supports(&cx)?;
            let mut life = policy::full::Full::new(&mut cx);
            sections(&mut cx, &mut life, &buffers)
        }
        PolicyKind::Native => {
            let mut life = policy::native::Native::new(&mut cx);
            sections(&mut cx, &mut life, &buffers)
        }
        PolicyKind::Fsdp2 => {
            policy::fsdp2::supports(&cx)?;
            let mut life = policy::fsdp2::Fsdp2::new(&mut cx);
            sections(&mut cx, &mut life, &buffers)
        }
        PolicyKind::Megatron => {
            let mut life = policy::megatron::Megatron::new(&mut cx);
            sections(&mut cx, &mut life, &buffers)
        }
    };
    let mut program = finish(cx, &buffers, sections);
    if scenario.compile.cuda_graph == CudaGraph::FullIteration {
        capture::fix_addresses(&mut program);
    }
    check_double_buffer(&program)?;
    Ok(program)
}

/// Refuses a schedule that keeps more units full at once than a double buffer has copies.
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
            Err(PlanError::Unsupported(format!(
                "allocator double_buffer has {live} copies, all in use when {} of unit `{}` wants one: reshard after \
                 forward, prefetch less, or use another allocator",
                at.phase.name(),
                program.units[at.unit.index()].name
            )))
        }
        // Anything else is a fault of the program, which `check` explains.
        _ => Ok(()),
    }
}

fn layout_kind(scenario: &Scenario) -> LayoutKind {
    let mesh = &scenario.mesh;
    match scenario.fsdp.policy {
        _ if scenario.compile.mode == CompileMode::Full => LayoutKind::PerParam {
            shards: mesh.dp_shard,
        },
        PolicyKind::Fsdp2 => LayoutKind::PerParam {
            shards: mesh.dp_shard,
        },
        PolicyKind::Native | PolicyKind::Megatron => {
            let outer = mesh.dp_outer > 1 && scenario.fsdp.outer_strategy == OuterStrategy::Optim;
            let shards = if outer { mesh.world() } else { mesh.dp_shard };
            let pad = shards > 1 && scenario.fsdp.strategy != Strategy::NoShard;
            LayoutKind::Flat {
                shards: if pad { shards } else { 1 },
                pad,
            }
        }
    }
}

/// Whether frozen parameters have groups of their own. torch has one `FSDPParamGroup` a `fully_shard` call: it gathers all and reduces
/// what has gradients.
fn frozen_apart(scenario: &Scenario) -> bool {
    scenario.fsdp.policy != PolicyKind::Fsdp2 || scenario.compile.mode == CompileMode::Full
}

/// Parameters that the next one is to follow without a gap, so that their layers can be merged. The layout of the others is their
/// engines'.
fn follows(scenario: &Scenario, params: &[Param]) -> Vec<bool> {
    let which = scenario.compile.merge_projections;
    let native = scenario.fsdp.policy == PolicyKind::Native;
    let pairs = params.windows(2);
    pairs
        .map(|p| native && compile::mergeable(&p[0], &p[1], which))
        .collect()
}

fn sections<L: Lifecycle>(cx: &mut Cx<'_>, life: &mut L, buffers: &TapeBuffers) -> Vec<Section> {
    let mut sections = Vec::new();
    let mut close = |cx: &mut Cx<'_>, kind, from: u32| {
        let to = cx.b.instrs.len() as u32;
        sections.push(Section {
            kind,
            instrs: from..to,
        });
        cx.b.new_section();
        to
    };
    cx.b.at(UnitId(0), Phase::Init);
    life.init(cx);
    cx.b.at(UnitId(0), Phase::Init);
    buffers.init(cx);
    let first = close(cx, SectionKind::Init, 0);
    Walk::new(cx, life, buffers).step();
    let steady = close(cx, SectionKind::First, first);
    // A steady step is the first one without what only the first allocates.
    let mut once = std::mem::take(&mut cx.b.first_only).into_iter().peekable();
    for i in first..steady {
        if once.next_if_eq(&i).is_none() {
            let instr: Instr = cx.b.instrs[i as usize];
            cx.b.instrs.push(instr);
        }
    }
    let validation = close(cx, SectionKind::Steady, steady);
    if cx.scenario.train.validate_every > 0 {
        Walk::new(cx, life, buffers).validation();
        close(cx, SectionKind::Validation, validation);
    }
    sections
}

fn finish(cx: Cx<'_>, buffers: &TapeBuffers, sections: Vec<Section>) -> Program {
    let scenario = cx.scenario;
    let mesh = &scenario.mesh;
    let accum = u64::from(scenario.train.grad_accum);
    let meta = ProgramMeta {
        scenario: scenario.name.clone(),
        policy: scenario.fsdp.policy.name(),
        hardware: mesh.hardware.clone(),
        world: mesh.world(),
        dp_shard: mesh.dp_shard,
        dp_outer: mesh.dp_outer,
        gpus_per_node: mesh.gpus_per_node,
        micro_batches: scenario.train.grad_accum as u16,
        tokens: cx.tape.tokens * accum,
        model_flops: cx.tape.model_flops * accum,
        deterministic: scenario.precision.deterministic,
        expandable_segments: scenario.fsdp.expandable_segments,
        reduce_in_flight: scenario.fsdp.reduce_in_flight,
        validate_every: scenario.train.validate_every,
        steps: scenario.train.steps,
        compute: scenario.precision.compute,
    };
    let double_buffer = scenario.fsdp.allocator == AllocatorKind::DoubleBuffer;
    Program {
        meta,
        modules: cx.tape.modules.clone(),
        params: cx.tape.params.clone(),
        units: cx
            .units
            .into_iter()
            .map(|u| Unit {
                name: u.spec.name,
                modules: u.spec.modules,
                is_root: u.spec.is_root,
                reshards: u.reshards,
                groups: u.groups,
            })
            .collect(),
        groups: cx.groups,
        streams: cx.b.streams,
        communicators: cx.b.communicators,
        kernels: cx.b.kernels,
        buffers: cx.b.buffers,
        accesses: cx.b.accesses,
        collectives: cx.b.collectives,
        copies: cx.b.copies,
        scopes: cx.b.scopes,
        loss: cx.tape.loss.map(|s| buffers.storage(s)),
        eval_loss: cx.tape.eval_loss.map(|s| buffers.storage(s)),
        events: cx.b.events,
        sections,
        instrs: cx.b.instrs,
        double_buffer_copies: if double_buffer { 2 } else { 0 },
        persist_on_alloc_fail: scenario.fsdp.persist_on_alloc_fail,
        placement: Default::default(),
    }
}

/// The tape of a scenario as `plan` uses it, for tools and tests.
///
/// # Errors
/// As [`plan`].
pub fn tape_of(scenario: &Scenario) -> Result<Tape, PlanError> {
    let (modules, params) = compile::modules_and_params(scenario);
    let (specs, groups) = units(scenario, &modules, &params)?;
    Ok(tape(scenario, modules.len(), &specs, &groups))
}

/// Units of a scenario's model, and the groups of their parameters.
fn units(
    scenario: &Scenario,
    modules: &[Module],
    params: &[Param],
) -> Result<(Vec<UnitSpec>, Vec<Group>), PlanError> {
    let specs = assign_units(&scenario.fsdp.units, modules)?;
    let groups = build_groups(
        &specs,
        modules,
        params,
        layout_kind(scenario),
        &follows(scenario, params),
        frozen_apart(scenario),
    )?;
    Ok((specs, groups))
}

/// The tape for these units and layouts.
fn tape(scenario: &Scenario, modules: usize, specs: &[UnitSpec], groups: &[Group]) -> Tape {
    let mut is_unit = vec![false; modules];
    for m in specs.iter().flat_map(|s| &s.modules) {
        is_unit[m.index()] = true;
    }
    let neighbours = neighbours(scenario, groups);
    let sharding = Sharding {
        is_unit: &|m| is_unit[m.index()],
        neighbours: &|p| neighbours[p.index()],
    };
    compile::tape(scenario, sharding)
}

/// How each parameter and the next one lie in the buffers that kernels read weights from and write gradients to.
fn neighbours(scenario: &Scenario, groups: &[Group]) -> Vec<Neighbours> {
    let mut out = vec![Neighbours::Apart; groups.iter().map(|g| g.params.len()).sum()];
    let together = match scenario.fsdp.policy {
        _ if context::params_apart(scenario) => Neighbours::Apart,
        PolicyKind::Native => Neighbours::WeightsAndGradients,
        // Gradients are autograd's until they are copied into the bucket.
        PolicyKind::Megatron => Neighbours::Weights,
        PolicyKind::Fsdp2 => Neighbours::Apart,
    };
    for group in groups {
        if let Layout::Flat(layout) = &group.layout {
            for pair in layout.items.windows(2) {
                let next = pair[0].param.0 + 1 == pair[1].param.0;
                if next && pair[0].offset + pair[0].numel == pair[1].offset {
                    out[pair[0].param.index()] = together;
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
