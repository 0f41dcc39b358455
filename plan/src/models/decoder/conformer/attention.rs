//! Attention whose scores know the distance of two positions, over all rows or within chunks.

use super::{filled, limited, linear, zeros};
use crate::config::{Conformer as Of, Distances, Model};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, Real, ScoreMod, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::decoder::norm::Norm;
use crate::models::rope::Rope;
use crate::ops::eager::batched;

pub(super) struct Attention {
    of: Of,
    module: ModuleId,
    norm: Norm,
    q: Layer,
    keys: Keys,
    distance: Distance,
    /// Factors of the dimensions of queries.
    factors: Option<Layer>,
    output: Layer,
    post_norm: Option<Norm>,
}

/// Projections to keys and values.
enum Keys {
    Separate([Layer; 2]),
    Packed(Layer),
}

/// Source of the scores of distances.
enum Distance {
    None,
    Table(Layer),
    Projected {
        layer: Layer,
        /// Biases of the queries that meet keys, and of those that meet distances.
        biases: Option<[Layer; 2]>,
    },
}

/// Sizes of the attention of a sample.
#[derive(Clone, Copy)]
struct Sizes {
    batch: u64,
    heads: u64,
    dim: u64,
    /// Positions of a chunk, and those that they see.
    chunk: u64,
    seen: u64,
    chunks: u64,
}

impl Sizes {
    /// Returns the positions of all chunks of a sample.
    fn all(self) -> u64 {
        self.chunk * self.chunks
    }
}

