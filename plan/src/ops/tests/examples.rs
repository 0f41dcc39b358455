//! Valid operands for each operation, for tests that iterate over [`OpKind::ALL`].
//!
//! Shapes are derived from signatures; only operands of [`Extent::Any`] are listed here. Tests of
//! other crates also use this file; `terms` contains the names that differ there.

use super::terms::{Extent, OpKind, Operand};

const ROWS: u64 = 6;
const COLS: u64 = 8;

/// An operand: its shape, and the number of distinct ids or labels if it holds these.
#[derive(Clone, Debug)]
pub(super) struct Example {
    pub(super) shape: Vec<u64>,
    pub(super) ids: Option<u64>,
    /// Its values, if random values would be invalid.
    #[allow(dead_code, reason = "some tests look at shapes and types only")]
    pub(super) values: Option<Vec<f64>>,
}

fn numbers(shape: &[u64]) -> Example {
    Example {
        shape: shape.to_vec(),
        ids: None,
        values: None,
    }
}

fn ids(shape: &[u64], below: u64) -> Example {
    Example {
        ids: Some(below),
        ..numbers(shape)
    }
}

/// Returns integers with these values.
fn fixed(shape: &[u64], values: &[i32]) -> Example {
    Example {
        values: Some(values.iter().map(|&v| f64::from(v)).collect()),
        ..ids(shape, u64::MAX)
    }
}

/// Returns positive numbers.
fn positive(shape: &[u64]) -> Example {
    let n = shape.iter().product::<u64>() as u32;
    Example {
        values: Some((1..=n).map(|i| f64::from(i) / 16.0).collect()),
        ..numbers(shape)
    }
}

/// Returns row offsets of three experts, one of which has no rows.
fn offsets() -> Example {
    fixed(&[4], &[0, 4, 4, 10])
}

/// Returns positions for two choices per token. Two choices belong to experts of other ranks.
fn positions() -> Example {
    fixed(&[ROWS, 2], &[4, 0, 5, 6, -1, 7, 1, 8, 2, -1, 9, 3])
}

/// Returns the first positions of documents in two sequences of 6 positions.
fn starts() -> Example {
    fixed(&[2, 6], &[0, 0, 0, 3, 3, 5, 0, 1, 1, 1, 1, 1])
}

