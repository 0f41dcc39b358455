//! Inputs of the first block: embedded tokens, or projected patches of images.

use super::names::Names;
use super::scaled;
use super::sound::Sound;
use crate::config::{Family, Model, PositionEmbedding};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, ROOT};

pub(super) enum Embedding {
    /// A table of tokens.
    Tokens(Layer),
    /// Tables of tokens and positions.
    Learned(Tables),
    /// Patches of an image, after a row for the class.
    Patches(Patches),
    /// Samples of a sound.
    Sound(Sound),
}

/// Returns the width of embedded tokens.
pub(super) fn width(m: &Model) -> u64 {
    m.options.embedding.embedding_width.unwrap_or(m.hidden)
}

/// Returns the width of the tables that are added to embedded tokens, and of their norm.
pub(super) fn sum_width(m: &Model) -> u64 {
    match m.family {
        Family::Bert => width(m),
        _ => m.hidden,
    }
}

/// Declares the projection of embedded tokens to the width of the model. Encoders have it if
/// embeddings have a separate width, even an equal one, decoders only if the widths differ.
pub(super) fn projection(d: &mut Declare, at: ModuleId, m: &Model) -> Option<Layer> {
    let encoder = m.family == Family::Bert;
    let names = match encoder {
        true => ("embedding_projection", "electra.embeddings_project"),
        false => ("project_in", "model.decoder.project_in"),
    };
    let narrow = match encoder {
        true => m.options.embedding.embedding_width.is_some(),
        false => width(m) != m.hidden,
    };
    narrow.then(|| d.linear(at, names, [m.hidden, width(m)], encoder))
}

pub(super) struct Tables {
    module: ModuleId,
    tokens: Layer,
    /// Projects tokens before positions are added.
    project: Option<Layer>,
    positions: Option<Layer>,
    types: Option<Layer>,
    /// Places on a page: columns, rows, heights and widths.
    boxes: Option<[Layer; 4]>,
}

/// Numbers of a box on a page, and the table that each is looked up in.
const BOX: [(&str, usize); 6] = [
    ("box_left", 0),
    ("box_top", 1),
    ("box_right", 0),
    ("box_bottom", 1),
    ("box_height", 2),
    ("box_width", 3),
];

pub(super) struct Patches {
    module: ModuleId,
    projection: Layer,
    class: Option<Layer>,
    distillation: Option<Layer>,
    registers: Option<Layer>,
    positions: Option<Layer>,
}

impl Embedding {
    pub(super) fn new(d: &mut Declare, names: &Names, m: &Model) -> Self {
        let o = &m.options;
        if let Some(sound) = Sound::new(d, m) {
            return Self::Sound(sound);
        }
        if m.family == Family::Vit {
            return Self::Patches(Patches::new(d, m));
        }
        let narrow = width(m) != m.hidden && m.family != Family::Bert;
        if !o.positions.position_embedding.is_table() && o.embedding.token_types == 0 && !narrow {
            let names = ("tok_embeddings", names.embedding);
            let shape = [m.vocab + o.embedding.extra_tokens, width(m)];
            return Self::Tokens(d.table(ROOT, names, ModuleKind::Embedding, shape));
        }
        let module = d.module(ROOT, "tok_embeddings", ModuleKind::Embedding);
        let table = |d: &mut Declare, names, rows, width| {
            d.table(module, names, ModuleKind::Layer, [rows, width])
        };
        let tokens = table(
            d,
            ("wte", names.embedding),
            m.vocab + o.embedding.extra_tokens,
            width(m),
        );
        let project = narrow.then(|| projection(d, module, m)).flatten();
        let has_positions = o.positions.position_embedding.is_table();
        let positions = has_positions.then(|| positions(d, module, names.positions, m));
        let types = (o.embedding.token_types > 0).then(|| {
            let names = ("wtt", names.token_types);
            table(d, names, o.embedding.token_types, sum_width(m))
        });
        let boxes = (o.embedding.box_rows > 0).then(|| {
            [
                ("x", "layoutlm.embeddings.x_position_embeddings"),
                ("y", "layoutlm.embeddings.y_position_embeddings"),
                ("height", "layoutlm.embeddings.h_position_embeddings"),
                ("width", "layoutlm.embeddings.w_position_embeddings"),
            ]
            .map(|names| table(d, names, o.embedding.box_rows, sum_width(m)))
        });
        Self::Learned(Tables {
            module,
            tokens,
            project,
            positions,
            types,
            boxes,
        })
    }

