//! Image encoders in stages: each stage has half as many rows along an edge as the previous one,
//! and is wider (Swin, ConvNeXt). Squares of four rows are merged before the first block of a
//! stage.

mod convolution;
mod window;

use super::build::Builder;
use super::declare::{Declare, Layer, Order, ROOT};
use super::spec::Conflict;
use super::{Forward, loss};
use crate::config::{Head, Model, Stage, Stages};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use convolution::Convolution;
use window::Windows;

pub(super) struct Staged {
    of: Stages,
    patches: Layer,
    patch_norm: Layer,
    positions: Option<Layer>,
    blocks: Vec<Block>,
    norm: Option<Layer>,
    output: Option<Layer>,
}

struct Block {
    module: ModuleId,
    stage: Stage,
    /// Layers before the block, to the rows of a wider stage.
    merge: Option<Merge>,
    kind: Kind,
}

enum Kind {
    Windows(Windows),
    Convolution(Convolution),
}

/// Layers from a square of four rows to one row.
struct Merge {
    module: ModuleId,
    norm: Layer,
    linear: Layer,
    normed: Normed,
}

/// What is normalized where rows are merged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Normed {
    /// Each row (ConvNeXt).
    Rows,
    /// Each square (Swin).
    Squares,
    /// What is made of squares (Swin V2).
    Made,
}

/// Each stage has half as many rows along an edge as the one before.
const MOST_STAGES: usize = 16;

/// Refuses sizes that do not divide images and windows evenly.
pub(super) fn check(m: &Model) -> Result<(), Conflict> {
    let Some(of) = &m.options.image.stages else {
        return Ok(());
    };
    let conflict = |message: String| Err(Conflict::new(&["stages", "layers"], message));
    let n = of.depths.len();
    if n > MOST_STAGES || of.kernel.is_multiple_of(2) {
        return conflict(format!(
            "`stages`: at most {MOST_STAGES} stages are planned, not {n}, and convolutions that see an odd number of rows, not {}",
            of.kernel
        ));
    }
    if n == 0 || of.widths.len() != n || ![0, n].contains(&of.heads.len()) {
        return conflict(format!(
            "`stages`: depths, widths and heads need one number for each stage, not {n}, {} and {}",
            of.widths.len(),
            of.heads.len()
        ));
    }
    if u64::from(m.layers) > of.blocks() {
        return conflict(format!(
            "`layers` ({}) is more than the {} blocks of `stages`",
            m.layers,
            of.blocks()
        ));
    }
    if of.widths[0] != m.hidden || of.edge * of.edge != m.max_seq_len {
        return conflict(format!(
            "`stages`: the first width ({}) must be `hidden` ({}), and the square of edge ({}) `max_seq_len` ({})",
            of.widths[0], m.hidden, of.edge, m.max_seq_len
        ));
    }
    for stage in (0..n).map(|number| of.stage(number)) {
        let divides = stage.edge > 0 && (of.edge >> stage.number) << stage.number == of.edge;
        let windows = of.heads.is_empty() || stage.edge.is_multiple_of(stage.window.max(1));
        if !divides || !windows || of.window == 0 {
            return conflict(format!(
                "`stages`: {} rows along an edge cannot be divided into those of stage {} and its windows of {}: images that are padded are not planned",
                of.edge, stage.number, of.window
            ));
        }
        if stage.heads > 0 && !stage.width.is_multiple_of(stage.heads) {
            return conflict(format!(
                "`stages`: the width of stage {} ({}) is not divisible by its heads ({})",
                stage.number, stage.width, stage.heads
            ));
        }
    }
    let known = matches!(
        m.options.output.head,
        Head::SequenceClassification | Head::None
    );
    if !known {
        let message = "models in stages classify images, or make one vector of each".to_owned();
        return Err(Conflict::new(&["head", "stages"], message));
    }
    Ok(())
}

impl Staged {
    pub(super) fn new(d: &mut Declare, m: &Model, of: &Stages) -> Self {
        let (first, h) = (of.stage(0), m.hidden);
        d.rows(Some(first.rows()));
        let patches = [h, m.options.image.patch_dim];
        let patches = d.linear(ROOT, ("patches", ""), patches, true);
        let patch_norm = d.norm(ROOT, ("patch_norm", ""), h, true, Order::Declared);
        let positions = of.positions.then(|| {
            let module = d.module(ROOT, "tok_embeddings", ModuleKind::Embedding);
            let table = d.parameters(module, "", &[1, first.rows(), h], false);
            d.lookup(table);
            table
        });
        d.blocks_differ();
        let blocks = d.blocks(m, "", |d, module, m| Block::new(d, module, m, of));
        let last = of.of_block((m.layers as usize).saturating_sub(1));
        d.rows(Some(last.rows()));
        let norm =
            (of.last_norm).then(|| d.norm(ROOT, ("norm", ""), last.width, true, Order::Declared));
        d.rows(Some(1));
        let classifies = m.options.output.head == Head::SequenceClassification;
        let output = classifies.then(|| {
            d.head(
                ("output", ""),
                [m.options.output.num_labels, last.width],
                true,
            )
        });
        d.rows(None);
        Self {
            of: of.clone(),
            patches,
            patch_norm,
            positions,
            blocks,
            norm,
            output,
        }
    }

