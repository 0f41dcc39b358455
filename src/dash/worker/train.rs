//! Training on this machine, watched.

use super::{Ended, Reporter, Stop};
use crate::cli::{utilisation, with_source};
use crate::dash::event::{News, RankNow, RankStep, Setup, StepNews};
use crate::dash::lanes::Lanes;
use shardlab_exec::engine::{ExecOptions, Live, RankTimes};
use shardlab_exec::train::{Flow, Observer, RunOptions, StepReport, train as run};
use shardlab_plan::program::{InstrId, SectionKind};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::Bytes;
use shardlab_plan::{Program, plan, scenario};
use shardlab_reports::RunView;
use shardlab_reports::view::Validation;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Share of the machine's free memory that a training may take without a question.
const SHARE: f64 = 0.7;
/// How often the ranks' places are looked at.
const LOOK: Duration = Duration::from_millis(150);

pub(super) fn train(
    setup: &Setup,
    steps: Option<u64>,
    anyway: bool,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    let scenario = scenario::load(&setup.path, &setup.overrides).map_err(|e| e.to_string())?;
    let program = Arc::new(plan(&scenario).map_err(|e| e.to_string())?);
    if !anyway && let Some(reason) = too_large(&program) {
        reporter.say(News::TooLarge(reason));
        return Ok(Ended::Cancelled);
    }
    reporter.say(News::Begun(
        steps.unwrap_or_else(|| scenario.train.steps.into()),
    ));
    let live = Arc::new(Live::new(program.meta.world));
    let options = RunOptions {
        steps,
        exec: ExecOptions {
            record: true,
            live: Some(Arc::clone(&live)),
            ..ExecOptions::default()
        },
        ..RunOptions::default()
    };
    let over = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                reporter.say(News::Ranks(places(&program, &live)));
                std::thread::park_timeout(LOOK);
            }
        });
        let mut observer = Watch {
            reporter,
            stop,
            counted_in: scenario.model.family.counted_in(),
            ranks: Vec::new(),
        };
        // A panic must not leave the watcher running for ever: the scope waits for it.
        let done = End(&over, watcher.thread().clone());
        let result = run(&scenario, &program, options, &mut observer);
        drop(done);
        result
    });
    let mut outcome = result.map_err(|e| e.to_string())?;
    outcome.run.mfu = utilisation(&scenario, &program, &outcome.run, true);
    let view = RunView::of(outcome.run, &program, &scenario);
    let mut view = with_source(view, &setup.path, &setup.overrides);
    view.interrupted = outcome.interrupted;
    view.validations = outcome
        .validations
        .iter()
        .map(|&(steps, loss)| Validation { steps, loss })
        .collect();
    reporter.say(News::Run(Arc::new(Lanes::new(Arc::new(view)))));
    Ok(if outcome.interrupted {
        Ended::Cancelled
    } else {
        Ended::Done
    })
}

/// Ends the watcher when it is dropped.
struct End<'a>(&'a AtomicBool, std::thread::Thread);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.unpark();
    }
}

struct Watch<'a> {
    reporter: &'a Reporter,
    stop: &'a Stop,
    counted_in: BatchUnit,
    ranks: Vec<RankStep>,
}

impl Observer for Watch<'_> {
    fn ranks(&mut self, ranks: &[RankTimes]) {
        self.ranks = ranks
            .iter()
            .map(|r| RankStep {
                time: r.time,
                host: r.host,
                allocated: r.peak_allocated.0,
                reserved: r.peak_reserved.0,
            })
            .collect();
    }

    fn step(&mut self, r: &StepReport) -> Flow {
        self.reporter.say(News::Step(StepNews {
            step: r.step,
            steps: r.steps,
            loss: r.loss,
            grad_norm: r.grad_norm.unwrap_or(f64::NAN),
            lr: r.lr,
            time: r.time,
            tokens: r.tokens,
            counted_in: self.counted_in,
            ranks: std::mem::take(&mut self.ranks),
        }));
        if self.stop.asked() {
            Flow::Stop
        } else {
            Flow::Continue
        }
    }

    fn validation(&mut self, step: u64, loss: f64) {
        self.reporter.say(News::Validation(step, loss));
    }

    fn note(&mut self, text: &str) {
        self.reporter.say(News::Note(text.to_owned()));
    }
}

/// Where the ranks are, in words.
fn places(program: &Program, live: &Live) -> Vec<RankNow> {
    live.ranks()
        .iter()
        .map(|r| RankNow {
            at: r
                .at
                .map_or_else(|| "starting".to_owned(), |at| place(program, at)),
            percent: r.at.map_or(0, |at| percent(program, at)),
            allocated: r.allocated.0,
        })
        .collect()
}

fn place(program: &Program, at: InstrId) -> String {
    let Some(instr) = program.instrs.get(at.index()) else {
        return String::new();
    };
    let unit = program
        .units
        .get(instr.unit.index())
        .map_or("", |u| &u.name);
    format!("{} {unit}", instr.phase.name())
}

fn percent(program: &Program, at: InstrId) -> u8 {
    let section = program
        .sections
        .iter()
        .find(|s| s.kind != SectionKind::Init && s.instrs.contains(&at.0));
    section.map_or(0, |s| {
        let done = u64::from(at.0 + 1 - s.instrs.start) * 100;
        (done / (s.instrs.len() as u64).max(1)) as u8
    })
}

/// Why this machine is too small, if it seems so: all ranks live in its memory.
fn too_large(program: &Program) -> Option<String> {
    let free = free_memory()?;
    // Init and a step's own buffers, without reuse: an upper bound would refuse too much, so only what rests is counted.
    let resting: u64 = program
        .section(SectionKind::Init)
        .into_iter()
        .chain(program.section(SectionKind::First))
        .flat_map(|s| program.section_instrs(s))
        .filter_map(|i| match i.op {
            shardlab_plan::program::Op::Alloc(b) => Some((b, 1i64)),
            shardlab_plan::program::Op::Free(b) => Some((b, -1)),
            _ => None,
        })
        .map(|(b, sign)| sign * program.buffers[b.index()].bytes.0 as i64)
        .sum::<i64>()
        .max(0) as u64;
    let needed = resting.saturating_mul(u64::from(program.meta.world));
    (needed as f64 > SHARE * free as f64).then(|| {
        format!(
            "its {} ranks keep {} between steps, and {} of memory are free here",
            program.meta.world,
            Bytes(needed),
            Bytes(free)
        )
    })
}

/// Free memory of the machine, where the system says it.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_is_far_too_large_is_refused_with_its_size() {
        let large =
            plan(&scenario::load(Path::new("llama3-405b-1024xh100"), &[]).unwrap()).unwrap();
        let reason = too_large(&large).unwrap();
        assert!(reason.starts_with("its 1024 ranks keep"), "{reason}");
        let small = plan(&scenario::load(Path::new("small-native"), &[]).unwrap()).unwrap();
        assert_eq!(too_large(&small), None);
    }
}
