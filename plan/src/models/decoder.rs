//! Decoders: blocks of attention and a feed-forward layer on a residual stream, whose norms,
//! projections and positions are options.
//!
//! Family `llama` is the plain case: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.
//! Family `decoder` has all options.

mod altup;
mod attention;
mod bias_gate;
mod conformer;
mod contrast;
mod convolve;
mod dense_and_experts;
mod differential;
mod disentangled;
mod dispatch;
mod embedding;
mod experts;
mod indexed;
mod indexer;
mod latent;
mod layer_embedding;
mod lightning;
mod mlp;
mod mlstm;
mod names;
mod norm;
mod output;
mod pooling;
mod qformer;
mod reconstruction;
mod recurrent;
mod resampler;
mod routed_attention;
mod router_losses;
pub(super) mod rules;
mod rwkv;
mod rwkv_heads;
mod seq2seq;
mod shared_block;
mod shared_keys;
mod shortcut;
mod sound;
pub(super) mod spec;
mod streams;
mod subsampling;
mod summary;
mod tiles;
mod types;
pub(super) mod vision;

use super::Forward;
use super::build::{Builder, Part};
use super::declare::{Declare, Layer, Order, ROOT};
use super::implementation::Masks;
use super::loss;
use super::rope::{Pairs, Rope};
use crate::config::{
    Family, Head, LayerType, MlpType, Model, NormPosition, PositionEmbedding, QkNorm, Residual,
};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, MoeStage, OpKind, Real, op};
use altup::AltUp;
use attention::{Around, Attention, Locals};
use conformer::Conformer;
use dense_and_experts::DenseAndExperts;
use disentangled::Relative;
use embedding::Embedding;
use experts::Experts;
pub(super) use experts::width as expert_width;
use layer_embedding::{LayerEmbedding, LayerInput};
use mlp::Mlp;
use norm::Norm;
use output::Output;
use reconstruction::Reconstruction;
use recurrent::Recurrent;
use routed_attention::RoutedAttention;
use rwkv::ChannelMix;
use seq2seq::{Encoder, RelativeBias};
use shared_block::SharedBlock;
use shared_keys::SharedKeys;
use shortcut::Shortcut;
use streams::Streams;
pub(super) use types::EXPERTS as EXPERT_TYPES;
pub(crate) use types::text_defaults;
pub(super) use types::{APPROXIMATED, NOT_PLANNED, VARIANTS};
pub use types::{ClassDefaults, WRAPPERS, class_defaults};
use vision::Tower;

pub(super) struct Decoder {
    vision: Option<Tower>,
    audio: Option<Tower>,
    encoder: Option<Encoder>,
    bias: Option<RelativeBias>,
    relative: Option<Relative>,
    embedding: Embedding,
    layer_embedding: Option<LayerEmbedding>,
    embedding_norm: Option<Norm>,
    /// Projects normalized tokens to the width of the model.
    projection: Option<Layer>,
    blocks: Vec<Block>,
    /// Sums residual streams up.
    streams: Option<Streams>,
    /// Expands embedded tokens to residual streams, and sums the streams up.
    altup: Option<altup::Ends>,
    /// `None` if the blocks end with a norm.
    norm: Option<Norm>,
    /// Follows the last norm in place of the output layer.
    reconstruction: Option<Reconstruction>,
    output: Output,
}

struct Block {
    module: ModuleId,
    layer: usize,
    /// Biases of this layer's scores alone.
    bias: Option<RelativeBias>,
    /// Shared block whose result is added to the input of the rest of the layer.
    shared: Option<SharedBlock>,
    /// Attention or its replacement; `None` in a layer without either.
    mixer: Option<Mixer>,
    /// Attention to the rows of an encoder or tower.
    cross: Option<Attention>,
    /// `None` in a layer without a feed-forward layer.
    mlp: Option<FeedForward>,
    /// A second attention and MLP, with experts in parallel.
    shortcut: Option<Shortcut>,
    /// Factors of the outputs of attention and MLP (`layer_scale`).
    scales: Option<[Layer; 2]>,
    /// Residual gates of attention and MLP: one number each, before the tanh.
    gates: Option<[Layer; 2]>,
    /// Residual streams of attention and MLP.
    streams: Option<[Streams; 2]>,
    /// Predicts and corrects residual streams. Attention and MLP compute one of them.
    altup: Option<AltUp>,
    /// Adds the layer's own token embeddings to the residual stream.
    input: Option<LayerInput>,
    /// Conformer layers, in place of all others.
    conformer: Option<Conformer>,
}

