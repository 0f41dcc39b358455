//! Grouped GEMMs, run back to back: one matmul per expert, over equal numbers of rows.

use super::Measured;
use super::bench::Bench;
use super::grid::time;
use super::recipe::{Recipe, Single};
use crate::calibrate::grid::{GroupedKind, GroupedRows, GroupedSizes};
use shardlab_plan::ir::{DType, Float8Gemm, GemmKind, KernelClass, OpKind, ScaleMode, op};
use std::collections::BTreeMap;

/// Experts of a rank.
const EXPERTS: [u64; 3] = [8, 32, 128];
/// Rows of an expert.
const ROWS: [u64; 6] = [64, 128, 256, 512, 1024, 2048];
/// The same for 8-bit matmuls, whose rates follow those in 16 bits between these sizes.
const FLOAT8_ROWS: [u64; 3] = [128, 512, 2048];
/// Sizes n and k of an expert's matrices: gate and up, and down, of Qwen3-30B-A3B, gpt-oss,
/// DeepSeek-V3 and Mixtral 8x7B.
const MATRICES: [[u64; 2]; 8] = [
    [1536, 2048],
    [2048, 768],
    [5760, 2880],
    [2880, 2880],
    [4096, 7168],
    [7168, 2048],
    [28_672, 4096],
    [4096, 14_336],
];
/// Maximum number of operand bytes, and maximum number of floating-point operations of a kernel
/// (1/20 s at the peak of an H100).
const ROOM: u64 = 5 << 30;
const WORK: u64 = 5 << 42;
/// Number of kernels between two checks of the time, and share of the measuring time after which no
/// further kernels start.
const PER_CHECK: usize = 16;
const SHARE: f64 = 0.65;

/// A kernel of the grid.
struct Cell {
    kind: GroupedKind,
    sizes: GroupedSizes,
    single: Single,
}

/// Measures grouped GEMMs: rows times matrices in bf16, for both layouts of the matrices, and
/// weight gradients. On GPUs with 8-bit matmuls, also measures those, last.
pub(super) fn measure(bench: &Bench<'_>, m: &mut Measured) -> Result<(), String> {
    let float8 = m.scalings.contains(&ScaleMode::Tensorwise);
    let all = |recipe: &mut Recipe| {
        let mut all = cells(recipe);
        if float8 {
            all.extend(scaled_cells(recipe));
        }
        all
    };
    let times = bench.run(all, |rank, cells| {
        rank.say("grouped matmuls");
        let mut times = Vec::new();
        for (n, cell) in cells.iter().enumerate() {
            let rest = format!("{} kernels of {}", cells.len() - n, cells.len());
            if n > 0 && n % PER_CHECK == 0 && rank.late(SHARE, &rest)? {
                break;
            }
            // Earlier kernels have written there.
            rank.write(&cell.single, cell.offsets(), &offsets(cell.sizes));
            times.push((cell.kind, cell.sizes, time(rank, &cell.single)?));
        }
        Ok(times)
    })?;
    m.grouped = tables(times);
    Ok(())
}

impl Cell {
    /// Returns the operand that holds the offsets of experts, which is the last one that is read.
    fn offsets(&self) -> usize {
        self.single.reads as usize - 1
    }
}

/// Returns where the rows of each expert start, and the end of the last one, as 64-bit integers.
fn offsets([experts, rows, ..]: GroupedSizes) -> Vec<u8> {
    let ends = (0..=experts).map(|e| (e * rows) as i64);
    ends.flat_map(i64::to_le_bytes).collect()
}

/// Returns the sizes of the grid whose operands fit, as if they were in bf16.
fn sizes(rows: &[u64]) -> impl Iterator<Item = GroupedSizes> {
    let each = |experts| rows.iter().map(move |&each| (experts, each));
    let all = EXPERTS.into_iter().flat_map(each);
    let all = all.flat_map(|(experts, each)| MATRICES.map(|[n, k]| [experts, each, n, k]));
    all.filter(|&[experts, each, n, k]| {
        let (rows, matrices) = (experts * each, experts * n * k);
        2 * (rows * (n + k) + matrices) <= ROOM && 2 * rows * n * k <= WORK
    })
}

