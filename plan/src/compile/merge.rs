//! Merged projections: linear layers that read one input and whose weights are contiguous become
//! one GEMM.
//!
//! Three GEMMs `y_i = x W_i^T` become `y = x W^T`, where `W` is the range of the full weight buffer
//! that the `W_i` fill, and the `y_i` are columns of `y`. Every view of a `y_i` becomes a strided
//! view of `y`, so that its readers read it in place. In backward, the writer of the gradient of a
//! `y_i` writes its columns of one buffer. The input's gradient is one GEMM instead of several that
//! are added up, and so is the gradient of the weights if their gradients are contiguous too.
//!
//! The merge copies nothing: if a kernel cannot take a strided operand (row reductions, library
//! kernels other than attention), or gradients do not meet in a plain chain of additions, the
//! layers stay separate.

use super::schedule::Orders;
use super::{Sharding, WeightAdjacency};
use crate::autodiff::Ready;
use crate::config::MergeProjections;
use crate::graph::{Act, Buffer, Graph, Op, Root, Value, ValueId, View};
use crate::ir::strides::Strides;
use crate::ir::{ModuleId, ModuleKind, OpKind, ParamId, Shape, op, strides};
use crate::models::ModelGraph;
use crate::recipes::Recipe;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Layers that may be merged, in the order of their weights in memory.
struct Family {
    params: SmallVec<[ParamId; 4]>,
    /// Rows of each weight, which are the columns of each layer's result.
    widths: SmallVec<[u64; 4]>,
    /// Columns of every weight.
    inner: u64,
    /// Whether the gradients of the weights are contiguous too.
    gradients: bool,
    /// Whether forward GEMMs are merged too.
    forward: bool,
}

impl Family {
    /// Returns the number of columns of the merged result.
    fn width(&self) -> u64 {
        self.widths.iter().sum()
    }

    /// Returns the shape of the merged weight.
    fn weight(&self) -> Shape {
        strides::shape(&[self.width(), self.inner])
    }
}

/// Role of a GEMM in a linear layer without bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Forward,
    InputGrad,
    WeightGrad,
}

/// A value's window on the merged buffer.
struct Move {
    value: ValueId,
    offset: u64,
    strides: Strides,
}

/// Additions in which the gradients of one input meet.
struct Chain {
    adds: SmallVec<[u32; 4]>,
    /// The other summand, which comes first.
    outside: Option<ValueId>,
    /// The whole sum.
    sum: ValueId,
}

struct Merger<'g> {
    g: &'g mut Graph,
    o: &'g mut Orders,
    /// Ops that name a buffer, in order.
    uses: Vec<SmallVec<[u32; 4]>>,
    /// GEMMs of linear layers.
    gemms: BTreeMap<(ParamId, Role), SmallVec<[u32; 2]>>,
    /// Ops that replace an op.
    replaced: BTreeMap<u32, SmallVec<[u32; 4]>>,
}

/// Merges what `which` asks for wherever it is possible; notes gradients whose writer changes in
/// `ready`.
pub(super) fn projections(
    m: &mut ModelGraph,
    o: &mut Orders,
    ready: &mut [Ready],
    (which, recipe): (MergeProjections, &dyn Recipe),
    sharding: Sharding<'_>,
) {
    let families = families(m, o, (which, recipe), sharding);
    if families.is_empty() {
        return;
    }
    let mut merger = Merger::new(&mut m.graph, o);
    for family in &families {
        if family.forward {
            merger.forward(family);
        }
        if let Some(writer) = merger.gradients(family) {
            for r in ready
                .iter_mut()
                .filter(|r| family.params.contains(&r.param))
            {
                (r.writer, r.after) = (writer, writer);
            }
        }
    }
    let replaced = merger.replaced;
    o.replace(replaced);
}

/// Returns the role of an op, and its weight.
fn role(g: &Graph, op: &Op) -> Option<(ParamId, Role)> {
    let Act::Compute(OpKind::Gemm(op::Gemm {
        ta,
        tb,
        bias: false,
        accumulate: false,
    })) = op.act
    else {
        return None;
    };
    match (
        ta,
        tb,
        g.value(op.inputs[1]).root,
        g.value(op.outputs[0]).root,
    ) {
        (false, true, Root::Param(p), _) => Some((p, Role::Forward)),
        (false, false, Root::Param(p), _) => Some((p, Role::InputGrad)),
        (true, false, _, Root::Grad(p)) => Some((p, Role::WeightGrad)),
        _ => None,
    }
}

