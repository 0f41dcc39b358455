//! Checks the text of a profile against the table, and fills in missing keys.

use super::format::{Field, IfAbsent, Kind, SECTIONS, Section};
use crate::ir::DType;
use crate::names::nearest;
use crate::scenario::Position;
use crate::scenario::value::{Datum, Entry, Origin, Value, convert_table};
use std::fmt;
use toml::de::DeTable;
use toml::{Table, Value as Toml};

/// Reason why a text is not a valid profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatError {
    /// Position of the error; `None` if it is about the text as a whole.
    pub position: Option<Position>,
    /// What is wrong, what was expected, and the nearest valid name.
    pub message: String,
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Position { line, column }) = self.position {
            write!(f, "{line}:{column}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for FormatError {}

/// Checks the names, types and ranges of everything in a text. [`complete`] checks for missing
/// keys.
///
/// # Errors
/// Returns the first error, with its position, if the text is not a valid profile.
pub fn check(text: &str) -> Result<(), FormatError> {
    let entries = entries(text)?;
    let root = Checker { text };
    root.section(&SECTIONS[0], &entries)
}

/// Returns the position of a key, such as `device.sms`, or of a section.
#[must_use]
pub fn position(text: &str, path: &str) -> Option<Position> {
    let mut entries = entries(text).ok()?;
    let mut found = None;
    for part in path.split('.') {
        let i = entries.iter().position(|e| e.key == part)?;
        let entry = entries.swap_remove(i);
        found = Some(entry.key_origin);
        entries = match entry.value.datum {
            Datum::Table(inner) => inner,
            _ => Vec::new(),
        };
    }
    found.map(|at| Position::of(text, at.span().start))
}

fn entries(text: &str) -> Result<Vec<Entry>, FormatError> {
    let table = DeTable::parse(text).map_err(|e| FormatError {
        position: e.span().map(|at| Position::of(text, at.start)),
        message: e.message().trim_end().to_owned(),
    })?;
    Ok(convert_table(table.get_ref(), 0, 0))
}

struct Checker<'a> {
    text: &'a str,
}

impl Checker<'_> {
    fn error(&self, at: Origin, message: String) -> FormatError {
        FormatError {
            position: Some(Position::of(self.text, at.span().start)),
            message,
        }
    }

    fn section(&self, section: &Section, entries: &[Entry]) -> Result<(), FormatError> {
        for entry in entries {
            if let Some(field) = section.field(&entry.key) {
                // In the whole profile, `gemm` is an array; in `[efficiency]`, it is a field.
                self.field(section, field, &entry.value)?;
                continue;
            }
            match Section::of(&joined(section.path, &entry.key)) {
                Some(inner) => self.tables(inner, &entry.value)?,
                None => return Err(self.unknown(section, entry)),
            }
        }
        Ok(())
    }

    fn tables(&self, section: &Section, value: &Value) -> Result<(), FormatError> {
        match (&value.datum, section.is_array) {
            (Datum::Table(entries), false) => self.section(section, entries),
            (Datum::Array(tables), true) => {
                tables.iter().try_for_each(|table| match &table.datum {
                    Datum::Table(entries) => self.section(section, entries),
                    _ => Err(self.no_section(section, table)),
                })
            }
            _ => Err(self.no_section(section, value)),
        }
    }

    fn no_section(&self, section: &Section, value: &Value) -> FormatError {
        let (path, heading) = (section.path, section.heading());
        let message = format!(
            "`{path}` is {}, but {heading} was expected",
            value.describe()
        );
        self.error(value.origin, message)
    }

    fn unknown(&self, section: &Section, entry: &Entry) -> FormatError {
        let inner = SECTIONS
            .iter()
            .filter_map(|s| match s.path.rsplit_once('.') {
                Some((outer, name)) => (outer == section.path).then_some(name),
                None => (section.path.is_empty() && !s.path.is_empty()).then_some(s.path),
            });
        let known = section.fields.iter().map(|f| f.key).chain(inner);
        let mut message = format!("unknown key `{}` in {}", entry.key, section.heading());
        match nearest(&entry.key, known.clone()) {
            Some(near) => message += &format!("; did you mean `{near}`?"),
            None => message += &format!("; its keys are {}", known.collect::<Vec<_>>().join(", ")),
        }
        self.error(entry.key_origin, message)
    }

    fn field(&self, section: &Section, field: &Field, value: &Value) -> Result<(), FormatError> {
        let path = joined(section.path, field.key);
        let must = |what: &str| {
            let message = format!("{path} = {}: must be {what}", shown(value));
            Err(self.error(value.origin, message))
        };
        match field.kind {
            Kind::Text => match value.str() {
                Some(text) if !text.trim().is_empty() => Ok(()),
                Some(_) if field.key == "source" => {
                    Err(self.error(value.origin, "every section needs a `source`".to_owned()))
                }
                _ => must("a string that is not blank"),
            },
            Kind::Flag => match value.datum {
                Datum::Bool(_) => Ok(()),
                _ => must("true or false"),
            },
            Kind::Integer(low, high) => match value.integer() {
                Some(n) if (low..=high).contains(&n) => Ok(()),
                _ => must(&integers(low, high)),
            },
            Kind::Number(range) => match value.number() {
                Some(x) if range.contains(x) => Ok(()),
                _ => must(range.words()),
            },
            Kind::Dtype => match value.str() {
                Some(name) if is_dtype(name) => Ok(()),
                _ => must("an element type, such as \"f32\" or \"bf16\""),
            },
            Kind::Word(words) => match value.str() {
                Some(word) if words.contains(&word) => Ok(()),
                word => {
                    let near = word.and_then(|word| nearest(word, words.iter().copied()));
                    let near = near.map_or(String::new(), |n| format!("; did you mean \"{n}\"?"));
                    must(&format!("one of {}{near}", words.join(", ")))
                }
            },
            Kind::ByDtype(range) => match &value.datum {
                Datum::Table(entries) => entries.iter().try_for_each(|e| {
                    if !is_dtype(&e.key) {
                        let message = format!("{path}: `{}` is not an element type", e.key);
                        return Err(self.error(e.key_origin, message));
                    }
                    if e.value.number().is_some_and(|x| range.contains(x)) {
                        return Ok(());
                    }
                    let (of, is) = (&e.key, shown(&e.value));
                    let message = format!("{path} of {of} = {is}: must be {}", range.words());
                    Err(self.error(e.value.origin, message))
                }),
                _ => must("a table of numbers by element type"),
            },
            Kind::Rows { .. } => self.rows(section, field, value),
        }
    }

    fn rows(&self, section: &Section, field: &Field, value: &Value) -> Result<(), FormatError> {
        let Kind::Rows {
            sizes,
            last: (last, range),
            ascending,
        } = field.kind
        else {
            return Ok(());
        };
        let what = format!("{}: {}", section.heading(), field.key);
        let Some(rows) = value.array() else {
            let message = format!("{what} is {}, not a list of rows", value.describe());
            return Err(self.error(value.origin, message));
        };
        let mut before = 0;
        for row in rows {
            let cells = row.array().unwrap_or_default();
            let fits = cells.split_last().is_some_and(|(x, n)| {
                n.len() == sizes.len()
                    && n.iter().all(|n| n.integer().is_some_and(|n| n > 0))
                    && x.number().is_some_and(|x| range.contains(x))
            });
            if !fits {
                let (columns, words) = (sizes.join(", "), range.words());
                let message = format!(
                    "{what}: {} must be [{columns}, {last}]: sizes are positive integers, {last} is {words}",
                    shown(row)
                );
                return Err(self.error(row.origin, message));
            }
            let first = cells[0].integer().unwrap_or_default();
            if ascending && first <= before {
                let message = format!("{what} must ascend in {}", sizes[0]);
                return Err(self.error(row.origin, message));
            }
            before = first;
        }
        Ok(())
    }
}

