//! A configuration as a tree of values, each with its position in the file.

use shardlab_plan::scenario::Position;
use std::fmt;

/// A value and its position.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub(crate) at: Position,
    pub(crate) value: Value,
}

/// What a configuration can contain.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    /// Entries in the order of the file, with unique names.
    Map(Vec<(Name, Node)>),
}

/// The name of a map entry and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) text: String,
    pub(crate) at: Position,
}

/// Maximum number of characters of a value that messages show.
const SHOWN: usize = 40;

impl Node {
    pub(crate) fn new(at: Position, value: Value) -> Self {
        Self { at, value }
    }

    /// Returns whether another value is equal, regardless of positions.
    pub(crate) fn same_as(&self, other: &Self) -> bool {
        let (mut a, mut b) = (self.clone(), other.clone());
        let start = Position { line: 1, column: 1 };
        a.move_to(start);
        b.move_to(start);
        a == b
    }

    /// Sets the position of a value and of all values in it.
    pub(crate) fn move_to(&mut self, at: Position) {
        self.at = at;
        match &mut self.value {
            Value::List(items) => items.iter_mut().for_each(|node| node.move_to(at)),
            Value::Map(entries) => {
                for (name, node) in entries {
                    name.at = at;
                    node.move_to(at);
                }
            }
            _ => {}
        }
    }

    /// Returns the entries of a map; empty for other values.
    pub(crate) fn entries(&self) -> &[(Name, Self)] {
        match &self.value {
            Value::Map(entries) => entries,
            _ => &[],
        }
    }

    /// Returns the value at a path of names.
    pub(crate) fn get(&self, path: &str) -> Option<&Self> {
        path.split('.').try_fold(self, |node, name| {
            let found = node.entries().iter().find(|(n, _)| n.text == name);
            found.map(|(_, node)| node)
        })
    }

    /// Returns whether the tree has a value at a path.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.get(path).is_some()
    }

    /// Returns a scalar as text.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a text, or the texts of a list joined by spaces.
    pub(crate) fn words(&self) -> Option<String> {
        match &self.value {
            Value::Text(text) => Some(text.clone()),
            Value::List(items) => {
                let words: Option<Vec<&str>> = items.iter().map(Self::text).collect();
                words.map(|w| w.join(" "))
            }
            _ => None,
        }
    }

    /// Returns a boolean, which may also be written as text.
    ///
    /// # Errors
    /// Returns a message that says what was expected.
    pub(crate) fn truth(&self) -> Result<bool, String> {
        match &self.value {
            Value::Bool(b) => Ok(*b),
            Value::Integer(0) => Ok(false),
            Value::Integer(1) => Ok(true),
            Value::Text(text) => match text.to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" | "1" => Ok(true),
                "false" | "no" | "off" | "0" => Ok(false),
                _ => Err(self.expected("true or false")),
            },
            _ => Err(self.expected("true or false")),
        }
    }

    /// Returns an integer, which may also be written as text or as a float (`5e8`).
    ///
    /// # Errors
    /// Returns a message that says what was expected.
    pub(crate) fn integer(&self) -> Result<i64, String> {
        const EXACT: f64 = 9_007_199_254_740_992.0;
        match &self.value {
            Value::Integer(i) => Ok(*i),
            Value::Float(f) if f.fract() == 0.0 && f.abs() <= EXACT => Ok(*f as i64),
            Value::Text(text) => text.trim().parse().map_err(|_| self.expected("an integer")),
            _ => Err(self.expected("an integer")),
        }
    }

    /// Returns a non-negative integer.
    ///
    /// # Errors
    /// Returns a message that says what was expected.
    pub(crate) fn count(&self) -> Result<u64, String> {
        u64::try_from(self.integer()?).map_err(|_| self.expected("an integer of at least 0"))
    }

    /// Returns a finite number.
    ///
    /// # Errors
    /// Returns a message that says what was expected.
    pub(crate) fn number(&self) -> Result<f64, String> {
        let number = match &self.value {
            Value::Integer(i) => Some(*i as f64),
            Value::Float(f) => Some(*f),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        };
        number
            .filter(|n| n.is_finite())
            .ok_or_else(|| self.expected("a number"))
    }

    /// Returns the value as text: scalars in full, and the first entries of lists and maps.
    pub(crate) fn full(&self) -> String {
        match &self.value {
            Value::Null => "null".to_owned(),
            Value::Bool(b) => b.to_string(),
            Value::Integer(i) => i.to_string(),
            Value::Float(x) => format!("{x:?}"),
            Value::Text(text) => text.clone(),
            Value::List(items) => {
                let items: Vec<String> = items.iter().take(8).map(ToString::to_string).collect();
                format!("[{}]", items.join(", "))
            }
            Value::Map(entries) => {
                let names: Vec<&str> = entries.iter().take(8).map(|(n, _)| &*n.text).collect();
                format!("{{{}}}", names.join(", "))
            }
        }
    }

    /// Returns a message that says what was expected instead of this value.
    pub(crate) fn expected(&self, what: &str) -> String {
        format!("expected {what}, got `{self}`")
    }

    /// Returns whether the value is empty: null, `none`, or an empty text, list or map.
    pub(crate) fn is_unset(&self) -> bool {
        match &self.value {
            Value::Null => true,
            Value::Text(text) => {
                let text = text.trim();
                text.is_empty() || text.eq_ignore_ascii_case("none") || text == "null"
            }
            Value::List(items) => items.is_empty(),
            Value::Map(entries) => entries.is_empty(),
            _ => false,
        }
    }

    /// Returns whether another program fills in the value (DeepSpeed's `auto`).
    pub(crate) fn is_auto(&self) -> bool {
        self.text() == Some("auto")
    }
}

