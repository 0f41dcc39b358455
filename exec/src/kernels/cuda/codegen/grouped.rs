//! Grouped matmuls: one per expert, with numbers of rows that are only known on the device.

mod plain;
#[cfg(test)]
mod tests;
mod wgmma;

use super::epilogue::Epilogue;
use super::hopper;
use super::tables::{contiguous, slots};
use super::{CodegenError, Module, Request};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Slot, op};

/// A grouped matmul `a, b, offsets -> c`.
struct Grouped<'a> {
    a: &'a Slot,
    b: &'a Slot,
    c: &'a Slot,
    /// First row of each expert, and the end of the last, as an array in C.
    offsets: String,
    experts: usize,
    /// Rows of all experts.
    rows: usize,
    /// Columns of the results.
    n: usize,
    over: Over,
    /// Of 8-bit factors.
    scaled: Option<Scaled>,
    epilogue: Option<Behind>,
}

/// Elementwise code behind a matmul.
struct Behind {
    code: Epilogue,
    /// It combines the two halves of the columns.
    paired: bool,
}

/// What 8-bit factors have in addition. The inner dimension of each is contiguous: the factors of a
/// weight gradient are stored as `[m, rows]` and `[n, rows]`.
struct Scaled {
    /// The product of the reciprocals of their scales, in C.
    inverse: String,
    /// Whether sums may have the precision of tensor cores.
    fast: bool,
}

/// What a result sums over.
#[derive(Clone, Copy)]
enum Over {
    /// The `k` columns of `a`: a row of the result for each of its rows. The matrices of experts
    /// are `[n, k]` if `tb`, or `[k, n]`.
    Columns { k: usize, tb: bool },
    /// The rows of an expert: a result `[m, n]` for each expert.
    Rows { m: usize },
}

/// Generates `a, b, offsets -> c`.
pub(in crate::kernels) fn forward(
    req: &Request<'_>,
    op: &BodyOp,
    tb: bool,
) -> Result<Module, CodegenError> {
    let ([a, b, offsets], [c]) = slots::<3, 1>(op)?;
    over_columns(req, [a, b, c, offsets], tb, None, None)
}

/// Generates a matmul of experts and its elementwise epilogue, over the rows and columns of its
/// result or of a half of the columns.
pub(super) fn with_epilogue(
    req: &Request<'_>,
    op: &BodyOp,
    epilogue: &[BodyOp],
) -> Result<Module, CodegenError> {
    let OpKind::GroupedGemm(op::GroupedGemm { tb, .. }) = op.op else {
        return Err(CodegenError::new("not a matmul of experts"));
    };
    hopper::has_epilogues(req.target)?;
    let ([a, b, offsets], [c]) = slots::<3, 1>(op)?;
    let (rows, n) = strides::matrix(c);
    let made = epilogue.first().and_then(|op| op.outputs.first());
    let paired = made.is_some_and(|made| 2 * strides::numel(made) == rows * n);
    let columns = if paired { n / 2 } else { n };
    let code = Epilogue::generate(req, rows * columns, paired.then_some(columns as u64))?;
    let behind = Behind { code, paired };
    over_columns(req, [a, b, c, offsets], tb, None, Some(behind))
}

/// Generates `a, b, offsets -> d_w`.
pub(in crate::kernels) fn weight_grad(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let ([a, b, offsets], [c]) = slots::<3, 1>(op)?;
    over_rows(req, [a, b, c, offsets], None)
}

/// Generates `a, b, inverse_a, inverse_b, offsets -> c` of 8-bit factors, with matrices `[n, k]`.
pub(in crate::kernels) fn scaled(
    req: &Request<'_>,
    op: &BodyOp,
    fast: bool,
) -> Result<Module, CodegenError> {
    let ([a, b, one, other, offsets], [c]) = slots::<5, 1>(op)?;
    let inverse = inverse(req, [one, other])?;
    over_columns(
        req,
        [a, b, c, offsets],
        true,
        Some(Scaled { inverse, fast }),
        None,
    )
}

