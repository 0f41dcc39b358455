//! The operands of a body of row-local operations, and the operations that can share a loop.
//!
//! Every operation here can be cut into rows that do not depend on each other: elementwise ones
//! anywhere, norms and softmaxes by their rows, concatenations by the dimensions before their axis.
//! A stage is a run of operations over the same number of rows, each of which needs only the same
//! row of the results of earlier operations of the stage. Between stages values go through memory.
//! Sums over rows are stages of their own.

use super::super::error::OperandError;
use super::super::ops;
use super::super::strides::{matrix, numel};
use super::super::view::{View, overlap};
use crate::operand::RawRange;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, Slot};
use shardlab_plan::ops::{Extent, Fusion, Operand, Reduced, Signature};
use smallvec::SmallVec;
use std::ops::Range;

/// Maximum number of elements of a stage's row before an operation gets a stage of its own.
const LARGE_ROW: usize = 1 << 18;

/// How an operation uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Row by row.
    Rows,
    /// All of it for every row (inputs), or once after the last row (outputs).
    Whole,
    /// Not at all.
    Ignored,
}

/// An operand of an operation.
#[derive(Clone, Debug)]
pub(super) struct Touch {
    pub(super) place: Place,
    pub(super) view: View,
    pub(super) usage: Use,
    /// Type that a register's value is rounded to before it is used again.
    pub(super) dtype: DType,
    /// Whether it is a register without memory: each block of it is used up before the next one is
    /// made.
    pub(super) local: bool,
}

impl Touch {
    /// Returns whether a value written here must be rounded explicitly: registers are floats for
    /// any type.
    pub(super) fn rounds(&self) -> bool {
        matches!(self.place, Place::Register(_)) && self.dtype != DType::F32
    }
}

/// An operation with its operands.
#[derive(Clone, Debug)]
pub(super) struct Step<'k> {
    /// Its position in the body.
    pub(super) at: usize,
    pub(super) op: &'k BodyOp,
    pub(super) ins: SmallVec<[Touch; 4]>,
    pub(super) outs: SmallVec<[Touch; 2]>,
    /// Number of rows it can be cut into.
    pub(super) rows: usize,
    /// Length of the rows it reduces.
    pub(super) cols: usize,
}

impl Step<'_> {
    /// Returns whether it adds up rows, which needs all of them.
    pub(super) fn is_sum(&self) -> bool {
        self.op.op.sums_rows()
    }
}

/// Operations that share a loop over `rows` rows.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    pub(super) steps: Range<usize>,
    pub(super) rows: usize,
}

/// Returns whether an operation is row-local.
pub(in crate::kernels) fn handles(op: OpKind) -> bool {
    matches!(op.fusion(), Fusion::Pointwise | Fusion::Row)
}

/// Resolves the operands of the body's operation `at`.
pub(super) fn step<'k>(
    at: usize,
    op: &'k BodyOp,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<Step<'k>, OperandError> {
    let sums = op.op.sums_rows();
    if !sums && !handles(op.op) {
        return Err(OperandError::Unsupported);
    }
    let signature = op.op.def().signature();
    let count = |what, (least, most): (usize, usize), found| {
        if (least..=most).contains(&found) {
            return Ok(());
        }
        Err(OperandError::Count {
            what,
            needed: least,
            found,
        })
    };
    count("inputs", signature.input_count(), op.inputs.len())?;
    count("outputs", signature.output_count(), op.outputs.len())?;
    let out = &op.outputs[0];
    let resolve = |slot: &Slot, usage, to: Option<&[u64]>| -> Result<Touch, OperandError> {
        let range = range(slot, reads, writes)?;
        let view = match to {
            Some(shape) => View::broadcast(range, slot, shape)?,
            None => View::new(range, slot)?,
        };
        let local = matches!(slot.place, Place::Register(_));
        Ok(Touch {
            place: slot.place,
            view,
            usage,
            dtype: slot.dtype,
            local,
        })
    };
    if sums {
        let all = |s| resolve(s, Use::Rows, None);
        return Ok(Step {
            at,
            op,
            ins: op.inputs.iter().map(all).collect::<Result<_, _>>()?,
            outs: op.outputs.iter().map(all).collect::<Result<_, _>>()?,
            rows: 1,
            cols: matrix(&op.inputs[1]).1,
        });
    }
    let reference = reduced_operand(op, &signature);
    let (rows, cols) = ops::cpu(&op.op).rows(op, reference)?;
    let full = rows * cols;
    let check = |what, touch: Touch, needed: usize| {
        let found = touch.view.numel;
        if found == needed {
            Ok(touch)
        } else {
            Err(OperandError::Size {
                what,
                needed,
                found,
            })
        }
    };
    let place = |operand: &Operand, slot: &Slot| {
        let rowwise = || resolve(slot, Use::Rows, None);
        match operand.extent {
            Extent::Part | Extent::Any => rowwise(),
            Extent::Ignored => resolve(slot, Use::Ignored, None),
            Extent::Scalar => check(operand.name, resolve(slot, Use::Whole, None)?, 1),
            Extent::PerRow => check(operand.name, rowwise()?, rows),
            Extent::PerColumn => check(operand.name, resolve(slot, Use::Whole, None)?, cols),
            Extent::Full if reference.is_none() && numel(slot) != full => {
                resolve(slot, Use::Rows, Some(&out.shape))
            }
            Extent::Full | Extent::Exact => check(operand.name, rowwise()?, full),
        }
    };
    let inputs = (0..).map_while(|n| signature.input(n)).zip(&op.inputs);
    let ins = inputs
        .map(|(operand, slot)| place(operand, slot))
        .collect::<Result<_, _>>()?;
    let mut outs = SmallVec::new();
    for (operand, slot) in signature.outputs.iter().zip(&op.outputs) {
        outs.push(match operand.extent {
            // Results are never broadcast.
            Extent::Full => check(operand.name, resolve(slot, Use::Rows, None)?, full)?,
            Extent::Part => {
                let total = op.inputs.iter().map(numel).sum();
                check(operand.name, resolve(slot, Use::Rows, None)?, total)?
            }
            _ => place(operand, slot)?,
        });
    }
    Ok(Step {
        at,
        op,
        ins,
        outs,
        rows,
        cols,
    })
}

