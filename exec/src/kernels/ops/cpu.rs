//! Interface of an operation on the CPU.

use super::Elementwise;
use crate::kernels::error::OperandError;
use crate::kernels::operands::Operands;
use crate::kernels::strides;
use crate::kernels::view::View;
use shardlab_plan::ir::{BodyOp, Slot};

/// Purpose of a kernel call.
pub(in crate::kernels) enum Call<'c, 'b> {
    /// One block of rows, in a loop that it may share with other operations.
    Rows(Rows<'c, 'b>),
    /// Everything: the operation is a kernel of its own.
    Whole(&'c Operands<'c>),
    /// Sums over all rows, `cols` elements long, of the results of other operations of a body.
    Sums {
        cols: usize,
        inputs: &'c [&'c View],
        outputs: &'c [&'c View],
    },
}

/// A block of rows of an operation's operands.
pub(in crate::kernels) struct Rows<'c, 'b> {
    pub(in crate::kernels) op: &'c BodyOp,
    /// Elements of the inputs: those of the block's rows, or all of an operand that every row
    /// needs.
    pub(in crate::kernels) x: &'c [&'b [f32]],
    /// Elements of the outputs.
    pub(in crate::kernels) y: &'c mut [&'b mut [f32]],
    /// Length of the rows that the operation reduces.
    pub(in crate::kernels) cols: usize,
    /// Number of the block's first row.
    pub(in crate::kernels) first: usize,
    /// Accumulates the operation's sum over all blocks.
    pub(in crate::kernels) sum: &'c mut f64,
}

impl<'c, 'b> Call<'c, 'b> {
    /// Returns the block of rows.
    ///
    /// # Errors
    /// Returns [`OperandError::Unsupported`] if this is another kind of call.
    pub(super) fn rows(self) -> Result<Rows<'c, 'b>, OperandError> {
        match self {
            Self::Rows(rows) => Ok(rows),
            _ => Err(OperandError::Unsupported),
        }
    }

    /// Returns the operands of a kernel that does only this.
    ///
    /// # Errors
    /// Returns [`OperandError::Unsupported`] if this is another kind of call.
    pub(super) fn whole(self) -> Result<&'c Operands<'c>, OperandError> {
        match self {
            Self::Whole(operands) => Ok(operands),
            _ => Err(OperandError::Unsupported),
        }
    }
}

/// Turns the sum that an operation accumulated over its rows, and their number, into its outputs.
pub(in crate::kernels) type Totals = fn(f64, usize) -> [f64; 2];

/// An operation on the CPU.
pub(in crate::kernels) trait CpuKernel {
    /// Performs the call.
    ///
    /// # Errors
    /// [`OperandError`], if operands do not fit or hold ids outside their range.
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError>;

    /// Returns the number of rows that a loop may be cut into, and their length if the operation
    /// reduces them; `reduced` is the operand whose rows these are.
    ///
    /// # Errors
    /// [`OperandError::Shape`], if the operands have no such rows.
    fn rows(&self, op: &BodyOp, reduced: Option<&Slot>) -> Result<(usize, usize), OperandError> {
        Ok(match reduced {
            Some(slot) => strides::matrix(slot),
            None => (strides::numel(&op.outputs[0]), 1),
        })
    }

    /// Returns how the outputs follow from a sum over all rows, for operations that reduce them to
    /// scalars. Such a loop runs in order, on one thread.
    fn totals(&self) -> Option<Totals> {
        None
    }
}

impl<T: Elementwise> CpuKernel for T {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, .. } = call.rows()?;
        self.block(x, y[0]);
        Ok(())
    }
}
