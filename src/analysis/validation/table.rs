//! Reads a table of measured runs.

use super::Metric;
use std::path::Path;

/// A measured run.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Line number in the table, starting at 1.
    pub line: u64,
    /// Name in the table; may be empty.
    pub name: String,
    /// Where the run was measured; may be empty.
    pub source: String,
    /// Scenario file, or name of a shipped scenario.
    pub scenario: String,
    /// Overrides, in the syntax of `--set`.
    pub overrides: Vec<String>,
    /// Measured values, in the order of [`Metric::ALL`].
    pub measured: [Option<f64>; 4],
    /// Whether the run ran out of memory. Such a row has no measured values.
    pub out_of_memory: bool,
}

impl Row {
    /// Returns the name, or the scenario with its overrides if there is no name.
    #[must_use]
    pub fn label(&self) -> String {
        if self.name.is_empty() {
            self.setting()
        } else {
            self.name.clone()
        }
    }

    /// Returns the project that published the row: the source up to its revision or first space.
    #[must_use]
    pub fn project(&self) -> &str {
        let end = self.source.find(['@', ' ']).unwrap_or(self.source.len());
        &self.source[..end]
    }

    /// Returns the scenario with its overrides.
    #[must_use]
    pub fn setting(&self) -> String {
        let mut text = self.scenario.clone();
        for o in &self.overrides {
            text.push(' ');
            text.push_str(o);
        }
        text
    }
}

/// Why a table cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The file cannot be read, or is not CSV.
    #[error("{table}: {error}")]
    Csv {
        /// Table.
        table: String,
        /// Reason.
        error: csv::Error,
    },
    /// A column is missing or unknown.
    #[error("{table}:1: {message}")]
    Columns {
        /// Table.
        table: String,
        /// Reason.
        message: String,
    },
    /// A cell is not a number above 0.
    #[error("{table}:{line}: {column} = `{cell}`: a number above 0 or nothing is expected")]
    Cell {
        /// Table.
        table: String,
        /// Line number.
        line: u64,
        /// Column.
        column: &'static str,
        /// Content of the cell.
        cell: String,
    },
    /// A row contradicts itself, or a value is neither `true` nor `false`.
    #[error("{table}:{line}: out_of_memory = `{cell}`: {expected}")]
    OutOfMemory {
        /// Table.
        table: String,
        /// Line number.
        line: u64,
        /// Content of the cell.
        cell: String,
        /// What is expected instead.
        expected: &'static str,
    },
}

/// Column of runs that ran out of memory.
const OUT_OF_MEMORY: &str = "out_of_memory";

/// Reads a table of measured runs.
///
/// # Errors
/// Returns [`TableError`] if the file cannot be read as CSV, a column is missing or unknown, or a
/// cell has a value that it cannot have.
pub fn read(path: &Path) -> Result<Vec<Row>, TableError> {
    let table = || path.display().to_string();
    let of_csv = |error| TableError::Csv {
        table: table(),
        error,
    };
    let mut reader = csv::ReaderBuilder::new()
        .trim(csv::Trim::All)
        .comment(Some(b'#'))
        .from_path(path)
        .map_err(of_csv)?;
    let columns = reader.headers().map_err(of_csv)?.clone();
    let column = |name: &str| columns.iter().position(|c| c == name);
    let known = |c: &str| {
        matches!(
            c,
            "scenario" | "overrides" | "name" | "source" | OUT_OF_MEMORY
        ) || Metric::ALL.iter().any(|m| m.name() == c)
    };
    if let Some(unknown) = columns.iter().find(|c| !known(c)) {
        let metrics: Vec<&str> = Metric::ALL.iter().map(|m| m.name()).collect();
        return Err(TableError::Columns {
            table: table(),
            message: format!(
                "unknown column `{unknown}`; columns are scenario, overrides, name, source, {OUT_OF_MEMORY}, {}",
                metrics.join(", ")
            ),
        });
    }
    let Some(scenario) = column("scenario") else {
        return Err(TableError::Columns {
            table: table(),
            message: "there is no column `scenario`".into(),
        });
    };
    let metrics = Metric::ALL.map(|m| column(m.name()));
    if metrics.iter().all(Option::is_none) {
        return Err(TableError::Columns {
            table: table(),
            message: "there is no measured column".into(),
        });
    }
    let (overrides, name, source) = (column("overrides"), column("name"), column("source"));
    let out_of_memory = column(OUT_OF_MEMORY);
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(of_csv)?;
        let line = record.position().map_or(0, csv::Position::line);
        let text = |c: Option<usize>| c.and_then(|c| record.get(c)).unwrap_or("");
        let mut measured = [None; 4];
        for (i, metric) in Metric::ALL.into_iter().enumerate() {
            let cell = text(metrics[i]);
            if cell.is_empty() {
                continue;
            }
            measured[i] = match cell.parse::<f64>() {
                Ok(x) if x.is_finite() && x > 0.0 => Some(x),
                _ => {
                    return Err(TableError::Cell {
                        table: table(),
                        line,
                        column: metric.name(),
                        cell: cell.to_owned(),
                    });
                }
            };
        }
        let cell = text(out_of_memory);
        let wrong = |expected| TableError::OutOfMemory {
            table: table(),
            line,
            cell: cell.to_owned(),
            expected,
        };
        let out_of_memory = match cell {
            "true" => true,
            "" | "false" => false,
            _ => return Err(wrong("`true`, `false` or nothing is expected")),
        };
        if out_of_memory && measured.iter().any(Option::is_some) {
            return Err(wrong("a run that ran out of memory has no measured values"));
        }
        rows.push(Row {
            line,
            name: text(name).to_owned(),
            source: text(source).to_owned(),
            scenario: text(Some(scenario)).to_owned(),
            overrides: split(text(overrides)),
            measured,
            out_of_memory,
        });
    }
    Ok(rows)
}

/// Splits overrides at semicolons. Semicolons inside quotes, brackets or braces do not separate.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0_i32;
    let mut quote = None;
    for c in text.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{') => depth += 1,
            (None, ']' | '}') => depth -= 1,
            (None, ';') if depth <= 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
        .iter()
        .map(|p| p.trim().to_owned())
        .filter(|p| !p.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn semicolons_in_lists_and_strings_do_not_separate() {
        assert_eq!(
            split("a.b=1; c.d=[\"x;y\", 2] ;; e.f='p;q'"),
            ["a.b=1", "c.d=[\"x;y\", 2]", "e.f='p;q'"]
        );
        assert!(split("").is_empty());
    }

    fn table(cells: &str) -> Result<Vec<Row>, TableError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.csv");
        let text = format!("name,scenario,step_ms,out_of_memory\n{cells}\n");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn runs_that_ran_out_of_memory_have_no_values() {
        for (cells, ran_out) in [
            ("a,s,,true", true),
            ("a,s,1,false", false),
            ("a,s,1,", false),
        ] {
            assert_eq!(table(cells).unwrap()[0].out_of_memory, ran_out, "{cells}");
        }
        for (cells, reason) in [
            (
                "a,s,1,true",
                "a run that ran out of memory has no measured values",
            ),
            (
                "a,s,1,oom",
                "out_of_memory = `oom`: `true`, `false` or nothing is expected",
            ),
        ] {
            let error = table(cells).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(":2:"), "{error}");
        }
    }
}