/// Inputs that all blocks share.
#[derive(Clone, Copy, Default)]
struct Surroundings {
    ropes: Option<Ropes>,
    around: Around,
    /// Embedded tokens, for layers that share blocks.
    tokens: Option<ValueId>,
    /// Embedded tokens of the block's own, `[batch, seq, width]`.
    rows: Option<ValueId>,
}

/// Values that blocks compute for later blocks and for the layers after the last one.
#[derive(Default)]
struct Carried {
    /// Logits of routers.
    routers: Vec<ValueId>,
    /// Keys and values of layers that later ones attend to, by layer.
    keys: Vec<(usize, [ValueId; 2])>,
    /// Values of the first layer (RWKV-7).
    first_values: Option<ValueId>,
}

/// The layer that mixes the positions of a sequence.
enum Mixer {
    Attention(Attention),
    SharedKeys(SharedKeys),
    Routed(RoutedAttention),
    Recurrent(Recurrent),
    /// Both, whose results are added.
    Both(Attention, Recurrent),
}

impl Mixer {
    /// Declares the mixer of a layer. `m` holds the options of this layer.
    fn new(d: &mut Declare, block: ModuleId, m: &Model, layer: usize) -> Option<Self> {
        let kind = m.layer_type(layer);
        if let Some(shared) = SharedKeys::new(d, block, m) {
            return Some(Self::SharedKeys(shared));
        }
        if let Some(routed) = RoutedAttention::new(d, block, m) {
            return Some(Self::Routed(routed));
        }
        if kind == LayerType::Cross {
            // Queries and keys are normalized in these layers only.
            let mut m = m.clone();
            m.options.attention.qk_norm = QkNorm::Head;
            return Some(Self::Attention(Attention::to_memory(d, block, &m)));
        }
        if kind.has_shared_block() {
            return Recurrent::new(d, block, m, kind).map(Self::Recurrent);
        }
        if kind.is_attention() {
            let attention = (m.kv_heads > 0).then(|| Attention::new(d, block, m))?;
            if kind == LayerType::Hybrid
                && let Some(recurrent) = Recurrent::new(d, block, m, kind)
            {
                return Some(Self::Both(attention, recurrent));
            }
            return Some(Self::Attention(attention));
        }
        Recurrent::new(d, block, m, kind).map(Self::Recurrent)
    }

    fn module(&self) -> ModuleId {
        match self {
            Self::Attention(attention) | Self::Both(attention, _) => attention.module,
            Self::SharedKeys(shared) => shared.module,
            Self::Routed(routed) => routed.module,
            Self::Recurrent(recurrent) => recurrent.module,
        }
    }

    /// Returns the input norm, and the norm of the sum.
    fn norms(&self) -> [Option<Norm>; 2] {
        match self {
            Self::Attention(attention) | Self::Both(attention, _) => {
                [attention.norm, attention.sum_norm]
            }
            Self::SharedKeys(shared) => [shared.norm, None],
            Self::Routed(routed) => [routed.norm, None],
            Self::Recurrent(recurrent) => [recurrent.norm, None],
        }
    }
}

enum FeedForward {
    Dense(Mlp),
    /// That of RWKV.
    ChannelMix(ChannelMix),
    Experts(Experts),
    /// Both, whose results are added.
    DenseAndExperts(Mlp, DenseAndExperts),
}

impl FeedForward {
    fn new(d: &mut Declare, block: ModuleId, m: &Model, layer: usize) -> Self {
        if m.family == Family::Moe && m.options.experts.dense_and_experts {
            return Self::DenseAndExperts(Mlp::new(d, block, m), DenseAndExperts::new(d, block, m));
        }
        if m.layer_type(layer) == LayerType::Rwkv {
            return Self::ChannelMix(ChannelMix::new(d, block, m));
        }
        match m.mlp_type(layer) {
            MlpType::Sparse => Self::Experts(Experts::new(d, block, m)),
            MlpType::Dense | MlpType::None => Self::Dense(Mlp::new(d, block, m)),
        }
    }

