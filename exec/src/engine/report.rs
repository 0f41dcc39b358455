//! Conversion of pass reports to step results and to the run.

use super::gaps;
use super::median::Median;
use super::memory::RankMemory;
use super::pass::{PassReport, RankPass};
use super::step::StepResult;
use crate::base::options::ExecOptions;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::{Op, Program, SectionKind};
use shardlab_plan::record::{
    Blocker, CostSources, Inputs, MemoryReport, MemorySample, PeakAt, Run, RunKind, Span,
    StepRecord, collective_stats,
};
use shardlab_plan::units::{Bytes, Picos};
use std::collections::BTreeMap;

/// A wait for other ranks that is shorter than this, in nanoseconds, is the rendezvous itself.
const RANK_WAIT: u64 = 20_000;

/// History of a session.
#[derive(Debug, Default)]
pub(crate) struct Log {
    steps: Vec<StepRecord>,
    /// Durations of steady steps.
    samples: Vec<Picos>,
    /// Durations of steady steps that were recorded.
    recorded_samples: Vec<Picos>,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    /// Medians of `samples` and `recorded_samples`.
    medians: [Median<Picos>; 2],
    /// Spans of the recorded step that is kept: a steady step near the median, if there is one.
    spans: Vec<Span>,
    timeline: Vec<MemorySample>,
    recorded: Option<StepRecord>,
    persistent: Bytes,
}

impl Log {
    /// Adds a pass: reports of this process's ranks, and results of all ranks, both in rank order.
    pub(crate) fn add(
        &mut self,
        program: &Program,
        step: u32,
        reports: &[PassReport],
        world: &[RankPass],
    ) -> StepResult {
        let losses: Vec<Vec<f32>> = world.iter().map(|r| r.losses.clone()).collect();
        let mesh = &program.meta.mesh;
        let leaders = (0u32..)
            .zip(&losses)
            .filter(|(rank, _)| mesh.leads_samples(*rank));
        let all: Vec<f64> = leaders
            .flat_map(|(_, micros)| micros.iter().map(|&l| f64::from(l)))
            .collect();
        let loss = all.iter().sum::<f64>() / all.len().max(1) as f64;
        let start = reports.iter().map(|r| r.start).min().unwrap_or(0);
        let end = reports.iter().map(|r| r.end).max().unwrap_or(0);
        // Other processes have other clocks, so only their durations are known.
        let slowest = world.iter().map(|r| r.duration).max().unwrap_or(0);
        let end = end.max(start + slowest);
        let first = &reports[0];
        let grad_norm = world[0].square.map(|s| f64::from(s).sqrt());
        let record = StepRecord {
            step,
            section: first.section,
            start: Picos::from_ns(start),
            end: Picos::from_ns(end),
            host: Picos::from_ns(first.host()),
            peak_allocated: first.memory.peak_allocated,
            peak_reserved: first.memory.peak_reserved,
        };
        let spans = spans(program, first);
        let samples = first.samples.clone();
        self.persistent = first.memory.end_allocated;
        let trains = record.section.is_training();
        if record.section != SectionKind::Init {
            self.steps.push(record);
        }
        if record.section == SectionKind::Steady {
            let time = record.end - record.start;
            let recorded = !first.times.is_empty();
            self.medians[usize::from(recorded)].add(time);
            match recorded {
                false => self.samples.push(time),
                true => self.recorded_samples.push(time),
            }
        }
        if trains {
            self.losses.push(loss);
            self.grad_norms.extend(grad_norm);
            let recorded = !spans.is_empty() || !samples.is_empty();
            if recorded && self.is_more_typical(&record) {
                self.spans.clone_from(&spans);
                self.timeline.clone_from(&samples);
                self.recorded = Some(record);
            }
        }
        StepResult {
            losses,
            loss,
            grad_norm,
            grad_squares: world.iter().map(|r| r.squares).collect(),
            part_squares: world.iter().map(|r| r.part_squares.clone()).collect(),
            counts: world.iter().map(|r| r.counts.clone()).collect(),
            record,
            ranks: (0..).zip(world).map(|(r, pass)| pass.times(r)).collect(),
            spans,
            samples,
        }
    }
}

impl Log {
    /// Returns whether a recorded step replaces the one that is kept: it must be at least as close
    /// to the median of unrecorded steps (or of all steps, if all are recorded).
    fn is_more_typical(&self, step: &StepRecord) -> bool {
        let steady = |r: &StepRecord| r.section == SectionKind::Steady;
        let Some(kept) = self.recorded.as_ref().filter(|kept| steady(kept)) else {
            return true;
        };
        let [unrecorded, recorded] = &self.medians;
        let median = unrecorded.get().or(recorded.get());
        let off = |r: &StepRecord| median.map(|m| (r.end - r.start).0.abs_diff(m.0));
        off(step) <= off(kept)
    }

    /// Selects step durations: includes recorded steps only if recording is free or nothing else
    /// exists.
    pub(crate) fn timed(mut self, freely: bool) -> Self {
        if freely || self.samples.is_empty() {
            self.samples.append(&mut self.recorded_samples);
        }
        self
    }
}