fn cells(recipe: &mut Recipe) -> Vec<Cell> {
    let mut cells = Vec::new();
    for sizes in sizes(&ROWS) {
        let mut add = |gradient, single| {
            cells.push(Cell {
                kind: (GemmKind::of(BF16), gradient),
                sizes,
                single,
            });
        };
        add(None, grouped(recipe, sizes, true));
        add(None, grouped(recipe, sizes, false));
        add(Some(BF16), weight_gradient(recipe, sizes));
    }
    cells
}

/// Returns 8-bit matmuls: those of forward, with the precision of tensor cores, and those of
/// gradients, with float32 accumulation.
fn scaled_cells(recipe: &mut Recipe) -> Vec<Cell> {
    let mut cells = Vec::new();
    for sizes in sizes(&FLOAT8_ROWS) {
        for fast_accum in [true, false] {
            let kind = (float8(fast_accum), None);
            let single = scaled(recipe, sizes, fast_accum);
            cells.push(Cell {
                kind,
                sizes,
                single,
            });
        }
        cells.push(Cell {
            kind: (float8(false), Some(BF16)),
            sizes,
            single: scaled_weight_gradient(recipe, sizes),
        });
    }
    cells
}

/// Returns the kind of 8-bit matmuls of experts: each factor has one scale.
fn float8(fast_accum: bool) -> GemmKind {
    GemmKind {
        dtype: DType::F8E4m3,
        float8: Some(Float8Gemm {
            scaling: ScaleMode::Tensorwise,
            fast_accum,
        }),
    }
}

const BF16: DType = DType::Bf16;

fn class([experts, each, n, k]: GroupedSizes, weight_gradient: bool) -> KernelClass {
    KernelClass::GroupedGemm {
        rows: experts * each,
        n,
        k,
        experts,
        weight_gradient,
    }
}

fn grouped(recipe: &mut Recipe, sizes: GroupedSizes, tb: bool) -> Single {
    let [experts, each, n, k] = sizes;
    let rows = experts * each;
    let matrix = if tb { [n, k] } else { [k, n] };
    let op = OpKind::GroupedGemm(op::GroupedGemm { tb, routed: None });
    let ins = [
        (vec![rows, k], BF16),
        (vec![experts, matrix[0], matrix[1]], BF16),
        (vec![experts + 1], DType::I64),
    ];
    recipe.kernel(
        op,
        class(sizes, false),
        BF16,
        &ins,
        &[(vec![rows, n], BF16)],
    )
}

fn weight_gradient(recipe: &mut Recipe, sizes: GroupedSizes) -> Single {
    let [experts, each, n, k] = sizes;
    let rows = experts * each;
    let op = OpKind::GroupedGemmWeightGrad(op::GroupedGemmWeightGrad { routed: None });
    let ins = [
        (vec![rows, n], BF16),
        (vec![rows, k], BF16),
        (vec![experts + 1], DType::I64),
    ];
    recipe.kernel(
        op,
        class(sizes, true),
        BF16,
        &ins,
        &[(vec![experts, n, k], BF16)],
    )
}

/// Adds an 8-bit matmul of rows. With float32 accumulation, it is the one of their gradient, which
/// is e5m2.
fn scaled(recipe: &mut Recipe, sizes: GroupedSizes, fast: bool) -> Single {
    let [experts, each, n, k] = sizes;
    let rows = experts * each;
    let op = OpKind::ScaledGroupedGemm(op::ScaledGroupedGemm { fast, routed: None });
    let first = if fast { DType::F8E4m3 } else { DType::F8E5m2 };
    let ins = [
        (vec![rows, k], first),
        (vec![experts, n, k], DType::F8E4m3),
        (vec![1, 1], DType::F32),
        (vec![1, 1], DType::F32),
        (vec![experts + 1], DType::I64),
    ];
    let out = (vec![rows, n], BF16);
    recipe.kernel(op, class(sizes, false), first, &ins, &[out])
}

