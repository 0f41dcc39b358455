//! Reads pickles of plain data: numbers, text, lists, tuples, dictionaries, sets and bytes.
//!
//! A pickle is a program. [`read`] supports only the instructions that build plain values, and
//! rejects those that import or call something (`GLOBAL`, `REDUCE`, `BUILD` and similar ones).
//! [`read_objects`] keeps objects of named classes as they are described, and calls nothing either.
//! Shared values stay shared in the result.

mod make;
mod write;

pub use write::write;

use std::fmt;
use std::rc::Rc;

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// Integer. Those beyond 64 bits keep their low bits.
    Int(i64),
    /// Floating-point number.
    Float(f64),
    /// Text.
    Text(Rc<str>),
    /// Bytes.
    Bytes(Rc<[u8]>),
    /// List, tuple or set, as all are read.
    List(Rc<Vec<Value>>),
    /// Tuple, to be written.
    Tuple(Rc<Vec<Value>>),
    /// Dictionary, in insertion order.
    Dict(Rc<Vec<(Value, Value)>>),
    /// Object, which was not built.
    Object(Rc<Object>),
}

/// What a pickle says about an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// Class or function, with its module: `torch.Size`; [`PERSISTENT`] for what is stored outside
    /// the pickle.
    pub class: Rc<str>,
    /// Arguments of the call; `None` for the class or function itself.
    pub args: Option<Vec<Value>>,
    /// State that is set after the call.
    pub state: Option<Value>,
}

/// Name of objects that are stored outside the pickle; the argument identifies them.
pub const PERSISTENT: &str = "persistent_id";

impl Value {
    /// Returns the value of a key of a dictionary, or of an object's state.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Dict(pairs) => pairs
                .iter()
                .find(|(k, _)| k.text() == Some(key))
                .map(|(_, v)| v),
            Self::Object(object) => object.state.as_ref()?.get(key),
            _ => None,
        }
    }

    /// Returns the object; `None` for anything else.
    #[must_use]
    pub fn object(&self) -> Option<&Object> {
        match self {
            Self::Object(object) => Some(object),
            _ => None,
        }
    }

    /// Returns the items of a list; empty for anything else.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match self {
            Self::List(items) | Self::Tuple(items) => items,
            _ => &[],
        }
    }

    /// Returns the pairs of a dictionary; empty for anything else.
    #[must_use]
    pub fn pairs(&self) -> &[(Self, Self)] {
        match self {
            Self::Dict(pairs) => pairs,
            _ => &[],
        }
    }

    /// Returns the text; `None` for anything else.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the integer; `None` for anything else.
    #[must_use]
    pub fn int(&self) -> Option<i64> {
        match self {
            Self::Int(n) => Some(*n),
            Self::Bool(b) => Some(i64::from(*b)),
            Self::Float(x) if x.fract() == 0.0 => Some(*x as i64),
            _ => None,
        }
    }

    /// Returns the numbers of a list or of a `torch.Size`; `None` if one is not an integer or is
    /// negative.
    #[must_use]
    pub fn numbers(&self) -> Option<Vec<u64>> {
        let sized = self.object().and_then(|o| o.args.as_deref()?.first());
        let items = sized.unwrap_or(self).items().iter();
        items.map(|n| u64::try_from(n.int()?).ok()).collect()
    }

    /// Returns the number; `None` for anything else.
    #[must_use]
    pub fn float(&self) -> Option<f64> {
        match self {
            Self::Float(x) => Some(*x),
            Self::Int(n) => Some(*n as f64),
            _ => None,
        }
    }

    /// Converts a JSON value.
    #[must_use]
    pub fn from_json(value: &serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match value {
            Json::Null => Self::None,
            Json::Bool(b) => Self::Bool(*b),
            Json::Number(n) => n
                .as_i64()
                .or_else(|| n.as_u64().map(u64::cast_signed))
                .map_or_else(|| Self::Float(n.as_f64().unwrap_or(f64::NAN)), Self::Int),
            Json::String(text) => Self::Text(text.as_str().into()),
            Json::Array(items) => Self::List(Rc::new(items.iter().map(Self::from_json).collect())),
            Json::Object(pairs) => {
                let pairs = pairs
                    .iter()
                    .map(|(k, v)| (Self::Text(k.as_str().into()), Self::from_json(v)));
                Self::Dict(Rc::new(pairs.collect()))
            }
        }
    }
}

