//! Grouped GEMMs, back to back: one matmul per expert, over equal numbers of rows.

use super::Measured;
use super::bench::Bench;
use super::grid::time;
use super::recipe::{Recipe, Single};
use crate::calibrate::grid::GroupedRows;
use shardlab_plan::ir::{DType, KernelClass, OpKind, op};

/// Experts of a rank.
const EXPERTS: [u64; 3] = [8, 32, 128];
/// Rows of an expert.
const ROWS: [u64; 6] = [64, 128, 256, 512, 1024, 2048];
/// Results and inner sizes of an expert's matrices: gate and up, and down, of Qwen3-30B-A3B,
/// gpt-oss, DeepSeek-V3 and Mixtral 8x7B.
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
/// Maximum bytes of operands, and maximum floating-point operations of a kernel (a twentieth of a
/// second at the peak of an H100).
const ROOM: u64 = 5 << 30;
const WORK: u64 = 5 << 42;
/// Number of kernels between two checks of the time, and the share of the measuring time after
/// which no more begin.
const PER_CHECK: usize = 16;
const SHARE: f64 = 0.65;

/// Sizes of a grouped GEMM: experts, rows of an expert, and n and k of its matrix.
type Sizes = [u64; 4];

/// A kernel of the grid.
struct Cell {
    sizes: Sizes,
    weight_gradient: bool,
    single: Single,
}

/// Measures grouped GEMMs in bf16: rows times matrices in both layouts of these, and weight
/// gradients.
pub(super) fn measure(bench: &Bench<'_>, m: &mut Measured) -> Result<(), String> {
    let times = bench.run(cells, |rank, cells| {
        rank.say("grouped matmuls");
        let mut times = Vec::new();
        for (n, cell) in cells.iter().enumerate() {
            let rest = format!("{} kernels of {}", cells.len() - n, cells.len());
            if n > 0 && n % PER_CHECK == 0 && rank.late(SHARE, &rest)? {
                break;
            }
            // Kernels before have written there.
            rank.write(&cell.single, OFFSETS, &offsets(cell.sizes));
            times.push((cell.weight_gradient, cell.sizes, time(rank, &cell.single)?));
        }
        Ok(times)
    })?;
    m.grouped = tables(times);
    Ok(())
}

/// The operand that holds the offsets of experts.
const OFFSETS: usize = 2;

/// Returns where the rows of each expert begin, and the end of the last one, as 64-bit integers.
fn offsets([experts, rows, ..]: Sizes) -> Vec<u8> {
    let ends = (0..=experts).map(|e| (e * rows) as i64);
    ends.flat_map(i64::to_le_bytes).collect()
}

fn cells(recipe: &mut Recipe) -> Vec<Cell> {
    let mut cells = Vec::new();
    for experts in EXPERTS {
        for each in ROWS {
            for [n, k] in MATRICES {
                let (rows, matrices) = (experts * each, experts * n * k);
                let bytes = 2 * (rows * (n + k) + matrices);
                if bytes > ROOM || 2 * rows * n * k > WORK {
                    continue;
                }
                let sizes = [experts, each, n, k];
                for tb in [true, false] {
                    let single = grouped(recipe, sizes, tb);
                    cells.push(Cell {
                        sizes,
                        weight_gradient: false,
                        single,
                    });
                }
                cells.push(Cell {
                    sizes,
                    weight_gradient: true,
                    single: weight_gradient(recipe, sizes),
                });
            }
        }
    }
    cells
}

const BF16: DType = DType::Bf16;

fn grouped(recipe: &mut Recipe, [experts, each, n, k]: Sizes, tb: bool) -> Single {
    let rows = experts * each;
    let matrix = if tb { [n, k] } else { [k, n] };
    let op = OpKind::GroupedGemm(op::GroupedGemm { tb, routed: None });
    let class = KernelClass::GroupedGemm {
        rows,
        n,
        k,
        experts,
        weight_gradient: false,
    };
    let ins = [
        (vec![rows, k], BF16),
        (vec![experts, matrix[0], matrix[1]], BF16),
        (vec![experts + 1], DType::I64),
    ];
    recipe.kernel(op, class, BF16, &ins, &[(vec![rows, n], BF16)])
}

fn weight_gradient(recipe: &mut Recipe, [experts, each, n, k]: Sizes) -> Single {
    let rows = experts * each;
    let op = OpKind::GroupedGemmWeightGrad(op::GroupedGemmWeightGrad { routed: None });
    let class = KernelClass::GroupedGemm {
        rows,
        n,
        k,
        experts,
        weight_gradient: true,
    };
    let ins = [
        (vec![rows, n], BF16),
        (vec![rows, k], BF16),
        (vec![experts + 1], DType::I64),
    ];
    recipe.kernel(op, class, BF16, &ins, &[(vec![experts, n, k], BF16)])
}

/// Returns one table per direction; the mean over layouts, both of which occur in a step.
fn tables(times: Vec<(bool, Sizes, f64)>) -> Vec<GroupedRows> {
    let measured = |weight_gradient: bool| {
        let mut rows: Vec<(Sizes, Vec<f64>)> = Vec::new();
        let of = |t: &&(bool, Sizes, f64)| t.0 == weight_gradient && t.2.is_finite();
        for &(_, sizes, us) in times.iter().filter(of) {
            match rows.iter_mut().find(|r| r.0 == sizes) {
                Some(row) => row.1.push(us),
                None => rows.push((sizes, vec![us])),
            }
        }
        let mean = |all: Vec<f64>| all.iter().sum::<f64>() / all.len() as f64;
        GroupedRows {
            dtype: BF16,
            weight_gradient,
            rows: rows.into_iter().map(|(s, all)| (s, mean(all))).collect(),
        }
    };
    let tables = [false, true].map(measured);
    tables.into_iter().filter(|t| !t.rows.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::cuda::recipe::MEMORY;

    #[test]
    fn the_grid_fits_into_the_memory_of_a_bench_and_has_every_direction() {
        let mut recipe = Recipe::new(1).unwrap();
        let cells = cells(&mut recipe);
        assert!((200..600).contains(&cells.len()), "{}", cells.len());
        for cell in &cells {
            let (at, bytes, _) = *cell.single.operands.last().unwrap();
            assert!(at + (bytes as u64) < MEMORY, "{:?}", cell.sizes);
            let (_, bytes, dtype) = cell.single.operands[OFFSETS];
            assert_eq!(dtype, DType::I64);
            assert_eq!(bytes, offsets(cell.sizes).len());
        }
        let gradients = cells.iter().filter(|c| c.weight_gradient).count();
        assert_eq!(3 * gradients, cells.len());
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
        let found = tables(vec![
            (false, sizes, 10.0),
            (false, sizes, 20.0),
            (true, sizes, 30.0),
            (true, [8, 128, 1536, 2048], f64::NAN),
        ]);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].rows, [(sizes, 15.0)]);
        assert_eq!(found[1].rows, [(sizes, 30.0)]);
    }
}
