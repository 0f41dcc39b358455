//! Prints a table of many runs.

use super::super::output::{Failure, Out};
use super::super::table::{Table, fits, key_title, room};
use super::input::Made;
use shardlab_plan::record::RunKind;
use shardlab_reports::compare::{Matrix, Metric};
use shardlab_reports::view::Difference;

/// Metrics, most interesting first.
const METRICS: [&str; 6] = [
    "step_ms",
    "tokens_per_s_per_gpu",
    "exposed_ms",
    "allocated_gib",
    "reserved_gib",
    "final_loss",
];

pub(super) fn print(matrix: &Matrix, made: &[Made], out: &mut Out) -> Result<(), Failure> {
    out.paragraph(0, &matrix.comparable.sentence())?;
    out.blank()?;
    let ranked = matrix.comparable.ranks();
    let metrics: Vec<&Metric> = METRICS
        .iter()
        .filter_map(|name| matrix.metrics.iter().find(|m| m.name == *name))
        .collect();
    let best: Vec<Vec<bool>> = metrics.iter().map(|m| matrix.best(m)).collect();
    let names: [Vec<String>; 2] = [
        matrix.rows.iter().map(|r| r.label.clone()).collect(),
        matrix
            .rows
            .iter()
            .map(|r| scenario(&r.scenario, r.kind))
            .collect(),
    ];
    let cells = |m: &Metric, best: &[bool]| -> Vec<String> {
        let mark = |i: usize| if best[i] && made.len() > 1 { "*" } else { "" };
        let runs = 0..matrix.rows.len();
        runs.map(|i| format!("{}{}", mark(i), m.show(i))).collect()
    };
    let headings: Vec<String> = metrics
        .iter()
        .map(|m| format!(">{}", m.heading().replace(' ', "\n")))
        .collect();
    let numbers: Vec<Vec<String>> = metrics
        .iter()
        .zip(&best)
        .map(|(m, b)| cells(m, b))
        .collect();
    let values = |d: &Difference| -> Vec<String> {
        let values = d.values.iter();
        values
            .map(|v| v.clone().unwrap_or_else(|| "-".into()))
            .collect()
    };
    // Options get the room that names and numbers leave, in whole columns.
    let mut used = room("fits", []) + if ranked { room("front", []) } else { 0 };
    used += room("run", texts(&names[0])) + room("scenario", texts(&names[1]));
    for (heading, cells) in headings.iter().zip(&numbers) {
        used += room(heading, texts(cells));
    }
    let fitting = matrix.options.iter().take_while(|d| {
        used += room(&key_title(&d.name()), texts(&values(d)));
        fits(used)
    });
    let (shown, rest) = matrix.options.split_at(fitting.count());
    let titles: Vec<String> = ["run", "scenario"]
        .into_iter()
        .map(str::to_owned)
        .chain(shown.iter().map(|d| key_title(&d.name())))
        .chain(headings)
        .chain(["fits".to_owned()])
        .chain(ranked.then(|| "front".to_owned()))
        .collect();
    let shown: Vec<Vec<String>> = shown.iter().map(values).collect();
    let mut table = Table::new(titles.iter().map(String::as_str));
    for (i, row) in matrix.rows.iter().enumerate() {
        let columns = names.iter().chain(&shown).chain(&numbers);
        let mut cells: Vec<String> = columns.map(|c| c[i].clone()).collect();
        let fits = row.fits.map_or("?", |fits| if fits { "yes" } else { "no" });
        cells.push(fits.to_owned());
        if ranked {
            cells.push(if row.on_front { "*" } else { "" }.to_owned());
        }
        table.row(cells);
    }
    out.text(table)?;
    if ranked {
        legend(matrix, &best, out)?;
    }
    for (row, made) in matrix.rows.iter().zip(made) {
        if made.origin.starts_with("saved") {
            out.line(format_args!("{} is {}", row.label, made.origin))?;
        }
    }
    if !rest.is_empty() {
        let names: Vec<&str> = rest.iter().map(|d| d.key.as_str()).collect();
        out.paragraph(0, &format!("Also different: {}.", names.join(", ")))?;
    }
    Ok(())
}

/// Prints a legend of the marks.
fn legend(matrix: &Matrix, best: &[Vec<bool>], out: &mut Out) -> Result<(), Failure> {
    let (unit, tolerance) = (matrix.counted_in, matrix.tolerance);
    let but = if matrix.same_tokens {
        String::new()
    } else {
        format!(
            " (not of step times: the steps differ in their {})",
            unit.name()
        )
    };
    out.blank()?;
    if best.iter().flatten().any(|best| *best) {
        out.paragraph(
            0,
            &format!(
                "* marks the best run of a column among those that fit{but}. Values within {tolerance} are equal: of these, the run \
                 with the least reserved memory is marked, then the one closest to the defaults. Columns without a mark are ties."
            ),
        )?;
    } else {
        out.paragraph(
            0,
            &format!("All runs that fit are equal within {tolerance}{but}."),
        )?;
    }
    out.paragraph(
        0,
        &format!(
            "front: Pareto-optimal runs (time per {} vs. reserved memory).",
            unit.one()
        ),
    )?;
    Ok(())
}

fn texts(cells: &[String]) -> impl Iterator<Item = &str> {
    cells.iter().map(String::as_str)
}

fn scenario(name: &str, kind: &str) -> String {
    if kind == RunKind::Sim.name() {
        name.to_owned()
    } else {
        format!("{name} ({kind})")
    }
}
