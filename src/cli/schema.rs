//! `shardlab schema`: prints the JSON Schema of scenario files for editors, or the reference of
//! their keys for people.

use super::output::{Failure, Out, Status};
use shardlab_plan::scenario;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print a reference of all keys as Markdown instead (docs/scenario-keys.md)
    #[arg(long)]
    markdown: bool,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if args.markdown {
        out.text(scenario::reference())?;
        return Ok(Status::Done);
    }
    serde_json::to_writer_pretty(&mut *out, &scenario::schema()).map_err(std::io::Error::from)?;
    out.blank()?;
    Ok(Status::Done)
}