/// Why a pickle cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickleError {
    /// Position of the instruction, in bytes.
    pub at: usize,
    /// Reason.
    pub reason: String,
}

impl fmt::Display for PickleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: {}", self.at, self.reason)
    }
}

/// A value under construction. Lists and dictionaries may grow after they have been memoized.
#[derive(Clone, Copy)]
enum Slot {
    Mark,
    Value(usize),
}

enum Node {
    Plain(Value),
    List(Vec<usize>),
    Dict(Vec<(usize, usize)>),
    Object {
        class: Rc<str>,
        args: Option<usize>,
        state: Option<usize>,
    },
}

/// Maximum nesting of values.
const DEEPEST: usize = 200;

/// Reads a pickle.
///
/// # Errors
/// Fails if it ends too early, contains anything but plain values, or is not a pickle.
pub fn read(bytes: &[u8]) -> Result<Value, PickleError> {
    read_objects(bytes, &[])
}

/// Reads a pickle with objects of known classes, which are not built.
///
/// # Errors
/// As [`read`], and for classes and functions that are not among the known ones.
pub fn read_objects(bytes: &[u8], known: &[&str]) -> Result<Value, PickleError> {
    Machine {
        bytes,
        known,
        at: 0,
        stack: Vec::new(),
        nodes: Vec::new(),
        memo: Vec::new(),
    }
    .run()
}

struct Machine<'a> {
    bytes: &'a [u8],
    /// Classes and functions that objects may have.
    known: &'a [&'a str],
    at: usize,
    stack: Vec<Slot>,
    nodes: Vec<Node>,
    memo: Vec<Option<usize>>,
}

type Done<T> = Result<T, PickleError>;

impl<'a> Machine<'a> {
    fn fail<T>(&self, reason: impl Into<String>) -> Done<T> {
        Err(PickleError {
            at: self.at,
            reason: reason.into(),
        })
    }