    fn module(&self) -> ModuleId {
        match self {
            Self::Dense(mlp) | Self::DenseAndExperts(mlp, _) => mlp.module,
            Self::ChannelMix(mix) => mix.module,
            Self::Experts(experts) => experts.module,
        }
    }

    /// Applies the input norm, if there is one.
    fn normalize(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let Some(norm) = self.norms()[0] else {
            return x;
        };
        match self {
            Self::Experts(_) => b.in_stage(MoeStage::Router, |b| norm.apply(b, x)),
            _ => norm.apply(b, x),
        }
    }

    /// Returns the input norm, and the norm of the sum.
    fn norms(&self) -> [Option<Norm>; 2] {
        match self {
            Self::Dense(mlp) | Self::DenseAndExperts(mlp, _) => [mlp.norm, mlp.sum_norm],
            Self::ChannelMix(mix) => [Some(mix.norm), None],
            Self::Experts(experts) => [experts.norm, experts.sum_norm],
        }
    }

    /// Applies the layer to `y = norm(x)`. Returns its contribution to the residual stream. Appends
    /// the logits of a router to `routers`.
    fn forward(
        &self,
        b: &mut Builder<'_>,
        [x, y]: [ValueId; 2],
        routers: &mut Vec<ValueId>,
    ) -> ValueId {
        match self {
            Self::Dense(mlp) => mlp.forward(b, y),
            Self::ChannelMix(mix) => mix.forward(b, y),
            Self::DenseAndExperts(mlp, experts) => {
                let dense = mlp.inner(b, y);
                let (sum, logits) = experts.add(b, x, dense);
                routers.push(logits);
                mlp.finish(b, sum)
            }
            Self::Experts(experts) => {
                let (out, logits) = experts.forward(b, y);
                routers.push(logits);
                out
            }
        }
    }
}

/// The rotary embeddings of a model.
#[derive(Clone, Copy)]
struct Ropes {
    /// Of layers that see all positions.
    full: Rope,
    /// Of layers with a sliding window.
    sliding: Rope,
}

impl Ropes {
    /// Converts the tables to the type of activations.
    fn cast(self, b: &mut Builder<'_>) -> Self {
        let full = self.full.cast(b);
        let sliding = match has_two_ropes(&b.s.model) {
            true => self.sliding.cast(b),
            false => full,
        };
        Self { full, sliding }
    }
}

/// Returns whether layers with a window have separate rotary tables.
fn has_two_ropes(m: &Model) -> bool {
    m.options.positions.rope_local_theta.is_some() || m.options.attention.full_head_dim.is_some()
}

/// Returns the rotated dimensions of a head, which has `dims`.
fn rotated_of(m: &Model, dims: u64) -> u64 {
    let latent = &m.options.latent;
    if latent.is_used() {
        return latent.qk_rope_head_dim;
    }
    (dims as f64 * m.options.positions.partial_rotary_factor) as u64
}

/// Returns the rotated dimensions of a head.
pub(super) fn rotated(m: &Model) -> u64 {
    rotated_of(m, m.head_dim)
}

impl Carried {
    /// Returns the keys and values of an earlier layer that a layer attends to, if it computes
    /// none.
    fn keys_for(&self, m: &Model, layer: usize) -> Option<[ValueId; 2]> {
        let from = m.keys_of(layer)?;
        let kept = self.keys.iter().find(|(of, _)| *of == from);
        kept.map(|(_, keys)| *keys)
    }

    /// Keeps the keys and values of a layer that later ones attend to.
    fn keep(&mut self, m: &Model, layer: usize, keys: [ValueId; 2]) {
        let mut later = m.layers_with_keys()..m.layers as usize;
        if later.any(|other| m.keys_of(other) == Some(layer)) {
            self.keys.push((layer, keys));
        }
    }
}

