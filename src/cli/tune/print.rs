//! The answer as text: verdict, changes with reasons, front, alternatives.

use super::super::output::{Failure, Out, Status};
use super::super::sim::report::predicted_heading;
use super::super::subject::Subject;
use super::super::table::Table;
use super::super::verdict;
use super::{Job, json};
use crate::analysis::verdict::Verdict;
use crate::predict::Prediction;
use crate::tune::{Answer, Fewest, Largest, Proposal, Size, words};
use serde_json::json;
use shardlab_plan::record::basis::number;
use shardlab_plan::units::count;

/// Titles of the tables.
pub(super) const CHANGES: &str = "Changes, and what undoing each one alone would cost";
pub(super) const FRONT: &str = "Pareto front of step time and reserved memory";
pub(super) const FRONT_HEAD: [&str; 3] = [">ms", ">GiB", "changes"];

/// Number of rows of the front that are shown.
const FRONT_ROWS: usize = 12;

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
    let set = job.overrides(&answer.best.set);
    verdict::print(verdict, next, &job.subject.warnings(best, &set), out)?;
    for set in job.fixed(answer) {
        out.labelled("fixed", &words::setting(set))?;
    }
    if let Some(fewest) = &job.fewest {
        out.labelled("GPUs", &gpus(fewest))?;
    }
    comparison(answer, best, out)?;
    changes(answer, out)?;
    if answer.found {
        front(answer, out)?;
    }
    out.blank()?;
    for sentence in words::conclusions(answer) {
        out.paragraph(0, &sentence)?;
    }
    Ok(())
}

/// Describes the smallest number of GPUs.
pub(super) fn gpus(fewest: &Fewest) -> String {
    let [today, least] = fewest.gpus;
    let [before, after] = fewest.samples;
    let samples = if before == after {
        format!("{} samples per step, as today", count(after))
    } else {
        format!(
            "{} samples per step, today {}, because {} GPUs cannot share {} evenly",
            count(after),
            count(before),
            count(least),
            count(before)
        )
    };
    format!(
        "{} are the fewest that fit, today {}; {samples}",
        count(least),
        count(today)
    )
}

/// Prints the current settings next to the best ones.
fn comparison(answer: &Answer, best: &Prediction, out: &mut Out) -> Result<(), Failure> {
    let head = comparison_head(answer);
    let mut table = Table::new(head.each_ref().map(String::as_str));
    for row in words::compared(answer, best) {
        table.row(row);
    }
    out.blank()?;
    out.text(table)?;
    Ok(())
}

/// Returns the titles of the columns of [`words::compared`].
pub(super) fn comparison_head(answer: &Answer) -> [String; 4] {
    let best = format!(">{}", words::name(answer));
    [
        String::new(),
        ">today".to_owned(),
        best,
        ">difference".to_owned(),
    ]
}

/// Prints a row per changed option, with the reason and its share of the gain.
fn changes(answer: &Answer, out: &mut Out) -> Result<(), Failure> {
    if answer.reasons.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading(CHANGES)?;
    let mut table = Table::new(words::CHANGED);
    for row in words::changed(answer) {
        table.row(row);
    }
    out.text(table)?;
    Ok(())
}

/// Prints the Pareto front.
fn front(answer: &Answer, out: &mut Out) -> Result<(), Failure> {
    out.blank()?;
    out.heading(FRONT)?;
    let mut table = Table::new(FRONT_HEAD);
    // A long front is reduced to an even selection that includes both ends.
    let count = answer.front.len();
    let shown = (0..count.min(FRONT_ROWS)).map(|i| match count.min(FRONT_ROWS) {
        1 => 0,
        rows => i * (count - 1) / (rows - 1),
    });
    for point in shown.map(|i| &answer.front[i]) {
        table.row(front_row(point));
    }
    out.text(table)?;
    Ok(())
}

/// Returns the step time, the memory and the settings of a point of the front.
pub(super) fn front_row(point: &Proposal) -> [String; 3] {
    let effect = &point.score.effect;
    [
        number(effect.step_ms, 2, point.score.basis.as_ref()),
        format!("{:.2}", effect.peak_reserved.gib()),
        words::settings(point),
    ]
}

/// Describes how to continue with settings that differ from the job's.
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

/// Prints the longest sequences or the largest micro-batches.
pub(super) fn largest(
    job: &Job,
    size: Size,
    found: &Largest,
    as_json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    let (field, unit) = match size {
        Size::Sequence => ("longest", "tokens"),
        Size::MicroBatch => ("largest", "samples"),
    };
    if as_json {
        let lean = found.lean.as_ref();
        out.json(&json!({
            "format": 1,
            "today": found.today,
            (field): lean.map(|(n, set, score)| json!({
                (unit): n,
                "settings": json::proposal(job, &Proposal {
                    set: set.clone(), changes: set.len(), score: score.clone(),
                }),
            })),
        }))?;
    } else {
        let limit = match size {
            Size::Sequence => job.load(&[]).map(|base| base.model.max_seq_len).ok(),
            Size::MicroBatch => None,
        };
        let sized = |n: Option<u64>| match n {
            None => "nothing fits".to_owned(),
            Some(n) if Some(n) == limit => format!("{} {unit} (the model's limit)", count(n)),
            Some(1) => format!("1 {}", unit.trim_end_matches('s')),
            Some(n) => format!("{} {unit}", count(n)),
        };
        out.labelled(
            "today",
            &format!("{} with today's settings", sized(found.today)),
        )?;
        let lean = found.lean.as_ref();
        out.labelled(
            "leanest",
            &format!(
                "{} with the settings that need the least memory",
                sized(lean.map(|l| l.0))
            ),
        )?;
        if let Some((_, set, score)) = lean {
            if !set.is_empty() {
                let all: Vec<String> = set.iter().map(|s| words::setting(s)).collect();
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
