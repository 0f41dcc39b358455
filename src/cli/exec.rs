//! `shardlab exec`: runs a scenario's program and trains.

pub(super) mod device;
pub(crate) mod events;
mod fault;
mod processes;
mod progress;
mod report;
mod reserved;
mod utilisation;

#[cfg(feature = "cuda")]
pub(super) use device::use_libraries;

pub(crate) use utilisation::utilisation;

use super::args::{One, plan, size};
use super::communicators::{self, Communicator};
use super::interrupt;
use super::keep::{Place, SaveByDefault, Saved, with_source};
use super::output::{Failure, Out, Status, say, writable, write_file};
use crate::analysis::warnings::{self, Warning};
use crate::gate::Plant;
use crate::trace;
use fault::FaultAt;
use progress::{Follower, Progress, Style};
use serde::Serialize;
use shardlab_exec::engine::ExecOptions;
use shardlab_exec::process::World;
use shardlab_exec::train::{
    CheckpointOptions, Observer, Outcome, ParamNorm, Resume, RunOptions, TokenWidth, Tokens,
    TrainError, hf, tokenizer_next_to,
};
use shardlab_plan::config::CudaGraph;
use shardlab_plan::ir::{BodyOp, OpKind, ParameterCount};
use shardlab_plan::record::Summary;
use shardlab_plan::units::Bytes;
use shardlab_plan::{Program, Scenario, scenario};
use shardlab_reports::store::Id;
use shardlab_reports::view::{RunView, Validation};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args, Clone)]
pub(super) struct Args {
    #[command(flatten)]
    scenario: One,
    /// Total steps, including those before resuming [default: train.steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    steps: Option<u64>,
    /// Seed of weights and synthetic data [default: that of the resumed run, else 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Start from the weights in a Hugging Face folder (config.json and safetensors)
    #[arg(long, value_name = "DIR")]
    init: Option<PathBuf>,
    /// Start from the adapters in a PEFT folder (adapter_config.json and
    /// adapter_model.safetensors; scenarios with lora.r)
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Write the final weights to a Hugging Face folder, or the adapters to a PEFT folder
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
    /// Train on a file of tokens (.bin: uint16) or a text file, whose tokens come from the
    /// tokenizer.json next to it, else are its bytes [default: the file of
    /// train.document_lengths, else a synthetic language]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Type of the tokens in --data
    #[arg(long, value_enum, requires = "data")]
    data_dtype: Option<DataType>,
    /// Tokenizer for the text in --data: the tokenizer.json of a published model
    #[arg(
        long,
        value_name = "FILE",
        requires = "data",
        conflicts_with = "data_dtype"
    )]
    tokenizer: Option<PathBuf>,
    /// Folder of checkpoints [default, if one is needed: checkpoints/SCENARIO]
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// Save a checkpoint every N steps and at the end [default with --checkpoint-dir: only at the
    /// end]
    #[arg(long, value_name = "N")]
    checkpoint_every: Option<u64>,
    /// Keep the newest K checkpoints
    #[arg(long, alias = "keep", value_name = "K", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    keep_checkpoints: u32,
    /// Where to start if there are checkpoints: auto (the newest complete one), never, or a step
    #[arg(long, value_name = "auto|never|STEP", value_parser = resume)]
    resume: Option<Resume>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// How to report progress on stderr
    #[arg(long, value_enum, default_value_t = Style::Auto)]
    progress: Style,
    /// Write a Perfetto trace of the last step; t = 0 is the start of the step
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write how many tokens each expert gets, as a histogram for moe.routing
    #[arg(long, value_name = "FILE")]
    record_routing: Option<PathBuf>,
    /// Abort if no rank makes progress for SECONDS
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
    /// Check the output of every kernel and collective for NaN
    #[arg(long)]
    check_nan: bool,
    /// Per-rank memory limit, such as 512MiB; exceeding it aborts the run
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<Bytes>,
    /// Report gradient norms only if the scenario computes them
    #[arg(long)]
    no_grad_norms: bool,
    #[command(flatten)]
    device: device::DeviceArgs,
    #[command(flatten)]
    save: SaveByDefault,
    /// Inject a known fault, as `gate --inject-fault` does
    #[arg(long, alias = "plant", value_enum, value_name = "FAULT", hide = true)]
    inject_fault: Option<Plant>,
    /// Let a rank fail at the first collective of step 2, or never start: RANK:KIND
    #[arg(long, value_name = "FAULT", value_parser = fault::fault, hide = true)]
    fault: Option<FaultAt>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum DataType {
    /// 8 bits: every byte is a token
    Uint8,
    /// 16 bits, little endian
    Uint16,
    /// 32 bits, little endian
    Uint32,
}

