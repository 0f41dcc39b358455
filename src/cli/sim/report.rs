//! Prints a prediction as text.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use super::super::verdict::{self, command};
use crate::analysis::basis::{measured_share, number};
use crate::analysis::verdict::Verdict;
use crate::analysis::warnings::{self, Warning};
use crate::analysis::why;
use crate::predict::{Fit, Prediction};
use shardlab_plan::ir::AxisId;
use shardlab_plan::record::basis::milliseconds;
use shardlab_plan::record::{Cause, Clock, Run};
use shardlab_plan::units::{Bytes, Picos, count, short_count};
use shardlab_plan::{Program, Scenario};
use std::path::Path;

/// Minimum exposed time of a cause that is shown, milliseconds. Less would be rounded to 0.00.
const MIN_CAUSE_MS: f64 = 0.005;
/// Maximum number of estimated costs that are listed.
const MAX_ESTIMATED: usize = 4;
/// Maximum number of roles and units of the peak that are shown.
const MAX_COMPOSITION: usize = 5;

/// The first part of a prediction's report.
pub(super) struct Answer {
    pub(super) verdict: Verdict,
    pub(super) next: String,
    pub(super) warnings: Vec<Warning>,
}

impl Answer {
    /// Returns the answer for a scenario read from `path` with these overrides.
    pub(super) fn of(p: &Prediction, path: &Path, set: &[String]) -> Self {
        let verdict = Verdict::of(p);
        let warnings = warnings::located(p, path, set);
        Self {
            next: next(p, &verdict, &warnings, path, set),
            verdict,
            warnings,
        }
    }
}

/// Returns the one command or change to try next.
fn next(
    p: &Prediction,
    verdict: &Verdict,
    warnings: &[Warning],
    path: &Path,
    set: &[String],
) -> String {
    let explain = command("explain", path, set);
    let fix = warnings.iter().find(|w| !w.set.is_empty());
    match (&p.fit, fix) {
        (Fit::Exceeds { .. }, _) => format!("`{explain}` finds the smallest change that fits"),
        (Fit::Tight { .. }, _) => format!("`{explain}` finds changes that save memory"),
        (Fit::Fits, _) if verdict.is_narrow() => {
            format!("`{explain}` finds changes that save memory")
        }
        (_, Some(fix)) => {
            let settings: Vec<String> = fix.set.iter().map(|s| verdict::setting(s)).collect();
            format!(
                "`{}` removes the cause of the warning below",
                settings.join(" ")
            )
        }
        _ => format!("`{explain}` shows what takes the time and which options help"),
    }
}

pub(super) fn print(p: &Prediction, answer: &Answer, out: &mut Out) -> Result<(), Failure> {
    out.heading(predicted_heading(p))?;
    verdict::print(&answer.verdict, &answer.next, &answer.warnings, out)?;
    time(p, out)?;
    memory(p, out)?;
    costs(p, out)?;
    collectives(&p.run, out)?;
    out.blank()?;
    for sentence in why::details(p) {
        out.paragraph(0, &sentence)?;
    }
    Ok(())
}

/// Describes the predicted scenario and the basis of the prediction:
/// `…, 4 x h200-nvlink (measured, ± 5.8 %)`.
pub(in crate::cli) fn predicted_heading(p: &Prediction) -> String {
    let heading = heading(&p.scenario, &p.program, &p.run.hardware);
    let Some(basis) = &p.run.basis else {
        return heading;
    };
    let word = basis.kind.word();
    match basis.step_error() {
        Some(error) => format!("{heading} ({word}, {error})"),
        None => format!("{heading} ({word}, error unknown)"),
    }
}

