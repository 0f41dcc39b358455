//! RMS norm and layer norm over the last dimension.

use super::reduce::{ROWS, block, columns};
use super::{Call, CpuKernel, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, RowCode, float};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::{CodegenError, lanes::Lanes, rows::Row};
use crate::kernels::error::OperandError;
use crate::kernels::math::{sum1, sum2, sum3};
use crate::kernels::operands::{Operands, same};
use crate::kernels::scratch::Scratch;
use crate::kernels::strides;
use crate::kernels::view::View;
use crate::kernels::wide::wide;
use shardlab_plan::ir::op;
use smallvec::SmallVec;

wide! {
    /// Computes `y = x * rstd * w` by rows of `w`'s length.
    fn rms_norm(x: &[f32], w: &[f32], eps: f64, y: &mut [f32], rstd: &mut [f32]) {
        let d = w.len();
        for ((x, y), r) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
            let square = sum1(x, |v| v * v);
            let s = (1.0 / (f64::from(square) / d as f64 + eps).sqrt()) as f32;
            *r = s;
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                *y = x * s * w;
            }
        }
    }

    /// Computes the gradient of [`rms_norm`] with respect to `x`.
    fn rms_norm_grad(dy: &[f32], x: &[f32], w: &[f32], rstd: &[f32], dx: &mut [f32]) {
        let d = w.len();
        let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(rstd);
        for (((dy, x), &s), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            let dot = sum3(dy, w, x, |g, w, x| g * w * x);
            let c = s * s * s * (dot / d as f32);
            for (((dx, &g), &w), &x) in dx.iter_mut().zip(dy).zip(w).zip(x) {
                *dx = s * (g * w) - c * x;
            }
        }
    }

    /// Adds `dy * x * rstd` of the rows to `acc`.
    fn rms_norm_weight_grad(dy: &[f32], x: &[f32], rstd: &[f32], acc: &mut [f32]) {
        let d = acc.len();
        for ((dy, x), &s) in dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(rstd) {
            for ((a, &g), &x) in acc.iter_mut().zip(dy).zip(x) {
                *a += g * (x * s);
            }
        }
    }

    /// Computes `y = (x - mean) * rstd * w + b` by rows of `w`'s length; an empty `b` means no
    /// bias.
    fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f64, y: &mut [f32], mean: &mut [f32], rstd: &mut [f32]) {
        let d = w.len();
        let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d));
        for ((x, y), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
            let m = sum1(x, |v| v) / d as f32;
            let var = sum1(x, |v| (v - m) * (v - m));
            let s = (1.0 / (f64::from(var) / d as f64 + eps).sqrt()) as f32;
            (*mean, *rstd) = (m, s);
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                *y = (x - m) * s * w;
            }
            for (y, &b) in y.iter_mut().zip(b) {
                *y += b;
            }
        }
    }

    /// Computes the gradient of [`layer_norm`] with respect to `x`.
    fn layer_norm_grad(dy: &[f32], x: &[f32], w: &[f32], mean: &[f32], rstd: &[f32], dx: &mut [f32]) {
        let d = w.len();
        let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(mean.iter().zip(rstd));
        for (((dy, x), (&m, &s)), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            let m1 = sum2(dy, w, |g, w| g * w) / d as f32;
            let m2 = sum3(dy, w, x, |g, w, x| g * w * ((x - m) * s)) / d as f32;
            for (((dx, &g), &w), &x) in dx.iter_mut().zip(dy).zip(w).zip(x) {
                *dx = s * (g * w - m1 - (x - m) * s * m2);
            }
        }
    }

    /// Adds `dy * (x - mean) * rstd` of the rows to `dw`, and `dy` to `db` unless that is empty.
    fn layer_norm_param_grad(dy: &[f32], x: &[f32], mean: &[f32], rstd: &[f32], dw: &mut [f32], db: &mut [f32]) {
        let d = dw.len();
        let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(mean.iter().zip(rstd));
        for ((dy, x), (&m, &s)) in rows {
            for ((a, &g), &x) in dw.iter_mut().zip(dy).zip(x) {
                *a += g * ((x - m) * s);
            }
            for (a, &g) in db.iter_mut().zip(dy) {
                *a += g;
            }
        }
    }
}

