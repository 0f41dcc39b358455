//! `shardlab schema`: prints the JSON Schema of scenario files for editors, or a page of the
//! reference.

use super::output::{Failure, Out, Status};
use super::reference;
use shardlab_plan::{check, hardware, scenario};

#[derive(clap::Args)]
#[group(multiple = false)]
pub(super) struct Args {
    /// Print a reference of all keys as Markdown instead (docs/reference/scenario-keys.md)
    #[arg(long)]
    markdown: bool,
    /// Print a reference of the keys of hardware profiles instead
    /// (docs/reference/hardware-keys.md)
    #[arg(long)]
    hardware: bool,
    /// Print a reference of all commands and their options instead (docs/reference/commands.md)
    #[arg(long)]
    commands: bool,
    /// Print the rules of `check` instead (docs/reference/check-rules.md)
    #[arg(long)]
    rules: bool,
}

pub(super) fn run(args: &Args, command: clap::Command, out: &mut Out) -> Result<Status, Failure> {
    if args.markdown {
        out.text(scenario::reference())?;
    } else if args.hardware {
        out.text(hardware::reference())?;
    } else if args.commands {
        out.text(reference::page(command))?;
    } else if args.rules {
        out.text(check::reference())?;
    } else {
        serde_json::to_writer_pretty(&mut *out, &scenario::schema())
            .map_err(std::io::Error::from)?;
        out.blank()?;
    }
    Ok(Status::Done)
}
