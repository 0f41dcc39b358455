//! AdamW and SGD as in `torch.optim`, on any ranges that the program gives.

use super::super::error::OperandError;
use super::super::operands::same;
use super::super::parallel;
use super::super::scratch::Scratch;
use super::super::view::View;
use super::super::wide::wide;
use super::{BLOCK, Sequence, add_up, clip_factor, scalar};
use crate::operand::{Hyper, RawRange};
use shardlab_plan::ir::{DType, Pieces};

/// Number of weights from which an update uses several threads.
const PARALLEL: usize = 1 << 15;

/// Factors of an AdamW step.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    /// Factor of gradients.
    clip: f32,
    /// `1 - lr * weight_decay`.
    decay: f32,
    /// `1 - beta1`.
    blend: f32,
    beta2: f32,
    /// `1 - beta2`.
    rest2: f32,
    /// `lr / (1 - beta1^step)`.
    step: f32,
    /// `sqrt(1 - beta2^step)`.
    root: f32,
    eps: f32,
}

wide! {
    /// Updates one block with AdamW: weights, gradients, moments.
    fn adamw_block(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], f: Factors) {
        for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * f.clip;
            let decayed = *w * f.decay;
            let first = *m + f.blend * (g - *m);
            let second = *v * f.beta2 + f.rest2 * (g * g);
            let denominator = second.sqrt() / f.root + f.eps;
            (*m, *v) = (first, second);
            *w = decayed - f.step * (first / denominator);
        }
    }

    /// Updates one block with SGD; the decay is added to the gradient.
    fn sgd_block(w: &mut [f32], g: &[f32], clip: f32, lr: f32, decay: f32) {
        for (w, g) in w.iter_mut().zip(g) {
            *w -= lr * (g * clip + decay * *w);
        }
    }
}

fn factors(h: &Hyper, clip: f32) -> Factors {
    let [b1, b2] = h.betas;
    let steps = i32::try_from(h.step.max(1)).unwrap_or(i32::MAX);
    Factors {
        clip,
        decay: (1.0 - h.lr * h.weight_decay) as f32,
        blend: (1.0 - b1) as f32,
        beta2: b2 as f32,
        rest2: (1.0 - b2) as f32,
        step: (h.lr / (1.0 - b1.powi(steps))) as f32,
        root: (1.0 - b2.powi(steps)).sqrt() as f32,
        eps: h.eps as f32,
    }
}

/// Returns the clip factor of a last scalar read, if the reads before it come in pairs.
fn clip(h: &Hyper, reads: &[RawRange]) -> Result<f32, OperandError> {
    if reads.len().is_multiple_of(2) {
        return Ok(1.0);
    }
    Ok(clip_factor(scalar(reads.last())?.get(0), h.clip_norm))
}

/// Computes `weight, gradient[, first moment, second moment], ..[, square of the norm]`; a tensor
/// without moments continues those of the tensor before. With `cast`, a tensor's writes end with
/// the copies of its weight.
pub(super) fn adamw(
    h: &Hyper,
    cast: bool,
    pieces: Option<Pieces>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let f = factors(h, clip(h, reads)?);
    let (mut r, mut w) = (0, 0);
    let mut moments: Option<(View, View, usize)> = None;
    while r + 1 < reads.len() {
        let missing = OperandError::Count {
            what: "writes",
            needed: w + 1,
            found: writes.len(),
        };
        let target = View::flat(*writes.get(w).ok_or(missing)?)?;
        let weight = View::flat(reads[r])?;
        let grad = Gradient::of(&weight, reads[r + 1], pieces)?;
        updates(&weight, &target)?;
        (r, w) = (r + 2, w + 1);
        // Moments are read and written next; a next weight would be followed by a gradient, which
        // is not written.
        if let (Some([m, v]), Some([wm, wv])) = (reads.get(r..r + 2), writes.get(w..w + 2))
            && m.ptr == wm.ptr
            && v.ptr == wv.ptr
            && m.bytes > 0
            && m.bytes == wm.bytes
            && v.bytes == wv.bytes
        {
            moments = Some((View::flat(*m)?, View::flat(*v)?, 0));
            (r, w) = (r + 2, w + 2);
        }
        let copies = copies(cast, &weight, writes, &mut w)?;
        if weight.numel == 0 {
            continue;
        }
        let Some((m, v, at)) = &mut moments else {
            return Err(OperandError::Count {
                what: "moments",
                needed: 2,
                found: 0,
            });
        };
        for x in [&*m, &*v] {
            if *at + weight.numel > x.numel {
                return Err(OperandError::Size {
                    what: "a moment",
                    needed: *at + weight.numel,
                    found: x.numel,
                });
            }
        }
        let (m, v, at_first) = (&*m, &*v, *at);
        let step = if weight.numel < PARALLEL {
            weight.numel
        } else {
            BLOCK
        };
        parallel::split(weight.numel, step, |part| {
            let mut block = [BLOCK; 4].map(Scratch::take);
            for start in part.clone().step_by(BLOCK) {
                let n = BLOCK.min(part.end - start);
                let [bw, bg, bm, bv] = &mut block;
                weight.load(start, &mut bw[..n]);
                grad.load(start, &mut bg[..n]);
                m.load(at_first + start, &mut bm[..n]);
                v.load(at_first + start, &mut bv[..n]);
                adamw_block(&mut bw[..n], &bg[..n], &mut bm[..n], &mut bv[..n], f);
                weight.store(start, &bw[..n]);
                again(&weight, start, &mut bw[..n], &copies);
                m.store(at_first + start, &bm[..n]);
                v.store(at_first + start, &bv[..n]);
            }
            Ok::<(), OperandError>(())
        })?;
        *at += weight.numel;
    }
    all_written(w, writes)
}

