//! Runs steps of a scenario, unrecorded and recorded.

use super::{Launched, On, us};
use crate::calibrate::quantile;
use crate::device::DeviceFactory;
use crate::engine::{ExecOptions, Session, StepInputs, StepResult};
use crate::process::World;
use crate::train::{Feed, StateLayout, TrainError, init, schedule, step_inputs};
use shardlab_plan::config::{Scenario, Train};
use shardlab_plan::program::Program;
use shardlab_plan::record::Span;
use shardlab_plan::tape_of;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps of a session that all have the same inputs.
pub(super) struct Steps<'a, F: DeviceFactory> {
    pub(super) program: Arc<Program>,
    pub(super) session: Session<F::Device>,
    inputs: StepInputs,
    train: &'a Train,
    /// Called after every step.
    beat: &'a dyn Fn(),
    done: u64,
}

/// What recorded steps show.
pub(super) struct Recorded {
    /// By task in issue order: the kernel, if the task is one, and its median time in microseconds.
    pub(super) tasks: Vec<(Option<Launched>, f64)>,
    /// The step of median duration.
    pub(super) typical: StepResult,
}

impl<'a, F: DeviceFactory> Steps<'a, F> {
    /// Opens a session with synthetic data and weights, with all ranks in this process.
    pub(super) fn open(on: &On<'a, F>, scenario: &'a Scenario) -> Result<Self, TrainError> {
        let fault = |e: String| TrainError::Plan(e);
        let program = Arc::new(shardlab_plan::plan(scenario).map_err(|e| fault(e.to_string()))?);
        let tape = tape_of(scenario).map_err(|e| fault(e.to_string()))?;
        let layout = StateLayout::new(&program)?;
        let feed = Feed::new(scenario, &program, &tape.consts, None, 1)?;
        let options = ExecOptions {
            record: on.recorded,
            timeout: on.timeout,
            ..ExecOptions::default()
        };
        let world = World::single_process(&program);
        let mut session = Session::open(Arc::clone(&program), options, world, on.factory)?;
        (on.beat)();
        for rank in 0..program.meta.mesh.world() {
            for (buffer, table) in feed.tables() {
                session.write_buffer(rank, *buffer, 0, table)?;
            }
        }
        init::repeating(&program, &layout, 1, &mut session)?;
        (on.beat)();
        Ok(Self {
            program,
            session,
            inputs: step_inputs(feed.step(0)),
            train: &scenario.train,
            beat: on.beat,
            done: 0,
        })
    }

    /// Runs the next step.
    pub(super) fn next(&mut self) -> Result<StepResult, TrainError> {
        let hyper = schedule::hyper(self.train, self.done);
        let result = self.session.step(&self.inputs, hyper)?;
        (self.beat)();
        self.done += 1;
        Ok(result)
    }

    /// Runs at least this many steps for at least this long. Returns the microseconds of each whole
    /// step and of the host in it.
    pub(super) fn plain(
        &mut self,
        least: usize,
        warm: Duration,
    ) -> Result<Vec<(f64, f64)>, TrainError> {
        let mut plain = Vec::new();
        let begin = Instant::now();
        while plain.len() < least || begin.elapsed() < warm {
            let step = self.next()?;
            let whole = step.record.end - step.record.start;
            plain.push((us(whole.0), us(step.record.host.0)));
        }
        // The first steps after a pause are faster, because the GPU is cold and its clock is not
        // limited yet.
        plain.drain(..plain.len().saturating_sub(1).min(2));
        Ok(plain)
    }

    /// Records steps: at least and at most this many, and beyond the minimum only for this long.
    ///
    /// # Errors
    /// If no step may be run, or a step fails.
    pub(super) fn recorded(
        &mut self,
        (least, most): (usize, usize),
        time: Duration,
    ) -> Result<Recorded, TrainError> {
        let begin = Instant::now();
        let mut times: Vec<Vec<f64>> = Vec::new();
        let mut kernels: Vec<Option<Launched>> = Vec::new();
        let mut results: Vec<StepResult> = Vec::new();
        for n in 0..most {
            let step = self.next()?;
            if times.is_empty() {
                times = vec![Vec::new(); step.spans.len()];
                kernels = self.kernels(&step.spans);
            }
            for (task, span) in times.iter_mut().zip(&step.spans) {
                task.push(us(span.end.0 - span.start.0));
            }
            results.push(step);
            if n >= least && begin.elapsed() >= time {
                break;
            }
        }
        results.sort_by_key(|s| s.record.end - s.record.start);
        if results.is_empty() {
            return Err(TrainError::Plan("no step was run".to_owned()));
        }
        let tasks = kernels.into_iter().zip(times);
        Ok(Recorded {
            tasks: tasks.map(|(k, t)| (k, quantile(t, 0.5))).collect(),
            typical: results.swap_remove(results.len() / 2),
        })
    }

    fn kernels(&self, spans: &[Span]) -> Vec<Option<Launched>> {
        let op = |s: &Span| &self.program.instrs[s.instr.index()].op;
        let kernels = spans.iter().map(|s| Launched::of(&self.program, op(s)));
        kernels.collect()
    }
}
