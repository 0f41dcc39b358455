//! Judges instructions and proofs.

use super::{place, short};
use crate::gate::baseline::Baseline;
use crate::gate::facts::Facts;
use crate::gate::finding::{Change, Class, Finding, Status};
use crate::gate::limits::Limits;
use crate::gate::metric::DIGEST;
use crate::gate::outline::{allocations, changes, expand};
use crate::view::{HARDWARE, changed_counts, deltas};
use shardlab_plan::config::GateProgram;
use shardlab_plan::scenario::key_of;
use std::collections::BTreeMap;

/// Maximum number of diff lines that are shown.
const DIFF_LINES: usize = 40;
/// Maximum number of diff lines if the scenario changed. A different plan is then expected.
const LINES_OF_A_CHANGED_SCENARIO: usize = 12;
/// Maximum number of options that a cause lists.
const MAX_NAMED: usize = 4;

pub(super) fn judge(baseline: &Baseline, now: &Facts, limits: &Limits) -> Finding {
    let (old, new) = (&baseline.facts.program, &now.program);
    let same_counts = old.instructions == new.instructions;
    let (status, limit) = match limits.program {
        GateProgram::Off => (Status::Pass, "off"),
        GateProgram::Counts if same_counts => (Status::Pass, "counts"),
        GateProgram::Exact if old.digest == new.digest => (Status::Pass, "exact"),
        GateProgram::Counts => (Status::Changed, "counts"),
        GateProgram::Exact => (Status::Changed, "exact"),
    };
    let lines = match options(baseline, now, limits) {
        Some(_) => LINES_OF_A_CHANGED_SCENARIO,
        None => DIFF_LINES,
    };
    let detail = if status == Status::Changed {
        match baseline.outline().map(|o| changes(o, &new.outline, lines)) {
            None => "no diff of the plan: the baseline is of an older format, bless it again\n"
                .to_owned(),
            Some(d) if d.is_empty() => {
                "the outlines are equal: buffers, offsets, events or the number of steps differ\n"
                    .to_owned()
            }
            Some(d) => d,
        }
    } else {
        String::new()
    };
    let message = differing(baseline, now).unwrap_or_default();
    Finding {
        class: Class::Program,
        metric: DIGEST.to_owned(),
        status,
        baseline: old.digest.clone(),
        now: new.digest.clone(),
        limit: limit.to_owned(),
        message,
        detail,
        place: place(
            limits.program_place.as_ref(),
            baseline.place("program", "digest"),
            limits,
        ),
    }
}

/// Describes how the instructions differ.
fn differing(baseline: &Baseline, now: &Facts) -> Option<String> {
    let (old, new) = (&baseline.facts.program, &now.program);
    if old.digest == new.digest {
        return None;
    }
    Some(if old.instructions == new.instructions {
        "different instructions, but the same number of each kind".to_owned()
    } else {
        changed_counts(&old.instructions, &new.instructions, String::as_str)
    })
}

/// Returns the change since the baseline that explains different numbers: a change of the scenario,
/// or else of the program.
pub(super) fn change(baseline: &Baseline, now: &Facts, limits: &Limits) -> Option<Change> {
    if let Some(options) = options(baseline, now, limits) {
        return Some(Change {
            words: options.message,
            place: options.place,
        });
    }
    differing(baseline, now).map(|words| Change {
        words: format!("program changed: {words}"),
        place: None,
    })
}

