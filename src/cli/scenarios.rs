//! `shardlab scenarios`: the shipped scenarios and what each shows.

use super::output::{Failure, Out, Status};
use serde::Serialize;
use shardlab_plan::scenario::{find_shipped, shipped};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print one scenario's file, to start an own one from
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Print one JSON object a scenario
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    about: Vec<&'a str>,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let Some(wanted) = &args.name {
        let Some((_, text)) = find_shipped(wanted) else {
            return Err(Failure::bad_input(format_args!(
                "there is no shipped scenario `{wanted}`; `shardlab scenarios` lists them"
            )));
        };
        out.text(text)?;
        return Ok(Status::Done);
    }
    for (name, text) in shipped() {
        let entry = Entry {
            name,
            about: about(text),
        };
        if args.json {
            out.json(&entry)?;
            continue;
        }
        out.heading(name)?;
        for line in entry.about {
            out.paragraph(2, line)?;
        }
    }
    Ok(Status::Done)
}

/// The comment lines a file begins with.
fn about(text: &str) -> Vec<&str> {
    text.lines()
        .map_while(|line| line.strip_prefix('#'))
        .map(str::trim)
        .collect()
}
