//! Judges a measured run of the user's own job against another run.

use super::{Args, report};
use crate::cli::import;
use crate::cli::output::{Failure, Out, Status};
use shardlab_plan::config::{Gate, GatePreset};
use shardlab_plan::scenario;
use shardlab_reports::RunView;
use shardlab_reports::gate::{Limits, runs};
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(super) fn run(args: &Args, set: &[String], out: &mut Out) -> Result<Status, Failure> {
    let before = match &args.baseline {
        Some(file) => Some(view(args, std::slice::from_ref(file), "--baseline")?),
        None => None,
    };
    let after = view(args, &args.measured, "--measured")?;
    let limits = limits(args, &after, set)?;
    let judged = match &before {
        Some(before) => runs::judge(before, &after, &limits).map(Some),
        None => runs::judge_budgets(&after, &limits),
    };
    let verdict = judged.map_err(|e| {
        let names: Vec<String> = args
            .measured
            .iter()
            .map(|m| m.display().to_string())
            .collect();
        Failure::bad_input(format_args!("--measured {} {e}", names.join(" ")))
    })?;
    let Some(verdict) = verdict else {
        return Err(Failure::bad_input(
            "--measured needs --baseline, or a budget: --set gate.max_memory=SIZE or --set gate.max_step_ms=MS",
        ));
    };
    let pass = verdict.pass;
    report(args, &[verdict], out)?;
    Ok(if pass {
        Status::Done
    } else {
        Status::CheckFailed
    })
}

/// Reads traces, or a saved run.
fn view(args: &Args, files: &[PathBuf], option: &str) -> Result<RunView, Failure> {
    let saved = match files {
        [one] => args.from.find(one)?,
        _ => None,
    };
    let view = match saved {
        Some(view) => view,
        None => import::view_of_files(files)?,
    };
    if !view.run.kind.is_measured() {
        let name = files[0].display();
        return Err(Failure::bad_input(format_args!(
            "{option} {name} is a prediction: a measured run is expected"
        )));
    }
    Ok(view)
}

/// Returns the limits: those set with `--set gate.KEY=VALUE`, or else the defaults.
fn limits(args: &Args, view: &RunView, set: &[String]) -> Result<Limits, Failure> {
    if set.iter().all(|s| s.starts_with("gate.preset=")) {
        let gate = match args.preset.as_deref() {
            Some("strict") => Gate::of(GatePreset::Strict),
            _ => Gate::default(),
        };
        return Ok(Limits::new(&gate, &BTreeMap::new(), None));
    }
    let name = &view.scenario.name;
    let scenario = scenario::parse(name, &view.scenario.text, set).map_err(|e| {
        Failure::bad_input(format_args!(
            "--set needs the scenario of {name}, which its trace does not determine: {e}"
        ))
    })?;
    Ok(Limits::new(&scenario.gate, &BTreeMap::new(), None))
}
