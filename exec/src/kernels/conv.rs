//! Convolutions as GEMMs over unfolded images.

use super::error::OperandError;
use super::gemm::{Mat, multiply};
use super::operands::{Operands, dims, same};
use super::scratch::Scratch;
use super::view::View;

/// Shapes of one convolution.
#[derive(Clone, Copy)]
struct Geometry {
    images: usize,
    cin: usize,
    cout: usize,
    height: usize,
    width: usize,
    kernel: usize,
}

impl Geometry {
    /// Derives the shapes from the two image operands and the weight.
    fn new(
        x: [usize; 4],
        y: [usize; 4],
        w: [usize; 4],
        kernel: usize,
    ) -> Result<Self, OperandError> {
        let g = Self {
            images: x[0],
            cin: x[1],
            cout: y[1],
            height: x[2],
            width: x[3],
            kernel,
        };
        if y != [g.images, g.cout, g.height, g.width]
            || w != [g.cout, g.cin, kernel, kernel]
            || kernel.is_multiple_of(2)
        {
            return Err(OperandError::Shape(format!(
                "convolution of {x:?} by {w:?} to {y:?}"
            )));
        }
        Ok(g)
    }

    fn positions(self) -> usize {
        self.height * self.width
    }

    /// Returns the number of weights of one output channel.
    fn taps(self) -> usize {
        self.cin * self.kernel * self.kernel
    }

    /// Calls `f(start of a run in the unfolded image, start in the image, length)`, row by row; the
    /// rest of the unfolded image is padding.
    fn rows(self, mut f: impl FnMut(usize, usize, usize)) {
        let (h, w, k, pad) = (self.height, self.width, self.kernel, self.kernel / 2);
        for c in 0..self.cin {
            for dy in 0..k {
                for dx in 0..k {
                    let tap = ((c * k + dy) * k + dx) * h * w;
                    let (left, right) = (pad.saturating_sub(dx), dx.saturating_sub(pad));
                    if left + right >= w {
                        continue;
                    }
                    let len = w - left - right;
                    for y in pad.saturating_sub(dy)..(h + pad).saturating_sub(dy).min(h) {
                        f(tap + y * w + left, (c * h + y + dy - pad) * w + right, len);
                    }
                }
            }
        }
    }

    /// Unfolds an image: `[taps, positions]`.
    fn unfold(self, image: &[f32], columns: &mut [f32]) {
        columns.fill(0.0);
        self.rows(|to, from, len| columns[to..to + len].copy_from_slice(&image[from..from + len]));
    }

    /// Folds gradients of an unfolded image back.
    fn fold(self, columns: &[f32], image: &mut [f32]) {
        image.fill(0.0);
        self.rows(|from, to, len| {
            for (i, c) in image[to..to + len]
                .iter_mut()
                .zip(&columns[from..from + len])
            {
                *i += c;
            }
        });
    }
}

fn load_image(view: &View, i: usize, image: &mut [f32]) {
    view.load(i * image.len(), image);
}

/// Computes `x, w -> y`.
pub(super) fn forward(o: &Operands<'_>, kernel: usize) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (xs, ws, ys) = (
        dims::<4>(o.slot(false, 0)?)?,
        dims::<4>(o.slot(false, 1)?)?,
        dims::<4>(o.slot(true, 0)?)?,
    );
    let g = Geometry::new(xs, ys, ws, kernel)?;
    let (x, w, y) = (o.input(0)?, o.floats(1)?, o.output(0)?);
    in_place(o, &x)?;
    let (p, taps) = (g.positions(), g.taps());
    let [mut image, mut columns, mut out] = [g.cin * p, taps * p, g.cout * p].map(Scratch::take);
    for i in 0..g.images {
        load_image(&x, i, &mut image);
        g.unfold(&image, &mut columns);
        let (a, b, c) = (
            Mat::rows(&w, taps),
            Mat::rows(&columns, p),
            Mat::target(&mut out, p),
        );
        // SAFETY: all three are as long as their shapes say.
        unsafe { multiply(g.cout, p, taps, a, b, c, false) };
        y.store(i * g.cout * p, &out);
    }
    Ok(())
}

/// Computes `d_y, w -> d_x`.
pub(super) fn grad_input(o: &Operands<'_>, kernel: usize) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (ys, ws, xs) = (
        dims::<4>(o.slot(false, 0)?)?,
        dims::<4>(o.slot(false, 1)?)?,
        dims::<4>(o.slot(true, 0)?)?,
    );
    let g = Geometry::new(xs, ys, ws, kernel)?;
    let (dy, w, dx) = (o.input(0)?, o.floats(1)?, o.output(0)?);
    in_place(o, &dy)?;
    let (p, taps) = (g.positions(), g.taps());
    let [mut image, mut columns, mut grad] = [g.cout * p, taps * p, g.cin * p].map(Scratch::take);
    for i in 0..g.images {
        load_image(&dy, i, &mut image);
        let (a, b, c) = (
            Mat::rows(&w, taps).t(),
            Mat::rows(&image, p),
            Mat::target(&mut columns, p),
        );
        // SAFETY: all three are as long as their shapes say.
        unsafe { multiply(taps, p, g.cout, a, b, c, false) };
        g.fold(&columns, &mut grad);
        dx.store(i * g.cin * p, &grad);
    }
    Ok(())
}

/// Computes `d_y, x -> d_w`.
pub(super) fn grad_weight(o: &Operands<'_>, kernel: usize) -> Result<(), OperandError> {
    o.expect(2, 1)?;
    let (ys, xs, ws) = (
        dims::<4>(o.slot(false, 0)?)?,
        dims::<4>(o.slot(false, 1)?)?,
        dims::<4>(o.slot(true, 0)?)?,
    );
    let g = Geometry::new(xs, ys, ws, kernel)?;
    let (dy, x, dw) = (o.input(0)?, o.input(1)?, o.output(0)?);
    in_place(o, &dy)?;
    in_place(o, &x)?;
    same("the weight's gradient", g.cout * g.taps(), dw.numel)?;
    let (p, taps) = (g.positions(), g.taps());
    let [mut grads, mut image, mut columns] = [g.cout * p, g.cin * p, taps * p].map(Scratch::take);
    let mut sum = Scratch::zeroed(g.cout * taps);
    for i in 0..g.images {
        load_image(&dy, i, &mut grads);
        load_image(&x, i, &mut image);
        g.unfold(&image, &mut columns);
        let (a, b, c) = (
            Mat::rows(&grads, p),
            Mat::rows(&columns, p).t(),
            Mat::target(&mut sum, taps),
        );
        // SAFETY: all three are as long as their shapes say.
        unsafe { multiply(g.cout, taps, p, a, b, c, true) };
    }
    dw.store(0, &sum);
    Ok(())
}

fn in_place(o: &Operands<'_>, view: &View) -> Result<(), OperandError> {
    if o.written(view)? {
        return Err(OperandError::Shape(
            "a convolution cannot work in place".to_owned(),
        ));
    }
    Ok(())
}
