//! `train.document_lengths`, with the documents of a file of tokens.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::Document;
use super::setting::Setting as _;
use super::value::Value;
use crate::config::{DataDocuments, DocumentLengths, MeasuredLengths, TokenWidth};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

/// Fields of the table that belong to a file.
const OF_DATA: [&str; 3] = ["data", "eos_token_id", "dtype"];
/// Tokens that are read at most. Of larger files, evenly spaced sequences are read.
const MAX_TOKENS: u64 = 64 << 20;

/// Returns the documents of sequences of `seq` tokens; `vocab` is the number of tokens that the
/// model knows.
///
/// # Errors
/// Refuses a file that cannot be read, has no whole sequence, has other tokens than the model, or
/// has no document that ends.
pub(super) fn lengths(
    d: &Document,
    seq: u64,
    vocab: u64,
) -> Result<DocumentLengths, ScenarioError> {
    let table = d
        .value(Key::DocumentLengths)
        .filter(|v| v.table().is_some());
    let Some(table) = table else {
        return Ok(d.setting(Key::DocumentLengths));
    };
    if !OF_DATA.iter().any(|name| field(table, name).is_some()) {
        return Ok(d.setting(Key::DocumentLengths));
    }
    of_data(d, table, seq, vocab).map(DocumentLengths::OfData)
}

fn field<'v>(table: &'v Value, name: &str) -> Option<&'v Value> {
    let mut fields = table.table()?.iter();
    fields.find(|e| e.key == name).map(|e| &e.value)
}

fn of_data(
    d: &Document,
    table: &Value,
    seq: u64,
    vocab: u64,
) -> Result<DataDocuments, ScenarioError> {
    const EXAMPLE: &str = "for example: { data = \"tokens.bin\", eos_token_id = 2 }";
    let needed = |name: &str, what: &str| {
        field(table, name).ok_or_else(|| {
            let message = format!("documents of a file need `{name}`, {what}");
            d.error(table.origin, message).with_help(EXAMPLE)
        })
    };
    let data = needed("data", "the path of its tokens")?;
    let eos = needed("eos_token_id", "the token that ends documents")?;
    for name in ["mean", "std"] {
        if let Some(given) = field(table, name) {
            let message = format!("the file `data` determines `{name}`");
            return Err(d.error(given.origin, message).with_help(EXAMPLE));
        }
    }
    let path = d.found(data);
    let given = field(table, "dtype").and_then(TokenWidth::of);
    let Some(dtype) = given.or_else(|| TokenWidth::of_name(&path)) else {
        let message = format!(
            "the name of {} does not say how it stores tokens",
            path.display()
        );
        let help = "add dtype = \"uint16\" or \"uint32\"; a text has to be tokenized first";
        return Err(d.error(data.origin, message).with_help(help));
    };
    let eos_token_id = u32::of(eos).unwrap_or(u32::MAX);
    if u64::from(eos_token_id) >= vocab {
        let message =
            format!("`eos_token_id` = {eos_token_id} is outside the vocabulary of {vocab} tokens");
        let error = d.error(eos.origin, message);
        return Err(match vocab.checked_sub(1) {
            Some(last) => error.with_help(format!("tokens are 0 to {last}")),
            None => error.with_help("the model reads no tokens: leave out `document_lengths`"),
        });
    }
    let file = TokenFile {
        path,
        dtype,
        eos: eos_token_id,
        seq,
        vocab,
    };
    let lengths = file.measured().map_err(|fault| match fault {
        Fault::Data(message, help) => d.error(data.origin, message).with_help(help),
        Fault::Eos(message, help) => d.error(eos.origin, message).with_help(help),
    })?;
    Ok(DataDocuments {
        data: data.str().unwrap_or_default().to_owned(),
        path: file.path,
        dtype,
        eos_token_id,
        lengths,
    })
}

/// Why documents cannot be measured, and what helps.
enum Fault {
    /// About the file.
    Data(String, String),
    /// About the separator.
    Eos(String, String),
}

/// A file of tokens, and what is measured of it.
#[derive(Clone, PartialEq, Eq, Hash)]
struct TokenFile {
    path: PathBuf,
    dtype: TokenWidth,
    eos: u32,
    seq: u64,
    vocab: u64,
}

/// Size of a file, and when it was written.
type Version = (u64, Option<SystemTime>);

/// Results, because one command resolves a scenario many times.
static MEASURED: LazyLock<Mutex<HashMap<(TokenFile, Version), MeasuredLengths>>> =
    LazyLock::new(Mutex::default);

