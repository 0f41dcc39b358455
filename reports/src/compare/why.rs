//! A comparison in sentences: what changed, where the change comes from, and which option caused
//! it.

use super::Pair;
use super::waits::Wait;
use crate::view::{RunView, changed_counts};
use shardlab_plan::program::Rule;
use shardlab_plan::record::{Cause, Clock, RunKind};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::{self, Bytes, Picos};

/// Share of the step below which a change is not mentioned.
const WORTH_SAYING: f64 = 0.002;
/// Maximum number of sentences about waits.
const WAITS: usize = 3;
/// Maximum number of options that are listed.
const OPTIONS: usize = 3;

pub(super) fn sentences(pair: &Pair, sides: [&RunView; 2]) -> Vec<String> {
    let [a, b] = [&pair.runs[0].label, &pair.runs[1].label];
    let mut all = Vec::new();
    match (&pair.prediction, &pair.step) {
        (Some(p), _) if p.step_error.is_finite() => all.push(prediction(p, pair, sides)),
        (_, Some(step)) => all.push(step.sentence(a, b)),
        (_, None) => {}
    }
    if pair.comparable.times() {
        all.extend(tokens(sides, [a, b]));
    }
    // Baselines of earlier versions do not contain their options.
    if sides.iter().all(|s| !s.scenario.settings.is_empty()) {
        all.extend(options(pair));
    }
    if !pair.comparable.times() {
        return all;
    }
    all.extend(instructions(sides));
    // A step that is not typical allows no conclusions.
    if pair.warnings.is_empty() {
        all.extend(parts_of_the_step(pair, sides));
    }
    all.extend(clock(sides, [a, b]));
    all.push(memory(pair, sides));
    let curves = [("loss", &pair.losses), ("gradient norm", &pair.grad_norms)];
    let curves = curves
        .iter()
        .filter_map(|(name, curve)| Some((name, curve.as_ref()?)));
    all.extend(curves.map(|(name, curve)| curve.sentence(name)));
    all
}

/// Explains the change of the recorded step by its parts.
fn parts_of_the_step(pair: &Pair, sides: [&RunView; 2]) -> Vec<String> {
    let step = sides[0].recorded().max(sides[1].recorded());
    let worth = |change: i128| change.unsigned_abs() as f64 >= WORTH_SAYING * step.0 as f64;
    let [a, b] = [&pair.runs[0].label, &pair.runs[1].label];
    let mut all: Vec<String> = made_of(pair, sides, worth).into_iter().collect();
    let waits = pair
        .waits
        .iter()
        .filter(|w| worth(signed(w.time)))
        .take(WAITS);
    all.extend(waits.map(|w| wait(w, a, b)));
    // The largest change comes first.
    if let Some(kind) = pair.breakdown.compute_by_kind.first()
        && worth(signed(kind.time))
    {
        let [before, after] = kind.time;
        all.push(format!(
            "Largest change in compute: {}, {before} → {after}.",
            kind.name
        ));
    }
    all
}

/// Compares throughput if steps differ in their tokens (or rows, or images). Different batch units
/// are not compared.
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
    let [name_a, name_b] = labels;
    change.is_finite().then(|| {
        format!(
            "Throughput: {name_b} {} % ({unit} per rank and step: {a} in {name_a}, {b} in {name_b}).",
            units::signed(change, 1)
        )
    })
}

/// Compares how much the power limit lowers the clocks in two predictions.
fn clock(sides: [&RunView; 2], labels: [&String; 2]) -> Option<String> {
    let [a, b] = sides.map(|s| Clock::from_environment(&s.run.environment));
    let (a, b) = (a?, b?);
    if (a.arithmetic_factor - b.arithmetic_factor).abs() < WORTH_SAYING {
        return None;
    }
    let of = |c: Clock, label: &str| {
        format!(
            "{:.1} % in {label} ({:.0} % of its step)",
            100.0 * (c.arithmetic_factor - 1.0),
            100.0 * c.arithmetic_share
        )
    };
    Some(format!(
        "The power limit slows matmuls and attention by {}, by {}.",
        of(a, labels[0]),
        of(b, labels[1])
    ))
}