impl CpuKernel for op::RmsNorm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, .. } = call.rows()?;
        if let [y, rstd] = y {
            rms_norm(x[0], x[1], self.eps.0, y, rstd);
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RmsNorm {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::RmsNorm {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let [square] = row.sums(|at| {
            let x = at.input(0)?;
            Ok([format!("{x} * {x}")])
        })?;
        Ok(vec![rstd(row, &square, self.eps.0)])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        let (x, w) = (at.input(0)?, at.parameter(1)?);
        Ok(format!("{x} * {} * {w}", stats[0]))
    }
}

/// Generates `1 / sqrt(sum / columns + eps)`.
#[cfg(feature = "cuda")]
fn rstd(row: &mut Row<'_, '_>, sum: &str, eps: f64) -> String {
    let (cols, eps) = (row.cols(), float(eps as f32));
    row.define(&format!("1.0f / sqrtf({sum} / {cols} + {eps})"))
}

/// Returns the output's gradient, the input and the weight of a norm's backward.
#[cfg(feature = "cuda")]
fn backward_inputs(at: &mut Lanes<'_, '_>) -> Result<[String; 3], CodegenError> {
    Ok([at.input(0)?, at.input(1)?, at.parameter(2)?])
}

impl CpuKernel for op::RmsNormGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, .. } = call.rows()?;
        rms_norm_grad(x[0], x[1], x[2], x[3], y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RmsNormGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::RmsNormGrad {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let s = row.at.per_row(3)?;
        let [dot] = row.sums(|at| {
            let [dy, x, w] = backward_inputs(at)?;
            Ok([format!("{dy} * {w} * {x}")])
        })?;
        let cols = row.cols();
        let c = row.define(&format!("{s} * {s} * {s} * ({dot} / {cols})"));
        Ok(vec![s, c])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        let [dy, x, w] = backward_inputs(at)?;
        Ok(format!("{} * ({dy} * {w}) - {} * {x}", stats[0], stats[1]))
    }
}

impl CpuKernel for op::LayerNorm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, .. } = call.rows()?;
        let bias = x.get(2).copied().unwrap_or(&[]);
        if let [y, mean, rstd] = y {
            layer_norm(x[0], x[1], bias, self.eps.0, y, mean, rstd);
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LayerNorm {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::LayerNorm {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let [sum] = row.sums(|at| Ok([at.input(0)?]))?;
        let cols = row.cols();
        let m = row.define(&format!("{sum} / {cols}"));
        let [square] = row.sums(|at| {
            let x = at.input(0)?;
            Ok([format!("({x} - {m}) * ({x} - {m})")])
        })?;
        let s = rstd(row, &square, self.eps.0);
        Ok(vec![m, s])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        let (x, w) = (at.input(0)?, at.parameter(1)?);
        let bias = match at.inputs() {
            0..=2 => String::new(),
            _ => format!(" + {}", at.parameter(2)?),
        };
        Ok(format!("({x} - {}) * {} * {w}{bias}", stats[0], stats[1]))
    }
}

impl CpuKernel for op::LayerNormGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, .. } = call.rows()?;
        layer_norm_grad(x[0], x[1], x[2], x[3], x[4], y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LayerNormGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::LayerNormGrad {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let (m, s) = (row.at.per_row(3)?, row.at.per_row(4)?);
        let [a, b] = row.sums(|at| {
            let [dy, x, w] = backward_inputs(at)?;
            Ok([
                format!("{dy} * {w}"),
                format!("{dy} * {w} * (({x} - {m}) * {s})"),
            ])
        })?;
        let cols = row.cols();
        for t in [&a, &b] {
            row.at.g.line(format!("{t} = {t} / {cols};"));
        }
        Ok(vec![m, s, a, b])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        let [dy, x, w] = backward_inputs(at)?;
        let (mean, rstd, a, b) = (&stats[0], &stats[1], &stats[2], &stats[3]);
        Ok(format!(
            "{rstd} * ({dy} * {w} - {a} - ({x} - {mean}) * {rstd} * {b})"
        ))
    }
}

