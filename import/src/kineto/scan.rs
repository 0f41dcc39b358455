//! Finds the events of a trace in a stream of bytes, one at a time.
//!
//! A trace of several gigabytes is never completely in memory: the scanner holds one chunk, and
//! returns each event as a slice of it. Events that are not valid JSON are reported, and scanning
//! continues after them.

use memchr::{memchr2, memchr3, memmem};
use std::io::{self, Read};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
/// Maximum size of an event, and of a value of the root other than the events, bytes.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// The next item of a trace.
pub(super) enum Item<'a> {
    /// A key of the root, and the text of its value.
    Field(String, &'a [u8]),
    /// An event.
    Event(&'a [u8]),
}

/// Why a trace cannot be read to its end.
#[derive(Debug)]
pub(super) enum Fault {
    /// The file ends within the events, after this many bytes.
    CutOff(u64),
    /// The text is not the expected JSON.
    Syntax(Position, String),
    /// The file cannot be read further.
    Io(u64, io::Error),
}

/// A position in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) line: u64,
    pub(super) column: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Root,
    /// In the list of events; whether the list is within a root object.
    Events {
        bare: bool,
    },
    Done,
}

/// A scanner over a stream.
pub(super) struct Scanner<R> {
    reader: R,
    buffer: Vec<u8>,
    at: usize,
    /// Position before the buffer: the number of lines, and the number of bytes since the last line
    /// break.
    position: Position,
    /// Number of bytes before the buffer.
    offset: u64,
    state: State,
    ended: bool,
}