/// Reports options whose value differs from the baseline's. An option that only one side has was
/// added or removed by another version.
pub(super) fn options(baseline: &Baseline, now: &Facts, limits: &Limits) -> Option<Finding> {
    let old = &baseline.facts;
    let hardware = (old.hardware != now.hardware)
        .then(|| format!("{HARDWARE} {} → {}", old.hardware, now.hardware));
    let changed: Vec<(&String, String)> = old
        .options
        .iter()
        .filter(|(key, _)| !key.starts_with("gate."))
        .filter_map(|(key, a)| Some((key, a, now.options.get(key)?)))
        .filter(|(_, a, b)| a != b)
        .map(|(key, a, b)| (key, format!("{} {a} → {b}", key_of(key))))
        .collect();
    // The scenario's own line is preferred if it still exists.
    let place = match changed.first() {
        Some((key, _)) => {
            let given = changed
                .iter()
                .find_map(|(key, _)| limits.keys.get(&*key_of(key)));
            given.cloned().or_else(|| baseline.option_place(key))
        }
        None => {
            let given = limits.keys.get(HARDWARE).cloned();
            given.or_else(|| baseline.place("", "hardware"))
        }
    };
    let words = changed.into_iter().map(|(_, words)| words);
    let words: Vec<String> = hardware.into_iter().chain(words).collect();
    let more = words.len().saturating_sub(MAX_NAMED);
    let mut message = format!(
        "scenario changed: {}",
        words[..words.len() - more].join(", ")
    );
    if more > 0 {
        message.push_str(&format!(" and {more} more"));
    }
    (!words.is_empty()).then(|| Finding {
        class: Class::Program,
        metric: "options".to_owned(),
        status: Status::Skipped,
        baseline: String::new(),
        now: format!("{} changed", words.len()),
        limit: String::new(),
        message,
        detail: String::new(),
        place,
    })
}

/// Returns the buffers that a steady step now allocates more often, or less often if `more` is
/// false: `8 more temporary buffers (448 MiB each)`. Largest difference first.
pub(super) fn buffers(baseline: &Baseline, now: &Facts, more: bool) -> Vec<String> {
    let Some(old) = baseline.outline() else {
        return Vec::new();
    };
    if baseline.facts.program.digest == now.program.digest {
        return Vec::new();
    }
    let allocs = |outline: &str| {
        let mut all: BTreeMap<(String, u64), u32> = BTreeMap::new();
        let text = expand(outline);
        let steady = text.lines().skip_while(|l| !l.starts_with("[steady"));
        for line in steady.skip(1).take_while(|l| !l.starts_with('[')) {
            let Some((role, sizes)) = allocations(line) else {
                continue;
            };
            for (bytes, n) in sizes {
                *all.entry((role.to_owned(), bytes)).or_default() += n;
            }
        }
        all
    };
    let (a, b) = (allocs(old), allocs(&now.program.outline));
    let changed = deltas(&a, &b).into_iter();
    let mut all: Vec<((String, u64), i64)> = changed.filter(|(_, n)| (*n > 0) == more).collect();
    all.sort_by_key(|((_, bytes), n)| std::cmp::Reverse(bytes.saturating_mul(n.unsigned_abs())));
    let word = if more { "more" } else { "fewer" };
    all.into_iter()
        .map(|((role, bytes), n)| {
            let bytes = short(bytes);
            match n.unsigned_abs() {
                1 => format!("1 {word} {role} buffer ({bytes})"),
                n => format!("{n} {word} {role} buffers ({bytes} each)"),
            }
        })
        .collect()
}

/// Judges the proofs of the program. A violation fails even if the baseline has it too: a race is a
/// race.
pub(super) fn checks(baseline: &Baseline, now: &Facts, limits: &Limits) -> Finding {
    let (old, new) = (&baseline.facts.check, &now.check);
    let words = |errors: u64| match errors {
        0 => "proven".to_owned(),
        1 => "1 broken rule".to_owned(),
        n => format!("{n} broken rules"),
    };
    Finding {
        class: Class::Checks,
        metric: "check".to_owned(),
        status: if new.errors > 0 {
            Status::Regression
        } else {
            Status::Pass
        },
        baseline: words(old.errors),
        now: words(new.errors),
        limit: "proven".to_owned(),
        message: new.violations.first().cloned().unwrap_or_default(),
        detail: new
            .violations
            .iter()
            .skip(1)
            .map(|v| format!("{v}\n"))
            .collect(),
        place: place(None, baseline.place("check", "errors"), limits),
    }
}
