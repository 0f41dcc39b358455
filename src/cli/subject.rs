//! The subject of a command: a scenario, or a job of a framework as a scenario.

use super::args::{self, Overrides};
use super::output::Failure;
use super::recordings;
use crate::analysis::warnings::{self, Kind, Warning};
use crate::predict::Prediction;
use shardlab_frameworks::{Doubt, Gpus, Job, Options, Row, read};
use shardlab_plan::Scenario;
use shardlab_plan::scenario::{self, ScenarioError};
use std::path::{Path, PathBuf};

/// Sections of torchtitan's files, which scenarios do not have.
const TITAN: [&str; 3] = ["[training]", "[parallelism]", "[job]"];

/// See the module.
pub(super) enum Subject {
    /// A scenario file or the name of a shipped one, with overrides.
    Scenario { path: PathBuf, set: Vec<String> },
    /// A job, with its files and the overrides of its scenario.
    Job {
        job: Box<Job>,
        files: Vec<PathBuf>,
        options: Options,
        set: Vec<String>,
    },
}

/// Arguments that name a job.
#[derive(clap::Args)]
pub(super) struct JobArgs {
    /// Configuration of a framework, config.json, or scenario
    #[arg(value_name = "JOB", required = true)]
    jobs: Vec<PathBuf>,
    /// GPUs, such as 8xh100, 4x8xh200 (nodes first) or h100 (the configuration
    /// gives the number)
    #[arg(long, value_name = "GPUS")]
    gpus: Option<Gpus>,
    /// Folder of the model with its config.json
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
}

impl JobArgs {
    /// Reads the job.
    pub(super) fn read(&self) -> Result<Subject, Failure> {
        let set = &self.overrides.set;
        Subject::read(&self.jobs, self.gpus.clone(), self.model.clone(), set)
    }
}

impl Subject {
    /// Reads the files of a job.
    pub(super) fn read(
        files: &[PathBuf],
        gpus: Option<Gpus>,
        model: Option<PathBuf>,
        set: &[String],
    ) -> Result<Self, Failure> {
        let set = set.to_vec();
        if let [file] = files
            && is_scenario(file)
        {
            let path = file.clone();
            return Self::of_scenario(path, gpus, model.as_deref(), set);
        }
        let mut options = Options {
            gpus,
            model,
            cache: cache(),
        };
        let mut rest = files.to_vec();
        // A model alone stands for a job that trains it.
        if let Some(at) = rest.iter().position(|f| is_model(f))
            && options.model.is_none()
        {
            options.model = Some(rest.remove(at));
        }
        let job = read(&rest, &options).map_err(|e| {
            let misplaced = rest.iter().find_map(|file| recordings::misplaced(file));
            misplaced.map_or_else(|| Failure::bad_input(e), Failure::bad_input)
        })?;
        Ok(Self::Job {
            job: Box::new(job),
            files: rest,
            options,
            set,
        })
    }

    fn of_scenario(
        path: PathBuf,
        gpus: Option<Gpus>,
        model: Option<&Path>,
        set: Vec<String>,
    ) -> Result<Self, Failure> {
        let mut all = Vec::new();
        if let Some(model) = model {
            let file = if model.is_dir() {
                model.join("config.json")
            } else {
                model.to_owned()
            };
            all.push(format!("model.preset={}", file.display()));
        }
        if let Some(gpus) = gpus {
            all.push(format!("mesh.hardware={}", gpus.hardware));
            if let Some(count) = gpus.count {
                let base = args::load(&path, &set)?;
                let others = u64::from(base.mesh.world()) / u64::from(base.mesh.dp_shard).max(1);
                if !count.is_multiple_of(others) {
                    return Err(Failure::bad_input(format_args!(
                        "--gpus {gpus}: the scenario needs a multiple of {others} GPUs"
                    )));
                }
                all.push(format!("mesh.dp_shard={}", count / others));
            }
            all.extend(gpus.per_node.map(|n| format!("mesh.gpus_per_node={n}")));
        }
        all.extend(set);
        Ok(Self::Scenario { path, set: all })
    }

    /// Returns the scenario. Keys of a job that have no effect in it lose their counterpart.
    pub(super) fn scenario(&mut self) -> Result<Scenario, Failure> {
        match self {
            Self::Scenario { path, set } => args::load(path, set),
            Self::Job { job, set, .. } => job.scenario(set).map_err(Failure::bad_input),
        }
    }

    /// Returns the scenario with more overrides.
    pub(super) fn load(&self, more: &[String]) -> Result<Scenario, ScenarioError> {
        let with = |set: &[String]| [set, more].concat();
        match self {
            Self::Scenario { path, set } => scenario::load(path, &with(set)),
            Self::Job { job, set, .. } => scenario::parse(&job.name, &job.text(), &with(set)),
        }
    }

