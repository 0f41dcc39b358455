//! Operands that fit each operation, for tests that walk [`OpKind::ALL`].
//!
//! Shapes follow from the signature; only operands of any shape are written down. The tests of the
//! other crates use this file too; `terms` contains the names that differ.

use super::terms::{Extent, OpKind, Operand};

const ROWS: u64 = 6;
const COLS: u64 = 8;

/// An operand: its shape, and the number of different ids or labels if it holds such.
#[derive(Clone, Debug)]
pub(super) struct Example {
    pub(super) shape: Vec<u64>,
    pub(super) ids: Option<u64>,
}

fn numbers(shape: &[u64]) -> Example {
    Example {
        shape: shape.to_vec(),
        ids: None,
    }
}

fn ids(shape: &[u64], below: u64) -> Example {
    Example {
        shape: shape.to_vec(),
        ids: Some(below),
    }
}

/// Returns inputs and outputs of an operation.
pub(super) fn operands(op: &OpKind) -> (Vec<Example>, Vec<Example>) {
    let rows = numbers(&[ROWS, COLS]);
    let (stat, column) = (numbers(&[ROWS]), numbers(&[COLS]));
    let (table, row_ids) = (numbers(&[10, COLS]), ids(&[ROWS], 10));
    let (q, kv, lse) = (
        numbers(&[2, 4, 6, 8]),
        numbers(&[2, 2, 6, 8]),
        numbers(&[2, 4, 6]),
    );
    let random = || [ids(&[], 1), ids(&[], 1)];
    let (image, filter, result) = (
        numbers(&[2, 3, 5, 4]),
        numbers(&[4, 3, 3, 3]),
        numbers(&[2, 4, 5, 4]),
    );
    match op {
        OpKind::Gemm(gemm) => {
            let of = |transposed, [a, b]: [u64; 2]| match transposed {
                true => numbers(&[b, a]),
                false => numbers(&[a, b]),
            };
            let c = numbers(&[4, COLS]);
            let mut inputs = vec![of(gemm.ta, [4, 6]), of(gemm.tb, [6, COLS])];
            inputs.extend(gemm.bias.then_some(column));
            inputs.extend(gemm.accumulate.then(|| c.clone()));
            (inputs, vec![c])
        }
        OpKind::Attention(_) | OpKind::FlexAttention(_) => {
            let [seed, offset] = random();
            (vec![q.clone(), kv.clone(), kv], vec![q, lse, seed, offset])
        }
        OpKind::AttentionGrad(_) | OpKind::FlexAttentionGrad(_) => {
            let [seed, offset] = random();
            let of = [q.clone(), q.clone(), kv.clone(), kv.clone(), q.clone(), lse];
            ([&of[..], &[seed, offset]].concat(), vec![q, kv.clone(), kv])
        }
        OpKind::Conv(_) => (vec![image, filter], vec![result]),
        OpKind::ConvGradInput(_) => (vec![result, filter], vec![image]),
        OpKind::ConvGradWeight(_) => (vec![result, image], vec![filter]),
        OpKind::Embedding => (vec![row_ids, table], vec![rows]),
        OpKind::EmbeddingGrad => (vec![rows, row_ids, table.clone()], vec![table]),
        OpKind::RmsNormWeightGrad => (vec![rows.clone(), rows, stat], vec![column]),
        OpKind::LayerNormParamGrad => (
            vec![rows.clone(), rows, stat.clone(), stat],
            vec![column.clone(), column],
        ),
        OpKind::SumLeading => (vec![rows], vec![column]),
        OpKind::SumChannels => (vec![image], vec![numbers(&[1, 3, 1, 1])]),
        OpKind::SumAll => (vec![rows], vec![numbers(&[])]),
        OpKind::CrossEntropy(_) => {
            let loss = numbers(&[]);
            (
                vec![rows.clone(), ids(&[ROWS], COLS), loss.clone()],
                vec![rows, loss],
            )
        }
        OpKind::LogProbs => (vec![rows.clone(), numbers(&[ROWS, 1])], vec![rows]),
        OpKind::Cat(_) => (
            vec![rows.clone(), numbers(&[3, COLS])],
            vec![numbers(&[ROWS + 3, COLS])],
        ),
        _ => {
            let signature = op.def().signature();
            let of = |operands: &[Operand]| operands.iter().map(|o| by_extent(op, o)).collect();
            (of(&signature.inputs), of(&signature.outputs))
        }
    }
}

fn by_extent(op: &OpKind, operand: &Operand) -> Example {
    match operand.extent {
        Extent::PerRow if operand.name == "the labels" => ids(&[ROWS], COLS),
        Extent::PerRow => numbers(&[ROWS]),
        Extent::PerColumn => numbers(&[COLS]),
        Extent::Scalar => numbers(&[]),
        Extent::Full | Extent::Exact | Extent::Ignored => numbers(&[ROWS, COLS]),
        Extent::Part | Extent::Any => panic!("say which operands `{}` has", op.name()),
    }
}
