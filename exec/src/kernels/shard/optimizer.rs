//! Optimizers that update elements, on any ranges that the program gives: AdamW and SGD as in
//! `torch.optim`, and Lion.

use super::super::error::OperandError;
use super::super::operands::same;
use super::super::parallel;
use super::super::scratch::Scratch;
use super::super::view::View;
use super::super::wide::wide;
use super::{BLOCK, Sequence, add_up, clip_of, float8};
use crate::base::blockwise::{self, Codebook};
use crate::operand::{Hyper, LaunchContext, RawRange};
use shardlab_plan::config::MAX_PARAM_GROUPS;
use shardlab_plan::ir::{DType, Pieces, Update, UpdateRule};
use shardlab_plan::program::GroupRun;
use smallvec::SmallVec;

// A block of a launch is whole blocks of states in 8 bits.
const _: () = assert!(BLOCK.is_multiple_of(blockwise::BLOCK));

/// Number of weights from which an update uses several threads.
const PARALLEL: usize = 1 << 15;

/// Factors of a step.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    /// Factor of gradients.
    clip: f32,
    lr: f32,
    weight_decay: f32,
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

    /// Updates one block with Lion: weights, gradients, momentum.
    fn lion_block(w: &mut [f32], g: &[f32], m: &mut [f32], f: Factors) {
        for ((w, g), m) in w.iter_mut().zip(g).zip(m) {
            let g = g * f.clip;
            let blend = *m + f.blend * (g - *m);
            // The sign of 0 is 0, unlike that of `signum`.
            let sign = f32::from(blend > 0.0) - f32::from(blend < 0.0);
            *m = *m * f.beta2 + f.rest2 * g;
            *w = *w * f.decay - f.lr * sign;
        }
    }

    /// Updates one block with SGD; the decay is added to the gradient.
    fn sgd_block(w: &mut [f32], g: &[f32], f: Factors) {
        for (w, g) in w.iter_mut().zip(g) {
            *w -= f.lr * (g * f.clip + f.weight_decay * *w);
        }
    }
}

fn factors(h: &Hyper, clip: f32) -> Factors {
    let [b1, b2] = h.betas;
    let steps = i32::try_from(h.step.max(1)).unwrap_or(i32::MAX);
    Factors {
        clip,
        lr: h.lr as f32,
        weight_decay: h.weight_decay as f32,
        decay: (1.0 - h.lr * h.weight_decay) as f32,
        blend: (1.0 - b1) as f32,
        beta2: b2 as f32,
        rest2: (1.0 - b2) as f32,
        step: (h.lr / (1.0 - b1.powi(steps))) as f32,
        root: (1.0 - b2.powi(steps)).sqrt() as f32,
        eps: h.eps as f32,
    }
}

/// A tensor of a launch.
pub(super) struct Tensor {
    pub(super) weight: View,
    pub(super) grad: Gradient,
    /// State, and the first of its elements that is this tensor's.
    pub(super) states: SmallVec<[State; 2]>,
    pub(super) first: usize,
    pub(super) copies: Sequence,
}

/// A state of several weights.
#[derive(Clone)]
pub(super) struct State {
    view: View,
    /// Scales of blocks, and the factors of their codes, of a state in 8 bits.
    blocks: Option<(View, &'static Codebook)>,
}

impl State {
    /// Loads the elements from `start` on, which is the start of a block.
    pub(super) fn load(&self, start: usize, out: &mut [f32]) {
        let Some((scales, map)) = &self.blocks else {
            return self.view.load(start, out);
        };
        // SAFETY: the elements are inside the range, whose creator guarantees that it is live and
        // that only this launch touches it.
        let codes = unsafe { std::slice::from_raw_parts(self.view.ptr.add(start), out.len()) };
        let blocks = codes
            .chunks(blockwise::BLOCK)
            .zip(out.chunks_mut(blockwise::BLOCK));
        for (n, (codes, values)) in blocks.enumerate() {
            let scale = scales.get(start / blockwise::BLOCK + n);
            blockwise::dequantize(codes, scale, map, values);
        }
    }

