//! Live training.

use super::app::{App, Purpose, Tone, View};
use super::event::{Effect, RankNow, Setup, StepNews, Task};
use super::keys::Command;
use super::whole::Whole;
use shardlab_exec::train::ParamNorm;
use std::time::Duration;

/// State of the training view.
#[derive(Debug, Default)]
pub struct Training {
    /// Scenario of the training.
    pub setup: Option<Setup>,
    /// Whether to train on the CPU, even if the scenario's hardware is different.
    pub on_cpu: bool,
    /// The device it trains on, as a phrase after "on", once it is known.
    pub on: Option<String>,
    /// Finished steps.
    pub steps: Vec<StepNews>,
    /// Validation losses, with the number of steps before each.
    pub validations: Vec<(u64, f64)>,
    /// Last norms of all parameters, with the number of steps before them.
    pub param_norms: Option<(u64, Vec<ParamNorm>)>,
    /// Progress of the ranks, if this process trains.
    pub ranks: Vec<RankNow>,
    /// Messages of the engine.
    pub notes: Vec<String>,
    /// How the training ended, if it has.
    pub end: Option<End>,
    /// Number of steps of the run, once it is known.
    pub planned: Option<u64>,
    /// Time at which the running step started; `None` before the first.
    pub since: Option<Duration>,
}

/// How a training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All steps were done.
    Done,
    /// The user stopped it.
    Stopped,
    /// The training was not started. Contains the reason why this machine has too little memory.
    TooLarge(String),
    /// It failed.
    Failed(String),
}

impl Training {
    /// Returns the name of the training, which is that of its file.
    #[must_use]
    pub fn name(&self) -> String {
        self.setup.as_ref().map_or_else(String::new, Setup::name)
    }

    /// Returns the number of finished steps.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.steps.last().map_or(0, |s| s.step)
    }

    /// Returns the number of steps of the run; 0 if it is not known yet.
    #[must_use]
    pub fn total(&self) -> u64 {
        let last = self.steps.last().map(|s| s.steps);
        last.or(self.planned).unwrap_or(0)
    }

    /// Records that a step ended at this time. The next one starts.
    pub(super) fn step(&mut self, step: StepNews, now: Duration) {
        self.steps.push(step);
        self.since = Some(now);
    }

    /// Returns the current step time: the median of the last steps. It ignores single slow steps,
    /// such as the first one, which prepares, and the last one, which is recorded.
    #[must_use]
    pub fn pace(&self) -> Option<Duration> {
        const LAST: usize = 10;
        let recent = &self.steps[self.steps.len().saturating_sub(LAST)..];
        let mut times: Vec<Duration> = recent.iter().map(|s| s.time).collect();
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    }

    /// Returns the remaining time at this pace.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        let last = self.steps.last()?;
        let steps = u32::try_from(last.steps.saturating_sub(last.step)).ok()?;
        self.pace()?.checked_mul(steps)
    }

    /// Returns tokens per second and GPU at this pace.
    #[must_use]
    pub fn tokens_per_s(&self) -> Option<f64> {
        let time = self.pace()?.as_secs_f64();
        let tokens = self.steps.last()?.tokens;
        (time > 0.0).then(|| tokens as f64 / time)
    }

    fn begin(&mut self, setup: Setup, on_cpu: bool) {
        *self = Self {
            setup: Some(setup),
            on_cpu,
            ..Self::default()
        };
    }
}

/// Handles a command in the training view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Train => train(app, false),
        Command::TrainOnCpu => train(app, true),
        Command::Stop => {
            let effects = app.cancel(Purpose::Train);
            if !effects.is_empty() {
                app.say(Tone::Plain, "stopping after this step");
            }
            effects
        }
        Command::ShowAll => {
            app.whole = Some(Whole::default());
            Vec::new()
        }
        _ => Vec::new(),
    }
}

/// Trains the selected scenario on this machine: on its hardware if available, or else on the CPU.
pub(super) fn train(app: &mut App, on_cpu: bool) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    if let Some(job) = app.job(Purpose::Train) {
        let text = if job.cancelled {
            "training is stopping: wait until it has ended"
        } else {
            "training is running; s stops it"
        };
        app.view = View::Train;
        app.say(Tone::Plain, text);
        return Vec::new();
    }
    app.view = View::Train;
    begin(app, setup, on_cpu, false)
}

/// Starts the training that was not started because of too little memory.
pub(super) fn anyway(app: &mut App) -> Vec<Effect> {
    let (setup, on_cpu) = (app.train.setup.clone(), app.train.on_cpu);
    setup.map_or_else(Vec::new, |setup| begin(app, setup, on_cpu, true))
}

fn begin(app: &mut App, setup: Setup, on_cpu: bool, anyway: bool) -> Vec<Effect> {
    app.train.begin(setup.clone(), on_cpu);
    app.start(Task::Train {
        setup,
        steps: None,
        anyway,
        on_cpu,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario::BatchUnit;

    #[test]
    fn the_pace_is_that_of_most_steps() {
        let ms = Duration::from_millis;
        let mut t = Training::default();
        assert_eq!((t.pace(), t.left(), t.tokens_per_s()), (None, None, None));
        // The first step prepares, and the last one is recorded.
        let times = [900, 10, 10, 11, 10, 60];
        for (step, time) in (1..).zip(times) {
            t.steps.push(StepNews {
                step,
                steps: 9,
                loss: 1.0,
                grad_norm: Some(1.0),
                lr: 1e-3,
                time: ms(time),
                tokens: 330,
                counted_in: BatchUnit::Tokens,
                ranks: Vec::new(),
            });
        }
        assert_eq!(t.pace(), Some(ms(11)));
        assert_eq!(t.left(), Some(ms(33)));
        assert_eq!(t.tokens_per_s(), Some(30_000.0));
    }
}
