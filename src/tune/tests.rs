//! Compares searches with exhaustive ones, and tests properties of answers.

use super::climb::Climb;
use super::evaluate::{Evaluator, Scored, Watch, digest, predicted};
use super::score::Order;
use super::search::search;
use super::space::Space;
use super::{Answer, Goal, Limits, Request, Score, tune, without_limit};
use crate::analysis::validation;
use crate::analysis::whatif::TOLERANCE;
use crate::analysis::whatif::tests::TIGHT_JOB;
use crate::predict::{Profiles, predict_light};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use shardlab_plan::Scenario;
use shardlab_plan::config::PolicyKind;
use shardlab_plan::scenario::{self, ScenarioError, keys};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Ends a search after this number of reports.
struct Until(AtomicUsize, usize);

impl Watch for Until {
    fn stopped(&self) -> bool {
        self.0.load(Relaxed) >= self.1
    }

    fn best(&self, _: usize, _: &Score, _: bool) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn never() -> Until {
    Until(AtomicUsize::new(0), usize::MAX)
}

fn model(layers: u32, batch: u32, more: &str) -> String {
    format!(
        "model = {{ family = \"llama\", layers = {layers}, hidden = 512, heads = 8, ffn = 1536, vocab = 8192 }}\n\
         train = {{ seq_len = 512, micro_batch = {batch}, grad_accum = 2 }}\n\
         mesh = {{ dp_shard = 4, hardware = \"h100-80\" }}\n{more}"
    )
}

/// A job whose step fits only after the allocator frees cached blocks is searched like all other
/// points: options that save memory are found, although each alone leaves the step tight.
#[test]
fn options_that_save_memory_of_tight_jobs_are_found() {
    let free = ["train.loss", "train.loss_chunk_tokens", "fsdp.units"];
    with(TIGHT_JOB, Some(&free), |job| {
        let request = job.request(None);
        let today = predict_light(&(job.load)(&[]).unwrap(), job.profiles).unwrap();
        let score = without_limit(&today, &request);
        assert!(
            !score.fits() && score.effect.fit.word() == "no",
            "{score:?}"
        );
        let space = Space::new(&today, &request);
        let watch = never();
        let predict = |s: &Scenario| predicted(s, &request, true);
        let eval = Evaluator::new(&space, &request, &watch, &predict, score.clone());
        let order = Order {
            goal: Goal::Throughput,
            today: None,
        };
        let mut climb = Climb::new(&eval, order);
        climb.neighbours(&(space.today(), score));
        let lean = space.overrides(&climb.composite(true));
        let sets = |value: &str| lean.iter().any(|set| set == value);
        assert!(sets("train.loss=chunked"), "{lean:?}");
        assert!(sets("fsdp.units=block_and_ends"), "{lean:?}");
    });
}

/// Options of jobs that not all jobs have: implementations of attention belong to transformers.
#[test]
fn attention_and_offloaded_activations_are_axes() {
    let keys = ["model.attn_implementation", "train.activation_offload"];
    for (implementation, expected) in [
        ("transformers", [true, true]),
        ("torchtitan", [false, true]),
    ] {
        let text = model(2, 1, FSDP2).replace(
            "vocab = 8192",
            &format!("vocab = 8192, implementation = \"{implementation}\""),
        );
        with(&text, Some(&keys), |job| {
            let today = predict_light(&(job.load)(&[]).unwrap(), job.profiles).unwrap();
            let space = Space::new(&today, &job.request(None));
            assert_eq!(keys.map(|key| space.axis(key).is_some()), expected);
        });
    }
}

const FSDP2: &str = "fsdp = { policy = \"fsdp2\" }\n";

/// Returns all keys but these.
fn all_but(free: &[&str]) -> Vec<String> {
    let paths = keys().iter().map(|k| k.path());
    paths.filter(|p| !free.contains(&p.as_str())).collect()
}

struct Job<'a> {
    load: &'a (dyn Fn(&[String]) -> Result<Scenario, ScenarioError> + Sync),
    profiles: &'a Profiles,
    kept: &'a [String],
}

