//! Prints the list of runs.

use super::super::output::{Failure, Out, Status, say};
use super::super::table::{Table, fits, option_of, room};
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
            format!(
                "no saved runs in {dir}; `shardlab exec` saves its runs, `shardlab sim --save` a prediction"
            )
        } else {
            format!("no run in {dir} matches")
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
        say(format_args!(
            "skipping {}: {}{help}",
            s.path.display(),
            s.reason
        ));
    }
    Ok(Status::Done)
}

const POLICY: usize = 4;
const HARDWARE: usize = 5;
const OPTIONS: usize = 9;

/// Returns a table of runs with their main numbers. Hardware and policy are left out if there is no
/// room for them.
pub(super) fn table(runs: &[Entry]) -> Table {
    let reserved = |e: &Entry| match e.metric("memory.peak_reserved_bytes") {
        // Runs of version 0.1 have 0 for memory that was not recorded.
        x if x.is_nan() || x == 0.0 => None,
        x => Some(Bytes(x as u64)),
    };
    let unit = ByteUnit::common(runs.iter().filter_map(reserved));
    let title = format!(">resv\n{}", unit.name());
    let titles = [
        "id",
        "saved (UTC)",
        "kind",
        "scenario",
        "policy",
        "hardware",
        ">step\nms",
        title.as_str(),
        ">loss",
        "options",
    ];
    let rows: Vec<[String; 10]> = runs
        .iter()
        .map(|e| {
            let number = |name: &str, digits: usize| match e.metric(name) {
                x if x.is_nan() => "-".to_owned(),
                x => format!("{x:.digits$}"),
            };
            let changes = e.changes();
            let options: Vec<&str> = changes.iter().map(|o| option_of(o)).collect();
            [
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
            ]
        })
        .collect();
    // Options are only broken between words.
    let room_of = |column: usize| {
        let cells = rows.iter().map(|r| r[column].as_str());
        if column == OPTIONS {
            room(titles[column], cells.flat_map(str::split_whitespace))
        } else {
            room(titles[column], cells)
        }
    };
    // The options already include the changed ones.
    let mut shown: Vec<usize> = (0..titles.len()).collect();
    for spare in [HARDWARE, POLICY] {
        if !fits(shown.iter().map(|c| room_of(*c)).sum()) {
            shown.retain(|c| *c != spare);
        }
    }
    let mut table = Table::new(shown.iter().map(|c| titles[*c]));
    for row in &rows {
        table.row(shown.iter().map(|c| row[*c].clone()));
    }
    table
}
