//! Measures the GPUs of this machine and produces a hardware profile of the CUDA device.
//!
//! Kernels are timed by the GPU's own records within training steps; matmuls and attention are also
//! timed on a grid of sizes. Collectives are timed by kind, size and number of ranks, alone and
//! overlapping with kernels. Host costs are measured by issuing more work than the device can
//! process, and by whole steps without recording.

mod bench;
mod grid;
mod grouped;
mod host;
mod models;
mod rank;
mod recipe;
mod render;
mod warm;
mod watch;
mod wires;

use super::steps::{Between, Observed, On, Shown, Totals, means_alone, run, run_with};
use super::{AddedKernels, Options, UserScenario};
use crate::device::cuda::{Context, CudaFactory, CudaOptions};
use crate::train::TrainError;
use bench::Bench;
use shardlab_plan::ir::ScaleMode;
use shardlab_plan::program::{Op, Program, SectionKind};
use std::path::PathBuf;
use std::time::Duration;
use watch::{Limits, Watch};

/// Duration of the steps before the first recorded one.
const WARM: Duration = Duration::from_millis(2000);
/// Longest time without progress in a step. It is shorter than the calibration's own limit, whose
/// message contains less about steps.
const STEP: Duration = Duration::from_secs(40);
/// Share of the measuring time after which collectives of fewer ranks are skipped.
const FEWER: f64 = 0.35;
/// Share of the measuring time after which communicators on copy engines are skipped.
const ENGINES: f64 = 0.35;
/// Share of the measuring time after which timing attention's backward in both orders is skipped.
const ORDERS: f64 = 0.6;
/// Share of the remaining time for steps that may be used by steps of several ranks.
const SHARDED: f64 = 0.45;
/// Number of kernels for measuring the overhead of recording.
const SHORT_US: f64 = 200.0;

/// Measurements.
#[derive(Debug, Default)]
struct Measured {
    gpu: String,
    gpus: u32,
    driver: i32,
    multiprocessors: u32,
    memory_mib: u64,
    /// Recipes of 8-bit matmuls that the GPU supports.
    scalings: Vec<ScaleMode>,
    steps: Totals,
    gemm: Vec<super::grid::GemmTable>,
    grouped: Vec<super::grid::GroupedRows>,
    attention: Vec<super::grid::AttentionRows>,
    /// Time of attention's backward with a fixed order of sums, relative to any order.
    fixed_order: Option<f64>,
    collectives: Vec<super::collectives::Table>,
    host: host::Host,
    copies: Option<host::Copies>,
    wires: wires::Together,
    power: warm::Power,
    outside: Outside,
}

/// Measures GPUs with up to `options.ranks` ranks. Returns the text of the profile. Calls `note`
/// with the name of each part as it starts.
///
/// Every part has a deadline. If nothing makes progress for a minute, or everything takes far
/// longer than planned, this function fails with a message that names the part and its ranks. It
/// cannot return while a thread is inside a call that does not return. In that case, or if the
/// process has not ended soon after an error, `stuck` is called with the message on another thread,
/// and must end the process.
///
/// # Errors
/// Returns [`TrainError`] if there is no GPU, if a calibration step cannot be planned or run, or if
/// a deadline passes.
pub fn calibrate_cuda(
    options: &Options,
    library_path: &[PathBuf],
    note: impl Fn(&str) + Send + Sync + 'static,
    stuck: impl FnOnce(&str) + Send + 'static,
) -> Result<String, TrainError> {
    watched(options, note, stuck, |watch| {
        measure(options, library_path, watch)
    })
}

/// Values of the profile to which kernels are added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Base {
    /// Number of multiprocessors of its GPU.
    pub multiprocessors: u32,
    /// Device memory in MiB.
    pub memory_mib: u64,
    /// Share of a step, 0 to 1, up to which arithmetic runs at the full clock.
    pub arithmetic_share: f64,
    /// Slowdown of arithmetic above this share: the relative increase of its time per unit of
    /// share.
    pub arithmetic_slope: f64,
    /// The same for 8-bit matmuls, if known.
    pub float8_slope: Option<f64>,
}

