//! Tables that fit the terminal: a header, a rule, and right-aligned numbers.
//!
//! A table that is too wide first loses its optional columns. Then texts are broken between words,
//! then long words are shortened, and only then further columns are dropped from the right. Numbers
//! are never broken. The last line lists the dropped columns.

use super::text::wrap;
pub(super) use super::text::{WIDTH, width};
use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table as Inner, TableStyle,
    Width,
};
use std::fmt;

/// Additional spaces before every column except the first.
const PADDING: usize = 2;

/// Total gap between columns.
const GAP: usize = PADDING + 1;

/// Texts up to this length stay on one line if possible, because a broken option value looks like
/// another value.
const UNBROKEN: usize = 14;

/// Minimum number of characters of a shortened word.
const MIN_CHARACTERS: usize = 12;

/// Returns the width of a column whose cells are not broken, including the gap next to it.
pub(super) fn room<'a>(title: &'a str, cells: impl IntoIterator<Item = &'a str>) -> usize {
    let lines = title.trim_start_matches('>').lines().chain(cells);
    lines.map(|l| l.chars().count()).max().unwrap_or(0) + GAP
}

/// Returns whether columns with this total width fit a table.
pub(super) fn fits(room: usize) -> bool {
    // There is one gap fewer than there are columns.
    room <= width() + GAP
}

/// Returns an option, or an override of it, without its section.
pub(crate) fn option_of(path: &str) -> &str {
    // Options of a what-if (`--scale host=1.5`) have no section.
    if path.starts_with("--") {
        return path;
    }
    path.split_once('.').map_or(path, |(_, option)| option)
}

/// Returns the title of an option's column, on several lines if it is long.
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
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

struct Column {
    title: String,
    /// Whether the column is right-aligned and never broken.
    number: bool,
    /// Whether the column is dropped first.
    optional: bool,
}

/// How far cells shrink on a narrow terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Give {
    /// Long texts are broken between words.
    Texts,
    /// Short texts and the titles of number columns are broken, too.
    Words,
    /// Words longer than this are also shortened.
    Shortened(usize),
}

impl Column {
    /// Parses a title. `>` marks a column of numbers, and a leading `?` marks an optional column.
    fn new(title: &str) -> Self {
        let (optional, title) = match title.strip_prefix('?') {
            Some(rest) => (true, rest),
            None => (false, title),
        };
        let (number, title) = match title.strip_prefix('>') {
            Some(rest) => (true, rest),
            None => (false, title),
        };
        Self {
            title: title.to_owned(),
            number,
            optional,
        }
    }
}

/// Sizes of a column's content, in characters.
struct Size {
    number: bool,
    /// The longest line of a cell.
    cell: usize,
    /// The longest line of a cell or of the title.
    whole: usize,
    /// The longest word of a cell or of the title.
    word: usize,
    /// The longest word of the title.
    title_word: usize,
}

impl Size {
    /// Returns the minimum width of the column.
    fn least(&self, give: Give) -> usize {
        match give {
            Give::Texts if self.number || self.whole <= UNBROKEN => self.whole,
            Give::Words | Give::Shortened(_) if self.number => self.cell.max(self.title_word),
            Give::Texts | Give::Words => self.word,
            Give::Shortened(most) => self.word.min(most),
        }
    }
}

fn longest<'a>(pieces: impl Iterator<Item = &'a str>) -> usize {
    pieces.map(|p| p.chars().count()).max().unwrap_or(0)
}