impl Decoder {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Self {
        let o = &m.options;
        let names = names::of(m);
        let vision = o.context.vision.as_ref();
        let vision = vision.map(|of| Tower::new(d, m, of, Part::First));
        let audio = o.context.audio.as_ref();
        let audio = audio.map(|of| Tower::new(d, m, of, Part::Audio));
        let embedding = Embedding::new(d, &names, m);
        let layer_embedding = LayerEmbedding::new(d, m);
        let encoder = m.text_encoder();
        let encoder = encoder.map(|inner| Encoder::new(d, &embedding, &inner));
        let bias = RelativeBias::shared(d, ROOT, m);
        if bias.is_some() {
            d.blocks_differ();
        }
        let relative = Relative::new(d, ROOT, m);
        let embedding_norm = o.embedding.embedding_norm.then(|| {
            let names = ("embedding_norm", names.embedding_norm);
            let width = embedding::sum_width(m);
            Norm::new(d, ROOT, names, width, m, Order::Declared)
        });
        let encodes = m.family == Family::Bert;
        let projection = encodes.then(|| embedding::projection(d, ROOT, m)).flatten();
        let indexed = |layer| o.latent.has_indexer(layer);
        let rate = |layer: usize| o.layers.compress_rates.get(layer).copied();
        let kind = |layer| {
            (
                m.layer_type(layer),
                m.mlp_type(layer),
                indexed(layer),
                rate(layer),
            )
        };
        let shares = m.options.per_layer.shared_kv_layers > 0;
        let sparse = (0..m.layers as usize).any(|layer| m.sparsity(layer).is_some());
        if shares || sparse || (1..m.layers as usize).any(|layer| kind(layer) != kind(0)) {
            d.blocks_differ();
        }
        let of = &o.experts;
        if m.family == Family::Moe && (of.aux_loss > 0.0 || of.z_loss > 0.0) {
            // The losses of all routers are added up after the last block.
            d.blocks_differ();
        }
        let blocks = d.blocks(m, names.blocks, |d, module, m| {
            let layer = d.layer();
            Block::new(d, module, &m.of_layer(layer), layer)
        });
        let streams = Streams::of_output(d, m);
        let altup = altup::Ends::new(d, m);
        let last = ("norm", names.norm);
        let norm = (o.norm_position != NormPosition::Sum).then(|| {
            Norm::new(
                d,
                ROOT,
                last,
                m.hidden,
                &m.with_inner_norm(),
                Order::Declared,
            )
        });
        if o.embedding.rotary_table {
            let names = ("rotary_table", "");
            let shape = [m.max_seq_len, rotated(m)];
            let table = d.table(ROOT, names, ModuleKind::Layer, shape);
            d.untrained(table);
        }
        let reconstruction = Reconstruction::new(d, m);
        let output = Output::new(d, embedding.tokens(), &names, m);
        Self {
            vision,
            audio,
            encoder,
            bias,
            relative,
            embedding,
            layer_embedding,
            embedding_norm,
            projection,
            blocks,
            streams,
            altup,
            norm,
            reconstruction,
            output,
        }
    }

    /// Declares the tables of the rotary embeddings; `names` are those of layers that see all
    /// positions.
    fn ropes(b: &mut Builder<'_>, names: [&'static str; 2]) -> Option<Ropes> {
        let m = &b.s.model;
        let pairs = match m.options.positions.position_embedding {
            PositionEmbedding::Rotary => Pairs::Halves,
            PositionEmbedding::RotaryInterleaved => Pairs::Adjacent,
            PositionEmbedding::Learned
            | PositionEmbedding::Sinusoidal
            | PositionEmbedding::SinusoidalTable
            | PositionEmbedding::Alibi
            | PositionEmbedding::None => return None,
        };
        if !(0..m.layers as usize).any(|layer| m.layer_type(layer).is_attention()) {
            return None;
        }
        let dims = rotated(m);
        let of_full = rotated_of(m, m.options.attention.full_head_dim.unwrap_or(m.head_dim));
        let local = has_two_ropes(m);
        let full = Rope::named(b, names, of_full, pairs);
        let sliding = if local {
            Rope::named(b, ["rope_local_cos", "rope_local_sin"], dims, pairs)
        } else {
            full
        };
        Some(Ropes { full, sliding })
    }
}