/// Relative difference in device memory between GPUs of the same kind, on which the driver reserves
/// different amounts.
const SAME_MEMORY: f64 = 0.02;

impl Base {
    /// # Errors
    /// Fails if the profile is for another kind of GPU.
    fn fits(&self, m: &Measured) -> Result<(), TrainError> {
        let memory = m.memory_mib as f64 / self.memory_mib.max(1) as f64;
        if self.multiprocessors == m.multiprocessors && (memory - 1.0).abs() < SAME_MEMORY {
            return Ok(());
        }
        Err(TrainError::Plan(format!(
            "the profile is for a GPU with {} SMs and {} MiB, but this GPU, {}, has {} SMs and {} MiB",
            self.multiprocessors, self.memory_mib, m.gpu, m.multiprocessors, m.memory_mib
        )))
    }
}

/// Duration of the steps of a user's scenario. About one second after a load starts, GPUs lower
/// their clocks again.
const OWN_WARM: Duration = Duration::from_millis(4000);

/// Minimum time for a scenario, including the creation of its devices and weights, on all GPUs and
/// on one.
const OWN_TIME: Duration = Duration::from_secs(30);

/// Measures only the kernels of `options.user_scenarios`, on one GPU and, as whole steps, on up to
/// `options.ranks`, for the profile of this kind of GPU. The other arguments are those of
/// [`calibrate_cuda`].
///
/// # Errors
/// Returns [`TrainError`] if there is no GPU or one of another kind than the profile's, if a
/// scenario cannot be planned or run, or if a deadline passes.
pub fn add_kernels_cuda(
    options: &Options,
    base: Base,
    library_path: &[PathBuf],
    note: impl Fn(&str) + Send + Sync + 'static,
    stuck: impl FnOnce(&str) + Send + 'static,
) -> Result<AddedKernels, TrainError> {
    let count = options.user_scenarios.len() as u32;
    let options = &Options {
        budget: options.budget.max(OWN_TIME * count),
        ..options.clone()
    };
    watched(options, note, stuck, |watch| {
        let (factory, m) = open(options, library_path)?;
        base.fits(&m)?;
        let power = warm::Power {
            share: base.arithmetic_share,
            slope: base.arithmetic_slope,
            float8_slope: base.float8_slope,
        };
        let beat = || watch.beat();
        let on = On {
            warm: OWN_WARM,
            ..on(&factory, &beat)
        };
        let observe = |scenario, ranks| {
            let job = Job::UserScenario {
                scenario,
                sharded: ranks > 1,
            };
            watch.say(&job.name());
            job.run(&on, ranks)
        };
        // The runs on all ranks come first, because after CUPTI has been used (to time one rank),
        // it stays in the process.
        let together = options.user_scenarios.iter().map(|scenario| match m.gpus {
            1 => Ok(None),
            ranks => observe(scenario, ranks).map(Some),
        });
        let together: Vec<Option<Observed>> = together.collect::<Result<_, _>>()?;
        let mut all = Vec::new();
        for (scenario, together) in options.user_scenarios.iter().zip(together) {
            let alone = observe(scenario, 1)?;
            let mut totals = Totals::default();
            totals.add_all(warm::Paced::of(&alone).at_full_clock(power));
            if let Some(together) = &together {
                new_kernels(together, &mut totals);
            }
            all.push((totals, together.unwrap_or(alone).plain_trial()));
        }
        watch.say("done");
        Ok(AddedKernels {
            source: render::source(&m, "within steps"),
            all,
        })
    })
}

/// Runs a function under a watch, whose verdict takes precedence.
fn watched<T>(
    options: &Options,
    note: impl Fn(&str) + Send + Sync + 'static,
    stuck: impl FnOnce(&str) + Send + 'static,
    measure: impl FnOnce(&Watch) -> Result<T, TrainError>,
) -> Result<T, TrainError> {
    let watch = Watch::start(options.budget, Limits::of(options.budget), note, stuck);
    let measured = measure(&watch);
    match (&measured, watch.verdict()) {
        (_, Some(verdict)) => return Err(TrainError::Plan(verdict)),
        (Err(e), None) => watch.failed(&e.to_string()),
        (Ok(_), None) => watch.end(),
    }
    measured
}

