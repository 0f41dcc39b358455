//! A comparison in sentences: what changed, what it comes from, which option did it.

use super::Pair;
use super::waits::Wait;
use crate::gate::facts::section_name;
use crate::view::{RunView, changed_counts};
use shardlab_plan::program::Rule;
use shardlab_plan::record::{Cause, Clock};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::{self, Bytes, Picos};

/// Share of the step below which a change is not worth a sentence.
const WORTH_SAYING: f64 = 0.002;
/// Sentences about waits.
const WAITS: usize = 3;
/// Options that are spelled out.
const OPTIONS: usize = 3;

pub(super) fn sentences(pair: &Pair, sides: [&RunView; 2]) -> Vec<String> {
    let [a, b] = [&pair.runs[0].label, &pair.runs[1].label];
    let mut all = Vec::new();
    if let Some(step) = &pair.step {
        all.push(step.sentence("step time", a, b));
    }
    all.extend(tokens(sides, [a, b]));
    // Baselines of earlier versions do not tell their options.
    if sides.iter().all(|s| !s.scenario.settings.is_empty()) {
        all.extend(options(pair));
    }
    all.extend(instructions(sides));
    let step = sides[0].recorded().max(sides[1].recorded());
    let worth = |change: i128| change.unsigned_abs() as f64 >= WORTH_SAYING * step.0 as f64;
    all.extend(made_of(pair, sides, worth));
    let waits = pair
        .waits
        .iter()
        .filter(|w| worth(signed(w.time)))
        .take(WAITS);
    all.extend(waits.map(|w| wait(w, a, b)));
    // The largest change is the first.
    if let Some(kind) = pair.breakdown.compute_by_kind.first()
        && worth(signed(kind.time))
    {
        all.push(format!(
            "Computation that changed most: {} takes {} in {a} and {} in {b}.",
            kind.name, kind.time[0], kind.time[1]
        ));
    }
    all.extend(clock(sides, [a, b]));
    all.push(memory(pair, sides));
    if let Some(losses) = &pair.losses {
        all.push(losses.sentence("loss"));
    }
    if let Some(p) = &pair.prediction {
        all.push(prediction(p, pair, sides));
    }
    all
}

/// What a difference of step times means where the steps differ in their tokens (rows, images). Of different units nothing follows.
pub(crate) fn tokens(sides: [&RunView; 2], labels: [&str; 2]) -> Option<String> {
    let [a, b] = sides.map(|s| s.run.tokens);
    if a == b || a == 0 || b == 0 {
        return None;
    }
    let unit = RunView::counted_in(sides);
    if unit == BatchUnit::Items {
        return None;
    }
    let unit = unit.name();
    let [of_a, of_b] = sides.map(RunView::tokens_per_s);
    let change = 100.0 * (of_b / of_a - 1.0);
    let direction = if change < 0.0 { "fewer" } else { "more" };
    let [name_a, name_b] = labels;
    change.is_finite().then(|| {
        format!(
            "Steps have {a} {unit} a rank in {name_a} and {b} in {name_b}: {name_b} does {:.1} % {direction} {unit} a second.",
            change.abs()
        )
    })
}

/// What two predictions' power limits make of their clocks.
fn clock(sides: [&RunView; 2], labels: [&String; 2]) -> Option<String> {
    let [a, b] = sides.map(|s| Clock::told(&s.run.environment));
    let (a, b) = (a?, b?);
    if (a.arithmetic_factor - b.arithmetic_factor).abs() < WORTH_SAYING {
        return None;
    }
    let of = |c: Clock, label: &str| {
        format!(
            "{:.1} % in {label}, where they are {:.0} % of the step",
            100.0 * (c.arithmetic_factor - 1.0),
            100.0 * c.arithmetic_share
        )
    };
    Some(format!(
        "Products and attention take longer at the power limit than at full clock: {}, and {}.",
        of(a, labels[0]),
        of(b, labels[1])
    ))
}

fn signed(pair: [Picos; 2]) -> i128 {
    i128::from(pair[1].0) - i128::from(pair[0].0)
}

