//! Muon: elementwise kernels and matmuls of cuBLASLt, matrix by matrix. A launch has whole
//! matrices, or does one part of the work on matrices of which ranks have rows.
//!
//! A matrix `X` is orthogonalized as it is stored, without a transposed copy: if it has more rows
//! than columns, the iterations use `XᵀX` instead of `XXᵀ`.

use super::Kernels;
use super::blas::{self, Addresses};
use super::codegen::blocks;
use super::codegen::shard::fold;
use super::codegen::shard::muon::{Types, norm_source, rows_source, source};
use super::error::ErrorKind;
use super::gemm::GemmProblem;
use super::ranges::{Matrix, Rows, Work};
use super::start::{Function, words};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use shardlab_plan::ir::{DType, MatrixShape, NewtonSchulz, OpKind, ShardOp};
use shardlab_plan::program::{Program, workspace};
use std::collections::{BTreeMap, BTreeSet};

/// Matmuls of an iteration, by rows and columns, and the kernels around them, by types.
#[derive(Default)]
pub(super) struct Matmuls {
    of: BTreeMap<[u64; 2], [blas::Plan; 3]>,
    kernels: BTreeMap<Types, [Function; 4]>,
    /// Sum of squares of a matrix, its total, and the division by the norm.
    norm: Option<[Function; 3]>,
    /// By type of weights: update of rows.
    rows: BTreeMap<DType, Function>,
}

// SAFETY: functions and descriptors belong to the context, not to a thread.
unsafe impl Send for Matmuls {}

/// Returns the matmuls of an iteration over a matrix `x`: its square matrix `g` (`x x^T` or
/// `x^T x`), `s = b g + c g g`, and `a x + s x` or `a x + x s`.
fn problems([rows, cols]: [u64; 2]) -> [GemmProblem; 3] {
    let (tall, short, long) = (rows > cols, rows.min(cols), rows.max(cols));
    let plain = GemmProblem {
        m: short,
        n: short,
        k: short,
        ta: false,
        tb: false,
        pitch: [short; 4],
        factors: [DType::Bf16; 2],
        scaling: None,
        result: DType::Bf16,
        bias: None,
        accumulate: true,
        align: [16; 4],
    };
    let gram = GemmProblem {
        k: long,
        ta: tall,
        tb: !tall,
        pitch: [cols, cols, short, short],
        accumulate: false,
        ..plain
    };
    let next = GemmProblem {
        m: rows,
        n: cols,
        pitch: [if tall { cols } else { short }, cols, cols, cols],
        ..plain
    };
    [gram, plain, next]
}

/// Places of the matrices of an iteration in the workspace, after that of the matmuls.
struct Places {
    /// The matrix, unless it is orthogonalized in place.
    before: u64,
    after: u64,
    gram: u64,
    square: u64,
    parts: u64,
    sum: u64,
}

impl Places {
    fn new(sides: [u64; 2], in_place: bool) -> Self {
        let mut next = blas::WORKSPACE as u64;
        let mut take = |bytes: u64| {
            let at = next;
            next += bytes.next_multiple_of(workspace::ALIGN);
            at
        };
        let [before, further @ ..] = NewtonSchulz::matrices(sides);
        let before = if in_place { 0 } else { take(before) };
        let [after, gram, square] = further.map(&mut take);
        Self {
            before,
            after,
            gram,
            square,
            parts: take(8 * (sides[0] * sides[1]).div_ceil(workspace::MUON_CHUNK)),
            sum: take(4),
        }
    }
}

/// Prepares the matmuls of all matrices of a program: ranks agree on them, and have different
/// matrices.
pub(super) fn prepare_matmuls(k: &mut Kernels, program: &Program) -> Result<(), ErrorKind> {
    let [a, b, c] = NewtonSchulz::COEFFICIENTS;
    for sides in all_sides(program) {
        let plan = |p: &GemmProblem| k.blas.plan(p, &k.cache, k.agree.as_deref());
        let [gram, square, next] = problems(sides);
        let (gram, mut square, mut next) = (plan(&gram)?, plan(&square)?, plan(&next)?);
        (square.alpha, square.beta) = (c, b);
        next.beta = a;
        k.muon.of.insert(sides, [gram, square, next]);
    }
    Ok(())
}

