//! Tables that fit [`WIDTH`] columns: a header, a rule, right-aligned numbers.

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table as Inner, TableStyle,
};
use std::fmt;

/// Columns that a table may take, whatever the terminal's width, so that a saved output can be read anywhere.
pub(super) const WIDTH: usize = 100;

/// Room between columns.
const GAP: usize = 3;

/// Room that a column takes whose cells are not to be broken, with the gap beside it.
pub(super) fn room<'a>(title: &'a str, cells: impl IntoIterator<Item = &'a str>) -> usize {
    let lines = title.trim_start_matches('>').lines().chain(cells);
    lines.map(|l| l.chars().count()).max().unwrap_or(0) + GAP
}

/// Whether columns that take so much room together fit a table.
pub(super) const fn fits(room: usize) -> bool {
    // One gap less than there are columns.
    room <= WIDTH + GAP
}

/// An option, or an override of it, without its section, which is clear.
pub(super) fn option_of(path: &str) -> &str {
    path.split_once('.').map_or(path, |(_, option)| option)
}

/// The title of an option's column, in lines when it is long.
pub(super) fn key_title(path: &str) -> String {
    let key = option_of(path);
    if key.len() > 9 {
        key.replace('_', "_\n")
    } else {
        key.to_owned()
    }
}

/// A table under construction.
pub(super) struct Table(Inner);

impl Table {
    /// A table with these column titles. A title that begins with `>` makes a column of numbers, aligned to the right.
    pub(super) fn new<'a>(titles: impl IntoIterator<Item = &'a str>) -> Self {
        let titles: Vec<&str> = titles.into_iter().collect();
        let mut table = Inner::new();
        table
            .load_style(
                TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')),
            )
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(WIDTH as u16)
            .force_no_tty()
            .set_header(titles.iter().map(|t| t.trim_start_matches('>')));
        for (i, title) in titles.iter().enumerate() {
            if let Some(column) = table.column_mut(i) {
                column.set_padding((if i > 0 { 2 } else { 0 }, 0));
                if title.starts_with('>') {
                    column.set_cell_alignment(CellAlignment::Right);
                    // A number in two lines is two numbers; texts give way.
                    column.set_constraint(ColumnConstraint::ContentWidth);
                }
            }
        }
        Self(table)
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.add_row(cells.into_iter().collect::<Vec<_>>());
    }

    /// Whether it has no rows.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Table {
    /// The table's lines, each ended, without trailing blanks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.0.lines() {
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_aligned_right_and_long_text_is_wrapped() {
        let mut table = Table::new(["name", ">ms", "why"]);
        table.row(["a".into(), "1.5".into(), "word ".repeat(40)]);
        table.row(["bb".into(), "10.25".into(), String::new()]);
        let text = table.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|l| l.chars().count() <= WIDTH), "{text}");
        assert!(lines[2].starts_with("a        1.5"), "{text}");
        assert!(lines[lines.len() - 1].starts_with("bb     10.25"), "{text}");
        assert!(lines.len() > 4, "{text}");
    }

    #[test]
    fn numbers_are_never_broken() {
        let texts = ["one", "two", "three", "four", "five"].map(|n| n.repeat(8));
        let titles = texts.iter().map(String::as_str).chain([">ms", ">GiB"]);
        let mut table = Table::new(titles);
        let numbers = ["123456.78".to_owned(), "*98765.43".to_owned()];
        table.row(texts.clone().into_iter().chain(numbers));
        let text = table.to_string();
        assert!(text.lines().all(|l| l.chars().count() <= WIDTH), "{text}");
        assert!(text.contains("123456.78   *98765.43"), "{text}");
    }
}