/// `+3.20 ms`.
fn delta(pair: [Picos; 2]) -> String {
    let sign = if pair[1] < pair[0] { '-' } else { '+' };
    format!("{sign}{}", Picos(pair[0].0.abs_diff(pair[1].0)))
}

fn options(pair: &Pair) -> Option<String> {
    let value = |v: &Option<String>| v.clone().unwrap_or_else(|| "unset".into());
    let shown: Vec<String> = pair
        .options
        .iter()
        .take(OPTIONS)
        .map(|d| {
            format!(
                "{} is {} and {}",
                d.key,
                value(&d.values[0]),
                value(&d.values[1])
            )
        })
        .collect();
    match pair.options.len() {
        0 => (pair.runs[0].kind == pair.runs[1].kind).then(|| "No option differs.".to_owned()),
        1 => Some(format!("One option differs: {}.", shown[0])),
        n if n > OPTIONS => Some(format!(
            "{n} options differ, among them: {}.",
            shown.join("; ")
        )),
        n => Some(format!("{n} options differ: {}.", shown.join("; "))),
    }
}

/// How many instructions of which kind there are more: where single ones cannot be aligned.
fn instructions(sides: [&RunView; 2]) -> Option<String> {
    if sides.iter().all(|s| s.is_recorded()) {
        return None;
    }
    let [a, b] = sides.map(|s| &s.program);
    if a.digest == b.digest {
        return Some("The programs are the same.".to_owned());
    }
    let changed = changed_counts(&a.counts, &b.counts, |s| section_name(*s));
    Some(match changed.as_str() {
        "" => "The programs differ, with as many instructions of each kind.".to_owned(),
        changed => format!("The programs differ: {changed}."),
    })
}

/// How much of the change is computation and how much is waiting.
fn made_of(pair: &Pair, sides: [&RunView; 2], worth: impl Fn(i128) -> bool) -> Option<String> {
    let exposed = [0, 1].map(|i| pair.exposed.iter().map(|c| c.time[i]).sum::<Picos>());
    let step = sides.map(RunView::recorded);
    if !worth(signed(step)) && !worth(signed(exposed)) {
        return None;
    }
    let causes: Vec<String> = pair
        .exposed
        .iter()
        .filter(|c| worth(signed(c.time)))
        .map(|c| format!("{} {}", c.cause.name(), delta(c.time)))
        .collect();
    let by = if causes.is_empty() {
        String::new()
    } else {
        format!(" (by cause: {})", causes.join(", "))
    };
    if !sides.iter().all(|s| s.is_recorded()) {
        return sides.iter().all(|s| !s.run.exposed.is_empty()).then(|| {
            format!(
                "Of {}, {} is exposed time{by}.",
                delta(step),
                delta(exposed)
            )
        });
    }
    Some(format!(
        "Of {} in the recorded step, {} is exposed time{by} and {} is computation.",
        delta(step),
        delta(exposed),
        delta(pair.breakdown.compute)
    ))
}

fn wait(w: &Wait, a: &str, b: &str) -> String {
    let what = if w.of.phase.is_empty() {
        "the host".to_owned()
    } else {
        format!("{} in {}", w.of.name, w.of.phase)
    };
    // The side that waits longer is the one with something to explain.
    let worse = usize::from(w.time[1] > w.time[0]);
    let names = [a, b];
    let ahead = w
        .rules
        .get(Rule::Prefetch.name())
        .copied()
        .unwrap_or_default();
    let because = match w.cause[worse] {
        Some(Cause::Gate) if ahead[worse] < ahead[1 - worse] => {
            "it is not gathered ahead and so starts late"
        }
        Some(cause) => reason(cause, w.of.phase.is_empty()),
        None => "",
    };
    let places = match w.count[worse] {
        1 => "once".to_owned(),
        n => format!("{n} times"),
    };
    let mut text = format!(
        "Waiting for {what}: {} in {a}, {} in {b}. {} waits for it {places} because {because}",
        w.time[0], w.time[1], names[worse]
    );
    let changed: Vec<String> = w
        .rules
        .iter()
        .filter(|(_, n)| n[0] != n[1])
        .map(|(rule, n)| {
            let why = Rule::ALL.iter().find(|r| r.name() == rule);
            let why = why.map_or_else(String::new, |r| {
                format!(" ({})", r.why().trim_end_matches('.'))
            });
            format!(
                "rule {rule}{why} issues {} in {a} and {} in {b}",
                n[0], n[1]
            )
        })
        .collect();
    if !changed.is_empty() {
        text += &format!(
            ". Collectives of that name and phase, waited for or not: {}",
            changed.join(", ")
        );
    }
    text + "."
}

