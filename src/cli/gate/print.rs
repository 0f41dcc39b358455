//! Verdicts for people.

use crate::cli::output::{Failure, Out};
use crate::cli::table::{Table, WIDTH};
use shardlab_reports::gate::{Finding, Status, Verdict};

/// Prints the verdicts: one line a scenario, and what failed below it.
pub(super) fn verdicts(all: bool, verdicts: &[Verdict], out: &mut Out) -> Result<(), Failure> {
    for v in verdicts {
        let word = if v.pass {
            out.good("pass")
        } else {
            out.bad("FAIL")
        };
        let of = |s: Status| v.findings.iter().filter(|f| f.status == s).count();
        let mut rest = String::new();
        for status in [Status::Inconclusive, Status::Skipped] {
            if of(status) > 0 {
                rest.push_str(&format!(", {} {}", of(status), status.word()));
            }
        }
        let failures = v.failures().count();
        let heading = out.bold(&v.scenario);
        let count = v.findings.len();
        if failures == 0 {
            out.line(format_args!(
                "{heading}: {word} ({count} comparisons{rest})"
            ))?;
        } else {
            out.line(format_args!(
                "{heading}: {word} ({failures} of {count} comparisons{rest})"
            ))?;
        }
        let shown: Vec<&Finding> = v
            .findings
            .iter()
            .filter(|f| all || f.status != Status::Pass)
            .collect();
        if !shown.is_empty() {
            out.text(table(&shown))?;
            for f in &shown {
                tell(f, out)?;
            }
            out.blank()?;
        }
    }
    if verdicts.len() > 1 {
        let failed = verdicts.iter().filter(|v| !v.pass).count();
        out.line(match failed {
            0 => out.good(format_args!("{} scenarios passed", verdicts.len())),
            n => out.bad(format_args!("{n} of {} scenarios failed", verdicts.len())),
        })?;
    }
    Ok(())
}

fn table(findings: &[&Finding]) -> Table {
    let mut table = Table::new(["metric", ">baseline", ">now", ">limit", "outcome"]);
    for f in findings {
        table.row([
            f.metric.clone(),
            f.baseline.clone(),
            f.now.clone(),
            f.limit.clone(),
            f.status.word().to_owned(),
        ]);
    }
    table
}

/// What there is to say beyond the table.
fn tell(f: &Finding, out: &mut Out) -> Result<(), Failure> {
    if f.message.is_empty() && f.detail.is_empty() {
        return Ok(());
    }
    let place = match &f.place {
        Some(p) if f.status.fails() => format!(" [{}:{}]", p.file, p.line),
        _ => String::new(),
    };
    out.paragraph(2, &format!("{}: {}{place}", f.metric, f.message))?;
    for line in f.detail.lines() {
        let shown = cut(line, WIDTH - 4);
        let shown = match line.chars().next() {
            Some('+') => out.good(shown),
            Some('-') => out.bad(shown),
            _ => shown,
        };
        out.line(format_args!("    {shown}"))?;
    }
    Ok(())
}

/// A line of at most `width` characters.
fn cut(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    let mut shown: String = line.chars().take(width - 1).collect();
    shown.push('…');
    shown
}
