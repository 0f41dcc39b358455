//! Attention as transformers calls it, and its masks.

use super::Builder;
use super::code::ScoreType;
use crate::config::{AttentionSinks, AttnImplementation, LayerType};
use crate::graph::ValueId;
use crate::ir::{DType, OpKind, Real, ScoreMod, op};
use crate::models::declare::ROOT;
use crate::models::spec::Mask;
use crate::ops::eager::batched;
use crate::ops::masked_fill;

/// Framework calls between embedding and first block, until the host reads whether the positions of
/// packed sequences start again (`find_packed_sequence_indices`): 12 small kernels, each a call and
/// a launch.
const MASK_CALLS: u8 = 24;

/// Framework calls that make a mask of positions, without the one that is in the graph: ranges,
/// comparisons and their conjunction.
const POSITION_CALLS: u8 = 12;

/// Masks that all blocks read: `[batch, 1, seq, seq]`, of bytes or, for eager attention, numbers.
#[derive(Clone, Copy, Default)]
pub(in crate::models) struct Masks {
    full: Option<ValueId>,
    sliding: Option<ValueId>,
    /// Embedded tokens, which live until the model's `forward` returns, like the masks.
    embedded: Option<ValueId>,
}

impl Masks {
    /// Adds the check for packed sequences, whose result the host reads before the first block, and
    /// what makes the masks; `embedded` is what the first block reads.
    pub(in crate::models) fn new(b: &mut Builder<'_>, embedded: ValueId) -> Self {
        if !b.is_transformers() {
            return Self::default();
        }
        b.within(ROOT, |b| b.g.host_read(MASK_CALLS));
        let (seq, options) = (b.seq(), &b.s.model.options);
        let causal = b.s.model.family.spec().attention == Some(Mask::Causal);
        let kinds = (0..b.s.model.layers as usize).map(|layer| b.s.model.layer_type(layer));
        let [slides, chunked] = [LayerType::Sliding, LayerType::Chunked]
            .map(|kind| kinds.clone().any(|other| other == kind));
        // Shorter sequences do not reach the end of the window, or of the first chunk.
        let slides_far = slides && seq > options.layers.window_from;
        let reaches = |size: Option<u64>| size.is_some_and(|size| size <= seq);
        let reaches = slides_far && reaches(options.layers.sliding_window)
            || chunked && reaches(options.layers.attention_chunk);
        let slides = slides || chunked;
        let code = attention_code(b);
        let (full, sliding) = match code {
            AttnImplementation::Sdpa => (false, slides && reaches),
            AttnImplementation::Eager => (causal, slides),
            AttnImplementation::FlashAttention2 => (false, false),
        };
        let fills = b.code().attention.fills_mask;
        let numbers = code == AttnImplementation::Eager && !fills;
        let mut of = |needed: bool| needed.then(|| positions(b, numbers));
        Self {
            full: of(full),
            sliding: of(sliding),
            embedded: Some(embedded),
        }
    }

    /// Returns the mask of a layer with a window or chunks, or without.
    pub(in crate::models) fn of_layer(self, slides: bool) -> Option<ValueId> {
        match slides {
            true => self.sliding.or(self.full),
            false => self.full,
        }
    }

    /// Ends the lives of the masks and of the embedded tokens.
    pub(in crate::models) fn release(self, b: &mut Builder<'_>) {
        b.within(ROOT, |b| {
            for v in [self.full, self.sliding, self.embedded]
                .into_iter()
                .flatten()
            {
                b.g.release(v);
            }
        });
    }
}

/// Returns the code that computes attention. Types without code for `sdpa`, and all with sinks, are
/// loaded with `eager` instead (`_supports_sdpa = False`).
fn attention_code(b: &Builder<'_>) -> AttnImplementation {
    let options = &b.s.model.options;
    let has_sinks = options.attention.attention_sinks != AttentionSinks::None;
    match options.attn_implementation {
        AttnImplementation::Sdpa if has_sinks || !b.code().attention.sdpa => {
            AttnImplementation::Eager
        }
        code => code,
    }
}

