//! The reason for each change in the answer: the effect of undoing it alone.

use super::evaluate::{Evaluator, Scored};
use super::score::Score;
use super::space::{Choice, Point};
use serde_json::Value;
use shardlab_plan::scenario::{json_path_of, keys};
use shardlab_plan::units::Bytes;

/// An option with another value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Key.
    pub key: String,
    /// The current value.
    pub from: String,
    /// Value in the best settings.
    pub to: String,
}

/// Reason for a change in the best settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Reason {
    /// Options.
    pub changed: Vec<Changed>,
    /// The effect of the change, compared with undoing it alone.
    pub why: String,
    /// Its share of the time that all changes save, each alone (0 to 1); `None` if none saves time.
    pub share: Option<f64>,
}

/// Share of the step time below which a difference is not mentioned.
const MENTIONED: f64 = 0.001;

/// Returns one reason per change, largest gain first.
pub(super) fn reasons(eval: &Evaluator<'_>, best: &Scored) -> Vec<Reason> {
    let axes: Vec<usize> = best.0.changed().collect();
    let undone: Vec<Point> = axes.iter().map(|axis| best.0.with(*axis, 0)).collect();
    eval.all(undone.clone());
    let options = serde_json::to_value(&eval.space.base).unwrap_or_default();
    let without: Vec<Option<Score>> = undone.iter().map(|p| eval.score(p)).collect();
    let gain = |score: &Option<Score>| {
        let fitting = score.as_ref().filter(|s| s.fits());
        fitting.map_or(0.0, |s| (s.effect.step_ms - best.1.effect.step_ms).max(0.0))
    };
    let total: f64 = without.iter().map(gain).sum();
    let mut all: Vec<(f64, Reason)> = axes
        .iter()
        .zip(&without)
        .map(|(axis, without)| {
            let choice = &eval.space.axes[*axis].choices[usize::from(best.0.0[*axis])];
            let gain = gain(without);
            let reason = Reason {
                changed: changed(eval, choice, &options),
                why: why(without.as_ref(), &best.1),
                share: (total > 0.0).then_some(gain / total),
            };
            (gain, reason)
        })
        .collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    all.into_iter().map(|(_, reason)| reason).collect()
}

/// Returns the options of a choice that differ from the job's, with their values.
fn changed(eval: &Evaluator<'_>, choice: &Choice, options: &Value) -> Vec<Changed> {
    let pairs = choice.iter().filter_map(|set| set.split_once('='));
    let all = pairs.map(|(key, value)| Changed {
        key: key.to_owned(),
        from: value_of(eval, options, key),
        to: value.to_owned(),
    });
    all.filter(|c| c.from != c.to).collect()
}

/// Returns the job's value of a key in the syntax of scenarios.
fn value_of(eval: &Evaluator<'_>, options: &Value, key: &str) -> String {
    let base = &eval.space.base;
    let is_own = |value: &&str| {
        let set = [format!("{key}={value}")];
        (eval.request.load)(&set).is_ok_and(|s| s == *base)
    };
    let info = keys().iter().find(|k| k.path() == key);
    if let Some(word) = info.and_then(|k| k.values().find(is_own)) {
        return word.to_owned();
    }
    let path = json_path_of(key).unwrap_or_else(|| key.to_owned());
    let value = path.split('.').try_fold(options, |v, k| v.get(k));
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => "default".to_owned(),
        Some(other) => other.to_string(),
    }
}

/// Describes the effect of a change, from the score without it.
fn why(without: Option<&Score>, with: &Score) -> String {
    let Some(without) = without else {
        return "the other changes need it".to_owned();
    };
    if !without.fits() {
        let missing = Bytes(without.slack.unsigned_abs());
        return format!("without it, {missing} too little memory");
    }
    let step = with.effect.step_ms;
    let mut parts = Vec::new();
    let mut time = |ms: f64, less: &str, more: &str| {
        if ms.abs() > MENTIONED * step {
            let word = if ms > 0.0 { less } else { more };
            parts.push(format!("{:.1} ms {word}", ms.abs()));
        }
    };
    time(
        without.busy_ms() - with.busy_ms(),
        "less computation",
        "more computation",
    );
    time(
        without.exposed_ms - with.exposed_ms,
        "less waiting",
        "more waiting",
    );
    let [before, after] = [without, with].map(|s| s.effect.peak_reserved);
    let difference = Bytes(before.0.abs_diff(after.0));
    if difference.0 as f64 > MENTIONED * before.0 as f64 {
        let word = if after < before { "less" } else { "more" };
        parts.push(format!("{difference} {word} memory"));
    }
    if parts.is_empty() {
        "no measurable effect alone".to_owned()
    } else {
        parts.join(", ")
    }
}