/// Returns the operand whose last dimension an operation reduces or indexes.
fn reduced_operand<'k>(op: &'k BodyOp, signature: &Signature) -> Option<&'k Slot> {
    match signature.reduced? {
        Reduced::Input(n) => op.inputs.get(n),
        Reduced::Output(n) => op.outputs.get(n),
    }
}

/// Returns the memory of a slot; a register gets addresses from 0 on, to be relocated later.
fn range(slot: &Slot, reads: &[RawRange], writes: &[RawRange]) -> Result<RawRange, OperandError> {
    let unknown = |count| OperandError::UnknownSlot {
        place: slot.place,
        count,
    };
    match slot.place {
        Place::Read(i) => reads
            .get(usize::from(i))
            .copied()
            .ok_or_else(|| unknown(reads.len())),
        Place::Write(i) => writes
            .get(usize::from(i))
            .copied()
            .ok_or_else(|| unknown(writes.len())),
        Place::Register(_) => Ok(RawRange {
            ptr: std::ptr::null_mut(),
            bytes: isize::MAX as usize,
            dtype: DType::F32,
        }),
    }
}

/// Moves sums over rows after all other operations whose reads they do not change and whose writes
/// they do not use, so that row operations stay one loop.
pub(super) fn put_off_sums(steps: &mut [Step<'_>]) {
    let clash = |a: &Touch, b: &Touch| match (a.place, b.place) {
        (Place::Register(x), Place::Register(y)) => x == y,
        (Place::Register(_), _) | (_, Place::Register(_)) => false,
        _ => overlap(&a.view.extent(), &b.view.extent()),
    };
    let apart = |sum: &Step<'_>, other: &Step<'_>| {
        let kept = |t: &Touch| !other.outs.iter().any(|o| clash(o, t));
        let unused = |t: &Touch| !other.ins.iter().chain(&other.outs).any(|o| clash(o, t));
        sum.ins.iter().all(kept) && sum.outs.iter().all(unused)
    };
    for i in (0..steps.len()).rev() {
        if steps[i].is_sum() && steps[i + 1..].iter().all(|s| apart(&steps[i], s)) {
            steps[i..].rotate_left(1);
        }
    }
}

/// Returns the reads that must be copied before anything is written, because a write would change
/// what a later operation, or another row, reads from them.
pub(super) fn endangered(steps: &[Step<'_>]) -> SmallVec<[Place; 4]> {
    let mut out: SmallVec<[Place; 4]> = SmallVec::new();
    for (w, writer) in steps.iter().enumerate() {
        for target in writer
            .outs
            .iter()
            .filter(|t| matches!(t.place, Place::Write(_)))
        {
            for reader in &steps[w..] {
                for source in reader
                    .ins
                    .iter()
                    .filter(|t| matches!(t.place, Place::Read(_)))
                {
                    let same_row = std::ptr::eq(reader, writer)
                        && source.view == target.view
                        && source.usage == Use::Rows;
                    if source.usage != Use::Ignored
                        && !same_row
                        && overlap(&source.view.extent(), &target.view.extent())
                        && !out.contains(&source.place)
                    {
                        out.push(source.place);
                    }
                }
            }
        }
    }
    out
}

/// Cuts a body into stages.
pub(super) fn stages(steps: &[Step<'_>]) -> Result<SmallVec<[Stage; 2]>, OperandError> {
    let mut out: SmallVec<[Stage; 2]> = SmallVec::new();
    let mut start = 0;
    let mut rows = 0;
    for (i, step) in steps.iter().enumerate() {
        written_before(steps, i)?;
        let joined = if i == start {
            Some(step.rows)
        } else if step.is_sum() || steps[start].is_sum() {
            None
        } else {
            join(&steps[start..i], rows, step)
        };
        rows = joined.unwrap_or_else(|| {
            out.push(Stage {
                steps: start..i,
                rows,
            });
            start = i;
            step.rows
        });
    }
    if !steps.is_empty() {
        out.push(Stage {
            steps: start..steps.len(),
            rows,
        });
    }
    Ok(out)
}

/// Returns whether a register is written before it is read.
fn written_before(steps: &[Step<'_>], at: usize) -> Result<(), OperandError> {
    for t in steps[at].ins.iter().filter(|t| t.usage != Use::Ignored) {
        let written = || {
            steps[..at]
                .iter()
                .flat_map(|s| &s.outs)
                .any(|o| o.place == t.place)
        };
        if matches!(t.place, Place::Register(_)) && !written() {
            return Err(OperandError::Shape(format!(
                "{:?} is read before it is written",
                t.place
            )));
        }
    }
    Ok(())
}

/// Returns the number of rows of the stage once `step` has joined it; `None` if it cannot.
fn join(stage: &[Step<'_>], rows: usize, step: &Step<'_>) -> Option<usize> {
    let mut joined = gcd(rows, step.rows);
    for earlier in stage {
        for (a, a_writes) in touches(earlier) {
            for (b, b_writes) in touches(step) {
                if a_writes || b_writes {
                    match sharing(a, a_writes, b) {
                        Sharing::Unlimited => {}
                        Sharing::Rows(rows) => joined = gcd(joined, rows),
                        Sharing::Conflict => return None,
                    }
                }
            }
        }
    }
    let row = |s: &Step<'_>, rows: usize| {
        let sizes = s
            .ins
            .iter()
            .chain(&s.outs)
            .filter(|t| t.usage == Use::Rows)
            .map(|t| t.view.numel);
        sizes.max().unwrap_or(0) / rows.max(1)
    };
    let large = stage
        .iter()
        .chain([step])
        .any(|s| row(s, joined) > LARGE_ROW);
    (!large || joined == rows && joined == step.rows).then_some(joined)
}

fn touches<'s>(s: &'s Step<'_>) -> impl Iterator<Item = (&'s Touch, bool)> {
    let used = s.ins.iter().filter(|t| t.usage != Use::Ignored);
    used.map(|t| (t, false))
        .chain(s.outs.iter().map(|t| (t, true)))
}

/// Constraint of two uses of memory, one of them a write, on a loop over rows.
enum Sharing {
    /// They do not limit it.
    Unlimited,
    /// It may be cut into this many rows, and into divisors of them.
    Rows(usize),
    /// They must not share a loop.
    Conflict,
}

fn sharing(a: &Touch, a_writes: bool, b: &Touch) -> Sharing {
    let registers = matches!((a.place, b.place), (Place::Register(_), Place::Register(_)));
    if registers && a.place != b.place {
        return Sharing::Unlimited;
    }
    let mixed = matches!(a.place, Place::Register(_)) != matches!(b.place, Place::Register(_));
    if mixed || !registers && !overlap(&a.view.extent(), &b.view.extent()) {
        return Sharing::Unlimited;
    }
    if a.usage == Use::Whole || b.usage == Use::Whole {
        return Sharing::Conflict;
    }
    if a.view == b.view {
        return Sharing::Unlimited;
    }
    // A statistic of each row that is repeated over the row: the reader's outermost dimension walks
    // the rows that were written.
    let [first, ..] = b.view.dims[..] else {
        return Sharing::Conflict;
    };
    let walks = a_writes
        && a.view.is_contiguous()
        && a.view.ptr == b.view.ptr
        && first.n * first.stride == a.view.numel;
    if walks {
        Sharing::Rows(first.n)
    } else {
        Sharing::Conflict
    }
}

/// Returns the greatest common divisor; 0 is neutral.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the number of elements a register needs when all of it is kept.
pub(super) fn extent_of(steps: &[Step<'_>], register: Place) -> usize {
    let all = steps.iter().flat_map(|s| s.ins.iter().chain(&s.outs));
    all.filter(|t| t.place == register)
        .map(|t| t.view.extent().end / size_of::<f32>())
        .max()
        .unwrap_or(0)
}

/// Moves the operands at a place to other memory.
pub(super) fn relocate(steps: &mut [Step<'_>], place: Place, from: *mut u8, to: *mut u8) {
    for t in steps
        .iter_mut()
        .flat_map(|s| s.ins.iter_mut().chain(&mut s.outs))
    {
        if t.place == place {
            t.view.ptr = to.wrapping_add(t.view.ptr as usize - from as usize);
            t.local = false;
        }
    }
}

/// Returns the first and the last stage that touch a register.
pub(super) fn span(steps: &[Step<'_>], stages: &[Stage], register: Place) -> (usize, usize) {
    let touching = |s: &Stage| {
        let ops = steps[s.steps.clone()].iter();
        ops.flat_map(|s| s.ins.iter().chain(&s.outs))
            .any(|t| t.place == register)
    };
    let first = stages.iter().position(touching).unwrap_or(0);
    (first, stages.iter().rposition(touching).unwrap_or(first))
}
