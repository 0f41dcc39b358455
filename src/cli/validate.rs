//! `shardlab validate`: compares predictions with a table of measured runs, or with a profile's
//! measured collectives.

mod collectives;

use super::args::{percent, profiles};
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use super::table::Table;
use crate::analysis::validation::{
    Compared, Errors, Metric, Null, OutOfMemory, compare, errors, errors_by_project, null_models,
    out_of_memory, read,
};
use crate::predict::{Profiles, Residual};
use serde::Serialize;
use shardlab_plan::units::signed;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Tables of measured runs, or a hardware profile
    ///
    /// A table is a CSV file with the columns scenario, overrides (separated by `;`), step_ms,
    /// peak_allocated_mib, peak_reserved_mib and device_mib, and optionally name, source and
    /// out_of_memory (true: the run ran out of memory, so the row has no values). A hardware
    /// profile is a name or a file (.toml): its measured collectives are compared with predictions
    /// that do not use their table, and with NCCL's own estimates.
    #[arg(value_name = "TABLE.csv|PROFILE", required = true)]
    tables: Vec<PathBuf>,
    /// Only rows whose name, source, scenario or overrides contain TEXT; for a profile: whose kind,
    /// type, ranks or size do (repeatable: rows must contain all)
    #[arg(long, value_name = "TEXT")]
    rows: Vec<String>,
    /// Print one JSON object per row, then one with the errors
    #[arg(long)]
    json: bool,
    /// Print Markdown tables
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Print the error of every row as CSV, from which the error bands of predictions are derived
    #[arg(long, conflicts_with_all = ["json", "markdown", "max_error"])]
    residuals: bool,
    /// Fail (status 1) if any predicted time or memory is off by more than PERCENT, or if a run
    /// that ran out of memory is predicted to fit
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    max_error: Option<f64>,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if let [table] = args.tables.as_slice()
        && let Some(profile) = collectives::profile(table)
    {
        return collectives::run(profile, args, out);
    }
    if args.max_error.is_some() {
        out.outlive_reader();
    }
    let profiles = profiles();
    let mut compared = Vec::new();
    for table in &args.tables {
        compared.extend(predicted(table, args, &profiles)?);
    }
    if compared.is_empty() {
        let tables: Vec<String> = args
            .tables
            .iter()
            .map(|t| t.display().to_string())
            .collect();
        return Err(Failure::bad_input(format_args!(
            "{}: no row{}",
            tables.join(", "),
            if args.rows.is_empty() {
                ""
            } else {
                " matches all of --rows"
            }
        )));
    }
    if args.residuals {
        residuals(&compared, out)?;
        return Ok(Status::Done);
    }
    let (errors, nulls) = (errors(&compared), null_models(&compared));
    let by_source = errors_by_project(&compared);
    let out_of_memory = out_of_memory(&compared);
    if args.json {
        for row in &compared {
            out.json(&RowObject::of(row))?;
        }
        out.json(&Totals {
            errors: &errors,
            by_source: by_source
                .iter()
                .map(|(name, e)| (*name, e.as_slice()))
                .collect(),
            null_models: &nulls,
            out_of_memory,
        })?;
    } else {
        rows(args.markdown, &compared, out)?;
        totals(args.markdown, &errors, &by_source, out)?;
        if let Some(count) = out_of_memory {
            out.paragraph(0, &fits(count))?;
        }
        null_lines(&nulls, out)?;
    }
    let off = args.max_error.map_or(0, |limit| beyond(&compared, limit));
    Ok(if off == 0 {
        Status::Done
    } else {
        Status::CheckFailed
    })
}

/// Predicts the rows of a table that `--rows` selects.
fn predicted(table: &Path, args: &Args, profiles: &Profiles) -> Result<Vec<Compared>, Failure> {
    let mut rows = read(table).map_err(Failure::bad_input)?;
    rows.retain(|row| {
        let text = format!("{} {} {}", row.name, row.source, row.setting());
        args.rows
            .iter()
            .all(|wanted| text.contains(wanted.as_str()))
    });
    let progress = Progress::new("predicting", rows.len(), args.json);
    compare(table, rows, profiles, &|| progress.step()).map_err(|e| {
        if e.error.is_bad_input() {
            Failure::bad_input(e)
        } else {
            Failure::run(e)
        }
    })
}

/// Prints the errors of all rows as CSV, with two decimals. That is enough for bounds, and keeps
/// the table the same if arithmetic differs in the last bits.
fn residuals(compared: &[Compared], out: &mut Out) -> Result<(), Failure> {
    let rounded = |percent: Option<f64>| percent.map(|p| (p * 100.0).round() / 100.0 + 0.0);
    let mut writer = csv::Writer::from_writer(out);
    for row in compared.iter().filter(|c| !c.row.out_of_memory) {
        let residual = Residual {
            step_percent: rounded(row.residual.step_percent),
            reserved_percent: rounded(row.residual.reserved_percent),
            ..row.residual.clone()
        };
        writer
            .serialize(residual)
            .map_err(|e| Failure::run(format_args!("the table of errors: {e}")))?;
    }
    writer.flush()?;
    Ok(())
}

