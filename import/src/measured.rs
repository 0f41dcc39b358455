//! Converts a trace to a measured run with the same structure as a run of `exec`.

mod clocks;
mod collectives;
mod gaps;
mod memory;
mod names;
mod pairs;
mod spans;

pub(crate) use clocks::clocks;
pub(crate) use collectives::pure_times;
pub use collectives::{Pure, bytes_of, of_rank};
pub use memory::Activation;
pub(crate) use names::{IMPORTED, shapes};
pub use pairs::CollectiveSpan;

use crate::attribute::{Attributed, Step, Work};
use crate::kineto::Trace;
use crate::names::Names;
use serde::Serialize;
use shardlab_plan::ir::{InstrId, Role, StreamId, UnitId};
use shardlab_plan::program::{Phase, SectionKind};
use shardlab_plan::record::{CostSources, Run, RunKind, StepRecord};
use shardlab_plan::units::{Bytes, Picos};
use std::collections::BTreeMap;

/// The instruction that a span or a memory sample of a measured run refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instr {
    /// Number in the order of issue by the host.
    pub id: InstrId,
    /// Index of its name in [`Measured::names`].
    pub name: u32,
    /// Rule that issues it in programs, such as `prefetch`; `imported` if the trace does not show
    /// the rule.
    pub rule: &'static str,
    /// Kind of work; `None` for allocations and frees.
    pub work: Option<Work>,
    /// Role of the memory that it allocates.
    pub role: Option<Role>,
    /// Unit, an index into [`Measured::units`].
    pub unit: UnitId,
    /// Phase.
    pub phase: Phase,
    /// Micro-batch.
    pub micro_batch: u16,
    /// Stream, an index into [`Measured::streams`].
    pub stream: StreamId,
    /// Payload of a collective, bytes of a copy or an allocation.
    pub bytes: u64,
    /// Number of ranks of a collective's group; 0 for other work, or if it is not known.
    pub ranks: u32,
    /// Floating-point operations, if shapes were recorded.
    pub flops: u64,
}

/// A measured run, with everything that its numbers refer to.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The run.
    pub run: Run,
    /// Instructions by increasing id.
    pub instrs: Vec<Instr>,
    /// Names.
    pub names: Vec<String>,
    /// Units; the first is the root.
    pub units: Vec<String>,
    /// Streams; the first is the compute stream.
    pub streams: Vec<String>,
    /// Floating-point operations per step; 0 without shapes.
    pub flops: u64,
    /// Activations of the first micro-batch; empty if memory was not recorded.
    pub activations: Vec<Activation>,
    /// Host times, since the start of the trace, at which forward leaves the root and backward
    /// enters it in the first micro-batch. The loss is computed between them. `None` if no hooks
    /// show them.
    pub loss: Option<[Picos; 2]>,
}

/// Device times of a step, in nanoseconds of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepTime {
    /// Step, an index into [`crate::attribute::Steps::all`].
    pub step: u32,
    /// End of the previous step, or the start of its own first work.
    pub from: i64,
    /// End of its last work.
    pub to: i64,
    /// Whether the previous step is in the trace. If it is not, `from` excludes the host's share.
    pub follows: bool,
}

/// Returns the times of the complete steps.
#[must_use]
pub fn step_times(trace: &Trace, a: &Attributed) -> Vec<StepTime> {
    let mut spans: BTreeMap<u32, (i64, i64)> = BTreeMap::new();
    for w in &a.work {
        let event = &trace.device[w.device as usize];
        let span = spans
            .entry(w.place.step)
            .or_insert((event.start, event.end));
        *span = (span.0.min(event.start), span.1.max(event.end));
    }
    let mut times = Vec::new();
    let mut before: Option<i64> = None;
    for (step, span) in spans {
        // Work that was issued for the next step counts as part of that step.
        let from = before.map_or(span.0, |b| b.min(span.1));
        if a.steps.all[step as usize].is_whole() {
            times.push(StepTime {
                step,
                from,
                to: span.1,
                follows: before.is_some(),
            });
        }
        before = Some(span.1);
    }
    times
}

/// Returns the step to show in detail: the one with the median time among those that follow another
/// step.
#[must_use]
pub fn typical(times: &[StepTime]) -> Option<StepTime> {
    let following: Vec<&StepTime> = times.iter().filter(|t| t.follows).collect();
    let mut sorted = if following.is_empty() {
        times.iter().collect()
    } else {
        following
    };
    sorted.sort_by_key(|t| t.to - t.from);
    sorted.get(sorted.len().saturating_sub(1) / 2).map(|t| **t)
}

/// Labels of a run.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    /// Name.
    pub name: String,
    /// Policy.
    pub policy: String,
    /// Ranks.
    pub world_size: u32,
    /// Tokens per step and rank; 0 if no shapes show them.
    pub tokens: u64,
    /// Facts of the environment.
    pub environment: BTreeMap<String, String>,
}