    fn take(&mut self, n: usize) -> Done<&'a [u8]> {
        match self.bytes.get(self.at..).and_then(|rest| rest.get(..n)) {
            Some(found) => {
                self.at += n;
                Ok(found)
            }
            None => self.fail(format!(
                "the pickle ends here; {n} more bytes are expected: it was cut off"
            )),
        }
    }

    fn line(&mut self) -> Done<&'a str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match memchr::memchr(b'\n', rest) {
            Some(end) => {
                self.at += end + 1;
                std::str::from_utf8(&rest[..end]).or_else(|_| self.fail("a line is not valid text"))
            }
            None => self.fail("the pickle ends within a line: it was cut off"),
        }
    }

    fn number(&mut self, n: usize) -> Done<u64> {
        let bytes = self.take(n)?;
        Ok(bytes.iter().rev().fold(0, |x, b| (x << 8) | u64::from(*b)))
    }

    fn sized(&mut self, width: usize) -> Done<&'a [u8]> {
        let n = self.number(width)?;
        match usize::try_from(n) {
            Ok(n) => self.take(n),
            Err(_) => self.fail("a length is too large"),
        }
    }

    fn text(&mut self, width: usize) -> Done<Value> {
        let bytes = self.sized(width)?;
        Ok(Value::Text(String::from_utf8_lossy(bytes).as_ref().into()))
    }

    fn push(&mut self, node: Node) {
        self.stack.push(Slot::Value(self.nodes.len()));
        self.nodes.push(node);
    }

    fn plain(&mut self, value: Value) {
        self.push(Node::Plain(value));
    }

    fn pop(&mut self) -> Done<usize> {
        match self.stack.pop() {
            Some(Slot::Value(v)) => Ok(v),
            _ => self.fail("a value is missing on the stack"),
        }
    }

    fn top(&self) -> Done<usize> {
        match self.stack.last() {
            Some(Slot::Value(v)) => Ok(*v),
            _ => self.fail("a value is missing on the stack"),
        }
    }

    /// Removes and returns the values above the last mark.
    fn above_mark(&mut self) -> Done<Vec<usize>> {
        let mut found = Vec::new();
        loop {
            match self.stack.pop() {
                Some(Slot::Value(v)) => found.push(v),
                Some(Slot::Mark) => break,
                None => return self.fail("a mark is missing on the stack"),
            }
        }
        found.reverse();
        Ok(found)
    }

    fn remember(&mut self, at: usize) -> Done<()> {
        let top = self.top()?;
        // Numbers are assigned in order; one far beyond them indicates damage.
        if at > self.memo.len() + self.bytes.len() {
            return self.fail("a memo number is too large");
        }
        if self.memo.len() <= at {
            self.memo.resize(at + 1, None);
        }
        self.memo[at] = Some(top);
        Ok(())
    }

    fn recall(&mut self, at: usize) -> Done<()> {
        match self.memo.get(at).copied().flatten() {
            Some(v) => {
                self.stack.push(Slot::Value(v));
                Ok(())
            }
            None => self.fail(format!("memo {at} is not set")),
        }
    }

    fn append(&mut self, items: Vec<usize>) -> Done<()> {
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::List(list) => {
                list.extend(items);
                Ok(())
            }
            _ => self.fail("items are added to something that is not a list"),
        }
    }

    fn set(&mut self, items: &[usize]) -> Done<()> {
        if !items.len().is_multiple_of(2) {
            return self.fail("a key has no value");
        }
        let top = self.top()?;
        let pairs = items.chunks_exact(2).map(|p| (p[0], p[1]));
        match &mut self.nodes[top] {
            Node::Dict(dict) => {
                dict.extend(pairs);
                Ok(())
            }
            _ => self.fail("items are set in something that is not a dictionary"),
        }
    }

    fn run(mut self) -> Done<Value> {
        loop {
            let start = self.at;
            let op = self.take(1)?[0];
            match op {
                0x80 => {
                    let version = self.number(1)?;
                    if version > 5 {
                        return self
                            .fail(format!("pickle protocol {version}; at most 5 is supported"));
                    }
                }
                0x95 => drop(self.take(8)?),
                b'(' => self.stack.push(Slot::Mark),
                b'.' => {
                    let top = self.pop()?;
                    return self.build(top);
                }
                b'0' => {
                    if self.stack.pop().is_none() {
                        return self.fail("there is nothing to drop");
                    }
                }
                b'1' => drop(self.above_mark()?),
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(Slot::Value(top));
                }
                b'N' => self.plain(Value::None),
                0x88 => self.plain(Value::Bool(true)),
                0x89 => self.plain(Value::Bool(false)),
                b'J' => {
                    let n = self.number(4)? as u32;
                    self.plain(Value::Int(n.cast_signed().into()));
                }
                b'K' => {
                    let n = self.number(1)?;
                    self.plain(Value::Int(n.cast_signed()));
                }
                b'M' => {
                    let n = self.number(2)?;
                    self.plain(Value::Int(n.cast_signed()));
                }
                0x8a => {
                    let bytes = self.sized(1)?;
                    self.plain(Value::Int(long(bytes)));
                }
                0x8b => {
                    let bytes = self.sized(4)?;
                    self.plain(Value::Int(long(bytes)));
                }
                b'I' | b'L' => {
                    let line = self.line()?;
                    let value = match line.trim_end_matches('L') {
                        "01" => Value::Bool(true),
                        "00" => Value::Bool(false),
                        digits => match digits.parse() {
                            Ok(n) => Value::Int(n),
                            Err(_) => return self.fail(format!("`{digits}` is not a number")),
                        },
                    };
                    self.plain(value);
                }
                b'F' => {
                    let line = self.line()?;
                    match line.parse() {
                        Ok(x) => self.plain(Value::Float(x)),
                        Err(_) => return self.fail(format!("`{line}` is not a number")),
                    }
                }
                b'G' => {
                    let mut bits = [0; 8];
                    bits.copy_from_slice(self.take(8)?);
                    self.plain(Value::Float(f64::from_be_bytes(bits)));
                }
                b'X' | b'T' => {
                    let text = self.text(4)?;
                    self.plain(text);
                }
                0x8c | b'U' => {
                    let text = self.text(1)?;
                    self.plain(text);
                }
                0x8d => {
                    let text = self.text(8)?;
                    self.plain(text);
                }
                b'V' => {
                    let line = self.line()?;
                    self.plain(Value::Text(line.into()));
                }
                b'S' => {
                    let line = self.line()?;
                    self.plain(Value::Text(line.trim_matches(['\'', '"']).into()));
                }
                b'C' | b'B' | 0x8e | 0x96 => {
                    let width = match op {
                        b'C' => 1,
                        b'B' => 4,
                        _ => 8,
                    };
                    let bytes = self.sized(width)?;
                    self.plain(Value::Bytes(bytes.into()));
                }
                b']' | b')' | 0x8f => self.push(Node::List(Vec::new())),
                b'}' => self.push(Node::Dict(Vec::new())),
                b'l' | b't' | 0x91 => {
                    let items = self.above_mark()?;
                    self.push(Node::List(items));
                }
                b'd' => {
                    let items = self.above_mark()?;
                    self.push(Node::Dict(Vec::new()));
                    self.set(&items)?;
                }
                0x85..=0x87 => {
                    let mut items = Vec::new();
                    for _ in 0..op - 0x84 {
                        items.push(self.pop()?);
                    }
                    items.reverse();
                    self.push(Node::List(items));
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' | 0x90 => {
                    let items = self.above_mark()?;
                    self.append(items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.set(&[key, value])?;
                }
                b'u' => {
                    let items = self.above_mark()?;
                    self.set(&items)?;
                }
                b'q' => {
                    let at = self.number(1)?;
                    self.remember(at as usize)?;
                }
                b'r' => {
                    let at = self.number(4)?;
                    self.remember(at as usize)?;
                }
                0x94 => self.remember(self.memo.len())?,
                b'p' => {
                    let line = self.line()?;
                    match line.parse() {
                        Ok(at) => self.remember(at)?,
                        Err(_) => return self.fail("a memo number is not a number"),
                    }
                }
                b'h' => {
                    let at = self.number(1)?;
                    self.recall(at as usize)?;
                }
                b'j' => {
                    let at = self.number(4)?;
                    self.recall(at as usize)?;
                }
                b'g' => {
                    let line = self.line()?;
                    match line.parse() {
                        Ok(at) => self.recall(at)?,
                        Err(_) => return self.fail("a memo number is not a number"),
                    }
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.class(start, format!("{module}.{name}"))?;
                }
                0x93 if !self.known.is_empty() => {
                    let (name, module) = (self.popped_text()?, self.popped_text()?);
                    self.class(start, format!("{module}.{name}"))?;
                }
                b'R' | 0x81 if !self.known.is_empty() => self.call()?,
                b'b' if !self.known.is_empty() => self.state()?,
                b'Q' if !self.known.is_empty() => {
                    let id = self.pop()?;
                    let args = self.nodes.len();
                    self.nodes.push(Node::List(vec![id]));
                    self.push(Node::Object {
                        class: PERSISTENT.into(),
                        args: Some(args),
                        state: None,
                    });
                }
                0x93
                | b'R'
                | b'b'
                | b'i'
                | b'o'
                | 0x81
                | 0x92
                | b'P'
                | b'Q'
                | 0x82..=0x84
                | 0x97
                | 0x98 => {
                    self.at = start;
                    return self
                        .fail("it would import or call something: a pickle with code is not read");
                }
                other => {
                    self.at = start;
                    return self.fail(format!(
                        "instruction {other:#04x} is not known: this is not a pickle, or it is damaged"
                    ));
                }
            }
        }
    }

    fn popped_text(&mut self) -> Done<Rc<str>> {
        let top = self.pop()?;
        match &self.nodes[top] {
            Node::Plain(Value::Text(text)) => Ok(Rc::clone(text)),
            _ => self.fail("a name of a class is not text"),
        }
    }

    /// Pushes a class or function, unless it is unknown.
    fn class(&mut self, start: usize, class: String) -> Done<()> {
        if !self.known.contains(&class.as_str()) {
            self.at = start;
            return self.fail(format!(
                "it would import `{class}`: a pickle with code is not read"
            ));
        }
        self.push(Node::Object {
            class: class.into(),
            args: None,
            state: None,
        });
        Ok(())
    }

    /// Describes the call of a class or function.
    fn call(&mut self) -> Done<()> {
        let (args, callee) = (self.pop()?, self.pop()?);
        match &self.nodes[callee] {
            Node::Object {
                class, args: None, ..
            } => {
                let class = Rc::clone(class);
                self.push(Node::Object {
                    class,
                    args: Some(args),
                    state: None,
                });
                Ok(())
            }
            _ => self.fail("something is called that is not a class or function"),
        }
    }

    /// Sets the state of an object.
    fn state(&mut self) -> Done<()> {
        let (value, top) = (self.pop()?, self.top()?);
        match &mut self.nodes[top] {
            Node::Object {
                args: Some(_),
                state,
                ..
            } => {
                *state = Some(value);
                Ok(())
            }
            _ => self.fail("state is set of something that is not an object"),
        }
    }

    /// Returns the finished value of a node. Each node is built once, and shared.
    fn build(&self, root: usize) -> Done<Value> {
        let mut built: Vec<Option<Value>> = vec![None; self.nodes.len()];
        self.finish(root, &mut built, 0)
    }

    fn finish(&self, node: usize, built: &mut Vec<Option<Value>>, depth: usize) -> Done<Value> {
        if let Some(value) = &built[node] {
            return Ok(value.clone());
        }
        // A value that contains itself would never end.
        if depth > DEEPEST {
            return self.fail(format!("values are nested more than {DEEPEST} deep"));
        }
        let value = match &self.nodes[node] {
            Node::Plain(value) => value.clone(),
            Node::List(items) => {
                let items: Done<Vec<Value>> = items
                    .iter()
                    .map(|i| self.finish(*i, built, depth + 1))
                    .collect();
                Value::List(Rc::new(items?))
            }
            Node::Dict(pairs) => {
                let mut all: Vec<(Value, Value)> = Vec::with_capacity(pairs.len());
                for (key, value) in pairs {
                    let key = self.finish(*key, built, depth + 1)?;
                    all.push((key, self.finish(*value, built, depth + 1)?));
                }
                Value::Dict(Rc::new(all))
            }
            Node::Object { class, args, state } => {
                let mut one = |node: &usize| self.finish(*node, built, depth + 1);
                let args = args.as_ref().map(&mut one).transpose()?;
                let state = state.as_ref().map(&mut one).transpose()?;
                Value::Object(Rc::new(Object {
                    class: Rc::clone(class),
                    args: args.map(|a| a.items().to_vec()),
                    state,
                }))
            }
        };
        built[node] = Some(value.clone());
        Ok(value)
    }
}

