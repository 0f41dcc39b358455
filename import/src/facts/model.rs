//! Determines sizes of the model and the batch from recorded shapes.

mod adapters;
mod experts;

pub use adapters::Adapters;
pub use experts::Experts;

use super::{Facts, Found, UnitFacts};
use crate::attribute::Attributed;
use crate::kineto::Trace;
use crate::measured::shapes;
use shardlab_plan::program::Phase;
use std::collections::{BTreeMap, BTreeSet};

/// Properties of a transformer that shapes determine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// `llama`, `moe` or `gpt2`.
    pub family: Option<Found<&'static str>>,
    /// Number of blocks.
    pub layers: Option<Found<u64>>,
    /// Hidden size.
    pub hidden: Option<Found<u64>>,
    /// Number of query heads.
    pub heads: Option<Found<u64>>,
    /// Number of key and value heads.
    pub kv_heads: Option<Found<u64>>,
    /// Size of a head.
    pub head_dim: Option<Found<u64>>,
    /// Size of the feed-forward layer.
    pub ffn: Option<Found<u64>>,
    /// Layers of experts.
    pub experts: Option<Found<Experts>>,
    /// Number of first blocks without experts, in a model with experts.
    pub dense_layers: Option<Found<u64>>,
    /// Low-rank adapters.
    pub adapters: Option<Found<Adapters>>,
    /// Vocabulary size.
    pub vocab: Option<Found<u64>>,
    /// Whether embedding and head share a parameter.
    pub tied: Option<Found<bool>>,
    /// Which linear layers have biases: `true`, `false` or `"qkv"`.
    pub bias: Option<Found<&'static str>>,
    /// Whether queries and keys are normalized.
    pub qk_norm: Option<Found<bool>>,
    /// Tokens per sequence.
    pub seq_len: Option<Found<u64>>,
    /// Sequences per micro-batch.
    pub micro_batch: Option<Found<u64>>,
    /// Total number of parameters.
    pub parameters: Option<u64>,
    /// What shapes show, but do not determine.
    pub gaps: Vec<String>,
}

/// Determines the model, and whether the loss is computed in chunks, from the first micro-batch.
pub(super) fn find(trace: &Trace, a: &Attributed, step: Option<u32>, facts: &mut Facts) {
    let mut seen = Seen::default();
    for (i, event) in trace.host.iter().enumerate() {
        let place = a.host[i].filter(|p| {
            step.is_none_or(|s| p.step == s) && p.phase == Phase::Forward && p.micro_batch == 0
        });
        let Some(place) = place else { continue };
        let name = trace.name(event.name);
        let plain = name.rsplit("::").next().unwrap_or(name);
        seen.norms.0 |= plain.contains("rms_norm");
        seen.norms.1 |= plain.contains("layer_norm");
        if let Some(inputs) = event.inputs {
            let dims = shapes(trace.name(trace.inputs[inputs as usize].dims));
            seen.operator(plain, &dims, (i, place.unit), a);
            if plain == "topk" {
                let concrete = trace.name(trace.inputs[inputs as usize].concrete);
                seen.choice = seen.choice.or_else(|| choice(&dims, concrete));
            }
        }
    }
    let mut model = seen.batch_and_heads();
    seen.blocks(&mut model, &facts.units);
    model.tied = tied(&model, &facts.units);
    let whole = |u: &UnitFacts| !u.parameters.is_empty() && !is_partly_trained(u);
    let known = facts.units.iter().all(whole) && !facts.units.is_empty();
    model.parameters = known.then(|| facts.units.iter().map(trained).sum());
    facts.chunked_loss = seen.chunked_loss(&model);
    facts.model = model;
}

/// Returns the arguments of a top-k, from its operands: k, and the number it chooses from.
fn choice(dims: &[Vec<u64>], concrete: &str) -> Option<(u64, u64)> {
    let arguments: Vec<String> = serde_json::from_str(concrete).ok()?;
    Some((arguments.get(1)?.parse().ok()?, *dims.first()?.last()?))
}

/// Returns the number of elements of the unit's parameters with gradients.
fn trained(unit: &UnitFacts) -> u64 {
    let sizes = unit.parameters.iter().map(|p| p.iter().product::<u64>());
    sizes.sum()
}

/// Returns whether a large part of the unit's gathered elements has no gradients.
fn is_partly_trained(unit: &UnitFacts) -> bool {
    !unit.parameters.is_empty() && trained(unit) < unit.gathered / 10 * 9
}

/// A linear layer that forward calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Linear {
    /// Its weight, `[out, in]`.
    weight: [u64; 2],
    /// Last dimension of its input.
    input: u64,
    /// Whether it has a bias.
    bias: bool,
}

