//! Executes queries.

use super::super::super::frames::{object, table};
use super::super::super::output::{Failure, Out, Status};
use super::Args;
use shardlab_frames::{Aggregate, Frame, runs, spans};
use shardlab_reports::store::Store;

/// Default columns of runs.
const RUN: [&str; 5] = ["id", "kind", "scenario", "policy", "hardware"];
/// Default columns of spans.
const SPAN: [&str; 5] = ["scenario", "name", "unit_name", "phase", "work"];
/// Default metrics, if they exist.
const METRICS: [&str; 5] = [
    "step_ms.median",
    "memory.peak_reserved_bytes",
    "loss.last",
    // Column of the points of a sweep.
    "step_ms",
    "peak_reserved_bytes",
];

pub(super) fn run(
    args: &Args,
    store: &Store,
    json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    let all = match &args.table {
        Some(path) => Frame::open(path)?,
        None => saved(args, store)?,
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

/// Returns the saved runs, or their spans.
fn saved(args: &Args, store: &Store) -> Result<Frame, Failure> {
    let entries = args.filter.apply(store.list()?.runs)?;
    Ok(if args.spans {
        spans(store, &entries)?
    } else {
        runs(&entries)?
    })
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
    if args.table.is_some() && args.metric.is_empty() {
        return Ok(all.clone());
    }
    let mut columns: Vec<String> = match (&args.table, args.spans) {
        (Some(_), _) => Vec::new(),
        (None, true) => SPAN.map(str::to_owned).into(),
        (None, false) => RUN.map(str::to_owned).into(),
    };
    columns.extend(metrics);
    Ok(all.select(&columns)?)
}