fn resume(text: &str) -> Result<Resume, String> {
    match text {
        "auto" => Ok(Resume::Auto),
        "never" => Ok(Resume::Never),
        step => step
            .parse()
            .map(Resume::Step)
            .map_err(|_| "expected auto, never or a step".to_owned()),
    }
}

impl Args {
    fn tokens(&self) -> Result<Option<Tokens>, Failure> {
        let Some(path) = &self.data else {
            return Ok(None);
        };
        let width = match self.data_dtype {
            None => TokenWidth::of_file(path),
            Some(DataType::Uint8) => TokenWidth::U8,
            Some(DataType::Uint16) => TokenWidth::U16,
            Some(DataType::Uint32) => TokenWidth::U32,
        };
        let is_text = self.data_dtype.is_none() && width == TokenWidth::U8;
        let next_to_text = || tokenizer_next_to(path).filter(|_| is_text);
        let tokens = match self.tokenizer.clone().or_else(next_to_text) {
            Some(tokenizer) => Tokens::of_text(path, &tokenizer),
            None => Tokens::read(path, width),
        };
        let tokens = tokens.map_err(|e| Failure::bad_input(format_args!("--data {e}")))?;
        Ok(Some(tokens))
    }

    fn checkpoints(&self, scenario: &Scenario) -> Option<CheckpointOptions> {
        let asked = self.checkpoint_dir.is_some()
            || self.checkpoint_every.is_some()
            || self.resume.is_some();
        asked.then(|| CheckpointOptions {
            dir: self
                .checkpoint_dir
                .clone()
                .unwrap_or_else(|| PathBuf::from("checkpoints").join(&scenario.name)),
            every: self.checkpoint_every.unwrap_or(0),
            keep: self.keep_checkpoints as usize,
            resume: self.resume.unwrap_or_default(),
        })
    }

    /// Checks that the run has choices of experts to count.
    fn can_record_routing(&self, scenario: &Scenario, program: &Program) -> Result<(), Failure> {
        if self.record_routing.is_none() {
            return Ok(());
        }
        let sorts = |op: &BodyOp| matches!(op.op, OpKind::SortExperts(_));
        let drops = |op: &BodyOp| match op.op {
            OpKind::SortExperts(of) => of.limit.is_some_and(|limit| limit.drop),
            _ => false,
        };
        let experts = program.kernels.iter().any(|k| k.body.iter().any(sorts));
        let why = if !experts {
            format!(
                "--record-routing: family {} has no experts",
                scenario.model.family.name()
            )
        } else if scenario.compile.cuda_graph != CudaGraph::Off {
            "--record-routing: counts cannot be read from captured scopes: set compile.cuda_graph = \"off\"".to_owned()
        } else if program.kernels.iter().any(|k| k.body.iter().any(drops)) {
            "--record-routing: choices that moe.on_overflow = \"drop\" leaves out are not counted: set \
             moe.capacity_factor = \"worst\""
                .to_owned()
        } else if !scenario.train.skipped_blocks.is_empty() {
            "--record-routing: micro-batches that skip blocks have no counts of these: leave train.skipped_blocks out"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::bad_input(why))
    }

    /// Checks that the trained model can be written, so that this does not fail after the last
    /// step.
    fn can_export(&self, scenario: &Scenario, program: &Program) -> Result<(), Failure> {
        if self.export.is_none() || scenario.lora.is_some() {
            return Ok(());
        }
        let file = scenario.model_file.as_deref();
        let origin = hf::Origin::of(self.init.as_deref(), file)?;
        hf::has_form(program, &scenario.model, origin.as_ref()).map_err(|e| {
            Failure::bad_input(format_args!(
                "--export: {e}\n  help: leave --export out, and keep the weights with --checkpoint-dir \
                 (`shardlab checkpoint export` writes them for PyTorch)"
            ))
        })
    }

