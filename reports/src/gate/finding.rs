//! What a gate found.

use super::limits::Place;
use serde::Serialize;
use shardlab_plan::config::GatePreset;
use shardlab_plan::record::Basis;

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

/// What differs between a scenario and its baseline before any number is compared: the reason of
/// the differences that follow.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// In words, for example `scenario changed: train.recompute_layers all → 78`.
    pub words: String,
    /// The line that says so; `None` where the findings' own lines say more.
    pub place: Option<Place>,
}

/// Findings that fail for one reason: one failure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// The reason, in words.
    pub cause: String,
    /// Metrics of the findings, the one that shows the failure first.
    pub metrics: Vec<String>,
    /// Line that decides.
    pub place: Option<Place>,
}

/// The findings about one scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Scenario.
    pub scenario: String,
    /// No finding fails.
    pub pass: bool,
    /// What the scenario was judged by.
    pub preset: GatePreset,
    /// What the prediction rests on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub basis: Option<Basis>,
    /// What changed since the baseline, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
    /// The findings that fail, those with one cause together.
    pub failures: Vec<Failure>,
    /// Findings, program first.
    pub findings: Vec<Finding>,
    #[serde(skip)]
    place: Option<Place>,
}

impl Verdict {
    /// The verdict over these findings.
    #[must_use]
    pub fn new(
        scenario: impl Into<String>,
        preset: GatePreset,
        change: Option<Change>,
        findings: Vec<Finding>,
    ) -> Self {
        let (change, place) = change.map_or((None, None), |c| (Some(c.words), c.place));
        let mut verdict = Self {
            scenario: scenario.into(),
            pass: false,
            preset,
            basis: None,
            change,
            failures: Vec::new(),
            findings,
            place,
        };
        verdict.sum_up();
        verdict
    }

    /// Returns the verdict with what its prediction rests on.
    #[must_use]
    pub fn resting_on(mut self, basis: Option<Basis>) -> Self {
        self.basis = basis;
        self
    }

    /// The verdict with a further finding.
    #[must_use]
    pub fn with(mut self, finding: Finding) -> Self {
        self.findings.push(finding);
        self.sum_up();
        self
    }

    fn sum_up(&mut self) {
        let failing: Vec<&Finding> = self.findings.iter().filter(|f| f.status.fails()).collect();
        let mut all: Vec<Failure> = Vec::new();
        for f in &failing {
            let (cause, place) = match (&self.change, f.explained()) {
                (Some(change), true) => (change.clone(), self.place.clone()),
                _ => (f.cause(), None),
            };
            match all.iter_mut().find(|known| known.cause == cause) {
                Some(known) => known.metrics.push(f.metric.clone()),
                None => all.push(Failure {
                    cause,
                    metrics: vec![f.metric.clone()],
                    place,
                }),
            }
        }
        for failure in &mut all {
            // Numbers say more than that the program is another one.
            failure.metrics.sort_by_key(|m| m == super::metric::DIGEST);
            let first = failing
                .iter()
                .find(|f| Some(&f.metric) == failure.metrics.first());
            let of_first = first.and_then(|f| f.place.clone());
            failure.place = failure.place.take().or(of_first);
        }
        self.pass = failing.is_empty();
        self.failures = all;
    }

    /// The finding about a metric.
    #[must_use]
    pub fn finding(&self, metric: &str) -> Option<&Finding> {
        self.findings.iter().find(|f| f.metric == metric)
    }

    /// Findings of a failure, the one that shows it first.
    pub fn of<'a>(&'a self, failure: &'a Failure) -> impl Iterator<Item = &'a Finding> {
        failure.metrics.iter().filter_map(|m| self.finding(m))
    }

    /// Findings that fail the gate.
    pub fn failing(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.status.fails())
    }
}

impl Finding {
    /// Whether a change since the baseline explains that it fails.
    fn explained(&self) -> bool {
        self.class != Class::Checks
            && self.status != Status::NoBaseline
            && self.metric != super::metric::FINITE
    }

    /// The reason of a failure that no change explains.
    fn cause(&self) -> String {
        if let Some(meaning) = super::metric::meaning(&self.metric) {
            return meaning.to_owned();
        }
        match self.class {
            _ if self.status == Status::NoBaseline => "no baseline to compare with".to_owned(),
            Class::Checks => "the program breaks a rule (`shardlab check`)".to_owned(),
            Class::Program => "the program changed, the scenario did not".to_owned(),
            Class::Memory => "memory changed, program and scenario did not".to_owned(),
            Class::Time => "step time changed, program and scenario did not".to_owned(),
            Class::Convergence => "training changed, program and scenario did not".to_owned(),
        }
    }
}
