//! Measured runs given by the user.

use super::Job;
use crate::cli::output::Failure;
use crate::gate::collect::Collect;
use serde_json::Value;
use shardlab_reports::gate::{Curve, Measured, MemoryFacts};
use shardlab_reports::store::{Store, open_dir};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Reads the runs and assigns them to their scenarios. Each run must have the program of its
/// scenario.
pub(super) fn read(
    paths: &[PathBuf],
    jobs: &[Job],
    collect: &Collect<'_>,
    store: &Store,
) -> Result<BTreeMap<String, Measured>, Failure> {
    let mut all: BTreeMap<String, Measured> = BTreeMap::new();
    for path in paths {
        let shown = path.display();
        let bad =
            |m: &dyn std::fmt::Display| Failure::bad_input(format_args!("--run {shown}: {m}"));
        let (name, run) = one(path, store).map_err(|e| bad(&e))?;
        let Some(job) = jobs.iter().find(|j| j.scenario.name == name) else {
            let known: Vec<&str> = jobs.iter().map(|j| j.scenario.name.as_str()).collect();
            return Err(bad(&format_args!(
                "is a run of `{name}`; the gate was called for {}",
                known.join(", ")
            )));
        };
        match all.get_mut(&name) {
            None => {
                let gated = collect.program(&job.scenario)?.digest();
                if run.digest != gated {
                    return Err(bad(&format_args!(
                        "ran the program {}, under the gate is {gated}; a run of the same scenario, overrides and version \
                         is expected",
                        run.digest
                    )));
                }
                all.insert(name, run);
            }
            Some(known) if known.digest != run.digest => {
                return Err(bad(&"ran another program than the run given before it"));
            }
            Some(known) => {
                let taken = |s: u64| known.curves.iter().any(|c| c.seed == s);
                if run.curves.iter().any(|c| taken(c.seed)) {
                    return Err(bad(&"has the seed of a run given before it"));
                }
                known.curves.extend(run.curves);
            }
        }
    }
    Ok(all)
}

/// Reason why a run is not a measurement if its checkpoint was already at the last step. Its losses
/// come from the checkpoint, and its memory contains no step.
const UNTRAINED: &str = "trained no step: its checkpoint was of the last one already";

/// Reads a file printed by `exec --json`, the folder of a saved run, or a saved run by id or name.
fn one(path: &Path, store: &Store) -> Result<(String, Measured), String> {
    if path.is_file() {
        let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
        let value: Value = serde_json::from_str(text.trim()).map_err(|e| e.to_string())?;
        return of(&value);
    }
    let view = if path.is_dir() {
        open_dir(path)
    } else {
        let id = store.resolve(&path.to_string_lossy());
        id.and_then(|id| store.open(&id))
    }
    .map_err(|e| e.to_string())?;
    if !view.run.kind.is_measured() {
        return Err("is a prediction: a measured run is expected".to_owned());
    }
    if view.run.step_samples.is_empty() {
        return Err(UNTRAINED.to_owned());
    }
    let name = view.scenario.name.clone();
    let run = Measured::new(&[view]).ok_or("holds no run")?;
    Ok((name, run))
}

/// Returns the facts of a summary with its scenario's name.
fn of(v: &Value) -> Result<(String, Measured), String> {
    let text = |key: &str| {
        v[key].as_str().map(str::to_owned).ok_or_else(|| {
            format!("has no `{key}`: the output of `shardlab exec --json` is expected")
        })
    };
    if text("kind")? != "exec" {
        return Err("is a prediction: a measured run is expected".to_owned());
    }
    if v["step_ms"]["samples"]
        .as_array()
        .is_some_and(Vec::is_empty)
    {
        return Err(UNTRAINED.to_owned());
    }
    let numbers = |key: &str| -> Vec<f64> {
        let list = v[key].as_array().map_or(&[][..], Vec::as_slice);
        // JSON has no NaN, so it is written as `null`.
        list.iter()
            .map(|x| x.as_f64().unwrap_or(f64::NAN))
            .collect()
    };
    let map = |value: &Value| -> BTreeMap<String, u64> {
        let fields = value.as_object().into_iter().flatten();
        fields
            .filter_map(|(k, v)| Some((k.clone(), v.as_u64()?)))
            .collect()
    };
    let m = &v["memory"];
    let bytes = |key: &str| {
        m[key]
            .as_u64()
            .ok_or_else(|| format!("has no `memory.{key}`"))
    };
    let at = &m["at"];
    let memory = MemoryFacts {
        allocated: bytes("peak_allocated_bytes")?,
        reserved: bytes("peak_reserved_bytes")?,
        device: bytes("peak_device_bytes")?,
        capacity: None,
        persistent: bytes("persistent_bytes")?,
        at: format!(
            "{} {}",
            at["phase"].as_str().unwrap_or_default(),
            at["unit_name"].as_str().unwrap_or_default()
        ),
        by_role: map(&m["by_role"]),
        by_unit: map(&v["memory_by_unit"]),
    };
    let environment: BTreeMap<String, String> = v["environment"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())))
        .collect();
    let curve = Curve {
        seed: environment
            .get("seed")
            .and_then(|s| s.parse().ok())
            .unwrap_or(0),
        losses: numbers("losses"),
        grad_norms: numbers("grad_norms"),
        ended: (v["interrupted"] == true).then(|| "the run was interrupted".to_owned()),
    };
    Ok((
        text("scenario")?,
        Measured {
            environment: shardlab_reports::gate::facts::lasting(&environment),
            digest: text("program_digest")?,
            memory: Some(memory),
            curves: vec![curve],
        },
    ))
}