impl<R: Read> Scanner<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            buffer: Vec::new(),
            at: 0,
            position: Position { line: 1, column: 1 },
            offset: 0,
            state: State::Start,
            ended: false,
        }
    }

    /// Returns the number of bytes that have been read.
    pub(super) fn offset(&self) -> u64 {
        self.offset + self.at as u64
    }

    /// Returns the position of a byte of the buffer.
    pub(super) fn place(&self, at: usize) -> Position {
        advance(self.position, &self.buffer[..at.min(self.buffer.len())])
    }

    /// Returns the position after the last returned item.
    pub(super) fn here(&self) -> Position {
        self.place(self.at)
    }

    /// Returns the next item; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Item<'_>>, Fault> {
        loop {
            match self.state {
                State::Start => match self.peek()? {
                    Some(b'{') => {
                        self.at += 1;
                        self.state = State::Root;
                    }
                    Some(b'[') => {
                        self.at += 1;
                        self.state = State::Events { bare: true };
                    }
                    _ => return Err(self.syntax("a JSON object or list is expected")),
                },
                State::Root => match self.peek()? {
                    Some(b',') => self.at += 1,
                    Some(b'}') => {
                        self.at += 1;
                        self.state = State::Done;
                    }
                    Some(b'"') => {
                        let key = self.value()?;
                        let key: String = serde_json::from_slice(&self.buffer[key])
                            .map_err(|_| self.syntax("a key is not valid text"))?;
                        if self.peek()? != Some(b':') {
                            return Err(self.syntax("`:` is expected behind a key"));
                        }
                        self.at += 1;
                        if key == "traceEvents" && self.peek()? == Some(b'[') {
                            self.at += 1;
                            self.state = State::Events { bare: false };
                            continue;
                        }
                        self.peek()?;
                        let range = self.value()?;
                        return Ok(Some(Item::Field(key, &self.buffer[range])));
                    }
                    None => return Err(Fault::CutOff(self.offset())),
                    Some(_) => return Err(self.syntax("a key in quotes is expected")),
                },
                State::Events { bare } => match self.peek()? {
                    Some(b',') => self.at += 1,
                    Some(b']') => {
                        self.at += 1;
                        self.state = if bare { State::Done } else { State::Root };
                    }
                    Some(b'{') => {
                        let range = self.value()?;
                        return Ok(Some(Item::Event(&self.buffer[range])));
                    }
                    None => return Err(Fault::CutOff(self.offset())),
                    Some(_) => return Err(self.syntax("an event is expected")),
                },
                State::Done => return Ok(None),
            }
        }
    }

    /// Skips to the next possible event after the start of an invalid one. Returns whether there is
    /// one.
    pub(super) fn resume(&mut self, bad: &[u8]) -> bool {
        let start = self.at - bad.len().min(self.at);
        self.resume_from(start + 1)
    }

    /// Skips to the next event after a syntax error.
    pub(super) fn skip(&mut self) -> bool {
        if !matches!(self.state, State::Events { .. }) {
            return false;
        }
        let from = (self.at + 1).min(self.buffer.len());
        self.resume_from(from)
    }

    fn resume_from(&mut self, mut from: usize) -> bool {
        loop {
            if let Some(found) = event_start(&self.buffer[from.min(self.buffer.len())..]) {
                self.at = from + found;
                return true;
            }
            self.at = self
                .buffer
                .len()
                .saturating_sub(64)
                .max(from.min(self.buffer.len()));
            let kept = self.buffer.len() - self.at;
            match self.more() {
                Ok(true) if self.buffer.len() > kept => from = self.at,
                _ => {
                    self.at = self.buffer.len();
                    return false;
                }
            }
        }
    }

    fn syntax(&self, expected: &str) -> Fault {
        Fault::Syntax(self.here(), expected.to_owned())
    }

    /// Returns the next byte that is not blank.
    fn peek(&mut self) -> Result<Option<u8>, Fault> {
        loop {
            while let Some(b) = self.buffer.get(self.at) {
                if !b.is_ascii_whitespace() {
                    return Ok(Some(*b));
                }
                self.at += 1;
            }
            if !self.more()? {
                return Ok(None);
            }
        }
    }

    /// Reads more bytes after the unread ones, which move to the front. Returns whether there were
    /// any.
    fn more(&mut self) -> Result<bool, Fault> {
        if self.ended {
            return Ok(false);
        }
        self.position = advance(self.position, &self.buffer[..self.at]);
        self.offset += self.at as u64;
        self.buffer.drain(..self.at);
        self.at = 0;
        let before = self.buffer.len();
        self.buffer.resize(before + CHUNK, 0);
        loop {
            match self.reader.read(&mut self.buffer[before..]) {
                Ok(n) => {
                    self.buffer.truncate(before + n);
                    self.ended = n == 0;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.buffer.truncate(before);
                    self.ended = true;
                    return Err(Fault::Io(self.offset, e));
                }
            }
        }
    }

    /// Returns the range of the value that starts here: an object, list, text or scalar.
    fn value(&mut self) -> Result<std::ops::Range<usize>, Fault> {
        // Relative to the start of the value, which moves when more is read.
        let (mut i, mut depth, mut text) = (0, 0_u32, false);
        loop {
            let unread = &self.buffer[self.at..];
            let step = match (text, depth) {
                (true, _) => memchr2(b'"', b'\\', &unread[i..]),
                (false, 0) if i > 0 => unread[i..]
                    .iter()
                    .position(|b| matches!(b, b',' | b'}' | b']') || b.is_ascii_whitespace()),
                (false, 0) => (!unread.is_empty()).then_some(0),
                (false, _) => brackets(&unread[i..]),
            };
            // A backslash at the end of the buffer is examined again together with the next byte.
            let escapes = step.is_some_and(|s| unread[i + s] == b'\\' && i + s + 1 == unread.len());
            let Some(step) = step.filter(|_| !escapes) else {
                i = if escapes {
                    unread.len() - 1
                } else {
                    unread.len()
                };
                if i > MAX_EVENT_BYTES {
                    return Err(self.syntax("no event or value is longer than 16 MiB"));
                }
                let scalar_ends = !text && depth == 0 && i > 0;
                if !self.more()? {
                    if scalar_ends {
                        return Ok(self.take(i));
                    }
                    return Err(Fault::CutOff(self.offset() + i as u64));
                }
                continue;
            };
            let at = i + step;
            match (text, unread[at]) {
                (true, b'\\') => i = at + 2,
                (true, _) => {
                    text = false;
                    i = at + 1;
                    if depth == 0 {
                        return Ok(self.take(i));
                    }
                }
                (false, b'"') => {
                    text = true;
                    i = at + 1;
                }
                (false, b'{' | b'[') => {
                    depth += 1;
                    i = at + 1;
                }
                (false, b'}' | b']') if depth > 0 => {
                    depth -= 1;
                    i = at + 1;
                    if depth == 0 {
                        return Ok(self.take(i));
                    }
                }
                (false, _) if at > 0 => return Ok(self.take(at)),
                (false, b',' | b'}' | b']') => return Err(self.syntax("a value is expected")),
                (false, _) => i = at + 1,
            }
        }
    }

    fn take(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.at;
        self.at += length;
        start..self.at
    }
}