/// Returns the GPUs of this machine and their properties.
fn open(
    options: &Options,
    library_path: &[PathBuf],
) -> Result<(CudaFactory, Measured), TrainError> {
    let fault = |e: String| TrainError::Plan(e);
    let count = crate::device::cuda::gpus(library_path).map_err(|e| fault(e.to_string()))?;
    let context = Context::new(0, library_path).map_err(|e| fault(e.to_string()))?;
    let (_, total) = context.memory().map_err(|e| fault(e.to_string()))?;
    let factory = CudaFactory::new(CudaOptions {
        library_path: library_path.to_vec(),
        ..CudaOptions::default()
    });
    let m = Measured {
        gpu: context.name.clone(),
        gpus: options.ranks.min(count).max(1),
        driver: context.driver,
        multiprocessors: context.multiprocessors,
        memory_mib: total >> 20,
        scalings: scalings(context.capability),
        ..Measured::default()
    };
    Ok((factory, m))
}

/// Returns the recipes of 8-bit matmuls that cuBLASLt supports on GPUs of a compute capability.
/// Only Hopper has scales per row and per block.
fn scalings(capability: (u32, u32)) -> Vec<ScaleMode> {
    match capability {
        (..=7, _) | (8, ..=8) => Vec::new(),
        (9, _) => vec![
            ScaleMode::Tensorwise,
            ScaleMode::Rowwise,
            ScaleMode::Blockwise,
        ],
        _ => vec![ScaleMode::Tensorwise],
    }
}

fn measure(
    options: &Options,
    library_path: &[PathBuf],
    watch: &Watch,
) -> Result<String, TrainError> {
    let fault = |e: String| TrainError::Plan(e);
    let (factory, mut m) = open(options, library_path)?;
    let ranks = m.gpus;
    // This part is first, because everything that runs leaves library code on the device.
    watch.say("memory used by other libraries");
    if let Err(e) = footprint(&factory, ranks, watch, &mut m) {
        watch.say(&format!("memory used by other libraries: {e}"));
    }
    // Parts with several ranks come before everything that is timed with CUPTI's records. After
    // CUPTI has been used, it stays in the process, and may make the driver wait for a GPU whose
    // collective waits for another rank.
    let all = Bench::new(&factory, ranks, watch);
    if ranks > 1 {
        watch.say(&format!("{ranks} ranks, joining for collectives"));
        m.collectives = wires::alone(&all).map_err(fault)?;
        if watch.late(FEWER) {
            watch.say("no time for collectives next to kernels");
        } else {
            watch.say(&format!("{ranks} ranks, joining for two at a time"));
            m.wires = wires::together(&all).map_err(fault)?;
        }
        if ranks > 2 && !watch.late(FEWER) {
            watch.say("2 ranks, joining for collectives");
            let two = Bench::new(&factory, 2, watch);
            m.collectives.extend(wires::alone(&two).map_err(fault)?);
            m.collectives.sort_by_key(|t| t.ranks);
        }
    }
    m.copies = host::copies(&all).map_err(fault)?;
    watch.say("joining for gaps between kernels");
    let spacing = host::spacing(&all, false).map_err(fault)?;
    let one = Bench::new(&factory, 1, watch);
    let jobs = jobs(options, ranks, models::runs(&m.scalings));
    let sharded = sharded_steps(&factory, &jobs, ranks, watch)?;
    watch.say("GEMMs, attention, host");
    grid::measure(&one, &mut m).map_err(fault)?;
    grouped::measure(&one, &mut m).map_err(fault)?;
    if watch.late(ORDERS) {
        watch.say("no time for attention's backward in a fixed order");
    } else {
        match grid::fixed_order(&one) {
            Ok(slower) => m.fixed_order = slower,
            // The profile is complete without it.
            Err(e) => watch.say(&format!("attention's backward in a fixed order: {e}")),
        }
    }
    host::measure(&one, &mut m.host).map_err(fault)?;
    m.host.gap_us = spacing - host::spacing(&one, true).map_err(fault)?;
    steps(&factory, &jobs, watch, sharded, &mut m)?;
    warm::as_in_steps(&mut m);
    watch.say("done");
    Ok(render::profile(&options.name, &m))
}

