//! Model FLOPs: the arithmetic that a step needs, independent of how it is computed. FLOPs of
//! recompute do not count.

#[cfg(test)]
mod tests;

use super::declare::Tree;
use super::spec::{Inputs, Mask};
use crate::config::{LayerType, Model, Rwkv, Scenario, Stages, Vision};
use crate::graph::{Act, Graph, Root, ValueId, View};
use crate::ir::{AttentionShape, Documents, OpKind, Param};
use crate::units::Flops;

/// GEMMs that have a gradient of their input.
#[derive(Debug)]
pub(crate) struct Backward {
    /// Whether the GEMM of each parameter has one.
    inputs: Vec<bool>,
    /// Number of attention kernels with a backward.
    attention: u64,
}

impl Backward {
    /// Describes a model without frozen parameters. The first layer counts as all others do, though
    /// its input needs no gradient: so does the convention of 6 FLOPs per parameter and token.
    pub(crate) fn whole(tree: &Tree) -> Self {
        Self {
            inputs: vec![true; tree.params.len()],
            attention: u64::from(tree.layers()),
        }
    }

    /// Describes a model's forward graph: below the first trained parameter nothing runs backward.
    pub(crate) fn of(graph: &Graph, tree: &Tree) -> Self {
        if tree.params.iter().all(|p| p.requires_grad) {
            return Self::whole(tree);
        }
        let trained = |v: ValueId| graph.value(v).requires_grad;
        let mut backward = Self {
            inputs: vec![false; tree.params.len()],
            attention: 0,
        };
        let mut first = true;
        for op in &graph.ops {
            let (input, weight) = match (op.act, op.inputs.as_slice()) {
                (
                    Act::Compute(
                        OpKind::Attention(_)
                        | OpKind::FlexAttention(_)
                        | OpKind::BiasedAttention(_)
                        | OpKind::SinkAttention(_)
                        | OpKind::DocumentAttention(_),
                    ),
                    operands,
                ) => {
                    backward.attention += u64::from(operands.iter().any(|&v| trained(v)));
                    continue;
                }
                // The chunks' own GEMMs are not differentiated.
                (Act::View(View::Precomputed), &[_, x, w, ..]) => (x, w),
                (Act::Compute(_), &[x, w, ..]) => (x, w),
                _ => continue,
            };
            let stored = match graph.computed_by(weight) {
                Some((OpKind::Dequantize(_), op)) => op.inputs[0],
                _ => weight,
            };
            if let Root::Param(p) = graph.value(stored).root {
                backward.inputs[p.index()] |=
                    trained(input) || (first && tree.params[p.index()].requires_grad);
                first = false;
            }
        }
        backward
    }
}

/// Returns how many of `numel` elements of a parameter one token uses: of a stack of experts or of
/// their biases, those of the experts that take it, wherever they are.
pub(super) fn active(numel: u64, p: &Param, m: &Model) -> u64 {
    // Weights of convolutions have three dimensions, too.
    if p.is_stack() && p.name.contains(".experts.") || is_expert_bias(p) {
        let of = &m.options.experts;
        p.row() * of.top_k * of.experts / (of.experts + of.zero_experts)
    } else {
        numel
    }
}

/// Returns whether it is the biases of all experts, `[experts, columns]`.
fn is_expert_bias(p: &Param) -> bool {
    let names = [".experts.gate_up_bias.weight", ".experts.down_bias.weight"];
    names.iter().any(|end| p.name.ends_with(end))
}

/// Returns the shape of a rank's part of a weight, also of a packed one.
fn weight(p: &Param) -> &[u64] {
    p.packed.as_ref().map_or(&p.shape, |packed| &packed.shape)
}

