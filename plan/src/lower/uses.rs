//! Number of past and future uses of each unit in a pass.
//!
//! A forward may run a module several times: a block that all layers share, or tables that are
//! partly read before a tower's blocks and partly after them. The unit is gathered and resharded
//! for each use, in forward and in backward. It is reduced after its last use in backward, because
//! autograd sums the gradients of a parameter before it accumulates them.

use super::PlanError;
use super::inputs::LoweringInputs;
use crate::compile::tape::TapeOp;
use crate::config::CompileMode;
use crate::ir::{ModuleId, Source, UnitId};

/// Uses of each unit in a pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    /// Number of uses that have started, including the current one.
    begun: Vec<usize>,
    /// Number of remaining uses.
    left: Vec<usize>,
}

impl Uses {
    /// Starts a pass over the uses `order` of `units` units.
    pub(crate) fn new(units: usize, order: &[UnitId]) -> Self {
        let mut left = vec![0; units];
        for u in order {
            left[u.index()] += 1;
        }
        Self {
            begun: vec![0; units],
            left,
        }
    }

    /// Starts a use of a unit.
    pub(crate) fn begin(&mut self, u: UnitId) {
        self.begun[u.index()] += 1;
        self.left[u.index()] -= 1;
    }

    /// Returns whether the pass uses a unit again.
    pub(crate) fn come_again(&self, u: UnitId) -> bool {
        self.left[u.index()] > 0
    }

    /// Returns the part of `order` that starts with the current use of a unit; empty if `order`
    /// does not contain it.
    pub(crate) fn rest_of<'o>(&self, order: &'o [UnitId], u: UnitId) -> &'o [UnitId] {
        let mut places = (0..order.len()).filter(|&i| order[i] == u);
        let at = places.nth(self.begun[u.index()].saturating_sub(1));
        at.map_or(&[], |at| &order[at..])
    }
}

/// Rejects units whose modules have no forward, although kernels use their parameters: some modules
/// only hold a parameter that the module around them reads. Mode `full` gathers parameters where
/// they are read.
///
/// # Errors
/// Returns [`PlanError::NoForward`] for the first such unit.
pub(super) fn check(inputs: &LoweringInputs<'_>) -> Result<(), PlanError> {
    if inputs.scenario.compile.mode == CompileMode::Full {
        return Ok(());
    }
    let tape = inputs.tape;
    let mut entered = vec![false; tape.modules.len()];
    for op in &tape.forward {
        if let TapeOp::Enter(m) = op {
            entered[m.index()] = true;
        }
    }
    let mut used = vec![false; inputs.units.len()];
    for operand in &tape.operands {
        if let Source::Param(p) | Source::ColumnCodes(p) | Source::Grad(p) = operand.source {
            let (g, _) = inputs.home[p.index()];
            used[inputs.group(g).unit.index()] = true;
        }
    }
    let units = inputs.units.iter().zip(used);
    for (unit, _) in units.filter(|(unit, used)| *used && !unit.spec.is_root) {
        let modules = &unit.spec.modules;
        let ends = [modules.first(), modules.last()];
        let missing = ends.into_iter().flatten().find(|m| !entered[m.index()]);
        if let Some(&m) = missing {
            let path = |m: ModuleId| tape.modules[m.index()].path.clone();
            let around = tape.modules[m.index()].parent;
            return Err(PlanError::NoForward {
                unit: unit.spec.name.clone(),
                module: path(m),
                by: around.filter(|m| m.index() > 0).map(path),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_followed_by_what_comes_after_its_current_use() {
        let [a, b, c] = [1, 2, 3].map(UnitId);
        let order = [a, b, a, c];
        let mut uses = Uses::new(4, &order);
        uses.begin(a);
        assert_eq!(uses.rest_of(&order, a), order);
        assert!(uses.come_again(a) && uses.come_again(b));
        uses.begin(b);
        uses.begin(a);
        assert_eq!(uses.rest_of(&order, a), [a, c]);
        assert!(!uses.come_again(a) && uses.come_again(c));
        assert!(uses.rest_of(&[b, c], a).is_empty());
    }
}
