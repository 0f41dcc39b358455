//! Errors of kernels on a GPU.

use super::codegen::CodegenError;
use cudarc::driver::DriverError;

/// A kernel that could not be made or launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel `{kernel}`: {kind}")]
pub struct Error {
    /// Name of the kernel, or what was being prepared.
    pub kernel: String,
    /// Cause.
    pub kind: ErrorKind,
}

/// Cause of an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no kernel for such a body or such operands.
    #[error("{0}")]
    Unsupported(String),
    /// Ranks cannot agree on a choice. Nothing may replace the kernel, because ranks would diverge.
    #[error("{0}")]
    Ranks(String),
    /// A library is missing.
    #[error("{0}")]
    Library(String),
    /// The run-time compiler refused a source.
    #[error("NVRTC: {0}")]
    Compiler(String),
    /// The driver refused a call.
    #[error("{call} failed: {reason}")]
    Driver {
        /// Call.
        call: &'static str,
        /// Reason.
        reason: String,
    },
    /// A condition of a launch does not hold.
    #[error("{0}")]
    Launch(String),
}

impl Error {
    pub(super) fn new(kernel: impl Into<String>, kind: ErrorKind) -> Self {
        Self {
            kernel: kernel.into(),
            kind,
        }
    }
}

impl ErrorKind {
    pub(super) fn driver(call: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |e| Self::Driver {
            call,
            reason: e.to_string(),
        }
    }
}

impl From<CodegenError> for ErrorKind {
    fn from(r: CodegenError) -> Self {
        Self::Unsupported(r.to_string())
    }
}
