//! Unifies equal ops on adjacent windows into one op on both: queries and keys of a merged GEMM are
//! rotated by one kernel, as if they were heads of one tensor. A kernel over few elements is far
//! from the memory bandwidth, and costs a launch.

use super::inplace::{self, Columns, elementwise, touches};
use super::schedule::Orders;
use super::users::{Users, operands};
use crate::graph::{Act, Buffer, Graph, Op, Root, Value, ValueId, View};
use crate::ir::{OpKind, op, strides};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Relation of two values of equal ops in memory.
enum Relation {
    /// They are one value, which does not vary along the axis.
    Same,
    /// The second starts along the axis where the first ends.
    Next,
    /// Each fills a buffer that nothing outside the ops uses.
    Own,
}

/// Two chains of equal ops, in order.
struct Twins {
    /// The dimension along which the second follows the first.
    axis: usize,
    /// Positions in the order.
    pairs: Vec<[usize; 2]>,
}

/// Joins chains of elementwise ops that end in concatenations into neighbouring windows.
pub(super) fn neighbours(g: &mut Graph, o: &mut Orders) {
    let order = o.all();
    let ends = |&at: &usize| {
        let i = order[at] as usize;
        matches!(g.ops[i].act, Act::Compute(OpKind::Cat { .. })) && o.region[i] != 0
    };
    let ends: Vec<usize> = (0..order.len()).filter(ends).collect();
    let users = Users::new(g, &order);
    let mut found: Vec<Twins> = Vec::new();
    for pair in ends.windows(2) {
        let taken = |t: &Twins| t.pairs.iter().flatten().any(|&at| at == pair[0]);
        if !found.last().is_some_and(taken) {
            let twins = |a, b| twins(g, o, (&order, &users), a, b);
            found.extend(twins(pair[0], pair[1]).or_else(|| twins(pair[1], pair[0])));
        }
    }
    let mut replaced: BTreeMap<u32, SmallVec<[u32; 4]>> = BTreeMap::new();
    for twins in &found {
        let mut joiner = Joiner {
            g,
            o,
            axis: twins.axis,
            made: BTreeMap::new(),
        };
        for &[a, b] in &twins.pairs {
            let [early, late] = [a.min(b), a.max(b)].map(|at| order[at]);
            replaced.insert(early, SmallVec::new());
            replaced.insert(late, joiner.join([order[a], order[b]], late));
        }
    }
    o.replace(replaced);
}

/// Returns the window that `a` and `b` cover together, if `a` is directly before `b` along a
/// dimension of the same buffer.
fn joined(a: &Value, b: &Value, axis: usize) -> Option<Value> {
    if a.root != b.root || a.dtype != b.dtype || a.shape.len() != b.shape.len() {
        return None;
    }
    let stride = b.offset.checked_sub(a.offset)? / a.shape[axis];
    let fits = |v: &Value| v.shape[axis] == 1 || v.strides[axis] == stride;
    let mut others = (0..a.shape.len()).filter(|&d| d != axis);
    let alike = |d| a.shape[d] == b.shape[d] && (a.shape[d] == 1 || a.strides[d] == b.strides[d]);
    let next = b.offset == a.offset + stride * a.shape[axis] && stride != 0;
    (next && fits(a) && fits(b) && others.all(alike)).then(|| {
        let mut value = a.clone();
        value.shape[axis] += b.shape[axis];
        value.strides[axis] = stride;
        value
    })
}

/// Returns whether a value is the same everywhere along a dimension of a result of `rank`, counted
/// from the first.
fn constant_along(v: &Value, axis: usize, rank: usize) -> bool {
    let own = (axis + v.shape.len()).checked_sub(rank);
    own.is_none_or(|d| v.shape[d] == 1)
}

/// Returns whether an op computes the same from each element along a dimension of its result.
fn treats_alike(op: &Op, axis: usize) -> bool {
    let along =
        matches!(op.act, Act::Compute(OpKind::Cat(op::Cat { axis: a })) if usize::from(a) == axis);
    elementwise(op) && !along && op.outputs.len() == 1
}

