//! Towers and projectors: they turn images or sounds into rows. The rows replace the embeddings of
//! the first tokens of a sample, or the blocks of the language model attend to them.

use super::convolve::convolve;
use super::norm::Norm;
use super::pooling::Pooling;
use super::qformer::QFormer;
use super::resampler::Resampler;
use super::subsampling::Subsampled;
use super::tiles::Tiles;
use super::{Block, Carried, Decoder, Surroundings, reconstruction, seq2seq};
use crate::config::{Activation, Model, Norm as NormKind, ProjectorNorm, Scenario, Vision};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::activation::activate;
use crate::models::build::{Builder, Part, Parts};
use crate::models::declare::{Declare, Layer, Order, ROOT};

/// Returns the scenarios for the code of towers, an encoder or a decoder of images. Their model is
/// its blocks, and their samples its rows.
pub(in crate::models) fn scenarios(s: &Scenario) -> Parts<Scenario> {
    let o = &s.model.options;
    if let Some(of) = &o.reconstruction {
        return [Some(reconstruction::scenario(s, of)), None];
    }
    let of_tower = |of: &Vision| {
        let mut inner = s.clone();
        inner.model = of.model(&s.model);
        inner.train.seq_len = of.rows();
        inner
    };
    let first = o.context.vision.as_ref().map(of_tower);
    let audio = o.context.audio.as_ref().map(of_tower);
    [first.or_else(|| seq2seq::scenario(s)), audio]
}

/// Returns the name of a tower's module, and those of its rotary tables.
fn names(part: Part) -> (&'static str, [&'static str; 2]) {
    match part {
        Part::First => ("vision", ["vision_rope_cos", "vision_rope_sin"]),
        Part::Audio => ("audio", ["audio_rope_cos", "audio_rope_sin"]),
    }
}

pub(super) struct Tower {
    of: Vision,
    part: Part,
    module: ModuleId,
    stem: Stem,
    class: Option<Layer>,
    positions: Option<Layer>,
    /// Embeddings of tiles, in place of a class and positions.
    tiles: Option<Tiles>,
    pre_norm: Option<Norm>,
    blocks: Vec<Block>,
    post_norm: Option<Norm>,
    pooling: Option<PoolingHead>,
    vector: Option<Vector>,
    resampler: Option<Resampler>,
    qformer: Option<QFormer>,
    projector: Option<Projector>,
    newline: Option<Layer>,
    /// Projectors of the results of single blocks.
    deepstack: Vec<Projector>,
}

/// Outputs of towers, which are inputs of the language model.
pub(super) struct Images {
    /// In place of embedded tokens: `[batch, tokens, hidden]`. If texts are compared with images, a
    /// vector of each image: `[batch, width]`.
    pub(super) rows: ValueId,
    /// To be added to the hidden states of the first layers.
    pub(super) deepstack: Vec<ValueId>,
}

