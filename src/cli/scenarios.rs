//! `shardlab scenarios`: the shipped scenarios and what each shows, and the shipped hardware profiles.

use super::output::{Failure, Out, Status};
use serde::Serialize;
use shardlab_plan::scenario::{find_shipped, shipped};
use shardlab_sim::hardware;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print one scenario's file, to start an own one from
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// The hardware profiles instead; with a name, that profile's file, to start an own one from
    #[arg(long, value_name = "NAME", num_args = 0..=1, conflicts_with = "name")]
    hardware: Option<Option<String>>,
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
    if let Some(wanted) = &args.hardware {
        return profiles(wanted.as_deref(), args.json, out);
    }
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

fn profiles(wanted: Option<&str>, json: bool, out: &mut Out) -> Result<Status, Failure> {
    if let Some(wanted) = wanted {
        if !hardware::shipped().contains(&wanted) {
            return Err(Failure::bad_input(format_args!(
                "there is no shipped hardware profile `{wanted}`; `shardlab scenarios --hardware` lists them"
            )));
        }
        out.text(hardware::text(wanted).map_err(Failure::run)?)?;
        return Ok(Status::Done);
    }
    for name in hardware::shipped() {
        let profile = hardware::load(name).map_err(Failure::run)?;
        let entry = Entry {
            name,
            about: vec![&profile.about],
        };
        if json {
            out.json(&entry)?;
        } else {
            out.heading(name)?;
            out.paragraph(2, &profile.about)?;
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
