//! GEMMs and attention on a grid of sizes, run back to back.

use super::bench::Bench;
use super::rank::Rank;
use super::recipe::{COMPUTE_STREAM, Operand, Recipe, Single};
use super::{Measured, middle};
use crate::calibrate::grid::AttentionRows;
use crate::device::{Device, Stop};
use shardlab_plan::ir::{
    AttentionShape, DType, Float8Gemm, GemmKind, KernelClass, OpKind, Real, ScaleBlock, ScaleMode,
    op,
};
use std::collections::BTreeMap;

/// Numbers of tokens per rank.
const TOKENS: [u64; 4] = [2048, 4096, 8192, 16_384];
/// The same for 8-bit matmuls. Every recipe is measured with the first one.
const FLOAT8_TOKENS: [u64; 2] = [8192, 2048];
/// Widths of layers.
const WIDTHS: [u64; 5] = [1024, 2048, 4096, 8192, 14_336];
/// Sizes of vocabularies with their hidden sizes.
const HEADS: [(u64, u64); 3] = [(128_256, 2048), (128_256, 4096), (32_000, 1024)];
/// Batch, heads, key heads, sequence, head dimension.
const ATTENTION: [[u64; 5]; 14] = [
    [32, 32, 8, 256, 64],
    [16, 32, 8, 512, 64],
    [16, 32, 8, 512, 128],
    [8, 32, 8, 1024, 128],
    [1, 32, 8, 2048, 64],
    [2, 32, 8, 4096, 64],
    [4, 32, 8, 4096, 64],
    [1, 32, 8, 8192, 64],
    [4, 16, 8, 2048, 64],
    [1, 32, 8, 2048, 128],
    [1, 32, 8, 4096, 128],
    [2, 24, 8, 4096, 128],
    [1, 32, 8, 8192, 128],
    [1, 32, 8, 16_384, 128],
];
/// Shapes whose backward is timed in both orders of sums. Longer sequences are excluded, because
/// the workspace for a fixed order grows with the square of their length, and would take 4 GiB.
const ORDERS: [[u64; 5]; 5] = [
    [2, 32, 8, 4096, 64],
    [2, 24, 8, 4096, 128],
    [1, 32, 8, 8192, 128],
    [4, 16, 8, 2048, 64],
    [1, 32, 8, 4096, 128],
];
/// Number of launches of each kernel, and number of warm-up launches.
const REPEATS: usize = 6;
const WARM: usize = 2;
/// Number of cells between two checks of the time, and share of the measuring time after which no
/// further cells start.
const CELLS_PER_CHECK: usize = 16;
const SHARE: f64 = 0.6;
/// Maximum number of operand bytes in a bench.
const ROOM: u64 = 5 << 30;

/// Kind of a kernel in the grid.
enum Cell {
    Gemm(GemmKind, [u64; 3]),
    Attention(bool, AttentionShape),
}

/// Measures all grids.
pub(super) fn measure(bench: &Bench<'_>, m: &mut Measured) -> Result<(), String> {
    let scalings = m.scalings.clone();
    let times = bench.run(
        |recipe| {
            let mut cells = gemms(recipe);
            cells.extend(attention(recipe));
            cells.extend(scaled_gemms(recipe, &scalings));
            cells
        },
        |rank, cells| {
            rank.say("matmuls and attention");
            let mut times = Vec::new();
            for (n, (_, single)) in cells.iter().enumerate() {
                let rest = format!("{} kernels of {}", cells.len() - n, cells.len());
                if n > 0 && n % CELLS_PER_CHECK == 0 && rank.late(SHARE, &rest)? {
                    break;
                }
                times.push(time(rank, single)?);
            }
            let cells = cells.iter().map(|c| match c.0 {
                Cell::Gemm(d, s) => Cell::Gemm(d, s),
                Cell::Attention(b, s) => Cell::Attention(b, s),
            });
            Ok(cells.zip(times).collect::<Vec<_>>())
        },
    );
    sort(times?, m);
    Ok(())
}

/// Returns the median time of a kernel in microseconds.
pub(super) fn time(rank: &mut Rank, single: &Single) -> Result<f64, Stop> {
    rank.begin(true)?;
    for n in 0..REPEATS {
        let command = rank.command(single);
        rank.issue(COMPUTE_STREAM, command, n as u32)?;
    }
    let mut all = rank.end_us(WARM)?;
    Ok(middle(&mut all))
}