/// Computes `weight, gradient, ..[, square of the norm]`.
pub(super) fn sgd(
    h: &Hyper,
    cast: bool,
    pieces: Option<Pieces>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let clip = clip(h, reads)?;
    let [mut bw, mut bg] = [BLOCK; 2].map(Scratch::take);
    let mut w = 0;
    for pair in reads.chunks_exact(2) {
        let missing = OperandError::Count {
            what: "writes",
            needed: w + 1,
            found: writes.len(),
        };
        let target = View::flat(*writes.get(w).ok_or(missing)?)?;
        let weight = View::flat(pair[0])?;
        let grad = Gradient::of(&weight, pair[1], pieces)?;
        updates(&weight, &target)?;
        w += 1;
        let copies = copies(cast, &weight, writes, &mut w)?;
        for start in (0..weight.numel).step_by(BLOCK) {
            let n = BLOCK.min(weight.numel - start);
            weight.load(start, &mut bw[..n]);
            grad.load(start, &mut bg[..n]);
            sgd_block(
                &mut bw[..n],
                &bg[..n],
                clip,
                h.lr as f32,
                h.weight_decay as f32,
            );
            weight.store(start, &bw[..n]);
            again(&weight, start, &mut bw[..n], &copies);
        }
    }
    all_written(w, writes)
}

/// Returns the copies of a weight: with `cast` the writes from `next` on that make up its length.
fn copies(
    cast: bool,
    weight: &View,
    writes: &[RawRange],
    next: &mut usize,
) -> Result<Sequence, OperandError> {
    let numel = if cast { weight.numel } else { 0 };
    let found = Sequence::of_length(writes.get(*next..).unwrap_or(&[]), numel)?;
    same("a weight's copies", numel, found.numel)?;
    *next += found.views.len();
    Ok(found)
}

/// Writes the new weights `new`, from position `start` on, to their copies, equal to a cast of the
/// stored ones.
fn again(weight: &View, start: usize, new: &mut [f32], copies: &Sequence) {
    if copies.views.is_empty() {
        return;
    }
    if weight.dtype != DType::F32 {
        weight.load(start, new);
    }
    copies.store(start, new);
}

/// A gradient: one number per element, or pieces that make it up.
struct Gradient {
    view: View,
    pieces: Option<Pieces>,
    numel: usize,
}

impl Gradient {
    fn of(weight: &View, range: RawRange, pieces: Option<Pieces>) -> Result<Self, OperandError> {
        let (view, numel) = (View::flat(range)?, weight.numel);
        let ranks = pieces.map_or(1, |p| p.ranks.max(1) as usize);
        same("a gradient", numel * ranks, view.numel)?;
        Ok(Self {
            view,
            pieces,
            numel,
        })
    }

    /// Loads the elements from `start` on.
    fn load(&self, start: usize, out: &mut [f32]) {
        let Some(Pieces { ranks, factor }) = self.pieces else {
            self.view.load(start, out);
            return;
        };
        let n = out.len();
        let mut room = Scratch::take(n);
        let of = (ranks.max(1) as usize, factor.0 as f32);
        add_up(&self.view, of, self.numel, start, (out, &mut room[..n]));
    }
}

/// Checks that a weight is updated in place.
fn updates(weight: &View, target: &View) -> Result<(), OperandError> {
    if weight.numel > 0 && weight != target {
        return Err(OperandError::Shape(
            "a weight is not written where it is read".to_owned(),
        ));
    }
    Ok(())
}

fn all_written(used: usize, writes: &[RawRange]) -> Result<(), OperandError> {
    same("the list of writes", writes.len(), used)
}
