//! Verdicts for other programs: JUnit XML, Markdown, and annotations of GitHub Actions.

mod github;
mod junit;
mod markdown;

pub use github::github;
pub use junit::junit;
pub use markdown::markdown;

/// Returns a sentence on a finding that fails or was not judged: metric, values, limit and reason.
#[must_use]
pub fn sentence(f: &super::Finding) -> String {
    let mut out = f.metric.clone();
    if !f.baseline.is_empty() && !f.now.is_empty() {
        out.push_str(&format!(": {} to {}", f.baseline, f.now));
    }
    if !f.limit.is_empty() {
        out.push_str(&format!(" (limit {})", f.limit));
    }
    if !f.message.is_empty() {
        out.push_str(&format!(": {}", f.message));
    }
    out
}

/// Returns the sentence with the outcome, for a list.
#[must_use]
pub fn outcome(f: &super::Finding) -> String {
    format!("{} {}", f.status.word(), sentence(f))
}
