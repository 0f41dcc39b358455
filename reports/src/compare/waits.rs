//! Exposed time by cause, and by what the compute stream waited for.

use super::places::{Sums, change};
use crate::view::RunView;
use serde::Serialize;
use shardlab_plan::record::{Cause, awaited_names};
use shardlab_plan::units::Picos;
use std::collections::{BTreeMap, BTreeSet};

/// Exposed time with one cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CauseTime {
    /// Cause.
    pub cause: Cause,
    /// Time in A and B.
    pub time: [Picos; 2],
}

/// What the compute stream waited for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct WaitKey {
    /// Names of the kernels and collectives; `host` if the gap waited for nothing on the device.
    pub name: String,
    /// Phase of the first of these; empty for the host.
    pub phase: String,
}

/// Exposed time spent waiting for the same thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// What was waited for.
    pub of: WaitKey,
    /// Time in A and B.
    pub time: [Picos; 2],
    /// Number of gaps in A and B.
    pub count: [u32; 2],
    /// Main cause in A and in B, if there are gaps.
    pub cause: [Option<Cause>; 2],
    /// Number of instructions with this name and phase in A and B, by the rule that emitted them.
    /// Empty for the host.
    pub rules: Rules,
    /// Mean time from the issue of the first instruction to its start.
    pub held: [Picos; 2],
}

/// Returns the exposed time by cause, for all causes that occur. It is empty if the exposed time of
/// a run is unknown.
pub(super) fn causes(sides: [&RunView; 2]) -> Vec<CauseTime> {
    let unknown = |s: &&RunView| !s.is_recorded() && s.run.exposed.is_empty();
    if sides.iter().any(unknown) {
        return Vec::new();
    }
    let mut sums = Sums::new();
    for (side, view) in sides.into_iter().enumerate() {
        for (cause, time) in &view.run.exposed {
            sums.add(*cause, side, time.0);
        }
    }
    let all = sums.0.into_iter().filter(|(_, time)| *time != [0, 0]);
    all.map(|(cause, time)| CauseTime {
        cause,
        time: time.map(Picos),
    })
    .collect()
}

/// Returns the exposed time by what the compute stream waited for, largest change first. It is
/// empty if a run has no spans.
pub(super) fn waits(sides: [&RunView; 2]) -> Vec<Wait> {
    if !sides.iter().all(|s| s.is_recorded()) {
        return Vec::new();
    }
    let mut time = Sums::new();
    let mut count = Sums::new();
    let mut held = Sums::new();
    let mut cause: BTreeMap<WaitKey, [BTreeMap<Cause, Picos>; 2]> = BTreeMap::new();
    let mut parts: BTreeMap<WaitKey, BTreeSet<WaitKey>> = BTreeMap::new();
    for (side, view) in sides.into_iter().enumerate() {
        for gap in &view.run.gaps {
            let awaited = view.awaited(gap);
            let of = key(view, &awaited);
            let each = awaited.iter().map(|i| key(view, &[*i]));
            parts.entry(of.clone()).or_default().extend(each);
            let length = gap.end.saturating_sub(gap.start);
            *cause.entry(of.clone()).or_default()[side]
                .entry(gap.cause)
                .or_default() += length;
            let first = awaited.first().map(|&i| &view.run.spans[i as usize]);
            let late = first.map_or(0, |s| s.start.saturating_sub(s.issued).0);
            held.add(of.clone(), side, late);
            count.add(of.clone(), side, 1);
            time.add(of, side, length.0);
        }
    }
    let rules = rules(sides);
    time.by_change()
        .into_iter()
        .map(|(of, time)| {
            let times = count.0.get(&of).copied().unwrap_or_default();
            let held = held.0.get(&of).copied().unwrap_or_default();
            let largest = |all: &BTreeMap<Cause, Picos>| {
                let best = all.iter().max_by(|x, y| x.1.cmp(y.1).then(y.0.cmp(x.0)));
                best.map(|(cause, _)| *cause)
            };
            Wait {
                time: time.map(Picos),
                count: times.map(|n| n as u32),
                cause: cause.get(&of).map_or([None, None], |sides| {
                    [largest(&sides[0]), largest(&sides[1])]
                }),
                rules: parts
                    .get(&of)
                    .map_or_else(BTreeMap::new, |p| sum(&rules, p)),
                held: [0, 1].map(|side| Picos(held[side] / times[side].max(1))),
                of,
            }
        })
        .filter(|wait| change(wait.time.map(|t| t.0)) > 0 || wait.time[0].0 > 0)
        .collect()
}

/// Returns the name and phase of the awaited spans.
fn key(view: &RunView, awaited: &[u32]) -> WaitKey {
    let mut instrs = awaited.iter().filter_map(|&i| view.instr_of(i)).peekable();
    match instrs.peek().map(|first| first.phase) {
        Some(phase) => WaitKey {
            name: awaited_names(instrs.map(|i| view.name_of(i))),
            phase: phase.name().to_owned(),
        },
        None => WaitKey {
            name: "host".into(),
            phase: String::new(),
        },
    }
}

/// Number of instructions by rule.
type Rules = BTreeMap<String, [u32; 2]>;

/// Sums the rule counts of all parts.
fn sum(rules: &BTreeMap<WaitKey, Rules>, parts: &BTreeSet<WaitKey>) -> Rules {
    let mut all = Rules::new();
    for (rule, n) in parts.iter().filter_map(|p| rules.get(p)).flatten() {
        let sum = all.entry(rule.clone()).or_default();
        *sum = [sum[0] + n[0], sum[1] + n[1]];
    }
    all
}

/// Counts collectives by name, phase and the rule that emitted them.
fn rules(sides: [&RunView; 2]) -> BTreeMap<WaitKey, Rules> {
    let mut by_number = Sums::new();
    for (side, view) in sides.into_iter().enumerate() {
        let mut own: BTreeMap<(u32, _, u32), u64> = BTreeMap::new();
        let collectives = view
            .run
            .spans
            .iter()
            .filter_map(|s| view.instr(s.instr))
            .filter(|i| i.work.is_some_and(crate::view::Work::is_collective));
        for i in collectives {
            *own.entry((i.name, i.phase, i.rule)).or_default() += 1;
        }
        for ((name, phase, rule), n) in own {
            let text = |i: u32| view.names.get(i as usize).cloned().unwrap_or_default();
            let of = WaitKey {
                name: text(name),
                phase: phase.name().to_owned(),
            };
            by_number.add((of, text(rule)), side, n);
        }
    }
    let mut all: BTreeMap<WaitKey, Rules> = BTreeMap::new();
    for ((of, rule), n) in by_number.0 {
        all.entry(of).or_default().insert(rule, n.map(|n| n as u32));
    }
    all
}
