//! Rotations in place: what a generated kernel makes of some columns of a buffer goes back into these columns.
//!
//! Queries, keys and values of a merged product share a buffer that lives as long as the values do. The rotated queries and keys
//! live as long, and the unrotated ones are not needed again, so they take their place: a saved block holds no more than it
//! would if the layers were apart. Elsewhere a result takes over all of a dying operand's memory (`lives`).

use super::schedule::Step;
use crate::model::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::model::ops::OpKind;
use std::ops::Range;

/// Part of each row of a buffer.
struct Columns {
    /// Length of the rows.
    width: u64,
    columns: Range<u64>,
}

/// Lets concatenations whose parts are read from some columns of a longer-lived buffer be written there, where all steps agree
/// with that: `steps` are those of training and of validation, each in issue order.
pub(super) fn rotations(g: &mut Graph, steps: [&[&Step]; 2]) {
    let mut candidates: Vec<u32> = Vec::new();
    for step in steps[0].iter().filter(|s| s.region != 0) {
        let cat = |&&i: &&u32| matches!(g.ops[i as usize].act, Act::Compute(OpKind::Cat { .. }));
        candidates.extend(step.ops.iter().filter(cat));
    }
    for cat in candidates {
        if let Some((target, moved)) = rotation(g, steps, cat) {
            for v in moved {
                let value = &mut g.values[v.index()];
                (value.root, value.offset) = (target.root, target.offset);
                value.strides.clone_from(&target.strides);
            }
        }
    }
}

/// The window that the result of `cat` may be written to, and the values that then lie there.
fn rotation(g: &Graph, steps: [&[&Step]; 2], cat: u32) -> Option<(Value, Vec<ValueId>)> {
    let op = &g.ops[cat as usize];
    let result = g.value(op.outputs[0]);
    let Root::Buffer(from) = result.root else {
        return None;
    };
    let bytes = result.numel() * result.dtype.size();
    if !result.is_contiguous() || result.offset != 0 || g.buffers[from as usize].bytes != bytes {
        return None;
    }
    let at = steps[0].iter().position(|s| s.ops.contains(&cat))?;
    let target = source(g, steps[0][at], op)?;
    let columns = columns(g, steps[0], &target)?;
    let mut moved = Vec::new();
    for list in steps {
        let Some(at) = list.iter().position(|s| s.ops.contains(&cat)) else {
            continue;
        };
        let mut outlives = false;
        for (s, step) in list.iter().enumerate() {
            for (k, &i) in step.ops.iter().enumerate() {
                let Act::Compute(kind) = g.ops[i as usize].act else {
                    continue;
                };
                for &v in g.ops[i as usize]
                    .inputs
                    .iter()
                    .chain(&g.ops[i as usize].outputs)
                {
                    let value = g.value(v);
                    let before = s < at || s == at && step.ops[..k].iter().all(|&o| o != cat);
                    if value.root == target.root && !before && i != cat {
                        outlives |= s > at;
                        apart(value, &columns).then_some(())?;
                    }
                    if value.root == result.root {
                        let same = value.shape == result.shape
                            && value.strides == result.strides
                            && value.offset == 0;
                        (kind.takes_strides() && same).then_some(())?;
                        moved.push(v);
                    }
                }
            }
        }
        // Of memory that dies here all is free to be taken over, or freed.
        if !outlives {
            return None;
        }
    }
    moved.sort_unstable();
    moved.dedup();
    Some((target, moved))
}

/// The window on another buffer that the concatenation's parts are made of, part by part at the place it will have in the
/// result: all that the kernel reads of that buffer.
fn source(g: &Graph, step: &Step, cat: &Op) -> Option<Value> {
    let Act::Compute(OpKind::Cat { axis }) = cat.act else {
        return None;
    };
    let axis = usize::from(axis);
    let result = g.value(cat.outputs[0]);
    let parts = cat.inputs.len() as u64;
    let part = &g.value(cat.inputs[0]).shape;
    let equal = cat.inputs.iter().all(|&v| g.value(v).shape == *part);
    if !equal || part[axis] * parts != result.shape[axis] {
        return None;
    }
    let inputs = || {
        let ops = step.ops.iter().map(|&i| &g.ops[i as usize]);
        ops.flat_map(|op| &op.inputs).map(|&v| g.value(v))
    };
    let mut roots: Vec<Root> = inputs().map(|v| v.root).collect();
    roots.sort_unstable();
    roots.dedup();
    roots.retain(|r| matches!(r, Root::Buffer(_)) && *r != result.root);
    let window = |root: Root| {
        let first = inputs()
            .filter(|v| v.root == root)
            .min_by_key(|v| v.offset)?;
        let mut seen = vec![false; parts as usize];
        let alike =
            |v: &&Value| v.shape == *part && v.dtype == result.dtype && v.strides == first.strides;
        if !inputs().filter(|v| v.root == root).all(|v| alike(&v)) {
            return None;
        }
        let step = part[axis] * first.strides[axis];
        for v in inputs().filter(|v| v.root == root) {
            let ahead = v.offset - first.offset;
            let regular = step != 0 && ahead % step == 0;
            *seen
                .get_mut((ahead / step.max(1)) as usize)
                .filter(|_| regular)? = true;
        }
        seen.iter().all(|&s| s).then(|| Value {
            shape: result.shape.clone(),
            requires_grad: result.requires_grad,
            ..first.clone()
        })
    };
    roots.into_iter().find_map(window)
}

/// The columns that a window takes of its buffer, which a matrix product writes row after row.
fn columns(g: &Graph, steps: &[&Step], window: &Value) -> Option<Columns> {
    let made = steps.iter().flat_map(|s| &s.ops).find_map(|&i| {
        let op = &g.ops[i as usize];
        let product = matches!(op.act, Act::Compute(OpKind::Gemm { .. }));
        let out = op.outputs.first().map(|&v| g.value(v))?;
        (product && out.root == window.root).then_some(out)
    })?;
    let width = made.cols();
    let columns = within(window, width)?;
    let whole = made.is_contiguous() && made.offset == 0;
    (whole && columns.end - columns.start < width).then_some(Columns { width, columns })
}

/// The columns of rows of `width` that a window touches, if it is a regular part of the rows.
fn within(window: &Value, width: u64) -> Option<Range<u64>> {
    let first = window.offset % width;
    let dims = window.strides.iter().zip(&window.shape);
    let inside = dims.filter(|(s, _)| *s % width != 0);
    let last = first + inside.map(|(&s, &n)| (n - 1) * s).sum::<u64>();
    (last < width).then_some(first..last + 1)
}

/// Whether a window has no element in common with the columns.
fn apart(window: &Value, c: &Columns) -> bool {
    within(window, c.width).is_some_and(|w| w.end <= c.columns.start || c.columns.end <= w.start)
}