    /// Returns the warnings about the prediction of its scenario with more overrides.
    pub(super) fn warnings(&self, p: &Prediction, more: &[String]) -> Vec<Warning> {
        let with = |set: &[String]| [set, more].concat();
        match self {
            Self::Scenario { path, set } => warnings::located(p, path, &with(set)),
            Self::Job { job, set, .. } => {
                let set = with(set);
                let mut all = doubts(job, &set);
                all.extend(warnings::of_text(p, &job.text(), &set));
                all
            }
        }
    }

    /// Returns the overrides that the user gave.
    pub(super) fn set(&self) -> &[String] {
        match self {
            Self::Scenario { set, .. } | Self::Job { set, .. } => set,
        }
    }

    /// Returns the scenario's text, without overrides.
    pub(super) fn text(&self) -> Result<String, Failure> {
        match self {
            Self::Scenario { path, .. } => scenario::text(path).ok_or_else(|| {
                Failure::bad_input(format_args!("{}: cannot be read", path.display()))
            }),
            Self::Job { job, .. } => Ok(job.text()),
        }
    }

    /// Returns the keys of the configuration.
    pub(super) fn rows(&self) -> &[Row] {
        match self {
            Self::Scenario { .. } => &[],
            Self::Job { job, .. } => job.rows(),
        }
    }

    pub(super) fn framework(&self) -> Option<&'static str> {
        match self {
            Self::Scenario { .. } => None,
            Self::Job { job, .. } => Some(job.framework),
        }
    }

    /// Returns the configuration key that determines a scenario key, with its place.
    pub(super) fn origin(&self, key: &str) -> Option<String> {
        let decides = |r: &&Row| r.settings.iter().any(|s| s.key == key);
        let row = self.rows().iter().find(decides)?;
        Some(format!("{} ({})", row.key, row.place.as_ref()?))
    }

    /// Returns the reason why there is no answer, if there is none.
    pub(super) fn refusal(&self) -> Option<String> {
        let Self::Job { job, .. } = self else {
            return None;
        };
        let reasons: Vec<String> = job
            .decisive()
            .map(|row| {
                let place = row
                    .place
                    .as_ref()
                    .map_or_else(String::new, |p| format!("{p}: "));
                let why = row.why.as_deref().unwrap_or_default();
                format!("{place}{} = {}: {why}", row.key, row.value)
            })
            .collect();
        let first = reasons.first()?;
        let more = reasons[1..]
            .iter()
            .map(|r| format!("\n  {r}"))
            .collect::<String>();
        Some(format!("{first}{more}"))
    }
}

/// Returns the warnings about keys that the prediction does not follow.
fn doubts(job: &Job, set: &[String]) -> Vec<Warning> {
    let warning = |(row, doubt): (&Row, &Doubt)| Warning {
        kind: Kind::Configuration,
        message: doubt.message.clone(),
        key: (!doubt.key.is_empty()).then_some(doubt.key),
        place: row.place.as_ref().map(|p| (p.file.clone(), p.at)),
        set: Vec::new(),
    };
    job.doubts(set).map(warning).collect()
}

/// Returns whether a path is a file of a framework's job, or the config.json of a model.
#[cfg(feature = "dash")]
pub(super) fn is_job(path: &Path) -> bool {
    path.is_file() && !is_scenario(path)
}

/// Returns whether a path refers to a scenario: a scenario file, a shipped name or standard input.
fn is_scenario(path: &Path) -> bool {
    if scenario::is_stdin(path) {
        return true;
    }
    if !path.exists() {
        // The error for an unknown name lists similar ones.
        return path.extension().is_none_or(|e| e == "toml");
    }
    let is_toml = path.extension().is_some_and(|e| e == "toml");
    is_toml
        && std::fs::read_to_string(path).is_ok_and(|text| {
            if shardlab_frameworks::is_refused(&text) {
                return false;
            }
            let titan = |l: &str| TITAN.iter().any(|t| l.trim_start().starts_with(t));
            !text.lines().any(titan)
        })
}

/// Returns whether a path is the `config.json` of a model, or a folder that contains one.
fn is_model(path: &Path) -> bool {
    let file = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_owned()
    };
    let is_json = file.extension().is_some_and(|e| e == "json");
    is_json && std::fs::read_to_string(file).is_ok_and(|text| scenario::is_config(&text))
}

/// Returns the cache of the Hugging Face hub.
fn cache() -> Option<PathBuf> {
    let var = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    var("HF_HUB_CACHE")
        .or_else(|| Some(var("HF_HOME")?.join("hub")))
        .or_else(|| Some(var("HOME")?.join(".cache/huggingface/hub")))
}