/// Makes the mask of all pairs of positions: a byte for each, or for eager attention a number.
fn positions(b: &mut Builder<'_>, numbers: bool) -> ValueId {
    let (batch, seq) = (b.batch(), b.seq());
    let positions = b.constant("positions", &[seq], DType::I64, false);
    b.within(ROOT, |b| {
        let pairs = b.g.expand(positions, &[1, 1, seq, seq]);
        let shape = [1, 1, seq, seq];
        let mask = b.g.compute(OpKind::Copy, &[pairs], &[(&shape, DType::U8)])[0];
        b.g.dispatches(POSITION_CALLS);
        let mask = b.g.expand(mask, &[batch, 1, seq, seq]);
        match numbers {
            true => summand(b, mask),
            false => mask,
        }
    })
}

/// Makes a summand of scores from a mask of bytes.
fn summand(b: &mut Builder<'_>, mask: ValueId) -> ValueId {
    let shape = b.g.value(mask).shape.clone();
    let dtype = b.activation_type();
    b.g.compute(OpKind::Copy, &[mask], &[(&shape, dtype)])[0]
}

/// Scores of one attention.
#[derive(Clone, Copy)]
pub(in crate::models) struct Scores {
    pub(in crate::models) causal: bool,
    pub(in crate::models) scale: f64,
    pub(in crate::models) score_mod: ScoreMod,
    pub(in crate::models) mask: Option<ValueId>,
}

/// Applies causal attention of any implementation, without anything that changes the scores.
pub(in crate::models) fn causal(b: &mut Builder<'_>, qkv: [ValueId; 3], masks: Masks) -> ValueId {
    let [q, k, v] = qkv;
    if !b.is_transformers() {
        return b.attention(q, k, v, true);
    }
    let scores = Scores {
        causal: true,
        scale: 1.0 / (b.g.value(q).cols() as f64).sqrt(),
        score_mod: ScoreMod::NONE,
        mask: masks.of_layer(false),
    };
    attention(b, qkv, scores)
}

/// Applies attention to `[batch, heads, seq, head_dim]` views, as `attn_implementation` says.
pub(in crate::models) fn attention(
    b: &mut Builder<'_>,
    qkv: [ValueId; 3],
    scores: Scores,
) -> ValueId {
    match (attention_code(b), scores.mask) {
        (AttnImplementation::FlashAttention2, _) => {
            b.flex_attention(qkv, scores.causal, scores.scale, scores.score_mod)
        }
        (AttnImplementation::Eager, _) => eager(b, qkv, scores),
        (AttnImplementation::Sdpa, _)
            if b.code().attention.broadcasts_key && b.g.value(qkv[1]).shape[1] == 1 =>
        {
            math(b, qkv, scores, None)
        }
        (AttnImplementation::Sdpa, Some(mask)) => {
            let [q, k, v] = repeated(b, qkv);
            let mask = summand(b, mask);
            let kind = OpKind::MaskedAttention(op::MaskedAttention {
                scale: Real(scores.scale),
            });
            b.g.attention(kind, &[q, k, v, mask], false)
        }
        (AttnImplementation::Sdpa, None) => {
            // `sdpa_attention_forward` does not pass the limit of scores on.
            let score_mod = ScoreMod {
                softcap: Real(0.0),
                window: 0,
                ..scores.score_mod
            };
            b.flex_attention(qkv, scores.causal, scores.scale, score_mod)
        }
    }
}

/// Repeats keys and values for all heads that share them (`repeat_kv`).
fn repeated(b: &mut Builder<'_>, [q, k, v]: [ValueId; 3]) -> [ValueId; 3] {
    let heads = b.g.value(q).shape[1];
    let mut of = |x: ValueId| {
        let shape = b.g.value(x).shape.clone();
        let (batch, kv, seq, width) = (shape[0], shape[1], shape[2], shape[3]);
        if kv == heads {
            return x;
        }
        let groups = b.g.expand(x, &[heads / kv, batch, kv, seq, width]);
        let groups = b.g.transpose(groups, 0, 1);
        let groups = b.g.transpose(groups, 1, 2);
        b.g.reshape(groups, &[batch, heads, seq, width])
    };
    [q, of(k), of(v)]
}

