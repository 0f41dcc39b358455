//! Training steps of small models on this machine: times of kernels by kind, and of everything
//! between them.

mod between;
mod runner;
mod totals;

pub(super) use between::Between;
pub(super) use totals::Totals;

use super::{Trial, USER_LAYERS, UserScenario, quantile};
use crate::device::{CpuFactory, DeviceFactory};
use crate::engine::{ExecOptions, StepResult};
use crate::train::TrainError;
use runner::Steps;
use shardlab_plan::config::Scenario;
use shardlab_plan::ir::{Kernel, KernelId};
use shardlab_plan::program::{Op, Program};
use shardlab_plan::record::Span;
use shardlab_plan::scenario;
use shardlab_plan::units::{Bytes, Picos};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use totals::Mean;

/// Element type and compile mode.
pub(super) type Variant = (&'static str, &'static str);

/// A model to run: its section, and additional settings.
pub(super) struct Model {
    pub(super) text: String,
    /// Variants to run it in.
    pub(super) variants: &'static [Variant],
    /// Whether it also runs on several ranks.
    pub(super) sharded: bool,
}

/// How to run and measure steps.
pub(super) struct On<'a, F> {
    pub(super) factory: &'a F,
    /// Name of the scenarios' hardware.
    pub(super) hardware: &'static str,
    /// Whether times of tasks are recorded.
    pub(super) recorded: bool,
    /// Minimum and maximum number of recorded steps, after a first step. Steps beyond the minimum
    /// run only while there is time.
    pub(super) steps: (usize, usize),
    /// Minimum number of unrecorded steps before the others, for use if recording changes times.
    pub(super) plain: usize,
    /// Duration of these steps, which brings the device to the temperature of a long run.
    pub(super) warm: Duration,
    /// Longest time without progress.
    pub(super) timeout: Duration,
    /// Called after every step.
    pub(super) beat: &'a dyn Fn(),
}

impl On<'static, CpuFactory> {
    pub(super) fn cpu() -> Self {
        static FACTORY: OnceLock<CpuFactory> = OnceLock::new();
        Self {
            factory: FACTORY.get_or_init(CpuFactory::default),
            hardware: "cpu",
            recorded: true,
            steps: (MIN_STEPS, MAX_STEPS),
            plain: 0,
            warm: Duration::ZERO,
            timeout: ExecOptions::default().timeout,
            beat: &|| {},
        }
    }
}

/// Types and modes of models that run in all variants.
const ALL: &[(&str, &str)] = &[
    ("f32", "off"),
    ("bf16", "off"),
    ("f32", "regions"),
    ("bf16", "regions"),
];
const EAGER: &[(&str, &str)] = &[("f32", "off"), ("bf16", "off")];

/// Minimum number of recorded steps, exclusive.
const MIN_STEPS: usize = 4;
/// The same for models that run after the time is up.
const MIN_LATE_STEPS: usize = 1;
/// Maximum number of recorded steps.
const MAX_STEPS: usize = 60;
/// Number of models that run on several ranks even if there is no time left. The first models are
/// small.
const MIN_SHARDED_MODELS: usize = 2;
/// Maximum number of cores for which a calibration runs more ranks than cores.
const MAX_CORES: u32 = 8;