impl CpuKernel for op::RmsNormWeightGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        param_grads(call, 3)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RmsNormWeightGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Columns(|at| {
            let (dy, x, s) = (at.input(0)?, at.input(1)?, at.per_row(2)?);
            Ok(vec![format!("{dy} * ({x} * {s})")])
        })
    }
}

impl CpuKernel for op::LayerNormParamGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        param_grads(call, 4)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LayerNormParamGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Columns(|at| {
            let (dy, x) = (at.input(0)?, at.input(1)?);
            let (m, s) = (at.per_row(2)?, at.per_row(3)?);
            Ok(vec![format!("{dy} * (({x} - {m}) * {s})"), dy])
        })
    }
}

/// Performs sums over rows for the gradients of a norm's parameters, from `inputs` inputs: `d_y, x,
/// rstd -> d_w` or `d_y, x, mean, rstd -> d_w[, d_b]`.
fn param_grads(call: Call<'_, '_>, inputs: usize) -> Result<(), OperandError> {
    let o: &Operands<'_> = match call {
        Call::Sums {
            cols,
            inputs,
            outputs,
        } => return param_sums(cols, inputs, outputs),
        call => call.whole()?,
    };
    o.expect(inputs, 1)?;
    let outputs = (inputs - 2).min(o.op.outputs.len());
    let d = strides::matrix(o.slot(false, 1)?).1;
    let ins: SmallVec<[View; 4]> = (0..inputs).map(|i| o.input(i)).collect::<Result<_, _>>()?;
    let outs: SmallVec<[View; 2]> = (0..outputs)
        .map(|i| o.output(i))
        .collect::<Result<_, _>>()?;
    param_sums(
        d,
        &ins.iter().collect::<SmallVec<[_; 4]>>(),
        &outs.iter().collect::<SmallVec<[_; 2]>>(),
    )
}

/// Performs the same from views: three inputs of an RMS norm, four of a layer norm; rows have `d`
/// elements.
fn param_sums(d: usize, ins: &[&View], outs: &[&View]) -> Result<(), OperandError> {
    let missing = OperandError::Count {
        what: "inputs",
        needed: 3,
        found: ins.len(),
    };
    let [dy, x, stats @ ..] = ins else {
        return Err(missing);
    };
    let rows = x.numel / d.max(1);
    same("the output's gradient", x.numel, dy.numel)?;
    for s in stats {
        same("a norm's statistic", rows, s.numel)?;
    }
    for out in outs {
        same("the gradient of a norm's parameter", d, out.numel)?;
    }
    let [mut a, mut b] = [ROWS * d, ROWS * d].map(Scratch::take);
    let (mut m, mut s) = ([0.0; ROWS], [0.0; ROWS]);
    match stats {
        [rstd] => columns(rows, outs, |first, n, acc| {
            rstd.load(first, &mut s[..n]);
            let dy = block(dy, d, first, n, &mut a);
            let x = block(x, d, first, n, &mut b);
            rms_norm_weight_grad(dy, x, &s[..n], acc);
        }),
        [mean, rstd] => columns(rows, outs, |first, n, acc| {
            mean.load(first, &mut m[..n]);
            rstd.load(first, &mut s[..n]);
            let dy = block(dy, d, first, n, &mut a);
            let x = block(x, d, first, n, &mut b);
            let (dw, db) = acc.split_at_mut(d);
            layer_norm_param_grad(dy, x, &m[..n], &s[..n], dw, db);
        }),
        _ => return Err(missing),
    }
    Ok(())
}