/// Returns the spans in issue order.
fn spans(program: &Program, report: &PassReport) -> Vec<Span> {
    let mut times = report.times.clone();
    times.sort_unstable_by_key(|t| t.task);
    let mut last_of_stream: BTreeMap<u8, u32> = BTreeMap::new();
    let mut out: Vec<Span> = Vec::with_capacity(times.len());
    for (task, t) in report.tasks.iter().zip(&times) {
        debug_assert_eq!(task.number, t.task);
        let before = last_of_stream.insert(task.stream.0, t.task);
        // Only collectives wait for ranks; a kernel or a copy that starts late has waited for a
        // free device.
        let collective = matches!(program.instrs[task.instr.index()].op, Op::Collective { .. });
        let blocker = if collective && t.start > t.free + RANK_WAIT {
            Blocker::Rank
        } else {
            // The latest of: the issue, the end of the stream's previous task, the wait for an
            // event.
            let stream = before.map(|b| (out[b as usize].end.0 / 1000, Blocker::Stream(b)));
            let event = t.waited.and_then(|(e, at)| {
                let behind = *report.behind.get(&e)?;
                Some((at, Blocker::Event(behind)))
            });
            [Some((t.issued, Blocker::Host)), stream, event]
                .into_iter()
                .flatten()
                .max_by_key(|c| c.0)
                .map_or(Blocker::None, |c| c.1)
        };
        out.push(Span {
            instr: task.instr,
            stream: task.stream,
            issued: Picos::from_ns(t.issued),
            ready: Picos::from_ns(t.ready),
            start: Picos::from_ns(t.start),
            end: Picos::from_ns(t.end),
            alone: Picos::from_ns(t.end - t.start),
            blocker,
        });
    }
    out
}

/// Creates the run of a session.
pub(crate) fn run(
    program: &Program,
    options: &ExecOptions,
    device: &str,
    memory: Option<&RankMemory>,
    host_work: Option<&BTreeMap<&'static str, u64>>,
    log: Log,
) -> Run {
    let (from, to) = log
        .recorded
        .or(log.steps.last().copied())
        .map_or((Picos::ZERO, Picos::ZERO), |r| (r.start, r.end));
    let inputs = Inputs::new(program, &log.spans, from);
    let gaps = gaps::find(&log.spans, from, to, &|i| inputs.ready(i));
    let mut exposed = BTreeMap::new();
    for g in &gaps {
        *exposed.entry(g.cause).or_insert(Picos::ZERO) += g.end - g.start;
    }
    let mut environment = BTreeMap::new();
    let mut fact = |k: &str, v: String| environment.insert(k.to_owned(), v);
    fact(
        "engine",
        concat!("shardlab-exec ", env!("CARGO_PKG_VERSION")).to_owned(),
    );
    fact("device", device.to_owned());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    fact("cpus", threads.to_string());
    for (kind, count) in host_work.into_iter().flatten() {
        fact(&format!("host_work.{kind}"), count.to_string());
    }
    let busy: Picos = log.spans.iter().map(|s| s.end - s.start).sum();
    Run {
        scenario: program.meta.scenario.clone(),
        program_digest: program.digest(),
        kind: RunKind::Exec,
        world_size: program.meta.mesh.world(),
        policy: program.meta.policy.to_owned(),
        hardware: device.to_owned(),
        memory: memory.map_or_else(
            || empty_memory(options),
            |m| report(program, options, m, &log),
        ),
        collectives: collective_stats(program, &log.spans),
        host: log.recorded.map_or(Picos::ZERO, |r| r.host),
        steps: log.steps,
        step_samples: log.samples,
        spans: log.spans,
        recorded_from: from,
        recorded_to: to,
        gaps,
        exposed,
        tokens: program.meta.tokens,
        mfu: 0.0,
        costs: CostSources {
            measured: busy,
            ..CostSources::default()
        },
        losses: log.losses,
        grad_norms: log.grad_norms,
        basis: None,
        other: None,
        environment,
    }
}

fn empty_memory(options: &ExecOptions) -> MemoryReport {
    MemoryReport {
        peak_allocated: Bytes::ZERO,
        peak_reserved: Bytes::ZERO,
        peak_device: Bytes::ZERO,
        persistent: Bytes::ZERO,
        capacity: options.capacity,
        at: PeakAt {
            step: 0,
            instr: InstrId(0),
            time: Picos::ZERO,
            phase: shardlab_plan::program::Phase::Init,
            unit: shardlab_plan::ir::UnitId(0),
            micro_batch: 0,
        },
        by_role: Vec::new(),
        by_unit: Vec::new(),
        retries: 0,
        timeline: Vec::new(),
    }
}

