//! Arguments that several subcommands share.

use super::output::Failure;
use super::{parallel_sizes, recordings};
use crate::predict::Profiles;
use clap::error::ErrorKind;
use clap::{ArgMatches, FromArgMatches};
use shardlab_plan::units::Bytes;
use shardlab_plan::{Program, Scenario, scenario};
use std::path::{Path, PathBuf};

/// The overrides of every command that reads a scenario: those of the environment, then `--as` and
/// `--set`.
#[derive(Clone, Debug)]
pub(super) struct Overrides {
    /// Overrides in order. `--as TYPE` is `model.model_type=TYPE`.
    pub(super) set: Vec<String>,
}

/// The options as they are given.
#[derive(clap::Args)]
struct Given {
    /// Override a key, for example fsdp.prefetch_forward=0 (repeatable; the last one wins)
    ///
    /// VALUE is parsed as TOML; anything else is taken as a string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// Read the model's config.json as this model_type, for example llama
    ///
    /// For a file whose own type is not known, or that wraps several models. The same as --set
    /// model.model_type=TYPE.
    #[arg(long = "as", value_name = "TYPE")]
    model_type: Option<String>,
}

impl FromArgMatches for Overrides {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = Given::from_arg_matches(matches)?;
        let mut set = parallel_sizes::overrides(|name| std::env::var(name).ok())
            .map_err(|what| clap::Error::raw(ErrorKind::InvalidValue, format!("{what}\n")))?;
        set.extend(given.model_type.map(|t| format!("model.model_type={t}")));
        set.extend(given.set);
        Ok(Self { set })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Overrides {
    fn augment_args(command: clap::Command) -> clap::Command {
        Given::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Given::augment_args_for_update(command)
    }
}

/// One scenario with overrides.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct One {
    /// Scenario file, name of a shipped scenario, or - for standard input
    #[arg(value_name = "SCENARIO")]
    pub(super) scenario: PathBuf,
    #[command(flatten)]
    pub(super) overrides: Overrides,
}

impl One {
    /// Loads the scenario.
    pub(super) fn load(&self) -> Result<Scenario, Failure> {
        load(&self.scenario, &self.overrides.set)
    }
}

/// Loads a scenario. An invalid scenario is bad input.
pub(super) fn load(path: &Path, set: &[String]) -> Result<Scenario, Failure> {
    let variable = |name: &str| std::env::var(name).ok();
    scenario::load(path, set).map_err(|e| match recordings::misplaced(path) {
        Some(reason) => Failure::bad_input(reason),
        None => Failure::bad_input(parallel_sizes::blame(e, variable)),
    })
}

/// Plans a scenario. A scenario that cannot be planned is bad input.
pub(super) fn plan(scenario: &Scenario) -> Result<Program, Failure> {
    shardlab_plan::plan(scenario)
        .map_err(|e| Failure::bad_input(format_args!("{}: {e}", scenario.name)))
}

/// Parses a number of bytes, such as `512MiB`.
pub(super) fn size(text: &str) -> Result<Bytes, String> {
    scenario::parse_bytes(text).map(Bytes).ok_or_else(|| {
        let number = text.trim();
        match number.parse::<f64>() {
            // A number of bytes is not one of GiB.
            Ok(n) if n >= 4096.0 => format!("needs a unit, such as {number}B"),
            Ok(n) if n > 0.0 => format!("needs a unit, such as {number}GiB"),
            _ => "expected a size such as 512MiB or 4GiB".to_owned(),
        }
    })
}

/// Parses a percentage such as `5%` or `2.5`, at least 0.
pub(super) fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    let percent = number.parse().ok().filter(|n: &f64| *n >= 0.0);
    percent.ok_or_else(|| "expected a percentage, 0 or more, such as 5%".to_owned())
}

/// Parses a percentage below 100, and returns it as a fraction.
pub(super) fn fraction(text: &str) -> Result<f64, String> {
    let fraction = percent(text).ok().map(|n| n / 100.0);
    fraction
        .filter(|f| *f < 1.0)
        .ok_or_else(|| "expected a percentage from 0 to below 100, such as 5%".to_owned())
}

/// Returns the hardware profiles of a command.
pub(super) fn profiles() -> Profiles {
    Profiles::default()
}
