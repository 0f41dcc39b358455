//! Simulates a program on a profile.

use crate::SimError;
use crate::clock::MAX_TASK;
use crate::contention::Rules;
use crate::cost::Costs;
use crate::engine::{self, Jitter, Pass, Rank, Tables};
use crate::hardware::Profile;
use crate::host::{HostCosts, SectionCode};
use crate::memory::{self, MemoryRun};
use crate::options::Options;
use crate::part::Part;
use crate::power;
use crate::report::{self, Parts};
use shardlab_plan::ir::DType;
use shardlab_plan::program::{Program, SectionKind};
use shardlab_plan::record::{Clock, Run};
use shardlab_plan::units::Picos;

/// Maximum number of streams of a program.
const STREAMS: usize = 8;
/// Number of steady passes to simulate at first if the caller does not set it.
const STEADY: usize = 3;
/// Number of steady passes to simulate at first in a light run. In most scenarios, time repeats
/// from the first one.
const STEADY_LIGHT: usize = 2;
/// Number of steady passes for finding the slowdown of arithmetic at the power limit.
const STEADY_CLOCK: usize = 2;
/// Number of steady passes if the first ones were not enough for time to repeat.
const STEADY_MORE: usize = 7;
/// Number of steady passes if every step differs.
const SAMPLES: usize = 10;
/// Number of steady passes after which memory is assumed to repeat.
const MEMORY_PASSES: usize = 6;

/// Simulates a program.
///
/// # Errors
/// Fails if the options or the program are invalid, if memory is enforced and does not suffice, if
/// streams wait for each other in a cycle, or if an invariant of the simulator is violated.
pub fn simulate(program: &Program, profile: &Profile, options: &Options) -> Result<Run, SimError> {
    simulate_counted(program, profile, options).map(|(run, _)| run)
}

/// Simulates without keeping spans, gaps, timeline and cost sources, for sweeps.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_light(
    program: &Program,
    profile: &Profile,
    options: &Options,
) -> Result<Run, SimError> {
    simulate(
        program,
        profile,
        &Options {
            record: false,
            ..options.clone()
        },
    )
}

/// Returns the factor on kernel times when the slowest of many GPUs determines the step: every
/// collective of all ranks ends with the slowest rank.
fn straggling(program: &Program, profile: &Profile) -> f64 {
    let nodes = program.meta.nodes().max(1);
    1.0 + profile.network.straggler_loss * f64::from(nodes).log2()
}

/// Rejects 8-bit matmuls on a GPU whose profile has no rate for them. CPUs decode the factors.
fn has_rates(program: &Program, profile: &Profile) -> Result<(), SimError> {
    let known = profile.device.tflops.contains_key(&DType::F8E4m3);
    let is_cpu = profile.device.shared_cores.is_some();
    if known || is_cpu || !program.has_scaled_gemms() {
        return Ok(());
    }
    Err(SimError::Options(format!(
        "profile `{}` has no rate of 8-bit matmuls; add `f8e4m3` to `tflops` of [device], or set \
         precision.float8_recipe = \"none\"",
        profile.name
    )))
}

