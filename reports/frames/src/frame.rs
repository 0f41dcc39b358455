//! A table of runs, spans or answers.

use super::FrameError;
use polars::error::{PolarsError, PolarsResult};
use polars::prelude::{
    AnyValue, Column, CsvReadOptions, CsvWriter, DataFrame, DataType, NamedFrom, ParquetReader,
    ParquetWriter, PlSmallStr, SerReader, SerWriter, Series, SortMultipleOptions,
};
use shardlab_plan::scenario::nearest;
use shardlab_reports::files;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

/// A table of runs, spans or answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame(pub(crate) DataFrame);

/// A value of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// A text.
    Text(String),
    /// A number.
    Number(f64),
    /// No value.
    Missing,
}

impl Frame {
    /// Creates a table of these columns, which have equal lengths.
    pub(crate) fn of(columns: Vec<Column>) -> Result<Self, FrameError> {
        Ok(Self(DataFrame::new_infer_height(columns)?))
    }

    /// Parses CSV with a header. Detects columns of numbers.
    ///
    /// # Errors
    /// Fails if the text is not a table.
    pub fn from_csv(csv: Vec<u8>) -> Result<Self, FrameError> {
        let reader = CsvReadOptions::default()
            .with_has_header(true)
            .with_infer_schema_length(None)
            .into_reader_with_file_handle(io::Cursor::new(csv));
        Self::with_texts(reader.finish()?)
    }

    /// Reads a table from a file: Parquet if its name ends in `.parquet`, otherwise CSV with a
    /// header.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not a table.
    pub fn open(path: &Path) -> Result<Self, FrameError> {
        let unread = |error: io::Error| FrameError::Unread {
            path: path.to_owned(),
            error,
        };
        let bytes = std::fs::read(path).map_err(unread)?;
        if path.extension().is_some_and(|e| e == "parquet") {
            let table = ParquetReader::new(io::Cursor::new(bytes)).finish();
            return Self::with_texts(table.map_err(|e| at(path, e))?);
        }
        Self::from_csv(bytes).map_err(|e| match e {
            FrameError::Polars { error, .. } => at(path, error),
            other => other,
        })
    }

    /// Turns boolean columns into texts, as for options.
    fn with_texts(mut table: DataFrame) -> Result<Self, FrameError> {
        let is_flag = |c: &&Column| *c.dtype() == DataType::Boolean;
        let flags: Vec<Column> = table.columns().iter().filter(is_flag).cloned().collect();
        for flag in flags {
            table.with_column(flag.cast(&DataType::String)?)?;
        }
        Ok(Self(table))
    }

    /// Returns the names of the columns.
    #[must_use]
    pub fn columns(&self) -> Vec<String> {
        let names = self.0.get_column_names();
        names.into_iter().map(|n| n.to_string()).collect()
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.0.height()
    }

    /// Returns the full name of the column that `name` refers to: the column with this name, or the
    /// only one whose name ends with it after a dot.
    ///
    /// # Errors
    /// Fails if there is no such column. The message contains the closest name.
    pub fn name(&self, name: &str) -> Result<String, FrameError> {
        let all = self.columns();
        if all.iter().any(|c| c == name) {
            return Ok(name.to_owned());
        }
        let tail = format!(".{name}");
        let ending: Vec<&String> = all.iter().filter(|c| c.ends_with(&tail)).collect();
        if let [one] = ending.as_slice() {
            return Ok((*one).clone());
        }
        let help = match (
            ending.as_slice(),
            nearest(name, all.iter().map(String::as_str)),
        ) {
            ([a, b, ..], _) => format!("; `{a}` and `{b}` end with it"),
            (_, Some(near)) => format!("; the nearest is `{near}`"),
            _ => String::new(),
        };
        Err(FrameError::Column {
            name: name.to_owned(),
            help,
        })
    }