fn signed(pair: [Picos; 2]) -> i128 {
    i128::from(pair[1].0) - i128::from(pair[0].0)
}

/// The unit of all times of a sentence.
#[derive(Clone, Copy)]
enum SumUnit {
    Milliseconds,
    Microseconds,
}

impl SumUnit {
    /// Returns the unit for these times, picoseconds: milliseconds if one of them is that long.
    fn of(terms: impl IntoIterator<Item = i128>) -> Self {
        let long = |t: i128| t.unsigned_abs() >= 1_000_000_000;
        match terms.into_iter().any(long) {
            true => Self::Milliseconds,
            false => Self::Microseconds,
        }
    }

    fn show(self, time: Picos) -> String {
        match self {
            Self::Milliseconds => format!("{} ms", units::thousands(time.ms(), 2)),
            Self::Microseconds => format!("{:.1} us", time.us()),
        }
    }

    /// Formats a difference: `+3.20 ms`.
    fn delta(self, pair: [Picos; 2]) -> String {
        let sign = if pair[1] < pair[0] { '-' } else { '+' };
        format!("{sign}{}", self.show(Picos(pair[0].0.abs_diff(pair[1].0))))
    }

    /// Formats the first term of a sum: `-7.71 ms`.
    fn leading(self, change: i128) -> String {
        self.added(change).replacen(' ', "", 1)
    }

    /// Formats a term of a sum: `- 7.71 ms`.
    fn added(self, change: i128) -> String {
        let sign = if change < 0 { '-' } else { '+' };
        let size = u64::try_from(change.unsigned_abs()).unwrap_or(u64::MAX);
        format!("{sign} {}", self.show(Picos(size)))
    }
}

/// Lists changed options: `fsdp.prefetch_forward: 1 → 0.`
fn options(pair: &Pair) -> Option<String> {
    let value = |v: &Option<String>| v.clone().unwrap_or_else(|| "unset".into());
    let shown: Vec<String> = pair
        .options
        .iter()
        .take(OPTIONS)
        .map(|d| {
            let [before, after] = [0, 1].map(|i| value(&d.values[i]));
            format!("{}: {before} → {after}", d.name())
        })
        .collect();
    let shown = shown.join("; ");
    match pair.options.len() {
        0 => (pair.runs[0].kind == pair.runs[1].kind).then(|| "No option differs.".to_owned()),
        n if n > OPTIONS => Some(format!("{shown}; {} more options differ.", n - OPTIONS)),
        _ => Some(format!("{shown}.")),
    }
}

/// Compares the number of instructions of each kind, if instructions cannot be aligned one by one.
fn instructions(sides: [&RunView; 2]) -> Option<String> {
    if sides.iter().all(|s| s.is_recorded()) {
        return None;
    }
    let [a, b] = sides.map(|s| &s.program);
    if a.digest == b.digest {
        return Some("The programs are the same.".to_owned());
    }
    let changed = changed_counts(&a.counts, &b.counts, |s| s.name());
    Some(match changed.as_str() {
        "" => {
            "The programs differ, but have the same number of instructions of each kind.".to_owned()
        }
        changed => format!("The programs differ: {changed}."),
    })
}

