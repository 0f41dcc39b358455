//! Exposed time: what the compute stream waited for, and why.

use super::{awaited, spans};
use serde::Serialize;
use shardlab_plan::Program;
use shardlab_plan::program::{Op, Phase, Rule};
use shardlab_plan::record::{Blocker, Cause, ExposedGap, Queued, Queues, Run, Span};
use shardlab_plan::units::Picos;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What a gap waited for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Awaited {
    /// Kernels and collectives, `host` where nothing on the device was waited for.
    pub name: String,
    /// Phase of the first; the phase of what came next where nothing was waited for.
    pub phase: &'static str,
    /// Whether a collective is among them.
    pub collective: bool,
}

/// A gap in words.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gap {
    /// Begin, after the step's begin.
    pub start: Picos,
    /// Length.
    pub length: Picos,
    /// Cause.
    pub cause: Cause,
    /// What was waited for.
    pub awaited: Awaited,
    /// Its units; all that a collective for several carries.
    pub unit: String,
    /// The collective that it waited behind, where that is the cause.
    pub behind: Option<&'static str>,
    /// Why, one sentence.
    pub why: String,
}

/// Exposed time by what was waited for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Cause.
    pub cause: Cause,
    /// What was waited for.
    pub awaited: Awaited,
    /// The collective that it waited behind, where that is the cause.
    pub behind: Option<&'static str>,
    /// Gaps.
    pub count: u32,
    /// Sum.
    pub total: Picos,
}

/// All gaps of a run in words, in order of time. Neighbouring gaps of one kernel for one cause are one.
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

/// Gaps grouped by cause and what was waited for, largest sum first.
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

/// The longest gaps.
#[must_use]
pub fn longest(mut gaps: Vec<Gap>, limit: usize) -> Vec<Gap> {
    gaps.sort_by(|a, b| b.length.cmp(&a.length).then(a.start.cmp(&b.start)));
    gaps.truncate(limit);
    gaps
}

/// Spans of the compute stream by start.
struct NextCompute(Vec<(Picos, u32)>);

impl NextCompute {
    fn new(run: &Run) -> Self {
        let compute = run
            .spans
            .iter()
            .enumerate()
            .filter(|(_, s)| s.stream == shardlab_plan::program::COMPUTE)
            .map(|(i, s)| (s.start, i as u32));
        Self(compute.collect())
    }

    /// The first one that starts at this time or later.
    fn after(&self, time: Picos) -> Option<u32> {
        let i = self.0.partition_point(|&(start, _)| start < time);
        self.0.get(i).map(|&(_, span)| span)
    }
}

/// Kind of a span's collective.
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
            Cause::Host => "the host had not issued the next kernel".into(),
            Cause::Tail => "nothing was left to compute".into(),
            Cause::Straggler => "another rank was late".into(),
            Cause::Contention => "other kernels held the device".into(),
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
    let [it, takes, them, their] = match awaited {
        [_] => ["it", "takes", "it", "its"],
        _ => ["they", "take", "them", "their"],
    };
    let sum = |of: &dyn Fn(&Span) -> Picos| -> Picos {
        awaited.iter().map(|&i| of(&run.spans[i as usize])).sum()
    };
    let alone = sum(&|s| s.alone);
    let why = match gap.cause {
        Cause::Host => format!("the host issued {them} too late"),
        Cause::Wire if awaited::communicates(program, run, awaited) => {
            format!("{it} {takes} {alone} on the wire, more than the computation beside {them}")
        }
        Cause::Wire => format!("{it} {takes} {alone}"),
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
            beside if beside > alone => format!("{alone} alone, {beside} beside other work"),
            // As fast as alone, but later.
            _ => "waited for SMs that other kernels held".into(),
        },
        Cause::Tail => format!("nothing was left to compute beside {them}"),
        Cause::Straggler => "another rank joined late".into(),
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
        Some(last) => format!("{why}; {} comes behind {them}", name(last)),
        None => why,
    }
}

/// The gate among the instructions right before a span's: waits on its stream since the task before it.
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
