//! The rotary position embedding.

use super::build::Builder;
use super::declare::ROOT;
use super::implementation;
use crate::graph::ValueId;
use crate::ir::{DType, OpKind};
use smallvec::SmallVec;

/// Dimensions of a head that are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pairs {
    /// Dimension `i` and `i + dims / 2`.
    Halves,
    /// Dimension `2 i` and `2 i + 1`.
    Adjacent,
}

/// Tables of the rotary embedding, `[seq, dims / 2]` each, or `[batch, 1, seq, dims / 2]` if every
/// sequence has documents of its own; `[seq, dims]` in the code of transformers, once they are
/// cast.
#[derive(Clone, Copy)]
pub(super) struct Rope {
    cos: ValueId,
    sin: ValueId,
    /// Number of rotated dimensions of a head, which come first.
    dims: u64,
    pairs: Pairs,
}

impl Rope {
    /// Declares the float32 tables for the first `dims` dimensions of a head.
    pub(super) fn tables(b: &mut Builder<'_>, dims: u64) -> Self {
        Self::named(b, ["rope_cos", "rope_sin"], dims, Pairs::Halves)
    }

    /// Declares float32 tables of these names for the first `dims` dimensions of a head.
    pub(super) fn named(
        b: &mut Builder<'_>,
        [cos, sin]: [&'static str; 2],
        dims: u64,
        pairs: Pairs,
    ) -> Self {
        let row = [dims / 2];
        Self {
            cos: b.positional(cos, 1, &row, DType::F32),
            sin: b.positional(sin, 1, &row, DType::F32),
            dims,
            pairs,
        }
    }

    /// Converts the tables to the type of activations.
    pub(super) fn cast(self, b: &mut Builder<'_>) -> Self {
        b.within(ROOT, |b| {
            let mut of = |half| match b.is_transformers() {
                true => implementation::table(b, half),
                false => b.as_activation(half),
            };
            Self {
                cos: of(self.cos),
                sin: of(self.sin),
                ..self
            }
        })
    }

    /// Returns the tables that one layer reads.
    pub(super) fn of_layer(self, b: &mut Builder<'_>) -> Self {
        if !b.is_transformers() {
            return self;
        }
        let [cos, sin] = implementation::of_layer(b, [self.cos, self.sin]);
        Self { cos, sin, ..self }
    }

    /// Rotates queries or keys `[batch, heads, seq, head_dim]`: pairs of the rotated dimensions.
    /// The other dimensions pass unchanged.
    pub(super) fn rotate(self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        if b.is_transformers() {
            return implementation::rotate(b, x, [self.cos, self.sin], self.pairs);
        }
        let g = &mut b.g;
        let head_dim = g.value(x).shape[3];
        let (rotated, rest) = match head_dim - self.dims {
            0 => (x, None),
            rest => (
                g.slice(x, 3, 0, self.dims),
                Some(g.slice(x, 3, self.dims, rest)),
            ),
        };
        match self.pairs {
            Pairs::Halves => {
                let halves = g.split(rotated, 3, 2);
                let turned = self.turn(b, [halves[0], halves[1]]);
                let parts: SmallVec<[ValueId; 3]> = turned.into_iter().chain(rest).collect();
                b.g.cat(&parts, 3)
            }
            Pairs::Adjacent => {
                let mut shape = g.value(rotated).shape.to_vec();
                let whole = shape.clone();
                shape[3] /= 2;
                let part = shape.clone();
                shape.push(2);
                let pairs = g.reshape(rotated, &shape);
                let ends = g.split(pairs, 4, 2);
                let [first, second] = [ends[0], ends[1]].map(|v| g.reshape(v, &part));
                let turned = self.turn(b, [first, second]);
                shape[4] = 1;
                let ends = turned.map(|v| b.g.reshape(v, &shape));
                let pairs = b.g.cat(&ends, 4);
                let rotated = b.g.reshape(pairs, &whole);
                match rest {
                    None => rotated,
                    Some(rest) => b.g.cat(&[rotated, rest], 3),
                }
            }
        }
    }

    /// Rotates the first and the second dimension of every pair.
    fn turn(self, b: &mut Builder<'_>, [x1, x2]: [ValueId; 2]) -> [ValueId; 2] {
        let g = &mut b.g;
        let (a, c) = (
            g.binary(OpKind::Mul, x1, self.cos),
            g.binary(OpKind::Mul, x2, self.sin),
        );
        let first = g.binary(OpKind::Sub, a, c);
        let (a, c) = (
            g.binary(OpKind::Mul, x2, self.cos),
            g.binary(OpKind::Mul, x1, self.sin),
        );
        [first, g.binary(OpKind::Add, a, c)]
    }
}
