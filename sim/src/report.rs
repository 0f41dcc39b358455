//! Converts the state of the engine to a run: step times, memory, collectives, exposed time, cost
//! sources, and the run's invariants.

mod gaps;

use crate::SimError;
use crate::cost::Costs;
use crate::engine::{Pass, Rank, Tables};
use crate::hardware::Profile;
use crate::host::{self, HostCosts};
use crate::memory::MemoryRun;
use crate::options::Options;
use crate::part::Part;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::{Program, SectionKind};
use shardlab_plan::record::{
    Clock, CostSources, MemoryReport, MemorySample, OtherRank, PeakAt, Run, RunKind, Span,
    StepRecord, collective_stats,
};
use shardlab_plan::units::{Bytes, Picos};
use std::collections::BTreeMap;

/// Inputs of a report.
pub(crate) struct Parts<'a> {
    pub(crate) program: &'a Program,
    pub(crate) profile: &'a Profile,
    pub(crate) options: &'a Options,
    pub(crate) costs: &'a Costs,
    pub(crate) tables: &'a Tables<'a>,
    pub(crate) host: &'a HostCosts,
    pub(crate) memory: &'a MemoryRun<'a>,
    pub(crate) clock: Option<Clock>,
}

/// Returns the end of each pass over all ranks.
fn pass_ends(parts: &Parts<'_>, ranks: &[Rank<'_>]) -> Vec<u64> {
    let mut latest = 0;
    (0..parts.tables.passes.len())
        .map(|i| {
            latest = ranks
                .iter()
                .map(|r| r.passes[i].end())
                .max()
                .unwrap_or(0)
                .max(latest);
            latest
        })
        .collect()
}

/// Returns the durations of the steady passes, from the end of each pass to the end of the next.
/// The first one follows passes of another kind, or none.
fn durations(parts: &Parts<'_>, ranks: &[Rank<'_>]) -> Vec<u64> {
    let ends = pass_ends(parts, ranks);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let steady = |p: &Pass| parts.tables.sections[p.section].kind == SectionKind::Steady;
    let passes = parts.tables.passes.iter().zip(starts.zip(&ends));
    let steady = passes.filter(|(p, _)| steady(p));
    steady.map(|(_, (start, end))| end - start).collect()
}

/// Returns whether the last two steady steps took the same time.
pub(crate) fn repeats(parts: &Parts<'_>, ranks: &[Rank<'_>]) -> bool {
    match durations(parts, ranks).as_slice() {
        [first, second] => starts_alike(*first, *second),
        [.., a, b] => a.abs_diff(*b) <= b / 1000,
        _ => true,
    }
}

/// Returns whether the first two steps took the same time, up to 1/200. The kernels at the start of
/// the first step find empty queues, which causes a small difference.
pub(crate) fn starts_alike(first: u64, second: u64) -> bool {
    first.abs_diff(second) <= second / 200
}

/// Returns the number of program instructions that the host interpreted over all timed passes and
/// ranks. Passes that only the allocators ran do not count.
pub(crate) fn instructions(parts: &Parts<'_>, ranks: &[Rank<'_>]) -> u64 {
    let of = |section: usize| u64::from(parts.program.sections[section].instrs.len() as u32);
    parts
        .tables
        .passes
        .iter()
        .map(|p| of(p.section))
        .sum::<u64>()
        * ranks.len() as u64
}

/// Checks the invariants of every run.
pub(crate) fn invariants(parts: &Parts<'_>, ranks: &[Rank<'_>]) -> Result<(), SimError> {
    let fail = |message: String| Err(SimError::Internal(message));
    for (r, rank) in ranks.iter().enumerate() {
        let (makespan, chain, busiest) = (rank.makespan(), rank.chain, rank.busiest());
        if makespan < chain || chain < busiest {
            return fail(format!(
                "rank {r}: makespan {makespan} ps, critical path {chain} ps, busiest stream {busiest} ps"
            ));
        }
        let [issued, ended] = rank.collectives;
        if issued != ended {
            return fail(format!(
                "rank {r}: {issued} B of collectives issued, {ended} B ended"
            ));
        }
        let mut last = [0u64; 256];
        for (i, span) in rank.spans.iter().enumerate() {
            let s = usize::from(span.stream.0);
            if span.start.0 < last[s]
                || span.end.0 < span.start.0 + span.alone.0
                || span.start < span.issued
            {
                return fail(format!(
                    "rank {r}: span {i} of stream {s}: {span:?} after {} ps",
                    last[s]
                ));
            }
            last[s] = span.end.0;
        }
        let recorded = parts
            .tables
            .passes
            .iter()
            .find(|p| p.recorded)
            .map(|p| &parts.tables.sections[p.section]);
        if recorded.is_some_and(|s| s.tasks != rank.spans.len()) {
            return fail(format!(
                "rank {r}: {} spans of {:?} tasks",
                rank.spans.len(),
                recorded.map(|s| s.tasks)
            ));
        }
    }
    Ok(())
}

