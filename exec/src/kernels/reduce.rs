//! Sums over rows or everything, and the chunked cross entropy.
//!
//! Column sums add [`ROWS`] rows in float32 and collect these partial sums in float64.

use super::error::Fault;
use super::math::LANES;
use super::scratch::Scratch;
use super::view::{self, View};
use super::wide::wide;
use super::{Operands, norm, same, softmax};
use shardlab_plan::ir::OpKind;
use smallvec::SmallVec;

/// Rows of a partial column sum.
const ROWS: usize = 32;

wide! {
    /// Adds each row to `acc`.
    fn add_rows(x: &[f32], acc: &mut [f32]) {
        for row in x.chunks_exact(acc.len()) {
            for (a, v) in acc.iter_mut().zip(row) {
                *a += v;
            }
        }
    }

    /// Sum in float64, by lanes.
    fn sum_wide(x: &[f32]) -> f64 {
        let mut acc = [0.0f64; LANES];
        let mut chunks = x.chunks_exact(LANES);
        for c in &mut chunks {
            for (a, &v) in acc.iter_mut().zip(c) {
                *a += f64::from(v);
            }
        }
        for (a, &v) in acc.iter_mut().zip(chunks.remainder()) {
            *a += f64::from(v);
        }
        acc.iter().sum()
    }

    /// Adds `part` to `total` and clears it.
    fn collect(part: &mut [f32], total: &mut [f64]) {
        for (p, t) in part.iter_mut().zip(total) {
            *t += f64::from(*p);
            *p = 0.0;
        }
    }
}

/// Column sums, of which `f(first row, rows, partial sums)` adds some rows.
fn columns(rows: usize, out: &[&View], mut f: impl FnMut(usize, usize, &mut [f32])) {
    let width: usize = out.iter().map(|v| v.numel).sum();
    let mut part = Scratch::zeroed(width);
    let mut total: SmallVec<[f64; 1024]> = SmallVec::from_elem(0.0, width);
    for first in (0..rows).step_by(ROWS) {
        f(first, ROWS.min(rows - first), &mut part);
        collect(&mut part, &mut total);
    }
    for (p, t) in part.iter_mut().zip(&total) {
        *p = *t as f32;
    }
    let mut at = 0;
    for v in out {
        v.store(0, &part[at..at + v.numel]);
        at += v.numel;
    }
}

/// Rows `first..first + n` of length `d`: in memory where they are contiguous floats, else copied.
fn block<'b>(view: &View, d: usize, first: usize, n: usize, copy: &'b mut [f32]) -> &'b [f32] {
    if let Some(p) = view.as_floats() {
        // SAFETY: the rows lie inside the view, which the launch does not write before the sums are complete.
        return unsafe { std::slice::from_raw_parts(p.add(first * d), n * d) };
    }
    let copy = &mut copy[..n * d];
    view.load(first * d, copy);
    copy
}

/// Sums over rows for the gradients of a norm's parameters: `d_y, x, rstd -> d_w` or `d_y, x, mean, rstd -> d_w[, d_b]`.
pub(super) fn norm_param_grads(o: &Operands<'_>) -> Result<(), Fault> {
    let views = |outputs: bool, n: usize| -> Result<SmallVec<[View; 4]>, Fault> {
        let view = |i| if outputs { o.output(i) } else { o.input(i) };
        (0..n).map(view).collect()
    };
    let inputs = if o.op.op == OpKind::RmsNormWeightGrad {
        3
    } else {
        4
    };
    o.expect(inputs, 1)?;
    let outputs = (inputs - 2).min(o.op.outputs.len());
    let d = view::matrix(o.slot(false, 1)?).1;
    let (ins, outs) = (views(false, inputs)?, views(true, outputs)?);
    norm_param_sums(
        d,
        &ins.iter().collect::<SmallVec<[_; 4]>>(),
        &outs.iter().collect::<SmallVec<[_; 2]>>(),
    )
}

