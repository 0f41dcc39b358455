//! A prediction for people.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use crate::analysis::why;
use crate::predict::{Fit, Prediction};
use shardlab_plan::record::{Cause, Clock, Run};
use shardlab_plan::units::{Bytes, Picos, short_count};
use shardlab_plan::{Program, Scenario};

/// Names of modelled costs that are shown.
const MODELLED_SHOWN: usize = 4;
/// Roles and units of the peak that are shown.
const COMPOSITION_SHOWN: usize = 5;

pub(super) fn print(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    title(p, out)?;
    time(p, out)?;
    memory(p, out)?;
    costs(p, out)?;
    collectives(&p.run, out)?;
    out.blank()?;
    for sentence in why::sentences(p) {
        out.paragraph(0, &sentence)?;
    }
    Ok(())
}

fn title(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    out.heading(heading(&p.scenario, &p.program, &p.run.hardware))?;
    Ok(())
}

/// Names what is run: model, policy, sharding, ranks.
pub(in crate::cli) fn heading(scenario: &Scenario, program: &Program, hardware: &str) -> String {
    let m = &program.meta;
    let parameters: u64 = program.params.iter().map(|p| p.numel()).sum();
    let mesh = if m.dp_outer > 1 {
        format!("{} x {}", m.dp_outer, m.dp_shard)
    } else {
        m.dp_shard.to_string()
    };
    format!(
        "{}: {} parameters, {} {}, {mesh} x {hardware}",
        scenario.name,
        short_count(parameters),
        m.policy,
        scenario.sharding(),
    )
}

fn time(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let summary = p.run.summary();
    let unit = p.scenario.model.family.counted_in();
    let mut step = format!(
        "{:.2} ms   {:.0} {}   MFU {:.1} %   {} {} a GPU and step",
        summary.step_ms.median,
        summary.tokens_per_s_per_gpu,
        unit.rate(),
        100.0 * p.run.mfu,
        p.run.tokens,
        unit.name()
    );
    if summary.step_ms.samples.len() > 1 {
        step += &format!(
            "   mean {:.2}, p95 {:.2} of {}",
            summary.step_ms.mean,
            summary.step_ms.p95,
            summary.step_ms.samples.len()
        );
    }
    out.labelled("step", &step)?;
    // Prediction of another machine than the heading names.
    if let Some(parts) = p.run.environment.get("slower") {
        out.labelled("slower", &format!("{parts} times the profile's times"))?;
    }
    if let Some(ranks) = p.run.environment.get("stragglers") {
        out.labelled("late", &format!("ranks whose kernels take longer: {ranks}"))?;
    }
    let total = p.run.exposed_total();
    let mut causes: Vec<(&Cause, &Picos)> = p.run.exposed.iter().filter(|(_, t)| t.0 > 0).collect();
    causes.sort_by(|a, b| b.1.cmp(a.1));
    let causes: Vec<String> = causes
        .iter()
        .map(|(c, t)| format!("{} {:.2}", c.name(), t.ms()))
        .collect();
    let of_step = 100.0 * total.ms() / summary.step_ms.median;
    let mut exposed = format!("{:.2} ms ({of_step:.1} %)", total.ms());
    if !causes.is_empty() {
        exposed += &format!(" by cause: {}", causes.join(", "));
    }
    out.labelled("exposed", &exposed)?;
    let host = format!("{:.2} ms of work a step", p.run.host.ms());
    out.labelled("host", &host)?;
    if let Some(clock) = clock(&p.run) {
        out.labelled("clock", &clock)?;
    }
    Ok(())
}

/// What the device's power limit costs, where the profile knows of one.
fn clock(run: &Run) -> Option<String> {
    let clock = Clock::told(&run.environment)?;
    let share = 100.0 * clock.arithmetic_share;
    let longer = 100.0 * (clock.arithmetic_factor - 1.0);
    Some(if longer > 0.0 {
        format!(
            "products and attention, {share:.0} % of the step, take {longer:.1} % longer at the power limit"
        )
    } else {
        format!("full: products and attention take {share:.0} % of the step")
    })
}

fn memory(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let m = &p.run.memory;
    let verdict = match &p.fit {
        Fit::Fits => out.good("fits"),
        Fit::Tight { retries } => out.bad(format_args!("fits with {retries} allocator retries")),
        Fit::Exceeds { .. } => out.bad("does not fit"),
        Fit::Unknown => String::new(),
    };
    let capacity = m
        .capacity
        .map(|c| format!(" of {c}: {verdict}"))
        .unwrap_or_default();
    out.labelled(
        "memory",
        &format!(
            "allocated {}, reserved {}, device {}{capacity}",
            m.peak_allocated, m.peak_reserved, m.peak_device
        ),
    )?;
    let at = &m.at;
    out.labelled(
        "peak",
        &format!(
            "step {}, {} of {}, micro-batch {}; {} at rest between steps",
            at.step,
            at.phase.name(),
            p.program.units[at.unit.index()].name,
            at.micro_batch,
            m.persistent
        ),
    )?;
    let roles = m.by_role.iter().map(|(r, b)| (r.name(), *b));
    out.labelled("", &composition(roles))?;
    Ok(())
}

/// The largest parts and the rest.
pub(in crate::cli) fn composition<'a>(parts: impl Iterator<Item = (&'a str, Bytes)>) -> String {
    let parts: Vec<(&str, Bytes)> = parts.collect();
    let (shown, rest) = parts.split_at(parts.len().min(COMPOSITION_SHOWN));
    let mut words: Vec<String> = shown.iter().map(|(n, b)| format!("{n} {b}")).collect();
    let rest: Bytes = rest.iter().map(|(_, b)| *b).sum();
    if rest.0 > 0 {
        words.push(format!("other {rest}"));
    }
    words.join(", ")
}

fn costs(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let costs = &p.run.costs;
    let all = (costs.measured + costs.modelled).ms();
    if all == 0.0 {
        return Ok(());
    }
    let mut text = format!(
        "{:.0} % of busy time from measured tables",
        100.0 * costs.measured.ms() / all
    );
    let names: Vec<String> = costs
        .modelled_by_name
        .iter()
        .take(MODELLED_SHOWN)
        .map(|(n, t)| format!("{n} {:.2} ms", t.ms()))
        .collect();
    if !names.is_empty() {
        text += &format!("; modelled: {}", names.join(", "));
        if costs.modelled_by_name.len() > MODELLED_SHOWN {
            text += ", …";
        }
    }
    out.labelled("costs", &text)?;
    Ok(())
}

pub(in crate::cli) fn collectives(run: &Run, out: &mut Out) -> Result<(), Failure> {
    let mut table = Table::new([
        "collective",
        ">count",
        ">bytes",
        ">busy ms",
        ">exposed ms",
        ">overlapped with gemm",
    ]);
    for (kind, s) in &run.collectives {
        table.row([
            kind.name().to_owned(),
            s.count.to_string(),
            s.bytes.to_string(),
            format!("{:.2}", s.busy.ms()),
            format!("{:.2}", s.exposed.ms()),
            s.overlapped_with_gemm.to_string(),
        ]);
    }
    if !table.is_empty() {
        out.blank()?;
        out.text(table)?;
    }
    Ok(())
}
