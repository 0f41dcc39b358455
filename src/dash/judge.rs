//! What the dashboard takes from the store, from comparisons and from gates, as pages of tables.

mod compare;

pub(crate) use compare::compare;

use super::app::Tone;
use super::event::{Setup, StoredRun};
use super::tables::{Page, Table};
use super::worker::Stop;
use crate::gate::{Collect, GateError};
use crate::predict::Profiles;
use shardlab_plan::scenario;
use shardlab_reports::RunView;
use shardlab_reports::gate::baseline::{Baseline, path_of};
use shardlab_reports::gate::{Limits, Status, judge};
use shardlab_reports::store::{Entry, Store};
use std::path::Path;
use std::time::Duration;

/// Time in which nothing moves before a gate's training is given up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs of a store, newest first; none where there is no store.
pub(crate) fn stored(store: Option<&Path>) -> Result<Vec<StoredRun>, String> {
    let Some(dir) = store else {
        return Ok(Vec::new());
    };
    let listing = Store::at(dir).list().map_err(|e| e.to_string())?;
    let of = |e: &Entry| StoredRun {
        id: e.id.as_str().to_owned(),
        scenario: e.scenario.clone(),
        kind: e.kind.clone(),
        made: e.created.clone(),
        step_ms: e.metrics.get("step_ms.median").copied().unwrap_or(f64::NAN),
        allocated: e
            .metrics
            .get("memory.peak_allocated_bytes")
            .copied()
            .unwrap_or(0.0) as u64,
        loss: e.metrics.get("loss.last").copied(),
        changes: e.overrides.join(" "),
    };
    Ok(listing.runs.iter().rev().map(of).collect())
}

/// A stored run.
pub(crate) fn open(store: Option<&Path>, id: &str) -> Result<RunView, String> {
    let dir = store.ok_or("there is no store")?;
    let store = Store::at(dir);
    let id = store.resolve(id).map_err(|e| e.to_string())?;
    store.open(&id).map_err(|e| e.to_string())
}

/// Keeps a run; its id.
pub(crate) fn keep(store: Option<&Path>, view: &RunView) -> Result<String, String> {
    let dir = store.ok_or("nothing is kept: --no-store, or SHARDLAB_STORE=off")?;
    let id = Store::at(dir).save(view).map_err(|e| e.to_string())?;
    Ok(id.as_str().to_owned())
}

/// What `shardlab gate` says about a scenario and its baseline.
///
/// # Errors
/// In words: a fault of the scenario, no baseline, a run that failed.
pub(crate) fn gate(
    setup: &Setup,
    baselines: &Path,
    profiles: &Profiles,
    stop: &Stop,
) -> Result<Option<Page>, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let scenario = scenario::load(&setup.path, &setup.overrides).map_err(|e| text(&e))?;
    let places = scenario::places(&setup.path, &setup.overrides).map_err(|e| text(&e))?;
    let limits = Limits::new(&scenario.gate, &places, None);
    let file = path_of(baselines, &scenario.name);
    if !file.exists() {
        return Ok(Some(no_baseline(setup, &scenario.name, baselines)));
    }
    let baseline = Baseline::read(&file, &scenario.name).map_err(|e| text(&e))?;
    let collect = Collect {
        profiles,
        exec: true,
        timeout: TIMEOUT,
        plant: None,
        stop: &|| stop.asked(),
    };
    let facts = match collect.facts(&scenario, &setup.overrides) {
        Ok(facts) => facts,
        Err(GateError::Interrupted) => return Ok(None),
        Err(e) => return Err(text(&e)),
    };
    Ok(Some(page(&judge(&baseline, &facts, &limits), &file)))
}

fn no_baseline(setup: &Setup, name: &str, baselines: &Path) -> Page {
    let path = setup.path.display();
    let set: String = setup
        .overrides
        .iter()
        .map(|o| format!(" --set '{o}'"))
        .collect();
    let mut table = Table::new("How to make one", &[]);
    table.notes.push(format!(
        "shardlab gate {path}{set} --baseline {} --bless",
        baselines.display()
    ));
    Page {
        title: name.to_owned(),
        verdict: Some((
            Tone::Plain,
            format!("{name} has no baseline in {}", baselines.display()),
        )),
        tables: vec![table],
        ..Page::default()
    }
}

fn page(verdict: &shardlab_reports::gate::Verdict, file: &Path) -> Page {
    let mut table = Table::new(
        "Comparisons",
        &["class", "metric", "outcome", ">baseline", ">now", "limit"],
    );
    for f in &verdict.findings {
        let tone = match f.status {
            Status::Pass => Tone::Good,
            s if s.fails() => Tone::Bad,
            _ => Tone::Plain,
        };
        let cells = [
            f.class.name().to_owned(),
            f.metric.clone(),
            f.status.word().to_owned(),
            f.baseline.clone(),
            f.now.clone(),
            f.limit.clone(),
        ];
        table.row(tone, cells);
    }
    let mut tables = vec![table];
    for f in verdict.findings.iter().filter(|f| !f.message.is_empty()) {
        let mut why = Table::new(format!("{}: {}", f.status.word(), f.metric), &[]);
        why.notes.push(f.message.clone());
        why.notes.extend(f.detail.lines().map(str::to_owned));
        tables.push(why);
    }
    let failed = verdict.failures().count();
    let text = if verdict.pass {
        format!("✓ passes against {}", file.display())
    } else {
        format!(
            "✗ {failed} of {} comparisons fail against {}",
            verdict.findings.len(),
            file.display()
        )
    };
    Page {
        title: verdict.scenario.clone(),
        verdict: Some((if verdict.pass { Tone::Good } else { Tone::Bad }, text)),
        tables,
        ..Page::default()
    }
}
