//! `shardlab checkpoint`: converts checkpoints from and to PyTorch.

use super::args::{One, plan};
use super::output::{Failure, Out, Status, say};
use crate::dcp::{self, DcpError};
use serde::Serialize;
use shardlab_exec::train::TrainError;
use shardlab_exec::train::checkpoint::{Checkpoint, Store};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

const NOTES: &str = "\
PyTorch reads what `export` writes with torch.distributed.checkpoint.load, into any number of ranks: the states of
get_state_dict, under the keys \"model\" and \"optimizer\".

`import` reads what torch.distributed.checkpoint.save has written, under these or other keys, from any number of
ranks. `exec --checkpoint-dir` resumes from the result with any mesh, strategy or policy.

Examples:
  shardlab checkpoint export llama-tiny checkpoints/llama-tiny dcp --ranks 4
  shardlab checkpoint import llama-tiny dcp checkpoints/from-pytorch
  shardlab exec llama-tiny --checkpoint-dir checkpoints/from-pytorch";

#[derive(clap::Subcommand)]
#[command(after_help = NOTES)]
pub(super) enum Command {
    /// Write a checkpoint of `exec` as PyTorch does for a model sharded by FSDP2
    Export(Export),
    /// Read a checkpoint of PyTorch as one of `exec`
    Import(Import),
}

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Export {
    #[command(flatten)]
    scenario: One,
    /// Checkpoint of one step, or a folder of checkpoints (the newest one is used)
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// New folder
    #[arg(value_name = "DCP")]
    folder: PathBuf,
    /// Number of files, among which rows of parameters are divided as FSDP2 does for as many ranks
    #[arg(long, value_name = "N", default_value = "1")]
    ranks: NonZeroU32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Import {
    #[command(flatten)]
    scenario: One,
    /// Folder with a .metadata file
    #[arg(value_name = "DCP")]
    folder: PathBuf,
    /// Folder of checkpoints that gets the new one
    #[arg(value_name = "CHECKPOINTS")]
    to: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    format: u32,
    path: String,
    step: u64,
    parameters: usize,
    unused: &'a [String],
}

pub(super) fn run(command: &Command, out: &mut Out) -> Result<Status, Failure> {
    match command {
        Command::Export(args) => export(args, out),
        Command::Import(args) => import(args, out),
    }
}

fn export(args: &Export, out: &mut Out) -> Result<Status, Failure> {
    let scenario = args.scenario.load()?;
    let program = plan(&scenario)?;
    let mut checkpoint = open(&args.checkpoint)?;
    let step = checkpoint.progress().step;
    let ranks = args.ranks.get();
    dcp::export(&scenario, &program, &mut checkpoint, &args.folder, ranks).map_err(failure)?;
    let count = program.params.len();
    report(out, args.json, &args.folder, step, count, &[])
}

fn import(args: &Import, out: &mut Out) -> Result<Status, Failure> {
    let scenario = args.scenario.load()?;
    let program = plan(&scenario)?;
    let made = dcp::import(&args.folder, &scenario, &program, &args.to).map_err(failure)?;
    let count = program.params.len();
    report(out, args.json, &made.path, made.step, count, &made.unused)?;
    if !made.unused.is_empty() && !args.json {
        out.flush()?;
        say(format_args!(
            "note: {} tensors of the folder are not used: {}",
            made.unused.len(),
            made.unused.join(", ")
        ));
    }
    Ok(Status::Done)
}

fn report(
    out: &mut Out,
    json: bool,
    path: &Path,
    step: u64,
    parameters: usize,
    unused: &[String],
) -> Result<Status, Failure> {
    if json {
        out.json(&Report {
            format: 1,
            path: path.display().to_string(),
            step,
            parameters,
            unused,
        })?;
    } else {
        let states = if step > 0 {
            " and their optimizer states"
        } else {
            ""
        };
        let path = path.display();
        out.line(format_args!(
            "{path}: step {step}, {parameters} parameters{states}"
        ))?;
    }
    Ok(Status::Done)
}

/// Opens a checkpoint, or the newest one in a folder.
fn open(path: &Path) -> Result<Checkpoint, Failure> {
    if path.join("index.json").exists() || !path.is_dir() {
        return Checkpoint::open(path).map_err(|e| failure(e.into()));
    }
    let store = Store::attach(path, usize::MAX);
    let steps = store.steps().map_err(|e| failure(e.into()))?;
    match steps.last() {
        Some(step) => Checkpoint::open(&store.path(*step)).map_err(|e| failure(e.into())),
        None => Err(Failure::bad_input(format_args!(
            "{}: has no checkpoints (folders named step-N)",
            path.display()
        ))),
    }
}

/// Converts an error to a failure. A folder that cannot be written is not bad input.
fn failure(error: DcpError) -> Failure {
    let full = std::io::ErrorKind::StorageFull;
    match &error {
        DcpError::Io { error: e, .. } | DcpError::Train(TrainError::Io { error: e, .. })
            if e.kind() == full =>
        {
            Failure::run(format_args!("{error}"))
        }
        _ => Failure::bad_input(format_args!("{error}")),
    }
}