/// Returns the time of attention's backward with a fixed order of sums, relative to any order: the
/// median over shapes. Returns `None` if the library lacks some of these kernels, because their
/// replacements are not representative.
pub(super) fn fixed_order(bench: &Bench<'_>) -> Result<Option<f64>, String> {
    // Each order runs on its own device, so that both start at the same temperature.
    let Some(any) = backwards(bench, false)? else {
        return Ok(None);
    };
    let fixed = backwards(bench, true)?;
    Ok(fixed.and_then(|fixed| ratio(&any, &fixed)))
}

/// Returns the microseconds of attention's backward for each of [`ORDERS`].
fn backwards(bench: &Bench<'_>, fixed: bool) -> Result<Option<Vec<f64>>, String> {
    bench.run(
        |recipe| {
            if fixed {
                recipe.sum_in_fixed_order();
            }
            ORDERS.map(|sizes| attend(recipe, causal(sizes), true))
        },
        |rank, kernels| {
            let order = if fixed { "a fixed order" } else { "any order" };
            if let Some(why) = rank.device().facts().get("cudnn.refused") {
                rank.say(&format!("attention's backward in {order}: {why}"));
                return Ok(None);
            }
            rank.say(&format!("attention's backward in {order}"));
            let times: Result<Vec<f64>, Stop> = kernels.iter().map(|k| time(rank, k)).collect();
            times.map(Some)
        },
    )
}

/// Returns the median of the ratios of times.
fn ratio(of: &[f64], times: &[f64]) -> Option<f64> {
    let ratios = times.iter().zip(of).map(|(t, o)| t / o);
    let mut ratios: Vec<f64> = ratios.filter(|r| r.is_finite() && *r > 0.0).collect();
    Some(middle(&mut ratios)).filter(|r| r.is_finite())
}

fn sort(times: Vec<(Cell, f64)>, m: &mut Measured) {
    let mut gemms: BTreeMap<(GemmKind, [u64; 3]), Vec<f64>> = BTreeMap::new();
    let mut rows: BTreeMap<bool, Vec<(AttentionShape, f64)>> = BTreeMap::new();
    for (cell, us) in times.into_iter().filter(|t| t.1.is_finite()) {
        match cell {
            Cell::Gemm(kind, shape) => gemms.entry((kind, shape)).or_default().push(us),
            Cell::Attention(backward, shape) => rows.entry(backward).or_default().push((shape, us)),
        }
    }
    for ((kind, shape), all) in gemms {
        // The mean over operand layouts, all of which occur in a step.
        let us = all.iter().sum::<f64>() / all.len() as f64;
        match m.gemm.iter_mut().find(|t| t.0 == kind) {
            Some(table) => table.1.push((shape, us)),
            None => m.gemm.push((kind, vec![(shape, us)])),
        }
    }
    m.attention = rows
        .into_iter()
        .map(|(backward, rows)| AttentionRows {
            dtype: DType::Bf16,
            causal: true,
            backward,
            rows,
        })
        .collect();
}

/// Returns out and in features of layers.
fn layers() -> Vec<(u64, u64)> {
    let all = WIDTHS.iter().flat_map(|&n| WIDTHS.map(|k| (n, k)));
    let is_layer = |(n, k): &(u64, u64)| n * k <= 8192 * 14_336 && (*n <= 4096 || *k <= 4096);
    all.filter(is_layer).collect()
}

fn gemms(recipe: &mut Recipe) -> Vec<(Cell, Single)> {
    let mut layers = layers();
    layers.extend(HEADS);
    let mut cells = Vec::new();
    for tokens in TOKENS {
        for &(n, k) in &layers {
            let size = 2 * (tokens * n + tokens * k + n * k);
            if size > ROOM || (n > 20_000 && tokens > 8192) {
                continue;
            }
            // Forward, and the gradient of the weight. The gradient of the input is the forward of
            // another layer.
            for (shape, ta, tb) in [([tokens, n, k], false, true), ([n, k, tokens], true, false)] {
                cells.push(gemm(recipe, DType::Bf16, shape, ta, tb));
            }
            if n > 20_000 {
                cells.push(gemm(recipe, DType::Bf16, [tokens, k, n], false, false));
            }
        }
    }
    for (n, k) in [(1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096)] {
        for tokens in [1024, 4096] {
            cells.push(gemm(recipe, DType::F32, [tokens, n, k], false, true));
            cells.push(gemm(recipe, DType::F32, [n, k, tokens], true, false));
        }
    }
    cells
}