impl Tower {
    pub(super) fn new(d: &mut Declare, m: &Model, of: &Vision, part: Part) -> Self {
        let (h, inner) = (of.hidden, of.model(m));
        let module = d.module(ROOT, names(part).0, ModuleKind::Layer);
        let stem = Stem::new(d, module, of);
        if of.unused_rows > 0 {
            let shape = [of.unused_rows, m.hidden];
            let unused = d.table(module, ("unused", ""), ModuleKind::Layer, shape);
            d.untrained(unused);
        }
        d.rows(Some(of.rows()));
        let norm = |d: &mut Declare, name, asked: bool| {
            asked.then(|| Norm::new(d, module, (name, ""), h, &inner, Order::Declared))
        };
        let tiles = (of.input.tile_rows > 0).then(|| Tiles::new(d, module, of));
        let class = (of.input.class_token && tiles.is_none()).then(|| {
            let at = d.module(module, "class", ModuleKind::Layer);
            d.parameters(at, "", &[1, 1, h], false)
        });
        let positions = (of.input.positions > 0 && tiles.is_none()).then(|| {
            let shape = [of.input.positions, h];
            let table = d.table(module, ("positions", ""), ModuleKind::Layer, shape);
            if of.input.fixed_positions {
                d.untrained(table);
            }
            table
        });
        let pre_norm = norm(d, "pre_norm", of.pre_norm);
        let block = |n: u64| {
            let name = format!("layers.{n}");
            let at = d.module(module, &name, ModuleKind::Block);
            Block::new(d, at, &inner, n as usize)
        };
        let blocks = (0..of.layers + of.gated_layers).map(block).collect();
        let post_norm = norm(d, "post_norm", of.post_norm);
        let vector = of.vector.then(|| Vector::new(d, module, of, m, &inner));
        let pooling =
            (of.pooling_head && !of.vector).then(|| PoolingHead::new(d, module, of, &inner));
        d.rows(Some(of.projected()));
        let qformer = QFormer::new(d, module, of, m);
        let perceives = of.latents.count > 0 && qformer.is_none();
        let resampler = perceives.then(|| Resampler::new(d, module, of, m));
        let projector = (of.projector.present && !of.vector && of.latents.count == 0)
            .then(|| Projector::new(d, module, "projector", of, m, of.projector.norm));
        let newline = of.newline.then(|| {
            let at = d.module(module, "newline", ModuleKind::Layer);
            d.parameters(at, "", &[1, 1, m.hidden], false)
        });
        let deepstack = (0..of.deepstack.len())
            .map(|n| {
                let name = format!("deepstack.{n}");
                Projector::new(d, module, &name, of, m, ProjectorNorm::Merged)
            })
            .collect();
        d.rows(None);
        // What it computes is used by more blocks than the first one.
        if !of.deepstack.is_empty() || of.memory {
            d.blocks_differ();
        }
        Self {
            of: of.clone(),
            part,
            module,
            stem,
            class,
            positions,
            tiles,
            pre_norm,
            blocks,
            post_norm,
            pooling,
            vector,
            resampler,
            qformer,
            projector,
            newline,
            deepstack,
        }
    }

    pub(super) fn forward(&self, b: &mut Builder<'_>) -> Images {
        let mut picked = Vec::new();
        let mut picked_too = Vec::new();
        let part = self.part;
        let rows = b.inside(part, |b| {
            let ropes = Decoder::ropes(b, names(part).1);
            let surroundings = Surroundings {
                ropes: ropes.map(|r| r.cast(b)),
                ..Surroundings::default()
            };
            let mut x = self.embed(b);
            if let Some(norm) = self.pre_norm {
                x = norm.apply(b, x);
            }
            if let Some(tiles) = &self.tiles {
                x = tiles.fill_up(b, &self.of, x);
            }
            for (n, block) in (0..).zip(&self.blocks) {
                x = block.forward(b, x, surroundings, &mut Carried::default());
                if self.of.deepstack.contains(&n) {
                    picked.push(x);
                }
                if self.of.picked.contains(&n) {
                    picked_too.push(x);
                }
                if let Some(tiles) = self.tiles.as_ref().filter(|_| n + 1 == self.of.layers) {
                    x = self.post_norm.map_or(x, |norm| norm.apply(b, x));
                    x = tiles.after(b, &self.of, x);
                }
            }
            match &self.tiles {
                Some(tiles) => tiles.results(b, &self.of, x, &picked_too),
                None => {
                    let x = self.post_norm.map_or(x, |norm| norm.apply(b, x));
                    let more = picked_too.into_iter().filter(|_| self.projector.is_some());
                    let all: Vec<ValueId> = [x].into_iter().chain(more).collect();
                    match all[..] {
                        [x] => x,
                        _ => b.within(self.module, |b| b.g.cat(&all, 2)),
                    }
                }
            }
        });
        let of = &self.of;
        if let Some(pooling) = &self.pooling {
            b.inside(part, |b| pooling.forward(b, of, rows));
        }
        let deepstack = self.deepstack.iter().zip(picked);
        let deepstack = deepstack.map(|(p, x)| p.forward(b, of, x)).collect();
        if let Some(vector) = &self.vector {
            let rows = vector.forward(b, of, rows);
            let deepstack = Vec::new();
            return Images { rows, deepstack };
        }
        let rows = match (&self.resampler, &self.qformer) {
            (Some(resampler), _) => resampler.forward(b, of, rows),
            (None, Some(qformer)) => qformer.forward(b, of, rows),
            (None, None) => rows,
        };
        let projector = self.projector.as_ref();
        let rows = projector.map_or(rows, |projector| projector.forward(b, of, rows));
        let rows = match self.newline {
            Some(newline) => self.learned_row(b, newline, rows, false),
            None => rows,
        };
        Images { rows, deepstack }
    }

