//! `shardlab calibrate`: measure this machine, as a hardware profile.

mod fit;

use super::output::{Failure, Out, Status, writable};
use clap::ValueEnum;
use shardlab_exec::calibrate::{Options, calibrate};
use shardlab_reports::store::day;
use shardlab_sim::hardware;
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Device to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Look for NVIDIA's libraries here first (repeatable)
    #[arg(long, value_name = "DIR")]
    library_path: Vec<PathBuf>,
    /// Write the profile here instead of printing it; the file's stem becomes its name
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure collectives of up to so many ranks
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Roughly how many seconds to measure
    #[arg(long, value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Device {
    /// The embedded CPU device
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

impl Device {
    /// Name of a profile that is not named.
    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda(args: &Args, options: &Options) -> Result<String, Failure> {
    super::exec::use_libraries(&args.library_path)?;
    // Nothing is printed before the profile, so nothing is lost where the process has to end at once.
    let stuck = |why: &str| {
        eprintln!("error: {why}");
        shardlab_exec::device::cuda::leave(Status::RUN_FAILED)
    };
    shardlab_exec::calibrate::calibrate_cuda(options, &args.library_path, note, stuck)
        .map_err(Failure::run)
}

#[cfg(not(feature = "cuda"))]
fn cuda(args: &Args, _: &Options) -> Result<String, Failure> {
    let _ = &args.library_path;
    Err(Failure::run(
        "no GPU can be used: this program was built without feature `cuda`",
    ))
}

fn note(text: &str) {
    eprintln!("calibrate: {text}");
}

/// When this was measured, and by which command, as the profile's first line.
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
    let stem = args.out.as_ref().and_then(|p| p.file_stem()?.to_str());
    let options = Options {
        name: stem.unwrap_or(args.device.name()).to_owned(),
        ranks: args.ranks,
        budget: Duration::from_secs(args.seconds),
    };
    let text = match args.device {
        Device::Cpu => {
            let measured = calibrate(&options, &mut note).map_err(Failure::run)?;
            fit::fit(&measured, &mut note).map_err(Failure::run)?
        }
        Device::Cuda => cuda(args, &options)?,
    };
    let text = format!("{}{text}", provenance());
    // What cannot be loaded must not be written.
    hardware::parse("the measured profile", &text).map_err(Failure::run)?;
    match &args.out {
        Some(path) => std::fs::write(path, text)
            .map_err(|e| Failure::bad_input(format_args!("--out {}: {e}", path.display())))?,
        None => out.text(text)?,
    }
    Ok(Status::Done)
}