/// Converts a trace to a run. `pure` has the times of collectives without waits for other ranks, by
/// device event.
#[must_use]
pub fn measured(
    trace: &Trace,
    a: &Attributed,
    times: &[StepTime],
    pure: &BTreeMap<u32, Pure>,
    labels: Labels,
) -> Measured {
    let shown = typical(times);
    let origin = origin(trace);
    let ps = |t: i64| Picos((t - origin).max(0).cast_unsigned() * 1000);
    let mut table = Names::default();
    let parts = spans::Parts {
        trace,
        attributed: a,
        origin,
        pure,
    };
    let spans::Built {
        spans,
        waits,
        mut instrs,
        streams,
    } = spans::build(&parts, shown, &mut table);
    let memory = memory::build(trace, a, shown, origin, &mut instrs, &mut table);
    let (from, to) = shown.map_or((Picos::ZERO, Picos::ZERO), |s| (ps(s.from), ps(s.to)));
    let by_id: BTreeMap<InstrId, Instr> = instrs.iter().map(|i| (i.id, *i)).collect();
    let work = |id: InstrId| by_id.get(&id).and_then(|i| i.work);
    let bytes = |id: InstrId| by_id.get(&id).map_or(0, |i| i.bytes);
    let gaps = gaps::find(&spans, &waits, from, to, &|id| {
        work(id).is_some_and(Work::is_collective)
    });
    let mut exposed = BTreeMap::new();
    for gap in &gaps {
        *exposed.entry(gap.cause).or_insert(Picos::ZERO) += gap.end - gap.start;
    }
    let steps: Vec<StepRecord> = times
        .iter()
        .enumerate()
        .map(|(i, t)| {
            let (host_from, host_to) = host_span(trace, a, t.step);
            StepRecord {
                step: u32::try_from(i).unwrap_or(u32::MAX),
                section: SectionKind::Steady,
                start: ps(t.from),
                end: ps(t.to),
                host: Picos((host_to - host_from).max(0).cast_unsigned() * 1000),
                peak_allocated: Bytes(memory::peak(trace, &a.steps.all, t.step).0),
                peak_reserved: Bytes(memory::peak(trace, &a.steps.all, t.step).1),
            }
        })
        .collect();
    let samples = samples(times);
    let busy = spans.iter().map(|s| s.end - s.start).sum();
    let host = shown.map_or(Picos::ZERO, |s| {
        let (from, to) = host_span(trace, a, s.step);
        Picos((to - from).max(0).cast_unsigned() * 1000)
    });
    let flops = instrs.iter().map(|i| i.flops).sum();
    let run = Run {
        scenario: labels.name,
        program_digest: String::new(),
        kind: RunKind::Import,
        world_size: labels.world_size,
        policy: labels.policy,
        hardware: trace.head.devices.first().cloned().unwrap_or_default(),
        collectives: collectives::stats(&spans, &work, &bytes),
        steps,
        step_samples: samples,
        spans,
        recorded_from: from,
        recorded_to: to,
        memory,
        gaps,
        exposed,
        host,
        tokens: labels.tokens,
        mfu: 0.0,
        costs: CostSources {
            measured: busy,
            ..CostSources::default()
        },
        losses: Vec::new(),
        grad_norms: Vec::new(),
        environment: labels.environment,
        basis: None,
        other: None,
    };
    Measured {
        run,
        instrs,
        names: table.map(str::to_owned),
        units: a.units.names().to_vec(),
        streams,
        flops,
        activations: memory::activations(trace, a, shown, origin),
        loss: loss(trace, a, shown).map(|times| times.map(ps)),
    }
}

/// Returns when forward leaves the root and backward enters it, according to FSDP2's hooks.
fn loss(trace: &Trace, a: &Attributed, shown: Option<StepTime>) -> Option<[i64; 2]> {
    let shown = shown?;
    let find = |name: &str| {
        let mut events = trace.host.iter().zip(&a.host);
        let (event, _) = events.find(|(event, place)| {
            let first = place.is_some_and(|p| p.step == shown.step && p.micro_batch == 0);
            // The root's ranges have no name in parentheses.
            first && trace.name(event.name) == name
        })?;
        Some(event)
    };
    let left = find("FSDP::post_forward")?.end;
    let entered = find("FSDP::pre_backward")?.start;
    Some([left, entered])
}

/// Returns the step times. If some steps follow another step, only these count, because the first
/// step lacks the host's share.
#[must_use]
pub fn samples(times: &[StepTime]) -> Vec<Picos> {
    let follow = times.iter().any(|t| t.follows);
    times
        .iter()
        .filter(|t| t.follows || !follow)
        .map(|t| Picos((t.to - t.from).max(0).cast_unsigned() * 1000))
        .collect()
}

/// Returns the first time of a trace.
pub(crate) fn origin(trace: &Trace) -> i64 {
    let host = trace.host.iter().map(|e| e.start);
    let device = trace.device.iter().map(|e| e.start);
    let launches = trace.launches.iter().map(|e| e.start);
    host.chain(device).chain(launches).min().unwrap_or(0)
}

/// Returns the host times between which a step is issued.
fn host_span(trace: &Trace, a: &Attributed, step: u32) -> (i64, i64) {
    let mut span: Option<(i64, i64)> = None;
    for w in a.work.iter().filter(|w| w.place.step == step) {
        if let Some(launch) = crate::attribute::launch_of(trace, w) {
            let s = span.get_or_insert((launch.start, launch.end));
            *s = (s.0.min(launch.start), s.1.max(launch.end));
        }
    }
    span.unwrap_or((0, 0))
}

/// Returns the host times between the start of a step and the start of the next one.
pub(crate) fn window(steps: &[Step], step: u32) -> (i64, i64) {
    let step = step as usize;
    let to = steps.get(step + 1).map_or(i64::MAX, |s| s.start);
    (steps[step].start, to)
}
