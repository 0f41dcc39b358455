//! Statistics of whole rows that row operations need, and their values once these are known.

use super::{Shape, reduced};
use crate::kernels::cuda::codegen::expr::{Gen, Var};
use crate::kernels::cuda::codegen::index::{Index, Own};
use crate::kernels::cuda::codegen::lanes::Lanes;
use crate::kernels::cuda::codegen::{CodegenError, float};
use crate::kernels::ops::{self, CudaCode, RowCode};
use shardlab_plan::ir::BodyOp;
use shardlab_plan::ops::Extent;

/// A row of which an operation computes statistics.
pub(in crate::kernels) struct Row<'g, 'a> {
    /// The elements of the threads that share the row.
    pub(in crate::kernels) at: Lanes<'g, 'a>,
    shape: Shape,
}

impl<'a> Row<'_, 'a> {
    /// Returns the length of the row, as C.
    pub(in crate::kernels) fn cols(&self) -> String {
        float(self.shape.domain.cols as f32)
    }

    /// Defines a constant; returns its name.
    pub(in crate::kernels) fn define(&mut self, value: &str) -> String {
        let name = self.at.g.fresh();
        self.at.g.line(format!("const float {name} = {value};"));
        name
    }

    /// Opens a loop over the row's vectors.
    fn walk(&mut self) {
        let (walk, place) = (self.shape.walk(), self.shape.place());
        self.at.g.open(walk);
        self.at.g.line(place);
    }

    /// Sums `terms` (C expressions of one element) of the row; returns the variables.
    pub(in crate::kernels) fn sums<const N: usize>(
        &mut self,
        mut terms: impl FnMut(&mut Lanes<'_, 'a>) -> Result<[String; N], CodegenError>,
    ) -> Result<[String; N], CodegenError> {
        let names = [(); N].map(|()| self.at.g.fresh());
        for n in &names {
            self.at.g.line(format!("float {n} = 0.0f;"));
        }
        self.walk();
        let terms = terms(&mut self.at)?;
        let g = &mut self.at.g;
        g.line(format!(
            "#pragma unroll\nfor (int v = 0; v < {}; v++) {{",
            self.shape.lanes
        ));
        for (n, t) in names.iter().zip(&terms) {
            g.line(format!("  {n} += {t};"));
        }
        g.line("}");
        g.close();
        for n in &names {
            g.line(format!("{n} = {};", self.shape.all("Sum", n)));
        }
        Ok(names)
    }

    /// Generates the largest absolute value of input `n`, without NaN; returns the variable.
    pub(in crate::kernels) fn amax(&mut self, n: usize) -> Result<String, CodegenError> {
        let name = self.at.g.fresh();
        self.at.g.line(format!("float {name} = 0.0f;"));
        self.walk();
        let x = self.at.input(n)?;
        self.at.g.line(format!(
            "#pragma unroll\nfor (int v = 0; v < {}; v++) {name} = fmaxf({name}, fabsf({x}));",
            self.shape.lanes
        ));
        self.at.g.close();
        let all = self.shape.all("Amax", &name);
        self.at.g.line(format!("{name} = {all};"));
        Ok(name)
    }

    /// Generates the log-sum-exp of input `n`; returns the variable.
    pub(in crate::kernels) fn log_sum_exp(&mut self, n: usize) -> Result<String, CodegenError> {
        let (m, s, z) = (self.at.g.fresh(), self.at.g.fresh(), self.at.g.fresh());
        self.at.g.line(format!("float {m} = -INF, {s} = 0.0f;"));
        if self.shape.kept {
            self.walk();
            let x = self.at.input(n)?;
            self.at.g.line(format!(
                "#pragma unroll\nfor (int v = 0; v < {}; v++) {m} = max_({m}, {x});",
                self.shape.lanes
            ));
            self.at.g.close();
            self.at
                .g
                .line(format!("{m} = {};", self.shape.all("Max", &m)));
            let [sum] = self.sums(|at| {
                let x = at.input(n)?;
                Ok([format!("expf({x} - {m})")])
            })?;
            self.at.g.line(format!("{s} = {};", sum));
        } else {
            // One pass: a running maximum, and the sum relative to it.
            self.walk();
            let x = self.at.input(n)?;
            let x = match self.at.g.define(&x, true) {
                Var::Each(x) | Var::Same(x) => x,
            };
            self.at
                .g
                .line(format!("running<{}>({m}, {s}, {x});", self.shape.lanes));
            self.at.g.close();
            self.at.g.line(format!(
                "const float {s}m = {};\n{s} = {m} == -INF ? 0.0f : {s} * expf({m} - {s}m);\n{s} = {};\n{m} = {s}m;",
                self.shape.all("Max", &m),
                self.shape.all("Sum", &s),
            ));
        }
        self.at
            .g
            .line(format!("const float {z} = {m} + logf({s});"));
        Ok(z)
    }
}

/// Generates the statistics of an operation's whole row.
pub(super) fn statistics(
    g: &mut Gen<'_>,
    shape: Shape,
    i: usize,
    op: &BodyOp,
) -> Result<(), CodegenError> {
    let CudaCode::Row(code) = ops::cuda(&op.op) else {
        return Ok(());
    };
    let full = reduced(op).map(|s| s.shape.clone()).unwrap_or_default();
    let at = Lanes::new(g, i, Index::elem(shape.lanes), full);
    let stats = code.statistics(&mut Row { at, shape })?;
    g.stats.insert(i, stats);
    Ok(())
}

/// Returns which of an operation's statistics an output is, if it has one value per row.
pub(super) fn statistic(op: &BodyOp, o: usize) -> Option<usize> {
    let outputs = op.op.def().signature().outputs;
    let (before, output) = (outputs.get(..o)?, outputs.get(o)?);
    let per_row = |extent| extent == Extent::PerRow;
    per_row(output.extent).then(|| before.iter().filter(|b| per_row(b.extent)).count())
}

impl Gen<'_> {
    /// Returns an output of a row operation, whose statistics are known.
    pub(in crate::kernels::cuda::codegen) fn row_value(
        &mut self,
        i: usize,
        o: usize,
        at: &Index,
        code: &dyn RowCode,
    ) -> Result<Var, CodegenError> {
        let op = &self.req.body[i];
        let rows = self.domain.map_or(0, |d| d.rows);
        let stats = self.stats.get(&i).cloned();
        let stats = stats.ok_or_else(|| {
            CodegenError::new(format!(
                "`{}` is used before its row is complete",
                op.op.name()
            ))
        })?;
        if let Some(which) = statistic(op, o) {
            if at.own != Some(Own::Row) && rows > 1 {
                return Err(CodegenError::new(
                    "a row's statistic is used in another row",
                ));
            }
            return Ok(self.define(&stats[which], false));
        }
        if !matches!(at.own, Some(Own::Elem | Own::Pick)) {
            return Err(CodegenError::new("a row's values are used in another row"));
        }
        let full = op.outputs[0].shape.clone();
        let lane = code.value(&mut Lanes::new(self, i, at.clone(), full), &stats)?;
        Ok(self.define(&lane, at.step != 0))
    }
}