fn gemm(
    recipe: &mut Recipe,
    dtype: DType,
    [m, n, k]: [u64; 3],
    ta: bool,
    tb: bool,
) -> (Cell, Single) {
    let a = if ta { vec![k, m] } else { vec![m, k] };
    let b = if tb { vec![n, k] } else { vec![k, n] };
    let op = OpKind::Gemm(op::Gemm {
        ta,
        tb,
        bias: false,
        accumulate: false,
    });
    let class = KernelClass::Gemm { m, n, k, batch: 1 };
    let single = recipe.kernel(
        op,
        class,
        dtype,
        &[(a, dtype), (b, dtype)],
        &[(vec![m, n], dtype)],
    );
    (Cell::Gemm(GemmKind::of(dtype), [m, n, k]), single)
}

/// Returns 8-bit matmuls. Those of linear layers in forward accumulate with the precision of tensor
/// cores. The same shapes, and those of weight gradients, accumulate in float32, as in backward.
fn scaled_gemms(recipe: &mut Recipe, scalings: &[ScaleMode]) -> Vec<(Cell, Single)> {
    let mut cells = Vec::new();
    for (i, &scaling) in scalings.iter().enumerate() {
        // At other numbers of tokens, recipes differ little from each other.
        let tokens = if i == 0 {
            &FLOAT8_TOKENS[..]
        } else {
            &FLOAT8_TOKENS[..1]
        };
        for &tokens in tokens {
            for (n, k) in layers() {
                let mut add = |fast_accum, shape| {
                    let of = Float8Gemm {
                        scaling,
                        fast_accum,
                    };
                    cells.push(scaled_gemm(recipe, of, shape));
                };
                if scaling != ScaleMode::Blockwise {
                    add(true, [tokens, n, k]);
                }
                add(false, [tokens, n, k]);
                add(false, [n, k, tokens]);
            }
        }
    }
    cells
}

/// Adds an 8-bit matmul. Blocks are those of a row, as in both factors of a weight gradient.
fn scaled_gemm(recipe: &mut Recipe, of: Float8Gemm, [m, n, k]: [u64; 3]) -> (Cell, Single) {
    let scales = |rows: u64| match of.scaling {
        ScaleMode::Tensorwise => Vec::new(),
        ScaleMode::Rowwise => vec![rows, 1],
        ScaleMode::Blockwise => ScaleBlock::ROW.grid([rows, k]).to_vec(),
        ScaleMode::Mxfp8 => ScaleBlock::MX.grid([rows, k]).to_vec(),
    };
    let of_scales = match of.scaling {
        ScaleMode::Mxfp8 => DType::U8,
        _ => DType::F32,
    };
    // Only recipes with one scale per tensor have e5m2 gradients, which backward multiplies.
    let gradients = of.scaling == ScaleMode::Tensorwise && !of.fast_accum;
    let first = if gradients {
        DType::F8E5m2
    } else {
        DType::F8E4m3
    };
    let ins = [
        (vec![m, k], first),
        (vec![n, k], DType::F8E4m3),
        (scales(m), of_scales),
        (scales(n), of_scales),
    ];
    let op = OpKind::ScaledGemm(op::ScaledGemm {
        fast: of.fast_accum,
        bias: false,
        accumulate: false,
    });
    let class = KernelClass::Gemm { m, n, k, batch: 1 };
    let single = recipe.kernel(op, class, first, &ins, &[(vec![m, n], DType::Bf16)]);
    if of.scaling == ScaleMode::Blockwise {
        recipe.by_column(&single, &[2, 3]);
    }
    let kind = GemmKind {
        dtype: DType::F8E4m3,
        float8: Some(of),
    };
    (Cell::Gemm(kind, [m, n, k]), single)
}

fn attention(recipe: &mut Recipe) -> Vec<(Cell, Single)> {
    let mut cells = Vec::new();
    for shape in ATTENTION.map(causal) {
        for backward in [false, true] {
            cells.push((
                Cell::Attention(backward, shape),
                attend(recipe, shape, backward),
            ));
        }
    }
    cells
}

/// Returns the causal attention of these sizes, in the order of [`ATTENTION`].
pub(super) const fn causal(sizes: [u64; 5]) -> AttentionShape {
    AttentionShape::new(sizes, true)
}

