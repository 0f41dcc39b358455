//! The effects of other options: the change to try next, and tables.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use super::super::verdict::setting;
use super::{Explanation, MAX_LISTED, MAX_LISTED_ALL, Tried};
use crate::analysis::basis::{self, number};
use crate::analysis::smallest_fit::{Search, Solution};
use crate::analysis::verdict::{Verdict, free_memory};
use crate::analysis::whatif::{Effect, TOLERANCE, WhatIf, improvements};
use crate::predict::{Fit, TIGHT};
use shardlab_plan::config::Fsdp;
use shardlab_plan::units::{ByteUnit, Bytes, signed, thousands};
use std::collections::BTreeMap;

/// Returns the change to try next, and its effect.
pub(super) fn next(base: &Effect, verdict: &Verdict, tried: &Tried, fsdp: &Fsdp) -> String {
    if let Some(search) = &tried.smallest_fit {
        return smallest(base, search);
    }
    let mut worth = improvements(base, &tried.what_ifs, fsdp);
    worth.retain(|(what_if, _)| what_if.change.keeps_training());
    let is_tight = |e: &Effect| matches!(e.fit, Fit::Tight { .. });
    if verdict.is_narrow() || is_tight(base) {
        // Headroom comes before speed.
        let roomy = |c: &(&WhatIf, &Effect)| c.1.has_headroom && !is_tight(c.1);
        worth.sort_by_key(|c| !roomy(c));
        if is_tight(base) && !worth.first().is_some_and(roomy) {
            worth.sort_by_key(|c| (is_tight(c.1), c.1.peak_reserved));
        }
    }
    match worth.first() {
        Some((what_if, effect)) => format!(
            "`{}`: {}",
            settings(&what_if.change.overrides),
            in_words(base, effect)
        ),
        None => "no single option that keeps batch and precision gains more than 0.5 % of time or memory".to_owned(),
    }
}

fn settings(overrides: &[String]) -> String {
    let all: Vec<String> = overrides.iter().map(|set| setting(set)).collect();
    all.join(" ")
}

fn smallest(base: &Effect, search: &Search) -> String {
    let Some(best) = search.best() else {
        let none = format!(
            "no combination of up to three options fits on these GPUs ({} tried)",
            search.tried
        );
        return match &search.more_gpus {
            Some(s) => format!(
                "{none}; more GPUs do: `{}` ({})",
                settings(&s.change.overrides),
                free(&s.effect)
            ),
            None => format!("{none}, nor on up to 64 times as many"),
        };
    };
    let mut text = format!(
        "smallest change that fits: `{}` ({})",
        settings(&best.change.overrides),
        in_words(base, &best.effect)
    );
    let only_just = search.narrow.first().filter(|s| s.options < best.options);
    if let Some(s) = only_just {
        text += &format!(
            "; `{}` alone fits with {}",
            settings(&s.change.overrides),
            free(&s.effect)
        );
    }
    text
}

/// Describes an effect: `8.2 % faster, 25.82 GiB less reserved, 12.00 GiB free`. The times
/// are per token, so that steps with other batches are comparable.
fn in_words(base: &Effect, effect: &Effect) -> String {
    // As in `compare` and `sweep`, the share of the time, not of the throughput.
    let longer = 100.0 * effect.longer_than(base);
    let speed = if longer <= -0.05 {
        format!("{:.1} % faster", -longer)
    } else if longer >= 0.05 {
        format!("{longer:.1} % slower")
    } else {
        "as fast".to_owned()
    };
    let (now, before) = (effect.peak_reserved, base.peak_reserved);
    let memory = match now.0.abs_diff(before.0) {
        by if by * 1000 <= before.0 => "same memory".to_owned(),
        by if now < before => format!("{} less reserved", Bytes(by)),
        by => format!("{} more reserved", Bytes(by)),
    };
    let room = match effect.free_bytes {
        Some(_) => format!(", {}", free(effect)),
        None => String::new(),
    };
    let host = match effect.host_state {
        now if now > base.host_state => format!(", {now} of host memory per GPU"),
        _ => String::new(),
    };
    format!("{speed}, {memory}{room}{host}")
}

