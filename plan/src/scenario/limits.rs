//! Sizes beyond which sums of bytes, FLOPs or time would leave 64 bits, or a plan would not fit in
//! memory.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::Document;
use crate::config::{Model, Scenario};
use crate::models::Inputs;

/// Blocks times micro-batches, with which the length of a program grows.
const MAX_BLOCK_RUNS: u64 = 1 << 15;
/// The same for chunks of the loss, of all micro-batches.
const MAX_CHUNKS: u64 = 1 << 15;
/// FLOPs of one rank in one step.
const MAX_FLOPS: u128 = 1 << 60;
/// Bytes of one rank in one step, all tensors added.
const MAX_BYTES: u128 = 1 << 56;
/// Bytes of a copy of the parameters on every rank.
const MAX_BYTES_OF_ALL_RANKS: u128 = 1 << 60;

/// Refuses sizes that are too large to be counted.
pub(crate) fn check(s: &Scenario, d: &Document) -> Result<(), ScenarioError> {
    let (m, t) = (&s.model, &s.train);
    let runs = u64::from(m.layers) * u64::from(t.grad_accum);
    if runs > MAX_BLOCK_RUNS {
        let message = format!(
            "{runs} block executions per step (layers * grad_accum) are more than {MAX_BLOCK_RUNS}"
        );
        return Err(d.conflict(&[Key::GradAccum, Key::Layers], message));
    }
    let rows = t.micro_batch.saturating_mul(t.seq_len);
    let chunks = rows
        .div_ceil(t.loss_chunk_rows.max(1))
        .saturating_mul(t.grad_accum.into());
    if t.loss.is_chunked() && chunks > MAX_CHUNKS {
        let message = format!(
            "{chunks} loss chunks per step (rows / loss_chunk_tokens * grad_accum) are more than {MAX_CHUNKS}"
        );
        let keys = [
            Key::LossChunkRows,
            Key::GradAccum,
            Key::MicroBatch,
            Key::SeqLen,
        ];
        return Err(d.conflict(&keys, message));
    }
    let sizes = [
        Key::MicroBatch,
        Key::SeqLen,
        Key::GradAccum,
        Key::Layers,
        Key::Hidden,
        Key::Channels,
        Key::DpShard,
        Key::DpOuter,
    ];
    let too_large = |what: &str, n: u128, most: u128| {
        d.conflict(
            &sizes,
            format!(
                "the model and its batch are too large: {:.1e} {what}, at most {:.1e}",
                n as f64, most as f64
            ),
        )
    };
    let work = Work::of(m, u128::from(t.micro_batch), u128::from(t.seq_len));
    let accum = u128::from(t.grad_accum);
    // Backward is twice forward, recompute once more.
    let flops = work.flops.saturating_mul(4 * accum);
    if flops > MAX_FLOPS {
        return Err(too_large("FLOPs per rank and step", flops, MAX_FLOPS));
    }
    // Main weights, moments, gradients, copies: below 32 bytes a parameter.
    let bytes = work
        .elements
        .saturating_mul(4 * accum)
        .saturating_add(work.parameters.saturating_mul(32));
    if bytes > MAX_BYTES {
        return Err(too_large("bytes per rank and step", bytes, MAX_BYTES));
    }
    let everywhere = work
        .parameters
        .saturating_mul(4 * u128::from(s.mesh.world()));
    if everywhere > MAX_BYTES_OF_ALL_RANKS {
        return Err(too_large(
            "bytes of parameters over all ranks",
            everywhere,
            MAX_BYTES_OF_ALL_RANKS,
        ));
    }
    Ok(())
}

/// Upper bounds of the work of one micro-batch; every factor is at most 2^24, so that results fit
/// into 128 bits.
struct Work {
    /// Parameters of the model.
    parameters: u128,
    /// Activation elements, all tensors of forward and backward added.
    elements: u128,
    /// Forward FLOPs.
    flops: u128,
}

impl Work {
    fn of(m: &Model, batch: u128, seq: u128) -> Self {
        let [layers, hidden, heads, kv, dim, ffn, vocab] = [
            u64::from(m.layers),
            m.hidden,
            m.heads,
            m.kv_heads,
            m.head_dim,
            m.ffn,
            m.vocab,
        ]
        .map(u128::from);
        let [channels, height, width, kernel] =
            [m.channels, m.height, m.width, m.kernel].map(u128::from);
        let rows = batch * seq;
        let spec = m.family.spec();
        match (spec.attention, spec.inputs) {
            (Some(_), _) => {
                let block =
                    hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * ffn + 16 * hidden + 2 * ffn;
                let head = hidden * vocab.max(hidden);
                let attention = 4 * batch * heads * seq * seq * dim;
                Self {
                    parameters: layers * block + 2 * head + hidden * u128::from(m.max_seq_len),
                    elements: 8
                        * (layers * rows * (8 * hidden + 4 * dim * heads + 4 * ffn)
                            + rows * (vocab + hidden)),
                    flops: layers * (2 * rows * block + attention) + 2 * rows * head,
                }
            }
            (None, Inputs::Tokens | Inputs::Features) => Self {
                parameters: layers * hidden * (hidden + 1),
                elements: 8 * (layers + 1) * rows * hidden,
                flops: 2 * layers * rows * hidden * hidden,
            },
            (None, Inputs::Images) => {
                let filter = channels * channels * kernel * kernel;
                let pixels = rows * height * width;
                Self {
                    parameters: layers * (filter + channels) + channels,
                    elements: 8 * (layers + 1) * pixels * channels,
                    flops: layers * 2 * pixels * filter,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::parse;

    /// Parameter counts as published: 8.03e9, 70.6e9, 405.9e9, 124e6.
    #[test]
    fn bounds_are_above_and_near_the_published_sizes() {
        for (preset, published) in [
            ("llama3-8b", 8.03e9),
            ("llama3-70b", 70.55e9),
            ("llama3-405b", 405.85e9),
            ("gpt2", 124.4e6),
        ] {
            let text = format!(
                "[model]\npreset = \"{preset}\"\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n"
            );
            let s = parse(preset, &text, &[]).unwrap();
            let n = Work::of(&s.model, 1, 1).parameters as f64;
            assert!(
                n >= published * 0.999 && n < published * 1.7,
                "{preset}: {n:e}"
            );
        }
    }
}