    /// Returns the settings that must be equal on all ranks.
    fn facts(&self, program: &Program, o: &RunOptions) -> Vec<(&'static str, String)> {
        vec![
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("program", program.digest()),
            ("device", self.device.name().to_owned()),
            ("steps", format!("{:?}", o.steps)),
            ("seed", format!("{:?}", o.seed)),
            ("init", o.init.is_some().to_string()),
            ("adapter", o.adapter.is_some().to_string()),
            ("export", o.export.is_some().to_string()),
            (
                "data",
                o.tokens
                    .as_ref()
                    .map_or_else(String::new, Tokens::fingerprint),
            ),
            (
                "checkpoints",
                o.checkpoints
                    .as_ref()
                    .map_or_else(String::new, |c| format!("every {}", c.every)),
            ),
        ]
    }

    fn options(&self, scenario: &Scenario, program: &Program) -> Result<RunOptions, Failure> {
        let mut exec = ExecOptions {
            timeout: Duration::from_secs(u64::from(self.timeout)),
            nan_check: self.check_nan,
            routing: self.record_routing.is_some(),
            record: true,
            capacity: self.memory,
            fault: self.fault.map(|f| f.of(program)).transpose()?,
            ..ExecOptions::default()
        };
        self.device.apply(&mut exec, scenario.mesh.world());
        Ok(RunOptions {
            steps: self.steps,
            seed: self.seed,
            init: self.init.clone(),
            adapter: self.adapter.clone(),
            export: self.export.clone(),
            tokens: self.tokens()?,
            checkpoints: self.checkpoints(scenario),
            skip_grad_norms: self.no_grad_norms,
            exec,
        })
    }
}

impl From<TrainError> for Failure {
    fn from(e: TrainError) -> Self {
        if e.is_bad_input() {
            Self::bad_input(e)
        } else {
            Self::run(e)
        }
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    perform(args, out).map_err(|failure| {
        // Messages of other ranks are logged only for debugging.
        if processes::leads() {
            args.progress.tell(failure)
        } else {
            failure
        }
    })
}

fn perform(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let mut one = args.scenario.clone();
    let (scenario, factor) = reserved::load(&mut one)?;
    let args = &Args {
        device: args.device.settled(&scenario),
        scenario: one,
        ..args.clone()
    };
    let mut program = plan(&scenario)?;
    args.can_record_routing(&scenario, &program)?;
    args.can_export(&scenario, &program)?;
    if let Some(plant) = args.inject_fault {
        program = plant.into(program).map_err(Failure::bad_input)?;
    }
    let program = Arc::new(program);
    let options = args.options(&scenario, &program)?;
    let timeout = options.exec.timeout;
    args.device.prepare()?;
    let saving = args.save.place()?;
    let place = processes::place()?;
    if let Some(place) = &place {
        args.device.prepare_sharing(place.rank)?;
    }
    if place.as_ref().is_none_or(|p| p.rank == 0) {
        args.probe(saving.as_ref())?;
    }
    let (world, local_rank) = match &place {
        Some(place) => {
            interrupt::watch();
            let facts = args.facts(&program, &options);
            let world = processes::join(place, &program, timeout, &facts)?;
            (world, place.local_rank)
        }
        None if program.meta.mesh.world() > 1 && args.device.wants_processes(&program) => {
            if scenario::is_stdin(&args.scenario.scenario) {
                return Err(Failure::bad_input(
                    "-: the ranks of this run are processes, and each reads the scenario: write it to a file",
                ));
            }
            args.device.has_room(&program)?;
            return processes::start(program.meta.mesh.world(), timeout);
        }
        None => {
            interrupt::watch();
            (World::single_process(&program), 0)
        }
    };
    if !world.leads() {
        return follow(args, &scenario, &program, options, world, local_rank);
    }
    let mut progress = Progress::new(args.progress, &scenario);
    if let Some(factor) = factor {
        progress.note(&format!(
            "moe.capacity_factor = {factor}: rows for every choice of the routers; predictions reserve those of \
             moe.routing"
        ));
    }
    if !args.json {
        for warning in args.warnings(&scenario) {
            progress.note(&format!("warning: {warning}"));
        }
    }
    let device = &args.device;
    let result = device.train_as(
        &scenario,
        &program,
        options,
        world,
        local_rank,
        &mut progress,
    );
    progress.end();
    let outcome = result.map_err(|e| match e {
        Failure::Run(m) => Failure::run(format_args!("{}: {m}", scenario.name)),
        other => other,
    })?;
    args.write(
        &scenario,
        &program,
        &outcome,
        saving.as_ref(),
        &progress,
        out,
    )
}

impl Args {
    /// Returns the warnings about the scenario.
    fn warnings(&self, scenario: &Scenario) -> Vec<Warning> {
        let of = &self.scenario;
        warnings::of_scenario(scenario, &of.scenario, &of.overrides.set)
    }