/// The same from views: three inputs of an RMS norm, four of a layer norm; rows have `d` elements.
pub(super) fn norm_param_sums(d: usize, ins: &[&View], outs: &[&View]) -> Result<(), Fault> {
    let missing = Fault::Count {
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
            norm::rms_norm_weight_grad(dy, x, &s[..n], acc);
        }),
        [mean, rstd] => columns(rows, outs, |first, n, acc| {
            mean.load(first, &mut m[..n]);
            rstd.load(first, &mut s[..n]);
            let dy = block(dy, d, first, n, &mut a);
            let x = block(x, d, first, n, &mut b);
            let (dw, db) = acc.split_at_mut(d);
            norm::layer_norm_param_grad(dy, x, &m[..n], &s[..n], dw, db);
        }),
        _ => return Err(missing),
    }
    Ok(())
}

/// `a -> sum over its leading elements`.
pub(super) fn sum_leading(o: &Operands<'_>) -> Result<(), Fault> {
    o.expect(1, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    let d = out.numel;
    if d == 0 || !x.numel.is_multiple_of(d) {
        return Err(Fault::Size {
            what: "the summed operand",
            needed: x.numel.next_multiple_of(d.max(1)),
            found: x.numel,
        });
    }
    let mut copy = Scratch::take(ROWS * d);
    columns(x.numel / d, &[&out], |first, n, acc| {
        add_rows(block(&x, d, first, n, &mut copy), acc);
    });
    Ok(())
}

/// `[n, c, h, w] -> [c]`.
pub(super) fn sum_channels(o: &Operands<'_>) -> Result<(), Fault> {
    o.expect(1, 1)?;
    let [images, channels, h, w] = super::dims::<4>(o.slot(false, 0)?)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    same("the channels", channels, out.numel)?;
    let p = h * w;
    let mut copy = Scratch::take(p);
    let mut total: SmallVec<[f64; 64]> = SmallVec::from_elem(0.0, channels);
    for i in 0..images * channels {
        x.load(i * p, &mut copy);
        total[i % channels] += sum_wide(&copy);
    }
    let sums: SmallVec<[f32; 64]> = total.iter().map(|&t| t as f32).collect();
    out.store(0, &sums);
    Ok(())
}

/// `a -> sum of all elements`.
pub(super) fn sum_all(o: &Operands<'_>) -> Result<(), Fault> {
    const BLOCK: usize = 4096;
    o.expect(1, 1)?;
    let (x, out) = (o.input(0)?, o.output(0)?);
    same("the sum", 1, out.numel)?;
    let mut copy = Scratch::take(BLOCK);
    let mut total = 0.0;
    for start in (0..x.numel).step_by(BLOCK) {
        total += sum_wide(block(&x, 1, start, BLOCK.min(x.numel - start), &mut copy));
    }
    out.store(0, &[total as f32]);
    Ok(())
}

/// `logits, labels, loss -> logits, loss`: the loss grows by `scale` times the sum of the rows' cross entropies, the logits become
/// its gradient.
pub(super) fn cross_entropy(o: &Operands<'_>, scale: f64, gradient: f64) -> Result<(), Fault> {
    o.expect(3, 2)?;
    let (rows, d) = view::matrix(o.slot(false, 0)?);
    let (logits, labels, before) = (o.input(0)?, o.input(1)?, o.input(2)?);
    let (grad, loss) = (o.output(0)?, o.output(1)?);
    same("the labels", rows, labels.numel)?;
    same("the logits' gradient", rows * d, grad.numel)?;
    same("the loss", 1, before.numel)?;
    same("the loss", 1, loss.numel)?;
    if logits != grad && o.written(&logits)? {
        return Err(Fault::Shape(
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
            return Err(Fault::Label {
                row: r,
                value,
                limit: d,
            });
        }
        logits.load(r * d, &mut row);
        let x = row[value as usize];
        let z = softmax::scaled_softmax(&mut row, gradient as f32);
        total += f64::from(z) - f64::from(x);
        row[value as usize] -= gradient as f32;
        grad.store(r * d, &row);
    }
    loss.store(0, &[(f64::from(before.get(0)) + scale * total) as f32]);
    Ok(())
}
