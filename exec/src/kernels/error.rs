//! Errors of launches.

use shardlab_plan::ir::{DType, Place};

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
        "{rows} choices fall on the experts of one rank, which has rows for {slots}: set \
         moe.capacity_factor = {:.2} or more (dispatcher \"padded\" can also drop choices: moe.on_overflow = \
         \"drop\")",
        (*rows as f64 / *balanced as f64 * 100.0).ceil() / 100.0
    )]
    Overflow {
        /// Choices of one rank's tokens.
        rows: usize,
        /// Rows for them.
        slots: usize,
        /// Choices, if experts are equally popular.
        balanced: usize,
    },
    /// More choices fall on the experts of a rank than it has rows for.
    #[error(
        "{used} choices fall on the experts of this rank, which has {rows} rows for them: multiply \
         moe.capacity_factor by {:.2} or more",
        (*used as f64 / *rows as f64 * 100.0).ceil() / 100.0
    )]
    Rows {
        /// Choices.
        used: usize,
        /// Rows.
        rows: usize,
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