/// Describes what is run: model, policy, sharding and ranks.
pub(in crate::cli) fn heading(scenario: &Scenario, program: &Program, hardware: &str) -> String {
    let m = &program.meta;
    let parameters = program.meta.parameters;
    let size = |axis| m.mesh.size(axis);
    let data = if size(AxisId::DP_OUTER) > 1 {
        format!("{} x {}", size(AxisId::DP_OUTER), size(AxisId::DP_SHARD))
    } else {
        size(AxisId::DP_SHARD).to_string()
    };
    let experts = match size(AxisId::EP) {
        1 => String::new(),
        ep => format!(" (ep {ep})"),
    };
    let mesh = data + &experts + &m.mesh.model_axes_text();
    let parts = [
        (parameters.active, "active"),
        (parameters.trainable, "trainable"),
    ];
    let parts: Vec<String> = (parts.iter())
        .filter(|(some, _)| *some != parameters.total)
        .map(|(some, word)| format!("{} {word}", short_count(*some)))
        .collect();
    let parts = match parts.is_empty() {
        true => String::new(),
        false => format!(" ({})", parts.join(", ")),
    };
    format!(
        "{}: {} parameters{parts}, {} {}, {mesh} x {hardware}",
        scenario.name,
        short_count(parameters.total),
        m.policy,
        scenario.sharding(),
    )
}

fn time(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let summary = p.run.summary();
    let basis = p.run.basis.as_ref();
    let shown = |x: f64, decimals: usize| number(x, decimals, basis);
    let unit = p.scenario.model.family.counted_in();
    let mut step = format!(
        "{} ms   {} {}   MFU {} %   {} {}/GPU/step",
        shown(summary.step_ms.median, 2),
        shown(summary.tokens_per_s_per_gpu, 0),
        unit.rate(),
        shown(100.0 * p.run.mfu, 1),
        count(p.run.tokens),
        unit.name()
    );
    if summary.step_ms.samples.len() > 1 {
        step += &format!(
            "   mean {}, p95 {} of {} samples",
            shown(summary.step_ms.mean, 2),
            shown(summary.step_ms.p95, 2),
            summary.step_ms.samples.len()
        );
    }
    out.labelled("step", &step)?;
    // The prediction is for a different machine than the one in the heading.
    if let Some(parts) = p.run.environment.get("slower") {
        out.labelled("slower", &format!("{parts} times the profile's times"))?;
    }
    if let Some(ranks) = p.run.environment.get("stragglers") {
        out.labelled("straggler", &stragglers(ranks))?;
    }
    let total = p.run.exposed_total();
    let mut causes: Vec<(&Cause, &Picos)> = p
        .run
        .exposed
        .iter()
        .filter(|(_, t)| t.ms() >= MIN_CAUSE_MS)
        .collect();
    causes.sort_by(|a, b| b.1.cmp(a.1));
    let causes: Vec<String> = causes
        .iter()
        .map(|(c, t)| format!("{} {}", c.name(), shown(t.ms(), 2)))
        .collect();
    let of_step = 100.0 * total.ms() / summary.step_ms.median;
    let mut exposed = format!(
        "{} ms ({of_step:.1} %) with the compute stream idle",
        shown(total.ms(), 2)
    );
    if !causes.is_empty() {
        exposed += &format!(": {}", causes.join(", "));
    }
    out.labelled("exposed", &exposed)?;
    let host = format!("{} ms/step of CPU launch work", shown(p.run.host.ms(), 2));
    out.labelled("host", &host)?;
    if let Some(clock) = clock(&p.run) {
        out.labelled("clock", &clock)?;
    }
    Ok(())
}

/// Formats `5=1.3` as `rank 5 is 1.3x slower`.
fn stragglers(ranks: &str) -> String {
    let words = ranks
        .split(',')
        .map(|rank| match rank.trim().split_once('=') {
            Some((rank, factor)) => format!("rank {rank} is {factor}x slower"),
            None => rank.trim().to_owned(),
        });
    words.collect::<Vec<_>>().join(", ")
}

