//! Errors of launches.

use shardlab_plan::ir::{DType, Place, RowLimit};

/// A launch that could not be performed. None or part of its results have been written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel `{kernel}`, op `{op}`: {fault}")]
pub struct KernelError {
    /// Name of the kernel.
    pub kernel: String,
    /// Name of the operation of its body.
    pub op: &'static str,
    /// Cause.
    pub fault: OperandError,
}

/// Cause of an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandError {
    /// A slot names an operand that the launch does not have.
    #[error("the body uses {place:?}, but the launch has only {count}")]
    UnknownSlot {
        /// The slot's place.
        place: Place,
        /// Number of operands of that kind.
        count: usize,
    },
    /// An operand is too short, or two that must match do not.
    #[error("{what} has {found} elements; expected {needed}")]
    Size {
        /// Operand.
        what: &'static str,
        /// Elements needed.
        needed: usize,
        /// Elements found.
        found: usize,
    },
    /// The operation has another number of operands.
    #[error("got {found} {what}; expected {needed}")]
    Count {
        /// Inputs, outputs, reads or writes.
        what: &'static str,
        /// Number needed.
        needed: usize,
        /// Number found.
        found: usize,
    },
    /// Shapes do not fit together.
    #[error("shapes do not fit: {0}")]
    Shape(String),
    /// A token id or label outside its range.
    #[error("row {row} has id {value}, outside 0..{limit}")]
    Label {
        /// Row.
        row: usize,
        /// Value found.
        value: i64,
        /// Number of classes or rows.
        limit: usize,
    },
    /// More choices fall on the experts of a rank than it has rows for.
    #[error(
        "{wanted} choices fall on the experts of one rank, which reserves {} rows for them: set \
         moe.capacity_factor = {:.2} or more, or moe.on_overflow = \"drop\"",
        limit.rows,
        limit.factor(*wanted)
    )]
    Overflow {
        /// These choices.
        wanted: u64,
        /// Their rows.
        limit: RowLimit,
    },
    /// Elements of this type cannot be computed with.
    #[error("cannot compute with elements of type {0}")]
    Type(DType),
    /// An address that is not a multiple of the element size.
    #[error("the address of an operand of type {0} is not a multiple of its size")]
    Misaligned(DType),
    /// An operation that this device does not support.
    #[error("no kernel for this operation")]
    Unsupported,
}
