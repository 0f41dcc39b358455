//! Prints the result of `import` as text.

mod snapshot;

use super::super::output::{Failure, Out};
use super::super::table::Table;
use super::units;
use shardlab_import::flight::{Divergence, FlightReport, ProgramCheck, list};
use shardlab_import::{Import, RunImport, Structure};
use shardlab_plan::record::{Cause, awaited_units};
use shardlab_plan::units::{count, thousands};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Maximum number of unmatched names and shares that are listed.
const MAX_LISTED: usize = 8;

pub(super) fn all(import: &Import, out: &mut Out) -> Result<(), Failure> {
    let mut first = true;
    let mut apart = |out: &mut Out| -> Result<(), Failure> {
        if !std::mem::take(&mut first) {
            out.blank()?;
        }
        Ok(())
    };
    if let Some(imported) = &import.run {
        apart(out)?;
        run(imported, out)?;
    }
    for (path, structure) in &import.structure {
        apart(out)?;
        execution(path, structure, out)?;
    }
    for (path, devices) in &import.snapshots {
        for device in devices {
            apart(out)?;
            snapshot::print(path, device, out)?;
        }
    }
    if let Some(report) = &import.flight {
        apart(out)?;
        flight(report, out)?;
    }
    Ok(())
}

fn run(import: &RunImport, out: &mut Out) -> Result<(), Failure> {
    let r = &import.measured.run;
    let ranks = import.ranks.len();
    out.heading(format_args!(
        "{}: {} of {} on {}",
        r.scenario,
        plural(ranks, "rank"),
        r.world_size,
        if r.hardware.is_empty() {
            "an unknown device"
        } else {
            &r.hardware
        }
    ))?;
    let steps = r.step_samples.len();
    let step = if steps == 0 {
        "not determined: the trace contains no complete step".to_owned()
    } else {
        format!(
            "{} ms, median of {}, by {}",
            thousands(r.step_ms(), 2),
            plural(steps, "step"),
            import.steps_by
        )
    };
    out.labelled("step", &step)?;
    let causes: Vec<String> = r
        .exposed
        .iter()
        .filter(|(_, t)| t.0 > 0)
        .map(|(c, t): (&Cause, _)| format!("{} {}", c.name(), t.show_ms(2)))
        .collect();
    if !causes.is_empty() {
        out.labelled(
            "exposed",
            &format!(
                "{} ms ({})",
                r.exposed_total().show_ms(2),
                causes.join(", ")
            ),
        )?;
    }
    if r.memory.is_recorded() {
        out.labelled(
            "memory",
            &format!(
                "allocated {}, reserved {} at most",
                r.memory.peak_allocated, r.memory.peak_reserved
            ),
        )?;
    }
    out.labelled("units", &awaited_units(&units(import)))?;
    out.labelled("options", &options(&import.facts))?;
    out.labelled(
        "placed",
        &format!(
            "{:.2} % of the device time, {} events",
            100.0 * import.attributed_share,
            count(import.events)
        ),
    )?;
    if !import.unmatched.is_empty() {
        out.labelled("unmatched", &unmatched(&import.unmatched))?;
    }
    if ranks > 1 {
        let mut table = Table::new(["rank", "step ms", "waited for, ms in all steps", "file"]);
        for rank in &import.ranks {
            table.row([
                rank.rank.to_string(),
                rank.step_ms
                    .map_or_else(|| "n/a".into(), |ms| thousands(ms, 2)),
                thousands(rank.late_ms, 2),
                rank.file.clone(),
            ]);
        }
        out.blank()?;
        out.text(table)?;
    }
    remarks(&import.undetermined, &import.notes, out)
}

fn remarks(undetermined: &[String], notes: &[String], out: &mut Out) -> Result<(), Failure> {
    if !undetermined.is_empty() {
        out.blank()?;
        out.heading("Not determined")?;
        for text in undetermined {
            out.paragraph(2, text)?;
        }
    }
    if !notes.is_empty() {
        out.blank()?;
        out.heading("Notes")?;
        for text in notes {
            out.paragraph(2, text)?;
        }
    }
    Ok(())
}

fn options(facts: &shardlab_import::facts::Facts) -> String {
    let inferred = shardlab_import::infer::infer(facts, "", None).text;
    let wanted = [
        "policy",
        "strategy",
        "reshard_after_forward",
        "prefetch_forward",
        "prefetch_backward",
        "recompute",
        "grad_accum",
        "param_dtype",
        "reduce_dtype",
        "mode",
        "clip_norm",
    ];
    let lines = inferred.lines().filter_map(|line| {
        let (pair, _) = line.split_once(" #")?;
        let (key, value) = pair.trim().split_once(" = ")?;
        wanted
            .contains(&key)
            .then(|| format!("{key} {}", value.trim_matches('"')))
    });
    lines.collect::<Vec<_>>().join(", ")
}

