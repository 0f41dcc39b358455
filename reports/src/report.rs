//! Reports: one HTML file that needs nothing else, or Markdown.
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

/// A run and what the report calls it.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Name; equal ones are numbered.
    pub label: String,
    /// The run.
    pub view: RunView,
    /// Its place in a sweep: options and values, in the order of the axes; empty when it is of
    /// none.
    pub axes: Vec<(String, String)>,
}

/// A whole report.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Title.
    pub title: String,
    /// Sections in order.
    pub sections: Vec<Section>,
}

/// A part of a report.
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
    /// A drawing that can be zoomed into.
    Timeline(Timeline),
    /// Long text that is folded away: a title and the text.
    Long(String, String),
}

/// A few numbers of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Run.
    pub title: String,
    /// What kind of run, in words.
    pub about: String,
    /// The number that matters most, with its unit.
    pub head: String,
    /// More numbers: name and value.
    pub facts: Vec<(String, String)>,
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// What it tells.
    pub caption: String,
    /// Titles; one that begins with `>` is a column of numbers. The first column names the row.
    pub head: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

impl Report {
    /// The report over these runs; the first is what the others are compared with. There must be
    /// one.
    #[must_use]
    pub fn new(title: Option<&str>, items: &[Item]) -> Self {
        content::report(title, items)
    }

    /// Every drawing, in order.
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