impl Linear {
    /// Returns the shapes of its parameters.
    fn shapes(&self) -> impl Iterator<Item = Vec<u64>> {
        let bias = self.bias.then(|| vec![self.weight[0]]);
        [self.weight.to_vec()].into_iter().chain(bias)
    }
}

/// Shapes of the operators of a forward pass.
#[derive(Default)]
struct Seen {
    /// Table of the embedding, `[vocab, hidden]`, and token ids, `[batch, tokens]`.
    embedding: Option<([u64; 2], [u64; 2])>,
    /// Queries and keys, `[batch, heads, tokens, head_dim]`.
    attention: Option<(Vec<u64>, Vec<u64>)>,
    /// Events of attention operators.
    attentions: BTreeSet<usize>,
    /// Number of attention operators.
    attended: u64,
    /// Whether there is RMSNorm, and LayerNorm.
    norms: (bool, bool),
    /// Linear layers in the order of their calls, by unit.
    linears: BTreeMap<String, Vec<Linear>>,
    /// Arguments of the first top-k: k, and the number it chooses from.
    choice: Option<(u64, u64)>,
    /// Number of cross entropies.
    losses: u32,
    /// Rows of the last cross entropy.
    loss_rows: Option<u64>,
}

impl Seen {
    /// Adds an operator with the shapes of its inputs: event `i`, called in a unit.
    fn operator(&mut self, name: &str, dims: &[Vec<u64>], (i, unit): (usize, u32), a: &Attributed) {
        match name {
            "embedding" => {
                if let [table, ids, ..] = dims
                    && let (&[vocab, hidden], &[batch, tokens]) = (&table[..], &ids[..])
                {
                    self.embedding
                        .get_or_insert(([vocab, hidden], [batch, tokens]));
                }
            }
            "scaled_dot_product_attention"
            | "_scaled_dot_product_flash_attention"
            | "_scaled_dot_product_cudnn_attention"
            | "_scaled_dot_product_efficient_attention" => {
                // One attention may appear as several nested operators.
                let nested = a
                    .tree
                    .around(i)
                    .skip(1)
                    .any(|o| self.attentions.contains(&o));
                self.attentions.insert(i);
                if let (false, [q, k, ..]) = (nested, dims)
                    && q.len() == 4
                {
                    self.attended += 1;
                    self.attention.get_or_insert_with(|| (q.clone(), k.clone()));
                }
            }
            "_flash_attn_forward" | "_flash_attention_forward" => {
                // In this layout, heads are the third dimension.
                if let [q, k, ..] = dims
                    && let (&[b, t, h, d], &[_, s, kv, _]) = (&q[..], &k[..])
                {
                    self.attended += 1;
                    self.attention
                        .get_or_insert_with(|| (vec![b, h, t, d], vec![b, kv, s, d]));
                }
            }
            "linear" => {
                if let [input, weight, ..] = dims
                    && let (Some(&input), &[out, of]) = (input.last(), &weight[..])
                {
                    let unit = a.units.names()[unit as usize].clone();
                    let weight = [out, of];
                    let bias = dims.get(2).is_some_and(|b| !b.is_empty());
                    let linear = Linear {
                        weight,
                        input,
                        bias,
                    };
                    self.linears.entry(unit).or_default().push(linear);
                }
            }
            "cross_entropy_loss" => {
                self.losses += 1;
                self.loss_rows = dims.first().and_then(|d| d.first().copied());
            }
            _ => {}
        }
    }

    /// Determines the batch, the embedding and the heads.
    fn batch_and_heads(&self) -> Model {
        let mut model = Model::default();
        if let Some(([vocab, hidden], [batch, tokens])) = self.embedding {
            model.vocab = Some(Found::new(vocab, "rows of the embedding"));
            model.hidden = Some(Found::new(hidden, "columns of the embedding"));
            model.micro_batch = Some(Found::new(batch, "shape of the token ids"));
            model.seq_len = Some(Found::new(tokens, "shape of the token ids"));
        }
        if let Some((q, k)) = &self.attention {
            let of_queries = |i: usize| Some(Found::new(q[i], "shape of the attention's queries"));
            model.heads = of_queries(1);
            model.head_dim = of_queries(3);
            if let Some(kv) = k.get(1) {
                model.kv_heads = Some(Found::new(*kv, "shape of the attention's keys"));
            }
            model.micro_batch = model.micro_batch.or_else(|| of_queries(0));
            model.seq_len = model.seq_len.or_else(|| of_queries(2));
        }
        model
    }

