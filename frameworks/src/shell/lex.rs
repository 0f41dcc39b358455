//! Splits a shell script into lines of words.

use super::word::{Assignment, Line, Part, Word, assigned, assignment, push};
use crate::error::ConfigError;
use shardlab_plan::scenario::Position;

/// Maximum nesting of defaults and arrays.
const MAX_DEPTH: usize = 16;

/// Returns the part for the text of a command: `expr` is arithmetic, others are not run.
fn command(text: &str) -> Part {
    match text.trim().strip_prefix("expr ") {
        Some(expression) => Part::Arithmetic(expression.replace(['\\', '\''], "")),
        None => Part::Command,
    }
}

struct Lexer<'t> {
    file: &'t str,
    chars: std::iter::Peekable<std::str::Chars<'t>>,
    at: Position,
    depth: usize,
}

/// Splits a script.
///
/// # Errors
/// Fails if a quote or bracket is not closed.
pub(super) fn lines(file: &str, text: &str) -> Result<Vec<Line>, ConfigError> {
    let mut lexer = Lexer {
        file,
        chars: text.chars().peekable(),
        at: Position { line: 1, column: 1 },
        depth: 0,
    };
    let mut lines = Vec::new();
    let mut line = Line::default();
    loop {
        lexer.blanks();
        match lexer.peek() {
            None => break,
            Some('\n' | ';') => {
                lexer.next();
                lines.push(std::mem::take(&mut line));
            }
            Some('#') => lexer.comment(),
            Some('>' | '<') => lexer.redirection(&mut line)?,
            // Nothing relevant follows a background command or a pipe on the same line.
            Some(c @ ('&' | '|')) => {
                let at = lexer.at;
                lexer.next();
                if c == '&' && lexer.peek() == Some('>') {
                    lexer.redirection(&mut line)?;
                    continue;
                }
                let twice = lexer.peek() == Some(c);
                if twice {
                    lexer.next();
                }
                let text = if twice {
                    format!("{c}{c}")
                } else {
                    c.to_string()
                };
                let condition = line
                    .words
                    .first()
                    .and_then(Word::literal)
                    .is_some_and(|w| w == "if" || w == "elif");
                if condition {
                    line.words.push(lexer.literal(at, text));
                } else {
                    lines.push(std::mem::take(&mut line));
                }
            }
            Some('(' | ')') => {
                lexer.next();
            }
            Some(_) => {
                let word = lexer.word()?;
                let is_then = matches!(word.literal(), Some("then" | "else" | "do" | "fi"));
                // Each keyword forms its own line.
                if is_then && !line.words.is_empty() {
                    lines.push(std::mem::take(&mut line));
                }
                line.words.push(word);
                if is_then {
                    lines.push(std::mem::take(&mut line));
                }
            }
        }
    }
    lines.push(line);
    lines.retain(|l| !l.words.is_empty());
    Ok(lines)
}