/// Returns the text with words of at most `most` characters.
fn shortened(text: &str, most: usize) -> String {
    let cut = |word: &str| match word.char_indices().nth(most.saturating_sub(1)) {
        Some((at, _)) if word.chars().count() > most => format!("{}…", &word[..at]),
        _ => word.to_owned(),
    };
    let line = |l: &str| l.split(' ').map(cut).collect::<Vec<_>>().join(" ");
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

impl Table {
    /// Creates a table with these column titles. A title that starts with `>` marks a column of
    /// right-aligned numbers. A title that starts with `?` (before `>`) marks a column that is
    /// dropped first.
    pub(super) fn new<'a>(titles: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            columns: titles.into_iter().map(Column::new).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Returns whether the table has no rows.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the sizes of every column's content.
    fn sizes(&self) -> Vec<Size> {
        let of = |(i, column): (usize, &Column)| {
            let cells = self.rows.iter().filter_map(|r| r.get(i));
            let (mut cell, mut word) = (0, 0);
            for text in cells {
                cell = cell.max(longest(text.lines()));
                word = word.max(longest(text.split_whitespace()));
            }
            let title = &column.title;
            Size {
                number: column.number,
                cell,
                whole: cell.max(longest(title.lines())),
                word: word.max(longest(title.split_whitespace())),
                title_word: longest(title.split_whitespace()),
            }
        };
        self.columns.iter().enumerate().map(of).collect()
    }

    /// Returns the columns to show, and how far their cells shrink.
    fn arrange(&self, sizes: &[Size], width: usize) -> (Vec<usize>, Give) {
        let fits = |shown: &[usize], give| {
            let cells: usize = shown.iter().map(|&c| sizes[c].least(give)).sum();
            cells + GAP * shown.len().saturating_sub(1) <= width
        };
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        while !fits(&shown, Give::Texts) {
            match shown.iter().rposition(|&c| self.columns[c].optional) {
                Some(last) => shown.remove(last),
                None => break,
            };
        }
        loop {
            let words = [Give::Texts, Give::Words].into_iter();
            let shorter = (MIN_CHARACTERS..width).rev().map(Give::Shortened);
            let last = shown.len() <= 1;
            if let Some(give) = words.chain(shorter).find(|give| fits(&shown, *give)) {
                return (shown, give);
            }
            if last {
                return (shown, Give::Words);
            }
            shown.pop();
        }
    }

    /// Returns the lines of the table in `width` columns, without trailing spaces.
    fn lines(&self, width: usize) -> Vec<String> {
        let sizes = self.sizes();
        let (shown, give) = self.arrange(&sizes, width);
        let mut inner = Inner::new();
        let text = |column: usize, cell: &str| match give {
            Give::Shortened(most) if !self.columns[column].number => shortened(cell, most),
            _ => cell.to_owned(),
        };
        inner
            .load_style(
                TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')),
            )
            .set_content_arrangement(ContentArrangement::Dynamic)
            .force_no_tty()
            .set_width(u16::try_from(width).unwrap_or(u16::MAX))
            .set_header(shown.iter().map(|&c| text(c, &self.columns[c].title)));
        for row in &self.rows {
            let cell = |&c: &usize| text(c, row.get(c).map_or("", String::as_str));
            inner.add_row(shown.iter().map(cell).collect::<Vec<_>>());
        }
        for (at, &column) in shown.iter().enumerate() {
            let padding = if at > 0 { PADDING as u16 } else { 0 };
            if let Some(of) = inner.column_mut(at) {
                of.set_padding((padding, 0));
                if self.columns[column].number {
                    of.set_cell_alignment(CellAlignment::Right);
                }
                let least = sizes[column].least(give);
                of.set_constraint(if least == sizes[column].whole {
                    ColumnConstraint::ContentWidth
                } else {
                    ColumnConstraint::LowerBoundary(Width::Fixed(least as u16 + padding))
                });
            }
        }
        let mut lines: Vec<String> = inner.lines().map(|l| l.trim_end().to_owned()).collect();
        let left: Vec<String> = (0..self.columns.len())
            .filter(|c| !shown.contains(c))
            .map(|c| self.columns[c].title.replace("_\n", "_").replace('\n', " "))
            .collect();
        if !left.is_empty() && !self.is_empty() {
            let note = format!("(no room for: {})", left.join(", "));
            lines.extend(wrap(&note, width));
        }
        lines
    }
}

impl fmt::Display for Table {
    /// Writes the table's lines, without trailing spaces.
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
        for width in [97, WIDTH] {
            let lines = table.lines(width);
            let text = lines.join("\n");
            assert!(text.contains("123456.78   *98765.43"), "{text}");
            assert!(widest(&lines) <= width, "{text}");
        }
    }

    /// With six columns of options next to a long text, only the text is broken if there is enough
    /// room.
    #[test]
    fn short_values_are_never_broken() {
        let values = ["native", "implicit", "chunked", "true", "auto", "f32 main"];
        let mut table = Table::new(["prefetch_\nforward"; 6].into_iter().chain(["why"]));
        let cells = values.map(str::to_owned).into_iter();
        table.row(cells.chain(["a longer text that is wrapped".to_owned()]));
        let lines = table.lines(84);
        let whole = |of: &str| lines.iter().any(|l| l.contains(of));
        assert!(values.into_iter().all(whole), "{lines:?}");
        assert!(whole("prefetch_") && whole("forward"), "{lines:?}");
        assert!(!whole("a longer text that is wrapped"), "{lines:?}");
        assert!(whole("wrapped") && widest(&lines) <= 84, "{lines:?}");
    }

    #[test]
    fn a_narrow_table_loses_its_optional_columns_first_and_says_so() {
        let mut table = Table::new(["scenario", "?>facts", ">errors", "verdict"]);
        table.row(["llama3-8b-4xh200", "123456", "0", "proven"].map(str::to_owned));
        assert!(table.lines(60)[0].contains("facts"));
        let narrow = table.lines(42);
        assert_eq!(narrow[0], "scenario           errors   verdict");
        assert!(narrow[2].ends_with("proven"), "{narrow:?}");
        assert_eq!(narrow[3], "(no room for: facts)");
    }

    /// At every width, lines fit, and every word is either whole, shortened with a mark, or in a
    /// column that is reported as dropped.
    #[test]
    fn no_width_breaks_a_word() {
        let mut table = Table::new(["unit", ">A ms", ">B ms", "what it waited for", ">change"]);
        table.row(
            [
                "layers.31",
                "1234.56",
                "1230.00",
                "reduce_scatter layers.31 then root",
                "-4.56",
            ]
            .map(str::to_owned),
        );
        let known = "unit A B ms what it waited for change layers.31 1234.56 1230.00 reduce_scatter then root -4.56 (no room for:";
        for width in 24..120 {
            let lines = table.lines(width);
            assert!(widest(&lines) <= width, "{width}: {lines:?}");
            for word in lines.iter().flat_map(|l| l.split_whitespace()) {
                let bare = word.trim_matches(['(', ')', ',', ':']);
                let cut = bare.strip_suffix('…').is_some_and(|b| known.contains(b));
                let whole = known.split(' ').any(|k| k.trim_matches(['(', ':']) == bare);
                assert!(cut || whole || bare.starts_with('─'), "{width}: {word}");
            }
        }
    }
}