    /// Checks, before the run starts, that its files can be written.
    fn probe(&self, saving: Option<&Place>) -> Result<(), Failure> {
        if let Some(saving) = saving {
            saving.probe()?;
        }
        if let Some(path) = &self.trace {
            writable("--trace", path)?;
        }
        if let Some(path) = &self.record_routing {
            writable("--record-routing", path)?;
        }
        Ok(())
    }

    /// Writes the files of a run, saves it, and prints its results. A file that cannot be written
    /// is reported after the results are printed, so that they are not lost.
    fn write(
        &self,
        scenario: &Scenario,
        program: &Program,
        outcome: &Outcome,
        saving: Option<&Place>,
        progress: &Progress,
        out: &mut Out,
    ) -> Result<Status, Failure> {
        let traced = self.trace.as_deref().map_or(Ok(()), |path| {
            write_file("--trace", path, |to| {
                trace::write(program, &outcome.run, to)
            })
        });
        let routing = match (&self.record_routing, &outcome.routing) {
            (Some(path), Some(routing)) => write_file("--record-routing", path, |to| {
                serde_json::to_writer(&mut *to, routing)?;
                writeln!(to)
            }),
            _ => Ok(()),
        };
        let saved = self.save_run(scenario, program, outcome, saving);
        if let Ok(saved) = &saved {
            progress.saved(outcome, saved);
        }
        if self.json {
            let id = saved.as_ref().ok().and_then(Saved::id);
            let warnings = self.warnings(scenario);
            out.json(&Object::new(scenario, program, outcome, id, warnings))?;
        } else {
            report::print(scenario, program, outcome, out)?;
        }
        out.flush()?;
        traced?;
        routing?;
        saved?;
        if outcome.interrupted {
            progress.interrupted(outcome.run.losses.len());
            return Ok(Status::RunFailed);
        }
        Ok(Status::Done)
    }

