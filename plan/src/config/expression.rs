//! Regular expressions over module paths, as PEFT matches them.

use regex::Regex;
use serde::{Serialize, Serializer};

/// A regular expression over paths of modules.
#[derive(Clone, Debug)]
pub struct Expression {
    /// As it was written.
    text: String,
    /// With what PEFT adds to it.
    compiled: Regex,
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.compiled.as_str() == other.compiled.as_str()
    }
}

impl Serialize for Expression {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.text)
    }
}

impl Expression {
    /// Makes an expression for whole paths (`re.fullmatch(text, path)`).
    ///
    /// # Errors
    /// If the text is not a regular expression.
    pub(crate) fn of_path(text: &str) -> Result<Self, String> {
        Self::new(text, &format!("^(?:{text})$"))
    }

    /// Makes an expression for the last components of paths (`get_pattern_key` of PEFT:
    /// `re.match(rf"(.*\.)?({text})$", path)`).
    ///
    /// # Errors
    /// If the text is not a regular expression.
    pub(crate) fn of_ending(text: &str) -> Result<Self, String> {
        Self::new(text, &format!(r"^(?:.*\.)?(?:{text})$"))
    }

    /// Makes an expression for the name of a list of layers, whose number follows it in paths
    /// (`layers_pattern` in `check_target_module_exists` of PEFT).
    ///
    /// # Errors
    /// If the text is not a regular expression.
    pub(crate) fn of_list(text: &str) -> Result<Self, String> {
        Self::new(
            text,
            &format!(r"^(?:|.*?\.)(?:{text})\.(?<number>[0-9]+)\."),
        )
    }

    fn new(text: &str, whole: &str) -> Result<Self, String> {
        // Alone, so that no parenthesis closes one of ours.
        let compiled = Regex::new(text).and_then(|_| Regex::new(whole));
        let compiled = compiled.map_err(|_| {
            format!("`{text}` is not a regular expression (without references and look-around)")
        })?;
        Ok(Self {
            text: text.to_owned(),
            compiled,
        })
    }

    /// Returns the expression as it was written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether it matches a path.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        self.compiled.is_match(path)
    }

    /// Returns the number after the list that it names in a path.
    #[must_use]
    pub(crate) fn number_in(&self, path: &str) -> Option<u64> {
        let found = self.compiled.captures(path)?;
        found.name("number")?.as_str().parse().ok()
    }
}

/// Values for the paths that expressions match (`rank_pattern` and `alpha_pattern` of PEFT), in the
/// order in which they are tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Patterns<T>(Vec<(Expression, T)>);

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Serialize> Serialize for Patterns<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(expression, value)| (expression, value)))
    }
}

impl<T: Copy> Patterns<T> {
    /// Makes the table from expressions for the ends of paths.
    ///
    /// # Errors
    /// If a text is not a regular expression.
    pub fn new<'t>(entries: impl IntoIterator<Item = (&'t str, T)>) -> Result<Self, String> {
        let entries = entries.into_iter();
        let compiled = entries.map(|(text, value)| Ok((Expression::of_ending(text)?, value)));
        compiled.collect::<Result<_, String>>().map(Self)
    }

    /// Returns whether there are no expressions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the value of the first expression that matches one of the paths.
    #[must_use]
    pub fn of(&self, paths: &[&str]) -> Option<T> {
        let matches = |e: &Expression| paths.iter().any(|path| e.matches(path));
        let found = self.0.iter().find(|(expression, _)| matches(expression));
        found.map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: &str = "model.layers.11.self_attn.q_proj";

    /// The answers are those of `get_pattern_key` of PEFT 0.21.
    #[test]
    fn endings_match_as_in_peft() {
        for text in [
            "q_proj",
            "self_attn.q_proj",
            r"layers\.\d+\.self_attn\.(q|k)_proj",
            ".*q_proj",
            "^model.layers.11.self_attn.q_proj",
            "k_proj|q_proj",
            "layers.1[0-9].*",
        ] {
            assert!(Expression::of_ending(text).unwrap().matches(Q), "{text}");
        }
        for text in [
            "proj",
            "q",
            "^layers.11.*",
            "layers.1.self_attn.q_proj",
            "k_proj",
        ] {
            assert!(!Expression::of_ending(text).unwrap().matches(Q), "{text}");
        }
    }

    #[test]
    fn whole_paths_match_in_full() {
        for (text, holds) in [
            ("q_proj", false),
            (".*q_proj", true),
            (r".*\.1\d\..*", true),
        ] {
            assert_eq!(
                Expression::of_path(text).unwrap().matches(Q),
                holds,
                "{text}"
            );
        }
    }

    #[test]
    fn lists_have_the_number_after_them() {
        let number = |text: &str, path: &str| Expression::of_list(text).unwrap().number_in(path);
        assert_eq!(number("layers", Q), Some(11));
        assert_eq!(number("h", Q), None);
        assert_eq!(number("h", "h.3.attn.c_attn"), Some(3));
        // The first number counts.
        assert_eq!(
            number("layers|experts", "model.layers.1.mlp.experts.7.w1"),
            Some(1)
        );
    }

    #[test]
    fn the_first_expression_counts() {
        let table = Patterns::new([("layers.0.*", 2), ("q_proj", 8)]).unwrap();
        assert_eq!(table.of(&["model.layers.0.self_attn.q_proj"]), Some(2));
        assert_eq!(table.of(&[Q]), Some(8));
        assert_eq!(table.of(&["model.layers.1.mlp.up_proj"]), None);
        let json = serde_json::to_string(&table).unwrap();
        assert_eq!(json, r#"{"layers.0.*":2,"q_proj":8}"#);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["(", "q_proj)(", "(?=q)", "[a"] {
            let message = Expression::of_ending(text).unwrap_err();
            assert!(message.contains("not a regular expression"), "{message}");
        }
    }
}
