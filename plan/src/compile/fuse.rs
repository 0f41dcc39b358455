//! Fusion inside a compiled region: elementwise chains, row reductions with their neighbors.
//!
//! Ops are taken in order. A fusible op joins the kernel of a producer, or of an op that reads the
//! same large tensor, if both run over the same elements and no path leads from that kernel through
//! another one back to the op. Library kernels and column reductions are not fused. With
//! mixed-order reductions, the column sums for the gradient of a norm's weight join the backward
//! kernel of the norm, which reads the same tensors (Inductor has the same feature under this
//! name).

use crate::graph::{Act, Graph, Op, Root, Value};
use crate::ir::{ModuleId, OpKind};
use crate::models::ModelGraph;
use crate::ops::Fusion;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Maximum number of memory operands of a fused kernel.
const MAX_OPERANDS: usize = 24;

/// Bits of group indices.
#[derive(Clone, Default)]
struct Bits(SmallVec<[u64; 8]>);

impl Bits {
    fn set(&mut self, i: usize) {
        if self.0.len() <= i / 64 {
            self.0.resize(i / 64 + 1, 0);
        }
        self.0[i / 64] |= 1 << (i % 64);
    }

    fn clear(&mut self, i: usize) {
        if let Some(w) = self.0.get_mut(i / 64) {
            *w &= !(1 << (i % 64));
        }
    }

    fn has(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|w| w >> (i % 64) & 1 == 1)
    }

    fn add(&mut self, o: &Self) {
        if self.0.len() < o.0.len() {
            self.0.resize(o.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&o.0) {
            *a |= b;
        }
    }
}

/// Order in which a kernel runs over its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Walk {
    /// Any.
    Elements,
    /// Whole rows of this many elements, which it reduces.
    Rows(u64),
    /// Tiles of rows and columns: it writes a tensor transposed.
    Tiles,
}

impl Walk {
    /// Returns the order that suits both, if there is one.
    fn and(self, other: Self) -> Option<Self> {
        match (self, other) {
            (Self::Elements, walk) | (walk, Self::Elements) => Some(walk),
            (a, b) => (a == b).then_some(a),
        }
    }
}

/// A kernel under construction.
struct Group {
    /// Positions in the region's order.
    ops: SmallVec<[u32; 4]>,
    /// Number of elements it runs over; `None` for ops that are kernels of their own.
    domain: Option<u64>,
    walk: Walk,
    /// Module whose parameters it uses.
    owner: Option<ModuleId>,
    /// All groups it depends on.
    deps: Bits,
    operands: usize,
}

struct Fuser<'m> {
    g: &'m Graph,
    order: &'m [u32],
    /// Whether column sums may join row kernels.
    mixed: bool,
    /// Block (or outer module) of each module.
    blocks: Vec<ModuleId>,
    groups: Vec<Group>,
    group_of: Vec<u32>,
    last_write: BTreeMap<Root, u32>,
    readers: BTreeMap<Root, SmallVec<[u32; 4]>>,
}

/// Groups the ops of a region into kernels and yields them in an order that respects dependencies,
/// each with the op in whose place it runs, which says its module. With `mixed`, kernels may
/// compute column sums in addition to row operations.
pub(super) fn fuse(
    m: &ModelGraph,
    order: &[u32],
    mixed: bool,
    mut emit: impl FnMut(SmallVec<[u32; 2]>, u32),
) {
    let g = &m.graph;
    let order: Vec<u32> = order
        .iter()
        .copied()
        .filter(|&i| !g.ops[i as usize].is_view())
        .collect();
    let mut f = Fuser {
        g,
        order: &order,
        mixed,
        blocks: outer_modules(m),
        groups: Vec::with_capacity(order.len()),
        group_of: Vec::with_capacity(order.len()),
        last_write: BTreeMap::new(),
        readers: BTreeMap::new(),
    };
    for at in 0..order.len() as u32 {
        f.place(at);
    }
    let mut reached = 0;
    for group in f.topological() {
        let group = &f.groups[group as usize];
        let ops: SmallVec<[u32; 2]> = group.ops.iter().map(|&at| order[at as usize]).collect();
        // Modules are entered in order and never twice.
        reached = reached.max(f.anchor(group));
        emit(ops, order[reached as usize]);
    }
}