/// Builds the run as rank 0 observed it; step times are those of the slowest rank.
pub(crate) fn build(parts: &Parts<'_>, ranks: &[Rank<'_>]) -> Run {
    let program = parts.program;
    let rank = &ranks[0];
    let ends = pass_ends(parts, ranks);
    let last = ends.len() - 1;
    let (from, to) = (last.checked_sub(1).map_or(0, |i| ends[i]), ends[last]);
    let durations = durations(parts, ranks);
    // The first step starts with empty queues.
    let later = durations.get(1..).unwrap_or_default();
    let every = parts.options.jitter > 0.0;
    let step_samples: Vec<Picos> = match later.last() {
        Some(_) if every => later.iter().map(|&d| Picos(d)).collect(),
        Some(&one) => vec![Picos(one)],
        None => vec![Picos(to - from)],
    };
    let step = step_samples[step_samples.len() - 1];
    let mut spans = rank.spans.clone();
    let gaps = gaps::find(program, &spans, Picos(from), Picos(to), parts.tables.gap);
    let mut exposed = BTreeMap::new();
    for gap in &gaps {
        *exposed.entry(gap.cause).or_insert(Picos::ZERO) += gap.end - gap.start;
    }
    let collectives = collective_stats(program, &spans);
    let record = parts.options.record;
    let costs = if record {
        sources(program, &spans, parts.costs)
    } else {
        CostSources::default()
    };
    if !record {
        spans = Vec::new();
    }
    let section = &parts.tables.sections[parts.tables.passes[last].section];
    let stalls: u64 = parts.tables.passes[last]
        .stalls
        .iter()
        .map(|s| s.cost)
        .sum();
    Run {
        scenario: program.meta.scenario.clone(),
        program_digest: if record {
            program.digest()
        } else {
            String::new()
        },
        kind: RunKind::Sim,
        world_size: program.meta.mesh.world(),
        policy: program.meta.policy.to_owned(),
        hardware: parts.profile.name.clone(),
        steps: steps(parts, rank, &ends),
        step_samples,
        spans,
        recorded_from: Picos(from),
        recorded_to: Picos(to),
        memory: memory(parts, rank, last),
        collectives,
        gaps: if record { gaps } else { Vec::new() },
        exposed,
        host: Picos(section.host + stalls),
        tokens: program.meta.tokens,
        mfu: parts.profile.utilisation(program, step),
        costs,
        losses: Vec::new(),
        grad_norms: Vec::new(),
        environment: environment(parts, ranks.len()),
        basis: None,
        other: record.then(|| other(parts.options, ranks)).flatten(),
    }
}

/// Returns the slowest straggler, or, if that is rank 0, a rank that waits for it.
fn other(options: &Options, ranks: &[Rank<'_>]) -> Option<OtherRank> {
    let slow = options.stragglers.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let rank = match slow?.0 {
        0 => 1,
        rank => rank,
    };
    let spans = ranks.get(rank as usize)?.spans.clone();
    Some(OtherRank { rank, spans })
}

/// Returns an environment entry that names slowed ranks or parts with their factors; `None` if
/// there are none.
fn told(key: &str, who: impl Iterator<Item = (String, f64)>) -> Option<(String, String)> {
    let texts: Vec<String> = who
        .map(|(name, factor)| format!("{name}={factor}"))
        .collect();
    (!texts.is_empty()).then(|| (key.to_owned(), texts.join(" ")))
}

fn environment(parts: &Parts<'_>, ranks: usize) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    all.insert(
        "simulator".to_owned(),
        concat!("shardlab-sim ", env!("CARGO_PKG_VERSION")).to_owned(),
    );
    all.insert("simulated_ranks".to_owned(), ranks.to_string());
    if let Some(clock) = parts.clock {
        clock.tell(&mut all);
    }
    if parts.options.jitter > 0.0 {
        all.insert("seed".to_owned(), parts.options.seed.to_string());
        all.insert("jitter".to_owned(), parts.options.jitter.to_string());
    }
    let options = parts.options;
    let stragglers = options.stragglers.iter().map(|&(r, f)| (r.to_string(), f));
    let slower = options
        .slower
        .iter()
        .map(|&(p, f)| (p.name().to_owned(), f));
    let scale = Part::ALL.map(|part| (part.name().to_owned(), parts.profile.times(part)));
    let scale = scale.into_iter().filter(|s| s.1 != 1.0);
    all.extend(told("scale", scale));
    all.extend(told("stragglers", stragglers));
    all.extend(told("slower", slower));
    all
}