    /// Puts a learned row before those of each sample, or after them.
    fn learned_row(&self, b: &mut Builder<'_>, row: Layer, x: ValueId, before: bool) -> ValueId {
        let (batch, width) = (b.batch(), b.g.value(x).cols());
        let zeros = b.constant("zeros", &[batch, 1, width], DType::F32, false);
        let row = b.weight(row);
        b.within(self.module, |b| {
            let zeros = b.as_activation(zeros);
            let row = b.g.binary(OpKind::Add, zeros, row);
            let both = if before { [row, x] } else { [x, row] };
            b.g.cat(&both, 1)
        })
    }

    /// Embeds patches or frames, and adds a class and positions: `[batch, rows, hidden]`.
    fn embed(&self, b: &mut Builder<'_>) -> ValueId {
        let of = &self.of;
        let mut x = self.stem.forward(b, self.module, of);
        if let Some(tiles) = &self.tiles {
            return tiles.embed(b, of, x);
        }
        if let Some(class) = self.class {
            x = self.learned_row(b, class, x, true);
        }
        if of.input.sinusoids {
            let waves = b.constant("sinusoids", &[of.rows(), of.hidden], DType::F32, false);
            x = b.within(self.module, |b| {
                let waves = b.as_activation(waves);
                b.g.binary(OpKind::Add, x, waves)
            });
        }
        let Some(positions) = self.positions else {
            return x;
        };
        let places = b.constant("vision_positions", &[of.rows()], DType::I64, false);
        let positions = b.embedding(positions, places);
        b.within(self.module, |b| b.g.binary(OpKind::Add, x, positions))
    }
}

/// Layers from the rows of an image to one vector.
struct Vector {
    module: ModuleId,
    /// Without it, the vector is that of the class.
    pooling: Option<Pooling>,
    projection: Option<Layer>,
}

impl Vector {
    fn new(d: &mut Declare, at: ModuleId, of: &Vision, m: &Model, inner: &Model) -> Self {
        let module = d.module(at, "vector", ModuleKind::Layer);
        let pooling = of.pooling_head.then(|| Pooling::new(d, module, inner));
        let outer = d.rows(Some(1));
        let shape = [m.options.output.vector_width, of.hidden];
        let names = ("projection", "visual_projection");
        let projection =
            (of.projector.present).then(|| d.linear(module, names, shape, of.projector.bias));
        d.rows(outer);
        Self {
            module,
            pooling,
            projection,
        }
    }

    fn forward(&self, b: &mut Builder<'_>, of: &Vision, rows: ValueId) -> ValueId {
        let batch = b.batch();
        let vector = match &self.pooling {
            Some(pooling) => b.inside(Part::First, |b| pooling.forward(b, rows)),
            None => b.within(self.module, |b| {
                let class = b.g.slice(rows, 1, 0, 1);
                b.g.reshape(class, &[batch, of.hidden])
            }),
        };
        match self.projection {
            Some(layer) => b.linear(layer, vector),
            None => vector,
        }
    }
}

/// First layers, from the input to rows.
enum Stem {
    /// Projection of patches.
    Patches(Layer),
    /// Convolutions over the frames of a sound (Whisper).
    Frames([Layer; 2]),
    /// Convolutions over its frames and bands.
    Subsampled(Subsampled),
}