/// Returns the inputs and outputs of an operation.
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
    let (sorted, scalar) = (numbers(&[10, COLS]), numbers(&[]));
    match op {
        OpKind::Route(_) => (vec![rows], vec![numbers(&[ROWS, 2]), ids(&[ROWS, 2], COLS)]),
        OpKind::RouteGrad(_) => {
            let chosen = [1, 4, 0, 7, 3, 2, 5, 6, 7, 0, 2, 4];
            let inputs = vec![
                numbers(&[ROWS, 2]),
                rows.clone(),
                fixed(&[ROWS, 2], &chosen),
            ];
            (inputs, vec![rows])
        }
        OpKind::CountExperts => (vec![ids(&[ROWS, 2], COLS)], vec![column]),
        OpKind::SortExperts(_) => {
            let chosen = fixed(&[ROWS, 2], &[0, 2, -1, 1, 2, 5, 0, 2, 1, 0, 2, 2]);
            (vec![chosen], vec![ids(&[4], 1), ids(&[ROWS, 2], 1)])
        }
        OpKind::LocalExperts(_) => (vec![ids(&[ROWS, 2], 6)], vec![ids(&[2 * ROWS, 2], 1)]),
        OpKind::PushedRows(_) => {
            // Rank 1 has no choice of the second token, and no rank has one of the third.
            let chosen = fixed(&[ROWS, 2], &[0, -1, 2, 1, 5, 3, -1, 2, -3, 4, 3, 7]);
            (vec![chosen], vec![ids(&[ROWS / 2, 2], 1)])
        }
        OpKind::DispatchExperts(_) => {
            // Rank 0 has one place fewer than it has choices.
            let chosen = fixed(&[ROWS, 2], &[0, 2, 3, 1, 2, 5, 0, 3, 4, 5, 5, 3]);
            let counts = ids(&[2, 3], 1);
            (
                vec![chosen],
                vec![ids(&[8, 1], 1), ids(&[ROWS, 2], 1), counts],
            )
        }
        OpKind::Permute(_) => (vec![rows, positions()], vec![sorted]),
        OpKind::Unpermute(_) => (vec![sorted, positions()], vec![rows]),
        OpKind::GroupedGemm(_) => (
            vec![sorted, numbers(&[3, 4, COLS]), offsets()],
            vec![numbers(&[10, 4])],
        ),
        OpKind::RepeatRows(_) => (
            vec![numbers(&[3, COLS]), offsets()],
            vec![numbers(&[10, COLS])],
        ),
        OpKind::RepeatRowsGrad(_) => (
            vec![numbers(&[10, COLS]), offsets()],
            vec![numbers(&[3, COLS])],
        ),
        OpKind::GroupedGemmWeightGrad(_) => (
            vec![numbers(&[10, 4]), sorted, offsets()],
            vec![numbers(&[3, 4, COLS])],
        ),
        OpKind::ScaledGroupedGemm(_) => (
            vec![
                sorted,
                numbers(&[3, 4, COLS]),
                scalar.clone(),
                scalar,
                offsets(),
            ],
            vec![numbers(&[10, 4])],
        ),
        OpKind::ScaledGroupedGemmWeightGrad(_) => (
            vec![
                numbers(&[4, 10]),
                numbers(&[COLS, 10]),
                scalar.clone(),
                scalar,
                offsets(),
            ],
            vec![numbers(&[3, 4, COLS])],
        ),
        OpKind::ScaleRows => (vec![rows.clone(), numbers(&[ROWS, 1])], vec![rows]),
        OpKind::Rsqrt => (vec![positive(&[ROWS, COLS])], vec![rows]),
        OpKind::RowSum(_) => (vec![rows], vec![numbers(&[ROWS, 1])]),
        OpKind::RowAmax => (vec![rows], vec![numbers(&[ROWS, 1])]),
        OpKind::Float8Scale(_) => (
            vec![positive(&[12, 1]), offsets()],
            vec![scalar.clone(), scalar.clone()],
        ),
        OpKind::Float8Cast => (vec![rows.clone(), scalar], vec![rows]),
        OpKind::Float8CastRows(_) => (vec![rows.clone()], vec![rows, numbers(&[ROWS, 1])]),
        OpKind::Float8CastBlocks(of) => {
            let matrix = [3, 300];
            let grid = of.block.grid(matrix);
            (
                vec![numbers(&matrix)],
                vec![numbers(&matrix), numbers(&grid)],
            )
        }
        OpKind::ScaledGemm(_) => {
            let (a, b) = (numbers(&[4, 6]), numbers(&[COLS, 6]));
            (
                vec![a, b, scalar.clone(), scalar],
                vec![numbers(&[4, COLS])],
            )
        }
        OpKind::RowDot => (vec![rows.clone(), rows], vec![numbers(&[ROWS, 1])]),
        OpKind::LoadBalance(_) => (vec![rows], vec![scalar, numbers(&[2, COLS])]),
        OpKind::LoadBalanceGrad(_) => (vec![scalar, rows.clone(), numbers(&[2, COLS])], vec![rows]),
        OpKind::ZLoss(_) => (vec![rows], vec![scalar]),
        OpKind::ZLossGrad(_) => (vec![scalar, rows.clone()], vec![rows]),
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
        OpKind::MaskedAttention(_) => {
            let [seed, offset] = random();
            let mask = numbers(&[2, 1, 6, 6]);
            let inputs = vec![q.clone(), kv.clone(), kv, mask];
            (inputs, vec![q, lse, seed, offset])
        }
        OpKind::MaskedAttentionGrad(_) => {
            let [seed, offset] = random();
            let mask = numbers(&[2, 1, 6, 6]);
            let of = [q.clone(), q.clone(), kv.clone(), kv.clone(), mask];
            let more = [q.clone(), lse, seed, offset];
            ([&of[..], &more].concat(), vec![q, kv.clone(), kv])
        }
        OpKind::DocumentAttention(_) => {
            let [seed, offset] = random();
            let inputs = vec![q.clone(), kv.clone(), kv, starts()];
            (inputs, vec![q, lse, seed, offset])
        }
        OpKind::DocumentAttentionGrad(_) => {
            let [seed, offset] = random();
            let of = [q.clone(), q.clone(), kv.clone(), kv.clone(), starts()];
            let more = [q.clone(), lse, seed, offset];
            ([&of[..], &more].concat(), vec![q, kv.clone(), kv])
        }
        OpKind::BatchedGemm => (
            vec![numbers(&[3, 4, 6]), numbers(&[3, 6, 5])],
            vec![numbers(&[3, 4, 5])],
        ),
        OpKind::Conv(_) => (vec![image, filter], vec![result]),
        OpKind::ConvGradInput(_) => (vec![result, filter], vec![image]),
        OpKind::ConvGradWeight(_) => (vec![result, image], vec![filter]),
        OpKind::Conv1d(_) | OpKind::Conv1dGradInput(_) | OpKind::Conv1dGradWeight(_) => {
            let (x, w, y) = (
                numbers(&[2, 3, 8]),
                numbers(&[4, 3, 3]),
                numbers(&[2, 4, 4]),
            );
            match op {
                OpKind::Conv1d(_) => (vec![x, w], vec![y]),
                OpKind::Conv1dGradInput(_) => (vec![y, w], vec![x]),
                _ => (vec![y, x], vec![w]),
            }
        }
        OpKind::Conv2d(_) | OpKind::Conv2dGradInput(_) | OpKind::Conv2dGradWeight(_) => {
            let (x, w, y) = (
                numbers(&[2, 3, 8, 6]),
                numbers(&[4, 3, 3, 3]),
                numbers(&[2, 4, 4, 3]),
            );
            match op {
                OpKind::Conv2d(_) => (vec![x, w], vec![y]),
                OpKind::Conv2dGradInput(_) => (vec![y, w], vec![x]),
                _ => (vec![y, x], vec![w]),
            }
        }
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
        OpKind::BiasedAttention(_) | OpKind::SinkAttention(_) => {
            let bias = numbers(&[4]);
            (vec![q.clone(), kv.clone(), kv, bias], vec![q, lse])
        }
        OpKind::BiasedAttentionGrad(_) | OpKind::SinkAttentionGrad(_) => {
            let bias = numbers(&[4]);
            let of = [
                q.clone(),
                q.clone(),
                kv.clone(),
                kv.clone(),
                bias.clone(),
                q.clone(),
                lse,
            ];
            (of.to_vec(), vec![q, kv.clone(), kv, bias])
        }
        OpKind::Dequantize(_) => (vec![numbers(&[64])], vec![numbers(&[4, 64])]),
        OpKind::Indexer(_) => (
            vec![
                numbers(&[2, 6, 3, 8]),
                numbers(&[2, 6, 8]),
                numbers(&[2, 6, 3]),
            ],
            vec![ids(&[2, 6, 4], 6)],
        ),
        OpKind::CausalConv1d(_)
        | OpKind::CausalConv1dGrad(_)
        | OpKind::DepthwiseConv(_)
        | OpKind::DepthwiseConvGrad(_)
        | OpKind::BatchNorm
        | OpKind::BatchNormGrad
        | OpKind::SelectiveScan
        | OpKind::SelectiveScanGrad
        | OpKind::ChunkScan(_)
        | OpKind::ChunkScanGrad(_)
        | OpKind::HeadLinear
        | OpKind::HeadLinearGrad
        | OpKind::Wkv
        | OpKind::WkvGrad
        | OpKind::RgLru
        | OpKind::RgLruGrad
        | OpKind::MixStreams
        | OpKind::MixStreamsGrad
        | OpKind::MixPositions
        | OpKind::MixPositionsGrad
        | OpKind::WkvHeads(_)
        | OpKind::WkvHeadsGrad(_)
        | OpKind::DiagonalDelta(_)
        | OpKind::DiagonalDeltaGrad(_)
        | OpKind::GatedDelta(_)
        | OpKind::GatedDeltaGrad(_) => scans(op),
        _ => {
            let signature = op.def().signature();
            let of = |operands: &[Operand]| operands.iter().map(|o| by_extent(op, o)).collect();
            (of(&signature.inputs), of(&signature.outputs))
        }
    }
}