impl Block {
    /// Declares the contents of a block; `m` is the model as the layer has it.
    fn new(d: &mut Declare, module: ModuleId, m: &Model, layer: usize) -> Self {
        if let Some(conformer) = Conformer::new(d, module, m, layer) {
            return Self {
                module,
                layer,
                bias: None,
                shared: None,
                mixer: None,
                cross: None,
                mlp: None,
                shortcut: None,
                scales: None,
                gates: None,
                streams: None,
                altup: None,
                input: None,
                conformer: Some(conformer),
            };
        }
        Self {
            module,
            layer,
            conformer: None,
            bias: (m.options.positions.relative_bias_per_layer)
                .then(|| RelativeBias::new(d, module, m))
                .flatten(),
            shared: SharedBlock::new(d, module, m, layer),
            mixer: Mixer::new(d, module, m, layer),
            cross: (m.options.attends_to_memory()).then(|| Attention::to_memory(d, module, m)),
            mlp: (m.ffn > 0).then(|| FeedForward::new(d, module, m, layer)),
            shortcut: Shortcut::new(d, module, m, layer),
            streams: Streams::of_block(d, module, m),
            altup: AltUp::new(d, module, m),
            input: LayerInput::new(d, module, m),
            gates: m.layer_type(layer).is_gated().then(|| {
                ["attention_gate", "mlp_gate"].map(|name| {
                    let at = d.module(module, name, ModuleKind::Layer);
                    d.parameters(at, "", &[1], false)
                })
            }),
            scales: m.options.layer_scale.then(|| {
                ["attention_scale", "mlp_scale"].map(|name| {
                    let at = d.module(module, name, ModuleKind::Layer);
                    d.parameters(at, "", &[m.hidden], false)
                })
            }),
        }
    }

    fn forward(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        by: Surroundings,
        carried: &mut Carried,
    ) -> ValueId {
        if let Some(conformer) = &self.conformer {
            return conformer.forward(b, x, by.ropes.map(|r| r.full));
        }
        if let Some(altup) = &self.altup {
            return self.alternating(b, altup, x, by, carried);
        }
        match b.s.model.options.residual {
            Residual::Sequential => self.sequential(b, x, by, carried),
            Residual::Parallel | Residual::ParallelOneNorm => self.parallel(b, x, by, carried),
        }
    }

    /// Applies attention, or what replaces it, to normalized values; returns what it adds to the
    /// residual stream.
    fn mix(
        &self,
        b: &mut Builder<'_>,
        mixer: &Mixer,
        y: ValueId,
        by: Surroundings,
        carried: &mut Carried,
    ) -> (ValueId, Locals) {
        let (ropes, from) = (by.ropes, by.around);
        let (attention, recurrent) = match mixer {
            Mixer::Attention(attention) => (attention, None),
            Mixer::Both(attention, recurrent) => (attention, Some(recurrent)),
            Mixer::Recurrent(recurrent) => {
                return (recurrent.forward(b, y, carried), Locals::new());
            }
            Mixer::SharedKeys(shared) => {
                let window = b.s.model.window(self.layer, b.seq());
                let out = shared.forward(b, y, ropes.map(|r| r.full), window);
                return (out, Locals::new());
            }
            Mixer::Routed(routed) => {
                let (out, logits) = routed.forward(b, y, ropes.map(|r| r.full), from.masks);
                carried.routers.push(logits);
                return (out, Locals::new());
            }
        };
        let kind = b.s.model.layer_type(self.layer);
        let rope = match kind {
            LayerType::Full | LayerType::Chunked | LayerType::FullGated | LayerType::Hybrid => {
                ropes.map(|r| r.full)
            }
            LayerType::Sliding => ropes.map(|r| r.sliding),
            LayerType::FullNoRope
            | LayerType::Linear
            | LayerType::Mamba
            | LayerType::Mamba2
            | LayerType::Conv
            | LayerType::Rwkv
            | LayerType::RgLru
            | LayerType::Cross
            | LayerType::Shared
            | LayerType::None => None,
        };
        let window = b.s.model.window(self.layer, b.seq());
        let own = self.bias.as_ref().map(|table| table.forward(b));
        let around = Around {
            bias: own.or(from.bias),
            memory: from.memory.filter(|_| kind == LayerType::Cross),
            mask: from
                .masks
                .of_layer(matches!(kind, LayerType::Sliding | LayerType::Chunked)),
            keys: carried.keys_for(&b.s.model, self.layer),
            documents: b
                .s
                .model
                .chunk(self.layer, b.seq())
                .map(|_| b.s.documents(self.layer)),
            temperature: from.temperature.filter(|_| kind == LayerType::FullNoRope),
            ..from
        };
        let (mut out, locals) = attention.forward(b, y, rope, window, around);
        if let [_, keys, values, ..] = locals[..] {
            carried.keep(&b.s.model, self.layer, [keys, values]);
        }
        let locals = of_block(b, locals);
        if let Some(recurrent) = recurrent {
            let more = recurrent.forward(b, y, carried);
            out = b.within(self.module, |b| b.g.binary(OpKind::Add, out, more));
        }
        (out, locals)
    }

