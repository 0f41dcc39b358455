//! Answers.

use super::super::super::output::{Failure, Out, Status};
use super::super::super::table::Table;
use super::Args;
use serde_json::{Map, Value};
use shardlab_frames::{Aggregate, Cell, Frame, FrameError, runs, spans};
use shardlab_reports::store::Store;

/// Columns of runs when nothing else is asked for.
const RUN: [&str; 5] = ["id", "kind", "scenario", "policy", "hardware"];
/// Columns of spans when nothing else is asked for.
const SPAN: [&str; 5] = ["scenario", "name", "unit_name", "phase", "work"];
/// Metrics when none is asked for, as far as there are such.
const METRICS: [&str; 3] = ["step_ms.median", "memory.peak_reserved_bytes", "loss.last"];

impl From<FrameError> for Failure {
    fn from(e: FrameError) -> Self {
        match e {
            FrameError::Io { path, error } => Self::unwritten(path.display(), &error),
            other => Self::bad_input(other),
        }
    }
}

pub(super) fn run(
    args: &Args,
    store: &Store,
    json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    let entries = args.filter.apply(store.list()?.runs)?;
    let all = if args.spans {
        spans(store, &entries)?
    } else {
        runs(&entries)?
    };
    let mut answer = ask(args, &all)?;
    if let Some(column) = &args.sort {
        answer = answer.sorted(column, args.descending)?;
    }
    if let Some(n) = args.limit {
        answer = answer.first(n);
    }
    if let Some(path) = &args.csv {
        answer.csv(path)?;
    }
    if let Some(path) = &args.parquet {
        answer.parquet(path)?;
    }
    if json {
        for row in 0..answer.rows() {
            out.json(&object(&answer, row)?)?;
        }
    } else if args.csv.is_none() && args.parquet.is_none() {
        out.text(table(&answer)?)?;
    }
    Ok(Status::Done)
}

fn ask(args: &Args, all: &Frame) -> Result<Frame, Failure> {
    if let Some(metric) = &args.history {
        return Ok(all.history(metric, &args.by)?);
    }
    let metrics = if !args.metric.is_empty() {
        args.metric.clone()
    } else if args.spans {
        vec!["duration_us".to_owned()]
    } else {
        let there = |name: &&str| all.columns().iter().any(|c| c == name);
        METRICS
            .iter()
            .filter(|m| there(m))
            .map(|m| (*m).to_owned())
            .collect()
    };
    if let Some(versus) = &args.versus {
        let parts = versus
            .split_once('=')
            .and_then(|(key, values)| Some((key, values.split_once(',')?)));
        let Some((key, (a, b))) = parts else {
            return Err(Failure::bad_input(
                "--versus: KEY=A,B is expected, for example kind=sim,exec",
            ));
        };
        let on = if args.on.is_empty() {
            vec!["program_digest".to_owned()]
        } else {
            args.on.clone()
        };
        let Some(metric) = metrics.first() else {
            return Err(Failure::bad_input("--versus: a --metric is missing"));
        };
        return Ok(all.versus(key, [a, b], &on, metric)?);
    }
    if !args.by.is_empty() || !args.agg.is_empty() {
        let aggregates: Result<Vec<Aggregate>, String> =
            args.agg.iter().map(|a| a.parse()).collect();
        let mut aggregates =
            aggregates.map_err(|e| Failure::bad_input(format_args!("--agg: {e}")))?;
        if aggregates.is_empty() {
            aggregates.push(Aggregate::Quantile(0.5));
        }
        return Ok(all.group(&args.by, &metrics, &aggregates)?);
    }
    let exported = args.csv.is_some() || args.parquet.is_some();
    if exported && args.metric.is_empty() {
        return Ok(all.clone());
    }
    let mut columns: Vec<String> = if args.spans { SPAN } else { RUN }
        .map(str::to_owned)
        .into();
    columns.extend(metrics);
    Ok(all.select(&columns)?)
}

fn object(answer: &Frame, row: usize) -> Result<Map<String, Value>, Failure> {
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

fn table(answer: &Frame) -> Result<Table, Failure> {
    let names = answer.columns();
    let numeric = |i: usize| -> Result<bool, Failure> {
        let rows = 0..answer.rows();
        let mut cells = rows.map(|row| answer.cell(i, row));
        Ok(cells.try_fold(true, |all, cell| {
            cell.map(|c| all && !matches!(c, Cell::Text(_)))
        })?)
    };
    let mut titles = Vec::new();
    for (i, name) in names.iter().enumerate() {
        // Long paths break at their parts.
        let broken = name.replace(' ', "\n").replace('.', ".\n");
        let mark = if numeric(i)? { ">" } else { "" };
        titles.push(format!("{mark}{broken}"));
    }
    let mut table = Table::new(titles.iter().map(String::as_str));
    for row in 0..answer.rows() {
        let cells: Result<Vec<String>, FrameError> = (0..names.len())
            .map(|i| answer.cell(i, row).map(show))
            .collect();
        table.row(cells?);
    }
    Ok(table)
}

fn show(cell: Cell) -> String {
    match cell {
        Cell::Text(text) => text,
        Cell::Missing => "-".into(),
        Cell::Number(x) if x == x.trunc() && x.abs() < 1e15 => format!("{x:.0}"),
        Cell::Number(x) => format!("{x:.4}"),
    }
}