    /// Embeds patches: `[batch, rows, hidden]`.
    fn embed(&self, b: &mut Builder<'_>) -> ValueId {
        let rows = self.of.stage(0).rows();
        let shape = [b.batch(), rows, b.s.model.options.image.patch_dim];
        let patches = b.constant("patches", &shape, DType::F32, true);
        let patches = b.within(self.patches.module(), |b| b.as_activation(patches));
        let x = b.linear(self.patches, patches);
        let x = b.layer_norm(self.patch_norm, x);
        match self.positions {
            Some(table) => {
                let table_of = b.weight(table);
                b.within(table.module(), |b| b.g.binary(OpKind::Add, x, table_of))
            }
            None => x,
        }
    }
}

impl Block {
    fn new(d: &mut Declare, module: ModuleId, m: &Model, of: &Stages) -> Self {
        let layer = d.layer();
        let stage = of.of_block(layer);
        d.rows(Some(stage.rows()));
        let before = layer.checked_sub(1).map(|before| of.of_block(before));
        let merge = before
            .filter(|before| before.number < stage.number)
            .map(|before| Merge::new(d, module, [before, stage], of));
        let kind = match stage.heads {
            0 => Kind::Convolution(Convolution::new(d, module, m, of, stage)),
            _ => {
                let shifts = shifts(of, layer);
                Kind::Windows(Windows::new(d, module, m, of, stage, shifts))
            }
        };
        d.rows(None);
        Self {
            module,
            stage,
            merge,
            kind,
        }
    }
}

/// Returns whether a block's windows are shifted by half of their edge: those of every second block
/// of a stage, if an image has several.
fn shifts(of: &Stages, block: usize) -> bool {
    let stage = of.of_block(block);
    let first: u64 = of.depths[..stage.number].iter().sum();
    (block as u64 - first) % 2 == 1 && stage.edge > stage.window
}

impl Merge {
    fn new(d: &mut Declare, at: ModuleId, [from, to]: [Stage; 2], of: &Stages) -> Self {
        let module = d.module(at, "downsample", ModuleKind::Layer);
        let (normed, width) = match to.heads {
            0 => (Normed::Rows, from.width),
            _ if of.cosine => (Normed::Made, to.width),
            _ => (Normed::Squares, 4 * from.width),
        };
        let shape = [to.width, 4 * from.width];
        let bias = normed == Normed::Rows;
        Self {
            module,
            norm: d.norm(module, ("norm", ""), width, true, Order::Declared),
            linear: d.linear(module, ("reduction", ""), shape, bias),
            normed,
        }
    }

    /// Makes rows of the stage with this edge: `[batch, rows, width]`.
    fn forward(&self, b: &mut Builder<'_>, mut x: ValueId, edge: u64) -> ValueId {
        if self.normed == Normed::Rows {
            x = b.layer_norm(self.norm, x);
        }
        let width = b.g.value(x).cols();
        let batch = b.batch();
        let mut x = b.within(self.module, |b| {
            let x = b.g.reshape(x, &[batch, edge, 2, edge, 2, width]);
            let x = b.g.transpose(x, 2, 3);
            b.g.reshape(x, &[batch, edge * edge, 4 * width])
        });
        if self.normed == Normed::Squares {
            x = b.layer_norm(self.norm, x);
        }
        let made = b.linear(self.linear, x);
        match self.normed {
            Normed::Made => b.layer_norm(self.norm, made),
            _ => made,
        }
    }
}

/// Returns the mean of the rows of `[batch, rows, width]`: `[batch, width]`.
fn mean(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    b.within(ROOT, |b| {
        let (rows, width) = (b.g.value(x).shape[1], b.g.value(x).cols());
        let first = b.g.transpose(x, 0, 1);
        let shape = [b.batch(), width];
        let sum = b.compute(OpKind::SumLeading, &[first], &[&shape])[0];
        b.scale(sum, 1.0 / rows as f64)
    })
}

impl Forward for Staged {
    fn forward(&self, b: &mut Builder<'_>) {
        let mut x = self.embed(b);
        for block in &self.blocks {
            if b.skips(block.module) {
                continue;
            }
            if let Some(merge) = &block.merge {
                x = merge.forward(b, x, block.stage.edge);
            }
            x = match &block.kind {
                Kind::Windows(windows) => windows.forward(b, x),
                Kind::Convolution(convolution) => convolution.forward(b, x),
            };
        }
        // ConvNeXt normalizes the mean, Swin the rows.
        let convolves = self.of.heads.is_empty();
        let normalize = |b: &mut Builder<'_>, x, now: bool| match self.norm {
            Some(norm) if now => b.layer_norm(norm, x),
            _ => x,
        };
        x = normalize(b, x, !convolves);
        x = mean(b, x);
        x = normalize(b, x, convolves);
        let Some(output) = self.output else {
            return loss::mean_square_of(b, x, "image_vectors");
        };
        let scores = b.linear(output, x);
        let classes = b.constant("sequence_classes", &[b.batch()], DType::I64, true);
        loss::cross_entropy(b, scores, classes);
    }
}
