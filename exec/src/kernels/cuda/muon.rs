//! Muon: kernels over elements around matmuls of cuBLASLt, matrix by matrix.
//!
//! A matrix is orthogonalized as it is stored: where it has more rows than columns, its transpose
//! is multiplied by it instead of it by its transpose, which makes the same square matrices.

use super::Kernels;
use super::blas::{self, Addresses};
use super::codegen::shard::muon::{Types, source};
use super::error::ErrorKind;
use super::gemm::GemmProblem;
use super::perform::words;
use super::prepare;
use super::ranges::{Work, in_groups};
use crate::kernels::error::OperandError;
use crate::operand::RawRange;
use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUstream};
use shardlab_plan::ir::{DType, NewtonSchulz, Shape};
use shardlab_plan::program::{GroupRun, Program, workspace};
use std::collections::{BTreeMap, BTreeSet};

/// A matrix that is updated, by addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Matrix {
    /// Rows and columns.
    sides: [u64; 2],
    types: Types,
    /// Parameter group.
    group: u8,
    weight: u64,
    grad: u64,
    /// Bytes between the pieces of a gradient.
    distance: u64,
    momentum: u64,
}

impl Matrix {
    const fn numel(&self) -> u64 {
        self.sides[0] * self.sides[1]
    }

    fn short_and_long(&self) -> [u64; 2] {
        let [rows, cols] = self.sides;
        [rows.min(cols), rows.max(cols)]
    }
}

/// A tensor of matrices and padding, as an optimizer's launch has it.
pub(super) struct Tensor<'a> {
    pub(super) weight: &'a RawRange,
    /// Gradient, and the number of its pieces.
    pub(super) grad: (&'a RawRange, u32),
    /// Momentum, and the first of its elements that belongs to the tensor.
    pub(super) momentum: Option<(&'a RawRange, u64)>,
    /// Weights of the launch before this tensor.
    pub(super) before: u64,
}

/// Appends the matrices of a tensor. `shapes` are those of the launch's matrices from here on, and
/// `[n]` for `n` elements of padding.
pub(super) fn matrices<'s>(
    all: &mut Vec<Matrix>,
    tensor: Tensor<'_>,
    shapes: &mut impl Iterator<Item = &'s Shape>,
    groups: &[GroupRun],
) -> Result<(), OperandError> {
    let Tensor {
        weight,
        grad: (grad, pieces),
        momentum,
        before,
    } = tensor;
    let n = weight.bytes as u64 / weight.dtype.size();
    let place = |r: &RawRange, element: u64| r.ptr as u64 + element * r.dtype.size();
    let mut start = 0;
    while start < n {
        let shape = shapes.next().map_or(&[0][..], |s| s.as_slice());
        let numel = shape.iter().product::<u64>();
        if numel == 0 || start + numel > n {
            return Err(OperandError::Size {
                what: "the matrices",
                needed: n as usize,
                found: (start + numel) as usize,
            });
        }
        if let [rows, cols] = *shape {
            let (state, used) = momentum.ok_or(OperandError::Unsupported)?;
            if !matches!(state.dtype, DType::F32 | DType::Bf16) {
                return Err(OperandError::Type(state.dtype));
            }
            let mut group = None;
            let mut several = false;
            in_groups(groups, before + start, numel, |g, _, _| {
                several |= group.replace(g).is_some();
            });
            if several {
                let message = "a matrix is in several parameter groups";
                return Err(OperandError::Shape(message.to_owned()));
            }
            all.push(Matrix {
                sides: [rows, cols],
                types: Types {
                    weight: weight.dtype,
                    grad: grad.dtype,
                    momentum: state.dtype,
                    pieces,
                },
                group: group.unwrap_or(0),
                weight: place(weight, start),
                grad: place(grad, start),
                distance: n * grad.dtype.size(),
                momentum: place(state, used + start),
            });
        }
        start += numel;
    }
    Ok(())
}

/// Matmuls of an iteration, by rows and columns, and the kernels around them, by types.
#[derive(Default)]
pub(super) struct Matmuls {
    of: BTreeMap<[u64; 2], [blas::Plan; 3]>,
    kernels: BTreeMap<Types, [CUfunction; 3]>,
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
    x: [u64; 2],
    gram: u64,
    square: u64,
    parts: u64,
    sum: u64,
}

