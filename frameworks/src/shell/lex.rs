//! Splits a shell script into lines of words.

use super::braces::braces;
use super::word::{Assignment, Join, Kind, Line, Part, Word, assigned, assignment, push};
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

pub(super) struct Lexer<'t> {
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
    let mut splitter = Splitter::default();
    loop {
        lexer.blanks();
        if splitter.expects_pattern() {
            lexer.pattern(&mut splitter)?;
            continue;
        }
        match lexer.peek() {
            None => break,
            Some(c @ ('\n' | ';')) => {
                let at = lexer.at;
                lexer.next();
                let twice = c == ';' && matches!(lexer.peek(), Some(';' | '&'));
                if twice {
                    while matches!(lexer.peek(), Some(';' | '&')) {
                        lexer.next();
                    }
                    splitter.end_branch();
                } else if splitter.continues(c) {
                    if c == ';' {
                        splitter.line.words.push(lexer.literal(at, ";".to_owned()));
                    }
                } else {
                    splitter.end(Join::Always);
                }
            }
            Some('#') => lexer.comment(),
            Some(c @ ('>' | '<')) if splitter.in_brackets => {
                let at = lexer.at;
                lexer.next();
                splitter.line.words.push(lexer.literal(at, c.to_string()));
            }
            Some('>' | '<') => lexer.redirection(&mut splitter.line)?,
            Some(c @ ('&' | '|')) => {
                let at = lexer.at;
                lexer.next();
                if c == '&' && lexer.peek() == Some('>') {
                    lexer.redirection(&mut splitter.line)?;
                    continue;
                }
                let twice = lexer.peek() == Some(c);
                if twice {
                    lexer.next();
                }
                if splitter.in_condition() || splitter.in_brackets {
                    let text = c.to_string().repeat(1 + usize::from(twice));
                    splitter.line.words.push(lexer.literal(at, text));
                } else {
                    splitter.end(match (c, twice) {
                        ('&', true) => Join::And,
                        ('|', true) => Join::Or,
                        ('|', false) => Join::Pipe,
                        _ => Join::Always,
                    });
                }
            }
            Some('(') if lexer.second() == Some('(') => {
                let words = lexer.double_parentheses();
                splitter.line.words.extend(words);
            }
            Some(c @ ('(' | ')')) => {
                let at = lexer.at;
                lexer.next();
                let word = lexer.literal(at, c.to_string());
                if splitter.in_condition() || splitter.in_brackets {
                    splitter.line.words.push(word);
                } else if c == ')' {
                    splitter.close_parenthesis(word);
                } else {
                    splitter.open_parenthesis(word);
                }
            }
            Some(_) => {
                let word = lexer.word()?;
                splitter.word(word);
            }
        }
    }
    splitter.end(Join::Always);
    Ok(splitter.lines)
}

/// Splits words into lines.
#[derive(Default)]
struct Splitter {
    lines: Vec<Line>,
    line: Line,
    /// For each open `case`: whether a pattern comes next.
    cases: Vec<bool>,
    /// Whether `[[` is open, in which operators are words.
    in_brackets: bool,
    /// For each open parenthesis: whether it starts a subshell.
    parentheses: Vec<bool>,
}

impl Splitter {
    fn first(&self) -> Option<&str> {
        self.line.words.first().and_then(Word::literal)
    }

    /// Returns whether the line is a condition, whose operators are words.
    fn in_condition(&self) -> bool {
        matches!(self.first(), Some("if" | "elif" | "while" | "until"))
    }

    fn expects_pattern(&self) -> bool {
        self.cases.last() == Some(&true)
    }

    /// Returns whether a line continues after its end or a semicolon: within braces of a condition,
    /// and at the end of a line, after an operator.
    fn continues(&self, c: char) -> bool {
        let is = |w: &Word, text: &str| w.literal() == Some(text);
        let last = self.line.words.last().and_then(Word::literal);
        let operator = matches!(last, Some("&&" | "||" | "(" | "!"));
        if c == '\n' {
            return operator && (self.in_condition() || self.in_brackets);
        }
        let count = |text| self.line.words.iter().filter(|w| is(w, text)).count();
        self.in_condition() && (count("{") > count("}") || count("(") > count(")"))
    }