fn joined(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

fn is_dtype(name: &str) -> bool {
    serde_json::from_value::<DType>(name.into()).is_ok()
}

pub(super) fn integers(low: u64, high: u64) -> String {
    if high < u64::from(u32::MAX) {
        format!("an integer from {low} to {high}")
    } else {
        format!("an integer of at least {low}")
    }
}

/// Formats a value for an error.
fn shown(value: &Value) -> String {
    match &value.datum {
        Datum::Float(x) => x.to_string(),
        Datum::Str(s) => format!("{s:?}"),
        Datum::Array(cells) => {
            let cells: Vec<String> = cells.iter().map(shown).collect();
            format!("[{}]", cells.join(", "))
        }
        _ => value.describe(),
    }
}

/// Fills in the defaults of the table. `text` is used to find positions. The keys of profiles that
/// it extends are already part of `profile`.
///
/// # Errors
/// Fails if a section or a key without a default is missing.
pub fn complete(profile: &mut Table, text: &str) -> Result<(), FormatError> {
    let missing = |section: &Section, message| FormatError {
        position: position(text, section.path),
        message,
    };
    let fill = |section: &'static Section| fill(section, profile).map_err(|m| missing(section, m));
    SECTIONS.iter().try_for_each(fill)
}

fn fill(section: &Section, profile: &mut Table) -> Result<(), String> {
    let mut at = profile;
    for part in section.path.split('.').filter(|part| !part.is_empty()) {
        at = match at.get_mut(part) {
            Some(Toml::Table(inner)) => inner,
            Some(Toml::Array(tables)) => {
                let tables = tables.iter_mut().filter_map(Toml::as_table_mut);
                return tables.into_iter().try_for_each(|t| fields(section, t));
            }
            _ if section.is_required => {
                return Err(format!("{} is missing", section.heading()));
            }
            _ => return Ok(()),
        };
    }
    fields(section, at)
}

fn fields(section: &Section, table: &mut Table) -> Result<(), String> {
    for field in section.fields {
        if table.contains_key(field.key) {
            continue;
        }
        match field.default {
            IfAbsent::Unknown => {}
            IfAbsent::Required => {
                return Err(format!("{} needs `{}`", section.heading(), field.key));
            }
            IfAbsent::Is(text) => {
                // A test fills in every default.
                if let Ok(value) = text.parse::<Toml>() {
                    table.insert(field.key.to_owned(), value);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "name = \"x\"\n[power]\nsource = \"s\"\narithmetic_share = 0.5\n";

    fn refused(text: &str) -> String {
        check(text).unwrap_err().to_string()
    }

    #[test]
    fn faults_have_a_position_and_the_nearest_name() {
        for (text, wanted) in [
            (
                "[power]\narithmetic_share = 1.5",
                "2:20: power.arithmetic_share = 1.5: must be between 0 and 1",
            ),
            (
                "[power]\narithmetic_shape = 1",
                "2:1: unknown key `arithmetic_shape` in [power]; did you mean `arithmetic_share`?",
            ),
            (
                "[netwerk]",
                "1:2: unknown key `netwerk` in the profile; did you mean `network`?",
            ),
            (
                "[host.wrok]",
                "1:7: unknown key `wrok` in [host]; did you mean `work`?",
            ),
            (
                "[device]\nsms = 1.5",
                "2:7: device.sms = 1.5: must be an integer of at least 1",
            ),
            (
                "[host]\nsteps_in_flight = 3",
                "must be an integer from 1 to 2",
            ),
            (
                "[device]\ntflops = { f32 = 0 }",
                "device.tflops of f32 = 0: must be a positive number",
            ),
            (
                "[device]\ntflops = { f33 = 1 }",
                "2:12: device.tflops: `f33` is not an element type",
            ),
            ("device = 1", "`device` is 1, but [device] was expected"),
            ("[gemm]", "`gemm` is a table, but [[gemm]] was expected"),
            ("[[memory]]\nclass = \"nrom\"", "did you mean \"norm\"?"),
            (
                "[[gemm]]\nrows = [[8, 8, 8, 1.0],\n[8, 0, 8, 1.0]]",
                "3:1: [[gemm]]: rows: [8, 0, 8, 1] must be [m, n, k, us]",
            ),
            (
                "[[memory]]\nrows = [[8, 1.0], [8, 2.0]]",
                "[[memory]]: rows must ascend in bytes",
            ),
            ("a = = 1", "1:5: "),
        ] {
            let said = refused(text);
            assert!(said.contains(wanted), "{text}: {said}");
        }
        check(TEXT).unwrap();
    }

    #[test]
    fn what_is_missing_is_named_where_its_section_stands() {
        let complete_ = |text: &str| {
            complete(&mut text.parse().unwrap(), text)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(complete_(TEXT), "the profile needs `about`");
        let about = format!("about = \"y\"\n{TEXT}");
        assert_eq!(complete_(&about), "[device] is missing");
        let device = format!("{about}[device]\n");
        assert_eq!(complete_(&device), "6:2: [device] needs `source`");
    }

    /// Every default is a valid value of its key.
    #[test]
    fn defaults_are_valid() {
        for section in SECTIONS {
            for field in section.fields {
                let IfAbsent::Is(text) = field.default else {
                    continue;
                };
                assert!(text.parse::<Toml>().is_ok(), "{text}");
                let (open, close) = if section.is_array {
                    ("[[", "]]")
                } else {
                    ("[", "]")
                };
                check(&format!(
                    "{open}{}{close}\n{} = {text}\n",
                    section.path, field.key
                ))
                .unwrap();
            }
        }
    }
}