fn free(effect: &Effect) -> String {
    let bytes = effect.free_bytes.unwrap_or(0);
    let bytes = Bytes(u64::try_from(bytes).unwrap_or(0));
    match effect.fit {
        Fit::Tight { .. } => "allocator retries".to_owned(),
        _ => format!("{} free", free_memory(bytes)),
    }
}

/// Prints the single changes that help: the fastest ones, and those that save memory.
pub(super) fn worthwhile(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let fsdp = &e.prediction.scenario.fsdp;
    let worth = improvements(&e.base, &e.tried.what_ifs, fsdp);
    let (worth, other): (Vec<_>, Vec<_>) = worth
        .into_iter()
        .partition(|(w, _)| w.change.keeps_training());
    let (faster, smaller) = by_gain(worth, &e.base);
    out.blank()?;
    out.heading("What to change")?;
    let answers: Vec<(&WhatIf, &Effect)> = e
        .tried
        .what_ifs
        .iter()
        .filter(|w| e.warnings.iter().any(|x| x.set == w.change.overrides))
        .filter_map(|w| Some((w, w.effect.as_ref().ok()?)))
        .collect();
    if faster.is_empty() && smaller.is_empty() && other.is_empty() && answers.is_empty() {
        return Ok(out.paragraph(
            0,
            "No single option gains more than 0.5 % of time or memory.",
        )?);
    }
    let mut table = changes(e);
    for (title, group) in [
        ("faster:", faster),
        ("less memory:", smaller),
        ("with another batch size or precision:", other),
        ("without the warning:", answers),
    ] {
        if group.is_empty() {
            continue;
        }
        table.row([title].into_iter().chain([""; 5]).map(str::to_owned));
        for (w, effect) in group.iter().take(MAX_LISTED) {
            table.row(change(&w.change.label, e, effect));
        }
    }
    out.text(table)?;
    // If the scenario is tight, the changes may be too.
    tight_in_words(std::iter::once(&e.base), out)
}

/// A change and its effect.
type Tries<'a> = Vec<(&'a WhatIf, &'a Effect)>;

/// Divides changes that help, fastest first, into the fastest ones and those that save memory, most
/// memory first. A change that is a little faster and saves much memory is one of the latter if
/// the former have enough others.
fn by_gain<'a>(worth: Tries<'a>, base: &Effect) -> (Tries<'a>, Tries<'a>) {
    let (mut faster, mut smaller): (Tries<'_>, Tries<'_>) =
        worth.into_iter().partition(|(_, x)| x.is_faster_than(base));
    if faster.len() > MAX_LISTED {
        let slowest = faster.split_off(MAX_LISTED);
        let saving = |(_, x): &(&WhatIf, &Effect)| x.saves(base) > TOLERANCE;
        smaller.extend(slowest.into_iter().filter(saving));
        smaller.sort_by_key(|(_, x)| x.peak_reserved);
    }
    (faster, smaller)
}

/// Prints the smallest changes that make a job fit.
pub(super) fn solutions(
    e: &Explanation,
    search: &Search,
    all: bool,
    out: &mut Out,
) -> Result<(), Failure> {
    let found = || search.solutions.iter().chain(&search.narrow);
    if found().next().is_none() {
        return Ok(());
    }
    out.blank()?;
    out.heading("Smallest changes that fit")?;
    let mut table = changes(e);
    let listed = if all { MAX_LISTED_ALL } else { MAX_LISTED };
    let groups: [(&str, &[Solution]); 2] = [
        ("with 5 % free:", &search.solutions),
        ("with less:", &search.narrow),
    ];
    for (title, group) in groups {
        if group.is_empty() {
            continue;
        }
        table.row([title].into_iter().chain([""; 5]).map(str::to_owned));
        for s in group.iter().take(listed) {
            table.row(change(&s.change.label, e, &s.effect));
        }
    }
    out.text(table)?;
    tight_in_words(found().map(|s| &s.effect), out)
}

/// Returns a table of changes. The first row is the unchanged scenario.
pub(super) fn changes(e: &Explanation) -> Table {
    let base = &e.base;
    let basis = e.verdict.basis.as_ref();
    let throughput = format!(">{}", base.counted_in.column());
    let mut table = Table::new([
        "change",
        ">step ms",
        &throughput,
        ">reserved",
        ">free",
        "fits",
    ]);
    table.row([
        "(as it is)".into(),
        number(base.step_ms, 2, basis),
        number(base.tokens_per_s, 0, basis),
        base.peak_reserved.to_string(),
        room(base),
        base.fit.word().to_owned(),
    ]);
    table
}