/// Returns the rows and columns of every matrix that Muon updates on some rank.
fn all_sides(program: &Program) -> BTreeSet<[u64; 2]> {
    let groups = program.groups.iter().filter(|g| g.muon);
    let params = groups.flat_map(|g| &g.params);
    let shapes = params.map(|p| &program.params[p.index()].shape[..]);
    let whole = shapes.filter_map(|s| s.try_into().ok());
    let gathered = program
        .kernels
        .iter()
        .filter_map(|k| match k.body.first()?.op {
            OpKind::Shard(ShardOp::Orthogonalize { matrix }) => Some([matrix.rows, matrix.cols]),
            _ => None,
        });
    whole.chain(gathered).collect()
}

/// Prepares the kernels of a launch around its matmuls; returns its scratch bytes.
pub(super) fn prepare(k: &mut Kernels, work: &Work) -> Result<u64, ErrorKind> {
    let mut most = 0;
    for of in &work.matrices {
        most = most.max(workspace::muon(of.short_and_long()));
        if !k.muon.kernels.contains_key(&of.types) {
            let source = source(of.types);
            let mut function = |name| Function::load(k, &source, name, 0);
            let [momentum, scale, apply] = [function("k0")?, function("k1")?, function("k2")?];
            let sum = Function::load(k, &fold(false), "k0", 0)?;
            k.muon
                .kernels
                .insert(of.types, [momentum, sum, scale, apply]);
        }
    }
    if let Some((matrix, _)) = work.orthogonalized {
        most = most.max(workspace::orthogonalize(matrix.short_and_long()));
        if k.muon.norm.is_none() {
            let source = norm_source();
            let squares = Function::load(k, &source, "k0", 0)?;
            let divide = Function::load(k, &source, "k1", 0)?;
            let sum = Function::load(k, &fold(false), "k0", 0)?;
            k.muon.norm = Some([squares, sum, divide]);
        }
    }
    for rows in &work.rows {
        if !k.muon.rows.contains_key(&rows.dtype) {
            let function = Function::load(k, &rows_source(rows.dtype), "k0", 0)?;
            k.muon.rows.insert(rows.dtype, function);
        }
    }
    Ok(most)
}

/// Updates the matrices of a launch, or does its part of that.
///
/// # Safety
/// As [`Kernels::launch`].
pub(super) unsafe fn launch(
    k: &mut Kernels,
    work: &Work,
    hyper: CUdeviceptr,
    scratch: CUdeviceptr,
    stream: CUstream,
) -> Result<(), ErrorKind> {
    for of in &work.matrices {
        // SAFETY: the caller's contract.
        unsafe { one(k, work, of, (hyper, scratch), stream) }?;
    }
    if let Some((matrix, at)) = work.orthogonalized {
        // SAFETY: the caller's contract.
        unsafe { orthogonalize(k, matrix, at, scratch, stream) }?;
    }
    for rows in &work.rows {
        // SAFETY: the caller's contract.
        unsafe { apply(k, rows, hyper, stream) }?;
    }
    Ok(())
}

fn missing() -> ErrorKind {
    ErrorKind::Launch("it was not prepared for such a matrix".to_owned())
}

/// Returns the factors of the learning rate of a matrix by `muon_adjust_lr`, as words.
fn adjusted([rows, cols]: [u64; 2]) -> [u64; 2] {
    let [rows, cols] = [rows as f64, cols as f64];
    let factors = [(rows / cols).max(1.0).sqrt(), 0.2 * rows.max(cols).sqrt()];
    factors.map(|f| u64::from((f as f32).to_bits()))
}

