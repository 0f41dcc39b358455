//! The rotary position embedding.

use super::build::Builder;
use super::declare::ROOT;
use crate::graph::ValueId;
use crate::ir::{DType, OpKind};

/// Tables of the rotary embedding, `[seq, dims / 2]` each.
#[derive(Clone, Copy)]
pub(super) struct Rope {
    cos: ValueId,
    sin: ValueId,
    /// Number of rotated dimensions of a head, which come first.
    dims: u64,
}

impl Rope {
    /// Declares the float32 tables for the first `dims` dimensions of a head.
    pub(super) fn tables(b: &mut Builder<'_>, dims: u64) -> Self {
        let shape = [b.seq(), dims / 2];
        Self {
            cos: b.constant("rope_cos", &shape, DType::F32, false),
            sin: b.constant("rope_sin", &shape, DType::F32, false),
            dims,
        }
    }

    /// Converts the tables to the type of activations.
    pub(super) fn cast(self, b: &mut Builder<'_>) -> Self {
        b.within(ROOT, |b| Self {
            cos: b.as_activation(self.cos),
            sin: b.as_activation(self.sin),
            ..self
        })
    }

    /// Rotates queries or keys `[batch, heads, seq, head_dim]`: pairs of the two halves of the
    /// rotated dimensions. The other dimensions pass unchanged.
    pub(super) fn rotate(self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let g = &mut b.g;
        let head_dim = g.value(x).shape[3];
        let (rotated, rest) = match head_dim - self.dims {
            0 => (x, None),
            rest => (
                g.slice(x, 3, 0, self.dims),
                Some(g.slice(x, 3, self.dims, rest)),
            ),
        };
        let halves = g.split(rotated, 3, 2);
        let (x1, x2) = (halves[0], halves[1]);
        let (a, c) = (
            g.binary(OpKind::Mul, x1, self.cos),
            g.binary(OpKind::Mul, x2, self.sin),
        );
        let first = g.binary(OpKind::Sub, a, c);
        let (a, c) = (
            g.binary(OpKind::Mul, x2, self.cos),
            g.binary(OpKind::Mul, x1, self.sin),
        );
        let second = g.binary(OpKind::Add, a, c);
        match rest {
            None => g.cat(&[first, second], 3),
            Some(rest) => g.cat(&[first, second, rest], 3),
        }
    }
}
