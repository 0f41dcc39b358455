//! Shows one run in full, and names runs.

use super::super::output::{Failure, Out, Status};
use super::super::table::Table;
use shardlab_plan::record::{Cause, MemoryReport};
use shardlab_plan::units::{Bytes, thousands};
use shardlab_reports::RunView;
use shardlab_reports::store::{Entry, Store};

/// Maximum number of rows of a breakdown.
const MAX_ROWS: usize = 8;

#[derive(clap::Args)]
pub(super) struct Args {
    /// An id or its first characters, last, last~N, or a name
    #[arg(value_name = "RUN")]
    run: String,
    /// Print the view of the run with its spans and memory samples as JSON
    #[arg(long)]
    full: bool,
}

#[derive(clap::Args)]
pub(super) struct TagArgs {
    /// An id or its first characters, last, last~N, or another name
    #[arg(value_name = "RUN", required_unless_present = "remove")]
    run: Option<String>,
    /// The name: letters, digits, `-`, `_`, `.`
    #[arg(value_name = "NAME", required_unless_present = "remove")]
    name: Option<String>,
    /// Remove this name; its run is kept, but may be pruned
    #[arg(long, value_name = "NAME", conflicts_with_all = ["run", "name"])]
    remove: Option<String>,
}

pub(super) fn tag(args: &TagArgs, store: &Store, out: &mut Out) -> Result<Status, Failure> {
    if let Some(name) = &args.remove {
        store.unname(name)?;
        out.line(format_args!("removed the name `{name}`; its run is kept"))?;
    }
    if let (Some(run), Some(name)) = (&args.run, &args.name) {
        let id = store.resolve(run)?;
        store.name(name, &id)?;
        out.line(format_args!("{name} = {id}"))?;
    }
    Ok(Status::Done)
}

pub(super) fn run(
    args: &Args,
    store: &Store,
    json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    let id = store.resolve(&args.run)?;
    let entry = store.entry(&id)?;
    if args.full {
        out.json(&store.open(&id)?)?;
        return Ok(Status::Done);
    }
    if json {
        out.json(&entry)?;
        return Ok(Status::Done);
    }
    let view = store.open(&id)?;
    print(&entry, &view, store, out)?;
    Ok(Status::Done)
}

fn print(entry: &Entry, view: &RunView, store: &Store, out: &mut Out) -> Result<(), Failure> {
    let run = &view.run;
    out.heading(format_args!(
        "{} of {}: {} {} on {} x {}",
        entry.id, entry.created, entry.kind, entry.scenario, entry.world_size, entry.hardware
    ))?;
    if !view.scenario.about.is_empty() {
        out.paragraph(0, &view.scenario.about)?;
    }
    let changes = entry.changes();
    if !changes.is_empty() {
        out.labelled("options", &changes.join(" "))?;
    }
    let ended = if view.interrupted {
        ", stopped early"
    } else {
        ""
    };
    out.labelled(
        "step",
        &format!(
            "{} ms of {} samples   {} {}   MFU {}{ended}",
            thousands(view.step_ms(), 2),
            run.step_samples.len(),
            thousands(entry.metric("tokens_per_s_per_gpu"), 0),
            RunView::counted_in([view]).rate(),
            match run.mfu {
                0.0 => "n/a".to_owned(),
                mfu => format!("{:.1} %", 100.0 * mfu),
            },
        ),
    )?;
    let causes: Vec<String> = run
        .exposed
        .iter()
        .filter(|(_, t)| t.0 > 0)
        .map(|(c, t): (&Cause, _)| format!("{} {:.2}", c.name(), t.ms()))
        .collect();
    out.labelled(
        "exposed",
        &format!("{:.2} ms ({})", view.exposed_ms(), causes.join(", ")),
    )?;
    out.labelled("memory", &memory(&run.memory))?;
    if let (Some(first), Some(last)) = (run.losses.first(), run.losses.last()) {
        let steps = run.losses.len();
        out.labelled("loss", &format!("{first:.6} to {last:.6} in {steps} steps"))?;
    }
    out.labelled(
        "program",
        &format!(
            "{} ({} spans recorded), options {}",
            match view.program.digest.as_str() {
                "" => "unknown",
                digest => digest,
            },
            run.spans.len(),
            view.scenario.digest
        ),
    )?;
    out.labelled("files", &store.path(&entry.id).display().to_string())?;
    out.blank()?;
    let mut table = Table::new(["environment", "value"]);
    for (key, value) in &run.environment {
        table.row([key.clone(), value.clone()]);
    }
    out.text(table)?;
    Ok(())
}

/// Describes the memory of a run. A trace may contain no memory at all, and never contains that of
/// the device.
fn memory(m: &MemoryReport) -> String {
    if !m.is_recorded() {
        return "not recorded".to_owned();
    }
    let device = match m.device() {
        Some(device) => device.to_string(),
        None => "not recorded".to_owned(),
    };
    format!(
        "allocated {}, reserved {}, device {device}; at the peak: {}",
        m.peak_allocated,
        m.peak_reserved,
        roles(&m.by_role).join(", ")
    )
}

fn roles(by_role: &[(shardlab_plan::ir::Role, Bytes)]) -> Vec<String> {
    by_role
        .iter()
        .take(MAX_ROWS)
        .map(|(role, bytes)| format!("{} {bytes}", role.name()))
        .collect()
}