/// Returns a row of this table.
pub(super) fn change(label: &str, e: &Explanation, effect: &Effect) -> [String; 6] {
    let base = &e.base;
    let slower = effect.step_ms - base.step_ms;
    [
        label.to_owned(),
        basis::difference(slower, 2, e.verdict.basis.as_ref()),
        format!("{} %", signed(100.0 * effect.faster_than(base), 1)),
        difference(effect.peak_reserved, base.peak_reserved),
        room(effect),
        effect.fit.word().to_owned(),
    ]
}

fn room(e: &Effect) -> String {
    match e.free_bytes {
        Some(free) if free < 0 => format!("-{}", free_memory(Bytes(free.unsigned_abs()))),
        Some(free) => free_memory(Bytes(free.unsigned_abs())),
        None => "?".to_owned(),
    }
}

fn difference(a: Bytes, b: Bytes) -> String {
    let unit = ByteUnit::of(a.max(b));
    let by = signed(unit.count(a) - unit.count(b), unit.decimals());
    format!("{by} {}", unit.name())
}

/// Explains the memory of steps that are tight.
const TAKEN: &str = "Reserved and free memory are what the step takes without this limit.";

/// Explains the word `tight` if a table contains it.
fn tight_in_words<'a>(
    mut effects: impl Iterator<Item = &'a Effect>,
    out: &mut Out,
) -> Result<(), Failure> {
    if effects.any(|e| matches!(e.fit, Fit::Tight { .. })) {
        out.paragraph(2, &format!("{TIGHT} {TAKEN}"))?;
    }
    Ok(())
}

/// Prints every change: fastest first, and those that fit before those that do not. Changes without
/// effect and impossible ones are summarised below.
pub(super) fn full(base: &Effect, all: &[WhatIf], out: &mut Out) -> Result<(), Failure> {
    if all.is_empty() {
        return Ok(());
    }
    let mut effects: Vec<(&str, &Effect)> = Vec::new();
    let mut same: Vec<&str> = Vec::new();
    let mut impossible: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for w in all {
        let label = w.change.label.as_str();
        match &w.effect {
            Ok(e) if e.differs(base) => effects.push((label, e)),
            Ok(_) => same.push(label),
            Err(e) => impossible.entry(e.reason()).or_default().push(label),
        }
    }
    effects.sort_by(|(_, a), (_, b)| {
        let no = |e: &Effect| !e.fit.is_ok();
        no(a)
            .cmp(&no(b))
            .then(b.tokens_per_s.total_cmp(&a.tokens_per_s))
    });
    out.blank()?;
    out.heading("Effect of each option")?;
    let throughput = format!(">{}", base.counted_in.column());
    let mut table = Table::new([
        "change",
        ">step ms",
        &throughput,
        ">allocated",
        ">reserved",
        "fits",
    ]);
    table.row([
        "(as it is)".into(),
        thousands(base.step_ms, 2),
        thousands(base.tokens_per_s, 0),
        base.peak_allocated.to_string(),
        base.peak_reserved.to_string(),
        base.fit.word().to_owned(),
    ]);
    let mut beyond = false;
    for (label, e) in effects {
        if !e.fit.is_ok() && !std::mem::replace(&mut beyond, true) {
            table.row(
                ["do not fit:"]
                    .into_iter()
                    .chain([""; 5])
                    .map(str::to_owned),
            );
        }
        table.row([
            label.to_owned(),
            signed(e.step_ms - base.step_ms, 2),
            format!("{} %", signed(100.0 * e.faster_than(base), 1)),
            difference(e.peak_allocated, base.peak_allocated),
            difference(e.peak_reserved, base.peak_reserved),
            e.fit.word().to_owned(),
        ]);
    }
    out.text(table)?;
    let effects = all.iter().filter_map(|w| w.effect.as_ref().ok());
    tight_in_words(effects.chain([base]), out)?;
    if !same.is_empty() {
        out.paragraph(2, &format!("Less than 0.5 %: {}.", same.join(", ")))?;
    }
    for (reason, labels) in impossible {
        out.paragraph(
            2,
            &format!("Not possible: {} ({reason}).", labels.join(", ")),
        )?;
    }
    Ok(())
}
