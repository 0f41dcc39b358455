//! Writes pickles (protocol 2). Python reads plain data without importing anything.

use super::{Object, PERSISTENT, Value};
use std::collections::HashMap;
use std::rc::Rc;

/// Writes a value as a pickle. Equal texts are written only once.
#[must_use]
pub fn write(value: &Value) -> Vec<u8> {
    let mut writer = Writer {
        out: vec![0x80, 2],
        known: HashMap::new(),
    };
    writer.value(value);
    writer.out.push(b'.');
    writer.out
}

struct Writer {
    out: Vec<u8>,
    /// Memo numbers of texts.
    known: HashMap<Rc<str>, u32>,
}

impl Writer {
    fn value(&mut self, value: &Value) {
        match value {
            Value::None => self.out.push(b'N'),
            Value::Bool(true) => self.out.push(0x88),
            Value::Bool(false) => self.out.push(0x89),
            Value::Int(n) => self.int(*n),
            Value::Float(x) => {
                self.out.push(b'G');
                self.out.extend(x.to_be_bytes());
            }
            Value::Text(text) => self.text(text),
            // Protocol 2 has no bytes, so they are written as a list of numbers.
            Value::Bytes(bytes) => {
                let items = bytes.iter().map(|b| Value::Int(i64::from(*b)));
                self.list(&items.collect::<Vec<_>>());
            }
            Value::List(items) => self.list(items),
            Value::Tuple(items) => self.tuple(items),
            Value::Dict(pairs) => {
                self.out.extend(b"}(");
                for (key, value) in pairs.iter() {
                    self.value(key);
                    self.value(value);
                }
                self.out.push(b'u');
            }
            Value::Object(object) => self.object(object),
        }
    }

    fn object(&mut self, object: &Object) {
        let args = object.args.as_deref();
        if &*object.class == PERSISTENT {
            for id in args.unwrap_or_default() {
                self.value(id);
            }
            self.out.push(b'Q');
            return;
        }
        let (module, name) = object.class.rsplit_once('.').unwrap_or(("", &object.class));
        self.out.extend(format!("c{module}\n{name}\n").bytes());
        if let Some(args) = args {
            self.tuple(args);
            // An object whose state is set afterwards is created without a call of its initializer.
            let made = object.state.is_some() && args.is_empty();
            self.out.push(if made { 0x81 } else { b'R' });
        }
        if let Some(state) = &object.state {
            self.value(state);
            self.out.push(b'b');
        }
    }

    fn tuple(&mut self, items: &[Value]) {
        self.out.push(b'(');
        for item in items {
            self.value(item);
        }
        self.out.push(b't');
    }

    fn list(&mut self, items: &[Value]) {
        self.out.extend(b"](");
        for item in items {
            self.value(item);
        }
        self.out.push(b'e');
    }

    fn int(&mut self, n: i64) {
        match i32::try_from(n) {
            Ok(n) => {
                self.out.push(b'J');
                self.out.extend(n.to_le_bytes());
            }
            Err(_) => {
                self.out.extend([0x8a, 8]);
                self.out.extend(n.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &Rc<str>) {
        if let Some(number) = self.known.get(text) {
            self.out.push(b'j');
            self.out.extend(number.to_le_bytes());
            return;
        }
        // Texts beyond 4 GiB do not occur in these files.
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.out.push(b'X');
        self.out.extend(length.to_le_bytes());
        self.out.extend(&text.as_bytes()[..length as usize]);
        let number = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        self.known.insert(Rc::clone(text), number);
        self.out.push(b'r');
        self.out.extend(number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            (-1e9..1e9).prop_map(Value::Float),
            ".{0,9}".prop_map(|t| Value::Text(t.as_str().into())),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            let key = "[a-c]{1,3}".prop_map(|t| Value::Text(t.as_str().into()));
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6)
                    .prop_map(|items| Value::List(Rc::new(items))),
                prop::collection::vec((key, inner), 0..6)
                    .prop_map(|pairs| Value::Dict(Rc::new(pairs))),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(value in plain()) {
            prop_assert_eq!(super::super::read(&write(&value)).unwrap(), value);
        }
    }
}