/// Applies `_scaled_dot_product_attention_math`: in float32, with both factors of the scores
/// scaled. The mask stays in the type of the queries. `bias`, `[heads, seq, keys]`, is added in
/// place of a mask.
fn math(b: &mut Builder<'_>, qkv: [ValueId; 3], scores: Scores, bias: Option<ValueId>) -> ValueId {
    let dtype = b.g.value(qkv[0]).dtype;
    let [q, k, v] = qkv.map(|x| b.g.cast(x, DType::F32));
    let root = scores.scale.sqrt();
    let (q, k) = (b.scale(q, root), b.scale(k, root));
    let [q, k, v] = repeated(b, [q, k, v]);
    let shape = b.g.value(q).shape.clone();
    let (q, k, v) = matrices(b, [q, k, v]);
    let w = batched(&mut b.g, q, k);
    let (seq, keys) = (b.g.value(w).shape[1], b.g.value(w).shape[2]);
    let mut w = b.g.reshape(w, &[shape[0], shape[1], seq, keys]);
    if let Some(bias) = bias {
        let bias = b.g.expand(bias, &[shape[0], shape[1], seq, keys]);
        w = b.g.add_into(w, bias);
    } else if scores.causal {
        let positions = b.constant("positions", &[seq], DType::I64, false);
        let pairs = b.g.expand(positions, &[seq, seq]);
        let mask = b.g.compute(OpKind::Copy, &[pairs], &[(&[seq, seq], dtype)])[0];
        w = b.g.add_into(w, mask);
    }
    let weights = safe_softmax(b, w);
    // The function also returns the weights, in the type of the queries.
    let shape = b.g.value(weights).shape.clone();
    b.g.compute(OpKind::Copy, &[weights], &[(&shape, dtype)]);
    let out = weigh(b, weights, v);
    b.g.cast(out, dtype)
}

/// Applies `_safe_softmax`, which writes zeros to the rows of which all scores are masked: kernels
/// compare the scores with the mask, reduce the results by rows, and select. Here, these add 0.
fn safe_softmax(b: &mut Builder<'_>, w: ValueId) -> ValueId {
    let weights = b.g.unary(OpKind::Softmax, w);
    let shape = b.g.value(w).shape.clone();
    let masked = b.g.compute(OpKind::Copy, &[w], &[(&shape, DType::U8)])[0];
    let mut rows = shape.clone();
    rows[3] = 1;
    let all = OpKind::RowSum(op::RowSum { scale: Real(0.0) });
    let all = b.g.compute(all, &[masked], &[(&rows, DType::F32)])[0];
    let all = b.g.expand(all, &shape);
    b.g.add_into(weights, all)
}

/// Applies attention with a bias for each head and pair of positions, `[heads, seq, keys]`. No
/// fused kernel of `scaled_dot_product_attention` has gradients of biases, so T5's takes the path
/// of single operations. The code of DeBERTa and MPNet is eager.
pub(in crate::models) fn biased(
    b: &mut Builder<'_>,
    qkv: [ValueId; 3],
    bias: ValueId,
    scores: Scores,
) -> ValueId {
    let takes_sdpa = b.s.model.options.context.encoder_layers > 0;
    match attention_code(b) {
        AttnImplementation::Sdpa if takes_sdpa => math(b, qkv, scores, Some(bias)),
        _ => {
            let shape = b.g.value(bias).shape.clone();
            let mask = Some(b.g.reshape(bias, &[1, shape[0], shape[1], shape[2]]));
            eager(b, qkv, Scores { mask, ..scores })
        }
    }
}

/// Views queries, transposed keys and values as one matrix per head, and copies those that cannot
/// be viewed.
fn matrices(b: &mut Builder<'_>, [q, k, v]: [ValueId; 3]) -> (ValueId, ValueId, ValueId) {
    let mut rows = |x: ValueId| {
        let shape = b.g.value(x).shape.clone();
        b.g.reshape(x, &[shape[0] * shape[1], shape[2], shape[3]])
    };
    let (q, v) = (rows(q), rows(v));
    let k = b.g.transpose(k, 2, 3);
    let shape = b.g.value(k).shape.clone();
    let k = b.g.reshape(k, &[shape[0] * shape[1], shape[2], shape[3]]);
    (q, k, v)
}

