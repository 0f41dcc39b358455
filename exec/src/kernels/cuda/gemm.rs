//! GEMMs in cuBLASLt's terms: column-major, so that everything is transposed.

use super::codegen::{Arg, CodegenError, Request};
use crate::kernels::strides::{self, Dim};
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, ScaleBlock, Slot, op};

/// A stored matrix: the layout of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stored {
    rows: u64,
    cols: u64,
    /// Distance of rows in elements.
    pitch: u64,
    /// Whether it is stored column by column instead.
    flipped: bool,
}

/// What shares a scale of an 8-bit factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scales {
    /// The factor.
    Whole,
    /// A row of `a`, or a column of `b`; those of the other factor, too.
    Rows,
    /// 128 elements of such a row.
    RowBlocks,
    /// 128 by 128 elements.
    Squares,
}

impl Scales {
    /// Returns the number of reciprocals, and of those that keep their rows aligned, of a factor
    /// with a number of rows and an inner dimension.
    pub(super) const fn count(self, rows: u64, k: u64) -> u64 {
        let across = k.div_ceil(128);
        match self {
            Self::Whole => 1,
            Self::Rows => rows,
            Self::RowBlocks => rows * across,
            Self::Squares => rows.div_ceil(128) * across.next_multiple_of(4),
        }
    }
}

/// How a GEMM of 8-bit factors is scaled and added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Scaling {
    /// What shares a scale of `a`, and of `b`.
    pub(super) of: [Scales; 2],
    /// Whether sums may have the precision of tensor cores.
    pub(super) fast: bool,
}

/// A GEMM in row-major terms: `c[m, n] (+)= a[m, k] b[k, n] (+ bias[n])`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GemmProblem {
    pub(super) m: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    /// Whether `a` is stored as `[k, m]`.
    pub(super) ta: bool,
    /// Whether `b` is stored as `[n, k]`.
    pub(super) tb: bool,
    /// Distances of stored rows in elements: `a`, `b`, the accumulator, `c`.
    pub(super) pitch: [u64; 4],
    /// Element types of `a` and `b`.
    pub(super) factors: [DType; 2],
    /// For factors in 8 bits.
    pub(super) scaling: Option<Scaling>,
    /// Element type of the result.
    pub(super) result: DType,
    /// Element type of the bias.
    pub(super) bias: Option<DType>,
    /// Whether the result is added to an accumulator.
    pub(super) accumulate: bool,
    /// Alignments of `a`, `b`, the accumulator, `c`.
    pub(super) align: [u8; 4],
}

/// Places of a GEMM's operands, and their first elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operands {
    pub(super) a: (Place, u64),
    pub(super) b: (Place, u64),
    /// The reciprocals of the scales of `a` and `b`.
    pub(super) inverses: Option<[(Place, u64); 2]>,
    pub(super) bias: Option<(Place, u64)>,
    /// The accumulator; the result's own place if there is none.
    pub(super) before: (Place, u64),
    pub(super) c: (Place, u64),
}

fn stored(slot: &Slot) -> Result<Stored, CodegenError> {
    let (rows, cols) = strides::matrix(slot);
    let strides = strides::of(slot);
    let (col, lead) = match strides.split_last() {
        Some((&col, lead)) => (col, lead),
        None => (1, &strides[..]),
    };
    let dims = strides::merge(lead.iter().zip(&slot.shape).map(|(&stride, &n)| Dim {
        n: n as usize,
        stride,
    }));
    let row = match dims[..] {
        [] => cols * col,
        [d] => d.stride,
        _ => return Err(CodegenError::new("a factor's rows are not equally spaced")),
    };
    let (rows, cols, row, col) = (rows as u64, cols as u64, row as u64, col as u64);
    if col == 1 || cols == 1 {
        Ok(Stored {
            rows,
            cols,
            pitch: row.max(cols),
            flipped: false,
        })
    } else if row == 1 || rows == 1 {
        Ok(Stored {
            rows: cols,
            cols: rows,
            pitch: col.max(rows),
            flipped: true,
        })
    } else {
        Err(CodegenError::new("a factor has gaps between neighbours"))
    }
}

/// Returns the scaling of a GEMM whose reciprocals of scales are in these slots.
fn scaling(
    gemm: op::ScaledGemm,
    [m, n, k]: [u64; 3],
    inverses: [&Slot; 2],
) -> Result<Scaling, CodegenError> {
    let numbers = inverses.map(|slot| strides::numel(slot) as u64);
    let of = match numbers {
        [1, 1] => [Scales::Whole; 2],
        numbers if numbers == [m, n] => [Scales::Rows; 2],
        [a, b] => {
            let blocks = [m, n].into_iter().zip(inverses);
            let mut found = blocks.filter_map(|(rows, slot)| of_blocks([rows, k], slot));
            let (Some(of_a), Some(of_b)) = (found.next(), found.next()) else {
                return Err(CodegenError::new(format!(
                    "{a} and {b} scales of {m} rows and {n} columns"
                )));
            };
            [of_a, of_b]
        }
    };
    Ok(Scaling {
        of,
        fast: gemm.fast,
    })
}