/// Returns layers of compiled code that read the same value in the same half of a block, and whose
/// weights are contiguous.
fn families(
    m: &ModelGraph,
    o: &Orders,
    (which, recipe): (MergeProjections, &dyn Recipe),
    sharding: Sharding<'_>,
) -> Vec<Family> {
    if which == MergeProjections::None {
        return Vec::new();
    }
    let g = &m.graph;
    let mut readers: BTreeMap<(ValueId, u32, bool), SmallVec<[ParamId; 4]>> = BTreeMap::new();
    for &i in &o.forward {
        let (op, region) = (&g.ops[i as usize], o.region[i as usize]);
        let Some((p, Role::Forward)) = role(g, op) else {
            continue;
        };
        let attention = match half(m, op.module) {
            Some(ModuleKind::Attention) => true,
            Some(_) if which != MergeProjections::Qkv => false,
            _ => continue,
        };
        if region != 0 {
            let key = (op.inputs[0], region, attention);
            readers.entry(key).or_default().push(p);
        }
    }
    let mut out = Vec::new();
    for mut params in readers.into_values() {
        params.sort_unstable();
        let consecutive = params.windows(2).all(|p| p[0].0 + 1 == p[1].0);
        let param = |p: &ParamId| &m.tree.params[p.index()];
        let tied = |p: &ParamId| param(p).modules.len() > 1;
        // One weight of one type: an 8-bit part and a part that is not stay apart.
        let float8 = |p: &ParamId| recipe.float8(param(p), m.tree.block_place(param(p)));
        let mixed = params.windows(2).any(|p| float8(&p[0]) != float8(&p[1]));
        if params.len() < 2 || !consecutive || mixed || params.iter().any(tied) {
            continue;
        }
        let near = |p: &ParamId| (sharding.adjacency)(*p);
        let pairs = &params[..params.len() - 1];
        let weight = |p: ParamId| g.value(m.params[p.index()]);
        let inner = weight(params[0]).cols();
        if pairs.iter().any(|p| near(p) == WeightAdjacency::None)
            || params.iter().any(|&p| weight(p).cols() != inner)
        {
            continue;
        }
        out.push(Family {
            widths: params.iter().map(|&p| weight(p).rows()).collect(),
            inner,
            gradients: pairs
                .iter()
                .all(|p| near(p) == WeightAdjacency::WeightsAndGradients),
            forward: which != MergeProjections::Gradients,
            params,
        });
    }
    out
}

/// Returns the half of a block that contains a module.
fn half(m: &ModelGraph, module: ModuleId) -> Option<ModuleKind> {
    let mut at = Some(module);
    while let Some(id) = at {
        let module = &m.modules()[id.index()];
        if matches!(module.kind, ModuleKind::Attention | ModuleKind::Mlp) {
            return Some(module.kind);
        }
        at = module.parent;
    }
    None
}

/// Returns the window in which columns `start..` of rows of `width` hold what `value` shows of rows
/// of `cols`; `None` for a value whose elements are not a regular part of the rows.
fn window(value: &Value, cols: u64, start: u64, width: u64) -> Option<(u64, Strides)> {
    let (row, first) = (value.offset / cols, value.offset % cols);
    let mut last = first;
    let mut strides = value.strides.clone();
    for (stride, &n) in strides.iter_mut().zip(&value.shape) {
        if *stride % cols == 0 {
            *stride = *stride / cols * width;
        } else if n > 1 {
            last += (n - 1) * *stride;
        }
    }
    (last < cols).then_some((row * width + start + first, strides))
}

impl<'g> Merger<'g> {
    fn new(g: &'g mut Graph, o: &'g mut Orders) -> Self {
        let mut uses: Vec<SmallVec<[u32; 4]>> = vec![SmallVec::new(); g.buffers.len()];
        let mut gemms: BTreeMap<_, SmallVec<[u32; 2]>> = BTreeMap::new();
        for &i in o.forward.iter().chain(&o.backward) {
            let op = &g.ops[i as usize];
            for &v in op.inputs.iter().chain(&op.outputs) {
                if let Some(b) = g.buffer_of(v)
                    && uses[b as usize].last() != Some(&i)
                {
                    uses[b as usize].push(i);
                }
            }
            if let Some(key) = role(g, op) {
                gemms.entry(key).or_default().push(i);
            }
        }
        Self {
            g,
            o,
            uses,
            gemms,
            replaced: BTreeMap::new(),
        }
    }

