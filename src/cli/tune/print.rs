//! The answer as text: verdict, changes with reasons, front, alternatives.

use super::super::output::{Failure, Out, Status};
use super::super::sim::report::predicted_heading;
use super::super::subject::Subject;
use super::super::table::Table;
use super::super::verdict;
use super::{Job, json};
use crate::analysis::verdict::Verdict;
use crate::analysis::warnings;
use crate::predict::Prediction;
use crate::tune::{Answer, Longest, Proposal};
use serde_json::json;
use shardlab_plan::record::basis::number;
use shardlab_plan::units::{Bytes, signed};

/// Rows of the front that are shown.
const FRONT: usize = 12;
/// Characters of a value that are shown.
const VALUE: usize = 36;

/// Prints an answer.
pub(super) fn answer(
    job: &Job,
    answer: &Answer,
    best: &Prediction,
    verdict: &Verdict,
    next: &str,
    out: &mut Out,
) -> Result<(), Failure> {
    out.heading(predicted_heading(best))?;
    verdict::print(verdict, next, &warnings::of(best), out)?;
    for set in job.kept.overrides.iter().chain(&job.mesh) {
        out.labelled("fixed", &short(set))?;
    }
    comparison(answer, best, out)?;
    changes(answer, out)?;
    if answer.found {
        front(answer, out)?;
    }
    out.blank()?;
    for sentence in conclusions(answer) {
        out.paragraph(0, &sentence)?;
    }
    Ok(())
}

/// Prints today's settings next to the best ones.
fn comparison(answer: &Answer, best: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let (today, chosen) = (&answer.today.score, &answer.best.score);
    let rate = best.scenario.model.family.counted_in().rate();
    let basis = chosen.basis.as_ref();
    let gib = |bytes: Bytes| format!("{:.2}", bytes.gib());
    let name = if answer.found { "best" } else { "closest" };
    let mut table = Table::new(["", ">today", &format!(">{name}"), ">difference"]);
    let percent =
        |before: f64, after: f64| format!("{} %", signed(100.0 * (after / before - 1.0), 1));
    let (a, b) = (&today.effect, &chosen.effect);
    for (label, before, after, decimals) in [
        ("ms per step", a.step_ms, b.step_ms, 2),
        (rate, a.tokens_per_s, b.tokens_per_s, 0),
        ("exposed ms", today.exposed_ms, chosen.exposed_ms, 2),
    ] {
        table.row([
            label.to_owned(),
            number(before, decimals, basis),
            number(after, decimals, basis),
            if before > 0.0 {
                percent(before, after)
            } else {
                String::new()
            },
        ]);
    }
    for (label, before, after) in [
        ("GiB reserved", a.peak_reserved, b.peak_reserved),
        ("GiB allocated", a.peak_allocated, b.peak_allocated),
    ] {
        let change = percent(before.0 as f64, after.0 as f64);
        table.row([label.to_owned(), gib(before), gib(after), change]);
    }
    let fits = |p: &Proposal| if p.score.fits() { "yes" } else { "no" }.to_owned();
    table.row([
        "fits".to_owned(),
        fits(&answer.today),
        fits(&answer.best),
        String::new(),
    ]);
    out.blank()?;
    out.text(table)?;
    Ok(())
}

/// Prints a row per changed option, with the reason and its share of the gain.
fn changes(answer: &Answer, out: &mut Out) -> Result<(), Failure> {
    if answer.reasons.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading("Changes: what each does, compared with undoing it alone")?;
    let mut table = Table::new(["option", "today", "best", ">share", "effect"]);
    for reason in &answer.reasons {
        for (i, changed) in reason.changed.iter().enumerate() {
            let share = reason.share.filter(|_| i == 0);
            let share = share.map_or_else(String::new, |s| format!("{:.0} %", 100.0 * s));
            let why = if i == 0 {
                reason.why.clone()
            } else {
                String::new()
            };
            table.row([
                changed.key.clone(),
                shortened(&changed.from),
                shortened(&changed.to),
                share,
                why,
            ]);
        }
    }
    out.text(table)?;
    Ok(())
}

/// Prints the Pareto front.
fn front(answer: &Answer, out: &mut Out) -> Result<(), Failure> {
    out.blank()?;
    out.heading("Pareto front of step time and reserved memory")?;
    let mut table = Table::new([">ms", ">GiB", "changes"]);
    // An even selection of a long front, with both ends.
    let count = answer.front.len();
    let shown = (0..count.min(FRONT)).map(|i| match count.min(FRONT) {
        1 => 0,
        rows => i * (count - 1) / (rows - 1),
    });
    for point in shown.map(|i| &answer.front[i]) {
        let effect = &point.score.effect;
        table.row([
            number(effect.step_ms, 2, point.score.basis.as_ref()),
            format!("{:.2}", effect.peak_reserved.gib()),
            settings(point),
        ]);
    }
    out.text(table)?;
    Ok(())
}

