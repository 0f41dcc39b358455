//! The three lines at the start of predictions: the verdict, the reason, and what to do next.

use super::output::Out;
use super::text;
use crate::analysis::verdict::Verdict;
use crate::analysis::warnings::Warning;
use std::io;
use std::path::Path;

/// Prints the box, followed by the warnings.
pub(super) fn print(
    verdict: &Verdict,
    next: &str,
    warnings: &[Warning],
    out: &mut Out,
) -> io::Result<()> {
    rule(out)?;
    let line = verdict.line();
    let rest = line.strip_prefix(verdict.headline).unwrap_or_default();
    let headline = match (verdict.good, verdict.fits) {
        (true, _) => out.good(verdict.headline),
        (_, "?") => verdict.headline.to_owned(),
        _ => out.bad(verdict.headline),
    };
    out.labelled("verdict", &format!("{headline}{rest}"))?;
    out.labelled("why", &verdict.why)?;
    out.labelled("next", next)?;
    rule(out)?;
    for warning in warnings {
        out.labelled("warning", &warning.to_string())?;
    }
    Ok(())
}

fn rule(out: &mut Out) -> io::Result<()> {
    out.line("─".repeat(text::sentence()))
}

/// Returns a shell command that runs a subcommand on a scenario.
pub(super) fn command(verb: &str, scenario: &Path, set: &[String]) -> String {
    let mut words = vec![
        "shardlab".to_owned(),
        verb.to_owned(),
        quoted(&scenario.display().to_string()),
    ];
    words.extend(set.iter().map(|set| setting(set)));
    words.join(" ")
}

/// Quotes an override for a shell.
pub(super) fn setting(set: &str) -> String {
    format!("--set {}", quoted(set))
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "_-./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_ready_for_a_shell() {
        let set = [
            "train.micro_batch=2".to_owned(),
            "fsdp.offload=[\"optimizer\"]".to_owned(),
        ];
        assert_eq!(
            command("explain", Path::new("my jobs/a.toml"), &set),
            "shardlab explain 'my jobs/a.toml' --set train.micro_batch=2 --set 'fsdp.offload=[\"optimizer\"]'"
        );
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
