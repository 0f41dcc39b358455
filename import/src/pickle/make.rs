//! Makes values for writing.

use super::{Object, Value};
use std::rc::Rc;

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

/// Numbers beyond 63 bits become negative, as when they are read.
impl From<u64> for Value {
    fn from(n: u64) -> Self {
        Self::Int(n.cast_signed())
    }
}

impl Value {
    /// Returns a list.
    #[must_use]
    pub fn list(items: impl IntoIterator<Item = Self>) -> Self {
        Self::List(Rc::new(items.into_iter().collect()))
    }

    /// Returns a tuple.
    #[must_use]
    pub fn tuple(items: impl IntoIterator<Item = Self>) -> Self {
        Self::Tuple(Rc::new(items.into_iter().collect()))
    }

    /// Returns a dictionary.
    #[must_use]
    pub fn dict<K: Into<Self>>(pairs: impl IntoIterator<Item = (K, Self)>) -> Self {
        let pairs = pairs.into_iter().map(|(key, value)| (key.into(), value));
        Self::Dict(Rc::new(pairs.collect()))
    }

    /// Returns a class or function, with its module: `torch.float32`.
    #[must_use]
    pub fn class(name: &str) -> Self {
        object(name, None, None)
    }

    /// Returns the result of a call of a class or function.
    #[must_use]
    pub fn call(name: &str, args: Vec<Self>) -> Self {
        object(name, Some(args), None)
    }

    /// Returns an instance of a class that is made without a call of its initializer.
    #[must_use]
    pub fn instance(class: &str, state: Self) -> Self {
        object(class, Some(Vec::new()), Some(state))
    }
}

fn object(class: &str, args: Option<Vec<Value>>, state: Option<Value>) -> Value {
    Value::Object(Rc::new(Object {
        class: class.into(),
        args,
        state,
    }))
}
