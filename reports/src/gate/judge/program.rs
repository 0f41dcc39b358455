//! Instructions and proofs.

use super::place;
use crate::gate::baseline::Baseline;
use crate::gate::facts::Facts;
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::Limits;
use crate::gate::outline::{changes, expand};
use crate::view::{changed_counts, deltas};
use shardlab_plan::scenario::GateProgram;
use std::collections::BTreeMap;

/// Lines of a diff that are shown.
const DIFF_LINES: usize = 60;

pub(super) fn judge(baseline: &Baseline, now: &Facts, limits: &Limits) -> Finding {
    let (old, new) = (&baseline.facts.program, &now.program);
    let same_counts = old.instructions == new.instructions;
    let (status, limit) = match limits.program {
        GateProgram::Off => (Status::Skipped, "off"),
        GateProgram::Counts if same_counts => (Status::Pass, "counts"),
        GateProgram::Exact if old.digest == new.digest => (Status::Pass, "exact"),
        GateProgram::Counts => (Status::Changed, "counts"),
        GateProgram::Exact => (Status::Changed, "exact"),
    };
    let differs = old.digest != new.digest;
    let message = match (differs, same_counts) {
        (false, _) => String::new(),
        (true, true) => "other instructions, as many of each kind".to_owned(),
        (true, false) => changed_counts(&old.instructions, &new.instructions, String::as_str),
    };
    let detail = if status == Status::Changed {
        match changes(&old.outline, &new.outline, DIFF_LINES) {
            d if d.is_empty() => {
                "the outlines are equal: other buffers, offsets, events or number of steps\n"
                    .to_owned()
            }
            d => d,
        }
    } else {
        String::new()
    };
    Finding {
        class: Class::Program,
        metric: "digest".to_owned(),
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

/// The options whose values are others, where the baseline tells them: whoever reads the failures beside it sees that somebody changed
/// the scenario, not the engine. An option that only one side knows came or went with a version.
pub(super) fn options(baseline: &Baseline, now: &Facts) -> Option<Finding> {
    let old = &baseline.facts.options;
    let changed: Vec<(&String, &String, &String)> = old
        .iter()
        .filter_map(|(key, a)| Some((key, a, now.options.get(key)?)))
        .filter(|(_, a, b)| a != b)
        .collect();
    let (first, ..) = changed.first()?;
    let words: Vec<String> = changed
        .iter()
        .map(|(key, a, b)| format!("{key} is {a} in the baseline and {b} now"))
        .collect();
    Some(Finding {
        class: Class::Program,
        metric: "options".to_owned(),
        status: Status::Skipped,
        baseline: String::new(),
        now: format!("{} changed", changed.len()),
        limit: String::new(),
        message: words.join(", "),
        detail: String::new(),
        place: baseline.place("options", &format!("{first:?}")),
    })
}

/// Buffers that a steady step allocates more or fewer times, in words: `one temporary of 25,344 B more`.
pub(super) fn buffers(old: &Facts, now: &Facts) -> Vec<String> {
    if old.program.digest == now.program.digest {
        return Vec::new();
    }
    let allocs = |outline: &str| {
        let mut all: BTreeMap<(String, u64), u32> = BTreeMap::new();
        let text = expand(outline);
        let steady = text.lines().skip_while(|l| !l.starts_with("[steady"));
        for line in steady.skip(1).take_while(|l| !l.starts_with('[')) {
            let Some((_, words)) = line.split_once("alloc ") else {
                continue;
            };
            let mut words = words.split(' ');
            if let (Some(role), Some(Ok(bytes))) = (words.next(), words.next().map(str::parse)) {
                *all.entry((role.to_owned(), bytes)).or_default() += 1;
            }
        }
        all
    };
    let (a, b) = (allocs(&old.program.outline), allocs(&now.program.outline));
    let mut all: Vec<((String, u64), i64)> = deltas(&a, &b).into_iter().collect();
    all.sort_by_key(|((_, bytes), n)| std::cmp::Reverse(bytes.saturating_mul(n.unsigned_abs())));
    all.into_iter()
        .map(|((role, bytes), n)| {
            let more = if n > 0 { "more" } else { "fewer" };
            let bytes = super::memory::grouped(bytes);
            match n.unsigned_abs() {
                1 => format!("one {role} buffer of {bytes} B {more}"),
                n => format!("{n} {role} buffers of {bytes} B {more}"),
            }
        })
        .collect()
}

/// The program's proofs. A baseline with broken rules excuses nothing: a race is a race.
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