/// Returns the blocks of a factor, `[rows, k]`, whose reciprocals are stored as the library reads
/// them.
fn of_blocks(matrix: [u64; 2], inverses: &Slot) -> Option<Scales> {
    let &[down, across] = &inverses.shape[..] else {
        return None;
    };
    let block = ScaleBlock::of(matrix, [down, across], inverses.dtype)?;
    let steps = strides::of(inverses);
    let stored = |s: [u64; 2]| {
        // The step along a dimension of one entry does not matter.
        let mut all = steps.iter().zip(s).zip([down, across]);
        all.all(|((&found, wanted), n)| n == 1 || found as u64 == wanted)
    };
    match block {
        ScaleBlock::ROW if stored([1, down]) => Some(Scales::RowBlocks),
        ScaleBlock::SQUARE if stored([across.next_multiple_of(4), 1]) => Some(Scales::Squares),
        _ => None,
    }
}

/// Returns the matmul of an operation, and its scales if it has 8-bit factors. The second of these
/// is stored as `[n, k]`.
fn kind(op: OpKind) -> Result<(op::Gemm, Option<op::ScaledGemm>), CodegenError> {
    match op {
        OpKind::Gemm(gemm) => Ok((gemm, None)),
        OpKind::ScaledGemm(scaled) => {
            let gemm = op::Gemm {
                ta: false,
                tb: true,
                bias: scaled.bias,
                accumulate: scaled.accumulate,
            };
            Ok((gemm, Some(scaled)))
        }
        _ => Err(CodegenError::new("not a matmul")),
    }
}

/// Returns the distance between the rows of a result with `n` columns, in elements.
fn result_pitch(s: &Slot, n: u64) -> Result<u64, CodegenError> {
    if super::codegen::is_dense(s) {
        return Ok(n);
    }
    let s = stored(s)?;
    if s.flipped || s.cols != n {
        return Err(CodegenError::new("a matmul's result is strided"));
    }
    Ok(s.pitch)
}

/// Reads a GEMM from a body, of which it may be a part whose result stays in the kernel.
pub(super) fn problem(
    req: &Request<'_>,
    op: &BodyOp,
) -> Result<(GemmProblem, Operands), CodegenError> {
    let (gemm, scaled) = kind(op.op)?;
    let op::Gemm {
        bias, accumulate, ..
    } = gemm;
    let input = |i: usize| {
        op.inputs
            .get(i)
            .ok_or_else(|| CodegenError::new("a matmul lacks operands"))
    };
    let (a, b) = (input(0)?, input(1)?);
    let c = op
        .outputs
        .first()
        .ok_or_else(|| CodegenError::new("a matmul lacks its result"))?;
    let before = if accumulate {
        input(op.inputs.len() - 1)?
    } else {
        c
    };
    let (sa, sb) = (stored(a)?, stored(b)?);
    let (ta, tb) = (gemm.ta != sa.flipped, gemm.tb != sb.flipped);
    let turned = |s: &Stored, t: bool| {
        if t {
            (s.cols, s.rows)
        } else {
            (s.rows, s.cols)
        }
    };
    let ((m, k), (k2, n)) = (turned(&sa, ta), turned(&sb, tb));
    let whole = |s: &Slot| strides::numel(s) as u64;
    if k != k2 || whole(c) != m * n || whole(before) != m * n {
        return Err(CodegenError::new(format!(
            "{:?} times {:?} is not {:?}",
            a.shape, b.shape, c.shape
        )));
    }
    let arg = |s: &Slot| match s.place {
        Place::Register(_) => Ok(Arg {
            dtype: s.dtype,
            align: 16,
        }),
        place => req.arg(place),
    };
    let (fa, fb, fc) = (arg(a)?, arg(b)?, arg(c)?);
    let scaled = match scaled {
        Some(gemm) => {
            let inverses = [input(2)?, input(3)?];
            Some((scaling(gemm, [m, n, k], inverses)?, inverses))
        }
        None => None,
    };
    if scaled.is_none() && fa.dtype != fb.dtype {
        let types = format!("factors of types {} and {}", fa.dtype, fb.dtype);
        return Err(CodegenError::new(types));
    }
    if arg(before)?.dtype != fc.dtype {
        return Err(CodegenError::new("a matmul is added to another type"));
    }
    let aligned = |s: &Slot| -> Result<u8, CodegenError> {
        let arg = arg(s)?;
        Ok(super::variant::alignment([
            u64::from(arg.align),
            s.offset * arg.dtype.size(),
        ]))
    };
    let bias = match bias {
        true => Some(input(2 + scaled.map_or(0, |(_, inverses)| inverses.len()))?),
        false => None,
    };
    let problem = GemmProblem {
        m,
        n,
        k,
        ta,
        tb,
        pitch: [
            sa.pitch,
            sb.pitch,
            result_pitch(before, n)?,
            result_pitch(c, n)?,
        ],
        factors: [fa.dtype, fb.dtype],
        scaling: scaled.map(|(scaling, _)| scaling),
        result: fc.dtype,
        bias: bias.map(arg).transpose()?.map(|a| a.dtype),
        accumulate,
        align: [aligned(a)?, aligned(b)?, aligned(before)?, aligned(c)?],
    };
    let place = |s: &Slot| (s.place, s.offset);
    Ok((
        problem,
        Operands {
            a: place(a),
            b: place(b),
            inverses: scaled.map(|(_, inverses)| inverses.map(place)),
            bias: bias.map(place),
            before: place(before),
            c: place(c),
        },
    ))
}
