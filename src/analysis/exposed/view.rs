//! Exposed time of saved and imported runs, whose programs are unknown.

use super::{Awaited, Gap, NextCompute};
use shardlab_plan::program::Phase;
use shardlab_plan::record::{Cause, ExposedGap, Span, awaited_names, awaited_units};
use shardlab_plan::units::Picos;
use shardlab_reports::RunView;
use shardlab_reports::view::InstrView;
use std::collections::BTreeSet;

/// Returns all gaps of a run, described in words and ordered by time.
#[must_use]
pub(crate) fn gaps_of(view: &RunView) -> Vec<Gap> {
    let next = NextCompute::new(&view.run);
    let gaps = view.run.gaps.iter();
    gaps.map(|gap| describe(view, gap, &next)).collect()
}

fn describe(view: &RunView, gap: &ExposedGap, next: &NextCompute) -> Gap {
    let awaited = view.awaited(gap);
    let instr = |i: &u32| view.instr(view.run.spans.get(*i as usize)?.instr);
    let instrs: Vec<&InstrView> = awaited.iter().filter_map(instr).collect();
    let shown = instrs
        .first()
        .copied()
        .or_else(|| next.after(gap.end).as_ref().and_then(instr));
    let name = match instrs.is_empty() {
        true => "host".into(),
        false => awaited_names(instrs.iter().map(|i| view.name_of(i))),
    };
    let units: BTreeSet<_> = match instrs.is_empty() {
        true => shown.iter().map(|i| i.unit).collect(),
        false => instrs.iter().map(|i| i.unit).collect(),
    };
    let units: Vec<&str> = units.into_iter().map(|u| view.unit(u)).collect();
    let communicates = |i: &&InstrView| i.work.is_some_and(super::spans::Work::is_collective);
    Gap {
        start: gap.start.saturating_sub(view.run.recorded_from),
        length: gap.end - gap.start,
        cause: gap.cause,
        awaited: Awaited {
            name,
            phase: shown.map_or(Phase::Final, |i| i.phase).name(),
            collective: instrs.iter().any(communicates),
        },
        unit: awaited_units(&units),
        behind: None,
        why: why(view, gap, &awaited),
    }
}

/// Explains a gap from the times alone.
fn why(view: &RunView, gap: &ExposedGap, awaited: &[u32]) -> String {
    let spans: Vec<&Span> = awaited
        .iter()
        .filter_map(|i| view.run.spans.get(*i as usize))
        .collect();
    let alone: Picos = spans.iter().map(|s| s.alone).sum();
    match gap.cause {
        Cause::Straggler => "another rank was late".into(),
        Cause::Tail => "end of the step: no compute left".into(),
        Cause::Host if spans.is_empty() => "the host had not launched the next kernel".into(),
        Cause::Host => "the host launched it too late".into(),
        Cause::Wire => format!("takes {alone}, longer than the compute that it overlaps with"),
        Cause::Queue => "waited for earlier work on its stream".into(),
        Cause::Gate => "its start was held back by an event".into(),
        Cause::Contention => "waited for SMs that other kernels occupied".into(),
    }
}
