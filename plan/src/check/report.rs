//! Results of a check.

use super::rules::{Kind, RULES, RuleId, Severity};
use crate::ir::InstrId;
use crate::program::SectionKind;
use serde::Serialize;
use std::collections::HashSet;
use std::fmt;

/// Maximum number of violations per rule that are kept with their text. All violations are counted.
const KEPT: usize = 32;

/// A violated rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Rule.
    pub rule: RuleId,
    /// The instruction that breaks the rule; `None` if the program's tables do (layouts, groups,
    /// descriptors).
    pub instr: Option<InstrId>,
    /// The instruction it conflicts with.
    pub other: Option<InstrId>,
    /// What happened, where, and what was expected.
    pub message: String,
}

/// Result of one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleResult {
    /// Rule.
    pub id: RuleId,
    /// What the rule says.
    pub title: &'static str,
    /// The origin of the rule.
    pub source: &'static str,
    /// How it is checked.
    pub kind: Kind,
    /// What a violation means.
    pub severity: Severity,
    /// Number of facts checked.
    pub checked: u64,
    /// Number of violations. An instruction that breaks a rule in several passes counts once.
    pub violations: u64,
}

/// Number of event waits per pass over a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WaitCount {
    /// Section.
    pub section: SectionKind,
    /// Waits issued, including host waits.
    pub total: u32,
    /// Number of waits that other edges already imply.
    pub implied: u32,
}

/// Result of checking one program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Every rule.
    pub rules: Vec<RuleResult>,
    /// Violations by rule and instruction; at most 32 per rule are listed.
    pub violations: Vec<Violation>,
    /// Waits of every pass that was walked.
    pub waits: Vec<WaitCount>,
    /// Instructions walked over all passes.
    pub instructions: u64,
}

impl Report {
    /// Returns whether no rule of severity [`Severity::Error`] is broken.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.errors() == 0
    }

    /// Returns the number of violations of severity [`Severity::Error`].
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.count(Severity::Error)
    }

    /// Returns the number of violations of severity [`Severity::Warning`].
    #[must_use]
    pub fn warnings(&self) -> u64 {
        self.count(Severity::Warning)
    }

    /// Returns the listed violations of one rule.
    pub fn of(&self, rule: RuleId) -> impl Iterator<Item = &Violation> {
        self.violations.iter().filter(move |v| v.rule == rule)
    }

    fn count(&self, severity: Severity) -> u64 {
        self.rules
            .iter()
            .filter(|r| r.severity == severity)
            .map(|r| r.violations)
            .sum()
    }
}

impl fmt::Display for Report {
    /// Writes a table of the rules, then the violations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<17} {:>9} {:>7}  rule", "id", "facts", "broken")?;
        for r in &self.rules {
            let mark = match (r.violations, r.severity) {
                (0, _) => String::new(),
                (n, Severity::Error) => n.to_string(),
                (n, Severity::Warning) => format!("{n} warn"),
            };
            writeln!(
                f,
                "{:<17} {:>9} {:>7}  {}",
                r.id.id(),
                r.checked,
                mark,
                r.title
            )?;
        }
        let facts: u64 = self.rules.iter().map(|r| r.checked).sum();
        writeln!(
            f,
            "{} facts over {} instructions: {} errors, {} warnings",
            facts,
            self.instructions,
            self.errors(),
            self.warnings()
        )?;
        for v in &self.violations {
            let word = match v.rule.severity() {
                Severity::Error => "error",
                Severity::Warning => "warning",
            };
            writeln!(f, "{word} [{}] {}", v.rule, v.message)?;
        }
        Ok(())
    }
}

/// Collects facts and violations.
pub(super) struct Sink {
    checked: [u64; RULES.len()],
    found: [u64; RULES.len()],
    seen: HashSet<(RuleId, Option<InstrId>, Option<InstrId>)>,
    violations: Vec<Violation>,
}

impl Sink {
    pub(super) fn new() -> Self {
        Self {
            checked: [0; RULES.len()],
            found: [0; RULES.len()],
            seen: HashSet::new(),
            violations: Vec::new(),
        }
    }

    /// Counts facts of a rule.
    #[inline]
    pub(super) fn fact(&mut self, rule: RuleId, count: u64) {
        self.checked[rule as usize] += count;
    }

    /// Records a violation. The message is built only if it will be kept.
    pub(super) fn violation(
        &mut self,
        rule: RuleId,
        instr: Option<InstrId>,
        other: Option<InstrId>,
        message: impl FnOnce() -> String,
    ) {
        // Violations in tables have no instruction that distinguishes them, but each is found only
        // once.
        if instr.is_some() && !self.seen.insert((rule, instr, other)) {
            return;
        }
        self.found[rule as usize] += 1;
        if self.found[rule as usize] <= KEPT as u64 {
            self.violations.push(Violation {
                rule,
                instr,
                other,
                message: message(),
            });
        }
    }

    /// Returns whether a rule is broken.
    pub(super) fn any(&self, rule: RuleId) -> bool {
        self.found[rule as usize] > 0
    }

    pub(super) fn finish(mut self, waits: Vec<WaitCount>, instructions: u64) -> Report {
        self.violations.sort_by_key(|v| (v.rule, v.instr, v.other));
        let rules = RULES
            .iter()
            .map(|r| RuleResult {
                id: r.rule,
                title: r.title,
                source: r.source,
                kind: r.kind,
                severity: r.severity,
                checked: self.checked[r.rule as usize],
                violations: self.found[r.rule as usize],
            })
            .collect();
        Report {
            rules,
            violations: self.violations,
            waits,
            instructions,
        }
    }
}