    /// Returns the full names of several columns.
    ///
    /// # Errors
    /// See [`Frame::name`]; also fails if a column is requested twice.
    pub fn names(&self, all: &[String]) -> Result<Vec<String>, FrameError> {
        let mut seen = BTreeSet::new();
        let mut names = Vec::new();
        for name in all {
            let name = self.name(name)?;
            if !seen.insert(name.clone()) {
                return Err(FrameError::Twice(name));
            }
            names.push(name);
        }
        Ok(names)
    }

    /// Returns a table of these columns, in this order.
    ///
    /// # Errors
    /// See [`Frame::names`].
    pub fn select(&self, columns: &[String]) -> Result<Self, FrameError> {
        let names = self.names(columns)?;
        Ok(Self(self.0.select(names)?))
    }

    /// Returns the rows sorted by a column, smallest first unless `descending`. Rows without a
    /// value come last.
    ///
    /// # Errors
    /// See [`Frame::name`].
    pub fn sorted(&self, by: &str, descending: bool) -> Result<Self, FrameError> {
        let name = self.name(by)?;
        let options = SortMultipleOptions::new()
            .with_order_descending(descending)
            .with_nulls_last(true)
            .with_maintain_order(true);
        Ok(Self(self.0.sort([name], options)?))
    }

    /// Returns the first rows.
    #[must_use]
    pub fn first(&self, rows: usize) -> Self {
        Self(self.0.head(Some(rows)))
    }

    /// Returns the numbers of a column; `None` for rows without a value.
    pub(crate) fn numbers(&self, name: &str) -> Result<Vec<Option<f64>>, FrameError> {
        let column = self.0.column(name)?;
        if !column.dtype().is_numeric() {
            return Err(FrameError::NoNumbers(name.to_owned()));
        }
        let floats = column.cast(&DataType::Float64)?;
        Ok(floats.f64()?.iter().collect())
    }

    /// Returns a value.
    ///
    /// # Errors
    /// Fails if there is no such row or column.
    pub fn cell(&self, column: usize, row: usize) -> Result<Cell, FrameError> {
        let columns = self.0.columns();
        let value = columns.get(column).map(|c| c.get(row)).transpose()?;
        Ok(match value {
            None | Some(AnyValue::Null) => Cell::Missing,
            Some(AnyValue::String(text)) => Cell::Text(text.to_owned()),
            Some(AnyValue::StringOwned(text)) => Cell::Text(text.to_string()),
            Some(value) => value
                .extract::<f64>()
                .map_or_else(|| Cell::Text(value.to_string()), Cell::Number),
        })
    }

    /// Writes the table as CSV.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn csv(&self, path: &Path) -> Result<(), FrameError> {
        let fill = |to: &mut dyn Write, table: &mut DataFrame| CsvWriter::new(to).finish(table);
        write(path, fill, &self.0)
    }

    /// Writes the table as Parquet.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn parquet(&self, path: &Path) -> Result<(), FrameError> {
        let fill = |to: &mut dyn Write, table: &mut DataFrame| {
            ParquetWriter::new(to).finish(table).map(|_| ())
        };
        write(path, fill, &self.0)
    }
}

/// Writes a file completely or not at all.
fn write(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write, &mut DataFrame) -> PolarsResult<()>,
    table: &DataFrame,
) -> Result<(), FrameError> {
    let mut table = table.clone();
    let written = files::write(path, |to| {
        fill(to, &mut table).map_err(|e| match e {
            PolarsError::IO { error, .. } => io::Error::new(error.kind(), error.to_string()),
            other => io::Error::other(other.to_string()),
        })
    });
    written.map_err(|error| FrameError::Io {
        path: path.to_owned(),
        error,
    })
}

pub(crate) fn at(path: &Path, error: polars::error::PolarsError) -> FrameError {
    FrameError::Polars {
        path: Some(path.to_owned()),
        error,
    }
}

/// Creates a column of texts.
pub(crate) fn texts(name: &str, all: Vec<Option<String>>) -> Column {
    Series::new(PlSmallStr::from_str(name), all).into()
}

/// Creates a column of numbers.
pub(crate) fn floats(name: &str, all: Vec<Option<f64>>) -> Column {
    Series::new(PlSmallStr::from_str(name), all).into()
}