/// Runs the iterations on a matrix with these rows and columns, and returns the address of the
/// result: `x` and `y` are the matrix and as much memory.
///
/// # Safety
/// As [`Kernels::launch`].
unsafe fn iterate(
    k: &Kernels,
    sides: [u64; 2],
    [mut x, mut y]: [u64; 2],
    places: &Places,
    scratch: CUdeviceptr,
    stream: CUstream,
) -> Result<u64, ErrorKind> {
    let [gram, square, next] = k.muon.of.get(&sides).ok_or_else(missing)?;
    let (g, s) = (scratch + places.gram, scratch + places.square);
    let matmul = |plan: &blas::Plan, [a, b, before, c]: [u64; 4]| {
        let at = Addresses {
            a,
            b,
            inverses: None,
            bias: 0,
            before,
            c,
            workspace: scratch,
        };
        // SAFETY: the plan was made for matrices of these shapes, which the caller's memory holds.
        unsafe { k.blas.launch(plan, at, stream) }
    };
    for _ in 0..NewtonSchulz::STEPS {
        matmul(gram, [x, x, g, g])?;
        matmul(square, [g, g, g, s])?;
        let factors = if sides[0] > sides[1] { [x, s] } else { [s, x] };
        matmul(next, [factors[0], factors[1], x, y])?;
        std::mem::swap(&mut x, &mut y);
    }
    Ok(x)
}

/// Orthogonalizes a matrix in place.
///
/// # Safety
/// As [`Kernels::launch`].
unsafe fn orthogonalize(
    k: &Kernels,
    matrix: MatrixShape,
    at: u64,
    scratch: CUdeviceptr,
    stream: CUstream,
) -> Result<(), ErrorKind> {
    // The result of an odd number of iterations is not where the matrix was.
    const _: () = assert!(NewtonSchulz::STEPS % 2 == 1);
    let [squares, add, divide] = k.muon.norm.ok_or_else(missing)?;
    let sides = [matrix.rows, matrix.cols];
    let places = Places::new(sides, true);
    let n = matrix.numel();
    let parts = n.div_ceil(workspace::MUON_CHUNK);
    let chunks = blocks(n as usize, workspace::MUON_CHUNK as usize)?;
    let each = blocks(n as usize, 256)?;
    let [x, part, sum] = [places.after, places.parts, places.sum].map(|place| scratch + place);
    // SAFETY: kernels take these arguments; the matrix is the caller's, and the rest is in the
    // scratch memory, which this stream uses alone.
    unsafe {
        words(squares, (chunks, 256), &mut [at, part, n], stream)?;
        words(add, (1, 1024), &mut [part, parts, sum, 0], stream)?;
        words(divide, (each, 256), &mut [sum, at, x, n], stream)?;
        iterate(k, sides, [x, at], &places, scratch, stream)?;
    }
    Ok(())
}

/// Updates rows of a matrix.
///
/// # Safety
/// As [`Kernels::launch`].
unsafe fn apply(
    k: &Kernels,
    rows: &Rows,
    hyper: CUdeviceptr,
    stream: CUstream,
) -> Result<(), ErrorKind> {
    let function = *k.muon.rows.get(&rows.dtype).ok_or_else(missing)?;
    let [original, matched] = adjusted([rows.matrix.rows, rows.matrix.cols]);
    let group = hyper + u64::from(rows.group) * GROUP_BYTES;
    let each = blocks(rows.numel as usize, 256)?;
    let mut operands = [
        group,
        rows.weight,
        rows.update,
        original,
        matched,
        rows.numel,
    ];
    // SAFETY: the kernel takes these arguments; operands are the caller's.
    unsafe { words(function, (each, 256), &mut operands, stream) }
}