/// Returns the cost of the device's power limit, if the profile has one.
fn clock(run: &Run) -> Option<String> {
    let clock = Clock::from_environment(&run.environment)?;
    let share = 100.0 * clock.arithmetic_share;
    let longer = 100.0 * (clock.arithmetic_factor - 1.0);
    let float8 = clock
        .float8_factor
        .filter(|&f| f != clock.arithmetic_factor);
    let float8 = float8.map_or(String::new(), |f| {
        format!(", 8-bit matmuls {:.1} %", 100.0 * (f - 1.0))
    });
    Some(if longer > 0.0 {
        format!(
            "matmuls and attention, {share:.0} % of the step, run {longer:.1} % slower at the power limit{float8}"
        )
    } else {
        format!("full speed: matmuls and attention take {share:.0} % of the step")
    })
}

fn memory(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let m = &p.run.memory;
    let capacity = m.capacity.map(|c| format!(" of {c}")).unwrap_or_default();
    out.labelled(
        "memory",
        &format!(
            "allocated {}, reserved {}, device {}{capacity}",
            m.peak_allocated, m.peak_reserved, m.peak_device
        ),
    )?;
    let host = p.host_state();
    if host.0 > 0 {
        let node = Bytes(host.0 * p.ranks_per_node());
        out.labelled(
            "host RAM",
            &format!("{host} per GPU, {node} per node, for the state of fsdp.offload"),
        )?;
    }
    let at = &m.at;
    out.labelled(
        "peak",
        &format!(
            "{} of {}, step {}, micro-batch {}; {} persistent",
            at.phase.name(),
            p.program.units[at.unit.index()].name,
            at.step,
            at.micro_batch,
            m.persistent
        ),
    )?;
    let roles = m.by_role.iter().map(|(r, b)| (r.name(), *b));
    out.labelled("", &composition(roles))?;
    Ok(())
}

/// Formats the largest parts and the sum of the rest.
pub(in crate::cli) fn composition<'a>(parts: impl Iterator<Item = (&'a str, Bytes)>) -> String {
    let parts: Vec<(&str, Bytes)> = parts.collect();
    let (shown, rest) = parts.split_at(parts.len().min(MAX_COMPOSITION));
    let mut words: Vec<String> = shown.iter().map(|(n, b)| format!("{n} {b}")).collect();
    let rest: Bytes = rest.iter().map(|(_, b)| *b).sum();
    if rest.0 > 0 {
        words.push(format!("other {rest}"));
    }
    words.join(", ")
}

fn costs(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let Some(share) = measured_share(p) else {
        return Ok(());
    };
    let costs = &p.run.costs;
    let mut text = format!("{:.0} % measured kernel times", 100.0 * share);
    let names: Vec<String> = costs
        .modelled_by_name
        .iter()
        .take(MAX_ESTIMATED)
        .map(|(n, t)| format!("{n} {}", milliseconds(t.ms(), p.run.basis.as_ref())))
        .collect();
    if !names.is_empty() {
        text += &format!("; estimated: {}", names.join(", "));
        if costs.modelled_by_name.len() > MAX_ESTIMATED {
            text += ", …";
        }
    }
    out.labelled("basis", &text)?;
    Ok(())
}

/// Prints the collectives of a step. `exposed` is time during which the compute stream is idle,
/// whatever it waits for. The time during which collectives do not overlap with compute is a
/// different quantity with a different name.
pub(in crate::cli) fn collectives(run: &Run, out: &mut Out) -> Result<(), Failure> {
    let mut table = Table::new([
        "collective",
        ">count",
        ">bytes",
        ">busy ms",
        ">not overlapped ms",
        ">overlap matmuls",
    ]);
    let shown = |time: Picos| number(time.ms(), 2, run.basis.as_ref());
    for (kind, s) in &run.collectives {
        table.row([
            kind.name().to_owned(),
            count(s.count.into()),
            s.bytes.to_string(),
            shown(s.busy),
            shown(s.exposed),
            format!("{} of {}", s.overlapped_with_gemm, s.count),
        ]);
    }
    if !table.is_empty() {
        out.blank()?;
        out.text(table)?;
    }
    Ok(())
}
