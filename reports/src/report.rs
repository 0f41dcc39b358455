//! Reports: one self-contained HTML file, or Markdown.
//!
//! ```text
//! runs ─▶ content (sections of blocks) ─┬─▶ html
//!                                       └─▶ markdown
//! ```

mod content;
mod html;
mod markdown;

pub use html::html;
pub use markdown::markdown;

use crate::plots::{Plot, Timeline};
use crate::view::RunView;

/// A run and its name in the report.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Name. Equal names are numbered.
    pub label: String,
    /// The run.
    pub view: RunView,
    /// Its position in a sweep: options and values in the order of the axes; empty if it is not a
    /// point of a sweep.
    pub axes: Vec<(String, String)>,
}

/// A whole report.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Title.
    pub title: String,
    /// Lines below the title: the basis of the numbers, and when and how the report was made.
    pub about: Vec<String>,
    /// Sections in order.
    pub sections: Vec<Section>,
}

/// A section of a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// Anchor.
    pub id: &'static str,
    /// Heading.
    pub title: String,
    /// Content.
    pub blocks: Vec<Block>,
}

/// A piece of content.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// A paragraph.
    Text(String),
    /// Numbers at a glance.
    Cards(Vec<Card>),
    /// A table.
    Table(Table),
    /// A drawing.
    Plot(Plot),
    /// A drawing with zoom.
    Timeline(Timeline),
    /// Collapsible long text, as a title and the text.
    Long(String, String),
}

/// A few numbers of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Run.
    pub title: String,
    /// Kind of run.
    pub about: String,
    /// The most important number, with its unit.
    pub head: String,
    /// How the number differs from that of the first run.
    pub change: Option<Change>,
    /// More numbers.
    pub facts: Vec<Fact>,
}

/// A number of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Name.
    pub name: String,
    /// Value with its unit.
    pub value: String,
    /// How the number differs from that of the first run.
    pub change: Option<Change>,
}

/// The difference of a number from that of the first run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The difference, with its sign.
    pub by: String,
    /// Whether the difference is an improvement; `None` if the numbers tie or do not rank the runs.
    pub is_better: Option<bool>,
}

impl Change {
    /// Returns the difference as text, marked if it is better or worse.
    #[must_use]
    pub fn text(&self) -> String {
        match self.is_better {
            Some(true) => format!("{} better", self.by),
            Some(false) => format!("{} worse", self.by),
            None => self.by.clone(),
        }
    }
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Caption.
    pub caption: String,
    /// Column titles. A leading `>` marks a column of numbers. The first column names the row.
    pub head: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

impl Report {
    /// Returns the report on these runs. There must be at least one run; the others are compared
    /// with the first.
    #[must_use]
    pub fn new(title: Option<&str>, items: &[Item]) -> Self {
        content::report(title, items)
    }

    /// Returns every drawing, in order.
    #[must_use]
    pub fn plots(&self) -> Vec<&Plot> {
        let blocks = self.sections.iter().flat_map(|s| &s.blocks);
        blocks
            .filter_map(|b| match b {
                Block::Plot(p) => Some(p),
                Block::Timeline(t) => Some(&t.plot),
                _ => None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
