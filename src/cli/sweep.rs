//! `shardlab sweep`: all combinations of some options.

mod points;
mod write;

use super::args::{Overrides, profiles};
use super::interrupt;
use super::output::{Failure, Out, Status};
use points::{Outcome, evaluate};
use shardlab_plan::scenario::sweep_of;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Scenario file, or the name of a shipped one; its [sweep] section gives axes
    #[arg(value_name = "SCENARIO")]
    scenario: PathBuf,
    /// A further axis, for example 'fsdp.prefetch_forward=[0, 1, 2]' (repeatable)
    #[arg(long = "axis", value_name = "SECTION.KEY=[V1, V2]")]
    axes: Vec<String>,
    #[command(flatten)]
    overrides: Overrides,
    /// Write all points as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object a point
    #[arg(long)]
    json: bool,
    /// Order of the table
    #[arg(long, value_enum, default_value_t = Sort::Axes)]
    sort: Sort,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    /// As the axes run
    Axes,
    /// Shortest step first
    Step,
    /// Most tokens a second first
    Tokens,
    /// Least exposed time first
    Exposed,
    /// Least allocated memory first
    Allocated,
    /// Least reserved memory first
    Reserved,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    interrupt::watch();
    let sweep =
        sweep_of(&args.scenario, &args.overrides.set, &args.axes).map_err(Failure::bad_input)?;
    let total = sweep.points.len();
    let axes = sweep.axes;
    let outcomes = evaluate(sweep.points, &profiles());
    let missing = outcomes
        .iter()
        .filter(|o| matches!(o, Outcome::Missing))
        .count();
    let table = write::Table::new(&axes, &outcomes, args.sort);
    if let Some(path) = &args.csv {
        table
            .csv(path)
            .map_err(|e| Failure::bad_input(format_args!("--csv {}: {e}", path.display())))?;
    }
    if args.json {
        table.json(out)?;
    } else {
        table.print(out)?;
    }
    if missing > 0 {
        out.flush()?;
        eprintln!("interrupted: {missing} of {total} points are missing");
        return Ok(Status::RunFailed);
    }
    let failed = outcomes.iter().find_map(|o| match o {
        Outcome::Failed(e) if !e.is_bad_input() => Some(e),
        _ => None,
    });
    match failed {
        Some(e) => {
            out.flush()?;
            Err(Failure::run(e))
        }
        None => Ok(Status::Done),
    }
}
