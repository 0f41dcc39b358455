//! Instructions of pickles, by family. The function of each family runs an instruction if it
//! belongs to the family, and returns whether it does.

use super::machine::{Done, Machine, Node, Slot, long};
use super::{PERSISTENT, Value};
use std::rc::Rc;

impl Machine<'_> {
    /// Runs the pickle and returns its value.
    pub(super) fn run(mut self) -> Done<Value> {
        loop {
            let start = self.at;
            let op = self.take(1)?[0];
            if op == b'.' {
                let top = self.pop()?;
                return self.build(top);
            }
            let done = self.memoize_or_recall(op)?
                || self.text_or_bytes(op)?
                || self.number_or_constant(op)?
                || self.container(op)?
                || self.frame_or_stack(op)?
                || self.object(op, start)?;
            if !done {
                self.at = start;
                return self.refuse(op);
            }
        }
    }

    /// Runs instructions that start a pickle, or that move values on the stack.
    fn frame_or_stack(&mut self, op: u8) -> Done<bool> {
        match op {
            0x80 => {
                let version = self.number(1)?;
                if version > 5 {
                    return self.fail(format!("pickle protocol {version}; at most 5 is supported"));
                }
            }
            0x95 => drop(self.take(8)?),
            b'(' => self.stack.push(Slot::Mark),
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
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Runs instructions that push a number, a boolean or `None`.
    fn number_or_constant(&mut self, op: u8) -> Done<bool> {
        let value = match op {
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Int((self.number(4)? as u32).cast_signed().into()),
            b'K' => Value::Int(self.number(1)?.cast_signed()),
            b'M' => Value::Int(self.number(2)?.cast_signed()),
            0x8a => Value::Int(long(self.sized(1)?)),
            0x8b => Value::Int(long(self.sized(4)?)),
            b'I' | b'L' => match self.line()?.trim_end_matches('L') {
                "01" => Value::Bool(true),
                "00" => Value::Bool(false),
                digits => Value::Int(self.parsed(digits)?),
            },
            b'F' => {
                let line = self.line()?;
                Value::Float(self.parsed(line)?)
            }
            b'G' => {
                let mut bits = [0; 8];
                bits.copy_from_slice(self.take(8)?);
                Value::Float(f64::from_be_bytes(bits))
            }
            _ => return Ok(false),
        };
        self.plain(value);
        Ok(true)
    }

    fn parsed<T: std::str::FromStr>(&self, line: &str) -> Done<T> {
        line.parse()
            .or_else(|_| self.fail(format!("`{line}` is not a number")))
    }

    /// Runs instructions that push text or bytes.
    fn text_or_bytes(&mut self, op: u8) -> Done<bool> {
        let value = match op {
            0x8c | b'U' => self.text(1)?,
            b'X' | b'T' => self.text(4)?,
            0x8d => self.text(8)?,
            b'V' => Value::Text(self.line()?.into()),
            b'S' => Value::Text(self.line()?.trim_matches(['\'', '"']).into()),
            b'C' => Value::Bytes(self.sized(1)?.into()),
            b'B' => Value::Bytes(self.sized(4)?.into()),
            0x8e | 0x96 => Value::Bytes(self.sized(8)?.into()),
            _ => return Ok(false),
        };
        self.plain(value);
        Ok(true)
    }

    /// Runs instructions that make or extend a list, tuple, set or dictionary.
    fn container(&mut self, op: u8) -> Done<bool> {
        match op {
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
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Runs instructions that store a value in the memo, or push one from it.
    fn memoize_or_recall(&mut self, op: u8) -> Done<bool> {
        let at = match op {
            b'q' | b'h' => self.number(1)? as usize,
            b'r' | b'j' => self.number(4)? as usize,
            0x94 => self.memo.len(),
            b'p' | b'g' => match self.line()?.parse() {
                Ok(at) => at,
                Err(_) => return self.fail("a memo number is not a number"),
            },
            _ => return Ok(false),
        };
        match op {
            b'h' | b'j' | b'g' => self.recall(at)?,
            _ => self.remember(at)?,
        }
        Ok(true)
    }

    /// Runs instructions that describe an object of a known class; `start` is the position of the
    /// instruction.
    fn object(&mut self, op: u8, start: usize) -> Done<bool> {
        match op {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.class(start, format!("{module}.{name}"))?;
            }
            _ if self.known.is_empty() => return Ok(false),
            0x93 => {
                let (name, module) = (self.popped_text()?, self.popped_text()?);
                self.class(start, format!("{module}.{name}"))?;
            }
            b'R' | 0x81 => self.call()?,
            b'b' => self.state()?,
            b'Q' => {
                let id = self.pop()?;
                let args = self.nodes.len();
                self.nodes.push(Node::List(vec![id]));
                self.push(Node::Object {
                    class: PERSISTENT.into(),
                    args: Some(args),
                    state: None,
                });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns the error for an instruction that is not supported.
    fn refuse<T>(&self, op: u8) -> Done<T> {
        match op {
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
                self.fail("it would import or call something: a pickle with code is not read")
            }
            other => self.fail(format!(
                "instruction {other:#04x} is not known: this is not a pickle, or it is damaged"
            )),
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
}
