//! Writes sections of a profile.

use super::format::{IfAbsent, Section};
use std::fmt::{Display, Write};

/// A section that is being written. Its keys are written in the order of the table.
#[derive(Debug)]
pub struct SectionText {
    section: &'static Section,
    values: Vec<(&'static str, String, String)>,
}

impl SectionText {
    /// Starts a section.
    ///
    /// # Panics
    /// Panics if the format has no such section.
    #[must_use]
    pub fn new(path: &'static str) -> Self {
        let section = Section::of(path);
        Self {
            section: section.unwrap_or_else(|| panic!("profiles have no [{path}]")),
            values: Vec::new(),
        }
    }

    /// Sets a key to a TOML value.
    ///
    /// # Panics
    /// Panics if the section has no such key.
    #[must_use]
    pub fn set(self, key: &'static str, value: impl Display) -> Self {
        self.explained(key, value, "")
    }

    /// Sets a key to a string.
    ///
    /// # Panics
    /// Panics if the section has no such key.
    #[must_use]
    pub fn text(self, key: &'static str, value: impl Display) -> Self {
        // The strings of profiles consist of words and numbers. Quotes would end them.
        let value = value.to_string().replace(['"', '\\'], "'");
        self.set(key, format_args!("\"{value}\""))
    }

    /// Sets a key to a value, with a comment on the line before it.
    ///
    /// # Panics
    /// Panics if the section has no such key.
    #[must_use]
    pub fn explained(mut self, key: &'static str, value: impl Display, comment: &str) -> Self {
        let heading = self.section.heading();
        assert!(
            self.section.field(key).is_some(),
            "{heading} has no `{key}`"
        );
        self.values
            .push((key, value.to_string(), comment.to_owned()));
        self
    }

    /// Appends the section to a profile.
    ///
    /// # Panics
    /// Panics if a key has neither a value nor a default.
    pub fn write(&self, out: &mut String) {
        if !self.section.path.is_empty() {
            let _ = writeln!(out, "\n{}", self.section.heading());
        }
        for field in self.section.fields {
            match self.values.iter().find(|(key, ..)| *key == field.key) {
                Some((key, value, comment)) => {
                    if !comment.is_empty() {
                        let _ = writeln!(out, "# {comment}");
                    }
                    let _ = writeln!(out, "{key} = {value}");
                }
                None => assert!(
                    field.default != IfAbsent::Required,
                    "{} needs `{}`",
                    self.section.heading(),
                    field.key
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SectionText;

    #[test]
    fn keys_are_written_in_the_order_of_the_table() {
        let mut out = String::new();
        SectionText::new("power")
            .set("arithmetic_slope", 0.5)
            .explained("arithmetic_share", "0.25", "Fitted.")
            .text("source", "\"here\"")
            .write(&mut out);
        assert_eq!(
            out,
            "\n[power]\nsource = \"'here'\"\n# Fitted.\narithmetic_share = 0.25\narithmetic_slope = 0.5\n"
        );
    }

    #[test]
    #[should_panic(expected = "[power] needs `arithmetic_share`")]
    fn a_key_without_a_default_may_not_be_left_out() {
        SectionText::new("power")
            .text("source", "s")
            .write(&mut String::new());
    }
}
