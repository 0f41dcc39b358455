//! Operands of one operation at one position, as its generator reads them.

use super::expr::Gen;
use super::index::{Domain, Index};
use super::{CodegenError, numel};
use shardlab_plan::ir::Shape;

/// Position at which an operation is generated: some lanes' elements.
pub(in crate::kernels) struct Lanes<'g, 'a> {
    pub(in crate::kernels) g: &'g mut Gen<'a>,
    /// Number of the operation in the body.
    i: usize,
    /// Position.
    at: Index,
    /// Shape that the position belongs to.
    full: Shape,
}

impl<'g, 'a> Lanes<'g, 'a> {
    pub(super) fn new(g: &'g mut Gen<'a>, i: usize, at: Index, full: Shape) -> Self {
        Self { g, i, at, full }
    }

    /// Returns the number of inputs.
    pub(in crate::kernels) fn inputs(&self) -> usize {
        self.g.req.body[self.i].inputs.len()
    }

    /// Reads input `n`; returns the C expression of one element.
    pub(in crate::kernels) fn input(&mut self, n: usize) -> Result<String, CodegenError> {
        Ok(self.g.input(self.i, n, &self.full, &self.at)?.lane())
    }

    /// Reads input `n`, which has one value per row.
    pub(in crate::kernels) fn per_row(&mut self, n: usize) -> Result<String, CodegenError> {
        let slot = self.g.req.body[self.i].inputs.get(n);
        let slot = slot.ok_or_else(|| CodegenError::new("a statistic is missing"))?;
        Ok(self.g.input(self.i, n, &slot.shape, &Index::row())?.lane())
    }

    /// Reads input `n`, a norm's parameter: one value per column.
    pub(in crate::kernels) fn parameter(&mut self, n: usize) -> Result<String, CodegenError> {
        let d = self.g.domain.unwrap_or(Domain { rows: 1, cols: 1 });
        let slot = self.g.req.body[self.i].inputs.get(n);
        let slot = slot.ok_or_else(|| CodegenError::new("a norm's parameter is missing"))?;
        if numel(slot) != d.cols {
            return Err(CodegenError::new(
                "a norm's parameter must have the length of a row",
            ));
        }
        let shape = [d.rows as u64, d.cols as u64];
        Ok(self.g.input(self.i, n, &shape, &self.at)?.lane())
    }
}