/// Writes a value on one line, shortened.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.full();
        let mut clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        let shown: String = clean.by_ref().take(SHOWN).collect();
        let more = if clean.next().is_some() { "…" } else { "" };
        write!(f, "{shown}{more}")
    }
}

/// Parses a plain scalar by the rules of YAML 1.1, as `PyYAML` does, and of Python's `repr`.
pub(crate) fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" | "None" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => {
            return Value::Bool(true);
        }
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => {
            return Value::Bool(false);
        }
        _ => {}
    }
    let digits = text.replace('_', "");
    let numeric = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    if numeric && !text.starts_with('_') {
        if let Ok(i) = digits.parse::<i64>() {
            return Value::Integer(i);
        }
        let is_float = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
        if digits.chars().all(is_float)
            && let Ok(f) = digits.parse::<f64>()
        {
            return Value::Float(f);
        }
    }
    Value::Text(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> Node {
        Node::new(Position { line: 1, column: 1 }, plain(text))
    }

    #[test]
    fn scalars_read_as_in_python() {
        assert_eq!(plain("1_000"), Value::Integer(1000));
        assert_eq!(plain("2e-5"), Value::Float(2e-5));
        assert_eq!(plain("-1"), Value::Integer(-1));
        assert_eq!(plain("no"), Value::Bool(false));
        assert_eq!(plain("None"), Value::Null);
        for text in ["8B", "e5", "1.2.3", "inf", "3B_full"] {
            assert_eq!(plain(text), Value::Text(text.into()), "{text}");
        }
    }

    #[test]
    fn values_convert_or_say_what_was_expected() {
        assert_eq!(node("5e8").count(), Ok(500_000_000));
        assert_eq!(
            node("1e-1").integer(),
            Err("expected an integer, got `0.1`".into())
        );
        assert!(node("-1").count().is_err() && node("x").truth().is_err());
        assert!(node("none").is_unset() && node("auto").is_auto());
        assert_eq!(node(&"a".repeat(99)).to_string().chars().count(), SHOWN + 1);
    }
}
