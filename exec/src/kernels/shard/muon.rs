//! Muon, as in `torch.optim`: momentum, and orthogonalization by Newton-Schulz iterations whose
//! values are bfloat16.

use super::super::error::OperandError;
use super::super::gemm::{Mat, multiply};
use super::super::operands::same;
use super::super::scratch::Scratch;
use super::optimizer::{Runs, Tensor, tensors, updates};
use super::{BLOCK, clip_of, exactly};
use crate::base::element::Element;
use crate::operand::{Hyper, LaunchContext, RawRange};
use half::bf16;
use shardlab_plan::config::MuonAdjustLr;
use shardlab_plan::ir::{MatrixShape, NewtonSchulz, Update};

/// Smallest norm (`eps`).
const EPS: f32 = 1e-7;

/// Updates the tensors of a launch. `ctx.shapes` are those of their matrices, and `[n]` for `n`
/// elements of padding.
pub(super) fn update(
    ctx: &LaunchContext<'_>,
    update: Update,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let (tensors, used) = tensors(update, reads, writes)?;
    let clip = clip_of(reads.get(used), ctx.hyper.clip_norm)?;
    let mut groups = Runs::new(ctx.groups);
    let mut shapes = ctx.shapes.iter();
    for tensor in &tensors {
        let mut start = 0;
        while start < tensor.weight.numel {
            let shape = shapes.next().map_or(&[0][..], |s| s.as_slice());
            let numel = shape.iter().product::<u64>() as usize;
            if numel == 0 || start + numel > tensor.weight.numel {
                same("the matrices", tensor.weight.numel, start + numel)?;
            }
            let (group, taken) = groups.take(numel);
            same("a matrix in one parameter group", numel, taken)?;
            // Padding stays as it is.
            if let [rows, cols] = *shape {
                let sides = [rows as usize, cols as usize];
                matrix(tensor, start, sides, clip, &ctx.hyper.of(group));
            }
            start += numel;
        }
    }
    Ok(())
}

/// Updates one matrix.
fn matrix(tensor: &Tensor, start: usize, [rows, cols]: [usize; 2], clip: f32, h: &Hyper) {
    let n = rows * cols;
    let [mut w, mut g, mut m] = [n; 3].map(Scratch::take);
    let (w, g, m) = (&mut w[..n], &mut g[..n], &mut m[..n]);
    tensor.weight.load(start, w);
    tensor.grad.load(start, g);
    for state in &tensor.states {
        state.load(tensor.first + start, m);
    }
    blend(g, m, clip, h);
    for state in &tensor.states {
        state.store(tensor.first + start, m);
    }
    orthogonalize_matrix(g, [rows, cols]);
    let step = step(h, [rows, cols]);
    for (w, g) in w.iter_mut().zip(g.iter()) {
        *w = *w * decay(h) - step * *g;
    }
    tensor.store(start, w);
}

/// Blends gradients into the momentum, and replaces them by their update.
fn blend(g: &mut [f32], m: &mut [f32], clip: f32, h: &Hyper) {
    let rest = (1.0 - h.muon.momentum) as f32;
    for (g, m) in g.iter_mut().zip(m.iter_mut()) {
        let grad = *g * clip;
        *m += rest * (grad - *m);
        *g = *m - (*m - grad) * rest;
    }
}

/// Returns the factor of the weights of a step.
fn decay(h: &Hyper) -> f32 {
    (1.0 - h.lr * h.weight_decay) as f32
}

/// Returns the learning rate of a matrix.
fn step(h: &Hyper, [rows, cols]: [usize; 2]) -> f32 {
    let (rows, cols) = (rows as f64, cols as f64);
    let adjusted = match h.muon.adjust_lr {
        MuonAdjustLr::Original => (rows / cols).max(1.0).sqrt(),
        MuonAdjustLr::MatchRmsAdamw => 0.2 * rows.max(cols).sqrt(),
    };
    (h.lr * adjusted) as f32
}

/// Decays rows of matrices, updates their momentum, and writes what is to be orthogonalized.
pub(super) fn momentum(
    ctx: &LaunchContext<'_>,
    update: Update,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let (tensors, used) = tensors(update, reads, writes)?;
    let clip = clip_of(reads.get(used), ctx.hyper.clip_norm)?;
    let mut groups = Runs::new(ctx.groups);
    let [mut bw, mut bg, mut bm] = [BLOCK; 3].map(Scratch::take);
    for tensor in &tensors {
        let mut start = 0;
        while start < tensor.weight.numel {
            let (group, n) = groups.take(BLOCK.min(tensor.weight.numel - start));
            let h = ctx.hyper.of(group);
            let (w, g, m) = (&mut bw[..n], &mut bg[..n], &mut bm[..n]);
            tensor.weight.load(start, w);
            tensor.grad.load(start, g);
            for state in &tensor.states {
                state.load(tensor.first + start, m);
            }
            blend(g, m, clip, &h);
            w.iter_mut().for_each(|w| *w *= decay(&h));
            tensor.weight.store(start, w);
            for state in &tensor.states {
                state.store(tensor.first + start, m);
            }
            tensor.copies.store(start, g);
            start += n;
        }
    }
    Ok(())
}

