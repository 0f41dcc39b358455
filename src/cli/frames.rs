//! Tables of many points. polars summarizes them if it is built in (`--features frames`).

use super::output::Failure;
use super::table::Table;
use std::path::Path;

#[cfg(feature = "frames")]
mod answer;
#[cfg(feature = "frames")]
pub(super) use answer::{object, table};

/// A table of points as CSV with a header.
#[cfg_attr(not(feature = "frames"), expect(dead_code, reason = "polars reads it"))]
pub(super) struct Points(pub(super) Vec<u8>);

/// Describes a summary of points.
#[cfg_attr(not(feature = "frames"), expect(dead_code, reason = "polars reads it"))]
pub(super) struct Summary<'a> {
    /// Columns to group by.
    pub(super) by: &'a [String],
    /// Numeric columns to aggregate.
    pub(super) metrics: &'a [&'a str],
    /// Aggregates of every metric: `median`, `min`, `p95`, ….
    pub(super) aggregates: &'a [&'a str],
}

/// Titles and rows of a summary. Titles of numeric columns start with `>`.
pub(super) struct Summarized {
    pub(super) titles: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Points {
    /// Returns a table of these rows, each with one cell per title.
    ///
    /// # Errors
    /// Fails if a row has a different number of cells.
    pub(super) fn of<'a>(
        titles: impl Iterator<Item = &'a str>,
        rows: impl Iterator<Item = Vec<String>>,
    ) -> Result<Self, Failure> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(titles).map_err(Failure::run)?;
        for row in rows {
            writer.write_record(row).map_err(Failure::run)?;
        }
        Ok(Self(writer.into_inner().map_err(Failure::run)?))
    }
}

impl Summarized {
    /// Returns the table. Long titles break between their parts.
    pub(super) fn table(self) -> Table {
        let titles: Vec<String> = self.titles.iter().map(|t| broken(t)).collect();
        let mut table = Table::new(titles.iter().map(String::as_str));
        for row in self.rows {
            table.row(row);
        }
        table
    }
}

fn broken(title: &str) -> String {
    title.replace(' ', "\n").replace('.', ".\n")
}

#[cfg(feature = "frames")]
impl Points {
    /// Writes the points as Parquet.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(super) fn parquet(&self, path: &Path) -> Result<(), Failure> {
        Ok(answer::frame(self)?.parquet(path)?)
    }

    /// Summarizes the points: one row per combination of the values of `by`.
    ///
    /// # Errors
    /// Fails if a column does not exist.
    pub(super) fn summarized(&self, summary: &Summary<'_>) -> Result<Summarized, Failure> {
        answer::summarized(self, summary)
    }
}

/// Rejects an option that needs polars.
///
/// # Errors
/// Always fails in a build without polars.
#[cfg(not(feature = "frames"))]
pub(super) fn needed(what: &str) -> Result<(), Failure> {
    Err(Failure::bad_input(format_args!(
        "`{what}` is not part of this build; get it with `cargo install --path . --features frames` in shardlab's sources \
         (it builds polars, which takes minutes)"
    )))
}

/// Accepts an option that needs polars.
///
/// # Errors
/// Never fails in this build.
#[cfg(feature = "frames")]
pub(super) fn needed(_: &str) -> Result<(), Failure> {
    Ok(())
}

#[cfg(not(feature = "frames"))]
impl Points {
    /// Rejects Parquet output.
    pub(super) fn parquet(&self, _: &Path) -> Result<(), Failure> {
        needed("--parquet")
    }

    /// Rejects a request for a summary.
    pub(super) fn summarized(&self, _: &Summary<'_>) -> Result<Summarized, Failure> {
        needed("--by").map(|()| Summarized {
            titles: Vec::new(),
            rows: Vec::new(),
        })
    }
}
