//! Rotations in place: a generated kernel writes its result back to the columns of the buffer that
//! it read.
//!
//! Queries, keys and values of a merged GEMM share a buffer that lives until the values die. The
//! rotated queries and keys live until then, too, and the unrotated ones are not needed again, so
//! they are overwritten: a block saves no more memory than with separate layers. In backward,
//! attention writes the gradients of queries and keys next to that of the values, into the columns
//! of the buffer that the merged GEMMs read, and they are rotated back there. They need no separate
//! memory and no copy. In other cases, a result takes over all of a dying operand's memory
//! (`liveness`).

use super::schedule::Orders;
use super::users::{Users, operands};
use crate::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::ir::strides::Strides;
use crate::ir::{OpKind, op, strides};
use crate::ops::Fusion;
use smallvec::SmallVec;
use std::ops::Range;

/// Part of each row of a buffer.
pub(super) struct Columns {
    /// Length of the rows.
    width: u64,
    columns: Range<u64>,
}

impl Columns {
    /// Returns the columns that a window takes of its buffer, which a GEMM writes or reads row by
    /// row; `None` if it takes all of them.
    pub(super) fn of(g: &Graph, order: &[u32], users: &Users, window: &Value) -> Option<Self> {
        let rows = users.of(window.root).iter().find_map(|&at| {
            let op = &g.ops[order[at] as usize];
            let gemm = matches!(op.act, Act::Compute(OpKind::Gemm { .. }));
            let mut values = operands(op).map(|v| g.value(v));
            values.find(|v| gemm && v.root == window.root)
        })?;
        let width = rows.cols();
        let columns = within(window, width)?;
        let whole = rows.is_contiguous() && rows.offset == 0;
        (whole && columns.end - columns.start < width).then_some(Self { width, columns })
    }

    /// Returns whether a window has no element in common with the columns.
    fn apart(&self, window: &Value) -> bool {
        within(window, self.width)
            .is_some_and(|w| w.end <= self.columns.start || self.columns.end <= w.start)
    }

    /// Returns whether an op touches none of these columns of `root`.
    pub(super) fn spared(&self, g: &Graph, op: &Op, root: Root) -> bool {
        op.is_view() || operands(op).all(|v| g.value(v).root != root || self.apart(g.value(v)))
    }
}

/// Returns the columns of rows of `width` that a window touches, if it is a regular part of the
/// rows.
fn within(window: &Value, width: u64) -> Option<Range<u64>> {
    let first = window.offset % width;
    let dims = window.strides.iter().zip(&window.shape);
    let inside = dims.filter(|(s, _)| *s % width != 0);
    let last = first + inside.map(|(&s, &n)| (n - 1) * s).sum::<u64>();
    (last < width).then_some(first..last + 1)
}

/// Returns whether a kernel reads or writes part of a root.
pub(super) fn touches(g: &Graph, op: &Op, root: Root) -> bool {
    !op.is_view() && operands(op).any(|v| g.value(v).root == root)
}

/// Returns whether an op computes each element of its result independently.
pub(super) fn elementwise(op: &Op) -> bool {
    kind(op).is_some_and(|k| k.fusion() == Fusion::Pointwise)
}

pub(super) fn kind(op: &Op) -> Option<OpKind> {
    match op.act {
        Act::Compute(kind) => Some(kind),
        Act::View(_) | Act::Collective(_) => None,
    }
}

/// Returns the buffer that a value covers, each element once, in any order.
pub(super) fn filled(g: &Graph, value: &Value) -> Option<u32> {
    let Root::Buffer(b) = value.root else {
        return None;
    };
    let dense = strides::dense_like(&value.shape, &value.strides);
    let mut dims = value.shape.iter().zip(&value.strides).zip(&dense);
    let all = value.offset == 0
        && g.buffers[b as usize].bytes == value.numel() * value.dtype.size()
        && dims.all(|((&n, stride), dense)| n == 1 || stride == dense);
    all.then_some(b)
}

/// Returns the window of `value` after the elements of `from`, a window on the same buffer, have
/// moved to those of `to`, which has the same shape.
fn moved(value: &Value, from: &Value, to: &Value) -> Option<(u64, Strides)> {
    let mut offset = to.offset;
    let mut rest = value.offset.checked_sub(from.offset)?;
    let mut dims: SmallVec<[usize; 4]> = (0..from.shape.len()).collect();
    dims.retain(|&mut d| from.shape[d] > 1);
    dims.sort_by_key(|&d| std::cmp::Reverse(from.strides[d]));
    for &d in &dims {
        let at = rest / from.strides[d].max(1);
        rest -= at * from.strides[d];
        offset += at * to.strides[d];
    }
    let mut strides = value.strides.clone();
    for (i, (stride, &n)) in strides.iter_mut().zip(&value.shape).enumerate() {
        let same = |d: &&usize| from.strides[**d] == *stride;
        match dims.iter().find(same) {
            // Any stride would do; that of the window makes equal windows equal values.
            _ if n == 1 => *stride = to.strides.get(i).copied().unwrap_or(*stride),
            Some(&d) if n <= from.shape[d] => *stride = to.strides[d],
            _ => return None,
        }
    }
    (rest == 0).then_some((offset, strides))
}

