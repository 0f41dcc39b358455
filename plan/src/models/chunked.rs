//! Chunked cross entropy: head and loss together, one chunk of rows at a time.
//!
//! In [`head_and_loss`], as in Liger's fused linear cross entropy, each chunk's logits are turned
//! into their gradient in place, from which the gradients of the hidden states and of the head's
//! weight follow at once. The loss is where backward starts, so the factor that it starts from is
//! known here, and backward uses both gradients as they are. [`differentiated`] leaves gradients to
//! autograd, which computes each chunk's logits again or saves what it needs.

use super::build::{self, Builder};
use super::cross_entropy;
use super::declare::Layer;
use crate::graph::ValueId;
use crate::ir::{OpKind, Real, op};

/// Adds output projection and cross entropy of hidden states `[batch, seq, hidden]`.
pub(super) fn head_and_loss(b: &mut Builder<'_>, head: Layer, hidden: ValueId, labels: ValueId) {
    let weight = b.weight(head);
    let loss = b.within(head.module(), |b| {
        let (rows, d) = (b.g.value(hidden).rows(), b.g.value(hidden).cols());
        let vocab = b.g.value(weight).shape[0];
        let flat = b.g.reshape(hidden, &[rows, d]);
        let labels = b.g.reshape(labels, &[rows]);
        let trained = [
            b.g.value(flat).requires_grad,
            b.g.value(weight).requires_grad,
        ];
        // The chunks' own ops are not differentiated.
        let (x, w) = (b.g.detach(flat), b.g.detach(weight));
        let zero = OpKind::Fill(op::Fill { value: Real(0.0) });
        let mut loss = b.compute(zero, &[], &[&[]])[0];
        let dtype = b.g.value(flat).dtype;
        let dx = b.g.empty(&[rows, d], dtype);
        let mut dw = None;
        // Every chunk but the first reads and writes the gradient of the head's weight once more.
        for (start, len) in chunks(b, rows) {
            let xc = b.g.slice(x, 0, start, len);
            let yc = b.g.slice(labels, 0, start, len);
            let gemm = |ta, tb, accumulate| {
                OpKind::Gemm(op::Gemm {
                    ta,
                    tb,
                    bias: false,
                    accumulate,
                })
            };
            let logits = b.compute(gemm(false, true, false), &[xc, w], &[&[len, vocab]])[0];
            let kind = OpKind::CrossEntropy(op::CrossEntropy {
                scale: Real(1.0 / rows as f64),
                gradient: Real(build::seed(b.s, rows) / rows as f64),
            });
            let [grad, sum] =
                b.g.compute_into_both(kind, &[logits, yc, loss], logits, loss);
            loss = sum;
            let target = b.g.slice(dx, 0, start, len);
            b.g.compute_into(gemm(false, false, false), &[grad, w], target);
            if trained[1] {
                dw = Some(match dw {
                    None => b.compute(gemm(true, false, false), &[grad, xc], &[&[vocab, d]])[0],
                    Some(sum) => {
                        b.g.compute_into(gemm(true, false, true), &[grad, xc, sum], sum)
                    }
                });
            }
        }
        let dw = dw.unwrap_or(w);
        b.g.precomputed(loss, [flat, weight], [dx, dw])
    });
    b.set_loss(loss);
}

/// What a loss keeps of its chunks until backward.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// The hidden states: `torch.utils.checkpoint` around each chunk.
    Hidden,
    /// What the operations of each chunk save.
    Saved,
    /// The same; the logits of all chunks are computed before the first cross entropy, and the
    /// code around the loss holds them until its end.
    SavedAfterLogits,
}

/// Adds output projection, `change` of its logits, and cross entropy of hidden states `[batch, seq,
/// hidden]`: `sum(cross_entropy_of_chunk(h, y) for h, y in ..)`.
pub(super) fn differentiated(
    b: &mut Builder<'_>,
    head: Layer,
    hidden: ValueId,
    labels: ValueId,
    kept: Kept,
    change: impl Fn(&mut Builder<'_>, ValueId) -> ValueId,
) {
    let total = b.within(head.module(), |b| {
        let (rows, d) = (b.g.value(hidden).rows(), b.g.value(hidden).cols());
        let flat = b.g.reshape(hidden, &[rows, d]);
        let labels = b.g.reshape(labels, &[rows]);
        let logits = |b: &mut Builder<'_>, (start, len)| {
            let x = b.g.slice(flat, 0, start, len);
            let logits = b.linear(head, x);
            change(b, logits)
        };
        // Only a checkpoint is around both head and loss. Otherwise, the loss is a function of its
        // own, which can be compiled without the head.
        let module = match kept {
            Kept::Hidden => head.module(),
            Kept::Saved | Kept::SavedAfterLogits => b.tree.loss(),
        };
        let loss = |b: &mut Builder<'_>, (start, len), logits| {
            b.within(module, |b| {
                let y = b.g.slice(labels, 0, start, len);
                let float = cross_entropy::float_rows(b, logits);
                let mean = cross_entropy::of_rows(b, float, y);
                b.scale(mean, len as f64 / rows as f64)
            })
        };
        let all: Vec<(u64, u64)> = chunks(b, rows).collect();
        let before: Vec<ValueId> = match kept {
            Kept::SavedAfterLogits => all.iter().map(|at| logits(b, *at)).collect(),
            Kept::Hidden | Kept::Saved => Vec::new(),
        };
        let mut total = None;
        for (i, at) in all.into_iter().enumerate() {
            let part = match (kept, before.get(i)) {
                (Kept::Hidden, _) => b.checkpoint(|b| {
                    let logits = logits(b, at);
                    loss(b, at, logits)
                }),
                (_, Some(logits)) => loss(b, at, *logits),
                (_, None) => {
                    let logits = logits(b, at);
                    let part = loss(b, at, logits);
                    b.g.release(logits);
                    part
                }
            };
            total = Some(match total {
                None => part,
                Some(sum) => b.g.binary(OpKind::Add, sum, part),
            });
        }
        for logits in before {
            b.g.release(logits);
        }
        total.expect("a micro-batch has rows")
    });
    b.set_loss(total);
}

/// Returns start and length of each chunk of rows.
fn chunks(b: &Builder<'_>, rows: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
    let chunk = b.s.train.loss_chunk_rows.clamp(1, rows);
    let starts = (0..rows).step_by(chunk as usize);
    starts.map(move |start| (start, chunk.min(rows - start)))
}
