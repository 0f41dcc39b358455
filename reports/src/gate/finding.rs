//! What a gate found.

use super::limits::Place;
use serde::Serialize;

/// Kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Instructions of the step.
    Program,
    /// `shardlab check`.
    Checks,
    /// Bytes.
    Memory,
    /// Step time.
    Time,
    /// Losses and gradient norms.
    Convergence,
}

impl Class {
    /// Name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Checks => "checks",
            Self::Memory => "memory",
            Self::Time => "time",
            Self::Convergence => "convergence",
        }
    }
}

/// What became of one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Within its limit.
    Pass,
    /// Worse than the limit allows.
    Regression,
    /// Better than the limit allows: the baseline is no longer tight.
    Improvement,
    /// Different, neither better nor worse.
    Changed,
    /// There is no baseline that it could be compared with.
    NoBaseline,
    /// The measurements cannot tell.
    Inconclusive,
    /// Not looked at, for the reason that the message gives.
    Skipped,
}

impl Status {
    /// Whether the gate fails.
    #[must_use]
    pub const fn fails(self) -> bool {
        matches!(
            self,
            Self::Regression | Self::Improvement | Self::Changed | Self::NoBaseline
        )
    }

    /// Word in tables.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Regression => "REGRESSION",
            Self::Improvement => "IMPROVED",
            Self::Changed => "CHANGED",
            Self::NoBaseline => "NO BASELINE",
            Self::Inconclusive => "inconclusive",
            Self::Skipped => "skipped",
        }
    }
}

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Kind.
    pub class: Class,
    /// What was compared, for example `peak allocated`.
    pub metric: String,
    /// Outcome.
    pub status: Status,
    /// The baseline's value, in words.
    pub baseline: String,
    /// This tree's value, in words.
    pub now: String,
    /// The limit, in words.
    pub limit: String,
    /// What happened and by how much, one sentence; empty where a pass says it all.
    pub message: String,
    /// More lines, for example a diff; may be empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Line that decides: the limit, or the baseline's value.
    pub place: Option<Place>,
}

/// The findings about one scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Scenario.
    pub scenario: String,
    /// No finding fails.
    pub pass: bool,
    /// Findings, program first.
    pub findings: Vec<Finding>,
}

impl Verdict {
    /// The verdict over these findings.
    #[must_use]
    pub fn new(scenario: impl Into<String>, findings: Vec<Finding>) -> Self {
        Self {
            scenario: scenario.into(),
            pass: !findings.iter().any(|f| f.status.fails()),
            findings,
        }
    }

    /// Findings that fail the gate.
    pub fn failures(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.status.fails())
    }
}