impl Attention {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model, of: &Of) -> Self {
        let module = d.module(block, "attention", ModuleKind::Attention);
        let (h, width, bias) = (m.hidden, m.heads * m.head_dim, m.bias.qkv());
        let norm = Norm::new(d, module, ("norm", ""), h, m, Order::Declared);
        let q = d.linear(module, ("q", ""), [width, h], bias);
        let keys = if of.packed_kv {
            Keys::Packed(d.linear(module, ("kv", ""), [2 * width, h], bias))
        } else {
            Keys::Separate(["k", "v"].map(|name| d.linear(module, (name, ""), [width, h], bias)))
        };
        let vector = |d: &mut Declare, name, shape: &[u64]| {
            let at = d.module(module, name, ModuleKind::Layer);
            d.parameters(at, "", shape, false)
        };
        let distance = match of.distances {
            Distances::None => Distance::None,
            Distances::Keys => {
                let shape = [of.distance_rows, m.head_dim];
                let names = ("distances", "");
                Distance::Table(d.table(module, names, ModuleKind::Layer, shape))
            }
            Distances::Projected | Distances::ProjectedBySample => {
                // The arithmetic of distances is counted with that of attention.
                let layer = d.linear(module, ("distances", ""), [width, h], false);
                d.lookup(layer);
                let shape = [m.heads, m.head_dim];
                let biased = of.softcap.is_none();
                let mut bias = |name| {
                    let layer = vector(d, name, &shape);
                    d.lookup(layer);
                    layer
                };
                let biases = biased.then(|| ["bias_u", "bias_v"].map(&mut bias));
                Distance::Projected { layer, biases }
            }
        };
        let factors = (of.softcap.is_some()).then(|| vector(d, "factors", &[m.head_dim]));
        Self {
            of: of.clone(),
            module,
            norm,
            q,
            keys,
            distance,
            factors,
            output: d.linear(module, ("o", ""), [h, width], m.bias.attention_output()),
            post_norm: (of.post_norms)
                .then(|| Norm::new(d, module, ("post_norm", ""), h, m, Order::Declared)),
        }
    }

    /// Adds what attention makes of `[batch, rows, hidden]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, x: ValueId, rope: Option<Rope>) -> ValueId {
        let clamps = self.of.clamps;
        b.within(self.module, |b| {
            let (batch, rows, m) = (b.batch(), b.seq(), &b.s.model);
            let [chunk, seen] = self.of.seen(rows);
            let sizes = Sizes {
                batch,
                heads: m.heads,
                dim: m.head_dim,
                chunk,
                seen,
                chunks: rows.div_ceil(chunk.max(1)),
            };
            let y = limited(b, x, clamps);
            let mut y = self.norm.apply(b, y);
            let alone = self.of.softcap.is_none();
            if alone {
                y = filled(b, y, sizes.all());
            }
            let q = linear(b, self.q, y, clamps);
            let [k, v] = self.keys_and_values(b, y);
            let made = if alone {
                self.attend(b, sizes, [q, k, v], rope)
            } else {
                self.attend_in_context(b, sizes, [q, k, v])
            };
            let made = if sizes.all() > rows {
                let own = b.g.slice(made, 1, 0, rows);
                b.g.make_contiguous(own)
            } else {
                made
            };
            let mut o = linear(b, self.output, made, clamps);
            if let Some(norm) = self.post_norm {
                o = limited(b, o, clamps);
                o = norm.apply(b, o);
            }
            b.g.binary(OpKind::Add, o, x)
        })
    }

    /// Computes keys and values, each `[batch, rows, heads * head_dim]`.
    fn keys_and_values(&self, b: &mut Builder<'_>, y: ValueId) -> [ValueId; 2] {
        match &self.keys {
            Keys::Separate(layers) => layers.map(|layer| linear(b, layer, y, self.of.clamps)),
            Keys::Packed(layer) => {
                let both = linear(b, *layer, y, self.of.clamps);
                let parts = b.g.split(both, 2, 2);
                [parts[0], parts[1]]
            }
        }
    }

    /// Applies attention within chunks of rows; returns `[batch, rows, heads * head_dim]`.
    fn attend(
        &self,
        b: &mut Builder<'_>,
        of: Sizes,
        qkv: [ValueId; 3],
        rope: Option<Rope>,
    ) -> ValueId {
        let scale = (of.dim as f64).powf(-0.5);
        let samples = of.batch * of.chunks;
        let [mut q, k, v] = qkv.map(|x| b.g.reshape(x, &[samples, of.chunk, of.heads, of.dim]));
        let bias = match &self.distance {
            Distance::None => None,
            Distance::Table(table) => Some(self.keyed_scores(b, of, q, *table)),
            Distance::Projected { layer, biases } => {
                let biased = |b: &mut Builder<'_>, n: usize| match biases {
                    Some(biases) => {
                        let bias = b.weight(biases[n]);
                        b.g.binary(OpKind::Add, q, bias)
                    }
                    None => q,
                };
                let [of_keys, of_distances] = [biased(b, 0), biased(b, 1)];
                q = of_keys;
                Some(self.projected_scores(b, of, of_distances, *layer))
            }
        };
        let bias = bias.map(|bias| {
            let bias = b.scale(bias, scale);
            b.g.reshape(bias, &[samples, of.heads, of.chunk, of.chunk])
        });
        let mut qkv = [q, k, v].map(|x| b.g.transpose(x, 1, 2));
        if let Some(rope) = rope {
            let rope = rope.of_layer(b);
            let [q, k, v] = qkv;
            qkv = [rope.rotate(b, q), rope.rotate(b, k), v];
        }
        let made = match bias {
            Some(bias) => {
                let kind = op::BiasedAttention {
                    causal: false,
                    scale: Real(scale),
                    window: 0,
                };
                b.biased_attention(qkv, bias, kind)
            }
            None => b.flex_attention(qkv, false, scale, ScoreMod::NONE),
        };
        let made = b.g.transpose(made, 1, 2);
        b.g.reshape(made, &[of.batch, of.all(), of.heads * of.dim])
    }

    /// Multiplies queries `[samples, rows, heads, head_dim]` by a key of each distance:
    /// `[samples * heads, rows, rows]`.
    fn keyed_scores(&self, b: &mut Builder<'_>, of: Sizes, q: ValueId, table: Layer) -> ValueId {
        let (rows, samples) = (of.chunk, of.batch * of.chunks);
        let pairs = b.constant("distances", &[rows * rows], DType::I64, false);
        let keys = b.embedding(table, pairs);
        let keys = b.g.reshape(keys, &[rows, rows, of.dim]);
        let keys = b.g.transpose(keys, 1, 2);
        // A matmul for each row: `bhld,lrd->bhlr`.
        let by_row = b.g.transpose(q, 0, 1);
        let by_row = b.g.reshape(by_row, &[rows, samples * of.heads, of.dim]);
        let scores = batched(&mut b.g, by_row, keys);
        b.g.transpose(scores, 0, 1)
    }

    /// Multiplies queries `[samples, rows, heads, head_dim]` by projections of all distances, and
    /// takes those between each query and key: `[samples * heads, rows, rows]`.
    fn projected_scores(
        &self,
        b: &mut Builder<'_>,
        of: Sizes,
        q: ValueId,
        layer: Layer,
    ) -> ValueId {
        let (rows, samples) = (of.chunk, of.batch * of.chunks);
        let distances = 2 * rows - 1;
        let hidden = b.s.model.hidden;
        let waves = b.constant("distances", &[distances, hidden], DType::F32, false);
        let mut waves = b.as_activation(waves);
        let by_sample = self.of.distances == Distances::ProjectedBySample;
        let repeated = [samples, distances, of.heads, of.dim];
        let keys = if by_sample {
            waves = b.g.expand(waves, &[samples, distances, hidden]);
            let keys = b.linear(layer, waves);
            b.g.reshape(keys, &repeated)
        } else {
            let keys = b.linear(layer, waves);
            let keys = b.g.reshape(keys, &repeated[1..]);
            b.g.expand(keys, &repeated)
        };
        let keys = b.g.transpose(keys, 1, 2);
        let keys = b.g.reshape(keys, &[samples * of.heads, distances, of.dim]);
        let keys = b.g.transpose(keys, 1, 2);
        let q = b.g.transpose(q, 1, 2);
        let q = b.g.reshape(q, &[samples * of.heads, rows, of.dim]);
        let scores = batched(&mut b.g, q, keys);
        // Rows shift by one position each: a column more, and as many rows.
        let column = zeros(b, &[samples * of.heads, rows, 1], scores);
        let wider = b.g.cat(&[column, scores], 2);
        let turned =
            b.g.reshape(wider, &[samples * of.heads, distances + 1, rows]);
        let shifted = b.g.slice(turned, 1, 1, distances);
        let shifted = b.g.reshape(shifted, &[samples * of.heads, rows, distances]);
        b.g.slice(shifted, 2, 0, rows)
    }

    /// Applies attention of chunks to their neighbors, in float32 and with a soft cap; returns
    /// `[batch, rows of all chunks, heads * head_dim]`.
    fn attend_in_context(&self, b: &mut Builder<'_>, of: Sizes, qkv: [ValueId; 3]) -> ValueId {
        let rows = b.seq();
        let [q, k, v] = qkv.map(|x| {
            let x = b.g.cast(x, DType::F32);
            b.g.reshape(x, &[of.batch, rows, of.heads, of.dim])
        });
        let mut q = b.scale(q, (of.dim as f64).powf(-0.5));
        if let Some(layer) = self.factors {
            let factors = b.weight(layer);
            let factors = b.g.cast(factors, DType::F32);
            let factors = b.g.unary(OpKind::Sigmoid, factors);
            q = b.g.binary(OpKind::Mul, q, factors);
        }
        let k = b.scale(k, 1.0);
        let q = filled(b, q, of.all());
        let [k, v] = [k, v].map(|x| self.context(b, of, x));
        let matrices = of.batch * of.heads * of.chunks;
        // `[batch, heads, chunks, rows, head_dim]`
        let by_head =
            b.g.reshape(q, &[of.batch, of.chunks, of.chunk, of.heads, of.dim]);
        let by_head = b.g.transpose(by_head, 1, 3);
        let by_head = b.g.transpose(by_head, 2, 3);
        let q = b.g.reshape(by_head, &[matrices, of.chunk, of.dim]);
        let [k, v] = [k, v].map(|x| {
            let by_head = b.g.transpose(x, 1, 3);
            let by_head = b.g.transpose(by_head, 2, 3);
            b.g.reshape(by_head, &[matrices, of.seen, of.dim])
        });
        let k = b.g.transpose(k, 1, 2);
        let mut scores = batched(&mut b.g, q, k);
        if let Distance::Projected { layer, .. } = &self.distance {
            let more = self.context_scores(b, of, q, *layer);
            scores = b.g.binary(OpKind::Add, scores, more);
        }
        if let Some(cap) = self.of.softcap {
            let shares = b.scale(scores, 1.0 / cap);
            let tanh = OpKind::Softcap(op::Softcap { cap: Real(1.0) });
            let shares = b.g.unary(tanh, shares);
            scores = b.scale(shares, cap);
        }
        let weights = b.g.unary(OpKind::Softmax, scores);
        let made = batched(&mut b.g, weights, v);
        let made =
            b.g.reshape(made, &[of.batch, of.heads, of.chunks, of.chunk, of.dim]);
        let made = b.g.transpose(made, 1, 2);
        let made = b.g.transpose(made, 2, 3);
        let made = b.g.reshape(made, &[of.batch, of.all(), of.heads * of.dim]);
        b.as_activation(made)
    }

    /// Returns what the chunks of `[batch, rows, heads, head_dim]` see:
    /// `[batch, chunks, positions, heads, head_dim]`.
    fn context(&self, b: &mut Builder<'_>, of: Sizes, x: ValueId) -> ValueId {
        let rows = b.g.value(x).shape[1];
        let pieces = of.seen.div_ceil(of.chunk);
        // Every piece of a chunk is a chunk of the rows that begin later.
        let needed = (of.chunks + pieces - 1) * of.chunk;
        let row = [of.heads, of.dim];
        let mut parts = Vec::new();
        if self.of.past > 0 {
            parts.push(zeros(b, &[of.batch, self.of.past, row[0], row[1]], x));
        }
        parts.push(x);
        let after = needed.saturating_sub(self.of.past + rows);
        if after > 0 {
            parts.push(zeros(b, &[of.batch, after, row[0], row[1]], x));
        }
        let padded = b.g.cat(&parts, 1);
        let piece = |b: &mut Builder<'_>, n: u64| {
            let first = b.g.slice(padded, 1, n * of.chunk, of.all());
            let shape = [of.batch, of.chunks, of.chunk, of.heads, of.dim];
            let piece = b.g.reshape(first, &shape);
            let len = of.chunk.min(of.seen - n * of.chunk);
            if len < of.chunk {
                b.g.slice(piece, 2, 0, len)
            } else {
                piece
            }
        };
        let all: Vec<ValueId> = (0..pieces).map(|n| piece(b, n)).collect();
        b.g.cat(&all, 2)
    }

    /// Multiplies queries `[matrices, rows, head_dim]` by projections of the distances that are
    /// seen, and takes those between each query and key: `[matrices, rows, seen]`.
    fn context_scores(&self, b: &mut Builder<'_>, of: Sizes, q: ValueId, layer: Layer) -> ValueId {
        let distances = of.seen / 2 + 1;
        let hidden = b.s.model.hidden;
        let waves = b.constant("distances", &[distances, hidden], DType::F32, false);
        let waves = b.as_activation(waves);
        let keys = b.linear(layer, waves);
        let keys = b.g.reshape(keys, &[distances, of.heads, of.dim]);
        let keys = b.g.cast(keys, DType::F32);
        let keys = b.g.expand(keys, &[of.batch, distances, of.heads, of.dim]);
        let keys = b.g.transpose(keys, 1, 2);
        let pairs = of.batch * of.heads;
        let keys = b.g.reshape(keys, &[pairs, distances, of.dim]);
        let keys = b.g.transpose(keys, 1, 2);
        let q = b.g.reshape(q, &[pairs, of.all(), of.dim]);
        let scores = batched(&mut b.g, q, keys);
        let more = of.seen + 1 - distances;
        let columns = zeros(b, &[pairs, of.all(), more], scores);
        let wider = b.g.cat(&[scores, columns], 2);
        let matrices = pairs * of.chunks;
        let flat = b.g.reshape(wider, &[matrices, of.chunk * (of.seen + 1)]);
        let shifted = b.g.slice(flat, 1, 0, of.chunk * of.seen);
        b.g.reshape(shifted, &[matrices, of.chunk, of.seen])
    }
}
