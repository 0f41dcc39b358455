//! `shardlab scenarios`: lists the shipped scenarios with their purpose and prediction, and the
//! shipped hardware profiles.

use super::args::profiles;
use super::output::{Failure, Out, Status};
use super::table::Table;
use crate::predict::{Fit, Prediction, predict_light};
use rayon::prelude::*;
use serde::Serialize;
use shardlab_plan::config::Strategy;
use shardlab_plan::ir::ParameterCount;
use shardlab_plan::record::basis::milliseconds;
use shardlab_plan::scenario;
use shardlab_plan::scenario::{find_shipped, is_example, nearest, shipped};
use shardlab_plan::units::{count, short_count};
use shardlab_sim::hardware;
use std::path::Path;

const NOTES: &str = "\
The step time is that of `shardlab sim`. Under `fits`: yes; tight (fits, but only after the caching allocator frees blocks mid-step); no (the step time assumes that it fits).

Examples:
  # A table of the examples, with their predicted step times
  shardlab scenarios
  # Start your own scenario from one of them
  shardlab scenarios llama3-8b-4xh200 > job.toml
  # Hardware profiles, and one of them as a file
  shardlab scenarios --hardware
  shardlab scenarios --hardware h100-80 > my-node.toml";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Print a scenario file, as a starting point for your own
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// List the scenarios made for tests and benchmarks, too
    #[arg(long, conflicts_with_all = ["name", "hardware"])]
    all: bool,
    /// Say what each scenario shows
    #[arg(long, conflicts_with_all = ["name", "hardware", "json"])]
    long: bool,
    /// List the hardware profiles instead; with NAME, print that profile, as a starting point for
    /// your own
    #[arg(long, value_name = "NAME", num_args = 0..=1, conflicts_with = "name")]
    hardware: Option<Option<String>>,
    /// Print one JSON object per scenario, for all of them
    #[arg(long)]
    json: bool,
}

/// A shipped scenario and its prediction.
#[derive(Serialize)]
struct Entry {
    name: &'static str,
    about: Vec<&'static str>,
    example: bool,
    family: &'static str,
    parameters: u64,
    /// Number of parameters that a token uses, if not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    active_parameters: Option<u64>,
    world_size: u32,
    hardware: String,
    policy: &'static str,
    strategy: Strategy,
    step_ms: f64,
    fits: &'static str,
    #[serde(skip)]
    step: String,
    #[serde(skip)]
    fit: Fit,
}

impl Entry {
    fn of(name: &'static str, about: Vec<&'static str>, p: &Prediction) -> Self {
        let ParameterCount { total, active, .. } = p.program.meta.parameters;
        Self {
            name,
            about,
            example: is_example(name),
            family: p.scenario.model.family.name(),
            parameters: total,
            active_parameters: (active != total).then_some(active),
            world_size: p.scenario.mesh.world(),
            hardware: p.scenario.mesh.hardware.clone(),
            policy: p.scenario.fsdp.policy.name(),
            strategy: p.scenario.fsdp.strategy,
            step_ms: p.step_ms(),
            fits: p.fit.word(),
            step: milliseconds(p.step_ms(), p.run.basis.as_ref()),
            fit: p.fit.clone(),
        }
    }