/// Updates a matrix.
///
/// # Safety
/// As [`Kernels::launch`].
unsafe fn one(
    k: &mut Kernels,
    work: &Work,
    of: &Matrix,
    (hyper, scratch): (CUdeviceptr, CUdeviceptr),
    stream: CUstream,
) -> Result<(), ErrorKind> {
    let [momentum, add, scale, apply] = *k.muon.kernels.get(&of.types).ok_or_else(missing)?;
    let places = Places::new(of.sides, false);
    let n = of.numel();
    let group = hyper + u64::from(of.group) * GROUP_BYTES;
    let parts = n.div_ceil(workspace::MUON_CHUNK);
    let chunks = blocks(n as usize, workspace::MUON_CHUNK as usize)?;
    let each = blocks(n as usize, 256)?;
    let factor = u64::from(work.factor.to_bits());
    let [x, y, part, sum] =
        [places.before, places.after, places.parts, places.sum].map(|place| scratch + place);
    let mut operands = [
        hyper,
        group,
        work.square,
        of.grad,
        of.distance,
        factor,
        of.momentum,
        x,
        part,
        n,
    ];
    let [original, matched] = adjusted(of.sides);
    // SAFETY: kernels take these arguments; operands are the caller's, and the rest is in the
    // scratch memory, which this stream uses alone.
    unsafe {
        words(momentum, (chunks, 256), &mut operands, stream)?;
        words(add, (1, 1024), &mut [part, parts, sum, 0], stream)?;
        words(scale, (each, 256), &mut [sum, x, n], stream)?;
        let x = iterate(k, of.sides, [x, y], &places, scratch, stream)?;
        words(
            apply,
            (each, 256),
            &mut [group, of.weight, x, original, matched, n],
            stream,
        )
    }
}

/// Bytes of the settings of a parameter group ([`super::HyperBlock`]).
const GROUP_BYTES: u64 =
    (size_of::<super::HyperBlock>() / shardlab_plan::config::MAX_PARAM_GROUPS) as u64;

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario;
    use std::path::Path;

    /// Under fsdp2, every rank orthogonalizes every matrix.
    #[test]
    fn gathered_matrices_have_matmuls() {
        let sets = ["train.optimizer=muon".to_owned()];
        let sides = |name: &str| {
            let scenario = scenario::load(Path::new(name), &sets).unwrap();
            all_sides(&shardlab_plan::plan(&scenario).unwrap())
        };
        assert_eq!(sides("small-fsdp2"), sides("small-native"));
    }

    /// Every rank prepares the matmuls of all ranks' matrices, since ranks agree on them in turn.
    #[test]
    fn ranks_prepare_the_same_matmuls() {
        let sets = ["train.optimizer=muon".to_owned()];
        let scenario = scenario::load(Path::new("small-native"), &sets).unwrap();
        let program = shardlab_plan::plan(&scenario).unwrap();
        let all = all_sides(&program);
        let ranks = program.meta.mesh.world();
        let mut owned = BTreeSet::new();
        for rank in 0..ranks {
            for shape in program.matrix_shapes(rank).unwrap().values().flatten() {
                owned.extend(<[u64; 2]>::try_from(&shape[..]).ok());
            }
        }
        assert!(ranks > 1 && all.len() > 1, "{ranks} {all:?}");
        assert_eq!(owned, all);
    }

    /// Stored row by row, `x^T` is `x` with the other flag.
    #[test]
    fn matmuls_multiply_a_matrix_as_it_is_stored() {
        for (sides, gram_flags) in [([64, 176], (false, true)), ([176, 64], (true, false))] {
            let [gram, square, next] = problems(sides);
            let size = |p: &GemmProblem| [p.m, p.n, p.k];
            assert_eq!(size(&gram), [64, 64, 176]);
            assert_eq!((gram.ta, gram.tb), gram_flags);
            assert_eq!(gram.pitch, [sides[1], sides[1], 64, 64]);
            assert_eq!((size(&square), square.pitch), ([64; 3], [64; 4]));
            assert_eq!(size(&next), [sides[0], sides[1], 64]);
            assert_eq!(next.pitch, [64, sides[1], sides[1], sides[1]]);
            let flops = [gram, square, next].map(|p| 2 * p.m * p.n * p.k);
            let steps = NewtonSchulz::STEPS * flops.iter().sum::<u64>();
            assert_eq!(steps, NewtonSchulz::matrix_flops([64, 176]));
        }
    }
}