/// Adds an 8-bit weight gradient, whose factors have the rows of experts as columns.
fn scaled_weight_gradient(recipe: &mut Recipe, sizes: GroupedSizes) -> Single {
    let [experts, each, n, k] = sizes;
    let rows = experts * each;
    let op = op::ScaledGroupedGemmWeightGrad { routed: None };
    let ins = [
        (vec![n, rows], DType::F8E5m2),
        (vec![k, rows], DType::F8E4m3),
        (vec![1, 1], DType::F32),
        (vec![1, 1], DType::F32),
        (vec![experts + 1], DType::I64),
    ];
    recipe.kernel(
        OpKind::ScaledGroupedGemmWeightGrad(op),
        class(sizes, true),
        DType::F8E5m2,
        &ins,
        &[(vec![experts, n, k], BF16)],
    )
}

/// Returns one table per kind, with the mean over both layouts, since both occur in a step.
fn tables(times: Vec<(GroupedKind, GroupedSizes, f64)>) -> Vec<GroupedRows> {
    let mut by_kind: BTreeMap<GroupedKind, BTreeMap<GroupedSizes, Vec<f64>>> = BTreeMap::new();
    for (kind, sizes, us) in times.into_iter().filter(|t| t.2.is_finite()) {
        let rows = by_kind.entry(kind).or_default();
        rows.entry(sizes).or_default().push(us);
    }
    let mean = |all: Vec<f64>| all.iter().sum::<f64>() / all.len() as f64;
    let tables = by_kind.into_iter().map(|(kind, rows)| GroupedRows {
        kind,
        rows: rows.into_iter().map(|(s, all)| (s, mean(all))).collect(),
    });
    tables.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::cuda::recipe::MEMORY;

    #[test]
    fn the_grid_fits_into_the_memory_of_a_bench_and_has_every_direction() {
        let mut recipe = Recipe::new(1).unwrap();
        let mut cells = cells(&mut recipe);
        let count = cells.len();
        assert!((200..600).contains(&count), "{count}");
        cells.extend(scaled_cells(&mut recipe));
        let program = recipe.finish();
        for cell in &cells {
            let kernel = &program.kernels[cell.single.kernel.index()];
            assert_eq!(kernel.gemm_kind(), cell.kind.0);
            let (at, bytes, _) = *cell.single.operands.last().unwrap();
            assert!(at + (bytes as u64) < MEMORY, "{:?}", cell.sizes);
            let (_, bytes, dtype) = cell.single.operands[cell.offsets()];
            assert_eq!(dtype, DType::I64);
            assert_eq!(bytes, offsets(cell.sizes).len());
        }
        let gradients = cells.iter().filter(|c| c.kind.1.is_some()).count();
        assert_eq!(3 * gradients, cells.len());
        let kinds: std::collections::BTreeSet<GroupedKind> = cells.iter().map(|c| c.kind).collect();
        assert_eq!(kinds.len(), 5);
    }

    #[test]
    fn offsets_are_multiples_of_the_rows_of_an_expert() {
        let ends: Vec<i64> = offsets([3, 5, 1, 1])
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(ends, [0, 5, 10, 15]);
    }

    #[test]
    fn layouts_are_averaged_and_directions_apart() {
        let sizes = [8, 64, 1536, 2048];
        let bf16 = |gradient| (GemmKind::of(BF16), gradient);
        let found = tables(vec![
            (bf16(None), sizes, 10.0),
            (bf16(None), sizes, 20.0),
            (bf16(Some(BF16)), sizes, 30.0),
            (bf16(Some(BF16)), [8, 128, 1536, 2048], f64::NAN),
            ((float8(true), None), sizes, 7.0),
        ]);
        let rows = |kind| {
            let of: Vec<_> = found.iter().filter(|t| t.kind == kind).collect();
            assert_eq!(of.len(), 1);
            of[0].rows.clone()
        };
        assert_eq!(found.len(), 3);
        assert_eq!(rows(bf16(None)), [(sizes, 15.0)]);
        assert_eq!(rows(bf16(Some(BF16))), [(sizes, 30.0)]);
        assert_eq!(rows((float8(true), None)), [(sizes, 7.0)]);
    }
}