/// Frames that a convolution sees, and the strides of both.
const FRAMES_SEEN: u64 = 3;
const STRIDES: [u64; 2] = [1, 2];

impl Stem {
    fn new(d: &mut Declare, at: ModuleId, of: &Vision) -> Self {
        if let Some(by) = &of.input.subsampling {
            let shape = [of.input.mel_bins, of.input.patches, of.hidden];
            return Self::Subsampled(Subsampled::new(d, at, by, shape));
        }
        if of.input.mel_bins == 0 {
            d.rows(Some(of.rows()));
            let names = ("patches", "visual.patch_embed");
            return Self::Patches(d.linear(
                at,
                names,
                [of.hidden, of.input.patch_dim],
                of.input.patch_bias,
            ));
        }
        let mut conv = |name, inputs, rows| {
            d.rows(Some(rows));
            let module = d.module(at, name, ModuleKind::Layer);
            d.parameters(module, "", &[of.hidden, inputs, FRAMES_SEEN], true)
        };
        Self::Frames([
            conv("conv1", of.input.mel_bins, of.frames()),
            conv("conv2", of.hidden, of.input.patches),
        ])
    }

    /// Embeds the input of a sample: `[batch, patches, hidden]`.
    fn forward(&self, b: &mut Builder<'_>, at: ModuleId, of: &Vision) -> ValueId {
        let batch = b.batch();
        match self {
            &Self::Patches(layer) => {
                let shape = [batch, of.input.patches, of.input.patch_dim];
                let patches = b.constant("patches", &shape, DType::F32, true);
                let patches = b.within(at, |b| b.as_activation(patches));
                b.linear(layer, patches)
            }
            Self::Subsampled(by) => by.forward(b),
            Self::Frames(layers) => {
                let shape = [batch, of.input.mel_bins, of.frames()];
                let frames = b.constant("frames", &shape, DType::F32, true);
                let mut x = b.within(at, |b| b.as_activation(frames));
                for (&layer, stride) in layers.iter().zip(STRIDES) {
                    let (w, bias) = (b.weight(layer), b.bias(layer));
                    let positions = b.g.value(x).cols().div_ceil(stride);
                    x = convolve(b, layer.module(), [x, w], bias, [stride, positions]);
                    x = b.within(at, |b| activate(b, of.activation, x));
                }
                b.within(at, |b| b.g.transpose(x, 1, 2))
            }
        }
    }
}

/// Attention with one learned query and a feed-forward layer (SigLIP). Transformers computes its
/// result, but the language model does not read it, so its parameters get no gradient. The
/// attention of the single query counts as a mean.
struct PoolingHead {
    module: ModuleId,
    probe: Layer,
    input: Layer,
    output: Layer,
    norm: Norm,
    mlp: [Layer; 2],
}

impl PoolingHead {
    fn new(d: &mut Declare, at: ModuleId, of: &Vision, inner: &Model) -> Self {
        let (h, module) = (of.hidden, d.module(at, "pooling", ModuleKind::Layer));
        let probe = d.module(module, "probe", ModuleKind::Layer);
        let new = Self {
            module,
            probe: d.parameters(probe, "", &[h], false),
            input: d.linear(module, ("in", ""), [3 * h, h], true),
            output: d.linear(module, ("out", ""), [h, h], true),
            norm: Norm::new(d, module, ("norm", ""), h, inner, Order::Declared),
            mlp: [
                d.linear(module, ("w1", ""), [of.ffn, h], true),
                d.linear(module, ("w2", ""), [h, of.ffn], true),
            ],
        };
        let layers = [new.probe, new.input, new.output];
        for layer in layers.into_iter().chain(new.mlp).chain(new.norm.layer()) {
            d.untrained(layer);
        }
        new
    }

