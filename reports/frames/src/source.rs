//! Builds tables of saved runs.

use super::FrameError;
use super::frame::{Frame, at, floats, texts};
use polars::prelude::{Column, CsvReadOptions, DataFrame, DataType, JoinArgs, JoinType, SerReader};
use polars::prelude::{DataFrameJoinOps, PlSmallStr};
use shardlab_reports::store::{Entry, Store};
use std::collections::BTreeSet;

/// Returns one row per run, with its fields, options, facts of the environment and metrics as
/// columns. Values have the same types as in the summary. An option or metric that a run lacks is
/// empty.
///
/// # Errors
/// Fails if there are no runs.
pub fn runs(entries: &[Entry]) -> Result<Frame, FrameError> {
    if entries.is_empty() {
        return Err(FrameError::Empty("there is no such run".into()));
    }
    let mut columns: Vec<Column> = Entry::FIELDS
        .iter()
        .map(|field| texts(field, entries.iter().map(|e| e.field(field)).collect()))
        .collect();
    let mut taken: BTreeSet<&str> = Entry::FIELDS.into_iter().collect();
    let options: BTreeSet<&str> = entries
        .iter()
        .flat_map(|e| e.settings.keys().chain(e.environment.keys()))
        .map(String::as_str)
        .collect();
    let metrics: BTreeSet<&str> = entries
        .iter()
        .flat_map(|e| e.metrics.keys())
        .map(String::as_str)
        .collect();
    for name in metrics {
        if taken.insert(name) {
            let value = |e: &Entry| e.metrics.get(name).copied();
            columns.push(floats(name, entries.iter().map(value).collect()));
        }
    }
    for name in options {
        if taken.insert(name) {
            columns.push(option(name, entries));
        }
    }
    Frame::of(columns)
}

/// Returns the column of an option, numeric if all its values are numbers.
fn option(name: &str, entries: &[Entry]) -> Column {
    let values: Vec<Option<String>> = entries.iter().map(|e| e.field(name)).collect();
    let parsed: Option<Vec<Option<f64>>> = values
        .iter()
        .map(|v| match v {
            None => Some(None),
            Some(text) => text.parse().ok().map(Some),
        })
        .collect();
    match parsed {
        Some(numbers) => floats(name, numbers),
        None => texts(name, values),
    }
}

/// Columns of spans that are read, with their types.
const SPAN: [(&str, DataType); 9] = [
    ("name", DataType::String),
    ("work", DataType::String),
    ("unit_name", DataType::String),
    ("phase", DataType::String),
    ("micro_batch", DataType::Int64),
    ("stream_name", DataType::String),
    ("rule", DataType::String),
    ("bytes", DataType::Int64),
    ("instr", DataType::Int64),
];
/// Times of a span, picoseconds.
const TIMES: [&str; 3] = ["start_ps", "end_ps", "alone_ps"];

/// Returns one row per span of every run: kernel or collective, with unit, phase and `duration_us`,
/// joined with the fields of its run.
///
/// # Errors
/// Fails if there are no runs or no spans, or a table cannot be read.
pub fn spans(store: &Store, entries: &[Entry]) -> Result<Frame, FrameError> {
    let mut all: Option<DataFrame> = None;
    for entry in entries {
        let table = spans_of(store, entry)?;
        if table.height() == 0 {
            continue;
        }
        match &mut all {
            None => all = Some(table),
            Some(all) => _ = all.vstack_mut(&table)?,
        }
    }
    let all = all.ok_or_else(|| FrameError::Empty("these runs have no spans".into()))?;
    let runs = runs(entries)?;
    let joined = all.join(
        &runs.0,
        ["run"],
        ["id"],
        JoinArgs::new(JoinType::Inner),
        None,
    )?;
    Ok(Frame(joined))
}

fn spans_of(store: &Store, entry: &Entry) -> Result<DataFrame, FrameError> {
    let path = store.path(&entry.id).join("spans.csv");
    let wanted: Vec<PlSmallStr> = SPAN
        .iter()
        .map(|(name, _)| *name)
        .chain(TIMES)
        .map(PlSmallStr::from_static)
        .collect();
    let mut table = CsvReadOptions::default()
        .with_has_header(true)
        .with_infer_schema_length(Some(0))
        .with_columns(Some(wanted.clone().into()))
        .try_into_reader_with_file_path(Some(path.clone()))
        .and_then(|reader| reader.finish())
        .map_err(|error| at(&path, error))?;
    let mut columns = vec![texts(
        "run",
        vec![Some(entry.id.to_string()); table.height()],
    )];
    for (name, dtype) in &SPAN {
        columns.push(table.column(name)?.cast(dtype)?);
    }
    let time = |name: &str| -> Result<Vec<Option<i64>>, FrameError> {
        let column = table.column(name)?.cast(&DataType::Int64)?;
        Ok(column.i64()?.iter().collect())
    };
    let (start, end, alone) = (time("start_ps")?, time("end_ps")?, time("alone_ps")?);
    let us = |ps: Option<i64>| ps.map(|ps| ps as f64 / 1e6);
    let duration = start
        .iter()
        .zip(&end)
        .map(|(start, end)| us(Some((*end)? - (*start)?)))
        .collect();
    columns.push(floats("duration_us", duration));
    columns.push(floats("alone_us", alone.into_iter().map(us).collect()));
    table = DataFrame::new_infer_height(columns)?;
    Ok(table)
}