impl Job<'_> {
    fn request(&self, budget: Option<Bytes>) -> Request<'_> {
        Request {
            load: self.load,
            profiles: self.profiles,
            goal: Goal::Throughput,
            limits: Limits { budget },
            kept: self.kept,
            free: &[],
            seed: 1,
        }
    }
}

fn with<T>(text: &str, free: Option<&[&str]>, test: impl FnOnce(&Job<'_>) -> T) -> T {
    let load = |more: &[String]| scenario::parse("job", text, more);
    let profiles = Profiles::default();
    let kept = free.map_or_else(Vec::new, all_but);
    test(&Job {
        load: &load,
        profiles: &profiles,
        kept: &kept,
    })
}

/// Compares searches with bounds, for random budgets, with the best of all points. Returns the
/// searches that found neither the best point nor one that ties with it.
fn misses(text: &str, free: &[&str], budgets: u32, least: u64) -> Vec<String> {
    with(text, Some(free), |job| {
        let unlimited = job.request(Some(Bytes(u64::MAX >> 1)));
        let today = predict_light(&(job.load)(&[]).unwrap(), job.profiles).unwrap();
        let space = Space::new(&today, &unlimited);
        assert!(space.size() >= least, "{} points", space.size());
        let score = Score::of(&today, unlimited.limits);
        let watch = never();
        let predict = |s: &Scenario| predicted(s, &unlimited, true);
        let all = Evaluator::new(&space, &unlimited, &watch, &predict, score.clone());
        let scores: Vec<Scored> = all.all(space.points());
        let known: BTreeMap<u64, &Score> = scores
            .iter()
            .map(|(p, score)| {
                let scenario = (job.load)(&space.overrides(p)).unwrap();
                (digest(&scenario), score)
            })
            .collect();
        let reserved = scores.iter().map(|(_, s)| s.effect.peak_reserved.0);
        let (low, high) = (reserved.clone().min().unwrap(), reserved.max().unwrap());
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut missed = Vec::new();
        for _ in 0..budgets {
            let share = f64::from(random.next_u32()) / f64::from(u32::MAX);
            let budget = Bytes(low + ((high - low) as f64 * share) as u64);
            let within = scores.iter().map(|(_, s)| s.within(budget));
            let fitting = within.filter(Score::fits).map(|s| s.effect.step_ms);
            let best = fitting.fold(f64::MAX, f64::min);
            let request = job.request(Some(budget));
            let predict = |s: &Scenario| Some(known.get(&digest(s))?.within(budget));
            let today = score.within(budget);
            let eval = Evaluator::new(&space, &request, &watch, &predict, today.clone());
            let found = search(&eval, (space.today(), today), 1, 0);
            let step = found.best.1.effect.step_ms;
            let hit = found.best.1.fits() && step <= best * (1.0 + TOLERANCE);
            if !hit {
                let is_best =
                    |(_, s): &&Scored| s.within(budget).fits() && s.effect.step_ms == best;
                let point = &scores.iter().find(is_best).unwrap().0;
                missed.push(format!(
                    "{budget} ({share:.2} of the range): {step:.3} instead of {best:.3} ms, after {}: {:?} instead of {:?}",
                    eval.evaluated(),
                    space.overrides(&found.best.0),
                    space.overrides(point),
                ));
            }
            // A bound above the optimum would not be a bound.
            if let Some(bound) = found.bound {
                let step = bound / found.best.1.time() * step;
                assert!(step <= best * (1.0 + TOLERANCE), "{step} > {best}");
            }
        }
        missed
    })
}

const FEW: [&str; 5] = [
    "train.micro_batch",
    "train.grad_accum",
    "train.recompute",
    "train.recompute_layers",
    "fsdp.reshard_after_forward",
];

#[test]
fn searches_find_the_optimum_of_all_points() {
    for text in [model(3, 2, FSDP2), model(4, 1, "")] {
        let missed = misses(&text, &FEW, 8, 60);
        assert!(missed.is_empty(), "{text}: {missed:#?}");
    }
}

/// At least 20,000 points of three models; 98 % of 200 budgets.
#[test]
#[ignore = "minutes; run with --release"]
fn large_searches_find_the_optimum_of_all_points() {
    let more = [
        &FEW[..],
        &[
            "compile.mode",
            "train.loss",
            "fsdp.prefetch_forward",
            "fsdp.prefetch_backward",
            "precision.reduce_dtype",
        ],
    ]
    .concat();
    let mut missed = Vec::new();
    for text in [
        model(6, 2, FSDP2),
        model(4, 4, FSDP2),
        model(5, 2, "fsdp = { policy = \"megatron\" }\n"),
    ] {
        missed.extend(misses(&text, &more, 67, 20_000));
    }
    println!(
        "{} of 201 searches missed the optimum: {missed:#?}",
        missed.len()
    );
    assert!(missed.len() <= 4, "{}", missed.len());
}

fn tuned(job: &Job<'_>, budget: Option<Bytes>, threads: usize) -> Answer {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let request = job.request(budget);
    let tune = || tune(&request, &never()).unwrap();
    pool.build().unwrap().install(tune)
}

#[test]
fn answers_do_not_depend_on_the_number_of_threads() {
    let free = [&FEW[..], &["compile.mode", "fsdp.prefetch_forward"]].concat();
    with(&model(2, 1, FSDP2), Some(&free), |job| {
        let answers = [1, 3].map(|threads| tuned(job, None, threads));
        assert!(!answers[0].exact, "{} points", answers[0].points);
        assert_eq!(answers[0], answers[1]);
    });
}

#[test]
fn an_answer_is_what_its_settings_predict() {
    with(&model(3, 2, FSDP2), Some(&FEW), |job| {
        let answer = tuned(job, None, 2);
        assert!(answer.found && answer.exact);
        assert!(answer.gap().is_some_and(|gap| gap <= TOLERANCE));
        let best = &answer.best;
        let p = predict_light(&(job.load)(&best.set).unwrap(), job.profiles).unwrap();
        assert_eq!(p.step_ms(), best.score.effect.step_ms);
        assert!(best.score.effect.step_ms <= answer.today.score.effect.step_ms);
        // The batch stays.
        let train = &p.scenario.train;
        assert_eq!(train.micro_batch * u64::from(train.grad_accum), 4);
        let shares: f64 = answer.reasons.iter().filter_map(|r| r.share).sum();
        assert!((shares - 1.0).abs() < 1e-9, "{:?}", answer.reasons);
        // The best settings have the shortest step of the front, and memory decreases along the
        // front.
        let front = &answer.front;
        assert!(front[0].score.effect.step_ms >= best.score.effect.step_ms * (1.0 - TOLERANCE));
        let memory: Vec<u64> = front
            .iter()
            .map(|f| f.score.effect.peak_reserved.0)
            .collect();
        assert!(memory.is_sorted_by(|a, b| a > b), "{memory:?}");
    });
}

#[test]
fn the_goal_memory_saves_memory_without_a_slower_step() {
    with(&model(3, 2, FSDP2), Some(&FEW), |job| {
        let request = Request {
            goal: Goal::Memory,
            ..job.request(None)
        };
        let answer = tune(&request, &never()).unwrap();
        let (today, best) = (&answer.today.score.effect, &answer.best.score.effect);
        assert!(answer.found);
        assert!(best.peak_reserved < today.peak_reserved, "{answer:?}");
        assert!(best.step_ms <= today.step_ms * (1.0 + TOLERANCE));
    });
}

#[test]
fn what_cannot_fit_comes_close() {
    with(&model(3, 2, FSDP2), Some(&FEW), |job| {
        let answer = tuned(job, Some(Bytes(1 << 20)), 2);
        assert!(!answer.found && answer.gap().is_none());
        assert!(answer.best.score.slack < 0);
        assert!(answer.best.score.slack > answer.today.score.slack);
        assert!(answer.front.is_empty());
    });
}

#[test]
fn a_stopped_search_has_the_best_so_far() {
    with(&model(3, 2, FSDP2), None, |job| {
        let request = job.request(None);
        let answer = tune(&request, &Until(AtomicUsize::new(0), 1)).unwrap();
        assert!(answer.interrupted && !answer.exact && answer.bound_ms.is_none());
        assert!(answer.best.score.effect.step_ms <= answer.today.score.effect.step_ms);
    });
}

#[test]
fn the_engine_changes_only_if_it_is_free() {
    let text = model(2, 1, FSDP2);
    with(&text, Some(&["fsdp.policy"]), |job| {
        let request = job.request(None);
        let today = predict_light(&(job.load)(&[]).unwrap(), job.profiles).unwrap();
        assert_eq!(Space::new(&today, &request).axes.len(), 0);
        let free = [(
            "fsdp.policy".to_owned(),
            vec!["native".to_owned(), "fsdp2".to_owned()],
        )];
        let kept = all_but(&["fsdp.policy"]);
        let request = Request {
            free: &free,
            kept: &kept,
            ..request
        };
        let space = Space::new(&today, &request);
        assert_eq!(
            space.axes[0].choices,
            [vec![], vec!["fsdp.policy=native".to_owned()]]
        );
    });
}

/// Options that PyTorch does not have are not proposed, and those that need others are.
#[test]
fn validation_decides_which_choices_there_are() {
    with(&model(4, 2, FSDP2), None, |job| {
        let request = job.request(None);
        let today = predict_light(&(job.load)(&[]).unwrap(), job.profiles).unwrap();
        let space = Space::new(&today, &request);
        let choices = |key: &str| -> Vec<String> {
            let axis = space.axis(key).map(|i| &space.axes[i]);
            let choices = axis
                .into_iter()
                .flat_map(|a| a.choices[1..].iter().flatten());
            choices.cloned().collect()
        };
        assert!(choices("fsdp.optimizer_in_backward").is_empty());
        // `CPUOffloadPolicy` moves all state.
        let offload = choices("fsdp.offload");
        let all = |c: &String| {
            ["params", "grads", "optimizer"]
                .iter()
                .all(|s| c.contains(s))
        };
        assert!(offload.len() == 1 && offload.iter().all(all), "{offload:?}");
        assert!(choices("train.recompute").contains(&"train.recompute=pointwise".to_owned()));
        assert!(choices("fsdp.units")[0].contains("layers.0+layers.1"));
        assert_eq!(
            choices("train.micro_batch"),
            [
                "train.micro_batch=1",
                "train.grad_accum=4",
                "train.micro_batch=4",
                "train.grad_accum=1"
            ]
        );
        // A choice of earlier axes may be needed.
        assert_eq!(choices("train.recompute_layers").len(), 3);
    });
}

/// A measured run and its prediction.
struct Measured {
    name: String,
    score: Score,
    /// Milliseconds per step; `None` if the run ran out of memory.
    step_ms: Option<f64>,
}

/// Returns the measured runs of a table by job. The runs of a job have the same model, engine,
/// machine, number of ranks and samples per step.
fn jobs(table: &str) -> BTreeMap<String, Vec<Measured>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
    let path = std::path::PathBuf::from(format!("{folder}/{table}.csv"));
    let profiles = Profiles::default();
    let mut jobs: BTreeMap<String, Vec<Measured>> = BTreeMap::new();
    for row in validation::read(&path).unwrap() {
        let step_ms = row.measured[0];
        if step_ms.is_none() && !row.out_of_memory {
            continue;
        }
        let scenario = scenario::load(row.scenario.as_ref(), &row.overrides).unwrap();
        let train = &scenario.train;
        // Tables end the name of a run with its machine: m1, m2, m3.
        let machine = row.name.rsplit(' ').next().unwrap_or_default();
        let is_machine = machine.len() == 2 && machine.starts_with('m');
        let job = format!(
            "{table} {} {:?} {:?} {:?} {:?} {} {} {} {} {:?} {}",
            if is_machine { machine } else { "" },
            scenario.model,
            scenario.lora,
            scenario.fsdp.policy,
            // `tune` changes neither the recipe of 8-bit matmuls nor, for other engines, `ep`.
            scenario.precision.float8,
            if scenario.fsdp.policy == PolicyKind::Native {
                0
            } else {
                scenario.mesh.ep
            },
            scenario.mesh.hardware,
            scenario.mesh.world(),
            train.micro_batch * u64::from(train.grad_accum),
            train.seq_len,
            train.clip_norm,
        );
        let prediction = predict_light(&scenario, &profiles).unwrap();
        jobs.entry(job).or_default().push(Measured {
            name: row.label(),
            // All of the device's memory counts, because its usual headroom would exclude runs that
            // did fit.
            score: Score::of(
                &prediction,
                Limits {
                    budget: Some(Bytes(u64::MAX >> 1)),
                },
            ),
            step_ms,
        });
    }
    jobs.retain(|_, runs| runs.len() > 1);
    jobs
}