/// Measures the device memory in bytes that the engine does not allocate: without communicators,
/// with one and with two, on SMs and on copy engines.
fn footprint(
    factory: &CudaFactory,
    ranks: u32,
    watch: &Watch,
    m: &mut Measured,
) -> Result<(), TrainError> {
    let on = On {
        factory,
        hardware: "h200-nvlink",
        // A single rank would be recorded with CUPTI, which must not be active when ranks
        // synchronize.
        recorded: false,
        steps: (1, 1),
        plain: 0,
        warm: Duration::ZERO,
        timeout: STEP,
        beat: &|| watch.beat(),
    };
    let (model, variant, policies) = models::footprints();
    let look = |policy, ranks| run(&on, &model, variant, policy, ranks, Duration::ZERO);
    let mut found: Vec<Footprint> = Vec::new();
    found.extend(Footprint::of(&look(policies.one, 1)?));
    if ranks > 1 {
        // Not every library and machine supports copy engines, and the profile is complete without
        // them.
        let on_engines = |policy| {
            if watch.late(ENGINES) {
                watch.say("no time for communicators on copy engines");
                return None;
            }
            let observed = look(policy, ranks);
            let failed = |e: &TrainError| watch.say(&format!("communicators on copy engines: {e}"));
            observed.inspect_err(failed).ok()
        };
        // Measured before any collective has run on SMs, because the kernels of those stay on the
        // device.
        let engines = on_engines(policies.engines);
        found.extend(engines.as_ref().and_then(Footprint::of));
        for policy in [policies.one, policies.two] {
            found.extend(Footprint::of(&look(policy, ranks)?));
        }
        // The measurement is not repeated after a failure.
        if engines.is_some() {
            let mixed = on_engines(policies.mixed);
            found.extend(mixed.as_ref().and_then(Footprint::of));
        }
    }
    m.outside = Outside::of(&found);
    Ok(())
}

/// Device bytes that the engine does not allocate, with given numbers of communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Footprint {
    /// Number of communicators whose collectives run on SMs.
    plain: u64,
    /// Number of communicators whose collectives run on copy engines.
    engines: u64,
    bytes: u64,
}

impl Footprint {
    /// Reads the bytes after the steps of a run, if they are known.
    fn of(observed: &Observed) -> Option<Self> {
        Some(Self::with(&observed.program, observed.foreign?))
    }

    /// Counts the communicators of a program; a single rank creates none.
    fn with(program: &Program, bytes: u64) -> Self {
        let used = program.used_communicators().into_values();
        let (engines, plain): (Vec<bool>, Vec<bool>) = used
            .filter(|_| program.meta.mesh.world() > 1)
            .partition(|e| *e);
        Self {
            plain: plain.len() as u64,
            engines: engines.len() as u64,
            bytes,
        }
    }
}

/// Model of the device bytes that the engine does not allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outside {
    /// Device memory (bytes) of a process with no communicator.
    context: u64,
    /// Additional bytes for the first communicator, without those of the communicator itself.
    /// Includes the kernels of collectives if `kernels` is unknown.
    joined: u64,
    /// Bytes per communicator whose collectives run on SMs.
    communicator: u64,
    /// Bytes per communicator whose collectives run on copy engines, if such a communicator was
    /// measured.
    engines: Option<u64>,
    /// Bytes of the kernels of collectives, which are loaded once when any of them runs on SMs.
    /// `None` if they cannot be separated from `joined`.
    kernels: Option<u64>,
}