/// Returns the chains that end at two positions of the order, if they are equal, work on adjacent
/// values, and no other op interferes between them.
fn twins(
    g: &Graph,
    o: &Orders,
    (order, users): (&[u32], &Users),
    a: usize,
    b: usize,
) -> Option<Twins> {
    let op = |at: usize| &g.ops[order[at] as usize];
    let root = |v: ValueId| g.value(v).root;
    let [x, y] = [a, b].map(|at| g.value(op(at).outputs[0]));
    let axis = (0..x.shape.len()).find(|&axis| joined(x, y, axis).is_some())?;
    let [first, second] = [a, b].map(|at| inplace::cone(g, o, order, at));
    if first.len() != second.len() {
        return None;
    }
    let chains = || first.iter().chain(&second).copied();
    let others = |at: &usize| !first.contains(at) && !second.contains(at);
    let own = |v: ValueId| {
        inplace::filled(g, g.value(v)).is_some() && !users.of(root(v)).iter().any(others)
    };
    let relation = |v: ValueId, w: ValueId, rank: usize| {
        let (x, y) = (g.value(v), g.value(w));
        let ranked = x.shape.len() == rank && y.shape.len() == rank;
        let mut dims = x.shape.iter().zip(&y.shape).enumerate();
        if x == y && constant_along(x, axis, rank) {
            Some(Relation::Same)
        } else if ranked && joined(x, y, axis).is_some() {
            Some(Relation::Next)
        } else {
            let alike = x.dtype == y.dtype && dims.all(|(d, (n, m))| d == axis || n == m);
            (ranked && alike && own(v) && own(w)).then_some(Relation::Own)
        }
    };
    let mut partner: BTreeMap<Root, Root> = BTreeMap::new();
    for (&i, &j) in first.iter().zip(&second) {
        let (x, y) = (op(i), op(j));
        if x.act != y.act || x.inputs.len() != y.inputs.len() || !treats_alike(x, axis) {
            return None;
        }
        let rank = g.value(x.outputs[0]).shape.len();
        for (v, w) in operands(x).zip(operands(y)) {
            if let Relation::Own = relation(v, w, rank)? {
                (*partner.entry(root(v)).or_insert(root(w)) == root(w)).then_some(())?;
            }
        }
    }
    // Ops between them neither read the result of the earlier one nor change its inputs.
    let begin = first[0].min(second[0]);
    for i in (begin..a.max(b)).filter(others) {
        for c in chains() {
            let made = op(c)
                .outputs
                .iter()
                .filter(|&&v| touches(g, op(i), root(v)));
            let read = op(c).inputs.iter().filter(|&&v| writes(g, op(i), root(v)));
            for &v in made.chain(read) {
                let columns = Columns::of(g, order, users, g.value(v))?;
                columns.spared(g, op(i), root(v)).then_some(())?;
            }
        }
    }
    let pairs = first.into_iter().zip(second).map(|(a, b)| [a, b]);
    Some(Twins {
        axis,
        pairs: pairs.collect(),
    })
}

fn writes(g: &Graph, op: &Op, root: Root) -> bool {
    !op.is_view() && op.outputs.iter().any(|&v| g.value(v).root == root)
}

/// Joins two ops into one, along one dimension.
struct Joiner<'g> {
    g: &'g mut Graph,
    o: &'g mut Orders,
    axis: usize,
    /// Values that fill the buffers of pairs, by the first buffer.
    made: BTreeMap<Root, ValueId>,
}

impl Joiner<'_> {
    /// Adds one op in place of two, in the module and region of `late`, with the views that connect
    /// it to its operands.
    fn join(&mut self, pair: [u32; 2], late: u32) -> SmallVec<[u32; 4]> {
        let [first, second] = pair.map(|i| self.g.ops[i as usize].clone());
        let axis = self.axis as u8;
        let mut ops = SmallVec::new();
        let mut inputs: SmallVec<[ValueId; 4]> = SmallVec::new();
        for (&x, &y) in first.inputs.iter().zip(&second.inputs) {
            let both = self.together(x, y);
            if both != x {
                let join = Act::View(View::Join { axis });
                ops.push(self.o.add(self.g, late, join, &[x, y], &[both]));
            }
            inputs.push(both);
        }
        let (x, y) = (first.outputs[0], second.outputs[0]);
        let both = self.together(x, y);
        ops.push(self.o.add(self.g, late, first.act, &inputs, &[both]));
        ops.push(self.o.add(
            self.g,
            late,
            Act::View(View::Split { axis }),
            &[both],
            &[x, y],
        ));
        ops
    }

    /// Returns the value that covers two values, one after the other, or that is both.
    fn together(&mut self, x: ValueId, y: ValueId) -> ValueId {
        let (first, second) = (self.g.value(x), self.g.value(y));
        if first == second {
            return x;
        }
        if let Some(&known) = self.made.get(&first.root) {
            return known;
        }
        let id = ValueId(self.g.values.len() as u32);
        let value = joined(first, second, self.axis);
        let value = value.unwrap_or_else(|| self.stack(x, y, id));
        self.g.push_value(value, u32::MAX)
    }

    /// Makes a buffer for what filled two.
    fn stack(&mut self, x: ValueId, y: ValueId, first: ValueId) -> Value {
        let (mut value, other) = (self.g.value(x).clone(), self.g.value(y));
        value.shape[self.axis] += other.shape[self.axis];
        value.strides = strides::dense_like(&value.shape, &value.strides);
        let bytes = value.numel() * value.dtype.size();
        self.made.insert(value.root, first);
        if let Root::Buffer(b) = value.root {
            let like = self.g.buffers[b as usize];
            value.root = Root::Buffer(self.g.buffers.len() as u32);
            self.g.buffers.push(Buffer {
                bytes,
                first,
                ..like
            });
        }
        value
    }
}
