//! An answer in words and rows, for the command line, reports and the dashboard.

use super::answer::{Answer, Proposal};
use crate::predict::Prediction;
use shardlab_plan::record::basis::number;
use shardlab_plan::units::{Bytes, signed};

/// Maximum number of characters of a value that are shown.
const VALUE: usize = 36;

/// Returns the name of the best settings, or of those that are closest to fitting.
#[must_use]
pub fn name(answer: &Answer) -> &'static str {
    if answer.found { "best" } else { "closest" }
}

/// Returns one row per number: its name, the current value, that of the best settings, and the
/// difference.
#[must_use]
pub fn compared(answer: &Answer, best: &Prediction) -> Vec<[String; 4]> {
    let (today, chosen) = (&answer.today.score, &answer.best.score);
    let rate = best.scenario.model.family.counted_in().rate();
    let basis = chosen.basis.as_ref();
    let gib = |bytes: Bytes| format!("{:.2}", bytes.gib());
    let percent =
        |before: f64, after: f64| format!("{} %", signed(100.0 * (after / before - 1.0), 1));
    let (a, b) = (&today.effect, &chosen.effect);
    let mut rows = Vec::new();
    for (label, before, after, decimals) in [
        ("ms per step", a.step_ms, b.step_ms, 2),
        (rate, a.tokens_per_s, b.tokens_per_s, 0),
        ("exposed ms", today.exposed_ms, chosen.exposed_ms, 2),
    ] {
        rows.push([
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
        rows.push([label.to_owned(), gib(before), gib(after), change]);
    }
    let fits = |p: &Proposal| if p.score.fits() { "yes" } else { "no" }.to_owned();
    rows.push([
        "fits".to_owned(),
        fits(&answer.today),
        fits(&answer.best),
        String::new(),
    ]);
    rows
}

/// Titles of the columns of [`changed`]. A leading `>` marks a column of numbers.
pub const CHANGED: [&str; 5] = ["option", "today", "best", ">share", "effect"];

/// Returns one row per changed option: its name, both values, its share of the gain, and its
/// effect.
#[must_use]
pub fn changed(answer: &Answer) -> Vec<[String; 5]> {
    let mut rows = Vec::new();
    for reason in &answer.reasons {
        for (i, changed) in reason.changed.iter().enumerate() {
            let share = reason.share.filter(|_| i == 0);
            let share = share.map_or_else(String::new, percent);
            let why = if i == 0 {
                reason.why.clone()
            } else {
                String::new()
            };
            rows.push([
                changed.key.clone(),
                shortened(&changed.from),
                shortened(&changed.to),
                share,
                why,
            ]);
        }
    }
    rows
}

/// Formats a share (0 to 1) of the gain. A change that saves no time has none.
fn percent(share: f64) -> String {
    match 100.0 * share {
        s if s <= 0.0 => String::new(),
        s if s < 0.5 => "<1 %".to_owned(),
        s => format!("{s:.0} %"),
    }
}

/// Returns the settings of a proposal on one line.
#[must_use]
pub fn settings(of: &Proposal) -> String {
    if of.set.is_empty() {
        return "today's settings".to_owned();
    }
    let all: Vec<String> = of.set.iter().map(|set| setting(set)).collect();
    all.join(" ")
}

/// Returns an override with a shortened value.
#[must_use]
pub fn setting(set: &str) -> String {
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

/// Describes what else is equally good, how good the best settings can be, and how many settings
/// were predicted.
#[must_use]
pub(crate) fn conclusions(answer: &Answer) -> Vec<String> {
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
        let compared = format!(
            "({} % time, {} % memory)",
            signed(slower, 1),
            signed(100.0 * (more - 1.0), 1)
        );
        all.push(match simpler.changes {
            0 => format!("Today's settings are as good within the error of the predictions {compared}."),
            _ => format!(
                "Simplest alternative within the error of the predictions, with {changes}: {} {compared}.",
                settings(simpler)
            ),
        });
    }
    let predicted = format!(
        "{} of {} combinations",
        answer.evaluated,
        count(answer.points)
    );
    let whole = format!("All {} combinations", count(answer.points));
    all.push(match (answer.exact, answer.gap(), answer.bound_ms) {
        (true, ..) => format!("{whole} were predicted. None is more than 0.5 % better."),
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

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn a_small_share_is_not_zero() {
        let all = [0.0, 0.004, 0.1, 1.0].map(percent);
        assert_eq!(all, ["", "<1 %", "10 %", "100 %"]);
    }
}
