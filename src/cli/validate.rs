//! `shardlab validate`: predictions against a table of measured runs, or a profile's measured collectives.

mod collectives;

use super::args::profiles;
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use super::table::Table;
use crate::analysis::validation::{
    Compared, Errors, Metric, Null, compare, errors, null_models, read,
};
use serde::Serialize;
use shardlab_plan::units::signed;
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    /// CSV with the columns scenario, overrides (separated by ;) and measured step_ms, peak_allocated_mib,
    /// peak_reserved_mib, device_mib; optionally name and source. Or a hardware profile, by name or file (.toml): its
    /// measured collectives beside what is predicted without their table, and beside NCCL's own estimates
    #[arg(value_name = "TABLE.csv|PROFILE")]
    table: PathBuf,
    /// Only rows whose name, source, scenario or overrides contain TEXT (repeatable: all of them); of a profile, whose kind,
    /// type, ranks or size do
    #[arg(long, value_name = "TEXT")]
    rows: Vec<String>,
    /// Print one JSON object a row, then one of the errors
    #[arg(long)]
    json: bool,
    /// Print Markdown tables
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Fail (status 1) if a prediction, of time or memory, is off by more than PERCENT
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    max_error: Option<f64>,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if x >= 0.0 => Ok(x),
        _ => Err("not a number of percent, 0 or more".to_owned()),
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let Some(profile) = collectives::profile(&args.table) {
        return collectives::run(profile, args, out);
    }
    if args.max_error.is_some() {
        out.outlive_reader();
    }
    let mut rows = read(&args.table).map_err(Failure::bad_input)?;
    rows.retain(|row| {
        let text = format!("{} {} {}", row.name, row.source, row.setting());
        args.rows
            .iter()
            .all(|wanted| text.contains(wanted.as_str()))
    });
    if rows.is_empty() {
        return Err(Failure::bad_input(format_args!(
            "{}: no row{}",
            args.table.display(),
            if args.rows.is_empty() {
                ""
            } else {
                " with all of --rows"
            }
        )));
    }
    let progress = Progress::new("predicting", rows.len(), args.json);
    let step = || progress.step();
    let compared = compare(&args.table, rows, &profiles(), &step).map_err(|e| {
        if e.error.is_bad_input() {
            Failure::bad_input(e)
        } else {
            Failure::run(e)
        }
    })?;
    drop(progress);
    let (errors, nulls) = (errors(&compared), null_models(&compared));
    if args.json {
        for row in &compared {
            out.json(&RowObject::of(row))?;
        }
        out.json(&Totals {
            errors: &errors,
            null_models: &nulls,
        })?;
    } else {
        print(args.markdown, &compared, &errors, &nulls, out)?;
    }
    let off = args.max_error.map_or(0, |limit| beyond(&compared, limit));
    Ok(if off == 0 {
        Status::Done
    } else {
        Status::CheckFailed
    })
}

/// Says which predictions are off by more than so many percent; how many.
fn beyond(compared: &[Compared], limit: f64) -> usize {
    let mut off = 0;
    for c in compared {
        for (metric, cell) in Metric::ALL.iter().zip(c.cells) {
            if let Some(e) = cell.map(|c| c.error_percent).filter(|e| e.abs() > limit) {
                eprintln!(
                    "{}: {} is off by {e:+.2} %, more than {limit} %",
                    c.row.name,
                    metric.name()
                );
                off += 1;
            }
        }
    }
    off
}

#[derive(Serialize)]
struct RowObject<'a> {
    name: &'a str,
    source: &'a str,
    scenario: &'a str,
    overrides: &'a [String],
    #[serde(flatten)]
    metrics: BTreeMap<&'static str, crate::analysis::validation::Cell>,
}

impl<'a> RowObject<'a> {
    fn of(c: &'a Compared) -> Self {
        let cells = Metric::ALL.iter().zip(c.cells);
        Self {
            name: &c.row.name,
            source: &c.row.source,
            scenario: &c.row.scenario,
            overrides: &c.row.overrides,
            metrics: cells
                .filter_map(|(m, cell)| Some((m.name(), cell?)))
                .collect(),
        }
    }
}

