//! Options whose values are keywords.

/// An option whose values are keywords; see `words!`.
pub(crate) trait Words: Copy + 'static {
    /// All values.
    const ALL: &'static [Self];

    /// Returns the keyword of the value in scenario files.
    fn word(self) -> &'static str;

    /// Returns the value of a keyword.
    fn of_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|v| v.word() == word)
    }
}

/// Gives an enum the keywords of scenario files. The key table, the reader and JSON use them.
macro_rules! words {
    ($type:ident { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $type {
            /// All keywords in scenario files.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// Returns the keyword of the value in scenario files.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl $crate::config::Words for $type {
            const ALL: &'static [Self] = &[$(Self::$variant),+];

            fn word(self) -> &'static str {
                self.name()
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let word = <String as serde::Deserialize>::deserialize(from)?;
                let found = <Self as $crate::config::Words>::of_word(&word);
                found.ok_or_else(|| serde::de::Error::unknown_variant(&word, Self::WORDS))
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.name())
            }
        }
    };
}