impl Outside {
    /// Fits the model to measurements.
    fn of(found: &[Footprint]) -> Self {
        let bytes = |plain, engines| {
            let seen = |b: &&Footprint| (b.plain, b.engines) == (plain, engines);
            found.iter().find(seen).map(|b| b.bytes)
        };
        let context = bytes(0, 0).unwrap_or(0);
        let Some(one) = bytes(1, 0) else {
            return Self {
                context,
                ..Self::default()
            };
        };
        let more = |plain, engines| bytes(plain, engines).map(|b| b.saturating_sub(one));
        let communicator = more(2, 0).unwrap_or(0);
        // A communicator without bytes was not observed.
        let engines = more(1, 1).filter(|bytes| *bytes > 0);
        // Compares runs with communicators only on copy engines with one on SMs: without the
        // communicators themselves, they differ by the kernels.
        let once = one.saturating_sub(communicator + context);
        let without_kernels = bytes(0, 2)
            .zip(engines)
            .map(|(both, each)| both.saturating_sub(2 * each + context));
        let kernels = without_kernels.and_then(|joined| once.checked_sub(joined));
        Self {
            context,
            joined: once - kernels.unwrap_or(0),
            communicator,
            engines,
            kernels,
        }
    }
}

/// Returns how to run the steps.
fn on<'a>(factory: &'a CudaFactory, beat: &'a dyn Fn()) -> On<'a, CudaFactory> {
    On {
        factory,
        hardware: "h200-nvlink",
        recorded: true,
        steps: (3, 3),
        plain: 3,
        warm: WARM,
        timeout: STEP,
        beat,
    }
}

/// Number of layers of a user's scenario that are run. It is large enough to show most effects of
/// the share of arithmetic in a step.
const USER_LAYERS: u32 = 8;

/// Steps to run.
enum Job<'a> {
    /// Steps of a model of the calibration.
    Model(models::Run),
    /// Steps of a user's scenario, on one rank or on all.
    UserScenario {
        scenario: &'a UserScenario,
        sharded: bool,
    },
}

impl Job<'_> {
    fn name(&self) -> String {
        match self {
            Self::Model(model) => model.name.clone(),
            Self::UserScenario { scenario, sharded } => {
                let ranks = if *sharded { "all ranks" } else { "one rank" };
                format!("{}, {ranks}", scenario.name())
            }
        }
    }

    fn is_sharded(&self) -> bool {
        match self {
            Self::Model(models::Run { sharded, .. }) | Self::UserScenario { sharded, .. } => {
                *sharded
            }
        }
    }

    fn run(&self, on: &On<'_, CudaFactory>, ranks: u32) -> Result<Observed, TrainError> {
        match self {
            Self::Model(run) => {
                let what = (&*run.model, run.variant, run.policy, &run.sets[..]);
                run_with(on, what, ranks, Duration::ZERO)
            }
            Self::UserScenario { scenario, .. } => {
                scenario.observe(on, USER_LAYERS, ranks, Duration::ZERO)
            }
        }
    }
}

/// Returns all jobs, with the user's scenarios first, so that there is enough time for them.
fn jobs(options: &Options, ranks: u32, models: Vec<models::Run>) -> Vec<Job<'_>> {
    let ways = if ranks > 1 {
        &[true, false][..]
    } else {
        &[false]
    };
    let scenarios = options.user_scenarios.iter();
    let scenarios = scenarios.flat_map(|scenario| {
        ways.iter()
            .map(move |&sharded| Job::UserScenario { scenario, sharded })
    });
    scenarios
        .chain(models.into_iter().map(Job::Model))
        .collect()
}

