//! Shared experts that overlap with the exchange of tokens.
//!
//! In the order of the model's code, forward computes a shared expert after the routed experts have
//! sent their results, and backward before it sends gradients to them. Here, the ops of a shared
//! expert are moved behind the exchanges of their layer, so that they overlap with them: all ops up
//! to its last linear layer with the first exchange, and the rest with the second one, as with
//! Megatron-LM's `moe_shared_expert_overlap`. In backward, the last linear layer overlaps with the
//! first exchange. Values stay the same, because sums keep the order of their terms.

use super::schedule::Orders;
use crate::graph::{Act, Graph, Root, SharedOverlap};
use crate::ir::{Module, ModuleId};
use crate::models::ModelGraph;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Moves the ops of shared experts next to exchanges of tokens, unless they belong to another unit
/// than these: hooks of units stay where they are. `units` has the unit of each module.
pub(super) fn shared_experts(m: &ModelGraph, o: &mut Orders, units: &[u32]) {
    for &of in m.graph.overlaps.iter().filter(|of| of.overlaps) {
        let layer = Layer {
            g: &m.graph,
            modules: m.modules(),
            units,
            of,
        };
        layer.place(&mut o.forward, &o.section, true);
        layer.place(&mut o.backward, &o.section, false);
    }
}

/// Returns whether all of these ops are those of one shared expert that can run while tokens
/// travel. A matmul among them that took in an op of what the tokens bring would wait for it.
/// Whether the shared expert overlaps does not matter, so that results are equal to the last bit.
pub(super) fn is_shared(g: &Graph, modules: &[Module], ops: &[u32]) -> bool {
    let module = |op: u32| g.ops[op as usize].module;
    let all =
        |of: &SharedOverlap| (ops.iter()).all(|&op| is_within(modules, module(op), of.shared));
    g.overlaps.iter().any(all)
}

/// Returns whether a module is `outer` or inside it.
fn is_within(modules: &[Module], module: ModuleId, outer: ModuleId) -> bool {
    let mut at = Some(module);
    while let Some(here) = at {
        if here == outer {
            return true;
        }
        at = modules[here.index()].parent;
    }
    false
}

/// A layer of experts with a shared one.
struct Layer<'m> {
    g: &'m Graph,
    modules: &'m [Module],
    units: &'m [u32],
    of: SharedOverlap,
}

