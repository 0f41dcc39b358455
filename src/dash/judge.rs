//! Reads the store, and turns comparisons and gates into pages of tables.

mod compare;

pub(crate) use compare::compare;

use super::app::Tone;
use super::event::{Judged, Setup, StoredRun};
use super::names::changes;
use super::tables::{Page, Table};
use super::worker::Stop;
use crate::gate::{Collect, GateError, TIMEOUT};
use crate::predict::Profiles;
use shardlab_plan::scenario;
use shardlab_plan::units::{Bytes, Picos};
use shardlab_reports::RunView;
use shardlab_reports::gate::baseline::{self, Baseline, BaselineError, path_of};
use shardlab_reports::gate::format::sentence;
use shardlab_reports::gate::judge::alone;
use shardlab_reports::gate::{Facts, Finding, Limits, Status, Verdict, judge};
use shardlab_reports::store::{Entry, Id, Store};
use std::path::{Path, PathBuf};

/// Returns the runs of a store, newest first; empty without a store.
pub(crate) fn stored(store: Option<&Path>) -> Result<Vec<StoredRun>, String> {
    let Some(dir) = store else {
        return Ok(Vec::new());
    };
    let store = Store::at(dir);
    let listing = store.list().map_err(|e| e.to_string())?;
    let names = store.names().map_err(|e| e.to_string())?;
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
        changes: changes(&e.overrides),
        name: name_of(&names, &e.id).map(str::to_owned),
        fields: e.fields(),
    };
    Ok(listing.runs.iter().rev().map(of).collect())
}

/// Opens a saved run.
pub(crate) fn open(store: Option<&Path>, id: &str) -> Result<RunView, String> {
    let dir = store.ok_or("there is no store")?;
    let store = Store::at(dir);
    let id = store.resolve(id).map_err(|e| e.to_string())?;
    store.open(&id).map_err(|e| e.to_string())
}

/// Names a saved run, or removes its name. A new name replaces the one that lists show.
pub(crate) fn name(store: Option<&Path>, id: &str, name: Option<&str>) -> Result<(), String> {
    let dir = store.ok_or("there is no store")?;
    let store = Store::at(dir);
    let id = store.resolve(id).map_err(|e| e.to_string())?;
    let names = store.names().map_err(|e| e.to_string())?;
    let result = match (name_of(&names, &id), name) {
        (Some(before), Some(name)) => store.rename(before, name),
        (None, Some(name)) => store.name(name, &id),
        (Some(before), None) => store.unname(before),
        (None, None) => Ok(()),
    };
    result.map_err(|e| e.to_string())
}

/// Returns the name of a run that lists show: the first, if it has several.
fn name_of<'a>(names: &'a [(String, Id)], id: &Id) -> Option<&'a str> {
    let (name, _) = names.iter().find(|(_, named)| named == id)?;
    Some(name)
}

/// Removes a saved run. A named run is kept, as `runs prune` does.
pub(crate) fn remove(store: Option<&Path>, id: &str) -> Result<(), String> {
    let dir = store.ok_or("there is no store")?;
    let store = Store::at(dir);
    let id = store.resolve(id).map_err(|e| e.to_string())?;
    let names = store.names().map_err(|e| e.to_string())?;
    if let Some(name) = name_of(&names, &id) {
        return Err(spared(id.tail(), name));
    }
    store.remove(&id).map_err(|e| e.to_string())
}

/// Explains why a named run was not removed.
pub(crate) fn spared(run: &str, name: &str) -> String {
    format!("{run} is kept because it has the name {name}")
}

/// Saves a run and returns its id.
pub(crate) fn keep(store: Option<&Path>, view: &RunView) -> Result<String, String> {
    let dir = store.ok_or("nothing is kept: --no-store, or SHARDLAB_STORE=off")?;
    let store = Store::at(dir);
    let known = store.known().map_err(|e| e.to_string())?;
    let saved = store.save_once(view, &known).map_err(|e| e.to_string())?;
    Ok(saved.id.as_str().to_owned())
}