fn models() -> Vec<Model> {
    let model = |text: String, variants| Model {
        text,
        variants,
        sharded: false,
    };
    // Hidden size, heads, feed-forward, vocabulary, sequence length, micro-batch.
    let sizes: [[u64; 6]; 5] = [
        [24, 3, 64, 120, 16, 1],
        [48, 4, 128, 200, 40, 2],
        [96, 6, 256, 384, 48, 4],
        [256, 8, 704, 1024, 128, 2],
        [448, 7, 1216, 2048, 192, 2],
    ];
    let mut all = Vec::new();
    for [hidden, heads, ffn, vocab, seq, batch] in sizes {
        let kv = if heads % 2 == 0 { heads / 2 } else { 1 };
        let train =
            format!("max_seq_len = {seq}\n[train]\nseq_len = {seq}\nmicro_batch = {batch}\n");
        all.push(Model {
            text: format!(
                "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = {hidden}\nheads = {heads}\n\
                 kv_heads = {kv}\nffn = {ffn}\nvocab = {vocab}\n{train}clip_norm = 1.0\n"
            ),
            variants: ALL,
            sharded: true,
        });
        all.push(model(
            format!(
                "[model]\nfamily = \"gpt2\"\nlayers = 2\nhidden = {hidden}\nheads = {heads}\n\
                 vocab = {vocab}\n{train}clip_norm = 1.0\n"
            ),
            EAGER,
        ));
    }
    for [hidden, heads, ffn, _, seq, batch] in [sizes[0], sizes[2], sizes[3]] {
        let train = format!(
            "[train]\nseq_len = {seq}\nmicro_batch = {batch}\noptimizer = \"sgd\"\nweight_decay = 0\n"
        );
        all.push(model(
            format!(
                "[model]\nfamily = \"encoder\"\nlayers = 2\nhidden = {hidden}\nheads = {heads}\n\
                 ffn = {ffn}\n{train}"
            ),
            EAGER,
        ));
        all.push(model(
            format!("[model]\nfamily = \"linear\"\nlayers = 3\nhidden = {hidden}\n{train}"),
            EAGER,
        ));
    }
    for (channels, edge, batch) in [(8, 6, 2), (16, 16, 4), (32, 24, 4)] {
        all.push(model(
            format!(
                "[model]\nfamily = \"cnn\"\nlayers = 3\nchannels = {channels}\nheight = {edge}\n\
                 width = {edge}\n[train]\nseq_len = 1\nmicro_batch = {batch}\n\
                 optimizer = \"sgd\"\nweight_decay = 0\n"
            ),
            EAGER,
        ));
    }
    all
}

/// Sharding for runs with several ranks, which measure the kernels of sharding and the contention
/// between ranks.
const SHARDED: [(&str, &str); 3] = [
    ("native", "policy = \"native\""),
    ("fsdp2", "policy = \"fsdp2\""),
    ("megatron", "policy = \"megatron\""),
];

/// Measurements of one run: the median time of each task of the steady step, and the step of median
/// duration.
#[cfg_attr(
    not(feature = "cuda"),
    expect(
        dead_code,
        reason = "what only GPUs are asked for is observed on every device"
    )
)]
pub(super) struct Observed {
    pub(super) program: Arc<Program>,
    /// By task in issue order: the kernel, if the task is one, and its time.
    pub(super) tasks: Vec<(Option<Launched>, f64)>,
    pub(super) typical: StepResult,
    /// Unrecorded steps on a warm device: microseconds of the whole step and of the host.
    pub(super) plain: Vec<(f64, f64)>,
    /// Device bytes that the engine does not allocate, after the last step, if known.
    pub(super) foreign: Option<u64>,
}

/// A kernel at a launch. Launches of the same kernel may move different numbers of bytes, because
/// gradients are not always stored in the type that the kernel computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Launched {
    pub(super) kernel: KernelId,
    /// Bytes read and written.
    pub(super) moved: Bytes,
}

impl Launched {
    /// Returns the kernel of a launch; `None` for other instructions.
    fn of(program: &Program, op: &Op) -> Option<Self> {
        let Op::Launch { kernel, .. } = *op else {
            return None;
        };
        let moved = program.traffic(op).moved();
        Some(Self { kernel, moved })
    }
}

impl Observed {
    /// Returns kernels, the bytes that a launch moves, and mean microseconds.
    pub(super) fn kernels(&self) -> impl Iterator<Item = (&Kernel, Bytes, f64)> {
        let all = means(self).into_iter();
        all.map(|(l, us)| (&self.program.kernels[l.kernel.index()], l.moved, us))
    }

    /// Returns the step of median duration.
    pub(super) fn trial(&self) -> Trial {
        let record = &self.typical.record;
        self.trial_of(record.end - record.start)
    }

