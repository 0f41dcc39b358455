//! Progress of a training run on stderr.

mod json;
mod text;

use super::events::Event;
use crate::cli::interrupt;
use crate::cli::keep::Saved;
use crate::cli::output::Failure;
use json::Json;
use shardlab_exec::engine::RankTimes;
use shardlab_exec::train::{Flow, Observer, Outcome, ParamNorm, RunStart, StepReport};
use shardlab_plan::Scenario;
use std::io::{IsTerminal, Write};
use text::Text;

/// How progress is reported.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Style {
    /// A progress line on a terminal, occasional lines elsewhere
    #[default]
    Auto,
    /// Occasional lines, also on a terminal
    Lines,
    /// One JSON object per line: start, every step, validations, notes, end, errors
    /// (docs/reference/json.md)
    Json,
    /// Only notes, saved files and errors
    None,
}

impl Style {
    /// Reports a failure that ends the command, in this style.
    pub(super) fn tell(self, failure: Failure) -> Failure {
        if self != Self::Json {
            return failure;
        }
        failure.reported(|text| {
            let text = text.to_owned();
            json::write(&Event::Error { text });
        })
    }
}

/// Reports the progress of a training run, and stops it when a signal requests that.
pub(super) enum Progress {
    /// For people.
    Text(Text),
    /// For programs.
    Json(Json),
}

impl Progress {
    pub(super) fn new(style: Style, scenario: &Scenario) -> Self {
        let unit = scenario.model.family.counted_in().rate();
        match style {
            Style::Auto => Self::Text(Text::new(unit, std::io::stderr().is_terminal())),
            Style::Lines => Self::Text(Text::new(unit, false)),
            Style::None => Self::Text(Text::silent(unit)),
            Style::Json => Self::Json(Json::new()),
        }
    }

    /// Ends the current line after the last step.
    pub(super) fn end(&mut self) {
        if let Self::Text(text) = self {
            text.end();
        }
    }

    /// Reports the end of the run and whether it was saved.
    pub(super) fn saved(&self, outcome: &Outcome, saved: &Saved) {
        match self {
            Self::Text(_) => saved.say(),
            Self::Json(json) => {
                if let Saved::Not(reason) = saved {
                    json.note(reason);
                }
                json.over(outcome, saved.id());
            }
        }
    }

    /// Reports that the run was stopped early.
    pub(super) fn interrupted(&self, done: usize) {
        if let Self::Text(_) = self {
            // A closed stderr is ignored.
            let _ = writeln!(std::io::stderr(), "interrupted after step {done}");
        }
    }

    fn observer(&mut self) -> &mut dyn Observer {
        match self {
            Self::Text(text) => text,
            Self::Json(json) => json,
        }
    }
}

/// The progress handler of a rank other than rank 0. It reports nothing, but can be interrupted,
/// because a scheduler that preempts a host signals only the ranks on that host.
pub(super) struct Follower;

impl Observer for Follower {
    fn step(&mut self, _: &StepReport) -> Flow {
        interrupt::flow()
    }
}

impl Observer for Progress {
    fn begun(&mut self, begun: &RunStart) {
        self.observer().begun(begun);
    }

    fn ranks(&mut self, ranks: &[RankTimes]) {
        self.observer().ranks(ranks);
    }

    fn step(&mut self, report: &StepReport) -> Flow {
        let _ = self.observer().step(report);
        interrupt::flow()
    }

    fn validation(&mut self, step: u64, loss: f64) {
        self.observer().validation(step, loss);
    }

    fn param_norms(&mut self, step: u64, norms: &[ParamNorm]) {
        self.observer().param_norms(step, norms);
    }

    fn note(&mut self, text: &str) {
        self.observer().note(text);
    }
}