    /// Determines the number of blocks and their sizes.
    fn blocks(&self, model: &mut Model, units: &[UnitFacts]) {
        let blocks: Vec<&UnitFacts> = units.iter().filter(|u| is_block(&u.name)).collect();
        model.layers = if self.attended > 0 {
            Some(Found::new(self.attended, "attention operators in forward"))
        } else if blocks.is_empty() {
            None
        } else {
            Some(Found::new(blocks.len() as u64, "numbered units"))
        };
        let per_unit = match (blocks.is_empty(), &model.layers) {
            (true, Some(layers)) => layers.value as usize,
            _ => 1,
        };
        let shapes: Vec<Shapes> = if blocks.is_empty() {
            // Without units, the root's parameters are those of all blocks.
            let root = units.iter().filter(|u| u.name == crate::attribute::ROOT);
            let vocab = model.vocab.as_ref().map(|v| v.value);
            root.map(|u| self.shapes(u, model, per_unit, |p| p.first().copied() != vocab))
                .collect()
        } else {
            blocks
                .iter()
                .map(|u| self.shapes(u, model, 1, |_| true))
                .collect()
        };
        if let Some(adapters) = shapes.first().and_then(|s| s.adapters.clone()) {
            if shapes
                .iter()
                .any(|s| s.adapters.as_ref() != Some(&adapters))
            {
                let gap = "lora.layers_to_transform: the adapters of some blocks differ from those of the first";
                model.gaps.push(gap.to_owned());
            }
            let because = "pairs of trained layers, [r, in] and [out, r], behind frozen ones";
            model.adapters = Some(Found::new(adapters, because));
        }
        let Some(hidden) = model.hidden.as_ref().map(|h| h.value) else {
            return;
        };
        let routed: Vec<_> = shapes
            .iter()
            .map(|s| experts::find(&s.parameters, hidden, self.choice, per_unit))
            .collect();
        let dense = routed.iter().position(Option::is_none);
        if let Some(block) = dense.map(|i| &shapes[i]) {
            of_block(model, block, self.norms, per_unit);
        }
        let first = routed.iter().position(Option::is_some);
        if let Some(at) = first
            && let Some((experts, others)) = &routed[at]
        {
            let parameters = others.clone();
            let is_whole = shapes[at].is_whole;
            let ffn = model.ffn.take();
            let block = Shapes {
                parameters,
                is_whole,
                adapters: None,
            };
            of_block(model, &block, self.norms, per_unit);
            // The wide layers next to experts are those of the shared expert.
            let shared = model.ffn.take().map(|f| f.value);
            model.ffn = ffn;
            model.family = Some(Found::new("moe", "experts among a block's parameters"));
            let experts = Experts { shared, ..*experts };
            model.experts = Some(Found::new(experts, "shapes of a block's parameters"));
            let dense = routed.iter().filter(|r| r.is_none()).count();
            if dense == at && dense > 0 {
                let because = "first blocks without experts";
                model.dense_layers = Some(Found::new(dense as u64, because));
            } else if dense > 0 {
                model.gaps.push(format!(
                    "model.mlp_layer_types: {dense} of {} blocks have no experts, and not only the first",
                    shapes.len()
                ));
            }
        }
    }

    /// Returns the shapes of a unit's parameters that pass a filter. Those of gradients are not all
    /// if engines flatten parameters, or if some are frozen: the linear layers of forward complete
    /// them.
    fn shapes(
        &self,
        unit: &UnitFacts,
        model: &mut Model,
        blocks: usize,
        keep: impl Fn(&[u64]) -> bool,
    ) -> Shapes {
        let linears = self.linears.get(&unit.name).map_or(&[][..], Vec::as_slice);
        let flat = unit.parameters.iter().all(|p| p.len() < 2);
        let found = adapters::find(linears, &unit.parameters, blocks);
        let partly = is_partly_trained(unit);
        if partly && found.is_none() {
            let trained = trained(unit);
            model.gaps.push(format!(
                "the frozen parameters of {}: {trained} of {} gathered elements have gradients",
                unit.name, unit.gathered
            ));
        }
        let adapters = found.as_ref().map(|f| f.0.clone());
        let (mut parameters, is_whole) = match found {
            Some((_, layers)) => (layers.iter().flat_map(Linear::shapes).collect(), false),
            None if partly || flat && !linears.is_empty() => {
                (linears.iter().flat_map(Linear::shapes).collect(), false)
            }
            None => (unit.parameters.clone(), true),
        };
        parameters.retain(|p| keep(p));
        Shapes {
            parameters,
            is_whole,
            adapters,
        }
    }

