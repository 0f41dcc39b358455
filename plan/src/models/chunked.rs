//! Chunked cross entropy: head and loss together, one chunk of rows at a time (as Liger's fused
//! linear cross entropy).
//!
//! Each chunk's logits are turned into their gradient in place, from which the gradients of the
//! hidden states and of the head's weight follow at once. The loss is where backward starts, so the
//! factor that it starts from is known here, and backward uses both gradients as they are.

use super::build::{self, Builder};
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
        let chunk = b.s.train.loss_chunk_rows.clamp(1, rows);
        let mut start = 0;
        while start < rows {
            let len = chunk.min(rows - start);
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
            start += len;
        }
        let dw = dw.unwrap_or(w);
        b.g.precomputed(loss, [flat, weight], [dx, dw])
    });
    b.set_loss(loss);
}
