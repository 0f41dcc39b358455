//! `shardlab schema`: prints the JSON Schema of scenario files for editors, or the reference of
//! their keys or of those of hardware profiles for people.

use super::output::{Failure, Out, Status};
use shardlab_plan::{hardware, scenario};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print a reference of all keys as Markdown instead (docs/scenario-keys.md)
    #[arg(long)]
    markdown: bool,
    /// Print a reference of the keys of hardware profiles instead (docs/hardware-keys.md)
    #[arg(long, conflicts_with = "markdown")]
    hardware: bool,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if args.markdown {
        out.text(scenario::reference())?;
        return Ok(Status::Done);
    }
    if args.hardware {
        out.text(hardware::reference())?;
        return Ok(Status::Done);
    }
    serde_json::to_writer_pretty(&mut *out, &scenario::schema()).map_err(std::io::Error::from)?;
    out.blank()?;
    Ok(Status::Done)
}
