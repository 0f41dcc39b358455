//! Exposed time: when the compute stream was idle, what it waited for, and why.

mod view;

pub(crate) use view::gaps_of;

use super::{awaited, spans};
use serde::Serialize;
use shardlab_plan::Program;
use shardlab_plan::program::{Op, Phase, Rule};
use shardlab_plan::record::basis::number;
use shardlab_plan::record::{Basis, Blocker, Cause, ExposedGap, Queued, Queues, Run, Span};
use shardlab_plan::units::Picos;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What a gap waited for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Awaited {
    /// Names of kernels and collectives; `host` if the compute stream did not wait for work on the
    /// device.
    pub name: String,
    /// Phase of the first task, or of the next kernel if the gap did not wait for work on the
    /// device.
    pub phase: &'static str,
    /// Whether one of the tasks is a collective.
    pub collective: bool,
}

/// A gap, described in words.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gap {
    /// Start, relative to the start of the step.
    pub start: Picos,
    /// Length.
    pub length: Picos,
    /// Cause.
    pub cause: Cause,
    /// What was waited for.
    pub awaited: Awaited,
    /// Units of the tasks; all units of a collective that carries several.
    pub unit: String,
    /// The collective that was ahead in the queue, if that is the cause.
    pub behind: Option<&'static str>,
    /// The reason, as one sentence.
    pub why: String,
}

/// Exposed time, grouped by cause and by what the gaps waited for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Cause.
    pub cause: Cause,
    /// What was waited for.
    pub awaited: Awaited,
    /// The collective that was ahead in the queue, if that is the cause.
    pub behind: Option<&'static str>,
    /// Number of gaps.
    pub count: u32,
    /// Sum of their lengths.
    pub total: Picos,
}

impl Gap {
    /// Returns the cells of a table: what was waited for, unit, phase, cause, start and length in
    /// milliseconds, and the reason.
    #[must_use]
    pub fn cells(self, basis: Option<&Basis>) -> [String; 7] {
        [
            self.awaited.name,
            self.unit,
            self.awaited.phase.to_owned(),
            self.cause.name().to_owned(),
            self.start.show_ms(2),
            number(self.length.ms(), 3, basis),
            self.why,
        ]
    }
}

impl Group {
    /// Heads of the columns of [`Self::cells`].
    pub const HEADS: [&str; 5] = ["cause", "waited for", "phase", ">gaps", ">ms"];

    /// Returns the cells of a table.
    #[must_use]
    pub fn cells(&self, basis: Option<&Basis>) -> [String; 5] {
        [
            self.cause.name().to_owned(),
            self.awaited.name.clone(),
            self.awaited.phase.to_owned(),
            self.count.to_string(),
            number(self.total.ms(), 3, basis),
        ]
    }
}

/// Returns all gaps of a run, described in words and ordered by time. Adjacent gaps with the same
/// kernel and cause are merged.
#[must_use]
pub fn gaps(program: &Program, run: &Run) -> Vec<Gap> {
    let next = NextCompute::new(run);
    let queues = Queues::new(program, &run.spans);
    run.gaps
        .iter()
        .map(|gap| {
            let awaited = awaited::spans_of(program, run, gap);
            let queued = match gap.cause {
                Cause::Queue => queues.of_gap(gap),
                _ => None,
            };
            let first = awaited.first().copied();
            let shown = first
                .or(next.after(gap.end))
                .map(|i| &run.spans[i as usize]);
            let phase = shown.map_or(Phase::Final, |s| program.instrs[s.instr.index()].phase);
            let (name, unit) = match shown {
                Some(_) if first.is_some() => (
                    awaited::names(program, run, &awaited),
                    awaited::units(program, run, &awaited),
                ),
                Some(span) => ("host".into(), spans::unit(program, span).to_owned()),
                None => ("host".into(), String::new()),
            };
            Gap {
                start: gap.start.saturating_sub(run.recorded_from),
                length: gap.end - gap.start,
                cause: gap.cause,
                awaited: Awaited {
                    name,
                    phase: phase.name(),
                    collective: awaited::communicates(program, run, &awaited),
                },
                unit,
                behind: queued.and_then(|q| collective(program, run, q.behind)),
                why: why(program, run, gap, &awaited, queued),
            }
        })
        .collect()
}

/// Groups gaps by cause and by what they waited for, largest sum first.
#[must_use]
pub fn groups(gaps: &[Gap]) -> Vec<Group> {
    let mut sums: BTreeMap<_, (u32, Picos)> = BTreeMap::new();
    for gap in gaps {
        let entry = sums
            .entry((gap.cause, &gap.awaited, gap.behind))
            .or_default();
        entry.0 += 1;
        entry.1 += gap.length;
    }
    let mut groups: Vec<Group> = sums
        .into_iter()
        .map(|((cause, awaited, behind), (count, total))| Group {
            cause,
            awaited: awaited.clone(),
            behind,
            count,
            total,
        })
        .collect();
    groups.sort_by_key(|g| Reverse(g.total));
    groups
}