/// Returns operands of scans over the positions of two sequences.
fn scans(op: &OpKind) -> (Vec<Example>, Vec<Example>) {
    let (row, heads, per_head) = (numbers(&[2, 8, 6]), numbers(&[2, 8, 4]), numbers(&[4]));
    let wide = |n: u64, width: u64| numbers(&[2, 8, n, width]);
    let (inputs, result, saved) = match op {
        OpKind::CausalConv1d(_) | OpKind::CausalConv1dGrad(_) => {
            let inputs = vec![row.clone(), numbers(&[6, 1, 3]), numbers(&[6])];
            (inputs, row, None)
        }
        OpKind::DepthwiseConv(_) | OpKind::DepthwiseConvGrad(_) => {
            let image = numbers(&[2, 4, 5, 5]);
            let inputs = vec![image.clone(), numbers(&[4, 1, 3, 3]), numbers(&[4])];
            (inputs, image, None)
        }
        OpKind::BatchNorm | OpKind::BatchNormGrad => {
            let x = numbers(&[2, 6, 8]);
            let inputs = vec![x.clone(), numbers(&[6]), numbers(&[6])];
            (inputs, x, Some(numbers(&[2, 6])))
        }
        OpKind::HeadLinear | OpKind::HeadLinearGrad => {
            let inputs = vec![wide(4, 3), numbers(&[4, 3, 5]), numbers(&[4, 5])];
            (inputs, wide(4, 5), None)
        }
        OpKind::Wkv | OpKind::WkvGrad => {
            let inputs = vec![row.clone(), row.clone(), numbers(&[6]), numbers(&[6])];
            (inputs, row, None)
        }
        OpKind::MixStreams | OpKind::MixStreamsGrad => {
            let inputs = vec![numbers(&[3, 2, 8, 6]), numbers(&[2, 8, 9])];
            (inputs, numbers(&[2, 8, 6, 3]), None)
        }
        OpKind::MixPositions | OpKind::MixPositionsGrad => {
            let inputs = vec![row.clone(), row, numbers(&[3, 6])];
            (inputs, numbers(&[3, 2, 8, 6]), None)
        }
        OpKind::WkvHeads(_) | OpKind::WkvHeadsGrad(_) => {
            let (key, value, first) = (wide(4, 3), wide(4, 5), numbers(&[4, 3]));
            let inputs = vec![key.clone(), key.clone(), value.clone(), key, first];
            (inputs, value, None)
        }
        OpKind::DiagonalDelta(_) | OpKind::DiagonalDeltaGrad(_) => {
            let (key, value) = (wide(4, 3), wide(4, 5));
            let inputs = vec![
                key.clone(),
                key.clone(),
                key.clone(),
                value.clone(),
                key.clone(),
                key,
            ];
            (inputs, value, None)
        }
        OpKind::RgLru | OpKind::RgLruGrad => {
            let inputs = vec![row.clone(), row.clone(), row.clone(), numbers(&[6])];
            (inputs, row, None)
        }
        OpKind::SelectiveScan | OpKind::SelectiveScanGrad => {
            let (state, a, d) = (numbers(&[2, 8, 3]), numbers(&[6, 3]), numbers(&[6]));
            let inputs = vec![
                row.clone(),
                row.clone(),
                a,
                state.clone(),
                state,
                d,
                row.clone(),
            ];
            (inputs, row, Some(numbers(&[2, 1, 6, 6])))
        }
        OpKind::ChunkScan(_) | OpKind::ChunkScanGrad(_) => {
            let (x, of_state) = (wide(4, 3), wide(2, 5));
            let inputs = vec![
                x.clone(),
                heads,
                per_head.clone(),
                of_state.clone(),
                of_state,
                per_head.clone(),
                per_head,
            ];
            (inputs, x, Some(numbers(&[2, 2, 4, 3, 5])))
        }
        _ => {
            let (key, value) = (wide(2, 3), wide(4, 5));
            let gates = [heads.clone(), heads, per_head.clone(), per_head];
            let inputs = [vec![key.clone(), key, value.clone()], gates.to_vec()].concat();
            (inputs, value, Some(wide(4, 4)))
        }
    };
    if op.def().is_backward() {
        let all = [vec![result], inputs.clone(), saved.into_iter().collect()].concat();
        return (all, inputs);
    }
    (inputs, [result].into_iter().chain(saved).collect())
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