/// Returns the model FLOPs of forward and backward, and the tokens, of one micro-batch. Each matmul
/// parameter takes 2 FLOPs per token in forward, 2 for the gradient of its input if that is needed,
/// and 2 for its own if it is trained: 6 without frozen parameters. Attention takes `2 * heads *
/// head_dim * seq^2 * batch` per layer in forward, half of that if causal, with a sliding window
/// the share of the pairs in it, and twice as much in backward.
pub(crate) fn model_flops(s: &Scenario, tree: &Tree, backward: &Backward) -> (Flops, u64) {
    let (m, b, t) = (&s.model, s.train.micro_batch, s.train.seq_len);
    let spec = m.family.spec();
    let images = spec.inputs == Inputs::Images;
    let tokens = if images { b } else { b * t };
    let matmul: u64 = tree
        .params
        .iter()
        .zip(&backward.inputs)
        .filter(|(p, _)| !p.is_original() && !is_expert_bias(p) && weight(p).len() > 1)
        .map(|(p, &input)| {
            let positions = if images { m.height * m.width } else { 1 };
            let passes = 1 + u64::from(input) + u64::from(p.requires_grad);
            let rows = tree.rows(p.modules[0]).map_or(tokens, |rows| b * rows);
            let numel: u64 = weight(p).iter().product();
            2 * passes * active(numel, p, m) * positions * rows * tree.multiplications(p)
        })
        .sum();
    let Some(mask) = spec.attention else {
        return (Flops(matmul), tokens);
    };
    let layers: Vec<usize> = tree.run_layers().collect();
    if let Some(of) = &m.options.image.stages {
        return (Flops(matmul + stage_attention(of, &layers, b)), tokens);
    }
    let forward = |layer: usize| {
        let of = m.of_layer(layer);
        let crosses = m.layer_type(layer) == LayerType::Cross;
        if let Some(conformer) = &m.options.conformer {
            return conformer.attention_flops(m, [b, t]);
        }
        if of.kv_heads == 0 {
            return state_flops(m, layer) * tokens;
        }
        let shape = AttentionShape {
            batch: b,
            heads: m.heads,
            kv_heads: m.kv_heads,
            seq: t,
            memory: m
                .options
                .context
                .tower_memory()
                .map(Vision::tokens)
                .filter(|_| crosses),
            // Values may be narrower than queries.
            head_dim: match (
                m.options.latent.is_used(),
                m.options.attention.value_head_dim,
            ) {
                (true, _) => m.head_dim.midpoint(m.options.latent.v_head_dim),
                (false, Some(values)) => m.head_dim.midpoint(values),
                (false, None) => of.head_dim,
            },
            causal: mask == Mask::Causal && !crosses,
            window: m.window(layer, t),
            documents: s.documents(layer),
        };
        let state = match m.layer_type(layer) {
            kind if kind.attends_with_state() => state_flops(m, layer) * tokens,
            _ => 0,
        };
        let times = 1 + u64::from(m.options.experts.shortcut_experts);
        times * shape.flops(false) + state
    };
    // Backward reaches the last ones.
    let first = layers.len() - layers.len().min(backward.attention as usize);
    let twice: u64 = layers[first..].iter().copied().map(forward).sum();
    let attention = layers.iter().copied().map(forward).sum::<u64>() + 2 * twice;
    let run = layers.len() as u64;
    (
        Flops(
            matmul
                + attention
                + m.options
                    .context
                    .towers()
                    .map(|of| tower_attention(m, of, b))
                    .sum::<u64>()
                + encoder_attention(m, run, (b, t))
                + reconstruction_attention(m, b),
        ),
        tokens,
    )
}

/// Counts the arithmetic on the state of a layer that has one in place of attention, per token in
/// forward: an update and a multiplication per number of the state; the delta rule has a second
/// one of each.
fn state_flops(m: &Model, layer: usize) -> u64 {
    let (ssm, linear) = (&m.options.ssm, &m.options.linear_attention);
    match (m.layer_type(layer), ssm, linear) {
        (LayerType::Rwkv, ..) if m.options.rwkv.is_some() => {
            m.options.rwkv.as_ref().map_or(0, rwkv_flops)
        }
        (LayerType::Rwkv | LayerType::RgLru, Some(of), _) => 4 * of.inner,
        (
            LayerType::Mamba | LayerType::Mamba2 | LayerType::Hybrid | LayerType::Shared,
            Some(of),
            _,
        ) => 4 * of.inner * of.state,
        (LayerType::Linear, _, Some(of)) if of.fixed_decays || of.exponential_gates => {
            4 * of.value_heads * of.key_dim * of.value_dim
        }
        (LayerType::Linear, _, Some(of)) => 8 * of.value_heads * of.key_dim * of.value_dim,
        _ => 0,
    }
}

