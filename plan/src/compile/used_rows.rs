//! Kernels between the matmuls of experts compute only rows that contain a token.
//!
//! With expert parallelism, ranks reserve enough rows for all tokens to choose the experts of one
//! rank, but use only the rows before the last offset of [`OpKind::SortExperts`]. Matmuls of
//! experts read and write only these. Generated kernels between two matmuls do so, too, if all
//! their results have the same order of rows. The other rows stay uninitialized and are not read.

use super::schedule::Step;
use crate::graph::{Act, Graph, Op, Root, ValueId};
use crate::ir::OpKind;
use crate::ops::Fusion;
use std::collections::HashMap;

/// The rows that a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Used {
    /// First row of each expert, and the end of the last.
    pub(super) offsets: ValueId,
    /// Rows that there are.
    pub(super) reserved: u64,
    /// Rows that are expected to be used.
    pub(super) expected: u64,
}

impl Used {
    /// Returns what the used rows have of a number that all rows have together.
    pub(super) fn share(self, of_all: u64) -> u64 {
        let share = u128::from(of_all) * u128::from(self.expected) / u128::from(self.reserved);
        share as u64
    }
}

/// Buffers whose rows are in the order of experts.
pub(super) struct Sorted(HashMap<u32, Used>);

impl Sorted {
    /// Finds the buffers of a graph whose ops run in this order.
    pub(super) fn new(g: &Graph, order: &[u32]) -> Self {
        let ops = || order.iter().map(|&i| &g.ops[i as usize]);
        let by_offsets: HashMap<Root, Used> = ops().filter_map(|op| matmul(g, op)).collect();
        let mut of = Self(HashMap::new());
        if by_offsets.is_empty() {
            return of;
        }
        // Where choices find their rows, which offsets belong to them.
        let positions: HashMap<Root, Used> = ops()
            .filter(|op| matches!(op.act, Act::Compute(OpKind::SortExperts(_))))
            .filter_map(|op| {
                let [offsets, position] = [0, 1].map(|n| g.value(op.outputs[n]).root);
                Some((position, *by_offsets.get(&offsets)?))
            })
            .collect();
        for op in ops() {
            let Act::Compute(kind) = op.act else { continue };
            let used = match (kind, matmul(g, op)) {
                (_, Some((_, used))) => Some(used),
                (OpKind::Permute(_), _) => positions.get(&g.value(op.inputs[1]).root).copied(),
                _ if in_rows(kind) => op.inputs.iter().find_map(|&v| of.used(g, v)),
                _ => None,
            };
            if let Some(used) = used {
                let rows = |v: &&ValueId| g.value(**v).rows() == used.reserved;
                let made = op.outputs.iter().filter(rows);
                of.0.extend(made.filter_map(|&v| Some((g.buffer_of(v)?, used))));
            }
        }
        of
    }

    /// Returns the rows of a value that are used, if it has them in the order of experts.
    fn used(&self, g: &Graph, v: ValueId) -> Option<Used> {
        let used = self.0.get(&g.buffer_of(v)?)?;
        (g.value(v).rows() == used.reserved).then_some(*used)
    }

    /// Returns the rows that a generated kernel of these ops computes, if it makes nothing else.
    pub(super) fn of_step(&self, g: &Graph, step: &Step) -> Option<Used> {
        let mut all = None;
        for op in step.ops.iter().map(|&i| &g.ops[i as usize]) {
            let kind = match op.act {
                Act::View(_) => continue,
                Act::Compute(kind) if in_rows(kind) => kind,
                // With what is fused into it.
                Act::Compute(kind @ OpKind::GroupedGemm(_)) if step.ops.len() > 1 => kind,
                _ => return None,
            };
            debug_assert!(!kind.sums_rows());
            for &v in &op.outputs {
                let used = self.used(g, v)?;
                if *all.get_or_insert(used) != used {
                    return None;
                }
            }
        }
        all.filter(|used| used.expected < used.reserved)
    }
}

/// Returns whether rows of the results follow from the same rows of the operands.
fn in_rows(kind: OpKind) -> bool {
    matches!(kind.fusion(), Fusion::Pointwise | Fusion::Row)
}

/// Returns the offsets and rows of a matmul of experts with results in rows, if some rows are
/// expected to stay unused.
fn matmul(g: &Graph, op: &Op) -> Option<(Root, Used)> {
    let (expected, offsets) = match op.act {
        Act::Compute(OpKind::GroupedGemm(gemm)) => (gemm.routed?, op.inputs[2]),
        Act::Compute(OpKind::ScaledGroupedGemm(gemm)) => (gemm.routed?, op.inputs[4]),
        _ => return None,
    };
    let reserved = g.value(op.inputs[0]).rows();
    let used = Used {
        offsets,
        reserved,
        expected,
    };
    Some((g.value(offsets).root, used))
}