    /// Multiplies the output of a part of the block by its learned gate and factors, if it has any.
    fn scale(&self, b: &mut Builder<'_>, part: usize, mut x: ValueId) -> ValueId {
        if let Some(gates) = self.gates {
            let gate = tanh_gate(b, gates[part]);
            let at = gates[part].module();
            x = b.within(at, |b| b.g.binary(OpKind::Mul, x, gate));
        }
        let Some(scales) = self.scales else {
            return x;
        };
        let w = b.weight(scales[part]);
        b.within(scales[part].module(), |b| b.g.binary(OpKind::Mul, x, w))
    }

    /// Returns the input of a part of the block and the stream weights. Without residual streams,
    /// both are `x`.
    fn read(&self, b: &mut Builder<'_>, part: usize, x: ValueId) -> [ValueId; 2] {
        self.streams.map_or([x, x], |all| all[part].collapse(b, x))
    }

    /// Adds the output of a part of the block, with its module, to the residual stream or streams.
    fn add(
        &self,
        b: &mut Builder<'_>,
        (part, at): (usize, ModuleId),
        x: ValueId,
        made: ValueId,
        weights: ValueId,
    ) -> ValueId {
        match self.streams {
            Some(all) => all[part].expand(b, x, made, weights),
            None => b.within(at, |b| b.g.binary(OpKind::Add, x, made)),
        }
    }

    /// Applies attention, then the feed-forward layer to the sum.
    fn sequential(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        by: Surroundings,
        carried: &mut Carried,
    ) -> ValueId {
        let mut locals = Locals::new();
        let (mut x1, mut y1) = (x, None);
        if let Some(mixer) = &self.mixer {
            let [norm, sum_norm] = mixer.norms();
            let [mut read, weights] = self.read(b, 0, x);
            if let Some((shared, tokens)) = self.shared.as_ref().zip(by.tokens) {
                let more = shared.forward(b, read, tokens, by.ropes.map(|r| r.full));
                read = b.within(self.module, |b| b.g.binary(OpKind::Add, read, more));
            }
            let y = norm.map_or(read, |norm| norm.apply(b, read));
            let (o, of_attention) = self.mix(b, mixer, y, by, carried);
            let o = self.scale(b, 0, o);
            x1 = self.add(b, (0, mixer.module()), x, o, weights);
            if let Some(norm) = sum_norm {
                x1 = norm.apply(b, x1);
            }
            (y1, locals) = (Some(y), of_attention);
        }
        if let Some((cross, memory)) = self.cross.as_ref().zip(by.around.memory) {
            let around = Around {
                memory: Some(memory),
                ..Around::default()
            };
            let y = cross.norm.map_or(x1, |norm| norm.apply(b, x1));
            let (o, of_attention) = cross.forward(b, y, None, None, around);
            locals.extend(of_block(b, of_attention).into_iter().chain([x1, y]));
            x1 = b.within(cross.module, |b| b.g.binary(OpKind::Add, x1, o));
            if let Some(norm) = cross.sum_norm {
                x1 = norm.apply(b, x1);
            }
        }
        locals.extend([x, x1]);
        let mut out = x1;
        if let Some(mlp) = &self.mlp {
            let sum_norm = mlp.norms()[1];
            let [read, weights] = self.read(b, 1, x1);
            let y2 = mlp.normalize(b, read);
            if let Some(y1) = y1 {
                b.g.release(y1);
            }
            let more = (self.shortcut.as_ref()).map(|shortcut| {
                let (more, logits) = shortcut.experts.forward(b, y2);
                carried.routers.push(logits);
                more
            });
            let f = mlp.forward(b, [read, y2], &mut carried.routers);
            let f = self.scale(b, 1, f);
            out = self.add(b, (1, mlp.module()), x1, f, weights);
            if let Some((shortcut, more)) = self.shortcut.as_ref().zip(more) {
                locals.push(out);
                out = shortcut.second.forward(b, out, by, carried);
                out = b.within(self.module, |b| b.g.binary(OpKind::Add, out, more));
            }
            if let Some(norm) = sum_norm {
                out = norm.apply(b, out);
            }
            locals.push(y2);
        }
        if let Some((input, rows)) = self.input.as_ref().zip(by.rows) {
            let more = input.forward(b, out, rows);
            locals.push(out);
            out = b.within(self.module, |b| b.g.binary(OpKind::Add, out, more));
        }
        if b.s.model.options.stream_scale {
            locals.push(out);
            out = b.within(self.module, |b| b.scale(out, 1.0));
        }
        self.release(b, locals);
        out
    }