fn report(program: &Program, options: &ExecOptions, m: &RankMemory, log: &Log) -> MemoryReport {
    let mut r = empty_memory(options);
    let (ledger, peak) = (&m.ledger, m.ledger.peak());
    r.peak_allocated = peak.allocated;
    r.peak_reserved = ledger.peak_reserved();
    r.peak_device = ledger.peak_reserved();
    r.persistent = log.persistent;
    if let Some(i) = program.instrs.get(peak.instr.index()) {
        r.at = PeakAt {
            step: m.peak_step,
            instr: peak.instr,
            time: Picos::from_ns(m.peak_time),
            phase: i.phase,
            unit: i.unit,
            micro_batch: i.micro_batch,
        };
    }
    r.by_role = ledger.peak_by_role();
    r.by_unit = ledger.peak_by_unit(program);
    r.retries = ledger.counters().retries;
    r.timeline.clone_from(&log.timeline);
    r
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::{AG, Build, SHARD};
    use crate::device::TaskTimes;
    use crate::engine::pass::Issued;
    use shardlab_plan::ir::{COMPUTE, CollectiveKind, Role, ShardOp, StreamId};
    use shardlab_plan::memory::PassPeaks;

    /// An outlier among the recorded steps is not kept, wherever it occurs.
    #[test]
    fn the_recorded_step_is_a_typical_one() {
        let mut b = Build::new(1, 1, 1);
        let shard = b.buffer(Role::ModelWeight, 64);
        let full = b.buffer(Role::FullWeight, 64);
        let (from, to) = (b.whole(shard), b.whole(full));
        let instr = b.shard_op(ShardOp::Copy, COMPUTE, &[from], &[to]);
        let program = b.finish();
        let kept = |steps: &[(SectionKind, bool, u64)]| {
            let mut log = Log::default();
            for (step, &(section, recorded, end)) in (0..).zip(steps) {
                let time = TaskTimes {
                    task: 0,
                    issued: 0,
                    ready: 0,
                    free: 0,
                    start: 0,
                    end,
                    waited: None,
                };
                let report = PassReport {
                    section,
                    start: 0,
                    issued_at: 0,
                    end,
                    waited: 0,
                    memory: PassPeaks::default(),
                    losses: Vec::new(),
                    square: None,
                    squares: 0.0,
                    part_squares: Vec::new(),
                    counts: Vec::new(),
                    tasks: vec![Issued {
                        instr,
                        stream: COMPUTE,
                        number: 0,
                    }],
                    times: recorded.then_some(time).into_iter().collect(),
                    behind: BTreeMap::new(),
                    samples: Vec::new(),
                };
                let world = [RankPass {
                    duration: end,
                    ..RankPass::default()
                }];
                log.add(&program, step, &[report], &world);
            }
            log.recorded.map(|r| r.step)
        };
        let (first, steady) = (SectionKind::First, SectionKind::Steady);
        // On a device that records for free, all steps are recorded.
        let all = [900, 110, 100, 95, 101, 98].map(|end| (steady, true, end));
        assert_eq!(kept(&all), Some(4));
        // On other devices the last steps are recorded, and compared with the earlier ones.
        let mut few: Vec<_> = [900, 50, 100, 90, 110]
            .map(|end| (steady, false, end))
            .to_vec();
        few.extend([160, 130, 400].map(|end| (steady, true, end)));
        assert_eq!(kept(&few), Some(6));
        // The first step is only kept if there is no other.
        assert_eq!(kept(&[(first, true, 100)]), Some(0));
        assert_eq!(kept(&[(first, true, 100), (steady, true, 900)]), Some(1));
        assert_eq!(kept(&[(first, false, 100)]), None);
    }

    #[test]
    fn only_collectives_wait_for_ranks() {
        let mut b = Build::new(2, 2, 1);
        let (shard, full) = (
            b.buffer(Role::ModelWeight, 64),
            b.buffer(Role::FullWeight, 128),
        );
        let (from, to, all) = (b.whole(shard), b.slice(full), b.whole(full));
        let instrs = [
            b.shard_op(ShardOp::Copy, COMPUTE, &[from], &[to]),
            b.copy(COMPUTE, from, to),
            b.collective(CollectiveKind::AllGather, SHARD, AG, from, all),
        ];
        let tasks = (0u32..)
            .zip(instrs)
            .map(|(number, instr)| Issued {
                instr,
                stream: StreamId(number as u8),
                number,
            })
            .collect();
        let times = (0..3)
            .map(|task| TaskTimes {
                task,
                issued: 0,
                ready: 10,
                free: 10,
                start: 10 + RANK_WAIT + 1,
                end: 90_000,
                waited: None,
            })
            .collect();
        let report = PassReport {
            section: SectionKind::Steady,
            start: 0,
            issued_at: 0,
            end: 90_000,
            waited: 0,
            memory: PassPeaks::default(),
            losses: Vec::new(),
            square: None,
            squares: 0.0,
            part_squares: Vec::new(),
            counts: Vec::new(),
            tasks,
            times,
            behind: BTreeMap::new(),
            samples: Vec::new(),
        };
        let blockers: Vec<Blocker> = spans(&b.finish(), &report)
            .iter()
            .map(|s| s.blocker)
            .collect();
        assert_eq!(blockers, [Blocker::Host, Blocker::Host, Blocker::Rank]);
    }
}
