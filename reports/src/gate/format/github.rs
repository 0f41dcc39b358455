//! Workflow commands of GitHub Actions: errors and warnings at lines of files.

use super::sentence;
use crate::gate::finding::{Status, Verdict};
use std::fmt::Write;

/// One workflow command a finding that fails (error) or could not be judged (warning).
#[must_use]
pub fn github(verdicts: &[Verdict]) -> String {
    let mut out = String::new();
    for v in verdicts {
        for f in &v.findings {
            let level = match f.status {
                s if s.fails() => "error",
                Status::Inconclusive => "warning",
                _ => continue,
            };
            let _ = write!(out, "::{level} ");
            if let Some(p) = &f.place {
                let _ = write!(
                    out,
                    "file={},line={},col={},",
                    property(&p.file),
                    p.line,
                    p.column
                );
            }
            let title = format!("{}: {} {}", v.scenario, f.metric, f.status.word());
            let _ = writeln!(out, "title={}::{}", property(&title), data(&sentence(f)));
        }
    }
    out
}

fn data(text: &str) -> String {
    text.replace('%', "%25")
        .replace('\r', "%0D")
        .replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}