    fn op(&self, i: u32) -> &Op {
        &self.g.ops[i as usize]
    }

    /// Returns the GEMMs of a role, one for each weight; `None` unless each weight has exactly one,
    /// compiled together and outside recomputed forwards.
    fn one_each(&self, f: &Family, role: Role) -> Option<SmallVec<[u32; 4]>> {
        let mut out = SmallVec::new();
        for &p in &f.params {
            match self.gemms.get(&(p, role)).map(|ops| &ops[..]) {
                Some(&[op]) => out.push(op),
                _ => return None,
            }
        }
        let outside = out.iter().all(|&i| self.o.section[i as usize].is_none());
        (outside && self.together(&out)).then_some(out)
    }

    /// Returns whether ops belong to one compiled region.
    fn together(&self, ops: &[u32]) -> bool {
        let region = |i: u32| self.o.region[i as usize];
        ops.iter().all(|&i| region(i) == region(ops[0])) && region(ops[0]) != 0
    }

    /// Returns the buffer that a value covers, in order.
    fn whole(&self, v: ValueId) -> Option<u32> {
        let value = self.g.value(v);
        let b = self.g.buffer_of(v)?;
        let bytes = value.numel() * value.dtype.size();
        let all = value.offset == 0 && self.g.buffers[b as usize].bytes == bytes;
        (all && value.is_contiguous()).then_some(b)
    }

    /// Returns windows on the merged buffer of all values in `buffers`, whose rows are `widths`
    /// long; `None` if one of them cannot be strided. `gemms` are the layers' own GEMMs.
    fn moves(&self, f: &Family, buffers: &[u32], gemms: &[u32]) -> Option<Vec<Move>> {
        let mut out = Vec::new();
        let mut start = 0;
        for (i, (&b, &cols)) in buffers.iter().zip(&f.widths).enumerate() {
            if buffers[..i].contains(&b) {
                return None;
            }
            for &at in &self.uses[b as usize] {
                let op = self.op(at);
                let strided = match op.act {
                    Act::View(_) => true,
                    Act::Collective(_) => false,
                    Act::Compute(kind) => kind.def().takes_strides() || gemms.contains(&at),
                };
                if !strided {
                    return None;
                }
                for &v in op.inputs.iter().chain(&op.outputs) {
                    if self.g.buffer_of(v) == Some(b) {
                        let (offset, strides) = window(self.g.value(v), cols, start, f.width())?;
                        out.push(Move {
                            value: v,
                            offset,
                            strides,
                        });
                    }
                }
            }
            start += cols;
        }
        // A value that several ops name is moved once.
        out.sort_by_key(|m| m.value);
        out.dedup_by_key(|m| m.value);
        Some(out)
    }

