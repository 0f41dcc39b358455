//! Bodies of row-local operations: one loop over blocks of rows, through a few float temporaries.
//! Sums over rows among them are computed after the loop.
//!
//! Every operation's result is rounded to its slot's type before another one uses it, so that a
//! fused body computes what its operations would compute one by one, bit for bit. Integers inside a
//! fused body go through floats, exact to 2^24.

mod plan;

use super::convert;
use super::error::OperandError;
use super::ops::{self, Call, Rows};
use super::parallel;
use super::scratch::Scratch;
use super::view::{View, overlap};
use crate::operand::RawRange;
use plan::{Step, Touch, Use};
use shardlab_plan::ir::{BodyOp, Place};
use smallvec::SmallVec;

pub(super) use plan::handles;

/// Number of elements from which a stage uses several threads.
const PARALLEL: usize = 1 << 15;
/// Number of elements of the largest operand that a block covers.
const BLOCK: usize = 4096;

/// Location of a block of an operand.
#[derive(Clone, Copy)]
enum At {
    /// Contiguous floats in memory, from row 0 on.
    Memory(*mut f32),
    /// A register's block, at this position of the arena.
    Local(usize),
    /// A register's block of `per` elements per row, through the operand's view, to a temporary.
    LocalView {
        start: usize,
        per: usize,
        temp: usize,
    },
    /// A register's block, copied to a temporary because the same operation writes it.
    Copied { start: usize, temp: usize },
    /// Memory through the operand's view, to or from a temporary.
    Through { temp: usize },
    /// The whole operand, loaded before the first block to this position of the arena.
    Loaded(usize),
    /// Nowhere.
    None,
}

/// The rows that a body computes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Computed {
    /// All.
    All,
    /// The first `used` of `reserved`.
    First {
        /// Rows to compute.
        used: usize,
        /// Rows that there are.
        reserved: usize,
    },
}

impl Computed {
    /// Returns how many rows a stage computes of `rows`, each of which may be part of a row or
    /// several rows.
    fn of(self, rows: usize) -> usize {
        match self {
            Self::First { used, reserved } if rows.is_multiple_of(reserved) => {
                used * (rows / reserved)
            }
            Self::First { used, reserved } if reserved.is_multiple_of(rows) => {
                used.div_ceil(reserved / rows)
            }
            Self::First { .. } | Self::All => rows,
        }
    }
}