/// A concatenation of compiled code and its inputs.
struct Rotation {
    /// Its position in the order.
    at: usize,
    /// Positions of the elementwise ops that it depends on, including itself.
    ops: Vec<usize>,
    /// The only window of its buffer that the parts read, each part at its position in the result.
    source: Value,
    /// The result.
    result: Value,
}

impl Rotation {
    fn of(g: &Graph, o: &Orders, order: &[u32], at: usize) -> Option<Self> {
        let i = order[at];
        let op = &g.ops[i as usize];
        let Some(OpKind::Cat(op::Cat { axis })) = kind(op) else {
            return None;
        };
        if o.region[i as usize] == 0 {
            return None;
        }
        let ops = cone(g, o, order, at);
        let inside: Vec<u32> = ops.iter().map(|&at| order[at]).collect();
        let source = source(g, &inside, op, usize::from(axis))?;
        Some(Self {
            at,
            ops,
            source,
            result: g.value(op.outputs[0]).clone(),
        })
    }
}

/// Returns the positions of the elementwise ops of one region that the op at a position depends on,
/// including itself, in order.
pub(super) fn cone(g: &Graph, o: &Orders, order: &[u32], at: usize) -> Vec<usize> {
    let together = |i: u32| {
        let (i, last) = (i as usize, order[at] as usize);
        (o.region[i], o.section[i]) == (o.region[last], o.section[last])
    };
    let mut needed: SmallVec<[Root; 8]> = SmallVec::new();
    let mut ops = Vec::new();
    for (position, &i) in order[..=at].iter().enumerate().rev() {
        if !together(i) {
            break;
        }
        let op = &g.ops[i as usize];
        // Only for a result in a separate buffer: windows on one buffer may be disjoint.
        let makes = || {
            let mut values = op.outputs.iter().map(|&v| g.value(v));
            values.any(|v| needed.contains(&v.root) && filled(g, v).is_some())
        };
        if position == at || elementwise(op) && makes() {
            needed.extend(op.inputs.iter().map(|&v| g.value(v).root));
            ops.push(position);
        }
    }
    ops.reverse();
    ops
}

