//! Prints verdicts as text.

use crate::cli::output::{Failure, Out};
use crate::cli::table::{Table, WIDTH};
use shardlab_reports::gate::metric::BASELINE;
use shardlab_reports::gate::{Finding, Status, Verdict};

/// Prints the verdicts: one line per scenario, followed by its failures. Each failure starts with
/// its cause.
pub(super) fn verdicts(all: bool, verdicts: &[Verdict], out: &mut Out) -> Result<(), Failure> {
    for v in verdicts {
        heading(v, out)?;
        for failure in &v.failures {
            let place = match &failure.place {
                Some(p) => format!(" [{}:{}]", p.file, p.line),
                None => String::new(),
            };
            let findings: Vec<&Finding> = v.of(failure).collect();
            let cause = out.bold(&failure.cause);
            out.blank()?;
            // If there are not two numbers to compare, a sentence is enough.
            if let [f] = findings[..]
                && (f.baseline.is_empty() || f.status == Status::NoBaseline)
            {
                out.paragraph(2, &format!("{cause}: {}{place}", f.message))?;
                more(f, out)?;
            } else {
                out.paragraph(2, &format!("{cause}{place}"))?;
                details(&findings, out)?;
            }
        }
        let rest = |f: &&Finding| match f.status {
            Status::Pass => all,
            // Skipped findings are left out if the heading or the cause already contains the
            // message.
            Status::Skipped => all || v.change.as_ref() != Some(&f.message),
            status => !status.fails(),
        };
        let rest = v
            .findings
            .iter()
            .filter(|f| all || !is_note(f))
            .filter(rest);
        let rest: Vec<&Finding> = rest.collect();
        if !rest.is_empty() {
            out.blank()?;
            details(&rest, out)?;
        }
        if !rest.is_empty() || !v.pass {
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

/// Prints the verdict as one line, with changes that do not fail.
fn heading(v: &Verdict, out: &mut Out) -> Result<(), Failure> {
    let of = |s: Status| v.findings.iter().filter(|f| f.status == s).count();
    let mut about = match v.failures.len() {
        0 => format!("{} comparisons", v.findings.len()),
        _ => format!(
            "{} of {} comparisons failed",
            v.failing().count(),
            v.findings.len()
        ),
    };
    for status in [Status::Inconclusive, Status::Skipped] {
        if of(status) > 0 {
            about.push_str(&format!(", {} {}", of(status), status.word()));
        }
    }
    let name = out.bold(&v.scenario);
    let word = if v.pass {
        out.good("pass")
    } else {
        out.bad("FAIL")
    };
    out.line(format_args!("{name}: {word} ({about})"))?;
    if let Some(basis) = &v.basis {
        out.paragraph(2, &format!("prediction {}", basis.sentence()))?;
    }
    let change = v.change.as_ref().filter(|_| v.pass);
    let alone = v.findings.iter().filter(|f| is_note(f)).map(|f| &f.message);
    for note in change.into_iter().chain(alone) {
        out.paragraph(2, &format!("note: {note}"))?;
    }
    Ok(())
}

/// Returns whether a finding only reports that there was nothing to compare with, and does not
/// fail.
fn is_note(f: &Finding) -> bool {
    f.status == Status::Skipped && f.metric == BASELINE
}

fn details(findings: &[&Finding], out: &mut Out) -> Result<(), Failure> {
    out.text(table(findings))?;
    for f in findings {
        tell(f, out)?;
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

/// Prints what the table does not contain.
fn tell(f: &Finding, out: &mut Out) -> Result<(), Failure> {
    if f.message.is_empty() && f.detail.is_empty() {
        return Ok(());
    }
    out.paragraph(2, &format!("{}: {}", f.metric, f.message))?;
    more(f, out)
}

/// Prints the lines below a sentence.
fn more(f: &Finding, out: &mut Out) -> Result<(), Failure> {
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

/// Returns a line shortened to at most `width` characters.
fn cut(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    let mut shown: String = line.chars().take(width - 1).collect();
    shown.push('…');
    shown
}