/// Sums over the documents of sequences.
#[derive(Default)]
struct Sums {
    documents: u64,
    tokens: u64,
    squares: u128,
    /// Separators.
    ends: u64,
}

impl Sums {
    /// Adds the documents of a sequence. Separators belong to the documents that they end.
    fn add(&mut self, sequence: &[u32], eos: u32) {
        for document in sequence.split_inclusive(|token| *token == eos) {
            let length = document.len() as u64;
            self.documents += 1;
            self.tokens += length;
            self.squares += u128::from(length) * u128::from(length);
            self.ends += u64::from(document.last() == Some(&eos));
        }
    }
}

impl TokenFile {
    fn measured(&self) -> Result<MeasuredLengths, Fault> {
        let unread = |e: std::io::Error| self.fault(format!("cannot read it: {e}"));
        let file = File::open(&self.path).map_err(unread)?;
        let metadata = file.metadata().map_err(unread)?;
        let key = (self.clone(), (metadata.len(), metadata.modified().ok()));
        let known = || MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lengths) = known().get(&key) {
            return Ok(*lengths);
        }
        let sequences = self.sequences(metadata.len())?;
        let lengths = self.measure(file, sequences)?;
        known().insert(key, lengths);
        Ok(lengths)
    }

    /// Returns the number of sequences in a file of this size, in bytes.
    fn sequences(&self, bytes: u64) -> Result<u64, Fault> {
        let (width, seq) = (self.dtype.bytes() as u64, self.seq);
        if !bytes.is_multiple_of(width) {
            return Err(self.fault(format!(
                "{bytes} bytes are not a whole number of {width}-byte tokens"
            )));
        }
        let tokens = bytes / width;
        // As many as `exec` needs for one sample and its last label.
        if tokens < seq + 2 {
            let message = format!(
                "{}: {tokens} tokens are too few for sequences of {seq}; at least {} are needed",
                self.path.display(),
                seq + 2
            );
            let help = match tokens.checked_sub(2).filter(|n| *n > 0) {
                Some(most) => format!("set train.seq_len = {most} or less"),
                None => "give the path of a file of tokens".to_owned(),
            };
            return Err(Fault::Data(message, help));
        }
        Ok((tokens - 1) / seq)
    }

    /// Reads sequences, evenly spaced if there are more tokens than [`MAX_TOKENS`].
    fn measure(&self, mut file: File, sequences: u64) -> Result<MeasuredLengths, Fault> {
        let every = (sequences * self.seq).div_ceil(MAX_TOKENS).max(1);
        let size = self.seq * self.dtype.bytes() as u64;
        let mut bytes = vec![0; size as usize];
        let mut sequence = Vec::with_capacity(self.seq as usize);
        let mut sums = Sums::default();
        for index in (0..sequences).step_by(every as usize) {
            let read = file
                .seek(SeekFrom::Start(index * size))
                .and_then(|_| file.read_exact(&mut bytes));
            read.map_err(|e| self.fault(format!("cannot read it: {e}")))?;
            sequence.clear();
            sequence.extend(self.dtype.tokens(&bytes));
            self.known(&sequence, index * self.seq)?;
            sums.add(&sequence, self.eos);
        }
        if sums.ends == 0 {
            return Err(Fault::Eos(
                format!(
                    "token {} does not occur in {} tokens of {}: no document ends",
                    self.eos,
                    sums.tokens,
                    self.path.display()
                ),
                "tokenizers append `eos_token_id` of config.json only if they are asked to; without \
                 separators, leave out `document_lengths`"
                    .to_owned(),
            ));
        }
        Ok(MeasuredLengths {
            sequences: sums.tokens / self.seq,
            mean: sums.tokens as f64 / sums.documents as f64,
            token_mean: sums.squares as f64 / sums.tokens as f64,
        })
    }

    /// Refuses tokens that the model does not know; `start` is the position of the first one.
    fn known(&self, sequence: &[u32], start: u64) -> Result<(), Fault> {
        let unknown = |token: &u32| u64::from(*token) >= self.vocab;
        match sequence.iter().position(unknown) {
            None => Ok(()),
            Some(at) => Err(self.fault(format!(
                "token {} at position {} is outside the vocabulary of {} tokens",
                sequence[at],
                start + at as u64,
                self.vocab
            ))),
        }
    }

    /// Returns a fault of the file.
    fn fault(&self, what: String) -> Fault {
        let help = format!(
            "tokens are read as dtype = \"{}\" (of {})",
            self.dtype.name(),
            TokenWidth::WORDS.join(", ")
        );
        Fault::Data(format!("{}: {what}", self.path.display()), help)
    }
}
