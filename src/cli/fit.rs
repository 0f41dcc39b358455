//! `shardlab fit`: predicts whether a job fits, from the configuration that starts it.

pub(super) mod keys;

use super::args::profiles;
use super::emit::EmitArgs;
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use super::sim::report::predicted_heading;
use super::subject::{JobArgs, Subject};
use super::verdict::{self, command, setting};
use crate::analysis::smallest_fit::{self, Solution};
use crate::analysis::verdict::{Verdict, free_memory};
use crate::analysis::warnings::Warning;
use crate::predict::{Fit, Prediction, Profiles, predict};
use keys::Key;
use serde::Serialize;
use serde_json::Value;
use shardlab_plan::ir::ParameterCount;
use shardlab_plan::units::Bytes;
use shardlab_sim::Options;

const NOTES: &str = "\
JOB is recognized by its content and its name:
  accelerate     YAML of `accelerate config`: FSDP 1 and 2, DeepSpeed
  trainer        arguments of the Hugging Face Trainer or TRL, JSON or YAML
  axolotl        YAML
  llama-factory  YAML
  torchtune      YAML of a recipe
  torchtitan     TOML, or a log
  deepspeed      JSON
  megatron       shell script that starts Megatron-LM, or the YAML of --yaml-cfg
  nemo           YAML of NeMo Automodel
  bridge         overrides of Megatron-Bridge, YAML or a shell script
  swift          shell script that starts ms-swift (swift or megatron)
  llm-foundry    training YAML, a job of mcli, or a shell script (composer)
  litgpt         YAML, or a shell script (litgpt)
  verl           YAML or shell script of an SFT trainer
  peft           adapter_config.json of PEFT
  model          config.json or its folder
  scenario       file or name of a shipped one

Files that belong together can be given together, such as the configuration of Accelerate and the arguments of the
Trainer. Files that they name are read, too. Nothing is downloaded: a model is looked for next to the configuration,
in the cache of the Hugging Face hub, and among the shipped shapes of published models.

Every key is shown as used, assumed or not predicted. Keys that ask for a job that cannot be predicted, such as
tensor parallelism, are refused.

Exit status: 0 if the job fits, 1 if it does not, 2 for bad input.

Examples:
  shardlab fit job.yaml --gpus 8xh100 --check && torchrun ...
  shardlab fit accelerate.yaml sft.yaml --gpus 4x8xh200
  shardlab fit train.sh --gpus h100 --emit scenario > job.toml";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Print only the verdict
    #[arg(long, conflicts_with_all = ["json", "emit"])]
    check: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "emit")]
    json: bool,
    #[command(flatten)]
    emit: EmitArgs,
}

/// The answer as JSON.
#[derive(Serialize)]
struct Object<'a> {
    format: u32,
    /// Framework of the configuration; `None` for scenarios.
    framework: Option<&'static str>,
    /// `yes`, `tight`, `no` or `?`.
    fits: &'static str,
    verdict: Value,
    /// Numbers of parameters of the model.
    parameters: ParameterCount,
    warnings: &'a [Warning],
    /// How each key of the configuration was read.
    keys: Vec<Key<'a>>,
    /// Scenario file that is equivalent to the configuration.
    scenario: Option<String>,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let mut subject = args.job.read()?;
    if let Some(refusal) = subject.refusal() {
        if !args.json && !args.check && args.emit.emit.is_none() {
            keys::print(&subject, out)?;
            out.flush()?;
        }
        return Err(Failure::bad_input(refusal));
    }
    let scenario = subject.scenario()?;
    if let Some(emit) = args.emit.emit {
        args.emit.write(emit, &subject, &[], &scenario, out)?;
        return Ok(Status::Done);
    }
    let profiles = profiles();
    let progress = Progress::new("predicting", 1, args.json);
    let prediction = predict(&scenario, &profiles, &Options::default())?;
    let verdict = Verdict::of(&prediction);
    let warnings = subject.warnings(&prediction, &[]);
    let next = next(&prediction, &profiles, &subject);
    drop(progress);
    if args.json {
        out.json(&Object {
            format: 1,
            framework: subject.framework(),
            fits: verdict.fits,
            verdict: verdict.json(&next),
            parameters: prediction.program.meta.parameters,
            warnings: &warnings,
            keys: keys::all(&subject),
            scenario: subject.text().ok(),
        })?;
    } else {
        out.heading(predicted_heading(&prediction))?;
        verdict::print(&verdict, &next, &warnings, out)?;
        if !args.check {
            keys::print(&subject, out)?;
        }
    }
    Ok(match prediction.fit {
        Fit::Exceeds { .. } => Status::CheckFailed,
        _ => Status::Done,
    })
}

/// Returns what to do next. For a job that does not fit, this is the smallest change that makes it
/// fit.
fn next(p: &Prediction, profiles: &Profiles, subject: &Subject) -> String {
    if !matches!(p.fit, Fit::Exceeds { .. }) {
        return match subject {
            Subject::Scenario { path, set } => {
                format!("`{}` shows what takes the time and which options help", command("explain", path, set))
            }
            Subject::Job { .. } => {
                "`--emit scenario > job.toml`, then `shardlab explain job.toml` shows what takes the time".to_owned()
            }
        };
    }
    let load = |more: &[String]| subject.load(more);
    let Some(search) = smallest_fit::search(p, profiles, &load) else {
        return String::new();
    };
    if let Some(best) = search.best() {
        return format!("smallest change that fits: {}", shown(best, subject));
    }
    let tried = format!(
        "no combination of up to three options fits on these GPUs ({} tried)",
        search.tried
    );
    match &search.more_gpus {
        Some(more) => format!("{tried}; more GPUs do: {}", shown(more, subject)),
        None => format!("{tried}, nor on up to 64 times as many"),
    }
}

/// Formats a change with its effect and the related keys of the configuration.
fn shown(solution: &Solution, subject: &Subject) -> String {
    let overrides = &solution.change.overrides;
    let settings: Vec<String> = overrides.iter().map(|set| setting(set)).collect();
    let free = solution
        .effect
        .free_bytes
        .and_then(|free| u64::try_from(free).ok());
    let room = match solution.effect.fit {
        Fit::Tight { .. } => "allocator retries".to_owned(),
        _ => format!("{} free", free_memory(Bytes(free.unwrap_or(0)))),
    };
    let keys: Vec<String> = overrides
        .iter()
        .filter_map(|set| set.split_once('='))
        .filter_map(|(key, _)| subject.origin(key))
        .collect();
    let about = if keys.is_empty() {
        String::new()
    } else {
        format!("; see {}", keys.join(", "))
    };
    format!("`{}` ({room}{about})", settings.join(" "))
}