/// Answers that are more than 2 % slower than the fastest run of their group, with the maximum
/// difference. Runs with this setting differ by 10 % among themselves.
const SLOWER: [(&str, &str, f64); 1] = [("transformers_h100", "1b compiled", 0.03)];

/// Among the measured runs of a job, `tune` picks one within 2 % of the fastest, and none that ran
/// out of memory.
#[test]
fn the_pick_among_measured_runs_is_nearly_the_fastest() {
    const TABLES: [&str; 12] = [
        "exec_h100",
        "exec_h200",
        "exec_h200_later",
        "exec_h200_options",
        "float8_h100",
        "h200x4",
        "h200x4_heldout",
        "peers_h100x2",
        "published_a100",
        "published_h100",
        "toys_h200x4",
        "transformers_h100",
    ];
    let order = Order {
        goal: Goal::Throughput,
        today: None,
    };
    let (mut groups, mut failed, mut misses) = (0, 0, Vec::new());
    for table in TABLES {
        for runs in jobs(table).into_values() {
            groups += 1;
            let ran_out = runs.iter().filter(|r| r.step_ms.is_none());
            failed += ran_out.count();
            let picked = runs.iter().min_by(|a, b| order.compare(&a.score, &b.score));
            let picked = picked.unwrap();
            let steps = runs.iter().filter_map(|r| r.step_ms);
            let fastest = steps.fold(f64::MAX, f64::min);
            let loss = picked
                .step_ms
                .map_or(f64::INFINITY, |ms| ms / fastest - 1.0);
            let known = SLOWER
                .iter()
                .find(|known| (known.0, known.1) == (table, &picked.name));
            if loss > known.map_or(0.02, |known| known.2) {
                let names: Vec<String> = runs
                    .iter()
                    .map(|r| {
                        let predicted = r.score.effect.step_ms;
                        format!("{} {:?}, predicted {predicted:.2}", r.name, r.step_ms)
                    })
                    .collect();
                let percent = 100.0 * loss;
                misses.push(format!(
                    "{table}: {} {percent:.1} % slower: {names:#?}",
                    picked.name
                ));
            }
        }
    }
    assert!(groups > 50 && failed > 1, "{groups} {failed}");
    assert!(
        misses.is_empty(),
        "{} of {groups}: {misses:#?}",
        misses.len()
    );
}

/// Experts can be divided among ranks; a model without experts has no such choice.
#[test]
fn expert_models_have_an_axis_of_expert_parallelism() {
    for (name, expected) in [("small-moe", true), ("small-fsdp2", false)] {
        let load = |more: &[String]| scenario::load(name.as_ref(), more);
        let job = Job {
            load: &load,
            profiles: &Profiles::default(),
            kept: &all_but(&["mesh.ep"]),
        };
        let today = predict_light(&load(&[]).unwrap(), job.profiles).unwrap();
        let space = Space::new(&today, &job.request(None));
        assert_eq!(space.axis("mesh.ep").is_some(), expected, "{name}");
    }
}
