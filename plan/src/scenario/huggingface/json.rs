//! JSON as transformers writes it.

use super::super::value::{Datum, Entry, Origin, Value};
use std::borrow::Cow;

/// A number that JSON does not have, but Python writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Special {
    /// Its first byte.
    pub(super) at: usize,
    pub(super) value: f64,
}

/// Returns a text in which zeros stand for `Infinity`, `-Infinity` and `NaN` outside of strings,
/// with every other byte at its place, and these numbers.
pub(super) fn without_specials(text: &str) -> (Cow<'_, str>, Vec<Special>) {
    const WORDS: [(&str, f64); 3] = [
        ("-Infinity", f64::NEG_INFINITY),
        ("Infinity", f64::INFINITY),
        ("NaN", f64::NAN),
    ];
    let mut found = Vec::new();
    let mut plain = String::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(c) = rest.chars().next() {
        let word = WORDS
            .iter()
            .find(|(w, _)| !in_string && rest.starts_with(w));
        if let Some((word, value)) = word {
            found.push(Special {
                at: text.len() - rest.len(),
                value: *value,
            });
            plain.push('0');
            plain.extend(std::iter::repeat_n(' ', word.len() - 1));
            rest = &rest[word.len()..];
            continue;
        }
        in_string ^= c == '"';
        let mut taken = c.len_utf8();
        if in_string && c == '\\' {
            taken += rest[taken..].chars().next().map_or(0, char::len_utf8);
        }
        plain.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    match found.is_empty() {
        true => (text.into(), found),
        false => (plain.into(), found),
    }
}

/// Returns a JSON value as TOML would have it. What lists and objects hold stands where they do.
pub(super) fn datum(value: serde_json::Value, origin: Origin) -> Datum {
    let held = |value| Value {
        origin,
        datum: datum(value, origin),
    };
    match value {
        serde_json::Value::Bool(b) => Datum::Bool(b),
        serde_json::Value::String(s) => Datum::Str(s),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Datum::Int(n.into()),
            (None, Some(n)) => Datum::Int(n.into()),
            (None, None) => Datum::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::Null => Datum::Array(Vec::new()),
        serde_json::Value::Array(values) => Datum::Array(values.into_iter().map(held).collect()),
        serde_json::Value::Object(fields) => {
            let entry = |(key, value)| Entry {
                key,
                key_origin: origin,
                value: held(value),
            };
            Datum::Table(fields.into_iter().map(entry).collect())
        }
    }
}

/// Returns the byte at a line and column, both from 1, of a text.
pub(super) fn byte(text: &str, line: usize, column: usize) -> usize {
    let before = text.split_inclusive('\n').take(line.saturating_sub(1));
    before.map(str::len).sum::<usize>() + column.saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_lacks_keep_every_byte_at_its_place() {
        let text = r#"{"a\"Infinity": "NaN", "b": [0, -Infinity], "c": NaN}"#;
        let (plain, found) = without_specials(text);
        assert_eq!(plain.len(), text.len());
        let at: Vec<usize> = found.iter().map(|s| s.at).collect();
        assert_eq!(at, [text.find("-Inf").unwrap(), text.len() - 4]);
        let read: serde_json::Value = serde_json::from_str(&plain).unwrap();
        assert_eq!(read["a\"Infinity"], "NaN");
        assert_eq!(read["b"][1], 0);
        assert!(without_specials("{}").1.is_empty());
    }
}
