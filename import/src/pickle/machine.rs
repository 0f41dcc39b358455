//! Stack, memo and values of a pickle while it is read.

use super::{Object, PickleError, Value};
use std::rc::Rc;

/// An item of the stack.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    Mark,
    Value(usize),
}

/// A value under construction. Lists and dictionaries may grow after they have been memoized.
pub(super) enum Node {
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
const MAX_DEPTH: usize = 200;

/// State of a pickle while it is read.
pub(super) struct Machine<'a> {
    bytes: &'a [u8],
    /// Classes and functions that objects may have.
    pub(super) known: &'a [&'a str],
    /// Position of the next byte.
    pub(super) at: usize,
    pub(super) stack: Vec<Slot>,
    pub(super) nodes: Vec<Node>,
    pub(super) memo: Vec<Option<usize>>,
}

pub(super) type Done<T> = Result<T, PickleError>;

impl<'a> Machine<'a> {
    /// Starts reading a pickle whose objects have one of the known classes.
    pub(super) fn new(bytes: &'a [u8], known: &'a [&'a str]) -> Self {
        Self {
            bytes,
            known,
            at: 0,
            stack: Vec::new(),
            nodes: Vec::new(),
            memo: Vec::new(),
        }
    }

    /// Returns an error at the current position.
    pub(super) fn fail<T>(&self, reason: impl Into<String>) -> Done<T> {
        Err(PickleError {
            at: self.at,
            reason: reason.into(),
        })
    }

    /// Reads `n` bytes.
    pub(super) fn take(&mut self, n: usize) -> Done<&'a [u8]> {
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

    /// Reads up to the next line break.
    pub(super) fn line(&mut self) -> Done<&'a str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match memchr::memchr(b'\n', rest) {
            Some(end) => {
                self.at += end + 1;
                std::str::from_utf8(&rest[..end]).or_else(|_| self.fail("a line is not valid text"))
            }
            None => self.fail("the pickle ends within a line: it was cut off"),
        }
    }

    /// Reads an unsigned little-endian number of `n` bytes.
    pub(super) fn number(&mut self, n: usize) -> Done<u64> {
        let bytes = self.take(n)?;
        Ok(bytes.iter().rev().fold(0, |x, b| (x << 8) | u64::from(*b)))
    }

    /// Reads bytes, preceded by their number in `width` bytes.
    pub(super) fn sized(&mut self, width: usize) -> Done<&'a [u8]> {
        let n = self.number(width)?;
        match usize::try_from(n) {
            Ok(n) => self.take(n),
            Err(_) => self.fail("a length is too large"),
        }
    }

    /// Reads text, preceded by its length in `width` bytes.
    pub(super) fn text(&mut self, width: usize) -> Done<Value> {
        let bytes = self.sized(width)?;
        Ok(Value::Text(String::from_utf8_lossy(bytes).as_ref().into()))
    }

    /// Adds a node, and pushes it.
    pub(super) fn push(&mut self, node: Node) {
        self.stack.push(Slot::Value(self.nodes.len()));
        self.nodes.push(node);
    }

    /// Pushes a plain value.
    pub(super) fn plain(&mut self, value: Value) {
        self.push(Node::Plain(value));
    }

    /// Pops the value at the top of the stack and returns it.
    pub(super) fn pop(&mut self) -> Done<usize> {
        match self.stack.pop() {
            Some(Slot::Value(v)) => Ok(v),
            _ => self.fail("a value is missing on the stack"),
        }
    }

    /// Returns the value at the top of the stack.
    pub(super) fn top(&self) -> Done<usize> {
        match self.stack.last() {
            Some(Slot::Value(v)) => Ok(*v),
            _ => self.fail("a value is missing on the stack"),
        }
    }

    /// Pops the values above the last mark and returns them.
    pub(super) fn above_mark(&mut self) -> Done<Vec<usize>> {
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

    /// Stores the value at the top of the stack in the memo.
    pub(super) fn remember(&mut self, at: usize) -> Done<()> {
        let top = self.top()?;
        // Memo entries are numbered in order, so a number far beyond them indicates damage.
        if at > self.memo.len() + self.bytes.len() {
            return self.fail("a memo number is too large");
        }
        if self.memo.len() <= at {
            self.memo.resize(at + 1, None);
        }
        self.memo[at] = Some(top);
        Ok(())
    }

    /// Pushes a value from the memo.
    pub(super) fn recall(&mut self, at: usize) -> Done<()> {
        match self.memo.get(at).copied().flatten() {
            Some(v) => {
                self.stack.push(Slot::Value(v));
                Ok(())
            }
            None => self.fail(format!("memo {at} is not set")),
        }
    }

    /// Adds items to the list at the top of the stack.
    pub(super) fn append(&mut self, items: Vec<usize>) -> Done<()> {
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::List(list) => {
                list.extend(items);
                Ok(())
            }
            _ => self.fail("items are added to something that is not a list"),
        }
    }

    /// Adds keys and values, which alternate, to the dictionary at the top of the stack.
    pub(super) fn set(&mut self, items: &[usize]) -> Done<()> {
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

    /// Returns the finished value of a node. Each node is built once, and the result is shared.
    pub(super) fn build(&self, root: usize) -> Done<Value> {
        let mut built: Vec<Option<Value>> = vec![None; self.nodes.len()];
        self.finish(root, &mut built, 0)
    }

    fn finish(&self, node: usize, built: &mut Vec<Option<Value>>, depth: usize) -> Done<Value> {
        if let Some(value) = &built[node] {
            return Ok(value.clone());
        }
        // Building a value that contains itself would never end.
        if depth > MAX_DEPTH {
            return self.fail(format!("values are nested more than {MAX_DEPTH} deep"));
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

/// Reads a little-endian two's complement number. Longer numbers keep only their low bits.
pub(super) fn long(bytes: &[u8]) -> i64 {
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let start: u64 = if negative { u64::MAX } else { 0 };
    let bits = bytes.iter().take(8).enumerate().fold(start, |x, (i, b)| {
        (x & !(0xff << (8 * i))) | (u64::from(*b) << (8 * i))
    });
    bits.cast_signed()
}
