//! Pages of tables, for comparisons and gates.

use super::app::Tone;

/// A row of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Cells.
    pub cells: Vec<String>,
    /// Meaning of the row, which determines its colour.
    pub tone: Tone,
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Heading.
    pub title: String,
    /// Names of the columns; a leading `>` aligns a column to the right.
    pub header: Vec<String>,
    /// Rows.
    pub rows: Vec<Row>,
    /// Sentences below the table.
    pub notes: Vec<String>,
}

impl Table {
    /// Creates an empty table.
    #[must_use]
    pub fn new(title: impl Into<String>, header: &[&str]) -> Self {
        Self {
            title: title.into(),
            header: header.iter().map(|h| (*h).to_owned()).collect(),
            ..Self::default()
        }
    }

    /// Adds a row.
    pub fn row(&mut self, tone: Tone, cells: impl IntoIterator<Item = String>) {
        self.rows.push(Row {
            cells: cells.into_iter().collect(),
            tone,
        });
    }
}

/// Values over steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name.
    pub name: String,
    /// Values.
    pub values: Vec<f64>,
}

/// A page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Title.
    pub title: String,
    /// Verdict as one line, with its meaning.
    pub verdict: Option<(Tone, String)>,
    /// Tables.
    pub tables: Vec<Table>,
    /// Overlaid curves.
    pub losses: Vec<Series>,
}