/// Performs a body.
///
/// # Errors
/// If an operation does not accept its operands. The error has the operation's index.
pub(super) fn run(
    body: &[BodyOp],
    rows: Computed,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), (usize, OperandError)> {
    let mut steps: SmallVec<[Step<'_>; 1]> = SmallVec::with_capacity(body.len());
    for (i, op) in body.iter().enumerate() {
        steps.push(plan::step(i, op, reads, writes).map_err(|f| (i, f))?);
    }
    plan::put_off_sums(&mut steps);
    let mut kept: SmallVec<[Scratch; 2]> = SmallVec::new();
    for place in plan::endangered(&steps) {
        let Place::Read(i) = place else { continue };
        let range = reads[usize::from(i)];
        let mut copy = Scratch::take(range.bytes.div_ceil(size_of::<f32>()));
        let to = copy.as_mut_ptr().cast::<u8>();
        // SAFETY: the range is live and the copy has its length, rounded up.
        unsafe { std::ptr::copy_nonoverlapping(range.ptr, to, range.bytes) };
        plan::relocate(&mut steps, place, range.ptr, to);
        kept.push(copy);
    }
    let stages = plan::stages(&steps).map_err(|f| (0, f))?;
    if stages.len() > 1 {
        for register in registers(&steps) {
            let (first, last) = plan::span(&steps, &stages, register);
            if first != last {
                let mut whole = Scratch::take(plan::extent_of(&steps, register));
                plan::relocate(
                    &mut steps,
                    register,
                    std::ptr::null_mut(),
                    whole.as_mut_ptr().cast(),
                );
                kept.push(whole);
            }
        }
    }
    for stage in &stages {
        let steps = &steps[stage.steps.clone()];
        let done = match steps {
            [sum] if sum.is_sum() => sums(sum).map_err(|f| (0, f)),
            _ => perform(steps, stage.rows, rows.of(stage.rows)),
        };
        done.map_err(|(i, f)| (steps[i].at, f))?;
    }
    Ok(())
}

fn registers(steps: &[Step<'_>]) -> SmallVec<[Place; 16]> {
    let mut out: SmallVec<[Place; 16]> = SmallVec::new();
    for t in steps.iter().flat_map(|s| &s.outs) {
        if matches!(t.place, Place::Register(_)) && !out.contains(&t.place) {
            out.push(t.place);
        }
    }
    out
}

// SAFETY: these are addresses inside checked views, whose creators' contract covers all threads
// that work for the launch; the threads of a stage write different rows.
unsafe impl Send for At {}
// SAFETY: as above.
unsafe impl Sync for At {}

/// Operands of a step, located.
struct Located {
    ins: SmallVec<[At; 4]>,
    outs: SmallVec<[At; 2]>,
}

/// Positions of a stage's operands in its arena.
struct Layout {
    located: SmallVec<[Located; 1]>,
    /// Start of each temporary; the steps share them.
    temps: SmallVec<[usize; 8]>,
    floats: usize,
}

/// Returns whether a step writes what an operand of it reads.
fn overwritten(step: &Step<'_>, t: &Touch) -> bool {
    step.outs.iter().any(|o| match (t.local, o.local) {
        (false, false) => overlap(&o.view.extent(), &t.view.extent()),
        _ => o.place == t.place,
    })
}

/// Assigns registers, whole operands and temporaries their positions for blocks of `block` of
/// `rows` rows.
fn lay_out(steps: &[Step<'_>], rows: usize, block: usize) -> Layout {
    let mut floats = 0;
    let mut take = |n: usize| {
        floats += n.next_multiple_of(16);
        floats - n.next_multiple_of(16)
    };
    let size = |t: &Touch| block * (t.view.numel / rows);
    let mut locals: SmallVec<[(&Touch, usize); 8]> = SmallVec::new();
    for t in steps.iter().flat_map(|s| &s.outs).filter(|t| t.local) {
        if !locals.iter().any(|l| l.0.place == t.place) {
            locals.push((t, take(size(t))));
        }
    }
    let mut sizes: SmallVec<[usize; 8]> = SmallVec::new();
    let mut located = SmallVec::with_capacity(steps.len());
    for step in steps {
        let mut used = 0;
        let mut temp = |t: &Touch| {
            if used == sizes.len() {
                sizes.push(0);
            }
            sizes[used] = sizes[used].max(size(t));
            used += 1;
            used - 1
        };
        let local = |t: &Touch| locals.iter().find(|l| t.local && l.0.place == t.place);
        let mut ins = SmallVec::with_capacity(step.ins.len());
        for t in &step.ins {
            let floats = t.view.as_floats().filter(|_| !overwritten(step, t));
            ins.push(match (t.usage, local(t)) {
                (Use::Ignored, _) => At::None,
                (Use::Whole, _) => {
                    floats.map_or_else(|| At::Loaded(take(t.view.numel)), At::Memory)
                }
                (Use::Rows, Some(&(w, start))) if w.view != t.view => At::LocalView {
                    start,
                    per: w.view.numel / rows,
                    temp: temp(t),
                },
                (Use::Rows, Some(&(_, start))) if overwritten(step, t) => At::Copied {
                    start,
                    temp: temp(t),
                },
                (Use::Rows, Some(&(_, start))) => At::Local(start),
                (Use::Rows, None) => {
                    floats.map_or_else(|| At::Through { temp: temp(t) }, At::Memory)
                }
            });
        }
        let mut outs = SmallVec::with_capacity(step.outs.len());
        for t in &step.outs {
            outs.push(match (t.usage, local(t)) {
                (Use::Whole | Use::Ignored, _) => At::None,
                (Use::Rows, Some(&(_, start))) => At::Local(start),
                (Use::Rows, None) => {
                    let floats = t.view.as_floats();
                    floats.map_or_else(|| At::Through { temp: temp(t) }, At::Memory)
                }
            });
        }
        located.push(Located { ins, outs });
    }
    let temps = sizes.iter().map(|&n| take(n)).collect();
    Layout {
        located,
        temps,
        floats,
    }
}

/// Performs sums over rows.
fn sums(step: &Step<'_>) -> Result<(), OperandError> {
    let inputs: SmallVec<[&View; 4]> = step.ins.iter().map(|t| &t.view).collect();
    let outputs: SmallVec<[&View; 2]> = step.outs.iter().map(|t| &t.view).collect();
    ops::cpu(&step.op.op).run(Call::Sums {
        cols: step.cols,
        inputs: &inputs,
        outputs: &outputs,
    })
}

/// Runs the first `used` rows of a stage, block by block.
fn perform(steps: &[Step<'_>], rows: usize, used: usize) -> Result<(), (usize, OperandError)> {
    if used == 0 {
        return Ok(());
    }
    let touches = || steps.iter().flat_map(|s| s.ins.iter().chain(&s.outs));
    let largest = touches()
        .filter(|t| t.usage == Use::Rows)
        .map(|t| t.view.numel / rows)
        .max();
    let block = (BLOCK / largest.unwrap_or(1).max(1)).clamp(1, used);
    let layout = lay_out(steps, rows, block);
    let totals = |s: &Step<'_>| ops::cpu(&s.op.op).totals();
    let serial = steps.iter().any(|s| totals(s).is_some());
    let mut sums: SmallVec<[f64; 4]> = SmallVec::from_elem(0.0, steps.len());
    let elements = largest.unwrap_or(1) * used;
    if serial || elements < PARALLEL || parallel::threads() == 1 {
        some_rows(steps, &layout, rows, block, 0..used, &mut sums)?;
    } else {
        parallel::split(used, block, |part| {
            let mut none: SmallVec<[f64; 4]> = SmallVec::from_elem(0.0, steps.len());
            some_rows(steps, &layout, rows, block, part, &mut none)
        })?;
    }
    for (step, sum) in steps.iter().zip(sums) {
        if let Some(totals) = totals(step) {
            for (t, value) in step.outs.iter().zip(totals(sum, step.rows)) {
                // A register that is still local here is one that nothing reads.
                if !t.local {
                    t.view.store(0, &[value as f32]);
                }
            }
        }
    }
    Ok(())
}

/// Runs a stage over some of its rows; `sums` accumulates the losses.
fn some_rows(
    steps: &[Step<'_>],
    layout: &Layout,
    rows: usize,
    block: usize,
    part: std::ops::Range<usize>,
    sums: &mut [f64],
) -> Result<(), (usize, OperandError)> {
    let mut arena = Scratch::take(layout.floats);
    let arena = arena.as_mut_ptr();
    for (step, located) in steps.iter().zip(&layout.located) {
        for (t, at) in step.ins.iter().zip(&located.ins) {
            if let At::Loaded(start) = *at {
                // SAFETY: the layout has reserved this many floats there, for this operand alone.
                let to = unsafe { std::slice::from_raw_parts_mut(arena.add(start), t.view.numel) };
                t.view.load(0, to);
            }
        }
    }
    for row in part.clone().step_by(block) {
        let count = block.min(part.end - row);
        let b = Block {
            arena,
            layout,
            rows,
            row,
            count,
        };
        for (i, step) in steps.iter().enumerate() {
            // SAFETY: the arena was laid out for these steps and blocks of at most this many rows.
            unsafe { b.perform(step, &layout.located[i], &mut sums[i]) }.map_err(|f| (i, f))?;
        }
    }
    Ok(())
}

/// Some rows of a stage.
struct Block<'l> {
    arena: *mut f32,
    layout: &'l Layout,
    /// Rows of the stage.
    rows: usize,
    /// First row of the block.
    row: usize,
    /// Rows of the block.
    count: usize,
}

impl Block<'_> {
    /// Performs a step on the block.
    ///
    /// # Safety
    /// The arena has been laid out for the step.
    unsafe fn perform(
        &self,
        step: &Step<'_>,
        located: &Located,
        sum: &mut f64,
    ) -> Result<(), OperandError> {
        // SAFETY: either memory inside a checked view, or a place of the arena with the
        // length of the blocks put there.
        let read = |p: *const f32, n: usize| unsafe { std::slice::from_raw_parts(p, n) };
        // SAFETY: as above; what a step writes is disjoint from all else it touches, since
        // `lay_out` has routed operands that are both read and written through a temporary.
        let write = |p: *mut f32, n: usize| unsafe { std::slice::from_raw_parts_mut(p, n) };
        let local = |start: usize| self.arena.wrapping_add(start);
        let temp = |i: usize| self.arena.wrapping_add(self.layout.temps[i]);
        let extent = |t: &Touch| {
            let per = t.view.numel / self.rows;
            (self.row * per, self.count * per)
        };
        if let ([At::Through { .. }], [At::Memory(p)]) = (&located.ins[..], &located.outs[..])
            && ops::copy::is_copy(step.op)
            && !step.outs[0].rounds()
            && !overwritten(step, &step.ins[0])
        {
            let (first, len) = extent(&step.outs[0]);
            step.ins[0]
                .view
                .load(first, write(p.wrapping_add(first), len));
            return Ok(());
        }
        let mut ins: SmallVec<[&[f32]; 6]> = SmallVec::with_capacity(step.ins.len());
        for (t, at) in step.ins.iter().zip(&located.ins) {
            let (first, len) = extent(t);
            ins.push(match *at {
                At::None => &[],
                At::Memory(p) if t.usage == Use::Whole => read(p, t.view.numel),
                At::Memory(p) => read(p.wrapping_add(first), len),
                At::Loaded(start) => read(local(start), t.view.numel),
                At::Local(start) => read(local(start), len),
                At::Copied { start, temp: to } => {
                    let to = write(temp(to), len);
                    to.copy_from_slice(read(local(start), len));
                    to
                }
                At::LocalView {
                    start,
                    per,
                    temp: to,
                } => {
                    let to = write(temp(to), len);
                    let origin = local(start).wrapping_sub(self.row * per);
                    // SAFETY: these rows of the operand are in the register's block.
                    unsafe { t.view.load_at(origin.cast(), first, to) };
                    to
                }
                At::Through { temp: to } => {
                    let to = write(temp(to), len);
                    t.view.load(first, to);
                    to
                }
            });
        }
        let mut outs: SmallVec<[&mut [f32]; 3]> = SmallVec::with_capacity(step.outs.len());
        for (t, at) in step.outs.iter().zip(&located.outs) {
            let (first, len) = extent(t);
            outs.push(match *at {
                At::Memory(p) => write(p.wrapping_add(first), len),
                At::Local(start) => write(local(start), len),
                At::Through { temp: to } => write(temp(to), len),
                _ => &mut [],
            });
        }
        ops::cpu(&step.op.op).run(Call::Rows(Rows {
            op: step.op,
            x: &ins,
            y: &mut outs,
            cols: step.cols,
            first: self.row * (step.rows / self.rows),
            sum,
        }))?;
        for ((t, at), out) in step.outs.iter().zip(&located.outs).zip(&mut outs) {
            if t.rounds() {
                convert::round(t.dtype, out);
            }
            if let At::Through { .. } = at {
                t.view.store(extent(t).0, out);
            }
        }
        Ok(())
    }
}