/// Reports predictions whose error exceeds `limit` percent. Returns their number.
fn beyond(compared: &[Compared], limit: f64) -> usize {
    let mut off = 0;
    for c in compared {
        if c.row.out_of_memory && !c.fits_as_measured() {
            eprintln!(
                "{}: ran out of memory, and is predicted to fit",
                c.row.label()
            );
            off += 1;
        }
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
    out_of_memory: bool,
    fits: &'static str,
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
            out_of_memory: c.row.out_of_memory,
            fits: c.fit.word(),
        }
    }
}

#[derive(Serialize)]
struct Totals<'a> {
    errors: &'a [Errors],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    by_source: BTreeMap<&'a str, &'a [Errors]>,
    null_models: &'a [Null],
    #[serde(skip_serializing_if = "Option::is_none")]
    out_of_memory: Option<OutOfMemory>,
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
        // A vertical bar would end the cell.
        let escaped = |cell: &str| cell.replace('|', "\\|");
        let titles = self.titles.iter();
        let plain: Vec<String> = titles.map(|t| escaped(t.trim_start_matches('>'))).collect();
        out.text(format_args!("| {} |\n", plain.join(" | ")))?;
        let rules: Vec<&str> = self
            .titles
            .iter()
            .map(|t| if t.starts_with('>') { "---:" } else { "---" })
            .collect();
        out.text(format_args!("| {} |\n", rules.join(" | ")))?;
        for row in &self.rows {
            let cells: Vec<String> = row.iter().map(|cell| escaped(cell)).collect();
            out.text(format_args!("| {} |\n", cells.join(" | ")))?;
        }
        Ok(())
    }
}

/// Describes how many of the runs that ran out of memory are predicted not to fit.
fn fits(count: OutOfMemory) -> String {
    let OutOfMemory {
        measured,
        predicted,
        ran,
        predicted_to_fit,
    } = count;
    format!(
        "Ran out of memory: {measured}, of which {predicted} are predicted not to fit. Fitted: {ran}, \
         of which {predicted_to_fit} are predicted to fit."
    )
}

/// Prints a line per row.
fn rows(markdown: bool, rows: &[Compared], out: &mut Out) -> Result<(), Failure> {
    let shown: Vec<usize> = (0..Metric::ALL.len())
        .filter(|&i| rows.iter().any(|r| r.cells[i].is_some()))
        .collect();
    // There is no room for names if four metrics are side by side, so there is one table per
    // metric.
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
    Ok(())
}

/// Prints the errors of all rows, and of the rows of each source.
fn totals(
    markdown: bool,
    errors: &[Errors],
    by_source: &[(&str, Vec<Errors>)],
    out: &mut Out,
) -> Result<(), Failure> {
    let titles = [
        "metric",
        ">rows",
        ">mean |error| %",
        ">mean error %",
        ">worst %",
        "worst row",
    ];
    let sheet = Sheet {
        titles: titles.map(str::to_owned).to_vec(),
        rows: errors.iter().map(summary).collect(),
    };
    sheet.write(markdown, out)?;
    out.blank()?;
    if by_source.is_empty() {
        return Ok(());
    }
    let titles = ["source"].into_iter().chain(titles[..5].iter().copied());
    let line = |(source, errors): &(&str, Vec<Errors>)| {
        let name = if source.is_empty() { "(none)" } else { *source };
        let of = |e| [vec![name.to_owned()], summary(e)[..5].to_vec()].concat();
        errors.iter().map(of).collect::<Vec<_>>()
    };
    let sheet = Sheet {
        titles: titles.map(str::to_owned).collect(),
        rows: by_source.iter().flat_map(line).collect(),
    };
    sheet.write(markdown, out)?;
    out.blank()?;
    Ok(())
}

/// Prints the errors of null models.
fn null_lines(nulls: &[Null], out: &mut Out) -> Result<(), Failure> {
    for null in nulls {
        let error = null
            .mean_abs_percent
            .map_or_else(|| "too few rows".to_owned(), |e| format!("{e:.1} %"));
        out.paragraph(
            0,
            &format!(
                "Null model for the step time, {}: {error} ({}).",
                null.name, null.about
            ),
        )?;
    }
    Ok(())
}

fn line(r: &Compared, columns: &[usize]) -> Vec<String> {
    let mut cells = vec![r.row.label()];
    for (place, &i) in columns.iter().enumerate() {
        match r.cells[i] {
            None if r.row.out_of_memory && place == 0 => {
                let predicted = if r.fit.is_ok() {
                    "fits"
                } else {
                    "does not fit"
                };
                cells.extend([
                    "out of memory".to_owned(),
                    predicted.to_owned(),
                    String::new(),
                ]);
            }
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