    /// Applies attention and the feed-forward layer to the same values.
    fn parallel(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        by: Surroundings,
        carried: &mut Carried,
    ) -> ValueId {
        let (Some(mixer), Some(mlp)) = (&self.mixer, &self.mlp) else {
            return x;
        };
        let y1 = mixer.norms()[0].map_or(x, |norm| norm.apply(b, x));
        let (o, mut locals) = self.mix(b, mixer, y1, by, carried);
        let y2 = mlp.norms()[0].map_or(y1, |norm| norm.apply(b, x));
        let f = mlp.forward(b, [x, y2], &mut carried.routers);
        let out = b.within(self.module, |b| {
            let sum = b.g.binary(OpKind::Add, o, f);
            b.g.binary(OpKind::Add, sum, x)
        });
        locals.extend([x, y1, y2]);
        self.release(b, locals);
        out
    }

    /// Ends the lives of the local variables of the block's forward.
    fn release(&self, b: &mut Builder<'_>, locals: Locals) {
        b.within(self.module, |b| {
            for v in locals {
                b.g.release(v);
            }
        });
    }
}

/// Returns which local variables of attention live as long as those of the block: in the code of
/// transformers, where attention has a `forward` of its own, none.
fn of_block(b: &Builder<'_>, attention: Locals) -> Locals {
    match b.is_transformers() {
        true => Locals::new(),
        false => attention,
    }
}

/// Returns the tanh of a learned number.
fn tanh_gate(b: &mut Builder<'_>, gate: Layer) -> ValueId {
    let w = b.weight(gate);
    b.within(gate.module(), |b| {
        let w = b.g.reshape(w, &[]);
        b.g.unary(OpKind::Softcap(op::Softcap { cap: Real(1.0) }), w)
    })
}

