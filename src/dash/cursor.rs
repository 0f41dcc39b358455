//! The selected row of a list.

use super::keys::Command;
use std::cell::Cell;
use std::ops::Range;

/// A selected row, and the rows shown around it.
#[derive(Clone, Debug, Default)]
pub struct Cursor {
    /// Selected row.
    pub at: usize,
    /// First visible row. Drawing keeps the selected row visible.
    top: Cell<usize>,
    /// Number of rows in the last drawing.
    page: Cell<usize>,
}

/// Returns the row that a command moves to from row `at`, at most `last`; `None` if the command
/// does not move. A page has `page` rows.
pub(super) fn moved(at: usize, command: Command, page: usize, last: usize) -> Option<usize> {
    let to = match command {
        Command::Up => at.saturating_sub(1),
        Command::Down => at + 1,
        Command::PageUp => at.saturating_sub(page),
        Command::PageDown => at + page,
        Command::First => 0,
        Command::Last => last,
        _ => return None,
    };
    Some(to.min(last))
}

impl Cursor {
    /// Moves the cursor in a list of `len` rows. Returns whether the command was a movement.
    pub fn go(&mut self, command: Command, len: usize) -> bool {
        let page = self.page.get().max(2) - 1;
        let to = moved(self.at, command, page, len.saturating_sub(1));
        self.at = to.unwrap_or(self.at);
        to.is_some()
    }

    /// Keeps the selection within a list of `len` rows.
    pub fn clamp(&mut self, len: usize) {
        self.at = self.at.min(len.saturating_sub(1));
    }

    /// Returns the visible rows of a list with `len` rows in an area of `height` rows.
    pub fn window(&self, len: usize, height: usize) -> Range<usize> {
        self.window_at(self.at, len, height)
    }

    /// Like [`Self::window`], for a selected row whose screen row `at` differs because of headings.
    pub(crate) fn window_at(&self, at: usize, len: usize, height: usize) -> Range<usize> {
        self.page.set(height);
        if height == 0 {
            return 0..0;
        }
        let mut top = self.top.get();
        if at < top {
            top = at;
        } else if at >= top + height {
            top = at + 1 - height;
        }
        top = top.min(len.saturating_sub(height));
        self.top.set(top);
        top..(top + height).min(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selected_row_is_always_shown() {
        let mut cursor = Cursor::default();
        for (command, at) in [
            (Command::Last, 99),
            (Command::Down, 99),
            (Command::PageUp, 90),
            (Command::First, 0),
            (Command::Up, 0),
            (Command::PageDown, 9),
        ] {
            cursor.window(100, 10);
            assert!(cursor.go(command, 100));
            assert_eq!(cursor.at, at, "{command:?}");
            let shown = cursor.window(100, 10);
            assert!(shown.contains(&at) && shown.len() == 10, "{shown:?}");
        }
        assert!(!cursor.go(Command::Quit, 100));
        cursor.clamp(3);
        assert_eq!((cursor.at, cursor.window(3, 10)), (2, 0..3));
        assert_eq!(cursor.window(3, 0), 0..0);
        let mut empty = Cursor::default();
        assert!(empty.go(Command::Down, 0));
        assert_eq!((empty.at, empty.window(0, 5)), (0, 0..0));
    }
}
