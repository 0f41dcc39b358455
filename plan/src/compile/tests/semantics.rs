//! What each op kind computes, in float64, over dense operands in logical order. Written for
//! clarity: plain loops, no blocks.
//!
//! The tests of the CPU kernels use it too; `terms` contains the names that differ between the two
//! crates.

use super::terms::{
    BodyOp, DType, Documents, DrawnColumns, ForcedChoice, OpKind, SAVED, ScaleBlock, ScoreMod,
    Slot, op,
};

#[path = "semantics/experts.rs"]
mod experts;

/// Returns the row-major strides.
pub(super) fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut st = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        st[i - 1] = st[i] * shape[i];
    }
    st
}

/// Returns strides that repeat `shape` over `to`.
fn broadcast(shape: &[u64], strides: &[u64], to: &[u64]) -> Vec<u64> {
    let lead = to.len() - shape.len();
    let stride = |i: usize| if shape[i] == 1 { 0 } else { strides[i] };
    (0..to.len())
        .map(|i| i.checked_sub(lead).map_or(0, stride))
        .collect()
}

fn dims(s: &Slot) -> (usize, usize) {
    let cols = s.shape.last().copied().unwrap_or(1) as usize;
    (s.shape.iter().product::<u64>() as usize / cols, cols)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns GELU by the tanh approximation, and its derivative.
fn gelu(x: f64) -> (f64, f64) {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044_715 * x * x * x)).tanh();
    let dt = (1.0 - t * t) * c * (1.0 + 3.0 * 0.044_715 * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * dt)
}

/// Returns the exact GELU, and its derivative.
fn gelu_erf(x: f64) -> (f64, f64) {
    let cdf = 0.5 * (1.0 + libm::erf(x / std::f64::consts::SQRT_2));
    let pdf = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (x * cdf, cdf + x * pdf)
}

fn lse(row: &[f64]) -> f64 {
    let m = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    m + row.iter().map(|x| (x - m).exp()).sum::<f64>().ln()
}

/// Applies a function elementwise to two operands, the smaller one broadcast from the right.
fn zip2(op: &BodyOp, x: &[Vec<f64>], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let out = &op.outputs[0].shape;
    let get = |i: usize| {
        let s = &op.inputs[i];
        let strides = contiguous(&s.shape);
        let wide = if s.shape.iter().product::<u64>() == out.iter().product::<u64>() {
            None
        } else {
            Some(broadcast(&s.shape, &strides, out))
        };
        move |flat: usize| match &wide {
            None => flat,
            Some(st) => {
                let (mut rest, mut at) = (flat as u64, 0);
                for d in (0..out.len()).rev() {
                    at += rest % out[d] * st[d];
                    rest /= out[d];
                }
                at as usize
            }
        }
    };
    let (a, b) = (get(0), get(1));
    (0..out.iter().product::<u64>() as usize)
        .map(|i| f(x[0][a(i)], x[1][b(i)]))
        .collect()
}

