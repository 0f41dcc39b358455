//! Exposed time: what the compute stream waited for, and why.

use super::spans::{self, Work};
use serde::Serialize;
use shardlab_plan::Program;
use shardlab_plan::program::{Phase, Rule};
use shardlab_plan::record::{Blocker, Cause, Run};
use shardlab_plan::units::Picos;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What a gap waited for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Awaited {
    /// Kernel or collective, `host` where nothing on the device was waited for.
    pub name: String,
    /// Its phase; the phase of what came next where nothing was waited for.
    pub phase: &'static str,
    /// Whether it is a collective.
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
    /// Its unit.
    pub unit: String,
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
    /// Gaps.
    pub count: u32,
    /// Sum.
    pub total: Picos,
}

/// All gaps of a run in words, in order of time. Neighbouring gaps of one kernel for one cause are one.
#[must_use]
pub fn gaps(program: &Program, run: &Run) -> Vec<Gap> {
    let next = NextCompute::new(run);
    run.gaps
        .iter()
        .map(|gap| {
            let follower = next.after(gap.end);
            let shown = gap.waited_for.or(follower).map(|i| &run.spans[i as usize]);
            let phase = shown.map_or(Phase::Final, |s| program.instrs[s.instr.index()].phase);
            let name = gap.waited_for.map_or("host", |i| {
                spans::name(program, run.spans[i as usize].instr)
            });
            Gap {
                start: gap.start.saturating_sub(run.recorded_from),
                length: gap.end - gap.start,
                cause: gap.cause,
                awaited: Awaited {
                    name: name.to_owned(),
                    phase: phase.name(),
                    collective: gap.waited_for.is_some_and(|i| {
                        Work::of(program, run.spans[i as usize].instr)
                            .is_some_and(Work::is_collective)
                    }),
                },
                unit: shown.map_or_else(String::new, |s| spans::unit(program, s).to_owned()),
                why: why(program, run, gap.cause, gap.waited_for),
            }
        })
        .collect()
}

/// Gaps grouped by cause and what was waited for, largest sum first.
#[must_use]
pub fn groups(gaps: &[Gap]) -> Vec<Group> {
    let mut sums: BTreeMap<(Cause, &Awaited), (u32, Picos)> = BTreeMap::new();
    for gap in gaps {
        let entry = sums.entry((gap.cause, &gap.awaited)).or_default();
        entry.0 += 1;
        entry.1 += gap.length;
    }
    let mut groups: Vec<Group> = sums
        .into_iter()
        .map(|((cause, awaited), (count, total))| Group {
            cause,
            awaited: awaited.clone(),
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

fn why(program: &Program, run: &Run, cause: Cause, waited_for: Option<u32>) -> String {
    let Some(span) = waited_for.map(|i| run.spans[i as usize]) else {
        return match cause {
            Cause::Host => "the host had not issued the next kernel".into(),
            Cause::Tail => "nothing was left to compute".into(),
            Cause::Straggler => "another rank was late".into(),
            Cause::Contention => "other kernels held the device".into(),
            Cause::Gate | Cause::Wire => "a wait on the device".into(),
        };
    };
    let blocker = |i: u32| spans::name(program, run.spans[i as usize].instr);
    let work = Work::of(program, span.instr);
    match cause {
        Cause::Host => "the host issued it too late".into(),
        Cause::Wire if work.is_some_and(Work::is_collective) => format!(
            "it takes {} on the wire, more than the computation beside it",
            span.alone
        ),
        Cause::Wire => format!("it takes {}", span.alone),
        Cause::Contention => format!(
            "{} alone, {} beside other work",
            span.alone,
            span.end - span.start
        ),
        Cause::Tail => "nothing was left to compute beside it".into(),
        Cause::Straggler => "another rank joined late".into(),
        Cause::Gate => {
            let rule = gate_rule(program, &span);
            match (span.blocker, rule) {
                (_, Some(rule)) => format!("held back by rule {}", rule.name()),
                (Blocker::Event(i) | Blocker::Stream(i) | Blocker::Communicator(i), None) => {
                    format!("it had to wait for {}", blocker(i))
                }
                _ => "its start was held back".into(),
            }
        }
    }
}

/// The gate among the instructions right before a span's: waits on its stream since the task before it.
fn gate_rule(program: &Program, span: &shardlab_plan::record::Span) -> Option<Rule> {
    use shardlab_plan::program::Op;
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
