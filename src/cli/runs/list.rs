//! The list of runs.

use super::super::output::{Failure, Out, Status};
use super::super::table::{Table, option_of};
use super::Args;
use shardlab_plan::units::{ByteUnit, Bytes};
use shardlab_reports::store::{Entry, Listing, Store};

pub(super) fn run(args: &Args, store: &Store, out: &mut Out) -> Result<Status, Failure> {
    let Listing { runs, skipped } = store.list()?;
    let empty = runs.is_empty();
    let mut runs = args.filter.apply(runs)?;
    if let Some(n) = args.last {
        runs.reverse();
        runs.truncate(n);
    }
    if args.json {
        for entry in &runs {
            out.json(entry)?;
        }
    } else if runs.is_empty() {
        let dir = store.dir().display();
        out.line(if empty {
            format!("no runs in {dir}; `shardlab sim` and `shardlab exec` keep theirs")
        } else {
            format!("no run in {dir} is so")
        })?;
    } else {
        out.text(table(&runs))?;
        let names = store.names()?;
        if !names.is_empty() {
            out.blank()?;
        }
        for (name, id) in names {
            out.line(format_args!("{name} = {id}"))?;
        }
    }
    if !skipped.is_empty() {
        out.flush()?;
    }
    for s in &skipped {
        let help = if s.litter {
            "; `shardlab runs prune --unfinished` removes it"
        } else {
            ""
        };
        eprintln!("left out: {}: {}{help}", s.path.display(), s.reason);
    }
    Ok(Status::Done)
}

/// Runs with their main numbers.
pub(super) fn table(runs: &[Entry]) -> Table {
    let reserved = |e: &Entry| match e.metric("memory.peak_reserved_bytes") {
        x if x.is_nan() => None,
        x => Some(Bytes(x as u64)),
    };
    let unit = ByteUnit::common(runs.iter().filter_map(reserved));
    let title = format!(">resv\n{}", unit.name());
    let mut table = Table::new([
        "id",
        "kept (UTC)",
        "kind",
        "scenario",
        "policy",
        "hardware",
        ">step\nms",
        title.as_str(),
        ">loss",
        "options",
    ]);
    for e in runs {
        let number = |name: &str, digits: usize| match e.metric(name) {
            x if x.is_nan() => "-".to_owned(),
            x => format!("{:.digits$}", x),
        };
        let options: Vec<&str> = e.overrides.iter().map(|o| option_of(o)).collect();
        table.row([
            e.id.tail().to_owned(),
            e.created[5..16].replace('T', " "),
            e.kind.clone(),
            e.scenario.clone(),
            e.policy.clone(),
            e.hardware.clone(),
            number("step_ms.median", 2),
            reserved(e).map_or_else(|| "-".to_owned(), |b| unit.show(b)),
            number("loss.last", 4),
            options.join(" "),
        ]);
    }
    table
}
