//! Lifetimes of buffers over a list of steps.
//!
//! A buffer is allocated by the first step that writes it and freed after the last that uses it. In
//! eager code, two things hold it longer: all operands of an autograd node live until the node
//! returns, and local variables of the model's code live until they go out of scope. Compiled code
//! holds nothing longer and keeps what only one kernel uses in registers. It writes a result over
//! an operand that dies in the same kernel and belongs to the same graph (made by it, or saved by
//! its forward; not an input of it).

use super::gemm_fusion;
use super::inplace;
use super::schedule::Step;
use crate::graph::{Act, Graph, Op, Root, Value, ValueId};
use crate::ir::OpKind;
use crate::models::declare::Tree;
use crate::ops::Fusion;

pub(super) const NONE: u32 = u32::MAX;

/// First and last step of each buffer.
pub(super) struct Liveness {
    pub(super) first: Vec<u32>,
    pub(super) last: Vec<u32>,
    /// Whether a buffer lives only inside one fused kernel.
    pub(super) internal: Vec<bool>,
    /// The buffer whose memory a buffer takes over; `NONE` if it gets its own.
    pub(super) takes: Vec<u32>,
    /// The buffer that takes over; `NONE` if the memory is freed.
    pub(super) taken: Vec<u32>,
    /// `(step, buffer)` sorted.
    pub(super) allocs: Vec<(u32, u32)>,
    pub(super) frees: Vec<(u32, u32)>,
    /// Step of each op.
    pub(super) step_of: Vec<u32>,
}

impl Liveness {
    /// Computes lifetimes over `steps`, of which backward starts at `split`; the buffers in `keep`
    /// live until the end.
    pub(super) fn new(g: &Graph, tree: &Tree, steps: &[&Step], split: usize, keep: &[u32]) -> Self {
        let n = g.buffers.len();
        let mut l = Self {
            first: vec![NONE; n],
            last: vec![0; n],
            internal: vec![false; n],
            takes: vec![NONE; n],
            taken: vec![NONE; n],
            allocs: Vec::new(),
            frees: Vec::new(),
            step_of: vec![NONE; g.ops.len()],
        };
        let shared = l.spans(g, steps, split);
        let end = steps.len().saturating_sub(1) as u32;
        for &b in keep {
            l.last[b as usize] = end;
        }
        l.internalize(steps, keep);
        l.reuse(&Reuse {
            g,
            tree,
            steps,
            split,
            keep,
            shared,
        });
        let used = (0..n).filter(|&b| l.first[b] != NONE && !l.internal[b]);
        l.allocs = used.map(|b| (l.first[b], b as u32)).collect();
        l.frees = l
            .allocs
            .iter()
            .map(|&(_, b)| (l.last[b as usize], b))
            .collect();
        l.allocs.sort_unstable();
        l.frees.sort_unstable();
        l
    }

    /// Fills `first` and `last`; returns which buffers several regions of forward use.
    fn spans(&mut self, g: &Graph, steps: &[&Step], split: usize) -> Vec<bool> {
        let mut shared = vec![false; self.first.len()];
        let mut eager = vec![false; self.first.len()];
        let mut node_end = vec![0; g.nodes as usize + 1];
        for (s, step) in steps.iter().enumerate() {
            for &op in &step.ops {
                self.step_of[op as usize] = s as u32;
                node_end[g.ops[op as usize].node as usize] = s as u32;
            }
        }
        for (s, step) in steps.iter().enumerate() {
            let s = s as u32;
            for &op in &step.ops {
                let op = &g.ops[op as usize];
                // What the host reads is alive until it has.
                if op.is_view() && !op.is_host_sizes() {
                    continue;
                }
                let end = if step.region == 0 {
                    node_end[op.node as usize]
                } else {
                    s
                };
                let used = step.used.map(|used| used.offsets);
                for &v in op.inputs.iter().chain(&op.outputs).chain(&used) {
                    if let Root::Buffer(b) = g.value(v).root {
                        let b = b as usize;
                        if self.first[b] == NONE {
                            self.first[b] = s;
                            eager[b] = step.region == 0;
                        }
                        self.last[b] = self.last[b].max(end);
                        let made_in = steps[self.first[b] as usize].region;
                        shared[b] |= (s as usize) < split && step.region != made_in;
                    }
                }
            }
        }
        for &(op, b) in &g.holds {
            let (s, b) = (self.step_of[op as usize], b as usize);
            if s != NONE && self.first[b] != NONE && eager[b] {
                self.last[b] = self.last[b].max(s);
            }
        }
        for &(op, b) in &g.saved {
            let (s, b) = (self.step_of[op as usize], b as usize);
            if s != NONE && self.first[b] != NONE {
                self.last[b] = self.last[b].max(s);
            }
        }
        shared
    }

    fn internalize(&mut self, steps: &[&Step], keep: &[u32]) {
        for b in 0..self.first.len() {
            let s = self.first[b];
            if s != NONE && s == self.last[b] && !keep.contains(&(b as u32)) {
                let step = steps[s as usize];
                self.internal[b] = step.region != 0 && step.ops.len() > 1;
            }
        }
    }

    /// Lets results take over operands of equal size that are read in the same order and die, in
    /// generated kernels and in GEMMs that accumulate.
    fn reuse(&mut self, r: &Reuse<'_>) {
        for (s, step) in r.steps.iter().enumerate() {
            let generated = |&i: &u32| match r.g.ops[i as usize].act {
                Act::Compute(kind) => !matches!(kind.fusion(), Fusion::Extern | Fusion::Alone),
                Act::View(_) | Act::Collective(_) => false,
            };
            let ours =
                || step.ops.iter().all(generated) || gemm_fusion::factors(r.g, step).is_some();
            if step.region != 0 && (ours() || added_to(r.g, step).is_some()) {
                self.reuse_in(r, s as u32, step);
            }
        }
    }