    fn save_run(
        &self,
        scenario: &Scenario,
        program: &Program,
        outcome: &Outcome,
        saving: Option<&Place>,
    ) -> Result<Saved, Failure> {
        match saving {
            // The first step of a process is not a measurement, because memory and kernels are
            // still being set up.
            Some(saving) if !outcome.run.step_samples.is_empty() => {
                let view = view_of_outcome(scenario, program, outcome);
                let overrides = &self.scenario.overrides.set;
                saving.save(&with_source(view, &self.scenario.scenario, overrides))
            }
            Some(saving) if saving.is_asked() => Ok(Saved::Not(
                "the run was not saved: no step after the first was measured".to_owned(),
            )),
            _ => Ok(Saved::Unasked),
        }
    }
}

/// Trains as a rank that does not report for the run.
fn follow(
    args: &Args,
    scenario: &Scenario,
    program: &Arc<Program>,
    options: RunOptions,
    world: World,
    local_rank: u32,
) -> Result<Status, Failure> {
    let peers = Arc::clone(world.process_group());
    let device = &args.device;
    match device.train_as(scenario, program, options, world, local_rank, &mut Follower) {
        Ok(outcome) if outcome.interrupted => Ok(Status::RunFailed),
        Ok(_) => Ok(Status::Done),
        // Rank 0 reports everything. The cause is repeated here for users who see only the output
        // of this rank.
        Err(_) if let Some(cause) = peers.failure() => {
            let rank = peers.process();
            let first = cause.lines().next().unwrap_or_default();
            say(format_args!("rank {rank} stopped: {first}"));
            Ok(Status::RunFailed)
        }
        Err(e) => Err(e),
    }
}

/// Returns the view of a completed training run.
pub(super) fn view_of_outcome(
    scenario: &Scenario,
    program: &Program,
    outcome: &Outcome,
) -> RunView {
    RunView {
        validations: outcome
            .validations
            .iter()
            .map(|&(steps, loss)| Validation { steps, loss })
            .collect(),
        interrupted: outcome.interrupted,
        ..RunView::new(&outcome.run, program, scenario)
    }
}

/// The summary of the run, plus fields that the summary does not contain.
#[derive(Serialize)]
struct Object {
    #[serde(flatten)]
    summary: Summary,
    /// Numbers of parameters.
    parameters: ParameterCount,
    /// Communicators of a rank.
    communicators: Vec<Communicator>,
    /// Number of steps of an earlier process; their losses are in `losses`.
    resumed_from: u64,
    /// Whether the run was stopped early.
    interrupted: bool,
    /// Number of steps before each validation, and its loss.
    validation_losses: Vec<(u64, f64)>,
    /// Norm of every parameter after the last step, by published name if there is one.
    final_norms: BTreeMap<String, f64>,
    /// Norm of every parameter's gradient in the last step, if gradients outlive the step.
    final_grad_norms: Option<BTreeMap<String, f64>>,
    /// Norms of all parameters with the number of completed steps, every `train.param_norms_every`
    /// steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    param_norms: Vec<StepNorms>,
    /// Bytes by unit at the memory peak.
    memory_by_unit: BTreeMap<String, u64>,
    /// Warnings about the scenario and its model's file.
    warnings: Vec<Warning>,
    /// Id of the saved run.
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<String>,
}

/// Norms of all parameters after a step.
#[derive(Serialize)]
struct StepNorms {
    /// Steps done.
    step: u64,
    /// One entry per parameter.
    params: Vec<events::Norms>,
}

impl StepNorms {
    fn of((step, norms): &(u64, Vec<ParamNorm>)) -> Self {
        Self {
            step: *step,
            params: norms.iter().map(events::Norms::of).collect(),
        }
    }
}

impl Object {
    fn new(
        scenario: &Scenario,
        program: &Program,
        o: &Outcome,
        id: Option<&Id>,
        warnings: Vec<Warning>,
    ) -> Self {
        let mut summary = o.run.summary();
        let unit = &program.units[o.run.memory.at.unit.index()].name;
        summary.memory.at.insert("unit_name", unit.as_str().into());
        let named = |norms: &[f64]| named(scenario, program, norms);
        Self {
            run_id: id.map(Id::to_string),
            summary,
            warnings,
            parameters: program.meta.parameters,
            communicators: communicators::of(program),
            resumed_from: o.resumed_from,
            interrupted: o.interrupted,
            validation_losses: o.validations.clone(),
            final_norms: named(&o.weight_norms),
            final_grad_norms: o.grad_norms.as_deref().map(named),
            param_norms: o.param_norms.iter().map(StepNorms::of).collect(),
            memory_by_unit: o
                .run
                .memory
                .by_unit
                .iter()
                .map(|(u, b)| (u.clone(), b.0))
                .collect(),
        }
    }
}

/// Returns values by parameter name. A tied head also appears under its own name, as in a published
/// model.
fn named(scenario: &Scenario, program: &Program, values: &[f64]) -> BTreeMap<String, f64> {
    let own = || program.params.iter().map(|p| p.name.clone()).collect();
    let published = hf::published_names(program);
    let is_published = published.is_some();
    let names: Vec<String> = published.unwrap_or_else(own);
    let mut all: BTreeMap<String, f64> = names.into_iter().zip(values.iter().copied()).collect();
    if is_published
        && scenario.model.tie_embeddings
        && let Some(first) = values.first()
    {
        all.insert("lm_head.weight".to_owned(), *first);
    }
    all
}
