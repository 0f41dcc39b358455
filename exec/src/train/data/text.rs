//! Tokenization of texts with the tokenizer of a published model.

use super::{DataError, Tokens};
use std::path::{Path, PathBuf};

/// Name of the tokenizer's file in folders of published models.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Returns the tokenizer in the folder of a text, if there is one.
#[must_use]
pub fn tokenizer_next_to(text: &Path) -> Option<PathBuf> {
    let path = text.with_file_name(TOKENIZER);
    (path != text && path.is_file()).then_some(path)
}

impl Tokens {
    /// Tokenizes a whole UTF-8 text at once, without special tokens at its ends.
    ///
    /// # Errors
    /// Returns [`DataError::Read`] if the text cannot be read, [`DataError::Tokenizer`] if the
    /// tokenizer cannot be used, and [`DataError::NoTokenizers`] in a build without tokenizers.
    pub fn of_text(text: &Path, tokenizer: &Path) -> Result<Self, DataError> {
        let words = std::fs::read_to_string(text).map_err(|error| DataError::Read {
            path: text.to_owned(),
            error,
        })?;
        let ids = encode(&words, tokenizer)?;
        let name = format!("{} through {}", text.display(), tokenizer.display());
        Ok(Self::of_ids(name, &ids))
    }
}

#[cfg(feature = "tokenizers")]
fn encode(text: &str, tokenizer: &Path) -> Result<Vec<u32>, DataError> {
    let fault = |e: tokenizers::Error| DataError::Tokenizer {
        path: tokenizer.to_owned(),
        reason: e.to_string(),
    };
    let made = tokenizers::Tokenizer::from_file(tokenizer).map_err(fault)?;
    let encoded = made.encode_fast(text, false).map_err(fault)?;
    Ok(encoded.get_ids().to_vec())
}

#[cfg(not(feature = "tokenizers"))]
fn encode(_: &str, tokenizer: &Path) -> Result<Vec<u32>, DataError> {
    Err(DataError::NoTokenizers {
        path: tokenizer.to_owned(),
    })
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::*;

    /// A byte-level BPE tokenizer with four merges, which splits like GPT-2's.
    const BYTE_LEVEL: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"a": 0, "b": 1, "Ġ": 2, "Ċ": 3, "ab": 4, "Ġab": 5, "abab": 6, "Ġa": 7},
            "merges": ["a b", "Ġ ab", "ab ab", "Ġ a"]
        }
    }"#;

    #[test]
    fn a_text_becomes_the_tokens_of_its_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let text = path("a.txt");
        std::fs::write(&text, "abab ab a\nb").unwrap();
        assert_eq!(tokenizer_next_to(&text), None);
        std::fs::write(path(TOKENIZER), BYTE_LEVEL).unwrap();
        let tokenizer = tokenizer_next_to(&text).unwrap();
        // A tokenizer is not the tokenizer of itself.
        assert_eq!(tokenizer_next_to(&tokenizer), None);
        let tokens = Tokens::of_text(&text, &tokenizer).unwrap();
        let ids: Vec<u32> = (0..tokens.len() as usize)
            .map(|i| tokens.token(i))
            .collect();
        assert_eq!(ids, [6, 5, 7, 3, 1]);
        assert!(tokens.name().ends_with("tokenizer.json"));
    }

    #[test]
    fn what_is_no_tokenizer_or_no_text_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("a.txt"), "ab").unwrap();
        std::fs::write(path("b.txt"), [0xff, 0xfe]).unwrap();
        std::fs::write(path("t.json"), "{}").unwrap();
        let of = |text: &str, tokenizer: &str| {
            let e = Tokens::of_text(&path(text), &path(tokenizer)).unwrap_err();
            e.to_string()
        };
        assert!(of("a.txt", "t.json").contains("t.json: no tokenizer"));
        assert!(of("a.txt", "none.json").contains("none.json"));
        assert!(of("b.txt", "t.json").contains("b.txt"));
        assert!(of("none.txt", "t.json").contains("none.txt"));
    }
}