impl Lexer<'_> {
    fn peek(&mut self) -> Option<char> {
        self.chars.peek().copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.chars.next()?;
        if c == '\n' {
            self.at.line = self.at.line.saturating_add(1);
            self.at.column = 1;
        } else {
            self.at.column = self.at.column.saturating_add(1);
        }
        Some(c)
    }

    fn error(&self, at: Position, message: &str) -> ConfigError {
        ConfigError::at(self.file, at, message)
    }

    /// Skips blanks and line continuations.
    fn blanks(&mut self) {
        while let Some(c) = self.peek() {
            let goes_on = c == '\\' && {
                let mut ahead = self.chars.clone();
                ahead.next();
                let mut next = ahead.next();
                if next == Some('\r') {
                    next = ahead.next();
                }
                matches!(next, Some('\n') | None)
            };
            if goes_on {
                while self.next().is_some_and(|c| c != '\n') {}
            } else if c == ' ' || c == '\t' || c == '\r' {
                self.next();
            } else {
                break;
            }
        }
    }

    /// Skips a redirection with its stream number and file: `2>&1`, `&> log`. The text of a
    /// here-document is skipped if it is data, and read as commands otherwise.
    fn redirection(&mut self, line: &mut Line) -> Result<(), ConfigError> {
        let start = self.at;
        let mut operator = String::new();
        while let Some(c @ ('>' | '<' | '&' | '-')) = self.peek() {
            operator.push(c);
            self.next();
        }
        let is_stream = |w: &Word| {
            let digits = |t: &str| t.len() == 1 && t.chars().all(|c| c.is_ascii_digit());
            let adjacent = w.at.line == start.line && w.at.column.saturating_add(1) == start.column;
            adjacent && w.literal().is_some_and(digits)
        };
        if line.words.last().is_some_and(is_stream) {
            line.words.pop();
        }
        self.blanks();
        if matches!(self.peek(), None | Some('\n' | ';' | '|' | '>' | '<')) {
            return Ok(());
        }
        let target = self.word()?;
        let command = line.words.first().and_then(Word::literal);
        if operator.starts_with("<<") && matches!(command, Some("cat" | "tee")) {
            self.skip_document(&target);
        } else if operator.starts_with("<<") && command == Some("read") {
            self.read_document(&target, line)?;
        }
        Ok(())
    }

    /// Reads the here-document of `read -r -d '' NAME` as an assignment of its words to NAME.
    fn read_document(&mut self, mark: &Word, line: &mut Line) -> Result<(), ConfigError> {
        let name = line.words.last().and_then(Word::literal).map(str::to_owned);
        let (Some(name), Some(Part::Literal { text: mark, .. })) = (name, mark.parts.first())
        else {
            return Ok(());
        };
        while self.peek().is_some_and(|c| c != '\n') {
            self.next();
        }
        let mut words = Vec::new();
        loop {
            self.blanks();
            match self.peek() {
                None => break,
                Some('\n' | ';' | '&' | '|' | '(' | ')' | '<' | '>') => {
                    self.next();
                }
                Some(_) => {
                    let word = self.word()?;
                    if word.literal() == Some(mark) {
                        break;
                    }
                    words.push(word);
                }
            }
        }
        let assignment = Assignment {
            name,
            appends: false,
            value: Vec::new(),
            array: Some(words),
        };
        line.words = vec![Word {
            at: line.words[0].at,
            parts: Vec::new(),
            assignment: Some(assignment),
        }];
        Ok(())
    }

    /// Skips the lines of a here-document, up to its delimiter.
    fn skip_document(&mut self, mark: &Word) {
        let Some(Part::Literal { text: mark, .. }) = mark.parts.first() else {
            return;
        };
        // The rest of the command is on the line of the `<<`.
        while self.next().is_some_and(|c| c != '\n') {}
        let mut text = String::new();
        while let Some(c) = self.next() {
            if c != '\n' {
                text.push(c);
            } else if text.trim() == mark {
                return;
            } else {
                text.clear();
            }
        }
    }

    fn comment(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.next();
        }
    }

    fn literal(&self, at: Position, text: String) -> Word {
        Word {
            at,
            parts: vec![Part::Literal {
                text,
                quoted: false,
            }],
            assignment: None,
        }
    }

    fn word(&mut self) -> Result<Word, ConfigError> {
        let at = self.at;
        if self.depth > MAX_DEPTH {
            return Err(self.error(at, "nested too deeply"));
        }
        let mut parts = Vec::new();
        let mut text = String::new();
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\r' | '\n' | ';' | '&' | '|' | ')' | '>' | '<' => break,
                '(' => {
                    let Some((name, appends)) = assigned(&text).filter(|_| parts.is_empty()) else {
                        break;
                    };
                    self.next();
                    let array = Some(self.array(at)?);
                    let assignment = Some(Assignment {
                        name,
                        appends,
                        value: Vec::new(),
                        array,
                    });
                    return Ok(Word {
                        at,
                        parts: Vec::new(),
                        assignment,
                    });
                }
                '\'' => {
                    push(&mut parts, &mut text);
                    parts.push(self.single()?);
                }
                '"' => {
                    push(&mut parts, &mut text);
                    self.double(&mut parts)?;
                }
                '$' | '`' => {
                    push(&mut parts, &mut text);
                    let part = self.dollar(false)?;
                    parts.push(part);
                }
                '\\' => {
                    self.next();
                    match self.next() {
                        Some('\n') | None => break,
                        Some(c) => text.push(c),
                    }
                }
                _ => {
                    self.next();
                    text.push(c);
                }
            }
        }
        push(&mut parts, &mut text);
        // This is a single character that starts no word.
        if parts.is_empty() {
            let c = self.next().map(String::from).unwrap_or_default();
            return Ok(self.literal(at, c));
        }
        let assignment = assignment(&mut parts);
        Ok(Word {
            at,
            parts,
            assignment,
        })
    }

    fn array(&mut self, at: Position) -> Result<Vec<Word>, ConfigError> {
        let mut words = Vec::new();
        self.depth += 1;
        loop {
            self.blanks();
            match self.peek() {
                None => return Err(self.error(at, "the array that starts here does not end")),
                Some(')') => {
                    self.next();
                    break;
                }
                Some('\n') => {
                    self.next();
                }
                Some('#') => self.comment(),
                Some(_) => words.push(self.word()?),
            }
        }
        self.depth -= 1;
        Ok(words)
    }

    fn single(&mut self) -> Result<Part, ConfigError> {
        let at = self.at;
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                None => return Err(self.error(at, "this quote does not end")),
                Some('\'') => return Ok(Part::Literal { text, quoted: true }),
                Some(c) => text.push(c),
            }
        }
    }

    fn double(&mut self, parts: &mut Vec<Part>) -> Result<(), ConfigError> {
        let at = self.at;
        self.next();
        let mut text = String::new();
        let before = parts.len();
        loop {
            match self.peek() {
                None => return Err(self.error(at, "this quote does not end")),
                Some('"') => {
                    self.next();
                    break;
                }
                Some('\\') => {
                    self.next();
                    match self.next() {
                        Some('\n') | None => {}
                        Some(c) => text.push(c),
                    }
                }
                Some('$' | '`') => {
                    if !text.is_empty() {
                        let text = std::mem::take(&mut text);
                        parts.push(Part::Literal { text, quoted: true });
                    }
                    let part = self.dollar(true)?;
                    parts.push(part);
                }
                Some(c) => {
                    self.next();
                    text.push(c);
                }
            }
        }
        if !text.is_empty() || parts.len() == before {
            parts.push(Part::Literal { text, quoted: true });
        }
        Ok(())
    }

    /// Reads an expansion that starts with a dollar sign, or a command in backquotes.
    fn dollar(&mut self, quoted: bool) -> Result<Part, ConfigError> {
        let at = self.at;
        if self.next() == Some('`') {
            let mut inner = String::new();
            while let Some(c) = self.next() {
                if c == '`' {
                    return Ok(command(&inner));
                }
                inner.push(c);
            }
            return Err(self.error(at, "this quote does not end"));
        }
        match self.peek() {
            Some('{') => {
                self.next();
                let inner = self.until(at, '{', '}')?;
                self.braces(&inner, quoted)
            }
            Some('(') => {
                self.next();
                let inner = self.until(at, '(', ')')?;
                let arithmetic = inner.strip_prefix('(').and_then(|i| i.strip_suffix(')'));
                Ok(arithmetic
                    .map_or_else(|| command(&inner), |text| Part::Arithmetic(text.to_owned())))
            }
            _ => {
                let mut name = String::new();
                while let Some(c) = self.peek()
                    && (c.is_ascii_alphanumeric()
                        || c == '_'
                        || name.is_empty() && "@*#?".contains(c))
                {
                    name.push(c);
                    self.next();
                    if !c.is_ascii_alphabetic() && c != '_' && name.len() == 1 {
                        break;
                    }
                }
                Ok(if name.is_empty() {
                    Part::Literal {
                        text: "$".to_owned(),
                        quoted,
                    }
                } else {
                    Part::Variable {
                        name,
                        default: None,
                        quoted,
                    }
                })
            }
        }
    }

    /// Returns the text up to the closing bracket.
    fn until(&mut self, at: Position, open: char, close: char) -> Result<String, ConfigError> {
        let mut depth = 1;
        let mut text = String::new();
        while let Some(c) = self.next() {
            if c == open {
                depth += 1;
            } else if c == close {
                depth -= 1;
                if depth == 0 {
                    return Ok(text);
                }
            }
            text.push(c);
        }
        Err(self.error(at, "this expansion does not end"))
    }

    /// Reads the contents of `${…}`: a name, `[@]`, and a default.
    fn braces(&self, inner: &str, quoted: bool) -> Result<Part, ConfigError> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let end = inner.find(|c| !is_name(c)).unwrap_or(inner.len());
        let (name, rest) = inner.split_at(end);
        if name.is_empty() {
            return Ok(Part::Command);
        }
        let rest = rest
            .strip_prefix("[@]")
            .or(rest.strip_prefix("[*]"))
            .unwrap_or(rest);
        let default = rest
            .strip_prefix(":-")
            .or(rest.strip_prefix('-'))
            .or(rest.strip_prefix(":="));
        let default = match default {
            None if rest.is_empty() => None,
            // Patterns and substrings are not supported.
            None => return Ok(Part::Command),
            Some(text) => {
                let mut inner = Lexer {
                    file: self.file,
                    chars: text.chars().peekable(),
                    at: self.at,
                    depth: self.depth + 1,
                };
                if text.is_empty() {
                    Some(Vec::new())
                } else {
                    Some(inner.word()?.parts)
                }
            }
        };
        Ok(Part::Variable {
            name: name.to_owned(),
            default,
            quoted,
        })
    }
}