    /// Stores elements from `start` on, which is the start of a block: whole blocks, or up to the
    /// end.
    pub(super) fn store(&self, start: usize, values: &[f32]) {
        let Some((scales, map)) = &self.blocks else {
            return self.view.store(start, values);
        };
        // SAFETY: as above; the caller writes these elements alone.
        let codes =
            unsafe { std::slice::from_raw_parts_mut(self.view.ptr.add(start), values.len()) };
        let blocks = codes
            .chunks_mut(blockwise::BLOCK)
            .zip(values.chunks(blockwise::BLOCK));
        for (n, (codes, values)) in blocks.enumerate() {
            let scale = blockwise::quantize(values, map, codes);
            scales.store(start / blockwise::BLOCK + n, &[scale]);
        }
    }
}

/// Reads the ranges of the states of a rule: after states in 8 bits come their scales.
fn states(ranges: &[RawRange], count: usize) -> Result<SmallVec<[State; 2]>, OperandError> {
    let mut found = SmallVec::new();
    for (n, range) in ranges[..count].iter().enumerate() {
        let view = View::flat(*range)?;
        let blocks = match ranges.get(count + n) {
            Some(scales) => {
                let scales = View::flat(*scales)?;
                same("the scales", blockwise::scales(view.numel), scales.numel)?;
                // The first state is signed: it is a mean of gradients.
                Some((scales, blockwise::codebook(n == 0)))
            }
            None => None,
        };
        found.push(State { view, blocks });
    }
    Ok(found)
}

/// Reads the operands `weight, gradient[, states], ..[, square of the norm]`: a tensor without
/// states continues those of the tensor before. With `cast`, a tensor's writes end with the copies
/// of its weight. Returns the tensors and the number of reads that they are.
pub(super) fn tensors(
    update: Update,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(Vec<Tensor>, usize), OperandError> {
    let count = update.rule.states();
    let (mut r, mut w) = (0, 0);
    let mut found: Vec<Tensor> = Vec::new();
    // State of the last tensor that has some, with the number of elements in use.
    let mut current: SmallVec<[State; 2]> = SmallVec::new();
    let mut used = 0;
    while r + 1 < reads.len() {
        let target = View::flat(
            *writes
                .get(w)
                .ok_or(missing("writes", w + 1, writes.len()))?,
        )?;
        let weight = View::flat(reads[r])?;
        let grad = Gradient::of(&weight, reads[r + 1], update.fused.pieces)?;
        updates(&weight, &target)?;
        (r, w) = (r + 2, w + 1);
        if count > 0 && weight.numel > 0 && current.first().is_none_or(|s| s.view.numel == used) {
            let in_bytes = reads.get(r).is_some_and(|s| s.dtype == DType::U8);
            let ranges = if in_bytes { 2 * count } else { count };
            let written = writes.get(w..w + ranges).unwrap_or_default();
            let read = reads.get(r..r + ranges).unwrap_or_default();
            let same = |(a, b): (&RawRange, &RawRange)| a.ptr == b.ptr && a.bytes == b.bytes;
            if read.is_empty() || written.is_empty() || !read.iter().zip(written).all(same) {
                return Err(missing("states", count, 0));
            }
            current = states(read, count)?;
            used = 0;
            (r, w) = (r + ranges, w + ranges);
        }
        let copies = copies(update.fused.cast, &weight, writes, &mut w)?;
        for State { view, blocks } in &current {
            if used + weight.numel > view.numel {
                return Err(OperandError::Size {
                    what: "a state",
                    needed: used + weight.numel,
                    found: view.numel,
                });
            }
            if blocks.is_some() && weight.numel != view.numel && weight.numel > 0 {
                let message = "a state in 8 bits belongs to several ranges of weights";
                return Err(OperandError::Shape(message.to_owned()));
            }
        }
        let first = used;
        used += if count > 0 { weight.numel } else { 0 };
        found.push(Tensor {
            weight,
            grad,
            states: current.clone(),
            first,
            copies,
        });
    }
    same("the list of writes", writes.len(), w)?;
    Ok((found, r))
}

fn missing(what: &'static str, needed: usize, found: usize) -> OperandError {
    OperandError::Count {
        what,
        needed,
        found,
    }
}

/// Updates the tensors of a launch.
pub(super) fn update(
    ctx: &LaunchContext<'_>,
    update: Update,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let (writes, maxima) = match writes.split_last() {
        Some((maxima, rest)) if update.fused.maxima => (rest, Some(maxima)),
        _ => (writes, None),
    };
    let (tensors, used) = tensors(update, reads, writes)?;
    let clip = clip_of(reads.get(used), ctx.hyper.clip_norm)?;
    let groups: [Factors; MAX_PARAM_GROUPS] =
        std::array::from_fn(|group| factors(&ctx.hyper.of(group), clip));
    let mut runs = Runs::new(ctx.groups);
    for tensor in &tensors {
        let mut start = 0;
        while start < tensor.weight.numel {
            let (group, n) = runs.take(tensor.weight.numel - start);
            let blocks = tensor.states.iter().any(|s| s.blocks.is_some());
            if blocks && n < tensor.weight.numel {
                let message = "a state in 8 bits belongs to several parameter groups";
                return Err(OperandError::Shape(message.to_owned()));
            }
            let f = groups[group.min(MAX_PARAM_GROUPS - 1)];
            let step = if n < PARALLEL { n } else { BLOCK };
            parallel::split(n, step, |part| {
                tensor.update(update.rule, start + part.start..start + part.end, f);
                Ok::<(), OperandError>(())
            })?;
            start += n;
        }
    }
    match maxima {
        Some(out) => {
            let mut weights = Sequence::new(&[])?;
            for Tensor { weight, .. } in &tensors {
                weights.numel += weight.numel;
                weights.views.push(weight.clone());
            }
            // Of the weights as they are gathered.
            float8::amax_of(&weights, DType::Bf16, ctx.scales, &View::flat(*out)?)
        }
        None => Ok(()),
    }
}

/// Parameter groups of a launch's weights, from the first on.
pub(super) struct Runs<'a> {
    rest: &'a [GroupRun],
    /// Elements of the first run that have been taken.
    taken: usize,
}

impl<'a> Runs<'a> {
    pub(super) fn new(rest: &'a [GroupRun]) -> Self {
        Self { rest, taken: 0 }
    }