    /// Adds one buffer in place of `buffers`, moves their values there, and returns the value that
    /// covers it. `like` is one of the layers' results or its gradient.
    fn stack(&mut self, f: &Family, buffers: &[u32], like: ValueId, moves: Vec<Move>) -> ValueId {
        let mut shape = self.g.value(like).shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = f.width();
        }
        let target = Root::Buffer(self.g.buffers.len() as u32);
        let bytes = buffers.iter().map(|&b| self.g.buffers[b as usize].bytes);
        self.g.buffers.push(Buffer {
            bytes: bytes.sum(),
            first: ValueId(self.g.values.len() as u32),
            ..self.g.buffers[buffers[0] as usize]
        });
        for m in moves {
            let value = &mut self.g.values[m.value.index()];
            (value.root, value.offset, value.strides) = (target, m.offset, m.strides);
        }
        self.value(&shape, target, like)
    }

    /// Adds a value, contiguous from its root's start, of the element type of `like`.
    fn value(&mut self, shape: &[u64], root: Root, like: ValueId) -> ValueId {
        let value = Value {
            shape: strides::shape(shape),
            strides: strides::contiguous(shape),
            offset: 0,
            root,
            ..self.g.value(like).clone()
        };
        self.g.push_value(value, u32::MAX)
    }

    /// Adds an op in the place, module and region of `stead`.
    fn push(&mut self, stead: u32, act: Act, inputs: &[ValueId], outputs: &[ValueId]) -> u32 {
        let id = self.o.add(self.g, stead, act, inputs, outputs);
        self.replaced.entry(stead).or_default().push(id);
        id
    }

    /// Drops ops (those that no op has replaced).
    fn drop(&mut self, ops: &[u32]) {
        for &i in ops {
            self.replaced.entry(i).or_default();
        }
    }

    fn gemm(&mut self, stead: u32, ta: bool, tb: bool, a: ValueId, b: ValueId, c: ValueId) -> u32 {
        let kind = OpKind::Gemm(op::Gemm {
            ta,
            tb,
            bias: false,
            accumulate: false,
        });
        self.push(stead, Act::Compute(kind), &[a, b], &[c])
    }

    /// Merges every forward that runs all layers on one input: the forward itself and a recomputed
    /// one.
    fn forward(&mut self, f: &Family) {
        let mut instances: BTreeMap<(ValueId, Option<u32>), SmallVec<[u32; 4]>> = BTreeMap::new();
        for &p in &f.params {
            for &i in self.gemms.get(&(p, Role::Forward)).into_iter().flatten() {
                let key = (self.op(i).inputs[0], self.o.section[i as usize]);
                instances.entry(key).or_default().push(i);
            }
        }
        for ops in instances.into_values() {
            let all = ops.len() == f.params.len() && self.together(&ops);
            let of = |i: u32| role(self.g, self.op(i)).map(|r| r.0);
            if all && ops.iter().zip(&f.params).all(|(&i, &p)| of(i) == Some(p)) {
                self.merge_forward(f, &ops);
            }
        }
    }

    /// Adds one GEMM, and a view that splits its result. `ops` are by weight.
    fn merge_forward(&mut self, f: &Family, ops: &[u32]) -> Option<()> {
        let results: SmallVec<[ValueId; 4]> = ops.iter().map(|&i| self.op(i).outputs[0]).collect();
        let buffers: SmallVec<[u32; 4]> = results
            .iter()
            .map(|&v| self.whole(v))
            .collect::<Option<_>>()?;
        let moves = self.moves(f, &buffers, ops)?;
        let &first = ops.iter().min()?;
        let [x, w] = [0, 1].map(|n| self.op(first).inputs[n]);
        let merged = self.stack(f, &buffers, results[0], moves);
        let weight = self.value(&f.weight(), Root::Param(f.params[0]), w);
        self.gemm(first, false, true, x, weight, merged);
        let axis = self.g.value(merged).shape.len() as u8 - 1;
        self.push(first, Act::View(View::Split { axis }), &[merged], &results);
        self.drop(ops);
        Some(())
    }

    /// Merges the gradients; returns the op that writes those of all weights, if it is one op.
    fn gradients(&mut self, f: &Family) -> Option<u32> {
        let missing = |role| {
            let none = |p| !self.gemms.contains_key(&(p, role));
            f.params.iter().all(|&p| none(p))
        };
        let find = |role| match missing(role) {
            true => Some(SmallVec::new()),
            false => self.one_each(f, role),
        };
        let (inputs, weights) = (find(Role::InputGrad)?, find(Role::WeightGrad)?);
        let ops: SmallVec<[u32; 8]> = inputs.iter().chain(&weights).copied().collect();
        let n = f.params.len();
        let gradient: SmallVec<[ValueId; 4]> =
            ops.iter().take(n).map(|&i| self.op(i).inputs[0]).collect();
        let same = |(at, &i): (usize, &u32)| self.op(i).inputs[0] == gradient[at % n];
        if ops.is_empty() || !self.together(&ops) || !ops.iter().enumerate().all(same) {
            return None;
        }
        let buffers: SmallVec<[u32; 4]> = gradient
            .iter()
            .map(|&v| self.whole(v))
            .collect::<Option<_>>()?;
        let chain = match inputs.is_empty() {
            true => None,
            false => Some(self.chain(&inputs)?),
        };
        let moves = self.moves(f, &buffers, &ops)?;
        let merged = self.stack(f, &buffers, gradient[0], moves);
        let mut writer = None;
        if f.gradients {
            writer = self.merge_weight_grads(f, merged, &weights);
        }
        if let Some(chain) = chain {
            self.merge_input_grads(f, merged, &inputs, chain);
        }
        writer
    }

    /// Returns the additions in which the input gradients of all layers meet, if they form a chain
    /// that nothing else reads from.
    fn chain(&self, gemms: &[u32]) -> Option<Chain> {
        let mut parts: SmallVec<[u32; 4]> = SmallVec::new();
        let mut adds: SmallVec<[u32; 4]> = SmallVec::new();
        for &i in gemms {
            let part = self.whole(self.op(i).outputs[0])?;
            let [made, read] = self.uses[part as usize][..] else {
                return None;
            };
            if made != i {
                return None;
            }
            parts.push(part);
            adds.push(read);
        }
        adds.sort_unstable();
        adds.dedup();
        let mut seen: SmallVec<[u32; 4]> = SmallVec::new();
        let (mut outside, mut before, mut sum) = (None, None, None);
        for (k, &add) in adds.iter().enumerate() {
            let op = self.op(add);
            if op.act != Act::Compute(OpKind::Add) || !self.together(&[add, gemms[0]]) {
                return None;
            }
            let out = self.whole(op.outputs[0])?;
            let mut follows = k == 0;
            for &v in &op.inputs {
                let same = self.g.value(v).shape == self.g.value(op.outputs[0]).shape;
                match self.g.buffer_of(v) {
                    Some(b) if b == out || !same => return None,
                    Some(b) if parts.contains(&b) => {
                        self.whole(v)?;
                        seen.push(b);
                    }
                    Some(b) if before == Some(b) => {
                        self.whole(v)?;
                        follows = true;
                    }
                    _ if k == 0 && outside.is_none() && same => outside = Some(v),
                    _ => return None,
                }
            }
            let inner = adds.get(k + 1);
            let closed = inner.is_none_or(|&next| self.uses[out as usize][..] == [add, next]);
            if !follows || !closed {
                return None;
            }
            (before, sum) = (Some(out), Some(op.outputs[0]));
        }
        seen.sort_unstable();
        parts.sort_unstable();
        (seen == parts).then_some(())?;
        Some(Chain {
            adds,
            outside,
            sum: sum?,
        })
    }

    fn merge_weight_grads(&mut self, f: &Family, dy: ValueId, ops: &[u32]) -> Option<u32> {
        let &last = ops.iter().max()?;
        let x = self.op(last).inputs[1];
        if ops.iter().any(|&i| self.op(i).inputs[1] != x) {
            return None;
        }
        let like = self.op(last).outputs[0];
        let gradient = self.value(&f.weight(), Root::Grad(f.params[0]), like);
        let writer = self.gemm(last, true, false, dy, x, gradient);
        self.drop(ops);
        Some(writer)
    }

    fn merge_input_grads(
        &mut self,
        f: &Family,
        dy: ValueId,
        ops: &[u32],
        chain: Chain,
    ) -> Option<()> {
        let &last = ops.iter().max()?;
        let w = self.op(last).inputs[1];
        let weight = self.value(&f.weight(), Root::Param(f.params[0]), w);
        let Chain { adds, outside, sum } = chain;
        match outside {
            None => {
                self.gemm(last, false, false, dy, weight, sum);
            }
            Some(other) => {
                let part = self.op(last).outputs[0];
                self.gemm(last, false, false, dy, weight, part);
                let &end = adds.last()?;
                self.push(end, Act::Compute(OpKind::Add), &[other, part], &[sum]);
            }
        }
        self.drop(ops);
        self.drop(&adds);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;

    fn value(shape: &[u64], strides: &[u64], offset: u64) -> Value {
        Value {
            shape: strides::shape(shape),
            strides: strides.iter().copied().collect(),
            offset,
            dtype: DType::F32,
            root: Root::Buffer(0),
            requires_grad: false,
        }
    }

    /// Rows of 6 columns that become columns 4.. of rows of 13.
    #[test]
    fn windows_keep_rows_and_columns() {
        let at = |v: Value| window(&v, 6, 4, 13).map(|(o, s)| (o, s.to_vec()));
        assert_eq!(at(value(&[5, 6], &[6, 1], 0)), Some((4, vec![13, 1])));
        // The second half of each of two heads of 3, heads before rows.
        assert_eq!(
            at(value(&[2, 5, 2], &[3, 6, 1], 1)),
            Some((5, vec![3, 13, 1]))
        );
        // The third row on, and a repeated dimension.
        assert_eq!(
            at(value(&[4, 3, 6], &[0, 6, 1], 12)),
            Some((30, vec![0, 13, 1]))
        );
        assert_eq!(at(value(&[30], &[1], 0)), None, "runs over the rows' ends");
        assert_eq!(at(value(&[2, 4], &[6, 1], 3)), None, "as well");
    }
}
