//! Explains a saved or imported run: exposed time, critical path, stragglers and memory.

use super::super::output::{Failure, Out, Status};
use super::super::table::Table;
use super::{Args, MAX_LISTED, MAX_LISTED_ALL, critical_path, exposed_time, json};
use crate::analysis::{exposed, path};
use serde_json::json as object;
use shardlab_plan::units::{Bytes, thousands};
use shardlab_reports::RunView;

/// Key in the environment of an imported run for the time that the other ranks waited for a rank.
const LATE: &str = "late_ms.rank";

pub(super) fn run(view: &RunView, args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if !args.scenario.overrides.set.is_empty() {
        return Err(Failure::bad_input(format_args!(
            "{} is a saved run: --set only applies to scenarios",
            args.scenario.scenario.display()
        )));
    }
    if !view.is_recorded() {
        return Err(Failure::bad_input(format_args!(
            "{} has no recorded step, so there is nothing to explain",
            args.scenario.scenario.display()
        )));
    }
    let gaps = exposed::gaps_of(view);
    let path = path::of_view(view);
    let late = stragglers(view);
    let run = &view.run;
    if args.json {
        out.json(&object!({
            "scenario": view.scenario.name,
            "kind": view.kind(),
            "hardware": run.hardware,
            "step_ms": Some(view.step_ms()).filter(|ms| ms.is_finite()),
            "critical_path": json::path(&path),
            "exposed_ms": json::exposed(run, &gaps),
            "stragglers": late.iter().map(|(rank, ms)| object!({"rank": rank, "late_ms": ms})).collect::<Vec<_>>(),
            "memory": {
                "peak_allocated_bytes": run.memory.allocated(),
                "by_role": run.memory.by_role.iter().map(|(r, b)| (r.name().to_owned(), b.0.into())).collect::<serde_json::Map<_, _>>(),
                "by_unit": run.memory.by_unit.iter().map(|(u, b)| (u.clone(), b.0.into())).collect::<serde_json::Map<_, _>>(),
            },
        }))?;
        return Ok(Status::Done);
    }
    let listed = if args.all { MAX_LISTED_ALL } else { MAX_LISTED };
    let kind = run.kind.word();
    out.heading(format_args!(
        "{}: {kind}, {} ms per step on {} x {}",
        view.scenario.name,
        thousands(view.step_ms(), 2),
        run.world_size,
        run.hardware
    ))?;
    exposed_time(run, &gaps, listed, out)?;
    ranks(&late, out)?;
    memory(view, listed, out)?;
    critical_path(&path, listed, out)?;
    if !args.all {
        out.blank()?;
        out.paragraph(
            0,
            &format!("Tables show the first {MAX_LISTED} rows. --all shows more."),
        )?;
    }
    Ok(Status::Done)
}

/// Returns how long the other ranks waited for each rank, longest first.
fn stragglers(view: &RunView) -> Vec<(u32, f64)> {
    let facts = view.run.environment.iter();
    let mut all: Vec<(u32, f64)> = facts
        .filter_map(|(key, ms)| Some((key.strip_prefix(LATE)?.parse().ok()?, ms.parse().ok()?)))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

fn ranks(late: &[(u32, f64)], out: &mut Out) -> Result<(), Failure> {
    if late.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading("Stragglers: how long the other ranks waited for each, in all recorded steps")?;
    let mut table = Table::new(["rank", ">ms"]);
    for (rank, ms) in late.iter().take(MAX_LISTED_ALL) {
        table.row([rank.to_string(), thousands(*ms, 2)]);
    }
    out.text(table)?;
    Ok(())
}

fn memory(view: &RunView, listed: usize, out: &mut Out) -> Result<(), Failure> {
    let m = &view.run.memory;
    if !m.is_recorded() {
        return Ok(());
    }
    out.blank()?;
    out.heading(format_args!(
        "Memory at the peak: {} allocated, {} reserved",
        m.peak_allocated, m.peak_reserved
    ))?;
    let mut table = Table::new(["role", ">bytes", "unit", ">bytes"]);
    for i in 0..m.by_role.len().max(m.by_unit.len()).min(listed) {
        let cells = |part: Option<(&str, Bytes)>| {
            part.map_or_else(
                || [String::new(), String::new()],
                |(name, bytes)| [name.to_owned(), bytes.to_string()],
            )
        };
        let role = cells(m.by_role.get(i).map(|(r, b)| (r.name(), *b)));
        let unit = cells(m.by_unit.get(i).map(|(u, b)| (u.as_str(), *b)));
        table.row(role.into_iter().chain(unit));
    }
    out.text(table)?;
    Ok(())
}
