//! Standard output, failures and exit status.

use super::text::{asked, hanging, sentence, wrap};
use crate::predict::PredictError;
use serde::Serialize;
use shardlab_reports::files;
use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

/// Width of a label including the spaces after it, in columns.
const LABEL: usize = 10;

/// Checks, before a long computation, that the file of an option can be written. A full disk is
/// reported after the results, because there may be room by then.
pub(super) fn writable(option: &str, path: &Path) -> Result<(), Failure> {
    match files::check(path) {
        Err(e) if files::is_bad_path(&e) => Err(Failure::unwritten(
            format_args!("{option} {}", path.display()),
            &e,
        )),
        _ => Ok(()),
    }
}

/// Writes the file of an option, completely or not at all.
pub(super) fn write_file<T>(
    option: &str,
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<T>,
) -> Result<T, Failure> {
    files::write(path, fill)
        .map_err(|e| Failure::unwritten(format_args!("{option} {}", path.display()), &e))
}

/// Writes a line to stderr in one piece, because other ranks of the run write to the same place.
pub(super) fn say(line: impl Display) {
    // A closed stderr is ignored.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Done.
    Done,
    /// A check failed.
    CheckFailed,
    /// The run failed or was interrupted. The results so far have been printed.
    RunFailed,
}

impl Status {
    /// Exit status for bad input.
    pub(super) const BAD_INPUT: u8 = 2;
    /// Exit status of [`Status::RunFailed`].
    pub(super) const RUN_FAILED: u8 = 3;

    pub(super) fn code(self) -> ExitCode {
        ExitCode::from(match self {
            Self::Done => 0,
            Self::CheckFailed => 1,
            Self::RunFailed => Self::RUN_FAILED,
        })
    }
}

/// Reason why a command ended early.
#[derive(Debug)]
pub(super) enum Failure {
    /// A scenario, option or table is invalid.
    BadInput(String),
    /// The run itself failed.
    Run(String),
    /// Output cannot be written.
    Output(io::Error),
    /// The failure has already been reported; contains the exit status.
    Reported(u8),
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Self::Output(e)
    }
}

impl From<PredictError> for Failure {
    fn from(e: PredictError) -> Self {
        if e.is_bad_input() {
            Self::BadInput(e.to_string())
        } else {
            Self::Run(e.to_string())
        }
    }
}

impl Failure {
    pub(super) fn bad_input(message: impl Display) -> Self {
        Self::BadInput(message.to_string())
    }

    pub(super) fn run(message: impl Display) -> Self {
        Self::Run(message.to_string())
    }

    /// Returns the failure for a file that cannot be written: bad input if the path is wrong,
    /// otherwise a failed run (a full disk, for example).
    pub(super) fn unwritten(what: impl Display, e: &io::Error) -> Self {
        let message = format!("{what}: {e}");
        if files::is_bad_path(e) {
            Self::BadInput(message)
        } else {
            Self::Run(message)
        }
    }

    /// Reports the failure through `report` instead of [`Failure::report`]. A closed pipe is not
    /// reported.
    pub(super) fn reported(self, report: impl FnOnce(&str)) -> Self {
        let (message, code) = match self {
            Self::Output(ref e) if e.kind() == ErrorKind::BrokenPipe => return self,
            Self::Output(e) => (format!("cannot write: {e}"), Status::RUN_FAILED),
            Self::BadInput(m) => (m, Status::BAD_INPUT),
            Self::Run(m) => (m, Status::RUN_FAILED),
            Self::Reported(_) => return self,
        };
        report(&message);
        Self::Reported(code)
    }

    /// Reports the failure on stderr immediately, for commands that continue.
    pub(super) fn reported_on_stderr(self) -> Self {
        self.reported(|message| say(format_args!("error: {message}")))
    }

    /// Reports the failure and returns the exit status. Results printed before the failure are
    /// kept.
    pub(super) fn report(self, out: &mut Out) -> ExitCode {
        let reported = self.reported(|message| {
            let _ = out.flush();
            say(format_args!("error: {message}"));
        });
        match reported {
            Self::Reported(code) => {
                let _ = out.flush();
                ExitCode::from(code)
            }
            _ => ExitCode::SUCCESS,
        }
    }
}