/// Runs training steps on several ranks, while there is time.
fn sharded_steps(
    factory: &CudaFactory,
    jobs: &[Job<'_>],
    ranks: u32,
    watch: &Watch,
) -> Result<Vec<Observed>, TrainError> {
    if ranks == 1 {
        return Ok(Vec::new());
    }
    let beat = || watch.beat();
    let on = on(factory, &beat);
    let spent = watch.spent();
    let share = spent + (1.0 - spent).max(0.0) * SHARDED;
    let mut all = Vec::new();
    for job in jobs.iter().filter(|j| j.is_sharded()) {
        let name = job.name();
        if watch.late(share) {
            watch.say(&format!("no time for {name} and what follows on all"));
            break;
        }
        watch.say(&name);
        match (job.run(&on, ranks), job) {
            (Ok(observed), _) => all.push(observed),
            (Err(e), Job::UserScenario { .. }) => return Err(e),
            // The profile is complete without the values that need several ranks.
            (Err(e), Job::Model(_)) => watch.say(&format!("{name}: {e}")),
        }
    }
    Ok(all)
}

/// Measures times within training steps of one rank, while there is time, and adds the results from
/// all ranks.
fn steps(
    factory: &CudaFactory,
    jobs: &[Job<'_>],
    watch: &Watch,
    sharded: Vec<Observed>,
    m: &mut Measured,
) -> Result<(), TrainError> {
    let beat = || watch.beat();
    let on = on(factory, &beat);
    let mut between = Between::default();
    let mut hosts = Vec::new();
    let mut alone = Vec::new();
    for job in jobs {
        let name = job.name();
        if job.is_sharded() && m.gpus > 1 {
            continue;
        }
        if watch.late(1.0) {
            watch.say(&format!("no time for {name} and what follows"));
            break;
        }
        watch.say(&name);
        let observed = match (job.run(&on, 1), job) {
            (Ok(observed), _) => observed,
            // Smaller devices cannot run the larger models, and the profile is complete without
            // them.
            (Err(e), Job::Model(_)) if job.is_sharded() || !alone.is_empty() => {
                watch.say(&format!("{name}: {e}"));
                continue;
            }
            (Err(e), _) => return Err(e),
        };
        if m.gpus == 1 {
            m.outside.context = m.outside.context.max(observed.foreign.unwrap_or(0));
        }
        between.add(&observed);
        hosts.extend(host_cost(&observed, &m.host));
        alone.push(warm::Paced::of(&observed));
    }
    m.power = warm::Power::of(&alone);
    for run in &alone {
        m.steps.add_all(run.at_full_clock(m.power));
    }
    for observed in &sharded {
        between.add_events(observed);
        new_kernels(observed, &mut m.steps);
    }
    between.settle(&mut m.steps);
    if let Some(launch) = Some(middle(&mut hosts)).filter(|l| l.is_finite()) {
        m.host.launch_us = launch.max(0.1);
    }
    Ok(())
}

/// Returns the microseconds per launch, including the interpreter's part: the issue time of a step
/// without events and allocations.
fn host_cost(observed: &Observed, host: &host::Host) -> Option<f64> {
    let program = &observed.program;
    let section = program.section(SectionKind::Steady)?;
    let count = |f: fn(&Op) -> bool| {
        let all = program.section_instrs(section).iter();
        all.filter(|i| f(&i.op)).count() as f64
    };
    let launches = count(|o| matches!(o, Op::Launch { .. }));
    let others = count(|o| matches!(o, Op::Record { .. } | Op::Wait { .. })) * host.event_us
        + count(|o| matches!(o, Op::Alloc(_) | Op::Free(_))) * host.alloc_us
        + count(|o| matches!(o, Op::Collective { .. } | Op::Copy { .. })) * host.copy_us;
    let mut all: Vec<f64> = observed.plain.iter().map(|p| p.1).collect();
    let whole = middle(&mut all);
    (launches > 0.0 && whole.is_finite()).then(|| (whole - others) / launches)
}

/// Adds the kernels that ran only on several ranks. With several GPUs in one process, times come
/// from events, which lengthen the measured times. They are corrected by the lengthening of kernels
/// that were also measured without events. A kernel that never ran alone was slowed by overlapping
/// work, by up to six times its own time; if there are other kernels of its class, those are more
/// representative.
fn new_kernels(observed: &Observed, steps: &mut Totals) {
    let (mut longer, mut new) = (Vec::new(), Vec::new());
    for (launched, Shown { us, alone }) in means_alone(observed) {
        let kernel = &observed.program.kernels[launched.kernel.index()];
        match steps.find(kernel, launched.moved) {
            Some(known) if known < SHORT_US => longer.push(us - known),
            Some(_) => {}
            None if alone || !steps.knows_like(kernel) => new.push((kernel, launched.moved, us)),
            None => {}
        }
    }
    let longer = Some(middle(&mut longer))
        .filter(|l| *l > 0.0)
        .unwrap_or(0.0);
    for (kernel, moved, us) in new {
        steps.add(kernel, moved, (us - longer).max(steps.shortest_us));
    }
}

/// Returns the median; NaN if there are no numbers.
fn middle(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::super::steps::scenario_text;
    use super::*;

    fn footprint(plain: u64, engines: u64, bytes: u64) -> Footprint {
        Footprint {
            plain,
            engines,
            bytes,
        }
    }

    #[test]
    fn communicators_are_separated_from_the_context() {
        // 600, plus 30 with communicators, 170 for kernels on SMs, 500 for each, and 260 for one on
        // copy engines.
        let outside = |context, joined, communicator, engines, kernels| Outside {
            context,
            joined,
            communicator,
            engines,
            kernels,
        };
        let [alone, engines, one, two, mixed] = [
            footprint(0, 0, 600),
            footprint(0, 2, 600 + 30 + 2 * 260),
            footprint(1, 0, 600 + 30 + 170 + 500),
            footprint(2, 0, 600 + 30 + 170 + 2 * 500),
            footprint(1, 1, 600 + 30 + 170 + 500 + 260),
        ];
        let all = outside(600, 30, 500, Some(260), Some(170));
        assert_eq!(Outside::of(&[alone, engines, one, two, mixed]), all);
        // Without one of the two runs on copy engines, the kernels cannot be separated from the
        // rest.
        let whole = outside(600, 200, 500, Some(260), None);
        assert_eq!(Outside::of(&[alone, one, two, mixed]), whole);
        let without = outside(600, 200, 500, None, None);
        assert_eq!(Outside::of(&[alone, engines, one, two]), without);
        assert_eq!(Outside::of(&[alone, one, two]), without);
        assert_eq!(Outside::of(&[alone]), outside(600, 0, 0, None, None));
        // Negative kernel sizes are discarded: here there are more bytes with only copy engines
        // than with a communicator on SMs.
        let more = footprint(0, 2, 600 + 230 + 2 * 260);
        assert_eq!(Outside::of(&[alone, more, one, two, mixed]), whole);
        // Memory that a library frees when other ranks join does not count as negative.
        let odd = [
            alone,
            footprint(1, 0, 500),
            footprint(2, 0, 600),
            footprint(1, 1, 400),
        ];
        assert_eq!(Outside::of(&odd), outside(600, 0, 100, None, None));
        assert_eq!(Outside::of(&[]), Outside::default());
    }

    /// The runs are those that make the numbers separable.
    #[test]
    fn footprints_have_the_communicators_that_they_are_for() {
        let (model, variant, policies) = models::footprints();
        for (policy, ranks, plain, engines) in [
            (policies.one, 1, 0, 0),
            (policies.one, 2, 1, 0),
            (policies.two, 2, 2, 0),
            (policies.mixed, 2, 1, 1),
            (policies.mixed, 8, 1, 1),
            (policies.engines, 2, 0, 2),
            (policies.engines, 8, 0, 2),
        ] {
            let text = scenario_text("h200-nvlink", &model, variant, policy, ranks);
            let scenario = shardlab_plan::scenario::parse("footprint", &text, &[]).unwrap();
            let program = shardlab_plan::plan(&scenario).unwrap();
            let found = Footprint::with(&program, 7);
            assert_eq!(found, footprint(plain, engines, 7), "{policy} {ranks}");
        }
    }
}