/// Returns the window on a buffer from which the parts of `cat` are made, each part at its position
/// in the result. It covers all that `ops` read of that buffer.
fn source(g: &Graph, ops: &[u32], cat: &Op, axis: usize) -> Option<Value> {
    let result = g.value(cat.outputs[0]);
    let parts = cat.inputs.len() as u64;
    let part = &g.value(cat.inputs[0]).shape;
    let equal = cat.inputs.iter().all(|&v| g.value(v).shape == *part);
    if !equal || part[axis] * parts != result.shape[axis] {
        return None;
    }
    let inputs = || {
        let ops = ops.iter().map(|&i| &g.ops[i as usize]);
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

/// Lets concatenations whose parts are read from columns of a longer-lived buffer be written there,
/// and gradients that are rotated into such columns be written there from the start. `eval` are the
/// ops of validation.
pub(super) fn rotations(g: &mut Graph, o: &mut Orders, eval: &[u32]) {
    let order = o.all();
    uncopy(g, o, &order);
    let order = o.all();
    let mut training = Users::new(g, &order);
    let mut validation = Users::new(g, eval);
    for at in 0..order.len() {
        let Some(r) = Rotation::of(g, o, &order, at) else {
            continue;
        };
        let lists = [(&order[..], &training), (eval, &validation)];
        let back = || back(g, lists, &r);
        let ahead = || ahead(g, lists[0], &r);
        if let Some((values, from, to)) = back().or_else(ahead)
            && relocate(g, &values, &from, &to).is_some()
        {
            training.moved(from.root, to.root);
            validation.moved(from.root, to.root);
        }
    }
}

/// Moves values along with a window that contains them, if all of them can be moved.
fn relocate(g: &mut Graph, values: &[ValueId], from: &Value, to: &Value) -> Option<()> {
    let places: Option<Vec<(u64, Strides)>> = values
        .iter()
        .map(|&v| moved(g.value(v), from, to))
        .collect();
    for (&v, (offset, strides)) in values.iter().zip(places?) {
        let value = &mut g.values[v.index()];
        (value.root, value.offset, value.strides) = (to.root, offset, strides);
    }
    Some(())
}

/// Returns the values of a buffer that kernels use, and the positions of the first and last kernel;
/// `None` if one of them needs its operands in their own order.
fn uses(
    g: &Graph,
    order: &[u32],
    users: &Users,
    root: Root,
) -> Option<(Vec<ValueId>, usize, usize)> {
    let mut values = Vec::new();
    let users = users.of(root);
    for &at in users {
        let op = &g.ops[order[at] as usize];
        kind(op)?.def().takes_strides().then_some(())?;
        values.extend(operands(op).filter(|&v| g.value(v).root == root));
    }
    values.sort_unstable();
    values.dedup();
    Some((values, *users.first()?, *users.last()?))
}

type Relocation = (Vec<ValueId>, Value, Value);

/// Writes the result over its source, where the source outlives it.
fn back(g: &Graph, lists: [(&[u32], &Users); 2], r: &Rotation) -> Option<Relocation> {
    filled(g, &r.result)?;
    let (order, users) = lists[0];
    let cat = order[r.at];
    let columns = Columns::of(g, order, users, &r.source)?;
    for (list, users) in lists {
        let Some(at) = list.iter().position(|&i| i == cat) else {
            continue;
        };
        let later = users.of(r.source.root).iter().filter(|&&user| user > at);
        let mut outlives = false;
        for &user in later {
            let op = &g.ops[list[user] as usize];
            columns.spared(g, op, r.source.root).then_some(())?;
            outlives = true;
        }
        // Memory that dies here can be taken over or freed as a whole.
        outlives.then_some(())?;
    }
    let (values, _, _) = uses(g, order, users, r.result.root)?;
    Some((values, r.result.clone(), r.source.clone()))
}

/// Writes the source to the result's place from the start, if nothing else needs it elsewhere.
fn ahead(g: &Graph, (order, users): (&[u32], &Users), r: &Rotation) -> Option<Relocation> {
    filled(g, &r.source)?;
    let columns = Columns::of(g, order, users, &r.result)?;
    let (values, first, _) = uses(g, order, users, r.source.root)?;
    let op = |at: usize| &g.ops[order[at] as usize];
    let mut later = users.of(r.source.root).iter().filter(|&&at| at > first);
    let alone = later.all(|at| r.ops.contains(at));
    let between = first..r.at;
    let mut touching = users.of(r.result.root).iter();
    let free =
        touching.all(|&at| !between.contains(&at) || columns.spared(g, op(at), r.result.root));
    let anew = op(first)
        .inputs
        .iter()
        .all(|&v| g.value(v).root != r.source.root);
    (alone && free && anew).then(|| (values, r.source.clone(), r.result.clone()))
}

/// Removes copies of concatenations into columns of a buffer: the concatenation is written there.
fn uncopy(g: &mut Graph, o: &mut Orders, order: &[u32]) {
    let mut users = Users::new(g, order);
    for (at, &i) in order.iter().enumerate() {
        let op = &g.ops[i as usize];
        if kind(op) != Some(OpKind::Copy) || o.region[i as usize] == 0 {
            continue;
        }
        let (from, to) = (g.value(op.inputs[0]).clone(), g.value(op.outputs[0]));
        let Some(strides) = strides::view(&to.shape, &to.strides, &from.shape) else {
            continue;
        };
        let to = Value {
            shape: from.shape.clone(),
            strides,
            ..to.clone()
        };
        if filled(g, &from).is_none() || from.dtype != to.dtype {
            continue;
        }
        let Some(columns) = Columns::of(g, order, &users, &to) else {
            continue;
        };
        let Some((values, first, last)) = uses(g, order, &users, from.root) else {
            continue;
        };
        let [.., cat, _] = cone(g, o, order, at)[..] else {
            continue;
        };
        let made = &g.ops[order[cat] as usize];
        let is_cat = matches!(kind(made), Some(OpKind::Cat { .. }))
            && first == cat
            && last == at
            && g.value(made.outputs[0]).root == from.root;
        let between = || order[first + 1..at].iter().map(|&i| &g.ops[i as usize]);
        let free = between().all(|op| columns.spared(g, op, to.root));
        let only = !between().any(|op| touches(g, op, from.root));
        if is_cat && free && only && relocate(g, &values, &from, &to).is_some() {
            users.moved(from.root, to.root);
            o.forward.retain(|&op| op != i);
            o.backward.retain(|&op| op != i);
        }
    }
}