    fn forward(&self, b: &mut Builder<'_>, of: &Vision, rows: ValueId) {
        let (batch, h) = (b.batch(), of.hidden);
        let rows = b.g.detach(rows);
        let probe = b.weight(self.probe);
        b.within(self.module, |b| {
            let x = b.g.binary(OpKind::Add, rows, probe);
            let qkv = b.linear(self.input, x);
            let values = b.g.slice(qkv, 2, 2 * h, h);
            let first = b.g.transpose(values, 0, 1);
            let sum = b.compute(OpKind::SumLeading, &[first], &[&[batch, h]])[0];
            let mean = b.scale(sum, 1.0 / of.rows() as f64);
            let y = b.linear(self.output, mean);
            let y = self.norm.apply(b, y);
            let y = b.linear(self.mlp[0], y);
            let y = activate(b, of.activation, y);
            b.linear(self.mlp[1], y);
        });
    }
}

/// Layers from the tower's rows to rows of the language model.
struct Projector {
    module: ModuleId,
    norm: Option<Norm>,
    /// The norm is one of concatenated rows.
    after_merge: bool,
    separators: Option<Layer>,
    /// Layers before patches are merged.
    of_patches: Vec<Layer>,
    layers: Vec<Layer>,
    gated: Option<Gated>,
}

/// Projection, norm and gated layer at the end of a projector.
struct Gated {
    projection: Layer,
    norm: Layer,
    gate: Layer,
    up: Layer,
    down: Layer,
}

impl Gated {
    fn new(d: &mut Declare, at: ModuleId, width: u64, h: u64) -> Self {
        let module = d.module(at, "gated", ModuleKind::Layer);
        Self {
            projection: d.linear(module, ("proj", ""), [h, h], false),
            norm: d.norm(module, ("norm", ""), h, true, Order::Declared),
            gate: d.linear(module, ("w1", ""), [width, h], false),
            up: d.linear(module, ("w3", ""), [width, h], false),
            down: d.linear(module, ("w2", ""), [h, width], false),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId, activation: Activation) -> ValueId {
        let y = b.linear(self.projection, x);
        let y = b.layer_norm(self.norm, y);
        let y = b.g.unary(OpKind::GeluErf, y);
        let gate = b.linear(self.gate, y);
        let gate = activate(b, activation, gate);
        let up = b.linear(self.up, y);
        let y = b.g.binary(OpKind::Mul, gate, up);
        b.linear(self.down, y)
    }
}

impl Projector {
    fn new(
        d: &mut Declare,
        parent: ModuleId,
        name: &str,
        of: &Vision,
        m: &Model,
        norm: ProjectorNorm,
    ) -> Self {
        let module = d.module(parent, name, ModuleKind::Layer);
        let mut like = of.model(m);
        like.options.norm = match norm {
            ProjectorNorm::RmsPatch => NormKind::Rms,
            ProjectorNorm::LayerMerged => NormKind::Layer,
            ProjectorNorm::RmsPatchNoWeight => NormKind::RmsNoWeight,
            _ => of.norm,
        };
        let merged = of.merged_width();
        let after_merge = matches!(norm, ProjectorNorm::Merged | ProjectorNorm::LayerMerged);
        let width = if after_merge { merged } else { of.hidden };
        let norm = (norm != ProjectorNorm::None)
            .then(|| Norm::new(d, module, ("norm", ""), width, &like, Order::Declared));
        let mut read = of.hidden;
        let of_patch = |(n, &width): (usize, &u64)| {
            let name = format!("patch_{}", n + 1);
            let bias = of.projector.patch_layer_bias.unwrap_or(of.projector.bias);
            let layer = d.linear(module, (&name, ""), [width, read], bias);
            read = width;
            layer
        };
        let of_patches = of
            .projector
            .patch_layers
            .iter()
            .enumerate()
            .map(of_patch)
            .collect();
        let mut input = merged;
        let separators = (of.separators > 0).then(|| {
            let at = d.module(module, "separators", ModuleKind::Layer);
            d.parameters(at, "", &[of.separators, merged], false)
        });
        let widths = of.projector.layers.iter().copied().chain([m.hidden]);
        let layer = |(n, width): (usize, u64)| {
            let wider = of.projector.inputs.get(n).copied();
            input = input.max(wider.unwrap_or_default());
            let name = format!("linear_{}", n + 1);
            let hf = format!("multi_modal_projector.{name}");
            let layer = d.linear(module, (&name, &hf), [width, input], of.projector.bias);
            input = if of.projector.halves {
                width / 2
            } else {
                width
            };
            layer
        };
        let layers = widths.enumerate().map(layer).collect();
        let gated =
            (of.projector.gate > 0).then(|| Gated::new(d, module, of.projector.gate, m.hidden));
        Self {
            module,
            norm,
            after_merge,
            separators,
            of_patches,
            layers,
            gated,
        }
    }

