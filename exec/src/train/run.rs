//! Training runs: steps, validation and checkpoints, until the end or an interrupt.

use super::checkpoint::{Progress, Saver, Snapshot};
use super::data::{Feed, step_inputs};
use super::hf::Origin;
use super::layout::{GradientParts, StateLayout};
use super::options::{Flow, Observer, ParamNorm, RunOptions, RunStart, StepReport};
use super::routing::Recorder;
use super::state::{StateIo, With};
use super::{TrainError, adapter, hf, resume, schedule, weights};
use crate::device::{CpuFactory, Device, DeviceFactory};
use crate::engine::{ExecOptions, Session, StepResult, reads_in_scope};
use crate::process::World;
use shardlab_plan::config::Histogram;
use shardlab_plan::ir::{BufferId, Param};
use shardlab_plan::record::Run;
use shardlab_plan::tape_of;
use shardlab_plan::{Program, Scenario};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Record, with losses and gradient norms of all steps, including those before a resumption.
    pub run: Run,
    /// Number of steps that were done before this process.
    pub resumed_from: u64,
    /// Whether the observer stopped the run.
    pub interrupted: bool,
    /// Validation losses, with the number of steps before each.
    pub validations: Vec<(u64, f64)>,
    /// Final norm of every parameter.
    pub weight_norms: Vec<f64>,
    /// Norm of every parameter's last gradient, if gradients persist.
    pub grad_norms: Option<Vec<f64>>,
    /// Norms of all parameters, with the number of steps done, every
    /// [`param_norms_every`](shardlab_plan::config::Train::param_norms_every) steps.
    pub param_norms: Vec<(u64, Vec<ParamNorm>)>,
    /// Choices of experts in all steps of this process, if they are counted
    /// ([`ExecOptions::routing`]).
    pub routing: Option<Histogram>,
}

impl<D: Device> StateIo for Session<D> {
    fn local(&self) -> Range<u32> {
        self.world().local()
    }

    fn share(&mut self, mine: Vec<u8>, with: With) -> Result<Vec<Vec<u8>>, TrainError> {
        let peers = self.world().process_group();
        Ok(match with {
            With::All => peers.all_gather("state", mine)?,
            With::Leader => peers.gather("state", mine)?.unwrap_or_default(),
        })
    }