    /// Takes the next elements in one group, at most `limit`; returns the group and their number.
    /// Without runs, everything is in group 0.
    pub(super) fn take(&mut self, limit: usize) -> (usize, usize) {
        let [run, rest @ ..] = self.rest else {
            return (0, limit);
        };
        let n = limit.min(run.numel as usize - self.taken);
        self.taken += n;
        if self.taken == run.numel as usize {
            (self.rest, self.taken) = (rest, 0);
        }
        (usize::from(run.group), n)
    }
}

impl Tensor {
    /// Updates a range of elements.
    fn update(&self, rule: UpdateRule, range: std::ops::Range<usize>, f: Factors) {
        let [mut bw, mut bg, mut bm, mut bv] = [BLOCK; 4].map(Scratch::take);
        for start in range.clone().step_by(BLOCK) {
            let n = BLOCK.min(range.end - start);
            let (w, g) = (&mut bw[..n], &mut bg[..n]);
            let mut states = [&mut bm[..n], &mut bv[..n]];
            self.weight.load(start, w);
            self.grad.load(start, g);
            for (state, values) in self.states.iter().zip(&mut states) {
                state.load(self.first + start, values);
            }
            let [m, v] = &mut states;
            match rule {
                UpdateRule::AdamW => adamw_block(w, g, m, v, f),
                UpdateRule::Lion => lion_block(w, g, m, f),
                UpdateRule::Sgd => sgd_block(w, g, f),
                // Matrices and routers are updated as a whole.
                UpdateRule::Muon(_) | UpdateRule::MuonMomentum | UpdateRule::RouterBias(_) => {
                    return;
                }
            }
            self.store(start, w);
            for (state, values) in self.states.iter().zip(&states) {
                state.store(self.first + start, values);
            }
        }
    }

    /// Writes the weights from `start` on, and their copies.
    pub(super) fn store(&self, start: usize, new: &mut [f32]) {
        self.weight.store(start, new);
        again(&self.weight, start, new, &self.copies);
    }
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
pub(super) struct Gradient {
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
    pub(super) fn load(&self, start: usize, out: &mut [f32]) {
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
pub(super) fn updates(weight: &View, target: &View) -> Result<(), OperandError> {
    if weight.numel > 0 && weight != target {
        return Err(OperandError::Shape(
            "a weight is not written where it is read".to_owned(),
        ));
    }
    Ok(())
}
