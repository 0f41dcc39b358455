//! TOML values that remember where they were written.

use super::error::ScenarioError;
use super::source::Source;
use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// Where something was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    /// Index into the document's sources.
    pub source: u32,
    start: u32,
    end: u32,
}

impl Origin {
    pub(crate) fn new(source: u32, span: Range<usize>) -> Self {
        // Sources are limited to 1 MiB when they are read, so the casts keep the value; beyond,
        // positions saturate.
        let cut = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Self {
            source,
            start: cut(span.start),
            end: cut(span.end),
        }
    }

    pub(crate) fn span(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// A value and its place.
#[derive(Clone, Debug)]
pub(crate) struct Value {
    pub origin: Origin,
    pub datum: Datum,
}

/// What a value is.
#[derive(Clone, Debug)]
pub(crate) enum Datum {
    Str(String),
    Int(i128),
    Float(f64),
    Bool(bool),
    Date,
    Array(Vec<Value>),
    Table(Vec<Entry>),
}

/// One key of a table.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub key: String,
    pub key_origin: Origin,
    pub value: Value,
}

impl Value {
    /// As a user would call it: `the string "x"`, `3`, `a list`.
    pub(crate) fn describe(&self) -> String {
        match &self.datum {
            Datum::Str(s) => format!("the string {:?}", s.chars().take(40).collect::<String>()),
            Datum::Int(n) => n.to_string(),
            // With its point: `4.0` is not the integer 4.
            Datum::Float(x) => format!("{x:?}"),
            Datum::Bool(b) => b.to_string(),
            Datum::Date => "a date".into(),
            Datum::Array(_) => "a list".into(),
            Datum::Table(_) => "a table".into(),
        }
    }

    pub(crate) fn str(&self) -> Option<&str> {
        match &self.datum {
            Datum::Str(s) => Some(s),
            _ => None,
        }
    }

    pub(crate) fn array(&self) -> Option<&[Self]> {
        match &self.datum {
            Datum::Array(a) => Some(a),
            _ => None,
        }
    }

    pub(crate) fn table(&self) -> Option<&[Entry]> {
        match &self.datum {
            Datum::Table(t) => Some(t),
            _ => None,
        }
    }

    pub(crate) fn integer(&self) -> Option<u64> {
        match self.datum {
            Datum::Int(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }

    /// A number; integers count.
    pub(crate) fn number(&self) -> Option<f64> {
        match self.datum {
            Datum::Int(n) => Some(n as f64),
            Datum::Float(x) => Some(x),
            _ => None,
        }
    }

    /// Bytes: an integer, or a string such as `"25MiB"`.
    pub(crate) fn bytes(&self) -> Option<u64> {
        match &self.datum {
            Datum::Str(s) => parse_bytes(s),
            _ => self.integer(),
        }
    }
}

/// Parses a size such as `25MiB`, `5 GB`, `1.5GiB` or `4096B`: a number and a unit, decimal or
/// binary. A number alone is refused, because the user probably did not mean bytes.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale: u64 = match unit.trim() {
        "B" => 1,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    let number = number.trim().replace('_', "");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale);
    }
    let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let bytes = plain.then(|| number.parse::<f64>().ok()).flatten()? * scale as f64;
    (bytes < 9e18).then(|| bytes.round() as u64)
}

/// Converts a parsed table, in the order of the text.
pub(crate) fn convert_table(table: &DeTable<'_>, source: u32, shift: usize) -> Vec<Entry> {
    let mut entries: Vec<Entry> = table
        .iter()
        .map(|(key, value)| Entry {
            key: key.get_ref().to_string(),
            key_origin: place(key.span(), source, shift),
            value: convert(value.get_ref(), value.span(), source, shift),
        })
        .collect();
    entries.sort_by_key(|e| e.key_origin.start);
    entries
}

/// Converts a parsed value; `shift` is where its text starts within the source.
pub(crate) fn convert(value: &DeValue<'_>, span: Range<usize>, source: u32, shift: usize) -> Value {
    let datum = match value {
        DeValue::String(s) => Datum::Str(s.to_string()),
        // Out of range stays out of range: every integer option has a limit far below.
        DeValue::Integer(n) => {
            Datum::Int(i128::from_str_radix(n.as_str(), n.radix()).unwrap_or(i128::MAX))
        }
        DeValue::Float(x) => Datum::Float(x.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(b) => Datum::Bool(*b),
        DeValue::Datetime(_) => Datum::Date,
        DeValue::Array(a) => Datum::Array(
            a.iter()
                .map(|v| convert(v.get_ref(), v.span(), source, shift))
                .collect(),
        ),
        DeValue::Table(t) => Datum::Table(convert_table(t, source, shift)),
    };
    Value {
        origin: place(span, source, shift),
        datum,
    }
}

fn place(span: Range<usize>, source: u32, shift: usize) -> Origin {
    Origin::new(source, span.start + shift..span.end + shift)
}

/// The error of the TOML parser, in our form.
pub(crate) fn syntax_error(
    source: &Source,
    error: &toml::de::Error,
    shift: usize,
) -> ScenarioError {
    let span = error.span().unwrap_or(0..0);
    ScenarioError::at(
        source,
        span.start + shift..span.end + shift,
        error.message().trim_end(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("25MiB", Some(25 * 1024 * 1024)),
            ("5 GB", Some(5_000_000_000)),
            ("1.5KiB", Some(1536)),
            ("4_096 B", Some(4096)),
            ("60", None),
            ("0B", Some(0)),
            ("99999999999TiB", None),
            ("1e30", None),
            ("-1", None),
            ("MiB", None),
            ("5 parsecs", None),
            ("", None),
        ] {
            assert_eq!(parse_bytes(text), bytes, "{text}");
        }
    }
}