    /// Returns the median of the unrecorded steps, or of the recorded ones if there are none.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs"))]
    pub(super) fn plain_trial(&self) -> Trial {
        if self.plain.is_empty() {
            return self.trial();
        }
        let whole = self.plain.iter().map(|p| p.0);
        self.trial_of(Picos::from_us(quantile(whole.collect(), 0.5)))
    }

    fn trial_of(&self, step: Picos) -> Trial {
        Trial {
            program: Arc::clone(&self.program),
            step,
        }
    }
}

/// Runs steps of a user's scenario on one rank of the CPU device, for a given time.
pub(super) fn user_scenario(
    scenario: &UserScenario,
    time: Duration,
) -> Result<Observed, TrainError> {
    scenario.observe(&On::cpu(), USER_LAYERS, 1, time)
}

/// Runs the user's scenarios, and then all models.
pub(super) fn measure(
    budget: Duration,
    cores: u32,
    scenarios: &[UserScenario],
    note: &mut dyn FnMut(&str),
) -> Result<Totals, TrainError> {
    let models = models();
    let on = On::cpu();
    let alone: usize = models.iter().map(|m| m.variants.len()).sum();
    let ranks = cores.clamp(2, 8);
    let sharded: Vec<&Model> = models.iter().filter(|m| m.sharded).collect();
    // If there are more ranks than cores, they take turns, which is not realistic on machines with
    // many cores.
    let turns = if cores <= MAX_CORES { 2 * cores } else { 0 };
    let crowd = if turns > 0 { &SHARDED[..2] } else { &[] };
    let runs = alone + sharded.len() * (SHARDED.len() * EAGER.len() + crowd.len());
    let one = budget / (runs + scenarios.len()) as u32;
    let begin = Instant::now();
    let late = |model: usize| model >= MIN_SHARDED_MODELS && begin.elapsed() > 2 * budget;
    let mut totals = Totals::default();
    let mut between = Between::default();
    for scenario in scenarios {
        note(&scenario.name());
        totals.add_all(user_scenario(scenario, one)?.kernels());
    }
    for m in &models {
        for variant in m.variants {
            let least = if begin.elapsed() < budget {
                MIN_STEPS
            } else {
                MIN_LATE_STEPS
            };
            let on = On {
                steps: (least, MAX_STEPS),
                ..On::cpu()
            };
            let observed = run(&on, &m.text, *variant, SHARDED[0].1, 1, one)?;
            between.add(&observed);
            totals.add_all(observed.kernels());
        }
    }
    note("sharded steps");
    let mut factors = Vec::new();
    let mut sharding = Vec::new();
    for (i, m) in sharded.iter().enumerate() {
        if late(i) {
            break;
        }
        for variant in EAGER {
            for (_, policy) in SHARDED {
                let observed = run(&on, &m.text, *variant, policy, ranks, one)?;
                between.add_events(&observed);
                totals.trials.push(observed.trial());
                for (kernel, moved, us) in observed.kernels() {
                    match totals.find(kernel, moved) {
                        Some(alone) => factors.push((us / alone, alone)),
                        None => sharding.push((kernel.clone(), moved, us)),
                    }
                }
            }
        }
    }
    totals.crowded = crowded(factors);
    for (i, m) in sharded.iter().enumerate() {
        if late(i) {
            break;
        }
        for (_, policy) in crowd {
            let observed = run(&on, &m.text, EAGER[0], policy, turns, one)?;
            totals.trials.push(observed.trial());
        }
    }
    for (kernel, moved, us) in sharding {
        totals.add(&kernel, moved, us / totals.crowded);
    }
    between.settle(&mut totals);
    Ok(totals)
}

/// Returns the slowdown factor that half of the work (by time) does not exceed.
fn crowded(mut factors: Vec<(f64, f64)>) -> f64 {
    factors.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half: f64 = factors.iter().map(|f| f.1).sum::<f64>() / 2.0;
    let mut sum = 0.0;
    for (factor, weight) in factors {
        sum += weight;
        if sum >= half {
            return factor.max(1.0);
        }
    }
    1.0
}