/// Returns the settings of a proposal on one line.
fn settings(of: &Proposal) -> String {
    if of.set.is_empty() {
        return "today's settings".to_owned();
    }
    let all: Vec<String> = of.set.iter().map(|set| short(set)).collect();
    all.join(" ")
}

fn short(set: &str) -> String {
    match set.split_once('=') {
        Some((key, value)) => format!("{key}={}", shortened(value)),
        None => set.to_owned(),
    }
}

/// Shortens a long value, such as a list of 40 units.
fn shortened(value: &str) -> String {
    if value.chars().count() <= VALUE {
        return value.to_owned();
    }
    let first: String = value.chars().take(VALUE - 2).collect();
    let items = value.matches(',').count() + 1;
    format!("{first}… ({items} items)")
}

/// Says what else is as good, how good the best settings can be, and how many were predicted.
fn conclusions(answer: &Answer) -> Vec<String> {
    let mut all = Vec::new();
    let best = &answer.best.score;
    if !answer.found && !best.fits() {
        let missing = Bytes(best.slack.unsigned_abs());
        all.push(format!(
            "No settings fit. Those that come closest lack {missing}: {}.",
            settings(&answer.best)
        ));
    }
    if let Some(simpler) = &answer.simpler {
        let slower = 100.0 * (simpler.score.effect.step_ms / best.effect.step_ms - 1.0);
        let more = 1.0 - simpler.score.effect.saves(&best.effect);
        let changes = match simpler.changes {
            1 => "1 change".to_owned(),
            n => format!("{n} changes"),
        };
        all.push(format!(
            "Simplest alternative within the error of the predictions, with {changes}: {} ({} % time, {} % memory).",
            settings(simpler),
            signed(slower, 1),
            signed(100.0 * (more - 1.0), 1)
        ));
    }
    let predicted = format!(
        "{} of {} combinations",
        answer.evaluated,
        count(answer.points)
    );
    all.push(match (answer.exact, answer.gap(), answer.bound_ms) {
        (true, ..) => format!("All {predicted} were predicted: nothing in this space is better by more than 0.5 %."),
        (false, Some(gap), Some(bound)) => format!(
            "{predicted} were predicted. No step within the limits is shorter than {} ms (bound): gap {:.1} %.",
            number(bound, 2, best.basis.as_ref()),
            100.0 * gap
        ),
        _ => format!("{predicted} were predicted."),
    });
    all
}

/// Formats a number of combinations.
fn count(points: u64) -> String {
    if points < 1_000_000 {
        points.to_string()
    } else {
        format!("{:.0e}", points as f64)
    }
}

/// Says how to continue with settings that differ from the job's.
pub(super) fn next(job: &Job, set: &[String]) -> String {
    match &job.subject {
        Subject::Scenario { path, set: own } => {
            let all = [&own[..], set].concat();
            format!("`{}`", verdict::command("sim", path, &all))
        }
        Subject::Job { .. } => {
            "`--emit job` shows these settings as a diff of the configuration".to_owned()
        }
    }
}

/// Prints the longest sequences.
pub(super) fn longest(
    job: &Job,
    found: &Longest,
    as_json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    if as_json {
        let lean = found.lean.as_ref();
        out.json(&json!({
            "format": 1,
            "today": found.today,
            "longest": lean.map(|(tokens, set, score)| json!({
                "tokens": tokens,
                "settings": json::proposal(job, &Proposal {
                    set: set.clone(), changes: set.len(), score: score.clone(),
                }),
            })),
        }))?;
    } else {
        let tokens =
            |n: Option<u64>| n.map_or("no length fits".to_owned(), |n| format!("{n} tokens"));
        out.labelled("today's", &format!("settings: {}", tokens(found.today)))?;
        let lean = found.lean.as_ref();
        out.labelled(
            "leanest",
            &format!("settings: {}", tokens(lean.map(|l| l.0))),
        )?;
        if let Some((_, set, score)) = lean {
            if !set.is_empty() {
                let all: Vec<String> = set.iter().map(|s| short(s)).collect();
                out.labelled("", &all.join(" "))?;
            }
            let effect = &score.effect;
            let reserved = effect.peak_reserved;
            out.labelled(
                "",
                &format!(
                    "{} ms per step, {reserved} reserved",
                    number(effect.step_ms, 2, score.basis.as_ref())
                ),
            )?;
        }
    }
    Ok(match (found.today, &found.lean) {
        (None, None) => Status::CheckFailed,
        _ => Status::Done,
    })
}