/// Returns `[batch, heads, seq, keys]` scores with the mask, and the values, one matrix per head.
fn eager_scores(b: &mut Builder<'_>, qkv: [ValueId; 3], scores: Scores) -> [ValueId; 2] {
    let code = b.code().attention;
    let [mut q, mut k, v] = repeated(b, qkv);
    if code.eager == ScoreType::Float {
        [q, k] = [q, k].map(|x| b.g.cast(x, DType::F32));
    }
    let shape = b.g.value(q).shape.clone();
    let (q, k, v) = matrices(b, [q, k, v]);
    let w = batched(&mut b.g, q, k);
    let (seq, keys) = (b.g.value(w).shape[1], b.g.value(w).shape[2]);
    let w = b.g.reshape(w, &[shape[0], shape[1], seq, keys]);
    let mut w = b.scale(w, scores.scale);
    if scores.score_mod.softcap.0 > 0.0 {
        w = super::softcap(b, w, scores.score_mod.softcap.0);
    }
    if scores.score_mod.alibi {
        let (shape, dtype) = (b.g.value(w).shape.clone(), b.g.value(w).dtype);
        let bias = b.constant("alibi", &[shape[1], 1, keys], dtype, false);
        let bias = b.g.expand(bias, &shape);
        w = b.g.binary(OpKind::Add, w, bias);
    }
    if let Some(mask) = scores.mask {
        w = match code.fills_mask {
            true => masked_fill(&mut b.g, w, mask),
            false => b.g.promoted(OpKind::Add, w, mask),
        };
    }
    [w, v]
}

/// Multiplies `[batch, heads, seq, keys]` weights, with dropout, by the values of each head.
fn weigh(b: &mut Builder<'_>, weights: ValueId, v: ValueId) -> ValueId {
    let weights = b.dropout(weights, b.s.model.options.attention.attention_dropout);
    let shape = b.g.value(weights).shape.clone();
    let (batch, heads, seq, keys) = (shape[0], shape[1], shape[2], shape[3]);
    let weights = b.g.reshape(weights, &[batch * heads, seq, keys]);
    let out = batched(&mut b.g, weights, v);
    let width = b.g.value(v).cols();
    b.g.reshape(out, &[batch, heads, seq, width])
}

/// Applies attention with a sink per head, `[heads]`, which takes a share of the weights.
pub(in crate::models) fn with_sinks(
    b: &mut Builder<'_>,
    qkv: [ValueId; 3],
    sinks: ValueId,
    scores: Scores,
) -> ValueId {
    if !b.is_transformers() || attention_code(b) == AttnImplementation::FlashAttention2 {
        let kind = op::SinkAttention {
            causal: scores.causal,
            scale: Real(scores.scale),
            score_mod: scores.score_mod,
        };
        return b.sink_attention(qkv, sinks, kind);
    }
    let [w, v] = eager_scores(b, qkv, scores);
    let shape = b.g.value(w).shape.clone();
    let (batch, heads, seq, keys) = (shape[0], shape[1], shape[2], shape[3]);
    let column = b.g.reshape(sinks, &[1, heads, 1, 1]);
    let column = b.g.expand(column, &[batch, heads, seq, 1]);
    let all = b.g.cat(&[w, column], 3);
    // `combined_logits - combined_logits.max(-1)`. Softmax does not depend on what is subtracted
    // from a row: here, a number that costs as much to compute, and whose gradient does.
    let rows = b.g.reshape(all, &[batch * heads * seq, keys + 1]);
    let shape = [batch * heads * seq, 1];
    let sum = OpKind::RowSum(op::RowSum { scale: Real(1.0) });
    let largest = b.g.compute(sum, &[rows], &[(&shape, DType::F32)])[0];
    let dtype = b.g.value(all).dtype;
    let largest = b.g.cast(largest, dtype);
    let largest = b.g.reshape(largest, &[batch, heads, seq, 1]);
    let largest = b.g.expand(largest, &[batch, heads, seq, keys + 1]);
    let reduced = b.g.binary(OpKind::Sub, all, largest);
    let probs = b.g.unary(OpKind::Softmax, reduced);
    let weights = b.g.slice(probs, 3, 0, keys);
    let out = weigh(b, weights, v);
    b.g.release(w);
    b.g.release(reduced);
    out
}

/// Applies `eager_attention_forward`.
fn eager(b: &mut Builder<'_>, qkv: [ValueId; 3], scores: Scores) -> ValueId {
    let [mut w, v] = eager_scores(b, qkv, scores);
    let dtype = b.g.value(v).dtype;
    let scores = w;
    if b.code().attention.eager == ScoreType::FloatSoftmax {
        w = b.g.cast(w, DType::F32);
    }
    let weights = b.g.unary(OpKind::Softmax, w);
    let weights = b.g.cast(weights, dtype);
    // `attn_weights` is assigned again here.
    b.g.release(scores);
    weigh(b, weights, v)
}
