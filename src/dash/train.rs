//! Live training.

use super::app::{App, Purpose, Tone, View};
use super::event::{Effect, RankNow, Setup, StepNews, Task};
use super::keys::Command;
use std::time::Duration;

/// State of the training view.
#[derive(Debug, Default)]
pub struct Training {
    /// What is trained.
    pub setup: Option<Setup>,
    /// Steps that are done.
    pub steps: Vec<StepNews>,
    /// Validation losses with the number of steps before each.
    pub validations: Vec<(u64, f64)>,
    /// Where the ranks are.
    pub ranks: Vec<RankNow>,
    /// What the engine said.
    pub notes: Vec<String>,
    /// How it ended.
    pub end: Option<End>,
    /// It was refused for memory: asked for again, it is tried anyway.
    pub insist: bool,
}

/// How a training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All steps are done.
    Done,
    /// It was stopped.
    Stopped,
    /// It failed.
    Failed(String),
}

impl Training {
    /// Time that is left, by the mean of the last steps.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        const LAST: usize = 10;
        let last = self.steps.last()?;
        let recent = &self.steps[self.steps.len().saturating_sub(LAST)..];
        let mean = recent.iter().map(|s| s.time).sum::<Duration>() / recent.len() as u32;
        let steps = u32::try_from(last.steps.saturating_sub(last.step)).ok()?;
        mean.checked_mul(steps)
    }

    /// Tokens a second and GPU over the last steps.
    #[must_use]
    pub fn tokens_per_s(&self) -> Option<f64> {
        let recent = &self.steps[self.steps.len().saturating_sub(10)..];
        let time: f64 = recent.iter().map(|s| s.time.as_secs_f64()).sum();
        let tokens: u64 = recent.iter().map(|s| s.tokens).sum();
        (time > 0.0).then(|| tokens as f64 / time)
    }

    fn begin(&mut self, setup: Setup) {
        *self = Self {
            setup: Some(setup),
            ..Self::default()
        };
    }
}

/// A key in the training view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Train => train(app),
        Command::Stop => {
            let effects = app.cancel(Purpose::Train);
            if !effects.is_empty() {
                app.say(Tone::Plain, "stopping after this step");
            }
            effects
        }
        _ => Vec::new(),
    }
}

/// Trains the selected scenario on this machine.
pub(super) fn train(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    if let Some(job) = app.job(Purpose::Train) {
        let text = if job.cancelled {
            "a training is stopping: the next can begin when it has ended"
        } else {
            "a training runs; s stops it"
        };
        app.view = View::Train;
        app.say(Tone::Plain, text);
        return Vec::new();
    }
    let anyway = app.train.insist && app.train.setup.as_ref() == Some(&setup);
    app.view = View::Train;
    app.train.begin(setup.clone());
    app.start(Task::Train {
        setup,
        steps: None,
        anyway,
    })
}
