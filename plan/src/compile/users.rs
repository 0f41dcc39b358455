//! The kernels that read or write a root value, in a given order of kernels.

use crate::graph::{Graph, Op, Root, ValueId};
use std::collections::HashMap;

/// Returns the values that an op names.
pub(super) fn operands(op: &Op) -> impl Iterator<Item = ValueId> {
    op.inputs.iter().chain(&op.outputs).copied()
}

/// The positions, in an order of ops, of the kernels that read or write part of each root.
pub(super) struct Users {
    of: HashMap<Root, Vec<usize>>,
}

impl Users {
    /// Looks through an order of ops. Views are no kernels.
    pub(super) fn new(g: &Graph, order: &[u32]) -> Self {
        let mut of: HashMap<Root, Vec<usize>> = HashMap::with_capacity(order.len());
        for (at, &i) in order.iter().enumerate() {
            let op = &g.ops[i as usize];
            if op.is_view() {
                continue;
            }
            for v in operands(op) {
                let users = of.entry(g.value(v).root).or_default();
                if users.last() != Some(&at) {
                    users.push(at);
                }
            }
        }
        Self { of }
    }

    /// Returns the positions of a root's kernels, in order.
    pub(super) fn of(&self, root: Root) -> &[usize] {
        self.of.get(&root).map_or(&[], |users| users)
    }

    /// Takes note that all values of a root have moved to another one.
    pub(super) fn moved(&mut self, from: Root, to: Root) {
        let moved = self.of.remove(&from).unwrap_or_default();
        let users = self.of.entry(to).or_default();
        users.extend(moved);
        users.sort_unstable();
        users.dedup();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;
    use crate::models::{self, testing::tiny};

    /// Returns the positions of a root's kernels, from a look at every op.
    fn searched(g: &Graph, order: &[u32], root: Root) -> Vec<usize> {
        let touches = |&at: &usize| {
            let op = &g.ops[order[at] as usize];
            !op.is_view() && operands(op).any(|v| g.value(v).root == root)
        };
        (0..order.len()).filter(touches).collect()
    }

    #[test]
    fn users_of_every_root_are_found_after_moves_too() {
        let s = tiny(Family::Llama);
        let mut g = models::graph(&s).graph;
        let order: Vec<u32> = (0..g.ops.len() as u32).rev().collect();
        let mut users = Users::new(&g, &order);
        let roots: Vec<Root> = g.values.iter().map(|v| v.root).collect();
        for pair in roots.chunks_exact(2).step_by(3) {
            let (from, to) = (pair[0], pair[1]);
            let moved = g.values.iter_mut().filter(|v| v.root == from);
            moved.for_each(|v| v.root = to);
            users.moved(from, to);
        }
        for root in roots {
            assert_eq!(users.of(root), searched(&g, &order, root), "{root:?}");
        }
    }
}