fn reason(cause: Cause, host: bool) -> &'static str {
    match cause {
        Cause::Host if host => "kernels are issued late",
        Cause::Host => "the host issues it late",
        Cause::Gate => "it starts late: something held it back",
        Cause::Queue => "it waits for its turn behind another collective",
        Cause::Wire => "nothing hides it: it takes longer than the computation beside it",
        Cause::Contention => "other work slows it or holds the SMs",
        Cause::Tail => "nothing is left to compute beside it",
        Cause::Straggler => "another rank is late",
    }
}

fn memory(pair: &Pair, sides: [&RunView; 2]) -> String {
    let peaks = sides.map(|s| s.run.memory.peak_allocated);
    let reserved = sides.map(|s| s.run.memory.peak_reserved);
    if peaks[0] == peaks[1] && reserved[0] == reserved[1] {
        return format!(
            "Memory is the same: {} allocated, {} reserved at the peak.",
            peaks[0], reserved[0]
        );
    }
    let difference = |pair: [Bytes; 2]| {
        let sign = if pair[1] < pair[0] { '-' } else { '+' };
        format!("{sign}{}", Bytes(pair[0].0.abs_diff(pair[1].0)))
    };
    let roles: Vec<String> = pair
        .memory
        .by_role
        .iter()
        .filter(|r| r.bytes[0] != r.bytes[1])
        .take(3)
        .map(|r| format!("{} {}", r.name, difference(r.bytes)))
        .collect();
    let roles = if roles.is_empty() {
        String::new()
    } else {
        format!(", at the peak {}", roles.join(", "))
    };
    format!(
        "Memory: allocated {} ({} and {}), reserved {}{roles}.",
        difference(peaks),
        peaks[0],
        peaks[1],
        difference(reserved)
    )
}

/// How far the prediction of the step is off, and where that comes from: of computation and exposed time, which make up the step, the
/// part with the largest error of the step's sign. What is hidden makes no step longer.
fn prediction(p: &super::Prediction, pair: &Pair, sides: [&RunView; 2]) -> String {
    // Predicted less measured.
    let error = |time: [Picos; 2]| signed([time[p.measured], time[1 - p.measured]]);
    let kinds = pair.breakdown.compute_by_kind.iter();
    let kinds = kinds.map(|k| (k.name.clone(), k.time));
    let causes = pair.exposed.iter();
    let causes = causes.map(|c| (format!("exposed time ({})", c.cause.name()), c.time));
    let worst = kinds
        .chain(causes)
        .filter(|(_, time)| error(*time).signum() as f64 * p.step_error > 0.0)
        .max_by_key(|(_, time)| error(*time).abs());
    let worst = worst.map_or_else(String::new, |(name, time)| {
        let step_ms = p.step_error * sides[p.measured].step_ms();
        let of_step = Picos(time[0].0.abs_diff(time[1].0)).ms() / step_ms.abs();
        let share = if of_step > 0.5 {
            "most of"
        } else {
            "the largest part of"
        };
        format!(
            "; {share} the error is in {name}: {} predicted, {} measured",
            time[1 - p.measured],
            time[p.measured]
        )
    });
    format!(
        "The prediction of the step is {} % off{worst}.",
        units::signed(100.0 * p.step_error, 1)
    )
}