/// Returns the child of the root that contains each module.
fn outer_modules(m: &ModelGraph) -> Vec<ModuleId> {
    let modules = m.modules();
    let mut out: Vec<ModuleId> = Vec::with_capacity(modules.len());
    for (i, module) in modules.iter().enumerate() {
        out.push(match module.parent {
            Some(p) if p.0 != 0 => out[p.index()],
            _ => ModuleId(i as u32),
        });
    }
    out
}

/// Returns whether neighbors in the last dimension of a value are apart in memory.
fn is_transposed(value: &Value) -> bool {
    let last = value.shape.last().zip(value.strides.last());
    last.is_some_and(|(&n, &stride)| n > 1 && stride != 1)
}

/// Returns the number of elements an op runs over, and in which order; `None` for ops that are
/// kernels of their own.
fn domain(g: &Graph, op: &Op, kind: OpKind, mixed: bool) -> Option<(u64, Walk)> {
    let value = |v| g.value(v);
    match kind.fusion() {
        Fusion::Extern | Fusion::Alone => None,
        Fusion::Column if !mixed => None,
        // `d_y, x, ..`: as many sums as `x` has columns.
        Fusion::Column => Some((
            value(op.inputs[1]).numel(),
            Walk::Rows(value(op.inputs[1]).cols()),
        )),
        Fusion::Pointwise => {
            let result = value(op.outputs[0]);
            let walk = match is_transposed(result) {
                true => Walk::Tiles,
                false => Walk::Elements,
            };
            Some((result.numel(), walk))
        }
        Fusion::Row => {
            let x = match kind {
                OpKind::RmsNormGrad | OpKind::LayerNormGrad | OpKind::LogSoftmaxGrad => {
                    op.outputs[0]
                }
                _ => op.inputs[0],
            };
            Some((value(x).numel(), Walk::Rows(value(x).cols())))
        }
    }
}