/// Splits a difference: `+24.80 ms = +32.56 ms exposed time (gate +33.58 ms) - 7.71 ms compute.`
fn made_of(pair: &Pair, sides: [&RunView; 2], worth: impl Fn(i128) -> bool) -> Option<String> {
    let exposed = [0, 1].map(|i| pair.exposed.iter().map(|c| c.time[i]).sum::<Picos>());
    let step = sides.map(RunView::recorded);
    if !worth(signed(step)) && !worth(signed(exposed)) {
        return None;
    }
    let compute = signed(pair.breakdown.compute);
    let unit = SumUnit::of([signed(step), signed(exposed), compute]);
    let causes: Vec<String> = pair
        .exposed
        .iter()
        .filter(|c| worth(signed(c.time)))
        .map(|c| format!("{} {}", c.cause.name(), unit.delta(c.time)))
        .collect();
    let by = if causes.is_empty() {
        String::new()
    } else {
        format!(" ({})", causes.join(", "))
    };
    if !sides.iter().all(|s| s.is_recorded()) {
        return sides
            .iter()
            .all(|s| !s.run.exposed.is_empty())
            .then(|| format!("Exposed time: {}{by}.", unit.delta(exposed)));
    }
    let measured = pair.runs.iter().any(|r| r.kind != RunKind::Sim.name());
    let which = if measured { "Recorded step: " } else { "" };
    // Pauses between kernels that are too short to count as exposed.
    let other = signed(step) - signed(exposed) - compute;
    let terms = [
        (signed(exposed), format!("exposed time{by}")),
        (compute, "compute".to_owned()),
        (other, "other".to_owned()),
    ];
    let terms: Vec<String> = terms
        .into_iter()
        .filter(|(change, _)| change.unsigned_abs() >= NEGLIGIBLE)
        .enumerate()
        .map(|(i, (change, name))| match i {
            0 => format!("{} {name}", unit.leading(change)),
            _ => format!("{} {name}", unit.added(change)),
        })
        .collect();
    (!terms.is_empty()).then(|| format!("{which}{} = {}.", unit.delta(step), terms.join(" ")))
}

/// Smallest term of a sum that is shown: 10 us, in picoseconds.
const NEGLIGIBLE: u128 = 10_000_000;

/// Describes a wait: `all_gather in forward: A waits 5.82 ms, B 38.38 ms (34 times), because …. A
/// prefetches 32 of 33, B none.`
fn wait(w: &Wait, a: &str, b: &str) -> String {
    let host = w.of.phase.is_empty();
    let what = if host {
        "Host".to_owned()
    } else {
        format!("{} in {}", w.of.name, w.of.phase)
    };
    // The explanation is for the side that waits longer.
    let worse = usize::from(w.time[1] > w.time[0]);
    let ahead = |side: usize| count(w, Rule::Prefetch.name(), side);
    let because = match w.cause[worse] {
        Some(Cause::Gate) if ahead(worse) < ahead(1 - worse) => {
            "it is not prefetched and starts late"
        }
        Some(cause) => reason(cause, host),
        None => "of an unknown cause",
    };
    let times = |side: usize| match (side == worse, w.count[side]) {
        (true, 1) => " (once)".to_owned(),
        (true, n) => format!(" ({n} times)"),
        (false, _) => String::new(),
    };
    format!(
        "{what}: {a} waits {}{}, {b} {}{}: {because}.{}",
        w.time[0],
        times(0),
        w.time[1],
        times(1),
        issued(w, a, b)
    )
}

/// Returns how many collectives a rule issues in one of the runs.
fn count(w: &Wait, rule: &str, side: usize) -> u32 {
    w.rules.get(rule).copied().unwrap_or_default()[side]
}

/// Describes which rules issue the awaited collectives, if the runs differ in that.
fn issued(w: &Wait, a: &str, b: &str) -> String {
    let of = |rule: &str, side: usize| {
        let all: u32 = w.rules.values().map(|n| n[side]).sum();
        match count(w, rule, side) {
            0 => "none".to_owned(),
            n => format!("{n} of {all}"),
        }
    };
    let prefetch = Rule::Prefetch.name();
    if count(w, prefetch, 0) != count(w, prefetch, 1) {
        let [of_a, of_b] = [0, 1].map(|side| of(prefetch, side));
        return format!(" {a} prefetches {of_a}, {b} {of_b}.");
    }
    let changed = w.rules.iter().filter(|(_, n)| n[0] != n[1]);
    changed
        .map(|(rule, n)| format!(" Rule {rule} issues {} in {a}, {} in {b}.", n[0], n[1]))
        .collect()
}

