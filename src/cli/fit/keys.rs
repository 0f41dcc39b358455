//! Shows how each key of a configuration was read.

use super::super::output::{Failure, Out};
use super::super::subject::Subject;
use super::super::table::Table;
use serde::Serialize;
use shardlab_frameworks::{Lack, Row, Setting, Status};
use std::collections::BTreeMap;

/// A key as JSON.
#[derive(Serialize)]
pub(super) struct Key<'a> {
    file: Option<&'a str>,
    line: Option<u32>,
    column: Option<u32>,
    key: &'a str,
    value: &'a str,
    /// `used`, `assumed` or `no counterpart`.
    status: &'static str,
    /// What a prediction loses without the key: `nothing`, `accuracy` or `everything`.
    lacks: &'static str,
    /// Scenario keys that it determines.
    scenario: &'a [Setting],
    why: Option<&'a str>,
}

/// Returns all keys.
pub(super) fn all(subject: &Subject) -> Vec<Key<'_>> {
    let rows = subject.rows().iter();
    rows.map(|row| {
        let place = row.place.as_ref();
        Key {
            file: place.map(|p| p.file.as_str()),
            line: place.map(|p| p.at.line),
            column: place.map(|p| p.at.column),
            key: &row.key,
            value: &row.value,
            status: row.status.word(),
            lacks: row.status.lack().word(),
            scenario: &row.settings,
            why: row.why.as_deref(),
        }
    })
    .collect()
}

/// Titles of the columns of [`rows`].
pub(in crate::cli) const HEAD: [&str; 5] = [">line", "key", "value", "status", "scenario"];

/// Prints a table of the keys that matter for a step, and lists the others by reason.
pub(super) fn print(subject: &Subject, out: &mut Out) -> Result<(), Failure> {
    let all = subject.rows();
    if all.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading(heading(all))?;
    let mut table = Table::new(HEAD);
    for row in rows(all) {
        table.row(row);
    }
    out.text(table)?;
    let asides = asides(all);
    if !asides.is_empty() {
        out.blank()?;
        out.paragraph(0, "Without effect on the prediction:")?;
    }
    for aside in asides {
        out.paragraph(2, &aside)?;
    }
    Ok(())
}

/// Says which files the keys are from, and how many are used. A model alone has no keys of a job.
/// In that case, all settings come from the command line or are assumed.
pub(in crate::cli) fn heading(all: &[Row]) -> String {
    let files = files(all);
    if files.is_empty() {
        let count = |word: &str| all.iter().filter(|r| r.status.word() == word).count();
        let (used, assumed) = (count("used"), count("assumed"));
        return format!("Settings: {used} from the command line, {assumed} assumed");
    }
    let count = |word: &str| {
        all.iter()
            .filter(|r| r.place.is_some() && r.status.word() == word)
            .count()
    };
    format!(
        "Keys of {}: {} used, {} assumed, {} without counterpart",
        files.join(", "),
        count("used"),
        count("assumed"),
        count("no counterpart")
    )
}

/// Returns a row for each key that matters for a step.
pub(in crate::cli) fn rows(all: &[Row]) -> Vec<[String; 5]> {
    let several = files(all).len() > 1;
    let cells = |row: &Row| {
        let place = row.place.as_ref().map_or_else(String::new, |p| {
            let name = p.file.rsplit('/').next().unwrap_or(&p.file);
            if several {
                format!("{name}:{}", p.at.line)
            } else {
                p.at.line.to_string()
            }
        });
        // A value that this reader adds is not a key of the configuration.
        let (key, value) = if row.place.is_some() {
            (row.key.as_str(), row.value.as_str())
        } else {
            ("", "")
        };
        [
            place,
            key.to_owned(),
            value.to_owned(),
            row.status.word().to_owned(),
            becomes(row),
        ]
    };
    all.iter().filter(|r| matters(r)).map(cells).collect()
}

/// Returns the other keys, with one line per reason.
pub(in crate::cli) fn asides(all: &[Row]) -> Vec<String> {
    let mut asides: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for row in all.iter().filter(|r| !matters(r)) {
        let why = row.why.as_deref().unwrap_or("not part of a step");
        asides.entry(why).or_default().push(&row.key);
    }
    let lines = asides.into_iter();
    lines
        .map(|(why, keys)| format!("{why}: {}", keys.join(", ")))
        .collect()
}

fn matters(row: &Row) -> bool {
    row.status != Status::NoCounterpart(Lack::Nothing)
}

/// Returns the files of the configuration in the order in which they were read.
fn files(rows: &[Row]) -> Vec<&str> {
    let mut files: Vec<&str> = Vec::new();
    for place in rows.iter().filter_map(|r| r.place.as_ref()) {
        if !files.contains(&place.file.as_str()) {
            files.push(&place.file);
        }
    }
    files
}

/// Describes what a key becomes: scenario keys, and the reason.
fn becomes(row: &Row) -> String {
    let settings: Vec<String> = row
        .settings
        .iter()
        .map(|s| format!("{} = {}", s.key, s.value))
        .collect();
    let settings = settings.join(", ");
    match (&row.why, settings.is_empty()) {
        (None, _) => settings,
        (Some(why), true) => why.clone(),
        (Some(why), false) => format!("{settings} ({why})"),
    }
}
