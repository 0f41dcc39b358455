//! Opens files: expands globs, decompresses gzip, and detects formats by their content.

use crate::ImportError;
use crate::sqlite::MAGIC;
use flate2::read::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Number of bytes at the start of a file that are examined to detect its format.
const PROBE: usize = 64 << 10;
/// Number of bytes that the decompressing thread passes on at a time, and maximum number of queued
/// pieces.
const PIECE: usize = 1 << 20;
const WAITING: usize = 4;
/// Byte order mark, by which some programs mark UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Trace of the PyTorch profiler (Kineto) in Chrome's JSON format.
    Kineto,
    /// Execution trace of PyTorch's `ExecutionTraceObserver`.
    ExecutionTrace,
    /// CUDA memory snapshot, a pickle.
    Snapshot,
    /// Dump of NCCL's flight recorder, a pickle or JSON.
    Flight,
    /// SQLite database: an export of Nsight Systems, or that of another tool.
    Sqlite,
}

impl Format {
    /// Returns the name for messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kineto => "Kineto trace",
            Self::ExecutionTrace => "execution trace",
            Self::Snapshot => "memory snapshot",
            Self::Flight => "flight record",
            Self::Sqlite => "SQLite database",
        }
    }
}

/// Expands globs into a sorted list of distinct files. An argument without a match is an error.
///
/// # Errors
/// Fails if an argument names no file or is not a valid glob.
pub fn expand(arguments: &[PathBuf]) -> Result<Vec<PathBuf>, ImportError> {
    let mut files = Vec::new();
    for argument in arguments {
        if argument.is_dir() {
            let reason = "is a folder; give its files, for example";
            return Err(ImportError::NoFile {
                argument: argument.display().to_string(),
                reason: format!("{reason} '{}/*.json.gz'", argument.display()),
            });
        }
        let text = argument.to_string_lossy();
        // The name of an existing file is not a glob, whatever characters it contains.
        if argument.exists() || !text.contains(['*', '?', '[']) {
            files.push(argument.clone());
            continue;
        }
        let no_file = |reason: String| ImportError::NoFile {
            argument: text.to_string(),
            reason,
        };
        let found = glob::glob(&text).map_err(|e| no_file(format!("not a valid glob: {e}")))?;
        let before = files.len();
        for path in found {
            files.push(path.map_err(|e| ImportError::io(e.path(), io::ErrorKind::Other.into()))?);
        }
        if files.len() == before {
            return Err(no_file("no file matches".to_owned()));
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
}

/// An open file, decompressed if necessary.
pub struct Source {
    head: io::Cursor<Vec<u8>>,
    rest: Box<dyn Read + Send>,
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    /// Fails if it cannot be read or is empty.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let io = |e| ImportError::io(path, e);
        let mut file = File::open(path).map_err(io)?;
        let mut magic = [0; 2];
        let n = fill(&mut file, &mut magic).map_err(io)?;
        if n == 0 {
            return Err(ImportError::invalid(path, "the file is empty"));
        }
        let whole = io::Cursor::new(magic[..n].to_vec()).chain(file);
        let mut rest: Box<dyn Read + Send> = if magic == [0x1f, 0x8b] {
            Box::new(Pieces::of(MultiGzDecoder::new(BufReader::with_capacity(
                PIECE, whole,
            ))))
        } else {
            Box::new(whole)
        };
        let mut head = vec![0; PROBE];
        let n = fill(&mut rest, &mut head).map_err(io)?;
        head.truncate(n);
        if head.starts_with(BOM) {
            head.drain(..BOM.len());
        }
        if head.is_empty() {
            return Err(ImportError::invalid(
                path,
                "the file is empty after decompression",
            ));
        }
        Ok(Self {
            head: io::Cursor::new(head),
            rest,
        })
    }

    /// Returns the format of the content; `None` if it cannot be imported.
    #[must_use]
    pub fn format(&self) -> Option<Format> {
        format(self.head.get_ref())
    }

    /// Describes what the content seems to be, for content that cannot be imported.
    #[must_use]
    pub fn otherwise(&self) -> &'static str {
        let head = self.head.get_ref().as_slice();
        if head.starts_with(b"PK") {
            "a zip archive; unpack it first"
        } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            "compressed with zstd; decompress it first (zstd -d)"
        } else if head.starts_with(&[0x80]) {
            "a pickle, but neither a memory snapshot nor a flight record"
        } else if matches!(
            head.iter().find(|b| !b.is_ascii_whitespace()),
            Some(b'{' | b'[')
        ) {
            "JSON, but it has neither `traceEvents`, nor the `nodes` of an execution trace, nor the `entries` of a flight record"
        } else {
            "of no known format"
        }
    }
}

impl Read for Source {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self.head.read(to)? {
            0 => self.rest.read(to),
            n => Ok(n),
        }
    }
}

/// Reads until the buffer is full or the end is reached. Keeps the data before an error, so that
/// the error for a truncated gzip file gives the position where its content ends.
fn fill(from: &mut impl Read, to: &mut [u8]) -> io::Result<usize> {
    match fill_or_fail(from, to) {
        (0, Some(e)) => Err(e),
        (n, _) => Ok(n),
    }
}

