//! Findings of a gate.

use super::limits::Place;
use serde::Serialize;
use shardlab_plan::config::GatePreset;
use shardlab_plan::record::Basis;

/// Class of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Instructions of the step.
    Program,
    /// Result of `shardlab check`.
    Checks,
    /// Memory, bytes.
    Memory,
    /// Step time.
    Time,
    /// Losses and gradient norms.
    Convergence,
}

impl Class {
    /// Returns the name in tables.
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

/// Outcome of one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Within its limit.
    Pass,
    /// Worse than the limit allows.
    Regression,
    /// Better than the limit allows: the baseline should be updated.
    Improvement,
    /// Different, but neither better nor worse.
    Changed,
    /// There is no baseline to compare with.
    NoBaseline,
    /// There are too few measurements for a decision.
    Inconclusive,
    /// Not compared, for the reason in the message.
    Skipped,
}

impl Status {
    /// Returns whether the gate fails.
    #[must_use]
    pub const fn fails(self) -> bool {
        matches!(
            self,
            Self::Regression | Self::Improvement | Self::Changed | Self::NoBaseline
        )
    }

    /// Returns the word in tables.
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
    /// Class.
    pub class: Class,
    /// What was compared, for example `peak allocated`.
    pub metric: String,
    /// Outcome.
    pub status: Status,
    /// Value of the baseline, formatted.
    pub baseline: String,
    /// Current value, formatted.
    pub now: String,
    /// Limit, formatted.
    pub limit: String,
    /// What happened and by how much, as one sentence; empty for a pass that needs no explanation.
    pub message: String,
    /// Additional lines, for example a diff; may be empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// The line of a file that decides: the limit, or the value in the baseline.
    pub place: Option<Place>,
}

/// A difference between a scenario and its baseline that causes other differences, found before any
/// number is compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Description, for example `scenario changed: train.recompute_layers all → 78`.
    pub words: String,
    /// The line that causes it; `None` if the lines of the findings are more precise.
    pub place: Option<Place>,
}

/// Findings that fail for the same reason and count as one failure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// The reason, in words.
    pub cause: String,
    /// Metrics of the findings, most informative one first.
    pub metrics: Vec<String>,
    /// Decisive line.
    pub place: Option<Place>,
}

/// The findings about one scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Scenario.
    pub scenario: String,
    /// Whether no finding fails.
    pub pass: bool,
    /// Preset that the scenario was judged with.
    pub preset: GatePreset,
    /// The basis of the prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub basis: Option<Basis>,
    /// What changed since the baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
    /// Failing findings, grouped by cause.
    pub failures: Vec<Failure>,
    /// Findings; those of the program come first.
    pub findings: Vec<Finding>,
    #[serde(skip)]
    place: Option<Place>,
}

impl Verdict {
    /// Returns the verdict on these findings.
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

    /// Adds the basis of the prediction.
    #[must_use]
    pub(crate) fn resting_on(mut self, basis: Option<Basis>) -> Self {
        self.basis = basis;
        self
    }

    /// Adds a finding to the verdict.
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
            // Numbers are more informative than the fact that the program differs.
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

    /// Returns the finding about a metric.
    #[must_use]
    pub fn finding(&self, metric: &str) -> Option<&Finding> {
        self.findings.iter().find(|f| f.metric == metric)
    }

    /// Returns the findings of a failure, most informative one first.
    pub fn of<'a>(&'a self, failure: &'a Failure) -> impl Iterator<Item = &'a Finding> {
        failure.metrics.iter().filter_map(|m| self.finding(m))
    }

    /// Returns the findings that fail the gate.
    pub fn failing(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.status.fails())
    }
}

impl Finding {
    /// Returns whether a change since the baseline explains a failure of this finding.
    fn explained(&self) -> bool {
        self.class != Class::Checks
            && self.status != Status::NoBaseline
            && self.metric != super::metric::FINITE
    }

    /// Returns the cause of a failure that no change explains.
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
