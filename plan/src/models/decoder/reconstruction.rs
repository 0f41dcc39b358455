//! Decoders that reconstruct the pixels of all patches of an image (ViT-MAE).
//!
//! The plan does not contain the copies that choose the encoder's patches at random and that sort
//! the decoder's patches.

use super::norm::Norm;
use super::{Block, Carried, Surroundings};
use crate::config::{Model, Reconstruction as Sizes, Scenario};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::build::{Builder, Part};
use crate::models::declare::{Declare, Layer, Order, ROOT};
use crate::models::loss;

/// Returns the scenario that its code sees: its blocks as a model, over all patches.
pub(super) fn scenario(s: &Scenario, of: &Sizes) -> Scenario {
    let mut inner = s.clone();
    inner.model = of.model(&s.model);
    inner.train.seq_len = of.rows();
    inner
}

pub(super) struct Reconstruction {
    module: ModuleId,
    rows: u64,
    /// Projection of the encoder's output.
    input: Layer,
    /// Row in place of each patch that the encoder did not read.
    mask: Layer,
    positions: Layer,
    blocks: Vec<Block>,
    norm: Norm,
    pixels: Layer,
}

impl Reconstruction {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Option<Self> {
        let of = m.options.reconstruction.as_ref()?;
        let inner = of.model(m);
        let module = d.module(ROOT, "reconstruction", ModuleKind::Layer);
        let learned = |d: &mut Declare, name, rows| {
            let at = d.module(module, name, ModuleKind::Layer);
            d.parameters(at, "", &[1, rows, of.hidden], false)
        };
        let input = d.linear(module, ("input", ""), [of.hidden, m.hidden], true);
        let mask = learned(d, "mask", 1);
        let positions = learned(d, "positions", of.rows());
        d.untrained(positions);
        let outer = d.rows(Some(of.rows()));
        let block = |n: u64| {
            let at = d.module(module, &format!("layers.{n}"), ModuleKind::Block);
            Block::new(d, at, &inner, n as usize)
        };
        let blocks = (0..of.layers).map(block).collect();
        let norm = Norm::new(d, module, ("norm", ""), of.hidden, &inner, Order::Declared);
        let shape = [m.options.image.patch_dim, of.hidden];
        let pixels = d.linear(module, ("pixels", ""), shape, true);
        d.rows(outer);
        Some(Self {
            module,
            rows: of.rows(),
            input,
            mask,
            positions,
            blocks,
            norm,
            pixels,
        })
    }

    /// Adds the loss of hidden states `[batch, seq, hidden]`: the mean square of the differences of
    /// pixels.
    pub(super) fn forward(&self, b: &mut Builder<'_>, hidden: ValueId) {
        let batch = b.batch();
        let seen = b.linear(self.input, hidden);
        let (kept, width) = (b.g.value(seen).shape[1], b.g.value(seen).cols());
        let zeros = b.constant(
            "zeros",
            &[batch, self.rows - kept, width],
            DType::F32,
            false,
        );
        let [mask, positions] = [self.mask, self.positions].map(|row| b.weight(row));
        let mut x = b.within(self.module, |b| {
            let zeros = b.as_activation(zeros);
            let masked = b.g.binary(OpKind::Add, zeros, mask);
            let all = b.g.cat(&[seen, masked], 1);
            b.g.binary(OpKind::Add, all, positions)
        });
        b.inside(Part::First, |b| {
            for block in &self.blocks {
                let (by, carried) = (Surroundings::default(), &mut Carried::default());
                x = block.forward(b, x, by, carried);
            }
            x = self.norm.apply(b, x);
        });
        let pixels = b.linear(self.pixels, x);
        let pixels = b.within(self.module, |b| {
            let patches = b.g.slice(pixels, 1, 1, self.rows - 1);
            b.g.make_contiguous(patches)
        });
        loss::mean_square_of(b, pixels, "pixels");
    }
}
