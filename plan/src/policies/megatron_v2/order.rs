//! Facts that depend on the model alone: the order in which units are gathered, and what backward
//! needs from them.

use super::Pending;
use crate::compile::tape::TapeOp;
use crate::ir::{ModuleId, Source, UnitId};
use crate::lower::inputs::LoweringInputs;

/// The fixed orders of `FsdpContext`.
pub(super) struct Orders {
    /// Registration order (`named_modules`).
    forward: Vec<UnitId>,
    /// Each module before its children, and the children in reverse order
    /// (`_collect_backward_order`).
    backward: Vec<UnitId>,
}

impl Orders {
    pub(super) fn new(inputs: &LoweringInputs<'_>) -> Self {
        let modules = &inputs.tape.modules;
        let mut unit_at = vec![None; modules.len()];
        for unit in &inputs.forward_order {
            unit_at[inputs.unit(*unit).spec.modules[0].index()] = Some(*unit);
        }
        let mut children: Vec<Vec<usize>> = vec![Vec::new(); modules.len()];
        for (m, module) in modules.iter().enumerate() {
            if let Some(ModuleId(parent)) = module.parent {
                children[parent as usize].push(m);
            }
        }
        // Depth first, the last child first.
        let (mut backward, mut stack) = (Vec::new(), vec![0]);
        while let Some(m) = stack.pop() {
            // A unit that backward does not reach (frozen, before the first trained one) would stay
            // gathered until the next forward.
            let unit: Option<UnitId> = unit_at[m];
            backward.extend(unit.filter(|u| inputs.backward_order.contains(u)));
            stack.extend(&children[m]);
        }
        Self {
            forward: unit_at.into_iter().flatten().collect(),
            backward,
        }
    }

    /// Returns the unit after this one.
    pub(super) fn next(&self, unit: UnitId, backward: bool) -> Option<UnitId> {
        let order = if backward {
            &self.backward
        } else {
            &self.forward
        };
        let at = order.iter().position(|u| *u == unit)?;
        order.get(at + 1).copied()
    }
}

/// Returns what each unit needs in a backward, by unit.
pub(super) fn pending(inputs: &LoweringInputs<'_>) -> Vec<Pending> {
    let mut pending = vec![Pending::default(); inputs.units.len()];
    let managed = inputs.groups.iter().filter(|g| !g.ignored);
    for group in managed.filter(|g| g.requires_grad) {
        pending[group.unit.index()].trained += group.params.len();
    }
    for (at, op) in inputs.tape.backward.iter().enumerate() {
        let TapeOp::Launch { reads, writes, .. } = *op else {
            continue;
        };
        for o in &inputs.tape.operands[reads as usize..writes as usize] {
            if let Source::Param(p) = o.source {
                let (g, _) = inputs.home[p.index()];
                if inputs.group(g).ignored {
                    continue;
                }
                pending[inputs.group(g).unit.index()].last_read = Some(at as u32);
            }
        }
    }
    pending
}