/// Simulates, and returns the number of program instructions that the host interpreted (over all
/// timed passes and ranks), for benchmarks.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_counted(
    program: &Program,
    profile: &Profile,
    options: &Options,
) -> Result<(Run, u64), SimError> {
    options
        .check(program.meta.mesh.world())
        .map_err(SimError::Options)?;
    check_program(program)?;
    has_rates(program, profile)?;
    let profile = &*profile
        .with_attention(program.meta.attention_backend)
        .map_err(SimError::Options)?;
    let times = |part| options.times(part) * profile.times(part);
    let host = HostCosts::new(profile, times(Part::Host));
    let mut costs = Costs::new(program, profile);
    costs.measured(&options.kernel_times);
    for part in Part::ALL {
        costs.slow(part, times(part));
    }
    for part in [Part::Arithmetic, Part::Memory] {
        costs.slow(part, straggling(program, profile));
    }
    check_costs(&costs)?;
    let sections: Vec<SectionCode> = program
        .sections
        .iter()
        .map(|s| SectionCode::new(program, s, &costs, &host))
        .collect();
    let memory = run_memory(program, profile, options, &sections, &host)?;
    let setup = Setup {
        program,
        profile,
        options,
        sections: &sections,
        memory: &memory,
        host: &host,
    };
    let trial = trial(&setup, &costs)?;
    if let Some(trial) = &trial {
        costs.at(&trial.clock);
        check_costs(&costs)?;
    }
    let repeats = trial.as_ref().is_none_or(|t| t.repeats);
    let mut steady = match (options.steps, options.jitter > 0.0) {
        (0, true) => SAMPLES,
        (0, false) if options.record || !repeats => STEADY,
        (0, false) => STEADY_LIGHT,
        (n, _) => n.max(2) as usize,
    };
    loop {
        let tables = tables(&setup, &costs, steady)?;
        let mut ranks = make_ranks(&tables, program, options);
        match ranks.as_mut_slice() {
            [one] => engine::run_one(one)?,
            all => engine::run_all(all, &program.communicators)?,
        }
        let result = Parts {
            program,
            profile,
            options,
            costs: &costs,
            tables: &tables,
            host: &host,
            memory: &memory,
            clock: trial.as_ref().map(|t| t.clock),
        };
        report::invariants(&result, &ranks)?;
        let more = match steady {
            _ if options.steps != 0 || options.every_rank() => None,
            STEADY_LIGHT => Some(STEADY),
            STEADY => Some(STEADY_MORE),
            _ => None,
        };
        if let Some(more) = more
            && !report::repeats(&result, &ranks)
        {
            steady = more;
            continue;
        }
        let instrs = report::instructions(&result, &ranks);
        return Ok((report::build(&result, &ranks), instrs));
    }
}

/// What all timed passes of a program have in common, except costs.
#[derive(Clone, Copy)]
struct Setup<'a> {
    program: &'a Program,
    profile: &'a Profile,
    options: &'a Options,
    sections: &'a [SectionCode],
    memory: &'a MemoryRun<'a>,
    host: &'a HostCosts,
}

/// Results of a trial at the rates of the profile's tables.
struct Trial {
    /// The slowdown of arithmetic at the power limit.
    clock: Clock,
    /// Whether time repeats from the first step on.
    repeats: bool,
}

/// Simulates a few steps at the rates of the profile's tables, if it has a power limit.
fn trial(setup: &Setup<'_>, costs: &Costs) -> Result<Option<Trial>, SimError> {
    let Some(power) = &setup.profile.power else {
        return Ok(None);
    };
    let light = Options {
        record: false,
        ..setup.options.clone()
    };
    let light = Setup {
        options: &light,
        ..*setup
    };
    let tables = tables(&light, costs, STEADY_CLOCK)?;
    let mut rank = Rank::new(&tables, 0, None);
    engine::run_one(&mut rank)?;
    let (step, repeats) = match rank.passes.as_slice() {
        [first, second] => {
            let (first, both) = (first.end(), second.end());
            (both - first, report::starts_alike(first, both - first))
        }
        passes => (passes.last().map_or(0, |p| p.end()), true),
    };
    Ok(Some(Trial {
        clock: power::clock(power, power::busy(setup.program, costs), step),
        repeats,
    }))
}

fn check_costs(costs: &Costs) -> Result<(), SimError> {
    match costs.all.iter().position(|c| c.work > MAX_TASK) {
        None => Ok(()),
        Some(i) => Err(SimError::Program(format!(
            "task {i} takes {}: beyond 1000 s",
            Picos(costs.all[i].work)
        ))),
    }
}

fn check_program(program: &Program) -> Result<(), SimError> {
    let fail = |message: String| Err(SimError::Program(message));
    if program.section(SectionKind::Steady).is_none() {
        return fail("no steady section".into());
    }
    if program.streams.is_empty() || program.streams.len() > STREAMS {
        return fail(format!(
            "{} streams; between 1 and {STREAMS} are supported",
            program.streams.len()
        ));
    }
    if program.instrs.len() > u32::MAX as usize / 2 || program.communicators.len() > 255 {
        return fail("too many instructions or communicators".into());
    }
    for comm in &program.communicators {
        comm.divides(program.meta.mesh.world())
            .map_err(SimError::Program)?;
    }
    Ok(())
}

