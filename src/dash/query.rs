//! Filters for all lists: words, and comparisons of named fields.
//!
//! `llama step<100 fits=yes !fsdp2` keeps items that contain `llama`, have a `step` below 100 and
//! `fits` equal to `yes`, and do not contain `fsdp2`. Case does not matter.

/// An item that a filter can examine.
pub trait Fields {
    /// Returns all text that is searched for words.
    fn text(&self) -> String;
    /// Returns the value of a named field; `None` if there is no such field.
    fn field(&self, name: &str) -> Option<String>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compare {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    More,
    MoreOrEqual,
}

/// Longest first, so that `<=` is not read as `<` and `=`.
const OPERATORS: [(&str, Compare); 6] = [
    ("<=", Compare::LessOrEqual),
    (">=", Compare::MoreOrEqual),
    ("!=", Compare::NotEqual),
    ("<", Compare::Less),
    (">", Compare::More),
    ("=", Compare::Equal),
];

#[derive(Clone, Debug, PartialEq)]
enum Term {
    Has(String),
    HasNot(String),
    Field {
        name: String,
        compare: Compare,
        value: String,
    },
}

/// A parsed filter. Every text is valid. Unfinished comparisons are ignored, so that the list does
/// not flicker while typing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Query(Vec<Term>);

impl Query {
    /// Parses a filter.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        Self(text.split_whitespace().filter_map(term).collect())
    }

    /// Returns whether an item passes the filter.
    #[must_use]
    pub fn keeps(&self, item: &impl Fields) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let text = item.text().to_lowercase();
        self.0.iter().all(|term| match term {
            Term::Has(word) => text.contains(word),
            Term::HasNot(word) => !text.contains(word),
            Term::Field {
                name,
                compare,
                value,
            } => item
                .field(name)
                .is_some_and(|found| holds(&found.to_lowercase(), *compare, value)),
        })
    }

    /// Returns the first compared field that is not known.
    #[must_use]
    pub fn unknown(&self, known: impl Fn(&str) -> bool) -> Option<&str> {
        self.0.iter().find_map(|term| match term {
            Term::Field { name, .. } if !known(name) => Some(name.as_str()),
            _ => None,
        })
    }
}

/// Splits an unfinished comparison: everything before its value, the name of the field, and the
/// value, which may be empty.
#[must_use]
pub fn unfinished(word: &str) -> Option<(&str, &str, &str)> {
    let (sign, _) = OPERATORS.iter().find(|(sign, _)| word.contains(sign))?;
    let (name, value) = word.split_once(sign)?;
    Some((&word[..name.len() + sign.len()], name, value))
}

/// Returns a sort key for a value: numbers before text, by size.
#[must_use]
pub fn rank(text: &str) -> (u8, u64, String) {
    match text.parse::<f64>() {
        // The bits of non-negative numbers have the same order as the numbers.
        Ok(n) if n >= 0.0 => (0, n.to_bits(), String::new()),
        _ => (1, 0, text.to_owned()),
    }
}

fn term(word: &str) -> Option<Term> {
    let word = word.to_lowercase();
    let split = OPERATORS.iter().find_map(|(sign, compare)| {
        let (name, value) = word.split_once(sign)?;
        (!name.is_empty()).then(|| (name.to_owned(), *compare, value.to_owned()))
    });
    if let Some((name, compare, value)) = split {
        return (!value.is_empty()).then_some(Term::Field {
            name,
            compare,
            value,
        });
    }
    match word.strip_prefix('!') {
        Some("") => None,
        Some(rest) => Some(Term::HasNot(rest.to_owned())),
        None => Some(Term::Has(word)),
    }
}

fn holds(found: &str, compare: Compare, value: &str) -> bool {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    if let (Some(a), Some(b)) = (number(found), number(value)) {
        return match compare {
            Compare::Equal => a == b,
            Compare::NotEqual => a != b,
            Compare::Less => a < b,
            Compare::LessOrEqual => a <= b,
            Compare::More => a > b,
            Compare::MoreOrEqual => a >= b,
        };
    }
    match compare {
        Compare::Equal => found == value,
        Compare::NotEqual => found != value,
        // Users would not expect text to be ordered.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Item;

    impl Fields for Item {
        fn text(&self) -> String {
            "Llama3-8B native".into()
        }

        fn field(&self, name: &str) -> Option<String> {
            match name {
                "step" => Some("99.5".into()),
                "fits" => Some("yes".into()),
                _ => None,
            }
        }
    }

    fn keeps(text: &str) -> bool {
        Query::parse(text).keeps(&Item)
    }

    #[test]
    fn fields_that_nobody_knows_are_found_and_unfinished_ones_taken_apart() {
        let unknown = |text: &str| {
            let query = Query::parse(text);
            let found = query.unknown(|n| n == "step");
            found.map(str::to_owned)
        };
        assert_eq!(unknown("llama step<3 bogus>=2").as_deref(), Some("bogus"));
        assert_eq!(unknown("step<3 bogus="), None, "it is not finished");
        assert_eq!(unfinished("kind="), Some(("kind=", "kind", "")));
        assert_eq!(unfinished("step<=3"), Some(("step<=", "step", "3")));
        assert_eq!(unfinished("kind"), None);
        let mut all = ["b", "10", "9.5", "a"];
        all.sort_by_key(|t| rank(t));
        assert_eq!(all, ["9.5", "10", "a", "b"]);
    }

    #[test]
    fn words_and_comparisons_are_joined_by_and() {
        for yes in [
            "",
            "llama",
            "LLAMA 8b",
            "step<100",
            "step<=99.5",
            "step>=99.5",
            "fits=yes",
            "fits!=no",
            "!fsdp2",
            "llama step>99 !gpt",
            "step<",
            "!",
            "step!=3",
        ] {
            assert!(keeps(yes), "{yes}");
        }
        for no in [
            "gpt",
            "step<99.5",
            "step>99.5",
            "fits=no",
            "!llama",
            "llama step>100",
            "unknown=3",
            "fits<zz",
        ] {
            assert!(!keeps(no), "{no}");
        }
    }
}
