//! Rotary embeddings: `x * cos + rotate_half(x) * sin`.

use super::code::RotaryType;
use super::{Builder, Code};
use crate::config::{PolicyKind, Units};
use crate::graph::ValueId;
use crate::ir::{DType, OpKind};
use crate::models::rope::Pairs;

/// Framework calls that make the tables of a rotary embedding (`LlamaRotaryEmbedding.forward`),
/// without those of the two copies that the graph has.
const TABLE_CALLS: u8 = 8;

/// Makes a table for all rotated dimensions from one for half of them, in the type that the
/// rotation reads.
pub(in crate::models) fn table(b: &mut Builder<'_>, half: ValueId) -> ValueId {
    let code = b.code().rotary;
    let whole = b.g.cat(&[half, half], 1);
    b.g.dispatches(TABLE_CALLS);
    match code.arithmetic {
        RotaryType::Tables | RotaryType::ConvertedTwice => whole,
        RotaryType::Activations | RotaryType::Converted => b.as_activation(whole),
    }
}

/// Makes the tables that one layer reads.
pub(in crate::models) fn of_layer(b: &mut Builder<'_>, tables: [ValueId; 2]) -> [ValueId; 2] {
    let code = b.code().rotary;
    let tables = match code.arithmetic {
        RotaryType::Tables if casts_inputs(b) => tables.map(|table| b.as_activation(table)),
        _ => tables,
    };
    if !code.repeats_tables {
        return tables;
    }
    tables.map(|table| {
        let (shape, dtype) = {
            let v = b.g.value(table);
            (v.shape.clone(), v.dtype)
        };
        b.g.compute(OpKind::Copy, &[table], &[(&shape, dtype)])[0]
    })
}

/// Returns whether the inputs of each layer are cast to the type of activations: `fully_shard` does
/// this for its units (`MixedPrecisionPolicy.cast_forward_inputs`), and layers take the tables as
/// inputs.
fn casts_inputs(b: &Builder<'_>) -> bool {
    b.s.fsdp.policy == PolicyKind::Fsdp2 && b.s.fsdp.units != Units::Root
}

/// Rotates the first dimensions of queries or keys `[batch, heads, seq, dims]`, as many as the
/// tables have (`apply_rotary_pos_emb`).
pub(in crate::models) fn rotate(
    b: &mut Builder<'_>,
    x: ValueId,
    [cos, sin]: [ValueId; 2],
    pairs: Pairs,
) -> ValueId {
    let Code { rotary: code, .. } = b.code();
    let (dtype, dims) = (b.g.value(x).dtype, b.g.value(cos).cols());
    let g = &mut b.g;
    let rest = g.value(x).cols() - dims;
    let (mut rotated, rest) = match rest {
        0 => (x, None),
        rest => (g.slice(x, 3, 0, dims), Some(g.slice(x, 3, dims, rest))),
    };
    if code.arithmetic == RotaryType::Converted {
        rotated = g.cast(rotated, DType::F32);
    }
    let twice = code.arithmetic == RotaryType::ConvertedTwice;
    let factor = |b: &mut Builder<'_>, v| match twice {
        true => b.g.cast(v, DType::F32),
        false => v,
    };
    let straight = factor(b, rotated);
    let straight = b.g.promoted(OpKind::Mul, straight, cos);
    let turned = turn(b, rotated, pairs);
    let turned = factor(b, turned);
    let crossed = b.g.promoted(OpKind::Mul, turned, sin);
    let sum = b.g.binary(OpKind::Add, straight, crossed);
    let sum = b.g.cast(sum, dtype);
    match rest {
        Some(rest) => b.g.cat(&[sum, rest], 3),
        None if code.always_concatenates => b.g.cat(&[sum], 3),
        None => sum,
    }
}

/// Applies `rotate_half`: the second member of each pair is negated and comes first.
fn turn(b: &mut Builder<'_>, x: ValueId, pairs: Pairs) -> ValueId {
    let g = &mut b.g;
    let whole = g.value(x).shape.to_vec();
    let half = whole[3] / 2;
    match pairs {
        Pairs::Halves => {
            let x1 = g.slice(x, 3, 0, half);
            let x2 = g.slice(x, 3, half, half);
            let negative = g.unary(OpKind::Neg, x2);
            g.cat(&[negative, x1], 3)
        }
        Pairs::Adjacent => {
            let mut shape = whole.clone();
            shape[3] = half;
            shape.push(2);
            let members = g.reshape(x, &shape);
            let [first, second] = [0, 1].map(|start| g.slice(members, 4, start, 1));
            let negative = g.unary(OpKind::Neg, second);
            let members = g.cat(&[negative, first], 4);
            g.reshape(members, &whole)
        }
    }
}
