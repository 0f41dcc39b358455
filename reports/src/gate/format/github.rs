//! Formats verdicts as workflow commands of GitHub Actions: errors and warnings at lines of files.

use super::{outcome, sentence};
use crate::gate::finding::{Status, Verdict};
use crate::gate::limits::Place;
use std::fmt::Write;

/// Returns one workflow command per failure (error) and per finding that could not be judged
/// (warning).
#[must_use]
pub fn github(verdicts: &[Verdict]) -> String {
    let mut out = String::new();
    for v in verdicts {
        for failure in &v.failures {
            let title = format!("{}: {}", v.scenario, failure.cause);
            let text: Vec<String> = v.of(failure).map(outcome).collect();
            command(
                &mut out,
                "error",
                failure.place.as_ref(),
                &title,
                &text.join("\n"),
            );
        }
        let unclear = v
            .findings
            .iter()
            .filter(|f| f.status == Status::Inconclusive);
        for f in unclear {
            let title = format!("{}: {} {}", v.scenario, f.metric, f.status.word());
            command(&mut out, "warning", f.place.as_ref(), &title, &sentence(f));
        }
    }
    out
}

fn command(out: &mut String, level: &str, place: Option<&Place>, title: &str, text: &str) {
    let _ = write!(out, "::{level} ");
    if let Some(p) = place {
        let file = property(&p.file);
        let _ = write!(out, "file={file},line={},col={},", p.line, p.column);
    }
    let _ = writeln!(out, "title={}::{}", property(title), data(text));
}

fn data(text: &str) -> String {
    text.replace('%', "%25")
        .replace('\r', "%0D")
        .replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}
