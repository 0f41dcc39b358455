//! Formats commands for a shell.

/// Returns the command that runs a subcommand on a scenario with overrides `section.key=VALUE`.
#[must_use]
pub fn command(verb: &str, scenario: &str, overrides: &[String]) -> String {
    let set = overrides.iter().map(|o| format!(" --set {}", quoted(o)));
    let set: String = set.collect();
    format!("shardlab {verb} {}{set}", quoted(scenario))
}

/// Joins words into a command. Words are quoted if necessary.
#[must_use]
pub fn joined<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let words: Vec<String> = words.into_iter().map(quoted).collect();
    words.join(" ")
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}
