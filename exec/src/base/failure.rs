//! Failures of a session: what failed, where, and why a wait ended.

use shardlab_plan::ir::InstrId;
use std::fmt;

/// Reason why a wait ended before its condition held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Another thread failed; the cause is in the session's [`Abort`](super::abort::Abort).
    Aborted,
    /// Nothing made progress for the watchdog's time.
    TimedOut,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// A thread panicked.
    Panic,
    /// A kernel rejected its operands.
    Kernel,
    /// Ranks launched collectives that do not match.
    Mismatch,
    /// A wait took longer than the watchdog allows.
    Timeout,
    /// The arena's limit was reached.
    OutOfMemory,
    /// An allocation failed for another reason.
    Alloc,
    /// A NaN was found.
    Nan,
    /// The program is invalid.
    Program,
    /// A rank's device could not be created.
    NoDevice,
    /// A fault injected by a test.
    Injected,
    /// Another process failed; the message is from that process.
    Remote,
}

impl FailureKind {
    /// Returns the name for messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Kernel => "kernel error",
            Self::Mismatch => "collective mismatch",
            Self::Timeout => "timeout",
            Self::OutOfMemory => "out of memory",
            Self::Alloc => "allocation refused",
            Self::Nan => "NaN",
            Self::Program => "bad program",
            Self::NoDevice => "no device",
            Self::Injected => "injected fault",
            Self::Remote => "another process",
        }
    }
}

/// A failure, and where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Kind.
    pub kind: FailureKind,
    /// Rank.
    pub rank: u32,
    /// Stream whose worker failed; `None` for the host thread.
    pub stream: Option<&'static str>,
    /// Instruction that was running, if any.
    pub instr: Option<InstrId>,
    /// Text of the instruction, or empty.
    pub text: String,
    /// Cause of the failure.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == FailureKind::Remote {
            return f.write_str(&self.message);
        }
        write!(f, "rank {}", self.rank)?;
        // The largest shortage matters, not which of many allocations came first.
        if self.kind == FailureKind::OutOfMemory {
            return write!(f, ": {}: {}", self.kind.name(), self.message);
        }
        match self.stream {
            Some(s) => write!(f, ", stream {s}")?,
            None => f.write_str(", host")?,
        }
        if let Some(i) = self.instr {
            write!(f, ", instruction {} `{}`", i.0, self.text)?;
        }
        write!(f, ": {}: {}", self.kind.name(), self.message)
    }
}

/// Returns the message of a caught panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
