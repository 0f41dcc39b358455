//! Prints polars results as tables and JSON.

use super::super::output::Failure;
use super::super::table::Table;
use super::{Points, Summarized, Summary, broken};
use serde_json::{Map, Value};
use shardlab_frames::{Aggregate, Cell, Frame, FrameError};
use shardlab_plan::units::thousands;

/// Decimals of small numbers in answers to queries, enough for losses.
const DECIMALS: usize = 4;

impl From<FrameError> for Failure {
    fn from(e: FrameError) -> Self {
        match e {
            FrameError::Io { path, error } => Self::unwritten(path.display(), &error),
            other => Self::bad_input(other),
        }
    }
}

pub(super) fn frame(points: &Points) -> Result<Frame, Failure> {
    Ok(Frame::from_csv(points.0.clone())?)
}

pub(super) fn summarized(points: &Points, summary: &Summary<'_>) -> Result<Summarized, Failure> {
    let all = frame(points)?;
    let metrics: Vec<String> = summary.metrics.iter().map(|m| (*m).to_owned()).collect();
    let aggregates: Result<Vec<Aggregate>, String> =
        summary.aggregates.iter().map(|a| a.parse()).collect();
    let aggregates = aggregates.map_err(Failure::bad_input)?;
    let answer = all.group(summary.by, &metrics, &aggregates)?;
    let mut titles = titles(&answer)?;
    // Grouping keys are options, even if their values are numbers.
    for title in titles.iter_mut().take(summary.by.len()) {
        *title = title.trim_start_matches('>').to_owned();
    }
    Ok(Summarized {
        titles,
        rows: rows(&answer, 2)?,
    })
}

/// Returns a row as a JSON object.
pub(in crate::cli) fn object(answer: &Frame, row: usize) -> Result<Map<String, Value>, Failure> {
    let mut object = Map::new();
    for (i, name) in answer.columns().into_iter().enumerate() {
        let value = match answer.cell(i, row)? {
            Cell::Text(text) => text.into(),
            Cell::Number(x) => x.into(),
            Cell::Missing => Value::Null,
        };
        object.insert(name, value);
    }
    Ok(object)
}

/// Returns an answer as a table.
pub(in crate::cli) fn table(answer: &Frame) -> Result<Table, Failure> {
    let titles = titles(answer)?;
    // Long paths are broken between their parts.
    let titles: Vec<String> = titles.iter().map(|t| broken(t)).collect();
    let mut table = Table::new(titles.iter().map(String::as_str));
    for row in rows(answer, DECIMALS)? {
        table.row(row);
    }
    Ok(table)
}

/// Returns the names of the columns. The names of numeric columns start with `>`.
fn titles(answer: &Frame) -> Result<Vec<String>, Failure> {
    let names = answer.columns().into_iter().enumerate();
    let title = |(i, name): (usize, String)| {
        let mut cells = (0..answer.rows()).map(|row| answer.cell(i, row));
        let number = cells.try_fold(true, |all, cell| {
            cell.map(|c| all && !matches!(c, Cell::Text(_)))
        })?;
        Ok(format!("{}{name}", if number { ">" } else { "" }))
    };
    names.map(title).collect()
}

fn rows(answer: &Frame, decimals: usize) -> Result<Vec<Vec<String>>, Failure> {
    let columns = answer.columns().len();
    let row = |row: usize| {
        let cells = (0..columns).map(|i| answer.cell(i, row).map(|c| show(c, decimals)));
        Ok(cells.collect::<Result<Vec<String>, FrameError>>()?)
    };
    (0..answer.rows()).map(row).collect()
}

fn show(cell: Cell, decimals: usize) -> String {
    match cell {
        Cell::Text(text) => text,
        Cell::Missing => "-".into(),
        Cell::Number(x) if x == x.trunc() && x.abs() < 1e15 => format!("{x:.0}"),
        Cell::Number(x) if x.abs() >= 1e3 => thousands(x, 2),
        Cell::Number(x) => thousands(x, decimals),
    }
}