    /// Declares the tables of an encoder that has its own table of tokens or a table of positions:
    /// the same table of tokens, and its own table of positions.
    pub(super) fn of_encoder(&self, d: &mut Declare, at: ModuleId, m: &Model) -> Option<Tables> {
        if m.options
            .context
            .encoder
            .as_ref()
            .is_some_and(|of| of.own_tokens)
        {
            let names = ("tok_embeddings", "");
            let tokens = d.table(at, names, ModuleKind::Embedding, [m.vocab, m.hidden]);
            let has_positions = m.options.positions.position_embedding.is_table();
            return Some(Tables {
                module: at,
                tokens,
                project: None,
                positions: has_positions.then(|| positions(d, at, "", m)),
                types: None,
                boxes: None,
            });
        }
        let Self::Learned(tables) = self else {
            return None;
        };
        tables.positions?;
        Some(Tables {
            module: at,
            tokens: tables.tokens,
            project: None,
            positions: Some(positions(d, at, "", m)),
            types: None,
            boxes: None,
        })
    }

    /// Returns the table of tokens, if there is one.
    pub(super) fn tokens(&self) -> Option<Layer> {
        match self {
            Self::Tokens(tokens) => Some(*tokens),
            Self::Learned(tables) => Some(tables.tokens),
            Self::Patches(_) | Self::Sound(_) => None,
        }
    }

    /// Embeds token ids; patches of images and audio samples are inputs of their own.
    pub(super) fn forward(&self, b: &mut Builder<'_>, ids: Option<ValueId>) -> ValueId {
        match (self, ids) {
            (Self::Patches(patches), _) => patches.forward(b),
            (Self::Sound(sound), _) => sound.forward(b),
            (Self::Tokens(tokens), Some(ids)) => {
                let tokens = b.embedding(*tokens, ids);
                b.within(ROOT, |b| {
                    let tokens = multiplied(b, tokens);
                    sinusoids(b, tokens)
                })
            }
            (Self::Learned(tables), Some(ids)) => tables.forward(b, ids),
            (_, None) => unreachable!("only images and sounds have no tokens"),
        }
    }
}

/// Declares the table of positions. One of sines and cosines is not trained.
fn positions(d: &mut Declare, at: ModuleId, hf: &str, m: &Model) -> Layer {
    let rows = m.max_seq_len + m.options.embedding.position_offset;
    let table = d.table(at, ("wpe", hf), ModuleKind::Layer, [rows, sum_width(m)]);
    if m.options.positions.position_embedding == PositionEmbedding::SinusoidalTable {
        d.untrained(table);
    }
    table
}

/// Multiplies embedded tokens by their factor.
fn multiplied(b: &mut Builder<'_>, tokens: ValueId) -> ValueId {
    let by = b.s.model.options.embedding.embedding_multiplier;
    scaled(b, tokens, by)
}

/// Adds sines and cosines of the positions to tokens, if the model has them.
fn sinusoids(b: &mut Builder<'_>, tokens: ValueId) -> ValueId {
    if b.s.model.options.positions.position_embedding != PositionEmbedding::Sinusoidal {
        return tokens;
    }
    let row = [b.s.model.hidden];
    let waves = b.positional("sinusoids", 0, &row, DType::F32);
    let waves = b.as_activation(waves);
    b.g.binary(OpKind::Add, tokens, waves)
}

impl Tables {
    /// Embeds token ids and their positions.
    pub(super) fn forward(&self, b: &mut Builder<'_>, ids: ValueId) -> ValueId {
        let name = match b.s.model.options.embedding.position_offset {
            0 => "positions",
            _ => "positions_with_offset",
        };
        let positions = self.positions.map(|table| {
            let places = b.positional(name, 0, &[], DType::I64);
            (table, places)
        });
        b.within(self.module, |b| {
            let mut tokens = b.embedding(self.tokens, ids);
            if let Some(project) = self.project {
                tokens = b.linear(project, tokens);
            }
            let tokens = multiplied(b, tokens);
            let mut sum = tokens;
            if let Some((table, places)) = positions {
                let places = b.embedding(table, places);
                sum = b.g.binary(OpKind::Add, tokens, places);
                b.g.release(tokens);
                b.g.release(places);
            }
            let (batch, seq) = (b.batch(), b.seq());
            for (name, at) in BOX.iter().filter(|_| self.boxes.is_some()) {
                let ids = b.constant(name, &[batch, seq], DType::I64, true);
                if let Some(tables) = self.boxes {
                    let more = b.embedding(tables[*at], ids);
                    sum = b.g.binary(OpKind::Add, sum, more);
                }
            }
            let Some(types) = self.types else {
                return sum;
            };
            let zeros = b.constant("token_types", &[batch, seq], DType::I64, true);
            let types = b.embedding(types, zeros);
            b.g.binary(OpKind::Add, sum, types)
        })
    }
}

