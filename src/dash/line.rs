//! A line of text that is being typed.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Text, and the position of the cursor in characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line {
    text: String,
    cursor: usize,
}

impl Line {
    /// Creates a line with the cursor after the text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let cursor = text.chars().count();
        Self { text, cursor }
    }

    /// Creates a line from a completion. In an empty list, the cursor is placed inside the
    /// brackets.
    #[must_use]
    pub fn completed(text: impl Into<String>) -> Self {
        let mut line = Self::new(text);
        if line.text.ends_with("[]") {
            line.cursor -= 1;
        }
        line
    }

    /// Returns the text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the number of characters before the cursor.
    #[must_use]
    pub fn cursor(&self) -> usize {
        self.cursor
    }

    fn byte(&self, at: usize) -> usize {
        self.text
            .char_indices()
            .nth(at)
            .map_or(self.text.len(), |(i, _)| i)
    }

    fn insert(&mut self, c: char) {
        let at = self.byte(self.cursor);
        self.text.insert(at, c);
        self.cursor += 1;
    }

    fn remove(&mut self, at: usize) {
        if at < self.text.chars().count() {
            let at = self.byte(at);
            self.text.remove(at);
        }
    }

    /// Handles an editing key. Returns whether the text changed.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let before = self.text.clone();
        match key.code {
            KeyCode::Char('u') if control => *self = Self::default(),
            KeyCode::Char('a') if control => self.cursor = 0,
            KeyCode::Char('e') if control => self.cursor = self.text.chars().count(),
            KeyCode::Char('w') if control => self.remove_word(),
            KeyCode::Char(c) if !control && !key.modifiers.contains(KeyModifiers::ALT) => {
                self.insert(c);
            }
            KeyCode::Backspace if self.cursor > 0 => {
                self.cursor -= 1;
                self.remove(self.cursor);
            }
            KeyCode::Delete => self.remove(self.cursor),
            KeyCode::Left => self.cursor = self.cursor.saturating_sub(1),
            KeyCode::Right => self.cursor = (self.cursor + 1).min(self.text.chars().count()),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = self.text.chars().count(),
            _ => {}
        }
        self.text != before
    }

    fn remove_word(&mut self) {
        let before: Vec<char> = self.text.chars().take(self.cursor).collect();
        let kept = before
            .iter()
            .rposition(|c| !c.is_whitespace())
            .map_or(0, |end| {
                before[..end]
                    .iter()
                    .rposition(|c| c.is_whitespace())
                    .map_or(0, |space| space + 1)
            });
        let behind: String = self.text.chars().skip(self.cursor).collect();
        self.text = before[..kept].iter().collect::<String>() + &behind;
        self.cursor = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &mut Line, keys: &[(KeyCode, KeyModifiers)]) {
        for (code, modifiers) in keys {
            line.key(KeyEvent::new(*code, *modifiers));
        }
    }

    #[test]
    fn editing_keeps_text_and_cursor_together() {
        const NO: KeyModifiers = KeyModifiers::NONE;
        let mut line = Line::new("aé");
        typed(
            &mut line,
            &[
                (KeyCode::Left, NO),
                (KeyCode::Char('b'), NO),
                (KeyCode::Delete, NO),
            ],
        );
        assert_eq!((line.text(), line.cursor()), ("ab", 2));
        typed(
            &mut line,
            &[
                (KeyCode::Backspace, NO),
                (KeyCode::Backspace, NO),
                (KeyCode::Backspace, NO),
            ],
        );
        assert_eq!((line.text(), line.cursor()), ("", 0));
        let mut line = Line::new("one two  ");
        typed(&mut line, &[(KeyCode::Char('w'), KeyModifiers::CONTROL)]);
        assert_eq!((line.text(), line.cursor()), ("one ", 4));
        assert!(line.key(KeyEvent::new(KeyCode::Char('u'), KeyModifiers::CONTROL)));
        assert!(!line.key(KeyEvent::new(KeyCode::Left, NO)));
        assert_eq!((line.text(), line.cursor()), ("", 0));
    }
}
