//! Steps: which ops one kernel executes, in which order.

use crate::autodiff::Backward;
use crate::compile::tape::ModuleId;
use crate::model::graph::{Act, Graph, ModelGraph, View};
use crate::scenario::types::CompileMode;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Ops that run as one kernel (or, eagerly, one op, which may be a view without a kernel).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    /// Ops in execution order.
    pub(super) ops: SmallVec<[u32; 2]>,
    /// Module.
    pub(super) module: ModuleId,
    /// Compiled region, counted from 1; 0 when run eagerly.
    pub(super) region: u32,
}

/// All steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) forward: Vec<Step>,
    pub(super) backward: Vec<Step>,
    pub(super) eval: Vec<Step>,
}

pub(super) fn plan(
    m: &ModelGraph,
    b: &Backward,
    _mode: CompileMode,
    _is_unit: &dyn Fn(ModuleId) -> bool,
) -> Plan {
    let g = &m.graph;
    let end = g.ops.len() as u32;
    Plan {
        forward: eager(g, 0..b.first),
        backward: eager(g, b.first..end),
        eval: eager(g, needed_for_loss(m, 0..b.first)),
    }
}

fn eager(g: &Graph, ops: impl IntoIterator<Item = u32>) -> Vec<Step> {
    ops.into_iter()
        .map(|i| Step {
            ops: smallvec![i],
            module: g.ops[i as usize].module,
            region: 0,
        })
        .collect()
}

/// Ops that the loss depends on: what a validation forward runs.
fn needed_for_loss(m: &ModelGraph, ops: Range<u32>) -> Vec<u32> {
    let g = &m.graph;
    let mut used = vec![false; g.values.len()];
    used[m.loss.index()] = true;
    let mut keep: Vec<u32> = ops
        .rev()
        .filter(|&i| {
            let op = &g.ops[i as usize];
            let needed = op.outputs.iter().any(|v| used[v.index()]);
            if needed {
                let n = if op.act == Act::View(View::Precomputed) {
                    1
                } else {
                    op.inputs.len()
                };
                for v in &op.inputs[..n] {
                    used[v.index()] = true;
                }
            }
            needed
        })
        .collect();
    keep.reverse();
    keep
}