impl Patches {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let module = d.module(ROOT, "tok_embeddings", ModuleKind::Embedding);
        let of = |d: &mut Declare, name, hf, shape: &[u64]| {
            let module = d.module(module, name, ModuleKind::Layer);
            let layer = d.parameters(module, hf, shape, false);
            d.lookup(layer);
            layer
        };
        let h = m.hidden;
        let class = (m.options.image.class_token).then(|| of(d, "class", "", &[1, 1, h]));
        if m.options.image.mask_token {
            let mask = of(d, "mask", "", &[1, h]);
            d.untrained(mask);
        }
        let distills = m.options.image.distillation_token;
        let distillation = distills.then(|| of(d, "distillation", "", &[1, 1, h]));
        let more = m.options.image.register_tokens;
        let registers = (more > 0).then(|| of(d, "registers", "", &[1, more, h]));
        let has_positions = m.options.positions.position_embedding.is_table();
        let reconstruction = m.options.reconstruction.as_ref();
        // Registers have no positions.
        let rows = reconstruction.map_or(m.max_seq_len - more, |of| of.rows());
        let positions = has_positions.then(|| of(d, "positions", "", &[1, rows, h]));
        if let Some(table) = positions.filter(|_| reconstruction.is_some()) {
            d.untrained(table);
        }
        let shape = [h, m.options.image.patch_dim];
        let outer = d.rows(reconstruction.map(|of| of.patches));
        let projection = d.linear(ROOT, ("patches", ""), shape, m.options.image.patch_bias);
        d.rows(outer);
        Self {
            module,
            projection,
            class,
            distillation,
            registers,
            positions,
        }
    }

    /// Computes `cat([registers, cat([class, distillation, projection(patches)]) + positions])`, of
    /// which all but the patches may be missing. Without positions, registers follow the class. Of
    /// images that a decoder makes again, the first rows are left.
    fn forward(&self, b: &mut Builder<'_>) -> ValueId {
        let (batch, seen) = (b.batch(), b.seq());
        let reconstruction = b.s.model.options.reconstruction.as_ref();
        let seq = reconstruction.map_or(seen, |of| of.rows());
        let (h, dim) = (b.s.model.hidden, b.s.model.options.image.patch_dim);
        let learned = [self.class, self.distillation, self.registers];
        let learned: Vec<ValueId> = learned.into_iter().flatten().map(|l| b.weight(l)).collect();
        let registers = self.registers.map(|l| b.weight(l));
        let rows_of = |b: &Builder<'_>, row: ValueId| b.g.value(row).shape[1];
        let before: u64 = learned.iter().map(|&row| rows_of(b, row)).sum();
        let patches = b.constant("patches", &[batch, seq - before, dim], DType::F32, true);
        let patches = b.within(ROOT, |b| b.as_activation(patches));
        let one = b.constant("zeros", &[batch, 1, h], DType::F32, false);
        let mut zeros = vec![(1, b.within(ROOT, |b| b.as_activation(one)))];
        for &row in &learned {
            let n = rows_of(b, row);
            if n > 1 {
                let more = b.constant("zeros", &[batch, n, h], DType::F32, false);
                zeros.push((n, b.within(ROOT, |b| b.as_activation(more))));
            }
        }
        let rows = b.linear(self.projection, patches);
        let positions = self.positions.map(|table| b.weight(table));
        b.within(self.module, |b| {
            let broadcast = |b: &mut Builder<'_>, row: ValueId| {
                let n = rows_of(b, row);
                let same = zeros.iter().find(|(rows, _)| *rows == n);
                same.map(|&(_, zeros)| b.g.binary(OpKind::Add, zeros, row))
            };
            let apart = positions.is_some().then_some(registers).flatten();
            let among = learned.iter().filter(|&&row| Some(row) != apart);
            let mut all: Vec<ValueId> = among.filter_map(|&row| broadcast(b, row)).collect();
            all.push(rows);
            let mut all = match all[..] {
                [rows] => rows,
                _ => b.g.cat(&all, 1),
            };
            if let Some(positions) = positions {
                all = b.g.binary(OpKind::Add, all, positions);
            }
            if seen < seq {
                let first = b.g.slice(all, 1, 0, seen);
                all = b.g.make_contiguous(first);
            }
            match apart.and_then(|row| broadcast(b, row)) {
                Some(row) => b.g.cat(&[row, all], 1),
                None => all,
            }
        })
    }
}