fn run_memory<'a>(
    program: &'a Program,
    profile: &Profile,
    options: &Options,
    sections: &[SectionCode],
    host: &HostCosts,
) -> Result<MemoryRun<'a>, SimError> {
    let outside = profile.outside_allocator(program).total();
    let limit = options
        .enforce_memory
        .then(|| shardlab_plan::units::Bytes(profile.capacity().0.saturating_sub(outside.0)));
    let mut memory = MemoryRun::new(program, limit);
    let mut steady = 0;
    let order = memory::order(program, MEMORY_PASSES);
    for &kind in &order {
        let Some(i) = program.sections.iter().position(|s| s.kind == kind) else {
            continue;
        };
        if kind != SectionKind::Steady || !memory.repeat(&order) {
            memory.pass(
                &program.sections[i],
                &sections[i],
                host,
                options.record && kind == SectionKind::Steady,
            )?;
        }
        steady = if kind == SectionKind::Steady {
            steady + 1
        } else {
            0
        };
        if steady >= 2 && memory.repeats() {
            break;
        }
    }
    Ok(memory)
}

/// Returns what the engine reads: the passes in order, of which `steady` are steady and the last
/// one is recorded, with their costs, stalls of memory, and rates of the hardware.
///
/// # Errors
/// Fails if the program has no pass to run.
fn tables<'a>(setup: &Setup<'a>, costs: &'a Costs, steady: usize) -> Result<Tables<'a>, SimError> {
    let &Setup {
        program,
        profile,
        options,
        sections,
        memory,
        host,
    } = setup;
    let order = memory::order(program, steady);
    let skip = |kind: SectionKind| {
        !options.record && matches!(kind, SectionKind::Init | SectionKind::First)
    };
    let mut passes = Vec::with_capacity(order.len());
    for (i, &kind) in order.iter().enumerate() {
        if skip(kind) || (!options.record && kind == SectionKind::Validation) {
            continue;
        }
        let Some(section) = sections.iter().position(|s| s.kind == kind) else {
            continue;
        };
        // The last pass for which memory was simulated is repeated.
        let memory_pass = memory.passes.get(i).or_else(|| memory.passes.last());
        let stalls = memory_pass.map(|p| p.stalls.clone()).unwrap_or_default();
        passes.push(Pass {
            section,
            recorded: false,
            stalls,
        });
    }
    match passes.last_mut() {
        Some(last) => last.recorded = true,
        None => return Err(SimError::Program("nothing to run".into())),
    }
    let mut by_priority: Vec<u8> = (0..program.streams.len() as u8).collect();
    // Among equal priorities, the compute stream comes last: a collective that waited for the end
    // of a kernel precedes the next kernel.
    by_priority.sort_by_key(|&s| (program.streams[usize::from(s)].priority, s == 0, s));
    let us = |x: f64| Picos::from_us(x).0;
    let node = program
        .meta
        .mesh
        .world()
        .min(program.meta.gpus_per_node)
        .max(1);
    Ok(Tables {
        costs: &costs.all,
        sections,
        passes,
        priorities: program.streams.iter().map(|s| s.priority).collect(),
        by_priority,
        events: program.events as usize,
        comms: program.communicators.len(),
        queue_depth: profile.host.queue_depth,
        gap: us(profile.device.kernel_gap_us),
        graph_gap: us(profile.device.graph_gap_us),
        latency: us(profile.device.launch_latency_us),
        event_latency: us(profile.device.event_latency_us),
        in_flight: (profile.host.steps_in_flight as usize).min(engine::IN_FLIGHT),
        host_wait: host.host_wait,
        rules: Rules::new(profile, options.contention, node),
    })
}

fn make_ranks<'a>(tables: &'a Tables<'a>, program: &Program, options: &Options) -> Vec<Rank<'a>> {
    if !options.every_rank() {
        return vec![Rank::new(tables, 0, None)];
    }
    let factor = |rank| {
        options
            .stragglers
            .iter()
            .find(|s| s.0 == rank)
            .map_or(1.0, |s| s.1)
    };
    let rank = |id| {
        let factor = factor(id);
        let random = options.jitter > 0.0 || factor != 1.0;
        Rank::new(
            tables,
            id,
            random.then(|| Jitter::new(options.seed, id, options.jitter, factor)),
        )
    };
    (0..program.meta.mesh.world()).map(rank).collect()
}