/// Returns the index of the first bracket or quote.
fn brackets(text: &[u8]) -> Option<usize> {
    let objects = memchr3(b'{', b'}', b'"', text);
    let lists = memchr2(b'[', b']', &text[..objects.unwrap_or(text.len())]);
    lists.or(objects)
}

/// Returns where a possible event starts: `{` and one of the keys that events start with.
fn event_start(text: &[u8]) -> Option<usize> {
    memmem::find_iter(text, b"{").find(|&at| {
        let inner = text[at + 1..].trim_ascii_start();
        [&b"\"ph\""[..], b"\"name\"", b"\"cat\"", b"\"ts\""]
            .iter()
            .any(|key| inner.starts_with(key))
    })
}

fn advance(from: Position, text: &[u8]) -> Position {
    let lines = memchr::memchr_iter(b'\n', text).count() as u64;
    match memchr::memrchr(b'\n', text) {
        Some(last) => Position {
            line: from.line + lines,
            column: (text.len() - last) as u64,
        },
        None => Position {
            line: from.line,
            column: from.column + text.len() as u64,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns few bytes at a time, so that every boundary is tested.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let n = self.1.min(self.0.len()).min(to.len());
            to[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    fn scan(text: &str, step: usize) -> (Vec<String>, Option<String>) {
        let mut scanner = Scanner::new(Slow(text.as_bytes(), step));
        let mut found = Vec::new();
        loop {
            match scanner.next() {
                Ok(Some(Item::Event(e))) => found.push(String::from_utf8_lossy(e).into_owned()),
                Ok(Some(Item::Field(key, value))) => {
                    found.push(format!("{key}={}", String::from_utf8_lossy(value)));
                }
                Ok(None) => return (found, None),
                Err(e) => return (found, Some(format!("{e:?}"))),
            }
        }
    }

    #[test]
    fn events_and_fields_are_found_at_every_boundary() {
        let text = r#"{"a": 1, "b":[{"x": "]}"}], "traceEvents": [
            {"ph": "X", "name": "a \" { \\"}, {"ph": "M", "args": {"y": [1, {}]}}
        ], "c": "t", "d": true}"#;
        let expected = [
            "a=1",
            r#"b=[{"x": "]}"}]"#,
            r#"{"ph": "X", "name": "a \" { \\"}"#,
            r#"{"ph": "M", "args": {"y": [1, {}]}}"#,
            r#"c="t""#,
            "d=true",
        ];
        for step in [1, 2, 3, 7, 1000] {
            let (found, fault) = scan(text, step);
            assert_eq!(found, expected, "{step}");
            assert_eq!(fault, None);
        }
    }

    #[test]
    fn a_cut_keeps_the_events_before_it() {
        let text = r#"{"traceEvents": [{"ph": "X", "ts": 1}, {"ph": "X", "ts": 2}]}"#;
        for end in 0..text.len() {
            let (found, fault) = scan(&text[..end], 5);
            assert!(found.len() <= 2);
            assert!(fault.is_some(), "{end}");
        }
        assert_eq!(scan(&text[..50], 5).0.len(), 1);
    }

    #[test]
    fn faults_have_a_place() {
        let mut scanner = Scanner::new(&b"{\"traceEvents\": [\n 7]}"[..]);
        let Err(Fault::Syntax(place, _)) = scanner.next().map(|_| ()) else {
            panic!("a number is no event");
        };
        assert_eq!(place, Position { line: 2, column: 2 });
    }

    #[test]
    fn scanning_goes_on_behind_a_bad_event() {
        let text = b"[{\"ph\": \"X\", \"name\": \"a\" b\" c\"}, {\"ph\": \"X\", \"ts\": 3}]";
        let mut scanner = Scanner::new(&text[..]);
        let bad = match scanner.next() {
            Ok(Some(Item::Event(e))) => e.to_vec(),
            _ => panic!("brackets match"),
        };
        assert!(serde_json::from_slice::<serde_json::Value>(&bad).is_err());
        assert!(scanner.resume(&bad));
        assert!(matches!(scanner.next(), Ok(Some(Item::Event(e))) if e.ends_with(b"3}")));
        // An odd number of quotes hides the end of the event.
        let text = b"[{\"ph\": \"X\", \"name\": \"a\"b\"}, {\"ph\": \"X\", \"ts\": 3}]";
        let mut scanner = Scanner::new(&text[..]);
        assert!(matches!(scanner.next(), Err(Fault::CutOff(_))));
        assert!(scanner.skip());
        assert!(matches!(scanner.next(), Ok(Some(Item::Event(e))) if e.ends_with(b"3}")));
    }
}