/// Standard output.
struct Stdout {
    lock: io::StdoutLock<'static>,
    /// Whether to discard output when the reader has closed the pipe.
    outlives_its_reader: bool,
}

impl Stdout {
    /// Returns the result, or `dropped` if the reader has closed the pipe and that is acceptable.
    fn outlive<T>(&self, done: io::Result<T>, dropped: T) -> io::Result<T> {
        match done {
            Err(e) if self.outlives_its_reader && e.kind() == ErrorKind::BrokenPipe => Ok(dropped),
            other => other,
        }
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let done = self.lock.write(bytes);
        self.outlive(done, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let done = self.lock.flush();
        self.outlive(done, ())
    }
}

/// Buffered standard output, and whether to use colour.
pub(super) struct Out {
    writer: BufWriter<Stdout>,
    /// Whether to use escape sequences.
    pub(super) colour: bool,
}

impl Out {
    pub(super) fn stdout() -> Self {
        let stdout = io::stdout();
        let unset = |name: &str| std::env::var_os(name).is_none_or(|v| v.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
        let colour = stdout.is_terminal() && unset("NO_COLOR") && !dumb;
        Self {
            writer: BufWriter::new(Stdout {
                lock: stdout.lock(),
                outlives_its_reader: false,
            }),
            colour,
        }
    }

    /// Lets the command continue when the reader closes the pipe, for commands that are run for
    /// their exit status.
    pub(super) fn outlive_reader(&mut self) {
        self.writer.get_mut().outlives_its_reader = true;
    }

    /// Writes text unchanged.
    pub(super) fn text(&mut self, text: impl Display) -> io::Result<()> {
        write!(self.writer, "{text}")
    }

    /// Writes a line. On a terminal, a line that is too long is broken between words.
    pub(super) fn line(&mut self, text: impl Display) -> io::Result<()> {
        for line in hanging(&text.to_string(), "", asked()) {
            writeln!(self.writer, "{line}")?;
        }
        Ok(())
    }

    /// Writes an empty line.
    pub(super) fn blank(&mut self) -> io::Result<()> {
        writeln!(self.writer)
    }

    /// Writes a heading.
    pub(super) fn heading(&mut self, text: impl Display) -> io::Result<()> {
        for line in wrap(&text.to_string(), sentence()) {
            let line = self.bold(line);
            self.line(line)?;
        }
        Ok(())
    }

    /// Writes a sentence with this indent, wrapped to the terminal.
    pub(super) fn paragraph(&mut self, indent: usize, text: &str) -> io::Result<()> {
        for line in wrap(text, sentence() - indent) {
            writeln!(self.writer, "{:indent$}{line}", "")?;
        }
        Ok(())
    }

    /// Writes a text after a label. Further lines are aligned with the first one.
    pub(super) fn labelled(&mut self, label: &str, text: &str) -> io::Result<()> {
        let mut lines = wrap(text, sentence() - LABEL).into_iter();
        let label = self.bold(format_args!("{label:<LABEL$}"));
        writeln!(self.writer, "{label}{}", lines.next().unwrap_or_default())?;
        for line in lines {
            writeln!(self.writer, "{:LABEL$}{line}", "")?;
        }
        Ok(())
    }

    /// Writes an object as one line of JSON.
    pub(super) fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.writer, value)?;
        writeln!(self.writer)
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Returns the text in bold, if escape sequences are in use.
    pub(super) fn bold(&self, text: impl Display) -> String {
        self.escape("1", text)
    }

    /// Returns the text in green.
    pub(super) fn good(&self, text: impl Display) -> String {
        self.escape("32", text)
    }

    /// Returns the text in red.
    pub(super) fn bad(&self, text: impl Display) -> String {
        self.escape("31", text)
    }

    fn escape(&self, code: &str, text: impl Display) -> String {
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
