//! GEMMs.

use super::error::OperandError;
use super::operands::{Floats, Operands, same};
use super::parallel;
use super::scratch::Scratch;
use super::strides::{self, Dim};
use super::view::View;
use shardlab_plan::ir::{DType, Slot};

/// A matrix of floats somewhere in memory, rows and columns the given numbers of elements apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mat {
    pub(super) ptr: *mut f32,
    pub(super) row: usize,
    pub(super) col: usize,
}

impl Mat {
    /// Makes contiguous rows of length `cols`, to be read.
    pub(super) fn rows(x: &[f32], cols: usize) -> Self {
        Self {
            ptr: x.as_ptr().cast_mut(),
            row: cols,
            col: 1,
        }
    }

    /// Makes contiguous rows of length `cols`, to be written.
    pub(super) fn target(x: &mut [f32], cols: usize) -> Self {
        Self {
            ptr: x.as_mut_ptr(),
            row: cols,
            col: 1,
        }
    }

    /// Returns the transpose.
    pub(super) fn t(self) -> Self {
        Self {
            row: self.col,
            col: self.row,
            ..self
        }
    }
}

/// Computes `c = a b`, or `c += a b`, for `m x k` by `k x n`.
///
/// # Safety
/// All elements of `a` and `b` may be read, those of `c` written; `c` shares memory with neither.
pub(super) unsafe fn multiply(m: usize, n: usize, k: usize, a: Mat, b: Mat, c: Mat, add: bool) {
    let threads = match parallel::threads() {
        1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    // SAFETY: the caller's contract is that of `gemm`.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.ptr,
            c.col as isize,
            c.row as isize,
            add,
            a.ptr.cast_const(),
            a.col as isize,
            a.row as isize,
            b.ptr.cast_const(),
            b.col as isize,
            b.row as isize,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            threads,
        );
    }
}

/// An operand as a matrix: in place if it holds floats and its rows are equally spaced, or else a
/// copy.
pub(super) struct Operand {
    pub(super) mat: Mat,
    pub(super) rows: usize,
    pub(super) cols: usize,
    _copy: Option<Floats>,
}

/// Returns the distances of rows and columns of a slot seen as a matrix, if the rows are equally
/// spaced.
fn spacing(slot: &Slot) -> Option<(usize, usize)> {
    let strides = strides::of(slot);
    let (Some(&col), Some(lead)) = (strides.last(), strides.len().checked_sub(1)) else {
        return Some((1, 1));
    };
    let leading = slot.shape[..lead].iter().zip(&strides);
    let dims = strides::merge(leading.map(|(&n, &stride)| Dim {
        n: n as usize,
        stride,
    }));
    match dims[..] {
        [] => Some((slot.shape[lead] as usize * col, col)),
        [d] => Some((d.stride, col)),
        _ => None,
    }
}

/// Returns input `i` as a matrix.
pub(super) fn operand(o: &Operands<'_>, i: usize) -> Result<Operand, OperandError> {
    let slot = o.slot(false, i)?;
    let (rows, cols) = strides::matrix(slot);
    let view = o.input(i)?;
    if view.dtype == DType::F32
        && let Some((row, col)) = spacing(slot)
        && !o.written(&view)?
    {
        let mat = Mat {
            ptr: view.ptr.cast(),
            row,
            col,
        };
        return Ok(Operand {
            mat,
            rows,
            cols,
            _copy: None,
        });
    }
    let copy = o.floats(i)?;
    Ok(Operand {
        mat: Mat::rows(&copy, cols),
        rows,
        cols,
        _copy: Some(copy),
    })
}

/// Computes `a, b[, bias][, c] -> c`.
pub(super) fn run(
    o: &Operands<'_>,
    ta: bool,
    tb: bool,
    bias: bool,
    accumulate: bool,
) -> Result<(), OperandError> {
    o.expect(2 + usize::from(bias) + usize::from(accumulate), 1)?;
    let (mut a, mut b) = (operand(o, 0)?, operand(o, 1)?);
    if ta {
        (a.rows, a.cols, a.mat) = (a.cols, a.rows, a.mat.t());
    }
    if tb {
        (b.rows, b.cols, b.mat) = (b.cols, b.rows, b.mat.t());
    }
    let (m, k, n) = (a.rows, a.cols, b.cols);
    same("the inner dimension of the second operand", k, b.rows)?;
    let slot = o.slot(true, 0)?;
    let out = o.output(0)?;
    same("the matmul", m * n, out.numel)?;
    let mut copy = None;
    let place = (out.dtype == DType::F32).then(|| spacing(slot)).flatten();
    let direct = place.filter(|_| strides::matrix(slot) == (m, n));
    let c = match direct {
        Some((row, col)) => Mat {
            ptr: out.ptr.cast(),
            row,
            col,
        },
        None => Mat::target(copy.insert(Scratch::take(m * n)), n),
    };
    if accumulate || bias {
        start(o, m, n, bias, accumulate, &out, copy.as_deref_mut())?;
    }
    // SAFETY: the views were checked against their ranges; operands that share memory with the
    // output have been copied.
    unsafe { multiply(m, n, k, a.mat, b.mat, c, accumulate || bias) };
    if let Some(copy) = copy {
        out.store(0, &copy);
    }
    Ok(())
}

/// Copies the accumulator into the output, or its copy.
fn start(
    o: &Operands<'_>,
    m: usize,
    n: usize,
    bias: bool,
    accumulate: bool,
    out: &View,
    mut copy: Option<&mut [f32]>,
) -> Result<(), OperandError> {
    let before = o.input(o.op.inputs.len() - 1)?;
    let bias = if bias { Some(o.floats(2)?) } else { None };
    if let Some(b) = &bias {
        same("the bias", n, b.len())?;
    }
    if accumulate {
        same("the accumulated matrix", m * n, before.numel)?;
        if bias.is_none() && copy.is_none() && before == *out {
            return Ok(());
        }
    }
    let mut row = Scratch::take(n);
    for i in 0..m {
        match (&bias, accumulate) {
            (Some(b), false) => row.copy_from_slice(b),
            (Some(b), true) => {
                before.load(i * n, &mut row);
                row.iter_mut().zip(b.iter()).for_each(|(r, b)| *r += b);
            }
            (None, _) => before.load(i * n, &mut row),
        }
        match &mut copy {
            Some(copy) => copy[i * n..][..n].copy_from_slice(&row),
            None => out.store(i * n, &row),
        }
    }
    Ok(())
}