pub(crate) fn apply(op: &BodyOp, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let ins = &op.inputs;
    let map = |f: &dyn Fn(f64) -> f64| vec![x[0].iter().map(|&v| f(v)).collect::<Vec<f64>>()];
    let pair = |f: &dyn Fn(f64, f64) -> f64| {
        vec![
            x[0].iter()
                .zip(&x[1])
                .map(|(&a, &b)| f(a, b))
                .collect::<Vec<f64>>(),
        ]
    };
    match op.op {
        OpKind::Gemm(op::Gemm {
            ta,
            tb,
            bias,
            accumulate,
        }) => vec![gemm(op, x, ta, tb, bias, accumulate)],
        OpKind::Attention(op::Attention { causal, scale }) => {
            attention(op, x, &Scores::plain(causal, scale.0))
        }
        OpKind::AttentionGrad(op::AttentionGrad { causal, scale }) => {
            attention_grad(op, x, &Scores::plain(causal, scale.0))
        }
        OpKind::FlexAttention(op::FlexAttention {
            causal,
            scale,
            score_mod,
        }) => attention(op, x, &Scores::changed(causal, scale.0, score_mod)),
        OpKind::FlexAttentionGrad(op::FlexAttentionGrad {
            causal,
            scale,
            score_mod,
        }) => attention_grad(op, x, &Scores::changed(causal, scale.0, score_mod)),
        OpKind::DocumentAttention(op::DocumentAttention {
            causal,
            scale,
            score_mod,
        }) => attention(op, x, &Scores::of_data(causal, scale.0, score_mod, &x[3])),
        OpKind::DocumentAttentionGrad(op::DocumentAttentionGrad {
            causal,
            scale,
            score_mod,
        }) => attention_grad(op, x, &Scores::of_data(causal, scale.0, score_mod, &x[4])),
        OpKind::SinkAttention(op::SinkAttention {
            causal,
            scale,
            score_mod,
        }) => attention(op, x, &Scores::with_sinks(causal, scale.0, score_mod)),
        OpKind::SinkAttentionGrad(op::SinkAttentionGrad {
            causal,
            scale,
            score_mod,
        }) => attention_grad(op, x, &Scores::with_sinks(causal, scale.0, score_mod)),
        OpKind::Conv(op::Conv { kernel }) => vec![conv(op, x, kernel, 0)],
        OpKind::ConvGradInput(op::ConvGradInput { kernel }) => vec![conv(op, x, kernel, 1)],
        OpKind::ConvGradWeight(op::ConvGradWeight { kernel }) => vec![conv(op, x, kernel, 2)],
        OpKind::Embedding => {
            let d = dims(&ins[1]).1;
            vec![
                x[0].iter()
                    .flat_map(|&i| x[1][i as usize * d..][..d].to_vec())
                    .collect(),
            ]
        }
        OpKind::EmbeddingGrad => {
            let (vocab, d) = dims(&op.outputs[0]);
            let mut table = x.get(2).cloned().unwrap_or(vec![0.0; vocab * d]);
            for (r, &i) in x[1].iter().enumerate() {
                for c in 0..d {
                    table[i as usize * d + c] += x[0][r * d + c];
                }
            }
            vec![table]
        }
        OpKind::RmsNorm(op::RmsNorm { eps }) => {
            let (rows, d) = dims(&ins[0]);
            let rstd: Vec<f64> = (0..rows)
                .map(|r| {
                    let ss: f64 = x[0][r * d..][..d].iter().map(|v| v * v).sum();
                    1.0 / (ss / d as f64 + eps.0).sqrt()
                })
                .collect();
            let y = (0..rows * d)
                .map(|i| x[0][i] * rstd[i / d] * x[1][i % d])
                .collect();
            vec![y, rstd]
        }
        OpKind::RmsNormGrad => {
            let (rows, d) = dims(&ins[1]);
            let mut out = vec![0.0; rows * d];
            for r in 0..rows {
                let s = x[3][r];
                let dot: f64 = (0..d)
                    .map(|c| x[0][r * d + c] * x[2][c] * x[1][r * d + c])
                    .sum::<f64>()
                    / d as f64;
                for c in 0..d {
                    let i = r * d + c;
                    out[i] = s * x[0][i] * x[2][c] - s * s * s * dot * x[1][i];
                }
            }
            vec![out]
        }
        OpKind::RmsNormWeightGrad => {
            let (rows, d) = dims(&ins[1]);
            vec![
                (0..d)
                    .map(|c| {
                        (0..rows)
                            .map(|r| x[0][r * d + c] * x[1][r * d + c] * x[2][r])
                            .sum()
                    })
                    .collect(),
            ]
        }
        OpKind::LayerNorm(op::LayerNorm { eps }) => {
            let (rows, d) = dims(&ins[0]);
            let mean: Vec<f64> = (0..rows)
                .map(|r| x[0][r * d..][..d].iter().sum::<f64>() / d as f64)
                .collect();
            let rstd: Vec<f64> = (0..rows)
                .map(|r| {
                    let ss: f64 = x[0][r * d..][..d]
                        .iter()
                        .map(|v| (v - mean[r]).powi(2))
                        .sum();
                    1.0 / (ss / d as f64 + eps.0).sqrt()
                })
                .collect();
            let b = |c: usize| x.get(2).map_or(0.0, |b| b[c]);
            let y = (0..rows * d)
                .map(|i| (x[0][i] - mean[i / d]) * rstd[i / d] * x[1][i % d] + b(i % d))
                .collect();
            vec![y, mean, rstd]
        }
        OpKind::LayerNormGrad => {
            let (rows, d) = dims(&ins[1]);
            let mut out = vec![0.0; rows * d];
            for r in 0..rows {
                let hat = |c: usize| (x[1][r * d + c] - x[3][r]) * x[4][r];
                let g = |c: usize| x[0][r * d + c] * x[2][c];
                let m1 = (0..d).map(g).sum::<f64>() / d as f64;
                let m2 = (0..d).map(|c| g(c) * hat(c)).sum::<f64>() / d as f64;
                for c in 0..d {
                    out[r * d + c] = x[4][r] * (g(c) - m1 - hat(c) * m2);
                }
            }
            vec![out]
        }
        OpKind::LayerNormParamGrad => {
            let (rows, d) = dims(&ins[1]);
            let hat = |r: usize, c: usize| (x[1][r * d + c] - x[2][r]) * x[3][r];
            let dw = (0..d)
                .map(|c| (0..rows).map(|r| x[0][r * d + c] * hat(r, c)).sum())
                .collect();
            let db = (0..d)
                .map(|c| (0..rows).map(|r| x[0][r * d + c]).sum())
                .collect();
            let mut out = vec![dw, db];
            out.truncate(op.outputs.len());
            out
        }
        OpKind::Add => vec![zip2(op, x, |a, b| a + b)],
        OpKind::Sub | OpKind::LogProbs => vec![zip2(op, x, |a, b| a - b)],
        OpKind::Mul => vec![zip2(op, x, |a, b| a * b)],
        OpKind::MaskRows => vec![zip2(op, x, |v, mask| if mask == 0.0 { v } else { 0.0 })],
        OpKind::Neg => map(&|v| -v),
        OpKind::Scale(op::Scale { by }) => map(&|v| by.0 * v),
        OpKind::Shift(op::Shift { by }) => map(&|v| v + by.0),
        OpKind::Softcap(op::Softcap { cap }) => map(&|v| cap.0 * (v / cap.0).tanh()),
        OpKind::SoftcapGrad(op::SoftcapGrad { cap }) => {
            pair(&|g, y| g * (1.0 - (y / cap.0).powi(2)))
        }
        OpKind::Silu => map(&|v| v * sigmoid(v)),
        OpKind::SiluGrad => pair(&|g, v| g * (sigmoid(v) + v * sigmoid(v) * (1.0 - sigmoid(v)))),
        OpKind::Gelu => map(&|v| gelu(v).0),
        OpKind::GeluGrad => pair(&|g, v| g * gelu(v).1),
        OpKind::GeluErf => map(&|v| gelu_erf(v).0),
        OpKind::GeluErfGrad => pair(&|g, v| g * gelu_erf(v).1),
        OpKind::Relu => map(&|v| v.max(0.0)),
        OpKind::ReluGrad => pair(&|g, y| if y > 0.0 { g } else { 0.0 }),
        OpKind::Clamp(op::Clamp { min, max }) => {
            map(&|v| v.max(min.map_or(f64::NEG_INFINITY, |m| m.0)).min(max.0))
        }
        OpKind::ClampGrad(op::ClampGrad { min, max }) => pair(&|g, v| {
            let low = min.map_or(f64::NEG_INFINITY, |m| m.0);
            if (low..=max.0).contains(&v) { g } else { 0.0 }
        }),
        OpKind::Copy => map(&|v| v),
        OpKind::Cat(op::Cat { axis }) => vec![cat(op, x, usize::from(axis))],
        OpKind::Fill(op::Fill { value }) => vec![vec![
            value.0;
            op.outputs[0].shape.iter().product::<u64>()
                as usize
        ]],
        OpKind::SumLeading => {
            let n = op.outputs[0].shape.iter().product::<u64>() as usize;
            vec![
                (0..n)
                    .map(|c| x[0].iter().skip(c).step_by(n).sum())
                    .collect(),
            ]
        }
        OpKind::SumChannels => {
            let s = &ins[0].shape;
            let (c, hw) = (s[1] as usize, (s[2] * s[3]) as usize);
            let mut out = vec![0.0; c];
            for (i, v) in x[0].iter().enumerate() {
                out[i / hw % c] += v;
            }
            vec![out]
        }
        OpKind::SumAll => vec![vec![x[0].iter().sum()]],
        OpKind::LogSoftmax => {
            let d = dims(&ins[0]).1;
            vec![
                x[0].chunks(d)
                    .flat_map(|r| r.iter().map(|v| v - lse(r)).collect::<Vec<_>>())
                    .collect(),
            ]
        }
        OpKind::LogSumExp => vec![x[0].chunks(dims(&ins[0]).1).map(lse).collect()],
        OpKind::LogSoftmaxGrad => {
            let (rows, d) = dims(&ins[1]);
            let sum: Vec<f64> = (0..rows).map(|r| x[0][r * d..][..d].iter().sum()).collect();
            vec![
                (0..rows * d)
                    .map(|i| x[0][i] - x[1][i].exp() * sum[i / d])
                    .collect(),
            ]
        }
        OpKind::NllLoss => {
            let (rows, d) = dims(&ins[0]);
            let sum: f64 = (0..rows).map(|r| -x[0][r * d + x[1][r] as usize]).sum();
            vec![vec![sum / rows as f64], vec![rows as f64]]
        }
        OpKind::NllLossGrad => {
            let d = dims(&ins[3]).1;
            let mut out = x[3].clone();
            for (r, &l) in x[1].iter().enumerate() {
                out[r * d + l as usize] = -x[0][0] / x[2][0];
            }
            vec![out]
        }
        OpKind::SquaredError(op::SquaredError { scale }) => {
            pair(&|a, b| scale.0 * (a - b) * (a - b))
        }
        OpKind::SquaredErrorGrad(op::SquaredErrorGrad { scale }) => {
            vec![
                (0..x[1].len())
                    .map(|i| x[0][i] * 2.0 * scale.0 * (x[1][i] - x[2][i]))
                    .collect(),
            ]
        }
        OpKind::Shard(_) => unreachable!("tapes hold no sharding kernels"),
        OpKind::CausalConv1d(_)
        | OpKind::CausalConv1dGrad(_)
        | OpKind::DepthwiseConv(_)
        | OpKind::DepthwiseConvGrad(_)
        | OpKind::SelectiveScan
        | OpKind::SelectiveScanGrad
        | OpKind::ChunkScan(_)
        | OpKind::ChunkScanGrad(_)
        | OpKind::GatedDelta(_)
        | OpKind::GatedDeltaGrad(_)
        | OpKind::BiasedAttention(_)
        | OpKind::MaskedAttention(_)
        | OpKind::MaskedAttentionGrad(_)
        | OpKind::BatchedGemm
        | OpKind::Softmax
        | OpKind::SoftmaxGrad
        | OpKind::Dropout(_)
        | OpKind::DropoutGrad(_)
        | OpKind::BiasedAttentionGrad(_)
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
        | OpKind::Conv1d(_)
        | OpKind::Conv1dGradInput(_)
        | OpKind::Conv1dGradWeight(_)
        | OpKind::Conv2d(_)
        | OpKind::Conv2dGradInput(_)
        | OpKind::Conv2dGradWeight(_)
        | OpKind::BatchNorm
        | OpKind::BatchNormGrad
        | OpKind::Indexer(_) => unreachable!("nothing runs operations that are only priced"),
        OpKind::Dequantize(_) => unreachable!("bytes are no numbers: `exec` tests it"),
        OpKind::CrossEntropy(op::CrossEntropy { scale, gradient }) => {
            let d = dims(&ins[0]).1;
            let (mut grad, mut loss) = (x[0].clone(), x[2][0]);
            for (row, &l) in grad.chunks_mut(d).zip(&x[1]) {
                let z = lse(row);
                loss += scale.0 * (z - row[l as usize]);
                for v in row.iter_mut() {
                    *v = gradient.0 * (*v - z).exp();
                }
                row[l as usize] -= gradient.0;
            }
            vec![grad, vec![loss]]
        }
        OpKind::Sigmoid => map(&sigmoid),
        OpKind::SigmoidGrad => pair(&|g, y| g * y * (1.0 - y)),
        OpKind::ScaleRows => {
            let d = dims(&op.outputs[0]).1;
            let scaled = x[0].iter().enumerate().map(|(i, v)| v * x[1][i / d]);
            vec![scaled.collect()]
        }
        OpKind::Pow(op::Pow { exponent }) => map(&|v| v.powf(exponent.0)),
        OpKind::Rsqrt => map(&|v| 1.0 / v.sqrt()),
        OpKind::RowSum(op::RowSum { scale }) => {
            let rows = x[0].chunks(dims(&ins[0]).1);
            vec![rows.map(|r| scale.0 * r.iter().sum::<f64>()).collect()]
        }
        OpKind::RowDot => {
            let d = dims(&ins[0]).1;
            let rows = x[0].chunks(d).zip(x[1].chunks(d));
            vec![rows.map(|(a, b)| dot(a, b)).collect()]
        }
        OpKind::RowAmax => vec![x[0].chunks(dims(&ins[0]).1).map(amax).collect()],
        OpKind::Float8Scale(op::Float8Scale { to, routed }) => {
            let used = if routed {
                x[1][x[1].len() - 1] as usize
            } else {
                x[0].len()
            };
            let scale = float8_scale(to.float8_max(), amax(&x[0][..used]));
            vec![vec![scale], vec![1.0 / scale]]
        }
        OpKind::Float8Cast => vec![zip2(op, x, |v, scale| v * scale)],
        OpKind::Float8CastRows(op::Float8CastRows { to }) => {
            let rows = || x[0].chunks(dims(&ins[0]).1);
            let power = |r: &[f64]| float8_scale(to.float8_max(), amax(r)).log2().floor().exp2();
            let cast = |r| {
                let scale = power(r);
                r.iter().map(move |v| v * scale)
            };
            vec![
                rows().flat_map(cast).collect(),
                rows().map(|r| 1.0 / power(r)).collect(),
            ]
        }
        OpKind::Float8CastBlocks(of) => float8_blocks(of, dims(&ins[0]), &x[0]),
        OpKind::ScaledGemm(of) => vec![scaled_gemm(of, op, x)],
        OpKind::Route(of) => experts::route(&of, x, dims(&ins[0]).1),
        OpKind::RouteGrad(of) => vec![experts::route_grad(&of, x, dims(&ins[1]).1)],
        OpKind::LocalExperts(of) => vec![experts::local(&of, &x[0])],
        OpKind::PushedRows(of) => vec![experts::pushed(&of, &x[0], dims(&ins[0]).1)],
        OpKind::DispatchExperts(of) => experts::dispatch(&of, &x[0]),
        OpKind::SortExperts(of) => experts::sort(&of, &x[0]),
        OpKind::Permute(_) => vec![experts::permute(op, x)],
        OpKind::Unpermute(_) => vec![experts::unpermute(op, x)],
        OpKind::GroupedGemm(op::GroupedGemm { tb, .. }) => vec![experts::grouped(op, x, tb)],
        OpKind::RepeatRows(_) => vec![experts::repeat(op, x)],
        OpKind::RepeatRowsGrad(_) => vec![experts::repeat_grad(op, x)],
        OpKind::GroupedGemmWeightGrad(_) => vec![experts::grouped_weight_grad(op, x)],
        OpKind::ScaledGroupedGemm(_) => {
            scaled_experts(op, x, |op, x| experts::grouped(op, x, true))
        }
        OpKind::ScaledGroupedGemmWeightGrad(_) => {
            let turned = |n: usize| {
                let (rows, cols) = dims(&ins[n]);
                let at = |i: usize| x[n][i % rows * cols + i / rows];
                (0..rows * cols).map(at).collect::<Vec<f64>>()
            };
            let mut rows = op.clone();
            for slot in &mut rows.inputs[..2] {
                slot.shape.reverse();
            }
            let x = [vec![turned(0), turned(1)], x[2..].to_vec()].concat();
            scaled_experts(&rows, &x, experts::grouped_weight_grad)
        }
        OpKind::CountExperts => vec![experts::counts(&x[0], dims(&op.outputs[0]).1)],
        OpKind::LoadBalance(of) => experts::load_balance(&of, &x[0], dims(&ins[0]).1),
        OpKind::LoadBalanceGrad(of) => {
            let columns = dims(&ins[1]).1;
            vec![experts::load_balance_grad(&of, x, columns)]
        }
        OpKind::ZLoss(op::ZLoss { scale }) => {
            let rows = x[0].chunks(dims(&ins[0]).1);
            let n = rows.len() as f64;
            vec![vec![
                scale.0 * rows.map(|r| lse(r).powi(2)).sum::<f64>() / n,
            ]]
        }
        OpKind::ZLossGrad(op::ZLossGrad { scale }) => {
            let rows = x[1].chunks(dims(&ins[1]).1);
            let by = x[0][0] * scale.0 * 2.0 / rows.len() as f64;
            let of = |r: &[f64]| -> Vec<f64> {
                let z = lse(r);
                r.iter().map(|v| by * z * (v - z).exp()).collect()
            };
            vec![rows.flat_map(of).collect()]
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn gemm(op: &BodyOp, x: &[Vec<f64>], ta: bool, tb: bool, bias: bool, accumulate: bool) -> Vec<f64> {
    let ((ar, ac), (br, bc)) = (dims(&op.inputs[0]), dims(&op.inputs[1]));
    let (m, k) = if ta { (ac, ar) } else { (ar, ac) };
    let n = if tb { br } else { bc };
    assert_eq!(k, if tb { bc } else { br });
    let mut out = if accumulate {
        x[x.len() - 1].clone()
    } else {
        vec![0.0; m * n]
    };
    for i in 0..m {
        for j in 0..n {
            let dot: f64 = (0..k)
                .map(|l| {
                    let a = if ta {
                        x[0][l * ac + i]
                    } else {
                        x[0][i * ac + l]
                    };
                    let b = if tb {
                        x[1][j * bc + l]
                    } else {
                        x[1][l * bc + j]
                    };
                    a * b
                })
                .sum();
            out[i * n + j] += dot + if bias { x[2][j] } else { 0.0 };
        }
    }
    out
}

/// How attention makes scores.
struct Scores {
    causal: bool,
    scale: f64,
    /// Soft limit, or 0.
    cap: f64,
    /// Slopes of ALiBi, for a number of heads that is a power of two.
    slopes: bool,
    /// Positions seen to each side, or 0 for all.
    window: usize,
    /// Documents that do not see each other.
    documents: Documents,
    /// Each row has one more score.
    sinks: bool,
    /// First positions of the documents of all positions, if these are data.
    starts: Option<Vec<f64>>,
}

impl Scores {
    fn plain(causal: bool, scale: f64) -> Self {
        Self::changed(causal, scale, ScoreMod::NONE)
    }

    fn changed(causal: bool, scale: f64, by: ScoreMod) -> Self {
        Self {
            causal,
            scale,
            cap: by.softcap.0,
            slopes: by.alibi,
            window: by.window as usize,
            documents: by.documents,
            sinks: false,
            starts: None,
        }
    }

    fn of_data(causal: bool, scale: f64, by: ScoreMod, starts: &[f64]) -> Self {
        Self {
            documents: Documents::NONE,
            starts: Some(starts.to_vec()),
            ..Self::changed(causal, scale, by)
        }
    }

    /// Returns whether two positions of the sequence that starts at position `first` of all are of
    /// one document, as far as data say.
    fn same_document(&self, first: usize, [i, j]: [usize; 2]) -> bool {
        let starts = self.starts.as_ref();
        starts.is_none_or(|starts| starts[first + i] == starts[first + j])
    }

    /// Returns the number of operands between the values and the result of forward.
    fn between(&self) -> usize {
        usize::from(self.sinks || self.starts.is_some())
    }

    fn with_sinks(causal: bool, scale: f64, by: ScoreMod) -> Self {
        let sinks = true;
        Self {
            sinks,
            ..Self::changed(causal, scale, by)
        }
    }

    /// Returns the score of head `h` of `heads` from a dot product, and its derivative.
    fn of(&self, dot: f64, [h, heads, i, j]: [usize; 4]) -> (f64, f64) {
        let far = self.window > 0 && i.abs_diff(j) >= self.window;
        let document = |n: usize| self.documents.span(n as u64, u64::MAX);
        let hidden = self.causal && j > i || far || document(i) != document(j);
        if hidden {
            return (f64::NEG_INFINITY, 0.0);
        }
        let mut score = self.scale * dot;
        let mut slope = self.scale;
        if self.cap > 0.0 {
            let t = (score / self.cap).tanh();
            score = self.cap * t;
            slope *= 1.0 - t * t;
        }
        if self.slopes {
            let power = -8.0 * (h + 1) as f64 / heads as f64;
            score += power.exp2() * (j as f64 - i as f64);
        }
        (score, slope)
    }
}

/// Returns the probabilities of each query row and the derivatives of its scores by
/// `query * key`, `[batch, heads, seq, seq]` each, and the log-sum-exp of the rows.
fn probabilities(
    [q, k]: [&Slot; 2],
    [xq, xk]: [&[f64]; 2],
    sinks: Option<&[f64]>,
    scores: &Scores,
) -> [Vec<f64>; 3] {
    let [b, h, t, d] = [0, 1, 2, 3].map(|i| q.shape[i] as usize);
    let group = h / k.shape[1] as usize;
    let kv = h / group;
    let (mut p, mut z) = (vec![0.0; b * h * t * t], vec![0.0; b * h * t]);
    let mut slopes = p.clone();
    for bh in 0..b * h {
        let kh = bh / h * kv + bh % h / group;
        for i in 0..t {
            let row: Vec<f64> = (0..t)
                .map(|j| {
                    let dot = (0..d)
                        .map(|c| xq[(bh * t + i) * d + c] * xk[(kh * t + j) * d + c])
                        .sum::<f64>();
                    let (score, slope) = match scores.same_document(bh / h * t, [i, j]) {
                        true => scores.of(dot, [bh % h, h, i, j]),
                        false => (f64::NEG_INFINITY, 0.0),
                    };
                    slopes[(bh * t + i) * t + j] = slope;
                    score
                })
                .collect();
            let sink = sinks.map(|all| all[bh % h]);
            let with_sink: Vec<f64> = row.iter().copied().chain(sink).collect();
            let l = lse(&with_sink);
            z[bh * t + i] = l;
            for (j, s) in row.iter().enumerate() {
                p[(bh * t + i) * t + j] = (s - l).exp();
            }
        }
    }
    [p, slopes, z]
}

fn attention(op: &BodyOp, x: &[Vec<f64>], scores: &Scores) -> Vec<Vec<f64>> {
    let (q, k) = (&op.inputs[0], &op.inputs[1]);
    let [b, h, t, d] = [0, 1, 2, 3].map(|i| q.shape[i] as usize);
    let sinks = scores.sinks.then(|| &x[3][..]);
    let [p, _, z] = probabilities([q, k], [&x[0], &x[1]], sinks, scores);
    let kv = k.shape[1] as usize;
    let mut out = vec![0.0; b * h * t * d];
    for bh in 0..b * h {
        let kh = bh / h * kv + bh % h / (h / kv);
        for i in 0..t {
            for c in 0..d {
                out[(bh * t + i) * d + c] = (0..t)
                    .map(|j| p[(bh * t + i) * t + j] * x[2][(kh * t + j) * d + c])
                    .sum();
            }
        }
    }
    // Rows of the log-sum-exp may be padded.
    let rows = op.outputs[1].shape[2] as usize;
    let mut padded = vec![0.0; b * h * rows];
    for (i, v) in z.iter().enumerate() {
        padded[i / t * rows + i % t] = *v;
    }
    vec![out, padded, vec![0.0], vec![0.0]]
}

fn attention_grad(op: &BodyOp, x: &[Vec<f64>], scores: &Scores) -> Vec<Vec<f64>> {
    let (q, k) = (&op.inputs[1], &op.inputs[2]);
    let [b, h, t, d] = [0, 1, 2, 3].map(|i| q.shape[i] as usize);
    let kv = k.shape[1] as usize;
    let sinks = scores.sinks.then(|| &x[4][..]);
    let [p, slopes, z] = probabilities([q, k], [&x[1], &x[2]], sinks, scores);
    // The result and the log-sum-exp of the forward.
    let [y, stat] = [4, 5].map(|n| n + scores.between());
    let rows = op.inputs[stat].shape[2] as usize;
    for (i, v) in z.iter().enumerate() {
        assert!(
            (v - x[stat][i / t * rows + i % t]).abs() < SAVED,
            "the saved log-sum-exp is the forward's"
        );
    }
    let (mut dq, mut dk, mut dv) = (
        vec![0.0; x[1].len()],
        vec![0.0; x[2].len()],
        vec![0.0; x[3].len()],
    );
    let mut dsinks = vec![0.0; h];
    for bh in 0..b * h {
        let kh = bh / h * kv + bh % h / (h / kv);
        for i in 0..t {
            let at = (bh * t + i) * d;
            let delta: f64 = (0..d).map(|c| x[0][at + c] * x[y][at + c]).sum();
            if let Some(sinks) = sinks {
                dsinks[bh % h] -= (sinks[bh % h] - z[bh * t + i]).exp() * delta;
            }
            for j in 0..t {
                let pij = p[(bh * t + i) * t + j];
                let kt = (kh * t + j) * d;
                let dp: f64 = (0..d).map(|c| x[0][at + c] * x[3][kt + c]).sum();
                let ds = pij * (dp - delta) * slopes[(bh * t + i) * t + j];
                for c in 0..d {
                    dv[kt + c] += pij * x[0][at + c];
                    dq[at + c] += ds * x[2][kt + c];
                    dk[kt + c] += ds * x[1][at + c];
                }
            }
        }
    }
    vec![dq, dk, dv, dsinks]
}

/// Computes a convolution (`which` 0), its input gradient (1), its weight gradient (2).
fn conv(op: &BodyOp, x: &[Vec<f64>], kernel: u64, which: u8) -> Vec<f64> {
    let image = &op.inputs[0].shape;
    let w = if which == 2 {
        &op.outputs[0].shape
    } else {
        &op.inputs[1].shape
    };
    let [n, h, wd] = [image[0], image[2], image[3]].map(|v| v as usize);
    let (co, ci, kk, pad) = (
        w[0] as usize,
        w[1] as usize,
        kernel as usize,
        kernel as usize / 2,
    );
    let mut out = vec![0.0; op.outputs[0].shape.iter().product::<u64>() as usize];
    for b in 0..n {
        for o in 0..co {
            for c in 0..ci {
                for y in 0..h {
                    for z in 0..wd {
                        for dy in 0..kk {
                            for dz in 0..kk {
                                let (sy, sz) = (y + dy, z + dz);
                                if sy < pad || sz < pad || sy - pad >= h || sz - pad >= wd {
                                    continue;
                                }
                                let yi = ((b * co + o) * h + y) * wd + z;
                                let xi = ((b * ci + c) * h + sy - pad) * wd + sz - pad;
                                let wi = ((o * ci + c) * kk + dy) * kk + dz;
                                match which {
                                    0 => out[yi] += x[0][xi] * x[1][wi],
                                    1 => out[xi] += x[0][yi] * x[1][wi],
                                    _ => out[wi] += x[0][yi] * x[1][xi],
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    out
}

fn cat(op: &BodyOp, x: &[Vec<f64>], axis: usize) -> Vec<f64> {
    let outer: u64 = op.outputs[0].shape[..axis].iter().product();
    let mut out = vec![];
    for o in 0..outer as usize {
        for (s, v) in op.inputs.iter().zip(x) {
            let n = s.shape[axis..].iter().product::<u64>() as usize;
            out.extend_from_slice(&v[o * n..][..n]);
        }
    }
    out
}

fn amax(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Returns the factor with which the largest number becomes the largest of a type.
fn float8_scale(most: Option<f32>, amax: f64) -> f64 {
    match most {
        Some(most) if amax > 0.0 => f64::from(most) / amax,
        _ => 1.0,
    }
}

fn float8_blocks(
    of: op::Float8CastBlocks,
    (rows, cols): (usize, usize),
    x: &[f64],
) -> Vec<Vec<f64>> {
    let turned = (0..x.len()).map(|i| x[i % rows * cols + i / rows]);
    let turned: Vec<f64> = turned.collect();
    let (rows, cols, x) = match of.transposed {
        true => (cols, rows, &turned[..]),
        false => (rows, cols, x),
    };
    let [down, across] = of.block.grid([rows as u64, cols as u64]);
    let (height, width) = (of.block.rows as usize, of.block.cols as usize);
    let place = |i: usize| i / cols / height * across as usize + i % cols / width;
    let mut largest = vec![0.0; (down * across) as usize];
    for (i, v) in x.iter().enumerate() {
        largest[place(i)] = v.abs().max(largest[place(i)]);
    }
    let most = of.to.float8_max();
    let mx = of.block == ScaleBlock::MX;
    let scale = |amax: f64| match mx {
        // The smallest power of two that is large enough.
        true if amax > 0.0 => (amax / f64::from(most.unwrap_or(1.0)))
            .log2()
            .ceil()
            .exp2()
            .recip(),
        true => 127f64.exp2(),
        false => float8_scale(most, amax).log2().floor().exp2(),
    };
    let inverse = |amax: &f64| match mx {
        true => 127.0 - scale(*amax).log2(),
        false => 1.0 / scale(*amax),
    };
    let codes = x
        .iter()
        .enumerate()
        .map(|(i, v)| v * scale(largest[place(i)]));
    vec![codes.collect(), largest.iter().map(inverse).collect()]
}

fn scaled_gemm(of: op::ScaledGemm, op: &BodyOp, x: &[Vec<f64>]) -> Vec<f64> {
    let ((m, k), (n, _)) = (dims(&op.inputs[0]), dims(&op.inputs[1]));
    let grids = [2, 3].map(|i| dims(&op.inputs[i]));
    if grids.iter().any(|(_, across)| *across > 1) {
        return block_scaled_gemm(op, x, (m, n, k), grids);
    }
    let inverse = |of: &[f64], row: usize| if of.len() == 1 { of[0] } else { of[row] };
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let sum = dot(&x[0][i * k..][..k], &x[1][j * k..][..k]);
            let mut c = sum * inverse(&x[2], i) * inverse(&x[3], j);
            if of.bias {
                c += x[4][j];
            }
            if of.accumulate {
                c += x[4 + usize::from(of.bias)][i * n + j];
            }
            out.push(c);
        }
    }
    out
}

/// Runs a matmul of experts on 8-bit factors, and multiplies by the reciprocals of their scales.
fn scaled_experts(
    op: &BodyOp,
    x: &[Vec<f64>],
    run: impl Fn(&BodyOp, &[Vec<f64>]) -> Vec<f64>,
) -> Vec<Vec<f64>> {
    let mut plain = op.clone();
    plain.inputs = [0, 1, 4]
        .map(|n| op.inputs[n].clone())
        .into_iter()
        .collect();
    let sums = run(&plain, &[0, 1, 4].map(|n| x[n].clone()));
    let inverse = x[2][0] * x[3][0];
    vec![sums.into_iter().map(|sum| sum * inverse).collect()]
}

/// Multiplies decoded factors, whose blocks follow from the grids of their scales.
fn block_scaled_gemm(
    op: &BodyOp,
    x: &[Vec<f64>],
    (m, n, k): (usize, usize, usize),
    grids: [(usize, usize); 2],
) -> Vec<f64> {
    let decoded = |f: usize, rows: usize| {
        let (down, across) = grids[f];
        let mx = op.inputs[2 + f].dtype == DType::U8;
        let width = if mx { 32 } else { 128 };
        let height = if down == rows { 1 } else { 128 };
        let each = x[f].iter().enumerate();
        let each = each.map(|(i, v)| {
            let inverse = x[2 + f][i / k / height * across + i % k / width];
            v * if mx {
                (inverse - 127.0).exp2()
            } else {
                inverse
            }
        });
        each.collect::<Vec<_>>()
    };
    let (a, b) = (decoded(0, m), decoded(1, n));
    let row = |i: usize, j: usize| dot(&a[i * k..][..k], &b[j * k..][..k]);
    (0..m * n).map(|at| row(at / n, at % n)).collect()
}