#[derive(Serialize)]
struct Totals<'a> {
    errors: &'a [Errors],
    null_models: &'a [Null],
}

/// Short titles of the metrics.
const TITLES: [&str; 4] = ["step ms", "alloc MiB", "reserved MiB", "device MiB"];

/// Rows of cells, rendered as a table or as Markdown.
struct Sheet {
    titles: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Sheet {
    fn write(&self, markdown: bool, out: &mut Out) -> Result<(), Failure> {
        if !markdown {
            let mut table = Table::new(self.titles.iter().map(String::as_str));
            for row in &self.rows {
                table.row(row.iter().cloned());
            }
            out.text(table)?;
            return Ok(());
        }
        let plain: Vec<&str> = self
            .titles
            .iter()
            .map(|t| t.trim_start_matches('>'))
            .collect();
        out.line(format_args!("| {} |", plain.join(" | ")))?;
        let rules: Vec<&str> = self
            .titles
            .iter()
            .map(|t| if t.starts_with('>') { "---:" } else { "---" })
            .collect();
        out.line(format_args!("| {} |", rules.join(" | ")))?;
        for row in &self.rows {
            out.line(format_args!("| {} |", row.join(" | ")))?;
        }
        Ok(())
    }
}

fn print(
    markdown: bool,
    rows: &[Compared],
    errors: &[Errors],
    nulls: &[Null],
    out: &mut Out,
) -> Result<(), Failure> {
    let shown: Vec<usize> = (0..Metric::ALL.len())
        .filter(|&i| rows.iter().any(|r| r.cells[i].is_some()))
        .collect();
    let mut titles = vec!["row".to_owned()];
    for &i in &shown {
        titles.push(format!(">{}", TITLES[i]));
        titles.push(">predicted".into());
        titles.push(">error %".into());
    }
    // Four metrics side by side leave no room for names within the width: then one table a metric.
    let sheets: Vec<Vec<usize>> = if markdown || shown.len() <= 2 {
        vec![shown.clone()]
    } else {
        shown.chunks(2).map(<[usize]>::to_vec).collect()
    };
    for columns in sheets {
        let mut titles = vec!["row".to_owned()];
        for &i in &columns {
            titles.extend([
                format!(">{}", TITLES[i]),
                ">predicted".into(),
                ">error %".into(),
            ]);
        }
        let sheet = Sheet {
            titles,
            rows: rows.iter().map(|r| line(r, &columns)).collect(),
        };
        sheet.write(markdown, out)?;
        out.blank()?;
    }
    let sheet = Sheet {
        titles: [
            "metric",
            ">rows",
            ">mean |error| %",
            ">mean error %",
            ">worst %",
            "worst row",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows: errors.iter().map(summary).collect(),
    };
    sheet.write(markdown, out)?;
    out.blank()?;
    for null in nulls {
        let error = null
            .mean_abs_percent
            .map_or_else(|| "too few rows".to_owned(), |e| format!("{e:.1} %"));
        out.paragraph(
            0,
            &format!(
                "Null model for step time, {}: {error} ({}).",
                null.name, null.about
            ),
        )?;
    }
    Ok(())
}

fn line(r: &Compared, columns: &[usize]) -> Vec<String> {
    let mut cells = vec![r.row.label()];
    for &i in columns {
        match r.cells[i] {
            Some(c) => cells.extend([
                format!("{:.2}", c.measured),
                format!("{:.2}", c.predicted),
                signed(c.error_percent, 2),
            ]),
            None => cells.extend([String::new(), String::new(), String::new()]),
        }
    }
    cells
}

fn summary(e: &Errors) -> Vec<String> {
    vec![
        e.metric.name().to_owned(),
        e.rows.to_string(),
        format!("{:.2}", e.mean_abs_percent),
        signed(e.mean_signed_percent, 2),
        signed(e.worst_percent, 2),
        e.worst_row.clone(),
    ]
}
