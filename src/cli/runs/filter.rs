//! Filters of saved runs.

use super::super::output::Failure;
use shardlab_plan::scenario::{keys, nearest};
use shardlab_reports::store::{Entry, Term};
use std::collections::BTreeSet;

/// Filters that verbs over runs share; all of them have to hold.
#[derive(clap::Args, Clone, Debug, Default)]
pub(in crate::cli) struct Filter {
    /// Only runs with this option, field or fact: KEY=VALUE or KEY!=VALUE (repeatable)
    ///
    /// KEY is an option (fsdp.policy), a field (kind, scenario, policy, hardware, world_size,
    /// program_digest) or a fact of the environment (host, git_revision, seed).
    #[arg(long = "where", value_name = "KEY=VALUE", value_parser = Term::parse)]
    terms: Vec<Term>,
    /// Only runs of this scenario
    #[arg(long, value_name = "NAME")]
    scenario: Option<String>,
    /// Only predicted runs, only those of `exec`, or only imported ones
    #[arg(long, value_name = "sim|exec|import", value_parser = ["sim", "exec", "import"])]
    kind: Option<String>,
    /// Only runs of this policy
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Only runs on this hardware
    #[arg(long, value_name = "NAME")]
    hardware: Option<String>,
    /// Only runs whose program's digest starts with this
    #[arg(long, value_name = "HEX")]
    digest: Option<String>,
    /// Only runs of this day (UTC) or later
    #[arg(long, value_name = "YYYY-MM-DD", value_parser = date)]
    since: Option<String>,
    /// Only runs of this day (UTC) or earlier
    #[arg(long, value_name = "YYYY-MM-DD", value_parser = date)]
    until: Option<String>,
}

/// Returns a date as `YYYYMMDD`.
fn date(text: &str) -> Result<String, String> {
    let digits = |range: std::ops::Range<usize>| -> Option<u32> { text.get(range)?.parse().ok() };
    let form = text.len() == 10 && text.get(4..5) == Some("-") && text.get(7..8) == Some("-");
    match (digits(0..4), digits(5..7), digits(8..10)) {
        (Some(year), Some(month @ 1..=12), Some(day @ 1..=31)) if form => {
            Ok(format!("{year:04}{month:02}{day:02}"))
        }
        _ => Err("expected a date, for example 2026-11-20".into()),
    }
}

impl Filter {
    /// Returns whether the filter accepts every run.
    pub(super) fn is_empty(&self) -> bool {
        self.terms().is_empty() && self.since.is_none() && self.until.is_none()
    }

    fn terms(&self) -> Vec<Term> {
        let named = [
            ("scenario", &self.scenario),
            ("kind", &self.kind),
            ("policy", &self.policy),
            ("hardware", &self.hardware),
            ("program_digest", &self.digest),
        ];
        let mut all = self.terms.clone();
        all.extend(named.into_iter().filter_map(|(key, value)| {
            Some(Term {
                key: key.to_owned(),
                value: value.clone()?,
                equal: true,
            })
        }));
        all
    }

    /// Returns the runs that match. If no run has a key or value of a filter, but it is similar to
    /// an existing one, it is reported as a mistake.
    pub(in crate::cli) fn apply(&self, runs: Vec<Entry>) -> Result<Vec<Entry>, Failure> {
        let terms = self.terms();
        for term in &terms {
            check(term, &runs)?;
        }
        let in_time = |e: &Entry| {
            let day = e.id.day();
            self.since.as_deref().is_none_or(|s| day >= s)
                && self.until.as_deref().is_none_or(|u| day <= u)
        };
        Ok(runs
            .into_iter()
            .filter(|e| in_time(e) && terms.iter().all(|t| t.matches(e)))
            .collect())
    }
}

fn check(term: &Term, runs: &[Entry]) -> Result<(), Failure> {
    let key = term.key.as_str();
    let known: BTreeSet<&str> = Entry::FIELDS
        .into_iter()
        .chain(["digest"])
        .chain(runs.iter().flat_map(|e| {
            let all = e.settings.keys().chain(e.environment.keys());
            all.map(String::as_str)
        }))
        .collect();
    let options: Vec<String> = keys()
        .iter()
        .map(|k| format!("{}.{}", k.section, k.key))
        .collect();
    if !known.contains(key) && !options.iter().any(|o| o == key) {
        let near = nearest(
            key,
            known.into_iter().chain(options.iter().map(String::as_str)),
        );
        let help = near.map_or_else(String::new, |n| format!("; the nearest is `{n}`"));
        return Err(Failure::bad_input(format_args!(
            "no run has a `{key}`{help}"
        )));
    }
    let values: BTreeSet<String> = runs.iter().filter_map(|e| e.field(key)).collect();
    let found = runs.iter().any(|e| {
        Term {
            equal: true,
            ..term.clone()
        }
        .matches(e)
    });
    if let (false, Some(near)) = (
        found,
        nearest(&term.value, values.iter().map(String::as_str)),
    ) {
        return Err(Failure::bad_input(format_args!(
            "no run has {key}={}; the nearest is `{near}`",
            term.value
        )));
    }
    Ok(())
}
