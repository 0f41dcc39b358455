//! `--selftest`: checks that the gate catches every known fault.

use super::{Args, Job};
use crate::cli::output::{Failure, Out, Status};
use crate::cli::table::Table;
use crate::gate::collect::{Collect, GateError, on_cpu};
use crate::gate::plant::Plant;
use serde::Serialize;
use shardlab_reports::gate::baseline::Baseline;
use shardlab_reports::gate::{Class, Facts, Verdict, format, judge};

/// Result of one fault in one scenario.
#[derive(Serialize)]
struct Trial {
    scenario: String,
    /// The fault; `none` for the unchanged program.
    fault: &'static str,
    /// Whether the gate did what it should: fail in the right class, or pass.
    ok: bool,
    /// The decisive finding, in words.
    seen: String,
}

/// Returns the class of finding that has to fail.
fn expected(plant: Plant, runs: bool) -> Class {
    match plant {
        Plant::Memory => Class::Memory,
        Plant::Slow => Class::Time,
        Plant::Scale | Plant::Stale if runs => Class::Convergence,
        Plant::Stale => Class::Checks,
        // Only a run can show this fault. Without one, the changed program is detected.
        Plant::Scale => Class::Program,
    }
}

pub(super) fn run(
    args: &Args,
    jobs: &[Job],
    collect: &Collect<'_>,
    out: &mut Out,
) -> Result<Status, Failure> {
    let mut trials = Vec::new();
    for job in jobs {
        let set = &args.overrides.set;
        let good = collect.facts(&job.scenario, set)?;
        // The text of the file is parsed, as for a stored baseline.
        let baseline = Baseline::parse(Baseline::text(&good), "")
            .map_err(|e| Failure::run(format_args!("{}: the baseline {e}", job.scenario.name)))?;
        let again = judge(&baseline, &collect.facts(&job.scenario, set)?, &job.limits);
        trials.push(Trial {
            scenario: job.scenario.name.clone(),
            fault: "none",
            ok: again.pass,
            seen: again
                .failing()
                .next()
                .map(format::sentence)
                .unwrap_or_default(),
        });
        for plant in Plant::ALL {
            let planted = Collect {
                plant: Some(plant),
                ..*collect
            };
            let bad: Facts = match planted.facts(&job.scenario, set) {
                Err(GateError::Plant { .. }) => continue,
                other => other?,
            };
            let verdict = judge(&baseline, &bad, &job.limits);
            trials.push(trial(
                job,
                plant,
                collect.exec && on_cpu(&job.scenario),
                &verdict,
            ));
        }
    }
    let ok = trials.iter().all(|t| t.ok);
    if args.json {
        for trial in &trials {
            out.json(trial)?;
        }
    } else {
        let mut table = Table::new(["scenario", "fault", "gate", "what it says"]);
        for t in &trials {
            table.row([
                t.scenario.clone(),
                t.fault.to_owned(),
                match (t.fault, t.ok) {
                    ("none", true) => "passes",
                    ("none", false) => "FALSE ALARM",
                    (_, true) => "fails",
                    (_, false) => "MISSED IT",
                }
                .to_owned(),
                t.seen.clone(),
            ]);
        }
        out.text(table)?;
    }
    Ok(if ok {
        Status::Done
    } else {
        Status::CheckFailed
    })
}

fn trial(job: &Job, plant: Plant, runs: bool, verdict: &Verdict) -> Trial {
    let class = expected(plant, runs);
    let all: Vec<_> = verdict.failing().filter(|f| f.class == class).collect();
    // The finding that names the reason is preferred.
    let named = all.iter().find(|f| f.message.contains("world size"));
    let decisive = named.or(all.first()).copied();
    Trial {
        scenario: job.scenario.name.clone(),
        fault: plant.name(),
        ok: decisive.is_some(),
        seen: decisive
            .or_else(|| verdict.failing().next())
            .map(format::sentence)
            .unwrap_or_default(),
    }
}
