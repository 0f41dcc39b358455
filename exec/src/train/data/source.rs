//! Token streams.

use super::Sequence;
pub use shardlab_plan::config::TokenWidth;
use std::path::{Path, PathBuf};

/// Minimum length of a synthetic stream, in tokens.
const SYNTHETIC: u64 = 1 << 18;
/// Number of candidates that may follow a pair of tokens.
const SUCCESSORS: u64 = 4;
/// Number of classes of the second-last token, on which the next token depends.
const CLASSES: u64 = 2;

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// The file's size is not a multiple of the size of a token.
    #[error("{}: {bytes} bytes are not a whole number of {width}-byte tokens", path.display())]
    Torn {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes.
        bytes: usize,
        /// Bytes per token.
        width: usize,
    },
    /// Too few tokens for one window.
    #[error("{name}: {len} tokens are too few for windows of {seq_len} + 1 tokens; at least {} are needed", seq_len + 2)]
    Short {
        /// Name of the stream.
        name: String,
        /// Number of tokens.
        len: u64,
        /// Tokens per sample.
        seq_len: u64,
    },
    /// A token is outside of the vocabulary.
    #[error(
        "{name}: token {token} at position {position} is outside the vocabulary of {vocab}; is --data-dtype right?"
    )]
    Vocabulary {
        /// Name of the stream.
        name: String,
        /// Token.
        token: u32,
        /// Position of the token.
        position: usize,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// A tokenizer cannot be used.
    #[error("{}: no tokenizer: {reason}", path.display())]
    Tokenizer {
        /// Path of its file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// This build has no support for tokenizers.
    #[error(
        "{}: this binary was built without feature `tokenizers`; --data-dtype uint8 takes the bytes of a text as tokens",
        path.display()
    )]
    NoTokenizers {
        /// Path of the tokenizer's file.
        path: PathBuf,
    },
    /// The model has no vocabulary.
    #[error("this model family has no tokens: its data is generated from the seed")]
    NoTokens,
    /// The model has an input that samples do not hold.
    #[error(
        "`exec` has no data for the input `{input}` of this model (family {family}): its samples hold {}; plan, check, sim and explain take the model",
        held.join(" and ")
    )]
    NoInput {
        /// Name of the input.
        input: String,
        /// Family of the model.
        family: &'static str,
        /// Inputs that samples hold.
        held: &'static [&'static str],
    },
    /// The model has an operation that only predictions know.
    #[error(
        "`exec` cannot run `{0}`: it has no kernel for it; plan, check, sim and explain take the model"
    )]
    PricedOnly(&'static str),
    /// Sequences have documents of their own, which the attention does not read.
    #[error(
        "`exec` cannot run `{0}` with the documents of a file: it reads no documents of each sequence; plan, check, sim and explain take the model, and train.document_lengths = {{ mean = N, std = N }} trains with lengths like these"
    )]
    DocumentsOfData(&'static str),
    /// The plan has the sizes of the model, but not all of its mathematics.
    #[error(
        "`exec` cannot run `{model_type}`: {what}; plan, check, sim and explain take the model"
    )]
    Approximated {
        /// `model_type` of transformers.
        model_type: String,
        /// Why its results would differ.
        what: &'static str,
    },
    /// The model has an unknown constant.
    #[error("the model has an unknown constant `{0}`")]
    UnknownConst(String),
}

/// A stream of tokens, as stored.
#[derive(Clone, Debug)]
pub struct Tokens {
    name: String,
    pub(super) bytes: std::sync::Arc<[u8]>,
    width: TokenWidth,
}

impl Tokens {
    /// Reads a file.
    ///
    /// # Errors
    /// Returns [`DataError::Read`] if the file cannot be read, and [`DataError::Torn`] if it ends
    /// within a token.
    pub fn read(path: &Path, width: TokenWidth) -> Result<Self, DataError> {
        let bytes = std::fs::read(path).map_err(|error| DataError::Read {
            path: path.to_owned(),
            error,
        })?;
        if bytes.len() % width.bytes() != 0 {
            return Err(DataError::Torn {
                path: path.to_owned(),
                bytes: bytes.len(),
                width: width.bytes(),
            });
        }
        Ok(Self {
            name: path.display().to_string(),
            bytes: bytes.into(),
            width,
        })
    }

