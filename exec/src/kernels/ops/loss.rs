//! Losses over a vocabulary.

use super::{Call, CpuKernel, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, LabelCode, LossCode};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::{
    CodegenError, Entry, Module, Param, Request, ctype, entropy, expr::Gen, expr::Var,
    index::Domain, index::Index, index::Own, tables,
};
use crate::kernels::error::OperandError;
use crate::kernels::math::{exp, max, sum1};
use crate::kernels::operands::{Operands, same};
use crate::kernels::scratch::Scratch;
use crate::kernels::strides;
use crate::kernels::wide::wide;
use shardlab_plan::ir::op;
#[cfg(feature = "cuda")]
use shardlab_plan::ir::{BodyOp, Place};

wide! {
    /// Replaces a row of logits by `scale * softmax` and returns its log-sum-exp.
    fn scaled_softmax(row: &mut [f32], scale: f32) -> f32 {
        let m = max(row);
        let z = m + sum1(row, |v| exp(v - m)).ln();
        for v in row {
            *v = scale * exp(*v - z);
        }
        z
    }
}

/// Returns a label as an index.
fn label(row: usize, l: f32, limit: usize) -> Result<usize, OperandError> {
    if l >= 0.0 && l < limit as f32 {
        Ok(l as usize)
    } else {
        Err(OperandError::Label {
            row,
            value: l as i64,
            limit,
        })
    }
}

impl CpuKernel for op::NllLoss {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows {
            x,
            cols,
            first,
            sum,
            ..
        } = call.rows()?;
        for (i, (log_probs, &l)) in x[0].chunks_exact(cols).zip(x[1]).enumerate() {
            *sum -= f64::from(log_probs[label(first + i, l, cols)?]);
        }
        Ok(())
    }

    fn totals(&self) -> Option<super::cpu::Totals> {
        Some(|sum, rows| [sum / rows as f64, rows as f64])
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::NllLoss {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Loss(self)
    }
}

#[cfg(feature = "cuda")]
impl LossCode for op::NllLoss {
    /// Returns the entry of the row's label.
    fn share(&self, g: &mut Gen<'_>, i: usize, n: usize) -> Result<(), CodegenError> {
        g.open("if (tid == 0)");
        let label = g.label(i, 1)?;
        let d = g.domain.unwrap_or(Domain { rows: 1, cols: 1 });
        g.line(format!(
            "const bool bad = bad_id({label}, {}, fault, launch);\nconst u32 pick = bad ? 0u : (u32){label};",
            d.cols
        ));
        let shape = g.req.body[i].inputs[0].shape.clone();
        let value = g.input(i, 0, &shape, &Index::pick())?.lane();
        g.line(format!(
            "part{n}[r] = bad ? (double)__int_as_float(0x7fffffff) : -(double){value};"
        ));
        g.close();
        Ok(())
    }

    /// Computes the mean, by one block.
    fn totals(
        &self,
        req: &Request<'_>,
        op: &BodyOp,
        n: usize,
        rows: usize,
    ) -> Result<(String, Entry), CodegenError> {
        let mut params = vec![Param::Scratch((n * rows * 8) as u64)];
        let mut declared = vec!["const double* part".to_owned()];
        let mut stores = String::new();
        for (o, value) in ["sum / ROWS", "ROWS"].iter().enumerate() {
            let slot = &op.outputs[o];
            let Place::Write(w) = slot.place else {
                continue;
            };
            params.push(Param::Write(w));
            declared.push(format!("{}* w{w}", ctype(req.arg(slot.place)?.dtype)));
            stores += &format!("  down((float)({value}), {}[0]);\n", req.address(slot)?);
        }
        let name = format!("mean{n}");
        let source = format!(
            "KERNEL(1024) {name}({}) {{\n  const double ROWS = {rows}.0;\n  double sum = 0.0;\n  for (u64 i = threadIdx.x; i < {rows}u; i += 1024) sum += part[i];\n  sum = block_sum<1024>(sum);\n  if (threadIdx.x) return;\n{stores}}}\n",
            declared.join(", ")
        );
        let entry = Entry {
            name,
            grid: [1, 1, 1],
            block: 1024,
            shared: 0,
            params,
        };
        Ok((source, entry))
    }
}

impl CpuKernel for op::NllLossGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows {
            x, y, cols, first, ..
        } = call.rows()?;
        y[0].copy_from_slice(x[3]);
        let value = -x[0][0] / x[2][0];
        for (i, (dx, &l)) in y[0].chunks_exact_mut(cols).zip(x[1]).enumerate() {
            dx[label(first + i, l, cols)?] = value;
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::NllLossGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Label(self)
    }
}

#[cfg(feature = "cuda")]
impl LabelCode for op::NllLossGrad {
    /// Generates `-d_loss / weight` at the row's label, and the existing value elsewhere.
    fn value(&self, g: &mut Gen<'_>, i: usize, at: &Index) -> Result<Var, CodegenError> {
        if at.own != Some(Own::Elem) {
            return Err(CodegenError::new("a row's labels are used in another row"));
        }
        let shape = g.op(i).outputs[0].shape.clone();
        let label = g.label(i, 1)?;
        let loss = g.input(i, 0, &[1], &Index::zero())?;
        let weight = g.input(i, 2, &[1], &Index::zero())?;
        let before = g.input(i, 3, &shape, at)?;
        let lane = format!(
            "(i64)(c + v) == {label} ? -{} / {} : {}",
            loss.lane(),
            weight.lane(),
            before.lane()
        );
        Ok(g.define(&lane, true))
    }

    fn labels_only(&self, req: &Request<'_>, op: &BodyOp) -> Option<Result<Module, CodegenError>> {
        tables::fills_labels_only(req, op).then(|| tables::nll_labels(req, op))
    }
}

/// Computes `logits, labels, loss -> logits, loss`: the loss grows by `scale` times the sum of the
/// rows' cross entropies, and the logits become its gradient.
fn cross_entropy(o: &Operands<'_>, scale: f64, gradient: f64) -> Result<(), OperandError> {
    o.expect(3, 2)?;
    let (rows, d) = strides::matrix(o.slot(false, 0)?);
    let (logits, labels, before) = (o.input(0)?, o.input(1)?, o.input(2)?);
    let (grad, loss) = (o.output(0)?, o.output(1)?);
    same("the labels", rows, labels.numel)?;
    same("the logits' gradient", rows * d, grad.numel)?;
    same("the loss", 1, before.numel)?;
    same("the loss", 1, loss.numel)?;
    if logits != grad && o.written(&logits)? {
        return Err(OperandError::Shape(
            "logits and their gradient overlap without being identical".to_owned(),
        ));
    }
    let mut row = Scratch::take(d);
    let mut total = 0.0f64;
    for r in 0..rows {
        let mut label = [0i64];
        labels.load_ids(r, &mut label)?;
        let value = label[0];
        if value < 0 || value as usize >= d {
            return Err(OperandError::Label {
                row: r,
                value,
                limit: d,
            });
        }
        logits.load(r * d, &mut row);
        let x = row[value as usize];
        let z = scaled_softmax(&mut row, gradient as f32);
        total += f64::from(z) - f64::from(x);
        row[value as usize] -= gradient as f32;
        grad.store(r * d, &row);
    }
    loss.store(0, &[(f64::from(before.get(0)) + scale * total) as f32]);
    Ok(())
}

impl CpuKernel for op::CrossEntropy {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        cross_entropy(call.whole()?, self.scale.0, self.gradient.0)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::CrossEntropy {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| entropy::generate(req, op, self.scale.0, self.gradient.0))
    }
}