/// Returns the mean time of each kernel of a run.
pub(super) fn means(observed: &Observed) -> BTreeMap<Launched, f64> {
    let mut by: BTreeMap<Launched, Mean> = BTreeMap::new();
    for &(kernel, us) in &observed.tasks {
        if let Some(kernel) = kernel {
            by.entry(kernel).or_default().add(us);
        }
    }
    by.into_iter().map(|(k, m)| (k, m.us())).collect()
}

/// Mean time of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shown {
    /// Microseconds.
    pub(super) us: f64,
    /// Whether the mean is over tasks that overlap with no task of another stream. If not, the
    /// kernel had no such tasks.
    pub(super) alone: bool,
}

/// Returns mean times over the tasks that overlap with no task of another stream, or over all tasks
/// of kernels that have none.
#[cfg_attr(
    not(any(test, feature = "cuda")),
    expect(dead_code, reason = "for GPUs")
)]
pub(super) fn means_alone(observed: &Observed) -> BTreeMap<Launched, Shown> {
    let spans = &observed.typical.spans;
    let alone = |s: &Span| {
        let overlaps = |o: &Span| o.stream != s.stream && o.start < s.end && s.start < o.end;
        !spans.iter().any(overlaps)
    };
    let mut by: BTreeMap<Launched, [Mean; 2]> = BTreeMap::new();
    for (&(kernel, us), span) in observed.tasks.iter().zip(spans) {
        if let Some(kernel) = kernel {
            by.entry(kernel).or_default()[usize::from(alone(span))].add(us);
        }
    }
    let best = |[shared, alone]: [Mean; 2]| {
        let seen = alone != Mean::default();
        Shown {
            us: if seen { alone } else { shared }.us(),
            alone: seen,
        }
    };
    by.into_iter().map(|(k, m)| (k, best(m))).collect()
}

/// Returns the scenario of a run.
pub(super) fn scenario_text(
    hardware: &str,
    model: &str,
    (dtype, mode): Variant,
    policy: &str,
    ranks: u32,
) -> String {
    format!(
        "{model}[mesh]\nhardware = \"{hardware}\"\ndp_shard = {ranks}\n[precision]\ncompute = \"{dtype}\"\n\
         [compile]\nmode = \"{mode}\"\n[fsdp]\n{policy}\n"
    )
}

pub(super) fn run<F: DeviceFactory>(
    on: &On<'_, F>,
    model: &str,
    variant: Variant,
    policy: &str,
    ranks: u32,
    time: Duration,
) -> Result<Observed, TrainError> {
    run_with(on, (model, variant, policy, &[]), ranks, time)
}

/// Runs steps of a model with additional keys.
pub(super) fn run_with<F: DeviceFactory>(
    on: &On<'_, F>,
    (model, variant, policy, sets): (&str, Variant, &str, &[String]),
    ranks: u32,
    time: Duration,
) -> Result<Observed, TrainError> {
    let text = scenario_text(on.hardware, model, variant, policy, ranks);
    let scenario =
        scenario::parse("calibration", &text, sets).map_err(|e| TrainError::Plan(e.to_string()))?;
    run_scenario(on, &scenario, time)
}

/// Runs steps of a scenario, with synthetic data.
pub(super) fn run_scenario<F: DeviceFactory>(
    on: &On<'_, F>,
    scenario: &Scenario,
    time: Duration,
) -> Result<Observed, TrainError> {
    let mut steps = Steps::open(on, scenario)?;
    // Memory that libraries allocate at their first launches must not be part of recorded steps.
    steps.session.set_recording(false);
    steps.next()?;
    let plain = steps.plain(on.plain, on.warm)?;
    steps.session.set_recording(on.recorded);
    let recorded = steps.recorded(on.steps, time)?;
    let run = steps.session.into_run();
    // Workspaces of kernels are also planned.
    let workspaces = run.environment.get("kernels.workspace_bytes");
    let workspaces = workspaces.and_then(|b| b.parse().ok()).unwrap_or(0);
    let engine = run.memory.peak_reserved.0 + workspaces;
    let foreign = run.memory.peak_device.0.checked_sub(engine);
    Ok(Observed {
        program: steps.program,
        tasks: recorded.tasks,
        typical: recorded.typical,
        plain,
        foreign,
    })
}