    /// Adds a word. Each keyword forms its own line.
    fn word(&mut self, word: Word) {
        let text = word.literal().unwrap_or_default().to_owned();
        let is_keyword = matches!(text.as_str(), "then" | "else" | "do" | "fi" | "done");
        let alone = match text.as_str() {
            "then" | "else" | "do" | "fi" => true,
            // These are words of other commands, too.
            "done" | "esac" => self.line.words.is_empty(),
            _ => false,
        };
        if alone && !self.line.words.is_empty() {
            self.end(Join::Always);
        }
        match text.as_str() {
            "[[" => self.in_brackets = true,
            "]]" => self.in_brackets = false,
            "esac" if alone => {
                self.cases.pop();
            }
            _ => {}
        }
        let opens_case = text == "in" && self.first() == Some("case");
        self.line.words.push(word);
        if alone && is_keyword && text != "done" || opens_case {
            self.end(Join::Always);
        }
        if opens_case {
            self.cases.push(true);
        }
    }

    /// Ends a line. `join` says how the next line depends on it.
    fn end(&mut self, join: Join) {
        self.in_brackets = false;
        let line = std::mem::take(&mut self.line);
        // An operator at the end of a line joins the next line.
        self.line.join = if line.words.is_empty() && join == Join::Always {
            line.join
        } else {
            join
        };
        if !line.words.is_empty() || line.kind != Kind::Command {
            self.lines.push(line);
        }
    }

    /// Opens a subshell, whose parenthesis forms its own line. Those of functions open none.
    fn open_parenthesis(&mut self, word: Word) {
        let subshell = self.line.words.is_empty();
        self.parentheses.push(subshell);
        if subshell {
            self.line.words.push(word);
            self.end(Join::Always);
        }
    }

    fn close_parenthesis(&mut self, word: Word) {
        if self.parentheses.pop() == Some(true) {
            self.end(Join::Always);
            self.line.words.push(word);
        }
    }

    /// Ends a branch of a `case`.
    fn end_branch(&mut self) {
        self.end(Join::Always);
        if let Some(pattern) = self.cases.last_mut() {
            *pattern = true;
            self.line.kind = Kind::EndOfBranch;
            self.end(Join::Always);
        }
    }
}

impl<'t> Lexer<'t> {
    /// Returns the parts of a text within another, such as the default of a variable.
    ///
    /// # Errors
    /// Fails if a quote or bracket is not closed, or the text is nested too deeply.
    pub(super) fn parts(
        file: &'t str,
        text: &'t str,
        at: Position,
        depth: usize,
    ) -> Result<Vec<Part>, ConfigError> {
        let chars = text.chars().peekable();
        let mut lexer = Lexer {
            file,
            chars,
            at,
            depth: depth + 1,
        };
        if lexer.depth > MAX_DEPTH {
            return Err(lexer.error(at, "nested too deeply"));
        }
        let (mut parts, mut text) = (Vec::new(), String::new());
        while let Some(c) = lexer.peek() {
            if matches!(c, '\'' | '"' | '$' | '`' | '\\') {
                push(&mut parts, &mut text);
            }
            match c {
                '\'' if lexer.rest_closes(c) => parts.push(lexer.single()?),
                '"' => lexer.double(&mut parts)?,
                '$' | '`' => parts.push(lexer.dollar(false)?),
                '\\' => {
                    lexer.next();
                    let text = lexer.next().map(String::from).unwrap_or_default();
                    parts.push(Part::Literal { text, quoted: true });
                }
                _ => {
                    lexer.next();
                    text.push(c);
                }
            }
        }
        push(&mut parts, &mut text);
        Ok(parts)
    }

    /// Returns whether a quote comes again after the next character.
    fn rest_closes(&self, quote: char) -> bool {
        self.chars.clone().skip(1).any(|c| c == quote)
    }

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

    fn second(&self) -> Option<char> {
        self.chars.clone().nth(1)
    }

