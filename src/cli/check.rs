//! `shardlab check`: proves that programs are correct.

use super::args::{Overrides, load, plan};
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use super::table::Table;
use crate::analysis::warnings::{self, Warning};
use rayon::prelude::*;
use serde::Serialize;
use shardlab_plan::check::{Report, RuleResult, Severity, check};
use shardlab_plan::ir::ParameterCount;
use shardlab_plan::scenario::shipped;
use shardlab_plan::units::{count, short_count};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Scenario files, or names of shipped ones [default: all shipped ones]
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// Print one JSON object per scenario
    #[arg(long)]
    json: bool,
    /// Print every rule, not only violated ones
    #[arg(long, conflicts_with = "json")]
    rules: bool,
    /// Print every warning, not only their number per rule
    #[arg(long, conflicts_with = "json")]
    warnings: bool,
}

/// The verdict on one scenario.
#[derive(Serialize)]
struct Verdict {
    scenario: String,
    program_digest: String,
    ok: bool,
    errors: u64,
    warnings: u64,
    /// Numbers of parameters.
    parameters: ParameterCount,
    /// Warnings about the scenario and its model's file.
    model_warnings: Vec<Warning>,
    #[serde(flatten)]
    report: Report,
}

impl Verdict {
    fn facts(&self) -> u64 {
        self.report.rules.iter().map(|r| r.checked).sum()
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    out.outlive_reader();
    let paths = if args.scenarios.is_empty() {
        shipped()
            .iter()
            .map(|(name, _)| PathBuf::from(name))
            .collect()
    } else {
        args.scenarios.clone()
    };
    let scenarios = paths
        .iter()
        .map(|path| load(path, &args.overrides.set))
        .collect::<Result<Vec<_>, _>>()?;
    let progress = Progress::new("checking", scenarios.len(), args.json);
    let verdicts = paths
        .par_iter()
        .zip(&scenarios)
        .map(|(path, scenario)| {
            let program = plan(scenario)?;
            let (report, digest) = rayon::join(|| check(&program), || program.digest());
            progress.step();
            Ok(Verdict {
                scenario: scenario.name.clone(),
                program_digest: digest,
                ok: report.is_ok(),
                errors: report.errors(),
                warnings: report.warnings(),
                parameters: program.meta.parameters,
                model_warnings: warnings::of_scenario(scenario, path, &args.overrides.set),
                report,
            })
        })
        .collect::<Result<Vec<Verdict>, Failure>>()?;
    drop(progress);
    if args.json {
        for verdict in &verdicts {
            out.json(verdict)?;
        }
    } else {
        print(args, &verdicts, out)?;
    }
    Ok(if verdicts.iter().all(|v| v.ok) {
        Status::Done
    } else {
        Status::CheckFailed
    })
}

fn print(args: &Args, verdicts: &[Verdict], out: &mut Out) -> Result<(), Failure> {
    for v in verdicts {
        if args.rules {
            out.heading(&v.scenario)?;
            out.text(rules(&v.report))?;
        }
        for warning in &v.model_warnings {
            out.line(format_args!("{}: warning: {warning}", v.scenario))?;
        }
        for violation in &v.report.violations {
            let word = match violation.rule.severity() {
                Severity::Error => out.bad("error"),
                Severity::Warning if args.warnings => "warning".into(),
                Severity::Warning => continue,
            };
            out.line(format_args!(
                "{}: {word} [{}] {}",
                v.scenario, violation.rule, violation.message
            ))?;
        }
        if args.rules {
            out.blank()?;
        }
    }
    if !args.warnings {
        by_rule(verdicts, out)?;
    }
    let mut table = Table::new([
        "scenario",
        "?>parameters",
        "?>instructions",
        "?>facts",
        ">errors",
        "?>warnings",
        "verdict",
    ]);
    for v in verdicts {
        table.row([
            v.scenario.clone(),
            short_count(v.parameters.total),
            count(v.report.instructions),
            count(v.facts()),
            count(v.errors),
            count(v.warnings),
            if v.ok { "proven" } else { "broken" }.to_owned(),
        ]);
    }
    out.text(table)?;
    Ok(())
}

/// Prints one line per rule with warnings: their number, and the scenarios.
fn by_rule(verdicts: &[Verdict], out: &mut Out) -> Result<(), Failure> {
    let mut by_rule: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for v in verdicts {
        let warned = |r: &&RuleResult| r.severity == Severity::Warning && r.violations > 0;
        for r in v.report.rules.iter().filter(warned) {
            by_rule
                .entry((r.id.id(), r.title))
                .or_default()
                .push(format!("{} ({})", v.scenario, r.violations));
        }
    }
    for ((id, title), places) in &by_rule {
        out.paragraph(
            0,
            &format!("warning [{id}] violated: {title}: {}", places.join(", ")),
        )?;
    }
    if !by_rule.is_empty() {
        out.line("(--warnings prints all of them)")?;
        out.blank()?;
    }
    Ok(())
}

/// Returns a table of every rule with the number of checked facts.
fn rules(report: &Report) -> Table {
    let mut table = Table::new(["rule", "?kind", "?>facts", ">violated", "what holds"]);
    for r in &report.rules {
        table.row([
            r.id.id().to_owned(),
            r.kind.name().to_owned(),
            count(r.checked),
            match r.violations {
                0 => String::new(),
                n => n.to_string(),
            },
            r.title.to_owned(),
        ]);
    }
    table
}
