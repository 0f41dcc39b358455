//! Compares the configurations of all ranks, and finds the first value that differs.

/// Separates a value from its reason. Reasons are shown, and may differ between ranks.
const REASON: char = '\t';

/// Formats a value with the reason for it.
#[cfg(feature = "cuda")]
pub(crate) fn with_reason(value: &str, reason: &str) -> String {
    format!("{value}{REASON}{reason}")
}

/// Encodes the values of one rank, one line per value.
pub(crate) fn encode(values: &[(&str, String)]) -> Vec<u8> {
    let lines = values
        .iter()
        .map(|(name, value)| format!("{name}={}\n", value.replace('\n', " ")));
    lines.collect::<String>().into_bytes()
}

/// Describes the first value that differs from rank 0's; `None` if all are equal. `all` contains
/// the encoded values of every rank.
pub(crate) fn first_difference(all: &[Vec<u8>]) -> Option<String> {
    let texts: Vec<_> = all.iter().map(|t| String::from_utf8_lossy(t)).collect();
    let (first, rest) = texts.split_first()?;
    let value = |line: &str| line.split(REASON).next().map(str::to_owned);
    (1..).zip(rest).find_map(|(rank, text)| {
        let mut pairs = first.lines().zip(text.lines());
        let (a, b) = pairs.find(|(a, b)| value(a) != value(b))?;
        Some(format!(
            "rank {rank} has {}, rank 0 has {}",
            describe(b),
            describe(a)
        ))
    })
}

fn describe(line: &str) -> String {
    line.split_once(REASON).map_or_else(
        || line.to_owned(),
        |(value, reason)| format!("{value} ({reason})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_and_reasons_may_differ() {
        let rank = |steps: &str, library: &str| {
            let values = [("steps", steps.to_owned()), ("library", library.to_owned())];
            encode(&values)
        };
        let none = |reason: &str| format!("none{REASON}{reason}");
        assert_eq!(first_difference(&[rank("2", "9")]), None);
        let alike = [rank("2", &none("not there")), rank("2", &none("unwanted"))];
        assert_eq!(first_difference(&alike), None);
        assert_eq!(
            first_difference(&[
                rank("2", "9"),
                rank("2", "9"),
                rank("2\n", &none("not\nthere"))
            ]),
            Some("rank 2 has steps=2 , rank 0 has steps=2".to_owned())
        );
        assert_eq!(
            first_difference(&[
                rank("2", "9"),
                rank("2", &none("not\nthere")),
                rank("3", "9")
            ]),
            Some("rank 1 has library=none (not there), rank 0 has library=9".to_owned())
        );
    }
}