    /// Reads the patterns of a branch of a `case` up to their bracket, or `esac`.
    fn pattern(&mut self, splitter: &mut Splitter) -> Result<(), ConfigError> {
        let mut words = Vec::new();
        loop {
            self.blanks();
            match self.peek() {
                None => {
                    splitter.cases.clear();
                    return Ok(());
                }
                Some('#') => self.comment(),
                Some(')') => {
                    self.next();
                    break;
                }
                Some('\n' | '(' | '|' | ';' | '&' | '<' | '>') => {
                    self.next();
                }
                Some(_) => {
                    let word = self.word()?;
                    if words.is_empty() && word.literal() == Some("esac") {
                        splitter.word(word);
                        return Ok(());
                    }
                    words.push(word);
                }
            }
        }
        splitter.line.words = words;
        splitter.line.kind = Kind::Pattern;
        splitter.end(Join::Always);
        if let Some(pattern) = splitter.cases.last_mut() {
            *pattern = false;
        }
        Ok(())
    }

    /// Reads `((…))` as three words, the second of which is the text within.
    fn double_parentheses(&mut self) -> Vec<Word> {
        let at = self.at;
        self.next();
        let before = (self.chars.clone(), self.at);
        // Text of other languages may have brackets that do not end.
        let Ok(inner) = self.until(at, '(', ')') else {
            (self.chars, self.at) = before;
            return Vec::new();
        };
        let inner = inner.strip_prefix('(').unwrap_or(&inner);
        let inner = inner.strip_suffix(')').unwrap_or(inner);
        let word = |text: &str| self.literal(at, text.to_owned());
        vec![word("(("), word(inner), word("))")]
    }

    fn error(&self, at: Position, message: &str) -> ConfigError {
        ConfigError::at(self.file, at, message)
    }

    /// Skips blanks and line continuations.
    fn blanks(&mut self) {
        while let Some(c) = self.peek() {
            let continued = c == '\\' && {
                let mut ahead = self.chars.clone();
                ahead.next();
                let mut next = ahead.next();
                if next == Some('\r') {
                    next = ahead.next();
                }
                matches!(next, Some('\n') | None)
            };
            if continued {
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
        let mut words = line.words.iter();
        let command = words.find(|w| w.assignment.is_none());
        let command = command.and_then(Word::literal);
        if operator == "<<<" {
            if command == Some("read") {
                line.words.push(self.literal(start, operator));
                line.words.push(target);
            }
        } else if operator.starts_with("<<") && matches!(command, Some("cat" | "tee")) {
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
                braces(self.file, &inner, self.at, self.depth, quoted)
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
                    Part::variable(name, quoted)
                })
            }
        }
    }

    /// Returns whether a quote comes again.
    fn closes(&self, quote: char) -> bool {
        self.chars.clone().any(|c| c == quote)
    }

    /// Adds the text up to a closing quote. Commands within double quotes have quotes of their own.
    fn quoted(&mut self, quote: char, text: &mut String) -> Result<(), ConfigError> {
        while let Some(c) = self.next() {
            text.push(c);
            match c {
                c if c == quote => break,
                '\\' if quote == '"' => text.extend(self.next()),
                '$' if quote == '"' && self.peek() == Some('(') => {
                    let at = self.at;
                    text.extend(self.next());
                    if self.depth >= MAX_DEPTH {
                        return Err(self.error(at, "nested too deeply"));
                    }
                    self.depth += 1;
                    let inner = self.until(at, '(', ')');
                    self.depth -= 1;
                    *text += &inner?;
                    text.push(')');
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the text up to the closing bracket.
    fn until(&mut self, at: Position, open: char, close: char) -> Result<String, ConfigError> {
        let mut depth = 1;
        let mut text = String::new();
        // Brackets within quotes are text, as are quotes within `${…}` in double quotes.
        let quotes = open == '(';
        while let Some(c) = self.next() {
            if quotes && c == '\\' {
                text.push(c);
                text.extend(self.next());
                continue;
            }
            if quotes && c == '#' && text.ends_with(char::is_whitespace) {
                self.comment();
                continue;
            }
            if quotes && (c == '\'' || c == '"') && self.closes(c) {
                text.push(c);
                self.quoted(c, &mut text)?;
                continue;
            }
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
}