    /// Creates a stream of given tokens.
    pub(super) fn of_ids(name: String, ids: &[u32]) -> Self {
        let bytes: Vec<u8> = ids.iter().flat_map(|i| i.to_le_bytes()).collect();
        Self {
            name,
            bytes: bytes.into(),
            width: TokenWidth::U32,
        }
    }

    /// Generates a language with learnable structure: few tokens are frequent, and the next token
    /// depends on the last one and on the class of the one before, with `SUCCESSORS` candidates of
    /// decreasing probability.
    #[must_use]
    pub fn synthetic(vocab: u64, seq_len: u64, seed: u64) -> Self {
        let len = SYNTHETIC.max(64 * (seq_len + 1));
        let mut grammar = Sequence::new(seed, "grammar");
        let mut draws = Sequence::new(seed, "stream");
        let (mut before, mut last) = (0u64, 0u64);
        let mut bytes = Vec::with_capacity(4 * len as usize);
        for _ in 0..len {
            let pick = match draws.uniform() {
                u if u < 0.6 => 0,
                u if u < 0.8 => 1,
                u if u < 0.92 => 2,
                _ => 3,
            };
            grammar.seek((last * CLASSES + before % CLASSES) * SUCCESSORS + pick);
            // The cube makes low tokens frequent.
            let next = (grammar.uniform().powi(3) * vocab as f64) as u64;
            (before, last) = (last, next.min(vocab - 1));
            bytes.extend_from_slice(&(last as u32).to_le_bytes());
        }
        Self {
            name: "synthetic".to_owned(),
            bytes: bytes.into(),
            width: TokenWidth::U32,
        }
    }

    /// Returns the source of the stream.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a fingerprint, which is equal for equal tokens in equal files.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        format!("blake3 {}", blake3::hash(&self.bytes).to_hex())
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> u64 {
        (self.bytes.len() / self.width.bytes()) as u64
    }

    /// Returns whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn token(&self, i: usize) -> u32 {
        match self.width {
            TokenWidth::U8 => u32::from(self.bytes[i]),
            TokenWidth::U16 => u32::from(u16::from_le_bytes([
                self.bytes[2 * i],
                self.bytes[2 * i + 1],
            ])),
            TokenWidth::U32 => {
                let b = &self.bytes[4 * i..4 * i + 4];
                u32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
        }
    }

    /// Checks the length and the vocabulary.
    ///
    /// # Errors
    /// Returns [`DataError::Short`] if there is not one whole sequence, and
    /// [`DataError::Vocabulary`] for a token outside the vocabulary.
    pub(crate) fn suits(&self, vocab: u64, seq_len: u64) -> Result<(), DataError> {
        if self.len() < seq_len + 2 {
            return Err(DataError::Short {
                name: self.name.clone(),
                len: self.len(),
                seq_len,
            });
        }
        match (0..self.len() as usize).find(|i| u64::from(self.token(*i)) >= vocab) {
            None => Ok(()),
            Some(position) => Err(DataError::Vocabulary {
                name: self.name.clone(),
                token: self.token(position),
                position,
                vocab,
            }),
        }
    }

    /// Returns the number of windows of the stream with disjoint inputs.
    #[must_use]
    pub fn windows(&self, seq_len: u64) -> u64 {
        (self.len() - 1) / seq_len
    }

    /// Returns the first token of a training sample.
    #[must_use]
    pub fn start(&self, sample: u64, seq_len: u64) -> u64 {
        let span = u128::from(self.len() - seq_len - 1);
        (u128::from(sample) * u128::from(seq_len) % span) as u64
    }

    /// Returns the first token of a validation sample: windows are counted from the end of the
    /// stream, which training reaches last.
    #[must_use]
    pub(crate) fn start_from_end(&self, sample: u64, seq_len: u64) -> u64 {
        let windows = self.windows(seq_len).max(1);
        (windows - 1 - sample % windows) * seq_len
    }

    /// Returns the `T + 1` tokens from a position.
    pub fn window(&self, start: u64, seq_len: u64) -> impl Iterator<Item = u32> + '_ {
        (start..=start + seq_len).map(|i| self.token(i as usize))
    }
}
