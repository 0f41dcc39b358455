//! Facts that all ranks must have alike, and the first one that differs.

/// Between a value and the reason for it: reasons are told, and may differ.
const REASON: char = '\t';

/// A value for a reason.
#[cfg(feature = "cuda")]
pub(crate) fn because(value: &str, reason: &str) -> String {
    format!("{value}{REASON}{reason}")
}

/// Facts as one rank tells them to the others: a line each.
pub(crate) fn text(facts: &[(&str, String)]) -> Vec<u8> {
    let lines = facts
        .iter()
        .map(|(name, value)| format!("{name}={}\n", value.replace('\n', " ")));
    lines.collect::<String>().into_bytes()
}

/// The first rank that has a fact otherwise than rank 0, in words. `all` has every rank's text.
pub(crate) fn difference(all: &[Vec<u8>]) -> Option<String> {
    let texts: Vec<_> = all.iter().map(|t| String::from_utf8_lossy(t)).collect();
    let (first, rest) = texts.split_first()?;
    let value = |line: &str| line.split(REASON).next().map(str::to_owned);
    (1..).zip(rest).find_map(|(rank, text)| {
        let mut pairs = first.lines().zip(text.lines());
        let (a, b) = pairs.find(|(a, b)| value(a) != value(b))?;
        Some(format!(
            "rank {rank} has {}, rank 0 has {}",
            words(b),
            words(a)
        ))
    })
}

fn words(line: &str) -> String {
    line.split_once(REASON).map_or_else(
        || line.to_owned(),
        |(value, reason)| format!("{value} ({reason})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_and_reasons_are_none() {
        let rank = |steps: &str, library: &str| {
            let facts = [("steps", steps.to_owned()), ("library", library.to_owned())];
            text(&facts)
        };
        let none = |reason: &str| format!("none{REASON}{reason}");
        assert_eq!(difference(&[rank("2", "9")]), None);
        let alike = [rank("2", &none("not there")), rank("2", &none("unwanted"))];
        assert_eq!(difference(&alike), None);
        assert_eq!(
            difference(&[
                rank("2", "9"),
                rank("2", "9"),
                rank("2\n", &none("not\nthere"))
            ]),
            Some("rank 2 has steps=2 , rank 0 has steps=2".to_owned())
        );
        assert_eq!(
            difference(&[
                rank("2", "9"),
                rank("2", &none("not\nthere")),
                rank("3", "9")
            ]),
            Some("rank 1 has library=none (not there), rank 0 has library=9".to_owned())
        );
    }
}
