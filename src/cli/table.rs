//! Tables as wide as the terminal, or as [`WIDTH`]: a header, a rule, right-aligned numbers.

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table as Inner, TableStyle,
    Width,
};
use std::fmt;

/// Columns of sentences, and of tables where standard output is no terminal, so that a saved output can be read anywhere.
pub(super) const WIDTH: usize = 100;

/// Room between columns.
const GAP: usize = 3;

/// Values up to so many characters stay on one line: in pieces they are other values. Rows that so become wider than the table overflow.
const UNBROKEN: usize = 14;

/// Columns that a table may take.
pub(super) fn width() -> usize {
    let terminal = Inner::new().width().map(usize::from);
    terminal.filter(|w| *w > 0).unwrap_or(WIDTH)
}

/// Room that a column takes whose cells are not to be broken, with the gap beside it.
pub(super) fn room<'a>(title: &'a str, cells: impl IntoIterator<Item = &'a str>) -> usize {
    let lines = title.trim_start_matches('>').lines().chain(cells);
    lines.map(|l| l.chars().count()).max().unwrap_or(0) + GAP
}

/// Whether columns that take so much room together fit a table.
pub(super) fn fits(room: usize) -> bool {
    // One gap less than there are columns.
    room <= width() + GAP
}

/// An option, or an override of it, without its section, which is clear.
pub(crate) fn option_of(path: &str) -> &str {
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
pub(super) struct Table {
    inner: Inner,
    columns: Vec<Column>,
}

/// What a column's cells ask for.
#[derive(Clone, Copy, Debug, Default)]
struct Column {
    /// A number in two lines is two numbers; texts give way.
    number: bool,
    /// Characters of the longest line.
    longest: usize,
    /// Characters that must stay together, of the longest piece.
    unbroken: usize,
}

impl Column {
    fn take(&mut self, cell: &str) {
        for line in cell.lines() {
            let all = line.chars().count();
            self.longest = self.longest.max(all);
            let piece = if all <= UNBROKEN {
                all
            } else {
                let words = line.split_whitespace().map(|w| w.chars().count());
                words.max().unwrap_or(0).min(UNBROKEN)
            };
            self.unbroken = self.unbroken.max(piece);
        }
    }

    /// What the column asks for, `padding` beside its cells included.
    fn constraint(self, padding: u16) -> ColumnConstraint {
        if self.number || self.longest <= UNBROKEN {
            return ColumnConstraint::ContentWidth;
        }
        ColumnConstraint::LowerBoundary(Width::Fixed(self.unbroken as u16 + padding))
    }
}

/// Blanks before a column's cells.
const fn padding(column: usize) -> u16 {
    if column > 0 { 2 } else { 0 }
}

impl Table {
    /// A table with these column titles. A title that begins with `>` makes a column of numbers, aligned to the right.
    pub(super) fn new<'a>(titles: impl IntoIterator<Item = &'a str>) -> Self {
        let titles: Vec<&str> = titles.into_iter().collect();
        let mut inner = Inner::new();
        inner
            .load_style(
                TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')),
            )
            .set_content_arrangement(ContentArrangement::Dynamic)
            .force_no_tty()
            .set_header(titles.iter().map(|t| t.trim_start_matches('>')));
        let mut columns = vec![Column::default(); titles.len()];
        for (i, title) in titles.iter().enumerate() {
            columns[i].take(title.trim_start_matches('>'));
            columns[i].number = title.starts_with('>');
            if let Some(column) = inner.column_mut(i) {
                column.set_padding((padding(i), 0));
                if columns[i].number {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        Self { inner, columns }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        for (column, cell) in self.columns.iter_mut().zip(&cells) {
            column.take(cell);
        }
        self.inner.add_row(cells);
    }

    /// Whether it has no rows.
    pub(super) fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// The lines of the table in so many columns, without trailing blanks.
    fn lines(&self, width: usize) -> Vec<String> {
        let mut inner = self.inner.clone();
        inner.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        for (i, column) in self.columns.iter().enumerate() {
            if let Some(of) = inner.column_mut(i) {
                of.set_constraint(column.constraint(padding(i)));
            }
        }
        let lines = inner.lines();
        lines.map(|l| l.trim_end().to_owned()).collect()
    }
}

impl fmt::Display for Table {
    /// The table's lines, each ended, without trailing blanks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines(width()) {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widest(lines: &[String]) -> usize {
        lines.iter().map(|l| l.chars().count()).max().unwrap_or(0)
    }

    #[test]
    fn numbers_are_aligned_right_and_long_text_is_wrapped() {
        let mut table = Table::new(["name", ">ms", "why"]);
        table.row(["a".into(), "1.5".into(), "word ".repeat(40)]);
        table.row(["bb".into(), "10.25".into(), String::new()]);
        let lines = table.lines(WIDTH);
        assert!(widest(&lines) <= WIDTH, "{lines:?}");
        assert!(lines[2].starts_with("a        1.5"), "{lines:?}");
        assert!(
            lines[lines.len() - 1].starts_with("bb     10.25"),
            "{lines:?}"
        );
        assert!(lines.len() > 4, "{lines:?}");
        // A wider terminal needs fewer lines.
        assert!(table.lines(2 * WIDTH).len() < lines.len(), "{lines:?}");
    }

    #[test]
    fn numbers_are_never_broken() {
        let texts = ["one", "two", "three", "four", "five"].map(|n| n.repeat(8));
        let titles = texts.iter().map(String::as_str).chain([">ms", ">GiB"]);
        let mut table = Table::new(titles);
        let numbers = ["123456.78".to_owned(), "*98765.43".to_owned()];
        table.row(texts.clone().into_iter().chain(numbers));
        let lines = table.lines(WIDTH);
        let text = lines.join("\n");
        assert!(text.contains("123456.78   *98765.43"), "{text}");
    }

    /// Twelve columns of options in half the room that they take, beside a long text: all but the text stay whole.
    #[test]
    fn short_values_are_never_broken() {
        let values = [
            "native",
            "false",
            "implicit",
            "selective",
            "regions",
            "chunked",
            "reduce_scatter",
            "true",
            "auto",
            "off",
            "expandable",
            "f32 main",
        ];
        let mut table = Table::new(["prefetch_\nforward"; 12].into_iter().chain(["why"]));
        let cells = values.map(str::to_owned).into_iter();
        table.row(cells.chain(["a longer text that is wrapped".to_owned()]));
        let lines = table.lines(60);
        let whole = |of: &str| lines.iter().any(|l| l.contains(of));
        assert!(values.into_iter().all(whole), "{lines:?}");
        assert!(whole("prefetch_") && whole("forward"), "{lines:?}");
        assert!(!whole("a longer text that is wrapped"), "{lines:?}");
        assert!(whole("wrapped") && widest(&lines) > 60, "{lines:?}");
    }
}
