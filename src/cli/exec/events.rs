//! The events that `exec --progress json` prints, one object per line. The dashboard reads them
//! from the training process that it starts.

use serde::{Deserialize, Serialize};
use shardlab_exec::engine::RankTimes;
use shardlab_exec::train::{ParamNorm, RunStart, StepReport};

/// An event. Numbers that are not finite are written as `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// Devices and weights are ready; the first step comes next.
    Begun {
        /// Ranks.
        ranks: u32,
        /// Device that a rank runs on.
        device: String,
        /// Number of steps of an earlier process.
        resumed_from: u64,
        /// Total number of steps, including those.
        steps: u64,
    },
    /// A step is done.
    Step {
        /// Steps done.
        step: u64,
        /// Steps of the run.
        steps: u64,
        /// Loss.
        loss: Option<f64>,
        /// Gradient norm.
        grad_norm: Option<f64>,
        /// Learning rate.
        lr: f64,
        /// Step time, nanoseconds.
        time_ns: u64,
        /// Tokens per rank, or the number of items in the model's batch unit.
        tokens: u64,
        /// One entry per rank.
        ranks: Vec<Rank>,
    },
    /// A validation is done.
    Validation {
        /// Number of steps before it.
        step: u64,
        /// Loss.
        loss: Option<f64>,
    },
    /// Norms of single parameters after a step.
    ParamNorms {
        /// Steps done.
        step: u64,
        /// One entry per parameter.
        params: Vec<Norms>,
    },
    /// A message for the user.
    Note {
        /// Text of the note.
        text: String,
    },
    /// The run has ended, and has been saved if it was to be saved.
    End {
        /// Steps done.
        step: u64,
        /// Whether it was stopped early.
        interrupted: bool,
        /// Id of the saved run; `null` if none is saved.
        run_id: Option<String>,
    },
    /// The run or the command failed.
    Error {
        /// Error message; may have several lines.
        text: String,
    },
}

/// A rank's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rank {
    /// Duration from start to end.
    pub(crate) time_ns: u64,
    /// Time during which the host issued instructions; part of `time_ns`.
    pub(crate) host_ns: u64,
    /// Peak of allocated bytes.
    pub(crate) peak_allocated_bytes: u64,
    /// Peak of reserved bytes.
    pub(crate) peak_reserved_bytes: u64,
}

/// Norms of a parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Norms {
    /// Name.
    pub(crate) name: String,
    /// Norm of the weights after their update.
    pub(crate) weight: Option<f64>,
    /// Norm of the gradient before clipping; `null` if there is none.
    pub(crate) gradient: Option<f64>,
}

impl Norms {
    pub(super) fn of(n: &ParamNorm) -> Self {
        Self {
            name: n.name.clone(),
            weight: finite(n.weight),
            gradient: n.gradient.and_then(finite),
        }
    }

    /// Returns the norms as they were before formatting.
    #[cfg(feature = "dash")]
    pub(crate) fn norm(self) -> ParamNorm {
        ParamNorm {
            name: self.name,
            weight: self.weight.unwrap_or(f64::NAN),
            gradient: self.gradient,
        }
    }
}

impl Event {
    pub(super) fn param_norms(step: u64, norms: &[ParamNorm]) -> Self {
        Self::ParamNorms {
            step,
            params: norms.iter().map(Norms::of).collect(),
        }
    }

    pub(super) fn begun(b: &RunStart) -> Self {
        Self::Begun {
            ranks: b.ranks,
            device: b.device.clone(),
            resumed_from: b.resumed_from,
            steps: b.steps,
        }
    }

    pub(super) fn step(r: &StepReport, ranks: &[RankTimes]) -> Self {
        Self::Step {
            step: r.step,
            steps: r.steps,
            loss: finite(r.loss),
            grad_norm: r.grad_norm.and_then(finite),
            lr: r.lr,
            time_ns: nanos(r.time),
            tokens: r.tokens,
            ranks: ranks.iter().map(Rank::of).collect(),
        }
    }

    pub(super) fn validation(step: u64, loss: f64) -> Self {
        let loss = finite(loss);
        Self::Validation { step, loss }
    }

    /// Returns the event as a line of JSON, including the newline.
    pub(super) fn line(&self) -> String {
        // Serialization fails only for maps whose keys are not strings, and for types that reject
        // it. Neither occurs here.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }

    /// Parses a line; `None` if it is not an event.
    #[cfg(any(feature = "dash", test))]
    pub(crate) fn read(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

impl Rank {
    fn of(r: &RankTimes) -> Self {
        Self {
            time_ns: nanos(r.time),
            host_ns: nanos(r.host),
            peak_allocated_bytes: r.peak_allocated.0,
            peak_reserved_bytes: r.peak_reserved.0,
        }
    }
}

fn nanos(d: std::time::Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_it_was_made_of() {
        let step = Event::Step {
            step: 2,
            steps: 6,
            loss: finite(f64::NAN),
            grad_norm: Some(0.5),
            lr: 3e-4,
            time_ns: 1_500_000,
            tokens: 64,
            ranks: vec![Rank {
                time_ns: 1,
                host_ns: 2,
                peak_allocated_bytes: 3,
                peak_reserved_bytes: 4,
            }],
        };
        let line = step.line();
        let wanted = concat!(
            r#"{"event":"step","step":2,"steps":6,"loss":null,"grad_norm":0.5,"lr":0.0003,"time_ns":1500000,"tokens":64,"#,
            r#""ranks":[{"time_ns":1,"host_ns":2,"peak_allocated_bytes":3,"peak_reserved_bytes":4}]}"#,
            "\n"
        );
        assert_eq!(line, wanted);
        assert_eq!(Event::read(&line), Some(step));
        let error = Event::Error {
            text: "two\nlines".into(),
        };
        assert_eq!(error.line().lines().count(), 1);
        assert_eq!(Event::read(&error.line()), Some(error));
        for other in ["", "NCCL WARN", "[rank 1] error: x", r#"{"event":"step"}"#] {
            assert_eq!(Event::read(other), None, "{other}");
        }
    }
}