/// Generates `a, b, inverse_a, inverse_b, offsets -> d_w` of transposed 8-bit factors.
pub(in crate::kernels) fn scaled_weight_grad(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<Module, CodegenError> {
    let ([a, b, one, other, offsets], [c]) = slots::<5, 1>(op)?;
    let inverse = inverse(req, [one, other])?;
    let fast = false;
    over_rows(req, [a, b, c, offsets], Some(Scaled { inverse, fast }))
}

/// Generates a matmul that sums over columns. Matrices are `[n, k]` with `tb`, else `[k, n]`.
fn over_columns(
    req: &Request<'_>,
    of: [&Slot; 4],
    tb: bool,
    scaled: Option<Scaled>,
    epilogue: Option<Behind>,
) -> Result<Module, CodegenError> {
    let [a, b, c, _] = of;
    let ((rows, k), (_, n)) = (strides::matrix(a), strides::matrix(c));
    let [experts, one, two] = matrices(b)?;
    if (if tb { [n, k] } else { [k, n] }) != [one, two] || strides::numel(c) != rows * n {
        return Err(mismatch(a, b));
    }
    let over = Over::Columns { k, tb };
    generate(req, of, [experts, rows, n], over, scaled, epilogue)
}

/// Generates a matmul that sums over the rows of an expert, which are columns of 8-bit factors.
fn over_rows(
    req: &Request<'_>,
    of: [&Slot; 4],
    scaled: Option<Scaled>,
) -> Result<Module, CodegenError> {
    let [a, b, c, _] = of;
    let size = |factor: &Slot| match strides::matrix(factor) {
        (outer, rows) if scaled.is_some() => (rows, outer),
        rows_and_outer => rows_and_outer,
    };
    let ((rows, m), (other, n)) = (size(a), size(b));
    let [experts, one, two] = matrices(c)?;
    if rows != other || [m, n] != [one, two] {
        return Err(mismatch(a, b));
    }
    generate(req, of, [experts, rows, n], Over::Rows { m }, scaled, None)
}

/// Returns the product of the reciprocals of two scales, in C.
fn inverse(req: &Request<'_>, of: [&Slot; 2]) -> Result<String, CodegenError> {
    let mut factors = Vec::new();
    for slot in of {
        if req.arg(slot.place)?.dtype != DType::F32 || strides::numel(slot) != 1 {
            return Err(CodegenError::new("a scale in float32 for each factor"));
        }
        factors.push(format!("{}[0]", contiguous(req, slot)?));
    }
    Ok(factors.join(" * "))
}

fn generate(
    req: &Request<'_>,
    [a, b, c, offsets]: [&Slot; 4],
    [experts, rows, n]: [usize; 3],
    over: Over,
    scaled: Option<Scaled>,
    epilogue: Option<Behind>,
) -> Result<Module, CodegenError> {
    let ints = req.arg(offsets.place)?.dtype == DType::I64;
    if !ints || strides::numel(offsets) != experts + 1 {
        return Err(CodegenError::new("an offset for each expert, and the end"));
    }
    let [ta, tb] = [req.arg(a.place)?.dtype, req.arg(b.place)?.dtype];
    match scaled {
        None if ta != tb => return Err(CodegenError::new("factors of one type")),
        Some(_) if !ta.is_float8() || !tb.is_float8() => {
            return Err(CodegenError::new("factors in 8 bits"));
        }
        _ => {}
    }
    let offsets = contiguous(req, offsets)?;
    let it = Grouped {
        a,
        b,
        c,
        offsets,
        experts,
        rows,
        n,
        over,
        scaled,
        epilogue,
    };
    match (wgmma::fits(req, &it)?, &it.epilogue) {
        (true, _) => wgmma::generate(req, &it),
        (false, None) => plain::generate(req, &it),
        (false, Some(_)) => Err(CodegenError::new(
            "factors are not in 16 bits, row after row, at addresses that tensor copies take",
        )),
    }
}

/// Returns the number and the size of matrices, one per expert.
fn matrices(slot: &Slot) -> Result<[usize; 3], CodegenError> {
    match slot.shape[..] {
        [e, a, b] => Ok([e, a, b].map(|n| n as usize)),
        _ => Err(CodegenError::new("a matrix per expert")),
    }
}

fn mismatch(a: &Slot, b: &Slot) -> CodegenError {
    CodegenError::new(format!("{:?} by {:?}", a.shape, b.shape))
}

impl Grouped<'_> {
    fn is_paired(&self) -> bool {
        self.epilogue.as_ref().is_some_and(|behind| behind.paired)
    }

    /// Returns whether 16 bytes of a factor are accessed at once: its rows start at multiples of
    /// that, and end there.
    fn is_aligned(&self, req: &Request<'_>) -> Result<bool, CodegenError> {
        let [inner, outer] = match (self.over, &self.scaled) {
            (Over::Columns { k, .. }, Some(_)) => [k; 2],
            (Over::Columns { k, .. }, None) => [k, self.n],
            (Over::Rows { .. }, Some(_)) => [self.rows; 2],
            (Over::Rows { m }, None) => [m, self.n],
        };
        let mut aligned = true;
        for slot in [self.a, self.b] {
            let arg = req.arg(slot.place)?;
            let whole = |n: usize| (n * arg.dtype.size() as usize).is_multiple_of(16);
            let all = [slot.offset as usize, inner, outer];
            aligned &= arg.align >= 16 && all.into_iter().all(whole);
        }
        Ok(aligned)
    }
}