/// Reads a little-endian two's complement number; of longer ones, the low bits.
fn long(bytes: &[u8]) -> i64 {
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let start: u64 = if negative { u64::MAX } else { 0 };
    let bits = bytes.iter().take(8).enumerate().fold(start, |x, (i, b)| {
        (x & !(0xff << (8 * i))) | (u64::from(*b) << (8 * i))
    });
    bits.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Output of `pickle.dumps({"a": [1, -2, 2.5, None, True], "b": (1, "x"), 7: "a"},
    /// protocol=4)`.
    const DUMP: &[u8] = b"\x80\x04\x951\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffG@\x04\x00\x00\x00\x00\x00\x00N\x88e\x8c\x01b\x94K\x01\x8c\x01x\x94\x86\x94K\x07h\x01u.";

    #[test]
    fn plain_values_are_read() {
        let value = read(DUMP).unwrap();
        let a = value.get("a").unwrap().items();
        assert_eq!(a[..2], [Value::Int(1), Value::Int(-2)]);
        assert_eq!(a[2..], [Value::Float(2.5), Value::None, Value::Bool(true)]);
        assert_eq!(value.get("b").unwrap().items()[1].text(), Some("x"));
        assert_eq!(value.pairs()[2].1.text(), Some("a"));
        // Protocol 0: `pickle.dumps([True, 12, "é"], 0)`.
        let old = read(b"(lp0\nI01\naI12\naVe\np1\na.").unwrap();
        assert_eq!(old.items()[1], Value::Int(12));
        assert_eq!(long(b"\xff"), -1);
        assert_eq!(long(b"\x00\x80\x00"), 32768);
    }

    #[test]
    fn code_is_refused() {
        for (bytes, expected) in [
            (&b"cos\nsystem\n(S'true'\ntR."[..], "os.system"),
            (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "import or call"),
            (b"\x80\x02}\x81.", "import or call"),
            (b"\x80\x09.", "protocol 9"),
            (b"\xff", "not known"),
            (b"\x80\x04]\x94h\x00a.", "nested"),
            (b"e.", "mark is missing"),
            (b".", "value is missing"),
        ] {
            let e = read(bytes).unwrap_err().to_string();
            assert!(e.contains(expected), "{e}");
        }
    }

    /// Output of `pickle.dumps([torch.Size([2, 3]), torch.float32], protocol=2)`, and of an object
    /// with a state.
    #[test]
    fn objects_of_known_classes_are_described() {
        let dump =
            b"\x80\x02]q\x00(ctorch\nSize\nq\x01K\x02K\x03\x86q\x02\x85q\x03Rq\x04ctorch\nfloat32\nq\x05e.";
        let value = read_objects(dump, &["torch.Size", "torch.float32"]).unwrap();
        let [size, dtype] = value.items() else {
            panic!("{value:?}")
        };
        let size = size.object().unwrap();
        assert_eq!(&*size.class, "torch.Size");
        let two_three = [Value::Int(2), Value::Int(3)];
        assert_eq!(size.args.as_ref().unwrap()[0].items(), two_three);
        assert_eq!(dtype.object().unwrap().args, None);
        let refused = read_objects(dump, &["torch.Size"]).unwrap_err().to_string();
        assert!(refused.contains("`torch.float32`"), "{refused}");
        let with_state = b"\x80\x02cm\nC\n)\x81}U\x01aK\x07sb.";
        let value = read_objects(with_state, &["m.C"]).unwrap();
        assert_eq!(value.get("a"), Some(&Value::Int(7)));
    }

    #[test]
    fn a_truncated_file_is_reported() {
        for end in 0..DUMP.len() {
            let e = read(&DUMP[..end]).unwrap_err();
            assert!(e.reason.contains("cut off"), "{end}: {e}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }

        #[test]
        fn no_damage_makes_it_panic(at in 0..DUMP.len(), to: u8) {
            let mut bytes = DUMP.to_vec();
            bytes[at] = to;
            let _ = read(&bytes);
        }
    }
}