fn steps(parts: &Parts<'_>, rank: &Rank<'_>, ends: &[u64]) -> Vec<StepRecord> {
    let mut step = 0;
    let mut records = Vec::with_capacity(ends.len());
    let order = crate::memory::order(parts.program, ends.len());
    // Light runs skip the passes before the steady ones.
    let skipped = order
        .iter()
        .position(|&k| k == parts.tables.sections[parts.tables.passes[0].section].kind)
        .unwrap_or(0);
    for (i, pass) in parts.tables.passes.iter().enumerate() {
        let section = &parts.tables.sections[pass.section];
        if section.kind == SectionKind::Init {
            continue;
        }
        let memory = parts
            .memory
            .passes
            .get(i + skipped)
            .or_else(|| parts.memory.passes.last());
        records.push(StepRecord {
            step,
            section: section.kind,
            start: Picos(rank.passes[i].start),
            end: Picos(ends[i]),
            host: Picos(section.host + pass.stalls.iter().map(|s| s.cost).sum::<u64>()),
            peak_allocated: memory.map_or(Bytes::ZERO, |m| m.peaks.peak_allocated),
            peak_reserved: memory.map_or(Bytes::ZERO, |m| m.peaks.peak_reserved),
        });
        step += u32::from(section.kind != SectionKind::Validation);
    }
    records
}

/// Returns the host time after each instruction of the recorded section, from the times of the
/// executed codes.
fn host_times(parts: &Parts<'_>, rank: &Rank<'_>, last: usize) -> Vec<u64> {
    let pass = &parts.tables.passes[last];
    let section = &parts.program.sections[pass.section];
    let code = &parts.tables.sections[pass.section];
    let instrs = parts.program.section_instrs(section);
    let mut now = rank.passes[last].start;
    let mut next = 0;
    host::costs(parts.program, section.kind, instrs, parts.host)
        .enumerate()
        .map(|(i, (cost, _))| {
            now += cost;
            if code.codes[next].instr == section.instrs.start + i as u32 {
                now = rank.host_times.get(next).copied().unwrap_or(now);
                next += 1;
            }
            now
        })
        .collect()
}

fn memory(parts: &Parts<'_>, rank: &Rank<'_>, last: usize) -> MemoryReport {
    let m = parts.memory;
    let outside = parts.profile.outside_allocator(parts.program).total();
    let section = &parts.program.sections[parts.tables.passes[last].section];
    let times = if parts.options.record {
        host_times(parts, rank, last)
    } else {
        Vec::new()
    };
    let time = |instr: u32| {
        let i = instr.checked_sub(section.instrs.start);
        Picos(i.and_then(|i| times.get(i as usize)).copied().unwrap_or(0))
    };
    let (phase, unit, micro_batch) = m.peak_instr();
    let order = crate::memory::order(parts.program, m.passes.len());
    let step = order
        .iter()
        .take(m.ledger.peak().pass)
        .filter(|kind| kind.is_training())
        .count() as u32;
    MemoryReport {
        peak_allocated: m.ledger.peak().allocated,
        peak_reserved: m.ledger.peak_reserved(),
        peak_device: m.ledger.peak_reserved() + outside,
        persistent: m
            .passes
            .last()
            .map_or(Bytes::ZERO, |p| p.peaks.end_allocated),
        capacity: Some(parts.profile.capacity()),
        at: PeakAt {
            step,
            instr: m.ledger.peak().instr,
            time: time(m.ledger.peak().instr.0),
            phase,
            unit,
            micro_batch,
        },
        by_role: m.ledger.peak_by_role(),
        by_unit: m.ledger.peak_by_unit(parts.program),
        retries: m.ledger.counters().retries,
        timeline: m
            .timeline
            .iter()
            .map(|s| MemorySample {
                instr: InstrId(s.instr),
                time: time(s.instr),
                allocated: Bytes(s.allocated),
                reserved: Bytes(s.reserved),
            })
            .collect(),
    }
}

fn sources(program: &Program, spans: &[Span], costs: &Costs) -> CostSources {
    let mut sources = CostSources::default();
    let mut busy = vec![0u64; costs.all.len()];
    for span in spans {
        if let Some(i) = costs.index(program, span.instr) {
            busy[i] += span.alone.0;
        }
    }
    let mut by_name: BTreeMap<String, u64> = BTreeMap::new();
    for (i, (&time, cost)) in busy.iter().zip(&costs.all).enumerate() {
        if time == 0 {
            continue;
        }
        if cost.measured {
            sources.measured += Picos(time);
            continue;
        }
        sources.modelled += Picos(time);
        let name = if i < costs.collectives {
            costs.modelled_name(&program.kernels[i])
        } else if i < costs.copies {
            let collective = &program.collectives[i - costs.collectives];
            collective.kind.name().to_owned()
        } else {
            let kind = if i < costs.inputs { "copy" } else { "input" };
            kind.to_owned()
        };
        *by_name.entry(name).or_default() += time;
    }
    sources.modelled_by_name = by_name.into_iter().map(|(n, t)| (n, Picos(t))).collect();
    sources
        .modelled_by_name
        .sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    sources
}
