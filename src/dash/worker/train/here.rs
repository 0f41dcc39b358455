//! Trains in this process: on the CPU, with ranks as threads.

use super::What;
use crate::cli::{utilisation, with_source};
use crate::dash::event::{News, RankNow, RankStep, StepNews};
use crate::dash::lanes::Lanes;
use crate::dash::worker::{Ended, Reporter, Stop};
use shardlab_exec::engine::{ExecOptions, Progress, RankTimes};
use shardlab_exec::train::{
    Flow, Observer, ParamNorm, RunOptions, RunStart, StepReport, train as run,
};
use shardlab_plan::Program;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::SectionKind;
use shardlab_plan::scenario::BatchUnit;
use shardlab_reports::RunView;
use shardlab_reports::view::Validation;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Interval for reading the progress of ranks.
const LOOK: Duration = Duration::from_millis(150);

pub(super) fn train(what: &What<'_>, reporter: &Reporter, stop: &Stop) -> Result<Ended, String> {
    let What {
        scenario,
        program,
        setup,
        ..
    } = *what;
    let progress = Arc::new(Progress::new(program.meta.mesh.world()));
    let mut exec = ExecOptions {
        record: true,
        progress: Some(Arc::clone(&progress)),
        ..ExecOptions::default()
    };
    what.device.apply(&mut exec, program.meta.mesh.world());
    let options = RunOptions {
        steps: what.steps,
        exec,
        ..RunOptions::default()
    };
    let over = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                reporter.say(News::Ranks(places(program, &progress)));
                std::thread::park_timeout(LOOK);
            }
        });
        let mut observer = Watch {
            reporter,
            stop,
            counted_in: scenario.model.family.counted_in(),
            ranks: Vec::new(),
        };
        // A panic must not leave the watcher running, because the scope waits for it.
        let done = End(&over, watcher.thread().clone());
        let result = run(scenario, program, options, &mut observer);
        drop(done);
        result
    });
    let mut outcome = result.map_err(|e| e.to_string())?;
    outcome.run.mfu = utilisation(scenario, program, &outcome.run, true);
    let view = RunView::of(outcome.run, program, scenario);
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

/// Ends the watcher when dropped.
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
    fn begun(&mut self, _: &RunStart) {
        self.reporter.say(News::Stepping);
    }

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
            grad_norm: r.grad_norm,
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

    fn param_norms(&mut self, step: u64, norms: &[ParamNorm]) {
        self.reporter.say(News::ParamNorms(step, norms.to_vec()));
    }

    fn note(&mut self, text: &str) {
        self.reporter.say(News::Note(text.to_owned()));
    }
}

/// Describes the progress of the ranks.
fn places(program: &Program, progress: &Progress) -> Vec<RankNow> {
    progress
        .ranks()
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