pub(super) fn us(picos: u64) -> f64 {
    picos as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::DType;
    use shardlab_plan::program::SectionKind;

    #[test]
    fn a_run_times_every_kernel_of_the_step() {
        let m = &models()[0];
        let on = On::cpu();
        let observed = run(&on, &m.text, m.variants[1], SHARDED[1].1, 2, Duration::ZERO).unwrap();
        let steady = observed.program.section(SectionKind::Steady).unwrap();
        let launches = observed
            .program
            .section_instrs(steady)
            .iter()
            .filter(|i| matches!(i.op, Op::Launch { .. }))
            .count();
        let timed: Vec<f64> = observed
            .tasks
            .iter()
            .filter(|t| t.0.is_some())
            .map(|t| t.1)
            .collect();
        assert_eq!(timed.len(), launches);
        assert!(timed.iter().all(|t| *t > 0.0 && t.is_finite()));
    }

    #[test]
    fn an_overlapping_kernel_counts_only_if_it_never_runs_alone() {
        let m = &models()[0];
        let on = On::cpu();
        let mut observed =
            run(&on, &m.text, m.variants[1], SHARDED[0].1, 1, Duration::ZERO).unwrap();
        let kernels: Vec<Launched> = {
            let mut all: Vec<Launched> = observed.tasks.iter().filter_map(|t| t.0).collect();
            all.dedup();
            all.truncate(2);
            all
        };
        let span = |stream: u8, start: u64, end: u64| Span {
            stream: shardlab_plan::ir::StreamId(stream),
            start: shardlab_plan::units::Picos(start),
            end: shardlab_plan::units::Picos(end),
            ..observed.typical.spans[0]
        };
        // The first kernel runs twice, the second time alone. The second kernel overlaps with a
        // task of another stream.
        let spans = vec![
            span(0, 0, 10),
            span(0, 10, 20),
            span(0, 20, 30),
            span(1, 5, 9),
            span(1, 25, 40),
        ];
        observed.tasks = vec![
            (Some(kernels[0]), 7.0),
            (Some(kernels[0]), 5.0),
            (Some(kernels[1]), 3.0),
            (None, 1.0),
            (None, 1.0),
        ];
        observed.typical.spans = spans;
        let found: Vec<(Launched, Shown)> = means_alone(&observed).into_iter().collect();
        let shown = |us: f64, alone: bool| Shown { us, alone };
        let mut want = vec![
            (kernels[0], shown(5.0, true)),
            (kernels[1], shown(3.0, false)),
        ];
        want.sort_by_key(|w| w.0);
        assert_eq!(found, want);
    }

    /// The gradient of the table with 120 rows of 24 numbers is cleared. It is in float32 with
    /// `native`, and in the compute type with `fsdp2`.
    #[test]
    fn kernels_are_filed_by_what_their_launches_move() {
        let m = &models()[0];
        let on = On::cpu();
        let mut totals = Totals::default();
        for (_, policy) in &SHARDED[..2] {
            let observed = run(&on, &m.text, ("bf16", "off"), policy, 2, Duration::ZERO).unwrap();
            for (launched, us) in means(&observed) {
                let kernel = &observed.program.kernels[launched.kernel.index()];
                totals.add(kernel, launched.moved, us);
            }
        }
        let rows = &totals.memory[&("fill", "fill".to_owned(), DType::Bf16)];
        let bytes: Vec<u64> = rows.keys().copied().collect();
        assert_eq!(bytes, [120 * 24 * 2, 120 * 24 * 4]);
    }

    #[test]
    fn half_of_the_time_decides_about_crowding() {
        assert_eq!(crowded(vec![(1.5, 1.0), (1.1, 3.0), (9.0, 1.0)]), 1.1);
        assert_eq!(crowded(vec![(0.7, 1.0)]), 1.0);
        assert_eq!(crowded(Vec::new()), 1.0);
    }
}