    /// Returns whether the loss is computed in chunks, from the number and the sizes of cross
    /// entropies.
    fn chunked_loss(&self, model: &Model) -> Option<Found<bool>> {
        let tokens = model
            .micro_batch
            .as_ref()
            .zip(model.seq_len.as_ref())
            .map(|(b, s)| b.value * s.value);
        match (self.losses, self.loss_rows, tokens) {
            (0, ..) => None,
            (1, Some(rows), Some(tokens)) if rows + 1 < tokens / 2 => Some(Found::new(
                true,
                "the loss takes part of the tokens at a time",
            )),
            (1, ..) => Some(Found::new(false, "one cross entropy over all tokens")),
            (n, ..) => Some(Found::new(
                true,
                format!("{n} cross entropies per micro-batch"),
            )),
        }
    }
}

/// Shapes of a block's parameters.
struct Shapes {
    parameters: Vec<Vec<u64>>,
    /// Whether those of norms are among them. Otherwise only linear layers are known.
    is_whole: bool,
    adapters: Option<Adapters>,
}

/// Returns whether embedding and head share a parameter.
fn tied(model: &Model, units: &[UnitFacts]) -> Option<Found<bool>> {
    let table = [model.vocab.as_ref()?.value, model.hidden.as_ref()?.value];
    let parameters = units.iter().flat_map(|u| &u.parameters);
    match parameters.filter(|p| **p == table).count() {
        0 => {
            // Frozen tables have no gradients, but are gathered.
            let others = units.iter().filter(|u| !is_block(&u.name));
            let gathered: u64 = others.map(|u| u.gathered).sum();
            let tables = gathered / (table[0] * table[1]).max(1);
            let because = format!("{gathered} elements are gathered outside of the blocks");
            (tables > 0).then(|| Found::new(tables == 1, because))
        }
        1 => Some(Found::new(true, "one parameter has the embedding's shape")),
        n => Some(Found::new(
            false,
            format!("{n} parameters have the embedding's shape"),
        )),
    }
}

pub(crate) fn is_block(name: &str) -> bool {
    name.split('.')
        .any(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Determines sizes from the parameters of some blocks.
fn of_block(model: &mut Model, block: &Shapes, norms: (bool, bool), blocks: usize) {
    let parameters = &block.parameters;
    if parameters.is_empty() {
        return;
    }
    let Some(hidden) = model.hidden.as_ref().map(|h| h.value) else {
        return;
    };
    let head = model.head_dim.as_ref().map_or(0, |h| h.value);
    let q = model.heads.as_ref().map_or(hidden, |h| h.value * head);
    let kv = model.kv_heads.as_ref().map_or(q, |h| h.value * head);
    let mut widths: BTreeMap<u64, u32> = BTreeMap::new();
    for p in parameters {
        if let [a, b] = p.as_slice() {
            // The feed-forward layer reads or writes the hidden size.
            for (width, other) in [(a, b), (b, a)] {
                if *other == hidden && ![q, kv, q + 2 * kv].contains(width) {
                    *widths.entry(*width).or_default() += 1;
                }
            }
        }
    }
    // A merged gate and up projection is twice as wide and occurs once.
    let ffn = widths
        .iter()
        .max_by_key(|(w, n)| (**n, std::cmp::Reverse(**w)))
        .map(|(w, _)| *w);
    model.ffn = ffn.map(|w| Found::new(w, "shapes of a block's parameters"));
    let gated = ffn
        .and_then(|w| widths.get(&w))
        .is_some_and(|n| *n as usize >= 3 * blocks);
    let vectors: Vec<u64> = parameters
        .iter()
        .filter(|p| p.len() == 1)
        .map(|p| p[0])
        .collect();
    let of_width = |w: u64| vectors.iter().filter(|v| **v == w).count();
    model.family = if gated || norms.0 && !norms.1 {
        Some(Found::new(
            "llama",
            "a gated feed-forward layer, or RMSNorm",
        ))
    } else if norms.1 {
        Some(Found::new(
            "gpt2",
            "LayerNorm, and no gate in the feed-forward layer",
        ))
    } else {
        Some(Found::new(
            "llama",
            "two or three wide projections per block",
        ))
    };
    let wide = ffn.is_some_and(|w| of_width(w) > 0);
    let narrow =
        of_width(kv) > 0 && kv != hidden || of_width(q) > 2 * blocks + 1 && q == hidden && !norms.1;
    model.bias = Some(match (wide, narrow) {
        (true, _) => Found::new("true", "vectors of the feed-forward layer's width"),
        (false, true) => Found::new("\"qkv\"", "vectors of the width of keys"),
        (false, false) => Found::new("false", "no vector of a linear layer's width"),
    });
    if !block.is_whole {
        return;
    }
    let normed = head != 0 && head != hidden && of_width(head) >= 2;
    model.qk_norm = Some(if normed {
        Found::new(true, "vectors of a head's width")
    } else {
        Found::new(false, "no vector of a head's width")
    });
}