/// Adds an attention in bf16.
pub(super) fn attend(recipe: &mut Recipe, shape: AttentionShape, backward: bool) -> Single {
    let dtype = DType::Bf16;
    let q: Operand = (shape.queries().to_vec(), dtype);
    let kv: Operand = (shape.keys().to_vec(), dtype);
    let lse: Operand = (vec![shape.batch, shape.heads, shape.seq], DType::F32);
    let state: Operand = (vec![1], DType::I64);
    let scale = Real(1.0 / (shape.head_dim as f64).sqrt());
    let causal = shape.causal;
    let class = KernelClass::Attention { shape, backward };
    if backward {
        let op = OpKind::AttentionGrad(op::AttentionGrad { causal, scale });
        let ins = [
            q.clone(),
            q.clone(),
            kv.clone(),
            kv.clone(),
            q.clone(),
            lse,
            state.clone(),
            state,
        ];
        recipe.kernel(op, class, dtype, &ins, &[q, kv.clone(), kv])
    } else {
        let op = OpKind::Attention(op::Attention { causal, scale });
        recipe.kernel(op, class, dtype, &[q.clone(), kv.clone(), kv], &[q, lse])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::program::workspace;

    #[test]
    fn a_ratio_is_the_middle_one_of_shapes_that_were_timed() {
        // 1.22, 1.09 and 1.10; a shape without a time is skipped.
        let any = [954.0, 1143.0, 2706.0, 500.0];
        let fixed = [1164.0, 1242.0, 2971.0, f64::NAN];
        let found = ratio(&any, &fixed).unwrap();
        assert!((found - 2971.0 / 2706.0).abs() < 1e-12, "{found}");
        assert_eq!(ratio(&any, &[f64::NAN; 4]), None);
        assert_eq!(ratio(&[], &[]), None);
        // Only one of the times exists.
        assert_eq!(ratio(&[0.0], &[1.0]), None);
    }

    /// The kernels of the grid belong to the kinds of their tables, and both kinds of accumulation
    /// share shapes, so that their ratio is known.
    #[test]
    fn matmuls_in_8_bits_are_filed_as_what_they_are() {
        let mut recipe = Recipe::new(1).unwrap();
        let scalings = [
            ScaleMode::Tensorwise,
            ScaleMode::Rowwise,
            ScaleMode::Blockwise,
        ];
        let cells = scaled_gemms(&mut recipe, &scalings);
        let program = recipe.finish();
        let mut shapes: BTreeMap<GemmKind, Vec<[u64; 3]>> = BTreeMap::new();
        for (cell, single) in &cells {
            let Cell::Gemm(kind, shape) = *cell else {
                panic!("only matmuls were asked for");
            };
            assert_eq!(program.kernels[single.kernel.index()].gemm_kind(), kind);
            shapes.entry(kind).or_default().push(shape);
        }
        assert_eq!(shapes.len(), 2 * scalings.len() - 1);
        for (kind, fast) in &shapes {
            let of = kind.float8.unwrap();
            let full = GemmKind {
                float8: Some(Float8Gemm {
                    fast_accum: false,
                    ..of
                }),
                ..*kind
            };
            assert!(fast.iter().all(|s| shapes[&full].contains(s)), "{kind:?}");
        }
    }

    /// The benches of both orders differ only in the order, and its workspace fits on a GPU with 40
    /// GB.
    #[test]
    fn orders_are_asked_of_the_same_kernels() {
        let program = |fixed: bool| {
            let mut recipe = Recipe::new(1).unwrap();
            if fixed {
                recipe.sum_in_fixed_order();
            }
            let kernels = ORDERS.map(|sizes| attend(&mut recipe, causal(sizes), true));
            let ends = kernels.map(|k| {
                let (at, bytes, _) = *k.operands.last().unwrap();
                at + bytes as u64
            });
            assert!(ends.into_iter().all(|end| end < ROOM));
            recipe.finish()
        };
        let (any, fixed) = (program(false), program(true));
        assert!(!any.meta.deterministic && fixed.meta.deterministic);
        assert_eq!(any.kernels, fixed.kernels);
        assert_eq!(any.kernels.len(), ORDERS.len());
        let gib = |p| workspace::of(p).0 as f64 / f64::from(1 << 30);
        // Two bytes per pair of the largest shape's tokens and head, 32 x 8,192 x 8,192, and little
        // more.
        assert!(gib(&any) < 0.5, "{}", gib(&any));
        assert!((4.0..4.5).contains(&gib(&fixed)), "{}", gib(&fixed));
    }
}