fn reason(cause: Cause, host: bool) -> &'static str {
    match cause {
        Cause::Host if host => "kernels are launched late",
        Cause::Host => "the host launches it late",
        Cause::Gate => "something delays its start",
        Cause::Queue => "it queues behind another collective",
        Cause::Wire => "it takes longer than the compute it overlaps with",
        Cause::Contention => "other work slows it down or holds the SMs",
        Cause::Tail => "at the end of the step no compute is left to hide it",
        Cause::Straggler => "another rank is late",
    }
}

fn memory(pair: &Pair, sides: [&RunView; 2]) -> String {
    match sides.map(|s| s.run.memory.is_recorded()) {
        [true, true] => {}
        [false, false] => return "Memory was not recorded.".to_owned(),
        [a, _] => {
            let lacks = if a { "B" } else { "A" };
            return format!("Memory is not compared: run {lacks} has no record of it.");
        }
    }
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
    let change = |name: &str, pair: [Bytes; 2]| match pair[0] == pair[1] {
        true => format!("{name} unchanged ({})", pair[0]),
        false => format!("{name} {} ({} → {})", difference(pair), pair[0], pair[1]),
    };
    format!(
        "Memory: {}, {}{roles}.",
        change("allocated", peaks),
        change("reserved", reserved)
    )
}

/// Describes how far the predicted step time is off, and why. Computation and exposed time make up
/// the step, so the sentence names the part with the largest error in the direction of the step's
/// error. Hidden communication does not make a step longer.
fn prediction(p: &super::Prediction, pair: &Pair, sides: [&RunView; 2]) -> String {
    // Predicted minus measured.
    let error = |time: [Picos; 2]| signed([time[p.measured], time[1 - p.measured]]);
    let kinds = pair.breakdown.compute_by_kind.iter();
    let kinds = kinds.map(|k| (k.name.clone(), k.time));
    let causes = pair.exposed.iter();
    let causes = causes.map(|c| (format!("exposed time ({})", c.cause.name()), c.time));
    let worst = kinds
        .chain(causes)
        .filter(|(_, time)| error(*time).signum() as f64 * p.step_error > 0.0)
        .max_by_key(|(_, time)| error(*time).abs())
        .filter(|_| pair.warnings.is_empty());
    let worst = worst.map_or_else(String::new, |(name, time)| {
        let step_ms = p.step_error * sides[p.measured].step_ms();
        let of_step = Picos(time[0].0.abs_diff(time[1].0)).ms() / step_ms.abs();
        let unit = SumUnit::of(time.map(|t| i128::from(t.0)));
        let share = if of_step > 0.5 {
            "Most of"
        } else {
            "The largest part of"
        };
        format!(
            " {share} the error is in {name}: {} predicted, {} measured.",
            unit.show(time[1 - p.measured]),
            unit.show(time[p.measured])
        )
    });
    let [predicted, measured] = [1 - p.measured, p.measured].map(|i| sides[i].step_ms());
    let judged = pair.step.as_ref().filter(|step| !step.has_few);
    let interval = judged.map_or_else(String::new, |step| {
        // Ratios are B to A: measurement to prediction, or the inverse.
        let ends = [step.ratio.low, step.ratio.high].map(|ratio| match p.measured {
            1 => predicted * ratio,
            _ => predicted / ratio,
        });
        match ends[0] == ends[1] {
            true => String::new(),
            false => format!(
                " ({:.0} % interval {:.2} to {:.2} ms)",
                100.0 * step.ratio.level,
                ends[0].min(ends[1]),
                ends[0].max(ends[1])
            ),
        }
    });
    format!(
        "Step time: {} ms predicted, {} ms measured{interval}: the prediction is {} % off.{worst}",
        units::thousands(predicted, 2),
        units::thousands(measured, 2),
        units::signed(100.0 * p.step_error, 1)
    )
}
