//! `shardlab schema`: the JSON Schema of scenario files, for editors.

use super::output::{Failure, Out, Status};

#[derive(clap::Args)]
pub(super) struct Args {}

pub(super) fn run(_: &Args, out: &mut Out) -> Result<Status, Failure> {
    let schema = shardlab_plan::scenario::schema();
    serde_json::to_writer_pretty(&mut *out, &schema).map_err(std::io::Error::from)?;
    out.blank()?;
    Ok(Status::Done)
}