    fn read(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, TrainError> {
        Ok(self.read_buffer(rank, buffer, offset, bytes)?)
    }

    fn write(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        data: &[u8],
    ) -> Result<(), TrainError> {
        Ok(self.write_buffer(rank, buffer, offset, data)?)
    }

    fn preset(&mut self, rank: u32, buffer: BufferId, data: Vec<u8>) -> Result<(), TrainError> {
        Ok(self.preset_buffer(rank, buffer, data.into())?)
    }
}

/// Trains the scenario of a program, with all ranks in this process on the CPU.
///
/// # Errors
/// As [`train_on`].
pub fn train(
    scenario: &Scenario,
    program: &Arc<Program>,
    options: RunOptions,
    observer: &mut dyn Observer,
) -> Result<Outcome, TrainError> {
    let world = World::single_process(program);
    train_on(
        scenario,
        program,
        options,
        world,
        &CpuFactory::default(),
        observer,
    )
}

/// Trains this process's ranks of a world, on devices of any kind. Every process of the world calls
/// it with the same scenario and options. The observer of any process may stop the run, which then
/// ends after the same step on all processes.
///
/// # Errors
/// Returns [`TrainError`] if the weights, the data or the checkpoint to start from are missing or
/// do not fit the model, if a file cannot be written, if a loss is not a number, or if a process or
/// a rank fails. Checkpoints that were complete before remain usable.
pub fn train_on<F: DeviceFactory>(
    scenario: &Scenario,
    program: &Arc<Program>,
    options: RunOptions,
    world: World,
    factory: &F,
    observer: &mut dyn Observer,
) -> Result<Outcome, TrainError> {
    let peers = Arc::clone(world.process_group());
    let result = Trainer::new(scenario, program, options, world, factory, observer).and_then(
        |mut trainer| {
            observer.begun(&trainer.begun());
            let interrupted = trainer.run(observer)?;
            trainer.finish(interrupted)
        },
    );
    if let Err(e) = &result {
        peers.fail(&e.to_string());
    }
    result
}

struct Trainer<'a, D: Device> {
    scenario: &'a Scenario,
    program: Arc<Program>,
    session: Session<D>,
    layout: StateLayout,
    feed: Feed,
    saver: Option<Saver>,
    every: u64,
    steps: u64,
    progress: Progress,
    resumed_from: u64,
    /// Ranks whose gradients are not copies of another rank's.
    distinct: Vec<bool>,
    validations: Vec<(u64, f64)>,
    /// By rank: parts of gradients whose norms are reported; empty if none are or can be.
    parts: Vec<GradientParts>,
    param_norms: Vec<(u64, Vec<ParamNorm>)>,
    routing: Option<Recorder>,
    export: Option<PathBuf>,
    /// What the model came from, if it is exported.
    origin: Option<Origin>,
    skip_grad_norms: bool,
    /// Creates devices with their kernels, and then weights.
    seconds: [(&'static str, Duration); 2],
}

impl<'a, D: Device> Trainer<'a, D> {
    fn new<F: DeviceFactory<Device = D>>(
        scenario: &'a Scenario,
        program: &Arc<Program>,
        options: RunOptions,
        world: World,
        factory: &F,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let layout = StateLayout::new(program)?;
        let origin = match &options.export {
            Some(_) => Origin::of(options.init.as_deref(), scenario.model_file.as_deref())?,
            None => None,
        };
        let peers = Arc::clone(world.process_group());
        let (store, mut checkpoint) = match &options.checkpoints {
            None => (None, None),
            Some(c) => {
                let (store, found) = resume::find(&peers, c, observer)?;
                (Some(store), found)
            }
        };
        let before = checkpoint.as_ref().map(|c| c.progress().clone());
        let seed = options
            .seed
            .or(before.as_ref().map(|p| p.seed))
            .unwrap_or(0);
        let tape = tape_of(scenario).map_err(|e| TrainError::Plan(e.to_string()))?;
        let mut feed = Feed::new(scenario, program, &tape.consts, options.tokens, seed)?;
        // Only the optimizer's kernel sums these gradients, or ranks hold some of them equally and
        // others not, which one sum per rank cannot distinguish.
        let distinct = layout.distinct_ranks(program);
        let pieces = program.instrs.iter().any(|i| program.sums_pieces(&i.op));
        let skip_grad_norms = options.skip_grad_norms || pieces || distinct.is_none();
        let counts = options.exec.routing;
        let exec = ExecOptions {
            grad_squares: !skip_grad_norms,
            ..options.exec
        };
        let local = world.local();
        feed.only(local.clone());
        let begin = Instant::now();
        let mut session = Session::open(Arc::clone(program), exec, world, factory)?;
        let opened = begin.elapsed();
        for note in session.notes() {
            observer.note(&note);
        }
        let begin = Instant::now();
        for rank in local {
            for (buffer, table) in feed.tables() {
                session.write_buffer(rank, *buffer, 0, table)?;
            }
        }
        let mut progress = Progress {
            seed,
            data: feed.fingerprint(),
            ..Progress::default()
        };
        // Checkpoints of adapters hold no others.
        if checkpoint.is_none() || scenario.lora.is_some() {
            let from = (options.init.as_deref(), options.adapter.as_deref(), seed);
            weights::start(scenario, program, &layout, from, &mut session)?;
        }
        if scenario.lora.is_some() {
            let norm = weights::base_norm(program, &layout, &mut session)?;
            let theirs = before.as_ref().and_then(|p| p.base_norm);
            weights::check_base(norm, theirs)?;
            progress.base_norm = Some(norm);
        }
        if let (Some(checkpoint), Some(before)) = (&mut checkpoint, before) {
            checkpoint.load(program, &layout, &mut session)?;
            if before.data != progress.data || before.seed != seed {
                observer.note("the checkpoint was written with other data: this is not a continuation of the same run");
            }
            feed.resume(before.step, before.samples);
            session.set_first_step(u32::try_from(before.step).unwrap_or(u32::MAX));
            progress = Progress {
                seed,
                data: progress.data,
                base_norm: progress.base_norm,
                ..before
            };
        }
        // The first step's collectives wait no longer than the watchdog's time, but files on
        // another host may take longer.
        peers.all_gather_untimed("weights", Vec::new())?;
        let seconds = [("devices", opened), ("weights", begin.elapsed())];
        Ok(Self {
            scenario,
            program: Arc::clone(program),
            session,
            layout,
            feed,
            saver: store.map(|s| Saver::new(s, progress.step, peers)),
            every: options.checkpoints.as_ref().map_or(0, |c| c.every),
            steps: options.steps.unwrap_or(u64::from(scenario.train.steps)),
            resumed_from: progress.step,
            progress,
            distinct: distinct.unwrap_or_default(),
            validations: Vec::new(),
            parts: match scenario.train.param_norms_every {
                0 => Vec::new(),
                _ if reads_in_scope(program) => Vec::new(),
                _ => StateLayout::gradient_parts(program)?.unwrap_or_default(),
            },
            param_norms: Vec::new(),
            routing: counts.then(|| Recorder::new(scenario)),
            export: options.export,
            origin,
            skip_grad_norms,
            seconds,
        })
    }

    fn begun(&self) -> RunStart {
        RunStart {
            ranks: self.program.meta.mesh.world(),
            device: self.session.device_name(),
            resumed_from: self.resumed_from,
            steps: self.steps,
        }
    }

    /// Runs steps until the end. Returns whether the observer ended the run.
    fn run(&mut self, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let validate = u64::from(self.scenario.train.validate_every);
        let freely = self.session.records_freely();
        let recorded = recorded_steps(self.steps.saturating_sub(self.progress.step));
        let tokens = self.program.meta.tokens;
        if self.progress.step >= self.steps {
            // Not an error: a finished job that is started again has nothing to do.
            observer.note(&format!(
                "nothing to train: the checkpoint is of step {}, and the run has {} steps in total",
                self.progress.step, self.steps
            ));
        }
        while self.progress.step < self.steps {
            let step = self.progress.step;
            let every = u64::from(self.scenario.train.param_norms_every);
            let norms = every > 0 && (step + 1).is_multiple_of(every);
            let mut inputs = step_inputs(self.feed.step(step));
            if norms {
                for (rank, parts) in inputs.ranks.iter_mut().zip(&self.parts) {
                    rank.gradient_parts = parts.iter().map(|(_, part)| part.clone()).collect();
                }
            }
            let hyper = schedule::hyper(&self.scenario.train, step);
            let left = self.steps - step;
            self.session.set_recording(freely || left <= recorded);
            let start = Instant::now();
            let result = self.session.step(&inputs, hyper)?;
            let time = start.elapsed();
            let grad_norm = self.grad_norm(&result);
            self.diverged(step, &result)?;
            self.progress.step = step + 1;
            self.progress.samples = self.feed.position(step + 1);
            self.progress.losses.push(finite(result.loss));
            let recorded = finite(grad_norm.unwrap_or(f64::NAN));
            self.progress.grad_norms.push(recorded);
            observer.ranks(&result.ranks);
            if let Some(routing) = &mut self.routing {
                routing.add(&result);
            }
            let flow = self.agree(observer.step(&StepReport {
                step: step + 1,
                steps: self.steps,
                loss: result.loss,
                grad_norm,
                lr: hyper.lr,
                time,
                tokens,
            }))?;
            if norms {
                let norms = self.param_norms(&result)?;
                observer.param_norms(step + 1, &norms);
                self.param_norms.push((step + 1, norms));
            }
            if validate > 0 && (step + 1).is_multiple_of(validate) {
                let inputs = step_inputs(self.feed.validation((step + 1) / validate - 1));
                let loss = self.session.validate(&inputs)?.loss;
                self.validations.push((step + 1, loss));
                observer.validation(step + 1, loss);
            }
            let last = flow == Flow::Stop || step + 1 == self.steps;
            if last || self.every > 0 && (step + 1).is_multiple_of(self.every) {
                self.save()?;
            }
            if flow == Flow::Stop {
                return Ok(step + 1 < self.steps);
            }
        }
        Ok(false)
    }

    /// Agrees on the end of the run: all processes stop after the same step, for any process that
    /// requested it.
    fn agree(&self, flow: Flow) -> Result<Flow, TrainError> {
        let mine = vec![u8::from(flow == Flow::Stop)];
        let peers = self.session.world().process_group();
        let all = peers.all_gather_untimed("flow", mine)?;
        Ok(if all.iter().any(|one| *one == [1]) {
            Flow::Stop
        } else {
            Flow::Continue
        })
    }

    /// Returns the program's gradient norm, or that of the gradients that the optimizer reads, if
    /// it is requested.
    fn grad_norm(&self, result: &StepResult) -> Option<f64> {
        result.grad_norm.or_else(|| {
            let ranks = result.grad_squares.iter().zip(&self.distinct);
            let distinct = ranks.filter(|(_, distinct)| **distinct).map(|(s, _)| s);
            (!self.skip_grad_norms).then(|| distinct.sum::<f64>().sqrt())
        })
    }

    /// Returns the norms of all parameters after a step that computed those of gradients.
    fn param_norms(&mut self, result: &StepResult) -> Result<Vec<ParamNorm>, TrainError> {
        let params = &self.program.params;
        let mut squares: Vec<Option<f64>> = vec![None; params.len()];
        for (parts, sums) in self.parts.iter().zip(&result.part_squares) {
            for ((param, _), sum) in parts.iter().zip(sums) {
                *squares[param.index()].get_or_insert(0.0) += f64::from(*sum);
            }
        }
        let names = hf::published_names(&self.program);
        let weights = self.layout.weight_norms(&mut self.session, params.len())?;
        let norms = params.iter().zip(weights).zip(squares).enumerate();
        let norm = |(n, ((param, weight), square)): (usize, ((&Param, f64), Option<f64>))| {
            let published = names.as_ref().map(|names| names[n].clone());
            ParamNorm {
                name: published.unwrap_or_else(|| param.name.clone()),
                weight,
                gradient: square.map(f64::sqrt),
            }
        };
        Ok(norms.map(norm).collect())
    }

    /// Ends the run if a loss is not a number, because all later results would not be numbers
    /// either.
    fn diverged(&mut self, step: u64, result: &StepResult) -> Result<(), TrainError> {
        let bad = |l: &&f32| !l.is_finite();
        let found = result.losses.iter().enumerate().find_map(|(rank, micros)| {
            let micro = micros.iter().position(|l| bad(&l))?;
            Some((rank, micro, micros[micro]))
        });
        let Some((rank, micro_batch, loss)) = found else {
            return Ok(());
        };
        let norms = self
            .layout
            .weight_norms(&mut self.session, self.program.params.len())?;
        let params = self
            .program
            .params
            .iter()
            .zip(norms)
            .filter(|(_, n)| !n.is_finite())
            .map(|(p, _)| p.name.clone())
            .collect();
        Err(TrainError::Diverged {
            step,
            rank,
            micro_batch,
            loss,
            params,
        })
    }

    fn save(&mut self) -> Result<(), TrainError> {
        let Some(saver) = &mut self.saver else {
            return Ok(());
        };
        let progress = self.progress.clone();
        let snapshot = Snapshot::take(&self.program, &self.layout, &mut self.session, progress)?;
        saver.save(snapshot)
    }

    fn finish(mut self, interrupted: bool) -> Result<Outcome, TrainError> {
        if let Some(saver) = &mut self.saver {
            saver.finish()?;
        }
        let params = self.program.params.len();
        let weight_norms = self.layout.weight_norms(&mut self.session, params)?;
        let grad_norms = self.layout.grad_norms(&mut self.session, params)?;
        if let Some(dir) = &self.export {
            let (program, layout) = (&self.program, &self.layout);
            let io = &mut self.session;
            match &self.scenario.lora {
                Some(lora) => adapter::export(dir, program, lora, layout, io)?,
                None => {
                    let model = (&self.scenario.model, self.origin.as_ref());
                    hf::export(dir, program, model, layout, io)?;
                }
            }
        }
        let mut run = self.session.into_run();
        let numbers = |list: &[Option<f64>]| list.iter().map(|x| x.unwrap_or(f64::NAN)).collect();
        run.losses = numbers(&self.progress.losses);
        run.grad_norms = numbers(&self.progress.grad_norms);
        run.environment
            .insert("seed".to_owned(), self.progress.seed.to_string());
        run.environment.insert("data".to_owned(), self.feed.name());
        for (what, time) in self.seconds {
            let seconds = format!("{:.2}", time.as_secs_f64());
            run.environment.insert(format!("seconds.{what}"), seconds);
        }
        Ok(Outcome {
            run,
            resumed_from: self.resumed_from,
            interrupted,
            validations: self.validations,
            weight_norms,
            grad_norms,
            param_norms: self.param_norms,
            routing: self.routing.map(Recorder::finish),
        })
    }
}

/// Returns how many of the last steps are recorded if recording slows a step down: one in four, at
/// most three. The run keeps the one nearest the median of the others.
fn recorded_steps(steps: u64) -> u64 {
    (steps / 4).clamp(1, 3)
}

fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

#[cfg(test)]
mod tests {
    use super::recorded_steps;

    #[test]
    fn most_steps_are_not_recorded() {
        let recorded = [0, 1, 4, 7, 8, 12, 1000].map(recorded_steps);
        assert_eq!(recorded, [1, 1, 1, 1, 2, 3, 3]);
    }
}