impl Layer<'_> {
    fn module(&self, op: u32) -> ModuleId {
        self.g.ops[op as usize].module
    }

    /// Returns whether an op belongs to `m` or to a module inside it.
    fn is_in(&self, op: u32, m: ModuleId) -> bool {
        is_within(self.modules, self.module(op), m)
    }

    fn is_shared(&self, op: u32) -> bool {
        self.is_in(op, self.of.shared)
    }

    fn is_exchange(&self, op: u32) -> bool {
        let communicates = matches!(self.g.ops[op as usize].act, Act::Collective(_));
        communicates && self.is_in(op, self.of.layer)
    }

    /// Places the ops of a pass, and of the forward that it recomputes.
    fn place(&self, order: &mut [u32], sections: &[Option<u32>], forward: bool) {
        let section = |op: u32| sections[op as usize];
        let shared = order.iter().copied().filter(|&op| self.is_shared(op));
        let passes: BTreeSet<Option<u32>> = shared.map(section).collect();
        for pass in passes {
            let of_pass = |op: u32| section(op) == pass;
            let moves = |&op: &u32| of_pass(op) && (self.is_shared(op) || self.is_exchange(op));
            let (Some(start), Some(end)) =
                (order.iter().position(moves), order.iter().rposition(moves))
            else {
                continue;
            };
            let window = &mut order[start..=end];
            if window.iter().all(|&op| of_pass(op)) {
                let placed = self.placed(window, forward || pass.is_some());
                window.copy_from_slice(&placed);
            }
        }
    }

    /// Returns ops in their new order.
    fn placed(&self, window: &[u32], forward: bool) -> Vec<u32> {
        let (shared, others): (Vec<u32>, Vec<u32>) =
            window.iter().partition(|&&op| self.is_shared(op));
        let after = self.last_of_exchanges(&others);
        let unit = |op: u32| self.units[self.module(op).index()];
        let one_unit = |unit_of: u32| shared.iter().all(|&op| unit(op) == unit_of);
        let (Some(&first), Some(&second)) = (after.first(), after.get(1).or(after.first())) else {
            return window.to_vec();
        };
        if ![first, second].into_iter().all(|op| one_unit(unit(op))) {
            return window.to_vec();
        }
        let (early, late) = shared.split_at(self.halves(&shared, forward));
        let mut wanted = Vec::with_capacity(window.len());
        for op in others {
            wanted.push(op);
            for (at, part) in [(first, early), (second, late)] {
                if at == op {
                    wanted.extend(part);
                }
            }
        }
        in_order_of_dependence(self.g, window, &wanted)
    }

    /// Returns how many of the shared expert's ops belong to the first exchange.
    fn halves(&self, shared: &[u32], forward: bool) -> usize {
        let down = |&op: &u32| self.is_in(op, self.of.down);
        match forward {
            true => shared.iter().position(down).unwrap_or(shared.len()),
            false => shared.iter().rposition(down).map_or(0, |at| at + 1),
        }
    }

    /// Returns the last collective of each exchange: a kernel that uses what one of them received
    /// is next.
    fn last_of_exchanges(&self, ops: &[u32]) -> Vec<u32> {
        let (mut all, mut last) = (Vec::new(), None);
        let mut received: HashSet<Root> = HashSet::new();
        let root = |v: &_| self.g.value(*v).root;
        for &i in ops {
            let op = &self.g.ops[i as usize];
            let uses = op.inputs.iter().any(|v| received.contains(&root(v)));
            match op.act {
                Act::Collective(_) if self.is_exchange(i) => {
                    last = Some(i);
                    received.extend(op.outputs.iter().map(root));
                }
                Act::Compute(_) if uses => {
                    all.extend(last.take());
                    received.clear();
                }
                _ => {}
            }
        }
        all.extend(last);
        all
    }
}

/// Returns `wanted`, a permutation of `ops`, with each op behind those that it depends on: those
/// whose results it uses, and, of `ops` before it, those that touch memory that it writes.
fn in_order_of_dependence(g: &Graph, ops: &[u32], wanted: &[u32]) -> Vec<u32> {
    let needs = dependences(g, ops);
    let mut done: HashSet<u32> = HashSet::with_capacity(ops.len());
    let mut out = Vec::with_capacity(ops.len());
    for &op in wanted {
        let mut stack = vec![op];
        while let Some(&top) = stack.last() {
            let missing = needs[&top].iter().find(|need| !done.contains(need));
            match missing {
                Some(&need) => stack.push(need),
                None => {
                    stack.pop();
                    if done.insert(top) {
                        out.push(top);
                    }
                }
            }
        }
    }
    out
}

/// What has used a part of memory so far.
#[derive(Default)]
struct Touched {
    written: Option<u32>,
    read: Vec<u32>,
}

/// Returns, for each op, the ops before it that have to run first.
fn dependences(g: &Graph, ops: &[u32]) -> HashMap<u32, BTreeSet<u32>> {
    let mut memory: HashMap<Root, Touched> = HashMap::new();
    let mut out: HashMap<u32, BTreeSet<u32>> = HashMap::with_capacity(ops.len());
    for &i in ops {
        let op = &g.ops[i as usize];
        let mut needs = BTreeSet::new();
        for v in &op.inputs {
            // Of views, which touch nothing.
            needs.extend(Some(g.producer[v.index()]).filter(|p| out.contains_key(p)));
            let at = memory.entry(g.value(*v).root).or_default();
            needs.extend(at.written);
            at.read.push(i);
        }
        for v in op.outputs.iter().filter(|_| !op.is_view()) {
            let at = memory.entry(g.value(*v).root).or_default();
            needs.extend(at.written.replace(i));
            needs.extend(at.read.drain(..));
        }
        needs.remove(&i);
        out.insert(i, needs);
    }
    out
}
