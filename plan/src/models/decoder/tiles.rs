//! Images in tiles (Llama 3.2 Vision): a class token and positions for each tile, and tables of
//! embeddings for the position of a tile in the image.

use super::tanh_gate;
use crate::config::Vision;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer};

/// Tables have a row for each arrangement of tiles. A gate is the tanh of one number.
pub(super) struct Tiles {
    module: ModuleId,
    class: Layer,
    positions: Layer,
    /// Share of positions that come from the table of tiles, not from the one of all tiles.
    share: Layer,
    of_tiles: Layer,
    before: Place,
    after: Place,
}

/// A row for each tile.
struct Place {
    table: Layer,
    gate: Layer,
}

impl Place {
    fn new(d: &mut Declare, at: ModuleId, name: &str, of: &Vision) -> Self {
        let module = d.module(at, name, ModuleKind::Layer);
        let gate = d.module(module, "gate", ModuleKind::Layer);
        Self {
            table: table(d, module, of, of.hidden),
            gate: d.parameters(gate, "", &[1], false),
        }
    }

    /// Adds the row of each tile to its rows, `[batch * tiles, rows, hidden]`.
    fn add(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId, shapes: ValueId) -> ValueId {
        let tiles = b.batch() * of.input.tiles;
        let row = b.embedding(self.table, shapes);
        let gate = tanh_gate(b, self.gate);
        b.within(self.table.module(), |b| {
            let row = b.g.reshape(row, &[tiles, of.hidden]);
            let row = b.g.binary(OpKind::Mul, row, gate);
            let by_row = b.g.transpose(x, 0, 1);
            let sum = b.g.binary(OpKind::Add, by_row, row);
            b.g.transpose(sum, 0, 1)
        })
    }
}

/// Declares a table with `width` numbers for each tile.
fn table(d: &mut Declare, at: ModuleId, of: &Vision, width: u64) -> Layer {
    let shape = [of.input.tile_rows, of.input.tiles * width];
    d.table(at, ("table", ""), ModuleKind::Layer, shape)
}

impl Tiles {
    pub(super) fn new(d: &mut Declare, at: ModuleId, of: &Vision) -> Self {
        let (h, rows) = (of.hidden, of.of_tile());
        let module = d.module(at, "tiles", ModuleKind::Layer);
        let own = |d: &mut Declare, name, shape: &[u64]| {
            let at = d.module(module, name, ModuleKind::Layer);
            d.parameters(at, "", shape, false)
        };
        let class = own(d, "class", &[h]);
        let positions = own(d, "positions", &[rows, h]);
        d.lookup(positions);
        Self {
            module,
            class,
            positions,
            share: own(d, "share", &[1]),
            of_tiles: table(d, module, of, rows * h),
            before: Place::new(d, module, "before", of),
            after: Place::new(d, module, "after", of),
        }
    }

    /// Returns the row of the tables for each image, `[batch]`.
    fn shapes(b: &mut Builder<'_>) -> ValueId {
        let batch = b.batch();
        b.constant("tile_shapes", &[batch], DType::I64, true)
    }

    /// Adds places, a class and positions to patches `[batch, patches, hidden]`; returns
    /// `[batch * tiles, rows, hidden]`.
    pub(super) fn embed(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId) -> ValueId {
        let (tiles, h, rows) = (b.batch() * of.input.tiles, of.hidden, of.of_tile());
        let shapes = Self::shapes(b);
        let x = b.within(self.module, |b| {
            b.g.reshape(x, &[tiles, of.input.patches / of.input.tiles, h])
        });
        let x = self.before.add(b, of, x, shapes);
        let zeros = b.constant("zeros", &[tiles, 1, h], DType::F32, false);
        let (class, positions) = (b.weight(self.class), b.weight(self.positions));
        let of_tiles = b.embedding(self.of_tiles, shapes);
        let share = tanh_gate(b, self.share);
        b.within(self.module, |b| {
            let zeros = b.as_activation(zeros);
            let class = b.g.binary(OpKind::Add, zeros, class);
            let x = b.g.cat(&[class, x], 1);
            let rest = b.g.unary(OpKind::Neg, share);
            let rest = b.g.unary(OpKind::Shift(op::Shift { by: Real(1.0) }), rest);
            let positions = b.g.binary(OpKind::Mul, positions, rest);
            let x = b.g.binary(OpKind::Add, x, positions);
            let own = b.g.reshape(of_tiles, &[tiles, rows, h]);
            let own = b.g.binary(OpKind::Mul, own, share);
            b.g.binary(OpKind::Add, x, own)
        })
    }

    /// Fills the rows of tiles up with zeros: `[batch, tiles * rows, hidden]`.
    pub(super) fn fill_up(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId) -> ValueId {
        let (batch, h) = (b.batch(), of.hidden);
        let more = of.rows() / of.input.tiles - of.of_tile();
        let shape = [batch * of.input.tiles, more, h];
        let zeros = (more > 0).then(|| b.constant("zeros", &shape, DType::F32, false));
        b.within(self.module, |b| {
            let x = match zeros {
                Some(zeros) => {
                    let zeros = b.as_activation(zeros);
                    b.g.cat(&[x, zeros], 1)
                }
                None => x,
            };
            b.g.reshape(x, &[batch, of.rows(), h])
        })
    }

    /// Adds places to `[batch, rows, hidden]`.
    pub(super) fn after(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId) -> ValueId {
        let (batch, h) = (b.batch(), of.hidden);
        let shapes = Self::shapes(b);
        let split = [batch * of.input.tiles, of.rows() / of.input.tiles, h];
        let x = b.within(self.module, |b| b.g.reshape(x, &split));
        let x = self.after.add(b, of, x, shapes);
        b.within(self.module, |b| b.g.reshape(x, &[batch, of.rows(), h]))
    }

    /// Returns the last block's results and those of `picked` ones next to each other, without the
    /// rows that filled tiles up.
    pub(super) fn results(
        &self,
        b: &mut Builder<'_>,
        of: &Vision,
        last: ValueId,
        picked: &[ValueId],
    ) -> ValueId {
        let (batch, rows) = (b.batch(), of.rows());
        b.within(self.module, |b| {
            let cut = |b: &mut Builder<'_>, x| {
                let width = b.g.value(x).numel() / (batch * rows);
                let x =
                    b.g.reshape(x, &[batch * of.input.tiles, rows / of.input.tiles, width]);
                let x = b.g.slice(x, 1, 0, of.of_tile());
                b.g.reshape(x, &[batch, of.projected(), width])
            };
            let last = cut(b, last);
            if picked.is_empty() {
                return last;
            }
            let each: Vec<ValueId> = picked
                .iter()
                .map(|&x| b.g.reshape(x, &[batch, rows, of.hidden, 1]))
                .collect();
            let stacked = b.g.cat(&each, 3);
            let more = cut(b, stacked);
            b.g.cat(&[last, more], 2)
        })
    }
}
