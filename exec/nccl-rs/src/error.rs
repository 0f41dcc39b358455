//! Errors and their messages.

use std::fmt;
use std::path::PathBuf;

/// `ncclResult_t`. Preserves unknown values of later versions.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code(pub i32);

impl Code {
    /// Success.
    pub const SUCCESS: Self = Self(0);
    /// A CUDA call failed.
    pub const UNHANDLED_CUDA_ERROR: Self = Self(1);
    /// A system call failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// An internal error of NCCL, or corrupted memory.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// An argument has an invalid value.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// A sequence of calls is invalid.
    pub const INVALID_USAGE: Self = Self(5);
    /// Another rank failed or died.
    pub const REMOTE_ERROR: Self = Self(6);
    /// A nonblocking communicator is still in progress. Not an error.
    pub const IN_PROGRESS: Self = Self(7);

    /// Returns the name of the result in `nccl.h`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "an unknown result",
        }
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// Reason why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// NCCL returned an error.
    Nccl {
        /// Name of the function.
        call: &'static str,
        /// Result of the call.
        code: Code,
        /// NCCL's description of the result.
        text: String,
        /// NCCL's last error message, which is more specific; may be empty.
        last: String,
    },
    /// The loaded library does not have the function.
    Unsupported {
        /// Name of the function.
        symbol: &'static str,
        /// Version of the library.
        version: Version,
    },
    /// An argument is invalid. NCCL was not called.
    Argument {
        /// Name of the function.
        call: &'static str,
        /// Description of the problem.
        what: String,
    },
    /// The communicator has been aborted.
    Aborted {
        /// Name of the function that was called afterwards.
        call: &'static str,
    },
    /// A nonblocking communicator was not ready in time, or the wait was cancelled.
    NotReady {
        /// Name of the function.
        call: &'static str,
    },
    /// A communicator cannot be freed while another thread is inside one of its calls, or in a
    /// group of them.
    Busy,
}

impl Error {
    /// Returns NCCL's result, or `None` for errors of this crate.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Nccl { code, .. } => Some(*code),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nccl {
                call,
                code,
                text,
                last,
            } => {
                write!(f, "{call}: {} ({}): {text}", code.name(), code.0)?;
                if last.is_empty() {
                    Ok(())
                } else {
                    write!(f, "; {last}")
                }
            }
            Self::Unsupported { symbol, version } => {
                write!(f, "{symbol} is not in the loaded NCCL {version}")
            }
            Self::Argument { call, what } => write!(f, "{call}: {what}"),
            Self::Aborted { call } => write!(f, "{call}: the communicator has been aborted"),
            Self::NotReady { call } => write!(f, "{call}: the communicator was not ready in time"),
            Self::Busy => f.write_str(
                "ncclCommAbort: another thread is inside a call of the communicator, which must not be freed",
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Version of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch version.
    pub patch: u32,
}

impl Version {
    /// Decodes `NCCL_VERSION_CODE`, whose factors changed with 2.9.
    #[must_use]
    pub const fn from_code(code: i32) -> Self {
        let code = if code < 0 { 0 } else { code as u32 };
        let unit = if code < 10_000 { 1000 } else { 10_000 };
        Self {
            major: code / unit,
            minor: code % unit / 100,
            patch: code % 100,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Error of [`crate::Nccl::load`]: every file that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Files and names in the order in which they were tried, with the reasons.
    pub tried: Vec<(PathBuf, String)>,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NCCL cannot be loaded (pip install nvidia-nccl-cu13, or set NCCL_RS_LIB to libnccl.so.2); tried:")?;
        for (path, reason) in &self.tried {
            write!(f, "\n  {}: {reason}", path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for LoadError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(Version::from_code(22809).to_string(), "2.28.9");
        assert_eq!(Version::from_code(2708).to_string(), "2.7.8");
        assert!(Version::from_code(22809) > Version::from_code(21805));
    }

    #[test]
    fn errors_say_what_where_and_why() {
        let e = Error::Nccl {
            call: "ncclAllGather",
            code: Code::INVALID_USAGE,
            text: "invalid usage".into(),
            last: "mismatched group".into(),
        };
        assert_eq!(
            e.to_string(),
            "ncclAllGather: ncclInvalidUsage (5): invalid usage; mismatched group"
        );
        assert_eq!(format!("{:?}", Code(99)), "an unknown result (99)");
    }
}