fn unmatched(all: &BTreeMap<String, (u64, u64)>) -> String {
    let mut list: Vec<(&String, &(u64, u64))> = all.iter().collect();
    list.sort_by_key(|(_, (n, time))| std::cmp::Reverse((*time, *n)));
    let events: u64 = all.values().map(|u| u.0).sum();
    let shown: Vec<String> = list
        .iter()
        .take(MAX_LISTED)
        .map(|(name, (n, time))| {
            format!(
                "{name} {} ({} ms)",
                count(*n),
                thousands(*time as f64 / 1e6, 2)
            )
        })
        .collect();
    let more = list.len().saturating_sub(MAX_LISTED);
    let rest = if more > 0 {
        format!(", and {more} other names")
    } else {
        String::new()
    };
    format!("{} events: {}{rest}", count(events), shown.join(", "))
}

fn execution(path: &Path, structure: &Structure, out: &mut Out) -> Result<(), Failure> {
    out.heading(format_args!(
        "{}: execution trace of {} operators, without times",
        path.display(),
        count(structure.operators)
    ))?;
    let units: Vec<&str> = structure
        .facts
        .units
        .iter()
        .map(|u| u.name.as_str())
        .collect();
    if !units.is_empty() {
        out.labelled("units", &awaited_units(&units))?;
    }
    out.labelled("options", &options(&structure.facts))?;
    Ok(())
}

fn flight(report: &FlightReport, out: &mut Out) -> Result<(), Failure> {
    let collectives = report.ranks.values().max().copied().unwrap_or(0);
    out.heading(format_args!(
        "Flight records of {}, up to {} collectives each",
        plural(report.ranks.len(), "rank"),
        count(collectives as u64)
    ))?;
    match &report.divergence {
        None => {
            let messages = match report.messages {
                0 => String::new(),
                n => format!(" and {}", plural(n as usize, "message")),
            };
            let matched = count(report.matched);
            let text = format!("agree in all {matched} collectives{messages} that can be compared");
            out.labelled("ranks", &text)?;
        }
        Some(found) => diverged(found, report, out)?,
    }
    // What happened in other process groups, mostly because their ranks wait for the rank above.
    let others = report.divergences.get(1..).unwrap_or_default();
    for (i, other) in others.iter().take(MAX_LISTED).enumerate() {
        out.labelled(if i == 0 { "also" } else { "" }, &other.brief())?;
    }
    if others.len() > MAX_LISTED {
        let rest = plural(others.len() - MAX_LISTED, "other divergence");
        out.labelled("", &rest)?;
    }
    for check in &report.program {
        program(check, out)?;
    }
    remarks(&[], &report.notes, out)
}

fn diverged(found: &Divergence, report: &FlightReport, out: &mut Out) -> Result<(), Failure> {
    let collective = |title: &str, group: &str, sequence: u64| {
        format!(
            "{title}: number {sequence} of process group {group}, after {} that agree",
            count(report.matched)
        )
    };
    let states = |ranks: &BTreeMap<u32, String>| ranks.clone().into_iter().collect();
    let none = BTreeSet::new();
    let (text, rows, unknown): (String, Vec<(u32, String)>, _) = match found {
        Divergence::Different {
            group,
            sequence,
            ranks,
        } => {
            let title = "ranks issue different collectives";
            (collective(title, group, *sequence), states(ranks), &none)
        }
        Divergence::Missing {
            group,
            sequence,
            issued,
            missing,
            unknown,
        } => {
            let title = "some ranks do not issue a collective";
            let missing = missing
                .iter()
                .map(|(r, last)| (*r, format!("none; its last is {last}")));
            let rows = issued.clone().into_iter().chain(missing).collect();
            (collective(title, group, *sequence), rows, unknown)
        }
        Divergence::Incomplete {
            group,
            sequence,
            ranks,
            unknown,
        } => {
            let title = "a collective does not complete";
            (collective(title, group, *sequence), states(ranks), unknown)
        }
        Divergence::Message {
            group,
            sequence,
            reason,
            ranks,
            unknown,
        } => {
            let text = format!(
                "a point-to-point message {reason}: number {sequence} of its two ranks in process group {group}"
            );
            (text, states(ranks), unknown)
        }
    };
    out.labelled("diverge", &text)?;
    for (rank, text) in rows {
        out.labelled(&format!("rank {rank}"), &text)?;
    }
    if !unknown.is_empty() {
        let text = format!("no record of {}; the others may wait for it", list(unknown));
        out.labelled("unknown", &text)?;
    }
    Ok(())
}

/// Prints how far a record follows a program.
fn program(check: &ProgramCheck, out: &mut Out) -> Result<(), Failure> {
    out.labelled(
        &format!("rank {}", check.rank),
        &format!(
            "{} match the program ({} per step), after {} others",
            plural(check.matched, "collective"),
            check.step,
            check.before
        ),
    )?;
    if check.skipped > 0 {
        let skipped = plural(check.skipped, "other collective");
        out.labelled("", &format!("{skipped} between them, such as barriers"))?;
    }
    if let Some(found) = &check.unexpected {
        out.labelled(
            "",
            &format!(
                "then number {} of process group {} is not in the program: {}",
                found.sequence, found.group, found.issued
            ),
        )?;
    }
    out.labelled("", &format!("the program issues {} there", check.next))?;
    Ok(())
}

fn plural(n: usize, what: &str) -> String {
    if n == 1 {
        format!("{n} {what}")
    } else {
        format!("{} {what}s", count(n as u64))
    }
}