fn format(head: &[u8]) -> Option<Format> {
    let has = |needle: &str| memchr::memmem::find(head, needle.as_bytes()).is_some();
    if head.starts_with(MAGIC) {
        return Some(Format::Sqlite);
    }
    if head.first() == Some(&0x80) {
        // The keys of the outermost dictionaries come early in a pickle.
        return if has("segments") || has("device_traces") {
            Some(Format::Snapshot)
        } else if has("pg_config") || has("entries") || has("nccl_version") {
            Some(Format::Flight)
        } else {
            None
        };
    }
    match head.iter().find(|b| !b.is_ascii_whitespace())? {
        b'[' => (has("\"ph\"")).then_some(Format::Kineto),
        b'{' if has("\"traceEvents\"") || has("\"ph\"") => Some(Format::Kineto),
        b'{' if has("\"nodes\"") && has("\"schema\"") => Some(Format::ExecutionTrace),
        b'{' if has("\"pg_config\"") || has("\"entries\"") => Some(Format::Flight),
        // Small keys of the root may precede the events in any order.
        b'{' if has("\"schemaVersion\"") || has("\"deviceProperties\"") => Some(Format::Kineto),
        _ => None,
    }
}

/// Data that another thread reads in advance.
struct Pieces {
    from: Receiver<io::Result<Vec<u8>>>,
    piece: io::Cursor<Vec<u8>>,
}

impl Pieces {
    fn of(mut reader: impl Read + Send + 'static) -> Self {
        let (to, from) = sync_channel(WAITING);
        // The thread ends when this receiver is dropped or the file ends.
        thread::spawn(move || {
            loop {
                let mut piece = vec![0; PIECE];
                let (n, error) = fill_or_fail(&mut reader, &mut piece);
                piece.truncate(n);
                if n > 0 && to.send(Ok(piece)).is_err() {
                    return;
                }
                match error {
                    Some(e) => {
                        let _ = to.send(Err(e));
                        return;
                    }
                    None if n == 0 => return,
                    None => {}
                }
            }
        });
        Self {
            from,
            piece: io::Cursor::default(),
        }
    }
}

/// Reads until the buffer is full or the end is reached. Returns the number of bytes, and the error
/// after them.
fn fill_or_fail(from: &mut impl Read, to: &mut [u8]) -> (usize, Option<io::Error>) {
    let mut n = 0;
    while n < to.len() {
        match from.read(&mut to[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (n, Some(e)),
        }
    }
    (n, None)
}

impl Read for Pieces {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.piece.read(to)? {
                0 => match self.from.recv() {
                    Ok(piece) => self.piece = io::Cursor::new(piece?),
                    Err(_) => return Ok(0),
                },
                n => return Ok(n),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_detected_by_content() {
        for (text, expected) in [
            (
                &b"{\"schemaVersion\": 1, \"traceEvents\": ["[..],
                Some(Format::Kineto),
            ),
            (b" [{\"ph\": \"X\"}]", Some(Format::Kineto)),
            (
                b"{\"schema\": \"1.1.1\", \"nodes\": []}",
                Some(Format::ExecutionTrace),
            ),
            (
                b"{\"version\": \"2.10\", \"pg_config\": {}, \"entries\": []}",
                Some(Format::Flight),
            ),
            (
                b"\x80\x04}q\x00X\x08\x00\x00\x00segments",
                Some(Format::Snapshot),
            ),
            (b"\x80\x02}X\x07\x00\x00\x00entries", Some(Format::Flight)),
            (b"\x80\x02}", None),
            (b"{\"a\": 1}", None),
            (b"text", None),
            (b"   ", None),
        ] {
            assert_eq!(format(text), expected, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        std::fs::write(&path, "\u{feff}[{\"ph\": \"X\"}]").unwrap();
        let mut source = Source::open(&path).unwrap();
        assert_eq!(source.format(), Some(Format::Kineto));
        let mut text = String::new();
        source.read_to_string(&mut text).unwrap();
        assert_eq!(text, "[{\"ph\": \"X\"}]");
        std::fs::write(&path, "\u{feff}").unwrap();
        assert!(Source::open(&path).is_err());
    }

    #[test]
    fn globs_are_expanded_and_missing_ones_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.json", "a.json", "[x].json"] {
            std::fs::write(dir.path().join(name), "{}").unwrap();
        }
        let found = expand(&[dir.path().join("?.json"), dir.path().join("a.json")]).unwrap();
        let names: Vec<_> = found.iter().map(|p| p.file_name().unwrap()).collect();
        assert_eq!(names, ["a.json", "b.json"]);
        assert_eq!(expand(&[dir.path().join("[x].json")]).unwrap().len(), 1);
        let none = expand(&[dir.path().join("*.gz")]).unwrap_err().to_string();
        assert!(none.ends_with("*.gz: no file matches"), "{none}");
        let folder = expand(&[dir.path().to_owned()]).unwrap_err().to_string();
        assert!(folder.contains("is a folder"), "{folder}");
    }
}