/// Returns the verdict of `shardlab gate` on a scenario and its baseline; `None` if it was stopped.
///
/// # Errors
/// Returns the reason if the scenario or the baseline is invalid, or a run failed.
pub(crate) fn gate(
    setup: &Setup,
    baselines: &Path,
    profiles: &Profiles,
    stop: &Stop,
) -> Result<Option<(Page, Judged)>, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let scenario = scenario::load(&setup.path, &setup.overrides).map_err(|e| text(&e))?;
    let places = scenario::places(&setup.path, &setup.overrides).map_err(|e| text(&e))?;
    let limits = Limits::new(&scenario.gate, &places, None);
    let path = path_of(baselines, &scenario.name);
    let baseline = match Baseline::read(&path, &scenario.name) {
        Ok(baseline) => Some(baseline),
        Err(BaselineError::Missing { .. }) => None,
        Err(e) => return Err(text(&e)),
    };
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
    Ok(Some(against(baseline.as_ref(), facts, limits, path)))
}

/// Makes the result of a gate the baseline, and judges against it.
///
/// # Errors
/// Returns the reason if the baseline cannot be written or read back.
pub(crate) fn bless(judged: &Judged) -> Result<(Page, Judged), String> {
    let (path, facts) = (judged.path.clone(), judged.facts.clone());
    baseline::bless(&path, &facts).map_err(|e| e.to_string())?;
    let written = Baseline::read(&path, &facts.scenario).map_err(|e| e.to_string())?;
    Ok(against(Some(&written), facts, judged.limits.clone(), path))
}

fn against(
    baseline: Option<&Baseline>,
    facts: Facts,
    limits: Limits,
    path: PathBuf,
) -> (Page, Judged) {
    let verdict = baseline.map(|b| judge(b, &facts, &limits));
    let changes = verdict.iter().flat_map(|v| v.failing().map(sentence));
    let changes = changes.collect();
    let page = match &verdict {
        Some(verdict) => page(verdict, &path),
        None => no_baseline(&facts, &limits, &path),
    };
    let judged = Judged {
        exists: baseline.is_some(),
        facts,
        limits,
        path,
        changes,
    };
    (page, judged)
}

/// Returns the content of a missing baseline, and the findings that need no baseline.
fn no_baseline(facts: &Facts, limits: &Limits, path: &Path) -> Page {
    let mut table = Table::new("It would hold", &["metric", ">value"]);
    let m = &facts.memory;
    let loss = facts
        .measured
        .as_ref()
        .and_then(|m| m.curves.first()?.losses.last());
    let rows = [
        ("allocated", Some(Bytes(m.allocated).to_string())),
        ("reserved", Some(Bytes(m.reserved).to_string())),
        ("device", Some(Bytes(m.device).to_string())),
        (
            "step, predicted",
            Some(Picos(facts.time.step_ps).to_string()),
        ),
        ("last loss", loss.map(|l| format!("{l:.6}"))),
        ("program", Some(facts.program.digest.clone())),
    ];
    for (name, value) in rows {
        if let Some(value) = value {
            table.row(Tone::Plain, [name.to_owned(), value]);
        }
    }
    table
        .notes
        .push("B writes it, f chooses another folder.".to_owned());
    let mut text = format!(
        "{} has no baseline: {} does not exist",
        facts.scenario,
        path.display()
    );
    let itself = alone(facts.clone(), limits, "");
    let mut tables = vec![table];
    if !itself.pass {
        text = format!("✗ {text}; it fails without one");
        tables.extend(comparisons(&itself));
    }
    Page {
        title: facts.scenario.clone(),
        verdict: Some((if itself.pass { Tone::Plain } else { Tone::Bad }, text)),
        tables,
        ..Page::default()
    }
}

/// Returns tables of a verdict's findings, with their messages.
fn comparisons(verdict: &Verdict) -> Vec<Table> {
    let mut table = Table::new(
        "Comparisons",
        &["metric", "outcome", ">baseline", ">now", "limit"],
    );
    for f in &verdict.findings {
        let tone = match f.status {
            Status::Pass => Tone::Good,
            s if s.fails() => Tone::Bad,
            _ => Tone::Plain,
        };
        let cells = [
            f.metric.clone(),
            f.status.word().to_owned(),
            f.baseline.clone(),
            f.now.clone(),
            f.limit.clone(),
        ];
        table.row(tone, cells);
    }
    let mut tables = vec![table];
    let notable = |f: &&Finding| f.status != Status::Pass && !f.message.is_empty();
    for f in verdict.findings.iter().filter(notable) {
        let mut why = Table::new(format!("{}: {}", f.status.word(), f.metric), &[]);
        why.notes.push(f.message.clone());
        why.notes.extend(f.detail.lines().map(str::to_owned));
        tables.push(why);
    }
    tables
}

fn page(verdict: &Verdict, file: &Path) -> Page {
    let failed = verdict.failing().count();
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
        tables: comparisons(verdict),
        ..Page::default()
    }
}
