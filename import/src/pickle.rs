//! Reads pickles of plain data: numbers, text, lists, tuples, dictionaries, sets and bytes.
//!
//! A pickle is a program. [`read`] supports only the instructions that build plain values, and
//! rejects those that import or call something (`GLOBAL`, `REDUCE`, `BUILD` and similar ones).
//! [`read_objects`] returns a description of each object of the named classes, and calls nothing
//! either. Shared values stay shared in the result.

mod instructions;
mod machine;
mod make;
mod write;

pub use write::write;

use machine::Machine;
use std::fmt;
use std::rc::Rc;

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// Integer. Larger integers keep only their low 64 bits.
    Int(i64),
    /// Floating-point number.
    Float(f64),
    /// Text.
    Text(Rc<str>),
    /// Bytes.
    Bytes(Rc<[u8]>),
    /// List, tuple or set; all three are read as a list.
    List(Rc<Vec<Value>>),
    /// Tuple, to be written.
    Tuple(Rc<Vec<Value>>),
    /// Dictionary, in insertion order.
    Dict(Rc<Vec<(Value, Value)>>),
    /// Object: its description, since it is not built.
    Object(Rc<Object>),
}

/// The description of an object in a pickle.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// Class or function with its module, such as `torch.Size`; [`PERSISTENT`] for an object that
    /// is stored outside the pickle.
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
    pub(crate) fn from_json(value: &serde_json::Value) -> Self {
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
/// Fails as [`read`] does, and if a class or function is not among the known ones.
pub fn read_objects(bytes: &[u8], known: &[&str]) -> Result<Value, PickleError> {
    Machine::new(bytes, known).run()
}

#[cfg(test)]
mod tests {
    use super::machine::long;
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