/// Orthogonalizes a whole matrix in place.
pub(super) fn orthogonalize_whole(
    matrix: MatrixShape,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [from] = exactly(reads, "reads")?;
    let [to] = exactly(writes, "writes")?;
    let (rows, cols) = (matrix.rows as usize, matrix.cols as usize);
    let n = rows * cols;
    same("the matrix", n, from.numel)?;
    same("the orthogonalized matrix", n, to.numel)?;
    let mut g = Scratch::take(n);
    let g = &mut g[..n];
    from.load(0, g);
    orthogonalize_matrix(g, [rows, cols]);
    to.store(0, g);
    Ok(())
}

/// Subtracts orthogonalized rows of a matrix, times the learning rate, from a weight.
pub(super) fn apply(
    ctx: &LaunchContext<'_>,
    matrix: MatrixShape,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [weight, update] = exactly(reads, "reads")?;
    let [target] = exactly(writes, "writes")?;
    same("the rows of the update", weight.numel, update.numel)?;
    updates(&weight, &target)?;
    let sides = [matrix.rows as usize, matrix.cols as usize];
    let mut groups = Runs::new(ctx.groups);
    let [mut bw, mut bx] = [BLOCK; 2].map(Scratch::take);
    let mut start = 0;
    while start < weight.numel {
        let (group, n) = groups.take(BLOCK.min(weight.numel - start));
        let step = step(&ctx.hyper.of(group), sides);
        let (w, x) = (&mut bw[..n], &mut bx[..n]);
        weight.load(start, w);
        update.load(start, x);
        for (w, x) in w.iter_mut().zip(x.iter()) {
            *w -= step * *x;
        }
        weight.store(start, w);
        start += n;
    }
    Ok(())
}

/// Writes the transpose of `rows` rows of length `cols`.
fn transpose(x: &[f32], rows: usize, cols: usize, out: &mut [f32]) {
    for (r, row) in x.chunks_exact(cols).enumerate() {
        for (c, v) in row.iter().enumerate() {
            out[c * rows + r] = *v;
        }
    }
}

fn round(x: f32) -> f32 {
    <bf16 as Element>::round(x).to_f32()
}

/// Orthogonalizes a matrix in place. One with more rows than columns is transposed for that.
fn orthogonalize_matrix(g: &mut [f32], [rows, cols]: [usize; 2]) {
    if rows <= cols {
        return orthogonalize(g, rows, cols);
    }
    let mut x = Scratch::take(g.len());
    let x = &mut x[..g.len()];
    transpose(g, rows, cols, x);
    orthogonalize(x, cols, rows);
    transpose(x, cols, rows, g);
}

/// Moves the singular values of `short` rows of length `long`, of which there are not more than
/// columns, towards 1.
fn orthogonalize(x: &mut [f32], short: usize, long: usize) {
    let [a, b, c] = NewtonSchulz::COEFFICIENTS;
    x.iter_mut().for_each(|v| *v = round(*v));
    let squares: f64 = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    let norm = round(squares.sqrt() as f32).max(round(EPS));
    x.iter_mut().for_each(|v| *v = round(*v / norm));
    let [mut gram, mut square] = [short * short; 2].map(Scratch::take);
    let (gram, square) = (&mut gram[..short * short], &mut square[..short * short]);
    let mut product = Scratch::take(short * long);
    let product = &mut product[..short * long];
    for _ in 0..NewtonSchulz::STEPS {
        let rows = Mat::rows(x, long);
        into(gram, short, long, rows, rows.t());
        gram.iter_mut().for_each(|v| *v = round(*v));
        let inner = Mat::rows(gram, short);
        into(square, short, short, inner, inner);
        for (s, g) in square.iter_mut().zip(gram.iter()) {
            *s = round(b * *g + c * *s);
        }
        into(product, short, short, Mat::rows(square, short), rows);
        for (x, p) in x.iter_mut().zip(product.iter()) {
            *x = round(a * *x + *p);
        }
    }
}

/// Computes `out = a b` for `m x k` by `k x n`, where `out` has `m` rows.
fn into(out: &mut [f32], m: usize, k: usize, a: Mat, b: Mat) {
    let n = out.len() / m.max(1);
    let target = Mat::target(out, n);
    // SAFETY: the callers' matrices have these sizes, and none of them is `out`.
    unsafe { multiply(m, n, k, a, b, target, false) }
}