    fn reuse_in(&mut self, r: &Reuse<'_>, s: u32, step: &Step) {
        let g = r.g;
        let ops = || step.ops.iter().map(|&i| &g.ops[i as usize]);
        let whole = |b: u32| {
            ops()
                .flat_map(|op| op.inputs.iter().chain(&op.outputs))
                .all(|&v| {
                    let x = g.value(v);
                    x.root != Root::Buffer(b)
                        || x.is_contiguous()
                            && x.numel() * x.dtype.size() == g.buffers[b as usize].bytes
                })
        };
        // Sums over rows are complete when all rows have been read.
        let in_rows = |op: &&Op| match op.act {
            Act::Compute(kind) => !kind.sums_rows(),
            Act::View(_) => true,
            Act::Collective(_) => false,
        };
        // GEMMs read their factors until the end, and write before their epilogue has read
        // everything.
        let factors = gemm_fusion::factors(g, step).unwrap_or_default();
        let behind = |op: &&Op| factors.is_empty() || inplace::elementwise(op);
        let made = ops().filter(in_rows).filter(behind);
        for &v in made.flat_map(|op| &op.outputs) {
            let Some(w) = g.buffer_of(v) else { continue };
            let wi = w as usize;
            let fresh = self.first[wi] == s && !self.internal[wi] && self.takes[wi] == NONE;
            if !fresh || r.keep.contains(&w) || !whole(w) {
                continue;
            }
            let fits = |old: u32| {
                let oi = old as usize;
                let dies = self.first[oi] < s && self.last[oi] == s && self.taken[oi] == NONE;
                dies && !r.keep.contains(&old)
                    && r.compatible(old, w)
                    && r.donated(self.first[oi], s, old)
            };
            let operands = ops()
                .flat_map(|op| &op.inputs)
                .filter(|&&x| !factors.contains(&g.value(x).root))
                .filter(|&&x| added_to(g, step).is_none_or(|before| before == x))
                .filter_map(|&x| g.buffer_of(x));
            let free = |&old: &u32| fits(old) && whole(old) && !reorders(g, step, old);
            if let Some(old) = operands.into_iter().find(free) {
                self.takes[wi] = old;
                self.taken[old as usize] = w;
            }
        }
    }
}

/// Returns whether a step uses a buffer, or what it makes of it, in an order other than that of the
/// memory. A kernel that wrote over it would spoil what it has yet to read.
fn reorders(g: &Graph, step: &Step, buffer: u32) -> bool {
    let mut of_it = vec![buffer];
    let mut made: Vec<&Value> = Vec::new();
    for op in step.ops.iter().map(|&i| &g.ops[i as usize]) {
        let otherwise = |x: &Value| {
            let by = made.iter().rev().find(|m| m.root == x.root);
            by.is_some_and(|by| by.numel() == x.numel() && !in_order(by, x))
        };
        let inputs = || op.inputs.iter().map(|&v| g.value(v));
        let mut taken =
            inputs().filter(|x| matches!(x.root, Root::Buffer(b) if of_it.contains(&b)));
        if let Some(first) = taken.next() {
            let cat = matches!(inplace::kind(op), Some(OpKind::Cat { .. }));
            if cat || otherwise(first) || taken.any(otherwise) {
                return true;
            }
            of_it.extend(op.outputs.iter().filter_map(|&v| g.buffer_of(v)));
        }
        made.extend(op.outputs.iter().map(|&v| g.value(v)));
    }
    false
}

/// Returns whether one value has the elements of another in their order.
fn in_order(a: &Value, b: &Value) -> bool {
    let alike = a.shape == b.shape && a.strides == b.strides;
    a.offset == b.offset && (alike || a.is_contiguous() && b.is_contiguous())
}

/// Returns what a step's GEMM accumulates into: the only operand that its result may overwrite.
fn added_to(g: &Graph, step: &Step) -> Option<ValueId> {
    let &[op] = &step.ops[..] else { return None };
    let op = &g.ops[op as usize];
    let Act::Compute(mut kind) = op.act else {
        return None;
    };
    let adds = kind.accumulates().is_some_and(|adds| *adds);
    op.inputs.last().copied().filter(|_| adds)
}

/// Facts that decide whether memory may be taken over.
struct Reuse<'a> {
    g: &'a Graph,
    tree: &'a Tree,
    steps: &'a [&'a Step],
    split: usize,
    keep: &'a [u32],
    /// Used by several regions of forward.
    shared: Vec<bool>,
}

impl Reuse<'_> {
    /// Returns whether two buffers have equal size and type, and do not belong to two different
    /// blocks, so that blocks stay alike.
    fn compatible(&self, old: u32, new: u32) -> bool {
        let (a, b) = (self.g.buffers[old as usize], self.g.buffers[new as usize]);
        let blocks = (self.tree.block_of(a.module), self.tree.block_of(b.module));
        a.bytes == b.bytes && a.dtype == b.dtype && !matches!(blocks, (Some(x), Some(y)) if x != y)
    }

    /// Returns whether the graph of step `s` owns the buffer: it made it, or its forward (or
    /// recomputed forward) saved it.
    fn donated(&self, made_at: u32, s: u32, buffer: u32) -> bool {
        let (made, here) = (self.steps[made_at as usize], self.steps[s as usize]);
        let saved =
            made.section.is_some() || (made_at as usize) < self.split && s as usize >= self.split;
        made.region == here.region || made.region != 0 && saved && !self.shared[buffer as usize]
    }
}