/// Counts the arithmetic on the matrices of RWKV, as [`state_flops`] does.
fn rwkv_flops(of: &Rwkv) -> u64 {
    let numbers = of.keys * of.values / of.heads.max(1);
    if of.version == 7 {
        8 * numbers
    } else {
        4 * numbers
    }
}

/// Counts the arithmetic of attention within windows, in forward and backward, of these blocks of
/// an encoder in stages.
fn stage_attention(of: &Stages, layers: &[usize], batch: u64) -> u64 {
    let forward = |layer: &usize| {
        let stage = of.of_block(*layer);
        match stage.heads {
            0 => 0,
            _ => 4 * batch * stage.rows() * stage.window_rows() * stage.width,
        }
    };
    3 * layers.iter().map(forward).sum::<u64>()
}

/// Counts the arithmetic of the attention of a tower, in forward and backward.
fn tower_attention(m: &Model, of: &Vision, batch: u64) -> u64 {
    let kv_heads = of.kv_heads.unwrap_or(of.heads);
    let head_dim = of.hidden / of.heads.max(1);
    let shape = AttentionShape::new([batch, of.heads, kv_heads, of.rows(), head_dim], false);
    let heads = |n: usize| of.latents.heads.get(n).copied().unwrap_or(1);
    let seen = match of.latents.window {
        0 => of.rows(),
        window => window,
    };
    let latents = AttentionShape {
        batch: batch * of.windows(),
        heads: heads(0),
        kv_heads: heads(1),
        seq: of.latents.count,
        memory: Some(seen + of.latents.count),
        head_dim: heads(2),
        ..shape
    };
    let of_latents = match of.latents.width {
        0 => of.latents.layers * latents.flops(false),
        _ => {
            let own = AttentionShape {
                memory: None,
                seq: of.latent_rows(),
                ..latents
            };
            let cross = AttentionShape {
                memory: Some(seen),
                ..latents
            };
            let crossing = of.latents.layers.div_ceil(of.latents.cross.max(1));
            of.latents.layers * own.flops(false) + crossing * cross.flops(false)
        }
    };
    let chunk = of.attention_chunk.filter(|chunk| *chunk < of.rows());
    let own = match chunk {
        Some(chunk) => shape.within(Documents::NONE.cut(chunk).unwrap_or(Documents::NONE)),
        None => shape,
    };
    let each = match &of.conformer {
        Some(conformer) => conformer.attention_flops(&of.model(m), [batch, of.rows()]),
        None => own.flops(false),
    };
    3 * ((of.layers + of.gated_layers) * each + of_latents)
}

/// Counts the arithmetic of attention in an encoder, and of attention to the outputs of an encoder
/// or tower in the `run` blocks of the decoder, in forward and backward.
fn encoder_attention(m: &Model, run: u64, (batch, seq): (u64, u64)) -> u64 {
    if !m.options.attends_to_memory() {
        return 0;
    }
    let tower = m.options.context.vision.as_ref().map(Vision::tokens);
    let cross = AttentionShape {
        batch,
        heads: m.heads,
        kv_heads: m.kv_heads,
        seq,
        memory: tower.filter(|rows| *rows != seq),
        head_dim: m.head_dim,
        causal: false,
        window: None,
        documents: Documents::NONE,
    };
    let own = m.text_encoder().map_or(0, |inner| {
        let of_layer = |layer: usize| AttentionShape {
            heads: inner.heads,
            kv_heads: inner.kv_heads,
            memory: None,
            head_dim: inner.head_dim,
            window: inner.window(layer, seq),
            ..cross
        };
        let layers = 0..inner.layers as usize;
        layers.map(|layer| of_layer(layer).flops(false)).sum()
    });
    3 * (own + run * cross.flops(false))
}

/// Counts the arithmetic of attention in a decoder of images, in forward and backward.
fn reconstruction_attention(m: &Model, batch: u64) -> u64 {
    let Some(of) = &m.options.reconstruction else {
        return 0;
    };
    let head_dim = of.hidden / of.heads.max(1);
    let shape = AttentionShape::new([batch, of.heads, of.heads, of.rows(), head_dim], false);
    3 * of.layers * shape.flops(false)
}