impl Places {
    fn new(of: &Matrix) -> Self {
        let mut next = blas::WORKSPACE as u64;
        let mut take = |bytes: u64| {
            let at = next;
            next += prepare::rounded(bytes);
            at
        };
        let [before, after, gram, square] =
            NewtonSchulz::matrices(of.short_and_long()).map(&mut take);
        Self {
            x: [before, after],
            gram,
            square,
            parts: take(8 * of.numel().div_ceil(workspace::MUON_CHUNK)),
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
    shapes.filter_map(|s| s.try_into().ok()).collect()
}

/// Prepares the kernels around the matmuls of some matrices; returns their scratch bytes.
pub(super) fn prepare(k: &mut Kernels, matrices: &[Matrix]) -> Result<u64, ErrorKind> {
    let mut most = 0;
    for of in matrices {
        most = most.max(workspace::muon(of.short_and_long()));
        if !k.muon.kernels.contains_key(&of.types) {
            let source = source(of.types);
            let [momentum, scale, apply] =
                ["k0", "k1", "k2"].map(|name| k.loader.function(&source, name, 0));
            k.muon.kernels.insert(of.types, [momentum?, scale?, apply?]);
        }
    }
    if !matrices.is_empty() {
        prepare::fold_kernel(k, false)?;
    }
    Ok(most)
}

/// Returns an elementwise kernel's number of blocks of 256 threads with one element each.
fn blocks(n: u64) -> Result<u32, ErrorKind> {
    let blocks = u32::try_from(n.div_ceil(256)).ok().filter(|b| *b < 1 << 31);
    blocks.ok_or_else(|| ErrorKind::Launch("a matrix is too large for one launch".to_owned()))
}

/// Updates the matrices of a launch.
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
    Ok(())
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
    let fold = prepare::fold_kernel(k, false)?;
    let missing = || ErrorKind::Launch("it was not prepared for such a matrix".to_owned());
    let [momentum, scale, apply] = *k.muon.kernels.get(&of.types).ok_or_else(missing)?;
    let [gram, square, next] = k.muon.of.get(&of.sides).ok_or_else(missing)?;
    let places = Places::new(of);
    let at = |place: u64| scratch + place;
    let n = of.numel();
    let group = hyper + u64::from(of.group) * GROUP_BYTES;
    let parts = n.div_ceil(workspace::MUON_CHUNK);
    let chunks = blocks(parts * 256)?;
    let factor = u64::from(work.factor.to_bits());
    let [mut x, mut y] = places.x.map(at);
    let (g, s, sum, part) = (
        at(places.gram),
        at(places.square),
        at(places.sum),
        at(places.parts),
    );
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
    let workspace = scratch;
    let matmul = |plan: &blas::Plan, [a, b, before, c]: [u64; 4]| {
        let at = Addresses {
            a,
            b,
            inverses: None,
            bias: 0,
            before,
            c,
            workspace,
        };
        // SAFETY: the plan was made for matrices of these shapes, which the scratch memory holds.
        unsafe { k.blas.launch(plan, at, stream) }
    };
    let [rows, cols] = of.sides.map(|side| side as f64);
    let factors = [(rows / cols).max(1.0).sqrt(), 0.2 * rows.max(cols).sqrt()];
    let [original, matched] = factors.map(|f| u64::from((f as f32).to_bits()));
    // SAFETY: kernels take these arguments; operands are the caller's, and the rest is in the
    // scratch memory, which this stream uses alone.
    unsafe {
        words(momentum, (chunks, 256), &mut operands, stream)?;
        words(fold, (1, 1024), &mut [part, parts, sum, 0], stream)?;
        words(scale, (blocks(n)?, 256), &mut [sum, x, n], stream)?;
        for _ in 0..NewtonSchulz::STEPS {
            matmul(gram, [x, x, g, g])?;
            matmul(square, [g, g, g, s])?;
            let factors = if rows > cols { [x, s] } else { [s, x] };
            matmul(next, [factors[0], factors[1], x, y])?;
            std::mem::swap(&mut x, &mut y);
        }
        words(
            apply,
            (blocks(n)?, 256),
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

    fn range(at: usize, elements: usize, dtype: DType) -> RawRange {
        RawRange {
            ptr: std::ptr::without_provenance_mut(at),
            bytes: elements * dtype.size() as usize,
            dtype,
        }
    }

    /// A wide and a tall matrix with padding between them, whose momentum follows that of another
    /// tensor.
    #[test]
    fn matrices_of_a_tensor_have_places_and_groups() {
        let weight = range(1 << 20, 30, DType::F32);
        let grad = range(2 << 20, 60, DType::Bf16);
        let momentum = range(3 << 20, 100, DType::F32);
        let shapes: [Shape; 3] = [vec![2, 6], vec![8], vec![5, 2]].map(Shape::from_vec);
        let groups = [(0, 50), (1, 12), (2, 18)].map(|(group, numel)| GroupRun { group, numel });
        let tensor = || Tensor {
            weight: &weight,
            grad: (&grad, 2),
            momentum: Some((&momentum, 40)),
            before: 50,
        };
        let mut all = Vec::new();
        matrices(&mut all, tensor(), &mut shapes.iter(), &groups).unwrap();
        let [wide, tall] = all[..] else {
            panic!("{all:?}");
        };
        assert_eq!((wide.sides, wide.group, wide.weight), ([2, 6], 1, 1 << 20));
        assert_eq!((wide.grad, wide.distance), (2 << 20, 60));
        assert_eq!((tall.sides, tall.group), ([5, 2], 2));
        assert_eq!(tall.weight, (1 << 20) + 4 * 20);
        assert_eq!(tall.grad, (2 << 20) + 2 * 20);
        assert_eq!(tall.momentum, (3 << 20) + 4 * (40 + 20));
        let bad = matrices(&mut Vec::new(), tensor(), &mut shapes[..2].iter(), &groups);
        assert!(matches!(bad, Err(OperandError::Size { .. })), "{bad:?}");
        let groups = [(1, 51), (2, 29)].map(|(group, numel)| GroupRun { group, numel });
        let bad = matrices(&mut Vec::new(), tensor(), &mut shapes.iter(), &groups);
        assert!(
            bad.unwrap_err()
                .to_string()
                .contains("several parameter groups")
        );
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
