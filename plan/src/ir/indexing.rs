//! Calls of PyTorch code that copy rows to experts and back.

use serde::Serialize;

/// How rows are moved: by one kernel of this engine, or by a call of PyTorch. The results are the
/// same, but the kernels, saved tensors and calls of backward differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Indexing {
    /// One kernel that receives the positions.
    #[default]
    Own,
    /// `x[index]`, or `index_select`: a gather of rows.
    Index,
    /// `index_put_(accumulate=True)` into zeros, the backward of [`Self::Index`]. Indices are
    /// sorted, and the rows of equal indices are summed.
    IndexPut,
    /// `index_copy` into zeros.
    IndexCopy,
    /// `index_add` to zeros, by atomic additions.
    IndexAdd,
}

impl Indexing {
    /// Returns PyTorch's name of the call, if it is one.
    #[must_use]
    pub const fn call(self) -> Option<&'static str> {
        match self {
            Self::Own => None,
            Self::Index => Some("index"),
            Self::IndexPut => Some("index_put"),
            Self::IndexCopy => Some("index_copy"),
            Self::IndexAdd => Some("index_add"),
        }
    }

    /// Returns the call in backward.
    #[must_use]
    pub const fn backward(self) -> Self {
        match self {
            Self::Own => Self::Own,
            Self::Index => Self::IndexPut,
            Self::IndexPut | Self::IndexCopy | Self::IndexAdd => Self::Index,
        }
    }

    /// Returns whether autograd saves the source although it needs only its shape. The derivatives
    /// of `index_copy` and `index_add` expand their result like the source (`derivatives.yaml` of
    /// PyTorch 2.11).
    #[must_use]
    pub(crate) const fn saves_source(self) -> bool {
        matches!(self, Self::IndexCopy | Self::IndexAdd)
    }

    /// Returns whether the result starts as zeros.
    #[must_use]
    pub const fn fills(self) -> bool {
        matches!(self, Self::IndexPut | Self::IndexCopy | Self::IndexAdd)
    }

    /// Returns whether a kernel adds rows to memory.
    #[must_use]
    pub const fn adds(self) -> bool {
        matches!(self, Self::IndexPut | Self::IndexAdd)
    }

    /// Returns whether it is [`Self::Own`].
    #[must_use]
    #[allow(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde passes a reference"
    )]
    pub const fn is_own(&self) -> bool {
        matches!(self, Self::Own)
    }
}