/// Returns the `limit` longest gaps.
#[must_use]
pub fn longest(mut gaps: Vec<Gap>, limit: usize) -> Vec<Gap> {
    gaps.sort_by(|a, b| b.length.cmp(&a.length).then(a.start.cmp(&b.start)));
    gaps.truncate(limit);
    gaps
}

/// Spans of the compute stream, sorted by start.
struct NextCompute(Vec<(Picos, u32)>);

impl NextCompute {
    fn new(run: &Run) -> Self {
        let compute = run
            .spans
            .iter()
            .enumerate()
            .filter(|(_, s)| s.stream == shardlab_plan::ir::COMPUTE)
            .map(|(i, s)| (s.start, i as u32));
        Self(compute.collect())
    }

    /// Returns the first span that starts at `time` or later.
    fn after(&self, time: Picos) -> Option<u32> {
        let i = self.0.partition_point(|&(start, _)| start < time);
        self.0.get(i).map(|&(_, span)| span)
    }
}

/// Returns the kind of a span's collective.
fn collective(program: &Program, run: &Run, span: u32) -> Option<&'static str> {
    match program.instrs[run.spans[span as usize].instr.index()].op {
        Op::Collective { id, .. } => Some(program.collectives[id.index()].kind.name()),
        _ => None,
    }
}

fn why(
    program: &Program,
    run: &Run,
    gap: &ExposedGap,
    awaited: &[u32],
    queued: Option<Queued>,
) -> String {
    let Some(&first) = awaited.first() else {
        return match gap.cause {
            Cause::Host => "the host had not launched the next kernel".into(),
            Cause::Tail => "end of the step: no compute left".into(),
            Cause::Straggler => "another rank was late".into(),
            Cause::Contention => "other kernels occupied the device".into(),
            Cause::Gate | Cause::Queue | Cause::Wire => "a wait on the device".into(),
        };
    };
    let name = |i: u32| spans::name(program, run.spans[i as usize].instr);
    let named = |i: u32| {
        format!(
            "{} {}",
            name(i),
            spans::unit(program, &run.spans[i as usize])
        )
    };
    let [it, takes, overlaps, them, their] = match awaited {
        [_] => ["it", "takes", "overlaps", "it", "its"],
        _ => ["they", "take", "overlap", "them", "their"],
    };
    let sum = |of: &dyn Fn(&Span) -> Picos| -> Picos {
        awaited.iter().map(|&i| of(&run.spans[i as usize])).sum()
    };
    let alone = sum(&|s| s.alone);
    let why = match gap.cause {
        Cause::Host => format!("the host launched {them} too late"),
        Cause::Wire if awaited::communicates(program, run, awaited) => {
            format!("{takes} {alone} on the wire, longer than the compute {it} {overlaps} with")
        }
        Cause::Wire => format!("{takes} {alone}"),
        Cause::Queue => match queued {
            Some(q) => format!(
                "waited {} for {} on the same {}",
                q.time(),
                named(q.behind),
                q.shared.name()
            ),
            None => "waited for another collective".into(),
        },
        Cause::Contention => match sum(&|s| s.end - s.start) {
            shared if shared > alone => {
                format!("takes {alone} alone, {shared} next to concurrent work")
            }
            // The collective ran at its uncontended speed, but started later.
            _ => "waited for SMs that other kernels occupied".into(),
        },
        Cause::Tail => format!("end of the step: no compute left to hide {them}"),
        Cause::Straggler => "another rank was late".into(),
        Cause::Gate => {
            let span = run.spans[first as usize];
            match (span.blocker, gate_rule(program, &span)) {
                (_, Some(rule)) => format!("held back by rule {}", rule.name()),
                (Blocker::Event(i) | Blocker::Stream(i) | Blocker::Communicator(i), None) => {
                    format!("{it} had to wait for {}", name(i))
                }
                _ => format!("{their} start was held back"),
            }
        }
    };
    match gap.waited_for.filter(|last| !awaited.contains(last)) {
        Some(last) => format!("{why}; {} follows {them}", name(last)),
        None => why,
    }
}

/// Returns the rule of the gate right before a span: a wait on its stream since the previous task.
fn gate_rule(program: &Program, span: &shardlab_plan::record::Span) -> Option<Rule> {
    const LOOK_BACK: u32 = 24;
    let from = span.instr.0.saturating_sub(LOOK_BACK);
    (from..span.instr.0)
        .rev()
        .map(|i| &program.instrs[i as usize])
        .take_while(|i| {
            !matches!(i.op, Op::Launch { stream, .. } | Op::Collective { stream, .. } if stream == span.stream)
        })
        .filter(|i| matches!(i.op, Op::Wait { stream, .. } if stream == span.stream))
        .map(|i| i.rule)
        .find(|rule| {
            matches!(rule, Rule::GatherGate | Rule::ReduceGate | Rule::ReduceFork)
        })
}