/// Applies `by` to the first `n` rows of `h`, `[batch, seq, hidden]`, where `n` is the number of
/// rows of `like`. Returns `h` with these rows replaced.
fn with_first(
    b: &mut Builder<'_>,
    h: ValueId,
    by: impl FnOnce(&mut Builder<'_>, ValueId) -> ValueId,
    like: ValueId,
) -> ValueId {
    let (n, seq) = (b.g.value(like).shape[1], b.g.value(h).shape[1]);
    let first = b.g.slice(h, 1, 0, n);
    let first = by(b, first);
    let rest = b.g.slice(h, 1, n, seq - n);
    b.g.cat(&[first, rest], 1)
}

/// Returns `by * x`, without an op for a factor of 1.
fn scaled(b: &mut Builder<'_>, x: ValueId, by: f64) -> ValueId {
    match by {
        1.0 => x,
        by => b.scale(x, by),
    }
}

/// Returns whether the inputs of blocks, their outputs, and the sum are normalized.
fn normalized(m: &Model) -> [bool; 3] {
    match m.options.norm_position {
        NormPosition::Before => [true, false, false],
        NormPosition::After => [false, true, false],
        NormPosition::Both => [true, true, false],
        NormPosition::Sum => [false, false, true],
    }
}

/// Traces one micro-batch. The order of ops, views and local variables is that of the usual eager
/// PyTorch code.
impl Forward for Decoder {
    fn forward(&self, b: &mut Builder<'_>) {
        let (ids, labels) = match self.embedding {
            Embedding::Patches(_) | Embedding::Sound(_) => (None, None),
            _ => {
                let (ids, labels) = loss::tokens(b);
                (Some(ids), Some(labels))
            }
        };
        let images = self.vision.as_ref().map(|tower| tower.forward(b));
        let sounds = self.audio.as_ref().map(|tower| tower.forward(b));
        let ropes = Self::ropes(b, ["rope_cos", "rope_sin"]);
        let mut h = self.embedding.forward(b, ids);
        if let Some(norm) = self.embedding_norm {
            h = norm.apply(b, h);
        }
        h = b.within(ROOT, |b| {
            b.dropout(h, b.s.model.options.embedding.embedding_dropout)
        });
        if let Some(projection) = self.projection {
            h = b.linear(projection, h);
        }
        let attends = b.s.model.options.context.tower_memory().is_some();
        let compares = b.s.model.options.output.head == Head::Contrastive;
        let image = images.as_ref().filter(|_| compares).map(|i| i.rows);
        if let Some(images) = images.as_ref().filter(|_| !attends && !compares) {
            h = b.within(ROOT, |b| {
                let rows = match &sounds {
                    Some(sounds) => b.g.cat(&[images.rows, sounds.rows], 1),
                    None => images.rows,
                };
                with_first(b, h, |_, _| rows, rows)
            });
        }
        let own = self.layer_embedding.as_ref().zip(ids);
        let rows = own.map(|(of, ids)| of.forward(b, ids, h));
        let masks = Masks::new(b, h);
        let shares = self.blocks.iter().any(|block| block.shared.is_some());
        let seen = images.as_ref().filter(|_| attends).map(|i| i.rows);
        let encoded = self.encoder.as_ref().map(|encoder| {
            let (batch, seq) = (b.batch(), b.seq());
            let ids = b.constant("encoder_tokens", &[batch, seq], DType::I64, true);
            let x = match encoder.embedding() {
                Some(own) => b.inside(Part::First, |b| own.forward(b, ids)),
                None => self.embedding.forward(b, Some(ids)),
            };
            encoder.forward(b, x)
        });
        let temperature = (b.s.model.has_temperature()).then(|| {
            let shape = [b.seq(), 1];
            b.constant("attention_temperature", &shape, DType::F32, false)
        });
        let by = Surroundings {
            ropes: ropes.map(|r| r.cast(b)),
            around: Around {
                bias: self.bias.as_ref().map(|bias| bias.forward(b)),
                relative: self.relative.as_ref().map(|table| table.forward(b)),
                memory: seen.or(encoded),
                masks,
                temperature,
                ..Around::default()
            },
            tokens: shares.then_some(h),
            rows: None,
        };
        if self.streams.is_some() {
            h = streams::replicate(b, ROOT, h);
        }
        if let Some(altup) = &self.altup {
            h = altup.spread(b, h);
        }
        let mut carried = Carried::default();
        let mut more = images.into_iter().flat_map(|i| i.deepstack);
        for block in &self.blocks {
            if !b.skips(block.module) {
                let by = Surroundings {
                    rows: rows.map(|all| layer_embedding::of_layer(b, all, block.layer)),
                    ..by
                };
                h = block.forward(b, h, by, &mut carried);
            }
            if let Some(rows) = more.next() {
                let add = |b: &mut Builder<'_>, x| b.g.binary(OpKind::Add, x, rows);
                h = b.within(ROOT, |b| with_first(b, h, add, rows));
            }
        }
        if let Some(streams) = self.streams {
            h = streams.collapse(b, h)[0];
        }
        if let Some(altup) = &self.altup {
            h = altup.merge(b, h);
        }
        let y = self.norm.map_or(h, |norm| norm.apply(b, h));
        masks.release(b);
        match &self.reconstruction {
            Some(reconstruction) => reconstruction.forward(b, y),
            None => self.output.forward(b, y, labels, image),
        }
        router_losses::add(b, &carried.routers);
    }
}
