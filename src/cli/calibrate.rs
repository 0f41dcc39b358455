//! `shardlab calibrate`: measures this machine and writes a hardware profile.

#[cfg(feature = "cuda")]
mod clock;
mod fit;
mod host;
mod trace;

use super::output::{Failure, Out, Status, writable, write_file};
use clap::ValueEnum;
use shardlab_exec::calibrate::{Options, UserScenario, add_kernels, calibrate};
use shardlab_reports::store::day;
use shardlab_sim::{Profile, hardware};
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Device to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Search this folder for NVIDIA libraries first (repeatable)
    #[arg(long, value_name = "DIR")]
    library_path: Vec<PathBuf>,
    /// Write the profile to this file instead of printing it; the file's stem becomes its name
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure collectives of up to N ranks
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Measure for about N seconds
    #[arg(long, value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Also measure the kernels of this scenario, in steps of a few of its layers (repeatable)
    #[arg(long = "scenario", alias = "for", value_name = "SCENARIO")]
    scenarios: Vec<PathBuf>,
    /// Override a key of these scenarios, for example compile.mode=regions (repeatable; the last
    /// one wins)
    #[arg(long, value_name = "SECTION.KEY=VALUE", requires = "scenarios")]
    set: Vec<String>,
    /// Only measure the kernels of --scenario, and add them to this profile: a file, or the name of
    /// a shipped one
    #[arg(long, alias = "onto", value_name = "PROFILE")]
    base_profile: Option<String>,
    /// Measure nothing, but take the costs from traces of the PyTorch profiler and add them to
    /// --base-profile [default: the shipped profile of their device]
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["scenarios", "library_path"])]
    from_trace: Vec<PathBuf>,
    /// Measure nothing, but scale the host's time of --base-profile, by default the profile of
    /// --scenario, so that a step of --scenario takes MS milliseconds
    #[arg(long, value_name = "MS", requires = "scenarios", conflicts_with_all = ["from_trace", "library_path"])]
    step_ms: Option<f64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Device {
    /// The built-in CPU device
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

impl Device {
    /// Returns the name of a profile if the user does not give one.
    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda(args: &Args, options: &Options, onto: Option<&Onto>) -> Result<String, Failure> {
    use shardlab_exec::calibrate::{add_kernels_cuda, calibrate_cuda};
    super::exec::use_libraries(&args.library_path)?;
    // Nothing is printed before the profile, so nothing is lost if the process has to end
    // immediately.
    let stuck = |why: &str| {
        eprintln!("error: {why}");
        shardlab_exec::device::cuda::exit_now(Status::RUN_FAILED)
    };
    let libraries = &args.library_path;
    match onto {
        None => calibrate_cuda(options, libraries, note, stuck).map_err(Failure::run),
        Some(onto) => {
            let added = add_kernels_cuda(options, onto.base(), libraries, note, stuck)
                .map_err(Failure::run)?;
            clock::fit(&added, |tables| onto.with(tables), &mut note).map_err(Failure::run)
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(args: &Args, _: &Options, _: Option<&Onto>) -> Result<String, Failure> {
    let _ = &args.library_path;
    Err(Failure::run(
        "no usable GPU: this binary was built without feature `cuda`",
    ))
}

fn cpu(options: &Options, onto: Option<&Onto>) -> Result<String, Failure> {
    match onto {
        None => {
            let measured = calibrate(options, &mut note).map_err(Failure::run)?;
            fit::fit(&measured, &mut note).map_err(Failure::run)
        }
        // The profile already contains the loss of several ranks on shared cores.
        Some(onto) => {
            let added = add_kernels(options, onto.cores()?, &mut note).map_err(Failure::run)?;
            Ok(onto.with(&added.tables(&[])))
        }
    }
}

/// A profile that gets additional kernels.
struct Onto {
    profile: Profile,
    text: String,
    /// New name of the profile, if it changes.
    name: Option<String>,
}

impl Onto {
    fn load(name: &str, renamed: Option<&str>) -> Result<Self, Failure> {
        let onto = Self::load_any(name, renamed)?;
        let bad =
            |e: &dyn std::fmt::Display| Failure::bad_input(format_args!("--base-profile: {e}"));
        let profile = &onto.profile;
        if profile.device.loaded_rate < 1.0 {
            return Err(bad(&format_args!(
                "{name} has tables of kernels measured on an idle GPU (device.loaded_rate), which cannot be mixed with kernels measured within steps; use a profile written by \
                 `shardlab calibrate`, such as h200-nvlink-exec"
            )));
        }
        Ok(onto)
    }

    /// Reads a profile, including one whose tables are those of an idle device.
    fn load_any(name: &str, renamed: Option<&str>) -> Result<Self, Failure> {
        let bad =
            |e: &dyn std::fmt::Display| Failure::bad_input(format_args!("--base-profile: {e}"));
        let profile = hardware::load(name).map_err(|e| bad(&e))?;
        let text = hardware::text(name).map_err(|e| bad(&e))?.into_owned();
        Ok(Self {
            profile,
            text,
            name: renamed.map(str::to_owned),
        })
    }

    #[cfg(feature = "cuda")]
    fn base(&self) -> shardlab_exec::calibrate::Base {
        let power = self.profile.power.as_ref();
        shardlab_exec::calibrate::Base {
            multiprocessors: self.profile.device.sms,
            memory_mib: self.profile.device.memory_mib,
            arithmetic_share: power.map_or(1.0, |p| p.arithmetic_share),
            arithmetic_slope: power.map_or(0.0, |p| p.arithmetic_slope),
            float8_slope: power.and_then(|p| p.float8_slope),
        }
    }

    /// Returns the number of cores that ranks share.
    fn cores(&self) -> Result<u32, Failure> {
        self.profile.device.shared_cores.ok_or_else(|| {
            Failure::bad_input(
                "--base-profile: not a profile of the CPU device; measure GPUs with --device cuda",
            )
        })
    }

    /// Returns the text of the profile with its new name and with additional tables before its own.
    fn with(&self, tables: &str) -> String {
        let mut head = String::new();
        let mut lines = self.text.lines().peekable();
        while let Some(line) = lines.next_if(|l| !l.starts_with("[[")) {
            match &self.name {
                Some(name) if line.starts_with("name = ") => {
                    head.push_str(&format!("name = {name:?}"));
                }
                _ => head.push_str(line),
            }
            head.push('\n');
        }
        let rest: Vec<&str> = lines.collect();
        format!("{}\n{tables}\n{}\n", head.trim_end(), rest.join("\n"))
    }
}

fn note(text: &str) {
    eprintln!("calibrate: {text}");
}

/// Returns the first line of the profile: when it was measured, and with which command.
fn provenance() -> String {
    let today = day(0);
    let words: Vec<String> = std::env::args().skip(1).collect();
    let command = words.join(" ").replace(char::is_control, " ");
    format!(
        "# Measured {}-{}-{}: shardlab {command}\n",
        &today[..4],
        &today[4..6],
        &today[6..]
    )
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let Some(path) = &args.out {
        writable("--out", path)?;
    }
    if !args.from_trace.is_empty() {
        let stem = args.out.as_ref().and_then(|p| p.file_stem()?.to_str());
        let text = trace::profile(&args.from_trace, args.base_profile.as_deref(), stem)?;
        return finish(args, &text, out);
    }
    if args.base_profile.is_some() && args.scenarios.is_empty() {
        return Err(Failure::bad_input(
            "--base-profile needs --scenario or --from-trace",
        ));
    }
    let user_scenarios = args.scenarios.iter().map(|scenario| UserScenario {
        scenario: scenario.clone(),
        sets: args.set.clone(),
    });
    let user_scenarios: Vec<UserScenario> = user_scenarios.collect();
    let stem = args.out.as_ref().and_then(|p| p.file_stem()?.to_str());
    if let Some(step_ms) = args.step_ms {
        let [job] = &user_scenarios[..] else {
            return Err(Failure::bad_input("--step-ms: name one --scenario"));
        };
        if !(step_ms > 0.0 && step_ms.is_finite()) {
            return Err(Failure::bad_input(format_args!(
                "--step-ms: {step_ms} is not a time in milliseconds"
            )));
        }
        let text = host::profile(job, step_ms, args.base_profile.as_deref(), stem)?;
        return finish(args, &text, out);
    }
    for scenario in &user_scenarios {
        scenario.check().map_err(Failure::bad_input)?;
    }
    let onto = args
        .base_profile
        .as_deref()
        .map(|name| Onto::load(name, stem));
    let onto = onto.transpose()?;
    let options = Options {
        name: stem.unwrap_or(args.device.name()).to_owned(),
        ranks: args.ranks,
        budget: Duration::from_secs(args.seconds),
        user_scenarios,
    };
    let text = match args.device {
        Device::Cpu => cpu(&options, onto.as_ref())?,
        Device::Cuda => cuda(args, &options, onto.as_ref())?,
    };
    finish(args, &text, out)
}

/// Checks and writes a profile. Its first line describes how it was made.
fn finish(args: &Args, text: &str, out: &mut Out) -> Result<Status, Failure> {
    let text = format!("{}{text}", provenance());
    // A profile that cannot be loaded is never written.
    hardware::parse("the measured profile", &text).map_err(Failure::run)?;
    match &args.out {
        Some(path) => write_file("--out", path, |to| to.write_all(text.as_bytes()))?,
        None => out.text(text)?,
    }
    Ok(Status::Done)
}