    /// Merges, normalizes and projects rows `[batch, rows, width]`; returns `[batch, tokens,
    /// hidden]`.
    fn forward(&self, b: &mut Builder<'_>, of: &Vision, mut x: ValueId) -> ValueId {
        let (batch, merge) = (b.batch(), of.projector.merge);
        let tokens = of.projected() - of.separators;
        let separators = self.separators.map(|rows| {
            let shape = [batch, of.separators, of.merged_width()];
            let zeros = b.constant("zeros", &shape, DType::F32, false);
            (b.weight(rows), zeros)
        });
        b.within(self.module, |b| {
            if of.input.class_token && of.input.tile_rows == 0 {
                x = b.g.slice(x, 1, 1, of.input.patches);
            }
            for (n, &layer) in self.of_patches.iter().enumerate() {
                if n > 0 {
                    x = activate(b, of.activation, x);
                }
                x = b.linear(layer, x);
            }
            let width = b.g.value(x).cols();
            let normalize = |b: &mut Builder<'_>, x, now: bool| match self.norm {
                Some(norm) if now => norm.apply(b, x),
                _ => x,
            };
            if of.projector.pool {
                let x4 = b.g.reshape(x, &[batch, tokens, merge, of.hidden]);
                let first = b.g.transpose(x4, 1, 2);
                let first = b.g.transpose(first, 0, 1);
                let shape = [batch, tokens, of.hidden];
                let sum = b.compute(OpKind::SumLeading, &[first], &[&shape])[0];
                let mean = b.scale(sum, 1.0 / merge as f64);
                x = normalize(b, mean, true);
            } else {
                x = normalize(b, x, !self.after_merge);
                x = b.g.reshape(x, &[batch, tokens, merge * width]);
                x = normalize(b, x, self.after_merge);
            }
            if let Some((rows, zeros)) = separators {
                let zeros = b.as_activation(zeros);
                let rows = b.g.binary(OpKind::Add, zeros, rows);
                x = b.g.cat(&[x, rows], 1);
            }
            for (n, &layer) in self.layers.iter().enumerate() {
                if n > 0 && of.projector.halves {
                    let half = b.g.value(x).cols() / 2;
                    let gate = b.g.slice(x, 2, half, half);
                    let gate = activate(b, Activation::Silu, gate);
                    x = b.g.slice(x, 2, 0, half);
                    x = b.g.binary(OpKind::Mul, gate, x);
                } else if n > 0 {
                    x = activate(b, of.activation, x);
                }
                let width = of.projector.inputs.get(n).copied();
                x = widened(b, x, width.unwrap_or_default());
                x = b.linear(layer, x);
            }
            match &self.gated {
                Some(gated) => gated.forward(b, x, of.activation),
                None => x,
            }
        })
    }
}

/// Fills `[batch, rows, numbers]` up with zeros to at least this width.
fn widened(b: &mut Builder<'_>, x: ValueId, width: u64) -> ValueId {
    let (batch, rows) = (b.batch(), b.g.value(x).shape[1]);
    let more = width.saturating_sub(b.g.value(x).cols());
    if more == 0 {
        return x;
    }
    let zeros = b.constant("zeros", &[batch, rows, more], DType::F32, false);
    let zeros = b.as_activation(zeros);
    b.g.cat(&[x, zeros], 2)
}
