//! Formats verdicts as Markdown, for `$GITHUB_STEP_SUMMARY` and comments.

use crate::gate::finding::{Finding, Status, Verdict};
use std::fmt::Write;

/// Formats the verdicts as Markdown: one line per scenario, then the failures with their causes and
/// details.
#[must_use]
pub fn markdown(verdicts: &[Verdict]) -> String {
    let failed = verdicts.iter().filter(|v| !v.pass).count();
    let mut out = match (failed, verdicts.len()) {
        (0, 1) => "## Gate: passed\n\n".to_owned(),
        (0, n) => format!("## Gate: {n} scenarios passed\n\n"),
        (f, n) => format!("## Gate: {f} of {n} scenarios failed\n\n"),
    };
    out.push_str(
        "| scenario | verdict | memory | predicted step | convergence |\n|---|---|---|---|---|\n",
    );
    for v in verdicts {
        let find = |metric: &str| v.findings.iter().find(|f| f.metric.starts_with(metric));
        let value = |f: Option<&Finding>| {
            f.map_or_else(String::new, |f| {
                let mark = if f.status.fails() { "**" } else { "" };
                format!("{mark}{}{mark}", cell(&f.now))
            })
        };
        let curve = v
            .findings
            .iter()
            .filter(|f| f.class == crate::gate::Class::Convergence);
        let curve: Vec<&Finding> = curve.collect();
        let convergence = match curve.iter().find(|f| f.status.fails()) {
            Some(f) => format!("**{}**", cell(&f.metric)),
            None if curve.is_empty() => String::new(),
            None => "pass".to_owned(),
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {convergence} |",
            cell(&v.scenario),
            if v.pass { "pass" } else { "**FAIL**" },
            value(find("allocated")),
            value(find("step, predicted")),
        );
    }
    for v in verdicts {
        let unclear: Vec<&Finding> = v.findings.iter().filter(|f| unjudged(f)).collect();
        if v.failures.is_empty() && unclear.is_empty() {
            continue;
        }
        let _ = write!(out, "\n### {}\n", cell(&v.scenario));
        for failure in &v.failures {
            let _ = write!(out, "\n**{}**\n\n", cell(&failure.cause));
            table(v.of(failure), &mut out);
            for f in v.of(failure).filter(|f| !f.detail.is_empty()) {
                // Four backticks, so that three backticks in the detail do not end the block.
                let _ = write!(
                    out,
                    "\n<details><summary>{}</summary>\n\n````diff\n{}````\n\n</details>\n",
                    cell(&f.metric),
                    f.detail
                );
            }
        }
        if !unclear.is_empty() {
            out.push_str("\nNot judged:\n\n");
            table(unclear.into_iter(), &mut out);
        }
    }
    out
}

fn table<'a>(findings: impl Iterator<Item = &'a Finding>, out: &mut String) {
    out.push_str(
        "| metric | outcome | baseline | now | limit | what |\n|---|---|---|---|---|---|\n",
    );
    for f in findings {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} |",
            cell(&f.metric),
            f.status.word(),
            cell(&f.baseline),
            cell(&f.now),
            cell(&f.limit),
            cell(&f.message)
        );
    }
}

/// Returns whether a finding could not be judged and has a message.
fn unjudged(f: &Finding) -> bool {
    matches!(f.status, Status::Inconclusive | Status::Skipped) && !f.message.is_empty()
}

/// Escapes text for a cell of a table.
fn cell(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '|' => out.push_str("\\|"),
            '\n' => out.push(' '),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c => out.push(c),
        }
    }
    out
}
