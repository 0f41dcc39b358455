//! Many runs as a table.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use super::input::Made;
use shardlab_reports::compare::{Matrix, Metric};

/// Options and metrics that have columns.
const COLUMNS: usize = 9;
/// Metrics in order of interest.
const METRICS: [&str; 6] = [
    "step_ms",
    "tokens_per_s_per_gpu",
    "exposed_ms",
    "allocated_gib",
    "reserved_gib",
    "final_loss",
];

pub(super) fn print(matrix: &Matrix, made: &[Made], out: &mut Out) -> Result<(), Failure> {
    let metrics: Vec<&Metric> = METRICS
        .iter()
        .filter_map(|name| matrix.metrics.iter().find(|m| m.name == *name))
        .collect();
    let best: Vec<Vec<bool>> = metrics.iter().map(|m| m.best()).collect();
    let options = matrix
        .options
        .len()
        .min(COLUMNS - metrics.len().min(COLUMNS));
    let (shown, rest) = matrix.options.split_at(options);
    let titles: Vec<String> = ["run", "scenario"]
        .into_iter()
        .map(str::to_owned)
        .chain(shown.iter().map(|d| title(&d.key)))
        .chain(
            metrics
                .iter()
                .map(|m| format!(">{}", m.heading().replace(' ', "\n"))),
        )
        .chain(["fits".to_owned(), "front".to_owned()])
        .collect();
    let mut table = Table::new(titles.iter().map(String::as_str));
    for (i, row) in matrix.rows.iter().enumerate() {
        let mut cells = vec![row.label.clone(), scenario(&row.scenario, row.kind)];
        cells.extend(
            shown
                .iter()
                .map(|d| d.values[i].clone().unwrap_or_else(|| "-".into())),
        );
        cells.extend(metrics.iter().zip(&best).map(|(m, best)| {
            let mark = if best[i] && made.len() > 1 { "*" } else { "" };
            format!("{mark}{}", m.show(i))
        }));
        let fits = row.fits.map_or("?", |fits| if fits { "yes" } else { "no" });
        cells.push(fits.to_owned());
        cells.push(if row.on_front { "*" } else { "" }.to_owned());
        table.row(cells);
    }
    out.text(table)?;
    out.paragraph(
        0,
        "* marks the best of a column, and under `front` the runs that no other one beats both in time for a token and in \
         reserved memory.",
    )?;
    for (row, made) in matrix.rows.iter().zip(made) {
        if made.origin.starts_with("kept") {
            out.line(format_args!("{} is {}", row.label, made.origin))?;
        }
    }
    if !rest.is_empty() {
        let names: Vec<&str> = rest.iter().map(|d| d.key.as_str()).collect();
        out.paragraph(0, &format!("Also different: {}.", names.join(", ")))?;
    }
    Ok(())
}

fn scenario(name: &str, kind: &str) -> String {
    if kind == "exec" {
        format!("{name} (exec)")
    } else {
        name.to_owned()
    }
}

/// A key without its section, in lines when it is long.
fn title(path: &str) -> String {
    let key = path.split_once('.').map_or(path, |(_, key)| key);
    if key.len() > 9 {
        key.replace('_', "_\n")
    } else {
        key.to_owned()
    }
}