    /// Returns the facts of the table as a sentence.
    fn facts(&self) -> String {
        let fits = match self.fit {
            Fit::Fits => ", fits",
            Fit::Tight { .. } => ", fits tightly",
            Fit::Exceeds { .. } => ", does not fit",
            Fit::Unknown => "",
        };
        format!(
            "{} of {} parameters{}, {} {} on {} x {}: {} per step{fits}",
            self.family,
            short_count(self.parameters),
            match self.active_parameters {
                Some(active) => format!(" ({} active)", short_count(active)),
                None => String::new(),
            },
            self.policy,
            self.strategy.zero(),
            count(self.world_size.into()),
            self.hardware,
            self.step,
        )
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let Some(wanted) = &args.hardware {
        return list_profiles(wanted.as_deref(), args.json, out);
    }
    if let Some(wanted) = &args.name {
        let Some((_, text)) = find_shipped(wanted) else {
            let names = shipped().iter().map(|(name, _)| *name);
            return Err(unknown("scenario", wanted, names, "scenarios --all"));
        };
        out.text(text)?;
        return Ok(Status::Done);
    }
    let entries = entries(args.all || args.json)?;
    if args.json {
        for entry in &entries {
            out.json(entry)?;
        }
    } else if args.long {
        for entry in &entries {
            out.heading(entry.name)?;
            out.paragraph(2, &entry.facts())?;
            out.paragraph(2, &entry.about.join(" "))?;
        }
    } else {
        out.text(table(&entries))?;
    }
    let hidden = shipped().len() - entries.len();
    if hidden > 0 {
        out.blank()?;
        out.paragraph(
            0,
            &format!(
                "{hidden} more are made for tests and benchmarks: --all lists them. --long says what each shows, and `shardlab scenarios NAME` prints its file."
            ),
        )?;
    }
    Ok(Status::Done)
}

/// Predicts the examples and, if `all` is set, the other shipped scenarios after them.
fn entries(all: bool) -> Result<Vec<Entry>, Failure> {
    let mut chosen: Vec<_> = shipped().iter().collect();
    chosen.retain(|(name, _)| all || is_example(name));
    chosen.sort_by_key(|(name, _)| !is_example(name));
    let profiles = profiles();
    let entry = |&&(name, text): &&(&'static str, &'static str)| {
        let scenario = scenario::load(Path::new(name), &[]).map_err(Failure::run)?;
        let prediction = predict_light(&scenario, &profiles).map_err(Failure::run)?;
        Ok(Entry::of(name, about(text), &prediction))
    };
    chosen.par_iter().map(entry).collect()
}

fn table(entries: &[Entry]) -> Table {
    let titles = [
        "scenario",
        "?GPUs",
        "?model",
        "?strategy",
        ">step time",
        "fits",
    ];
    let mut table = Table::new(titles);
    for e in entries {
        table.row([
            e.name.to_owned(),
            format!("{} x {}", count(e.world_size.into()), e.hardware),
            format!("{} {}", e.family, short_count(e.parameters)),
            format!("{} {}", e.policy, e.strategy.zero()),
            e.step.clone(),
            e.fits.to_owned(),
        ]);
    }
    table
}

/// A shipped hardware profile.
#[derive(Serialize)]
struct Profile<'a> {
    name: &'a str,
    about: Vec<&'a str>,
}

fn list_profiles(wanted: Option<&str>, json: bool, out: &mut Out) -> Result<Status, Failure> {
    if let Some(wanted) = wanted {
        if !hardware::shipped().contains(&wanted) {
            let names = hardware::shipped().into_iter();
            return Err(unknown(
                "hardware profile",
                wanted,
                names,
                "scenarios --hardware",
            ));
        }
        out.text(hardware::text(wanted).map_err(Failure::run)?)?;
        return Ok(Status::Done);
    }
    for name in hardware::shipped() {
        let profile = hardware::load(name).map_err(Failure::run)?;
        if json {
            out.json(&Profile {
                name,
                about: vec![&profile.about],
            })?;
        } else {
            out.heading(name)?;
            out.paragraph(2, &profile.about)?;
        }
    }
    Ok(Status::Done)
}

/// Returns an error that contains the most similar existing names, or the command that lists all
/// names.
fn unknown<'a>(
    what: &str,
    wanted: &str,
    names: impl Iterator<Item = &'a str>,
    list: &str,
) -> Failure {
    let advice = match nearest(wanted, names) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("`shardlab {list}` lists them"),
    };
    Failure::bad_input(format_args!(
        "no shipped {what} is called `{wanted}`; {advice}"
    ))
}

/// Returns the comment lines at the top of a file.
fn about(text: &str) -> Vec<&str> {
    text.lines()
        .map_while(|line| line.strip_prefix('#'))
        .map(str::trim)
        .collect()
}