impl Fuser<'_> {
    fn op(&self, at: u32) -> &Op {
        &self.g.ops[self.order[at as usize] as usize]
    }

    /// Returns earlier ops of the region that this one must follow: writers of what it reads, users
    /// of what it writes.
    fn predecessors(&self, at: u32) -> SmallVec<[u32; 8]> {
        let op = self.op(at);
        let mut out: SmallVec<[u32; 8]> = SmallVec::new();
        for &v in &op.inputs {
            out.extend(self.last_write.get(&self.g.value(v).root).copied());
        }
        for &v in &op.outputs {
            let root = self.g.value(v).root;
            out.extend(self.last_write.get(&root).copied());
            out.extend(self.readers.get(&root).into_iter().flatten().copied());
        }
        out
    }

    fn note(&mut self, at: u32) {
        let op = self.op(at).clone();
        for &v in &op.inputs {
            let root = self.g.value(v).root;
            if matches!(root, Root::Buffer(_) | Root::Grad(_)) {
                self.readers.entry(root).or_default().push(at);
            }
        }
        for &v in &op.outputs {
            let root = self.g.value(v).root;
            self.last_write.insert(root, at);
            self.readers.remove(&root);
        }
    }

    fn place(&mut self, at: u32) {
        let op = self.op(at);
        // A collective stays alone, as library kernels do.
        let kind = match op.act {
            Act::Compute(kind) => Some(kind),
            Act::View(_) | Act::Collective(_) => None,
        };
        let shape = kind.and_then(|k| domain(self.g, op, k, self.mixed));
        let owner = op
            .inputs
            .iter()
            .chain(&op.outputs)
            .any(|&v| matches!(self.g.value(v).root, Root::Param(_) | Root::Grad(_)))
            .then(|| self.blocks[op.module.index()]);
        let operands = op.inputs.len() + op.outputs.len();
        let mut preds: SmallVec<[u32; 8]> = self
            .predecessors(at)
            .iter()
            .map(|&p| self.group_of[p as usize])
            .collect();
        preds.sort_unstable();
        preds.dedup();
        let new = Group {
            ops: SmallVec::from_slice(&[at]),
            domain: shape.map(|s| s.0),
            walk: shape.map_or(Walk::Elements, |s| s.1),
            owner,
            deps: Bits::default(),
            operands,
        };
        let kind = kind.filter(|_| shape.is_some());
        let target = kind.and_then(|k| Some((self.choose(at, k, &new, &preds)?, k)));
        let group = match target {
            Some((t, kind)) => {
                self.join(t, new, &preds);
                self.absorb(t, at, kind, &preds)
            }
            None => {
                let id = self.groups.len() as u32;
                self.groups.push(new);
                for &p in &preds {
                    self.depend(id, p);
                }
                id
            }
        };
        self.group_of.push(group);
        self.note(at);
    }

    /// Returns the kernel that an op joins: that of its latest producer, or else one that reads the
    /// same tensor.
    fn choose(&self, at: u32, kind: OpKind, new: &Group, preds: &[u32]) -> Option<u32> {
        let legal = |&t: &u32| {
            self.fits(t, new, kind)
                && preds
                    .iter()
                    .all(|&p| p == t || !self.groups[p as usize].deps.has(t as usize))
        };
        let by_last = |&t: &u32| *self.groups[t as usize].ops.last().unwrap_or(&0);
        if let Some(t) = preds.iter().copied().filter(legal).max_by_key(by_last) {
            return Some(t);
        }
        let domain = new.domain?;
        let mut siblings: SmallVec<[u32; 8]> = SmallVec::new();
        for &v in &self.op(at).inputs {
            let value = self.g.value(v);
            if value.numel() >= domain && matches!(value.root, Root::Buffer(_)) {
                for &r in self.readers.get(&value.root).into_iter().flatten() {
                    siblings.push(self.group_of[r as usize]);
                }
            }
        }
        siblings.into_iter().filter(legal).max_by_key(by_last)
    }

    /// Returns whether two kernels run over the same elements, with rows of one length and
    /// parameters of one block.
    fn fits(&self, t: u32, new: &Group, kind: OpKind) -> bool {
        let group = &self.groups[t as usize];
        let (Some(a), Some(b)) = (group.domain, new.domain) else {
            return false;
        };
        let parts = matches!(kind, OpKind::Cat { .. })
            && a < b
            && group.walk == Walk::Elements
            && self.feeds_only(t, new);
        let same = a == b && group.walk.and(new.walk).is_some();
        let owners = group.owner.is_none() || new.owner.is_none() || group.owner == new.owner;
        (same || parts)
            && owners
            && group.operands + new.operands <= 2 * MAX_OPERANDS
            && group.ops.len() < 64
    }

    /// Returns whether only the op that `new` holds reads the outputs of the kernel's ops so far.
    fn feeds_only(&self, t: u32, new: &Group) -> bool {
        let inputs = &self.op(new.ops[0]).inputs;
        self.groups[t as usize].ops.iter().all(|&at| {
            self.op(at).outputs.iter().all(|&v| {
                let root = self.g.value(v).root;
                let inside = self
                    .readers
                    .get(&root)
                    .into_iter()
                    .flatten()
                    .all(|&r| self.group_of[r as usize] == t);
                let read = inputs.iter().any(|&i| self.g.value(i).root == root)
                    || self.readers.get(&root).is_some_and(|r| !r.is_empty());
                inside && read
            })
        })
    }

    fn join(&mut self, t: u32, new: Group, preds: &[u32]) {
        let group = &mut self.groups[t as usize];
        group.ops.extend(new.ops);
        group.domain = group.domain.max(new.domain);
        group.walk = group.walk.and(new.walk).unwrap_or(group.walk);
        group.owner = group.owner.or(new.owner);
        group.operands += new.operands;
        for &p in preds {
            if p != t {
                self.depend(t, p);
            }
        }
    }

    /// Merges other producers of the op into its kernel where that creates no cycle.
    fn absorb(&mut self, t: u32, at: u32, kind: OpKind, preds: &[u32]) -> u32 {
        for &p in preds {
            if p == t || self.groups[p as usize].ops.is_empty() {
                continue;
            }
            let probe = Group {
                ops: SmallVec::from_slice(&[at]),
                domain: self.groups[t as usize].domain,
                walk: self.groups[t as usize].walk,
                owner: self.groups[t as usize].owner,
                deps: Bits::default(),
                operands: self.groups[t as usize].operands,
            };
            let between = |h: usize| {
                let deps = &self.groups[h].deps;
                h != t as usize
                    && h != p as usize
                    && !self.groups[h].ops.is_empty()
                    && deps.has(p as usize)
            };
            let cycle =
                (0..self.groups.len()).any(|h| between(h) && self.groups[t as usize].deps.has(h));
            if !cycle && self.fits(p, &probe, kind) {
                self.merge(t, p);
            }
        }
        t
    }

    fn merge(&mut self, t: u32, p: u32) {
        let gone = std::mem::take(&mut self.groups[p as usize].ops);
        for &at in &gone {
            self.group_of[at as usize] = t;
        }
        let (deps, walk, owner, operands) = {
            let g = &mut self.groups[p as usize];
            (std::mem::take(&mut g.deps), g.walk, g.owner, g.operands)
        };
        let group = &mut self.groups[t as usize];
        group.ops.extend(gone);
        group.ops.sort_unstable();
        group.walk = group.walk.and(walk).unwrap_or(group.walk);
        group.owner = group.owner.or(owner);
        group.operands += operands;
        group.deps.add(&deps);
        group.deps.clear(p as usize);
        let all = group.deps.clone();
        for h in 0..self.groups.len() {
            if h != t as usize
                && (self.groups[h].deps.has(p as usize) || self.groups[h].deps.has(t as usize))
            {
                let deps = &mut self.groups[h].deps;
                deps.add(&all);
                deps.clear(p as usize);
                deps.set(t as usize);
            }
        }
    }

    /// Makes `a`, and all that depends on `a`, depend on `b`.
    fn depend(&mut self, a: u32, b: u32) {
        if self.groups[a as usize].deps.has(b as usize) {
            return;
        }
        let mut more = self.groups[b as usize].deps.clone();
        more.set(b as usize);
        self.groups[a as usize].deps.add(&more);
        for h in 0..self.groups.len() {
            if self.groups[h].deps.has(a as usize) {
                self.groups[h].deps.add(&more);
            }
        }
    }

    /// Returns the position that decides a kernel's place and module: its last op with a parameter,
    /// or else its first op.
    fn anchor(&self, group: &Group) -> u32 {
        let uses_param = |&&at: &&u32| {
            let op = self.op(at);
            op.inputs
                .iter()
                .chain(&op.outputs)
                .any(|&v| matches!(self.g.value(v).root, Root::Param(_) | Root::Grad(_)))
        };
        *group
            .ops
            .iter()
            .rev()
            .find(uses_param)
            .unwrap_or(&group.ops[0])
    }

    fn topological(&self) -> Vec<u32> {
        let live: Vec<u32> = (0..self.groups.len() as u32)
            .filter(|&i| !self.groups[i as usize].ops.is_empty())
            .collect();
        let mut waiting = vec![0u32; self.groups.len()];
        let mut next: Vec<SmallVec<[u32; 4]>> = vec![SmallVec::new(); self.groups.len()];
        for &a in &live {
            for &b in &live {
                if self.groups[a as usize].deps.has(b as usize) {
                    waiting[a as usize] += 1;
                    next[b as usize].push(a);
                }
            }
        }
        let key = |i: u32| Reverse((self.groups[i as usize].ops[0], i));
        let mut heap: BinaryHeap<Reverse<(u32, u32)>> = live
            .iter()
            .filter(|&&i| waiting[i as usize] == 0)
            .map(|&i| key(i))
            .collect();
        let mut out = Vec::with_capacity(live.len());
        while let Some(Reverse((_, i))) = heap.pop() {
            out.push(i);
            for &n in &next[i as usize] {
                waiting[n as usize] -= 1;
                if waiting[n as usize] == 0 {
                    heap.push(key(n));
                }
            }
        }
        debug_assert_eq!(out.len(), live.len(), "fusion made a cycle");
        out
    }
}
